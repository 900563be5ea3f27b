"""Attention over a PrefixTree against a loop over the tokens of each row, values and gradients in float64. Merged calls
run with a kernel in plain torch; Triton kernels run on a GPU, or interpreted on the host."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attention_loops import OnGpu, head_major, naive
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels import kernel_marks
from output_layers import DEVICE
from torch import Tensor

from maskpack.errors import ReplayError
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops import attention, prefix_attention
from maskpack.ops.attention import packed_attention
from maskpack.ops.prefix_attention import Bounds, Call, merged_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


SCALE = 0.4
interpreted = pytest.mark.skipif(
    DEVICE != "cpu", reason="tensors of the host; tests/gpu/test_cuda_prefix.py has others"
)


class Plain:
    """A varlen kernel of loops over rows."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        query, key, value, bounds, causal, scale = call
        out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0])
        for of_queries, of_keys in self._rows(bounds):
            scores = self._scores(query[of_queries], key[of_keys], causal, scale)
            lse[:, of_queries] = scores.logsumexp(-1)
            out[of_queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self._every(value[of_keys], query))
        return out, lse

    def backward(self, call: Call, slope: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
        """Dao et al., FlashAttention, 2022, appendix B.4: from the output and log-sum-exp that are given."""
        query, key, value, bounds, causal, scale = call
        slopes = [torch.zeros_like(x) for x in (query, key, value)]
        for of_queries, of_keys in self._rows(bounds):
            scores = self._scores(query[of_queries], key[of_keys], causal, scale)
            weights = (scores - lse[:, of_queries, None]).exp()
            of_weights = torch.einsum("qhd,khd->hqk", slope[of_queries], self._every(value[of_keys], query))
            delta = (slope[of_queries] * out[of_queries]).sum(-1).T[..., None]
            of_scores = weights * (of_weights - delta) * scale
            slopes[0][of_queries] += torch.einsum("hqk,khd->qhd", of_scores, self._every(key[of_keys], query))
            slopes[1][of_keys] += self._summed(torch.einsum("hqk,qhd->khd", of_scores, query[of_queries]), key)
            slopes[2][of_keys] += self._summed(torch.einsum("hqk,qhd->khd", weights, slope[of_queries]), key)
        return slopes

    @staticmethod
    def _rows(bounds: Bounds) -> Any:
        ends = [bounds.queries.tolist(), bounds.keys.tolist()]
        assert bounds.longest_queries == max(np.diff(ends[0]))
        assert bounds.longest_keys == max(np.diff(ends[1]))
        parts = [[slice(a, b) for a, b in itertools.pairwise(own)] for own in ends]
        return zip(*parts, strict=True)

    @staticmethod
    def _every(x: Tensor, query: Tensor) -> Tensor:
        return x.repeat_interleave(query.shape[1] // x.shape[1], 1)

    @staticmethod
    def _summed(x: Tensor, key: Tensor) -> Tensor:
        return x.reshape(x.shape[0], key.shape[1], -1, x.shape[2]).sum(2)

    def _scores(self, query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query, self._every(key, query)) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + key.shape[0] - query.shape[0])
        return scores.masked_fill(later, -torch.inf) if causal else scores


class Problem:
    """Rows of ids, their tree, and random tensors of its tokens and of `tail` more."""

    def __init__(self, rows: Sequence[Sequence[int]], min_shared: int = 1, tail: int = 0, seed: int = 0) -> None:
        ids = np.array([token for row in rows for token in row], np.int64)
        offsets = np.cumsum([0, *map(len, rows)])
        self.tree = PrefixTree.from_ids(ids, offsets, min_shared=min_shared)
        self.tokens = self.tree.num_tokens + tail
        counts = [*self.tree.nodes.counts.tolist(), *[tail] * bool(tail)]
        self.bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.longest = max(counts, default=0)
        own = self.tree.of_row_token
        self.paths = [own[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        self.paths.append(list(range(self.tree.num_tokens, self.tokens)))
        source = torch.Generator().manual_seed(seed)
        shapes = [(self.tokens, heads, 8) for heads in (4, 2, 2, 4)]
        *self.qkv, self.slope = (torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes)

    def naive(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, cap: float | None) -> Tensor:
        return naive(query, key, value, self.paths, SCALE, window, cap)

    def ours(self, query: Tensor, key: Tensor, value: Tensor, window: Any, cap: Any, **more: Any) -> Tensor:
        options = {"scale": SCALE, "window": window, "softcap": cap, "tree": self.tree} | more
        return packed_attention(query, key, value, self.bounds, self.longest, **options)

    def merged(self, query: Tensor, key: Tensor, value: Tensor, _window: Any, _cap: Any) -> Tensor:
        bounds = Bounds(self.bounds, self.bounds, self.longest, self.longest)
        return merged_attention(query, key, value, bounds, self.tree, SCALE, Plain())

    def results(self, attend: Callable[..., Tensor], *more: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in self.qkv]
        out = attend(*leaves, *more)
        return [out.detach(), *torch.autograd.grad((out * self.slope).sum(), leaves)]


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


TRIES = {
    "groups": [[5, 6, 7] + [8] * n for n in (0, 1, 4)] + [[9, 10], [9, 11, 12]],
    "a deep trie": [[5] * n + [6] * 2 for n in range(1, 12)],
    "eight levels": [[5] * n + [6] * 2 for n in range(1, 10)],
    "nine levels": [[5] * n + [6] * 2 for n in range(1, 11)],
}
OPTIONS = [(None, None), (1, None), (3, None), (100, None), (None, 2.0), (3, 2.0)]


@pytest.mark.parametrize(("window", "cap"), OPTIONS)
@pytest.mark.parametrize("rows", [TRIES["groups"], TRIES["a deep trie"]], ids=["groups", "a deep trie"])
def test_flex_attention_sees_the_same_tokens(rows: Any, window: Any, cap: Any) -> None:
    problem = Problem(rows, tail=2)
    seen = problem.ours(*problem.qkv, window, cap, backend="flex")
    assert apart([seen], [problem.naive(*problem.qkv, window, cap)]) < 1e-12


def test_masks_of_flex_attention_are_those_of_their_tree() -> None:
    """Three nodes of a token each: siblings under one, and a chain."""
    siblings, chain = Problem([[5, 6], [5, 7]]), Problem([[5], [5, 6], [5, 6, 7]])
    assert torch.equal(siblings.bounds, chain.bounds)
    chain.bounds = siblings.bounds
    for problem in (siblings, chain, siblings):
        seen = problem.ours(*problem.qkv, None, None, backend="flex")
        assert apart([seen], [problem.naive(*problem.qkv, None, None)]) < 1e-12
    alone = packed_attention(*siblings.qkv, siblings.bounds, 1, scale=SCALE, backend="flex")
    assert apart([alone], [siblings.qkv[2].repeat_interleave(2, 1)]) < 1e-12


@given(
    st.lists(st.lists(st.integers(3, 4), max_size=9), min_size=1, max_size=7).filter(any),
    st.integers(1, 3),
    st.integers(0, 2),
    st.none() | st.integers(1, 9),
    st.sampled_from([None, None, 2.0]),
)
@example(TRIES["a deep trie"], 1, 3, None, None)
@example([[5, 6, 7]] * 3, 1, 0, None, None)
@example([[], [5, 6], [5], []], 1, 3, 3, 2.0)
@settings(max_examples=100)
def test_any_rows(rows: list[list[int]], min_shared: int, tail: int, window: int | None, cap: float | None) -> None:
    """Values and gradients are those of the loops."""
    problem = Problem(rows, min_shared, tail)
    truth = problem.results(problem.naive, window, cap)
    assert apart(problem.results(problem.ours, window, cap), truth) < 1e-12
    if window is None and cap is None:
        assert apart(problem.results(problem.merged, None, None), truth) < 1e-12


@pytest.mark.parametrize("of", ["torch", pytest.param("triton", marks=[*kernel_marks, interpreted])])
@pytest.mark.parametrize("turned", [[0], [1], [2], [0, 1, 2]], ids=["queries", "keys", "values", "all"])
@pytest.mark.parametrize("rows", ["groups", "a deep trie"])
def test_queries_keys_and_values_may_be_head_major(
    rows: str, turned: list[int], of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(TRIES[rows], tail=2)
    truth = problem.results(problem.naive, None, None)
    problem.qkv = [head_major(x) if number in turned else x for number, x in enumerate(problem.qkv)]
    monkeypatch.setattr(prefix_attention, "uses_triton", lambda device: of == "triton")
    assert apart(problem.results(problem.merged, None, None), truth) < (1e-12 if of == "torch" else 1e-5)


def test_a_level_is_a_call() -> None:
    calls: list[bool] = []

    class Counted(Plain):
        def forward(self, call: Call) -> Any:
            calls.append(call.causal)
            return super().forward(call)

    problem = Problem(TRIES["a deep trie"])
    bounds = Bounds(problem.bounds, problem.bounds, problem.longest, problem.longest)
    merged_attention(*problem.qkv, bounds, problem.tree, SCALE, Counted())
    assert calls == [True] + [False] * 10
    assert problem.tree.num_levels == 10


@pytest.mark.parametrize(("window", "cap"), OPTIONS)
def test_windows_and_caps_are_not_merged(window: Any, cap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are merged know neither."""
    monkeypatch.setattr(attention, "_merging_kernel", lambda *given: Plain())
    problem = Problem(TRIES["a deep trie"])
    truth = problem.results(problem.naive, window, cap)
    assert apart(problem.results(problem.ours, window, cap), truth) < 1e-12


def test_levels_are_rounded_once() -> None:
    """Parts in bfloat16, of ten levels: a rounding after each would be off by several units in the last place."""
    parts: list[tuple[Tensor, Tensor]] = []

    class Rounded(Plain):
        def forward(self, call: Call) -> Any:
            out, lse = super().forward(Call(*(x.double() for x in call[:3]), *call[3:]))
            parts.append((out.bfloat16(), lse.float()))
            return out.bfloat16(), lse.float()

    problem = Problem([[5] * n + [6] * 40 for n in range(1, 12)])
    bounds = Bounds(problem.bounds, problem.bounds, problem.longest, problem.longest)
    seen = merged_attention(*(x.bfloat16() for x in problem.qkv), bounds, problem.tree, SCALE, Rounded())
    (out, lse), *rest = [(x.double(), y.double()) for x, y in parts]
    for level, (other, other_lse) in zip(prefix_attention.levels(problem.tree, torch.device("cpu")), rest, strict=True):
        out, lse = merged_by_definition(out, lse, level.queries, other, other_lse)
    assert seen.dtype == torch.bfloat16
    half_a_unit = torch.finfo(torch.bfloat16).eps / 2
    assert bool(((seen.double() - out).abs() <= 1.01 * half_a_unit * out.abs() + 1e-6).all())


def test_gradients_of_repeated_rows_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where atomic additions round, as on a GPU, 1 + 2^-9 is 1 in bfloat16, however often it is added."""
    added = torch.Tensor.index_add_

    def rounding(sums: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
        for at, row in zip(index.tolist(), rows, strict=True):
            added(sums, dim, torch.tensor([at]), row[None])
        return sums

    monkeypatch.setattr(torch.Tensor, "index_add_", rounding)
    x = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    slopes = torch.full((513, 3), 2.0**-9)
    slopes[0] = 1.0
    prefix_attention.gather_rows(x, torch.ones(513, dtype=torch.int64)).backward(slopes.bfloat16())
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0] * 3, [2.0] * 3]


def test_tables_are_made_once_and_released_with_their_tree() -> None:
    problem = Problem(TRIES["groups"])
    for window in (None, 2, None, 2):
        problem.ours(*problem.qkv, window, None)
    tables = prefix_attention._tables[problem.tree]
    assert sorted(key[2] or 0 for key in tables if key[0] == "key_rows") == [0, 2]
    held = weakref.ref(problem.tree)
    del problem, tables
    gc.collect()
    assert held() is None


def merged_by_definition(out: Tensor, lse: Tensor, index: Tensor, other: Tensor, other_lse: Tensor) -> list[Tensor]:
    """In float64, a token and a head at a time."""
    out, lse, other, other_lse = (x.double().clone() for x in (out, lse, other, other_lse))
    for nth, token in enumerate(index.tolist()):
        for head in range(out.shape[1]):
            total = lse[head, token].exp() + other_lse[head, nth].exp()
            parts = lse[head, token].exp() * out[token, head] + other_lse[head, nth].exp() * other[nth, head]
            out[token, head] = parts / total
            lse[head, token] = total.log()
    return [out, lse]


@pytest.mark.parametrize("of", ["torch", pytest.param("triton", marks=kernel_marks)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [Tensor.contiguous, head_major], ids=["token-major", "head-major"])
@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "size"),
    [(40, 17, 3, 8), (5, 5, 1, 72), (33, 1, 2, 128), (9, 0, 2, 8), (70, 33, 1, 16), (20, 16, 4, 24)],
)
def test_results_are_merged_and_added_in_place(
    of: str, dtype: torch.dtype, stored: Any, tokens: int, rows: int, heads: int, size: int
) -> None:
    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (3 * torch.randn(*shape, generator=source)).to(DEVICE)

    module: Any = prefix_attention
    if of == "triton":
        from maskpack.ops import prefix_attention_triton as module
    index = torch.randperm(tokens, generator=source)[:rows].to(DEVICE)
    out, lse = stored(random(tokens, heads, size).to(dtype)), random(heads, tokens + 3)[:, :tokens]
    other, other_lse = stored(random(rows, heads, size).to(dtype)), random(heads, rows)
    truth = merged_by_definition(out, lse, index, other, other_lse)
    sums = out.clone()
    wanted = sums.double().index_add(0, index, other.double())
    module.add_rows(sums, index, other)
    module.merge(out, lse, index, other, other_lse)
    for seen, exact in ((out, truth[0]), (sums, wanted)):
        assert bool(((seen.double() - exact).abs() <= 1e-5 + torch.finfo(dtype).eps * exact.abs()).all())
    assert apart([lse.double()], [truth[1]]) <= 1e-5


def test_very_different_parts_do_not_overflow() -> None:
    out, lse = torch.ones(2, 1, 4), torch.tensor([[300.0, -300.0]])
    other, other_lse = 2 * torch.ones(2, 1, 4), torch.tensor([[-300.0, 300.0]])
    prefix_attention.merge(out, lse, torch.arange(2), other, other_lse)
    assert out[:, 0, 0].tolist() == [1.0, 2.0]
    assert lse.tolist() == [[300.0, 300.0]]


BAD = {
    "no tree": (lambda p: {"tree": [1, 2]}, "tree is a list"),
    "tokens of another tree": (
        lambda p: {"tree": Problem([[1] * 40]).tree},
        "tree is 40 tokens in 1 nodes, for 11 tokens",
    ),
    "fewer tokens": (
        lambda p: {"tree": Problem([[5, 6, 7, 7] + [8] * n for n in (0, 1, 4)] + [[9, 10], [9, 11, 12]]).tree},
        "nodes, for 11 tokens",
    ),
    "other bounds": (
        lambda p: {"tree": Problem([[1] * 8, [2] * 3]).tree},
        "tree is 11 tokens in 2 nodes, for 11 tokens",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_tree_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    problem = Problem(TRIES["groups"])
    with pytest.raises(ReplayError, match=re.escape(message)):
        problem.ours(*problem.qkv, None, None, **change(problem))


@pytest.mark.parametrize(
    ("backend", "dtype", "dim", "rows", "kernel"),
    [
        ("varlen", torch.bfloat16, 64, "groups", "TorchFlash"),
        ("flash", torch.bfloat16, 64, "groups", "TorchFlash"),
        ("rows", torch.bfloat16, 64, "groups", None),
        ("varlen", torch.bfloat16, 12, "groups", None),
        ("varlen", torch.bfloat16, 64, "a deep trie", None),
        ("varlen", torch.bfloat16, 64, "eight levels", "TorchFlash"),
        ("varlen", torch.bfloat16, 64, "nine levels", None),
    ],
)
def test_the_kernel_that_merges(
    backend: str, dtype: Any, dim: int, rows: str, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_flash_package", lambda query, softcap: attention._FLASH_2)
    query = torch.zeros(3, 4, dim, dtype=dtype).as_subclass(OnGpu)
    seen = attention._merging_kernel(query, backend, Problem(TRIES[rows]).tree)
    assert (None if seen is None else type(seen).__name__) == kernel
