"""Nest and unnest of a batch that lies on the device, by the wall, and how often they synchronise. Their floors are a
pack of all fields, one read of the padded bytes and one write of them.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

import maskpack
from bench.harness import floors
from bench.harness.gpu import Clock, Work
from bench.harness.measure import bits, progress, require_same, require_same_tensor
from bench.harness.report import Row, ratios
from bench.rivals import nesting
from bench.workloads import PAD_ID
from maskpack import RowLayout, VerifyFirst, ops

_NEVER, _ALWAYS, _UNNEST = "nest, verify=never", "nest, verify=always", "unnest"
_PACK, _MASK = "ops.pack, layouts given", "x[mask]"
_READ, _WRITE = "one read of the padded bytes", "one write of the padded bytes"

_TRUSTED = "nest, pads known from a first batch"
_DEVICE_TARGETS = {_ALWAYS: "<= 1400", _TRUSTED: "<= 900", _NEVER: "<= 900", _UNNEST: "<= 1000"}


def rows(clock: Clock, batch: TensorDict) -> list[Row]:
    """Of a batch on the host. Raises NotExact if the nested values are not those of x[mask], or the batch is not
    restored bit for bit."""
    case = f"ops nest, {batch.batch_size[0]} rows"
    progress(case)
    first = VerifyFirst()
    batch = batch.to(clock.device)
    masks = nesting.masks_of(batch)
    ours: dict[str, Work] = {
        _ALWAYS: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID),
        _TRUSTED: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify=first),
        _NEVER: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify="never"),
    }
    fields = {axis: [x for name, x in batch.items() if nesting.axis_of(name) == axis] for axis in masks}
    for name, work in ours.items():
        for _ in range(2):  # the second time with what was remembered
            nested = work()
            assert isinstance(nested, TensorDict)
            for field, x in batch.items():
                values = x[masks[nesting.axis_of(field)]]
                require_same_tensor(f'{case}, {name}: field "{field}"', nested[field].values().cpu(), values.cpu())
            require_same(f"{case}, unnest", maskpack.unnest_batch_by_mask(nested).cpu(), batch.cpu())
    nested = maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID)
    layouts = {axis: RowLayout.from_mask(mask) for axis, mask in masks.items()}
    padded = [x.view(torch.int64) if x.shape[-1] % 2 == 0 else x for x in map(bits, batch.values())]
    ours[_UNNEST] = lambda: maskpack.unnest_batch_by_mask(nested)
    others: dict[str, Work] = {
        _PACK: lambda: [ops.pack(fields[axis], layouts[axis]) for axis in masks],
        _MASK: lambda: [x[masks[axis]] for axis in masks for x in fields[axis]],
        _READ: lambda: [x.sum() for x in padded],
        _WRITE: lambda: floors.write(padded),
    }
    wall, host = clock.wall_us({**ours, **others}), clock.host_us(ours)
    syncs = {name: clock.syncs(work) for name, work in ours.items()}
    most = {_ALWAYS: "<= 2", _TRUSTED: "<= 1", _NEVER: "<= 1", _UNNEST: "<= 1"}
    return [
        *(Row(case, f"{name}, wall", us, "us", _DEVICE_TARGETS.get(name)) for name, us in wall.items()),
        *(Row(case, f"{name}, host", us, "us") for name, us in host.items()),
        *(Row(case, f"{name}, host synchronisations", count, "syncs", most[name]) for name, count in syncs.items()),
        *ratios(case, wall, [(_MASK, name, None) for name in (_ALWAYS, _TRUSTED, _NEVER)]),
    ]
