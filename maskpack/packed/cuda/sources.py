"""How the decode kernel finds the words of an encoding: its arrays on the device, and what is beside them.

    Narrow(low, high, base)      --> FLAT    low, high, base; rows begin at the layout's bounds
    Runs(pieces, counts, values) --> LINEAR  values; the tables say which pieces a row has and where each begins

What the kernel needs beside the encoded bytes is made here, for each row or piece, never for each word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from maskpack.core.bits import Words
from maskpack.core.index import IntArray, cumulated
from maskpack.packed.arrays import byte_bounds, spread
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda.job_table import Source
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps, Whole
from maskpack.packed.references import Columns, Encoding, Repeated


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
    """The rows of an encoding.

    Attributes:
        number: how many.
        bounds: gives int64 [number + 1], where they begin and end in the words.
        table, unit: the same for the kernel, as in Source.
    """

    number: int
    bounds: Callable[[], IntArray]
    table: int
    unit: int


def is_flat(encoding: Encoding) -> bool:
    """Whether a word is found without knowing its row."""
    if isinstance(encoding, Columns):
        return all(map(is_flat, encoding.columns))
    return isinstance(encoding, Plain | Narrow)


def arrays_of(encoding: Encoding) -> list[Words]:
    """The arrays of an encoding that the kernel reads."""
    match encoding:
        case Plain():
            return [encoding.words]
        case Narrow():
            return [encoding.low, encoding.high]
        case Bits():
            return [encoding.bits, encoding.words]
        case Runs():
            return [encoding.values]
        case Ramp():
            return [encoding.firsts]
        case Steps():
            return [encoding.steps.values]
        case Sparse():
            return [encoding.places, encoding.words]
        case Repeated():
            return [encoding.index, *arrays_of(encoding.rows)]
        case Columns():
            return [array for column in encoding.columns for array in arrays_of(column)]
        case _:
            return []


class Sources:
    """Makes sources.

    Args:
        places: the first byte of each array in the body, by the id of the array.
        tables: where their tables go.
    """

    def __init__(self, places: Mapping[int, int], tables: Tables) -> None:
        self._places = places
        self._tables = tables

    def of(self, encoding: Whole | Repeated, rows: Rows) -> Source:
        match encoding:
            case Plain():
                return self._flat(rows, encoding.words, -1, 0)
            case Narrow():
                high = self._places[id(encoding.high)] if encoding.high.size else -1
                return self._flat(rows, encoding.low, high, encoding.base)
            case Bits():
                begins = self._tables.add(byte_bounds(rows.bounds()))
                data, more = self._places[id(encoding.bits)], self._places[id(encoding.words)]
                return Source(jobs.BITS, begins=begins, data=data, more=more)
            case Runs():
                return self._runs(encoding, rows, steps=False)
            case Ramp():
                return self._linear(encoding.firsts, number=encoding.step)
            case Steps():
                return self._runs(encoding.steps, rows, steps=True)
            case Sparse():
                return self._sparse(encoding)
            case Repeated():
                return self._repeated(encoding, rows)

    def _flat(self, rows: Rows, low: Words, high: int, base: int) -> Source:
        data = self._places[id(low)]
        return Source(jobs.FLAT, -1, 1, rows.table, rows.unit, data, low.itemsize, high, base)

    def _linear(self, values: Words, *, begins: int = -1, number: int = 0, sums: int = -1) -> Source:
        """One piece a row."""
        data, single = self._places[id(values)], int(values.size == 1)
        return Source(jobs.LINEAR, -1, 1, begins, 1, data, values.itemsize, -1, number, single, sums=sums)

    def _runs(self, runs: Runs, rows: Rows, *, steps: bool) -> Source:
        if runs.values.size <= 1 or not runs.counts.size:
            whole = runs.values.size <= 1 or runs.pieces.size == 1
            begins = -1 if whole else self._tables.add(cumulated(runs.pieces))
            return self._linear(runs.values, begins=begins, sums=0 if steps else -1)
        pieces = spread(runs.pieces, rows.number).astype(np.int64)
        places, inner = cumulated(pieces), cumulated(np.maximum(pieces - 1, 0))
        counts, sums = cumulated(runs.counts), -1
        if steps:
            others = np.delete(runs.values, places[1:][pieces > 0] - 1).astype(np.int64)
            sums = self._tables.add(cumulated(others * runs.counts))
        found = self._linear(runs.values, begins=self._tables.add(places), sums=sums)
        return found._replace(pieces=self._tables.add(inner), counts=self._tables.add(counts))

    def _sparse(self, sparse: Sparse) -> Source:
        data, more = self._places[id(sparse.places)], self._places[id(sparse.words)]
        begins, unit = -1, 1
        if sparse.per_row.size == 1:
            unit = int(sparse.per_row[0])
        else:
            begins = self._tables.add(cumulated(sparse.per_row))
        return Source(jobs.SPARSE, -1, 1, begins, unit, data, sparse.places.itemsize, more)

    def _repeated(self, repeated: Repeated, rows: Rows) -> Source:
        index = repeated.index
        lengths = np.zeros(int(index.max(initial=0)) + 1 if index.size else 0, np.int64)
        lengths[index] = np.diff(rows.bounds())
        bounds = cumulated(lengths)
        table = self._tables.add(bounds) if is_flat(repeated.rows) else -1
        source = self.of(repeated.rows, Rows(lengths.size, lambda: bounds, table, 1))
        return source._replace(rows=self._places[id(index)], row_size=index.itemsize)
