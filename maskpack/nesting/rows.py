"""Rows of padded, nested and mixed batches, with every supported tensordict: not all of them index jagged fields.

    take [2, 0]    a | bb | ccc   ->   ccc | a           dense fields by tensordict, jagged ones by their row bounds
    cat            a | bb  and  ccc   ->   a | bb | ccc

Row bounds are read once for each call. Jagged fields with equal bounds share one offsets tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import list_of
from maskpack.core.bits import DTYPES, words
from maskpack.core.index import IntArray, Rows, cumulated, no_single_row, ranges, row_index
from maskpack.core.keys import Path, show
from maskpack.core.objects import (
    is_same,
    lazy_stack,  # type: ignore[reportUnknownVariableType]
)
from maskpack.core.tree import Node, dense_stack, flatten, has, is_lazy, is_object, need_batch, unflatten, with_names
from maskpack.errors import LayoutError, MaskpackError
from maskpack.layout.jagged import GAPS, Jagged, jagged_all, to_host, values_of
from maskpack.layout.row_layout import shared_offsets
from maskpack.nesting.schema import LAYOUTS

JaggedFields = dict[Path, Any]
_HOST = torch.device("cpu")
_INDEXED_AS_WORDS = {
    dtype for name, dtype in DTYPES.items() if name in ("uint16", "uint32", "uint64") or name.startswith("float8")
}
"""Dtypes that some versions and devices of torch cannot index."""


def take(batch: TensorDictBase, rows: Rows) -> TensorDict:
    """Some rows of a TensorDict with padded and jagged fields [B, ...], in the order given.

    `batch[rows]`, for every tensordict from 0.8 on: those before 0.15 may not index jagged fields, and so not what
    `nest_batch_by_mask` returns.

    Args:
        rows: a slice, indices (repeats allowed, negative from the end), or a bool mask [B].

    Raises:
        LayoutError: the batch has no rows, an index is out of range, or a nested field has gaps between its rows.
    """
    batch = _with_rows(batch, "take")
    no_single_row(rows, batch.batch_size[0], "take")
    index = row_index(rows, batch.batch_size[0], "take")
    return next(taken(batch, [index.tolist()], Caller("take", LayoutError)))


def cat(batches: Sequence[TensorDictBase]) -> TensorDict:
    """The rows of several TensorDicts with the same fields, one after the other.

    `torch.cat(batches)`, for every tensordict from 0.8 on. The dims have the names of the first batch.

    Raises:
        LayoutError: no batches; fields, dtypes, devices or padded widths that differ, also those of nested fields.
    """
    parts = [
        _with_rows(batch, "cat") for batch in list_of(batches, TensorDictBase, "cat", "Wrap dicts in TensorDicts.")
    ]
    if len({has(part, LAYOUTS) for part in parts}) > 1:
        raise LayoutError(
            "cat: some batches are nested and others padded; expected one kind. Nest or unnest all of them."
        )
    rows = np.arange(sum(part.batch_size[0] for part in parts))
    caller = Caller("cat", LayoutError, "batch", "Select the fields that all of them have.", "Cast, move or pad them.")
    return joined(parts, rows, caller)


def _with_rows(batch: Any, call: str) -> Any:
    need_batch(batch, call)
    if not batch.batch_dims:
        raise LayoutError(f"{call}: the batch has batch_size []; expected rows. Give it batch_size=[rows].")
    return dense_stack(batch, call)


# -------------------------------------------------------------------- for all who move rows


@dataclass(frozen=True)
class Caller:
    """Who moves rows, for messages.

    Attributes:
        call: the function that the user called.
        error: the class of its errors.
        part: the word for one of several batches.
        missing, unlike: the remedies for batches without a field, and for fields that do not fit together.
    """

    call: str
    error: type[MaskpackError]
    part: str = "batch"
    missing: str = ""
    unlike: str = ""

    def fault(self, text: str) -> MaskpackError:
        return self.error(f"{self.call}: {text}")


def taken(batch: TensorDictBase, parts: Sequence[Sequence[int]], caller: Caller) -> Iterator[TensorDict]:
    """The rows of each part. Only fields that tensordict and torch can index are left to them."""
    entries = flatten(batch)
    for path, value in entries:
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.jagged):
            raise caller.fault(
                f'field "{show(path)}" has the memory layout {value.layout}, whose rows cannot be taken; '
                "expected a strided or jagged tensor. Convert it with to_dense(), or leave it out."
            )
    jagged = {path: value for path, value in entries if _is_jagged(value)}
    odd = {path: value for path, value in entries if _is_odd(value)}
    dense = _without(batch, jagged | odd)
    order = [path for path, _ in entries]

    def part(rows: Sequence[int], own: JaggedFields) -> TensorDict:
        of_odd = {path: picked(value, index_of(rows, value.device)) for path, value in odd.items()}
        return with_names(_merged(_rows_of(dense, list(rows)), own | of_odd, order, len(rows)), batch)

    return (part(rows, own) for rows, own in zip(parts, jagged_parts(jagged, parts, caller), strict=True))


def joined(batches: Sequence[TensorDictBase], order: IntArray, caller: Caller) -> TensorDict:
    """The rows of all batches, one after the other, then in an order. The dims have the names of the first batch."""
    entries = [dict(flatten(batch)) for batch in batches]
    for own in entries[1:]:
        odd = set(own) ^ set(entries[0])
        if odd and all(path[0] == LAYOUTS for path in odd):
            raise caller.fault(
                f"a {caller.part} was nested with other padded widths, masks or dtypes than the first; expected the "
                "same. Nest them padded to one width, or join them packed: PackedBatch.cat([compress(batch), ...])."
            )
        if odd:
            raise caller.fault(
                f"fields {sorted(map(show, odd))} are not in every {caller.part}; expected the same fields. "
                f"{caller.missing}"
            )
    check_alike([Node.of(batch) for batch in batches], caller)
    for path in entries[0]:
        check_alike([own[path] for own in entries], caller, f'field "{show(path)}" of ')
    jagged = [{path: value for path, value in own.items() if _is_jagged(value)} for own in entries]
    odd = [path for path, value in entries[0].items() if _is_odd(value)]
    stacks = [path for path in entries[0] if any(is_object(own[path]) and is_lazy(own[path]) for own in entries)]
    single = _differing_objects(entries)
    apart = [{*own, *odd, *stacks} for own in jagged]
    dense: Any = torch.cat([cast("Any", _without(out, own, single)) for out, own in zip(batches, apart, strict=True)])
    fields = jagged_joined(jagged, order, caller)
    for path in odd:
        whole = torch.cat([words(own[path]) for own in entries])
        fields[path] = picked(whole, index_of(order, whole.device)).view(entries[0][path].dtype)
    for path in stacks:
        rows = [row for own in entries for row in own[path].unbind(0)]
        fields[path] = lazy_stack([rows[at] for at in order.tolist()])
    return with_names(_merged(_rows_of(dense, order.tolist()), fields, list(entries[0]), order.size), batches[0])


def jagged_parts(fields: JaggedFields, parts: Sequence[Sequence[int]], caller: Caller) -> Iterator[JaggedFields]:
    """The jagged fields of each part."""
    bounds, dims = _bounds(fields, caller)
    values = {path: values_of(field) for path, field in fields.items()}
    return (_jagged_rows(values, bounds, dims, np.array(rows, np.int64)) for rows in parts)


def jagged_joined(batches: Sequence[JaggedFields], order: IntArray, caller: Caller) -> JaggedFields:
    """The jagged fields of several batches, one after the other, then in an order."""
    if not batches[0]:
        return {}
    flat = {(str(at), *path): value for at, fields in enumerate(batches) for path, value in fields.items()}
    read, dims = _bounds(flat, caller, 1)
    dims = {path: dims[("0", *path)] for path in batches[0]}
    whole: JaggedFields = {}
    bounds: dict[Path, IntArray] = {}
    for path in batches[0]:
        own = [read[(str(at), *path)] for at in range(len(batches))]
        bounds[path] = cumulated(np.concatenate([np.diff(each) for each in own]))
        whole[path] = torch.cat(  # rows may begin behind the first value, and end before the last
            [values_of(fields[path])[int(each[0]) : int(each[-1])] for fields, each in zip(batches, own, strict=True)]
        )
    return _jagged_rows(whole, bounds, dims, order)


def check_alike(entries: Sequence[Any], caller: Caller, what: str = "") -> None:
    """Raises unless entries are of one kind: tensors of one dtype, device, and shape apart from rows and jagged dims,
    sub-batches of one class and more batch dims, or Python objects."""
    seen = [_said(entry) for entry in entries]
    if len(set(seen)) > 1:
        at = next(at for at, said in enumerate(seen) if said != seen[0])
        raise caller.fault(
            f"{what}{caller.part} {at} is {seen[at]}, and of the first {seen[0]}; expected the same. {caller.unlike}"
        )


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Entries along dim 0."""
    if x.dtype in _INDEXED_AS_WORDS:
        return words(x).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


def index_of(rows: Any, device: torch.device) -> Tensor:
    """Row numbers as int64 on a device."""
    return torch.from_numpy(np.asarray(rows, np.int64)).to(device, non_blocking=True)


# -------------------------------------------------------------------- jagged fields


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _is_odd(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dtype in _INDEXED_AS_WORDS


def _said(tensor: Any) -> str:
    if isinstance(tensor, Node):
        kind = "TensorDict" if tensor.kind is None else tensor.kind.__name__
        return f"a {kind} with batch_size {['rows', *tensor.more_dims] if tensor.more_dims is not None else []}"
    if not isinstance(tensor, Tensor):
        return "Python objects" if is_object(tensor) else f"a {type(tensor).__name__}"
    if not tensor.is_nested:
        kind, shape = "padded", tensor.shape[1:]
    elif (own := Jagged.of(tensor)) is not None:
        kind, shape = "jagged" if own.dim == 1 else f"jagged along dim {own.dim}", own.values.shape[1:]
    else:  # strided nested tensors have no shape
        return "nested, with gaps between its rows or the strided layout"
    return f"{kind} {tensor.dtype} [..., {', '.join(map(str, shape))}] on {tensor.device}"


def _bounds(fields: JaggedFields, caller: Caller, skipped: int = 0) -> tuple[dict[Path, IntArray], dict[Path, int]]:
    """The row bounds of jagged fields on the host, and their ragged dims; messages leave out the first names of their
    paths. One synchronisation on CUDA."""

    def named(path: Path) -> str:
        return f'field "{show(path[skipped:])}"' if path[skipped:] else "the tensor"

    jagged: dict[Path, Jagged] = {}
    for path, value in fields.items():
        own = Jagged.of(value)
        if own is None:
            raise caller.fault(f"{named(path)} {GAPS}")
        jagged[path] = own
    offsets = {id(own.offsets): own.offsets for own in jagged.values()}
    read = dict(zip(offsets, to_host([*offsets.values()]), strict=True))
    bounds = {path: read[id(own.offsets)] for path, own in jagged.items()}
    for path, own in jagged.items():
        begin, end, tokens = int(bounds[path][0]), int(bounds[path][-1]), own.values.shape[0]
        if not 0 <= begin <= end <= tokens:
            raise caller.fault(
                f"{named(path)} has {tokens} values, and offsets from {begin} to {end}; expected offsets of its "
                "values. Build it anew from its rows: torch.nested.nested_tensor(rows, layout=torch.jagged)."
            )
    return bounds, {path: own.dim for path, own in jagged.items()}


def _jagged_rows(
    values: Mapping[Path, Tensor], bounds: Mapping[Path, IntArray], dims: Mapping[Path, int], rows: IntArray
) -> JaggedFields:
    """Some rows of jagged fields, given by their values [T, *F]. Those that have equal bounds and one device share
    their offsets."""
    out: JaggedFields = {}
    found: dict[Any, list[Path]] = {}
    for path, own in values.items():
        found.setdefault((bounds[path].tobytes(), own.device), []).append(path)
    for paths in found.values():
        offsets = bounds[paths[0]]
        lengths = (offsets[1:] - offsets[:-1])[rows]
        device = values[paths[0]].device
        index = torch.from_numpy(ranges(offsets[rows], lengths)).to(device, non_blocking=True)
        taken = [picked(values[path], index) for path in paths]
        least, most = int(lengths.min()) if lengths.size else 0, int(lengths.max(initial=0))
        made = jagged_all(
            taken, shared_offsets(cumulated(lengths), device), least, most, [dims[path] for path in paths]
        )
        out |= dict(zip(paths, made, strict=True))
    return out


# -------------------------------------------------------------------- dense fields and objects


def _rows_of(batch: Any, rows: list[int]) -> TensorDictBase:
    """Some rows of a TensorDict. It makes indices for its objects on the default device of torch, here the host."""
    with _HOST:
        return batch[rows]


def _differing_objects(entries: Sequence[dict[Path, Any]]) -> set[Path]:
    """Paths of objects that are stored once for all rows of a batch, but differ between batches: tensordict 0.10 would
    keep the first."""
    first = entries[0]
    single = {path for path in first if all(_is_single(own[path]) for own in entries)}
    return {path for path in single if not all(is_same(own[path].data, first[path].data) for own in entries)}


def _is_single(value: Any) -> bool:
    return isinstance(value, NonTensorData) and bool(value.batch_size)


def _of_rows(value: Any) -> Any:
    """An object stored once for all rows, as one object for each row."""
    rows, *rest = value.batch_size
    return NonTensorStack(*[NonTensorData(value.data, batch_size=rest) for _ in range(rows)])


def _without(batch: TensorDictBase, fields: Collection[Path], single: Collection[Path] = ()) -> TensorDict:
    """The batch without some fields and without names of dims, which would have to be alike. Objects in `single` become
    one object for each row."""
    entries = [
        (path, _of_rows(value) if path in single and batch.batch_size[0] else value)
        for path, value in flatten(batch)
        if path not in fields
    ]
    unnamed = [(path, value.unnamed() if isinstance(value, Node) else value) for path, value in entries]
    return unflatten(Node.of(batch).unnamed(), unnamed, batch.batch_size[0])


def _merged(dense: TensorDictBase, fields: JaggedFields, order: Sequence[Path], rows: int) -> TensorDict:
    """Merges dense and jagged fields in their original order."""
    entries = dict(flatten(dense)) | fields
    return unflatten(Node.of(dense), [(path, entries[path]) for path in order], rows)
