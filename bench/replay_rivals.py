"""Models of the shapes of Qwen3 and Qwen3.5, the FLOPs that their real tokens need, and log-probs without packing.

FLOPs     2 x the parameters of the layers for each token, 2 x the output layer for each response token (no other is
          scored), 4 x layers x heads x head_dim for each pair of a token and one it sees, itself among these, in its
          own row; the backward pass takes twice that; what checkpoints compute again does not count. A gated delta net
          has no pairs: 8 x heads x key_dim x value_dim for each token, which decays, reads, writes and asks its state
padded    micro-batches of a few rows at full width with the attention mask, logits of all positions, log_softmax
          and gather in the dtype of the model
dense     rows of one length, [b, n], without a mask; log-probs as maskpack's, so that attention alone differs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from maskpack.ops import packed_log_probs

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model whose output layer is its embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 151_936

    @property
    def parameters(self) -> int:
        """Of the layers, in matrix products: neither the embedding nor the norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def flops(self, lengths: Lengths, responses: Lengths) -> float:
        """Of a forward pass over rows of so many tokens, the last of which are so many of the response."""
        pairs = float((lengths * (lengths + 1)).sum()) / 2
        return (
            2.0 * self.parameters * float(lengths.sum())
            + 2.0 * self.hidden * self.vocabulary * float(responses.sum())
            + 4.0 * self.layers * self.heads * self.head_dim * pairs
        )

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        """With random weights, made on the device, ready to checkpoint its layers while it trains."""
        rotary = {"rope_type": "default", "rope_theta": 1e6}
        return _made(Qwen3Config(**self.sizes, rope_parameters=rotary), device, dtype)

    @property
    def sizes(self) -> dict[str, Any]:
        """For a configuration of transformers."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
            "attn_implementation": "sdpa",
        }


@dataclass(frozen=True)
class HybridShape(Shape):
    """Of the text model of a dense Qwen3.5, in which every fourth layer attends and the others are gated delta nets.
    Its attention has an output gate, so that queries are twice as wide."""

    delta_heads: int = 16
    delta_dim: int = 128

    @property
    def attending(self) -> int:
        return self.layers // 4

    @property
    def parameters(self) -> int:
        """Of the layers, in matrix products."""
        attention = self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        delta = self.hidden * self.delta_heads * (5 * self.delta_dim + 2)
        mlps = 3 * self.layers * self.hidden * self.intermediate
        return self.attending * attention + (self.layers - self.attending) * delta + mlps

    def flops(self, lengths: Lengths, responses: Lengths) -> float:
        pairs = float((lengths * (lengths + 1)).sum()) / 2
        state = 8.0 * (self.layers - self.attending) * self.delta_heads * self.delta_dim**2
        return (
            (2.0 * self.parameters + state) * float(lengths.sum())
            + 2.0 * self.hidden * self.vocabulary * float(responses.sum())
            + 4.0 * self.attending * self.heads * self.head_dim * pairs
        )

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(self.layers)]
        heads = {"linear_num_key_heads": self.delta_heads, "linear_num_value_heads": self.delta_heads}
        dims = {"linear_key_head_dim": self.delta_dim, "linear_value_head_dim": self.delta_dim}
        return _made(Qwen3_5TextConfig(**self.sizes, **heads, **dims, layer_types=kinds), device, dtype)


def _made(config: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def padded_log_probs(model: Any, batch: TensorDict, rows: int, *, scored: bool = False) -> Iterator[Tensor]:
    """Of each micro-batch of so many rows: [rows, R] in the dtype of the model, 0 where pads are. With `scored`, logits
    of the responses' width alone."""
    width = batch["responses"].shape[1]
    for part in batch.split(rows):
        logits = model(
            input_ids=part["input_ids"],
            attention_mask=part["attention_mask"],
            position_ids=part["position_ids"],
            use_cache=False,
            **({"logits_to_keep": width + 1} if scored else {}),
        ).logits
        log_p = logits[:, -width - 1 : -1].log_softmax(-1)
        del logits
        log_p = log_p.gather(-1, part["responses"].unsqueeze(-1)).squeeze(-1)
        yield log_p * part["attention_mask"][:, -width:]


def dense_log_probs(model: Any, batch: TensorDict, rows: int) -> Iterator[Tensor]:
    """Of each micro-batch of so many rows, all as long as they are wide: [rows, R] in float32."""
    width = batch["responses"].shape[1]
    for part in batch.split(rows):
        hidden = model.model(input_ids=part["input_ids"], use_cache=False).last_hidden_state
        scored = hidden[:, -width - 1 : -1].flatten(0, 1)
        yield packed_log_probs(scored, model.lm_head.weight, part["responses"].flatten()).view(-1, width)


def lone_log_probs(model: Any, ids: Tensor, response: int) -> Tensor:
    """Of one row [n], alone: [response], from logits in the dtype of the model that are reduced in float32 or wider."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -response - 1 : -1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).log_softmax(-1).gather(-1, ids[-response:, None])[:, 0]
