"""Lossless encodings of one field's values, one small class each.

Values are words: the bits of the elements as integers of their item size, in one flat array [n]; `bounds` int64 [B + 1]
are the places where rows begin and end in it. Every encoding selects rows and joins with others of its kind as it is,
and gives the words back bit for bit; arithmetic wraps, so the words of floats are numbers like any other.

    Plain      3 9 9 4        the words
    Narrow     7000 7001      integers in 1, 2, 3 or 4 bytes, above a base
    Bits       0 0 1 0        two different words, a bit each
    Runs       5 5 5 0 0      pieces of equal words: masks, one value a row
    Ramp       4 5 6 7        a first word a row, then equal steps
    Steps      0 1 2 2 2 3    runs of equal steps
    Sparse     0 0 0 8 0      places and words of what is not 0

An array whose entries are all equal may be stored as its first entry alone (arrays.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maskpack.core.bits import Words
from maskpack.core.index import IntArray, cumulated, ranges
from maskpack.packed.arrays import (
    UNSIGNED,
    byte_bounds,
    bytes_for,
    one,
    rows_of,
    small,
    spread,
    taken,
    trimmed,
    wrong,
    wrong_counts,
    wrong_numbers,
)


@dataclass(frozen=True)
class Plain:
    """The words as they are."""

    words: Words

    def slice(self, start: int, stop: int, bounds: IntArray) -> Plain:
        return Plain(self.words[bounds[start] : bounds[stop]])

    def take(self, rows: IntArray, bounds: IntArray) -> Plain:
        return Plain(taken(self.words, bounds, rows))

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        """The words themselves, which may be read-only."""
        return self.words

    @classmethod
    def join(cls, parts: Sequence[Plain], bounds: Sequence[IntArray]) -> Plain:
        return cls(np.concatenate([part.words for part in parts]))

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        return wrong(self.words, "words", int(bounds[-1]), dtype)


@dataclass(frozen=True)
class Narrow:
    """Integers of a small range: `base` plus an unsigned number of 1, 2 or 4 bytes, or of 3 in two arrays.

    Attributes:
        low: [n], the lower bytes.
        high: [n], the third byte; empty where there is none.
        base: what is added.
    """

    low: Words
    high: Words
    base: int

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Narrow | None:
        if not words.size or words.itemsize == 1:
            return None
        least, most = int(words.min()), int(words.max())
        size = bytes_for(most - least)
        base = 0 if least >= 0 and bytes_for(most) == size else least
        if size >= words.itemsize:
            return None
        above = words - words.dtype.type(base) if base else words
        if size == 3:
            return cls(above.astype(np.uint16), (above >> 16).astype(np.uint8), base)
        return cls(above.astype(UNSIGNED[size]), np.zeros(0, np.uint8), base)

    def slice(self, start: int, stop: int, bounds: IntArray) -> Narrow:
        part = slice(bounds[start], bounds[stop])
        return Narrow(self.low[part], self.high[part], self.base)

    def take(self, rows: IntArray, bounds: IntArray) -> Narrow:
        high = taken(self.high, bounds, rows) if self.high.size else self.high
        return Narrow(taken(self.low, bounds, rows), high, self.base)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        above = self.low
        if self.high.size:
            above = self.high.astype(np.uint32)
            above <<= 16
            above |= self.low
        words = above.astype(UNSIGNED[dtype.itemsize])
        if self.base:
            words += np.asarray(self.base, np.int64).astype(words.dtype)
        return words.view(dtype)

    @classmethod
    def join(cls, parts: Sequence[Narrow], bounds: Sequence[IntArray]) -> Narrow | None:
        parts = [part for part in parts if part.low.size] or parts[:1]
        forms = {(part.base, part.low.dtype, bool(part.high.size)) for part in parts}
        if len(forms) > 1:
            return None
        low, high = [part.low for part in parts], [part.high for part in parts]
        return cls(np.concatenate(low), np.concatenate(high), parts[0].base)

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        n = int(bounds[-1])
        if self.low.dtype.kind != "u" or self.low.itemsize >= dtype.itemsize or not -(2**63) <= self.base < 2**63:
            return f"low is {self.low.dtype} above {self.base}"
        if self.high.size and self.low.dtype != np.uint16:
            return f"a third byte beside {self.low.dtype}"
        return wrong(self.low, "low", n) or (wrong(self.high, "high", n, np.uint8) if self.high.size else None)


@dataclass(frozen=True)
class Bits:
    """Two different words, a bit each; every row begins with a new byte.

    Attributes:
        bits: uint8, the first element of a row in the highest bit.
        words: [2], the words of 0 and of 1.
    """

    bits: Words
    words: Words

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Bits | None:
        if not words.size:
            return None
        low, high = words.min(), words.max()
        on = words == high
        if int(np.count_nonzero(on)) + int(np.count_nonzero(words == low)) != words.size * (1 + (low == high)):
            return None
        starts = 8 * byte_bounds(bounds)
        line = np.zeros(int(starts[-1]), np.bool_)
        line[ranges(starts[:-1], np.diff(bounds))] = on
        return cls(np.packbits(line), np.array([low, high]))

    def slice(self, start: int, stop: int, bounds: IntArray) -> Bits:
        places = byte_bounds(bounds)
        return Bits(self.bits[places[start] : places[stop]], self.words)

    def take(self, rows: IntArray, bounds: IntArray) -> Bits:
        return Bits(taken(self.bits, byte_bounds(bounds), rows), self.words)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        line = np.unpackbits(self.bits)
        starts = 8 * byte_bounds(bounds)
        return self.words[line[ranges(starts[:-1], np.diff(bounds))]]

    @classmethod
    def join(cls, parts: Sequence[Bits], bounds: Sequence[IntArray]) -> Bits | None:
        if any(not np.array_equal(part.words, parts[0].words) for part in parts):
            return None
        return cls(np.concatenate([part.bits for part in parts]), parts[0].words)

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        return wrong(self.bits, "bits", int(byte_bounds(bounds)[-1]), np.uint8) or wrong(self.words, "words", 2, dtype)


@dataclass(frozen=True)
class Runs:
    """Pieces of equal words.

    Attributes:
        pieces: [B], pieces of each row; 0 for an empty row only.
        counts: lengths of all pieces but the last of each row.
        values: one word a piece, in a signed integer as narrow as fits.
    """

    pieces: Words
    counts: Words
    values: Words

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Runs | None:
        """None where pieces are shorter than two words on average."""
        if not words.size:
            return None
        real = np.diff(bounds) > 0
        if words.strides == (0,):  # one word, many times
            return cls(one(real.astype(np.uint8)), np.zeros(0, np.uint8), trimmed(words[:1]))
        change = np.empty(words.size, np.bool_)
        np.not_equal(words[1:], words[:-1], out=change[1:])
        change[bounds[:-1][real]] = True
        if 2 * int(np.count_nonzero(change)) > words.size + 2 * len(real):
            return None
        begins = np.flatnonzero(change)
        places = np.searchsorted(begins, bounds)
        lengths = np.diff(begins, append=words.size)
        counts = np.delete(lengths, places[1:][real] - 1)
        return cls(one(small(np.diff(places))), small(counts), one(trimmed(words[begins])))

    def slice(self, start: int, stop: int, bounds: IntArray) -> Runs:
        places, inner = self._places(bounds)
        values = self.values if self.values.size == 1 else self.values[places[start] : places[stop]]
        return Runs(rows_of(self.pieces, slice(start, stop)), self.counts[inner[start] : inner[stop]], values)

    def take(self, rows: IntArray, bounds: IntArray) -> Runs:
        places, inner = self._places(bounds)
        values = self.values if self.values.size == 1 else taken(self.values, places, rows)
        return Runs(rows_of(self.pieces, rows), taken(self.counts, inner, rows), values)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        values = self.values.astype(dtype)
        if values.size == 1:
            return np.full(int(bounds[-1]), values[0])
        rows = np.diff(bounds)
        if not self.counts.size:
            return np.repeat(values, rows[rows > 0])
        return np.repeat(values, self._lengths(bounds))

    @classmethod
    def join(cls, parts: Sequence[Runs], bounds: Sequence[IntArray]) -> Runs:
        full = [(part, spread(part.pieces, own.size - 1)) for part, own in zip(parts, bounds, strict=True)]
        pieces = np.concatenate([pieces for _, pieces in full])
        values = [spread(part.values, int(pieces.sum(dtype=np.int64))) for part, pieces in full]
        return cls(one(pieces), np.concatenate([part.counts for part in parts]), one(np.concatenate(values)))

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        rows = np.diff(bounds)
        found = wrong_counts(self.pieces, "pieces", rows.size) or wrong_counts(self.counts, "counts")
        if found:
            return found
        pieces = spread(self.pieces, rows.size)
        if not np.array_equal(pieces == 0, rows == 0) or (rows < pieces).any():
            return "rows have other numbers of pieces than words"
        places, inner = self._places(bounds)
        found = wrong(self.counts, "counts", int(inner[-1])) or wrong_numbers(
            self.values, "values", int(places[-1]), dtype
        )
        if found:
            return found
        if self.counts.size and (int(self.counts.min()) < 1 or int(self._lengths(bounds).min()) < 1):
            return "a piece has no words"
        return None

    def _places(self, bounds: IntArray) -> tuple[IntArray, IntArray]:
        """Of the rows in `values`, and in `counts`."""
        pieces = spread(self.pieces, bounds.size - 1).astype(np.int64)
        return cumulated(pieces), cumulated(np.maximum(pieces - 1, 0))

    def _lengths(self, bounds: IntArray) -> IntArray:
        """int64, of every piece."""
        places, inner = self._places(bounds)
        real = np.diff(places) > 0
        last = places[1:][real] - 1
        lengths = np.zeros(int(places[-1]), np.int64)
        others = np.ones(lengths.size, np.bool_)
        others[last] = False
        lengths[others] = self.counts
        sums = cumulated(self.counts.astype(np.int64))
        lengths[last] = (np.diff(bounds) - (sums[inner[1:]] - sums[inner[:-1]]))[real]
        return lengths


@dataclass(frozen=True)
class Ramp:
    """A first word a row, then equal steps: positions.

    Attributes:
        firsts: [B], in a signed integer as narrow as fits.
        step: what each word of a row adds to the one before.
    """

    firsts: Words
    step: int

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Ramp | None:
        rows = np.diff(bounds)
        long = np.flatnonzero(rows > 1)
        if not long.size:
            return None
        first = int(bounds[long[0]])
        unsigned = words.view(UNSIGNED[words.itemsize])
        steps = np.subtract(unsigned[1:], unsigned[:-1])
        step = steps[first]
        inner = bounds[1:-1]
        steps[inner[(inner > 0) & (inner < words.size)] - 1] = step
        if not bool((steps == step).all()):
            return None
        firsts = np.full(rows.size, words[first])
        firsts[rows > 0] = words[bounds[:-1][rows > 0]]
        return cls(one(trimmed(firsts)), int(step.view(f"i{words.itemsize}")))

    def slice(self, start: int, stop: int, bounds: IntArray) -> Ramp:
        return Ramp(rows_of(self.firsts, slice(start, stop)), self.step)

    def take(self, rows: IntArray, bounds: IntArray) -> Ramp:
        return Ramp(rows_of(self.firsts, rows), self.step)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        kind, rows = UNSIGNED[dtype.itemsize], np.diff(bounds)
        step = np.asarray(self.step, np.int64).astype(kind)
        words = np.arange(int(bounds[-1]), dtype=kind)
        if self.step != 1:
            words *= step
        shift = spread(self.firsts, rows.size).astype(np.int64).astype(kind) - bounds[:-1].astype(kind) * step
        words += np.repeat(shift, rows)
        return words.view(dtype)

    @classmethod
    def join(cls, parts: Sequence[Ramp], bounds: Sequence[IntArray]) -> Ramp | None:
        if any(part.step != parts[0].step for part in parts):
            return None
        firsts = [spread(part.firsts, own.size - 1) for part, own in zip(parts, bounds, strict=True)]
        return cls(one(np.concatenate(firsts)), parts[0].step)

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        if not -(2**63) <= self.step < 2**63:
            return f"step is {self.step}"
        return wrong_numbers(self.firsts, "firsts", bounds.size - 1, dtype)


@dataclass(frozen=True)
class Steps:
    """Runs of equal steps: `steps` are the runs of the first word of each row and of the differences behind it."""

    steps: Runs

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Steps | None:
        if not words.size:
            return None
        steps = np.array(words, UNSIGNED[words.itemsize])
        steps[1:] -= words.view(steps.dtype)[:-1]
        starts = bounds[:-1][np.diff(bounds) > 0]
        steps[starts] = words[starts].view(steps.dtype)
        runs = Runs.encode(steps.view(words.dtype), bounds)
        return None if runs is None else cls(runs)

    def slice(self, start: int, stop: int, bounds: IntArray) -> Steps:
        return Steps(self.steps.slice(start, stop, bounds))

    def take(self, rows: IntArray, bounds: IntArray) -> Steps:
        return Steps(self.steps.take(rows, bounds))

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        sums = self.steps.decode(dtype, bounds).view(UNSIGNED[dtype.itemsize])
        np.cumsum(sums, dtype=sums.dtype, out=sums)
        before = np.zeros(bounds.size - 1, sums.dtype)
        inside = bounds[:-1] > 0
        before[inside] = sums[bounds[:-1][inside] - 1]
        sums -= np.repeat(before, np.diff(bounds))
        return sums.view(dtype)

    @classmethod
    def join(cls, parts: Sequence[Steps], bounds: Sequence[IntArray]) -> Steps:
        return cls(Runs.join([part.steps for part in parts], bounds))

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        return self.steps.problem(dtype, bounds)


@dataclass(frozen=True)
class Sparse:
    """What is not 0, by its place.

    Attributes:
        per_row: [B], how many there are in each row.
        places: where in their row, rising.
        words: the words there.
    """

    per_row: Words
    places: Words
    words: Words

    @classmethod
    def encode(cls, words: Words, bounds: IntArray) -> Sparse | None:
        if 2 * int(np.count_nonzero(words)) > words.size:
            return None
        where = np.flatnonzero(words)
        splits = np.searchsorted(where, bounds)
        per_row = np.diff(splits)
        return cls(one(small(per_row)), small(where - np.repeat(bounds[:-1], per_row)), words[where])

    def slice(self, start: int, stop: int, bounds: IntArray) -> Sparse:
        splits = self._splits(bounds)
        part = slice(splits[start], splits[stop])
        return Sparse(rows_of(self.per_row, slice(start, stop)), self.places[part], self.words[part])

    def take(self, rows: IntArray, bounds: IntArray) -> Sparse:
        splits = self._splits(bounds)
        places, words = taken(self.places, splits, rows), taken(self.words, splits, rows)
        return Sparse(rows_of(self.per_row, rows), places, words)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        words = np.zeros(int(bounds[-1]), dtype)
        words[np.repeat(bounds[:-1], np.diff(self._splits(bounds))) + self.places] = self.words
        return words

    @classmethod
    def join(cls, parts: Sequence[Sparse], bounds: Sequence[IntArray]) -> Sparse:
        per_row = [spread(part.per_row, own.size - 1) for part, own in zip(parts, bounds, strict=True)]
        places, words = [part.places for part in parts], [part.words for part in parts]
        return cls(one(np.concatenate(per_row)), np.concatenate(places), np.concatenate(words))

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        found = wrong_counts(self.per_row, "per_row", bounds.size - 1) or wrong_counts(self.places, "places")
        if found:
            return found
        splits = self._splits(bounds)
        found = wrong(self.places, "places", int(splits[-1])) or wrong(self.words, "words", int(splits[-1]), dtype)
        if found:
            return found
        row = np.repeat(np.arange(bounds.size - 1), np.diff(splits))
        if (self.places >= np.diff(bounds)[row]).any():
            return "a place is outside its row"
        if ((row[1:] == row[:-1]) & (self.places[1:] <= self.places[:-1])).any():
            return "places do not rise"
        return None

    def _splits(self, bounds: IntArray) -> IntArray:
        return cumulated(spread(self.per_row, bounds.size - 1))


Whole = Plain | Narrow | Bits | Runs | Ramp | Steps | Sparse
"""An encoding that stands by itself."""
