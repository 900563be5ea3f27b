"""Batches of verl's V1 trainer, slime and prime-rl, which have jagged columns or lines of documents and no masks,
through everything that moves rows, and back, against loops over their rows. `jagged_batches` makes them, verl's by
verl's own code."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jagged_batches
import numpy as np
import pytest
import samples
import torch
from jagged_batches import LINES, ROWS, SHAPES, Made, assert_rows, made, rows_of
from needs import needs
from samples import assert_same, freeze
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.nesting.schema import LAYOUTS
from maskpack.planning import plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions
from maskpack.store import RolloutLog

ANY = pytest.mark.parametrize(("name", "shape"), ROWS, ids=[", ".join(row) for row in ROWS])
PADS = {"pad_token_id": 0}
"""Of the padded fields that verl's engines have beside jagged ones."""
PICKLE = {"allow_pickle": True}
"""Of rows with images, whose objects hold tensors."""
BESIDE = {"indices"}
"""What verl's engines keep of all rows together, which other rows do not have."""


@pytest.fixture
def case(name: str, shape: str) -> Iterator[Made]:
    """A batch, which is afterwards what it was."""
    own = made(name, shape)
    before = freeze(own.batch)
    yield own
    assert freeze(own.batch) == before


def packed_of(case: Made) -> mp.PackedBatch:
    return mp.compress(case.batch, registry=case.registry, **PADS)


def nested_of(case: Made) -> TensorDict:
    return mp.nest_batch_by_mask(case.batch, case.registry, **PADS)


def plain(batch: Any) -> Any:
    """A batch as it was before it was packed or nested."""
    if isinstance(batch, mp.PackedBatch):
        return mp.decompress(batch)
    return mp.unnest_batch_by_mask(batch) if LAYOUTS in batch.keys() else batch  # noqa: SIM118


# -------------------------------------------------------------------- all rows, there and back

WAYS: dict[str, Callable[[Made], Any]] = {
    "packed": packed_of,
    "packed, nested": lambda case: mp.decompress(packed_of(case), format="nested"),
    "nested": nested_of,
    "nested, packed": lambda case: mp.compress(nested_of(case), registry=case.registry, **PADS),
    "pickled": lambda case: pickle.loads(pickle.dumps(packed_of(case), 5)),
    "in bytes": lambda case: mp.PackedBatch.from_bytes(packed_of(case).to_bytes(**PICKLE), **PICKLE),
    "packed again": lambda case: packed_of(case._replace(batch=mp.decompress(packed_of(case)))),
    "nested again": lambda case: nested_of(case._replace(batch=nested_of(case))),
    "a view": lambda case: mp.views.BatchView.of(packed_of(case)).to_packed(),
}


@ANY
@pytest.mark.parametrize("way", WAYS)
def test_all_bits_come_back(case: Made, way: str) -> None:
    assert_rows(plain(WAYS[way](case)), case.rows, case.batch)


@ANY
@pytest.mark.parametrize("way", ["nested", "packed, nested"])
def test_nested_batches_hold_the_jagged_rows_as_they_are(case: Made, way: str) -> None:
    names = [field for field, value in case.batch.items() if isinstance(value, Tensor) and value.is_nested]
    rows = [{field: row[field] for field in names} for row in case.rows]
    assert_rows(WAYS[way](case).select(*names), rows, case.batch.select(*names))


# -------------------------------------------------------------------- some rows, in another order, of several batches


def index_of(count: int) -> list[int]:
    """Some rows of so many, one of them twice."""
    return [*range(count - 1, -1, -2), 0]


@ANY
def test_rows_are_taken(case: Made) -> None:
    index = index_of(len(case.rows))
    wanted = [case.rows[row] for row in index]
    assert_rows(mp.nesting.take(case.batch, index), wanted, case.batch)
    assert_rows(mp.decompress(packed_of(case).take(index)), wanted, case.batch)
    assert_rows(plain(mp.nesting.take(nested_of(case), index)), wanted, case.batch)
    some = slice(0, None, 2)
    assert_rows(mp.nesting.take(case.batch, some), case.rows[some], case.batch)
    assert_rows(mp.decompress(packed_of(case)[some]), case.rows[some], case.batch)


@pytest.mark.parametrize("name", jagged_batches.BATCHES)
def test_rows_of_several_batches_are_joined(name: str) -> None:
    parts = [made(name, "of all lengths", seed) for seed in range(2)]
    parts = [
        part._replace(batch=part.batch.exclude(*BESIDE), rows=[without(row) for row in part.rows]) for part in parts
    ]
    rows = [row for part in parts for row in part.rows]
    packed = mp.PackedBatch.cat([packed_of(part) for part in parts])
    assert_rows(mp.decompress(packed), rows, parts[0].batch)
    assert_rows(mp.decompress(packed.take([7, 1])), [rows[7], rows[1]], parts[0].batch)
    assert_rows(mp.nesting.cat([part.batch for part in parts]), rows, parts[0].batch)
    assert_rows(plain(mp.nesting.cat(list(map(nested_of, parts)))), rows, parts[0].batch)


@ANY
def test_rows_that_share_their_offsets_join_those_that_do_not(case: Made, tmp_path: Path) -> None:
    """Columns of a queue have offsets of their own, outputs of models those of other columns."""
    sharing = case._replace(batch=on_shared_offsets(case.batch))
    packed = [packed_of(case), packed_of(sharing), packed_of(case)]
    assert_rows(mp.decompress(mp.PackedBatch.cat(packed)), case.rows * 3, case.batch)
    assert_rows(mp.nesting.cat([case.batch, sharing.batch]), case.rows * 2, case.batch)
    with RolloutLog(tmp_path, registry=case.registry, **PADS, **PICKLE) as log:
        rows = [*log.append(case.batch), *log.append(sharing.batch)]
        assert_rows(mp.decompress(log.take(rows)), case.rows * 2, case.batch)


def on_shared_offsets(batch: TensorDict) -> TensorDict:
    """Equal offsets of columns that are ragged in dim 1 are one tensor."""
    out, offsets = batch.copy(), dict[Any, Tensor]()
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_nested and value._ragged_idx == 1:
            ends = offsets.setdefault((value.offsets().dtype, *value.offsets().tolist()), value.offsets())
            out.set(name, torch.nested.nested_tensor_from_jagged(value.values(), ends))
    return out


def without(row: jagged_batches.Row) -> jagged_batches.Row:
    return {name: value for name, value in row.items() if name not in BESIDE}


@ANY
def test_rows_lie_in_a_log(case: Made, tmp_path: Path) -> None:
    with RolloutLog(tmp_path, registry=case.registry, **PADS, **PICKLE) as log:
        first = log.append(case.batch)
        second = log.append(packed_of(case))
        assert_rows(mp.decompress(log.take(first)), case.rows, case.batch)
    index = [*second, *first][::-2]
    with RolloutLog(tmp_path, mode="r", **PICKLE) as log:
        seen = mp.decompress(log.take(index))
    assert_rows(seen, [case.rows[row % len(case.rows)] for row in index], case.batch)


@ANY
def test_micro_batches_hold_the_rows_of_their_plan(case: Made) -> None:
    lengths = [p + r for p, r in shapes_of(case)]
    plan = plan_micro_batches(lengths, max(lengths) + 2)
    for form in (case.batch, nested_of(case), packed_of(case)):
        parts = list(plan.apply(form))
        for part, rows in zip(parts, plan.micro_batches, strict=True):
            assert_rows(plain(part), [case.rows[row] for row in rows], case.batch)
        assert_rows(plain(plan.restore(parts)), case.rows, case.batch)


def shapes_of(case: Made) -> list[tuple[int, int]]:
    """Prompt and response tokens of each row, as its tensors have them."""
    names = {"responses": "input_ids", "loss_masks": "tokens", "mask": "token_ids"}
    part, whole = next(pair for pair in names.items() if pair[0] in case.rows[0])
    shapes: list[tuple[int, int]] = []
    for row in case.rows:
        r = int(row["attention_mask"][row["prompts"].shape[0] :].sum()) if "attention_mask" in row else len(row[part])
        shapes.append((len(row[whole]) - r, r))
    return shapes


# -------------------------------------------------------------------- a queue, ranks


@pytest.mark.parametrize(("name", "shape"), [row for row in ROWS if row[0] != "verl's engines, M-RoPE"])
def test_rows_lie_in_a_queue(case: Made, name: str) -> None:
    """One value for each sample: what engines keep of all rows is no field of a queue."""
    needs("transfer_queue")
    from test_transferqueue_manager import Direct, get, put, units

    beside = [field for field, value in case.batch.items() if type(value).__name__ == "NonTensorData"]
    batch, manager = case.batch.exclude(*beside), Direct(units())
    fields, order = list(batch.keys()), index_of(len(case.rows))[:-1]
    asyncio.run(put(manager, list(range(len(case.rows))), batch))
    seen = rows_of(asyncio.run(get(manager, order, *fields)))
    for got, row in zip(seen, order, strict=True):
        assert list(got) == fields
        for field in fields:
            assert freeze(got[field]) == freeze(case.rows[row][field]), (field, row)


@pytest.fixture(scope="module")
def group(local_ray: None) -> Any:
    from ray import cloudpickle

    from maskpack.dispatch import WorkerGroup

    for module in (samples, jagged_batches, __import__(__name__)):  # the ranks cannot import the tests
        cloudpickle.register_pickle_by_value(module)
    return WorkerGroup.launch(worker(), 2)  # no field has a pad


def worker() -> type:
    from maskpack.dispatch import endpoint

    class Worker:
        @endpoint
        def echo(self, batch: Any) -> Any:
            return batch

        @endpoint(format="nested")
        def echo_nested(self, batch: Any) -> Any:
            return batch

        @endpoint(micro_batches=True)
        def echo_in_parts(self, batch: Any) -> Any:
            return batch

        @endpoint
        def doubled(self, batch: Any) -> Any:
            """A jagged result on the rows of the responses."""
            values, ends = (batch["rollout_log_probs"].values(), batch["rollout_log_probs"].offsets())
            out = TensorDict({}, batch_size=batch.batch_size)
            return out.set("doubled", torch.nested.nested_tensor_from_jagged(values * 2, ends))

    return Worker


@pytest.mark.parametrize(("name", "shape"), [row for row in ROWS if not row[0].startswith("verl's engines")])
def test_ranks_get_the_rows_and_give_them_back(group: Any, case: Made) -> None:
    """Under the mask that engines have beside jagged fields, results would be padded as their other fields are."""
    for method in ("echo", "echo_nested"):
        assert_rows(plain(group.call(method, case.batch)), case.rows, case.batch)
    lengths = [p + r for p, r in shapes_of(case)]
    plan = group.plan(case.batch, max(lengths) + 2, lengths=lengths)
    assert_rows(plain(group.call("echo_in_parts", case.batch, plan=plan)), case.rows, case.batch)
    if "rollout_log_probs" in case.rows[0]:
        seen = rows_of(group.call("doubled", case.batch))
        assert [freeze(row["doubled"]) for row in seen] == [freeze(row["rollout_log_probs"] * 2) for row in case.rows]


# -------------------------------------------------------------------- the check


@pytest.mark.parametrize(("name", "shape"), ROWS, ids=[", ".join(row) for row in ROWS])
def test_check_finds_what_is_there_and_nothing_else(name: str, shape: str) -> None:
    """The drawn masks leave some rows without a scored token. verl has the place of each token in a Python object, and
    torch turns its positions of M-RoPE if all rows are as long."""
    for seed in range(3):
        case = made(name, shape, seed)
        masks = [field for field in ("loss_mask", "loss_masks") if field in case.rows[0]]
        unscored = [
            (mask, "unscored", row) for mask in masks for row, own in enumerate(case.rows) if not own[mask].any()
        ]
        wanted = {*unscored[:4]}
        if name.startswith("verl's engines"):
            wanted.add(("indices", "hidden", -1))
        places = case.rows[0].get("position_ids")
        if places is not None and places.dim() == 2 and len({own["position_ids"].shape for own in case.rows}) == 1:
            wanted |= {("position_ids", "axis", row) for row in range(min(4, len(case.rows)))}
        seen = mp.check(case.batch, case.registry, pad_token_id=0)
        assert {(one.path[0], one.kind, row) for one in seen for row in one.rows or (-1,)} == wanted


# -------------------------------------------------------------------- the response of jagged rows

V1 = [row for row in ROWS if row[0].startswith("verl V1")]
of_v1 = pytest.mark.parametrize(("name", "shape"), V1, ids=[", ".join(row) for row in V1])
ON_RESPONSE = ("rollout_log_probs", "rm_scores", "response_mask", "loss_mask", "old_log_probs", "advantages")
"""Fields of verl's V1 whose pad is 0."""


@of_v1
@pytest.mark.parametrize("form", ["jagged", "nested", "decoded"])
def test_responses_are_padded_for_losses(case: Made, form: str) -> None:
    """As `to_padded_tensor` pads a row: to the longest response, with 0; the last two rows alone at that width, too."""
    fields = [field for field in ON_RESPONSE if field in case.rows[0]]
    width = max(len(row["responses"]) for row in case.rows)
    batch = {
        "jagged": lambda: case.batch,
        "nested": lambda: nested_of(case),
        "decoded": lambda: mp.decompress(packed_of(case)),
    }[form]()
    seen = mp.select_and_pad_to_response(batch, *fields)
    assert list(seen.keys()) == fields
    assert freeze(seen) == freeze(padded_rows(case.rows, fields, width))
    part = mp.nesting.take(batch, slice(-2, None))
    seen = mp.select_and_pad_to_response(part, *fields, width=width)
    assert freeze(seen) == freeze(padded_rows(case.rows[-2:], fields, width))


def test_all_fields_of_the_response_are_padded_by_default() -> None:
    case = made("verl V1", "of all lengths")
    fields = [field for field in case.rows[0] if field in (*ON_RESPONSE, "responses")]
    with pytest.raises(mp.errors.LayoutError, match='"responses" was added after nesting, or never padded'):
        mp.select_and_pad_to_response(nested_of(case))
    registry = mp.RL_FIELDS | {"responses": ("response", 0)}
    seen = mp.select_and_pad_to_response(nested_of(case), registry=registry)
    assert freeze(seen) == freeze(padded_rows(case.rows, fields, max(len(row["responses"]) for row in case.rows)))


def padded_rows(rows: list[jagged_batches.Row], fields: list[str], width: int) -> TensorDict:
    out = TensorDict({}, batch_size=[len(rows)])
    for field in fields:
        lines = torch.zeros(len(rows), width, dtype=rows[0][field].dtype)
        for line, row in zip(lines, rows, strict=True):
            line[: len(row[field])] = row[field]
        out[field] = lines
    return out


@of_v1
def test_outputs_at_responses_are_those_of_verl(case: Made) -> None:
    """`response_from_nested` of verl, and a loop; verl has no answer for rows without a prompt."""
    if not all(p for p, _ in shapes_of(case)):
        with pytest.raises(mp.errors.LayoutError, match="have a response but no prompt token"):
            mp.extract_response(case.batch, case.batch["input_ids"].to(torch.float64))
        return
    from verl.workers.utils.padding import response_from_nested

    ids = case.batch["input_ids"]
    outputs = torch.nested.nested_tensor_from_jagged(torch.arange(ids.values().numel()).double(), ids.offsets())
    seen = mp.extract_response(case.batch, outputs)
    assert freeze(seen.values()) == freeze(response_from_nested(outputs, case.batch["response_mask"]).values())
    ends = ids.offsets()[1:].tolist()
    rows = [outputs.values()[end - r - 1 : end - 1] for end, (_, r) in zip(ends, shapes_of(case), strict=True)]
    assert list(map(freeze, samples.row_list(seen))) == list(map(freeze, rows))


@of_v1
def test_packed_inputs_are_the_rows_one_after_the_other(case: Made) -> None:
    """Also where torch took the sections of rows of equal lengths for the ragged dim."""
    skips = not all(p for p, _ in shapes_of(case))
    options = ReplayOptions(no_prompt="skip" if skips else "error")
    shapes = shapes_of(case)
    ends = np.cumsum([0, *(p + r for p, r in shapes)]).tolist()
    scored = [
        at for end, (p, r) in zip(ends[1:], shapes, strict=True) for at in range(end - r, end) if p or at > end - r
    ]
    ids = torch.cat([row["input_ids"] for row in case.rows])
    places = torch.cat([row["position_ids"] for row in case.rows], -1)
    for batch in (case.batch, packed_of(case), nested_of(case)):
        if any(row.get("multi_modal_inputs") for row in case.rows):
            batch = batch.select(*(name for name in case.rows[0] if name != "multi_modal_inputs"))
        inputs = PackedInputs.of(batch, options=options)
        assert_same(inputs.input_ids, ids[None])
        assert_same(inputs.position_ids, places[None] if places.dim() == 1 else places[:, None])
        assert inputs.cu_seqlens.tolist() == ends
        assert inputs.max_seqlen == max(p + r for p, r in shapes)
        assert inputs.predict.tolist() == [at - 1 for at in scored]
        assert_same(inputs.targets, ids[scored])
        assert inputs.response.lengths.tolist() == [r for _, r in shapes]


def test_sections_that_are_as_many_as_the_tokens_of_all_rows_are_no_tokens() -> None:
    """torch took the sections of rows of equal lengths for the ragged dim, here 4 of 4 tokens."""
    case = jagged_batches.verl_v1(((2, 2), (1, 3)), sections=True)
    assert case.batch["position_ids"]._ragged_idx == 1
    with pytest.raises(mp.errors.ReplayError, match='field "position_ids"'):
        PackedInputs.of(case.batch)


@of_v1
def test_results_of_different_calls_can_be_subtracted(case: Made) -> None:
    """Equal rows share their offsets, whichever call made them, as torch needs it."""
    whole = list(range(len(case.rows)))
    results = [
        nested_of(case),
        mp.decompress(packed_of(case)),
        mp.decompress(pickle.loads(pickle.dumps(packed_of(case)))),
        mp.nesting.take(case.batch, whole),
        next(plan_micro_batches([1] * len(whole), len(whole)).apply(case.batch)),
    ]
    fields = ("rollout_log_probs", "rm_scores")
    wanted = [row[fields[0]] - row[fields[1]] for row in case.rows]
    for one in results:
        for other in results:
            seen: Any = one[fields[0]] - other[fields[1]]
            assert one[fields[0]].offsets() is other[fields[1]].offsets()
            assert list(map(freeze, samples.row_list(seen))) == list(map(freeze, wanted))


# -------------------------------------------------------------------- lines of documents


def documents_of(batch: TensorDict, case: Made) -> list[jagged_batches.Row]:
    """The documents of a line, by their lengths."""
    lines = {name: batch[name] if batch[name].shape[0] > 1 else batch[name][0] for name in case.rows[0]}
    out, begin = list[jagged_batches.Row](), 0
    for row in case.rows:
        end = begin + len(row["input_ids"])
        out.append({name: line[begin:end] for name, line in lines.items()})
        begin = end
    return out


def check_line(seen: TensorDict, case: Made) -> None:
    assert_same(seen, case.batch)
    for got, want in zip(documents_of(seen, case), case.rows, strict=True):
        assert list(map(freeze, got.values())) == list(map(freeze, want.values()))


PRESET = mp.fields.prime_rl
WITHOUT_AXIS = ("[1, T] with cu_seqlens", "[T] with seq_lens", "[T] with positions")
"""Lines from which the preset of prime-rl computes no axis."""
CASES = [(line, "RL_FIELDS") for line in LINES] + [(line, "its preset") for line in LINES if line not in WITHOUT_AXIS]
of_lines = pytest.mark.parametrize(("line", "registry"), CASES, ids=[", ".join(own) for own in CASES])


def line_of(line: str, shape: str, registry: str) -> Made:
    case = LINES[line](SHAPES[shape], 0)
    return case if registry == "its preset" else case._replace(registry=mp.RL_FIELDS)


@pytest.mark.parametrize("shape", SHAPES)
@of_lines
def test_lines_come_back(line: str, shape: str, registry: str) -> None:
    check_ways(line_of(line, shape, registry))


@pytest.mark.parametrize("shape", SHAPES)
@of_lines
def test_packed_inputs_of_lines_keep_documents_apart(line: str, shape: str, registry: str) -> None:
    """Under its preset, a line [T] with cu_seqlens has a row for each document, else it is one row."""
    case = line_of(line, shape, registry)
    by_document = line == "[T] with cu_seqlens" and registry == "its preset"
    check_documents(case, len(case.rows) if by_document else 1)


@pytest.mark.parametrize("line", WITHOUT_AXIS)
def test_lines_without_an_axis_of_the_preset_are_one_row(line: str) -> None:
    case = line_of(line, "of all lengths", "its preset")
    check_ways(case)
    check_documents(case, 1)


def check_ways(case: Made) -> None:
    before = freeze(case.batch)
    for name, way in WAYS.items():
        if name != "a view":  # of rows
            check_line(plain(way(case)), case)
    assert freeze(case.batch) == before


def check_documents(case: Made, rows: int) -> None:
    """The tokens of the loss mask are scored, but for the first of a document, which no output scores."""
    ends = np.cumsum([0, *(len(row["input_ids"]) for row in case.rows)]).tolist()
    scored = [
        begin + at
        for begin, row in zip(ends[:-1], case.rows, strict=True)
        for at, on in enumerate(row["loss_mask"].tolist())
        if on and at
    ]
    options = ReplayOptions(registry=case.registry, scored=("loss_mask",), no_prompt="skip")
    inputs = PackedInputs.of(case.batch, options=options)
    assert inputs.cu_seqlens.tolist() == ends
    assert inputs.input_ids[0].tolist() == [token for row in case.rows for token in row["input_ids"].tolist()]
    assert inputs.position_ids[0].tolist() == [at for row in case.rows for at in range(len(row["input_ids"]))]
    assert inputs.predict.tolist() == [at - 1 for at in scored]
    assert inputs.targets.tolist() == [inputs.input_ids[0, at].item() for at in scored]
    assert inputs.response.num_rows == rows
