"""Verification: which pad each padded field of a batch really has, and what becomes of a field that has none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskpack import checks
from maskpack.errors import LossyPadError
from maskpack.jagged import to_host
from maskpack.layout import RowLayout
from maskpack.options import Options
from maskpack.registry import PER_ROW, SIGNED_ZERO, PadValue, Path, show
from maskpack.schema import FieldForm

_KEPT = "values other than its pad lie under its mask"
_MIXED_ZEROS = "A row mixes 0.0 and -0.0, as x * mask leaves them; x.masked_fill(mask == 0, 0) does not. "
_TRUSTED_FIELD_SETS = 256
_THREADED_BYTES = 1 << 24
_trusted: OrderedDict[Any, dict[Path, PadValue | None]] = OrderedDict()  # the pads that verify="first" found


class Verifier:
    """Finds the one pad that each padded field of a batch really has."""

    def __init__(
        self,
        entries: Mapping[Path, Any],
        values: Mapping[Path, Tensor],
        layouts: Mapping[str, RowLayout],
        options: Options,
    ) -> None:
        self._entries = entries
        self._values = values
        self._layouts = layouts
        self._options = options
        self._row_pads: dict[tuple[Path, PadValue], Tensor] = {}

    def verified(self, forms: list[FieldForm]) -> tuple[list[FieldForm], dict[Path, Tensor]]:
        """The forms with one pad each; a field with other values under its mask becomes dense, or raises. And the pads
        [B] of the fields whose pad is PER_ROW."""
        unsure = {f.path: f for f in forms if f.kind == "padded" and not self._entries[f.path].is_nested}
        found = self._pads(unsure)
        lossy = [form for path, form in unsure.items() if found[path] is None]
        if lossy and self._options.on_loss == "error":
            raise LossyPadError("\n".join(map(self._message, lossy)))
        row_pads: dict[Path, Tensor] = {}
        sure: list[FieldForm] = []
        for form in forms:
            pad = found.get(form.path)
            if form.path not in unsure:
                sure.append(form)
            elif pad is None:
                sure.append(FieldForm(form.path, "dense", dtype=form.dtype, reason=_KEPT))
            else:
                held = self._pad(form, pad)
                if isinstance(held, Tensor):
                    row_pads[form.path], held = held, PER_ROW
                sure.append(replace(form, pads=(held,)))
        return sure, row_pads

    def _pads(self, unsure: Mapping[Path, FieldForm]) -> dict[Path, PadValue | None]:
        """The pad that each field has; None if it has none of those that it may have."""
        options = self._options
        if options.verify == "never" or options.on_loss == "drop":
            return {path: form.pads[0] for path, form in unsure.items()}
        key = tuple((f.path, f.dtype, f.layout, f.ragged_dim, f.pads_by_bits) for f in unsure.values())
        trusted = _trusted.get(key, {}) if options.verify == "first" else {}
        doubtful = {path: form for path, form in unsure.items() if trusted.get(path) is None}  # lossy before, or new
        found = {**trusted, **self._tried(doubtful)}
        if options.verify == "first":
            _trusted[key] = found
            while len(_trusted) > _TRUSTED_FIELD_SETS:
                _trusted.popitem(last=False)
        return found

    def _tried(self, unsure: Mapping[Path, FieldForm]) -> dict[Path, PadValue | None]:
        """One synchronisation for the first pads of all fields, one more for the second of those that failed, ..."""
        found: dict[Path, PadValue | None] = dict.fromkeys(unsure)
        for attempt in range(max((len(form.pads) for form in unsure.values()), default=0)):
            trials = [form for path, form in unsure.items() if found[path] is None and attempt < len(form.pads)]
            counts = to_host(self._counts([(form, form.pads[attempt]) for form in trials]))
            for form, count in zip(trials, counts, strict=True):
                found[form.path] = None if count[0] else form.pads[attempt]
        return found

    def _counts(self, trials: Sequence[tuple[FieldForm, PadValue]]) -> list[Tensor]:
        """The strays of each field, int64 [1]. Large batches on the host are read by as many threads as torch uses."""
        size = sum(self._entries[form.path].nbytes for form, _ in trials)
        on_host = all(self._entries[form.path].device.type == "cpu" for form, _ in trials)
        if not on_host or size < _THREADED_BYTES:
            return [self._strays(form, pad).view(1) for form, pad in trials]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            counts = threads.map(self._strays, [form for form, _ in trials], [pad for _, pad in trials])
            return [count.view(1) for count in counts]

    def _strays(self, form: FieldForm, pad: PadValue) -> Tensor:
        x, layout = self._padded(form)
        return checks.strays(x, self._values[form.path], layout, self._pad(form, pad))

    def _pad(self, form: FieldForm, pad: PadValue) -> PadValue | Tensor:
        if pad is not PER_ROW and pad is not SIGNED_ZERO:
            return pad
        if (form.path, pad) not in self._row_pads:
            pads = checks.row_pads(*self._padded(form))
            self._row_pads[form.path, pad] = checks.zeros_of(pads) if pad is SIGNED_ZERO else pads
        return self._row_pads[form.path, pad]

    def _padded(self, form: FieldForm) -> tuple[Tensor, RowLayout]:
        x = self._entries[form.path].movedim(form.ragged_dim, 1)
        return x, self._layouts[form.layout or ""].to(x.device)

    def _message(self, form: FieldForm) -> str:
        x, layout = self._padded(form)
        pad = SIGNED_ZERO if SIGNED_ZERO in form.pads else form.pads[0]
        place, seen = checks.first_stray(x, layout, self._pad(form, pad))
        mixed = pad is SIGNED_ZERO and seen in ("0.0", "-0.0")
        pads = " or ".join(map(repr, form.pads))
        return (
            f'{self._options.call}: field "{show(form.path)}" holds {seen} at {place} (row, position, ...), where mask '
            f'"{form.layout}" is empty; expected its pad {pads}. {_MIXED_ZEROS if mixed else ""}Fix the producer, '
            "check pad_token_id, give the field its true pad or mask in the registry, or let it travel whole: without "
            "strict, or named in ignore_dense_fields."
        )
