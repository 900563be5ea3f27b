"""Checks that the masked-out elements of a padded field equal its pad.

On the host the compiled core compares them while it gathers the values. On a device one read of the field is enough,
without its mask: the number of elements whose bits differ from the pad must be the same in the padded field and in its
packed values. For EDGE, elements that differ from their neighbours are counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, words
from maskpack.core.index import cumulated
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, SIGNED_ZERO, Pad, PadValue, pad_tensor, pad_words
from maskpack.errors import RegistryError
from maskpack.layout.row_layout import RowLayout, core_layout, host_spans
from maskpack.nesting.schema import FieldForm, RowPads
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


def cast_pad(form: FieldForm, dtype: torch.dtype) -> PadValue:
    """The pad of a field, cast to `dtype` like its values."""
    pad = form.pads[0]
    if isinstance(pad, Pad) or form.dtype is None or dtype == form.dtype:
        return pad
    held = pad_tensor(pad, form.dtype)
    assert held is not None
    return held.to(dtype).item()


def to_padded(values: Tensor, form: FieldForm, layout: RowLayout, row_pads: RowPads | None) -> Tensor:
    """Packed values [T, *F] in the padded form of their field; `row_pads` if its pad is PER_ROW or ANY_ZERO."""
    layout = layout.to(values.device)
    if row_pads is None:
        return pack_torch.unpack(values, layout, cast_pad(form, values.dtype), form.ragged_dim)
    out = pack_torch.unpack(values, layout, row_pads.pads.to(values), form.ragged_dim)
    if row_pads.signs is not None:
        out = with_signs(out, row_pads.signs, layout)
    if row_pads.edge is None:
        return out
    edges = pack_torch.unpack(values, layout, EDGE, form.ragged_dim)
    by_edge = cast("list[bool]", row_pads.edge.tolist())
    return torch.cat([(edges if by_edge[row] else out)[row : row + 1] for row in range(layout.num_rows)])


class PackedField(NamedTuple):
    """The arguments of `to_padded` for one field."""

    values: Tensor
    form: FieldForm
    layout: RowLayout
    row_pads: RowPads | None


def all_to_padded(fields: Sequence[PackedField]) -> list[Tensor]:
    """`to_padded` of several fields. Those on the host are written by one call, those on a GPU by one launch for each
    layout."""
    out: dict[int, Tensor] = {}
    on_host: list[native.NewField] = []
    together: dict[tuple[int, torch.device], list[int]] = {}
    recorded, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    for place, (values, form, layout, row_pads) in enumerate(fields):
        differentiable = recorded and values.requires_grad
        plain = row_pads is None or (row_pads.edge is None and row_pads.signs is None)
        if not differentiable and plain and values.device.type == "cpu" and not compiling:
            if row_pads is None:
                pads = _constant_pads(form, values.dtype)
            else:
                pads = pack_torch.host_pads(row_pads.pads.to(values), values.dtype)
            on_host.append(pack_torch.new_field(values, layout, pads, form.ragged_dim))
            out[place] = on_host[-1].padded
        elif differentiable or not uses_triton(values.device) or not plain:
            out[place] = to_padded(*fields[place])
        else:
            together.setdefault((id(layout), values.device), []).append(place)
    if on_host:
        native.write(on_host)
    for (_, device), places in together.items():
        some = [fields[place] for place in places]
        pads = [
            cast_pad(form, values.dtype) if row_pads is None else row_pads.pads.to(values)
            for values, form, _, row_pads in some
        ]
        padded = unpack([values for values, *_ in some], some[0].layout.to(device), pads)
        for place, field, one in zip(places, some, padded, strict=True):
            dim = field.form.ragged_dim
            out[place] = one if dim == 1 else one.movedim(1, dim).contiguous()
    return [out[place] for place in range(len(fields))]


@lru_cache(1024)
def _constant_pads(form: FieldForm, dtype: torch.dtype) -> native.Pads:
    """The pad of a field, cast to a dtype, for the core."""
    return pack_torch.host_pads(cast_pad(form, dtype), dtype)


def read(
    fields: Sequence[tuple[Tensor, RowLayout, PadValue, Tensor | None]],
) -> tuple[list[bool], list[Tensor | None]]:
    """Whether all masked-out elements of fields on the host are their pads; and the pads [B] of PER_ROW and
    SIGNED_ZERO, or the signs of ANY_ZERO.

    Each field is [B, S, *F] with any strides; its values are gathered into the last tensor, contiguous [T, *F], if
    given. They are not complete if the result is False. One call of the core.
    """
    works = [native.PaddedField(x, core_layout(layout), _pads(x, layout, pad), out) for x, layout, pad, out in fields]
    return native.read(works), [work.pads.of_rows for work in works]


def _pads(x: Tensor, layout: RowLayout, pad: PadValue) -> native.Pads:
    """A pad for the core, with room for those of rows."""
    if pad is not PER_ROW and pad is not SIGNED_ZERO and pad is not ANY_ZERO:
        return pack_torch.host_pads(pad, x.dtype)
    if pad is ANY_ZERO:
        signs = torch.zeros((layout.num_rows, -(-layout.width // 8)), dtype=torch.uint8, device="cpu")
        return native.Pads(abi.BY_SIGNS, (0,), signs)
    pads = torch.zeros(layout.num_rows, dtype=x.dtype, device="cpu")
    signed = x.dtype.is_floating_point and x.dtype.itemsize > 1
    return native.Pads(abi.BY_ROW if pad is PER_ROW else abi.BY_SIGN if signed else abi.CONSTANT, (0,), pads)


def one_rule(
    by_edge: npt.NDArray[np.bool_],
    own: Words,
    edges: Words,
    single: npt.NDArray[np.bool_],
    unpadded: npt.NDArray[np.bool_],
) -> Words | Pad | None:
    """One pad rule for rows of which some are padded with EDGE and the others with a constant each: the constants [B,
    k] if EDGE gives constants, EDGE if it gives the constants of the other rows, else None.

    Args:
        by_edge: [B], whether a row is padded with EDGE.
        own: [B, k], the raw bits of the constants.
        edges, single: of `edge_pads`.
        unpadded: [B], rows without padding.
    """
    constants = np.unique(own[~by_edge & ~unpadded], axis=0)
    among = (edges[:, None] == constants[None]).all(2).any(1)
    if len(constants) and (unpadded | (single & among))[by_edge].all():
        return np.where((by_edge & ~unpadded)[:, None], edges, np.where(by_edge[:, None], constants[:1], own))
    return EDGE if (unpadded | (single & (own == edges).all(1)))[~by_edge].all() else None


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


def edge_pads(values: Words, layout: RowLayout) -> tuple[Words, npt.NDArray[np.bool_]]:
    """The EDGE pads of a field as constants.

    Args:
        values: the raw bits of the field, [T, n, k]: n items of k integers, k is 2 for 16-byte items and 1 for others.

    Returns:
        The raw bits of the pad of each row, [B, k], and bool [B]: whether the row has only this pad.
    """
    table = host_spans(layout)
    begins = cumulated(table.counts)[:-1]
    row_of_span = np.repeat(np.arange(layout.num_rows), np.diff(table.splits))
    first = table.splits[:-1][np.diff(table.splits) > 0]
    first = first[table.starts[first] > 0]
    gaps = table.starts + table.counts < layout.width
    rows = np.concatenate([row_of_span[first], row_of_span[gaps]])
    held = values[np.concatenate([begins[first], (begins + table.counts)[gaps] - 1])]
    pads = np.zeros((layout.num_rows, values.shape[2]), values.dtype)  # of empty rows
    single = np.ones(layout.num_rows, np.bool_)
    if held.size:
        pads[rows] = held[:, 0]
        single[rows[(held != pads[rows][:, None]).any((1, 2))]] = False
    return pads, single


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
