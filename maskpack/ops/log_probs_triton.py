"""Triton kernels of `packed_log_probs`, which process the logits between two matrix products.

    reduce_rows    a program for each row reads its logits once: log-prob of the token, log-sum-exp, entropy
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

_BLOCK = 4096


@triton.jit
def _reduce_row(
    logits,
    ids,
    log_probs,
    lse,
    entropy,
    vocabulary,
    stride,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    # Finite, so that the differences below are finite: in the first block, sums of 0 are scaled by exp(-3e38) = 0.
    top = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(logit - top), lane by lane
    weighted = tl.zeros((BLOCK,), tl.float32)  # of exp(logit - top) * (logit - top)
    for block in range(BLOCKS):
        token = block * BLOCK + at
        here = tl.load(line + token, mask=token < vocabulary, other=float("-inf")) * scale
        higher = tl.maximum(top, tl.max(here, 0))
        shrink = tl.exp(top - higher)
        power = tl.exp(here - higher)
        if ENTROPY:
            below = tl.where(power > 0, here - higher, 0.0)
            weighted = shrink * (weighted + total * (top - higher)) + power * below
        total = total * shrink + power
        top = higher
    sum_of_powers = tl.sum(total, 0)
    log_sum = tl.log(sum_of_powers)
    wanted = tl.load(ids + row)
    known = (wanted >= 0) & (wanted < vocabulary)
    logit = tl.load(line + wanted, mask=known, other=float("nan")) * scale
    tl.store(log_probs + row, logit - top - log_sum)
    tl.store(lse + row, top + log_sum)
    if ENTROPY:
        tl.store(entropy + row, log_sum - tl.sum(weighted, 0) / sum_of_powers)


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
    first,
    columns,
    stride,
    out_stride,
    scale,
    LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    log_p = tl.load(logits + row.to(tl.int64) * stride + at, mask=inside, other=0.0) * scale - tl.load(lse + row)
    factor = tl.zeros((BLOCK,), tl.float32)
    if LOG_PROBS:
        slope = tl.load(grad_log_probs + row)
        wanted = at == tl.load(ids + row) - first
        factor += tl.where(wanted, 0.0, slope)
    if ENTROPY:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    grad = -tl.exp(log_p) * factor
    if LOG_PROBS:
        grad += tl.where(wanted, slope * tl.load(others + row), 0.0)
    out += row.to(tl.int64) * out_stride
    tl.store(out + at, (grad * scale).to(out.dtype.element_ty), mask=inside)


def reduce_rows(
    logits: Tensor, ids: Tensor, scale: float, log_probs: Tensor, lse: Tensor, entropy: Tensor | None
) -> None:
    rows, vocabulary = logits.shape
    block = _block(vocabulary)
    with torch.cuda.device_of(logits):
        _reduce_row[(rows,)](
            logits,
            ids,
            log_probs,
            lse,
            entropy,
            vocabulary,
            logits.stride(0),
            scale,
            ENTROPY=entropy is not None,
            BLOCK=block,
            BLOCKS=triton.cdiv(vocabulary, block),
            num_warps=8,
        )


def differentiate(
    logits: Tensor,
    grad: Tensor,
    first: int,
    ids: Tensor,
    others: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    scale: float,
) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    # From the stride, which all slices share, so that a narrower last slice does not compile another kernel.
    block = _block(logits.stride(0))
    with torch.cuda.device_of(logits):
        _differentiate_block[(rows, triton.cdiv(columns, block))](
            logits,
            grad,
            ids,
            others,
            lse,
            entropy,
            grad_log_probs,
            grad_entropy,
            first,
            columns,
            logits.stride(0),
            grad.stride(0),
            scale,
            LOG_PROBS=grad_log_probs is not None,
            ENTROPY=grad_entropy is not None,
            BLOCK=block,
            num_warps=8,
        )


def _block(columns: int) -> int:
    return min(_BLOCK, max(256, 1 << (columns - 1).bit_length()))
