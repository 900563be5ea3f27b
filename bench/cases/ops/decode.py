"""Time until a batch that lies on the host is on the GPU: packed and decoded there, against copying it padded.

From pinned memory, where both lie pinned beforehand; and from ordinary memory, where both pay for staging. All times
are by the wall, the device idle before and after. The floor is one copy of the packed bytes from pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from bench.cases.ops import encode, nest
from bench.cases.ops.batches import joined, parts_of, require_batch
from bench.harness.gpu import Clock, Work
from bench.harness.measure import progress
from bench.harness.report import Row, RowGroups, ratios
from bench.rivals import nesting
from bench.workloads import PAD_ID
from maskpack import PackedBatch, compress, decompress

_TARGETS = {"nested": ">= 8", "padded": ">= 7"}
_TARGETS_LARGE = {"nested": ">= 20", "padded": ">= 15"}
_COPY_PINNED, _COPY = "copy of the padded batch, pinned", "copy of the padded batch"
_JAGGED, _WRITE = "copy of the jagged values alone, pinned", "one write of the padded bytes"
_FLOOR = "one copy of the packed bytes, pinned"


def rows(clock: Clock, count: int, prompt_width: int, response_width: int) -> RowGroups:
    """The figures for `count` rows, and for eight times as many. Raises NotExact if a bit is lost."""
    parts = parts_of(count, prompt_width, response_width)
    packed = [compress(part, pad_token_id=PAD_ID) for part in parts]
    yield _decode(clock, parts[0], packed[0], _TARGETS)
    yield nest.rows(clock, parts[0])
    yield encode.rows(clock, parts[0])
    whole = joined(parts)
    yield _decode(clock, whole, PackedBatch.cat(packed), _TARGETS_LARGE)
    yield nest.rows(clock, whole)
    yield encode.rows(clock, whole)


def _decode(clock: Clock, batch: TensorDict, packed: PackedBatch, targets: Mapping[str, str]) -> list[Row]:
    device, cuda = clock.device, clock.device.type == "cuda"
    case = f"ops decode, {batch.batch_size[0]} rows"
    progress(case)
    pinned = packed.pin_memory() if cuda else packed
    fields = list(batch.values())
    pinned_fields = [field.pin_memory() for field in fields] if cuda else fields
    masks = nesting.masks_of(batch)
    values = [field[masks[nesting.axis_of(name)]] for name, field in batch.items()]
    pinned_values = [one.pin_memory() for one in values] if cuda else values
    line = torch.empty(packed.nbytes, dtype=torch.uint8, pin_memory=cuda)
    ours: dict[str, Work] = {}
    others: dict[str, Work] = {}
    for layout in ("nested", "padded"):
        ours[f"{layout}, pinned"] = _decoding(pinned, layout, device)
        ours[layout] = _decoding(packed, layout, device)
        for name, work in ours.items():
            if name.startswith(layout):
                require_batch(f"{case}, {name}", work(), batch, layout)
    others[_COPY_PINNED] = lambda: [field.to(device, non_blocking=True, copy=True) for field in pinned_fields]
    others[_COPY] = lambda: [field.to(device, copy=True) for field in fields]
    others[_JAGGED] = lambda: [one.to(device, non_blocking=True, copy=True) for one in pinned_values]
    shapes = [(field.shape, field.dtype) for field in fields]
    others[_WRITE] = lambda: [torch.empty(shape, dtype=dtype, device=device).fill_(1) for shape, dtype in shapes]
    others[_FLOOR] = lambda: line.to(device, non_blocking=True, copy=True)
    wall, host = clock.wall_us({**ours, **others}), clock.host_us(ours)
    return [
        *_sizes(case, batch, packed),
        *(Row(case, f"{name}, wall", us, "us") for name, us in wall.items()),
        *(Row(case, f"{name}, host", us, "us") for name, us in host.items()),
        *(
            Row(case, f"{name}, host synchronisations", clock.syncs(work), "syncs", "<= 0")
            for name, work in ours.items()
        ),
        *_ratios(case, wall, targets),
        Row(case, "link, pinned", sum(field.nbytes for field in fields) / wall[_COPY_PINNED] / 1e3, "GB/s"),
    ]


def _decoding(packed: PackedBatch, layout: str, device: torch.device) -> Work:
    return lambda: decompress(packed, format=layout, device=device)


# -------------------------------------------------------------------- rows of the report


def _sizes(case: str, batch: TensorDict, packed: PackedBatch) -> list[Row]:
    padded = sum(field.nbytes for field in batch.values())
    return [Row(case, "padded", padded, "bytes"), Row(case, "packed", packed.nbytes, "bytes")]


def _ratios(case: str, wall: Mapping[str, float], targets: Mapping[str, str]) -> list[Row]:
    pairs = [
        *((_COPY_PINNED, f"{layout}, pinned", target) for layout, target in targets.items()),
        *((_COPY, layout, None) for layout in targets),
        *((f"{layout}, pinned", _FLOOR, None) for layout in targets),
    ]
    return ratios(case, wall, pairs)
