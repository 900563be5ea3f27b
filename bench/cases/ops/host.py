"""Time until a batch that lies on the host is on the GPU, and back: packed, against copying it padded.

    decode   from pinned memory, where both lie pinned beforehand; from ordinary memory, where both pay for staging
    encode   into pinned memory

All times are by the wall, the device idle before and after. Rivals copy the padded batch, or its jagged values alone.
The floors are one copy of the packed bytes, and one write or one read of the padded ones. Every packed batch is decoded
and compared before it is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from bench.cases.ops.batches import require_batch
from bench.harness import floors
from bench.harness.gpu import Clock, Work
from bench.harness.measure import progress, require_same
from bench.harness.report import Ratio, Row, RowGroups, ratios
from bench.rivals import nesting
from bench.workloads import PAD_ID, make_batch
from maskpack import PackedBatch, compress, decompress

_PADDED, _JAGGED, _FLOOR = "copy of the padded batch", "copy of the jagged values alone", "one copy of the packed bytes"
_VERIFIED, _TRUSTED = "verified", "trusted"
_BEFORE = 3  # batches until the forms and the plan are known
_FASTER = {"nested": ">= 8", "padded": ">= 7"}  # than the padded copy
_MOST = {_VERIFIED: "<= 1500", _TRUSTED: "<= 1000"}  # us


def rows(clock: Clock, count: int, prompt_width: int, response_width: int) -> RowGroups:
    """The figures for `count` rows. Raises NotExact if a bit is lost."""
    batch = make_batch(count, prompt_width=prompt_width, response_width=response_width)
    packed = compress(batch, pad_token_id=PAD_ID)
    yield _decode(clock, batch, packed)
    yield _encode(clock, batch, packed.nbytes)


def _decode(clock: Clock, batch: TensorDict, packed: PackedBatch) -> list[Row]:
    device, case = clock.device, f"ops decode, {batch.batch_size[0]} rows"
    progress(case)
    pinned = packed.pin_memory() if device.type == "cuda" else packed
    ours: dict[str, Work] = {}
    for layout in _FASTER:
        ours[f"{layout}, pinned"] = partial(decompress, pinned, format=layout, device=device)
        ours[layout] = partial(decompress, packed, format=layout, device=device)
    for name, work in ours.items():
        require_batch(f"{case}, {name}", work(), batch, name.split(",")[0])
    fields = list(batch.values())
    line = torch.empty(packed.nbytes, dtype=torch.uint8)
    others: dict[str, Work] = {_PADDED: lambda: [field.to(device, copy=True) for field in fields]}
    for name, tensors in ((f"{_PADDED}, pinned", fields), (_JAGGED, _values(batch)), (_FLOOR, [line])):
        own = [_pinned(clock, x).copy_(x) for x in tensors]
        others[name] = lambda own=own: [x.to(device, non_blocking=True, copy=True) for x in own]
    others[floors.WRITE] = lambda: [torch.empty(x.shape, dtype=x.dtype, device=device).fill_(1) for x in fields]
    pairs: list[Ratio] = []
    for layout, target in _FASTER.items():
        ready = f"{layout}, pinned"
        pairs += [(f"{_PADDED}, pinned", ready, target), (_PADDED, layout, None), (ready, _FLOOR, None)]
    return [
        Row(case, "padded", sum(field.nbytes for field in fields), "bytes"),
        Row(case, "packed", packed.nbytes, "bytes"),
        *_figures(case, clock, ours, others, pairs, {}),
    ]


def _encode(clock: Clock, batch: TensorDict, nbytes: int) -> list[Row]:
    case = f"ops encode, {batch.batch_size[0]} rows"
    progress(case)
    there = batch.to(clock.device)
    ours: dict[str, Work] = {
        _VERIFIED: lambda: compress(there, pad_token_id=PAD_ID),
        _TRUSTED: lambda: compress(there, pad_token_id=PAD_ID, verify=False),
    }
    for name, work in ours.items():
        for _ in range(_BEFORE):
            require_same(f"{case}, {name}", decompress(work(), device="cpu"), batch)  # type: ignore[arg-type]
    fields, line = list(there.values()), torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
    others: dict[str, Work] = {floors.READ: lambda: [field.view(torch.int32).amax() for field in fields]}
    for name, tensors in ((_PADDED, fields), (_JAGGED, _values(there)), (_FLOOR, [line])):
        to = [_pinned(clock, x) for x in tensors]
        others[name] = lambda tensors=tensors, to=to: [
            own.copy_(x, non_blocking=True) for x, own in zip(tensors, to, strict=True)
        ]
    return _figures(case, clock, ours, others, [(_PADDED, name, None) for name in ours], _MOST)


def _figures(
    case: str,
    clock: Clock,
    ours: Mapping[str, Work],
    others: Mapping[str, Work],
    pairs: Sequence[Ratio],
    most: Mapping[str, str],
) -> list[Row]:
    wall = clock.wall_us({**ours, **others})
    return [
        *(Row(case, f"{name}, wall", us, "us", most.get(name)) for name, us in wall.items()),
        *(Row(case, f"{name}, host synchronisations", clock.syncs(work), "syncs") for name, work in ours.items()),
        *ratios(case, wall, pairs),
    ]


def _values(batch: TensorDict) -> list[Tensor]:
    """The valid values of each field."""
    masks = nesting.masks_of(batch)
    return [field[masks[nesting.axis_of(name)]] for name, field in batch.items()]


def _pinned(clock: Clock, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=clock.device.type == "cuda")
