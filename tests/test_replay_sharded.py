"""Replay of a model that FSDP2 shards over two ranks: the numbers of each row alone, and gradients of all ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import replay_work
from ranks import run_ranks, values


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_replay_is_that_of_each_row_alone(tied: bool) -> None:
    for off in values(run_ranks(replay_work.sharded, 2, tied, seconds=100)):
        assert off.keys() == {"packed", "gradients", "planned", "padded"}
        assert off["gradients"] <= 1e-5
        assert max(off["packed"], off["planned"], off["padded"]) <= 5e-6


def test_an_output_layer_in_shards_of_its_own_is_named() -> None:
    for said in values(run_ranks(replay_work.head_of_its_own, 2, seconds=100)):
        assert said.startswith("replayable: the output layer of FSDPLlamaForCausalLM is sharded; expected its whole")
