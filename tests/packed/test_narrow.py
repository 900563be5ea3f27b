"""PackedBatch.narrow, and columns of several words: a part of the elements of a field, against plain loops."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from needs import needs
from oracle import assert_same_batch, assert_same_tensor
from strategies import Case, batches
from tensordict import TensorDict
from torch import Tensor

from maskpack import EDGE, PER_ROW, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core import abi
from maskpack.packed.rows import Rows

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
LENGTHS = (0, 1, 31, 32, 33, 200, 257, 300)
WIDTH = 300


def routers(
    layers: int = 48, k: int = 8, dtype: torch.dtype = torch.int16, lengths: tuple[int, ...] = LENGTHS, seed: int = 0
) -> TensorDict:
    """Rows of these lengths, each behind a padding of its number; ids of 128 experts."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((len(lengths), WIDTH), np.int64)
    for row, length in enumerate(lengths):
        start = min(row, WIDTH - length)
        mask[row, start : start + length] = 1
    ids = rng.integers(0, 128, (len(lengths), WIDTH, layers, k)) * mask[:, :, None, None]
    tokens = rng.integers(1, 1000, mask.shape) * mask
    fields = {"attention_mask": mask, "input_ids": tokens, "routed_experts": ids}
    batch = TensorDict({name: torch.from_numpy(field) for name, field in fields.items()}, [len(lengths)])
    return batch.set("routed_experts", batch["routed_experts"].to(dtype))


def part(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` of a dim from `start` on."""
    return x[(slice(None),) * dim + (slice(start, start + length),)]


def with_part(batch: TensorDict, name: Any, dim: int, start: int, length: int) -> TensorDict:
    if isinstance(name, tuple) and len(name) > 1:
        return batch.clone(recurse=False).set(name[0], with_part(batch[name[0]], name[1:], dim, start, length))
    return batch.clone(recurse=False).set(name, part(batch[name], dim, start, length).contiguous())


def kind(packed: PackedBatch, name: str = "routed_experts") -> str:
    return packed.table.kind(packed.numbers[name,])


def test_a_codec() -> None:
    needs("zstandard")
    batch = routers()
    ids = batch["routed_experts"].long()
    batch["routed_experts"] = (ids**3 // 127**2).short()  # small ones are frequent
    packed = compress(batch, pad_token_id=0, codec="zstd")
    want = with_part(batch, "routed_experts", 2, 36, 12)
    for own in (PackedBatch.from_bytes(packed.to_bytes()), pickle.loads(pickle.dumps(packed))):
        assert kind(own).startswith("columns plain")
        assert_same_batch(decompress(own), batch)
        assert_same_batch(decompress(own.narrow("routed_experts", 36, 12)), want)
        again = PackedBatch.from_bytes(own.narrow("routed_experts", 36, 12).to_bytes())
        assert_same_batch(decompress(again), want)


def test_other_columns_are_not_read() -> None:
    batch = routers()
    packed = compress(batch, pad_token_id=0)
    entry = packed.table.entries[packed.table.fields[packed.numbers["routed_experts",]]]
    body = packed.table.body.copy()
    for at in range(int(entry["first"]), int(entry["first"]) + 48):
        for place in () if at - entry["first"] in range(12, 24) else packed.table.entry_places(at):
            body[int(place["at"]) : int(place["at"] + place["size"] * place["count"])] = 0xEE
    spoilt = replace(packed, rows=Rows.of(packed.table.like(body=body), packed.schema))
    seen = decompress(spoilt.narrow("routed_experts", 12, 12), "routed_experts")["routed_experts"]
    assert_same_tensor(seen, part(batch["routed_experts"], 2, 12, 12).contiguous())
    own = packed.narrow("routed_experts", 12, 12)
    assert own.nbytes < 0.3 * packed.nbytes
    assert len(own.to_bytes()) < 0.3 * len(packed.to_bytes())


def test_a_field_that_two_names_hold_is_narrowed_for_one() -> None:
    batch = routers()
    batch["copy"] = batch["routed_experts"].clone()
    specs = {name: MaskNestingSpec("attention_mask", hints=("columns",)) for name in batch.keys()}  # noqa: SIM118
    packed = compress(batch, registry=specs)
    assert packed.table.fields[packed.numbers["copy",]] == packed.table.fields[packed.numbers["routed_experts",]]
    own = packed.narrow("copy", 3, 20).narrow("copy", 10, 5)
    want = with_part(batch, "copy", 2, 13, 5)
    for there in (
        own,
        PackedBatch.from_bytes(own.to_bytes()),
        pickle.loads(pickle.dumps(own)),
        own[:],
        own.take(range(8)),
    ):
        assert_same_batch(decompress(there), want)


@given(batches(), st.data())
def test_any_tensor_of_any_batch(case: Case, data: st.DataObject) -> None:
    """fuzz_rows.py moves rows before and after."""
    packed = compress(case.batch, **case.options)
    assert_same_batch(decompress(packed), case.batch)
    fields = {form: case.batch[form.path] for form in packed.tensors if form.kind in ("padded", "dense")}
    dims = [(form, dim) for form, x in fields.items() for dim in range(1, x.dim())]
    dims = [(form, dim) for form, dim in dims if form.kind == "dense" or dim != form.ragged_dim]
    assume(dims)
    form, dim = data.draw(st.sampled_from(dims))
    field = fields[form]
    start = data.draw(st.integers(0, field.shape[dim]))
    length = data.draw(st.integers(0, field.shape[dim] - start))
    given_dim = data.draw(st.sampled_from([dim, dim - field.dim()]))
    given_start = start - field.shape[dim] if start < field.shape[dim] and data.draw(st.booleans()) else start
    own = packed.narrow(form.path, given_start, length, dim=given_dim)
    want = with_part(case.batch, form.path, dim, start, length)
    assert_same_batch(decompress(own), want)
    assert_same_batch(decompress(PackedBatch.from_bytes(own.to_bytes(allow_pickle=True), allow_pickle=True)), want)


def test_fields_without_columns() -> None:
    """Rows that repeat, positions with the width behind, and pads of rows."""
    batch = routers(4, 2)[[3, 3, 5, 5, 3]]
    batch["position_ids"] = torch.arange(WIDTH).expand(5, 3, WIDTH).clone() * batch["attention_mask"][:, None]
    batch["pairs"] = torch.zeros(5, WIDTH, 3, dtype=torch.complex128) + torch.arange(5)[:, None, None]
    specs = {name: MaskNestingSpec("attention_mask") for name in ("attention_mask", "input_ids", "routed_experts")}
    specs["pairs"] = MaskNestingSpec("attention_mask", PER_ROW)
    specs["position_ids"] = MaskNestingSpec("attention_mask", ragged_dim=-1, hints=("columns",))
    packed = compress(batch, registry=specs)
    assert kind(packed).startswith("dictionary")
    for name, dim in (("routed_experts", 2), ("routed_experts", 3), ("position_ids", 1), ("pairs", 2)):
        own, want = packed.narrow(name, 1, 1, dim=dim), with_part(batch, name, dim, 1, 1)
        assert_same_batch(decompress(own), want)
        assert_same_batch(decompress(own[1:4]), want[1:4])
    assert_same_batch(decompress(packed.narrow("position_ids", 1, 2)), with_part(batch, "position_ids", 1, 1, 2))


@pytest.mark.parametrize("shape", [(2, 4, 3, 0), (2, 4, 0, 3), (2, 4, 3, 2), (0, 4, 3, 2)])
def test_a_dim_of_size_0(shape: tuple[int, ...]) -> None:
    batch = TensorDict({"m": torch.ones(shape[:2]), "x": torch.arange(math.prod(shape)).view(shape)}, shape[:1])
    packed = compress(batch, registry={name: MaskNestingSpec("m") for name in "mx"})
    for dim, size in enumerate(shape[2:], 2):
        for length in range(size + 1):
            less = packed.narrow("x", 0, length, dim=dim)
            want = with_part(batch, "x", dim, 0, length)
            assert_same_batch(decompress(less), want)
            assert_same_batch(decompress(less.narrow("x", 0, 0, dim=5 - dim)), with_part(want, "x", 5 - dim, 0, 0))


# -------------------------------------------------------------------- columns of several words


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("columns", "items"), [(17, 1), (17, 2), (20, 3), (17, 6), (48, 8), (18, 16), (17, 24), (2, 300)]
)
@pytest.mark.parametrize("pad", [0, EDGE, PER_ROW])
def test_columns_of_any_words(columns: int, items: int, dtype: torch.dtype, pad: Any) -> None:
    """Each batch twice: the form is looked for, then remembered."""
    rng = np.random.default_rng(columns * items)
    lengths = LENGTHS[:6] if columns * items > 400 else LENGTHS
    mask = torch.tensor([[int(at < n) for at in range(WIDTH)] for n in lengths])
    column = np.arange(columns)[:, None]
    for turn in range(2):
        values = rng.integers(0, 1 + column % 5, (len(lengths), WIDTH, columns, items)) - 5 * column
        x = torch.from_numpy(values).to(dtype)
        for row, n in enumerate(lengths):
            x[row, n:] = 0 if pad == 0 or (pad is EDGE and not n) else x[row, n - 1] if pad is EDGE else row + 1
        batch = TensorDict({"m": mask, "x": x}, [len(lengths)])
        specs = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", pad, hints=("columns",))}
        packed = compress(batch, registry=specs)
        if columns > abi.FEW_COLUMNS and (dtype == torch.int16 or items >= 8):
            assert kind(packed, "x") == "columns blocks"
        assert_same_batch(decompress(packed), batch)
        nested = unnest(decompress(packed, format="nested"))
        assert_same_batch(nested, batch)
        assert_same_batch(decompress(packed.take([5, 0, 3, 3])), batch[[5, 0, 3, 3]])
        assert_same_batch(decompress(packed.narrow("x", 1, columns - 1)), with_part(batch, "x", 2, 1, columns - 1))
        assert turn == 0 or kind(packed, "x") == kind(compress(batch, registry=specs), "x")


def test_columns_of_several_words_as_another_writer_may_store_them() -> None:
    """Elements [384] in columns of eight words: only whole columns are cut."""
    batch = routers()
    packed = compress(batch, pad_token_id=0)
    forms = [replace(form, shape=(384,)) if form.path == ("routed_experts",) else form for form in packed.tensors]
    packed = replace(packed, schema=replace(packed.schema, forms=tuple(forms)))
    assert packed.table.entries[packed.table.fields[packed.numbers["routed_experts",]]]["number"] == 48
    for start, length in itertools.product((0, 4, 8), (4, 8, 12)):
        seen = decompress(packed.narrow("routed_experts", start, length, dim=2))["routed_experts"]
        assert_same_tensor(seen, part(batch["routed_experts"].flatten(2), 2, start, length).contiguous())


def test_a_remembered_form_that_no_longer_fits() -> None:
    batch = routers()
    assert kind(compress(batch, pad_token_id=0)) == "columns blocks"
    zeros = batch.clone()
    zeros["routed_experts"].zero_()
    large = batch.clone()
    large["routed_experts"] = torch.randint(-(2**15), 2**15, large["routed_experts"].shape).short()
    large["routed_experts"] *= batch["attention_mask"][:, :, None, None]
    same = batch[[7] * len(LENGTHS)]
    stray = batch.clone()
    stray["routed_experts"][0, WIDTH - 1, 3, 3] = 7
    for other, form in ((zeros, ""), (batch, ""), (large, ""), (batch, ""), (same, "dictionary"), (stray, "")):
        for _ in range(2):
            packed = compress(other, pad_token_id=0)
            assert_same_batch(decompress(packed), other)
        assert kind(packed).startswith(form)


def test_few_tokens_take_no_columns() -> None:
    """A column has 128 bytes in the table."""
    small, large = routers(lengths=(3, 2)), routers(lengths=(300,) * 4)
    assert [kind(compress(batch, pad_token_id=0)) for batch in (small, large)] == ["blocks", "columns blocks"]
