"""Faults of ranks and objects: one error names the ranks and their rows, the others keep their results, a retry runs
the missing rows, once each, and gives the same bits, and a normal call works afterwards.

An object is lost as Ray loses one whose owner died: a process of its own puts it, and is killed. That process knows
nothing of maskpack (it starts in a second, a rank takes four), so it puts the pickle of what readers will unpickle.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fault_ranks
import numpy as np
import pytest
import ray
from fault_ranks import FACTOR, MANY, RANKS, RemoteDoomed, RemoteKeeper, Sample, Team, kill, until
from fuzz_log import forked
from samples import PAD, assert_same, freeze
from tensordict import TensorDictBase

import maskpack as mp
from maskpack.dispatch import Broadcast, WorkerGroup, placement
from maskpack.dispatch.call import Call
from maskpack.views.view import BatchView

B = 32
SOON = 1.0
"""Seconds in which a driver gets what ranks have answered."""


@pytest.fixture(scope="module")
def team(local_ray):
    return Team(RANKS, spares=1)


@pytest.fixture(scope="module")
def samples():
    return fault_ranks.samples()


@pytest.fixture
def sample(samples):
    """The smaller one; its batch is after every test what it was before."""
    before = freeze(samples[0].batch)
    yield samples[0]
    assert freeze(samples[0].batch) == before


@pytest.fixture(autouse=True)
def nothing_counted(request):
    if "team" in request.fixturenames:
        request.getfixturevalue("team").ran()


def arm(team, rank, fault):
    ray.get(team.actors[rank].arm.remote(fault))


# -------------------------------------------------------------------- every kind


def failure(run: Callable[[], object]) -> mp.errors.WorkerError:
    with pytest.raises(mp.errors.WorkerError) as caught:
        run()
    return caught.value


def check_error(error: mp.errors.WorkerError, failed: dict[int, tuple[Sequence[int], type[BaseException]]]) -> None:
    """That it names the method, and exactly these ranks, with their rows and their errors."""
    assert {one.rank: one.rows.tolist() for one in error.failures} == {
        rank: list(rows) for rank, (rows, _) in failed.items()
    }
    assert all(isinstance(one.error, failed[one.rank][1]) for one in error.failures), error
    assert all(f"rank {rank} (rows {rows[0]} to {rows[-1]})" in str(error) for rank, (rows, _) in failed.items())
    assert error.method == "score"
    assert '"score"' in str(error)


def _exit_during(team: Team, sample: Sample) -> None:
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

    sample.check(tried())
    sample.check(finished.result())
    sample.check(kept_rows())
    team.ran([victim])
    sample.check(tried())
    team.replace(victim)


def _killed_during(team: Team, sample: Sample) -> None:
    group, victim = team.group(), 2
    with waiting(team, victim) as folder:
        killer = threading.Thread(
            target=lambda: (until((folder / "began").exists), ray.kill(team.actors[victim])), daemon=True
        )
        killer.start()
        away = {victim: (sample.rows(victim), ray.exceptions.RayActorError)}
        sample.check(repaired(team, sample, lambda: group.call("score", sample.batch, FACTOR), away))
    team.replace(victim)


def _killed_before(team: Team, sample: Sample) -> None:
    """The driver does not know yet of the death."""
    doomed, place = RemoteDoomed.remote(), 3
    ray.get(doomed.up.remote())
    group = WorkerGroup([*team.actors[:place], doomed, *team.actors[place + 1 : RANKS]], pad_token_id=PAD)

    def call() -> Any:
        ray.kill(doomed)
        return group.call("score", sample.batch, FACTOR)

    away = {place: (sample.rows(place), ray.exceptions.RayActorError)}
    sample.check(repaired(team, sample, call, away))


def _exception(team: Team, sample: Sample) -> None:
    rank = 1
    ray.get(team.actors[rank].arm.remote("raise"))
    raised = {rank: (sample.rows(rank, MANY), ValueError)}
    sample.check(repaired(team, sample, lambda: team.group(MANY).call("score", sample.batch, FACTOR), raised))


def _late(team: Team, sample: Sample) -> None:
    with waiting(team, 0):
        call = team.group().submit("score", sample.batch, FACTOR)
        until_answered(call, (1, 2, 3))
        error = failure(lambda: call.result(SOON))
        check_error(error, {0: (sample.rows(0), TimeoutError)})
    result = error.call.result()
    assert team.ran() == list(range(len(sample.batch)))
    sample.check(result)


def _hang(team: Team, sample: Sample) -> None:
    """It goes on after the repair, so that there is no death."""
    failed = {1: (sample.rows(1), ValueError), 2: (sample.rows(2), TimeoutError)}
    with waiting(team, 2):
        with waiting(team, 1, "wait, raise"):
            call = team.group().submit("score", sample.batch, FACTOR, grace=0.2)
            until_answered(call, (0, 3))
        check_error(failure(call.result), failed)
        assert team.ran([2]) == sample.rows(0) + sample.rows(3)
        error = failure(call.result)  # it waits for no more than the grace again
        check_error(error, failed)
        result = error.call.retry().result()
        assert team.ran([2]) == sample.rows(1) + sample.rows(2)
    assert ray.get(team.actors[2].ran.remote()) == sample.rows(2)
    sample.check(result)


def _peer(team: Team, sample: Sample) -> None:
    """Two ranks of two actors; one that does not collect raises."""
    half = len(sample.batch) // 2
    group = WorkerGroup(team.actors[:RANKS], dp_ranks=[0, 0, 1, 1], pad_token_id=PAD)
    with waiting(team, 0):
        with waiting(team, 1, "wait, raise"):
            call = group.submit("score", sample.batch, FACTOR, grace=0.2)
            until_answered(call, (1,))
        error = failure(call.result)
        check_error(error, {0: (range(half), ValueError)})
        assert team.ran([0]) == sorted([*range(half, 2 * half)] * 2)
        result = error.call.retry().result()  # not by the rank that still waits
        assert team.ran([0]) == sorted([*range(half)] * 2)
    assert ray.get(team.actors[0].ran.remote()) == list(range(half))
    sample.check(result)


def _lost_objects(team: Team, sample: Sample) -> None:
    group, rank, keeper = team.group(), 1, RemoteKeeper.remote()

    def put_by_keeper(value: Any) -> ray.ObjectRef:
        return ray.get(keeper.put.remote(pickle.dumps(value)))[0]

    packed = group.pack(sample.batch)
    with mock.patch.object(ray, "put", put_by_keeper), mock.patch.object(placement, "INLINED", 0):
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
        with pytest.raises(ray.exceptions.ObjectLostError):
            kept.materialize(get=ray.get)
        others = BatchView.cat([kept[:first], group.put(sample.expected[first:last]), kept[last:]])
        return group.call("score", others, 1.0)

    sample.check(put_again())
    sample.check(kept_again())


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
    assert team.ran(dead) == [row for row in range(len(sample.batch)) if row not in missing]
    result = error.call.retry().result()
    assert team.ran(dead) == missing
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


SCENES = (_exit_during, _lost_objects, _killed_during, _exception, _killed_before, _late, _hang, _peer)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__.strip("_"))
@pytest.mark.parametrize("size", [0, 1], ids=["few rows", "many rows"])
def test_a_fault_costs_its_rows_and_a_retry(team, samples, scene, size):
    sample = samples[size]
    scene(team, sample)
    sample.check(team.group().call("score", sample.batch, FACTOR))
    assert_same(sample.batch, sample.before)


# -------------------------------------------------------------------- how the batch was given


def _permuted(batch):
    return np.random.default_rng(1).permutation(len(batch))


def _kept(team, batch):
    """The rows as the ranks returned them once, in another order."""
    return team.group().call("score", batch, 1.0, format="view").take(_permuted(batch))


@pytest.mark.parametrize(
    ("given", "options", "permuted"),
    [
        (lambda team, batch: batch, {}, False),
        (lambda team, batch: batch, {"balance": "tokens"}, False),
        (lambda team, batch: batch, {"balance": [range(rank, B, RANKS) for rank in range(RANKS)]}, False),
        (lambda team, batch: mp.nest_batch_by_mask(batch, pad_token_id=PAD), {}, False),
        (lambda team, batch: team.group().pack(batch), {}, False),
        (lambda team, batch: team.group().put(batch), {}, False),
        (_kept, {}, True),
        (_kept, {"balance": "tokens"}, True),
    ],
    ids=["padded", "tokens", "explicit", "nested", "packed", "put", "kept", "kept, tokens"],
)
@pytest.mark.parametrize("layout", ["padded", "nested", "view"])
def test_a_retry_of_every_form(team, sample, given, options, permuted, layout):
    batch = given(team, sample.batch)
    team.ran()
    arm(team, 1, "raise")
    error = failure(lambda: team.group().call("score", batch, FACTOR, format=layout, **options))
    (failed,) = error.failures
    assert failed.rank == 1
    assert team.ran() == sorted(set(range(B)) - set(_permuted(sample.batch)[failed.rows] if permuted else failed.rows))
    result = error.call.retry().result()
    if layout == "view":
        result = result.materialize(get=ray.get)
    result = mp.unnest_batch_by_mask(result) if layout == "nested" else result
    expected = sample.expected[_permuted(sample.batch)] if permuted else sample.expected
    assert freeze(result) == freeze(expected)


def test_a_retry_sends_all_arguments_again(team, sample):
    batch, table = sample.batch, np.arange(2**18, dtype=np.float32)
    other, whole = batch.select("advantages", "attention_mask", "prompts"), batch[:3]
    expected = fault_ranks.Worker().mix(batch, other, whole, table=table)
    arm(team, 2, "raise")
    error = failure(lambda: team.group().call("mix", batch, other, Broadcast(whole), table=table))
    assert (error.method, [one.rank for one in error.failures]) == ("mix", [2])
    assert freeze(error.call.retry().result()) == freeze(expected)


def test_other_results_come_in_the_order_of_the_rows(team, sample):
    arm(team, 0, "raise")
    error = failure(lambda: team.group().call("rows", sample.batch))
    results = error.call.retry().result()
    assert [row for rows in results for row in rows] == list(range(B))
    assert len(results) == 2 * RANKS - 1


# -------------------------------------------------------------------- who is left


def test_all_ranks_dead_and_new_ones(team, sample):
    doomed = [RemoteDoomed.remote() for _ in range(2)]
    for actor in doomed:
        kill(actor)
    error = failure(lambda: WorkerGroup(doomed, pad_token_id=PAD).call("score", sample.batch, FACTOR))
    half = B // 2
    died = ray.exceptions.RayActorError
    check_error(error, {0: (range(half), died), 1: (range(half, B), died)})
    with pytest.raises(mp.MaskpackError, match=r"every rank .* is lost or late.*call.retry\(group\)"):
        error.call.retry()
    sample.check(error.call.retry(team.group()).result())
    assert team.ran() == list(range(B))


def test_what_failed_once_is_left_out_of_every_retry_after_it(team, sample):
    """Three ranks of four do not answer, one call after the other."""
    with waiting(team, 0), waiting(team, 1), waiting(team, 2):
        call = team.group().submit("score", sample.batch[:3], FACTOR)
        until_answered(call, (3,))
        error = failure(lambda: call.result(SOON))
        assert [one.rank for one in error.failures] == [0, 1, 2]
        call = error.call.retry()
        assert freeze(call.result()) == freeze(sample.expected[:3])
    team.ran()
    with waiting(team, 0):
        call = team.group().submit("score", sample.batch, FACTOR)
        until_answered(call, (1, 2, 3))
        error = failure(lambda: call.result(SOON))
        assert [one.rank for one in error.failures] == [0]
        with waiting(team, 1):
            call = error.call.retry()
            until_answered(call, [part.rank for part in call.parts if part.rank not in (0, 1)])
            error = failure(lambda: call.result(SOON))
            assert [one.rank for one in error.failures] == [1]
            sample.check(error.call.retry().result())


def test_a_rank_whose_method_was_late_with_something_else_is_asked_again(team, sample):
    """An error of the method is none of the call, whatever its type."""
    alone = WorkerGroup(team.actors[:1], pad_token_id=PAD)
    arm(team, 0, "raise timeout")
    error = failure(lambda: alone.call("score", sample.batch, FACTOR))
    check_error(error, {0: (range(B), TimeoutError)})
    sample.check(error.call.retry().result())


def test_an_error_that_cannot_be_unpickled(team, sample):
    arm(team, 3, "raise oddly")
    error = failure(lambda: team.group().call("score", sample.batch, FACTOR))
    check_error(error, {3: (sample.rows(3), ray.exceptions.RayError)})
    assert "this rank failed" in str(error)
    sample.check(error.call.retry().result())


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_of_fewer_rows_than_ranks(team, sample, rows):
    for rank in range(RANKS):
        arm(team, rank, "raise")
    error = failure(lambda: team.group().call("score", sample.batch[:rows], FACTOR))
    assert [one.rows.tolist() for one in error.failures] == [[row] for row in range(rows)] + [[]] * (RANKS - rows)
    assert freeze(error.call.retry().result()) == freeze(sample.expected[:rows])


def test_rows_are_named_as_they_are(team, sample):
    balance = [[3, 9, 5], [1], [0, 2, 4], [row for row in range(6, B) if row != 9]]
    for rank, said in ((0, "3 rows from 3 to 9"), (1, "row 1"), (2, "3 rows from 0 to 4")):
        arm(team, rank, "raise")
        error = failure(lambda: team.group().call("score", sample.batch, FACTOR, balance=balance))
        assert f"failed on 1 of {RANKS} ranks: rank {rank} ({said}): ValueError" in str(error)
        sample.check(error.call.retry().result())


def test_the_grace_begins_with_the_failure(team, sample):
    """Ranks that answer within it are kept."""
    with waiting(team, 2) as folder:
        arm(team, 1, "raise")
        call = team.group().submit("score", sample.batch, FACTOR, grace=20.0)
        until((folder / "began").exists)
    check_error(failure(call.result), {1: (sample.rows(1), ValueError)})
    assert team.ran() == [row for row in range(B) if row not in sample.rows(1)]


# -------------------------------------------------------------------- cancelled, and interrupted


def test_what_is_cancelled_runs_and_its_result_is_dropped(team, sample):
    with waiting(team, 2) as folder:
        first = team.group().submit("score", sample.batch, FACTOR)
        until((folder / "began").exists)
        second = team.group().submit("score", sample.batch, FACTOR)
        third = team.group().submit("score", sample.batch, 2 * FACTOR)
        until(lambda: [part.rank for part in third.parts if part.unanswered()] == [2])
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(failure, second.result) for _ in range(2)]
            second.parts[2].outcome = ValueError()  # as if one of several actors had failed: the others are at work
            assert (second.cancel(), second.cancel()) == ([2], [])
            errors = [each.result() for each in waits]
        for error in errors:  # of all who wait
            assert [one.rank for one in error.failures] == [2]
            assert "rank 2 (rows 16 to 23): Cancelled: cancelled before it answered" in str(error)
        assert second.done()
        again = second.retry()  # waits behind what the rank has begun and what was cancelled
    sample.check(again.result())
    sample.check(first.result())
    sample.check(third.result().update({"old_log_probs": sample.expected["old_log_probs"]}))
    assert (first.cancel(), again.cancel()) == ([], [])
    assert team.ran() == sorted([*range(B), *range(B), *range(B), *sample.rows(2)])


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "queued"])
def test_the_objects_of_a_cancelled_call_are_freed(team, sample, begun):
    """Those that the rank would return at once, those that were sent when it has run. The next call gets its rows."""
    with waiting(team, 0) as folder:
        busy = None if begun else team.actors[0].score.remote(sample.batch[:1], FACTOR)
        until(lambda: begun or (folder / "began").exists())
        before = _known()
        call = team.group().submit("score", sample.batch, FACTOR, format="view")
        until(lambda call=call: [part.rank for part in call.parts if part.unanswered()] == [0])
        objects = _known() - before
        returned = {ref.hex() for ref in (*call.parts[0].replies, call.parts[0].packed)}
        assert returned < objects
        assert call.cancel() == [0]
        assert returned.isdisjoint(_known())
        del call
        after = team.group().submit("score", sample.batch, FACTOR)
    sample.check(after.result())
    until(lambda: objects.isdisjoint(_known()))
    ray.get(busy) if busy is not None else None
    team.ran()


def _known():
    """The ids of the objects that this process refers to."""
    gc.collect()
    known = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return {key if isinstance(key, str) else key.decode() for key in known}


def test_ctrl_c_ends_the_waiting(team, sample):
    """Also in a process that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with waiting(team, RANKS - 1) as folder:

            def interrupt() -> None:
                until((folder / "began").exists)  # everything is sent
                time.sleep(SOON)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt) as caught:
                team.group().call("score", sample.batch, FACTOR)
    finally:
        signal.signal(signal.SIGINT, before)
    sample.check(caught.value.call.result())
    assert team.ran() == list(range(B))


def test_awaits_that_were_cancelled_leave_no_thread(team, sample):
    """However long the rank hangs; whoever awaits later gets the result."""

    async def give_up(calls):
        for call in calls:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.01)

    alone = WorkerGroup(team.actors[1:2], pad_token_id=PAD)
    with waiting(team, 1):
        threads = threading.active_count()
        calls = [alone.submit("score", sample.batch, FACTOR) for _ in range(30)]
        asyncio.run(give_up(calls))
        until(lambda: threading.active_count() <= threads)
    for call in calls:
        sample.check(asyncio.run(_awaited(call)))
    assert team.ran() == sorted(30 * list(range(B)))


async def _awaited(call):
    return await call


# -------------------------------------------------------------------- forks


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_is_told_so_and_breaks_nothing(team, sample):
    """A call of a fork would wait for ever, and so would the next one of its parent."""
    with WorkerGroup.launch(fault_ranks.Worker, 1, pad_token_id=PAD) as group:
        sent = group.submit("score", sample.batch, FACTOR)
        view = group.put(sample.batch)
        forbidden = [
            lambda: group.call("score", sample.batch, FACTOR),
            lambda: group.call("score", view, FACTOR),
            lambda: group.put(sample.batch),
            lambda: group.plan(sample.batch, 100),
            lambda: group.run("arm", "exit"),
            lambda: group.ready(1),
            sent.result,
            sent.done,
            sent.cancel,
            sent.retry,
        ]

        def use() -> None:
            signal.alarm(60)  # ends a call that waits
            for work in forbidden:
                with pytest.raises(mp.MaskpackError, match=f"fork of process {os.getppid()}, which has the group"):
                    work()
            assert "1 ranks" in repr(group)
            group.close()

        assert os.waitpid(forked(use), 0)[1] == 0
        sample.check(sent.result())
        sample.check(group.call("score", view, FACTOR))


# -------------------------------------------------------------------- actors that Ray starts again


def test_actors_that_start_again_come_back(team, sample):
    again = fault_ranks.RemoteWorker.options(max_restarts=-1).remote()
    group = WorkerGroup([again, team.actors[1]], pad_token_id=PAD)
    sample.check(group.call("score", sample.batch, FACTOR))
    ray.get(again.arm.remote("exit"))
    error = failure(lambda: group.call("score", sample.batch, FACTOR))
    assert [one.rank for one in error.failures] == [0]
    sample.check(group.call("score", sample.batch, FACTOR))
    retried = error.call.retry()
    assert retried.lost == frozenset()
    sample.check(retried.result())
    pid = group.run("process", rank=0)
    ray.kill(again, no_restart=False)
    until(lambda: again._get_local_state() == 3)
    sample.check(group.call("score", sample.batch, FACTOR))  # waits for it
    assert group.run("process", rank=0) != pid


def test_a_timeout_bounds_the_wait_for_a_restart(team, sample, tmp_path):
    class Slow(fault_ranks.Worker):
        def __init__(self):
            super().__init__()
            while (tmp_path / "held").exists():
                time.sleep(0.01)

    slow = ray.remote(num_cpus=0, max_restarts=-1)(Slow).remote()
    group = WorkerGroup([team.actors[0], slow], pad_token_id=PAD)
    sample.check(group.call("score", sample.batch, FACTOR))
    (tmp_path / "held").touch()
    ray.kill(slow, no_restart=False)
    until(lambda: slow._get_local_state() == 3)
    for late in (
        lambda: group.call("score", sample.batch, FACTOR, timeout=0.3),
        lambda: group.run("process", timeout=0.3),
        lambda: group.submit("score", sample.batch, FACTOR, timeout=0.3).result(0.3),
    ):
        begun = time.monotonic()
        failure(late)
        assert time.monotonic() - begun < 30  # of 60, after which it gives up by itself
    (tmp_path / "held").unlink()
    sample.check(group.call("score", sample.batch, FACTOR))
    team.ran()
