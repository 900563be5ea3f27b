"""The axes of a batch whose names the registry does not know, by what its fields hold bit for bit.

    attn    [B, S]  . p p r r .      a field [B, R] that equals its last R columns, or ids [B, P] and [B, R] that are
    resp    [B, R]        r r .      those of [B, S] side by side: prompt | response
    loss    [B, S]  . . . r . .      else a mask within it, with holes or without: the response

The mask of all tokens is one under which other fields have one pad, ids among them; without such a mask it may be row
lengths, or the rows of a loss mask up to its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from maskpack.core.difference import difference
from maskpack.core.keys import Key, Path, plain, show
from maskpack.core.pads import Pad
from maskpack.fields.registry import MaskAxis
from maskpack.layout.row_layout import RowLayout, prefix_of
from maskpack.nesting.response import RESPONSE, SEQUENCE
from maskpack.tools.suggest import COLUMNS, is_integer, is_mask, is_padded, pad_of

PROMPT = "prompt"


@dataclass(frozen=True)
class FoundAxes:
    """Axes, and what they follow from.

    Attributes:
        axes: by name; empty if the fields show none.
        ids: the field of the token ids.
        concats: of fields that equal two others side by side, these two.
        seen: a clause for each equality.
        apart: the ids and the mask of prompts, and of responses, that are padded apart: no field holds both, so that
            there are no axes.
    """

    axes: Mapping[str, tuple[MaskAxis, ...]]
    ids: Key | None
    concats: Mapping[Key, tuple[Key, Key]]
    seen: tuple[str, ...]
    apart: tuple[tuple[Key, Key], tuple[Key, Key]] | None = None


NONE = FoundAxes({}, None, {}, ())
"""The fields show no axes."""


@dataclass(frozen=True)
class _Sequence:
    """A candidate for the axis of all tokens.

    Attributes:
        served: the fields of its size that have one pad under it.
        ids: those of integers that are no masks.
    """

    way: MaskAxis
    layout: RowLayout
    served: tuple[Key, ...]
    ids: tuple[Key, ...]

    @property
    def mask(self) -> Tensor:
        return self.layout.to_mask(torch.bool)


def found_axes(tensors: Mapping[Path, Tensor], pad_token_id: int | None) -> FoundAxes:
    """The axes `sequence` and `response`, and `prompt` or `columns` beside them, of a padded batch; none if the fields
    do not show the response, which replay needs."""
    return _Fields(tensors, pad_token_id).axes()


class _Fields:
    """The fields [B, width] of a batch."""

    def __init__(self, tensors: Mapping[Path, Tensor], pad_token_id: int | None) -> None:
        self.token = pad_token_id
        self.fields = {plain(path): x for path, x in tensors.items() if is_padded(x) and x.dim() == 2 and x.numel()}
        self.masks = {key: x != 0 for key, x in self.fields.items() if is_mask(x)}
        self.lines = {plain(path): x for path, x in tensors.items() if x.dim() == 1 and is_integer(x)}

    def axes(self) -> FoundAxes:
        for sequence in self._sequences():
            found = self._split(sequence) or self._within(sequence)
            if found is not None:
                return found
        return replace(NONE, apart=self._apart())

    # ---------------------------------------------------------------- sequence

    def _of_masks(self) -> list[tuple[MaskAxis, RowLayout]]:
        return [(MaskAxis(key, padded=_side(mask)), RowLayout.from_mask(mask)) for key, mask in self.masks.items()]

    def _apart(self) -> tuple[tuple[Key, Key], tuple[Key, Key]] | None:
        """The ids and the mask of prompts and of responses; None if there are not two masks with ids of one dtype and
        pad. Prompts are padded on the left, or else come first."""
        of_ids: dict[Key, _Sequence] = {}
        for one in self._ranked(self._of_masks()):
            of_ids.setdefault(one.ids[0], one)
        if len(of_ids) != 2:
            return None
        pads = {
            pad_of(self.fields[ids], one.layout, self.token)
            for ids, one in of_ids.items()
            if one.layout.num_tokens < one.layout.num_rows * one.layout.width
        }
        if len(pads) > 1 or len({(self.fields[ids].dtype, len(self.fields[ids])) for ids in of_ids}) > 1:
            return None
        order = [*self.fields]
        first, second = sorted(of_ids, key=lambda ids: (of_ids[ids].way.padded != "left", order.index(ids)))
        return (first, of_ids[first].way.source), (second, of_ids[second].way.source)

    def _sequences(self) -> list[_Sequence]:
        """The candidates of the first kind that has any, the best first."""
        masks = self._of_masks()
        widths = {x.shape: key for key, x in reversed(self.fields.items()) if key not in self.masks and is_integer(x)}
        lengths = (
            (MaskAxis(key, "lengths", head=(field,)), RowLayout.from_lengths(line, width))
            for key, line in self.lines.items()
            for (rows, width), field in widths.items()
            if rows == line.shape[0] and 0 <= int(line.min()) < int(line.max()) <= width
        )
        prefixes = ((MaskAxis(way.source, part="prefix"), prefix_of(layout)) for way, layout in masks)
        return self._ranked(masks) or self._ranked(lengths) or self._ranked(prefixes)

    def _ranked(self, ways: Iterable[tuple[MaskAxis, RowLayout]]) -> list[_Sequence]:
        out: list[_Sequence] = []
        for way, layout in ways:
            served = tuple(key for key in self.fields if key != way.source and self._is_under(key, layout))
            ids = [key for key in served if key not in self.masks and is_integer(self.fields[key])]
            ids.sort(key=self._distinct, reverse=True)
            if ids:
                out.append(_Sequence(way, layout, served, tuple(ids)))
        return sorted(out, key=lambda one: (one.layout.width, len(one.served), one.layout.num_tokens), reverse=True)

    def _distinct(self, key: Key) -> int:
        return cast("Tensor", self.fields[key].unique()).numel()

    def _is_under(self, key: Key, layout: RowLayout) -> bool:
        """Whether a field of the size of a layout has one pad under it."""
        x = self.fields[key]
        if tuple(x.shape) != (layout.num_rows, layout.width):
            return False
        return pad_of(x, layout, self.token) not in (None, Pad.PER_ROW)

    # ---------------------------------------------------------------- response

    def _split(self, sequence: _Sequence) -> FoundAxes | None:
        """Prompt and response as the columns of a mask, if fields equal them."""
        if sequence.way.form != "mask" or sequence.way.part != "all":
            return None
        source, width = sequence.way.source, sequence.layout.width
        wholes = [source, *(key for key in sequence.ids if self._varies(key))]
        best: tuple[list[tuple[Key, Key]], list[tuple[Key, Key]]] = [], []
        splits = {at for x in self.fields.values() for at in (x.shape[1], width - x.shape[1]) if 0 < at < width}
        for split in sorted(splits):
            heads = list(self._equal(wholes, 0, split))
            tails = list(self._equal(wholes, split, width))
            if len(heads) + len(tails) > len(best[0]) + len(best[1]):
                best = heads, tails
        heads, tails = best
        if not heads and not tails:
            return None
        head, tail = (tuple(dict.fromkeys(part for part, _ in side)) for side in best)
        concats = {whole: (part, other) for part, whole in heads for other, own in tails if own == whole}
        ids = next((key for key in concats if key != source), sequence.ids[0])
        at = width - self.fields[tail[0]].shape[1] if tail else self.fields[head[0]].shape[1]
        seen = [f"{show(whole)}[:, :{at}] equals {show(part)}" for part, whole in heads]
        seen += [f"{show(whole)}[:, {at}:] equals {show(part)}" for part, whole in tails]
        axes = {
            SEQUENCE: MaskAxis(source),
            PROMPT: MaskAxis(source, part="head", head=head, tail=tail),
            RESPONSE: MaskAxis(source, part="tail", head=head, tail=tail),
        }
        return FoundAxes({name: (way,) for name, way in axes.items()}, ids, concats, tuple(seen))

    def _equal(self, wholes: Iterable[Key], low: int, high: int) -> Iterator[tuple[Key, Key]]:
        """The fields that equal some columns of others: (part, whole)."""
        for whole in wholes:
            columns = self.fields[whole][:, low:high]
            for key, x in self.fields.items():
                if x.shape == columns.shape and self._varies(key) and _same(x, columns, whole in self.masks):
                    yield key, whole

    def _varies(self, key: Key) -> bool:
        """Whether a field has several values: a constant one may equal other columns by chance."""
        x = self.fields[key]
        return bool((x != x[0, 0]).any())

    def _within(self, sequence: _Sequence) -> FoundAxes | None:
        """The response as a mask of tokens in the last columns of the sequence, with a token before it in each row."""
        tokens, width = sequence.mask, sequence.layout.width
        later = tokens & (tokens.cumsum(1) > 1)
        found = [
            (sum(self._is_under(other, layout) for other in self.fields), layout.num_tokens, key)
            for key, mask in self.masks.items()
            if key != sequence.way.source or sequence.way.part == "prefix"
            if mask.shape[0] == tokens.shape[0] and mask.shape[1] <= width and self._varies(key)
            if bool((mask <= later[:, width - mask.shape[1] :]).all()) and not self._has_ids(mask, sequence)
            for layout in [RowLayout.from_mask(mask)]
        ]
        if not found:
            return None
        key = max(found, key=lambda one: one[:2])[2]
        mask, source = self.masks[key], sequence.way.source
        axes = {SEQUENCE: sequence.way, RESPONSE: MaskAxis(key, padded=sequence.way.padded)}
        seen = f"each token of {show(key)} is a token of {show(source)}"
        if mask.shape[1] < width:
            seen = f"each token of {show(key)} is one of {show(source)}[:, {width - mask.shape[1]}:]"
            if sequence.way.form == "mask" and sequence.way.part == "all":
                axes[COLUMNS] = MaskAxis(source, part="tail", tail=(key,))
        return FoundAxes({name: (way,) for name, way in axes.items()}, sequence.ids[0], {}, (seen,))

    def _has_ids(self, mask: Tensor, sequence: _Sequence) -> bool:
        """Whether fewer columns have ids of their own, as prompts and completions that are padded apart."""
        if mask.shape[1] == sequence.layout.width:
            return False
        whole, layout = self.fields[sequence.ids[0]], RowLayout.from_mask(mask)
        pad = pad_of(whole, sequence.layout, self.token)
        own = (x for x in self.fields.values() if x.shape == mask.shape and x.dtype == whole.dtype)
        return any(pad_of(x, layout, self.token) == pad and not is_mask(x) for x in own)


def _same(x: Tensor, y: Tensor, as_masks: bool) -> bool:
    if as_masks:
        return torch.equal(x != 0, y != 0) and is_mask(x)
    return x.dtype == y.dtype and difference(x, y) is None


def _side(mask: Tensor) -> Literal["right", "left"]:
    """The side on which rows are padded, as far as it shows."""
    return "left" if bool(mask[:, -1].all()) and not bool(mask[:, 0].all()) else "right"
