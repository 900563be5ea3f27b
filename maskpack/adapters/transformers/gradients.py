"""The self-check of gradients: those of packed attention for one row, against plain torch on this row alone.

Log-probs do not show a wrong backward pass. One of the model would run the hooks that shard and average gradients, so
single layers are compared: the first call of each kind of attention, with its tensors as they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import IntArray
from maskpack.ops.attention import packed_attention
from maskpack.replay.inputs import PackedInputs

TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.1}
"""The largest error of the gradient of queries, keys or values, in units of its norm, by dtype. Kernels round the
factors of products to bfloat16 (2^-9), or float32 to TF32 (2^-11) where torch may, so that rounding alone stays ten
times below. Values in wrong places are off by about 1."""
_CANCELLED = 1 / 16
"""Gradients of queries and keys are differences, which cancel where a query sees one key alone. Their rounding is in
units of what is subtracted: this share of it is added to the norm."""
_QUERIES = 64
"""The number of queries whose outputs are differentiated, spread over the row. A long row has too many scores."""


class AttentionCall(NamedTuple):
    """A call of packed attention: query, key and value, bounds, and the other arguments."""

    tensors: tuple[Tensor, Tensor, Tensor]
    bounds: Tensor
    longest: int
    options: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        return *(x.shape[1:] for x in self.tensors), self.options["window"], self.options["softcap"]


def error(calls: Iterable[AttentionCall], inputs: PackedInputs, row: IntArray) -> float:
    """The largest error of the gradients of a row, which is given by its tokens among the inputs; 0 of a token alone.
    For a shard, all ranks must call."""
    return max((_error(call, inputs, row) for call in calls if row.size > 1), default=0.0)


def _error(call: AttentionCall, inputs: PackedInputs, row: IntArray) -> float:
    leaves = [x.detach().requires_grad_() for x in call.tensors]
    with torch.enable_grad():
        out = packed_attention(leaves[0], leaves[1], leaves[2], call.bounds, call.longest, **call.options)
    queries = np.unique(np.linspace(0, row.size - 1, _QUERIES).astype(np.int64))
    begin = 0 if inputs.context is None else inputs.context.begin
    own = row[queries] - begin
    own = torch.from_numpy(own[(own >= 0) & (own < out.shape[0])]).to(out.device)
    source = torch.Generator(out.device).manual_seed(begin)
    drawn = torch.randn(own.shape[0], *out.shape[1:], generator=source, device=out.device, dtype=torch.float32)
    slope = out.new_zeros(out.shape).index_copy_(0, own, drawn.to(out.dtype))
    seen = torch.autograd.grad(out, leaves, slope)
    wide = torch.promote_types(out.dtype, torch.float32)
    *alone, slope = (inputs.collected(x, row).to(wide) for x in (*leaves, slope))
    truth = _plain_gradients(alone, slope, torch.from_numpy(queries).to(out.device), **call.options)
    query, key, value = (x.detach().square().sum(-1).mean().sqrt() for x in alone)
    scale = float(call.options["scale"]) * math.sqrt(queries.size * out.shape[1])
    subtracted = scale * key * value, scale * query * value, torch.zeros_like(value)
    off: list[Tensor] = []
    for x, y, more in zip(seen, truth, subtracted, strict=True):
        unit = y.square().sum().sqrt() + _CANCELLED * more
        apart = (inputs.collected(x, row) - y).square().sum().sqrt()
        off.append(apart / unit.clamp_min(torch.finfo(wide).tiny))
    return float(torch.stack(off).nan_to_num(torch.inf).max())


def _plain_gradients(
    tensors: list[Tensor], slope: Tensor, queries: Tensor, scale: float, window: int | None, softcap: float | None,
    **_group_and_tree: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of attention of some queries of a row over all of its keys, by its definition."""
    leaves = [x.requires_grad_() for x in tensors]
    query, *keys = leaves
    apart = queries[:, None] - torch.arange(query.shape[0], device=query.device)
    visible = (apart >= 0) & (apart < (window or query.shape[0]))
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in keys)
        scores = torch.einsum("qhd,khd->hqk", query[queries], key) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
        return torch.autograd.grad(out, leaves, slope[queries])
