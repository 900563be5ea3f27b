"""Cases of tests/tools/fuzz_queue.py: processes of TransferQueue die; nobody reads wrong rows or waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transfer_queue")

FUZZ = Path(__file__).parents[1] / "tools" / "fuzz.py"


def test_deaths_bring_errors_and_no_wrong_rows():
    run = subprocess.run(
        [sys.executable, str(FUZZ), "queue", "--count", "2", "--seed", "2"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "'right'" in run.stdout
    assert "'put: StorageError': 1" in run.stdout
