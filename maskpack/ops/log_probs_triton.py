"""Triton kernels of `packed_log_probs`, which process the logits between two matrix products.

    reduce_rows    a program for each row reads its logits once: log-prob of the token, log-sum-exp, entropy, or what
                   ranks with slices of the vocabulary make them of;
                   then it may read them again, from the cache where they are still there, to store the probabilities
    differentiate  a program for each block of a row: logits to their gradient, in place or in another dtype

Both compute in float32. The functions of the same names in log_probs.py specify them in plain torch.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.ops.log_probs import LIKELY, SURE, UNIT, Slopes
from maskpack.ops.logits import Curve

_BLOCK, _WARPS = 4096, 8
_ROW_BLOCK, _ROW_WARPS = 8192, 16
"""Of reduce_rows: one program for each processor, so that few rows are read at a time and stay in the cache."""
_EXACT = {"enable_fp_fusion": False}
"""A logit times `scale` is rounded before something is taken from it, so that the highest less itself is 0."""
_UNIT, _LIKELY, _SURE = tl.constexpr(UNIT), tl.constexpr(LIKELY), tl.constexpr(SURE)


@triton.jit
def _tanh(x):
    """Within two roundings: a fraction where 1 - exp cancels, exp elsewhere."""
    square = x * x
    near = x * (945 + square * (105 + square)) / (945 + square * (420 + 15 * square))
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["kept_rows"])
def _reduce_row(
    logits,
    ids,
    log_probs,
    lse,
    entropy,
    kept,
    tops,
    kept_rows,
    vocabulary,
    stride,
    kept_stride,
    scale,
    inner,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    # Lane by lane, so that warps do not wait for each other. The first top is finite, so that differences are, too.
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(logit - top)
    weighted = tl.zeros((BLOCK,), tl.float32)  # of exp(logit - top) * (logit - top)
    for block in range(BLOCKS):
        token = block * BLOCK + at
        if CAPPED:
            capped = _tanh(tl.load(line + token, mask=token < vocabulary, other=0.0) * inner)
            here = tl.where(token < vocabulary, capped, float("-inf")) * scale
        else:
            here = tl.load(line + token, mask=token < vocabulary, other=float("-inf")) * scale
        higher = here > top
        below = -tl.abs(here - top)
        power = tl.exp(below)
        if ENTROPY:
            below = tl.where(power > 0, below, 0.0)
            weighted = tl.where(higher, power * (weighted + total * below), weighted + power * below)
        total = tl.where(higher, total * power + 1, total + power)
        top = tl.where(higher, here, top)
    highest = tl.max(top, 0)
    below = top - highest
    power = tl.exp(below)
    sum_of_powers = tl.sum(total * power, 0)
    log_sum = tl.log(sum_of_powers)
    wanted = tl.load(ids + row)
    known = (wanted >= 0) & (wanted < vocabulary)
    logit = tl.load(line + wanted, mask=known, other=float("nan"))
    if CAPPED:
        logit = _tanh(logit * inner)
    logit *= scale
    if PARTS:
        tl.store(tops + row, highest)
        tl.store(log_probs + row, logit)
        tl.store(lse + row, sum_of_powers)
    else:
        tl.store(log_probs + row, logit - highest - log_sum)
        tl.store(lse + row, highest + log_sum)
    if ENTROPY:
        below = tl.where(power > 0, below, 0.0)
        place = entropy + row
        sum_of_weighted = tl.sum(power * (weighted + total * below), 0)
        tl.store(place, sum_of_weighted if PARTS else log_sum - sum_of_weighted / sum_of_powers)
    if KEEP:  # noqa: SIM102  # decided when the kernel is compiled
        if row < kept_rows:
            line_kept = kept + row.to(tl.int64) * kept_stride
            for block in range(BLOCKS):
                token = (BLOCKS - 1 - block) * BLOCK + at  # what was read last is in the cache
                here = tl.load(line + token, mask=token < vocabulary, other=0.0, eviction_policy="evict_first")
                log_p = here * scale - highest - log_sum
                number = tl.where((log_p > _LIKELY) & (log_p < _SURE), log_p, tl.exp(log_p) * _UNIT)
                number = number.to(kept.dtype.element_ty)
                tl.store(line_kept + token, number, mask=token < vocabulary, eviction_policy="evict_first")


@triton.jit
def _differentiate_block(
    logits,
    out,
    ids,
    others,
    lse,
    entropy,
    grad_log_probs,
    grad_entropy,
    shift,
    first,
    columns,
    stride,
    out_stride,
    scale,
    inner,
    LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    SHIFTED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    here = tl.load(logits + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    if KEPT:
        p = tl.where(here < 0, tl.exp(tl.minimum(here, 0.0)), here * (1 / _UNIT))
        log_p = tl.where(here < 0, here, tl.log(tl.where(p > 0, p, 1.0)))
        if SHIFTED:
            below = tl.load(shift + row)
            p *= tl.exp(below)
            log_p += below
    else:
        if CAPPED:
            power = tl.exp(-2 * tl.abs(here * inner))
            bend = inner * 4 * power / ((1 + power) * (1 + power))  # inner * (1 - tanh^2), which would cancel
            here = _tanh(here * inner)
        log_p = here * scale - tl.load(lse + row)
        p = tl.exp(log_p)
    factor = tl.zeros((BLOCK,), tl.float32)
    if LOG_PROBS:
        slope = tl.load(grad_log_probs + row)
        wanted = at == tl.load(ids + row) - first
        factor += tl.where(wanted, 0.0, slope)
    if ENTROPY:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    grad = -p * factor
    if LOG_PROBS:
        grad += tl.where(wanted, slope * tl.load(others + row), 0.0)
    out += row.to(tl.int64) * out_stride
    if CAPPED:
        grad *= bend
    tl.store(out + at, (grad * scale).to(out.dtype.element_ty), mask=inside)


def reduce_rows(
    logits: Tensor,
    ids: Tensor,
    curve: Curve,
    log_probs: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    kept: Tensor | None,
    top: Tensor | None = None,
) -> None:
    rows, vocabulary = logits.shape
    block = _block(vocabulary, _ROW_BLOCK)
    with torch.cuda.device_of(logits):
        _reduce_row[(rows,)](
            logits,
            ids,
            log_probs,
            lse,
            entropy,
            kept,
            top,
            0 if kept is None else kept.shape[0],
            vocabulary,
            logits.stride(0),
            0 if kept is None else kept.stride(0),
            *curve,
            ENTROPY=entropy is not None,
            KEEP=kept is not None,
            PARTS=top is not None,
            CAPPED=curve.inner is not None,
            BLOCK=block,
            BLOCKS=triton.cdiv(vocabulary, block),
            num_warps=_ROW_WARPS,
            **_EXACT,
        )


def differentiate(logits: Tensor, grad: Tensor, first: int, slopes: Slopes) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    # From the stride, which all slices share, so that a narrower last slice does not compile another kernel.
    block = _block(grad.stride(0), _BLOCK)
    with torch.cuda.device_of(logits):
        _differentiate_block[(rows, triton.cdiv(columns, block))](
            logits,
            grad,
            *slopes[:6],
            slopes.shift,
            first,
            columns,
            logits.stride(0),
            grad.stride(0),
            *slopes.curve,
            LOG_PROBS=slopes.grad_log_probs is not None,
            ENTROPY=slopes.grad_entropy is not None,
            KEPT=slopes.lse is None,
            SHIFTED=slopes.lse is None and slopes.shift is not None,
            CAPPED=slopes.curve.inner is not None,
            BLOCK=block,
            num_warps=_WARPS,
            **_EXACT,
        )


def _block(columns: int, most: int) -> int:
    return min(most, max(256, 1 << (columns - 1).bit_length()))
