"""The benchmark of verl's engine ends on a tiny model. It compares numbers before it times."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

import verl_bench_work as work
from ranks import run_ranks, values


def test_every_way_is_timed() -> None:
    (names,) = values(run_ranks(work.report, 1, seconds=200))
    for case in ("log-probs alone", "with entropy"):
        for name in ("replay", "verl", "verl, padded", "verl, fused kernels", "verl / replay", "peak, verl / replay"):
            assert names[f"verl-engine, {case}", name] > 0
