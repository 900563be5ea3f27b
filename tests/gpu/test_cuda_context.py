"""Context parallelism on NCCL: two GPUs share the tokens of a forward pass."""

from __future__ import annotations

import pytest
import torch
from needs import needs
from ranks import run_ranks, values

needs("transformers")

import work_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("shares", [False, True])
def test_half_precision_is_that_of_one_gpu(shares: bool) -> None:
    """By the kernels that trainers use, beside a float32 model: no further off than one GPU is."""
    for off in values(run_ranks(work_context.on_gpus, 2, shares, backend="nccl")):
        assert off["log_probs"] <= 1.1 * off["log_probs of one"]
        assert off["gradients"] <= 1.1 * off["gradients of one"]


def test_a_hundred_rounds_of_few_tokens() -> None:
    for off in values(run_ranks(work_context.rounds, 2, 100, "cuda", backend="nccl")):
        assert off["log_probs"] <= 1e-3  # by flex attention, in float32 products that may be TF32
        assert off["without"] > 20
