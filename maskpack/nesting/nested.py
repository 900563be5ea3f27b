"""What a nested batch has beside its fields: the entry LAYOUTS, of plain tensors, which tensordict indexes, joins,
updates and casts like all others.

    key                                                     entry
    ["response", 512, 0]                                    the mask of a layout, of this width and anchor, as bits
    [["responses"], "padded", "response", 1, "torch.int64"] the pads of a field: a record for each row (core/pads.py)
    [["agent"], "node", [3]]                                a sub-batch with a batch dim behind its rows: its name

Keys are types, as JSON, so that batches of one kind have equal keys. Entries are data, uint8 [B, n]; names of dims and
the records of floats with one number for each token, of which some have signs behind their word, are jagged [B, j].
A byte a row of no meaning stands for what has no data: fields without a pad, sub-batches without more dims.
Bytes survive casts to all dtypes that hold 0 to 255. What tensordict cannot see, a mask whose row has another length
than the values of the row, is an error here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import DTYPES, Words, from_words, host_words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path, show
from maskpack.core.pads import Pads
from maskpack.core.tensors import need_batch
from maskpack.core.tree import Node, entry_at, fields_of, has, is_sub_batch, unflatten
from maskpack.errors import LayoutError
from maskpack.layout.jagged import held_by, jagged_from
from maskpack.layout.row_layout import RowLayout, core_layout, layout_of_core, layout_of_table
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema

INTACT = "Restore from the batch that nest_batch_by_mask returned; indexing, chunk, cat and casts are supported."
_RESTORE_FIRST = (
    "Restore both first, then update the padded batch: unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))."
)
_LOSSY = {torch.bool, *(dtype for name, dtype in DTYPES.items() if name.startswith("float8"))}
"""Dtypes that do not hold 0 to 255."""


class Nested(NamedTuple):
    """What LAYOUTS says of a batch.

    Attributes:
        root: the batch dims of the padded batch.
        forms: its padded, flat and jagged fields, and its sub-batches, by path.
        layouts: its layouts by name, on the devices of their fields.
        pads: those of its padded fields.
        keys: equal for batches of one kind.
    """

    root: Node
    forms: Mapping[Path, FieldForm]
    layouts: Mapping[str, RowLayout]
    pads: Mapping[Path, Pads]
    keys: tuple[str, ...]


NOTHING = Nested(Node((), None), {}, {}, {}, ())
"""Of a batch that is not nested."""


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
    arrays: dict[str, Words] = {}
    ends: dict[str, IntArray] = {}
    for name, width, anchor in schema.axes:
        arrays[json.dumps([name, width, anchor])] = native.mask_bits(core_layout(layouts[name]))
    for form in (FieldForm((), "node", node=schema.root), *schema.forms):
        if form.kind not in ("dense", "object"):
            key, padded = _key_of(form), form.kind == "padded"
            records = pads[form.path].records if padded else np.zeros((1, 1), np.uint8)
            arrays[key] = np.broadcast_to(records, (rows, records.shape[1]))
            if padded and form.path in flat and form.dtype is not None and form.dtype.is_floating_point:
                arrays[key], ends[key] = _by_rows(arrays[key], pads[form.path])
            elif form.node is not None and form.node.more_dims:
                text = json.dumps(form.node.names[1:]).encode() if form.node.names else b""
                arrays[key] = np.frombuffer(text * rows, np.uint8)
                ends[key] = np.arange(rows + 1, dtype=np.int64) * len(text)
    places = list(dict.fromkeys(end.tobytes() for end in ends.values()))
    lines = copies_of([*arrays.values(), *(np.frombuffer(end, np.int64) for end in places)], home)
    offsets = dict(zip(places, lines[len(arrays) :], strict=True))
    root = Node(None if schema.root.more_dims is None else (), schema.root.device)
    entries: list[tuple[Path, Any]] = []
    for key, line in zip(arrays, lines, strict=False):
        if key in ends:
            lengths = np.diff(ends[key])
            least, most = int(lengths.min(initial=lengths.max(initial=0))), int(lengths.max(initial=0))
            line = jagged_from(line, offsets[ends[key].tobytes()], least, most)
        entries.append(((key,), line))
    return unflatten(root, entries, rows)


@lru_cache(4096)
def _key_of(form: FieldForm) -> str:
    if form.node is not None:
        return json.dumps([form.path, "node", form.node.more_dims])
    return json.dumps([form.path, form.kind, form.layout, form.ragged_dim, str(form.dtype)])


def _by_rows(records: Words, pads: Pads) -> tuple[Words, IntArray]:
    """The bytes of records, those without signs shorter, and where each begins, int64 [B + 1]."""
    rows, most = records.shape
    if pads.signs is None:
        return np.array(records).reshape(-1), np.arange(rows + 1, dtype=np.int64) * most
    lengths = np.where(np.broadcast_to(pads.signs.any(1), rows), most, 1 + pads.size)
    return records[np.arange(most) < lengths[:, None]], cumulated(lengths)


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
    types = _types_of(tuple(entries), call)
    first = _first_fields(batch, types)
    parts = {key: _tensors_of(key, value, call) for key, value in entries.items()}
    offsets = {id(ends): ends for _, ends in (*parts.values(), *first.values()) if ends is not None}
    bytes_of = {key: values for key, (values, _) in parts.items()}
    on_host: dict[Any, Words] = host_words({**bytes_of, **offsets}, [*bytes_of, *offsets])
    lines = {key: _bytes(on_host[key], values.dtype, key, call) for key, values in bytes_of.items()}
    rows = batch.batch_size[0] if batch.batch_dims else max((len(lines[key]) for key in types.axes), default=0)
    layouts: dict[str, RowLayout] = {}
    for key, (name, width, anchor) in types.axes.items():
        _check_shape(key, lines[key], rows, -(-width // 8), call)
        own = native.layout_of_bits(lines[key], width)
        device = first[name][0].device if name in first else bytes_of[key].device
        cpu = device.type == "cpu"
        layouts[name] = layout_of_core(own, anchor) if cpu else layout_of_table(width, own.table, device, anchor)
    for name, (_, ends) in first.items():
        if np.array_equal(on_host[id(ends)], layouts[name].row_offsets):
            layouts[name].__dict__["offsets"] = ends  # so that arithmetic between old and new fields works
    pads: dict[Path, Pads] = {}
    for key, form in types.padded.items():
        assert form.dtype is not None
        assert form.layout is not None
        ends = parts[key][1]
        least = 1 + form.dtype.itemsize
        records = lines[key] if ends is None else _whole(lines[key], on_host[id(ends)], least, layouts[form.layout])
        _check_shape(key, records, rows, least if ends is None else max(least, records.shape[-1]), call)
        if (records[:, 0] > abi.EDGE).any():
            raise _changed(key, call)
        pads[form.path] = Pads(records, form.dtype.itemsize)
    nodes: dict[Path, FieldForm] = {}
    for key, form in types.named.items():
        ends = parts[key][1]
        text = lines[key][: 0 if ends is None or not rows else on_host[id(ends)][1]].tobytes()
        nodes[form.path] = _with_names(key, form, text, call)
    root = nodes.pop((), FieldForm((), "node", node=types.root)).node
    assert root is not None
    return Nested(root, {**types.forms, **nodes}, layouts, pads, tuple(entries))


def _with_names(key: str, form: FieldForm, text: bytes, call: str) -> FieldForm:
    """A sub-batch with the names of its dims behind the rows."""
    assert form.node is not None
    assert form.node.more_dims is not None
    names: Any = None
    if text:
        try:
            names = json.loads(text)
        except ValueError:
            raise _changed(key, call) from None
        if not isinstance(names, list) or len(cast("list[Any]", names)) != len(form.node.more_dims):
            raise _changed(key, call)
    return replace(form, node=replace(form.node, names=None if names is None else (None, *names)))


def with_dims(node: Node, padded: Node | None) -> Node:
    """A batch, which is nested, with the dims behind its rows that it had when it was padded, and their names."""
    if padded is None:
        return node
    names = (node.names or (None,))[0], *(padded.names or (None,) * (1 + len(padded.more_dims or ())))[1:]
    named = padded.more_dims is not None and any(name is not None for name in names)
    return replace(node, more_dims=padded.more_dims, names=names if named else None)


def pads_of(nested: Nested, path: Path, dtype: torch.dtype) -> Pads:
    """The pads of a padded field, which may have been cast."""
    before = nested.forms[path].dtype
    assert before is not None
    return nested.pads[path].cast(before, dtype)


class _Types(NamedTuple):
    """What the keys of LAYOUTS say: the name, width and anchor of each mask, the forms of padded fields and of batches
    with dims behind their rows, by their keys; the forms of all entries, and the batch."""

    axes: Mapping[str, tuple[str, int, int]]
    padded: Mapping[str, FieldForm]
    named: Mapping[str, FieldForm]
    forms: Mapping[Path, FieldForm]
    root: Node


@lru_cache(256)
def _types_of(keys: tuple[str, ...], call: str) -> _Types:
    axes: dict[str, tuple[str, int, int]] = {}
    padded: dict[str, FieldForm] = {}
    named: dict[str, FieldForm] = {}
    forms: dict[Path, FieldForm] = {}
    for key in keys:
        found = _type_of(key)
        if isinstance(found, FieldForm):
            known = forms.setdefault(found.path, found)
            if known != found and "node" not in (known.kind, found.kind):  # a node keeps the dims of the first batch
                raise LayoutError(
                    f'{call}: field "{show(known.path)}" was nested twice, as {_said(known)} and as {_said(found)}, '
                    f"and update() replaced one by the other; expected one form. {_RESTORE_FIRST}"
                )
            if found.kind == "padded":
                padded[key] = found
            elif known is found and found.node is not None and found.node.more_dims:
                named[key] = found
        elif found is not None:
            if any(name == found[0] for name, _, _ in axes.values()):
                raise LayoutError(
                    f'{call}: layout "{found[0]}" of another batch, of another width, lies beside the layout of this '
                    f"one, as after update(); expected fields of the same rows. {_RESTORE_FIRST}"
                )
            axes[key] = found
    root = forms.pop((), None)
    if root is None or root.node is None or None in map(_type_of, keys):
        raise LayoutError(
            f'{call}: the entry "{LAYOUTS}" was not written by nest_batch_by_mask, which reserves this name. '
            "Rename the field."
        )
    names = {name for name, _, _ in axes.values()}
    for form in padded.values():
        if form.layout not in names:
            raise LayoutError(f'{call}: the mask of layout "{form.layout}" is missing. {INTACT}')
    return _Types(axes, padded, named, forms, root.node)


@lru_cache(4096)
def _type_of(key: str) -> FieldForm | tuple[str, int, int] | None:
    """What a key says; None for a key that is not of LAYOUTS."""
    try:
        path, *more = json.loads(key)
        if isinstance(path, str):
            width, anchor = more
            return path, int(width), int(anchor)
        if more[0] == "node":
            dims = None if more[1] is None else tuple(map(int, more[1]))
            return FieldForm(tuple(path), "node", node=Node(dims, None))
        kind, layout, ragged_dim, dtype = more
        return FieldForm(tuple(path), kind, layout, ragged_dim, DTYPES[dtype.removeprefix("torch.")])
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _said(form: FieldForm) -> str:
    return f'{form.dtype} under "{form.layout}"'


def _first_fields(batch: TensorDictBase, types: _Types) -> dict[str, tuple[Tensor, Tensor]]:
    """The values and the offsets of the first jagged field of each layout."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for form in types.padded.values():
        if form.layout is not None and form.layout not in found:
            value = entry_at(batch, form.path)
            held = held_by(value) if isinstance(value, Tensor) else None
            if held is not None:
                found[form.layout] = held
    return found


def _tensors_of(key: str, value: Any, call: str) -> tuple[Tensor, Tensor | None]:
    """The bytes of an entry, and where its rows begin if it is jagged."""
    held = held_by(value) if isinstance(value, Tensor) else None
    values, ends = held if held is not None else (value, None)
    if not isinstance(values, Tensor) or values.is_nested or values.dtype in _LOSSY or values.layout != torch.strided:
        raise _changed(key, call)
    if values.dim() != (2 if ends is None else 1):
        raise LayoutError(
            f"{call}: {_name_of(key)} is no longer one line a row; a single row was taken by an integer index, or the "
            "entry was replaced. Take one row with a list: maskpack.nesting.take(batch, [i])."
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


def _whole(line: Words, ends: IntArray, least: int, layout: RowLayout) -> Words:
    """Records of `least` bytes, and with signs behind them, [B, n]; [0] for others."""
    lengths, most = np.diff(ends), least + -(-layout.width // 8)
    if ends[-1] != line.size or not np.isin(lengths, (least, most)).all():
        return np.zeros((0, 1), np.uint8)
    most = int(lengths.max(initial=least))
    records: Words = np.zeros((lengths.size, most), np.uint8)
    records[np.arange(most) < lengths[:, None]] = line
    return records


def _check_shape(key: str, line: Words, rows: int, size: int, call: str) -> None:
    if line.shape != (rows, size):
        raise LayoutError(
            f"{call}: {_name_of(key)} has {line.shape[0]} rows of {line.shape[-1]} bytes; expected {rows} of {size}, "
            f"as the batch. {INTACT}"
        )


def _changed(key: str, call: str) -> LayoutError:
    return LayoutError(f"{call}: {_name_of(key)} was changed, by arithmetic or a cast that loses bytes. {INTACT}")


def _name_of(key: str) -> str:
    """An entry of LAYOUTS for a message."""
    found = _type_of(key)
    if isinstance(found, FieldForm):
        return f'the record of field "{show(found.path)}"'
    return f'the mask of layout "{found[0] if found else key}"'
