"""MicroBatchMeter: the time and the peak memory of each micro-batch of an update."""

from __future__ import annotations

import time
from typing import Any

import torch

from maskpack.core.tensors import device_here
from maskpack.errors import ReplayError


class MicroBatchMeter:
    """Measures the block of each micro-batch: `with meter: loss(part).backward()`.

    Attributes:
        seconds: wall time of each block, without what the device still computes after it. On CUDA, the time between
            events on the current stream, from the begin of the block to its end.
        peak_allocated, peak_reserved: on CUDA, the most bytes that tensors and the caching allocator held in each
            block. Each block resets the peak statistics of the device (`torch.cuda.reset_peak_memory_stats`).

    A block waits for no device; reading `seconds` waits for the last block. A block that raises is not counted. Raises
    ReplayError for a block that is entered in itself.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """`device` runs the micro-batches. Raises LayoutError for one that this process does not have."""
        self.device = device_here(device, "MicroBatchMeter")
        self.peak_allocated: list[int] = []
        self.peak_reserved: list[int] = []
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def __enter__(self) -> MicroBatchMeter:
        if self._begin is not None:
            raise ReplayError(
                "MicroBatchMeter: its block was entered in itself; expected one block at a time. Leave it first, "
                "or use a meter for each."
            )
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begin = self._mark()
        return self

    def __exit__(self, kind: Any, *more: Any) -> None:
        begin, self._begin = self._begin, None
        if kind is not None:
            return
        self._marks.append((begin, self._mark()))
        if self.device.type == "cuda":
            self.peak_allocated.append(torch.cuda.max_memory_allocated(self.device))
            self.peak_reserved.append(torch.cuda.max_memory_reserved(self.device))

    @property
    def seconds(self) -> list[float]:
        if self.device.type != "cuda":
            return [end - begin for begin, end in self._marks]
        if self._marks:
            self._marks[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in self._marks]

    def metrics(self) -> dict[str, float]:
        """Returns a flat dict for a logger: the number of micro-batches, the sum and the largest of their times and, on
        CUDA, the largest peaks."""
        seconds = self.seconds
        out: dict[str, float] = {
            "micro_batch/count": len(seconds),
            "micro_batch/seconds": sum(seconds),
            "micro_batch/seconds_max": max(seconds, default=0.0),
        }
        if self.device.type == "cuda":
            out["micro_batch/peak_allocated_bytes"] = max(self.peak_allocated, default=0)
            out["micro_batch/peak_reserved_bytes"] = max(self.peak_reserved, default=0)
        return out
