"""The batches of verl, packed.

    DataProto   batch, non_tensor_batch, meta_info   --compress-->  PackedProto  --decompress-->  DataProto
    TensorDict  padded, jagged, or some of each      --compress-->  PackedProto  --decompress-->  TensorDict

Tensors are stored in a PackedBatch. This module adds what verl's batches have beyond that: metadata that every part
keeps whole, and numpy arrays of objects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.index import Rows, row_index
from maskpack.core.objects import Objects
from maskpack.core.tree import Node, flatten, has, is_object, unflatten
from maskpack.errors import LayoutError, RegistryError
from maskpack.fields.options import Options, Registry
from maskpack.fields.presets import verl
from maskpack.fields.registry import Path
from maskpack.nesting.check import hidden_tensors, need_none
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import batch as packing
from maskpack.packed.batch import PackedBatch, Target
from maskpack.packed.carried import device_here

DataProto: Any = importlib.import_module("verl.protocol").DataProto

VERL_FIELDS = verl
"""`maskpack.fields.verl`: `RL_FIELDS`, and further fields of batches and results of verl's trainers and engines."""


# -------------------------------------------------------------------- the packed form


@dataclass(frozen=True, eq=False)
class ArrayColumn:
    """An entry of `non_tensor_batch`: an array whose first dim is the rows.

    Attributes:
        values: a copy of an array of numbers or strings; Objects, one for each row, for Python objects.
        shape: the shape of one row.
    """

    values: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> ArrayColumn:
        if type(array) is not np.ndarray:
            raise LayoutError(
                f"compress: a column of non_tensor_batch is a {type(array).__name__}; expected numpy.ndarray. Convert "
                "it; everything beyond a plain array would be lost."
            )
        if array.dtype != object:
            return cls(np.array(array), array.shape[1:])
        cells = [list(row.flat) for row in array] if array.ndim > 1 else list(array)
        return cls(Objects(cells, 1).stowed(), array.shape[1:])

    def take(self, rows: list[int]) -> ArrayColumn:
        return replace(self, values=self.values.take(rows) if isinstance(self.values, Objects) else self.values[rows])

    def array(self) -> Any:
        """A copy of the original array."""
        if not isinstance(self.values, Objects):
            return np.array(self.values)
        items = self.values.restored()
        made: Any = np.empty((len(items), *self.shape), dtype=object)
        for row, item in enumerate(items):
            places: Any = np.ndindex(self.shape)
            for place, cell in zip(places, item if self.shape else [item], strict=True):
                made[(row, *place)] = cell  # numpy would convert sequences in a slice
        return made


@dataclass(frozen=True, eq=False)
class PackedProto:
    """The immutable packed form of a DataProto or a TensorDict. Build one with `compress`.

    Attributes:
        kind: the class of the DataProto; None for a TensorDict.
        rows: the tensors and, of a TensorDict, its Python objects; None for a DataProto without `batch`.
        columns: the `non_tensor_batch`.
        meta_info: of a DataProto. As in verl, every part keeps it whole.
        wide: batch-wide tensors of a TensorDict, such as `indices`. As in verl, every part keeps them whole.
        nested: whether the batch was a result of `nest_batch_by_mask`.
    """

    kind: Any
    rows: PackedBatch | None
    columns: Mapping[str, ArrayColumn]
    meta_info: Objects
    wide: Mapping[Path, PackedBatch]
    nested: bool
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        name = "TensorDict" if self.kind is None else self.kind.__name__
        return f"PackedProto({name}, rows={self.num_rows}, nbytes={self.nbytes:,})"

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensors and layouts, before any codec."""
        return sum(part.nbytes for part in (self.rows, *self.wide.values()) if part is not None)

    def take(self, rows: Rows) -> PackedProto:
        """Takes rows: a slice, indices (repeats allowed) or a bool mask [B]. Consecutive rows are views."""
        index = row_index(rows, self.num_rows, "PackedProto.take")
        return replace(
            self,
            rows=None if self.rows is None else self.rows.take(index),
            columns={name: column.take(index.tolist()) for name, column in self.columns.items()},
            num_rows=index.size,
        )


def compress(
    data: Any,
    *,
    registry: Registry = VERL_FIELDS,
    strict_mask_nesting: bool | None = None,
    strict: bool | None = None,
    like: PackedProto | None = None,
    **options: Any,
) -> PackedProto:
    """Encodes a DataProto or a TensorDict as a PackedProto: padded and jagged fields and Python objects, in any mix.

    Args:
        data: a DataProto or a TensorDict. It is not changed.
        registry, strict_mask_nesting: as for `maskpack.compress`.
        strict: the name of `strict_mask_nesting` in the mask-nesting proposal. Give one of them.
        like: packed rows whose layouts replace the masks that `data` does not have. It must be padded, with as many
            rows.
        options: further keywords of `maskpack.compress`.

    Raises:
        CoverageError, LossyPadError, LayoutError, RegistryError: as `maskpack.compress`. Strict mode also checks for
            tensors in `non_tensor_batch` and `meta_info`.
    """
    is_strict = one_strict("compress", strict_mask_nesting, strict)
    kind: Any = None
    batch, columns, meta_info = data, dict[str, ArrayColumn](), Objects({}, 0)
    if isinstance(data, DataProto):
        _check_objects(data, Options.of("compress", registry, None, is_strict))
        batch, kind = data.batch, cast("Any", type(data))
        columns = {name: ArrayColumn.of(array) for name, array in data.non_tensor_batch.items()}
        meta_info = Objects(data.meta_info, 0).stowed()
        if batch is None:
            return PackedProto(kind, None, columns, meta_info, {}, False, len(data))
    if not isinstance(batch, TensorDictBase):
        raise wrong_kind("compress", data)
    nested = has(batch, LAYOUTS)
    batch, wide, jagged = _parts(batch)
    # a jagged field with the row lengths of `like` would come back padded
    alike = like is not None and not jagged and tuple(batch.batch_size[:1]) == (like.num_rows,)
    above = like.rows if like is not None and alike else None
    rows = packing.compress(batch, registry=registry, strict_mask_nesting=is_strict, like=above, **options)
    return PackedProto(kind, rows, columns, meta_info, wide, nested, rows.num_rows)


def decompress(packed: PackedProto, *, format: Target | None = None, device: torch.device | str | None = None) -> Any:
    """Restores the DataProto or TensorDict bit for bit, with the rows of `packed`. It shares no memory with `packed`.

    Args:
        format: "padded", or "nested" as `nest_batch_by_mask` does; by default the original form. Fields that were
            jagged before they were packed stay jagged in either.
        device: by default the original device of each field, or the host if this process has no such device.
    """
    if not isinstance(packed, PackedProto):
        raise LayoutError(
            f"decompress: got a {type(packed).__name__}; expected a PackedProto. Pass what compress of this module "
            "returned; maskpack.decompress restores a PackedBatch."
        )
    batch = None if packed.rows is None else _decoded(packed, packed.rows, format, device)
    if packed.kind is None:
        return batch
    columns = {name: column.array() for name, column in packed.columns.items()}
    return packed.kind(batch=batch, non_tensor_batch=columns, meta_info=packed.meta_info.restored())


def _decoded(
    packed: PackedProto, rows: PackedBatch, format: Target | None, device: torch.device | str | None
) -> TensorDict:
    device = device_here(rows) if device is None else device
    kept: Target = "nested" if packed.nested else "padded"
    batch: Any = packing.decompress(rows, format=kept if format is None else format, device=device, max_bytes=None)
    for path, whole in packed.wide.items():
        above = batch.get(path[:-1]) if path[1:] else batch
        value = packing.decompress(whole, device=device, max_bytes=None)["value"]
        above.set(path[-1], NonTensorData(value, batch_size=above.batch_size))
    return batch


def _parts(batch: TensorDictBase) -> tuple[Any, dict[Path, PackedBatch], bool]:
    """A TensorDict that `maskpack.compress` accepts, what it does not contain, and whether a field was jagged."""
    wide: dict[Path, PackedBatch] = {}
    jagged = False
    entries: list[tuple[Path, Any]] = []
    for path, entry in flatten(batch):
        value: Any = entry
        jagged |= isinstance(entry, Tensor) and entry.is_nested
        if is_object(value) and _is_wide(value):
            wide[path] = packing.compress(TensorDict({"value": value.data}, batch_size=[]))
            value = NonTensorData(None, batch_size=value.batch_size)
        entries.append((path, value))
    rows = batch.batch_size[0] if batch.batch_dims else 0
    return unflatten(Node.of(batch), entries, rows) if wide else batch, wide, jagged and not has(batch, LAYOUTS)


def _is_wide(value: Any) -> bool:
    """Whether an entry is a 1-D integer tensor of the whole batch. As a Python object it would not be encoded."""
    data: Any = value.data if isinstance(value, NonTensorData) else None
    return type(data) is Tensor and data.dim() == 1 and not data.is_nested and data.dtype in (torch.int32, torch.int64)


def _check_objects(data: Any, options: Options) -> None:
    if not options.of_this_process().strict:
        return
    hidden: list[Any] = []
    for name, value in (*data.non_tensor_batch.items(), ("meta_info", data.meta_info)):
        spec = options.registry.find((name,))
        if spec is None or spec.mask is not None:
            hidden += hidden_tensors((name,), value)
    need_none("compress", hidden)


def one_strict(call: str, strict_mask_nesting: bool | None, strict: bool | None) -> bool:
    """The option that has two names. Raises RegistryError if both are given, with different values."""
    if None not in (strict_mask_nesting, strict) and strict_mask_nesting != strict:
        raise RegistryError(
            f"{call}: strict_mask_nesting is {strict_mask_nesting} and strict is {strict}; expected one value, because "
            "both name one option. Give one of them."
        )
    given = strict if strict_mask_nesting is None else strict_mask_nesting
    return False if given is None else given


def tensors_of(data: Any) -> TensorDictBase | None:
    """The `batch` of a DataProto, or the TensorDict itself."""
    return data.batch if isinstance(data, DataProto) else data


def renewed(data: Any, work: Callable[[Any], TensorDictBase]) -> Any:
    """A batch of the same kind with the result of `work` as its tensors."""
    if not isinstance(data, DataProto):
        return work(data)
    kept = {"non_tensor_batch": dict(data.non_tensor_batch), "meta_info": dict(data.meta_info)}
    return cast("Any", type(data))(batch=work(data.batch), **kept)


def wrong_kind(call: str, data: Any) -> LayoutError:
    return LayoutError(
        f"{call}: got a {type(data).__name__}; expected a DataProto with a batch, or a TensorDict. Pass one of these."
    )
