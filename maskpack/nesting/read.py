"""One read of a batch: its layouts, the packed values of its fields, and the pads that are under their masks.

    batch --> seen, plan --+--> on the host   one call of the core makes the layouts, one reads all fields
                           +--> on a device   scans of the masks, one launch for all fields (device_read.py)
                                              |
    values, pads of rows, or a field that stays padded <--+

The batch is not changed, and no result is built before all checks have passed. Messages are worded afterwards, by
looking again. `compress` of a batch on the host makes the same layouts and encodes what it reads (packed/encode.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import Words, address, empty_of, host_words, odd_bools, odd_bools_error, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.core.native import Structs
from maskpack.core.pads import (
    ANY_ZERO,
    EDGE,
    PER_ROW,
    SIGNED_ZERO,
    Pad,
    Pads,
    PadValue,
    has_records,
    pad_tensor,
    record_size,
    said_pads,
)
from maskpack.core.tree import dense_stack, has, need_batch
from maskpack.errors import LayoutError, LossyPadError
from maskpack.fields.options import Options
from maskpack.layout.jagged import check_lengths, to_host
from maskpack.layout.row_layout import RowLayout, core_layout, layout_of_core
from maskpack.nesting import device_read
from maskpack.nesting.axes import Axes
from maskpack.nesting.jobs import PACKED, RECORDS, describe_padded, is_away, job_table, most_record
from maskpack.nesting.nested import INTACT, NOTHING, Nested, read_nested
from maskpack.nesting.plan import BatchPlan, Seen, plan_of, seen_of
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.ops import pack_torch

LOSSY = "it has non-pad values under its mask (strict mode names one, and the remedy)"
_MIXED_ZEROS = "A row mixes 0.0 and -0.0, which the pad ZERO takes in fields with one number for each token alone. "
_OTHER_ZERO = "0.0 and -0.0 differ in their bits: the pad ZERO takes both. "


# -------------------------------------------------------------------- batches


@dataclass(eq=False)
class Opened:
    """A batch before its values are looked at.

    Attributes:
        batch: no lazy stack.
        options: the arguments of the call.
        carried: what its LAYOUTS say.
        stand_in: layouts for masks that are not in it.
        seen, plan: what it is.
    """

    batch: Any
    options: Options
    carried: Nested
    stand_in: Mapping[str, RowLayout]
    seen: Seen
    plan: BatchPlan

    @classmethod
    def of(cls, batch: TensorDictBase, options: Options, stand_in: Mapping[str, RowLayout] | None = None) -> Opened:
        """Raises LayoutError and RegistryError for what is no batch, or not one of the registry."""
        need_batch(batch, options.call)
        batch = dense_stack(batch, options.call)
        carried = read_nested(batch, options.call) if has(batch, LAYOUTS) else NOTHING
        others: Mapping[str, RowLayout] = {} if stand_in is None else stand_in
        seen = seen_of(batch, options, carried, others)
        plan = plan_of(batch, options, carried, others, seen)
        return cls(batch, options, carried, others, seen, plan)

    @cached_property
    def axes(self) -> Axes:
        """Computes the layouts that the core does not make."""
        bounds = self.seen.bounds
        known = {path: bounds[number] for path, number in self.seen.jagged.items()} if bounds else {}
        return Axes(self.batch, self.options.registry, self.carried.layouts, self.stand_in, self.options.call, known)

    @property
    def rows(self) -> int:
        """B."""
        return self.seen.rows or self.plan.rows

    @cached_property
    def given(self) -> dict[str, RowLayout]:
        """The layouts that are known before masks are read."""
        return self.plan.given(self.carried, self.stand_in)

    def check_jagged(self, layouts: Mapping[str, RowLayout]) -> None:
        """Raises LayoutError if a nested field has other rows than its layout, or one of `layouts` too few values."""
        if not self.seen.jagged:
            return
        seen, both = self.seen, zip(self.plan.forms, self.seen.tensors, strict=True)
        jagged = [(form, x, layouts[form.layout or ""]) for form, x in both if x is not None and form.layout in layouts]
        jagged = [own for own in jagged if own[0].path in seen.jagged]
        apart = {
            form.path: (seen.entries[form.path], own)
            for form, _, own in jagged
            if form.kind == "padded" and seen.offsets[seen.jagged[form.path]] is not own.__dict__.get("offsets")
        }
        check_lengths(apart, self.options.call, INTACT)
        for form, x, own in jagged:
            if x.shape[0] < own.num_tokens:
                raise LayoutError(
                    f'{self.options.call}: field "{show(form.path)}" is jagged, of {x.shape[0]} values; its offsets '
                    f"end at {own.num_tokens}; expected offsets that end there. Build it anew from its rows: "
                    "torch.nested.nested_tensor(rows, layout=torch.jagged)."
                )

    def pads_of_nested(self) -> dict[Path, Pads]:
        """What is under the masks of the fields that are nested already."""
        if not self.carried.layouts and not self.stand_in:
            return {}
        return {
            form.path: self.plan.pads_of(form, x, self.carried, self.options.call)
            for form, x in zip(self.plan.forms, self.seen.tensors, strict=True)
            if x is not None and form.kind == "padded" and form.path in self.seen.jagged
        }


@dataclass(frozen=True)
class Read:
    """A batch that was read.

    Attributes:
        opened: the batch.
        layouts: its layouts, by name.
        values: packed values [T, *F] of padded, flat and jagged forms.
        pads: what is under the masks of padded forms.
        lossy: the fields that stay padded, because they have non-pad values under their mask.
    """

    opened: Opened
    layouts: Mapping[str, RowLayout]
    values: Mapping[Path, Tensor]
    pads: Mapping[Path, Pads]
    lossy: tuple[Path, ...]

    @property
    def schema(self) -> Schema:
        """The schema of the nested or packed batch."""
        schema = self.opened.plan.schema
        return with_kept(schema, self.lossy, (self.opened.rows,) if schema.root.more_dims is None else ())


@lru_cache(256)
def with_kept(schema: Schema, kept: tuple[Path, ...], rows: tuple[int, ...] = ()) -> Schema:
    """The schema in which some fields stay padded for their values. `rows` is (B,) if the rows are no batch dim."""
    if not kept:
        return schema
    widths = {name: width for name, width, _ in schema.axes}

    def form_of(form: FieldForm) -> FieldForm:
        if form.path not in kept:
            return form
        before = form.ragged_dim - 1
        shape = (*rows, *form.shape[:before], widths[form.layout or ""], *form.shape[before:])
        dense = FieldForm(form.path, "dense", dtype=form.dtype, reason=LOSSY, axis=form.layout)
        return replace(dense, device=form.device, shape=shape)

    return replace(schema, forms=tuple(map(form_of, schema.forms)))


def read(opened: Opened) -> Read:
    """Reads a batch.

    Raises:
        LayoutError: a jagged field has other rows than its layout; bools have bytes other than 0 and 1.
        LossyPadError: in strict mode, non-pad values under a mask.

    On CUDA: one synchronisation for each mask, a second one if its rows have several spans, one for all checks, and one
    if some pads differ by row.
    """
    forms, seen = opened.plan.forms, opened.seen
    layouts, found, odd = _on_host(opened) if opened.plan.host is not None else _on_devices(opened)
    lossy = [path for path, one in found.items() if one.pads is None]
    if lossy and opened.options.strict:
        raise LossyPadError("\n".join(_message(opened, opened.plan.schema.by_path[path], layouts) for path in lossy))
    pads = {path: one.pads for path, one in found.items() if one.pads is not None}
    bools = {path for path in pads if found[path].values.dtype is torch.bool}
    if odd := odd | {path for path in bools if odd_bools(pads[path].records[:, 1])}:
        raise odd_bools_error(opened.options.call, sorted(odd))
    of_others = [(form.path, x) for form, x in zip(forms, seen.tensors, strict=True) if form.layout is not None]
    values = {path: x for path, x in of_others if x is not None and path not in found}
    values |= {path: found[path].values for path in pads}
    return Read(opened, layouts, values, pads | opened.pads_of_nested(), tuple(lossy))


class Found(NamedTuple):
    """The packed values of a padded field, and what is under its mask; None if none of its pads is."""

    values: Tensor
    pads: Pads | None


def _on_host(opened: Opened) -> tuple[dict[str, RowLayout], dict[Path, Found], set[Path]]:
    """The layouts of a batch on the host, its padded fields, and its bools with other bytes than 0 and 1."""
    plan, seen, rows, given = opened.plan, opened.seen, opened.rows, opened.given
    host = plan.host
    assert host is not None
    table = native.layout_rows([core_layout(layout) for layout in given.values()])
    located = host.located(seen, rows, table, host.line)
    made = native.make_layouts(
        located.origins, host.cuts, located.jobs, rows, native.SPANS * rows, rows * host.mask_bytes
    )
    if made is None:
        opened.check_jagged(opened.axes.layouts_of(plan.sources))  # raises
        raise AssertionError("offsets that are none have no layout")
    layouts: dict[str, RowLayout] = {}
    for place, (name, (origin, low, _)) in enumerate(zip(host.parts.names, host.parts.cuts, strict=True)):
        if plan.sources[name].way in ("given", "lengths", "cu_seqlens"):
            layouts[name] = given[name]
            continue
        layout = layouts[name] = layout_of_core(made.layout(place), plan.anchors[name])
        if (whole := host.parts.whole_of(place)) is not None:
            layout.__dict__["part_of"] = layouts[host.parts.names[whole]], low
        elif host.parts.origins[origin].way == "jagged":
            layout.__dict__["offsets"] = seen.offsets[seen.jagged[host.parts.origins[origin].key]].to(torch.int64)
    layouts = {name: layouts[name] for name in plan.sources}
    opened.check_jagged(layouts)
    fields = [
        HostField(seen.entries[form.path], form, layouts[form.layout or ""], plan.pads[form.path], size)
        for form, size in host.padded_forms
    ]
    found = read_padded(located.jobs, host.padded.tolist(), fields, made.table)
    odd = np.flatnonzero(located.jobs["result"][host.table.order] == abi.ODD).tolist()
    return layouts, found, {host.forms[number].path for number in odd}


class HostField(NamedTuple):
    """A padded field on the host.

    Attributes:
        tensor: [B, S, *F], or with its width in another dim.
        form: its form.
        layout: its layout, on the host.
        pads: those that may be under its mask.
        record_size: the most bytes of the record of a row; 0 if no pad differs by row.
    """

    tensor: Tensor
    form: FieldForm
    layout: RowLayout
    pads: Sequence[PadValue]
    record_size: int


def read_padded(
    jobs: Structs, places: Sequence[int], fields: Sequence[HostField], table: IntArray
) -> dict[Path, Found]:
    """Reads padded fields on the host by jobs that describe them, at some `places` among `jobs`; `table` is that of
    their layouts. Tensors that require gradients go through `pack`."""
    differentiable, numbers = torch.is_grad_enabled(), native.numbers_of(jobs)
    values: list[Tensor] = []
    records: list[Words] = []
    for place, (x, form, layout, _, most) in zip(places, fields, strict=True):
        if differentiable and x.requires_grad:
            values.append(pack_torch.pack(x.movedim(form.ragged_dim, 1), layout))
            numbers[place, PACKED] = 0
        else:
            values.append(empty_of((layout.num_tokens, *form.shape), x.dtype))
            numbers[place, PACKED] = values[-1].data_ptr()
        records.append(np.empty(layout.num_rows * most, np.uint8))
        if most:
            numbers[place, RECORDS] = address(records[-1])
    native.read(jobs, table, sum(field.tensor.nbytes for field in fields))
    found: dict[Path, Found] = {}
    chosen: list[int] = jobs["pad"][places].tolist()
    for place, (x, form, layout, pads, _), own, line, pad in zip(places, fields, values, records, chosen, strict=True):
        held: Pads | None = None
        if pad >= 0 and has_records(mode := int(jobs["pads"]["mode"][place, pad])):
            size = record_size(mode, x, layout.width)
            held = Pads(line[: layout.num_rows * size].reshape(layout.num_rows, size), x.dtype.itemsize).shortest()
        elif pad >= 0:
            held = Pads.of(pads[pad], x.dtype)
        elif x.dtype is torch.bool and odd_bools(words(x).numpy()):
            jobs["result"][place] = abi.ODD
        found[form.path] = Found(own, held)
    return found


def _on_devices(opened: Opened) -> tuple[dict[str, RowLayout], dict[Path, Found], set[Path]]:
    """`_on_host` of a batch of which some tensors are on devices. Padded fields that no kernel reads are copied to the
    host."""
    plan, entries = opened.plan, opened.seen.entries
    layouts = opened.axes.layouts_of(plan.sources)
    opened.check_jagged(layouts)
    moved: dict[tuple[str, torch.device], RowLayout] = {}

    def layout_on(form: FieldForm, device: torch.device) -> RowLayout:
        key = form.layout or "", device
        if key not in moved:
            moved[key] = layouts[key[0]].to(device)
        return moved[key]

    held = [(form, x) for form, x in zip(plan.forms, opened.seen.tensors, strict=True) if x is not None]
    padded = {form.path: form for form, _ in held if form.kind == "padded" and form.path not in opened.seen.jagged}
    verify, tensors = opened.options.verify, {form.path: x for form, x in held}
    pads = {path: plan.pads[path] if verify else plan.pads[path][:1] for path in padded}
    away: dict[torch.device, dict[Path, device_read.PaddedField]] = {}
    for path, form in padded.items():
        if is_away(x := tensors[path]):
            own = x.detach().movedim(form.ragged_dim, 1), layout_on(form, x.device), pads[path], verify
            away.setdefault(x.device, {})[path] = device_read.PaddedField(*own)
    reads = [device_read.read(fields, device) for device, fields in away.items()]
    bools = {form.path: x for form, x in held if form.dtype is torch.bool}
    found, odd = _of_kernels(reads, pads, {path: x for path, x in bools.items() if is_away(x)} if verify else None)
    for path in found:
        form, x = padded[path], entries[path]
        if x.requires_grad and torch.is_grad_enabled():
            values = pack_torch.pack(x.movedim(form.ragged_dim, 1), layout_on(form, x.device))
            found[path] = found[path]._replace(values=values)
    rest = [form for path, form in padded.items() if path not in found]
    host = torch.device("cpu")
    copies = [(entries[form.path].to(host), form, layout_on(form, host), pads[form.path]) for form in rest]
    read_alone, jobs = _read_alone(copies, verify)
    found |= {path: one._replace(values=one.values.to(tensors[path].device)) for path, one in read_alone.items()}
    odd |= {form.path for form, result in zip(rest, jobs["result"].tolist(), strict=True) if result == abi.ODD}
    here = {path: x for path, x in bools.items() if path not in padded and not is_away(x)}
    return layouts, found, odd | {path for path, x in here.items() if odd_bools(words(x).numpy())}


def _of_kernels(
    reads: Sequence[device_read.Reads], pads: Mapping[Path, Sequence[PadValue]], bools: Mapping[Path, Tensor] | None
) -> tuple[dict[Path, Found], set[Path]]:
    """The fields that kernels read, and those of `bools` on devices that have bytes other than 0 and 1; None if nothing
    is verified. One synchronisation for all checks, and one for the pads of rows."""
    values = {path: own for one in reads for path, own in one.values.items()}
    flags: dict[Path, list[int]] = {}
    odd: set[Path] = set()
    if bools is not None:
        known = {path for one in reads for path in one.places}
        others = {path: torch.count_nonzero(words(x) > 1).view(1) for path, x in bools.items() if path not in known}
        on_host = to_host([*(one.flags for one in reads), *others.values()])
        for one, line in zip(reads, on_host, strict=False):
            flags |= {path: line[place].tolist() for path, place in one.places.items()}
        odd = {path for path in bools if path in flags and flags[path][-1]}
        odd |= {path for path, count in zip(others, on_host[len(reads) :], strict=True) if count[0]}
    fitting = {
        path: next((pad for pad, differs in zip(pads[path], flags.get(path, [0]), strict=False) if not differs), None)
        for path in values
    }
    held = {path: own for one in reads for (path, pad), own in one.records.items() if fitting[path] is pad}
    records = host_words(held, held)
    found: dict[Path, Found] = {}
    for path, pad in fitting.items():
        x = values[path]
        own = Pads(records[path], x.dtype.itemsize).shortest() if path in records else None
        found[path] = Found(x, own if own is not None or pad is None else Pads.of(pad, x.dtype))
    return found, odd


def _read_alone(
    fields: Sequence[tuple[Tensor, FieldForm, RowLayout, Sequence[PadValue]]], verify: bool
) -> tuple[dict[Path, Found], Structs]:
    """Reads padded fields on the host that no plan describes; and the jobs of these fields, as they were done."""
    layouts = {form.layout or "": layout for _, form, layout, _ in fields}
    table = job_table(tuple([form for _, form, _, _ in fields]), tuple(layouts))
    jobs, places, held = table.jobs.copy(), table.order.tolist(), list[HostField]()
    copies: list[Tensor] = []
    for place, (x, form, layout, pads) in zip(places, fields, strict=True):
        jobs["rows"][place] = layout.num_rows
        copies.append(describe_padded(jobs[place], x, form.ragged_dim, pads, not verify))
        held.append(HostField(x, form, layout, pads, most_record(x, form.ragged_dim, pads)))
    found = read_padded(jobs, places, held, native.layout_rows([core_layout(own) for own in layouts.values()]))
    del copies  # not earlier: the jobs have their addresses
    return found, jobs[table.order]


def fitting_pad(x: Tensor, layout: RowLayout, pads: Sequence[PadValue]) -> PadValue | None:
    """The first of some pads that is under the mask of a field [B, S, *F] on the host; None if none is."""
    form = FieldForm((), "padded", "", 1, x.dtype, shape=tuple(x.shape[2:]))
    number = int(_read_alone([(x, form, layout, pads)], True)[1]["pad"][0])
    return pads[number] if number >= 0 else None


# -------------------------------------------------------------------- messages


def _message(opened: Opened, form: FieldForm, layouts: Mapping[str, RowLayout]) -> str:
    pads = opened.plan.pads[form.path]
    place, seen, pad = non_pad_of(opened, form, layouts)
    zero = ""
    if seen in ("0.0", "-0.0"):
        zero = _MIXED_ZEROS if pad is SIGNED_ZERO else _OTHER_ZERO if pad == 0 else ""
    return (
        f'{opened.options.call}: field "{show(form.path)}" holds {seen} at {place} (row, position, ...), which '
        f'mask "{form.layout}" masks out; expected its pad {said_pads(pads)} there. {zero}Fix the '
        "producer, check pad_token_id, give the field its true pad or mask in the registry, or let it stay padded: "
        "with MaskNestingSpec(None), or without strict mode."
    )


def non_pad_of(
    opened: Opened, form: FieldForm, layouts: Mapping[str, RowLayout]
) -> tuple[tuple[int, ...], str, PadValue]:
    """Index and value of one element that is under the mask of a lossy field, and the pad that it is not."""
    x = opened.seen.entries[form.path].detach().movedim(form.ragged_dim, 1).cpu()
    pads = opened.plan.pads[form.path]
    pad = next((pad for pad in (ANY_ZERO, SIGNED_ZERO) if pad in pads), pads[0])
    return *_first_non_pad(x, layouts[form.layout or ""].to("cpu"), pad), pad


def _first_non_pad(x: Tensor, layout: RowLayout, pad: PadValue) -> tuple[tuple[int, ...], str]:
    """Index and value of one element of a field on the host that is not the pad."""
    mask, rows = layout.to_mask().int(), torch.arange(layout.num_rows, device="cpu")[:, None]
    plain = words(cast("Tensor", pad_tensor(0 if isinstance(pad, Pad) else pad, x.dtype))).view(1, 1, -1)
    signed = pad in (SIGNED_ZERO, ANY_ZERO) and x.dtype.is_floating_point and x.dtype.itemsize > 1
    minus = words(cast("Tensor", pad_tensor(-0.0, x.dtype))).view(-1)[-1] if signed else 0
    bits, size = words(x).reshape(*x.shape[:2], -1), plain.shape[2]
    held = plain.repeat(1, 1, bits.shape[2] // size)
    if pad is EDGE:  # the token before, or the first one of the row; 0 in an empty row
        before = torch.where(mask == 1, torch.arange(layout.width, device="cpu"), -1).cummax(1).values
        nearest = torch.where(before < 0, mask.argmax(1, keepdim=True), before)
        held = torch.where(mask.any(1)[:, None, None], bits[rows, nearest], 0)
    elif pad is PER_ROW or pad is SIGNED_ZERO:  # a number of each row, which is that of its first masked-out element
        first = bits[rows, mask.argmin(1, keepdim=True), :size]
        first = first if pad is PER_ROW else torch.where(first == minus, first, 0)
        held = first.repeat(1, 1, bits.shape[2] // size)
    elif pad is ANY_ZERO:
        bits = torch.where(bits == minus, 0, bits)
    differs = cast("list[int]", torch.nonzero((bits != held) & (mask == 0)[:, :, None])[0].tolist())
    number: int = differs.pop() // size
    for dim in reversed(x.shape[2:]):
        differs.insert(2, number % dim)
        number //= dim
    where = tuple(differs)
    return where, str(x[where].item() if x.dtype.itemsize > 1 or not x.is_floating_point() else "?")
