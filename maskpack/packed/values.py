"""Packed batches of rows without padding: values and lengths in, no masks and no jagged tensors needed.

name -> Values [T, *F] with lengths [B], a tensor [B], or objects --packed_rows--> PackedBatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi
from maskpack.core.bits import DTYPES, address, odd_bools, odd_bools_error, words
from maskpack.core.index import IntArray
from maskpack.core.objects import Objects
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.jobs import JobTable, job_table
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema, name_of_jagged
from maskpack.packed.batch import PackedBatch
from maskpack.packed.rows import Rows
from maskpack.packed.table import encoded


class Values(NamedTuple):
    """Rows of a field: the values [T, *F] one after the other, on the host, and int64 [B], the lengths of the rows; or
    one scalar for each row, [B], without lengths. `ragged_dim` is 2 for rows [F, L] that are given as [L, F]."""

    values: Tensor
    lengths: IntArray | None = None
    ragged_dim: int = 1

    @classmethod
    def of_equal(cls, rows: Tensor, ragged_dim: int = 1) -> Values:
        """The rows of a tensor [B, L, *F]."""
        lengths = np.full(rows.shape[0], rows.shape[1], np.int64)
        return cls(rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:]), lengths, ragged_dim)

    def rows(self) -> Sequence[Tensor]:
        """The rows, as views."""
        values: Any = self.values
        return values.unbind() if self.lengths is None else values.split(self.lengths.tolist())


def packed_rows(
    columns: Mapping[str, Values | Objects], rows: int, hints: Mapping[str, tuple[str, ...]], call: str
) -> PackedBatch:
    """Packs rows, as `compress` packs a TensorDict of jagged tensors, tensors [B] and objects. Fields of equal row
    lengths share a layout.

    Args:
        columns: the fields; objects are stowed.
        rows: B.
        hints: encodings to try first, by field.
        call: what errors name.

    Raises LayoutError for a dtype without plain bits, and for bools of other bytes than 0 and 1.
    """
    if LAYOUTS in columns:
        raise LayoutError(
            f'{call}: field "{LAYOUTS}" is the entry of a nested batch, a reserved name; expected fields alone. Leave '
            f'it out, with batch.exclude("{LAYOUTS}") or unnest_batch_by_mask(batch).'
        )
    lengths_of: dict[bytes, IntArray] = {}
    numbers: dict[bytes, int] = {}
    about: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for name, column in columns.items():
        if isinstance(column, Objects):
            about.append((name,))
            continue
        values, lengths, ragged_dim = column
        _check(name, values, call)
        layout = None
        if lengths is not None:
            layout = numbers.setdefault(line := lengths.tobytes(), len(numbers))
            lengths_of[line] = lengths
        about.append((name, layout, values.dtype, tuple(values.shape[1:]), ragged_dim, hints.get(name, ())))
        tensors.append(values)
    (schema, names, table), (layouts, lines) = _plan_of(tuple(about)), _layouts_of([*lengths_of.values()], rows)
    held = [words(tensor.contiguous()) for tensor in tensors]
    places = [tensor.data_ptr() or _NOWHERE for tensor in held]
    stored = np.zeros(len(lengths_of), abi.STORED)
    found = encoded(table, places, {}, names, layouts, stored, rows, rows)
    del lines  # not earlier: the layouts have its addresses
    if found is None:
        raise _odd_error(columns, call)
    objects = {(name,): column for name, column in columns.items() if isinstance(column, Objects)}
    return PackedBatch(rows, schema, Rows.of(found.table, schema), objects)


def _odd_error(columns: Mapping[str, Values | Objects], call: str) -> LayoutError:
    bools = [(name, x.values) for name, x in columns.items() if isinstance(x, Values) and x.values.dtype is torch.bool]
    return odd_bools_error(call, [(name,) for name, x in bools if odd_bools(words(x.contiguous()).numpy())])


# -------------------------------------------------------------------- kinds and layouts


_Told = tuple[tuple[Any, ...], ...]
"""Of each field its name; of tensors also the number of the layout, the dtype, the shape of an element, the ragged
dim, and hints."""


@lru_cache(256)
def _plan_of(told: _Told) -> tuple[Schema, tuple[str, ...], JobTable]:
    """What is the same for all rows of fields of some names, dtypes and shapes: their schema, the names of their
    layouts, and the jobs of the tensors."""
    names: dict[int, str] = {}
    forms: list[FieldForm] = []
    for name, *tensor in told:
        if not tensor:
            forms.append(FieldForm((name,), "object"))
            continue
        number, dtype, shape, ragged_dim, hints = tensor
        layout = None if number is None else names.setdefault(number, name_of_jagged((name,)))
        kind = "dense" if layout is None else "jagged"
        forms.append(FieldForm((name,), kind, layout, ragged_dim, dtype, device="cpu", shape=shape, hints=hints))
    own = tuple(names.values())
    table = job_table(tuple([form for form in forms if form.dtype is not None]), own)
    return Schema(Node((), None), tuple(forms), ()), own, table


def _layouts_of(lengths: Sequence[IntArray], rows: int) -> tuple[IntArray, IntArray]:
    """The table of layouts without padding for the core, from int64 [B] each, and what it points to."""
    lines = np.zeros((len(lengths), 4 * rows + 2), np.int64)  # of each: starts, counts, splits, bounds
    table: list[int] = []
    at = address(lines)
    for line, own in zip(lines, lengths, strict=True):
        filled = own > 0
        counts = own[filled]
        line[rows : rows + counts.size] = counts
        np.cumsum(filled, out=line[2 * rows + 1 : 3 * rows + 1])
        np.cumsum(own, out=line[3 * rows + 2 :])
        width = int(own.max(initial=0))
        if rows * width >= _MOST:
            RowLayout.from_lengths(own)  # raises: the values take no memory, but cannot be counted
        table += [rows, width, at, at + 8 * rows, at + 16 * rows, at + 24 * rows + 8]
        at += line.nbytes
    return np.array(table, np.int64), lines


_MOST = 1 << 62
"""Positions that a layout can count."""
_PLAIN = frozenset(DTYPES.values())
_NOWHERE = address(_NOTHING := np.zeros(1, np.int64))
"""Where tensors without elements lie."""


def _check(name: str, values: Tensor, call: str) -> None:
    if values.dtype not in _PLAIN or values.device.type != "cpu":
        raise LayoutError(
            f'{call}: field "{name}" is {values.dtype} on {values.device}, without plain bits; expected numbers in '
            "memory. Dequantize it, or leave it out."
        )
