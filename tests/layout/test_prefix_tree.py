"""PrefixTree against a naive trie: a set of prefixes, each a tuple of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import tree_of, trie

from maskpack.layout.prefix_tree import PrefixTree

many = settings(max_examples=max(150, settings.default.max_examples))
Row = tuple[Any, ...]


@st.composite
def tries(draw: st.DrawFn, most: int = 9) -> list[Row]:
    """Rows of which many are equal to another one up to some token: branches of any depth, equal rows, empty rows, and
    rows that are the beginning of another."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, most))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else ()
        kept = before[: draw(st.integers(0, len(before)))]
        rows.append(kept + tuple(draw(st.lists(st.integers(0, 2), max_size=6))))
    return rows


def common(rows: Sequence[Row]) -> int:
    """How many tokens all of them begin with."""
    return next(at for at in itertools.count() if len({row[: at + 1] for row in rows}) > 1 or at >= len(rows[0]))


def contracted(rows: Sequence[Row], depth: int, least: int) -> int:
    """The tokens after `depth` of a trie without branches of fewer than `least` tokens."""
    if len(rows) == 1:
        return len(rows[0]) - depth
    branch = common(rows)
    start = branch if branch - depth >= least else depth
    out = (start - depth) + sum(branch - start for row in rows if len(row) == branch)
    longer = [row for row in rows if len(row) > branch]
    below = [[row for row in longer if row[branch] == token] for token in {row[branch] for row in longer}]
    return out + sum(contracted(some, start, least) for some in below)


def shared_by_two(tree: PrefixTree) -> list[list[int]]:
    """[B][B]: how many tokens two rows have in common: the least of `shared` between them."""
    out = np.diag(tree.lengths)
    for i, j in itertools.combinations(range(tree.num_rows), 2):
        out[tree.order[i], tree.order[j]] = out[tree.order[j], tree.order[i]] = tree.shared[i + 1 : j + 1].min()
    return out.tolist()


# -------------------------------------------------------------------- the tokens


@many
@given(tries())
@example([])
@example([()])
@example([(), (1,), ()])
@example([(1, 2), (1, 2), (1, 2, 0), (1,)])
def test_the_tokens_of_a_tree_are_the_prefixes_of_its_rows(rows: list[Row]) -> None:
    check(tree_of(rows), rows)


@many
@given(tries(), st.data())
def test_positions_part_what_ids_share(rows: list[Row], data: st.DataObject) -> None:
    wide = data.draw(st.integers(1, 3))
    some = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=wide, max_size=wide).map(tuple)
    beside = [data.draw(st.lists(some, min_size=len(row), max_size=len(row))) for row in rows]
    positions = np.array([item for own in beside for item in own], np.int64).reshape(-1, wide)
    if wide == 1 and data.draw(st.booleans()):
        positions = positions[:, 0]
    ids = np.array([token for row in rows for token in row], np.int64)
    tree = PrefixTree.from_ids(ids, np.cumsum([0, *map(len, rows)]), positions, min_shared=1)
    check(tree, [tuple(zip(row, own, strict=True)) for row, own in zip(rows, beside, strict=True)])


def check(tree: PrefixTree, rows: Sequence[Row]) -> None:
    assert tree.num_rows == len(rows)
    assert tree.lengths.tolist() == [len(row) for row in rows]
    assert sorted(tree.order.tolist()) == list(range(len(rows)))
    neighbours = itertools.pairwise(tree.order.tolist())
    assert tree.shared.tolist() == [0, *(common([rows[i], rows[j]]) for i, j in neighbours)][: len(rows)]
    assert tree.num_tokens == len(trie(rows))
    assert tree.row_offsets.tolist() == [0, *itertools.accumulate(len(row) for row in rows)]
    flat = [row[: n + 1] for row in rows for n in range(len(row))]  # the prefix that each token of the rows ends
    of_tree: dict[int, Row] = dict(zip(tree.of_row_token.tolist(), flat, strict=True))
    assert [of_tree[token] for token in tree.of_row_token.tolist()] == flat
    assert sorted(of_tree) == list(range(tree.num_tokens))
    assert [flat[token] for token in tree.source.tolist()] == [of_tree[token] for token in range(tree.num_tokens)]
    assert tree.depth.tolist() == [len(of_tree[token]) - 1 for token in range(tree.num_tokens)]
    for i, j in itertools.product(range(tree.num_tokens), repeat=2):
        assert (j <= i < tree.end[j]) == (of_tree[i][: len(of_tree[j])] == of_tree[j])
    check_nodes(tree, rows, of_tree)
    for array in (tree.order, tree.shared, tree.lengths, tree.source, tree.of_row_token, tree.end, tree.depth):
        assert array.dtype == np.int64


def check_nodes(tree: PrefixTree, rows: Sequence[Row], of_tree: dict[int, Row]) -> None:
    """A node begins after a branch, and after the end of a row."""
    known = trie(rows)

    def begins(prefix: Row) -> bool:
        above = prefix[:-1]
        return not above or above in rows or sum(other[:-1] == above for other in known) > 1

    starts = [token for token in range(tree.num_tokens) if begins(of_tree[token])]
    assert tree.nodes.starts.tolist() == starts
    assert tree.nodes.counts.tolist() == np.diff([*starts, tree.num_tokens]).tolist()
    assert tree.nodes.ends.tolist() == [tree.end[token] for token in starts]
    assert tree.nodes.depths.tolist() == [len(of_tree[token]) - 1 for token in starts]
    above = [sum(begins(of_tree[token][:n]) for n in range(1, len(of_tree[token]))) for token in starts]
    assert tree.nodes.levels.tolist() == above


@many
@given(tries(), st.integers(1, 6))
@example([(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1), (0, 0)], 2)
def test_branches_have_at_least_min_shared_tokens(rows: list[Row], least: int) -> None:
    tree = tree_of(rows, least)
    assert tree.num_tokens == (contracted(rows, 0, least) if rows else 0)
    inner = tree.nodes.ends > tree.nodes.starts + tree.nodes.counts
    assert (tree.nodes.counts[inner] >= least).all()
    exact = shared_by_two(tree_of(rows))
    assert (np.array(shared_by_two(tree)) <= np.array(exact)).all()
    check_places(tree, rows)


def check_places(tree: PrefixTree, rows: Sequence[Row]) -> None:
    """Each row is on a path of the tree, whether or not it shares all that it could."""
    flat = [token for row in rows for token in row]
    assert [flat[token] for token in tree.source[tree.of_row_token].tolist()] == flat
    for row, (begin, end) in enumerate(itertools.pairwise(tree.row_offsets.tolist())):
        path = tree.of_row_token[begin:end]
        assert tree.depth[path].tolist() == list(range(len(rows[row])))
        for at, token in enumerate(path.tolist()):
            sees = [j for j in range(token + 1) if token < tree.end[j]]
            assert sees == path[: at + 1].tolist()


def test_branches_of_sixteen_tokens_by_default() -> None:
    for same, tokens in ((15, 32), (16, 18)):
        ids = [*range(same), 100, *range(same), 101]
        assert PrefixTree.from_ids(ids, [0, same + 1, 2 * same + 2]).num_tokens == tokens
        assert PrefixTree.from_groups([same + 1] * 2, ["a", "a"], [same] * 2).num_tokens == tokens


def test_many_rows_of_equal_ids_at_other_positions() -> None:
    """In order n log n: comparing each with each takes a minute."""
    rows, length = 40_000, 4
    positions = (np.arange(rows)[:, None] // 2 * 3 + np.arange(length)).reshape(-1)
    tree = PrefixTree.from_ids(np.ones(positions.size, int), np.arange(rows + 1) * length, positions, min_shared=1)
    assert tree.num_tokens == rows * length // 2


def test_a_deep_tree_does_not_recurse() -> None:
    rows = [tuple([0] * n) for n in range(3000)]
    tree = tree_of(rows)
    assert tree.num_tokens == 2999
    assert tree.nodes.starts.size == 2999
    assert tree.nodes.levels.tolist() == list(range(2999))
    assert tree_of(rows, 16).num_tokens < 3000 * 20


# -------------------------------------------------------------------- some rows


@many
@given(tries(), st.integers(1, 4), st.data())
def test_take(rows: list[Row], least: int, data: st.DataObject) -> None:
    """Two rows share what they shared, however often each is taken."""
    tree = tree_of(rows, least)
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    taken = tree.take(some)
    pairs = shared_by_two(tree)
    assert taken.lengths.tolist() == [len(rows[row]) for row in some]
    assert sorted(taken.order.tolist()) == list(range(len(some)))
    assert shared_by_two(taken) == [[pairs[i][j] for j in some] for i in some]
    check_places(taken, [rows[row] for row in some])
    if least == 1:
        check(taken, [rows[row] for row in some])


# -------------------------------------------------------------------- groups


@many
@given(st.data(), st.integers(1, 5))
def test_groups_share_the_shortest_prefix(data: st.DataObject, least: int) -> None:
    count = data.draw(st.integers(0, 9))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    prefix = [data.draw(st.integers(0, length)) for length in lengths]
    labels = data.draw(st.lists(st.sampled_from(("a", "b", 3, None)), min_size=count, max_size=count))
    tree = PrefixTree.from_groups(lengths, labels, prefix, min_shared=least)
    smallest = {label: min(p for p, own in zip(prefix, labels, strict=True) if own == label) for label in labels}
    pairs = shared_by_two(tree)
    for i, j in itertools.combinations(range(count), 2):
        shared = smallest[labels[i]] if labels[i] == labels[j] else 0
        assert pairs[i][j] == (shared if shared >= least else 0)
    assert tree.lengths.tolist() == lengths
    of_group = [n if n >= least else 0 for n in (smallest[label] for label in labels)]
    assert tree.num_tokens == sum(lengths) - sum(of_group) + sum(
        n if n >= least else 0 for label, n in smallest.items()
    )


def test_groups_and_ids_give_one_tree() -> None:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 10**6, n)) for n in (20, 33)]
    rows = [prompts[group] + tuple(rng.integers(0, 10**6, 5 + row)) for row, group in enumerate([0, 1, 1, 0, 1])]
    by_ids = tree_of(rows, 16)
    by_groups = PrefixTree.from_groups([len(row) for row in rows], list("xyyxy"), [20, 33, 33, 20, 33])
    assert shared_by_two(by_ids) == shared_by_two(by_groups)
    lengths, prefix = [len(row) for row in rows], [20, 33, 33, 20, 33]
    for labels in (np.array(list("xyyxy")), torch.tensor([0, 1, 1, 0, 1]), tuple("xyyxy"), [0, 1, 1, 0, 1]):
        assert PrefixTree.from_groups(lengths, labels, prefix).num_tokens == by_ids.num_tokens


def test_a_tree_has_arrays_of_its_own() -> None:
    ids, bounds, lengths, prefixes = (np.array(x) for x in ([1, 2, 1, 3], [0, 2, 4], [2, 2], [1, 1]))
    by_ids = PrefixTree.from_ids(ids, bounds, min_shared=1)
    by_groups = PrefixTree.from_groups(lengths, ["a", "a"], prefixes, min_shared=1)
    for array in (ids, bounds, lengths, prefixes):
        array[:] = 0
    for tree in (by_ids, by_groups):
        assert (tree.lengths.tolist(), tree.num_tokens, tree.row_offsets.tolist()) == ([2, 2], 3, [0, 2, 4])
