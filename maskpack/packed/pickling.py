"""Pickling a packed batch, for Ray and between processes: its schema as a token, its table, and its body as a buffer.

Such pickles are for processes that have one version of maskpack and trust each other; file/ has the form of bytes for
all others.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import is_tensorclass

from maskpack.core import native
from maskpack.core.bits import Words, address
from maskpack.core.objects import Objects
from maskpack.fields.registry import Path
from maskpack.nesting.schema import Schema
from maskpack.packed.file.codec import as_sent, compressed_arrays, restored_arrays
from maskpack.packed.table import SLACK, Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_NAMES = 256
"""Schemas that are remembered."""


class _SchemaPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, 5)
        self.kinds: list[type[Any]] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and is_tensorclass(obj):
            self.kinds.append(obj)
            return _kind, (len(self.kinds) - 1,)
        return NotImplemented


class _SchemaUnpickler(pickle.Unpickler):
    def __init__(self, stream: bytes, kinds: Sequence[type[Any]]) -> None:
        super().__init__(io.BytesIO(stream))
        self._kinds = kinds

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name == _kind.__name__:
            return self._kinds.__getitem__
        return super().find_class(module_name, global_name)


def _kind(number: int) -> type[Any]:
    """Stands for a tensorclass in a stream. The caller pickles the class, by value if necessary."""
    raise pickle.UnpicklingError(f"tensorclass {number} is not in the stream")


@lru_cache(_NAMES)
def _token(schema: Schema) -> tuple[bytes, tuple[type[Any], ...]]:
    """The bytes of a schema, and the tensorclasses that it names."""
    stream = io.BytesIO()
    writer = _SchemaPickler(stream)
    writer.dump(schema)
    return stream.getvalue(), tuple(writer.kinds)


@lru_cache(_NAMES)
def _schema(token: bytes) -> Schema:
    return _SchemaUnpickler(token, ()).load()


def to_parts(packed: PackedBatch) -> tuple[bytes, tuple[type[Any], ...], tuple[Any, ...], Any, Words]:
    """The token of the schema, its tensorclasses, the table without its body, the records of the codec, the body."""
    table = packed.table.own(SLACK)
    token, kinds = _token(packed.schema)
    parts = table.stored, table.entries, table.fields, table.row_pads
    line = table.rows, table.dense_rows, table.names, *(part.tobytes() for part in parts)
    body, records = table.body, None
    if packed.codec is not None:
        table = as_sent(table, packed.codec)
        arrays, squeezed = compressed_arrays(table.arrays())
        records = squeezed, [array.nbytes for array in arrays]
        body = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays] or [np.zeros(0, np.uint8)])
        line = (
            table.rows,
            table.dense_rows,
            table.names,
            *(part.tobytes() for part in (table.stored, table.entries, table.fields, table.row_pads)),
        )
    return token, kinds, line, records, body


def from_parts(
    token: bytes,
    kinds: Sequence[type[Any]],
    line: tuple[Any, ...],
    records: Any,
    buffer: Any,
    objects: Mapping[Path, Objects],
    codec: str | None,
) -> tuple[Any, ...]:
    """The attributes of the PackedBatch that `to_parts` was given; its arrays are read-only views of the buffer."""
    body: Words = np.frombuffer(buffer, np.uint8)
    if address(body) % 8:
        body = np.array(body)
    body.flags.writeable = False
    rows, dense_rows, names, *parts = line
    dtypes = native.STORED, native.ENTRY, np.int64, native.PLACE
    stored, entries, fields, pads = (np.frombuffer(part, dtype) for part, dtype in zip(parts, dtypes, strict=True))
    table = Table(rows, dense_rows, names, stored, entries, fields, pads, body)
    if records is not None:
        squeezed, sizes = records
        arrays = np.split(body, np.cumsum(sizes)[:-1]) if sizes else []
        table = table.with_arrays(restored_arrays(arrays, squeezed, "PackedBatch"))
    schema = _SchemaUnpickler(token, kinds).load() if kinds else _schema(token)
    return rows, schema, table, objects, codec
