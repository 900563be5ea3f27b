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

from maskpack.core.bits import DTYPES, Words, from_words, odd_bools, odd_bools_error, words
from maskpack.core.index import IntArray
from maskpack.core.objects import Objects
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm, Schema, name_of_jagged
from maskpack.packed.batch import PackedBatch
from maskpack.packed.table import Job, encode


class Values(NamedTuple):
    """Rows of a field: the values [T, *F] one after the other, on the host, and int64 [B], the lengths of the rows; or
    one scalar for each row, [B], without lengths."""

    values: Tensor
    lengths: IntArray | None = None

    def rows(self) -> Sequence[Tensor]:
        """The rows, as views."""
        values: Any = self.values
        return values.unbind() if self.lengths is None else values.split(self.lengths.tolist())

    def take(self, rows: IntArray) -> Values:
        """The rows at some indices."""
        if self.lengths is None:
            return Values(from_words(words(self.values.contiguous()).numpy()[rows], self.values.dtype))
        own = self.rows()
        return Values(torch.cat([own[row] for row in rows.tolist()]), self.lengths[rows])

    @staticmethod
    def cat(parts: Sequence[Values]) -> Values:
        """The rows of several of them, all with lengths or all without."""
        if len(parts) == 1:
            return parts[0]
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return Values(torch.cat([part.values for part in parts]), np.concatenate(lengths) if lengths else None)


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
    layouts: dict[str, RowLayout] = {}
    names: dict[bytes, str] = {}
    told: list[tuple[Any, ...]] = []
    for name, column in columns.items():
        if isinstance(column, Objects):
            told.append((name, "object", None, None, (), ()))
            continue
        values, lengths = column
        _check(name, values, call)
        layout = None
        if lengths is not None:
            layout = names.setdefault(lengths.tobytes(), name_of_jagged((name,)))
            if layout not in layouts:
                layouts[layout] = RowLayout.from_lengths(lengths)
        kind = "dense" if layout is None else "jagged"
        told.append((name, kind, layout, values.dtype, tuple(values.shape[1:]), hints.get(name, ())))
    schema = _schema(tuple(told))
    forms = [form for form in schema.forms if form.dtype is not None]
    jobs = [Job(form, words=_words_of(columns[form.path[0]])) for form in forms]
    encoded = encode(jobs, layouts, rows, rows)
    if encoded is None:
        odd = [form.path for form, job in zip(forms, jobs, strict=True) if form.dtype is torch.bool and _odd(job)]
        raise odd_bools_error(call, odd)
    objects = {(name,): column for name, column in columns.items() if isinstance(column, Objects)}
    return PackedBatch(rows, schema, encoded.table, objects)


@lru_cache(256)
def _schema(told: tuple[tuple[Any, ...], ...]) -> Schema:
    forms = [
        FieldForm((name,), kind, layout, dtype=dtype, device=dtype and "cpu", shape=shape, hints=hints)
        for name, kind, layout, dtype, shape, hints in told
    ]
    return Schema(Node((), None), tuple(forms), ())


def _check(name: str, values: Tensor, call: str) -> None:
    if values.dtype not in DTYPES.values() or values.device.type != "cpu":
        raise LayoutError(
            f'{call}: field "{name}" is {values.dtype} on {values.device}, without plain bits; expected numbers in '
            "memory. Dequantize it, or leave it out."
        )


def _words_of(column: Any) -> Words:
    return words(column.values.contiguous()).numpy().reshape(-1)


def _odd(job: Job) -> bool:
    return job.words is not None and odd_bools(job.words)
