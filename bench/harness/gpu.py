"""What works on a GPU cost, in microseconds: on the device, and until they are done.

    device   events around replays of a captured graph      only works that never synchronise can be captured
    wall     the host's clock, the device idle before and after

The L2 cache is emptied before each by reading: after a write it would hold lines that go to memory while the work runs.
Works take turns as in `measure.interleaved`; medians. Without a GPU the same code runs on the host's clock.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.harness.measure import in_turns
from bench.harness.passes import synchronize

Work = Callable[[], object]

_SYNC = "called a synchronizing CUDA operation"  # the warning of torch's sync debug mode
_HEAD_START = 500_000  # cycles: the device waits a quarter of a millisecond, meanwhile the host queues what is timed
_COLLECT_EVERY = 10  # rounds; a collection takes longer than many works


@dataclass(frozen=True)
class Times:
    """Microseconds of one work, and its host synchronisations; `device` is None where there are any."""

    device: float | None
    wall: float
    syncs: int

    def over(self, other: Times) -> float:
        """This time as a multiple of the other's, both on the device, or both by the wall."""
        if self.device is None or other.device is None:
            return self.wall / other.wall
        return self.device / other.device


class Clock:
    """Times works on one device, in `rounds` rounds."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds
        self._cuda = device.type == "cuda"
        cache = torch.cuda.get_device_properties(device).L2_cache_size if self._cuda else 1024
        self._cold = torch.rand(2 * cache // 4, device=device)
        self._sum = torch.empty((), device=device)

    def measure(self, works: Mapping[str, Work]) -> dict[str, Times]:
        """Everything about every work. The device time is that of works without a synchronisation."""
        syncs = {name: self.syncs(work) for name, work in works.items()}
        captured = {name: self._captured(work) for name, work in works.items() if not syncs[name]}
        device, wall = self._interleaved(captured, self._on_device, "device"), self.wall_us(works)
        return {name: Times(device.get(name), wall[name], syncs[name]) for name in works}

    def wall_us(self, works: Mapping[str, Work]) -> dict[str, float]:
        """Time until the device has done all."""
        return self._interleaved(works, self._until_done, "wall")

    def syncs(self, work: Work) -> int:
        """How often the host waits for the device. The work runs once before, which may compile."""
        work()
        synchronize(self.device)
        with warnings.catch_warnings(record=True) as seen, self._watched():
            warnings.simplefilter("always")
            work()
        return sum(_SYNC in str(warning.message) for warning in seen)

    # ---------------------------------------------------------------- one run

    def _captured(self, work: Work) -> Work:
        if not self._cuda:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def _on_device(self, replay: Work) -> float:
        if not self._cuda:
            return self._until_done(replay)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        self._empty_cache()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def _until_done(self, work: Work) -> float:
        self._empty_cache()
        synchronize(self.device)
        begin = time.perf_counter()
        result = work()
        synchronize(self.device)
        taken = time.perf_counter() - begin
        del result  # not timed
        return 1e6 * taken

    def _empty_cache(self) -> None:
        torch.sum(self._cold, 0, out=self._sum)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if not self._cuda:
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _interleaved(self, works: Mapping[str, Work], once: Callable[[Work], float], way: str) -> dict[str, float]:
        return in_turns(works, self.rounds, f"us, {way}", once, every=_COLLECT_EVERY)
