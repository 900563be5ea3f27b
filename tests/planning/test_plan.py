"""Micro-batch plans against naive loops: each promise of MicroBatchPlan is a test of that name."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskpack.errors import PlanError
from maskpack.planning import FlopsModel, MicroBatchPlan, PrefixTree, plan_micro_batches, plan_ranks
from maskpack.planning.packing import best_fit, halved

many = settings(max_examples=max(60, settings.default.max_examples))
"""Plans take a millisecond: more examples than the profile has."""
KINDS = ("tokens", "padded", "own", "counted")
"""What a budget is of: a function of your own is one; "counted" has none."""

Lengths = Sequence[int]


# -------------------------------------------------------------------- what is planned


@dataclasses.dataclass(frozen=True)
class Table:
    """A cost of rows by length, any numbers at all."""

    values: tuple[float, ...]

    def __call__(self, lengths: Any) -> list[float]:
        return [self.values[int(length) % len(self.values)] for length in lengths]


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: list[int]
    token_budget: Any
    options: dict[str, Any]

    @property
    def plan(self) -> MicroBatchPlan:
        return plan_micro_batches(self.lengths, self.token_budget, **self.options)

    def option(self, name: str) -> Any:
        return (
            {"cost": "tokens", "num_updates": 1, "multiple_of": 1}.get(name)
            if name not in self.options
            else (self.options[name])
        )

    def without(self, *names: str) -> Case:
        return Case(self.lengths, self.token_budget, {k: v for k, v in self.options.items() if k not in names})

    @property
    def groups(self) -> list[list[int]]:
        """Rows that stay together, in the order of their first rows."""
        labels = self.option("groups")
        if labels is None:
            return [[row] for row in range(len(self.lengths))]
        found: dict[Any, list[int]] = {}
        for row, label in enumerate(labels):
            found.setdefault(label, []).append(row)
        return list(found.values())

    def cost(self, rows: Sequence[int]) -> Fraction:
        cost = self.option("cost")
        if cost == "padded":
            return Fraction(len(rows) * max(self.lengths[row] for row in rows))
        return self._sum("tokens" if self.token_budget is None else cost, rows)

    def work(self, rows: Sequence[int]) -> Fraction:
        work = self.option("work")
        return self.cost(rows) if work is None else self._sum(work, rows)

    def _sum(self, cost: Any, rows: Sequence[int]) -> Fraction:
        if cost == "tokens":
            return Fraction(sum(self.lengths[row] for row in rows))
        of_rows = cost(np.array([self.lengths[row] for row in rows], np.int64))
        return sum((Fraction(float(item)) for item in of_rows), Fraction(0))

    def too_large(self, rows: Sequence[int]) -> bool:
        most = self.option("max_rows")
        if most is not None and len(rows) > most:
            return True
        return self.token_budget is not None and self.cost(rows) > Fraction(self.token_budget)


def real(plan: MicroBatchPlan) -> list[list[list[int]]]:
    """The micro-batches of each update, without dummies."""
    return [update[: len(update) - dummies] for update, dummies in zip(plan.updates, plan.dummies, strict=True)]


FINE = (0.0, 5e-324, 2.0**-53, 0.1, 1 / 3, 1.0, 1 - 2.0**-53, 1e16, 7.0)
"""Numbers whose float sums are not their sums."""


@st.composite
def costs(draw: st.DrawFn) -> Callable[[Any], Any]:
    way = draw(st.integers(0, 3))
    if way == 0:
        return FlopsModel(draw(st.sampled_from((0.0, 1.0, 0.1))), draw(st.sampled_from((0.125, 1 / 3, 7.0))))
    some = st.sampled_from(FINE) if way == 1 else st.floats(0, 100) if way == 2 else st.integers(0, 20).map(float)
    return Table(tuple(draw(st.lists(some, min_size=1, max_size=6))))


@st.composite
def cases(draw: st.DrawFn, kind: str, *, work: bool = True, groups: bool = True) -> Case:
    rows = draw(st.integers(0, 24))
    most = draw(st.sampled_from((1, 4, 30, 200)))
    lengths = draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
    options: dict[str, Any] = {"num_updates": draw(st.integers(1, 4)), "multiple_of": draw(st.integers(1, 3))}
    options |= {name: draw(st.integers(1, 6)) for name in ("min_count", "max_rows") if draw(st.booleans())}
    if groups and draw(st.booleans()):
        labels = draw(st.lists(st.sampled_from(("a", "b", 2, 3, None, (4, 4))), min_size=rows, max_size=rows))
        options["groups"] = sorted(labels, key=str) if draw(st.booleans()) else labels
    if kind == "counted":
        return Case(lengths, None, {**options, "max_rows": draw(st.integers(1, 6))})
    if work and draw(st.booleans()):
        options["work"] = draw(costs())
    options["cost"] = draw(costs()) if kind == "own" else kind
    if kind != "own":
        return Case(lengths, draw(st.integers(1, max(2 * most, 8)) | st.just(10**30)), options)
    found = [float(item) for item in options["cost"](np.array(lengths, np.int64))]
    sums = list(itertools.accumulate(found))[:4]
    budgets = [item for item in (*found, *sums, 0.1, 1.0, 50.0) if item > 0]
    return Case(lengths, draw(st.sampled_from(budgets) | st.integers(1, 100)), options)


def for_cases(*more: Any, kinds: Sequence[str] = KINDS, **options: Any) -> Callable[[Any], Any]:
    """The test once for each kind, over many cases of it."""

    def decorated(test: Any) -> Any:
        def run(kind: str) -> None:
            many(given(cases(kind, **options), *more)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("kind", kinds)(run)

    return decorated


GROUP_A_HAIR_OVER = Case([0, 1], 1.0, {"cost": Table((1.0, 2.0**-53)), "groups": "gg"})
GROUP_AS_LARGE = Case([0, 1], 1.0, {"cost": Table((1 - 2.0**-53, 2.0**-53)), "groups": "gg"})
ROW_A_HAIR_OVER = Case([0], 2**53 + 3, {"cost": Table((2.0**53 + 4,))})
MANY_OVER = Case([1] * 1500, 1.0, {"cost": Table((1e300,)), "groups": [0] * 1500})


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


@for_cases()
def test_budget_is_never_exceeded_except_by_reported_rows(case: Case) -> None:
    check_budget(case)


@pytest.mark.parametrize("case", [GROUP_A_HAIR_OVER, GROUP_AS_LARGE, ROW_A_HAIR_OVER, MANY_OVER])
def test_budget_is_never_exceeded_by_rounding(case: Case) -> None:
    check_budget(case)


def check_budget(case: Case) -> None:
    plan = case.plan
    over = [rows for rows in case.groups if case.too_large(rows)]
    assert plan.oversized == sorted(itertools.chain.from_iterable(over))
    for rows in (rows for update in real(plan) for rows in update):
        if case.too_large(rows):
            assert rows in over, "alone"


@for_cases()
def test_groups_stay_whole(case: Case) -> None:
    of_row = {row: number for number, rows in enumerate(case.groups) for row in rows}
    for rows in (rows for update in real(case.plan) for rows in update):
        assert sorted(row for unit in {of_row[row] for row in rows} for row in case.groups[unit]) == rows


@for_cases()
def test_counts_are_multiples(case: Case) -> None:
    plan = case.plan
    assert len(plan.updates) == len(plan.dummies) == case.option("num_updates")
    bare = case.without("min_count", "multiple_of").plan
    for count, update, least in zip(plan.counts, plan.updates, bare.counts, strict=True):
        needed = max(least, case.option("min_count") or 0) if least else 0
        assert len(update) == count == -(-needed // case.option("multiple_of")) * case.option("multiple_of")
    assert bare.dummies == [0] * len(bare.updates)
    most = case.option("max_rows") or len(case.lengths)
    assert all(len(rows) <= most or rows in case.groups for rows in plan.micro_batches)


@for_cases(st.data())
def test_exactly_k_after_with_count(case: Case, data: st.DataObject) -> None:
    before = case.plan
    factor = case.option("multiple_of")
    more = [data.draw(st.integers(0, 8 if case.lengths else 0)) * factor for _ in before.counts]
    wanted = [count + extra for count, extra in zip(before.counts, more, strict=True)]
    plan = before.with_count(wanted)
    assert plan.counts == wanted
    assert [len(update) for update in plan.updates] == wanted
    assert sorted(row for update in real(plan) for rows in update for row in rows) == list(range(len(case.lengths)))
    assert plan.oversized == before.oversized
    assert plan.lengths is before.lengths
    for old, new, dummies in zip(real(before), real(plan), plan.dummies, strict=True):
        assert not dummies or all(rows in case.groups for rows in new), "what can be split is split first"
        assert sorted(itertools.chain(*old)) == sorted(itertools.chain(*new)), "in its update"
        for rows in new:
            assert not case.too_large(rows) or rows in case.groups
            if case.option("work") is None:
                assert any(set(rows) <= set(whole) for whole in old), "a part of one that was"
        most = max(map(case.work, old), default=Fraction(0))
        assert max(map(case.work, new), default=Fraction(0)) <= most * (1 + Fraction(1, 10**12))
    if len(set(wanted)) == 1:
        assert before.with_count(wanted[0]).updates == plan.updates
    if not any(before.dummies) and wanted == before.counts:
        assert plan is before


@for_cases(st.data())
def test_dummies_run_the_shortest_row_and_count_nothing(case: Case, data: st.DataObject) -> None:
    plan = plan_micro_batches(case.lengths, case.token_budget, **case.options, loss_tokens=case.lengths)
    if case.lengths:
        up = data.draw(st.integers(1, 3)) * case.option("multiple_of")
        plan = plan.with_count(max(plan.counts) + up)
    shortest = min((length for length in case.lengths if length), default=0)
    weights = plan.loss_weights("token-mean")
    assert len(plan.is_dummy) == len(plan.micro_batches) == len(weights) == len(plan.loads())
    at = 0
    for update, dummies in zip(plan.updates, plan.dummies, strict=True):
        for place, rows in enumerate(update):
            dummy = place >= len(update) - dummies
            assert plan.is_dummy[at] is dummy
            if dummy:
                assert len(rows) == 1
                assert case.lengths[rows[0]] == shortest
                assert not case.too_large(rows) or rows[0] in plan.oversized
                assert weights[at].tolist() == [0.0]
                assert plan.loads()[at] == 0
            at += 1
    assert sum(plan.is_dummy) == sum(plan.dummies)


@for_cases()
def test_updates_are_the_rows_in_order(case: Case) -> None:
    plan, units = case.plan, case.groups
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
    if case.option("groups") is None:
        assert list(itertools.chain(*updates)) == list(range(len(case.lengths)))
        sizes = [len(rows) for rows in updates]
        assert max(sizes) - min(sizes) <= 1


@for_cases()
def test_the_most_work_comes_first(case: Case) -> None:
    plan = case.plan
    loads = iter(plan.loads())
    for update, own in zip(plan.updates, real(plan), strict=True):
        seen = list(itertools.islice(loads, len(update)))
        np.testing.assert_allclose(seen[: len(own)], [float(case.work(rows)) for rows in own], rtol=1e-12)
        if case.token_budget is not None:
            assert seen == sorted(seen, reverse=True)


@for_cases(kinds=["counted"])
def test_count_based_plan_keeps_the_order(case: Case) -> None:
    plan, options, most = case.plan, case.options, case.options["max_rows"]
    firsts = [min(rows) for update in real(plan) for rows in update]
    assert firsts == sorted(firsts)
    assert plan.oversized == sorted(row for rows in case.groups if len(rows) > most for row in rows)
    if "groups" not in options:
        assert [row for update in real(plan) for rows in update for row in rows] == list(range(len(case.lengths)))
        if not {"min_count"} & set(options) and options["multiple_of"] == 1:
            for update in plan.updates:
                assert all(len(rows) == most for rows in update[:-1])


@for_cases(kinds=["tokens", "padded", "own"])
def test_work_orders_micro_batches_and_changes_no_other_thing(case: Case) -> None:
    work = case.option("work") or FlopsModel(1.0, 0.5)
    one = {"min_count": None, "multiple_of": 1}  # nothing is split
    plain = Case(case.lengths, case.token_budget, {**case.without("work").options, **one})
    with_work = Case(case.lengths, case.token_budget, {**plain.options, "work": work})
    for old, new in zip(real(plain.plan), real(with_work.plan), strict=True):
        assert sorted(old) == sorted(new)
        loads = [float(with_work.work(rows)) for rows in new]
        assert all(a >= b or a == pytest.approx(b) for a, b in itertools.pairwise(loads))


@for_cases()
def test_the_same_arguments_give_the_same_plan(case: Case) -> None:
    plan, again = case.plan, case.plan
    assert (plan.updates, plan.dummies, plan.oversized) == (again.updates, again.dummies, again.oversized)
    count = plan.counts[0] + 2 * case.option("multiple_of")
    if case.lengths:
        top = max(plan.counts) + count - count % case.option("multiple_of")
        assert plan.with_count(top).updates == again.with_count(top).updates


# -------------------------------------------------------------------- as few as best fit finds


def by_hand(case: Case, units: list[list[int]]) -> list[list[int]]:
    """Best fit, one unit after the other: the largest first, each into the open micro-batch with the least room."""
    padded = case.option("cost") == "padded"
    most = case.option("max_rows") or 10**9
    longest = [max(case.lengths[row] for row in rows) for rows in units]
    size = [len(rows) if padded else case.cost(rows) for rows in units]
    if padded:
        order = sorted(range(len(units)), key=lambda unit: (-longest[unit], -size[unit]))
    else:
        order = sorted(range(len(units)), key=lambda unit: -size[unit])
    bins: list[dict[str, Any]] = []
    for clock, unit in enumerate(order):
        rows = len(units[unit])
        fits = [b for b in bins if b["room"] >= size[unit] and b["rows"] + rows <= most]
        if fits:
            found = min(fits, key=lambda b: (b["room"], -b["clock"]))
        else:
            room = case.token_budget // max(longest[unit], 1) if padded else Fraction(case.token_budget)
            found = {"room": room, "rows": 0, "items": []}
            bins.append(found)
        found["items"] += units[unit]
        found["room"] -= size[unit]
        found["rows"] += rows
        found["clock"] = clock
    return sorted(sorted(b["items"]) for b in bins)


WHOLE = st.sampled_from(("tokens", "padded", FlopsModel(1.0, 0.125), Table((0.5, 0.25, 3.0, 0.0))))


@for_cases(WHOLE, st.integers(1, 60), kinds=["tokens"], work=False)
def test_micro_batches_are_those_of_best_fit(case: Case, cost: Any, budget: int) -> None:
    options = {name: value for name, value in case.options.items() if name not in ("min_count", "multiple_of")}
    case = Case(case.lengths, budget, {**options, "cost": cost})
    units = case.groups
    for update in case.plan.updates:
        mine = [rows for rows in units if set(rows) <= set(itertools.chain(*update))]
        assert sorted(update) == by_hand(case, mine)


@many
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=3, max_size=20), st.integers(1, 40))
def test_padded_micro_batches_of_groups(rows: list[tuple[int, int]], budget: int) -> None:
    """Groups of equal longest rows and other numbers of rows, some over the budget."""
    lengths, labels = ([row[part] for row in rows] for part in (0, 1))
    case = Case(lengths, budget, {"cost": "padded", "groups": labels})
    plan = case.plan
    assert sorted(plan.micro_batches) == by_hand(case, case.groups)
    assert plan.oversized == sorted(row for own in case.groups if case.too_large(own) for row in own)


@pytest.mark.parametrize("cost", ["tokens", "padded"])
def test_many_rows_are_packed_as_tightly_as_best_fit_does(cost: str) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5, 1, 600)), 1, 4000).astype(int).tolist()
    case = Case(lengths, 4000, {"cost": cost})
    assert sorted(case.plan.micro_batches) == by_hand(case, case.groups)
    few = Case(lengths, 4000, {"cost": cost, "max_rows": 7})
    assert sorted(few.plan.micro_batches) == by_hand(few, few.groups)
    if cost == "tokens":
        assert len(case.plan.micro_batches) <= -(-sum(lengths) // 4000) + 1


def test_padded_budget_counts_the_padding() -> None:
    plan = plan_micro_batches([10, 1, 9, 1, 1, 1], 20, cost="padded")
    assert plan.updates == [[[0, 2], [1, 3, 4, 5]]]
    assert plan_micro_batches([10, 1, 9, 1, 1, 1], 23).updates == [[[0, 1, 2, 3, 4, 5]]]
    assert plan_micro_batches([0] * 5, 2, cost="tokens").updates == [[[0, 1, 2, 3, 4]]]


def test_a_picture_of_the_module() -> None:
    plan = plan_micro_batches([5, 9, 2, 7, 8, 1, 6, 4], 12, num_updates=2)
    assert plan.updates == [[[0, 3], [1, 2]], [[4, 7], [5, 6]]]
    assert plan.micro_batches == [[0, 3], [1, 2], [4, 7], [5, 6]]
    assert (plan.dummies, plan.oversized, plan.counts) == ([0, 0], [], [2, 2])
    assert plan.loads() == [12, 11, 12, 7]
    assert plan.multiple_of == 1


# -------------------------------------------------------------------- splits


def test_the_largest_is_split_into_like_halves() -> None:
    plan = plan_micro_batches([6, 5, 4, 3, 1, 1], 18)
    assert plan.updates == [[[0, 1, 2, 3], [4, 5]]]
    assert plan.with_count(3).updates == [[[0, 3], [1, 2], [4, 5]]]
    assert plan.with_count(4).updates == [[[1, 2], [0], [3], [4, 5]]]
    assert plan.with_count(6).updates == [[[0], [1], [2], [3], [4], [5]]]
    seven = plan.with_count(7)
    assert seven.updates == [[[0], [1], [2], [3], [4], [5], [4]]]
    assert seven.dummies == [1]
    assert seven.is_dummy == [False] * 6 + [True]


def test_work_says_which_is_the_largest() -> None:
    """[0] and [1] cost most, [2 3] are most work."""
    work = Table((0.0, 100.0, 90.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    plan = plan_micro_batches([9, 9, 1, 2, 3], 9, work=work)
    assert sorted(plan.micro_batches) == [[0], [1], [2, 3, 4]]
    assert plan.loads() == [190, 1, 1]
    assert sorted(plan.with_count(4).micro_batches) == [[0], [1], [2], [3, 4]]


def test_padded_micro_batches_are_split_into_long_and_short_rows() -> None:
    plan = plan_micro_batches([1, 8, 1, 8, 7], 40, cost="padded")
    assert plan.updates == [[[0, 1, 2, 3, 4]]]
    assert plan.with_count(2).updates == [[[0, 2, 4], [1, 3]]]
    assert plan.with_count(2).loads() == [21, 16]


def test_counted_micro_batches_are_split_in_the_middle() -> None:
    plan = plan_micro_batches([1, 1, 1, 1, 9, 1, 1], None, max_rows=4)
    assert plan.updates == [[[0, 1, 2, 3], [4, 5, 6]]]
    assert plan.with_count(3).updates == [[[0, 1, 2, 3], [4], [5, 6]]]
    assert plan.with_count(4).updates == [[[0, 1], [2, 3], [4], [5, 6]]]


@many
@given(st.lists(st.integers(0, 50), min_size=2, max_size=12))
def test_halves_differ_by_one_item_at_most(weights: list[int]) -> None:
    a, b = halved(range(len(weights)), [float(weight) for weight in weights])
    assert a
    assert b
    assert sorted(a + b) == list(range(len(weights)))
    sums = sum(weights[item] for item in a), sum(weights[item] for item in b)
    assert abs(sums[0] - sums[1]) <= max(weights)
    if max(weights) == min(weights):
        assert abs(len(a) - len(b)) <= 1


@for_cases(st.integers(1, 4), work=False, groups=False)
def test_the_largest_are_split(case: Case, more: int) -> None:
    before = case.without("num_updates", "multiple_of").plan
    if not case.lengths:
        return
    after = before.with_count(before.counts[0] + more)
    new = real(after)[0]
    parted = [rows for rows in real(before)[0] if rows not in new]
    for rows in real(before)[0]:
        if rows in new and len(rows) > 1:
            assert all(case.work(rows) <= case.work(other) * (1 + Fraction(1, 10**12)) for other in parted)


def test_with_count_takes_each_update_its_own() -> None:
    plan = plan_micro_batches([4, 4, 4, 4, 4], 8, num_updates=2)
    assert plan.counts == [1, 2]
    for counts in ([2, 3], (2, 3), np.array([2, 3])):
        assert plan.with_count(counts).counts == [2, 3]
    assert plan.with_count([2, 3]).dummies == [0, 0]
    assert plan.with_count(np.int32(4)).dummies == [2, 1]
    assert plan.with_count([2, 3]).with_count(3).counts == [3, 3]
    assert plan.with_count([1, 2]) is plan


def test_dummies_are_replaced_by_a_smaller_count() -> None:
    plan = plan_micro_batches([3, 3], 3, multiple_of=2).with_count(6)
    assert plan.dummies == [4]
    assert plan.with_count(4).dummies == [2]
    assert plan.with_count(2).updates == [[[0], [1]]]
    two = plan_micro_batches([3, 3, 3], 3, num_updates=2).with_count(3)
    assert (two.dummies, two.with_count([2, 4]).dummies) == ([2, 1], [1, 2])


def test_an_update_without_rows_has_no_micro_batches() -> None:
    plan = plan_micro_batches([3], 3, num_updates=3, min_count=2, multiple_of=2)
    assert plan.counts == [0, 0, 2]
    assert plan.updates == [[], [], [[0], [0]]]
    assert plan.dummies == [0, 0, 1]
    assert plan.with_count(2).updates == [[[0], [0]]] * 3
    assert plan.with_count(2).dummies == [2, 2, 1]


def test_a_dummy_is_no_empty_row_if_there_is_another() -> None:
    assert plan_micro_batches([5, 0, 3, 3], 5, min_count=5).updates == [[[0], [2], [3], [1], [2]]]
    assert plan_micro_batches([0, 0], 5, min_count=3).updates == [[[0], [1], [0]]]
    assert plan_micro_batches([5, 3], 5, groups=[0, 0], min_count=2).updates == [[[0, 1], [1]]]


# -------------------------------------------------------------------- best fit by hand


def test_best_fit_by_hand() -> None:
    sizes = np.array([6, 5, 4, 3, 2])
    ones = np.ones(5, np.int64)
    assert best_fit(np.arange(5), sizes, 10 * ones, ones, None) == [[0, 2], [1, 3, 4]]
    assert best_fit(np.arange(5), sizes, 10 * ones, ones, 2) == [[0, 2], [1, 3], [4]]
    assert best_fit(np.arange(5), sizes, 5 * ones, ones, None) == [[0], [1], [2], [3, 4]]
    equal = np.full(5, 4)
    assert best_fit(np.arange(5), equal, 10 * ones, ones, None) == [[0, 1], [2, 3], [4]]
    assert best_fit(np.arange(5), equal, 100 * ones, ones, 3) == [[0, 1, 2], [3, 4]]
    assert best_fit(np.arange(5), 0 * equal, ones, ones, None) == [[0, 1, 2, 3, 4]]
    assert best_fit(np.arange(0), sizes, ones, ones, None) == []


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


@pytest.mark.parametrize("made", [list, np.array, torch.tensor, lambda x: np.array(x, np.int64)])
def test_no_rows(made: Callable[[list[int]], Any]) -> None:
    for options in ({"token_budget": 5}, {"token_budget": 5, "cost": "padded"}, {"token_budget": None, "max_rows": 2}):
        plan = plan_micro_batches(made([]), **options, num_updates=2, groups=made([]), loss_tokens=made([]))
        assert plan.updates == [[], []]
        assert (plan.micro_batches, plan.dummies, plan.oversized, plan.counts) == ([], [0, 0], [], [0, 0])
        assert plan.loss_weights("seq-mean-token-mean") == []
        assert plan.with_count(0) is plan
        assert list(plan.apply(torch.zeros(0, 3))) == []
        assert plan.metrics()["plan/fill"] == plan.metrics()["plan/imbalance"] == 1
    model = FlopsModel(1.0, 1.0)
    assert plan_micro_batches([], 0.5, cost=model, work=model).updates == [[]]


def test_one_row() -> None:
    for options in ({"token_budget": 5}, {"token_budget": 5, "cost": "padded"}, {"token_budget": None, "max_rows": 2}):
        assert plan_micro_batches([5], **options).updates == [[[0]]]
    assert plan_micro_batches([5], 5).oversized == []
    assert plan_micro_batches([6], 5).oversized == [0]


@pytest.mark.parametrize("budget", [12, np.int32(12), np.uint8(12), np.int64(12)])
def test_kinds_of_budgets(budget: Any) -> None:
    assert plan_micro_batches([5, 9, 2, 7], budget).updates == [[[0, 3], [1, 2]]]
    assert plan_micro_batches([5, 9, 2, 7], budget, cost=lambda n: n).updates == [[[0, 3], [1, 2]]]


@pytest.mark.parametrize("budget", [np.float32(6.0), np.float64(6.0), 6, 6.0])
def test_kinds_of_budgets_for_a_cost_of_your_own(budget: Any) -> None:
    for kind in (lambda n: n / 2, lambda n: (n / 2).tolist(), lambda n: torch.from_numpy(n / 2)):
        assert plan_micro_batches([5, 9, 2, 7], budget, cost=kind).updates == [[[0, 3], [1, 2]]]


def test_a_cost_cannot_change_the_lengths() -> None:
    def cost(lengths: Any) -> Any:
        lengths *= 2
        return lengths

    own = np.array([5, 9, 2, 7])
    plan = plan_micro_batches(own, 24, cost=cost, work=cost)
    assert plan.lengths.tolist() == own.tolist() == [5, 9, 2, 7]


def test_a_budget_above_any_sum() -> None:
    for cost in ("tokens", "padded"):
        assert plan_micro_batches([2**40, 1], 10**30, cost=cost).updates == [[[0, 1]]]


# -------------------------------------------------------------------- costs


def test_flops_model() -> None:
    model = FlopsModel(2.0, 0.5)
    assert model(np.array([0, 1, 10])).tolist() == [0, 2.5, 70]
    assert FlopsModel.of_transformer(7e9, 32, 4096) == FlopsModel(6 * 7e9, 6 * 32 * 4096)
    assert model(np.array([2**31])).tolist() == [2 * 2.0**31 + 0.5 * 2.0**62]


def test_costs_of_fine_numbers_add_up_exactly() -> None:
    tenth = Table((0.1,))
    assert Fraction(0.1) * 3 > Fraction(0.3)
    assert plan_micro_batches([0] * 3, 0.3, cost=tenth).counts == [2]
    assert plan_micro_batches([0] * 3, 0.3, cost=tenth, groups="ggg").oversized == [0, 1, 2]
    assert plan_micro_batches([0] * 10, 1.0, cost=tenth).counts == [2], "ten times 0.1 is above 1"
    assert plan_micro_batches([0] * 4, 1.0, cost=Table((0.25,))).counts == [1]
    one = plan_micro_batches([0, 1], 1.0, cost=Table((1.0, 5e-324)))
    assert (one.counts, one.oversized) == ([2], [])
    assert 0.1 + 0.2 > Fraction(0.1) + Fraction(0.2) > Fraction(0.3)
    assert plan_micro_batches([0, 1], 0.1 + 0.2, cost=Table((0.1, 0.2))).counts == [1]
    assert plan_micro_batches([0, 1], 0.3, cost=Table((0.1, 0.2))).counts == [2]
    assert plan_micro_batches([0], 1 / 3, cost=Table((1 / 3,))).oversized == []
    assert plan_micro_batches([0, 1], 5e-324, cost=Table((5e-324, 1e-323))).oversized == [1]
    assert plan_micro_batches([0, 1], 1e308, cost=Table((1.5e308, 9e307))).oversized == [0]


def test_pitfall_prompts_count_in_the_budget() -> None:
    """16 rows of 1000 valid tokens, 100 of them in the response, and a budget of 1600."""
    prompt, response = np.full(16, 900), np.full(16, 100)
    plan = plan_micro_batches(prompt + response, 1600)
    assert plan.counts == [16]


# -------------------------------------------------------------------- metrics


def test_metrics_by_hand() -> None:
    plan = plan_micro_batches([5, 9, 2, 7, 8, 1, 20, 4], 12, num_updates=2, min_count=4)
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
    padded = plan_micro_batches([5, 9, 2, 7], 18, cost="padded")
    assert padded.updates == [[[1, 3], [0, 2]]]
    found = padded.metrics()
    assert (found["plan/padding_tokens"], found["plan/fill"]) == (5, 23 / 28)
    assert (found["plan/imbalance"], found["plan/budget_use"]) == (18 / 14, 28 / 36)
    some = padded.with_count(6).metrics()
    assert (some["plan/dummies"], some["plan/micro_batches"], some["plan/tokens"]) == (2, 6, 23)
    assert (some["plan/fill"], some["plan/imbalance"], some["plan/budget_use"]) == (1, 9 / (23 / 4), 23 / (4 * 18))
    assert "plan/budget_use" not in plan_micro_batches([1], None, max_rows=1).metrics()
    half = plan_micro_batches([5, 9, 2, 7], 6.0, cost=lambda n: n / 2, work=lambda n: n * n)
    assert half.updates == [[[1, 2], [0, 3]]]
    assert half.loads() == [85, 74]
    assert half.metrics()["plan/budget_use"] == 11.5 / 12
    assert half.metrics()["plan/imbalance"] == 85 / 79.5
    assert all(type(value) is float for value in half.metrics().values())


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1.0, 2.0], "lengths are float64; expected whole numbers [B]. Give the valid tokens of each row, prompt plus"),
        (torch.tensor([1.5]), "lengths are float32; expected whole"),
        ([True], "lengths are bool; expected whole"),
        (["5"], "lengths are <U1; expected whole"),
        ([[1, 2]], "lengths are int64 (1, 2); expected numbers [B]"),
        (torch.zeros(2, 3, dtype=torch.int64), "lengths are int64 (2, 3); expected numbers [B]"),
        ([3, -2], "a length is -2; expected whole numbers from 0. Count valid tokens."),
        (None, "lengths are None; expected numbers [B]: the valid tokens of each row, prompt plus response. Give"),
        (7, "lengths are 7; expected numbers [B]"),
        ([1, None], "lengths are object (2,); expected numbers [B]"),
        ([[1], [2, 3]], "lengths are not an array: "),
        (torch.ones(2, requires_grad=True), "lengths are not an array: "),
        ([2**61] * 3, "lengths sum to more than 2^62; expected the valid tokens of each row."),
        (np.array([2**63 + 5], np.uint64), "lengths sum to more than 2^62;"),
    ],
)
def test_lengths_that_are_none(lengths: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_micro_batches(lengths, 5)
    assert str(caught.value).startswith(f"plan_micro_batches: {words}")


MODEL = FlopsModel(1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_budget": 1.9}, "token_budget is 1.9; expected a whole number from 1. Give one."),
        ({"token_budget": 5.0, "cost": "padded"}, "token_budget is 5.0; expected a whole number from 1."),
        ({"token_budget": 0}, "token_budget is 0; expected a whole number from 1."),
        ({"token_budget": -1}, "token_budget is -1; expected a whole number from 1."),
        ({"token_budget": True}, "token_budget is True; expected a whole number from 1."),
        ({"token_budget": "x"}, "token_budget is 'x'; expected a whole number from 1."),
        ({"token_budget": "x", "cost": MODEL}, "token_budget is 'x'; expected a finite number above 0. Give one."),
        ({"token_budget": True, "cost": MODEL}, "token_budget is True; expected a finite number above 0."),
        ({"token_budget": 0, "cost": MODEL}, "token_budget is 0; expected a finite number above 0."),
        ({"token_budget": -0.5, "cost": MODEL}, "token_budget is -0.5; expected a finite number above 0."),
        ({"token_budget": math.nan, "cost": MODEL}, "token_budget is nan; expected a finite number above 0."),
        ({"token_budget": math.inf, "cost": MODEL}, "token_budget is inf; expected a finite number above 0."),
        (
            {"token_budget": None},
            "token_budget is None, with max_rows None, cost 'tokens' and work None; expected a bu",
        ),
        (
            {"token_budget": None, "max_rows": 2, "cost": "padded"},
            "token_budget is None, with max_rows 2, cost 'padded'",
        ),
        (
            {"token_budget": None, "max_rows": 2, "work": MODEL},
            "token_budget is None, with max_rows 2, cost 'tokens' a",
        ),
        (
            {"cost": "token"},
            'cost is \'token\'; expected "tokens" or "padded" or "prefix", or a function of the lengt',
        ),
        ({"cost": None}, 'cost is None; expected "tokens" or "padded" or "prefix", or a function'),
        (
            {"cost": lambda n: n[:1]},
            "costs are int64 (1,); expected numbers (2,): what the callable gives for each row.",
        ),
        (
            {"cost": lambda n: 5},
            "costs are 5; expected numbers [B]: what the callable gives for each row. Give one a",
        ),
        ({"cost": lambda n: ["a", "b"]}, "costs are <U1 (2,); expected numbers (2,)"),
        ({"cost": lambda n: [1, math.nan]}, "costs run from nan to nan; expected finite numbers from 0: what the call"),
        ({"cost": lambda n: [1, math.inf]}, "costs run from 1.0 to inf; expected finite numbers from 0"),
        ({"cost": lambda n: [1, -1]}, "costs run from -1.0 to 1.0; expected finite numbers from 0"),
        ({"work": "tokens"}, "work is 'tokens'; expected a function of the lengths [B]. Pass a FlopsModel."),
        ({"work": lambda n: n[:1]}, "amounts of work are int64 (1,); expected numbers (2,)"),
        ({"work": lambda n: n * math.nan}, "amounts of work run from nan to nan"),
        ({"num_updates": 0}, "num_updates is 0; expected a whole number from 1."),
        ({"num_updates": None}, "num_updates is None; expected a whole number from 1."),
        ({"multiple_of": 0}, "multiple_of is 0; expected a whole number from 1."),
        ({"multiple_of": 1.0}, "multiple_of is 1.0; expected a whole number from 1."),
        ({"min_count": 0}, "min_count is 0; expected a whole number from 1."),
        ({"min_count": "2"}, "min_count is '2'; expected a whole number from 1."),
        ({"max_rows": 0}, "max_rows is 0; expected a whole number from 1."),
        ({"max_rows": 1.5}, "max_rows is 1.5; expected a whole number from 1."),
        ({"oversize": "split"}, 'oversize is \'split\'; expected "alone" or "error". Choose one.'),
        ({"groups": [1]}, "groups are 1 labels for 2 rows; expected one for each. Give the group of every row."),
        ({"groups": torch.zeros(3)}, "groups are 3 labels for 2 rows; expected one for each."),
        (
            {"groups": 5},
            "groups are 5: 'int' object is not iterable; expected one label for each row, such as its uid",
        ),
        ({"groups": [[1], [2]]}, "groups are a list: unhashable type: 'list'; expected one label for each row"),
        (
            {"groups": np.zeros((2, 1))},
            "groups are an array: unhashable type: 'list'; expected one label for each row",
        ),
        ({"groups": {4, 5}}, "groups are a set: it has no order; expected one label for each row"),
        ({"groups": {4: 0, 5: 0}}, "groups are a dict: it has no order; expected one label for each row"),
        ({"groups": torch.tensor(3)}, "groups are a Tensor: 'int' object is not iterable; expected one label"),
        ({"loss_tokens": [1]}, "loss_tokens are int64 (1,); expected numbers (2,): the sum of each row's loss mask."),
        ({"loss_tokens": [1, -1]}, "loss_tokens run from -1.0 to 1.0; expected finite numbers from 0: the sum of each"),
        ({"loss_tokens": [1, math.nan]}, "loss_tokens run from nan to nan; expected finite"),
        (
            {"loss_tokens": 3},
            "loss_tokens are 3; expected numbers [B]: the sum of each row's loss mask. Give one a",
        ),
        (
            {"oversize": "error"},
            "rows [1] alone, or their groups, are over token_budget 5 or max_rows None; expected le",
        ),
        (
            {"oversize": "error", "max_rows": 1, "groups": [0, 0]},
            "rows [0, 1] alone, or their groups, are over token_b",
        ),
    ],
)
def test_arguments_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_micro_batches([3, 8], **{"token_budget": 5, **options})
    assert str(caught.value).startswith(f"plan_micro_batches: {words}")


def test_oversize_error_lets_others_pass_and_names_at_most_eight() -> None:
    assert plan_micro_batches([3, 5], 5, oversize="error").counts == [2]
    with pytest.raises(PlanError, match=r"rows \[0, 1, 2, 3, 4, 5, 6, 7\] alone.*Raise these, cut the rows, or pass"):
        plan_micro_batches([9] * 20, 5, oversize="error")


@pytest.mark.parametrize(
    ("linear", "quadratic"), [(-1, 1), (1, -1), (0, 0), (math.nan, 1), (1, math.nan), (math.inf, 1), (1, math.inf)]
)
def test_flops_that_are_none(linear: float, quadratic: float) -> None:
    with pytest.raises(PlanError, match=r"^FlopsModel: linear is .* and quadratic .*; expected finite numbers from 0"):
        FlopsModel(linear, quadratic)


def test_with_count_errors() -> None:
    plan = plan_micro_batches([4] * 6, 8, num_updates=2, multiple_of=2)
    assert plan.counts == [2, 2]
    for count, words in (
        (0, "update 0 has 2 micro-batches, and count is 0; expected at least as many, because they are split"),
        ([2, 1], "update 1 has 2 micro-batches, and count is 1; expected at least as many"),
        (3, "count is 3; expected a multiple of 2, as planned. Round it up."),
        ([4], "1 counts for 2 updates; expected one for each."),
        (-2, "count is -2; expected a whole number from 0."),
        (4.0, "count is 4.0; expected a whole number from 0."),
        (True, "count is True; expected a whole number from 0."),
        ([4, None], "count is None; expected a whole number from 0."),
        ("44", "count is '44'; expected a whole number from 0."),
    ):
        with pytest.raises(PlanError) as caught:
            plan.with_count(count)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"MicroBatchPlan.with_count: {words}")
    assert plan.counts == [2, 2]
    with pytest.raises(PlanError, match=r"with_count: count is 3 for a plan without rows; expected a row to run"):
        plan_micro_batches([], 5, num_updates=2).with_count([0, 3])


# -------------------------------------------------------------------- context parallelism


@many
@given(
    st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40), st.integers(1, 8), st.sampled_from(["tokens", "own"])
)
def test_the_budget_is_that_of_one_of_the_ranks_that_share_a_micro_batch(
    lengths: Lengths, budget: int, ranks: int, kind: str
) -> None:
    cost: Any = "tokens" if kind == "tokens" else (lambda n: n * 1.5)
    plan = plan_micro_batches(lengths, budget, cost=cost, context_parallel=ranks)
    assert plan.updates == plan_micro_batches(lengths, budget * ranks, cost=cost).updates
    for rows in plan.micro_batches:
        tokens = sum(lengths[row] for row in rows)
        if len(rows) > 1 and kind == "tokens":
            assert -(-tokens // ranks) <= budget  # a shard, after T was rounded up to a multiple of the ranks


def test_ranks_that_share_micro_batches_have_one_plan() -> None:
    lengths = [5, 9, 2, 7, 8, 1, 6, 4]
    plans = plan_ranks(lengths, 2, 6, context_parallel=2, loss_tokens=lengths)
    assert [plan.updates for plan in plans.plans] == [plan.updates for plan in plan_ranks(lengths, 2, 12).plans]
    again = pickle.loads(pickle.dumps(plans))
    assert again.plans[0].updates == plans.plans[0].updates
    tree = PrefixTree.from_groups([10, 9, 9], ["a", "a", "a"], [8, 8, 8], min_shared=1)
    assert len(plan_micro_batches([10, 9, 9], 6, cost="prefix", tree=tree, context_parallel=2).micro_batches) == 1
    assert len(plan_micro_batches([10, 9, 9], 6, cost="prefix", tree=tree).micro_batches) > 1


@pytest.mark.parametrize("ranks", [0, -1, 1.0, True, None, "2"])
def test_numbers_of_ranks_that_are_none(ranks: Any) -> None:
    with pytest.raises(PlanError, match=r"^plan_micro_batches: context_parallel is .*; expected a whole number from 1"):
        plan_micro_batches([3, 2], 5, context_parallel=ranks)


def test_budgets_of_many_ranks_do_not_overflow() -> None:
    assert plan_micro_batches([3, 2], np.int64(1 << 61), context_parallel=16).counts == [1]
    assert plan_micro_batches([3, 2], 1e308, cost=lambda n: n * 1.0, context_parallel=16).counts == [1]
