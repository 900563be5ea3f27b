"""verl's FSDP engine beside replay: log-probs, entropies and gradients of both are those of each row alone, where both
run. Where they differ, what docs/verl.md says of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import verl_engine_work as work
from ranks import run_ranks, values


def check(found: list[dict[str, dict[str, float]]], count: int) -> None:
    for own in found:
        assert len(own) == count
        for name, off in own.items():
            assert off.pop("gradients") <= 1e-5, name
            assert max(off.values()) <= 5e-6, name


def test_verl_and_replay_are_each_row_alone() -> None:
    check(values(run_ranks(work.same_numbers, 1, "Qwen3", True, seconds=100)), 6)


def test_verl_and_replay_over_two_ranks_are_each_row_alone() -> None:
    """The embedding and the output layer have shards of their own: verl shards them so unless they share a weight."""
    check(values(run_ranks(work.same_numbers, 2, "Llama", False, seconds=100)), 6)


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_of_the_page_is_each_row_alone(tied: bool) -> None:
    check(values(run_ranks(work.engine_of_the_page, 1 if tied else 2, tied, seconds=100)), 4)


def test_verl_has_a_temperature_for_each_row() -> None:
    check([{"verl": off} for off in values(run_ranks(work.temperatures_of_rows, 1, seconds=100))], 1)


@pytest.mark.parametrize("name", work.MIXING)
def test_rows_that_verl_mixes_are_right_or_refused(name: str) -> None:
    (found,) = values(run_ranks(work.mixed_rows, 1, name, seconds=100))
    assert found["remove_padding=True"] > 0.05
    assert found["remove_padding=False"] <= 5e-6
    if name == "a short convolution":
        assert found["replay"]["log_probs"] <= 5e-6
    else:
        assert "packed attention with s_aux" in found["replay"]


@pytest.mark.parametrize("tied", [True, False])
def test_fused_kernels_are_of_tied_weights(tied: bool) -> None:
    found: list[dict[str, Any]] = values(run_ranks(work.fused, 1, tied, seconds=100))
    if tied:
        check([{"verl": found[0]["verl"]}], 1)
    else:
        assert "got mixed torch.Tensor and DTensor" in found[0]["verl"]
    assert "failed on given logits with" in found[0]["replay"]  # the forward that verl puts in its place
