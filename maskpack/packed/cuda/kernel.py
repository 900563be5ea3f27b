"""The decode kernel: the encoded bytes of a batch, on the device, to all its nested or padded tensors in one launch.

A program writes a span of one row of one tensor, CHUNK words at a time, each word once, value or pad. What it does is
in its job (job_table.py): the places of words in their row come from the layout, the words from the encoding. All
arithmetic is int64 and wraps; what is stored is cut to the size of the words.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maskpack.core import abi, native
from maskpack.nesting import device_read
from maskpack.nesting.read_triton import _job_of, load_words, store_words
from maskpack.ops.pack_triton import _ones
from maskpack.packed.cuda import job_table

JOB = tl.constexpr(job_table.JOB_NUMBERS)
BY_PLACE, BY_PIECE, BY_BLOCK = map(tl.constexpr, (abi.BY_PLACE, abi.BY_PIECE, abi.BY_BLOCK))
BLOCK, NEAR_BIT, CODED, CODES = map(tl.constexpr, (abi.BLOCK, abi.NEAR, abi.CODED, abi.CODES))
HEAD, TAIL, FIRSTS = map(tl.constexpr, (job_table.HEAD, job_table.TAIL, device_read.FIRSTS))
_WARPS = 8
(
    SPANS, OUT, SIZE, ITEMS, STRIDE, OFFSET, ROW_WORDS, BOUNDS, UNIT, WIDTH, INNER, SPLITS, STARTS, ENDS,
    PADS, PAD_ROW, PAD_ITEMS, EDGE, PART, HEAD_BOUNDS, HEAD_UNIT, GROUP, TAKEN, PLACES, SOURCE,
) = map(tl.constexpr, native.places_in(job_table.JOB, *job_table.JOB.names or ()))  # fmt: skip
(
    KIND, ROWS, BEGINS, BEGIN_UNIT, DATA, DATA_SIZE, MORE, NUMBER, SINGLE, PIECES, COUNTS, SUMS, NUMBERS, NEAR,
    STRETCHES, STRETCH_STARTS, STRETCH_ENDS,
) = map(tl.constexpr, native.places_in(abi.SOURCE, *abi.SOURCE.names or ()))  # fmt: skip


# -------------------------------------------------------------------- rows


@triton.jit
def _at_most(address, size, count, base, value, mask):
    """How many of `count` rising numbers are at most `value` above a base."""
    found = value * 0
    left = count.to(tl.int32)
    while left > 0:
        half = (left + 1) // 2
        some = load_words(address, size, found + (half - 1), mask) - base <= value
        found = tl.where(some, found + half, found)
        left -= half
    return found


@triton.jit
def _bound(tables, table, unit, row):
    """Where a row begins."""
    at = row
    if table >= 0:
        at = tl.load(tables + table + row)
    return at * unit


@triton.jit
def _nearest(tables, splits, starts, ends, row, column, mask):
    """The place, among the elements of a row that lie in spans, of the one at a column, or of the nearest one if there
    is none; and if there is."""
    first = tl.load(tables + splits + row)
    count = tl.load(tables + splits + row + 1) - first
    starts, ends = tables + starts + first, tables + ends + first
    run = _at_most(starts.to(tl.pointer_type(tl.uint8)), 8, count, 0, column, mask) - 1
    some = mask & (run >= 0)
    begin = tl.load(ends)
    before = (tl.load(ends + run, mask=some, other=0) - begin).to(tl.int32)
    length = (tl.load(ends + run + 1, mask=some, other=0) - begin).to(tl.int32) - before
    inside = column - tl.load(starts + run, mask=some, other=0).to(tl.int32)
    seen = tl.where(some, before + tl.minimum(inside + 1, length), 1)
    return tl.maximum(seen - 1, 0), some & (inside < length)


# -------------------------------------------------------------------- encodings


@triton.jit
def _by_place(body, source, begin, place, mask):
    size = tl.load(source + DATA_SIZE)
    return load_words(body + tl.load(source + DATA) + begin * size, size, place, mask)


@triton.jit
def _by_piece(body, tables, source, stored, first, place, mask):
    piece = place * 0
    start = place * 0
    words = place.to(tl.int64) * 0
    sums = tl.load(source + SUMS)
    pieces = tl.load(source + PIECES)
    if pieces >= 0:
        low = tl.load(tables + pieces + stored)
        count = tl.load(tables + pieces + stored + 1) - low
        counts = tables + tl.load(source + COUNTS) + low
        before = tl.load(counts)
        piece = _at_most((counts + 1).to(tl.pointer_type(tl.uint8)), 8, count, before, place, mask)
        start = (tl.load(counts + piece, mask=mask, other=0) - before).to(tl.int32)
        if sums >= 0:
            words = tl.load(tables + sums + low + piece, mask=mask, other=0) - tl.load(tables + sums + low)
    size = tl.load(source + DATA_SIZE)
    several = 1 - tl.load(source + SINGLE)
    value = load_words(body + tl.load(source + DATA) + several * first * size, size, several.to(tl.int32) * piece, mask)
    value = (value << (64 - 8 * size)) >> (64 - 8 * size)
    times = tl.where(sums >= 0, place - start + 1, 1)
    return words + value * times


@triton.jit
def widths_of(number):
    """The bits of the words of each of the four codes."""
    return number & 31, (number >> 8) & 31, (number >> 16) & 31, (number >> 24) & 31


@triton.jit
def firsts_of(number):
    """The first word of each code but the first, whose words begin at 0."""
    w0, w1, w2, _ = widths_of(number)
    second = 1 << w0
    third = second + (1 << w1)
    return second, third, third + (1 << w2)


@triton.jit
def by_code(code, first, second, third, fourth):
    return tl.where(code == 0, first, tl.where(code == 1, second, tl.where(code == 2, third, fourth)))


@triton.jit
def _coded(source, numbers, first, n, place, mask):
    """The words of coded blocks above the least: each has the width of its code, and lies behind those before it."""
    second, third, fourth = place * 0, place * 0, place * 0
    for number in range(BLOCK // CODES):
        inside = mask & (number * CODES <= place)
        codes = load_words(numbers, 4, first + number, inside).to(tl.uint32, bitcast=False)
        before = tl.minimum(place - number * CODES, CODES)
        codes = tl.where(before < CODES, codes & ((tl.full([1], 1, tl.uint32) << (2 * before)) - 1), codes)
        low, high = codes & 0x55555555, (codes >> 1) & 0x55555555
        both = low & high
        fourth += tl.where(inside, _ones(both), 0)
        second += tl.where(inside, _ones(low ^ both), 0)
        third += tl.where(inside, _ones(high ^ both), 0)
    code = load_words(numbers, 4, first + place // CODES, mask).to(tl.int32) >> (2 * (place & (CODES - 1))) & 3
    widths = tl.load(source + NUMBER)
    w0, w1, w2, w3 = widths_of(widths)
    at = (place - second - third - fourth) * w0 + second * w1 + third * w2 + fourth * w3
    one, two, three = firsts_of(widths)
    width, above = by_code(code, w0, w1, w2, w3), by_code(code, 0, one, two, three)
    number, shift = first + (n + CODES - 1) // CODES + (at >> 5), at & 31
    low = load_words(numbers, 4, number, mask & (width > 0))
    high = load_words(numbers, 4, number + 1, mask & (shift + width > 32))
    return above + (((low >> shift) | (high << (32 - shift))) & ((tl.full([1], 1, tl.int64) << width) - 1))


@triton.jit
def _by_block(body, tables, source, first, place, mask):
    """The words of blocks, or distances; and which are distances. Above FEW words, a block has eight lanes."""
    block = first + (place >> 8)
    place = place & 255
    info = tl.load(tables + tl.load(source + PIECES) + block, mask=mask, other=0)
    width = tl.load(body + tl.load(source + DATA) + block, mask=mask, other=0).to(tl.int32)
    coded = mask & (width == CODED)
    bits = width & (CODED - 1)
    lanes = (info & 511) >= 64
    step = tl.where(lanes, 8, 1)
    at = tl.where(lanes, place >> 3, place) * bits
    number = (info >> 9) + (at >> 5) * step + tl.where(lanes, place & 7, 0)
    shift = (at & 31).to(tl.int64)
    numbers = body + tl.load(source + NUMBERS)
    low = load_words(numbers, 4, number, mask & (bits > 0))
    high = load_words(numbers, 4, number + step, mask & (shift + bits > 32))
    value = (low >> shift) | (high << (32 - shift))
    value = value & ((tl.full([1], 1, tl.int64) << bits.to(tl.int64)) - 1)
    if tl.max(coded.to(tl.int32)) > 0:
        value = tl.where(coded, _coded(source, numbers, info >> 9, info & 511, place, coded), value)
    apart = width >= NEAR_BIT
    base = tl.load(tables + tl.load(source + MORE) + block, mask=mask, other=0)
    return tl.where(apart, (value >> 1) ^ -(value & 1), base + value), apart


@triton.jit
def _of_source(body, tables, source, row, place, mask):
    """The words at some places of a row, int64; and which of them are distances to the words of the next source."""
    stored = row
    rows = tl.load(source + ROWS)
    if rows >= 0:
        stored = tl.load(tables + rows + row)
    begins = tl.load(source + BEGINS)
    unit = tl.load(source + BEGIN_UNIT)
    first = _bound(tables, begins, unit, stored)
    kind = tl.load(source + KIND)
    apart = place < 0
    stretches = tl.load(source + STRETCHES)
    if stretches >= 0:
        starts, ends = tl.load(source + STRETCH_STARTS), tl.load(source + STRETCH_ENDS)
        place, apart = _nearest(tables, stretches, starts, ends, stored, place, mask)
        mask = mask & apart
    if kind == BY_PLACE:
        words = _by_place(body, source, first, place, mask)
    elif kind == BY_PIECE:
        words = _by_piece(body, tables, source, stored, first, place, mask)
    elif kind == BY_BLOCK:
        words, by_block = _by_block(body, tables, source, first, place, mask)
        apart = apart | by_block
    else:
        words = tl.load(tables + tl.load(source + DATA) + place, mask=mask, other=0)
    if stretches >= 0:
        words = tl.where(mask, words, 0)
    return words, apart


@triton.jit
def _words(body, tables, job, row, place, mask):
    """The words at some places of a row, int64."""
    words, left = _of_source(body, tables, job + SOURCE, row, place, mask)
    left = left & mask
    near = tl.load(job + SOURCE + NEAR)
    while near >= 0:
        more, apart = _of_source(body, tables, tables + near, row, place, left)
        words += tl.where(left, more, 0)
        left = left & apart
        near = tl.load(tables + near + NEAR)
    return words


# -------------------------------------------------------------------- layouts


@triton.jit
def _column(job, items, width, out):
    """The column that a word of a padded row belongs to, and which word of the element it is."""
    column = out
    item = out * 0
    if items > 1:
        inner = tl.load(job + INNER).to(tl.int32)
        line = width * inner
        layer = out // line
        rest = out - layer * line
        column = rest // inner
        item = layer * inner + (rest - column * inner)
    return column, item


@triton.jit
def _reach(tables, job, row, begin, width):
    """The columns from the first real one to behind the last; both are the width in an empty row."""
    splits = tables + tl.load(job + SPLITS) + row
    first, stop = tl.load(splits), tl.load(splits + 1)
    some = first < stop
    start = tl.load(tables + tl.load(job + STARTS) + first, mask=some, other=width)
    last = tl.load(tables + tl.load(job + STARTS) + stop - 1, mask=some, other=0)
    ends = tables + tl.load(job + ENDS) + stop
    count = tl.load(ends, mask=some, other=width) - tl.load(ends - 1, mask=some, other=0)
    return start.to(tl.int32), (last + count).to(tl.int32)


@triton.jit
def _part(tables, job, row, place):
    """The places in the part of the row that the job writes, and which are in it."""
    part = tl.load(job + PART)
    own = place >= 0
    if part > 0:
        bounds, unit = tl.load(job + HEAD_BOUNDS), tl.load(job + HEAD_UNIT)
        head = (_bound(tables, bounds, unit, row + 1) - _bound(tables, bounds, unit, row)).to(tl.int32)
        own = (place < head) == (part == HEAD)
        place = tl.where(part == TAIL, place - head, place)
    return place, own


# -------------------------------------------------------------------- the kernel


@triton.jit
def _padding(tables, job, row, target, at, begin, stop, length, CHUNK: tl.constexpr):
    """Stores the pad in a chunk of single words that has no real one; which part of the row it belongs to, the nearest
    word says."""
    _, own = _part(tables, job, row, tl.where(at < begin, 0, tl.maximum(length - 1, 0)))
    if own:
        out = at + tl.arange(0, CHUNK)
        pad = tl.load(tables + tl.load(job + PADS) + row * tl.load(job + PAD_ROW))
        size = tl.load(job + SIZE)
        base = tl.load(job + OUT) + (target * tl.load(job + ROW_WORDS) + tl.load(job + OFFSET)) * size
        store_words(base, size, out * tl.load(job + STRIDE).to(tl.int32), out.to(tl.int64) * 0 + pad, out < stop)


@triton.jit
def _chunk(body, tables, job, row, target, to, at, begin, length, items, width, CHUNK: tl.constexpr):
    """Stores words and pads in a chunk of a row, which is the row `target` of the tensor and begins at the element
    `to` of a nested one."""
    out = at + tl.arange(0, CHUNK)
    row_words = tl.load(job + ROW_WORDS)
    words = out.to(tl.int64) * 0
    if width < 0:
        place = out
        live = out < length * items
        taken = live
        base = to * row_words
    else:
        live = out < width * items
        column, item = _column(job, items, width, out)
        splits, starts, ends = tl.load(job + SPLITS), tl.load(job + STARTS), tl.load(job + ENDS)
        place, taken = _nearest(tables, splits, starts, ends, row, column, live)
        place = place * items + item
        pad = tl.load(job + PADS) + row * tl.load(job + PAD_ROW) + (item & tl.load(job + PAD_ITEMS))
        words = tl.load(tables + pad, mask=live & (taken == 0), other=0)
        taken = taken | (live & (out >= tl.where((length > 0) & (tl.load(job + EDGE) != 0), 0, width * items)))
        base = target * row_words
    place, own = _part(tables, job, row, place)
    live = live & own
    taken = taken & own
    if tl.max(taken.to(tl.int32)) > 0:
        words = tl.where(taken, _words(body, tables, job, row, place, taken), words)
    size = tl.load(job + SIZE)
    address = tl.load(job + OUT) + (base + tl.load(job + OFFSET)) * size
    at = out
    group = tl.load(job + GROUP).to(tl.int32)
    if group > 1:
        at = out // group
    at = at * tl.load(job + STRIDE).to(tl.int32)
    if group > 1:
        at += out % group
    store_words(address, size, at, words, live)


@triton.jit(do_not_specialize=["jobs_at", "count"])
def _decode(body, tables, jobs_at, count, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    firsts = tables + jobs_at
    number = _job_of(firsts, count, program, FIRSTS)
    job = firsts + count + number * JOB
    local = (program - tl.load(firsts + number)).to(tl.int32)
    spans = tl.load(job + SPANS).to(tl.int32)
    target = (local // spans).to(tl.int64)
    row = target
    taken = tl.load(job + TAKEN)
    if taken >= 0:
        row = tl.load(tables + taken + target)
    at = (local % spans) * SPAN
    begin = _bound(tables, tl.load(job + BOUNDS), tl.load(job + UNIT), row)
    length = _bound(tables, tl.load(job + BOUNDS), tl.load(job + UNIT), row + 1) - begin
    to = begin
    if taken >= 0:
        to = _bound(tables, tl.load(job + PLACES), tl.load(job + UNIT), target)
    items, width = tl.load(job + ITEMS).to(tl.int32), tl.load(job + WIDTH).to(tl.int32)
    words = tl.where(width < 0, length.to(tl.int32), width) * items
    first, last = words * 0, words
    if (width >= 0) & (items == 1) & (tl.load(job + EDGE) == 0):
        first, last = _reach(tables, job, row, begin, width)
    stop = at + tl.minimum(SPAN, words - at)  # at + SPAN may pass int32
    while at < stop:
        if (at + CHUNK <= first) | (at >= last):
            _padding(tables, job, row, target, at, first, words, length.to(tl.int32), CHUNK)
        else:
            _chunk(body, tables, job, row, target, to, at, begin, length, items, width, CHUNK)
        at += CHUNK


def launch(body: Tensor, tables: Tensor, jobs_at: int, count: int, programs: int) -> None:
    """Runs `programs` programs of `count` jobs.

    Args:
        body: uint8, the encoded arrays.
        tables: int64, on the same device: the tables, and from the entry `jobs_at` on the first program of each job,
            then the jobs.
    """
    sizes = {"CHUNK": job_table.CHUNK, "SPAN": job_table.SPAN}
    _decode[(programs,)](body, tables, jobs_at, count, **sizes, num_warps=_WARPS)
