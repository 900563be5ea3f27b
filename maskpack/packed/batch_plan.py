"""BatchPlan: what the batches of one signature are made of, remembered, so that the next one is encoded by one call.

    signature of a batch -> BatchPlan: masks, layouts, jobs, schemas -> scan the masks -> encode -> table, schema

Only batches without surprises have a plan: plain tensors on the host and Python objects, with layouts that come from
masks alone. If a plan does not fit (another pad under a mask, odd bools), it gives nothing, and the batch is surveyed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.index import IntArray
from maskpack.core.keys import Path
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, Pad
from maskpack.core.tree import is_object, names_of, number_at
from maskpack.fields.options import Options, VerifyFirst
from maskpack.layout import scan
from maskpack.nesting.schema import Schema
from maskpack.nesting.survey import Survey
from maskpack.packed.table import JobTable, Table, check_memory, stored_before, wholes_first

_PADDED, _PACKED = 0, 1
_PAD, _RESULT, _ROW_PADS, _JOB_ROWS = (
    int(abi.JOB.fields[name][1]) // 8  # type: ignore[index]
    for name in ("pad", "result", "row_pads", "rows")
)
_AT, _ROWS = (native.Mask._fields.index(name) for name in ("at", "rows"))
WHOLE = -1
"""The first column of a layout that is the whole mask."""
_SPARE = 1 << 15
_NO_PLAIN_ZEROS = (torch.complex32, torch.complex64, torch.complex128, torch.float8_e8m0fnu)


def signature_of(batch: TensorDictBase, options: Options) -> tuple[Any, ...] | None:
    """All that a plan depends on, but for the values of masks; None for a batch that has no plan."""
    if type(batch) is not TensorDict or not batch.batch_size or not batch.batch_size[0]:
        return None
    size = batch.batch_size
    verify = options.verify
    learnt = verify.times if isinstance(verify, VerifyFirst) else 0
    given = (options.pad_token_id, options.strict, options.ignore, verify, learnt, options.on_loss)
    parts: list[Any] = [size[0].bit_length(), size[1:], batch.device, names_of(batch), options.registry.told, *given]
    for name, value in batch.items():
        if type(value) is Tensor:
            plain = value.layout is torch.strided and not value.is_nested
            if not plain or value.is_neg() or value.is_conj():
                return None
            parts += (name, value.dtype, value.shape[1:], value.stride(), value.device)
        elif is_object(value):
            parts += (name, number_at(batch, (name,)))  # it may be the width of an axis
        else:
            return None
    return tuple(parts)


@dataclass
class BatchPlan:
    """How the batches of one signature are encoded.

    Attributes:
        schema: with the pads to try.
        deferred: the padded fields.
        names: the names of the layouts, as they are stored.
        source: what is in `line`.
        line: what the last such batch was encoded from.
        inputs: the numbers of the entries whose addresses are in the line, and `targets` where they are.
        rows_at: where the number of rows is.
        order: int64 [n], the place of each tensor among the jobs.
        bytes_of_row: bytes of a row of the padded fields.
        room: bytes for a body, enough for one that is a little larger than the last.
        schemas: with the pads that were found, by their numbers.
    """

    schema: Schema
    deferred: Collection[Path]
    names: tuple[str, ...]
    source: native.BatchSource
    line: IntArray
    inputs: Sequence[int]
    targets: IntArray
    rows_at: IntArray
    order: IntArray
    bytes_of_row: int
    room: int
    schemas: dict[tuple[int, ...], Schema] = field(default_factory=dict[tuple[int, ...], Schema])

    @classmethod
    def of(cls, found: Survey, schema: Schema, table: JobTable, nbytes: int) -> BatchPlan | None:
        """The plan of a batch that was surveyed and encoded, in `nbytes`; None if it has none."""
        entries, scanned = list(found.entries.values()), found.scanned
        numbers = {path: number for number, path in enumerate(found.entries)}
        cuts = None if scanned is None else cuts_of(found, list(scanned))
        if scanned is None or cuts is None or any(form.device != "cpu" for form in schema.forms if form.dtype):
            return None
        forms = schema.forms
        inputs = [number for number, form in enumerate(forms) if form.dtype is not None]
        padded = [forms[number].path in found.deferred for number in inputs]
        for number, deferred in zip(inputs, padded, strict=True):
            if not deferred and (forms[number].kind != "dense" or not entries[number].is_contiguous()):
                return None
        masks = [numbers[path] for path in scanned]
        if any(entries[at].dtype in _NO_PLAIN_ZEROS or entries[at].stride(1) != 1 for at in masks):
            return None
        lines = [
            (*scan.described(entries[at].dtype, entries[at]), uniform)
            for at, (_, uniform) in zip(masks, scanned.values(), strict=True)
        ]
        source = native.BatchSource(len(masks), len(cuts), len(inputs), native.slots_of(table.jobs))
        parts: list[Any] = [lines, cuts, stored_before(wholes_first(found.layouts)), table.jobs]
        line = np.concatenate([np.ascontiguousarray(part).view(np.int64).reshape(-1) for part in parts])
        first, each = source.places[2], np.arange(len(inputs))
        targets = first + table.order * abi.JOB_NUMBERS + np.where(padded, _PADDED, _PACKED)
        if line[targets].tolist() != [entries[at].data_ptr() for at in inputs]:
            return None  # some tensor was copied
        places = np.arange(len(masks)) * abi.MASK_NUMBERS
        return cls(
            schema,
            frozenset(found.deferred),
            table.names,
            source,
            line,
            [*masks, *inputs],
            np.concatenate([places + _AT, targets]).astype(np.int64),
            np.concatenate([places + _ROWS, first + each * abi.JOB_NUMBERS + _JOB_ROWS]).astype(np.int64),
            table.order,
            sum(entries[at].nbytes for at, own in zip(inputs, padded, strict=True) if own) // found.rows,
            _room(nbytes),
        )

    def encoded(self, batch: TensorDictBase) -> tuple[Table, Schema] | None:
        """The table and the schema of a batch of this signature; None if the plan does not fit."""
        entries: list[Any] = list(batch.values())
        rows, given, (_, stored, jobs, end) = batch.batch_size[0], np.array(self.line), self.source.places
        given[self.targets] = [entries[at].data_ptr() for at in self.inputs]
        given[self.rows_at] = rows
        threads = native.threads_for(rows * self.bytes_of_row)
        found, line = native.compress(self.source, given, self.room, threads)
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
        key = tuple(done[:, _PAD].tolist())
        with_row_pads = done[:, _ROW_PADS + 2].any()
        if key in self.schemas and not with_row_pads:
            return table, self.schemas[key]
        table, schema = with_pads(table, key, self.schema, self.deferred)
        if not with_row_pads:
            self.schemas[key] = schema
        return table, schema


def _room(nbytes: int) -> int:
    return nbytes + nbytes // 4 + _SPARE


def cuts_of(found: Survey, masks: Sequence[Path]) -> list[tuple[int, int, int]] | None:
    """Of each layout, its mask, and its first column and width if it is not the whole mask; None if one has no mask."""
    scanned = found.scanned or {}
    cuts: list[tuple[int, int, int]] = []
    for layout in wholes_first(found.layouts).values():
        of_whole, low = layout.__dict__.get("part_of", (None, WHOLE))
        for number, path in enumerate(masks):
            whole = scanned[path][0]
            if layout is whole or of_whole is whole:
                cuts.append((number, WHOLE if layout is whole else low, layout.width))
                break
        else:
            return None
    return cuts


def with_pads(table: Table, pads: Sequence[int], schema: Schema, deferred: Collection[Path]) -> tuple[Table, Schema]:
    """The table and the schema in which each of the `deferred` fields has the pad that is under its mask, by its number
    in `pads`. Pads that are 0 in all rows are the constant 0."""
    forms = list(schema.forms)
    tensors = [place for place, form in enumerate(forms) if form.dtype is not None]
    for number, place in enumerate(tensors):
        form = forms[place]
        if form.path not in deferred:
            continue
        pad = form.pads[pads[number]]
        if isinstance(pad, Pad) and pad is not EDGE:
            rows = table.pads_of_rows(number)
            held = ANY_ZERO if pad is ANY_ZERO else PER_ROW
            pad = held if pad is PER_ROW or (rows is not None and rows.any()) else 0
            table = table if pad is held else table.without_row_pads(number)
        forms[place] = replace(form, pads=(pad,))
    return table, replace(schema, forms=tuple(forms))
