"""Batches of rows for models of transformers, and what each row alone gives: log-probs, entropies, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from needs import needs
from tensordict import TensorDict
from torch import Tensor

tf = needs("transformers")
from tiny_models import VOCABULARY, gemma3, llama, qwen3, qwen25_vl

from maskpack.adapters.transformers import model as adapter
from maskpack.errors import ReplayError
from maskpack.replay import response_log_probs

Replayable, replayable = adapter.Replayable, adapter.replayable

PROMPT, RESPONSE = 6, 9
LIMIT, GRADIENT_LIMIT = 5e-6, 1e-5
PATH = (True, False, False, False, False, True)
"""Beside the dtype, what a Replayable remembers of a row that it compared: packed, with gradients, and nothing else."""
ROWS = ((2, 3), (6, 9), (1, 0), (3, 4), (0, 0), (5, 1), (1, 1), (4, 7))


def gpt2(**more: Any) -> Any:
    """Its positions are learned and absolute, so that it also shows wrong ones."""
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(**sizes | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} | more)
    )


MODELS = {make.__name__: make for make in (qwen3, llama, gemma3, qwen25_vl, gpt2)}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def batch_of(
    rows: Any = ROWS,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    *,
    ids: str = "edge",
    side: str = "both",
    seed: int = 0,
) -> TensorDict:
    """Prompts padded on the left and responses on the right, or both on one side. `ids`: "edge", "none", or for M-RoPE
    "mrope3" and "mrope4", whose sections differ."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(rows), prompt + response, dtype=torch.int64)
    for b, (p, r) in enumerate(rows):
        begin = 0 if side == "right" else prompt - p
        mask[b, begin : begin + p] = 1
        begin = prompt + response - r if side == "left" else prompt
        mask[b, begin : begin + r] = 1
    tokens = torch.randint(3, VOCABULARY, mask.shape, generator=source) * mask
    text = (mask.cumsum(1) - 1).clamp(min=0)
    batch = TensorDict(
        {"prompts": tokens[:, :prompt], "responses": tokens[:, prompt:], "input_ids": tokens, "attention_mask": mask},
        batch_size=[len(rows)],
    )
    if ids == "edge":
        batch["position_ids"] = text
    elif ids.startswith("mrope"):
        sections = [text, text // 2, (text - 3).clamp(min=0)]
        batch["position_ids"] = torch.stack([text] * (ids == "mrope4") + sections, 1)
    return batch


def for_model(make: Callable[..., Any], *more: Any, **options: Any) -> TensorDict:
    return batch_of(*more, **options | ({"ids": "mrope3"} if make is qwen25_vl else {}))


def alone(model: Any, batch: TensorDict, scored: Tensor | None = None) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """For each row with tokens: what the model gives for them without padding, the tokens, and which are to be scored:
    those of a mask [B, S], or of the responses."""
    rows, width = batch["attention_mask"].shape
    if scored is None:
        scored = (torch.arange(width) >= width - batch["responses"].shape[1]).expand(rows, -1)
    for b in range(rows):
        real = [s for s in range(width) if batch["attention_mask"][b, s]]
        if not real:
            continue
        tokens = batch["input_ids"][b, real][None]
        where = torch.arange(len(real), device=tokens.device)[None]
        if "position_ids" in batch:
            where = batch["position_ids"][b, ..., real]
            where = where[None] if where.dim() == 1 else where[:, None]
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=where, use_cache=False)
        yield out.logits[0], tokens[0].tolist(), [nth for nth, s in enumerate(real) if scored[b, s]]


def truth_of(
    model: Any, batch: TensorDict, temperature: float = 1.0, scored: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all tokens to score, row after row, in float32 at least."""
    log_probs, entropies = ([torch.zeros(0, device=batch["input_ids"].device)] for _ in range(2))
    for logits, tokens, places in alone(model, batch, scored):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = (wide / temperature).log_softmax(-1)
        for nth in places:
            log_probs.append(scores[nth - 1, tokens[nth]][None])
            entropies.append(-(scores[nth - 1].exp() * scores[nth - 1]).sum()[None])
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: Any, values: Tensor) -> list[Tensor]:
    """Of a sum of values with weights of their own."""
    model.zero_grad()
    (values * torch.linspace(0.3, 1.3, values.numel(), dtype=values.dtype)).sum().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def off(seen: Tensor, truth: Tensor) -> float:
    values = seen.values() if seen.is_nested else seen
    assert values.shape == truth.shape
    return float((values.detach() - truth.detach()).abs().max()) if truth.numel() else 0.0


def close_gradients(seen: list[Tensor], truth: list[Tensor], limit: float = GRADIENT_LIMIT) -> None:
    assert len(seen) == len(truth) > 0
    for got, want in zip(seen, truth, strict=True):
        assert float((got - want).norm()) <= limit * float(want.norm()) + 1e-12


def check(
    ready: Any, plain: Any, batch: TensorDict, truth: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Log-probs, entropies if they are asked for, and gradients of all weights are those of each row alone. The
    log-probs of the replay, and of the rows."""
    seen = response_log_probs(ready, batch, **options)
    wanted = truth_of(plain, batch, options.get("temperature", 1.0)) if truth is None else (truth,)
    seen = seen if isinstance(seen, tuple) else (seen,)
    assert max(map(off, seen, wanted)) <= LIMIT

    def total(values: Any) -> Tensor:
        return values[0] + 0.5 * values[1] if len(seen) == 2 else values[0]

    close_gradients(gradients(ready.model, total([x.values() for x in seen])), gradients(plain, total(wanted)))
    return seen[0], wanted[0]


def refused(ready: Any, match: str, batch: TensorDict | None = None, **options: Any) -> None:
    with pytest.raises(ReplayError, match=match):
        response_log_probs(ready, batch_of() if batch is None else batch, **options)


def owners(model: Any) -> dict[str, Any]:
    """The parts that have a forward of their own."""
    return {name: vars(part)["forward"] for name, part in model.named_modules() if "forward" in vars(part)}


def checkpoint(model: Any, reentrant: bool) -> None:
    """As `gradient_checkpointing_enable`, whose name changed."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
