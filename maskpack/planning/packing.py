"""The packing problem behind a plan: rows into optimizer updates, and the rows of each update into bins.

    rows -> units (groups) -> updates -> bins: packed by best fit -> split to a count -> sorted

With a prefix tree, the rows of each update become new units: roots of the tree, or parts of one.

A bin is a list of units and becomes a micro-batch. Best fit takes the largest item first.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from maskpack.core.arguments import said
from maskpack.errors import PlanError
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
from maskpack.planning.prefixes import SharedAmounts, kept_apart, tree_units

if TYPE_CHECKING:
    from maskpack.layout.prefix_tree import PrefixTree

Oversize = Literal["alone", "error"]
CALL = "plan_micro_batches"


@dataclass(frozen=True)
class PlanOptions:
    """The checked options of `plan_micro_batches`: every argument that is not an array of the rows."""

    token_budget: float | None
    cost: Cost = "tokens"
    num_updates: int = 1
    multiple_of: int = 1
    min_count: int | None = None
    max_rows: int | None = None
    oversize: Oversize = "alone"
    work: RowCost | None = None
    context_parallel: int = 1

    def __post_init__(self) -> None:
        check_cost(self.cost, ["tokens", "padded", "prefix"], CALL)
        whole_number(self.num_updates, 1, CALL, "num_updates", MOST)
        whole_number(self.multiple_of, 1, CALL, "multiple_of", MOST)
        whole_number(self.context_parallel, 1, CALL, "context_parallel", MOST)
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

    @property
    def budget(self) -> float | None:
        """The largest cost of a micro-batch, on all ranks that share it."""
        given = self.token_budget
        if given is None or self.context_parallel == 1:
            return given
        if isinstance(self.cost, str):
            return int(given) * self.context_parallel  # integers of numpy may overflow
        return min(float(given) * self.context_parallel, sys.float_info.max)


@dataclass(frozen=True, eq=False)
class PackingProblem:
    """Units (rows that stay together) with their costs, computed once for all updates.

    Attributes:
        multiple_of: as in PlanOptions. Its functions are not kept, because a plan is pickled.
        most_rows: the largest number of rows of a bin.
        padded: whether rows are padded to the longest of their bin.
        has_work: whether `work` was given; otherwise it is the cost.
        lengths: int64 [B].
        units: the rows of each unit.
        updates: the units of each update, in order.
        sizes: int64 [units], costs in integer fractions of the budget; the longest row if the cost is padded.
        budget: in the same fractions; None without one.
        work: float64 [units], the work of each.
        trie, trie_work: tokens and work with a prefix tree, in which rows of different updates share nothing. A bin
            has less than the sum of its units if they share prefixes.
    """

    multiple_of: int
    most_rows: int
    padded: bool
    has_work: bool
    lengths: IntArray
    units: Units
    updates: list[list[int]]
    sizes: IntArray
    budget: int | None
    work: FloatArray
    trie: SharedAmounts | None
    trie_work: SharedAmounts | None

    @classmethod
    def of(
        cls, options: PlanOptions, lengths: IntArray, units: Units, tree: PrefixTree | None = None
    ) -> PackingProblem:
        padded = options.cost == "padded"
        most_rows = options.max_rows or lengths.size
        updates = _consecutive(units.sizes, options.num_updates)
        trie = trie_work = None
        if tree is not None:
            assert options.budget is not None
            rows_of = [units.members(part) for part in updates]
            tree = kept_apart(tree, rows_of)
            trie = SharedAmounts.of(tree, None, CALL)
            trie_work = SharedAmounts.of(tree, options.work, CALL)
            if units.rows is None:
                units = tree_units(tree, options.budget, most_rows)
                updates = _within(units.sizes, [len(rows) for rows in rows_of])
            assert units.rows is not None
            sizes, work = trie.of_parts(units.rows), trie_work.of_parts(units.rows)
        else:
            sizes = units.longest(lengths) if padded else units.sums(row_costs(options.cost, lengths, CALL))
            work = sizes * units.sizes if padded else sizes
            if options.work is not None:
                work = units.sums(row_costs(options.work, lengths, CALL, "amounts of work").astype(np.float64))
        budget = None
        if options.budget is not None:
            sizes, budget = in_parts(sizes, options.budget)
        return cls(
            multiple_of=options.multiple_of,
            most_rows=most_rows,
            padded=padded,
            has_work=options.work is not None,
            lengths=lengths,
            units=units,
            updates=updates,
            sizes=sizes,
            budget=budget,
            work=work.astype(np.float64),
            trie=trie,
            trie_work=trie_work,
        )

    @cached_property
    def _work(self) -> list[float]:
        return self.work.tolist()

    def too_large(self) -> list[int]:
        """Units that alone exceed the budget or the largest number of rows."""
        rows = self.units.sizes
        over = rows > self.most_rows
        if self.budget is not None:
            over |= (rows * self.sizes if self.padded else self.sizes) > self.budget
        return np.flatnonzero(over).tolist()

    def costs(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [bins]: the cost of each, in fractions of the budget; tokens with a tree."""
        if self.trie is not None:
            return self._of_rows(self.trie, bins)
        if not self.padded:
            return _sums(self.sizes, bins)
        longest = _reduced(np.maximum, self.sizes, bins)
        return _sums(self.units.sizes, bins) * longest

    def loads(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [bins]: the work of each; its cost if no work was given."""
        if self.trie_work is not None:
            return self._of_rows(self.trie_work, bins)
        return self.costs(bins) if self.padded and not self.has_work else _sums(self.work, bins)

    def _of_rows(self, amounts: SharedAmounts, bins: Sequence[Sequence[int]]) -> FloatArray:
        return amounts.of_parts([self.units.members(list(items)) for items in bins]).astype(np.float64)

    # ---------------------------------------------------------------- bins

    def packed(self, part: list[int]) -> list[list[int]]:
        """The bins that best fit finds; without a budget, units in the order given."""
        if self.budget is None:
            return self._counted(part)
        units = np.array(part, np.int64)
        rows = self.units.sizes
        if not self.padded:
            order = units[np.argsort(-self.sizes[units], kind="stable")]
            bins = best_fit(order, self.sizes, np.full(rows.size, self.budget), rows, self.most_rows)
            return bins if self.trie is None else self._evened(bins, order)
        # a bin has room for rows as long as its first, which is the longest
        order = units[np.lexsort((-rows[units], -self.sizes[units]))]
        return best_fit(order, rows, self.budget // np.maximum(self.sizes, 1), rows, self.most_rows)

    def _evened(self, bins: list[list[int]], order: IntArray) -> list[list[int]]:
        """At most as many bins, with sums that are more alike: each unit of `order` in the bin with the smallest. The
        same ones if these exceed a limit. Best fit leaves the rest to the last bin, and groups are large units."""
        even: list[list[int]] = [[] for _ in bins]
        heap = [(0, number) for number in range(len(bins))]
        for unit, size in zip(order.tolist(), self.sizes[order].tolist(), strict=True):
            total, number = heap[0]
            even[number].append(unit)
            heapq.heapreplace(heap, (total + size, number))
        even = [items for items in even if items]
        most_rows = max((int(self.units.sizes[items].sum()) for items in even), default=0)
        fits = self.budget is not None and max(heap, default=(0, 0))[0] <= self.budget and most_rows <= self.most_rows
        return even if fits else bins

    def _counted(self, part: list[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        filled = self.most_rows + 1
        for unit, rows in zip(part, self.units.sizes[part].tolist(), strict=True):
            if filled + rows > self.most_rows:
                bins.append([])
                filled = 0
            bins[-1].append(unit)
            filled += rows
        return bins

    def split(self, bins: list[list[int]], count: int) -> list[list[int]]:
        """Splits the bin with the largest load in two until there are `count`, or one for each unit."""
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

    def in_order(self, bins: list[list[int]]) -> list[list[int]]:
        """The bin with the largest load first; without a budget, in the order of the rows."""
        if self.budget is None:
            return sorted(bins, key=lambda items: items[0])
        return [bins[at] for at in np.argsort(-self.loads(bins), kind="stable").tolist()]


def _consecutive(sizes: IntArray, count: int) -> list[list[int]]:
    """The units of each update: consecutive ones, with row counts as equal as the units allow."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    wanted = [total * update // count for update in range(1, count)]
    # the end of a unit that is nearest
    cuts = np.searchsorted(np.concatenate([[0], ends[:-1]]) + ends, 2 * np.array(wanted, np.int64))
    return [part.tolist() for part in np.split(np.arange(ends.size), cuts)]


def _within(sizes: IntArray, rows: Sequence[int]) -> list[list[int]]:
    """The units of each update, which has so many rows. No unit lies in two."""
    cuts = np.searchsorted(np.cumsum(sizes), np.cumsum(rows[:-1], dtype=np.int64), side="right")
    return [part.tolist() for part in np.split(np.arange(sizes.size), cuts)]


def _sums(of_units: npt.NDArray[Any], bins: Sequence[Sequence[int]]) -> FloatArray:
    return _reduced(np.add, of_units, bins)


def _reduced(how: np.ufunc, of_units: npt.NDArray[Any], bins: Sequence[Sequence[int]]) -> FloatArray:
    """float64 [bins]: one number for each bin. No bin is empty."""
    if not bins:
        return np.zeros(0)
    begins = np.cumsum([0, *map(len, bins[:-1])])
    return how.reduceat(of_units[list(itertools.chain.from_iterable(bins))], begins).astype(np.float64)


# -------------------------------------------------------------------- algorithms


def best_fit(
    order: IntArray, sizes: IntArray, capacities: IntArray, rows: IntArray, max_rows: int | None
) -> list[list[int]]:
    """Packs items into bins, in the order given.

    Args:
        order: int64 [n], the items; by size or by capacity, so that what fits beside one fits beside later ones.
        sizes: int64 [items], the size of each.
        capacities: int64 [items], the room of a bin whose first item it is. A larger item is alone in its bin.
        rows: int64 [items], the rows of each, which count against `max_rows`.

    Each item goes into the open bin with the least room that is enough (Johnson, 1974: best fit). Among bins with
    equal room it is the one that reached this room last. Open bins are looked up by their room, by bisection:

        room    3: [b7]    12: [b2 b9]    40: [b5]
    """
    bins: list[list[int]] = []
    filled: list[int] = []  # rows of each bin
    rooms: list[int] = []  # sorted, each once
    stacks: dict[int, list[int]] = {}  # the bins of each room; full ones are in none
    most = int(rows.sum()) if max_rows is None else max_rows
    grouped = max_rows is not None and bool((rows > 1).any())
    least = int(rows.min(initial=most))  # a bin that has not even these left is closed
    columns = (order, sizes[order], rows[order], capacities[order])
    for item, size, count, room in zip(*(column.tolist() for column in columns), strict=True):
        at, place = bisect_left(rooms, size), -1
        if grouped:
            at, place = _not_full(rooms, stacks, filled, at, most - count)
        if at < len(rooms):
            room = rooms[at]
            stack = stacks[room]
            bin = stack.pop(place)
            if not stack:
                del stacks[room], rooms[at]
            bins[bin].append(item)
            filled[bin] += count
        else:
            bin = len(bins)
            bins.append([item])
            filled.append(count)
        room -= size
        if room < 0 or filled[bin] + least > most:
            continue
        if room in stacks:
            stacks[room].append(bin)
        else:
            stacks[room] = [bin]
            insort(rooms, room)
    return bins


def _not_full(
    rooms: Sequence[int], stacks: dict[int, list[int]], filled: Sequence[int], at: int, most: int
) -> tuple[int, int]:
    """The first room from `at` on that has a bin of at most `most` rows, and the place of that bin in its stack."""
    for number in range(at, len(rooms)):
        stack = stacks[rooms[number]]
        for place in range(len(stack) - 1, -1, -1):
            if filled[stack[place]] <= most:
                return number, place
    return len(rooms), -1


def halved(items: Sequence[int], weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """Splits two items or more into bins of similar weight: the heaviest first, each to the lighter bin."""
    sides: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=weights.__getitem__, reverse=True):
        side = (sums[0], len(sides[0])) > (sums[1], len(sides[1]))
        sides[side].append(item)
        sums[side] += weights[item]
    return sides
