"""Plans with a tree against naive tries; what holds of every plan is in test_plan.py and test_rank_plans.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Case, Row, for_cases, many, real, tree_of, trie, tries

from maskpack.planning import PlanOptions, PrefixTree, plan_micro_batches, plan_ranks
from maskpack.planning.prefixes import tree_units

# -------------------------------------------------------------------- one rank


@for_cases(kinds=["prefix"], groups=False)
def test_rows_that_share_stay_together_if_they_fit(case: Case) -> None:
    for update in real(case.plan):
        for root in case.roots(sorted(itertools.chain(*update))):
            if not case.too_large(root):
                assert sum(not set(root).isdisjoint(part) for part in update) == 1


@many
@given(tries(1, 8), st.integers(1, 25))
def test_cuts_repeat_the_fewest_tokens(rows: list[Row], most_tokens: int) -> None:
    """Of all ways to cut the order of the tree, and of these one of the fewest pieces."""
    tree = tree_of(rows)
    units = tree_units(tree, most_tokens)
    assert list(itertools.chain(*units.rows or [])) == tree.order.tolist()
    assert [units.of_row[row] for own in units.rows or [] for row in own] == sorted(units.of_row.tolist())
    best = 0, 0
    for root in Case([], 1, rows=rows).roots(tree.order.tolist()):
        ways = (
            _pieces(root, ends) for n in range(len(root)) for ends in itertools.combinations(range(1, len(root)), n)
        )
        tokens, pieces = min(
            (sum(len(trie([rows[row] for row in piece])) for piece in way), len(way))
            for way in ways
            if all(len(piece) == 1 or len(trie([rows[row] for row in piece])) <= most_tokens for piece in way)
        )
        best = best[0] + tokens, best[1] + pieces
    empty = sum(not row for row in rows)
    found = [len(trie([rows[row] for row in own])) for own in units.rows or []]
    assert (sum(found), len(found) - empty) == best


def _pieces(items: Sequence[int], ends: Sequence[int]) -> list[Sequence[int]]:
    return [items[begin:end] for begin, end in itertools.pairwise([0, *ends, len(items)])]


def test_a_tree_stays_as_it_was() -> None:
    tree = tree_of([(1, 2, 3), (1, 2, 4), (5,)])
    before = tree.order.tolist(), tree.shared.tolist(), tree.lengths.tolist()
    plan_micro_batches([3, 3, 1], 3, tree=tree, options=PlanOptions(num_updates=2))
    plan_ranks([3, 3, 1], 2, 3, tree=tree)
    assert (tree.order.tolist(), tree.shared.tolist(), tree.lengths.tolist()) == before


def test_by_hand() -> None:
    """Two prompts of 10 tokens, four responses of 2 each; 18 tokens a group."""
    lengths, labels = [12] * 8, list("aaaabbbb")
    tree = PrefixTree.from_groups(lengths, labels, [10] * 8, min_shared=1)
    plan = plan_micro_batches(lengths, 36, tree=tree)
    assert plan.updates == [[list(range(8))]]
    assert plan.loads() == [36]
    assert plan.metrics()["plan/shared_tokens"] == 60
    assert plan_micro_batches(lengths, 36).counts == [3]
    two = plan_micro_batches(lengths, 35, tree=tree)
    assert sorted(two.micro_batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert two.with_count(3).dummies == [1], "what shares is not split to reach a count"
    cut = plan_micro_batches(lengths, 16, tree=tree)
    assert sorted(map(len, cut.micro_batches)) == [1, 1, 3, 3]
    assert sorted(cut.loads()) == [12, 12, 16, 16]
    alone = plan_micro_batches(lengths, 11, tree=tree)
    assert (alone.counts, alone.oversized) == ([8], list(range(8)))


def test_groups_are_spread_over_micro_batches() -> None:
    """Best fit would run five groups, and one that is left."""
    tree = PrefixTree.from_groups([25] * 24, [row // 4 for row in range(24)], [20] * 24)
    plan = plan_micro_batches([25] * 24, 5 * 40, tree=tree)
    assert plan.loads() == [3 * 40, 3 * 40]
    assert sorted(len(rows) for rows in plan.micro_batches) == [12, 12]


def test_bins_are_evened_within_the_budget_only() -> None:
    """The smallest bin each would give 7 and 5 tokens."""
    rows = [(label,) * n for label, n in enumerate((3, 3, 2, 2, 2))]
    plan = plan_micro_batches([*map(len, rows)], 6, tree=tree_of(rows))
    assert plan.loads() == [6, 6]


def test_parts_of_one_root_in_one_micro_batch_share_again() -> None:
    """The groups a and c are one micro-batch; they have the system prompt in common once."""
    system = (9,) * 5
    rows = [system + (label,) * n for label, n in ((1, 3), (2, 20), (3, 4))]
    plan = plan_micro_batches([8, 25, 9], 25, tree=tree_of(rows), groups=["a", "b", "c"])
    assert plan.updates == [[[1], [0, 2]]]
    assert plan.loads() == [25, 12]


# -------------------------------------------------------------------- ranks


@many
@given(tries(1, 12), st.integers(1, 12), st.integers(1, 60))
def test_every_rank_has_a_row_if_there_are_enough(rows: list[Row], ranks: int, budget: int) -> None:
    case = Case([*map(len, rows)], budget, rows=rows)
    assert sum(map(bool, case.ranks(ranks).rows)) == min(ranks, len(rows))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_keep_groups_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(64), 8)
    prompts = rng.integers(50, 400, 64)[labels]
    lengths = prompts + rng.integers(10, 500, 512)
    tree = PrefixTree.from_groups(lengths, labels, prompts)
    plans = plan_ranks(lengths, 8, 8192, tree=tree)
    assert all(len(set(labels[rows])) == 8 for rows in plans.rows)
    tokens = [tree.take(rows).num_tokens for rows in plans.rows]
    assert max(tokens) < 1.01 * tree.num_tokens / 8
    assert sum(tokens) == tree.num_tokens


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
        plans = plan_ranks(lengths, ranks, 8192, tree=tree)
        tokens = [len(trie([rows[row] for row in own])) for own in plans.rows]
        assert max(tokens) < 1.05 * np.mean(tokens)
        assert sum(tokens) < 1.1 * tree.num_tokens + 200 * ranks
        assert max(itertools.chain(*(plan.loads() for plan in plans.plans))) <= 8192
        assert plans.metrics()["plan/shared_tokens"] > 0.3 * sum(lengths)


def test_a_group_that_is_more_than_a_share_is_cut() -> None:
    lengths, labels = [20] * 16 + [2, 2], [0] * 16 + [1, 2]
    tree = PrefixTree.from_groups(lengths, labels, [4] * 16 + [0, 0], min_shared=1)
    tokens = [tree.take(rows).num_tokens for rows in plan_ranks(lengths, 4, 1000, tree=tree).rows]
    assert max(tokens) <= 4 + 16 * 4 + 2
    assert plan_ranks(lengths, 1, 1000, tree=tree).plans[0].counts == [1]


def test_groups_and_a_tree_on_ranks() -> None:
    """Labels decide which rows stay together, the tree what they cost."""
    tree, labels = tree_of([(1, 1, 1, 1, n) for n in range(6)]), list("aabbcc")
    plans = plan_ranks([5] * 6, 3, 6, tree=tree, groups=labels)
    assert sorted("".join(labels[row] for row in own) for own in plans.rows) == ["aa", "bb", "cc"]
    assert [plan.loads() for plan in plans.plans] == [[6]] * 3
