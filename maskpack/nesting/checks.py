"""A field and its pads: which its dtype holds, whether its masked-out elements equal one, and both joined again.

On the host the compiled core compares elements while it gathers the values, on a device the kernel of read_triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import from_words, words
from maskpack.core.pads import (
    EDGE,
    Pad,
    Pads,
    PadValue,
    pad_tensor,
    pad_words,
)
from maskpack.errors import RegistryError
from maskpack.layout.row_layout import RowLayout
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


def with_signs(x: Tensor, signs: Tensor, layout: RowLayout) -> Tensor:
    """A padded field [B, width] with -0.0 where a bit is set and the layout has no token, in any dtype that it was cast
    to. What the bits of tokens are depends on who wrote them."""
    minus = pad_tensor(-0.0, x.dtype)
    assert minus is not None
    lanes = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    bits = (signs.to(x.device, non_blocking=True)[:, :, None] >> lanes) & 1
    masked = bits.flatten(1)[:, : x.shape[1]].bool() & ~layout.to(x.device).to_mask(torch.bool)
    return torch.where(masked, minus.to(x.device, non_blocking=True), x)


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
