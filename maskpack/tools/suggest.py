"""The registry that covers the fields of a batch which stay padded.

    field [B, R] --> masks of its size --> values under each mask --> MaskNestingSpec
                     "response" (B, R)     all -100? EDGE? one a row?

    attn  [B, S]  . p p r r .      the mask under which ids and most other fields have one pad: the sequence
    resp  [B, R]        r r .      ids that equal its last R columns: prompt | response
    loss  [B, S]  . . . r . .      else a mask within it, with holes or without: the response

A field is a mask by guess only if it has bools, or integers 0 and 1. A spec is suggested only if every element under
the mask has the bits of its pad, by the checks of nesting.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.difference import difference
from maskpack.core.keys import Key, Path, plain, show
from maskpack.core.pads import holds, said_pads
from maskpack.core.tree import flatten, has, is_object
from maskpack.errors import LayoutError
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry, MaskNestingSpec, Pad, PadValue
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.axes import Axes
from maskpack.nesting.check import Finding, hidden_tensors
from maskpack.nesting.nested import read_nested
from maskpack.nesting.read import fitting_pad
from maskpack.nesting.response import RESPONSE, SEQUENCE
from maskpack.nesting.schema import LAYOUTS

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


class Suggestion(NamedTuple):
    """A registry entry for a field that stays padded.

    Attributes:
        field: the field.
        key: of the entry; for a tensor inside a Python object, the object.
        spec: MaskNestingSpec(None) where no mask fits, or no pad covers the values under it.
        seen: a clause about the values under the mask.
    """

    field: Finding
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


class _Fit(NamedTuple):
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

    Masks are those of the registry, and fields that `is_mask` says are masks if another field has one pad under them.
    """

    def __init__(self, batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> None:
        carried: Mapping[str, RowLayout] = read_nested(batch, _CALL).layouts if has(batch, LAYOUTS) else {}
        self.registry = registry
        self._axes = Axes(batch, registry, carried, {}, _CALL)
        self._entries = dict(flatten(batch, without=LAYOUTS))
        self.tensors = {path: value for path, value in self._entries.items() if isinstance(value, Tensor)}
        known = [*registry.axes, *(mask for spec in registry.values() for mask in spec.masks)]
        self._masks: dict[Key, bool] = dict.fromkeys(known, True)
        """Every mask to try, and whether the registry knows it."""
        unknown = [path for path in self.tensors if registry.find(path) is None]
        guesses = {plain(path) for path in unknown if is_mask(self.tensors[path])}
        self._masks = {**dict.fromkeys(guesses, False), **self._masks}
        self.pad_token_id = self._token(unknown) if pad_token_id is None else pad_token_id
        fits = (fit for path in unknown if plain(path) not in guesses for fit in self._fits(path))
        served = {fit.mask for fit in fits if fit.pad not in (None, Pad.PER_ROW)}
        self._masks = {mask: known for mask, known in self._masks.items() if known or mask in served}

    def gives(self, *axes: str) -> bool:
        """Whether the registry computes all these axes from the batch, or finds an error in it."""
        try:
            return all(self._axes.find(axis, (axis,)) is not None for axis in axes)
        except LayoutError:
            return True

    def hidden(self) -> Iterator[Finding]:
        """The tensors inside Python objects that the registry does not declare without a mask."""
        for path, value in self._entries.items():
            spec = self.registry.find(path)
            if is_object(value) and (spec is None or spec.mask is not None):
                yield from hidden_tensors(path, value)

    def suggest(self, field: Finding) -> Suggestion:
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
        where, pad = f'under mask "{show(fit.mask)}"', fit.pad
        if pad is None:
            return Suggestion(field, key, MaskNestingSpec(None), f"{where} it holds {_several(value, fit)}. {_NO_PAD}")
        seen = f"{where} it is padded with {said_pads([pad])}"
        if fit.layout.num_tokens == fit.layout.num_rows * fit.layout.width:
            seen = f"{where} nothing is padded in this batch, so its pad is not seen; 0 is assumed"
        elif pad == self.pad_token_id and pad not in _USUAL and is_integer(value):
            seen, pad = f"{where} it is padded with the pad token, {pad}", Pad.PAD_TOKEN_ID
        return Suggestion(field, key, self._spec(path, value, fit, pad), seen)

    def _rank(self, fit: _Fit, key: Key) -> tuple[Any, ...]:
        """The best fit of a field is the lowest: the mask of most tokens, because later batches fit it, too. The mask
        that an axis is computed from is on that axis, so that packed batches have it."""
        ways = self.registry.axes.get(fit.mask, ()) if isinstance(fit.mask, str) else ()
        off = not any(way.source == key and way.part == "all" for way in ways)
        last = fit.pad is Pad.PER_ROW, fit.mask == COLUMNS
        return fit.pad is None, not self._masks[fit.mask], off, *last, -fit.layout.num_tokens

    def _spec(self, path: Path, value: Tensor, fit: _Fit, pad: PadValue) -> MaskNestingSpec:
        """A new spec; for a known field its own, with the pads in front."""
        known = self.registry.find(path)
        dim = -1 if fit.dim == value.dim() - 1 and fit.dim > 1 else fit.dim
        pads = _pads_like(pad, value)
        if known is None or known.mask is None:
            return MaskNestingSpec(fit.mask, pads if len(pads) > 1 else pads[0], dim)
        own: list[PadValue] = known.pad if isinstance(known.pad, list) else [known.pad]
        pads += [other for other in own if repr(other) not in map(repr, pads)]
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

    def _token(self, unknown: Iterable[Path]) -> int | None:
        """The one value under the masks of most fields that are padded with the pad token, or may be."""
        specs = {path: self.registry.find(path) for path, x in self.tensors.items() if is_integer(x)}
        own = {path: spec.masks for path, spec in specs.items() if spec is not None and Pad.PAD_TOKEN_ID in spec.pads}
        for masks, least in ((own, -math.inf), (dict.fromkeys(unknown, self._masks), 1)):
            tokens: list[int] = []
            for path in masks:
                x = self.tensors[path]
                if is_integer(x) and x.dim() == 2 and not is_mask(x):
                    layouts = (layout for _, layout, _ in self._of_size(path, masks[path], [1]))
                    under = (_constant(x, layout) for layout in layouts)
                    tokens += [one for one in under if one is not None and one >= least][:1]
            if tokens:
                return Counter(tokens).most_common(1)[0][0]
        return None


# -------------------------------------------------------------------- axes


class FoundAxes(NamedTuple):
    """Axes by name, empty if the fields show none; the field of the token ids, and a clause on what shows them."""

    axes: Mapping[str, tuple[MaskAxis, ...]]
    ids: Key | None
    seen: str


def found_axes(tensors: Mapping[Path, Tensor], pad_token_id: int | None) -> FoundAxes:
    """The axes `sequence` and `response`, and `prompt` or `columns` beside them, of a padded batch; none if the fields
    do not show the response, which replay needs."""
    found = {plain(path): x for path, x in tensors.items() if is_padded(x) and x.dim() == 2 and x.numel()}
    masks = {key: x.bool() for key, x in found.items() if is_mask(x)}
    sequences: list[tuple[tuple[int, ...], Key, RowLayout, list[Key]]] = []
    for key, mask in masks.items():
        layout = RowLayout.from_mask(mask)
        same = [other for other, x in found.items() if other != key and x.shape == mask.shape]
        served = [other for other in same if pad_of(found[other], layout, pad_token_id) not in (None, Pad.PER_ROW)]
        ids = [other for other in served if other not in masks and is_integer(found[other])]
        if ids:
            ids.sort(key=lambda other: -int(found[other].max()))
            sequences.append(((layout.width, len(served), layout.num_tokens), key, layout, ids))
    for _, key, layout, ids in sorted(sequences, key=lambda one: one[0], reverse=True):
        axes, seen = _split(found, key, ids[0]) or _within(found, masks, key, layout, ids[0]) or ({}, "")
        if axes:
            return FoundAxes({name: (way,) for name, way in axes.items()}, ids[0], seen)
    return FoundAxes({}, None, "")


_Way = tuple[dict[str, MaskAxis], str]


def _split(found: Mapping[Key, Tensor], source: Key, ids: Key) -> _Way | None:
    """Prompt and response as the columns of a mask, if ids equal the last columns of those of the sequence."""
    whole = found[ids]
    for key, x in found.items():
        at = whole.shape[1] - x.shape[1]
        if at > 0 and x.dtype == whole.dtype and difference(x, whole[:, at:]) is None and not is_mask(x):
            prompt, response = (MaskAxis(source, part=part, tail=(key,)) for part in ("head", "tail"))
            axes = {SEQUENCE: MaskAxis(source), "prompt": prompt, RESPONSE: response}
            return axes, f"{show(ids)}[:, {at}:] equals {show(key)}"
    return None


def _within(
    found: Mapping[Key, Tensor], masks: Mapping[Key, Tensor], source: Key, layout: RowLayout, ids: Key
) -> _Way | None:
    """The response as a mask of tokens in the last columns of the sequence, with a token before it in each row: the one
    under which most fields have one pad. Not one beside ids of its own, as that of completions padded apart."""
    tokens, width, pad = masks[source], layout.width, pad_of(found[ids], layout, None)
    later = tokens & (tokens.cumsum(1, dtype=torch.int32) > 1)
    best: list[tuple[int, int, Key]] = []
    for key, mask in masks.items():
        columns = width - mask.shape[1]
        if key == source or len(mask) != len(tokens) or columns < 0 or bool((mask > later[:, columns:]).any()):
            continue
        own = RowLayout.from_mask(mask)
        pads = {other: pad_of(x, own, None) for other, x in found.items() if x.shape == mask.shape and other != key}
        if not (columns and any(pads[of] == pad and found[of].dtype == found[ids].dtype for of in pads)):
            best.append((sum(of not in (None, Pad.PER_ROW) for of in pads.values()), own.num_tokens, key))
    if not best:
        return None
    key = max(best, key=lambda one: one[:2])[2]
    side: Any = "left" if bool(tokens[:, -1].all()) and not bool(tokens[:, 0].all()) else "right"
    axes = {SEQUENCE: MaskAxis(source, padded=side), RESPONSE: MaskAxis(key, padded=side)}
    if columns := width - masks[key].shape[1]:
        axes[COLUMNS] = MaskAxis(source, part="tail", tail=(key,))
        return axes, f"each token of {show(key)} is one of {show(source)}[:, {columns}:]"
    return axes, f"each token of {show(key)} is a token of {show(source)}"


# -------------------------------------------------------------------- values under a mask


def is_padded(x: Tensor) -> bool:
    """Whether it is a plain tensor of two or more dims."""
    return x.layout == torch.strided and not x.is_nested and x.dim() > 1


def is_integer(x: Tensor) -> bool:
    """Whether its numbers are whole; bools are not."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def is_mask(x: Tensor) -> bool:
    """Whether a field [B, S] has bools, or integers 0 and 1, and not 0 alone."""
    if not (is_padded(x) and x.dim() == 2 and x.numel()) or x.is_floating_point() or x.is_complex():
        return False
    low, high = (int(end) for end in torch.aminmax(x if x.dtype.is_signed or x.dtype.itemsize == 1 else x.long()))
    return low >= 0 and high == 1


def _under(x: Tensor, layout: RowLayout) -> Tensor:
    """The values of a field [B, S, *F] under the mask, [n, *F], in the first row that has some."""
    row = int((layout.lengths < layout.width).argmax())
    return x[row][~layout.take(slice(row, row + 1)).to_mask(torch.bool)[0]]


def _constant(x: Tensor, layout: RowLayout) -> int | None:
    """The one number of a field [B, S] of integers under a mask; None if there are several, or none."""
    values = _under(x, layout)
    return int(values[0]) if len(values) and fitting_pad(x, layout, [int(values[0])]) is not None else None


def pad_of(x: Tensor, layout: RowLayout, pad_token_id: int | None) -> PadValue | None:
    """The plainest pad of a field [B, S, *F] that is exact; 0 where nothing is padded, None for several values."""
    values = _under(x, layout) if x.numel() else x
    if not values.numel():
        return 0
    first: Any = values.flatten()[0].item()
    usual = x.dtype == torch.bool or (first in (*_USUAL, pad_token_id) and str(first) != "-0.0")
    pads: list[Any] = [first] if usual else []
    if first == 0 and x.is_floating_point():
        pads += [Pad.SIGNED_ZERO, *([Pad.ANY_ZERO] if x.dim() == 2 and x.dtype.itemsize > 1 else [])]
    pads += [Pad.EDGE] if is_integer(x) else []
    pads += [float("nan") if first != first else first, Pad.PER_ROW]  # a NaN of other bits can be no constant
    pads = [pad for pad in pads if holds(pad, x.dtype)]
    return fitting_pad(x, layout, pads)


def _pads_like(pad: PadValue, x: Tensor) -> list[PadValue]:
    """The pad of a field in one batch, and those that its producer may leave in others: `x * mask` has zeros of either
    sign, and `masked_whiten(x, mask)` a constant of each batch."""
    if pad in (0, Pad.SIGNED_ZERO, Pad.ANY_ZERO):
        floats = x.is_floating_point() and x.dtype.itemsize > 1
        return [Pad.ZERO] if floats else [0 if pad == 0 and str(pad) != "-0.0" else pad]
    fraction = isinstance(pad, float) and math.isfinite(pad) and not pad.is_integer()
    return [pad, Pad.PER_ROW] if fraction else [pad]


def _several(x: Tensor, fit: _Fit) -> str:
    """Some of the values under a mask."""
    x = x.movedim(fit.dim, 1)
    values = cast("list[Any]", _under(x, fit.layout).flatten()[:1000].tolist())
    seen = [*dict.fromkeys(map(repr, values))]
    return f"{', '.join(seen[:_SHOWN])}{' and more' if len(seen) > _SHOWN else ' and others'}"
