"""The specs that cover the fields of a batch which stay padded.

    field [B, R] --> masks of its size --> values under each mask --> MaskNestingSpec
                     "response" (B, R)     all -100? EDGE? one a row?

A spec is suggested only if every element under the mask has the bits of its pad, by the checks of nesting.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.keys import Key, Path, plain, show
from maskpack.core.tree import flatten, has, is_object
from maskpack.errors import LayoutError
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry, MaskNestingSpec, Pad, PadValue
from maskpack.fields.rl_fields import ZEROS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks
from maskpack.nesting.axes import Axes
from maskpack.nesting.coverage import DenseField, hidden_tensors
from maskpack.nesting.schema import LAYOUTS, read_layouts

_CALL = "maskpack doctor"
_USUAL = (0, -1, -100)
"""Pads that a few elements prove; another constant may be EDGE."""
_SHOWN = 3
COLUMNS = "columns"
"""The axis of all tokens in the columns of a response that has fewer of them; fields on the response fit it, too."""
_NO_PAD = (
    "No pad covers that: x.masked_fill(mask == 0, 0) in the producer, if these mean nothing; another mask, if they do; "
    "or declare it without a mask"
)
_PAD_WORDS: dict[PadValue, str] = {
    Pad.EDGE: "the nearest valid value (EDGE)",
    Pad.SIGNED_ZERO: "0.0 in some rows and -0.0 in others (SIGNED_ZERO)",
    Pad.ANY_ZERO: "0.0 and -0.0 in one row, as x * mask leaves them (ANY_ZERO)",
    Pad.PER_ROW: "one value a row (PER_ROW)",
}


@dataclass(frozen=True)
class Suggestion:
    """A registry entry for a field that stays padded.

    Attributes:
        field: the field.
        key: of the entry; for a tensor inside a Python object, the object.
        spec: MaskNestingSpec(None) where no mask fits, or no pad covers the values under it.
        seen: a clause about the values under the mask.
    """

    field: DenseField
    key: Key
    spec: MaskNestingSpec
    seen: str

    @property
    def line(self) -> str:
        """The entry in Python."""
        return line_of(self.key, self.spec)


def line_of(name: Key, value: MaskNestingSpec | MaskAxis) -> str:
    """An entry of a registry, a field or an axis, in Python."""
    first, *options = (option for option in fields(value) if option.init)
    if getattr(value, first.name) is None:
        return f"{name!r}: MaskNestingSpec(None),  # stays padded"
    line = f"{name!r}: {type(value).__name__}({getattr(value, first.name)!r}"
    for option in options:
        text = repr(getattr(value, option.name))
        text = re.sub(r"-?\b(nan|inf)\b", r'float("\g<0>")', text) if option.name == "pad" else text
        line += "" if text == repr(option.default) else f", {option.name}={text}"
    return f"{line}),"


@dataclass(frozen=True)
class _Fit:
    """A mask of the size of a field, the dim of its width, and the pad under it; None for several values."""

    mask: Key
    layout: RowLayout
    dim: int
    pad: PadValue | None


class Suggester:
    """Suggests specs for the fields of one batch.

    Args:
        batch: padded or nested.
        registry: the specs and axes that are known.
        pad_token_id: the tokenizer's; by default the value under the masks of most token fields. If the registry
            knows none, they are the fields [B, S] of integers that have one number above 0 under a mask.

    Masks are those of the registry, and fields that hold 0 and 1 alone if another field has one pad under them.
    """

    def __init__(self, batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> None:
        carried: Mapping[str, RowLayout] = read_layouts(batch, _CALL)[1] if has(batch, LAYOUTS) else {}
        self.registry = registry
        self._axes = Axes(batch, registry, carried, {}, _CALL)
        self._entries = dict(flatten(batch, without=LAYOUTS))
        tensors = {path: value for path, value in self._entries.items() if isinstance(value, Tensor)}
        self.tensors: dict[Path, Tensor] = tensors
        self.pad_token_id = self._token() if pad_token_id is None else pad_token_id
        known = [*registry.axes, *(mask for spec in registry.values() for mask in spec.masks)]
        unknown = [path for path in self.tensors if registry.find(path) is None]
        mask_fields = [plain(path) for path in unknown if is_mask(self.tensors[path])]
        self._masks: dict[Key, bool] = {**dict.fromkeys(mask_fields, False), **dict.fromkeys(known, True)}
        """Every mask to try, and whether the registry knows it."""
        self._served: Counter[Key] = Counter()
        """Of each mask, the fields that the registry does not know and that have one pad under it."""
        for path in unknown:
            if plain(path) not in mask_fields:
                self._served.update({fit.mask for fit in self._fits(path) if fit.pad not in (None, Pad.PER_ROW)})
        self._masks = {mask: known for mask, known in self._masks.items() if known or self._served[mask]}
        if self.pad_token_id is None:
            self.pad_token_id = self._unknown_token(unknown)

    @property
    def knows_none(self) -> bool:
        """Whether the registry knows no tensor of two or more dims and no Python object, and there is such a tensor."""
        wide = {path for path, x in self._entries.items() if not isinstance(x, Tensor) or x.dim() > 1}
        return bool(wide & {*self.tensors}) and all(self.registry.find(path) is None for path in wide)

    def gives(self, *axes: str) -> bool:
        """Whether the registry computes all these axes from the batch, or finds an error in it."""
        try:
            return all(self._axes.find(axis, (axis,)) is not None for axis in axes)
        except LayoutError:
            return True

    def hidden(self) -> Iterator[DenseField]:
        """The tensors inside Python objects that the registry does not declare without a mask."""
        for path, value in self._entries.items():
            spec = self.registry.find(path)
            if is_object(value) and (spec is None or spec.mask is not None):
                yield from hidden_tensors(path, value)

    def suggest(self, field: DenseField) -> Suggestion:
        """The registry entry for a field that stays padded."""
        path = field.path
        key = plain(next(path[:end] for end in range(len(path), 0, -1) if path[:end] in self._entries))
        value = self.tensors.get(path)
        if value is None:
            seen = "no mask reaches into a Python object: make it a field of the batch, or declare it without a mask"
            return Suggestion(field, key, MaskNestingSpec(None), seen)
        fit = min(self._fits(path), key=lambda fit: self._rank(fit, plain(path)), default=None)
        if fit is None:
            axes = [str(axis) for mask in self._masks if (axis := self._axes.find(mask, ("",))) is not None]
            seen = f"no mask of the batch has its size; {'; '.join(axes) or 'there is no mask'}"
            return Suggestion(field, key, MaskNestingSpec(None), seen)
        masked = fit.layout.num_rows * fit.layout.width - fit.layout.num_tokens
        where, pad = f'under mask "{show(fit.mask)}"', fit.pad
        if pad is None:
            several = f"{where}, {masked:,} positions hold {_several(value, fit)}"
            return Suggestion(field, key, MaskNestingSpec(None), several)
        seen = f"{where} it is padded with {_PAD_WORDS.get(pad, repr(pad))}"
        if not masked:
            seen = f"{where} nothing is padded in this batch, so its pad is not seen; 0 is assumed"
        elif pad == self.pad_token_id and pad not in _USUAL and is_integer(value):
            seen, pad = f"{where} it is padded with the pad token, {pad}", Pad.PAD_TOKEN_ID
        return Suggestion(field, key, self._spec(path, value, fit, pad), seen)

    def _rank(self, fit: _Fit, key: Key) -> tuple[Any, ...]:
        """The best fit of a field is the lowest. The mask that an axis is computed from is on that axis, so that packed
        batches have it."""
        ways = self.registry.axes.get(fit.mask, ()) if isinstance(fit.mask, str) else ()
        off = not any(way.source == key and way.part == "all" for way in ways)
        last = fit.pad is Pad.PER_ROW, fit.mask == COLUMNS
        return fit.pad is None, not self._masks[fit.mask], off, *last, -self._served[fit.mask], fit.layout.num_tokens

    def _spec(self, path: Path, value: Tensor, fit: _Fit, pad: PadValue) -> MaskNestingSpec:
        """A new spec; for a known field its own, with the pads in front."""
        known = self.registry.find(path)
        dim = -1 if fit.dim == value.dim() - 1 and fit.dim > 1 else fit.dim
        pads = _pads_like(pad, value)
        if known is None or known.mask is None:
            return MaskNestingSpec(fit.mask, pads if len(pads) > 1 else pads[0], dim)
        pads += [other for other in known.pads if repr(other) not in map(repr, pads)]
        mask = [fit.mask, *(m for m in known.masks if m != fit.mask)] if fit.mask in known.masks[1:] else known.mask
        mask = mask if fit.mask in known.masks else fit.mask
        dim = known.ragged_dim if known.dim_of(value) == fit.dim else dim
        return replace(known, mask=mask, pad=pads if len(pads) > 1 else pads[0], ragged_dim=dim)

    def _fits(self, path: Path) -> Iterator[_Fit]:
        value = self.tensors[path]
        for mask, layout, dim in self._of_size(path, self._masks, range(1, value.dim())):
            yield _Fit(mask, layout, dim, pad_of(value.movedim(dim, 1), layout, self.pad_token_id))

    def _of_size(self, path: Path, masks: Iterable[Key], dims: Iterable[int]) -> Iterator[tuple[Key, RowLayout, int]]:
        """The masks of the size of a field, and the dims that their width may run along."""
        value = self.tensors[path]
        for mask in masks if is_padded(value) else ():
            axis = self._axes.find(mask, path)
            if axis is not None and axis.tokens is None and value.shape[0] == axis.rows:
                for dim in dims:
                    if 1 <= dim < value.dim() and value.shape[dim] == axis.width:
                        yield mask, axis.layout.to(value.device), dim

    def _token(self) -> int | None:
        """The one value under the masks of fields that are padded with the pad token; the most frequent."""
        tokens: list[int] = []
        for path, value in self.tensors.items():
            spec = self.registry.find(path)
            if spec is not None and Pad.PAD_TOKEN_ID in spec.pads and is_integer(value):
                for _, layout, dim in list(self._of_size(path, spec.masks, [spec.dim_of(value)]))[:1]:
                    tokens += _one_under(value, layout, dim)
        return max(tokens, key=tokens.count, default=None)

    def _unknown_token(self, unknown: Iterable[Path]) -> int | None:
        """The same of fields that the registry does not know: the most frequent number above 0."""
        tokens: list[int] = []
        for path in unknown:
            value = self.tensors[path]
            if is_integer(value) and value.dim() == 2 and not is_mask(value):
                under = (_one_under(value, layout, dim) for _, layout, dim in self._of_size(path, self._masks, [1]))
                tokens += [one[0] for one in under if one and one[0] > 0][:1]
        return max(tokens, key=tokens.count, default=None)


# -------------------------------------------------------------------- values under a mask


def is_padded(x: Tensor) -> bool:
    """Whether it is a plain tensor of two or more dims."""
    return x.layout == torch.strided and not x.is_nested and x.dim() > 1


def is_mask(x: Tensor) -> bool:
    """Whether a field [B, S] holds 0 and 1 alone, and not 0 alone."""
    return is_padded(x) and x.dim() == 2 and bool(((x == 0) | (x == 1)).all() and x.any())


def is_integer(x: Tensor) -> bool:
    """Whether its numbers are whole; bools are not."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _under(x: Tensor, layout: RowLayout, dim: int) -> Tensor:
    """The values [N] of a field under a mask."""
    return x.movedim(dim, 1)[~layout.to_mask(torch.bool)].reshape(-1)


def _one_under(x: Tensor, layout: RowLayout, dim: int) -> list[int]:
    """The one value of a field of integers under a mask; empty if there are several, or none."""
    values = cast("Tensor", _under(x, layout, dim).unique())
    return [int(values)] if values.numel() == 1 else []


def pad_of(x: Tensor, layout: RowLayout, pad_token_id: int | None) -> PadValue | None:
    """The plainest pad of a field [B, S, *F] that is exact; 0 where nothing is padded, None for several values."""
    padded = np.flatnonzero(layout.lengths < layout.width)
    if not len(padded) or not x.numel():
        return 0
    rows = checks.row_pads(x, layout)
    first: Any = rows[int(padded[0])].item()
    usual = x.dtype == torch.bool or (first in (*_USUAL, pad_token_id) and str(first) != "-0.0")
    pads: list[Any] = [first] if usual else []
    if first == 0 and x.is_floating_point():
        pads += [Pad.SIGNED_ZERO, *([Pad.ANY_ZERO] if x.dim() == 2 and x.dtype.itemsize > 1 else [])]
    pads += [Pad.EDGE] if is_integer(x) else []
    pads += [float("nan") if first != first else first, Pad.PER_ROW]  # a NaN of other bits can be no constant
    pads = [pad for pad in pads if checks.holds(pad, x.dtype)]
    fitting, _ = checks.read([(x, layout, pad, None) for pad in pads])
    return next((pad for pad, fits in zip(pads, fitting, strict=True) if fits), None)


def _pads_like(pad: PadValue, x: Tensor) -> list[PadValue]:
    """The pad of a field in one batch, and those that its producer may leave in others: `x * mask` has zeros of either
    sign, and `masked_whiten(x, mask)` a constant of each batch."""
    if pad in (0, Pad.SIGNED_ZERO, Pad.ANY_ZERO):
        floats = x.is_floating_point() and x.dtype.itemsize > 1 and not is_mask(x)
        return [*ZEROS] if floats else [0 if pad == 0 and str(pad) != "-0.0" else pad]
    fraction = isinstance(pad, float) and math.isfinite(pad) and not pad.is_integer()
    return [pad, Pad.PER_ROW] if fraction else [pad]


def _several(x: Tensor, fit: _Fit) -> str:
    """The values under a mask, the most frequent first."""
    values = _under(x, fit.layout, fit.dim)
    if values.is_complex():
        return f"several values. {_NO_PAD}"
    if values.is_floating_point() and bool((values == 0).all()):
        return f"0.0 and -0.0 in one row, as x * mask leaves them. {_NO_PAD}"
    values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    kinds, counts = cast("tuple[Tensor, Tensor]", values.unique(return_counts=True))
    order = cast("list[int]", counts.argsort(descending=True)[:_SHOWN].tolist())
    shown = ", ".join(f"{kinds[place].item()!r} ({int(counts[place]):,} times)" for place in order)
    more = f" and {kinds.numel() - _SHOWN:,} more values" if kinds.numel() > _SHOWN else ""
    return f"{shown}{more}. {_NO_PAD}"
