"""Plans over several processes, on gloo: exact gradients, failures that reach every rank, sub-groups, FSDP2.

Four ranks are started once and do everything (work_ranks.py); each test looks at one part of what they saw.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
import work_ranks
from ranks import PATIENCE, run_ranks, values
from work_ranks import Attempt, Ran

from maskpack.planning import agree_on_count, plan_micro_batches

RANKS = 4
SOON = PATIENCE.total_seconds() / 3
"""No rank waits for another until that gives up."""


class Seen(NamedTuple):
    """Of each rank."""

    attempts: list[dict[str, Attempt]]
    in_groups: list[dict[str, Attempt]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen(*map(list, zip(*values(run_ranks(work_ranks.do_all, RANKS)), strict=True)))


@pytest.fixture(scope="module")
def rounds() -> list[list[Ran]]:
    return values(run_ranks(work_ranks.run_rounds, 2, "cpu", range(50)))


# -------------------------------------------------------------------- what ranks learn of each other

BAD: dict[str, tuple[str, dict[int, tuple[str, str]]]] = {
    "no plan": ("ranks [2] have no plan of at most 256 updates; expected one on every rank", {}),
    "a function without plan": ("ranks [2] have no plan", {}),
    "neither plan nor function": ("ranks [0] have no plan", {0: ("TypeError", "not callable")}),
    "a function raises": ("ranks [1] have no plan", {1: ("KeyError", "attention_mask")}),
    "two ranks without lengths": (
        "ranks [0, 3] have no plan",
        dict.fromkeys([0, 3], ("PlanError", "plan_micro_batches: lengths are")),
    ),
    "other updates": ("num_updates is [2, 1, 1, 1] on ranks [0, 1, 2, 3]; expected the same", {}),
    "too many updates": ("ranks [1] have no plan of at most 256 updates", {}),
    "other multiple": ("multiple_of is [1, 1, 1, 2] on ranks [0, 1, 2, 3]; expected the same", {}),
    "loss tokens on some": ("loss_tokens given is [0, 1, 1, 0] on ranks [0, 1, 2, 3]; expected the same", {}),
}
"""The message on all ranks, but for those that have an error of their own."""


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise_and_learn_why(seen: Seen, name: str) -> None:
    message, own_errors = BAD[name]
    for rank, attempts in enumerate(seen.attempts):
        got = attempts[name]
        error, text = own_errors.get(rank, ("PlanError", f"agree_on_count: {message}"))
        assert got.error == error, got
        assert text in got.message
        assert got.seconds < SOON


def finished(seen: Seen, name: str) -> list[Attempt]:
    got = [attempts[name] for attempts in seen.attempts]
    assert [own.error for own in got] == [""] * RANKS, got
    assert max(own.seconds for own in got) < SOON
    return got


@pytest.mark.parametrize("name", ["alike", "a function", "other budget"])
def test_the_rank_with_most_micro_batches_sets_the_count(seen: Seen, name: str) -> None:
    assert [own.counts for own in finished(seen, name)] == [[3]] * RANKS


def test_a_rank_with_fewer_rows_than_micro_batches_gets_dummies_that_count_nothing(seen: Seen) -> None:
    """Of lengths 4; 4 3; 4 3 2; 4 3 2 5, which are the loss tokens, too. Rank 0 has a dummy before."""
    got = finished(seen, "fewer rows than micro-batches")
    assert [own.counts for own in got] == [[3]] * RANKS
    assert [own.dummies for own in got] == [[2], [1], [0], [0]]
    weight = 4 / (4 + 7 + 9 + 14)  # gradients are averaged over four ranks
    assert [own.weights for own in got] == [
        [[weight], [0], [0]],
        [[weight], [weight], [0]],
        [[weight]] * 3,
        [[weight], [weight, weight], [weight]],
    ]


def test_a_rank_without_rows_gets_dummies_without_rows(seen: Seen) -> None:
    got = finished(seen, "no rows on one")
    assert [own.counts for own in got] == [[3]] * RANKS
    assert [own.dummies for own in got] == [[0], [0], [0], [3]]
    weight = 4 / (15 * 3)
    assert [own.weights for own in got] == [[[weight], [weight] * 2, [weight] * 2]] * 3 + [[[], [], []]]


def test_no_rows_on_any_rank_are_no_micro_batches(seen: Seen) -> None:
    got = finished(seen, "no rows at all")
    assert [(own.counts, own.dummies, own.weights) for own in got] == [([0, 0], [0, 0], [])] * RANKS


def test_the_message_holds_as_many_updates_as_it_says(seen: Seen) -> None:
    for own in finished(seen, "as many updates as can be"):
        assert own.counts is not None
        assert (len(own.counts), sum(own.counts), max(own.counts)) == (256, 5, 1)


def test_nobody_is_left_out() -> None:
    said = {"alike", "a function", "other budget", "fewer rows than micro-batches"}
    said |= {"no rows on one", "no rows at all", "as many updates as can be"}
    assert said | {*BAD} == {*work_ranks.PLANS}


# -------------------------------------------------------------------- sub-groups


def test_sub_groups_agree_on_their_own(seen: Seen) -> None:
    got = [attempts["agreed"] for attempts in seen.in_groups]  # ranks 0 and 2, and 1 and 3
    assert [(own.error, own.counts) for own in got] == [("", [2]), ("", [3]), ("", [2]), ("", [3])]
    assert [own.dummies for own in got] == [[1], [1], [0], [0]]
    even, odd = 2 / (4 + 9), 2 / (7 + 14)
    for own, weight in zip(got, [even, odd, even, odd], strict=True):
        assert own.weights is not None
        assert {*chain(*own.weights)} - {0.0} == {weight}


def test_ranks_of_a_sub_group_are_named_as_everywhere(seen: Seen) -> None:
    assert [[*attempts] for attempts in seen.in_groups] == [["agreed"], ["agreed", "failed"]] * 2
    for rank in (1, 3):
        got = seen.in_groups[rank]["failed"]
        assert got.error == "PlanError"
        assert "ranks [3] have no plan" in got.message
        assert got.seconds < SOON


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_the_backend_may_be_named_in_any_way(tmp_path: Path, backend: str | None) -> None:
    dist.init_process_group(backend, init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        plan = plan_micro_batches([4, 3, 2, 5, 1], 5, loss_tokens=[4, 0, 2, 5, 1])
        got = agree_on_count(plan)
    finally:
        dist.destroy_process_group()
    assert (got.updates, got.dummies) == (plan.updates, plan.dummies)
    assert got.loss_weights("token-mean")[0].tolist() == [1 / 12]


# -------------------------------------------------------------------- FSDP2


def test_fully_sharded_counts_are_equal(rounds: list[list[Ran]]) -> None:
    work_ranks.check_counts(rounds)


def test_fully_sharded_ranks_fail_together_and_go_on(rounds: list[list[Ran]]) -> None:
    work_ranks.check_failures(rounds)


def test_fully_sharded_gradients_are_those_of_the_unsplit_batch(rounds: list[list[Ran]]) -> None:
    work_ranks.check_gradients(rounds)
