"""Chunks: the samples of one put as a PackedBatch, and the fields that a get makes of pieces of them.

    fields of a put, [B] rows --> columns: jagged rows, scalars, objects --> chunk --> pieces: some fields, some rows
                                                                                            |
    fields of a get, any rows <-- rows of all pieces, in the order of the call <-- decoded -+

TransferQueue stores rows: whether a field was put as a padded or as a jagged tensor does not matter, and each row comes
back with its own shape. So rows of one dim or more become jagged along their first dim. Only the fields of a padded
batch, one with an attention mask that has zeros, stay as they are: the mask says which of their values are padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, cumulated
from maskpack.core.objects import Objects, items_of, stack_of
from maskpack.core.pads import PAD_TOKEN_ID, PER_ROW
from maskpack.core.tensors import need_tensor, out_of_memory
from maskpack.core.tree import Node, dense_stack, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.options import not_strict
from maskpack.fields.registry import MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import Jagged, jagged_all
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


def kind_of(chunk: PackedBatch) -> Any:
    """Chunks of one kind have rows that `PackedBatch.cat` takes together as they are: padded ones are of one width."""
    has_padding = any(form.kind == "padded" or form.reason is not None for form in chunk.schema.forms)
    return chunk.schema, tuple(chunk.frames.items()) if has_padding else None


# -------------------------------------------------------------------- put: rows into a chunk


def packed(data: TensorDictBase, rows: int, call: str) -> tuple[PackedBatch, dict[str, dict[str, Any]]]:
    """The chunk of `rows` samples, and the schema of their fields as TransferQueue tells it to its controller.

    Raises LayoutError for a field that is not one value for each sample, and for a lazy stack of rows that differ in
    their shapes or dtypes.
    """
    given = {name: _given(name, value, rows, call) for name, value in dense_stack(data, call).items()}
    columns = {name: _column(name, value) for name, value in given.items()}
    chunk = _padded(given, rows)
    if chunk is None:
        chunk = packed_rows(columns, rows, _HINTS, call)
    return chunk, {name: _told(value, columns[name]) for name, value in given.items()}


@lru_cache(256)
def _registry_of(names: frozenset[str]) -> MaskNestingRegistry:
    """_PADDED, in which the fields that it does not know have no mask."""
    return _PADDED | {name: MaskNestingSpec(None) for name in names if _PADDED.find((name,)) is None}


def _padded(given: Mapping[str, Tensor | list[Any]], rows: int) -> PackedBatch | None:
    """The chunk of a padded batch; None for other samples."""
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2 or bool(mask.all()):
        return None
    entries: dict[str, Any] = {
        name: value if isinstance(value, Tensor) and (not value.is_nested or Jagged.of(value)) else stack_of(value)
        for name, value in given.items()
    }
    try:
        with not_strict():
            return compress(TensorDict(entries, batch_size=[rows]), registry=_registry_of(frozenset(given)))
    except LayoutError:  # widths that do not fit the mask: the rows are stored as they are
        return None


def _given(name: str, value: Any, rows: int, call: str) -> Tensor | list[Any]:
    """One value for each row: a tensor on the host, or a list of objects."""
    if isinstance(value, NonTensorData) and isinstance(value.data, list | np.ndarray):
        value = cast("Any", value.data)
    one_for_all = isinstance(value, NonTensorData)
    count = None if one_for_all else value.size(0) if isinstance(value, Tensor) else len(value)
    if count != rows:
        seen = said(value) if one_for_all else f"{count} rows"
        raise LayoutError(
            f'{call}: field "{name}" has {seen}; expected {rows}, one for each sample. Pass a tensor, a list or a '
            "NonTensorStack of them."
        )
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.jagged):
            return list(value.detach().cpu().unbind())
        need_tensor(value, f'field "{name}"', call)
        return value.detach().cpu()
    return items_of(value) if isinstance(value, NonTensorStack) else [value[row] for row in range(rows)]


def _column(name: str, value: Tensor | list[Any]) -> Values | Objects:
    """The rows of a field."""
    if isinstance(value, list):
        return Objects(value, 1).stowed()
    if value.is_nested:
        own = Jagged.of(value)
        if own is not None and own.dim <= 2:
            bounds = own.offsets.to(torch.int64).numpy()
            return Values(own.values[bounds[0] : bounds[-1]], np.diff(bounds), own.dim)
        rows = value.unbind()
        if rows[0].dim() == 2 and len({row.shape[0] for row in rows}) == 1:  # [F, L]
            lengths = np.array([row.shape[1] for row in rows], np.int64)
            return Values(torch.cat([row.T for row in rows]), lengths, 2)
        return Objects(list(rows), 1).stowed()
    if value.dim() == 1:
        return Values(value)
    turned = value.dim() == 3 and (spec := _PADDED.find((name,))) is not None and spec.ragged_dim == -1
    return Values.of_equal(value.transpose(1, 2) if turned else value, 2 if turned else 1)


def _told(value: Tensor | list[Any], column: Values | Objects) -> dict[str, Any]:
    """The schema of a field as TransferQueue tells it to its controller."""
    if isinstance(value, list):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    told: dict[str, Any] = {"dtype": value.dtype, "is_nested": value.is_nested, "is_non_tensor": False}
    if not value.is_nested:
        return told | {"shape": value.shape[1:] or torch.Size([1])}
    rows = column.data if isinstance(column, Objects) else _rows(column)
    shapes = [tuple(row.shape) for row in rows]
    return told | {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes}


def _rows(column: Values | list[Any]) -> Sequence[Any]:
    """The rows of a field, in the shapes in which they were put."""
    if isinstance(column, list):
        return column
    return [row.T.contiguous() for row in column.rows()] if column.ragged_dim == 2 else column.rows()


# -------------------------------------------------------------------- get: pieces into fields


class Piece(NamedTuple):
    """Rows of a chunk, and their places among the rows of the call, int64 [n]."""

    chunk: PackedBatch
    places: IntArray


def by_kind(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces, those of one kind as one."""
    alike: defaultdict[Any, list[Piece]] = defaultdict(list[Piece])
    for piece in pieces:
        alike[kind_of(piece.chunk)].append(piece)
    return [
        Piece(PackedBatch.cat([piece.chunk for piece in own]), np.concatenate([piece.places for piece in own]))
        for own in alike.values()
    ]


def assembled(pieces: Iterable[Piece], fields: Sequence[str], rows: int) -> TensorDict:
    """The fields of a call. Each field is in pieces that have all of the rows together.

    Rows of one dim or more are a jagged tensor, if torch can hold them in one; fields of equal row lengths share their
    offsets. Scalars are a tensor [B]. All others are a NonTensorStack.
    """
    parts: dict[str, list[tuple[Values | list[Any], IntArray]]] = {name: [] for name in fields}
    for chunk, places in by_kind(pieces):
        order = np.argsort(places)
        for name, column in _columns(chunk if (np.diff(places) > 0).all() else chunk.take(order)).items():
            parts[name].append((column, places[order]))
    out: dict[str, Any] = {}
    jagged: defaultdict[bytes, list[str]] = defaultdict(list[str])
    for name, having in parts.items():
        column = having[0][0] if len(having) == 1 else _merged(having, rows)
        if isinstance(column, list) or column.ragged_dim == 2:
            out[name] = stacked(_rows(column))
            continue
        out[name] = column.values
        if column.lengths is not None:
            jagged[column.lengths.tobytes()].append(name)
    for line, names in jagged.items():
        lengths = np.frombuffer(line, np.int64)
        bounds = torch.from_numpy(cumulated(lengths))
        low, high = int(lengths.min(initial=0)), int(lengths.max(initial=0))
        out |= dict(zip(names, jagged_all([out[name] for name in names], bounds, low, high), strict=True))
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
        except (RuntimeError, TypeError) as error:  # rows of different dims
            if out_of_memory(error) is not None:
                raise
    return stack_of(rows)


def _columns(chunk: PackedBatch) -> dict[str, Values | list[Any]]:
    """The rows of each field."""
    columns: dict[str, Values | list[Any]] = {}
    for form, values in zip(chunk.tensors, decoded(chunk, chunk.tensors, False).values(), strict=True):
        if form.layout is not None and form.kind == "jagged":
            column = Values(values, chunk.layouts[form.layout].lengths, form.ragged_dim)
        else:
            column = Values.of_equal(values) if values.dim() > 1 else Values(values)
        columns[form.path[0]] = column
    for path, objects in chunk.objects.items():
        columns[path[0]] = objects.data if objects.bare else objects.restored()
    return columns


def _merged(parts: Sequence[tuple[Values | list[Any], IntArray]], rows: int) -> Values | list[Any]:
    """The rows of a field in the order of the call, from chunks of several kinds."""
    line: list[Any] = [None] * rows
    for column, places in parts:
        for place, row in zip(places.tolist(), _rows(column), strict=True):
            line[place] = row
    ragged = [own for own, _ in parts if isinstance(own, Values) and own.lengths is not None and own.ragged_dim == 1]
    if len(ragged) < len(parts) or len({(own.values.dtype, own.values.shape[1:]) for own in ragged}) > 1:
        return line
    return Values(torch.cat(line), np.array([len(row) for row in line], np.int64))
