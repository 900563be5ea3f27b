"""The build hook: compiles the core into the package, for wheels and editable installs (maskpack/core/build.py).

A wheel is for the machine that builds it, and has the tag of that machine; or for the platform that MASKPACK_TARGET
names, one of TARGETS. A machine that has no compiler gets ziglang from the package index, for the build only; so does
a build for a target.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORE = "maskpack/core"
WINDOWS = "maskpack: it does not run on Windows: its core needs POSIX threads, its log POSIX locks. Use WSL."


class CustomBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        if self.target_name != "wheel":
            return []
        return [] if self._platform() is None and self._build()["compiler"]() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build, platform = self._build(), self._platform()
        if platform and version == "editable":
            sys.exit("maskpack: an editable install is for this machine. Unset MASKPACK_TARGET, or build a wheel.")
        if platform:  # the core in a clone stays that of its machine
            self._folder = tempfile.TemporaryDirectory()
            library, abi = Path(self._folder.name, "_core.so"), Path(self._folder.name, "abi.py")
            build["compile_core"](library=library, target=platform)
            abi.write_text(build["python_side"](build["FOLDER"]))
            build_data["force_include"] |= {str(library): f"{CORE}/_core.so", str(abi): f"{CORE}/abi.py"}
        else:
            if not build["compiler"]():
                self._say("no C compiler was found: ziglang compiles the core, which takes a minute or two")
            build["compile_core"]()
            build_data["artifacts"] += [f"{CORE}/_core.so", f"{CORE}/abi.py"]
        if version != "editable":  # `maskpack demo` runs it; in a clone it is beside the package
            build_data["force_include"]["examples/demo.py"] = "maskpack/examples/demo.py"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform or sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _platform(self) -> str | None:
        """The platform that the wheel is for; None for that of this machine."""
        named, known = os.environ.get("MASKPACK_TARGET"), self._build()["TARGETS"]
        if named and named not in known:
            sys.exit(f"maskpack: no wheel is built for MASKPACK_TARGET={named}. Expected one of {', '.join(known)}.")
        if not named and sys.platform == "win32":
            sys.exit(WINDOWS)
        return named or None

    def _say(self, line: str) -> None:
        """To the terminal, if there is one: pip keeps what a build prints for itself, but with -v."""
        print(f"maskpack: {line}", flush=True)
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\n  maskpack: {line}", file=terminal, flush=True)

    def _build(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / CORE / "build.py"))
