"""Writes the manifest of a packed batch: JSON that describes its fields, beside the table and the body as arrays.

PackedBatch --write.py--> manifest, arrays --container.py--> bytes --container.py--> the same --read.py--> PackedBatch
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from maskpack.core import abi, objects
from maskpack.core.bits import Words
from maskpack.core.index import IntArray
from maskpack.core.tree import Node
from maskpack.errors import MaskpackError
from maskpack.fields.registry import show
from maskpack.layout.row_layout import host_spans
from maskpack.nesting.schema import FieldForm
from maskpack.packed.file.codec import MOST, as_sent, compressed_arrays, size_of
from maskpack.packed.file.container import FREE_BYTES, MOST_PATH, Message, layout_bytes
from maskpack.packed.table import Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch


def write_message(packed: PackedBatch, pickled: bool, with_objects: bool = True) -> tuple[Message, list[str]]:
    """The message of a packed batch, and a name for each array. `pickled` allows objects that are more than plain data;
    without `with_objects` they are left out, to count bytes. Raises MaskpackError for an object that can't be said."""
    writer = _MessageWriter()
    table = as_sent(packed.table, packed.codec)
    writer.add(_line(table), "table")
    if packed.codec is None:
        body: Any = writer.add(table.body, "body")
    else:
        body = [writer.add(array, f"body {number}") for number, array in enumerate(table.arrays())]
    manifest: dict[str, Any] = {
        "rows": packed.num_rows,
        "root": _node_out(packed.schema.root, "the batch"),
        "axes": [name for name, _, _ in packed.schema.axes],
        "layouts": [_layout_name(name) for name in table.names],
        "fields": [writer.field(packed, form, pickled, with_objects) for form in packed.schema.forms],
        "body": body,
    }
    arrays = writer.arrays
    records: list[Any] = []
    if packed.codec is not None:
        arrays, records = compressed_arrays(arrays)
        manifest["codec"] = {"name": packed.codec, "arrays": records}
    missing = _unpaid(table, arrays, records)
    if missing > 0:
        arrays = [*arrays, np.zeros(missing, np.uint8)]
        records.append(None)
        writer.names.append("claims")
    return Message(manifest, arrays), writer.names


def _line(table: Table) -> IntArray:
    """The numbers of a table: how many layouts, entries and fields it has, then these, and where pads are."""
    counts = np.array([table.stored.size, table.entries.size, table.fields.size], np.int64)
    parts = table.stored, table.entries, table.fields, table.pads
    return np.concatenate([counts, *(np.ascontiguousarray(part).view(np.int64).reshape(-1) for part in parts)])


def _unpaid(table: Table, arrays: Iterable[Words], records: Iterable[Any]) -> int:
    """Bytes that the arrays lack for the memory that a reader sets up for the layouts (FREE_BYTES), where a part may
    have as many spans as its parent, and for what the codec restores."""
    spans: list[int] = []
    for stored, name in zip(table.stored, table.names, strict=True):
        part = stored["kind"] == abi.AS_PART
        spans.append(spans[int(stored["parent"])] if part else host_spans(table.layouts[name]).starts.size)
    wanted = layout_bytes(table.stored.size, table.rows, sum(spans)) - FREE_BYTES
    return max(wanted, -(-size_of(records) // MOST)) - sum(array.nbytes for array in arrays)


def _layout_name(name: str) -> str:
    if not objects.is_text(name):
        raise MaskpackError(f"PackedBatch: layout {name!r} has a name with half a surrogate pair. Rename it.")
    return name


class _MessageWriter:
    def __init__(self) -> None:
        self.arrays: list[Words] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}
        self._alive: list[Words] = []  # so that no id comes twice

    def add(self, array: Words, name: str) -> int:
        """The number of an array; the same array comes once."""
        if id(array) not in self.numbers:
            self.numbers[id(array)] = len(self.arrays)
            self.arrays.append(array.reshape(-1))
            self._alive.append(array)
            self.names.append(name)
        return self.numbers[id(array)]

    def _forget(self, count: int) -> None:
        """All arrays but the first `count`."""
        del self.arrays[count:], self.names[count:]
        self.numbers = {key: number for key, number in self.numbers.items() if number < count}

    def field(self, packed: PackedBatch, form: FieldForm, pickled: bool, with_objects: bool) -> dict[str, Any]:
        if not all(map(objects.is_text, [*form.path, form.layout or ""])):
            raise MaskpackError(
                f"PackedBatch: field {form.path!r} has a name with half a surrogate pair, which is no Unicode text. "
                "Rename it."
            )
        name = f'field "{show(form.path)}"'
        _bound(name, "a path of {} names", len(form.path), MOST_PATH)
        _bound(name, "elements of {} dims", len(form.shape), objects.MOST_DIMS)
        out: dict[str, Any] = {"path": list(form.path), "kind": form.kind}
        if form.node is not None:
            return out | {"node": _node_out(form.node, name)}
        if form.kind == "object":
            return out | (self._object(packed, form, pickled) if with_objects else {})
        out["dtype"] = str(form.dtype).removeprefix("torch.")
        out |= {"device": form.device, "shape": list(form.shape)}
        if form.layout is not None:
            out["layout"] = form.layout
        if form.kind == "padded" or form.ragged_dim != 1:
            out["dim"] = form.ragged_dim
        if form.hints:
            out["hints"] = list(form.hints)
        if form.reason is not None:
            out["reason"] = form.reason
        if form.axis is not None:
            out["axis"] = form.axis
        return out

    def _object(self, packed: PackedBatch, form: FieldForm, pickled: bool) -> dict[str, Any]:
        held = packed.objects[form.path]
        _bound(f'field "{show(form.path)}"', "stacks of {} dims", held.depth, objects.MOST_DEPTH)
        out: dict[str, Any] = {"depth": held.depth}
        if held.stacked:
            out["stacked"] = True
        if form.hints:
            out["hints"] = list(form.hints)
        before = len(self.arrays)
        try:
            return out | {"json": objects.to_json(held.data, lambda line: self.add(line, show(form.path)))}
        except objects.NotInJson as error:
            self._forget(before)
            if not pickled:
                raise MaskpackError(
                    f'PackedBatch: field "{show(form.path)}" holds {error}; expected plain data (None, bools, numbers, '
                    "text, lists, tuples, dicts with text as keys, tensors, arrays of numbers), because pickles run "
                    "code when they are read. Leave it out, or pass allow_pickle=True here and where it is read."
                ) from error
        buffers: list[pickle.PickleBuffer] = []
        try:
            stream = pickle.dumps(held.data, protocol=5, buffer_callback=buffers.append)
        except Exception as error:  # an object raises whatever it likes
            raise MaskpackError(
                f'PackedBatch: field "{show(form.path)}" cannot be pickled: {type(error).__name__}: '
                f"{str(error)[:200]}; expected objects that can. Leave it out."
            ) from error
        lines = [stream, *[buffer.raw() for buffer in buffers]]
        return out | {"pickle": [self.add(np.frombuffer(line, np.uint8), show(form.path)) for line in lines]}


def _bound(name: str, seen: str, count: int, most: int) -> None:
    if count > most:
        raise MaskpackError(
            f"PackedBatch: {name} has {seen.format(count)}; expected at most {most}, which is what a reader takes. "
            "Flatten some of them."
        )


def _node_out(node: Node, name: str) -> dict[str, Any]:
    _bound(name, "{} batch dims behind its rows", len(node.more_dims or ()), objects.MOST_DIMS)
    out = {"dims": None if node.more_dims is None else list(node.more_dims), "device": node.device}
    if not all(name is None or objects.is_text(name) for name in node.names or ()):
        raise MaskpackError(f"PackedBatch: {name} has dims named {node.names}, which is no Unicode text. Rename them.")
    out |= {} if node.names is None else {"names": [*node.names]}
    return out if node.kind is None else out | {"kind": f"{node.kind.__module__}:{node.kind.__qualname__}"}
