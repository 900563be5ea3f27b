"""plan_ranks, and loss weights: losses of micro-batches on all ranks against loops over the rows of the whole batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import KINDS, Case, cases, for_cases, real

from maskpack.errors import PlanError
from maskpack.planning import FlopsModel, MicroBatchPlan, RankPlans, balance_rows, plan_micro_batches, plan_ranks

many = settings(max_examples=max(100, settings.default.max_examples))
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@st.composite
def rank_cases(draw: st.DrawFn) -> tuple[Case, int, dict[str, Any]]:
    """A case of which every rank gets a row, its ranks, and the options of balance_rows."""
    case = draw(st.one_of(*map(cases, KINDS)))
    units = len(case.groups)
    ranks = draw(st.integers(1, min(units, 5))) if units else draw(st.integers(1, 5))
    return case, ranks, {"seed": draw(st.integers(0, 2)), "equal_rows": draw(st.booleans())}


def plans_of(case: Case, ranks: int, more: dict[str, Any]) -> RankPlans:
    return plan_ranks(case.lengths, ranks, case.token_budget, **case.options, **more)


# -------------------------------------------------------------------- ranks


@many
@given(rank_cases())
def test_rows_of_ranks_are_those_of_balance_rows(given_: tuple[Case, int, dict[str, Any]]) -> None:
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    work, groups = case.option("work"), case.option("groups")
    assert plans.rows == balance_rows(case.lengths, ranks, cost=work or "tokens", groups=groups, **more)
    assert sorted(itertools.chain(*plans.rows)) == list(range(len(case.lengths)))
    assert plans.num_ranks == len(plans.plans) == len(plans.rows) == ranks
    assert plans.lengths.tolist() == case.lengths
    assert plans.divisible is (case.option("num_updates") == 1 and groups is None)
    for rows, plan in zip(plans.rows, plans.plans, strict=True):
        assert plan.lengths.tolist() == [case.lengths[row] for row in rows]


@many
@given(rank_cases())
def test_equal_counts_in_each_update_on_all_ranks(given_: tuple[Case, int, dict[str, Any]]) -> None:
    """Each rank's own plan, with as many micro-batches as the rank that needs most."""
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    labels = case.option("groups")
    own = []
    for rows in plans.rows:
        options = case.options if labels is None else {**case.options, "groups": [labels[row] for row in rows]}
        own.append(plan_micro_batches([case.lengths[row] for row in rows], case.token_budget, **options))
    counts = [max(some) for some in zip(*(plan.counts for plan in own), strict=True)]
    for plan, alone in zip(plans.plans, own, strict=True):
        assert plan.counts == counts
        assert plan.updates == alone.with_count(counts).updates
        assert plan.oversized == alone.oversized
        assert plan.loss is None


@many
@given(rank_cases())
def test_the_budget_holds_on_every_rank(given_: tuple[Case, int, dict[str, Any]]) -> None:
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    seen = []
    for rows, plan in zip(plans.rows, plans.plans, strict=True):
        for own in itertools.chain(*real(plan)):
            whole = sorted(rows[row] for row in own)
            assert not case.too_large(whole) or whole in case.groups
            seen += whole
        over = [rows[row] for row in plan.oversized]
        assert sorted(over) == sorted(row for own in case.groups if case.too_large(own) for row in own if row in rows)
    assert sorted(seen) == list(range(len(case.lengths)))


@many
@given(rank_cases(), st.data())
def test_for_some_rows_of_some_ranks(given_: tuple[Case, int, dict[str, Any]], data: st.DataObject) -> None:
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    if not case.lengths:
        return
    chosen = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    left = {}
    for rank in chosen:
        kept = data.draw(st.lists(st.sampled_from(plans.rows[rank]), min_size=1, unique=True))
        left[rank] = np.array(sorted(kept, key=plans.rows[rank].index), np.int64)
    found = plans.for_rows(left)
    assert list(found) == chosen
    assert len({tuple(plan.counts) for plan in found.values()}) == 1
    for rank, plan in found.items():
        assert plan.lengths.tolist() == [case.lengths[row] for row in left[rank]]
        assert sorted(row for update in real(plan) for rows in update for row in rows) == list(range(len(left[rank])))
        labels = case.option("groups")
        for rows in itertools.chain(*real(plan)):
            mine = [int(left[rank][row]) for row in rows]
            alone = labels is not None and len({labels[row] for row in mine}) == 1
            assert not case.too_large(mine) or len(mine) == 1 or alone


def test_for_all_rows_gives_the_plans_that_are_there() -> None:
    plans = plan_ranks([4, 3, 2, 5], 2, 6, loss_tokens=[1, 1, 1, 1])
    found = plans.for_rows({rank: np.array(rows) for rank, rows in enumerate(plans.rows)})
    assert [found[rank] for rank in (0, 1)] == plans.plans
    assert not plans.divisible
    assert plan_ranks([4, 3, 2, 5], 2, 6).divisible
    assert not plan_ranks([4, 3, 2, 5], 2, 6, num_updates=2).divisible


def test_a_failed_rank_is_planned_alone() -> None:
    plans = plan_ranks([4, 3, 2, 5, 1, 1], 2, 6)
    (rank, plan), *none = plans.for_rows({1: np.array([5, 0])}).items()
    assert (rank, none) == (1, [])
    assert plan.lengths.tolist() == [1, 4]
    assert plan.updates == [[[0, 1]]]
    assert plans.for_rows({}) == {}


def test_a_rank_without_rows_raises() -> None:
    with pytest.raises(
        PlanError, match=r"^plan_ranks: ranks \[2\] have no row to run, but other ranks have; expected at least"
    ):
        plan_ranks([5, 4], 3, 8)
    with pytest.raises(PlanError, match=r"ranks \[1, 2, 3, 4, 5, 6, 7, 8\] have no row.*Use fewer ranks, or more rows"):
        plan_ranks([5, 4], 20, 8, groups=["a", "a"])
    with pytest.raises(PlanError, match="have no row to run"):
        plan_ranks([5, 4], 2, 8).for_rows({0: np.array([0]), 1: np.array([], np.int64)})


def test_oversized_rows_are_named_as_the_caller_numbers_them() -> None:
    for row in range(4):
        lengths = [9 if number == row else 2 for number in range(4)]
        with pytest.raises(PlanError, match=rf"^plan_micro_batches: rows \[{row}\] alone, or their groups, are over"):
            plan_ranks(lengths, 2, 5, oversize="error")
    assert plan_ranks([5, 2, 2, 2], 2, 5, oversize="error").num_ranks == 2


def test_no_rows_at_all() -> None:
    plans = plan_ranks([], 3, 8, num_updates=2, loss_tokens=[])
    assert plans.rows == [[], [], []]
    assert [plan.updates for plan in plans.plans] == [[[], []]] * 3
    assert plans.metrics()["plan/rank_imbalance"] == 1
    assert plans.metrics()["plan/rows"] == 0


@pytest.mark.parametrize("made", [tuple, np.array, torch.tensor])
def test_kinds_of_input(made: Any) -> None:
    lengths, groups, tokens = [5, 9, 2, 7, 8, 1], [1, 2, 1, 0, 2, 0], [2, 0, 1, 1, 5, 1]
    want = plan_ranks(lengths, 2, 12, groups=groups, loss_tokens=tokens)
    plans = plan_ranks(made(lengths), 2, 12, groups=made(groups), loss_tokens=made(tokens))
    assert plans.rows == want.rows
    for a, b in zip(plans.plans, want.plans, strict=True):
        assert a.updates == b.updates
        for x, y in zip(a.loss_weights("token-mean"), b.loss_weights("token-mean"), strict=True):
            assert x.tolist() == y.tolist()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([1.0, 2.0], 1, 5), {}, "plan_ranks: lengths are float64; expected whole numbers [B]."),
        (([1, -2], 1, 5), {}, "plan_ranks: a length is -2;"),
        (([1, 2], 0, 5), {}, "balance_rows: ranks is 0; expected a whole number from 1."),
        (([1, 2], 1, 1.9), {}, "plan_micro_batches: token_budget is 1.9; expected a whole number from 1."),
        (([1, 2], 1, 5), {"cost": "tokenz"}, "plan_micro_batches: cost is 'tokenz';"),
        (([1, 2], 1, 5), {"groups": [1]}, "plan_ranks: groups are 1 labels for 2 rows;"),
        (([1, 2], 1, 5), {"seed": -1}, "balance_rows: seed is -1;"),
        (([1, 2], 1, 5), {"loss_tokens": [1]}, "plan_ranks: loss_tokens are int64 (1,); expected numbers (2,): the su"),
        (([1, 2], 1, 5), {"loss_tokens": [1, -1]}, "plan_ranks: loss_tokens run from -1.0 to 1.0;"),
        (([1, 9], 1, 5), {"oversize": "error"}, "plan_micro_batches: rows ["),
    ],
)
def test_arguments_that_are_none(arguments: tuple[Any, Any, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_ranks(*arguments, **options)
    assert str(caught.value).startswith(words)


def test_metrics_by_hand() -> None:
    plans = plan_ranks([6, 5, 4, 3], 2, 7, work=lambda n: n * n)
    assert sorted(map(sorted, plans.rows)) == [[0, 3], [1, 2]]
    assert plans.metrics() == {
        "plan/rows": 4.0,
        "plan/updates": 1.0,
        "plan/micro_batches": 4.0,
        "plan/dummies": 0.0,
        "plan/oversized_rows": 0.0,
        "plan/tokens": 18.0,
        "plan/padding_tokens": 0.0,
        "plan/fill": 1.0,
        "plan/imbalance": (36 / 22.5 + 25 / 20.5) / 2,
        "plan/budget_use": 9 / 14,
        "plan/rank_imbalance": (36 + 16) / (61 / 2 + 25 / 2),
    }
    wide = plan_ranks([6, 5, 4, 3], 2, 20).metrics()
    assert (wide["plan/micro_batches"], wide["plan/padding_tokens"]) == (2, 3 + 1)
    assert (wide["plan/fill"], wide["plan/budget_use"]) == ((9 / 12 + 9 / 10) / 2, 9 / 20)
    assert (wide["plan/rank_imbalance"], wide["plan/imbalance"]) == (1, 1)
    several = plan_ranks([6, 5, 4, 3, 9], 2, 8, num_updates=2).metrics()
    assert (several["plan/updates"], several["plan/rows"], several["plan/oversized_rows"]) == (2, 5, 1)
    assert all(type(value) is float for value in several.values())


def test_dummies_cost_nothing_on_their_rank() -> None:
    """Two rows of 8 on one rank and one of 8 on the other: the second micro-batch of that is a dummy."""
    plans = plan_ranks([8, 8, 8], 2, 8)
    assert sorted(plan.dummies for plan in plans.plans) == [[0], [1]]
    assert sorted(plan.loads() for plan in plans.plans) == [[8, 0], [8, 8]]
    assert plans.metrics()["plan/rank_imbalance"] == 16 / 12
    assert plans.metrics()["plan/dummies"] == 1


def test_ranks_have_like_work_at_the_same_time() -> None:
    """Micro-batches are sorted, so that few ranks wait."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6, 1, 512)), 1, 8000).astype(int)
    model = FlopsModel.of_transformer(1e9, 24, 2048)
    metrics = plan_ranks(lengths, 8, 16_000, work=model).metrics()
    assert metrics["plan/rank_imbalance"] <= 1.1
    assert metrics["plan/rows"] == 512


# -------------------------------------------------------------------- loss weights


def whole_loss(losses: Any, mask: Any, rows: Sequence[int], mode: str) -> float:
    """The loss of these rows at once, token by token."""
    total, tokens, counted = 0.0, 0.0, 0
    for row in rows:
        own = [(float(losses[row][place]), float(mask[row][place])) for place in range(len(mask[row]))]
        amount = sum(weight for _, weight in own)
        if amount == 0:
            continue
        value = sum(loss * weight for loss, weight in own)
        counted += 1
        tokens += amount
        total += value / amount if mode == "seq-mean-token-mean" else value
    if not counted:
        return 0.0
    return total / (tokens if mode == "token-mean" else counted)


def split_loss(plan: MicroBatchPlan, rows: Sequence[int], losses: Any, mask: Any, weights: Any, update: int) -> float:
    """The sum over an update's micro-batches, as a trainer computes it."""
    begin = sum(plan.counts[:update])
    total = 0.0
    for own, factors in zip(plan.updates[update], weights[begin:], strict=False):
        assert factors.dtype == np.float64
        assert factors.shape == (len(own),)
        index = [rows[row] for row in own]
        total += float((factors * (losses[index] * mask[index]).sum(-1)).sum())
    return total


MASKS = {
    "ones": lambda rng, shape: np.ones(shape),
    "zeros and ones": lambda rng, shape: rng.integers(0, 2, shape).astype(float),
    "few rows": lambda rng, shape: (rng.random((shape[0], 1)) < 0.3) * rng.integers(0, 2, shape).astype(float),
    "floats": lambda rng, shape: rng.random(shape) * (rng.random(shape) < 0.6) * 2,
    "none": lambda rng, shape: np.zeros(shape),
}


@many
@given(rank_cases(), st.sampled_from(sorted(MASKS)), st.sampled_from(MODES), st.integers(0, 99), st.booleans())
def test_losses_of_all_ranks_add_up_to_the_loss_of_the_unsplit_batch(
    given_: tuple[Case, int, dict[str, Any]], kind: str, mode: Any, seed: int, more_dummies: bool
) -> None:
    case, ranks, more = given_
    rng = np.random.default_rng(seed)
    shape = (len(case.lengths), 5)
    losses, mask = rng.normal(size=shape), MASKS[kind](rng, shape)
    plans = plan_ranks(
        case.lengths, ranks, case.token_budget, **case.options, **more, loss_tokens=mask.sum(-1).tolist()
    )
    own = plans.plans
    if more_dummies and case.lengths:
        own = [plan.with_count(max(plan.counts) + 2 * case.option("multiple_of")) for plan in own]
    for gradients, share in (("mean", 1 / ranks), ("sum", 1.0)):
        weights = [plan.loss_weights(mode, gradients=gradients) for plan in own]  # type: ignore[arg-type]
        for plan, whole in zip(own, weights, strict=True):
            parts = [plan.loss_weights(mode, number, gradients=gradients) for number in range(len(plan.updates))]  # type: ignore[arg-type]
            assert [some.tolist() for part in parts for some in part] == [some.tolist() for some in whole]
            assert [len(part) for part in parts] == plan.counts
        assert [len(some) for some in weights] == [len(plan.micro_batches) for plan in own]
        assert all(np.isfinite(factors).all() for some in weights for factors in some)
        for update in range(case.option("num_updates")):
            rows = [
                rows[row]
                for rows, plan in zip(plans.rows, own, strict=True)
                for some in real(plan)[update]
                for row in some
            ]
            found = sum(
                share * split_loss(plan, rows, losses, mask, some, update)
                for rows, plan, some in zip(plans.rows, own, weights, strict=True)
            )
            want = whole_loss(losses, mask, rows, mode)
            assert math.isclose(found, want, rel_tol=1e-12, abs_tol=1e-12), (found, want)


@for_cases(st.sampled_from(MODES), st.integers(0, 99), kinds=["tokens", "counted"])
def test_losses_of_one_rank(case: Case, mode: Any, seed: int) -> None:
    """Of a plan that no one has told about ranks, "mean" and "sum" are the same."""
    rng = np.random.default_rng(seed)
    losses, mask = rng.normal(size=(len(case.lengths), 4)), rng.integers(0, 2, (len(case.lengths), 4))
    plan = plan_micro_batches(case.lengths, case.token_budget, **case.options, loss_tokens=mask.sum(-1))
    weights = plan.loss_weights(mode)
    assert [some.tolist() for some in weights] == [some.tolist() for some in plan.loss_weights(mode, gradients="sum")]
    for update, own in enumerate(real(plan)):
        found = split_loss(plan, range(len(case.lengths)), losses, mask, weights, update)
        want = whole_loss(losses, mask, list(itertools.chain(*own)), mode)
        assert math.isclose(found, want, rel_tol=1e-12, abs_tol=1e-12)


def test_loss_weights_by_hand() -> None:
    plan = plan_micro_batches([4, 3, 2, 1], 5, loss_tokens=[3, 0, 2, 0.5])
    assert plan.updates == [[[0, 3], [1, 2]]]
    by_mode = {mode: [some.tolist() for some in plan.loss_weights(mode)] for mode in MODES}
    assert by_mode["token-mean"] == [[1 / 5.5] * 2] * 2
    assert by_mode["seq-mean-token-sum"] == [[1 / 3] * 2] * 2
    assert by_mode["seq-mean-token-mean"] == [[1 / 3 / 3, 1 / 3 / 0.5], [0, 1 / 3 / 2]]


def test_loss_weights_of_two_ranks_by_hand() -> None:
    plans = plan_ranks([4, 3, 2, 1], 2, 4, loss_tokens=[3, 0, 2, 1], num_updates=2)
    assert sorted(map(sorted, plans.rows)) == [[0, 3], [1, 2]]
    tokens = [3, 0, 2, 1]
    for number in range(2):
        rows = [own[number] for own in plans.rows]
        total, real_rows = sum(tokens[row] for row in rows), sum(tokens[row] > 0 for row in rows)
        for plan in plans.plans:
            for gradients, ranks in (("mean", 2), ("sum", 1)):
                weights = {m: plan.loss_weights(m, gradients=gradients)[number].tolist() for m in MODES}  # type: ignore
                assert weights["token-mean"] == [ranks / total]
                assert weights["seq-mean-token-sum"] == [ranks / real_rows]


def test_rows_without_loss_tokens_are_divided_by_nothing() -> None:
    plan = plan_micro_batches([4, 3, 2], 5, loss_tokens=[3, 0, 1])
    with np.errstate(all="raise"):
        for mode in MODES:
            assert all(np.isfinite(some).all() for some in plan.loss_weights(mode))


def test_an_update_without_loss_tokens_weighs_nothing() -> None:
    plan = plan_micro_batches([4, 3, 2, 1], 5, num_updates=2, loss_tokens=[3, 1, 0, 0])
    for mode in MODES:
        first, second = plan.loss_weights(mode)[0], plan.loss_weights(mode)[-1]
        assert first.min() > 0
        assert second.tolist() == [0] * second.size


def test_weights_do_not_depend_on_the_count() -> None:
    """Splitting micro-batches changes no row's weight (pitfall: token-mean losses reweighted silently)."""
    lengths, tokens = [4, 3, 2, 1, 4, 4], [3, 0, 2, 1, 1, 4]
    plan = plan_micro_batches(lengths, 9, loss_tokens=tokens)
    for mode in MODES:
        want = dict(zip(itertools.chain(*plan.micro_batches), np.concatenate(plan.loss_weights(mode)), strict=True))
        for count in (3, 5, 8):
            more = plan.with_count(count)
            for rows, dummy, weights in zip(more.micro_batches, more.is_dummy, more.loss_weights(mode), strict=True):
                assert weights.tolist() == [0.0 if dummy else want[row] for row in rows]


def test_loss_weights_cannot_be_asked_for_otherwise() -> None:
    plan = plan_micro_batches([4, 3], 5, loss_tokens=[1, 1])
    for mode in ("token_mean", "mean", None, "seq-mean"):
        with pytest.raises(PlanError) as caught:
            plan.loss_weights(mode)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"MicroBatchPlan.loss_weights: mode is {mode!r}; expected one of token-mean, seq-mean-token-sum, "
            "seq-mean-token-mean. Choose one."
        )
    with pytest.raises(PlanError, match=r'loss_weights: gradients is \'avg\'; expected "mean" or "sum"\. Choose one\.'):
        plan.loss_weights("token-mean", gradients="avg")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"loss_weights: the plan was made without loss tokens; expected them"):
        plan_micro_batches([4, 3], 5).loss_weights("token-mean")
    with pytest.raises(PlanError, match="Make the plan with loss_tokens, the sum of each row's loss mask"):
        plan_ranks([4, 3], 2, 5).plans[0].loss_weights("token-mean")
