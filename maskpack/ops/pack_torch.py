"""Pack and unpack in plain torch, the specification of both operations; on the CPU the compiled core does them.

pack(x, layout)   == x[layout.to_mask()]
unpack(v, layout) == torch.full((B, S, *F), pad).masked_scatter(layout.to_mask(), v)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.bits import empty_of, words
from maskpack.core.index import IntArray
from maskpack.core.pads import EDGE, Pads, pad_tensor
from maskpack.layout.row_layout import RowLayout, core_layout


def pack(x: Tensor, layout: RowLayout) -> Tensor:
    if _traced(x):
        return x.flatten(0, 1).index_select(0, layout.indices)
    out = torch.empty((layout.num_tokens, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        native.pack(x, core_layout(layout), out)
        return out
    source, target = words(x), words(out)
    if source.is_contiguous():
        torch.index_select(source.flatten(0, 1), 0, layout.indices, out=target)
    else:
        width = max(layout.width, 1)
        target.copy_(source[layout.indices // width, layout.indices % width])
    return out


def unpack(values: Tensor, layout: RowLayout, pad_value: Any = 0, ragged_dim: int = 1) -> Tensor:
    """The width of the result is its dim `ragged_dim`."""
    if values.device.type == "cpu" and not _traced(values):
        return _unpack_on_host(values, layout, pad_value, ragged_dim)
    if pad_value is EDGE:
        return moved(_unpack_edge(values, layout), ragged_dim)
    shape = (layout.num_rows, layout.width, *values.shape[1:])
    if isinstance(pad_value, Tensor):
        out = _spread(pad_value.to(values.dtype).view(-1, *[1] * (len(shape) - 1)), shape)
    else:
        out = _filled(shape, pad_value, values)
    if _traced(values):
        return moved(out.flatten(0, 1).index_copy(0, layout.indices, values).view(shape), ragged_dim)
    words(out).flatten(0, 1).index_copy_(0, layout.indices, words(values))
    return moved(out, ragged_dim)


def moved(out: Tensor, ragged_dim: int) -> Tensor:
    """A padded tensor [B, S, *F] with its width in another dim, contiguous."""
    return out if ragged_dim == 1 else out.movedim(1, ragged_dim).contiguous()


def _unpack_on_host(values: Tensor, layout: RowLayout, pad_value: Any, ragged_dim: int) -> Tensor:
    if isinstance(pad_value, Tensor):
        pads = Pads.of_rows(pad_value.detach().to(values.dtype))
    else:
        pads = Pads.of(pad_value, values.dtype)
    field = new_field(values, layout, pads, ragged_dim)
    native.write([field])
    return field.padded


def new_field(values: Tensor, layout: RowLayout, pads: Pads, ragged_dim: int) -> native.NewField:
    """An empty padded tensor on the host, which `native.write` fills."""
    shape, form = _form_of(values.shape[1:], values.dtype, layout.width, ragged_dim)
    out = empty_of((layout.num_rows, *shape), values.dtype)
    values = values.resolve_conj().resolve_neg().contiguous()
    return native.NewField(form, out, core_layout(layout), pads, values)


@lru_cache(1024)
def _form_of(
    shape: tuple[int, ...], dtype: torch.dtype, width: int, ragged_dim: int
) -> tuple[tuple[int, ...], IntArray]:
    """The shape of a padded tensor behind its rows, and FIELD."""
    padded = (*shape[: ragged_dim - 1], width, *shape[ragged_dim - 1 :])
    one = torch.empty((1, *padded), dtype=dtype, device="meta").movedim(ragged_dim, 1)
    return padded, native.described(one)[0].reshape(1).view(np.int64)


def _traced(x: Tensor) -> bool:
    """Whether only torch operations may be used, because of autograd or torch.compile."""
    return (x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling()


def _filled(shape: tuple[int, ...], pad: Any, like: Tensor) -> Tensor:
    """A tensor with the raw bits of the pad in every element. torch.full loses the payload of a NaN in half precision
    and rejects some complex numbers."""
    scalar = pad_tensor(pad, like.dtype)
    assert scalar is not None
    word = words(scalar)
    if word.dim():
        return _spread(scalar.to(like.device), shape)
    return empty_of(shape, word.dtype, like.device).fill_(int(word.item())).view(like.dtype)


def _spread(pads: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of `pads` expanded to `shape`, with their raw bits."""
    source = words(pads)
    more = source.shape[pads.dim() :]
    out = empty_of((*shape, *more), source.dtype, source.device).copy_(source.expand(*shape, *more))
    return torch.view_as_complex(out.view(torch.float64)) if more else out.view(pads.dtype)


def _unpack_edge(values: Tensor, layout: RowLayout) -> Tensor:
    differentiable = _traced(values)
    shape = (layout.num_rows, layout.width, *values.shape[1:])
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if layout.num_tokens == 0:
        return out + values.sum() if differentiable else out
    rank = layout.to_mask().cumsum(1)
    nearest = (rank - 1).clamp_(min=0).add_(layout.cu_seqlens[:-1, None]).clamp_(max=layout.num_tokens - 1).view(-1)
    empty = (layout.cu_seqlens.diff() == 0).view(-1, *[1] * (len(shape) - 1))
    if differentiable:
        return torch.where(empty, out, values.index_select(0, nearest).view(shape))
    target = words(out)
    edges = words(values).index_select(0, nearest).view(target.shape)
    target.copy_(edges.masked_fill_(empty.view(-1, *[1] * (edges.dim() - 1)), 0))
    return out
