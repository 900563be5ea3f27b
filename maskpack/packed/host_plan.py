"""HostPlan: how the batches of one signature on the host are encoded, by one call of the compiled core.

    BatchPlan --> origins, cuts, jobs, once --+
    batch: addresses, rows -------------------+--> make layouts, verify, gather, encode --> table, schema

The core tells what became of each field: the pad that is under its mask, or that it stays padded, in the same call.
What it does not decide (odd bools, an error to be shown, a field that may not stay padded) is left to `gather`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import address, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path
from maskpack.core.pads import Pad, Pads, pad_words, trial_of
from maskpack.fields.options import Options
from maskpack.layout import scan
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.axes import WHOLE, Source
from maskpack.nesting.gather import LOSSY
from maskpack.nesting.nested import Nested
from maskpack.nesting.plan import BatchPlan, Seen
from maskpack.nesting.schema import FieldForm, Schema
from maskpack.packed.table import Table, check_memory, done_jobs, forms_key, job_table, packed_forms, recall

_PADDED, _PACKED = native.places_in(abi.FIELD, "padded", "packed")  # of a job, which begins with its field
_RESULT, _GIVEN, _PADS, _JOB_ROWS = native.places_in(abi.JOB, "result", "given", "under_mask", "rows")
_AT, _ROWS, _LIMIT = native.places_in(abi.ORIGIN, "at", "rows", "limit")
_MASK, _VALUES = -1, 0
_SPARE = 1 << 15
_WAYS = {"mask": abi.OF_MASK, "prefix": abi.OF_PREFIX, "jagged": abi.OF_OFFSETS, "given": abi.OF_LAYOUT}
_NO_PLAIN_ZEROS = (torch.complex32, torch.complex64, torch.complex128, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Parts:
    """The layouts of a batch: where each comes from, and which are columns of others.

    Attributes:
        names: of the layouts, those that are columns of others last, which is how they are stored.
        origins: the sources that are no cuts.
        cuts: of each layout, its origin, and its first column, or WHOLE, and width.
    """

    names: tuple[str, ...]
    origins: list[Source]
    cuts: list[tuple[int, int, int]]

    @classmethod
    def of(cls, plan: BatchPlan, given: Mapping[str, RowLayout]) -> Parts:
        owners = {id(layout): name for name, layout in given.items()}

        def apart(name: str) -> tuple[Source, int, int]:
            source, width = plan.sources[name], plan.widths.get(name, 0)
            if source.way == "given":
                whole, low = given[source.key].__dict__.get("part_of", (None, WHOLE))
                owner = owners.get(id(whole))
                return (source, WHOLE, width) if owner is None else (Source("given", owner), low, width)
            return source._replace(low=WHOLE, width=0), source.low, width

        found = {name: apart(name) for name in plan.sources}
        names = sorted(found, key=lambda name: found[name][1] != WHOLE)
        numbers: dict[Source, int] = {}
        own = [found[name] for name in names]
        cuts = [(numbers.setdefault(origin, len(numbers)), low, width) for origin, low, width in own]
        return cls(tuple(names), list(numbers), cuts)

    def stored(self, anchors: Mapping[str, int]) -> Any:
        """STORED [m], before the layouts are in a body."""
        stored = np.zeros(len(self.names), abi.STORED)
        wholes = {origin: place for place, (origin, low, _) in enumerate(self.cuts) if low == WHOLE}
        for place, (name, (origin, low, _)) in enumerate(zip(self.names, self.cuts, strict=True)):
            stored["anchor"][place] = anchors[name]
            if low != WHOLE and origin in wholes:
                stored["kind"][place], stored["parent"][place], stored["low"][place] = abi.AS_PART, wholes[origin], low
        return stored


@dataclass
class HostPlan:
    """How the batches of one signature are encoded.

    Attributes:
        plan: what they are.
        schema: with no field that stays padded for its values.
        padded: the padded fields.
        nested: the numbers of the jobs and of the tensors of nested fields, and their forms.
        names: the names of the layouts, as they are stored.
        source: what is in `line`.
        line: what the last such batch was encoded from.
        inputs: int64 [n], the numbers of what lies at the addresses in the line: tensors, then offsets, then given
            layouts; and `targets` where these addresses are.
        copies: what is copied before it is read: its place among the inputs, its number among the tensors, and the
            ragged dim of a padded one, _VALUES or _MASK.
        limits_at: where the number of values under some offsets is, and `limits` the numbers of these offsets.
        rows_at: where the number of rows is, and `results_at` what became of each job.
        order: int64 [n], the place of each tensor among the jobs.
        key: what the jobs are remembered by, for plans of other widths.
        uniform: whether some masks are taken to have valid words that are all equal.
        bytes_of_row: bytes of a row of the padded fields.
        misfit: whether the last such batch had a mask that is not uniform.
        room: bytes for a body, enough for one that is a little larger than the last.
        schemas: with the fields that stay padded, by which do.
    """

    plan: BatchPlan
    schema: Schema
    padded: Collection[Path]
    nested: Sequence[tuple[int, int, FieldForm]]
    names: tuple[str, ...]
    source: native.BatchSource
    line: IntArray
    inputs: IntArray
    targets: IntArray
    copies: Sequence[tuple[int, int, int]]
    limits_at: IntArray
    limits: Sequence[int]
    rows_at: IntArray
    results_at: IntArray
    order: IntArray
    key: tuple[Any, ...]
    uniform: bool
    bytes_of_row: int
    room: int = 0
    misfit: bool = False
    schemas: dict[bytes, Schema] = field(default_factory=dict[bytes, Schema])

    @classmethod
    def of(
        cls, plan: BatchPlan, options: Options, given: Mapping[str, RowLayout], seen: Seen, uniform: bool
    ) -> HostPlan | None:
        """None for batches that the core does not encode from what they are. With `uniform`, masks are taken to have
        valid words that are all equal, which need not be verified."""
        if seen.signature is None or plan.by_value or not _is_host(plan, given, seen):
            return None
        tensors = {form.path: x for form, x in zip(plan.forms, seen.tensors, strict=True) if x is not None}
        padded = {f.path: f for f in plan.forms if f.kind == "padded" and f.path not in seen.jagged}
        parts = Parts.of(plan, given)
        in_order: list[Any] = seen.tensors
        numbers = {form.path: number for number, form in enumerate(plan.forms)}
        masks = [source.key for source in parts.origins if source.way == "mask"]
        alike = {path for path in masks if uniform and _may_trust(plan, padded.get(path), tensors[path])}
        schema = replace(plan.schema, forms=packed_forms(plan.schema, tensors, padded))
        forms, rows = [form for form in schema.forms if form.path in tensors], plan.rows
        table, key = job_table(tuple(forms), parts.names), forms_key(forms, rows)
        jobs = table.jobs.copy()
        jobs["rows"] = rows
        trusted, held = alike if options.verify else padded, list[Tensor]()
        for place, form in zip(table.order.tolist(), forms, strict=True):
            if form.path in padded:
                trials = [trial_of(pad, tensors[form.path].dtype, form.path in trusted) for pad in plan.pads[form.path]]
                held.append(_described(jobs[place], form, tensors[form.path], trials, not options.strict))
        recall(jobs, key)
        lines = [_line(source, tensors, seen, rows, alike) for source in parts.origins]
        numbers_given = {name: number for number, name in enumerate(given)}
        source = native.BatchSource(len(lines), len(parts.cuts), len(jobs), native.slots_of(jobs))
        blocks = [lines, parts.cuts, parts.stored(plan.anchors), jobs]
        line = np.concatenate([np.ascontiguousarray(block).view(np.int64).reshape(-1) for block in blocks])
        first, begins = source.places[2], np.arange(len(lines)) * abi.ORIGIN_NUMBERS
        each = first + np.arange(len(jobs)) * abi.JOB_NUMBERS
        own = [numbers[form.path] for form in forms]
        places = table.order * abi.JOB_NUMBERS + [_PADDED if form.path in padded else _PACKED for form in forms]
        reads = [
            (at, numbers[key], _MASK) for at, (way, key, *_) in enumerate(parts.origins) if way in ("mask", "prefix")
        ]
        reads += [
            (len(lines) + at, number, form.ragged_dim if form.path in padded else _VALUES)
            for at, (number, form) in enumerate(zip(own, forms, strict=True))
        ]
        offsets = [at for at, (way, _, _, _) in enumerate(parts.origins) if way == "jagged"]
        return cls(
            plan,
            schema,
            frozenset(padded),
            [
                (int(place), numbers[form.path], form)
                for place, form in zip(table.order, forms, strict=True)
                if form.kind == "padded" and form.path not in padded
            ],
            parts.names,
            source,
            line,
            np.array([*(_input(source, numbers, seen, numbers_given) for source in parts.origins), *own], np.int64),
            np.concatenate([begins + _AT, first + places]).astype(np.int64),
            [read for read in reads if _copied(held := in_order[read[1]], read[2]).data_ptr() != held.data_ptr()],
            begins[offsets] + _LIMIT,
            [seen.jagged[parts.origins[at].key] for at in offsets],
            np.concatenate([begins + _ROWS, each + _JOB_ROWS]).astype(np.int64),
            each + _RESULT,
            table.order,
            key,
            bool(alike),
            sum(tensors[path].nbytes for path in padded) // rows,
        )

    def encoded(
        self, seen: Seen, rows: int, given: IntArray, layouts: Mapping[str, RowLayout], carried: Nested
    ) -> tuple[Table, Schema] | None:
        """The table and the schema of a batch of this signature; None if the core leaves it to `gather`. `given` is the
        table of the `layouts` of another batch, `carried` what is said of nested fields."""
        self.misfit = False
        if seen.jagged and layouts and not self._has_layouts(seen, layouts):
            return None
        line, (_, stored, jobs, end) = np.array(self.line), self.source.places
        places = [0 if x is None else x.data_ptr() for x in (*seen.tensors, *seen.offsets)]
        places += range(address(given), address(given) + given.nbytes, abi.LAYOUT.itemsize)
        line[self.targets] = np.array(places, np.int64)[self.inputs]
        copies = [_copied(x, dim) for _, number, dim in self.copies if (x := seen.tensors[number]) is not None]
        for (at, _, _), x in zip(self.copies, copies, strict=True):
            line[self.targets[at]] = x.data_ptr()
        line[self.limits_at] = [seen.limits[number] for number in self.limits]
        line[self.rows_at] = rows
        line[self.results_at] = abi.FITS
        held: list[Pads] = []
        for place, number, form in self.nested:
            values: Any = seen.tensors[number]
            held.append(self.plan.pads_of(form, values, carried, "compress"))
            at = jobs + place * abi.JOB_NUMBERS + _GIVEN
            line[at : at + 3] = held[-1].place
        found, line = native.compress(self.source, line, self.room, native.threads_for(rows * self.bytes_of_row))
        done = line[jobs:end].reshape(-1, abi.JOB_NUMBERS)
        if found is None:
            check_memory(done[:, _RESULT])
            self.misfit = self.uniform and not done[:, _RESULT].any()
            return None
        self.line, self.room = line, found.body.nbytes + found.body.nbytes // 4 + _SPARE
        done_jobs.keep(self.key, native.structs(line[jobs:end], abi.JOB))
        done = done[self.order]
        pads = native.structs(np.array(done[:, _PADS : _PADS + 3], order="C"), abi.ARRAY)
        own = native.structs(np.array(line[stored:jobs]), abi.STORED)
        parts = self.names, own, found.entries, found.fields[self.order], pads, found.body
        table = Table(rows, rows, *parts, is_compact=True)
        kept = done[:, _RESULT] == abi.KEPT
        if kept.tobytes() not in self.schemas:
            self.schemas[kept.tobytes()] = _with_kept(self.schema, kept.tolist())
        return table, self.schemas[kept.tobytes()]

    def _has_layouts(self, seen: Seen, layouts: Mapping[str, RowLayout]) -> bool:
        """Whether the jagged fields of a nested batch have the row lengths of their layouts."""
        checked: set[tuple[int, str]] = set()
        for form in self.schema.forms:
            number = seen.jagged.get(form.path)
            if number is None or form.kind != "padded" or (number, form.layout) in checked:
                continue
            layout, offsets = layouts[form.layout or ""], seen.offsets[number]
            same = offsets is layout.__dict__.get("offsets")
            if not same and not np.array_equal(offsets.detach().numpy(), layout.row_offsets):
                return False
            if seen.limits[number] < layout.num_tokens:
                return False
            checked.add((number, form.layout or ""))
        return True


def _is_host(plan: BatchPlan, given: Mapping[str, RowLayout], seen: Seen) -> bool:
    """Whether the core reads all tensors and makes all layouts of a batch."""
    held = [*(x for x in seen.tensors if x is not None), *seen.offsets, *given.values()]
    offsets = all(own.dtype is torch.int64 and own.is_contiguous() for own in seen.offsets)
    few = all(len(pads) <= abi.MOST_PADS for pads in plan.pads.values())
    known = all(source.way in _WAYS for source in plan.sources.values())
    tensors = any(x is not None for x in seen.tensors)
    return tensors and offsets and few and known and all(x.device.type == "cpu" for x in held)


def _may_trust(plan: BatchPlan, form: FieldForm | None, mask: Tensor) -> bool:
    """Whether a mask that has one valid word needs no other check of its pad."""
    first = None if form is None else plan.pads[form.path][0]
    pad = None if first is None or isinstance(first, Pad) else pad_words(first, mask.dtype)
    if form is None or pad is None or any(pad) or plan.sources.get(form.layout or "") != Source("mask", form.path):
        return False
    return scan.is_plain(mask)


def _described(row: Any, form: FieldForm, x: Tensor, trials: Sequence[Any], keeps: bool) -> Tensor:
    """Writes where a padded tensor lies, and which pads it may have, into the row of its job; `keeps`: it may stay as
    it is. Returns the tensor that the row points to, which may be a copy."""
    row["field"], held = native.described(x.movedim(form.ragged_dim, 1))
    row["padded"], row["keeps"] = 1, abi.MAY if keeps and form.ragged_dim == 1 and x.is_contiguous() else 0
    assert len(trials) <= abi.MOST_PADS
    row["num_pads"] = len(trials)
    row["pads"][: len(trials)] = trials
    return held


def _line(
    source: Source, tensors: Mapping[Path, Tensor], seen: Seen, rows: int, alike: Collection[Path]
) -> tuple[int, ...]:
    """An Origin."""
    way = _WAYS[source.way]
    if way == abi.OF_OFFSETS:
        return 0, 8, rows, 0, 0, 0, way, 0, 0
    if way == abi.OF_LAYOUT:
        return 0, 0, rows, 0, 0, 0, way, 0, 0
    return *scan.described(*scan.readable(tensors[source.key])), way, int(source.key in alike), 0


def _input(source: Source, numbers: Mapping[Path, int], seen: Seen, given: Mapping[str, int]) -> int:
    """The number of what an origin is read from."""
    if source.way == "jagged":
        return len(seen.tensors) + seen.jagged[source.key]
    if source.way == "given":
        return len(seen.tensors) + len(seen.offsets) + given[source.key]
    return numbers[source.key]


def _copied(x: Tensor, ragged_dim: int) -> Tensor:
    """A tensor as the core reads it, a copy if it has to be; _MASK, _VALUES or the ragged dim of a padded tensor."""
    if ragged_dim == _MASK:
        return scan.readable(x)[1]
    return words(x).contiguous() if ragged_dim == _VALUES else native.described(x.movedim(ragged_dim, 1))[1]


def _with_kept(schema: Schema, kept: Sequence[bool]) -> Schema:
    """The schema in which some of its tensors stay padded."""
    widths = {name: width for name, width, _ in schema.axes}
    forms, flags = list(schema.forms), iter(kept)
    for place, form in enumerate(forms):
        if form.dtype is not None and next(flags):
            own = FieldForm(form.path, "dense", dtype=form.dtype, reason=LOSSY, axis=form.layout)
            forms[place] = replace(own, device=form.device, shape=(widths[form.layout or ""], *form.shape))
    return replace(schema, forms=tuple(forms))
