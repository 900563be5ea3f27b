"""The build hook, as hatchling runs it. Wheels for other machines are built and tried by .ci/release."""

from __future__ import annotations

from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


def test_an_editable_install_is_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = ROOT / "maskpack" / "core" / "_core.so"
    before = core.stat()
    monkeypatch.setenv("MASKPACK_PLATFORM", "manylinux_2_17_aarch64")
    build = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with pytest.raises(ValueError, match=r"^MASKPACK_PLATFORM is '.*_aarch64' in an editable install, .*-e"):
        next(build)
    assert core.stat() == before
    assert list(tmp_path.iterdir()) == []
