"""apply and restore of a MicroBatchPlan for each kind of batch: takes rows, and joins outputs in the order of the rows.

rows       0 1 2 3 4        micro-batches [0 3] [1 2 4]
take       a b c d e   ->   a d | b c e
join       A D | B C E ->   A B C D E
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import cumulated, ranges
from maskpack.errors import PlanError
from maskpack.nesting.rows import Caller, check_alike, index_of, jagged_joined, jagged_parts, joined, picked, taken
from maskpack.packed.batch import PackedBatch
from maskpack.planning.costs import IntArray
from maskpack.views.view import BatchView

_APPLY, _RESTORE = "MicroBatchPlan.apply", "MicroBatchPlan.restore"
_TAKING = Caller(_APPLY, PlanError)
_JOINING = Caller(
    _RESTORE,
    PlanError,
    "output",
    "Return them from every micro-batch.",
    "Give outputs one dtype and device, and pad them to one width (select_and_pad_to_response does) or return jagged "
    "ones.",
)
_Parts = Sequence[Sequence[int]]


# -------------------------------------------------------------------- take_rows


@singledispatch
def take_rows(batch: Any, parts: _Parts, num_rows: int) -> Iterator[Any]:
    """Yields the rows of each part of a batch."""
    raise PlanError(
        f"{_APPLY}: got {said(batch)}; expected a TensorDict, a PackedBatch, a BatchView or a tensor of {num_rows} "
        "rows. Pass the batch."
    )


@take_rows.register(PackedBatch)
@take_rows.register(BatchView)
def _(batch: PackedBatch | BatchView, parts: _Parts, num_rows: int) -> Iterator[Any]:
    _check_rows(batch.num_rows, num_rows)
    return (batch.take(list(rows)) for rows in parts)


@take_rows.register(Tensor)
def _(batch: Tensor, parts: _Parts, num_rows: int) -> Iterator[Tensor]:
    _check_rows(batch.size(0) if batch.dim() else None, num_rows)
    if not batch.is_nested:
        return (picked(batch, index_of(rows, batch.device)) for rows in parts)
    return (fields[()] for fields in jagged_parts({(): batch}, parts, _TAKING))


@take_rows.register(TensorDictBase)
def _(batch: TensorDictBase, parts: _Parts, num_rows: int) -> Iterator[TensorDict]:
    _check_rows(batch.batch_size[0] if batch.batch_dims else None, num_rows)
    return taken(batch, parts, _TAKING)


def _check_rows(seen: int | None, expected: int) -> None:
    if seen != expected:
        rows = "no rows" if seen is None else f"{seen} rows"
        raise PlanError(
            f"{_APPLY}: the batch has {rows}; the plan is for {expected}. Apply it to the batch whose lengths it was "
            "made from; if that has batch dims [B, G], to batch.reshape(-1)."
        )


# -------------------------------------------------------------------- join_rows


@singledispatch
def join_rows(first: Any, outputs: Sequence[Any], parts: _Parts, lengths: IntArray | None) -> Any:
    """Joins outputs in the order of the rows: the inverse of `take_rows`. `first` is `outputs[0]`."""
    raise PlanError(
        f"{_RESTORE}: outputs are of type {type(first).__name__}; expected tensors, TensorDicts, PackedBatches, "
        "BatchViews or lists. Return one of these, and restore several things one by one."
    )


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
    check_alike(outputs, _JOINING)
    if lengths is not None:
        return _packed_joined(outputs, parts, lengths)
    _check_outputs(outputs, [out.size(0) if out.dim() else None for out in outputs], parts, lengths)
    if first.is_nested:
        return jagged_joined([{(): out} for out in outputs], _back(parts), _JOINING)[()]
    return picked(torch.cat(list(outputs)), index_of(_back(parts), first.device))


@join_rows.register(TensorDictBase)
def _(
    first: TensorDictBase, outputs: Sequence[TensorDictBase], parts: _Parts, lengths: IntArray | None
) -> TensorDictBase:
    rows = [out.batch_size[0] if out.batch_dims else None for out in outputs]
    _check_outputs(outputs, rows, parts, lengths)
    return joined(outputs, _back(parts), _JOINING)


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
    return picked(torch.cat(list(outputs)), index_of(ranges(begins, lengths), outputs[0].device))


def _back(parts: _Parts) -> IntArray:
    """The index of each row of the batch among the rows of the parts."""
    return np.argsort(np.concatenate([np.array(rows, np.int64) for rows in parts]), kind="stable")
