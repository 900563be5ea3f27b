"""The Triton kernels of pack and unpack with gradients of any order, and as operators for torch.compile.

    backward of pack = unpack with pad 0        backward of unpack = pack

Without gradients the kernels are called directly, with them in an autograd.Function, because dispatching an operator
takes longer than a launch. EDGE with gradients, which repeats elements, and constant pads of 16 bytes use plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from maskpack.core.bits import words
from maskpack.core.pads import EDGE, Pad
from maskpack.layout.row_layout import RowLayout, device_spans
from maskpack.layout.span_index import SpanIndex
from maskpack.ops import pack_torch, pack_triton


def pack(fields: Sequence[Tensor], layout: RowLayout) -> list[Tensor]:
    """`fields` [B, S, *F] -> [T, *F]."""
    spans, sizes = device_spans(layout), (layout.num_rows, layout.width, layout.num_tokens)
    if torch.compiler.is_compiling():
        return [_pack(field, spans.tensors(), *sizes) for field in fields]
    if _differentiable(fields):
        return _Way(spans, *sizes).moved(fields)
    return pack_triton.pack(fields, spans, layout.num_tokens)


def unpack(
    values: Sequence[Tensor], layout: RowLayout, pads: Sequence[Any], bits: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """`values` [T, *F] -> [B, S, *F]; each pad is a constant with these raw bits, EDGE, or a tensor [B]."""
    spans, rows, width = device_spans(layout), layout.num_rows, layout.width
    compiling = torch.compiler.is_compiling()
    differentiable = compiling or _differentiable(values)
    if not differentiable and all(len(word) == 1 for word in bits):
        return pack_triton.unpack(values, spans, rows, width, [word for (word,) in bits])
    own = [_kernel_pad(*each, differentiable) for each in zip(values, pads, bits, strict=True)]
    some = [(x, pad) for x, pad in zip(values, own, strict=True) if pad is not None]
    fields, their_pads = [x for x, _ in some], [pad for _, pad in some]
    if compiling:
        outs = [_unpack(x, spans.tensors(), rows, width, *_of_one_kind(pad)) for x, pad in some]
    else:
        outs = _Way(spans, rows, width, layout.num_tokens, their_pads).moved(fields) if some else []
    rest = iter(outs)
    return [
        pack_torch.unpack(x, layout, pad) if word is None else next(rest)
        for x, pad, word in zip(values, pads, own, strict=True)
    ]


def _differentiable(fields: Sequence[Tensor]) -> bool:
    """Whether autograd has to see the operation."""
    return torch.is_grad_enabled() and any(field.requires_grad for field in fields)


class _Way(NamedTuple):
    """`pack`, or with pads `unpack`, on one layout."""

    spans: SpanIndex
    rows: int
    width: int
    num_tokens: int
    pads: Sequence[int | Tensor | Pad] | None = None

    def run(self, fields: Sequence[Tensor]) -> list[Tensor]:
        if self.pads is None:
            return pack_triton.pack(fields, self.spans, self.num_tokens)
        return pack_triton.unpack(fields, self.spans, self.rows, self.width, self.pads)

    def moved(self, fields: Sequence[Tensor]) -> list[Tensor]:
        """`run`, as autograd sees it."""
        return list(_apply(self, *fields)) if _differentiable(fields) else self.run(fields)

    def back(self, count: int) -> _Way:
        """Of gradients: that of a packed element is that of its copy, and padding has gradient 0."""
        return self._replace(pads=[0] * count if self.pads is None else None)


class _Moved(torch.autograd.Function):
    """A way of fields of which some require grad."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *fields: Tensor) -> Any:
        """Outputs of inputs that require no grad do not either, and outputs that are not used have no gradient."""
        ctx.way, outs = way, way.run(fields)
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*[out for out, own in zip(outs, needed, strict=True) if not own])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        some = [grad for grad in grads if grad is not None]
        rest = iter(ctx.way.back(len(some)).moved(some))
        return (None, *[None if grad is None else next(rest) for grad in grads])


_apply = cast("Callable[..., tuple[Tensor, ...]]", _Moved.apply)  # pyright: ignore[reportUnknownMemberType]


def _kernel_pad(values: Tensor, pad: Any, bits: tuple[int, ...], differentiable: bool) -> int | Tensor | Pad | None:
    """The pad as the kernel takes it: raw bits, those of each row, or EDGE; None if it does not support the pad."""
    if len(bits) == 1:
        return bits[0]
    if pad is EDGE:
        return None if differentiable and values.requires_grad else EDGE
    if bits:
        return None
    rows = words(pad.to(values.dtype)).contiguous()
    return None if rows.dim() > 1 else rows


# -------------------------------------------------------------------- operators for torch.compile, of a field each


_INDEX = "Tensor[] index, SymInt num_rows, SymInt width"
_PACK = f"(Tensor field, {_INDEX}, SymInt num_tokens) -> Tensor"
_UNPACK = f"(Tensor values, {_INDEX}, int? word, Tensor? row_pads) -> Tensor"


@torch.library.custom_op("maskpack::pack", mutates_args=(), schema=_PACK)
def _pack(field: Tensor, index: Sequence[Tensor], num_rows: int, width: int, num_tokens: int) -> Tensor:
    return pack_triton.pack([field], SpanIndex(*index), num_tokens)[0]


@torch.library.custom_op("maskpack::unpack", mutates_args=(), schema=_UNPACK)
def _unpack(
    values: Tensor, index: Sequence[Tensor], num_rows: int, width: int, word: int | None, row_pads: Tensor | None
) -> Tensor:
    """By both `word` and `row_pads` of None, EDGE."""
    pad = row_pads if word is None else word
    return pack_triton.unpack([values], SpanIndex(*index), num_rows, width, [EDGE if pad is None else pad])[0]


def _of_one_kind(pad: int | Tensor | Pad) -> tuple[int | None, Tensor | None]:
    """`word` and `row_pads` of the operator."""
    return pad if isinstance(pad, int) else None, pad if isinstance(pad, Tensor) else None


@_pack.register_fake
def _(field: Tensor, *more: Any) -> Tensor:
    return field.new_empty((more[-1], *field.shape[2:]))


@_unpack.register_fake
def _(values: Tensor, index: Any, num_rows: int, width: int, *more: Any) -> Tensor:
    return values.new_empty((num_rows, width, *values.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.sizes, ctx.num_tokens = inputs[2:4], inputs[0].shape[0]  # of unpack: those of pack are rows


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradient of a packed element is the gradient of its copy; padding has gradient 0."""
    index = [*ctx.saved_tensors]
    return _unpack(grad, index, *ctx.sizes, 0, None), [None] * len(index), None, None, None


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index = [*ctx.saved_tensors]
    return _pack(grad, index, *ctx.sizes, ctx.num_tokens), [None] * len(index), *[None] * 4


_pack.register_autograd(_pack_backward, setup_context=_keep)
_unpack.register_autograd(_unpack_backward, setup_context=_keep)
