"""Plans of two ranks on NCCL, with FSDP2: equal counts, failures on both, exact gradients, no hang (rank_work.py)."""

from __future__ import annotations

import pytest
import rank_work
import torch
from rank_work import Ran
from ranks import run_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def rounds() -> list[list[Ran]]:
    return values(run_ranks(rank_work.run_rounds, 2, "cuda", range(50), seconds=240, backend="nccl"))


def test_counts_are_equal(rounds: list[list[Ran]]) -> None:
    rank_work.check_counts(rounds)


def test_both_fail_together_and_go_on(rounds: list[list[Ran]]) -> None:
    rank_work.check_failures(rounds)


def test_gradients_are_those_of_the_unsplit_batch(rounds: list[list[Ran]]) -> None:
    rank_work.check_gradients(rounds)
