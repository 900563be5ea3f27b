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
        parts: the lengths [B] of rows, prompts and responses, and which tokens [T] these are.
        ids, ones, scored: int64 [T]; `scored` is 1 for tokens that the policy sampled.
        old, ref, rollout: float32 [T], log-probs that are near to each other.
        reward, advantage: float32 [T], of the row.
    """

    def __init__(self, workload: str, rows: int, scale: float) -> None:
        batch = {name: field.numpy() for name, field in batch_of(workload, rows, scale=scale).items()}
        mask, p = batch["attention_mask"] != 0, batch["prompts"].shape[1]
        lengths = mask.sum(1)
        response = (np.zeros_like(mask) | (np.arange(mask.shape[1]) >= p))[mask]
        counts = mask[:, :p].sum(1), mask[:, p:].sum(1)
        self.parts = {"row": (lengths, response | True), "prompt": (counts[0], ~response)}
        self.parts["response"] = counts[1], response
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


def areal(t: Tokens) -> dict[str, Tensor]:
    """After compute_advantages: column t of masks and log-probs is for token t + 1."""
    mask = t.field(t.scored).roll(-1, 1)
    advantages = t.field(t.advantage) * mask
    return {
        "input_ids": t.field(t.ids, torch.int32),
        "loss_mask": mask,
        "logprobs": t.field(t.rollout).roll(-1, 1) * mask,
        "versions": t.field(8 * t.scored - 1, torch.int32),
        "attention_mask": t.field(t.ones, torch.bool),
        "prox_logp": t.field(t.old).roll(-1, 1),
        "ref_logp": t.field(t.ref).roll(-1, 1) * mask,
        "advantages": advantages,
        "returns": advantages.clone(),
        "kl_rewards": -0.0 * mask,
    }


def nemo_rl(t: Tokens) -> dict[str, Tensor]:
    return {
        "input_ids": (ids := t.field(t.ids, INT, PAD_ID)),
        "input_lengths": torch.from_numpy(t.parts["row"][0]).int(),
        "generation_logprobs": t.field(t.sampled),
        "token_mask": t.field(t.scored, INT),
        "prev_logprobs": t.field(t.old, pad=-0.0),
        "reference_policy_logprobs": t.field(t.ref, pad=-0.0),
        "advantages": t.field(t.advantage)[:, :1].expand(ids.shape).clone(),
    }


def trl(t: Tokens) -> dict[str, Tensor]:
    ratio = np.where(t.scored != 0, np.exp(t.old - t.rollout), np.float32(1))
    return {
        "prompt_ids": t.field(t.ids, INT, PAD_ID, part="prompt", left=True),
        "prompt_mask": t.field(t.ones, INT, part="prompt", left=True),
        "completion_ids": t.field(t.ids, INT, PAD_ID, part="response"),
        "completion_mask": t.field(t.ones, INT, part="response"),
        "old_per_token_logps": t.field(t.old, part="response"),
        "ref_per_token_logps": t.field(t.ref, part="response"),
        "sampling_per_token_logps": t.field(t.rollout, part="response"),
        "importance_sampling_ratio": t.field(ratio, FLOAT, 1, part="response"),
        "tool_mask": t.field(t.scored, INT, 1, part="response"),
    }


def prime_rl(t: Tokens) -> dict[str, Tensor]:
    mask = t.field(t.ones, torch.bool)
    return {
        "input_ids": t.field(t.ids, INT, PAD_ID),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1) * mask,
        "loss_mask": t.field(t.scored, torch.bool),
        "inference_logprobs": t.field(t.sampled),
        "advantages": t.field(t.advantage),
        "rewards": t.field(t.reward),
        "temperatures": t.field(t.ones, FLOAT, 1),
    }


def slime(t: Tokens) -> dict[str, Tensor]:
    bounds = {part: torch.from_numpy(np.append(0, np.cumsum(lengths))) for part, (lengths, _) in t.parts.items()}

    def jagged(values: Array, part: str = "response") -> Tensor:
        lengths, on = t.parts[part]
        low, high = int(lengths.min()), int(lengths.max())
        return torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(values[on]), bounds[part], min_seqlen=low, max_seqlen=high
        )

    of_responses = {"log_probs": t.old, "ref_log_probs": t.ref, "rollout_log_probs": t.sampled}
    of_responses |= {"loss_masks": t.scored.astype(np.int32), "advantages": t.advantage}
    return {"tokens": jagged(t.ids, "row")} | {name: jagged(values) for name, values in of_responses.items()}


TRAINERS: dict[str, Callable[[Tokens], dict[str, Tensor]]] = {
    made.__name__: made for made in (skyrl, openrlhf, areal, nemo_rl, trl, prime_rl, slime)
}


def trainer_batch(trainer: str, workload: str, rows: int, scale: float = 1.0) -> TensorDict:
    """The batch [rows] of a trainer, a name of TRAINERS, with the rows of a workload."""
    return TensorDict(TRAINERS[trainer](Tokens(workload, rows, scale)), batch_size=[rows])
