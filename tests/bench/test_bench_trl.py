"""The benchmark of TRL's trainers runs on tiny sizes, and its rows say what was compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from bench import trl_grpo
from bench.measure import NotExact
from bench.replay_rivals import Shape

TINY = trl_grpo.Case("tiny", Shape(32, 2, 4, 2, 8, 48, 512), prompt=24, response=16, rows=16, micro_batch=8)


def test_a_step_of_each_kind_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_grpo, "CASES", {"tiny": TINY})
    rows = {row.name: row.value for row in trl_grpo.run(rounds=1, only=["tiny"])}
    assert rows["completion, the longest"] <= 16
    assert rows["computed tokens / padded cells, padded"] == 1
    packed, alone = (rows[f"computed tokens / padded cells, {kind}"] for kind in (trl_grpo.PACKED, trl_grpo.ALONE))
    assert 0 < packed < alone < 1
    assert all(rows[kind] > 0 for kind in trl_grpo._KINDS)
    assert rows["log-probs, packed, largest difference"] < 1e-4
    with pytest.raises(ValueError, match="no group large"):
        trl_grpo.run(only=["large"])


def test_other_log_probs_would_be_seen(tmp_path: Path) -> None:
    class Stage:
        def __init__(self, value: float) -> None:
            self.log_probs = lambda: torch.full((2, 3), value)

    with pytest.raises(NotExact, match="off by 1"):
        trl_grpo._compared("trl", {trl_grpo.PADDED: Stage(0), trl_grpo.PACKED: Stage(1)}, torch.device("cpu"))
