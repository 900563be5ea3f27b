"""The build hook: compiles maskpack/core/core.c into the package, for wheels and editable installs.

CC names the compiler; otherwise it is cc, gcc or clang. A machine that has none of them gets ziglang from the package
index, for the build only. The wheel is for the machine that built it.

MASKPACK_PLATFORM=manylinux_2_17_aarch64, or another tag of that kind, makes a wheel for that processor and for every
glibc from that version on. ziglang compiles it, on any machine. An editable install refuses the variable: it runs the
core of the checkout, which is for this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c11", "-D_DEFAULT_SOURCE", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
SOURCE, TARGET = "maskpack/core/core.c", "maskpack/core/_core.so"
ZIG = [sys.executable, "-m", "ziglang", "cc"]


def compiler() -> list[str] | None:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else None


def zig_target(platform: str) -> list[str]:
    """The arguments of ziglang for a platform tag: the processor, the oldest glibc, and no symbol left undefined."""
    parts = re.fullmatch(r"manylinux_(\d+_\d+)_(x86_64|aarch64)", platform)
    if parts is None:
        raise ValueError(
            f"MASKPACK_PLATFORM is {platform!r}; expected manylinux_<major>_<minor>_<x86_64 or aarch64>, such as "
            "manylinux_2_17_aarch64. Unset it to build for this machine."
        )
    glibc, machine = parts.groups()
    return ["-target", f"{machine}-linux-gnu.{glibc.replace('_', '.')}", "-Wl,-z,defs", "-Wl,-s"]


def compile_core(source: Path, target: Path, command: list[str]) -> None:
    subprocess.run([*command, *FLAGS, "-o", str(target), str(source)], check=True)


class CustomBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return [] if compiler() and not os.environ.get("MASKPACK_PLATFORM") else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        source = Path(self.root) / SOURCE
        if platform := os.environ.get("MASKPACK_PLATFORM"):
            if version == "editable":
                raise ValueError(
                    f"MASKPACK_PLATFORM is {platform!r} in an editable install, which runs the core of the checkout; "
                    "expected it for wheels only. Unset it, or install without -e."
                )
            self.folder = tempfile.TemporaryDirectory()  # a checkout keeps the core of its own machine
            target = Path(self.folder.name) / "_core.so"
            compile_core(source, target, [*ZIG, *zig_target(platform)])
            build_data["force_include"][str(target)] = TARGET
        else:
            compile_core(source, Path(self.root) / TARGET, compiler() or ZIG)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(TARGET)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    root = Path(__file__).parent
    compile_core(root / SOURCE, root / TARGET, [*(compiler() or ZIG), *sys.argv[1:]])
