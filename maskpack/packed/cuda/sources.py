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


class Rows(NamedTuple):
    """The rows of an entry.

    Attributes:
        number: how many.
        bounds: gives int64 [number + 1], where they begin and end in the words.
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

    def columns(self, at: int) -> list[int]:
        """The entries of the columns of an entry; of one without columns, itself."""
        entry = self._table.entries[at]
        first = int(entry["first"])
        return [*range(first, first + int(entry["second"]))] if entry["kind"] == native.COLUMNS else [at]

    def is_flat(self, at: int) -> bool:
        """Whether a word is found without knowing its row."""
        kinds = self._table.entries["kind"][self.columns(at)]
        return bool(np.isin(kinds, (native.PLAIN, native.NARROW)).all())

    def of(self, at: int, rows: Rows) -> Source:
        entry = self._table.entries[at]
        kind, data, size = int(entry["kind"]), int(entry["a"]["at"]), int(entry["a"]["size"])
        if kind in (native.PLAIN, native.NARROW):
            return Source(jobs.FLAT, -1, rows.table, rows.unit, data, size, number=int(entry["number"]))
        if kind == native.BITMAP:
            begins = self._tables.add(cumulated((np.diff(rows.bounds()) + 7) // 8))
            return Source(jobs.BITMAP, begins=begins, data=data, more=int(entry["b"]["at"]))
        if kind == native.ARANGE:
            return self._linear(entry["a"], number=int(entry["number"]))
        if kind == native.SPARSE:
            begins = self._tables.add(cumulated(self._numbers(entry["a"], rows.number)))
            places = entry["b"]
            return Source(jobs.SPARSE, -1, begins, 1, int(places["at"]), int(places["size"]), int(entry["c"]["at"]))
        if kind == native.BLOCKS:
            return self._blocks(entry, rows)
        if kind == native.DICTIONARY:
            return self._dictionary(entry, rows)
        return self._stretches(entry, rows)

    def _numbers(self, place: Any, count: int) -> IntArray:
        """`count` unsigned numbers, of which equal ones are stored once."""
        return np.broadcast_to(self._array(place), (count,)).astype(np.int64)

    def _array(self, place: Any, kind: str = "u") -> Words:
        return self._table.array(place).view(f"{kind}{int(place['size'])}")

    def _linear(self, values: Any, *, begins: int = -1, number: int = 0, sums: int = -1) -> Source:
        """One piece a row."""
        data, size, single = int(values["at"]), int(values["size"]), int(values["count"] == 1)
        return Source(jobs.LINEAR, -1, begins, 1, data, size, -1, number, single, sums=sums)

    def _stretches(self, entry: Any, rows: Rows) -> Source:
        steps, values = entry["kind"] == native.DELTA, entry["c"]
        pieces = self._numbers(entry["a"], rows.number)
        places, inner = cumulated(pieces), cumulated(np.maximum(pieces - 1, 0))
        if not inner[-1]:
            begins = -1 if values["count"] <= 1 else self._tables.add(places)
            return self._linear(values, begins=begins, sums=0 if steps else -1)
        counts, sums = self._numbers(entry["b"], int(inner[-1])), -1
        if steps:
            all_values = np.broadcast_to(self._array(values, "i"), (int(places[-1]),)).astype(np.int64)
            sums = self._tables.add(cumulated(np.delete(all_values, places[1:][pieces > 0] - 1) * counts))
        found = self._linear(values, begins=self._tables.add(places), sums=sums)
        return found._replace(pieces=self._tables.add(inner), counts=self._tables.add(cumulated(counts)))

    def _blocks(self, entry: Any, rows: Rows) -> Source:
        lengths = np.diff(rows.bounds())
        blocks = -(-lengths // _BLOCK)
        begins = cumulated(blocks)
        counts: IntArray = np.full(int(begins[-1]), _BLOCK, np.int64)
        last = begins[1:][blocks > 0] - 1
        counts[last] = (lengths - (blocks - 1) * _BLOCK)[blocks > 0]
        starts = cumulated(_block_numbers(counts, self._array(entry["a"]).astype(np.int64) & ~_NEAR))[:-1]
        near = -1
        if entry["second"] >= 0:
            near = self._tables.add(np.array(self.of(int(entry["second"]), rows), np.int64))
        return Source(
            jobs.BLOCKS,
            begins=self._tables.add(begins),
            data=int(entry["a"]["at"]),
            more=int(entry["b"]["at"]),
            pieces=self._tables.add(starts * 512 + counts),
            numbers=int(entry["c"]["at"]),
            near=near,
        )

    def _dictionary(self, entry: Any, rows: Rows) -> Source:
        index = self._numbers(entry["a"], rows.number) - int(entry["number"])
        stored = int(index.max(initial=-1)) + 1
        items = int(entry["items"])
        bounds = cumulated(self._numbers(entry["b"], stored) * items)
        first = int(entry["first"])
        table = self._tables.add(bounds) if self.is_flat(first) else -1
        source = self.of(first, Rows(stored, lambda: bounds, table, 1))
        return source._replace(rows=self._tables.add(index))


def _block_numbers(counts: IntArray, bits: IntArray) -> IntArray:
    """The u32 numbers of blocks of `counts` words of `bits` bits."""
    in_lanes = counts >= _FEW
    places = np.where(in_lanes, (counts + _LANES - 1) // _LANES, counts)
    return (places * bits + 31) // 32 * np.where(in_lanes, _LANES, 1)
