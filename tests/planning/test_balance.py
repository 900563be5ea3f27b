"""balance_rows against naive loops: sums of ranks, whole groups, and an order whose every stretch is like the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Flops, in_units, many

from maskpack.planning import PlanOptions, balance_rows, plan_micro_batches


def log_normal(rows: int, seed: int, sigma: float = 1.0) -> list[int]:
    return np.clip(np.exp(np.random.default_rng(seed).normal(6, sigma, rows)), 1, 20_000).astype(int).tolist()


def reference() -> list[int]:
    """The lengths of 256 rows in groups."""
    return [prompt + response for prompt, response in samples.lengths(256, 256, 1792)]


def sums(parts: Sequence[Sequence[int]], lengths: Sequence[float]) -> list[float]:
    return [sum(lengths[row] for row in rows) for rows in parts]


def largest_first(weights: Sequence[float], ranks: int) -> float:
    """The largest sum of the naive rule: each weight, the largest first, to the rank with least."""
    loads = [0.0] * ranks
    for weight in sorted(weights, reverse=True):
        loads[loads.index(min(loads))] += weight
    return max(loads)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any]]:
    rows = draw(st.integers(0, 30))
    most = draw(st.sampled_from((0, 1, 50, 10_000)))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        labels = st.sampled_from(("a", "b", 1, 2, None, (3,), "c"))
        options["groups"] = draw(st.lists(labels, min_size=rows, max_size=rows))
    if draw(st.booleans()):
        options["cost"] = draw(st.sampled_from((Flops(1.0, 0.25), lambda n: n % 7 / 3)))
    lengths = draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
    return lengths, draw(st.integers(1, 9)), options


# -------------------------------------------------------------------- the promises


@many
@given(arguments())
def test_every_row_once(case: tuple[list[int], int, dict[str, Any]]) -> None:
    lengths, ranks, options = case
    parts = balance_rows(lengths, ranks, **options)
    assert len(parts) == ranks
    assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
    assert all(type(row) is int for rows in parts for row in rows)


@many
@given(arguments())
def test_equal_rows(case: tuple[list[int], int, dict[str, Any]]) -> None:
    lengths, ranks, options = case
    parts = balance_rows(lengths, ranks, **options)
    of_row = {row: number for number, rows in enumerate(in_units(options.get("groups"), len(lengths))) for row in rows}
    counts = [len({of_row[row] for row in rows}) for rows in parts]
    assert max(counts) - min(counts) <= 1
    assert balance_rows(np.array(lengths, np.int64), ranks, **options) == parts, "again"


@many
@given(arguments())
def test_groups_are_whole_and_in_the_order_given(case: tuple[list[int], int, dict[str, Any]]) -> None:
    lengths, ranks, options = case
    units = in_units(options.get("groups"), len(lengths))
    first = {rows[0]: rows for rows in units}
    for rows in balance_rows(lengths, ranks, **options):
        left = list(rows)
        while left:
            unit = first[left[0]]
            assert left[: len(unit)] == unit
            del left[: len(unit)]


@many
@given(arguments())
def test_halves_of_a_rank_have_like_sums(case: tuple[list[int], int, dict[str, Any]]) -> None:
    """Of two neighbours by size one is in each half: the halves differ by no more than the largest and the smallest. So
    do the halves of halves."""
    lengths, ranks, options = case
    options = {name: value for name, value in options.items() if name not in ("groups", "cost")}
    for rows in balance_rows(lengths, ranks, **options):
        stretches = [[lengths[row] for row in rows]]
        while stretches:
            own = stretches.pop()
            if len(own) % 2 == 0 and own:
                middle = len(own) // 2
                halves = own[:middle], own[middle:]
                assert abs(sum(halves[0]) - sum(halves[1])) <= max(own) - min(own)
                stretches += halves


# -------------------------------------------------------------------- how even


def test_as_even_as_the_naive_rule_on_log_normal_lengths() -> None:
    """With equal rows, which the naive rule does not keep."""
    for seed in range(12):
        lengths = log_normal(512, seed)
        found = max(sums(balance_rows(lengths, 8), lengths))
        assert found <= largest_first(lengths, 8), seed
        assert found <= 1.0001 * sum(lengths) / 8, seed


@pytest.mark.parametrize(
    ("lengths", "ranks", "want"),
    [
        ([28, 17, 10, 9, 5, 5, 2, 1], 2, 39),
        ([30, 15, 14, 12, 7, 7, 3, 1], 2, 45),
        ([25, 14, 14, 9, 8, 5, 4, 3], 2, 41),
        ([30, 24, 21, 10, 9, 9, 8, 7], 2, 60),
        ([29, 9, 5, 4, 3, 2], 2, 34),
        ([30, 30, 9, 9, 9, 9, 7, 6, 1], 3, 43),
        ([27, 25, 24, 19, 19, 9, 8, 6, 4], 3, 49),
        ([28, 26, 15, 12, 8, 7, 7, 6, 5, 4, 3, 2], 3, 41),
        ([30, 20, 14, 9, 9, 7, 6, 6, 5, 4, 1, 1], 3, 38),
    ],
)
def test_exchanges_find_the_optimum_of_equal_rows(lengths: list[int], ranks: int, want: int) -> None:
    """Cases where the second-best exchange, or another rank, would not."""
    assert max(sums(balance_rows(lengths, ranks), lengths)) == want


def test_costs_are_what_is_evened_out() -> None:
    lengths = log_normal(512, 3)
    model = Flops(6e9, 6.0 * 24 * 2048)
    flops = [float(item) for item in model(np.array(lengths))]
    by_cost, by_tokens = (sums(balance_rows(lengths, 8, cost=cost), flops) for cost in (model, "tokens"))
    assert max(by_cost) <= 1.0001 * sum(flops) / 8
    assert max(by_tokens) > 1.01 * sum(flops) / 8


def test_groups_are_evened_out() -> None:
    lengths = log_normal(512, 4)
    for labels in (np.arange(512) // 8, np.arange(512) % 64):
        parts = balance_rows(lengths, 8, groups=labels)
        assert [len(rows) for rows in parts] == [64] * 8
        assert max(sums(parts, lengths)) <= 1.02 * sum(lengths) / 8


def test_one_long_row_is_with_the_fewest_rows() -> None:
    lengths = [1000, *[1] * 30]
    equal = balance_rows(lengths, 4)
    assert sorted(map(len, equal)) == [7, 8, 8, 8]
    assert max(sums(equal, lengths)) == 1006


# -------------------------------------------------------------------- updates of the same kind


def means_of_updates(parts: Sequence[Sequence[int]], lengths: Sequence[int], updates: int) -> list[float]:
    """The mean length of each update over all ranks, by the plans of the ranks."""
    found: list[list[int]] = [[] for _ in range(updates)]
    for rows in parts:
        plan = plan_micro_batches([lengths[row] for row in rows], 10**6, options=PlanOptions(num_updates=updates))
        for update, own in zip(plan.updates, found, strict=True):
            own += [lengths[rows[row]] for micro_batch in update for row in micro_batch]
    return [sum(own) / len(own) for own in found]


@pytest.mark.parametrize(("rows", "ranks"), [(256, 8), (8192, 64)])
def test_updates_have_like_mean_lengths(rows: int, ranks: int) -> None:
    for seed in range(5):
        lengths = reference() if rows == 256 else log_normal(rows, seed)
        parts = balance_rows(lengths, ranks)
        assert max(sums(parts, lengths)) <= 1.001 * sum(lengths) / ranks
        for updates in (2, 4):
            means = means_of_updates(parts, lengths, updates)
            assert max(means) <= 1.1 * min(means), means
            assert max(means) <= 1.002 * min(means), "and much closer"


def test_updates_of_other_numbers_of_rows_are_alike_too() -> None:
    """250 rows on 8 ranks: no halves of equal size."""
    for seed in range(5):
        lengths = log_normal(250, seed)
        means = means_of_updates(balance_rows(lengths, 8), lengths, 4)
        assert max(means) <= 1.3 * min(means), means


def test_equal_rows_are_shuffled_too() -> None:
    """Rows of one length: no half has those that come first."""
    (rows,) = balance_rows([5] * 400, 1)
    assert 60 <= sum(row < 200 for row in rows[:200]) <= 140


# -------------------------------------------------------------------- kinds of input, edges


def test_few_rows() -> None:
    assert balance_rows([], 3) == balance_rows([], 3, groups=[]) == [[], [], []]
    assert sorted(balance_rows([4], 3)) == [[], [], [0]]
    assert sorted(balance_rows([4, 1], 3)) == [[], [0], [1]]
    assert sorted(balance_rows([0, 0, 0], 3)) == [[0], [1], [2]]
    assert sorted(*balance_rows([4, 1], np.int64(1))) == [0, 1]
    assert sorted(balance_rows([4, 1, 3], 2, groups=["a", "b", "a"])) == [[0, 2], [1]]
