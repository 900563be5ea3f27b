"""The compiled core on aarch64, under an emulator: the bytes that it makes are those of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
DRIVER = Path(__file__).with_name("driver.c")
FLAGS = ["-std=c11", "-D_DEFAULT_SOURCE", "-O3", "-static", "-pthread", f"-I{sanitized.SOURCE}"]


@pytest.mark.skipif(not all(map(shutil.which, ("gcc", CROSS, EMULATOR))), reason=f"needs gcc, {CROSS} and {EMULATOR}")
def test_the_same_bytes_as_here(tmp_path: Path) -> None:
    outputs: list[bytes] = []
    for compiler, *command in (["gcc"], [CROSS, EMULATOR]):
        program = tmp_path / compiler
        subprocess.run([compiler, *FLAGS, "-o", str(program), str(DRIVER)], check=True)
        done = subprocess.run([*command, str(program), "0", "1500"], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        outputs.append(done.stdout)
    assert len(outputs[0]) > 1 << 20
    assert outputs[0] == outputs[1]
