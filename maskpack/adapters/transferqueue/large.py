"""Large tensors inside Python objects: a storage unit has each of them once, for all samples that it holds.

    put: objects --parted--> objects with References, tensors by digest; the unit says which of these it lacks
                     --Large.of, joined--> put again, with these --joined--> objects with the unit's own Large tensors
    get: objects with Large tensors, each once in a message, which are restored as all tensors in objects are

A unit refers to its large tensors weakly, so a tensor lives as long as a row of a chunk that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from maskpack.core import native
from maskpack.core.bits import Words
from maskpack.core.objects import Stowed, mapped
from maskpack.packed.batch import PackedBatch
from maskpack.packed.file.codec import compressed_arrays, restored_arrays

LARGE = 1 << 16
"""Bytes from which on a tensor inside a Python object is large."""


class Reference(NamedTuple):
    """Stands for a large tensor in a put: BLAKE2b of its bits, dtype and shape, 20 bytes."""

    digest: bytes


@dataclass(frozen=True, eq=False)
class Large(Stowed):
    """A large tensor, as storage units keep it.

        pixel values: float32, at most 256 levels a channel -> uint16 numbers, 768 floats -> codec

    Words of 4 bytes with at most 65,536 distinct ones take half of their bytes, and a codec finds more in the numbers
    than in the floats.

    Attributes:
        words: its words; or the numbers of its words among the distinct ones.
        distinct: the distinct words, or nothing.
        records: what a codec made of these arrays.
        digest: as in Reference.
    """

    distinct: tuple[Words, ...]
    records: tuple[Any, ...]
    digest: bytes

    @classmethod
    def of(cls, digest: bytes, held: Stowed, codec: str | None) -> Large:
        found = native.palette(held.words) if held.words.itemsize == 4 else None
        arrays, records = [*(found or [held.words])], list[Any]()
        if codec is not None:
            arrays, records = compressed_arrays(arrays)
        words, *distinct = arrays
        return cls(words, held.dtype, held.shape, held.tensor, tuple(distinct), tuple(records), digest)

    def restored(self) -> Any:
        """A copy of the tensor or array."""
        arrays = [self.words, *self.distinct]
        if any(self.records):
            arrays = restored_arrays(arrays, self.records, "get_data")
        words = arrays[0] if len(arrays) == 1 else arrays[1].take(arrays[0])
        return Stowed(words, self.dtype, self.shape, self.tensor).restored()


def parted(batch: PackedBatch) -> tuple[PackedBatch, dict[bytes, Stowed]]:
    """The batch with a Reference for each large tensor in its objects, and these tensors by digest. The bits of tensors
    that share memory are read once."""
    large: dict[bytes, Stowed] = {}
    known: dict[tuple[Any, ...], Reference] = {}

    def leaf(item: Any) -> Any:
        if isinstance(item, Large):
            return Reference(item.digest)
        if not isinstance(item, Stowed) or item.words.nbytes < LARGE:
            return item
        form = item.dtype, item.shape, item.tensor
        if (id(item.words), form) not in known:
            digest = blake2b(np.ascontiguousarray(item.words).view(np.uint8).data, digest_size=20)
            digest.update(repr(form).encode())
            known[id(item.words), form] = Reference(digest.digest())
            large.setdefault(digest.digest(), item)
        return known[id(item.words), form]

    return _with_leaves(batch, leaf), large


def joined(batch: PackedBatch, known: MutableMapping[bytes, Large]) -> tuple[PackedBatch, set[bytes]]:
    """The batch with known large tensors in place of their References, and the digests of those that are not known. A
    large tensor in the batch becomes known, if there is none of its digest."""
    missing: set[bytes] = set()

    def leaf(item: Any) -> Any:
        if isinstance(item, Large):
            return known.setdefault(item.digest, item)
        found = known.get(item.digest) if isinstance(item, Reference) else item
        if found is None:
            missing.add(item.digest)
        return item if found is None else found

    return _with_leaves(batch, leaf), missing


def _with_leaves(batch: PackedBatch, leaf: Callable[[Any], Any]) -> PackedBatch:
    objects: Mapping[Any, Any] = {
        path: entry if entry.bare else replace(entry, data=mapped(entry.data, leaf, rows=True))
        for path, entry in batch.objects.items()
    }
    return replace(batch, objects=objects)
