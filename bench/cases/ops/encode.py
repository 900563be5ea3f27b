"""Time until a batch that lies on a GPU is packed on the host: encoded there, against copying it to pinned memory.

By the wall, the device idle before and after. Rivals copy the padded batch, or its jagged values alone. The floors are
one copy of the packed bytes, and one read of the padded ones. Every packed batch is decoded and compared before it is
timed.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.gpu import Clock, Work
from bench.harness.measure import progress, require_same
from bench.harness.report import Row, ratios
from bench.rivals import nesting
from bench.workloads import PAD_ID
from maskpack import compress, decompress, nest_batch_by_mask

_VERIFIED, _TRUSTED, _NESTED, _TOLD = "verified", "trusted", "nested", "trusted and nested"
_PADDED, _JAGGED = "copy of the padded batch", "copy of the jagged values"
_FLOOR, _READ = "one copy of the packed bytes", "one read of the padded bytes"
_BEFORE = 3  # batches until the forms and the plan are known


def rows(clock: Clock, batch: TensorDict) -> list[Row]:
    """The figures for a batch on the host. Raises NotExact if a bit is lost."""
    case = f"ops encode, {batch.batch_size[0]} rows"
    progress(case)
    there = batch.to(clock.device)
    nested = nest_batch_by_mask(there, pad_token_id=PAD_ID)
    ours: dict[str, Work] = {
        _VERIFIED: lambda: compress(there, pad_token_id=PAD_ID),
        _TRUSTED: lambda: compress(there, pad_token_id=PAD_ID, verify="never"),
        _NESTED: lambda: compress(nested, pad_token_id=PAD_ID),
        _TOLD: lambda: compress(nested, pad_token_id=PAD_ID, verify="never"),
    }
    for name, work in ours.items():
        for _ in range(_BEFORE):
            packed = work()
            require_same(f"{case}, {name}", decompress(packed, device="cpu"), batch)  # type: ignore[arg-type]
    nbytes = packed.nbytes  # type: ignore[possibly-undefined]
    fields = list(there.values())
    masks = nesting.masks_of(there)
    values = [field[masks[nesting.axis_of(name)]] for name, field in there.items()]
    line = torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
    on_host = [_pinned(clock, tensors) for tensors in (fields, values, [line])]
    others: dict[str, Work] = {
        _PADDED: lambda: _copied(fields, on_host[0]),
        _JAGGED: lambda: _copied(values, on_host[1]),
        _FLOOR: lambda: _copied([line], on_host[2]),
        _READ: lambda: [field.view(torch.int32).amax() for field in fields],
    }
    wall = clock.wall_us({**ours, **others})
    return [
        Row(case, "packed", nbytes, "bytes"),
        *(Row(case, f"{name}, wall", us, "us", _targets(batch).get(name)) for name, us in wall.items()),
        *(Row(case, f"{name}, host synchronisations", clock.syncs(work), "syncs") for name, work in ours.items()),
        *ratios(case, wall, [(_PADDED, name, None) for name in ours]),
    ]


def _targets(batch: TensorDict) -> dict[str, str]:
    if batch.batch_size[0] <= 256:
        return {_VERIFIED: "<= 1500", _TRUSTED: "<= 1000", _NESTED: "<= 1000", _TOLD: "<= 1000"}
    return {_VERIFIED: "<= 4000", _TRUSTED: "<= 2500", _NESTED: "<= 2500", _TOLD: "<= 2500"}


def _pinned(clock: Clock, tensors: list[Tensor]) -> list[Tensor]:
    cuda = clock.device.type == "cuda"
    return [torch.empty(x.shape, dtype=x.dtype, pin_memory=cuda) for x in tensors]


def _copied(tensors: list[Tensor], to: list[Tensor]) -> list[Tensor]:
    return [own.copy_(x, non_blocking=True) for x, own in zip(tensors, to, strict=True)]
