"""apply and restore of a MicroBatchPlan for each kind of batch: takes rows, and joins outputs in the order of the rows.

    rows       0 1 2 3 4        micro-batches [0 3] [1 2 4]
    take       a b c d e   ->   a d | b c e
    join       A D | B C E ->   A B C D E

Row bounds of jagged fields are read once for each call. Jagged fields with equal bounds share one offsets tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.bits import words
from maskpack.core.index import cumulated, ranges
from maskpack.core.tree import Node, flatten, unflatten
from maskpack.errors import PlanError
from maskpack.fields.registry import Path, show
from maskpack.layout.jagged import is_regular, jagged_all, offsets_of, to_host
from maskpack.packed.batch import PackedBatch
from maskpack.planning.costs import IntArray
from maskpack.planning.plan import join_rows, take_rows
from maskpack.views.view import BatchView

_APPLY, _RESTORE = "MicroBatchPlan.apply", "MicroBatchPlan.restore"
_HOST = torch.device("cpu")
_Parts = Sequence[Sequence[int]]
_Jagged = dict[Path, Any]


# -------------------------------------------------------------------- take_rows


@take_rows.register(PackedBatch)
@take_rows.register(BatchView)
def _(batch: PackedBatch | BatchView, parts: _Parts, num_rows: int) -> Iterator[Any]:
    _check_rows(batch.num_rows, num_rows)
    return (batch.take(list(rows)) for rows in parts)


@take_rows.register(Tensor)
def _(batch: Tensor, parts: _Parts, num_rows: int) -> Iterator[Tensor]:
    _check_rows(batch.size(0) if batch.dim() else None, num_rows)
    if not batch.is_nested:
        return (_picked(batch, _index(rows, batch.device)) for rows in parts)
    return (fields[()] for fields in _jagged_parts({(): batch}, parts))


@take_rows.register(TensorDictBase)
def _(batch: TensorDictBase, parts: _Parts, num_rows: int) -> Iterator[TensorDict]:
    _check_rows(batch.batch_size[0] if batch.batch_dims else None, num_rows)
    entries = flatten(batch)
    for path, value in entries:
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.jagged):
            raise PlanError(
                f'{_APPLY}: field "{show(path)}" has the memory layout {value.layout}, whose rows cannot be taken; '
                "expected a strided or jagged tensor. Convert it with to_dense(), or leave it out."
            )
    fields = {path: value for path, value in entries if _is_jagged(value)}
    dense = _without(batch, fields)
    order = [path for path, _ in entries]

    return (
        _merged(_rows_of(dense, list(rows)), own, order, len(rows))
        for rows, own in zip(parts, _jagged_parts(fields, parts), strict=True)
    )


def _check_rows(seen: int | None, expected: int) -> None:
    if seen != expected:
        rows = "no rows" if seen is None else f"{seen} rows"
        raise PlanError(
            f"{_APPLY}: the batch has {rows}; the plan is for {expected}. Apply it to the batch whose lengths it was "
            "made from."
        )


def _jagged_parts(fields: _Jagged, parts: _Parts) -> Iterator[_Jagged]:
    """The jagged fields of each part."""
    bounds = _bounds(fields, _APPLY)
    return (_jagged_rows(fields, bounds, np.array(rows, np.int64)) for rows in parts)


def _jagged_rows(fields: _Jagged, bounds: dict[Path, IntArray], rows: IntArray) -> _Jagged:
    """Some rows of jagged fields."""
    out: _Jagged = {}
    for paths in _alike(fields, bounds):
        offsets = bounds[paths[0]]
        lengths = (offsets[1:] - offsets[:-1])[rows]
        device = fields[paths[0]].device
        index = torch.from_numpy(ranges(offsets[rows], lengths)).to(device, non_blocking=True)
        values = [_picked(fields[path].values(), index) for path in paths]
        ends = torch.from_numpy(cumulated(lengths)).to(device, non_blocking=True)
        least, most = int(lengths.min(initial=0 if not lengths.size else lengths[0])), int(lengths.max(initial=0))
        out |= dict(zip(paths, jagged_all(values, ends, least, most), strict=True))
    return out


def _bounds(fields: _Jagged, call: str) -> dict[Path, IntArray]:
    """The row bounds of jagged fields on the host. One synchronisation on CUDA."""
    for path, value in fields.items():
        if not is_regular(value):
            what = f'field "{show(path)}"' if path else "the tensor"
            raise PlanError(
                f"{call}: {what} is nested, but not jagged along dim 1 without gaps; expected that. "
                "Build it with maskpack, or with nested_tensor_from_jagged."
            )
    own = {id(offsets_of(value)): offsets_of(value) for value in fields.values()}
    read = dict(zip(own, to_host(list(own.values())), strict=True)) if own else {}
    return {path: read[id(offsets_of(value))] for path, value in fields.items()}


def _alike(fields: _Jagged, bounds: dict[Path, IntArray]) -> list[list[Path]]:
    """Groups the fields that have equal bounds and one device."""
    found: dict[Any, list[Path]] = {}
    for path, value in fields.items():
        found.setdefault((bounds[path].tobytes(), value.device), []).append(path)
    return list(found.values())


# -------------------------------------------------------------------- join_rows


@join_rows.register(PackedBatch)
def _(first: PackedBatch, outputs: Sequence[PackedBatch], parts: _Parts, lengths: IntArray | None) -> PackedBatch:
    _check_outputs(outputs, [out.num_rows for out in outputs], parts, lengths)
    return PackedBatch.cat(outputs).take(_back(parts))


@join_rows.register(BatchView)
def _(first: BatchView, outputs: Sequence[BatchView], parts: _Parts, lengths: IntArray | None) -> BatchView:
    _check_outputs(outputs, [out.num_rows for out in outputs], parts, lengths)
    return BatchView.cat(outputs).take(_back(parts))


@join_rows.register(list)
def _(first: list[Any], outputs: Sequence[list[Any]], parts: _Parts, lengths: IntArray | None) -> list[Any]:
    _check_outputs(outputs, [len(out) for out in outputs], parts, lengths)
    items = [item for out in outputs for item in out]
    return [items[at] for at in _back(parts).tolist()]


@join_rows.register(Tensor)
def _(first: Tensor, outputs: Sequence[Tensor], parts: _Parts, lengths: IntArray | None) -> Tensor:
    _check_alike(outputs)
    if lengths is not None:
        return _packed_joined(outputs, parts, lengths)
    _check_outputs(outputs, [out.size(0) if out.dim() else None for out in outputs], parts, lengths)
    if first.is_nested:
        return _jagged_joined([{(): out} for out in outputs], parts)[()]
    return _picked(torch.cat(list(outputs)), _index(_back(parts), first.device))


@join_rows.register(TensorDictBase)
def _(
    first: TensorDictBase, outputs: Sequence[TensorDictBase], parts: _Parts, lengths: IntArray | None
) -> TensorDictBase:
    rows = [out.batch_size[0] if out.batch_dims else None for out in outputs]
    _check_outputs(outputs, rows, parts, lengths)
    entries = [dict(flatten(out)) for out in outputs]
    for own in entries[1:]:
        odd = set(own) ^ set(entries[0])
        if odd:
            raise PlanError(
                f"{_RESTORE}: fields {sorted(map(show, odd))} are not in every output; expected the same fields. "
                "Return them from every micro-batch."
            )
    for path, value in entries[0].items():
        if isinstance(value, Tensor):
            _check_alike([own[path] for own in entries], f'field "{show(path)}" of ')
    jagged = [{path: value for path, value in own.items() if _is_jagged(value)} for own in entries]
    back = _back(parts)
    single = _differing_objects(entries)
    dense: Any = torch.cat([cast("Any", _without(out, own, single)) for out, own in zip(outputs, jagged, strict=True)])
    return _merged(_rows_of(dense, back.tolist()), _jagged_joined(jagged, parts), list(entries[0]), back.size)


def _check_outputs(outputs: Sequence[Any], seen: Sequence[int | None], parts: _Parts, lengths: IntArray | None) -> None:
    kinds = sorted({type(out).__name__ for out in outputs})
    if lengths is not None:
        raise PlanError(f"{_RESTORE}: lengths with outputs of {kinds[0]}; expected packed tensors. Leave lengths out.")
    wanted = [len(rows) for rows in parts]
    if list(seen) != wanted:
        at = next(at for at, (has, should) in enumerate(zip(seen, wanted, strict=True)) if has != should)
        raise PlanError(
            f"{_RESTORE}: output {at} ({kinds[0]}) has {'no' if seen[at] is None else seen[at]} rows; its micro-batch "
            f"has {wanted[at]}. Return an "
            "entry for each row; for packed tensors, pass lengths."
        )


def _check_alike(outputs: Sequence[Any], what: str = "") -> None:
    """Raises unless tensors have one kind, dtype, device, and shape apart from rows and jagged dims."""
    seen = [_said(out) for out in outputs]
    if len(set(seen)) > 1:
        at = next(at for at, said in enumerate(seen) if said != seen[0])
        raise PlanError(
            f"{_RESTORE}: {what}output {at} is {seen[at]}, and of the first {seen[0]}; expected the same. Give "
            "outputs one dtype and device, and pad them to one width (select_and_pad_to_response does) or return "
            "jagged ones."
        )


def _said(out: Any) -> str:
    if not isinstance(out, Tensor):
        return f"a {type(out).__name__}"
    if out.is_nested and not is_regular(out):  # strided nested tensors have no shape
        return "nested, but not jagged along dim 1 without gaps"
    kind, shape = ("jagged", out.shape[2:]) if out.is_nested else ("padded", out.shape[1:])
    return f"{kind} {out.dtype} [..., {', '.join(map(str, shape))}] on {out.device}"


def _packed_joined(outputs: Sequence[Tensor], parts: _Parts, lengths: IntArray) -> Tensor:
    """Packed tokens in the order of the rows."""
    wanted = [int(lengths[list(rows)].sum()) for rows in parts]
    seen = [tuple(out.shape) for out in outputs]
    if outputs[0].is_nested or any(shape[:1] != (total,) for shape, total in zip(seen, wanted, strict=True)):
        raise PlanError(
            f"{_RESTORE}: packed outputs are {seen[:4]}; by lengths the micro-batches have {wanted[:4]} tokens. Give "
            "the tokens of each row in these outputs; leave lengths out where outputs have an entry for each row."
        )
    order = np.concatenate([np.array(rows, np.int64) for rows in parts])
    begins = np.empty(lengths.size, np.int64)
    begins[order] = cumulated(lengths[order])[:-1]
    return _picked(torch.cat(list(outputs)), _index(ranges(begins, lengths), outputs[0].device))


def _jagged_joined(outputs: Sequence[_Jagged], parts: _Parts) -> _Jagged:
    """Joins jagged fields of several outputs in the order of the rows."""
    if not outputs[0]:
        return {}
    flat = {(str(at), *path): value for at, fields in enumerate(outputs) for path, value in fields.items()}
    read = _bounds(flat, _RESTORE)
    whole: _Jagged = {}
    bounds: dict[Path, IntArray] = {}
    for path in outputs[0]:
        own = [np.diff(read[(str(at), *path)]) for at in range(len(outputs))]
        bounds[path] = cumulated(np.concatenate(own))
        values = torch.cat([fields[path].values() for fields in outputs])
        ends = torch.from_numpy(bounds[path]).to(values.device)
        whole[path] = jagged_all([values], ends, 0, int(np.diff(bounds[path]).max(initial=0)))[0]
    return _jagged_rows(whole, bounds, _back(parts))


def _back(parts: _Parts) -> IntArray:
    """The index of each row of the batch among the rows of the parts."""
    return np.argsort(np.concatenate([np.array(rows, np.int64) for rows in parts]), kind="stable")


# -------------------------------------------------------------------- rows and fields


def _rows_of(batch: Any, rows: list[int]) -> TensorDictBase:
    """Some rows of a TensorDict. It makes indices for its objects on the default device of torch, here the host."""
    with _HOST:
        return batch[rows]


def _index(rows: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(rows, np.int64)).to(device, non_blocking=True)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Entries along dim 0. Unsigned words are viewed as signed ones, because torch cannot index them on all devices."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return words(x).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _differing_objects(entries: Sequence[dict[Path, Any]]) -> set[Path]:
    """Paths of objects that are stored once for all rows of an output, but differ between outputs: tensordict 0.10
    would keep the first."""
    first = entries[0]
    single = {path for path in first if all(_is_single(own[path]) for own in entries)}
    return {path for path in single if not all(_same(own[path].data, first[path].data) for own in entries)}


def _is_single(value: Any) -> bool:
    return isinstance(value, NonTensorData) and bool(value.batch_size)


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (ValueError, RuntimeError):  # the comparison of arrays has no single truth value
        return False


def _of_rows(value: Any) -> Any:
    """An object stored once for all rows, as one object for each row."""
    rows, *rest = value.batch_size
    return NonTensorStack(*[NonTensorData(value.data, batch_size=rest) for _ in range(rows)])


def _without(batch: TensorDictBase, fields: Mapping[Path, Any], single: Collection[Path] = ()) -> TensorDict:
    """The batch without some fields: not every version of tensordict indexes jagged fields. Objects in `single` become
    one object for each row."""
    entries = [
        (path, _of_rows(value) if path in single and batch.batch_size[0] else value)
        for path, value in flatten(batch)
        if path not in fields
    ]
    return unflatten(Node.of(batch), entries, batch.batch_size[0])


def _merged(dense: TensorDictBase, fields: _Jagged, order: Sequence[Path], rows: int) -> TensorDict:
    """Merges dense and jagged fields in their original order."""
    entries = dict(flatten(dense)) | fields
    return unflatten(Node.of(dense), [(path, entries[path]) for path in order], rows)
