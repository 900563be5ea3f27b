"""Context parallelism: ranks that share the tokens of a forward pass give the numbers of each row alone, the gradients
of one process, and raise together."""

from __future__ import annotations

import os
import re

import pytest
from needs import needs

needs("transformers")

import work_context
from ranks import run_ranks, values

LOG_PROBS, GRADIENTS = 5e-6, 1e-5
ROUNDS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 40


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_of_shards_is_that_of_naive_loops(ranks: int) -> None:
    """Heads of keys that are split, and that several ranks read; windows and caps."""
    for off in values(run_ranks(work_context.attention_off, ranks)):
        assert len(off) == 18
        for case, (outputs, gradients) in off.items():
            assert outputs < 1e-12, case
            assert gradients < 1e-12, case


@pytest.mark.parametrize(
    ("kind", "shares", "checkpoints", "ranks"),
    [
        ("llama", False, False, 2),
        ("qwen3", False, True, 4),
        ("gemma3", False, False, 4),
        ("qwen3", True, False, 2),
        ("gemma3", True, True, 4),
    ],
)
def test_replay_of_shards_is_that_of_each_row_alone(kind: str, shares: bool, checkpoints: bool, ranks: int) -> None:
    for off in values(run_ranks(work_context.replayed, ranks, kind, shares, checkpoints)):
        several = {"log_probs", "planned", "entropy", "log-probs of one pass"}
        assert off.keys() == several | {"gradients", "one rank", "values", "one pass"}
        assert off["gradients"] <= GRADIENTS
        assert max(off[name] for name in several) <= LOG_PROBS, off
        assert max(off["values"], off["one pass"]) <= 2e-5  # of up to 30


def test_sharded_weights_and_sharded_tokens() -> None:
    for off in values(run_ranks(work_context.sharded, 4)):
        assert off["log_probs"] <= LOG_PROBS
        assert max(off["gradients"], off["planned"]) <= GRADIENTS


def test_options_of_one_rank_are_those_of_shards() -> None:
    for off in values(run_ranks(work_context.options, 2)):
        assert off.pop("tokens of a shard") == 8
        assert max(off.values()) <= LOG_PROBS


@pytest.mark.parametrize("ranks", [2, 4])
def test_rounds_of_few_tokens(ranks: int) -> None:
    for off in values(run_ranks(work_context.rounds, ranks, ROUNDS)):
        assert off["log_probs"] <= LOG_PROBS
        assert off["gradients"] <= GRADIENTS
        assert off["without"] > ROUNDS // 5  # rounds in which a rank scores nothing
        assert off["few"] > ROUNDS // 20  # rounds with fewer tokens than ranks


def test_all_ranks_refuse_together() -> None:
    both = values(run_ranks(work_context.refusals, 2))
    assert "have a response but no prompt token" in both[1]["no prompt"]
    assert "ranks [1] of the context group have failed" in both[0]["no prompt"]
    assert "has dropout" in both[1]["dropout"]
    assert "another rank of the context group cannot run these rows" in both[0]["dropout"]
    assert "has rotary positions of kind dynamic" in both[1]["positions"]
    for said in both:
        assert said["positions"].startswith("replayable: ")
        for name in ("temperature", "entropy", "self_check", "share_prefixes", "routed_experts", "gradients"):
            assert re.match(rf"PackedInputs.shard: {name} is \[", said[name]), name
        assert re.match(r"PackedInputs.shard: temperature is \[1.0, nan\]", said["invalid"])
        assert said["hot"].startswith("packed_log_probs: temperature is 'hot'")
        assert re.match("PackedInputs.shard: token ids differ between the 2 ranks", said["rows"])
        assert re.match("PackedInputs.shard: token ids differ between the 2 ranks", said["ids"])
        assert "3 heads over 2 ranks" in said["heads"]
        assert "does not declare support for PackedInputs.shard" in said["model"]
        assert "are a shard already" in said["twice"]
        assert "does not pass the context-parallel group on" in said["forgotten"]


def test_the_self_check_sees_wrong_exchanges() -> None:
    for said in values(run_ranks(work_context.compared, 2)):
        assert said.pop("right") == "nothing"
        for name, message in said.items():
            assert "are off by" in message, name
