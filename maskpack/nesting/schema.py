"""The schema of a batch, which is the form of each entry, and how a nested batch stores it.

A nested batch has one more entry than the padded one, LAYOUTS. It has one part, which contains

- a jagged span table for each layout, with one row for each row of the batch, so that indexing, chunk, split and cat
  apply to it. A row is lines of three int32 (span_table.py) stored as bytes; behind its spans are the signs of fields
  with ANY_ZERO pads that have a -0.0 in this row. Bytes survive the casts of `float()` and
  `to(dtype)`, which apply to all entries; checksums detect other arithmetic.
- the pads of all padded fields in each row: one byte for each field, which is 1 for EDGE and 2 for ANY_ZERO with
  a -0.0 in this row, then the bytes of the pad.
  Batches with different pads have the same entries, so that torch.cat can join them.
- the schema.

The part is named after the fields: `update` with a batch of other fields adds a part, and one of the same fields
replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.bits import Words, word_dtype, words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path, show
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, Pad, PadValue, pad_words, text_of
from maskpack.core.tensors import need_batch
from maskpack.core.tree import Node, entry_at, fields_of, has, is_sub_batch, unflatten
from maskpack.errors import LayoutError
from maskpack.layout.jagged import is_regular, jagged_from, offsets_of, to_host, values_of
from maskpack.layout.row_layout import RowLayout, host_spans
from maskpack.layout.span_table import lines_of, lines_with, lines_without, table_of_lines

LAYOUTS = "_maskpack"
"""The key of the entry that `unnest_batch_by_mask` needs. Name it in `select` to keep it."""

_RESTORE_FIRST = (
    "Restore both first, then update the padded batch: unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))."
)
_SIGNS = 2
"""The flag, in the pad table, of a row with signs."""
INTACT = "Restore from the batch that nest_batch_by_mask returned; indexing, chunk, cat and casts are supported."


@dataclass(frozen=True)
class FieldForm:
    """The form of an entry of the padded batch.

    Attributes:
        path: the path of the entry.
        kind: `padded` [B, S, *F] under a layout, `flat` [T, *F] under a layout, `jagged` on its own layout, `dense` (a
            tensor that stays as it is), `object` (not a tensor) or `node` (a sub-TensorDict).
        layout: the name of the layout of the first three kinds.
        pads: the candidate pads before verification, the one pad after it.
        ragged_dim: the dim of the width of a padded field.
        dtype: the dtype of the field.
        node: batch dims and device of a sub-TensorDict.
        device, shape: of a packed field, the device it came from and the shape of an element, F; else None and ().
        hints: encodings to try first.
        reason: why a tensor stays padded; None if the registry says so.
        axis: the layout that a `dense` field would have if it had no non-pad values under its mask.
    """

    path: Path
    kind: Literal["padded", "flat", "jagged", "dense", "object", "node"]
    layout: str | None = None
    pads: tuple[PadValue, ...] = field(default=(), compare=False)
    ragged_dim: int = 1
    dtype: torch.dtype | None = None
    node: Node | None = None
    device: str | None = None
    shape: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()
    reason: str | None = None
    axis: str | None = None
    pads_by_bits: str = field(init=False)
    """`pads` for comparisons of forms, by their bits: 0.0 differs from -0.0, and NaN equals NaN of the same bits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pads_by_bits", text_of(self.pads))


def name_of_jagged(path: Path) -> str:
    """The name of the layout that jagged fields share, after the first of them."""
    return f"{show(path)} (jagged)"


@dataclass(frozen=True)
class Schema:
    """The root of a batch, the forms of its entries in key order, and the name, width and anchor of each axis."""

    root: Node
    forms: tuple[FieldForm, ...]
    axes: tuple[tuple[str, int, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.root, self.forms, self.axes))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (self.root, self.forms, self.axes)


@dataclass(frozen=True)
class RowPads:
    """The pad of a field in each row.

    Attributes:
        pads: [B], in the dtype of the field when it was nested.
        edge: bool [B], rows whose pad is EDGE instead; None if there are none.
        signs: which zeros are negative (signs.py); None if the pad is ANY_ZERO in no row.
    """

    pads: Tensor
    edge: Tensor | None = None
    signs: Tensor | None = None


def write_layouts(
    schema: Schema, tables: Mapping[str, Tensor], pads: Tensor, rows: int, device: str | None
) -> TensorDict:
    """The LAYOUTS entry of a batch on `device`, from the span table of each layout and the result of `pad_table`."""
    batch = schema.root.batch_size(rows)[:1]
    here = Node(() if batch else None, device)
    stored: Any = NonTensorData(schema, batch_size=batch, device=device)
    part = _part_of(tuple([form.path for form in schema.forms]))
    entries: list[tuple[Path, Any]] = [((part,), here), ((part, "schema"), stored), ((part, "spans"), here)]
    entries += [((part, "spans", name), tables[name]) for name, _, _ in schema.axes]
    entries.append(((part, "pads"), pads))
    return unflatten(here, entries, rows)


@lru_cache(256)
def _part_of(paths: tuple[Path, ...]) -> str:
    """The name of the part of these fields."""
    return sha256(repr(sorted(paths)).encode()).hexdigest()[:16]


def layouts_entry(
    schema: Schema, layouts: Mapping[str, RowLayout], row_pads: Mapping[Path, Tensor], rows: int
) -> TensorDict:
    """The LAYOUTS entry of a batch, from its layouts and pads."""
    home = next((layout.device for layout in layouts.values()), torch.device(schema.root.device or "cpu"))
    pads = pad_table(schema.forms, row_pads, rows, home)
    return write_layouts(schema, span_tables(schema.forms, layouts, row_pads), pads, rows, schema.root.device)


def copies_of(arrays: Sequence[Words], device: torch.device) -> list[Tensor]:
    """Arrays as tensors of their own on a device, with one copy from pinned memory to a GPU."""
    if device.type == "cpu":
        whole = [torch.from_numpy(np.array(array, order="C")) for array in arrays]
        # an empty array may have any strides
        return [part if part.numel() else torch.empty(part.shape, dtype=part.dtype, device=device) for part in whole]
    ends = cumulated(np.array([-(-array.nbytes // 8) * 8 for array in arrays])).tolist()
    line = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    own = line.numpy()
    for array, begin in zip(arrays, ends[:-1], strict=True):
        own[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = line.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, begin in zip(arrays, ends[:-1], strict=True)
    ]


def lines_of_layouts(
    forms: Iterable[FieldForm], layouts: Mapping[str, RowLayout], row_pads: Mapping[Path, Tensor]
) -> dict[str, tuple[npt.NDArray[np.int32], IntArray]]:
    """The lines of each layout, and the first line of each row."""
    lines = {name: lines_of(host_spans(layout), layout.width) for name, layout in layouts.items()}
    for name, (own, splits) in lines.items():
        signs = [row_pads[form.path].numpy() for form in _signed(forms, name)]
        lines[name] = lines_with(own, splits, layouts[name].width, signs) if signs else (own, splits)
    return lines


def _signed(forms: Iterable[FieldForm], layout: str) -> list[FieldForm]:
    """The fields with ANY_ZERO pads under a layout."""
    return [form for form in forms if ANY_ZERO in form.pads and form.kind == "padded" and form.layout == layout]


def pad_table(
    forms: Iterable[FieldForm], row_pads: Mapping[Path, Tensor], rows: int, device: torch.device | str
) -> Tensor:
    """The pads of all padded fields, uint8 [B, K] on `device`. `row_pads` are the pads [B] of PER_ROW fields, and
    the signs of ANY_ZERO fields."""
    line = _pad_line(forms := tuple(forms))
    table = copies_of([np.broadcast_to(line, (rows, line.size))], torch.device(device))[0]
    places = _pad_places(forms) if row_pads else {}
    for path in row_pads.keys() & places.keys():
        begin, end = places[path].start + 1, places[path].stop
        if row_pads[path].dim() == 2:
            table[:, begin - 1] = _SIGNS * row_pads[path].any(1).to(table.device)
            continue
        bits = words(row_pads[path]).to(table.device).clone(memory_format=torch.contiguous_format)
        table[:, begin:end] = bits.view(torch.uint8).view(rows, end - begin)
    return table


@lru_cache(256)
def _pad_line(forms: tuple[FieldForm, ...]) -> Words:
    """A row of the pad table."""
    padded = [form for form in forms if form.kind == "padded" and form.dtype is not None]
    return np.frombuffer(b"".join([_pad_bytes(form.pads[0], form.dtype) for form in padded]), np.uint8)


def _pad_bytes(pad: PadValue, dtype: torch.dtype | None) -> bytes:
    assert dtype is not None
    bits = pad_words(0 if isinstance(pad, Pad) else pad, dtype)
    assert bits is not None
    return bytes([pad is EDGE]) + np.array(bits, word_dtype(dtype.itemsize)).tobytes()


def _pad_places(forms: Iterable[FieldForm]) -> dict[Path, slice]:
    """The columns of each field in the pad table."""
    places: dict[Path, slice] = {}
    begin = 0
    for form in forms:
        if form.kind == "padded" and form.dtype is not None:
            places[form.path] = slice(begin, begin + 1 + form.dtype.itemsize)
            begin = places[form.path].stop
    return places


def span_tables(
    forms: Iterable[FieldForm], layouts: Mapping[str, RowLayout], row_pads: Mapping[Path, Tensor]
) -> dict[str, Tensor]:
    """The span table of each layout, on its device."""
    lines = lines_of_layouts(forms, layouts, row_pads)
    tables: dict[str, Tensor] = {}
    for device in {layout.device for layout in layouts.values()}:
        names = [name for name, layout in layouts.items() if layout.device == device]
        sent = copies_of([array for name in names for array in lines[name]], device)
        for name, values, offsets in zip(names, sent[::2], sent[1::2], strict=True):
            tables[name] = jagged_from(values.view(torch.uint8), offsets, 0, most_lines(lines[name][1]))
    return tables


def most_lines(splits: IntArray) -> int:
    """The largest number of lines of a row."""
    return int((splits[1:] - splits[:-1]).max(initial=0))


def read_pads(batch: TensorDictBase, forms: Mapping[Path, FieldForm], path: Path, call: str) -> RowPads | None:
    """The pads of a field whose pad is PER_ROW or ANY_ZERO, or differs in its kind from row to row; else None. `forms`
    come from `read_layouts`. One synchronisation on CUDA for ANY_ZERO."""
    form = forms.get(path)
    if form is None or form.dtype is None or not (PER_ROW in form.pads or ANY_ZERO in form.pads):
        return None
    columns: list[Tensor] = []
    signs: list[Tensor] = []
    for part, schema in _parts(batch, call).items():
        if any(other.path == path and other.pads_by_bits == form.pads_by_bits for other in schema.forms):
            columns.append(_columns_of(batch, part, schema, path, call))
            if ANY_ZERO in form.pads:
                table: Any = entry_at(batch, (LAYOUTS, part, "spans", form.layout or ""))
                numbers, splits = to_host([_numbers_of(table), offsets_of(table)])
                own = _apart(batch, part, schema, form.layout or "", numbers, splits, call)[2]
                signs.append(torch.from_numpy(own[path]))
    column = columns[0]
    if not all(torch.equal(one[0], other) for one in (columns, signs) for other in one[1:]):
        raise _several_pads(form, form, call)
    pads = column[:, 1:].clone(memory_format=torch.contiguous_format).view(form.dtype).view(-1)
    return RowPads(pads, column[:, 0] == 1 if EDGE in form.pads else None, signs[0] if signs else None)


def _columns_of(batch: TensorDictBase, part: str, schema: Schema, path: Path, call: str) -> Tensor:
    """The columns of a field in the pad table of a part."""
    table = entry_at(batch, (LAYOUTS, part, "pads"))
    place = _pad_places(schema.forms)[path]
    if not isinstance(table, Tensor) or table.dim() != 2 or table.shape[1] < place.stop:
        raise LayoutError(f'{call}: the row pads of field "{show(path)}" are missing. {INTACT}')
    return table[:, place].to(torch.uint8)


def _apart(
    batch: TensorDictBase, part: str, schema: Schema, name: str, numbers: IntArray, splits: IntArray, call: str
) -> tuple[IntArray, IntArray, dict[Path, Words]]:
    """The lines of the spans of a layout, the first line of each row, and the signs of fields with ANY_ZERO pads."""
    signed, lines = _signed(schema.forms, name), numbers.reshape(-1, 3)
    if not signed:
        return lines, splits, {}
    width = next(width for axis, width, _ in schema.axes if axis == name)
    flags = [_columns_of(batch, part, schema, form.path, call)[:, 0].cpu().numpy() == _SIGNS for form in signed]
    found = lines_without(lines, splits, width, flags)
    if found is None:
        raise _changed(name, call)
    return found[0], found[1], dict(zip((form.path for form in signed), found[2], strict=True))


def read_layouts(batch: TensorDictBase, call: str) -> tuple[Schema, dict[str, RowLayout]]:
    """The schema and the layouts of a nested batch, checked against its rows. One synchronisation on CUDA.

    Raises LayoutError if an operation on the batch made them invalid.
    """
    need_batch(batch, call)
    if not has(batch, LAYOUTS):
        raise LayoutError(
            f'{call}: the batch has no entry "{LAYOUTS}", so it was not nested by nest_batch_by_mask, or select() '
            f'dropped it. Nest the batch first, or select the entry too: batch.select("responses", "_maskpack").'
        )
    parts = _parts(batch, call)
    schema = _merged(list(parts.values()), call)
    tables: dict[tuple[str, str], Tensor] = {}
    for part, name in [(part, name) for part, stored in parts.items() for name, _, _ in stored.axes]:
        table = entry_at(batch, (LAYOUTS, part, "spans", name))
        if not isinstance(table, Tensor) or not table.is_nested:
            raise LayoutError(
                f'{call}: the span table of layout "{name}" is no longer a jagged tensor; a single row was taken by an '
                "integer index, or the entry was replaced. Take one row with a list: "
                "maskpack.nesting.take(batch, [i])."
            )
        tables[part, name] = table
    sizes = {(part, name): (width, anchor) for part, stored in parts.items() for name, width, anchor in stored.axes}
    lines = [_numbers_of(table) for table in tables.values()]
    first = _first_fields(batch, schema, {name for _, name in tables})
    read = to_host([*lines, *[offsets_of(value) for value in (*tables.values(), *first.values())]])
    layouts: dict[str, RowLayout] = {}
    for (key, line), numbers, splits in zip(zip(tables, lines, strict=True), read, read[len(lines) :], strict=False):
        own, ends, _ = _apart(batch, key[0], parts[key[0]], key[1], numbers, splits, call)
        layout = _layout(own, ends, sizes[key], line.device, call, key[1])
        known = layouts.setdefault(key[1], layout)
        if known is not layout and known != layout:
            raise LayoutError(
                f'{call}: layout "{key[1]}" of another batch, with other rows or widths, replaced the layout of '
                f"this one, as update() does; expected fields of the same rows. {_RESTORE_FIRST}"
            )
    for (name, value), offsets in zip(first.items(), read[2 * len(tables) :], strict=True):
        if np.array_equal(offsets, layouts[name].row_offsets):
            layouts[name].__dict__["offsets"] = offsets_of(value)  # so that arithmetic between old and new fields works
    return schema, layouts


def _parts(batch: TensorDictBase, call: str) -> dict[str, Schema]:
    """The schemas of a nested batch by the names of their parts: one, and another one for each `update` with a nested
    batch of other fields."""
    carried = entry_at(batch, (LAYOUTS,))
    names = [str(name) for name, _ in fields_of(carried).items()] if is_sub_batch(carried) else list[str]()
    known = [any(entry_at(batch, (LAYOUTS, name, key)) is not None for key in ("schema", "spans")) for name in names]
    if not names or not all(known):
        raise LayoutError(
            f'{call}: the entry "{LAYOUTS}" was not written by nest_batch_by_mask, which reserves this name. '
            "Rename the field."
        )
    parts: dict[str, Schema] = {}
    for name in names:
        schema = _schema_of(entry_at(batch, (LAYOUTS, name, "schema")))
        if schema is None:
            raise LayoutError(
                f"{call}: the batch was joined from batches of different widths or fields; expected one schema. "
                "Pad the batches to one width and nest them again, or restore each part before torch.cat."
            )
        parts[name] = schema
    return parts


def _merged(schemas: Sequence[Schema], call: str) -> Schema:
    """One schema of all fields, with the root and sub-batches of the first, which is the batch that was updated. A
    nested field that is in several parts has one form in all of them, because the last update is not known."""
    forms: dict[Path, FieldForm] = {}
    axes: dict[str, tuple[str, int, int]] = {}
    for schema in schemas:
        for form in schema.forms:
            known = forms.setdefault(form.path, form)
            if (known.layout or form.layout) and _restored_by(known) != _restored_by(form):
                raise _several_pads(known, form, call)
        for axis in schema.axes:
            axes.setdefault(axis[0], axis)
    return Schema(schemas[0].root, tuple(forms.values()), tuple(axes.values()))


def _restored_by(form: FieldForm) -> tuple[Any, ...]:
    return form.kind, form.layout, form.ragged_dim, form.dtype, form.pads_by_bits


def _several_pads(one: FieldForm, other: FieldForm, call: str) -> LayoutError:
    ways = [f'{form.dtype} with the pads {form.pads_by_bits} under "{form.layout}"' for form in (one, other)]
    return LayoutError(
        f'{call}: field "{show(one.path)}" was nested twice, as {" and as ".join(ways)}, and update() replaced one by '
        f"the other; expected one form. {_RESTORE_FIRST}"
    )


def _schema_of(entry: Any) -> Schema | None:
    """The common schema of all rows. If rows differ in the pad of a field, its pads are PER_ROW, and EDGE or ANY_ZERO
    if some row has these. None if rows differ in more."""
    if isinstance(entry, NonTensorData):
        return entry.data if isinstance(entry.data, Schema) else None
    by_row: list[Any] = entry.tolist() if isinstance(entry, NonTensorStack) else []
    schemas = list({id(schema): schema for schema in by_row}.values())
    if not schemas or not all(isinstance(schema, Schema) for schema in schemas):
        return None
    alike = [
        (
            *(schema.root.unnamed(), schema.axes),
            *(replace(form, pads=(), node=form.node and form.node.unnamed()) for form in schema.forms),
        )
        for schema in schemas
    ]
    if any(other != alike[0] for other in alike):
        return None
    columns = zip(*(schema.forms for schema in schemas), strict=True)
    return replace(schemas[0], forms=tuple(map(_with_all_pads, columns)))


def _with_all_pads(column: Sequence[FieldForm]) -> FieldForm:
    form = column[0]
    if all(other.pads_by_bits == form.pads_by_bits for other in column):
        return form
    return replace(form, pads=(PER_ROW, *(pad for pad in (EDGE, ANY_ZERO) if any(pad in own.pads for own in column))))


def _first_fields(batch: TensorDictBase, schema: Schema, layouts: Collection[str]) -> dict[str, Tensor]:
    """The first jagged field of each layout."""
    fields: dict[str, Tensor] = {}
    for form in schema.forms:
        name = form.layout
        if form.kind == "padded" and name is not None and name in layouts and name not in fields:
            value = entry_at(batch, form.path)
            if isinstance(value, Tensor) and value.is_nested and is_regular(value):
                fields[name] = value
    return fields


def _numbers_of(table: Tensor) -> Tensor:
    """The int32 of a span table, flat."""
    return values_of(table).to(torch.uint8).contiguous().view(torch.int32).view(-1)


def _changed(name: str, call: str) -> LayoutError:
    return LayoutError(f'{call}: the span table of layout "{name}" was changed by arithmetic. {INTACT}')


def _layout(
    lines: IntArray, splits: IntArray, size: tuple[int, int], device: torch.device, call: str, name: str
) -> RowLayout:
    width, anchor = size
    table = table_of_lines(lines, splits, width)
    if table is None:
        raise _changed(name, call)
    try:
        return RowLayout.from_spans(*table[:2], np.diff(table.splits), width, device=device, anchor=anchor)
    except LayoutError as error:
        raise LayoutError(f'{call}: the span table of layout "{name}" was changed: {error} {INTACT}') from error
