"""Rows that are packed from values and lengths: against the rows that were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same_object, assert_same_tensor

from maskpack import PackedBatch, decompress
from maskpack.core.objects import Objects
from maskpack.errors import LayoutError
from maskpack.packed.values import Values, packed_rows

LENGTHS = ([3, 0, 1, 4], [2, 2, 5, 1])
"""Of `near`, which is encoded after `base` though it comes before, and of `pairs`."""


def fields() -> dict[str, list[Any]]:
    torch.manual_seed(0)
    near = [torch.randint(1 << 40, (n,)) for n in LENGTHS[0]]
    return {
        "near": near,
        "base": [x - 1 for x in near],
        "text": ["a", "bc", "", "d"],
        "pairs": [torch.rand(n, 2) for n in LENGTHS[1]],
        "score": [torch.tensor(-0.0), torch.tensor(1.5), torch.tensor(float("nan")), torch.tensor(7.0)],
        "held": [{"at": row, "of": torch.arange(row + 1)} for row in range(4)],
    }


def packed(given: dict[str, list[Any]]) -> PackedBatch:
    columns: dict[str, Values | Objects] = {}
    for name, items in given.items():
        if not isinstance(items[0], torch.Tensor):
            columns[name] = Objects(items, 1).stowed()
        elif items[0].dim() == 0:
            columns[name] = Values(torch.stack(items))
        else:
            columns[name] = Values(torch.cat(items), np.array([len(x) for x in items]))
    return packed_rows(columns, 4, {"near": ("near:base",)}, "put_data")


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1], [2]], ids=str)
def test_rows_come_back(order: list[int]) -> None:
    given = fields()
    for _ in range(2):  # by a new plan, and by the remembered one
        nested = decompress(packed(given).take(order), format="nested")
        assert {*nested.keys()} - {"_maskpack"} == {*given}
        for name, items in given.items():
            rows = nested.get(name)
            for place, row in enumerate(order):
                if isinstance(items[0], torch.Tensor):
                    assert_same_tensor(rows.unbind()[place].contiguous(), items[row], name)
                else:
                    assert_same_object(rows.tolist()[place], items[row], name)


def test_values_without_plain_bits_are_refused() -> None:
    with pytest.raises(LayoutError, match=r'put_data: field "x" is torch.float32 on meta, without plain bits'):
        packed_rows({"x": Values(torch.zeros(4, device="meta"))}, 4, {}, "put_data")
