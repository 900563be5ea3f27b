"""What a nested batch has beside its fields: the entry LAYOUTS, which tensordict indexes, joins, updates and casts like
any other.

    types 3f0c             the schema of the fields that were nested together, for all rows
    mask 3f0c sequence     the mask of a layout as bits, uint8 [B, width / 8]
    pads 3f0c              the pads of the fields, uint8 [B, K]
    signs 3f0c             the signs of their zeros, jagged uint8 [B, j]

The number is a digest of the types: batches of one kind have equal keys, and `update` with a batch of other fields adds
its own; what both say of one layout or field must be equal. A row of the pads is a byte MARK, which arithmetic changes,
and a record for each padded field (core/pads.py); those whose first byte is SIGNS have their signs in the same row of
the signs. Both are in the order of the paths of fields. Bytes survive casts to all dtypes that hold 0 to 255. A mask
whose row has another length than the values of the row is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import DTYPES, Words, from_words, host_words, odd_bools
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path, show
from maskpack.core.pads import Pads
from maskpack.core.tree import Node, entry_at, fields_of, has, is_sub_batch, need_batch, unflatten
from maskpack.errors import LayoutError
from maskpack.layout.jagged import Jagged, alike_in, jagged_from
from maskpack.layout.row_layout import (
    RowLayout,
    anchored,
    core_layout,
    host_spans,
    layout_of_core,
    layout_of_table,
    shared_offsets,
)
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema, name_of_jagged

INTACT = "Restore from the batch that nest_batch_by_mask returned; indexing, chunk, cat and casts are supported."
MARK, SIGNS = 0xA5, 2
_RESTORE_FIRST = (
    "Restore both first, then update the padded batch: unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))."
)
_LOSSY = {torch.bool, *(dtype for name, dtype in DTYPES.items() if name.startswith("float8"))}
"""Dtypes that do not hold 0 to 255."""


class Types(NamedTuple):
    """The types of fields that were nested together: their schema; and of each layout that is columns of another one,
    its name, the other one, and its first column there."""

    schema: Schema
    parts: tuple[tuple[str, str, int], ...]


class Nested(NamedTuple):
    """What LAYOUTS says of a batch.

    Attributes:
        root: the batch dims of the padded batch.
        forms: its entries, by path.
        layouts: its layouts by name, on the devices of their fields.
        pads: those of its padded fields.
        keys: equal for batches of one kind.
    """

    root: Node
    forms: Mapping[Path, FieldForm]
    layouts: Mapping[str, RowLayout]
    pads: Mapping[Path, Pads]
    keys: tuple[Any, ...]


NOTHING = Nested(Node((), None), {}, {}, {}, ())
"""Of a batch that is not nested."""


@lru_cache(256)
def _types(schema: Schema, parts: tuple[tuple[str, str, int], ...]) -> Types:
    """What a schema and its layouts say of types alone, whatever the order of keys, and which jagged fields share their
    offsets."""
    forms = [
        FieldForm(f.path, f.kind, layout, f.ragged_dim, f.dtype, f.node and replace(f.node, device=None))
        for f in sorted(schema.forms, key=lambda form: form.path)
        if (layout := name_of_jagged(f.path) if f.kind == "jagged" else f.layout) is not None or f.node is not None
    ]
    own = Schema(replace(schema.root, device=None), tuple(forms), tuple(sorted(schema.axes)))
    return Types(own, tuple(sorted(parts)))


@lru_cache(256)
def _places(types: Types) -> tuple[str, dict[Path, slice], int]:
    """The digest of types, the record of each padded field in a row of the pads, and the bytes of such a row."""
    root, forms, axes = types.schema.root, types.schema.forms, types.schema.axes
    fields = [(f.path, f.kind, f.layout, f.ragged_dim, f.dtype, f.node and f.node.more_dims) for f in forms]
    said = root.more_dims, axes, types.parts, fields
    places: dict[Path, slice] = {}
    end = 1
    for form in _padded(types):
        assert form.dtype is not None
        places[form.path] = slice(end, end := end + 1 + form.dtype.itemsize)
    return sha256(repr(said).encode()).hexdigest()[:16], places, end


def _padded(types: Types) -> list[FieldForm]:
    return [form for form in types.schema.forms if form.kind == "padded"]


# -------------------------------------------------------------------- writing


def layouts_entry(
    schema: Schema,
    layouts: Mapping[str, RowLayout],
    pads: Mapping[Path, Pads],
    flat: Collection[Path],
    rows: int,
    home: torch.device,
) -> TensorDict:
    """The LAYOUTS entry of a batch with tensors on `home`, from its layouts and pads; `flat` are the fields with one
    number for each token."""
    numbers = {id(layouts[name]): name for name, _, _ in schema.axes}
    wholes = [(name, *layouts[name].__dict__.get("part_of", (None, 0))) for name, _, _ in schema.axes]
    types = _types(schema, tuple([(name, numbers[id(own)], low) for name, own, low in wholes if id(own) in numbers]))
    masks = [name for name, own, _ in wholes if id(own) not in numbers]
    digest, places, size = _places(types)
    table: Words = np.empty((rows, size), np.uint8)
    table[:, 0] = MARK
    for path, place in places.items():
        table[:, place] = pads[path].records[:, : place.stop - place.start]
    floats = [form for form in _padded(types) if form.dtype is not None and form.dtype.is_floating_point]
    signs, ends = _signs_out(table, places, pads, rows)
    arrays = [*(native.mask_bits(core_layout(layouts[name])) for name in masks), table, signs, ends]
    *bits, line, values, offsets = _tensors_on(arrays, home)
    root = Node(None if schema.root.more_dims is None else (), schema.root.device)
    stored: Any = NonTensorData(types, batch_size=root.batch_size(rows), device=schema.root.device)
    entries = [((f"mask {digest} {name}",), own) for name, own in zip(masks, bits, strict=True)]
    entries += [((f"pads {digest}",), line), ((f"types {digest}",), stored)]
    if any(form.path in flat for form in floats):
        lengths = np.diff(ends) if ends[-1] else np.zeros(1, np.int64)
        least, most = int(lengths.min()), int(lengths.max())
        entries.append(((f"signs {digest}",), jagged_from(values, offsets, least, most)))
    return unflatten(root, entries, rows)


def _signs_out(
    table: Words, places: Mapping[Path, slice], pads: Mapping[Path, Pads], rows: int
) -> tuple[Words, IntArray]:
    """The signs of all fields, row by row, and where rows begin, int64 [B + 1]; the records of rows that have any say
    so in the table then."""
    used: list[Any] = [np.zeros((rows, 0), np.bool_)]
    signs: list[Words] = [np.zeros((rows, 0), np.uint8)]
    for path, place in places.items():
        own = pads[path].signs
        if own is not None:
            signs.append(np.broadcast_to(own, (rows, own.shape[1])))
            some: Any = own.any(1)
            used.append(np.broadcast_to(some[:, None], signs[-1].shape))
            table[np.broadcast_to(some, rows), place.start] = SIGNS
    kept = np.concatenate(used, 1)
    return np.concatenate(signs, 1)[kept], cumulated(kept.sum(1))


def _tensors_on(arrays: Sequence[Words], device: torch.device) -> list[Tensor]:
    """New arrays as tensors on a device: in the same memory, or with one copy from pinned memory to a GPU."""
    parts = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        # an empty array may have any strides
        return [part if part.numel() else torch.empty(part.shape, dtype=part.dtype, device=device) for part in parts]
    sizes = [-(-part.nbytes // 8) * 8 for part in parts]

    def views(line: Tensor) -> list[Tensor]:
        own = [place[: part.nbytes] for place, part in zip(torch.split(line, sizes), parts, strict=True)]
        return [place.view(part.dtype).view(part.shape) for place, part in zip(own, parts, strict=True)]

    line = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for place, part in zip(views(line), parts, strict=True):
        place.copy_(part)
    return views(line.to(device, non_blocking=True))


# -------------------------------------------------------------------- reading


def read_nested(batch: TensorDictBase, call: str) -> Nested:
    """What LAYOUTS says of a nested batch, checked. One synchronisation on CUDA.

    Raises LayoutError if the batch has none, or if an operation on the batch made it invalid.
    """
    need_batch(batch, call)
    if not has(batch, LAYOUTS):
        raise LayoutError(
            f'{call}: the batch has no entry "{LAYOUTS}", so it was not nested by nest_batch_by_mask, or select() '
            f'dropped it. Nest the batch first, or select the entry too: batch.select("responses", "_maskpack").'
        )
    held = entry_at(batch, (LAYOUTS,))
    entries: dict[str, Any] = dict(fields_of(held).items()) if is_sub_batch(held) else {}
    types = {key[6:]: _types_in(key, entries[key], call) for key in entries if key.startswith("types ")}
    if not types:
        raise _foreign(call)
    forms = _all_forms(types.values(), call)
    root = next(iter(types.values())).schema.root
    parts = {key: _tensors_of(key, value, call) for key, value in entries.items() if not key.startswith("types ")}
    first = _first_fields(batch, types.values())
    ends_of = [*(ends for _, ends in parts.values()), *(own.offsets for own in first.values())]
    offsets = {id(ends): ends for ends in ends_of if ends is not None}
    tensors: dict[Any, Tensor] = {key: values for key, (values, _) in parts.items()} | offsets
    read = host_words(tensors, tensors)
    lines = {key: _bytes(read[key], values.dtype, key, call) for key, (values, _) in parts.items()}
    of_rows = [len(line) for key, line in lines.items() if not key.startswith("signs ")]
    rows = batch.batch_size[0] if batch.batch_dims else max(of_rows, default=0)
    nodes = {(): root} | {path: form.node for path, form in forms.items() if form.node is not None}
    for path, node in nodes.items():
        if node.more_dims is not None:
            _check_dims(batch, path, node.more_dims, rows, call)
    layouts: dict[str, RowLayout] = {}
    for digest, said in types.items():
        _add_layouts(layouts, digest, said, lines, rows, call)
    alike = alike_in(layouts) if first else {}
    for name, own in first.items():
        layout = layouts[name]
        if own.values.device.type != "cpu":
            layout = layouts[name] = layout_of_table(layout.width, host_spans(layout), own.values.device, layout.anchor)
        if np.array_equal(read[id(own.offsets)], layout.row_offsets):
            if not alike[name]:  # or equal rows of other batches would have those of another axis
                shared_offsets(layout.row_offsets, layout.device, own.offsets)
            layout.__dict__["offsets"] = own.offsets  # so that arithmetic between old and new fields works
    pads: dict[Path, Pads] = {}
    for digest, said in types.items():
        ends = parts.get(f"signs {digest}", (None, None))[1]
        begins = np.zeros(rows + 1, np.int64) if ends is None else np.array(read[id(ends)])
        for path, own in _pads_in(digest, said, lines, begins, rows, call).items():
            known = pads.setdefault(path, own)
            if known is not own and not known.is_same(own, rows):
                raise _twice(forms[path], forms[path], call)
    keys = *types, *(said.schema.root.names for said in types.values()), *(form.node for form in forms.values())
    return Nested(root, forms, layouts, pads, keys)


def _types_in(key: str, value: Any, call: str) -> Types:
    """The types of fields that were nested together; of joined batches, those of the first."""
    rows: list[Any] = value.tolist() if isinstance(value, NonTensorStack) else [getattr(value, "data", None)]
    if not rows or not isinstance(rows[0], Types) or key != f"types {_places(rows[0])[0]}":
        raise _foreign(call)
    return rows[0]


def _all_forms(types: Collection[Types], call: str) -> dict[Path, FieldForm]:
    """The forms of all entries. A sub-batch has the dims of the first batch, which is the one that was updated."""
    forms: dict[Path, FieldForm] = {}
    for form in [form for said in types for form in said.schema.forms]:
        known = forms.setdefault(form.path, form)
        one, other = ((own.kind, own.layout, own.ragged_dim, own.dtype) for own in (known, form))
        if one != other and known.node is form.node is None:
            raise _twice(known, form, call)
    return forms


def _check_dims(batch: TensorDictBase, path: Path, dims: tuple[int, ...], rows: int, call: str) -> None:
    """Raises LayoutError if a batch or sub-batch has no rows, or fields without the dims that it had behind them."""
    held: Any = entry_at(batch, path)
    if not is_sub_batch(held):
        return
    shapes = {path: (*held.batch_size[:1], *dims)}
    for name, value in fields_of(held).items() if dims else ():
        if isinstance(value, Tensor) and not value.is_nested:
            shapes[(*path, name)] = tuple(value.shape)[: 1 + len(dims)]
    for own, shape in shapes.items():
        if shape != (rows, *dims):
            raise LayoutError(
                f'{call}: "{show(own)}" has the dims {shape}, in a batch that was nested with {(rows, *dims)}; '
                f"expected these. {INTACT}"
            )


def _first_fields(batch: TensorDictBase, types: Collection[Types]) -> dict[str, Jagged]:
    """The first jagged field of each layout."""
    found: dict[str, Jagged] = {}
    for form in [form for said in types for form in _padded(said)]:
        if form.layout is not None and form.layout not in found:
            value = entry_at(batch, form.path)
            own = Jagged.of(value) if isinstance(value, Tensor) else None
            if own is not None:
                found[form.layout] = own
    return found


def _tensors_of(key: str, value: Any, call: str) -> tuple[Tensor, Tensor | None]:
    """The bytes of an entry, and where its rows begin if it is jagged."""
    own = Jagged.of(value) if isinstance(value, Tensor) else None
    values, ends = (value, None) if own is None else own[:2]
    if not isinstance(values, Tensor) or values.is_nested or values.dtype in _LOSSY or values.layout != torch.strided:
        raise _changed(key, call)
    if values.dim() != (2 if ends is None else 1) or (ends is None) == key.startswith("signs "):
        raise LayoutError(
            f'{call}: the {key.split()[0]} of "{LAYOUTS}" are no longer a line for each row; a single row was taken by '
            "an integer index, or the entry was replaced. Take one row with a list: maskpack.nesting.take(batch, [i])."
        )
    return values, ends


def _bytes(line: Words, dtype: torch.dtype, key: str, call: str) -> Words:
    """Bytes that may have been cast to another dtype."""
    if dtype == torch.uint8:
        return np.ascontiguousarray(line)
    cast = from_words(np.ascontiguousarray(line), dtype)
    cast = cast.real if dtype.is_complex else cast
    found = cast.to(torch.uint8)
    if not torch.equal(found.to(cast.dtype), cast):
        raise _changed(key, call)
    return found.contiguous().numpy()


def _add_layouts(
    layouts: dict[str, RowLayout], digest: str, types: Types, lines: Mapping[str, Words], rows: int, call: str
) -> None:
    """Adds the layouts of fields that were nested together, on the host."""
    parts = {name: (whole, low) for name, whole, low in types.parts}
    for name, width, anchor in sorted(types.schema.axes, key=lambda axis: axis[0] in parts):
        whole, low = parts.get(name, ("", 0))
        bits = lines.get(f"mask {digest} {name}")
        if name in parts and whole in layouts and low + width <= layouts[whole].width:
            own = anchored(layouts[whole].narrow(low, low + width), anchor)
        elif bits is None or bits.shape != (rows, -(-width // 8)):
            seen = "missing" if bits is None else f"{tuple(bits.shape)} bytes"
            raise LayoutError(
                f'{call}: the mask of layout "{name}" is {seen}; expected {rows} rows of {-(-width // 8)} bytes. '
                f"{INTACT}"
            )
        else:
            own = layout_of_core(native.layout_of_bits(bits, width), anchor)
        known = layouts.setdefault(name, own)
        if known is not own and (known != own or known.anchor != own.anchor):
            raise LayoutError(
                f'{call}: layout "{name}" of another batch, with other rows or widths, lies beside the layout of this '
                f"one, as after update(); expected fields of the same rows. {_RESTORE_FIRST}"
            )


def _pads_in(
    digest: str, types: Types, lines: Mapping[str, Words], begins: IntArray, rows: int, call: str
) -> dict[Path, Pads]:
    """The pads of fields that were nested together, of which each moves `begins` [B + 1], where its signs are."""
    table, signs, (_, places, size) = lines.get(f"pads {digest}"), lines.get(f"signs {digest}"), _places(types)
    if table is None or table.shape != (rows, size) or begins.size != rows + 1:
        seen = "missing" if table is None else f"{tuple(table.shape)} bytes"
        raise LayoutError(f"{call}: the pads of rows are {seen}; expected {rows} rows of {size} bytes. {INTACT}")
    if rows and begins[-1] == 0 and (table == table[:1]).all() and (alike := _alike(types, table[0].tobytes())):
        return alike
    ends = np.array(begins[1:])
    widths = {name: width for name, width, _ in types.schema.axes}
    found: dict[Path, Pads] = {}
    fits = not (table[:, 0] != MARK).any()
    for form in _padded(types):
        records = table[:, places[form.path]]
        own: Pads | None = Pads(records, records.shape[1] - 1)
        if some := np.flatnonzero(records[:, 0] == SIGNS).tolist():
            own = _with_signs(own, np.array(some), rows, signs, begins, widths[form.layout or ""])
        fits = fits and own is not None and _fits(own, form, widths[form.layout or ""])
        if own is not None:
            found[form.path] = own.shortest()
    if not fits or (begins[:-1] != ends).any():
        raise _changed(f"pads {digest}", call)
    return found


def _fits(pads: Pads, form: FieldForm, width: int) -> bool:
    odd = form.dtype == torch.bool and odd_bools(pads.records[:, 1])
    return not odd and not (pads.records[:, 0] > abi.EDGE).any() and pads.fits(width)


@lru_cache(256)
def _alike(types: Types, line: bytes) -> dict[Path, Pads] | None:
    """The pads of fields, if they are this line in all rows; None if they do not fit, or if there are signs."""
    row = np.frombuffer(line, np.uint8)[None]
    found = {path: Pads(row[:, place], place.stop - place.start - 1) for path, place in _places(types)[1].items()}
    fits = row[0, 0] == MARK and all(_fits(found[form.path], form, 0) for form in _padded(types))
    return found if fits else None


def _with_signs(
    pads: Pads, some: IntArray, rows: int, signs: Words | None, begins: IntArray, width: int
) -> Pads | None:
    """Pads with signs in some rows, from `begins` on, which is moved behind them; None if there are too few."""
    nbytes = -(-width // 8)
    if signs is None or begins.min() < 0 or (begins[some] + nbytes > signs.size).any():
        return None
    out: Words = np.zeros((rows, 1 + pads.size + nbytes), np.uint8)
    out[:, : 1 + pads.size] = pads.records
    out[some, 0] = abi.WORD
    out[some, 1 + pads.size :] = signs[begins[some, None] + np.arange(nbytes)]
    begins[some] += nbytes
    return Pads(out, pads.size)


def with_dims(node: Node, padded: Node | None) -> Node:
    """A batch, which is nested, with the dims that it had when it was padded, and their names."""
    return node if padded is None else replace(node, more_dims=padded.more_dims, names=padded.names)


def pads_of(nested: Nested, path: Path, values: Tensor, layout: RowLayout | None, call: str) -> Pads:
    """The pads of a padded field with the packed `values` [T, *F], which may have been cast. Raises LayoutError if
    these are no values of the field, or too few for `layout`."""
    form = nested.forms[path]
    assert form.dtype is not None
    pads, tokens = nested.pads[path].cast(form.dtype, values.dtype), 0 if layout is None else layout.num_tokens
    if (pads.signs is not None and values.dim() != 1) or values.dim() < form.ragged_dim or values.shape[0] < tokens:
        raise LayoutError(
            f'{call}: field "{show(path)}" is jagged, of values {tuple(values.shape)}; expected the dims and the '
            f"tokens that it was nested with. {INTACT}"
        )
    return pads


# -------------------------------------------------------------------- errors


def _foreign(call: str) -> LayoutError:
    return LayoutError(
        f'{call}: the entry "{LAYOUTS}" was not written by nest_batch_by_mask, which reserves this name. Rename the '
        "field."
    )


def _twice(one: FieldForm, other: FieldForm, call: str) -> LayoutError:
    ways = [f'{form.dtype} under "{form.layout}"' for form in (one, other)]
    return LayoutError(
        f'{call}: field "{show(one.path)}" was nested twice, as {" and as ".join(ways)}, and update() replaced one by '
        f"the other; expected one form and equal pads. {_RESTORE_FIRST}"
    )


def _changed(key: str, call: str) -> LayoutError:
    what = key if key.startswith("mask ") else "the pads of rows"
    return LayoutError(f"{call}: {what} of the batch changed, by arithmetic or a cast that loses bytes. {INTACT}")
