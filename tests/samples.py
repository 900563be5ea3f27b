"""The builders of the tests, in plain loops, and their comparison by bits.

rollout(ROWS)             a GRPO or PPO batch that nests whole, with objects; ROWS are (prompt, response) tokens of each
                          row, as `lengths` draws them; `holes` for tool tokens, `values` for a critic, `seed`
workload("ppo", rows)     a batch as redundant as real ones, in one of VARIANTS, for encodings and sizes
under(mask, pads, x=...)  a few fields under one mask "m", and their registry (`registry_of(x=pad)` alone)
tokens, of, field         single fields: of("response", torch.float32, pad, trailing)
mixed, DIFFERENT          a batch of every kind of entry, and what differs from it in one thing
rows_of, joined, parts_of rows of padded and nested batches, whatever tensordict can do

A test that needs other fields changes a rollout: `rollout(...).select(...)`, `batch["values"] = of(...)`. What tests
expect does not come from maskpack: builders call nothing of it but the constructor of a spec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

import maskpack as mp

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
    cells, items = len(mask) * width, math.prod(trailing)
    out = torch.full((cells, items), 0 if pad == EDGE else pad, dtype=dtype)
    real = torch.tensor(mask, dtype=torch.bool).reshape(cells)
    values = [[element(dtype, rng) for _ in range(items)] for _ in range(int(real.sum()))]
    if values and items:  # as bytes, since torch indexes not every dtype
        out.view(torch.uint8)[real] = torch.tensor(values, dtype=dtype).view(torch.uint8)
    out = out.reshape(len(mask), width, *trailing)
    if pad == EDGE:
        for b, line in enumerate(mask):
            nearest = list(line).index(True) if any(line) else 0
            for s, on in enumerate(line):
                nearest = s if on else nearest
                out[b, s] = out[b, nearest].clone()
    return out


def of(axis: str, dtype: torch.dtype, pad: Any = 0, trailing: Sequence[int] = (), **more: Any) -> Tensor:
    """A field on an axis of the rows ROWS."""
    rows, prompt = more.pop("rows", ROWS), more.pop("prompt", PROMPT)
    response = more.pop("response", RESPONSE)
    width = {"prompt": prompt, "response": response, "sequence": prompt + response}[axis]
    return field(real_positions(axis, rows, prompt, response), dtype, pad, trailing, width=width, **more)


def tokens(
    rows: Sequence[tuple[int, int]] = ROWS,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    *,
    mask: torch.dtype = torch.int64,
    pad: int = PAD,
    seed: int = 1,
) -> dict[str, Tensor]:
    """The token fields and the attention mask of a rollout."""
    where = {"rows": rows, "prompt": prompt, "response": response, "seed": seed}
    ids = of("sequence", torch.int64, pad, **where)
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
    counts = [itertools.accumulate(int(on != 0) for on in line) for line in attention.tolist()]
    lines = [[max(count - 1, 0) for count in line] for line in counts]
    return torch.tensor(lines, dtype=torch.int64).reshape(attention.shape)


def response_mask(rows: Sequence[tuple[int, int]] = ROWS, response: int = RESPONSE, *, holes: bool = False) -> Tensor:
    """1 at response tokens; with `holes`, every second and the last one is a tool token, 0."""

    def scored(s: int, r: int) -> bool:
        return s < r and not (holes and (s % 2 == 1 or (s == r - 1 and r > 1)))

    lines = [[scored(s, r) for s in range(response)] for _, r in rows]
    return torch.tensor(lines, dtype=torch.int64).reshape(len(rows), response)


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
    seed: int = 0,
    holes: bool = False,
    values: bool = False,
    objects: bool = True,
) -> TensorDict:
    """A GRPO batch, with `values` a PPO batch, as it goes to the update of the actor. `seed` is that of the floats and
    token ids."""
    where = {"rows": rows, "prompt": prompt, "response": response}
    data: dict[str, Any] = tokens(rows, prompt, response, seed=seed + 1)
    data["position_ids"] = positions(data["attention_mask"])
    data["response_mask"] = response_mask(rows, response, holes=holes)
    for number, name in enumerate(RESPONSE_FIELDS):
        if values or name != "values":
            data[name] = of("response", torch.float32, seed=100 * seed + number + 10, **where)
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


def rollout_with(**fields: Any) -> TensorDict:
    """The same without objects, and with other fields."""
    return rollout(objects=False).update(fields)


# -------------------------------------------------------------------- a few fields under one mask


def under(mask: Any, pads: Mapping[str, Any] | None = None, **fields: Tensor) -> tuple[TensorDict, dict[str, Any]]:
    """A batch of the mask "m" and fields under it, and its registry. The pad of a field is 0 if `pads` does not name
    it."""
    on = torch.as_tensor(mask)
    batch = TensorDict({"m": on, **fields}, batch_size=[len(on)])
    return batch, registry_of(**dict.fromkeys(fields, 0) | dict(pads or {}))


def registry_of(**pads: Any) -> dict[str, mp.MaskNestingSpec]:
    """A registry of fields under the mask "m", by their pads."""
    return {"m": mp.MaskNestingSpec("m"), **{name: mp.MaskNestingSpec("m", pad) for name, pad in pads.items()}}


# -------------------------------------------------------------------- batches as redundant as real ones

GROUP = 16
VARIANTS = (
    "reference",  # GRPO, one turn
    "multi-turn",  # response_mask is 0 at tool output
    "negative-zeros",  # advantages multiplied by the mask: the pad of a negative advantage is -0.0
    "m-rope",  # position_ids (B, 4, S): text and vision rows, padded with 1
    "m-rope-edge",  # position_ids (B, 3, S): vision rows, padded with the nearest real value
    "routed-experts",  # int16 (B, S, 4, 8)
    "ppo",  # with values; advantages and returns differ from token to token
    "jagged-prompts",  # prompts are a jagged tensor
)


def lengths(
    rows: int, prompt: int, response: int, *, fill: float = 0.05, group: int = GROUP, seed: int = 0
) -> list[tuple[int, int]]:
    """Log-normal numbers of prompt and response tokens, with medians of `fill` of the widths. The rows of a group share
    their prompt."""
    rng = random.Random(seed)

    def draw(sigma: float, width: int) -> int:
        return min(max(round(fill * width * rng.lognormvariate(0, sigma)), 1), width)

    prompts = [draw(0.5, prompt) for _ in range(0, rows, group)]
    return [(prompts[b // group], draw(1.0, response)) for b in range(rows)]


def workload(
    variant: str = "reference", rows: int = 12, prompt: int = 24, response: int = 72, *, pad: int = PAD, **drawn: Any
) -> TensorDict:
    """The tensors of an actor update, in one of VARIANTS. Groups share a prompt, old log-probs are close to those of
    the rollout, a row has one advantage, every other one a reward at its last token. `drawn` goes to `lengths`."""
    spans = lengths(rows, prompt, response, **drawn)
    where = {"rows": spans, "prompt": prompt, "response": response}
    rng = torch.Generator().manual_seed(drawn.get("seed", 0))
    data = tokens(spans, prompt, response, pad=pad)
    ids = torch.where(data["attention_mask"] != 0, 1009 * data["input_ids"], pad)  # of three bytes
    group, place = drawn.get("group", GROUP), torch.arange(response)
    data["prompts"], data["responses"] = ids[torch.arange(rows) // group * group, :prompt], ids[:, prompt:].clone()
    data["input_ids"] = torch.cat([data["prompts"], data["responses"]], 1)
    data["position_ids"] = positions(data["attention_mask"])
    on = data["attention_mask"][:, prompt:] != 0
    length = on.sum(1, keepdim=True)
    scored = on & ~((length // 4 <= place) & (place < length // 2)) if variant == "multi-turn" else on
    data["response_mask"] = scored.long()

    def spread(values: Tensor, by: float) -> Tensor:
        return values * (1 + by * torch.rand(on.shape, generator=rng))

    rollout_log_probs = -torch.rand(on.shape, generator=rng) - 1e-3
    old_log_probs = spread(rollout_log_probs, 0.02)
    columns = {
        "rollout_log_probs": rollout_log_probs.where(scored, 0),
        "old_log_probs": old_log_probs,
        "ref_log_prob": spread(old_log_probs, 0.05),
        "entropys": torch.rand(on.shape, generator=rng),
        "advantages": (torch.randn(rows, 1, generator=rng) / 2).expand(on.shape).where(scored, 0),
        "token_level_scores": (place == length - 1) * (torch.arange(rows)[:, None] % 2.0),
    }
    data |= {name: column.where(on, 0) for name, column in columns.items()}
    data["returns"], data["token_level_rewards"] = data["advantages"].clone(), data["token_level_scores"].clone()
    if variant == "negative-zeros":
        for name in ("advantages", "returns"):
            data[name] = data[name].where(on, data[name][:, :1] * 0)
    if variant == "ppo":
        for seed, name in enumerate(("advantages", "returns", "values")):
            data[name] = of("response", torch.float32, seed=seed, **where)
    if variant.startswith("m-rope"):
        data["position_ids"] = _m_rope(spans, data["attention_mask"], edge=variant == "m-rope-edge")
    if variant == "routed-experts":
        data["routed_experts"] = of("sequence", torch.int16, 0, (4, 8), **where)
    if variant == "jagged-prompts":
        data["prompts"] = jagged([line[prompt - p :] for line, (p, _) in zip(data["prompts"], spans, strict=True)])
    return TensorDict(data, batch_size=[rows])


def _m_rope(rows: Sequence[tuple[int, int]], attention: Tensor, *, edge: bool) -> Tensor:
    """Positions where an image takes the second and third quarter of each prompt: one time step, a square grid of rows
    and columns. The text after it goes on behind the larger side of the grid."""
    text = positions(attention)
    prompts = torch.tensor([[p] for p, _ in rows], dtype=torch.int64).reshape(len(rows), 1)
    begin, count = prompts // 4, prompts // 2
    side = count.double().sqrt().long().clamp(min=1)
    inside = (text - begin).clamp(min=torch.zeros_like(count), max=count - 1)
    image = (text >= begin) & (text < begin + count)
    after = torch.where(text < begin, text, text - count + torch.maximum(side, -(-count // side)))
    grid = (torch.zeros_like(inside), inside // side, inside % side)
    vision = [torch.where(image, begin + part, after) for part in grid]
    return torch.stack(vision, 1) if edge else torch.stack([text, *vision], 1).where(attention[:, None] != 0, 1)


def per_row(items: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(item) for item in items])


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """A jagged tensor of rows."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def padded(
    rows: Sequence[Sequence[Any]],
    dtype: torch.dtype = torch.int64,
    pad: Any = 0,
    width: int | None = None,
    trailing: Sequence[int] = (),
    *,
    left: bool = False,
) -> Tensor:
    """A tensor [B, width, *trailing] of lists, which lie at one side of it; by default as wide as the longest."""
    width = max(map(len, rows), default=0) if width is None else width
    out = torch.full((len(rows), width, *trailing), pad, dtype=dtype)
    for line, row in zip(out, rows, strict=True):
        if row:
            line[width - len(row) if left else 0 :][: len(row)] = torch.tensor(row, dtype=dtype)
    return out


def row_list(x: Tensor) -> list[Tensor]:
    """The rows of a jagged tensor, read from its values and offsets."""
    return [x.values()[begin:end] for begin, end in itertools.pairwise(x.offsets().tolist())]


# -------------------------------------------------------------------- batches that differ in one thing


def filled(lengths: Sequence[int], fill: float = 1.0) -> Tensor:
    """A jagged tensor of equal values."""
    bounds = torch.tensor(np.cumsum([0, *lengths]))
    return torch.nested.nested_tensor_from_jagged(torch.full((int(bounds[-1]),), fill), bounds)


def mixed() -> TensorDict:
    """A batch of every kind of entry."""
    return TensorDict(
        {
            "x": torch.tensor([[0.0, 1.0], [float("nan"), 2.0]]),
            "n": torch.tensor([1, 2]),
            "rows": filled([1, 2]),
            "uid": NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1, torch.ones(2)]})),
            "wide": NonTensorData(1.5, batch_size=[2]),
            "sub": TensorDict({"y": torch.zeros(2, 3, dtype=torch.bfloat16)}, batch_size=[2]),
        },
        batch_size=[2],
    )


def changed(name: Any, value: Any) -> Callable[[], TensorDict]:
    def make() -> TensorDict:
        out = mixed()
        out.set(name, value)
        return out

    return make


def flipped(name: Any, raw: torch.dtype) -> Callable[[], TensorDict]:
    def make() -> TensorDict:
        out = mixed()
        out.get(name).view(raw).view(-1)[0] ^= 1
        return out

    return make


DIFFERENT: dict[str, Callable[[], TensorDict]] = {
    "a flipped bit": flipped("x", torch.int32),
    "a flipped bit in a sub-batch": flipped(("sub", "y"), torch.int16),
    "-0.0 for 0.0": changed("x", torch.tensor([[-0.0, 1.0], [float("nan"), 2.0]])),
    "another NaN": changed(
        "x", torch.tensor([[0, 0x3F800000], [0x7FC00001, 0x40000000]], dtype=torch.int32).view(torch.float32)
    ),
    "another dtype": changed("n", torch.tensor([1, 2], dtype=torch.int32)),
    "another shape": changed("n", torch.tensor([[1], [2]])),
    "a missing key": lambda: mixed().exclude("n"),
    "a key more": changed("new", torch.zeros(2)),
    "another key order": lambda: mixed().select("n", "x", "rows", "uid", "wide", "sub"),
    "a missing key in a sub-batch": changed("sub", TensorDict({}, batch_size=[2])),
    "other row lengths": changed("rows", filled([2, 1])),
    "other jagged values": changed("rows", filled([1, 2], 2.0)),
    "dense for jagged": changed("rows", torch.ones(2, 2)),
    "another object": changed("uid", NonTensorStack(NonTensorData("b"), NonTensorData({"k": [1, torch.ones(2)]}))),
    "another tensor inside an object": changed(
        "uid", NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1, torch.zeros(2)]}))
    ),
    "an object of another type": changed("wide", NonTensorData(np.float32(1.5), batch_size=[2])),
    "per row for batch-wide": changed("wide", NonTensorStack(NonTensorData(1.5), NonTensorData(1.5))),
    "a tensor for an object": changed("wide", torch.ones(2)),
    "another batch size": lambda: TensorDict(dict(mixed().items()), batch_size=[]),
    "another device": lambda: mixed().to("cpu"),
    "fewer rows": lambda: TensorDict({"n": torch.tensor([1])}, batch_size=[1]),
}
"""Batches that differ from `mixed()` in one thing."""


# -------------------------------------------------------------------- rows of nested batches


@functools.cache
def indexes_jagged() -> bool:
    """Whether this tensordict takes and joins rows of jagged fields: from 0.15 on."""
    batch = TensorDict({"x": jagged([torch.ones(1), torch.ones(2)])}, batch_size=[2])
    try:
        return len(torch.cat([batch[:1], batch[1:]])) == 2
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def rows_of(batch: Any, rows: Any) -> Any:
    """`batch[rows]`; for a nested batch by `maskpack.nesting.take` where this tensordict cannot."""
    return batch[rows] if indexes_jagged() or not isinstance(batch, TensorDictBase) else mp.nesting.take(batch, rows)


def joined(batches: Sequence[Any]) -> Any:
    """`torch.cat(batches)`; of nested batches by `maskpack.nesting.cat` where this tensordict cannot."""
    return torch.cat(list(batches)) if indexes_jagged() else mp.nesting.cat(batches)


def parts_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of some sizes."""
    ends = list(itertools.accumulate(sizes))
    return [rows_of(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


# -------------------------------------------------------------------- log-probs


@contextlib.contextmanager
def in_chunks(rows: int | None) -> Iterator[None]:
    """packed_log_probs stores the logits of so many rows at once; None for as many as it does by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if rows is not None:
            patch.setattr("maskpack.ops.log_probs._PIECE_ROWS", rows)
        yield


# -------------------------------------------------------------------- what is packed


def kinds_of(packed: mp.PackedBatch) -> dict[str, str]:
    """The encodings of fields."""
    return {path[0]: packed.table.kind(number) for path, number in packed.numbers.items()}


def entry_of(packed: mp.PackedBatch, name: str) -> int:
    """The number of the entry of a field; fields that are equal have one entry."""
    return int(packed.table.fields[packed.numbers[name,]])


# -------------------------------------------------------------------- tables of calls


def calls_of(table: str) -> list[str]:
    """The calls of a table, one a line, each with what stands in the place of its …, as in `f(x, …) <- 3 ; y=None`.
    These may go on in indented lines."""
    calls: list[str] = []
    for entry in re.split(r"\n(?! )", table):
        call, _, given = entry.partition(" <- ")
        calls += [call.replace("…", one) for one in re.split(r" ;\s+", given)]
    return [call for call in calls if call and not call.startswith("#")]


# -------------------------------------------------------------------- as a pickle with buffers beside it


def sent(packed: mp.PackedBatch) -> tuple[bytes, list[Any]]:
    """The stream and the buffers of protocol 5."""
    buffers: list[Any] = []
    return pickle.dumps(packed, protocol=5, buffer_callback=buffers.append), buffers


def received(packed: mp.PackedBatch) -> mp.PackedBatch:
    """As a reader of read-only shared memory gets it."""
    stream, buffers = sent(packed)
    return pickle.loads(stream, buffers=[memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers])
