"""The benchmark of TRL's trainers ends on a tiny size. It compares log-probs before it times."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from bench import trl_grpo
from bench.replay_rivals import Shape

TINY = trl_grpo.Case("tiny", Shape(32, 2, 4, 2, 8, 48, 512), prompt=24, response=16, rows=16, micro_batch=8)


def test_a_step_of_each_kind_is_measured(measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_grpo, "CASES", {"tiny": TINY})
    rows = measured("trl", lambda _, rounds: trl_grpo.run(rounds=rounds, only=["tiny"]))
    assert {*trl_grpo._KINDS, "log-probs, packed, largest difference"} <= {name for _, name in rows}
