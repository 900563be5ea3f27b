"""One page of all comparisons, Markdown: of what `python -m bench all` measures, and of bench/results for the site.

    results files  {name: rows, machine, versions, commit}
      page         for each: machine, versions, commit, and its comparisons

A comparison is a figure that has a target, or is a ratio. The other figures stand in the results files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
_DIGITS = {"ms": 1, "us": 1, "x": 2, "GiB": 2, "%": 3}


def recorded(folder: Path) -> dict[str, Record]:
    """The results files of a folder, by name. Raises FileNotFoundError if there is none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder} has no results (*.json)")
    return {file.stem: json.loads(file.read_text()) for file in files}


def write_page(folder: Path, path: Path) -> None:
    """The page of the results files of a folder."""
    path.write_text(page(recorded(folder)))


def comparisons(record: Record) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if row["target"] is not None or row["unit"] == "x"]


def page(records: Mapping[str, Record]) -> str:
    """The Markdown."""
    rows = [row for record in records.values() for row in comparisons(record) if row["target"] is not None]
    met = sum(bool(row["met"]) for row in rows)
    lines = [
        "---",
        "nosearch: true",
        "---",
        "",
        "# All figures",
        "",
        f"{len(rows)} figures have a target, {met} reach it. [Benchmarks](benchmarks.md) explains ratios and floors.",
    ]
    for name, record in records.items():
        lines += ["", f"## {name}", "", _where(record), *_table(comparisons(record))]
    return "\n".join(lines) + "\n"


def _where(record: Record) -> str:
    machine = record["machine"]
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{gpu}{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB; {versions}; commit "
        f"{record['commit']}{'' if record.get('complete', True) else '; the run was stopped'}."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    case = None
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            yield from ("", f"| {_cell(case)} | | target | |", "|---|---:|---:|---|")
        verdict = "" if row["met"] is None else "met" if row["met"] else "**missed**"
        value = f"{row['value']:,.{_DIGITS.get(row['unit'], 0)}f} {row['unit']}"
        yield f"| {_cell(row['name'])} | {value} | {row['target'] or ''} | {verdict} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
