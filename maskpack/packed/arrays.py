"""Integer arrays in the narrowest dtype: rows of them, and checks of arrays from elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maskpack.core.bits import Words
from maskpack.core.index import IntArray, cumulated, ranges

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""The unsigned dtype of each item size."""


def small(values: npt.NDArray[Any]) -> Words:
    """Numbers that are not negative, in unsigned integers as narrow as fit."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def trimmed(words: Words) -> Words:
    """Words in signed integers as narrow as fit; bytes stay as they are."""
    if words.itemsize == 1 or not words.size:
        return words
    least, most = int(words.min()), int(words.max())
    size = next(size for size in (1, 2, 4, 8) if -(1 << 8 * size - 1) <= least and most < 1 << 8 * size - 1)
    return words.astype(f"i{size}")


def one(array: Words) -> Words:
    """The first entry alone, where all are equal."""
    return array[:1] if array.size > 1 and bool((array == array[0]).all()) else array


def spread(array: Words, n: int) -> Words:
    """The inverse of `one`."""
    return np.broadcast_to(array, (n,)) if array.size == 1 else array


def rows_of(array: Words, rows: slice | IntArray) -> Words:
    return array if array.size == 1 else array[rows]


def taken(array: Words, bounds: IntArray, rows: IntArray) -> Words:
    """The entries of some rows, one after the other."""
    return array[ranges(bounds[rows], bounds[rows + 1] - bounds[rows])]


def byte_bounds(bounds: IntArray) -> IntArray:
    return cumulated((np.diff(bounds) + 7) // 8)


def bytes_for(most: int) -> int:
    return next((size for size in (1, 2, 3, 4) if most < 1 << 8 * size), 8)


# -------------------------------------------------------------------- checks of arrays from elsewhere


def wrong(array: Words, name: str, n: int, dtype: npt.DTypeLike | None = None) -> str | None:
    if array.shape != (n,) or (dtype is not None and array.dtype != dtype):
        return f"{name} is {array.dtype} {array.shape}; expected {n} of {dtype or 'them'}"
    return None


def wrong_counts(array: Words, name: str, n: int | None = None) -> str | None:
    """Unsigned numbers, [n] or [1], of at most 4 bytes: with int64 they make int64, and sums far from its end."""
    narrow = array.dtype.kind == "u" and array.itemsize <= 4
    if array.ndim != 1 or not narrow or (n is not None and array.size not in (1, n)):
        return f"{name} is {array.dtype} {array.shape}; expected unsigned integers ({'n' if n is None else n},)"
    return None


def wrong_numbers(array: Words, name: str, n: int, dtype: np.dtype[Any]) -> str | None:
    """Words as `trimmed` and `one` leave them."""
    kind = "u" if dtype.itemsize == 1 else "i"
    if array.ndim != 1 or array.size not in (1, n) or array.dtype.kind != kind or array.itemsize > dtype.itemsize:
        return f"{name} is {array.dtype} {array.shape}; expected ({n},) of at most {dtype}"
    return None
