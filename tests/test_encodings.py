"""The encodings, against plain lists of rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskpack.encodings import Encoding, Plain, Runs, encode, join

WORDS = (np.uint8, np.int16, np.int32, np.int64)
Rows = list[list[int]]


def offsets_of(rows: Rows) -> np.ndarray:
    return np.cumsum([0, *[len(row) for row in rows]]).astype(np.int64)


def words_of(rows: Rows, dtype: Any) -> np.ndarray:
    return np.array([word for row in rows for word in row], dtype=dtype)


@st.composite
def constant_rows(draw: st.DrawFn, value: int | None = None) -> Rows:
    """Rows of zeros and one other word, as masks are."""
    value = draw(st.sampled_from([0, 1, 2, 127])) if value is None else value
    return draw(st.lists(st.lists(st.sampled_from([0, value, value]), max_size=6), max_size=5))


any_rows = st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=5)
dtypes = st.sampled_from(WORDS)


def assert_decodes(encoding: Encoding, rows: Rows, dtype: Any) -> None:
    got = encoding.decode(offsets_of(rows))
    assert got.dtype == dtype
    assert got.tolist() == words_of(rows, dtype).tolist()


def both(rows: Rows, dtype: Any) -> list[Encoding]:
    """The rows in every encoding that holds them."""
    words, offsets = words_of(rows, dtype), offsets_of(rows)
    runs = Runs.encode(words, offsets)
    return [Plain(words), *([] if runs is None else [runs])]


@given(constant_rows(), dtypes)
def test_decode_is_the_inverse(rows: Rows, dtype: Any) -> None:
    for encoding in both(rows, dtype):
        assert_decodes(encoding, rows, dtype)
        assert_decodes(pickle.loads(pickle.dumps(encoding, protocol=5)), rows, dtype)


@given(constant_rows(), dtypes, st.data())
def test_take_and_slice(rows: Rows, dtype: Any, data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    for encoding in both(rows, dtype):
        taken = encoding.take(np.array(picked, np.int64), offsets_of(rows))
        assert type(taken) is type(encoding)
        assert_decodes(taken, [rows[row] for row in picked], dtype)
        part = encoding.slice(start, stop, offsets_of(rows))
        assert type(part) is type(encoding)
        assert_decodes(part, rows[start:stop], dtype)
        assert part.nbytes <= encoding.nbytes
        again = part.take(np.arange(stop - start)[::-1], offsets_of(rows[start:stop]))
        assert_decodes(again, rows[start:stop][::-1], dtype)
        assert_decodes(encoding, rows, dtype)


@given(st.lists(constant_rows(value=1), min_size=1, max_size=4), dtypes, st.data())
def test_join(parts: list[Rows], dtype: Any, data: st.DataObject) -> None:
    encodings = [data.draw(st.sampled_from(both(rows, dtype))) for rows in parts]
    got = join(encodings, [offsets_of(rows) for rows in parts])
    assert_decodes(got, [row for rows in parts for row in rows], dtype)
    if all(isinstance(part, Plain) for part in encodings):
        assert isinstance(got, Plain)


@given(st.lists(constant_rows(), min_size=1, max_size=4), dtypes, st.data())
def test_join_of_different_constants(parts: list[Rows], dtype: Any, data: st.DataObject) -> None:
    encodings = [data.draw(st.sampled_from(both(rows, dtype))) for rows in parts]
    got = join(encodings, [offsets_of(rows) for rows in parts])
    rows = [row for rows in parts for row in rows]
    assert_decodes(got, rows, dtype)
    picked = list(range(len(rows)))[::-2]
    assert_decodes(got.take(np.array(picked, np.int64), offsets_of(rows)), [rows[row] for row in picked], dtype)


@given(any_rows, dtypes, st.sampled_from([(), ("runs",), ("unknown", "runs")]))
def test_encode_is_exact_and_never_larger_than_plain(rows: Rows, dtype: Any, hints: tuple[str, ...]) -> None:
    words = words_of(rows, dtype)
    encoding = encode(words, offsets_of(rows), hints)
    assert_decodes(encoding, rows, dtype)
    assert encoding.nbytes <= words.nbytes


@given(any_rows)
def test_runs_hold_one_value_only(rows: Rows) -> None:
    words = words_of(rows, np.int64)
    runs = Runs.encode(words, offsets_of(rows))
    assert (runs is None) == (not words.size or len(set(words.tolist()) - {0}) > 1)


def test_encode_takes_runs_only_where_hinted_and_smaller() -> None:
    words, offsets = np.ones(1000, np.int64), np.array([0, 400, 400, 1000])
    assert isinstance(encode(words, offsets, ("runs",)), Runs)
    assert encode(words, offsets, ("runs",)).nbytes < 32
    assert isinstance(encode(words, offsets, ()), Plain)
    assert isinstance(encode(words, None, ("runs",)), Plain)
    assert isinstance(encode(np.arange(1000) % 2, offsets, ("runs",)), Runs)
    assert isinstance(encode((np.arange(1000) % 2).astype(np.uint8), offsets, ("runs",)), Plain)
    assert isinstance(encode(np.arange(1000), offsets, ("runs",)), Plain)


def test_runs_by_hand() -> None:
    words = np.array([0, 7, 7, 7, 7, 0, 7], np.int32)
    runs = Runs.encode(words, np.array([0, 3, 3, 7]))
    assert runs is not None
    assert runs.starts.tolist() == [1, 0, 3]
    assert runs.counts.tolist() == [2, 2, 1]
    assert runs.per_row.tolist() == [1, 0, 2]
    assert int(runs.value) == 7
    assert {part.dtype for part in (runs.starts, runs.counts, runs.per_row)} == {np.dtype(np.uint8)}
    assert runs.value.dtype == np.int32


@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_runs_of_a_word_with_its_sign_bit(value: int) -> None:
    rows = [[value, value, 0], [0, value]]
    runs = Runs.encode(words_of(rows, np.int32), offsets_of(rows))
    assert runs is not None
    assert_decodes(runs, rows, np.int32)


def test_runs_beyond_one_byte() -> None:
    for length in (255, 256, 257, 65_535, 65_536, 70_000):
        rows = [[0] * length + [1] * length, [1], [0] * 3]
        runs = Runs.encode(words_of(rows, np.uint8), offsets_of(rows))
        assert runs is not None
        assert_decodes(runs, rows, np.uint8)
        short = [[0, 1]]
        small = Runs.encode(words_of(short, np.uint8), offsets_of(short))
        assert small is not None
        assert_decodes(join([small, runs], [offsets_of(short), offsets_of(rows)]), short + rows, np.uint8)
        assert_decodes(
            runs.take(np.array([2, 0, 1, 0]), offsets_of(rows)), [rows[2], rows[0], rows[1], rows[0]], np.uint8
        )


def test_plain_entries_of_one_a_row() -> None:
    words = np.arange(12).reshape(4, 3)
    plain = Plain(words)
    assert plain.slice(1, 3, None).decode(None).tolist() == words[1:3].tolist()
    assert plain.take(np.array([3, 0, 3]), None).decode(None).tolist() == words[[3, 0, 3]].tolist()
    assert join([plain, plain.slice(0, 0, None)], [None, None]).decode(None).tolist() == words.tolist()
    assert plain.nbytes == words.nbytes


def test_a_slice_of_plain_words_is_a_view() -> None:
    words = np.arange(12)
    assert np.shares_memory(Plain(words).slice(1, 2, np.array([0, 4, 9, 12])).decode(None), words)


def test_encodings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Plain(np.arange(3)).words = np.arange(4)  # type: ignore[misc]
