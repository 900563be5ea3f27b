"""Planning by a prefix tree: tokens of which a shared prefix counts once, and the tree cut into units.

    order   0 2 1 | 3 4 5      two roots: a row that shares nothing begins one
    shared  0 3 2 | 0 7 7      rows 3 4 | 5 as two units: their first 7 tokens are computed twice

A run of rows in the order of the tree costs its lengths minus `shared`, plus the `shared` of its first row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from maskpack.core.arguments import IntArray, said
from maskpack.errors import PlanError
from maskpack.planning.costs import PlanOptions, Units

if TYPE_CHECKING:  # the planners do not import torch
    from maskpack.layout.prefix_tree import PrefixTree

_REMEDY = (
    "Pass tree=maskpack.replay.prefix_tree(batch), from token ids, or PrefixTree.from_groups(lengths, groups, "
    "prompt_lengths)."
)


def checked_tree(tree: Any, options: PlanOptions, lengths: IntArray, call: str) -> PrefixTree | None:
    """The tree. Raises PlanError unless it has these lengths, and the options leave the cost to it."""
    if tree is None:
        return None
    if options != replace(options, cost="tokens", work=None):
        raise PlanError(
            f"{call}: tree is {said(tree)}, with the cost {said(options.cost)} and work {said(options.work)}; expected "
            'the cost "tokens" and no work, because a tree says which tokens are computed. Leave them out, or the tree.'
        )
    from maskpack.layout.prefix_tree import PrefixTree

    if not isinstance(tree, PrefixTree):
        raise PlanError(f"{call}: tree is {said(tree)}; expected the PrefixTree of the rows. {_REMEDY}")
    if not np.array_equal(tree.lengths, lengths):
        raise PlanError(
            f"{call}: lengths of {lengths.size} rows with {lengths.sum()} tokens, and a tree of {tree.num_rows} rows "
            f"with {tree.lengths.sum()}; expected the tree of these rows in this order. {_REMEDY}"
        )
    return tree


def trie_tokens(tree: PrefixTree, parts: Sequence[Sequence[int]]) -> IntArray:
    """int64 [parts]: the tokens of the rows of each, of which a prefix that several rows share counts once."""
    rows, part, shared = _arranged(tree, parts)
    out = np.zeros(len(parts), np.int64)
    np.add.at(out, part, tree.lengths[rows] - shared)
    return out


def kept_apart(tree: PrefixTree, parts: Sequence[Sequence[int]]) -> PrefixTree:
    """The tree of the same rows, in which rows of different parts share nothing. It has one part after the other."""
    rows, _, shared = _arranged(tree, parts)
    return type(tree)(tree.lengths, rows, shared)  # without an import of the class, and so of torch


def _arranged(tree: PrefixTree, parts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray, IntArray]:
    """The rows of each part in the order of the tree; their parts; and the tokens that each shares with the one before
    it in its part: the least of `tree.shared` from there on."""
    part = np.repeat(np.arange(len(parts)), np.array([len(rows) for rows in parts], np.int64))
    places = np.empty(tree.num_rows, np.int64)
    places[tree.order] = np.arange(tree.num_rows)
    at = places[np.fromiter(itertools.chain.from_iterable(parts), np.int64, part.size)]
    at = at[np.lexsort((at, part))]
    root = np.cumsum(tree.shared == 0)[at]
    later = 1 + np.flatnonzero((part[1:] == part[:-1]) & (root[1:] == root[:-1]))  # after one of the same root
    later = later[np.argsort(-at[later - 1], kind="stable")]  # from the last, reduceat does not run between the bounds
    bounds = 1 + np.stack([at[later - 1], at[later]], axis=1).reshape(-1)
    shared = np.zeros(at.size, np.int64)
    shared[later] = np.minimum.reduceat(np.append(tree.shared, 0), bounds)[::2]
    return tree.order[at], part, shared


# -------------------------------------------------------------------- cuts


def tree_units(tree: PrefixTree, most_tokens: float) -> Units:
    """The roots of a tree as units. A root of more tokens is cut into runs of its rows, so that the prefixes
    they repeat have the fewest tokens; a row of more tokens is alone."""
    begins = np.append(np.flatnonzero(tree.shared == 0), tree.num_rows)
    sums = np.append(0, np.cumsum(tree.lengths[tree.order] - tree.shared))
    large = np.diff(sums[begins]) > most_tokens
    cuts: list[int] = begins.tolist()
    for begin, end in zip(begins[:-1][large].tolist(), begins[1:][large].tolist(), strict=True):
        run = slice(begin, end)
        cuts += [begin + at for at in _cuts(tree.shared[run].tolist(), sums[begin : end + 1].tolist(), most_tokens)]
    return Units.of_runs(tree.order, np.sort(np.array(cuts, np.int64)))


def _cuts(shared: list[int], sums: list[int], most_tokens: float) -> list[int]:
    """The places where a root is cut, by dynamic programming over the ends of runs: with `best[i]` of the rows before
    i, `best[end]` is the least of `best[begin] + shared[begin]` over the last runs begin..end within the limit. Of
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
        while first < end - 1 and shared[first] + sums[end] - sums[first] > most_tokens:
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
