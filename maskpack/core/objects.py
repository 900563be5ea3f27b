"""Non-tensor entries of a batch: Python objects, for each row or for the whole batch, and the tensors inside them.

    {"pixel_values": tensor, "n": 3}  --stowed-->  {"pixel_values": Stowed(words, ...), "n": 3}  --entry-->  tensors

A stowed tensor is an array, which pickle protocol 5 does not copy; tensors with equal bits share one array. Plain data
is written as JSON, so that reading a file runs no code; all else needs a pickle.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
"""The largest number of dims of an element, or of a tensor in a Python object. NumPy allows 32; rows and width come in
addition."""
MOST_DEPTH = 8
"""The largest depth of a stack of objects in a file: tensordict takes 2^depth steps to find the device of a stack."""
ITEM_BYTES = 1 << 10
"""The assumed size of one entry of a NonTensorStack in bytes."""


@dataclass(frozen=True, eq=False)
class Stowed:
    """The raw bits of a tensor or NumPy array in a Python object. Read-only.

    Attributes:
        words: the raw bits; tensors of 16-byte items have a last dim of two.
        dtype: the name of the torch or NumPy dtype.
        shape: the shape of the tensor or array.
        tensor: True for a torch tensor.
    """

    words: Words
    dtype: str
    shape: tuple[int, ...]
    tensor: bool

    def restored(self) -> Any:
        """A copy of the tensor or array."""
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
        data: one object for the batch, or a list with one object for each row (nested lists for more batch dims).
        depth: the number of batch dims along which `data` is a list; 0 for one object for the batch.
        stacked: whether `data` is the list of TensorDicts or tensorclasses of a lazy stack.
        bare: whether it is known to hold no stowed tensors.
    """

    data: Any
    depth: int
    stacked: bool = False
    bare: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is numbers, text, bytes and None: one of these, or one for each row."""
        items: list[Any] = self.data if self.depth == 1 else [self.data]
        return all(type(item) in _ATOMS for item in items)

    @classmethod
    def of(cls, value: Any) -> Objects:
        """The entry of a TensorDict."""
        if isinstance(value, NonTensorStack):
            return cls(items_of(value), len(value.batch_size))
        if is_tensor_collection(value) and not is_non_tensor(value):  # a lazy stack
            return cls(list(value.unbind(0)), 1, True)
        return cls(value.data if isinstance(value, NonTensorData) else value, 0)

    def stowed(self) -> Objects:
        """The entry with its tensors as Stowed; the rows of a lazy stack are copied."""
        if self.stacked:
            return replace(self, data=[row.clone() for row in self.data])
        if self.depth == 1 and _ATOMS.issuperset(map(type, self.data)):
            return Objects(list(self.data), 1, False, True)
        known: dict[tuple[str, int, int], list[Words]] = {}
        data = mapped(self.data, lambda item: _stowed(item, known), rows=self.depth > 0)
        return Objects(data, self.depth, False, not known)

    def entry(self, batch_size: tuple[int, ...]) -> Any:
        """The entry of a TensorDict, with copies of the tensors."""
        if self.stacked:
            return lazy_stack([row.clone() for row in self.data]) if self.data else TensorDict({}, batch_size)
        data = self.restored()
        return NonTensorData(data, batch_size=batch_size) if self.depth == 0 else _stacked(data, self.depth, batch_size)

    def restored(self) -> Any:
        """`data` with copies of the tensors."""
        return mapped(self.data, lambda item: item.restored() if isinstance(item, Stowed) else item, self.depth > 0)

    @property
    def decoded_nbytes(self) -> int:
        """The size of `entry` in bytes: its tensors, and ITEM_BYTES for each entry of a stack."""
        count, items = 0, [self.data]
        for _ in range(self.depth):
            items = [part for item in items for part in item]
            count += len(items)
        return ITEM_BYTES * count + sum(own.words.nbytes for own in self._tensors())

    def take(self, rows: Iterable[int]) -> Objects:
        """The objects of some rows."""
        return replace(self, data=[self.data[row] for row in rows]) if self.depth else self

    def arrays(self) -> list[Words]:
        """The arrays of its stowed tensors, without repetition."""
        return list({id(own.words): own.words for own in self._tensors()}.values())

    def _tensors(self) -> list[Stowed]:
        """Its stowed tensors, each once."""
        found: dict[int, Stowed] = {}
        todo, seen = [] if self.bare else [[self.data]], set[int]()
        while todo:
            for item in todo.pop():
                kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
                if kind is Stowed:
                    found[id(item)] = item
                elif kind in (dict, list, tuple) and id(item) not in seen:
                    seen.add(id(item))
                    todo.append(item.values() if kind is dict else item)
        return list(found.values())


def items_of(stack: NonTensorStack) -> list[Any]:
    """`stack.tolist()`, in a hundredth of the time where each entry is the object of one row."""
    entries: list[Any] = stack.tensordicts
    try:
        if stack.batch_dims == 1 and all(type(entry) is NonTensorData and not entry.batch_size for entry in entries):
            return [entry._non_tensordict["data"] for entry in entries]
    except (AttributeError, KeyError):  # another version of tensordict
        pass
    return stack.tolist()


def stack_of(items: Iterable[Any]) -> NonTensorStack:
    """A NonTensorStack of objects, in a quarter of the time where all are of plain types."""
    data = list(items)
    make = _fast_stack() if data and _PLAIN.issuperset(map(type, data)) else None
    return NonTensorStack(*map(NonTensorData, data)) if make is None else make(data)


_PLAIN = frozenset([*_ATOMS, dict, list, tuple])


def _attributes(value: Any) -> dict[str, Any]:
    return value.__dict__


@cache
def _fast_stack() -> Callable[[list[Any]], Any] | None:
    """A copy of a NonTensorStack with other objects in it, if that gives the same as the constructor; else None."""
    new: Any = object.__new__
    try:
        of_stack = dict(_attributes(NonTensorStack(NonTensorData(None))))
        of_entry = dict(_attributes(of_stack["tensordicts"][0]))
        of_inner, data = dict(_attributes(of_entry["_tensordict"])), of_entry["_non_tensordict"]

        def make(items: list[Any]) -> Any:
            entries: list[Any] = []
            for item in items:
                inner, entry = new(TensorDict), new(NonTensorData)
                _attributes(inner).update(of_inner, _tensordict={})
                _attributes(entry).update(of_entry, _tensordict=inner, _non_tensordict={**data, "data": item})
                entries.append(entry)
            stack = new(NonTensorStack)
            _attributes(stack).update(of_stack, _batch_size=torch.Size([len(entries)]), tensordicts=entries)
            return stack

        def told(stack: Any) -> Any:
            own = dict(_attributes(stack))
            entries = [dict(_attributes(entry)) for entry in own.pop("tensordicts")]
            return own, entries, [dict(_attributes(entry.pop("_tensordict"))) for entry in entries]

        samples: Any = ["a"], [{"b": [1]}, [2, "c"]], [(3,), None, 0.5]
        same = all(told(make(items)) == told(NonTensorStack(*map(NonTensorData, items))) for items in samples)
    except Exception:  # private names may mean anything in another version of tensordict
        return None
    return make if same else None


def _stacked(data: list[Any], depth: int, sizes: tuple[int, ...]) -> Any:
    if depth == 1:
        return stack_of(data)
    if not data:  # a slice of a non-empty stack keeps the sizes of the other dims
        inner: Any = NonTensorData(None, batch_size=sizes[1:])
        return NonTensorStack(inner)[:0] if len(sizes) >= depth else NonTensorStack()
    return NonTensorStack(*[_stacked(item, depth - 1, sizes[1:]) for item in data])


def _stowed(item: Any, known: dict[tuple[str, int, int], list[Words]]) -> Any:
    """A tensor or an array as Stowed, others unchanged. Those with equal bits share one of the `known` arrays."""
    line: Words
    if type(item) is Tensor and _is_plain(item):
        line, dtype = words(item).numpy().reshape(-1), str(item.dtype).removeprefix("torch.")
    elif type(item) is np.ndarray and _is_plain_array(item):
        line, dtype = np.ascontiguousarray(item).reshape(-1).view(word_dtype(item.itemsize)), str(item.dtype)
    else:
        return item
    if dtype == "bool" and odd_bools(line):
        return item
    copy: Words = np.array(line)
    alike = known.setdefault((str(copy.dtype), copy.size, zlib.crc32(copy.data)), [])
    shared = next((other for other in alike if np.array_equal(other, copy)), None)
    if shared is None:
        copy.flags.writeable = False
        alike.append(shared := copy)
    return Stowed(shared, dtype, tuple(item.shape), type(item) is Tensor)


def _is_plain_array(x: Words) -> bool:
    return x.dtype.name in _NUMPY and x.dtype.isnative and x.dtype.metadata is None and x.ndim <= MOST_DIMS


def _is_plain(x: Tensor) -> bool:
    named = DTYPES.get(str(x.dtype).removeprefix("torch.")) is x.dtype
    strided = x.layout == torch.strided and not x.is_nested
    return named and strided and x.device.type == "cpu" and not x.requires_grad and x.dim() <= MOST_DIMS


def on_host(data: Any) -> Any:
    """`data` with all tensors and TensorDicts in its dicts, lists and tuples moved to the host."""
    return mapped(data, lambda item: item.to("cpu") if _is_away(item) else item)


def _is_away(item: Any) -> bool:
    """Whether `item` is a tensor on a device other than the CPU and meta, or a TensorDict with such a tensor."""
    if isinstance(item, Tensor):
        return item.device.type not in ("cpu", "meta")
    return is_tensor_collection(item) and any(map(_is_away, item.values(include_nested=True, leaves_only=True)))


def is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or have equal bits, by their pickles: == takes 1 for 1.0, and 0.0 for -0.0. Objects
    that contain themselves or cannot be pickled are no others."""
    if one is other:
        return True
    try:
        return _pickled(one) == _pickled(other)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return False


def _pickled(data: Any) -> bytes:
    pickler = pickle.Pickler(file := io.BytesIO(), 5)
    pickler.fast = True  # whether parts of it are one object does not count
    pickler.dump(data)
    return file.getvalue()


class _Cycle(Exception):
    pass


def mapped(data: Any, leaf: Callable[[Any], Any], rows: bool = False) -> Any:
    """`data` with `leaf` applied to each item of its dicts, lists and tuples, but text, bytes, numbers and None. Dicts
    and lists are copied, and shared ones stay shared. Data that contains itself or is nested too deep is returned
    unchanged; of a list of `rows`, only the rows that do or are."""
    done: dict[int, Any] = {}
    alive: list[Any] = []  # keeps ids unique

    def of(item: Any, depth: int) -> Any:
        kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
        if kind in _ATOMS:
            return item
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
        new = [of(child, depth + 1) for child in old]
        if kind is tuple and all(a is b for a, b in zip(old, new, strict=True)):
            done[id(item)] = item
        else:
            done[id(item)] = dict(zip(item, new, strict=True)) if kind is dict else kind(new)
        return done[id(item)]

    try:
        return of(data, 0)
    except _Cycle:
        return [mapped(row, leaf) for row in data] if rows else data


# -------------------------------------------------------------------- JSON


class NotInJson(Exception):
    """An object is no plain data."""


def to_json(data: Any, store: Callable[[Words], int]) -> Any:
    """Plain data as JSON; `store` stores the array of a stowed tensor and returns its number. Raises NotInJson.

    Plain are None, bools, numbers, text, lists, tuples, dicts with text as keys, tensors, NumPy arrays and scalars.
    What JSON has no exact form for becomes an object of one entry, named after its kind.
    """
    items = 0

    def encoded(item: Any, depth: int) -> Any:
        nonlocal items
        items += 1
        kind: Any = type(item)  # type: ignore[reportUnknownVariableType]
        if depth > _DEEPEST or (depth == _DEEPEST and kind in (list, tuple, dict)):
            raise NotInJson("data nested too deep")
        if items > _MOST_ITEMS:  # lists that contain one list many times are small in memory but huge in JSON
            raise NotInJson(f"more than {_MOST_ITEMS} items")
        if item is None or kind is bool:
            return item
        if kind is str:
            if not is_text(item):
                raise NotInJson("text with half a surrogate pair")
            return item
        if kind is int:
            return item if -(2**63) <= item < 2**63 else {"int": hex(item)}
        if kind is float:
            return item if math.isfinite(item) else {"float": struct.pack("<d", item).hex()}
        if kind is list:
            return [encoded(part, depth + 1) for part in item]
        if kind is tuple:
            return {"tuple": [encoded(part, depth + 1) for part in item]}
        if kind is dict:
            if not all(type(key) is str and is_text(key) for key in item):
                raise NotInJson("a dict with other keys than text")
            return {"dict": [[key, encoded(value, depth + 1)] for key, value in item.items()]}
        if kind is Stowed:
            return {"tensor" if item.tensor else "array": [store(item.words), item.dtype, list(item.shape)]}
        if isinstance(item, np.generic):
            scalar = cast("Any", item)
            if scalar.dtype.name in _NUMPY and kind is _NUMPY[scalar.dtype.name].type:
                return {"scalar": [scalar.dtype.name, scalar.tobytes().hex()]}
        if kind is Tensor:
            raise NotInJson("a Tensor that JSON cannot represent (on a GPU, with grad, or bools other than 0 and 1)")
        if kind is np.ndarray and cast("Any", item).dtype.hasobject:
            raise NotInJson("a ndarray of objects (for one object a row: batch[name] = values.tolist())")
        raise NotInJson(f"a {kind.__name__}")

    return encoded(data, 0)


def from_json(data: Any, arrays: Callable[[Any], Words], depth: int = 0) -> Any:
    """The inverse of `to_json`. Raises ValueError for JSON that `to_json` does not write."""
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
    if name in ("int", "float", "scalar"):
        return _number(name, value)
    if not isinstance(value, list):
        raise ValueError(f"{name[:20]!r} without its value")
    items = cast("list[Any]", value)
    if name == "tuple":
        return tuple(_parts(items, arrays, depth))
    if name == "dict":
        return _dict(items, arrays, depth)
    if name in ("tensor", "array"):
        return _stored(name == "tensor", items, arrays)
    raise ValueError(f"an object {name[:20]!r}")


def is_text(text: Any) -> bool:
    """Whether `text` is a str without unpaired surrogates, which UTF-8 cannot encode."""
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


def _dict(items: list[Any], arrays: Callable[[Any], Words], depth: int) -> dict[str, Any]:
    if any(not isinstance(item, list) or len(cast("list[Any]", item)) != 2 or not is_text(item[0]) for item in items):
        raise ValueError("a dict entry without a text as its key, and a value")
    out = dict(zip([item[0] for item in items], _parts([item[1] for item in items], arrays, depth), strict=True))
    if len(out) != len(items):
        raise ValueError("a dict with one key twice")
    return out


def _stored(tensor: bool, items: list[Any], arrays: Callable[[Any], Words]) -> Stowed:
    if len(items) != 3 or not isinstance(items[2], list):
        raise ValueError("a tensor without array, dtype and shape")
    line, dtype = arrays(items[0]), items[1]
    shape = tuple(cast("list[Any]", items[2]))
    if len(shape) > MOST_DIMS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("a shape that is not of whole numbers")
    known: Mapping[str, Any] = DTYPES if tensor else _NUMPY
    if not isinstance(dtype, str) or dtype not in known:
        raise ValueError("an unknown dtype")
    itemsize = known[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize >= 1 << 62:
        raise ValueError("a shape beyond memory")
    wanted = math.prod(shape) * (2 if itemsize == 16 else 1)
    if line.dtype != word_dtype(itemsize) or line.size != wanted:
        raise ValueError(f"{line.size} {line.dtype} for {wanted} items of a {dtype}")
    if dtype == "bool" and odd_bools(line):
        raise ValueError("bools with other bytes than 0 and 1")
    return Stowed(line, dtype, shape, tensor)


def _number(name: str, value: Any) -> Any:
    """A number that JSON has none for, in the one form in which `to_json` writes it."""
    kind, text = cast("list[Any]", value) if name == "scalar" and isinstance(value, list) else ("<f8", value)
    if not isinstance(text, str) or kind not in ("<f8", *_NUMPY):
        raise ValueError(f"{name} without its bits")
    number: Any
    (number,) = [int(text, 16)] if name == "int" else np.frombuffer(bytes.fromhex(text), kind)
    number = number.item() if name == "float" else number
    if to_json(number, len) != {name: value}:
        raise ValueError(f"{name} in another form than the one that is written")
    return number


_NUMPY = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64"),
    )
}
"""The NumPy dtypes of JSON entries."""
