"""Which rows of which packed batch some rows stand for: a packed batch is an origin, and its rows keep their numbers.

    rows          a4 a5 a6 b0 b1      row 0 3    count 3 2    origin a b    number 4 0

Rows that follow each other in their origin share one entry. A row may have several origins, or none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from maskpack.core.index import IntArray, ranges

_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The origin number of each packed batch of this process."""
_lock = RLock()
"""Held to read and write `_numbers`."""


class Difference(NamedTuple):
    """A row that stands for different rows of an origin in two batches: its number, the row of the origin in the other
    batch, and the row of the origin in this batch; None if it does not come from that origin here."""

    row: int
    theirs: int
    ours: int | None


@dataclass(frozen=True, eq=False)
class Origins:
    """All int64 [n], sorted by origin and row: rows `row` to `row + count` are rows of `origin`, from `number` on."""

    row: IntArray
    count: IntArray
    origin: IntArray
    number: IntArray

    @classmethod
    def whole(cls, num_rows: int, batch: Any = None) -> Origins:
        """All rows of an origin: of the one that stands for the object `batch`, or of a new one if it is None."""
        with _lock:
            origin = _new() if batch is None else _numbers.setdefault(batch, _new())
        n = 1 if num_rows else 0
        begin = np.zeros(n, np.int64)
        return cls(begin, np.full(n, num_rows, np.int64), np.full(n, origin, np.int64), begin)

    @classmethod
    def of(cls, row: IntArray, origin: IntArray, number: IntArray) -> Origins:
        """From rows, the origin of each and its number there, int64 [m] each. Entries that give one row two numbers in
        one origin are left out."""
        order = np.lexsort((number, row, origin))
        row, origin, number = row[order], origin[order], number[order]
        first = np.ones(row.size, np.bool_)
        first[1:] = (row[1:] != row[:-1]) | (origin[1:] != origin[:-1])
        groups = np.cumsum(first) - 1
        once = np.ones(int(first.sum()), np.bool_)
        once[groups[number != number[first][groups]]] = False
        row, origin, number = (part[first][once] for part in (row, origin, number))
        begins = np.ones(row.size, np.bool_)
        begins[1:] = (origin[1:] != origin[:-1]) | (np.diff(row) != 1) | (np.diff(number) != 1)
        at = np.flatnonzero(begins)
        return cls(row[at], np.diff(np.append(at, row.size)), origin[at], number[at])

    def by_row(self) -> tuple[IntArray, IntArray, IntArray]:
        """The arguments of `of`: row, origin and number, sorted by origin and row."""
        number = ranges(self.number, self.count)
        return ranges(self.row, self.count), np.repeat(self.origin, self.count), number

    def take(self, index: IntArray) -> Origins:
        """The origins of some rows, in the order given."""
        row, origin, number = self.by_row()
        order = np.argsort(row, kind="stable")
        begin, end = (np.searchsorted(row[order], index, side) for side in ("left", "right"))
        taken = order[ranges(begin, end - begin)]
        return Origins.of(np.repeat(np.arange(index.size), end - begin), origin[taken], number[taken])

    def difference(self, other: Origins) -> Difference | None:
        """The first row of `other` that has a common origin with these rows and is another row here; None if none."""
        (row, origin, number), theirs = self.by_row(), other.by_row()
        known, rank = np.unique(origin, return_inverse=True)
        shared = np.isin(theirs[1], known)
        if not shared.any():
            return None
        their_row, their_origin, their_number = (part[shared] for part in theirs)
        rows = 1 + int(max(row.max(initial=0), their_row.max(initial=0)))
        keys = rank * rows + row
        wanted = np.searchsorted(known, their_origin) * rows + their_row
        at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        there = keys[at] == wanted
        wrong = np.flatnonzero(~there | (number[at] != their_number))
        if not wrong.size:
            return None
        first = wrong[np.argmin(their_row[wrong])]
        ours = int(number[at[first]]) if there[first] else None
        return Difference(int(their_row[first]), int(their_number[first]), ours)

    @staticmethod
    def together(parts: Sequence[Origins]) -> Origins:
        """All origins that several know of the same rows."""
        columns = zip(*(part.by_row() for part in parts), strict=True)
        return Origins.of(*map(np.concatenate, columns))


def _new() -> int:
    """A random number, so that no other process gives the same one."""
    return int.from_bytes(os.urandom(8), "little") >> 1


UNKNOWN = Origins(*(np.arange(0),) * 4)
"""The origins of rows that have none."""
