"""Batches of jagged columns, without a mask: their axes, rows of any ragged dim, shared offsets. Against loops."""

from __future__ import annotations

import gc
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same_tensor
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack import fields
from maskpack.errors import LayoutError, ReplayError
from maskpack.layout.jagged import Jagged
from maskpack.layout.row_layout import layout_of_marks, shared_offsets
from maskpack.nesting import cat, take
from maskpack.nesting.axes import has_masks
from maskpack.packed.batch import PackedBatch
from maskpack.replay import PackedInputs, ReplayOptions


def ragged(rows: list[Tensor], dim: int = 1, offsets: torch.dtype = torch.int64) -> Tensor:
    """A tensor of rows that differ in their dim `dim`, counted with that of the rows, on offsets of its own."""
    bounds = torch.tensor([0, *itertools.accumulate(row.shape[dim - 1] for row in rows)], dtype=offsets)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, dim - 1), bounds, jagged_dim=dim)


def columns(prompts: list[int], responses: list[int], seed: int = 0) -> TensorDict:
    """A batch as verl's V1 trainer holds it: each column with offsets of its own, positions [B, 4, j], no mask."""
    source = np.random.default_rng(seed)
    lengths = [one + other for one, other in zip(prompts, responses, strict=True)]
    ids = [torch.from_numpy(source.integers(5, 99, length)) for length in lengths]
    log_probs = [torch.from_numpy(source.normal(size=(2, count))).float() for count in responses]
    own = {
        "prompts": ragged([row[:count] for row, count in zip(ids, prompts, strict=True)]),
        "responses": ragged([row[count:] for row, count in zip(ids, prompts, strict=True)]),
        "response_mask": ragged([torch.from_numpy(source.integers(0, 2, count)) for count in responses]),
        "input_ids": ragged(ids),
        "position_ids": ragged([torch.arange(length).expand(4, -1).clone() for length in lengths], 2),
        "old_log_probs": ragged([row[0] for row in log_probs]),
        "rollout_log_probs": ragged([row[1] for row in log_probs]),
        "index": torch.arange(len(prompts)),
    }
    return TensorDict(own, [len(prompts)])


COUNTS = [([2, 3, 1], [4, 1, 5]), ([4], [4]), ([0, 2], [0, 2]), ([3, 3, 3], [2, 2, 2]), ([1, 5, 2, 7], [0, 3, 0, 1])]


def same_rows(got: Any, want: Any) -> None:
    """Row by row, and the shape but for the symbol of the ragged dim."""
    assert got._ragged_idx == want._ragged_idx
    sizes = [[size for size in x.shape if isinstance(size, int)] for x in (got, want)]
    assert sizes[0] == sizes[1]
    for one, other in zip(got.unbind(), want.unbind(), strict=True):
        assert_same_tensor(one, other)


def same(got: TensorDict, want: TensorDict) -> None:
    for name, value in want.items():
        (same_rows if value.is_nested else assert_same_tensor)(got[name], value)


@pytest.mark.parametrize(("prompts", "responses"), COUNTS)
def test_columns_without_a_mask_go_through_every_entrance(prompts: list[int], responses: list[int], recwarn) -> None:
    batch, rows = columns(prompts, responses), range(len(prompts))
    packed = mp.compress(batch, strict_mask_nesting=True)
    assert packed.layouts.keys() == {"prompt", "response", "sequence"}
    same(mp.decompress(packed), batch)
    same(mp.decompress(packed, format="nested"), batch)
    same(mp.decompress(PackedBatch.from_bytes(packed.to_bytes())), batch)
    nested = mp.nest_batch_by_mask(batch, strict_mask_nesting=True)
    same(mp.unnest_batch_by_mask(nested), batch)
    same(mp.decompress(mp.compress(nested)), nested.exclude("_maskpack"))
    order = [*reversed(rows), 0]
    for got in (take(batch, order), mp.decompress(packed.take(order)), take(nested, order)):
        for name, value in batch.items():
            for row, at in zip(got[name].unbind(), order, strict=True):
                assert_same_tensor(row, value.unbind()[at])
    same(take(cat([batch, take(batch, order)]), [*rows]), batch)
    assert not recwarn.list


@pytest.mark.parametrize(("prompts", "responses"), COUNTS[:4])
@pytest.mark.parametrize("form", ["columns", "nested", "packed", "bytes"])
def test_the_response_is_the_end_of_its_row(prompts: list[int], responses: list[int], form: str) -> None:
    batch: Any = columns(prompts, responses)
    given = batch["responses"]
    ways: dict[str, Any] = {"nested": mp.nest_batch_by_mask, "packed": mp.compress}
    ways["bytes"] = lambda batch: PackedBatch.from_bytes(mp.compress(batch).to_bytes())
    inputs = PackedInputs.of(ways.get(form, lambda batch: batch)(batch), options=ReplayOptions(no_prompt="skip"))
    starts = np.cumsum([0, *(one + other for one, other in zip(prompts, responses, strict=True))])
    scored = [
        starts[row] + prompts[row] + at
        for row, count in enumerate(responses)
        for at in range(count)
        if prompts[row] + at
    ]
    assert inputs.predict.tolist() == [place - 1 for place in scored]
    assert inputs.position_ids.shape == (4, 1, starts[-1])
    assert inputs.response.lengths.tolist() == responses
    if form == "columns":
        assert inputs.response.offsets is given.offsets()


def test_a_loss_mask_that_is_jagged_on_the_sequence_is_the_response() -> None:
    batch = columns([2, 3, 1], [4, 1, 5]).select("input_ids", "position_ids")
    marks = [[0, 0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0, 0, 1]]
    batch["loss_mask"] = ragged([torch.tensor(row) for row in marks])
    predict = [at - 1 for at, mark in enumerate(itertools.chain(*marks)) if mark]
    own = mp.RL_FIELDS | mp.MaskNestingRegistry({}, {"response": (mp.MaskAxis("loss_mask"),)})
    for form in (batch, mp.nest_batch_by_mask(batch), mp.compress(batch)):
        inputs = PackedInputs.of(form)
        assert inputs.predict.tolist() == predict
        assert inputs.response.lengths.tolist() == [6, 4, 6]
        preset = PackedInputs.of(form, options=ReplayOptions(registry=own))
        assert preset.predict.tolist() == predict
        assert preset.response.lengths.tolist() == [3, 1, 3]
    assert PackedInputs.of(batch).response.offsets is batch["input_ids"].offsets()
    batch["loss_mask"] = ragged([torch.tensor(row) for row in ([1, 0, 1, 1], [1], [1, 1, 0, 0, 1])])
    with pytest.raises(ReplayError, match='"loss_mask" has 10 tokens in rows of other lengths than the sequence'):
        PackedInputs.of(batch)
    with pytest.raises(LayoutError, match='"loss_mask" has 10 entries in 3 rows; the axis "sequence" has 16 tokens'):
        PackedInputs.of(batch, options=ReplayOptions(registry=own))
    axis = {"response": (mp.MaskAxis("loss_mask", form="jagged"),)}  # the remedy
    registry = mp.RL_FIELDS | mp.MaskNestingRegistry({}, axis)
    inputs = PackedInputs.of(batch, options=ReplayOptions(registry=registry, scored=("loss_mask",)))
    assert inputs.predict.tolist() == [1, 3, 4, 8, 10, 11, 14]


def test_marks_are_the_spans_of_loops() -> None:
    source = np.random.default_rng(0)
    for _ in range(300):
        lengths = source.integers(0, 5, source.integers(0, 5))
        rows = mp.RowLayout.from_lengths(lengths)
        marks = [source.integers(0, 3, length) % 2 for length in lengths]
        padded = np.zeros((len(lengths), rows.width), np.int64)
        for line, row in zip(padded, marks, strict=True):
            line[: len(row)] = row
        got = layout_of_marks(torch.from_numpy(np.concatenate([*marks, np.zeros(0, np.int64)])), rows)
        assert got.to_mask(torch.int64).tolist() == padded.tolist()
        assert got == mp.RowLayout.from_mask(torch.from_numpy(padded))


LINE = {
    "input_ids": torch.arange(10, 22),
    "position_ids": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]),
    "loss_mask": torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1]),
    "cu_seqlens": torch.tensor([0, 5, 8, 12], dtype=torch.int32),
    "seq_lens": torch.tensor([5, 3, 4]),
}


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("known", ["cu_seqlens", "seq_lens", "position_ids"])
def test_a_line_of_tokens_replays_document_by_document(dims: int, known: str) -> None:
    line = {name: LINE[name] for name in ("input_ids", "loss_mask", known)}
    batch = TensorDict({name: x[None] if dims else x for name, x in line.items()}, [1] * dims)
    inputs = PackedInputs.of(batch, options=ReplayOptions(scored=("loss_mask",)))
    assert inputs.cu_seqlens.tolist() == [0, 5, 8, 12]
    assert inputs.predict.tolist() == [1, 2, 3, 5, 6, 9, 10]
    assert inputs.targets.tolist() == [12, 13, 14, 16, 17, 20, 21]
    assert inputs.position_ids.flatten().tolist() == LINE["position_ids"].tolist()


def test_the_documents_of_prime_rl_are_rows() -> None:
    batch = TensorDict({name: LINE[name] for name in ("input_ids", "position_ids", "loss_mask", "cu_seqlens")}, [])
    for form in (batch, mp.compress(batch, registry=fields.prime_rl, pad_token_id=0)):
        inputs = PackedInputs.of(form, options=ReplayOptions(registry=fields.prime_rl))
        assert inputs.response.lengths.tolist() == [3, 2, 2]
        assert inputs.predict.tolist() == [1, 2, 3, 5, 6, 9, 10]


def test_jagged_fields_beside_a_line_have_its_rows() -> None:
    batch = TensorDict({name: LINE[name] for name in ("input_ids", "loss_mask", "cu_seqlens")}, [])
    batch["values"] = ragged([torch.ones(5), torch.ones(3), torch.ones(4)])
    registry = fields.prime_rl | {"values": ("response", 0)}
    same(mp.decompress(mp.compress(batch, registry=registry, strict_mask_nesting=True)), batch)
    batch["values"] = ragged([torch.ones(5), torch.ones(4), torch.ones(3)])
    with pytest.raises(mp.errors.CoverageError, match=r'"values" .* row 1 has 4 tokens; mask "response" has 3'):
        mp.compress(batch, registry=registry, strict_mask_nesting=True)


def test_one_number_for_each_row_is_none_for_each_token() -> None:
    """Although there are as many tokens as rows."""
    batch = TensorDict(
        {"input_ids": torch.arange(6).view(3, 2), "attention_mask": torch.tensor([[1, 1], [1, 0], [0, 0]])}
    )
    batch["loss_mask"] = torch.tensor([0, 1, 1])
    batch.batch_size = [3]
    with pytest.raises(ReplayError, match='field "loss_mask" is'):
        PackedInputs.of(batch, options=ReplayOptions(scored=("loss_mask",)))


def test_one_row_whose_end_is_not_known_is_refused() -> None:
    """Positions alone do not say that the last columns of [1, S] are tokens."""
    batch = TensorDict(
        {"input_ids": torch.ones(1, 6).long(), "position_ids": torch.zeros(1, 6).long(), "responses": torch.ones(1, 2)},
        [1],
    ).set("response_mask", torch.ones(1, 2))
    with pytest.raises((LayoutError, ReplayError), match="no sequence axis"):
        PackedInputs.of(batch)


def test_slime_rows_need_no_lengths() -> None:
    batch = columns([2, 3, 1], [4, 1, 5])
    rows = TensorDict({"tokens": batch["input_ids"], "loss_masks": batch["response_mask"]}, [3])
    lengths = {"total_lengths": torch.tensor([6, 4, 6]), "response_lengths": torch.tensor([4, 1, 5])}
    options = ReplayOptions(registry=fields.slime, input_ids="tokens")
    for own in (rows, rows.copy().update(lengths)):
        packed = mp.compress(own, registry=fields.slime, strict_mask_nesting=True)
        assert packed.layouts.keys() == {"sequence", "response"}
        for form in (own, packed):
            assert PackedInputs.of(form, options=options).predict.tolist() == [1, 2, 3, 4, 8, 10, 11, 12, 13, 14]


# -------------------------------------------------------------------- tensors with rows


def test_rows_in_any_dim_are_values_in_front() -> None:
    rows = [torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)]
    own = Jagged.of(ragged(rows, 2))
    assert own is not None
    assert own.dim == 2
    assert own.values.tolist() == torch.cat(rows, 1).T.tolist()
    starts, counts = torch.tensor([0, 1]), torch.tensor([2, 1])
    gaps: Any = torch.nested.narrow(torch.ones(2, 3), 1, starts, counts, layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    for odd in (gaps, strided, torch.ones(2, 3)):
        assert Jagged.of(odd) is None
    for odd in (gaps, strided):
        regular = torch.nested.nested_tensor(list(odd.unbind()), layout=torch.jagged)
        batch = TensorDict({}, [2]).set("x", odd)
        with pytest.raises(LayoutError, match=r'field "x" is nested, with gaps .* Rebuild it from its rows'):
            mp.compress(batch)
        assert mp.decompress(mp.compress(TensorDict({"x": regular}, [2])))["x"].offsets().tolist() == [0, 2, 3]


def test_nested_values_lie_together() -> None:
    x = torch.nested.nested_tensor_from_jagged(torch.arange(12).view(3, 4).T, torch.tensor([0, 1, 4]))
    nested = mp.nest_batch_by_mask(TensorDict({"x": x}, [2]))
    assert not x.values().is_contiguous()
    assert nested["x"].values().is_contiguous()
    assert nested["x"].values().tolist() == x.values().tolist()


def test_a_shape_that_lies_and_int32_offsets_become_true_ones() -> None:
    """verl sets the ragged dim by hand, without changing the shape."""
    values, offsets = torch.arange(20).view(4, 5), torch.tensor([0, 3, 5], dtype=torch.int32)
    field: Any = torch.nested.nested_tensor_from_jagged(values, offsets)
    field._ragged_idx = 2
    got = mp.decompress(mp.compress(TensorDict({"x": field}, [2])))["x"]
    assert [size for size in got.shape if isinstance(size, int)] == [2, 4]
    assert got.offsets().dtype == torch.int64
    assert [row.tolist() for row in got.unbind()] == [values[:, :3].tolist(), values[:, 3:].tolist()]


def test_fields_that_share_rows_in_one_batch_alone_are_joined() -> None:
    """In the first batch both have equal lengths, and one layout."""

    def part(n: int, m: int) -> TensorDict:
        x, y = ragged([torch.arange(2), torch.arange(n)]), ragged([torch.ones(2, 3), torch.ones(m, 3)])
        return TensorDict({"x": x, "y": y}, [2])

    parts = [part(1, 1), part(1, 3), part(2, 0)]
    joined = PackedBatch.cat([mp.compress(part) for part in parts])
    for packed in (joined, PackedBatch.from_bytes(joined.to_bytes())):
        for name in ("x", "y"):
            want = [row for part in parts for row in part[name].unbind()]
            same_rows(mp.decompress(packed)[name], ragged(want))
    halves = PackedBatch.cat([joined[:3], joined[3:]])
    assert mp.decompress(halves)["y"].offsets().tolist() == [0, 2, 3, 5, 8, 10, 10]


def test_rows_of_sections_are_joined_whichever_dim_torch_took() -> None:
    """torch takes rows [4, n] of equal lengths, and one row, for [n, 4] turned: the 4 are ragged then."""

    def part(*lengths: int) -> TensorDict:
        rows = [torch.arange(4 * n).view(4, n) + n for n in lengths]
        return TensorDict({"p": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])

    parts = [part(3), part(5, 5), part(2, 3), part(0)]
    packed = [mp.compress(part) for part in parts]
    got = mp.decompress(PackedBatch.cat([*packed, packed[1][:0]]))["p"]
    assert got._ragged_idx == 2
    for row, want in zip(got.unbind(), [row for part in parts for row in part["p"].unbind()], strict=True):
        assert_same_tensor(row, want)


def test_positions_of_equal_rows_are_those_of_tokens() -> None:
    """torch took the sections for the ragged dim: they replay as the same rows with a ragged dim that tells do."""
    batch = columns([3, 3], [2, 2])
    lies = batch.copy()
    lies["position_ids"] = torch.nested.as_nested_tensor(batch["position_ids"].unbind(), layout=torch.jagged)
    assert lies["position_ids"]._ragged_idx == 1
    for form in (lies, mp.compress(lies), mp.nest_batch_by_mask(lies)):
        inputs = PackedInputs.of(form)
        assert (
            inputs.position_ids.tolist() == PackedInputs.of(batch).position_ids.tolist() == [[[0, 1, 2, 3, 4] * 2]] * 4
        )


def test_batches_that_differ_in_the_ragged_dim_have_plans_of_their_own() -> None:
    values, offsets = torch.arange(16).view(4, 4), torch.tensor([0, 1, 4])
    for dim in (1, 2, 1):
        x = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)
        same(mp.decompress(mp.compress(TensorDict({"x": x}, [2]))), TensorDict({"x": x}, [2]))


def test_too_few_values_are_seen_beside_a_field_with_equal_offsets() -> None:
    x, y = ragged([torch.ones(2), torch.ones(3)]), ragged([torch.ones(2), torch.ones(3)])
    short = torch.nested.nested_tensor_from_jagged(torch.ones(4), torch.tensor([0, 2, 5]))
    for fields_of in ({"x": x, "y": y}, {"x": x, "y": short}, {"y": short, "x": x}):
        batch = TensorDict({}, [2])
        for name, value in fields_of.items():
            batch.set(name, value)
        if fields_of["y"] is y:
            same(mp.decompress(mp.compress(batch)), batch)
            continue
        with pytest.raises(LayoutError, match='field "y" is jagged, of 4 values; its offsets end at 5'):
            mp.compress(batch)


def test_results_are_not_padded_like_a_batch_of_columns() -> None:
    batch = columns([2, 3], [4, 1])
    own = TensorDict({"old_log_probs": ragged([torch.ones(4), torch.ones(1)])}, [2])
    packed = mp.compress(own, like=mp.compress(batch))
    same(mp.decompress(packed), own)


def test_the_padded_axes_of_another_batch_come_before_jagged_columns() -> None:
    """Results with the rows of a padded batch get its widths, also beside jagged responses."""
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    padded = TensorDict({"attention_mask": mask, "responses": mask[:, 2:] * 7}, [2])
    rows = [torch.full((2,), 7), torch.full((1,), 7)]
    results = TensorDict({"responses": ragged(rows), "old_log_probs": ragged([row.float() for row in rows])}, [2])
    assert not has_masks(results, mp.RL_FIELDS)
    assert has_masks(padded, mp.RL_FIELDS)
    got = mp.decompress(mp.compress(results, like=mp.compress(padded, pad_token_id=0), pad_token_id=0))
    assert got["responses"].tolist() == (mask[:, 2:] * 7).tolist()
    assert got["old_log_probs"].tolist() == (mask[:, 2:] * 7.0).tolist()


# -------------------------------------------------------------------- shared offsets


def test_equal_offsets_are_one_tensor_as_long_as_one_has_it() -> None:
    bounds = np.array([0, 3, 3, 8], np.int64)
    one = shared_offsets(bounds, torch.device("cpu"))
    assert shared_offsets(bounds.copy(), torch.device("cpu")) is one
    assert shared_offsets(bounds, torch.device("cpu"), torch.from_numpy(bounds)) is one
    one.zero_()  # by its owner
    other = shared_offsets(bounds, torch.device("cpu"))
    assert other.tolist() == [0, 3, 3, 8]
    del one, other
    gc.collect()
    with torch.inference_mode():  # such a tensor is in no graph
        inside = shared_offsets(bounds, torch.device("cpu"))
    given = torch.tensor([0, 3, 3, 8])
    assert shared_offsets(bounds, torch.device("cpu"), given) is given
    assert inside is not given


def test_axes_with_equal_rows_have_offsets_of_their_own() -> None:
    """Which axis the result of a worker is on is told by its offsets alone."""
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    batch = TensorDict({"attention_mask": mask, "input_ids": mask * 7, "responses": mask[:, 2:] * 7}, [2])
    nested = [mp.nest_batch_by_mask(batch, pad_token_id=0)]
    nested += [mp.decompress(mp.compress(batch, pad_token_id=0), format="nested")]
    for own in nested:
        assert own["responses"].offsets().tolist() == own["input_ids"].offsets().tolist()
        assert own["responses"].offsets() is not own["input_ids"].offsets()
        assert own["attention_mask"].offsets() is own["input_ids"].offsets()
    assert (nested[0]["responses"] - nested[1]["responses"]).values().tolist() == [0, 0, 0]
    alone = TensorDict({"responses": ragged([torch.full((2,), 7), torch.full((1,), 7)])}, [2])
    alone = mp.nest_batch_by_mask(alone, pad_token_id=0)
    assert (nested[0]["responses"] - alone["responses"]).values().tolist() == [0, 0, 0]


@pytest.mark.parametrize("only", ["all", "input_ids", "responses"])
def test_results_of_equal_rows_are_on_the_axis_whose_offsets_they_have(only: str) -> None:
    """Without prompts, sequence and response have equal rows, and other widths. Also beside another copy of the batch,
    and when a rank has one of the fields alone."""
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    columns = {"prompts": mask[:, :2], "responses": mask[:, 2:] * 7}
    batch = TensorDict({"attention_mask": mask, "input_ids": mask * 7, **columns}, [2])
    packed = mp.compress(batch, pad_token_id=0)
    rows = mp.decompress(packed if only == "all" else packed.select(only), format="nested")
    for name, axis, width in (("input_ids", "sequence", 4), ("responses", "response", 2)):
        if only not in ("all", name):
            continue
        for field in ("old_log_probs", "values"):
            ones = torch.nested.nested_tensor_from_jagged(torch.ones(3), rows[name].offsets())
            for like in (packed, pickle.loads(pickle.dumps(packed))):
                results = mp.compress(TensorDict({field: ones}, [2]), like=like)
                assert results.forms[field,].layout == axis
                assert mp.decompress(results)[field].shape == (2, width)


def test_responses_as_long_as_their_prompts_have_the_offsets_of_other_batches() -> None:
    """Whichever column comes first."""
    rows = [torch.tensor([7, 8]), torch.tensor([9])]
    names = ["prompts", "responses", "old_log_probs"]
    batch = TensorDict({name: ragged(rows) for name in names}, [2])
    nested, taken = mp.nest_batch_by_mask(batch, pad_token_id=0), mp.nesting.take(batch, [0, 1])
    assert (nested["responses"] - taken["old_log_probs"]).values().tolist() == [0, 0, 0]
    assert nested["prompts"].offsets() is not nested["responses"].offsets()
    offsets = torch.tensor([0, 5, 96])  # of both columns
    one = torch.nested.nested_tensor_from_jagged(torch.arange(96), offsets)
    again = mp.nest_batch_by_mask(TensorDict({name: one.clone() for name in names}, [2]), pad_token_id=0)
    assert again["prompts"].offsets() is not again["responses"].offsets()


def test_nested_columns_keep_their_offsets() -> None:
    rows = [torch.arange(5), torch.arange(90), torch.arange(3)]
    batch = TensorDict({"responses": ragged(rows)}, [3])
    nested = mp.nest_batch_by_mask(batch, pad_token_id=0)
    assert nested["responses"].offsets() is batch["responses"].offsets()


def test_new_fields_of_an_unpickled_batch_are_on_the_axis_whose_offsets_they_have() -> None:
    mask = (torch.arange(60) - 2 < torch.tensor([[53], [31]])).long()  # lengths of no other test
    mask[:, :2] = 0
    batch = TensorDict({"attention_mask": mask, "input_ids": mask * 7, "responses": mask[:, 2:] * 7}, [2])
    pickled = pickle.dumps(mp.nest_batch_by_mask(batch, pad_token_id=0))
    for held in (None, "input_ids", "responses"):  # of another batch, with equal rows
        other = pickle.loads(pickled) if held else {}
        kept = other[held].offsets() if held else None
        del other
        for name, axis in (("input_ids", "sequence"), ("responses", "response")):
            nested = pickle.loads(pickled)
            nested["values"] = torch.nested.nested_tensor_from_jagged(torch.ones(84), nested[name].offsets())
            assert mp.compress(nested, pad_token_id=0).forms["values",].layout == axis, (held, kept)


def test_results_of_separate_calls_are_subtracted() -> None:
    batch = columns([2, 3, 1], [4, 1, 5])
    packed = mp.compress(batch)
    parts = {
        "unpacked": mp.decompress(packed)["old_log_probs"],
        "again": mp.decompress(packed)["rollout_log_probs"],
        "bytes": mp.decompress(PackedBatch.from_bytes(packed.to_bytes()))["old_log_probs"],
        "taken": take(batch, [0, 1, 2])["old_log_probs"],
        "nested": mp.nest_batch_by_mask(batch)["old_log_probs"],
        "joined": cat([take(batch, [0]), take(batch, [1, 2])])["old_log_probs"],
    }
    for one, other in itertools.product(parts.values(), repeat=2):
        assert (one - other).values().shape == (10,)
