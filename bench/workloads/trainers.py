"""The batches of other trainers with the rows of a workload: their names, shapes, dtypes and sides of padding. Each is
padded to its longest row. `tests/fields/test_presets.py` names the files of the trainers.

Models give log-probs of every token but the first, also of prompts, where the trainer keeps them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.workloads import PAD_ID, batch_of
from bench.workloads.rows import Array

INT, FLOAT = torch.int64, torch.float32


class Tokens:
    """A batch without its padding: values of its T tokens, and `field`, which pads them again.

    Attributes:
        parts: the lengths [B] of rows and responses, and which tokens [T] these are.
        ids, ones, scored: int64 [T]; `scored` is 1 for tokens that the policy sampled.
        old, ref, rollout: float32 [T], log-probs that are near to each other.
        reward, advantage: float32 [T], of the row.
    """

    def __init__(self, workload: str, rows: int, scale: float) -> None:
        batch = {name: field.numpy() for name, field in batch_of(workload, rows, scale=scale).items()}
        mask, p = batch["attention_mask"] != 0, batch["prompts"].shape[1]
        lengths = mask.sum(1)
        response = (np.zeros_like(mask) | (np.arange(mask.shape[1]) >= p))[mask]
        self.parts = {"row": (lengths, response | True), "response": (mask[:, p:].sum(1), response)}
        self.ids, self.ones = batch["input_ids"][mask], np.ones(len(response), np.int64)
        self.scored = np.zeros_like(self.ones)
        self.scored[response] = batch["response_mask"][mask[:, p:]]
        rng = np.random.default_rng(3)
        of_prompt = -rng.standard_gamma(0.35, len(response)).astype(np.float32) - np.float32(1e-6)
        self.old, self.ref, self.rollout = (
            of_prompt * np.exp(np.float32(0.02) * rng.standard_normal(len(response), dtype=np.float32))
            for _ in range(3)
        )
        for name, values in (
            ("old_log_probs", self.old),
            ("ref_log_prob", self.ref),
            ("rollout_log_probs", self.rollout),
        ):
            values[response] = batch[name][mask[:, p:]]
            values[np.cumsum(lengths) - lengths] = 0
        self.sampled = self.rollout * self.scored.astype(np.float32)
        advantages = batch["advantages"]
        of_rows = batch["token_level_scores"].sum(1), advantages[np.arange(rows), (advantages != 0).argmax(1)]
        self.reward, self.advantage = (np.repeat(values, lengths) for values in of_rows)

    def field(
        self, values: Array, dtype: torch.dtype = FLOAT, pad: float = 0, *, part: str = "row", left: bool = False
    ) -> Tensor:
        """[B, longest], the values of a part of each row."""
        lengths, on = self.parts[part]
        place, begin = np.arange(lengths.max()), (lengths.max() - lengths if left else 0 * lengths)[:, None]
        mask = (place >= begin) & (place < begin + lengths[:, None])
        out = torch.full(mask.shape, pad, dtype=dtype)
        out[torch.from_numpy(mask)] = torch.from_numpy(values[on]).to(dtype)
        return out


def skyrl(t: Tokens) -> dict[str, Tensor]:
    def response(values: Array, dtype: torch.dtype = FLOAT) -> Tensor:
        return t.field(values, dtype, part="response", left=True)

    width, advantages = int(t.parts["response"][0].max()), response(t.advantage)
    return {
        "sequences": t.field(t.ids, INT, PAD_ID, left=True),
        "attention_mask": t.field(t.ones, INT, left=True),
        "response_mask": response(t.ones, INT),
        "loss_mask": response(t.scored),
        "rollout_logprobs": response(t.sampled),
        "action_log_probs": t.field(t.old, left=True)[:, -width:].clone(),
        "base_action_log_probs": t.field(t.ref, left=True)[:, -width:].clone(),
        "advantages": advantages,
        "returns": advantages.clone(),
    }


def openrlhf(t: Tokens) -> dict[str, Tensor]:
    mask, total = t.field(t.scored, INT)[:, 1:].clone(), t.field(t.reward)[:, 1:].clone()
    return {
        "sequences": t.field(t.ids, INT),
        "attention_mask": t.field(t.ones, INT),
        "action_mask": mask,
        "action_log_probs": t.field(t.old)[:, 1:] * mask,
        "base_action_log_probs": t.field(t.ref)[:, 1:] * mask,
        "rollout_log_probs": t.field(t.sampled)[:, 1:].clone(),
        "returns": total,
        "advantages": t.field(t.reward - np.float32(0.4))[:, 1:].clone(),
    }


TRAINERS: dict[str, Callable[[Tokens], dict[str, Tensor]]] = {made.__name__: made for made in (skyrl, openrlhf)}


def trainer_batch(trainer: str, workload: str, rows: int, scale: float = 1.0) -> TensorDict:
    """The batch [rows] of a trainer, a name of TRAINERS, with the rows of a workload."""
    return TensorDict(TRAINERS[trainer](Tokens(workload, rows, scale)), batch_size=[rows])
