"""Rows as an ordered list of segments: which source, the first row in it, how many.

    a[4:6] b[0:3] a[9:10]    source  a b a    start  4 0 9    count  2 3 1

Segments that follow each other in their source are merged. Nothing in this module knows what a source is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from maskpack.core.index import IntArray, cumulated, ranges


class Share(NamedTuple):
    """The rows that one source gives: the number of the source, and its rows in the order of the segments."""

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
        """The segments of rows, given the source of each and its row there, int64 [B] each."""
        return cls._longest(source, row, np.ones(row.size, np.int64))

    @classmethod
    def _longest(cls, source: IntArray, start: IntArray, count: IntArray) -> Segments:
        """The segments, with those that follow each other in their source merged."""
        begins = np.ones(start.size, np.bool_)
        begins[1:] = (source[1:] != source[:-1]) | (start[1:] != start[:-1] + count[:-1])
        first = np.flatnonzero(begins)
        return cls(source[first], start[first], np.diff(cumulated(count)[np.append(first, start.size)]))

    @staticmethod
    def cat(parts: Sequence[Segments], numbers: IntArray, sources: Sequence[int]) -> Segments:
        """One after the other. Part `i` has `sources[i]` sources, whose `numbers` follow those of the parts before."""
        columns = [(part.source, part.start, part.count) for part in parts]
        source, start, count = map(np.concatenate, zip(*columns, strict=True))
        first = cumulated(np.array(sources, np.int64))[:-1]
        place = np.repeat(first, [part.source.size for part in parts])
        return Segments._longest(numbers[place + source], start, count)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the narrowest unsigned integers: a shuffled view has a segment for each row."""
        parts = self.source, self.start, self.count
        return _restored, tuple(part.astype(np.min_scalar_type(int(part.max(initial=0)))) for part in parts)

    @cached_property
    def bounds(self) -> IntArray:
        """int64 [n + 1]: the number of rows before each segment, and of all rows."""
        return cumulated(self.count)

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    def by_row(self) -> tuple[IntArray, IntArray]:
        """The source of each row, and the row in it: int64 [B] each."""
        return np.repeat(self.source, self.count), ranges(self.start, self.count)

    def take(self, index: IntArray | slice) -> Segments:
        """Some rows, in the order given; a slice begins and ends at rows that there are. The time depends on these rows
        only."""
        if isinstance(index, slice):
            return self._between(index.start, index.stop)
        place = np.searchsorted(self.bounds, index, side="right") - 1
        return Segments.of_rows(self.source[place], self.start[place] + index - self.bounds[place])

    def _between(self, begin: int, end: int) -> Segments:
        if begin == end:
            return Segments.whole(0)
        first, last = int(self.bounds.searchsorted(begin, "right")) - 1, int(self.bounds.searchsorted(end))
        start: IntArray = np.array(self.start[first:last])
        count: IntArray = np.array(self.count[first:last])
        before = begin - int(self.bounds[first])
        start[0] += before
        count[0] -= before
        count[-1] -= int(self.bounds[last]) - end
        return Segments(self.source[first:last], start, count)

    def shares(self) -> tuple[list[Share], IntArray | None]:
        """The rows of each source that is used, by rising number, and the index that puts the concatenated shares into
        the order of the segments; None if they are in that order."""
        if self.source.size == 1:
            start = int(self.start[0])
            return [Share(int(self.source[0]), np.arange(start, start + int(self.count[0])))], None
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
