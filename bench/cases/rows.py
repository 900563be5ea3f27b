"""Rows by number: take and split of packed rows, and what it costs to decode or to send the rows chosen.

A decode of all rows is the measure: to decode k of B rows should take k / B of it. Nested, each micro-batch also pays
for the jagged tensors of torch, some 25 us a field.
"""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
from tensordict import TensorDict

from bench.harness.measure import (
    interleaved,
    progress,
    require_same,
    torch_threads,
)
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.workloads import PAD_ID, batch_of
from maskpack import PackedBatch, compress, decompress
from maskpack.core.index import IntArray
from maskpack.planning import plan_micro_batches

_SOME = (1, 8, 64)
_WHOLE, _PARTS = "decode of all rows, nested", "plan.apply and decode, nested"
_ALL = "decode of all rows, padded"
_SEND, _SEND_PARTS = "pickle of all rows", "split and pickle of 64 parts"


@case(
    "rows",
    help="take and split of packed rows, and decoding what was chosen",
    on="cpu",
    tiny={"rows": 70, "scale": 0.016},
)
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if rows that were taken, cut and joined hold other values than the rows of the padded batch."""
    rows = max(rows, 64)
    progress(f"rows: {rows} rows")
    batch = batch_of("reference", rows, scale=scale)
    packed = compress(batch, pad_token_id=PAD_ID)
    require_same("chunk, cat", decompress(PackedBatch.cat(list(packed.chunk(64)))), batch)
    plan = plan_micro_batches(packed.lengths("sequence"), 16 * int(packed.lengths("sequence").mean()))
    for part, own in zip(plan.apply(packed), plan.micro_batches, strict=True):
        require_same("plan.apply", decompress(part), batch[list(own)])
    works = {
        _WHOLE: lambda: decompress(packed, format="nested"),
        _PARTS: lambda: [decompress(part, format="nested") for part in plan.apply(packed)],
        _SEND: lambda: pickle.dumps(packed, 5),
        _SEND_PARTS: lambda: [pickle.dumps(part, 5) for part in packed.chunk(64)],
    }
    pairs = ((_PARTS, _WHOLE, "<= 2"), (_SEND_PARTS, _SEND, "<= 1.5"))
    with torch_threads(1):
        name = f"rows {rows} in {len(plan.micro_batches)} micro-batches"
        yield times(name, interleaved(works, rounds), pairs)
        yield _taken(batch, packed, rows, rounds)


def _taken(batch: TensorDict, packed: PackedBatch, rows: int, rounds: int) -> list[Row]:
    rng, report = np.random.default_rng(0), list[Row]()
    for some in _SOME:
        index = rng.permutation(rows)[:some]
        require_same("take", decompress(packed.take(index)), batch[index.tolist()])
        name, decode = f"rows {rows}, {some} scattered", f"take and decode of {some}"
        ms = interleaved({_ALL: lambda: decompress(packed), decode: partial(_decoded, packed, index)}, rounds)
        most = 0.02 + 3 * ms[_ALL] * some / rows
        report += times(name, ms)
        report.append(Row(name, "take and decode / (20 us + 3 shares of a decode)", ms[decode] / most, "x", "<= 1"))
    return report


def _decoded(packed: PackedBatch, index: IntArray) -> TensorDict:
    return decompress(packed.take(index))
