"""Rows by number: take, cat and split of packed rows, and what it costs to decode or to send the rows chosen.

A decode of all rows is the measure: to decode k of B rows should take k / B of it. Nested, each micro-batch also pays
for the jagged tensors of torch, some 25 us a field. `batch[rows]` of the padded batch is what a user has without
maskpack; its times include no encoding.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import (
    interleaved,
    pickled,
    progress,
    require_same,
    require_same_tensor,
    torch_threads,
    unpickled,
)
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.workloads import PAD_ID, batch_of
from maskpack import PackedBatch, compress, decompress
from maskpack.core.index import IntArray
from maskpack.nesting.schema import LAYOUTS
from maskpack.planning import plan_micro_batches

_SOME = (1, 8, 64)
_WHOLE, _PARTS = "decode of all rows, nested", "plan.apply and decode, nested"
_ALL, _RESTORED = "decode of all rows, padded", "plan.apply and decode, padded"
_PADDED = "plan.apply of the padded batch"
_CAT, _MANY = "cat of 64 slices", "cat of 4,000 slices"
_SEND, _SEND_PARTS, _ANEW = "pickle of all rows", "split and pickle of 64 parts", "compress of 64 parts"
_RANKS = 8
_OURS, _FLAT = "8 ranks take and decode their rows of one pickle", "8 ranks gather their rows of one flat buffer"


@case(
    "rows",
    help="take, cat, split of packed rows, and decoding what was chosen",
    on="cpu",
    tiny={"rows": 70, "scale": 0.016},
)
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if rows that were taken, cut and joined hold other values than the rows of the padded batch."""
    rows = max(rows, 64)
    progress(f"rows: {rows} rows")
    batch = batch_of("reference", rows, scale=scale)
    packed = compress(batch, pad_token_id=PAD_ID)
    nbytes = {_SEND: len(pickle.dumps(packed, 5))}
    with torch_threads(1):
        yield _planned(batch, packed, rows, rounds)
        yield _taken(batch, packed, rows, rounds)
        yield _ranks(packed, rows, rounds)
        slices = list(packed.split(-(-rows // 64)))
        many = [packed[at % rows : at % rows + 1] for at in range(4000)]
        require_same("cat", decompress(PackedBatch.cat(slices)), batch)
        parts = list(packed.chunk(64))
        nbytes[_SEND_PARTS] = sum(len(pickle.dumps(part, 5)) for part in parts)
        padded = [batch[begin : begin + len(part)] for begin, part in zip(_begins(parts), parts, strict=True)]
        nbytes[_ANEW] = sum(len(pickle.dumps(compress(part, pad_token_id=PAD_ID), 5)) for part in padded)
        works = {
            _CAT: lambda: PackedBatch.cat(slices),
            _MANY: lambda: PackedBatch.cat(many),
            _SEND: lambda: pickle.dumps(packed, 5),
            _SEND_PARTS: lambda: [pickle.dumps(part, 5) for part in packed.chunk(64)],
        }
        ms = interleaved(works, rounds)
    name = f"rows {rows}"
    yield [
        *times(name, ms, ((_SEND_PARTS, _SEND, "<= 1.5"),)),
        Row(name, "bytes of 64 parts / compressed anew", nbytes[_SEND_PARTS] / nbytes[_ANEW], "x", "<= 1.2"),
    ]


def _planned(batch: TensorDict, packed: PackedBatch, rows: int, rounds: int) -> list[Row]:
    plan = plan_micro_batches(packed.lengths("sequence"), 16 * int(packed.lengths("sequence").mean()))
    for part, own in zip(plan.apply(packed), plan.micro_batches, strict=True):
        require_same("plan.apply", decompress(part), batch[list(own)])
    ms = interleaved(
        {
            _WHOLE: lambda: decompress(packed, format="nested"),
            _PARTS: lambda: [decompress(part, format="nested") for part in plan.apply(packed)],
            _ALL: lambda: decompress(packed),
            _RESTORED: lambda: [decompress(part) for part in plan.apply(packed)],
            _PADDED: lambda: list(plan.apply(batch)),
        },
        rounds,
    )
    name = f"rows {rows} in {len(plan.micro_batches)} micro-batches"
    return times(name, ms, ((_PARTS, _WHOLE, "<= 2"), (_RESTORED, _ALL, "<= 2"), (_PADDED, _RESTORED, None)))


def _taken(batch: TensorDict, packed: PackedBatch, rows: int, rounds: int) -> list[Row]:
    rng, report = np.random.default_rng(0), list[Row]()
    for some in _SOME:
        index = rng.permutation(rows)[:some]
        require_same("take", decompress(packed.take(index)), batch[index.tolist()])
        whole, take, decode, padded = _ALL, f"take of {some}", f"take and decode of {some}", f"batch[rows] of {some}"
        works: dict[str, Callable[[], object]] = {
            whole: lambda: decompress(packed),
            take: partial(packed.take, index),
            decode: partial(_decoded, packed, index),
            padded: partial(batch.__getitem__, index.tolist()),
        }
        ms = interleaved(works, rounds)
        name = f"rows {rows}, {some} scattered"
        report += times(name, ms, ((padded, decode, None),))
        most = 0.02 + 3 * ms[whole] * some / rows
        report.append(Row(name, "take and decode / (20 us + 3 shares of a decode)", ms[decode] / most, "x", "<= 1"))
    return report


def _ranks(packed: PackedBatch, rows: int, rounds: int) -> list[Row]:
    """Each rank has scattered rows, from one pickle with its buffers beside it, as Ray maps them. A flat buffer has the
    values of every field, one row after the other; a rank copies its rows of it, and makes jagged tensors of them."""
    nested = decompress(packed, format="nested").exclude(LAYOUTS)
    bounds = {id(field.offsets()): field.offsets().numpy() for field in nested.values()}
    flat = bounds, {name: (id(field.offsets()), field.values().numpy()) for name, field in nested.items()}
    chosen = np.array_split(np.random.default_rng(0).permutation(rows), _RANKS)
    sent = {name: pickled(held) for name, held in ((_OURS, packed), (_FLAT, flat))}

    def ours(rank: IntArray) -> TensorDict:
        return decompress(unpickled(sent[_OURS]).take(rank), format="nested")

    def gathered(rank: IntArray) -> dict[str, Tensor]:
        bounds, fields = unpickled(sent[_FLAT])
        places = {axis: list(zip(own[rank], own[rank + 1], strict=True)) for axis, own in bounds.items()}
        lengths = {axis: np.diff(own)[rank] for axis, own in bounds.items()}
        offsets = {axis: torch.from_numpy(np.append(0, np.cumsum(own))) for axis, own in lengths.items()}
        most = {axis: (int(own.min()), int(own.max())) for axis, own in lengths.items()}
        return {
            name: torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(np.concatenate([values[begin:end] for begin, end in places[axis]])),
                offsets[axis], min_seqlen=most[axis][0], max_seqlen=most[axis][1],
            )
            for name, (axis, values) in fields.items()
        }  # fmt: skip

    for name, field in gathered(chosen[0]).items():
        require_same_tensor(f"8 ranks, {name}", field, ours(chosen[0])[name])
    ms = interleaved(
        {_OURS: lambda: [ours(rank) for rank in chosen], _FLAT: lambda: [gathered(rank) for rank in chosen]}, rounds
    )
    return times(f"rows {rows}, {_RANKS} ranks", ms, ((_OURS, _FLAT, "<= 1.6"),))


def _decoded(packed: PackedBatch, index: IntArray) -> TensorDict:
    return decompress(packed.take(index))


def _begins(parts: list[PackedBatch]) -> list[int]:
    return np.cumsum([0, *map(len, parts)])[:-1].tolist()
