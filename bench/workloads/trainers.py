"""The batches of other trainers with the rows of a workload: their names, shapes, dtypes and sides of padding, and the
padding of each batch to its longest row. `tests/fields/test_presets.py` names the files of the trainers.

Engines give log-probs and values of every token but the first, also of prompts, where the trainer keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from bench.workloads import PAD_ID, batch_of
from bench.workloads.rows import Array


@dataclass
class Tokens:
    """A batch without its padding.

    Attributes:
        prompt, length: int64 [B], tokens of the prompt, and all.
        ids, scored, lead: [T], token ids; 1 for tokens that the policy sampled; 1 for tokens of the prompt.
        log_probs: three times float32 [T], near to each other; the first token of a row has 0.
        reward, advantage: float32 [B].
    """

    prompt: Array
    length: Array
    ids: Array
    scored: Array
    lead: Array
    log_probs: list[Array]
    reward: Array
    advantage: Array

    @classmethod
    def of(cls, workload: str, rows: int, scale: float) -> Tokens:
        batch = {name: field.numpy() for name, field in batch_of(workload, rows, scale=scale).items()}
        mask, p = batch["attention_mask"] != 0, batch["prompts"].shape[1]
        scored = np.concatenate([np.zeros_like(mask[:, :p], np.int64), batch["response_mask"]], 1)[mask]
        length, prompt = mask.sum(1), mask[:, :p].sum(1)
        lead = np.concatenate([np.arange(n) < q for n, q in zip(length, prompt, strict=True)])
        first = np.cumsum(length) - length
        rng, log_probs = np.random.default_rng(3), list[Array]()
        of_prompt = -rng.standard_gamma(0.35, len(scored)).astype(np.float32) - np.float32(1e-6)
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs"):
            values = of_prompt * np.exp(np.float32(0.02) * rng.standard_normal(len(scored), dtype=np.float32))
            values[~lead] = batch[name][mask[:, p:]]
            values[first] = 0
            log_probs.append(values)
        reward, advantage = batch["token_level_scores"].sum(1), batch["advantages"]
        of_row = advantage[np.arange(rows), (advantage != 0).argmax(1)]
        return cls(prompt, length, batch["input_ids"][mask], scored, lead, log_probs, reward, of_row)

    def spread(self, of_row: Array) -> Array:
        """Numbers of rows, [B], for each token of the response [T], and 0 for the prompt."""
        return np.repeat(of_row, self.length) * ~self.lead

    def ends(self, cut: int = 0) -> Array:
        """The reward at the last token, [T]."""
        out = np.zeros(len(self.ids), np.float32)
        out[np.cumsum(self.length) - 1 - cut] = self.reward
        return out


def padded(values: Array, lengths: Array, dtype: torch.dtype, pad: float = 0, left: bool = False) -> torch.Tensor:
    """[B, longest] of packed values."""
    width = int(lengths.max())
    place, begin = np.arange(width), (width - lengths if left else 0 * lengths)[:, None]
    mask = (place >= begin) & (place < begin + lengths[:, None])
    out = torch.full(mask.shape, pad, dtype=dtype)
    out[torch.from_numpy(mask)] = torch.from_numpy(values).to(dtype)
    return out


def skyrl(t: Tokens) -> dict[str, torch.Tensor]:
    of, int64, f32 = ~t.lead, torch.int64, torch.float32
    response = t.length - t.prompt
    right = -int(response.max())

    def on_response(values: Array, dtype: torch.dtype = f32) -> torch.Tensor:
        return padded(values[of], response, dtype, left=True)

    advantages = on_response(t.spread(t.advantage))
    fields = {
        "sequences": padded(t.ids, t.length, int64, PAD_ID, left=True),
        "attention_mask": padded(np.ones_like(t.ids), t.length, int64, left=True),
        "response_mask": on_response(np.ones_like(t.ids), int64),
        "loss_mask": on_response(t.scored),
        "rollout_logprobs": on_response(t.log_probs[2] * t.scored),
    }
    for name, values in zip(("action_log_probs", "base_action_log_probs"), t.log_probs, strict=False):
        fields[name] = padded(values, t.length, f32, left=True)[:, right:].clone()
    return fields | {"advantages": advantages, "returns": advantages.clone()}


def openrlhf(t: Tokens) -> dict[str, torch.Tensor]:
    mask = padded(t.scored, t.length, torch.int64)[:, 1:].clone()
    log_probs = [padded(values, t.length, torch.float32)[:, 1:] * mask for values in t.log_probs]
    total = padded(np.repeat(t.reward, t.length), t.length, torch.float32)[:, 1:].clone()
    return {
        "sequences": padded(t.ids, t.length, torch.int64),
        "attention_mask": padded(np.ones_like(t.ids), t.length, torch.int64),
        "action_mask": mask,
        **dict(zip(("action_log_probs", "base_action_log_probs", "rollout_log_probs"), log_probs, strict=True)),
        "returns": total,
        "advantages": torch.where(
            total.new_tensor(t.length)[:, None] > torch.arange(1, total.shape[1] + 1), total - 0.4, 0
        ),
    }


def areal(t: Tokens) -> dict[str, torch.Tensor]:
    float32, int32 = torch.float32, torch.int32
    mask = padded(t.scored, t.length, float32).roll(-1, 1)
    advantages = padded(np.repeat(t.advantage, t.length), t.length, float32) * mask
    return {
        "input_ids": padded(t.ids, t.length, int32),
        "loss_mask": mask,
        "logprobs": padded(t.log_probs[2], t.length, float32).roll(-1, 1) * mask,
        "versions": padded(8 * t.scored - 1, t.length, int32),
        "attention_mask": padded(np.ones_like(t.ids), t.length, torch.bool),
        "prox_logp": padded(t.log_probs[0], t.length, float32),
        "ref_logp": padded(t.log_probs[1], t.length, float32) * mask,
        "advantages": advantages,
        "returns": advantages.clone(),
        "kl_rewards": -0.0 * mask,
        "tot_rewards": padded(t.ends(1), t.length, float32),
    }


def nemo_rl(t: Tokens) -> dict[str, torch.Tensor]:
    names = ("prev_logprobs", "reference_policy_logprobs")
    ids = padded(t.ids, t.length, torch.int64, PAD_ID)
    return {
        "input_ids": ids,
        "input_lengths": torch.from_numpy(t.length).int(),
        "generation_logprobs": padded(t.log_probs[2] * t.scored, t.length, torch.float32),
        "token_mask": padded(t.scored, t.length, torch.int64),
        **{n: padded(v, t.length, torch.float32, -0.0) for n, v in zip(names, t.log_probs, strict=False)},
        "advantages": torch.from_numpy(t.advantage)[:, None].expand(ids.shape).clone(),
    }


def trl(t: Tokens) -> dict[str, torch.Tensor]:
    of, f32 = ~t.lead, torch.float32
    sides = {"prompt": (t.lead, t.prompt, True), "completion": (of, t.length - t.prompt, False)}
    fields: dict[str, torch.Tensor] = {}
    for side, (on, lengths, left) in sides.items():
        fields[f"{side}_ids"] = padded(t.ids[on], lengths, torch.int64, PAD_ID, left)
        fields[f"{side}_mask"] = padded(np.ones_like(t.ids[on]), lengths, torch.int64, left=left)
    for side, values in zip(("old", "ref", "sampling"), t.log_probs, strict=True):
        fields[f"{side}_per_token_logps"] = padded(values[of], t.length - t.prompt, f32)
    ratio = np.where(t.scored != 0, np.exp(t.log_probs[0] - t.log_probs[2]), np.float32(1))[of]
    fields["importance_sampling_ratio"] = padded(ratio, t.length - t.prompt, f32, 1)
    fields["tool_mask"] = padded(t.scored[of], t.length - t.prompt, torch.int64, 1)
    return fields


def prime_rl(t: Tokens) -> dict[str, torch.Tensor]:
    position = np.arange(len(t.ids)) - np.repeat(np.cumsum(t.length) - t.length, t.length)
    return {
        "input_ids": padded(t.ids, t.length, torch.int64, PAD_ID),
        "attention_mask": padded(np.ones_like(t.ids), t.length, torch.bool),
        "position_ids": padded(position, t.length, torch.int64),
        "loss_mask": padded(t.scored, t.length, torch.bool),
        "inference_logprobs": padded(t.log_probs[2] * t.scored, t.length, torch.float32),
        "advantages": padded(t.spread(t.advantage), t.length, torch.float32),
        "rewards": padded(np.repeat(t.reward, t.length), t.length, torch.float32),
        "temperatures": padded(np.ones(len(t.ids)), t.length, torch.float32, 1),
    }


def slime(t: Tokens) -> dict[str, torch.Tensor]:
    response = t.length - t.prompt

    def jagged(values: Array, lengths: Array) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(values), torch.from_numpy(np.append(0, np.cumsum(lengths))),
            min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max()),
        )  # fmt: skip

    of_response = dict(zip(("log_probs", "ref_log_probs", "rollout_log_probs"), t.log_probs, strict=True))
    of_response |= {"loss_masks": t.scored.astype(np.int32), "advantages": t.spread(t.advantage)}
    fields = {name: jagged(values[~t.lead], response) for name, values in of_response.items()}
    return fields | {"tokens": jagged(t.ids, t.length), "response_lengths": torch.from_numpy(response)}


TRAINERS: dict[str, Callable[[Tokens], dict[str, torch.Tensor]]] = {
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "areal": areal,
    "nemo_rl": nemo_rl,
    "trl": trl,
    "prime_rl": prime_rl,
    "slime": slime,
}


def trainer_batch(trainer: str, workload: str, rows: int, scale: float = 1.0) -> TensorDict:
    """The batch [rows] of a trainer, a name of TRAINERS, with the rows of a workload."""
    return TensorDict(TRAINERS[trainer](Tokens.of(workload, rows, scale)), batch_size=[rows])
