"""Invariant calls of packed_attention: values, bits of rows in any packing and of a tree, and gradients in order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_loops import attend, tensors
from torch import Tensor

from maskpack.errors import ReplayError
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops import attention, prefix_attention
from maskpack.ops.in_order import in_order
from maskpack.ops.prefix_attention import Bounds, Call, gather_rows, ordered_attention

LENGTHS = [1, 64, 3, 150, 65, 129, 2]
WAYS = [(None, None), (70, None), (3, None), (None, 2.0), (20, 2.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), WAYS)
def test_rows_have_the_bits_of_rows_alone(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    qkv, how = tensors(LENGTHS, dtype=dtype), {"window": window, "softcap": softcap}
    seen = attend(qkv, LENGTHS, invariant=True, **how)
    limit = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert float((seen - attend(qkv, LENGTHS, **how)).abs().max()) < limit
    for own, *row in zip(seen.split(LENGTHS), *(x.split(LENGTHS) for x in qkv), strict=True):
        assert torch.equal(own, attend(row, [own.shape[0]], invariant=True, **how))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("window", "softcap"), WAYS)
def test_a_tree_has_the_bits_of_whole_rows(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    rng, how = np.random.default_rng(0), {"window": window, "softcap": softcap, "invariant": True}
    trunk = rng.integers(0, 9, 140).tolist()
    rows = [
        trunk[:at] + rng.integers(9, 99, more).tolist() for at, more in ((5, 9), (5, 80), (70, 1), (128, 30), (140, 3))
    ]
    tree = PrefixTree.from_ids(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), min_shared=1)
    qkv = tensors([tree.num_tokens], dtype=dtype)
    seen = attend(qkv, tree.nodes.counts.tolist(), tree=tree, **how)
    for begin, end in zip(tree.row_offsets[:-1], tree.row_offsets[1:], strict=True):
        path = torch.from_numpy(tree.of_row_token[begin:end])
        assert torch.equal(seen[path], attend([x[path] for x in qkv], [len(path)], **how))


def test_a_tree_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge of parts rounds once for each."""
    merged: list[Any] = []
    monkeypatch.setattr(attention, "_merging_kernel", lambda *_: "kernel")
    monkeypatch.setattr(prefix_attention, "merged_attention", lambda query, *_: merged.append(query) or query)
    tree = PrefixTree.from_ids(np.array([1, 2, 3, 1, 2, 4]), np.array([0, 3, 6]), min_shared=1)
    qkv = tensors([tree.num_tokens])
    for invariant in (True, False):
        attend(qkv, tree.nodes.counts.tolist(), tree=tree, invariant=invariant)
        assert len(merged) == (not invariant)


def test_flex_is_refused() -> None:
    with pytest.raises(ReplayError, match=r'backend "flex" with .* invariant=True; expected one whose blocks begin'):
        attend(tensors([5]), [5], invariant=True, backend="flex")


def test_invariant_calls_prefer_the_kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_flash_package", lambda *_: "flash_attn.cute")
    query: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(5, 4, 64))
    assert [attention.backend_for(query, None, way) for way in (False, True)] == ["flash", "varlen"]
    assert attention.backend_for(query, 2.0, True) == "flash"


# -------------------------------------------------------------------- sums in order


@pytest.fixture
def set_apart() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def asked() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("set_apart")
def test_the_process_is_asked_only_meanwhile() -> None:
    with in_order():
        assert asked() == (True, False)
        with pytest.raises(KeyError), in_order():
            raise KeyError
        assert asked() == (True, False)
    assert asked() == (False, False)
    for warns in (False, True):  # with a warning alone, flash attention adds as threads come
        torch.use_deterministic_algorithms(True, warn_only=warns)
        with in_order():
            assert asked() == (True, False)
        assert asked() == (True, warns)


class Kernel:
    """Notes whether gradients are asked to have an order."""

    seen: list[tuple[bool, bool]]

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        self.seen = [asked()]
        return call.query * 2, call.query.new_zeros(call.query.shape[1], call.query.shape[0])

    def backward(self, call: Call, slope: Tensor, *_: Any) -> tuple[Tensor, ...]:
        self.seen.append(asked())
        return slope * 2, torch.ones_like(call.key), torch.zeros_like(call.value)


def test_backward_passes_of_kernels_and_of_gathered_rows_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (x.requires_grad_() for x in tensors([5]))
    kernel, bounds = Kernel(), Bounds(torch.tensor([0, 5]), torch.tensor([0, 5]), 5, 5)
    ordered_attention(query, key, value, bounds, 0.4, kernel).sum().backward()
    assert kernel.seen == [(False, False), (True, False)]
    assert bool((query.grad == 2).all())
    assert bool((key.grad == 1).all())
    used: list[bool] = []

    def noting() -> Any:
        used.append(True)
        return in_order()

    monkeypatch.setattr(prefix_attention, "in_order", noting)
    index = torch.tensor([0, 2, 2, 4])
    for ordered in (False, True):
        (slope,) = torch.autograd.grad(gather_rows(query, index, ordered).sum(), query)
        assert slope[:, 0, 0].tolist() == [1, 0, 2, 0, 1]
        assert used == [True] * ordered
