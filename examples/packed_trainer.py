"""Supervised fine-tuning, then steps weighted by rewards: a plain loop over packed rows, beside the padded one.

    samples --> PackedCollator.micro_batches --> model, with maskpack's attention --> packed_log_probs --> loss
    samples --> padded to the longest        --> model, with its own attention    --> cross entropy    --> loss

    python examples/packed_trainer.py        a tiny model of random weights; a few seconds on two cores

A step's loss is the mean over its loss tokens, each with the weight of its sample: 1, or the sample's advantage. Both
loops see the same samples, and share nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from maskpack.adapters.transformers import replayable
from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.ops import packed_log_probs

VOCABULARY = 64
ROWS, TOKEN_BUDGET, PADDED_ROWS = 24, 128, 6
STEPS, WEIGHTED_STEPS = 16, 8
LEARNING_RATE = 3e-3

Samples = Sequence[dict[str, Any]]
Losses = Callable[[Any, Samples], Iterator[Tensor]]


def tiny_model() -> transformers.Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return transformers.Qwen3ForCausalLM(config)


def samples_of(step: int, *, weighted: bool) -> Samples:
    """Two numbers, and the series that they begin, 3 5 7 9 ...; a third of the series have wrong numbers in them. Their
    reward is the share of right ones, their advantage the reward less its mean."""
    rng = random.Random(step)
    out: list[dict[str, Any]] = []
    rewards: list[float] = []
    for _ in range(ROWS):
        first, by, length = rng.randrange(VOCABULARY), rng.randrange(1, 6), rng.randrange(4, 49)
        right = [(first + by * place) % VOCABULARY for place in range(length)]
        wrong = rng.choice([0.0, 0.0, 0.3])
        ids = right[:2] + [rng.randrange(VOCABULARY) if rng.random() < wrong else token for token in right[2:]]
        rewards.append(sum(token == other for token, other in zip(ids, right, strict=True)) / length)
        out.append({"input_ids": ids, "completion_mask": [0, 0] + [1] * (length - 2)})
    mean = sum(rewards) / ROWS
    for sample, reward in zip(out, rewards, strict=True):
        sample["weights"] = [reward - mean if weighted else 1.0] * len(sample["input_ids"])
    return out


# -------------------------------------------------------------------- packed

COLLATOR = PackedCollator(extras=("weights",))


def packed_losses(model: Any, samples: Samples) -> Iterator[Tensor]:
    """The loss of each micro-batch; they add up to that of the step."""
    _, micro_batches = COLLATOR.micro_batches(samples, TOKEN_BUDGET)
    loss_tokens = sum(int((inputs["labels"] != -100).sum()) for inputs in micro_batches)
    for inputs in micro_batches:
        labels, weights = inputs.pop("labels")[0], inputs.pop("weights")[0]
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0]
        scored = (labels != -100).nonzero()[:, 0]  # no first token of a row is among them
        log_probs = packed_log_probs(hidden[scored - 1], model.lm_head.weight, labels[scored])
        yield -(log_probs * weights[scored]).sum() / loss_tokens


# -------------------------------------------------------------------- padded


def padded_losses(model: Any, samples: Samples) -> Iterator[Tensor]:
    loss_tokens = sum(sum(sample["completion_mask"]) for sample in samples)
    for begin in range(0, len(samples), PADDED_ROWS):
        part = samples[begin : begin + PADDED_ROWS]
        width = max(len(sample["input_ids"]) for sample in part)
        ids, mask, weights = (
            torch.tensor([[*sample[name], *[0] * (width - len(sample[name]))] for sample in part])
            for name in ("input_ids", "completion_mask", "weights")
        )
        real = torch.tensor([[place < len(sample["input_ids"]) for place in range(width)] for sample in part])
        logits = model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[:, :-1]
        losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        yield (losses * mask[:, 1:] * weights[:, 1:]).sum() / loss_tokens


# -------------------------------------------------------------------- the loop


def train(model: Any, losses: Losses) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    seen: list[float] = []
    for step in range(STEPS + WEIGHTED_STEPS):
        total = 0.0
        for loss in losses(model, samples_of(step, weighted=step >= STEPS)):
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(total)
    return seen


def train_packed() -> list[float]:
    return train(replayable(tiny_model()).model, packed_losses)


def train_padded() -> list[float]:
    return train(tiny_model(), padded_losses)


def main() -> None:
    packed, padded = train_packed(), train_padded()
    for step, (one, other) in enumerate(zip(packed, padded, strict=True)):
        kind = "rewards" if step >= STEPS else "fine-tuning"
        print(f"step {step:2} {kind:12} packed {one:9.6f}  padded {other:9.6f}  apart {abs(one - other):.1e}")


if __name__ == "__main__":
    main()
