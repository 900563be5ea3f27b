"""PrefixTree: rows of tokens as a trie, in which a prefix that several rows share is there once.

    row 0  a b c d e       order   0 2 1        a b --+-- c --+-- d e      tokens   a b c d e x y z
    row 1  a b y z         shared  0 3 2              |       +-- x        end      8 8 6 5 5 6 8 8
    row 2  a b c x                                    +-- y z

Rows are in the order of the trie: those of a subtree are next to each other, and `shared` says how many tokens each has
in common with the one before it. All else follows from these numbers. The tokens of the tree are in depth-first order:
token i sees token j if j <= i < end[j]. Everything is on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from maskpack.core import native
from maskpack.core.arguments import said, whole
from maskpack.core.index import IntArray, Rows, cumulated, ranges, row_index
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import whole_numbers

MIN_SHARED = 16
"""The fewest tokens of a branch, by default."""


class PrefixNodes(NamedTuple):
    """The nodes of a tree, depth first. All int64 [nodes].

    Attributes:
        starts, counts: the first token of a node and the number of its tokens, at least 1. One node follows another.
        ends: one after the last token of its subtree.
        depths: the place of its first token in the rows.
        levels: the number of nodes above it.
    """

    starts: IntArray
    counts: IntArray
    ends: IntArray
    depths: IntArray
    levels: IntArray


class PrefixTree:
    """The trie of the rows of a batch. Immutable; build one with a `from_...` constructor.

    Attributes:
        lengths: int64 [B], tokens of each row.
        order: int64 [B], the rows, those of a subtree next to each other.
        shared: int64 [B], the tokens that row `order[k]` shares with row `order[k - 1]`; 0 for the first.
    """

    def __init__(self, lengths: IntArray, order: IntArray, shared: IntArray) -> None:
        self.lengths = lengths
        self.order = order
        self.shared = shared
        for array in (lengths, order, shared):
            array.setflags(write=False)

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_ids(cls, ids: Any, row_offsets: Any, positions: Any = None, *, min_shared: int = MIN_SHARED) -> PrefixTree:
        """Builds the tree from token ids, which are compared exactly.

        Args:
            ids: integers [T], the tokens of all rows, one after the other.
            row_offsets: integers [B + 1]; row b has the tokens `row_offsets[b]` to `row_offsets[b + 1] - 1`.
            positions: integers [T] or [T, n] beside the ids. A token is shared only if they are equal, too.
            min_shared: the fewest tokens of a branch: rows that share fewer than this beyond their last branch are not
                joined there.

        Raises:
            LayoutError: arrays of other shapes or dtypes, offsets that do not rise from 0 to T, or min_shared below 1.
        """
        call = "PrefixTree.from_ids"
        least = whole(min_shared, "min_shared", 1, call)
        tokens = whole_numbers(ids, call, "ids", "(T,)")
        bounds = whole_numbers(row_offsets, call, "row_offsets", "(B + 1,)")
        if bounds.size == 0 or bounds[0] != 0 or bounds[-1] != tokens.size or (bounds[1:] < bounds[:-1]).any():
            raise LayoutError(
                f"{call}: row_offsets run from {bounds[:1].tolist()} to {bounds[-1:].tolist()}; expected to rise from "
                f"0 to {tokens.size}, the tokens. Pass the cumulated lengths of the rows."
            )
        beside = None if positions is None else whole_numbers(positions, call, "positions", "(T,) or (T, n)", 2)
        if beside is not None and beside.shape[0] != tokens.size:
            raise LayoutError(
                f"{call}: positions are {beside.shape} for {tokens.size} tokens; expected (T,) or (T, n). Give one or "
                "several for each token."
            )
        beside = None if beside is None else beside.reshape(tokens.size, beside.shape[1] if beside.ndim == 2 else 1)
        order, shared = native.order_prefixes(tokens, beside, bounds)
        return cls(np.diff(bounds), order, shared if least == 1 else _contracted(shared, least))

    @classmethod
    def from_groups(cls, lengths: Any, groups: Any, prefix_lengths: Any, *, min_shared: int = MIN_SHARED) -> PrefixTree:
        """Builds the tree from labels, without token ids: rows with the same label begin with the same tokens.

        Args:
            lengths: integers [B], tokens of each row, prompt plus response.
            groups: labels [B], such as uids.
            prefix_lengths: integers [B], of which the rows with one label share the smallest: their prompts.
            min_shared: as for `from_ids`.

        Raises:
            LayoutError: other numbers of labels or lengths than rows, a prefix that is longer than its row, or a
                min_shared below 1.
        """
        call = "PrefixTree.from_groups"
        least = whole(min_shared, "min_shared", 1, call)
        tokens = whole_numbers(lengths, call, "lengths", "(B,)")
        prefixes = whole_numbers(prefix_lengths, call, "prefix_lengths", "(B,)")
        no_list = isinstance(groups, str | bytes | set | frozenset | dict) or getattr(groups, "ndim", 1) == 0
        if no_list or not isinstance(groups, Iterable):
            raise LayoutError(f"{call}: groups are {said(groups)}; expected one label for each row. Pass a list.")
        given = cast("Any", groups)
        labels: list[Any] = given.tolist() if hasattr(given, "tolist") else list(given)
        if not len(labels) == tokens.size == prefixes.size:
            raise LayoutError(
                f"{call}: {len(labels)} groups and {prefixes.size} prefix_lengths for {tokens.size} lengths; expected "
                "one of each for every row. Give as many."
            )
        if ((prefixes < 0) | (prefixes > tokens)).any():
            row = int(np.flatnonzero((prefixes < 0) | (prefixes > tokens))[0])
            raise LayoutError(
                f"{call}: row {row} has {tokens[row]} tokens and a prefix of {prefixes[row]}; expected a prefix of 0 "
                "to all tokens. Pass lengths of whole rows, prompt plus response."
            )
        try:
            numbers: dict[Any, int] = {}
            of_row = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)
        except TypeError as error:
            raise LayoutError(f"{call}: groups hold {error}; expected labels, such as uids. Pass strings.") from error
        smallest = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(smallest, of_row, prefixes)
        order = np.argsort(of_row, kind="stable")
        first = np.append(True, np.diff(of_row[order]) != 0)[: order.size]
        shared = np.where(first, 0, smallest[of_row[order]])
        return cls(tokens + 0, order, np.where(shared < least, 0, shared))

    def take(self, rows: Rows) -> PrefixTree:
        """Returns the tree of some rows, which are numbered in the order given. Its branches are among those of this
        tree. `from_ids` of these rows may make others: where branches are close, a row may share up to `min_shared - 1`
        tokens less."""
        index = row_index(rows, self.num_rows, "PrefixTree.take")
        places = np.empty(self.num_rows, np.int64)
        places[self.order] = np.arange(self.num_rows)
        order = np.argsort(places[index], kind="stable")
        at = places[index][order]
        shared = np.zeros(at.size, np.int64)
        if at.size > 1:
            least = np.minimum.reduceat(np.append(self.shared, 0), at + 1)[:-1]  # of those after one, up to the next
            shared[1:] = np.where(np.diff(at) == 0, self.lengths[index][order][1:], least)
        return PrefixTree(self.lengths[index], order, shared)

    # ---------------------------------------------------------------- sizes

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return self.lengths.size

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of the tree."""
        return int(self.lengths.sum() - self.shared.sum())

    @cached_property
    def row_offsets(self) -> IntArray:
        """int64 [B + 1]: the first token of each row among those of all rows, one row after the other."""
        return cumulated(self.lengths)

    @cached_property
    def num_levels(self) -> int:
        """The number of levels that have nodes below them; 0 if rows share nothing."""
        nodes = self.nodes
        return int(nodes.levels[nodes.ends > nodes.starts + nodes.counts].max(initial=-1)) + 1

    # ---------------------------------------------------------------- tokens

    @cached_property
    def source(self) -> IntArray:
        """int64 [tokens of the tree]: the token of the rows that each of them is, the first that there is."""
        return ranges(self.row_offsets[self.order] + self.shared, self.lengths[self.order] - self.shared)

    @cached_property
    def of_row_token(self) -> IntArray:
        """int64 [tokens of all rows]: the token of the tree that each is."""
        out = np.empty(int(self.row_offsets[-1]), np.int64)
        path = np.empty(int(self.lengths.max(initial=0)), np.int64)  # of a row; the next keeps the part that it shares
        token = 0
        for row, shared in zip(self.order.tolist(), self.shared.tolist(), strict=True):
            begin, end = self.row_offsets[row : row + 2].tolist()
            length = end - begin
            path[shared:length] = np.arange(token, token + length - shared)
            out[begin:end] = path[:length]
            token += length - shared
        return out

    @cached_property
    def end(self) -> IntArray:
        """int64 [tokens of the tree]: token i sees token j if j <= i < end[j]."""
        return np.repeat(self.nodes.ends, self.nodes.counts)

    @cached_property
    def depth(self) -> IntArray:
        """int64 [tokens of the tree]: the place of each in its rows."""
        return ranges(self.nodes.depths, self.nodes.counts)

    @cached_property
    def nodes(self) -> PrefixNodes:
        """The nodes of the tree. The path to the last token of a row is a stack of nodes:

        row k shares s tokens   nodes from s on are closed; the one over s is cut there; the rest of the row is a node
        """
        path: list[list[int]] = []  # nodes [depth, depth after it, first token]
        closed: list[tuple[int, int, int, int]] = []  # first token, tokens, depth, end of the subtree
        token = 0
        for shared, length in zip(self.shared.tolist(), self.lengths[self.order].tolist(), strict=True):
            while path and path[-1][0] >= shared:
                depth, after, first = path.pop()
                closed.append((first, after - depth, depth, token))
            if path and path[-1][1] > shared:
                depth, after, first = path[-1]
                closed.append((first + shared - depth, after - shared, shared, token))
                path[-1][1] = shared
            if length > shared:
                path.append([shared, length, token])
                token += length - shared
        closed += [(first, after - depth, depth, token) for depth, after, first in path]
        table: IntArray = np.array(sorted(closed), np.int64).reshape(-1, 4)
        starts, counts, depths, ends = (table[:, column] for column in range(4))
        levels = np.arange(starts.size) - np.searchsorted(np.sort(ends), starts, side="right")
        return PrefixNodes(starts, counts, ends, depths, levels)


def _contracted(shared: IntArray, least: int) -> IntArray:
    """`shared` of a tree without branches of fewer than `least` tokens. Such a node is joined to each node below it.

    The branches that hold a row and the one before it are the minima of `shared` around it: the path from the root in a
    tree whose nodes are above larger ones (a Cartesian tree)."""
    values: list[int] = shared.tolist()
    above = [-1] * len(values)
    path: list[int] = []
    for k in range(1, len(values)):
        below = -1
        while path and values[path[-1]] > values[k]:
            below = path.pop()
        if below >= 0:
            above[below] = k
        above[k] = path[-1] if path else -1
        path.append(k)
    kept = [0] * len(values)
    ascending: list[int] = np.argsort(shared, kind="stable").tolist()
    for k in ascending:
        last = kept[above[k]] if above[k] >= 0 else 0
        kept[k] = values[k] if values[k] - last >= least else last
    return np.array(kept, np.int64)
