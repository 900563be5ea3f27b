"""The coverage check: which tensors of a batch are still dense, wherever they hide."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from maskpack.core.keys import Path, show
from maskpack.core.objects import Objects
from maskpack.errors import CoverageError

_PLAIN = (str, bytes, bytearray, range, int, float, complex, bool, type(None))
_LEAVES = (*_PLAIN, np.generic, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class DenseField:
    """A tensor that would travel dense.

    Attributes:
        path: its place; inside a Python object the path goes on as the object would be read, as in `extra/[3]/tokens`.
        shape, dtype, nbytes: of the tensor.
        reason: why it is dense.
        tensors: 1, or how many lie inside one Python object; `nbytes` is that of all, the rest that of the first.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reason: str
    tensors: int = 1

    @classmethod
    def of(cls, path: Path, tensor: Tensor, reason: str) -> DenseField:
        return cls(path, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size(), reason)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f'"{show(self.path)}" {self.shape} {dtype}, {self.nbytes:,} bytes: {self.reason}'


def hidden_tensors(path: Path, value: Any) -> list[DenseField]:
    """The tensors of one dim or more inside a Python object, or inside those of all rows, as one DenseField; none if
    there is none."""
    found = list(_tensors_in(path, value))
    if not found:
        return []
    reason = f'a tensor inside the Python object "{show(path)}"'
    if len(found) > 1:
        reason = f"with {len(found) - 1:,} more, tensors inside Python objects"
    first = DenseField.of(*found[0], reason)
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in found)
    return [dataclasses.replace(first, nbytes=nbytes, tensors=len(found))]


def _tensors_in(path: Path, value: Any) -> Iterator[tuple[Path, Tensor]]:
    """Each once; mappings, sequences, object arrays, dataclasses and plain attributes are searched."""
    data = Objects.of(value).data
    seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id comes twice
    stack: list[tuple[Path, Any]] = [(path, data)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            if item.dim() and not item.is_nested:
                yield place, item
            continue
        stack.extend((((*place, name)), child) for name, child in reversed(list(_children(item))))


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if is_tensor_collection(item) or isinstance(item, Mapping):
        yield from ((str(name), child) for name, child in cast("Mapping[Any, Any]", item).items())
    elif isinstance(item, np.ndarray):
        array = cast("Any", item)
        yield from ((f"[{index}]", child) for index, child in enumerate(array.flat if array.dtype == object else ()))
    elif isinstance(item, Collection):
        yield from ((f"[{index}]", child) for index, child in enumerate(cast("Collection[Any]", item)))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((field.name, getattr(item, field.name)) for field in dataclasses.fields(item))
    elif not isinstance(item, type):
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(item, name)) for name in slots if hasattr(item, name))
        yield from getattr(item, "__dict__", {}).items()


def check_strict(call: str, dense: Iterable[DenseField]) -> None:
    """Raises CoverageError if anything is dense."""
    found = list(dense)
    if found:
        lines = "\n".join(f"  {field}" for field in found)
        raise CoverageError(
            f"{call}: {len(found)} field(s) would travel dense, expected none in strict mode:\n{lines}\n"
            "Give each field a MaskNestingSpec in the registry, or declare it dense: name it, or the Python object "
            "that the tensor is in, in ignore_dense_fields, or as DENSE in the registry."
        )
