"""The build hook: compiles the core into the package, for wheels and editable installs (maskpack/core/build.py).

A machine that has no compiler gets ziglang from the package index, for the build only. The wheel is for the machine
that built it.
"""

from __future__ import annotations

import contextlib
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORE = "maskpack/core"


class CustomBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return [] if self._build()["compiler"]() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build = self._build()
        if not build["compiler"]():
            self._say("no C compiler was found: ziglang compiles the core, which takes a minute or two the first time")
        build["compile_core"]()
        build_data["artifacts"] += [f"{CORE}/_core.so", f"{CORE}/abi.py"]
        if version != "editable":  # `maskpack demo` runs it; in a clone it is beside the package
            build_data["force_include"]["examples/demo.py"] = "maskpack/examples/demo.py"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _say(self, line: str) -> None:
        """To the terminal, if there is one: pip keeps what a build prints for itself, but with -v."""
        print(f"maskpack: {line}", flush=True)
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\n  maskpack: {line}", file=terminal, flush=True)

    def _build(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / CORE / "build.py"))
