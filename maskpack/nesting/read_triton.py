"""The kernel of device_read.py: the padded fields of all layouts, read once in one launch.

    element (row, column, item)  --valid-------> stored at its packed token
                                 --masked out--> compared with each candidate pad; one that differs sets a flag

A program reads SPAN words of one row of one field, CHUNK at a time. Words are int64, zero-extended. `load_words`,
`store_words` and `differs` also serve the kernels of packed/cuda: words and pads are read by one rule.
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
from maskpack.nesting import device_read as jobs
from maskpack.ops.pack_triton import by_bits

(
    PARTS, X, OUT, SIZE, ITEMS, ROW, COL, ITEM, INNER, WIDTH, STARTS, BEGINS, BOUNDS, SPLITS, BITS, BEFORE, PADS,
    NUM_PADS, CHECKED, FLAGS, ODD, JOB,
) = (tl.constexpr(place) for place in range(len(jobs.ReadJob._fields) + 1))  # fmt: skip
MODE, WORD, RECORDS, STEP, PAD = (tl.constexpr(place) for place in range(jobs.PAD_NUMBERS + 1))
BY_EDGE, BY_ROW, BY_SIGNS = tl.constexpr(abi.BY_EDGE), tl.constexpr(abi.BY_ROW), tl.constexpr(abi.BY_SIGNS)
_WARPS = 4


@triton.jit
def load_words(address, size, at, mask):
    """Words of 1, 2, 4 or 8 bytes as int64, zero-extended; 0 where the mask is false."""
    if size == 8:
        words = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
    elif size == 4:
        words = tl.load(address.to(tl.pointer_type(tl.uint32)) + at, mask=mask, other=0).to(tl.int64)
    elif size == 2:
        words = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0).to(tl.int64)
    else:
        words = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0).to(tl.int64)
    return words


@triton.jit
def store_words(address, size, at, words, mask):
    """Stores the low bytes of int64 as words of 1, 2, 4 or 8 bytes."""
    if size == 8:
        tl.store(address.to(tl.pointer_type(tl.int64)) + at, words, mask=mask)
    elif size == 4:
        tl.store(address.to(tl.pointer_type(tl.int32)) + at, words.to(tl.int32), mask=mask)
    elif size == 2:
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, words.to(tl.int16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint8)) + at, words.to(tl.uint8), mask=mask)


@triton.jit
def _pad_of_row(mode, x, size, at, mask):
    """The pad of a row, BY_ROW or BY_SIGN, from a masked-out word of it: that word, or the zero with its sign."""
    word = load_words(x, size, at, mask)
    return tl.where(mode == BY_ROW, word, _zero_of(word, size))


@triton.jit
def _zero_of(word, size):
    """A zero with its sign, and 0.0 for all other words."""
    return tl.where((word << (65 - 8 * size)) != 0, 0, word)


@triton.jit
def differs(pad, x, size, words, place, padding, step, free, some):
    """Where masked-out words are not what a pad demands.

    That is the word of the pad; BY_EDGE the neighbour, `step` words away, and 0 where `step` is 0, in a row without
    tokens; BY_ROW and BY_SIGN what the word at `free` says, the first that is masked out if there are `some`; BY_SIGNS
    any zero.
    """
    mode = tl.load(pad + MODE)
    expected = tl.load(pad + WORD) + place * 0
    if mode == BY_EDGE:
        expected = load_words(x, size, place + step, padding & (step != 0))
    elif mode == BY_SIGNS:
        expected = _zero_of(words, size)
    elif mode > BY_EDGE:
        expected = _pad_of_row(mode, x, size, free, some) + place * 0
    return padding & (((words ^ expected) << (64 - 8 * size)) != 0)


@triton.jit
def _job_of(tables, count, program, FIRSTS: tl.constexpr):
    """The number of the last job that begins at or before a program."""
    number = count * 0 - 1
    at = count * 0
    while at < count:
        each = at + tl.arange(0, FIRSTS)
        first = tl.load(tables + each, mask=each < count, other=0x7FFFFFFFFFFFFFFF)
        number += tl.sum((first <= program).to(tl.int32))
        at += FIRSTS
    return number


@triton.jit
def _entry(job, COLUMN: tl.constexpr, at, mask):
    """Entries of an int32 tensor that a job names."""
    return tl.load(tl.load(job + COLUMN).to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)


@triton.jit
def _rank(job, row, col, live, first, start, tokens, width):
    """Whether positions of a row are valid, and the number of tokens before each; of positions behind the only span of
    a row, at least 1."""
    bits = tl.load(job + BITS)
    if bits == 0:
        valid = live & (col >= start) & (col < start + tokens)
        rank = tl.where(tokens > 0, col - start + (col >= start + tokens).to(tl.int32), 0)
    else:
        before = tl.load(job + BEFORE).to(tl.pointer_type(tl.int32))
        valid, rank = by_bits(bits.to(tl.pointer_type(tl.int32)), before, row, col, width, live)
        valid, rank = valid & live, rank - first
    return valid, rank


@triton.jit
def _store_signs(pad, size, words, padding, row, at, width, CHUNK: tl.constexpr):
    """Stores a bit for each position of a chunk, from column `at` on, of one word each: whether -0.0 is masked out."""
    lane = tl.arange(0, CHUNK) % 8
    minus = (padding & (((words >> (8 * size - 1)) & 1) != 0)).to(tl.int32)
    line = tl.sum(tl.reshape(minus << (7 - lane), (CHUNK // 8, 8)), 1)
    each = at // 8 + tl.arange(0, CHUNK // 8)
    record = tl.load(pad + RECORDS) + row * tl.load(pad + STEP) + 1 + size
    tl.store(record.to(tl.pointer_type(tl.uint8)) + each, line.to(tl.uint8), mask=each < (width + 7) // 8)


@triton.jit
def _store_record(pad, size, word, row):
    """Stores the record of a row, but for its signs: a byte that is abi.WORD, and its word."""
    each = tl.arange(0, 16)
    line = tl.where(each == 0, 0, word >> (8 * (each - 1) & 63))
    record = tl.load(pad + RECORDS) + row * tl.load(pad + STEP)
    tl.store(record.to(tl.pointer_type(tl.uint8)) + each, line.to(tl.uint8), mask=each <= size)


@triton.jit
def _chunk(tables, job, row, at, first, tokens, start, free, CHUNK: tl.constexpr):
    """Stores the values in a chunk of a row, and raises the flags of the pads that do not fit."""
    items, width = tl.load(job + ITEMS).to(tl.int32), tl.load(job + WIDTH).to(tl.int32)
    x, size, stride = tl.load(job + X), tl.load(job + SIZE).to(tl.int32), tl.load(job + COL)
    each = at + tl.arange(0, CHUNK)
    live = each < width * items
    col, item = each, each * 0
    if items > 1:
        inner = tl.load(job + INNER) != 0
        over = tl.where(inner, width, items)
        slow = each // over
        fast = each - slow * over
        col, item = tl.where(inner, fast, slow), tl.where(inner, slow, fast)
    valid, rank = _rank(job, row, col, live, first, start, tokens, width)
    begin = row * tl.load(job + ROW)
    place = begin + col.to(tl.int64) * stride + item.to(tl.int64) * tl.load(job + ITEM)
    checked = tl.load(job + CHECKED) != 0
    words = load_words(x, size, place, tl.where(checked, live, valid))
    store_words(tl.load(job + OUT), size, (first + rank).to(tl.int64) * items + item, words, valid)
    flags, pads = tables + tl.load(job + FLAGS), tl.load(job + NUM_PADS).to(tl.int32)
    odd = ((words & tl.load(job + ODD)) != 0).to(tl.int32)
    tl.store(flags + pads, 1, mask=tl.max(odd) > 0)
    padding = live & (valid == 0)
    if checked:
        step = tl.where(tokens > 0, tl.where(rank > 0, -stride, stride), 0)
        for slot in range(pads):
            pad = tables + tl.load(job + PADS) + slot * PAD
            if tl.load(pad + MODE) == BY_SIGNS:
                _store_signs(pad, size, words, padding, row, at, width, CHUNK)
            wrong = differs(pad, x, size, words, place, padding, step, begin + free * stride, free < width)
            tl.store(flags + slot, 1, mask=tl.max(wrong.to(tl.int32)) > 0)


@triton.jit(do_not_specialize=["count"])
def _read(tables, count, CHUNK: tl.constexpr, SPAN: tl.constexpr, FIRSTS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    number = _job_of(tables, count, program, FIRSTS)
    job = tables + count + number * JOB
    local = (program - tl.load(tables + number)).to(tl.int32)
    parts = tl.load(job + PARTS).to(tl.int32)
    row, part = (local // parts).to(tl.int64), local % parts
    items, width = tl.load(job + ITEMS).to(tl.int32), tl.load(job + WIDTH).to(tl.int32)
    first = _entry(job, BOUNDS, row, True)
    tokens = _entry(job, BOUNDS, row + 1, True) - first
    several = tl.load(job + SPLITS) != 0
    span = tl.where(several, _entry(job, SPLITS, row, several), row)
    filled = tokens > 0
    start = _entry(job, STARTS, span, filled)
    length = _entry(job, BEGINS, span + 1, filled) - _entry(job, BEGINS, span, filled)
    free = tl.where(start == 0, length, 0)  # the first masked-out column, or the width
    low, high = items * 0, width * items
    if tl.load(job + CHECKED) == 0:  # only values are read
        together = (tl.load(job + INNER) == 0) | (items == 1)
        low = tl.where(together, start * items, 0)
        high = tl.where(filled, high, 0)
        high = tl.where(together & (several == 0), (start + length) * items, high)
    at = part * SPAN
    stop = tl.minimum(at + SPAN, high)
    while at < stop:
        if at + CHUNK > low:
            _chunk(tables, job, row, at, first, tokens, start, free, CHUNK)
        at += CHUNK
    if part == 0:
        x, size = tl.load(job + X), tl.load(job + SIZE).to(tl.int32)
        place = row * tl.load(job + ROW) + free * tl.load(job + COL)
        for slot in range(tl.load(job + NUM_PADS).to(tl.int32)):
            pad = tables + tl.load(job + PADS) + slot * PAD
            mode = tl.load(pad + MODE)
            if mode > BY_EDGE:
                word = _pad_of_row(mode, x, size, place, (mode != BY_SIGNS) & (free < width))
                _store_record(pad, size, word, row)


def launch(tables: Tensor, count: int, programs: int) -> None:
    """Runs `programs` programs of `count` jobs.

    Args:
        tables: int64: the first program of each job; the jobs; pads and flags.
    """
    with torch.cuda.device_of(tables):  # Triton launches on the current device
        _read[(programs,)](tables, count, CHUNK=jobs.CHUNK, SPAN=jobs.SPAN, FIRSTS=jobs.FIRSTS, num_warps=_WARPS)
