"""The actors and the rows of each DP rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, cumulated, even_sizes, row_index
from maskpack.dispatch.timeline import PREFIX
from maskpack.errors import LayoutError, MaskpackError, PlanError
from maskpack.planning.costs import FloatArray
from maskpack.planning.ranks import RankPlans
from maskpack.views.view import BatchView

Balance = Literal["rows", "tokens"] | Sequence[Sequence[int]]
"""How rows are divided: consecutive parts with equal rows or equal tokens, or a list of rows for each rank."""


def ranks_of(
    actors: int, dp_ranks: Sequence[int] | None, collect: Sequence[bool] | None
) -> tuple[list[list[int]], list[int]]:
    """The actors of each DP rank, and for each rank the actor whose result is collected."""
    if not actors:
        raise MaskpackError("WorkerGroup: no actors; expected at least one. Pass a list of actor handles.")
    for name, value in (("dp_ranks", dp_ranks), ("collect", collect)):
        if value is not None and (not isinstance(value, Iterable) or isinstance(value, str)):
            raise MaskpackError(f"WorkerGroup: {name} is {said(value)}; expected a list, one for each actor. Give one.")
    given = list(range(actors)) if dp_ranks is None else list(dp_ranks)
    whole = all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) for rank in cast("list[Any]", given))
    if not whole or len(given) != actors or set(given) != set(range(max(given, default=0) + 1)):
        raise MaskpackError(
            f"WorkerGroup: dp_ranks are {given} for {actors} actors; expected one for each, from 0 without a gap. Give "
            "each actor its data-parallel rank."
        )
    ranks = [[actor for actor in range(actors) if given[actor] == rank] for rank in range(max(given) + 1)]
    if collect is None:
        return ranks, [own[0] for own in ranks]
    collectors = [[actor for actor in own if actor < len(collect) and collect[actor]] for own in ranks]
    if len(collect) != actors or any(len(own) != 1 for own in collectors):
        raise MaskpackError(
            f"WorkerGroup: collect is {list(collect)} for ranks {given}; expected one for each actor, and exactly one "
            "true in each rank. Mark the actor whose result counts."
        )
    return ranks, [own[0] for own in collectors]


def divided(view: BatchView, balance: Balance, ranks: int) -> list[IntArray]:
    """The rows of each rank."""
    if isinstance(balance, str) and balance in ("rows", "tokens"):
        ends: IntArray = cumulated(np.array(even_sizes(view.num_rows, ranks, "WorkerGroup")))[1:-1]
        sums = cumulated(view.tokens()) if balance == "tokens" else np.zeros(1)
        if sums[-1]:
            middles: FloatArray = (sums[1:] + sums[:-1]) / 2  # so that the nearest sum is found
            wanted: FloatArray = sums[-1] * np.arange(1, ranks) / ranks
            ends = np.searchsorted(middles, wanted)
        return np.split(np.arange(view.num_rows), ends.tolist())
    if not isinstance(balance, list | tuple | np.ndarray):
        raise LayoutError(
            f'WorkerGroup: balance is {said(balance)}; expected "rows", "tokens" or the rows of each rank. Choose one.'
        )
    rows = [row_index(own, view.num_rows, "WorkerGroup: balance") for own in balance]
    together = np.sort(np.concatenate(rows)) if rows else np.arange(0)
    if len(rows) != ranks or not np.array_equal(together, np.arange(view.num_rows)):
        raise LayoutError(
            f"WorkerGroup: balance names {together.size} rows for {len(rows)} ranks; expected each of {view.num_rows} "
            f"rows once, for {ranks} ranks. Give a list of row numbers for each rank."
        )
    return rows


def planned_lengths(view: BatchView) -> IntArray:
    """int64 [B]: the valid tokens of each row, prompt plus response. Raises PlanError if the layouts do not determine
    them."""
    lengths = _row_lengths(view)
    if lengths is None:
        raise PlanError(
            f"WorkerGroup.plan: the batch has layouts {sorted(view.layouts)}; expected the sequence, or the prompt "
            "and the response, because a response alone is not what a row costs. Pass lengths=, a sum of "
            "view.lengths(name)."
        )
    return lengths


def _row_lengths(view: BatchView) -> IntArray | None:
    if "sequence" in view.layouts:
        return view.lengths("sequence")
    if {"prompt", "response"} <= set(view.layouts):
        return view.lengths("prompt") + view.lengths("response")
    return None


def of_plan(plan: RankPlans, view: BatchView, balance: Balance, ranks: int) -> list[IntArray]:
    """The rows of each rank by a plan. Raises PlanError unless the plan was made for these rows."""
    if not isinstance(plan, RankPlans):
        raise PlanError(
            f"WorkerGroup: plan is {said(plan)}; expected RankPlans, which have the rows of each rank. Make "
            "it with group.plan or plan_ranks."
        )
    given = not isinstance(balance, str) or balance != "rows"
    if given or plan.num_ranks != ranks or plan.lengths.size != view.num_rows:
        raise PlanError(
            f"WorkerGroup: plan of {plan.lengths.size} rows on {plan.num_ranks} ranks with balance {said(balance)}; "
            f"expected {view.num_rows} rows on {ranks} ranks, and no balance. Make it with group.plan."
        )
    lengths = _row_lengths(view) if plan.check_lengths else None
    if lengths is not None and not np.array_equal(lengths, plan.lengths):
        row = int(np.flatnonzero(lengths != plan.lengths)[0])
        raise PlanError(
            f"WorkerGroup: row {row} has {lengths[row]} tokens, in the plan {plan.lengths[row]}; expected the plan of "
            "these rows in this order. Plan again after sorting or selecting; for lengths of your own, pass "
            "lengths= to group.plan."
        )
    return divided(view, plan.rows, ranks)


def shares(view: BatchView, rows: Sequence[IntArray]) -> dict[str, float]:
    """Metrics of the batch and of its division: its bytes, rows and tokens of each rank, and their imbalance."""
    tokens = view.tokens()
    sums = [int(tokens[own].sum()) for own in rows]
    padded, packed = view.padded_nbytes, view.nbytes
    out = {"bytes_padded": float(padded), "ratio": padded / packed if packed else 1.0, "rows": float(view.num_rows)}
    out["imbalance"] = max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0
    for rank, (own, total) in enumerate(zip(rows, sums, strict=True)):
        out |= {f"rows/rank_{rank}": float(own.size), f"tokens/rank_{rank}": float(total)}
    return {PREFIX + name: value for name, value in out.items()}
