"""BatchPlan: what the batches of one signature are made of, remembered, so that the next one is encoded by one call.

    signature of a batch -> BatchPlan: origins, layouts, jobs, schemas -> make the layouts -> encode -> table, schema

Padded, jagged and other tensors on the host have a plan, sub-batches and Python objects too, if their layouts come from
masks, from the offsets of jagged fields, or from the batch that `like` names. A lossy field stays padded in the same
call. If a plan does not fit (odd bools, a mask with other values), it gives nothing, and the batch is surveyed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import address
from maskpack.core.index import IntArray
from maskpack.core.keys import Path
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, Pad
from maskpack.core.tree import is_object, names_of, number_at
from maskpack.fields.options import Options, VerifyFirst
from maskpack.layout import scan
from maskpack.layout.jagged import held_by
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.nesting.survey import Survey
from maskpack.nesting.verify import LOSSY
from maskpack.packed.table import KEPT, JobTable, Table, check_memory, pads_of, stored_before, wholes_first

_PADDED, _PACKED = 0, 1
_PAD, _RESULT, _ROW_PADS, _JOB_ROWS = (
    int(abi.JOB.fields[name][1]) // 8  # type: ignore[index]
    for name in ("pad", "result", "row_pads", "rows")
)
_AT, _ROWS, _LIMIT = (
    int(abi.ORIGIN.fields[name][1]) // 8  # type: ignore[index]
    for name in ("at", "rows", "limit")
)
WHOLE = -1
"""The first column of a layout that is a whole origin."""
_SPARE = 1 << 15
_BY_ROW = (PER_ROW, ANY_ZERO)
_NO_PLAIN_ZEROS = (torch.complex32, torch.complex64, torch.complex128, torch.float8_e8m0fnu)


class Signed(NamedTuple):
    """A batch that may have a plan.

    Attributes:
        signature: all that a plan depends on, but for values.
        tensors: of each entry, in key order, the tensor or the values of the jagged tensor; None for others.
        offsets: those of the jagged tensors, each once, int64 [B + 1].
        limits: the least number of values of a field with these offsets.
        jagged: the number of the offsets of each jagged field.
    """

    signature: tuple[Any, ...]
    tensors: list[Tensor | None]
    offsets: list[Tensor]
    limits: list[int]
    jagged: dict[Path, int]


def signed(batch: Any, options: Options, given: Mapping[str, RowLayout], schema: Schema | None = None) -> Signed | None:
    """A batch with its signature; None if it has no plan. `given` are the layouts of another batch, or, with its
    `schema`, those of LAYOUTS."""
    if type(batch) is not TensorDict or not batch.batch_size or not (rows := batch.batch_size[0]):
        return None
    verify = options.verify
    learnt = verify.times if isinstance(verify, VerifyFirst) else 0
    of_call = options.pad_token_id, options.strict, options.ignore, verify, learnt, options.on_loss
    parts: list[Any] = [rows.bit_length(), options.registry.told, *of_call, schema]
    numbers = {id(layout): number for number, layout in enumerate(given.values())}
    for name, layout in given.items():
        whole, low = layout.__dict__.get("part_of", (None, 0))
        if layout.num_rows != rows or layout.device.type != "cpu":
            return None
        parts += (name, layout.width, layout.anchor, numbers.get(id(whole)), low)
    found = Signed((), [], [], [], {})
    if not _add(found, parts, batch, ()) or (schema is not None and not _has_layouts(found, schema, given)):
        return None
    return found._replace(signature=tuple(parts))


def _has_layouts(found: Signed, schema: Schema, layouts: Mapping[str, RowLayout]) -> bool:
    """Whether the jagged fields of a nested batch are rows of the layouts of its schema, whose pads are constants."""
    forms = {form.path: form for form in schema.forms}
    checked: set[tuple[int, str]] = set()
    for path, number in found.jagged.items():
        form = forms.get(path)
        if form is None or form.kind != "padded" or form.layout is None or any(pad in _BY_ROW for pad in form.pads):
            return False
        layout, offsets = layouts[form.layout], found.offsets[number]
        if (number, form.layout) not in checked:
            same = offsets is layout.__dict__.get("offsets")
            if not same and not np.array_equal(offsets.detach().numpy(), layout.row_offsets):
                return False
            if found.limits[number] < layout.num_tokens:
                return False
            checked.add((number, form.layout))
    return True


def _add(found: Signed, parts: list[Any], batch: TensorDict, path: Path) -> bool:
    """Adds the entries of a batch to its signature; false if it has no plan."""
    parts += (batch.batch_size[1:], batch.device, names_of(batch))
    for name, value in batch.items():
        x: Tensor | None = None
        if isinstance(value, Tensor):
            x, number = value, None
            if type(value) is not Tensor:
                held = held_by(value)
                if held is None:
                    return False
                x, number = held[0], _number_of(found, held[1])
            if type(x) is not Tensor or number == -1 or x.is_nested or x.layout is not torch.strided:
                return False
            if x.is_neg() or x.is_conj():
                return False
            if number is not None:
                found.jagged[(*path, name)] = number
                found.limits[number] = min(found.limits[number], x.shape[0])
            parts += (name, x.dtype, x.shape[1:], x.stride(), x.device, number)
        elif is_object(value):
            parts += (name, number_at(batch, (name,)))  # it may be the width of an axis
        elif name == LAYOUTS and not path:
            continue
        elif type(value) is TensorDict and value.batch_size[:1] == batch.batch_size[:1]:
            parts += (name, len(value.keys()))
            found.tensors.append(None)
            if not _add(found, parts, value, (*path, name)):
                return False
            continue
        else:
            return False
        found.tensors.append(x)
    return True


def _number_of(found: Signed, offsets: Tensor) -> int:
    """The number of offsets among those of a batch; -1 if the core does not read them."""
    for number, own in enumerate(found.offsets):
        if own is offsets:
            return number
    if offsets.dtype is not torch.int64 or offsets.device.type != "cpu" or not offsets.is_contiguous():
        return -1
    found.offsets.append(offsets)
    found.limits.append(1 << 62)
    return len(found.offsets) - 1


class LayoutSources(NamedTuple):
    """Where the layouts of a batch come from, in the order in which they are stored.

    Attributes:
        origins: of each, its way (abi.h), and the path of a mask, or the number of offsets or of a given layout.
        cuts: of each layout, its origin, and its first column, or WHOLE, and width.
    """

    origins: list[tuple[int, Any]]
    cuts: list[tuple[int, int, int]]


def layout_sources(found: Survey) -> LayoutSources | None:
    """None if the forms of a batch depend on its values."""
    if found.origins is None:
        return None
    known: dict[int, tuple[int, Any]] = {id(own): (abi.OF_MASK, path) for path, (own, _) in found.origins.masks.items()}
    known |= {id(own): (abi.OF_PREFIX, path) for path, own in found.origins.prefixes.items()}
    known |= {id(own): (abi.OF_OFFSETS, number) for number, own in enumerate(found.origins.jagged.values())}
    known |= {id(own): (abi.OF_LAYOUT, number) for number, own in enumerate(found.origins.given.values())}
    out = LayoutSources([], [])
    for layout in wholes_first(found.layouts).values():
        whole, low = layout.__dict__.get("part_of", (None, WHOLE))
        own = id(layout) in known
        origin = known.get(id(layout) if own else id(whole))
        if origin is None:
            return None
        if origin not in out.origins:
            out.origins.append(origin)
        out.cuts.append((out.origins.index(origin), WHOLE if own else low, layout.width))
    return out


@dataclass
class BatchPlan:
    """How the batches of one signature are encoded.

    Attributes:
        schema: with the pads to try.
        deferred: the padded fields.
        names: the names of the layouts, as they are stored.
        source: what is in `line`.
        line: what the last such batch was encoded from.
        inputs: int64 [n], the numbers of what lies at the addresses in the line: tensors, then offsets, then given
            layouts; and `targets` where these addresses are.
        limits_at: where the number of values under some offsets is, and `limits` the numbers of these offsets.
        rows_at: where the number of rows is.
        order: int64 [n], the place of each tensor among the jobs.
        bytes_of_row: bytes of a row of the padded fields.
        room: bytes for a body, enough for one that is a little larger than the last.
        schemas: with the pads that were found, by `pads` and `by_row` of `with_pads`.
    """

    schema: Schema
    deferred: Collection[Path]
    names: tuple[str, ...]
    source: native.BatchSource
    line: IntArray
    inputs: IntArray
    targets: IntArray
    limits_at: IntArray
    limits: Sequence[int]
    rows_at: IntArray
    order: IntArray
    bytes_of_row: int
    room: int
    schemas: dict[tuple[int, ...], Schema] = field(default_factory=dict[tuple[int, ...], Schema])

    @classmethod
    def of(cls, found: Survey, schema: Schema, table: JobTable, nbytes: int, seen: Signed) -> BatchPlan | None:
        """The plan of a batch that was surveyed and encoded, in `nbytes`; None if it has none."""
        forms, tensors, sources = schema.forms, seen.tensors, layout_sources(found)
        if sources is None or any(form.device != "cpu" for form in forms if form.dtype):
            return None
        jobs = [number for number, form in enumerate(forms) if form.dtype is not None]
        padded = [forms[number].path in found.deferred for number in jobs]
        for number, deferred in zip(jobs, padded, strict=True):
            x = tensors[number]
            kept = x is not None and x.is_contiguous() and forms[number].kind in ("dense", "jagged", "padded")
            if not deferred and not kept:
                return None
        numbers = {path: number for number, path in enumerate(found.entries)}
        lines = [_line(origin, found, numbers, seen) for origin in sources.origins]
        if any(line is None for line in lines):
            return None
        source = native.BatchSource(len(lines), len(sources.cuts), len(jobs), native.slots_of(table.jobs))
        parts: list[Any] = [lines, sources.cuts, stored_before(wholes_first(found.layouts)), table.jobs]
        line = np.concatenate([np.ascontiguousarray(part).view(np.int64).reshape(-1) for part in parts])
        first, each = source.places[2], np.arange(len(jobs))
        targets = first + table.order * abi.JOB_NUMBERS + np.where(padded, _PADDED, _PACKED)
        if line[targets].tolist() != [x.data_ptr() for at in jobs if (x := tensors[at]) is not None]:
            return None  # some tensor was copied
        begins = np.arange(len(lines)) * abi.ORIGIN_NUMBERS
        before = {abi.OF_OFFSETS: len(tensors), abi.OF_LAYOUT: len(tensors) + len(seen.offsets)}
        inputs = [key + before[way] if way in before else numbers[key] for way, key in sources.origins]
        of_offsets = [at for at, (way, _) in enumerate(sources.origins) if way == abi.OF_OFFSETS]
        return cls(
            schema,
            frozenset(found.deferred),
            table.names,
            source,
            line,
            np.array([*inputs, *jobs], np.int64),
            np.concatenate([begins + _AT, targets]).astype(np.int64),
            begins[of_offsets] + _LIMIT,
            [sources.origins[at][1] for at in of_offsets],
            np.concatenate([begins + _ROWS, first + each * abi.JOB_NUMBERS + _JOB_ROWS]).astype(np.int64),
            table.order,
            sum(found.entries[path].nbytes for path in found.deferred) // found.rows,
            _room(nbytes),
        )

    def encoded(self, seen: Signed, rows: int, given: IntArray) -> tuple[Table, Schema] | None:
        """The table and the schema of a batch of this signature; None if the plan does not fit. `given` is the table of
        the layouts of another batch."""
        line, (_, stored, jobs, end) = np.array(self.line), self.source.places
        places = [0 if x is None else x.data_ptr() for x in (*seen.tensors, *seen.offsets)]
        places += range(address(given), address(given) + given.nbytes, abi.LAYOUT.itemsize)
        line[self.targets] = np.array(places, np.int64)[self.inputs]
        line[self.limits_at] = [seen.limits[number] for number in self.limits]
        line[self.rows_at] = rows
        found, line = native.compress(self.source, line, self.room, native.threads_for(rows * self.bytes_of_row))
        done = line[jobs:end].reshape(-1, abi.JOB_NUMBERS)
        if found is None:
            check_memory(done[:, _RESULT])
            return None
        self.line, self.room = line, _room(found.body.nbytes)
        done = done[self.order]
        row_pads = native.structs(np.array(done[:, _ROW_PADS : _ROW_PADS + 3], order="C"), abi.ARRAY)
        own = native.structs(np.array(line[stored:jobs]), abi.STORED)
        parts = self.names, own, found.entries, found.fields[self.order], row_pads, found.body
        table = Table(rows, rows, *parts, is_compact=True)
        pads, by_row = pads_of(done[:, _RESULT], done[:, _PAD]).tolist(), (done[:, _ROW_PADS + 2] > 0).tolist()
        key = *pads, *by_row
        if key not in self.schemas:
            self.schemas[key] = with_pads(self.schema, self.deferred, pads, by_row)
        return table, self.schemas[key]


def _line(origin: tuple[int, Any], found: Survey, numbers: Mapping[Path, int], seen: Signed) -> tuple[int, ...] | None:
    """An Origin; None if the core does not read it."""
    way: int = origin[0]
    key: Any = origin[1]
    if way == abi.OF_OFFSETS:
        number: int = key
        return seen.offsets[number].data_ptr(), 8, found.rows, 0, 0, 0, way, 0, seen.limits[number]
    if way == abi.OF_LAYOUT:
        return 0, 0, found.rows, 0, 0, 0, way, 0, 0
    mask = seen.tensors[numbers[key]]
    if mask is None or mask.dtype in _NO_PLAIN_ZEROS or mask.stride(1) != 1:
        return None
    assert found.origins is not None
    uniform = way == abi.OF_MASK and found.origins.masks[key][1]
    own: tuple[int, ...] = tuple(scan.described(mask.dtype, mask))
    return *own, way, int(uniform), 0


def _room(nbytes: int) -> int:
    return nbytes + nbytes // 4 + _SPARE


def with_pads(schema: Schema, deferred: Collection[Path], pads: Sequence[int], by_row: Sequence[bool]) -> Schema:
    """The schema in which each of the `deferred` fields has the pad that is under its mask, by its number in `pads`, or
    stays padded. `by_row`: whether the table has pads or signs of the rows of a field; signs that are 0 are the
    constant 0."""
    forms = list(schema.forms)
    tensors = [place for place, form in enumerate(forms) if form.dtype is not None]
    for number, place in enumerate(tensors):
        form = forms[place]
        if form.path not in deferred:
            continue
        if pads[number] == KEPT:
            forms[place] = _kept(form, schema)
            continue
        pad = form.pads[pads[number]]
        if isinstance(pad, Pad) and pad is not EDGE:
            pad = (
                PER_ROW
                if pad is not ANY_ZERO and (by_row[number] or pad is PER_ROW)
                else ANY_ZERO
                if by_row[number]
                else 0
            )
        forms[place] = replace(form, pads=(pad,))
    return replace(schema, forms=tuple(forms))


def _kept(form: FieldForm, schema: Schema) -> FieldForm:
    """The form of a field that stays padded."""
    width = next(width for name, width, _ in schema.axes if name == form.layout)
    kept = FieldForm(form.path, "dense", dtype=form.dtype, reason=LOSSY, axis=form.layout)
    return replace(kept, device=form.device, shape=(width, *form.shape))
