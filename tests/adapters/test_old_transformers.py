"""An old transformers is an ImportError when the adapter is imported, in one sentence with what to do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import maskpack.adapters


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__version__ = "4.40.0"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(
        ImportError, match=r"needs the AttentionInterface of transformers 4\.51 .* 4\.40\.0: pip install"
    ):
        runpy.run_path(str(Path(maskpack.adapters.__file__).parent / "transformers" / "__init__.py"))
