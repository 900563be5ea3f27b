"""Random cases of one kind, each made from its seed: `python -m tests.tools.fuzz NAME --count N --seed S`.

    batches     sequences of batches of changing kinds, as plans are remembered, in threads too
    core        random tables through the compiled core alone                    --library FILE
    dispatch    random sequences of calls on a local Ray                         --nodes
    documents   rows that hold several documents, in a replay
    jagged      batches of jagged columns without masks, against loops over their rows
    log         processes that write a RolloutLog die, disks lose power and flip bits, others read   --kind KIND ...
    nested      nested batches whose entry LAYOUTS or fields were changed
    queue       sequences of puts and gets of TransferQueue, and its processes die while others put and get
    rows        programs of operations on rows, fields and tokens, against lists of what each row holds
    wire        broken files; what was read must decode                          --table FILE ...

A case that fails is printed with the command that plays it again; the end prints what was done. `--jobs` plays cases in
several processes, and then what hangs or ends its process is a failure, too. `--sanitize` does it with a core that is
compiled with ASan and UBSan.

A fuzzer is a module `fuzz_NAME` with `play(seed)`, which plays a case and counts what came of it, and perhaps
`COUNT`, `options(parser)`, `session(given)`, which prepares, or gives a context in which cases are played, and
`cases(given)` in place of seeds.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("batches", "core", "dispatch", "documents", "jagged", "log", "nested", "queue", "rows", "wire")
MOST_FAILURES = 5
SECONDS = 20
"""The longest that a case takes in a process of its own."""
MOST_AT_ONCE = 64
"""The MiB that --sanitize lets be reserved at once."""
Case = tuple[str, Callable[[], Counter[str]]]


Found = tuple[Counter[str], list[str]]
"""Counts of what came of cases, and the failures."""


def run(cases: Iterable[Case], now: Any = None) -> Found:
    """Plays cases, until too many have failed. With `now`, it has the name of the case, which ends the process if it
    hangs."""
    counts, failures = Counter[str](), list[str]()
    for name, play in cases:
        if now is not None:
            now.value = name.encode()
            signal.alarm(SECONDS)
        counts["cases"] += 1
        try:
            counts += play()
        except Exception:
            failures.append(f"{name}\n{traceback.format_exc()}")
            print(failures[-1], flush=True)
        signal.alarm(0)
        if len(failures) >= MOST_FAILURES:
            break
    return counts, failures


def run_apart(jobs: Iterable[Iterable[Case]]) -> Found:
    """The same, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    crew: list[Any] = []
    for cases in jobs:
        now = context.Array("c", 200, lock=False)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda cases, now, end: end.send(run(cases, now)), args=(cases, now, theirs))
        process.start()
        theirs.close()
        crew.append((process, ours, now))
    counts, failures = Counter[str](), list[str]()
    for process, ours, now in crew:
        try:
            more, others = ours.recv()
            counts, failures = counts + more, failures + others
        except EOFError:
            process.join()
            failures.append(f"{now.value.decode()}\nexit status {process.exitcode}")
            print(failures[-1], flush=True)
    return counts, failures


def main() -> int:
    sys.path[:0] = [str(HERE.parent), *(str(path) for path in HERE.parent.iterdir() if path.is_dir())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--count", type=int, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 for this one alone")
    parser.add_argument("--sanitize", action="store_true")
    given, more = parser.parse_known_args()
    fuzzer = importlib.import_module(f"fuzz_{given.name}")
    getattr(fuzzer, "options", id)(parser)
    given = parser.parse_args()
    if given.sanitize:
        import sanitized

        words = [word for word in sys.argv[1:] if word != "--sanitize"]
        options = f":max_allocation_size_mb={MOST_AT_ONCE}"
        # not with -m, which finds the package in the working directory
        return sanitized.run(sys.executable, __file__, *words, "--jobs", str(max(given.jobs, 1)), options=options)
    warnings.simplefilter("ignore")
    count = getattr(fuzzer, "COUNT", 100) if given.count is None else given.count

    def seeded(seed: int) -> Case:
        words = " ".join([given.name, *more])
        return f"python -m tests.tools.fuzz {words} --count 1 --seed {seed}", lambda: fuzzer.play(seed)

    def cases(first: int = 0, step: int = 1) -> Iterable[Case]:
        return (seeded(seed) for seed in range(given.seed + first, given.seed + count, step))

    begun = time.monotonic()
    with getattr(fuzzer, "session", nullcontext)(given) or nullcontext():
        if hasattr(fuzzer, "cases") and (own := fuzzer.cases(given)) is not None:
            counts, failures = run_apart([own]) if given.jobs else run(own)
        elif given.jobs:
            counts, failures = run_apart(cases(job, given.jobs) for job in range(given.jobs))
        else:
            counts, failures = run(cases())
    done = dict(sorted(counts.items()))
    print(f"{done}, {len(failures)} failed, {time.monotonic() - begun:.0f} s", flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
