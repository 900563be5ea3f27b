"""The compiled core under sanitizers: random tables, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz_core
import numpy as np
import pytest
import sanitized

from maskpack.core import native

HERE = Path(__file__).parent


def test_the_driver_knows_the_structs() -> None:
    for name in ("PLACE", "ENTRY", "STORED", "FIELD", "JOB", "TARGET"):
        own, theirs = np.dtype(getattr(fuzz_core, name)), getattr(native, name)
        assert own.itemsize == theirs.itemsize
        assert [own.fields[field][1] for field in own.names] == [theirs.fields[field][1] for field in theirs.names], (
            name
        )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and its sanitizers")
@pytest.mark.parametrize(
    ("flags", "library", "count"),
    [
        ([*sanitized.ADDRESS, "-O0"], "libasan.so", 150),  # optimisers drop reads whose values nobody uses
        (sanitized.THREAD, "libtsan.so", 60),
        (["-O3"], "", 60),
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
    core = sanitized.compiled(tmp_path / "core.so", *flags)
    run = [sys.executable, str(HERE / "fuzz_core.py"), str(core), "0", str(count)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "no difference\n"), done.stderr[-3000:]
