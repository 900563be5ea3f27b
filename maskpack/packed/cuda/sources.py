"""How the decode kernel finds the words of an entry of a table: its arrays in the body, and tables beside them.

    narrow                --> FLAT    data, number; rows begin at the layout's bounds
    rle                   --> LINEAR  words; the tables say which stretches a row has and where each begins
    blocks                --> BLOCKS  bits; a table says where each block begins; the source of a field that is near

What the kernel needs beside the body is made here, for each row, stretch or block, never for each word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from maskpack.core import native
from maskpack.core.bits import Words
from maskpack.core.index import IntArray, cumulated
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda.job_table import Source
from maskpack.packed.table import Table

_BLOCK, _FEW, _LANES, _NEAR = 256, 64, 8, 128
"""Words of a block; words from which on a block has lanes; lanes; the bit of blocks of distances. (core.c)"""


class Tables:
    """int64 tables, one behind the other."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[tuple[int, IntArray]] = []

    def add(self, table: IntArray) -> int:
        """The place of a new table."""
        begin = self.size
        self._parts.append((begin, table))
        self.size = begin + table.size
        return begin

    def write(self, out: IntArray) -> None:
        """The tables to int64 [size]."""
        for begin, table in self._parts:
            out[begin : begin + table.size] = table


class Place(NamedTuple):
    """PLACE of core/native.py in plain numbers, which are read twenty times as fast."""

    at: int
    size: int
    numbers: int


class Entry(NamedTuple):
    """ENTRY of core/native.py in plain numbers."""

    kind: int
    layout: int
    items: int
    size: int
    number: int
    first: int
    second: int
    a: Place
    b: Place
    c: Place


def entries_of(table: Table) -> list[Entry]:
    """The entries of a table, read once."""
    known: list[Entry] | None = table.__dict__.get("_plain_entries")
    if known is None:
        lines: list[Any] = table.entries.tolist()
        known = [Entry(*line[:7], *map(Place._make, line[7:])) for line in lines]
        table.__dict__["_plain_entries"] = known
    return known


class Rows(NamedTuple):
    """The rows of an entry.

    Attributes:
        number: how many.
        bounds: gives int64 [number + 1], where they begin and end in the words; equal ones are one array.
        table, unit: the same for the kernel, as in Source.
    """

    number: int
    bounds: Callable[[], IntArray]
    table: int
    unit: int


class Sources:
    """Makes sources of the entries of a table, whose numbers go to `tables`."""

    def __init__(self, table: Table, tables: Tables) -> None:
        self._table = table
        self._tables = tables
        self._entries = entries_of(table)
        self._blocks_of_rows: dict[int, tuple[IntArray, int, IntArray, IntArray, IntArray]] = {}

    def columns(self, at: int) -> list[int]:
        """The entries of the columns of an entry; of one without columns, itself."""
        entry = self._entries[at]
        return [*range(entry.first, entry.first + entry.second)] if entry.kind == native.COLUMNS else [at]

    def is_flat(self, at: int) -> bool:
        """Whether a word is found without knowing its row."""
        return all(self._entries[column].kind in (native.PLAIN, native.NARROW) for column in self.columns(at))

    def of(self, at: int, rows: Rows) -> Source:
        entry = self._entries[at]
        kind, data, size = entry.kind, entry.a.at, entry.a.size
        if kind in (native.PLAIN, native.NARROW):
            return Source(jobs.FLAT, -1, rows.table, rows.unit, data, size, number=entry.number)
        if kind == native.BITMAP:
            begins = self._tables.add(cumulated((np.diff(rows.bounds()) + 7) // 8))
            return Source(jobs.BITMAP, begins=begins, data=data, more=entry.b.at)
        if kind == native.ARANGE:
            return self._linear(entry.a, number=entry.number)
        if kind == native.SPARSE:
            begins = self._tables.add(cumulated(self._numbers(entry.a, rows.number)))
            return Source(jobs.SPARSE, -1, begins, 1, entry.b.at, entry.b.size, entry.c.at)
        if kind == native.BLOCKS:
            return self._blocks(entry, rows)
        if kind == native.DICTIONARY:
            return self._dictionary(entry, rows)
        return self._stretches(entry, rows)

    def _numbers(self, place: Place, count: int) -> IntArray:
        """`count` unsigned numbers, of which equal ones are stored once."""
        return np.broadcast_to(self._array(place), (count,)).astype(np.int64)

    def _array(self, place: Place, kind: str = "u") -> Words:
        return self._table.body[place.at : place.at + place.size * place.numbers].view(f"{kind}{place.size}")

    def _linear(self, values: Place, *, begins: int = -1, number: int = 0, sums: int = -1) -> Source:
        """One piece a row."""
        single = int(values.numbers == 1)
        return Source(jobs.LINEAR, -1, begins, 1, values.at, values.size, -1, number, single, sums=sums)

    def _stretches(self, entry: Entry, rows: Rows) -> Source:
        steps, values = entry.kind == native.DELTA, entry.c
        pieces = self._numbers(entry.a, rows.number)
        places, inner = cumulated(pieces), cumulated(np.maximum(pieces - 1, 0))
        if not inner[-1]:
            begins = -1 if values.numbers <= 1 else self._tables.add(places)
            return self._linear(values, begins=begins, sums=0 if steps else -1)
        counts, sums = self._numbers(entry.b, int(inner[-1])), -1
        if steps:
            all_values = np.broadcast_to(self._array(values, "i"), (int(places[-1]),)).astype(np.int64)
            sums = self._tables.add(cumulated(np.delete(all_values, places[1:][pieces > 0] - 1) * counts))
        found = self._linear(values, begins=self._tables.add(places), sums=sums)
        return found._replace(pieces=self._tables.add(inner), counts=self._tables.add(cumulated(counts)))

    def _blocks(self, entry: Entry, rows: Rows) -> Source:
        begins, counts, places, times = self._block_counts(rows.bounds())
        bits = self._array(entry.a).astype(np.int64) & ~_NEAR
        starts = cumulated((places * bits + 31) // 32 * times)[:-1]
        near = -1
        if entry.second >= 0:
            near = self._tables.add(np.array(self.of(entry.second, rows), np.int64))
        return Source(
            jobs.BLOCKS,
            begins=begins,
            data=entry.a.at,
            more=entry.b.at,
            pieces=self._tables.add(starts * 512 + counts),
            numbers=entry.c.at,
            near=near,
        )

    def _block_counts(self, bounds: IntArray) -> tuple[int, IntArray, IntArray, IntArray]:
        """Of the blocks of rows: the table of the first block of each row, and the words of each block. Its numbers
        take `(places * bits + 31) // 32 * times` u32. Fields with the same rows share them."""
        known = self._blocks_of_rows.get(id(bounds))
        if known is None:
            lengths = np.diff(bounds)
            blocks = -(-lengths // _BLOCK)
            begins = cumulated(blocks)
            counts: IntArray = np.full(int(begins[-1]), _BLOCK, np.int64)
            filled = blocks > 0
            counts[begins[1:][filled] - 1] = (lengths - (blocks - 1) * _BLOCK)[filled]
            in_lanes = counts >= _FEW
            places = np.where(in_lanes, (counts + _LANES - 1) // _LANES, counts)
            known = bounds, self._tables.add(begins), counts, places, np.where(in_lanes, _LANES, 1)
            self._blocks_of_rows[id(bounds)] = known  # keeps the bounds, so that their id stays theirs
        return known[1:]

    def _dictionary(self, entry: Entry, rows: Rows) -> Source:
        index = self._numbers(entry.a, rows.number) - entry.number
        stored = int(index.max(initial=-1)) + 1
        bounds = cumulated(self._numbers(entry.b, stored) * entry.items)
        table = self._tables.add(bounds) if self.is_flat(entry.first) else -1
        source = self.of(entry.first, Rows(stored, lambda: bounds, table, 1))
        return source._replace(rows=self._tables.add(index))
