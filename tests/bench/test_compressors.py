"""The rivals of `bench payload` that take valid values give back every dtype, whatever their compressor knows."""

from __future__ import annotations

import math

import pytest
import torch

from bench.rivals.compressors import OF_VALUES, encode_checked

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", OF_VALUES)
def test_all_dtypes_come_back(name: str) -> None:
    fields = [torch.tensor([[0, 1, 3], [2, 0, 1]]).to(dtype) for dtype in DTYPES]
    fields.append(torch.tensor([-0.0, math.nan, -math.inf], dtype=torch.float64))
    encode_checked({name: OF_VALUES[name]}, fields)
