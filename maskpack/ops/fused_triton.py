"""Triton kernels of what a transformer computes between its matrix products, each in one launch forward.

    normalize   x / sqrt(mean(x^2) + eps) * (weight + offset)      over the last dim
    gate        act(gate) * up                                    SiLU, or GELU by tanh
    rotate      q and k [1, H, T, D] by the angles of their tokens: halves of a head are the two coordinates

They compute in float32, and round what eager PyTorch rounds. Blocks depend on the width alone, so that the bits of a
token do not depend on T. Gradients of the weight of a norm are summed in a fixed order.
"""

# Kernel parameters have no Python type, and a launch takes more than the kernel has.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS, _WIDE = 4096, 2048
"""Of a block of rows up to this wide; wider ones have blocks of two rows."""
_PROGRAMS, _SUMS = 2048, 1 << 23
"""The most partial sums of the gradients of a weight, and their numbers in all."""
WIDEST = 16_384
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _norm(x, weight, y, grad, dx, sums, rows, width, eps, loops, OFFSET: tl.constexpr, ROUND: tl.constexpr,
          BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros((BLOCK,), tl.float32)
    for loop in range(loops):
        row = (tl.program_id(0) * loops + loop).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place, inside = row[:, None] * width + at[None, :], (row < rows)[:, None] & (at < width)[None, :]
        here = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(here * here, 1) / width + eps)[:, None]
        unit = here * scale
        rounded = unit.to(x.dtype.element_ty).to(tl.float32) if ROUND else unit
        if BACKWARD:
            slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(slope * rounded, 0)
            slope *= factor[None, :]
            along = tl.sum(slope * unit, 1)[:, None] / width
            tl.store(dx + place, (scale * (slope - unit * along)).to(x.dtype.element_ty), mask=inside)
        else:
            tl.store(y + place, (rounded * factor[None, :]).to(x.dtype.element_ty), mask=inside)
    if BACKWARD:
        tl.store(sums + tl.program_id(0) * width + at, total, mask=at < width)


@triton.jit
def _gate(gate, up, out, grad, dgate, dup, size, GELU: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    z = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x  # 2 sqrt(2 / pi): GELU is x sigmoid(z)
    share = tl.sigmoid(z)
    act = (x * share).to(gate.dtype.element_ty).to(tl.float32)
    if BACKWARD:
        slope = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
        steep = 1.5957691216057308 * (1 + 0.134145 * x * x) if GELU else 1.0
        bend = share + x * share * (1 - share) * steep
        tl.store(dgate + at, (slope * y * bend).to(gate.dtype.element_ty), mask=at < size)
        tl.store(dup + at, (slope * act).to(gate.dtype.element_ty), mask=at < size)
    else:
        tl.store(out + at, (act * y).to(gate.dtype.element_ty), mask=at < size)


@triton.jit
def _turn(x, y, heads, x_head, x_token, y_head, y_token, c1, c2, s1, s2, half, HEADS: tl.constexpr,
          HALF: tl.constexpr):  # fmt: skip
    token, at, head = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (at < half)
    kind: tl.constexpr = x.dtype.element_ty
    x += token * x_token + head * x_head + at
    y += token * y_token + head * y_head + at
    x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y, ((x1 * c1).to(kind).to(tl.float32) - (x2 * s1).to(kind).to(tl.float32)).to(kind), mask=inside)
    tl.store(y + half, ((x2 * c2).to(kind).to(tl.float32) + (x1 * s2).to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _rotate(q, k, cos, sin, new_q, new_k, q_heads, k_heads, q_head, q_token, k_head, k_token, new_q_head, new_q_token,
            new_k_head, new_k_token, half, BACKWARD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            HALF: tl.constexpr):  # fmt: skip
    at = tl.arange(0, HALF)[None, :]
    line = tl.program_id(0).to(tl.int64) * 2 * half + at
    c1 = tl.load(cos + line, mask=at < half, other=0.0).to(tl.float32)
    c2 = tl.load(cos + line + half, mask=at < half, other=0.0).to(tl.float32)
    s1 = tl.load(sin + line, mask=at < half, other=0.0).to(tl.float32)
    s2 = tl.load(sin + line + half, mask=at < half, other=0.0).to(tl.float32)
    if BACKWARD:
        s1, s2 = -s2, -s1
    _turn(q, new_q, q_heads, q_head, q_token, new_q_head, new_q_token, c1, c2, s1, s2, half, Q, HALF)
    _turn(k, new_k, k_heads, k_head, k_token, new_k_head, new_k_token, c1, c2, s1, s2, half, K, HALF)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *how: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how, y = how, torch.empty_like(x)
        _launch_norm(x, weight, y, None, None, how)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        sums = _launch_norm(x, weight, None, grads[0].contiguous(), dx, ctx.how)
        return dx, sums.sum(0).to(weight.dtype), None, None, None


def _launch_norm(x: Tensor, weight: Tensor, y: Any, grad: Any, dx: Any, how: tuple[float, float, bool]) -> Any:
    width, (eps, offset, rounds) = x.shape[-1], how
    rows, block = x.numel() // width, _power(width)
    each, warps = (_ELEMENTS // block, 4) if block <= _WIDE else (2, 8) if block <= 2 * _WIDE else (1, 16)
    most = min(_PROGRAMS, _SUMS // block)
    loops = 1 if grad is None else max(1, triton.cdiv(rows, each * most))
    programs = triton.cdiv(rows, each * loops)
    sums = None if grad is None else torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if rows:
            _norm[(programs,)](x, weight, y, grad, dx, sums, rows, width, eps, loops, offset, rounds, grad is not None,
                               each, block, num_warps=warps, **_EXACT)  # fmt: skip
    return sums


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.gelu, out = gelu, torch.empty_like(gate)
        _launch_gate(gate, up, out, None, None, None, gelu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        _launch_gate(gate, up, None, grads[0].contiguous(), dgate, dup, ctx.gelu)
        return dgate, dup, None


def _launch_gate(gate: Tensor, up: Tensor, out: Any, grad: Any, dgate: Any, dup: Any, gelu: bool) -> None:
    with torch.cuda.device_of(gate):
        if size := gate.numel():
            _gate[(triton.cdiv(size, 2048),)](
                gate, up, out, grad, dgate, dup, size, gelu, grad is not None, 2048, **_EXACT
            )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _launch_rotate(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_launch_rotate(*grads, *ctx.saved_tensors, True), None, None


def _launch_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    new = torch.empty_like(q), torch.empty_like(k)
    places = [stride for x in (q, k, *new) for stride in x.stride()[1:3]]
    half = q.shape[3] // 2
    with torch.cuda.device_of(q):
        if q.shape[2]:
            _rotate[(q.shape[2],)](q, k, cos, sin, *new, q.shape[1], k.shape[1], *places, half, backward,
                                   _power(q.shape[1]), _power(k.shape[1]), _power(half), **_EXACT)  # fmt: skip
    return new


def normalize(x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool) -> Tensor:
    """x [..., width] and weight [width] of one dtype, width at most WIDEST -> as x. `rounds`: before the weight."""
    return cast("Any", _Normalize.apply)(x, weight, eps, offset, rounds)


def gate(x: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(x) * up, of one shape and dtype."""
    return cast("Any", _Gate.apply)(x, up, gelu)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [1, H, T, D], k [1, KV, T, D], cos and sin [1, T, D], which want no gradients, of one dtype."""
    return cast("Any", _Rotate.apply)(q, k, cos, sin)
