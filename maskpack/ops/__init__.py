"""Differentiable operations on packed tokens, on any device.

pack, unpack      padded [B, S, *F] to packed [T, *F] and back, for any dtype
packed_log_probs  the log-prob of each token from packed hidden states, without storing the logits
TokenStatistics   what packed_log_probs says of the distribution of each token beside its log-prob
Logits            what an output layer does beside its weight: bias, LoRA, scale, soft cap
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.backends import Backend, uses_triton
from maskpack.core.pads import EDGE, Pad, pad_words
from maskpack.core.tensors import need_gradients
from maskpack.errors import LayoutError, RegistryError
from maskpack.layout.row_layout import RowLayout
from maskpack.ops import pack_torch
from maskpack.ops.log_probs import packed_log_probs
from maskpack.ops.logits import Logits

__all__ = ["Logits", "pack", "packed_log_probs", "unpack"]

_NUMBERS = {bool, int, float, complex}
_MEMORY = torch.strided, torch.jagged


@overload
def pack(x: Tensor, layout: RowLayout | Tensor, *, backend: Backend = "auto") -> Tensor: ...
@overload
def pack(x: Sequence[Tensor], layout: RowLayout | Tensor, *, backend: Backend = "auto") -> list[Tensor]: ...
def pack(
    x: Tensor | Sequence[Tensor], layout: RowLayout | Tensor, *, backend: Backend = "auto"
) -> Tensor | list[Tensor]:
    """Gathers the elements of `x` at valid tokens, one row after the other, without padding.

    Args:
        x: [B, S, *F] of any dtype and strides, on the layout's device; or a list of these, packed by one kernel (in
            torch.compile, by one each).
        layout: the layout of B rows of width S; or a mask whose dims, of any number, are the leading ones of `x`, which
            is scanned at each call (`RowLayout.from_mask`).
        backend: "auto" uses Triton on GPUs and torch elsewhere.

    Returns:
        [T, *F] in the dtype of `x`, or a list of these; twice differentiable. No synchronisation but that of a
        mask.

    Raises:
        LayoutError: `x` does not start with the layout's (B, S), or is on another device.
    """
    fields = _fields(x, "x", "pack")
    shape, layout = _layout_of(layout, "pack")
    expected = layout.num_rows, layout.width
    for number, field in enumerate(fields):
        if field.is_nested:
            raise LayoutError("pack: x is nested; expected a padded tensor. Its values are packed: use x.values().")
        begins_alike = field.shape == shape or field.shape[: len(shape)] == shape  # a slice takes as long as a tensor
        if not begins_alike or field.device != layout.device:
            raise LayoutError(
                f"pack: x is {tuple(field.shape)} on {field.device}; the layout is {shape} on {layout.device}. Use the "
                "layout of x's own mask, on x's device."
            )
        if len(shape) != 2:
            fields[number] = field.reshape(*expected, *field.shape[len(shape) :])
    if uses_triton(layout.device, backend, "pack"):
        from maskpack.ops import pack_autograd  # Triton is imported on first use

        outs = pack_autograd.pack(fields, layout)
    else:
        for field in fields:
            need_gradients(field, "x", "pack")
        outs = [pack_torch.pack(field, layout) for field in fields]
    return outs[0] if isinstance(x, Tensor) else outs


@overload
def unpack(values: Tensor, layout: RowLayout | Tensor, pad_value: Any = 0, *, backend: Backend = "auto") -> Tensor: ...
@overload
def unpack(
    values: Sequence[Tensor], layout: RowLayout | Tensor, pad_value: Any = 0, *, backend: Backend = "auto"
) -> list[Tensor]: ...
def unpack(
    values: Tensor | Sequence[Tensor], layout: RowLayout | Tensor, pad_value: Any = 0, *, backend: Backend = "auto"
) -> Tensor | list[Tensor]:
    """Scatters packed values to padded rows: the inverse of `pack`, with `pad_value` at all other positions.

    Args:
        values: [T, *F] of any dtype, on the layout's device; or a list of these, unpacked by one kernel (in
            torch.compile, by one each).
        layout: a layout of T valid tokens, or a mask as for `pack`.
        pad_value: a number that the dtype of `values` can hold, EDGE, or a tensor [B] of that dtype with the pad of
            each row; for a list of values, also a list of pads.
        backend: as for `pack`.

    Returns:
        [B, S, *F], or with the dims of the mask, in the dtype of `values`, or a list of these; twice differentiable. No
        synchronisation.

    Raises:
        LayoutError: `values` does not have T entries or is on another device; the numbers of pads and values differ;
            a tensor of pads does not have B entries or is on another device.
        RegistryError: the dtype of `values` cannot hold the pad, or a tensor of pads has another dtype.
    """
    shape, layout = _layout_of(layout, "unpack")
    fields = _fields(values, "values", "unpack")
    pads: list[Any] = [*pad_value] if isinstance(pad_value, list | tuple) else [pad_value] * len(fields)  # type: ignore[reportUnknownArgumentType]
    if len(pads) != len(fields):
        raise LayoutError(
            f"unpack: {len(pads)} pads for {len(fields)} values; expected one for each. Give one pad, or a list of "
            f"{len(fields)}."
        )
    for field in fields:
        _check(field, layout)
    dtypes = [field.dtype for field in fields]
    if _NUMBERS.issuperset(map(type, pads)) and not torch.compiler.is_compiling():
        words = _words_of(tuple(pads), repr(pads), tuple(dtypes))
    else:
        pads = [pad.item() if isinstance(pad, np.generic) else pad for pad in pads]
        words = [_words(pad, dtype, layout) for pad, dtype in zip(pads, dtypes, strict=True)]
    if uses_triton(layout.device, backend, "unpack"):
        from maskpack.ops import pack_autograd  # Triton is imported on first use

        outs = pack_autograd.unpack(fields, layout, pads, words)
    else:
        for field in fields:
            need_gradients(field, "values", "unpack")
        outs = [pack_torch.unpack(field, layout, pad) for field, pad in zip(fields, pads, strict=True)]
    if len(shape) != 2:
        outs = [out.reshape(*shape, *out.shape[2:]) for out in outs]
    return outs[0] if isinstance(values, Tensor) else outs


def _layout_of(layout: Any, call: str) -> tuple[tuple[int, ...], RowLayout]:
    """The shape of the mask, and its layout, whose rows are those of all leading dims. Raises LayoutError for anything
    but a mask or a layout."""
    if isinstance(layout, RowLayout):
        return (layout.num_rows, layout.width), layout
    if not isinstance(layout, Tensor):
        raise LayoutError(
            f"{call}: layout is {said(layout)}; expected a RowLayout or a mask. Build one: RowLayout.from_mask."
        )
    own = RowLayout.from_mask(layout)
    return tuple(layout.shape), own


def _fields(x: Any, name: str, call: str) -> list[Tensor]:
    """One tensor or a list of tensors, as a list."""
    fields: list[Any] = list(cast("Sequence[Any]", x)) if isinstance(x, list | tuple) else [x]
    for field in fields:
        if not isinstance(field, Tensor) or field.layout not in _MEMORY:
            seen = f"a tensor with memory layout {field.layout}" if isinstance(field, Tensor) else said(field)
            raise LayoutError(
                f"{call}: {name} is {seen}; expected a strided tensor, or a list of them. Convert it: torch.as_tensor, "
                "or to_dense()."
            )
    return fields


def _check(values: Tensor, layout: RowLayout) -> None:
    if values.is_nested or values.dim() < 1 or values.shape[0] != layout.num_tokens or values.device != layout.device:
        seen = "jagged" if values.is_nested else f"{tuple(values.shape)} on {values.device}"
        raise LayoutError(
            f"unpack: values are {seen}; the layout has {layout.num_tokens} valid tokens on {layout.device}. "
            "Pass the packed values of this layout, on its device."
        )


@lru_cache(maxsize=256)
def _words_of(pads: tuple[complex, ...], text: str, dtypes: tuple[torch.dtype, ...]) -> list[tuple[int, ...]]:
    """The raw bits of numbers. The text tells 0.0 from -0.0 and 1 from True, which are equal."""
    return [_words(pad, dtype) for pad, dtype in zip(pads, dtypes, strict=True)]


def _words(pad: Any, dtype: torch.dtype, layout: RowLayout | None = None) -> tuple[int, ...]:
    """The raw bits of a constant pad; empty for EDGE and for a tensor of pads."""
    if isinstance(pad, Tensor):
        assert layout is not None
        if pad.shape != (layout.num_rows,) or pad.device != layout.device:
            raise LayoutError(
                f"unpack: pad_value is a tensor {tuple(pad.shape)} on {pad.device}; expected one pad for each row, "
                f"({layout.num_rows},) on {layout.device}. Pass the pads of this layout's rows, on its device."
            )
        if pad.dtype != dtype:
            raise RegistryError(
                f"unpack: pad_value is a tensor of {pad.dtype}; expected {dtype}, as the values are. Cast it: "
                "pad_value.to(values.dtype)."
            )
        return ()
    if pad is EDGE:
        return ()
    if not isinstance(pad, bool | int | float | complex):
        raise RegistryError(
            f"unpack: pad_value is {pad if isinstance(pad, Pad) else said(pad)}; expected a number, EDGE, or a tensor "
            "of one pad a row. Give one of these."
        )
    bits = pad_words(pad, dtype)
    if bits is None:
        raise RegistryError(
            f"unpack: pad_value is {pad!r}; values are {str(dtype).removeprefix('torch.')}, which cannot hold it. Give "
            "a pad that the dtype can hold."
        )
    return bits
