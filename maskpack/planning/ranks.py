"""A plan for all DP ranks, made on the driver from lengths alone, without a collective.

lengths [B] -> balance_rows -> the rows of each rank -> a MicroBatchPlan each -> equal counts, global denominators
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from maskpack.core.arguments import said, whole
from maskpack.errors import PlanError
from maskpack.planning.balance import balance_rows, balance_units
from maskpack.planning.costs import MOST, IntArray, PlanOptions, Units
from maskpack.planning.loss_weights import Loss
from maskpack.planning.plan import MicroBatchPlan, RowsToPlan
from maskpack.planning.prefixes import tree_units, trie_tokens

if TYPE_CHECKING:
    from maskpack.layout.prefix_tree import PrefixTree

_CALL = "plan_ranks"
_DEFAULT = PlanOptions()


def plan_ranks(
    lengths: Any,
    ranks: int,
    token_budget: float,
    *,
    tree: PrefixTree | None = None,
    groups: Any = None,
    loss_tokens: Any = None,
    options: PlanOptions = _DEFAULT,
) -> RankPlans:
    """Divides rows among DP ranks, and the rows of each rank into micro-batches.

    It uses `balance_rows`, by tokens or `options.work`, and `plan_micro_batches`. All ranks have the same number of
    micro-batches in an update. With fewer rows than ranks, some ranks have no rows: their micro-batches are dummies
    without rows.

    Args:
        lengths: integers [B] on the host, the valid tokens of each row of the whole batch: prompt plus response.
        ranks: the number of DP ranks. Ranks that share micro-batches (replay with `context_group`) are one, whose
            budget is that of all of them.
        token_budget: of each rank.
        tree: the PrefixTree of all rows. Rows that share a prefix go to one rank, unless ranks balance better if they
            are cut. Ranks have the same number of such parts, up to one, and balance the tokens of their tries.
        groups, loss_tokens, options: as for `plan_micro_batches`. Loss weights count the rows of all ranks.

    Raises:
        PlanError: as `balance_rows` and `plan_micro_batches`.
    """
    given = RowsToPlan.of(_CALL, lengths, token_budget, options, tree, groups, loss_tokens)
    if given.tree is not None:
        rows = _balanced_prefixes(given, ranks)
    else:
        rows = balance_rows(given.lengths, ranks, cost=options.work or "tokens", groups=given.groups)
    return RankPlans(rows, equalized([given.take(part).planned() for part in rows]), given)


def _balanced_prefixes(given: RowsToPlan, ranks: int) -> list[list[int]]:
    """The rows of each rank. Roots of the tree are cut at several limits; the division whose heaviest rank has the
    fewest tokens wins, and of equal ones the one with the fewest cuts."""
    tree = given.tree
    assert tree is not None
    ranks = whole(ranks, "ranks", 1, "balance_rows", MOST, PlanError)

    def balanced(units: Units) -> list[list[int]]:
        assert units.rows is not None
        return balance_units(units, trie_tokens(tree, units.rows).astype(np.float64), ranks)

    if given.groups is not None:
        return balanced(Units.of(tree.num_rows, given.groups, _CALL))
    fair = min(given.budget, tree.num_tokens / ranks)
    limits = (given.budget, fair, fair / 2, fair / 4, fair / 8, 0)  # 0: each row alone
    divisions = [tree_units(tree, limit) for limit in limits]
    divisions = {units.sizes.tobytes(): units for units in divisions if len(units) >= min(ranks, tree.num_rows)}
    rows = {units: balanced(units) for units in divisions.values()}
    return rows[min(rows, key=lambda units: (trie_tokens(tree, rows[units]).max(), len(units)))]


@dataclass(frozen=True, eq=False)
class RankPlans:
    """The rows and the MicroBatchPlan of each DP rank: the result of `plan_ranks`.

    Attributes:
        rows: for each rank a list of row numbers of the whole batch.
        plans: the plan of each rank. Its row indices count the rows of the rank, in the order of `rows`.
        check_lengths: whether a WorkerGroup compares `lengths` with the layouts of the batch.
    """

    rows: list[list[int]]
    plans: list[MicroBatchPlan]
    _given: RowsToPlan
    check_lengths: bool = True

    @property
    def lengths(self) -> IntArray:
        """int64 [B]: valid tokens of each row of the whole batch."""
        return self._given.lengths

    @property
    def num_ranks(self) -> int:
        """The number of DP ranks."""
        return len(self.rows)

    @property
    def divisible(self) -> bool:
        """Whether the rows can be divided again: the plan has one update, no loss weights and no groups."""
        given = self._given
        return given.options.num_updates == 1 and given.loss_tokens is None and given.groups is None

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
        plans = equalized([self._given.take(numbers.tolist()).planned() for numbers in rows.values()])
        return dict(zip(rows, plans, strict=True))

    def _has(self, rows: Any) -> bool:
        if not isinstance(rows, np.ndarray):
            return False
        numbers = cast("IntArray", rows)
        if numbers.dtype.kind != "i" or numbers.ndim != 1:
            return False
        return not numbers.size or (int(numbers.min()) >= 0 and int(numbers.max()) < self.lengths.size)

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
    out = [plan.with_count(counts) for plan in plans]
    losses = [plan.loss for plan in out if plan.loss is not None]
    if not losses:
        return out
    amounts = ([loss.rows_of for loss in losses], [loss.tokens_of for loss in losses])
    rows, tokens = (tuple(map(sum, zip(*of_ranks, strict=True))) for of_ranks in amounts)
    return [
        replace(plan, loss=Loss(loss.tokens, rows, tokens, len(losses))) for plan, loss in zip(out, losses, strict=True)
    ]
