"""A little of tests/tools/fuzz_dispatch.py, in a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import warm_workers

ROOT = Path(__file__).parents[2]


def test_a_short_run() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*warm_workers.python(), "-m", "tests.tools.fuzz", "dispatch", "--seed", "3", "--count", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 failed" in run.stdout
