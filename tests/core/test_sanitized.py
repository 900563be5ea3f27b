"""The compiled core under sanitizers: random tables, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
import sanitized

from maskpack.core import build


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and its sanitizers")
@pytest.mark.parametrize(
    ("flags", "library", "count"),
    [  # optimisers drop reads whose values nobody uses, and take longer
        ([*sanitized.ADDRESS, "-O0"], "libasan.so", 15),
        ([*sanitized.THREAD, "-O0"], "libtsan.so", 6),
        ([], "", 10),
    ],
    ids=["address and undefined", "thread", "as installed"],
)
def test_random_tables(flags: list[str], library: str, count: int, tmp_path: Path) -> None:
    environment = {**os.environ, **sanitized.OPTIONS, "LD_PRELOAD": ""}
    if library:
        preload = sanitized.runtime(library)
        if preload is None:
            pytest.skip(f"gcc has no {library}")
        environment["LD_PRELOAD"] = preload
    core = sanitized.compiled(tmp_path / "core.so", *flags) if flags else Path(build.FOLDER, "_core.so")
    run = [sys.executable, fuzz.__file__, "core", "--library", str(core), "--count", str(count)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert (done.returncode, f"'tables': {3 * count}" in done.stdout) == (0, True), done.stdout + done.stderr[-3000:]
