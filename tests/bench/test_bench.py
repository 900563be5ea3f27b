"""Each benchmark ends on a tiny size and writes its record. Before it times, it compares what it times."""

from __future__ import annotations

import functools

import pytest

from bench import nest, ops, ops_log_probs, ops_peer, payload, payload_experts, plan

SMALL = {"prompt_width": 37, "response_width": 229}
PLAN = {"sizes": (40, 90), "ranks": 4, "scale": 0.016}
SIZES = ops.Sizes(20, 37, 229, wide=(5, 33, 8), copies=(1 << 10, 1 << 12))


@pytest.mark.parametrize(
    ("case", "run", "keys"),
    [
        (
            "payload",
            functools.partial(payload.run, scale=0.016, only=["reference", "routed-experts-deep"]),
            [
                ("payload reference", "padded / maskpack"),
                ("payload reference", "decompress, padded / one write of the padded bytes"),
                ("payload routed-experts-deep, 5 rows", "routed_experts, maskpack"),
            ],
        ),
        ("nest", functools.partial(nest.run, **SMALL), [("nest reference", "tensors, nested")]),
        (
            "ops",
            functools.partial(ops.run, sizes=SIZES),
            [(f"ops pack, {ops.ONE}", "maskpack, wall"), ("ops decode, 5 rows", "nested, pinned, wall")],
        ),
        (
            "plan",
            functools.partial(plan.run, **PLAN),
            [("plan 40 uniform lengths, budget 16,384", "plan_micro_batches")],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_case_ends_and_has_its_record(measured, monkeypatch, case, run, keys):
    monkeypatch.setattr(payload_experts, "_SMALL", ((1, 37, 229),))
    monkeypatch.setattr(payload_experts, "_CHAINS", 2)
    monkeypatch.setattr(ops, "_REPLAYS", 1)
    rows = measured(case, lambda *given, **more: run(*given, **more))
    assert set(keys) <= rows.keys()


def test_cases_run_on_a_workload(measured, monkeypatch, tmp_path):
    rows = measured("payload", functools.partial(payload.run, scale=0.01), "--workload", "mooncake")
    assert {case for case, _ in rows} == {"payload mooncake", "payload mooncake, two threads"}
    monkeypatch.setattr(plan, "BUDGET", 16)
    monkeypatch.setattr(plan, "RANK_BUDGET", 4096)
    options = "--workload", "tau", "--plot", str(tmp_path / "chart.svg")
    rows = measured("plan", functools.partial(plan.run, scale=0.01), *options)
    assert ("plan, 200 tau lengths over 8 ranks", "balance_rows") in rows
    assert "5 rows of the tau workload" in (tmp_path / "chart.svg").read_text()


def test_groups_that_need_gpus_end_on_the_cpu():
    rows = ops_peer.measured("gloo", 2, ops_peer.Sizes(5, 37, 229))
    assert {row.case for row in rows} == {"ops peer, 5 rows", "ops peer, 40 rows"}
    sizes = ops_log_probs.Sizes(rows=4, width=9, hidden=8, vocabulary=50, sample=5)
    rows = ops_log_probs.rows(sizes, (0.3, 1.0), rounds=1, device=ops.torch.device("cpu"))
    assert {row.case for row in rows} == {"logprobs density 0.3, 10 rows", "logprobs density 1, 36 rows"}
