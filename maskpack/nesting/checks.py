"""Checks that the masked-out elements of a padded field equal its pad.

On the host the compiled core compares them while it gathers the values. On a device one read of the field is enough,
without its mask: the number of elements whose bits differ from the pad must be the same in the padded field and in its
packed values. For EDGE, elements that differ from their neighbours are counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, words
from maskpack.core.index import IntArray, cumulated
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
        out = with_signs(out, row_pads.signs)
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
    """`to_padded` of several fields. Those on a GPU are written by one launch for each layout."""
    out: dict[int, Tensor] = {}
    together: dict[tuple[int, torch.device], list[int]] = {}
    for place, (values, _, layout, row_pads) in enumerate(fields):
        differentiable = values.requires_grad and torch.is_grad_enabled()
        plain = row_pads is None or (row_pads.edge is None and row_pads.signs is None)
        if differentiable or not uses_triton(values.device) or not plain:
            out[place] = to_padded(*fields[place])
        else:
            together.setdefault((id(layout), values.device), []).append(place)
    for (_, device), places in together.items():
        some = [fields[place] for place in places]
        pads = [
            cast_pad(form, values.dtype) if row_pads is None else row_pads.pads.to(values)
            for values, form, _, row_pads in some
        ]
        padded = unpack([values for values, *_ in some], some[0].layout.to(device), pads)
        out.update(zip(places, map(_with_dim, padded, [form.ragged_dim for _, form, *_ in some]), strict=True))
    return [out[place] for place in range(len(fields))]


def _with_dim(out: Tensor, ragged_dim: int) -> Tensor:
    return out if ragged_dim == 1 else out.movedim(1, ragged_dim).contiguous()


def read(x: Tensor, layout: RowLayout, pad: PadValue, values: Tensor | None = None) -> tuple[bool, Tensor | None]:
    """Whether all masked-out elements of a field on the host are its pad, and the pads [B] of PER_ROW and SIGNED_ZERO,
    or the signs of ANY_ZERO.

    `x` is [B, S, *F] with any strides; its values are gathered into `values`, contiguous [T, *F], if given. They are
    not complete if the result is False.
    """
    if pad is not PER_ROW and pad is not SIGNED_ZERO and pad is not ANY_ZERO:
        return native.read(x, core_layout(layout), pack_torch.host_pads(pad, x.dtype), values), None
    if pad is ANY_ZERO:
        signs = torch.zeros((layout.num_rows, -(-layout.width // 8)), dtype=torch.uint8, device="cpu")
        return native.read(x, core_layout(layout), native.Pads(native.BY_SIGNS, (0,), signs), values), signs
    pads = torch.zeros(layout.num_rows, dtype=x.dtype, device="cpu")
    signed = x.dtype.is_floating_point and x.dtype.itemsize > 1
    mode = native.BY_ROW if pad is PER_ROW else native.BY_SIGN if signed else native.CONSTANT
    return native.read(x, core_layout(layout), native.Pads(mode, (0,), pads), values), pads


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


def _count_not_pad(x: Tensor, pad: PadValue) -> Tensor:
    """The number, int64 (), of elements of `x` [B, S, *F] that differ from a constant pad; for EDGE, from the element
    before them in the row."""
    padded = words(x)
    order = sorted(range(padded.dim()), key=lambda dim: -padded.stride(dim))  # as it lies in memory
    lying, along = padded.permute(order), order.index(1)
    if pad is EDGE:
        steps = max(lying.shape[along] - 1, 0)
        first = min(1, lying.shape[along])
        return _differing(lying.narrow(along, first, steps), lying.narrow(along, 0, steps))
    word = _word(pad, x)
    return _differing(padded if isinstance(word, Tensor) else lying, word)  # a word of two lies along the last dim


def count_non_pads(x: Tensor, values: Tensor, layout: RowLayout, pad: PadValue | Tensor) -> Tensor:
    """The number of non-pad values under the mask, int64 (), of a field on a device.

    `x` is [B, S, *F] with any strides, `values` are its packed values [T, *F], `pad` is a constant, EDGE, ANY_ZERO or
    a tensor [B] with the pad of each row. No synchronisation for a constant pad.
    """
    if pad is ANY_ZERO:  # values that are no zeros
        return torch.count_nonzero(x) - torch.count_nonzero(values)
    padded, real = words(x), words(values)
    if isinstance(pad, Tensor):
        return _count_row_non_pads(padded, real, words(pad), layout)
    seen = _count_not_pad(x, pad)
    return seen - (_edge_steps(padded, real, layout) if pad is EDGE else _differing(real, _word(pad, x)))


def _word(pad: PadValue, x: Tensor) -> Tensor | int:
    held = None if isinstance(pad, Pad) else pad_tensor(pad, x.dtype)
    assert held is not None
    word = words(held)
    return int(word.item()) if word.dim() == 0 else word.to(x.device, non_blocking=True)


def row_pads(x: Tensor, layout: RowLayout) -> Tensor:
    """The pad of each row, [B], if the row has one pad: its first element under the mask, or 0 for a full row."""
    table, width = host_spans(layout), layout.width
    place = np.zeros(layout.num_rows, np.int64)
    real = np.flatnonzero(np.diff(table.splits) > 0)
    first = table.splits[real]
    place[real] = np.where(table.starts[first] > 0, 0, table.counts[first])
    open_rows = np.flatnonzero(place < width)
    pads = torch.zeros(layout.num_rows, dtype=x.dtype, device=x.device)
    rows, places = _to(open_rows, x.device), _to(place[open_rows], x.device)
    source = words(x)
    target = words(pads)
    if x[0:1].numel():
        first_of = source[(slice(None), slice(None), *[0] * (x.dim() - 2))]
        target[rows] = first_of[rows, places]
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
    expected = words(pack_torch.unpack(pack_torch.pack(x.detach(), layout), layout, pad))
    where: list[int] = [int(i) for i in torch.nonzero(expected != words(x))[0][: x.dim()]]
    return tuple(where), str(x[tuple(where)].item() if x.dtype.itemsize > 1 or not x.is_floating_point() else "?")


def _count_row_non_pads(x: Tensor, values: Tensor, pads: Tensor, layout: RowLayout) -> Tensor:
    more = [1] * (values.dim() - pads.dim())
    pads = pads.view(pads.shape[0], *more, *pads.shape[1:])
    of_values = pads.repeat_interleave(layout.offsets.diff(), 0, output_size=values.shape[0])
    return _differing(x, pads.unsqueeze(1)) - _differing(values, of_values)


def _edge_steps(x: Tensor, values: Tensor, layout: RowLayout) -> Tensor:
    """The number of changes between neighbours in a field with exact EDGE pads.

    Between two valid elements the field changes once if they differ, else never, and nowhere else. This determines all
    pads of a row with one span. Between two spans the change must be at the start of the second, so the element before
    it equals the last one of the first span; an empty row is 0. Violations of these two rules are subtracted: a field
    never changes less often than its values do, so the counts then differ.
    """
    inner = torch.ones(values.shape[0] + 1, dtype=torch.bool, device=x.device)
    inner.index_fill_(0, layout.offsets, False)  # the first element of a row has no neighbour before it
    steps = torch.ne(values[1:], values[:-1])
    steps &= inner[1:-1].view(-1, *[1] * (values.dim() - 1))
    count = torch.count_nonzero(steps)
    table = host_spans(layout)
    empty = _to(np.flatnonzero(np.diff(table.splits) == 0), x.device)
    count = count - torch.count_nonzero(x[empty])
    rows, before, last = (_to(index, x.device) for index in _gaps(layout))
    return count - torch.count_nonzero(torch.ne(x[rows, before], x[rows, last]))


def _gaps(layout: RowLayout) -> tuple[IntArray, IntArray, IntArray]:
    """The gaps between two spans of a row: the row, the last position of the gap, and the last position before it."""
    table = host_spans(layout)
    first = np.zeros(table.starts.size + 1, np.bool_)
    first[table.splits] = True
    later = np.flatnonzero(~first[:-1])
    rows = np.searchsorted(table.splits, later, side="right") - 1
    return rows, table.starts[later] - 1, (table.starts + table.counts)[later - 1] - 1


def _to(index: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device, non_blocking=True)


def _differing(x: Tensor, other: Tensor | int) -> Tensor:
    """The number of elements of `x` [n, ...] that differ from `other`, which is a scalar or has n entries."""
    return torch.count_nonzero(torch.ne(x, other))
