"""Plants faults, one at a time, and says which test catches each: what the suite is worth.

    python tests/tools/plant.py --results planted.jsonl                     all of faults.json; goes on where it stopped
    python tests/tools/plant.py --results planted.jsonl --only core-01      some of them
    python tests/tools/plant.py --results planted.jsonl --report            what the file says, beside what it should be
    python tests/tools/plant.py --results planted.jsonl --clean             whether these tests pass without a fault
    python tests/tools/plant.py --check                                     whether every anchor is there, once

A fault is a text of a file and what stands there instead. The tree is copied, the fault is planted in the copy, and the
tests of its package run there until one fails. `caught` in faults.json says whether a test has caught it before: if
code moves, edit the anchor, not the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maskpack.core.build import compile_core

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = HERE / "faults.json"
LIMIT = 3600  # seconds of one fault
PRELOADED = ("torch", "tensordict", "numpy", "hypothesis", "_hypothesis_pytestplugin", "xdist", "transformers")
COMMON = "tests/test_pitfalls.py tests/test_misuse.py"
TESTS = {
    "core.c": f"tests/packed tests/nesting tests/layout {COMMON} tests/core",
    "core": f"tests/nesting tests/packed tests/layout tests/fields {COMMON} tests/core",
    "layout": f"tests/layout tests/nesting tests/packed {COMMON}",
    "fields": f"tests/fields tests/nesting {COMMON}",
    "nesting": f"tests/nesting {COMMON} tests/packed",
    "packed": f"tests/packed tests/nesting {COMMON} tests/views",
    "device": "tests/test_interpreted_rows.py tests/test_interpreted_device.py tests/test_interpreted_ops.py",
    "views": f"tests/views {COMMON} tests/dispatch/test_placement.py",
    "dispatch": f"tests/dispatch {COMMON}",
    "planning": f"tests/planning {COMMON}",
    "replay": f"tests/replay {COMMON}",
    "store": "tests/store",
    "adapters": f"tests/adapters tests/replay {COMMON}",
    "ops": f"tests/ops tests/replay/test_replay.py {COMMON} tests/test_interpreted_ops.py",
}
"""The tests of a package, those that are likely to catch a fault first."""
_NAMED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_CRASHED = re.compile(r'File ".*?/(tests/\S+?\.py)", line \d+ in (\w+)')


def plant(fault: dict[str, Any], tree: Path) -> None:
    """Writes the fault into a tree. Raises ValueError unless the anchor is there once."""
    file = tree / fault["file"]
    text = file.read_text()
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['id']}: {fault['file']} has its anchor {text.count(fault['old'])} times; expected 1")
    file.write_text(text.replace(fault["old"], fault["new"]))
    if file.suffix in (".c", ".h"):
        compile_core(tree / "maskpack/core", ["-O1", "-w"])


def started(tree: Path, paths: list[str], output: Path, environment: dict[str, str]) -> int:
    """A process, forked from this one, that runs tests in a tree; its number."""
    child = os.fork()
    if child:
        return child
    os.setsid()  # so that all that it starts can be ended
    line = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(line, 1)
    os.dup2(line, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **environment}
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "maskpack"]:
        del sys.modules[name]  # of this checkout, in which nothing is planted
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "--timeout", "900", *paths]
    if environment:  # Triton, which is loaded already, has read its own
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *options])
    os._exit(int(pytest.main(options)))


def caught_by(status: int, output: Path) -> str | None:
    """The first test that failed, from the status of a process of `started` and what it printed; None if none did."""
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 4, 5):  # 4: no test of that name; 5: no tests
        return None
    out = output.read_text(errors="replace")
    found = _NAMED.findall(out) or ["::".join(place) for place in _CRASHED.findall(out)]
    return f"{found[0] if found else out[-300:]}{'' if code == 1 else f' (exit {code})'}"


@dataclass
class Trial:
    """A fault that is being tried: in a copy of the tree, by the tests of `stages`, one after the other."""

    fault: dict[str, Any]
    folder: Path
    stages: list[list[str]]
    begun: float
    child: int = 0

    @classmethod
    def of(cls, fault: dict[str, Any], source: Path, quick: bool) -> Trial:
        folder = Path(tempfile.mkdtemp(prefix="planted-"))
        tree = folder / "tree"
        # modification times are kept, so that compiled modules count but for the one with the fault
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns(".git", "results", ".venv"))
        plant(fault, tree)
        first, every = (
            [path for path in paths.split() if (tree / path.partition("::")[0]).exists()]
            for paths in (fault.get("first", ""), TESTS[fault["package"]])
        )
        stages = [first, [] if quick else [path for path in every if path not in first]]
        return cls(fault, folder, [stage for stage in stages if stage], time.monotonic())

    def next(self) -> bool:
        """Starts the next stage, if there is one."""
        if self.stages:
            paths = self.stages.pop(0)
            interpreted = self.fault["package"] == "device" and "interpreted" not in paths[0]
            environment = {"TRITON_INTERPRET": "1"} if interpreted else {}
            self.child = started(self.folder / "tree", ["-x", *paths], self.folder / "output", environment)
        return self.child > 0

    def ended(self, status: int) -> dict[str, Any] | None:
        """The result, once there is one."""
        self.child = 0
        by = caught_by(status, self.folder / "output")
        if by is None and self.next():
            return None
        shutil.rmtree(self.folder, ignore_errors=True)
        return {
            "id": self.fault["id"],
            "caught": by is not None,
            "by": by,
            "seconds": round(time.monotonic() - self.begun),
        }


def try_all(faults: list[dict[str, Any]], source: Path, jobs: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The results of faults, `jobs` of them at a time."""
    for name in PRELOADED:  # once, not in every process
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    left, trials = list(reversed(faults)), dict[int, Trial]()
    while left or trials:
        while left and len(trials) < jobs:
            trial = Trial.of(left.pop(), source, quick)
            if trial.next():
                trials[trial.child] = trial
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(0.2)
            for late in [trial for trial in trials.values() if time.monotonic() - trial.begun > LIMIT]:
                os.killpg(late.child, signal.SIGKILL)
            continue
        trial = trials.pop(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        result = trial.ended(status)
        if result is not None:
            yield result
        else:
            trials[trial.child] = trial


def failing(results: dict[str, dict[str, Any]], tree: Path) -> set[str]:
    """The tests that caught faults and fail without one, too: they have caught nothing."""
    names = {result["by"].partition("[")[0] for result in results.values() if result["caught"]}
    failed: set[str] = set()
    for environment in ({}, {"TRITON_INTERPRET": "1"}):
        kernels = bool(environment)
        of_kind = sorted(
            name for name in names if "::" in name and ("on_device" in name or "staging" in name) is kernels
        )
        with tempfile.NamedTemporaryFile() as output:
            os.waitpid(started(tree, of_kind, Path(output.name), environment), 0)
            failed |= {name.partition("[")[0] for name in _NAMED.findall(Path(output.name).read_text(errors="replace"))}
    return failed


def report(faults: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> int:
    """Prints the faults that no test catches; 1 if one of them was caught before."""
    tried = [fault for fault in faults if fault["id"] in results]
    caught = [fault for fault in tried if results[fault["id"]]["caught"]]
    print(f"{len(caught)} of {len(tried)} faults are caught; {len(faults) - len(tried)} were not tried")
    survivors = [fault for fault in tried if fault not in caught]
    for fault in survivors:
        print(f"{'LOST' if fault.get('caught') else 'survives'}  {fault['id']}  {fault['file']}: {fault['wrong']}")
    return int(any(fault.get("caught") for fault in survivors))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="what to plant in; default: this checkout")
    parser.add_argument("--results", type=Path, help="JSON lines, one for each fault that was tried")
    parser.add_argument("--only", nargs="+", default=[], help="ids of faults, or packages")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="run the `first` tests of each fault only")
    parser.add_argument("--clean", action="store_true", help="run what caught faults where none is planted")
    parser.add_argument("--note", action="store_true", help="write into faults.json what the results say")
    parser.add_argument("--check", action="store_true", help="look for the anchors only")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    faults: list[dict[str, Any]] = json.loads(FAULTS.read_text())
    if options.only and not options.note:
        faults = [fault for fault in faults if {fault["id"], fault["package"]} & set(options.only)]
    if options.check:
        texts = {fault["file"]: (options.tree / fault["file"]).read_text() for fault in faults}
        gone = [fault["id"] for fault in faults if texts[fault["file"]].count(fault["old"]) != 1]
        print(f"{len(faults) - len(gone)} anchors are there; not: {' '.join(gone) or 'none'}")
        return int(bool(gone))
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = {line["id"]: line for line in map(json.loads, lines)}
    if options.report:
        return report(faults, results)
    if options.note:
        for fault in faults:
            if fault["id"] in results:
                fault["caught"] = (results[fault["id"]]["by"] or "").partition("[")[0] or None
        FAULTS.write_text(json.dumps(faults, indent=1, ensure_ascii=False) + "\n")
        return 0
    if options.clean:
        failed = failing(results, options.tree)
        print(f"without a fault, {len(failed)} tests fail that caught some: {' '.join(sorted(failed)) or 'none'}")
        return int(bool(failed))
    left = [fault for fault in faults if fault["id"] not in results]
    left.sort(key=lambda fault: fault["id"].rpartition("-")[2])  # some of each package first
    with options.results.open("a") as file:
        for result in try_all(left, options.tree, options.jobs, options.quick):
            if result["caught"] or not options.quick:
                results[result["id"]] = result
                print(json.dumps(result), file=file, flush=True)
            print(f"{result['id']:12} {result['seconds']:5} s  {result['by'] or 'survives'}", flush=True)
    return report(faults, results)


if __name__ == "__main__":
    sys.exit(main())
