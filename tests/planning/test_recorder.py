"""LoopRecorder on the host, with a clock that counts its own readings."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from typing import Any

import pytest

from maskpack.errors import PlanError
from maskpack.planning import LoopRecorder, plan_micro_batches, recorder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading n is at 1 + 2 + ... + n seconds, so that no two spans take as long."""
    readings = itertools.accumulate(itertools.count(1))
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: float(next(readings)))


def loop(times: LoopRecorder, counts: list[int]) -> None:
    for count in counts:
        with times.update():
            for _ in range(count):
                with times.micro_batch():
                    with times.phase("forward"):
                        pass
                    with times.phase("backward"):
                        pass
            with times.phase("optimizer"):
                pass


def at(reading: int) -> float:
    return reading * (reading + 1) / 2


def test_times_of_two_updates(clock: None) -> None:
    """Readings: update 1, micro-batch 2, forward 3 4, backward 5 6, micro-batch 7, ..., 14 optimizer 15, update 16."""
    times = LoopRecorder()
    loop(times, [2, 1])
    found = times.metrics()

    def ms(begin: int, end: int) -> float:
        return 1e3 * (at(end) - at(begin))

    assert found == pytest.approx(
        {
            "time/update_0_ms": ms(1, 16),
            "time/update_0/forward_ms": ms(3, 4) + ms(9, 10),
            "time/update_0/backward_ms": ms(5, 6) + ms(11, 12),
            "time/update_0/optimizer_ms": ms(14, 15),
            "time/micro_batch_0_ms": ms(2, 7),
            "time/micro_batch_0/forward_ms": ms(3, 4),
            "time/micro_batch_0/backward_ms": ms(5, 6),
            "time/micro_batch_1_ms": ms(8, 13),
            "time/micro_batch_1/forward_ms": ms(9, 10),
            "time/micro_batch_1/backward_ms": ms(11, 12),
            "time/update_1_ms": ms(17, 26),
            "time/update_1/forward_ms": ms(19, 20),
            "time/update_1/backward_ms": ms(21, 22),
            "time/update_1/optimizer_ms": ms(24, 25),
            "time/micro_batch_2_ms": ms(18, 23),
            "time/micro_batch_2/forward_ms": ms(19, 20),
            "time/micro_batch_2/backward_ms": ms(21, 22),
        }
    )
    assert times.metrics() == found, "asked twice"


def test_times_are_real() -> None:
    times = LoopRecorder()
    with times.update(), times.micro_batch(), times.phase("sleep"):
        time.sleep(0.02)
    found = times.metrics()
    assert 15 <= found["time/update_0/sleep_ms"] <= found["time/micro_batch_0_ms"] <= found["time/update_0_ms"] < 2000


def test_metrics_of_the_plan_are_among_them() -> None:
    plan = plan_micro_batches([5, 9, 2, 7], 12, num_updates=2)
    times = LoopRecorder(plan)
    assert times.metrics() == plan.metrics()
    loop(times, plan.counts)
    found = times.metrics()
    assert {name: found[name] for name in plan.metrics()} == plan.metrics()
    assert {name for name in found if name.startswith("time/micro_batch")} == {
        f"time/micro_batch_{number}{phase}_ms"
        for number in range(len(plan.micro_batches))
        for phase in ("", "/forward", "/backward")
    }
    assert not any(name.startswith("memory/") for name in found), "on the host"
    assert all(type(value) is float for value in found.values())
    assert LoopRecorder().metrics() == {}


def test_the_same_phase_twice_adds_up(clock: None) -> None:
    times = LoopRecorder()
    with times.update(), times.micro_batch():
        for _ in range(2):
            with times.phase("forward"):
                pass
    assert times.metrics()["time/micro_batch_0/forward_ms"] == 1e3 * (4 + 6)
    assert times.metrics()["time/update_0/forward_ms"] == 1e3 * (4 + 6)


def test_parts_of_a_loop_alone(clock: None) -> None:
    """A phase outside of all, a micro-batch outside of an update."""
    times = LoopRecorder()
    with times.phase("data"):
        pass
    with times.micro_batch(), times.phase("forward"):
        pass
    assert times.metrics() == pytest.approx(
        {"time/data_ms": 2e3, "time/micro_batch_0/forward_ms": 5e3, "time/micro_batch_0_ms": 15e3}
    )


def span(times: LoopRecorder, kind: str) -> AbstractContextManager[Any]:
    return times.phase(kind) if kind == "forward" else getattr(times, kind)()


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        (["update"], "update", "\"update_1\" begins inside ['update_0']"),
        (["micro_batch"], "update", "\"update_0\" begins inside ['micro_batch_0']"),
        (["micro_batch"], "micro_batch", "\"micro_batch_1\" begins inside ['micro_batch_0']"),
        (["update", "micro_batch"], "micro_batch", "\"micro_batch_1\" begins inside ['update_0', 'micro_batch_0']"),
        (["forward"], "forward", "\"forward\" begins inside ['forward']"),
        (["update", "forward"], "micro_batch", "\"micro_batch_0\" begins inside ['update_0', 'forward']"),
        (["forward"], "update", "\"update_0\" begins inside ['forward']"),
    ],
)
def test_wrong_nesting_raises(outer: list[str], inner: str, words: str) -> None:
    times = LoopRecorder()
    entered = [span(times, kind) for kind in outer]
    for each in entered:
        each.__enter__()
    with pytest.raises(PlanError) as caught, span(times, inner):
        raise AssertionError("entered")
    assert str(caught.value) == (
        f"LoopRecorder: {words}; expected updates around micro-batches around phases. Close what is open."
    )
    for each in reversed(entered):
        each.__exit__(None, None, None)
    assert len(times.metrics()) >= len(outer), "the outer ones are whole"
    before = set(times.metrics())
    with times.update(), times.micro_batch():
        pass
    numbers = outer.count("update"), outer.count("micro_batch")
    new = {f"time/update_{numbers[0]}_ms", f"time/micro_batch_{numbers[1]}_ms"}
    assert set(times.metrics()) - before == new, "what was not entered does not count"


def test_an_exception_closes_what_is_open(clock: None) -> None:
    times = LoopRecorder()
    with pytest.raises(ZeroDivisionError), times.update(), times.micro_batch(), times.phase("forward"):
        raise ZeroDivisionError
    assert times.metrics() == pytest.approx(
        {
            "time/update_0_ms": 1e3 * (at(6) - at(1)),
            "time/micro_batch_0_ms": 1e3 * (at(5) - at(2)),
            "time/update_0/forward_ms": 1e3 * (at(4) - at(3)),
            "time/micro_batch_0/forward_ms": 1e3 * (at(4) - at(3)),
        }
    )
    loop(times, [1])
    assert {"time/update_1_ms", "time/micro_batch_1/backward_ms"} <= set(times.metrics())
