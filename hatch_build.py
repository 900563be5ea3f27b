"""The build hook: compiles maskpack/core/core.c into the package, for wheels and editable installs.

CC names the compiler; otherwise it is cc, gcc or clang. A machine that has none of them gets ziglang from the package
index, for the build only. The wheel is for the machine that built it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
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


def compile_core(source: Path, target: Path, command: list[str]) -> None:
    subprocess.run([*command, *FLAGS, "-o", str(target), str(source)], check=True)


class CustomBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return [] if compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compile_core(Path(self.root) / SOURCE, Path(self.root) / TARGET, compiler() or ZIG)
        build_data["artifacts"].append(TARGET)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    root = Path(__file__).parent
    compile_core(root / SOURCE, root / TARGET, [*(compiler() or ZIG), *sys.argv[1:]])
