"""Large tensors, as storage units keep them: their words, or the few distinct ones and a number for each.

    pixel values: float32, at most 256 levels a channel -> uint16 numbers, 768 floats -> codec

Words of 4 bytes with at most 65,536 distinct ones take half of their bytes, and a codec finds more in the numbers than
in the floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from maskpack.core import native
from maskpack.core.bits import Words
from maskpack.packed.file.codec import compressed_arrays, restored_arrays

_PALETTE_WORD = 4


class Large(NamedTuple):
    """A large tensor: its words, or the numbers of its words and the distinct ones; and what a codec made of these."""

    arrays: tuple[Words, ...]
    records: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def encoded(tensors: Mapping[bytes, Words], codec: str | None) -> dict[bytes, Large]:
    """Tensors as they are stored, by digest."""
    out: dict[bytes, Large] = {}
    for digest, words in tensors.items():
        found = native.palette(words) if words.itemsize == _PALETTE_WORD else None
        arrays = (words,) if found is None else found
        records: tuple[Any, ...] = (None,) * len(arrays)
        if codec is not None:
            arrays, records = map(tuple, compressed_arrays(arrays))
        out[digest] = Large(arrays, records)
    return out


def decoded(stored: Mapping[bytes, Large]) -> dict[bytes, Words]:
    """The words of tensors."""
    out: dict[bytes, Words] = {}
    for digest, large in stored.items():
        arrays = list(large.arrays)
        if any(record is not None for record in large.records):
            arrays = restored_arrays(arrays, large.records, "get_data")
        out[digest] = arrays[0] if len(arrays) == 1 else arrays[1].take(arrays[0])
    return out
