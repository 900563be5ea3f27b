"""A call of Ray actors with rows: what WorkerGroup takes beside Ray alone, in one interleaved run.

    small    a view of 64 short rows, one field, one float back          beside a call of each rank with a number
             the rows sent in each call                                  beside a transport by hand
    batches  a padded batch out, one float of each rank back             beside chunks under Ray's zero-copy flag, and
                                                                         a transport by hand

By hand, one compresses, puts one array of bytes, and each rank decodes its rows: what is left of maskpack without its
dispatch.

Ranks share a few actors, at most ACTORS: Ray calls each rank on its own, and an actor runs its ranks in turn. A rank
sums one field, of decoded rows or of views of the object store. Before anything is timed, both ways must give the same
sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from tensordict import TensorDict

from bench.harness.local_ray import local_ray, set_zero_copy
from bench.harness.measure import NotExact, interleaved, progress
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.workloads import PAD_ID, batch_of, make_batch
from maskpack import PackedBatch, compress, decompress
from maskpack.dispatch import WorkerGroup, endpoint

ACTORS = 8
OURS, RAY, ZERO_COPY = "WorkerGroup.call", "Ray", "Ray, zero-copy flag"
SENT, HAND = "WorkerGroup.call, rows sent", "by hand: compress, ray.put, decompress"
RANKS = (1, 8, 64)
BATCHES = (
    ("reference", 16, 1, ">= 1.3"),
    ("reference", 64, 8, ">= 1.3"),
    ("reference", 256, 8, ">= 2"),
    ("reference", 256, 64, ">= 1.3"),
    ("tau", 64, 8, ">= 1.1"),
    ("mooncake", 16, 8, ">= 1.2"),
)
"""Workload, rows, ranks, and the target of Ray's time divided by that of WorkerGroup."""


class _Worker:
    @endpoint(fields=["old_log_probs"])
    def small(self, batch: TensorDict) -> float:
        return float(batch["old_log_probs"].sum())

    @endpoint
    def batches(self, batch: TensorDict) -> float:
        return float(batch["old_log_probs"].sum())

    def number(self, number: int) -> float:
        return float(number)

    def by_hand(self, data: Any, begin: int, end: int, method: str, fields: Sequence[str]) -> float:
        rows = PackedBatch.from_bytes(data)[begin:end]
        return getattr(self, method)(decompress(rows.select(*fields) if fields else rows))


def _by_hand(actors: Sequence[Any], batch: TensorDict, method: str, fields: Sequence[str] = ()) -> list[float]:
    """What a call of the method is without WorkerGroup."""
    packed = compress(batch, pad_token_id=PAD_ID)
    data = ray.put(np.frombuffer(packed.to_bytes(), np.uint8))
    ends = np.cumsum([len(part) for part in _parts(batch, len(actors))]).tolist()
    places = zip(actors, [0, *ends], ends, strict=False)
    return ray.get([actor.by_hand.remote(data, begin, end, method, fields) for actor, begin, end in places])


@case(
    "calls",
    help="calls of WorkerGroup beside Ray alone",
    on="cpu",
    rows=None,
    groups=("small", "batches"),
    keeps_memory=False,
    tiny={"ranks": (1, 3), "batches": (("reference", 9, 2, ">= 1"),), "scale": 0.016},
)
def run(
    rounds: int,
    *,
    only: Sequence[str] = ("small", "batches"),
    ranks: Sequence[int] = RANKS,
    batches: Sequence[tuple[str, int, int, str]] = BATCHES,
    scale: float = 1.0,
) -> RowGroups:
    """Raises NotExact if a rank sees other rows than by Ray alone."""
    given = {(name, rows): batch_of(name, rows, scale=scale) for name, rows, _, _ in batches if "batches" in only}
    with local_ray(max(given.values(), key=_nbytes, default=TensorDict()), num_cpus=2):
        actors = [ray.remote(_Worker).options(num_cpus=0).remote() for _ in range(ACTORS)]
        for number in ranks if "small" in only else ():
            yield _small(actors[:number], number, rounds)
        for name, rows, number, target in batches if "batches" in only else ():
            yield _batches(actors[:number], (name, rows, number), given[name, rows], rounds, target)


def _nbytes(batch: TensorDict) -> int:
    return sum(field.nbytes for field in batch.values())


def _small(actors: Sequence[Any], ranks: int, rounds: int) -> list[Row]:
    progress(f"calls: small, {ranks} ranks")
    handles = [actors[rank % len(actors)] for rank in range(ranks)]
    group = WorkerGroup(handles, pad_token_id=PAD_ID)
    batch = make_batch(64, prompt_width=16, response_width=32)
    view = group.put(batch)
    _check(group.call("small", view), batch, ranks)
    works: dict[str, Callable[[], object]] = {
        OURS: lambda: group.call("small", view),
        RAY: lambda: ray.get([actor.number.remote(1) for actor in handles]),
    }
    _check(_by_hand(handles, batch, "small", ["old_log_probs"]), batch, ranks)
    works |= {
        SENT: lambda: group.call("small", batch),
        HAND: lambda: _by_hand(handles, batch, "small", ["old_log_probs"]),
    }
    ms = interleaved(works, 5 * rounds)
    return times(f"calls, 64 short rows, {ranks} ranks", ms, [(OURS, RAY, "<= 2"), (HAND, SENT, ">= 1")])


def _batches(
    actors: Sequence[Any], what: tuple[str, int, int], batch: TensorDict, rounds: int, target: str
) -> list[Row]:
    name, rows, ranks = what
    progress(f"calls: {name}, {rows} rows, {ranks} ranks")
    handles = [actors[rank % len(actors)] for rank in range(ranks)]
    group = WorkerGroup(handles, pad_token_id=PAD_ID)

    def by_ray() -> list[float]:
        set_zero_copy(True)
        try:
            parts = _parts(batch, ranks)
            return ray.get([actor.batches.remote(part) for actor, part in zip(handles, parts, strict=True)])
        finally:
            set_zero_copy(False)

    _check(by_ray(), batch, ranks)
    _check(group.call("batches", batch), batch, ranks)
    _check(_by_hand(handles, batch, "batches"), batch, ranks)
    works: dict[str, Callable[[], object]] = {
        OURS: lambda: group.call("batches", batch),
        ZERO_COPY: by_ray,
        HAND: lambda: _by_hand(handles, batch, "batches"),
    }
    ms = interleaved(works, 2 * rounds)
    return times(f"calls, {name}, {rows} rows, {ranks} ranks", ms, [(ZERO_COPY, OURS, target), (HAND, OURS, ">= 1")])


def _parts(batch: TensorDict, ranks: int) -> Sequence[TensorDict]:
    """As many rows for each rank as WorkerGroup gives it."""
    least, more = divmod(len(batch), ranks)
    return batch.split([least + (rank < more) for rank in range(ranks)])


def _check(sums: list[float], batch: TensorDict, ranks: int) -> None:
    expected = [float(part["old_log_probs"].sum()) for part in _parts(batch, ranks)]
    if len(sums) != ranks or any(not math.isclose(x, y, rel_tol=1e-5) for x, y in zip(sums, expected, strict=True)):
        raise NotExact(f"calls: the ranks summed {sums}; expected {expected}.")
