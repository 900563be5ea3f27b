"""The encodings of one field, against plain lists of rows: every word back, whatever happens to the rows between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps

DTYPES = tuple(np.dtype(name) for name in ("uint8", "int16", "int32", "int64"))
KINDS = (Plain, Narrow, Bits, Runs, Ramp, Steps, Sparse)
ALWAYS_JOIN = (Plain, Runs, Steps, Sparse)
Rows = list[list[int]]

# -------------------------------------------------------------------- rows of words


def bounds_of(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([0, *itertools.accumulate(len(row) for row in rows)], np.int64)


def words_of(rows: Sequence[Sequence[int]], dtype: Any) -> np.ndarray:
    return np.array([word for row in rows for word in row], dtype)


def wrapped(number: int, dtype: np.dtype[Any]) -> int:
    """A Python number as a word of this dtype: the bits that fit."""
    info, size = np.iinfo(dtype), 1 << 8 * dtype.itemsize
    return (number - int(info.min)) % size + int(info.min)


def any_word(dtype: np.dtype[Any]) -> st.SearchStrategy[int]:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return st.one_of(st.sampled_from([0, 1, low, low + 1, high - 1, high]), st.integers(low, high))


@st.composite
def rows_like(draw: st.DrawFn, kind: str, dtype: np.dtype[Any]) -> Rows:
    """Rows, also empty ones and none at all, with the regularity that an encoding is for."""
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 8, 9, 17]), max_size=5))
    word = any_word(dtype)
    if kind == "any":
        return [draw(st.lists(word, min_size=length, max_size=length)) for length in lengths]
    if kind == "two":
        pair = st.sampled_from([draw(word), draw(word)])
        return [draw(st.lists(pair, min_size=length, max_size=length)) for length in lengths]
    if kind == "narrow":
        span = min(draw(st.sampled_from([1, 254, 255, 256, 65_535, 65_536, 2**24 - 1, 2**24])), 2**31)
        base = draw(word)
        near = st.integers(0, span).map(lambda more: min(base + more, int(np.iinfo(dtype).max)))
        return [draw(st.lists(near, min_size=length, max_size=length)) for length in lengths]
    if kind == "sparse":
        odd = st.one_of(st.just(0), st.just(0), st.just(0), word)
        return [draw(st.lists(odd, min_size=length, max_size=length)) for length in lengths]
    if kind == "ramp":
        step = draw(st.one_of(st.sampled_from([0, 1, -1]), word))
        starts = [draw(word) for _ in lengths]
        return [
            [wrapped(first + place * step, dtype) for place in range(length)]
            for first, length in zip(starts, lengths, strict=True)
        ]
    pool = [draw(word) for _ in range(2)]
    pieces = [draw(st.lists(st.tuples(st.sampled_from(pool), st.integers(1, 9)), max_size=3)) for _ in lengths]
    rows = [[value for value, count in row for _ in range(count)] for row in pieces]
    if kind == "runs":
        return rows
    return [[wrapped(word, dtype) for word in itertools.accumulate(row)] for row in rows]


FAMILIES = ("any", "two", "narrow", "sparse", "ramp", "runs", "steps")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.dtype[Any], Rows]:
    dtype = draw(st.sampled_from(DTYPES))
    return dtype, draw(rows_like(draw(st.sampled_from(FAMILIES)), dtype))


def encoded(kind: Any, rows: Rows, dtype: Any) -> Any:
    words = words_of(rows, dtype)
    return Plain(words) if kind is Plain else kind.encode(words, bounds_of(rows))


def every(rows: Rows, dtype: Any) -> list[Any]:
    """The rows in every encoding that holds them."""
    made = [encoded(kind, rows, dtype) for kind in KINDS]
    return [encoding for encoding in made if encoding is not None]


def arrays(encoding: Any) -> list[np.ndarray]:
    values = [getattr(encoding, field.name) for field in dataclasses.fields(encoding)]
    nested = [array for value in values if dataclasses.is_dataclass(value) for array in arrays(value)]
    return [value for value in values if isinstance(value, np.ndarray)] + nested


def assert_holds(encoding: Any, rows: Rows, dtype: np.dtype[Any]) -> None:
    """It says nothing is wrong with it, and decodes to these rows."""
    bounds = bounds_of(rows)
    assert encoding.problem(dtype, bounds) is None
    got = encoding.decode(dtype, bounds)
    assert got.dtype == dtype
    assert got.shape == (bounds[-1],)
    assert got.tolist() == [word for row in rows for word in row]


# -------------------------------------------------------------------- there and back

SEVENTEEN = [0] * 8 + [1] * 9


@given(cases())
@example((np.dtype(np.int64), [[-(2**63), 2**63 - 1], [], [0, -1, -(2**63)]]))
@example((np.dtype(np.int64), [[2**63 - 1, -(2**63), 1 - 2**63]]))
@example((np.dtype(np.uint8), [[254, 255, 0, 1]]))
@example((np.dtype(np.int32), []))
@example((np.dtype(np.int32), [[], []]))
@example((np.dtype(np.int16), [[], [5], []]))
@example((np.dtype(np.int16), [SEVENTEEN, [], SEVENTEEN[::-1]]))
def test_round_trip(case: tuple[np.dtype[Any], Rows]) -> None:
    dtype, rows = case
    before = words_of(rows, dtype)
    for kind in KINDS:
        words = before.copy()
        encoding = Plain(words) if kind is Plain else kind.encode(words, bounds_of(rows))
        assert words.tolist() == before.tolist()
        if encoding is not None:
            assert_holds(encoding, rows, dtype)


@given(cases())
def test_decoded_words_belong_to_the_caller(case: tuple[np.dtype[Any], Rows]) -> None:
    """Of all but Plain; who decodes the others writes into what it got."""
    dtype, rows = case
    for encoding in every(rows, dtype)[1:]:
        got = encoding.decode(dtype, bounds_of(rows))
        assert got.flags.writeable
        got[...] = 77
        assert_holds(encoding, rows, dtype)


@given(cases(), st.data())
def test_slice_and_take(case: tuple[np.dtype[Any], Rows], data: st.DataObject) -> None:
    dtype, rows = case
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=7)) if rows else []
    for encoding in every(rows, dtype):
        part = encoding.slice(start, stop, bounds_of(rows))
        taken = encoding.take(np.array(picked, np.int64), bounds_of(rows))
        assert type(part) is type(taken) is type(encoding)
        assert_holds(part, rows[start:stop], dtype)
        assert_holds(taken, [rows[row] for row in picked], dtype)
        assert_holds(encoding, rows, dtype)
        back = taken.take(np.arange(len(picked))[::-1], bounds_of([rows[row] for row in picked]))
        assert_holds(back, [rows[row] for row in picked[::-1]], dtype)
        again = part.slice(0, (stop - start) // 2, bounds_of(rows[start:stop]))
        assert_holds(again, rows[start:stop][: (stop - start) // 2], dtype)
        assert_holds(part.take(np.zeros(0, np.int64), bounds_of(rows[start:stop])), [], dtype)


@given(cases(), st.data())
def test_parts_of_one_encoding_join(case: tuple[np.dtype[Any], Rows], data: st.DataObject) -> None:
    """Slices, also of no rows, and rows taken in any order: they have one form, so that no join gives up."""
    dtype, rows = case
    picks = st.lists(st.integers(0, len(rows) - 1), max_size=4) if rows else st.just([])
    spans = st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows))).map(sorted)
    groups = data.draw(st.lists(st.one_of(picks, spans.map(tuple)), min_size=1, max_size=4))
    chosen = [rows[group[0] : group[1]] if type(group) is tuple else [rows[row] for row in group] for group in groups]
    for encoding in every(rows, dtype):
        parts = [
            encoding.slice(*group, bounds_of(rows))
            if type(group) is tuple
            else encoding.take(np.array(group, np.int64), bounds_of(rows))
            for group in groups
        ]
        joined = type(encoding).join(parts, [bounds_of(part) for part in chosen])
        assert joined is not None
        assert_holds(joined, [row for part in chosen for row in part], dtype)


@given(st.sampled_from(DTYPES), st.sampled_from(FAMILIES), st.data())
def test_join_of_parts_encoded_apart(dtype: np.dtype[Any], family: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(rows_like(family, dtype), min_size=1, max_size=4))
    for kind in KINDS:
        held = [(encoding, rows) for rows in parts if (encoding := encoded(kind, rows, dtype)) is not None]
        if held:
            encodings, groups = zip(*held, strict=True)
            joined = kind.join(encodings, [bounds_of(rows) for rows in groups])
            assert joined is not None or (kind not in ALWAYS_JOIN and len(held) > 1)
            if joined is not None:
                rows = [row for group in groups for row in group]
                assert_holds(joined, rows, dtype)
                order = list(range(len(rows)))[::-2]
                taken = joined.take(np.array(order, np.int64), bounds_of(rows))
                assert_holds(taken, [rows[row] for row in order], dtype)


@pytest.mark.parametrize("kind", ALWAYS_JOIN)
def test_join_of_parts_that_hold_one_entry_and_many(kind: Any) -> None:
    """Where all entries are equal in one part and not in the other, or equal to others, or where there are none."""
    dtype = np.dtype(np.int64)
    one, other, mixed = [[0] * 6] * 3, [[0, 0, 0, 0, 0, -7]] * 2, [[0] * 4, [], [0, 0, 0, 300, 0, 0], [2**40]]
    none: Rows = [[], []]
    for order in itertools.product((one, other, mixed, none), repeat=3):
        held = [(encoding, rows) for rows in order if (encoding := encoded(kind, rows, dtype)) is not None]
        if held:
            encodings, groups = zip(*held, strict=True)
            joined = kind.join(encodings, [bounds_of(rows) for rows in groups])
            assert_holds(joined, [row for group in groups for row in group], dtype)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_nothing_joins_what_has_rows(kind: Any, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = [[3, 3, 3, 3], [], [3, 3, 3]]
    whole = encoded(kind, rows, dtype)
    if whole is None:
        assert kind in (Narrow, Sparse)
        return
    nothing = whole.slice(1, 2, bounds_of(rows))
    for parts, groups in (([nothing, whole], [[[]], rows]), ([whole, nothing, whole], [rows, [[]], rows])):
        joined = kind.join(parts, [bounds_of(group) for group in groups])
        assert_holds(joined, [row for group in groups for row in group], dtype)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Narrow, [[7000, 7001]], [[9000, 9001]]),
        (Narrow, [[3, 4]], [[3, 300]]),
        (Narrow, [[3, 65_536]], [[3, 65_535]]),
        (Bits, [[0, 1]], [[0, 2]]),
        (Bits, [[1, 1]], [[0, 1]]),
        (Ramp, [[3, 4, 5]], [[3, 5, 7]]),
    ],
)
def test_parts_of_different_forms_do_not_join(kind: Any, one: Rows, other: Rows) -> None:
    for order in ([one, other], [other, one], [one, one, other]):
        parts = [encoded(kind, rows, np.int64) for rows in order]
        assert kind.join(parts, [bounds_of(rows) for rows in order]) is None


# -------------------------------------------------------------------- what each one takes


def pieces(row: Sequence[int]) -> list[list[int]]:
    return [list(group) for _, group in itertools.groupby(row)]


def stepped(row: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
    return [wrapped(b - a, dtype) for a, b in itertools.pairwise([0, *row])]


@given(cases())
def test_each_takes_what_it_is_for(case: tuple[np.dtype[Any], Rows]) -> None:
    dtype, rows = case
    words = [word for row in rows for word in row]
    inner = {step for row in rows for step in stepped(row, dtype)[1:]}
    span = max(words, default=0) - min(words, default=0)

    def few(lines: Rows) -> bool:
        return bool(words) and 2 * sum(len(pieces(line)) for line in lines) <= len(words) + 2 * len(lines)

    def takes(kind: Any) -> bool:
        return encoded(kind, rows, dtype) is not None

    assert takes(Bits) == (1 <= len(set(words)) <= 2)
    assert takes(Runs) == few(rows)
    assert takes(Steps) == few([stepped(row, dtype) for row in rows])
    assert takes(Ramp) == (len(inner) == 1)
    assert takes(Sparse) == (2 * sum(word != 0 for word in words) <= len(words))
    sizes = [size for size in (1, 2, 3, 4) if span < 256**size]
    assert takes(Narrow) == (bool(words) and bool(sizes) and sizes[0] < dtype.itemsize)


def test_runs_by_hand() -> None:
    runs = encoded(Runs, [[5, 5, 5, 0, 0], [], [7, 7, 7]], np.int64)
    assert (runs.pieces.tolist(), runs.counts.tolist(), runs.values.tolist()) == ([2, 0, 1], [3], [5, 0, 7])
    assert [array.dtype.name for array in arrays(runs)] == ["uint8", "uint8", "int8"]
    ones = encoded(Runs, [[-1] * 300, [-1] * 70_000, [-1] * 3], np.int32)
    assert (ones.pieces.tolist(), ones.counts.tolist(), ones.values.tolist()) == ([1], [], [-1])
    long = encoded(Runs, [[0] * 300 + [2**40]], np.int64)
    assert (long.counts.tolist(), long.counts.dtype, long.values.dtype) == ([300], np.uint16, np.int64)


@pytest.mark.parametrize(
    ("word", "itemsize"),
    [(127, 1), (128, 2), (-128, 1), (-129, 2), (32_767, 2), (32_768, 4), (-32_768, 2), (-32_769, 4),
     (2**31 - 1, 4), (2**31, 8), (-(2**31), 4), (-(2**31) - 1, 8), (2**63 - 1, 8), (-(2**63), 8)],
)  # fmt: skip
def test_words_in_as_few_bytes_as_hold_them(word: int, itemsize: int) -> None:
    dtype = np.dtype(np.int64)
    for rows in ([[0, 0, 0, word, word, word]], [[word] * 5]):
        runs = encoded(Runs, rows, dtype)
        assert (runs.values.dtype.kind, runs.values.itemsize) == ("i", itemsize)
        assert_holds(runs, rows, dtype)
    rows = [[word, wrapped(word + 1, dtype)], [0, 1]]
    ramp = encoded(Ramp, rows, dtype)
    assert (ramp.firsts.dtype.kind, ramp.firsts.itemsize) == ("i", itemsize)
    assert_holds(ramp, rows, dtype)


@pytest.mark.parametrize("length", [255, 256, 257, 65_535, 65_536, 70_000])
def test_counts_and_places_beyond_a_byte(length: int) -> None:
    dtype = np.dtype(np.uint8)
    rows, short = [[0] * length + [1] * length, [1], [0] * 3, [0] * length + [9]], [[0, 0, 0, 1]]
    for kind in (Runs, Steps, Sparse, Bits):
        made, small = encoded(kind, rows[:3], dtype), encoded(kind, short, dtype)
        assert_holds(made, rows[:3], dtype)
        assert_holds(kind.join([small, made], [bounds_of(short), bounds_of(rows[:3])]), short + rows[:3], dtype)
        order = np.array([2, 0, 1, 0])
        assert_holds(made.take(order, bounds_of(rows[:3])), [rows[row] for row in order], dtype)
    assert_holds(encoded(Sparse, rows[3:], dtype), rows[3:], dtype)


def test_bits_by_hand() -> None:
    bits = encoded(Bits, [[7, -2, -2, 7, 7, -2, -2, -2, 7], [7], []], np.int16)
    assert bits.words.tolist() == [-2, 7]
    assert bits.words.dtype == np.int16
    assert [f"{byte:08b}" for byte in bits.bits] == ["10011000", "10000000", "10000000"]


@pytest.mark.parametrize(
    ("rows", "low", "high", "base"),
    [
        ([[7000, 7255]], (1, [0, 255]), [], 7000),
        ([[3, 255]], (1, [3, 255]), [], 0),
        ([[3, 256]], (1, [0, 253]), [], 3),
        ([[-1, 65_534]], (2, [0, 65_535]), [], -1),
        ([[1, 0x12_3456]], (2, [1, 0x3456]), [0, 0x12], 0),
        ([[-(2**63), 2**24 - 2**63]], (4, [0, 2**24]), [], -(2**63)),
    ],
)
def test_narrow_by_hand(rows: Rows, low: tuple[int, list[int]], high: list[int], base: int) -> None:
    narrow = encoded(Narrow, rows, np.int64)
    assert (narrow.low.itemsize, narrow.low.tolist()) == low
    assert (narrow.high.tolist(), narrow.base) == (high, base)
    assert {array.dtype.kind for array in arrays(narrow)} == {"u"}


def test_ramp_steps_and_sparse_by_hand() -> None:
    ramp = encoded(Ramp, [[4, 5, 6], [], [-300, -299]], np.int64)
    assert (ramp.step, ramp.firsts.dtype, ramp.firsts.tolist()) == (1, np.int16, [4, 4, -300])
    assert encoded(Ramp, [[0, 1, 2]] * 5, np.int64).firsts.tolist() == [0]
    down = encoded(Ramp, [[200, 100, 0, 156]], np.uint8)
    assert (down.step, down.firsts.tolist()) == (-100, [200])
    steps = encoded(Steps, [[0, 1, 2, 2, 2, 3], [1, 2]], np.int32).steps
    assert (steps.pieces.tolist(), steps.counts.tolist()) == ([4, 1], [1, 2, 2])
    assert steps.values.tolist() == [0, 1, 0, 1, 1]
    sparse = encoded(Sparse, [[0, 0, 0, 8, 0], [], [0, 0, -9]], np.int64)
    assert (sparse.per_row.tolist(), sparse.places.tolist(), sparse.words.tolist()) == ([1, 0, 1], [3, 2], [8, -9])
    assert encoded(Sparse, [[0], [0, 0]], np.int64).per_row.tolist() == [0]


def test_slices_are_views() -> None:
    rows = [[0, 300, 0, 0, 0, 301] * 4] * 6
    for encoding in every(rows, np.int32):
        parts = arrays(encoding.slice(1, 3, bounds_of(rows)))
        assert any(part.size for part in parts)
        for array, part in zip(arrays(encoding), parts, strict=True):
            assert not part.size or np.shares_memory(array, part), type(encoding)


@pytest.mark.parametrize("kind", KINDS)
def test_encodings_cannot_be_changed(kind: Any) -> None:
    encoding = encoded(kind, [[0, 0, 0, 0, 0]], np.int64)
    for field in dataclasses.fields(encoding):
        with pytest.raises(AttributeError):
            setattr(encoding, field.name, None)


# -------------------------------------------------------------------- what comes from elsewhere


def u1(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def u2(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def i1(*values: int) -> np.ndarray:
    return np.array(values, np.int8)


def i8(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def i2(*values: int) -> np.ndarray:
    return np.array(values, np.int16)


def f4(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


NONE = u1()
WRONG: dict[str, tuple[Any, str]] = {
    "plain: too few": (Plain(i2(1, 2, 3, 4)), "words"),
    "plain: too many": (Plain(i2(1, 2, 3, 4, 5, 6)), "words"),
    "plain: another dtype": (Plain(i8(1, 2, 3, 4, 5)), "words"),
    "plain: of floats": (Plain(np.zeros(5, np.float16)), "words"),
    "plain: of two dims": (Plain(i2(1, 2, 3, 4, 5).reshape(1, 5)), "words"),
    "narrow: too few": (Narrow(u1(1, 2), NONE, 0), "low"),
    "narrow: signed": (Narrow(i1(1, 2, 3, 4, 5), NONE, 0), "low"),
    "narrow: as wide as the words": (Narrow(u2(1, 2, 3, 4, 5), NONE, 0), "low"),
    "narrow: base beyond int64": (Narrow(u1(1, 2, 3, 4, 5), NONE, 2**63), "above"),
    "narrow: base below int64": (Narrow(u1(1, 2, 3, 4, 5), NONE, -(2**63) - 1), "above"),
    "narrow: third byte over one": (Narrow(u1(1, 2, 3, 4, 5), u1(1, 2, 3, 4, 5), 0), "third byte"),
    "bits: too few": (Bits(u1(1), i2(0, 1)), "bits"),
    "bits: too many": (Bits(u1(1, 1, 1), i2(0, 1)), "bits"),
    "bits: another dtype": (Bits(u2(1, 1), i2(0, 1)), "bits"),
    "bits: one word": (Bits(u1(1, 1), i2(0)), "words"),
    "bits: words of another dtype": (Bits(u1(1, 1), i8(0, 1)), "words"),
    "runs: rows of pieces": (Runs(u1(1, 1), NONE, i1(1, 2)), "pieces"),
    "runs: signed pieces": (Runs(i1(1, 0, 1), NONE, i1(1, 2)), "pieces"),
    "runs: wide pieces": (Runs(np.array([1, 0, 1], np.uint64), NONE, i1(1, 2)), "pieces"),
    "runs: pieces of two dims": (Runs(u1(1, 0, 1).reshape(1, 3), NONE, i1(1, 2)), "pieces"),
    "runs: pieces in an empty row": (Runs(u1(1, 1, 1), NONE, i1(1, 2, 3)), "other numbers of pieces"),
    "runs: pieces in every row": (Runs(u1(1), NONE, i1(1)), "other numbers of pieces"),
    "runs: a row without pieces": (Runs(u1(1, 0, 0), NONE, i1(1)), "other numbers of pieces"),
    "runs: more pieces than words": (Runs(u1(4, 0, 1), u1(1, 1, 1), i1(1)), "other numbers of pieces"),
    "runs: a count too few": (Runs(u1(2, 0, 1), NONE, i1(1)), "counts"),
    "runs: a count too many": (Runs(u1(2, 0, 1), u1(1, 1), i1(1)), "counts"),
    "runs: wide counts": (Runs(u1(2, 0, 1), np.array([1], np.uint64), i1(1)), "counts"),
    "runs: counts of floats": (Runs(u1(2, 0, 1), f4(1), i1(1)), "counts"),
    "runs: too few values": (Runs(u1(2, 0, 1), u1(1), i1(1, 2)), "values"),
    "runs: no values": (Runs(u1(2, 0, 1), u1(1), i1()), "values"),
    "runs: unsigned values": (Runs(u1(2, 0, 1), u1(1), u1(1, 2, 3)), "values"),
    "runs: values wider than the words": (Runs(u1(2, 0, 1), u1(1), i8(1, 2, 3)), "values"),
    "runs: a piece of no words": (Runs(u1(2, 0, 1), u1(0), i1(1, 2, 3)), "no words"),
    "runs: no words for the last piece": (Runs(u1(2, 0, 1), u1(3), i1(1, 2, 3)), "no words"),
    "runs: a piece beyond the row": (Runs(u1(2, 0, 1), u1(200), i1(1)), "no words"),
    "ramp: too few": (Ramp(i1(1, 2), 1), "firsts"),
    "ramp: none": (Ramp(i1(), 1), "firsts"),
    "ramp: unsigned": (Ramp(u1(1, 2, 3), 1), "firsts"),
    "ramp: wide": (Ramp(i8(1, 2, 3), 1), "firsts"),
    "ramp: step beyond int64": (Ramp(i1(1, 2, 3), 2**63), "step"),
    "ramp: step below int64": (Ramp(i1(1, 2, 3), -(2**63) - 1), "step"),
    "steps: their runs": (Steps(Runs(u1(2, 0, 1), u1(0), i1(1, 2, 3))), "no words"),
    "sparse: rows": (Sparse(u1(1, 1), u1(1, 1), i2(1, 1)), "per_row"),
    "sparse: signed": (Sparse(i1(1, 0, 1), u1(1, 1), i2(1, 1)), "per_row"),
    "sparse: signed places": (Sparse(u1(1, 0, 1), i1(1, 1), i2(1, 1)), "places"),
    "sparse: wide places": (Sparse(u1(1, 0, 1), np.array([1, 1], np.uint64), i2(1, 1)), "places"),
    "sparse: too few places": (Sparse(u1(1, 0, 1), u1(1), i2(1, 1)), "places"),
    "sparse: places of two dims": (Sparse(u1(1, 0, 1), u1(1, 1).reshape(2, 1), i2(1, 1)), "places"),
    "sparse: too few words": (Sparse(u1(1, 0, 1), u1(1, 1), i2(1)), "words"),
    "sparse: words of another dtype": (Sparse(u1(1, 0, 1), u1(1, 1), i8(1, 1)), "words"),
    "sparse: outside the row": (Sparse(u1(1, 0, 1), u1(1, 2), i2(1, 1)), "outside"),
    "sparse: in an empty row": (Sparse(u1(1, 1, 0), u1(1, 0), i2(1, 1)), "outside"),
    "sparse: a place twice": (Sparse(u1(2, 0, 0), u1(1, 1), i2(1, 1)), "rise"),
    "sparse: falling": (Sparse(u1(2, 0, 0), u1(1, 0), i2(1, 1)), "rise"),
}
"""For int16 rows of 3, 0 and 2 words."""


@pytest.mark.parametrize("name", WRONG)
def test_problems_are_found(name: str) -> None:
    encoding, text = WRONG[name]
    assert text in (encoding.problem(np.dtype(np.int16), np.array([0, 3, 3, 5])) or "nothing is wrong")


@pytest.mark.parametrize(
    "encoding",
    [
        Plain(i2(1, 2, 3, 4, 5)),
        Narrow(u1(1, 2, 3, 4, 5), NONE, 2**63 - 1),
        Bits(u1(1, 1), i2(0, 1)),
        Runs(u1(2, 0, 1), u1(1), i1(1, 2, 3)),
        Runs(u1(2, 0, 2), u2(2, 1), i2(1)),
        Ramp(i1(1), -(2**63)),
        Sparse(u1(1, 0, 1), u1(2, 1), i2(1, 1)),
        Sparse(u1(2, 0, 1), u2(0, 2, 0), i2(1, 1, 0)),
    ],
    ids=lambda encoding: type(encoding).__name__,
)
def test_what_is_sound_decodes(encoding: Any) -> None:
    """The neighbours of the wrong ones above: `problem` refuses nothing that can be read."""
    bounds, dtype = np.array([0, 3, 3, 5]), np.dtype(np.int16)
    assert encoding.problem(dtype, bounds) is None
    assert encoding.decode(dtype, bounds).shape == (5,)
    assert encoding.decode(dtype, bounds).dtype == dtype


def test_a_third_byte_of_another_size() -> None:
    bounds = np.array([0, 3])
    narrow = Narrow(u2(1, 2, 3), u1(0, 1), 0)
    assert "high" in (narrow.problem(np.dtype(np.int64), bounds) or "")
    assert "high" in (dataclasses.replace(narrow, high=u2(0, 1, 2)).problem(np.dtype(np.int64), bounds) or "")
    whole = dataclasses.replace(narrow, high=u1(0, 1, 2))
    assert_holds(whole, [[1, 0x1_0002, 0x2_0003]], np.dtype(np.int64))


@given(cases(), st.data())
def test_sound_arrays_under_other_bounds_decode_or_are_refused(
    case: tuple[np.dtype[Any], Rows], data: st.DataObject
) -> None:
    """Whatever bounds an encoding is read with: `problem` says no, or there are as many words as the bounds want."""
    dtype, rows = case
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows) + 1))
    other = np.array([0, *itertools.accumulate(lengths)], np.int64)
    for encoding in every(rows, dtype):
        for read in (dtype, data.draw(st.sampled_from(DTYPES))):
            if encoding.problem(read, other) is None:
                got = encoding.decode(read, other)
                assert got.shape == (other[-1],)
                assert got.dtype == read
