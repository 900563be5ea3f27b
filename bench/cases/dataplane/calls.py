"""The time of puts and gets of one client: one sample, some, and all, each in one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transfer_queue as tq

from bench.cases.dataplane.queue import MASKPACK, PARTITION, SIMPLE, OwnedQueue
from bench.cases.dataplane.rows import Trajectory, arguments, require_rows, shuffled
from bench.harness.local_ray import medians
from bench.harness.measure import progress
from bench.harness.report import Row, RowGroups, ratios

_SINGLES = 8  # different samples in each round, where calls of one are timed: lengths that were met may be remembered
_TARGETS = ({"put": ">= 0.77", "get": ">= 0.77"}, {"put": ">= 1", "get": ">= 1"}, {"put": ">= 2", "get": ">= 2"})
"""Of one, some and all samples."""
_OF_SINGLES = "get of shuffled samples that were put one by one"


def measured(queues: Mapping[str, OwnedQueue], rows: Sequence[Trajectory], rounds: int) -> RowGroups:
    """Raises NotExact if a get does not give what was put."""
    for size, targets in zip((1, max(2, len(rows) // 8), len(rows)), _TARGETS, strict=True):
        progress(f"dataplane: calls of {size}")
        case = f"dataplane text, {size} {'sample' if size == 1 else 'samples'} a call"
        starts = range(min(_SINGLES, len(rows)) if size == 1 else 1)
        calls = {name: [_Calls(queue, rows[start:], size) for start in starts] for name, queue in queues.items()}
        for one in (one for several in calls.values() for one in several):
            one.check(case)
        ms = medians({name: lambda several=several: _seconds(several) for name, several in calls.items()}, rounds)
        yield phases(case, ms, targets)


def phases(case: str, ms: Mapping[str, Mapping[str, float]], targets: Mapping[str, str]) -> list[Row]:
    """Of each phase, the milliseconds of all, and the ratios to SimpleStorage."""
    report: list[Row] = []
    for phase in next(iter(ms.values())):
        took = {name: one[phase] for name, one in ms.items()}
        report += [Row(case, f"{phase}, {name}", value, "ms") for name, value in took.items()]
        report += ratios(case, took, [(SIMPLE, MASKPACK, targets.get(phase))], f"{phase}, ")
    return report


def _seconds(several: Sequence[_Calls]) -> dict[str, float]:
    """Of each call, the median over some that differ in their samples."""
    times = [one.run() for one in several]
    return {phase: statistics.median(one[phase] for one in times) for phase in times[0]}


class _Calls:
    """Puts and gets of `size` samples, each in one call; they time themselves."""

    def __init__(self, queue: OwnedQueue, rows: Sequence[Trajectory], size: int) -> None:
        self._queue, self._rows = queue, rows[:size]
        self._keys = [row.key for row in self._rows]
        self._put = arguments(self._rows, PARTITION)
        self._others = [arguments([row], PARTITION) for row in rows] if size > 1 else []
        self._picked = [rows[number] for number in shuffled(len(rows), len(rows) // size)[0]]

    def check(self, case: str) -> None:
        """Raises NotExact unless every get of `run` gives what was put."""
        seen = self._run()
        for phase, rows in (("get", self._rows), (_OF_SINGLES, self._picked)):
            if phase in seen:
                require_rows(f"{case}, {phase}, {self._queue.backend}", seen[phase][1], [row.fields for row in rows])

    def run(self) -> dict[str, float]:
        """Seconds of each call."""
        return {phase: seconds for phase, (seconds, _) in self._run().items()}

    def _run(self) -> dict[str, tuple[float, Any]]:
        """Seconds and result of each call."""
        results: dict[str, tuple[float, Any]] = {}

        def timed(phase: str, call: Callable[..., Any], **given: Any) -> None:
            begin = time.perf_counter()
            result = call(**given, partition_id=PARTITION)
            results[phase] = time.perf_counter() - begin, result

        put = {name: value for name, value in self._put.items() if name != "partition_id"}
        with self._queue:
            timed("put", tq.kv_batch_put, **put)
            timed("get", tq.kv_batch_get, keys=self._keys)
            timed("clear", tq.kv_clear, keys=self._keys)
            if self._others:
                for one in self._others:
                    tq.kv_batch_put(**one)
                timed(_OF_SINGLES, tq.kv_batch_get, keys=[row.key for row in self._picked])
                tq.kv_clear(keys=[key for one in self._others for key in one["keys"]], partition_id=PARTITION)
        return results
