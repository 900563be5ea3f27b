"""Bytes that are stored and moved when one client puts all samples, then gets all of them in eight shuffled parts.

Moved are all ZMQ frames of that client; those to and from the controller, which are the same for all backends, are in
them. Stored are the values that the storage units hold after the puts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import transfer_queue as tq

from bench.cases.dataplane.queue import MASKPACK, PARTITION, SIMPLE, OwnedQueue, counted, stored_bytes
from bench.cases.dataplane.rows import Trajectory, arguments, require_rows, shuffled
from bench.cases.dataplane.step import RANKS
from bench.harness.measure import progress
from bench.harness.report import Row, RowGroups, ratios


def measured(queues: Mapping[str, OwnedQueue], rows: Sequence[Trajectory]) -> RowGroups:
    """Rows for puts of one sample, of 32, and of all. Raises NotExact if a sample does not come back as it was put."""
    progress(f"dataplane: bytes of {len(rows)} samples")
    for size in sorted({1, min(32, len(rows)), len(rows)}):
        case = f"dataplane text, {len(rows)} samples in puts of {size}"
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        report: list[Row] = []
        figures = {name: _moved_and_stored(case, queue, parts) for name, queue in queues.items()}
        for what in (_STORED, _MOVED):
            sizes = {name: one[what] / len(rows) for name, one in figures.items()}
            report += [Row(case, f"{what}, {name}", one, "bytes/row") for name, one in sizes.items()]
            report += ratios(case, sizes, [(SIMPLE, MASKPACK, ">= 4")], f"{what}, ")
        yield report


_STORED, _MOVED = "stored", "moved"


def _moved_and_stored(case: str, queue: OwnedQueue, parts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """All parts are put, then all samples got in shuffled parts, compared, and cleared."""
    everything = [row for part in parts for row in part]
    puts = [arguments(part, PARTITION) for part in parts]
    with queue:
        with counted() as put:
            for one in puts:
                tq.kv_batch_put(**one)
        stored = stored_bytes(queue)
        with counted() as got:
            for numbers in shuffled(len(everything), min(RANKS, len(everything))):
                part = [everything[number] for number in numbers]
                seen = tq.kv_batch_get(keys=[row.key for row in part], partition_id=PARTITION)
                require_rows(f"{case}, {queue.backend}", seen, [row.fields for row in part])
        tq.kv_clear(keys=[row.key for row in everything], partition_id=PARTITION)
    return {_STORED: stored, _MOVED: sum(put) + sum(got)}
