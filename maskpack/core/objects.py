"""Non-tensor entries of a batch: Python objects that follow their rows, and the tensors inside them.

    {"pixel_values": tensor, "n": 3}  --stowed-->  {"pixel_values": Stowed(words, ...), "n": 3}  --entry-->  tensors

Stowed tensors are arrays, which travel without being copied into a pickle; tensors with equal bits share one array.
What JSON can say exactly is said in JSON, so that a file of it runs no code.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from tensordict import is_non_tensor as is_non_tensor  # type: ignore[reportUnknownVariableType]
from tensordict import lazy_stack as lazy_stack  # type: ignore[reportUnknownVariableType]
from torch import Tensor

from maskpack.core.bits import DTYPES, Words, from_words, odd_bools, word_dtype, words

_DEEPEST = 64
_MOST_ITEMS = 1 << 22
_ATOMS = {int, float, str, bool, bytes, type(None)}
MOST_DIMS = 28
"""Dims of an element, or of a tensor in a Python object: numpy has 32 at least, and rows and width come on top."""
MOST_DEPTH = 8
"""Depth of a stack of objects that comes from a file: tensordict takes 2^depth steps to ask a stack for its device."""
MOST_COLLIDING, MOST_KEYS = 16, 1 << 15
"""Keys of a dict in JSON: those with one hash, and those that are no text. A dict compares a key with each one of its
hash, and ints, floats and tuples of any hash are easily made; Python salts the hashes of texts alone."""
ITEM_BYTES = 1 << 10
"""Bytes that one entry of a NonTensorStack is taken to need."""


@dataclass(frozen=True, eq=False)
class Stowed:
    """A tensor or numpy array of a Python object, as words that nobody may write.

    Attributes:
        words: its words; of a tensor of 16-byte items with a last dim of two.
        dtype: the name of its dtype, of torch or of numpy.
        shape: its shape.
        tensor: whether it is a torch tensor.
    """

    words: Words
    dtype: str
    shape: tuple[int, ...]
    tensor: bool

    def restored(self) -> Any:
        """A copy of what was stowed."""
        line = np.array(self.words)
        if not self.tensor:
            return line.view(self.dtype).reshape(self.shape)
        dtype = DTYPES[self.dtype]
        more = (2,) if dtype.itemsize == 16 else ()
        return from_words(line.reshape((*self.shape, *more)), dtype)


@dataclass(frozen=True)
class Objects:
    """A non-tensor entry in plain Python.

    Attributes:
        data: one object for the batch, or the list of the rows' objects (lists of lists below further batch dims).
        depth: batch dims that `data` is a list along; 0 for one object of the whole batch.
        stacked: whether `data` holds the rows of a lazy stack, a TensorDict or tensorclass each.
    """

    data: Any
    depth: int
    stacked: bool = False

    @classmethod
    def of(cls, value: Any) -> Objects:
        """The entry of a TensorDict."""
        if isinstance(value, NonTensorStack):
            return cls(value.tolist(), len(value.batch_size))
        if is_tensor_collection(value) and not is_non_tensor(value):  # a lazy stack
            return cls(list(value.unbind(0)), 1, True)
        return cls(value.data if isinstance(value, NonTensorData) else value, 0)

    def stowed(self) -> Objects:
        """With its tensors as words; the rows of a lazy stack are copied."""
        data = [row.clone() for row in self.data] if self.stacked else _mapped(self.data, _Stowing().leaf)
        return replace(self, data=data)

    def entry(self, batch_size: tuple[int, ...]) -> Any:
        """The entry as a TensorDict holds it, with tensors of its own."""
        if self.stacked:
            return lazy_stack([row.clone() for row in self.data]) if self.data else TensorDict({}, batch_size)
        data = self.restored()
        return NonTensorData(data, batch_size=batch_size) if self.depth == 0 else _stacked(data, self.depth, batch_size)

    def restored(self) -> Any:
        """`data` with tensors of its own."""
        return _mapped(self.data, lambda item: item.restored() if isinstance(item, Stowed) else item)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that `entry` takes: those of its tensors, and ITEM_BYTES for each entry of a stack."""
        count, items = 0, [self.data]
        for _ in range(self.depth):
            items = [part for item in items for part in item]
            count += len(items)
        tensors: dict[int, int] = {}
        todo, seen = [items], {id(items)}
        while todo:
            for item in todo.pop():
                kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
                if kind is Stowed:
                    tensors[id(item)] = item.words.nbytes
                elif kind in (dict, list, tuple) and id(item) not in seen:
                    seen.add(id(item))
                    todo.append(item.values() if kind is dict else item)
        return ITEM_BYTES * count + sum(tensors.values())

    def take(self, rows: Iterable[int]) -> Objects:
        """Of some rows."""
        return replace(self, data=[self.data[row] for row in rows]) if self.depth else self

    def arrays(self) -> list[Words]:
        """The words of its stowed tensors, each array once."""
        found: dict[int, Words] = {}

        def note(item: Any) -> Any:
            if isinstance(item, Stowed):
                found[id(item.words)] = item.words
            return item

        _mapped(self.data, note)
        return list(found.values())


def _stacked(data: list[Any], depth: int, sizes: tuple[int, ...]) -> Any:
    if depth == 1:
        return NonTensorStack(*[NonTensorData(item) for item in data])
    if not data:  # only a slice of a stack that is not empty knows its other sizes
        inner: Any = NonTensorData(None, batch_size=sizes[1:])
        return NonTensorStack(inner)[:0] if len(sizes) >= depth else NonTensorStack()
    return NonTensorStack(*[_stacked(item, depth - 1, sizes[1:]) for item in data])


@dataclass
class _Stowing:
    """Turns tensors and arrays into words; equal bits become one array."""

    known: dict[tuple[str, int, int], list[Words]] = field(default_factory=dict[tuple[str, int, int], list[Words]])

    def leaf(self, item: Any) -> Any:
        if (
            type(item) is Tensor
            and _is_plain(item)
            and not (item.dtype is torch.bool and odd_bools(words(item).numpy()))
        ):
            dtype = str(item.dtype).removeprefix("torch.")
            return Stowed(self._shared(words(item).numpy().reshape(-1)), dtype, tuple(item.shape), True)
        return self._array(item) if type(item) is np.ndarray else item

    def _array(self, array: Words) -> Any:
        if not _is_plain_array(array):
            return array
        line: Words = np.ascontiguousarray(array).reshape(-1).view(word_dtype(array.itemsize))
        return Stowed(self._shared(line), str(array.dtype), array.shape, False)

    def _shared(self, line: Words) -> Words:
        held: Words = np.array(line)
        alike = self.known.setdefault((str(held.dtype), held.size, zlib.crc32(held.data)), [])
        for other in alike:
            if np.array_equal(other, held):
                return other
        held.flags.writeable = False
        alike.append(held)
        return held


def _is_plain_array(x: Words) -> bool:
    known = x.dtype.name in _NUMPY and x.dtype.isnative and x.dtype.metadata is None and x.ndim <= MOST_DIMS
    return known and not (x.dtype == np.bool_ and odd_bools(x.view(np.uint8)))


def _is_plain(x: Tensor) -> bool:
    named = DTYPES.get(str(x.dtype).removeprefix("torch.")) is x.dtype
    strided = x.layout == torch.strided and not x.is_nested
    return named and strided and x.device.type == "cpu" and not x.requires_grad and x.dim() <= MOST_DIMS


def on_host(data: Any) -> Any:
    """`data` with the tensors and TensorDicts in its dicts, lists and tuples on the host; `data` itself if all are."""
    return _mapped(data, lambda item: item.to("cpu") if _is_away(item) else item) if _holds_away(data) else data


def _holds_away(data: Any) -> bool:
    seen: set[int] = set()
    left = [data]
    while left:
        item = left.pop()
        if type(item) not in (dict, list, tuple):
            if _is_away(item):
                return True
        elif id(item) not in seen:
            seen.add(id(item))
            children: Iterable[Any] = cast("Any", item).values() if type(item) is dict else item
            left += [child for child in children if type(child) not in _ATOMS]
    return False


def _is_away(item: Any) -> bool:
    """Whether it is a tensor on a device, or a TensorDict that holds one. The meta device holds nothing to move."""
    if isinstance(item, Tensor):
        return item.device.type not in ("cpu", "meta")
    return is_tensor_collection(item) and any(_is_away(leaf) for leaf in _tensors(item))


def _tensors(batch: Any) -> Iterator[Any]:
    yield from batch.values(include_nested=True, leaves_only=True)


class _Cycle(Exception):
    pass


def _mapped(data: Any, leaf: Callable[[Any], Any]) -> Any:
    """`data` with every item of its dicts, lists and tuples put through `leaf`. Dicts and lists are copied, those that
    were shared stay shared; what contains itself, or is too deep, is left as it is."""
    done: dict[int, Any] = {}
    alive: list[Any] = []  # so that no id comes twice

    def walk(item: Any, depth: int) -> Any:
        kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
        if id(item) in done:
            if done[id(item)] is _Cycle:
                raise _Cycle
            return done[id(item)]
        if kind not in (dict, list, tuple):
            new = leaf(item)
            if new is not item:
                done[id(item)] = new
                alive.append(item)
            return new
        if depth == _DEEPEST:
            raise _Cycle
        alive.append(item)
        done[id(item)] = _Cycle
        old = list(item.values()) if kind is dict else list(item)
        new = [walk(child, depth + 1) for child in old]
        if kind is tuple and all(a is b for a, b in zip(old, new, strict=True)):
            done[id(item)] = item
        else:
            done[id(item)] = dict(zip(item, new, strict=True)) if kind is dict else kind(new)
        return done[id(item)]

    try:
        return walk(data, 0)
    except _Cycle:
        return data


# -------------------------------------------------------------------- JSON


class Unsayable(Exception):
    """An object that JSON cannot say exactly."""


def to_json(data: Any, store: Callable[[Words], int]) -> Any:
    """`data` in JSON; `store` takes the words of stowed tensors and gives their number. Raises Unsayable.

    Dicts, tuples, special numbers, odd text and tensors are objects with one entry, whose name says what they are."""
    items = 0

    def said(item: Any, depth: int) -> Any:
        nonlocal items
        items += 1
        kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
        if depth > _DEEPEST or (depth == _DEEPEST and kind in (list, tuple, dict)):
            raise Unsayable("what is nested too deep")
        if items > _MOST_ITEMS:  # lists that hold one list many times are small in memory, and endless in JSON
            raise Unsayable(f"more than {_MOST_ITEMS} items")
        if item is None or kind is bool:
            return item
        if kind is str:
            return item if is_text(item) else {"text": item.encode("utf-8", "surrogatepass").hex()}
        if kind is int:
            return item if -(2**63) <= item < 2**63 else {"int": hex(item)}
        if kind is float:
            return item if math.isfinite(item) else {"float": struct.pack("<d", item).hex()}
        if kind is list:
            return [said(part, depth + 1) for part in item]
        if kind is tuple:
            return {"tuple": [said(part, depth + 1) for part in item]}
        if kind is dict:
            if problem := _wrong_keys(item):
                raise Unsayable(problem)
            return {"dict": [[said(key, depth + 1), said(value, depth + 1)] for key, value in item.items()]}
        if kind is Stowed:
            return {"tensor" if item.tensor else "array": [store(item.words), item.dtype, list(item.shape)]}
        if isinstance(item, np.generic):
            scalar = cast("Any", item)
            if scalar.dtype.name in _NUMPY and kind is np.dtype(scalar.dtype.name).type:
                return {"scalar": [scalar.dtype.name, scalar.tobytes().hex()]}
        if kind is Tensor:
            raise Unsayable("a Tensor whose bits JSON cannot say (on a GPU, with grad, or bools other than 0 and 1)")
        raise Unsayable(f"a {kind.__name__}")

    return said(data, 0)


def from_json(data: Any, arrays: Callable[[Any], Words], depth: int = 0) -> Any:
    """The inverse of `to_json`. Raises ValueError for what `to_json` does not say."""
    if data is None or isinstance(data, bool | int | float):
        return data
    if isinstance(data, str):
        if not is_text(data):
            raise ValueError("half a surrogate pair")
        return data
    if isinstance(data, list):
        return _parts(cast("list[Any]", data), arrays, depth)
    if not isinstance(data, dict) or len(cast("dict[str, Any]", data)) != 1:
        raise ValueError("an object of several entries")
    ((name, value),) = cast("dict[str, Any]", data).items()
    if name in _SPECIAL and isinstance(value, str):
        return _SPECIAL[name](value)
    if not isinstance(value, list):
        raise ValueError(f"{name[:20]!r} without its value")
    items = cast("list[Any]", value)
    if name == "tuple":
        return tuple(_parts(items, arrays, depth))
    if name == "dict":
        return _dict(items, arrays, depth)
    if name in ("tensor", "array"):
        return _stowed(name == "tensor", items, arrays)
    if name == "scalar":
        return _scalar(items)
    raise ValueError(f"an object {name[:20]!r}")


def is_text(text: Any) -> bool:
    """Whether it is a str that UTF-8 can say: no half of a surrogate pair."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(items: list[Any], arrays: Callable[[Any], Words], depth: int) -> list[Any]:
    if depth >= _DEEPEST:
        raise ValueError("nested too deep")
    return [from_json(item, arrays, depth + 1) for item in items]


def _dict(items: list[Any], arrays: Callable[[Any], Words], depth: int) -> dict[Any, Any]:
    if any(not isinstance(item, list) or len(cast("list[Any]", item)) != 2 for item in items):
        raise ValueError("a dict entry without key and value")
    keys = _parts([item[0] for item in items], _no_array, depth)
    if problem := _wrong_keys(keys):
        raise ValueError(problem)
    found = dict(zip(keys, _parts([item[1] for item in items], arrays, depth), strict=True))
    if len(found) != len(items):
        raise ValueError("a dict with one key twice")
    return found


def _wrong_keys(keys: Iterable[Any]) -> str | None:
    """What makes a dict of these keys slow, if anything does."""
    odd = [key for key in keys if type(key) is not str]
    if len(odd) > MOST_KEYS:
        return f"a dict with {len(odd)} keys that are no text, more than {MOST_KEYS}"
    most = max(Counter(map(hash, odd)).values(), default=0)
    return f"a dict with {most} keys of one hash, more than {MOST_COLLIDING}" if most > MOST_COLLIDING else None


def _no_array(number: Any) -> Words:
    raise ValueError("a tensor as the key of a dict")


def _stowed(tensor: bool, items: list[Any], arrays: Callable[[Any], Words]) -> Stowed:
    if len(items) != 3 or not isinstance(items[2], list):
        raise ValueError("a tensor without array, dtype and shape")
    line, dtype = arrays(items[0]), items[1]
    shape = tuple(cast("list[Any]", items[2]))
    if len(shape) > MOST_DIMS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("a shape of other than whole numbers")
    itemsize = _itemsize(dtype, tensor)
    if math.prod(max(size, 1) for size in shape) * itemsize >= 1 << 62:
        raise ValueError("a shape beyond memory")
    wanted = math.prod(shape) * (2 if itemsize == 16 else 1)
    if line.dtype != word_dtype(itemsize) or line.size != wanted:
        raise ValueError(f"{line.size} {line.dtype} for {wanted} words of a {dtype}")
    if dtype == "bool" and odd_bools(line):
        raise ValueError("bools with other bytes than 0 and 1")
    return Stowed(line, dtype, shape, tensor)


def _itemsize(dtype: Any, tensor: bool) -> int:
    if tensor and isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype].itemsize
    if not tensor and dtype in _NUMPY:
        return np.dtype(dtype).itemsize
    raise ValueError("a dtype that is not known")


def _scalar(items: list[Any]) -> Any:
    if len(items) != 2 or items[0] not in _NUMPY or not isinstance(items[1], str):
        raise ValueError("a scalar without dtype and bits")
    data = _from_hex(items[1], np.dtype(items[0]).itemsize)
    if items[0] == "bool" and data > b"\1":
        raise ValueError("a bool with another byte than 0 and 1")
    return np.frombuffer(data, items[0])[0]


def _from_hex(text: str, size: int | None = None) -> bytes:
    found = bytes.fromhex(text)
    if found.hex() != text or (size is not None and len(found) != size):
        raise ValueError(f"{len(found)} bytes of hex; expected {size}, in small letters")
    return found


def _float(text: str) -> float:
    (number,) = struct.unpack("<d", _from_hex(text, 8))
    if math.isfinite(number):
        raise ValueError("a float that JSON says itself")
    return number


def _int(text: str) -> int:
    number = int(text, 16)
    if hex(number) != text or -(2**63) <= number < 2**63:
        raise ValueError("an integer that JSON says itself, or not as hex() gives it")
    return number


def _text(text: str) -> str:
    found = _from_hex(text).decode("utf-8", "surrogatepass")
    if is_text(found):
        raise ValueError("a text that JSON says itself")
    return found


_SPECIAL: dict[str, Callable[[str], Any]] = {"float": _float, "int": _int, "text": _text}
_NUMPY = tuple(
    ["bool", "float16", "float32", "float64", "complex64"]
    + [f"{sign}int{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)]
)
"""The numpy dtypes that JSON entries may name."""
