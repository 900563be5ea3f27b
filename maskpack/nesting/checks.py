"""Checks that the masked-out elements of a padded field equal its pad.

On the host the compiled core compares them while it gathers the values. On a device one read of the field is enough,
without its mask: the number of elements whose bits differ from the pad must be the same in the padded field and in its
packed values. For EDGE, elements that differ from their neighbours are counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, from_words, words
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, SIGNED_ZERO, Pad, Pads, PadValue, pad_words, trial_of
from maskpack.errors import RegistryError
from maskpack.layout.row_layout import RowLayout, core_layout
from maskpack.nesting.signs import with_signs
from maskpack.ops import pack_torch, unpack


def held_pads(field: str, pads: Sequence[PadValue], dtype: torch.dtype, call: str) -> tuple[PadValue, ...]:
    """The pads of `pads` that the dtype can hold. Raises RegistryError if there is none."""
    held = tuple(pad for pad in pads if holds(pad, dtype))
    if not held:
        raise RegistryError(
            f'{call}: field "{field}" is {str(dtype).removeprefix("torch.")}; its pad {list(pads)} does not fit that '
            "dtype. Give the field a pad that its dtype can hold."
        )
    return held


def holds(pad: PadValue, dtype: torch.dtype) -> bool:
    """Whether a dtype can hold a pad."""
    return isinstance(pad, Pad) or pad_words(pad, dtype) is not None


def to_padded(values: Tensor, pads: Pads, layout: RowLayout, ragged_dim: int) -> Tensor:
    """Packed values [T, *F] in the padded form of their field, with its pads in their dtype."""
    layout, edges = layout.to(values.device), pads.edges
    if edges.all():
        return pack_torch.unpack(values, layout, EDGE, ragged_dim)
    words = pads.words(values.dtype).to(values.device, non_blocking=True).expand(layout.num_rows)
    out = pack_torch.unpack(values, layout, words, ragged_dim)
    if pads.signs is not None:
        out = with_signs(out, from_words(pads.signs, torch.uint8), layout)
    if not edges.any():
        return out
    by_edge = pack_torch.unpack(values, layout, EDGE, ragged_dim)
    return torch.cat([(by_edge if edges[row] else out)[row : row + 1] for row in range(layout.num_rows)])


class PackedField(NamedTuple):
    """The arguments of `to_padded` for one field."""

    values: Tensor
    pads: Pads
    layout: RowLayout
    ragged_dim: int


def all_to_padded(fields: Sequence[PackedField]) -> list[Tensor]:
    """`to_padded` of several fields. Those on the host are written by one call, those on a GPU by one launch for each
    layout."""
    out: dict[int, Tensor] = {}
    on_host: list[native.NewField] = []
    together: dict[tuple[int, torch.device], list[int]] = {}
    recorded, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    for place, (values, pads, layout, ragged_dim) in enumerate(fields):
        differentiable = recorded and values.requires_grad
        plain = pads.signs is None or not values.is_complex()
        if not differentiable and plain and values.device.type == "cpu" and not compiling:
            on_host.append(pack_torch.new_field(values, layout, pads, ragged_dim))
            out[place] = on_host[-1].padded
        elif differentiable or not uses_triton(values.device) or not pads.is_plain:
            out[place] = to_padded(*fields[place])
        else:
            together.setdefault((id(layout), values.device), []).append(place)
    if on_host:
        native.write(on_host)
    for (_, device), places in together.items():
        some = [fields[place] for place in places]
        layout = some[0].layout.to(device)
        padded = unpack([field.values for field in some], layout, [_pad_value(field) for field in some])
        for place, field, one in zip(places, some, padded, strict=True):
            dim = field.ragged_dim
            out[place] = one if dim == 1 else one.movedim(1, dim).contiguous()
    return [out[place] for place in range(len(fields))]


def _pad_value(field: PackedField) -> Any:
    """The pad of a field as `ops.unpack` takes it: EDGE, a number, or a tensor [B]."""
    if field.pads.edges[0]:
        return EDGE
    held, dtype = field.pads.words(field.values.dtype), field.values.dtype
    number, bits = held[:1].item(), cast("list[int]", words(held[:1]).view(-1).tolist())
    if held.numel() == 1 and pad_words(number, dtype) == tuple(bits):
        return number
    return held.expand(field.layout.num_rows).to(field.values.device, non_blocking=True)


def read(
    fields: Sequence[tuple[Tensor, RowLayout, PadValue, Tensor | None]],
) -> tuple[list[bool], list[Words | None]]:
    """Whether all masked-out elements of fields on the host are their pads; and the records of PER_ROW, SIGNED_ZERO and
    ANY_ZERO, uint8 [B, n].

    Each field is [B, S, *F] with any strides; its values are gathered into the last tensor, contiguous [T, *F], if
    given. They are not complete if the result is False. One call of the core.
    """
    works = [native.PaddedField(x, core_layout(layout), _trial(x, layout, pad), out) for x, layout, pad, out in fields]
    return native.read(works), [work.trial.records for work in works]


def _trial(x: Tensor, layout: RowLayout, pad: PadValue) -> native.Trial:
    """A pad for the core, with room for the records of rows."""
    trial = native.Trial(*trial_of(pad, x.dtype, False))
    if pad is not PER_ROW and pad is not SIGNED_ZERO and pad is not ANY_ZERO:
        return trial
    signs = -(-layout.width // 8) if pad is ANY_ZERO else 0
    return trial._replace(records=np.zeros((layout.num_rows, 1 + x.dtype.itemsize + signs), np.uint8))


def count_non_pads(x: Tensor, values: Tensor, layout: RowLayout, pad: PadValue | Tensor) -> Tensor:
    """The number of non-pad values under the mask, int64 (), of a field on a device.

    `x` is [B, S, *F] with any strides, `values` are its packed values [T, *F], `pad` is a constant, EDGE, ANY_ZERO or
    a tensor [B] with the pad of each row. No synchronisation.
    """
    if pad is ANY_ZERO:  # values that are no zeros
        return torch.count_nonzero(x) - torch.count_nonzero(values)
    return torch.count_nonzero(_differs(x, values, layout, pad))


def _differs(x: Tensor, values: Tensor, layout: RowLayout, pad: PadValue | Tensor) -> Tensor:
    """Where the words of a padded field differ from those that its values and a pad give."""
    return words(x) != words(pack_torch.unpack(values.detach(), layout, pad))


def row_pads(x: Tensor, layout: RowLayout) -> Tensor:
    """The pad of each row, [B], if the row has one pad: its first element under the mask, or 0 for a full row."""
    pads = torch.zeros(layout.num_rows, dtype=x.dtype, device=x.device)
    if x.numel():
        mask = layout.to_mask()
        first = words(x)[torch.arange(layout.num_rows, device=x.device), mask.to(torch.uint8).argmin(1)]
        first = first.reshape(layout.num_rows, -1)[:, : words(pads)[:1].numel()]
        words(pads).view(first.shape).copy_(first.masked_fill(mask.all(1, keepdim=True), 0))
    return pads


def zeros_of(pads: Tensor) -> Tensor:
    """The zeros among `pads` with their signs, 0.0 for all others."""
    if pads.dtype.is_floating_point and pads.dtype.itemsize > 1:
        return torch.where(pads == 0, pads, torch.zeros_like(pads))
    return torch.zeros_like(pads)


def first_non_pad(x: Tensor, layout: RowLayout, pad: PadValue | Tensor) -> tuple[tuple[int, ...], str]:
    """Index and value of one element that is not the pad, for a message."""
    differs = _differs(x, pack_torch.pack(x.detach(), layout), layout, pad)
    where: list[int] = [int(i) for i in torch.nonzero(differs)[0][: x.dim()]]
    return tuple(where), str(x[tuple(where)].item() if x.dtype.itemsize > 1 or not x.is_floating_point() else "?")
