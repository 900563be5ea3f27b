"""A plan for all DP ranks, made on the driver from lengths alone, without a collective.

lengths [B] -> balance_rows -> the rows of each rank -> a MicroBatchPlan each -> equal counts, global denominators
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from maskpack.core.arguments import flag, said
from maskpack.errors import PlanError
from maskpack.planning.balance import balance_rows, balance_units
from maskpack.planning.costs import MOST, Cost, IntArray, RowCost, Units, checked_amounts, checked_lengths, whole_number
from maskpack.planning.loss_weights import Loss, totals
from maskpack.planning.packing import Oversize, PackingProblem, PlanOptions
from maskpack.planning.plan import MicroBatchPlan, oversized_rows, planned
from maskpack.planning.prefixes import SharedAmounts, checked_tree, tree_units

if TYPE_CHECKING:
    from maskpack.layout.prefix_tree import PrefixTree

_CALL = "plan_ranks"


def plan_ranks(
    lengths: Any,
    ranks: int,
    token_budget: float | None,
    *,
    cost: Cost = "tokens",
    tree: PrefixTree | None = None,
    num_updates: int = 1,
    groups: Any = None,
    multiple_of: int = 1,
    context_parallel: int = 1,
    min_count: int | None = None,
    max_rows: int | None = None,
    oversize: Oversize = "alone",
    work: RowCost | None = None,
    loss_tokens: Any = None,
    equal_rows: bool = True,
    seed: int = 0,
    own_lengths: bool = False,
) -> RankPlans:
    """Divides rows among DP ranks, and the rows of each rank into micro-batches.

    It uses `balance_rows` and `plan_micro_batches`. All ranks have the same number of micro-batches in an update.

    Args:
        lengths: integers [B] on the host, the valid tokens of each row of the whole batch: prompt plus response.
        ranks: the number of DP ranks. With `context_parallel`, each of them is a group of that many ranks, which all
            run the plan of the group.
        equal_rows, seed: options of `balance_rows`, which balances `work`, by default tokens.
        tree: the PrefixTree of all rows, with cost="prefix". Rows that share a prefix go to one rank, unless ranks
            balance better if they are cut; `equal_rows` equalizes such parts, not rows. Ranks balance the tokens of
            their tries.
        own_lengths: whether `lengths` may differ from the layouts of the batch. Otherwise a WorkerGroup compares them.
        token_budget: of each rank. This and the other arguments are those of `plan_micro_batches`; `groups` and
            `loss_tokens` are [B], and loss weights count the rows of all ranks.

    Raises:
        PlanError: as `balance_rows` and `plan_micro_batches`; or a rank would have no row to run.
    """
    flag(own_lengths, "own_lengths", _CALL, PlanError)
    lengths = checked_lengths(lengths, _CALL)
    options = PlanOptions(
        token_budget, cost, num_updates, multiple_of, min_count, max_rows, oversize, work, context_parallel
    )
    tree = checked_tree(tree, cost, lengths, _CALL)
    units = Units.of(lengths.size, groups, _CALL)
    labels = None if units.rows is None else units.of_row.tolist()
    oversized_rows(options, PackingProblem.of(options, lengths, units, tree))  # here rows have the caller's numbers
    if tree is not None:
        rows = _balanced_prefixes(tree, ranks, options, units, equal_rows=equal_rows, seed=seed)
    else:
        balanced = "tokens" if work is None else work
        rows = balance_rows(lengths, ranks, equal_rows=equal_rows, cost=balanced, groups=labels, seed=seed)
    tokens = None
    if loss_tokens is not None:
        tokens = checked_amounts(loss_tokens, lengths.size, _CALL, "loss_tokens", "the sum of each row's loss mask")
    plans = RankPlans(rows, lengths, options, labels, tokens, own_lengths, tree)
    _ = plans.plans  # raises here rather than at first use
    return plans


def _balanced_prefixes(
    tree: PrefixTree, ranks: int, options: PlanOptions, groups: Units, *, equal_rows: bool, seed: int
) -> list[list[int]]:
    """The rows of each rank. Roots of the tree are cut at several limits; the division whose heaviest rank has the
    least work (tokens, by default) wins, and of equal ones that with the fewest cuts."""
    work = SharedAmounts.of(tree, options.work, _CALL)
    ranks = whole_number(ranks, 1, "balance_rows", "ranks", MOST)

    def balanced(units: Units) -> list[list[int]]:
        assert units.rows is not None
        return balance_units(
            units, work.of_parts(units.rows).astype(np.float64), ranks, equal_rows=equal_rows, seed=seed
        )

    if groups.rows is not None:
        return balanced(groups)
    assert options.budget is not None
    most_rows = options.max_rows or max(tree.num_rows, 1)
    fair = min(options.budget, tree.num_tokens / ranks)
    limits = (options.budget, fair, fair / 2, fair / 4, fair / 8, 0)  # 0: each row alone
    divisions = [tree_units(tree, limit, most_rows) for limit in limits]
    divisions = {units.sizes.tobytes(): units for units in divisions if len(units) >= min(ranks, tree.num_rows)}
    rows = {units: balanced(units) for units in divisions.values()}
    return rows[min(rows, key=lambda units: (work.of_parts(rows[units]).max(), len(units)))]


@dataclass(frozen=True, eq=False)
class RankPlans:
    """The rows and the MicroBatchPlan of each DP rank: the result of `plan_ranks`.

    Attributes:
        rows: for each rank a list of row numbers of the whole batch.
        lengths: int64 [B], valid tokens of each row of the whole batch.
        own_lengths: whether `lengths` may differ from the layouts of the batch.
    """

    rows: list[list[int]]
    lengths: IntArray
    _options: PlanOptions
    _groups: Sequence[Any] | None
    _loss_tokens: Any
    own_lengths: bool
    _tree: PrefixTree | None = None

    @cached_property
    def plans(self) -> list[MicroBatchPlan]:
        """The plan of each rank. Its row indices count the rows of the rank, in the order of `rows`."""
        return equalized([self._plan(rows) for rows in self.rows])

    @property
    def num_ranks(self) -> int:
        """The number of DP ranks."""
        return len(self.rows)

    @property
    def divisible(self) -> bool:
        """Whether the rows can be divided again: the plan has one update, no loss weights and no groups."""
        return self._options.num_updates == 1 and self._loss_tokens is None and self._groups is None

    def for_rows(self, rows: Mapping[int, IntArray]) -> dict[int, MicroBatchPlan]:
        """Plans with the same options for some rows on some ranks: those of this plan, or the rows that a failed call
        left."""
        if not isinstance(rows, Mapping) or not all(map(self._has, rows.values())):
            raise PlanError(
                f"RankPlans.for_rows: rows are {said(rows)}; expected whole numbers below {self.lengths.size} for each "
                "rank. Give a dict of arrays."
            )
        if [numbers.tolist() for numbers in rows.values()] == self.rows:
            return dict(zip(rows, self.plans, strict=True))
        plans = equalized([self._plan(numbers.tolist()) for numbers in rows.values()])
        return dict(zip(rows, plans, strict=True))

    def _has(self, rows: Any) -> bool:
        if not isinstance(rows, np.ndarray):
            return False
        numbers = cast("IntArray", rows)
        if numbers.dtype.kind != "i" or numbers.ndim != 1:
            return False
        return not numbers.size or (int(numbers.min()) >= 0 and int(numbers.max()) < self.lengths.size)

    def _plan(self, rows: list[int]) -> MicroBatchPlan:
        groups = None if self._groups is None else [self._groups[row] for row in rows]
        tokens = None if self._loss_tokens is None else self._loss_tokens[rows]
        tree = None if self._tree is None else self._tree.take(rows)
        return planned(self._options, self.lengths[rows], groups, tokens, tree)

    def metrics(self) -> dict[str, float]:
        """Returns a flat dict for a logger: sums over ranks of the counts and means of the ratios of their plans, and
        `plan/rank_imbalance`, the largest work of a rank over the mean. It is computed micro-batch by micro-batch,
        because ranks wait for each other in each."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, float]:
        of_ranks = [plan.metrics() for plan in self.plans]
        ratios = {"plan/fill", "plan/budget_use", "plan/imbalance"}
        out: dict[str, float] = {}
        for key in of_ranks[0]:
            values = [metrics[key] for metrics in of_ranks]
            out[key] = sum(values) / len(values) if key in ratios else sum(values)
        loads = np.array([plan.loads() for plan in self.plans])
        out["plan/updates"] = of_ranks[0]["plan/updates"]
        out["plan/rank_imbalance"] = float(loads.max(0).sum() / loads.mean(0).sum()) if loads.any() else 1.0
        return out


def equalized(plans: Sequence[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """The plans of all ranks with equal counts, and with loss weights that count the rows of all ranks."""
    counts = [max(of_ranks) for of_ranks in zip(*(plan.counts for plan in plans), strict=True)]
    empty = [rank for rank, plan in enumerate(plans) if not plan.num_rows]
    if empty and any(counts):
        raise PlanError(
            f"{_CALL}: ranks {empty[:8]} have no row to run, but other ranks have; expected at least one on each. Use "
            "fewer ranks, or more rows."
        )
    out = [plan.with_count(counts) for plan in plans]
    losses = [plan.loss for plan in out if plan.loss is not None]
    if not losses:
        return out
    rows, tokens = totals(losses)
    return [
        replace(plan, loss=Loss(loss.tokens, rows, tokens, len(losses))) for plan, loss in zip(out, losses, strict=True)
    ]
