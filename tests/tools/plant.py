"""Plants faults, one at a time, and says which tests catch each: what the suite is worth.

    python tests/tools/plant.py --check                        whether every anchor and every noted test is there
    python tests/tools/plant.py --results FILE                 all of faults.json; goes on where FILE ends
    python tests/tools/plant.py --results FILE --only core-01  some of them
    python tests/tools/plant.py --results FILE --tier2         those that the first tier does not catch, by the second
    python tests/tools/plant.py --results FILE --note          writes into faults.json what FILE says
    python tests/tools/plant.py --forget                       takes tests out of faults.json that are gone

A fault is a text of a file and what stands there instead. `caught` in faults.json has the tests that fail with it, by
file: all of them, or the first five; `tier` is 2 where none of them is in the first tier. If code moves, edit the
anchor, not the fault. A fault that no test catches any more is an error, so a test may go if it is not the last one of
any fault.

    copy of the tree -> fault -> tests of the first tier that reach its line -> those that fail -> the text as it was

Of a fault in C, and of a line that runs on import, all tests of its package run. One that ends the process, or hangs,
has caught the fault; the others go on in a new process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = HERE / "faults.json"
HANGS, DEATHS = 400, 8  # seconds of one test; processes that end before their time
ENOUGH = 5  # functions that catch a fault: where there are so many, others are not looked for
MEMORY = 10 * 2**30
PRELOADED = ("torch", "tensordict", "numpy", "hypothesis", "_hypothesis_pytestplugin", "xdist", "transformers")
COMMON = "tests/test_pitfalls.py tests/test_misuse.py"
TESTS = {
    "core.c": f"tests/packed tests/nesting tests/layout tests/core tests/store {COMMON}",
    "core": f"tests/nesting tests/packed tests/layout tests/fields tests/core {COMMON}",
    "layout": f"tests/layout tests/nesting tests/packed {COMMON}",
    "fields": f"tests/fields tests/nesting {COMMON}",
    "nesting": f"tests/nesting tests/packed {COMMON}",
    "packed": f"tests/packed tests/nesting tests/views {COMMON}",
    "device": "tests/packed/test_same_rows.py tests/packed/test_device_work.py tests/nesting/test_device_read.py "
    "tests/layout/test_kernels.py tests/ops",
    "views": f"tests/views tests/dispatch {COMMON}",
    "dispatch": f"tests/dispatch {COMMON}",
    "planning": f"tests/planning {COMMON}",
    "replay": f"tests/replay {COMMON}",
    "store": "tests/store",
    "adapters": f"tests/adapters tests/replay {COMMON}",
    "ops": f"tests/ops tests/replay {COMMON}",
}
"""The tests of a package."""

Fault = dict[str, Any]
Reach = dict[str, dict[str, list[str]]]
"""Of a file, and a line in it, the tests that run it."""


# -------------------------------------------------------------------- one process of tests


class Recorder:
    """A plugin of pytest that writes what begins, ends and fails, and runs the tests that are wanted and not done, of
    each function at most so many cases. It stops when enough functions have failed."""

    coverage: Any = None

    def __init__(
        self, file: Path, wanted: Collection[str] | None, done: Collection[str], cases: int, failed: Collection[str]
    ) -> None:
        self._wanted, self._done, self._cases = wanted, done, cases
        self._failed = {function_of(test) for test in failed}
        self._file = file.open("a", buffering=1)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(trylast=True)  # of the tests of a tier
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        functions: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if self._wanted is None or item.nodeid in self._wanted:
                functions[function_of(item.nodeid)].append(item)
        chosen = {item for all_cases in functions.values() for item in spread(all_cases, self._cases)}
        items[:] = [item for item in items if item in chosen and item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print("fails", report.nodeid, file=self._file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print("begins", nodeid, file=self._file)
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        print("ends", nodeid, file=self._file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print("fails", report.nodeid, file=self._file)
            self._failed.add(function_of(report.nodeid))
            if len(self._failed) >= ENOUGH and self.coverage is None:
                self._session.shouldstop = "enough"


def function_of(test: str) -> str:
    return test.partition("[")[0]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, from the first to the last."""
    if len(items) <= most:
        return [*items]
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)] if most > 1 else [items[0]]


def started(tree: Path, paths: Iterable[str], plugin: Callable[[], Recorder], output: Path, marks: str) -> int:
    """A process, forked from this one, that runs tests in a tree; its number."""
    child = os.fork()
    if child:
        return child
    os.setsid()  # so that all that it starts can be ended
    line = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(line, 1)
    os.dup2(line, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "planted"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "maskpack"]:
        del sys.modules[name]  # of this checkout, in which nothing is planted
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "--timeout", "0", "--tb", "line", "-m", marks, *paths]
    recorder = plugin()
    status = pytest.main(options, plugins=[recorder])
    if recorder.coverage is not None:
        recorder.coverage.stop()
        recorder.coverage.save()
    os._exit(int(status))


@dataclass
class Run:
    """Tests in a tree, in as many processes as it takes."""

    tree: Path
    folder: Path
    paths: list[str]
    wanted: Collection[str] | None
    cases: int
    marks: str = "not tier2 and not every_case"
    measured: Callable[[], Any] = lambda: None
    child: int = 0
    deaths: int = 0
    failed: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    @property
    def record(self) -> Path:
        return self.folder / "record"

    def start(self) -> None:
        self.record.write_text("")
        self.child = started(self.tree, self.paths, self.plugin, self.folder / "output", self.marks)

    def plugin(self) -> Recorder:
        recorder = Recorder(self.record, self.wanted, self.done, self.cases, self.failed)
        recorder.coverage = self.measured()
        return recorder

    def hangs(self) -> bool:
        return time.time() - self.record.stat().st_mtime > HANGS

    def ended(self, status: int) -> bool:
        """Takes in what a process did; whether no other one is needed."""
        open_test = None
        for line in self.record.read_text().splitlines():
            what, _, test = line.partition(" ")
            if what == "fails":
                self.failed.add(test)
            open_test = test if what == "begins" else None if what == "ends" else open_test
            self.done.add(test)
        code = os.waitstatus_to_exitcode(status)
        if open_test is None:
            if code not in (0, 1, 2, 5) or (code == 2 and not self.failed):  # 2: files that cannot be collected
                raise RuntimeError(f"pytest ended with {code}: {(self.folder / 'output').read_text()[-2000:]}")
            return True
        self.failed.add(open_test)
        self.deaths += 1
        return self.deaths > DEATHS


def run_all(runs: Iterator[Run], jobs: int) -> Iterator[Run]:
    """The runs when they have ended, `jobs` of them at a time."""
    going: dict[int, Run] = {}
    while True:
        for run in itertools.islice(runs, jobs - len(going)):
            run.start()
            going[run.child] = run
        if not going:
            return
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(0.1)
            for late in [run for run in going.values() if run.hangs()]:
                os.killpg(late.child, signal.SIGKILL)
            continue
        run = going.pop(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if run.ended(status):
            yield run
        else:
            run.start()
            going[run.child] = run


# -------------------------------------------------------------------- trees and faults


def copied(source: Path, folder: Path) -> Path:
    """A copy of a tree. Modification times are kept, so that compiled modules count."""
    return Path(shutil.copytree(source, folder / "tree", ignore=shutil.ignore_patterns(".git", "results", ".venv")))


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in the tree. Raises ValueError unless its anchor is there once."""
    file = tree / fault["file"]
    text, times = file.read_text(), file.stat().st_mtime
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['id']}: {fault['file']} has its anchor {text.count(fault['old'])} times; expected 1")
    core = tree / "maskpack/core"
    compiled = {library: library.read_bytes() for library in core.glob("*.so")} if file.suffix in (".c", ".h") else {}
    try:
        file.write_text(text.replace(fault["old"], fault["new"]))
        os.utime(file, (times + 7, times + 7))  # so that no compiled module counts
        if compiled:
            from maskpack.core.build import compile_core

            compile_core(core, ["-O1", "-w"])
        yield
    finally:
        file.write_text(text)
        os.utime(file, (times, times))
        for library, data in compiled.items():
            library.unlink()  # other processes have it mapped
            library.write_bytes(data)


def lines_of(fault: Fault, tree: Path) -> range:
    before = (tree / fault["file"]).read_text().partition(fault["old"])[0].count("\n") + 1
    return range(before, before + fault["old"].count("\n") + 1)


def selected(fault: Fault, tree: Path, reach: Reach) -> tuple[list[str], set[str] | None]:
    """The files that are run for a fault, and the tests in them; None for all."""
    paths = [path for path in TESTS[fault["package"]].split() if (tree / path).exists()]
    found = reach.get(fault["file"], {})
    tests = set[str]().union(*(found.get(str(line), ()) for line in lines_of(fault, tree)))
    tests.discard("")  # the import
    if not tests:
        return paths, None
    return sorted({test.partition("::")[0] for test in tests}), tests


def try_faults(
    faults: list[Fault], source: Path, jobs: int, reach: Reach, cases: int, second: bool
) -> Iterator[tuple[Fault, Run, float]]:
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        free = []
        for job in range(jobs):
            (Path(name) / str(job)).mkdir()
            free.append(Path(name) / str(job))
            copied(source, free[-1])
        held: dict[int, tuple[Fault, contextlib.ExitStack, float]] = {}

        def runs() -> Iterator[Run]:
            for fault in faults:
                folder = free.pop()
                tree = folder / "tree"
                paths, tests = (TESTS[fault["package"]].split(), None) if second else selected(fault, tree, reach)
                stack = contextlib.ExitStack()
                stack.enter_context(planted(fault, tree))
                run = Run(tree, folder, paths, tests, cases, *["tier2"] * second)
                held[id(run)] = fault, stack, time.monotonic()
                yield run

        for run in run_all(runs(), jobs):
            fault, stack, begun = held.pop(id(run))
            stack.close()
            free.append(run.folder)
            yield fault, run, time.monotonic() - begun


def reached(faults: list[Fault], source: Path, jobs: int) -> Reach:
    """Which tests of the first tier run which line that has a fault."""
    from coverage import Coverage, CoverageData

    found: Reach = defaultdict(dict)
    faulty: dict[str, set[int]] = defaultdict(set)
    for fault in faults:
        faulty[fault["file"]] |= {*lines_of(fault, source)}
    with tempfile.TemporaryDirectory(prefix="reached-") as name:
        tree = copied(source, Path(name))
        files = sorted((file for file in (tree / "tests").rglob("test_*.py")), key=lambda file: file.stat().st_size)
        folders = [Path(name) / str(job) for job in range(jobs)]

        def measured(job: int) -> Coverage:
            tool = Coverage(str(folders[job] / "data"), source=[str(tree / "maskpack")], config_file=False)
            tool.start()
            return tool

        def runs() -> Iterator[Run]:
            for job, folder in enumerate(folders):
                folder.mkdir()
                own = [str(file.relative_to(tree)) for file in files[job::jobs]]
                yield Run(tree, folder, own, None, sys.maxsize, measured=lambda job=job: measured(job))

        for run in run_all(runs(), jobs):
            if run.deaths:
                raise RuntimeError(f"a process that measured died in {sorted(run.failed)}, and what it had is lost")
        for folder in folders:
            data = CoverageData(str(folder / "data"))
            data.read()
            for file in data.measured_files():
                name = str(Path(file).relative_to(tree))
                contexts = data.contexts_by_lineno(file)
                for line in faulty[name] & contexts.keys():
                    found[name][str(line)] = sorted({*found[name].get(str(line), ()), *contexts[line]})
    return found


# -------------------------------------------------------------------- what is noted


def functions(tests: Iterable[str]) -> dict[str, list[str]]:
    """By file, the functions of tests."""
    found: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        file, _, name = function_of(test).partition("::")
        found[file.removeprefix("tests/")].add(name)
    return {file: sorted(names) for file, names in sorted(found.items())}


def tests_of(tree: Path) -> dict[str, set[str]]:
    """By file, the functions that are tests."""
    return {
        file.relative_to(tree / "tests").as_posix(): {
            node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
        }
        for file in (tree / "tests").rglob("test_*.py")
    }


def check(faults: list[Fault], tree: Path) -> list[str]:
    """What is wrong with the list of faults."""
    wrong, there = [], tests_of(tree)
    for fault in faults:
        count = (tree / fault["file"]).read_text().count(fault["old"]) if (tree / fault["file"]).exists() else 0
        if count != 1:
            wrong.append(f"{fault['id']}: {fault['file']} has its anchor {count} times")
        gone = [
            f"{file}::{name}"
            for file, names in fault.get("caught", {}).items()
            for name in names
            if name not in {*there.get(file, ()), ""}  # a file that cannot be collected
        ]
        if gone:
            wrong.append(f"{fault['id']}: no test {', '.join(gone)}")
        if "caught" in fault and not fault["caught"]:
            wrong.append(f"{fault['id']}: no test catches it: {fault['wrong']}")
    return wrong


def _is_second(fault: Fault) -> bool:
    return fault.get("tier") == 2


def _is_open(fault: Fault) -> bool:
    return "caught" not in fault


def note(faults: list[Fault], results: Iterable[dict[str, Any]]) -> None:
    for result in results:
        for fault in faults:
            if fault["id"] == result["id"] and (result["caught"] or "tier" not in fault):
                fault["caught"] = result["caught"]
                fault.pop("tier", None)
                if result["tier"] == 2:
                    fault["tier"] = 2


def forget(faults: list[Fault], there: dict[str, set[str]]) -> None:
    """Takes out the tests that are gone."""
    for fault in faults:
        if "caught" in fault:
            left = {
                file: [*filter(there.get(file, set()).__contains__, names)] for file, names in fault["caught"].items()
            }
            fault["caught"] = {file: names for file, names in left.items() if names}


def write(faults: list[Fault]) -> None:
    """One line for each file of `caught`."""
    text = json.dumps(faults, indent=1, ensure_ascii=False)
    FAULTS.write_text(_joined_lists(text) + "\n")


def _joined_lists(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside:
            lines[-1] += line.strip() + (" " if line.endswith(",") else "")
            inside = not line.strip().startswith("]")
        else:
            lines.append(line)
            inside = line.endswith(": [")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="what to plant in; default: this checkout")
    parser.add_argument("--results", type=Path, help="JSON lines, one for each fault that was tried")
    parser.add_argument("--only", nargs="+", default=[], help="ids of faults, or packages")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--reach", type=Path, help="JSON of the tests that reach each faulty line; made if it is not there"
    )
    parser.add_argument("--cases", type=int, default=4, help="of each test function, so many cases; default: 4")
    parser.add_argument(
        "--tier2", action="store_true", help="the second tier, for faults that the first does not catch"
    )
    parser.add_argument("--note", action="store_true", help="write into faults.json what the results say")
    parser.add_argument("--forget", action="store_true", help="take tests out of faults.json that are gone")
    parser.add_argument("--check", action="store_true", help="look for anchors and names only")
    options = parser.parse_args()
    faults: list[Fault] = json.loads(FAULTS.read_text())
    if options.check:
        wrong = check(faults, options.tree)
        second, open_ = (sum(map(wanted, faults)) for wanted in (_is_second, _is_open))
        print(
            *wrong,
            f"{len(faults)} faults; {second} for the second tier; {open_} not tried; {len(wrong)} wrong",
            sep="\n",
        )
        return int(bool(wrong))
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    results = [json.loads(line) for line in lines]
    if options.note or options.forget:
        note(faults, results)
        if options.forget:
            forget(faults, tests_of(options.tree))
        write(faults)
        return 0
    tried = {(result["id"], result["tier"]) for result in results} | {
        (result["id"], 2) for result in results if result["caught"]
    }
    tier = 2 if options.tier2 else 1
    chosen = [
        fault
        for fault in faults
        if (not options.only or {fault["id"], fault["package"]} & set(options.only))
        and (fault["id"], tier) not in tried
    ]
    chosen.sort(key=lambda fault: fault["id"].rpartition("-")[2])  # some of each package first
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["TRITON_INTERPRET"] = "1"  # when Triton is imported, with torch
    for name in PRELOADED:  # once, not in every process
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if options.reach and not options.reach.exists():
        options.reach.write_text(json.dumps(reached(faults, options.tree, options.jobs)))
    reach: Reach = json.loads(options.reach.read_text()) if options.reach else {}
    caught = 0
    with options.results.open("a") as file:
        for fault, run, seconds in try_faults(chosen, options.tree, options.jobs, reach, options.cases, options.tier2):
            found = functions(run.failed)
            result = {"id": fault["id"], "tier": tier, "caught": found, "deaths": run.deaths, "ran": len(run.done)}
            print(json.dumps({**result, "seconds": round(seconds)}), file=file, flush=True)
            first = next((f"{name}::{tests[0]}" for name, tests in found.items()), "SURVIVES")
            count = sum(map(len, found.values()))
            print(f"{fault['id']:12} {seconds:5.0f} s  {len(run.done):5} ran, {count:4} catch it  {first}", flush=True)
            caught += bool(found)
    print(f"{caught} of {len(chosen)} faults are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
