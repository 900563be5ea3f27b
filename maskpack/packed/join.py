"""Concatenates packed batches by rows (`joined`) and by fields (`merged`), and takes some fields (`restricted`), a part
of one (`narrowed`), or spans of tokens (`tokens_taken`). `check_uids` compares rows before their fields are joined."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core import abi
from maskpack.core.bits import Words, words
from maskpack.core.index import IntArray
from maskpack.core.objects import Objects, is_same
from maskpack.core.pads import Pads
from maskpack.core.tree import Node, entry_at, is_object, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.registry import Key, Path, show
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.jobs import words_of_one
from maskpack.nesting.schema import FieldForm, Schema, jagged_dim, name_of_jagged
from maskpack.packed.decode import decoded, dims_above, entries_of, pads_of, shape_in
from maskpack.packed.rows import Body, Columns, Rows, Segments, TokenBody, TokenSpans, cat_columns, used
from maskpack.packed.table import Frame, Table, merge, of_values

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

DIFFERENT_FORMS = "its batches hold it in different forms"
"""The reason of a field that stays padded because the batches hold it in different forms."""
UID: Path = ("uid",)
"""The field that trainers name rows, or groups of rows, by."""


def joined(batches: Sequence[PackedBatch], call: str) -> PackedBatch:
    """The rows of several batches with the same fields, one after the other. Fields of different widths are aligned at
    the anchors of their layouts. Raises LayoutError, in the name of `call`, if fields, dtypes or shapes of elements
    differ."""
    batches = with_stacks(batches)
    paths = [form.path for form in batches[0].schema.forms]
    for batch in {id(own.schema): own for own in batches}.values():
        if set(batch.forms) != set(paths):
            odd = sorted(show(path) for path in set(batch.forms) ^ set(paths))
            raise LayoutError(
                f"{call}: fields {odd} are not in every batch; expected the same fields. Pack the same "
                "fields, or decode and drop the others."
            )
    _check_dims([batch.schema.root for batch in batches], "the batch", call)
    objects = {
        form.path: _objects(
            [batch.objects[form.path] for batch in batches],
            [dims_above(batch, form.path) for batch in batches],
            f'{call}: field "{show(form.path)}"',
        )
        for form in batches[0].schema.forms
        if form.kind == "object" and all(batch.forms[form.path].kind == "object" for batch in batches)
    }
    schema, frames, apart = _schema_together(batches, call)
    rows = sum(batch.num_rows for batch in batches)
    paths = [form.path for form in schema.forms if form.dtype is not None and form.path not in apart]
    new = {form.layout: apart[form.path][1] for form in schema.forms if form.path in apart}
    kept = [name for name in frames if name not in new]
    columns = [own for own, _ in cat_columns([batch.rows.columns for batch in batches], paths, kept)]
    for form in [form for form in schema.forms if form.path in apart]:
        values, layout = apart[form.path]
        layouts = {} if layout is None else {form.layout or "": layout}
        columns.append(_alone(schema, form, words(values).numpy(), layouts, rows))
    return replace(batches[0], num_rows=rows, schema=schema, rows=Rows(columns, frames), objects=objects)


def _schema_together(
    batches: Sequence[PackedBatch], call: str
) -> tuple[Schema, Mapping[str, Frame], dict[Path, tuple[Tensor, RowLayout | None]]]:
    """The schema and the layouts of the rows of several batches, and the fields that they hold in different forms: in
    padded form, or the values of jagged ones, with their layout."""
    first = batches[0]
    frames = _frames_together(batches)
    if frames is not None:
        return first.schema, frames, {}
    columns = [[batch.forms[form.path] for batch in batches] for form in first.schema.forms]
    turned = [_turned(column, batches) for column in columns]
    forms = [_form(column, call) if own is None else own for column, own in zip(columns, turned, strict=True)]
    axes = [name for name, _, _ in first.schema.axes if all(name in batch.frames for batch in batches)]
    named = dict.fromkeys(
        [*axes, *(name for column in columns for form in column for name in (form.layout, form.axis))]
    )
    frames = {name: _frame(name, batches) for name in named if name and all(name in batch.frames for batch in batches)}
    apart: dict[Path, tuple[Tensor, RowLayout | None]] = {}
    for at, (form, column) in enumerate(zip(forms, columns, strict=True)):
        if form.kind == "dense":
            _check_axis(form.path, column, batches, frames, call)
        if form.reason == DIFFERENT_FORMS:
            values = _padded(form, column, batches, frames, call)
            forms[at], apart[form.path] = replace(form, shape=tuple(values.shape[1:])), (values, None)
        elif form.kind == "jagged" and (turned[at] or any(own.layout != form.layout for own in column)):
            parts = [_rows_of(own, part, form) for own, part in zip(column, batches, strict=True)]
            layout = RowLayout.from_lengths(np.concatenate([lengths for _, lengths in parts]))
            forms[at] = replace(form, layout=name_of_jagged(form.path))
            apart[form.path] = torch.cat([values for values, _ in parts]), layout
            frames[name_of_jagged(form.path)] = layout.width, 0
    kept = dict.fromkeys([*axes, *(name for form in forms for name in (form.layout, form.axis))])
    frames = {name: frame for name, frame in frames.items() if name in kept}
    return Schema(first.schema.root, tuple(forms), tuple((name, *frames[name]) for name in axes)), frames, apart


def _frames_together(batches: Sequence[PackedBatch]) -> Mapping[str, Frame] | None:
    """The layouts of the rows of batches whose fields keep their forms: they are equal, or all fields are without
    padding. None for others."""
    first = batches[0]
    unlike = {(id(batch.schema), id(batch.frames)): batch for batch in batches}.values()
    if any(batch.schema != first.schema or batch.frames.keys() != first.frames.keys() for batch in unlike):
        return None
    if all(batch.frames == first.frames for batch in unlike):
        return first.frames
    if first.schema.axes or any(form.kind in ("padded", "flat") or form.axis for form in first.schema.forms):
        return None
    return {name: _frame(name, batches) for name in first.frames}


def _frame(name: str, batches: Sequence[PackedBatch]) -> Frame:
    """The width and the anchor of a layout of all rows of some batches."""
    own = [batch.frames[name] for batch in batches]
    left = max(anchor for _, anchor in own)
    return left + max(width - anchor for width, anchor in own), left


def _alone(
    schema: Schema, form: FieldForm, held: Words, layouts: Mapping[str, RowLayout], rows: int, pads: Pads | None = None
) -> Columns:
    """A field of a batch in a body of its own."""
    given = {} if pads is None else {form.path: pads}
    found = of_values([form], [held], layouts, rows, schema.dense_rows(rows), given)
    assert found is not None
    return Columns((form.path,), (Body(found.table, {form.path: 0}),), Segments.whole(rows), (*layouts,))


def table_of_rows(packed: PackedBatch) -> Table:
    """The table of rows that lie in other tables. Consecutive rows of one table are cut from it if they need few others
    of it; others are encoded."""
    tables: list[Table] = []
    places: dict[Path, tuple[int, int]] = {}
    for columns in packed.rows.columns:
        forms = [packed.forms[path] for path in columns.paths]
        cut = _cut(packed, columns)
        far = [] if cut is None else cut.fields_from_afar()
        near = [number for number in range(len(forms)) if number not in far]
        if cut is None or len(far) == len(forms) > 0:
            near, parts = [*range(len(forms))], [_encoded(packed, forms)]
        elif far:
            parts = [cut.select(near), _encoded(packed, [forms[number] for number in far])]
        else:
            parts = [cut]
        for part, numbers in zip(parts, (near, far), strict=False):
            places |= {forms[number].path: (len(tables), place) for place, number in enumerate(numbers)}
            tables.append(part)
    if len(tables) == 1 and [*places] == [form.path for form in packed.tensors]:
        return tables[0]
    return merge(tables, [places[form.path] for form in packed.tensors])


def _cut(packed: PackedBatch, columns: Columns) -> Table | None:
    """The rows as they lie in one table; None if they do not lie one after the other, or have other widths, or if a
    layout is columns of one that the batch does not have."""
    body = columns.body
    if body is None or columns.rows.count.size > 1 or not packed.rows.fits(body.table):
        return None
    table, start, count = body.table, int(columns.rows.start.sum()), columns.rows.num_rows
    table = table if count == table.rows else table.between(start, start + count)
    chosen = [body.numbers[path] for path in columns.paths]
    table = table if chosen == [*range(table.fields.size)] else table.select(chosen)
    table = table.with_layouts(columns.layouts)
    numbers: list[int] = table.stored["parent"][table.stored["kind"] == abi.AS_PART].tolist()
    for name in {table.names[at] for at in numbers}.difference(columns.layouts):
        if name not in packed.frames or table.layouts[name] != packed.layouts[name]:
            return None
    return table


def _encoded(packed: PackedBatch, forms: Sequence[FieldForm]) -> Table:
    tensors = decoded(packed, forms, True)
    pads = {form.path: pads_of(packed, form) for form in forms if form.kind == "padded"}
    values = [words(tensors[form.path]).numpy() for form in forms]
    rows = packed.num_rows, packed.schema.dense_rows(packed.num_rows)
    found = of_values(forms, values, packed.layouts, *rows, pads)
    assert found is not None
    return found.table


def _turned(column: Sequence[FieldForm], batches: Sequence[PackedBatch]) -> FieldForm | None:
    """The form [B, n, j] of a field that some batches hold as [B, n, j] and others as [B, j, n], or with other n: torch
    takes rows [n, j] of equal lengths for those. None if the batches agree, or rows have no such n."""
    form = column[0]
    alike = all((own.ragged_dim, own.shape) == (form.ragged_dim, form.shape) for own in column)
    if alike or any(own.kind != "jagged" or own.dtype != form.dtype or len(own.shape) != 1 for own in column):
        return None
    counts: set[int] = set()
    for own, part in zip(column, batches, strict=True):
        counts |= {own.shape[0]} if own.ragged_dim == 2 else {*part.layouts[own.layout or ""].lengths.tolist()}
    return replace(form, ragged_dim=2, shape=(*counts,)) if len(counts) == 1 else None


def _rows_of(form: FieldForm, packed: PackedBatch, wanted: FieldForm) -> tuple[Tensor, IntArray]:
    """The values [T, *F] of a jagged field with the ragged dim of another form, and the lengths of its rows."""
    values, lengths = decoded(packed, [form], False)[form.path], packed.layouts[form.layout or ""].lengths
    if form.ragged_dim == wanted.ragged_dim:
        return values, lengths
    rows, (tokens,) = packed.num_rows, form.shape
    return values.view(rows, *wanted.shape, tokens).mT.flatten(0, 1), np.full(rows, tokens, np.int64)


def _form(column: Sequence[FieldForm], call: str) -> FieldForm:
    """The form of a field in the result, given its forms in the batches. If they differ, the field stays padded."""
    form = column[0]
    name = show(form.path)
    kinds = {other.kind if other.kind in ("object", "node") else "tensor" for other in column}
    if len(kinds) > 1:
        raise LayoutError(
            f'{call}: field "{name}" is {" and ".join(sorted(kinds))}; expected one kind. Pack the same fields.'
        )
    nodes = [other.node for other in column if other.node is not None]
    _check_dims(nodes, f'the sub-batch "{name}"', call)
    if len({node.kind for node in nodes}) > 1:
        classes = ["TensorDict" if node.kind is None else node.kind.__name__ for node in nodes]
        raise LayoutError(f'{call}: the sub-batch "{name}" is {classes}; expected one class. Pack the same class.')
    if form.kind in ("object", "node"):
        return form
    if any(other.dtype != form.dtype for other in column):
        dtypes = [str(other.dtype).removeprefix("torch.") for other in column]
        raise LayoutError(f'{call}: field "{name}" has dtypes {dtypes}; expected one. Cast before packing.')
    same_layout = form.kind == "jagged" or all(f.layout == form.layout for f in column)
    if not same_layout or any((f.kind, f.ragged_dim) != (form.kind, form.ragged_dim) for f in column):
        return _apart(column)
    if any(f.shape != form.shape for f in column):
        raise LayoutError(
            f'{call}: field "{name}" has elements of shape {[f.shape for f in column]}; expected one. Bring '
            "the batches to one shape before packing."
        )
    return form


def _apart(column: Sequence[FieldForm]) -> FieldForm:
    """The form of a field that the batches hold in different forms: it stays padded."""
    form, axes = column[0], {form.axis or form.layout for form in column}
    axis = axes.pop() if len(axes) == 1 else None
    return FieldForm(form.path, "dense", dtype=form.dtype, device=form.device, reason=DIFFERENT_FORMS, axis=axis)


def _check_axis(
    path: Path,
    column: Sequence[FieldForm],
    batches: Sequence[PackedBatch],
    frames: Mapping[str, Frame],
    call: str,
) -> None:
    """Raises LayoutError if the axis of a field that stays padded becomes wider: the field has no pad."""
    for form, batch in zip(column, batches, strict=True):
        whole, part = frames.get(form.axis or ""), batch.frames.get(form.axis or "")
        if whole is not None and part is not None and part != whole:
            raise LayoutError(
                f'{call}: field "{show(path)}" stays padded, because {form.reason}, and its axis "{form.axis}" grows '
                f"from width {part[0]}, split at {part[1]}, to {whole[0]}, split at {whole[1]}; expected "
                "one width and split. Bring the batches to one prompt and response width, or fix the field."
            )


def _check_dims(nodes: Sequence[Node], name: str, call: str) -> None:
    dims = [node.more_dims for node in nodes]
    if len(set(dims)) > 1:
        raise LayoutError(
            f"{call}: {name} has batch dims {dims} behind its rows; expected the same. Pad the batches to one "
            "width, or give the TensorDict batch_size=[rows], before packing."
        )


# -------------------------------------------------------------------- fields of a batch, and of several


def check_named(fields: Sequence[Key], call: str) -> None:
    """Raises LayoutError if no field is named."""
    if not fields:
        raise LayoutError(f"{call}: no field is named; expected at least one. Name the fields to keep.")


def restricted(batch: PackedBatch, paths: Collection[Path]) -> PackedBatch:
    """The batch with some of its fields, still encoded."""
    schema, layouts = _restricted(batch.schema, frozenset(paths))
    objects = {form.path: batch.objects[form.path] for form in schema.forms if form.kind == "object"}
    return replace(batch, schema=schema, rows=batch.rows.only(paths, layouts), objects=objects)


@lru_cache(256)
def _restricted(schema: Schema, paths: frozenset[Path]) -> tuple[Schema, frozenset[str]]:
    """The schema of some fields, and the layouts that they have."""
    above = {path[:n] for path in paths for n in range(1, len(path))}
    forms = [form for form in schema.forms if form.path in paths or (form.kind == "node" and form.path in above)]
    used = {name for form in forms for name in (form.layout, form.axis)} | {name for name, _, _ in schema.axes}
    return replace(schema, forms=tuple(forms)), frozenset(name for name in used if name is not None)


def narrowed(batch: PackedBatch, form: FieldForm, dim: int, start: int, length: int) -> PackedBatch:
    """The batch with a part of the elements of one field: `length` of dim `dim` of an element, from `start` on. Whole
    columns stay encoded; else the field is decoded and encoded again, and the other fields are copied."""
    before = math.prod(form.shape[:dim])
    inner = words_of_one(replace(form, shape=form.shape[dim + 1 :]))
    own = replace(form, shape=(*form.shape[:dim], length, *form.shape[dim + 1 :]))
    forms = tuple(own if other.path == form.path else other for other in batch.schema.forms)
    home = batch.rows.columns_of(form.path)
    cut = [_narrow_body(body, form.path, start * inner, length * inner) for body in home.parts if before == 1]
    if len(cut) == len(home.parts) and None not in cut:
        mine = replace(home, paths=(form.path,), parts=tuple(cut), layouts=())
    else:
        elements = shape_in(batch, form, True)[0] if form.layout else batch.schema.dense_rows(batch.num_rows)
        sizes = elements, before, form.shape[dim], inner  # one of them may be 0
        values = words(decoded(batch, [form], True)[form.path]).numpy().reshape(sizes)
        held: Words = np.ascontiguousarray(values[:, :, start : start + length])
        layouts = {} if form.layout is None else {form.layout: batch.layouts[form.layout]}
        pads = pads_of(batch, form) if form.kind == "padded" else None
        mine = _alone(batch.schema, own, held, layouts, batch.num_rows, pads)
    columns = [own.only(set(own.paths) - {form.path}) for own in batch.rows.columns]
    rows = Rows(used([*columns, mine]), batch.frames)
    return replace(batch, schema=replace(batch.schema, forms=forms), rows=rows)


def _narrow_body(body: Any, path: Path, start: int, length: int) -> Body | None:
    table = body.table.narrow(body.numbers[path], start, length) if isinstance(body, Body) else None
    return None if table is None else replace(body, table=table)


def tokens_taken(packed: PackedBatch, spans: TokenSpans, call: str) -> PackedBatch:
    """The spans as rows. Raises LayoutError if a field has another layout."""
    inside = [form.path for form in packed.tensors if form.layout == spans.layout]
    name = name_of_jagged(inside[0]) if inside else ""
    schema = _schema_of_spans(packed.schema, spans.layout, name, call)
    rows = packed.take(spans.row)
    columns = [own.only(set(own.paths) - set(inside), ()) for own in rows.rows.columns]
    frames: dict[str, Frame] = {}
    if inside:
        body = TokenBody(packed.select(*inside), spans)
        columns.append(Columns(tuple(inside), (body,), Segments.whole(spans.row.size), (name,)))
        frames[name] = spans.rows.width, 0
    return replace(rows, schema=schema, rows=Rows(used(columns), frames))


def _schema_of_spans(schema: Schema, layout: str, name: str, call: str) -> Schema:
    """The schema in which the fields of a layout are jagged, in the layout `name`."""
    forms: list[FieldForm] = []
    for form in schema.forms:
        if form.layout not in (None, layout):
            raise LayoutError(
                f'{call}: field "{show(form.path)}" has the layout "{form.layout}"; expected fields of "{layout}", and '
                "fields without a layout. Select these first, and take the tokens of the others by their own layout."
            )
        if form.node is not None and form.node.more_dims:
            raise LayoutError(
                f'{call}: the sub-batch "{show(form.path)}" has batch dims {form.node.more_dims} behind its rows; '
                "expected none. Leave it out, or give the TensorDict batch_size=[rows] before packing."
            )
        if form.layout is not None:
            kind = "jagged" if form.kind == "padded" else form.kind
            form = replace(form, kind=kind, layout=name, ragged_dim=jagged_dim(form))
        forms.append(form)
    return Schema(schema.root, tuple(forms), ())


def merged(parts: Sequence[PackedBatch], order: Sequence[Path]) -> PackedBatch:
    """The fields of several batches with the same rows and layouts, in the order given. No field is in two batches."""
    forms = {form.path: form for part in reversed(parts) for form in part.schema.forms}
    axes = {axis[0]: axis for part in reversed(parts) for axis in part.schema.axes}
    frames: dict[str, Frame] = {}
    columns: list[Columns] = []
    for part in parts:
        columns += [own.only(own.paths, part.frames.keys() - frames.keys()) for own in part.rows.columns]
        frames = {**part.frames, **frames}
    first = parts[0]
    return replace(
        first,
        schema=Schema(first.schema.root, tuple(forms[path] for path in order), tuple(axes.values())),
        rows=Rows(used(columns), frames),
        objects={path: held for part in parts for path, held in part.objects.items()},
    )


def check_uids(ours: TensorDictBase | PackedBatch, theirs: TensorDictBase | PackedBatch, call: str) -> None:
    """Raises LayoutError if rows whose fields are joined by position have other uids, as far as both have some."""
    uids = _uids_of(ours)
    others = _uids_of(theirs) if uids else []
    for row, (own, other) in enumerate(zip(uids, others, strict=False)):
        if own != other and None not in (own, other):
            raise LayoutError(
                f'{call}: field "uid" of row {row} is {reprlib.repr(own)}, and {reprlib.repr(other)} in the batch that '
                "is joined with it; expected the same rows in the same order. Take the rows of one in the order of the "
                "other, or leave the field out of one of them if its values may differ."
            )


def _uids_of(batch: TensorDictBase | PackedBatch) -> list[Any]:
    """The uid of each row, None for what is no text, bytes or whole number; an empty list if rows have none."""
    value: Any
    if isinstance(batch, TensorDictBase):
        value = entry_at(batch, UID)
        value = Objects.of(value) if is_object(value) else value
    else:
        form, value = batch.forms.get(UID), batch.objects.get(UID)
        if form is not None and form.kind == "dense":
            value = decoded(batch, [form], True)[UID]
    if isinstance(value, Objects):
        return [item if isinstance(item, str | bytes | int) else None for item in value.data] if value.depth else []
    if not isinstance(value, Tensor) or value.is_nested or value.is_floating_point() or value.is_complex():
        return []
    return cast("list[Any]", value.tolist()) if value.dim() else []


# -------------------------------------------------------------------- values


def _padded(
    form: FieldForm,
    column: Sequence[FieldForm],
    batches: Sequence[PackedBatch],
    frames: Mapping[str, Frame],
    call: str,
) -> Tensor:
    """A field that the batches hold in different forms, in padded form: the parts one after the other, each widened by
    its own pad to the width of its axis in the result."""
    parts: list[Tensor] = []
    for own, batch in zip(column, batches, strict=True):
        wide = {name: frames[name] if name == own.layout == form.axis else held for name, held in batch.frames.items()}
        whole = replace(batch, rows=Rows(batch.rows.columns, wide))
        parts.append(decoded(whole, [own], False)[own.path])
    seen = [
        tuple(part.shape[1:]) if own.kind in ("padded", "dense") else "jagged"
        for own, part in zip(column, parts, strict=True)
    ]
    if "jagged" in seen or len(set(seen)) > 1:
        raise LayoutError(f'{call}: field "{show(form.path)}" is {seen}; expected one width. Bring it to one width.')
    return torch.cat(parts)


# -------------------------------------------------------------------- objects


def with_stacks(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The batches, with each sub-batch that one of them holds as a lazy stack held as one by all of them."""
    stacks = {path for batch in batches for path, held in batch.objects.items() if held.stacked}
    if not stacks:
        return list(batches)
    return [_with_stack(batch, stacks & {f.path for f in batch.schema.forms if f.kind == "node"}) for batch in batches]


def _with_stack(batch: PackedBatch, paths: set[Path]) -> PackedBatch:
    """The batch with some of its sub-batches as objects, one for each row."""
    for path in paths:
        below = [form for form in batch.schema.forms if form.path[: len(path)] == path]
        node = below[0].node
        assert node is not None
        entries = [(own[len(path) :], entry) for own, entry in entries_of(batch, below[1:], False, None)]
        rows = Objects(list(unflatten(node, entries, batch.num_rows).unbind(0)), 1, True)
        left = restricted(batch, {form.path for form in batch.schema.forms if form not in below})
        forms = [form for form in batch.schema.forms if form not in below[1:]]
        forms = [FieldForm(path, "object") if form.path == path else form for form in forms]
        schema = replace(left.schema, forms=tuple(forms))
        batch = replace(left, schema=schema, objects={**left.objects, path: rows})
    return batch


def _objects(parts: Sequence[Objects], dims: Sequence[tuple[int, ...]], field: str) -> Objects:
    if any(part.stacked for part in parts):
        if not all(part.stacked for part in parts):
            raise LayoutError(f"{field} is a lazy stack and a Python object; expected one kind. Pack the same fields.")
        return Objects([row for part in parts for row in part.data], 1, True)
    if all(part.depth == 1 for part in parts):
        return Objects([row for part in parts for row in part.data], 1, False, all(part.bare for part in parts))
    if not any(part.depth for part in parts) and all(is_same(part.data, parts[0].data) for part in parts):
        return parts[0]
    depth = max(part.depth for part in parts) or len(dims[0])
    spread = [_spread(part, sizes, depth) for part, sizes in zip(parts, dims, strict=True)]
    return Objects([item for data in spread for item in data], depth)


def _spread(part: Objects, dims: tuple[int, ...], depth: int) -> list[Any]:
    """Nested lists with one object at each place of the first `depth` batch dims."""

    def below(data: Any, at: int) -> Any:
        if at == depth:
            return data
        items = data if at < part.depth else [data] * dims[at]
        return [below(item, at + 1) for item in items]

    return below(part.data, 0)
