"""A test whose package is not installed is skipped, whatever else has the name of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from needs import is_installed, needs

NAMES = ("sphinx", "transformers", "ray", "triton", "zstandard")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain folders with a file in each are first on the path, and the packages of these names are nowhere."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "conf.py").touch()
        for module in [own for own in sys.modules if own.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_no_package(name: str) -> None:
    before = dict(sys.modules)
    for module in (name, f"{name}.conf"):
        with pytest.raises(pytest.skip.Exception, match=f"{name} is not installed"):
            needs(module)
    assert sys.modules == before


def test_packages_and_their_modules() -> None:
    assert is_installed("torch")
    assert not is_installed("no_package_of_this_name")
    assert needs("torch") is sys.modules["torch"]
    assert needs("torch.nn.functional") is sys.modules["torch.nn.functional"]


def test_a_package_that_is_broken_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import no_package_of_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_package_of_this_name"):
        needs("broken_package")


def test_no_test_asks_otherwise() -> None:
    own = Path(__file__)
    asking = [str(file) for file in own.parent.rglob("*.py") if file != own and "importorskip" in file.read_text()]
    assert asking == []
