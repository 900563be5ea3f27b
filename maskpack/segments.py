"""Rows as an ordered list of segments: which source, the first row in it, how many.

    a[4:6] b[0:3] a[9:10]    source  a b a    start  4 0 9    count  2 3 1

Segments that follow each other in their source are one. Nothing here knows what a source is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maskpack.rows import IntArray, cumulated, ranges


class Share(NamedTuple):
    """The rows that one source gives: its number, and its rows in the order of the segments."""

    source: int
    rows: IntArray


@dataclass(frozen=True, eq=False)
class Segments:
    """Attributes, all int64 [n]: `source`, the number of the source; `start`, its first row; `count`, at least 1."""

    source: IntArray
    start: IntArray
    count: IntArray

    @classmethod
    def whole(cls, num_rows: int) -> Segments:
        """All rows of one source, number 0."""
        n = 1 if num_rows else 0
        return cls(np.zeros(n, np.int64), np.zeros(n, np.int64), np.full(n, num_rows, np.int64))

    @classmethod
    def of_rows(cls, source: IntArray, row: IntArray) -> Segments:
        """From the source and the row in it, int64 [B] each."""
        begins = np.ones(row.size, np.bool_)
        begins[1:] = (source[1:] != source[:-1]) | (row[1:] != row[:-1] + 1)
        first = np.flatnonzero(begins)
        return cls(source[first], row[first], np.diff(np.append(first, row.size)))

    @staticmethod
    def cat(parts: Sequence[Segments]) -> Segments:
        source = np.concatenate([part.by_row()[0] for part in parts])
        return Segments.of_rows(source, np.concatenate([part.by_row()[1] for part in parts]))

    def __reduce__(self) -> tuple[Any, ...]:
        """In unsigned integers as narrow as fit: a shuffled view has a segment for each row."""
        parts = self.source, self.start, self.count
        return _restored, tuple(part.astype(np.min_scalar_type(int(part.max(initial=0)))) for part in parts)

    @property
    def num_rows(self) -> int:
        return int(self.count.sum())

    def by_row(self) -> tuple[IntArray, IntArray]:
        """The source of each row, and the row in it: int64 [B] each."""
        return np.repeat(self.source, self.count), ranges(self.start, self.count)

    def select(self, index: IntArray) -> Segments:
        """Some rows, in the order given."""
        source, row = self.by_row()
        return Segments.of_rows(source[index], row[index])

    def renumbered(self, numbers: IntArray) -> Segments:
        """With `numbers[s]` for source `s`."""
        return Segments.of_rows(*(numbers[self.by_row()[0]], self.by_row()[1]))

    def shares(self) -> tuple[list[Share], IntArray | None]:
        """The rows of each source that is used, in the order of the numbers, and the index that brings them, one share
        after the other, into the order of the segments; None where they have it."""
        source, row = self.by_row()
        order = np.argsort(source, kind="stable")
        used, counts = np.unique(source, return_counts=True)
        ends = cumulated(counts)
        shares = [
            Share(int(number), row[order[begin:end]])
            for number, begin, end in zip(used, ends[:-1], ends[1:], strict=True)
        ]
        if bool((np.diff(source) >= 0).all()):
            return shares, None
        back = np.empty(order.size, np.int64)
        back[order] = np.arange(order.size)
        return shares, back


def _restored(*parts: Any) -> Segments:
    return Segments(*(part.astype(np.int64) for part in parts))
