"""Triton kernels of prefix_attention.py: rows merged and added in place, by index.

The functions of the same names there specify them in plain torch. They compute in float32. Tensors may have any
strides: kernels of FlashAttention return those of their queries, keys and values.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 16


@triton.jit
def _rows(index, tokens, TOKENS: tl.constexpr):
    """The tokens of a program, whether each is there, and the row that it is merged into or added to."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    valid = token < tokens
    return token, valid, tl.load(index + token, mask=valid, other=0)


@triton.jit
def _places(row, by_token, by_head, by_lane, lane):
    """The lanes of this program's head of rows [T, H, D]."""
    head = tl.program_id(1).to(tl.int64)
    return (row * by_token + head * by_head)[:, None] + lane[None, :] * by_lane


@triton.jit
def _merge(
    out, lse, index, other, other_lse, tokens, out_token, out_head, out_lane, lse_head, lse_token, other_token,
    other_head, other_lane, other_lse_head, other_lse_token,
    SIZE: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    token, valid, row = _rows(index, tokens, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    lse += head * lse_head + row * lse_token
    before = tl.load(lse, mask=valid, other=0.0)
    more = tl.load(other_lse + head * other_lse_head + token * other_lse_token, mask=valid, other=0.0)
    top = tl.maximum(before, more)
    after = top + tl.log(tl.exp(before - top) + tl.exp(more - top))
    lane = tl.arange(0, LANES)
    inside = valid[:, None] & (lane < SIZE)[None, :]
    out += _places(row, out_token, out_head, out_lane, lane)
    other += _places(token, other_token, other_head, other_lane, lane)
    own = tl.load(out, mask=inside, other=0.0).to(tl.float32) * tl.exp(before - after)[:, None]
    own += tl.load(other, mask=inside, other=0.0).to(tl.float32) * tl.exp(more - after)[:, None]
    tl.store(out, own.to(out.dtype.element_ty), mask=inside)
    tl.store(lse, after, mask=valid)


@triton.jit
def _add_rows(
    sums, index, rows, tokens, sums_token, sums_head, sums_lane, rows_token, rows_head, rows_lane,
    SIZE: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    token, valid, row = _rows(index, tokens, TOKENS)
    lane = tl.arange(0, LANES)
    inside = valid[:, None] & (lane < SIZE)[None, :]
    sums += _places(row, sums_token, sums_head, sums_lane, lane)
    rows += _places(token, rows_token, rows_head, rows_lane, lane)
    total = tl.load(sums, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums, total.to(sums.dtype.element_ty), mask=inside)


def merge(out: Tensor, lse: Tensor, index: Tensor, other: Tensor, other_lse: Tensor) -> None:
    strides = (stride for x in (out, lse, other, other_lse) for stride in x.stride())
    _launch(_merge, other, out, lse, index, other, other_lse, other.shape[0], *strides)


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    _launch(_add_rows, rows, sums, index, rows, rows.shape[0], *sums.stride(), *rows.stride())


def _launch(kernel: Any, rows: Tensor, *arguments: Any) -> None:
    """Runs a kernel for the heads of rows [n, H, D]."""
    tokens, heads, size = rows.shape
    if tokens:
        grid = triton.cdiv(tokens, _TOKENS), heads
        with torch.cuda.device_of(rows):
            kernel[grid](*arguments, SIZE=size, LANES=triton.next_power_of_2(size), TOKENS=_TOKENS)
