"""One step of verl's V1 trainer as its storage sees it, without models: what is put and got, by whom, in which order.

    rollout      8 writers put their trajectories, one a call
    sample       driver: tags of all (`kv_list`), rm_scores of all
    old log-probs  8 ranks get all fields of their samples, which are shuffled, and put log_probs and entropy [T]
                 driver gets log_probs, entropy and three others, puts old_log_probs and entropy [R]
    advantages   driver gets five fields, puts advantages and returns
    update       8 ranks get all fields of their samples
    metrics      driver gets seven fields
    clear        driver

Ranks get all fields because the batch that verl's replay buffer gives them names none. The 8 writers are the processes
that are ranks later, actors of Ray, each with a client of either backend; on few cores, the time is that of all work
together. A Ray call to all 8 is in the time of each phase that ranks take part in, for both backends alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import transfer_queue as tq

from bench.cases.dataplane.queue import PARTITION, Queue
from bench.cases.dataplane.rows import Trajectory, arguments, batched, require_rows, select, shuffled, trajectories

RANKS = 8
_FOR_OLD_LOG_PROBS = ("entropy", "log_probs", "response_mask", "responses", "rollout_log_probs")
_FOR_ADVANTAGES = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs")
_FOR_METRICS = ("prompts", "responses", "response_mask", "advantages", "returns", "rm_scores", "num_turns")


class Step:
    """The driver. The ranks end with `close`."""

    def __init__(self, queues: Mapping[str, Queue], rows: int, widths: Mapping[str, int]) -> None:
        self._queues, self._rows = queues, trajectories(rows, **widths)
        self._keys = [row.key for row in self._rows]
        self._old = batched([select(row.later, "old_log_probs", "entropy") for row in self._rows])
        self._advantages = batched([select(row.later, "advantages", "returns") for row in self._rows])
        kind = ray.remote(Rank).options(num_cpus=0)
        self.ranks = [
            kind.remote(queues, rows, widths, range(rank * rows // RANKS, (rank + 1) * rows // RANKS), part)
            for rank, part in enumerate(shuffled(rows, RANKS))
        ]

    def run(self, name: str, *, check: bool = False) -> dict[str, float]:
        """Seconds of each phase, and of the step. With `check`, each get is compared with what was put: raises
        NotExact, and the seconds mean nothing."""
        queue, keys, phases = self._queues[name], self._keys, dict[str, float]()
        begin = time.perf_counter()
        with queue:
            with _timed(phases, "rollout"):
                self._all("write", name)
            with _timed(phases, "sample"):
                tags = tq.kv_list(PARTITION)[PARTITION]
                self._get(["rm_scores"], check)
            with _timed(phases, "old log-probs, ranks"):
                self._all("infer", name, check)
            with _timed(phases, "old log-probs, driver"):
                self._get(_FOR_OLD_LOG_PROBS, check)
                tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._old)
            with _timed(phases, "advantages"):
                self._get(_FOR_ADVANTAGES, check, later=True)
                tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._advantages)
            with _timed(phases, "update"):
                self._all("train", name, check)
            with _timed(phases, "metrics"):
                self._get(_FOR_METRICS, check, later=True)
            with _timed(phases, "clear"):
                tq.kv_clear(keys=keys, partition_id=PARTITION)
        if check and tags != {row.key: row.tag for row in self._rows}:
            raise AssertionError(f"{name}: tags are not those that were put.")
        return phases | {"step": time.perf_counter() - begin}

    def close(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)

    def _all(self, method: str, *given: Any) -> None:
        ray.get([getattr(rank, method).remote(*given) for rank in self.ranks])

    def _get(self, fields: Sequence[str], check: bool, *, later: bool = False) -> None:
        seen = tq.kv_batch_get(keys=self._keys, partition_id=PARTITION, select_fields=list(fields))
        if check:
            require_rows("step", seen, [select(_stored(row, later), *fields) for row in self._rows])


class Rank:
    """A writer, then a rank of the actor: an actor of Ray.

    Args:
        queues: by backend.
        rows, widths: of the workload, which each rank makes itself.
        written: the trajectories that it puts.
        computed: those that it gets.
    """

    def __init__(
        self,
        queues: Mapping[str, Queue],
        rows: int,
        widths: Mapping[str, int],
        written: Sequence[int],
        computed: Sequence[int],
    ) -> None:
        everything = trajectories(rows, **widths)
        self._queues = queues
        self._puts = [arguments([everything[number]], PARTITION) for number in written]
        self._computed = [everything[number] for number in computed]
        self._keys = [row.key for row in self._computed]
        self._output = batched([row.logits for row in self._computed]) if self._computed else None

    def write(self, name: str) -> None:
        with self._queues[name]:
            for put in self._puts:
                tq.kv_batch_put(**put)

    def infer(self, name: str, check: bool) -> None:
        if self._output is None:
            return
        with self._queues[name]:
            seen = tq.kv_batch_get(keys=self._keys, partition_id=PARTITION)
            tq.kv_batch_put(keys=self._keys, partition_id=PARTITION, fields=self._output)
        if check:
            require_rows("old log-probs", seen, [row.fields for row in self._computed])

    def train(self, name: str, check: bool) -> None:
        if self._output is None:
            return
        with self._queues[name]:
            seen = tq.kv_batch_get(keys=self._keys, partition_id=PARTITION)
        if check:
            require_rows("update", seen, [_stored(row, later=True) for row in self._computed])


def _stored(row: Trajectory, later: bool) -> dict[str, Any]:
    """All fields of a trajectory: after the ranks put theirs, or after the trainer did."""
    return row.fields | row.logits | (row.later if later else {})


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - begin
