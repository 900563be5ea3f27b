"""Random batches of jagged columns without masks, against loops over their rows: compressed, nested, taken, joined,
padded to the response, and as inputs of a model.

Columns are those of RL batches, or others, ragged in any dim, some of them missing. Their offsets are their own or
shared, in int64 or int32, and the shape may not tell the ragged dim, as verl makes it. Beside them are numbers, tensors
of one size, Python objects, and perhaps padded prompts and responses with their mask. Rows may be empty.

`python tests/tools/fuzz_jagged.py SEED COUNT` does as `python -m tests.tools.fuzz jagged --seed SEED --count COUNT`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import fuzz

    sys.argv[1:] = ["jagged", "--seed", sys.argv[1], "--count", sys.argv[2]]
    sys.exit(fuzz.main())

import pickle
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jagged_batches import Row, assert_rows
from samples import freeze
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.nesting.schema import LAYOUTS
from maskpack.replay import PackedInputs, ReplayOptions

COUNT = 2000
PAD = {"pad_token_id": 0}
DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.float64, torch.uint8)
ON_RESPONSE = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages", "values")


class Column(NamedTuple):
    """A jagged column: whose lengths it has, its dtype, the sizes of its dims beside the ragged one, the ragged dim,
    and how its tensor is made."""

    axis: str
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    dim: int = 1
    way: str = "plain"


class Kind:
    """What batches of a kind have in common, so that their rows can be joined."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.padded = self.chance(0.2)
        sections = int(rng.choice([0, 0, 3, 4]))
        places = Column("sequence", torch.int64, (sections,), 2, self.way(2)) if sections else None
        names = {
            "input_ids": Column("sequence", torch.int64),
            "prompts": Column("prompt", torch.int64),
            "responses": Column("response", torch.int64),
            "position_ids": places or Column("sequence", torch.int64),
            "loss_mask": Column(str(rng.choice(["response", "sequence"])), torch.bool),
            "routed_experts": Column("sequence", torch.int16, (2, 3)),
            **{name: Column("response", torch.float32) for name in ON_RESPONSE[1:]},
            "response_mask": Column("response", torch.int64),
        }
        self.columns = {name: column for name, column in names.items() if self.chance(0.8)}
        if self.padded:
            self.columns = {
                name: column for name, column in self.columns.items() if name not in ("prompts", "responses")
            }
        for number in range(int(rng.integers(0, 4))):
            sizes = tuple(int(size) for size in rng.integers(0, 4, int(rng.integers(0, 3))))
            dim = int(rng.integers(1, len(sizes) + 2))
            axis = str(rng.choice(["sequence", "response", f"own {number}"]))
            self.columns[f"x{number}"] = Column(axis, DTYPES[rng.integers(len(DTYPES))], sizes, dim, self.way(dim))
        order = list(self.columns)
        rng.shuffle(order)
        self.columns = {name: self.columns[name] for name in order}
        self.dense = {name: size for name, size in {"n": (), "d": (3,), "e": (2, 0)}.items() if self.chance(0.4)}
        self.objects = self.chance(0.4)
        self.width = int(rng.integers(5, 8)), int(rng.integers(5, 8))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def way(self, dim: int) -> str:
        """Only of the second dim, the shape may be that of the first, and the values transposed."""
        return str(self.rng.choice(["plain", "untold", "transposed"])) if dim == 2 else "plain"

    def values(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Random bytes."""
        raw = torch.from_numpy(self.rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8))
        raw = raw % 2 if dtype == torch.bool else raw
        return raw.view(dtype).view(*shape) if raw.numel() else torch.zeros(*shape, dtype=dtype)

    def row(self, name: str, count: int) -> Tensor:
        """What a column holds of a row."""
        column = self.columns[name]
        if name == "position_ids":
            line = torch.arange(count)
            sections = [line, line // 2, (line - 2).clamp(min=0), line * 2][: sum(column.sizes)]
            return torch.stack(sections) if sections else line
        if name in ("input_ids", "prompts", "responses"):
            return torch.from_numpy(self.rng.integers(3, 97, count))
        sizes = [*column.sizes[: column.dim - 1], count, *column.sizes[column.dim - 1 :]]
        return self.values(sizes, column.dtype)

    def batch(self, rows: int) -> tuple[TensorDict, list[Row], list[tuple[int, int]]]:
        """A batch, its rows, and prompt and response tokens of each."""
        most = min(self.width) + 1
        p, r = (self.rng.integers(0, most, rows).tolist() for _ in range(2))
        lengths = {"prompt": p, "response": r, "sequence": [a + b for a, b in zip(p, r, strict=True)]}
        held: list[Row] = [{} for _ in range(rows)]
        offsets: dict[tuple[str, torch.dtype], Tensor] = {}
        batch = TensorDict({}, batch_size=[rows])
        for name, column in self.columns.items():
            own = lengths.setdefault(column.axis, self.rng.integers(0, 6, rows).tolist())
            lines = [self.row(name, count) for count in own]
            batch.set(name, self.jagged(column, lines, own, offsets))
            for row, line in zip(held, lines, strict=True):
                row[name] = line
        beside: dict[str, Tensor] = {
            name: self.values((rows, *size), torch.float32) for name, size in self.dense.items()
        }
        if self.padded:
            beside |= self.padded_fields(p, r)
        for name, value in beside.items():
            batch.set(name, value)
            for row, line in zip(held, value, strict=True):
                row[name] = line.clone()
        if self.objects and rows:
            items = [{"row": row, "text": "é" * (row % 3)} for row in range(rows)]
            batch.set("object", NonTensorStack(*map(NonTensorData, items)))
            batch.set("all", NonTensorData("one", batch_size=[rows]))
            for row, item in zip(held, items, strict=True):
                row |= {"object": item, "all": "one"}
        return batch, held, list(zip(p, r, strict=True))

    def jagged(self, column: Column, lines: list[Tensor], own: list[int], offsets: dict[Any, Tensor]) -> Tensor:
        dtype = torch.int32 if self.chance(0.2) else torch.int64
        ends = torch.from_numpy(np.cumsum([0, *own])).to(dtype)
        if self.chance(0.6):  # shared with other columns
            ends = offsets.setdefault((column.axis, dtype), ends)
        if lines:
            values = torch.cat(lines, column.dim - 1)
        else:
            values = torch.zeros(
                *column.sizes[: column.dim - 1], 0, *column.sizes[column.dim - 1 :], dtype=column.dtype
            )
        make: Any = torch.nested.nested_tensor_from_jagged
        if column.way == "untold":
            out = make(values, ends)
            out._ragged_idx = column.dim
            return out
        if column.way == "transposed":
            return make(values.transpose(0, 1).contiguous(), ends).transpose(1, 2)
        if column.dim == 1 and self.chance(0.5):
            return make(values, ends, min_seqlen=min(own, default=0), max_seqlen=max(own, default=0))
        return make(values, ends, jagged_dim=column.dim)

    def padded_fields(self, p: list[int], r: list[int]) -> dict[str, Tensor]:
        """Prompts padded on the left, responses on the right, with 0, and their mask."""
        ids = torch.zeros(len(p), sum(self.width), dtype=torch.int64)
        on = torch.zeros_like(ids)
        for row, (a, b) in enumerate(zip(p, r, strict=True)):
            columns = slice(self.width[0] - a, self.width[0] + b)
            ids[row, columns], on[row, columns] = torch.from_numpy(self.rng.integers(3, 97, a + b)), 1
        prompts, responses = ids.tensor_split([self.width[0]], 1)
        return {"prompts": prompts.contiguous(), "responses": responses.contiguous(), "attention_mask": on}


# -------------------------------------------------------------------- against loops


def plain(batch: Any) -> Any:
    if isinstance(batch, mp.PackedBatch):
        return mp.decompress(batch)
    return mp.unnest_batch_by_mask(batch) if LAYOUTS in batch.keys() else batch  # noqa: SIM118


def forms_of(batch: TensorDict) -> dict[str, Any]:
    packed = mp.compress(batch, **PAD)
    return {
        "as it is": batch,
        "packed": packed,
        "nested": mp.nest_batch_by_mask(batch, **PAD),
        "pickled": pickle.loads(pickle.dumps(packed, 5)),
        "in bytes": mp.PackedBatch.from_bytes(packed.to_bytes()),
        "decoded": mp.decompress(packed),
        "decoded, nested": mp.decompress(packed, format="nested"),
    }


def taken(batch: Any, index: list[int]) -> Any:
    return batch.take(index) if isinstance(batch, mp.PackedBatch) else mp.nesting.take(batch, index)


def joined(batches: list[Any]) -> Any:
    return mp.PackedBatch.cat(batches) if isinstance(batches[0], mp.PackedBatch) else mp.nesting.cat(batches)


def check_response(batch: Any, kind: Kind, rows: list[Row], shapes: list[tuple[int, int]]) -> None:
    """Fields of the response at the width of the longest one, padded with 0."""
    fields = [name for name in ON_RESPONSE if name in kind.columns]
    width = kind.width[1] if kind.padded else max(r for _, r in shapes)
    seen = mp.select_and_pad_to_response(batch, *fields)
    assert list(seen.keys()) == fields
    for name in fields:
        want = torch.zeros(len(rows), width, dtype=rows[0][name].dtype)
        for line, row in zip(want, rows, strict=True):
            line[: len(row[name])] = row[name]
        assert freeze(seen[name]) == freeze(want), name


def check_inputs(batch: Any, kind: Kind, rows: list[Row], shapes: list[tuple[int, int]]) -> None:
    """Rows one after the other, and what scores the tokens of responses."""
    ends = np.cumsum([0, *(p + r for p, r in shapes)]).tolist()
    inputs = PackedInputs.of(batch, options=ReplayOptions(no_prompt="skip"))
    total, ids = ends[-1], torch.cat([row["input_ids"] for row in rows])
    begins = [end - (p + r) for end, (p, r) in zip(ends[1:], shapes, strict=True)]
    scored = [
        at for begin, (p, r) in zip(begins, shapes, strict=True) for at in range(begin + p, begin + p + r) if at > begin
    ]
    assert inputs.num_tokens == total
    assert inputs.bounds.tolist() == sorted({*ends})
    assert freeze(inputs.input_ids[0, :total]) == freeze(ids)
    assert inputs.predict.tolist() == [at - 1 for at in scored]
    assert freeze(inputs.targets) == freeze(ids[scored])
    assert inputs.response.lengths.tolist() == [r for _, r in shapes]
    places = [row.get("position_ids", torch.arange(p + r)) for row, (p, r) in zip(rows, shapes, strict=True)]
    line = torch.cat(places, -1)
    assert freeze(inputs.position_ids[..., :total]) == freeze(line[None] if line.dim() == 1 else line[:, None])


def play(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    kind, done = Kind(rng), Counter[str]()
    batch, rows, shapes = kind.batch(0 if rng.random() < 0.04 else int(rng.integers(1, 7)))
    other, more, _ = kind.batch(int(rng.integers(1, 4)))
    before = freeze(batch)
    index = rng.integers(-len(rows), len(rows), int(rng.integers(1, 9))).tolist() if rows else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = forms_of(other)
        for name, form in forms_of(batch).items():
            done[name] += 1
            if name != "as it is":
                assert_rows(plain(form), rows, batch)
            if index or not kind.objects:  # tensordict has no stack of no objects
                assert_rows(plain(taken(form, index)), [rows[row] for row in index], batch)
            if rows:
                assert_rows(plain(joined([form, others[name], form])), [*rows, *more, *rows], batch)
            packed = isinstance(form, mp.PackedBatch)
            if rows and not packed and (kind.padded or "responses" in kind.columns):
                check_response(form, kind, rows, shapes)
                done["responses"] += 1
            if rows and "input_ids" in kind.columns and (kind.padded or "responses" in kind.columns):
                check_inputs(form, kind, rows, shapes)
                done["inputs"] += 1
        assert freeze(batch) == before
    return done + Counter({"rows": len(rows), "padded fields": int(kind.padded)})
