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
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, SIGNED_ZERO, Pad, Pads, PadValue, said_pads
from maskpack.core.tensors import need_batch
from maskpack.core.tree import dense_stack, flatten, has
from maskpack.errors import LayoutError, LossyPadError
from maskpack.fields.options import Options
from maskpack.layout.jagged import all_values, check_lengths, held_by, to_host
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks, device_read
from maskpack.nesting.axes import Axes, Source
from maskpack.nesting.nested import INTACT, NOTHING, Nested, read_nested
from maskpack.nesting.plan import BatchPlan, Seen, plan_of
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.nesting.signs import signs_of
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

    known = dict.fromkeys(uniform, 0)
    verifier = Verifier(tensors, jagged.keys(), plan.pads, gather, layouts, options, known)
    forms, pads = verifier.verified(list(plan.forms))
    nested = [form for form in forms if form.kind == "padded" and form.path in jagged]
    pads |= {form.path: plan.pads_of(form, jagged[form.path], carried, options.call) for form in nested}
    return Gathered(plan, axes, tuple(forms), rows, entries, layouts, verifier.values, pads)


def is_away(x: Tensor) -> bool:
    """Whether a tensor is on a device, where plain torch or kernels read it; the compiled core reads others."""
    return x.device.type != "cpu"


def _of_kernel(pads: Sequence[PadValue]) -> list[PadValue]:
    """The pads that the kernel of device_read.py tries."""
    return [pad for pad in pads if pad is not ANY_ZERO]


@dataclass
class Verifier:
    """Gathers the values of all fields with a layout, and determines the pad of each padded field.

    `tensors` are the padded tensors, the values of those that are `jagged`, and others without a layout; `pads` those
    to try. `gather(form)` returns the values [T, *F] of a field, and `known` are pads that need no check.
    """

    tensors: Mapping[Path, Tensor]
    jagged: Collection[Path]
    pads: Mapping[Path, Sequence[PadValue]]
    gather: Callable[[FieldForm], Tensor]
    layouts: Mapping[str, RowLayout]
    options: Options
    known: Mapping[Path, PadValue]
    values: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    _records: dict[tuple[Path, PadValue], Words] = field(default_factory=dict[tuple[Path, PadValue], Words])
    """Of fields on the host."""
    _row_pads: dict[tuple[Path, PadValue], Tensor] = field(default_factory=dict[tuple[Path, PadValue], Tensor])
    """[B], of fields on devices."""
    _odd: list[Path] = field(default_factory=list[Path])
    """Bools with bytes other than 0 and 1."""
    _bools: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    """Those on devices, which are checked together with the pads."""
    _moved: dict[tuple[str, torch.device], RowLayout] = field(default_factory=dict[tuple[str, torch.device], RowLayout])

    def _unsure(self, forms: Sequence[FieldForm]) -> dict[Path, FieldForm]:
        return {form.path: form for form in forms if form.kind == "padded" and form.path not in self.jagged}

    def verified(self, forms: list[FieldForm]) -> tuple[list[FieldForm], dict[Path, Pads]]:
        """The forms, and the pads of the padded tensors. A field with non-pad values under its mask stays padded, or
        raises LossyPadError."""
        unsure = self._unsure(forms)
        bools = [(form.path, self.tensors[form.path]) for form in forms if form.dtype is torch.bool]
        self._bools = {path: x for path, x in bools if is_away(x) and x.layout == torch.strided}
        found = self._pads(unsure, [form for form in forms if form.layout is not None])
        lossy = [form for path, form in unsure.items() if found[path] is None]
        if lossy and self.options.strict:
            raise LossyPadError("\n".join(map(self._message, lossy)))
        for form in lossy:
            self.values.pop(form.path)
        kept = {f.path: FieldForm(f.path, "dense", dtype=f.dtype, reason=LOSSY, axis=f.layout) for f in lossy}
        forms = [kept.get(form.path, form) for form in forms]
        for form in [form for form in forms if form.dtype is torch.bool]:
            self._look(form.path, self.values.get(form.path, self.tensors[form.path]))
        pads = self._found(unsure, found)
        self._odd += [
            path for path, own in pads.items() if unsure[path].dtype is torch.bool and odd_bools(own.records[:, 1])
        ]
        if self._odd:
            raise odd_bools_error(self.options.call, sorted(set(self._odd)))
        return forms, pads

    def _found(self, unsure: Mapping[Path, FieldForm], found: Mapping[Path, PadValue | None]) -> dict[Path, Pads]:
        """The pads of fields that fit. One synchronisation for those of rows on a device."""
        of_rows = {path: pad for path, pad in found.items() if isinstance(pad, Pad) and pad is not EDGE}
        records = {path: self._records_of(unsure[path], pad) for path, pad in of_rows.items()}
        away = {path: words for path, words in records.items() if isinstance(words, Tensor)}
        on_host = {path: torch.from_numpy(bits).view(away[path].dtype) for path, bits in host_words(away, away).items()}
        pads: dict[Path, Pads] = {}
        for path, pad in found.items():
            dtype = cast("torch.dtype", unsure[path].dtype)
            if path in on_host:
                pads[path] = Pads.of_rows(on_host[path]).shortest()
            elif path in records:
                pads[path] = Pads(cast("Words", records[path]), dtype.itemsize).shortest()
            elif pad is not None:
                pads[path] = Pads.of(pad, dtype)
        return pads

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
            sure = {path: self.pads[path][0] for path in unsure}
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
                    pads = _of_kernel(self.pads[form.path] if form.path in doubtful or pad is None else (pad,))
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
        for attempt in range(max((len(self.pads[form.path]) for form in forms), default=0)):
            trials = [form for form in left if len(self.pads[form.path]) > attempt]
            if not trials:
                break
            left = [form for form in left if len(self.pads[form.path]) <= attempt]
            tried = [self.pads[form.path][attempt] for form in trials]
            exact, records = checks.read(
                [(*padded[form.path], pad, gathered[form.path]) for form, pad in zip(trials, tried, strict=True)]
            )
            for form, pad, fits, own in zip(trials, tried, exact, records, strict=True):
                if own is not None:
                    self._records[form.path, pad] = own
                if fits:
                    found[form.path] = pad
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
            path: [pad for pad in self.pads[path] if pad is ANY_ZERO or path not in known]
            for path in unsure
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
                tried = _of_kernel(self.pads[path])
                fitting = [pad for pad, differ in zip(tried, differs, strict=False) if not differ]
                found[path] = fitting[0] if fitting else None
            if path in self._bools and differs and differs[-1]:
                self._odd.append(path)

    def _count_non_pads(self, form: FieldForm, pad: PadValue) -> Tensor:
        x, layout = self._padded(form)
        pads = self._rows_of(form, pad) if pad is PER_ROW or pad is SIGNED_ZERO else pad
        return checks.count_non_pads(x, self.values[form.path], layout, pads)

    def _rows_of(self, form: FieldForm, pad: PadValue) -> Tensor:
        """The pads [B] of a field, for PER_ROW or SIGNED_ZERO."""
        if (form.path, pad) not in self._row_pads:
            pads = checks.row_pads(*self._padded(form))
            self._row_pads[form.path, pad] = checks.zeros_of(pads) if pad is SIGNED_ZERO else pads
        return self._row_pads[form.path, pad]

    def _records_of(self, form: FieldForm, pad: PadValue) -> Words | Tensor:
        """Records of rows on the host, or pads [B] on a device."""
        if (form.path, pad) in self._records:
            return self._records[form.path, pad]
        if pad is ANY_ZERO:
            x, layout = self._padded(form)
            zeros = torch.zeros(layout.num_rows, dtype=x.dtype, device="cpu")
            return Pads.of_rows(zeros, signs_of(x, layout)).records
        rows = self._rows_of(form, pad)
        return rows if is_away(rows) else Pads.of_rows(rows).records

    def _padded(self, form: FieldForm) -> tuple[Tensor, RowLayout]:
        x = self.tensors[form.path]
        x = x if form.ragged_dim == 1 else x.movedim(form.ragged_dim, 1)
        place = form.layout or "", x.device
        if place not in self._moved:
            self._moved[place] = self.layouts[place[0]].to(x.device)
        return x, self._moved[place]

    def _message(self, form: FieldForm) -> str:
        x, layout = self._padded(form)
        pads = self.pads[form.path]
        pad = SIGNED_ZERO if SIGNED_ZERO in pads else pads[0]
        if ANY_ZERO in pads:
            x, pad = torch.where(x == 0, 0, x), 0
        of_rows = pad is PER_ROW or pad is SIGNED_ZERO
        place, seen = checks.first_non_pad(x, layout, self._rows_of(form, pad) if of_rows else pad)
        zero = ""
        if seen in ("0.0", "-0.0"):
            zero = _MIXED_ZEROS if pad is SIGNED_ZERO else _OTHER_ZERO if pad == 0 else ""
        return (
            f'{self.options.call}: field "{show(form.path)}" holds {seen} at {place} (row, position, ...), which '
            f'mask "{form.layout}" masks out; expected its pad {said_pads(pads)} there. {zero}Fix the '
            "producer, check pad_token_id, give the field its true pad or mask in the registry, or let it stay padded: "
            "with MaskNestingSpec(None), or without strict mode."
        )
