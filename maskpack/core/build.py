"""Compiles the core, and writes its Python side, `abi.py`: the numbers and structs of abi.h and the functions.

The build hook calls this (hatch_build.py); by hand: `python maskpack/core/build.py [OPTION OF THE COMPILER ...]`. It
reads no more C than abi.h has: enums of numbers, `KINDS`, and structs whose members take 8 bytes each or are structs
before them. CC names the compiler; otherwise it is cc, gcc, clang, or that of the package ziglang. The last compiles
for the other platforms of TARGETS, too.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ["-std=c11", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
ZIG = [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]  # else for no processor but this one
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}
"""The platforms that a core can be compiled for elsewhere, as wheels name them, and as zig does."""
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ENUM = re.compile(r"enum \{(.*?)\};", re.DOTALL)
_KIND = re.compile(r"X\((\w+), (\w+), (\w+)\)")
_STRUCT = re.compile(r"typedef struct \{(.*?)\} (\w+);", re.DOTALL)
_MEMBER = re.compile(r"(\w+)(?:\[(\w+)\])?$")
_FUNCTION = re.compile(r"^API \w+ maskpack_(\w+)\((.*?)\) \{", re.DOTALL | re.MULTILINE)


def compiler() -> list[str] | None:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else None


def compile_core(
    folder: Path = FOLDER, options: Sequence[str] = (), library: Path | None = None, target: str | None = None
) -> None:
    """Writes `_core.so` and `abi.py` in the folder of the core; or one library alone, elsewhere. `target` is one of
    TARGETS, None for this machine."""
    chosen = [*ZIG, "-target", TARGETS[target]] if target else compiler() or ZIG
    command = [*chosen, *FLAGS, *definitions(folder), *options]
    subprocess.run([*command, "-o", str(library or folder / "_core.so"), str(folder / "core.c")], check=True)
    if library is None:
        (folder / "abi.py").write_text(python_side(folder))


def definitions(folder: Path) -> list[str]:
    """What the core is told of itself, so that it can be compared with `abi.py`."""
    sizes = ", ".join(f"sizeof({name})" for _, name in _STRUCT.findall(_text(folder)))
    return [f"-DABI_VERSION={_version(folder)}", f"-DSTRUCT_SIZES={sizes}"]


def python_side(folder: Path) -> str:
    """The text of `abi.py`."""
    text = _text(folder)
    kinds, structs = _KIND.findall(text), _STRUCT.findall(text)
    numbers = {name: at for at, (name, _, _) in enumerate(kinds)}
    for body in _ENUM.findall(text):
        following = 0
        for item in body.split(","):
            name, _, said = item.partition("=")
            numbers[name.strip()] = number = int(said) if said else following
            following = number + 1
    return "\n".join(
        [
            '"""Written by build.py, from abi.h and the functions of the core."""\n',
            f"import numpy as np\n\nVERSION = {_version(folder)}",
            *(f"{name} = {number}" for name, number in numbers.items()),
            f"KINDS = {tuple(name.lower() for name, _, _ in kinds)}",
            f"REFERENCES = ({', '.join(f'({first}, {second})' for _, first, second in kinds)})",
            f"FUNCTIONS = {_functions(folder)}",
            *(f"{name.upper()} = np.dtype([{', '.join(_members(body, numbers))}])" for body, name in structs),
            *(f"{name.upper()}_NUMBERS = {name.upper()}.itemsize // 8" for _, name in structs),
            f"STRUCTS = {{{', '.join(f'{name!r}: {name.upper()}' for _, name in structs)}}}\n",
        ]
    )


def _text(folder: Path) -> str:
    return _COMMENT.sub("", (folder / "abi.h").read_text())


def _functions(folder: Path) -> dict[str, int]:
    """The functions of the core and how many numbers they take."""
    texts = [_COMMENT.sub("", path.read_text()) for path in sorted(folder.rglob("*.c"))]
    found = [match for text in texts for match in _FUNCTION.findall(text)]
    return {name: 0 if given == "void" else given.count(",") + 1 for name, given in found}


def _version(folder: Path) -> int:
    """A number that differs if abi.h or a function differs."""
    return zlib.crc32(((folder / "abi.h").read_text() + repr(_functions(folder))).encode())


def _members(body: str, numbers: dict[str, int]) -> list[str]:
    out: list[str] = []
    for line in filter(str.strip, body.split(";")):
        kind, names = line.replace("const ", "").split(maxsplit=1)
        for item in names.split(","):
            match = _MEMBER.match(item.strip(" *"))
            if match is None:
                raise ValueError(f"abi.h: {item!r} is no member that Python can have; expected NAME or NAME[NUMBER]")
            name, count = match.groups()
            dtype = "np.int64" if "*" in item or kind in ("i64", "u64") else kind.upper()
            size = "" if count is None else f", ({count if count.isdigit() else numbers[count]},)"
            out.append(f'("{name}", {dtype}{size})')
    return out


if __name__ == "__main__":
    compile_core(options=sys.argv[1:])
