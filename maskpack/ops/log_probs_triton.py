"""Triton kernels of `packed_log_probs`, which process the logits between two matrix products.

    reduce_rows    a program for each slice of a row reads its logits once, from the cache, where the product left them:
                   their sums, and perhaps their probabilities, which are stored
    differentiate  a program for each block of a row: logits to their gradient, in place or in another dtype

Both compute in float32. The functions of the same names in log_probs.py specify them in plain torch.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maskpack.layout.launch_triton import device_of
from maskpack.ops import log_probs
from maskpack.ops.log_probs import LIKELY, SURE, UNIT, Reduction, Slopes

_BLOCK, _SEGMENT, _WARPS = 4096, 256, 8
_SLICE_WARPS = 8
"""Of reduce_rows, whose block is a slice."""
_UNMASKED = None, None, None
EXACT = {"enable_fp_fusion": False}
"""A logit times `scale` is rounded before something is taken from it, so that the highest less itself is 0."""
_UNIT, _LIKELY, _SURE = tl.constexpr(UNIT), tl.constexpr(LIKELY), tl.constexpr(SURE)


@triton.jit
def tanh(x):
    """Within two roundings: a fraction where 1 - exp cancels, exp elsewhere."""
    square = x * x
    near = x * (945 + square * (105 + square)) / (945 + square * (420 + 15 * square))
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def stored(log_p):
    return tl.where((log_p > _LIKELY) & (log_p < _SURE), log_p, tl.exp(log_p) * _UNIT)


@triton.jit
def _is_allowed(ids, offsets, scratch, row, column, BLOCK: tl.constexpr):
    """Which of BLOCK ids from `column` on are allowed for a row. They are marked in memory of this program's own."""
    at = tl.arange(0, BLOCK)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    scratch += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK
    tl.store(scratch + at, (at * 0 + tl.where(begin == end, 1, 0)).to(tl.int8))
    tl.debug_barrier()
    while begin < end:
        place = tl.load(ids + begin + at, mask=begin + at < end, other=-1) - column
        tl.store(scratch + place, (at * 0 + 1).to(tl.int8), mask=(place >= 0) & (place < BLOCK))
        begin += BLOCK
    tl.debug_barrier()
    return tl.load(scratch + at) != 0


@triton.jit(do_not_specialize=["row", "number", "tokens", "kept_rows"])
def _reduce_slice(
    logits, ids, token, tops, totals, weighted, squares, kept, allowed_ids, offsets, scratch, row, number, columns,
    tokens, kept_rows, stride, kept_stride, scale, inner,
    SLICE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    begin = tl.program_id(1) * SLICE
    line = tl.program_id(0).to(tl.int64) * stride + begin
    row += tl.program_id(0)
    number += tl.program_id(1)
    column = number * SLICE
    columns -= begin
    at = tl.arange(0, BLOCK)
    inside = at < columns
    # Up to the stride, so that loads are as wide, and sums in the same order, whatever the number of columns is.
    here = tl.load(logits + line + at, mask=at < stride - begin, other=0.0)
    if inner is not None:
        here = tanh(here * inner)
    if allowed_ids is not None:
        allowed = _is_allowed(allowed_ids, offsets, scratch, row, column, BLOCK)
        here = tl.where(allowed, here, float("-inf"))
    here = tl.where(inside, here, float("-inf")) * scale
    top = tl.maximum(tl.max(here, 0), -3.0e38)  # finite, so that differences are, too
    below = here - top
    power = tl.exp(below)
    total = tl.sum(power, 0)
    place = number.to(tl.int64) * tokens + row
    tl.store(tops + place, top)
    tl.store(totals + place, total)
    if weighted is not None:
        tl.store(weighted + place, tl.sum(power * tl.where(power > 0, below, 0.0), 0))
    if squares is not None:
        tl.store(squares + place, tl.sum(power * power, 0))
    wanted = tl.load(ids + row) - column
    known = (wanted >= 0) & (wanted < tl.minimum(columns, SLICE))
    logit = tl.load(logits + line + wanted, mask=known, other=0.0)
    if inner is not None:
        logit = tanh(logit * inner)
    if allowed_ids is not None:
        logit = tl.where(tl.sum((allowed & (at == wanted)).to(tl.int32), 0) > 0, logit, float("-inf"))
    tl.store(token + row, logit * scale, mask=known)
    if row < kept_rows:  # no constant, so that one kernel, and the same bits, come of calls that keep nothing
        log_p = below - tl.log(tl.where(total == 0, 1.0, total))  # 0 where all are -inf
        kept += row.to(tl.int64) * kept_stride + column
        tl.store(kept + at, stored(log_p).to(kept.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["first"])
def _differentiate_block(
    logits, out, ids, others, lse, entropy, sum_p2, grad_log_probs, grad_entropy, grad_sum_p2, shift, allowed_ids,
    offsets, scratch, first, columns, stride, out_stride, shift_stride, slice_stride, scale, inner,
    SLICE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    # [segments, SEGMENT], each of one slice: slices and `first` are multiples of a segment
    begins = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK // SEGMENT)[:, None] * SEGMENT
    at = begins + tl.arange(0, SEGMENT)[None, :]
    inside = at < columns
    here = tl.load(logits + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    if lse is None:
        p = tl.where(here < 0, tl.exp(tl.minimum(here, 0.0)), here * (1 / _UNIT))
        log_p = tl.where(here < 0, here, tl.log(tl.where(p > 0, p, 1.0)))
        place = shift + row.to(tl.int64) * shift_stride + ((first + begins) // SLICE).to(tl.int64) * slice_stride
        below = tl.load(place, mask=begins < columns, other=0.0)
        p *= tl.exp(below)
        log_p += below
    else:
        if inner is not None:
            power = tl.exp(-2 * tl.abs(here * inner))
            bend = inner * 4 * power / ((1 + power) * (1 + power))  # inner * (1 - tanh^2), which would cancel
            here = tanh(here * inner)
        log_p = here * scale - tl.load(lse + row)
        p = tl.exp(log_p)
        if allowed_ids is not None:
            allowed = _is_allowed(allowed_ids, offsets, scratch, row, first + tl.program_id(1) * BLOCK, BLOCK)
            p = tl.where(tl.reshape(allowed, (BLOCK // SEGMENT, SEGMENT)), p, 0.0)
    factor = tl.zeros((BLOCK // SEGMENT, SEGMENT), tl.float32)
    if grad_log_probs is not None:
        slope = tl.load(grad_log_probs + row)
        wanted = at == tl.load(ids + row) - first
        factor += tl.where(wanted, 0.0, slope)
    if grad_entropy is not None:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    if grad_sum_p2 is not None:
        factor -= 2 * tl.load(grad_sum_p2 + row) * (p - tl.load(sum_p2 + row))
    grad = -p * factor
    if grad_log_probs is not None:
        grad += tl.where(wanted, slope * tl.load(others + row), 0.0)
    out += row.to(tl.int64) * out_stride
    if inner is not None:
        grad *= bend
    tl.store(out + at, (grad * scale).to(out.dtype.element_ty), mask=inside)


def reduce_rows(logits: Tensor, of_all: Reduction, row: int, column: int) -> None:
    ids, curve, parts, kept, mask = of_all
    rows, columns = logits.shape
    width = log_probs.SLICE
    block = width if len(parts.top) > 1 else _block(logits.stride(0), width)  # one for all pieces
    with device_of(logits):
        _reduce_slice[(rows, triton.cdiv(columns, width))](
            logits, ids, *parts, kept, *(mask or _UNMASKED), row, column // width, columns, parts.top.shape[1],
            len(kept), logits.stride(0), kept.stride(0), *curve, width, block, num_warps=_SLICE_WARPS, **EXACT
        )  # fmt: skip


def differentiate(logits: Tensor, grad: Tensor, first: int, slopes: Slopes) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    # From the stride, which all slices share, so that a narrower last slice does not compile another kernel.
    block = _block(grad.stride(0), _BLOCK)
    kept = slopes.lse is None
    shift, mask = (slopes.shift, None) if kept else (None, slopes.mask)
    strides = (0, 0) if shift is None else shift.stride()
    with device_of(logits):
        _differentiate_block[(rows, triton.cdiv(columns, block))](
            logits, grad, *slopes[:8], shift, *(mask or _UNMASKED), first, columns, logits.stride(0), grad.stride(0),
            *strides, *slopes.curve, slopes.width, _SEGMENT, block, num_warps=_WARPS, **EXACT
        )  # fmt: skip


def _block(columns: int, most: int) -> int:
    return min(most, max(_SEGMENT, 1 << (columns - 1).bit_length()))
