"""A run that is stopped leaves the rows that it had, and the medians of the rounds that it was in."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench.harness import measure
from bench.harness.gpu import Clock
from bench.harness.measure import NotExact, interleaved
from bench.harness.passes import wall_seconds
from bench.harness.registry import Case, Run
from bench.harness.report import Row, RowGroups

FIRST = Row("first", "figure", 1, "ms")
Works = dict[str, Callable[[], object]]
LOOPS: dict[str, tuple[Callable[[Works, int], object], int, str]] = {
    "interleaved": (interleaved, 1, "ms"),
    "interleaved, warm": (lambda works, rounds: interleaved(works, rounds, warm=3), 3, "ms"),
    "wall_seconds": (lambda works, rounds: wall_seconds(works, rounds, lambda: None), 0, "ms"),
    "Clock": (lambda works, rounds: Clock(torch.device("cpu"), rounds).wall_us(works), 1, "us, wall"),
}
"""All loops of rounds, how many rounds they warm up, and their unit."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """`python -m bench stopped --rounds 5 --json FILE` of a function."""

    def started(run: Run) -> None:
        monkeypatch.setattr(command, "load", lambda _: Case(run, "", "cpu", {}, rows=None, keeps_memory=False))
        command.main(["stopped", "--rounds", "5", "--json", str(tmp_path / "figures.json")])

    monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
    monkeypatch.setattr(command, "names", lambda: ["stopped"])
    monkeypatch.setattr(measure, "_SECONDS_BETWEEN", 0)
    return started


def record(folder: Path) -> dict[str, Any]:
    """What SIGKILL would leave if it came now."""
    (file,) = folder.iterdir()
    left = json.loads(file.read_text())
    assert list(left) == ["machine", "versions", "commit", "complete", "rows", "rounds"]
    assert not left["complete"]
    assert [row["name"] for row in left["rows"]] == [FIRST.name]
    return left


@pytest.mark.parametrize("loop", LOOPS)
def test_medians_of_the_rounds_before_are_on_disk_while_a_work_runs(
    loop: str, tmp_path: Path, start: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    timed, warm, unit = LOOPS[loop]
    left: list[list[dict[str, Any]]] = []

    def run(rounds: int) -> RowGroups:
        yield [FIRST]
        timed({"ours": lambda: None, "theirs": lambda: left.append(record(tmp_path)["rounds"])}, rounds)
        yield [Row("second", "figure", 1, "ms")]

    start(run)
    assert len(left) == warm + 5
    assert not any(left[: warm + 1])
    for done, (rounds,) in enumerate(left[warm + 1 :], 1):
        assert (rounds["done"], rounds["of"], rounds["unit"]) == (done, 5, unit)
        assert list(rounds["medians"]) == ["ours", "theirs"]
    told = [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"  round {number} of 5, {unit}" for number in range(1, 6)]
    whole = json.loads((tmp_path / "figures.json").read_text())
    assert whole["complete"]
    assert [row["case"] for row in whole["rows"]] == ["first", "second"]
    assert "rounds" not in whole


def test_sigterm_closes_what_is_open(tmp_path: Path, start: Callable[[Run], None]) -> None:
    closed: list[bool] = []

    def run(rounds: int) -> RowGroups:
        yield [FIRST]
        try:
            interleaved({"ours": lambda: record(tmp_path)["rounds"] and signal.raise_signal(signal.SIGTERM)}, rounds)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        start(run)
    assert ended.value.code == 128 + signal.SIGTERM
    assert closed
    assert signal.getsignal(signal.SIGTERM) == before
    assert record(tmp_path)["rounds"][0]["done"] == 1


def test_rows_before_an_error_are_kept(
    tmp_path: Path, start: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(rounds: int) -> RowGroups:
        yield [FIRST]
        raise NotExact("other bits")

    with pytest.raises(NotExact, match="other bits"):
        start(run)
    assert record(tmp_path)["rounds"] == []
    assert FIRST.name in capsys.readouterr().out


def test_figures_of_an_earlier_run_do_not_stay(tmp_path: Path, start: Callable[[Run], None]) -> None:
    def run(rounds: int) -> RowGroups:
        raise NotExact("other bits")

    (tmp_path / "figures.json").write_text('{"complete": true}')
    with pytest.raises(NotExact):
        start(run)
    assert not list(tmp_path.iterdir())


def test_short_rounds_are_told_at_their_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_SECONDS_BETWEEN", 1e9)
    interleaved({"ours": lambda: None}, 4)
    assert capsys.readouterr().err.startswith("  round 4 of 4, ms: ours ")
