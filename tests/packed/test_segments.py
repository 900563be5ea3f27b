"""Segments against plain lists of (source, row)."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maskpack.packed.segments import Segments

Pair = tuple[int, int]
PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12)


def made(pairs: list[Pair]) -> Segments:
    source, row = np.array(pairs, np.int64).reshape(-1, 2).T
    return Segments.of_rows(source, row)


def pairs_of(segments: Segments) -> list[Pair]:
    """Read from the segments themselves."""
    return [
        (int(source), int(start) + place)
        for source, start, count in zip(segments.source, segments.start, segments.count, strict=True)
        for place in range(count)
    ]


def by_hand(pairs: list[Pair]) -> list[tuple[int, int, int]]:
    """(source, start, count) of the longest stretches."""
    found: list[tuple[int, int, int]] = []
    for source, row in pairs:
        if found and found[-1][0] == source and sum(found[-1][1:]) == row:
            found[-1] = (source, found[-1][1], found[-1][2] + 1)
        else:
            found.append((source, row, 1))
    return found


def check(segments: Segments, pairs: list[Pair]) -> None:
    columns = segments.source, segments.start, segments.count
    assert all(column.dtype == np.int64 and column.ndim == 1 for column in columns)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == by_hand(pairs)
    assert segments.num_rows == len(pairs)
    source, row = segments.by_row()
    assert list(zip(source.tolist(), row.tolist(), strict=True)) == pairs


@given(PAIRS, PAIRS, st.lists(st.integers(0, 5), min_size=4, max_size=4), st.data())
def test_rows(pairs: list[Pair], more: list[Pair], numbers: list[int], data: st.DataObject) -> None:
    """Whole, taken, joined, and of sources with other numbers: two may become one."""
    segments = made(pairs)
    before = [column.copy() for column in (segments.source, segments.start, segments.count)]
    check(segments, pairs)
    check(Segments.whole(len(pairs)), [(0, row) for row in range(len(pairs))])
    index = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=20)) if pairs else []
    check(segments.take(np.array(index, np.int64)), [pairs[place] for place in index])
    begin, end = sorted(data.draw(st.integers(0, len(pairs))) for _ in range(2))
    check(segments.take(slice(begin, end)), pairs[begin:end])
    own, same = np.array(numbers), np.arange(4)
    renamed = [(numbers[source], row) for source, row in pairs]
    check(Segments.cat([segments, made(more), segments], [own, same, same]), [*renamed, *more, *pairs])
    check(pickle.loads(pickle.dumps(segments)), pairs)
    for column, old in zip((segments.source, segments.start, segments.count), before, strict=True):
        assert column.tolist() == old.tolist(), "what is given is not changed"


def test_two_sources_that_become_one_join() -> None:
    one = made([(0, 0), (0, 1), (1, 2), (1, 3)])
    check(Segments.cat([one], [np.array([7, 7])]), [(7, row) for row in range(4)])


@given(PAIRS)
def test_shares(pairs: list[Pair]) -> None:
    shares, order = made(pairs).shares()
    assert [share.source for share in shares] == sorted({source for source, _ in pairs})
    assert all(type(share.source) is int for share in shares)
    for share in shares:
        assert share.rows.tolist() == [row for source, row in pairs if source == share.source]
    line = [(share.source, row) for share in shares for row in share.rows.tolist()]
    sources = [source for source, _ in pairs]
    assert (order is None) == (sources == sorted(sources))
    assert [line[place] for place in (range(len(line)) if order is None else order.tolist())] == pairs


def test_a_pickle_takes_few_bytes_a_segment() -> None:
    row = np.random.default_rng(0).permutation(5000)
    shuffled = Segments.of_rows(np.zeros(5000, np.int64), row)
    again = pickle.loads(pickle.dumps(shuffled))
    assert pairs_of(again) == [(0, int(number)) for number in row]
    assert len(pickle.dumps(shuffled)) < 4 * 5000 + 512
