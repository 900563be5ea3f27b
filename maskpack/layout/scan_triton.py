"""Triton kernels that turn a mask on a device into spans.

    scan_rows   a program for each row: valid tokens, spans, first valid position. Then a program for each _GROUP rows:
                where they begin among the packed tokens and the spans, their totals, and `SpanIndex.blocks` for rows
                of one span
    list_spans  a program for each row: all its spans; needed where rows have several

Programs do not wait for each other, and no memory has to be set to 0 before: several streams and captured graphs may
run the same kernels at once.

A bool mask is read eight positions at a time: a multiplication sums the bytes of a 64-bit word, which are 0 or 1. Bytes
that no bool has are taken as 1: `list_spans` takes them as tokens, too, and writes where the first kernel counted. An
error names such a field later, if its pads are checked.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.core.latest import Latest
from maskpack.layout.launch_triton import Launch, addresses_of
from maskpack.layout.span_index import BLOCK, MOST_TOKENS, SpanIndex, blocks_of, lists_places, words_of

_AHEAD = 1024
_GROUP = 256
_ITEMS = 1024
_POSITIONS = 1024


@triton.jit
def _ones(words):
    """The number of bytes of a word that are 1."""
    return (words * 0x0101010101010101) >> 56


@triton.jit
def _not_zero(words):
    """1 for each byte of a word that is not 0: adding 127 to its other bits carries into the highest."""
    return ((((words & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | words) >> 7) & 0x0101010101010101


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
            here, before = _not_zero(here), _not_zero(before)
            starts = here & ~((here << 8) | (before >> 56))
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
def _count_rows(mask, counts, rows, items, stride, LANES: tl.constexpr, ITEMS: tl.constexpr):
    row = tl.program_id(0)
    valid, spans, first = _count(mask + row.to(tl.int64) * stride, items, LANES, ITEMS)
    tl.store(counts + row, valid)
    tl.store(counts + rows + row, spans)
    tl.store(counts + rows + rows + row, first)


@triton.jit(do_not_specialize=["entries", "num_tokens"])
def _sum_up(
    counts, rows, entries, num_tokens,
    HINTED: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    spans_of = counts + rows
    totals = spans_of + rows + rows
    begins = totals + 3
    splits = begins + rows + 1
    blocks = splits + rows + 1
    bounded = blocks + entries
    group = tl.program_id(0) * GROUP
    before = tl.zeros((AHEAD,), SUM)
    spans_before = tl.zeros((AHEAD,), SUM)
    most = tl.zeros((AHEAD,), tl.int32)
    begin = 0
    while begin < group:
        row = begin + tl.arange(0, AHEAD)
        before += tl.load(counts + row, mask=row < group, other=0).to(SUM)
        spans = tl.load(spans_of + row, mask=row < group, other=0)
        spans_before += spans.to(SUM)
        most = tl.maximum(most, spans)
        begin += AHEAD
    row = group + tl.arange(0, GROUP)
    length = tl.load(counts + row, mask=row < rows, other=0).to(SUM)
    ends = tl.sum(before) + tl.cumsum(length, 0)
    spans = tl.load(spans_of + row, mask=row < rows, other=0)
    splits_end = tl.sum(spans_before) + tl.cumsum(spans.to(SUM), 0)
    tl.store(begins + row + 1, _most(ends), mask=row < rows)
    tl.store(splits + row + 1, _most(splits_end), mask=row < rows)
    if HINTED:
        tl.store(bounded + row + 1, tl.minimum(_most(ends), num_tokens), mask=row < rows)
    if group == 0:
        tl.store(begins, 0)
        tl.store(splits, 0)
        if HINTED:
            tl.store(bounded, 0)
    block = (ends - length + BLOCK - 1) // BLOCK
    stop = tl.minimum((ends + BLOCK - 1) // BLOCK, entries - 1)
    left = tl.max(stop - block)
    at = block[:, None] + tl.arange(0, 8)[None, :]
    while left > 0:
        tl.store(blocks + at, tl.zeros_like(at).to(tl.int32) + row[:, None], mask=at < stop[:, None])
        at += 8
        left -= 8
    if group + GROUP >= rows:
        tl.store(totals, _most(tl.max(ends)))
        tl.store(totals + 1, _most(tl.max(splits_end)))
        tl.store(totals + 2, tl.maximum(tl.max(most), tl.max(spans)))
        last = tl.minimum((tl.max(ends) + BLOCK - 1) // BLOCK, entries - 1)
        tl.store(blocks + last, rows - 1)
        if HINTED:
            while last < entries:  # several where the mask has fewer tokens than the hint
                line = last + tl.arange(0, AHEAD)
                tl.store(blocks + line, tl.zeros_like(line).to(tl.int32) + rows - 1, mask=line < entries)
                last += AHEAD


@triton.jit(
    do_not_specialize=["entries", "num_tokens", "spans"], do_not_specialize_on_alignment=["cu_seqlens", "splits"]
)
def _list_spans(
    mask, line_of_spans, cu_seqlens, splits, entries, num_tokens, spans, width, stride, words,
    BLOCK: tl.constexpr, POSITIONS: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    size = tl.num_programs(0).to(tl.int64) * words
    starts = line_of_spans
    begins = starts + spans
    rows = begins + spans + 1
    blocks = rows + spans
    bits = blocks + entries
    before = bits + size
    places = before + size
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
        both = valid + (first.to(tl.int32) << 16)  # two sums in one scan: neither passes 16 bits
        sums = tl.cumsum(both, 0)
        token = tokens + (sums & 0xFFFF) - 1
        number = span + (sums >> 16) - 1
        tl.store(starts + number, at, mask=first)
        tl.store(begins + number, token, mask=first)
        tl.store(rows + number, row, mask=first)
        tl.store(blocks + token // BLOCK, number, mask=on & (token % BLOCK == 0))
        if PLACES:
            tl.store(places + token, row * width + at, mask=on)
        word = row.to(tl.int64) * words + at // 32
        tl.store(before + word, token + 1 - valid, mask=(at % 32 == 0) & (at < width))
        whole = row.to(tl.int64) * words + begin // 32 + tl.arange(0, POSITIONS // 32)
        packed = tl.sum(tl.reshape(valid << (at % 32), (POSITIONS // 32, 32)), 1)
        tl.store(bits + whole, packed, mask=begin // 32 + tl.arange(0, POSITIONS // 32) < words)
        total = tl.sum(both)
        tokens += total & 0xFFFF
        span += total >> 16
        begin += POSITIONS
    if row == tl.num_programs(0) - 1:
        tl.store(begins + spans, num_tokens)
        tl.store(blocks + entries - 1, spans - 1)


class Scan(NamedTuple):
    """int32 tensors of a mask [B, S].

    Attributes:
        counts: at least [3 * B + 3]: the number of valid tokens of each row, of its spans, and its first valid position
            (0 in an empty row); then the totals: T and N, clamped to int32, and the most spans of a row.
        starts: [B], the third part of `counts`.
        begins: [B + 1], where each row begins among the packed tokens, then their number; clamped to int32.
        splits: [B + 1], the same of the spans.
        blocks: `SpanIndex.blocks` for rows of one span, filled to the end if T is a hint.
        bounded: [B + 1], `begins` clamped to the hint; None without one.
    """

    counts: Tensor
    starts: Tensor
    begins: Tensor
    splits: Tensor
    blocks: Tensor
    bounded: Tensor | None


class _Kind(NamedTuple):
    """How masks of one dtype, shape, stride and alignment are read."""

    lanes: int
    sums: Any
    count: Launch
    sum_up: Launch
    list_spans: tuple[Launch, Launch]


_kinds: Latest[_Kind] = Latest(256)


def _kind_of(mask: Tensor, hinted: bool) -> _Kind:
    key = (mask.device, mask.dtype, mask.shape, mask.stride(0), mask.data_ptr() & 15, hinted)
    return _kinds.get(key) or _kinds.keep(key, _kind(mask))


def _kind(mask: Tensor) -> _Kind:
    (rows, width), stride = mask.shape, mask.stride(0)
    whole_words = width % 8 == 0 and (rows == 1 or stride % 8 == 0) and mask.data_ptr() % 8 == 0
    lanes = 8 if mask.dtype == torch.bool and whole_words else 1
    sums = tl.int32 if mask.numel() <= MOST_TOKENS - BLOCK else tl.int64
    return _Kind(lanes, sums, Launch(_count_rows), Launch(_sum_up), (Launch(_list_spans), Launch(_list_spans)))


def _source(mask: Tensor, lanes: int) -> Any:
    """A mask as Triton takes it."""
    return triton.reinterpret(mask, tl.int64 if lanes == 8 else tl.int8) if mask.dtype == torch.bool else mask


def scan_rows(mask: Tensor, entries: int, num_tokens: int | None) -> Scan:
    """The rows of a mask [B, S], contiguous along S; B and S are not 0. `entries` is the length of `blocks`; T is
    `num_tokens` if that is a hint."""
    (rows, width), hinted = mask.shape, num_tokens is not None
    kind = _kind_of(mask, hinted)
    sizes = [2 * rows, rows, 3, rows + 1, rows + 1, entries, *([rows + 1] if hinted else [])]
    line = torch.empty(sum(sizes), dtype=torch.int32, device=mask.device)
    at, to = mask.data_ptr(), line.data_ptr()
    remember = not to & 15
    numbers = rows, width // kind.lanes, mask.stride(0) // kind.lanes, kind.lanes, _ITEMS
    if not remember or not kind.count.again(rows, [at, to, *numbers]):
        kind.count.first(rows, [_source(mask, kind.lanes), line, *numbers], remember=remember)
    numbers = rows, entries, num_tokens or 0, hinted, kind.sums, BLOCK, _GROUP, _AHEAD
    programs = -(-rows // _GROUP)
    if not remember or not kind.sum_up.again(programs, [to, *numbers]):
        kind.sum_up.first(programs, [line, *numbers], remember=remember)
    _, starts, _, begins, splits, blocks, *bounded = line.split_with_sizes(sizes)
    return Scan(line, starts, begins, splits, blocks, bounded[0] if hinted else None)


def list_spans(mask: Tensor, scan: Scan, num_tokens: int, spans: int) -> SpanIndex:
    """The index of rows with several spans; `num_tokens` is T, `spans` is N."""
    rows, width = mask.shape
    entries, words = blocks_of(num_tokens), words_of(width)
    with_places = lists_places(spans, num_tokens, rows * width)
    sizes = [spans, spans + 1, spans, entries, rows * words, rows * words, *([num_tokens] if with_places else [])]
    line = torch.empty(sum(sizes), dtype=torch.int32, device=mask.device)
    kind = _kind_of(mask, False)
    launch = kind.list_spans[with_places]
    remember = not line.data_ptr() & 15
    parts = line, scan.begins, scan.splits
    numbers = entries, num_tokens, spans, width, mask.stride(0), words, BLOCK, _POSITIONS, with_places
    if not remember or not launch.again(rows, [mask.data_ptr(), *addresses_of(parts), *numbers]):
        launch.first(rows, [_source(mask, 1), *parts, *numbers], remember=remember)
    starts, begins, of_rows, blocks, bits, before, *places = line.split_with_sizes(sizes)
    ranks = bits.view(rows, words), before.view(rows, words)
    return SpanIndex(starts, begins, blocks, of_rows, scan.splits, scan.begins, *ranks, *places)
