"""Models of the shapes of Qwen3 and Qwen3.5 with random weights, and batches of token ids for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from bench.workloads.rows import Lengths, as_batch, log_normal, mask_of, token_fields

Counts = npt.NDArray[np.int64]
_GROUP = 16  # rows that share a prompt


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

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        """With random weights, made on the device, ready to checkpoint its layers while it trains."""
        rotary = {"rope_type": "default", "rope_theta": 1e6}
        return checkpointed(Qwen3Config(**self.sizes, rope_parameters=rotary), device, dtype)

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

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(self.layers)]
        heads = {"linear_num_key_heads": self.delta_heads, "linear_num_value_heads": self.delta_heads}
        dims = {"linear_key_head_dim": self.delta_dim, "linear_value_head_dim": self.delta_dim}
        return checkpointed(Qwen3_5TextConfig(**self.sizes, **heads, **dims, layer_types=kinds), device, dtype)


def checkpointed(config: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights, made on the device, ready to checkpoint its layers while it trains."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def log_normal_lengths(rows: int, widths: tuple[int, int], fill: float, group: int = _GROUP) -> tuple[Counts, Counts]:
    """int64 [B] each, of prompts and responses: both fill the same share of their widths, prompts less unevenly and
    alike in groups."""
    random = np.random.default_rng(0)
    prompts = log_normal(random, -(-rows // group), 0.5, fill * widths[0], widths[0])
    return prompts.repeat(group)[:rows], log_normal(random, rows, 1.0, fill * widths[1], widths[1])


def cut(part: TensorDict) -> TensorDict:
    """The columns between the first and the last token of any row."""
    p = part["prompts"].shape[1]
    columns = part["attention_mask"].any(0).nonzero()
    begin, end = int(columns[0]), int(columns[-1]) + 1
    cut = {name: part[name][:, begin:end] for name in ("input_ids", "attention_mask", "position_ids")}
    return TensorDict(
        {**cut, "prompts": part["prompts"][:, begin:], "responses": part["responses"][:, : end - p]}, part.batch_size
    )


def padded_batch(
    prompts: Counts, responses: Counts, widths: tuple[int, int], vocabulary: int, group: int = 1
) -> TensorDict:
    """Prompts padded on the left, responses on the right, by the last id of the vocabulary; the others at random, in
    groups of rows that have one prompt."""
    mask = mask_of(Lengths(prompts, responses, *widths))
    ids = np.where(mask, np.random.default_rng(1).integers(0, vocabulary - 1, mask.shape), vocabulary - 1)
    ids[:, : widths[0]] = ids[np.arange(len(ids)) // group * group, : widths[0]]
    return as_batch(token_fields(ids, mask, widths[0]))


SMALL = Shape(1024, 28, 16, 8, 128, 3072)
"""Of Qwen3-0.6B."""
LARGE = Shape(2560, 9, 32, 8, 128, 9728)
"""Of 9 of the 36 layers of Qwen3-4B."""
TINY = Shape(32, 2, 4, 2, 8, 48, 97)
"""For runs on a CPU."""
