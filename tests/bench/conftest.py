"""Runs a benchmark by its command, on a tiny size."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench.report import Row

Record = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Whatever is there already is left out when rounds begin with a collection of cycles."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other take longer than one over products as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """The rows of the JSON that `python -m bench CASE` writes, by case and name; `run` does the work."""

    def rows(case: str, run: Callable[..., list[Row]], *options: str) -> Record:
        monkeypatch.setitem(command.CASES, case, run)
        monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
        file = tmp_path / "figures.json"
        command.main([case, "--rows", "5", "--rounds", "1", "--json", str(file), *options])
        written = json.loads(file.read_text())
        assert list(written) == ["machine", "versions", "commit", "rows"]
        for row in written["rows"]:
            assert list(row) == ["case", "name", "value", "unit", "target", "met"]
            assert (row["target"] is None) == (row["met"] is None)
            assert math.isfinite(row["value"])
        by_name = {(row["case"], row["name"]): row for row in written["rows"]}
        assert len(by_name) == len(written["rows"]) > 0
        return by_name

    return rows
