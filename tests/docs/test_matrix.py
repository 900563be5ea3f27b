"""The tables of versions in docs/versions.md come from .ci/matrix.json, which .ci/matrix runs, and from pyproject.toml.

`python tests/docs/test_matrix.py` writes the tables into the page.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
PAGE = ROOT / "docs" / "versions.md"
MATRIX: dict[str, Any] = json.loads((CI / "matrix.json").read_text())
COLUMNS = ("python", "torch", "tensordict", "transformers", "what", "by")
HEAD = "| Python | torch | tensordict | transformers | what | run by |\n|---|---|---|---|---|---|\n"
PACKAGES = ("Python", "torch", "tensordict", "Ray", "transformers", "verl", "TRL", "TorchRL", "TransferQueue")
PACKAGES_HEAD = "| | accepted | tested |\n|---|---|---|\n"
UNABLE = sorted(path.name for path in CI.glob("*.txt") if path.name != "constraints.txt")


def table() -> str:
    layers = [layer | {"by": ".ci/matrix"} for layer in MATRIX["layers"].values()]
    rows = [[str(row.get(column, "")) for column in COLUMNS] for row in (*MATRIX["other runs"], *layers)]
    for row in rows:
        row[-1] = f"`{row[-1]}`" if row[-1].startswith(".ci/") else row[-1]
    return HEAD + "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def packages_table() -> str:
    return PACKAGES_HEAD + "".join(
        f"| {name} | {accepted(name)} | {', '.join(run_with(name))} |\n" for name in PACKAGES
    )


def accepted(name: str) -> str:
    """What pyproject.toml asks for."""
    project = (ROOT / "pyproject.toml").read_text()
    if name == "Python":
        minors = re.findall(r"Python :: (3\.\d+)", project)
        return f"{minors[0]} to {minors[-1]}"
    found = re.search(rf'"{name}([<>=][^"]*)"', project, re.IGNORECASE)
    assert found is not None, name
    return found[1].replace(",", ", ")


def run_with(name: str) -> list[str]:
    """The versions of all runs; `newest` where a run names none."""
    found: set[str] = set()
    for run in (*MATRIX["layers"].values(), *MATRIX["other runs"]):
        found.add(run.get(name.lower(), "").partition(",")[0])
        for pin in (*run.get("pins", ()), *run.get("packages", ()), *run.get("alone", ())):
            package, _, version = pin.partition("==")
            if package.lower() == name.lower():
                found.add(version.removesuffix(".*") or "newest")
    shown = [version for version in found if version and not any(other.startswith(f"{version}.") for other in found)]
    return sorted(shown, key=lambda version: [int(part) if part.isdigit() else 999 for part in version.split(".")])


def unable(name: str) -> list[str]:
    """The tests of a list, without its comments."""
    return [line for line in (CI / name).read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("made", [table, packages_table])
def test_the_page_has_the_table(made: Callable[[], str]) -> None:
    assert made() in PAGE.read_text(), f"write it with `python {Path(__file__).relative_to(ROOT)}`"


def test_versions_are_in_order_and_a_longer_one_stands_for_a_shorter_one() -> None:
    versions = run_with("tensordict")
    assert versions[0] == MATRIX["layers"]["oldest"]["tensordict"]
    assert "0.15" not in versions
    assert run_with("Ray") == ["2.40.0", "newest"]


def test_other_runs_install_what_the_table_says() -> None:
    for run in MATRIX["other runs"]:
        script = (ROOT / run["by"]).read_text() if run["by"].startswith(".ci/") else ""
        for pin in run.get("pins", ()):
            assert f" {pin}" in script, pin


def test_every_file_of_the_layers_is_there() -> None:
    for layer in MATRIX["layers"].values():
        for test in layer["tests"]:
            assert is_there(test), test
        assert set(layer.get("unable", ())) <= set(UNABLE)


@pytest.mark.parametrize("name", UNABLE)
def test_every_test_that_is_left_out_is_there_once_and_says_who_would_notice(name: str) -> None:
    tests = unable(name)
    assert tests
    assert len(tests) == len(set(tests))
    assert [test for test in tests if not is_there(test)] == []
    lines = (CI / name).read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    assert any(" would notice: " in line for line in lines[:first])


def is_there(test: str) -> bool:
    """Whether a test exists. Its parameters are not looked at."""
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return False
    wanted = name.partition("[")[0]
    code = ast.walk(ast.parse((ROOT / file).read_text()))
    return not wanted or wanted in {node.name for node in code if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    text = PAGE.read_text()
    for head, made in ((PACKAGES_HEAD, packages_table()), (HEAD, table())):
        begin = text.index(head)
        end = text.index("\n\n", begin) + 1
        text = text[:begin] + made + text[end:]
    PAGE.write_text(text)
