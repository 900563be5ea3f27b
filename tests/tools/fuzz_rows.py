"""Random programs of operations on rows, fields and tokens, against lists of what each row holds.

A program has several batches, packed, in views and behind references. Each step makes another one from those that are
there: take, slice, split, cat, select, narrow, take_tokens, own, pickle, bytes, a file, with_fields. It is decoded at
once, or only at the end of the program, in a thread beside others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fuzz_batches
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.views import BatchMeta, BatchView

COUNT = 2000
STEPS = 6
NAMES = ("ids", "logs", "advantages", "experts", "score", "tag")
SPECS = {
    "mask": mp.MaskNestingSpec("mask"),
    "ids": mp.MaskNestingSpec("mask", 7),
    "logs": mp.MaskNestingSpec("mask"),
    "advantages": mp.MaskNestingSpec("mask", mp.PER_ROW),
    "experts": mp.MaskNestingSpec("mask", hints=("columns",)),
    "score": mp.MaskNestingSpec(None),
}
Row = dict[str, Any]
"""What a row holds: its valid tokens by the name of a field, its score, its tag."""


@dataclass
class Held:
    """Rows in some form, what they hold, and whether they are spans of tokens."""

    form: Any
    rows: list[Row]
    spans: bool = False


class Program:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.store: dict[int, mp.PackedBatch] = {}
        self.prefix = [self.rng.integers(0, 900, 40) for _ in range(3)]
        self.experts = (3, 2) if self.chance(0.5) else (20, 1)
        self.done: Counter[str] = Counter()
        self.held = [self.batch() for _ in range(int(self.rng.integers(1, 4)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    # ---------------------------------------------------------------- batches

    def batch(self) -> Held:
        """Rows with common beginnings, in a width of their own."""
        count, width = int(self.rng.integers(1, 24)), int(self.rng.integers(1, 60))
        lengths = self.rng.integers(0, width + 1, count)
        begins = [int(self.rng.integers(0, width - n + 1)) for n in lengths] if self.chance(0.5) else [0] * count
        mask = np.zeros((count, width), np.int64)
        fields = {
            "ids": np.full((count, width), 7),
            "logs": np.zeros((count, width), np.float32),
            "advantages": np.zeros((count, width), np.float32),
            "experts": np.zeros((count, width, *self.experts), np.int16),
        }
        rows: list[Row] = []
        for row, (n, begin) in enumerate(zip(lengths.tolist(), begins, strict=True)):
            head = self.one(self.prefix)[: n // 2]
            ids = np.concatenate([head, self.rng.integers(0, 900, n - head.size)])
            advantages = np.full(n, self.rng.standard_normal(), np.float32)
            pad = np.float32(self.rng.integers(-2, 3)) if n < width else np.float32(0)
            fields["advantages"][row] = pad
            held = {
                "ids": ids,
                "logs": self.rng.standard_normal(n).astype(np.float32),
                "advantages": advantages,
                "experts": self.rng.integers(0, 60, (n, *self.experts)).astype(np.int16),
            }
            mask[row, begin : begin + n] = 1
            for name, values in held.items():
                fields[name][row, begin : begin + n] = values
            tag = f"{row} of {count}"
            rows.append({**held, "mask": np.ones(n, np.int64), "score": float(self.rng.integers(99)), "tag": tag})
        batch = TensorDict({name: torch.from_numpy(values) for name, values in fields.items()}, [count])
        batch["mask"] = torch.from_numpy(mask)
        batch["score"] = torch.tensor([row["score"] for row in rows])
        batch["tag"] = [row["tag"] for row in rows]
        return Held(self.as_form(mp.compress(batch, registry=SPECS)), rows)

    def as_form(self, packed: mp.PackedBatch) -> Any:
        """Packed, a view of it, or a view of a reference."""
        kind = self.one(("packed", "packed", "view", "reference"))
        if kind == "reference":
            self.store[len(self.store)] = packed
            return BatchView.at(len(self.store) - 1, BatchMeta.of(packed))
        return packed if kind == "packed" else BatchView.of(packed)

    def packed(self, form: Any) -> mp.PackedBatch:
        return (
            form if isinstance(form, mp.PackedBatch) else form.to_packed(get=lambda keys: [self.store[k] for k in keys])
        )

    # ---------------------------------------------------------------- steps

    def take(self, own: Held) -> Held:
        count = len(own.rows)
        index = (
            self.rng.integers(-count, count, int(self.rng.integers(0, 2 * count + 1))) if count else np.zeros(0, int)
        )
        if self.chance(0.3):
            index = np.flatnonzero(self.rng.random(count) < 0.5)
        return Held(own.form.take(index), [own.rows[row] for row in index], own.spans)

    def slice(self, own: Held) -> Held:
        ends = [None if self.chance(0.3) else int(self.rng.integers(-30, 30)) for _ in range(2)]
        chosen = slice(*ends, self.one((None, 1, 2, -1, -3)))
        return Held(own.form[chosen], own.rows[chosen], own.spans)

    def split(self, own: Held) -> Held:
        count, parts = len(own.rows), int(self.rng.integers(1, 5))
        sizes = np.diff(np.sort([0, *self.rng.integers(0, count + 1, parts - 1), count])).tolist()
        at = int(self.rng.integers(parts))
        begin = sum(sizes[:at])
        return Held(own.form.split(sizes)[at], own.rows[begin : begin + sizes[at]], own.spans)

    def cat(self, own: Held) -> Held:
        names = set(self.names(own))
        like = [other for other in self.held if other.spans == own.spans and set(self.names(other)) == names]
        like = [other for other in like if type(other.form) is type(own.form) and self.fits(own, other)]
        parts = [own, *(self.one(like) for _ in range(int(self.rng.integers(1, 4))))]
        form = type(own.form).cat([part.form for part in parts])
        return Held(form, [row for part in parts for row in part.rows], own.spans)

    def fits(self, own: Held, other: Held) -> bool:
        """Whether both have experts of one shape, if they have some."""
        one, two = ([form.shape for form in self.forms(held) if form.path == ("experts",)] for held in (own, other))
        return one == two

    def select(self, own: Held) -> Held:
        names = self.names(own)
        kept = [name for name in names if self.chance(0.7)] or names[:1]
        return Held(own.form.select(*kept), [{name: row[name] for name in kept} for row in own.rows], own.spans)

    def narrow(self, own: Held) -> Held:
        packed = self.packed(own.form)
        if "experts" not in self.names(own):
            return own
        size = packed.forms["experts",].shape[0]
        start = int(self.rng.integers(0, size))
        length = int(self.rng.integers(1, size - start + 1))
        rows = [{**row, "experts": row["experts"][:, start : start + length]} for row in own.rows]
        return Held(packed.narrow("experts", start, length), rows, own.spans)

    def take_tokens(self, own: Held) -> Held:
        inside = [form.layout for form in self.forms(own) if form.layout is not None]
        if not inside or not own.rows:
            return own
        lengths = own.form.lengths(inside[0])
        spans: list[tuple[int, int, int]] = []
        for _ in range(int(self.rng.integers(0, 12))):
            row = int(self.rng.integers(len(own.rows)))
            start, stop = np.sort(self.rng.integers(0, lengths[row] + 1, 2)).tolist()
            spans.append((row, start, stop))
        rows = [
            {name: v[start:stop] if isinstance(v, np.ndarray) else v for name, v in own.rows[row].items()}
            for row, start, stop in spans
        ]
        layout = inside[0] if len(own.form.layouts) > 1 or self.chance(0.5) else None
        return Held(own.form.take_tokens(spans, layout), rows, True)

    def sent(self, own: Held) -> Held:
        return Held(self.one(fuzz_batches.WAYS)(self.packed(own.form)), own.rows, own.spans)

    def viewed(self, own: Held) -> Held:
        return Held(self.as_form(self.packed(own.form)), own.rows, own.spans)

    def with_fields(self, own: Held) -> Held:
        """Its own score, from rows that were packed elsewhere."""
        fields = TensorDict({"score": torch.arange(len(own.rows)).float()}, [len(own.rows)])
        view = own.form if isinstance(own.form, BatchView) else BatchView.of(own.form)
        added = view.with_fields(mp.compress(fields, registry={"score": mp.MaskNestingSpec(None)}))
        return Held(added, [{**row, "score": float(at)} for at, row in enumerate(own.rows)], own.spans)

    STEPS: tuple[Callable[..., Held], ...] = (
        *(take, take, slice, split, cat, cat, select, narrow, take_tokens),
        *(sent, sent, sent, sent, viewed, with_fields),
    )

    def forms(self, own: Held) -> tuple[Any, ...]:
        return (own.form if isinstance(own.form, mp.PackedBatch) else own.form.head).schema.forms

    def names(self, own: Held) -> list[str]:
        return [form.path[0] for form in self.forms(own)]

    # ---------------------------------------------------------------- checks

    def check(self, own: Held) -> None:
        packed = self.packed(own.form)
        assert len(packed) == len(own.form) == len(own.rows)
        format = self.one(("padded", "nested"))
        out = mp.decompress(packed, format=format)
        out = out if format == "padded" else mp.unnest_batch_by_mask(out)
        mask = out.get("mask", None)
        for name in self.names(own):
            seen: Any = out[name]
            for at, row in enumerate(own.rows):
                want = row[name]
                if not isinstance(want, np.ndarray):
                    assert (seen[at].item() if isinstance(seen, Tensor) else seen[at]) == want, (name, at)
                    continue
                if seen.is_nested:
                    values = seen.unbind()[at]
                elif mask is not None:
                    values = seen[at][mask[at] != 0]
                else:
                    layout = packed.layouts["mask"].to_mask()
                    values = seen[at][layout[at]]
                assert values.numpy().tobytes() == want.tobytes(), (name, at, values, want)

    def run(self) -> None:
        later: list[Held] = []
        for _ in range(STEPS):
            step = self.one(self.STEPS)
            made = step(self, self.one(self.held))
            self.done[step.__name__] += 1
            self.held.append(made)
            self.check(made) if self.chance(0.5) else later.append(made)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.check, later))


def play(seed: int) -> Counter[str]:
    program = Program(seed)
    program.run()
    return program.done
