"""`python -m bench CASE [--rows N] [--rounds K] [--json FILE]`: a table on stdout, progress on stderr."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import nest, payload
from bench.measure import keep_memory
from bench.report import table, write_json

CASES = {"payload": payload.run, "nest": nest.run}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of maskpack.")
    parser.add_argument("case", choices=CASES, help="payload: bytes on the wire; nest: time to nest and restore")
    parser.add_argument("--rows", type=_positive, default=256, help="rows of the batch (default 256)")
    parser.add_argument("--rounds", type=_positive, default=9, help="timed rounds, medians are shown (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    given = parser.parse_args(arguments)
    keep_memory()
    rows = CASES[given.case](given.rows, given.rounds)
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
