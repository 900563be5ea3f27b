"""An old transformers is an ImportError when the adapter is imported, in one sentence with what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, types
sys.modules["transformers"] = old = types.ModuleType("transformers")
old.__version__ = "4.40.0"
import maskpack.replay
try:
    import {name}
except ImportError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
SENTENCE = (
    "ImportError: maskpack.adapters.transformers needs the AttentionInterface of transformers 4.51 or later; got "
    "transformers 4.40.0: pip install 'maskpack[transformers]'\n"
)


@pytest.mark.parametrize("name", ["maskpack.adapters.transformers", "maskpack.adapters.trl"])
def test_an_old_transformers_is_named(name: str) -> None:
    code = CODE.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, SENTENCE), done.stderr
