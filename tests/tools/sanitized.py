"""Runs a command with the compiled core under sanitizers: `python tests/tools/sanitized.py COMMAND ...`.

A copy of the package is put into a temporary folder, its core is compiled there with ASan and UBSan, and PYTHONPATH
leads to it; `python -m` and `python -c` find the package in the working directory before that. A finding ends the
process. Needs gcc.

    python tests/tools/sanitized.py pytest -n 0 --capture=sys tests/packed tests/nesting tests/core
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from maskpack.core.build import compile_core

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "maskpack/core"
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
THREAD = ["-fsanitize=thread"]
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:handle_sigbus=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def compiled(library: Path, *flags: str) -> Path:
    compile_core(SOURCE, ["-O1", "-g", "-fvisibility=default", *flags], library)
    return library


def runtime(name: str) -> str | None:
    """The path of a library of gcc that must be loaded first; None where gcc or the library is missing."""
    if shutil.which("gcc") is None:
        return None
    path = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return path if os.path.isabs(path) else None


def environment(folder: Path) -> dict[str, str]:
    """What makes a process import a copy of the package, in this folder, whose core is compiled with ASan and UBSan."""
    preload = [runtime("libasan.so"), runtime("libstdc++.so.6")]  # the second so that libasan knows C++'s exceptions
    if None in preload:
        sys.exit("sanitized.py: no gcc with libasan. Install them.")
    shutil.copytree(ROOT / "maskpack", folder / "maskpack", ignore=shutil.ignore_patterns("__pycache__", "_core.so"))
    compiled(folder / "maskpack/core/_core.so", *ADDRESS)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **OPTIONS, "PYTHONPATH": path, "LD_PRELOAD": " ".join(map(str, preload))}


def run(*command: str, options: str = "") -> int:
    """The exit status of a command under ASan and UBSan, with more ASAN_OPTIONS."""
    with tempfile.TemporaryDirectory() as folder:
        made = environment(Path(folder))
        made["ASAN_OPTIONS"] += options
        return subprocess.run(command, env=made, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
