"""Raw bits of tensors, as integers of their item size ("words" in names).

Copies and comparisons of raw bits are exact for all values, -0.0 and NaN too, and work for all dtypes, also those for
which torch has few operations (float8, unsigned integers).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import addressof, c_char
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core.keys import Path, show
from maskpack.core.memory import LEAST, memory
from maskpack.errors import LayoutError

Words = npt.NDArray[Any]
_CPU = torch.device("cpu")
_Key = TypeVar("_Key")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_NUMPY_WORDS: dict[int, np.dtype[Any]] = {
    size: np.dtype(name) for size, name in ((1, "u1"), (2, "<i2"), (4, "<i4"), (8, "<i8"), (16, "<i8"))
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The supported dtypes by name."""


def word_dtype(itemsize: int) -> np.dtype[Any]:
    """The NumPy dtype of the raw bits of items of a size."""
    return _NUMPY_WORDS[itemsize]


def words(x: Tensor) -> Tensor:
    """The raw bits of `x` as integers of its item size, in the same memory (16-byte items: a last dim of two)."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.element_size() == 16:
        return torch.view_as_real(x).view(torch.int64)
    return x.view(_WORDS[x.element_size()])


def from_words(array: Words, dtype: torch.dtype) -> Tensor:
    """The inverse of `words`, in the same memory unless its alignment prevents that. Do not write to the tensor of a
    read-only array."""
    if dtype.itemsize == 16 and array.ctypes.data % 16:  # torch crashes on complex128 that is aligned to 8 bytes only
        array = np.array(array)
    if not array.flags.writeable:
        array = np.asarray(_Readable(array))
    tensor = torch.from_numpy(array)
    if dtype.itemsize == 16:
        if not array.size:  # an empty array may have any strides
            return torch.empty(array.shape[:-1], dtype=dtype, device="cpu")
        return torch.view_as_complex(tensor.view(torch.float64))
    return tensor.view(dtype)


def odd_bools(array: Words) -> bool:
    """Whether bytes of bools have values other than 0 and 1. torch reads such a byte as true in some operations and as
    a number in others, and copies may change it, so that it cannot be restored exactly."""
    return bool(array.size) and int(array.max()) > 1


def odd_bools_error(call: str, paths: Iterable[Path]) -> LayoutError:
    """The error for fields with such bytes."""
    names = ", ".join(f'"{show(path)}"' for path in paths)
    return LayoutError(
        f"{call}: field {names} is torch.bool with bytes other than 0 and 1; expected bools. Replace a view of "
        "other bytes as torch.bool: write x.view(torch.uint8) != 0, or keep them as uint8."
    )


def root_of(array: Words) -> Words:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def address(array: Words) -> int:
    """The address of the first entry."""
    numbers: Any = array if array.dtype.names is None else array.view(np.int64)  # a buffer of structs has a long format
    try:
        return addressof(c_char.from_buffer(numbers))  # a third of the time of `ctypes`
    except (TypeError, ValueError):  # memory that is read-only, or that has gaps; no entries
        return array.ctypes.data


class _Readable:
    """A read-only array described as writable, because torch warns about read-only memory even if it only reads it."""

    def __init__(self, array: Words) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def empty_of(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """An uninitialised tensor, from the memory pool in use if it is large and on the CPU."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST or device.type != "cpu" or torch.compiler.is_compiling():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    line, more = memory(nbytes).view(word_dtype(dtype.itemsize)), (2,) if dtype.itemsize == 16 else ()
    return from_words(line.reshape((*shape, *more)), dtype)


def host_words(tensors: Mapping[_Key, Tensor], fresh: Collection[_Key]) -> dict[_Key, Words]:
    """The raw bits of all tensors on the host, with one copy for each device. Tensors on the host are copied, because
    the caller may change them, except those in `fresh`."""
    out: dict[_Key, Words] = {}
    away: dict[torch.device, list[_Key]] = {}
    for path, tensor in tensors.items():
        if tensor.device.type == "cpu":
            array = words(tensor).numpy()
            out[path] = array if path in fresh else array.copy()
        else:
            away.setdefault(tensor.device, []).append(path)
    for paths in away.values():
        parts = [words(tensors[path]).contiguous() for path in paths]
        line = to_pinned(torch.cat([bytes_of(part) for part in parts])).numpy()
        ends = np.cumsum([part.numel() * part.element_size() for part in parts])
        for path, part, piece in zip(paths, parts, np.split(line, ends[:-1]), strict=True):
            dtype = torch.empty(0, dtype=part.dtype, device="cpu").numpy().dtype
            out[path] = (
                piece.view(dtype).reshape(tuple(part.shape)) if piece.size else np.empty(tuple(part.shape), dtype)
            )
    return out


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of contiguous words, uint8 [nbytes], in the same memory. One element, or none, has any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def to_pinned(x: Tensor, *others: Tensor) -> Tensor:
    """A copy [n] of flat tensors of one dtype on the host, one behind the other, in pinned memory if they come from a
    GPU: fresh pages take forty times as long. Synchronises once."""
    parts = x, *others
    out = torch.empty(sum(part.numel() for part in parts), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    end = 0
    for part in parts:
        begin, end = end, end + part.numel()
        out[begin:end].copy_(part, non_blocking=True)
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()
    return out


def sent(device: torch.device, *arrays: Words) -> Tensor:
    """A copy [n] of int64 arrays on a device, one behind the other, by way of pinned memory. No synchronisation."""
    size = sum(array.size for array in arrays)
    line = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate([array.reshape(-1) for array in arrays], out=line.numpy())
    return line.to(device, non_blocking=True)
