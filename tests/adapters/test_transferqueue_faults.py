"""Cases of tests/tools/fuzz_queue.py: sequences, and processes of TransferQueue that die. Nobody reads wrong rows
or waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

needs("transfer_queue")

FUZZ = Path(__file__).parents[1] / "tools" / "fuzz.py"


@pytest.mark.parametrize("seed", [63, 127], ids=["a unit dies", "a writer dies"])
def test_a_sequence_and_a_death(seed):
    run = subprocess.run(
        [sys.executable, str(FUZZ), "queue", "--count", "2", "--seed", str(seed)],
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    for count in ("'cases': 2", "'get': ", "'right': ", *(["'put: StorageError': 1"] if seed == 63 else [])):
        assert count in run.stdout
