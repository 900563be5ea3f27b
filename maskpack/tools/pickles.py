"""Files of torch.save and of pickle, read without running code of the file, and a verl DataProto without verl.

    pickle or torch.save of a DataProto --> (tensors, arrays by row, meta info) --> TensorDict

An unpickler builds what `_NAMES` lists, and refuses every other name unless pickles are allowed.
"""

from __future__ import annotations

import _codecs
import collections
import importlib
import io
import pickle
import pickletools
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

_CLASS = "verl.protocol.DataProto"


class DataProto:
    """Takes the place of verl's class. Its state is (tensors, arrays by row, meta info)."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def tensordict(self, allow_pickle: bool) -> TensorDict:
        """Its batch: per-row arrays become one Python object a row, the meta info objects of the batch.

        Raises:
            Whatever a damaged pickle raises.
        """
        tensors, arrays, info = cast("tuple[Any, Mapping[str, Any], Mapping[str, Any]]", self.state)
        batch: Any = _tensors(tensors, allow_pickle)
        rows = list(batch.batch_size) or [len(array) for array in arrays.values()][:1]
        entries = {name: NonTensorData(value, batch_size=rows) for name, value in info.items()} | dict(batch.items())
        for name, array in arrays.items():
            if array.nbytes < len(array) or [len(array)] != rows[:1]:  # items of no bytes take none in a file
                raise pickle.UnpicklingError(f"{name!r} has {len(array)} items for rows {rows}")
            entries[name] = NonTensorStack(*map(NonTensorData, list(array)))
        return TensorDict(entries, batch_size=rows)


def _tensors(data: Any, allow_pickle: bool) -> Any:
    """A TensorDict from bytes of torch.save, or from (batch size, device, {name: (dtype, shape, bytes)})."""
    if isinstance(data, tuple):
        size, _, items = cast("tuple[Any, Any, Mapping[str, Any]]", data)
        return TensorDict({name: _tensor(item) for name, item in items.items()}, batch_size=torch.Size(size))
    batch = None if data is None else read_torch(io.BytesIO(data), allow_pickle)
    return TensorDict({}) if batch is None else batch


def _tensor(item: Any) -> Tensor:
    if len(item) == 2:
        return torch.nested.nested_tensor([_tensor(row) for row in item[1]], layout=torch.jagged, device="cpu")
    name, shape, data = item
    buffer: Any = np.frombuffer(bytearray(memoryview(data)), np.uint8)
    return torch.from_numpy(buffer).view(_dtype("torch", name)).view(shape)


def _dtype(module: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if module != "torch" or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
    return dtype


# -------------------------------------------------------------------- readers


def read_torch(file: Path | io.BytesIO, allow_pickle: bool = False) -> Any:
    """The contents of a file of torch.save."""
    if allow_pickle:
        trusting: Any = SimpleNamespace(__name__="pickle", Unpickler=_Trusting, load=pickle.load)
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=trusting)
    kinds = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGOSUMm"]
    safe: Any = [*((value, name) for name, value in _ARRAYS.items()), *kinds, *_BATCHES]
    try:
        with torch.serialization.safe_globals(safe):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) was not", str(error))
        reason = f"it names {named[1]}, which" if named else "it is damaged, or names a class or function that"
        raise pickle.UnpicklingError(f"{reason} is no plain data") from error


def read_pickle(file: Path, allow_pickle: bool) -> Any:
    """The contents of a pickle."""
    with file.open("rb") as opened:
        if allow_pickle:
            return _Trusting(opened).load()
        size = file.stat().st_size
        for code, number, _ in pickletools.genops(opened):
            if "PUT" in code.name and number is not None and number > size:  # the memo is a table of that length
                raise pickle.UnpicklingError(f"it remembers thing number {number} in {size} bytes")
        opened.seek(0)
        return _Plain(opened).load()


class _Trusting(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return DataProto if f"{module}.{name}" == _CLASS else super().find_class(module, name)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        known = _NAMES.get(f"{module}.{name}")
        return _dtype(module, name) if known is None else known


# -------------------------------------------------------------------- what a file may call


def _storage(data: bytes) -> Any:
    return read_torch(io.BytesIO(data))


def _scalar(dtype: Any, data: Any) -> Any:
    return _SCALAR(dtype, data)


def _encoded(text: Any, name: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if name not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it encodes a text as {name!r}, which is no way to pickle bytes")
    return _codecs.encode(text, "latin1")


def _from(kind: Any, *sources: type[Any]) -> Any:
    """`kind` of a value of `sources`, which lies in the file: a number would make as many bytes, a range as many
    items."""

    def make(*args: Any) -> Any:
        if args[1:] == ("latin-1",) and kind is bytearray:
            args = (_encoded(*args),)
        if len(args) > 1 or not all(type(arg) in sources for arg in args):
            raise pickle.UnpicklingError(f"it makes a {kind.__name__} of {[type(arg).__name__ for arg in args]}")
        return kind(*args)

    return make


_MAKERS: Any = importlib.import_module("tensordict._reductions")
_LOCKED: Any = getattr(importlib.import_module("tensordict.utils"), "_LockedSchema", None)  # a tuple, from 0.14 on
_BATCHES: list[Any] = [
    *(_MAKERS._make_td, _MAKERS._rebuild_tensordict_files_consolidated, *filter(None, [_LOCKED])),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
]
"""How a TensorDict is made again: attributes of a new one are set, views of a tensor are taken; nothing is imported,
opened or unpickled. tensordict before 0.15 does not tell torch so."""
_SCALAR: Any = np.float32(0).__reduce__()[0]
_CALLS: dict[str, Any] = {
    "multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": np.empty(0).__reduce_ex__(5)[0],
}
_ARRAYS: dict[str, Any] = {
    **{f"numpy.{core}.{name}": call for core in ("core", "_core") for name, call in _CALLS.items()},  # numpy 1 and 2
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": _encoded,
    _CLASS: DataProto,
}
_NAMES: dict[str, Any] = {
    **_ARRAYS,
    **{f"builtins.{kind.__name__}": kind for kind in (complex, range, slice)},
    **{f"builtins.{kind.__name__}": _from(kind, list, tuple, set) for kind in (set, frozenset)},
    "builtins.bytearray": _from(bytearray, bytes),
    "collections.OrderedDict": _from(collections.OrderedDict, list, tuple),
    "torch.Size": _from(torch.Size, list, tuple),
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor_v2": torch.empty(0, device="cpu").__reduce_ex__(2)[0],
    "torch.storage._load_from_bytes": _storage,
}
