"""What a batch is made of, apart from its values: the form of every entry, and how a nested batch carries them.

A nested batch has one entry more than the padded one, LAYOUTS: for each layout a jagged table of its runs, one row of
the table for each row of the batch, so that it follows the rows through indexing, chunk, split and cat; the pads of
all padded fields in each row; and the schema.
A row of the table is lines of three int32 (run_lines.py), as bytes: bytes survive the casts that `float()` and
`to(dtype)` apply to every entry, and checksums find any other arithmetic. So are the pads: of each field in each row
one byte, 1 for EDGE, and the bytes of the pad. Batches that found different pads have the same entries, so that
torch.cat joins them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.errors import LayoutError
from maskpack.jagged import is_regular, jagged_from, offsets_of, to_host
from maskpack.layout import RowLayout
from maskpack.registry import EDGE, PER_ROW, Pad, PadValue, Path, show
from maskpack.rows import IntArray
from maskpack.run_lines import lines_of, table_of_lines
from maskpack.tensors import need_batch
from maskpack.tree import Node, build, entry_at, has
from maskpack.words import pad_words, word_dtype, words

LAYOUTS = "_maskpack"
"""The entry of a nested batch that leads back to the padded one. `select` must name it to keep it."""

INTACT = "Restore from the batch as nest_batch_by_mask returned it; index, chunk, cat and casts are fine."


@dataclass(frozen=True)
class FieldForm:
    """The form that one entry has at home, before nesting and after restoring.

    Attributes:
        path: its place in the batch.
        kind: `padded` [B, S, *F] under a layout, `flat` [T, *F] under a layout, `jagged` under its own layout,
            `dense`, `object` (no tensor) or `node` (a sub-TensorDict).
        layout: name of the layout, for the first three.
        pads: what the field is padded with: the candidates before they are verified, then the one.
        ragged_dim: dim of the padded field that the width runs along.
        dtype: of the field.
        node: batch dims and device of a sub-TensorDict.
        device, shape: where a packed field came from, and the shape of one element, F; None and () while it is not
            packed.
        hints: encodings to try first.
        reason: why a dense field is dense; None where that is by design.
        axis: of a dense field, the layout that it would lie under if its masked-out elements were its pad.
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
    """`pads` as forms compare them: 0.0 is not -0.0, and NaN is NaN."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pads_by_bits", repr(self.pads))


@dataclass(frozen=True)
class Schema:
    """The forms of a batch's entries in key order, its root, and the name, width and anchor of each axis."""

    root: Node
    forms: tuple[FieldForm, ...]
    axes: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class RowPads:
    """The pad of a field in each row.

    Attributes:
        pads: [B], in the dtype that the field had when it was nested.
        edge: bool [B]: rows whose pad is EDGE instead; None if there are none.
    """

    pads: Tensor
    edge: Tensor | None = None


def write_layouts(
    schema: Schema, tables: Mapping[str, Tensor], pads: Tensor, rows: int, device: str | None
) -> TensorDict:
    """The LAYOUTS entry of a batch on `device`, from the run table of each layout and what `pad_table` makes."""
    batch = schema.root.batch_size(rows)[:1]
    here = Node(() if batch else None, device)
    held: Any = NonTensorData(schema, batch_size=batch, device=device)
    entries: list[tuple[Path, Any]] = [(("schema",), held), (("runs",), here)]
    entries += [(("runs", name), tables[name]) for name, _, _ in schema.axes]
    entries.append((("pads",), pads))
    return build(here, entries, rows)


def pad_table(
    forms: Iterable[FieldForm], row_pads: Mapping[Path, Tensor], rows: int, device: torch.device | str
) -> Tensor:
    """uint8 [B, K] on a device: the pads of all padded fields, those that are PER_ROW from `row_pads`, [B] each."""
    places = _pad_places(forms := list(forms))
    line = b"".join(_pad_bytes(form.pads[0], form.dtype) for form in forms if form.path in places)
    table = torch.tensor(list(line), dtype=torch.uint8, device=device).expand(rows, -1).clone()
    for path in row_pads.keys() & places.keys():
        begin, end = places[path].start + 1, places[path].stop
        bits = words(row_pads[path]).to(device).clone(memory_format=torch.contiguous_format)
        table[:, begin:end] = bits.view(torch.uint8).view(rows, end - begin)
    return table


def _pad_bytes(pad: PadValue, dtype: torch.dtype | None) -> bytes:
    assert dtype is not None
    held = pad_words(0 if isinstance(pad, Pad) else pad, dtype)
    assert held is not None
    return bytes([pad is EDGE]) + np.array(held, word_dtype(dtype.itemsize)).tobytes()


def _pad_places(forms: Iterable[FieldForm]) -> dict[Path, slice]:
    """Where the pads of each field lie in a row of the table."""
    places: dict[Path, slice] = {}
    begin = 0
    for form in forms:
        if form.kind == "padded" and form.dtype is not None:
            places[form.path] = slice(begin, begin + 1 + form.dtype.itemsize)
            begin = places[form.path].stop
    return places


def run_tables(layouts: Mapping[str, RowLayout]) -> dict[str, Tensor]:
    """The run table of each layout, on its device."""
    made: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        lines, splits = lines_of(layout.table, layout.width)
        values = torch.from_numpy(lines).clone(memory_format=torch.contiguous_format)  # no lines may have any strides
        values, offsets = (part.to(layout.device, non_blocking=True) for part in (values, torch.from_numpy(splits)))
        made[name] = jagged_from(values.view(torch.uint8), offsets, 0, most_lines(splits))
    return made


def most_lines(splits: IntArray) -> int:
    """Of a row."""
    return int((splits[1:] - splits[:-1]).max(initial=0))


def read_pads(batch: TensorDictBase, forms: Mapping[Path, FieldForm], path: Path, call: str) -> RowPads | None:
    """The pads of a field whose pad is PER_ROW, PER_ROW beside EDGE; None for any other. `forms` are those that
    `read_layouts` gave, in their order."""
    form = forms.get(path)
    if form is None or form.dtype is None or PER_ROW not in form.pads:
        return None
    table = entry_at(batch, (LAYOUTS, "pads"))
    place = _pad_places(forms.values())[path]
    if not isinstance(table, Tensor) or table.dim() != 2 or table.shape[1] < place.stop:
        raise LayoutError(f'{call}: the row pads of field "{show(path)}" are gone. {INTACT}')
    held = table[:, place].to(torch.uint8)
    pads = held[:, 1:].clone(memory_format=torch.contiguous_format).view(form.dtype).view(-1)
    return RowPads(pads, held[:, 0] != 0 if EDGE in form.pads else None)


def read_layouts(batch: TensorDictBase, call: str) -> tuple[Schema, dict[str, RowLayout]]:
    """The schema and the layouts of a nested batch, checked against the rows it has now. One synchronisation on CUDA.

    Raises LayoutError, named after what an operation did to the batch.
    """
    need_batch(batch, call)
    if not has(batch, LAYOUTS):
        raise LayoutError(
            f'{call}: the batch has no entry "{LAYOUTS}", so it was not nested by nest_batch_by_mask, or select() '
            f'dropped the entry. Nest it first, or select it too: batch.select("responses", maskpack.LAYOUTS).'
        )
    held = entry_at(batch, (LAYOUTS, "schema"))
    if held is None and entry_at(batch, (LAYOUTS, "runs")) is None:
        raise LayoutError(
            f'{call}: the entry "{LAYOUTS}" is not what nest_batch_by_mask makes; expected that name for its own. '
            "Rename the field."
        )
    schema = _schema_of(held)
    if schema is None:
        raise LayoutError(
            f"{call}: the batch was put together from batches of different widths or fields; expected one schema. "
            "Pad the batches to one width and nest them again, or restore each part before torch.cat."
        )
    tables: dict[str, Tensor] = {}
    for name, _, _ in schema.axes:
        table = entry_at(batch, (LAYOUTS, "runs", name))
        if not isinstance(table, Tensor) or not table.is_nested:
            raise LayoutError(
                f'{call}: the run table of layout "{name}" is no jagged tensor any more; a single row was taken by '
                "an integer index, or the entry was replaced. Take one row by a list: batch[[i]]."
            )
        tables[name] = table
    sizes = {name: (width, anchor) for name, width, anchor in schema.axes}
    layouts: dict[str, RowLayout] = {}
    lines = {
        name: table.values().to(torch.uint8).contiguous().view(torch.int32).view(-1) for name, table in tables.items()
    }
    first = _first_fields(batch, schema, tables)
    read = to_host([*lines.values(), *[offsets_of(value) for value in (*tables.values(), *first.values())]])
    for (name, own), numbers, splits in zip(lines.items(), read, read[len(lines) :], strict=False):
        layouts[name] = _layout(numbers.reshape(-1, 3), splits, sizes[name], own.device, call, name)
    for (name, value), offsets in zip(first.items(), read[2 * len(tables) :], strict=True):
        if np.array_equal(offsets, layouts[name].row_offsets):
            layouts[name].__dict__["offsets"] = offsets_of(value)  # arithmetic between old and new fields works
    return schema, layouts


def _schema_of(held: Any) -> Schema | None:
    """The schema of all rows. Where rows differ in the pads of a field, these are PER_ROW, and EDGE if any row's is;
    None where they differ in more."""
    if isinstance(held, NonTensorData):
        return held.data if isinstance(held.data, Schema) else None
    found: list[Any] = held.tolist() if isinstance(held, NonTensorStack) else []
    schemas = list({id(schema): schema for schema in found}.values())
    if not schemas or not all(isinstance(schema, Schema) for schema in schemas):
        return None
    forms = [[replace(form, pads=()) for form in schema.forms] for schema in schemas]
    first = schemas[0]
    if any((schema.root, schema.axes) != (first.root, first.axes) for schema in schemas) or forms.count(forms[0]) < len(
        forms
    ):
        return None
    columns = zip(*(schema.forms for schema in schemas), strict=True)
    return replace(schemas[0], forms=tuple(map(_with_all_pads, columns)))


def _with_all_pads(column: Sequence[FieldForm]) -> FieldForm:
    form = column[0]
    if all(other.pads_by_bits == form.pads_by_bits for other in column):
        return form
    return replace(form, pads=(PER_ROW, EDGE) if any(EDGE in other.pads for other in column) else (PER_ROW,))


def _first_fields(batch: TensorDictBase, schema: Schema, layouts: Collection[str]) -> dict[str, Tensor]:
    """The first jagged field of each layout."""
    fields: dict[str, Tensor] = {}
    for form in schema.forms:
        value = entry_at(batch, form.path) if form.kind == "padded" else None
        if form.layout is not None and form.layout in layouts and isinstance(value, Tensor) and is_regular(value):
            fields.setdefault(form.layout, value)
    return fields


def _layout(
    lines: IntArray, splits: IntArray, size: tuple[int, int], device: torch.device, call: str, name: str
) -> RowLayout:
    width, anchor = size
    table = table_of_lines(lines, splits, width)
    if table is None:
        raise LayoutError(f'{call}: the run table of layout "{name}" was changed by arithmetic. {INTACT}')
    try:
        return RowLayout.from_runs(*table[:2], np.diff(table.splits), width, device=device, anchor=anchor)
    except LayoutError as error:
        raise LayoutError(f'{call}: the run table of layout "{name}" was changed: {error} {INTACT}') from error
