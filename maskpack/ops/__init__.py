"""pack and unpack: between padded [B, S, *F] and packed [T, *F], for any dtype and device, with gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from maskpack.errors import LayoutError, RegistryError
from maskpack.layout import RowLayout
from maskpack.ops import _torch
from maskpack.registry import Pad
from maskpack.words import pad_tensor


def pack(x: Tensor, layout: RowLayout) -> Tensor:
    """The real elements of `x`, row after row.

    Args:
        x: [B, S, *F], any dtype and strides, on the layout's device.
        layout: the layout of B rows of width S.

    Returns:
        [T, *F] in the dtype of `x`; differentiable.

    Raises:
        LayoutError: `x` does not begin with the layout's (B, S), or lies on another device.
    """
    if tuple(x.shape[:2]) != (layout.num_rows, layout.width) or x.device != layout.device:
        raise LayoutError(
            f"pack: x is {tuple(x.shape)} on {x.device}; the layout is ({layout.num_rows}, {layout.width}) on "
            f"{layout.device}. Use the layout of x's own mask, on x's device."
        )
    return _torch.pack(x, layout)


def unpack(values: Tensor, layout: RowLayout, pad_value: Any = 0) -> Tensor:
    """The inverse of `pack`: real elements in their places, `pad_value` everywhere else.

    Args:
        values: [T, *F], any dtype, on the layout's device.
        layout: a layout of T real positions.
        pad_value: a number that the dtype of `values` can hold, EDGE, or a tensor [B] of one pad a row.

    Returns:
        [B, S, *F] in the dtype of `values`; differentiable.

    Raises:
        LayoutError: `values` has not T entries, or lies on another device.
        RegistryError: a pad that the dtype of `values` cannot hold.
    """
    if values.is_nested or values.dim() < 1 or values.shape[0] != layout.total or values.device != layout.device:
        seen = "jagged" if values.is_nested else f"{tuple(values.shape)} on {values.device}"
        raise LayoutError(
            f"unpack: values are {seen}; the layout has {layout.total} real positions on {layout.device}. "
            "Pass the packed values of this layout, on its device."
        )
    if not isinstance(pad_value, Tensor | Pad) and pad_tensor(pad_value, values.dtype) is None:
        raise RegistryError(
            f"unpack: pad_value is {pad_value!r}; values are {str(values.dtype).removeprefix('torch.')}, which cannot "
            "hold it. Give a pad that the dtype can hold."
        )
    return _torch.unpack(values, layout, pad_value)
