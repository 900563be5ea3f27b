"""Triton kernels that turn a mask on a device into runs.

    scan_rows  a program for each row: real positions, runs, the first real position; the last one to end sums them up:
               where rows begin among the packed tokens and runs, and the blocks of rows of one run
    list_runs  a program for each row: every run, for rows of several

A bool mask is read eight positions at a time: the bytes of a 64-bit word are 0 or 1, so a multiplication sums them.
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
    """How many bytes of a word are 1."""
    return (words * 0x0101010101010101) >> 56


@triton.jit
def _count(line, items, LANES: tl.constexpr, ITEMS: tl.constexpr):
    """Of a row: real positions, runs, and the first real position, 0 if there is none."""
    real = tl.zeros((ITEMS,), tl.int64)
    runs = tl.zeros((ITEMS,), tl.int64)
    first = tl.full((ITEMS,), 0x7FFFFFFF, tl.int64)
    at = tl.arange(0, ITEMS)
    begin = 0
    while begin < items:
        here = tl.load(line + at, mask=at < items, other=0)
        before = tl.load(line + at - 1, mask=(at > 0) & (at < items), other=0)
        if LANES == 8:
            starts = here & ~((here << 8) | ((before >> 56) & 1))
            real += _ones(here)
            runs += _ones(starts)
            lane = _ones(((starts & -starts) - 1) & 0x0101010101010101)
            first = tl.minimum(first, tl.where(starts != 0, at * 8 + lane, first))
        else:
            on = here != 0
            starts = on & (before == 0)
            real += on.to(tl.int64)
            runs += starts.to(tl.int64)
            first = tl.minimum(first, tl.where(starts, at, first))
        at += ITEMS
        begin += ITEMS
    earliest = tl.min(first)
    earliest = tl.where(earliest == 0x7FFFFFFF, 0, earliest)
    return tl.sum(real).to(tl.int32), tl.sum(runs).to(tl.int32), earliest.to(tl.int32)


@triton.jit
def _most(sums):
    """As int32, or the largest one: kernels follow these numbers, and none of them may be negative."""
    return tl.minimum(sums, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _sum_up(
    counts, rows, cu_seqlens, splits, blocks, entries, filled,
    SUM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    tokens = tl.zeros((), SUM)
    runs = tl.zeros((), SUM)
    tl.store(cu_seqlens, 0)
    tl.store(splits, 0)
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, ROWS)
        # Other programs wrote them: not from this one's first-level cache.
        length = tl.load(counts + row, mask=row < rows, other=0, volatile=True).to(SUM)
        count = tl.load(counts + rows + row, mask=row < rows, other=0, volatile=True).to(SUM)
        ends = tokens + tl.cumsum(length, 0)
        tl.store(cu_seqlens + row + 1, _most(ends), mask=row < rows)
        tl.store(splits + row + 1, _most(runs + tl.cumsum(count, 0)), mask=row < rows)
        block = (ends - length + BLOCK - 1) // BLOCK
        stop = tl.minimum((ends + BLOCK - 1) // BLOCK, entries - 1)
        left = tl.max(stop - block)
        while left > 0:
            tl.store(blocks + block, row, mask=block < stop)
            block += 1
            left -= 1
        tokens += tl.sum(length)
        runs += tl.sum(count)
        begin += ROWS
    last = tl.minimum((tokens + BLOCK - 1) // BLOCK, entries - 1)
    tl.store(blocks + last, rows - 1)
    while last < filled:  # more than this one where fewer tokens came than were promised
        at = last + tl.arange(0, ROWS)
        tl.store(blocks + at, rows - 1, mask=at < filled)
        last += ROWS


@triton.jit(do_not_specialize=["entries", "filled"])
def _scan_rows(
    mask, counts, done, rows, items, stride, entries, filled,
    LANES: tl.constexpr, SUM: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    real, runs, first = _count(mask + row.to(tl.int64) * stride, items, LANES, ITEMS)
    cu_seqlens = counts + rows + rows + rows
    tl.store(counts + row, real)
    tl.store(counts + rows + row, runs)
    tl.store(counts + rows + rows + row, first)
    tl.debug_barrier()  # the stores of all threads, then the one that says so
    if tl.atomic_add(done, 1, sem="acq_rel") == rows - 1:
        splits = cu_seqlens + rows + 1
        _sum_up(counts, rows, cu_seqlens, splits, splits + rows + 1, entries, filled, SUM, BLOCK, ROWS)


@triton.jit(do_not_specialize=["entries", "num_tokens", "runs"])
def _list_runs(
    mask, width, stride, words, cu_seqlens, splits, starts, begins, rows, blocks, bits, before, entries, num_tokens, runs,
    BLOCK: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    line = mask + row.to(tl.int64) * stride
    tokens = tl.load(cu_seqlens + row)
    run = tl.load(splits + row)
    begin = 0
    while begin < width:
        at = begin + tl.arange(0, POSITIONS)
        on = tl.load(line + at, mask=at < width, other=0) != 0
        previous = tl.load(line + at - 1, mask=(at > 0) & (at < width), other=0) != 0
        first = on & ~previous
        real = on.to(tl.int32)
        token = tokens + tl.cumsum(real, 0) - 1
        number = run + tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(starts + number, at, mask=first)
        tl.store(begins + number, token, mask=first)
        tl.store(rows + number, row, mask=first)
        tl.store(blocks + token // BLOCK, number, mask=on & (token % BLOCK == 0))
        word = row.to(tl.int64) * words + at // 32
        tl.store(before + word, token + 1 - real, mask=(at % 32 == 0) & (at < width))
        whole = row.to(tl.int64) * words + begin // 32 + tl.arange(0, POSITIONS // 32)
        packed = tl.sum(tl.reshape(real << (at % 32), (POSITIONS // 32, 32)), 1)
        tl.store(bits + whole, packed, mask=begin // 32 + tl.arange(0, POSITIONS // 32) < words)
        tokens += tl.sum(real)
        run += tl.sum(first.to(tl.int32))
        begin += POSITIONS
    if row == tl.num_programs(0) - 1:
        tl.store(begins + runs, num_tokens)
        tl.store(blocks + entries - 1, runs - 1)


def scan_rows(mask: Tensor, entries: int, promised: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a mask [B, S] with neighbours in memory along S, B and S not 0, int32: [3, B], real positions, runs and first
    real position (0 in an empty row) of each row; [B + 1], where rows begin among the packed tokens, and among the
    runs, or the largest int32; and for rows of one run `SpanIndex.blocks`: `entries` entries, all of which are written
    where they follow from a promise."""
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
        source, line, done, rows, width // lanes, stride // lanes, entries, entries if promised else 0,
        lanes, sums, _ITEMS, BLOCK, _ROWS,
    )  # fmt: skip
    counts, cu_seqlens, splits, blocks = line.split([3 * rows, rows + 1, rows + 1, entries])
    return counts.view(3, rows), cu_seqlens, splits, blocks


def list_runs(mask: Tensor, cu_seqlens: Tensor, splits: Tensor, num_tokens: int, runs: int) -> SpanIndex:
    """The index of rows of several runs; `num_tokens` is T, `runs` is N."""
    rows, width = mask.shape
    entries, words = blocks_of(num_tokens), words_of(width)
    sizes = [runs, runs + 1, entries, runs, rows * words, rows * words]
    line = torch.empty(sum(sizes), dtype=torch.int32, device=mask.device)
    starts, begins, blocks, of_rows, bits, before = line.split(sizes)
    source: Any = triton.reinterpret(mask, tl.int8) if mask.dtype == torch.bool else mask
    _list_runs[(rows,)](
        source, width, mask.stride(0), words, cu_seqlens, splits, starts, begins, of_rows, blocks, bits, before,
        entries, num_tokens, runs, BLOCK, _POSITIONS,
    )  # fmt: skip
    ranks = bits.view(rows, words), before.view(rows, words)
    return SpanIndex(starts, begins, blocks, of_rows, splits, cu_seqlens, *ranks)
