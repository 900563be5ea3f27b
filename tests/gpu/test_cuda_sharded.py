"""Replay of models that FSDP2 shards, on NCCL: rows go where layers run, and ranks compare a row together."""

from __future__ import annotations

import pytest
import torch
from needs import needs
from ranks import run_ranks, values

needs("transformers")

import work_replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(
            2,
            marks=[
                pytest.mark.two_gpus,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_rows_go_where_layers_run_whose_shards_wait_on_the_host(ranks: int) -> None:
    for seen in values(run_ranks(work_replay.offloaded, ranks, backend="nccl")):
        assert seen["devices"] == {"cuda"}
        assert seen["compared"] == 1
        assert seen["off"] < 1e-3
