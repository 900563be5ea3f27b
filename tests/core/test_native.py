"""The compiled core: that it is there and the right one; what counts as a token, and how many threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import warm_workers

import maskpack
from maskpack.core import abi, build, native
from maskpack.layout import scan

PACKAGE = Path(maskpack.__file__).parent


def imported(package: Path) -> str:
    """What an import of a copy of the package prints to the error stream."""
    done = subprocess.run(
        [*warm_workers.python(), "-c", "import maskpack"], cwd=package.parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return shutil.copytree(PACKAGE, tmp_path / "maskpack", ignore=shutil.ignore_patterns("__pycache__"))


def test_a_missing_core_says_what_to_do(package: Path) -> None:
    (package / "core/_core.so").unlink()
    assert "ImportError: maskpack: its compiled core is missing (" in imported(package)


def changed(package: Path, *texts: tuple[str, str]) -> str:
    """What an import prints when some texts of the Python side of the core are others."""
    binding = package / "core/abi.py"
    code = binding.read_text()
    for text, other in texts:
        assert code.count(text) == 1
        code = code.replace(text, other)
    binding.write_text(code)
    return imported(package)


def test_a_core_of_another_version_says_what_to_do(package: Path) -> None:
    shown = changed(package, (f"VERSION = {abi.VERSION}\n", "VERSION = 987\n"))
    assert f"its compiled core has version {abi.VERSION}; expected 987. Install maskpack again" in shown


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("Field", '("shift", np.int64)', '("shift", np.int64), ("more", np.int64)'),
        ("Entry", '("number", np.int64), ("first", np.int64), ("second", np.int64)', '("first", np.int64)'),
        ("Form", '("age", np.int64)', '("age", np.int64), ("more", ARRAY)'),
        ("Source", '("sums", np.int64)', '("sums", np.int64), ("last", np.int64)'),
    ],
)
def test_a_struct_of_another_size_says_what_to_do(name: str, text: str, other: str, package: Path) -> None:
    shown = changed(package, (text, other))
    assert f"ImportError: maskpack: {name} has " in shown
    assert "bytes in its compiled core; expected " in shown


def test_the_version_is_that_of_the_text(package: Path) -> None:
    """What is read by both sides, or a function that takes other numbers, makes another version."""
    versions = {build.definitions(package / "core")[0]}
    for name, text, other in [("abi.h", "BLOCK = 256", "BLOCK = 512"), ("palette.c", "i64 n,", "i64 n, i64 more,")]:
        file = package / "core" / name
        assert text in file.read_text()
        file.write_text(file.read_text().replace(text, other, 1))
        versions.add(build.definitions(package / "core")[0])
    assert len(versions) == 3


def test_members_that_python_cannot_have_are_refused(package: Path) -> None:
    header = package / "core/abi.h"
    header.write_text(header.read_text().replace("i64 at, size, count;", "i64 at, size: 4, count;"))
    with pytest.raises(ValueError, match=r"abi.h: ' size: 4' is no member that Python can have"):
        build.python_side(package / "core")


def test_words_that_are_not_significant_are_masked_out_but_not_zero() -> None:
    mask = torch.tensor([[0.0, -0.0, 2.0, 2.0]])
    _, table, bounds, _ = scan.on_host(mask)
    assert (table.starts.tolist(), table.counts.tolist(), bounds.tolist()) == ([2], [2], [0, 2])


def test_threads_for_what_pays() -> None:
    assert native.threads_for(1 << 20) == 1
    assert native.threads_for(1 << 40) == max(1, torch.get_num_threads())
