"""Stages, metrics and table of calls: exact numbers from a clock that the test turns; then a real group."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle
from samples import PAD, rollout
from tensordict import TensorDict

from maskpack.dispatch import WorkerGroup, endpoint, failures, placement, ranks
from maskpack.dispatch import call as calls
from maskpack.dispatch.messages import RankReply
from maskpack.dispatch.timeline import CallTimes, Span, Timeline, rank_spans
from maskpack.errors import WorkerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PAGE = (Path(__file__).parents[2] / "docs" / "dispatch.md").read_text()
DIED = ray.exceptions.RayActorError()


class Clock:
    """In the place of the module `time`: it stands still unless it is told. The time of day is `offset` later."""

    def __init__(self, now: float, offset: float = 1000.0) -> None:
        self.now, self.offset = now, offset

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def time(self) -> float:
        return self.now + self.offset


# -------------------------------------------------------------------- one rank


@pytest.mark.parametrize(
    ("begun", "waited", "settled", "expected"),
    [
        # called at 10 and answered at 20, of which 1 + 4 + 2 on the rank
        (1012.0, 10.0, 20.0, [2.0, 1.0, 4.0, 2.0, 1.0]),
        (1010.0, 10.0, 20.0, [0.0, 1.0, 4.0, 2.0, 3.0]),
        (999.0, 10.0, 20.0, [0.0, 1.0, 4.0, 2.0, 3.0]),  # a clock that is slow
        (2000.0, 10.0, 20.0, [3.0, 1.0, 4.0, 2.0, 0.0]),  # a clock that is fast
        (1012.0, 18.0, 20.0, [2.0, 1.0, 4.0, 2.0, 1.0]),
        (1012.0, 30.0, 31.0, [2.0, 1.0, 4.0, 2.0, 1.0]),  # the driver began to wait at 30
        (1012.0, 10.0, 12.0, [0.0, 1.0, 4.0, 2.0, 0.0]),  # clocks of two speeds: nothing is negative
    ],
)
def test_the_stages_of_a_rank(begun: float, waited: float, settled: float, expected: list[float]) -> None:
    seconds = {"decode": 1.0, "run": 4.0, "encode": 2.0}
    spans = rank_spans(3, 10.0, 1010.0, waited, settled, begun, seconds)
    assert [span.stage for span in spans] == ["fetch", "decode", "run", "encode", "return"]
    assert [span.seconds for span in spans] == expected
    assert {span.rank for span in spans} == {3}
    ends = [span.begin + span.seconds for span in spans]
    assert spans[0].begin == 10.0
    assert [span.begin for span in spans[1:4]] == ends[:3]
    assert spans[4].begin == max(ends[3], waited)


# -------------------------------------------------------------------- one call


class Ref:
    """A reference: when it is answered, and a value or an error."""

    def __init__(self, at: float, value: Any = None) -> None:
        self.at, self.value = at, value


class FakeRay:
    """In the place of Ray on the driver. Waiting turns the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.exceptions = clock, ray.exceptions

    def nodes(self) -> list[Any]:
        return [{"NodeID": "node", "Alive": True, "Resources": {}}]

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        first = min(references, key=lambda reference: reference.at)
        if options["timeout"] != 0:
            self.clock.now = max(self.clock.now, first.at)
            return [first], [reference for reference in references if reference is not first]
        ready = [reference for reference in references if reference.at <= self.clock.now]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, references: list[Any], **_: Any) -> list[Any]:
        values = [reference.value for reference in references]
        for value in values:
            if isinstance(value, Exception):
                raise value
        return values


class FakeActor:
    """It answers `update` at a given time. Calling it turns the clock."""

    def __init__(self, clock: Clock, at: float, value: Any) -> None:
        self.clock, self.update, self.reply = clock, self, Ref(at, value)

    def options(self, **_: Any) -> FakeActor:
        return self

    def remote(self, *_: Any) -> tuple[Ref, Ref]:
        self.clock.now += 0.25
        return self.reply, Ref(0.0)


def reply(begun: float, *seconds: float, rest: Any = None) -> RankReply:
    return RankReply(False, rest, None, 40, begun, dict(zip(("decode", "run", "encode"), seconds, strict=True)), "node")


class Driver:
    """A call of a row for each rank, which was prepared from 9 to 10; what is recorded of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(10.0)
        for module in (calls, ranks, failures, placement):
            monkeypatch.setattr(module, "_ray", FakeRay(self.clock))
        for module in (calls, ranks):
            monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(placement, "this_node", lambda: "node")

    def send(self, *answers: tuple[float, Any]) -> calls.Call:
        actors = [FakeActor(self.clock, *answer) for answer in answers]
        self.ranks = ranks.Ranks(actors, None, None, {})
        request = ranks.Request("update", (), {}, "padded", None, 60.0)
        parts, _, put = self.ranks.send(request, {rank: np.array([rank]) for rank in range(len(actors))})
        metrics = {"maskpack/dispatch/bytes_padded": 1000.0, "maskpack/dispatch/bytes_sent": 100.0}
        return calls.Call(self.ranks, request, parts, metrics, (Span(None, "prepare", 9.0, 1.0), put))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Driver:
    caplog.set_level(logging.INFO, logger="maskpack")
    return Driver(monkeypatch)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    seen = [(line.levelname, line.getMessage()) for line in caplog.records]
    caplog.clear()
    return seen


def test_stages_of_several_attempts_are_sums_in_every_metric(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 answers, also the retry; rank 1 answers, the slowest in one attempt; rank 2 dies."""
    call = driver.send(
        (16.0, reply(1011.0, 0.5, 2.0, 0.25)), (16.0, reply(1010.5, 0.125, 4.0, 0.5)), (16.0, DIED)
    )  # called at 10.25, 10.5, 10.75
    for _ in range(2):
        with pytest.raises(WorkerError):
            call.result()
    ((level, line),) = logged(caplog)
    assert level == "WARNING"
    assert line.startswith('"update" failed on rank 2 (row 2): ')
    driver.ranks.actors[0].reply = Ref(25.0, reply(1018.25, 0.25, 3.0, 0.125))  # called at 16.25
    again = call.retry()
    assert logged(caplog) == [("INFO", '"update": sends 1 rows again, to ranks [0]; lost: [2]')]
    again.result()
    stages = {
        "prepare_seconds": 1.0,
        "put_seconds": 0.75 + 0.25,
        "fetch_seconds": 0.75 + 2.0,
        "decode_seconds": 0.5 + 0.25,
        "run_seconds": 2.0 + 3.0,  # rank 0; rank 1 took 4.0
        "encode_seconds": 0.5,  # rank 1; rank 0 took 0.375
        "return_seconds": 2.25 + 3.375,  # rank 0
        "gather_seconds": 0.0,
    }
    others = {"bytes_padded": 1000.0, "bytes_sent": 100.0, "bytes_avoided": 900.0, "bytes_returned": 120.0}
    others |= {"retries": 1.0, "lost_ranks": 1.0, "wait_seconds": 25.0 - 16.25}
    assert again.metrics == {f"maskpack/dispatch/{name}": value for name, value in (stages | others).items()}
    assert driver.ranks.timeline.metrics() == {
        "maskpack/dispatch/update/calls": 1.0,
        "maskpack/dispatch/update/seconds": 16.0,  # from 9 to 25
        **{f"maskpack/dispatch/update/{name}": seconds for name, seconds in stages.items()},
    }
    assert "driver      1,000.0  1,000.0" in driver.ranks.timeline.report()


TIMEOUTS = (TimeoutError("a socket"), ray.exceptions.GetTimeoutError("an object"))


@pytest.mark.parametrize("raised", [ValueError("no"), *TIMEOUTS], ids=lambda error: type(error).__name__)
def test_an_error_of_the_method_is_information(
    driver: Driver, caplog: pytest.LogCaptureFixture, raised: Exception
) -> None:
    """Also a timeout, which is none of the driver."""
    error = ray.exceptions.RayTaskError("update", "traceback", raised).as_instanceof_cause()
    call = driver.send((12.0, reply(1010.25, 0.5, 1.0, 0.25)), (11.0, error))
    for _ in range(2):
        with pytest.raises(WorkerError) as failed:
            call.result()
    (failure,) = failed.value.failures
    assert failure.error is raised
    ((level, line),) = logged(caplog)
    assert level == "INFO"
    assert line.startswith(f'"update" failed on rank 1 (row 1): {type(raised).__name__}: ')


def test_a_timeout_of_the_driver_is_not_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """The rank may answer yet. `ray.get` raises its own timeout where a reply is there and its rows are not."""
    late = ray.exceptions.GetTimeoutError("not there yet")
    call = driver.send((12.0, reply(1010.25, 0.5, 1.0, 0.25)), (11.0, late))
    with pytest.raises(WorkerError) as failed:
        call.result()
    (failure,) = failed.value.failures
    assert type(failure.error) is TimeoutError
    assert logged(caplog) == []
    driver.ranks.actors[1].reply.value = reply(1011.25, 1.0, 1.5, 0.125)
    assert call.result() is None


# -------------------------------------------------------------------- several calls


def two_calls() -> Timeline:
    timeline = Timeline()
    for begin, run in ((100.0, 0.25), (200.0, 0.75)):
        spans = [Span(None, "prepare", begin, 0.125), Span(None, "put", begin + 0.125, 0.125)]
        spans += rank_spans(0, begin + 0.25, 0.0, 0.0, begin + 2.0, 0.125, {"decode": 0.125, "run": run, "encode": 0.0})
        spans += rank_spans(1, begin + 0.25, 0.0, 0.0, begin + 2.0, 0.0, {"decode": 0.125, "run": 1.5, "encode": 0.0})
        timeline.add(CallTimes("update", (*spans, Span(None, "gather", begin + 2.0, 0.5))))
    timeline.add(CallTimes("put", (Span(None, "prepare", 300.0, 0.5), Span(None, "put", 300.5, 0.25))))
    return timeline


def test_the_table() -> None:
    assert two_calls().report() == (
        "update: 2 calls, 2,500.0 ms each\n"
        "            prepare      put    fetch   decode      run   encode   return   gather     idle\n"
        "driver        125.0    125.0                                                 500.0  1,750.0\n"
        "rank 0                          125.0    125.0    500.0      0.0  1,000.0             750.0\n"
        "rank 1                            0.0    125.0  1,500.0      0.0    125.0             750.0\n"
        "\n"
        "put: 1 call, 750.0 ms each\n"
        "            prepare      put    fetch   decode      run   encode   return   gather     idle\n"
        "driver        500.0    250.0                                                            0.0"
    )
    assert Timeline().report() == ""


def test_the_last_calls_are_kept() -> None:
    timeline = Timeline()
    for number in range(200):
        timeline.add(CallTimes("update", (Span(None, "put", float(number), 1.0),)))
    assert [call.begin for call in timeline.calls] == list(map(float, range(72, 200)))
    timeline.clear()
    assert timeline.calls == ()


# -------------------------------------------------------------------- a real group


class Worker:
    @endpoint
    def double(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"old_log_probs": batch["old_log_probs"] * 2}, batch_size=batch.batch_size)


def test_the_page_names_every_metric(local_ray: Any) -> None:
    (table,) = re.findall(r"^\| `maskpack/dispatch/\.\.\.` .*?\n\n", PAGE, re.M | re.S)
    named = {f"maskpack/dispatch/{name}" for name in re.findall(r"`(\w+(?:/rank_0)?)`", table)}
    with WorkerGroup.launch(Worker, 1, actor_options={"num_cpus": 0}, pad_token_id=PAD) as own:
        batch = rollout(objects=False)
        packed = own.pack(batch)
        own.call("double", packed)
        assert set(own.metrics) == named
        padded = sum(field.nbytes for field in batch.values())
        seen = [own.metrics[f"maskpack/dispatch/{name}"] for name in ("rows", "bytes_padded", "bytes_sent", "ratio")]
        assert seen == [len(batch), padded, packed.nbytes, padded / packed.nbytes]
        own.put(rollout(objects=False))
        assert set(own.metrics) < named
        assert [call.method for call in own.timeline.calls] == ["double", "put"]
        assert pickle.loads(cloudpickle.dumps(own)).timeline.calls == ()
