"""Encodings that take words from other rows, other columns or other fields, against plain lists of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch
from tensordict import TensorDict
from test_encodings import DTYPES, FAMILIES, Rows, assert_holds, bounds_of, every, rows_like, u1, u2, words_of

from maskpack import MaskNestingSpec, compress, decompress, unnest
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps
from maskpack.packed.references import (
    KINDS,
    WHOLE,
    Columns,
    Field,
    Joined,
    Repeated,
    Same,
    alternating,
    arrays_of,
    join_whole,
    kind_of,
    likely_repeated,
    nbytes,
    repeated,
)

INT16 = np.dtype(np.int16)


@st.composite
def repeated_rows(draw: st.DrawFn) -> tuple[np.dtype[Any], Rows]:
    """Rows drawn with repeats from a few, some of them of one length."""
    dtype = draw(st.sampled_from(DTYPES))
    pool = draw(rows_like(draw(st.sampled_from(FAMILIES)), dtype)) or [[]]
    pool += [row[::-1] for row in pool]
    return dtype, draw(st.lists(st.sampled_from(pool), max_size=8))


def stored_as(rows: Rows, dtype: Any) -> list[Repeated]:
    """The rows once each, in every encoding that holds them; none where all differ."""
    found = [repeated(words_of(rows, dtype), bounds_of(rows), lambda words, bounds: Plain(words))]
    distinct = list(dict.fromkeys(map(tuple, rows)))
    index = np.array([distinct.index(tuple(row)) for row in rows], np.uint8)
    found += [Repeated(index, encoding) for encoding in every([list(row) for row in distinct], dtype)]
    return [encoding for encoding in found if encoding is not None]


# -------------------------------------------------------------------- Repeated


@given(repeated_rows())
def test_repeated_round_trip(case: tuple[np.dtype[Any], Rows]) -> None:
    dtype, rows = case
    made = repeated(words_of(rows, dtype), bounds_of(rows), lambda words, bounds: Plain(words))
    distinct = list(dict.fromkeys(map(tuple, rows)))
    assert (made is None) == (len(distinct) == len(rows))
    if made is not None:
        assert made.index.tolist() == [distinct.index(tuple(row)) for row in rows]
        assert made.index.dtype == np.uint8
        assert_holds(made.rows, [list(row) for row in distinct], dtype)
    for encoding in stored_as(rows, dtype):
        assert_holds(encoding, rows, dtype)
        encoding.decode(dtype, bounds_of(rows))[...] = 77
        assert_holds(encoding, rows, dtype)


@given(repeated_rows(), st.data())
def test_repeated_slice_and_take(case: tuple[np.dtype[Any], Rows], data: st.DataObject) -> None:
    dtype, rows = case
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=7)) if rows else []
    for encoding in stored_as(rows, dtype):
        part = encoding.slice(start, stop, bounds_of(rows))
        assert_holds(part, rows[start:stop], dtype)
        assert_holds(encoding.take(np.array(picked, np.int64), bounds_of(rows)), [rows[at] for at in picked], dtype)
        back = part.take(np.arange(stop - start)[::-1], bounds_of(rows[start:stop]))
        assert_holds(back, rows[start:stop][::-1], dtype)
        assert_holds(encoding, rows, dtype)


@given(repeated_rows(), st.data())
def test_repeated_parts_join(case: tuple[np.dtype[Any], Rows], data: st.DataObject) -> None:
    dtype, rows = case
    spans = st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows))).map(sorted)
    groups = data.draw(st.lists(spans, min_size=1, max_size=4))
    chosen = [rows[start:stop] for start, stop in groups]
    for encoding in stored_as(rows, dtype):
        parts = [encoding.slice(start, stop, bounds_of(rows)) for start, stop in groups]
        joined = Repeated.join(parts, [bounds_of(part) for part in chosen])
        assert joined is not None
        whole = [row for part in chosen for row in part]
        assert_holds(joined, whole, dtype)
        order = list(range(len(whole)))[::-2]
        assert_holds(joined.take(np.array(order, np.int64), bounds_of(whole)), [whole[at] for at in order], dtype)


def test_repeated_index_of_two_bytes() -> None:
    rows = [[number, number] for number in range(300)] * 2
    made = repeated(words_of(rows, INT16), bounds_of(rows), lambda words, bounds: Plain(words))
    assert made is not None
    assert made.index.dtype == np.uint16
    assert_holds(made, rows, INT16)
    part = made.slice(0, 20, bounds_of(rows))
    assert part.index.dtype == np.uint8
    joined = Repeated.join([part] * 20, [bounds_of(rows[:20])] * 20)
    assert joined is not None
    assert joined.index.dtype == np.uint16
    assert_holds(joined, rows[:20] * 20, INT16)


def test_a_slice_stores_only_the_rows_that_it_has() -> None:
    rows = [[number] * 50 + [number + 1] for number in (0, 0, 10, 10, 20, 20, 30)]
    made = repeated(words_of(rows, np.int64), bounds_of(rows), lambda words, bounds: Plain(words))
    assert made is not None
    part = made.slice(2, 6, bounds_of(rows))
    assert nbytes(part) == 4 + 2 * 51 * 8
    assert isinstance(part.rows, Plain)
    assert np.shares_memory(part.rows.words, made.rows.words)
    assert nbytes(made.take(np.array([6, 6, 0]), bounds_of(rows))) == 3 + 2 * 51 * 8


def test_repeated_parts_of_different_kinds_do_not_join() -> None:
    parts = [Repeated(u1(0, 0), Plain(u1(1, 2))), Repeated(u1(0, 0), Runs(u1(1), u1(), u1(1)))]
    assert Repeated.join(parts, [np.array([0, 2, 4])] * 2) is None


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        (Repeated(u1(0, 1), Plain(u2(1, 2, 3).view(INT16))), "index is"),
        (Repeated(u1(0, 1, 0, 0), Plain(u2(1, 2).view(INT16))), "index is"),
        (Repeated(np.array([0, 1, 0], np.int8), Plain(u2(1, 2).view(INT16))), "index is"),
        (Repeated(u1(0, 1, 0).astype(np.float32), Plain(u2(1, 2).view(INT16))), "index is"),
        (Repeated(u1(0, 1, 3), Plain(u2(1, 2).view(INT16))), "reaches row 3 for 3 rows"),
        (Repeated(np.array([0, 1, 2**64 - 1], np.uint64), Plain(u2(1, 2).view(INT16))), "reaches row"),
        (Repeated(u1(0, 0, 0), Plain(u2(1, 2).view(INT16))), "different lengths"),
        (Repeated(u1(0, 2, 0), Plain(u2(1, 2).view(INT16))), "used by no row"),
        (Repeated(u1(0, 1, 0), Plain(u2(1, 2, 3).view(INT16))), "words"),
        (Repeated(u1(0, 1, 0), Plain(u2(1, 2))), "words"),
        (Columns(()), "0 columns"),
        (Columns((Plain(u2(1).view(INT16)),) * 3), "3 columns"),
        (Columns((Plain(u2(1, 2).view(INT16)), Plain(u2(1).view(INT16)))), "words"),
        (Columns((Plain(u2(1, 2).view(INT16)), Plain(u2(1, 2)))), "words"),
    ],
)
def test_problems_are_found(encoding: Any, text: str) -> None:
    """For rows of 2, 0 and 2 words."""
    assert text in (encoding.problem(INT16, np.array([0, 2, 2, 4])) or "nothing is wrong")


def test_no_rows_and_one_row_too_many() -> None:
    none = np.array([0])
    assert Repeated(u1(), Plain(u2().view(INT16))).problem(INT16, none) is None
    assert "index" in (Repeated(u1(0), Plain(u2().view(INT16))).problem(INT16, none) or "")
    assert "words" in (Repeated(u1(), Plain(u2(1).view(INT16))).problem(INT16, none) or "")


# -------------------------------------------------------------------- Columns


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.dtype[Any], list[Rows], Rows]:
    """Columns with equal row lengths, and the rows of their elements."""
    dtype = draw(st.sampled_from(DTYPES))
    k = draw(st.integers(1, 4))
    columns = [draw(rows_like(draw(st.sampled_from(FAMILIES)), dtype)) for _ in range(k)]
    count = min(map(len, columns))
    lengths = [min(len(column[row]) for column in columns) for row in range(count)]
    columns = [[row[:length] for row, length in zip(column, lengths, strict=False)] for column in columns]
    return dtype, columns, [list(itertools.chain(*zip(*lines, strict=True))) for lines in zip(*columns, strict=True)]


@given(tables(), st.data())
def test_columns(case: tuple[np.dtype[Any], list[Rows], Rows], data: st.DataObject) -> None:
    dtype, columns, rows = case
    encoding = Columns(tuple(data.draw(st.sampled_from(every(column, dtype))) for column in columns))
    assert_holds(encoding, rows, dtype)
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    part = encoding.slice(start, stop, bounds_of(rows))
    assert_holds(part, rows[start:stop], dtype)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    taken = encoding.take(np.array(picked, np.int64), bounds_of(rows))
    chosen = [rows[at] for at in picked]
    assert_holds(taken, chosen, dtype)
    joined = Columns.join([part, encoding, taken], [bounds_of(group) for group in (rows[start:stop], rows, chosen)])
    assert joined is not None
    assert_holds(joined, rows[start:stop] + rows + chosen, dtype)
    encoding.decode(dtype, bounds_of(rows))[...] = 77
    assert_holds(encoding, rows, dtype)


def test_columns_of_different_kinds_do_not_join() -> None:
    parts = [Columns((Plain(u1(1)), Plain(u1(1)))), Columns((Plain(u1(1)), Runs(u1(1), u1(), u1(1))))]
    assert Columns.join(parts, [np.array([0, 2])] * 2) is None
    assert Columns.join(parts[:1] * 2, [np.array([0, 2])] * 2) is not None


# -------------------------------------------------------------------- Same and Joined


def shared_batch(rows: int = 5) -> TensorDict:
    """`whole` is `head` and then `tail` in each row, `again` is `tail`; lengths differ, also 0."""
    p, r = torch.arange(rows) % 4, (torch.arange(rows) * 2) % 6
    places = torch.arange(8)
    mask = (places >= 3 - p[:, None]) & (places < 3 + r[:, None])
    ids = torch.where(mask, torch.arange(rows * 8).view(rows, 8) ** 2 * 7919 % 1009 + 1, 0)
    return TensorDict(
        {
            "whole": ids,
            "again": ids[:, 3:].clone(),
            "head": ids[:, :3].clone(),
            "tail": ids[:, 3:].clone(),
            "m": mask,
            "hm": mask[:, :3].clone(),
            "tm": mask[:, 3:].clone(),
        },
        [rows],
    )


SHARED = {
    "whole": MaskNestingSpec("m", hints=("join:head,tail",)),
    "head": MaskNestingSpec("hm"),
    "tail": MaskNestingSpec("tm"),
    "again": MaskNestingSpec("tm"),
    "m": MaskNestingSpec("m"),
    "hm": MaskNestingSpec("hm"),
    "tm": MaskNestingSpec("tm"),
}


def test_same_and_joined_fields_take_their_words_from_others() -> None:
    batch = shared_batch()
    packed = compress(batch, registry=SHARED)
    assert packed.fields[("whole",)] == Joined(("head",), ("tail",))
    assert packed.fields[("tail",)] == Same(("again",))
    assert nbytes(packed.fields[("whole",)]) == nbytes(packed.fields[("tail",)]) == 0
    assert_same_batch(decompress(packed), batch)
    for names in (["whole"], ["tail"], ["whole", "tail"]):
        assert_same_batch(decompress(packed, *names), batch.select(*names))
    for name in ("whole", "tail"):
        nested = decompress(packed, name, format="nested")[name]
        mask = oracle.mask_rows(batch["m" if name == "whole" else "tm"])
        oracle.assert_same_tensor(nested.values(), oracle.pack(batch[name], mask))


@given(st.lists(st.integers(0, 4), max_size=7), st.integers(0, 5), st.integers(0, 5))
def test_same_and_joined_fields_follow_their_rows(rows: list[int], start: int, stop: int) -> None:
    batch = shared_batch()
    packed = compress(batch, registry=SHARED)
    span = list(range(5))[start:stop]
    assert_same_batch(decompress(packed[rows]), oracle.take_rows(batch, rows))
    assert_same_batch(decompress(packed[start:stop]), oracle.take_rows(batch, span))
    joined = type(packed).cat([packed[rows], packed[start:stop], packed])
    assert joined.fields[("whole",)] == Joined(("head",), ("tail",))
    assert joined.fields[("tail",)] == Same(("again",))
    assert_same_batch(decompress(joined), oracle.take_rows(batch, [*rows, *span, *range(5)]))


@pytest.mark.parametrize("change", ["whole", "head", "tail", "again", "all"])
def test_parts_that_share_and_parts_that_do_not(change: str) -> None:
    """One batch has a word of its own in some field, so that fewer fields follow from others there."""
    first, other = shared_batch(), shared_batch()
    for name in ("whole", "head", "tail", "again") if change == "all" else (change,):
        mask = other[{"whole": "m", "head": "hm"}.get(name, "tm")]
        other[name][3] = torch.where(mask[3], 5000 + len(name), 0)
    for parts in ([first, other], [other, first], [other, other]):
        packed = type(compress(first, registry=SHARED)).cat([compress(part, registry=SHARED) for part in parts])
        want = TensorDict({name: torch.cat([part[name] for part in parts]) for name in first.keys()}, [10])  # noqa: SIM118
        assert_same_batch(decompress(packed), want)
        assert_same_batch(decompress(packed[[8, 3, 3, 0]]), oracle.take_rows(want, [8, 3, 3, 0]))


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("dense", ["head", "tail", "again"])
def test_a_source_that_became_dense_is_no_source(dense: str) -> None:
    """A value under the mask in one part makes the field dense in the whole; what took words from it has its own."""
    first, other = shared_batch(), shared_batch()
    other[dense][0, 0 if dense == "head" else 4] = 77
    assert not other["hm" if dense == "head" else "tm"][0, 0 if dense == "head" else 4]
    for parts in ([first, other], [other, first]):
        packed = type(compress(first, registry=SHARED)).cat([compress(part, registry=SHARED) for part in parts])
        want = TensorDict({name: torch.cat([part[name] for part in parts]) for name in first.keys()}, [10])  # noqa: SIM118
        assert_same_batch(decompress(packed), want)
        assert_same_batch(decompress(packed[[9, 1, 0]]), oracle.take_rows(want, [9, 1, 0]))


def test_what_same_fields_give_is_their_own() -> None:
    batch = shared_batch()
    packed = compress(batch, registry=SHARED)
    for name in ("again", "tail", "whole", "head"):
        out = decompress(packed)
        out[name].fill_(-1)
        assert_same_batch(out.exclude(name), batch.exclude(name))
        nested = decompress(packed, format="nested")
        nested[name].values().fill_(-1)
        assert_same_batch(unnest(nested).exclude(name), batch.exclude(name))
    assert_same_batch(decompress(packed), batch)


# -------------------------------------------------------------------- helpers


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 9), max_size=3)), max_size=5)
)
def test_alternating(pairs: list[tuple[list[int], list[int]]]) -> None:
    heads, tails = [head for head, _ in pairs], [tail for _, tail in pairs]
    fields = [Field(words_of(rows, INT16), bounds_of(rows)) for rows in (heads, tails)]
    got = alternating(*fields)
    assert got.dtype == INT16
    assert got.tolist() == [word for head, tail in pairs for word in [*head, *tail]]
    assert not any(np.shares_memory(got, field.words) for field in fields)


def test_names_and_sizes() -> None:
    narrow = Narrow(u2(1, 2), u1(0, 1), 0)
    steps = Steps(Runs(u1(1), u1(), u1(3)))
    assert kind_of(Plain(u1(1))) == "plain"
    assert kind_of(Repeated(u1(0, 0), narrow)) == "repeated narrow"
    assert kind_of(Columns((narrow, steps, narrow))) == "columns narrow steps"
    assert kind_of(Same(("a", "b"))) == "same as a/b"
    assert kind_of(Joined(("a", "b"), ("c",))) == "a/b + c"
    assert nbytes(narrow) == 6
    assert nbytes(Repeated(u1(0, 0), narrow)) == 8
    assert nbytes(Columns((narrow, steps, narrow))) == 14
    assert [array.tolist() for array in arrays_of(Columns((steps, narrow)))] == [[1], [], [3], [1, 2], [0, 1]]
    assert nbytes(Same(("a",))) == nbytes(Joined(("a",), ("b",))) == 0


def test_every_encoding_has_its_name() -> None:
    kinds = (Plain, Narrow, Bits, Runs, Ramp, Steps, Sparse, Repeated, Columns, Same, Joined)
    assert {kind.__name__.lower(): kind for kind in kinds} == KINDS
    assert [KINDS[name] for name in WHOLE] == list(kinds[:7])


def test_join_whole_needs_one_kind() -> None:
    parts: Sequence[Any] = [Plain(u1(1)), Runs(u1(1), u1(), u1(1))]
    bounds = [np.array([0, 1])] * 2
    assert join_whole(parts, bounds) is None
    assert join_whole(parts[::-1], bounds) is None
    joined = join_whole([parts[0]] * 2, bounds)
    assert isinstance(joined, Plain)
    assert joined.words.tolist() == [1, 1]


def test_a_glance_finds_repeated_rows() -> None:
    rng = np.random.default_rng(0)
    group = [rng.integers(0, 10**6, length).tolist() for length in (9, 12, 5, 0)]
    rows = [row for row in group for _ in range(4)]
    assert likely_repeated(words_of(rows, np.int64), bounds_of(rows))
    odd = [rng.integers(0, 10**6, 9).tolist() for _ in range(16)]
    for lines in (odd, rows[:1], [], [[], []], [[1], [1], [1]]):
        assert not likely_repeated(words_of(lines, np.int64), bounds_of(lines))
