"""Kernels interpreted on the host (interpreted.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import GROUPS, HERE, needed, run_interpreted

pytestmark = needed


@pytest.mark.parametrize("file", GROUPS["ops"])
def test_kernels_interpreted_on_the_host(file: str) -> None:
    run_interpreted(file)


def test_no_marked_file_is_forgotten() -> None:
    files = {path.relative_to(HERE).as_posix(): path.read_text() for path in HERE.rglob("test_*.py")}
    signs = (
        "mark.interpreter",
        "kernel_test",
        "kernel_marks",
        "from kernels import PLACES",
        "from output_layers import",
    )
    marked = {name for name, text in files.items() if any(sign in text for sign in signs)}
    assert marked - {Path(__file__).name} == {file for group in GROUPS.values() for file in group}
    assert {name for name in files if name.startswith("test_interpreted_")} == {
        f"test_interpreted_{group}.py" for group in GROUPS
    }
