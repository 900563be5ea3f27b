"""plan_ranks, and loss weights: losses of micro-batches on all ranks against loops over the rows of the whole batch."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import KINDS, MODES, Case, Flops, cases, many, real, tree_of
from tensordict import TensorDict

from maskpack.planning import MicroBatchPlan, PlanOptions, balance_rows, plan_micro_batches, plan_ranks


@st.composite
def rank_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A case and its ranks, some of which may get no row."""
    return draw(st.one_of(*map(cases, KINDS))), draw(st.integers(1, 5))


# -------------------------------------------------------------------- ranks


@many
@given(rank_cases())
def test_rows_of_ranks(given_: tuple[Case, int]) -> None:
    """Those of balance_rows, or with a tree any in which groups are whole."""
    case, ranks = given_
    plans = case.ranks(ranks)
    if case.rows is None:
        work = case.options.work or "tokens"
        assert plans.rows == balance_rows(case.lengths, ranks, cost=work, groups=case.labels)
    assert sorted(itertools.chain(*plans.rows)) == list(range(len(case.lengths)))
    assert plans.num_ranks == len(plans.plans) == len(plans.rows) == ranks
    assert plans.lengths.tolist() == case.lengths
    assert plans.divisible is (case.options.num_updates == 1 and case.labels is None)
    for unit in case.units:
        assert sum(not set(unit).isdisjoint(rows) for rows in plans.rows) == 1
    assert plans.metrics()["plan/rank_imbalance"] >= 1


@many
@given(rank_cases())
def test_equal_counts_in_each_update_on_all_ranks(given_: tuple[Case, int]) -> None:
    """Each rank's own plan, with as many micro-batches as the rank that needs most."""
    case, ranks = given_
    plans = case.ranks(ranks)
    tree = case.given["tree"]
    own = []
    for rows in plans.rows:
        part = case.take(rows)
        more = {} if tree is None else {"tree": tree.take(rows)}
        own.append(plan_micro_batches(part.lengths, part.token_budget, **{**part.given, **more}))
    counts = [max(some) for some in zip(*(plan.counts for plan in own), strict=True)]
    for rows, plan, alone in zip(plans.rows, plans.plans, own, strict=True):
        assert plan.lengths.tolist() == [case.lengths[row] for row in rows]
        assert plan.counts == counts
        assert plan.updates == alone.with_count(counts).updates
        assert plan.oversized == alone.oversized
        assert plan.loss is None


@many
@given(rank_cases(), st.data())
def test_for_some_rows_of_some_ranks(given_: tuple[Case, int], data: st.DataObject) -> None:
    case, ranks = given_
    plans = case.ranks(ranks)
    if not case.lengths:
        return
    chosen = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    left = {}
    for rank in chosen:
        own = plans.rows[rank]
        kept = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        left[rank] = np.array(sorted(kept, key=plans.rows[rank].index), np.int64)
    found = plans.for_rows(left)
    assert list(found) == chosen
    assert len({tuple(plan.counts) for plan in found.values()}) == 1
    for rank, plan in found.items():
        part = case.take(left[rank].tolist())
        assert plan.lengths.tolist() == part.lengths
        assert sorted(row for update in real(plan) for rows in update for row in rows) == list(range(len(left[rank])))
        assert all(rows in part.units for rows in itertools.chain(*real(plan)) if part.too_large(rows))
    there = pickle.loads(pickle.dumps(plans))
    assert [plan.updates for plan in there.plans] == [plan.updates for plan in plans.plans]
    assert [plan.updates for plan in there.for_rows(left).values()] == [plan.updates for plan in found.values()]


def test_for_all_rows_gives_the_plans_that_are_there() -> None:
    plans = plan_ranks([4, 3, 2, 5], 2, 6, loss_tokens=[1, 1, 1, 1])
    found = plans.for_rows({rank: np.array(rows) for rank, rows in enumerate(plans.rows)})
    assert [found[rank] for rank in (0, 1)] == plans.plans
    assert not plans.divisible


def test_a_failed_rank_is_planned_alone() -> None:
    plans = plan_ranks([4, 3, 2, 5, 1, 1], 2, 6)
    (rank, plan), *none = plans.for_rows({1: np.array([5, 0])}).items()
    assert (rank, none) == (1, [])
    assert plan.lengths.tolist() == [1, 4]
    assert plan.updates == [[[0, 1]]]
    assert plans.for_rows({}) == {}


@pytest.mark.parametrize("more", [{}, {"groups": ["a", "a"]}, {"tree": tree_of([(1,) * 5, (2,) * 4])}])
def test_ranks_without_rows_run_dummies_without_rows(more: dict[str, Any]) -> None:
    plans = plan_ranks([5, 4], 4, 5, loss_tokens=[3, 1], options=PlanOptions(multiple_of=2), **more)
    for rows, plan in zip(plans.rows, plans.plans, strict=True):
        assert plan.counts == [2]
        if not rows:
            assert (plan.updates, plan.is_dummy, plan.loads()) == ([[[], []]], [True, True], [0, 0])
            assert [weights.shape for weights in plan.loss_weights("token-mean")] == [(0,), (0,)]
    assert sorted(itertools.chain(*plans.rows)) == [0, 1]
    assert [plans.metrics()[f"plan/{name}"] for name in ("rows", "tokens")] == [2, 9]
    (first, second) = plan_ranks([5, 4], 2, 8).for_rows({0: np.array([0]), 1: np.array([], np.int64)}).values()
    assert (first.updates, second.updates) == ([[[0]]], [[[]]])


def test_no_rows_at_all() -> None:
    plans = plan_ranks([], 3, 8, loss_tokens=[], options=PlanOptions(num_updates=2))
    assert plans.rows == [[], [], []]
    assert [plan.updates for plan in plans.plans] == [[[], []]] * 3
    assert plans.metrics()["plan/rank_imbalance"] == 1
    assert plans.metrics()["plan/rows"] == 0


def test_metrics_by_hand() -> None:
    plans = plan_ranks([6, 5, 4, 3], 2, 7, options=PlanOptions(work=lambda n: n * n))
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
    several = plan_ranks([6, 5, 4, 3, 9], 2, 8, options=PlanOptions(num_updates=2)).metrics()
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
    work = Flops(6e9, 6.0 * 24 * 2048)
    metrics = plan_ranks(lengths, 8, 16_000, options=PlanOptions(work=work)).metrics()
    assert metrics["plan/rank_imbalance"] <= 1.1
    assert metrics["plan/rows"] == 512


# -------------------------------------------------------------------- loss weights


def whole_loss(losses: Any, mask: Any, rows: Sequence[int], mode: str) -> Any:
    """The loss of these rows at once, token by token."""
    total, tokens, counted = 0.0, 0.0, 0
    for row in rows:
        own = [(losses[row][place], float(mask[row][place])) for place in range(len(mask[row]))]
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
    given_: tuple[Case, int], kind: str, mode: Any, seed: int, more_dummies: bool
) -> None:
    case, ranks = given_
    rng = np.random.default_rng(seed)
    shape = (len(case.lengths), 5)
    losses, mask = rng.normal(size=shape), MASKS[kind](rng, shape)
    plans = case.ranks(ranks, loss_tokens=mask.sum(-1).tolist())
    own = plans.plans
    if more_dummies and case.lengths:
        own = [plan.with_count(max(plan.counts) + 2 * case.options.multiple_of) for plan in own]
    for gradients, share in (("mean", 1 / ranks), ("sum", 1.0)):
        weights = [plan.loss_weights(mode, gradients=gradients) for plan in own]  # type: ignore[arg-type]
        for plan, whole in zip(own, weights, strict=True):
            parts = [plan.loss_weights(mode, number, gradients=gradients) for number in range(len(plan.updates))]  # type: ignore[arg-type]
            assert [some.tolist() for part in parts for some in part] == [some.tolist() for some in whole]
            assert [len(part) for part in parts] == plan.counts
        assert [len(some) for some in weights] == [len(plan.micro_batches) for plan in own]
        assert all(np.isfinite(factors).all() for some in weights for factors in some)
        for update in range(case.options.num_updates):
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


FEW: dict[str, Any] = {
    "rows": {},
    "a group": {"groups": ["a", "b", "b"]},
    "a tree": {"tree": [(1, 2), (1, 3), (1, 3)]},
    "both": {"groups": ["a", "b", "b"], "tree": [(1, 2), (1, 3), (1, 3)]},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("updates", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_rows_than_ranks(count: int, ranks: int, updates: int, kind: str, mode: Any) -> None:
    """All ranks run equally often; results come in order, and gradients are those of a loop over rows and tokens."""
    more = {key: tree_of(some[:count]) if key == "tree" else some[:count] for key, some in FEW[kind].items()}
    mask = [[1, 1, 0], [0, 1, 0], [1, 1, 1]][:count]
    options = PlanOptions(num_updates=updates, multiple_of=2)  # so that ranks with rows run dummies, too
    plans = plan_ranks([2] * count, ranks, 2, loss_tokens=[sum(row) for row in mask], options=options, **more)
    assert len({tuple(plan.counts) for plan in plans.plans}) == 1
    assert (sum(plans.plans[0].counts) > 0) is (count > 0)

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()
    inputs, of_loss = torch.randn(count, 3, 3, dtype=torch.float64, generator=generator), torch.tensor(mask).view(-1, 3)
    seen: list[int] = []
    for number in range(updates):
        found, rows = torch.zeros(3, dtype=torch.float64), list[int]()
        for own, plan in zip(plans.rows, plans.plans, strict=True):
            batch = TensorDict({"x": inputs[own], "mask": of_loss[own]}, batch_size=[len(own)])
            parts = list(plan.apply(batch, number))
            assert len(parts) == plan.counts[number]
            rows += [own[row] for some in real(plan)[number] for row in some]
            for part, factors in zip(parts, plan.loss_weights(mode, number), strict=True):
                token_loss = (part["x"] @ weight).square()
                loss = (torch.from_numpy(factors) * (token_loss * part["mask"]).sum(-1)).sum()
                found += torch.autograd.grad(loss, weight)[0] / ranks  # their mean, as DDP has it
        token_loss = [[(inputs[row, place] @ weight).square() for place in range(3)] for row in range(count)]
        whole = whole_loss(token_loss, mask, rows, mode) + 0 * weight.sum()
        assert torch.allclose(found, torch.autograd.grad(whole, weight)[0], rtol=1e-12, atol=1e-14)
        assert bool(found.any()) is bool(rows)
        seen += rows
    assert sorted(seen) == list(range(count))
    for own, plan in zip(plans.rows, plans.plans, strict=True):
        outputs = [part * 2 for part in plan.apply(inputs[own])]
        assert torch.equal(plan.restore(outputs) if outputs else inputs[own], inputs[own] * 2)


def test_loss_weights_by_hand() -> None:
    plan = plan_micro_batches([4, 3, 2, 1], 5, loss_tokens=[3, 0, 2, 0.5])
    assert plan.updates == [[[0, 3], [1, 2]]]
    by_mode = {mode: [some.tolist() for some in plan.loss_weights(mode)] for mode in MODES}
    assert by_mode["token-mean"] == [[1 / 5.5] * 2] * 2
    assert by_mode["seq-mean-token-sum"] == [[1 / 3] * 2] * 2
    assert by_mode["seq-mean-token-mean"] == [[1 / 3 / 3, 1 / 3 / 0.5], [0, 1 / 3 / 2]]
