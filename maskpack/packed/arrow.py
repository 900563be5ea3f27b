"""Packed batches as Arrow tables, for pandas, polars, DuckDB or Parquet.

    field of tokens [B, S, *F]    one list a row, with the valid values alone      large_list<T>
    jagged field [B, *, *F]       one list a row                                   large_list<T>
    other tensors [B, *F]         one element a row                                T
    Python objects                what pyarrow makes of them

T is the type of the dtype, inside a fixed_size_list for each dim of F.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from maskpack.core.backends import is_installed
from maskpack.core.objects import Objects
from maskpack.errors import LayoutError, MaskpackError
from maskpack.layout.jagged import offsets_of, values_of

_WIDENED = (torch.bfloat16, *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")))
"""Arrow does not have these; float32 holds each of their values."""


def arrow_table(entries: Mapping[str, Any], rows: int, call: str) -> Any:
    """Entries of a nested batch on the host as the columns of a pyarrow.Table.

    Raises:
        MaskpackError: pyarrow is missing.
        LayoutError: an entry that Arrow has no type for.
    """
    if not is_installed("pyarrow"):
        raise MaskpackError(f"{call}: pyarrow is not installed; expected it for Arrow tables. Install maskpack[arrow].")
    pyarrow: Any = import_module("pyarrow")
    columns: dict[str, Any] = {}
    for name, entry in entries.items():
        tensor = isinstance(entry, Tensor)
        try:
            columns[name] = _column(pyarrow, entry) if tensor else _objects(pyarrow, entry, rows)
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:  # as errors of pyarrow are, too
            held = entry.dtype if tensor else "Python objects"
            raise LayoutError(
                f'{call}: field "{name}" holds {held}; expected what Arrow has a type for ({error}). Name the fields '
                "that you need."
            ) from error
    return pyarrow.table(columns)


def _column(pyarrow: Any, value: Tensor) -> Any:
    if not value.is_nested:
        return _elements(pyarrow, value)
    offsets: Any = offsets_of(value).to(torch.int64).numpy()
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), _elements(pyarrow, values_of(value)))


def _elements(pyarrow: Any, values: Tensor) -> Any:
    """One element for each index of the first dim."""
    values = values.detach()
    values = values.float() if values.dtype in _WIDENED else values
    out = pyarrow.array(values.reshape(-1).numpy())
    for dim in range(values.dim() - 1, 0, -1):
        size, count = values.shape[dim], values.shape[:dim].numel()
        if size:
            out = pyarrow.FixedSizeListArray.from_arrays(out, size)
        else:
            out = pyarrow.array([[]] * count, pyarrow.list_(out.type, 0))
    return out


def _objects(pyarrow: Any, entry: Any, rows: int) -> Any:
    """What each row has; an object for the whole batch in each row."""
    held = Objects.of(entry)
    return pyarrow.array(held.data if held.depth else [held.data] * rows)
