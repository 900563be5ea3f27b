"""The packed rows of the data plane against TransferQueue's own way: rows in dicts, one by one, in this process."""

from __future__ import annotations

import asyncio
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from frozen import freeze, same, uncast
from needs import needs
from tensordict import NonTensorStack, TensorDict, lazy_stack

needs("transfer_queue")

from test_transferqueue_manager import Direct, clear, get, put, units
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.storage.simple_storage import StorageUnitData

from maskpack.adapters.transferqueue import manager
from maskpack.adapters.transferqueue.chunk import stacked
from maskpack.errors import LayoutError

_UNITS = 2


class Theirs:
    """Rows as TransferQueue's SimpleStorage keeps them."""

    def __init__(self) -> None:
        self.units = [StorageUnitData() for _ in range(_UNITS)]

    def put(self, samples: list[int], data: TensorDict) -> dict[str, Any]:
        for unit, places in routed(samples).items():
            fields = {
                name: AsyncSimpleStorageManager._select_by_positions(data[name], places) for name in list(data.keys())
            }
            rows = {name: list(value.unbind()) if is_tensor(value) else value for name, value in fields.items()}
            self.units[unit].put_data(rows, [samples[place] for place in places])
        return extract_field_schema(data)

    def get(self, samples: list[int], fields: list[str]) -> TensorDict:
        rows: dict[str, list[Any]] = {name: [None] * len(samples) for name in fields}
        for unit, places in routed(samples).items():
            found = self.units[unit].get_data(fields, [samples[place] for place in places])
            for name in fields:
                for place, value in zip(places, found[name], strict=True):
                    rows[name][place] = value
        packed = {name: uncast(AsyncSimpleStorageManager._pack_field_values)(values) for name, values in rows.items()}
        return TensorDict(packed, batch_size=len(samples))

    def clear(self, samples: list[int]) -> None:
        for unit, places in routed(samples).items():
            self.units[unit].clear([samples[place] for place in places])


class Ours(Direct):
    """The same calls of the manager of Maskpack, over units in this process."""

    def __init__(self) -> None:
        super().__init__(units(_UNITS))

    def put(self, samples: list[int], data: TensorDict) -> dict[str, Any]:
        asyncio.run(put(self, samples, data))
        return self.schema

    def get(self, samples: list[int], fields: list[str]) -> TensorDict:
        return asyncio.run(get(self, samples, *fields))

    def clear(self, samples: list[int]) -> None:
        asyncio.run(clear(self, samples))

    async def notify_data_update(self, partition: str, samples: list[int], schema: dict[str, Any]) -> None:
        self.schema = schema


@pytest.fixture(autouse=True)
def blocks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_BLOCK", 1)


def routed(samples: list[int]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        out.setdefault(sample % _UNITS, []).append(place)
    return out


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# -------------------------------------------------------------------- columns of all kinds


def ragged(rng: random.Random, rows: int, dtype: torch.dtype, more: tuple[int, ...] = (), least: int = 0) -> Any:
    parts = [values(rng, (rng.randint(least, 6), *more), dtype) for _ in range(rows)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    line = torch.tensor([rng.randrange(256) for _ in range(count)], dtype=torch.uint8)
    if dtype is torch.bool:
        return (line % 2).view(shape).bool()
    return line.view(dtype).view(shape) if count else torch.zeros(shape, dtype=dtype)


KINDS = 13
DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.float64, torch.float8_e4m3fn)
_WORDS = ("a", "", None, 3, -1.5, True, b"x", (1, "b"))


def column(rng: random.Random, rows: int, kind: int | None = None, dtype: torch.dtype | None = None) -> Any:
    dtype = rng.choice(DTYPES) if dtype is None else dtype
    kind = rng.randrange(KINDS) if kind is None else kind
    if kind == 0:
        return ragged(rng, rows, dtype)
    if kind == 1:
        return ragged(rng, rows, dtype, (rng.randint(1, 3),))
    if kind == 2:
        return values(rng, (rows,), dtype)
    if kind == 3:
        return values(rng, (rows, rng.randint(0, 5)), dtype)
    if kind == 4:
        return values(rng, (rows, rng.randint(1, 3), 2), dtype)
    if kind == 5:
        return NonTensorStack(*[rng.choice(_WORDS) for _ in range(rows)])
    if kind == 6:
        return NonTensorStack(*[{"n": row, "t": values(rng, (2,), dtype)} for row in range(rows)])
    if kind == 7:
        return NonTensorStack(*[[row, "s"] * rng.randint(0, 2) for row in range(rows)])
    if kind == 8:
        parts = [values(rng, (rng.randint(1, 3), rng.randint(1, 3)), torch.float32) for _ in range(rows)]
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)
    if kind == 9:
        return NonTensorStack(*[np.arange(rng.randint(0, 4), dtype=np.int32) for _ in range(rows)])
    if kind == 10:
        return torch.ones(rows, rng.randint(1, 9), dtype=torch.int64).cumsum(1)
    if kind == 11:  # rows [F, L]
        parts = [values(rng, (2, rng.randint(1, 4)), dtype) for _ in range(rows)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return NonTensorStack(*[values(rng, (40_000,), torch.float32) * 0 + row % 2 for row in range(rows)])


NAMES = ("input_ids", "position_ids", "prompts", "responses", "response_mask", "old_log_probs", "uid", "x", "y", "z")


def padded(rng: random.Random, rows: int) -> TensorDict:
    prompt, response = rng.randint(1, 4), rng.randint(1, 5)
    mask = torch.zeros(rows, prompt + response, dtype=torch.int64)
    for row in range(rows):
        mask[row, prompt - rng.randint(0, prompt) : prompt + rng.randint(0, response)] = 1
    ids = torch.randint(1, 99, mask.shape) * mask + 7 * (1 - mask)
    fields = {"prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids, "attention_mask": mask}
    fields["response_mask"] = mask[:, prompt:]
    fields["old_log_probs"] = torch.randn(rows, response) * mask[:, prompt:]
    fields["x"] = torch.randn(rows, 3)
    out = TensorDict(fields, batch_size=[rows])
    for name, kind in (("uid", 5), ("y", 6), ("z", 7)):
        out[name] = column(rng, rows, kind)
    return out


def batch(rng: random.Random, rows: int) -> TensorDict:
    if rng.random() < 0.2:
        return padded(rng, rows)
    names = rng.sample(NAMES, rng.randint(1, 6))
    return TensorDict({name: column(rng, rows) for name in names}, batch_size=[rows])


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    same(freeze(ours), freeze(theirs), where)


@pytest.mark.parametrize("seed", range(60))
def test_rows_come_back_as_from_simple_storage(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ours, theirs = Ours(), Theirs()
    known: dict[int, set[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            rows = rng.choice((1, 1, 1, 2, 5, 9))
            fresh = not known or rng.random() < 0.6
            most = max(known, default=-1) + 1
            samples = list(range(most, most + rows)) if fresh else rng.sample(sorted(known), min(rows, len(known)))
            data = batch(rng, len(samples))
            mine, other = ours.put(samples, data), theirs.put(samples, data)
            assert list(mine) == list(other)
            for name in mine:
                assert_equal(mine[name], other[name], f"{step} {name}")
            for sample in samples:
                known.setdefault(sample, set()).update(data.keys())
            for _ in range(3):
                some = rng.sample(sorted(known), rng.randint(1, len(known)))
                fields = sorted(set.intersection(*(known[sample] for sample in some)))
                if not fields:
                    continue
                wanted = rng.sample(fields, rng.randint(1, len(fields)))
                some += rng.sample(some, rng.randint(0, 1))  # a sample may be asked for twice
                got, want = ours.get(some, wanted), theirs.get(some, wanted)
                assert list(got.keys()) == list(want.keys())
                for name in wanted:
                    assert_equal(got.get(name), want.get(name), f"{step} {name}")
            if rng.random() < 0.4:
                gone = rng.sample(sorted(known), rng.randint(0, len(known)))
                ours.clear(gone)
                theirs.clear(gone)
                for sample in gone:
                    del known[sample]
                assert set().union(*(unit.rows for unit in ours.units)) == set(known)
    ours.clear(list(known))
    assert not any(unit.figures()["chunks"] or any(unit._small.values()) for unit in ours.units)


def test_one_row_that_is_nested_too_deep_does_not_stand_for_all() -> None:
    ours = Ours()
    deep: list[Any] = []
    for _ in range(80):
        deep = [deep]
    picture = torch.rand(40_000)
    rows: list[Any] = [{"t": torch.arange(3)}, deep, {"t": picture}, {"t": picture}]
    for sample, row in enumerate(rows):
        ours.put([2 * sample], TensorDict({"o": stacked([row]), "n": torch.tensor([sample])}, batch_size=[1]))
    for joined in (False, True):
        if joined:
            (small,) = ours.units[0]._small.values()
            ours.units[0]._rewrite([*small])
        got = ours.get([6, 2, 0, 4], ["o", "n"])
        assert got["n"].tolist() == [3, 1, 0, 2]
        first, second, third, fourth = got.get("o").tolist()
        assert torch.equal(first["t"], picture)
        assert torch.equal(fourth["t"], picture)
        assert torch.equal(third["t"], torch.arange(3))
        assert second == deep
    assert ours.units[0].figures()["chunks"] == ours.units[0].figures()["large_tensors"] == 1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.float8_e8m0fnu])
def test_scalars_that_torch_cannot_index_are_reordered(dtype: torch.dtype) -> None:
    ours = Ours()
    given = values(random.Random(0), (6,), dtype)
    ours.put([0, 1, 2], TensorDict({"x": given[:3]}, batch_size=[3]))
    ours.put([3, 4, 5], TensorDict({"x": given[3:]}, batch_size=[3]))
    got = ours.get([5, 0, 4, 2, 1, 3], ["x"])["x"]
    assert got.dtype == dtype
    want = [given[row].view(1).view(torch.uint8).tolist() for row in (5, 0, 4, 2, 1, 3)]
    assert [row.view(1).view(torch.uint8).tolist() for row in got.unbind()] == want


@pytest.mark.parametrize(
    "rows",
    [
        [torch.tensor([1]), torch.tensor([-0.7066])],
        [torch.tensor([1.0]).bfloat16(), torch.tensor([16777217.0], dtype=torch.float64)],
        [torch.tensor([True, False]), torch.tensor([3])],
        [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5, 0.25]])],
        [torch.tensor(2**53 + 1), torch.tensor(0.5)],
    ],
)
def test_rows_of_different_dtypes_keep_them(rows: list[torch.Tensor]) -> None:
    ours = Ours()
    for sample, row in enumerate(rows):
        ours.put([sample], TensorDict({"x": row[None]}, batch_size=[1]))
    for order in ([0, 1], [1, 0]):
        got = ours.get(order, ["x"]).get("x")
        assert isinstance(got, NonTensorStack)
        assert_equal(got.tolist(), [rows[sample] for sample in order], "x")


def test_a_lazy_stack_of_rows_of_different_dtypes_is_refused() -> None:
    rows = [TensorDict({"x": torch.tensor([2**24 + 1])}), TensorDict({"x": torch.tensor([0.5])})]
    with pytest.raises(LayoutError, match="lazy stack whose rows differ"):
        Ours().put([0, 1], lazy_stack(rows))
    ours = Ours()
    ours.put([0, 1], lazy_stack([rows[0], rows[0]]))
    assert ours.get([1, 0], ["x"])["x"].values().tolist() == [2**24 + 1] * 2


def test_padded_samples_are_put_whatever_the_variable_of_strict_mode_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values under the mask, a tensor inside an object, and a field whose mask is not in the batch."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = TensorDict({"attention_mask": mask, "input_ids": torch.arange(6).view(2, 3)}, batch_size=[2])
    batch["old_log_probs"] = torch.rand(2, 3)
    batch.set("extra", NonTensorStack({"t": torch.rand(2)}, {"t": torch.rand(3)}))
    ours = Ours()
    monkeypatch.setenv("MASKPACK_STRICT", "1")
    ours.put([0, 1], batch)
    got = ours.get([1, 0], ["attention_mask", "input_ids", "old_log_probs", "extra"])
    for name in ("attention_mask", "input_ids", "old_log_probs"):
        for row, other in enumerate((1, 0)):
            assert torch.equal(got[name][row], batch[name][other]), name
    for row, other in enumerate((1, 0)):
        assert torch.equal(got.get("extra").tolist()[row]["t"], batch.get("extra").tolist()[other]["t"])
