"""Which chunk has which row, and which rows have which tags: in memory, made of the heads of records."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, ranges
from maskpack.errors import FieldError, LayoutError, StorageError
from maskpack.store.records import BLOB, DELETE, ROWS
from maskpack.store.segments import Chunk, Segment

_PLAIN = (str, int, float, bool, type(None))


class RowIndex:
    """The rows of some segments.

    Attributes:
        chunks: the chunks of rows.
        blobs: the arrays of Python objects, by digest.
        next_row: the number of the next row.
    """

    def __init__(self, next_row: int = 0) -> None:
        self.chunks: list[Chunk] = []
        self.blobs: dict[str, Chunk] = {}
        self.next_row = 0
        self._chunk = np.full(1024, -1, np.int64)
        self._dead = np.zeros(1024, np.bool_)
        self._segments: dict[Segment, None] = {}
        self._tags: dict[str, dict[Any, list[IntArray]]] = {}
        self._tagged = 0
        self.grow(next_row)

    def grow(self, next_row: int) -> None:
        """Knows that rows below `next_row` have been numbered."""
        self.next_row = max(self.next_row, next_row)
        if self.next_row > self._chunk.size:
            more = max(self.next_row, 2 * self._chunk.size) - self._chunk.size
            self._chunk = np.concatenate([self._chunk, np.full(more, -1, np.int64)])
            self._dead = np.concatenate([self._dead, np.zeros(more, np.bool_)])

    def add(self, segment: Segment, begin: int = 0) -> None:
        """Takes the records of a segment from one on."""
        self._segments[segment] = None
        self.grow(segment.frame.next_row)
        for chunk in segment.chunks[begin:]:
            record = chunk.record
            if record.has_rows:
                rows = slice(record.first, record.first + record.count) if record.kind == ROWS else chunk.rows
                self.grow(rows.stop if isinstance(rows, slice) else int(rows[-1]) + 1)
                self._chunk[rows] = len(self.chunks)
                self.chunks.append(chunk)
            elif record.kind == DELETE:
                with contextlib.suppress(StorageError):  # whoever opens the log has warned of the head
                    self._dead[deleted_rows(chunk)] = True
            elif record.kind == BLOB and chunk.head is not None:
                self.blobs[chunk.parsed["digest"]] = chunk

    def live(self, rows: IntArray | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Whether rows are there."""
        return (self._chunk[: self.next_row][rows] >= 0) & ~self._dead[: self.next_row][rows]

    def rows(self) -> IntArray:
        """int64 [n], rising: the numbers of the rows that are there."""
        return np.flatnonzero(self.live())

    def lost(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Whether rows were not deleted, and have no bytes."""
        return (self._chunk[rows] < 0) & ~self._dead[rows]

    def stored(self, rows: IntArray) -> npt.NDArray[np.int64]:
        """The chunk that has the bytes of rows, deleted ones too; -1 for none."""
        return self._chunk[rows]

    def parts(self, rows: IntArray) -> list[tuple[Chunk, IntArray, IntArray]]:
        """The chunks of rows, where the rows are in the chunk, and in `rows`. Raises FieldError for rows that are not
        there, and StorageError for those that were damaged."""
        beyond = rows[(rows < 0) | (rows >= self.next_row)]
        if beyond.size:
            raise FieldError(
                f"RolloutLog: there is no row {beyond[0]}; expected numbers below {self.next_row}, as append returned "
                "them. Ask where() for those that are there."
            )
        gone = rows[~self.live(rows)]
        if gone.size:
            self._missing(int(gone[0]))
        number = self._chunk[rows]
        order = np.argsort(number, kind="stable")
        ends = np.flatnonzero(np.diff(number[order])) + 1
        return [
            (chunk := self.chunks[number[own[0]]], chunk.place(rows[own]), own)
            for own in np.split(order, ends)
            if own.size
        ]

    def _missing(self, row: int) -> None:
        for segment in self._segments:
            for damage in segment.damages:
                end = self.next_row if damage.end_row is None else damage.end_row
                if damage.first_row <= row < end and not self._dead[row]:
                    raise StorageError(
                        f"RolloutLog: row {row} was in {segment.name}, bytes {damage.begin} to {damage.end}, which are "
                        "damaged; expected the record that was written. The other records can be read. Restore the "
                        "file from a backup."
                    )
        raise FieldError(f"RolloutLog: row {row} was deleted; expected a row that is there. Ask where() for them.")

    # ---------------------------------------------------------------- tags

    def where(self, wanted: Mapping[str, Any]) -> IntArray:
        """int64 [n], rising: the rows that have all of some tags; of several values, any."""
        for chunk in self.chunks[self._tagged :]:
            self._note(chunk.rows, chunk.parsed.get("tags", {}))
        self._tagged = len(self.chunks)
        live = self.live()
        for name, value in wanted.items():
            known = self._tags.get(name, {})
            values: Iterable[Any] = listed(value) if _several(value) else [value]
            found = [rows for one in values for rows in known.get(_key(plain(one, name, "where")), ())]
            has = np.zeros(self.next_row, np.bool_)
            has[np.concatenate(found) if found else []] = True
            live &= has
        return np.flatnonzero(live)

    def _note(self, rows: IntArray, tags: Mapping[str, Any]) -> None:
        for name, value in tags.items():
            known = self._tags.setdefault(name, {})
            if not isinstance(value, list):
                known.setdefault(_key(value), []).append(rows)
                continue
            own: dict[Any, list[int]] = {}
            for row, one in zip(rows.tolist(), cast("list[Any]", value), strict=True):
                own.setdefault(_key(one), []).append(row)
            for key, numbers in own.items():
                known.setdefault(key, []).append(np.array(numbers, np.int64))


def tags_of(chunk: Chunk, places: IntArray) -> dict[str, list[Any]]:
    """The tags of some rows of a chunk, a list for each name. Raises StorageError if they are damaged."""
    if chunk.head is None:
        chunk.verify()
    tags: dict[str, Any] = chunk.parsed.get("tags", {})
    return {
        name: [value[place] for place in places.tolist()] if isinstance(value, list) else [value] * places.size
        for name, value in tags.items()
    }


def checked_tags(tags: Any, rows: int) -> dict[str, Any]:
    """Tags as they are written: a plain value, or a list of them with one for each row. Raises LayoutError."""
    if not isinstance(tags, Mapping):
        raise LayoutError(f"RolloutLog.append: tags are {said(tags)}; expected a dict. Pass tags={{'step': 3}}.")
    out: dict[str, Any] = {}
    for name, value in cast("Mapping[Any, Any]", tags).items():
        if not isinstance(name, str):
            raise LayoutError(f"RolloutLog.append: a tag is named {said(name)}; expected text. Name it.")
        if not _several(value):
            out[name] = plain(value, name, "append")
            continue
        values = listed(value)
        if len(values) != rows:
            raise LayoutError(
                f'RolloutLog.append: tag "{name}" has {len(values)} values for {rows} rows; expected one for each, or '
                "one for all. Give as many."
            )
        out[name] = [plain(one, name, "append") for one in values]
    return out


def _several(value: Any) -> bool:
    """Whether a value is a list, a range, an array or a tensor of values; an array without dims is one value."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim > 0
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def listed(values: Any) -> list[Any]:
    """The items of a list, a range, an array or a tensor."""
    held: Any = values
    return held.tolist() if isinstance(values, Tensor | np.ndarray) else list(held)


def plain(value: Any, name: str, call: str) -> Any:
    """A tag's value. Raises LayoutError for one that is not plain."""
    held: Any = value
    value = held.item() if isinstance(value, np.generic | np.ndarray | Tensor) and held.ndim == 0 else held
    if not isinstance(value, _PLAIN):
        raise LayoutError(
            f'RolloutLog.{call}: tag "{name}" is {said(value)}; expected text, a number, a bool or None. Put other '
            "data into a field of the batch."
        )
    return value


def _key(value: Any) -> Any:
    """1 and True, which are equal in Python, are different tags; a NaN is the same tag as another."""
    return (type(value), str(value)) if isinstance(value, bool) or value != value else value


def spans_of(rows: IntArray) -> IntArray:
    """int64 [n, 2]: the first of rising rows that follow each other, and how many they are."""
    begins = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)
    return np.stack([rows[begins], np.diff(begins, append=rows.size)], 1)


def deleted_rows(chunk: Chunk) -> IntArray:
    """The rows that a record deletes: its head and its payload say it. Raises StorageError if both are damaged."""
    held = chunk.payload() if chunk.head is None else np.array(chunk.parsed["rows"], np.int64)
    spans = np.frombuffer(held, np.int64).reshape(-1, 2)
    return ranges(spans[:, 0], spans[:, 1])
