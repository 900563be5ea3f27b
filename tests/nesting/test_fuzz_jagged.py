"""A little of tests/tools/fuzz_jagged.py: random batches of jagged columns without masks, against loops over rows."""

from __future__ import annotations

import fuzz_jagged
import pytest


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_batches(first: int) -> None:
    for seed in range(first, first + 20):
        fuzz_jagged.play(seed)
