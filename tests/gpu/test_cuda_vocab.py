"""packed_log_probs of heads split over two ranks on NCCL: errors, failures on both, one wait (work_vocab.py)."""

from __future__ import annotations

import pytest
import torch
import work_vocab
from ranks import run_ranks, values
from work_vocab import case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_results_and_gradients_are_those_of_one_process() -> None:
    cases = [
        case(1000, 256, bounds, dtype, temperature=0.6, device="cuda", **more)
        for dtype in ("float32", "float64", "bfloat16", "float16")
        for bounds in ([16_384, 32_768], [30_000, 32_001], [0, 32_001])
        for more in ({"keep": 0}, {"keep": 1 << 20}, {"keep": 1 << 30, "sure": 12.0}, {"backend": "torch"})
    ]
    for of_rank in values(run_ranks(work_vocab.compare, 2, cases, True, backend="nccl")):
        for which, seen in zip(cases, of_rank, strict=True):
            assert seen["same"], which
            for name in ("log_probs", "entropy"):
                assert seen[name] < 2 * seen["alone"][name] + 5e-6, (name, which)
            for name in ("hidden", "weight"):
                assert seen[name] < 1.25 * seen["alone"][name] + 1e-4, (name, which)


def test_both_raise_and_none_waits() -> None:
    for seen in values(run_ranks(work_vocab.failures, 2, "cuda", backend="nccl")):
        for name, (error, after) in seen.items():
            assert after == pytest.approx(1 / 6)
            assert bool(error) == ("ids of" not in name and name != "negative ids"), name  # NaN on a GPU


def test_the_host_waits_once() -> None:
    assert values(run_ranks(work_vocab.waits, 2, backend="nccl")) == [1, 1]
