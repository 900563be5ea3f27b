"""The first element in which two tensors differ, by their bits: 0.0 differs from -0.0, and a NaN from another NaN."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from maskpack.core.bits import words


@dataclass(frozen=True)
class Difference:
    """The elements in which two tensors differ.

    Attributes:
        count: how many there are.
        place: the indices of the first.
        values: the first in both tensors, each with its bits: `-0.0 (0x80000000)`.
    """

    count: int
    place: tuple[int, ...]
    values: tuple[str, str]


def difference(a: Tensor, b: Tensor) -> Difference | None:
    """Compares two strided tensors of the same dtype, shape and device. None if all bits are equal."""
    differs = words(a) != words(b)
    if a.element_size() == 16:
        differs = differs.any(-1)
    count = int(differs.sum())
    if not count:
        return None
    first = int(differs.reshape(-1).to(torch.uint8).argmax())
    place: list[int] = []
    for size in reversed(a.shape):
        first, index = divmod(first, size)
        place.insert(0, index)
    return Difference(count, tuple(place), (_shown(a[tuple(place)]), _shown(b[tuple(place)])))


def _shown(x: Tensor) -> str:
    """The one element of a tensor of no dims, with its bits."""
    bits = words(x).cpu().numpy()
    parts = [bits] if bits.ndim == 0 else list(bits)  # the real and the imaginary part of 16-byte items
    number = "".join(f"{int.from_bytes(part.tobytes(), sys.byteorder):0{2 * part.itemsize}x}" for part in parts)
    return f"{x.item()!r} (0x{number})"
