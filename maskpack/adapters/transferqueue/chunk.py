"""Chunks: the samples of one put, packed together, and the fields that a get makes of pieces of them.

    fields of a put, [B] rows --> columns: jagged rows, scalars, objects --> Chunk --> pieces: some fields, some rows
                                                                                            |
    fields of a get, any rows <-- rows of all pieces, in the order of the call <-- decoded -+

TransferQueue stores rows: whether a field was put as a padded or as a jagged tensor does not matter, and each row comes
back with its own shape. So rows of one dim or more become jagged along their first dim. Only the fields of a padded
batch, one with an attention mask that has zeros, stay as they are: the mask says which of their values are padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.bits import Words, word_dtype
from maskpack.core.index import IntArray, cumulated
from maskpack.core.objects import Objects, Stowed, items_of, mapped, stack_of
from maskpack.core.pads import PAD_TOKEN_ID, PER_ROW
from maskpack.core.tensors import out_of_memory
from maskpack.core.tree import Node, dense_stack, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.options import not_strict
from maskpack.fields.registry import MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import is_regular, jagged_all, offsets_of
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.decode import decoded
from maskpack.packed.rows import Values, packed_rows

_PADDED = MaskNestingRegistry(
    {
        name: replace(spec, pad=[PER_ROW if pad is PAD_TOKEN_ID else pad for pad in spec.pads])
        for name, spec in RL_FIELDS.items()
    },
    RL_FIELDS.axes,
)
"""RL_FIELDS for rows whose pad token nobody names."""
_HINTS = {str(name): spec.hints for name, spec in RL_FIELDS.items()}
LARGE = 1 << 16
"""Bytes from which on a tensor inside a Python object is stored once for all samples that hold it."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Samples that are packed together.

    Attributes:
        packed: their fields.
        turned: the fields whose rows [F, L] are stored as [L, F], because L differs from row to row.
        shares: whether there are Shared tensors in its objects.
    """

    packed: PackedBatch
    turned: frozenset[str] = frozenset()
    shares: bool = False

    @cached_property
    def fields(self) -> frozenset[str]:
        return frozenset(form.path[0] for form in self.packed.schema.forms)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Chunks of one kind can be joined."""
        return self.packed.schema, self.turned

    def __len__(self) -> int:
        return len(self.packed)

    def select(self, fields: Iterable[str]) -> Chunk:
        wanted = frozenset(fields)
        if wanted >= self.fields:
            return self
        return Chunk(self.packed.select(*sorted(wanted)), self.turned & wanted, self.shares)

    def take(self, rows: Sequence[int] | IntArray) -> Chunk:
        return replace(self, packed=self.packed.take(np.array(rows, np.int64)))

    def own(self) -> Chunk:
        """The chunk without the memory of rows that it was taken from."""
        return replace(self, packed=self.packed.own())

    @cached_property
    def joins(self) -> bool:
        """Whether `cat` joins it with others of its kind: its rows have no padding."""
        return all(form.kind != "padded" and form.reason is None for form in self.packed.schema.forms)

    @staticmethod
    def cat(parts: Sequence[tuple[Chunk, Sequence[int] | None]]) -> Chunk:
        """Rows of chunks of one kind: those at some indices, or all."""
        taken = [chunk if rows is None else chunk.take(rows) for chunk, rows in parts]
        packed = PackedBatch.cat([chunk.packed for chunk in taken])
        return Chunk(packed, taken[0].turned, any(chunk.shares for chunk in taken))


class Piece(NamedTuple):
    """Rows of a chunk, and their places among the rows of the call."""

    chunk: Chunk
    places: Sequence[int] | IntArray


# -------------------------------------------------------------------- put: rows into a chunk


def packed(data: TensorDictBase, call: str) -> tuple[Chunk, dict[str, dict[str, Any]]]:
    """The chunk of some samples, and the schema of their fields as TransferQueue tells it to its controller.

    Raises LayoutError for a field that is not one value for each sample, and for a lazy stack of rows that differ in
    their shapes or dtypes.
    """
    data, rows = dense_stack(data, call), data.batch_size[0]
    columns = {name: _column(name, value, rows, call) for name, value in data.items()}
    schema = {name: column.schema() for name, column in columns.items()}
    chunk = _padded(columns, rows)
    if chunk is None:
        values = {name: column.rows() for name, column in columns.items()}
        turned = frozenset(name for name, column in columns.items() if column.turned)
        chunk = Chunk(packed_rows(values, rows, _HINTS, call), turned)
    return chunk, schema


@lru_cache(256)
def _registry_of(names: frozenset[str]) -> MaskNestingRegistry:
    """_PADDED, in which the fields that it does not know have no mask."""
    return _PADDED | {name: MaskNestingSpec(None) for name in names if _PADDED.find((name,)) is None}


def _padded(columns: Mapping[str, _PutField], rows: int) -> Chunk | None:
    """The chunk of a padded batch; None for other samples."""
    if not _is_padded(columns):
        return None
    batch = TensorDict({name: column.entry() for name, column in columns.items()}, batch_size=[rows])
    try:
        with not_strict():
            return Chunk(compress(batch, registry=_registry_of(frozenset(columns))))
    except LayoutError:  # widths that do not fit the mask: the rows are stored as they are
        return None


def _is_padded(columns: Mapping[str, _PutField]) -> bool:
    mask = columns.get("attention_mask")
    if mask is None or not isinstance(mask.given, Tensor) or mask.given.is_nested or mask.given.dim() != 2:
        return False
    return not any(column.turned and column.given.is_nested for column in columns.values()) and not bool(
        mask.given.all()
    )


class _PutField(NamedTuple):
    """One value for each row.

    Attributes:
        given: the tensor as it was put, on the host; or a list of objects.
        values: the values [T, *F] of rows of one dim or more, one after the other; None for scalars and objects.
        lengths: int64 [B], those of the rows.
        turned: as in Chunk.
        as_nested: whether the rows were put as a nested tensor.
    """

    given: Any
    values: Tensor | None = None
    lengths: IntArray | None = None
    turned: bool = False
    as_nested: bool = False

    def entry(self) -> Any:
        return self.given if isinstance(self.given, Tensor) else stack_of(self.given)

    def rows(self) -> Values | Objects:
        if not isinstance(self.given, Tensor):
            return Objects(self.given, 1).stowed()
        return Values(self.given if self.values is None else self.values, self.lengths)

    def schema(self) -> dict[str, Any]:
        if not isinstance(self.given, Tensor):
            rows = self.given if self.as_nested else None
            one = None if rows is None else rows[0]
            told = {"dtype": getattr(one, "dtype", None), "shape": getattr(one, "shape", None)}
            told |= {"is_nested": self.as_nested, "is_non_tensor": rows is None}
            return told if rows is None else told | {"per_sample_shapes": [tuple(row.shape) for row in rows]}
        told = {"dtype": self.given.dtype, "is_nested": self.as_nested, "is_non_tensor": False}
        if not self.as_nested:
            return told | {"shape": self.given.shape[1:] or torch.Size([1])}
        assert self.values is not None
        assert self.lengths is not None
        more = tuple(self.values.shape[1:])
        lengths: list[int] = self.lengths.tolist()
        shapes = [(*more, length) for length in lengths] if self.turned else [(length, *more) for length in lengths]
        return told | {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes}


def _column(name: str, value: Any, rows: int, call: str) -> _PutField:
    if not isinstance(value, Tensor):
        return _PutField(_objects(name, value, rows, call))
    if value.size(0) != rows:
        raise LayoutError(
            f'{call}: field "{name}" has {value.size(0)} rows; expected {rows}, one for each sample. Give as many rows '
            "of each field as there are samples."
        )
    value = value.detach().cpu()
    if value.is_nested:
        return _nested(value, rows)
    if value.layout != torch.strided:
        return _PutField(list(value.unbind()))
    if value.dim() == 1:
        return _PutField(value)
    turned = value.dim() == 3 and (spec := _PADDED.find((name,))) is not None and spec.ragged_dim == -1
    line = value.transpose(1, 2) if turned else value
    lengths = np.array([line.shape[1]] * rows, np.int64)
    return _PutField(value, line.reshape(rows * line.shape[1], *line.shape[2:]), lengths, turned)


def _nested(value: Any, rows: int) -> _PutField:
    bounds = offsets_of(value).to(torch.int64).numpy() if is_regular(value) else None
    if bounds is not None and bounds[0] == 0 and bounds[-1] == value.values().shape[0]:
        return _PutField(value, value.values(), np.diff(bounds), as_nested=True)
    parts = list(value.unbind())
    alike = len({(part.shape[0], part.dim()) for part in parts}) == 1
    if parts[0].dim() == 2 and alike:
        lengths = np.array([part.shape[1] for part in parts], np.int64)
        return _PutField(value, torch.cat([part.T for part in parts]), lengths, turned=True, as_nested=True)
    return _PutField(parts, as_nested=True)


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


def assembled(pieces: Sequence[Piece], fields: Sequence[str], rows: int) -> TensorDict:
    """The fields of a call. Each field is in pieces that have all of the rows together.

    Rows of one dim or more are a jagged tensor, if torch can hold them in one; fields of equal row lengths share their
    offsets. Scalars are a tensor [B]. All others are a NonTensorStack.
    """
    read = [(piece, _columns_of(piece)) for piece in _together(pieces)]
    jagged: dict[bytes, list[tuple[str, Tensor]]] = {}
    out: dict[str, Any] = dict.fromkeys(fields)
    for name in fields:
        having = [(piece, columns[name]) for piece, columns in read if name in columns]
        tensors = [column for _, column in having if isinstance(column, Values)]
        alike = len({(part.values.dtype, part.values.shape[1:], part.lengths is None) for part in tensors}) == 1
        if len(tensors) < len(having) or not alike or any(name in piece.chunk.turned for piece, _ in having):
            out[name] = stacked(_rows(having, name, rows))
            continue
        values, lengths = _ordered(tensors, [piece.places for piece, _ in having], rows)
        if lengths is None:
            out[name] = values
        else:
            jagged.setdefault(lengths.tobytes(), []).append((name, values))
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


def _together(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, with those of one kind, and of one width if they have padding, as one, and the rows of each in the
    order of the call."""
    alike: dict[Any, list[Piece]] = {}
    for piece in pieces:
        frames = None if piece.chunk.joins else tuple(piece.chunk.packed.frames.items())
        alike.setdefault((piece.chunk.kind, frames), []).append(piece)
    out: list[Piece] = []
    for own in alike.values():
        places = np.concatenate([np.asarray(piece.places, np.int64) for piece in own])
        order = np.argsort(places)
        chunk = Chunk.cat([(piece.chunk, None) for piece in own])
        in_order = bool((np.diff(places) > 0).all())
        out.append(Piece(chunk if in_order else chunk.take(order), places[order]))
    return out


def _columns_of(piece: Piece) -> dict[str, Values | list[Any]]:
    """The rows of each field of a piece, with its tensors decoded; objects as a list."""
    batch, rows = piece.chunk.packed, len(piece.chunk)
    forms = [form for form in batch.schema.forms if form.dtype is not None]
    padded = [form for form in forms if form.kind == "padded"]
    tensors = decoded(batch, [form for form in forms if form.kind != "padded"], True)
    tensors |= decoded(batch, padded, False) if padded else {}
    columns: dict[str, Values | list[Any]] = {}
    for form in forms:
        values, lengths = tensors[form.path], None
        if form.kind == "jagged":
            assert form.layout is not None
            lengths = batch.layouts[form.layout].lengths
        elif values.dim() > 1:
            lengths = np.full(rows, values.shape[1], np.int64)
            values = values.reshape(rows * values.shape[1], *values.shape[2:])
        columns[form.path[0]] = Values(values, lengths)
    return columns | {
        path[0]: objects.data if objects.bare else objects.restored() for path, objects in batch.objects.items()
    }


def _ordered(
    parts: Sequence[Values], places: Sequence[Sequence[int] | IntArray], rows: int
) -> tuple[Tensor, IntArray | None]:
    """The rows of all parts in the order of the call, and their lengths."""
    order = np.concatenate([np.asarray(own, np.int64) for own in places])
    if len(parts) == 1 and bool((order == np.arange(rows)).all()):
        return parts[0]
    back = np.empty(rows, np.int64)
    back[order] = np.arange(rows)
    if parts[0].lengths is None:
        return Values.cat(parts).take(back)
    found = [row for part in parts for row in part.rows()]
    lengths = np.concatenate([cast("IntArray", part.lengths) for part in parts])
    return torch.cat([found[row] for row in back.tolist()]), lengths[back]


def _rows(parts: Sequence[tuple[Piece, Values | list[Any]]], name: str, rows: int) -> list[Any]:
    """The rows of a field one by one, in the order of the call."""
    out: list[Any] = [None] * rows
    for piece, column in parts:
        found: Iterable[Any] = column.rows() if isinstance(column, Values) else column
        turned = name in piece.chunk.turned
        for place, row in zip(piece.places, found, strict=True):
            out[place] = row.T.contiguous() if turned else row
    return out


# -------------------------------------------------------------------- large tensors in objects


@dataclass(frozen=True)
class Shared:
    """Stands for the bits of a tensor that is stored by its content.

    Attributes:
        digest: BLAKE2b of the bits, 20 bytes.
        size: bytes of a word.
        dtype, shape, tensor: as in Stowed.
    """

    digest: bytes
    size: int
    dtype: str
    shape: tuple[int, ...]
    tensor: bool


def parted(chunk: Chunk) -> tuple[Chunk, dict[bytes, Words]]:
    """The chunk without the large tensors inside its Python objects, and their bits by digest; equal ones are read
    once."""
    found: dict[bytes, Words] = {}
    known: dict[int, bytes] = {}

    def leaf(item: Any) -> Any:
        if not isinstance(item, Stowed) or item.words.nbytes < LARGE:
            return item
        digest = known.get(id(item.words))
        if digest is None:
            bits = np.ascontiguousarray(item.words)
            digest = hashlib.blake2b(bits.view(np.uint8).data, digest_size=20).digest()
            known[id(item.words)] = digest
            found.setdefault(digest, bits)
        return Shared(digest, item.words.itemsize, item.dtype, item.shape, item.tensor)

    if all(entry.bare for entry in chunk.packed.objects.values()):
        return chunk, {}
    objects = _with_leaves(chunk.packed.objects, leaf)
    if not found:
        return chunk, {}
    return replace(chunk, packed=replace(chunk.packed, objects=objects), shares=True), found


def digests(chunk: Chunk) -> set[bytes]:
    """The digests of the large tensors of a chunk."""
    found: set[bytes] = set()

    def note(item: Any) -> Any:
        if isinstance(item, Shared):
            found.add(item.digest)
        return item

    for objects in chunk.packed.objects.values() if chunk.shares else ():
        mapped([] if objects.bare else objects.data, note, rows=True)
    return found


def whole(pieces: Iterable[Piece], words: Mapping[bytes, Words]) -> list[Piece]:
    """The pieces with the bits of their large tensors."""
    stowed: dict[Shared, Stowed] = {}

    def leaf(item: Any) -> Any:
        if not isinstance(item, Shared):
            return item
        if item not in stowed:
            bits = words[item.digest].reshape(-1).view(word_dtype(item.size))
            stowed[item] = Stowed(bits, item.dtype, item.shape, item.tensor)
        return stowed[item]

    out: list[Piece] = []
    for piece in pieces:
        batch = piece.chunk.packed
        chunk = Chunk(replace(batch, objects=_with_leaves(batch.objects, leaf)), piece.chunk.turned)
        out.append(Piece(chunk, piece.places))
    return out


def _with_leaves(objects: Mapping[Any, Objects], leaf: Any) -> dict[Any, Objects]:
    changed = {path: mapped(entry.data, leaf, rows=True) for path, entry in objects.items() if not entry.bare}
    return {path: replace(entry, data=changed.get(path, entry.data)) for path, entry in objects.items()}
