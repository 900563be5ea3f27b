"""Plans of two ranks on NCCL, with FSDP2: equal counts, failures on both, exact gradients, no hang (work_ranks.py)."""

from __future__ import annotations

import pytest
import torch
import work_ranks
from ranks import run_ranks, values
from work_ranks import Ran

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def rounds() -> list[list[Ran]]:
    return values(run_ranks(work_ranks.run_rounds, 2, "cuda", range(50), backend="nccl"))


def test_counts_are_equal(rounds: list[list[Ran]]) -> None:
    work_ranks.check_counts(rounds)


def test_both_fail_together_and_go_on(rounds: list[list[Ran]]) -> None:
    work_ranks.check_failures(rounds)


def test_gradients_are_those_of_the_unsplit_batch(rounds: list[list[Ran]]) -> None:
    work_ranks.check_gradients(rounds)
