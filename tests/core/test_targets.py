"""The core for other platforms: zig compiles it for each target of the build, and it asks little of the system."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from maskpack.core import build

ROOT = Path(__file__).parents[2]
NEWEST = (2, 28)
"""The newest version of glibc that a symbol may have in a wheel for manylinux_2_28."""
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MACHINES = {"x86_64": 0x1000007, "arm64": 0x100000C}
"""The numbers of processors in a Mach-O file."""
needs_zig = pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="needs ziglang")
needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")


def compiled(folder: Path, target: str, *options: str) -> Path:
    """The core, optimised for size, which takes a quarter of the time."""
    build.compile_core(options=["-Os", *options], library=folder / "core.so", target=target)
    return folder / "core.so"


def read(library: Path) -> str:
    command = ["readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unfit(shown: str) -> list[str]:
    """What a library may not ask of a system with glibc 2.28."""
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"@GLIBC_([\d.]+)", shown)}
    assert versions
    newer = [f"GLIBC {'.'.join(map(str, version))}" for version in sorted(versions) if version > NEWEST]
    return newer + sorted({*re.findall(r"\(NEEDED\).*\[(.*)\]", shown)} - LIBRARIES)


def imported_by_mach_o(data: bytes) -> list[str]:
    """The libraries of a Mach-O file of 64 bits."""
    commands, names, at = struct.unpack_from("<I", data, 16)[0], [], 32
    for _ in range(commands):
        kind, size = struct.unpack_from("<II", data, at)
        if kind == 0xC:  # LC_LOAD_DYLIB: the place of its name is behind them
            begin = at + struct.unpack_from("<I", data, at + 8)[0]
            names.append(data[begin : at + size].rstrip(b"\0").decode())
        at += size
    return names


@needs_zig
@needs_readelf
def test_a_core_for_linux_needs_glibc_2_28_and_no_more(tmp_path: Path) -> None:
    """That for aarch64 is in a wheel of `.ci/release`, which auditwheel checks."""
    shown = read(compiled(tmp_path, "manylinux_2_28_x86_64"))
    assert "maskpack_version" in shown
    assert not unfit(shown)
    # memcpy is that of the system, which is faster than the one in zig's runtime
    assert re.search(r"UND memcpy@", shown)


@needs_zig
@needs_readelf
def test_a_newer_glibc_and_another_library_would_be_seen(tmp_path: Path) -> None:
    """`pthread_create` has version 2.34 where glibc is that old, as a compiler for this machine would take it."""
    source, other, library = tmp_path / "core.c", tmp_path / "libother.so", tmp_path / "core.so"
    source.write_text("int pthread_create(), other(); int core() { return pthread_create() + other(); }")
    command = [*build.ZIG, "-target", "x86_64-linux-gnu.2.34", "-shared", "-pthread", "-fno-builtin", "-o"]
    given = ["-x", "c", "-", "-Wl,-soname,libother.so"]
    subprocess.run([*command, str(other), *given], input=b"int other(void) { return 1; }", check=True)
    subprocess.run([*command, str(library), str(source), str(other)], check=True)
    assert unfit(read(library)) == ["GLIBC 2.34", "libother.so"]


@needs_zig
@pytest.mark.parametrize("target", [name for name in build.TARGETS if name.startswith("macosx")])
def test_a_core_for_macos_is_linked(target: str, tmp_path: Path) -> None:
    data = compiled(tmp_path, target).read_bytes()
    magic, machine, _, kind = struct.unpack_from("<4I", data)
    assert (magic, machine, kind) == (0xFEEDFACF, MACHINES[target.partition("11_0_")[2]], 6)  # a dylib of 64 bits
    assert imported_by_mach_o(data) == ["/usr/lib/libSystem.B.dylib"]
    assert b"_maskpack_version\0" in data


def hook():
    kind = runpy.run_path(str(ROOT / "hatch_build.py"))["CustomBuildHook"]
    builder = WheelBuilder(str(ROOT))
    return kind(str(ROOT), {}, builder.config, builder.metadata, str(ROOT / "dist"), "wheel")


def test_a_target_brings_zig_and_an_unknown_one_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.delenv("MASKPACK_TARGET", raising=False)
    assert hook().dependencies() == []
    monkeypatch.setenv("MASKPACK_TARGET", "manylinux_2_28_aarch64")
    assert hook().dependencies() == ["ziglang"]
    with pytest.raises(SystemExit, match=r"Unset MASKPACK_TARGET"):
        hook().initialize("editable", {})
    monkeypatch.setenv("MASKPACK_TARGET", "musllinux_1_2_x86_64")
    with pytest.raises(SystemExit, match=r"MASKPACK_TARGET=musllinux_1_2_x86_64\. Expected one of manylinux_2_28"):
        hook().dependencies()


def test_windows_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASKPACK_TARGET", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"it does not run on Windows: .* Use WSL\."):
        hook().initialize("standard", {})
