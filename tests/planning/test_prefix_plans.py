"""Plans with cost="prefix" against naive tries: a set of prefixes, each a tuple of tokens."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskpack.errors import PlanError
from maskpack.planning import FlopsModel, MicroBatchPlan, PrefixTree, RankPlans, plan_micro_batches, plan_ranks
from maskpack.planning.prefixes import SharedAmounts, tree_units

many = settings(max_examples=max(100, settings.default.max_examples))
Row = tuple[int, ...]


# -------------------------------------------------------------------- tries


def trie(rows: Sequence[Row]) -> set[Row]:
    """The prefixes of the rows: one for each token that is computed once."""
    return {row[: n + 1] for row in rows for n in range(len(row))}


def tree_of(rows: Sequence[Row], min_shared: int = 1) -> PrefixTree:
    ids = np.array([token for row in rows for token in row], np.int64)
    return PrefixTree.from_ids(ids, np.cumsum([0, *map(len, rows)]), min_shared=min_shared)


@st.composite
def tries(draw: st.DrawFn, least: int = 0, most: int = 20) -> list[Row]:
    """Rows of which many go on from a prefix of another; some are equal, some empty."""
    system = tuple(draw(st.lists(st.just(7), max_size=4)))
    rows: list[Row] = []
    for _ in range(draw(st.integers(least, most))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else system
        kept = before[: draw(st.integers(0, len(before)))]
        rows.append(kept + tuple(draw(st.lists(st.integers(0, 3), max_size=8))))
    return rows


@dataclasses.dataclass(frozen=True)
class Case:
    rows: list[Row]
    token_budget: int
    options: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    @property
    def plan(self) -> MicroBatchPlan:
        return plan_micro_batches(
            self.lengths, self.token_budget, cost="prefix", tree=tree_of(self.rows), **self.options
        )

    @property
    def groups(self) -> list[list[int]]:
        """What is alone if it is too large."""
        labels = self.options.get("groups", range(len(self.rows)))
        return [[row for row, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)]

    def cost(self, rows: Sequence[int]) -> int:
        return len(trie([self.rows[row] for row in rows]))

    def too_large(self, rows: Sequence[int]) -> bool:
        return self.cost(rows) > self.token_budget or len(rows) > self.options.get("max_rows", len(self.rows))


@st.composite
def cases(draw: st.DrawFn, least: int = 0, groups: bool = True) -> Case:
    rows = draw(tries(least))
    options: dict[str, Any] = {"num_updates": draw(st.integers(1, 3)), "multiple_of": draw(st.integers(1, 2))}
    options |= {name: draw(st.integers(1, 6)) for name in ("min_count", "max_rows") if draw(st.booleans())}
    if groups and draw(st.booleans()):
        options["groups"] = draw(st.lists(st.sampled_from("abcd"), min_size=len(rows), max_size=len(rows)))
    return Case(rows, draw(st.integers(1, 40)), options)


def real(plan: MicroBatchPlan) -> list[list[list[int]]]:
    """The micro-batches of each update, without dummies."""
    return [update[: len(update) - dummies] for update, dummies in zip(plan.updates, plan.dummies, strict=True)]


def real_loads(plan: MicroBatchPlan) -> list[float]:
    return [load for load, dummy in zip(plan.loads(), plan.is_dummy, strict=True) if not dummy]


# -------------------------------------------------------------------- one rank


@many
@given(cases())
def test_a_micro_batch_costs_the_tokens_of_its_trie(case: Case) -> None:
    plan = case.plan
    parts = list(itertools.chain(*real(plan)))
    assert sorted(itertools.chain(*parts)) == list(range(len(case.rows)))
    assert real_loads(plan) == [case.cost(rows) for rows in parts]
    over = [rows for rows in case.groups if case.too_large(rows)]
    assert plan.oversized == sorted(itertools.chain(*over))
    assert all(rows in over for rows in parts if case.too_large(rows))
    assert all(loads == sorted(loads, reverse=True) for loads in map(_costs(case), real(plan))), "the most work first"
    labels = case.options.get("groups")
    if labels is not None:
        assert all(sum(set(group) <= set(rows) for rows in parts) == 1 for group in case.groups)


def _costs(case: Case) -> Any:
    return lambda parts: [case.cost(rows) for rows in parts]


@many
@given(cases())
def test_the_rows_of_an_update_are_those_of_tokens(case: Case) -> None:
    tokens = plan_micro_batches(case.lengths, case.token_budget, **case.options)
    for ours, theirs in zip(real(case.plan), real(tokens), strict=True):
        assert sorted(itertools.chain(*ours)) == sorted(itertools.chain(*theirs))


@many
@given(cases(groups=False))
def test_rows_that_share_stay_together_if_they_fit(case: Case) -> None:
    plan = case.plan
    for update in real(plan):
        rows = sorted(itertools.chain(*update))
        for root in _roots(case.rows, rows):
            if not case.too_large(root):
                assert sum(not set(root).isdisjoint(part) for part in update) == 1


def _roots(rows: Sequence[Row], some: Sequence[int]) -> list[list[int]]:
    """The rows that have the first token in common."""
    return [[row for row in some if rows[row][:1] == first] for first in {rows[row][:1] for row in some if rows[row]}]


@many
@given(tries(1, 8), st.integers(1, 25), st.integers(1, 8))
def test_cuts_repeat_the_fewest_tokens(rows: list[Row], most_tokens: int, most_rows: int) -> None:
    """Of all ways to cut the order of the tree, and of these one of the fewest pieces."""
    tree = tree_of(rows)
    units = tree_units(tree, most_tokens, most_rows)
    assert list(itertools.chain(*units.rows or [])) == tree.order.tolist()
    assert [units.of_row[row] for own in units.rows or [] for row in own] == sorted(units.of_row.tolist())
    best = 0, 0
    for root in _roots(rows, tree.order.tolist()):
        ways = (
            _pieces(root, ends) for n in range(len(root)) for ends in itertools.combinations(range(1, len(root)), n)
        )
        tokens, pieces = min(
            (sum(len(trie([rows[row] for row in piece])) for piece in way), len(way))
            for way in ways
            if all(
                len(piece) == 1 or (len(piece) <= most_rows and len(trie([rows[row] for row in piece])) <= most_tokens)
                for piece in way
            )
        )
        best = best[0] + tokens, best[1] + pieces
    empty = sum(not row for row in rows)
    found = [len(trie([rows[row] for row in own])) for own in units.rows or []]
    assert (sum(found), len(found) - empty) == best


def _pieces(items: Sequence[int], ends: Sequence[int]) -> list[Sequence[int]]:
    return [items[begin:end] for begin, end in itertools.pairwise([0, *ends, len(items)])]


@many
@given(cases(), st.data())
def test_with_count(case: Case, data: st.DataObject) -> None:
    before = case.plan
    more = [data.draw(st.integers(0, 8 if case.rows else 0)) for _ in before.counts]
    wanted = [count + extra * before.multiple_of for count, extra in zip(before.counts, more, strict=True)]
    plan = before.with_count(wanted)
    assert plan.counts == wanted
    assert real_loads(plan) == [case.cost(rows) for rows in itertools.chain(*real(plan))]
    shortest = min((len(row) for row in case.rows if row), default=0)
    for old, new, dummies in zip(real(before), real(plan), plan.dummies, strict=True):
        assert all(any(set(rows) <= set(whole) for whole in old) for rows in new)
        assert sorted(itertools.chain(*old)) == sorted(itertools.chain(*new))
        if dummies and "groups" not in case.options:  # nothing is left to split
            assert all(len(rows) == 1 or _roots(case.rows, rows) == [rows] for rows in new)
    dummies = [rows for rows, dummy in zip(plan.micro_batches, plan.is_dummy, strict=True) if dummy]
    assert all(len(rows) == 1 and len(case.rows[rows[0]]) == shortest for rows in dummies)


@many
@given(cases(), st.sampled_from((1.0, 0.0, 3.0)), st.sampled_from((0.5, 2.0)))
def test_work_counts_each_token_of_the_trie_at_its_depth(case: Case, linear: float, quadratic: float) -> None:
    work = FlopsModel(linear, quadratic)
    plan = dataclasses.replace(case, options={**case.options, "work": work}).plan
    depths = np.arange(64)
    of_token = np.diff(work(depths))  # of the token that follows so many others
    for rows, load in zip(itertools.chain(*real(plan)), real_loads(plan), strict=True):
        tokens = trie([case.rows[row] for row in rows])
        assert load == pytest.approx(sum(of_token[len(prefix) - 1] for prefix in tokens))


@many
@given(cases())
def test_metrics(case: Case) -> None:
    plan = case.plan
    metrics = plan.metrics()
    parts = list(itertools.chain(*real(plan)))
    computed = sum(case.cost(rows) for rows in parts)
    assert metrics["plan/tokens"] == sum(case.lengths)
    assert metrics["plan/shared_tokens"] == sum(case.lengths) - computed
    assert metrics["plan/budget_use"] == pytest.approx(computed / case.token_budget / max(len(parts), 1))
    assert metrics["plan/dummies"] == sum(plan.dummies)
    assert "plan/shared_tokens" not in plan_micro_batches(case.lengths, case.token_budget).metrics()


@many
@given(cases(least=1), st.data())
def test_losses_are_those_of_tokens(case: Case, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(case.rows), max_size=len(case.rows)))
    ours = dataclasses.replace(case, options={**case.options, "loss_tokens": tokens}).plan
    theirs = plan_micro_batches(case.lengths, case.token_budget, loss_tokens=tokens, **case.options)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        for update in range(len(ours.updates)):
            weights = [_of_rows(plan, mode, update) for plan in (ours, theirs)]
            assert weights[0] == pytest.approx(weights[1])


def _of_rows(plan: MicroBatchPlan, mode: Any, update: int) -> dict[int, float]:
    end = len(plan.updates[update]) - plan.dummies[update]
    weights = plan.loss_weights(mode, update)
    assert all(not own.any() for own in weights[end:])
    return {
        row: weight
        for rows, own in zip(plan.updates[update][:end], weights[:end], strict=True)
        for row, weight in zip(rows, own.tolist(), strict=True)
    }


@many
@given(cases(least=1))
def test_apply_and_restore(case: Case) -> None:
    plan = case.plan
    rows = torch.arange(len(case.rows))
    assert plan.restore(list(plan.apply(rows))).tolist() == rows.tolist()


@many
@given(cases(), st.integers(2, 5))
def test_trees_without_short_branches(case: Case, least: int) -> None:
    """The cost is what the tree says, not what could be shared."""
    tree = tree_of(case.rows, least)
    plan = plan_micro_batches(case.lengths, case.token_budget, cost="prefix", tree=tree, **case.options)
    parts = list(itertools.chain(*real(plan)))
    assert real_loads(plan) == [tree.take(rows).num_tokens for rows in parts]
    assert all(case.cost(rows) <= load for rows, load in zip(parts, real_loads(plan), strict=True))


@many
@given(cases(least=1))
def test_pickles(case: Case) -> None:
    plan = case.plan
    same = pickle.loads(pickle.dumps(plan))
    assert (same.updates, same.dummies, same.oversized) == (plan.updates, plan.dummies, plan.oversized)
    assert same.loads() == plan.loads()
    more = max(plan.counts) + 2 * plan.multiple_of
    assert same.with_count(more).updates == plan.with_count(more).updates
    assert same.metrics() == plan.metrics()


def test_a_tree_stays_as_it_was() -> None:
    tree = tree_of([(1, 2, 3), (1, 2, 4), (5,)])
    before = tree.order.tolist(), tree.shared.tolist(), tree.lengths.tolist()
    plan_micro_batches([3, 3, 1], 3, cost="prefix", tree=tree, num_updates=2)
    plan_ranks([3, 3, 1], 2, 3, cost="prefix", tree=tree)
    assert (tree.order.tolist(), tree.shared.tolist(), tree.lengths.tolist()) == before


def test_by_hand() -> None:
    """Two prompts of 10 tokens, four responses of 2 each; 18 tokens a group."""
    lengths, labels = [12] * 8, list("aaaabbbb")
    tree = PrefixTree.from_groups(lengths, labels, [10] * 8, min_shared=1)
    plan = plan_micro_batches(lengths, 36, cost="prefix", tree=tree)
    assert plan.updates == [[list(range(8))]]
    assert plan.loads() == [36]
    assert plan.metrics()["plan/shared_tokens"] == 60
    assert plan_micro_batches(lengths, 36).counts == [3]
    two = plan_micro_batches(lengths, 35, cost="prefix", tree=tree)
    assert sorted(two.micro_batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert two.with_count(3).dummies == [1], "what shares is not split to reach a count"
    cut = plan_micro_batches(lengths, 16, cost="prefix", tree=tree)
    assert sorted(map(len, cut.micro_batches)) == [1, 1, 3, 3]
    assert sorted(cut.loads()) == [12, 12, 16, 16]
    assert plan_micro_batches(lengths, 36, cost="prefix", tree=tree, max_rows=2).counts == [4]
    alone = plan_micro_batches(lengths, 11, cost="prefix", tree=tree)
    assert (alone.counts, alone.oversized) == ([8], list(range(8)))


def test_groups_are_spread_over_micro_batches() -> None:
    """Best fit would run five groups, and one that is left."""
    tree = PrefixTree.from_groups([25] * 24, [row // 4 for row in range(24)], [20] * 24)
    plan = plan_micro_batches([25] * 24, 5 * 40, cost="prefix", tree=tree)
    assert plan.loads() == [3 * 40, 3 * 40]
    assert sorted(len(rows) for rows in plan.micro_batches) == [12, 12]
    limited = plan_micro_batches([25] * 24, 5 * 40, cost="prefix", tree=tree, max_rows=20)
    assert limited.loads() == [3 * 40, 3 * 40]


def test_parts_of_one_root_in_one_micro_batch_share_again() -> None:
    """The groups a and c are one micro-batch; they have the system prompt in common once."""
    system = (9,) * 5
    rows = [system + (label,) * n for label, n in ((1, 3), (2, 20), (3, 4))]
    plan = plan_micro_batches([8, 25, 9], 25, cost="prefix", tree=tree_of(rows), groups=["a", "b", "c"])
    assert plan.updates == [[[1], [0, 2]]]
    assert plan.loads() == [25, 12]


def test_no_rows_and_empty_rows() -> None:
    none = plan_micro_batches([], 5, cost="prefix", tree=tree_of([]), num_updates=2)
    assert (none.updates, none.loads()) == ([[], []], [])
    assert none.metrics()["plan/shared_tokens"] == 0
    empty = plan_micro_batches([0, 0], 5, cost="prefix", tree=tree_of([(), ()]), num_updates=3)
    assert sorted(map(len, empty.updates)) == [0, 1, 1]
    assert empty.with_count(2).dummies == [2 - len(update) for update in empty.updates]


# -------------------------------------------------------------------- ranks


@st.composite
def rank_cases(draw: st.DrawFn) -> tuple[Case, int, dict[str, Any]]:
    case = draw(cases(least=1))
    ranks = draw(st.integers(1, min(len(case.groups), 5)))
    return case, ranks, {"seed": draw(st.integers(0, 2)), "equal_rows": draw(st.booleans())}


def plans_of(case: Case, ranks: int, more: dict[str, Any], **options: Any) -> RankPlans:
    tree = tree_of(case.rows)
    return plan_ranks(
        case.lengths, ranks, case.token_budget, cost="prefix", tree=tree, **case.options, **more, **options
    )


@many
@given(rank_cases())
def test_ranks(given_: tuple[Case, int, dict[str, Any]]) -> None:
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    assert sorted(itertools.chain(*plans.rows)) == list(range(len(case.rows)))
    assert len(plans.rows) == ranks
    assert all(plans.rows), "each has a row"
    assert len({tuple(plan.counts) for plan in plans.plans}) == 1
    labels = case.options.get("groups")
    for rows, plan in zip(plans.rows, plans.plans, strict=True):
        options = dict(case.options)
        if labels is not None:
            options["groups"] = [labels[row] for row in rows]
            assert not set(options["groups"]) & {labels[row] for other in plans.rows for row in other if other != rows}
        own = Case([case.rows[row] for row in rows], case.token_budget, options)
        tree = tree_of(case.rows).take(rows)
        alone = plan_micro_batches(own.lengths, own.token_budget, cost="prefix", tree=tree, **options)
        assert plan.updates == alone.with_count(plan.counts).updates
        parts = list(itertools.chain(*real(plan)))
        assert real_loads(plan) == [own.cost(some) for some in parts]
        assert all(some in own.groups for some in parts if own.too_large(some))
    assert plans.divisible is (case.options["num_updates"] == 1 and labels is None)
    metrics = plans.metrics()
    computed = sum(sum(plan.loads()) for plan in plans.plans)
    assert metrics["plan/shared_tokens"] == sum(case.lengths) - computed
    assert metrics["plan/rank_imbalance"] >= 1


@many
@given(rank_cases(), st.data())
def test_for_some_rows_of_some_ranks(given_: tuple[Case, int, dict[str, Any]], data: st.DataObject) -> None:
    case, ranks, more = given_
    plans = plans_of(case, ranks, more)
    same = pickle.loads(pickle.dumps(plans))
    left = {}
    for rank in data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)):
        kept = data.draw(st.lists(st.sampled_from(plans.rows[rank]), min_size=1, unique=True))
        left[rank] = np.array(kept, np.int64)
    found = plans.for_rows(left)
    for rank, plan in found.items():
        rows = left[rank].tolist()
        parts = list(itertools.chain(*real(plan)))
        assert sorted(itertools.chain(*parts)) == list(range(len(rows)))
        assert real_loads(plan) == [case.cost([rows[row] for row in part]) for part in parts]
    assert [plan.updates for plan in same.plans] == [plan.updates for plan in plans.plans]
    assert [plan.updates for plan in same.for_rows(left).values()] == [plan.updates for plan in found.values()]


@many
@given(tries(1, 12), st.integers(1, 12), st.integers(1, 60), st.booleans())
def test_every_rank_has_a_row_if_there_are_enough(rows: list[Row], ranks: int, budget: int, equal: bool) -> None:
    lengths = [len(row) for row in rows]
    if ranks <= len(rows):
        assert all(plan_ranks(lengths, ranks, budget, cost="prefix", tree=tree_of(rows), equal_rows=equal).rows)
        return
    with pytest.raises(PlanError, match="have no row to run, but other ranks have; expected at least one on each"):
        plan_ranks(lengths, ranks, budget, cost="prefix", tree=tree_of(rows), equal_rows=equal)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_keep_groups_whole(seed: int, equal: bool) -> None:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(64), 8)
    prompts = rng.integers(50, 400, 64)[labels]
    lengths = prompts + rng.integers(10, 500, 512)
    tree = PrefixTree.from_groups(lengths, labels, prompts)
    plans = plan_ranks(lengths, 8, 8192, cost="prefix", tree=tree, equal_rows=equal, seed=seed)
    assert all(len(set(labels[rows])) == 8 or not equal for rows in plans.rows)
    assert sum(len(set(labels[rows])) for rows in plans.rows) == 64
    tokens = [tree.take(rows).num_tokens for rows in plans.rows]
    assert max(tokens) < 1.01 * tree.num_tokens / 8
    assert sum(tokens) == tree.num_tokens
    work = FlopsModel(1.0, 0.01)
    by_work = plan_ranks(lengths, 8, 8192, cost="prefix", tree=tree, work=work, seed=seed)
    loads = [sum(plan.loads()) for plan in by_work.plans]
    assert max(loads) < 1.01 * sum(loads) / 8


def test_ranks_divide_rows_that_all_share_a_prefix() -> None:
    """One root: 200 tokens of all, 32 groups with prompts, 8 responses each."""
    rng = np.random.default_rng(0)
    system = tuple(rng.integers(0, 10**6, 200).tolist())
    rows = []
    for _ in range(32):
        prompt = system + tuple(rng.integers(0, 10**6, int(rng.integers(50, 300))).tolist())
        rows += [prompt + tuple(rng.integers(0, 10**6, int(rng.integers(10, 400))).tolist()) for _ in range(8)]
    rows = [rows[at] for at in rng.permutation(256)]
    tree = tree_of(rows, 16)
    lengths = [len(row) for row in rows]
    for ranks in (2, 4, 8):
        plans = plan_ranks(lengths, ranks, 8192, cost="prefix", tree=tree)
        tokens = [len(trie([rows[row] for row in own])) for own in plans.rows]
        assert max(tokens) < 1.05 * np.mean(tokens)
        assert sum(tokens) < 1.1 * tree.num_tokens + 200 * ranks
        assert max(itertools.chain(*(plan.loads() for plan in plans.plans))) <= 8192
        assert plans.metrics()["plan/shared_tokens"] > 0.3 * sum(lengths)


def test_a_group_that_is_more_than_a_share_is_cut() -> None:
    lengths, labels = [20] * 16 + [2, 2], [0] * 16 + [1, 2]
    tree = PrefixTree.from_groups(lengths, labels, [4] * 16 + [0, 0], min_shared=1)
    plans = plan_ranks(lengths, 4, 1000, cost="prefix", tree=tree, equal_rows=False)
    tokens = [tree.take(rows).num_tokens for rows in plans.rows]
    assert max(tokens) <= 4 + 16 * 4 + 2
    assert plan_ranks(lengths, 1, 1000, cost="prefix", tree=tree).plans[0].counts == [1]


def test_groups_and_a_tree_on_ranks() -> None:
    """Labels decide which rows stay together, the tree what they cost."""
    rows = [(1, 1, 1, 1, n) for n in range(6)]
    tree = tree_of(rows)
    labels = list("aabbcc")
    plans = plan_ranks([5] * 6, 3, 6, cost="prefix", tree=tree, groups=labels)
    assert sorted("".join(labels[row] for row in own) for own in plans.rows) == ["aa", "bb", "cc"]
    assert [plan.loads() for plan in plans.plans] == [[6]] * 3
    assert not plans.divisible
    with pytest.raises(
        PlanError, match=r"^plan_micro_batches: rows \[0, 1, 2, 3, 4, 5\] alone, or their groups, are o"
    ):
        plan_ranks([5] * 6, 3, 5, cost="prefix", tree=tree, groups=labels, oversize="error")
    assert plan_ranks([5] * 6, 3, 5, cost="prefix", tree=tree, oversize="error").plans[0].counts == [2]


def test_loss_weights_of_ranks_sum_to_one() -> None:
    rows = [(1, 1, 1, n, n) for n in range(9)] + [(2,), (2, 2)]
    lengths = [len(row) for row in rows]
    plans = plan_ranks(lengths, 3, 8, cost="prefix", tree=tree_of(rows), num_updates=2, loss_tokens=[1] * 11)
    for update in range(2):
        weights = [plan.loss_weights("token-mean", update, gradients="sum") for plan in plans.plans]
        assert sum(float(own.sum()) for of_rank in weights for own in of_rank) == pytest.approx(1)


# -------------------------------------------------------------------- trajectories


def trajectories(seed: int) -> list[Row]:
    """Agents: one system prompt, tasks, and turns of which some start again from an earlier one."""
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> Row:
        return tuple(rng.integers(0, 150_000, int(rng.integers(least, most))).tolist())

    system, rows = tokens(1200, 1201), []
    for _ in range(12):
        turns = [system + tokens(50, 400)]
        for _ in range(int(rng.integers(2, 9))):
            last = turns[int(rng.integers(0, len(turns)))]
            turns.append(last + tokens(40, 600))
        rows += turns[1:]
    return [rows[at] for at in rng.permutation(len(rows))]


@pytest.mark.parametrize(("seed", "budget"), [(0, 1500), (1, 4096), (2, 16384)])
def test_trajectories_of_agents(seed: int, budget: int) -> None:
    rows = trajectories(seed)
    lengths, tree = [len(row) for row in rows], tree_of(rows, 16)
    plan = plan_micro_batches(lengths, budget, cost="prefix", tree=tree, num_updates=2, max_rows=12)
    parts = list(itertools.chain(*real(plan)))
    costs = [len(trie([rows[row] for row in part])) for part in parts]
    assert plan.loads() == costs
    assert all(
        cost <= budget or (len(part) == 1 and part[0] in plan.oversized)
        for cost, part in zip(costs, parts, strict=True)
    )
    assert max(map(len, parts)) <= 12
    assert len(parts) <= len(plan_micro_batches(lengths, budget, num_updates=2, max_rows=12).micro_batches)
    assert plan.metrics()["plan/shared_tokens"] == sum(lengths) - sum(costs)
    plans = plan_ranks(lengths, 4, budget, cost="prefix", tree=tree)
    tokens = [len(trie([rows[row] for row in own])) for own in plans.rows]
    assert max(tokens) < 1.25 * np.mean(tokens)


def test_amounts_of_parts_are_those_of_taken_trees() -> None:
    rows = trajectories(5)
    tree = tree_of(rows)
    parts = np.array_split(np.random.default_rng(0).permutation(len(rows)), 7)
    amounts = SharedAmounts.of(tree, None, "here").of_parts([part.tolist() for part in parts])
    assert amounts.tolist() == [tree.take(part).num_tokens for part in parts]


# -------------------------------------------------------------------- errors

TREE = tree_of([(1, 2, 3), (1, 2)])
REMEDY = (
    "Pass tree=maskpack.replay.prefix_tree(batch), from token ids, or PrefixTree.from_groups(lengths, groups, "
    "prompt_lengths)."
)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        (
            [3, 2],
            {"cost": "prefix"},
            f'cost is "prefix" and tree is None; expected the PrefixTree of the rows. {REMEDY}',
        ),
        (
            [3, 2],
            {"tree": TREE},
            'tree is a PrefixTree and cost is \'tokens\'; expected a tree with the cost "prefix" alone. Pass cost="pr',
        ),
        ([3, 2], {"tree": TREE, "cost": "padded"}, "tree is a PrefixTree and cost is 'padded'; expected a tree with"),
        ([3, 2], {"tree": TREE, "cost": FlopsModel(1, 1)}, "tree is a PrefixTree and cost is a FlopsModel; expected"),
        ([3, 2], {"tree": [1], "cost": "prefix"}, f"tree is a list; expected the PrefixTree of the rows. {REMEDY}"),
        (
            [3, 2, 1],
            {"tree": TREE, "cost": "prefix"},
            f"tree of 2 rows for 3 lengths; expected the same number. {REMEDY}",
        ),
        (
            [3, 4],
            {"tree": TREE, "cost": "prefix"},
            f"row 1 has 4 tokens, in the tree 2; expected the tree of these rows in this order. {REMEDY}",
        ),
    ],
)
def test_trees_that_are_none(lengths: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_micro_batches(lengths, 5, **options)
    assert str(caught.value).startswith(f"plan_micro_batches: {words}")
    with pytest.raises(PlanError) as caught:
        plan_ranks(lengths, 2, 5, **options)
    assert str(caught.value).startswith(f"plan_ranks: {words}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_budget": None, "max_rows": 2}, "token_budget is None, with max_rows 2, cost 'prefix' and work None"),
        ({"token_budget": 1.5}, "token_budget is 1.5; expected a whole number from 1."),
        ({"work": lambda n: n[:1]}, "amounts of work are int64 (1,); expected numbers (2,)"),
        ({"work": lambda n: -n}, "amounts of work run from -3.0 to -2.0; expected finite numbers from 0"),
        ({"token_budget": 2, "oversize": "error"}, "rows [0] alone, or their groups, are over token_budget 2"),
    ],
)
def test_options_with_a_tree(options: dict[str, Any], words: str) -> None:
    for call in (plan_micro_batches, lambda *args, **more: plan_ranks(args[0], 1, **more)):
        with pytest.raises(PlanError) as caught:
            call([3, 2], **{"token_budget": 5, "cost": "prefix", "tree": TREE, **options})
        assert str(caught.value).startswith(f"plan_micro_batches: {words}")


@pytest.mark.parametrize("ranks", [0, -1, 1.0, True, None])
def test_ranks_that_are_none(ranks: Any) -> None:
    with pytest.raises(PlanError, match=r"^balance_rows: ranks is .*; expected a whole number from 1"):
        plan_ranks([3, 2], ranks, 5, cost="prefix", tree=TREE)


def test_work_that_decreases_with_length_is_refused() -> None:
    words = r"^plan_micro_batches: work is 1.0 for the 9 tokens of row 1, and 2.0 for 8 of them; expected no less"
    tree = PrefixTree.from_groups([10, 9], ["a", "a"], [8, 8], min_shared=1)
    for call in (plan_micro_batches, lambda lengths, *given, **more: plan_ranks(lengths, 2, *given, **more)):
        with pytest.raises(PlanError, match=words):
            call([10, 9], 20, cost="prefix", tree=tree, work=lambda n: 10.0 - n)
