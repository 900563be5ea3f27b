"""`python -m bench CASE [--rows N] [--rounds K] [--json FILE]`: tables on stdout, progress on stderr. FILE has what was
measured so far, at any time. Without a case, a list of the cases. `python -m bench all --report FILE.md` measures all
that this machine can, writes a JSON for each, and one page of them.
"""

from __future__ import annotations

import argparse
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.harness import report
from bench.harness.measure import keep_memory
from bench.harness.page import write_page
from bench.harness.registry import Case, load, names
from bench.harness.report import Record, commit, table, without_targets
from bench.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of maskpack.")
    parser.add_argument("case", nargs="?", choices=[*names(), "all"], help="without one, all cases are listed")
    parser.add_argument("--workload", choices=WORKLOADS, help="the batch, for some cases")
    parser.add_argument("--rows", type=_positive, help="rows of the batch")
    parser.add_argument("--rounds", type=_positive, help="timed rounds, medians are shown (default 9)")
    parser.add_argument("--only", type=_names, metavar="GROUPS", help="some groups of the case, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="sizes that end in seconds and say nothing of speed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw there what the case draws")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="all: the page to write")
    given = parser.parse_args(arguments)
    if (given.case == "all") != (given.report is not None):
        parser.error("all needs --report, and no other case takes it")
    if given.case is None:
        print("\n".join(_described()))
        return
    with _terminated_by_exception():
        _all(given) if given.case == "all" else _one(parser, given)


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what is open is closed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    case = load(given.case)
    takes = {"workload": case.workloads, "only": case.groups, "plot": case.plots, "rows": case.rows}
    for name, taken in takes.items():
        if getattr(given, name) is not None and not taken:
            parser.error(f"{given.case} takes no --{name}")
    if unknown := [group for group in given.only or () if group not in case.groups]:
        parser.error(f"no group {', '.join(unknown)}; {given.case} has {', '.join(case.groups)}")
    report.current = record = Record(given.json)
    if case.keeps_memory:
        keep_memory()
    more: dict[str, Any] = {"rounds": 9}
    if case.rows is not None:
        more["rows"] = WORKLOADS[given.workload or "reference"] if case.workloads else case.rows
    if given.tiny:
        more |= {"rounds": 1, **case.tiny}
    more |= {name: getattr(given, name) for name in ("rounds", *takes) if getattr(given, name) is not None}
    gc.collect()
    gc.freeze()  # the collections between rounds are of what the case makes
    try:
        for rows in case.run(**more):
            if given.workload not in (None, "reference"):
                rows = without_targets(rows)
            record.add(rows)
            print(f"{table(rows)}\n", flush=True)
    finally:
        gc.unfreeze()
    if record.rows:
        record.write(complete=True)


def _cases() -> Iterator[tuple[str, Case | ModuleNotFoundError]]:
    for name in names():
        try:
            yield name, load(name)
        except ModuleNotFoundError as missing:
            yield name, missing


def _described() -> Iterator[str]:
    for name, case in _cases():
        if isinstance(case, ModuleNotFoundError):
            yield f"{name:<12} needs {case.name}"
            continue
        options = [f"--workload {','.join(WORKLOADS)}"] * case.workloads
        options += [f"--only {','.join(case.groups)}"] * bool(case.groups)
        options += [f"--plot FILE: {case.plots}"] * bool(case.plots)
        yield "\n             ".join([f"{name:<12} {case.help}", *options])


def _all(given: argparse.Namespace) -> None:
    """Each case in a process of its own: what one leaves behind would be in the figures of the next."""
    commit()
    given.report.parent.mkdir(parents=True, exist_ok=True)
    rounds = ["--rounds", str(given.rounds)] if given.rounds else []
    for name, case in _cases():
        if isinstance(case, ModuleNotFoundError) or (case.on == "gpu" and not torch.cuda.is_available()):
            continue
        for workload in WORKLOADS if case.workloads else (None,):
            named = ["--workload", workload] if workload else []
            file = given.report.with_name("-".join([name, *named[1:]]) + ".json")
            command = [sys.executable, "-m", "bench", name, *named, *rounds, *["--tiny"] * given.tiny]
            subprocess.run([*command, "--json", str(file)], check=True)
    write_page(given.report.parent, given.report)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
