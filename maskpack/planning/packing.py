"""The packing problem behind a plan: rows into optimizer updates, and the rows of each update into bins.

    rows -> units (groups) -> updates -> bins: packed by best fit -> split to a count -> sorted

With a prefix tree, the rows of each update become new units: roots of the tree, or parts of one.

A bin is a list of units and becomes a micro-batch. Best fit takes the largest item first.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from maskpack.planning.costs import FloatArray, IntArray, PlanOptions, Units, in_parts, row_costs
from maskpack.planning.prefixes import kept_apart, tree_units, trie_tokens

if TYPE_CHECKING:
    from maskpack.layout.prefix_tree import PrefixTree

CALL = "plan_micro_batches"


@dataclass(frozen=True, eq=False)
class PackingProblem:
    """Units (rows that stay together) with their costs, computed once for all updates.

    Attributes:
        multiple_of: as in PlanOptions. Its functions are not kept, because a plan is pickled.
        padded: whether rows are padded to the longest of their bin.
        lengths: int64 [B].
        units: the rows of each unit.
        updates: the units of each update, in order.
        sizes: int64 [units], costs in integer fractions of the budget; the longest row if the cost is padded.
        budget: in the same fractions.
        work: float64 [units], the work of each; None if the work of a bin is its cost, and no sum.
        tree: the prefix tree, in which rows of different updates share nothing. A bin costs less than the sum of its
            units if they share prefixes.
    """

    multiple_of: int
    padded: bool
    lengths: IntArray
    units: Units
    updates: list[list[int]]
    sizes: IntArray
    budget: int
    work: FloatArray | None
    tree: PrefixTree | None

    @classmethod
    def of(
        cls, options: PlanOptions, budget: float, lengths: IntArray, units: Units, tree: PrefixTree | None
    ) -> PackingProblem:
        padded = options.cost == "padded"
        updates = _consecutive(units.sizes, options.num_updates)
        if tree is not None:
            rows_of = [units.members(part) for part in updates]
            tree = kept_apart(tree, rows_of)
            if units.rows is None:
                units = tree_units(tree, budget)
                updates = _within(units.sizes, [len(rows) for rows in rows_of])
            assert units.rows is not None
            sizes = trie_tokens(tree, units.rows)
        else:
            sizes = units.longest(lengths) if padded else units.sums(row_costs(options.cost, lengths, CALL))
        work = None if padded or tree is not None else sizes.astype(np.float64)
        if options.work is not None:
            work = units.sums(row_costs(options.work, lengths, CALL, "amounts of work").astype(np.float64))
        sizes, whole = in_parts(sizes, budget)
        return cls(options.multiple_of, padded, lengths, units, updates, sizes, whole, work, tree)

    def too_large(self) -> list[int]:
        """Units that alone exceed the budget."""
        return np.flatnonzero((self.units.sizes * self.sizes if self.padded else self.sizes) > self.budget).tolist()

    def costs(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [bins]: the cost of each, in fractions of the budget; tokens with a tree."""
        if self.tree is not None:
            return trie_tokens(self.tree, [self.units.members(list(items)) for items in bins]).astype(np.float64)
        if not self.padded:
            return _reduced(np.add, self.sizes, bins)
        longest = _reduced(np.maximum, self.sizes, bins)
        return _reduced(np.add, self.units.sizes, bins) * longest

    def loads(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [bins]: the work of each, by default its cost."""
        return self.costs(bins) if self.work is None else _reduced(np.add, self.work, bins)

    # ---------------------------------------------------------------- bins

    def packed(self, part: list[int]) -> list[list[int]]:
        """The bins that best fit finds."""
        units = np.array(part, np.int64)
        rows = self.units.sizes
        if not self.padded:
            order = units[np.argsort(-self.sizes[units], kind="stable")]
            bins = best_fit(order, self.sizes, np.full(rows.size, self.budget))
            return bins if self.tree is None else self._evened(bins, order)
        # a bin has room for rows as long as its first, which is the longest
        order = units[np.lexsort((-rows[units], -self.sizes[units]))]
        return best_fit(order, rows, self.budget // np.maximum(self.sizes, 1))

    def _evened(self, bins: list[list[int]], order: IntArray) -> list[list[int]]:
        """At most as many bins, with sums that are more alike: each unit of `order` in the bin with the smallest. The
        same ones if these exceed the budget. Best fit leaves the rest to the last bin, and groups are large units."""
        even: list[list[int]] = [[] for _ in bins]
        heap = [(0, number) for number in range(len(bins))]
        for unit, size in zip(order.tolist(), self.sizes[order].tolist(), strict=True):
            total, number = heap[0]
            even[number].append(unit)
            heapq.heapreplace(heap, (total + size, number))
        return [items for items in even if items] if max(heap, default=(0, 0))[0] <= self.budget else bins

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
        if not self.padded:
            return halved(items, self._weights)
        items = sorted(items, key=self.sizes.__getitem__, reverse=True)  # short rows, which then need less padding
        middle = len(items) // 2
        return items[:middle], items[middle:]

    @cached_property
    def _weights(self) -> list[float]:
        return (self.sizes if self.work is None else self.work).tolist()

    def in_order(self, bins: list[list[int]]) -> list[list[int]]:
        """The bin with the largest load first."""
        return [bins[at] for at in np.argsort(-self.loads(bins), kind="stable").tolist()]


def _consecutive(sizes: IntArray, count: int) -> list[list[int]]:
    """The units of each update: consecutive ones, with row counts as equal as the units allow."""
    if count == 1:
        return [list(range(sizes.size))]
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


def _reduced(how: np.ufunc, of_units: npt.NDArray[Any], bins: Sequence[Sequence[int]]) -> FloatArray:
    """float64 [bins]: one number for each bin. No bin is empty."""
    if not bins:
        return np.zeros(0)
    begins = np.cumsum([0, *map(len, bins[:-1])])
    return how.reduceat(of_units[list(itertools.chain.from_iterable(bins))], begins).astype(np.float64)


# -------------------------------------------------------------------- algorithms


def best_fit(order: IntArray, sizes: IntArray, capacities: IntArray) -> list[list[int]]:
    """Packs items into bins, in the order given.

    Args:
        order: int64 [n], the items; by size or by capacity, so that what fits beside one fits beside later ones.
        sizes: int64 [items], the size of each.
        capacities: int64 [items], the room of a bin whose first item it is. A larger item is alone in its bin.

    Each item goes into the open bin with the least room that is enough (Johnson, 1974: best fit). Among bins with
    equal room it is the one that reached this room last. Open bins are looked up by their room, by bisection:

        room    3: [b7]    12: [b2 b9]    40: [b5]
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # sorted, each once
    stacks: dict[int, list[int]] = {}  # the bins of each room
    for item, size, room in zip(*(column.tolist() for column in (order, sizes[order], capacities[order])), strict=True):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            stack = stacks[room]
            bin = stack.pop()
            if not stack:
                del stacks[room], rooms[at]
            bins[bin].append(item)
        else:
            bin = len(bins)
            bins.append([item])
        room -= size
        if room < 0:
            continue
        if room in stacks:
            stacks[room].append(bin)
        else:
            stacks[room] = [bin]
            insort(rooms, room)
    return bins


def halved(items: Sequence[int], weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """Splits two items or more into bins of similar weight: the heaviest first, each to the lighter bin."""
    sides: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=weights.__getitem__, reverse=True):
        side = (sums[0], len(sides[0])) > (sums[1], len(sides[1]))
        sides[side].append(item)
        sums[side] += weights[item]
    return sides
