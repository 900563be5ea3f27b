"""A fixture of the tests of log-probs."""

from __future__ import annotations

import pytest

from maskpack.ops import log_probs


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers so small that every loop takes several turns: 128 rows a chunk and a block, 256 tokens a slice."""
    monkeypatch.setattr(log_probs, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(log_probs, "_SLICE_BYTES", 1)
    monkeypatch.setattr(log_probs, "_BLOCK_TOKENS", 128)
