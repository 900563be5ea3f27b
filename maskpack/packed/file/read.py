"""Reads a packed batch from a manifest and its arrays. Nothing is trusted: every array must fit the field that it
belongs to, so that the batch can be decoded."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import tensordict
import torch
from tensordict import NonTensorData, is_tensorclass

from maskpack.core import abi, native, objects
from maskpack.core.bits import DTYPES, Words, odd_bools
from maskpack.core.latest import Latest
from maskpack.core.objects import Objects
from maskpack.core.pads import has_signs
from maskpack.core.tree import Node
from maskpack.errors import WireFormatError
from maskpack.fields.registry import HINTS, Path, is_hint, show
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.jobs import size_of_word, words_of_one
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.packed.decode import MAX_BYTES, shape_of
from maskpack.packed.file.codec import CODECS, check_codec, check_records, restored_arrays, size_of
from maskpack.packed.file.container import FREE_BYTES, MOST_PATH, Message, brief, fail, layout_bytes
from maskpack.packed.rows import Rows
from maskpack.packed.table import Table, side_by_side

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_DEVICE = re.compile(r"(cpu|cuda|hpu|mps|npu|xla|xpu)(:(0|[1-9][0-9]?))?")
_MOST = 1 << 31
_MOST_BYTES = 1 << 62
_MOST_SPARE = 1 << 36
"""Bytes that rows of dictionaries may take beyond the rows that they stand for."""
_forms: Latest[FieldForm] = Latest(256)
_OBJECTS: type[Any] = getattr(tensordict, "NonTensorDataBase", NonTensorData)
"""The class of Python objects in a TensorDict; tensordict 0.8 has one kind of them."""
_FIELD = ("path", "kind", "dtype", "device", "shape", "hints", "reason")
_MEMBERS = {
    "padded": (*_FIELD, "layout", "dim"),
    "flat": (*_FIELD, "layout"),
    "jagged": (*_FIELD, "layout", "dim"),
    "dense": (*_FIELD, "axis"),
    "object": ("path", "kind", "hints", "depth", "stacked", "json", "pickle"),
    "node": ("path", "kind", "node"),
}


def read_batch(
    kind: type[PackedBatch], message: Message, call: str, pickled: bool, max_bytes: int | None = MAX_BYTES
) -> PackedBatch:
    """The batch in a message; `kind` is PackedBatch, which lies above this module. Raises WireFormatError, also if the
    batch would take more than `max_bytes`."""
    return _MessageReader(message, call, pickled, max_bytes).batch(kind)


class _MessageReader:
    def __init__(self, message: Message, call: str, pickled: bool, max_bytes: int | None) -> None:
        self._manifest = message.manifest
        self._arrays = message.arrays
        self._call = call
        self._pickled = pickled
        self._most = max_bytes
        self._claimed = 0

    def batch(self, kind: type[PackedBatch]) -> PackedBatch:
        manifest = self._manifest
        self._only(manifest, ("rows", "root", "axes", "layouts", "fields", "body", "codec"))
        rows = self._get(manifest, "rows", int)
        if not 0 <= rows < _MOST:
            self._fail(f"{rows} rows", f"0 to {_MOST}")
        sent = sum(array.nbytes for array in self._arrays)
        name = self._restore()
        entries = self._get(manifest, "fields", list)
        forms = [self._form(entry) for entry in entries]
        root = self._node(manifest.get("root"))
        if root.kind is not None:
            self._fail(f"a root of class {root.kind.__name__}", "a TensorDict")
        names = self._get(manifest, "layouts", list)
        if not all(map(objects.is_text, names)) or len(set(names)) != len(names):
            self._fail(f"layouts {brief(names)}", "different names")
        table = self._table(rows, 1 if root.more_dims is None else rows, names, sent)
        layouts = table.layouts
        axes = self._get(manifest, "axes", list)
        if any(type(axis) is not str or axis not in layouts for axis in axes) or len(set(axes)) != len(axes):
            self._fail(f"axes {brief(axes)}", "names of layouts")
        known = {"padded": set(axes)}
        for form in forms:
            if form.layout is not None and form.layout not in known.get(form.kind, layouts):
                self._fail(f'field "{show(form.path)}" on layout {brief(form.layout)}', "one that is there, or an axis")
        axes = [(axis, layouts[axis].width, layouts[axis].anchor) for axis in axes]
        self._check_tree(forms, layouts, rows, root)
        self._check_fields(table, [form for form in forms if form.dtype is not None])
        found = self._objects(forms, entries, rows, root)
        schema = Schema(root, tuple(forms), tuple(axes))
        return kind(rows, schema, Rows.of(table, schema), found, name)

    def _table(self, rows: int, dense_rows: int, names: list[str], sent: int) -> Table:
        """The table, whose layouts can be read; its fields are not checked yet."""
        line, body = np.array(self._array(0)), self._body()  # copied: what is checked stays so if the file is mapped
        if line.dtype != np.int64 or line.size < 3 or not all(0 <= count < _MOST for count in line[:3].tolist()):
            self._fail(f"a table of {line.dtype} {line.shape}", "int64, which begins with three counts")
        counts = [*line[:3].tolist(), int(line[2])]
        dtypes: tuple[Any, ...] = (abi.STORED, abi.ENTRY, np.dtype(np.int64), abi.ARRAY)
        sizes = [count * dtype.itemsize // 8 for count, dtype in zip(counts, dtypes, strict=True)]
        if line.size != 3 + sum(sizes) or counts[0] != len(names):
            seen = f"a table of {line.size} numbers for {counts[:3]} layouts, entries and fields"
            self._fail(seen, "as many as these take")
        parts = np.split(line[3:], np.cumsum(sizes)[:-1])
        stored, entries, fields, pads = (part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True))
        most = (FREE_BYTES + sent - layout_bytes(len(names), rows, 0)) // 16
        bad = native.check_layouts(stored, body, rows, most) if most >= 0 else 1
        if bad:
            seen = f"layout {brief(names[bad - 1]) if names else ''} of {rows} rows"
            most = FREE_BYTES + sent
            self._fail(seen, f"spans that rise within its width, and layouts that take at most {most} bytes")
        self._claim(layout_bytes(len(names), rows, 0), "its layouts")
        return Table(rows, dense_rows, tuple(names), stored, entries, fields, pads, body)

    def _body(self) -> Words:
        """The body; of a batch with a codec, its arrays one behind the other, as they were written."""
        body = self._manifest.get("body")
        numbers: list[Any] = cast("list[Any]", body) if isinstance(body, list) else [body]
        arrays = [self._array(number) for number in numbers]
        if not isinstance(body, list):
            if arrays[0].dtype != np.uint8:
                self._fail(f"a body of {arrays[0].dtype}", "uint8")
            return arrays[0]
        if len(set(numbers)) != len(numbers):
            self._fail(f"a body of arrays {brief(numbers)}", "each once")
        return side_by_side(arrays)[0]

    def _check_fields(self, table: Table, forms: list[FieldForm]) -> None:
        """That every field can be decoded to its dtype and shape."""
        if len(forms) != table.fields.size:
            self._fail(f"{len(forms)} tensors with {table.fields.size} entries", "one for each")
        places = {name: place for place, name in enumerate(table.names)}
        for number, (form, at) in enumerate(zip(forms, table.fields.tolist(), strict=True)):
            name = f'field "{show(form.path)}"'
            if not 0 <= at < table.entries.size:
                self._fail(f"{name} in entry {at} of {table.entries.size}", "one that is there")
            # before the check of the entry, which takes as long as it has words: as many as the field claims
            layout = -1 if form.layout is None else places[form.layout]
            entry, wanted = tuple(table.entries[at].tolist()[1:4]), (layout, words_of_one(form), size_of_word(form))
            if entry != wanted:
                self._fail(f"{name} with an entry of layout, words and bytes {entry}", f"{wanted}")
            assert form.dtype is not None
            self._check_pads(table, number, form)
        bools = np.array([form.dtype is torch.bool for form in forms], np.int64)
        most = _MOST_SPARE if self._most is None else min(self._most - self._claimed, _MOST_SPARE)
        line = table.rows, table.dense_rows, most, table.fields, bools
        bad = native.check_fields(table.entries, table.layout_rows, table.body, *line)
        if bad < 0:
            self._fail(f'field "{show(forms[-bad - 1].path)}" of bools with other bytes', "0 and 1 alone")
        if bad > len(forms):
            self._fail("an entry of the table that no field needs", "none")
        if bad:
            seen = f'field "{show(forms[bad - 1].path)}": an entry that cannot be decoded'
            self._fail(seen, f"one as to_bytes writes it, which takes at most {most} bytes besides the field")

    def _check_pads(self, table: Table, number: int, form: FieldForm) -> None:
        """That a padded field has a record for each row, or one for all, and other fields have none."""
        name, (begin, size, count) = f'field "{show(form.path)}"', table.pads[number].tolist()
        assert form.dtype is not None
        if not (0 <= begin <= table.body.size and 0 <= size < _MOST and 0 <= count * size <= table.body.size - begin):
            self._fail(f"{name} with {count} pads of {size} bytes at {begin}", "records inside the body")
        sizes = [1 + form.dtype.itemsize]
        if form.layout is not None and not form.shape and has_signs(form.dtype):
            sizes.append(sizes[0] + -(-table.frames[form.layout][0] // 8))
        padded = form.kind == "padded"
        held = count in (1, table.rows) and size in sizes
        if not (held or (count == 0 and table.rows == 0) if padded else count == 0):
            seen = f"{name}, {form.kind}, with {count} pads of {size} bytes"
            self._fail(seen, f"1 or {table.rows} of {sizes} bytes beside padded fields, and only there")
        if padded:
            pads = table.pads_of(number, form.dtype.itemsize)
            known = not (pads.records[:, 0] > abi.EDGE).any() and pads.fits(table.frames[form.layout or ""][0])
            if not known or (form.dtype is torch.bool and odd_bools(pads.records[:, 1])):
                self._fail(f"{name} with a pad of other bytes", "a word, EDGE and zeros, bools of 0 and 1 alone")

    def _restore(self) -> str | None:
        """Puts the arrays of the codec in the place of what travels; its name, None without one."""
        squeezed = self._manifest.get("codec")
        if squeezed is None:
            return None
        self._only(squeezed, ("name", "arrays"))
        name = self._get(squeezed, "name", str)
        if name not in CODECS:
            self._fail(f"codec {brief(name)}", f"one of {', '.join(CODECS)}")
        check_codec(name, self._call)
        records = squeezed.get("arrays")
        check_records(self._arrays, records, self._call)
        self._claim(size_of(records), "the compressed arrays")
        self._arrays = restored_arrays(self._arrays, records, self._call)
        return name

    def _claim(self, nbytes: int, what: str) -> None:
        """Takes from the bytes that the batch may need."""
        self._claimed += nbytes
        if self._most is not None and self._claimed > self._most:
            raise WireFormatError(
                f"{self._call}: with {what}, the batch takes {self._claimed} bytes in memory, padded; expected at most "
                f"{self._most}. Pass a larger max_bytes, or None, if you trust who wrote it."
            )

    # ---------------------------------------------------------------- parts

    def _array(self, number: Any) -> Words:
        if type(number) is not int or not 0 <= number < len(self._arrays):
            self._fail(f"array number {brief(number)}", f"one of {len(self._arrays)}")
        return self._arrays[number]

    def _form(self, entry: Any) -> FieldForm:
        """The form of a field; that of a tensor is remembered by its text, because files of one producer repeat it."""
        if isinstance(entry, dict) and "dtype" in entry:
            text = json.dumps(entry)
            return _forms.get(text) or _forms.keep(text, self._new_form(entry))
        return self._new_form(entry)

    def _new_form(self, entry: Any) -> FieldForm:
        path = self._path(self._get(entry, "path", list))
        kind = self._get(entry, "kind", str)
        if kind not in _MEMBERS:
            self._fail(f'field "{show(path)}" of kind {brief(kind)}', f"one of {', '.join(_MEMBERS)}")
        self._only(entry, _MEMBERS[kind])
        hints: tuple[str, ...] = tuple(self._get(entry, "hints", list)) if "hints" in entry else ()
        if not all(objects.is_text(hint) and is_hint(hint) for hint in hints):
            self._fail(f"hints {brief(hints)}", f"{', '.join(HINTS)}, concat:head,tail or near:field")
        if kind == "node":
            return FieldForm(path, "node", node=self._node(entry.get("node")))
        if kind == "object":
            return FieldForm(path, "object", hints=hints)
        dtype, shape = self._get(entry, "dtype", str), self._get(entry, "shape", list)
        device, reason = self._get(entry, "device", str), entry.get("reason")
        if dtype not in DTYPES or not _DEVICE.fullmatch(device) or ("reason" in entry and not objects.is_text(reason)):
            self._fail(f'field "{show(path)}" of dtype {brief(dtype)} on {brief(device)}', "those of torch")
        if len(shape) > objects.MOST_DIMS or any(type(size) is not int or not 0 <= size < _MOST for size in shape):
            self._fail(f'field "{show(path)}" of element shape {brief(shape)}', f"at most {objects.MOST_DIMS} sizes")
        layout, axis = entry.get("layout"), entry.get("axis")
        form = FieldForm(path, kind, layout, 1, DTYPES[dtype], None, device, tuple(shape), hints, reason, axis)
        if "axis" in entry and not objects.is_text(axis):
            self._fail(f'field "{show(path)}" on axis {brief(axis)}', "the name of a layout")
        if (layout is None) != (kind == "dense") or not isinstance(layout, str | None):
            self._fail(f'field "{show(path)}" of kind {kind} on layout {brief(layout)}', "a layout, unless it is dense")
        if kind == "padded" or "dim" in entry:
            dim = self._get(entry, "dim", int)
            if not 1 <= dim <= len(shape) + 1:
                self._fail(f'field "{show(path)}" is ragged along dim {dim}', f"1 to {len(shape) + 1}")
            form = replace(form, ragged_dim=dim)
        return form

    def _node(self, node: Any) -> Node:
        held = dict(cast("dict[str, Any]", node)) if isinstance(node, dict) else {}
        dims, device = held.get("dims"), held.get("device")
        kind = self._kind(held.pop("kind")) if "kind" in held else None
        names = held.pop("names", None)
        if set(held) != {"dims", "device"} or not isinstance(dims, list | None) or not isinstance(device, str | None):
            self._fail(f"node {brief(node)}", "dims and device")
        sizes = None if dims is None else tuple(cast("list[Any]", dims))
        if len(sizes or ()) > objects.MOST_DIMS or any(type(n) is not int or not 0 <= n < _MOST for n in sizes or ()):
            self._fail(f"node of dims {brief(sizes)}", f"at most {objects.MOST_DIMS} whole numbers below {_MOST}")
        if device is not None and not _DEVICE.fullmatch(device):
            self._fail(f"node on device {brief(device)}", "one of torch")
        if names is None:
            return Node(sizes, device, kind)
        line: list[Any] = cast("list[Any]", names) if isinstance(names, list) else []
        texts = [name for name in line if name is not None]
        known = all(map(objects.is_text, texts)) and len(set(texts)) == len(texts)
        if not known or not any(line) or sizes is None or len(line) != 1 + len(sizes):
            wanted = "a text or null for each batch dim, all different, and not null alone"
            self._fail(f"names of dims {brief(names)}", wanted)
        return Node(sizes, device, kind, tuple(line))

    def _kind(self, name: Any) -> Any:
        """The tensorclass of that name, if this process has imported it; reading imports nothing."""
        module, colon, names = name.partition(":") if objects.is_text(name) else ("", "", "")
        kind: Any = sys.modules.get(module) if colon else None
        for part in names.split("."):
            kind = vars(kind).get(part) if isinstance(kind, type | ModuleType) else None
        whole = isinstance(kind, type) and is_tensorclass(kind) and is_dataclass(kind)  # no base of tensorclasses
        if not whole or issubclass(kind, _OBJECTS):
            seen = f"a sub-batch of class {brief(name)}"
            self._fail(seen, "a tensorclass that this process has; import its module first")
        return cast("Any", kind)

    def _path(self, names: list[Any]) -> Path:
        if not 0 < len(names) <= MOST_PATH or not all(map(objects.is_text, names)) or names[0] == LAYOUTS:
            self._fail(f"path {brief(names)}", f'1 to {MOST_PATH} names, the first not "{LAYOUTS}"')
        return tuple(names)

    def _objects(self, forms: list[FieldForm], entries: list[Any], rows: int, root: Node) -> dict[Path, Objects]:
        found: dict[Path, Objects] = {}
        above = {form.path: form.node for form in forms if form.node is not None}
        for form, entry in zip(forms, entries, strict=True):
            if form.kind != "object":
                continue
            depth, stacked = self._get(entry, "depth", int), "stacked" in entry
            if "pickle" in entry and not self._pickled:
                raise WireFormatError(
                    f'{self._call}: field "{show(form.path)}" is a pickle, which runs code when it is read; expected '
                    "JSON. Pass allow_pickle=True if you trust who wrote it."
                )
            if ("pickle" in entry) == ("json" in entry):
                self._fail(f'field "{show(form.path)}" with {brief(entry)}', "either json or pickle")
            data = self._unpickled(entry["pickle"]) if "pickle" in entry else self._said(entry["json"])
            dims = above.get(form.path[:-1], root).batch_size(rows)
            if stacked and not (entry["stacked"] is True and depth == 1 and ("pickle" in entry or data == [])):
                self._fail(f'field "{show(form.path)}", stacked, of depth {depth}', "pickled rows of depth 1")
            if depth and not stacked and not len(dims) <= depth <= objects.MOST_DEPTH:
                seen = f'field "{show(form.path)}" of depth {depth}'
                self._fail(seen, f"0, or at least {len(dims)} and at most {objects.MOST_DEPTH}")
            if not _is_list(data, (*dims, *[None] * depth)[:depth]):
                self._fail(f'field "{show(form.path)}" of depth {depth}', f"lists of {dims} items")
            found[form.path] = Objects(data, depth, stacked)
            self._claim(found[form.path].decoded_nbytes, f'field "{show(form.path)}"')
        return found

    def _unpickled(self, numbers: Any) -> Any:
        if not isinstance(numbers, list) or not numbers:
            self._fail(f"pickle {brief(numbers)}", "numbers of arrays")
        # copies: who unpickles an array may write to it
        stream, *buffers = [bytearray(self._array(number)) for number in cast("list[Any]", numbers)]
        return pickle.loads(stream, buffers=buffers)

    def _said(self, data: Any) -> Any:
        try:
            return objects.from_json(data, self._array)
        except WireFormatError:
            raise
        except ValueError as error:
            self._fail(f"{error}, in the object {brief(data)}", "one as to_bytes writes it")

    # ---------------------------------------------------------------- what must fit together

    def _check_tree(self, forms: list[FieldForm], layouts: Mapping[str, RowLayout], rows: int, root: Node) -> None:
        """That every entry lies in a node before it, once, and that tensors have the batch dims of their node."""
        nodes: dict[Path, Node] = {(): root}
        seen: set[Path] = set()
        for form in forms:
            name = f'field "{show(form.path)}"'
            above = nodes.get(form.path[:-1])
            if form.path in seen or above is None:
                self._fail(f"{name} twice, or without what it lies in", "each once")
            seen.add(form.path)
            if above.kind is not None and form.path[-1] not in {member.name for member in fields_of(above.kind)}:
                self._fail(f"{name} in a sub-batch of class {above.kind.__name__}", "a field of that class")
            dims = above.batch_size(rows)
            shape: tuple[int, ...] = dims
            if form.node is not None:
                nodes[form.path] = form.node
                shape = form.node.batch_size(rows)
            elif form.dtype is not None:
                shape = shape_of(form, layouts, root.batch_size(rows)[:1])
            if shape[: len(dims)] != dims and form.kind != "jagged":
                self._fail(f"{name} of shape {brief(shape)}", f"{dims}, ... as the node it lies in")
            if form.kind == "jagged" and len(dims) > 1:  # its second dim is no number
                self._fail(f"{name}, which is jagged", f"no such field in a node of {dims}")
            size = math.prod(max(size, 1) for size in shape) * (1 if form.dtype is None else form.dtype.itemsize)
            size = size if form.layout is None else max(size, rows)  # each row is looked at
            if size >= _MOST_BYTES:
                self._fail(f"{name} of shape {brief(shape)}", "one that memory can hold")
            self._claim(size, name)

    # ---------------------------------------------------------------- members of JSON

    def _get(self, entry: Any, name: str, kind: Callable[..., Any]) -> Any:
        """An entry of a JSON object, of a type."""
        value = cast("dict[str, Any]", entry).get(name) if isinstance(entry, dict) else None
        if type(value) is not kind:
            self._fail(f'"{name}" is {brief(value)}', f"a {getattr(kind, '__name__', kind)}")
        return value

    def _only(self, entry: Any, names: tuple[str, ...]) -> None:
        odd = sorted(set(cast("dict[str, Any]", entry)) - set(names)) if isinstance(entry, dict) else []
        if odd:
            self._fail(f"members {brief(odd)}", f"none but {', '.join(names)}")

    def _fail(self, seen: str, expected: str) -> NoReturn:
        fail(self._call, seen, expected)


def _is_list(data: Any, sizes: tuple[int | None, ...]) -> bool:
    """Whether it is lists of lists of these sizes; None for any."""
    if not sizes:
        return True
    items = cast("list[Any]", data) if isinstance(data, list) else None
    if items is None or sizes[0] not in (None, len(items)):
        return False
    return all(_is_list(item, sizes[1:]) for item in items)
