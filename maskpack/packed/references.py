"""Encodings that take words from elsewhere: from other rows, other columns or other fields.

    Repeated   rows a a b a      each different row once, and which one it is
    Columns    [n, k]            every column in its own encoding: M-RoPE positions
    Same       = field           nothing: another field has the same words
    Joined     = head ‖ tail     nothing: each row is the row of one field, then that of another

As in encodings.py, words are flat and `bounds` are those of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np

from maskpack.core.bits import Words
from maskpack.core.index import IntArray, cumulated
from maskpack.fields.registry import Path
from maskpack.packed import encodings
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps, Whole


class Field(NamedTuple):
    """The words of a whole field, flat, and the bounds of its rows in them."""

    words: Words
    bounds: IntArray


Source = Callable[[Path], Field]
"""Gives the words of another field of the batch."""


@dataclass(frozen=True)
class Repeated:
    """Each different row once.

    Attributes:
        index: [B], the stored row of each row.
        rows: the stored rows, each used by some row.
    """

    index: Words
    rows: Whole

    def slice(self, start: int, stop: int, bounds: IntArray) -> Repeated:
        return self.take(np.arange(start, stop), bounds)

    def take(self, rows: IntArray, bounds: IntArray) -> Repeated:
        kept, index = np.unique(self.index[rows], return_inverse=True)
        own = self._bounds(bounds)
        if kept.size and int(kept[-1] - kept[0]) == kept.size - 1:
            stored = self.rows.slice(int(kept[0]), int(kept[-1]) + 1, own)
        else:
            stored = self.rows.take(kept.astype(np.int64), own)
        return Repeated(index.astype(np.min_scalar_type(max(kept.size - 1, 0))), stored)

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        own = self._bounds(bounds)
        words = self.rows.decode(dtype, own)
        rows = self.index.astype(np.int64)
        pieces: list[Words] = [words[a:b] for a, b in zip(own[rows].tolist(), own[rows + 1].tolist(), strict=True)]
        return np.concatenate(pieces or [words[:0]])

    @classmethod
    def join(cls, parts: Sequence[Repeated], bounds: Sequence[IntArray]) -> Repeated | None:
        """Rows that several parts store stay there as often."""
        owns = [part._bounds(own) for part, own in zip(parts, bounds, strict=True)]
        rows = join_whole([part.rows for part in parts], owns)
        if rows is None:
            return None
        ends = np.cumsum([own.size - 1 for own in owns])
        index = [
            part.index.astype(np.int64) + (end - own.size + 1) for part, own, end in zip(parts, owns, ends, strict=True)
        ]
        line = np.concatenate(index)
        return cls(line.astype(np.min_scalar_type(int(line.max(initial=0)))), rows)

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        rows = np.diff(bounds)
        if self.index.shape != rows.shape or self.index.dtype.kind != "u":
            return f"index is {self.index.dtype} {self.index.shape}; expected unsigned integers ({rows.size},)"
        count = int(self.index.max(initial=0)) + 1 if rows.size else 0
        if count > rows.size:
            return f"the index reaches row {count - 1} for {rows.size} rows"
        own = self._bounds(bounds)
        if not np.array_equal(np.diff(own)[self.index], rows):
            return "rows with one stored row have different lengths"
        used = np.zeros(count, np.bool_)
        used[self.index] = True
        return self.rows.problem(dtype, own) if used.all() else "a stored row is used by no row"

    def _bounds(self, bounds: IntArray) -> IntArray:
        """Of the stored rows."""
        lengths = np.zeros(int(self.index.max()) + 1 if self.index.size else 0, np.int64)
        lengths[self.index] = np.diff(bounds)
        return cumulated(lengths)


@dataclass(frozen=True)
class Columns:
    """Elements of k words each: the words at one place of the element are a column, encoded by itself."""

    columns: tuple[Whole, ...]

    def slice(self, start: int, stop: int, bounds: IntArray) -> Columns:
        own = bounds // len(self.columns)
        return Columns(tuple(column.slice(start, stop, own) for column in self.columns))

    def take(self, rows: IntArray, bounds: IntArray) -> Columns:
        own = bounds // len(self.columns)
        return Columns(tuple(column.take(rows, own) for column in self.columns))

    def decode(self, dtype: np.dtype[Any], bounds: IntArray) -> Words:
        k = len(self.columns)
        own = bounds // k
        words = np.empty((int(own[-1]), k), dtype)
        for place, column in enumerate(self.columns):
            words[:, place] = column.decode(dtype, own)
        return words.reshape(-1)

    @classmethod
    def join(cls, parts: Sequence[Columns], bounds: Sequence[IntArray]) -> Columns | None:
        k = len(parts[0].columns)
        owns = [own // k for own in bounds]
        made = [join_whole(column, owns) for column in zip(*(part.columns for part in parts), strict=True)]
        found = tuple(column for column in made if column is not None)
        return cls(found) if len(found) == k else None

    def problem(self, dtype: np.dtype[Any], bounds: IntArray) -> str | None:
        k = len(self.columns)
        if k == 0 or (bounds % k).any():
            return f"{k} columns do not make up the rows"
        found = (column.problem(dtype, bounds // k) for column in self.columns)
        return next((problem for problem in found if problem), None)


@dataclass(frozen=True)
class Same:
    """Another field on the same layout has the same words."""

    field: Path

    def decode(self, source: Source) -> Words:
        """The words of the other field themselves."""
        return source(self.field).words


@dataclass(frozen=True)
class Joined:
    """Each row is the row of `head`, then the row of `tail`."""

    head: Path
    tail: Path

    def decode(self, source: Source) -> Words:
        return alternating(source(self.head), source(self.tail))


Own = Whole | Repeated | Columns
"""An encoding that needs no other field."""
Encoding = Own | Same | Joined

KINDS: dict[str, type[Encoding]] = {
    kind.__name__.lower(): kind
    for kind in (Plain, Narrow, Bits, Runs, Ramp, Steps, Sparse, Repeated, Columns, Same, Joined)
}
"""Every encoding by its name on the wire."""
WHOLE = tuple(KINDS)[:7]
"""Those that stand by themselves."""


def kind_of(encoding: Encoding) -> str:
    """The name of an encoding, with those inside it: `repeated narrow`."""
    inner: list[str] = []
    if isinstance(encoding, Repeated):
        inner = [kind_of(encoding.rows)]
    elif isinstance(encoding, Columns):
        inner = list(dict.fromkeys(map(kind_of, encoding.columns)))
    elif isinstance(encoding, Same):
        return f"same as {'/'.join(encoding.field)}"
    elif isinstance(encoding, Joined):
        return f"{'/'.join(encoding.head)} + {'/'.join(encoding.tail)}"
    return " ".join([type(encoding).__name__.lower(), *inner])


def arrays_of(encoding: Encoding) -> list[Words]:
    """Every array of an encoding."""
    found: list[Words] = []
    for field in fields(encoding):
        value: Any = getattr(encoding, field.name)
        if isinstance(value, np.ndarray):
            found.append(cast("Words", value))
        elif isinstance(value, Repeated | Whole):
            found += arrays_of(value)
        elif isinstance(encoding, Columns):
            found += [array for column in value for array in arrays_of(column)]
    return found


def nbytes(encoding: Encoding) -> int:
    """Bytes of its arrays."""
    return sum(array.nbytes for array in arrays_of(encoding))


def alternating(head: Field, tail: Field) -> Words:
    """Row by row, the row of `head` and then that of `tail`."""
    rows = head.bounds.size - 1
    pieces: list[Words] = [head.words[:0]] * (2 * rows)
    pieces[::2] = _row_views(head)
    pieces[1::2] = _row_views(tail)
    return np.concatenate(pieces or [head.words[:0]])


def _row_views(field: Field) -> Iterable[Words]:
    places = field.bounds.tolist()
    return map(field.words.__getitem__, map(slice, places[:-1], places[1:]))


def join_whole(parts: Sequence[Whole], bounds: Sequence[IntArray]) -> Whole | None:
    """The rows of several encodings of one kind, one after the other; None if they do not fit each other."""
    kind = type(parts[0])
    if any(type(part) is not kind for part in parts):
        return None
    return kind.join(parts, bounds)  # type: ignore[arg-type]


def repeated(words: Words, bounds: IntArray, encode: Callable[[Words, IntArray], Whole]) -> Repeated | None:
    """None where every row is different."""
    a = bounds.tolist()
    seen: dict[bytes, int] = {}
    index = [seen.setdefault(words[a[row] : a[row + 1]].tobytes(), len(seen)) for row in range(len(a) - 1)]
    if len(seen) == len(index):
        return None
    first = np.unique(np.array(index), return_index=True)[1]
    lengths = np.diff(bounds)[first]
    stored = encodings.Plain(words).take(first, bounds).words
    narrow = np.array(index).astype(np.min_scalar_type(len(seen) - 1))
    return Repeated(narrow, encode(stored, cumulated(lengths)))


def likely_repeated(words: Words, bounds: IntArray) -> bool:
    """Whether rows of some size look alike at their ends; a glance at each row."""
    lengths = np.diff(bounds)
    if lengths.size < 2 or words.size < 4 * lengths.size:
        return False
    real = np.flatnonzero(lengths)
    ends = lengths[real] * 1_000_003 + words[bounds[real]].astype(np.int64)
    ends = ends * 1_000_003 + words[bounds[real + 1] - 1].astype(np.int64)
    return 4 * np.unique(ends).size <= 3 * real.size
