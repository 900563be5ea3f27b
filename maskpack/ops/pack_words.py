"""The elements of a tensor as words, which kernels move: of 1, 2, 4 or 8 bytes, whatever the dtype is."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Words(NamedTuple):
    """The elements of a tensor: `items` words of `size` bytes each. Strides are in words: from row to row, from column
    to column, and from one word of an element to the next."""

    size: int
    items: int
    row: int
    col: int
    item: int


def words_of(x: Tensor, leading: int, widest: int = 8) -> Words | None:
    """The words of `x`, whose elements are the dims after the `leading` ones, joined to up to `widest` bytes where they
    are adjacent; None if `x` has to be copied so that the words of an element are one stride apart."""
    if x.is_conj() or x.is_neg():
        return None
    size, items = x.dtype.itemsize, x.shape[leading:].numel()
    item = 1 if x.is_contiguous() else _item_stride(x, leading)
    if item is None or (size == 16 and item != 1):
        return None
    row, col = x.stride(0), x.stride(leading - 1)
    if items == 1 and size <= 8:
        return Words(size, items, row, col, 1)
    if size == 16:
        size, items, row, col = 8, 2 * items, 2 * row, 2 * col
    if item == 1:
        bound = items * size | row * size | col * size | x.data_ptr()
        wide = next(n for n in (8, 4, 2, 1) if n <= max(widest, size) and bound % n == 0)
        times = wide // size
        if times > 1:
            size, items, row, col = wide, items // times, row // times, col // times
    return Words(size, items, row, col, item)


def _item_stride(x: Tensor, leading: int) -> int | None:
    """The stride between adjacent items of an element, or None if it is not the same for all."""
    item = reach = None
    for size, stride in zip(reversed(x.shape[leading:]), reversed(x.stride()[leading:]), strict=True):
        if size == 1:
            continue
        if reach is not None and stride != reach:
            return None
        item = stride if item is None else item
        reach = size * stride
    return 1 if item is None else item


def copied(x: Tensor) -> Tensor:
    """A copy of a tensor without `words_of` that has them."""
    return x.resolve_conj().resolve_neg().contiguous()


def repeated(word: int, size: int, wide: int) -> int:
    """A word of `size` bytes, repeated to fill `wide` bytes, as a signed number."""
    line = (word & ((1 << 8 * size) - 1)).to_bytes(size, "little") * (wide // size)
    return int.from_bytes(line, "little", signed=True)
