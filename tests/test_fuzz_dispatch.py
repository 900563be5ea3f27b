"""Short runs of the fuzz target for dispatch, in a process and on a Ray of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "arguments", ["--count 6 --seed 5", "--count 3 --seed 5 --nodes 3", "--kills 1 --seed 5", "--threads 8 --seconds 5"]
)
def test_what_comes_back_is_what_was_sent(arguments: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz_dispatch", *arguments.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "DIFFERENT" not in ended.stdout
    assert "WRONG" not in ended.stdout
