"""What all workloads share: real positions, token ids and the fields that follow from them, log-probs and rewards.

Shape letters: B rows, S P R widths, T real tokens in all, F trailing feature dims.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

PAD_ID = 151_643
_END_OF_TURN = 151_645

Array = npt.NDArray[Any]


class Lengths(NamedTuple):
    """Tokens of the prompt and of the response of each row, int64 [B], and the widths P and R."""

    prompt: Array
    response: Array
    prompt_width: int
    response_width: int


@dataclass(frozen=True)
class Rows:
    """Which positions are real.

    Attributes:
        rng: the source of all values.
        prompt, response: int64 [B], lengths.
        mask: bool [B, S].
        prompt_width: P.
        group: rows that share one prompt.
    """

    rng: np.random.Generator
    prompt: Array
    response: Array
    mask: Array
    prompt_width: int
    group: int

    @classmethod
    def of(cls, rng: np.random.Generator, lengths: Lengths, group: int) -> Rows:
        return cls(rng, lengths.prompt, lengths.response, mask_of(lengths), lengths.prompt_width, group)

    @property
    def on_response(self) -> Array:
        """bool [B, R]."""
        return self.mask[:, self.prompt_width :]

    @property
    def response_tokens(self) -> int:
        return int(self.response.sum())


def token_fields(ids: Array, mask: Array, prompt_width: int) -> dict[str, Array]:
    """The fields that follow from token ids and a mask, [B, S] each; all are new but `input_ids`."""
    return {
        "prompts": ids[:, :prompt_width].copy(),
        "responses": ids[:, prompt_width:].copy(),
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "position_ids": np.clip(np.cumsum(mask, axis=1, dtype=np.int64) - 1, 0, None),
    }


def as_batch(fields: dict[str, Array]) -> TensorDict:
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    return TensorDict(tensors, batch_size=[len(fields["input_ids"])])


def log_normal(rng: np.random.Generator, count: int, sigma: float, mean: float, most: int) -> Array:
    """Log-normal lengths, clipped to [1, most] and scaled so that their mean after clipping is `mean`."""
    shape = np.exp(sigma * rng.standard_normal(count))

    def scaled(scale: float) -> Array:
        return np.clip(np.rint(scale * shape), 1, most).astype(np.int64)

    low, high = 0.0, 100.0 * most
    for _ in range(60 if count else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if scaled(middle).mean() < mean else (low, middle)
    return scaled(high)


def padded_to_longest(prompt: Array, response: Array) -> Lengths:
    return Lengths(prompt, response, int(prompt.max()), int(response.max()))


def scaled(counts: Array, scale: float) -> Array:
    return np.maximum(np.rint(scale * counts), 1).astype(np.int64)


def mask_of(of: Lengths) -> Array:
    """bool [B, S]."""
    column, p = np.arange(of.prompt_width + of.response_width), of.prompt_width
    return (column >= p - of.prompt[:, None]) & (column < p + of.response[:, None])


def tokens(shape: Rows) -> dict[str, Array]:
    rng, p = shape.rng, shape.prompt_width
    first = slice(None, None, shape.group)
    group_prompts = padded(token_ids(rng, int(shape.prompt[first].sum())), shape.mask[first, :p], PAD_ID)
    prompts = np.repeat(group_prompts, shape.group, axis=0)[: len(shape.prompt)]
    ids = token_ids(rng, shape.response_tokens)
    finished = shape.response < shape.on_response.shape[1]
    ids[np.cumsum(shape.response)[finished] - 1] = _END_OF_TURN
    responses = padded(ids, shape.on_response, PAD_ID)
    fields = token_fields(np.concatenate([prompts, responses], axis=1), shape.mask, p)
    return {**fields, "response_mask": fields["attention_mask"][:, p:].copy()}


def token_ids(rng: np.random.Generator, count: int, below: int = PAD_ID) -> Array:
    """Zipf-like ids: small ids are frequent, as with byte-pair vocabularies."""
    return np.exp(rng.random(count) * np.log(below)).astype(np.int64) - 1


def padded(values: Array, mask: Array, pad: float) -> Array:
    """Packed values [T, *F] at the real positions of the mask [B, width]."""
    out = np.full((*mask.shape, *values.shape[1:]), pad, dtype=values.dtype)
    out[mask] = values
    return out


def log_probs(shape: Rows, response_mask: Array) -> dict[str, Array]:
    """The engine reports no log-prob for tool output, which it did not sample; the trainer's policies score it."""
    rng, count = shape.rng, shape.response_tokens

    def moved(log_probs: Array, spread: float) -> Array:
        return log_probs * np.exp(spread * rng.standard_normal(count, dtype=np.float32))

    rollout = -rng.standard_gamma(0.35, count).astype(np.float32) - np.float32(1e-6)
    old = moved(rollout, 0.02)
    sampled = response_mask[shape.on_response] != 0
    packed = {
        "rollout_log_probs": np.where(sampled, rollout, np.float32(0)),
        "old_log_probs": old,
        "ref_log_prob": moved(old, 0.05),
        "entropys": rng.standard_gamma(0.5, count).astype(np.float32),
    }
    return {name: padded(values, shape.on_response, 0) for name, values in packed.items()}


def rewards(shape: Rows, response_mask: Array) -> dict[str, Array]:
    """GRPO: a reward of 0 or 1 at the last token; every sampled token has the row's advantage over its group."""
    rows = len(shape.response)
    group = np.arange(rows) // shape.group
    solved = shape.rng.random(group.max(initial=-1) + 1)[group]
    reward = (shape.rng.random(rows) < solved).astype(np.float32)
    size = np.maximum(np.bincount(group), 1)
    mean = (np.bincount(group, reward) / size)[group]
    spread = np.sqrt((np.bincount(group, (reward - mean) ** 2) / size)[group])
    advantage = ((reward - mean) / (spread + 1e-6)).astype(np.float32)
    scores = np.zeros(response_mask.shape, np.float32)
    scores[np.arange(rows), shape.response - 1] = reward
    advantages = np.where(response_mask != 0, advantage[:, None], np.float32(0))
    return {
        "advantages": advantages,
        "returns": advantages.copy(),
        "token_level_scores": scores,
        "token_level_rewards": scores.copy(),
    }


def critic(shape: Rows) -> dict[str, Array]:
    values, advantages = shape.rng.standard_normal((2, shape.response_tokens), dtype=np.float32)
    packed = {"advantages": advantages, "returns": advantages + values, "values": values}
    return {name: padded(column, shape.on_response, 0) for name, column in packed.items()}


def recorded(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())
