"""The spans of a layout as a nested batch stores them: lines of three int32 for each row.

    a row of few spans     start, count, checksum | start, count, checksum | ...        one line for each span
    a row of many          -1, checksum, bits | bits | bits                             the mask as bits, then zeros
    behind them            -1, checksum, bits | bits | bits                             other bits, if any is set

A row is stored as bits if that takes fewer lines. The lines of a row do not depend on other rows, so rows can be
reordered, taken and joined with others of the same width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from maskpack.core.bits import Words
from maskpack.core.index import IntArray, SpanTable, bits_of, cumulated, ranges, table_of_bits, table_rows

LINE = 12
"""The number of bytes of a line."""
_HEAD = 8
"""The number of bytes before the bits of a row."""
_BITS = -1
"""Marks a row of bits, where the first start would be."""


def lines_of(table: SpanTable, width: int) -> tuple[npt.NDArray[np.int32], IntArray]:
    """int32 [n, 3], the lines of all rows, and int64 [B + 1], the first line of each row."""
    starts, counts, splits = table
    lines = np.empty((starts.size, 3), np.int32)
    lines[:, 0], lines[:, 1], lines[:, 2] = starts, counts, _checksums(starts, counts)
    spans, most = np.diff(splits), _lines_of_bits(width)
    many = np.flatnonzero(spans > most)
    if not many.size:
        return lines, np.array(splits)
    few = np.flatnonzero(spans <= most)
    ends = cumulated(np.minimum(spans, most))
    out = np.empty((int(ends[-1]), 3), np.int32)
    out[ranges(ends[few], spans[few])] = lines[ranges(splits[few], spans[few])]
    out[ranges(ends[many], np.full(many.size, most))] = _with_bits(bits_of(table_rows(table, many), width))
    return out, ends


def table_of_lines(lines: npt.NDArray[Any], splits: IntArray, width: int) -> SpanTable | None:
    """The inverse of `lines_of`; None if the lines were changed."""
    sizes, most = np.diff(splits), _lines_of_bits(width)
    if int(splits[0]) or int(splits[-1]) != len(lines) or (sizes < 0).any():
        return None
    filled = np.flatnonzero(sizes)
    has_bits = lines[splits[filled], 0] == _BITS
    many, few = filled[has_bits], filled[~has_bits]
    spans = lines[ranges(splits[few], sizes[few])]
    if not np.array_equal(_checksums(spans[:, 0], spans[:, 1]), spans[:, 2]) or (sizes[many] != most).any():
        return None
    if not many.size:
        return SpanTable(spans[:, 0], spans[:, 1], splits)
    bits = _bits_of(lines[ranges(splits[many], sizes[many])], many.size, width)
    table = None if bits is None else table_of_bits(bits, width)
    if table is None:
        return None
    sizes[many] = np.diff(table.splits)
    ends = cumulated(sizes)
    out = np.empty((2, int(ends[-1])), np.int64)
    out[:, ranges(ends[few], sizes[few])] = spans[:, :2].T
    out[:, ranges(ends[many], sizes[many])] = table.starts, table.counts
    return SpanTable(out[0], out[1], ends)


def lines_with(
    lines: npt.NDArray[np.int32], splits: IntArray, width: int, others: Sequence[Words]
) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Lines with other bits, each uint8 [B, ceil(width / 8)], behind those of the rows that have any of them set."""
    most, rows = _lines_of_bits(width), [np.flatnonzero(bits.any(1)) for bits in others]
    sizes = np.diff(splits)
    ends = cumulated(sizes + most * np.bincount(np.concatenate(rows), minlength=sizes.size))
    out = np.empty((int(ends[-1]), 3), np.int32)
    out[ranges(ends[:-1], sizes)] = lines
    at = ends[:-1] + sizes
    for bits, own in zip(others, rows, strict=True):
        out[ranges(at[own], np.full(own.size, most))] = _with_bits(bits[own])
        at[own] += most
    return out, ends


def lines_without(
    lines: npt.NDArray[Any], splits: IntArray, width: int, flags: Sequence[npt.NDArray[np.bool_]]
) -> tuple[npt.NDArray[Any], IntArray, list[Words]] | None:
    """The inverse of `lines_with`, given which rows have each of the other bits; None if the lines were changed."""
    most = _lines_of_bits(width)
    sizes = np.diff(splits) - most * np.sum(flags, axis=0)
    if int(splits[0]) or int(splits[-1]) != len(lines) or (sizes < 0).any():
        return None
    at, others = splits[:-1] + sizes, list[Words]()
    for flag in flags:
        rows = np.flatnonzero(flag)
        bits = _bits_of(lines[ranges(at[rows], np.full(rows.size, most))], rows.size, width)
        if bits is None:
            return None
        others.append(np.zeros((sizes.size, bits.shape[1]), np.uint8))
        others[-1][rows] = bits
        at[rows] += most
    return lines[ranges(splits[:-1], sizes)], cumulated(sizes), others


def _lines_of_bits(width: int) -> int:
    """The number of lines of a row stored as bits."""
    return -(-(_HEAD + -(-width // 8)) // LINE)


def _with_bits(bits: Words) -> npt.NDArray[np.int32]:
    raw = np.zeros((len(bits), LINE * _lines_of_bits(8 * bits.shape[1])), np.uint8)
    raw[:, _HEAD : _HEAD + bits.shape[1]] = bits
    lines = raw.view(np.int32)
    lines[:, 0], lines[:, 1] = _BITS, _checksums_of_bits(bits)
    return lines.reshape(-1, 3)


def _bits_of(lines: npt.NDArray[Any], rows: int, width: int) -> Words | None:
    whole = lines.astype(np.int32).reshape(rows, 3 * _lines_of_bits(width))
    raw = whole.view(np.uint8)[:, _HEAD:]
    bits = np.ascontiguousarray(raw[:, : -(-width // 8)])
    if raw[:, bits.shape[1] :].any() or not np.array_equal(whole[:, 1], _checksums_of_bits(bits)):
        return None
    return bits


def _checksums(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A checksum of each span, below 2^31."""
    return starts % 32749 * 30011 + counts % 32719 * 20011 + 12345


def _checksums_of_bits(bits: Words) -> npt.NDArray[np.int32]:
    """A checksum of the bits of each row."""
    return np.array([zlib.crc32(row.data) for row in bits], np.uint32).view(np.int32)
