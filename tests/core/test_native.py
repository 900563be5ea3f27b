"""The compiled core: that it is there and the right one, and that it reads and writes as naive loops do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import maskpack
from maskpack.core import native

PACKAGE = Path(maskpack.__file__).parent


def imported(package: Path) -> str:
    """What an import of a copy of the package prints to the error stream."""
    done = subprocess.run(
        [sys.executable, "-c", "import maskpack"], cwd=package.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    return done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return shutil.copytree(PACKAGE, tmp_path / "maskpack", ignore=shutil.ignore_patterns("__pycache__"))


def test_a_missing_core_says_what_to_do(package: Path) -> None:
    (package / "core/_core.so").unlink()
    assert "ImportError: maskpack: its compiled core is missing (" in imported(package)


def test_a_core_of_another_version_says_what_to_do(package: Path) -> None:
    binding = package / "core/native.py"
    binding.write_text(binding.read_text().replace(f"VERSION = {native.VERSION}\n", "VERSION = 987\n"))
    shown = imported(package)
    assert f"its compiled core has version {native.VERSION}; expected 987. Install maskpack again" in shown


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("Field", '"pad_high", "row_pads", "stray")', '"pad_high", "row_pads", "stray", "more")'),
        ("Entry", '"size", "number", "first", "second"', '"size", "number", "first"'),
        ("Job", '("row_pads", PLACE)', '("row_pads", PLACE), ("more", PLACE)'),
        ("Source", "AXIS_NUMBERS, SOURCE_NUMBERS = 6, 6, 14", "AXIS_NUMBERS, SOURCE_NUMBERS = 6, 6, 15"),
    ],
)
def test_a_struct_of_another_size_says_what_to_do(name: str, text: str, changed: str, package: Path) -> None:
    binding = package / "core/native.py"
    code = binding.read_text()
    assert text in code
    binding.write_text(code.replace(text, changed))
    shown = imported(package)
    assert f"ImportError: maskpack: {name} has " in shown
    assert "bytes in its compiled core; expected " in shown


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8"])
def test_a_scan_finds_the_spans_that_a_loop_finds(dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads_for", lambda nbytes: threads)
    rng = np.random.default_rng(0)
    mask = np.zeros((40, 700), dtype)
    for row in range(40):
        for begin in rng.integers(0, 700, rng.integers(0, 12)):
            mask[row, begin : begin + rng.integers(1, 90)] = 1
    at, size, stride = mask[:, 3:].ctypes.data, mask.itemsize, mask.strides[0]
    (width, table, bounds, _), value = native.scan(native.Mask(at, size, 40, 687, stride, -1))
    spans = [
        (row, column)
        for row in range(40)
        for column in range(3, 690)
        if mask[row, column] and (column == 3 or not mask[row, column - 1])
    ]
    assert np.repeat(np.arange(40), np.diff(table.splits)).tolist() == [row for row, _ in spans]
    assert (table.starts + 3).tolist() == [column for _, column in spans]
    assert bounds.tolist() == [0, *np.cumsum((mask[:, 3:690] != 0).sum(1)).tolist()]
    assert (width, value) == (687, 1)
    mask[20, 400] = 3
    assert native.scan(native.Mask(at, size, 40, 687, stride, -1))[1] is None


def test_words_that_are_not_significant_are_masked_out_but_not_zero() -> None:
    mask = torch.tensor([[0.0, -0.0, 2.0, 2.0]])
    (_, table, bounds, _), value = native.scan(native.Mask(mask.data_ptr(), 4, 1, 4, 16, (1 << 31) - 1))
    assert (table.starts.tolist(), table.counts.tolist(), bounds.tolist(), value) == ([2], [2], [0, 2], None)


def test_threads_for_what_pays() -> None:
    assert native.threads_for(1 << 20) == 1
    assert native.threads_for(1 << 40) == max(1, torch.get_num_threads())
