"""verl's FSDP engine with replay in it, as docs/verl.md has it: its numbers are those of each row alone."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

import verl_engine_work as work
from ranks import run_ranks, values


def check(found: list[dict[str, dict[str, float]]], count: int) -> None:
    for own in found:
        assert len(own) == count
        for name, off in own.items():
            for kind, value in off.items():
                assert value <= (1e-5 if "gradient" in kind else 5e-6), (name, kind)


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_of_the_page_is_each_row_alone(tied: bool) -> None:
    check(values(run_ranks(work.engine_of_the_page, 1 if tied else 2, tied, seconds=100)), 4)
