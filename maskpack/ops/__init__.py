"""Operations on packed tokens, for any device, with gradients.

pack, unpack      between padded [B, S, *F] and packed [T, *F], for any dtype
packed_log_probs  the log-prob of each token from packed hidden states, without the logits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.backends import Backend, uses_triton
from maskpack.core.bits import pad_words
from maskpack.core.tensors import need_gradients
from maskpack.errors import LayoutError, RegistryError
from maskpack.fields.registry import EDGE, Pad
from maskpack.layout.row_layout import RowLayout
from maskpack.ops import pack_torch as _torch
from maskpack.ops.log_probs import packed_log_probs

__all__ = ["pack", "packed_log_probs", "unpack"]


@overload
def pack(x: Tensor, layout: RowLayout, *, backend: Backend = "auto") -> Tensor: ...
@overload
def pack(x: Sequence[Tensor], layout: RowLayout, *, backend: Backend = "auto") -> list[Tensor]: ...
def pack(x: Tensor | Sequence[Tensor], layout: RowLayout, *, backend: Backend = "auto") -> Tensor | list[Tensor]:
    """The real elements of `x`, row after row.

    Args:
        x: [B, S, *F], any dtype and strides, on the layout's device; or several, which one kernel packs together.
        layout: the layout of B rows of width S.
        backend: `triton` on GPUs and `torch` elsewhere, if it is not given.

    Returns:
        [T, *F] in the dtype of `x`, or one for each; differentiable, twice. No synchronisation.

    Raises:
        LayoutError: `x` does not begin with the layout's (B, S), or lies on another device.
    """
    _need_layout(layout, "pack")
    fields = _fields(x, "x", "pack")
    for field in fields:
        if field.is_nested:
            raise LayoutError("pack: x is nested; expected a padded tensor. It is packed already: take x.values().")
        if field.shape[:2] != (layout.num_rows, layout.width) or field.device != layout.device:
            raise LayoutError(
                f"pack: x is {tuple(field.shape)} on {field.device}; the layout is ({layout.num_rows}, {layout.width}) "
                f"on {layout.device}. Use the layout of x's own mask, on x's device."
            )
    if uses_triton(layout.device, backend, "pack"):
        from maskpack.ops import pack_autograd as _autograd

        outs = _autograd.pack(fields, layout)
    else:
        for field in fields:
            need_gradients(field, "x", "pack")
        outs = [_torch.pack(field, layout) for field in fields]
    return outs[0] if isinstance(x, Tensor) else outs


@overload
def unpack(values: Tensor, layout: RowLayout, pad_value: Any = 0, *, backend: Backend = "auto") -> Tensor: ...
@overload
def unpack(
    values: Sequence[Tensor], layout: RowLayout, pad_value: Any = 0, *, backend: Backend = "auto"
) -> list[Tensor]: ...
def unpack(
    values: Tensor | Sequence[Tensor], layout: RowLayout, pad_value: Any = 0, *, backend: Backend = "auto"
) -> Tensor | list[Tensor]:
    """The inverse of `pack`: real elements in their places, `pad_value` everywhere else.

    Args:
        values: [T, *F], any dtype, on the layout's device; or several, which one kernel unpacks together.
        layout: a layout of T real positions.
        pad_value: a number that the dtype of `values` can hold, EDGE, or a tensor [B] of one pad a row; for several
            values also a list, one for each.
        backend: as for `pack`.

    Returns:
        [B, S, *F] in the dtype of `values`, or one for each; differentiable, twice. No synchronisation.

    Raises:
        LayoutError: `values` has not T entries, or lies on another device; pads that are not as many as values; a
            tensor of pads that are not as many as rows, or lie on another device.
        RegistryError: a pad that the dtype of `values` cannot hold.
    """
    _need_layout(layout, "unpack")
    fields = _fields(values, "values", "unpack")
    pads: list[Any] = [*pad_value] if isinstance(pad_value, list | tuple) else [pad_value] * len(fields)  # type: ignore[reportUnknownArgumentType]
    if len(pads) != len(fields):
        raise LayoutError(
            f"unpack: {len(pads)} pads for {len(fields)} values; expected one for each. Give one pad, or as many."
        )
    pads = [pad.item() if isinstance(pad, np.generic) else pad for pad in pads]
    for field in fields:
        _check(field, layout)
    words = [_words(pad, field.dtype, layout) for field, pad in zip(fields, pads, strict=True)]
    if uses_triton(layout.device, backend, "unpack"):
        from maskpack.ops import pack_autograd as _autograd

        outs = _autograd.unpack(fields, layout, pads, words)
    else:
        for field in fields:
            need_gradients(field, "values", "unpack")
        outs = [_torch.unpack(field, layout, pad) for field, pad in zip(fields, pads, strict=True)]
    return outs[0] if isinstance(values, Tensor) else outs


def _need_layout(layout: Any, call: str) -> None:
    """Raises LayoutError for what is no RowLayout."""
    if not isinstance(layout, RowLayout):
        remedy = "Write RowLayout.from_mask(mask)." if isinstance(layout, Tensor) else "Make one: RowLayout.from_mask."
        raise LayoutError(f"{call}: layout is {said(layout)}; expected a RowLayout. {remedy}")


def _fields(x: Any, name: str, call: str) -> list[Tensor]:
    """The tensors that are packed or unpacked together."""
    fields: list[Any] = list(cast("Sequence[Any]", x)) if isinstance(x, list | tuple) else [x]
    for field in fields:
        if not isinstance(field, Tensor) or field.layout not in (torch.strided, torch.jagged):
            seen = f"a tensor of the memory layout {field.layout}" if isinstance(field, Tensor) else said(field)
            raise LayoutError(
                f"{call}: {name} is {seen}; expected a strided tensor, or a list of them. Convert it: torch.as_tensor, "
                "or to_dense()."
            )
    return fields


def _check(values: Tensor, layout: RowLayout) -> None:
    if values.is_nested or values.dim() < 1 or values.shape[0] != layout.num_tokens or values.device != layout.device:
        seen = "jagged" if values.is_nested else f"{tuple(values.shape)} on {values.device}"
        raise LayoutError(
            f"unpack: values are {seen}; the layout has {layout.num_tokens} real positions on {layout.device}. "
            "Pass the packed values of this layout, on its device."
        )


def _words(pad: Any, dtype: torch.dtype, layout: RowLayout) -> tuple[int, ...]:
    """Those of a constant; none of another pad."""
    if isinstance(pad, Tensor):
        if pad.shape != (layout.num_rows,) or pad.device != layout.device:
            raise LayoutError(
                f"unpack: pad_value is a tensor {tuple(pad.shape)} on {pad.device}; expected one pad for each row, "
                f"({layout.num_rows},) on {layout.device}. Pass the pads of this layout's rows, on its device."
            )
        return ()
    if pad is EDGE:
        return ()
    if not isinstance(pad, bool | int | float | complex):
        raise RegistryError(
            f"unpack: pad_value is {pad if isinstance(pad, Pad) else said(pad)}; expected a number, EDGE, or a tensor "
            "of one pad a row. Give one of these."
        )
    held = pad_words(pad, dtype)
    if held is None:
        raise RegistryError(
            f"unpack: pad_value is {pad!r}; values are {str(dtype).removeprefix('torch.')}, which cannot hold it. Give "
            "a pad that the dtype can hold."
        )
    return held
