"""Folders of TensorDict.memmap, read without running code of the folder.

meta.json     of each field: dtype and shape, or the kind of a sub-folder
NAME.memmap   the elements of a tensor
NAME/         a TensorDict, or Python objects as JSON
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

META = "meta.json"


def read_memmap(folder: Path) -> TensorDict:
    """The TensorDict in a folder; its tensors are mapped.

    Raises:
        ValueError: a jagged tensor, a tensorclass or an object that is pickled.
        Whatever a damaged folder raises.
    """
    about = _meta(folder)
    batch = TensorDict({}, batch_size=about["shape"])
    for name, entry in about.items():
        if isinstance(entry, dict):
            batch.set(name, _entry(folder, name, cast("dict[str, Any]", entry), batch))
    return batch


def _entry(folder: Path, name: str, about: dict[str, Any], batch: TensorDict) -> Any:
    if Path(name).name != name:
        raise ValueError(f"a field {name!r}, which is no name of a file")
    kind = about.get("type")
    if kind is None:
        return _tensor(folder / f"{name}.memmap", about)
    if kind == "TensorDict":
        return read_memmap(folder / name)
    found = _meta(folder / name)
    if kind not in ("NonTensorData", "NonTensorStack") or "data" not in found:
        raise ValueError(f"field {name!r} is a {kind} that is no plain data")
    data = found["data"]
    if kind == "NonTensorStack":
        return NonTensorStack(*map(NonTensorData, data))
    return NonTensorData(data, batch_size=batch.batch_size)


def _tensor(file: Path, about: dict[str, Any]) -> Tensor:
    if about.get("is_nested"):
        raise ValueError(f"{file.name} is jagged; expected a plain tensor")
    shape, dtype = cast("list[int]", about["shape"]), getattr(torch, about["dtype"].removeprefix("torch."))
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(str(file), size=size, dtype=dtype).reshape(shape)


def _meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / META).read_bytes())
