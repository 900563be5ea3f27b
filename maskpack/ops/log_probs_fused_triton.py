"""Matrix products of `packed_log_probs` that never write logits: Triton kernels whose epilogue works on the tile of the
product in registers. For half precision on GPUs with a tensor memory accelerator.

    reduce_rows    a tile [128, 256] of the logits -> its Parts, a slice of TILE columns, and perhaps its probabilities
    differentiate  a tile of the logits -> their gradient

A program for each processor works on tile after tile, so that the loads of the next product overlap with an epilogue.
The sums of a token depend on its hidden state and the weight alone: not on the other tokens, and not on what is kept.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.layout.launch_triton import device_of
from maskpack.ops.log_probs import Slopes
from maskpack.ops.log_probs_triton import EXACT, stored, tanh
from maskpack.ops.logits import Curve
from maskpack.ops.split_head import Parts

TILE = 256
"""The columns of a tile, which are a slice."""
_ROWS, _DEPTH = 128, 64
_TILES: dict[str, Any] = {"ROWS": _ROWS, "COLUMNS": TILE, "DEPTH": _DEPTH, "GROUP": 16, "num_warps": 8, "num_stages": 3}
_LOG2_E = tl.constexpr(math.log2(math.e))  # exp tests each number for tiny results, exp2 does not
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that differences are, too
_VARYING = ["tokens", "first"]  # not the vocabulary: stores of rows that are multiples of 16 long are as wide


@triton.jit
def _place(tile, tokens, vocabulary, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column of a tile. GROUP rows of tiles share the columns in the cache."""
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(vocabulary, COLUMNS)
    above = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - above, GROUP)
    within = tile % (GROUP * across)
    return (above + within % height) * ROWS, within // height * COLUMNS


@triton.jit
def _product(
    hidden, weight, row, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(tl.cdiv(width, DEPTH)):
        left, right = hidden.load([row, k * DEPTH]), weight.load([column, k * DEPTH])
        if WIDENED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right.T, total)
    return total


@triton.jit(do_not_specialize=_VARYING)
def _reduce_tiles(
    hidden, weight, ids, token, tops, totals, weighted, squares, kept, tokens, vocabulary, width, kept_stride, scale,
    inner,
    WIDENED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    count = tl.cdiv(tokens, ROWS) * tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, column = _place(tile, tokens, vocabulary, ROWS, COLUMNS, GROUP)
        here = _product(hidden, weight, row, column, width, ROWS, COLUMNS, DEPTH, WIDENED)
        rows, at = row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        inside, left = rows < tokens, tl.minimum(vocabulary - column, COLUMNS)
        if inner is not None:
            here = tanh(here * inner)
        here = tl.where((at < left)[None, :], here, float("-inf"))
        wanted = tl.load(ids + rows, mask=inside, other=-1) - column
        known = (wanted >= 0) & (wanted < left)
        if tl.max(known.to(tl.int32), 0) > 0:
            picked = tl.sum(tl.where(at[None, :] == wanted.to(tl.int32)[:, None], here, 0.0), 1)
            tl.store(token + rows, picked * scale, mask=known)
        top = tl.maximum(tl.max(here, 1), _LOWEST)
        below = here - top[:, None]
        power = tl.exp2(below * (scale * _LOG2_E))
        total = tl.sum(power, 1)
        place = (column // COLUMNS).to(tl.int64) * tokens + rows
        tl.store(tops + place, tl.maximum(top * scale, _LOWEST), mask=inside)
        tl.store(totals + place, total, mask=inside)
        if weighted is not None:
            tl.store(weighted + place, tl.sum(power * tl.where(power > 0, below, 0.0), 1) * scale, mask=inside)
        if squares is not None:
            tl.store(squares + place, tl.sum(power * power, 1), mask=inside)
        if kept is not None:
            log_p = below * scale - tl.log(tl.where(total == 0, 1.0, total))[:, None]
            line = kept + rows[:, None].to(tl.int64) * kept_stride + column
            mask = inside[:, None] & (at < left)[None, :]
            tl.store(line + at[None, :], stored(log_p).to(kept.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _differentiate_tiles(
    hidden, weight, out, ids, others, lse, entropy, sum_p2, grad_log_probs, grad_entropy, grad_sum_p2, tokens,
    vocabulary, first, width, out_stride, scale, inner,
    WIDENED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    count = tl.cdiv(tokens, ROWS) * tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, column = _place(tile, tokens, vocabulary, ROWS, COLUMNS, GROUP)
        here = _product(hidden, weight, row, column, width, ROWS, COLUMNS, DEPTH, WIDENED)
        rows, at = row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        inside, left = rows < tokens, tl.minimum(vocabulary - column, COLUMNS)
        if inner is not None:
            power = tl.exp(-2 * tl.abs(here * inner))
            bend = inner * 4 * power / ((1 + power) * (1 + power))  # inner * (1 - tanh^2), which would cancel
            here = tanh(here * inner)
        log_p = here * scale - tl.load(lse + rows, mask=inside, other=0.0)[:, None]
        p = tl.exp2(log_p * _LOG2_E)
        slope = tl.zeros((ROWS,), tl.float32)
        own = slope
        if grad_log_probs is not None:
            slope = tl.load(grad_log_probs + rows, mask=inside, other=0.0)
            own = slope * tl.load(others + rows, mask=inside, other=0.0)
        place = tl.load(ids + rows, mask=inside, other=-1) - first - column
        wanted = at[None, :] == tl.where((place >= 0) & (place < left), place, -1).to(tl.int32)[:, None]
        if (grad_entropy is not None) or (grad_sum_p2 is not None):
            rest = tl.zeros((ROWS, COLUMNS), tl.float32)
            if grad_entropy is not None:
                above = log_p + tl.load(entropy + rows, mask=inside, other=0.0)[:, None]
                rest += tl.load(grad_entropy + rows, mask=inside, other=0.0)[:, None] * above
            if grad_sum_p2 is not None:
                apart = p - tl.load(sum_p2 + rows, mask=inside, other=0.0)[:, None]
                rest -= 2 * tl.load(grad_sum_p2 + rows, mask=inside, other=0.0)[:, None] * apart
            grad = tl.where(wanted, own[:, None] - p * rest, -p * (slope[:, None] + rest))
        else:
            grad = tl.where(wanted, own[:, None], -p * slope[:, None])
        if inner is not None:
            grad *= bend
        line = out + rows[:, None].to(tl.int64) * out_stride + column
        mask = inside[:, None] & (at < left)[None, :]
        tl.store(line + at[None, :], (grad * scale).to(out.dtype.element_ty), mask=mask)


def fits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether these kernels support the tensors [T, H] and [V, H], once their rows begin at multiples of 16 bytes."""
    if hidden.dtype not in (torch.float16, torch.bfloat16) or not hidden.shape[1] or not weight.shape[0]:
        return False
    return _descriptor() is not None and (not hidden.is_cuda or _has_accelerator(hidden.device))


@functools.cache
def _has_accelerator(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _descriptor() -> Any:
    """The class of descriptors that a host makes; None in a Triton that has none."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ModuleNotFoundError:
        return None
    return TensorDescriptor


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _launch(kernel: Any, hidden: Tensor, weight: Tensor, *arguments: Any) -> None:
    """Runs a kernel for the logits of [T, H] and [V, H]."""
    if not len(hidden):
        return
    described = [
        _descriptor()(x, list(x.shape), list(x.stride()), [rows, _DEPTH])
        for x, rows in ((hidden, _ROWS), (weight, TILE))
    ]
    tiles = triton.cdiv(hidden.shape[0], _ROWS) * triton.cdiv(weight.shape[0], TILE)
    with device_of(hidden):
        kernel[(min(_processors(hidden.device), tiles),)](
            *described, *arguments, WIDENED=not hidden.is_cuda, **_TILES, **EXACT
        )


def reduce_rows(hidden: Tensor, weight: Tensor, ids: Tensor, curve: Curve, parts: Parts, kept: Tensor | None) -> None:
    """Writes the Parts of logits [T, V], whose slices are tiles, and the `stored` probabilities within them to `kept`
    [T, V]."""
    stride = 0 if kept is None else kept.stride(0)
    sizes = len(hidden), *weight.shape
    _launch(_reduce_tiles, hidden, weight, ids, *parts, kept, *sizes, stride, *curve)


def differentiate(hidden: Tensor, weight: Tensor, grad: Tensor, first: int, slopes: Slopes) -> None:
    """Writes the gradient of the logits hidden @ weight.T to `grad`, where `weight` are the rows of the vocabulary from
    `first` on."""
    sizes = len(hidden), len(weight), first, hidden.shape[1]
    _launch(_differentiate_tiles, hidden, weight, grad, *slopes[:8], *sizes, grad.stride(0), *slopes.curve)
