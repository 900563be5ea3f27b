"""A fuzz target for dispatch, over a Ray of its own:

    python -m tests.fuzz_dispatch --count N --seed S                sequences on one node
    python -m tests.fuzz_dispatch --count N --seed S --nodes 3      ... on three nodes
    python -m tests.fuzz_dispatch --kills N --seed S                N nodes are killed while calls run
    python -m tests.fuzz_dispatch --threads 8 --seconds 60          threads that share a group and a PackedBatch

A sequence puts rows, calls ranks, moves rows of views, adds fields to them, and lets ranks raise, come late or die; a
call that fails is sent again by `retry`. What comes back is compared bit for bit with the same rows of one padded
batch, which plain indexing takes. A failure is printed with the seed that makes it again. At the end: memory and
descriptors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
from tensordict import NonTensorStack, TensorDict

import maskpack as mp
from maskpack.dispatch import WorkerGroup, endpoint

sys.path.insert(0, str(Path(__file__).parent))
from samples import assert_same

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import the tests

ROWS, PROMPT, RESPONSE, PAD, RANKS = 40, 5, 9, 7, 3
BASE = ("input_ids", "attention_mask", "response_mask", "old_log_probs", "number", "wide", "uid")
SCORES = 4
_ray: Any = ray


# -------------------------------------------------------------------- the truth


def truth(wide: int) -> TensorDict:
    """All rows with all fields that any call gives. `wide` floats a row make objects too large to travel in a call."""
    rng = torch.Generator().manual_seed(3)
    prompt = torch.arange(PROMPT) >= torch.randint(PROMPT + 1, (ROWS, 1), generator=rng)
    response = torch.arange(RESPONSE) < torch.randint(RESPONSE + 1, (ROWS, 1), generator=rng)
    mask = torch.cat([prompt, response], 1)
    log_probs = torch.randn(ROWS, RESPONSE, generator=rng).where(response, 0.0)
    fields: dict[str, Any] = {
        "input_ids": torch.randint(8, 99, mask.shape, generator=rng).where(mask, PAD),
        "attention_mask": mask.long(),
        "response_mask": response.long(),
        "old_log_probs": log_probs,
        "number": torch.arange(ROWS),
        "wide": torch.randn(ROWS, wide, generator=rng),
        "uid": NonTensorStack(*[f"row {row}" for row in range(ROWS)]),
    }
    for k in range(SCORES):
        fields[score_name(k)] = (log_probs * (k + 1) - k).where(response, 0.0)
    return TensorDict(fields, batch_size=[ROWS])


def score_name(k: int) -> str:
    return ("values", "returns", "advantages", "ref_log_prob")[k]


# -------------------------------------------------------------------- the ranks


def first(path: str) -> bool:
    """Whether nobody was here before."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


class Worker:
    @endpoint
    def echo(self, batch: TensorDict) -> TensorDict:
        return batch

    @endpoint(layout="nested", micro_batches=True)
    def echo_in_parts(self, batch: TensorDict) -> TensorDict:
        return batch

    @endpoint(layout="nested")
    def score(self, batch: TensorDict, k: int) -> TensorDict:
        return TensorDict({score_name(k): batch["old_log_probs"] * (k + 1) - k}, batch_size=batch.batch_size)

    @endpoint
    def one_a_row(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"reward_baselines": batch["number"] * 2.0}, batch_size=batch.batch_size)

    @endpoint
    def numbers(self, batch: TensorDict) -> list[int]:
        return batch["number"].tolist()

    @endpoint
    def fail(self, batch: TensorDict, path: str) -> TensorDict:
        if first(path):
            raise ValueError("asked to fail")
        return batch

    @endpoint
    def late(self, batch: TensorDict, path: str) -> TensorDict:
        if first(path):
            time.sleep(0.4)
        return batch

    @endpoint
    def die(self, batch: TensorDict, path: str) -> TensorDict:
        if first(path):
            os._exit(1)
        return batch


def launched(ranks: int = RANKS, strategies: list[Any] | None = None, **options: Any) -> WorkerGroup:
    """A group of its own; ranks take turns with the strategies for where they run."""
    strategies = ["DEFAULT"] if strategies is None else strategies
    worker: Any = _ray.remote(num_cpus=0, max_restarts=-1)(Worker)
    return WorkerGroup(
        [
            worker.options(scheduling_strategy=strategies[rank % len(strategies)], **options).remote()
            for rank in range(ranks)
        ],
        pad_token_id=PAD,
    )


# -------------------------------------------------------------------- sequences


@dataclass(frozen=True)
class Held:
    """A view, and the numbers of its rows and its fields, as they should be."""

    view: mp.BatchView
    rows: list[int]
    fields: tuple[str, ...]


class Sequence:
    """Random operations on views, each with what it should give."""

    def __init__(
        self, rng: random.Random, whole: TensorDict, group: WorkerGroup, folder: str, seen: Counter[str]
    ) -> None:
        self.rng, self.whole, self.group, self.folder, self.seen = rng, whole, group, folder, seen
        self.held = [self.put()]

    def run(self, steps: int) -> None:
        works: list[Callable[[], None]] = [
            self.again, self.moved, self.moved, self.moved, self.joined, self.scored, self.scored, self.onto,
            self.echoed, self.echoed, self.planned, self.packed, self.kept, self.failed, self.misplaced, self.looked,
        ]  # fmt: skip
        for _ in range(steps):
            work = self.rng.choice(works)
            self.seen[work.__name__] += 1
            work()
        self.looked()

    def expected(self, rows: list[int], fields: tuple[str, ...]) -> TensorDict:
        return self.whole[rows].select(*fields)

    def same(self, seen: TensorDict, rows: list[int], fields: tuple[str, ...]) -> None:
        assert sorted(seen.keys()) == sorted(fields), f"fields {sorted(seen.keys())}, expected {sorted(fields)}"
        if rows:
            assert_same(seen.select(*fields), self.expected(rows, fields))
        else:
            assert len(seen) == 0

    def pick(self) -> Held:
        return self.rng.choice(self.held)

    def keep(self, held: Held) -> None:
        self.held = [*self.held[-5:], held]

    def some(self, at_least: int = 1) -> list[int]:
        return [self.rng.randrange(ROWS) for _ in range(self.rng.randint(at_least, 12))]

    def put(self) -> Held:
        rows = self.some()
        batch: Any = self.expected(rows, BASE)
        if self.rng.random() < 0.3:
            batch = self.group.pack(batch)
        balance: Any = self.rng.choice(["rows", "tokens"])
        return Held(self.group.put(batch, balance=balance), rows, BASE)

    def again(self) -> None:
        self.keep(self.put())

    def moved(self) -> None:
        held, rng = self.pick(), self.rng
        n = len(held.rows)
        how = rng.choice(["select", "slice", "mask", "sort", "repeat", "split"])
        index = list(range(n))
        if how == "select":
            index = [rng.randrange(n) for _ in range(rng.randint(0, 8))] if n else []
            view = held.view.select(np.array(index, np.int64))
        elif how == "slice":
            part = slice(rng.randint(0, n), rng.randint(0, n), rng.choice([None, 2]))
            index, view = index[part], held.view[part]
        elif how == "mask":
            on = [rng.random() < 0.7 for _ in index]
            index, view = [place for place, yes in enumerate(on) if yes], held.view.select(np.array(on, np.bool_))
        elif how == "sort":
            lengths = self.whole["response_mask"].sum(1)
            index = sorted(index, key=lambda place: int(lengths[held.rows[place]]))
            view = held.view.sort_by_length("response")
        elif how == "repeat":
            index, view = [place for place in index for _ in range(2)][:20], held.view.repeat(2)[:20]
        else:
            parts = held.view.split(max(1, n // 3)) if n else (held.view,)
            number = rng.randrange(len(parts))
            size = max(1, n // 3)
            index, view = index[number * size : (number + 1) * size], parts[number]
        self.keep(Held(view, [held.rows[place] for place in index], held.fields))

    def joined(self) -> None:
        one = self.pick()
        alike = [held for held in self.held if set(held.fields) == set(one.fields)][:3]
        rows = [row for held in alike for row in held.rows]
        self.keep(Held(mp.BatchView.cat([held.view for held in alike]), rows, one.fields))

    def scored(self) -> None:
        held, k = self.pick(), self.rng.randrange(SCORES)
        scores = self.called("score", held.view, k, layout="view")
        fields = (*(name for name in held.fields if name != score_name(k)), score_name(k))
        self.keep(Held(held.view.with_fields(scores), held.rows, fields))

    def onto(self) -> None:
        held, k = self.pick(), self.rng.randrange(SCORES)
        name = score_name(k)
        if held.rows:
            view = self.group.put(self.expected(held.rows, (name,)), onto=held.view)
            self.keep(Held(view, held.rows, (*(other for other in held.fields if other != name), name)))

    def echoed(self) -> None:
        held = self.pick()
        balance: Any = self.rng.choice(["rows", "tokens", "mine"])
        if balance == "mine":
            balance = [list(range(len(held.rows)))[rank::RANKS] for rank in range(RANKS)]
        nested = self.rng.random() < 0.3
        seen = self.called("echo", held.view, balance=balance, layout="nested" if nested else "padded")
        self.same(mp.unnest(seen) if nested else seen, held.rows, held.fields)

    def planned(self) -> None:
        held = self.pick()
        if len(held.rows) < RANKS:
            return
        plan = self.group.plan(held.view, self.rng.choice([20, 60]))
        self.same(self.called("echo_in_parts", held.view, plan=plan), held.rows, held.fields)

    def packed(self) -> None:
        rows = self.some(0)
        batch: Any = self.expected(rows, BASE)
        self.same(self.called("echo", self.group.pack(batch) if self.rng.random() < 0.5 else batch), rows, BASE)

    def kept(self) -> None:
        held = self.pick()
        self.keep(replace(held, view=self.called("echo", held.view, layout="view")))

    def failed(self) -> None:
        held = self.pick()
        if not held.rows:
            return
        method, timeout = self.rng.choice([*[("fail", None), ("late", 0.2)] * 4, ("die", None)])
        path = f"{self.folder}/{self.rng.getrandbits(60)}"
        self.same(self.called(method, held.view, path, timeout=timeout), held.rows, held.fields)

    def misplaced(self) -> None:
        """Fields of the same rows in another order are refused."""
        held = self.pick()
        order = list(range(len(held.rows)))
        self.rng.shuffle(order)
        if [held.rows[place] for place in order] == held.rows:
            return
        more = self.called("one_a_row", held.view.select(np.array(order)), layout="view")
        try:
            held.view.with_fields(more)
        except mp.LayoutError:
            return
        raise AssertionError(f"fields of rows in the order {order} were accepted")

    def looked(self) -> None:
        held = self.pick()
        names = self.rng.sample(held.fields, self.rng.randint(1, len(held.fields)))
        names = tuple(name for name in held.fields if name in names)
        self.same(held.view.materialize(*names, get=_ray.get), held.rows, names)

    def called(self, method: str, batch: Any, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        call = self.group.submit(method, batch, *args, grace=2.0, **options)
        for _ in range(8):
            try:
                return call.result(timeout)
            except mp.WorkerError as error:
                self.seen["failures"] += 1
                timeout = 60.0
                if error.call is None:
                    raise
                try:
                    call = error.call if self.rng.random() < 0.2 and method == "late" else error.call.retry()
                except mp.MaskpackError as none_left:
                    if "every rank" not in str(none_left):
                        raise
                    self.seen["every rank lost"] += 1
                    time.sleep(1.0)  # they start again
                    call = self.group.submit(method, batch, *args, grace=2.0, **options)
        raise AssertionError(f"{method} failed eight times")


def sequences(count: int, seed: int, nodes: int, seen: Counter[str]) -> None:
    whole = truth(8 if nodes == 1 else 4000)
    with cluster(nodes) as machines, tempfile.TemporaryDirectory() as folder:
        del machines
        group = launched(strategies=["DEFAULT" if nodes == 1 else "SPREAD"])
        for number in range(count):
            one = f"{seed}:{number}"
            try:
                Sequence(random.Random(one), whole, group, folder, seen).run(8)
            except Exception as error:
                print(f"sequence {one}: {type(error).__name__}", flush=True)
                traceback.print_exc()
                seen["DIFFERENT"] += 1
                group = launched(strategies=["DEFAULT" if nodes == 1 else "SPREAD"])
            seen["sequences"] += 1
            if number % max(1, count // 5) == max(1, count // 5) - 1:
                print(f"{number + 1} sequences, {state()}", flush=True)


# -------------------------------------------------------------------- nodes that die


def survived(group: WorkerGroup, view: mp.BatchView, kept: bool, seen: Counter[str]) -> TensorDict:
    """The rows of a view over a batch on the driver, from ranks that may die; `kept` on the ranks first."""
    for _ in range(6):
        try:
            call = group.submit("echo", view, grace=2.0, layout="view" if kept else "padded")
            for _ in range(6):
                try:
                    out = call.result(30.0)
                    return out.materialize(get=_ray.get) if kept else out
                except mp.WorkerError as error:
                    seen["failures"] += 1
                    call = error.call.retry()
            raise AssertionError("six retries failed")
        except mp.MaskpackError as error:
            if "every rank" not in str(error):
                raise
            seen["every rank lost"] += 1
            time.sleep(1.0)  # they start again
        except _ray.exceptions.RayError as error:
            if not kept:
                raise
            seen[f"a view lost its only copy: {type(error).__name__}"] += 1
    raise AssertionError("rows of the driver did not come back")


def kills(count: int, seed: int, seen: Counter[str]) -> None:
    """A node dies while calls on rows of the driver, and on views, run. What is on the driver must come back."""
    whole = truth(4000)
    rng = random.Random(seed)
    with cluster(2) as machines:
        for number in range(count):
            victim = next(iter(machines.worker_nodes))
            group = launched(strategies=[On(victim.node_id, soft=True), "DEFAULT"])
            batch = group.pack(whole.select(*BASE))
            group.call("numbers", batch)  # the actors are up
            timer = threading.Timer(rng.uniform(0, 0.35), machines.remove_node, (victim,), {"allow_graceful": False})
            timer.start()
            calls = 0
            while timer.is_alive() or calls < 6:
                rows = [rng.randrange(ROWS) for _ in range(12)]
                out = survived(group, mp.BatchView.of(batch).select(np.array(rows)), rng.random() < 0.5, seen)
                assert_same(out, whole[rows].select(*BASE))
                calls += 1
            seen["same"] += calls
            timer.join()
            seen["kills"] += 1
            machines.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            if number % 10 == 9:
                print(f"{number + 1} kills, {dict(seen)}, {state()}", flush=True)


# -------------------------------------------------------------------- threads


def threads(number: int, seconds: float, seed: int, seen: Counter[str]) -> None:
    """Threads dispatch rows of one PackedBatch through one group."""
    whole = truth(20)
    with cluster(1), tempfile.TemporaryDirectory() as folder:
        group = launched(1, max_concurrency=2)
        packed = group.pack(whole.select(*BASE))
        view = mp.BatchView.of(packed)
        until = time.monotonic() + seconds
        counts: list[Counter[str]] = [Counter() for _ in range(number)]

        def work(thread: int) -> None:
            rng, own = random.Random(f"{seed}:{thread}"), counts[thread]
            while time.monotonic() < until:
                batches: list[tuple[list[int], Any]] = []
                for _ in range(30):
                    rows = sorted(rng.sample(range(ROWS), 16))
                    batches.append((rows, group.submit("numbers", view.select(np.array(rows)))))
                for rows, call in batches:
                    seen_rows = [row for part in call.result(60) for row in part]
                    own["right" if seen_rows == rows else "WRONG"] += 1
                rows = sorted(rng.sample(range(ROWS), 16))
                index = np.array(rows)
                kind = rng.choice(["put", "view", "raise", "whole", "padded"])
                if kind == "put":
                    out = group.put(view.select(index)).materialize(get=_ray.get)
                elif kind == "view":
                    out = group.call("echo", view.select(index), layout="view").materialize(get=_ray.get)
                elif kind == "raise":
                    call = group.submit("fail", view.select(index), f"{folder}/{thread}-{rng.getrandbits(60)}")
                    try:
                        out = call.result(60)
                    except mp.WorkerError as error:
                        out = error.call.retry().result(60)
                elif kind == "whole":
                    out, rows = group.call("echo", packed), list(range(ROWS))
                else:
                    out = group.call("echo", whole[rows].select(*BASE))
                try:
                    assert_same(out, whole[rows].select(*BASE))
                    own["right"] += 1
                except AssertionError:
                    own["WRONG"] += 1

        pool = [threading.Thread(target=work, args=(thread,)) for thread in range(number)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        for own in counts:
            seen.update(own)


# -------------------------------------------------------------------- the machine


@contextlib.contextmanager
def cluster(nodes: int) -> Generator[Any]:
    store = 100 * 2**20
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    if nodes == 1:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store)
        made: Any = None
    else:
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
        head |= {"object_store_memory": store}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes - 1):
            made.add_node(num_cpus=1, object_store_memory=store)
        ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        if made is not None:
            made.shutdown()


def state() -> str:
    """Memory and descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB, {len(os.listdir('/proc/self/fd'))} descriptors"
    return f"{own}, {threading.active_count()} threads"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", mp.MaskpackWarning)
    torch.set_num_threads(1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    seen: Counter[str] = Counter()
    begun = time.time()
    if given.count:
        sequences(given.count, given.seed, given.nodes, seen)
    if given.kills:
        kills(given.kills, given.seed, seen)
    if given.threads:
        threads(given.threads, given.seconds, given.seed, seen)
    print(dict(seen), f"{time.time() - begun:.0f} s, {state()}")
    return bool(seen["DIFFERENT"] or seen["WRONG"])


if __name__ == "__main__":
    sys.exit(main())
