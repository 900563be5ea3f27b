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


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_test_of_the_first_tier_that_starts_a_process_fails(
    start: Callable[[], object], request: pytest.FixtureRequest
) -> None:
    with (
        pytest.raises(AssertionError, match=r"test_a_test_of_.* starts a process: .* tests/tiers\.py"),
        tiers.stays_in_its_process(request.node),
    ):
        start()


def test_one_that_stays_in_its_process_passes(request: pytest.FixtureRequest) -> None:
    with tiers.stays_in_its_process(request.node):
        sum(range(10))


def test_one_of_the_second_tier_may_start_one(request: pytest.FixtureRequest) -> None:
    request.node.add_marker("tier2")
    with tiers.stays_in_its_process(request.node):
        subprocess.run([sys.executable, "-c", ""], check=True)
