"""The page of all figures is that of the results."""

from __future__ import annotations

from pathlib import Path

from bench import __main__ as command

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_docs_is_that_of_the_results(tmp_path: Path) -> None:
    command.main(["all", "--report", str(tmp_path / "figures.md"), "--recorded", str(ROOT / "bench/results")])
    assert (tmp_path / "figures.md").read_text() == (ROOT / "docs" / "figures.md").read_text()
