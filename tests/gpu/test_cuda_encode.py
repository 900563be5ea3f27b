"""compress of batches on a GPU, encoded there, against compress of the same batches on the host."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same_tensor
from samples import PAD, VARIANTS, workload
from tensordict import TensorDict

from maskpack import compress, decompress, nest_batch_by_mask
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import batch as packing
from maskpack.packed import table as tables
from maskpack.packed.cuda import encode as encoding
from maskpack.packed.cuda.device_plan import DevicePlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_PLANNED = ("reference", "routed-experts", "ppo")
_SIZES = {"rows": 96, "prompt": 200, "response": 3000, "fill": 0.2}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads(monkeypatch: pytest.MonkeyPatch, variant: str, nested: bool) -> None:
    tables.forget()
    done: list[encoding.OnDevice | None] = []
    plans: list[bool] = []
    encoded = 0
    of_fields, of_plan = encoding.encode_on_device, DevicePlan.encoded
    monkeypatch.setattr(packing, "encode_on_device", lambda *given: (done.append(of_fields(*given)), done[-1])[1])

    def planned(plan: DevicePlan, batch: TensorDict) -> Any:
        found = of_plan(plan, batch)
        plans.append(found is not None)
        return found

    monkeypatch.setattr(DevicePlan, "encoded", planned)
    for seed in range(4):
        batch = workload(variant, seed=seed, **_SIZES)
        expected = compress(batch, pad_token_id=PAD)
        there = batch.to("cuda")
        if nested:
            there = nest_batch_by_mask(there, pad_token_id=PAD)
        done.clear()
        packed = compress(there, pad_token_id=PAD)
        assert_fields(decompress(packed, device="cpu"), batch)
        assert_fields(decompress(packed), batch)
        assert packed.nbytes <= 1.02 * expected.nbytes + 4096
        encoded += bool(plans and plans[-1]) or any(found is not None and len(found.numbers) >= 8 for found in done)
    assert encoded >= 2  # the host chooses forms for the first one, and where some field does not fit its form
    assert any(plans) == (not nested and variant in _PLANNED)


def assert_fields(seen: TensorDict, expected: TensorDict) -> None:
    assert list(seen.keys()) == list(expected.keys())
    for name in list(expected.keys()):
        assert_same_tensor(seen[name].cpu(), expected[name], name)


def test_random_fields() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows, fields = int(rng.integers(1, 40)), {}
        lengths = [rng.integers(0, rng.choice([3, 70, 300, 5000]), rows) for _ in range(3)]
        for number in range(12):
            dtype = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32, torch.bool][number % 6]
            own = lengths[number % 3]
            step, wide = int(rng.integers(1, 50)), int(rng.integers(1, 40))

            def row(n: int, step: int = step, wide: int = wide, kind: int = number % 4) -> np.ndarray:
                if kind == 0:
                    return np.repeat(rng.integers(0, wide, n // step + 1), step)[:n]
                if kind == 1:
                    return np.arange(n) * step
                return rng.integers(0, 1 << wide, n) * (rng.random(n) < (0.02 if kind == 2 else 1))

            fields[str(number)] = torch.nested.nested_tensor(
                [torch.from_numpy(row(int(n))).to(dtype) for n in own], layout=torch.jagged, device="cuda"
            )
        for order in (torch.arange(rows), torch.randperm(rows)):
            batch = batch_of(fields, order, rows)
            packed = compress(batch)
            assert_fields(decompress(packed, format="nested").exclude(LAYOUTS), batch.cpu())


def batch_of(fields: dict[str, torch.Tensor], order: torch.Tensor, rows: int):
    taken = {
        name: torch.nested.nested_tensor([field.unbind()[int(at)] for at in order], layout=torch.jagged)
        for name, field in fields.items()
    }
    return TensorDict(taken, batch_size=[rows])


def test_synchronisations() -> None:
    tables.forget()
    batches = [workload(seed=seed, **_SIZES).to("cuda") for seed in range(4)]
    for batch in batches[:3]:
        compress(batch, pad_token_id=PAD)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            packed = compress(batches[3], pad_token_id=PAD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in seen) <= 2
    assert torch.from_numpy(packed.table.body).is_pinned()
