"""Models of transformers with two layers of 32, made from their configurations, for tests of replay."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 97
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 10000.0}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def qwen3(**more: Any) -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY | {"head_dim": 8} | more))


def llama(**more: Any) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | more))


def gemma3(**more: Any) -> Any:
    """Its sliding layers see 4 tokens of rows of up to 15."""
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TINY | {"head_dim": 8} | SLIDING | more))


def qwen25_vl(**more: Any) -> Any:
    config = tf.Qwen2_5_VLConfig(text_config=TINY | MROPE | more, vision_config=VISION)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def mixtral(**more: Any) -> Any:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**TINY | {"num_local_experts": 6, "num_experts_per_tok": 2} | more))


@torch.no_grad()
def scaled(model: Any, factor: float) -> Any:
    """Its matrices are larger, so that log-probs differ."""
    for weight in model.parameters():
        weight.mul_(factor if weight.dim() > 1 else 1)
    return model


@functools.cache
def _made(make: Callable[..., Any], dtype: torch.dtype, options: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(1)
    return scaled(make(**dict(options)).to(dtype).eval(), 10)


def pair(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Two copies of a model: one to be made replayable, one that keeps its own attention for the truth."""
    made = _made(make, dtype, tuple(sorted(options.items())))
    return copy.deepcopy(made), copy.deepcopy(made)
