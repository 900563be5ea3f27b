"""torch.jagged tensors [B, j, *F]: built with everything set that torch would otherwise guess, and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet  # no public names, nor has the next
from torch.nested._internal.nested_tensor import NestedTensor

from maskpack.errors import LayoutError
from maskpack.layout import RowLayout
from maskpack.rows import IntArray

_KEYS = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)


def jagged(values: Tensor, layout: RowLayout) -> Tensor:
    """Packed values [T, *F] as a jagged tensor on the layout's shared offsets, min and max length set."""
    return jagged_from(values, layout.offsets, layout.min_length, layout.max_length)


def jagged_from(values: Tensor, offsets: Tensor, min_length: int, max_length: int) -> Tensor:
    """Values [T, *F] and offsets int64 [B + 1] as a jagged tensor [B, j, *F]."""
    return jagged_all([values], offsets, min_length, max_length)[0]


def jagged_all(fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int) -> list[Tensor]:
    """As `jagged_from`, of several values."""
    # What torch does inside its own nested operations, at a quarter of the time of its public function.
    bounds = {"min_seqlen": torch.zeros(min_length, 0), "max_seqlen": torch.zeros(max_length, 0)}
    made: list[Tensor] = []
    first: Any = None
    for values in fields:
        if values.requires_grad and torch.is_grad_enabled():
            made.append(
                torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min_length, max_seqlen=max_length)
            )
        elif first is not None and (first._values.shape, first._values.stride()) == (values.shape, values.stride()):
            made.append(_sibling(first, values.detach()))
        else:
            first = NestedTensor(values.detach(), offsets, _metadata_cache=dict(bounds))
            made.append(first)
    return made


def _sibling(field: Any, values: Any) -> Tensor:
    """A jagged tensor on the offsets of another, for values of its shape and strides. It takes the sizes from there,
    which cost two thirds of the time of making one."""
    made: Any = torch.Tensor._make_wrapper_subclass(
        NestedTensor, field._size, field._strides, 0, torch.contiguous_format, values.dtype, torch.jagged,
        values.device, False, False, "sizes", False, True, _KEYS, storage_size=values.untyped_storage().size(),
    )  # fmt: skip
    vars(made).update(vars(field))
    made._values, made._metadata_cache = values, dict(field._metadata_cache)
    vars(values).update(vars(field._values))  # marks for torch.compile
    return made


def offsets_of(field: Any) -> Tensor:
    """int64 [B + 1]: the row bounds of a jagged tensor."""
    return field.offsets()


def is_regular(field: Any) -> bool:
    """Whether a nested tensor is jagged along dim 1 without gaps, so that its values and offsets say all."""
    return field.layout == torch.jagged and field._ragged_idx == 1 and field.lengths() is None


def to_host(tensors: Sequence[Tensor]) -> list[IntArray]:
    """Integer tensors [n] as int64 arrays on the host, with one synchronisation in all."""
    if all(tensor.device.type == "cpu" for tensor in tensors):  # also where there is none
        return [tensor.to(torch.int64).numpy() for tensor in tensors]
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return np.split(torch.cat([tensor.to(torch.int64) for tensor in tensors]).cpu().numpy(), ends[:-1])


def _shares(field: Tensor, layout: RowLayout) -> bool:
    return layout.__dict__.get("offsets") is offsets_of(field)


def host_offsets(field: Tensor, *layouts: RowLayout | None) -> IntArray:
    """int64 [B + 1] on the host: the row bounds of a field. No synchronisation if it is on a layout's own offsets."""
    for layout in layouts:
        if layout is not None and _shares(field, layout):
            return layout.row_offsets
    return to_host([offsets_of(field)])[0]


def check_lengths(fields: Mapping[str, tuple[Tensor, RowLayout]], call: str, remedy: str) -> None:
    """That each jagged field has the row lengths of the layout beside it. A field on the layout's own offsets has
    them. One synchronisation on CUDA, if there is any other."""
    for name, (field, _) in fields.items():
        if not is_regular(field):
            raise LayoutError(
                f'{call}: field "{name}" is nested, but not jagged along dim 1 without gaps; expected that. {remedy}'
            )
    own = {id(offsets_of(field)): offsets_of(field) for field, layout in fields.values() if not _shares(field, layout)}
    read = dict(zip(own, to_host(list(own.values())), strict=True))
    for name, (field, layout) in fields.items():
        offsets = read.get(id(offsets_of(field)), layout.row_offsets)
        if not np.array_equal(offsets, layout.row_offsets):
            seen = np.diff(offsets)
            raise LayoutError(
                f'{call}: field "{name}" has {seen.size} rows of {int(seen.sum())} tokens; its layout has '
                f"{layout.num_rows} rows of {layout.total} tokens, or the rows differ in length. {remedy}"
            )
