"""compress, decompress and PackedBatch, against naive row loops."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch, assert_same_object, assert_same_tensor
from samples import received, sent
from strategies import Case, batches
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack import (
    RL_FIELDS,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
    PackedBatch,
    compress,
    decompress,
    nest_batch_by_mask,
)
from maskpack import (
    unnest_batch_by_mask as unnest,
)
from maskpack.core.pads import ANY_ZERO
from maskpack.errors import CoverageError, LayoutError, MaskpackWarning
from maskpack.nesting import take
from maskpack.nesting.schema import LAYOUTS
from maskpack.planning import plan_micro_batches
from maskpack.views import BatchView

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def rollout(rows: int = 6, prompt: int = 4, response: int = 8, seed: int = 0) -> TensorDict:
    """A batch whose every field nests."""
    batch = samples.workload(rows=rows, prompt=prompt, response=response, pad=0, fill=0.5, group=1, seed=seed)
    names = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages")
    batch = batch.select(*names).set("uid", samples.per_row([f"u{row}" for row in range(rows)]))
    batch["temperature"] = NonTensorData(1.0, batch_size=[rows])
    return batch.set("reward_baselines", torch.arange(rows, dtype=torch.float32))


def tensors(batch: TensorDictBase) -> list[Tensor]:
    """Every dense tensor and the values of every jagged one, LAYOUTS included."""
    leaves = [x for x in batch.values(True, True) if isinstance(x, Tensor)]
    return [x.values() if x.is_nested else x for x in leaves]


def scribble(batch: TensorDictBase) -> None:
    """Changes every bit of every tensor in place."""
    for x in tensors(batch):
        if x.numel():
            raw = x.view(torch.bool) if x.dtype == torch.bool else strategies.oracle_view(x)
            if raw.dtype.is_complex:
                raw.mul_(0).add_(13)
            else:
                raw.copy_(~raw)


# -------------------------------------------------------------------- there and back


def test_field_in_a_sub_batch() -> None:
    batch = TensorDict({"a": TensorDict({"b": torch.arange(4), "c": torch.arange(4)}, [4])}, [4])
    got = decompress(compress(batch), ("a", "b"))
    assert_same_batch(got, TensorDict({"a": TensorDict({"b": torch.arange(4)}, [4])}, [4]))


@pytest.mark.parametrize("more", [(), (12,)], ids=["[]", "[B, S]"])
def test_other_batch_sizes(more: tuple[int, ...]) -> None:
    source = rollout(4).select("input_ids", "attention_mask", "position_ids")
    batch = TensorDict(dict(source.items()), batch_size=[4, *more] if more else [])
    nested = nest_batch_by_mask(batch, pad_token_id=0)
    assert nested["input_ids"].is_nested
    assert_same_batch(unnest(nested), batch)
    packed = compress(batch, pad_token_id=0)
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(unnest(decompress(packed, format="nested")), batch)
    if more:
        assert_same_batch(decompress(packed[1:3]), batch[1:3])
    else:
        for use in (lambda: packed[1:3], lambda: packed.split(2), lambda: PackedBatch.cat([packed, packed])):
            with pytest.raises(LayoutError, match=r"^PackedBatch\.\w+: .*batch_size \[\].*Give the TensorDict"):
                use()


def test_scalars_and_flat_fields_of_a_batch_without_rows() -> None:
    batch = TensorDict(
        {"x": torch.tensor(1.5), "z": torch.tensor(2 + 3j, dtype=torch.complex128), "b": torch.tensor(True)}, []
    )
    assert_same_batch(decompress(received(compress(batch))), batch)


def test_objects_below_two_batch_dims() -> None:
    rows = [NonTensorStack(*[NonTensorData((row, place)) for place in range(3)]) for row in range(2)]
    batch = TensorDict({"uid": NonTensorStack(*rows), "x": torch.zeros(2, 3)}, batch_size=[2, 3])
    packed = compress(batch)
    assert_same_batch(decompress(packed), batch)
    assert decompress(packed[[1, 0]]).get("uid").tolist() == [[(1, 0), (1, 1), (1, 2)], [(0, 0), (0, 1), (0, 2)]]


# -------------------------------------------------------------------- rows


@quiet
@given(batches(), st.integers(1, 6), st.data())
def test_split_and_chunk(case: Case, number: int, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options)
    rows = list(range(case.rows))
    chunks = packed.chunk(number)
    assert len(chunks) == number
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert [len(part) for part in chunks] == sorted((len(part) for part in chunks), reverse=True)
    parts = packed.split(np.int64(number))
    assert [len(part) for part in parts] == [len(rows[at : at + number]) for at in range(0, case.rows, number)]
    for some in (chunks, parts):
        begin = 0
        for part in some:
            assert_same_batch(decompress(part), oracle.take_rows(case.batch, rows[begin : begin + len(part)]))
            begin += len(part)
        assert begin == case.rows


def test_a_batch_without_names_does_not_take_those_of_its_sub_batches() -> None:
    batch = TensorDict({"m": torch.ones(2, 3), "sub": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
    batch["sub"].names = ["rows", ""]
    for restored in (decompress(compress(batch, registry={})), unnest(nest_batch_by_mask(batch, {}))):
        assert (restored.names, restored["sub"].names) == ([None], ["rows", ""])


def test_names_of_dims_are_kept() -> None:
    def named(*names: str | None) -> TensorDict:
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        inner = TensorDict({"z": torch.arange(6).view(2, 3)}, [2, 3], names=[*names, "columns"])
        return TensorDict({"attention_mask": mask, "x": mask * 2.0, "inner": inner}, [2], names=names)

    def names_of(batch: Any) -> tuple[Any, Any]:
        return tuple(batch.names), tuple(batch["inner"].names)

    for name in ("rows", "rows", "others", None, "rows"):  # a plan of one batch is not that of the next
        batch = named(name)
        packed = compress(batch, registry=RL_FIELDS | {"x": MaskNestingSpec("sequence")})
        moved = packed[1:], packed[[1, 0]], packed.split(1)[0], PackedBatch.cat([packed[1:], packed[:1]])
        sent = pickle.loads(pickle.dumps(packed)), PackedBatch.from_bytes(packed.to_bytes())
        for some in (packed, *moved, *sent, packed.select("x", "inner")):
            assert names_of(decompress(some)) == ((name,), (name, "columns"))
            assert names_of(unnest(decompress(some, format="nested"))) == ((name,), (name, "columns"))
    nested = samples.joined([nest_batch_by_mask(named(name), {"x": MaskNestingSpec(None)}) for name in ("one", "two")])
    assert unnest(nested)["x"].shape == (4, 3)


def test_zeros_of_any_sign_in_wider_batches() -> None:
    """Columns that a join adds hold 0.0, on either side."""
    axes = {"m": MaskAxis("m"), "left": MaskAxis("n", padded="left")}
    specs = {"m": MaskNestingSpec("m"), "n": MaskNestingSpec("left")}
    specs |= {"x": MaskNestingSpec("m", ANY_ZERO), "y": MaskNestingSpec("left", ANY_ZERO)}
    mask = torch.tensor([[1.0, 0, 1, 0, 0]])
    zeros = torch.tensor([[1.0, -0.0, -2.0, 0.0, -0.0]])
    narrow = TensorDict({"m": mask, "n": mask, "x": zeros, "y": zeros}, [1])
    wide = TensorDict({name: torch.arange(1.0, 15)[None] for name in "mnxy"}, [1])
    parts = [compress(part, registry=MaskNestingRegistry(specs, axes=axes)) for part in (narrow, wide)]
    for order in ([0, 1], [1, 0]):
        whole = decompress(PackedBatch.cat([parts[at] for at in order]))
        row = order.index(0)
        assert_same_tensor(whole["x"][row], torch.cat([zeros[0], torch.zeros(9)]))
        assert_same_tensor(whole["y"][row], torch.cat([torch.zeros(9), zeros[0]]))


# -------------------------------------------------------------------- objects of the whole batch


@pytest.mark.parametrize("items", [[1, 2, 3, 4, 5, 6], [1, 2, 3], [], (1, 2, 3, 4, 5, 6), {"a": 1}, 6], ids=str)
@pytest.mark.parametrize("name", ["global_token_num", "something"])
def test_an_object_of_the_batch_stays_whole_as_tensordict_keeps_it(items: Any, name: str) -> None:
    """A list with one item a row, too, on every path."""
    batch = TensorDict({"x": torch.arange(6), name: NonTensorData(items, batch_size=[6])}, [6])
    packed, nested = compress(batch), nest_batch_by_mask(batch)
    plan = plan_micro_batches([1, 2, 3, 4, 5, 6], 8)
    parts = [packed, packed[2:5], packed[[1, 1]], packed[0:0], packed.chunk(2)[1]]
    found = [decompress(part) for part in parts] + [batch[2:5], unnest(nested[2:5])]
    for whole in (batch, nested, packed, BatchView.of(packed)):
        taken = list(plan.apply(whole))
        found += [decompress(part) for part in taken] if whole is packed else []
        found += [part.materialize() for part in taken] if isinstance(whole, BatchView) else []
        found += taken if isinstance(whole, TensorDict) else []
        found.append(plan.restore(found[-len(taken) :]))
    for part in found:
        assert_same_object(part.get(name).data, items)
    assert_same_object(decompress(PackedBatch.cat([packed[:2], packed[3:]])).get(name).data, items)


# -------------------------------------------------------------------- tensors inside Python objects


def images(rows: int = 4, pixels: int = 3000) -> tuple[TensorDict, list[dict[str, Any]]]:
    """Two rows share a tensor, one has an equal one of its own."""
    shared = torch.arange(pixels, dtype=torch.float32)
    items = [
        {"pixel_values": shared, "grid": np.arange(row)} if row < 2 else {"pixel_values": shared.clone() + (row > 2)}
        for row in range(rows)
    ]
    return TensorDict({"multi_modal_inputs": NonTensorStack(*map(NonTensorData, items))}, [rows]), items


def test_tensors_inside_objects_travel_as_arrays() -> None:
    batch, items = images()
    packed = compress(batch)
    assert 2 * 12_000 <= packed.nbytes < 2 * 12_000 + 64
    stream, buffers = sent(packed)
    assert len(stream) + sum(buffer.raw().nbytes for buffer in buffers) < 2 * 12_000 + 4096
    for there in (packed, pickle.loads(pickle.dumps(packed)), received(packed)):
        got = decompress(there).get("multi_modal_inputs").tolist()
        assert_same_object(got, items)
        assert got[0]["pixel_values"] is got[1]["pixel_values"]
        assert got[2]["pixel_values"] is not got[0]["pixel_values"]
        for number in (2, 0):
            got[number]["pixel_values"].fill_(-1.0)
        assert_same_object(decompress(there).get("multi_modal_inputs").tolist(), items)
    part = packed[3:]
    assert part.nbytes == 12_000
    assert_same_object(decompress(part).get("multi_modal_inputs").tolist(), items[3:])
    again = decompress(PackedBatch.cat([packed[[1, 0]], part])).get("multi_modal_inputs").tolist()
    assert_same_object(again, [items[1], items[0], items[3]])
    assert again[0]["pixel_values"] is again[1]["pixel_values"]


def test_cat_of_batch_wide_objects() -> None:
    held = {"a": np.arange(3), "b": [torch.ones(2)], "c": None}
    batch = TensorDict({"meta": NonTensorData(held, batch_size=[2]), "x": torch.zeros(2)}, [2])
    parts = [pickle.loads(pickle.dumps(compress(batch))) for _ in range(2)]
    got = decompress(PackedBatch.cat(parts))
    assert_same_object(got.get("meta").tolist(), [held] * 4)
    other = TensorDict({"meta": NonTensorData(7, batch_size=[2]), "x": torch.ones(2)}, [2])
    mixed = decompress(PackedBatch.cat([parts[0], compress(other)]))
    assert_same_object(mixed.get("meta").tolist(), [held, held, 7, 7])


# -------------------------------------------------------------------- outputs of a worker


def test_like_gives_the_missing_masks() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    lengths = oracle.lengths(oracle.mask_rows(batch["attention_mask"][:, 4:]))
    assert packed[[3, 1]].lengths("response").tolist() == [lengths[3], lengths[1]]
    nested = nest_batch_by_mask(batch, pad_token_id=0)
    out = TensorDict({"values": batch["advantages"] * 2 + 0.0, "entropys": batch["advantages"].abs()}, [6])
    jagged = TensorDict({"values": nested["advantages"] * 2}, [6])
    for like in (packed, nested):
        small = compress(out, like=like, strict_mask_nesting=True)
        assert_same_batch(decompress(small), out)
        assert small.lengths("response").tolist() == lengths
        assert_same_tensor(decompress(compress(jagged, like=like))["values"], out["values"])
    with pytest.raises(CoverageError):
        compress(out, strict_mask_nesting=True)
    masked = compress(batch.select("attention_mask"), like=packed)  # whose split no field of its own tells
    assert masked.layouts["sequence"].anchor == packed.layouts["sequence"].anchor == 4


def test_like_has_the_same_rows_by_its_uids() -> None:
    batch, order = rollout(), [1, 0, 2, 3, 4, 5]
    batch["attention_mask"][:, 4:] = batch["response_mask"] = torch.ones(6, 8, dtype=torch.int64)  # equal lengths
    like = compress(batch, pad_token_id=0)
    out = TensorDict({"uid": batch.get("uid"), "values": torch.rand(6, 8)}, [6])
    text = (
        "compress: field \"uid\" of row 0 is 'u1', and 'u0' in the batch that is joined with it; expected the same rows"
    )
    for known in (like, decompress(like, format="nested")):
        with pytest.raises(LayoutError, match=text):
            compress(take(out, order), like=known)
        assert_same_batch(decompress(compress(take(take(out, order), order), like=known)), out)
        assert compress(take(out, order).exclude("uid"), like=known).lengths("response").tolist() == [8] * 6
        whole = take(batch, order)  # rows with masks of their own may be others
        assert_same_batch(decompress(compress(whole, like=known, pad_token_id=0)), whole)


# -------------------------------------------------------------------- the wire


@quiet
@pytest.mark.filterwarnings("error:.*not writable")
@given(batches(), st.sampled_from(["padded", "nested"]))
def test_what_decompress_returns_is_writable_and_its_own(case: Case, form: Any) -> None:
    packed = compress(case.batch, **case.options)
    for there in (received(packed), packed):
        before = bytes(there.table.body)
        scribble(decompress(there, format=form))
        assert bytes(there.table.body) == before
        assert_same_batch(decompress(there), case.batch)


def test_a_nested_batch_owns_its_offsets() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    out = decompress(packed, format="nested")
    out["input_ids"].offsets().zero_()
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(unnest(decompress(packed, format="nested")), batch)


@quiet
@given(batches(dtypes=strategies.PLAIN_DTYPES))
def test_a_packed_batch_owns_its_bytes(case: Case) -> None:
    for nest in (False, True):
        batch = oracle.map_tensors(case.batch, oracle.copy)
        if nest:
            batch = nest_batch_by_mask(batch, **case.options)
        packed = compress(batch, **case.options)
        scribble(batch.exclude(LAYOUTS))
        assert_same_batch(decompress(packed), case.batch)


def test_nbytes_is_below_the_fill_ratio() -> None:
    batch = rollout(32, 64, 512)
    packed = compress(batch, pad_token_id=0)
    padded = sum(x.numel() * x.element_size() for x in tensors(batch))
    fill = oracle.mask_rows(batch["attention_mask"])
    ratio = sum(oracle.lengths(fill)) / (len(fill) * len(fill[0]))
    assert 0 < packed.nbytes < padded * ratio
    assert packed[:8].nbytes < packed.nbytes
    assert compress(TensorDict({}, [3])).nbytes == 0


# -------------------------------------------------------------------- the errors


def positions_of(rows: list[tuple[int, int]], prompt: int, response: int, edge: bool) -> TensorDict:
    """A batch whose positions are padded with 0 or by EDGE."""
    fields = samples.tokens(rows, prompt, response, pad=0)
    count = samples.positions(fields["attention_mask"])
    return TensorDict(fields | {"position_ids": count if edge else count * fields["attention_mask"]}, [len(rows)])


def test_a_field_without_a_pad_does_not_lose_its_columns() -> None:
    """It cannot grow with its axis, in a batch that was read from bytes either."""
    one, two = positions_of([(2, 3)], 2, 6, False), positions_of([(5, 1)], 5, 3, False)
    one["position_ids"][0, 7] = 9
    with pytest.warns(MaskpackWarning):
        packed = [compress(one, pad_token_id=0), compress(two, pad_token_id=0)]
    for parts in (packed, packed[::-1], [PackedBatch.from_bytes(part.to_bytes()) for part in packed]):
        with pytest.raises(LayoutError, match=r'"position_ids" stays padded, .* axis "sequence" grows from width 8'):
            PackedBatch.cat(parts)
        with pytest.raises(LayoutError, match='"position_ids" stays padded'):
            BatchView.cat([BatchView.of(part) for part in parts])


# -------------------------------------------------------------------- parts that do not fit


def test_batch_wide_objects_of_two_batch_dims() -> None:
    def batch(value: Any) -> TensorDict:
        return TensorDict({"t": NonTensorData(value, batch_size=[2, 3])}, batch_size=[2, 3])

    got = decompress(PackedBatch.cat([compress(batch("a")), compress(batch("b"))]))
    assert got.batch_size == (4, 3)
    assert got.get("t").tolist() == [["a"] * 3] * 2 + [["b"] * 3] * 2


@quiet
def test_a_field_that_becomes_dense_keeps_no_hints() -> None:
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[:, 30:] = 0
    positions = torch.arange(40).clamp(max=29).expand(2, 40).contiguous()
    stray = positions.clone()
    stray[0, 35] = 7
    parts = [TensorDict({"attention_mask": mask, "position_ids": x}, batch_size=[2]) for x in (positions, stray)]
    joined = PackedBatch.cat([compress(part) for part in parts])
    assert joined.forms["position_ids",].hints == ()
    assert_same_batch(decompress(joined), torch.cat(parts))


def test_a_field_joined_of_one_that_becomes_dense() -> None:
    registry = {
        "head": MaskNestingSpec(["a", "b"]),
        "tail": MaskNestingSpec("t"),
        "whole": MaskNestingSpec("w", hints=("concat:head,tail",)),
        **{name: MaskNestingSpec(name) for name in "abtw"},
    }

    def part(wide: str, narrow: str) -> TensorDict:
        fields = {
            wide: torch.ones(1, 4, dtype=torch.int64),
            narrow: torch.tensor([[1, 1, 0]]),
            "t": torch.tensor([[1, 0]]),
            "w": torch.tensor([[1, 1, 1, 0]]),
            "head": torch.tensor([[7, 300, 0]]),
            "tail": torch.tensor([[70_000, 0]]),
            "whole": torch.tensor([[7, 300, 70_000, 0]]),
        }
        return TensorDict({name: fields[name] for name in sorted(fields)}, batch_size=[1])

    parts = [part("b", "a"), part("a", "b")]
    packed = [compress(batch, registry=registry) for batch in parts]
    assert all(batch.table.kind(batch.numbers["whole",]) == "concat" for batch in packed)
    joined = PackedBatch.cat(packed)
    assert joined.forms["head",].kind == "dense"
    for name in ("head", "tail", "whole"):
        assert torch.equal(decompress(joined)[name], torch.cat([batch[name] for batch in parts]))
