"""Random sequences of dispatch, each step compared bit for bit with plain indexing of the padded batch.

python -m tests.tools.fuzz dispatch --count 200 [--nodes 3]                sequences: put, call, move rows, fail, retry
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import samples
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from samples import PAD, assert_same, freeze
from tensordict import TensorDict, set_list_to_stack

import maskpack as mp
from maskpack.dispatch import WorkerGroup, endpoint, placement
from maskpack.dispatch.placement import nodes_alive
from maskpack.views.view import BatchView

STORE = 150 << 20
ACTORS = 4
FEW = placement._FEW
PROMPT, RESPONSE = 5, 6
FOLDERS = {"dir": tempfile.gettempdir()}
"""Where files lie by which ranks know that something has happened."""


class Worker:
    @endpoint
    def echo(self, batch):
        return batch

    @endpoint(format="nested")
    def echo_nested(self, batch):
        return batch

    @endpoint(micro_batches=True)
    def echo_in_parts(self, batch):
        return batch

    @endpoint(fields=["returns", "attention_mask", "prompts"])
    def scale(self, batch, factor):
        return TensorDict({"values": batch["returns"] * factor}, batch_size=batch.batch_size)

    @endpoint
    def rows(self, batch):
        return batch["row"].tolist()

    @endpoint
    def once(self, batch, row, path, how):
        """The first rank that has a row fails, dies or is late."""
        if row in batch["row"].tolist() and not os.path.exists(path):
            open(path, "w").close()
            if how == "raise":
                raise ValueError(f"row {row}")
            if how == "die":
                os._exit(1)
            time.sleep(1.0)
        return batch


Remote = ray.remote(num_cpus=0)(Worker)
Pair = tuple[Any, TensorDict]


class Scene:
    """Actors on the nodes of a cluster, and new ones in the place of those that died."""

    def __init__(self) -> None:
        self.nodes = list(nodes_alive())
        self.actors = [self.actor(n) for n in range(ACTORS)]

    def actor(self, number: int) -> Any:
        node = self.nodes[number % len(self.nodes)]
        return Remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


class Sequence:
    """One batch, its rows in views and beside them what they must be."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.scene = scene
        self.done: Counter[str] = Counter()
        self.batch = self.new_batch()
        self.before = freeze(self.batch)
        self.dp_ranks = [[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 2, 2]][self.number(5)]
        self.group = WorkerGroup(scene.actors, dp_ranks=self.dp_ranks, pad_token_id=PAD)
        packed = self.group.pack(self.batch)
        self.packed: list[Pair] = [(packed, self.batch)]
        self.views: list[Pair] = [(BatchView.of(packed), self.batch)]

    def number(self, below: int) -> int:
        return int(self.rng.integers(below))

    def new_batch(self) -> TensorDict:
        rows = [(self.number(PROMPT + 1), self.number(RESPONSE + 1)) for _ in range(1 + self.number(24))]
        batch = samples.rollout(rows, PROMPT, RESPONSE, holes=bool(self.number(2)))
        batch = batch.exclude("global_token_num")
        batch["row"] = torch.arange(len(rows))
        # as large as what lies in the store of a node, and is cut
        return batch.set("wide", torch.from_numpy(self.rng.random((len(rows), 1 + 20_000 * self.number(2)))))

    def path(self) -> str:
        return tempfile.mktemp(prefix="fuzz-", dir=FOLDERS["dir"])

    def pair(self) -> Pair:
        return self.views[self.number(len(self.views))]

    def given(self) -> Pair:
        """A batch in any form."""
        view, want = self.pair()
        kind = self.number(4)
        if kind == 0:
            return self.packed[self.number(len(self.packed))]
        return (want, want) if kind == 1 else (view, want)

    def keep(self, view: BatchView, want: TensorDict) -> None:
        self.views.append((view, want))
        self.views = self.views[-6:]

    def check(self, seen: Any, want: TensorDict) -> None:
        seen = seen.materialize(get=ray.get) if isinstance(seen, BatchView) else seen
        assert_same(mp.unnest_batch_by_mask(seen) if "_maskpack" in seen.keys() else seen, want)  # noqa: SIM118

    def step(self) -> None:
        steps = [self.put, self.call, self.move, self.move, self.move, self.cat, self.fields, self.onto, self.plan]
        steps += [self.order, self.fail, self.late]
        chosen = self.die if self.number(60) == 0 else steps[self.number(len(steps))]
        chosen()
        self.done[chosen.__name__] += 1
        if self.number(3) == 0:
            self.check(*self.pair())

    # ------------------------------------------------------------ what is tried

    def put(self) -> None:
        given, want = self.given()
        self.keep(self.group.put(given, balance=("rows", "tokens")[self.number(2)]), want)

    def call(self) -> None:
        given, want = self.given()
        method, layout = ("echo", "echo_nested")[self.number(2)], ("padded", "nested", "view")[self.number(3)]
        seen = self.group.call(method, given, format=layout, balance=self.balance(want))
        self.check(seen, want)
        if layout == "view":
            self.keep(seen, want)

    def balance(self, want: TensorDict) -> Any:
        kind = self.number(3)
        if kind < 2:
            return ("rows", "tokens")[kind]
        ranks = self.group.num_ranks
        cuts = np.sort(self.rng.integers(0, len(want) + 1, ranks - 1))
        return np.split(self.rng.permutation(len(want)), cuts) if ranks > 1 else "rows"

    def move(self) -> None:
        view, want = self.pair()
        count, kind = len(want), self.number(6)
        if kind == 0:
            begin = self.number(count)
            rows: Any = np.arange(begin, begin + 1 + self.number(count - begin))
            view = view[int(rows[0]) : int(rows[-1]) + 1]
        elif kind == 1:
            mask = self.rng.random(count) < 0.7
            mask[self.number(count)] = True
            rows, view = np.flatnonzero(mask), view[mask]
        elif kind == 2:
            rows = np.argsort(view.lengths("response"), kind="stable")
            view = view.take(rows)
        elif kind == 3 and count <= 24:
            rows = np.repeat(np.arange(count), 2)
            view = view.take(rows)
        elif kind == 4:
            cut = self.number(count)
            rows, view = np.arange(cut, count), view.split([cut, count - cut])[1]
        else:
            rows = self.rng.integers(0, count, 1 + self.number(count))
            view = view.take(rows)
        self.keep(view, want[torch.from_numpy(rows)])

    def cat(self) -> None:
        (one, want), (two, more) = self.pair(), self.pair()
        if sorted(want.keys()) == sorted(more.keys()) and len(want) + len(more) <= 48:
            view = BatchView.cat([one, two])
            self.keep(view, torch.cat([want, more.select(*want.keys())]))

    def fields(self) -> None:
        view, want = self.pair()
        factor = float(1 + self.number(5))
        result = self.group.call("scale", view, factor, format="view")
        fresh = want.clone(recurse=False).set("values", want["returns"] * factor)
        self.keep(view.with_fields(result), fresh)

    def order(self) -> None:
        """Results of the same rows in another order are refused, whatever their lengths."""
        view, want = self.pair()
        order = self.rng.permutation(len(want))
        result = self.group.call("scale", view.take(order), 2.0, format="view")
        try:
            view.with_fields(result)
            refused = False
        except mp.errors.LayoutError:
            refused = True
        rows = want["row"].numpy()
        if not np.array_equal(rows, rows[order]):
            assert refused, f"rows {rows[order].tolist()} beside {rows.tolist()}"
        if np.array_equal(order, np.arange(order.size)):
            assert not refused

    def onto(self) -> None:
        view, want = self.pair()
        fresh = TensorDict({"returns": want["returns"] * 3}, batch_size=want.batch_size)
        self.keep(self.group.put(fresh, onto=view), want.clone(recurse=False).set("returns", fresh["returns"]))

    def plan(self) -> None:
        view, want = self.pair()
        if len(want) < self.group.num_ranks:
            return
        plan = self.group.plan(view, PROMPT + RESPONSE + self.number(60))
        layout = ("padded", "view")[self.number(2)]
        seen = self.group.call("echo_in_parts", view, plan=plan, format=layout)
        self.check(seen, want)
        if layout == "view":
            view.with_fields(seen)

    def fail(self) -> None:
        self.failing("raise", None)

    def late(self) -> None:
        self.failing("late", 0.3)

    def die(self) -> None:
        self.failing("die", None)
        alive = [actor.__ray_call__.remote(lambda _: None) for actor in self.scene.actors]
        for number, ref in enumerate(alive):
            try:
                ray.get(ref, timeout=60)
            except ray.exceptions.RayActorError:
                self.scene.actors[number] = self.scene.actor(number)
        self.group = WorkerGroup(self.scene.actors, dp_ranks=self.dp_ranks, pad_token_id=PAD)

    def failing(self, how: str, timeout: float | None) -> None:
        given, want = self.given()
        row = int(want["row"][self.number(len(want))])
        layout = ("padded", "nested", "view")[self.number(3)]
        before = self.group.num_ranks
        try:
            seen = self.group.call("once", given, row, self.path(), how, format=layout, timeout=timeout, grace=10.0)
        except mp.errors.WorkerError as error:
            try:
                seen = error.call.retry().result()
            except mp.MaskpackError as none_left:
                if "is lost or late" not in str(none_left):
                    raise
                seen = error.call.retry(WorkerGroup([self.scene.actor(before)], pad_token_id=PAD)).result()
        self.check(seen, want)
        if layout == "view":
            self.keep(seen, want)


def play_sequence(scene: Scene, seed: int) -> Counter[str]:
    placement._FEW = FEW * (seed % 2)  # with 0, shuffled rows are joined however few objects they lie in
    sequence = Sequence(scene, seed)
    for _ in range(2 + sequence.number(10)):
        sequence.step()
    assert freeze(sequence.batch) == sequence.before, "the caller's batch was changed"
    return sequence.done


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1)


_SCENES: list[Scene] = []


@contextmanager
def session(given: argparse.Namespace) -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for module in (sys.modules[__name__], samples):  # the ranks cannot import the tests
        cloudpickle.register_pickle_by_value(module)
    node, cluster = {"num_cpus": 2, "object_store_memory": STORE}, None
    if given.nodes > 1:
        head = {"include_dashboard": False, **node}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(given.nodes - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
    else:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **node)
    with tempfile.TemporaryDirectory() as folder, set_list_to_stack(True):
        FOLDERS["dir"] = folder
        scene = Scene()
        _SCENES.append(scene)
        yield
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()


def play(seed: int) -> Counter[str]:
    return play_sequence(_SCENES[-1], seed)
