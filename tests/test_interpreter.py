"""The tests marked `interpreter` once more, in a process of their own where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = [
    *("packed/test_staging.py", "ops/test_log_probs.py", "packed/test_encode_on_device.py", "layout/test_kernels.py"),
    *("nesting/test_device_read.py", "ops/test_prefix_attention.py", "ops/test_logits.py"),
]
"""Those that take longest come first, so that two workers share the work."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_kernels_interpreted_on_the_host(file: str) -> None:
    options = ["-n", "0", "-m", "interpreter", "-p", "no:cacheprovider", "-rp", "--no-header"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / file)],
        env={"HYPOTHESIS_PROFILE": "slow", **os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(f"PASSED tests/{file}::") > 10, done.stdout


def test_no_marked_file_is_forgotten() -> None:
    files = {path.relative_to(HERE).as_posix(): path.read_text() for path in HERE.rglob("test_*.py")}
    assert {name for name, text in files.items() if "mark.interpreter" in text} == {Path(__file__).name, *FILES}
