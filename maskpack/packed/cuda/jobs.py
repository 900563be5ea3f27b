"""What the decode kernel does for the fields of a batch: its jobs, and the tables that they name.

    encoding of a field --(sources.py)--> Source
    form of a field     ----------------> Target: the tensor, its layout, its pads      both together are a job

A field whose words lie in columns has a job for each column; one that joins two fields has one for each of them.
"""

from __future__ import annotations

import math
from array import array as line_of
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from maskpack.core.index import IntArray, cumulated
from maskpack.core.pads import EDGE, Pad, pad_words
from maskpack.fields.registry import Path
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda.job_table import Source, Target
from maskpack.packed.cuda.sources import Rows, Sources, Tables, is_flat
from maskpack.packed.decode import words_of_one
from maskpack.packed.references import Columns, Joined, Same

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_MOST = (1 << 31) - jobs.CHUNK
"""Words of a row that the kernel can count."""


class Part(NamedTuple):
    """The field that stores the words of another: for all of each row, its HEAD or its TAIL."""

    owner: Path
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


def parts_of(packed: PackedBatch, form: FieldForm, padded: bool) -> list[Part]:
    """Where the words of a field are; none if the kernel cannot decode it."""
    encoding = packed.fields[form.path]
    if isinstance(encoding, Joined):
        found = [_part(packed, encoding.head, jobs.HEAD), _part(packed, encoding.tail, jobs.TAIL)]
    else:
        found = [_part(packed, form.path, 0)]
    items = words_of_one(form)
    for owner, _ in found:
        stored = packed.fields[owner]
        if isinstance(stored, Same | Joined):
            return []
        if isinstance(stored, Columns) and any(words_of_one(packed.forms[part.owner]) != items for part in found):
            return []
    width = 1 if form.layout is None else packed.layouts[form.layout].width
    special = padded and isinstance(form.pads[0], Pad) and form.pads[0] is not EDGE
    return found if width * items <= _MOST and (not special or form.path in packed.row_pads) else []


def _part(packed: PackedBatch, path: Path, part: int) -> Part:
    encoding = packed.fields[path]
    return Part(encoding.field if isinstance(encoding, Same) else path, part)


class Recipe:
    """The jobs of one launch.

    Args:
        packed: the batch.
        places: the first byte of each array in the body, by the id of the array.
    """

    def __init__(self, packed: PackedBatch, places: Mapping[int, int]) -> None:
        self.tables = Tables()
        self.programs = 0
        self._packed = packed
        self._jobs: list[int] = []
        self._sources = Sources(places, self.tables)
        self._known: dict[tuple[Path, bool], list[Source]] = {}
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

    def add(self, form: FieldForm, parts: list[Part], padded: bool, out: Tensor) -> None:
        """Lets the kernel decode a field to `out`, [T, *F] or, padded, in the form of the field."""
        axis, items = self._axis(form.layout, padded), words_of_one(form)
        if not items or not axis.rows:
            return
        assert form.dtype is not None
        address, size = out.data_ptr(), min(form.dtype.itemsize, 8)
        inner = _words_behind(form, items) if padded else items
        row_words = items * axis.width if padded else items
        pads, pad_row, pad_items, edge = self._pads(form) if padded else (-1, 0, 0, 0)
        head, head_items = self._head(parts[0]) if len(parts) > 1 else (-1, 1)
        for owner, part in parts:
            encoding = self._packed.fields[owner]
            flat = not padded and not part and axis.num_tokens * items <= _MOST and is_flat(encoding)
            rows, most, bounds, unit = (
                (1, axis.num_tokens, -1, axis.num_tokens) if flat else (axis.rows, axis.longest, axis.bounds, 1)
            )
            columns = isinstance(encoding, Columns)
            own, stride = (1, inner) if columns else (items, 1)
            span = jobs.CHUNK if rows == 1 else jobs.SPAN
            spans = -(-most * own // span)
            for column, source in enumerate(self._source(owner, flat)):
                layer, item = divmod(column, inner)
                offset = layer * inner * axis.width + item
                pad, turn = (pads + (column & pad_items), 0) if columns else (pads, pad_items)
                target = Target(
                    spans, span, address, size, own, stride, offset, row_words, bounds, unit, axis.width,
                    1 if columns else inner, axis.splits, axis.starts, axis.ends, pad, pad_row, turn, edge,
                    part, head, 1 if columns else head_items,
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
        form = self._packed.forms[part.owner]
        return self._axis(form.layout, False).bounds, words_of_one(form)

    def _source(self, owner: Path, flat: bool) -> list[Source]:
        """The source of a field, or those of its columns; of `flat` words as one row."""
        known = self._known.get((owner, flat))
        if known is not None:
            return known
        packed = self._packed
        encoding, form = packed.fields[owner], packed.forms[owner]
        assert not isinstance(encoding, Same | Joined)
        axis, items = self._axis(form.layout, False), words_of_one(form)
        table, unit = (-1, 0) if flat else (axis.bounds, items)
        if isinstance(encoding, Columns):
            rows = Rows(axis.rows, lambda: packed.bounds(owner) // items, table, min(unit, 1))
            found = [self._sources.of(column, rows) for column in encoding.columns]
        else:
            found = [self._sources.of(encoding, Rows(axis.rows, lambda: packed.bounds(owner), table, unit))]
        self._known[owner, flat] = found
        return found

    def _pads(self, form: FieldForm) -> tuple[int, int, int, int]:
        """Of a target: pads, pad_row, pad_items and edge."""
        own = self._packed.row_pads.get(form.path)
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
