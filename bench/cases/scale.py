"""The driver's own work at scale, without Ray: objects, nodes, tasks and actors are stand-ins, which pickle what they
are sent. Rows were put where they were made, by as many rollout workers as there are ranks, and the driver holds views
of them; their bytes are never here. A step is

    views joined        BatchView.cat of the views of all workers
    divided             tokens, rows of each rank, shares
    planned             plan_ranks
    sent                as the workers made them, each rank its own: messages to all ranks
    shuffled, sent      divided by the plan, so that each rank needs rows of all others

Ranks are 8 to a node. Of the calls, the bytes of a message are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from ray import cloudpickle
from ray.remote_function import RemoteFunction

from bench.harness.measure import medians_of, progress, turns
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.workloads import PAD_ID, make_batch
from maskpack import PackedBatch, compress
from maskpack.dispatch import WorkerGroup, placement
from maskpack.dispatch.division import divided, shares
from maskpack.planning import plan_ranks
from maskpack.views import BatchMeta, BatchView

_OF_NODE = 8
_BUDGET = 32_768
_SIZES = ((100_000, 1_024),)
_STEPS = ("views joined", "divided", "planned", "sent", "shuffled, sent")
_TARGETS = {(100_000, 1_024): "<= 100"}


@dataclass(eq=False)
class _Object:
    """Stands for a reference."""

    node: str


def _bytes_of(arguments: Sequence[Any]) -> int:
    """Of what is sent beside references."""
    return len(cloudpickle.dumps([value for value in arguments if not isinstance(value, _Object)]))


@dataclass
class _Cluster:
    """Stands for Ray: nodes by name, and what was sent."""

    nodes: Sequence[str]
    sent: list[int] = field(default_factory=list[int])
    """The bytes of each message to an actor."""

    def run(self, args: Sequence[Any] = (), num_returns: int | None = None, **options: Any) -> Any:
        """Takes a task."""
        _bytes_of(args)
        where = options.get("scheduling_strategy")
        out = [_Object(where.node_id if where is not None else self.nodes[0]) for _ in range(num_returns or 1)]
        return out if len(out) > 1 else out[0]

    @contextmanager
    def as_ray(self) -> Iterator[None]:
        alive = [{"NodeID": node, "Alive": True, "Resources": {"object_store_memory": 1e9}} for node in self.nodes]

        def locations(references: Sequence[_Object]) -> dict[_Object, Any]:
            return {one: {"node_ids": [one.node], "object_size": 1 << 20} for one in references}

        with ExitStack() as stack:
            for where, name, stand_in in (
                (ray, "nodes", lambda: alive),
                (ray, "put", lambda _: _Object(self.nodes[0])),
                (ray.experimental, "get_object_locations", locations),
                (RemoteFunction, "_remote", self.run),
                (placement, "this_node", lambda: self.nodes[0]),
            ):
                stack.enter_context(patch.object(where, name, stand_in))
            yield


@dataclass
class _Method:
    cluster: _Cluster
    node: str

    def options(self, **_: Any) -> _Method:
        return self

    def remote(self, *arguments: Any) -> tuple[_Object, _Object]:
        self.cluster.sent.append(_bytes_of(arguments))
        return _Object(self.node), _Object(self.node)


@dataclass
class _Actor:
    update: _Method


@case(
    "scale",
    help="the driver's own work for up to 1,024 ranks and 100,000 rows, without Ray",
    on="cpu",
    rows=None,
    tiny={"sizes": ((48, 4),)},
)
def run(rounds: int, *, sizes: Sequence[tuple[int, int]] = _SIZES) -> RowGroups:
    for rows, ranks in sizes:
        name = f"scale, {rows:,} rows, {ranks:,} ranks"
        progress(name)
        taken: dict[str, list[float]] = {step: [] for step in _STEPS}
        counts: list[tuple[str, float, str]] = []
        for _ in turns(taken, rounds, "ms"):
            seconds, counts = _step(rows, ranks)
            for step in _STEPS:
                taken[step].append(1e3 * seconds[step])
        ms = medians_of(taken)
        first = ms["views joined"] + ms["divided"] + ms["planned"]
        yield [
            *(Row(name, step, ms[step], "ms") for step in _STEPS),
            Row(name, "all but messages", first, "ms", _TARGETS.get((rows, ranks))),
            *(Row(name, *counted) for counted in counts),
        ]


def _step(rows: int, ranks: int) -> tuple[Mapping[str, float], list[tuple[str, float, str]]]:
    """The seconds of each part of a step, and what was sent."""
    cluster = _Cluster([f"{number:056x}" for number in range(-(-ranks // _OF_NODE))])
    nodes = [cluster.nodes[rank // _OF_NODE] for rank in range(ranks)]
    views = _views(rows, nodes)
    seconds: dict[str, float] = {}
    counts: list[tuple[str, float, str]] = []
    with cluster.as_ray():
        group = WorkerGroup([_Actor(_Method(cluster, node)) for node in nodes], pad_token_id=PAD_ID)
        for rank, node in enumerate(nodes):
            group._ranks.store.ran_on(rank, [node])
        begun = time.process_time()

        def ended(step: str) -> None:
            nonlocal begun
            now = time.process_time()
            seconds[step] = now - begun
            if cluster.sent:
                counts.append((f"{step}: bytes of a message", statistics.mean(cluster.sent), "bytes"))
            cluster.sent = []
            begun = time.process_time()

        view = BatchView.cat(views)
        ended("views joined")
        shares(view, divided(view, "tokens", ranks))
        ended("divided")
        plan = plan_ranks(view.tokens(), ranks, _BUDGET)
        ended("planned")
        group.submit("update", view)
        ended("sent")
        group.submit("update", view, balance=plan.rows)
        ended("shuffled, sent")
    return seconds, counts


@cache
def _packed() -> PackedBatch:
    return compress(make_batch(256), pad_token_id=PAD_ID)


def _views(rows: int, nodes: Sequence[str]) -> list[BatchView]:
    """Those of the rollout workers, one for each rank."""
    packed = _packed()
    index = np.random.default_rng(0).integers(0, packed.num_rows, rows)
    parts = np.array_split(index, len(nodes))
    return [BatchView.at(_Object(node), BatchMeta.of(packed.take(own))) for node, own in zip(nodes, parts, strict=True)]
