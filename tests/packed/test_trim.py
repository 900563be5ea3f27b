"""decompress(widths="trim"): what is refused, signs of zeros. Programs of test_join.py trim batches of all kinds."""

from __future__ import annotations

import re

import pytest
import torch
from samples import assert_same
from tensordict import TensorDict

import maskpack as mp
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core.pads import ANY_ZERO

P, R = 20, 50


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
