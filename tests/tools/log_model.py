"""What a RolloutLog should have, by a dict of rows; operations that are drawn at random; and the comparison.

A row is made of its key alone, so that a test knows it without the log. Schemas: tokens under a mask in several widths,
the same with Python objects that share large arrays, and numbers with an object for the whole batch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import maskpack as mp
from maskpack.errors import MaskpackWarning
from maskpack.store import RolloutLog

WIDTHS = (6, 9, 14)
SCHEMAS = (0, 1, 2)
IMAGES = [np.random.default_rng(number).integers(0, 255, 4096 + 500 * number, dtype=np.uint8) for number in range(4)]
"""Arrays of Python objects that a log stores once."""


class Row(NamedTuple):
    schema: int
    key: int
    style: int
    first: int
    """The key of the first row of its batch, for tags of a whole batch."""

    @property
    def tags(self) -> dict[str, Any]:
        step, own = self.first // 16, self.key
        kinds = [None, own % 2 == 0, own % 5, own / 4, f"worker {own % 3}"]
        return [{}, {"step": step}, {"step": step, "own": own}, {"kind": kinds[own % 5], "run": "a", "own": own}][
            self.style
        ]


def length(row: Row) -> int:
    return row.key * 7 % 7 if row.key % 11 == 0 else row.key * 5 % 7


def objects(row: Row) -> Any:
    """Some have two images, so that rows of a batch share some of them; some have one that no other row has."""
    images = [IMAGES[row.key % 4], IMAGES[row.key // 4 % 4]][: 2 if row.key % 3 else 1]
    return {"key": row.key, "images": [*images, row.key + np.arange(520)] if row.key % 4 == 3 else images}


def batch_of(rows: list[Row], width: int) -> TensorDict:
    keys = torch.tensor([row.key for row in rows])
    if rows[0].schema == 2:
        vector = torch.stack([keys % 100, keys % 7, keys % 13], 1).short()
        fields: dict[str, Any] = {"score": keys.double() / 3, "vector": vector}
        return TensorDict({**fields, "meta": NonTensorData(["all", IMAGES[0]])}, batch_size=[len(rows)])
    mask = torch.arange(width)[None] < torch.tensor([length(row) for row in rows])[:, None]
    ids = (keys[:, None] * 31 + torch.arange(width)[None] * 17) % 1000 + 1
    fields = {"response_mask": mask.long(), "responses": ids * mask, "reward": keys.double() / 7}
    fields["advantages"] = ids.float() / 9 * mask  # divided: sines differ by place
    if rows[0].schema == 1:
        fields["extra"] = NonTensorStack(*[NonTensorData(objects(row)) for row in rows])
    return TensorDict(fields, batch_size=[len(rows)])


def tags_for(rows: list[Row]) -> dict[str, Any]:
    """Tags as append takes them: what is the same for all rows as one value."""
    whole = ("step", "run")
    return {name: rows[0].tags[name] if name in whole else [row.tags[name] for row in rows] for name in rows[0].tags}


def assert_rows(batch: Any, rows: list[Row]) -> None:
    """Bit for bit the rows of their keys, whatever the width."""
    expected = batch_of(rows, max(WIDTHS))
    names = set(expected.keys())
    assert set(batch.keys()) == names
    assert batch.batch_size == expected.batch_size
    for name in names:
        want, seen = expected[name], batch[name]
        if name == "meta":
            assert seen[0] == want[0]
            assert np.array_equal(seen[1], want[1])
        elif name == "extra":
            for one, other in zip(seen, want, strict=True):
                assert one["key"] == other["key"]
                assert len(one["images"]) == len(other["images"])
                assert all(map(np.array_equal, one["images"], other["images"]))
        else:
            if want.ndim == 2 and name != "vector":
                assert not want[:, seen.shape[1] :].any()
                want = want[:, : seen.shape[1]]
            assert (seen.dtype, seen.shape) == (want.dtype, want.shape), name
            assert seen.contiguous().numpy().tobytes() == want.contiguous().numpy().tobytes(), name


# -------------------------------------------------------------------- operations


@dataclass
class Model:
    """Attributes:
    live: the rows by number; `ever`, with those that were deleted.
    next_row: the number of the next row.
    """

    live: dict[int, Row] = field(default_factory=dict[int, Row])
    next_row: int = 0
    ever: dict[int, Row] = field(default_factory=dict[int, Row])

    def after(self, op: dict[str, Any]) -> Model:
        if op["do"] == "append":
            new = {self.next_row + at: row for at, row in enumerate(rows_of(op))}
            return Model(self.live | new, self.next_row + len(new), self.ever | new)
        if op["do"] == "delete":
            live = {number: row for number, row in self.live.items() if number not in op["rows"]}
            return Model(live, self.next_row, self.ever)
        return self


def rows_of(op: dict[str, Any]) -> list[Row]:
    return [Row(op["schema"], op["key"] + at, op["style"], op["key"]) for at in range(op["count"])]


def drawn(rng: random.Random, live: list[int], key: int, others: Iterable[str] = ("compact",)) -> dict[str, Any]:
    """An operation; `key` is one above the keys of earlier rows."""
    do = rng.choices(["append", "delete", *others], [6, 3, *(1 for _ in others)])[0]
    if do == "append":
        count = rng.choice([1, 1, 2, 3, 5, 12, 40])
        given = {"schema": rng.choice(SCHEMAS), "width": rng.choice(WIDTHS), "style": rng.randrange(4)}
        return {"do": do, "key": key, "count": count, **given}
    if do == "delete":
        begin = rng.randrange(len(live) + 1)
        some = live[begin : begin + rng.choice([1, 5, 40, 100])]
        return {"do": do, "rows": some if rng.random() < 0.7 else rng.sample(some, len(some) // 2)}
    return {"do": do, "least": rng.choice([0.0, 0.2, 0.5])} if do == "compact" else {"do": do}


def played(log: RolloutLog, op: dict[str, Any], backup: Path | None = None) -> Any:
    """What an operation returned."""
    if op["do"] == "append":
        rows = rows_of(op)
        return log.append(batch_of(rows, op["width"]), tags_for(rows))
    if op["do"] == "delete":
        return log.delete(op["rows"])
    if op["do"] == "compact":
        return log.compact(op["least"])
    if op["do"] == "back_up":
        assert backup is not None
        return log.back_up(backup)
    return log.sync()


# -------------------------------------------------------------------- comparison


def opened(path: Path, mode: Any = "a", **options: Any) -> RolloutLog:
    """A log; nothing in it may be damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskpackWarning)
        return RolloutLog(path, mode=mode, pad_token_id=0, **{"segment_bytes": 4096, **options})


def assert_log(log: RolloutLog, model: Model) -> None:
    """The rows of the model, each once, bit for bit, with their tags, and no others."""
    numbers = sorted(model.live)
    assert log.rows.tolist() == numbers, (log.rows.tolist(), numbers)
    assert len(log) == len(numbers)
    assert log.next_row >= model.next_row
    assert_read(log, model.live)
    if numbers:
        step = model.live[numbers[len(numbers) // 2]].first // 16
        expected = [number for number in numbers if model.live[number].tags.get("step") == step]
        assert log.where(step=step).tolist() == expected


def assert_held(path: Path, model: Model, mode: Any = "a") -> None:
    """The same of a log that is opened for it."""
    with opened(path, mode) as log:
        assert_log(log, model)


def assert_read(log: RolloutLog, live: dict[int, Row]) -> None:
    for schema in SCHEMAS:
        own = [number for number, row in sorted(live.items()) if row.schema == schema]
        if own:
            assert_rows(mp.decompress(log.take(own)), [live[number] for number in own])
    assert_tags(log, live)


def assert_tags(log: RolloutLog, live: dict[int, Row]) -> None:
    numbers = sorted(live)
    tags = log.tags(numbers)
    for at, number in enumerate(numbers):
        seen = {name: values[at] for name, values in tags.items() if values[at] is not None}
        expected = {name: value for name, value in live[number].tags.items() if value is not None}
        assert repr(sorted(seen.items())) == repr(sorted(expected.items())), number
