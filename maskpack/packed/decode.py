"""Decoding of packed batches to tensors; shapes and sizes of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import Words, empty_of, words
from maskpack.core.index import IntArray, ranges
from maskpack.core.pads import Pads
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.jagged import jagged_on
from maskpack.layout.row_layout import RowLayout, host_spans
from maskpack.nesting.jobs import size_of_word, words_of_one
from maskpack.nesting.nest import rows_only
from maskpack.nesting.schema import FieldForm, Schema, jagged_dim
from maskpack.packed.rows import Rows, Share, TokenBody, indices
from maskpack.packed.table import Frame

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

MAX_BYTES = 64 << 30
"""The most bytes that a batch may take decoded, unless the caller gives another limit."""


_NUMBERS = abi.TARGET_NUMBERS
_ENTRY, _PART = native.places_in(abi.TARGET, "entry", "part")
_PADDED, _PACKED, _PADS, _SHIFT = native.places_in(abi.FIELD, "padded", "packed", "pads", "shift")  # its first member


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
        padded: bool [n], those that are written with what is under their mask.
        bytes_of: bytes of a row of all fields together, of a token of each layout, and of fields without rows.
    """

    lines: IntArray
    dense: npt.NDArray[np.bool_]
    places: IntArray
    padded: npt.NDArray[np.bool_]
    bytes_of: Mapping[str | bool, int]


@lru_cache(256)
def _targets(
    schema: Schema, paths: tuple[Path, ...], nested: bool, names: tuple[str, ...], widths: tuple[int, ...]
) -> _Targets:
    """The targets of some tensors. `names` and `widths` are those of the layouts."""
    forms = {form.path: form for form in schema.forms if form.dtype is not None}
    lines = np.zeros(len(paths), abi.TARGET)
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
        line["field"]["layout"] = number
        bytes_of[by_rows if padded or layout is None else layout] += math.prod(shape) * form.dtype.itemsize
    dense = np.array([forms[path].layout is None for path in paths], np.bool_)
    first = np.arange(len(paths)) * _NUMBERS + np.where(lines["padded"] != 0, _PADDED, _PACKED)
    padded = lines["padded"] != 0
    return _Targets(lines.view(np.int64).reshape(len(paths), _NUMBERS), dense, first, padded, bytes_of)


def _targets_of(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> _Targets:
    paths = tuple([form.path for form in forms if form.dtype is not None])
    widths = tuple([width for width, _ in packed.frames.values()])
    return _targets(packed.schema, paths, nested, tuple(packed.frames), widths)


def shapes_of(
    packed: PackedBatch, forms: Iterable[FieldForm], nested: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of tensors as `decoded` gives them."""
    rows = packed.schema.root.batch_size(packed.num_rows)[:1]
    layouts = packed.layouts
    return [(shape_of(form, layouts, rows, nested), form.dtype) for form in forms if form.dtype is not None]


def decoded_nbytes(packed: PackedBatch, forms: Iterable[FieldForm], nested: bool) -> int:
    """Bytes that some fields take decoded, without decoding them: tensors, Python objects, and the LAYOUTS entry."""
    forms = list(forms)
    total = _tensors_nbytes(packed, _targets_of(packed, forms, nested))
    total += sum(packed.objects[form.path].decoded_nbytes for form in forms if form.kind == "object")
    if nested:
        masks = sum(-(-width // 8) for width, _ in packed.frames.values()) + 8 * (2 + len(packed.layouts))
        total += packed.num_rows * (masks + sum(_record_size(packed, form) for form in forms if form.kind == "padded"))
    return total


def _tensors_nbytes(packed: PackedBatch, targets: _Targets) -> int:
    each = {True: packed.num_rows, False: 1}
    return sum(
        nbytes * (packed.layouts[unit].num_tokens if isinstance(unit, str) else each[unit])
        for unit, nbytes in targets.bytes_of.items()
    )


def _record_size(packed: PackedBatch, form: FieldForm) -> int:
    """Bytes of what is under the mask of a row of a padded field."""
    assert form.dtype is not None
    assert form.layout is not None
    plain, parts = 1 + form.dtype.itemsize, packed.rows.columns_of(form.path).parts
    with_signs = any(body.table.pads["size"][body.numbers[form.path]] > plain for body in parts)
    return plain + (-(-packed.frames[form.layout][0] // 8) if with_signs else 0)


def pads_of(packed: PackedBatch, form: FieldForm) -> Pads:
    """What is under the mask of a padded field, as wide as its rows are now."""
    assert form.dtype is not None
    assert form.layout is not None
    size, rows, own = form.dtype.itemsize, packed.rows, packed.rows.columns_of(form.path)
    held = [
        body.table.pads_of(body.numbers[form.path], size).moved(
            rows.shift(form.layout, body.table), rows.frames[form.layout][0]
        )
        for body in own.parts
    ]
    if len(held) == 1 and len(held[0].records) == 1:
        return held[0]
    parts = [(held[share.source].take(share.rows), indices(share.rows).size) for share in own.rows.shares]
    found = Pads.cat(parts or [(Pads.of(0, form.dtype), 0)])
    return found if own.rows.order is None else found.take(own.rows.order)


def decoded(packed: PackedBatch, forms: Sequence[FieldForm], nested: bool) -> dict[Path, Tensor]:
    """Tensors on the host in one pass: padded ones in the form of their fields, others as [T, *F]. Each row is read
    where it lies."""
    targets = _targets_of(packed, forms, nested)
    tensors = [empty_of(shape, dtype) for shape, dtype in shapes_of(packed, forms, nested)]
    lines: IntArray = np.array(targets.lines)
    lines.reshape(-1)[targets.places] = [tensor.data_ptr() for tensor in tensors]
    held: list[Any] = []
    pads: list[native.Structs] = []
    is_padded = bool(targets.padded.any())
    numbers = {form.path: at for at, form in enumerate(forms)}
    blocks: list[IntArray] = []
    given: list[tuple[int, ...]] = []
    for columns in packed.rows.columns:
        chosen = [path for path in columns.paths if path in numbers]
        places = [numbers[path] for path in chosen]
        shares = (columns.rows.shares or _NO_ROWS[: len(columns.parts)]) if chosen else []
        whole = len(shares) == 1 and places == [*range(len(forms))]
        for share in shares:
            body = columns.parts[share.source]
            taken = None if share.is_all(body.num_rows) else indices(share.rows)
            to = None if len(shares) == 1 else indices(share.places)
            if isinstance(body, TokenBody):
                bounds = packed.layouts[forms[places[0]].layout or ""].row_offsets
                at = slice(None) if to is None else ranges(bounds[to], bounds[to + 1] - bounds[to])
                for place, own in zip(places, _words_of_spans(body, chosen, share.rows), strict=True):
                    words(tensors[place]).numpy()[at] = own
                continue
            table, block = body.table, lines if whole else lines[places]
            fields = [body.numbers[path] for path in chosen]
            block[:, _ENTRY] = table.fields[fields]
            if is_padded:
                pads.append(table.pads[fields])
                if table.frames != packed.frames:
                    for at in [at for at, place in enumerate(places) if targets.padded[place]]:
                        block[at, _SHIFT] = packed.rows.shift(forms[places[at]].layout or "", table)
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
        if is_padded:
            _write_pads(block, np.concatenate(pads).view(np.int64).reshape(-1, 3), parts["table"]["body"])
        block = block[np.argsort(block[:, _ENTRY], kind="stable")]  # a field comes after those that it is near to
        all_targets = native.structs(block.reshape(-1), abi.TARGET)
        native.decode(all_targets, parts, packed.rows.layout_rows, packed.num_rows, _tensors_nbytes(packed, targets))
    return dict(zip((form.path for form in forms), tensors, strict=True))


_NO_ROWS = [Share(0, slice(0, 0), slice(0, 0))]
"""Of the only body without rows, which may have fields whose rows are no batch dim."""


def _words_of_spans(body: TokenBody, paths: Sequence[Path], rows: IntArray | slice) -> list[Words]:
    """The words [T, ...] of some fields in some rows of a body, in the order given."""
    spans = body.spans.take(rows)
    own, place = np.unique(spans.row, return_inverse=True)
    part = body.batch.take(own)
    index = ranges(part.layouts[spans.layout].row_offsets[place] + spans.start, spans.count)
    whole = decoded(part, [part.forms[path] for path in paths], True)
    return [words(whole[path]).numpy()[index] for path in paths]


def _write_pads(block: IntArray, pads: IntArray, bodies: IntArray) -> None:
    """Writes where the records of fields are, ARRAY [n] as int64, to their TARGETs."""
    block[:, _PADS] = bodies[block[:, _PART]] + pads[:, 0]
    block[:, _PADS + 1] = pads[:, 1]
    block[:, _PADS + 2] = np.where(pads[:, 2] > 1, pads[:, 1], 0)


def entries_of(
    packed: PackedBatch,
    forms: Sequence[FieldForm],
    nested: bool,
    device: torch.device | str | None,
    ready: Mapping[Path, Tensor] | None = None,
) -> list[tuple[Path, Any]]:
    """Some entries of a batch, each in its own memory, on one device or those of their fields. Tensors are decoded
    together, but those that are `ready`, decoded on a device, jagged if the batch is nested."""
    found: dict[Path, Any] = dict(ready or {})
    wanted = [form for form in forms if form.dtype is not None and form.path not in found]
    jagged: list[tuple[Path, str, int]] = []
    for path, tensor in (decoded(packed, wanted, nested) if wanted else {}).items():
        form, home = packed.forms[path], tensor.device
        if device is not None or form.device != "cpu":
            home = torch.device(device or form.device or "cpu")
            tensor = tensor if home.type == "cpu" else tensor.to(home)
        found[path] = tensor
        if form.layout is not None and (nested or form.kind == "jagged"):
            jagged.append((path, form.layout, jagged_dim(form)))
    found |= jagged_on(packed.layouts, jagged, found, {})
    for form in forms:
        if form.node is not None:
            found[form.path] = on(rows_only(form.node) if nested else form.node, device)
        elif form.kind == "object":
            found[form.path] = packed.objects[form.path].entry(dims_above(packed, form.path))
    return [(form.path, found[form.path]) for form in forms]


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
    frames: dict[str, Frame] = {}
    for name, layout in packed.layouts.items():
        table = host_spans(layout)
        end = int((table.starts + table.counts).max(initial=0))
        begin = int(table.starts.min(initial=end))
        layouts[name] = layout.narrow(begin, end)
        frames[name] = end - begin, packed.frames[name][1] - begin
    axes = tuple((name, layouts[name].width, layouts[name].anchor) for name, _, _ in packed.schema.axes)
    rows = Rows(packed.rows.columns, frames)
    rows.__dict__["layouts"] = layouts
    return replace(packed, rows=rows, schema=replace(packed.schema, axes=axes))
