"""What plans are made of: checked lengths, what rows cost, and rows that stay together.

    lengths  [3 5 2 7]  groups [a a b b]   ->   units  {0 1}  {2 3}      costs of units  8  9

No torch here, nor in the planners above: lengths come in, indices go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from maskpack.core.arguments import IntArray, said
from maskpack.errors import PlanError

FloatArray = npt.NDArray[np.float64]
RowCost = Callable[[IntArray], Any]
"""Lengths int64 [B] -> costs [B], of which a micro-batch has the sum."""
Cost = Literal["tokens", "padded"] | RowCost
MOST = 1 << 24
"""Ranks, updates or micro-batches of a plan."""
_NO_ORDER: Any = (set, frozenset, dict)


@dataclass(frozen=True)
class FlopsModel:
    """Floating-point operations of a row of n tokens: linear * n + quadratic * n^2. It is a cost of rows."""

    linear: float
    quadratic: float

    @classmethod
    def of_transformer(cls, parameters: float, layers: int, hidden: int) -> FlopsModel:
        """Forward and backward of a decoder: 6 operations a parameter and token, and 12 * layers * hidden for each pair
        of tokens, half of which a causal mask leaves (Chowdhery et al., PaLM, 2022, appendix B). `hidden` is heads
        times head size; embeddings do not count as parameters, an output layer does."""
        sizes: list[Any] = [parameters, layers, hidden]
        if not all(isinstance(size, int | float | np.number) for size in sizes):
            raise PlanError(
                f"FlopsModel.of_transformer: the sizes are {', '.join(map(said, sizes))}; expected numbers. Pass the "
                "parameters, layers and hidden size of the model."
            )
        return cls(6.0 * parameters, 6.0 * layers * hidden)

    def __post_init__(self) -> None:
        both: list[Any] = [self.linear, self.quadratic]
        real = all(isinstance(part, int | float | np.number) and not isinstance(part, complex) for part in both)
        if not real or not (all(0 <= part < math.inf for part in both) and sum(both) > 0):
            raise PlanError(
                f"FlopsModel: linear is {said(self.linear)} and quadratic {said(self.quadratic)}; expected finite "
                "numbers from 0, one of them above. Take them from the model's sizes: FlopsModel.of_transformer."
            )

    def __call__(self, lengths: IntArray) -> FloatArray:
        n = checked_lengths(lengths, "FlopsModel").astype(np.float64)
        return self.linear * n + self.quadratic * n * n


def checked_lengths(lengths: Any, call: str) -> IntArray:
    """int64 [B]. Raises PlanError for anything but whole numbers from 0."""
    found = _array(lengths, call, "lengths", "the real tokens of each row, prompt plus response")
    if found.dtype.kind not in "iu" and found.size:
        raise PlanError(
            f"{call}: lengths are {found.dtype}; expected whole numbers [B]. Give the real tokens of each row, prompt "
            "plus response."
        )
    if found.size and int(found.min()) < 0:
        raise PlanError(f"{call}: a length is {int(found.min())}; expected whole numbers from 0. Count real tokens.")
    if found.size and float(found.sum(dtype=np.float64)) >= 2**62:
        raise PlanError(f"{call}: lengths sum to more than 2^62; expected real tokens of rows. Look for bad ones.")
    return found.astype(np.int64)


def checked_amounts(amounts: Any, rows: int, call: str, name: str, meaning: str) -> FloatArray:
    """float64 [B]. Raises PlanError for anything but finite numbers from 0, one a row."""
    found = _array(amounts, call, name, meaning)
    if found.dtype.kind not in "iufb" or found.shape != (rows,):
        raise PlanError(
            f"{call}: {name} are {found.dtype} {found.shape}; expected numbers ({rows},): {meaning}. Give one a row."
        )
    out = found.astype(np.float64)
    if out.size and not (np.isfinite(out).all() and out.min() >= 0):
        raise PlanError(
            f"{call}: {name} run from {out.min()} to {out.max()}; expected finite numbers from 0: {meaning}. Look "
            "for bad ones."
        )
    return out


def whole_number(value: Any, least: int, call: str, name: str, most: int | None = None) -> int:
    """Raises PlanError for what is no whole number, below `least` or above `most`; nothing is rounded."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or int(cast("Any", value)) < least:
        raise PlanError(f"{call}: {name} is {said(value)}; expected a whole number from {least}. Give one.")
    if most is not None and value > most:
        raise PlanError(f"{call}: {name} is {said(value)}; expected a whole number from {least} to {most}. Give one.")
    return int(cast("Any", value))


def row_costs(cost: Any, lengths: IntArray, call: str, name: str = "costs") -> npt.NDArray[Any]:
    """[B]: the lengths themselves for "tokens" and "padded", or what a callable makes of them."""
    if isinstance(cost, str):
        return lengths
    return checked_amounts(cost(lengths + 0), lengths.size, call, name, "what the callable gives for each row")


def check_cost(cost: Any, names: Sequence[str], call: str) -> None:
    """Raises PlanError for what is neither a known name nor callable."""
    if not (callable(cost) or (isinstance(cost, str) and cost in names)):
        known = " or ".join(f'"{name}"' for name in names)
        raise PlanError(
            f"{call}: cost is {said(cost)}; expected {known}, or a function of the lengths [B]. Choose one."
        )


def in_parts(costs: npt.NDArray[Any], budget: float) -> tuple[IntArray, int]:
    """Costs and their budget as whole numbers, so that sums are exact: as they are, or times a power of two that makes
    the budget one, rounded up."""
    if costs.dtype.kind in "iu":
        return costs.astype(np.int64), min(int(budget), 2**62)  # above any sum of lengths
    exact, budget = budget, float(budget)
    if budget > exact:  # it was a whole number of more than 53 bits
        budget = math.nextafter(budget, 0.0)
    power = 53 - math.frexp(budget)[1]  # all digits of the budget stand before the point
    over = np.minimum(costs, 256.0 * budget)  # what is over the budget stays over it
    return np.ceil(np.ldexp(over, power)).astype(np.int64), int(math.ldexp(budget, power))


@dataclass(frozen=True, eq=False)
class Units:
    """Rows that stay together, in the order of their first rows.

    Attributes:
        rows: the row numbers of each unit; None where each row is one.
        of_row: int64 [B], the unit of each row.
        sizes: int64 [units], how many rows each has.
    """

    rows: list[list[int]] | None
    of_row: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, num_rows: int, groups: Any, call: str) -> Units:
        """`groups` [B] are labels of any kind (uids); rows of one label are a unit. None: each row is one."""
        if groups is None:
            return cls(None, np.arange(num_rows), np.ones(num_rows, np.int64))
        numbers: dict[Any, int] = {}
        try:
            if isinstance(groups, _NO_ORDER):
                raise TypeError("it has no order")
            labels = groups.tolist() if hasattr(groups, "tolist") else groups
            of_row = [numbers.setdefault(label, len(numbers)) for label in labels]
        except TypeError as error:  # one thing, or lists: no labels
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
        return cls(rows, np.array(of_row, np.int64), np.array([len(own) for own in rows], np.int64))

    def __len__(self) -> int:
        return self.sizes.size

    def members(self, units: list[int]) -> list[int]:
        """The rows of some units, one unit after the other."""
        return units if self.rows is None else [row for unit in units for row in self.rows[unit]]

    def sums(self, of_rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sum of each unit; of floats the next number that is not below it."""
        if self.rows is None:
            return of_rows
        if of_rows.dtype.kind == "f":
            items = of_rows.tolist()
            return np.array([_sum_upwards([items[row] for row in own]) for own in self.rows], np.float64)
        out = np.zeros(len(self), of_rows.dtype)
        np.add.at(out, self.of_row, of_rows)
        return out

    def longest(self, of_rows: IntArray) -> IntArray:
        """The largest of each unit."""
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
        found: npt.NDArray[Any] = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on another device, rows of several sizes
        raise PlanError(
            f"{call}: {name} are no array: {error}; expected numbers [B] on the host: {meaning}. Copy them there."
        ) from error
    if found.ndim != 1 or found.dtype == object:
        seen = said(values) if found.ndim == 0 else f"{found.dtype} {found.shape}"
        raise PlanError(f"{call}: {name} are {seen}; expected numbers [B]: {meaning}. Give one a row.")
    return found
