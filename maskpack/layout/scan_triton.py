"""Triton kernels that turn a mask on a device into spans.

    scan_rows   a program for each row: valid tokens, spans, first valid position. The last program to finish computes
                where rows begin among the packed tokens and the spans, and `SpanIndex.blocks` for rows of one span
    list_spans  a program for each row: all its spans; needed where rows have several

A bool mask is read eight positions at a time: the bytes of a 64-bit word are 0 or 1, and a multiplication sums them.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.layout.span_index import BLOCK, MOST_TOKENS, SpanIndex, blocks_of, words_of

_ROWS = 1024
_ITEMS = 512
_POSITIONS = 1024


@triton.jit
def _ones(words):
    """The number of bytes of a word that are 1."""
    return (words * 0x0101010101010101) >> 56


@triton.jit
def _count(line, items, LANES: tl.constexpr, ITEMS: tl.constexpr):
    """The number of valid tokens and of spans in a row, and its first valid position (0 in an empty row)."""
    valid = tl.zeros((ITEMS,), tl.int64)
    spans = tl.zeros((ITEMS,), tl.int64)
    first = tl.full((ITEMS,), 0x7FFFFFFF, tl.int64)
    at = tl.arange(0, ITEMS)
    begin = 0
    while begin < items:
        here = tl.load(line + at, mask=at < items, other=0)
        before = tl.load(line + at - 1, mask=(at > 0) & (at < items), other=0)
        if LANES == 8:
            starts = here & ~((here << 8) | ((before >> 56) & 1))
            valid += _ones(here)
            spans += _ones(starts)
            lane = _ones(((starts & -starts) - 1) & 0x0101010101010101)
            first = tl.minimum(first, tl.where(starts != 0, at * 8 + lane, first))
        else:
            on = here != 0
            starts = on & (before == 0)
            valid += on.to(tl.int64)
            spans += starts.to(tl.int64)
            first = tl.minimum(first, tl.where(starts, at, first))
        at += ITEMS
        begin += ITEMS
    earliest = tl.min(first)
    earliest = tl.where(earliest == 0x7FFFFFFF, 0, earliest)
    return tl.sum(valid).to(tl.int32), tl.sum(spans).to(tl.int32), earliest.to(tl.int32)


@triton.jit
def _most(sums):
    """Clamped to int32: kernels use these numbers as indices, so they must not overflow to negative ones."""
    return tl.minimum(sums, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _sum_up(
    counts, rows, cu_seqlens, splits, blocks, entries, filled,
    SUM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    tokens = tl.zeros((), SUM)
    spans = tl.zeros((), SUM)
    tl.store(cu_seqlens, 0)
    tl.store(splits, 0)
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, ROWS)
        # Written by other programs: must not come from this program's first-level cache.
        length = tl.load(counts + row, mask=row < rows, other=0, volatile=True).to(SUM)
        count = tl.load(counts + rows + row, mask=row < rows, other=0, volatile=True).to(SUM)
        ends = tokens + tl.cumsum(length, 0)
        tl.store(cu_seqlens + row + 1, _most(ends), mask=row < rows)
        tl.store(splits + row + 1, _most(spans + tl.cumsum(count, 0)), mask=row < rows)
        block = (ends - length + BLOCK - 1) // BLOCK
        stop = tl.minimum((ends + BLOCK - 1) // BLOCK, entries - 1)
        left = tl.max(stop - block)
        while left > 0:
            tl.store(blocks + block, row, mask=block < stop)
            block += 1
            left -= 1
        tokens += tl.sum(length)
        spans += tl.sum(count)
        begin += ROWS
    last = tl.minimum((tokens + BLOCK - 1) // BLOCK, entries - 1)
    tl.store(blocks + last, rows - 1)
    while last < filled:  # several where the mask has fewer tokens than the hint
        at = last + tl.arange(0, ROWS)
        tl.store(blocks + at, rows - 1, mask=at < filled)
        last += ROWS


@triton.jit(do_not_specialize=["entries", "filled"])
def _scan_rows(
    mask, counts, done, rows, items, stride, entries, filled,
    LANES: tl.constexpr, SUM: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    valid, spans, first = _count(mask + row.to(tl.int64) * stride, items, LANES, ITEMS)
    cu_seqlens = counts + rows + rows + rows
    tl.store(counts + row, valid)
    tl.store(counts + rows + row, spans)
    tl.store(counts + rows + rows + row, first)
    tl.debug_barrier()  # all threads store before the counter is raised
    if tl.atomic_add(done, 1, sem="acq_rel") == rows - 1:
        splits = cu_seqlens + rows + 1
        _sum_up(counts, rows, cu_seqlens, splits, splits + rows + 1, entries, filled, SUM, BLOCK, ROWS)


@triton.jit(do_not_specialize=["entries", "num_tokens", "spans"])
def _list_spans(
    mask, width, stride, words, cu_seqlens, splits, starts, begins, rows, blocks, bits, before, entries, num_tokens,
    spans, BLOCK: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    line = mask + row.to(tl.int64) * stride
    tokens = tl.load(cu_seqlens + row)
    span = tl.load(splits + row)
    begin = 0
    while begin < width:
        at = begin + tl.arange(0, POSITIONS)
        on = tl.load(line + at, mask=at < width, other=0) != 0
        previous = tl.load(line + at - 1, mask=(at > 0) & (at < width), other=0) != 0
        first = on & ~previous
        valid = on.to(tl.int32)
        token = tokens + tl.cumsum(valid, 0) - 1
        number = span + tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(starts + number, at, mask=first)
        tl.store(begins + number, token, mask=first)
        tl.store(rows + number, row, mask=first)
        tl.store(blocks + token // BLOCK, number, mask=on & (token % BLOCK == 0))
        word = row.to(tl.int64) * words + at // 32
        tl.store(before + word, token + 1 - valid, mask=(at % 32 == 0) & (at < width))
        whole = row.to(tl.int64) * words + begin // 32 + tl.arange(0, POSITIONS // 32)
        packed = tl.sum(tl.reshape(valid << (at % 32), (POSITIONS // 32, 32)), 1)
        tl.store(bits + whole, packed, mask=begin // 32 + tl.arange(0, POSITIONS // 32) < words)
        tokens += tl.sum(valid)
        span += tl.sum(first.to(tl.int32))
        begin += POSITIONS
    if row == tl.num_programs(0) - 1:
        tl.store(begins + spans, num_tokens)
        tl.store(blocks + entries - 1, spans - 1)


def scan_rows(mask: Tensor, entries: int, hinted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int32 tensors: [3, B], the number of valid tokens, of spans and the first valid position (0 in an empty row) of
    each row; [B + 1] and [B + 1], where each row begins among the packed tokens and among the spans, clamped to int32;
    and [entries], `SpanIndex.blocks` for rows of one span, filled to the end if `hinted`.

    `mask` is [B, S], contiguous along S; B and S are not 0.
    """
    rows, width = mask.shape
    stride = mask.stride(0)
    source: Any = mask
    lanes = 1
    if mask.dtype == torch.bool:
        whole_words = width % 8 == 0 and (rows == 1 or stride % 8 == 0) and mask.data_ptr() % 8 == 0
        lanes = 8 if whole_words else 1
        source = triton.reinterpret(mask, tl.int64 if whole_words else tl.int8)
    line = torch.empty(5 * rows + 2 + entries, dtype=torch.int32, device=mask.device)
    done = torch.zeros(1, dtype=torch.int32, device=mask.device)
    sums = tl.int32 if mask.numel() <= MOST_TOKENS - BLOCK else tl.int64
    _scan_rows[(rows,)](
        source, line, done, rows, width // lanes, stride // lanes, entries, entries if hinted else 0,
        lanes, sums, _ITEMS, BLOCK, _ROWS,
    )  # fmt: skip
    counts, cu_seqlens, splits, blocks = line.split([3 * rows, rows + 1, rows + 1, entries])
    return counts.view(3, rows), cu_seqlens, splits, blocks


def list_spans(mask: Tensor, cu_seqlens: Tensor, splits: Tensor, num_tokens: int, spans: int) -> SpanIndex:
    """The index of rows with several spans; `num_tokens` is T, `spans` is N."""
    rows, width = mask.shape
    entries, words = blocks_of(num_tokens), words_of(width)
    sizes = [spans, spans + 1, entries, spans, rows * words, rows * words]
    line = torch.empty(sum(sizes), dtype=torch.int32, device=mask.device)
    starts, begins, blocks, of_rows, bits, before = line.split(sizes)
    source: Any = triton.reinterpret(mask, tl.int8) if mask.dtype == torch.bool else mask
    _list_spans[(rows,)](
        source, width, mask.stride(0), words, cu_seqlens, splits, starts, begins, of_rows, blocks, bits, before,
        entries, num_tokens, spans, BLOCK, _POSITIONS,
    )  # fmt: skip
    ranks = bits.view(rows, words), before.view(rows, words)
    return SpanIndex(starts, begins, blocks, of_rows, splits, cu_seqlens, *ranks)
