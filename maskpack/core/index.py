"""Index arithmetic for layouts and encodings: rows by number, ranges by their bounds, span tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from maskpack.core.arguments import IntArray, said, whole
from maskpack.core.tensors import host_array
from maskpack.errors import LayoutError

Rows = slice | Sequence[int] | IntArray | npt.NDArray[np.bool_] | Tensor


class SpanTable(NamedTuple):
    """The spans of a mask, int64 on the host: `starts` [N], `counts` [N], and `splits` [B + 1], the first span of each
    row."""

    starts: IntArray
    counts: IntArray
    splits: IntArray


def table_rows(table: SpanTable, rows: IntArray) -> SpanTable:
    """The span table of some rows, by their indices."""
    first, spans = table.splits[rows], table.splits[rows + 1] - table.splits[rows]
    take = ranges(first, spans)
    return SpanTable(table.starts[take], table.counts[take], cumulated(spans))


def row_index(rows: Rows, num_rows: int, call: str) -> IntArray:
    """Rows given in any form, as int64 indices from 0 to B - 1. Raises LayoutError for a mask that does not have B
    entries, and for indices out of range."""
    if isinstance(rows, slice):
        parts = rows.start, rows.stop, rows.step
        if rows.step == 0 or not all(part is None or isinstance(part, int | np.integer) for part in parts):
            raise LayoutError(f"{call}: rows are {rows}; expected whole numbers, and a step other than 0. Correct it.")
        return np.arange(*rows.indices(num_rows), dtype=np.int64)
    index = host_array(rows, "rows", call)
    if index.dtype == np.bool_:
        if index.shape != (num_rows,):
            raise LayoutError(
                f"{call}: row mask is {index.shape}; expected ({num_rows},). Give one true or false for each row."
            )
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        seen = f"{index.dtype} {index.shape}" if index.ndim else said(rows)
        raise LayoutError(
            f"{call}: rows are {seen}; expected whole numbers (n,). "
            "Pass a slice, a list of row numbers, or a bool mask."
        )
    index = index.astype(np.int64)
    if index.size and (int(index.min()) < -num_rows or int(index.max()) >= num_rows):
        raise LayoutError(
            f"{call}: rows run from {int(index.min())} to {int(index.max())}; the batch has {num_rows} rows. "
            f"{f'Choose rows from 0 to {num_rows - 1}' if num_rows else 'There are none to choose from'}."
        )
    return np.where(index < 0, index + num_rows, index)


def no_single_row(rows: Any, num_rows: int, call: str) -> None:
    """Raises LayoutError for an index that is an integer or a name."""
    if isinstance(rows, bool | np.bool_):
        raise LayoutError(f"{call}: the index is {rows}; expected rows. A mask has one true or false for each row.")
    if isinstance(rows, int | np.integer):
        last = "no rows" if not num_rows else f"rows 0 to {num_rows - 1}"
        if not -num_rows <= rows < num_rows:
            raise LayoutError(f"{call}: the index is the whole number {rows}; the batch has {last}. Take rows it has.")
        stop = "" if rows == -1 else rows + 1
        raise LayoutError(
            f"{call}: the index is the whole number {rows}; expected rows. Take one row as a slice: [{rows}:{stop}]."
        )
    parts: tuple[Any, ...] = cast("tuple[Any, ...]", rows) if isinstance(rows, tuple) else ()
    if isinstance(rows, str) or (parts and all(isinstance(part, str) for part in parts)):
        name = repr(parts) if parts else f'"{rows}"'
        raise LayoutError(
            f"{call}: the index is the name {name}; expected rows. Name fields when you decode: "
            "decompress(packed, name), or view.materialize(name)."
        )


def part_sizes(sizes: int | Sequence[int], num_rows: int, call: str) -> list[int]:
    """The sizes of consecutive parts, from a list that sums to the rows, or from one size (the last part may be
    smaller)."""
    one = host_array(sizes, "sizes", call).ndim == 0
    items: list[Any] = [sizes] if one else list(cast("Sequence[int]", sizes))
    if any(isinstance(item, bool) or not isinstance(item, int | np.integer) for item in items):
        raise LayoutError(f"{call}: sizes are {said(sizes)}; expected whole numbers. Give one, or a list of them.")
    parts = [int(item) for item in items]
    if one:
        size = parts[0]
        if size < 1:
            raise LayoutError(f"{call}: size is {size}; expected at least 1. Give a positive size.")
        parts = [min(size, num_rows - start) for start in range(0, num_rows, size)]
    if sum(parts) != num_rows or min(parts, default=0) < 0:
        raise LayoutError(
            f"{call}: sizes {parts} sum to {sum(parts)}; the batch has {num_rows} rows. Give sizes "
            f"{'' if min(parts, default=0) >= 0 else 'from 0 '}that sum to the rows."
        )
    return parts


def even_sizes(num_rows: int, parts: int, call: str) -> list[int]:
    """The sizes of `parts` consecutive parts, which differ by at most one row."""
    parts = whole(parts, "parts", 1, call, 1 << 24)
    least, more = divmod(num_rows, parts)
    return [least + (part < more) for part in range(parts)]


def ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """The concatenated indices of ranges: int64 [sum(counts)]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(begins - (ends - counts), counts) + np.arange(total, dtype=np.int64)


def cumulated(counts: npt.NDArray[Any]) -> IntArray:
    """Cumulative sums from 0: int64 [n + 1]."""
    out = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
