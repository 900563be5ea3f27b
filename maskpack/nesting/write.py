"""The one writer of padded fields: packed values and what is under their mask, joined again.

On the host the compiled core writes, on a device the kernel of `ops.unpack`; torch writes what needs gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import from_words, words
from maskpack.core.pads import EDGE, Pads, pad_tensor, pad_words
from maskpack.layout.row_layout import RowLayout
from maskpack.ops import pack_torch, unpack


class PackedField(NamedTuple):
    """A field to be written: its values [T, *F], what is under its mask, its rows, and the dim of its width."""

    values: Tensor
    pads: Pads
    layout: RowLayout
    ragged_dim: int


def write(fields: Sequence[PackedField]) -> list[Tensor]:
    """Fields in their padded form [B, S, *F], with their pads in the dtype of the values. Those on the host are written
    by one call, those on a GPU by one launch for each layout. Gradients flow to values that require them."""
    out: dict[int, Tensor] = {}
    on_host: list[native.NewField] = []
    together: dict[tuple[int, torch.device], list[int]] = {}
    traced = torch.compiler.is_compiling()
    for place, (values, pads, layout, ragged_dim) in enumerate(fields):
        differentiable = torch.is_grad_enabled() and values.requires_grad
        plain = pads.signs is None or not values.is_complex()
        if not differentiable and plain and values.device.type == "cpu" and not traced:
            on_host.append(pack_torch.new_field(values, layout, pads, ragged_dim))
            out[place] = on_host[-1].padded
        elif not differentiable and pads.is_plain and uses_triton(values.device):
            together.setdefault((id(layout), values.device), []).append(place)
        else:
            out[place] = _by_torch(*fields[place])
    if on_host:
        native.write(on_host)
    for (_, device), places in together.items():
        some = [fields[place] for place in places]
        padded = unpack([one.values for one in some], some[0].layout.to(device), [_pad_value(one) for one in some])
        for place, field, one in zip(places, some, padded, strict=True):
            out[place] = pack_torch.moved(one, field.ragged_dim)
    return [out[place] for place in range(len(fields))]


def _by_torch(values: Tensor, pads: Pads, layout: RowLayout, ragged_dim: int) -> Tensor:
    layout, edges = layout.to(values.device), pads.edges
    if edges.all():
        return pack_torch.unpack(values, layout, EDGE, ragged_dim)
    words = pads.words(values.dtype).to(values.device, non_blocking=True).expand(layout.num_rows)
    out = pack_torch.unpack(values, layout, words, ragged_dim)
    if pads.signs is not None:
        out = with_signs(out, pads, layout)
    if not edges.any():
        return out
    by_edge = pack_torch.unpack(values, layout, EDGE, ragged_dim)
    return torch.cat([(by_edge if edges[row] else out)[row : row + 1] for row in range(layout.num_rows)])


def with_signs(x: Tensor, pads: Pads, layout: RowLayout) -> Tensor:
    """A padded field [B, width], in any dtype that it was cast to, with -0.0 where the signs of its pads say so and the
    layout has no token. What their bits of tokens are depends on who wrote them."""
    minus, signs = pad_tensor(-0.0, x.dtype), pads.signs
    assert minus is not None
    assert signs is not None
    lanes = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    bits = (from_words(signs, torch.uint8).to(x.device, non_blocking=True)[:, :, None] >> lanes) & 1
    masked = bits.flatten(1)[:, : x.shape[1]].bool() & ~layout.to(x.device).to_mask(torch.bool)
    return torch.where(masked, minus.to(x.device, non_blocking=True), x)


def _pad_value(field: PackedField) -> Any:
    """The pad of a field as `ops.unpack` takes it: EDGE, a number, or a tensor [B]."""
    values, pads, layout, _ = field
    if pads.edges[0]:
        return EDGE
    held = pads.words(values.dtype)
    if len(held) == 1 and pad_words(held.item(), values.dtype) == tuple(words(held).view(-1).tolist()):  # type: ignore[reportUnknownMemberType]
        return held.item()
    return held.expand(layout.num_rows).to(values.device, non_blocking=True)
