"""A little of tests/tools/fuzz_dispatch.py, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import warm_workers
from command_line import output_of

ROOT = Path(__file__).parents[2]


def test_a_short_run() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [*warm_workers.python(), "-m", "tests.tools.fuzz", "dispatch", "--seed", "3", "--count", "3"]
    assert "0 failed" in output_of(*command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
