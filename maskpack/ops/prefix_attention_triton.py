"""Triton kernels of prefix_attention.py: rows merged and added in place, by index.

The functions of the same names there specify them in plain torch. They compute in float32.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 16


@triton.jit
def _merge(
    out,
    lse,
    index,
    other,
    other_lse,
    tokens,
    lse_stride,
    other_lse_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    valid = token < tokens
    row = tl.load(index + token, mask=valid, other=0)
    before = tl.load(lse + head * lse_stride + row, mask=valid, other=0.0)
    more = tl.load(other_lse + head * other_lse_stride + token, mask=valid, other=0.0)
    top = tl.maximum(before, more)
    after = top + tl.log(tl.exp(before - top) + tl.exp(more - top))
    lane = tl.arange(0, LANES)
    inside = valid[:, None] & (lane < SIZE)[None, :]
    to = (row * HEADS + head)[:, None] * SIZE + lane[None, :]
    at = (token.to(tl.int64) * HEADS + head)[:, None] * SIZE + lane[None, :]
    own = tl.load(out + to, mask=inside, other=0.0).to(tl.float32) * tl.exp(before - after)[:, None]
    own += tl.load(other + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(more - after)[:, None]
    tl.store(out + to, own.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * lse_stride + row, after, mask=valid)


@triton.jit
def _add_rows(sums, index, rows, tokens, ITEMS: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = token < tokens
    row = tl.load(index + token, mask=valid, other=0)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = valid[:, None] & (lane < ITEMS)[None, :]
    to, at = row[:, None] * ITEMS + lane[None, :], token.to(tl.int64)[:, None] * ITEMS + lane[None, :]
    total = tl.load(sums + to, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + to, total.to(sums.dtype.element_ty), mask=inside)


def merge(out: Tensor, lse: Tensor, index: Tensor, other: Tensor, other_lse: Tensor) -> None:
    tokens, heads, size = other.shape
    if tokens:
        other, strides = other.contiguous(), (lse.stride(0), other_lse.stride(0))
        grid = triton.cdiv(tokens, _TOKENS), heads
        with torch.cuda.device_of(out):
            _merge[grid](
                out,
                lse,
                index,
                other,
                other_lse,
                tokens,
                *strides,
                HEADS=heads,
                SIZE=size,
                LANES=triton.next_power_of_2(size),
                TOKENS=_TOKENS,
            )


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    tokens, items = rows.shape[0], rows[0].numel() if rows.shape[0] else 0
    if tokens:
        lanes = min(1024, triton.next_power_of_2(items))
        grid = triton.cdiv(tokens, _TOKENS), triton.cdiv(items, lanes)
        with torch.cuda.device_of(sums):
            _add_rows[grid](sums, index, rows.contiguous(), tokens, ITEMS=items, LANES=lanes, TOKENS=_TOKENS)
