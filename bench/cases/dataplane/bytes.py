"""Bytes that are stored when one client puts all samples: the values that the storage units hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import transfer_queue as tq

from bench.cases.dataplane.queue import MASKPACK, PARTITION, SIMPLE, OwnedQueue, stored_bytes
from bench.cases.dataplane.rows import Trajectory, arguments, require_rows, shuffled
from bench.cases.dataplane.step import RANKS
from bench.harness.measure import progress
from bench.harness.report import Row, RowGroups, ratios


def measured(queues: Mapping[str, OwnedQueue], rows: Sequence[Trajectory]) -> RowGroups:
    """Rows for puts of one sample, of 32, and of all. Raises NotExact if a sample does not come back as it was put."""
    progress(f"dataplane: bytes of {len(rows)} samples")
    for size in sorted({1, min(32, len(rows)), len(rows)}):
        case = f"dataplane text, {len(rows)} samples in puts of {size}"
        sizes = {name: _stored(case, queue, rows, size) / len(rows) for name, queue in queues.items()}
        yield [
            *(Row(case, f"stored, {name}", one, "bytes/row") for name, one in sizes.items()),
            *ratios(case, sizes, [(SIMPLE, MASKPACK, ">= 4")], "stored, "),
        ]


def _stored(case: str, queue: OwnedQueue, rows: Sequence[Trajectory], size: int) -> int:
    """All samples are put, `size` a call, then got in shuffled parts, compared, and cleared."""
    with queue:
        for start in range(0, len(rows), size):
            tq.kv_batch_put(**arguments(rows[start : start + size], PARTITION))
        stored = stored_bytes(queue)
        for numbers in shuffled(len(rows), min(RANKS, len(rows))):
            part = [rows[number] for number in numbers]
            seen = tq.kv_batch_get(keys=[row.key for row in part], partition_id=PARTITION)
            require_rows(f"{case}, {queue.backend}", seen, [row.fields for row in part])
        tq.kv_clear(keys=[row.key for row in rows], partition_id=PARTITION)
    return stored
