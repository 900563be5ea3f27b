"""balance_rows: divides rows among DP ranks so that their costs are similar, also in each part of the rows of a rank.

costs, largest first   9 8 | 7 6 | 3 1       one block of rows for each round, the largest to the rank with the least
rank 0                 9     6     1   16    cost; then rows are exchanged between the heaviest and the lightest rank
rank 1                 8     7     3   18    as long as that balances them
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maskpack.core.arguments import whole
from maskpack.errors import PlanError
from maskpack.planning.costs import (
    MOST,
    Cost,
    FloatArray,
    IntArray,
    Units,
    check_cost,
    checked_lengths,
    row_costs,
)

_CALL = "balance_rows"
_PATIENCE = 8
"""The largest number of exchanges for each rank."""
_SEED = 0
_WEIGHED = 256
"""The number of pairs that are placed to balance the updates; the others are placed at random."""


def balance_rows(lengths: Any, ranks: int, *, cost: Cost = "tokens", groups: Any = None) -> list[list[int]]:
    """Divides rows among DP ranks so that they have the same number of rows, up to one, and similar sums of costs.

    The rows of a rank are shuffled so that halves, quarters and so on, such as the optimizer updates of a plan, have
    similar costs over all ranks. Equal arguments give equal results.

    Args:
        lengths: integers [B] on the host, the valid tokens of each row: prompt plus response.
        ranks: the number of DP ranks.
        cost: "tokens", or a function of lengths int64 [B] that returns costs [B], such as FLOPs.
        groups: labels [B]. Rows with one label go to one rank, one after the other, in the order given. Ranks then have
            the same number of groups, up to one.

    Returns:
        A list of row numbers for each rank. Each row is in one list; with fewer rows than ranks some lists are empty.

    Raises:
        PlanError: lengths, costs or groups are invalid, or `ranks` is below 1.
    """
    lengths = checked_lengths(lengths, _CALL)
    check_cost(cost, ["tokens"], _CALL)
    units = Units.of(lengths.size, groups, _CALL)
    weights = units.sums(row_costs(cost, lengths, _CALL)).astype(np.float64)
    return balance_units(units, weights, ranks)


def balance_units(units: Units, weights: FloatArray, ranks: int) -> list[list[int]]:
    """`balance_rows` for units of given weights."""
    ranks = whole(ranks, "ranks", 1, _CALL, MOST, PlanError)
    order = np.argsort(-weights, kind="stable")
    ranks_of = _dealt(weights, order, ranks)
    by_rank = order[np.argsort(ranks_of[order], kind="stable")]  # of each rank, the largest first
    parts = np.split(by_rank, np.cumsum(np.bincount(ranks_of, minlength=ranks))[:-1])
    _exchange(weights, parts)
    return [units.members(part.tolist()) for part in _mixed(weights, parts, np.random.default_rng(_SEED))]


def _dealt(weights: FloatArray, order: IntArray, ranks: int) -> IntArray:
    """The rank of each unit: of every `ranks` units, the largest goes to the rank with the smallest load."""
    out = np.empty(order.size, np.int64)
    loads = np.zeros(ranks)
    for begin in range(0, order.size, ranks):
        block = order[begin : begin + ranks]
        to = np.argsort(loads, kind="stable")[: block.size]
        out[block] = to
        loads[to] += weights[block]
    return out


def _exchange(weights: FloatArray, parts: list[IntArray]) -> None:
    """Balances the heaviest and the lightest rank, again and again: exchanges two units so that the change is
    nearest to half of the difference. The units of a part stay sorted, largest first."""
    loads = np.array([weights[part].sum() for part in parts])
    whole = bool((weights == np.floor(weights)).all())
    best = np.ceil(loads.mean()) if whole else loads.mean()
    for _ in range(_PATIENCE * len(parts)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = loads[heavy] - loads[light]
        if loads[heavy] <= best or not gap:
            break
        ours, theirs = parts[heavy], parts[light]
        mine, others = weights[ours], weights[theirs]
        if not others.size:
            break
        wanted: FloatArray = gap / 2 - mine
        after: IntArray = np.searchsorted(-others, wanted)
        near: IntArray = np.stack([after - 1, after]).clip(0, others.size - 1)
        change: FloatArray = mine - others[near]
        off: FloatArray = abs(change - gap / 2)
        which, give = np.unravel_index(int(off.argmin()), off.shape)
        if off[which, give] >= gap / 2:  # no change between 0 and the gap
            break
        take = int(near[which, give])
        loads[heavy] -= change[which, give]
        loads[light] += change[which, give]
        ours[give], theirs[take] = theirs[take], ours[give]
        parts[heavy], parts[light] = _sorted(weights, ours), _sorted(weights, theirs)


def _sorted(weights: FloatArray, part: IntArray) -> IntArray:
    return part[np.argsort(-weights[part], kind="stable")]


def _mixed(weights: FloatArray, parts: list[IntArray], rng: np.random.Generator) -> list[IntArray]:
    """Shuffles each part, whose units are sorted by weight, so that its halves, quarters and so on have similar
    weights, and those of all parts together have similar sums.

    Of two neighbours one goes into the first half and the other into the second, at random, and so on within the
    halves. The pairs that differ most, among all parts, are placed to balance the sums instead.
    """
    units = np.concatenate(parts)
    sizes = np.array([part.size for part in parts])
    path = np.zeros(units.size, np.int64)  # which half, quarter, ... of its part
    place = np.arange(units.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within that
    for _ in range(int(sizes.max() - 1).bit_length() if units.size else 0):
        second = (place & 1).astype(np.bool_)
        heads = np.flatnonzero(~second)
        alone = np.append(heads[1:] == heads[:-1] + 1, heads[-1:] == units.size - 1)
        differences = weights[units[heads]] - np.where(alone, 0.0, weights[units[(heads + 1) % units.size]])
        coins = np.zeros(units.size, np.int64)
        coins[heads] = _tossed(differences, path[heads], rng)
        coins[second] = coins[np.flatnonzero(second) - 1]  # one coin for both
        half = (place + coins) & 1
        begins = np.flatnonzero(place == 0)
        stretch = np.cumsum(place == 0) - 1
        middles = begins + np.add.reduceat(1 - half, begins)
        order = np.empty(units.size, np.int64)
        order[np.where(half, middles[stretch], begins[stretch]) + place // 2] = np.arange(units.size)
        units, path, place = units[order], 2 * path[order] + half[order], place[order] // 2
    return np.split(units, np.cumsum(sizes)[:-1])


def _tossed(differences: FloatArray, path: IntArray, rng: np.random.Generator) -> IntArray:
    """int64 [pairs]: 0 if the larger unit of a pair goes into the first half. The pairs that differ most, the largest
    first, balance the halves of each path if their difference does not exceed the imbalance."""
    coins = rng.integers(0, 2, differences.size)
    most = min(_WEIGHED, differences.size)
    least = np.partition(differences, differences.size - most)[differences.size - most]
    largest = np.flatnonzero(differences >= least)  # np.partition leaves ties in any order
    largest = largest[np.argsort(-differences[largest], kind="stable")][:most]
    signed = np.where(coins == 0, differences, -differences)
    signed[largest] = 0.0
    sums = np.bincount(path, signed, minlength=1).tolist()
    for pair, where, difference in zip(
        largest.tolist(), path[largest].tolist(), differences[largest].tolist(), strict=True
    ):
        if difference and abs(sums[where]) >= difference:
            coins[pair] = sums[where] > 0
        sums[where] += -difference if coins[pair] else difference
    return coins
