"""Micro-batch plans against naive loops: each promise of MicroBatchPlan is a test of that name."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from plan_cases import Case, Flops, Table, for_cases, real

from maskpack.planning import PlanOptions, plan_micro_batches


def of(**options: Any) -> PlanOptions:
    return PlanOptions(**options)


# -------------------------------------------------------------------- the promises


@for_cases()
def test_every_row_once(case: Case) -> None:
    plan = case.plan
    assert sorted(row for update in real(plan) for rows in update for row in rows) == list(range(len(case.lengths)))
    assert all(rows and rows == sorted(rows) for rows in plan.micro_batches)
    assert all(type(row) is int for rows in plan.micro_batches for row in rows)
    assert plan.num_rows == len(case.lengths)
    assert plan.lengths.tolist() == case.lengths
    assert plan.lengths.dtype == np.int64


def check_budget(case: Case) -> None:
    plan = case.plan
    over = [rows for rows in case.units if case.too_large(rows)]
    assert plan.oversized == sorted(itertools.chain.from_iterable(over))
    for rows in (rows for update in real(plan) for rows in update):
        if case.too_large(rows):
            assert rows in over, "alone"


@for_cases()
def test_budget_is_never_exceeded_except_by_reported_rows(case: Case) -> None:
    check_budget(case)


@pytest.mark.parametrize(
    "case",
    [
        Case([0, 1], 1.0, of(cost=Table((1.0, 2.0**-53))), "gg"),  # a hair over
        Case([0, 1], 1.0, of(cost=Table((1 - 2.0**-53, 2.0**-53))), "gg"),  # as large
        Case([0], 2**53 + 3, of(cost=Table((2.0**53 + 4,)))),
        Case([1] * 1500, 1.0, of(cost=Table((1e300,))), [0] * 1500),
    ],
)
def test_budget_is_never_exceeded_by_rounding(case: Case) -> None:
    check_budget(case)


@for_cases()
def test_groups_stay_whole(case: Case) -> None:
    of_row = {row: number for number, rows in enumerate(case.units) for row in rows}
    for rows in (rows for update in real(case.plan) for rows in update):
        assert sorted(row for unit in {of_row[row] for row in rows} for row in case.units[unit]) == rows


@for_cases()
def test_counts_are_multiples(case: Case) -> None:
    plan, step = case.plan, case.options.multiple_of
    assert len(plan.updates) == len(plan.dummies) == case.options.num_updates
    bare = case.but(multiple_of=1).plan
    assert plan.counts == [-(-least // step) * step for least in bare.counts]
    assert plan.counts == [len(update) for update in plan.updates]
    assert bare.dummies == [0] * len(bare.updates)


@for_cases(st.data())
def test_exactly_k_after_with_count(case: Case, data: st.DataObject) -> None:
    before = case.plan
    factor = case.options.multiple_of
    more = [data.draw(st.integers(0, 8)) * factor for _ in before.counts]
    wanted = [count + extra for count, extra in zip(before.counts, more, strict=True)]
    plan = before.with_count(wanted)
    assert plan.counts == [len(update) for update in plan.updates] == wanted
    assert plan.oversized == before.oversized
    assert plan.lengths is before.lengths
    for old, new, dummies in zip(real(before), real(plan), plan.dummies, strict=True):
        assert not dummies or all(map(case.is_whole, new)), "what can be split is split first"
        assert sorted(itertools.chain(*old)) == sorted(itertools.chain(*new)), "in its update"
        for rows in new:
            assert not case.too_large(rows) or rows in case.units
            if case.options.work is None:
                assert any(set(rows) <= set(whole) for whole in old), "a part of one that was"
        most = max(map(case.work, old), default=Fraction(0))
        assert max(map(case.work, new), default=Fraction(0)) <= most * (1 + Fraction(1, 10**12))
    if len(set(wanted)) == 1:
        assert before.with_count(wanted[0]).updates == plan.updates
    if not any(before.dummies) and wanted == before.counts:
        assert plan is before


@for_cases(st.data())
def test_dummies_run_the_shortest_row_and_count_nothing(case: Case, data: st.DataObject) -> None:
    plan = plan_micro_batches(case.lengths, case.token_budget, **case.given, loss_tokens=case.lengths)
    up = data.draw(st.integers(1, 3)) * case.options.multiple_of
    plan = plan.with_count(max(plan.counts) + up)
    shortest = [min((length for length in case.lengths if length), default=0)] if case.lengths else []
    weights = plan.loss_weights("token-mean")
    ends = zip(plan.updates, plan.dummies, strict=True)
    assert plan.is_dummy == [at >= len(update) - dummies for update, dummies in ends for at in range(len(update))]
    assert sum(plan.is_dummy) == sum(plan.dummies)
    for rows, dummy, own, load in zip(plan.micro_batches, plan.is_dummy, weights, plan.loads(), strict=True):
        if dummy:
            assert [case.lengths[row] for row in rows] == shortest
            assert not rows or not case.too_large(rows) or rows[0] in plan.oversized
            assert (own.tolist(), load) == ([0.0] * len(rows), 0)


@for_cases()
def test_updates_are_the_rows_in_order(case: Case) -> None:
    plan, units = case.plan, case.units
    updates = [sorted(itertools.chain(*update)) for update in real(plan)]
    ends = [0, *itertools.accumulate(len(rows) for rows in units)]
    begin = 0
    for number, rows in enumerate(updates):
        held = [unit for unit in range(len(units)) if set(units[unit]) <= set(rows)]
        assert sorted(itertools.chain(*(units[unit] for unit in held))) == rows
        assert held == list(range(begin, begin + len(held))), "consecutive, by first rows"
        begin += len(held)
        wanted = len(case.lengths) * (number + 1) // len(updates)
        assert abs(ends[begin] - wanted) == min(abs(end - wanted) for end in ends), "the nearest end of a group"
    assert begin == len(units)
    if case.labels is None:
        sizes = [len(rows) for rows in updates]
        assert max(sizes) - min(sizes) <= 1


@for_cases()
def test_the_most_work_comes_first(case: Case) -> None:
    plan = case.plan
    loads = iter(plan.loads())
    for update, own in zip(plan.updates, real(plan), strict=True):
        seen = list(itertools.islice(loads, len(update)))
        np.testing.assert_allclose(seen[: len(own)], [float(case.work(rows)) for rows in own], rtol=1e-12)
        assert seen == sorted(seen, reverse=True)


@for_cases(kinds=["tokens", "padded", "own"])
def test_work_orders_micro_batches_and_changes_no_other_thing(case: Case) -> None:
    plain = case.but(work=None, multiple_of=1)  # nothing is split
    with_work = plain.but(work=case.options.work or Flops(1.0, 0.5))
    for old, new in zip(real(plain.plan), real(with_work.plan), strict=True):
        assert sorted(old) == sorted(new)


@for_cases(st.integers(0, 2))
def test_a_plan_is_the_same_again_and_after_a_pickle(case: Case, more: int) -> None:
    plan, again = case.plan, case.plan
    count = (max(plan.counts) + more * case.options.multiple_of) if case.lengths else 0
    for other in (again, pickle.loads(pickle.dumps(plan))):
        assert (plan.updates, plan.dummies, plan.oversized) == (other.updates, other.dummies, other.oversized)
        assert plan.with_count(count).updates == other.with_count(count).updates
        assert (plan.loads(), plan.metrics()) == (other.loads(), other.metrics())


# -------------------------------------------------------------------- as few as best fit finds


def by_hand(case: Case, units: list[list[int]]) -> list[list[int]]:
    """Best fit, one unit after the other: the largest first, each into the open micro-batch with the least room."""
    padded = case.options.cost == "padded"
    longest = [max(case.lengths[row] for row in rows) for rows in units]
    size = [len(rows) if padded else case.cost(rows) for rows in units]
    order = sorted(range(len(units)), key=lambda unit: (-longest[unit] if padded else 0, -size[unit]))
    bins: list[dict[str, Any]] = []
    for clock, unit in enumerate(order):
        fits = [b for b in bins if b["room"] >= size[unit]]
        if fits:
            found = min(fits, key=lambda b: (b["room"], -b["clock"]))
        else:
            room = case.token_budget // max(longest[unit], 1) if padded else Fraction(case.token_budget)
            found = {"room": room, "items": []}
            bins.append(found)
        found["items"] += units[unit]
        found["room"] -= size[unit]
        found["clock"] = clock
    return sorted(sorted(b["items"]) for b in bins)


WHOLE = st.sampled_from(("tokens", "padded", Flops(1.0, 0.125), Table((0.5, 0.25, 3.0, 0.0))))


@for_cases(WHOLE, st.integers(1, 60), kinds=["tokens"], work=False)
def test_micro_batches_are_those_of_best_fit(case: Case, cost: Any, budget: int) -> None:
    case = dataclasses.replace(case, token_budget=budget).but(cost=cost, multiple_of=1)
    for update in case.plan.updates:
        mine = [rows for rows in case.units if set(rows) <= set(itertools.chain(*update))]
        assert sorted(update) == by_hand(case, mine)


def test_a_budget_of_rows() -> None:
    """With the cost 1 of each row, rows keep their order."""
    plan = plan_micro_batches([1, 9, 1, 1, 9, 0, 1], 3, options=of(cost=np.ones_like))
    assert plan.updates == [[[0, 1, 2], [3, 4, 5], [6]]]


# -------------------------------------------------------------------- splits


def test_the_largest_is_split_into_like_halves() -> None:
    plan = plan_micro_batches([6, 5, 4, 3, 1, 1], 18)
    assert plan.updates == [[[0, 1, 2, 3], [4, 5]]]
    assert plan.with_count(3).updates == [[[0, 3], [1, 2], [4, 5]]]
    assert plan.with_count(4).updates == [[[1, 2], [0], [3], [4, 5]]]
    seven = plan.with_count(7)
    assert seven.updates == [[[0], [1], [2], [3], [4], [5], [4]]]
    assert seven.dummies == [1]
    assert seven.is_dummy == [False] * 6 + [True]


def test_work_says_which_is_the_largest() -> None:
    """[0] and [1] cost most, [2 3] are most work."""
    work = Table((0.0, 100.0, 90.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    plan = plan_micro_batches([9, 9, 1, 2, 3], 9, options=of(work=work))
    assert sorted(plan.micro_batches) == [[0], [1], [2, 3, 4]]
    assert plan.loads() == [190, 1, 1]
    assert sorted(plan.with_count(4).micro_batches) == [[0], [1], [2], [3, 4]]


def test_padded_micro_batches_are_split_into_long_and_short_rows() -> None:
    plan = plan_micro_batches([1, 8, 1, 8, 7], 40, options=of(cost="padded"))
    assert plan.updates == [[[0, 1, 2, 3, 4]]]
    assert plan.with_count(2).updates == [[[0, 2, 4], [1, 3]]]
    assert plan.with_count(2).loads() == [21, 16]


@for_cases(st.integers(1, 4), work=False, groups=False, kinds=["tokens", "padded", "own"])
def test_the_largest_are_split(case: Case, more: int) -> None:
    before = case.but(num_updates=1, multiple_of=1).plan
    if not case.lengths:
        return
    new = real(before.with_count(before.counts[0] + more))[0]
    parted = [rows for rows in real(before)[0] if rows not in new]
    for rows in real(before)[0]:
        if rows in new and len(rows) > 1:
            assert all(case.work(rows) <= case.work(other) * (1 + Fraction(1, 10**12)) for other in parted)


def test_with_count_takes_each_update_its_own() -> None:
    plan = plan_micro_batches([4, 4, 4, 4, 4], 8, options=of(num_updates=2))
    assert plan.counts == [1, 2]
    for counts in ([2, 3], (2, 3), np.array([2, 3])):
        assert plan.with_count(counts).counts == [2, 3]
    assert plan.with_count([2, 3]).dummies == [0, 0]
    assert plan.with_count(np.int32(4)).dummies == [2, 1]
    assert plan.with_count([2, 3]).with_count(3).counts == [3, 3]
    assert plan.with_count([1, 2]) is plan


def test_dummies_are_replaced_by_a_smaller_count() -> None:
    plan = plan_micro_batches([3, 3], 3, options=of(multiple_of=2)).with_count(6)
    assert plan.dummies == [4]
    assert plan.with_count(4).dummies == [2]
    assert plan.with_count(2).updates == [[[0], [1]]]


def test_an_update_without_rows_has_no_micro_batches() -> None:
    plan = plan_micro_batches([3], 3, options=of(num_updates=3, multiple_of=2))
    assert plan.updates == [[], [], [[0], [0]]]
    assert plan.dummies == [0, 0, 1]
    assert plan.with_count(2).updates == [[[0], [0]]] * 3
    assert plan.with_count(2).dummies == [2, 2, 1]


def test_a_dummy_is_no_empty_row_if_there_is_another() -> None:
    assert plan_micro_batches([5, 0, 3, 3], 5).with_count(5).updates == [[[0], [2], [3], [1], [2]]]
    assert plan_micro_batches([0, 0], 5).with_count(3).updates == [[[0], [1], [0]]]
    assert plan_micro_batches([5, 3], 5, groups=[0, 0]).with_count(2).updates == [[[0, 1], [1]]]


# -------------------------------------------------------------------- kinds of input


@pytest.mark.parametrize(
    "made",
    [
        tuple,
        np.array,
        lambda x: np.array(x, np.uint8),
        lambda x: np.array(x, np.int32)[::-1][::-1],
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor(x, dtype=torch.uint8),
    ],
)
def test_kinds_of_lengths_and_labels(made: Callable[[list[int]], Any]) -> None:
    lengths, groups, tokens = [5, 0, 7, 2, 2], [1, 2, 1, 0, 2], [2, 0, 3, 0, 1]
    want = plan_micro_batches(lengths, 12, groups=groups, loss_tokens=tokens)
    own = made(lengths)
    plan = plan_micro_batches(own, 12, groups=made(groups), loss_tokens=made(tokens))
    assert plan.updates == want.updates == [[[0, 2], [1, 3, 4]]]
    assert plan.lengths.dtype == np.int64
    assert plan.lengths.tolist() == lengths
    assert [w.tolist() for w in plan.loss_weights("token-mean")] == [
        w.tolist() for w in want.loss_weights("token-mean")
    ]
    assert list(own) == list(made(lengths)), "and the lengths are as they were"


@pytest.mark.parametrize("made", [list, np.array, torch.tensor])
@pytest.mark.parametrize("cost", ["tokens", "padded", Flops(1.0, 1.0)])
def test_no_rows(made: Callable[[list[int]], Any], cost: Any) -> None:
    options = of(cost=cost, num_updates=2)
    plan = plan_micro_batches(made([]), 5, groups=made([]), loss_tokens=made([]), options=options)
    assert plan.updates == [[], []]
    assert (plan.micro_batches, plan.dummies, plan.oversized, plan.counts) == ([], [0, 0], [], [0, 0])
    assert plan.loss_weights("seq-mean-token-mean") == []
    assert plan.with_count(0) is plan
    assert list(plan.apply(torch.zeros(0, 3))) == []
    assert plan.metrics()["plan/fill"] == plan.metrics()["plan/imbalance"] == 1


@pytest.mark.parametrize("budget", [12, np.int32(12), np.uint8(12), np.int64(12)])
def test_kinds_of_budgets(budget: Any) -> None:
    for options in (of(), of(cost=lambda n: n)):
        assert plan_micro_batches([5, 9, 2, 7], budget, options=options).updates == [[[0, 3], [1, 2]]]


def test_a_cost_cannot_change_the_lengths() -> None:
    def cost(lengths: Any) -> Any:
        lengths *= 2
        return lengths

    own = np.array([5, 9, 2, 7])
    plan = plan_micro_batches(own, 24, options=of(cost=cost, work=cost))
    assert plan.lengths.tolist() == own.tolist() == [5, 9, 2, 7]


def test_a_plan_travels_without_its_functions() -> None:
    """Which pickle could not say."""
    options = of(cost=lambda n: n / 2, work=lambda n: n * n, multiple_of=2)
    plan = plan_micro_batches([4, 2, 4], 2.5, options=options)
    there = pickle.loads(pickle.dumps(plan))
    assert (there.updates, there.loads(), there.metrics()) == (plan.updates, plan.loads(), plan.metrics())
    assert there.with_count(4).updates == plan.with_count(4).updates


@pytest.mark.parametrize(
    ("budget", "numbers", "counts", "oversized"),
    [
        (0.3, (0.1, 0.1, 0.1), [2], []),  # three times 0.1 is above 0.3
        (1.0, (0.1,) * 10, [2], []),
        (1.0, (0.25,) * 4, [1], []),
        (1.0, (1.0, 5e-324), [2], []),
        (0.1 + 0.2, (0.1, 0.2), [1], []),
        (0.3, (0.1, 0.2), [2], []),
        (1 / 3, (1 / 3,), [1], []),
        (5e-324, (5e-324, 1e-323), [2], [1]),
        (1e308, (1.5e308, 9e307), [2], [0]),
    ],
)
def test_costs_of_fine_numbers_add_up_exactly(budget: float, numbers: Any, counts: Any, oversized: Any) -> None:
    plan = plan_micro_batches(range(len(numbers)), budget, options=of(cost=Table(numbers)))
    assert (plan.counts, plan.oversized) == (counts, oversized)


def test_metrics_by_hand() -> None:
    plan = plan_micro_batches([5, 9, 2, 7, 8, 1, 20, 4], 12, options=of(num_updates=2)).with_count(4)
    assert plan.updates == [[[1], [3], [0], [2]], [[6], [4], [7], [5]]]
    assert plan.metrics() == {
        "plan/rows": 8.0,
        "plan/updates": 2.0,
        "plan/micro_batches": 8.0,
        "plan/dummies": 0.0,
        "plan/oversized_rows": 1.0,
        "plan/tokens": 56.0,
        "plan/padding_tokens": 0.0,
        "plan/fill": 1.0,
        "plan/imbalance": 20 / (33 / 4),
        "plan/budget_use": 56 / (8 * 12),
    }
    padded = plan_micro_batches([5, 9, 2, 7], 18, options=of(cost="padded"))
    assert padded.updates == [[[1, 3], [0, 2]]]
    found = padded.metrics()
    assert (found["plan/padding_tokens"], found["plan/fill"]) == (5, 23 / 28)
    assert (found["plan/imbalance"], found["plan/budget_use"]) == (18 / 14, 28 / 36)
    some = padded.with_count(6).metrics()
    assert (some["plan/dummies"], some["plan/micro_batches"], some["plan/tokens"]) == (2, 6, 23)
    assert (some["plan/fill"], some["plan/imbalance"], some["plan/budget_use"]) == (1, 9 / (23 / 4), 23 / (4 * 18))
    half = plan_micro_batches([5, 9, 2, 7], 6.0, options=of(cost=lambda n: n / 2, work=lambda n: n * n))
    assert half.updates == [[[1, 2], [0, 3]]]
    assert half.loads() == [85, 74]
    assert half.metrics()["plan/budget_use"] == 11.5 / 12
    assert half.metrics()["plan/imbalance"] == 85 / 79.5
