"""Pickling a packed batch, for Ray and between processes: its schema as a token, its table, and its body as a buffer.

Such pickles are for processes that have one version of maskpack and trust each other; file/ has the form of bytes for
all others.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from maskpack.core import abi
from maskpack.core.bits import Words, address
from maskpack.core.objects import Objects
from maskpack.fields.registry import Path
from maskpack.nesting.schema import Schema
from maskpack.packed.file.codec import as_sent, compressed_arrays, restored_arrays
from maskpack.packed.rows import Rows
from maskpack.packed.table import SLACK, Table, side_by_side

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_NAMES = 256
"""Schemas that are remembered."""


@lru_cache(_NAMES)
def _token(schema: Schema) -> bytes | Schema:
    """The bytes of a schema, made once; itself if it names tensorclasses, which the pickler around it takes, by value
    if necessary."""
    nodes = [schema.root, *(form.node for form in schema.forms)]
    return schema if any(node is not None and node.kind for node in nodes) else pickle.dumps(schema, 5)


@lru_cache(_NAMES)
def _schema(token: bytes) -> Schema:
    return pickle.loads(token)


def to_parts(packed: PackedBatch) -> tuple[bytes | Schema, tuple[Any, ...], Any, Words]:
    """The schema or its token, the table without its body, the records of the codec, the body."""
    table, records = packed.table.own(SLACK), None
    body = table.body
    if packed.codec is not None:
        table = as_sent(table, packed.codec)
        arrays, squeezed = compressed_arrays(table.arrays())
        records = squeezed, [array.nbytes for array in arrays]
        body = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays] or [np.zeros(0, np.uint8)])
    parts = table.stored, table.entries, table.fields, table.pads
    line = table.rows, table.dense_rows, table.names, *(part.tobytes() for part in parts)
    return _token(packed.schema), line, records, body


def from_parts(
    schema: bytes | Schema,
    line: tuple[Any, ...],
    records: Any,
    buffer: Any,
    objects: Mapping[Path, Objects],
    codec: str | None,
) -> tuple[Any, ...]:
    """The attributes of the PackedBatch that `to_parts` was given; its arrays are read-only views of the buffer."""
    body: Words = np.frombuffer(buffer, np.uint8)
    if records is not None:
        squeezed, sizes = records
        arrays = np.split(body, np.cumsum(sizes)[:-1]) if sizes else []
        body, _ = side_by_side(restored_arrays(arrays, squeezed, "PackedBatch"))
    if address(body) % 8:
        body = np.array(body)
    body.flags.writeable = False
    rows, dense_rows, names, *parts = line
    dtypes: tuple[Any, ...] = (abi.STORED, abi.ENTRY, np.int64, abi.ARRAY)
    stored, entries, fields, pads = (
        np.frombuffer(part, np.uint8).view(dtype) for part, dtype in zip(parts, dtypes, strict=True)
    )
    table = Table(rows, dense_rows, names, stored, entries, fields, pads, body)
    schema = _schema(schema) if isinstance(schema, bytes) else schema
    return rows, schema, Rows.of(table, schema), objects, codec
