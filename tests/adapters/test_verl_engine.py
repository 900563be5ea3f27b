"""verl's FSDP engine beside replay: log-probs, entropies and gradients of both are those of each row alone, where both
run. Where they differ, what docs/verl.md says of it."""

from __future__ import annotations

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


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_of_the_page_is_each_row_alone(tied: bool) -> None:
    check(values(run_ranks(work.engine_of_the_page, 1 if tied else 2, tied, seconds=100)), 4)


@pytest.mark.parametrize("name", work.MIXING)
def test_rows_that_verl_mixes_are_right_or_refused(name: str) -> None:
    (found,) = values(run_ranks(work.mixed_rows, 1, name, seconds=100))
    assert found["remove_padding=True"] > 0.05
    assert found["remove_padding=False"] <= 5e-6
    if name == "a short convolution":
        assert found["replay"]["log_probs"] <= 5e-6
    else:
        assert "packed attention with s_aux" in found["replay"]
