"""The kernel of device_read.py: the padded fields of all layouts, read once in one launch.

    element (row, column, item)  --valid-------> stored at its packed token
                                 --masked out--> compared with each candidate pad; one that differs sets a flag

A program reads SPAN words of one row of one field, CHUNK at a time. Words are compared as int64, zero-extended.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskpack.nesting import device_read as jobs
from maskpack.ops.pack_triton import _ones

(
    PARTS, X, OUT, SIZE, ITEMS, ROW, COL, ITEM, INNER, TURN, WIDTH, STARTS, BEGINS, BOUNDS, SPLITS, BITS, BEFORE, PADS,
    NUM_PADS, CHECKED, FLAGS, ODD, JOB,
) = (tl.constexpr(place) for place in range(len(jobs.ReadJob._fields) + 1))  # fmt: skip
KIND, WORD, ROW_PADS, PAD = (tl.constexpr(place) for place in (0, 1, 3, jobs.PAD_NUMBERS))
EDGE, BY_ROW, BY_SIGN = tl.constexpr(jobs.EDGE_PAD), tl.constexpr(jobs.BY_ROW), tl.constexpr(jobs.BY_SIGN)
_WARPS = 4


@triton.jit
def _load(address, size, at, mask):
    """Words of 1, 2, 4 or 8 bytes as int64."""
    if size == 8:
        word = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
    elif size == 4:
        word = tl.load(address.to(tl.pointer_type(tl.uint32)) + at, mask=mask, other=0).to(tl.int64)
    elif size == 2:
        word = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0).to(tl.int64)
    else:
        word = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0).to(tl.int64)
    return word


@triton.jit
def _store(address, size, at, word, mask):
    if size == 8:
        tl.store(address.to(tl.pointer_type(tl.int64)) + at, word, mask=mask)
    elif size == 4:
        tl.store(address.to(tl.pointer_type(tl.int32)) + at, word.to(tl.int32), mask=mask)
    elif size == 2:
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, word.to(tl.int16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint8)) + at, word.to(tl.uint8), mask=mask)


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
def _rank(job, row, col, live, first, start, tokens, width):
    """Whether positions of a row are valid, and the number of tokens before each; of positions behind the only span of
    a row, at least 1."""
    bits = tl.load(job + BITS)
    if bits == 0:
        valid = live & (col >= start) & (col < start + tokens)
        rank = tl.where(tokens > 0, col - start + (col >= start + tokens).to(tl.int32), 0)
    else:
        word = row * ((width + 31) // 32) + col // 32
        lane = col % 32
        in_word = tl.load(bits.to(tl.pointer_type(tl.int32)) + word, mask=live, other=0)
        valid = live & (((in_word >> lane) & 1) == 1)
        before = tl.load(tl.load(job + BEFORE).to(tl.pointer_type(tl.int32)) + word, mask=live, other=0)
        rank = before - first + _ones(in_word & ((1 << lane) - 1))
    return valid, rank


@triton.jit
def _pad_of_row(job, pad, x, size, begin, free, item, width):
    """The pad of a row as PER_ROW or SIGNED_ZERO: the first masked-out item, or the zero with its sign; 0 in a full
    row."""
    at = begin + free.to(tl.int64) * tl.load(job + COL) + item * tl.load(job + ITEM)
    word = _load(x, size, at, free < width)
    if tl.load(pad + KIND) == BY_SIGN:
        sign = tl.full((), 1, tl.int64) << (8 * size - 1).to(tl.int64)
        word = tl.where((word & ~sign) == 0, word, 0)
    return word


@triton.jit
def _chunk(tables, job, row, at, first, tokens, start, free, CHUNK: tl.constexpr):
    """Stores the values in a chunk of a row, and raises the flags of the pads that do not fit."""
    items, width = tl.load(job + ITEMS).to(tl.int32), tl.load(job + WIDTH).to(tl.int32)
    each = at + tl.arange(0, CHUNK)
    live = each < width * items
    col = each
    item = each * 0
    if items > 1:
        if tl.load(job + INNER) > 0:
            item = each // width
            col = each - item * width
        else:
            col = each // items
            item = each - col * items
    valid, rank = _rank(job, row, col, live, first, start, tokens, width)
    pads, checked, odd = tl.load(job + NUM_PADS).to(tl.int32), tl.load(job + CHECKED) != 0, tl.load(job + ODD)
    x, size = tl.load(job + X), tl.load(job + SIZE).to(tl.int32)
    col_stride = tl.load(job + COL)
    begin = row * tl.load(job + ROW)
    place = begin + col.to(tl.int64) * col_stride + item.to(tl.int64) * tl.load(job + ITEM)
    word = _load(x, size, place, tl.where(checked, live, valid))
    token = (first + rank).to(tl.int64)
    _store(tl.load(job + OUT), size, token * items + item, word, valid)
    flags = tables + tl.load(job + FLAGS)
    if tl.max(((word & odd) != 0).to(tl.int32)) > 0:
        tl.store(flags + pads, 1)
    padding = live & (valid == 0)
    if checked & (tl.max(padding.to(tl.int32)) > 0):
        turn = tl.load(job + TURN)
        slot = pads * 0
        while slot < pads:
            pad = tables + tl.load(job + PADS) + slot * PAD
            kind = tl.load(pad + KIND)
            if kind == EDGE:
                step = tl.where(rank > 0, -col_stride, col_stride)
                right = _load(x, size, place + step, padding & (each < tl.where(tokens > 0, width * items, 0)))
            elif kind < EDGE:
                right = tl.load(pad + WORD + (item & turn))
            else:
                one = _pad_of_row(job, pad, x, size, begin, free, turn * 0, width)
                two = _pad_of_row(job, pad, x, size, begin, free, turn, width)
                right = tl.where((item & turn) == 1, two, one)
            if tl.max((padding & (word != right)).to(tl.int32)) > 0:
                tl.store(flags + slot, 1)
            slot += 1


@triton.jit(do_not_specialize=["count", "jobs_at"])
def _read(tables, count, jobs_at, CHUNK: tl.constexpr, SPAN: tl.constexpr, FIRSTS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    number = _job_of(tables, count, program, FIRSTS)
    job = tables + jobs_at + number * JOB
    local = (program - tl.load(tables + number)).to(tl.int32)
    parts = tl.load(job + PARTS).to(tl.int32)
    row = (local // parts).to(tl.int64)
    part = local % parts
    items, width = tl.load(job + ITEMS).to(tl.int32), tl.load(job + WIDTH).to(tl.int32)
    bounds = tl.load(job + BOUNDS).to(tl.pointer_type(tl.int32)) + row
    first = tl.load(bounds)
    tokens = tl.load(bounds + 1) - first
    span = row
    splits = tl.load(job + SPLITS)
    if splits != 0:
        span = tl.load(splits.to(tl.pointer_type(tl.int32)) + row).to(tl.int64)
    filled = tokens > 0
    start = tl.load(tl.load(job + STARTS).to(tl.pointer_type(tl.int32)) + span, mask=filled, other=0)
    begins = tl.load(job + BEGINS).to(tl.pointer_type(tl.int32)) + span
    length = tl.load(begins + 1, mask=filled, other=0) - tl.load(begins, mask=filled, other=0)
    free = tl.where(filled & (start == 0), length, 0)  # the first masked-out column, or the width
    pads = tl.load(job + NUM_PADS).to(tl.int32)
    low, high = items * 0, width * items
    if tl.load(job + CHECKED) == 0:  # only values are read
        if (tl.load(job + INNER) == 0) | (items == 1):
            low = start * items
            high = tl.where(splits == 0, (start + length) * items, high)
        high = tl.where(filled, high, 0)
    at = part * SPAN
    stop = at + tl.minimum(SPAN, width * items - at)
    while at < stop:
        if (at + CHUNK > low) & (at < high):
            _chunk(tables, job, row, at, first, tokens, start, free, CHUNK)
        at += CHUNK
    if part == 0:
        slot = pads * 0
        x, size, turn = tl.load(job + X), tl.load(job + SIZE).to(tl.int32), tl.load(job + TURN)
        while slot < pads:
            pad = tables + tl.load(job + PADS) + slot * PAD
            if tl.load(pad + KIND) > EDGE:
                item = turn * 0
                while item <= turn:
                    word = _pad_of_row(job, pad, x, size, row * tl.load(job + ROW), free, item, width)
                    _store(tl.load(pad + ROW_PADS), size, row * (turn + 1) + item, word, row >= 0)
                    item += 1
            slot += 1


def launch(tables: Tensor, count: int, jobs_at: int, programs: int) -> None:
    """Runs `programs` programs of `count` jobs.

    Args:
        tables: int64: the first program of each job; the jobs, from the entry `jobs_at` on; pads and flags.
    """
    with torch.cuda.device_of(tables):  # Triton launches on the current device
        _read[(programs,)](
            tables, count, jobs_at, CHUNK=jobs.CHUNK, SPAN=jobs.SPAN, FIRSTS=jobs.FIRSTS, num_warps=_WARPS
        )
