"""Batches as trainers make them, built row by row in plain loops, and their comparison by bits.

Nothing here calls maskpack: what the tests expect does not come from what they test.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

PAD = 151643
ROWS = ((2, 3), (5, 6), (1, 0), (0, 4), (0, 0), (5, 1), (3, 6))
"""Prompt and response tokens of each row; full rows, rows without a prompt or a response, and an empty row."""
PROMPT, RESPONSE = 5, 6
EDGE = "edge"

# -------------------------------------------------------------------- comparison by bits


def freeze(value: Any) -> Any:
    """A value as plain data that is equal only to the same bits in the same shape, dtype, order and place."""
    if is_non_tensor(value):
        if isinstance(value, NonTensorStack):
            return ("stack", tuple(value.batch_size), freeze(value.tolist()))
        return ("data", tuple(value.batch_size), freeze(value.data))
    if isinstance(value, TensorDictBase):
        entries = [(name, freeze(entry)) for name, entry in value.items()]
        return ("batch", tuple(value.batch_size), str(value.device), entries)
    if isinstance(value, Tensor):
        if value.is_nested:
            return ("jagged", value._ragged_idx, freeze(value.values()), freeze(value.offsets()))
        return ("tensor", str(value.dtype), tuple(value.shape), str(value.device), bits(value))
    if isinstance(value, np.ndarray):
        data = [freeze(item) for item in value.reshape(-1)] if value.dtype == object else value.tobytes()
        return ("array", str(value.dtype), value.shape, data)
    if isinstance(value, Mapping):
        return (type(value).__name__, [(freeze(name), freeze(item)) for name, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [freeze(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, [freeze(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return (type(value).__name__, repr(value))


def bits(x: Tensor) -> bytes:
    x = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_same(seen: Any, expected: Any) -> None:
    """Bit for bit the same; a failure names the entries that differ."""
    left, right = freeze(seen), freeze(expected)
    if left == right:
        return
    if isinstance(seen, TensorDictBase) and isinstance(expected, TensorDictBase):
        assert list(seen.keys()) == list(expected.keys()), "keys or their order"
        assert seen.batch_size == expected.batch_size, "batch size"
        assert seen.device == expected.device, "device"
        for name in seen.keys():  # noqa: SIM118  (TensorDict iterates over rows)
            a, b = seen.get(name), expected.get(name)
            assert freeze(a) == freeze(b), f"{name}:\n{a}\nexpected\n{b}"
    raise AssertionError(f"{seen}\nexpected\n{expected}")


# -------------------------------------------------------------------- fields


def real_positions(axis: str, rows: Sequence[tuple[int, int]], prompt: int, response: int) -> list[list[bool]]:
    """The mask of an axis as lists: prompts end at column P, responses begin there."""
    lines = []
    for p, r in rows:
        head = [column >= prompt - p for column in range(prompt)]
        tail = [column < r for column in range(response)]
        lines.append({"prompt": head, "response": tail, "sequence": head + tail}[axis])
    return lines


def element(dtype: torch.dtype, rng: random.Random) -> Any:
    """A value that is no pad; among floats also the awkward ones."""
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return rng.choice([rng.uniform(-3, 3), rng.uniform(-3, 3), -0.0, float("nan"), 1.0, 0.0])
    return rng.randint(1, 100)


def field(
    mask: Sequence[Sequence[bool]],
    dtype: torch.dtype,
    pad: Any = 0,
    trailing: Sequence[int] = (),
    *,
    seed: int = 1,
    width: int | None = None,
) -> Tensor:
    """A tensor (B, width, *trailing): an element where the mask is true, the pad elsewhere."""
    rng = random.Random(seed)
    width = len(mask[0]) if width is None else width
    out = torch.full((len(mask), width, *trailing), 0 if pad == EDGE else pad, dtype=dtype)
    for b, line in enumerate(mask):
        real = [s for s, on in enumerate(line) if on]
        for s in real:
            for place in np.ndindex(*trailing):
                out[(b, s, *place)] = element(dtype, rng)
        if pad == EDGE and real:
            for s in range(width):
                before = [other for other in real if other <= s]
                out[b, s] = out[b, before[-1] if before else real[0]].clone()
    return out


def of(axis: str, dtype: torch.dtype, pad: Any = 0, trailing: Sequence[int] = (), **more: Any) -> Tensor:
    """A field on an axis of the rows ROWS."""
    rows, prompt = more.pop("rows", ROWS), more.pop("prompt", PROMPT)
    response = more.pop("response", RESPONSE)
    width = {"prompt": prompt, "response": response, "sequence": prompt + response}[axis]
    return field(real_positions(axis, rows, prompt, response), dtype, pad, trailing, width=width, **more)


def tokens(
    rows: Sequence[tuple[int, int]] = ROWS, prompt: int = PROMPT, response: int = RESPONSE, *, mask=torch.int64
) -> dict[str, Tensor]:
    """The token fields and the attention mask of a rollout."""
    where = {"rows": rows, "prompt": prompt, "response": response}
    ids = of("sequence", torch.int64, PAD, **where)
    on = real_positions("sequence", rows, prompt, response)
    attention = torch.tensor(on, dtype=torch.bool).reshape(len(rows), prompt + response).to(mask)
    return {
        "prompts": ids[:, :prompt].clone(),
        "responses": ids[:, prompt:].clone(),
        "input_ids": ids,
        "attention_mask": attention,
    }


def positions(attention: Tensor) -> Tensor:
    """position_ids: 0 up to the first token, then counting, then the last number again."""
    out = torch.zeros(attention.shape, dtype=torch.int64)
    for b, line in enumerate(attention.tolist()):
        seen = 0
        for s, on in enumerate(line):
            seen += on != 0
            out[b, s] = max(seen - 1, 0)
    return out


def response_mask(rows: Sequence[tuple[int, int]] = ROWS, response: int = RESPONSE, *, holes: bool = False) -> Tensor:
    """1 at response tokens; with `holes`, every second and the last one is a tool token, 0."""
    out = torch.zeros(len(rows), response, dtype=torch.int64)
    for b, (_, r) in enumerate(rows):
        for s in range(r):
            out[b, s] = 0 if holes and (s % 2 == 1 or (s == r - 1 and r > 1)) else 1
    return out


RESPONSE_FIELDS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropys",
    "values",
    "sum_pi_squared",
    "advantages",
    "returns",
    "token_level_scores",
    "token_level_rewards",
    "rm_scores",
    "rollout_is_weights",
)


def rollout(
    rows: Sequence[tuple[int, int]] = ROWS,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    *,
    holes: bool = False,
    values: bool = False,
    objects: bool = True,
) -> TensorDict:
    """A GRPO batch, with `values` a PPO batch, as it goes to the update of the actor."""
    where = {"rows": rows, "prompt": prompt, "response": response}
    data: dict[str, Any] = tokens(rows, prompt, response)
    data["position_ids"] = positions(data["attention_mask"])
    data["response_mask"] = response_mask(rows, response, holes=holes)
    for seed, name in enumerate(RESPONSE_FIELDS):
        if values or name != "values":
            data[name] = of("response", torch.float32, seed=seed + 10, **where)
    for b, (_, r) in enumerate(rows):
        data["advantages"][b, :r] = b / 8 - 0.3
        data["token_level_scores"][b] = 0
        if r:
            data["token_level_scores"][b, r - 1] = 1.0
    data["reward_baselines"] = torch.linspace(-1, 1, len(rows))
    data["dummy_tensor"] = torch.zeros(len(rows), 1, dtype=torch.uint8)
    batch = TensorDict(data, batch_size=[len(rows)])
    if objects and rows:
        batch.set("uid", per_row([f"row-{b // 2}" for b in range(len(rows))]))
        batch.set("extra_info", per_row([{"index": b, "answer": [b, None]} for b in range(len(rows))]))
        batch.set("temperature", NonTensorData(0.7, batch_size=[len(rows)]))
        batch.set("global_token_num", NonTensorData([p + r for p, r in rows], batch_size=[len(rows)]))
    return batch


def per_row(items: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(item) for item in items])


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """A jagged tensor of rows."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def row_list(x: Tensor) -> list[Tensor]:
    """The rows of a jagged tensor, read from its values and offsets."""
    return [x.values()[begin:end] for begin, end in itertools.pairwise(x.offsets().tolist())]
