"""Rows of figures, the table and the JSON made of them, and where they were measured.

    {machine: {cpu, cores, memory_gib}, versions: {...}, commit, complete,
     rows: [{case, name, value, unit, target, met}], rounds: [{done, of, unit, medians: {name: value}}]}

A target is text, ">= 15" or "<= 4"; `target` and `met` are null where a figure has none. Where torch sees a GPU, the
machine has its name, `gpu`, and the versions have that of triton; where transformers, TRL, TransferQueue or verl was
used, its. `complete` says whether the run came to its end; files without it are of such runs. If not, `rounds` are
those of works that were timed, and whose figures are not in the rows.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import tensordict
import torch

import maskpack

_DIGITS = {"ms": 2, "us": 1, "x": 2, "GB/s": 1, "TB/s": 2, "GiB": 2, "nats": 5, "%": 3}
_ROOT = Path(__file__).resolve().parents[2]

Ratio = tuple[str, str, str | None]
"""Of two figures by their names, and its target."""


@dataclass(frozen=True)
class Row:
    """One figure. `unit` is a count of something ("bytes", "bytes/row", "fields", "syncs"), a time ("ms", "us"), a rate
    ("GB/s", "TB/s"), "%", a relative error, or "x", a ratio."""

    case: str
    name: str
    value: float
    unit: str
    target: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the target; None without one."""
        if self.target is None:
            return None
        direction, bound = self.target.split()
        return {">=": self.value >= float(bound), "<=": self.value <= float(bound)}[direction]


RowGroups = Iterator[list[Row]]
"""The rows of a run, each group as soon as it is measured."""


def ratios(case: str, values: Mapping[str, float], pairs: Iterable[Ratio], what: str = "") -> list[Row]:
    """Ratios of values, named `what` and the two names."""
    return [Row(case, f"{what}{above} / {below}", values[above] / values[below], "x", to) for above, below, to in pairs]


def times(
    case: str, ms: Mapping[str, float], pairs: Iterable[Ratio] = (), targets: Mapping[str, str | None] | None = None
) -> list[Row]:
    """Milliseconds, and ratios of them."""
    aims = targets or {}
    return [*(Row(case, name, one, "ms", aims.get(name)) for name, one in ms.items()), *ratios(case, ms, pairs)]


def without_targets(rows: Sequence[Row]) -> list[Row]:
    """The same figures."""
    return [replace(row, target=None) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a heading for each case."""
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for before, row in zip((None, *rows), rows, strict=False):
        if before is None or before.case != row.case:
            lines += ["", row.case]
        digits = _DIGITS.get(row.unit, 0)
        line = f"  {row.name:<{width}}  {row.value:>14,.{digits}f} {row.unit:<9}"
        if row.target is not None:
            line += f"  target {row.target}: {'met' if row.met else 'MISSED'}"
        lines.append(line.rstrip())
    return "\n".join(lines[1:])


@dataclass
class Record:
    """What a run has measured so far. Its results file, if it has one, is written again with every change, because a
    run may be killed at any time."""

    path: Path | None = None
    rows: list[Row] = field(default_factory=list[Row])
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        if self.path is not None:
            self.commit = commit()  # without one, fail before the measurement
            self.path.unlink(missing_ok=True)  # of an earlier run

    def add(self, rows: Sequence[Row]) -> None:
        """Adds finished rows. The rounds that were timed before are in them."""
        self.rows += rows
        self.rounds.clear()
        self.write()

    def write(self, *, complete: bool = False) -> None:
        """Replaces the file at once, so that it is never half written."""
        if self.path is None:
            return
        about = {"machine": machine(), "versions": versions(), "commit": self.commit, "complete": complete}
        record = {**about, "rows": [{**asdict(row), "met": row.met} for row in self.rows]}
        if not complete:
            record["rounds"] = self.rounds
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(self.path)


current = Record()
"""Of the run that this process makes."""


def machine() -> dict[str, Any]:
    """CPU model, cores of this process, memory and GPU; nothing that tells one machine from another of its kind."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1), **gpu}


def versions() -> dict[str, str]:
    """Of everything that a figure depends on."""
    kernels = {"triton": importlib.import_module("triton").__version__} if torch.cuda.is_available() else {}
    others = {
        name: sys.modules[name].__version__
        for name in ("transformers", "trl", "transfer_queue", "verl")
        if name in sys.modules
    }
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "numpy": numpy.__version__,
        "maskpack": maskpack.__version__,
        **kernels,
        **others,
    }


def commit() -> str:
    """The commit that was measured, "-dirty" behind it if files differ from it; MASKPACK_COMMIT says it where the tree
    was copied without its history."""
    if told := os.environ.get("MASKPACK_COMMIT"):
        return told
    changed = _git("status", "--porcelain")
    return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
