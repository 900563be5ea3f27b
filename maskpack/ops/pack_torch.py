"""Pack and unpack in plain torch and NumPy: the specification of both operations, and their implementation on the CPU.

pack(x, layout)   == x[layout.to_mask()]
unpack(v, layout) == torch.full((B, S, *F), pad).masked_scatter(layout.to_mask(), v)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core.bits import Words, empty, from_words, words
from maskpack.core.pads import EDGE, pad_tensor
from maskpack.layout.row_layout import RowLayout


def pack(x: Tensor, layout: RowLayout, *, one_call: bool = False) -> Tensor:
    """`one_call` copies by one NumPy call, which lets other threads run, instead of one call for each span."""
    if _traced(x):
        return x.flatten(0, 1).index_select(0, layout.indices)
    out = torch.empty((layout.num_tokens, *x.shape[2:]), dtype=x.dtype, device=x.device)
    source, target = words(x), words(out)
    if one_call and x.device.type == "cpu" and source.is_contiguous() and out.numel():
        np.take(source.flatten(0, 1).numpy(), layout.indices.numpy(), axis=0, out=target.numpy(), mode="clip")
    elif x.device.type == "cpu" and layout.long_spans:
        if source.is_contiguous():
            _copy_spans(target.numpy(), source.numpy(), layout, back=True)
        elif layout.num_spans:
            np.concatenate(_span_views(source.numpy(), layout), out=target.numpy())
    elif source.is_contiguous():
        torch.index_select(source.flatten(0, 1), 0, layout.indices, out=target)
    else:
        width = max(layout.width, 1)
        target.copy_(source[layout.indices // width, layout.indices % width])
    return out


def unpack(values: Tensor, layout: RowLayout, pad_value: Any = 0) -> Tensor:
    if pad_value is EDGE:
        return _unpack_edge(values, layout)
    shape = (layout.num_rows, layout.width, *values.shape[1:])
    if isinstance(pad_value, Tensor):
        out = _spread(pad_value.to(values.dtype).view(-1, *[1] * (len(shape) - 1)), shape)
    else:
        out = _filled(shape, pad_value, values)
    if _traced(values):
        return out.flatten(0, 1).index_copy(0, layout.indices, values).view(shape)
    source, target = words(values), words(out)
    if values.device.type == "cpu" and layout.long_spans:
        _copy_spans(np.ascontiguousarray(source.numpy()), target.numpy(), layout)
    else:
        target.flatten(0, 1).index_copy_(0, layout.indices, source)
    return out


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
    return empty(shape, word.dtype, like.device).fill_(int(word.item())).view(like.dtype)


def _spread(pads: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of `pads` expanded to `shape`, with their raw bits."""
    source = words(pads)
    more = source.shape[pads.dim() :]
    out = empty((*shape, *more), source.dtype, source.device).copy_(source.expand(*shape, *more))
    return torch.view_as_complex(out.view(torch.float64)) if more else out.view(pads.dtype)


def _unpack_edge(values: Tensor, layout: RowLayout) -> Tensor:
    differentiable = _traced(values)
    if values.device.type == "cpu" and layout.long_spans and not differentiable:
        return _unpack_edge_by_span(values, layout)
    shape = (layout.num_rows, layout.width, *values.shape[1:])
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if layout.num_tokens == 0:
        return out + values.sum() if differentiable else out
    rank = layout.to_mask().cumsum(1)
    nearest = (rank - 1).clamp_(min=0).add_(layout.offsets[:-1, None]).clamp_(max=layout.num_tokens - 1).view(-1)
    empty = (layout.offsets.diff() == 0).view(-1, *[1] * (len(shape) - 1))
    if differentiable:
        return torch.where(empty, out, values.index_select(0, nearest).view(shape))
    target = words(out)
    edges = words(values).index_select(0, nearest).view(target.shape)
    target.copy_(edges.masked_fill_(empty.view(-1, *[1] * (edges.dim() - 1)), 0))
    return out


def _unpack_edge_by_span(values: Tensor, layout: RowLayout) -> Tensor:
    """Fills each row with its last valid element, then writes the positions up to that element."""
    source, table = words(values), layout.table
    ends = torch.zeros((layout.num_rows, *source.shape[1:]), dtype=source.dtype, device=source.device)
    filled_rows = torch.from_numpy(np.flatnonzero(layout.lengths))
    ends[filled_rows] = source[layout.offsets[1:][filled_rows] - 1]
    shape = (layout.num_rows, layout.width, *source.shape[1:])
    out = empty(shape, source.dtype, source.device).copy_(ends.unsqueeze(1).expand(shape))
    target, array = out.numpy(), source.numpy()
    starts, counts, splits = table.starts.tolist(), table.counts.tolist(), table.splits.tolist()
    begin = 0
    for row in range(layout.num_rows):
        line, filled = target[row], 0
        for span in range(splits[row], splits[row + 1]):
            end, stop = begin + counts[span], starts[span] + counts[span]
            line[filled : starts[span]] = array[begin - 1 if filled else begin]
            line[starts[span] : stop] = array[begin:end]
            begin, filled = end, stop
    return from_words(target, values.dtype)


def _copy_spans(packed: Words, padded: Words, layout: RowLayout, *, back: bool = False) -> None:
    """Copies packed values [T, *F] to their spans in `padded` [B, S, *F], or `back`; both are contiguous. Slicing a
    memoryview is faster than slicing an array."""
    size = math.prod(packed.shape[1:])
    line, flat = packed.reshape(-1).data, padded.reshape(-1).data
    begin = 0
    for place in layout.span_slices if size else ():
        end = begin + (place.stop - place.start) * size
        span = slice(place.start * size, place.stop * size)
        if back:
            line[begin:end] = flat[span]
        else:
            flat[span] = line[begin:end]
        begin = end


def _span_views(array: Words, layout: RowLayout) -> list[Words]:
    """Views of the spans of `array` [B, S, *F], in order."""
    width = layout.width
    return [array[at.start // width, at.start % width :][: at.stop - at.start] for at in layout.span_slices]
