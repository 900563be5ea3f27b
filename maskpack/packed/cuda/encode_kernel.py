"""The encode kernels: packed words on a device to the arrays of their encodings, in two launches for all fields.

A program reads one row of one unit, CHUNK words at a time (encode_job.py says what it is told). All arithmetic is int64
and wraps, as in the compiled core, whose bytes these are.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.core import abi
from maskpack.packed.cuda import encode_job
from maskpack.packed.cuda.kernel import _number, _store

UNIT, STAT = tl.constexpr(len(encode_job.Unit._fields)), tl.constexpr(len(encode_job.Stat._fields))
(
    KIND, WORDS, SIZE, ITEMS, STRIDE, OFFSET, ROWS, BOUNDS, ROW_STRIDE, COUNTS, LOW, WIDTH, NUMBER, SECOND, BYTES, NEAR,
    HEAD, TAIL, BOOLS, PAD_MODE, PAD, B_SIZE, C_SIZE,
) = (tl.constexpr(place) for place in range(len(encode_job.Unit._fields)))  # fmt: skip
PLAIN, NARROW, BLOCKS, BITMAP, RLE, ARANGE, DELTA, CONCAT = (
    tl.constexpr(kind)
    for kind in (abi.PLAIN, abi.NARROW, abi.BLOCKS, abi.BITMAP, abi.RLE, abi.ARANGE, abi.DELTA, abi.CONCAT)
)
BLOCK, NEAR_BIT, CODED, CODES = (tl.constexpr(number) for number in (abi.BLOCK, abi.NEAR, abi.CODED, abi.CODES))
MISFIT, ODD, NEAR_USED = (
    tl.constexpr(abi.IS_MISFIT),
    tl.constexpr(abi.IS_ODD),
    tl.constexpr(abi.NEAR_USED),
)
STRAY, BY_EDGE = tl.constexpr(abi.IS_STRAY), tl.constexpr(abi.BY_EDGE)
WRITTEN, LEFT_OUT = tl.constexpr(abi.WRITTEN), tl.constexpr(abi.LEFT_OUT)
_FEW, _LANES = tl.constexpr(64), tl.constexpr(8)
_MOST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_WARPS = 4


# -------------------------------------------------------------------- rows


@triton.jit
def _real(unit, row, rows):
    """The first valid column of a row of a padded tensor, and the one behind the last; equal in an empty row."""
    counts = tl.load(unit + COUNTS).to(tl.pointer_type(tl.int32))
    length = tl.load(counts + row).to(tl.int64)
    first = tl.load(counts + 2 * rows + row) - tl.load(unit + LOW)
    width = tl.load(unit + WIDTH)
    start = tl.minimum(tl.maximum(first, 0), width)
    return start, tl.minimum(tl.maximum(first + length, 0), width)


@triton.jit
def _row(unit, tables, row, rows):
    """The address of the first word of a row, and the number of its words."""
    begin = row
    tokens = row * 0 + 1
    stride, bounds = tl.load(unit + STRIDE), tl.load(unit + BOUNDS)
    shift = tl.load(unit + OFFSET)
    if tl.load(unit + COUNTS) != 0:
        begin, stop = _real(unit, row, rows)
        tokens = stop - begin
        shift += row * tl.load(unit + ROW_STRIDE)
    elif bounds >= 0:
        begin = tl.load(tables + bounds * (rows + 1) + row)
        tokens = tl.load(tables + bounds * (rows + 1) + row + 1) - begin
    address = tl.load(unit + WORDS) + (begin * stride + shift) * tl.load(unit + SIZE)
    return address.to(tl.pointer_type(tl.uint8)), (tokens * tl.load(unit + ITEMS)).to(tl.int32)


@triton.jit
def _signed(words, size):
    """Words of `size` bytes as the numbers that they are."""
    unused = 64 - 8 * size
    return (words << unused) >> unused


@triton.jit
def _words(address, size, items, stride, at, mask):
    """Words of a row, as signed numbers."""
    place = at.to(tl.int64)
    if items != stride:
        place = at // items * stride + at % items
    return _signed(_number(address, size, place, mask), size)


@triton.jit
def _mixed(words, at):
    """A number of 32 bits for each word and its place, whose sum is the hash of a row."""
    mixed = (words.to(tl.int32) ^ ((words >> 32).to(tl.int32) * 0x2C1B3C6D)) + at.to(tl.int32) * 0x1E3779B9
    mixed = (mixed ^ (mixed >> 15)) * 0x297A2D39
    mixed = (mixed ^ (mixed >> 12)) * 0x5BD1E995
    return (mixed ^ (mixed >> 16)).to(tl.int64)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


# -------------------------------------------------------------------- blocks


@triton.jit
def _bits(most):
    """The bits of a number below 2^32; 65 for others, negative ones too."""
    bits = (most > 0).to(tl.int64)
    left = most
    for step in tl.static_range(5):
        shift = 16 >> step
        more = (left >> shift) > 0
        left = tl.where(more, left >> shift, left)
        bits += tl.where(more, shift, 0)
    return tl.where((most >> 32) != 0, 65, bits)


@triton.jit
def _numbers(count, bits):
    """The u32 numbers of blocks of `count` words of `bits` bits."""
    in_lanes = ((count + _LANES - 1) // _LANES * bits + 31) // 32 * _LANES
    return tl.where(count < _FEW, (count * bits + 31) // 32, in_lanes)


@triton.jit
def _distances(words, others, size):
    """How far words are from others, small numbers on either side."""
    apart = _signed(words - others, size)
    apart = (apart << 1) ^ (apart >> 63)
    return tl.where(size == 8, apart, apart & ((1 << (8 * (size & 7))) - 1))


@triton.jit
def _codes(widths, words):
    """The code of words above the least of their block, its width, and its first word; and what is behind all codes."""
    w0, w1, w2, w3 = widths & 31, (widths >> 8) & 31, (widths >> 16) & 31, (widths >> 24) & 31
    second = 1 << w0
    third = second + (1 << w1)
    fourth = third + (1 << w2)
    code = (words >= second).to(tl.int32) + (words >= third).to(tl.int32) + (words >= fourth).to(tl.int32)
    width = tl.where(code == 0, w0, tl.where(code == 1, w1, tl.where(code == 2, w2, w3)))
    first = tl.where(code == 0, 0, tl.where(code == 1, second, tl.where(code == 2, third, fourth)))
    return code, width, first, fourth + (1 << w3)


@triton.jit
def _in_blocks(words, others, near, widths, size, left, CHUNK: tl.constexpr):
    """The words of each block as numbers of few bits [blocks, BLOCK]; and of each block the words, the bits of a
    number, the u32 numbers, the least word, whether its numbers are distances, and whether they have codes."""
    blocks: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, blocks)
    count = tl.minimum(tl.maximum(left - block * BLOCK, 0), BLOCK)
    inside = tl.arange(0, BLOCK)[None, :] < count[:, None]
    lines = tl.reshape(words, (blocks, BLOCK))
    low = tl.min(tl.where(inside, lines, _MOST), 1)
    high = tl.max(tl.where(inside, lines, -_MOST - 1), 1)
    some = count > 0
    most = tl.where(some, high - low, 0)
    bits = _bits(most)
    numbers = lines - low[:, None]
    by_distance = count < 0
    if near:
        apart = tl.reshape(_distances(words, others, size), (blocks, BLOCK))
        apart = tl.where(inside, apart, 0)
        far = _bits(tl.max(apart, 1))
        far = tl.where(tl.max(((apart >> 32) != 0).to(tl.int32), 1) > 0, 65, far)
        by_distance = far < bits
        bits = tl.minimum(far, bits)
        numbers = tl.where(by_distance[:, None], apart, numbers)
        low = tl.where(by_distance, 0, low)
    numbers = tl.where(inside, numbers, 0)
    taken = _numbers(count, bits)
    coded = count < 0
    if widths != 0:
        _, width, _, end = _codes(widths, numbers.to(tl.int32))
        fewer = (count + CODES - 1) // CODES + (tl.sum(tl.where(inside, width, 0), 1) + 31) // 32
        coded = (by_distance == 0) & (most < end) & (16 * fewer < 15 * taken)
        taken = tl.where(coded, fewer, taken)
    return numbers, count, bits, taken, low, by_distance, coded


# -------------------------------------------------------------------- stretches


@triton.jit
def _stretches(address, size, items, stride, at, n, words, steps, stretch):
    """What stretches of a row are made of at some places: words, or the steps between them; where stretches begin and
    which ends are not the end of the row; and where the stretch of each place began, of which `stretch` is the last
    known."""
    inside = at < n
    values = words
    before = _words(address, size, items, stride, at - 1, inside & (at > 0))
    behind = _words(address, size, items, stride, at + 1, at + 1 < n)
    if steps:
        earlier = _words(address, size, items, stride, at - 2, inside & (at > 1))
        values = _signed(words - before, size)
        behind = _signed(behind - words, size)
        before = _signed(before - earlier, size)
    starts = inside & ((at == 0) | (values != before))
    ends = (at + 1 < n) & (values != behind)
    last = tl.maximum(tl.associative_scan(tl.where(starts, at, -1), 0, _larger), stretch)
    return values, starts, ends, last


# -------------------------------------------------------------------- what a form takes


@triton.jit
def _differ(units, tables, one, other, row, other_row, rows, CHUNK: tl.constexpr):
    """Whether two rows of the same number of words differ in one."""
    unit, second = units + one * UNIT, units + other * UNIT
    address, n = _row(unit, tables, row, rows)
    beside, others_n = _row(second, tables, other_row, rows)
    size, items, stride = tl.load(unit + SIZE), tl.load(unit + ITEMS), tl.load(unit + STRIDE)
    others_stride = tl.load(second + STRIDE)
    found = tl.zeros((CHUNK,), tl.int32)
    at = tl.arange(0, CHUNK)
    begin = n * 0
    while begin < n:
        inside = begin + at < n
        seen = _words(address, size, items, stride, begin + at, inside)
        expected = _words(beside, size, items, others_stride, begin + at, inside)
        found = found | (seen != expected).to(tl.int32)
        begin += CHUNK
    return tl.maximum(tl.max(found), (n != others_n).to(tl.int32))


@triton.jit
def _stray(unit, row, rows, CHUNK: tl.constexpr):
    """STRAY if something under the mask of a row is not the pad."""
    found = tl.zeros((CHUNK,), tl.int32)
    mode = tl.load(unit + PAD_MODE)
    if mode != 0:
        start, stop = _real(unit, row, rows)
        size, items = tl.load(unit + SIZE), tl.load(unit + STRIDE)
        address = tl.load(unit + WORDS) + row * tl.load(unit + ROW_STRIDE) * size
        line = address.to(tl.pointer_type(tl.uint8))
        begin, end = (start * items).to(tl.int32), (stop * items).to(tl.int32)
        width = (tl.load(unit + WIDTH) * items).to(tl.int32)
        at = tl.arange(0, CHUNK)
        pads = _signed(tl.load(unit + PAD), size) + at * 0
        edge = (mode == BY_EDGE) & (begin < end)
        seen = width * 0
        while seen < width:
            place = seen + at
            outside = (place < width) & ((place < begin) | (place >= end))
            expected = pads
            if edge:
                nearest = tl.where(place < begin, begin, end - items.to(tl.int32)) + place % items.to(tl.int32)
                expected = _signed(_number(line, size, nearest, outside), size)
            words = _signed(_number(line, size, place, outside), size)
            found = found | tl.where(outside & (words != expected), STRAY, 0)
            seen += CHUNK
    return tl.max(found)


@triton.jit
def _measure_row(units, tables, stat, number, row, rows, CHUNK: tl.constexpr):
    unit = units + number * UNIT
    address, n = _row(unit, tables, row, rows)
    kind, size = tl.load(unit + KIND), tl.load(unit + SIZE)
    items, stride = tl.load(unit + ITEMS), tl.load(unit + STRIDE)
    near, widths = tl.load(unit + NEAR), tl.load(unit + NUMBER).to(tl.int32)
    beside, others_stride = address, stride
    head_n, tail_n = n * 0, n * 0
    behind, behind_stride = address, stride
    if kind == CONCAT:
        head, tail = units + tl.load(unit + HEAD) * UNIT, units + tl.load(unit + TAIL) * UNIT
        beside, head_n = _row(head, tables, row, rows)
        others_stride = tl.load(head + STRIDE)
        behind, tail_n = _row(tail, tables, row, rows)
        behind_stride = tl.load(tail + STRIDE)
    elif near >= 0:
        beside, _ = _row(units + near * UNIT, tables, row, rows)
        others_stride = tl.load(units + near * UNIT + STRIDE)
    base, step, second = tl.load(unit + NUMBER), tl.load(unit + NUMBER), tl.load(unit + SECOND)
    first = _signed(_number(address, size, n * 0, n > 0), size)
    flags = tl.zeros((CHUNK,), tl.int32)
    count = tl.zeros((CHUNK,), tl.int64)
    low = tl.full((CHUNK,), _MOST, tl.int64)
    high = tl.full((CHUNK,), -_MOST - 1, tl.int64)
    least = tl.full((CHUNK,), _MOST, tl.int64)
    most = tl.zeros((CHUNK,), tl.int64)
    hashes = tl.zeros((CHUNK,), tl.int64)
    numbers = n.to(tl.int64) * 0  # of blocks
    used = n * 0
    stretch = n * 0  # where the last one began
    lane = tl.arange(0, CHUNK)
    begin = n * 0
    while begin < n:
        at = begin + lane
        inside = at < n
        words = _words(address, size, items, stride, at, inside)
        hashes += tl.where(inside, _mixed(words, at), 0)
        if kind == NARROW:
            above = _signed(words - base, size) & tl.where(size == 8, -1, (1 << (8 * (size & 7))) - 1)
            flags = flags | tl.where(inside & ((above >> (8 * tl.load(unit + BYTES))) != 0), MISFIT, 0)
        elif kind == BLOCKS:
            others = words
            if near >= 0:
                others = _words(beside, size, items, others_stride, at, inside)
            _, blocks_of, bits, taken, bases, by_distance, _ = _in_blocks(
                words, others, near >= 0, widths, size, n - begin, CHUNK
            )
            used = used | tl.max((bits > 32).to(tl.int32)) * MISFIT
            used = used | tl.max(by_distance.to(tl.int32)) * NEAR_USED
            numbers += tl.sum(taken)
            low = tl.minimum(low, tl.min(tl.where(blocks_of > 0, bases, _MOST)))
            high = tl.maximum(high, tl.max(tl.where(blocks_of > 0, bases, -_MOST - 1)))
        elif (kind == RLE) | (kind == DELTA):
            values, starts, ends, last = _stretches(
                address, size, items, stride, at, n, words, kind == DELTA, stretch
            )  # fmt: skip
            stretch = tl.max(tl.where(inside, last, 0))
            length = (at + 1 - last).to(tl.int64)
            count += starts.to(tl.int64)
            low = tl.minimum(low, tl.where(starts, values, _MOST))
            high = tl.maximum(high, tl.where(starts, values, -_MOST - 1))
            least = tl.minimum(least, tl.where(ends, length, _MOST))
            most = tl.maximum(most, tl.where(ends, length, 0))
        elif kind == BITMAP:
            flags = flags | tl.where(inside & (words != base) & (words != second), MISFIT, 0)
        elif kind == ARANGE:
            expected = _signed(first + at.to(tl.int64) * step, size)
            flags = flags | tl.where(inside & (words != expected), MISFIT, 0)
        elif kind == CONCAT:
            in_head = at < head_n
            expected = _words(beside, size, items, others_stride, at, inside & in_head)
            expected += _words(behind, size, items, behind_stride, at - head_n, inside & (at >= head_n))
            flags = flags | tl.where(inside & (words != expected), MISFIT, 0)
        if tl.load(unit + BOOLS) != 0:
            flags = flags | tl.where(inside & ((words & -2) != 0), ODD, 0)
        begin += CHUNK
    used = used | _stray(unit, row, rows, CHUNK)
    misfit = tl.max(flags & MISFIT) | tl.where((kind == CONCAT) & (head_n + tail_n != n), MISFIT, 0)
    tl.store(stat, (misfit | tl.max(flags & ODD) | used).to(tl.int64))
    tl.store(stat + 1, tl.sum(count) + numbers)
    tl.store(stat + 2, tl.where((kind == ARANGE) | (kind == BITMAP), first, tl.min(low)))
    tl.store(stat + 3, tl.where(kind == ARANGE, first, tl.max(high)))
    tl.store(stat + 4, tl.min(least))
    tl.store(stat + 5, tl.max(most))
    tl.store(stat + 6, tl.sum(hashes))


@triton.jit(do_not_specialize=["rows"])
def _measure(units, tables, stats, rows, CHUNK: tl.constexpr):
    number = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    if row < tl.load(units + number * UNIT + ROWS):
        _measure_row(units, tables, stats + (number * rows + row) * STAT, number, row, rows, CHUNK)


# -------------------------------------------------------------------- writing


@triton.jit
def _write_blocks(to, numbers, count, bits, taken, coded, widths, before, CHUNK: tl.constexpr):
    """Writes the bits of blocks behind the `before` u32 numbers of the row."""
    first = (before + tl.cumsum(taken, 0) - taken)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    in_lanes = (count >= _FEW)[:, None]
    bit = tl.where(in_lanes, place // _LANES, place) * bits[:, None]
    if widths != 0:
        inside, with_codes = place < count[:, None], coded[:, None]
        code, width, least, _ = _codes(widths, numbers.to(tl.int32))
        width = tl.where(inside, width, 0)
        behind = (count + CODES - 1) // CODES * 32
        bit = tl.where(with_codes, behind[:, None] + tl.cumsum(width, 1) - width, bit)
        numbers = tl.where(with_codes, numbers - least, numbers)
        in_lanes = in_lanes & (with_codes == 0)
        code = tl.where(inside, code, 0) << (2 * (place % CODES))
        line = tl.sum(tl.reshape(code, (CHUNK // BLOCK, BLOCK // CODES, CODES)), 2)
        at = tl.arange(0, BLOCK // CODES)[None, :]
        tl.store(to + first + at, line.to(tl.int32), mask=with_codes & (at * CODES < count[:, None]))
    step = tl.where(in_lanes, _LANES, 1)
    at = first + (bit >> 5) * step + tl.where(in_lanes, place % _LANES, 0)
    pair = numbers << (bit & 31)
    low_half = ((pair << 32) >> 32).to(tl.int32)
    high_half = (pair >> 32).to(tl.int32)
    tl.atomic_or(to + at, low_half, mask=low_half != 0, sem="relaxed")
    tl.atomic_or(to + at + step, high_half, mask=high_half != 0, sem="relaxed")


@triton.jit
def _write_row(units, tables, places, body, number, row, rows, CHUNK: tl.constexpr):
    unit = units + number * UNIT
    address, n = _row(unit, tables, row, rows)
    kind, size = tl.load(unit + KIND), tl.load(unit + SIZE)
    items, stride = tl.load(unit + ITEMS), tl.load(unit + STRIDE)
    b_size, c_size = tl.load(unit + B_SIZE), tl.load(unit + C_SIZE)
    near, widths = tl.load(unit + NEAR), tl.load(unit + NUMBER).to(tl.int32)
    beside, others_stride = address, stride
    if (kind == BLOCKS) & (near >= 0):
        beside, _ = _row(units + near * UNIT, tables, row, rows)
        others_stride = tl.load(units + near * UNIT + STRIDE)
    a, b, c = tl.load(places), tl.load(places + 1), tl.load(places + 2)
    before = n.to(tl.int64) * 0
    stretch = n * 0
    lane = tl.arange(0, CHUNK)
    begin = n * 0
    while begin < n:
        at = begin + lane
        inside = at < n
        words = _words(address, size, items, stride, at, inside)
        if kind == PLAIN:
            _store(body + a, size, at, words, inside)
        elif kind == NARROW:
            _store(body + a, tl.load(unit + BYTES), at, words - tl.load(unit + NUMBER), inside)
        elif kind == BLOCKS:
            others = words
            if near >= 0:
                others = _words(beside, size, items, others_stride, at, inside)
            numbers, count, bits, taken, low, by_distance, coded = _in_blocks(
                words, others, near >= 0, widths, size, n - begin, CHUNK
            )
            block = begin // BLOCK + tl.arange(0, CHUNK // BLOCK)
            said = tl.where(coded, CODED, tl.where(by_distance, bits | NEAR_BIT, bits))
            tl.store(body + a + block, said.to(tl.uint8), mask=count > 0)
            if b_size > 0:
                _store(body + b, b_size, block, low, count > 0)
            to = (body + c).to(tl.pointer_type(tl.int32))
            _write_blocks(to, numbers, count, bits, taken, coded, widths, before, CHUNK)
            before += tl.sum(taken)
        elif kind == BITMAP:
            byte = begin // 8 + tl.arange(0, CHUNK // 8)
            ones = tl.reshape((inside & (words != tl.load(unit + NUMBER))).to(tl.int32), (CHUNK // 8, 8))
            bytes_of = tl.sum(ones << tl.arange(0, 8)[None, :], 1)
            tl.store(body + a + byte, bytes_of.to(tl.uint8), mask=byte * 8 < n)
        elif (kind == RLE) | (kind == DELTA):
            values, starts, ends, last = _stretches(
                address, size, items, stride, at, n, words, kind == DELTA, stretch
            )  # fmt: skip
            stretch = tl.max(tl.where(inside, last, 0))
            order = before + tl.cumsum(starts.to(tl.int64), 0) - 1
            if b_size > 0:
                _store(body + b, b_size, order, (at + 1 - last).to(tl.int64), ends)
            if c_size > 0:
                _store(body + c, c_size, order, values, starts)
            before += tl.sum(starts.to(tl.int64))
        begin += CHUNK


@triton.jit(do_not_specialize=["rows", "differing"])
def _write(units, tables, places, body, rows, differing, CHUNK: tl.constexpr):
    number = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    if row < tl.load(units + number * UNIT + ROWS):
        place = places + (number * rows + row) * 4
        way = tl.load(place + 3)
        if way == WRITTEN:
            _write_row(units, tables, place, body, number, row, rows, CHUNK)
        elif way >= 0:  # noqa: SIM102  # kernels compute both sides of `and`
            if _differ(units, tables, number, way // rows, row, way % rows, rows, CHUNK) > 0:
                tl.store(body + differing + number, 1)


def measure(units: Tensor, tables: Tensor, stats: Tensor, count: int, rows: int) -> None:
    """Writes the stats of the rows of all units.

    Args:
        units: int64 [count, UNIT], on the device, like all others.
        tables: int64 [layouts, rows + 1], where rows begin in packed values.
        stats: int64 [count, rows, STAT].
    """
    with torch.cuda.device_of(units):
        _measure[(count * rows,)](units, tables, stats, rows, CHUNK=encode_job.CHUNK, num_warps=_WARPS)


def write(units: Tensor, tables: Tensor, places: Tensor, body: Tensor, count: int, rows: int, differing: int) -> None:
    """Writes the arrays of all units.

    Args:
        places: int64 [count, rows, 4]: where the part of each array that belongs to a row begins in the body, and what
            becomes of the row.
        body: uint8, 0 before.
        differing: where the byte of each unit is that becomes 1 if a row is not equal to the row that it must equal.
    """
    with torch.cuda.device_of(units):
        _write[(count * rows,)](units, tables, places, body, rows, differing, CHUNK=encode_job.CHUNK, num_warps=_WARPS)
