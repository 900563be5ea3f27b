"""`python -m bench CASE [--rows N] [--rounds K] [--json FILE]`: a table on stdout, progress on stderr.

`python -m bench dispatch --plot FILE` draws a chart too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import dispatch, endurance, faults, nest, payload
from bench.measure import keep_memory
from bench.report import table, write_json

CASES = {
    "payload": payload.run,
    "nest": nest.run,
    "dispatch": dispatch.run,
    "endurance": lambda rows, rounds: endurance.run(1000 * rounds),
    "faults": lambda rows, rounds: faults.run(rounds),
}
AS_IT_COMES = {"dispatch", "endurance", "faults"}
"""Cases whose memory is what trainers have: glibc is not told to keep what is freed."""
_HELP = """payload: bytes on the wire; nest: time to nest and restore; dispatch: time to a Ray actor, and over a link;
endurance: memory over 1000 dispatches a round; faults: rounds of actors that die, objects that get lost"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of maskpack.")
    parser.add_argument("case", choices=CASES, help=_HELP)
    parser.add_argument("--rows", type=_positive, default=256, help="rows of the batch (default 256)")
    parser.add_argument("--rounds", type=_positive, default=9, help="timed rounds, medians are shown (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="dispatch: also draw the times there, as SVG")
    given = parser.parse_args(arguments)
    if given.plot is not None and given.case != "dispatch":
        parser.error(f"--plot is for dispatch; {given.case} has no chart")
    if given.case not in AS_IT_COMES:
        keep_memory()
    more = {} if given.plot is None else {"plot": given.plot}
    rows = CASES[given.case](given.rows, given.rounds, **more)
    print(table(rows))
    if given.json is not None:
        write_json(rows, given.json)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    main()
