"""Rows by number, and ranges of elements by their bounds: the index arithmetic that layouts and encodings share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from maskpack.errors import LayoutError

IntArray = npt.NDArray[np.int64]
Rows = slice | Sequence[int] | IntArray | npt.NDArray[np.bool_] | Tensor


class RunTable(NamedTuple):
    """The run table on the host, all int64: `starts` [N], `counts` [N], `splits` [B + 1] (the runs of each row)."""

    starts: IntArray
    counts: IntArray
    splits: IntArray


def row_index(rows: Rows, num_rows: int, call: str) -> IntArray:
    """Any way to name rows as int64 indices 0 to B. A bool mask must have B entries; indices must be in range."""
    if isinstance(rows, slice):
        return np.arange(num_rows, dtype=np.int64)[rows]
    index = np.asarray(rows.detach().cpu() if isinstance(rows, Tensor) else rows)
    if index.dtype == np.bool_:
        if index.shape != (num_rows,):
            raise LayoutError(
                f"{call}: row mask is {index.shape}; expected ({num_rows},). Give one true or false for each row."
            )
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise LayoutError(
            f"{call}: rows are {index.dtype} {index.shape}; expected whole numbers (n,). "
            "Pass a slice, a list of row numbers, or a bool mask."
        )
    index = index.astype(np.int64)
    if index.size and (int(index.min()) < -num_rows or int(index.max()) >= num_rows):
        raise LayoutError(
            f"{call}: rows run from {int(index.min())} to {int(index.max())}; the batch has {num_rows} rows. "
            f"Choose rows from 0 to {num_rows - 1}."
        )
    return np.where(index < 0, index + num_rows, index)


def ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """The indices of consecutive ranges, one after the other: int64 [sum(counts)]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(begins - (ends - counts), counts) + np.arange(total, dtype=np.int64)


def cumulated(counts: npt.NDArray[Any]) -> IntArray:
    """Sums before each count and after the last: int64 [n + 1]."""
    out = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
