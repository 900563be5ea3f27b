"""decompress(widths="trim"): the columns that are real in any row, of each axis, against slices of the whole batch."""

from __future__ import annotations

import re

import pytest
import torch
from samples import PAD, VARIANTS, assert_same, workload
from tensordict import TensorDict

import maskpack as mp
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core.pads import ANY_ZERO

P, R = 20, 50


def sliced(x, first, last):
    """The columns of the prompt, the response or the sequence axis between the first and the last real one."""
    if x.dim() < 2:
        return x
    dim = 2 if x.dim() == 3 and x.shape[2] == P + R else 1
    begin, end = {P + R: (first, last), P: (first, P), R: (0, last - P)}.get(x.shape[dim], (0, x.shape[dim]))
    return x.narrow(dim, begin, end - begin)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [list(range(12)), [3, 1], [5]])
def test_columns_that_are_real_in_any_row(variant, rows):
    batch = workload(variant, 12, P, R)
    packed = mp.compress(batch, pad_token_id=PAD).take(rows)
    whole = mp.decompress(packed)
    real = [column for column in range(P + R) if any(row[column] for row in whole["attention_mask"].tolist())]
    trimmed = mp.decompress(packed, widths="trim")
    assert list(trimmed.keys()) == list(whole.keys())
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and not value.is_nested:
            assert_same(trimmed[name], sliced(value, real[0], real[-1] + 1).contiguous())
    assert_same(unnest(mp.decompress(packed, format="nested", widths="trim")), trimmed)
    assert_same(mp.decompress(packed), whole)


def test_no_rows_and_no_tokens():
    batch = workload("reference", 3, P, R)
    packed = mp.compress(batch, pad_token_id=PAD)
    assert mp.decompress(packed[:0], widths="trim")["input_ids"].shape == (0, 0)
    empty = batch.apply(lambda x: torch.full_like(x, PAD) if x.dtype == torch.int64 else torch.zeros_like(x))
    for name in ("attention_mask", "response_mask", "position_ids"):
        empty[name] = torch.zeros_like(empty[name])
    assert mp.decompress(mp.compress(empty, pad_token_id=PAD), widths="trim")["responses"].shape == (3, 0)


def test_batch_dims_behind_the_rows_are_refused():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])
    inner = TensorDict({"ids": mask * 2}, batch_size=[2, 4])
    for batch, where in (
        (inner, "a batch with batch dims (4,)"),
        (TensorDict({"m": mask, "inner": inner}, [2]), 'a sub-batch "inner"'),
    ):
        packed = mp.compress(batch, registry={"m": mp.MaskNestingSpec("m"), "ids": mp.MaskNestingSpec(None)})
        with pytest.raises(mp.errors.LayoutError, match=re.escape(f'widths="trim" in {where}')):
            mp.decompress(packed, widths="trim")
    assert mp.decompress(packed, "m", widths="trim")["m"].tolist() == [[1, 1], [1, 0]]


def test_signs_of_zeros_move_with_their_columns():
    """Columns 2 to 9 of 12 are real in some row."""
    mask = torch.zeros(2, 12, dtype=torch.int64)
    mask[0, 2:6], mask[1, 5:10] = 1, 1
    minus = torch.tensor([[1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0]], dtype=torch.bool)
    x = torch.where(mask.bool(), torch.arange(24.0).reshape(2, 12) + 1, torch.where(minus, -0.0, 0.0))
    packed = mp.compress(TensorDict({"m": mask, "x": x}, [2]), registry={"m": ("m", 0), "x": ("m", [0, ANY_ZERO])})
    assert packed.forms["x",].kind == "padded"
    for seen in (
        mp.decompress(packed, widths="trim"),
        unnest(mp.decompress(packed, format="nested", widths="trim")),
        mp.decompress(packed[:], widths="trim"),
    ):
        assert_same(seen["x"], x[:, 2:10].contiguous())


def test_columns_that_were_trimmed_have_no_signs_once_they_are_there_again():
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])
    x = torch.where(mask.bool(), 1.0, torch.tensor([0.0, 0.0, -0.0, 0.0, -0.0, -0.0, 0.0]))
    registry = {"m": ("m", 0), "x": ("m", [0, ANY_ZERO])}
    packed = mp.compress(TensorDict({"m": mask, "x": x}, [2]), registry=registry)
    nested = mp.decompress(packed, format="nested", widths="trim")
    wide = TensorDict({"m": torch.ones(1, 8, dtype=torch.int64), "x": torch.ones(1, 8)}, [1])
    joined = mp.PackedBatch.cat([mp.compress(nested), mp.compress(wide, registry=registry)])
    assert_same(mp.decompress(joined)["x"][:2], torch.cat([x[:, :3], torch.zeros(2, 5)], 1))
