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

import maskpack
from maskpack.core import native

SOURCE = Path(maskpack.__file__).parent / "core/core.c"
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
    ("flags", "runtime"),
    [("-fsanitize=address,undefined -fno-sanitize-recover=undefined", "libasan.so"), ("-O3", "")],
    ids=["address and undefined", "as installed"],
)
def test_random_tables(flags: str, runtime: str, tmp_path: Path) -> None:
    library = tmp_path / "core.so"
    command = ["gcc", "-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread", *flags.split()]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    environment = dict(os.environ)
    if runtime:
        found = subprocess.run(["gcc", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
        if not os.path.isabs(found.stdout.strip()):
            pytest.skip(f"gcc has no {runtime}")
        environment |= {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"}
    run = [sys.executable, str(HERE / "fuzz_core.py"), str(library), "0", "150"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "no difference\n"), done.stderr[-3000:]
