"""Several threads encode a batch to the bytes that one thread writes: whatever form its fields are in, the first time,
and in the forms of the last time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import torch
from hypothesis import given
from samples import PAD, VARIANTS
from strategies import Case, batches
from tensordict import TensorDict

from maskpack import RL_FIELDS, MaskNestingSpec, PackedBatch, compress, decompress, nest_batch_by_mask
from maskpack.core import abi, native
from maskpack.packed import table
from maskpack.packed.values import Values, packed_rows

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
THREADS = (2, 3, 16)


@pytest.fixture(autouse=True, scope="module")
def small_tasks() -> Any:
    """Threads are taken for few bytes, and as many as torch may use."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_A_THREAD", 1)
        yield
    torch.set_num_threads(threads)


def written(work: Callable[[], Sequence[PackedBatch]], threads: int) -> list[tuple[Any, ...]]:
    """What batches in a row are encoded to, from the first of them on: all arrays of their tables."""
    torch.set_num_threads(threads)
    table.forget()
    made = [packed.table for packed in work()]
    return [
        (
            own.names,
            own.stored.tobytes(),
            own.entries.tobytes(),
            own.fields.tolist(),
            own.pads.tobytes(),
            own.body.tobytes(),
        )
        for own in made
    ]


def assert_as_one(work: Callable[[], Sequence[PackedBatch]]) -> None:
    expected = written(work, 1)
    for threads in THREADS:
        assert written(work, threads) == expected


@pytest.mark.parametrize("form", ["padded", "nested"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads(variant: str, form: str) -> None:
    """Each batch is encoded as the one before, if it can be; some stay padded now and then, and some do not fit."""
    made = [samples.workload(variant, rows=rows, seed=seed) for seed, rows in enumerate((12, 12, 15, 13, 12, 9))]
    made[2]["old_log_probs"][2, -1] = 77
    made[3]["rollout_log_probs"].mul_(1e30)
    made[4]["responses"].random_(1 << 40)
    if form == "nested":
        made = [nest_batch_by_mask(batch, pad_token_id=PAD) for batch in made]
    assert_as_one(lambda: [compress(batch, pad_token_id=PAD) for batch in made])


def batch_of_every_encoding(seed: int) -> TensorDict:
    """Jagged rows whose fields take every encoding."""
    rng = np.random.default_rng(seed)
    rows, width = 32, 400
    batch = samples.workload("routed-experts", rows=rows, prompt=20, response=width, seed=seed)
    on = batch["attention_mask"][:, -width:] != 0
    copies = np.tile(rng.integers(0, 1 << 17, (rows // 4, width)), (4, 1))
    copies[:, :3] = rng.integers(0, 1 << 17, (rows, 3))
    batch["copies"] = torch.from_numpy(copies) * on
    batch["random"] = torch.from_numpy(rng.integers(-(1 << 62), 1 << 62, (rows, width))) * on
    batch["pairs"] = torch.stack([torch.arange(width).expand(rows, width) * on, batch["responses"] * on], 2)
    return batch


def test_every_encoding() -> None:
    hints = {"copies": ("pieces",), "random": (), "pairs": ("columns",)}
    registry = RL_FIELDS | {name: MaskNestingSpec("response", 0, hints=own) for name, own in hints.items()}
    options: dict[str, Any] = {"registry": registry, "pad_token_id": PAD}
    made = [nest_batch_by_mask(batch_of_every_encoding(seed), **options) for seed in range(4)]
    packed = [compress(batch, **options) for batch in made]
    entries = np.concatenate([own.table.entries for own in packed])
    assert set(entries["kind"].tolist()) == set(range(len(abi.KINDS)))
    assert (entries["second"][entries["kind"] == abi.KINDS.index("blocks")] >= 0).any()
    oracle.assert_same_batch(decompress(packed[-1]), batch_of_every_encoding(3))
    assert_as_one(lambda: [compress(batch, **options) for batch in made])


def test_rows_of_values() -> None:
    """Rows of packed values, and rows that are joined, are encoded by several threads, too."""
    made = [samples.workload(rows=rows, seed=rows) for rows in (20, 21)]

    def joined() -> list[PackedBatch]:
        parts = [compress(batch, pad_token_id=PAD) for batch in made]
        whole = PackedBatch.cat(parts)[[*range(30, 0, -1)]]
        lengths = np.arange(40) * 3
        ids = torch.arange(int(lengths.sum())) * 7919 % 50_000
        columns = {"ids": Values(ids, lengths), "index": Values(torch.arange(40) ** 2)}
        return [whole, PackedBatch.from_bytes(whole.to_bytes()), packed_rows(columns, 40, {}, "test")]

    assert_as_one(joined)


@given(batches(), batches())
def test_any_batch(case: Case, other: Case) -> None:
    """As the batch before, after another one, with other values."""

    def work() -> list[PackedBatch]:
        return [compress(own.batch, **own.options) for own in (case, other, case, case)]

    assert_as_one(work)


@pytest.mark.parametrize("first", [1, 0x7F])
@pytest.mark.parametrize("second", [257, 0x7F7F, 0x01010101])
def test_numbers_of_slices_that_are_equal_in_bytes_alone(first: int, second: int) -> None:
    """A slice of one number of a byte, and slices of wider ones that repeat that byte."""
    torch.set_num_threads(2)
    registry = {"x": MaskNestingSpec("m"), "m": MaskNestingSpec("m")}
    for last in (first, second, first):
        x = torch.full((32, 4096), first)
        x[16:] = last
        batch = TensorDict({"m": torch.ones(32, 4096), "x": x}, [32])
        assert torch.equal(decompress(compress(batch, registry=registry))["x"], x)
