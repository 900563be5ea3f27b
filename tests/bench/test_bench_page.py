"""The page of all figures: what it shows of records, that the one in the docs is current, and its command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import __main__ as command
from bench.page import comparisons, page, recorded, write_page
from bench.page_chart import chart

ROOT = Path(__file__).parents[2]


def row(name: str, value: float, unit: str = "x", target: str | None = None, met: bool | None = None) -> dict[str, Any]:
    return {"case": "a case", "name": name, "value": value, "unit": unit, "target": target, "met": met}


RECORD = {
    "machine": {"cpu": "some cpu", "cores": 2, "memory_gib": 3.5},
    "versions": {"python": "3.11", "torch": "2.13"},
    "commit": "abc",
    "rows": [
        row("padded / ours", 4.25, target=">= 4", met=True),
        row("ours / floor", 1.504, target="<= 1.5", met=False),
        row("ratio without a target", 2.0),
        row("bytes a row", 1234.0, "bytes"),
        row("time | of all", 7.26, "ms", "<= 8", True),
    ],
}


def test_the_page_shows_every_comparison_and_where_it_was_measured() -> None:
    text = page({"some": RECORD}, "chart.svg")
    assert "3 figures have a target, 2 reach it." in text
    assert "2 cores of some cpu, 3.5 GiB; python 3.11, torch 2.13; commit abc." in text
    assert "| padded / ours | 4.25 x | >= 4 | met |" in text
    assert "| ours / floor | 1.50 x | <= 1.5 | **missed** |" in text
    assert "| ratio without a target | 2.00 x |  |  |" in text
    assert "| time \\| of all | 7.3 ms | <= 8 | met |" in text
    assert "bytes a row" not in text  # neither a ratio nor with a target


def test_bars_point_to_the_side_of_their_verdict_and_stay_on_the_page() -> None:
    far = [row("far", 1e9, target=">= 1", met=True)]
    root = ElementTree.fromstring(chart({"some": comparisons(RECORD), "far": far, "none": []}))
    bars = [one for one in root.iter() if one.get("class") in ("met", "missed")]
    assert [one.get("class") for one in bars] == ["met", "missed", "met"]
    line = next(one for one in root.iter() if one.tag.endswith("line"))
    middle, width = float(line.get("x1", "")), float(root.get("width", ""))
    (better, worse, far_bar) = [(float(one.get("x", "")), float(one.get("width", ""))) for one in bars]
    assert better[0] == pytest.approx(middle)
    assert sum(worse) == pytest.approx(middle, abs=1)
    assert sum(far_bar) < width


def test_the_page_of_the_docs_is_that_of_the_results(tmp_path: Path) -> None:
    write_page(recorded(ROOT / "bench/results"), tmp_path / "figures.md")
    for name in ("figures.md", "figures.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def test_the_command_shows_what_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(RECORD))
    command.main(["all", "--report", str(tmp_path / "out.md"), "--recorded", str(tmp_path)])
    assert (tmp_path / "out.md").read_text() == page({"one": RECORD}, "out.svg")
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'none'} has no results")):
        recorded(tmp_path / "none")


def test_all_measures_each_case_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(words: list[str], check: bool) -> None:
        assert check
        seen.append(words[3:])
        Path(words[-1]).write_text(json.dumps(RECORD))

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    command.main(["all", "--report", str(tmp_path / "new" / "page.md"), "--rows", "700", "--rounds", "3"])
    files = [
        "payload",
        "nest",
        "dispatch",
        "plan",
        "ops",
        "replay",
        "prefixes",
        "routes",
        "replay-reference",
        "payload-tau",
        "dispatch-tau",
        "plan-tau",
        "replay-tau",
        "payload-mooncake",
        "dispatch-mooncake",
        "plan-mooncake",
        "replay-mooncake",
    ]
    for words, file in zip(seen, files, strict=True):
        case, *workload = file.split("-")
        rows = "200" if workload == ["tau"] else "700"
        named = ["--workload", *workload] if workload else []
        assert words[:-1] == [case, "--rows", rows, "--rounds", "3", *named, "--json"]
        assert Path(words[-1]).name == f"{file}.json"
    assert (tmp_path / "new" / "page.md").read_text().count("\n## ") == len(files)
    seen.clear()
    command.main(["all", "--report", str(tmp_path / "new" / "page.md")])
    assert {words[2] for words in seen} == {"256", "200"}
