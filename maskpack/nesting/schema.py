"""The schema of a batch, which is the form of each entry, and how a nested batch stores it.

A nested batch has one more entry than the padded one, LAYOUTS. It has one part, which contains

- `spans`, a jagged tensor with the lines of each row (core/lines.c), so that indexing, chunk, split and cat apply to
  it: the spans of all layouts in the row, and the signs of fields with ANY_ZERO pads that have a -0.0 in it. Lines are
  bytes. These survive the casts of `float()` and `to(dtype)`, which apply to all entries; checksums detect other
  arithmetic. A batch without layouts has no `spans`.
- `pads`, the pads of all padded fields in each row: one byte for each field, which is 1 for EDGE, then the bytes of the
  pad. Batches with different pads have the same entries, so that torch.cat can join them.
- `schema`.

The part is named after the fields: `update` with a batch of other fields adds a part, and one of the same fields
replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import Words, word_dtype, words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path, show
from maskpack.core.pads import ANY_ZERO, EDGE, PER_ROW, Pad, PadValue, pad_words, text_of
from maskpack.core.tensors import need_batch
from maskpack.core.tree import Node, entry_at, fields_of, has, is_sub_batch, unflatten
from maskpack.errors import LayoutError
from maskpack.layout.jagged import held_by, jagged_from, to_host
from maskpack.layout.row_layout import RowLayout, core_layout, layout_of_core, layout_of_table

LAYOUTS = "_maskpack"
"""The key of the entry that `unnest_batch_by_mask` needs. Name it in `select` to keep it."""

_RESTORE_FIRST = (
    "Restore both first, then update the padded batch: unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))."
)
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

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        return tuple([getattr(self, part.name) for part in fields(self) if part.init])

    @cached_property
    def _hash(self) -> int:
        return hash((*self._parts[:3], *self._parts[4:], self.pads_by_bits))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldForm, self._parts


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
    def by_path(self) -> Mapping[Path, FieldForm]:
        return {form.path: form for form in self.forms}

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


def write_layouts(schema: Schema, spans: Tensor | None, pads: Tensor, rows: int, device: str | None) -> TensorDict:
    """The LAYOUTS entry of a batch on `device`, from the results of `span_table` and `pad_table`."""
    batch = schema.root.batch_size(rows)[:1]
    here = Node(() if batch else None, device)
    part = _part_of(tuple([form.path for form in schema.forms]))
    stored: Any = NonTensorData(schema, batch_size=batch, device=device)
    entries: list[tuple[Path, Any]] = [((part,), here), ((part, "schema"), stored), ((part, "pads"), pads)]
    if spans is not None:
        entries.append(((part, "spans"), spans))
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
    spans = span_table(schema, schema.forms, layouts, row_pads, home)
    return write_layouts(schema, spans, pad_table(schema.forms, row_pads, rows, home), rows, schema.root.device)


def span_table(
    schema: Schema,
    forms: Sequence[FieldForm],
    layouts: Mapping[str, RowLayout],
    row_pads: Mapping[Path, Tensor],
    device: torch.device,
) -> Tensor | None:
    """The lines of a batch with some forms of a schema. `row_pads` has the signs of ANY_ZERO fields."""
    if not schema.axes:
        return None
    lines, ends = lines_of_layouts(schema, forms, layouts, row_pads)
    values, offsets = copies_of([lines, ends], device)
    return jagged_from(values, offsets, 0, most_lines(ends))


def lines_of_layouts(
    schema: Schema, forms: Sequence[FieldForm], layouts: Mapping[str, RowLayout], row_pads: Mapping[Path, Tensor]
) -> tuple[Words, IntArray]:
    """The lines of all rows, uint8 [n, LINE], and int64 [B + 1], the first line of each row."""
    places = [
        (at, row_pads[path].numpy() if is_signed else None)
        for path, at, is_signed in _signed(tuple(forms), schema.axes)
    ]
    return native.write_lines(native.layout_rows([core_layout(layouts[name]) for name, *_ in schema.axes]), places)


def most_lines(ends: IntArray) -> int:
    """The largest number of lines of a row."""
    return int((ends[1:] - ends[:-1]).max(initial=0))


@lru_cache(256)
def _signed(forms: tuple[FieldForm, ...], axes: tuple[tuple[str, int, int], ...]) -> tuple[tuple[Path, int, bool], ...]:
    """The path of each field, the number of its layout, and whether rows may have signs of it; empty if none may."""
    numbers = {name: at for at, (name, _, _) in enumerate(axes)}
    signed = [form.kind == "padded" and ANY_ZERO in form.pads for form in forms]
    places = [numbers.get(form.layout or "", -1) for form in forms]
    return tuple(zip([form.path for form in forms], places, signed, strict=True)) if any(signed) else ()


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


def pad_table(
    forms: Iterable[FieldForm], row_pads: Mapping[Path, Tensor], rows: int, device: torch.device | str
) -> Tensor:
    """The pads of all padded fields, uint8 [B, K] on `device`. `row_pads` are the pads [B] of PER_ROW fields."""
    line, places = _pad_line(tuple(forms))
    table = copies_of([np.broadcast_to(line, (rows, line.size))], torch.device(device))[0]
    for path in row_pads.keys() & places.keys():
        if row_pads[path].dim() == 1:  # no signs
            bits = words(row_pads[path]).to(table.device).clone(memory_format=torch.contiguous_format)
            begin, end = places[path].start + 1, places[path].stop
            table[:, begin:end] = bits.view(torch.uint8).view(rows, end - begin)
    return table


@lru_cache(256)
def _pad_line(forms: tuple[FieldForm, ...]) -> tuple[Words, Mapping[Path, slice]]:
    """A row of the pad table, and the columns of each field in it."""
    places: dict[Path, slice] = {}
    line = bytearray()
    for form in forms:
        if form.kind == "padded" and form.dtype is not None:
            begin = len(line)
            line += _pad_bytes(form.pads[0], form.dtype)
            places[form.path] = slice(begin, len(line))
    return np.frombuffer(bytes(line), np.uint8), places


def _pad_bytes(pad: PadValue, dtype: torch.dtype) -> bytes:
    bits = pad_words(0 if isinstance(pad, Pad) else pad, dtype)
    assert bits is not None
    return bytes([pad is EDGE]) + np.array(bits, word_dtype(dtype.itemsize)).tobytes()


def read_pads(batch: TensorDictBase, forms: Mapping[Path, FieldForm], path: Path, call: str) -> RowPads | None:
    """`pads_of_rows` of one field."""
    return pads_of_rows(batch, [forms[path]], call).get(path) if path in forms else None


def pads_of_rows(batch: TensorDictBase, forms: Iterable[FieldForm], call: str) -> dict[Path, RowPads]:
    """The pads of those fields whose pad is PER_ROW or ANY_ZERO, or differs in its kind from row to row. `forms` come
    from `read_layouts`. One synchronisation on CUDA for ANY_ZERO."""
    wanted = [form for form in forms if form.dtype is not None and (PER_ROW in form.pads or ANY_ZERO in form.pads)]
    if not wanted:
        return {}
    found: dict[Path, RowPads] = {}
    for part in _parts(batch, call):
        alike = {other.path: other.pads_by_bits for other in part.schema.forms}
        own = [form for form in wanted if alike.get(form.path) == form.pads_by_bits]
        signs = _signs_in(part, [form.path for form in own if ANY_ZERO in form.pads], call)
        for form in own:
            column = _columns_of(part, form.path, call)
            assert form.dtype is not None
            pads = column[:, 1:].clone(memory_format=torch.contiguous_format).view(form.dtype).view(-1)
            edge = column[:, 0] == 1 if EDGE in form.pads else None
            read = RowPads(pads, edge, signs.get(form.path))
            if not _is_same(found.setdefault(form.path, read), read):
                raise _several_pads(form, form, call)
    return found


def _is_same(one: RowPads, other: RowPads) -> bool:
    """Whether the pads of rows have the same bits."""
    pairs = [(words(one.pads), words(other.pads)), (one.edge, other.edge), (one.signs, other.signs)]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _columns_of(part: _Part, path: Path, call: str) -> Tensor:
    """The columns of a field in the pad table of a part."""
    place = _pad_line(part.schema.forms)[1][path]
    table = part.pads
    if not isinstance(table, Tensor) or table.dim() != 2 or table.shape[1] < place.stop:
        raise LayoutError(f'{call}: the row pads of field "{show(path)}" are missing. {INTACT}')
    return table[:, place].to(torch.uint8)


def _signs_in(part: _Part, paths: Collection[Path], call: str) -> dict[Path, Tensor]:
    """The signs of fields with ANY_ZERO pads. One synchronisation on CUDA if there are any."""
    if not paths:
        return {}
    lines, ends = _lines_of(part, call)
    (numbers, bounds), axes = _on_host([lines], [ends]), part.schema.axes
    nbytes = [-(-width // 8) for _, width, _ in axes]
    signs = {
        path: np.zeros((bounds[0].size - 1, nbytes[at]), np.uint8)
        for path, at, _ in _signed(part.schema.forms, axes)
        if path in paths
    }
    _read_lines(part.schema, numbers[0], bounds[0], signs, call)
    return {path: torch.from_numpy(bits) for path, bits in signs.items()}


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
    schema = parts[0].schema if len(parts) == 1 else _merged([part.schema for part in parts], call)
    parts = [part for part in parts if part.schema.axes]
    tables = [_lines_of(part, call) for part in parts]
    first = _first_fields(batch, schema)
    read = _on_host([lines for lines, _ in tables], [ends for _, ends in (*tables, *first.values())])
    layouts: dict[str, RowLayout] = {}
    for part, (lines, _), numbers, ends in zip(parts, tables, *read, strict=False):
        found = _read_lines(part.schema, numbers, ends, {}, call)
        for (name, _, anchor), own in zip(part.schema.axes, found, strict=True):
            device = first[name][0].device if name in first else lines.device
            cpu = device.type == "cpu"
            layout = layout_of_core(own, anchor) if cpu else layout_of_table(own.width, own.table, device, anchor)
            known = layouts.setdefault(name, layout)
            if known is not layout and known != layout:
                raise LayoutError(
                    f'{call}: layout "{name}" of another batch, with other rows or widths, replaced the layout of '
                    f"this one, as update() does; expected fields of the same rows. {_RESTORE_FIRST}"
                )
    for (name, (_, offsets)), own in zip(first.items(), read[1][len(tables) :], strict=True):
        if own.tobytes() == layouts[name].row_offsets.tobytes():
            layouts[name].__dict__["offsets"] = offsets  # so that arithmetic between old and new fields works
    return schema, layouts


class _Part(NamedTuple):
    """A part of LAYOUTS; `spans` and `pads` are what the batch holds in their place."""

    schema: Schema
    spans: Any
    pads: Any


def _parts(batch: TensorDictBase, call: str) -> list[_Part]:
    """The parts of a nested batch: one, and another one for each `update` with a nested batch of other fields."""
    carried = entry_at(batch, (LAYOUTS,))
    parts: list[Any] = [*fields_of(carried).values()] if is_sub_batch(carried) else []
    held = [dict(fields_of(part).items()) if is_sub_batch(part) else {} for part in parts]
    if not held or not all(entries.keys() & {"schema", "spans"} for entries in held):
        raise LayoutError(
            f'{call}: the entry "{LAYOUTS}" was not written by nest_batch_by_mask, which reserves this name. '
            "Rename the field."
        )
    found: list[_Part] = []
    for entries in held:
        schema = _schema_of(entries.get("schema"))
        if schema is None:
            raise LayoutError(
                f"{call}: the batch was joined from batches of different widths or fields; expected one schema. "
                "Pad the batches to one width and nest them again, or restore each part before torch.cat."
            )
        found.append(_Part(schema, entries.get("spans"), entries.get("pads")))
    return found


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


def _first_fields(batch: TensorDictBase, schema: Schema) -> dict[str, tuple[Tensor, Tensor]]:
    """The values and the offsets of the first jagged field of each layout."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, paths in _paths_of(schema):
        for path in paths:
            value = entry_at(batch, path)
            held = held_by(value) if isinstance(value, Tensor) else None
            if held is not None:
                found[name] = held
                break
    return found


@lru_cache(256)
def _paths_of(schema: Schema) -> list[tuple[str, list[Path]]]:
    """The padded fields of each layout."""
    return [
        (name, [form.path for form in schema.forms if form.kind == "padded" and form.layout == name])
        for name, _, _ in schema.axes
    ]


def _lines_of(part: _Part, call: str) -> tuple[Tensor, Tensor]:
    """The lines of a part, uint8 [n, LINE], and the first line of each row."""
    held = held_by(part.spans) if isinstance(part.spans, Tensor) else None
    if held is None:
        raise LayoutError(
            f"{call}: the span table is no longer a jagged tensor; a single row was taken by an integer index, or the "
            "entry was replaced. Take one row with a list: maskpack.nesting.take(batch, [i])."
        )
    lines, ends = held
    if lines.shape[1:] != (abi.LINE,):
        raise _changed(part.schema, 0, call)
    return lines.detach().to(torch.uint8).contiguous(), ends


def _on_host(lines: Sequence[Tensor], ends: Sequence[Tensor]) -> tuple[list[Words], list[IntArray]]:
    """Lines and bounds on the host, with one synchronisation for all of a device."""
    away = [own.view(torch.int32).view(-1) for own in lines if own.device.type != "cpu"]
    read = to_host([*away, *ends])
    sent = iter(read)
    here = [own.numpy() if own.device.type == "cpu" else next(sent).astype(np.int32) for own in lines]
    return [own.view(np.uint8).reshape(-1, abi.LINE) for own in here], read[len(away) :]


def _read_lines(
    schema: Schema, lines: Words, ends: IntArray, signs: Mapping[Path, Words], call: str
) -> list[native.HostLayout]:
    """The layouts of a part. The bits of `signs` are written."""
    widths = [width for _, width, _ in schema.axes]
    places = [(at if is_signed else -1, signs.get(path)) for path, at, is_signed in _signed(schema.forms, schema.axes)]
    found = native.read_lines(lines, np.ascontiguousarray(ends), widths, places)
    if isinstance(found, int):
        raise _changed(schema, found, call)
    return found


def _changed(schema: Schema, layout: int, call: str) -> LayoutError:
    return LayoutError(
        f'{call}: the span table of layout "{schema.axes[layout][0]}" was changed by arithmetic. {INTACT}'
    )
