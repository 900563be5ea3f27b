"""Bin packing in whole numbers: items into as few bins as can be found, evened out, split.

    best fit, largest first    each item goes where it leaves the least room
    open bins by their room    0: ..  3: [b7]  12: [b2 b9]  40: [b5]     looked up by bisection

Items are numbers 0, 1, ...; bins are lists of them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
_PARTNERS, _LIGHTER = 4, 0.99
"""When work is evened out: the lightest bins tried beside the heaviest, and by how much that must get lighter."""


def best_fit(order: Array, sizes: Array, capacities: Array, rows: Array, max_rows: int | None) -> list[list[int]]:
    """Items into bins, in the order given.

    Args:
        order: int64 [n], the items; by size or by capacity, so that what fits beside one fits beside later ones.
        sizes: int64 [items], what each takes up.
        capacities: int64 [items], the room of a bin that begins with it. An item larger than that is alone.
        rows: int64 [items], how many each counts against `max_rows`.

    Each item goes into the open bin with the least room that is enough (Johnson, 1974: best fit; of equal room, the
    last bin that came to have it).
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
    """From the room `at` on, the first with a bin of at most `most` rows, and the place of that bin."""
    for number in range(at, len(rooms)):
        stack = stacks[rooms[number]]
        for place in range(len(stack) - 1, -1, -1):
            if filled[stack[place]] <= most:
                return number, place
    return len(rooms), -1


def halved(items: Sequence[int], weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """Two bins of like weight out of one of two items or more: the heaviest first, each to the lighter side."""
    sides: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=weights.__getitem__, reverse=True):
        side = (sums[0], len(sides[0])) > (sums[1], len(sides[1]))
        sides[side].append(item)
        sums[side] += weights[item]
    return sides


@dataclass(frozen=True)
class Limit:
    """What a bin may hold.

    Attributes:
        budget: of the sum of its sizes; where `padded`, of its rows times its largest size.
        most_rows: in a bin.
        sizes, rows: of each item.
    """

    budget: int
    most_rows: int
    sizes: Sequence[int]
    rows: Sequence[int]
    padded: bool

    def holds(self, items: Sequence[int]) -> bool:
        state = (0, 0)
        for item in items:
            state = self.added(state, item)
            if state is None:
                return False
        return True

    def added(self, state: tuple[int, int], item: int) -> tuple[int, int] | None:
        """The rows and the size of a bin with one more item, or None."""
        rows = state[0] + self.rows[item]
        size = max(state[1], self.sizes[item]) if self.padded else state[1] + self.sizes[item]
        return None if rows > self.most_rows or (rows * size if self.padded else size) > self.budget else (rows, size)


def evened(bins: list[list[int]], limit: Limit, work: Sequence[float]) -> list[list[int]]:
    """The same items in as many bins, all within the limit, the heaviest with less work if such bins are found. Bins
    over the limit stay as they are.

    First all items anew, the most work first, each to the bin with the least work where it fits; if that does not come
    out, or not lighter, the heaviest bin shares its items out with one of the lightest, again and again.
    """
    over = [items for items in bins if not limit.holds(items)]
    bins = [items for items in bins if limit.holds(items)]
    if len(bins) < 2:
        return over + bins
    loads = [sum(work[item] for item in items) for items in bins]
    anew = _shared_out([item for items in bins for item in items], len(bins), limit, work)
    if anew is not None and max(sum(work[item] for item in items) for items in anew) < max(loads):
        return over + anew
    heavy = [(-load, at) for at, load in enumerate(loads)]
    light = [(load, at) for at, load in enumerate(loads)]
    heapq.heapify(heavy)
    heapq.heapify(light)
    for _ in range(len(bins)):
        most = _top(heavy, loads, -1)
        partners = [_top(light, loads, 1) for _ in range(min(_PARTNERS, len(bins) - 1))]
        for least in partners:
            pair = _shared_out(bins[most] + bins[least], 2, limit, work) if least != most else None
            sums = [sum(work[item] for item in items) for items in pair or ()]
            if pair is not None and max(sums) < _LIGHTER * loads[most]:
                (bins[most], bins[least]), (loads[most], loads[least]) = pair, sums
                heapq.heappush(heavy, (-loads[least], least))
                break
        else:
            break
        heapq.heappush(heavy, (-loads[most], most))
        for at in {most, *partners}:
            heapq.heappush(light, (loads[at], at))
    return over + bins


def _top(heap: list[tuple[float, int]], loads: Sequence[float], sign: int) -> int:
    """Takes out the first bin whose load is still what the heap says."""
    while True:
        load, at = heapq.heappop(heap)
        if sign * load == loads[at]:
            return at


def _shared_out(items: Sequence[int], count: int, limit: Limit, work: Sequence[float]) -> list[list[int]] | None:
    """`count` bins of like work within the limit; None if they are not found soon."""
    bins: list[list[int]] = [[] for _ in range(count)]
    states = [(0, 0)] * count
    loads = [(0.0, 0, bin) for bin in range(count)]  # of equal work, the one with fewer items
    patience = 4 * len(items)
    for item in sorted(items, key=work.__getitem__, reverse=True):
        passed: list[tuple[float, int, int]] = []
        while loads and (state := limit.added(states[loads[0][2]], item)) is None:
            passed.append(heapq.heappop(loads))
        patience -= len(passed)
        if not loads or patience < 0:
            return None
        load, number, bin = loads[0]
        states[bin] = state  # type: ignore[reportPossiblyUnbound]
        heapq.heapreplace(loads, (load + work[item], number + 1, bin))
        bins[bin].append(item)
        for entry in passed:
            heapq.heappush(loads, entry)
    return bins
