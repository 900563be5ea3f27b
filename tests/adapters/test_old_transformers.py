"""An old transformers is named when the adapter is imported, in one sentence with what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, types
sys.modules["transformers"] = old = types.ModuleType("transformers")
old.__version__ = "4.40.0"
import maskpack.replay
{imported}
"""
SENTENCE = (
    "maskpack.errors.ReplayError: maskpack.adapters.transformers: transformers 4.40.0 has no AttentionInterface; "
    "expected transformers 5.0 or later. Install it: pip install 'maskpack[transformers]'."
)


@pytest.mark.parametrize("name", ["maskpack.adapters.transformers", "maskpack.adapters.trl"])
def test_an_old_transformers_is_named(name: str) -> None:
    code = CODE.format(imported=f"import {name}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == SENTENCE
