"""MicroBatchMeter: the time and the peak memory of each micro-batch."""

from __future__ import annotations

import time

import pytest
import torch

from maskpack.errors import LayoutError, ReplayError
from maskpack.replay import MicroBatchMeter


def test_wall_time_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 10.0, 12.0, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = MicroBatchMeter()
    for _ in range(2):
        with meter as same:
            assert same is meter
    with pytest.raises(ValueError, match="broken"), meter:
        raise ValueError("broken")
    assert next(clock) == 20.25
    assert meter.seconds == [0.5, 2.0]
    assert meter.metrics() == {"micro_batch/count": 2, "micro_batch/seconds": 2.5, "micro_batch/seconds_max": 2.0}
    assert MicroBatchMeter().metrics()["micro_batch/seconds_max"] == 0.0
    with pytest.raises(LayoutError, match="MicroBatchMeter: device"):
        MicroBatchMeter("cuda:77")


def test_a_block_in_itself_is_refused() -> None:
    meter = MicroBatchMeter()
    with meter:
        with pytest.raises(ReplayError, match=r"entered in itself; .* Leave it first, or use a meter for each"), meter:
            raise AssertionError
        with MicroBatchMeter():
            pass
    with meter:
        pass
    assert len(meter.seconds) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_watermarks_of_each_micro_batch() -> None:
    meter, held = MicroBatchMeter("cuda"), torch.cuda.memory_allocated()
    for size in (1 << 24, 1 << 20):
        with meter:
            block = torch.empty(size, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(20_000_000)
            del block
    assert [peak - held for peak in meter.peak_allocated] == [1 << 24, 1 << 20]
    assert all(own >= peak for own, peak in zip(meter.peak_reserved, meter.peak_allocated, strict=True))
    assert all(second > 0.001 for second in meter.seconds)
    out = meter.metrics()
    assert out["micro_batch/count"] == 2
    assert out["micro_batch/peak_allocated_bytes"] == max(meter.peak_allocated)
