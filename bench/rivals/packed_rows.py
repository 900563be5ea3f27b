"""Packing as verl's use_remove_padding does it: the rows of a micro-batch one after the other, bounds for a varlen
attention, and an output layer on all of their tokens.

    part = PackedRows.of(batch, rows)        hidden(model, part) -> [T, H]        Liger's layers: with_liger(model)

Models are transformers' own, with torch's varlen FlashAttention 2 in the place of their attention. Without bounds it
does what transformers does for flash-attn: it takes them from position ids, in each layer, or unpads by the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import _pad_input, _prepare_from_posids, _unpad_input, _upad_input
from transformers.models.qwen3 import modeling_qwen3

from maskpack.ops.attention import packed_attention

VARLEN = "bench_varlen"


@dataclass(frozen=True)
class PackedRows:
    """What verl's engine gives a model for a micro-batch, on the device of the batch.

    Attributes:
        rows: their numbers in the batch.
        ids, positions: int64 [1, T].
        bounds: int32 [B + 1].
        longest: the length of the longest row.
        labels: int64 [T], the ids rolled by one.
        scored: int64, the places of the tokens whose outputs score the responses.
        advantages: float32 of the response tokens.
    """

    rows: Sequence[int]
    ids: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int
    labels: Tensor
    scored: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, batch: TensorDict, rows: Sequence[int]) -> PackedRows:
        """`batch` has left-padded prompts, right-padded responses and `advantages` [B, R]."""
        own = batch[list(rows)]
        mask, width = own["attention_mask"].bool(), own["responses"].shape[1]
        lengths, responses = mask.sum(1).cpu().numpy(), mask[:, -width:].sum(1).cpu().numpy()
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        ends = zip(bounds[1:], responses, strict=True)
        ids = own["input_ids"][mask]
        return cls(
            rows,
            ids[None],
            own["position_ids"][mask][None],
            torch.tensor(bounds, dtype=torch.int32, device=ids.device),
            int(lengths.max()),
            ids.roll(-1),
            torch.from_numpy(np.concatenate([np.arange(end - count - 1, end - 1) for end, count in ends])).to(
                ids.device
            ),
            own["advantages"][mask[:, -width:]],
        )


def hidden(model: Any, part: PackedRows) -> Tensor:
    """[T, H], by a model whose attention is VARLEN."""
    bounds = {"cu_seq_lens_q": part.bounds, "cu_seq_lens_k": part.bounds}
    out = model.model(
        input_ids=part.ids,
        attention_mask=None,
        position_ids=part.positions,
        use_cache=False,
        **bounds,
        max_length_q=part.longest,
        max_length_k=part.longest,
    )
    return out.last_hidden_state[0]


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    # under autocast, rotary tables widen queries and keys
    query, key, value = (x.transpose(1, 2).to(value.dtype) for x in (query, key, value))
    rows, width = query.shape[:2]
    if attention_mask is not None:
        q, k, v, places, (bounds, _), (longest, _) = _upad_input(query, key, value, attention_mask, width, _unpad_input)
        return _pad_input(_attend(q, k, v, bounds, longest, scaling), places, rows, width), None
    if kwargs.get("cu_seq_lens_q") is not None:
        q, k, v, bounds, longest = query[0], key[0], value[0], kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    else:
        q, k, v, (bounds, _), (longest, _) = _prepare_from_posids(query, key, value, kwargs["position_ids"])
    return _attend(q, k, v, bounds, longest, scaling).unflatten(0, (rows, width)), None


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    if not q.is_cuda:
        return packed_attention(q, k, v, bounds, int(longest), scale=scale)
    from torch.nn.attention.varlen import varlen_attn

    out: Any = varlen_attn(q, k, v, bounds, bounds, int(longest), int(longest), scale=scale, window_size=(-1, 0))
    return out


AttentionInterface.register(VARLEN, _varlen)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)


def with_liger(model: Any) -> Any:
    """The Qwen3 model with the norms, the MLPs and the rotation of Liger, as verl's use_liger has it; other models keep
    transformers'. Raises ModuleNotFoundError without Liger."""
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_qwen3
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    own = modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP
    apply_liger_kernel_to_qwen3(rope=False, fused_linear_cross_entropy=False, model=model)
    modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP = own
    plain: Any = inspect.unwrap(modeling_qwen3.Qwen3Attention.forward)
    names = {**plain.__globals__, "apply_rotary_pos_emb": liger_rotary_pos_emb}
    rotating = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    for layer in model.model.layers:  # the rotation is a name of the module, which all models share
        layer.self_attn.forward = MethodType(rotating, layer.self_attn)
    return model
