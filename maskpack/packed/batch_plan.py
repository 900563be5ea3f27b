"""BatchPlan: what the batches of one signature are made of, remembered, so that the next one is encoded by one call.

    signature of a batch -> BatchPlan: masks, layouts, jobs, schemas -> scan the masks -> encode -> table, schema

Only batches without surprises have a plan: plain tensors on the host and Python objects, with layouts that come from
masks alone. If a plan does not fit (another pad under a mask, odd bools), it gives nothing, and the batch is surveyed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core import native
from maskpack.core.keys import Path
from maskpack.core.pads import EDGE, PER_ROW, Pad
from maskpack.core.tree import is_object
from maskpack.fields.options import Options, VerifyFirst
from maskpack.layout import scan
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import Schema
from maskpack.nesting.survey import Survey
from maskpack.packed.table import Encoded, JobTable, Table, encode_table, wholes_first

_NUMBERS = native.JOB.itemsize // 8
_PADDED, _PACKED, _ROWS = 0, 1, native.JOB_ROWS
_NO_PLAIN_ZEROS = (torch.complex32, torch.complex64, torch.complex128, torch.float8_e8m0fnu)


def signature_of(batch: TensorDictBase, options: Options) -> tuple[Any, ...] | None:
    """All that a plan depends on, but for the values of masks; None for a batch that has no plan."""
    if type(batch) is not TensorDict or not batch.batch_dims or not batch.batch_size[0]:
        return None
    parts: list[Any] = []
    for name, value in batch.items():
        if type(value) is Tensor:
            if value.layout is not torch.strided or value.device.type != "cpu" or value.is_neg() or value.is_conj():
                return None
            parts.append((name, value.dtype, value.shape[1:], value.stride()))
        elif is_object(value):
            held: Any = value.data if isinstance(value, NonTensorData) else None
            parts.append((name, held if type(held) is int else None))  # it may be the width of an axis
        else:
            return None
    verify = options.verify
    learnt = verify.times if isinstance(verify, VerifyFirst) else 0
    given = (options.registry, options.pad_token_id, options.strict, options.ignore, verify, learnt, options.on_loss)
    size = batch.batch_size
    return (size[0].bit_length(), size[1:], batch.device, *given, *parts)


@dataclass
class BatchPlan:
    """How the batches of one signature are encoded.

    Attributes:
        schema: with the pads to try.
        deferred: the padded fields.
        masks: of each mask, the number of its entry, its anchor, and whether its valid words were equal.
        cuts: of each layout, its mask, and its first column and width if it is not the whole mask.
        jobs: as the last such batch was encoded.
        inputs: the numbers of the entries that are tensors.
        targets: where their addresses are written among the numbers of the jobs.
        bytes_of_row: bytes of a row of the padded ones.
        schemas: with the pads that were found, by their numbers.
    """

    schema: Schema
    deferred: Collection[Path]
    masks: Sequence[tuple[int, int, bool]]
    cuts: Mapping[str, tuple[int, int | None, int]]
    jobs: JobTable
    inputs: Sequence[int]
    targets: Any
    bytes_of_row: int
    schemas: dict[tuple[int, ...], Schema] = field(default_factory=dict[tuple[int, ...], Schema])

    @classmethod
    def of(cls, found: Survey, schema: Schema, jobs: JobTable) -> BatchPlan | None:
        """The plan of a batch that was surveyed and encoded; None if it has none."""
        if found.scanned is None:
            return None
        entries = list(found.entries.values())
        numbers = {path: number for number, path in enumerate(found.entries)}
        sources = list(found.scanned.items())
        masks = [(numbers[path], layout.anchor, uniform) for path, (layout, uniform) in sources]
        cuts: dict[str, tuple[int, int | None, int]] = {}
        for name, layout in wholes_first(found.layouts).items():
            for number, (_, (whole, _)) in enumerate(sources):
                of_whole, low = layout.__dict__.get("part_of", (None, 0))
                if layout is whole or of_whole is whole:
                    cuts[name] = number, None if layout is whole else low, layout.width
                    break
            else:
                return None
        forms = schema.forms
        inputs = [number for number, form in enumerate(forms) if form.dtype is not None]
        padded = [forms[number].path in found.deferred for number in inputs]
        plain = all(
            deferred or (forms[number].kind == "dense" and entries[number].is_contiguous())
            for number, deferred in zip(inputs, padded, strict=True)
        )
        odd = any(entries[at].dtype in _NO_PLAIN_ZEROS or entries[at].stride(1) != 1 for at, _, _ in masks)
        lines = jobs.jobs.view(np.int64).reshape(-1, _NUMBERS)
        targets = jobs.order * _NUMBERS + np.where(padded, _PADDED, _PACKED)
        if not plain or odd or lines.reshape(-1)[targets].tolist() != [entries[at].data_ptr() for at in inputs]:
            return None  # some tensor was copied
        nbytes = sum(entries[at].nbytes for at, deferred in zip(inputs, padded, strict=True) if deferred)
        return cls(schema, frozenset(found.deferred), masks, cuts, jobs, inputs, targets, nbytes // found.rows)

    def encoded(self, batch: TensorDictBase) -> tuple[Table, Schema] | None:
        """The table and the schema of a batch of this signature; None if the plan does not fit."""
        entries: list[Any] = list(batch.values())
        rows = batch.batch_size[0]
        wholes: list[RowLayout] = []
        for at, anchor, uniform in self.masks:
            host, word = native.scan(scan.described(entries[at].dtype, entries[at]))
            if uniform and word is None:
                return None
            wholes.append(RowLayout.of_host(host, anchor))
        layouts = {name: _cut(wholes[mask], low, width) for name, (mask, low, width) in self.cuts.items()}
        lines = self.jobs.jobs.view(np.int64).copy()
        lines[self.targets] = [entries[at].data_ptr() for at in self.inputs]
        lines[_ROWS::_NUMBERS] = rows
        jobs = self.jobs._replace(jobs=lines.view(native.JOB))
        found = encode_table(jobs, layouts, rows, rows, rows * self.bytes_of_row)
        if found is None:
            return None
        self.jobs = jobs
        key = tuple(found.pads)
        if key in self.schemas and not found.table.row_pads["count"].any():
            return found.table, self.schemas[key]
        table, schema = with_pads(found, self.schema, self.deferred)
        if not found.table.row_pads["count"].any():
            self.schemas[key] = schema
        return table, schema


def with_pads(found: Encoded, schema: Schema, deferred: Collection[Path]) -> tuple[Table, Schema]:
    """The table and the schema in which each of the `deferred` fields has the pad that is under its mask. Pads that are
    0 in all rows are the constant 0."""
    table, forms = found.table, list(schema.forms)
    tensors = [place for place, form in enumerate(forms) if form.dtype is not None]
    for number, place in enumerate(tensors):
        form = forms[place]
        if form.path not in deferred:
            continue
        pad = form.pads[found.pads[number]]
        if isinstance(pad, Pad) and pad is not EDGE:
            rows = table.pads_of_rows(number)
            pad = PER_ROW if pad is PER_ROW or (rows is not None and rows.any()) else 0
            table = table if pad is PER_ROW else table.without_row_pads(number)
        forms[place] = replace(form, pads=(pad,))
    return table, replace(schema, forms=tuple(forms))


def _cut(whole: RowLayout, low: int | None, width: int) -> RowLayout:
    return whole if low is None else whole.narrow(low, low + width)
