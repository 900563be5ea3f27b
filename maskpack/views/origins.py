"""Which rows these are: every packed batch is an origin, and its rows keep their numbers in it wherever they go.

    rows          a4 a5 a6 b0 b1      row 0 3    count 3 2    origin a b    number 4 0

Rows that follow each other in their origin are one entry. A row may be known by several origins, or by none.
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
"""The origin that each packed batch of this process is."""
_lock = RLock()
"""Held to read and write `_numbers`."""


class Difference(NamedTuple):
    """A row that others take for another one: its number, the number that it has for them in a common origin, and the
    number that it has here; None where it does not come from there."""

    row: int
    theirs: int
    ours: int | None


@dataclass(frozen=True, eq=False)
class Origins:
    """All int64 [n], sorted by origin and row: rows `row` to `row + count` are those of `origin` from `number` on."""

    row: IntArray
    count: IntArray
    origin: IntArray
    number: IntArray

    @classmethod
    def whole(cls, num_rows: int, batch: Any = None) -> Origins:
        """All rows of a batch, an object of which every view knows that it is the same; of a new one without it."""
        with _lock:
            origin = _new() if batch is None else _numbers.setdefault(batch, _new())
        runs = 1 if num_rows else 0
        begin = np.zeros(runs, np.int64)
        return cls(begin, np.full(runs, num_rows, np.int64), np.full(runs, origin, np.int64), begin)

    @classmethod
    def of(cls, row: IntArray, origin: IntArray, number: IntArray) -> Origins:
        """From a row, its origin and its number there, int64 [m] each. What says of one row that it is two of one
        origin is left out."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        """In unsigned integers as narrow as fit."""
        known, place = np.unique(self.origin, return_inverse=True)
        parts = self.row, self.count, place, self.number
        return _restored, (known, *(part.astype(np.min_scalar_type(int(part.max(initial=0)))) for part in parts))

    def by_row(self) -> tuple[IntArray, IntArray, IntArray]:
        """What `of` takes, sorted by origin and row."""
        number = ranges(self.number, self.count)
        return ranges(self.row, self.count), np.repeat(self.origin, self.count), number

    def take(self, index: IntArray) -> Origins:
        """Those of some rows, in the order given."""
        row, origin, number = self.by_row()
        order = np.argsort(row, kind="stable")
        begin, end = (np.searchsorted(row[order], index, side) for side in ("left", "right"))
        taken = order[ranges(begin, end - begin)]
        return Origins.of(np.repeat(np.arange(index.size), end - begin), origin[taken], number[taken])

    def difference(self, other: Origins) -> Difference | None:
        """The first row of `other` that comes from an origin of these rows and is not the same row here."""
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
        """What several know of the same rows."""
        columns = zip(*(part.by_row() for part in parts), strict=True)
        return Origins.of(*map(np.concatenate, columns))


def _new() -> int:
    """A number that no other process gives."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def _restored(known: IntArray, row: Any, count: Any, place: Any, number: Any) -> Origins:
    return Origins(row.astype(np.int64), count.astype(np.int64), known[place], number.astype(np.int64))


UNKNOWN = Origins(*(np.arange(0),) * 4)
"""Of rows whose origin nobody has said."""
