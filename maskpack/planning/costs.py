"""The inputs of plans: options, checked lengths, costs of rows, and units (rows that stay together).

    lengths  [3 5 2 7]  groups [a a b b]   ->   units  {0 1}  {2 3}      costs of units  8  9

Neither this module nor the planners import torch: they map lengths to row indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from maskpack.core.arguments import IntArray, said, whole
from maskpack.errors import PlanError

FloatArray = npt.NDArray[np.float64]
RowCost = Callable[[IntArray], Any]
"""A function of lengths int64 [B] that returns costs [B]. The cost of a micro-batch is their sum."""
Cost = Literal["tokens", "padded"] | RowCost
MOST = 1 << 24
"""The largest number of ranks, updates or micro-batches of a plan."""
_NO_ORDER: Any = (set, frozenset, dict)


def checked_lengths(lengths: Any, call: str) -> IntArray:
    """Lengths as int64 [B]. Raises PlanError unless they are integers from 0."""
    array = _array(lengths, call, "lengths", "the valid tokens of each row, prompt plus response")
    if array.dtype.kind not in "iu" and array.size:
        raise PlanError(
            f"{call}: lengths are {array.dtype}; expected whole numbers [B]. Give the valid tokens of each row, prompt "
            "plus response."
        )
    if array.size and (int(array.min()) < 0 or float(array.sum(dtype=np.float64)) >= 2**62):
        raise PlanError(
            f"{call}: lengths run from {array.min()} to {array.max()}; expected whole numbers from 0 whose sum is "
            "below 2^62. Count valid tokens."
        )
    return array.astype(np.int64)


def checked_amounts(amounts: Any, rows: int, call: str, name: str, meaning: str) -> FloatArray:
    """Amounts as float64 [B]. Raises PlanError unless they are finite numbers from 0, one for each row."""
    array = _array(amounts, call, name, meaning)
    if array.dtype.kind not in "iufb" or array.shape != (rows,):
        raise PlanError(
            f"{call}: {name} are {array.dtype} {array.shape}; expected numbers ({rows},): {meaning}. Give one a row."
        )
    out = array.astype(np.float64)
    if out.size and not (np.isfinite(out).all() and out.min() >= 0):
        raise PlanError(
            f"{call}: {name} run from {out.min()} to {out.max()}; expected finite numbers from 0: {meaning}. Look for "
            "invalid values."
        )
    return out


def row_costs(cost: Any, lengths: IntArray, call: str, name: str = "costs") -> npt.NDArray[Any]:
    """[B]: the lengths for a cost with a name, or the checked result of a callable."""
    if isinstance(cost, str):
        return lengths
    try:
        amounts = cost(lengths + 0)
    except Exception as error:
        raise PlanError(
            f"{call}: the function of {name} raised {type(error).__name__}: {str(error)[:200]}; expected an amount for "
            f"each of the {lengths.size} lengths. Fix the function."
        ) from error
    return checked_amounts(amounts, lengths.size, call, name, "what the callable gives for each row")


def check_cost(cost: Any, names: Sequence[str], call: str) -> None:
    """Raises PlanError unless `cost` is one of the names or callable."""
    if not (callable(cost) or (isinstance(cost, str) and cost in names)):
        known = " or ".join(f'"{name}"' for name in names)
        raise PlanError(
            f"{call}: cost is {said(cost)}; expected {known}, or a function of the lengths [B]. Choose one."
        )


def in_parts(costs: npt.NDArray[Any], budget: float) -> tuple[IntArray, int]:
    """Costs and their budget as integers, so that sums are exact. Floats are scaled by a power of two that makes the
    budget an integer, and rounded up."""
    if costs.dtype.kind in "iu":
        return costs.astype(np.int64), min(int(budget), 2**62)  # above any sum of lengths
    exact, budget = budget, float(budget)
    if budget > exact:  # it was an integer of more than 53 bits
        budget = math.nextafter(budget, 0.0)
    power = 53 - math.frexp(budget)[1]  # all binary digits of the budget are before the point
    over = np.minimum(costs, 256.0 * budget)  # a cost over the budget stays over it
    return np.ceil(np.ldexp(over, power)).astype(np.int64), int(math.ldexp(budget, power))


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan_micro_batches` and `plan_ranks`, which do not depend on the rows. Make them once.

    Attributes:
        cost: what a micro-batch costs. "tokens": the sum of the valid tokens (packed replay). "padded": the number of
            rows times the longest row, for rows padded on one side. A function of lengths int64 [B] that returns costs
            [B] in the unit of the budget: their sum. With `np.ones_like`, the budget is a number of rows.
        num_updates: the number of optimizer updates. They are consecutive parts of the rows (of each rank), as equal as
            groups allow; an update without rows has no micro-batches.
        multiple_of: the number of micro-batches of an update is a multiple of it (pipeline stages).
        work: a function of lengths int64 [B] that returns amounts of work [B], such as FLOPs. It orders micro-batches,
            says which to split, and is what `plan_ranks` balances; it does not change what is packed together. None:
            the cost, and tokens for ranks.

    Raises:
        PlanError: an option is not one of these.
    """

    cost: Cost = "tokens"
    num_updates: int = 1
    multiple_of: int = 1
    work: RowCost | None = None

    def __post_init__(self) -> None:
        check_cost(self.cost, ["tokens", "padded"], "PlanOptions")
        for name in ("num_updates", "multiple_of"):
            whole(getattr(self, name), name, 1, "PlanOptions", MOST, PlanError)
        if self.work is not None and not callable(self.work):
            raise PlanError(
                f"PlanOptions: work is {said(self.work)}; expected a function of the lengths [B]. Pass one that "
                "returns FLOPs."
            )

    def budget(self, token_budget: Any, call: str) -> int | float:
        """The largest cost of a micro-batch."""
        if isinstance(self.cost, str):
            return whole(token_budget, "token_budget", 1, call, math.inf, PlanError)
        real = isinstance(token_budget, int | float | np.integer | np.floating) and not isinstance(token_budget, bool)
        if not (real and 0 < token_budget < math.inf):
            raise PlanError(
                f"{call}: token_budget is {said(token_budget)}; expected a finite number above 0. Give one."
            )
        return cast("Any", token_budget)


@dataclass(frozen=True, eq=False)
class Units:
    """Units: sets of rows that stay together.

    Attributes:
        rows: the row numbers of each unit; None if each row is a unit.
        of_row: int64 [B], the unit of each row.
        sizes: int64 [units], the number of rows of each unit.
    """

    rows: list[list[int]] | None
    of_row: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, num_rows: int, groups: Any, call: str) -> Units:
        """`groups` [B] are hashable labels, such as uids; rows with one label are a unit. None: each row is a unit.
        Units are in the order of their first rows."""
        if groups is None:
            return cls(None, np.arange(num_rows), np.ones(num_rows, np.int64))
        numbers: dict[Any, int] = {}
        try:
            if isinstance(groups, _NO_ORDER):
                raise TypeError("it has no order")
            labels = groups.tolist() if hasattr(groups, "tolist") else groups
            of_row = [numbers.setdefault(label, len(numbers)) for label in labels]
        except TypeError as error:  # not iterable, or not hashable
            raise PlanError(
                f"{call}: groups are {said(groups)}: {error}; expected one label for each row, such as its "
                "uid. Give these."
            ) from error
        if len(of_row) != num_rows:
            raise PlanError(
                f"{call}: groups are {len(of_row)} labels for {num_rows} rows; expected one for each. Give the "
                "group of every row."
            )
        rows: list[list[int]] = [[] for _ in numbers]
        for row, unit in enumerate(of_row):
            rows[unit].append(row)
        return cls(rows, np.array(of_row, np.int64), np.array([len(members) for members in rows], np.int64))

    @classmethod
    def of_runs(cls, order: IntArray, bounds: IntArray) -> Units:
        """Runs of the rows in `order` [B]; unit u has the places `bounds[u]` to `bounds[u + 1] - 1`."""
        rows: list[int] = order.tolist()
        sizes = np.diff(bounds)
        of_row = np.empty(order.size, np.int64)
        of_row[order] = np.repeat(np.arange(sizes.size), sizes)
        return cls([rows[begin:end] for begin, end in itertools.pairwise(bounds.tolist())], of_row, sizes)

    def __len__(self) -> int:
        return self.sizes.size

    def members(self, units: list[int]) -> list[int]:
        """The rows of some units, one unit after the other."""
        return units if self.rows is None else [row for unit in units for row in self.rows[unit]]

    def sums(self, of_rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sum over the rows of each unit. Sums of floats are rounded up."""
        if self.rows is None:
            return of_rows
        if of_rows.dtype.kind == "f":
            items = of_rows.tolist()
            return np.array([_sum_upwards([items[row] for row in members]) for members in self.rows], np.float64)
        out = np.zeros(len(self), of_rows.dtype)
        np.add.at(out, self.of_row, of_rows)
        return out

    def longest(self, of_rows: IntArray) -> IntArray:
        """The largest value among the rows of each unit."""
        if self.rows is None:
            return of_rows
        out = np.zeros(len(self), np.int64)
        np.maximum.at(out, self.of_row, of_rows)
        return out


def _sum_upwards(items: list[float]) -> float:
    try:
        total = math.fsum(items)  # the nearest number to the sum
    except OverflowError:
        return math.inf
    return math.nextafter(total, math.inf) if math.fsum([*items, -total]) > 0 else total


def _array(values: Any, call: str, name: str, meaning: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on another device, rows of several sizes
        raise PlanError(
            f"{call}: {name} are not an array: {error}; expected numbers [B] on the host: {meaning}. Copy them there."
        ) from error
    if array.ndim != 1 or array.dtype == object:
        seen = said(values) if array.ndim == 0 else f"{array.dtype} {array.shape}"
        raise PlanError(
            f"{call}: {name} are {seen}; expected numbers [B]: {meaning}. Give one a row; if they are [B, G], "
            f"{name}.reshape(-1)."
        )
    return array
