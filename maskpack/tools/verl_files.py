"""verl: a saved DataProto, read without verl, and without running code of the file.

    DataProto.save_to_disk, torch.save   -->   (tensors, per-row arrays, meta info)   -->   TensorDict

The class is mapped to a plain holder, tensors and numpy arrays are rebuilt by what stands in `_NAMES`, and every other
name in the file is refused, unless pickles are allowed.
"""

from __future__ import annotations

import _codecs
import collections
import io
import pickle
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from maskpack.core.tree import has

_CLASS = ("verl.protocol", "DataProto")
_NEAR = 200
"""The class is named in the first bytes of a pickle."""


class _Held:
    """What a DataProto gives to a pickle: its tensors, per-row arrays and meta info."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def holds_data_proto(file: Path) -> bool:
    """Whether a file of pickle or torch.save is that of a DataProto, by the class that it names first."""
    with file.open("rb") as opened:
        start = opened.read(_NEAR)
    if start.startswith(b"PK"):
        try:
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                start = archive.open(names[0]).read(_NEAR) if names else b""
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError):
            return False  # torch.load says what is wrong with it
    return all(name.encode() in start for name in _CLASS)


def read_data_proto(file: Path, allow_pickle: bool) -> TensorDict:
    """Its batch, with per-row arrays as one Python object a row and the meta info as batch-wide objects.

    Raises:
        Whatever a damaged pickle raises; UnpicklingError where it names what is not known, without `allow_pickle`.
    """
    with file.open("rb") as opened:
        read = _of_torch if opened.read(2) == b"PK" else _of_pickle
        opened.seek(0)
        held = read(opened, allow_pickle)
    if not isinstance(held, _Held) or not isinstance(held.state, tuple) or len(cast("Any", held.state)) != 3:
        raise pickle.UnpicklingError("it is no DataProto of three parts")
    tensors, arrays, info = cast("tuple[Any, Mapping[str, Any], Mapping[str, Any]]", held.state)
    batch: Any = _tensors(tensors, allow_pickle)
    rows = [] if batch is None else list(batch.batch_size)
    rows = rows or [len(next(iter(arrays.values())))] if arrays else rows
    out: Any = TensorDict({} if batch is None else dict(batch.items()), batch_size=rows)
    for name, array in arrays.items():
        if (
            len(array) > max(1, file.stat().st_size) or [len(array)] != rows[:1]
        ):  # items of no bytes take none in a file
            raise pickle.UnpicklingError(f"{name!r} has {len(array)} items for rows {rows}")
        out.set(name, NonTensorStack(*[NonTensorData(item) for item in list(array)]))
    for name, value in info.items():
        if not has(out, name):
            out.set(name, NonTensorData(value, batch_size=rows))
    return out


# -------------------------------------------------------------------- tensors


def _tensors(data: Any, allow_pickle: bool) -> Any:
    """The TensorDict: bytes of torch.save, or (batch size, device, {name: (dtype, shape, bytes)})."""
    if data is None or not isinstance(data, tuple):
        return None if data is None else _loaded(bytes(data), allow_pickle)
    size, _, items = cast("tuple[Any, Any, Mapping[str, Any]]", data)
    return TensorDict({name: _tensor(item) for name, item in items.items()}, batch_size=torch.Size(size))


def _tensor(item: Any) -> Tensor:
    if len(item) == 2:
        return torch.nested.nested_tensor([_tensor(row) for row in item[1]], layout=torch.jagged, device="cpu")
    name, shape, data = item
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{name!r} is no dtype")
    held = bytearray(memoryview(data))
    return torch.frombuffer(held, dtype=dtype).view(shape) if held else torch.empty(shape, dtype=dtype, device="cpu")


def _loaded(data: bytes, allow_pickle: bool = False) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError("its tensors or arrays name what is no plain data") from error


# -------------------------------------------------------------------- pickles


def _rebuilt(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """A tensor that lies in a Python object."""
    held = torch.empty(0, dtype=storage.dtype, device=storage.device)
    return held.set_(storage._untyped_storage, offset, torch.Size(size), tuple(stride))


def _array(buffer: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> Any:
    flat: Any = np.frombuffer(buffer, dtype=dtype)
    return flat.reshape(shape, order=order)


def _encoded(text: Any, name: Any) -> bytes:
    """How bytes were pickled once."""
    if name not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it encodes a text as {name!r}, which is no way to pickle bytes")
    return _codecs.encode(text, "latin1")


def _taken(kind: Any, *held: type[Any]) -> Any:
    """`kind` of what a pickle holds: a number would make as many bytes, a range as many items."""

    def make(*args: Any) -> Any:
        if args[1:] == ("latin-1",) and kind is bytearray:
            args = (_encoded(*args),)
        if len(args) > 1 or not all(type(arg) in held for arg in args):
            raise pickle.UnpicklingError(f"it makes a {kind.__name__} of {[type(arg).__name__ for arg in args]}")
        return kind(*args)

    return make


def _scalar(dtype: Any, data: Any) -> Any:
    return _SCALAR(dtype, data)


_SCALAR: Any = np.float32(0).__reduce__()[0]


def _arrays() -> dict[tuple[str, str], Any]:
    array: Any = np.empty(0).__reduce__()
    out: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for package in ("numpy.core", "numpy._core"):  # before numpy 2, and since
        out[f"{package}.multiarray", "_reconstruct"] = array[0]
        out[f"{package}.multiarray", "scalar"] = _scalar
        out[f"{package}.numeric", "_frombuffer"] = _array
    return out


_ARRAYS = {_CLASS: _Held, ("_codecs", "encode"): _encoded, **_arrays()}
_NAMES: dict[tuple[str, str], Any] = {
    **_ARRAYS,
    ("torch", "Size"): _taken(torch.Size, list, tuple),
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch.storage", "_load_from_bytes"): _loaded,
    ("collections", "OrderedDict"): _taken(collections.OrderedDict, list, tuple),
    ("builtins", "bytearray"): _taken(bytearray, bytes),
    **{("builtins", kind.__name__): _taken(kind, list, tuple, set) for kind in (set, frozenset)},
    **{("builtins", kind.__name__): kind for kind in (complex, range, slice)},
}
"""All that a file may call, without `allow_pickle`."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")


class _Trusting(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return _Held if (module, name) == _CLASS else super().find_class(module, name)


def _of_pickle(opened: BinaryIO, allow_pickle: bool) -> Any:
    if allow_pickle:
        return _Trusting(opened).load()
    size = opened.seek(0, io.SEEK_END)
    opened.seek(0)
    for code, number, _ in pickletools.genops(opened):
        if "PUT" in code.name and number is not None and number > size:  # the memo is a table of that length
            raise pickle.UnpicklingError(f"it remembers thing number {number} in {size} bytes")
    opened.seek(0)
    return _Plain(opened).load()


def _of_torch(opened: BinaryIO, allow_pickle: bool) -> Any:
    """torch's reader of plain data, which is told of arrays; or that of pickles, with the class mapped all the same."""
    if allow_pickle:
        module: Any = SimpleNamespace(__name__="pickle", Unpickler=_Trusting, load=pickle.load)
        return torch.load(opened, map_location="cpu", weights_only=False, pickle_module=module)
    kinds = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGOSUMm"]
    told: Any = [*((value, ".".join(name)) for name, value in _ARRAYS.items()), *kinds]
    with torch.serialization.safe_globals(told):
        return _loaded(opened.read())
