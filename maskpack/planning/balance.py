"""Rows to data-parallel ranks: like sums of cost, rows of each rank in an order whose every stretch is like the whole.

costs, largest first   9 8 | 7 6 | 3 1       a block of rows for each round, the largest to the rank with least
rank 0                 9     6     1   16    then pairs of rows change places between the heaviest and the
rank 1                 8     7     3   18    lightest rank, as long as that evens them out
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from maskpack.core.arguments import flag
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
    whole_number,
)

_CALL = "balance_rows"
_PATIENCE = 8
"""Exchanges for each rank, at most."""
_WEIGHED = 256
"""Pairs whose places even out the updates; chance places the others."""


def balance_rows(
    lengths: Any, ranks: int, *, equal_rows: bool = True, cost: Cost = "tokens", groups: Any = None, seed: int = 0
) -> list[list[int]]:
    """The rows of each data-parallel rank, such that the sums of their costs are alike.

    Args:
        lengths: [B], real tokens of each row, prompt plus response; whole numbers on the host.
        ranks: data-parallel ranks.
        equal_rows: as many rows on every rank; where B does not divide, one more on some. Otherwise as costs want it.
        cost: "tokens", or a function of lengths int64 [B] that gives costs [B], such as a FlopsModel.
        groups: [B], labels; rows of one label go to one rank, one after the other, in the order given. `equal_rows` is
            then as many groups on every rank.
        seed: of the order of a rank's rows. They are shuffled so that long and short rows lie evenly: halves, quarters
            and so on, such as the optimizer updates of a plan, have like sums over all ranks.

    Returns:
        A list of row numbers for each rank; each row is in one of them. Empty ones where there are fewer rows.

    Raises:
        PlanError: lengths, costs or groups that are none, ranks below 1, or a seed below 0.
    """
    found = checked_lengths(lengths, _CALL)
    ranks, seed = whole_number(ranks, 1, _CALL, "ranks", MOST), whole_number(seed, 0, _CALL, "seed")
    equal_rows = flag(equal_rows, "equal_rows", _CALL, PlanError)
    check_cost(cost, ["tokens"], _CALL)
    units = Units.of(found.size, groups, _CALL)
    weights = units.sums(row_costs(cost, found, _CALL)).astype(np.float64)
    order = np.argsort(-weights, kind="stable")
    ranks_of = (_dealt if equal_rows else _to_the_lightest)(weights, order, ranks)
    by_rank = order[np.argsort(ranks_of[order], kind="stable")]  # of each rank, the largest first
    parts = np.split(by_rank, np.cumsum(np.bincount(ranks_of, minlength=ranks))[:-1])
    _exchange(weights, parts, moves=not equal_rows)
    return [units.members(part.tolist()) for part in _mixed(weights, parts, np.random.default_rng(seed))]


def _dealt(weights: FloatArray, order: IntArray, ranks: int) -> IntArray:
    """The rank of each unit: of every `ranks` units, the largest goes to the rank that has least so far."""
    out = np.empty(order.size, np.int64)
    loads = np.zeros(ranks)
    for begin in range(0, order.size, ranks):
        block = order[begin : begin + ranks]
        to = np.argsort(loads, kind="stable")[: block.size]
        out[block] = to
        loads[to] += weights[block]
    return out


def _to_the_lightest(weights: FloatArray, order: IntArray, ranks: int) -> IntArray:
    """The rank of each unit: each goes to the rank that has least so far (Graham, 1969: largest processing time)."""
    out = np.empty(order.size, np.int64)
    loads: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(ranks)]
    for unit, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        load, count, rank = loads[0]
        out[unit] = rank
        heapq.heapreplace(loads, (load + weight, count + 1, rank))
    return out


def _exchange(weights: FloatArray, parts: list[IntArray], *, moves: bool) -> None:
    """Evens the heaviest rank out with the lightest: two units change places, or one moves, whatever comes nearest to
    half of the difference. The units of a part stay sorted, largest first."""
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
        if moves:
            others = np.append(others, 0)
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
        if take < theirs.size:
            ours[give], theirs[take] = theirs[take], ours[give]
        else:
            ours, theirs = np.delete(ours, give), np.append(theirs, ours[give])
        parts[heavy], parts[light] = _sorted(weights, ours), _sorted(weights, theirs)


def _sorted(weights: FloatArray, part: IntArray) -> IntArray:
    return part[np.argsort(-weights[part], kind="stable")]


def _mixed(weights: FloatArray, parts: list[IntArray], rng: np.random.Generator) -> list[IntArray]:
    """A shuffle of each part, whose units are sorted by weight: each half of it, each quarter, and so on, has like
    weights, and those of all parts together have like sums.

    Of two neighbours one goes into the first half and the other into the second, by chance, and within the halves
    likewise. The pairs that differ most, of all parts, do not leave it to chance: they even the sums out.
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
    """[pairs] 0 where the larger of a pair goes into the first half. The sums of the halves of each path are evened
    out by the pairs that differ most, the largest first, wherever one would not tip the scales."""
    coins = rng.integers(0, 2, differences.size)
    most = min(_WEIGHED, differences.size)
    least = np.partition(differences, differences.size - most)[differences.size - most]
    largest = np.flatnonzero(differences >= least)  # whatever order a partition leaves equal ones in
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
