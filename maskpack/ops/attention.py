"""Causal attention over packed rows. The bounds of the rows are given by `cu_seqlens` alone.

    q k v   [T, heads, D]     row 0 | row 1 | row 2          a token attends to its row, up to itself, within `window`
    cu_seqlens [rows + 1]     0     n0      n0+n1  T

With a PrefixTree the rows are its nodes, and a token attends to the nodes above its own, too (prefix_attention.py).
With a group, each rank has a shard of the tokens, and attends over all of them with some of the heads
(context_parallel.py).

flash   FlashAttention 4, 3 or 2, varlen kernels            half precision on a GPU; FlashAttention 2 for soft caps
varlen  torch.nn.attention.varlen of torch 2.11             half precision on a GPU, no soft caps
flex    flex attention with a document mask                 any dtype on a GPU, compiled
rows    scaled dot product attention, row by row            any device

In invariant calls the bits of a token depend on its row up to itself alone. Kernels of flash and varlen take keys in
blocks from the begin of a row, and a block that a token does not see adds zeros; keys of a tree are gathered, so that a
path has the blocks of a row. Blocks of flex lie at places among all tokens. On the CPU, products and sums depend on the
number of queries and keys, so each block of a row is a call of its own, whose sizes follow from its place:

    a row of 150 tokens    queries 0-63 of keys 0-63 | queries 64-127 of keys 0-127 | queries 128-191 of keys 0-191
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from maskpack.core.arguments import flag, said, whole
from maskpack.errors import ReplayError
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops import prefix_attention
from maskpack.ops.context_parallel import need_group, to_heads, to_tokens
from maskpack.ops.logits import is_positive
from maskpack.ops.prefix_attention import Bounds

AttentionBackend = Literal["auto", "flash", "varlen", "flex", "rows"]
BACKENDS = ("auto", "flash", "varlen", "flex", "rows")
_CALL = "packed_attention"
_HALF = (torch.float16, torch.bfloat16)
_FLASH_4, _FLASH_3, _FLASH_2 = "flash_attn.cute", "flash_attn_interface", "flash_attn"
_BLOCK = 64  # queries of a call of invariant attention on the CPU
_LEAST_OF_FLEX = 16  # the smallest head of its kernels on a GPU
_SIZES_OF_FLASH_4 = (32, 64, 96, 128)  # its gradients are wrong for many other sizes: docs/replay.md


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: AttentionBackend = "auto",
    tree: PrefixTree | None = None,
    group: ProcessGroup | None = None,
    invariant: bool = False,
) -> Tensor:
    """Causal attention of each token over its own row, or over its path in a tree.

        scores = query @ key.T * scale;  softcap: softcap * tanh(scores / softcap)
        out    = softmax(scores where 0 <= i - j, < window, in one row) @ value

    Args:
        query: [T, H, D]; key, value: [T, KV, D], H a multiple of KV (grouped queries).
        cu_seqlens: int32 [rows + 1], from 0 to T, on the device of the query; no row is empty.
        max_seqlen: length of the longest row.
        window: number of tokens that a token attends to, including itself; None for all.
        softcap: cap of the scores; None for no cap.
        backend: "auto" selects the first of flash, varlen and flex that supports the inputs on a GPU, and rows
            elsewhere.
        tree: the tokens are those of this tree, in its order, and maybe one row more; `cu_seqlens` and `max_seqlen` are
            those of its nodes. A token attends to its node, up to itself, and to the nodes above it. A window counts
            tokens of a row of the tree.
        group: the ranks over which the tokens are sharded: query, key and value are those of this rank, the same number
            on all ranks, in the order of the ranks. The other arguments describe all T tokens. Every rank must call;
            H is a multiple of the number of ranks.
        invariant: whether the output of a token has the same bits in every packing of its row, with a tree and without
            one, and gradients the same bits in every run. "auto" then prefers varlen; flex is refused.

    Returns:
        [T, H, D], differentiable; with a group, of the tokens of this rank.

    Raises:
        ReplayError: the backend is not installed or does not support the inputs; shapes that do not match.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seqlens", cu_seqlens)):
        if not isinstance(x, Tensor):
            raise ReplayError(f"{_CALL}: {name} is {said(x)}; expected a tensor. Pass one.")
    max_seqlen = whole(max_seqlen, "max_seqlen", 0, _CALL, error=ReplayError)
    window = None if window is None else whole(window, "window", 1, _CALL, error=ReplayError)
    if not is_positive(scale) or not (softcap is None or is_positive(softcap)):
        raise ReplayError(
            f"{_CALL}: scale is {said(scale)} and softcap {said(softcap)}; expected finite numbers above 0, or no cap. "
            "Pass None for none."
        )
    invariant = flag(invariant, "invariant", _CALL, ReplayError)
    _check_tensors(query, key, value)
    if backend not in BACKENDS:
        raise ReplayError(f"{_CALL}: backend is {said(backend)}; expected one of {', '.join(BACKENDS)}. Choose one.")
    if group is not None:
        query, key, value = to_heads(query, key, value, need_group(group, _CALL))
    _check_bounds(cu_seqlens, max_seqlen, query)
    if tree is not None:
        _check_tree(tree, cu_seqlens, query)
    chosen = backend_for(query, softcap, invariant) if backend == "auto" else backend
    if invariant and chosen == "flex":
        raise ReplayError(
            f'{_CALL}: backend "flex" with {_form(query)}, softcap {softcap} and invariant=True; expected one whose '
            "blocks begin with rows: its bits depend on the place of a row. Use half precision, with soft caps and "
            "FlashAttention 2, or leave invariant out."
        )
    # FlashAttention swaps queries for heads where no row has two
    bounds = Bounds(cu_seqlens, cu_seqlens, *[max(max_seqlen, 2) if invariant else max_seqlen] * 2)
    out = _attend(chosen, query, key, value, bounds, _Scores(scale, window, softcap, tree, invariant))
    return out if group is None else to_tokens(out, group)


class _Scores(NamedTuple):
    """How tokens attend, as in `packed_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    tree: PrefixTree | None
    invariant: bool


def _attend(backend: str, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scores: _Scores) -> Tensor:
    if not query.shape[0]:  # kernels do not accept zero tokens
        return query.clone()
    run, (scale, window, softcap, tree, invariant) = _RUN[backend], scores
    if tree is None or backend == "flex":
        return run(query, key, value, bounds, scores)
    gathers = invariant or window is not None or softcap is not None
    kernel = None if gathers else _merging_kernel(query, backend, tree)
    if kernel is not None:
        return prefix_attention.merged_attention(query, key, value, bounds, tree, scale, kernel)
    reach = None if invariant else window  # whole paths keep their blocks
    index, bounds = prefix_attention.key_rows(tree, query.shape[0], reach, query.device)
    bounds = bounds._replace(longest_queries=max(bounds.longest_queries, 2)) if invariant else bounds
    keys, values = (prefix_attention.gather_rows(x, index, invariant) for x in (key, value))
    return run(query, keys, values, bounds, scores._replace(tree=None))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    seen = f"{_CALL}: query is {_form(query)}, key {_form(key)}, value {_form(value)}"
    fits = query.dim() == key.dim() == 3 and key.shape == value.shape and query.shape[::2] == key.shape[::2]
    if not fits or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ReplayError(f"{seen}; expected [T, H, D] and [T, KV, D], H a multiple of KV. Pack the rows.")
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        raise ReplayError(f"{seen}; expected one dtype and one device. Cast or move them.")


def _check_bounds(bounds: Tensor, longest: int, query: Tensor) -> None:
    if bounds.dtype != torch.int32 or bounds.dim() != 1 or bounds.device != query.device:
        raise ReplayError(
            f"{_CALL}: cu_seqlens are {bounds.dtype} {tuple(bounds.shape)} on {bounds.device}; expected int32 "
            f"[rows + 1] on {query.device}. Take them from PackedInputs."
        )
    if bounds.device.type != "cpu":  # reading them would synchronise
        return
    ends = cast("list[int]", bounds.tolist())
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    shortest, most = min(lengths, default=1), max(lengths, default=0)
    if ends[:1] != [0] or ends[-1] != query.shape[0] or shortest < 1 or most > longest:
        raise ReplayError(
            f"{_CALL}: cu_seqlens run from {ends[:1]} to {ends[-1:]}, in rows of {shortest} to {most} tokens; expected "
            f"0 to {query.shape[0]}, in rows of 1 to {longest} (max_seqlen). Take them from PackedInputs."
        )


def _check_tree(tree: Any, bounds: Tensor, query: Tensor) -> None:
    known = isinstance(tree, PrefixTree)
    rows = tree.nodes.starts.size + (query.shape[0] > tree.num_tokens) if known else -1
    if not known or query.shape[0] < tree.num_tokens or bounds.shape[0] != rows + 1:
        seen = f"{tree.num_tokens} tokens in {tree.nodes.starts.size} nodes" if known else said(tree)
        raise ReplayError(
            f"{_CALL}: tree is {seen}, for {query.shape[0]} tokens and {bounds.shape[0] - 1} rows; expected a "
            "PrefixTree of these tokens, a row for each node and one for all tokens after them. Take it from "
            "PackedInputs."
        )


def _form(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def backend_for(query: Tensor, softcap: float | None, invariant: bool = False) -> str:
    """The fastest available backend for `query`; for invariant calls, one that was measured to be."""
    if not query.is_cuda:
        return "rows"
    if invariant and softcap is None and _fits_torch(query):
        return "varlen"
    if _flash_package(query, softcap) is not None:
        return "flash"
    return "varlen" if _fits_varlen(query) and softcap is None and _varlen_attn() is not None else "flex"


def _fits_varlen(query: Tensor) -> bool:
    """Whether `query` is within the limits of the kernels of torch."""
    return query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _fits_torch(query: Tensor) -> bool:
    """Whether the kernels of TorchFlash take `query`."""
    return _fits_varlen(query) and torch.version.hip is None


def _flash_package(query: Tensor, softcap: float | None) -> str | None:
    """The installed package with the fastest kernel for `query`, or None."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in _HALF:
        return None
    if softcap is None and torch.version.hip is None:
        kind = torch.cuda.get_device_capability(query.device)[0]
        # Hopper and Blackwell, except Blackwell workstation GPUs (12)
        if size in _SIZES_OF_FLASH_4 and kind in (9, 10, 11) and _varlen_func(_FLASH_4):
            return _FLASH_4
        if kind == 9 and size <= 256 and size % 8 == 0 and _varlen_func(_FLASH_3):
            return _FLASH_3
    return _FLASH_2 if size <= 256 and _varlen_func(_FLASH_2) else None


def _merging_kernel(query: Tensor, backend: str, tree: PrefixTree) -> prefix_attention.Kernel | None:
    """The kernel that attention over a tree is merged with; None where keys are gathered."""
    if backend not in ("flash", "varlen") or tree.num_levels > prefix_attention.MOST_LEVELS:
        return None
    if backend == "flash" and _flash_package(query, None) == _FLASH_4:
        return prefix_attention.Flash4()
    return prefix_attention.TorchFlash() if _fits_torch(query) else None


@functools.cache
def _varlen_func(package: str) -> Callable[..., Any] | None:
    """`flash_attn_varlen_func` of a package, or None. FlashAttention 4 installs a `flash_attn` without that function;
    some versions of 2 have a `flash_attn.cute` that cannot be imported or takes other arguments."""
    try:
        function = getattr(importlib.import_module(package), "flash_attn_varlen_func", None)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # incompatible packages may raise anything
        warnings.warn(
            f"{_CALL}: {package} is not used, because its import failed ({type(error).__name__}: {error}). Repair or "
            "uninstall it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    known = function is not None and "max_seqlen_q" in inspect.signature(function).parameters
    return function if known else None


# -------------------------------------------------------------------- backends


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scores: _Scores) -> Tensor:
    package = _flash_package(query, scores.softcap)
    attend: Any = None if package is None else _varlen_func(package)
    kernel = "flash-attn (2 for soft caps, 2 or 3 for D other than 32, 64, 96 or 128), and half precision"
    _need(attend is not None, "flash", query, kernel)
    unbounded = None if package == _FLASH_4 else -1
    sides = (unbounded, unbounded) if scores.window is None else (scores.window - 1, 0)
    more: dict[str, Any] = {"softmax_scale": scores.scale, "causal": True, "window_size": sides, **bounds.for_flash()}
    if package != _FLASH_4:
        more["softcap"] = scores.softcap or 0.0
    if scores.invariant:
        ordered = "deterministic" in inspect.signature(attend).parameters
        _need(ordered, "flash", query, "a version of flash-attn whose gradients have a fixed order")
        more["deterministic"] = True
    with torch.cuda.device_of(query):  # kernels launch on the current device
        out: Tensor | tuple[Tensor, ...] = attend(query, key, value, **more)
    return out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp too


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scores: _Scores) -> Tensor:
    fits = query.is_cuda and query.dtype in _HALF and scores.softcap is None
    _need(fits, "varlen", query, "half precision, no softcap")
    if scores.invariant:
        _need(_fits_torch(query), "varlen", query, "heads of a multiple of 8, up to 256, and CUDA")
        kernel = prefix_attention.TorchFlash(scores.window)
        return prefix_attention.ordered_attention(query, key, value, bounds, scores.scale, kernel)
    attend: Any = _varlen_attn()
    _need(attend is not None, "varlen", query, "torch 2.11 or later")
    left = -1 if scores.window is None else scores.window - 1
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] and _asks_for_groups(attend) else {}
    return attend(query, key, value, *bounds, scale=scores.scale, window_size=(left, 0), **grouped)


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """`varlen_attn` of torch, or None: torch 2.9 has none, and that of torch 2.10 has no scale and no window."""
    try:
        attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ModuleNotFoundError:
        return None
    return attend if {"scale", "window_size"} <= inspect.signature(attend).parameters.keys() else None


@functools.cache
def _asks_for_groups(attend: Callable[..., Any]) -> bool:
    """Whether `varlen_attn` has an argument for grouped queries; torch 2.11 accepts them without one."""
    return "enable_gqa" in inspect.signature(attend).parameters


def _flex(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scores: _Scores) -> Tensor:
    scale, window, softcap, tree, _ = scores
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    attend = _compiled_flex(softcap is None) if query.is_cuda else flex.flex_attention

    def capped(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    size = query.shape[-1]
    out = attend(
        *(widened(x, max(size, _LEAST_OF_FLEX)).transpose(0, 1)[None] for x in (query, key, value)),
        score_mod=None if softcap is None else capped,
        block_mask=_block_mask(bounds.queries, query.shape[0], window, tree),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # A graph for any number of tokens does not fit the kernel that torch selects below 128 queries.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return out[0, ..., :size].transpose(0, 1)


def widened(x: Tensor, size: int) -> Tensor:
    """[T, H, D] with zeros up to a head size, which change neither scores nor outputs."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


@functools.cache
def _compiled_flex(dynamic: bool) -> Callable[..., Tensor]:
    """Flex attention compiled for dynamic sizes, or for each size: torch 2.11 does not support dynamic sizes with a
    score_mod."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return cast("Any", torch.compile(flex.flex_attention, dynamic=dynamic))


@functools.cache
def _compiled_block_mask() -> Callable[..., Any]:
    """Compiled, because the eager function materialises the mask of all pairs of tokens."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return cast("Any", torch.compile(flex.create_block_mask))


_masks: Any = WeakTensorKeyDictionary()
"""Block masks by bounds tensor, then by (tokens, window, tree). The layers of a forward pass share one bounds tensor,
and the masks are released with it."""


def _block_mask(bounds: Tensor, tokens: int, window: int | None, tree: PrefixTree | None) -> Any:
    known: dict[Any, Any] = _masks.setdefault(bounds, {})
    key = tokens, window, tree
    if key not in known:
        known[key] = _new_block_mask(bounds, tokens, window, tree)
    return known[key]


def _new_block_mask(bounds: Tensor, tokens: int, window: int | None, tree: PrefixTree | None) -> Any:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    if tree is None:
        place = torch.arange(tokens, device=bounds.device, dtype=torch.int32)
        last, depth = bounds[torch.bucketize(place, bounds, right=True)], place
    else:
        last, depth = prefix_attention.visibility(tree, tokens, bounds.device)

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) & (i < last[j])
        return seen if window is None else seen & (depth[i] - depth[j] < window)

    create = _compiled_block_mask() if bounds.is_cuda else flex.create_block_mask
    return create(visible, None, None, tokens, tokens, device=bounds.device)


def _rows(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scores: _Scores) -> Tensor:
    of_queries, of_keys = (cast("list[int]", ends.diff().tolist()) for ends in (bounds.queries, bounds.keys))
    sizes = of_queries, of_keys, of_keys
    split = [
        cast("tuple[Tensor, ...]", x.transpose(0, 1).split(own, 1))
        for x, own in zip((query, key, value), sizes, strict=True)
    ]
    run = _row_by_blocks if scores.invariant else _row
    rows = [run(q, k, v, *scores[:3]) for q, k, v in zip(*split, strict=True)]
    return torch.cat(rows, 1).transpose(0, 1)


def _row_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """`_row`, in calls whose sizes and strides follow from the places of tokens in the row."""
    tokens, before = key.shape[1], key.shape[1] - query.shape[1]
    begin, end = before // _BLOCK * _BLOCK, -(-tokens // _BLOCK) * _BLOCK
    pads = (0, 0, before - begin, end - tokens), (0, 0, 0, end - tokens), (0, 0, 0, end - tokens)
    q, k, v = (torch.nn.functional.pad(x, pad) for x, pad in zip((query, key, value), pads, strict=True))
    blocks: list[Tensor] = []
    for at in range(begin, end, _BLOCK):
        own = q[:, at - begin : at - begin + _BLOCK].contiguous()
        seen = (x[:, : at + _BLOCK].contiguous() for x in (k, v))
        blocks.append(_row(own, next(seen), next(seen), scale, window, softcap))
    return torch.cat(blocks, 1)[:, before - begin : tokens - begin]


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Attention of one row; query is [H, n, D], key and value are [KV, k, D]. The last query and key are one token."""
    tokens, before = key.shape[1], key.shape[1] - query.shape[1]
    visible = None
    if softcap is not None or before or (window is not None and window < tokens):
        place = torch.arange(tokens, device=query.device)
        apart = place[before:, None] - place
        visible = (apart >= 0) & (apart < (tokens if window is None else window))
    if softcap is None or visible is None:
        how: dict[str, Any] = {"attn_mask": visible, "is_causal": visible is None, "scale": scale}
        grouped = query.shape[0] != key.shape[0]
        return scaled_dot_product_attention(query[None], key[None], value[None], **how, enable_gqa=grouped)[0]
    times = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(times, 0).transpose(1, 2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = scores.to(wide).masked_fill(~visible, -torch.inf).softmax(-1).to(query.dtype)
    return scores @ value.repeat_interleave(times, 0)


def _need(supported: bool, backend: str, query: Tensor, needs: str) -> None:
    if not supported:
        raise ReplayError(
            f'{_CALL}: backend "{backend}" with {query.dtype} on {query.device}; it needs a GPU with {needs}. Use '
            'backend="auto".'
        )


_RUN: dict[str, Callable[..., Tensor]] = {"flash": _flash, "varlen": _varlen, "flex": _flex, "rows": _rows}
