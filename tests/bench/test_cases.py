"""Each benchmark ends on a tiny size and writes its record. Before it times, it compares what it times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.harness.registry import load, names

FRAMEWORKS = {"verl", "transfer_queue", "trl", "datasets"}
"""Packages that the test command of the README does not install."""


@pytest.mark.parametrize("name", names())
def test_a_case_ends_and_has_its_record(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        case = load(name)
    except ModuleNotFoundError as missing:
        if missing.name not in FRAMEWORKS:
            raise
        pytest.skip(f"needs {missing.name}")
    monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
    monkeypatch.setattr(command, "keep_memory", lambda: None)
    file, chart = tmp_path / "figures.json", tmp_path / "chart"
    command.main([name, "--tiny", "--json", str(file), *(["--plot", str(chart)] if case.plots else [])])
    record = json.loads(file.read_text())
    assert list(record) == ["machine", "versions", "commit", "complete", "rows"]
    assert record["complete"]
    for row in record["rows"]:
        assert (row["target"] is None) == (row["met"] is None)
        assert math.isfinite(row["value"]), row
    assert len({(row["case"], row["name"]) for row in record["rows"]}) == len(record["rows"]) > 0
    assert chart.exists() == bool(case.plots)
