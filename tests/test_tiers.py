"""The tiers (tiers.py): what starts a process is in the second, and is found if it is not named."""

from __future__ import annotations

import ast
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiers

HERE = Path(__file__).parent


def functions(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_everything_that_is_named_is_there() -> None:
    assert [file for file in (*tiers.FILES, *tiers.INTERPRETED_LONG) if not (HERE / file).is_file()] == []
    for name in (*tiers.TESTS, *tiers.FIRST):
        file, _, function = name.partition("[")[0].partition("::")
        assert function in functions(file), name
        assert file not in tiers.FILES, name


STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "spawned": lambda: _joined("spawn"),
    "forked": lambda: _joined("fork"),
    "os.system": lambda: os.system("true"),
    "os.posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
}


def _joined(kind: str) -> None:
    process = multiprocessing.get_context(kind).Process(target=int)
    process.start()
    process.join()


class Item:
    """A test, as the rule sees it."""

    def __init__(self, name: str, *marks: str) -> None:
        self.path, self.name, self.nodeid, self._marks = (
            HERE / "test_rule.py",
            name,
            f"tests/test_rule.py::{name}",
            marks,
        )

    def get_closest_marker(self, name: str) -> bool:
        return name in self._marks


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_test_of_the_first_tier_that_starts_a_process_fails(start: Callable[[], object]) -> None:
    seen = r"test_rule.py::test_a is in the first tier and starts a process: .* tests/tiers\.py"
    with pytest.raises(AssertionError, match=seen), tiers.stays_in_its_process(Item("test_a")):  # type: ignore[arg-type]
        start()


def test_one_that_stays_in_its_process_passes() -> None:
    with tiers.stays_in_its_process(Item("test_a")):  # type: ignore[arg-type]
        sum(range(10))


def test_one_of_the_second_tier_may_start_one() -> None:
    with tiers.stays_in_its_process(Item("test_a", "tier2")):  # type: ignore[arg-type]
        subprocess.run([sys.executable, "-c", ""], check=True)
