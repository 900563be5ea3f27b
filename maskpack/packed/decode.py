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

from maskpack.core import abi, native
from maskpack.core.bits import Words, address, empty_of, from_words, word_dtype, words
from maskpack.core.index import IntArray, ranges
from maskpack.core.pads import ANY_ZERO, PER_ROW, trial_of
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.jagged import jagged_all
from maskpack.layout.row_layout import RowLayout, host_spans, min_length, widened
from maskpack.nesting.checks import to_padded
from maskpack.nesting.nest import rows_only
from maskpack.nesting.schema import FieldForm, RowPads, Schema, pad_table, span_table
from maskpack.nesting.signs import moved_signs
from maskpack.packed.columns import Body, Shown
from maskpack.packed.table import size_of_word, words_of_one

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

MAX_BYTES = 64 << 30
"""The most bytes that a batch may take decoded, unless the caller gives another limit."""


_NUMBERS, _PADDED, _PACKED = abi.TARGET.itemsize // 8, 0, 1
_ENTRY, _PART = _NUMBERS - 2, _NUMBERS - 1
_ROW_PADS = abi.FIELD.fields["row_pads"][1] // 8  # type: ignore[index]


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
        dense: bool [n], those without a layout.
        places: int64 [n], where their addresses are written among the numbers of the lines.
        row_pads: the numbers of the tensors that have pads of rows.
        shapes: the layout whose tokens are the first dim, or None; the other dims, those behind B where a field has
            rows; whether it has; and the dtype.
        bytes_of: bytes of a row of all fields together, of a token of each layout, and of fields without rows.
    """

    lines: IntArray
    dense: npt.NDArray[np.bool_]
    places: IntArray
    row_pads: Sequence[int]
    shapes: Sequence[tuple[str | None, tuple[int, ...], bool, torch.dtype]]
    bytes_of: Mapping[str | bool, int]


@lru_cache(256)
def _targets(
    schema: Schema, paths: tuple[Path, ...], nested: bool, names: tuple[str, ...], widths: tuple[int, ...]
) -> _Targets:
    """The targets of some tensors. `names` and `widths` are those of the layouts."""
    forms = {form.path: form for form in schema.forms if form.dtype is not None}
    lines = np.zeros(len(paths), abi.TARGET)
    shapes: list[tuple[str | None, tuple[int, ...], bool, torch.dtype]] = []
    bytes_of: Counter[str | bool] = Counter()
    for line, form in zip(lines, (forms[path] for path in paths), strict=True):
        assert form.dtype is not None
        shape, layout = form.shape, form.layout
        padded = layout is not None and form.kind == "padded" and not nested
        by_rows = padded or (layout is None and schema.root.more_dims is not None)
        number = -1 if layout is None else names.index(layout)
        line["field"]["items"], line["field"]["size"] = words_of_one(form), size_of_word(form)
        if padded:
            before = form.ragged_dim - 1
            shape = (*shape[:before], widths[number], *shape[before:])
            one = torch.empty((1, *shape), dtype=form.dtype, device="meta")
            line["field"], _ = native.described(one.movedim(form.ragged_dim, 1))
            line["padded"] = 1
            line["field"]["mode"], line["field"]["pad"] = trial_of(form.pads[0], form.dtype, False)
        line["field"]["layout"] = number
        tokens = layout if not padded else None
        shapes.append((tokens, shape, by_rows, form.dtype))
        bytes_of[tokens or by_rows] += math.prod(shape) * form.dtype.itemsize
    with_pads = [at for at, path in enumerate(paths) if lines["padded"][at] and has_row_pads(forms[path])]
    dense = np.array([forms[path].layout is None for path in paths], np.bool_)
    first = np.arange(len(paths)) * _NUMBERS + np.where(lines["padded"] != 0, _PADDED, _PACKED)
    return _Targets(lines.view(np.int64).reshape(len(paths), _NUMBERS), dense, first, with_pads, shapes, bytes_of)


def _targets_of(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> _Targets:
    paths = tuple([form.path for form in forms if form.dtype is not None])
    widths = tuple([width for width, _ in packed.frames.values()])
    return _targets(packed.schema, paths, nested, tuple(packed.frames), widths)


def shapes_of(
    packed: PackedBatch, forms: Iterable[FieldForm], nested: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of tensors as `decoded` gives them."""
    return _shapes(packed, _targets_of(packed, forms, nested))


def _shapes(packed: PackedBatch, targets: _Targets) -> list[tuple[tuple[int, ...], torch.dtype]]:
    tokens = {name: (layout.num_tokens,) for name, layout in packed.layouts.items()}
    rows = (packed.num_rows,)
    return [
        ((*(tokens[name] if name is not None else rows if by_rows else ()), *shape), dtype)
        for name, shape, by_rows, dtype in targets.shapes
    ]


def decoded_nbytes(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> int:
    """Bytes that some fields take decoded, without decoding them: tensors, Python objects, and the LAYOUTS entry."""
    forms = list(forms)
    total = _tensors_nbytes(packed, _targets_of(packed, forms, nested))
    total += sum(packed.objects[form.path].decoded_nbytes for form in forms if form.kind == "object")
    if nested:
        lines = sum(max(host_spans(layout).starts.size, layout.num_rows) for layout in packed.layouts.values())
        total += abi.LINE * lines + 8 * (packed.num_rows + 1) * (1 + len(packed.layouts))
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


def has_row_pads(form: FieldForm) -> bool:
    """Whether each row of a field has a pad, or signs, of its own."""
    return form.pads in ((PER_ROW,), (ANY_ZERO,))


def row_pads_of(packed: PackedBatch, form: FieldForm) -> Tensor | None:
    """The pads [B] of a field whose pad is PER_ROW, the signs of one whose pad is ANY_ZERO; None for other fields."""
    if not has_row_pads(form):
        return None
    assert form.dtype is not None
    return from_words(row_pad_words(packed, form), torch.uint8 if form.pads == (ANY_ZERO,) else form.dtype)


def row_pad_words(packed: PackedBatch, form: FieldForm) -> Words:
    """The words [B] or [B, 2] of the pads of a field whose pad is PER_ROW, the signs [B, n] of one whose pad is
    ANY_ZERO, in memory of their own."""
    picked = packed.picked
    if form.path in picked.row_pads:
        return np.array(picked.row_pads[form.path], order="C")
    own = next(columns for columns in picked.columns if form.path in columns.paths)
    shares, order = own.rows.shares()
    signs = form.pads == (ANY_ZERO,)
    parts: list[Words] = []
    for share in shares:
        body = own.parts[share.source]
        table, number = body.table, body.numbers[form.path]
        held = table.signs(number) if signs else table.pads_of_rows(number)
        assert held is not None
        parts.append(held[share.rows])
    if parts:
        held = np.concatenate(parts)
        return held if order is None else held[order]
    assert form.dtype is not None
    if signs:
        return np.zeros((0, -(-packed.frames[form.layout or ""][0] // 8)), np.uint8)
    size = form.dtype.itemsize
    return np.zeros((0, 2) if size == 16 else 0, word_dtype(min(size, 8)))


def decoded(packed: PackedBatch, forms: Sequence[FieldForm], nested: bool) -> dict[Path, Tensor]:
    """Tensors on the host in one pass: padded ones in the form of their fields, others as [T, *F]. Each row is read
    where it lies."""
    targets = _targets_of(packed, forms, nested)
    tensors = [empty_of(shape, dtype) for shape, dtype in _shapes(packed, targets)]
    lines: IntArray = np.array(targets.lines)
    lines.reshape(-1)[targets.places] = [tensor.data_ptr() for tensor in tensors]
    held: list[Any] = [row_pad_words(packed, forms[at]) for at in targets.row_pads]
    for at, pads in zip(targets.row_pads, held, strict=True):
        lines[at, _ROW_PADS] = address(pads)
    numbers = {form.path: at for at, form in enumerate(forms)}
    blocks: list[IntArray] = []
    given: list[tuple[int, ...]] = []
    for columns in packed.picked.columns:
        chosen = [path for path in columns.paths if path in numbers]
        places = [numbers[path] for path in chosen]
        bodies = columns.taken() if chosen else ()
        whole = len(bodies) == 1 and places == [*range(len(forms))]
        for body, taken, to in bodies:
            if not isinstance(body, Body):  # spans of tokens
                bounds = packed.layouts[forms[places[0]].layout or ""].row_offsets
                at = slice(None) if to is None else ranges(bounds[to], bounds[to + 1] - bounds[to])
                for place, own in zip(places, body.words_of(chosen, taken), strict=True):
                    words(tensors[place]).numpy()[at] = own
                continue
            table, block = body.table, lines if whole else lines[places]
            block[:, _ENTRY] = table.fields[[body.numbers[path] for path in chosen]]
            block[:, _PART] = len(given)
            given.append(table.given(table.rows if taken is None else taken.size, taken, to))
            if table.dense_rows != table.rows:  # the rows are no batch dim
                block[targets.dense[places], _PART] += 1
                given.append(table.given(table.dense_rows))
            held += [taken, to]
            blocks.append(block)
    if blocks:
        parts = native.structs(np.array(given, np.int64).reshape(-1), abi.GIVEN)
        block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        block = block[np.argsort(block[:, _ENTRY], kind="stable")]  # a field comes after those that it is near to
        all_targets = native.structs(block.reshape(-1), abi.TARGET)
        native.decode(all_targets, parts, packed.layout_rows, packed.num_rows, _tensors_nbytes(packed, targets))
    return dict(zip((form.path for form in forms), tensors, strict=True))


def field_words(packed: PackedBatch, form: FieldForm) -> Words:
    """The packed words of a field, flat."""
    return words(decoded(packed, [form], True)[form.path]).numpy().reshape(-1)


@dataclass
class DeviceFields:
    """Fields that a kernel has decoded on a device.

    Attributes:
        entries: tensors by path, jagged if the batch is nested.
        offsets: the offsets of jagged tensors, by layout and device.
        spans: the lines of LAYOUTS; None if the kernel did not write them.
        pads: the pads of LAYOUTS; None if the kernel did not write them.
    """

    entries: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    offsets: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])
    spans: Tensor | None = None
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
        self._tensors: dict[Path, Tensor] = {}

    def decode(self, forms: Iterable[FieldForm]) -> None:
        """Decodes fields, of which `entry` is then asked one by one."""
        wanted = [form for form in forms if form.dtype is not None and form.path not in self._ready.entries]
        jagged: dict[tuple[str, torch.device], list[Path]] = {}
        for path, tensor in (decoded(self._packed, wanted, self.nested) if wanted else {}).items():
            form, device = self._packed.forms[path], tensor.device
            if self._device is not None or form.device != "cpu":
                device = torch.device(self._device or form.device or "cpu")
                tensor = tensor if device.type == "cpu" else tensor.to(device)
            self._tensors[path] = tensor
            if form.layout is not None and (self.nested or form.kind == "jagged"):
                jagged.setdefault((form.layout, tensor.device), []).append(path)
        for (name, device), paths in jagged.items():
            layout, offsets = self._packed.layouts[name], self._ready.offsets.get((name, str(device)))
            if offsets is None:
                offsets = torch.from_numpy(np.array(layout.row_offsets)).to(device, non_blocking=True)
            values = [self._tensors[path] for path in paths]
            made = jagged_all(values, offsets, min_length(layout), layout.max_length)
            self._tensors.update(zip(paths, made, strict=True))

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
        return self._tensors[form.path]

    def widened(self, form: FieldForm, left: int, right: int) -> Tensor:
        """A padded field with `left` and `right` more columns of padding."""
        layout = widened(self._packed.layouts[form.layout or ""], left, right)
        pads, signs = row_pads_of(self._packed, form), None
        if form.pads == (ANY_ZERO,):
            own = row_pad_words(self._packed, form)
            signs = torch.from_numpy(moved_signs(own, layout.width - left - right, left, layout.width))
            pads = torch.zeros(layout.num_rows, dtype=form.dtype, device="cpu")
        values = decoded(self._packed, [form], True)[form.path]
        return to_padded(values, form, layout, None if pads is None else RowPads(pads, signs=signs))

    def pads(self, forms: Iterable[FieldForm]) -> Tensor:
        """The pads of the LAYOUTS entry."""
        if self._ready.pads is not None:
            return self._ready.pads
        return pad_table_of(self._packed, forms).to(self._device or "cpu")

    def tables(self, forms: Iterable[FieldForm]) -> Tensor | None:
        """The lines of the LAYOUTS entry for these forms; they share no memory with the packed batch."""
        if self._ready.spans is not None:
            return self._ready.spans
        packed, forms = self._packed, list(forms)
        signs = all_row_pads(packed, [form for form in forms if ANY_ZERO in form.pads])
        return span_table(packed.schema, forms, packed.layouts, signs, torch.device(self._device or "cpu"))


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
    signs: dict[Path, Words] = {}
    for form in packed.tensors:
        if form.pads == (ANY_ZERO,):
            name = form.layout or ""
            place = packed.layouts[name].width, -begins[name], layouts[name].width
            signs[form.path] = moved_signs(row_pad_words(packed, form), *place)
    axes = tuple((name, layouts[name].width, layouts[name].anchor) for name, _, _ in packed.schema.axes)
    rows = packed.picked.shown_as(Shown(layouts, signs, packed))
    return replace(packed, rows=rows, schema=replace(packed.schema, axes=axes))
