"""Writes the manifest of a packed batch: JSON that describes its fields and names their arrays by number.

PackedBatch --write.py--> manifest, arrays --container.py--> bytes --container.py--> the same --read.py--> PackedBatch
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from maskpack.core import objects
from maskpack.core.bits import Words
from maskpack.core.pads import Pad, PadValue
from maskpack.core.tree import Node
from maskpack.errors import MaskpackError
from maskpack.fields.registry import path_of, show
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm
from maskpack.packed.encodings import Plain
from maskpack.packed.file import codec
from maskpack.packed.file.container import FREE_ROWS, MOST_PATH, Message

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch


def write(packed: PackedBatch, pickled: bool, with_objects: bool = True) -> tuple[Message, list[str]]:
    """The message of a packed batch, and a name for each array. `pickled` allows objects that JSON cannot say;
    without `with_objects` they are left out, to count bytes. Raises MaskpackError for an object that can't be said."""
    writer = _Writer()
    layouts = [
        {
            "name": name,
            "width": layout.width,
            "anchor": layout.anchor,
            **writer.layout(layout, name),
        }
        for name, layout in packed.layouts.items()
    ]
    manifest: dict[str, Any] = {
        "rows": packed.num_rows,
        "root": _node_out(packed.schema.root, "the batch"),
        "axes": [name for name, _, _ in packed.schema.axes],
        "layouts": layouts,
        "fields": [writer.field(packed, form, pickled, with_objects) for form in packed.schema.forms],
    }
    arrays = writer.arrays
    records: list[Any] = []
    if packed.codec is not None:
        arrays, records = codec.compressed(arrays, near(packed, writer.numbers))
        manifest["codec"] = {"name": packed.codec, "arrays": records}
    missing = _unpaid(packed.num_rows, arrays, records)
    if missing > 0:
        arrays = [*arrays, np.zeros(missing, np.uint8)]
        records.append(None)
        writer.names.append("claims")
    return Message(manifest, arrays), writer.names


def _unpaid(rows: int, arrays: Iterable[Words], records: Iterable[Any]) -> int:
    """Bytes that the arrays lack for what the message claims: its rows (FREE_ROWS) and what the codec restores."""
    wanted = max(rows if rows > FREE_ROWS else 0, -(-codec.size_of(records) // codec.MOST))
    return wanted - sum(array.nbytes for array in arrays)


def near(packed: PackedBatch, numbers: Mapping[int, int]) -> dict[int, int]:
    """For arrays whose field has a `delta` hint, the array of the other field, if it has the same layout. `numbers` are
    those of the arrays, by id. Hints that lead back to where they began are not followed."""
    found: dict[int, int] = {}
    plain = {
        path: numbers[id(encoding.words)] for path, encoding in packed.fields.items() if isinstance(encoding, Plain)
    }
    for path, number in plain.items():
        form = packed.forms[path]
        for hint in form.hints:
            name, _, other = hint.partition(":")
            beside = (*path[:-1], *path_of(tuple(other.split("/"))))
            if name == "delta" and beside in plain:
                twin = packed.forms[beside]
                alike = (twin.layout, twin.dtype, twin.shape) == (form.layout, form.dtype, form.shape)
                if alike and not _leads(found, plain[beside], number):
                    found[number] = plain[beside]
    return found


class _Writer:
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

    def layout(self, layout: RowLayout, name: str) -> dict[str, Any]:
        """Its arrays."""
        numbers = [self.add(part, f"layout {name}") for part in layout.compact()]
        return {"bits": numbers[0]} if len(numbers) == 1 else {"runs": numbers}

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
        if form.kind == "padded":
            out |= {"dim": form.ragged_dim, "pad": _pad_out(form.pads[0])}
        if form.hints:
            out["hints"] = list(form.hints)
        if form.reason is not None:
            out["reason"] = form.reason
        if form.axis is not None:
            out["axis"] = form.axis
        if form.path in packed.row_pads:
            out["row_pads"] = self.add(packed.row_pads[form.path], f"{show(form.path)} pads")
        out["encoding"] = self._encoding(packed.fields[form.path], show(form.path))
        return out

    def _encoding(self, encoding: Any, name: str) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": type(encoding).__name__.lower()}
        for field in fields_of(encoding):
            value: Any = getattr(encoding, field.name)
            if isinstance(value, np.ndarray):
                out[field.name] = self.add(cast("Words", value), f"{name} {field.name}")
            elif field.type == "Path":
                out[field.name] = list(value)
            elif field.type == "int":
                out[field.name] = value
            elif isinstance(value, tuple):
                out[field.name] = [self._encoding(part, name) for part in cast("tuple[Any, ...]", value)]
            else:
                out[field.name] = self._encoding(value, name)
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
                    f'PackedBatch: field "{show(form.path)}" holds {error}; expected what JSON can say (numbers, '
                    "text, lists, tuples, dicts, tensors), because pickles run code when they are read. Leave it out, "
                    "or pass allow_pickle=True here and where it is read."
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


def _leads(found: dict[int, int], begin: int, end: int) -> bool:
    while begin != end and begin in found:
        begin = found[begin]
    return begin == end


def _bound(name: str, seen: str, count: int, most: int) -> None:
    if count > most:
        raise MaskpackError(
            f"PackedBatch: {name} has {seen.format(count)}; expected at most {most}, which is what a reader takes. "
            "Flatten some of them."
        )


def _node_out(node: Node, name: str) -> dict[str, Any]:
    _bound(name, "{} batch dims behind its rows", len(node.more_dims or ()), objects.MOST_DIMS)
    out = {"dims": None if node.more_dims is None else list(node.more_dims), "device": node.device}
    return out if node.kind is None else out | {"kind": f"{node.kind.__module__}:{node.kind.__qualname__}"}


def _pad_out(pad: PadValue) -> Any:
    if isinstance(pad, Pad):
        return {"pad": pad.name}
    if isinstance(pad, complex):
        return {"complex": [_pad_out(pad.real), _pad_out(pad.imag)]}
    return objects.to_json(pad, lambda _: 0)
