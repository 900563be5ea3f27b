"""Rows as numbers: which rows of which body a packed batch has.

    Body      a table: the encoded rows of some fields
    Columns   some fields, the bodies that hold them, and Segments: which rows of which body
    Picked    all columns of a batch, and the widths of its layouts

take, split and cat change segments and copy no values. A body lives as long as a batch that has rows of it, or no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from maskpack.core.index import IntArray, SpanTable
from maskpack.fields.registry import Path
from maskpack.layout.row_layout import RowLayout, anchored, layout_of_table
from maskpack.packed.segments import Segments
from maskpack.packed.table import Table

_Own = TypeVar("_Own", bound="Columns")
Frame = tuple[int, int]
"""The width and the anchor of a layout."""


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
class Columns:
    """Some fields, and where their rows come from.

    Attributes:
        paths: the fields.
        parts: Bodies, TokenBodies (tokens.py), or what stands for packed batches that are elsewhere; each has a `key`.
        rows: which rows of which part, for all rows.
        layouts: the layouts of the batch that come from these bodies.
    """

    paths: tuple[Path, ...]
    parts: tuple[Any, ...]
    rows: Segments
    layouts: tuple[str, ...] = ()

    def take(self: _Own, index: IntArray | slice) -> _Own:
        """Some rows, in the order given; a slice as for `Segments.take`."""
        return replace(self, rows=self.rows.take(index)).trimmed()

    def trimmed(self: _Own) -> _Own:
        """The same rows without the parts that give none."""
        if len(self.parts) == 1 and self.rows.source.size:
            return self
        used, numbers = np.unique(self.rows.source, return_inverse=True)
        if used.size == len(self.parts):
            return self
        parts = tuple(self.parts[number] for number in used)
        if not parts and self.parts and isinstance(self.parts[0], Body):
            parts = self.parts[:1]  # which says what layouts are
        return replace(self, parts=parts, rows=replace(self.rows, source=numbers))

    def taken(self) -> list[tuple[Any, IntArray | None, IntArray | None]]:
        """Each part that gives rows, which of its rows, and which rows of all they are; None for all in order."""
        if len(self.parts) == 1 and self.rows.count.size == 1:
            start, count = int(self.rows.start[0]), int(self.rows.count[0])
            whole = start == 0 and count == self.parts[0].num_rows
            return [(self.parts[0], None if whole else np.arange(start, start + count), None)]
        source, row = self.rows.by_row()
        if len(self.parts) <= 1:
            return [(part, row, None) for part in self.parts]
        order = np.argsort(source, kind="stable")
        places = np.split(order, np.searchsorted(source[order], np.arange(1, len(self.parts))))
        taken = [(part, row[own], own) for part, own in zip(self.parts, places, strict=True) if own.size]
        return [(part, None if part.num_rows == own.size == 1 else rows, own) for part, rows, own in taken]

    def without(self: _Own, paths: Collection[Path]) -> _Own:
        """The columns without some fields."""
        kept = tuple(path for path in self.paths if path not in paths)
        return self if len(kept) == len(self.paths) else replace(self, paths=kept)

    def kept(self, paths: Collection[Path], layouts: Collection[str]) -> Columns:
        """Some of the fields and layouts."""
        names = tuple(name for name in self.layouts if name in layouts)
        return replace(self, paths=tuple(path for path in self.paths if path in paths), layouts=names)

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


class Shown(NamedTuple):
    """The rows of a batch in narrower layouts with the same tokens.

    Attributes:
        layouts: all of them.
        begins: the first column of each that is left.
        batch: the PackedBatch in its own widths.
    """

    layouts: Mapping[str, RowLayout]
    begins: Mapping[str, int]
    batch: Any


@dataclass(frozen=True, eq=False)
class Picked:
    """The tensors of a packed batch as rows of bodies.

    Attributes:
        columns: each tensor is in one of them; at least one, which may have no field.
        frames: the layouts, each at least as wide as in the bodies.
        shown: the layouts, if they are narrower than in the bodies; None if not.
    """

    columns: tuple[Columns, ...]
    frames: Mapping[str, Frame]
    shown: Shown | None = None

    @classmethod
    def of(cls, table: Table, numbers: Mapping[Path, int]) -> Picked:
        """All rows of a table."""
        own = Columns(tuple(numbers), (Body(table, numbers),), Segments.whole(table.rows), table.names)
        return cls((own,), table.frames)

    def take(self, index: IntArray | slice) -> Picked:
        """Some rows, in the order given; a slice as for `Segments.take`."""
        return replace(self, columns=tuple(own.take(index) for own in self.columns))

    def only(self, paths: Collection[Path], layouts: Collection[str]) -> Picked:
        """Some fields and layouts."""
        columns = [own.kept(paths, layouts) for own in self.columns]
        frames = {name: frame for name, frame in self.frames.items() if name in layouts}
        return Picked(used(columns), frames)

    def shown_as(self, shown: Shown) -> Picked:
        """The same rows in narrower layouts."""
        frames = {name: (layout.width, layout.anchor) for name, layout in shown.layouts.items()}
        return replace(self, frames=frames, shown=shown)

    def shift(self, name: str, table: Table) -> int:
        """Columns of a layout on the left of those that it has in a table, negative if it has fewer there."""
        left = self.frames if self.shown is None else self.shown.batch.frames
        return left[name][1] - table.frames[name][1] - (0 if self.shown is None else self.shown.begins[name])

    def layouts(self) -> dict[str, RowLayout]:
        """The layouts of the rows, on the host."""
        if self.shown is not None:
            return dict(self.shown.layouts)
        out: dict[str, RowLayout] = {}
        for own in self.columns:
            shares, order = own.rows.shares()
            bodies = [own.parts[share.source] for share in shares]
            for name in own.layouts:
                width, anchor = self.frames[name]
                held = [body.layouts[name] for body in bodies]
                parts = [_rows_of(layout, share.rows) for layout, share in zip(held, shares, strict=True)]
                if len(parts) != 1 or (parts[0].width, parts[0].anchor) != (width, anchor):
                    parts = [RowLayout.cat([empty_layout(width, anchor), *parts])]
                out[name] = parts[0] if order is None else parts[0].take(order)
        self._find_columns(out)
        return {name: out[name] for name in self.frames}

    def _find_columns(self, layouts: dict[str, RowLayout]) -> None:
        """Makes layouts columns of another one, as they are in the first body that has them."""
        bodies = {name: own.parts[0] for own in self.columns for name in own.layouts if own.parts}
        for name, body in bodies.items():
            whole, low = body.layouts[name].__dict__.get("part_of", (None, 0))
            other = next((own for own, layout in body.layouts.items() if layout is whole), "")
            if other not in layouts or not isinstance(body, Body):
                continue
            low, width = low + self.shift(other, body.table) - self.shift(name, body.table), layouts[name].width
            if 0 <= low <= layouts[other].width - width:
                columns = layouts[other].narrow(low, low + width)
                if columns == layouts[name]:  # which a body may hold, too
                    layouts[name] = anchored(columns, layouts[name].anchor)

    def nbytes(self) -> int:
        """The encoded bytes of the rows, if each row of a body takes an equal share of it."""
        total = 0.0
        for own in self.columns:
            counts = np.bincount(np.repeat(own.rows.source, own.rows.count), minlength=len(own.parts)).tolist()
            for part, count in zip(own.parts, counts, strict=True):
                total += part.nbytes_of(own.paths) * count / max(1, part.num_rows)
        return round(total)


def used(columns: Sequence[Columns]) -> tuple[Columns, ...]:
    """Columns that have a field or a layout; one at least, which has the rows."""
    return tuple([own for own in columns if own.paths or own.layouts] or columns[:1])


def empty_layout(width: int, anchor: int) -> RowLayout:
    """A layout without rows."""
    nothing = np.zeros(0, np.int64)
    return layout_of_table(width, SpanTable(nothing, nothing, np.zeros(1, np.int64)), "cpu", anchor)


def _rows_of(layout: RowLayout, rows: IntArray) -> RowLayout:
    """Some rows of a layout; itself for all of them in order."""
    if not rows.size or (np.diff(rows) != 1).any():
        return layout.take(rows)
    return layout if rows.size == layout.num_rows else layout.take(slice(int(rows[0]), int(rows[-1]) + 1))
