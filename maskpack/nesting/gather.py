"""Gathers the packed values of each field of a batch, and determines the pad that is under its mask.

    plan --> layouts --> values gathered, pads verified --> a form with one pad for each field, or it stays padded

The batch is not changed, and no result is built before all checks have passed. `compress` of fields on the host does
the same in the compiled core, which encodes what it gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.bits import Words, empty_of, host_words, odd_bools, odd_bools_error, words
from maskpack.core.keys import Path, show
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO, Pads, PadValue, said_pads
from maskpack.core.tree import dense_stack, flatten, has, need_batch
from maskpack.errors import LayoutError, LossyPadError
from maskpack.fields.options import Options
from maskpack.layout.jagged import all_values, check_lengths, held_by, to_host
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks, device_read
from maskpack.nesting.axes import Axes, Source
from maskpack.nesting.nested import INTACT, NOTHING, Nested, read_nested
from maskpack.nesting.plan import BatchPlan, Seen, plan_of
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.ops import pack_torch

LOSSY = "it has non-pad values under its mask (strict mode names one, and the remedy)"
_MIXED_ZEROS = "A row mixes 0.0 and -0.0, which the pad ZERO takes in fields with one number for each token alone. "
_OTHER_ZERO = "0.0 and -0.0 differ in their bits: the pad ZERO takes both. "


@dataclass(frozen=True)
class Gathered:
    """A batch whose values were gathered.

    Attributes:
        plan: its plan.
        axes: of which the layouts are.
        forms: the forms of its entries; those with non-pad values under their mask stay padded.
        rows: B.
        entries: its entries, by path.
        layouts: its layouts, by name.
        values: packed values [T, *F] of padded, flat and jagged forms.
        pads: what is under the masks of padded forms.
    """

    plan: BatchPlan
    axes: Axes
    forms: tuple[FieldForm, ...]
    rows: int
    entries: Mapping[Path, Any]
    layouts: Mapping[str, RowLayout]
    values: Mapping[Path, Tensor]
    pads: Mapping[Path, Pads]

    @property
    def schema(self) -> Schema:
        """The schema of the nested or packed batch."""
        return replace(self.plan.schema, forms=self.forms)


def whole_batch(batch: TensorDictBase, call: str) -> tuple[TensorDictBase, Nested]:
    """A batch, a lazy stack as one TensorDict, and what its LAYOUTS say."""
    need_batch(batch, call)
    batch = dense_stack(batch, call)
    return batch, read_nested(batch, call) if has(batch, LAYOUTS) else NOTHING


def gathered(
    batch: TensorDictBase, options: Options, carried: Nested, stand_in: Mapping[str, RowLayout], seen: Seen
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
        if form.kind == "padded" and form.path not in jagged and plan.pads[form.path][0] == 0
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

    verifier = Verifier(tensors, jagged.keys(), plan.pads, gather, layouts, options, uniform.keys())
    forms, pads = verifier.verified(list(plan.forms))
    nested = [form for form in forms if form.kind == "padded" and form.path in jagged]
    pads |= {form.path: plan.pads_of(form, jagged[form.path], carried, options.call) for form in nested}
    return Gathered(plan, axes, tuple(forms), rows, entries, layouts, verifier.values, pads)


def is_away(x: Tensor) -> bool:
    """Whether a tensor is on a device, where kernels and plain torch work; the compiled core reads others."""
    return x.device.type != "cpu"


@dataclass
class Verifier:
    """Gathers the values of all fields with a layout, and determines what is under the mask of each padded field.

    `tensors` are the padded tensors, the values of those that are `jagged`, and others without a layout; `pads` those
    to try. `gather(form)` returns the values [T, *F] of a field, and `known` are fields whose pad is 0.
    """

    tensors: Mapping[Path, Tensor]
    jagged: Collection[Path]
    pads: Mapping[Path, Sequence[PadValue]]
    gather: Callable[[FieldForm], Tensor]
    layouts: Mapping[str, RowLayout]
    options: Options
    known: Collection[Path]
    values: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    _odd: set[Path] = field(default_factory=set[Path])
    """Bools with bytes other than 0 and 1."""
    _moved: dict[tuple[str, torch.device], RowLayout] = field(default_factory=dict[tuple[str, torch.device], RowLayout])

    def verified(self, forms: list[FieldForm]) -> tuple[list[FieldForm], dict[Path, Pads]]:
        """The forms, and the pads of the padded tensors. A field with non-pad values under its mask stays padded, or
        raises LossyPadError."""
        padded = {form.path: form for form in forms if form.kind == "padded" and form.path not in self.jagged}
        unsure = {path: form for path, form in padded.items() if path not in self.known}
        for form in [form for form in forms if form.layout is not None and form.path not in unsure]:
            self.values[form.path] = self.gather(form)
        bools = [form.path for form in forms if form.dtype is torch.bool and form.path in self.tensors]
        away = {path for path in unsure if is_away(self.tensors[path])}
        found: dict[Path, Pads | None] = {path: Pads.of(0, self.tensors[path].dtype) for path in self.known}
        if unsure:
            found |= self._read_on_devices([unsure[path] for path in unsure if path in away], bools)
        found |= self._read_on_host([form for path, form in unsure.items() if path not in found])
        lossy = [form for path, form in padded.items() if found[path] is None]
        if lossy and self.options.strict:
            raise LossyPadError("\n".join(map(self._message, lossy)))
        for form in lossy:
            self.values.pop(form.path)
        pads = {path: own for path, own in found.items() if own is not None}
        self._odd |= {path for path in bools if self._is_odd(path)}
        self._odd |= {path for path in bools if path in pads and odd_bools(pads[path].records[:, 1])}
        if self._odd:
            raise odd_bools_error(self.options.call, sorted(self._odd))
        kept = {f.path: FieldForm(f.path, "dense", dtype=f.dtype, reason=LOSSY, axis=f.layout) for f in lossy}
        return [kept.get(form.path, form) for form in forms], pads

    def _is_odd(self, path: Path) -> bool:
        """Whether bools on the host have bytes other than 0 and 1 where they are kept."""
        x = self.values.get(path, self.tensors[path])
        if is_away(x) or x.layout != torch.strided:
            return False
        return odd_bools(words(x[:1] if x.dim() and not x.stride(0) else x).numpy())  # of an expanded row, the first

    def _needs_grad(self, form: FieldForm) -> bool:
        return self.tensors[form.path].requires_grad and torch.is_grad_enabled()

    def _to_try(self, path: Path) -> Sequence[PadValue]:
        return self.pads[path] if self.options.verify else self.pads[path][:1]

    def _read_on_devices(self, forms: Sequence[FieldForm], bools: Sequence[Path]) -> dict[Path, Pads | None]:
        """Gathers padded fields on devices; returns what is under the masks of those that a kernel reads, None if no
        pad fits. One synchronisation for all checks, also of `bools` on devices, and one for the pads of rows."""
        fields: dict[torch.device, dict[Path, device_read.PaddedField]] = {}
        for form in forms:
            x, layout = self._padded(form)
            own = device_read.PaddedField(x.detach(), layout, self._to_try(form.path), self.options.verify)
            fields.setdefault(x.device, {})[form.path] = own
        reads = [device_read.read(own, device) for device, own in fields.items()]
        self.values |= {path: values for read in reads for path, values in read.values.items()}
        taken = [form.path for form in forms if form.path in self.values]
        anew = [form for form in forms if form.path not in self.values or self._needs_grad(form)]
        self.values |= {form.path: self.gather(form) for form in anew}
        flags = self._flags(reads, bools) if self.options.verify else {}
        found: dict[Path, PadValue | None] = {}
        for path in taken:
            differs = flags.get(path, [0])
            found[path] = next((pad for pad, one in zip(self._to_try(path), differs, strict=False) if not one), None)
        records = {path: own for read in reads for (path, pad), own in read.records.items() if found[path] is pad}
        records = host_words(records, records)
        return {path: _pads_of(pad, self.tensors[path].dtype, records.get(path)) for path, pad in found.items()}

    def _flags(self, reads: Sequence[device_read.Reads], bools: Sequence[Path]) -> dict[Path, list[int]]:
        """For each pad of a field, whether it does not fit. Looks at bools on devices, too."""
        known = {path for read in reads for path in read.places}
        tensors = {path: self.tensors[path] for path in bools if path not in known and is_away(self.tensors[path])}
        others = {path: words(x) > 1 for path, x in tensors.items() if x.layout == torch.strided}
        counts = [torch.count_nonzero(odd).view(1) for odd in others.values()]
        on_host = to_host([*(read.flags for read in reads), *counts])
        found = {
            path: line[place].tolist()
            for read, line in zip(reads, on_host, strict=False)
            for path, place in read.places.items()
        }
        ends = {path: found[path][-1] for path in bools if path in found}
        ends |= {path: int(count[0]) for path, count in zip(others, on_host[len(reads) :], strict=True)}
        self._odd |= {path for path, odd in ends.items() if odd}
        return found

    def _read_on_host(self, forms: Sequence[FieldForm]) -> dict[Path, Pads | None]:
        """What is under the masks of padded fields, copied to the host if they are not there; None if no pad fits. One
        pass for each pad, of the fields that the pads before do not fit; it gathers the values of those on the
        host."""
        found: dict[Path, Pads] = {}
        padded = {form.path: self._on_host(form) for form in forms}
        gathered: dict[Path, Tensor | None] = {}
        for form in forms:
            x, layout = padded[form.path]
            gathered[form.path] = None
            if form.path in self.values:
                continue
            if self._needs_grad(form):
                self.values[form.path] = self.gather(form)
            else:
                gathered[form.path] = empty_of((layout.num_tokens, *x.shape[2:]), x.dtype)
                self.values[form.path] = cast("Tensor", gathered[form.path])
        for attempt in range(max((len(self._to_try(form.path)) for form in forms), default=0)):
            trials = [
                (form, self._to_try(form.path)[attempt])
                for form in forms
                if form.path not in found and len(self._to_try(form.path)) > attempt
            ]
            fields = [(*padded[form.path], pad, gathered[form.path]) for form, pad in trials]
            exact, records = checks.read(fields, not self.options.verify)
            for (form, pad), fits, own in zip(trials, exact, records, strict=True):
                if fits and (pads := _pads_of(pad, self.tensors[form.path].dtype, own)) is not None:
                    found[form.path] = pads
        return {form.path: found.get(form.path) for form in forms}

    def _padded(self, form: FieldForm) -> tuple[Tensor, RowLayout]:
        """A field with its width behind its rows, and its layout, on one device."""
        x = self.tensors[form.path]
        x = x if form.ragged_dim == 1 else x.movedim(form.ragged_dim, 1)
        return x, self._layout(form.layout or "", x.device)

    def _on_host(self, form: FieldForm) -> tuple[Tensor, RowLayout]:
        x, layout = self._padded(form)
        x = x.detach().cpu() if is_away(x) else x
        return x, layout if layout.device == x.device else self._layout(form.layout or "", x.device)

    def _layout(self, name: str, device: torch.device) -> RowLayout:
        if (name, device) not in self._moved:
            self._moved[name, device] = self.layouts[name].to(device)
        return self._moved[name, device]

    def _message(self, form: FieldForm) -> str:
        x, layout = self._on_host(form)
        pads = self.pads[form.path]
        pad = next((pad for pad in (ANY_ZERO, SIGNED_ZERO) if pad in pads), pads[0])
        place, seen = checks.first_non_pad(x, layout, pad)
        zero = ""
        if seen in ("0.0", "-0.0"):
            zero = _MIXED_ZEROS if pad is SIGNED_ZERO else _OTHER_ZERO if pad == 0 else ""
        return (
            f'{self.options.call}: field "{show(form.path)}" holds {seen} at {place} (row, position, ...), which '
            f'mask "{form.layout}" masks out; expected its pad {said_pads(pads)} there. {zero}Fix the '
            "producer, check pad_token_id, give the field its true pad or mask in the registry, or let it stay padded: "
            "with MaskNestingSpec(None), or without strict mode."
        )


def _pads_of(pad: PadValue | None, dtype: torch.dtype, records: Words | None) -> Pads | None:
    """What is under the mask of a field with a pad, from the records of its rows if they may differ."""
    if records is not None:
        return Pads(records, dtype.itemsize).shortest()
    return None if pad is None else Pads.of(pad, dtype)
