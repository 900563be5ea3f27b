"""The formats of saved batches, as Python objects. No code of a file runs unless pickles are allowed.

    torch.save, pickle     a TensorDict, dicts, lists, a verl DataProto
    npz                    a dict of tensors
    JSON, JSON lines       dicts and lists of numbers

    DataProto, without verl --> (tensors, arrays by row, meta info) --> TensorDict

What else a file holds is refused by name.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
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


def read_npz(file: Path) -> dict[str, Tensor]:
    """The arrays of a file of NumPy."""
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def read_json(file: Path) -> Any:
    """The value of a JSON file, or the list of those of its lines."""
    text = file.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


class DataProto:
    """Takes the place of verl's class. Its state is (bytes of torch.save, arrays by row, meta info)."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def tensordict(self, allow_pickle: bool) -> TensorDict:
        """Its batch: per-row arrays become one Python object a row, the meta info objects of the batch.

        Raises:
            Whatever a damaged pickle raises.
        """
        data, arrays, info = cast("tuple[bytes | None, Mapping[str, Any], Mapping[str, Any]]", self.state)
        batch: Any = None if data is None else read_torch(io.BytesIO(data), allow_pickle)
        batch = TensorDict({}) if batch is None else batch
        rows = list(batch.batch_size) or [len(array) for array in arrays.values()][:1]
        entries = {name: NonTensorData(value, batch_size=rows) for name, value in info.items()} | dict(batch.items())
        for name, array in arrays.items():
            if array.nbytes < len(array) or [len(array)] != rows[:1]:  # items of no bytes take none in a file
                raise pickle.UnpicklingError(f"{name!r} has {len(array)} items for rows {rows}")
            entries[name] = NonTensorStack(*map(NonTensorData, list(array)))
        return TensorDict(entries, batch_size=rows)


def read_torch(file: Path | io.BytesIO, allow_pickle: bool = False) -> Any:
    """The contents of a file of torch.save."""
    if allow_pickle:
        trusting: Any = SimpleNamespace(__name__="pickle", Unpickler=_Trusting, load=pickle.load)
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=trusting)
    try:
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) (?:was not|whose)|<(?:class|function) '?([\w.]+)", str(error))
        if named:
            raise pickle.UnpicklingError(f"it names {named[1] or named[2]}, which is no plain data") from error
        cause = (str(error).partition("WeightsUnpickler error:")[2] or str(error)).strip().splitlines()[0]
        raise pickle.UnpicklingError(f"it is damaged: {cause}") from error


def read_pickle(file: Path, allow_pickle: bool) -> Any:
    """The contents of a pickle."""
    if not allow_pickle:
        raise pickle.UnpicklingError("it is a pickle")
    with file.open("rb") as opened:
        return _Trusting(opened).load()


class _Trusting(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return DataProto if f"{module}.{name}" == _CLASS else super().find_class(module, name)


def _encoded(text: Any, name: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if name not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it encodes a text as {name!r}, which is no way to pickle bytes")
    return cast("bytes", text.encode("latin1"))


_MAKERS: Any = importlib.import_module("tensordict._reductions")
_LOCKED: Any = getattr(importlib.import_module("tensordict.utils"), "_LockedSchema", tuple)  # a tuple, from 0.13 on
_CALLS: dict[str, Any] = {
    "multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "multiarray.scalar": np.float32(0).__reduce__()[0],
    "numeric._frombuffer": np.empty(0).__reduce_ex__(5)[0],
}
_SAFE: list[Any] = [
    *((call, f"numpy.{core}.{name}") for core in ("core", "_core") for name, call in _CALLS.items()),  # numpy 1 and 2
    *((value, f"numpy.{value.__name__}") for value in (np.ndarray, np.dtype)),
    *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGOSUMm"),
    *(_MAKERS._make_td, _MAKERS._rebuild_tensordict_files_consolidated, (_LOCKED, "tensordict.utils._LockedSchema")),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
    *((_encoded, "_codecs.encode"), (DataProto, _CLASS)),
]
"""What torch.save of a batch may name: how arrays and a TensorDict are made again. Attributes of a new one are set,
views of a tensor are taken; nothing is imported, opened or unpickled. tensordict before 0.15 does not tell torch so."""
