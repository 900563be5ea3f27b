"""Stages, metrics and table of calls: exact numbers from a clock that the test turns; then a real group."""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from ray.util import metrics as metrics_of_ray
from tensordict import TensorDict
from test_docs import DOCS

import maskpack as mp
from maskpack.dispatch import WorkerGroup, endpoint, endpoints, ray_metrics
from maskpack.dispatch import call as calls
from maskpack.dispatch.messages import RankReply
from maskpack.dispatch.timeline import STAGES, CallTimes, Span, Timeline, rank_spans
from maskpack.errors import WorkerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TESTS = Path(__file__).parents[1]


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


def test_the_timer_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(5.0)
    monkeypatch.setattr(endpoints, "time", clock)
    timer = endpoints._Timer()
    for stage, seconds in (("decode", 1.0), ("run", 4.0), ("encode", 0.5), ("decode", 2.0), ("run", 8.0)):
        clock.now += seconds
        timer.lap(stage)
    assert timer.begun == 1005.0
    assert timer.seconds == {"decode": 3.0, "run": 12.0, "encode": 0.5}


# -------------------------------------------------------------------- one call


class Ref:
    """A reference: when it is answered, and a value or an error."""

    def __init__(self, at: float, value: Any) -> None:
        self.at, self.value = at, value


class FakeRay:
    """In the place of Ray on the driver. Waiting turns the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.exceptions = clock, ray.exceptions

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        first = min(references, key=lambda reference: reference.at)
        if options["timeout"] != 0:
            self.clock.now = max(self.clock.now, first.at)
            return [first], [reference for reference in references if reference is not first]
        ready = [reference for reference in references if reference.at <= self.clock.now]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, references: list[Any], **_: Any) -> list[Any]:
        values = [None if reference is None else reference.value for reference in references]
        for value in values:
            if isinstance(value, Exception):
                raise value
        return values


class FakeGroup:
    """A Sender whose ranks answer at given times."""

    def __init__(self, clock: Clock, answers: dict[int, tuple[float, Any]]) -> None:
        self.clock, self.answers, self.num_ranks = clock, answers, len(answers)
        self.recorded: list[Any] = []

    def send(self, request: Any, rows: Any, *, again: bool) -> Any:
        begun = self.clock.now
        self.clock.now += 0.25
        parts = [calls.Part(rank, own, [Ref(*self.answers[rank])], 0, None) for rank, own in rows.items()]
        self.clock.now += 0.25
        return parts, 100, Span(None, "put", begun, 0.5)

    def returned(self, call: CallTimes, metrics: Any) -> None:
        self.recorded.append((call, dict(metrics)))

    def failed(self, method: str, failure: Any, lost: bool) -> None:
        self.recorded.append((method, failure.rank, lost))

    def ran_on(self, rank: int, nodes: Any) -> None: ...

    def nodes_alive(self, died: Any) -> set[str]:
        return {"node"}

    def ranks_off(self, nodes: Any) -> set[int]:
        return set()


def reply(begun: float, *seconds: float) -> RankReply:
    return RankReply(False, None, None, 40, begun, dict(zip(("decode", "run", "encode"), seconds, strict=True)), "node")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(10.0)
    monkeypatch.setattr(calls, "time", clock)
    monkeypatch.setattr(calls, "_ray", FakeRay(clock))
    return clock


def sent(clock: Clock, sender: FakeGroup) -> calls.Call:
    """A call of three rows to two ranks that was prepared from 9 to 10."""
    request = calls.Request("update", (), {}, "padded", None, 60.0)
    parts, nbytes, put = sender.send(request, {0: np.array([0, 1]), 1: np.array([2])}, again=False)
    metrics = {"maskpack/dispatch/bytes_padded": 1000.0, "maskpack/dispatch/bytes_sent": float(nbytes)}
    return calls.Call(sender, request, parts, metrics, (Span(None, "prepare", 9.0, 1.0), put))


def test_the_metrics_of_a_call(clock: Clock) -> None:
    sender = FakeGroup(clock, {0: (15.0, reply(1010.5, 0.5, 2.0, 0.25)), 1: (14.0, reply(1011.25, 1.0, 1.5, 0.125))})
    call = sent(clock, sender)
    assert call.result() is None
    assert call.metrics == {
        "maskpack/dispatch/bytes_padded": 1000.0,
        "maskpack/dispatch/bytes_sent": 100.0,
        "maskpack/dispatch/bytes_returned": 80.0,
        "maskpack/dispatch/bytes_avoided": 900.0,
        "maskpack/dispatch/retries": 0.0,
        "maskpack/dispatch/lost_ranks": 0.0,
        "maskpack/dispatch/wait_seconds": 4.5,
        "maskpack/dispatch/prepare_seconds": 1.0,
        "maskpack/dispatch/put_seconds": 0.5,
        "maskpack/dispatch/fetch_seconds": 1.0,  # rank 1: called at 10.25, began at 11.25
        "maskpack/dispatch/decode_seconds": 1.0,
        "maskpack/dispatch/run_seconds": 2.0,
        "maskpack/dispatch/encode_seconds": 0.25,
        "maskpack/dispatch/return_seconds": 1.75,  # rank 0: from 13.25 to 15
        "maskpack/dispatch/gather_seconds": 0.0,
    }
    ((times, metrics),) = sender.recorded
    assert metrics == call.metrics
    assert (times.method, times.begin, times.end) == ("update", 9.0, 15.0)
    assert Span(0, "run", 11.0, 2.0) in times.spans
    assert Span(1, "return", 13.875, 0.125) in times.spans


def test_a_lost_rank_is_logged_once_counted_and_in_the_metrics_of_the_retry(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    died = ray.exceptions.RayActorError()
    sender = FakeGroup(clock, {0: (12.0, reply(1010.25, 0.5, 1.0, 0.25)), 1: (11.0, died)})
    call = sent(clock, sender)
    with caplog.at_level(logging.INFO, logger="maskpack"):
        for _ in range(2):
            with pytest.raises(WorkerError):
                call.result()
    (line,) = caplog.records
    assert (line.levelname, line.name) == ("WARNING", "maskpack.dispatch.call")
    assert line.getMessage().startswith('"update" failed on rank 1 (row 2): ')
    assert sender.recorded == [("update", 1, True)]
    caplog.clear()
    sender.answers[0] = (20.0, reply(1012.75, 0.25, 0.5, 0.0))
    with caplog.at_level(logging.INFO, logger="maskpack"):
        again = call.retry()
    assert [line.getMessage() for line in caplog.records] == ['"update": sends 1 rows again, to ranks [0]; lost: [1]']
    again.result()
    wanted = {"retries": 1.0, "lost_ranks": 1.0, "bytes_sent": 200.0, "bytes_avoided": 800.0, "put_seconds": 1.0}
    assert {name: again.metrics[f"maskpack/dispatch/{name}"] for name in wanted} == wanted
    (times, _) = sender.recorded[-1]
    assert times.begin == 9.0
    assert [span.seconds for span in times.spans if span.stage == "run"] == [1.0, 0.5]


def test_stages_of_several_attempts_are_sums_in_every_metric(clock: Clock) -> None:
    """Rank 0 answers, also the retry; rank 1 answers, the slowest in one attempt; rank 2 dies."""
    answers = {
        0: (16.0, reply(1011.0, 0.5, 2.0, 0.25)),
        1: (16.0, reply(1010.5, 0.125, 4.0, 0.5)),
        2: (16.0, ray.exceptions.RayActorError()),
    }
    sender = FakeGroup(clock, answers)
    request = calls.Request("update", (), {}, "padded", None, 60.0)
    parts, nbytes, put = sender.send(request, {rank: np.array([rank]) for rank in range(3)}, again=False)
    metrics = {f"maskpack/dispatch/{name}": float(nbytes) for name in ("bytes_padded", "bytes_sent")}
    call = calls.Call(sender, request, parts, metrics, (Span(None, "prepare", 9.0, 1.0), put))
    with pytest.raises(WorkerError):
        call.result()
    sender.answers[0] = (25.0, reply(1018.25, 0.25, 3.0, 0.125))  # called at 16.25
    again = call.retry()
    again.result()
    stages = {
        "prepare_seconds": 1.0,
        "put_seconds": 0.5 + 0.5,
        "fetch_seconds": 0.75 + 2.0,  # rank 0, called at 10.25
        "decode_seconds": 0.5 + 0.25,
        "run_seconds": 2.0 + 3.0,  # rank 0; rank 1 took 4.0
        "encode_seconds": 0.5,  # rank 1; rank 0 took 0.375
        "return_seconds": 2.25 + 3.375,  # rank 0; rank 1 took 0.875
        "gather_seconds": 0.0,
    }
    assert {name: again.metrics[f"maskpack/dispatch/{name}"] for name in stages} == stages
    timeline = Timeline()
    timeline.add(sender.recorded[-1][0])
    assert timeline.metrics() == {
        "maskpack/dispatch/update/calls": 1.0,
        "maskpack/dispatch/update/seconds": 16.0,  # from 9 to 25
        **{f"maskpack/dispatch/update/{name}": seconds for name, seconds in stages.items()},
    }
    assert "driver      1,000.0  1,000.0" in timeline.report()


def test_an_error_of_the_method_is_information(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    sender = FakeGroup(clock, {0: (12.0, reply(1010.25, 0.5, 1.0, 0.25)), 1: (11.0, ray.exceptions.RayError("no"))})
    call = sent(clock, sender)
    with caplog.at_level(logging.INFO, logger="maskpack"), pytest.raises(WorkerError):
        call.result()
    assert [line.levelname for line in caplog.records] == ["INFO"]
    assert sender.recorded == [("update", 1, False)]


@pytest.mark.parametrize("raised", [TimeoutError("a socket"), ray.exceptions.GetTimeoutError("an object")])
def test_a_timeout_of_the_method_is_an_error_of_the_method(
    clock: Clock, caplog: pytest.LogCaptureFixture, raised: Exception
) -> None:
    error = ray.exceptions.RayTaskError("update", "traceback", raised).as_instanceof_cause()
    sender = FakeGroup(clock, {0: (12.0, reply(1010.25, 0.5, 1.0, 0.25)), 1: (11.0, error)})
    call = sent(clock, sender)
    with caplog.at_level(logging.INFO, logger="maskpack"):
        for _ in range(2):
            with pytest.raises(WorkerError) as failed:
                call.result()
    (failure,) = failed.value.failures
    assert failure.error is raised
    assert not call.parts[1].late
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert line.getMessage().startswith(f'"update" failed on rank 1 (row 2): {type(raised).__name__}: ')
    assert sender.recorded == [("update", 1, False)]


def test_a_timeout_of_the_driver_is_not_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The rank may answer yet. `ray.get` raises its own timeout where a reply is there and its rows are not."""
    late = ray.exceptions.GetTimeoutError("not there yet")
    sender = FakeGroup(clock, {0: (12.0, reply(1010.25, 0.5, 1.0, 0.25)), 1: (11.0, late)})
    call = sent(clock, sender)
    with caplog.at_level(logging.INFO, logger="maskpack"), pytest.raises(WorkerError) as failed:
        call.result()
    (failure,) = failed.value.failures
    assert type(failure.error) is TimeoutError
    assert str(failure.error) == "not there yet"
    assert call.parts[1].late
    assert caplog.records == []
    assert sender.recorded == []
    call.parts[1].replies[0].value = reply(1011.25, 1.0, 1.5, 0.125)
    assert call.result() is None
    assert [times.method for times, _ in sender.recorded] == ["update"]


def test_a_metric_that_raises_leaves_the_result(clock: Clock) -> None:
    class Failing(FakeGroup):
        def returned(self, call: CallTimes, metrics: Any) -> None:
            raise OSError("no metrics")

    answers = {rank: (11.0, replace(reply(1010.25, 0.5, 1.0, 0.25), rest=rank)) for rank in (0, 1)}
    call = sent(clock, Failing(clock, answers))
    with pytest.raises(OSError, match="no metrics"):
        call.result()
    assert call.result() == [0, 1]
    assert call.parts == []


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


def test_sums_for_a_logger() -> None:
    assert two_calls().metrics() == {
        "maskpack/dispatch/update/calls": 2.0,
        "maskpack/dispatch/update/seconds": 5.0,
        "maskpack/dispatch/update/prepare_seconds": 0.25,
        "maskpack/dispatch/update/put_seconds": 0.25,
        "maskpack/dispatch/update/fetch_seconds": 0.25,
        "maskpack/dispatch/update/decode_seconds": 0.25,
        "maskpack/dispatch/update/run_seconds": 3.0,
        "maskpack/dispatch/update/encode_seconds": 0.0,
        "maskpack/dispatch/update/return_seconds": 2.0,
        "maskpack/dispatch/update/gather_seconds": 1.0,
        "maskpack/dispatch/put/calls": 1.0,
        "maskpack/dispatch/put/seconds": 0.75,
        "maskpack/dispatch/put/prepare_seconds": 0.5,
        "maskpack/dispatch/put/put_seconds": 0.25,
    }


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

    @endpoint
    def fail(self, batch: TensorDict) -> None:
        raise ValueError("no")

    @endpoint
    def die(self, batch: TensorDict) -> None:
        ray.actor.exit_actor()


def rows() -> TensorDict:
    mask = torch.arange(512) < torch.tensor([[3], [400], [0], [200]])
    fields = {"response_mask": mask.long(), "responses": torch.where(mask, 5, 0), "old_log_probs": mask * 0.5}
    return TensorDict(fields, batch_size=[4])


class Recorded:
    """What reaches a metric of Ray, which still records it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points: dict[tuple[str, ...], list[float]] = {}
        record = metrics_of_ray.Metric._record

        def recorded(metric: Any, value: float, tags: Any = None) -> None:
            self.points.setdefault((metric.info["name"], *tags.values()), []).append(value)
            record(metric, value, tags)

        monkeypatch.setattr(metrics_of_ray.Metric, "_record", recorded)


def test_a_group_counts_in_the_metrics_of_ray(local_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    with WorkerGroup.launch(Worker, 2, actor_options={"num_cpus": 0}, pad_token_id=0, ray_metrics=True) as own:
        result = own.call("double", rows())
        assert torch.equal(result["old_log_probs"], rows()["old_log_probs"] * 2)
        metrics = own.metrics
        with pytest.raises(WorkerError):
            own.call("fail", rows())
        with pytest.raises(WorkerError):
            own.call("die", rows()[:1], balance=[[0], []], grace=20)
    points = recorded.points
    assert points["maskpack_dispatch_calls", "double"] == [1.0]
    for name in ("rows", "bytes_padded", "bytes_sent", "bytes_returned"):
        assert points[f"maskpack_dispatch_{name}", "double"] == [metrics[f"maskpack/dispatch/{name}"]]
    assert metrics["maskpack/dispatch/rows"] == 4
    assert metrics["maskpack/dispatch/bytes_padded"] == 4 * 512 * 20
    packed = mp.compress(rows(), pad_token_id=0).nbytes
    assert metrics["maskpack/dispatch/ratio"] == 4 * 512 * 20 / packed
    assert metrics["maskpack/dispatch/bytes_sent"] == packed
    assert metrics["maskpack/dispatch/bytes_avoided"] == 4 * 512 * 20 - packed
    for stage in STAGES:
        seconds = points["maskpack_dispatch_stage_seconds", "double", stage]
        assert len(seconds) == (1 if stage in ("prepare", "put", "gather") else 2)
        assert max(seconds) == metrics[f"maskpack/dispatch/{stage}_seconds"]
    assert points["maskpack_dispatch_errors", "fail"] == [1.0, 1.0]
    assert sum(points["maskpack_dispatch_lost_ranks", "die"]) >= 1
    assert ("maskpack_dispatch_retries", "double") not in points  # Ray takes no zeros
    assert ("maskpack_dispatch_calls", "fail") not in points


def test_the_page_names_every_metric(local_ray: Any) -> None:
    (table,) = re.findall(r"^\| `maskpack/dispatch/\.\.\.` .*?\n\n", (DOCS / "operations.md").read_text(), re.M | re.S)
    named = {f"maskpack/dispatch/{name}" for name in re.findall(r"`(\w+(?:/rank_0)?)`", table)}
    with WorkerGroup.launch(Worker, 1, actor_options={"num_cpus": 0}, pad_token_id=0) as own:
        own.call("double", rows())
        assert set(own.metrics) == named
        own.put(rows())
        assert set(own.metrics) < named
        assert [call.method for call in own.timeline.calls] == ["double", "put"]
        assert pickle.loads(cloudpickle.dumps(own)).timeline.calls == ()


def test_counters_of_the_page_are_those_that_are_there() -> None:
    page = (DOCS / "operations.md").read_text()
    (line,) = re.findall(r"The counters (.*?) have the tag", page, re.S)
    assert {name.removeprefix("maskpack_dispatch") for name in re.findall(r"`(\w+)`", line)} == {
        f"_{name}" for name in ray_metrics.COUNTERS
    }


def test_nothing_fails_where_ray_does_not_run() -> None:
    code = (
        "from maskpack.dispatch.ray_metrics import publish\n"
        "from maskpack.dispatch.timeline import CallTimes, Span\n"
        "publish(CallTimes('update', (Span(None, 'put', 0.0, 1.0),)), {'maskpack/dispatch/rows': 4.0})\n"
        "print('published')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "published\n"


SCRAPED = """
import sys, time, urllib.request
import ray
from test_timeline import Worker, rows
from maskpack.dispatch import WorkerGroup

port = int(sys.argv[1])
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
         _metrics_export_port=port)
group = WorkerGroup.launch(Worker, 2, actor_options={"num_cpus": 0}, pad_token_id=0, ray_metrics=True)
group.call("double", rows())
address = f"http://{ray.util.get_node_ip_address()}:{port}/metrics"
for _ in range(60):
    time.sleep(1)
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    if "ray_maskpack_dispatch_stage_seconds_count" in text:
        break
print(text)
"""


def test_prometheus_reads_them(tmp_path: Path) -> None:
    for package in ("prometheus_client", "opencensus", "aiohttp"):  # of ray[default]
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "scraped.py").write_text(SCRAPED)
    path = os.pathsep.join(
        [*map(str, (Path(__file__).parent, TESTS, TESTS / "docs")), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "scraped.py"), str(port)],
        env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if 'method="double"' in line]
    found = {name: float(value) for name, value in (re.match(r"(\w+)\{.*\} (.*)", line).groups() for line in lines)}
    assert found["ray_maskpack_dispatch_calls_total"] == 1
    assert found["ray_maskpack_dispatch_rows_total"] == 4
    assert found["ray_maskpack_dispatch_bytes_padded_total"] == 4 * 512 * 20
    stages = {re.search(r'stage="(\w+)"', line)[1] for line in lines if "stage_seconds_count" in line}  # type: ignore[index]
    assert stages == set(STAGES)
