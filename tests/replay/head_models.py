"""Tiny models of transformers by the name of their kind, among them those whose output layers have a bias, a scale or
a soft cap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs

tf = needs("transformers")
from tiny_models import SLIDING, TINY, VOCABULARY


def maker(kind: str, config: str | None = None, /, *, bias: bool = False, **sizes: Any) -> Callable[..., Any]:
    def make(**more: Any) -> Any:
        config_of = getattr(tf, config or f"{kind}Config", None)
        if config_of is None:
            pytest.skip(f"transformers has no {kind}")
        model = getattr(tf, f"{kind}ForCausalLM")(config_of(**TINY | sizes | more))
        if bias:
            with torch.no_grad():
                model.lm_head.bias.copy_(torch.linspace(-2, 2, VOCABULARY).roll(31))
        return model

    make.__name__ = kind
    return make


CAP = {"head_dim": 8, "final_logit_softcapping": 3.0}
GEMMA2 = {"query_pre_attn_scalar": 8, "sliding_window": 4, "attn_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}
HEADS: dict[str, tuple[Callable[..., Any], float, float | None, bool]] = {
    "Gemma 2, a cap": (maker("Gemma2", **CAP, **GEMMA2), 1.0, 3.0, False),
    "Gemma 4, a cap": (maker("Gemma4", "Gemma4TextConfig", **CAP, **GEMMA4), 1.0, 3.0, False),
    "NanoChat, a cap": (maker("NanoChat", final_logit_softcapping=3.0), 1.0, 3.0, False),
    "Cohere, multiplied": (maker("Cohere", logit_scale=0.25), 0.25, None, False),
    "Cohere 2, multiplied": (maker("Cohere2", logit_scale=0.25, **SLIDING), 0.25, None, False),
    "Granite, divided": (maker("Granite", logits_scaling=4.0), 0.25, None, False),
    "HyperCLOVA X, multiplied": (maker("HyperCLOVAX", logits_scaling=0.3), 0.3, None, False),
    "Phi, a bias": (maker("Phi", bias=True), 1.0, None, True),
    "Ernie, a bias": (maker("Ernie4_5_Moe", bias=True, use_bias=True, **ERNIE), 1.0, None, True),
}
