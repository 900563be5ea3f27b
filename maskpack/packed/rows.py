"""Rows by number: which rows of which body a batch has. take, split and cat change numbers, and copy no values.

    Segments    a[4:6] b[0:3] a[9:10]    source  a b a    start  4 0 9    count  2 3 1
    Body        a table: the encoded rows of some fields; TokenBody: spans of the tokens of packed rows
    Columns     some fields, the bodies that hold them, and segments: which rows of which body
    Rows        all columns of a packed batch, and the widths of its layouts

A body lives as long as a batch that has rows of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from maskpack.core import native
from maskpack.core.arguments import named
from maskpack.core.index import IntArray, SpanTable, cumulated, ranges
from maskpack.core.tensors import host_array
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path
from maskpack.layout.row_layout import RowLayout, anchored, core_layout, layout_of_table
from maskpack.nesting.response import SEQUENCE
from maskpack.nesting.schema import Schema, name_of_jagged
from maskpack.packed.table import Frame, Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_Own = TypeVar("_Own", bound="Columns")


# -------------------------------------------------------------------- segments


class Share(NamedTuple):
    """The rows that one source gives, in the order of the segments.

    Attributes:
        source: the number of the source.
        rows: its rows; a slice with both bounds if they are one segment.
        places: which of all rows they are, likewise.
    """

    source: int
    rows: IntArray | slice
    places: IntArray | slice

    def is_all(self, num_rows: int) -> bool:
        """Whether these are all rows of a source that has so many, in their order."""
        return isinstance(self.rows, slice) and self.rows == slice(0, num_rows)


def indices(rows: IntArray | slice) -> IntArray:
    """Rows as numbers."""
    if isinstance(rows, slice):
        return np.arange(rows.start, rows.stop, dtype=np.int64)
    return rows


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows as an ordered list of segments: which source, the first row in it, how many. Segments that follow each other
    in their source are merged.

    Attributes, all int64 [n]: `source`, the number of the source; `start`, its first row; `count`, at least 1.
    """

    source: IntArray
    start: IntArray
    count: IntArray

    @staticmethod
    @lru_cache(64)
    def whole(num_rows: int) -> Segments:
        """All rows of one source, number 0."""
        n = 1 if num_rows else 0
        return Segments(np.zeros(n, np.int64), np.zeros(n, np.int64), np.full(n, num_rows, np.int64))

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

    @cached_property
    def shares(self) -> list[Share]:
        """The rows that each source gives; none of a source that gives no rows."""
        sources = self.source.tolist()
        if len(set(sources)) == len(sources):
            ends = zip(sources, self.start.tolist(), self.count.tolist(), self.bounds[1:].tolist(), strict=True)
            return [Share(own, slice(at, at + n), slice(end - n, end)) for own, at, n, end in ends]
        source, row = self.by_row()
        if not source.any():
            return [Share(0, row, slice(0, row.size))]
        order = np.argsort(source, kind="stable")
        used, counts = np.unique(source, return_counts=True)
        places = np.split(order, np.cumsum(counts)[:-1])
        return [Share(own, row[at], at) for own, at in zip(used.tolist(), places, strict=True)]

    @cached_property
    def order(self) -> IntArray | None:
        """The index that puts the rows of the shares, one after the other, into the order of the segments; None if they
        are in it."""
        places = [share.places for share in self.shares if not isinstance(share.places, slice)]
        at = np.concatenate(places or [np.zeros(0, np.int64)])
        return np.argsort(at) if (np.diff(at) < 0).any() else None


def _restored(*parts: Any) -> Segments:
    return Segments(*(part.astype(np.int64) for part in parts))


# -------------------------------------------------------------------- bodies


@dataclass(frozen=True, eq=False)
class Body:
    """A table, and the number of each of its fields."""

    table: Table
    numbers: Mapping[Path, int]

    @property
    def key(self) -> Any:
        """A key that is equal for bodies that are one."""
        return self

    @property
    def num_rows(self) -> int:
        return self.table.rows

    @property
    def layouts(self) -> Mapping[str, RowLayout]:
        return self.table.layouts

    def nbytes_of(self, paths: Sequence[Path]) -> int:
        """The encoded bytes of some fields, with the layouts."""
        return self.table.select([self.numbers[path] for path in paths]).nbytes


@dataclass(frozen=True, eq=False)
class TokenSpans:
    """Attributes: `layout`, whose tokens are counted; int64 [N], the `row` of each span, its first token, `start`, and
    its number of tokens, `count`."""

    layout: str
    row: IntArray
    start: IntArray
    count: IntArray

    @classmethod
    def of(cls, spans: Any, layout: str | None, layouts: Mapping[str, RowLayout], call: str) -> TokenSpans:
        """From [N, 3]: row, start and stop. `layout` None stands for the sequence, or the only layout.

        Raises FieldError if it is not among `layouts`, and LayoutError for spans that its rows do not have.
        """
        if layout is None:
            layout = next(iter(layouts)) if len(layouts) == 1 else SEQUENCE
        lengths = named(layouts, layout, call).lengths
        array = host_array(spans, "spans", call)
        if not array.size:
            array = np.zeros((0, 3), np.int64)
        if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
            raise LayoutError(
                f"{call}: spans are {array.dtype} {array.shape}; expected whole numbers (N, 3). Give the row, the "
                "first token and the token behind the last of each span."
            )
        row, start, stop = np.ascontiguousarray(array.T, np.int64)
        there = (row >= 0) & (row < lengths.size)
        length = lengths[np.where(there, row, 0)] if lengths.size else np.zeros(row.size, np.int64)
        bad = np.flatnonzero(~there | (start < 0) | (start > stop) | (stop > length))
        if bad.size:
            at = int(bad[0])
            has = f"which has {int(length[at])} tokens" if there[at] else f"and the batch has {lengths.size} rows"
            raise LayoutError(
                f"{call}: span {at} is tokens {int(start[at])} to {int(stop[at])} of row {int(row[at])}, {has} in "
                f'layout "{layout}"; expected tokens that are there. Count from 0, and only valid tokens.'
            )
        return cls(layout, row, start, stop - start)

    def take(self, index: IntArray | slice) -> TokenSpans:
        """Some spans, in the order given."""
        return TokenSpans(self.layout, self.row[index], self.start[index], self.count[index])

    def within(self, other: TokenSpans) -> TokenSpans:
        """Spans whose rows are the spans of `other`, as spans of the rows of `other`."""
        return TokenSpans(other.layout, other.row[self.row], other.start[self.row] + self.start, self.count)

    @cached_property
    def rows(self) -> RowLayout:
        """The layout of the spans."""
        return RowLayout.from_lengths(self.count)


@dataclass(frozen=True, eq=False)
class TokenBody:
    """Spans of the rows of a packed batch. Nothing is decoded before its rows are.

    Attributes:
        batch: fields of one layout.
        spans: the rows of the body.
    """

    batch: PackedBatch
    spans: TokenSpans

    @property
    def key(self) -> Any:
        return self

    @property
    def num_rows(self) -> int:
        return self.spans.row.size

    @property
    def layouts(self) -> dict[str, RowLayout]:
        return {name_of_jagged(self.batch.tensors[0].path): self.spans.rows}

    def nbytes_of(self, paths: Sequence[Path]) -> int:
        """The encoded bytes of some fields, if every token takes an equal share."""
        part = self.batch.select(*paths) if paths else None
        tokens = self.batch.layouts[self.spans.layout].num_tokens
        return 0 if part is None else round(part.nbytes * self.spans.rows.num_tokens / max(1, tokens))


# -------------------------------------------------------------------- columns


@dataclass(frozen=True, eq=False)
class Columns:
    """Some fields, and where their rows come from.

    Attributes:
        paths: the fields.
        parts: Bodies, TokenBodies, or what stands for packed batches that are elsewhere; each has a `key`.
        rows: which rows of which part, for all rows.
        layouts: the layouts of the batch that come from these bodies.
    """

    paths: tuple[Path, ...]
    parts: tuple[Any, ...]
    rows: Segments
    layouts: tuple[str, ...] = ()

    @property
    def body(self) -> Body | None:
        """The table that all rows come from; None if there are several, or spans of tokens."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], Body) else None

    def take(self: _Own, index: IntArray | slice) -> _Own:
        """Some rows, in the order given; a slice as for `Segments.take`."""
        return replace(self, rows=self.rows.take(index)).in_use()

    def in_use(self: _Own) -> _Own:
        """The same rows without the parts that give none."""
        if len(self.parts) == 1 and self.rows.source.size:
            return self
        used, numbers = np.unique(self.rows.source, return_inverse=True)
        if used.size == len(self.parts):
            return self
        parts = tuple(self.parts[number] for number in used)
        if not parts and isinstance(self.parts[0], Body):  # it says which layouts are columns of others
            parts = self.parts[:1]
        return replace(self, parts=parts, rows=replace(self.rows, source=numbers))

    def only(self: _Own, paths: Collection[Path], layouts: Collection[str] | None = None) -> _Own:
        """Some of the fields, and some of the layouts or all."""
        kept = tuple([path for path in self.paths if path in paths])
        names = self.layouts if layouts is None else tuple([name for name in self.layouts if name in layouts])
        same = len(kept) == len(self.paths) and len(names) == len(self.layouts)
        return self if same else replace(self, paths=kept, layouts=names)

    def layout(self, name: str, frame: Frame) -> RowLayout:
        """A layout of the rows, on the host, at least as wide as `frame`. Anchors are aligned."""
        parts: list[RowLayout] = []
        for share in self.rows.shares:
            layout = self.parts[share.source].layouts[name]
            parts.append(layout if share.is_all(layout.num_rows) else layout.take(share.rows))
        if len(parts) != 1 or (parts[0].width, parts[0].anchor) != frame:
            parts = [RowLayout.cat([empty_layout(*frame), *parts])]
        return parts[0] if self.rows.order is None else parts[0].take(self.rows.order)

    def nbytes_of_parts(self) -> list[float]:
        """The encoded bytes of the rows that come from each part, if each row of it takes an equal share."""
        counts = np.bincount(np.repeat(self.rows.source, self.rows.count), minlength=len(self.parts)).tolist()
        shares = zip(self.parts, counts, strict=True)
        return [part.nbytes_of(self.paths) * (count / part.num_rows if part.num_rows else 1) for part, count in shares]

    @staticmethod
    def cat(columns: Sequence[Columns], paths: Sequence[Path], layouts: Sequence[str] = ()) -> Columns:
        """The rows of several, of the fields `paths`. Equal parts are one."""
        parts: dict[Any, Any] = {}
        for own in columns:
            for part in own.parts:
                parts.setdefault(part.key, part)
        number = {key: at for at, key in enumerate(parts)}
        numbers = np.array([number[part.key] for own in columns for part in own.parts], np.int64)
        rows = Segments.cat([own.rows for own in columns], numbers, [len(own.parts) for own in columns])
        return Columns(tuple(paths), tuple(parts.values()), rows, tuple(layouts))


def cat_columns(
    batches: Sequence[Sequence[Columns]], paths: Sequence[Path], layouts: Collection[str] = ()
) -> list[tuple[Columns, tuple[int, ...]]]:
    """The rows of several batches, one after the other: fields and layouts that come from the same columns of each
    batch are one. With each, the number of its columns in every batch."""
    same = [tuple([(id(own.paths), id(own.layouts)) for own in batch]) for batch in batches]  # a hash of paths is slow
    distinct = dict(zip(same, batches, strict=True))
    kinds = {key: tuple([(own.paths, own.layouts) for own in batch]) for key, batch in distinct.items()}
    homes: dict[Any, dict[Path | str, int]] = {}
    for kind in dict.fromkeys(kinds.values()):
        homes[kind] = {name: at for at, own in enumerate(kind) for part in own for name in part}
    names: dict[tuple[int, ...], tuple[list[Path], list[str]]] = {}
    for name in (*paths, *layouts):
        own = names.setdefault(tuple([home[name] for home in homes.values()]), ([], []))
        own[1].append(name) if isinstance(name, str) else own[0].append(name)
    if not names:  # a batch without fields has rows, too
        names[(0,) * len(homes)] = [], []
    out: list[tuple[Columns, tuple[int, ...]]] = []
    for of_kinds, own in names.items():
        at = dict(zip(homes, of_kinds, strict=True))
        places = {key: at[kind] for key, kind in kinds.items()}
        numbers = tuple([places[key] for key in same])
        out.append((Columns.cat([batch[at] for batch, at in zip(batches, numbers, strict=True)], *own), numbers))
    return out


def used(columns: Sequence[_Own]) -> tuple[_Own, ...]:
    """Columns that have a field or a layout; one at least, which has the rows."""
    return tuple([own for own in columns if own.paths or own.layouts] or columns[:1])


def empty_layout(width: int, anchor: int) -> RowLayout:
    """A layout without rows."""
    nothing = np.zeros(0, np.int64)
    return layout_of_table(width, SpanTable(nothing, nothing, np.zeros(1, np.int64)), "cpu", anchor)


# -------------------------------------------------------------------- all rows


class Rows:
    """The tensors of a packed batch as rows of bodies. They are never changed.

    Attributes:
        columns: each tensor is in one of them; at least one, which may have no field.
        frames: the width and the anchor of each layout, which those of the bodies are aligned at. They are at least as
            wide as in the bodies; in trimmed rows they are narrower, and an anchor may lie outside of the width.
        whole: the table, if these are all its rows, fields and layouts as they lie in it; else None.
    """

    _schema: Schema

    def __init__(self, columns: Sequence[Columns], frames: Mapping[str, Frame]) -> None:
        self.__dict__.update(columns=tuple(columns), frames=frames)

    @classmethod
    def of(cls, table: Table, schema: Schema) -> Rows:
        """All rows of a table of the tensors of a schema. Columns are made when they are first needed."""
        rows = cls.__new__(cls)
        rows.__dict__.update(whole=table, _schema=schema)
        return rows

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        assert self.whole is not None
        body = Body(self.whole, numbers_of(self._schema))
        return (Columns(_paths_of(self._schema), (body,), Segments.whole(body.num_rows), self.whole.names),)

    @cached_property
    def frames(self) -> Mapping[str, Frame]:
        assert self.whole is not None
        return self.whole.frames

    @cached_property
    def whole(self) -> Table | None:
        (own, *more), body = self.columns, self.columns[0].body
        if more or body is None or own.rows.num_rows != body.num_rows or own.rows.count.size > 1:
            return None
        table = body.table
        same = own.paths == tuple(body.numbers) and own.layouts == table.names and self.frames == table.frames
        return table if same else None

    def take(self, index: IntArray | slice) -> Rows:
        """Some rows, in the order given; a slice as for `Segments.take`."""
        return Rows([own.take(index) for own in self.columns], self.frames)

    def only(self, paths: Collection[Path], layouts: Collection[str]) -> Rows:
        """Some fields and layouts."""
        frames = {name: frame for name, frame in self.frames.items() if name in layouts}
        return Rows(used([own.only(paths, layouts) for own in self.columns]), frames)

    def columns_of(self, path: Path) -> Columns:
        """The columns that have a field."""
        return next(own for own in self.columns if path in own.paths)

    def fits(self, table: Table) -> bool:
        """Whether the layouts in a table are as wide as those of the rows."""
        return all(table.frames.get(name, frame) == frame for name, frame in self.frames.items())

    def shift(self, name: str, table: Table) -> int:
        """Columns of a layout on the left of those that it has in a table, negative if it has fewer there."""
        return self.frames[name][1] - table.frames[name][1]

    @cached_property
    def layouts(self) -> dict[str, RowLayout]:
        """The layouts of the rows by name, on the host."""
        if self.whole is not None:
            return self.whole.layouts
        out = {name: own.layout(name, self.frames[name]) for own in self.columns for name in own.layouts}
        self._find_columns(out)
        return {name: out[name] for name in self.frames}

    def _find_columns(self, layouts: dict[str, RowLayout]) -> None:
        """Makes layouts columns of another one, as they are in the first body that has them."""
        bodies = {name: own.parts[0] for own in self.columns for name in own.layouts if own.parts}
        for name, body in bodies.items():
            whole, low = body.layouts[name].__dict__.get("part_of", (None, 0))
            other = next((own for own, layout in body.layouts.items() if layout is whole), "")
            if other not in layouts:
                continue
            low, width = low + self.shift(other, body.table) - self.shift(name, body.table), layouts[name].width
            if 0 <= low <= layouts[other].width - width:
                columns = layouts[other].narrow(low, low + width)
                if columns == layouts[name]:  # which a body may hold, too
                    layouts[name] = anchored(columns, layouts[name].anchor)

    @cached_property
    def layout_rows(self) -> IntArray:
        """The table of layouts, for the core."""
        if self.whole is not None:
            return self.whole.layout_rows
        return native.layout_rows([core_layout(layout) for layout in self.layouts.values()])

    @property
    def nbytes(self) -> int:
        """The encoded bytes of the rows, if each row of a body takes an equal share of it."""
        if self.whole is not None:
            return self.whole.nbytes
        return round(sum(nbytes for own in self.columns for nbytes in own.nbytes_of_parts()))


@lru_cache(256)
def numbers_of(schema: Schema) -> Mapping[Path, int]:
    """The number of each tensor of a schema in its table."""
    return {path: number for number, path in enumerate(_paths_of(schema))}


@lru_cache(256)
def _paths_of(schema: Schema) -> tuple[Path, ...]:
    return tuple([form.path for form in schema.forms if form.dtype is not None])
