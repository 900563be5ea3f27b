"""Runs a benchmark by its command, on a tiny size."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.report import Row


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Whatever is there already is left out when rounds begin with a collection of cycles."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[tuple[str, str], dict[str, Any]]]:
    """The rows of the JSON that `python -m bench CASE` writes, by case and name; `run` does the work."""

    def rows(case: str, run: Callable[..., list[Row]], *options: str) -> dict[tuple[str, str], dict[str, Any]]:
        monkeypatch.setitem(command.CASES, case, run)
        monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
        file = tmp_path / "figures.json"
        command.main([case, "--rows", "5", "--rounds", "1", "--json", str(file), *options])
        table, written = capsys.readouterr().out, json.loads(file.read_text())
        assert list(written) == ["machine", "versions", "commit", "rows"]
        assert written["commit"] == "0123abc"
        assert list(written["machine"])[:3] == ["cpu", "cores", "memory_gib"]
        assert [*written["versions"]][:5] == ["python", "torch", "tensordict", "numpy", "maskpack"]
        for row in written["rows"]:
            assert list(row) == ["case", "name", "value", "unit", "target", "met"]
            assert (row["target"] is None) == (row["met"] is None)
            assert row["case"].startswith(case)
            assert row["case"] in table
            assert row["name"] in table
            assert math.isfinite(row["value"])
        by_name = {(row["case"], row["name"]): row for row in written["rows"]}
        assert len(by_name) == len(written["rows"])
        return by_name

    return rows
