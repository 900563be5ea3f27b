"""Hypothesis profiles, HYPOTHESIS_PROFILE: `ci` (few examples, the same ones every time), `full`, and `slow` for tests
whose every example takes long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "ci", max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile(
    "slow", max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
