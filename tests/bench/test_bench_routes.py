"""The benchmark of routed experts, at tiny sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from bench import routes as case
from bench.measure import NotExact

SIZES = case.Sizes(6, 4, 12, 0.5, 24, 32, 2, 4, 2, 8, 6, 2, 16, 97, torch.float32)


def test_both_are_measured() -> None:
    rows = {(row.case.rpartition(", ")[2], row.name): row.value for row in case.run(rounds=1, sizes=SIZES)}
    assert rows["2 chosen", "largest difference of log-probs"] <= 1e-6
    for step in ("forward", "layers checkpointed"):
        ratio = rows[step, f"{case.REPLAYED} / {case.OWN}"]
        assert ratio == rows[step, case.REPLAYED] / rows[step, case.OWN] > 0


def test_other_experts_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = case.chosen_by_routers
    monkeypatch.setattr(case, "chosen_by_routers", lambda *given: chosen(*given).roll(1, 1))
    with pytest.raises(NotExact, match="log-probs are"):
        case.run(rounds=1, sizes=SIZES)
