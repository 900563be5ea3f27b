"""Rows: every random batch holds padded fields of several pads, sub-batches, tensorclasses, lazy stacks and Python
objects. It is packed, nested, pickled, written, viewed, planned, cut and joined; what comes back is compared bit for
bit with the same rows of the padded batch, taken by loops.
"""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import oracle
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    set_list_to_stack,
    tensorclass,
)
from torch import Tensor

import maskpack as mp

Rows = list[int]
TOKEN = 7
COUNT = 400
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
IDS = (torch.int64, torch.int32)


@tensorclass
class Tokens:
    ids: Tensor
    text: Any = None
    more: Any = None


@tensorclass
class Turn:
    tokens: Tokens
    score: Tensor


class Maker:
    """The padded batches of one case: the same fields, dtypes and kinds of pads in each."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ids = self.one(IDS)
        self.mask = self.one((torch.int64, torch.bool, torch.float32))
        self.float = self.one(FLOATS)
        self.positions = self.one(("zero", "edge", "either"))
        self.advantages = self.one(("zero", "signed", "row"))
        self.holes = self.chance(0.3)
        self.lossy = self.chance(0.15)
        self.has = {name: self.chance(0.5) for name in ("class", "turn", "sub", "stack", "objects", "mrope", "jagged")}
        self.names = iter(range(10**6))
        self.sure: list[bool] = []  # for each batch, whether its positions tell how they are padded

    def one(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.rng.integers(-40, 40, shape)).to(dtype)

    def batch(self, rows: int, prompt: int, response: int) -> tuple[TensorDict, dict[str, tuple[str, Any]]]:
        """A batch, and for each padded field its axis and its pad: a number, EDGE, or one a row."""
        before = self.rng.integers(0, prompt + 1, rows)
        after = self.rng.integers(0, response + 1, rows)
        place = torch.arange(prompt + response)
        start, stop = torch.from_numpy(prompt - before)[:, None], torch.from_numpy(prompt + after)[:, None]
        real = (place >= start) & (place < stop)
        if self.holes:
            real &= torch.from_numpy(self.rng.random((rows, prompt + response)) < 0.8)
        whole = (rows, prompt + response)
        fields: dict[str, Any] = {"attention_mask": real.to(self.mask)}
        pads: dict[str, tuple[str, Any]] = {"attention_mask": ("sequence", 0)}
        fields["input_ids"] = torch.where(real, self.numbers(whole, self.ids), TOKEN).to(self.ids)
        fields["prompts"], fields["responses"] = fields["input_ids"][:, :prompt], fields["input_ids"][:, prompt:]
        pads |= {"input_ids": ("sequence", TOKEN), "prompts": ("prompt", TOKEN), "responses": ("response", TOKEN)}
        count = real.long().cumsum(1) - 1
        kind = self.one(("zero", "edge")) if self.positions == "either" else self.positions
        nearest = torch.where(real.any(1, keepdim=True), count.clamp(min=0), 0)
        fields["position_ids"] = torch.where(real, count, 0) if kind == "zero" else nearest
        pads["position_ids"] = ("sequence", 0 if kind == "zero" else oracle.EDGE)
        self.sure.append(not torch.equal(torch.where(real, count, 0), nearest))
        tail = real[:, prompt:]
        for name in ("old_log_probs", "entropys"):
            fields[name] = torch.where(tail, self.numbers((rows, response), self.float), 0)
            pads[name] = ("response", 0)
        row_pad = torch.zeros(rows, dtype=self.float)
        if self.advantages == "signed":
            positive = torch.from_numpy(self.rng.random(rows) < 0.5) | tail.all(1)  # no pad is seen in a full row
            row_pad = torch.where(positive, row_pad, -row_pad)
        fields["advantages"] = torch.where(tail, self.numbers((rows, response), self.float), row_pad[:, None])
        pads["advantages"] = ("response", row_pad)
        if self.lossy and fields["entropys"].numel() and self.chance(0.7):
            fields["entropys"].view(-1)[int(self.rng.integers(fields["entropys"].numel()))] = 3.5
            pads.pop("entropys") if bool((~tail & (fields["entropys"] != 0)).any()) else None
        fields["reward_baselines"] = self.numbers((rows,), torch.float32)
        fields["unknown"] = self.numbers((rows, 3), torch.float32).T.contiguous().T
        self._add(fields, rows)
        order = sorted(fields)
        return TensorDict({name: fields[name] for name in order}, [rows]), pads

    def _add(self, fields: dict[str, Any], rows: int) -> None:
        names = [f"n{next(self.names)}" for _ in range(rows)]
        per_row = (
            NonTensorStack(*[NonTensorData(name) for name in names]) if rows else NonTensorData(None, batch_size=[0])
        )

        def tokens() -> Any:
            some = {"ids": self.numbers((rows, 2), torch.int64), "text": per_row}
            return Tokens.from_tensordict(TensorDict(some, [rows]))

        if self.has["class"]:
            fields["class"] = tokens()
        if self.has["turn"]:
            fields["turn"] = Turn.from_tensordict(
                TensorDict({"tokens": tokens(), "score": self.numbers((rows,), self.float)}, [rows])
            )
        if self.has["sub"]:
            deep = TensorDict({"t": tokens(), "x": self.numbers((rows, 2, 2), torch.int16)}, [rows])
            fields["sub"] = TensorDict({"deep": deep, "attention_mask": fields["attention_mask"]}, [rows])
        if self.has["stack"] and rows:
            sizes = self.rng.integers(0, 4, rows)
            fields["stack"] = lazy_stack([TensorDict({"a": self.numbers((int(n),), torch.int64)}) for n in sizes])
            turns = [
                Tokens(ids=self.numbers((int(n), 2), torch.int64), text=name)
                for n, name in zip(sizes, names, strict=True)
            ]
            fields["turns"] = lazy_stack(turns)
        if self.has["objects"] and rows:
            items = [self.one((None, 1, 2.5, name, {"t": self.numbers((2,), torch.int64)}, [name])) for name in names]
            fields["objects"] = NonTensorStack(*[NonTensorData(item) for item in items])
            fields["global_token_num"] = NonTensorData(list(range(rows)), batch_size=[rows])
            fields["temperature"] = NonTensorData(0.7, batch_size=[rows])
        if self.has["mrope"]:
            fields["mrope"] = self.numbers((rows, 4, 3), torch.int64)
        if self.has["jagged"] and rows:
            parts = [self.numbers((int(n), 2), torch.float32) for n in self.rng.integers(0, 4, rows)]
            fields["jagged"] = oracle.make_jagged(parts, torch.nested.nested_tensor(parts, layout=torch.jagged))

    def rows_of(self, count: int) -> Rows:
        if not count or self.chance(0.05):
            return []
        if self.chance(0.5):
            begin, end = sorted(self.rng.integers(0, count + 1, 2).tolist())
            return list(range(begin, end))
        return self.rng.integers(0, count, int(self.rng.integers(1, 2 * count + 1))).tolist()


# -------------------------------------------------------------------- what is tried


def same(seen: Any, batch: TensorDict, rows: Rows) -> None:
    if rows or not any(isinstance(value, NonTensorStack) or "stack" in name for name, value in batch.items()):
        oracle.assert_same_batch(seen, oracle.take_rows(batch, rows))


def try_rows(maker: Maker, batch: TensorDict, packed: mp.PackedBatch, options: dict[str, Any]) -> None:
    """One batch on every path."""
    count = batch.batch_size[0]
    same(mp.decompress(packed), batch, list(range(count)))
    rows = maker.rows_of(count)
    same(mp.decompress(packed[rows]), batch, rows)
    again = maker.rows_of(len(rows))
    same(mp.decompress(packed[rows][again]), batch, [rows[row] for row in again])
    same(mp.decompress(pickle.loads(pickle.dumps(packed[rows]))), batch, rows)
    data = packed[rows].to_bytes(allow_pickle=True)
    same(mp.decompress(mp.PackedBatch.from_bytes(data, allow_pickle=True)), batch, rows)
    view = mp.views.BatchView.of(packed)
    same(view.take(rows).materialize(), batch, rows)
    same(
        mp.views.BatchView.cat([view[again_part] for again_part in (rows, rows[::-1])]).materialize(),
        batch,
        rows + rows[::-1],
    )
    same(mp.unnest_batch_by_mask(mp.decompress(packed[rows], format="nested")), batch, rows)
    parts = packed.chunk(int(maker.rng.integers(1, 4)))
    same(mp.decompress(mp.PackedBatch.cat(parts)), batch, list(range(count)))
    same(mp.decompress(mp.PackedBatch.cat([packed[rows], packed])), batch, [*rows, *range(count)])
    nested = mp.nest_batch_by_mask(batch, **options)
    same(mp.unnest_batch_by_mask(nested), batch, list(range(count)))
    if rows:
        same(mp.unnest_batch_by_mask(nested[torch.tensor(rows)]), batch, rows)
    if count:
        plan = mp.planning.plan_micro_batches(maker.rng.integers(1, 9, count), 12)
        for whole in (batch, nested, packed, view):
            taken = list(plan.apply(whole))
            for part, own in zip(taken, plan.micro_batches, strict=True):
                same(opened(part), batch, own)
            same(opened(plan.restore(taken)), batch, list(range(count)))


def opened(part: Any) -> TensorDict:
    if isinstance(part, mp.PackedBatch):
        return mp.decompress(part)
    if isinstance(part, mp.views.BatchView):
        return part.materialize()
    return mp.unnest_batch_by_mask(part) if "_maskpack" in part.keys() else part  # noqa: SIM118


def try_joining(
    made: list[tuple[TensorDict, dict[str, tuple[str, Any]]]],
    sizes: list[tuple[int, int]],
    packs: Any,
    sure: list[bool],
) -> str:
    """Batches of other widths and splits as one, against padding each by hand."""
    prompt, response = (max(size[part] for size in sizes) for part in (0, 1))
    even: list[TensorDict] = []
    for (batch, pads), size in zip(made, sizes, strict=True):
        left, right = prompt - size[0], response - size[1]
        fields: dict[str, Any] = {}
        for name, value in batch.items():
            if name in pads:
                axis, pad = pads[name]
                grown = {"prompt": (left, 0), "response": (0, right), "sequence": (left, right)}[axis]
                value = widened(value, *grown, pad)
            fields[name] = value
        even.append(TensorDict(fields, batch.batch_size))
    total = [name for name in made[0][0].keys() if all(name in pads for _, pads in made)]  # noqa: SIM118
    lossy = "entropys" not in total and any(size[1] != response for size in sizes)
    try:
        out = mp.decompress(mp.PackedBatch.cat(packs))
    except mp.errors.LayoutError as error:
        if lossy and '"entropys"' in str(error):
            return "refused"
        raise
    viewed = mp.views.BatchView.cat([mp.views.BatchView.of(packed) for packed in packs]).materialize()
    total.remove("position_ids")
    check_positions([out["position_ids"], viewed["position_ids"]], made, sizes, sure)
    for name in [*total, "unknown", "reward_baselines"]:
        want = oracle.from_cells(np.concatenate([oracle.cells(batch[name]) for batch in even]), out[name].dtype)
        oracle.assert_same_tensor(out[name], want, name)
        oracle.assert_same_tensor(viewed[name], want, f"view {name}")
    bounds = np.cumsum([0, *[batch.batch_size[0] for batch, _ in made]]).tolist()
    for name in ("class", "turn", "sub", "stack", "turns", "objects", "jagged"):
        for (batch, _), begin, end in zip(made, bounds, bounds[1:], strict=False):
            if name in batch.keys() and end > begin:  # noqa: SIM118
                rows = list(range(begin, end))
                part = oracle.take_rows(out.select(name), rows)
                if name != "sub":
                    same(part, batch.select(name), list(range(end - begin)))
                else:
                    oracle.assert_same_batch(part["sub", "deep"], batch["sub", "deep"])
    return "joined"


def check_positions(seen: list[Tensor], made: Any, sizes: list[tuple[int, int]], sure: list[bool]) -> None:
    """New columns are padded as the batches tell; where none tells, by either pad."""
    prompt, response = (max(size[part] for size in sizes) for part in (0, 1))
    told = {pads["position_ids"][1] for (_, pads), tells in zip(made, sure, strict=True) if tells}
    begin = 0
    for (batch, pads), size, tells in zip(made, sizes, sure, strict=True):
        may = told if len(told) == 1 else {pads["position_ids"][1]} if tells else {0, oracle.EDGE}
        ways = [widened(batch["position_ids"], prompt - size[0], response - size[1], pad) for pad in may]
        for row in range(batch.batch_size[0]):
            for out in seen:
                assert any(torch.equal(out[begin + row], way[row]) for way in ways), (out[begin + row], ways, row)
        begin += batch.batch_size[0]


def widened(x: Tensor, left: int, right: int, pad: Any) -> Tensor:
    old = oracle.cells(x)
    out = np.zeros((old.shape[0], left + old.shape[1] + right), old.dtype)
    for row in range(old.shape[0]):
        for place in range(out.shape[1]):
            if left <= place < left + old.shape[1]:
                out[row, place] = old[row, place - left]
            elif pad is oracle.EDGE:
                out[row, place] = old[row, 0 if place < left else -1] if old.shape[1] else out[row, place]
            else:
                out[row, place] = oracle.cells(pad)[row] if isinstance(pad, Tensor) else oracle.pad_cell(pad, x.dtype)
    return oracle.from_cells(out, x.dtype)


def session(_: Any) -> AbstractContextManager[Any]:
    return set_list_to_stack(True)


def play(seed: int) -> Counter[str]:
    maker = Maker(seed)
    sizes = [
        (int(maker.rng.integers(0, 4)), int(maker.rng.integers(0, 5))) for _ in range(int(maker.rng.integers(2, 4)))
    ]
    if maker.chance(0.4):
        total = int(maker.rng.integers(2, 7))
        sizes = [(head, total - head) for head in maker.rng.integers(0, total + 1, len(sizes)).tolist()]
    rows = [int(maker.rng.integers(1, 6)) for _ in sizes]
    made = [maker.batch(count, *size) for count, size in zip(rows, sizes, strict=True)]
    options: dict[str, Any] = {"pad_token_id": TOKEN, "verify": maker.one(("always", mp.VerifyFirst()))}
    if maker.positions == "either" or any("entropys" not in pads for _, pads in made):  # no producer to trust
        options["verify"] = "always"
    packs = [mp.compress(batch, **options) for batch, _ in made]
    for (batch, _), packed in zip(made, packs, strict=True):
        try_rows(maker, batch, packed, options)
    return Counter({"batches": len(made), try_joining(made, sizes, packs, maker.sure): 1})
