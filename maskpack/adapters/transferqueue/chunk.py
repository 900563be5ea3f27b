"""Chunks: the samples of one put as a PackedBatch, and the fields that a get makes of pieces of them.

    fields of a put, [B] rows --> columns: jagged rows, scalars, objects --> chunk --> pieces: some fields, some rows
                                                                                            |
    fields of a get, any rows <-- rows of all pieces, in the order of the call <-- decoded -+

TransferQueue stores rows: whether a field was put as a padded or as a jagged tensor does not matter, and each row comes
back with its own shape. So rows of one dim or more become jagged along their first dim. Only the fields of a padded
batch, one with an attention mask that has zeros, stay as they are: the mask says which of their values are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, cumulated
from maskpack.core.objects import Objects, items_of, stack_of
from maskpack.core.pads import PAD_TOKEN_ID, PER_ROW
from maskpack.core.tensors import out_of_memory
from maskpack.core.tree import Node, dense_stack, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.options import not_strict
from maskpack.fields.registry import MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import held_by, is_regular, jagged_all
from maskpack.nesting.schema import Schema
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.decode import decoded
from maskpack.packed.values import Values, packed_rows

_PADDED = MaskNestingRegistry(
    {
        name: replace(spec, pad=[PER_ROW if pad is PAD_TOKEN_ID else pad for pad in spec.pads])
        for name, spec in RL_FIELDS.items()
    },
    RL_FIELDS.axes,
)
"""RL_FIELDS for rows whose pad token nobody names."""
_HINTS = {str(name): spec.hints for name, spec in RL_FIELDS.items()}


@lru_cache(256)
def fields_of(schema: Schema) -> frozenset[str]:
    """The names of the fields of a chunk."""
    return frozenset(form.path[0] for form in schema.forms)


def kind_of(chunk: PackedBatch) -> Any:
    """Chunks of one kind have rows that `PackedBatch.cat` takes together as they are: padded ones are of one width."""
    return chunk.schema, tuple(chunk.frames.items()) if _has_padding(chunk.schema) else None


@lru_cache(256)
def _has_padding(schema: Schema) -> bool:
    return any(form.kind == "padded" or form.reason is not None for form in schema.forms)


# -------------------------------------------------------------------- put: rows into a chunk


def packed(data: TensorDictBase, rows: int, call: str) -> tuple[PackedBatch, dict[str, dict[str, Any]]]:
    """The chunk of `rows` samples, and the schema of their fields as TransferQueue tells it to its controller.

    Raises LayoutError for a field that is not one value for each sample, and for a lazy stack of rows that differ in
    their shapes or dtypes.
    """
    fields = {name: _field(name, value, rows, call) for name, value in dense_stack(data, call).items()}
    chunk = _padded(fields, rows)
    if chunk is None:
        chunk = packed_rows({name: field.column for name, field in fields.items()}, rows, _HINTS, call)
    return chunk, {name: field.told for name, field in fields.items()}


@lru_cache(256)
def _registry_of(names: frozenset[str]) -> MaskNestingRegistry:
    """_PADDED, in which the fields that it does not know have no mask."""
    return _PADDED | {name: MaskNestingSpec(None) for name in names if _PADDED.find((name,)) is None}


def _padded(fields: Mapping[str, _Field], rows: int) -> PackedBatch | None:
    """The chunk of a padded batch; None for other samples."""
    mask = fields["attention_mask"].given if "attention_mask" in fields else None
    if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2 or bool(mask.all()):
        return None
    given = {name: field.given for name, field in fields.items()}
    if any(isinstance(value, Tensor) and value.is_nested and not is_regular(value) for value in given.values()):
        return None
    entries = {name: value if isinstance(value, Tensor) else stack_of(value) for name, value in given.items()}
    try:
        with not_strict():
            return compress(TensorDict(entries, batch_size=[rows]), registry=_registry_of(frozenset(fields)))
    except LayoutError:  # widths that do not fit the mask: the rows are stored as they are
        return None


class _Field(NamedTuple):
    """One value for each row.

    Attributes:
        given: the tensor as it was put, on the host; or a list of objects.
        column: its rows.
        told: its schema, as TransferQueue tells it to its controller.
    """

    given: Any
    column: Values | Objects
    told: dict[str, Any]


def _field(name: str, value: Any, rows: int, call: str) -> _Field:
    told: dict[str, Any] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    if not isinstance(value, Tensor):
        items = _objects(name, value, rows, call)
        return _Field(items, Objects(items, 1).stowed(), told)
    if value.size(0) != rows:
        raise LayoutError(
            f'{call}: field "{name}" has {value.size(0)} rows; expected {rows}, one for each sample. Give as many rows '
            "of each field as there are samples."
        )
    value = value.detach().cpu()
    if value.is_nested:
        return _nested(value)
    if value.layout != torch.strided:
        items = list(value.unbind())
        return _Field(items, Objects(items, 1).stowed(), told)
    told |= {"dtype": value.dtype, "shape": value.shape[1:] or torch.Size([1]), "is_non_tensor": False}
    if value.dim() == 1:
        return _Field(value, Values(value), told)
    turned = value.dim() == 3 and (spec := _PADDED.find((name,))) is not None and spec.ragged_dim == -1
    line = value.transpose(1, 2) if turned else value
    return _Field(value, Values.of_equal(line, 2 if turned else 1), told)


def _nested(value: Any) -> _Field:
    given, told = value, {"dtype": value.dtype, "is_nested": True, "is_non_tensor": False}
    values, offsets = held_by(value) or (None, None)
    bounds = None if offsets is None else offsets.to(torch.int64).numpy()
    if values is not None and bounds is not None and (bounds[0], bounds[-1]) == (0, values.shape[0]):
        column, more = Values(values, np.diff(bounds)), tuple(values.shape[1:])
        shapes = [(length, *more) for length in np.diff(bounds).tolist()]
    else:
        rows: list[Tensor] = list(value.unbind())
        shapes = [tuple(row.shape) for row in rows]
        if len(shapes[0]) == 2 and len({shape[0] for shape in shapes}) == 1:
            lengths = np.array([length for _, length in shapes], np.int64)
            column = Values(torch.cat([row.T for row in rows]), lengths, 2)
        else:
            given, column = rows, Objects(rows, 1).stowed()
    return _Field(given, column, told | {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes})


def _objects(name: str, value: Any, rows: int, call: str) -> list[Any]:
    if type(value) is NonTensorStack and len(value) == rows:
        return items_of(value)
    if isinstance(value, NonTensorData) and isinstance(value.data, list | np.ndarray):
        value = cast("Any", value.data)
    elif isinstance(value, NonTensorData) or not is_tensor_collection(value):
        value = None
    if value is None or len(value) != rows:
        raise LayoutError(
            f'{call}: field "{name}" is {said(value)}; expected {rows} values, one for each sample. Pass a list or a '
            "NonTensorStack of them."
        )
    return items_of(value) if isinstance(value, NonTensorStack) else [value[row] for row in range(rows)]


# -------------------------------------------------------------------- get: pieces into fields


class Piece(NamedTuple):
    """Rows of a chunk, and their places among the rows of the call."""

    chunk: PackedBatch
    places: Sequence[int] | IntArray


def assembled(pieces: Iterable[Piece], fields: Sequence[str], rows: int) -> TensorDict:
    """The fields of a call. Each field is in pieces that have all of the rows together.

    Rows of one dim or more are a jagged tensor, if torch can hold them in one; fields of equal row lengths share their
    offsets. Scalars are a tensor [B]. All others are a NonTensorStack.
    """
    alike: dict[Any, list[Piece]] = {}
    for piece in pieces:
        alike.setdefault(kind_of(piece.chunk), []).append(piece)
    parts: dict[str, list[tuple[Values | list[Any], IntArray]]] = {name: [] for name in fields}
    for own in alike.values():
        places = np.concatenate([np.asarray(piece.places, np.int64) for piece in own])
        order = np.argsort(places)
        chunk = PackedBatch.cat([piece.chunk for piece in own])
        columns = _columns(chunk if (np.diff(places) > 0).all() else chunk.take(order))
        for name, column in columns.items():
            parts[name].append((column, places[order]))
    out: dict[str, Any] = {}
    jagged: dict[bytes, list[tuple[str, Tensor]]] = {}
    for name, having in parts.items():
        column = having[0][0] if len(having) == 1 else _merged(having, rows)
        if not isinstance(column, Values):
            out[name] = stacked(column)
            continue
        out[name] = column.values
        if column.lengths is not None:
            jagged.setdefault(column.lengths.tobytes(), []).append((name, column.values))
    for lengths_of, same in jagged.items():
        lengths = np.frombuffer(lengths_of, np.int64)
        bounds = torch.from_numpy(cumulated(lengths))
        low, high = int(lengths.min(initial=0)), int(lengths.max(initial=0))
        names, values = [name for name, _ in same], [value for _, value in same]
        out |= dict(zip(names, jagged_all(values, bounds, low, high), strict=True))
    return unflatten(Node((), None), [((name,), value) for name, value in out.items()], rows)


def stacked(rows: Sequence[Any]) -> Any:
    """Rows as TransferQueue gives them back: a jagged tensor, else a nested one, else a NonTensorStack."""
    if not all(isinstance(row, Tensor) and row.dtype == rows[0].dtype for row in rows):  # torch would cast them
        return stack_of(rows)
    if all(row.dim() == 0 for row in rows):
        return torch.stack(list(rows))
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(list(rows), layout=layout)
        except (RuntimeError, TypeError) as error:
            if out_of_memory(error) is not None:
                raise
            continue  # rows of different dims
    return stack_of(rows)


def _columns(chunk: PackedBatch) -> dict[str, Values | list[Any]]:
    """The rows of each field; of one whose ragged dim is not the first, and of objects, as a list."""
    columns: dict[str, Values | list[Any]] = {}
    for form, values in zip(chunk.tensors, decoded(chunk, chunk.tensors, False).values(), strict=True):
        if form.layout is not None and form.kind == "jagged":
            column = Values(values, chunk.layouts[form.layout].lengths)
        else:
            column = Values.of_equal(values) if values.dim() > 1 else Values(values)
        turned = form.kind == "jagged" and form.ragged_dim == 2
        columns[form.path[0]] = [row.T.contiguous() for row in column.rows()] if turned else column
    for path, objects in chunk.objects.items():
        columns[path[0]] = objects.data if objects.bare else objects.restored()
    return columns


def _merged(parts: Sequence[tuple[Values | list[Any], IntArray]], rows: int) -> Values | list[Any]:
    """The rows of a field in the order of the call, from chunks of several kinds."""
    line: list[Any] = [None] * rows
    for column, places in parts:
        for place, row in zip(places.tolist(), column.rows() if isinstance(column, Values) else column, strict=True):
            line[place] = row
    tensors = [column for column, _ in parts if isinstance(column, Values)]
    forms = {(column.values.dtype, column.values.shape[1:], column.lengths is None) for column in tensors}
    if len(tensors) < len(parts) or len(forms) > 1 or tensors[0].lengths is None:
        return line
    return Values(torch.cat(line), np.array([row.shape[0] for row in line], np.int64))
