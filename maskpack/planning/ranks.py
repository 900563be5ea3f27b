"""A plan for all data-parallel ranks, made on the driver from lengths alone: no collective is needed.

lengths [B] -> balance_rows -> rows of each rank -> a MicroBatchPlan each -> equal counts, global denominators
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from maskpack.core.arguments import flag, said
from maskpack.errors import PlanError
from maskpack.planning.balance import balance_rows
from maskpack.planning.budget import Budget, Ground, Oversize
from maskpack.planning.costs import Cost, IntArray, RowCost, Units, checked_amounts, checked_lengths
from maskpack.planning.loss_weights import Loss, totals
from maskpack.planning.plan import MicroBatchPlan, oversized_rows, planned

_CALL = "plan_ranks"


def plan_ranks(
    lengths: Any,
    ranks: int,
    token_budget: float | None,
    *,
    cost: Cost = "tokens",
    num_updates: int = 1,
    groups: Any = None,
    multiple_of: int = 1,
    min_count: int | None = None,
    max_rows: int | None = None,
    oversize: Oversize = "alone",
    work: RowCost | None = None,
    loss_tokens: Any = None,
    equal_rows: bool = True,
    seed: int = 0,
    own_lengths: bool = False,
) -> RankPlans:
    """Rows to ranks by `balance_rows`, and on each rank into micro-batches by `plan_micro_batches`: the same number in
    the same update of every rank.

    Args:
        lengths: [B], real tokens of each row of the whole batch, prompt plus response.
        ranks: data-parallel ranks.
        equal_rows, seed: for `balance_rows`, which evens out `work`, or else tokens.
        own_lengths: whether lengths may be other ones than the layouts of the batch say; a WorkerGroup compares them.
        token_budget: as the others, for `plan_micro_batches`, of each rank. `groups` and `loss_tokens` are [B]; loss
            weights count the rows of all ranks.

    Raises:
        PlanError: as these two; or a rank would have no row to run.
    """
    flag(own_lengths, "own_lengths", _CALL, PlanError)
    found = checked_lengths(lengths, _CALL)
    rule = Budget(token_budget, cost, num_updates, multiple_of, min_count, max_rows, oversize, work)
    units = Units.of(found.size, groups, _CALL)
    labels = None if units.rows is None else units.of_row.tolist()
    oversized_rows(rule, Ground.of(rule, found, units))  # here, where rows have the caller's numbers
    even = "tokens" if work is None else work
    rows = balance_rows(found, ranks, equal_rows=equal_rows, cost=even, groups=labels, seed=seed)
    tokens = None
    if loss_tokens is not None:
        tokens = checked_amounts(loss_tokens, found.size, _CALL, "loss_tokens", "the sum of each row's loss mask")
    plan = RankPlans(rows, found, rule, labels, tokens, own_lengths)
    _ = plan.plans  # errors belong to this call
    return plan


@dataclass(frozen=True, eq=False)
class RankPlans:
    """The rows of each rank, and its plan.

    Attributes:
        rows: for each rank a list of row numbers of the whole batch.
        lengths: int64 [B], of the whole batch.
        own_lengths: whether these may be other ones than the layouts of the batch say.
    """

    rows: list[list[int]]
    lengths: IntArray
    _rule: Budget
    _groups: Sequence[Any] | None
    _loss_tokens: Any
    own_lengths: bool

    @cached_property
    def plans(self) -> list[MicroBatchPlan]:
        """For each rank; their row indices count the rank's own rows, in the order of `rows`."""
        return equalized([self._plan(own) for own in self.rows])

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.rows)

    @property
    def divisible(self) -> bool:
        """Whether its rows may be run in other parts than planned: one update, no loss weights, no groups."""
        return self._rule.num_updates == 1 and self._loss_tokens is None and self._groups is None

    def for_rows(self, rows: Mapping[int, IntArray]) -> dict[int, MicroBatchPlan]:
        """Plans for some rows on some ranks, by the same rule: those that are there, or for what is left of a call that
        failed."""
        if not isinstance(rows, Mapping) or not all(map(self._has, rows.values())):
            raise PlanError(
                f"RankPlans.for_rows: rows are {said(rows)}; expected whole numbers below {self.lengths.size} for each "
                "rank. Give a dict of arrays."
            )
        if [own.tolist() for own in rows.values()] == self.rows:
            return dict(zip(rows, self.plans, strict=True))
        plans = equalized([self._plan(own.tolist()) for own in rows.values()])
        return dict(zip(rows, plans, strict=True))

    def _has(self, rows: Any) -> bool:
        if not isinstance(rows, np.ndarray):
            return False
        own = cast("IntArray", rows)
        whole = own.dtype.kind == "i" and own.ndim == 1
        return whole and (not own.size or (int(own.min()) >= 0 and int(own.max()) < self.lengths.size))

    def _plan(self, rows: list[int]) -> MicroBatchPlan:
        groups = None if self._groups is None else [self._groups[row] for row in rows]
        tokens = None if self._loss_tokens is None else self._loss_tokens[rows]
        return planned(self._rule, self.lengths[rows], groups, tokens)

    def metrics(self) -> dict[str, float]:
        """Flat, for a logger: the sums over ranks of their plans' counts and the means of their ratios;
        `plan/rank_imbalance`: the most work of a rank over the mean, micro-batch by micro-batch, because ranks wait
        for each other in each."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, float]:
        of_ranks = [plan.metrics() for plan in self.plans]
        ratios = {"plan/fill", "plan/budget_use", "plan/imbalance"}
        out: dict[str, float] = {}
        for key in of_ranks[0]:
            values = [own[key] for own in of_ranks]
            out[key] = sum(values) / len(values) if key in ratios else sum(values)
        loads = np.array([plan.loads() for plan in self.plans])
        out["plan/updates"] = of_ranks[0]["plan/updates"]
        out["plan/rank_imbalance"] = float(loads.max(0).sum() / loads.mean(0).sum()) if loads.any() else 1.0
        return out


def equalized(plans: Sequence[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """The plans of all ranks with equal counts, and with loss weights that count the rows of all of them."""
    counts = [max(own) for own in zip(*(plan.counts for plan in plans), strict=True)]
    empty = [rank for rank, plan in enumerate(plans) if not plan.num_rows]
    if empty and any(counts):
        raise PlanError(
            f"{_CALL}: ranks {empty[:8]} have no row to run, others have; expected at least one on each. Use fewer "
            "ranks, or more rows."
        )
    out = [plan.with_count(counts) for plan in plans]
    losses = [plan.loss for plan in out if plan.loss is not None]
    if not losses:
        return out
    rows, tokens = totals(losses)
    return [
        replace(plan, loss=Loss(own.tokens, rows, tokens, len(losses))) for plan, own in zip(out, losses, strict=True)
    ]
