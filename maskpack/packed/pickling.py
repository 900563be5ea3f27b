"""Pickling a packed batch, for Ray and between processes: its structure as a small stream, its arrays as buffers.

    PackedBatch --apart--> stream, arrays --gathered--> one buffer; or the buffer of most arrays, and one for the rest

Arrays that lie in one buffer, as `compress` lays them, are sent without a copy. Such pickles are for processes that
have one version of maskpack and trust each other; file/ has the form of bytes for all others.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from tensordict import is_tensorclass

from maskpack.core.bits import Words, address, root_of
from maskpack.core.objects import Objects
from maskpack.fields.registry import Path
from maskpack.packed.file import codec
from maskpack.packed.file.write import near

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_T = TypeVar("_T")
_SLACK = 1.1
"""Most bytes of a buffer for each byte of the arrays in it, if the buffer is to be sent as it is."""


class Place(NamedTuple):
    """Where an array lies: the number of its buffer, its first byte there, its dtype and shape."""

    buffer: int
    begin: int
    dtype: str
    shape: tuple[int, ...]


# -------------------------------------------------------------------- structure and arrays


class _Writer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, 5)
        self.arrays: list[Words] = []
        self.kinds: list[type[Any]] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray:
            self.arrays.append(obj)
            return _array, (len(self.arrays) - 1,)
        if isinstance(obj, type) and is_tensorclass(obj):
            self.kinds.append(obj)
            return _kind, (len(self.kinds) - 1,)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, stream: bytes, arrays: Sequence[Words], kinds: Sequence[type[Any]] = ()) -> None:
        super().__init__(io.BytesIO(stream))
        self._held = {_array.__name__: arrays.__getitem__, _kind.__name__: kinds.__getitem__}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name in self._held:
            return self._held[global_name]
        return super().find_class(module_name, global_name)


def _array(number: int) -> Words:
    """Stands for an array in a stream; the reader replaces it."""
    raise pickle.UnpicklingError(f"array {number} is not in the stream")


def _kind(number: int) -> type[Any]:
    """Stands for a tensorclass in a stream. The caller pickles the class, by value if necessary."""
    raise pickle.UnpicklingError(f"tensorclass {number} is not in the stream")


def apart(thing: object) -> tuple[bytes, list[Words], list[type[Any]]]:
    """The structure of `thing` as a stream; the arrays in it, each once; and the tensorclasses that it names."""
    stream = io.BytesIO()
    writer = _Writer(stream)
    writer.dump(thing)
    return stream.getvalue(), writer.arrays, writer.kinds


def _memory(nbytes: int) -> Words:
    return np.empty(nbytes, np.uint8)


def copy_to_one_buffer(thing: _T, memory: Callable[[int], Words] = _memory) -> _T:
    """A copy of `thing`, a structure of dataclasses and containers, whose arrays lie in one new buffer.

    `memory(nbytes)` gives the buffer, uint8. An array that occurs several times is copied once. The copy is made by
    pickling the structure without its arrays.
    """
    stream, arrays, kinds = apart(thing)
    body, begins = _joined(arrays, memory)
    copies = [_view(body, begin, a.dtype, a.shape) for begin, a in zip(begins, arrays, strict=True)]
    return _Reader(stream, copies, kinds).load()


# -------------------------------------------------------------------- buffers


def _joined(arrays: Sequence[Words], memory: Callable[[int], Words] = _memory) -> tuple[Words, list[int]]:
    """The bytes of all arrays, uint8, and where each array begins. The widest items come first, so that all arrays are
    aligned."""
    begins, end = [0] * len(arrays), 0
    for number in sorted(range(len(arrays)), key=lambda number: -arrays[number].itemsize):
        begins[number], end = end, end + arrays[number].nbytes
    body = memory(end)
    for begin, array in zip(begins, arrays, strict=True):
        _view(body, begin, array.dtype, array.shape)[...] = array
    return body, begins


def gathered(arrays: Sequence[Words]) -> tuple[list[Words], list[Place]]:
    """Buffers that hold the arrays, and the place of each array in them: the buffer that most arrays lie in already, if
    they fill it well, and a new one for the others."""
    whole, begins = common_buffer(arrays)
    if len(begins) < 2:
        whole, begins = None, {}
    rest = [number for number in range(len(arrays)) if number not in begins]
    buffers = [] if whole is None else [whole]
    places = {number: (0, begin) for number, begin in begins.items()}
    if rest:
        body, others = _joined([arrays[number] for number in rest])
        places |= {number: (len(buffers), begin) for number, begin in zip(rest, others, strict=True)}
        buffers.append(body)
    return buffers, [Place(*places[number], array.dtype.str, array.shape) for number, array in enumerate(arrays)]


def common_buffer(arrays: Sequence[Words], align: int = 8, free: int = 0) -> tuple[Words | None, dict[int, int]]:
    """The stretch of a uint8 buffer that most bytes of the arrays lie in, and where each array in it begins, by number.

    The stretch begins at a multiple of `align` bytes in its buffer. It is None if it has more than _SLACK times the
    bytes of its arrays, and `free` bytes more. Empty arrays lie nowhere.
    """
    inside: dict[int, list[int]] = {}
    roots: dict[int, Words] = {}
    for number, array in enumerate(arrays):
        root = root_of(array)
        if root.dtype == np.uint8 and root.ndim == 1 and array.flags.c_contiguous and array.size:
            roots[id(root)] = root
            inside.setdefault(id(root), []).append(number)
    if not inside:
        return None, {}
    most = max(inside, key=lambda key: sum(arrays[number].nbytes for number in inside[key]))
    root, numbers = roots[most], inside[most]
    first = address(root)
    begins = {number: address(arrays[number]) - first for number in numbers}
    low = min(begins.values()) // align * align
    high = max(begin + arrays[number].nbytes for number, begin in begins.items())
    if high - low > _SLACK * sum(arrays[number].nbytes for number in numbers) + free:
        return None, {}
    return root[low:high], {number: begin - low for number, begin in begins.items()}


def _view(body: Words, begin: int, dtype: Any, shape: tuple[int, ...]) -> Words:
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    for length in shape:
        size *= length
    return body[begin : begin + size].view(dtype).reshape(shape)


# -------------------------------------------------------------------- a packed batch


def write(packed: PackedBatch) -> tuple[bytes, list[type[Any]], list[Place], Any, list[Words]]:
    """The structure without the Python objects, its tensorclasses, the places of its arrays, the records of the codec,
    and the buffers."""
    stream, arrays, kinds = apart(
        (packed.num_rows, packed.schema, packed.layouts, packed.fields, packed.row_pads, packed.codec)
    )
    records = None
    if packed.codec is not None:
        shapes = [array.shape for array in arrays]
        numbers = {id(array): number for number, array in enumerate(arrays)}
        arrays, squeezed = codec.compressed([array.reshape(-1) for array in arrays], near(packed, numbers))
        records = squeezed, shapes
    buffers, places = gathered(arrays)
    return stream, kinds, places, records, buffers


def read(
    stream: bytes,
    kinds: Sequence[type[Any]],
    places: Sequence[Place],
    records: Any,
    buffers: Sequence[Any],
    objects: Mapping[Path, Objects],
) -> tuple[Any, ...]:
    """The attributes of the PackedBatch that `write` was given; its arrays are read-only views of the buffers."""
    bodies = [_body(buffer) for buffer in buffers]
    arrays: list[Words] = [_view(bodies[number], begin, dtype, shape) for number, begin, dtype, shape in places]
    if records is not None:
        squeezed, shapes = records
        lines = codec.restored(arrays, squeezed, "PackedBatch")
        arrays = [line.reshape(shape) for line, shape in zip(lines, shapes, strict=True)]
    rows, schema, layouts, fields, row_pads, name = _Reader(stream, arrays, kinds).load()
    return (rows, schema, layouts, fields, objects, row_pads, name)


def _body(buffer: Any) -> Words:
    """A buffer as uint8, copied if it is not aligned for all item sizes."""
    body: Words = np.frombuffer(buffer, np.uint8)
    if address(body) % 8:
        body = np.array(body)
    body.flags.writeable = False
    return body
