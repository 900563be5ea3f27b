"""Decoding of packed batches to tensors; shapes and sizes of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.bits import Words, address, empty_of, from_words
from maskpack.core.index import IntArray
from maskpack.core.pads import ANY_ZERO, PER_ROW
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.jagged import jagged
from maskpack.layout.row_layout import RowLayout, host_spans, layout_of_table, widened
from maskpack.nesting.checks import to_padded
from maskpack.nesting.nest import rows_only
from maskpack.nesting.schema import FieldForm, RowPads, Schema, pad_table, span_tables
from maskpack.nesting.signs import moved_signs
from maskpack.packed.table import trial_of

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

MAX_BYTES = 64 << 30
"""The most bytes that a batch may take decoded, unless the caller gives another limit."""


_NUMBERS, _PADDED, _PACKED = native.TARGET.itemsize // 8, 0, 1
_ENTRY, _ROWS = _NUMBERS - 2, _NUMBERS - 1
_ROW_PADS = native.FIELD.names.index("row_pads")  # type: ignore[union-attr]


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


class _Targets(NamedTuple):
    """Where tensors on the host are decoded to, but for their addresses.

    Attributes:
        lines: TARGET [n], as int64 [n, ...].
        numbers: int64 [n], the tensors among those of the table.
        dense: bool [n], those without a layout.
        places: int64 [n], where their addresses are written among the numbers of the lines.
        shapes: the layout whose tokens are the first dim, or None; the other dims, those behind B where a field has
            rows; whether it has; and the dtype.
        bytes_of: bytes of a row of all fields together, of a token of each layout, and of fields without rows.
    """

    lines: IntArray
    numbers: IntArray
    dense: npt.NDArray[np.bool_]
    places: IntArray
    shapes: Sequence[tuple[str | None, tuple[int, ...], bool, torch.dtype]]
    bytes_of: Mapping[str | bool, int]


@lru_cache(256)
def _targets(
    schema: Schema, paths: tuple[Path, ...], nested: bool, names: tuple[str, ...], widths: tuple[int, ...]
) -> _Targets:
    """The targets of some tensors. `names` and `widths` are those of the layouts."""
    forms = {form.path: form for form in schema.forms if form.dtype is not None}
    places = {path: number for number, path in enumerate(forms)}
    lines = np.zeros(len(paths), native.TARGET)
    shapes: list[tuple[str | None, tuple[int, ...], bool, torch.dtype]] = []
    bytes_of: Counter[str | bool] = Counter()
    for line, form in zip(lines, (forms[path] for path in paths), strict=True):
        assert form.dtype is not None
        shape, layout = form.shape, form.layout
        padded = layout is not None and form.kind == "padded" and not nested
        by_rows = padded or (layout is None and schema.root.more_dims is not None)
        if padded:
            before, number = form.ragged_dim - 1, names.index(layout or "")
            shape = (*shape[:before], widths[number], *shape[before:])
            one = torch.empty((1, *shape), dtype=form.dtype, device="meta")
            line["field"], _ = native.described(one.movedim(form.ragged_dim, 1))
            line["padded"], line["field"]["layout"] = 1, number
            mode = trial_of(form.pads[0], form.dtype, False)
            line["field"]["mode"], line["field"]["pad"], line["field"]["pad_high"] = mode
        tokens = layout if not padded else None
        shapes.append((tokens, shape, by_rows, form.dtype))
        bytes_of[tokens or by_rows] += math.prod(shape) * form.dtype.itemsize
    numbers = np.array([places[path] for path in paths], np.int64)
    dense = np.array([forms[path].layout is None for path in paths], np.bool_)
    first = np.arange(len(paths)) * _NUMBERS + np.where(lines["padded"] != 0, _PADDED, _PACKED)
    return _Targets(lines.view(np.int64).reshape(len(paths), _NUMBERS), numbers, dense, first, shapes, bytes_of)


def _targets_of(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> _Targets:
    paths = tuple([form.path for form in forms if form.dtype is not None])
    return _targets(packed.schema, paths, nested, packed.table.names, packed.table.widths)


def shapes_of(
    packed: PackedBatch, forms: Iterable[FieldForm], nested: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of tensors as `decoded` gives them."""
    tokens = {name: (layout.num_tokens,) for name, layout in packed.layouts.items()}
    rows = (packed.num_rows,)
    return [
        ((*(tokens[name] if name is not None else rows if by_rows else ()), *shape), dtype)
        for name, shape, by_rows, dtype in _targets_of(packed, forms, nested).shapes
    ]


def decoded_nbytes(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> int:
    """Bytes that some fields take decoded, without decoding them: tensors, Python objects, and the LAYOUTS entry."""
    forms = list(forms)
    total = _tensors_nbytes(packed, _targets_of(packed, forms, nested))
    total += sum(packed.objects[form.path].decoded_nbytes for form in forms if form.kind == "object")
    if nested:
        total += sum(
            12 * host_spans(layout).starts.size + 16 * (layout.num_rows + 1) for layout in packed.layouts.values()
        )
    return total


def _tensors_nbytes(packed: PackedBatch, targets: _Targets) -> int:
    each = {True: packed.num_rows, False: 1}
    return sum(
        nbytes * (packed.layouts[unit].num_tokens if isinstance(unit, str) else each[unit])
        for unit, nbytes in targets.bytes_of.items()
    )


def pad_table_of(packed: PackedBatch, forms: Iterable[FieldForm]) -> Tensor:
    """`pad_table` of some fields, on the host."""
    forms = [form for form in forms if form.dtype is not None]
    return pad_table(forms, all_row_pads(packed, forms), packed.num_rows, "cpu")


def all_row_pads(packed: PackedBatch, forms: Iterable[FieldForm]) -> dict[Path, Tensor]:
    """`row_pads_of` those of some fields that have any."""
    tensors = [form for form in forms if form.dtype is not None]
    return {form.path: pads for form in tensors if (pads := row_pads_of(packed, form)) is not None}


def row_pads_of(packed: PackedBatch, form: FieldForm) -> Tensor | None:
    """The pads [B] of a field whose pad is PER_ROW, the signs of one whose pad is ANY_ZERO; None for other fields."""
    if form.pads == (ANY_ZERO,):
        return torch.from_numpy(np.array(packed.table.signs(packed.numbers[form.path])))
    pads = packed.table.pads_of_rows(packed.numbers[form.path])
    assert form.dtype is not None
    if pads is None:  # without rows the table holds none
        return torch.zeros(0, dtype=form.dtype, device="cpu") if form.pads == (PER_ROW,) else None
    return from_words(np.array(pads, order="C"), form.dtype)


def decoded(packed: PackedBatch, forms: Sequence[FieldForm], nested: bool) -> dict[Path, Tensor]:
    """Tensors on the host in one pass: padded ones in the form of their fields, others as [T, *F]."""
    targets, table = _targets_of(packed, forms, nested), packed.table
    tensors = [empty_of(shape, dtype) for shape, dtype in shapes_of(packed, forms, nested)]
    lines: IntArray = np.array(targets.lines)
    lines.reshape(-1)[targets.places] = [tensor.data_ptr() for tensor in tensors]
    lines[:, _ENTRY] = table.fields[targets.numbers]
    lines[:, _ROWS] = table.rows
    lines[targets.dense, _ROWS] = table.dense_rows
    held: list[Words] = []
    for place in np.flatnonzero(table.row_pads["count"][targets.numbers]).tolist():
        pads = table.pads_of_rows(int(targets.numbers[place]))
        assert pads is not None
        held.append(np.ascontiguousarray(pads))
        lines[place, _ROW_PADS] = address(held[-1])
    table.decode(native.structs(lines, native.TARGET), _tensors_nbytes(packed, targets))
    return dict(zip((form.path for form in forms), tensors, strict=True))


@dataclass
class DeviceFields:
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
    """The entries of one packed batch on one device, in one format. Fields are decoded together, layouts go to a device
    once. The fields in `ready` are decoded already."""

    def __init__(
        self, packed: PackedBatch, nested: bool, device: torch.device | str | None, ready: DeviceFields | None = None
    ) -> None:
        self.nested = nested
        self._packed = packed
        self._device = device
        self._ready = ready or DeviceFields()
        self._moved: dict[tuple[str, str], RowLayout] = {}
        self._tensors: dict[Path, Tensor] = {}

    def decode(self, forms: Iterable[FieldForm]) -> None:
        """Decodes fields, of which `entry` is then asked one by one."""
        wanted = [form for form in forms if form.dtype is not None and form.path not in self._ready.entries]
        if wanted:
            self._tensors |= decoded(self._packed, wanted, self.nested)

    def entry(self, form: FieldForm) -> Any:
        """An entry of the batch, in its own memory."""
        if form.path in self._ready.entries:
            return self._ready.entries[form.path]
        if form.node is not None:
            return on(rows_only(form.node) if self.nested else form.node, self._device)
        if form.kind == "object":
            return self._packed.objects[form.path].entry(dims_above(self._packed, form.path))
        if form.path not in self._tensors:
            self.decode([form])
        tensor = self._tensors[form.path]
        if form.device == "cpu" and self._device is None and not self.nested and form.kind != "jagged":
            return tensor
        device = torch.device(self._device or form.device or "cpu")
        values = tensor if device.type == "cpu" else tensor.to(device)
        if form.layout is None:
            return values
        if form.kind == "jagged" or (self.nested and form.kind in ("padded", "flat")):
            return jagged(values, self._layout(form.layout, values.device))
        return values

    def widened(self, form: FieldForm, left: int, right: int) -> Tensor:
        """A padded field with `left` and `right` more columns of padding."""
        layout = widened(self._packed.layouts[form.layout or ""], left, right)
        pads, signs = row_pads_of(self._packed, form), None
        if form.pads == (ANY_ZERO,):
            own = self._packed.table.signs(self._packed.numbers[form.path])
            signs = torch.from_numpy(moved_signs(own, layout.width - left - right, left, layout.width))
            pads = torch.zeros(layout.num_rows, dtype=form.dtype, device="cpu")
        values = decoded(self._packed, [form], True)[form.path]
        return to_padded(values, form, layout, None if pads is None else RowPads(pads, signs=signs))

    def pads(self, forms: Iterable[FieldForm]) -> Tensor:
        """The pads of the LAYOUTS entry."""
        if self._ready.pads is not None:
            return self._ready.pads
        return pad_table_of(self._packed, forms).to(self._device or "cpu")

    def tables(self, forms: Iterable[FieldForm]) -> dict[str, Tensor]:
        """The span tables of the LAYOUTS entry for these forms; they share no memory with the packed batch."""
        if self._ready.tables:
            return self._ready.tables
        layouts = {name: self._layout(name, torch.device(self._device or "cpu")) for name in self._packed.layouts}
        return span_tables(
            forms, layouts, all_row_pads(self._packed, [form for form in forms if ANY_ZERO in form.pads])
        )

    def _layout(self, name: str, device: torch.device) -> RowLayout:
        place = name, str(device)
        if place not in self._moved:
            layout = self._packed.layouts[name]
            moved = self._moved[place] = layout_of_table(layout.width, host_spans(layout), device, layout.anchor)
            if device.type == "cpu":
                moved.__dict__["row_offsets"] = layout.row_offsets
            if place in self._ready.offsets:
                moved.__dict__["offsets"] = self._ready.offsets[place]
        return self._moved[place]


def dims_above(packed: PackedBatch, path: Path) -> tuple[int, ...]:
    """The batch dims of the batch or sub-batch that an entry lies in."""
    node = packed.schema.root if len(path) == 1 else packed.forms[path[:-1]].node
    assert node is not None
    return node.batch_size(packed.num_rows)


def on(node: Node, device: torch.device | str | None) -> Node:
    """A node with `device` in place of its own device, if one is given."""
    return node if device is None else replace(node, device=str(device))


# -------------------------------------------------------------------- narrower rows


def trimmed(packed: PackedBatch, forms: Sequence[FieldForm], call: str) -> PackedBatch:
    """The same rows in layouts without the outer columns that have no valid token in any row. Values lie row by row, so
    none of them moves. Raises LayoutError for `forms` in a batch with batch dims behind its rows."""
    nodes = {(): packed.schema.root} | {form.path: form.node for form in forms if form.node is not None}
    for path, node in nodes.items():
        if node.more_dims:
            where = f'sub-batch "{show(path)}"' if path else "batch"
            raise LayoutError(
                f'{call}: widths="trim" in a {where} with batch dims {node.more_dims} behind its rows; expected none, '
                "since widths change. Leave the widths padded, or give the TensorDict batch_size=[rows] before packing."
            )
    layouts: dict[str, RowLayout] = {}
    begins: dict[str, int] = {}
    for name, layout in packed.layouts.items():
        table = host_spans(layout)
        end = int((table.starts + table.counts).max(initial=0))
        begins[name] = int(table.starts.min(initial=end))
        layouts[name] = layout.narrow(begins[name], end)
    signs: dict[int, Words] = {}
    for number, form in enumerate(packed.tensors):
        if form.pads == (ANY_ZERO,):
            name = form.layout or ""
            place = packed.layouts[name].width, -begins[name], layouts[name].width
            signs[number] = moved_signs(packed.table.signs(number), *place)
    shown = packed.table.like(known=layouts, cut=None)
    axes = tuple((name, layouts[name].width, layouts[name].anchor) for name, _, _ in packed.schema.axes)
    table = shown.with_row_pads(signs) if signs else shown
    return replace(packed, table=table, schema=replace(packed.schema, axes=axes))
