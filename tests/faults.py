"""Faults of a WorkerGroup, one after the other: what dies, gets lost, raises, is late or hangs, and what comes of it.

    python -m tests.faults --rounds 100       test_faults.py plays some rounds

Every attempt has a limit of time, and a thread that watches it. It must end in one WorkerError that names the method,
the ranks and their rows; the other ranks keep their results; a retry runs the missing rows, once each, and nothing
else; the result is that of a call without a fault, bit for bit; the batch of the driver is as it was; a normal call
works afterwards.

A round kills three processes: an actor that has rows kept and a finished call not collected exits during a third call,
one is killed from the driver during a call, and one right before. A replacement starts while other faults are tried.

An object is lost as Ray loses one whose owner died: a process of its own puts it, and is killed. That process knows
nothing of maskpack (it starts in a second, a rank takes four), so it puts the pickle of what readers will unpickle.
"""

from __future__ import annotations

import argparse
import faulthandler
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import ray
import torch
from fault_ranks import FACTOR, MANY, RANKS, RemoteDoomed, RemoteKeeper, Sample, Team, samples
from samples import PAD
from tensordict import TensorDict, TensorDictBase

import maskpack
from maskpack.dispatch import Call, WorkerGroup
from maskpack.views.view import BatchView

LIMIT = 60.0  # seconds of one attempt; it takes less than one
STORE = 2**28
KINDS = (
    "killed right before the call",
    "dead before the call",
    "exits during the call",
    "killed during the call",
    "dead after the call, not collected",
    "dead after the call, rows kept",
    "put object lost",
    "kept object lost",
    "exception on one of 8",
    "late, with the answer later",
    "hangs for ever, another failed",
    "exception on a peer, the other waits for it",
)


class Wrong(Exception):
    """Something other than what a fault should lead to."""


# -------------------------------------------------------------------- what is expected


def failure(run: Callable[[], object]) -> maskpack.errors.WorkerError:
    try:
        run()
    except maskpack.errors.WorkerError as error:
        return error
    raise Wrong("no WorkerError")


def check_error(
    error: maskpack.errors.WorkerError, failed: dict[int, tuple[Sequence[int], type[BaseException]]]
) -> None:
    """That it names the method, and exactly these ranks, with their rows and their errors."""
    seen = {one.rank: (one.rows.tolist(), one.error) for one in error.failures}
    right = seen.keys() == failed.keys() and all(
        seen[rank][0] == list(rows) and isinstance(seen[rank][1], kind) for rank, (rows, kind) in failed.items()
    )
    named = all(f"rank {rank} (rows {rows[0]} to {rows[-1]})" in str(error) for rank, (rows, _) in failed.items())
    if not right or not named or error.method != "score" or '"score"' not in str(error):
        raise Wrong(f"expected failures {failed}; got {error}")


def check_ran(seen: Sequence[int], expected: Sequence[int]) -> None:
    if list(seen) != list(expected):
        raise Wrong(f"rows {list(seen)} were run; expected {list(expected)}")


def wrong_rows(seen: Any, expected: TensorDict) -> int:
    """Rows that differ in a bit; all of them if the form of the batch differs."""
    fields = list(expected.keys())
    if not isinstance(seen, TensorDictBase) or list(seen.keys()) != fields or seen.batch_size != expected.batch_size:
        return len(expected)
    differ = torch.zeros(len(expected), dtype=torch.bool)
    for name in fields:
        left, right = seen[name], expected[name]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return len(expected)
        differ |= (left.view(torch.uint8) != right.view(torch.uint8)).reshape(len(expected), -1).any(1)
    return int(differ.sum())


# -------------------------------------------------------------------- faults


@dataclass
class Tally:
    """What became of the attempts, by kind."""

    limit: float = LIMIT
    tried: dict[str, int] = field(default_factory=dict)
    hung: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    failed: dict[str, list[BaseException]] = field(default_factory=dict)

    def attempt(self, kind: str, sample: Sample, run: Callable[[], TensorDictBase]) -> None:
        """Runs a fault and its repair, at most for the limit, and compares the batch that it gives."""
        self.tried[kind] = self.tried.get(kind, 0) + 1
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.append(caught(run)), daemon=True)
        thread.start()
        thread.join(self.limit)
        if not outcome:
            self.hung[kind] = self.hung.get(kind, 0) + 1
            faulthandler.dump_traceback()
            raise Wrong(f"{kind}: no end after {self.limit} s")
        if isinstance(outcome[0], BaseException):
            self.failed.setdefault(kind, []).append(outcome[0])
            return
        self.wrong[kind] = self.wrong.get(kind, 0) + wrong_rows(outcome[0], sample.expected)
        if wrong_rows(sample.batch, sample.before):
            raise Wrong(f"{kind}: the batch of the driver has changed")

    def faults(self, kind: str) -> tuple[int, int, int]:
        """Hangs, wrong rows and other failures."""
        return self.hung.get(kind, 0), self.wrong.get(kind, 0), len(self.failed.get(kind, []))


def caught(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # told in the thread that waits
        return error


def _exit_during(team: Team, sample: Sample, tally: Tally) -> None:
    """One death: during a call, after two others, before a fourth."""
    group, victim = team.group(), 1
    kept = group.call("score", sample.batch, FACTOR, format="view")
    finished = group.submit("score", sample.batch, FACTOR)
    until(finished.done)
    team.ran()
    ray.get(team.actors[victim].arm.remote("exit"))
    away = {victim: (sample.rows(victim), ray.exceptions.RayActorError)}

    def tried() -> TensorDictBase:
        return repaired(team, sample, lambda: group.call("score", sample.batch, FACTOR), away)

    def kept_rows() -> TensorDictBase:
        sample.check(kept.materialize(get=ray.get))
        others = WorkerGroup([actor for rank, actor in enumerate(team.actors) if rank != victim], pad_token_id=PAD)
        return others.call("score", kept, 1.0)

    tally.attempt("exits during the call", sample, tried)
    tally.attempt("dead after the call, not collected", sample, finished.result)
    tally.attempt("dead after the call, rows kept", sample, kept_rows)
    team.ran([victim])
    tally.attempt("dead before the call", sample, tried)
    team.replace(victim)


def _killed_during(team: Team, sample: Sample, tally: Tally) -> None:
    group, victim = team.group(), 2

    def run() -> TensorDictBase:
        with waiting(team, victim) as folder:
            killer = threading.Thread(
                target=lambda: (until((folder / "began").exists), ray.kill(team.actors[victim])), daemon=True
            )
            killer.start()
            away = {victim: (sample.rows(victim), ray.exceptions.RayActorError)}
            return repaired(team, sample, lambda: group.call("score", sample.batch, FACTOR), away)

    tally.attempt("killed during the call", sample, run)
    team.replace(victim)


def _killed_before(team: Team, sample: Sample, tally: Tally) -> None:
    """The driver does not know yet of the death."""
    doomed, place = RemoteDoomed.remote(), 3
    ray.get(doomed.up.remote())
    group = WorkerGroup([*team.actors[:place], doomed, *team.actors[place + 1 : RANKS]], pad_token_id=PAD)

    def call() -> Any:
        ray.kill(doomed)
        return group.call("score", sample.batch, FACTOR)

    away = {place: (sample.rows(place), ray.exceptions.RayActorError)}
    tally.attempt("killed right before the call", sample, lambda: repaired(team, sample, call, away))


def _exception(team: Team, sample: Sample, tally: Tally) -> None:
    rank = 1
    ray.get(team.actors[rank].arm.remote("raise"))
    raised = {rank: (sample.rows(rank, MANY), ValueError)}

    def run() -> TensorDictBase:
        return repaired(team, sample, lambda: team.group(MANY).call("score", sample.batch, FACTOR), raised)

    tally.attempt("exception on one of 8", sample, run)


def _late(team: Team, sample: Sample, tally: Tally) -> None:
    def run() -> TensorDictBase:
        with waiting(team, 0):
            call = team.group().submit("score", sample.batch, FACTOR)
            until_answered(call, (1, 2, 3))
            error = failure(lambda: call.result(0.02))
            check_error(error, {0: (sample.rows(0), TimeoutError)})
        result = error.call.result()
        check_ran(team.ran(), range(len(sample.batch)))
        return result

    tally.attempt("late, with the answer later", sample, run)


def _hang(team: Team, sample: Sample, tally: Tally) -> None:
    """It goes on after the repair, so that there is no death."""
    failed = {1: (sample.rows(1), ValueError), 2: (sample.rows(2), TimeoutError)}

    def run() -> TensorDictBase:
        with waiting(team, 2):
            with waiting(team, 1, "wait, raise"):
                call = team.group().submit("score", sample.batch, FACTOR, grace=0.2)
                until_answered(call, (0, 3))
            check_error(failure(call.result), failed)
            check_ran(team.ran([2]), sample.rows(0) + sample.rows(3))
            error = failure(call.result)  # it waits for no more than the grace again
            check_error(error, failed)
            result = error.call.retry().result()
            check_ran(team.ran([2]), sample.rows(1) + sample.rows(2))
        check_ran(ray.get(team.actors[2].ran.remote()), sample.rows(2))
        return result

    tally.attempt("hangs for ever, another failed", sample, run)


def _peer(team: Team, sample: Sample, tally: Tally) -> None:
    """Two ranks of two actors; one that does not collect raises."""
    half = len(sample.batch) // 2

    def run() -> TensorDictBase:
        group = WorkerGroup(team.actors[:RANKS], dp_ranks=[0, 0, 1, 1], pad_token_id=PAD)
        with waiting(team, 0):
            with waiting(team, 1, "wait, raise"):
                call = group.submit("score", sample.batch, FACTOR, grace=0.2)
                until_answered(call, (1,))
            error = failure(call.result)
            check_error(error, {0: (range(half), ValueError)})
            check_ran(team.ran([0]), sorted([*range(half, 2 * half)] * 2))
            result = error.call.retry().result()  # not by the rank that still waits
            check_ran(team.ran([0]), sorted([*range(half)] * 2))
        check_ran(ray.get(team.actors[0].ran.remote()), range(half))
        return result

    tally.attempt("exception on a peer, the other waits for it", sample, run)


def _lost_objects(team: Team, sample: Sample, tally: Tally) -> None:
    group, rank, keeper = team.group(), 1, RemoteKeeper.remote()

    def put_by_keeper(value: Any) -> ray.ObjectRef:
        return ray.get(keeper.put.remote(pickle.dumps(value)))[0]

    packed = group.pack(sample.batch)
    with mock.patch.object(ray, "put", put_by_keeper):
        placed = group.put(packed)
    kept = group.call("score", sample.batch, FACTOR, format="view")
    first, last = sample.rows(rank)[0], sample.rows(rank)[-1] + 1
    (source,) = kept[first:last].groups[0].parts
    rows_lost = BatchView.at(put_by_keeper(ray.get(source.held)), source.meta)
    kept = BatchView.cat([kept[:first], rows_lost, kept[last:]])
    ray.kill(keeper)
    lost = [group.parts[0].held for view in (placed, rows_lost) for group in view.groups]
    until(lambda: all(is_lost(reference) for reference in lost))
    team.ran()

    def put_again() -> TensorDictBase:
        everyone = {rank: (sample.rows(rank), ray.exceptions.ObjectLostError) for rank in range(RANKS)}
        return repaired(team, sample, lambda: group.call("score", packed, FACTOR), everyone)

    def kept_again() -> TensorDictBase:
        """Rows that nobody has any more stay missing; the caller puts others in their place."""
        one = {rank: (sample.rows(rank), ray.exceptions.ObjectLostError)}
        error = failure(lambda: group.call("score", kept, 1.0))
        check_error(error, one)
        failure(lambda: error.call.retry().result())
        try:
            kept.materialize(get=ray.get)
        except ray.exceptions.ObjectLostError:
            pass
        else:
            raise Wrong("lost rows were materialised")
        others = BatchView.cat([kept[:first], group.put(sample.expected[first:last]), kept[last:]])
        return group.call("score", others, 1.0)

    tally.attempt("put object lost", sample, put_again)
    tally.attempt("kept object lost", sample, kept_again)


def is_lost(reference: ray.ObjectRef) -> bool:
    try:
        ray.get(reference)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def repaired(
    team: Team,
    sample: Sample,
    call: Callable[[], object],
    failed: dict[int, tuple[Sequence[int], type[BaseException]]],
) -> TensorDictBase:
    """Fails, looks at the error and at what was run, and sends the missing rows again."""
    error = failure(call)
    check_error(error, failed)
    dead = [rank for rank, (_, kind) in failed.items() if kind is ray.exceptions.RayActorError]
    missing = sorted(row for rows, _ in failed.values() for row in rows)
    check_ran(team.ran(dead), [row for row in range(len(sample.batch)) if row not in missing])
    result = error.call.retry().result()
    check_ran(team.ran(dead), missing)
    return result


@contextmanager
def waiting(team: Team, rank: int, fault: str = "wait") -> Iterator[Path]:
    """The rank will wait in its next call, until the end; the folder is where it says that it began."""
    with tempfile.TemporaryDirectory() as name:
        ray.get(team.actors[rank].arm.remote(fault, name))
        yield Path(name)
        until((Path(name) / "began").exists)


def until_answered(call: Call, ranks: Sequence[int]) -> None:
    """Waits for some ranks of a call."""
    receipts = [receipt for part in call.parts if part.rank in ranks for receipt in part.replies]
    until(lambda: not ray.wait(receipts, num_returns=len(receipts), timeout=0)[1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise Wrong("waited in vain")
        time.sleep(0.005)


SCENES = (_exit_during, _lost_objects, _killed_during, _exception, _killed_before, _late, _hang, _peer)
"""Together they are a round: every kind once."""


def play(scene: Callable[[Team, Sample, Tally], None], team: Team, sample: Sample, tally: Tally) -> None:
    """Faults, and a normal call after them."""
    scene(team, sample, tally)
    sample.check(team.group().call("score", sample.batch, FACTOR))
    team.ran()


# -------------------------------------------------------------------- many rounds


def run(rounds: int) -> Tally:
    """Every kind of fault, `rounds` times. Ends at the first hang."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    tally, begun = Tally(), time.perf_counter()
    try:
        team, given = Team(MANY, spares=2), samples()
        for number in range(rounds):
            for scene in SCENES:
                play(scene, team, given[number % 2], tally)
            print(f"  round {number + 1} of {rounds}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    except Wrong:
        if not tally.hung:
            raise
    if not tally.hung:  # Ray would wait for what hangs
        ray.shutdown()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    tally = run(parser.parse_args().rounds)
    for kind in KINDS:
        counts = tally.tried.get(kind, 0), *tally.faults(kind)
        print("{}: {} rounds, {} hangs, {} wrong rows, {} other failures".format(kind, *counts))
        for error in tally.failed.get(kind, []):
            traceback.print_exception(error)
    return int(any(any(tally.faults(kind)) for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
