"""The rule that micro-batches are made by, and what it makes of rows: updates, and bins of units in each.

rows -> units (groups) -> updates -> bins: packed -> split to a count -> finished
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from maskpack.core.arguments import said
from maskpack.errors import PlanError
from maskpack.planning.bins import Limit, best_fit, evened, halved
from maskpack.planning.costs import (
    MOST,
    Cost,
    FloatArray,
    IntArray,
    RowCost,
    Units,
    check_cost,
    in_parts,
    row_costs,
    whole_number,
)

Oversize = Literal["alone", "error"]
CALL = "plan_micro_batches"


@dataclass(frozen=True)
class Budget:
    """The arguments of `plan_micro_batches` that are not about its rows, checked."""

    token_budget: float | None
    cost: Cost = "tokens"
    num_updates: int = 1
    multiple_of: int = 1
    min_count: int | None = None
    max_rows: int | None = None
    oversize: Oversize = "alone"
    work: RowCost | None = None

    def __post_init__(self) -> None:
        check_cost(self.cost, ["tokens", "padded"], CALL)
        whole_number(self.num_updates, 1, CALL, "num_updates", MOST)
        whole_number(self.multiple_of, 1, CALL, "multiple_of", MOST)
        for name, most in (("min_count", MOST), ("max_rows", 1 << 62)):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), 1, CALL, name, most)
        if self.oversize not in ("alone", "error"):
            raise PlanError(f'{CALL}: oversize is {said(self.oversize)}; expected "alone" or "error". Choose one.')
        if self.work is not None and not callable(self.work):
            raise PlanError(
                f"{CALL}: work is {self.work!r}; expected a function of the lengths [B]. Pass a FlopsModel."
            )
        budget: Any = self.token_budget
        if budget is None:
            if self.max_rows is None or self.work is not None or self.cost != "tokens":
                raise PlanError(
                    f"{CALL}: token_budget is None, with max_rows {self.max_rows}, cost {self.cost!r} and work "
                    f"{self.work!r}; expected a budget, or max_rows alone, which keeps the order given. Give a "
                    "token_budget."
                )
        elif isinstance(self.cost, str):
            whole_number(budget, 1, CALL, "token_budget")
        elif isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not 0 < budget < np.inf:
            raise PlanError(f"{CALL}: token_budget is {budget!r}; expected a finite number above 0. Give one.")


@dataclass(frozen=True, eq=False)
class Ground:
    """Rows and what they cost, computed once for all updates. Bins are lists of units: rows that stay together.

    Attributes:
        sizes: [units], their costs in whole parts of the budget; the longest row where the cost is padded.
        budget: in the same parts.
        work: [units].
        padded, even: whether rows are padded to the longest of their micro-batch; whether work is evened out.
        num_updates, multiple_of, max_rows: of the rule. Its functions are left behind: a plan travels.
    """

    num_updates: int
    multiple_of: int
    max_rows: int | None
    padded: bool
    even: bool
    lengths: IntArray
    units: Units
    sizes: IntArray
    budget: int | None
    work: FloatArray

    @classmethod
    def of(cls, rule: Budget, lengths: IntArray, units: Units) -> Ground:
        padded = rule.cost == "padded"
        costs = row_costs(rule.cost, lengths, CALL)
        whole = units.longest(lengths) if padded else units.sums(costs)
        sizes, budget = whole, None
        if rule.token_budget is not None:
            sizes, budget = in_parts(whole, rule.token_budget)
        work = (whole * units.sizes if padded else whole).astype(np.float64)
        if rule.work is not None:
            work = units.sums(row_costs(rule.work, lengths, CALL, "amounts of work").astype(np.float64))
        even = rule.work is not None
        return cls(rule.num_updates, rule.multiple_of, rule.max_rows, padded, even, lengths, units, sizes, budget, work)

    @cached_property
    def limit(self) -> Limit:
        most, rows = self.max_rows or self.lengths.size, self.units.sizes.tolist()
        budget = int(self.lengths.sum()) if self.budget is None else self.budget
        return Limit(budget, most, self.sizes.tolist(), rows, self.padded)

    @cached_property
    def _work(self) -> list[float]:
        return self.work.tolist()

    def too_large(self) -> list[int]:
        """Units that are over the limit alone."""
        rows, limit = self.units.sizes, self.limit
        over = (rows * self.sizes if self.padded else self.sizes) > limit.budget
        return np.flatnonzero(over | (rows > limit.most_rows)).tolist()

    def costs(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """[bins]: in parts of the budget."""
        if not self.padded:
            return _sums(self.sizes, bins)
        longest = _reduced(np.maximum, self.sizes, bins)
        return _sums(self.units.sizes, bins) * longest

    def loads(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """[bins]: their work, or their costs."""
        return self.costs(bins) if not self.even and self.padded else _sums(self.work, bins)

    # ---------------------------------------------------------------- bins

    def updates(self) -> list[list[int]]:
        """The units of each update: consecutive, as near to equal rows as units allow."""
        ends = np.cumsum(self.units.sizes)
        total = int(ends[-1]) if ends.size else 0
        count = self.num_updates
        wanted = [total * update // count for update in range(1, count)]
        # the end of a unit that is nearest
        cuts = np.searchsorted(np.concatenate([[0], ends[:-1]]) + ends, 2 * np.array(wanted, np.int64))
        return [part.tolist() for part in np.split(np.arange(ends.size), cuts)]

    def packed(self, part: list[int]) -> list[list[int]]:
        """As few bins as best fit finds; without a budget, units in the order given."""
        limit = self.limit
        if self.budget is None:
            return self._counted(part, limit.most_rows)
        units = np.array(part, np.int64)
        rows = self.units.sizes
        if not self.padded:
            order = units[np.argsort(-self.sizes[units], kind="stable")]
            return best_fit(order, self.sizes, np.full(rows.size, self.budget), rows, self.max_rows)
        # a bin has room for rows as long as its first, which is the longest
        order = units[np.lexsort((-rows[units], -self.sizes[units]))]
        return best_fit(order, rows, self.budget // np.maximum(self.sizes, 1), rows, self.max_rows)

    def _counted(self, part: list[int], most: int) -> list[list[int]]:
        bins: list[list[int]] = []
        held = most + 1
        for unit, rows in zip(part, self.units.sizes[part].tolist(), strict=True):
            if held + rows > most:
                bins.append([])
                held = 0
            bins[-1].append(unit)
            held += rows
        return bins

    def split(self, bins: list[list[int]], count: int) -> list[list[int]]:
        """`count` bins, or as many as there are units: the largest is halved, again and again."""
        bins = list(bins)
        if len(bins) >= count:
            return bins
        heap = [(-load, at) for at, load in enumerate(self.loads(bins).tolist()) if len(bins[at]) > 1]
        heapq.heapify(heap)
        while len(bins) < count and heap:
            _, at = heapq.heappop(heap)
            halves = self._halves(bins[at])
            places = at, len(bins)
            for half, load, place in zip(halves, self.loads(halves).tolist(), places, strict=True):
                bins[place : place + 1] = [half]
                if len(half) > 1:
                    heapq.heappush(heap, (-load, place))
        return bins

    def _halves(self, items: list[int]) -> tuple[list[int], list[int]]:
        if self.budget is not None and not self.padded:
            return halved(items, self._work)
        if self.budget is not None:  # long rows, and short ones, which then need less padding
            items = sorted(items, key=self.sizes.__getitem__, reverse=True)
        middle = len(items) // 2
        return items[:middle], items[middle:]

    def finished(self, bins: list[list[int]]) -> list[list[int]]:
        """Evened out and sorted: the most work first; without a budget, in the order given."""
        if self.budget is None:
            return sorted(bins, key=lambda items: items[0])
        if self.even:
            bins = evened(bins, self.limit, self._work)
        return [bins[at] for at in np.argsort(-self.loads(bins), kind="stable").tolist()]


def _sums(of_units: npt.NDArray[Any], bins: Sequence[Sequence[int]]) -> FloatArray:
    return _reduced(np.add, of_units, bins)


def _reduced(how: np.ufunc, of_units: npt.NDArray[Any], bins: Sequence[Sequence[int]]) -> FloatArray:
    """One number for each bin; none of them is empty."""
    if not bins:
        return np.zeros(0)
    begins = np.cumsum([0, *map(len, bins[:-1])])
    return how.reduceat(of_units[list(itertools.chain.from_iterable(bins))], begins).astype(np.float64)
