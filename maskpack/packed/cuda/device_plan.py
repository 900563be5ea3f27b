"""DevicePlan: what padded batches of one signature on a GPU are made of, so that the next one is encoded at once.

    masks --scan--> rows --+--> measure: pads verified, what each row takes --> places --> write --> body
    padded fields ---------+

Nothing is packed on the way: a row of at most one span lies together in its padded field. As for BatchPlan on the host,
only batches without surprises have a plan, and if it does not fit, it gives nothing, and the batch is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi
from maskpack.core.backends import uses_triton
from maskpack.core.bits import words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.native import HostLayout
from maskpack.core.pads import ANY_ZERO, PER_ROW, SIGNED_ZERO, Pads
from maskpack.layout.row_layout import RowLayout, host_spans, layout_of_core
from maskpack.layout.scan import counted, spans_of_rows
from maskpack.nesting.axes import WHOLE
from maskpack.nesting.jobs import Parts, words_of_one
from maskpack.nesting.plan import Seen
from maskpack.nesting.read import Read
from maskpack.nesting.schema import FieldForm, Schema
from maskpack.packed.cuda.encode import MOST, Encoder, EncodeRecipe, KnownForms, forms_of
from maskpack.packed.table import Table


@dataclass
class DevicePlan:
    """How the batches of one signature are encoded.

    Attributes:
        schema: what they become.
        pads: what is under the masks, by the numbers of the tensors.
        forms: how the fields were encoded before; the plan ends with them.
        recipe: what the kernels are told; its units read padded tensors.
        masks: the numbers of the masks among the entries, and the anchors of their layouts.
        mask_of: int64 [n], the mask of each unit, -1 for none.
        cuts: the name of each layout, its mask, and its first column, or WHOLE, and width.
        inputs: int64 [n], the number of the entry of each unit.
        device: where all of them lie.
    """

    schema: Schema
    pads: Mapping[int, Pads]
    forms: KnownForms
    recipe: EncodeRecipe
    masks: Sequence[tuple[int, int]]
    mask_of: IntArray
    cuts: Sequence[tuple[str, int, int, int]]
    inputs: IntArray
    device: torch.device

    @classmethod
    def of(cls, found: Read, schema: Schema) -> DevicePlan | None:
        """The plan of a batch that was read and encoded on its GPU; None if it has none."""
        opened, plan, trusted = found.opened, found.opened.plan, not found.opened.options.verify
        parts, rows = Parts.of(plan.sources, plan.widths, opened.given), opened.rows
        tensors = [form for form in schema.forms if form.dtype is not None]
        forms = forms_of(tensors, rows)
        if plan.by_value or forms is None or plan.root.more_dims is None:
            return None
        if any(len(pads.records) > 1 or pads.signs is not None for pads in found.pads.values()):
            return None
        if trusted and any(pads[0] in (PER_ROW, SIGNED_ZERO, ANY_ZERO) for pads in plan.pads.values()):
            return None  # another batch may have other ones
        if any(source.way != "mask" for source in parts.origins) or any(form.reason for form in schema.forms):
            return None
        paths, cuts = [source.key for source in parts.origins], parts.cuts
        masks = [opened.axes.layout_of(source) for source in parts.origins]
        if any((np.diff(host_spans(layout).splits) > 1).any() for layout in masks):
            return None  # the next batch is likely to have such rows, too
        held: list[Any] = opened.seen.tensors
        numbers = {form.path: number for number, form in enumerate(plan.forms)}
        entries = [held[numbers[form.path]] for form in tensors]
        devices = {x.device for x in entries} | {held[numbers[path]].device for path in paths}
        pads = {at: found.pads[form.path] for at, form in enumerate(tensors) if form.path in found.pads}
        lines = [_line(*own, pads.get(at), trusted) for at, own in enumerate(zip(tensors, entries, strict=True))]
        if len(devices) > 1 or any(line is None for line in lines):
            return None
        recipe = forms.recipe(range(len(tensors)), parts.names, rows, rows)
        if len(recipe.tensors) < len(tensors):
            return None
        units, cut_of = recipe.units.copy(), np.array([*cuts, (-1, 0, 0)])[recipe.units["bounds"]]
        for name in ("row_stride", "pad_mode", "pad"):
            units[name] = [(lines[number] or {}).get(name, 0) for number in recipe.owners]
        units["low"], units["width"] = np.maximum(cut_of[:, 1], 0), cut_of[:, 2]
        units["pad_mode"][units["offset"] > 0] = abi.NO_PAD  # once for all columns
        return cls(
            schema,
            pads,
            forms,
            recipe._replace(units=units),
            [(numbers[path], layout.anchor) for path, layout in zip(paths, masks, strict=True)],
            cut_of[:, 0],
            [(name, *cut) for name, cut in zip(parts.names, cuts, strict=True)],
            np.array([numbers[form.path] for form in tensors])[recipe.owners],
            devices.pop(),
        )

    def encoded(self, seen: Seen, rows: int) -> tuple[Table, Schema] | None:
        """The table and the schema of a batch of this signature; None if the plan does not fit. Two
        synchronisations."""
        tensors = [form for form in self.schema.forms if form.dtype is not None]
        entries: list[Any] = seen.tensors
        runs = uses_triton(self.device, call="compress")  # MASKPACK_TRITON may have changed since
        if not runs or self.forms.stale or forms_of(tensors, rows) is not self.forms:
            return None
        counts, units = [counted(entries[at]) for at, _ in self.masks], self.recipe.units.copy()
        units["words"] = [entries[at].data_ptr() for at in self.inputs]
        units["counts"] = np.array([*(own.data_ptr() for own in counts), 0])[self.mask_of]
        units["rows"] = rows
        encoder = Encoder(tensors, self.forms, self.recipe, units, [], rows, self.device)
        even = 3 * rows + rows % 2
        stats, copies = encoder.measured(*(own[:even] for own in counts))
        flags, of_rows = stats["flags"], [own[: 3 * rows].reshape(3, rows) for own in copies]
        if (flags & (abi.IS_ODD | abi.IS_STRAY)).any() or any(int(own[1].max()) > 1 for own in of_rows):
            return None
        found = encoder.written(stats, self._layouts(of_rows, entries), rows, self.pads)
        return None if found.left else (found.table, self.schema)

    def _layouts(self, counts: Sequence[Any], entries: Sequence[Any]) -> dict[str, RowLayout]:
        wholes: list[RowLayout] = []
        for own, (at, anchor) in zip(counts, self.masks, strict=True):
            bounds = cumulated(own[0].astype(np.int64))
            wholes.append(layout_of_core(HostLayout(entries[at].shape[1], spans_of_rows(own), bounds), anchor))
        return {
            name: wholes[mask] if low == WHOLE else wholes[mask].narrow(low, low + width)
            for name, mask, low, width in self.cuts
        }


def _line(form: FieldForm, x: Tensor, pads: Pads | None, trusted: bool) -> dict[str, int] | None:
    """How the kernels read a tensor, as in `Unit`; None if they cannot."""
    assert form.dtype is not None
    if form.kind == "dense":
        return {} if form.layout is None and x.is_contiguous() else None
    items = words_of_one(form)
    together = x.dim() >= 2 and x[:1].is_contiguous() and x.stride(1) == items
    if form.kind != "padded" or form.ragged_dim != 1 or form.dtype.itemsize > 8 or not together or not items:
        return None
    if x.shape[1] * items > MOST:
        return None
    line = {"row_stride": x.stride(0)}
    if trusted or pads is None:
        return line
    if pads.edges[0]:
        return line | {"pad_mode": abi.BY_EDGE}
    return line | {"pad_mode": abi.CONSTANT, "pad": int(words(pads.words(form.dtype)).item())}
