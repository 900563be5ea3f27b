"""verl's FSDP engine with replay in it, as verl's registry gives it: its numbers are those of each row alone."""

from __future__ import annotations

import pytest
from needs import needs

needs("verl")

import verl_engine_work as work
from ranks import run_ranks, values


@pytest.mark.parametrize(("ranks", "tied", "shared"), [(1, True, False), (2, False, False), (1, False, True)])
def test_the_engine_that_verl_imports_is_each_row_alone(ranks: int, tied: bool, shared: bool) -> None:
    for own in values(run_ranks(work.replay_engine, ranks, tied, shared)):
        assert len(own) == 4
        for name, off in own.items():
            for kind, value in off.items():
                assert value <= (1e-5 if "gradient" in kind else 5e-6), (name, kind)
