"""Kernels interpreted on the host (interpreted.py)."""

from __future__ import annotations

import pytest
from interpreted import GROUPS, needed, run_interpreted

pytestmark = needed


@pytest.mark.parametrize("file", GROUPS["replay"])
def test_kernels_interpreted_on_the_host(file: str) -> None:
    run_interpreted(file)
