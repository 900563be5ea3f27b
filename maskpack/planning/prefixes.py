"""Planning by a prefix tree: amounts of which a shared prefix counts once, and the tree cut into units.

    order   0 2 1 | 3 4 5      two roots: a row that shares nothing begins one
    shared  0 3 2 | 0 7 7      rows 3 4 | 5 as two units: their first 7 tokens are computed twice

A run of rows in the order of the tree costs its lengths minus `shared`, plus the `shared` of its first row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from maskpack.core.arguments import IntArray, said
from maskpack.errors import PlanError
from maskpack.planning.costs import RowCost, Units, row_costs

if TYPE_CHECKING:  # the planners do not import torch
    from maskpack.layout.prefix_tree import PrefixTree

_REMEDY = (
    "Pass tree=maskpack.replay.prefix_tree(batch), from token ids, or PrefixTree.from_groups(lengths, groups, "
    "prompt_lengths)."
)


def checked_tree(tree: Any, cost: Any, lengths: IntArray, call: str) -> PrefixTree | None:
    """The tree with cost="prefix", else None. Raises PlanError unless it comes with this cost and has these lengths."""
    if not (isinstance(cost, str) and cost == "prefix"):
        if tree is not None:
            raise PlanError(
                f"{call}: tree is {said(tree)} and cost is {said(cost)}; expected a tree with the cost "
                '"prefix" alone. Pass cost="prefix", or no tree.'
            )
        return None
    if tree is None:
        raise PlanError(f'{call}: cost is "prefix" and tree is None; expected the PrefixTree of the rows. {_REMEDY}')
    from maskpack.layout.prefix_tree import PrefixTree

    if not isinstance(tree, PrefixTree):
        raise PlanError(f"{call}: tree is {said(tree)}; expected the PrefixTree of the rows. {_REMEDY}")
    if tree.num_rows != lengths.size:
        raise PlanError(
            f"{call}: tree of {tree.num_rows} rows for {lengths.size} lengths; expected the same number. {_REMEDY}"
        )
    if not np.array_equal(tree.lengths, lengths):
        row = int(np.flatnonzero(tree.lengths != lengths)[0])
        raise PlanError(
            f"{call}: row {row} has {lengths[row]} tokens, in the tree {tree.lengths[row]}; expected the tree of these "
            f"rows in this order. {_REMEDY}"
        )
    return tree


@dataclass(frozen=True, eq=False)
class SharedAmounts:
    """An amount of rows, such as tokens or work, of which a prefix that several rows share counts once.

    Attributes:
        tree: what rows share.
        of_rows: [B], the amount of each row alone.
        of_shared: [B], how much of it row `tree.order[k]` shares with row `tree.order[k - 1]`.
    """

    tree: PrefixTree
    of_rows: npt.NDArray[Any]
    of_shared: npt.NDArray[Any]

    @classmethod
    def of(cls, tree: PrefixTree, work: RowCost | None, call: str) -> SharedAmounts:
        """The work, a function of lengths that does not decrease; tokens if None. After s shared tokens, the others of
        a row of n take work(n) - work(s), because a causal model computes each token from those before it."""
        if work is None:
            return cls(tree, tree.lengths, tree.shared)
        of_rows, of_shared = (row_costs(work, n, call, "amounts of work") for n in (tree.lengths, tree.shared))
        of_shared = np.where(tree.shared > 0, of_shared, 0)
        less = np.flatnonzero(of_rows[tree.order] < of_shared)
        if less.size:
            row = int(tree.order[less[0]])
            raise PlanError(
                f"{call}: work is {of_rows[row]} for the {tree.lengths[row]} tokens of row {row}, and "
                f"{of_shared[less[0]]} for {tree.shared[less[0]]} of them; expected no less for more tokens. Pass a "
                "function that does not decrease, such as a FlopsModel."
            )
        return cls(tree, of_rows, of_shared)

    def of_parts(self, parts: Sequence[Sequence[int]]) -> npt.NDArray[Any]:
        """[parts]: the amount of the rows of each."""
        rows, part, shared = _arranged(self.tree, parts, self.of_shared)
        out = np.zeros(len(parts), self.of_rows.dtype)
        np.add.at(out, part, self.of_rows[rows] - shared)
        return out


def kept_apart(tree: PrefixTree, parts: Sequence[Sequence[int]]) -> PrefixTree:
    """The tree of the same rows, in which rows of different parts share nothing. It has one part after the other."""
    rows, _, shared = _arranged(tree, parts, tree.shared)
    return type(tree)(tree.lengths, rows, shared)  # without an import of the class, and so of torch


def _arranged(
    tree: PrefixTree, parts: Sequence[Sequence[int]], of_shared: npt.NDArray[Any]
) -> tuple[IntArray, IntArray, npt.NDArray[Any]]:
    """The rows of each part in the order of the tree; their parts; and how much each shares with the one before it in
    its part: the least of `of_shared` from there on."""
    part = np.repeat(np.arange(len(parts)), np.array([len(rows) for rows in parts], np.int64))
    places = np.empty(tree.num_rows, np.int64)
    places[tree.order] = np.arange(tree.num_rows)
    at = places[np.fromiter(itertools.chain.from_iterable(parts), np.int64, part.size)]
    at = at[np.lexsort((at, part))]
    root = np.cumsum(tree.shared == 0)[at]
    later = 1 + np.flatnonzero((part[1:] == part[:-1]) & (root[1:] == root[:-1]))  # after one of the same root
    later = later[np.argsort(-at[later - 1], kind="stable")]  # from the last, reduceat does not run between the bounds
    bounds = 1 + np.stack([at[later - 1], at[later]], axis=1).reshape(-1)
    shared = np.zeros(at.size, of_shared.dtype)
    shared[later] = np.minimum.reduceat(np.append(of_shared, 0), bounds)[::2]
    return tree.order[at], part, shared


# -------------------------------------------------------------------- cuts


def tree_units(tree: PrefixTree, most_tokens: float, most_rows: int) -> Units:
    """The roots of a tree as units. A root of more tokens or rows is cut into runs of its rows, so that the prefixes
    they repeat have the fewest tokens; a row of more tokens is alone."""
    begins = np.append(np.flatnonzero(tree.shared == 0), tree.num_rows)
    sums = np.append(0, np.cumsum(tree.lengths[tree.order] - tree.shared))
    large = (np.diff(sums[begins]) > most_tokens) | (np.diff(begins) > most_rows)
    cuts: list[int] = begins.tolist()
    for begin, end in zip(begins[:-1][large].tolist(), begins[1:][large].tolist(), strict=True):
        run = slice(begin, end)
        cuts += [
            begin + at
            for at in _cuts(tree.shared[run].tolist(), sums[begin : end + 1].tolist(), most_tokens, most_rows)
        ]
    return Units.of_runs(tree.order, np.sort(np.array(cuts, np.int64)))


def _cuts(shared: list[int], sums: list[int], most_tokens: float, most_rows: int) -> list[int]:
    """The places where a root is cut, by dynamic programming over the ends of runs: with `best[i]` of the rows before
    i, `best[end]` is the least of `best[begin] + shared[begin]` over the last runs begin..end within the limits. Of
    equal ones it has the fewest runs. Longer runs cost no less, so the begins are a window that moves on, and its
    minimum is the first of a queue of increasing values."""
    one = len(shared) + 1  # a token weighs more than all runs
    best, last = [0], [0]
    queue: deque[tuple[int, int]] = deque()  # values and begins
    first = 0
    for end in range(1, len(sums)):
        value = best[end - 1] + shared[end - 1] * one + 1
        while queue and queue[-1][0] > value:
            queue.pop()
        queue.append((value, end - 1))
        while first < end - 1 and (end - first > most_rows or shared[first] + sums[end] - sums[first] > most_tokens):
            first += 1
        while queue[0][1] < first:
            queue.popleft()
        best.append(queue[0][0])
        last.append(queue[0][1])
    cuts: list[int] = []
    at = last[-1]
    while at:
        cuts.append(at)
        at = last[at]
    return cuts
