"""A fixture of the tests of log-probs."""

from __future__ import annotations

import pytest

from maskpack.ops import log_probs, split_head


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers so small that every loop takes several turns: 128 rows a block, 64 rows and 512 columns a piece, 256
    columns a slice and a range, slices of 3 tokens combined at once."""
    for name, number in (("_PIECE_ROWS", 64), ("_PIECE_COLUMNS", 512), ("SLICE", 256), ("_RANGE_BYTES", 1)):
        monkeypatch.setattr(log_probs, name, number)
    monkeypatch.setattr(log_probs, "_BLOCK_TOKENS", 128)
    monkeypatch.setattr(split_head, "_AT_ONCE", 3)
