"""The benchmark of plans: length sets and bounds are what they say, rivals are right, it checks before it times."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from bench import plan as case
from bench import plan_rivals as rivals
from bench.measure import NotExact

ROWS = 33
SMALL = {"sizes": (40, 90), "ranks": 4, "scale": 0.016}
SVG = "{http://www.w3.org/2000/svg}"


def drawn(seed, count, most):
    return np.random.default_rng(seed).integers(1, most + 1, count)


# -------------------------------------------------------------------- lengths


@pytest.mark.parametrize("kind", case.LENGTHS)
def test_lengths_are_the_same_each_time_and_fit_the_budget(kind):
    lengths = case.LENGTHS[kind](1000)
    assert lengths.dtype == np.int64
    assert np.array_equal(lengths, case.LENGTHS[kind](1000))
    assert 1 <= lengths.min() <= lengths.max() <= case.BUDGET


# -------------------------------------------------------------------- bounds, bins and ranks


def bound_by_loops(lengths, budget):
    best = 0
    for threshold in range(budget // 2 + 1):
        large = [n for n in lengths if n > budget - threshold]
        half = [n for n in lengths if budget - threshold >= n and 2 * n > budget]
        rest = [n for n in lengths if 2 * n <= budget and n >= threshold]
        over = sum(rest) - (len(half) * budget - sum(half))
        best = max(best, len(large) + len(half) + max(0, -(-over // budget)))
    return best


@pytest.mark.parametrize(("budget", "most"), [(20, 20), (21, 12), (1, 1)])
def test_the_martello_toth_bound_is_the_one_by_loops(budget, most):
    for seed in range(20):
        lengths = drawn(seed, 1 + 3 * seed, most)
        assert rivals.martello_toth(lengths, budget) == bound_by_loops(lengths.tolist(), budget), seed
        assert rivals.martello_toth(lengths, budget) >= rivals.total_bound(lengths, budget)


def test_both_ways_of_first_fit_decreasing_give_the_same_bins():
    assert rivals.first_fit_decreasing([5, 9, 2, 7, 3], 14) == [[1, 0], [3, 4, 2]]
    for seed, count in enumerate([0, 1, 2, 3, 8, 9, 64, 200]):
        lengths = drawn(seed, count, 30).tolist()
        bins = rivals.first_fit_decreasing(lengths, 30)
        case.require_rows_once("test", bins, count)
        assert rivals.first_fit_on_a_tree(lengths, 30) == bins


def partition_by_loops(lengths, count):
    """Karmarkar-Karp, every state with all its parts. The sums, sorted."""
    states = [(row, sorted([0] * (count - 1) + [size])) for row, size in enumerate(lengths)]
    while len(states) > 1:
        states.sort(key=lambda state: (state[1][0] - state[1][-1], state[0]))
        (number, one), (_, other), *states = states
        states.append((number, sorted(a + b for a, b in zip(one, reversed(other), strict=True))))
    return states[0][1]


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_karmarkar_karp_gives_the_sums_of_the_one_by_loops(count):
    for seed in range(10):
        lengths = drawn(seed, 20, 40).tolist()
        parts = rivals.karmarkar_karp(lengths, count)
        case.require_rows_once("test", parts, 20)
        assert sorted(sum(lengths[row] for row in part) for part in parts) == partition_by_loops(lengths, count)


@pytest.mark.parametrize("shared_out", [False, True])
def test_usual_plans_keep_the_order_and_have_equal_counts(shared_out):
    lengths = [6, 5, 4, 3, 9, 9, 9, 1]  # two ranks, two updates
    plans = rivals.usual_rank_plans(lengths, 2, 2, 12, shared_out=shared_out)
    assert [[sorted(rows) for rows in plan] for plan in plans] == (
        [[[0], [1], [2, 3]], [[4], [5], [6, 7]]] if shared_out else [[[0, 1], [], [2, 3]], [[4], [5], [6, 7]]]
    )


def test_spread_and_imbalance_are_those_of_their_definitions():
    lengths = np.array([8, 1, 4, 2, 6, 3, 4, 4])
    assert case.spread(lengths, [[0, 4, 2, 6], [1, 3, 5, 7]]) == pytest.approx((8 + 1) / (4 + 3))
    assert case.spread(lengths, [[0, 1, 3], []]) == 8  # the first update has no rows
    assert case.rank_imbalance(np.array([[4.0, 1.0], [1.0, 4.0]])) == 8 / 5  # by micro-batch


# -------------------------------------------------------------------- the case


def test_the_checks_see_rows_and_budgets():
    lengths = np.array([5, 7, 3])
    for bins in ([[0, 1]], [[0, 1], [2, 2]], [[0, 1, 2, 3]]):
        with pytest.raises(NotExact, match="the rows are not 0 to 2, each once"):
            case.require_rows_once("test", bins, 3)
    case.require_within("test", [[0, 1], [2]], lengths, 12)
    with pytest.raises(NotExact, match="12 tokens; expected at most 11"):
        case.require_within("test", [[0, 1], [2]], lengths, 11)
    with pytest.raises(NotExact, match="14 tokens; expected at most 13"):
        case.require_within("test", [[0, 1], [2]], lengths, 13, padded=True)


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(case, "interleaved", None)

    def run_with(owner, name, work):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, work)
            with pytest.raises(NotExact) as raised:
                case.run(ROWS, 1, **SMALL)
        return str(raised.value)

    planned = case.plan_micro_batches
    lost = run_with(case, "plan_micro_batches", lambda lengths, budget, **more: planned(lengths[:-1], budget, **more))
    assert "plan_micro_batches: the rows are not 0 to 39" in lost
    over = run_with(case, "plan_micro_batches", lambda lengths, budget, **more: planned(lengths, 2 * budget, **more))
    assert "plan_micro_batches: a micro-batch of" in over
    tree = rivals.first_fit_on_a_tree
    others = run_with(rivals, "first_fit_on_a_tree", lambda lengths, budget: tree(lengths, budget)[::-1])
    assert "tournament tree: other bins" in others
    impossible = run_with(rivals, "martello_toth", lambda lengths, budget: lengths.size + 1)
    assert "the Martello-Toth bound says at least 41" in impossible
    one_rank = lambda lengths, ranks, **_: [list(range(lengths.size))] + [[]] * (ranks - 1)  # noqa: E731
    monkeypatch.setattr(case, "balance_rows", one_rank)
    with pytest.raises(NotExact, match="0 to 40 rows; expected at most one apart"):
        case._balance("uniform", case.uniform(40), 4, 1)


def test_the_case_runs_with_its_targets_and_draws(measured, tmp_path):
    chart = tmp_path / "chart.svg"
    rows = measured("plan", lambda rows, rounds, **more: case.run(rows, rounds, **SMALL, **more), "--plot", str(chart))
    wanted = {}
    for count, ms in ((40, "<= 25"), (90, "<= 250")):
        for kind in case.LENGTHS:
            name = f"plan {count} {kind} lengths, budget 16,384"
            wanted |= {(name, "plan_micro_batches"): ms, (name, "bins above first-fit decreasing"): "<= 0"}
    for kind in case.LENGTHS:
        name = f"plan, 40 {kind} lengths over 4 ranks"
        wanted[name, "balance_rows"] = "<= 10"
        for ours in ("balance_rows", "balance_rows, equal_rows=False"):
            wanted[name, f"{ours}: most tokens of a rank above those of the heap"] = "<= 0"
    for what in ("5 reference lengths over 8 ranks", "40 log-normal lengths over 4 ranks"):
        name = f"plan, {what}, 4 updates, largest mean length / smallest"
        wanted[name, "balance_rows, worst of 20 seeds"] = "<= 1.10"
    assert {key: row["target"] for key, row in rows.items() if row["target"]} == wanted
    assert "5 rows of the reference workload" in chart.read_text()


@pytest.mark.parametrize(("workload", "rows", "ranks"), [("tau", "200", 8), ("mooncake", "12,031", 64)])
def test_real_lengths_are_planned_within_budgets_that_hold_the_longest_row(
    measured, monkeypatch, tmp_path, workload, rows, ranks
):
    monkeypatch.setattr(case, "BUDGET", 16)
    monkeypatch.setattr(case, "RANK_BUDGET", 4096)
    chart = tmp_path / "chart.svg"
    run = functools.partial(case.run, scale=0.01)
    for name in ("first_fit_decreasing", "karmarkar_karp"):  # their time grows with the square of the rows
        if workload == "mooncake":
            monkeypatch.setattr(rivals, name, rivals.first_fit_on_a_tree if name[0] == "f" else in_turn)
    seen = measured(
        "plan", lambda rows, rounds, **more: run(rows, rounds, **more), "--workload", workload, "--plot", str(chart)
    )
    assert not any(row["target"] for row in seen.values())
    budget = {"tau": "128", "mooncake": "2,048"}[workload]
    assert (f"plan {rows} {workload} lengths, budget {budget}", "bins above first-fit decreasing") in seen
    assert (f"plan, {rows} {workload} lengths over {ranks} ranks", "balance_rows") in seen
    assert (f"plan, {rows} {workload} lengths, {ranks} ranks, 4 updates, budget 4,096", "plan_ranks") in seen
    assert f"5 rows of the {workload} workload" in chart.read_text()


def in_turn(lengths, count):
    return [list(range(part, len(lengths), count)) for part in range(count)]
