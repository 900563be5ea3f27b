"""Runs the tests marked `interpreter` once more, in a process of their own where Triton interprets its kernels.

Of files that take minutes, it runs the first case of each test; `TRITON_INTERPRET=1 pytest -m interpreter` runs all.

Each group is a test file, `test_interpreted_GROUP.py`, so that workers share them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
GROUPS = {
    "rows": ["packed/test_same_rows.py"],
    "device": ["packed/test_device_work.py", "nesting/test_device_read.py"],
    "ops": [
        "ops/test_log_probs.py",
        "ops/test_log_probs_sampling.py",
        "layout/test_kernels.py",
        "ops/test_prefix_attention.py",
        "ops/test_logits.py",
    ],
    "replay": ["replay/test_replay_fused.py"],
}
LONG = {"packed/test_same_rows.py", "packed/test_device_work.py", "layout/test_kernels.py"}
needed = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.timeout(1000),
]


def run_interpreted(file: str) -> None:
    options = ["-n", "0", "-m", "interpreter", "-p", "no:cacheprovider", "-rp", "--no-header"]
    cases = {"KERNEL_CASES": "first"} if file in LONG else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / file)],
        env={"HYPOTHESIS_PROFILE": "slow", **cases, **os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=980,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(f"PASSED tests/{file}::") > 4, done.stdout
