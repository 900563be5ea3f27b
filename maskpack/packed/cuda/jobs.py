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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.index import IntArray, cumulated
from maskpack.core.latest import Latest
from maskpack.nesting.jobs import words_of_one
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import job_table
from maskpack.packed.cuda.job_table import HEAD, JOB, JOB_NUMBERS, TAIL
from maskpack.packed.table import MIXED_PADS, ONE_EDGE, WORDS, Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_MOST = (1 << 31) - job_table.CHUNK
"""Words of a row that the kernel can count."""
_KIND = [abi.ENTRY.names.index(name) for name in ("kind", "layout", "items", "size", "first", "second")]  # type: ignore[union-attr]
"""What a recipe depends on, among the numbers of an entry."""
_SPANS, _ITEMS, _SOURCE = native.places_in(JOB, "spans", "items", "source")
_AXIS = dict(zip(abi.AXIS.names or (), range(abi.AXIS_NUMBERS), strict=True))
_ONE, _DENSE, _ALL = range(3)
"""The rows of a job: one; those of fields without a layout; those of the batch."""
recipes: Latest[DecodeRecipe] = Latest()


def parts_of(packed: PackedBatch, table: Table, form: FieldForm, number: int, padded: bool) -> list[tuple[int, int]]:
    """The entries that store the words of a field, which is tensor `number` of a table: all of each row (0), its HEAD
    and its TAIL. None if the kernel cannot decode it."""
    at, entries = int(table.fields[number]), table.entries
    found = [(at, 0)]
    if entries[at]["kind"] == abi.CONCAT:
        found = [(int(entries[at]["first"]), HEAD), (int(entries[at]["second"]), TAIL)]
    items = words_of_one(form)
    inner = _words_behind(form, items) if padded and items else items
    for one, _ in found:
        own = entries[one]
        if _needs_host(table, one) or own["items"] != items:
            return []
        group = _words_of_column(own)
        if own["kind"] == abi.COLUMNS and (inner % group or (group > 1 and group % 2 and _is_pair(form))):
            return []
    width = 1 if form.layout is None else packed.layouts[form.layout].width
    mixed = padded and table.pad_kinds[number] == MIXED_PADS
    return found if width * items <= _MOST and not mixed else []


def _needs_host(table: Table, at: int) -> bool:
    """Whether an entry, or one that it leads to, is of a kind that cannot be staged. Its columns have a job each."""
    kinds = table.entries["kind"]
    left = [*table.references[at]] if kinds[at] == abi.COLUMNS else [at]
    for one in left:
        if kinds[one] not in native.STAGED:
            return True
        left += table.references[one]
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
        wanted: int64 [n], the entries that are read.
        with_pads, pad_sizes: the padded tensors, and int64, the bytes of their words.
        jobs: int64 [m, len(JOB)], to which the numbers of a batch are added.
        places, origins: which numbers of the jobs those of a batch are added to, and where these are among them.
        sources: int64 [m - 1], which of `wanted` each job but the first reads.
        rows: int64 [m], the rows of each job.
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
    rows: IntArray
    axes: int
    room: int = 0

    def told(
        self,
        table: Table,
        layouts: IntArray,
        padded: bool,
        first: Sequence[IntArray],
        more: Sequence[int],
        rows: int,
        dense_rows: int,
        *,
        pinned: bool,
    ) -> tuple[Tensor, int, int]:
        """What the kernel reads of a batch beside the body of its table: int64 [n] on the host, of tables, the `first`
        ones before the others, then the first program of each job, then the jobs; where these begin; and the number of
        programs.

        Args:
            layouts: those of all rows of the table.
            padded: whether padded fields are to be padded.
            more: the size and the address of the tensor for the first tables, the addresses of all others, and where
                the first tables begin if some rows are decoded.
            rows, dense_rows: the rows that are decoded, and those of fields without a layout.
        """
        pads, kinds = table.pads[self.with_pads], table.pad_kinds[self.with_pads]
        axes, sources = abi.AXIS_NUMBERS * self.axes, abi.SOURCE_NUMBERS * len(self.wanted)
        found: IntArray = np.empty(axes + sources + kinds.size, np.int64)
        begin, count = sum(own.size for own in first), len(self.jobs)
        given = (table.entries, table.body, table.rows, table.dense_rows), layouts, self.wanted, pads, self.pad_sizes
        while True:
            line = torch.empty(self.room + count + self.jobs.size, dtype=torch.int64, device="cpu", pin_memory=pinned)
            out = line.numpy()
            used = native.stage(*given, padded, out[: self.room], begin, found)
            if used <= self.room:
                break
            self.room = used + used // 4  # the next batch may have more
        np.concatenate([*first, out[:0]], out=out[:begin])
        of_rows = (kinds == WORDS) * np.maximum(self.pad_sizes // 8, 1)
        numbers = np.concatenate([found, of_rows, kinds == ONE_EDGE, more])
        jobs = out[used + count :][: self.jobs.size].reshape(self.jobs.shape)
        jobs[...] = self.jobs
        jobs.reshape(-1)[self.places] += numbers[self.origins]
        jobs[1:, _SOURCE:] = found[axes : axes + sources].reshape(-1, abi.SOURCE_NUMBERS)[self.sources]
        jobs[:, _SPANS] = -(-jobs[:, _SPANS] * jobs[:, _ITEMS] // job_table.SPAN)
        programs = cumulated(np.array([1, dense_rows, rows])[self.rows] * jobs[:, _SPANS])
        out[used : used + count] = programs[:-1]
        return line[: used + count + self.jobs.size], used, int(programs[-1])


def recipe_of(packed: PackedBatch, table: Table, forms: Sequence[FieldForm], nested: bool, some: bool) -> DecodeRecipe:
    """How some fields are decoded, which are the tensors of a table; `some` of its rows, or all."""
    numbers = table.entries.view(np.int64).reshape(table.entries.size, -1)
    columns = np.where(table.entries["kind"] == abi.COLUMNS, table.entries["number"], 0)
    key = (
        *(packed.schema, tuple([form.path for form in forms]), nested, some, table.names),
        *((table.pad_kinds == MIXED_PADS).tobytes(), table.fields.tobytes(), numbers[:, _KIND].tobytes()),
        *(columns.tobytes(), *packed.frames.items()),
    )
    return recipes.get(key) or recipes.keep(key, _RecipeWriter(packed, table, nested, some).recipe(forms))


@dataclass
class _RecipeWriter:
    """Writes a recipe."""

    packed: PackedBatch
    table: Table
    nested: bool
    some: bool
    _jobs: list[Any] = field(default_factory=list[Any])
    _cells: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    _wanted: dict[int, int] = field(default_factory=dict[int, int])
    _sources: list[int] = field(default_factory=list[int])
    _rows: list[int] = field(default_factory=list[int])
    _with_pads: list[int] = field(default_factory=list[int])
    _pad_sizes: list[int] = field(default_factory=list[int])

    def recipe(self, forms: Sequence[FieldForm]) -> DecodeRecipe:
        copy = {"spans": ("sizes", 0), "unit": ("sizes", 0), "out": ("sizes", 1)}
        self._job(_ONE, copy, size=8, items=1, stride=1, row_words=1, width=-1)
        self._jobs[0]["source"]["kind"], self._jobs[0]["source"]["data"] = abi.FROM_TABLE, 0
        taken: list[FieldForm] = []
        for number, form in enumerate(forms):
            padded = form.kind == "padded" and not self.nested
            parts = parts_of(self.packed, self.table, form, number, padded)
            if parts:
                self._add(form, number, parts, padded, len(taken))
                taken.append(form)
        axes, pads = len(self.table.names) + 1, len(self._with_pads)
        groups = {"axes": abi.AXIS_NUMBERS * axes, "sources": abi.SOURCE_NUMBERS * len(self._wanted)}
        groups |= {"pads": pads, "pad_row": pads, "edge": pads, "sizes": 2, "out": len(taken), "taken": 0}
        begins = dict(zip(groups, cumulated(np.array([*groups.values()])).tolist(), strict=False))
        return DecodeRecipe(
            taken,
            np.array([*self._wanted], np.int64),
            self._with_pads,
            np.array(self._pad_sizes, np.int64),
            np.array(self._jobs, JOB).view(np.int64).reshape(len(self._jobs), -1),
            np.array([place for place, _, _ in self._cells], np.int64),
            np.array([begins[group] + at for _, group, at in self._cells], np.int64),
            np.array(self._sources, np.int64),
            np.array(self._rows, np.int64),
            axes,
        )

    def _job(self, rows: int, numbers: dict[str, tuple[str, int]], **members: int) -> None:
        """Adds a job with some members. Those of `numbers`, by their group and their place in it, are added for each
        batch."""
        job: Any = np.full(JOB_NUMBERS, -1, np.int64).view(JOB)[0]
        for name in (*("spans", "out", "offset", "pad_row", "pad_items", "edge", "part"), *numbers):
            job[name] = 0
        for name, value in members.items():
            job[name] = value
        places = native.places_in(JOB, *numbers)
        own = len(self._jobs) * (JOB_NUMBERS)
        self._cells += [(own + place, *cell) for place, cell in zip(places, numbers.values(), strict=True)]
        self._jobs.append(job)
        self._rows.append(rows)

    def _axis(self, name: str | None, member: str) -> tuple[str, int]:
        at = len(self.table.names) if name is None else self.table.names.index(name)
        return "axes", at * abi.AXIS_NUMBERS + _AXIS[member]

    def _add(self, form: FieldForm, number: int, parts: list[tuple[int, int]], padded: bool, out: int) -> None:
        """The jobs of tensor `number` of the table, which is the tensor `out` of those decoded: [T, *F] or, padded, in
        the form of the field."""
        items, width, turns, entries = words_of_one(form), -1, 0, self.table.entries
        if not items:
            return
        assert form.dtype is not None
        inner = _words_behind(form, items) if padded else items
        numbers: dict[str, tuple[str, int]] = {"out": ("out", out)}
        if padded:
            width, turns = self.packed.layouts[form.layout or ""].width, int(form.dtype.itemsize == 16)
            numbers |= {name: (name, len(self._with_pads)) for name in ("pads", "pad_row", "edge")}
            numbers |= {name: self._axis(form.layout, name) for name in ("splits", "starts", "ends")}
            self._with_pads.append(number)
            self._pad_sizes.append(form.dtype.itemsize)
        else:
            numbers["spans"] = self._axis(form.layout, "longest")
        if form.layout is not None:
            numbers["bounds"] = self._axis(form.layout, "bounds")
        if len(parts) > 1 and (head := int(entries[parts[0][0]]["layout"])) >= 0:
            numbers["head_bounds"] = self._axis(self.table.names[head], "bounds")
        if self.some:
            numbers["taken"] = "taken", 0
            if form.layout is not None:
                numbers["places"] = "taken", 1 + self.table.names.index(form.layout)
        for at, part in parts:
            entry, group = entries[at], _words_of_column(entries[at])
            in_columns = entry["kind"] == abi.COLUMNS
            own, stride, within = (group, inner, group) if in_columns else (items, 1, inner)
            for column in range(entry["number"] if in_columns else 1):
                layer, item = divmod(column * group, inner)
                turn = column & turns if in_columns and group == 1 else 0
                self._job(
                    _DENSE if form.layout is None else _ALL, numbers, spans=max(width, 0), pads=turn if padded else -1,
                    size=min(form.dtype.itemsize, 8), items=own, stride=stride,
                    offset=layer * inner * max(width, 0) + item, row_words=items * max(width, 1), unit=1,
                    width=width, inner=within, part=part, head_unit=own, group=group,
                    pad_items=0 if in_columns and group == 1 else turns,
                )  # fmt: skip
                source = int(entry["first"]) + column if in_columns else at
                self._sources.append(self._wanted.setdefault(source, len(self._wanted)))


def _words_behind(form: FieldForm, items: int) -> int:
    """Words of an element that lie next to each other in the padded field."""
    return math.prod(form.shape[form.ragged_dim - 1 :]) * (items // math.prod(form.shape))
