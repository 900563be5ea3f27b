"""Random fields through the core in C (driver.c): here, and on aarch64, under an emulator, to the same bytes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized

from maskpack.core import build

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
DRIVER = Path(__file__).with_name("driver.c")
FLAGS = ["-std=c11", "-O1", "-static", "-pthread", f"-I{sanitized.SOURCE}"]
CROSS = [*build.ZIG, "-target", "aarch64-linux-musl"]  # zig has no glibc for a static program


def written(compiler: list[str], program: Path, *emulator: str) -> bytes:
    subprocess.run([*compiler, *FLAGS, "-o", str(program), str(DRIVER)], check=True)
    done = subprocess.run([*emulator, str(program), "0", "400"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.fixture(scope="module")
def written_here(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    return written(["gcc"], tmp_path_factory.mktemp("here") / "driver")


def test_fields_are_decoded_as_they_were(written_here: bytes) -> None:
    assert len(written_here) > 1 << 18


@pytest.mark.skipif(not (importlib.util.find_spec("ziglang") and EMULATOR), reason="needs ziglang and qemu-aarch64")
def test_the_same_bytes_as_here(written_here: bytes, tmp_path: Path) -> None:
    assert written(CROSS, tmp_path / "driver", str(EMULATOR)) == written_here
