"""The comparison that every other test rests on can fail; the oracle, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from oracle import assert_same_batch, assert_same_object, assert_same_tensor
from samples import DIFFERENT, mixed
from strategies import batches
from torch import Tensor


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_comparison_sees(name: str) -> None:
    assert_same_batch(mixed(), mixed())
    other = DIFFERENT[name]()
    with pytest.raises(AssertionError):
        assert_same_batch(other, mixed())
    with pytest.raises(AssertionError):
        assert_same_batch(mixed(), other)


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
def test_the_comparison_sees_every_bit_of_every_dtype(dtype: torch.dtype) -> None:
    clean = torch.zeros(3, dtype=torch.float32).to(dtype)
    assert_same_tensor(clean, oracle.copy(clean))
    for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
        raw = np.frombuffer(oracle.cells(clean).tobytes(), np.uint8).copy()
        raw[dtype.itemsize + bit // 8] ^= 1 << bit % 8
        dirty = oracle.from_cells(raw.view(f"V{dtype.itemsize}"), dtype)
        with pytest.raises(AssertionError, match=r"1 elements differ, first at \(1,\)"):
            assert_same_tensor(dirty, clean)


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (np.arange(2), np.arange(3))],
    ids=str,
)
def test_objects_are_told_apart(a: Any, b: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same_object(a, b)


@pytest.mark.filterwarnings("ignore")
@given(batches())
def test_a_snapshot_sees_a_change(case: strategies.Case) -> None:
    before = oracle.snapshot(case.batch)
    assert oracle.snapshot(case.batch) == before
    for value in case.batch.values():
        if isinstance(value, Tensor) and not value.is_nested and value.numel() and not value.dtype.is_complex:
            strategies.oracle_view(value).add_(1)
            assert oracle.snapshot(case.batch) != before
            break


def test_the_oracle_by_hand() -> None:
    mask = oracle.mask_rows(torch.tensor([[0.0, 2.0, 1.0, -0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]))
    assert mask == [[False, True, True, False], [False] * 4, [True, False, False, True]]
    assert oracle.mask_to_runs(mask) == [[(1, 2)], [], [(0, 1), (3, 1)]]
    assert oracle.offsets(mask) == [0, 2, 2, 4]
    assert oracle.indices(mask) == [1, 2, 8, 11]
    assert oracle.prefix(mask)[0] == [True, True, True, False]
    x = torch.arange(12).view(3, 4)
    assert oracle.pack(x, mask).tolist() == [1, 2, 8, 11]
    assert [row.tolist() for row in oracle.pack_rows(x, mask)] == [[1, 2], [], [8, 11]]
    assert oracle.unpack(oracle.pack(x, mask), mask, 4, -1).tolist() == [[-1, 1, 2, -1], [-1] * 4, [8, -1, -1, 11]]
    edge = oracle.unpack(oracle.pack(x, mask), mask, 4, oracle.EDGE)
    assert edge.tolist() == [[1, 1, 2, 2], [0] * 4, [8, 8, 8, 11]]
