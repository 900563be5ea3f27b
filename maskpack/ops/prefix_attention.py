"""Attention over the tokens of a PrefixTree: a prefix that several rows share is there once, and all of them see it.

    tokens  a b | c d | e | f g        nodes of a tree, depth first: a b is above c d and f g, c d above e

merged    each node sees itself, in one causal call; then, level by level, all tokens below a node see it, in a call
          without a mask:  c d e f g -> a b,  e -> c d.  Results for a token are merged by their log-sum-exp; the
          backward pass of each call is its kernel's own, given the merged output and log-sum-exp (as in ring attention,
          Liu et al., 2023). Keys are not repeated.
gathered  the keys of each node and of the nodes above it, as far as a window reaches, are copied to one row: for any
          kernel, any depth, windows and soft caps.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from maskpack.core.backends import uses_triton
from maskpack.core.index import IntArray, cumulated, ranges
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops.in_order import in_order

MOST_LEVELS = 8
"""The most levels of a tree that are merged: each is a call of the kernel."""


class Bounds(NamedTuple):
    """The bounds of queries and of the keys that they see, int32 [rows + 1], and the lengths of the longest rows. In
    causal calls the last query and the last key of a row are one token."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int

    def for_flash(self) -> dict[str, Any]:
        """As kernels of FlashAttention name them."""
        return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), self, strict=True))


class Call(NamedTuple):
    """Queries [T, H, D], keys and values [K, KV, D], and how they attend."""

    query: Tensor
    key: Tensor
    value: Tensor
    bounds: Bounds
    causal: bool
    scale: float


class Kernel(Protocol):
    """A varlen attention kernel: the output [T, H, D] and the log-sum-exp, float32 [H, T]; and from these the gradients
    of query, key and value."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]: ...
    def backward(self, call: Call, slope: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]: ...


# -------------------------------------------------------------------- which token sees which


class Level(NamedTuple):
    """The tokens below the nodes of a level, and the tokens of these nodes: int64 indices, a row for each node."""

    queries: Tensor
    keys: Tensor
    bounds: Bounds


_tables: WeakKeyDictionary[PrefixTree, dict[Hashable, Any]] = WeakKeyDictionary()
"""Index tensors by tree. The layers of a forward pass share them, and they are released with the tree."""


def _kept_with_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the results of a function of a tree and other arguments, as long as the tree."""

    @functools.wraps(function)
    def kept(tree: PrefixTree, *more: Hashable) -> Any:
        known = _tables.setdefault(tree, {})
        key = (function.__name__, *more)
        if key not in known:
            known[key] = function(tree, *more)
        return known[key]

    return kept


@_kept_with_tree
def levels(tree: PrefixTree, device: torch.device) -> list[Level]:
    """The levels of a tree that have nodes below them."""
    nodes = tree.nodes
    below = nodes.ends - nodes.starts - nodes.counts
    out: list[Level] = []
    for level in range(tree.num_levels):
        at = np.flatnonzero((nodes.levels == level) & (below > 0))
        queries, keys = ranges((nodes.starts + nodes.counts)[at], below[at]), ranges(nodes.starts[at], nodes.counts[at])
        bounds = _bounds(below[at], nodes.counts[at], device)
        out.append(Level(_sent(queries, device), _sent(keys, device), bounds))
    return out


@_kept_with_tree
def key_rows(tree: PrefixTree, tokens: int, window: int | None, device: torch.device) -> tuple[Tensor, Bounds]:
    """The keys that each node sees, int64 [K], those of the nodes above it first, and the bounds. Tokens after the tree
    are a row of their own."""
    nodes, tail = tree.nodes, tokens - tree.num_tokens
    above: IntArray = nodes.depths if window is None else np.minimum(nodes.depths, window - 1)
    # a row that has the node: its tokens, from the first that is seen
    keys = tree.of_row_token[ranges(tree.source[nodes.starts] - above, above + nodes.counts)]
    rest = np.arange(tree.num_tokens, tokens)
    more = [tail] * bool(tail)
    bounds = _bounds(np.append(nodes.counts, more), np.append(above + nodes.counts, more), device)
    return _sent(np.concatenate([keys, rest]), device), bounds


@_kept_with_tree
def visibility(tree: PrefixTree, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`end` and `depth` of all tokens, int32 [tokens]. Those after the tree see each other."""
    rest = np.arange(tree.num_tokens, tokens)
    ends, depths = np.append(tree.end, np.full(rest.size, tokens)), np.append(tree.depth, rest)
    return _sent(ends.astype(np.int32), device), _sent(depths.astype(np.int32), device)


def _bounds(queries: IntArray, keys: IntArray, device: torch.device) -> Bounds:
    ends = [_sent(cumulated(counts).astype(np.int32), device) for counts in (queries, keys)]
    return Bounds(ends[0], ends[1], int(queries.max(initial=0)), int(keys.max(initial=0)))


def _sent(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


# -------------------------------------------------------------------- gathered


def gather_rows(x: Tensor, index: Tensor, ordered: bool = False) -> Tensor:
    """`x.index_select(0, index)` of indices that repeat, as those of shared tokens do. Gradients of a row are added in
    float32 at least: in half precision, atomic additions would round after each, and lose small ones. With `ordered`
    they are added in a fixed order."""
    return cast("Tensor", _Gathered.apply(x, index, ordered))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, ordered: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.ordered = x.shape, ordered
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (index,), slope = ctx.saved_tensors, slopes[0]
        wide = torch.promote_types(slope.dtype, torch.float32)
        with in_order() if ctx.ordered else nullcontext():
            sums = torch.zeros(ctx.shape, dtype=wide, device=slope.device).index_add_(0, index, slope.to(wide))
        return sums.to(slope.dtype), None, None


# -------------------------------------------------------------------- merged


def merged_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, tree: PrefixTree, scale: float, kernel: Kernel
) -> Tensor:
    """[T, H, D]: attention by a call for all nodes and one for each level, differentiable. `bounds` are those of the
    nodes, and of the tokens after the tree."""
    below = levels(tree, query.device)
    return cast("Tensor", _Merged.apply(query, key, value, bounds, below, scale, kernel, nullcontext))


def ordered_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, kernel: Kernel
) -> Tensor:
    """[T, H, D]: causal attention of rows, whose gradients are added in a fixed order."""
    return cast("Tensor", _Merged.apply(query, key, value, bounds, [], scale, kernel, in_order))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Takes the context of the kernel's backward pass behind its other arguments."""
        query, key, value, bounds, below, scale, kernel, _ = given
        out, lse = kernel.forward(Call(query, key, value, bounds, True, scale))
        total = _wide(out, below)
        for level in below:
            queries = query.index_select(0, level.queries)
            keys, values = (x.index_select(0, level.keys) for x in (key, value))
            call = Call(queries, keys, values, level.bounds, False, scale)
            merge(total, lse, level.queries, *kernel.forward(call))
        out = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.more = given[3:]
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        bounds, below, scale, kernel, meanwhile = ctx.more
        slope = slopes[0].contiguous()
        with meanwhile():
            own = kernel.backward(Call(query, key, value, bounds, True, scale), slope, out, lse)
        total = [_wide(one, below) for one in own]
        for level in below:
            queries, *of_queries = (x.index_select(0, level.queries) for x in (query, slope, out))
            keys, values = (x.index_select(0, level.keys) for x in (key, value))
            call = Call(queries, keys, values, level.bounds, False, scale)
            more = kernel.backward(call, *of_queries, lse.index_select(1, level.queries))
            for sums, index, part in zip(total, (level.queries, level.keys, level.keys), more, strict=True):
                add_rows(sums, index, part)
        return (*(sums.to(query.dtype) for sums in total), *[None] * 5)


def _wide(x: Tensor, below: list[Level]) -> Tensor:
    """Sums over several levels are rounded once, after the last."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if len(below) > 1 else x


def merge(out: Tensor, lse: Tensor, index: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merges attention over other keys, [n, H, D] and [H, n], into tokens `index` [n] of `out` [T, H, D] and `lse`
    [H, T], in place:

        lse = log(exp(lse) + exp(other_lse));  out = exp(lse before - lse) * out + exp(other_lse - lse) * other
    """
    if uses_triton(out.device):
        from maskpack.ops import prefix_attention_triton

        prefix_attention_triton.merge(out, lse, index, other, other_lse)
        return
    before = lse.index_select(1, index)
    after = torch.logaddexp(before, other_lse)
    share, other_share = ((x - after).exp().T[..., None] for x in (before, other_lse))
    rows = share * out.index_select(0, index) + other_share * other
    out.index_copy_(0, index, rows.to(out.dtype))
    lse.index_copy_(1, index, after)


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows [n, H, D] to rows `index` [n] of `sums` [T, H, D], in place. No index is there twice."""
    if uses_triton(sums.device):
        from maskpack.ops import prefix_attention_triton

        prefix_attention_triton.add_rows(sums, index, rows)
        return
    sums.index_copy_(0, index, (sums.index_select(0, index) + rows).to(sums.dtype))


# -------------------------------------------------------------------- kernels


class TorchFlash:
    """The kernels of torch, which are those of FlashAttention 2, in causal calls with a window if there is one."""

    def __init__(self, window: int | None = None) -> None:
        self._sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *call[:3], *call.bounds, 0.0, call.causal, return_debug_mask=False, scale=call.scale, **self._sides
        )
        return out, lse

    def backward(self, call: Call, slope: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
        random, unused = torch.zeros(2, dtype=torch.uint64, device=out.device), torch.empty(0, device=out.device)
        more = *call.bounds, 0.0, call.causal, random, unused
        return torch.ops.aten._flash_attention_backward(
            slope, *call[:3], out, lse, *more, scale=call.scale, **self._sides
        )


class Flash4:
    """The kernels of FlashAttention 4."""

    def __init__(self) -> None:
        package: Any = importlib.import_module("flash_attn.cute.interface")
        self._forward, self._backward = package._flash_attn_fwd, package._flash_attn_bwd

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        how: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal, **call.bounds.for_flash()}
        with torch.cuda.device_of(call.query):  # the kernel launches on the current device
            out, lse, *_ = self._forward(*call[:3], return_lse=True, **how)
        return out, lse.contiguous()

    def backward(self, call: Call, slope: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
        how = call.scale, call.causal
        with torch.cuda.device_of(call.query):
            return self._backward(*call[:3], out, slope, lse, *how, **call.bounds.for_flash())[:3]
