"""The benchmark of verl's engine on a tiny model: every way runs, and numbers that differ are seen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import verl_bench_work as work
from ranks import run_ranks, values


def test_every_way_is_timed() -> None:
    (names,) = values(run_ranks(work.report, 1, seconds=200))
    for case in ("log-probs alone", "with entropy"):
        for name in ("replay", "verl", "verl, padded", "verl, fused kernels", "verl / replay", "peak, verl / replay"):
            assert names[f"verl-engine, {case}", name] > 0
    tokens = [names["verl-engine", name] for name in names_of_tokens(names)]
    assert tokens[0] > tokens[1] > 0


def names_of_tokens(names: dict[tuple[str, str], Any]) -> list[str]:
    return [name for case, name in names if case == "verl-engine" and "takes logits" in name]


def test_other_numbers_are_seen() -> None:
    (said,) = values(run_ranks(work.wrong, 1, seconds=200))
    assert said.startswith("verl-engine, log-probs alone: replay is ")
    assert said.endswith(" off verl; expected at most 5e-05.")
