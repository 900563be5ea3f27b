"""What the decode kernel does for the fields of a batch: its jobs.

    entry of a field ------(stage.c)--> JobSource
    form of a field  ----------------> JobTarget: the tensor, its layout, its pads      both together are a job

A field whose words lie in columns has a job for each column; one that joins two fields has one for each of them. A
recipe has the jobs of all batches of one kind; the sizes of a batch, and the places of its arrays, tables and tensors,
are added to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from maskpack.core import abi, native
from maskpack.core.index import IntArray, cumulated
from maskpack.core.latest import Latest
from maskpack.nesting.jobs import words_of_one
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import job_table
from maskpack.packed.cuda.job_table import HEAD, JOB, SPAN, TAIL, JobSource, JobTarget
from maskpack.packed.table import MIXED_PADS, ONE_EDGE, WORDS, Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_MOST = (1 << 31) - job_table.CHUNK
"""Words of a row that the kernel can count."""
_KIND = [abi.ENTRY.names.index(name) for name in ("kind", "layout", "items", "size", "first", "second")]  # type: ignore[union-attr]
"""What a recipe depends on, among the numbers of an entry."""
_SPANS, _SPAN, _ITEMS = (1 + JobTarget._fields.index(name) for name in ("spans", "span", "items"))
_TOKENS, _LONGEST, _BOUNDS, _SPLITS, _STARTS, _ENDS = range(abi.AXIS_NUMBERS)
recipes: Latest[DecodeRecipe] = Latest()


class EntryPart(NamedTuple):
    """The entry that stores the words of a field: for all of each row, its HEAD or its TAIL."""

    entry: int
    part: int


def parts_of(packed: PackedBatch, table: Table, form: FieldForm, number: int, padded: bool) -> list[EntryPart]:
    """Where the words of a field are, which is tensor `number` of a table; none if the kernel cannot decode it."""
    at, entries = int(table.fields[number]), table.entries
    found = [EntryPart(at, 0)]
    if entries[at]["kind"] == abi.CONCAT:
        found = [EntryPart(entries[at]["first"], HEAD), EntryPart(entries[at]["second"], TAIL)]
    items = words_of_one(form)
    inner = _words_behind(form, items) if padded and items else items
    for one, _ in found:
        own = entries[one]
        if _needs_host(entries, one) or own["items"] != items:
            return []
        group = _words_of_column(own)
        if own["kind"] == abi.COLUMNS and (inner % group or (group > 1 and group % 2 and _is_pair(form))):
            return []
    width = 1 if form.layout is None else packed.layouts[form.layout].width
    mixed = padded and table.pad_kinds[number] == MIXED_PADS
    return found if width * items <= _MOST and not mixed else []


def _needs_host(entries: Any, at: int) -> bool:
    """Whether an entry, or one that it leads to, is of a kind that cannot be staged. Its columns have a job each."""
    top, left, seen = at, [at], set[int]()
    while left:
        at = left.pop()
        kind, first, second = (int(entries[at][name]) for name in ("kind", "first", "second"))
        if at in seen:
            continue
        seen.add(at)
        rows, near = abi.REFERENCES[kind]
        if rows == abi.OF_COLUMNS and at == top:
            left += range(first, first + int(entries[at]["number"]))
        elif kind not in native.STAGED:
            return True
        left += [first] * (rows == abi.OF_ROWS)
        left += [second] * (near == abi.OF_NEAR and second >= 0)
    return False


def _words_of_column(entry: Any) -> int:
    return entry["items"] // entry["number"] if entry["kind"] == abi.COLUMNS else 1


def _is_pair(form: FieldForm) -> bool:
    """Whether an item is two words."""
    return form.dtype is not None and form.dtype.itemsize == 16


@dataclass
class DecodeRecipe:
    """The jobs of all batches of one kind.

    Attributes:
        forms: the fields that the kernel decodes.
        wanted: int64 [n, 2], the entries that are read, and whether the words of each are found without their row.
        with_pads, pad_sizes: the padded tensors, and int64, the bytes of their words.
        jobs: int64 [m, JOB], to which the numbers of a batch are added.
        places, origins: which numbers of the jobs those of a batch are added to, and where these are among them.
        sources: int64 [m - 1], which of `wanted` each job but the first reads.
        single: bool [m], jobs of one row.
        dense: bool [m], jobs of rows without a layout.
        more: the numbers of a batch of which some rows are decoded: where its rows taken lie among the tables, and the
            bounds of the rows of each layout.
        axes: the layouts, and one for rows without.
        room: the numbers of tables that a batch is likely to have.
    """

    forms: list[FieldForm]
    wanted: IntArray
    with_pads: list[int]
    pad_sizes: IntArray
    jobs: IntArray
    places: IntArray
    origins: IntArray
    sources: IntArray
    single: npt.NDArray[np.bool_]
    dense: npt.NDArray[np.bool_]
    more: int
    axes: int
    room: int = 0

    def tables(self, table: Table, layouts: IntArray, padded: bool, out: IntArray, used: int) -> tuple[int, IntArray]:
        """Writes tables to `out`, behind the first `used` numbers. Returns the numbers in use, more than `out` has if
        they are to be written again to more; and the numbers of the batch, to which sizes and addresses are added."""
        pads = table.pads[self.with_pads]
        count = abi.AXIS_NUMBERS * self.axes + abi.SOURCE_NUMBERS * len(self.wanted)
        padded_fields = len(self.with_pads)
        numbers: IntArray = np.empty(count + 3 * padded_fields + 2 + len(self.forms) + self.more, np.int64)
        kinds = table.pad_kinds[self.with_pads]
        rows, edges = numbers[count + padded_fields :][: 2 * padded_fields].reshape(2, -1)
        rows[:], edges[:] = (kinds == WORDS) * np.maximum(self.pad_sizes // 8, 1), kinds == ONE_EDGE
        own = table.entries, table.body, table.rows, table.dense_rows
        return native.stage(own, layouts, self.wanted, pads, self.pad_sizes, padded, out, used, numbers), numbers

    def fill(self, lines: IntArray, numbers: IntArray, rows: int, dense_rows: int) -> int:
        """Writes the jobs of a batch to int64 [m, JOB]: of its rows, and of those of fields without a layout. Returns
        the number of programs."""
        lines[...] = self.jobs
        lines.reshape(-1)[self.places] += numbers[self.origins]
        first = abi.AXIS_NUMBERS * self.axes
        sources = numbers[first : first + abi.SOURCE_NUMBERS * len(self.wanted)]
        lines[1:, -abi.SOURCE_NUMBERS :] = sources.reshape(-1, abi.SOURCE_NUMBERS)[self.sources]
        counts = np.where(self.single, 1, np.where(self.dense, dense_rows, rows))
        lines[:, _SPAN] = np.where(counts == 1, job_table.CHUNK, SPAN)
        lines[:, _SPANS] = -(-lines[:, _SPANS] * lines[:, _ITEMS] // lines[:, _SPAN])
        programs = cumulated(counts * lines[:, _SPANS])
        lines[:, 0] = programs[:-1]
        return int(programs[-1])


def recipe_of(packed: PackedBatch, table: Table, forms: Sequence[FieldForm], nested: bool, some: bool) -> DecodeRecipe:
    """How some fields are decoded, which are the tensors of a table; `some` of its rows, or all."""
    numbers = table.entries.view(np.int64).reshape(table.entries.size, -1)
    most = max((layout.num_tokens for layout in table.layouts.values()), default=0)
    is_large = max(most, table.dense_rows) * int(table.entries["items"].max(initial=0)) > _MOST
    columns = np.where(table.entries["kind"] == abi.COLUMNS, table.entries["number"], 0)
    key = (
        *(packed.schema, tuple([form.path for form in forms]), nested, some, table.names, table.widths),
        *(is_large, (table.pad_kinds == MIXED_PADS).tobytes(), table.fields.tobytes(), numbers[:, _KIND].tobytes()),
        columns.tobytes(),
    )
    return recipes.get(key) or recipes.keep(key, _RecipeWriter(packed, table, nested, some, is_large).recipe(forms))


@dataclass
class _RecipeWriter:
    """Writes a recipe."""

    packed: PackedBatch
    table: Table
    nested: bool
    some: bool
    is_large: bool
    _jobs: list[list[int]] = field(default_factory=list[list[int]])
    _cells: list[tuple[int, int, str, int]] = field(default_factory=list[tuple[int, int, str, int]])
    _wanted: dict[tuple[int, bool], int] = field(default_factory=dict[tuple[int, bool], int])
    _sources: list[int] = field(default_factory=list[int])
    _rows: list[tuple[bool, bool]] = field(default_factory=list[tuple[bool, bool]])
    _with_pads: list[int] = field(default_factory=list[int])
    _pad_sizes: list[int] = field(default_factory=list[int])

    def recipe(self, forms: Sequence[FieldForm]) -> DecodeRecipe:
        self._entries = self.table.entries
        copy = JobTarget(0, 0, 0, 8, 1, 1, 0, 1, -1, 0)
        self._job(
            copy,
            {"spans": ("sizes", 0), "unit": ("sizes", 0), "out": ("sizes", 1)},
            JobSource(abi.FROM_TABLE, data=0),
        )
        self._rows.append((True, False))
        taken: list[FieldForm] = []
        for number, form in enumerate(forms):
            padded = form.kind == "padded" and not self.nested
            parts = parts_of(self.packed, self.table, form, number, padded)
            if parts:
                self._add(form, number, parts, padded, len(taken))
                taken.append(form)
        begins = {"axes": 0, "pads": abi.AXIS_NUMBERS * (len(self.table.names) + 1)}
        begins["pads"] += abi.SOURCE_NUMBERS * len(self._wanted)
        begins["pad_row"] = begins["pads"] + len(self._with_pads)
        begins["edge"] = begins["pad_row"] + len(self._with_pads)
        begins["sizes"] = begins["edge"] + len(self._with_pads)
        begins["out"] = begins["sizes"] + 2
        begins["taken"] = begins["out"] + len(taken)
        return DecodeRecipe(
            taken,
            np.array([*self._wanted], np.int64).reshape(-1, 2),
            self._with_pads,
            np.array(self._pad_sizes, np.int64),
            np.array(self._jobs, np.int64),
            np.array([job * JOB + place for job, place, _, _ in self._cells], np.int64),
            np.array([begins[group] + at for _, _, group, at in self._cells], np.int64),
            np.array(self._sources, np.int64),
            np.array([single for single, _ in self._rows], np.bool_),
            np.array([dense for _, dense in self._rows], np.bool_),
            1 + len(self.table.names) if self.some else 0,
            len(self.table.names) + 1,
        )

    def _job(self, target: JobTarget, numbers: dict[str, tuple[str, int]], source: JobSource | None = None) -> None:
        """Adds a job. `numbers` of its target are added for each batch, by their group and their place in it."""
        for name, (group, at) in numbers.items():
            self._cells.append((len(self._jobs), 1 + JobTarget._fields.index(name), group, at))
        self._jobs.append([0, *target, *(source or [0] * abi.SOURCE_NUMBERS)])

    def _axis(self, name: str | None, number: int) -> tuple[str, int]:
        at = len(self.table.names) if name is None else self.table.names.index(name)
        return "axes", at * abi.AXIS_NUMBERS + number

    def _add(self, form: FieldForm, number: int, parts: list[EntryPart], padded: bool, out: int) -> None:
        """The jobs of tensor `number` of the table, which is the tensor `out` of those decoded: [T, *F] or, padded, in
        the form of the field."""
        items, width = words_of_one(form), -1
        if not items:
            return
        assert form.dtype is not None
        size = min(form.dtype.itemsize, 8)
        inner = _words_behind(form, items) if padded else items
        numbers: dict[str, tuple[str, int]] = {"out": ("out", out)}
        row_words, pads, pad_items = items, -1, 0
        if padded:
            width = self.packed.layouts[form.layout or ""].width
            row_words = items * width
            pads, pad_items = 0, int(form.dtype.itemsize == 16)
            numbers |= {name: (name, len(self._with_pads)) for name in ("pads", "pad_row", "edge")}
            self._with_pads.append(number)
            self._pad_sizes.append(form.dtype.itemsize)
            places = (("splits", _SPLITS), ("starts", _STARTS), ("ends", _ENDS))
            numbers |= {name: self._axis(form.layout, at) for name, at in places}
        head, head_items = -1, 1
        if len(parts) > 1:
            layout, head_items = self._entries[parts[0].entry]["layout"], self._entries[parts[0].entry]["items"]
            if layout >= 0:
                head, numbers["head_bounds"] = 0, self._axis(self.table.names[int(layout)], _BOUNDS)
        for at, part in parts:
            entry = self._entries[at]
            columns = range(entry["first"], entry["first"] + entry["number"]) if entry["kind"] == abi.COLUMNS else [at]
            by_place = all(self._entries[column]["kind"] == abi.PLAIN for column in columns)
            flat = not padded and not part and not self.is_large and by_place and not self.some
            of_rows = dict(numbers)
            if flat:
                of_rows["unit"] = self._axis(form.layout, _TOKENS)
            elif form.layout is not None:
                of_rows["bounds"] = self._axis(form.layout, _BOUNDS)
            if self.some:
                of_rows["taken"] = "taken", 0
                if form.layout is not None:
                    of_rows["places"] = "taken", 1 + self.table.names.index(form.layout)
            if not padded:
                of_rows["spans"] = self._axis(form.layout, _TOKENS if flat else _LONGEST)
            runs = (0, 0, 0) if padded else (-1, -1, -1)
            group = _words_of_column(entry)
            own, stride = (group, inner) if entry["kind"] == abi.COLUMNS else (items, 1)
            for column, source in enumerate(columns):
                layer, item = divmod(column * group, inner)
                pad, turn = pads, pad_items
                if entry["kind"] == abi.COLUMNS and group == 1:
                    pad, turn = pads + (column & pad_items), 0
                target = JobTarget(
                    max(width, 0), 0, 0, size, own, stride, layer * inner * width + item, row_words,
                    0 if "bounds" in of_rows else -1, 0 if flat else 1, width,
                    own if entry["kind"] == abi.COLUMNS else inner, *runs, pad, 0,
                    turn, 0, part, head, own if entry["kind"] == abi.COLUMNS else head_items, group,
                    0 if "taken" in of_rows else -1, 0 if "places" in of_rows else -1,
                )  # fmt: skip
                self._job(target, of_rows)
                self._sources.append(self._wanted.setdefault((source, flat), len(self._wanted)))
                self._rows.append((flat, form.layout is None))


def _words_behind(form: FieldForm, items: int) -> int:
    """Words of an element that lie next to each other in the padded field."""
    return math.prod(form.shape[form.ragged_dim - 1 :]) * (items // math.prod(form.shape))
