"""TransferQueue with its own SimpleStorage and with the storage backend of maskpack: bytes, times, and a whole step.

Both are alive in one Ray cluster, two storage units each, and are asked by the same calls of `tq.kv_batch_put` and
`tq.kv_batch_get`, in interleaved rounds (`dataplane_queue`). Samples are what verl's V1 agent loop puts
(`dataplane_rows`), and the step is that of its trainer (`dataplane_step`). Every get is compared, bit for bit, with
what was put, before anything is timed.

Bytes moved are those of all ZMQ frames of one client that puts all samples, then gets all of them in eight shuffled
parts; messages of the controller, which are the same for both, are in them. Bytes stored are those of the values that
the units hold. Beside them: zstd at level 1 over the serialised columns of each put, and the time it takes.

A third backend that stores nothing shows what TransferQueue itself takes (`dataplane_floor`).
glibc is left as it comes. TransferQueue gives torch as many threads as there are cores.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import transfer_queue as tq
import zstandard
from tensordict import TensorDict
from torch import Tensor
from transfer_queue.utils.serial_utils import encode

from bench.dataplane_queue import (
    CPUS,
    MASKPACK,
    NOTHING,
    SIMPLE,
    OwnedQueue,
    counted,
    stored_bytes,
    use_threads_of_machine,
)
from bench.dataplane_rows import GROUP, Trajectory, batched, require_rows, trajectories
from bench.dataplane_step import PARTITION, RANKS, Step, select
from bench.dispatch_forms import local_ray, medians
from bench.measure import progress
from bench.report import Row
from bench.workloads import PROMPT_WIDTH, RESPONSE_WIDTH

_SINGLES = 8  # samples put or got one after another in each round, where one is timed
_FEWER_ROWS = 8  # with experts or images
_FEWER_BYTES = {"text": ">= 4", "images": ">= 20"}
_TARGETS = {"put": (">= 0.77", ">= 1", ">= 2"), "get": (">= 0.77", ">= 1", ">= 2")}  # of one, some and all samples
_STEP = ">= 2"


def run(
    rows: int = 256,
    rounds: int = 9,
    *,
    prompt_width: int = PROMPT_WIDTH,
    response_width: int = RESPONSE_WIDTH,
    backends: Sequence[str] = (SIMPLE, MASKPACK),
) -> list[Row]:
    """The rows of the report; the first backend is the one that others are compared with. Raises NotExact if a sample
    does not come back as it was put."""
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    report: list[Row] = []
    use_threads_of_machine()
    with local_ray(TensorDict({}), num_cpus=CPUS):
        queues = {name: OwnedQueue(name) for name in backends}
        try:
            fewer = max(GROUP, rows // _FEWER_ROWS)
            for kind, samples in (("text", rows), ("experts", fewer), ("images", fewer)):
                progress(f"dataplane {kind}: {samples} samples")
                more = {"experts": kind == "experts", "image": kind == "images"}
                report += _bytes(kind, queues, trajectories(samples, **more, **widths))
            floor = OwnedQueue(NOTHING)
            report += _times(queues, floor, trajectories(rows, **widths), rounds)
            floor.stop()
            report += _step(queues, rows, rounds, widths)
        finally:
            for queue in queues.values():
                queue.stop()
    return report


# -------------------------------------------------------------------- bytes


def _bytes(kind: str, queues: Mapping[str, OwnedQueue], rows: Sequence[Trajectory]) -> list[Row]:
    report: list[Row] = []
    for size in sorted({1, min(32, len(rows)), len(rows)}):
        case = f"dataplane {kind}, {len(rows)} samples in puts of {size}"
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        figures = {name: _moved_and_stored(case, queue, parts) for name, queue in queues.items()}
        raw, squeezed, ms = _zstd(parts)
        for what in next(iter(figures.values())):
            report += [
                Row(case, f"{what}, {name}", one[what] / len(rows), "bytes/row") for name, one in figures.items()
            ]
        report += [
            Row(case, "serialised columns", raw / len(rows), "bytes/row"),
            Row(case, "zstd level 1 of the serialised columns", squeezed / len(rows), "bytes/row"),
            Row(case, "zstd level 1 of the serialised columns, encode and decode all", ms, "ms"),
        ]
        for what, target in ((_STORED, True), (_MOVED, True), (_PUT, False), (_GOT, False)):
            bound = _FEWER_BYTES.get(kind) if target else None
            report += _compared(case, what, {name: one[what] for name, one in figures.items()}, bound)
        for name in list(queues)[1:]:
            report.append(Row(case, f"zstd level 1 / {name}, stored", squeezed / figures[name][_STORED], "x"))
    return report


_STORED, _MOVED, _PUT, _GOT = "stored", "moved", "moved by puts", "moved by gets"
_CONTROLLER = "moved to and from the controller"


def _moved_and_stored(case: str, queue: OwnedQueue, parts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """All parts are put, then all samples got in shuffled parts, compared, and cleared."""
    everything = [row for part in parts for row in part]
    controller = queue.config.controller.zmq_info.to_addr("request_handle_socket")
    puts = [_arguments(part) for part in parts]
    with queue:
        with counted() as put:
            for one in puts:
                tq.kv_batch_put(**one)
        stored = stored_bytes(queue)
        with counted() as got:
            for part in _shuffled(everything, min(RANKS, len(everything))):
                seen = tq.kv_batch_get(keys=[row.key for row in part], partition_id=PARTITION)
                require_rows(f"{case}, {queue.backend}", seen, [row.fields for row in part])
        tq.kv_clear(keys=[row.key for row in everything], partition_id=PARTITION)
    return {
        _STORED: stored,
        _MOVED: sum(put.values()) + sum(got.values()),
        _PUT: sum(put.values()),
        _GOT: sum(got.values()),
        _CONTROLLER: put.get(controller, 0) + got.get(controller, 0),
    }


def _zstd(parts: Sequence[Sequence[Trajectory]]) -> tuple[int, int, float]:
    """Bytes of the serialised columns of all parts, bytes of each part compressed, and milliseconds there and back."""
    raw = [b"".join(encode(_columns(batched([row.fields for row in part])))) for part in parts]
    begin = time.perf_counter()
    squeezed = [zstandard.ZstdCompressor(level=1).compress(one) for one in raw]
    restored = [zstandard.ZstdDecompressor().decompress(one) for one in squeezed]
    ms = 1e3 * (time.perf_counter() - begin)
    assert restored == raw
    return sum(map(len, raw)), sum(map(len, squeezed)), ms


def _columns(batch: TensorDict) -> dict[str, Any]:
    """As SimpleStorage sends them: jagged tensors are lists of rows."""
    columns = {name: batch[name] for name in batch.keys()}  # noqa: SIM118
    return {
        name: list(column.unbind()) if isinstance(column, Tensor) and column.is_nested else column
        for name, column in columns.items()
    }


# -------------------------------------------------------------------- times


def _times(queues: Mapping[str, OwnedQueue], floor: OwnedQueue, rows: Sequence[Trajectory], rounds: int) -> list[Row]:
    """Calls of one client: one, some and all samples; and what TransferQueue takes without storage."""
    report: list[Row] = []
    sizes = (1, max(2, len(rows) // 8), len(rows))
    for rank, size in enumerate(sizes):
        progress(f"dataplane times: {size} samples")
        case = f"dataplane, {size} {'sample' if size == 1 else 'samples'}"
        calls = {name: _Calls(queue, rows, size) for name, queue in queues.items()}
        for one in calls.values():
            one.check(case)
        calls[NOTHING] = _Calls(floor, rows, size)
        ms = medians({name: one.run for name, one in calls.items()}, rounds)
        without = ms.pop(NOTHING)
        for phase in next(iter(ms.values())):
            took = {name: phases[phase] for name, phases in ms.items()}
            report += [Row(case, f"{phase}, {name}", value, "ms") for name, value in took.items()]
            report.append(Row(case, f"{phase}, TransferQueue without storage", without[phase], "ms"))
            report += _compared(case, phase, took, _TARGETS[phase][rank] if phase in _TARGETS else None)
    return report


class _Calls:
    """Puts and gets of `size` samples, each in one call; they time themselves."""

    def __init__(self, queue: OwnedQueue, rows: Sequence[Trajectory], size: int) -> None:
        self._queue, self._rows = queue, rows[:size]
        self._keys = [row.key for row in self._rows]
        self._put = _arguments(self._rows)
        self._old = batched([select(row.later, "old_log_probs", "entropy") for row in self._rows])
        self._advantages = batched([select(row.later, "advantages", "returns") for row in self._rows])
        self._others = [_arguments([row]) for row in rows] if size > 1 else []
        self._picked = next(iter(_shuffled(rows, len(rows) // size)))

    def check(self, case: str) -> None:
        """Raises NotExact unless every get of `run` gives what was put."""
        last = [row.fields | row.later for row in self._rows]
        seen = self._run()
        for phase, expected in (
            ("get", [row.fields for row in self._rows]),
            ("get of 2 fields", [select(row, "response_mask", "rm_scores") for row in last]),
            ("get with later fields", last),
            (_OF_SINGLES, [row.fields for row in self._picked]),
        ):
            if phase in seen:
                require_rows(f"{case}, {phase}, {self._queue.backend}", seen[phase][1], expected)

    def run(self) -> dict[str, float]:
        """Seconds of each call; of single samples, the median of a few."""
        times = [self._run() for _ in range(_SINGLES if len(self._rows) == 1 else 1)]
        return {phase: statistics.median(one[phase][0] for one in times) for phase in times[0]}

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
            timed("put of 2 later fields", tq.kv_batch_put, keys=self._keys, fields=self._old)
            timed("put of 2 more", tq.kv_batch_put, keys=self._keys, fields=self._advantages)
            few = ["response_mask", "rm_scores"]
            timed("get of 2 fields", tq.kv_batch_get, keys=self._keys, select_fields=few)
            timed("get with later fields", tq.kv_batch_get, keys=self._keys)
            timed("clear", tq.kv_clear, keys=self._keys)
            if self._others:
                for one in self._others:
                    tq.kv_batch_put(**one)
                timed(_OF_SINGLES, tq.kv_batch_get, keys=[row.key for row in self._picked])
                tq.kv_clear(keys=[key for one in self._others for key in one["keys"]], partition_id=PARTITION)
        return results


_OF_SINGLES = "get of shuffled samples that were put one by one"


# -------------------------------------------------------------------- many processes, and the step


def _step(queues: Mapping[str, OwnedQueue], rows: int, rounds: int, widths: Mapping[str, int]) -> list[Row]:
    progress("dataplane step")
    with closing(Step({name: queue.shared() for name, queue in queues.items()}, rows, widths)) as step:
        for name in queues:
            step.run(name, check=True)
        case = f"dataplane step, {rows} samples, {RANKS} ranks"
        report = _phases(
            case, medians({name: lambda name=name: step.run(name) for name in queues}, rounds), "step", _STEP
        )
        progress("dataplane, getters at once")
        samples = max(1, rows // RANKS**2)
        for name in queues:
            step.put_rollout(name)
        works = {name: lambda name=name: step.get_at_once(name, samples) for name in queues}
        case = f"dataplane, {RANKS**2} getters at once in {RANKS} processes, {samples} samples each"
        report += _phases(case, medians(works, rounds), "get", None)
        for name in queues:
            step.clear(name)
    return report


def _phases(case: str, ms: Mapping[str, Mapping[str, float]], whole: str, target: str | None) -> list[Row]:
    report: list[Row] = []
    for phase in next(iter(ms.values())):
        took = {name: phases[phase] for name, phases in ms.items()}
        report += [Row(case, f"{phase}, {name}", value, "ms") for name, value in took.items()]
        report += _compared(case, phase, took, target if phase == whole else None)
    return report


# -------------------------------------------------------------------- common


def _compared(case: str, what: str, values: Mapping[str, float], target: str | None) -> list[Row]:
    (first, value), *others = values.items()
    return [Row(case, f"{what}, {first} / {name}", value / other, "x", target) for name, other in others]


def _arguments(rows: Sequence[Trajectory]) -> dict[str, Any]:
    """Of `tq.kv_batch_put`."""
    fields = batched([row.fields for row in rows])
    tags = [row.tag for row in rows]
    return {"keys": [row.key for row in rows], "partition_id": PARTITION, "fields": fields, "tags": tags}


def _shuffled(rows: Sequence[Trajectory], parts: int) -> list[list[Trajectory]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [[rows[number] for number in order[start:stop]] for start, stop in itertools.pairwise(bounds)]
