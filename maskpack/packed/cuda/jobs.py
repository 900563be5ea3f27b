"""What the decode kernel does for the fields of a batch: its jobs, and the tables that they name.

    entry of a field --(sources.py)--> Source
    form of a field  ----------------> Target: the tensor, its layout, its pads      both together are a job

A field whose words lie in columns has a job for each column; one that joins two fields has one for each of them.
"""

from __future__ import annotations

import math
from array import array as line_of
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from maskpack.core import native
from maskpack.core.index import IntArray, cumulated
from maskpack.core.pads import EDGE, Pad, pad_words
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda.job_table import Source, Target
from maskpack.packed.cuda.sources import Entry, Rows, Sources, Tables, entries_of
from maskpack.packed.table import Table, words_of_one

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_MOST = (1 << 31) - jobs.CHUNK
"""Words of a row that the kernel can count."""


class Part(NamedTuple):
    """The entry that stores the words of a field: for all of each row, its HEAD or its TAIL."""

    entry: int
    part: int


class _Axis(NamedTuple):
    """The rows of a target: how many, elements in all and in the longest, and the places of tables, as in Target."""

    rows: int
    num_tokens: int
    longest: int
    bounds: int
    width: int
    splits: int = -1
    starts: int = -1
    ends: int = -1


def parts_of(packed: PackedBatch, table: Table, form: FieldForm, number: int, padded: bool) -> list[Part]:
    """Where the words of a field are, which is tensor `number` of a table; none if the kernel cannot decode it."""
    at, entries = int(table.fields[number]), entries_of(table)
    found = [Part(at, 0)]
    if entries[at].kind == native.CONCAT:
        found = [Part(entries[at].first, jobs.HEAD), Part(entries[at].second, jobs.TAIL)]
    items = words_of_one(form)
    inner = _words_behind(form, items) if padded and items else items
    for one, _ in found:
        own = entries[one]
        if _is_near_columns(entries, one) or own.kind == native.CONCAT or own.items != items:
            return []
        group = _words_of_column(own)
        if own.kind == native.COLUMNS and (inner % group or (group > 1 and group % 2 and _is_pair(form))):
            return []
    width = 1 if form.layout is None else packed.layouts[form.layout].width
    special = padded and isinstance(form.pads[0], Pad) and form.pads[0] is not EDGE
    has_pads = bool(table.row_pads["count"][number])
    return found if width * items <= _MOST and (not special or not table.rows or has_pads) else []


def _is_near_columns(entries: Sequence[Entry], at: int) -> bool:
    """Whether a chain of near fields leads to columns, which have a job each."""
    while entries[at].kind == native.BLOCKS and entries[at].second >= 0:
        at = entries[at].second
        if entries[at].kind in (native.COLUMNS, native.CONCAT):
            return True
    return False


def _words_of_column(entry: Entry) -> int:
    return entry.items // entry.second if entry.kind == native.COLUMNS else 1


def _is_pair(form: FieldForm) -> bool:
    """Whether an item is two words."""
    return form.dtype is not None and form.dtype.itemsize == 16


class Recipe:
    """The jobs of one launch.

    Args:
        packed: the batch.
        table: its table, or that of some of its fields; its body is the body of the launch.
    """

    def __init__(self, packed: PackedBatch, table: Table) -> None:
        self.tables = Tables()
        self.programs = 0
        self._packed = packed
        self._jobs: list[int] = []
        self._table = table
        self._entries = entries_of(table)
        self._words_of_rows: dict[tuple[str | None, int], IntArray] = {}
        self._sources = Sources(table, self.tables)
        self._known: dict[tuple[int, bool], list[Source]] = {}
        self._axes: dict[tuple[str | None, bool], _Axis] = {}
        self._constants: dict[tuple[int, Any], tuple[int, int, int, int]] = {}

    @property
    def count(self) -> int:
        """Jobs."""
        return len(self._jobs) // jobs.JOB

    def line(self) -> IntArray:
        """int64: the jobs, one behind the other."""
        return np.frombuffer(line_of("q", self._jobs), np.int64)

    def bounds(self, layout: str) -> int:
        """The table of the first element of each row."""
        return self._axis(layout, False).bounds

    def copy(self, size: int, out: Tensor) -> None:
        """Lets the kernel copy the first `size` entries of the tables to a tensor int64 [size]."""
        target = Target(-(-size // jobs.CHUNK), jobs.CHUNK, out.data_ptr(), 8, 1, 1, 0, 1, -1, size)
        self._job(1, target, Source(jobs.TABLE, data=0))

    def add(self, form: FieldForm, number: int, parts: list[Part], padded: bool, out: Tensor) -> None:
        """Lets the kernel decode tensor `number` to `out`, [T, *F] or, padded, in the form of the field."""
        axis, items = self._axis(form.layout, padded), words_of_one(form)
        if not items or not axis.rows:
            return
        assert form.dtype is not None
        address, size = out.data_ptr(), min(form.dtype.itemsize, 8)
        inner = _words_behind(form, items) if padded else items
        row_words = items * axis.width if padded else items
        pads, pad_row, pad_items, edge = self._pads(form, number) if padded else (-1, 0, 0, 0)
        head, head_items = self._head(parts[0]) if len(parts) > 1 else (-1, 1)
        for at, part in parts:
            flat = not padded and not part and axis.num_tokens * items <= _MOST and self._sources.is_flat(at)
            rows, most, bounds, unit = (
                (1, axis.num_tokens, -1, axis.num_tokens) if flat else (axis.rows, axis.longest, axis.bounds, 1)
            )
            columns, group = self._entries[at].kind == native.COLUMNS, _words_of_column(self._entries[at])
            own, stride = (group, inner) if columns else (items, 1)
            span = jobs.CHUNK if rows == 1 else jobs.SPAN
            spans = -(-most * own // span)
            for column, source in enumerate(self._source(at, flat)):
                layer, item = divmod(column * group, inner)
                offset = layer * inner * axis.width + item
                pad, turn = (pads + (column & pad_items), 0) if columns and group == 1 else (pads, pad_items)
                target = Target(
                    spans, span, address, size, own, stride, offset, row_words, bounds, unit, axis.width,
                    own if columns else inner, axis.splits, axis.starts, axis.ends, pad, pad_row, turn, edge,
                    part, head, own if columns else head_items, group,
                )  # fmt: skip
                self._job(rows, target, source)

    def _job(self, rows: int, target: Target, source: Source) -> None:
        if target.spans:
            self._jobs.append(self.programs)
            self._jobs += target
            self._jobs += source
            self.programs += rows * target.spans

    def _axis(self, name: str | None, padded: bool) -> _Axis:
        axis = self._axes.get((name, padded))
        if axis is None:
            axis = self._axes[name, padded] = self._new_axis(name, padded)
        return axis

    def _new_axis(self, name: str | None, padded: bool) -> _Axis:
        if name is None:
            rows = 1 if self._packed.schema.root.more_dims is None else self._packed.num_rows
            return _Axis(rows, rows, 1, -1, -1)
        layout, add = self._packed.layouts[name], self.tables.add
        if not padded:
            return _Axis(layout.num_rows, layout.num_tokens, layout.max_length, add(layout.row_offsets), -1)
        starts, counts, splits = layout.table
        runs = add(splits), add(starts), add(cumulated(counts))
        return _Axis(layout.num_rows, layout.num_tokens, layout.width, self.bounds(name), layout.width, *runs)

    def _head(self, part: Part) -> tuple[int, int]:
        """The bounds of the heads of rows, and the words of an element of them."""
        return self._axis(self._layout_of(part.entry), False).bounds, self._entries[part.entry].items

    def _layout_of(self, at: int) -> str | None:
        layout = self._entries[at].layout
        return None if layout < 0 else self._table.names[layout]

    def _source(self, at: int, flat: bool) -> list[Source]:
        """The source of an entry, or those of its columns; of `flat` words as one row."""
        known = self._known.get((at, flat))
        if known is None:
            axis = self._axis(self._layout_of(at), False)
            known = [self._of_column(column, axis, flat) for column in self._sources.columns(at)]
            self._known[at, flat] = known
        return known

    def _of_column(self, at: int, axis: _Axis, flat: bool) -> Source:
        layout, items = self._layout_of(at), self._entries[at].items
        table, unit = (-1, 0) if flat else (axis.bounds, items)
        return self._sources.of(at, Rows(axis.rows, lambda: self._bounds(layout, items, axis.rows), table, unit))

    def _bounds(self, layout: str | None, items: int, rows: int) -> IntArray:
        """Where rows begin and end in words of `items` for each element."""
        if (layout, items) not in self._words_of_rows:
            whole = np.arange(rows + 1) if layout is None else self._table.layouts[layout].row_offsets
            self._words_of_rows[layout, items] = whole * items
        return self._words_of_rows[layout, items]

    def _pads(self, form: FieldForm, number: int) -> tuple[int, int, int, int]:
        """Of a target: pads, pad_row, pad_items and edge."""
        own = self._table.pads_of_rows(number)
        if own is not None:
            pair = own.ndim - 1
            return self.tables.add(own.astype(np.int64).reshape(-1)), 1 + pair, pair, 0
        pad = form.pads[0]
        key = id(pad), form.dtype  # 0.0 equals -0.0
        known = self._constants.get(key)
        if known is None:
            assert form.dtype is not None
            found = (0,) if isinstance(pad, Pad) else pad_words(pad, form.dtype)
            assert found is not None
            known = self.tables.add(np.array(found, np.int64)), 0, len(found) - 1, int(pad is EDGE)
            self._constants[key] = known
        return known


def _words_behind(form: FieldForm, items: int) -> int:
    """Words of an element that lie next to each other in the padded field."""
    return math.prod(form.shape[form.ragged_dim - 1 :]) * (items // math.prod(form.shape))
