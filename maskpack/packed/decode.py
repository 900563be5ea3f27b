"""Decoding of packed batches: the words of every field, then the tensors; shapes and sizes of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core.bits import Words, from_words, word_dtype
from maskpack.core.index import IntArray
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.jagged import jagged
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.checks import to_padded
from maskpack.nesting.nest import rows_only
from maskpack.nesting.schema import FieldForm, RowPads, pad_table, span_tables
from maskpack.packed.choose import Candidate
from maskpack.packed.encodings import Plain
from maskpack.packed.references import Field, Joined, Own, Same

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

MAX_BYTES = 64 << 30
"""The most bytes that a batch may take decoded, unless the caller gives another limit."""


def word_dtype_of(form: FieldForm) -> np.dtype[Any]:
    """The dtype of a field's words."""
    assert form.dtype is not None
    return word_dtype(form.dtype.itemsize)


def words_of_one(form: FieldForm) -> int:
    """Words of one element of a field."""
    assert form.dtype is not None
    return math.prod(form.shape) * (2 if form.dtype.itemsize == 16 else 1)


def shape_of(
    form: FieldForm, layouts: Mapping[str, RowLayout], rows: tuple[int, ...], nested: bool = False
) -> tuple[int, ...]:
    """The shape of a tensor as `decompress` gives it. A jagged tensor has the shape of its values, [T, *F], and so has
    a padded one if `nested` is true. `rows` is (B,), or () where the rows are no batch dim."""
    if form.layout is None:
        return (*rows, *form.shape)
    layout = layouts[form.layout]
    if nested or form.kind != "padded":
        return (layout.num_tokens, *form.shape)
    before = form.ragged_dim - 1
    return (layout.num_rows, *form.shape[:before], layout.width, *form.shape[before:])


def shape_in(packed: PackedBatch, form: FieldForm, nested: bool = False) -> tuple[int, ...]:
    """`shape_of` a field of a packed batch."""
    return shape_of(form, packed.layouts, packed.schema.root.batch_size(packed.num_rows)[:1], nested)


def decoded_nbytes(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> int:
    """Bytes that some fields take decoded, without decoding them: tensors, Python objects, and the LAYOUTS entry."""
    total = 0
    for form in forms:
        if form.kind == "object":
            total += packed.objects[form.path].decoded_nbytes
        elif form.dtype is not None:
            total += math.prod(shape_in(packed, form, nested)) * form.dtype.itemsize
    if nested:
        total += sum(12 * layout.num_spans + 16 * (layout.num_rows + 1) for layout in packed.layouts.values())
    return total


def candidate(form: FieldForm, line: Words | None, bounds: IntArray, encoding: Own | None = None) -> Candidate:
    """A field with its words, or with an encoding of it, for the choice of an encoding."""
    assert form.dtype is not None
    integers = not (form.dtype.is_floating_point or form.dtype.is_complex)
    flat = None if line is None else line.reshape(-1)
    items, dtype = words_of_one(form), word_dtype_of(form)
    return Candidate(flat, bounds, form.layout, integers, items, form.hints, encoding, dtype)


def pad_table_of(packed: PackedBatch, forms: Iterable[FieldForm]) -> Tensor:
    """`pad_table` of some fields, on the host."""
    forms = [form for form in forms if form.dtype is not None]
    row_pads = {
        f.path: from_words(packed.row_pads[f.path], f.dtype) for f in forms if f.path in packed.row_pads and f.dtype
    }
    return pad_table(forms, row_pads, packed.num_rows, "cpu")


@dataclass
class Decoded:
    """Fields that a kernel has decoded on a device.

    Attributes:
        entries: tensors by path, jagged if the batch is nested.
        offsets: the offsets of jagged tensors, by layout and device.
        tables: the span tables of LAYOUTS, by layout; empty if the kernel did not write them.
        pads: the pads of LAYOUTS; None if the kernel did not write them.
    """

    entries: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    offsets: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])
    tables: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    pads: Tensor | None = None


class Decoder:
    """Decodes fields of one packed batch to one device and format. Each field is decoded once, and each layout goes to
    a device once. The fields in `ready` are decoded already."""

    def __init__(
        self, packed: PackedBatch, nested: bool, device: torch.device | str | None, ready: Decoded | None = None
    ) -> None:
        self.nested = nested
        self._packed = packed
        self._device = device
        self._ready = ready or Decoded()
        self._moved: dict[tuple[str, str], RowLayout] = {}
        self._words: dict[Path, Words] = {}

    def entry(self, form: FieldForm) -> Any:
        """An entry of the batch, in its own memory."""
        if form.path in self._ready.entries:
            return self._ready.entries[form.path]
        if form.node is not None:
            return on(rows_only(form.node) if self.nested else form.node, self._device)
        if form.kind == "object":
            return self._packed.objects[form.path].entry(self._node_above(form.path).batch_size(self._packed.num_rows))
        values = self._values(form)
        if form.layout is None:
            return values
        layout = self._layout(form.layout, values.device)
        if form.kind == "jagged" or (self.nested and form.kind in ("padded", "flat")):
            return jagged(values, layout)
        return values if form.kind == "flat" else to_padded(values, form, layout, self._row_pads(form))

    def widened(self, form: FieldForm, left: int, right: int) -> Tensor:
        """A padded field with `left` and `right` more columns of padding."""
        layout = self._packed.layouts[form.layout or ""].widened(left, right)
        values = self._values(form)
        return to_padded(values, form, layout.to(values.device), self._row_pads(form))

    def pads(self, forms: Iterable[FieldForm]) -> Tensor:
        """The pads of the LAYOUTS entry."""
        if self._ready.pads is not None:
            return self._ready.pads
        return pad_table_of(self._packed, forms).to(self._device or "cpu")

    def _row_pads(self, form: FieldForm) -> RowPads | None:
        """The pads of a field whose pad is PER_ROW; None for other fields."""
        if form.path not in self._packed.row_pads:
            return None
        assert form.dtype is not None
        pads = from_words(self._packed.row_pads[form.path], form.dtype).clone()
        return RowPads(pads.to(self._device or form.device or "cpu"))

    def tables(self) -> dict[str, Tensor]:
        """The span tables of the LAYOUTS entry; they share no memory with the packed batch."""
        if self._ready.tables:
            return self._ready.tables
        return span_tables(
            {name: self._layout(name, torch.device(self._device or "cpu")) for name in self._packed.layouts}
        )

    def source(self, path: Path) -> Field:
        """The words of a whole field, which are kept for further calls."""
        if path not in self._words:
            self._words[path] = self._decoded(path)
        return Field(self._words[path], self._packed.bounds(path))

    def _decoded(self, path: Path) -> Words:
        encoded = self._packed.fields[path]
        if isinstance(encoded, Same | Joined):
            return encoded.decode(self.source)
        return encoded.decode(word_dtype_of(self._packed.forms[path]), self._packed.bounds(path))

    def _values(self, form: FieldForm) -> Tensor:
        """The values on their device. On the host they are a copy, unless they are only the source of a padded form."""
        words, _ = self.source(form.path)
        assert form.dtype is not None
        more = (2,) if form.dtype.itemsize == 16 else ()
        tensor = from_words(words.reshape((*shape_in(self._packed, form, nested=True), *more)), form.dtype)
        device = torch.device(self._device or form.device or "cpu")
        if device.type != "cpu":
            return tensor.to(device)
        padded_later = form.kind == "padded" and not self.nested
        shared = isinstance(self._packed.fields[form.path], Plain | Same)
        return tensor.clone() if shared and not padded_later else tensor

    def _layout(self, name: str, device: torch.device) -> RowLayout:
        place = name, str(device)
        if place not in self._moved:
            layout = self._packed.layouts[name]
            moved = self._moved[place] = RowLayout.from_table(layout.width, layout.table, device, layout.anchor)
            if place in self._ready.offsets:
                moved.__dict__["offsets"] = self._ready.offsets[place]
        return self._moved[place]

    def _node_above(self, path: Path) -> Node:
        if len(path) == 1:
            return self._packed.schema.root
        node = self._packed.forms[path[:-1]].node
        assert node is not None
        return node


def on(node: Node, device: torch.device | str | None) -> Node:
    """A node with `device` in place of its own device, if one is given."""
    return node if device is None else replace(node, device=str(device))


# -------------------------------------------------------------------- narrower rows


def trimmed(packed: PackedBatch, forms: Sequence[FieldForm], call: str) -> PackedBatch:
    """The same rows in layouts without the outer columns that have no valid token in any row. Values lie row by row, so
    none of them moves. Batch dims behind the rows follow the fields of `forms`."""
    layouts: dict[str, RowLayout] = {}
    for name, layout in packed.layouts.items():
        table = layout.table
        end = int((table.starts + table.counts).max(initial=0))
        begin = int(table.starts.min(initial=end))
        layouts[name] = layout.narrow(begin, end)
    axes = tuple((name, layouts[name].width, layouts[name].anchor) for name, _, _ in packed.schema.axes)
    narrow = replace(packed, layouts=layouts, schema=replace(packed.schema, axes=axes))
    nodes = _fitted(narrow, forms, call)
    all_forms = [
        replace(form, node=nodes.get(form.path)) if form.path in nodes else form for form in packed.schema.forms
    ]
    return replace(narrow, schema=replace(narrow.schema, root=nodes[()], forms=tuple(all_forms)))


def _fitted(packed: PackedBatch, forms: Sequence[FieldForm], call: str) -> dict[Path, Node]:
    """The nodes of the batch and its sub-batches, with the batch dims of the trimmed tensors in them."""
    nodes: dict[Path, Node] = {(): packed.schema.root}
    nodes |= {
        form.path: form.node for form in forms if form.node is not None
    }  # a node comes after the node that it is in
    for path, node in nodes.items():
        if not node.more_dims:
            continue
        dims = node.more_dims
        within = [form for form in forms if form.path[: len(path)] == path]
        seen = {
            form.path: shape_in(packed, form)[1 : 1 + len(dims)] for form in within if form.kind in ("padded", "dense")
        }
        above = nodes[path[:-1]].more_dims or () if path else ()
        fits = next(iter(seen.values()), (*above, *dims[len(above) :]))
        lists = [form for form in within if form.kind == "object" and packed.objects[form.path].depth > 1]
        if any(own != fits for own in seen.values()) or (lists and fits != dims):
            where = f'sub-batch "{show(path)}"' if path else "batch"
            cut = ", ".join(f'"{show(name)}" {own}' for name, own in seen.items())
            cut += "".join(f', the items of "{show(form.path)}" {dims}' for form in lists)
            raise LayoutError(
                f'{call}: widths="trim" in a {where} with batch dims {dims} behind its rows, of which its fields would '
                f"keep {cut}; expected the same of each. Name fields of one axis, leave the widths padded, or give "
                "the TensorDict batch_size=[rows] before packing."
            )
        nodes[path] = node if fits == dims else replace(node, more_dims=fits)
    return nodes
