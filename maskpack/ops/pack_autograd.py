"""The Triton kernels of pack and unpack with gradients of any order, and as operators for torch.compile.

    backward of pack = unpack with pad 0        backward of unpack = pack

Without gradients the kernels are called directly, with them in an autograd.Function, because dispatching an operator
takes longer than a launch. EDGE with gradients, which repeats elements, and constant pads of 16 bytes use plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from maskpack.core.bits import words
from maskpack.core.pads import EDGE
from maskpack.layout.row_layout import RowLayout, device_spans
from maskpack.layout.span_index import SpanIndex
from maskpack.ops import pack_torch, pack_triton

_Job = tuple[int, Tensor | None, int]
"""The raw bits of a constant pad, the pads [B] and the mode of a field."""


def pack(fields: Sequence[Tensor], layout: RowLayout) -> list[Tensor]:
    """`fields` [B, S, *F] -> [T, *F]."""
    if torch.compiler.is_compiling():
        more = device_spans(layout).tensors(), layout.num_rows, layout.width, layout.num_tokens
        return _apart(fields, lambda places: _pack([fields[place] for place in places], *more))
    if _differentiable(fields):
        return list(_apply(_Way(device_spans(layout), layout.num_rows, layout.width, layout.num_tokens), *fields))
    return pack_triton.pack(fields, device_spans(layout), layout.num_tokens)


def unpack(
    values: Sequence[Tensor], layout: RowLayout, pads: Sequence[Any], bits: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """`values` [T, *F] -> [B, S, *F]; each pad is a constant with these raw bits, EDGE, or a tensor [B]."""
    compiling = torch.compiler.is_compiling()
    differentiable = compiling or _differentiable(values)
    if not differentiable and all(len(word) == 1 for word in bits):
        words = [word for (word,) in bits]
        return pack_triton.unpack(
            values, device_spans(layout), layout.num_rows, layout.width, words, [pack_triton.CONSTANT] * len(words)
        )
    jobs = [_job(*each, differentiable) for each in zip(values, pads, bits, strict=True)]
    if not compiling and None not in jobs:
        return _unpacked(values, layout, cast("list[_Job]", jobs), differentiable)
    index = device_spans(layout).tensors()

    def by_kernel(places: Sequence[int]) -> list[Tensor]:
        kernel = [place for place in places if jobs[place] is not None]
        fields = [values[place] for place in kernel]
        kernel_jobs = cast("list[_Job]", [jobs[place] for place in kernel])
        if not fields:
            outs = iter(list[Tensor]())
        elif compiling:
            columns = map(list, zip(*kernel_jobs, strict=True))
            outs = iter(_unpack(fields, index, layout.num_rows, layout.width, *columns))
        else:
            outs = iter(_unpacked(fields, layout, kernel_jobs, differentiable))
        return [
            pack_torch.unpack(values[place], layout, pads[place]) if jobs[place] is None else next(outs)
            for place in places
        ]

    return _apart(values, by_kernel)


def _unpacked(values: Sequence[Tensor], layout: RowLayout, jobs: Sequence[_Job], differentiable: bool) -> list[Tensor]:
    """By the kernels, outside torch.compile."""
    modes = [mode for _, _, mode in jobs]
    both = [word if row_pads is None else row_pads for word, row_pads, _ in jobs]
    way = _Way(device_spans(layout), layout.num_rows, layout.width, values[0].shape[0], both, modes)
    return list(_apply(way, *values)) if differentiable else way.run(values)


def _differentiable(fields: Sequence[Tensor]) -> bool:
    """Whether autograd has to see the operation."""
    return torch.is_grad_enabled() and any(field.requires_grad for field in fields)


class _Way(NamedTuple):
    """`pack`, or with pads `unpack`, on one layout."""

    spans: SpanIndex
    rows: int
    width: int
    num_tokens: int
    pads: Sequence[int | Tensor] | None = None
    modes: Sequence[int] = ()

    def run(self, fields: Sequence[Tensor]) -> list[Tensor]:
        if self.pads is None:
            return pack_triton.pack(fields, self.spans, self.num_tokens)
        return pack_triton.unpack(fields, self.spans, self.rows, self.width, self.pads, self.modes)

    def back(self, count: int) -> _Way:
        """Of gradients: that of a packed element is that of its copy, and padding has gradient 0."""
        zeros = [0] * count
        return self._replace(pads=zeros if self.pads is None else None, modes=zeros)


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
        way: _Way = ctx.way.back(len(some))
        return (None, *_filled(grads, _apply(way, *some) if _differentiable(some) else way.run(some)))


_apply = cast("Callable[..., tuple[Tensor, ...]]", _Moved.apply)  # pyright: ignore[reportUnknownMemberType]


def _apart(fields: Sequence[Tensor], work: Callable[[list[int]], list[Tensor]]) -> list[Tensor]:
    """Applies `work` to the fields that require gradients and to the others: outputs of an operator all require grad or
    none."""
    groups = [
        [place for place, field in enumerate(fields) if field.requires_grad is wanted] for wanted in (True, False)
    ]
    outs = {place: out for places in groups if places for place, out in zip(places, work(places), strict=True)}
    return [outs[place] for place in range(len(fields))]


def _job(values: Tensor, pad: Any, bits: tuple[int, ...], differentiable: bool) -> _Job | None:
    """The arguments of the kernel; None if it does not support the pad."""
    if len(bits) == 1:
        return bits[0], None, pack_triton.CONSTANT
    if pad is EDGE:
        return None if differentiable and values.requires_grad else (0, None, pack_triton.EDGE)
    if bits:
        return None
    pads = words(pad.to(values.dtype)).contiguous()
    return None if pads.dim() > 1 else (0, pads, pack_triton.PER_ROW)


def _pack_kernel(
    fields: Sequence[Tensor],
    index: Sequence[Tensor],
    num_rows: int,
    width: int,
    num_tokens: int,
) -> list[Tensor]:
    return pack_triton.pack(fields, SpanIndex(*index), num_tokens)


def _unpack_kernel(
    values: Sequence[Tensor],
    index: Sequence[Tensor],
    num_rows: int,
    width: int,
    pads: Sequence[int],
    row_pads: Sequence[Tensor | None],
    modes: Sequence[int],
) -> list[Tensor]:
    both = [pad if of_rows is None else of_rows for pad, of_rows in zip(pads, row_pads, strict=True)]
    return pack_triton.unpack(values, SpanIndex(*index), num_rows, width, both, modes)


_INDEX = "Tensor[] index, SymInt num_rows, SymInt width"
_pack: Any = torch.library.custom_op(
    "maskpack::pack",
    _pack_kernel,
    mutates_args=(),
    schema=f"(Tensor[] fields, {_INDEX}, SymInt num_tokens) -> Tensor[]",
)
_unpack: Any = torch.library.custom_op(
    "maskpack::unpack",
    _unpack_kernel,
    mutates_args=(),
    schema=f"(Tensor[] values, {_INDEX}, int[] pads, Tensor?[] row_pads, int[] modes) -> Tensor[]",
)


@_pack.register_fake
def _(fields: Sequence[Tensor], *more: Any) -> list[Tensor]:
    return [field.new_empty((more[-1], *field.shape[2:])) for field in fields]


@_unpack.register_fake
def _(values: Sequence[Tensor], *more: Any) -> list[Tensor]:
    _, num_rows, width, *_ = more
    return [field.new_empty((num_rows, width, *field.shape[1:])) for field in values]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.num_rows, ctx.width = inputs[2:4]


def _pack_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradient of a packed element is the gradient of its copy; padding has gradient 0."""
    some = [grad for grad in grads if grad is not None]
    zeros = [0] * len(some)
    back = _unpack(some, list(ctx.saved_tensors), ctx.num_rows, ctx.width, zeros, [None] * len(some), zeros)
    return (_filled(grads, back), [None] * len(ctx.saved_tensors), *[None] * 3)


def _unpack_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    some = [grad for grad in grads if grad is not None]
    back = _pack(some, list(ctx.saved_tensors), ctx.num_rows, ctx.width, ctx.num_tokens)
    return (_filled(grads, back), [None] * len(ctx.saved_tensors), *[None] * 5)


def _filled(grads: Sequence[Tensor | None], computed: Iterable[Tensor]) -> list[Tensor | None]:
    rest = iter(computed)
    return [None if grad is None else next(rest) for grad in grads]


def _keep_for_unpack(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, inputs, output)
    ctx.num_tokens = inputs[0][0].shape[0]


_pack.register_autograd(_pack_backward, setup_context=_keep)
_unpack.register_autograd(_unpack_backward, setup_context=_keep_for_unpack)
