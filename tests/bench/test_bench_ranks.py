"""The benchmark of work that two ranks share, on the CPU at tiny sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from bench import ranks as case
from bench.replay_rivals import Shape

SIZES = case.Sizes(Shape(32, 2, 4, 2, 8, 48, 97), ((3, 5, 4), (1, 9, 6)), (case.Head(11, 8, 97),), torch.float32)


@pytest.mark.parametrize("group", ["context", "heads"])
def test_two_ranks_are_measured_beside_one(group):
    rows = case.measured("gloo", 2, SIZES, [group])
    cases = {row.case.removesuffix(", forward").removesuffix(", forward + backward") for row in rows}
    assert len(cases) == (2 if group == "context" else 1)
    for name in cases:
        for step in ("forward", "forward + backward"):
            found = {row.name: row.value for row in rows if row.case == f"{name}, {step}"}
            assert found[case.ALONE] > 0
            assert found[f"{case.ALONE} / {case.SHARED}"] == found[case.ALONE] / found[case.SHARED]
    assert all(row.value < 1e-5 for row in rows if row.unit == "nats")
