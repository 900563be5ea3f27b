"""The comparison that every other test rests on can fail; the oracle, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from oracle import assert_same_batch, assert_same_object, assert_same_tensor
from strategies import batches
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor


def jagged(lengths: list[int], fill: float = 1.0) -> Tensor:
    bounds = torch.tensor(np.cumsum([0, *lengths]))
    return torch.nested.nested_tensor_from_jagged(torch.full((int(bounds[-1]),), fill), bounds)


def batch() -> TensorDict:
    return TensorDict(
        {
            "x": torch.tensor([[0.0, 1.0], [float("nan"), 2.0]]),
            "n": torch.tensor([1, 2]),
            "rows": jagged([1, 2]),
            "uid": NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1, torch.ones(2)]})),
            "wide": NonTensorData(1.5, batch_size=[2]),
            "sub": TensorDict({"y": torch.zeros(2, 3, dtype=torch.bfloat16)}, batch_size=[2]),
        },
        batch_size=[2],
    )


def changed(name: Any, value: Any) -> Callable[[], TensorDict]:
    def make() -> TensorDict:
        out = batch()
        out.set(name, value)
        return out

    return make


def flipped(name: Any, raw: torch.dtype) -> Callable[[], TensorDict]:
    def make() -> TensorDict:
        out = batch()
        out.get(name).view(raw).view(-1)[0] ^= 1
        return out

    return make


DIFFERENT: dict[str, Callable[[], TensorDict]] = {
    "a flipped bit": flipped("x", torch.int32),
    "a flipped bit in a sub-batch": flipped(("sub", "y"), torch.int16),
    "-0.0 for 0.0": changed("x", torch.tensor([[-0.0, 1.0], [float("nan"), 2.0]])),
    "another NaN": changed(
        "x", torch.tensor([[0, 0x3F800000], [0x7FC00001, 0x40000000]], dtype=torch.int32).view(torch.float32)
    ),
    "another dtype": changed("n", torch.tensor([1, 2], dtype=torch.int32)),
    "another shape": changed("n", torch.tensor([[1], [2]])),
    "a missing key": lambda: batch().exclude("n"),
    "a key more": changed("new", torch.zeros(2)),
    "another key order": lambda: batch().select("n", "x", "rows", "uid", "wide", "sub"),
    "a missing key in a sub-batch": changed("sub", TensorDict({}, batch_size=[2])),
    "other row lengths": changed("rows", jagged([2, 1])),
    "other jagged values": changed("rows", jagged([1, 2], 2.0)),
    "dense for jagged": changed("rows", torch.ones(2, 2)),
    "another object": changed("uid", NonTensorStack(NonTensorData("b"), NonTensorData({"k": [1, torch.ones(2)]}))),
    "another tensor inside an object": changed(
        "uid", NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1, torch.zeros(2)]}))
    ),
    "an object of another type": changed("wide", NonTensorData(np.float32(1.5), batch_size=[2])),
    "per row for batch-wide": changed("wide", NonTensorStack(NonTensorData(1.5), NonTensorData(1.5))),
    "a tensor for an object": changed("wide", torch.ones(2)),
    "another batch size": lambda: TensorDict(dict(batch().items()), batch_size=[]),
    "another device": lambda: batch().to("cpu"),
    "fewer rows": lambda: TensorDict({"n": torch.tensor([1])}, batch_size=[1]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_comparison_sees(name: str) -> None:
    assert_same_batch(batch(), batch())
    other = DIFFERENT[name]()
    with pytest.raises(AssertionError):
        assert_same_batch(other, batch())
    with pytest.raises(AssertionError):
        assert_same_batch(batch(), other)


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


def test_objects_that_are_the_same() -> None:
    odd = object()
    for item in (odd, [odd, float("nan")], {"a": np.arange(2), "b": torch.ones(2)}, None):
        assert_same_object(item, item)
    assert_same_object([float("nan"), "a", {"k": torch.ones(1)}], [float("nan"), "a", {"k": torch.ones(1)}])


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
    assert oracle.runs_to_mask([[(1, 2)], [], [(0, 1), (3, 1)]], 4) == mask
    assert oracle.offsets(mask) == [0, 2, 2, 4]
    assert oracle.indices(mask) == [1, 2, 8, 11]
    assert oracle.prefix(mask)[0] == [True, True, True, False]
    x = torch.arange(12).view(3, 4)
    assert oracle.pack(x, mask).tolist() == [1, 2, 8, 11]
    assert [row.tolist() for row in oracle.pack_rows(x, mask)] == [[1, 2], [], [8, 11]]
    assert oracle.unpack(oracle.pack(x, mask), mask, 4, -1).tolist() == [[-1, 1, 2, -1], [-1] * 4, [8, -1, -1, 11]]
    edge = oracle.unpack(oracle.pack(x, mask), mask, 4, oracle.EDGE)
    assert edge.tolist() == [[1, 1, 2, 2], [0] * 4, [8, 8, 8, 11]]
