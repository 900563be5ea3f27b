"""What trainers do to plan, in plain Python, and what no plan can beat: the rivals of planning.

    micro-batches   first-fit decreasing, in a loop over all bins and on a tournament tree; Karmarkar-Karp partition
    ranks           largest processing time on a heap; consecutive rows, first-fit decreasing on each rank
    a lower bound   Martello-Toth

Bins, parts and micro-batches are lists of row numbers. Nothing here imports maskpack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Bins = list[list[int]]
Part = tuple[int, list[int]]  # its sum, its rows


# -------------------------------------------------------------------- a lower bound


def martello_toth(lengths: Array, budget: int) -> int:
    """The bound L2 (Martello and Toth, 1990, Knapsack Problems, section 8.3.2), for lengths of at most the budget.

    Rows over half the budget need a bin each. For every threshold, rows from the threshold to half the budget go into
    what those bins leave, if that is at least the threshold, and otherwise into more bins.
    """
    sizes = np.sort(lengths)[::-1]
    sums = np.concatenate([[0], np.cumsum(sizes)])
    half = int((2 * sizes > budget).sum())
    thresholds = np.concatenate([[0], np.unique(sizes[half:])])
    shut = np.searchsorted(-sizes, thresholds - budget, "left")  # what is left beside these is below the threshold
    last = np.searchsorted(-sizes, -thresholds, "right")
    room = (half - shut) * budget - (sums[half] - sums[shut])
    more = -((room - sums[last] + sums[half]) // budget)
    return half + max(0, int(more.max()))


# -------------------------------------------------------------------- micro-batches


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> Bins:
    """As trainers write it: the longest row first, each into the first bin with room, looked for from the first on."""
    bins: Bins = []
    loads: list[int] = []
    for row in _longest_first(lengths):
        for at in range(len(bins)):
            if loads[at] + lengths[row] <= budget:
                bins[at].append(row)
                loads[at] += lengths[row]
                break
        else:
            bins.append([row])
            loads.append(lengths[row])
    return bins


def first_fit_on_a_tree(lengths: Sequence[int], budget: int) -> Bins:
    """The same bins. A tournament tree knows the most room below each node, so the first bin is found by bisection."""
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    bins: Bins = []
    for row in _longest_first(lengths):
        size = lengths[row]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(row)
        left = room[node] = room[node] - size
        while node > 1:
            other = room[node ^ 1]
            left = left if left > other else other
            node //= 2
            if room[node] == left:
                break
            room[node] = left
    return bins


def karmarkar_karp(lengths: Sequence[int], count: int) -> Bins:
    """`count` parts of like sums (largest differencing method, 1982); no budget is known.

    A state is a partition of some rows into `count` parts, of which those without rows are left out. The two states
    whose largest and smallest parts differ most become one, the largest part of either with the smallest of the other.
    """
    states: list[tuple[int, int, list[Part]]] = []
    for row, size in enumerate(lengths):
        states.append((-_spread([(size, [row])], count), row, [(size, [row])]))
    heapq.heapify(states)
    while len(states) > 1:
        _, number, parts = heapq.heappop(states)
        merged = _opposed(parts, heapq.heappop(states)[2], count)
        heapq.heappush(states, (-_spread(merged, count), number, merged))
    return [rows for _, _, parts in states for _, rows in parts]


def _spread(parts: list[Part], count: int) -> int:
    """The largest sum less the smallest."""
    return parts[0][0] - (parts[-1][0] if len(parts) == count else 0)


def _opposed(ours: list[Part], theirs: list[Part], count: int) -> list[Part]:
    """Two partitions as one, largest part first; both are sorted like that."""
    pairs = max(0, len(ours) + len(theirs) - count)
    free = len(theirs) - pairs  # the largest of theirs meet parts of ours without rows
    merged = ours[: len(ours) - pairs] + theirs[:free]
    for (mine, rows), (other, more) in zip(ours[len(ours) - pairs :], reversed(theirs[free:]), strict=True):
        merged.append((mine + other, rows + more))
    merged.sort(key=lambda part: -part[0])
    return merged


# -------------------------------------------------------------------- ranks


def largest_processing_time(lengths: Sequence[int], ranks: int) -> Bins:
    """Graham's rule (1969), whatever the number of rows: the longest row first, each to the rank with least so far."""
    parts: Bins = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for row in _longest_first(lengths):
        load, rank = heapq.heappop(heap)
        parts[rank].append(row)
        heapq.heappush(heap, (load + lengths[row], rank))
    return parts


def consecutive(rows: Sequence[int], parts: int) -> Bins:
    """Parts of consecutive rows, as equal as can be."""
    return [list(rows[len(rows) * at // parts : len(rows) * (at + 1) // parts]) for at in range(parts)]


def usual_rank_plans(lengths: Sequence[int], ranks: int, updates: int, budget: int) -> list[Bins]:
    """The micro-batches of each rank, those of all updates one after the other, as many on every rank.

    Consecutive rows go to each rank, and of those to each update; first-fit decreasing says how many micro-batches
    that takes, and the rank with most has the others do the same: they add ones without rows.
    """
    plans: list[Bins] = [[] for _ in range(ranks)]
    of_ranks = [consecutive(own, updates) for own in consecutive(range(len(lengths)), ranks)]
    for update in range(updates):
        parts = [own[update] for own in of_ranks]
        sizes = [[lengths[row] for row in part] for part in parts]
        bins = [first_fit_decreasing(own, budget) for own in sizes]
        count = max(map(len, bins))
        for plan, part, own in zip(plans, parts, bins, strict=True):
            plan += [[part[at] for at in items] for items in own] + [[] for _ in range(count - len(own))]
    return plans


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
