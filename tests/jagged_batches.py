"""Batches of trainers that hold no padding and no masks, made as these trainers make them, and what their rows hold.

verl_v1            verl's V1 trainer, by verl's own code: its agent loop, its functions of jagged columns, and the
                   storage of TransferQueue between them; `sections` for the positions of M-RoPE, [B, 4, j]
verl_joined        two of them, which verl's own functions put together: their shape does not tell the ragged dim
verl_engine        what verl's engines get of padded batches: offsets in int32, beside padded fields and their mask
slime              the rollout data of slime, lists of tensors as jagged columns
prime_rl_samples   the samples of prime-rl as jagged columns
prime_rl_line      a micro-batch of prime-rl, [1, T] or [T]

Each takes the prompt and response tokens of its rows, and a seed. verl and TransferQueue are imported when they are
needed; a test that needs them is skipped without them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from needs import needs
from samples import freeze, jagged, padded
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

import maskpack as mp
from maskpack.fields import presets

Shapes = Sequence[tuple[int, int]]
"""Prompt and response tokens of each row."""
Row = dict[str, Any]
"""What a row holds: tensors without a dim of rows, and Python objects."""

SHAPES: dict[str, Shapes] = {
    "of all lengths": ((3, 6), (5, 2), (1, 1), (2, 5), (4, 1), (1, 7)),
    "of equal lengths": ((3, 4),) * 4,
    "of equal prompts": ((3, 2), (3, 5), (3, 1)),
    "alike in one half": ((2, 2), (3, 3), (1, 4), (5, 1)),
    "of two tokens": ((1, 1),) * 3,
    "one row": ((4, 3),),
    "without prompts": ((0, 2), (2, 3), (0, 4), (1, 1)),
    "of one token": ((0, 1), (0, 1), (2, 1)),
}
"""A row without a prompt is one that a model continues from nothing."""
VOCABULARY = range(3, 97)
LAYERS = (2, 3)
"""Layers of a mixture of experts, and experts of a token."""


class Made(NamedTuple):
    """A batch, what each of its rows holds, and the registry of its trainer. Of one line, rows are documents."""

    batch: TensorDict
    rows: list[Row]
    registry: mp.MaskNestingRegistry


# -------------------------------------------------------------------- rows of a batch, by loops


def rows_of(batch: TensorDictBase) -> list[Row]:
    """What each row of a batch [B] holds, by its entries one after the other."""
    columns = {name: _column(value, batch.batch_size[0]) for name, value in batch.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(batch.batch_size[0])]


def _column(value: Any, rows: int) -> list[Any]:
    if is_non_tensor(value):
        return value.tolist() if isinstance(value, NonTensorStack) else [value.data] * rows
    if not value.is_nested:
        return list(value)
    values, dim, ends = value.values(), value._ragged_idx - 1, value.offsets().tolist()
    return [values.narrow(dim, begin, end - begin) for begin, end in itertools.pairwise(ends)]


def assert_rows(batch: TensorDictBase, rows: Sequence[Row], like: TensorDictBase) -> None:
    """The batch holds these rows bit for bit, under these names in this order, and its jagged tensors are sound, ragged
    in the dims of those of `like`."""
    assert tuple(batch.batch_size) == (len(rows),)
    seen = rows_of(batch)
    for number, (got, want) in enumerate(zip(seen, rows, strict=True)):
        assert list(got) == list(want)
        for name in want:
            assert freeze(got[name]) == freeze(want[name]), f"{name} of row {number}: {got[name]}, not {want[name]}"
    for name, value in like.items():
        if isinstance(value, Tensor):
            assert batch.get(name).is_nested == value.is_nested, name
        if isinstance(value, Tensor) and value.is_nested:
            assert_sound(batch.get(name), name)
            assert batch.get(name)._ragged_idx == value._ragged_idx, name


def assert_sound(x: Any, name: str) -> None:
    """The shape of a jagged tensor tells its ragged dim, its offsets are int64, and its values lie without gaps."""
    ragged = [dim for dim, size in enumerate(x.shape) if not isinstance(size, int)]
    assert ragged == [x._ragged_idx], f"{name}: the shape {tuple(x.shape)} tells {ragged}, the tensor {x._ragged_idx}"
    assert x.offsets().dtype == torch.int64, name
    assert x.lengths() is None, name
    assert x.values().is_contiguous(), name
    assert int(x.offsets()[0]) == 0, name
    assert int(x.offsets()[-1]) == x.values().shape[x._ragged_idx - 1], name


# -------------------------------------------------------------------- numbers of rows


class _Draw:
    """Seeded numbers of tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(VOCABULARY.start, VOCABULARY.stop, count).tolist()

    def floats(self, count: int) -> list[float]:
        """Of which one in eight is a zero, every second of these -0.0."""
        zeros = self.rng.integers(0, 16, count)
        return np.where(zeros > 1, self.rng.standard_normal(count), np.where(zeros, -0.0, 0.0)).tolist()

    def mask(self, count: int) -> list[int]:
        return self.rng.integers(0, 2, count).tolist()

    def experts(self, count: int) -> np.ndarray:
        """Different ones at each token and layer."""
        drawn = self.rng.random((count, LAYERS[0], 6)).argsort(-1)
        return np.ascontiguousarray(drawn[..., : LAYERS[1]])


# -------------------------------------------------------------------- verl


@functools.cache
def _verl() -> SimpleNamespace:
    """What is used of verl and TransferQueue, and the parts of the examples that stand for models."""
    needs("verl")
    needs("transfer_queue")
    root = Path(__file__).parents[1]
    sys.path += [str(root / "examples"), str(root / "tests" / "adapters")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines whose packages are not installed
        import verl_v1_workers
        from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
        from transfer_queue.storage.simple_storage import StorageUnitData
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        from verl.trainer.ppo.v1 import agent_loop_tq
        from verl.utils import tensordict_utils
        from verl.workers.utils import padding
        from verl_v1_parts import Tokenizer
    return SimpleNamespace(
        loop=agent_loop_tq,
        worker=verl_v1_workers.FullAgentLoop,
        processor=verl_v1_workers.Processor,
        image=verl_v1_workers.IMAGE,
        tokenizer=Tokenizer,
        output=AgentLoopOutput,
        metrics=AgentLoopMetrics,
        unit=StorageUnitData,
        manager=AsyncSimpleStorageManager,
        tensordicts=tensordict_utils,
        padding=padding,
    )


class Queue:
    """A partition of TransferQueue over one storage unit, in this process."""

    def __init__(self) -> None:
        self.unit = _verl().unit()

    def put(self, samples: Sequence[int], fields: TensorDict) -> None:
        every = list(range(len(samples)))
        columns = {name: _verl().manager._select_by_positions(fields[name], every) for name in list(fields.keys())}
        rows = {name: list(x.unbind()) if isinstance(x, Tensor) else x for name, x in columns.items()}
        self.unit.put_data(rows, list(samples))

    def get(self, samples: Sequence[int], names: Sequence[str]) -> TensorDict:
        found = self.unit.get_data(list(names), list(samples))
        columns = {name: _verl().manager._pack_field_values(found[name]) for name in names}
        return TensorDict(columns, batch_size=[len(samples)])


def verl_v1(shapes: Shapes, seed: int = 0, *, sections: bool = False, images: bool = False) -> Made:
    """The rows of agent loops and, if all have a prompt, what the trainer adds: log-probs of a model and advantages.
    With `sections`, positions are [B, 4, j], and with `images` there are images in the prompts."""
    queue, rows = Queue(), list[Row]()
    outputs = [_agent_output(_Draw(seed * 1000 + number), p, r, images) for number, (p, r) in enumerate(shapes)]
    for begin in range(0, len(outputs), 2):  # of a session, one output or two
        some = outputs[begin : begin + 2]
        fields, held = _postprocessed(some, sections or images, f"{seed} {begin // 2}")
        queue.put(range(begin, begin + len(some)), fields)
        rows += held
    if all(p for p, _ in shapes):
        draw, whole = _Draw(seed), queue.get(range(len(rows)), ["input_ids", "response_mask"])
        mask, ends = whole["response_mask"], whole["input_ids"].offsets()
        scores = torch.tensor(draw.floats(int(ends[-1])))
        by_model = torch.nested.nested_tensor_from_jagged(scores, ends)
        advantages = torch.tensor([draw.floats(1) * max(r for _, r in shapes) for _ in shapes])
        added = {
            "old_log_probs": _verl().padding.response_from_nested(by_model, mask),
            "advantages": _verl().padding.response_to_nested(advantages, mask),
        }
        queue.put(range(len(rows)), TensorDict(added, batch_size=[len(rows)]))
        for row, own, (_, r), line in zip(rows, ends[1:].tolist(), shapes, advantages, strict=True):
            row["old_log_probs"] = scores[own - r - 1 : own - 1]
            row["advantages"] = line[:r]
    return Made(queue.get(range(len(rows)), list(rows[0])), rows, mp.RL_FIELDS)


def _agent_output(draw: _Draw, p: int, r: int, images: bool) -> Any:
    prompt, count = draw.ids(p), int(draw.rng.integers(0, p)) if images and p else 0
    prompt[:count] = [_verl().image] * count
    return _verl().output(
        prompt_ids=prompt,
        response_ids=draw.ids(r),
        response_mask=draw.mask(r),
        response_logprobs=draw.floats(r),
        routed_experts=draw.experts(p + r - 1),  # none of the last token
        multi_modal_data={"images": [float(number) for number in range(count)]} if count else {},
        reward_score=draw.floats(1)[0],
        num_turns=int(draw.rng.integers(1, 4)),
        metrics=_verl().metrics(),
        extra_fields={"min_global_steps": 0, "max_global_steps": 1, "reward_extra_info": {"acc": 0.5}},
    )


def _postprocessed(outputs: list[Any], sections: bool, uid: str) -> tuple[TensorDict, list[Row]]:
    """What verl's agent loop puts into the queue, and the dicts that it makes this of."""
    parts, rows, puts = _verl(), list[Row](), list[Any]()
    worker = object.__new__(parts.worker)
    worker.processor, worker.tokenizer = parts.processor() if sections else None, parts.tokenizer()
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.mm_processor_kwargs = None, False, {}
    joined = parts.loop.list_of_dict_to_tensordict

    async def put(**given: Any) -> None:
        puts.append(given["fields"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.loop, "list_of_dict_to_tensordict", lambda given: rows.extend(given) or joined(given))
        patch.setattr(parts.loop.tq, "async_kv_batch_put", put)
        given = {"uid": uid, "session_id": 0, "global_steps": 3, "raw_prompt": [{"role": "user", "content": uid}]}
        asyncio.run(worker._agent_loop_postprocess(outputs, False, **given))
    return puts[0], rows


def verl_joined(shapes: Shapes, seed: int = 0, *, sections: bool = False) -> Made:
    """The tensors of a batch as verl's `concat_tensordict` leaves them."""
    parts = [verl_v1(shapes, seed + half, sections=sections) for half in range(2)]
    names = [name for name, value in parts[0].batch.items() if isinstance(value, Tensor)]
    whole = _verl().tensordicts.concat_tensordict([part.batch.select(*names) for part in parts])
    rows = [{name: row[name] for name in list(whole.keys())} for part in parts for row in part.rows]
    return Made(whole, rows, mp.RL_FIELDS)


def verl_engine(shapes: Shapes, seed: int = 0, *, sections: bool = False) -> Made:
    """A padded batch after `left_right_2_no_padding`."""
    draw, width = _Draw(seed), max(r for _, r in shapes)
    prompts, responses = [draw.ids(p) for p, _ in shapes], [draw.ids(r) for _, r in shapes]
    places = [list(range(p + r)) for p, r in shapes]
    on = torch.cat([padded([[1] * p for p, _ in shapes], left=True), padded([[1] * r for _, r in shapes])], 1)
    ids = torch.cat([padded(prompts, pad=0, left=True), padded(responses, pad=0)], 1)
    text = (on.cumsum(1) - 1).clamp(min=0)
    experts = [torch.from_numpy(draw.experts(p + r)).short() for p, r in shapes]
    routed = torch.zeros(*on.shape, *LAYERS, dtype=torch.int16)
    routed[on.bool()] = torch.cat(experts)
    fields = {
        "prompts": ids[:, :-width].contiguous(),
        "responses": ids[:, -width:].contiguous(),
        "input_ids": ids,
        "attention_mask": on,
        "position_ids": torch.stack([text, text, text // 2, text * 2], 1) if sections else text,
        "response_mask": padded([draw.mask(r) for _, r in shapes], width=width),
        "old_log_probs": padded([draw.floats(r) for _, r in shapes], torch.float32),
        "routed_experts": routed,
    }
    rows = [{name: value[row].clone() for name, value in fields.items()} for row in range(len(shapes))]
    batch = _verl().padding.left_right_2_no_padding(TensorDict(fields, batch_size=[len(shapes)]))
    wide = {name: value.data for name, value in batch.items() if isinstance(value, NonTensorData)}
    for row, own in enumerate(rows):
        line = torch.tensor(places[row])
        own["input_ids"] = torch.tensor(prompts[row] + responses[row])
        own["position_ids"] = torch.stack([line, line, line // 2, line * 2]) if sections else line
        own["routed_experts"] = experts[row]
        own |= {"loss_mask": own["response_mask"], **wide}
    rows = [{name: row[name] for name in list(batch.keys())} for row in rows]
    return Made(batch, rows, mp.RL_FIELDS)


# -------------------------------------------------------------------- slime


def slime(shapes: Shapes, seed: int = 0) -> Made:
    """What a rank of slime trains on. Its rollout manager puts samples into columns of lists, tokens and a loss mask
    and log-probs of the response; a rank makes tensors of its rows, and adds log-probs of models and advantages. There
    are experts for each token but the last."""
    draw = _Draw(seed)
    rows: list[Row] = []
    for number, (p, r) in enumerate(shapes):
        floats = {name: torch.tensor(draw.floats(r)) for name in _OF_SLIME}
        rows.append(
            {
                "tokens": torch.tensor(draw.ids(p + r)),
                "response_lengths": torch.tensor(r),
                "rewards": torch.tensor(draw.floats(1)[0]),
                "truncated": torch.tensor(number % 2),
                "sample_indices": torch.tensor(number),
                "loss_masks": torch.tensor(draw.mask(r), dtype=torch.int32),
                **floats,
                "rollout_routed_experts": torch.from_numpy(draw.experts(p + r - 1)).int(),
                "total_lengths": torch.tensor(p + r),
                "metadata": {"index": number, "label": [number, None]},
            }
        )
    return Made(_columns(rows), rows, presets.slime)


_OF_SLIME = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns")


def _columns(rows: Sequence[Row]) -> TensorDict:
    """Rows as jagged columns; numbers [B]; objects one for each row."""
    batch = TensorDict({}, batch_size=[len(rows)])
    for name, first in rows[0].items():
        column = [row[name] for row in rows]
        if not isinstance(first, Tensor):
            batch.set(name, NonTensorStack(*[NonTensorData(item) for item in column]))
        else:
            batch.set(name, jagged(column) if first.dim() else torch.stack(column))
    return batch


# -------------------------------------------------------------------- prime-rl


def prime_rl_samples(shapes: Shapes, seed: int = 0) -> Made:
    """The samples that the orchestrator of prime-rl sends: a number for each token in every list."""
    draw = _Draw(seed)
    rows = [
        {
            "token_ids": torch.tensor(draw.ids(p + r)),
            "mask": torch.tensor([0] * p + draw.mask(r)).bool(),
            "logprobs": torch.tensor([0.0] * p + draw.floats(r)),
            "temperatures": torch.full((p + r,), 0.7),
            "advantages": torch.tensor(draw.floats(1) * (p + r)),
            "reward": torch.tensor(draw.floats(1)[0], dtype=torch.float64),
            "env_name": f"env {p}",
        }
        for p, r in shapes
    ]
    return Made(_columns(rows), rows, presets.prime_rl)


Told = Literal["cu_seqlens", "seq_lens", "positions"]


def prime_rl_line(shapes: Shapes, seed: int = 0, *, dims: int = 2, told: Told = "cu_seqlens") -> Made:
    """Samples of prime-rl packed into one line, the longest first, with a tail of tokens 1 that makes it a multiple of
    8: [1, T] of its trainer, or [T]. Positions start at 0 in each sample. `told`: what else says where they begin."""
    samples = sorted(prime_rl_samples(shapes, seed).rows, key=lambda row: -len(row["token_ids"]))
    tail = -sum(len(row["token_ids"]) for row in samples) % 8
    draw = _Draw(seed)
    rows: list[Row] = []
    for row in samples:
        count = len(row["token_ids"])
        rows.append(
            {
                "input_ids": row["token_ids"],
                "position_ids": torch.arange(count),
                "loss_mask": row["mask"],
                "inference_logprobs": row["logprobs"],
                "advantages": row["advantages"],
                "temperatures": row["temperatures"],
                "routed_experts": torch.from_numpy(draw.experts(count)).int(),
            }
        )
    padding = {"input_ids": torch.ones(tail).long(), "position_ids": torch.arange(tail)}
    rest = {name: value.new_zeros(tail, *value.shape[1:]) for name, value in rows[0].items() if name not in padding}
    rows += [padding | rest] if tail else []
    lengths = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int32)
    line = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    batch = TensorDict({name: value[None] if dims == 2 else value for name, value in line.items()}, batch_size=[])
    if told == "cu_seqlens":
        batch["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    elif told == "seq_lens":
        batch["seq_lens"] = lengths
    return Made(batch, rows, presets.prime_rl)


# -------------------------------------------------------------------- all of them

BATCHES: dict[str, Callable[[Shapes, int], Made]] = {
    "verl V1": verl_v1,
    "verl V1, M-RoPE": functools.partial(verl_v1, sections=True),
    "verl V1, images": functools.partial(verl_v1, images=True),
    "verl V1, joined": verl_joined,
    "verl V1, M-RoPE, joined": functools.partial(verl_joined, sections=True),
    "verl's engines": verl_engine,
    "verl's engines, M-RoPE": functools.partial(verl_engine, sections=True),
    "slime": slime,
    "samples of prime-rl": prime_rl_samples,
}
"""Batches of rows [B]."""
ROWS = [
    (name, shape)
    for name in BATCHES
    for shape in SHAPES
    if shape != "of one token" or not ("verl" in name and ("M-RoPE" in name or "images" in name))
]
"""All of them in all shapes; verl's agent loop cannot tell the positions of M-RoPE of a row of one token."""


def made(name: str, shape: str, seed: int = 0) -> Made:
    return BATCHES[name](SHAPES[shape], seed)


LINES: dict[str, Callable[[Shapes, int], Made]] = {
    f"[{'1, ' * (dims - 1)}T] with {told}": functools.partial(prime_rl_line, dims=dims, told=told)
    for dims in (2, 1)
    for told in ("cu_seqlens", "seq_lens", "positions")
}
"""Batches of one line of documents."""
