"""Trajectories as the agent loop of verl's V1 trainer puts them into TransferQueue: what `as_dict` of its output gives,
the columns of the data set, and what it adds. Lengths and values are those of the reference workload, with 8 samples
a prompt.

    int64      prompts, responses, response_mask, loss_mask (the same tensor), input_ids, position_ids
    float32    rollout_log_probs, rm_scores (the reward at the last token)
    others     uid, data_source, index, raw_prompt, reward_model, extra_info, metrics, ...
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, require_same_tensor
from bench.workloads.reference import PROMPT_WIDTH, RESPONSE_WIDTH, make_batch

GROUP = 8
_WORDS = ("the", "sum", "of", "two", "numbers", "is", "given", "find", "value", "such", "that", "each", "integer")


@dataclass(frozen=True)
class Trajectory:
    """What one call of the agent loop puts.

    Attributes:
        key: of the sample in TransferQueue.
        tag: its metadata, which the controller keeps.
        fields: its columns, tensors without a batch dimension and objects.
        logits: float32 [T] each, what the actor computes: log_probs, entropy.
        later: float32 [R] each, what the trainer puts later: old_log_probs, entropy, advantages, returns.
    """

    key: str
    tag: dict[str, Any]
    fields: dict[str, Any]
    logits: dict[str, Tensor]
    later: dict[str, Tensor]


def trajectories(
    rows: int,
    *,
    prompt_width: int = PROMPT_WIDTH,
    response_width: int = RESPONSE_WIDTH,
    seed: int = 0,
) -> list[Trajectory]:
    """`rows` trajectories, GROUP for each prompt; the same arguments give the same bits."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rows, prompt_width=prompt_width, response_width=response_width, group=GROUP, seed=seed)
    on_prompt = batch["attention_mask"][:, :prompt_width].bool()
    on_response = batch["attention_mask"][:, prompt_width:].bool()
    shared: dict[str, Any] = {}
    result: list[Trajectory] = []
    for row in range(rows):
        prompts = batch["prompts"][row][on_prompt[row]]
        if row % GROUP == 0:
            shared = _of_the_data_set(rng, row // GROUP, len(prompts))
        response = {
            name: batch[name][row][on_response[row]]
            for name in ("responses", "response_mask", "rollout_log_probs", "token_level_scores", *_LATER.values())
        }
        result.append(_trajectory(rng, row, prompts, response, shared))
    return result


_LATER = {"old_log_probs": "old_log_probs", "entropy": "entropys", "advantages": "advantages", "returns": "returns"}
"""Fields that the trainer puts, and those of the workload that they are."""


def _trajectory(
    rng: np.random.Generator,
    row: int,
    prompts: Tensor,
    response: dict[str, Tensor],
    shared: dict[str, Any],
) -> Trajectory:
    input_ids = torch.cat([prompts, response["responses"]])
    seconds = float(rng.gamma(4.0, 5.0))
    fields: dict[str, Any] = {
        "num_turns": 2,
        "metrics": {"generate_sequences": seconds, "tool_calls": 0.0, "compute_score": 0.01, "num_preempted": -1},
        "prompts": prompts.clone(),
        "responses": response["responses"],
        "response_mask": response["response_mask"],
        "rollout_log_probs": response["rollout_log_probs"],
        "rm_scores": response["token_level_scores"],
        "extra_fields": {"min_global_steps": 1, "max_global_steps": 1, "reward_extra_info": {}},
        **shared,
        "loss_mask": response["response_mask"],
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "multi_modal_inputs": {},
    }
    lengths = {"prompt_len": len(prompts), "response_len": len(response["responses"]), "seq_len": len(input_ids)}
    steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
    later = {name: response[own] for name, own in _LATER.items()}
    start = len(prompts) - 1  # the logit at a position scores the next token
    logits: dict[str, Tensor] = {}
    for name, own in (("log_probs", "old_log_probs"), ("entropy", "entropy")):
        logits[name] = torch.zeros(len(input_ids))
        logits[name][start:-1] = later[own]
    key = f"{shared['uid']}_{row % GROUP}_0"
    return Trajectory(key, {"status": "success"} | lengths | steps, fields, logits, later)


def _of_the_data_set(rng: np.random.Generator, index: int, tokens: int) -> dict[str, Any]:
    """The columns of one row of the data set, the same for all trajectories of its prompt."""
    text = " ".join(rng.choice(_WORDS, tokens))  # about four characters a token
    return {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": str(rng.integers(1000)), "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
        "raw_prompt": [{"content": text, "role": "user"}],
        "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        "index": index,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "uid": str(uuid.UUID(bytes=rng.bytes(16), version=4)),
        "global_steps": 1,
    }


# -------------------------------------------------------------------- batches


def batched(rows: Sequence[dict[str, Any]]) -> TensorDict:
    """What verl's `list_of_dict_to_tensordict` makes of rows: tensors of one shape are stacked, others are jagged,
    objects are a NonTensorStack."""
    return TensorDict({name: _column([row[name] for row in rows]) for name in rows[0]}, batch_size=[len(rows)])


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def arguments(rows: Sequence[Trajectory], partition: str) -> dict[str, Any]:
    """Those of `tq.kv_batch_put`."""
    fields = batched([row.fields for row in rows])
    tags = [row.tag for row in rows]
    return {"keys": [row.key for row in rows], "partition_id": partition, "fields": fields, "tags": tags}


def select(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: fields[name] for name in names}


def shuffled(count: int, parts: int) -> list[list[int]]:
    """The numbers below `count` in `parts` disjoint parts, in random order, the same each time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


def require_rows(call: str, seen: TensorDict, expected: Sequence[dict[str, Any]]) -> None:
    """Raises NotExact unless `seen` has the expected rows in this order: the same fields, and in each the same dtypes,
    shapes and bits, or equal objects whose tensors are so."""
    if seen.batch_size != torch.Size([len(expected)]) or set(seen.keys()) != set(expected[0]):
        raise NotExact(
            f"{call}: batch {tuple(seen.batch_size)} of {sorted(seen.keys())}; expected {len(expected)} rows of "
            f"{sorted(expected[0])}."
        )
    for name in expected[0]:
        column = seen.get(name)
        values = column.unbind() if isinstance(column, Tensor) else column.tolist()
        for number, (value, row) in enumerate(zip(values, expected, strict=True)):
            _require_same(f'{call}: field "{name}", row {number}', value, row[name])


def _require_same(what: str, seen: Any, expected: Any) -> None:
    if isinstance(expected, Tensor) and isinstance(seen, Tensor):
        require_same_tensor(what, seen, expected)
    elif isinstance(expected, dict) and isinstance(seen, dict) and list(seen) == list(expected):
        for key, value in expected.items():
            _require_same(f"{what}, {key}", seen[key], value)
    elif type(seen) is not type(expected) or isinstance(expected, (Tensor, dict)) or seen != expected:
        raise NotExact(f"{what} is {seen!r:.80}; expected {expected!r:.80}.")
