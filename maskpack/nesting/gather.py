"""Gathers the packed values of each field of a batch, and determines the pad that is under its mask.

    plan --> layouts --> values gathered, pads verified --> a form with one pad for each field, or it stays padded

The batch is not changed, and no result is built before all checks have passed. `compress` of fields on the host does
the same in the compiled core, which encodes what it gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.bits import empty_of, odd_bools, odd_bools_error, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.core.pads import ANY_ZERO, PER_ROW, SIGNED_ZERO, PadValue, said_pads
from maskpack.core.tensors import need_batch
from maskpack.core.tree import Node, dense_stack, entry_at, flatten, has, rows_in, unflatten
from maskpack.errors import LayoutError, LossyPadError
from maskpack.fields.options import Options
from maskpack.layout.jagged import all_values, check_lengths, held_by, to_host, values_of
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks, device_read
from maskpack.nesting.axes import Axes, Source
from maskpack.nesting.plan import NOTHING, BatchPlan, Carried, Seen, plan_of
from maskpack.nesting.schema import INTACT, LAYOUTS, FieldForm, Schema, pads_of_rows, read_layouts
from maskpack.nesting.signs import signs_of
from maskpack.ops import pack_torch

LOSSY = "it has non-pad values under its mask (strict mode names one, and the remedy)"
_MIXED_ZEROS = "A row mixes 0.0 and -0.0, which the pad ZERO takes in fields with one number for each token alone. "
_OTHER_ZERO = "0.0 and -0.0 differ in their bits: the pad ZERO takes both. "
DIFFERENT_PADS = "its rows were nested with different pads"


@dataclass(frozen=True)
class Gathered:
    """A batch whose values were gathered.

    Attributes:
        plan: its plan.
        axes: of which the layouts are.
        forms: the forms of its entries, with one pad each.
        rows: B.
        entries: its entries, by path.
        layouts: its layouts, by name.
        values: packed values [T, *F] of padded, flat and jagged forms.
        row_pads: the pads [B] of fields whose pad is PER_ROW, and the signs of those whose pad is ANY_ZERO.
    """

    plan: BatchPlan
    axes: Axes
    forms: tuple[FieldForm, ...]
    rows: int
    entries: Mapping[Path, Any]
    layouts: Mapping[str, RowLayout]
    values: Mapping[Path, Tensor]
    row_pads: Mapping[Path, Tensor]

    @property
    def schema(self) -> Schema:
        """The schema of the nested or packed batch."""
        return replace(self.plan.schema, forms=self.forms)


def whole_batch(batch: TensorDictBase, call: str) -> tuple[TensorDictBase, Carried]:
    """A batch, a lazy stack as one TensorDict, and what its LAYOUTS hold. Nested fields whose pads differ from row to
    row are restored in it."""
    need_batch(batch, call)
    batch = dense_stack(batch, call)
    if not has(batch, LAYOUTS):
        return batch, NOTHING
    schema, layouts = read_layouts(batch, call)
    restored: dict[Path, Tensor] = {}
    for path, pads in pads_of_rows(batch, schema.forms, call).items():
        value, form = entry_at(batch, path), schema.by_path[path]
        if isinstance(value, Tensor) and value.is_nested:
            layout = layouts[form.layout or ""]
            check_lengths({path: (value, layout)}, call, INTACT)
            restored[path] = checks.to_padded(values_of(value), form, layout, pads)
    if restored:
        entries = [(path, restored.get(path, value)) for path, value in flatten(batch)]
        batch = unflatten(Node.of(batch), entries, rows_in(batch))
    return batch, Carried(schema, layouts, frozenset(restored))


def gathered(
    batch: TensorDictBase, options: Options, carried: Carried, stand_in: Mapping[str, RowLayout], seen: Seen
) -> Gathered:
    """Gathers the values of a batch from `whole_batch`, which was `seen`, and verifies its pads. `stand_in` are layouts
    for masks that are not in the batch."""
    plan = plan_of(batch, options, carried, stand_in, seen)
    axes = Axes(batch, options.registry, carried.layouts, stand_in, options.call)
    entries = dict(flatten(batch, without=LAYOUTS))
    rows = batch.batch_size[0] if batch.batch_dims else plan.rows
    layouts = axes.layouts_of(plan.sources)
    tensors = {form.path: entries[form.path] for form in plan.forms if form.dtype is not None}
    nested = {path: x for path, x in tensors.items() if held_by(x) is not None or x.is_nested}
    jagged = dict(zip(nested, all_values(list(nested.values())), strict=True))
    pairs = [(f.path, layouts[f.layout or ""]) for f in plan.forms if f.kind == "padded" and f.path in jagged]
    check_lengths({path: (tensors[path], layout) for path, layout in pairs}, options.call, INTACT)
    tensors |= jagged  # whose attributes take microseconds each
    uniform = {
        form.path: value.expand(layouts[form.layout or ""].num_tokens)
        for form in plan.forms
        if form.kind == "padded" and form.path not in jagged and form.pads[0] == 0
        if plan.sources[form.layout or ""] == Source("mask", form.path)
        if (value := axes.value_of(form.path)) is not None
    }

    def gather(form: FieldForm) -> Tensor:
        path, layout = form.path, layouts[form.layout or ""]
        if path in uniform:
            return uniform[path]
        x = tensors[path]
        if path not in jagged and form.kind != "flat":
            return pack_torch.pack(x.movedim(form.ragged_dim, 1), layout.to(x.device))
        if path in jagged and x.shape[0] < layout.num_tokens:
            raise LayoutError(
                f'{options.call}: field "{show(path)}" is jagged, of {x.shape[0]} values; its offsets end at '
                f"{layout.num_tokens}; expected offsets that end there. Build it anew from its rows."
            )
        return x

    verifier = Verifier(tensors, jagged.keys(), plan.restored, gather, layouts, options, dict.fromkeys(uniform, 0))
    forms, row_pads = verifier.verified(list(plan.forms))
    return Gathered(plan, axes, tuple(forms), rows, entries, layouts, verifier.values, row_pads)


def is_away(x: Tensor) -> bool:
    """Whether a tensor is on a device, where plain torch or kernels read it; the compiled core reads others."""
    return x.device.type != "cpu"


def _of_kernel(pads: Sequence[PadValue]) -> list[PadValue]:
    """The pads that the kernel of device_read.py tries."""
    return [pad for pad in pads if pad is not ANY_ZERO]


@lru_cache(1024)
def _with_one(form: FieldForm, place: int) -> FieldForm:
    """The form with one of its pads. Forms are equal only if the bits of their pads are."""
    return replace(form, pads=(form.pads[place],))


@dataclass
class Verifier:
    """Gathers the values of all fields with a layout, and determines the pad of each padded field.

    `tensors` are the padded tensors, the values of those that are `jagged`, and others without a layout; those of
    `restored` are verified in any case. `gather(form)` returns the values [T, *F] of a field, and `known` are pads that
    need no check.
    """

    tensors: Mapping[Path, Tensor]
    jagged: Collection[Path]
    restored: Collection[Path]
    gather: Callable[[FieldForm], Tensor]
    layouts: Mapping[str, RowLayout]
    options: Options
    known: Mapping[Path, PadValue]
    values: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    _row_pads: dict[tuple[Path, PadValue], Tensor] = field(default_factory=dict[tuple[Path, PadValue], Tensor])
    _odd: list[Path] = field(default_factory=list[Path])
    """Bools with bytes other than 0 and 1."""
    _bools: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    """Those on devices, which are checked together with the pads."""
    _moved: dict[tuple[str, torch.device], RowLayout] = field(default_factory=dict[tuple[str, torch.device], RowLayout])

    def _unsure(self, forms: Sequence[FieldForm]) -> dict[Path, FieldForm]:
        return {form.path: form for form in forms if form.kind == "padded" and form.path not in self.jagged}

    def verified(self, forms: list[FieldForm]) -> tuple[list[FieldForm], dict[Path, Tensor]]:
        """The forms with one pad each; and the pads [B] of fields whose pad is PER_ROW, or the signs of those whose pad
        is ANY_ZERO. A field with non-pad values under its mask stays padded, or raises LossyPadError."""
        unsure = self._unsure(forms)
        bools = [(form.path, self.tensors[form.path]) for form in forms if form.dtype is torch.bool]
        self._bools = {path: x for path, x in bools if is_away(x) and x.layout == torch.strided}
        found = self._pads(unsure, [form for form in forms if form.layout is not None])
        lossy = [form for path, form in unsure.items() if found[path] is None and path not in self.restored]
        if lossy and self.options.strict:
            raise LossyPadError("\n".join(map(self._message, lossy)))
        row_pads: dict[Path, Tensor] = {}
        sure: list[FieldForm] = []
        for form in forms:
            pad = found.get(form.path)
            if form.path not in unsure:
                sure.append(form)
            elif pad is None:
                self.values.pop(form.path)
                reason = DIFFERENT_PADS if form.path in self.restored else LOSSY
                sure.append(FieldForm(form.path, "dense", dtype=form.dtype, reason=reason, axis=form.layout))
            else:
                held = self._pad(form, pad)
                zeros = pad is SIGNED_ZERO or pad is ANY_ZERO
                if isinstance(held, Tensor) and zeros and not held.is_cuda and not words(held).any():
                    held = 0
                elif isinstance(held, Tensor):
                    row_pads[form.path], held = held, ANY_ZERO if pad is ANY_ZERO else PER_ROW
                place = next((number for number, own in enumerate(form.pads) if own is held), -1)
                sure.append(_with_one(form, place) if place >= 0 else replace(form, pads=(held,)))
        for form in [form for form in sure if form.dtype is torch.bool]:
            self._look(form.path, self.values.get(form.path, self.tensors[form.path]))
            self._look(form.path, row_pads.get(form.path))
        if self._odd:
            raise odd_bools_error(self.options.call, sorted(set(self._odd)))
        return sure, row_pads

    def _look(self, path: Path, x: Tensor | None) -> None:
        """Records bools on the host with bytes other than 0 and 1."""
        if x is not None and not is_away(x) and x.layout == torch.strided:
            line = x[:1] if x.dim() and not x.stride(0) else x  # an expanded row
            if odd_bools(words(line).numpy()):
                self._odd.append(path)

    def _pads(self, unsure: Mapping[Path, FieldForm], gathered: Sequence[FieldForm]) -> dict[Path, PadValue | None]:
        """The pad of each field, or None if none of its pads fits. Also gathers the values."""
        sure = dict(self.known)
        if not self.options.verify:
            sure = {path: form.pads[0] for path, form in unsure.items() if path not in self.restored}
        doubtful = {path: form for path, form in unsure.items() if path not in sure}
        read = self._read(gathered, doubtful, sure)
        return {**sure, **read}

    def _read(
        self, gathered: Sequence[FieldForm], doubtful: Mapping[Path, FieldForm], sure: Mapping[Path, PadValue]
    ) -> dict[Path, PadValue | None]:
        """Gathers all fields and returns the pads of the doubtful ones. The pads of the others are in `sure`."""
        away: dict[torch.device, list[FieldForm]] = {}
        here: list[FieldForm] = []
        for form in gathered:
            if is_away(self.tensors[form.path]):
                away.setdefault(self.tensors[form.path].device, []).append(form)
            elif form.path in doubtful:
                here.append(form)
            else:
                self.values[form.path] = self.gather(form)
        found = self._read_on_host(here)
        reads = [self._read_on_device(forms, device, doubtful, sure) for device, forms in away.items()]
        return found | self._tried({path: form for path, form in doubtful.items() if path not in found}, reads)

    def _read_on_device(
        self,
        forms: Sequence[FieldForm],
        device: torch.device,
        doubtful: Mapping[Path, FieldForm],
        sure: Mapping[Path, PadValue],
    ) -> device_read.Reads:
        """Gathers all fields of a device. A kernel tries the pads of the padded ones, but for those that it cannot
        read."""
        fields: dict[Path, device_read.PaddedField] = {}
        for form in forms:
            if form.kind == "padded" and form.path not in self.jagged:
                x, layout = self._padded(form)
                if device_read.fits(x, layout):
                    pad = sure.get(form.path)
                    pads = _of_kernel(form.pads if form.path in doubtful or pad is None else (pad,))
                    checked = form.path in doubtful or (bool(doubtful) and form.dtype is torch.bool)
                    fields[form.path] = device_read.PaddedField(x, layout, pads, checked)
                    continue
            self.values[form.path] = self.gather(form)
        if not fields:
            return device_read.NOTHING
        reads = device_read.read(fields, device)
        self.values |= reads.values
        self._row_pads |= reads.row_pads
        return reads

    def _read_on_host(self, forms: Sequence[FieldForm]) -> dict[Path, PadValue | None]:
        """Gathers the values of padded fields, in one pass with the check of their pads; None for one that no pad
        fits. A pass for each pad, of the fields that the pads before do not fit."""
        found: dict[Path, PadValue | None] = {}
        padded = {form.path: self._padded(form) for form in forms}
        gathered: dict[Path, Tensor | None] = {}
        for form in forms:
            x, layout = padded[form.path]
            if x.requires_grad and torch.is_grad_enabled():
                self.values[form.path], gathered[form.path] = self.gather(form), None
            else:
                values = empty_of((layout.num_tokens, *x.shape[2:]), x.dtype)
                self.values[form.path] = gathered[form.path] = values
        left = list(forms)
        for attempt in range(max((len(form.pads) for form in forms), default=0)):
            trials = [form for form in left if len(form.pads) > attempt]
            if not trials:
                break
            left = [form for form in left if len(form.pads) <= attempt]
            exact, of_rows = checks.read(
                [(*padded[form.path], form.pads[attempt], gathered[form.path]) for form in trials]
            )
            for form, fits, pads in zip(trials, exact, of_rows, strict=True):
                if pads is not None:
                    self._row_pads[form.path, form.pads[attempt]] = pads
                if fits:
                    found[form.path] = form.pads[attempt]
                else:
                    left.append(form)
        for form in left:
            found[form.path], self.values[form.path] = None, self.gather(form)
        return found

    def _tried(
        self, unsure: Mapping[Path, FieldForm], reads: Sequence[device_read.Reads]
    ) -> dict[Path, PadValue | None]:
        """The first pad that fits of each field. The flags of fields that a kernel has read come with one
        synchronisation. Then the pads of all other fields are tried, and ANY_ZERO, which the kernel does not know."""
        found: dict[Path, PadValue | None] = dict.fromkeys(unsure)
        if not unsure:
            return found
        reads = [read for read in reads if read.flags.numel()]
        known = {path for read in reads for path in read.places}
        odd = [path for path in self._bools if path not in known]
        counts = [torch.count_nonzero(words(self._bools[path]) > 1).view(1) for path in odd]
        on_host = to_host([*(read.flags for read in reads), *counts])
        for read, line in zip(reads, on_host, strict=False):
            self._take(read, line, unsure, found)
        self._odd += [path for path, (count,) in zip(odd, on_host[len(reads) :], strict=True) if count]
        left = {
            path: [pad for pad in form.pads if pad is ANY_ZERO or path not in known]
            for path, form in unsure.items()
            if found[path] is None
        }
        for attempt in range(max(map(len, left.values()), default=0)):
            trials = [(unsure[path], pads[attempt]) for path, pads in left.items() if len(pads) > attempt]
            found |= self._fitting([(form, pad) for form, pad in trials if found[form.path] is None])
        return found

    def _fitting(self, trials: Sequence[tuple[FieldForm, PadValue]]) -> dict[Path, PadValue]:
        """The pads that fit their fields. One synchronisation."""
        counts = to_host([self._count_non_pads(form, pad).view(1) for form, pad in trials])
        return {form.path: pad for (form, pad), (count,) in zip(trials, counts, strict=True) if not count}

    def _take(
        self,
        read: device_read.Reads,
        flags: IntArray,
        unsure: Mapping[Path, FieldForm],
        found: dict[Path, PadValue | None],
    ) -> None:
        """The pads of the fields that a kernel has read, from its flags on the host."""
        for path, place in read.places.items():
            form = unsure.get(path)
            differs = flags[place].tolist()
            if form is not None:
                fitting = [pad for pad, differ in zip(_of_kernel(form.pads), differs, strict=False) if not differ]
                found[path] = fitting[0] if fitting else None
            if path in self._bools and differs and differs[-1]:
                self._odd.append(path)

    def _count_non_pads(self, form: FieldForm, pad: PadValue) -> Tensor:
        x, layout = self._padded(form)
        pads = pad if pad is ANY_ZERO else self._pad(form, pad)
        return checks.count_non_pads(x, self.values[form.path], layout, pads)

    def _pad(self, form: FieldForm, pad: PadValue) -> PadValue | Tensor:
        if pad is not PER_ROW and pad is not SIGNED_ZERO and pad is not ANY_ZERO:
            return pad
        if (form.path, pad) not in self._row_pads and pad is ANY_ZERO:
            self._row_pads[form.path, pad] = signs_of(*self._padded(form))
        elif (form.path, pad) not in self._row_pads:
            pads = checks.row_pads(*self._padded(form))
            self._row_pads[form.path, pad] = checks.zeros_of(pads) if pad is SIGNED_ZERO else pads
        return self._row_pads[form.path, pad]

    def _padded(self, form: FieldForm) -> tuple[Tensor, RowLayout]:
        x = self.tensors[form.path]
        x = x if form.ragged_dim == 1 else x.movedim(form.ragged_dim, 1)
        place = form.layout or "", x.device
        if place not in self._moved:
            self._moved[place] = self.layouts[place[0]].to(x.device)
        return x, self._moved[place]

    def _message(self, form: FieldForm) -> str:
        x, layout = self._padded(form)
        pad = SIGNED_ZERO if SIGNED_ZERO in form.pads else form.pads[0]
        if ANY_ZERO in form.pads:
            x, pad = torch.where(x == 0, 0, x), 0
        place, seen = checks.first_non_pad(x, layout, self._pad(form, pad))
        zero = ""
        if seen in ("0.0", "-0.0"):
            zero = _MIXED_ZEROS if pad is SIGNED_ZERO else _OTHER_ZERO if pad == 0 else ""
        return (
            f'{self.options.call}: field "{show(form.path)}" holds {seen} at {place} (row, position, ...), which '
            f'mask "{form.layout}" masks out; expected its pad {said_pads(form.pads)} there. {zero}Fix the '
            "producer, check pad_token_id, give the field its true pad or mask in the registry, or let it stay padded: "
            "with MaskNestingSpec(None), or without strict mode."
        )
