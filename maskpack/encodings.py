"""Lossless encodings of one field's values, one small class each.

Values are words: the bits of [T, *F] packed, or [B, *F] one-entry-a-row elements, as integers of the dtype's item size
in a numpy array. Every encoding can select rows, join with others of its kind, and give the words back. `offsets`
int64 [B + 1] are the row bounds of the values; None where each row is one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maskpack.rows import IntArray, cumulated, ranges
from maskpack.words import Words


@dataclass(frozen=True)
class Plain:
    """The words as they are."""

    words: Words

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one element, F."""
        return self.words.shape[1:]

    def slice(self, start: int, stop: int, offsets: IntArray | None) -> Plain:
        """Rows `start` to `stop`, a view."""
        if offsets is not None:
            start, stop = int(offsets[start]), int(offsets[stop])
        return Plain(self.words[start:stop])

    def take(self, rows: IntArray, offsets: IntArray | None) -> Plain:
        """Any rows in any order."""
        if offsets is not None:
            rows = ranges(offsets[rows], offsets[rows + 1] - offsets[rows])
        return Plain(self.words[rows])

    def decode(self, offsets: IntArray | None) -> Words:
        """The words; they may be a view of the encoding, and read-only."""
        return self.words


@dataclass(frozen=True)
class Runs:
    """Values [T] that are one constant on some runs and zero bits elsewhere: masks.

    Attributes:
        starts, counts: [N], the runs in each row's packed coordinates; unsigned integers as narrow as they fit.
        per_row: [B], runs of each row.
        value: (), the word on the runs.
    """

    starts: Words
    counts: Words
    per_row: Words
    value: Words

    @property
    def row_shape(self) -> tuple[int, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.counts.nbytes + self.per_row.nbytes + self.value.nbytes

    def slice(self, start: int, stop: int, offsets: IntArray | None) -> Runs:
        splits = cumulated(self.per_row)
        part = slice(int(splits[start]), int(splits[stop]))
        return Runs(self.starts[part], self.counts[part], self.per_row[start:stop], self.value)

    def take(self, rows: IntArray, offsets: IntArray | None) -> Runs:
        splits = cumulated(self.per_row)
        index = ranges(splits[rows], splits[rows + 1] - splits[rows])
        return Runs(self.starts[index], self.counts[index], self.per_row[rows], self.value)

    def decode(self, offsets: IntArray | None) -> Words:
        assert offsets is not None
        words = np.zeros(int(offsets[-1]), self.value.dtype)
        if self.counts.sum() == words.size:
            words[...] = self.value
        else:
            begins = np.repeat(offsets[:-1], self.per_row) + self.starts
            words[ranges(begins, self.counts.astype(np.int64))] = self.value
        return words

    @classmethod
    def encode(cls, words: Words, offsets: IntArray) -> Runs | None:
        """The runs of `words` [T]; None if a second value occurs."""
        if words.ndim != 1 or not words.size:
            return None
        on = words != 0
        value = words[int(on.argmax())]
        if not np.array_equal(words[on], np.broadcast_to(value, int(on.sum()))):
            return None
        row_starts = np.zeros(words.size + 1, np.bool_)
        row_starts[offsets] = True
        begin, end = on.copy(), on.copy()
        begin[1:] &= ~on[:-1] | row_starts[1:-1]
        end[:-1] &= ~on[1:] | row_starts[1:-1]
        begins, ends = np.flatnonzero(begin), np.flatnonzero(end)
        rows = np.searchsorted(offsets, begins, side="right") - 1
        per_row = np.bincount(rows, minlength=offsets.size - 1)
        counts = ends - begins + 1
        return cls(_narrow(begins - offsets[rows]), _narrow(counts), _narrow(per_row), np.asarray(value))


Encoding = Plain | Runs


def encode(words: Words, offsets: IntArray | None, hints: Sequence[str]) -> Encoding:
    """The smallest of the plain values and the encodings that the hints name."""
    plain = Plain(words)
    if "runs" in hints and offsets is not None:
        runs = Runs.encode(words, offsets)
        if runs is not None and runs.nbytes < plain.nbytes:
            return runs
    return plain


def join(parts: Sequence[Encoding], offsets: Sequence[IntArray | None]) -> Encoding:
    """The rows of several encodings, one after the other; different kinds meet as plain words."""
    first = parts[0]
    if isinstance(first, Runs) and all(isinstance(part, Runs) and part.value == first.value for part in parts):
        runs = [part for part in parts if isinstance(part, Runs)]
        return Runs(
            np.concatenate([part.starts for part in runs]),
            np.concatenate([part.counts for part in runs]),
            np.concatenate([part.per_row for part in runs]),
            first.value,
        )
    return Plain(np.concatenate([part.decode(bounds) for part, bounds in zip(parts, offsets, strict=True)]))


def _narrow(values: npt.NDArray[Any]) -> Words:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
