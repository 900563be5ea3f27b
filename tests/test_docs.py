"""Every Python block of the docs runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["fields.md", "nesting.md", "inspect.md", "gpu.md", "replay.md"])
def test_blocks_run(page):
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
