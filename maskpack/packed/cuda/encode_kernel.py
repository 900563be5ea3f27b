"""The encode kernels: words on a device to the arrays of their encodings, in two launches for all fields of a batch.

    measure   a program for each row of each unit   words --> Stat: whether they fit the form, and what it takes
    write     the same                              words --> the arrays of the form, where the host says (place.c)

A unit is a field, or a column of one, with the form that it is to have (Unit in abi.h). A program reads its row CHUNK
words at a time. All arithmetic is int64 and wraps, as in the compiled core, whose bytes these are.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.core import abi, native
from maskpack.nesting.read_triton import differs, load_words, store_words
from maskpack.packed.cuda.encode import CHUNK
from maskpack.packed.cuda.kernel import BLOCK, CODED, CODES, NEAR_BIT, by_code, firsts_of, widths_of

UNIT, STAT, SPOT = map(tl.constexpr, (abi.UNIT_NUMBERS, abi.STAT_NUMBERS, abi.SPOT_NUMBERS))
(
    KIND, WORDS, SIZE, ITEMS, STRIDE, OFFSET, ROWS, BOUNDS, ROW_STRIDE, COUNTS, LOW, WIDTH, NUMBER, NEAR,
    HEAD, TAIL, BOOLS, PAD_MODE, PAD, B_SIZE, C_SIZE,
) = map(tl.constexpr, native.places_in(abi.UNIT, *abi.UNIT.names or ()))  # fmt: skip
FLAGS, TOTAL, LEAST_WORD, MOST_WORD, SHORTEST, LONGEST, HASH = map(
    tl.constexpr, native.places_in(abi.STAT, "flags", "total", "low", "high", "least", "most", "hash")
)
AT, WAY = map(tl.constexpr, native.places_in(abi.SPOT, "at", "way"))
BLOCKS, RLE, DELTA, CONCAT, WRITTEN = map(tl.constexpr, (abi.BLOCKS, abi.RLE, abi.DELTA, abi.CONCAT, abi.WRITTEN))
MISFIT, ODD, NEAR_USED, STRAY = map(tl.constexpr, (abi.IS_MISFIT, abi.IS_ODD, abi.NEAR_USED, abi.IS_STRAY))
_FEW, _LANES = tl.constexpr(64), tl.constexpr(8)
_MOST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_WARPS = 4


# -------------------------------------------------------------------- rows


@triton.jit
def _columns(unit, row, rows):
    """The first valid column of a row of a padded tensor, and the one behind the last; equal in an empty row."""
    counts = tl.load(unit + COUNTS).to(tl.pointer_type(tl.int32)) + row
    first, width = tl.load(counts + 2 * rows) - tl.load(unit + LOW), tl.load(unit + WIDTH)
    stop = first + tl.load(counts)
    return tl.minimum(tl.maximum(first, 0), width), tl.minimum(tl.maximum(stop, 0), width)


@triton.jit
def _row(units, number, tables, row, rows):
    """A row of a unit as `_words` reads it, and the number of its words: the address of the first, the bytes of one,
    and the words of an element that the unit has, and that there are."""
    unit = units + number * UNIT
    size, items, stride = tl.load(unit + SIZE), tl.load(unit + ITEMS), tl.load(unit + STRIDE)
    bounds, place = tl.load(unit + BOUNDS), tl.load(unit + OFFSET)
    begin, end = row, tl.minimum(row + 1, tl.maximum(tl.load(unit + ROWS), row))
    if tl.load(unit + COUNTS) != 0:
        begin, end = _columns(unit, row, rows)
        place += row * tl.load(unit + ROW_STRIDE)
    elif bounds >= 0:
        table = tables + bounds * (rows + 1) + row
        begin, end = tl.load(table), tl.load(table + 1)
    address = tl.load(unit + WORDS) + (begin * stride + place) * size
    return (address, size, items, stride), ((end - begin) * items).to(tl.int32)


@triton.jit
def _signed(words, size):
    """Words of `size` bytes as the numbers that they are."""
    unused = 64 - 8 * size
    return (words << unused) >> unused


@triton.jit
def _words(source, at, mask):
    """Words of a row, as signed numbers."""
    address, size, items, stride = source
    place = at.to(tl.int64)
    if items != stride:
        place = at // items * stride + at % items
    return _signed(load_words(address, size, place, mask), size)


@triton.jit
def _mixed(words, at):
    """A number for each word and its place, whose sum is the hash of a row."""
    mixed = (words ^ (at.to(tl.int64) * 0x1E3779B97F4A7C15)) * 0x297A2D39B1C3D6E5
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) * 0x5BD1E9955BD1E995


# -------------------------------------------------------------------- blocks


@triton.jit
def _bits(most):
    """The bits of a number below 2^32; 65 for others, negative ones too."""
    exponent = (most.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022  # exact below 2^53
    return tl.where((most >> 32) != 0, 65, tl.where(most == 0, 0, exponent))


@triton.jit
def _numbers(count, bits):
    """The u32 numbers of blocks of `count` words of `bits` bits."""
    in_lanes = ((count + _LANES - 1) // _LANES * bits + 31) // 32 * _LANES
    return tl.where(count < _FEW, (count * bits + 31) // 32, in_lanes)


@triton.jit
def _distances(words, others, size):
    """How far words are from others, small numbers on either side."""
    apart = _signed(words - others, size)
    return (apart << 1) ^ (apart >> 63)


@triton.jit
def _codes(widths, words):
    """The code of words above the least of their block, its width, and its first word; and what is behind all codes."""
    w0, w1, w2, w3 = widths_of(widths)
    second, third, fourth = firsts_of(widths)
    code = (words >= second).to(tl.int32) + (words >= third).to(tl.int32) + (words >= fourth).to(tl.int32)
    return code, by_code(code, w0, w1, w2, w3), by_code(code, 0, second, third, fourth), fourth + (1 << w3)


@triton.jit
def _in_blocks(words, others, near, widths, size, left, CHUNK: tl.constexpr):
    """The words of each block as numbers of few bits [blocks, BLOCK]; and of each block the words, the bits of a
    number, the u32 numbers, the least word, whether its numbers are distances, and whether they have codes."""
    blocks: tl.constexpr = CHUNK // BLOCK
    count = tl.minimum(tl.maximum(left - tl.arange(0, blocks) * BLOCK, 0), BLOCK)
    inside = tl.arange(0, BLOCK)[None, :] < count[:, None]
    lines = tl.reshape(words, (blocks, BLOCK))
    low = tl.min(tl.where(inside, lines, _MOST), 1)
    most = tl.where(count > 0, tl.max(tl.where(inside, lines, -_MOST - 1), 1) - low, 0)
    bits = _bits(most)
    numbers = lines - low[:, None]
    by_distance = count < 0
    if near:
        apart = tl.where(inside, tl.reshape(_distances(words, others, size), (blocks, BLOCK)), 0)
        far = _bits(tl.max(tl.where((apart >> 32) != 0, _MOST, apart), 1))
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


@triton.jit
def _write_blocks(a, b, c, b_size, blocks, first_block, widths, before, CHUNK: tl.constexpr):
    """Writes what `_in_blocks` gives: of each block the byte that says what it is, and the least word if the kernel
    does; and the bits, behind the `before` u32 numbers of the row."""
    numbers, count, bits, taken, low, by_distance, coded = blocks
    block = first_block + tl.arange(0, CHUNK // BLOCK)
    said = tl.where(coded, CODED, tl.where(by_distance, bits | NEAR_BIT, bits))
    tl.store(a + block, said.to(tl.uint8), mask=count > 0)
    if b_size > 0:
        store_words(b, b_size, block, low, count > 0)
    to = c.to(tl.pointer_type(tl.int32))
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


# -------------------------------------------------------------------- stretches


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _stretches(own, at, n, words, steps, stretch):
    """What stretches of a row are made of at some places: words, or the steps between them; where stretches begin and
    which ends are not the end of the row; and where the stretch of each place began, of which `stretch` is the last
    known, and the last of all."""
    inside = at < n
    values = words
    before = _words(own, at - 1, inside & (at > 0))
    behind = _words(own, at + 1, at + 1 < n)
    if steps:
        size = own[1]
        earlier = _words(own, at - 2, inside & (at > 1))
        values = _signed(words - before, size)
        behind = _signed(behind - words, size)
        before = _signed(before - earlier, size)
    starts = inside & ((at == 0) | (values != before))
    ends = (at + 1 < n) & (values != behind)
    last = tl.maximum(tl.associative_scan(tl.where(starts, at, -1), 0, _larger), stretch)
    return values, starts, ends, last, tl.max(tl.where(inside, last, 0))


# -------------------------------------------------------------------- rows that are compared


@triton.jit
def _stray(unit, row, rows, CHUNK: tl.constexpr):
    """STRAY if something under the mask of a row is not the pad."""
    found = tl.zeros((CHUNK,), tl.int32)
    if tl.load(unit + PAD_MODE) != 0:
        size, items = tl.load(unit + SIZE), tl.load(unit + STRIDE)
        x = tl.load(unit + WORDS) + row * tl.load(unit + ROW_STRIDE) * size
        start, stop = _columns(unit, row, rows)
        begin, end = (start * items).to(tl.int32), (stop * items).to(tl.int32)
        width = (tl.load(unit + WIDTH) * items).to(tl.int32)
        free = tl.where(begin == 0, end, 0)
        first = width * 0
        while first < width:
            place = first + tl.arange(0, CHUNK)
            padding = (place < width) & ((place < begin) | (place >= end))
            step = tl.where(begin < end, tl.where(place >= end, -items, items), 0)
            words = load_words(x, size, place, padding)
            # PAD_MODE and PAD are MODE and WORD of a pad
            wrong = differs(unit + PAD_MODE, x, size, words, place, padding, step, free, free < width)
            found = found | tl.where(wrong, STRAY, 0)
            first += CHUNK
    return tl.max(found)


@triton.jit
def _differ(own, skipped, other, n, CHUNK: tl.constexpr):
    """Whether the words of a row, without the first ones, differ from the `n` words of another."""
    found = tl.zeros((CHUNK,), tl.int32)
    begin = n * 0
    while begin < n:
        at = begin + tl.arange(0, CHUNK)
        found = found | (_words(own, skipped + at, at < n) != _words(other, at, at < n)).to(tl.int32)
        begin += CHUNK
    return tl.max(found) > 0


@triton.jit
def _joined(units, tables, own, n, number, row, rows, CHUNK: tl.constexpr):
    """MISFIT if a row is not the row of a head and that of a tail, one behind the other."""
    head, head_n = _row(units, tl.load(units + number * UNIT + HEAD), tables, row, rows)
    tail, tail_n = _row(units, tl.load(units + number * UNIT + TAIL), tables, row, rows)
    apart = head_n + tail_n != n
    if head_n + tail_n == n:
        apart = _differ(own, 0, head, head_n, CHUNK) | _differ(own, head_n, tail, tail_n, CHUNK)
    return tl.where(apart, MISFIT, 0)


# -------------------------------------------------------------------- rows that are encoded


@triton.jit
def _encode_row(units, tables, place, body, own, n, number, row, rows, WRITE: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the arrays of a row where the Spot at `place` says, of b and c those that the host does not write itself;
    or the Stat of the row to `place`, without its flags, which it returns."""
    unit = units + number * UNIT
    kind, size, near = tl.load(unit + KIND), tl.load(unit + SIZE), tl.load(unit + NEAR)
    widths, b_size, c_size = tl.load(unit + NUMBER).to(tl.int32), tl.load(unit + B_SIZE), tl.load(unit + C_SIZE)
    beside = own
    if near >= 0:
        beside = _row(units, near, tables, row, rows)[0]
    if WRITE:
        spot = place + AT
        a, b, c = body + tl.load(spot), body + tl.load(spot + 1), body + tl.load(spot + 2)
    total, most = n.to(tl.int64) * 0, n.to(tl.int64) * 0
    low, high, least = total + _MOST, total - _MOST - 1, total + _MOST
    found = tl.zeros((CHUNK,), tl.int32)
    hashes = tl.zeros((CHUNK,), tl.int64)
    flags, stretch, begin = n * 0, n * 0, n * 0  # `stretch`: where the last one began
    while begin < n:
        at = begin + tl.arange(0, CHUNK)
        words = _words(own, at, at < n)
        if kind == BLOCKS:
            others = words
            if near >= 0:
                others = _words(beside, at, at < n)
            blocks = _in_blocks(words, others, near >= 0, widths, size, n - begin, CHUNK)
            _numbers, count, bits, taken, bases, by_distance, _coded = blocks
            if WRITE:
                _write_blocks(a, b, c, b_size, blocks, begin // BLOCK, widths, total, CHUNK)
            else:
                flags |= tl.max(tl.where(bits > 32, MISFIT, 0)) | tl.max(tl.where(by_distance, NEAR_USED, 0))
                low = tl.minimum(low, tl.min(tl.where(count > 0, bases, _MOST)))
                high = tl.maximum(high, tl.max(tl.where(count > 0, bases, -_MOST - 1)))
            total += tl.sum(taken)
        elif (kind == RLE) | (kind == DELTA):
            values, starts, ends, last, stretch = _stretches(own, at, n, words, kind == DELTA, stretch)
            length = (at + 1 - last).to(tl.int64)
            if WRITE:
                order = total + tl.cumsum(starts.to(tl.int64), 0) - 1
                if b_size > 0:
                    store_words(b, b_size, order, length, ends)
                if c_size > 0:
                    store_words(c, c_size, order, values, starts)
            else:
                low = tl.minimum(low, tl.min(tl.where(starts, values, _MOST)))
                high = tl.maximum(high, tl.max(tl.where(starts, values, -_MOST - 1)))
                least = tl.minimum(least, tl.min(tl.where(ends, length, _MOST)))
                most = tl.maximum(most, tl.max(tl.where(ends, length, 0)))
            total += tl.sum(starts.to(tl.int32))
        elif WRITE:
            store_words(a, size, at, words, at < n)
        if not WRITE:
            hashes += tl.where(at < n, _mixed(words, at), 0)
            found = found | tl.where((words & tl.load(unit + BOOLS)) != 0, ODD, 0)
        begin += CHUNK
    if not WRITE:
        tl.store(place + TOTAL, total)
        tl.store(place + LEAST_WORD, low)
        tl.store(place + MOST_WORD, high)
        tl.store(place + SHORTEST, least)
        tl.store(place + LONGEST, most)
        tl.store(place + HASH, tl.sum(hashes))
    return flags | tl.max(found)


@triton.jit(do_not_specialize=["rows"])
def _measure(units, tables, stats, rows, CHUNK: tl.constexpr):
    number = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    stat = stats + (number * rows + row) * STAT
    own, n = _row(units, number, tables, row, rows)
    flags = n * 0
    if tl.load(units + number * UNIT + KIND) == CONCAT:
        flags = _joined(units, tables, own, n, number, row, rows, CHUNK)
    else:
        flags = _encode_row(units, tables, stat, stat, own, n, number, row, rows, False, CHUNK)
    tl.store(stat + FLAGS, (flags | _stray(units + number * UNIT, row, rows, CHUNK)).to(tl.int64))


@triton.jit(do_not_specialize=["rows", "differing"])
def _write(units, tables, spots, body, rows, differing, CHUNK: tl.constexpr):
    number = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    spot = spots + (number * rows + row) * SPOT
    way = tl.load(spot + WAY)
    own, n = _row(units, number, tables, row, rows)
    if way == WRITTEN:
        _encode_row(units, tables, spot, body, own, n, number, row, rows, True, CHUNK)
    elif way >= 0:
        other = _row(units, way // rows, tables, way % rows, rows)[0]  # of as many words
        tl.store(body + differing, 1, mask=_differ(own, 0, other, n, CHUNK))


def measure(units: Tensor, tables: Tensor, stats: Tensor, count: int, rows: int) -> None:
    """Writes the stats of the rows of all units.

    Args:
        units: int64 [count, UNIT], on the device, like all others.
        tables: int64 [layouts, rows + 1], where rows begin in packed values.
        stats: int64 [count, rows, STAT].
    """
    with torch.cuda.device_of(units):
        _measure[(count * rows,)](units, tables, stats, rows, CHUNK=CHUNK, num_warps=_WARPS)


def write(units: Tensor, tables: Tensor, spots: Tensor, body: Tensor, count: int, rows: int, differing: int) -> None:
    """Writes the arrays of all units.

    Args:
        spots: int64 [count, rows, SPOT]: where the part of each array that belongs to a row begins in the body, and
            what becomes of the row.
        body: uint8, 0 before.
        differing: where the byte is that becomes 1 if a row is not equal to the row that it must equal.
    """
    with torch.cuda.device_of(units):
        _write[(count * rows,)](units, tables, spots, body, rows, differing, CHUNK=CHUNK, num_warps=_WARPS)
