"""Faults of ranks and objects: one error that tells what is missing, nothing hangs, and a retry gives the same bits.

The scenes are those of `python -m tests.faults`; MASKPACK_FAULT_ROUNDS says how often each is played (default 2).
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fault_ranks
import faults
import numpy as np
import pytest
import ray
from fault_ranks import FACTOR, RANKS, RemoteDoomed, Sample, Team
from faults import SCENES, Tally, Wrong, check_error, failure, play, waiting
from samples import PAD, freeze

import maskpack as mp
from maskpack.dispatch import Broadcast, WorkerGroup

ROUNDS = int(os.environ.get("MASKPACK_FAULT_ROUNDS", "2"))
B = 32

pytestmark = pytest.mark.timeout(240)


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


# -------------------------------------------------------------------- every kind, some rounds


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__.strip("_"))
def test_a_fault_costs_its_rows_and_a_retry(team, samples, scene):
    tally = Tally(limit=30)
    for number in range(ROUNDS):
        play(scene, team, samples[number % 2], tally)
    assert set(tally.tried.values()) == {ROUNDS}
    assert not tally.hung
    assert not tally.failed
    assert set(tally.wrong.values()) == {0}


# -------------------------------------------------------------------- the checks can fail


def test_the_tally_counts_hangs_wrong_rows_and_failures():
    sample, tally, forever = Sample.of(8, 4, 12), Tally(limit=0.05), threading.Event()
    with pytest.raises(Wrong, match="no end after"):
        tally.attempt("a", sample, forever.wait)
    forever.set()
    tally.limit = 30
    spoiled = sample.expected.clone()
    spoiled["old_log_probs"][3, 2] += 1
    spoiled["row"][5] = 0
    for kind, seen in (("b", spoiled), ("b", sample.expected.clone()), ("c", sample.expected[:4])):
        tally.attempt(kind, sample, lambda seen=seen: seen)
    tally.attempt("d", sample, lambda: 1 / 0)
    assert [tally.faults(kind) for kind in "abcd"] == [(1, 0, 0), (0, 2, 0), (0, 8, 0), (0, 0, 1)]
    with pytest.raises(Wrong, match="batch of the driver"):
        tally.attempt("e", sample, lambda: sample.expected.set("old_log_probs", sample.batch["old_log_probs"].zero_()))


def test_no_error_and_another_error_than_expected_are_found(team, sample):
    with pytest.raises(Wrong, match="no WorkerError"):
        failure(lambda: None)
    arm(team, 1, "raise")
    error = failure(lambda: team.group().call("score", sample.batch, FACTOR))
    rows = sample.rows(1)
    check_error(error, {1: (rows, ValueError)})
    for other in ({1: (rows, TypeError)}, {0: (rows, ValueError)}, {1: (rows[1:], ValueError)}):
        with pytest.raises(Wrong, match="expected failures"):
            check_error(error, other)


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
        ray.kill(actor)
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
        error = failure(lambda: team.group().call("score", sample.batch[:3], FACTOR, timeout=0.5))
        assert [one.rank for one in error.failures] == [0, 1, 2]
        call = error.call.retry()
        assert freeze(call.result(10)) == freeze(sample.expected[:3])
    team.ran()
    with waiting(team, 0):
        error = failure(lambda: team.group().call("score", sample.batch, FACTOR, timeout=0.5))
        assert [one.rank for one in error.failures] == [0]
        with waiting(team, 1):
            error = failure(lambda: error.call.retry().result(0.5))
            assert [one.rank for one in error.failures] == [1]
            sample.check(error.call.retry().result(10))


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
        faults.until((folder / "began").exists)
    check_error(failure(call.result), {1: (sample.rows(1), ValueError)})
    assert team.ran() == [row for row in range(B) if row not in sample.rows(1)]


# -------------------------------------------------------------------- cancelled, and interrupted


def test_what_is_cancelled_runs_and_its_result_is_dropped(team, sample):
    with waiting(team, 2) as folder:
        first = team.group().submit("score", sample.batch, FACTOR)
        faults.until((folder / "began").exists)
        second = team.group().submit("score", sample.batch, FACTOR)
        third = team.group().submit("score", sample.batch, 2 * FACTOR)
        faults.until(lambda: [part.rank for part in third.parts if part.unanswered()] == [2])
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(failure, second.result) for _ in range(2)]
            second.parts[2].outcome = ValueError()  # as if one of several actors had failed: the others are at work
            assert (second.cancel(), second.cancel()) == ([2], [])
            errors = [each.result(10) for each in waits]
        for error in errors:  # of all who wait
            assert [one.rank for one in error.failures] == [2]
            assert "rank 2 (rows 16 to 23): Cancelled: cancelled before it answered" in str(error)
        assert second.done()
        again = second.retry()  # waits behind what the rank has begun and what was cancelled
    sample.check(again.result(20))
    sample.check(first.result(20))
    sample.check(third.result(20).update({"old_log_probs": sample.expected["old_log_probs"]}))
    assert (first.cancel(), again.cancel()) == ([], [])
    assert team.ran() == sorted([*range(B), *range(B), *range(B), *sample.rows(2)])


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "queued"])
def test_the_objects_of_a_cancelled_call_are_freed(team, sample, begun):
    """Those that the rank would return at once, those that were sent when it has run. The next call gets its rows."""
    with waiting(team, 0) as folder:
        busy = None if begun else team.actors[0].score.remote(sample.batch[:1], FACTOR)
        faults.until(lambda: begun or (folder / "began").exists())
        before = _known()
        call = team.group().submit("score", sample.batch, FACTOR, format="view")
        faults.until(lambda call=call: [part.rank for part in call.parts if part.unanswered()] == [0])
        objects = _known() - before
        returned = {ref.hex() for ref in (*call.parts[0].replies, call.parts[0].packed)}
        assert returned < objects
        assert call.cancel() == [0]
        assert returned.isdisjoint(_known())
        del call
        after = team.group().submit("score", sample.batch, FACTOR)
    sample.check(after.result(20))
    faults.until(lambda: objects.isdisjoint(_known()))
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
        with waiting(team, 1):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt) as caught:
                team.group().call("score", sample.batch, FACTOR)
    finally:
        signal.signal(signal.SIGINT, before)
    sample.check(caught.value.call.result(20))
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
        faults.until(lambda: threading.active_count() <= threads)
    for call in calls:
        sample.check(asyncio.run(_awaited(call)))
    assert team.ran() == sorted(30 * list(range(B)))


async def _awaited(call):
    return await call


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
    faults.until(lambda: again._get_local_state() == 3)
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
    faults.until(lambda: slow._get_local_state() == 3)
    for late in (
        lambda: group.call("score", sample.batch, FACTOR, timeout=0.3),
        lambda: group.run("process", timeout=0.3),
        lambda: group.submit("score", sample.batch, FACTOR, timeout=0.3).result(0.3),
    ):
        begun = time.monotonic()
        failure(late)
        assert time.monotonic() - begun < 5
    (tmp_path / "held").unlink()
    sample.check(group.call("score", sample.batch, FACTOR))
    team.ran()
