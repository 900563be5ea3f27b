"""Reading: from a manifest and its arrays to a packed batch. Nothing is believed: every array must fit the field that
it belongs to, so that what was read can be decoded."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from maskpack import codec, objects
from maskpack.bools import odd_field
from maskpack.contents import Contents, word_dtype_of, words_of_one
from maskpack.errors import LayoutError, WireFormatError
from maskpack.layout import RowLayout
from maskpack.objects import Objects
from maskpack.registry import HINTS, PER_ROW, Pad, PadValue, Path, show
from maskpack.schema import LAYOUTS, FieldForm, Schema
from maskpack.sharing import KINDS, WHOLE, Columns, Encoding, Joined, Same
from maskpack.tree import Node
from maskpack.wire import FREE_ROWS, Message, brief, fail
from maskpack.words import DTYPES, Words, odd_bools, pad_tensor

_DEVICE = re.compile(r"(cpu|cuda|hpu|mps|npu|xla|xpu)(:(0|[1-9][0-9]?))?")
_MOST = 1 << 31
_MOST_BYTES = 1 << 62
_NO_BYTES = np.zeros(0, np.uint8)
_FIELD = ("path", "kind", "dtype", "device", "shape", "hints", "reason", "row_pads", "encoding")
_MEMBERS = {
    "padded": (*_FIELD, "layout", "dim", "pad"),
    "flat": (*_FIELD, "layout"),
    "jagged": (*_FIELD, "layout"),
    "dense": _FIELD,
    "object": ("path", "kind", "hints", "depth", "listed", "json", "pickle"),
    "node": ("path", "kind", "node"),
}


def read(message: Message, call: str, pickled: bool) -> Contents:
    """The batch that a message says. Raises WireFormatError."""
    manifest, arrays = message.manifest, message.arrays
    _only(manifest, ("rows", "root", "axes", "layouts", "fields", "codec"), call)
    squeezed = manifest.get("codec")
    name = None
    if squeezed is not None:
        _only(squeezed, ("name", "arrays"), call)
        name = _get(squeezed, "name", str, call)
        if name not in codec.CODECS:
            fail(call, f"codec {brief(name)}", f"one of {', '.join(codec.CODECS)}")
        codec.check(name, call)
        arrays = codec.restored(arrays, squeezed.get("arrays"), call)
    return _Reader(manifest, arrays, call, pickled).contents(name)


class _Reader:
    def __init__(self, manifest: dict[str, Any], arrays: Any, call: str, pickled: bool) -> None:
        self._manifest = manifest
        self._arrays = arrays
        self._call = call
        self._pickled = pickled
        self._row_pads: dict[Path, Words] = {}
        self._run_arrays: set[int] = set()

    def contents(self, name: str | None) -> Contents:
        manifest, call = self._manifest, self._call
        rows = _get(manifest, "rows", int, call)
        if not 0 <= rows < _MOST:
            fail(call, f"{rows} rows", f"0 to {_MOST}")
        if rows > FREE_ROWS and rows > sum(array.nbytes for array in self._arrays):
            fail(call, f"{rows} rows in fewer bytes", f"at least a byte of arrays for each, beyond {FREE_ROWS}")
        layouts: dict[str, RowLayout] = {}
        for entry in _get(manifest, "layouts", list, call):
            layout_name, layout = self._layout(entry)
            if layout_name in layouts or layout.num_rows != rows:
                fail(call, f"layout {brief(layout_name)} of {layout.num_rows} rows", f"each once, of {rows}")
            layouts[layout_name] = layout
        entries = _get(manifest, "fields", list, call)
        forms = [self._form(entry) for entry in entries]
        axes = _get(manifest, "axes", list, call)
        if any(type(axis) is not str or axis not in layouts for axis in axes) or len(set(axes)) != len(axes):
            fail(call, f"axes {brief(axes)}", "names of layouts")
        for form in forms:
            if form.layout is not None and form.layout not in (axes if form.kind == "padded" else layouts):
                fail(call, f'field "{show(form.path)}" on layout {brief(form.layout)}', "one that is there, or an axis")
        axes = [(axis, layouts[axis].width, layouts[axis].anchor) for axis in axes]
        root = self._node(manifest.get("root"))
        self._check_tree(forms, layouts, rows, root)
        encoded = {
            form.path: self._encoding(entry.get("encoding"), tuple(KINDS), form)
            for form, entry in zip(forms, entries, strict=True)
            if form.kind not in ("object", "node")
        }
        found = self._objects(forms, entries, rows, root)
        schema = Schema(root, tuple(forms), tuple(axes))
        out = Contents(rows, schema, layouts, encoded, found, self._row_pads, name)
        self._check(out)
        return out

    # ---------------------------------------------------------------- parts

    def _array(self, number: Any) -> Words:
        if type(number) is not int or not 0 <= number < len(self._arrays):
            fail(self._call, f"array number {brief(number)}", f"one of {len(self._arrays)}")
        return self._arrays[number]

    def _layout(self, entry: Any) -> tuple[str, RowLayout]:
        call = self._call
        name, width, anchor = (
            _get(entry, "name", str, call),
            _get(entry, "width", int, call),
            _get(entry, "anchor", int, call),
        )
        numbers = _get(entry, "runs", list, call)
        _only(entry, ("name", "width", "anchor", "runs"), call)
        if not 0 <= anchor <= width < _MOST or len(numbers) != 3 or not objects.is_text(name):
            seen = f"layout {brief(name)} {width} wide, anchor {anchor}"
            fail(call, seen, f"0 <= anchor <= width < {_MOST}, three arrays")
        starts, counts, runs = (self._array(number) for number in numbers)
        if len(self._run_arrays.union(numbers)) != len(self._run_arrays) + 3:
            fail(call, f"layout {brief(name)} with arrays {numbers}", "arrays of its own")
        self._run_arrays.update(numbers)
        parts = starts, counts, runs
        if any(part.dtype.kind != "u" or int(part.max(initial=0)) >= _MOST for part in parts):
            seen = f"layout {brief(name)} with runs of {[str(part.dtype) for part in parts]}"
            fail(call, seen, f"unsigned integers below {_MOST}")
        try:
            return name, RowLayout.from_runs(starts, counts, runs, width, anchor=anchor)
        except LayoutError as error:
            fail(call, f"layout {brief(name)}: {error}", "sound runs")

    def _form(self, entry: Any) -> FieldForm:
        call = self._call
        path = self._path(_get(entry, "path", list, call))
        kind = _get(entry, "kind", str, call)
        if kind not in _MEMBERS:
            fail(call, f'field "{show(path)}" of kind {brief(kind)}', f"one of {', '.join(_MEMBERS)}")
        _only(entry, _MEMBERS[kind], call)
        hints: tuple[str, ...] = tuple(_get(entry, "hints", list, call)) if "hints" in entry else ()
        if not all(map(_is_hint, hints)):
            fail(call, f"hints {brief(hints)}", f"{', '.join(HINTS)}, join:head,tail or delta:field")
        if kind == "node":
            return FieldForm(path, "node", node=self._node(entry.get("node")))
        if kind == "object":
            return FieldForm(path, "object", hints=hints)
        dtype, shape = _get(entry, "dtype", str, call), _get(entry, "shape", list, call)
        device, reason = _get(entry, "device", str, call), entry.get("reason")
        if dtype not in DTYPES or not _DEVICE.fullmatch(device) or ("reason" in entry and not objects.is_text(reason)):
            fail(call, f'field "{show(path)}" of dtype {brief(dtype)} on {brief(device)}', "those of torch")
        if len(shape) > objects.MOST_DIMS or any(type(size) is not int or not 0 <= size < _MOST for size in shape):
            fail(call, f'field "{show(path)}" of element shape {brief(shape)}', f"at most {objects.MOST_DIMS} sizes")
        layout = entry.get("layout")
        form = FieldForm(path, kind, layout, (), 1, DTYPES[dtype], None, device, tuple(shape), hints, reason)
        if (layout is None) != (kind == "dense") or not isinstance(layout, str | None):
            fail(call, f'field "{show(path)}" of kind {kind} on layout {brief(layout)}', "a layout, unless it is dense")
        if kind == "padded":
            dim, pad = _get(entry, "dim", int, call), self._pad(entry.get("pad"))
            if not _holds(DTYPES[dtype], pad):
                fail(call, f'field "{show(path)}" of dtype {dtype} with pad {brief(pad)}', "one that its dtype holds")
            if not 1 <= dim <= len(shape) + 1:
                fail(call, f'field "{show(path)}" is ragged along dim {dim}', f"1 to {len(shape) + 1}")
            form = replace(form, pads=(pad,), ragged_dim=dim)
        if "row_pads" in entry:
            pads = self._array(entry["row_pads"])
            self._row_pads[path] = (
                pads.reshape(-1, 2) if form.dtype == DTYPES["complex128"] and not pads.size % 2 else pads
            )
        if (path in self._row_pads) != (form.pads == (PER_ROW,)):
            fail(call, f'field "{show(path)}" with pad {form.pads}', "one pad a row beside PER_ROW, and only there")
        return form

    def _node(self, node: Any) -> Node:
        held = cast("dict[str, Any]", node) if isinstance(node, dict) else {}
        dims, device = held.get("dims"), held.get("device")
        if set(held) != {"dims", "device"} or not isinstance(dims, list | None) or not isinstance(device, str | None):
            fail(self._call, f"node {brief(node)}", "dims and device")
        sizes = None if dims is None else tuple(cast("list[Any]", dims))
        if any(type(size) is not int or not 0 <= size < _MOST for size in sizes or ()):
            fail(self._call, f"node of dims {brief(sizes)}", "whole numbers")
        if device is not None and not _DEVICE.fullmatch(device):
            fail(self._call, f"node on device {brief(device)}", "one of torch")
        return Node(sizes, device)

    def _path(self, names: list[Any]) -> Path:
        if not names or not all(map(objects.is_text, names)) or names[0] == LAYOUTS:
            fail(self._call, f"path {brief(names)}", f'names, the first not "{LAYOUTS}"')
        return tuple(names)

    def _pad(self, pad: Any) -> PadValue:
        if isinstance(pad, dict) and len(cast("dict[str, Any]", pad)) == 1:
            ((name, value),) = cast("dict[str, Any]", pad).items()
            if name == "pad" and value in ("EDGE", "PER_ROW"):
                return Pad[value]
            if name == "complex" and isinstance(value, list) and len(cast("list[Any]", value)) == 2:
                real, imag = (self._pad(part) for part in cast("list[Any]", value))
                if isinstance(real, float) and isinstance(imag, float):
                    return complex(real, imag)
        value = self._said(pad)
        if type(value) not in (bool, int, float):
            fail(self._call, f"pad {brief(pad)}", "a number, EDGE or PER_ROW")
        return value

    def _encoding(self, entry: Any, allowed: tuple[str, ...], form: FieldForm) -> Any:
        kind = _get(entry, "kind", str, self._call)
        if kind not in allowed:
            fail(self._call, f'field "{show(form.path)}" encoded as {brief(kind)}', f"one of {', '.join(allowed)}")
        values: dict[str, Any] = {}
        _only(entry, ("kind", *(field.name for field in fields_of(KINDS[kind]))), self._call)
        for field in fields_of(KINDS[kind]):
            value = entry.get(field.name)
            if field.type == "Words":
                values[field.name] = self._array(value)
            elif field.type == "int":
                values[field.name] = _get(entry, field.name, int, self._call)
            elif field.type == "Path":
                values[field.name] = self._path(_get(entry, field.name, list, self._call))
            elif field.type == "Runs":
                values[field.name] = self._encoding(value, ("runs",), form)
            elif field.type == "Whole":
                values[field.name] = self._encoding(value, WHOLE, form)
            else:
                parts = _get(entry, field.name, list, self._call)
                values[field.name] = tuple(self._encoding(part, WHOLE, form) for part in parts)
        return KINDS[kind](**values)

    def _objects(self, forms: list[FieldForm], entries: list[Any], rows: int, root: Node) -> dict[Path, Objects]:
        found: dict[Path, Objects] = {}
        above = {form.path: form.node for form in forms if form.node is not None}
        for form, entry in zip(forms, entries, strict=True):
            if form.kind != "object":
                continue
            depth, listed = _get(entry, "depth", int, self._call), _get(entry, "listed", bool, self._call)
            if "pickle" in entry and not self._pickled:
                raise WireFormatError(
                    f'{self._call}: field "{show(form.path)}" is a pickle, which runs code when it is read; expected '
                    "JSON. Pass allow_pickle=True if you trust who wrote it."
                )
            if ("pickle" in entry) == ("json" in entry):
                fail(self._call, f'field "{show(form.path)}" with {brief(entry)}', "either json or pickle")
            data = self._unpickled(entry["pickle"]) if "pickle" in entry else self._said(entry["json"])
            dims = above.get(form.path[:-1], root).batch_size(rows)
            if depth and (listed or not len(dims) <= depth <= objects.MOST_DIMS):
                fail(self._call, f'field "{show(form.path)}" of depth {depth}', f"0, or at least {len(dims)}")
            if not _is_list(data, (rows,) if listed else (*dims, *[None] * depth)[:depth]):
                fail(self._call, f'field "{show(form.path)}" of depth {depth}', f"lists of {dims} items")
            found[form.path] = Objects(data, depth, listed)
        return found

    def _unpickled(self, numbers: Any) -> Any:
        if not isinstance(numbers, list) or not numbers:
            fail(self._call, f"pickle {brief(numbers)}", "numbers of arrays")
        # copies: who unpickles an array may write to it
        stream, *buffers = [bytearray(self._array(number)) for number in cast("list[Any]", numbers)]
        return pickle.loads(stream, buffers=buffers)

    def _said(self, data: Any) -> Any:
        try:
            return objects.from_json(data, self._array)
        except WireFormatError:
            raise
        except (ValueError, TypeError) as error:  # TypeError: a list as the key of a dict
            fail(self._call, f"an object {brief(data)} ({error})", "one as to_bytes writes it")

    # ---------------------------------------------------------------- what must fit together

    def _check_tree(self, forms: list[FieldForm], layouts: Mapping[str, RowLayout], rows: int, root: Node) -> None:
        """That every entry lies in a node before it, once, and that tensors have the batch dims of their node."""
        nodes: dict[Path, Node] = {(): root}
        seen: set[Path] = set()
        for form in forms:
            above = nodes.get(form.path[:-1])
            if form.path in seen or above is None:
                fail(self._call, f'field "{show(form.path)}" twice, or without what it lies in', "each once")
            seen.add(form.path)
            dims = above.batch_size(rows)
            shape: tuple[int, ...] = dims
            if form.node is not None:
                nodes[form.path] = form.node
                shape = form.node.batch_size(rows)
            elif form.dtype is not None:
                layout = None if form.layout is None else layouts[form.layout]
                shape = _shape(form, layout, () if root.more_dims is None else (rows,))
                most = math.prod(max(size, 1) for size in shape) * form.dtype.itemsize
                if most >= _MOST_BYTES:
                    fail(self._call, f'field "{show(form.path)}" of shape {brief(shape)}', "one that memory can hold")
                if form.kind == "jagged":  # its second dim is no number
                    dims, shape = dims if len(dims) > 1 else (), ()
            if shape[: len(dims)] != dims:
                fail(self._call, f'"{show(form.path)}" of shape {brief(shape)}', f"{dims}, ... as the node it lies in")

    def _check(self, packed: Contents) -> None:
        """That every field can be decoded."""
        for path, encoding in packed.fields.items():
            form = packed.forms[path]
            bounds = packed.bounds(path)
            if isinstance(encoding, Same | Joined):
                problem = self._reference(packed, path, encoding)
            elif isinstance(encoding, Columns) and len(encoding.columns) != words_of_one(form):
                problem = f"{len(encoding.columns)} columns of {words_of_one(form)}"
            else:
                problem = encoding.problem(word_dtype_of(form), bounds)
            pads = self._row_pads.get(path)
            if problem is None and pads is not None:
                wanted = (bounds.size - 1, *([2] if form.dtype == DTYPES["complex128"] else []))
                if pads.dtype != word_dtype_of(form) or pads.shape != wanted:
                    problem = f"row pads {pads.dtype} {pads.shape}"
            if problem is not None:
                fail(self._call, f'field "{show(path)}": {problem}', "an encoding that gives its words")
        for path in packed.fields:  # only now: they may take their words from any other
            pads = self._row_pads.get(path, _NO_BYTES)
            if packed.forms[path].dtype is torch.bool and (
                odd_bools(pads) or odd_field(path, packed.fields, packed.bounds)
            ):
                fail(self._call, f'field "{show(path)}" of bools with other bytes', "0 and 1 alone")

    def _reference(self, packed: Contents, path: Path, encoding: Encoding) -> str | None:
        form = packed.forms[path]
        others = [encoding.field] if isinstance(encoding, Same) else []
        if isinstance(encoding, Joined):
            others = [encoding.head, encoding.tail]
        for other in others:
            if other not in packed.fields or isinstance(packed.fields[other], Joined):
                return f'it takes the words of "{show(other)}"'
            if isinstance(encoding, Same) and isinstance(packed.fields[other], Same):
                return f'it takes the words of "{show(other)}"'
            if word_dtype_of(packed.forms[other]) != word_dtype_of(form):
                return f'"{show(other)}" has words of another size'
        rows = [np.diff(packed.bounds(other)) for other in (path, *others)]
        if len({row.size for row in rows}) > 1 or not np.array_equal(rows[0], sum(rows[1:])):
            return f"its rows have other lengths than those of {[show(other) for other in others]}"
        return None


def _get(entry: Any, name: str, kind: Callable[..., Any], call: str) -> Any:
    """An entry of a JSON object, of a type."""
    value = cast("dict[str, Any]", entry).get(name) if isinstance(entry, dict) else None
    if type(value) is not kind:
        fail(call, f'"{name}" is {brief(value)}', f"a {getattr(kind, '__name__', kind)}")
    return value


def _only(entry: Any, names: tuple[str, ...], call: str) -> None:
    odd = sorted(set(cast("dict[str, Any]", entry)) - set(names)) if isinstance(entry, dict) else []
    if odd:
        fail(call, f"members {brief(odd)}", f"none but {', '.join(names)}")


def _is_hint(hint: Any) -> bool:
    if not objects.is_text(hint):
        return False
    name, colon, rest = hint.partition(":")
    return hint in HINTS or (colon == ":" and rest.count(",") == {"delta": 0, "join": 1}.get(name))


def _holds(dtype: torch.dtype, pad: PadValue) -> bool:
    if isinstance(pad, Pad):
        return True
    try:
        torch.full((), pad, dtype=dtype)  # as it will be decoded: a complex dtype may refuse what pad_tensor makes inf
        return pad_tensor(pad, dtype) is not None
    except (OverflowError, RuntimeError, TypeError):
        return False


def _shape(form: FieldForm, layout: RowLayout | None, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor at home; of a jagged one, that of its values."""
    if layout is None:
        return (*rows, *form.shape)
    if form.kind != "padded":
        return (layout.total, *form.shape)
    before = form.ragged_dim - 1
    return (layout.num_rows, *form.shape[:before], layout.width, *form.shape[before:])


def _is_list(data: Any, sizes: tuple[int | None, ...]) -> bool:
    """Whether it is lists of lists of these sizes; None for any."""
    if not sizes:
        return True
    items = cast("list[Any]", data) if isinstance(data, list) else None
    if items is None or sizes[0] not in (None, len(items)):
        return False
    return all(_is_list(item, sizes[1:]) for item in items)
