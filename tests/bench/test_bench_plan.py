"""The benchmark of plans: length sets and bounds are what they say, rivals are right, it checks before it times."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import __main__ as command
from bench import plan as case
from bench import plan_chart
from bench import plan_rivals as rivals
from bench.measure import NotExact
from bench.workloads import make_batch

P, R, ROWS = 37, 229, 33
SMALL = {"sizes": (40, 90), "ranks": 4, "prompt_width": P, "response_width": R}
SVG = "{http://www.w3.org/2000/svg}"
BARS = [[40, 10], [20, 20], [30], [40, 20, 30], [20, 10]]
"""Three micro-batches before, two after."""


def drawn(seed, count, most):
    return np.random.default_rng(seed).integers(1, most + 1, count)


# -------------------------------------------------------------------- lengths


@pytest.mark.parametrize("kind", case.LENGTHS)
def test_lengths_are_the_same_each_time_and_fit_the_budget(kind):
    lengths = case.LENGTHS[kind](1000)
    assert lengths.dtype == np.int64
    assert lengths.shape == (1000,)
    assert np.array_equal(lengths, case.LENGTHS[kind](1000))
    assert lengths.min() >= 1
    assert lengths.max() <= case.BUDGET


def test_log_normal_lengths_are_those_of_the_reference_workload():
    real = make_batch("reference", 256)["attention_mask"].sum(1).double()
    lengths = case.log_normal(65_536)
    assert lengths.mean() == pytest.approx(real.mean().item(), rel=0.02)
    assert np.log(lengths).std() == pytest.approx(real.log().std(correction=0).item(), rel=0.1)


def test_reference_lengths_are_those_of_the_batch():
    batch = make_batch("reference", ROWS, prompt_width=P, response_width=R)
    assert case.reference_lengths(ROWS, P, R).tolist() == batch["attention_mask"].sum(1).tolist()


def test_the_total_does_not_say_how_many_bins_bimodal_lengths_need():
    lengths = case.bimodal(8192)
    assert rivals.martello_toth(lengths, case.BUDGET) > rivals.total_bound(lengths, case.BUDGET) + 400


# -------------------------------------------------------------------- bounds and bins


def bound_by_loops(lengths, budget):
    best = 0
    for threshold in range(budget // 2 + 1):
        large = [n for n in lengths if n > budget - threshold]
        half = [n for n in lengths if budget - threshold >= n and 2 * n > budget]
        rest = [n for n in lengths if 2 * n <= budget and n >= threshold]
        over = sum(rest) - (len(half) * budget - sum(half))
        best = max(best, len(large) + len(half) + max(0, -(-over // budget)))
    return best


@pytest.mark.parametrize(("budget", "most"), [(20, 20), (21, 21), (20, 7), (21, 12), (1, 1)])
def test_the_martello_toth_bound_is_the_one_by_loops(budget, most):
    for seed in range(20):
        lengths = drawn(seed, 1 + 3 * seed, most)
        assert rivals.martello_toth(lengths, budget) == bound_by_loops(lengths.tolist(), budget), seed
        assert rivals.martello_toth(lengths, budget) >= rivals.total_bound(lengths, budget)


def fewest_bins(lengths, budget):
    for count in itertools.count(1):
        for placed in itertools.product(range(count), repeat=len(lengths)):
            if all(sum(n for n, at in zip(lengths, placed, strict=True) if at == b) <= budget for b in range(count)):
                return count
    raise AssertionError


def test_no_bins_are_below_the_bound():
    for seed in range(12):
        lengths = drawn(seed, 6, 11)
        assert rivals.martello_toth(lengths, 12) <= fewest_bins(lengths.tolist(), 12)


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


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_karmarkar_karp_gives_the_sums_of_the_one_by_loops(count):
    for seed in range(10):
        lengths = drawn(seed, 20, 40).tolist()
        parts = rivals.karmarkar_karp(lengths, count)
        case.require_rows_once("test", parts, 20)
        assert sorted(sum(lengths[row] for row in part) for part in parts) == partition_by_loops(lengths, count)


# -------------------------------------------------------------------- ranks


def test_largest_processing_time_gives_each_row_to_the_lightest_rank():
    assert rivals.largest_processing_time([3, 5, 3, 4, 3], 2) == [[1, 2], [3, 0, 4]]


@pytest.mark.parametrize("shared_out", [False, True])
def test_usual_plans_keep_the_order_and_have_equal_counts(shared_out):
    lengths = [6, 5, 4, 3, 9, 9, 9, 1]  # two ranks, two updates
    plans = rivals.usual_rank_plans(lengths, 2, 2, 12, shared_out=shared_out)
    assert [len(plan) for plan in plans] == [3, 3]
    assert [[sorted(rows) for rows in plan] for plan in plans] == (
        [[[0], [1], [2, 3]], [[4], [5], [6, 7]]] if shared_out else [[[0, 1], [], [2, 3]], [[4], [5], [6, 7]]]
    )


def test_the_spread_of_updates_is_the_largest_mean_over_the_smallest():
    lengths = np.array([8, 1, 4, 2, 6, 3, 4, 4])
    assert case.spread(lengths, [[0, 4, 2, 6], [1, 3, 5, 7]]) == pytest.approx((8 + 1) / (4 + 3))
    assert case.spread(lengths, [[0, 1, 3], []]) == 8  # the first update has no rows


def test_rank_imbalance_is_by_micro_batch():
    assert case.rank_imbalance(np.array([[4.0, 1.0], [1.0, 4.0]])) == 8 / 5


# -------------------------------------------------------------------- checks


def test_the_checks_see_rows_and_budgets():
    lengths = np.array([5, 7, 3])
    case.require_rows_once("test", [[2, 0], [1]], 3)
    for bins in ([[0, 1]], [[0, 1], [2, 2]], [[0, 1, 2, 3]]):
        with pytest.raises(NotExact, match="the rows are not 0 to 2, each once"):
            case.require_rows_once("test", bins, 3)
    case.require_within("test", [[0, 1], [2]], lengths, 12)
    with pytest.raises(NotExact, match="12 tokens; expected at most 11"):
        case.require_within("test", [[0, 1], [2]], lengths, 11)
    with pytest.raises(NotExact, match="14 tokens; expected at most 13"):
        case.require_within("test", [[0, 1], [2]], lengths, 13, padded=True)


def test_a_lost_row_a_broken_budget_and_other_bins_are_not_timed(monkeypatch):
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


def test_ranks_with_unequal_rows_are_not_timed(monkeypatch):
    monkeypatch.setattr(
        case, "balance_rows", lambda lengths, ranks, **_: [list(range(lengths.size))] + [[]] * (ranks - 1)
    )
    with pytest.raises(NotExact, match="0 to 40 rows; expected at most one apart"):
        case._balance("uniform", case.uniform(40), 4, 1)


# -------------------------------------------------------------------- the case


def test_the_case_runs_with_its_targets():
    rows = case.run(ROWS, 1, **SMALL)
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
    for what in ("33 reference lengths over 8 ranks", "40 log-normal lengths over 4 ranks"):
        name = f"plan, {what}, 4 updates, largest mean length / smallest"
        wanted[name, "balance_rows, worst of 20 seeds"] = "<= 1.10"
    assert {(row.case, row.name): row.target for row in rows if row.target is not None} == wanted
    assert len({(row.case, row.name) for row in rows}) == len(rows)
    assert all(row.value > 0 for row in rows if row.unit in ("ms", "x"))
    slow = {row.case.split()[1] for row in rows if row.unit == "ms" and row.name.startswith("Karmarkar-Karp")}
    assert slow == {"40"}


def test_the_command_prints_a_table_writes_json_and_draws(tmp_path, capsys, monkeypatch):
    run = command.CASES["plan"]
    monkeypatch.setitem(command.CASES, "plan", lambda rows, rounds, **more: run(rows, rounds, **SMALL, **more))
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    command.main(["plan", "--rows", "9", "--rounds", "1", "--json", str(figures), "--plot", str(chart)])
    shown = capsys.readouterr().out
    written = json.loads(figures.read_text())["rows"]
    assert "plan 40 bimodal lengths" in shown
    assert all(row["name"] in shown for row in written)
    assert "9 rows of the reference workload" in chart.read_text()


def test_plot_is_refused_for_cases_without_a_chart(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["ops", "--plot", str(tmp_path / "chart.svg")])
    assert "--plot is for dispatch and plan; ops has no chart" in capsys.readouterr().err


# -------------------------------------------------------------------- the chart


def heights(root, kind):
    """Of the boxes of each bar, in the order drawn."""
    paths = [path.get("d") for path in root.findall(f"{SVG}path") if path.get("class") == kind]
    return [[float(high) for high in re.findall(r"v-([\d.]+)", path)] for path in paths]


def test_the_chart_has_a_bar_a_micro_batch_a_box_a_row_and_padding_before_only():
    root = ElementTree.fromstring(plan_chart.chart(BARS[:3], BARS[3:], 100, 200))
    real, padding = heights(root, "real"), heights(root, "padding")
    assert [len(bar) for bar in real] == [2, 2, 1, 3, 2]
    a_token = real[0][0] / 40
    assert real == [pytest.approx([a_token * n for n in bar], abs=0.06) for bar in BARS]
    assert padding == [pytest.approx([30 * a_token], abs=0.06)]
    bottom = max(float(line.get("y1")) for line in root.findall(f"{SVG}line"))
    (budget,) = (line for line in root.findall(f"{SVG}line") if line.get("class") == "budget")
    assert bottom - float(budget.get("y1")) == pytest.approx(100 * a_token, abs=0.3)
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert "by count: 2 rows each, in the order given" in texts
    assert "3 micro-batches, padded to the longest row of each: 80 % real" in texts
    assert "0 of them over the budget; padded to S = 200, each would be 400 tokens" in texts
    assert texts.count("micro-batch") == 2
    assert {"2 micro-batches, not padded:", "60 % of the budget used", "token budget 100", "tokens"} <= set(texts)


def test_the_chart_of_the_reference_workload_is_small_and_stays_inside():
    lengths = np.minimum(case.log_normal(256), case.BUDGET)
    text = case._drawn(lengths, case.BUDGET)
    assert len(text) < 40_000
    root = ElementTree.fromstring(text)
    wide, high = float(root.get("width")), float(root.get("height"))
    for path in root.findall(f"{SVG}path"):
        for x, y, up, across in re.findall(r"M([\d.]+) ([\d.]+)v-([\d.]+)h([\d.]+)", path.get("d")):
            assert 0 < float(x) < float(x) + float(across) < wide
            assert 0 < float(y) - float(up) <= float(y) < high
    assert sum(map(len, heights(root, "real"))) == 2 * 256
