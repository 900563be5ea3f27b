"""Time to nest a padded batch and to restore it, on the reference workload.

Whole public calls are timed: scan of the masks, planning, gather, jagged tensors, TensorDict. The usual code checks no
pad, so verify="never" is what stands against it; verify="always" stands against one read of the padded bytes. memcpy
copies exactly the bytes that nesting returns (the values of all jagged fields), into newly allocated memory. x[mask],
index_select and ops.pack get their masks, indices and layouts for nothing and return bare values.

Everything runs in one thread. The usual code is timed whole and in its two parts. Whole over parts is about 1 on a
quiet machine; where it is far from 1, other processes held up this one, and no ratio of that run counts.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

import maskpack
from bench import baselines, floors
from bench.gpu import Clock, Work
from bench.measure import bits, interleaved, progress, require_same, require_same_tensor, torch_threads
from bench.report import Row
from bench.workloads import PAD_ID, PROMPT_WIDTH, RESPONSE_WIDTH, make_batch
from maskpack import RowLayout, VerifyFirst, ops

_NEVER, _ALWAYS = "nest, verify=never", "nest, verify=always"
_USUAL, _FIELDS, _TABLES = "nest, usual code", "nest, usual code, fields alone", "nest, usual code, run tables alone"
_MASK, _INDEX, _MEMCPY = "x[mask]", "index_select", "memcpy of the nested values"
_PACK = "ops.pack, layouts given"
_UNNEST, _SCATTER = "unnest", "unnest, full and boolean scatter"
_READ, _WRITE = "one read of the padded bytes", "one write of the padded bytes"

_RATIOS = (
    (_USUAL, _NEVER, ">= 15"),
    (_NEVER, _MEMCPY, "<= 2.7"),
    (_ALWAYS, _READ, "<= 1.35"),
    (_FIELDS, _NEVER, None),
    (_USUAL, _ALWAYS, None),
    (_MASK, _NEVER, None),
    (_INDEX, _NEVER, None),
    (_USUAL, _MEMCPY, None),
    (_INDEX, _MEMCPY, None),
    (_PACK, _MEMCPY, None),
    (_FIELDS, _PACK, None),
    (_SCATTER, _UNNEST, None),
    (_UNNEST, _WRITE, None),
)


def run(
    rows: int = 256, rounds: int = 9, *, prompt_width: int = PROMPT_WIDTH, response_width: int = RESPONSE_WIDTH
) -> list[Row]:
    """The rows of the report. Raises NotExact if ours and the usual code give other values, or not the batch again."""
    progress(f"nest: {rows} rows")
    batch = make_batch("reference", rows, prompt_width=prompt_width, response_width=response_width)
    order = tuple(batch.keys())
    masks = baselines.masks_of(batch)
    indices = {axis: mask.flatten().nonzero().view(-1) for axis, mask in masks.items()}
    padded = [bits(field) for field in batch.values()]
    usual = baselines.nest(batch)
    ours = maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify="never")
    for name in order:
        if name != "attention_mask":
            require_same_tensor(f'nest: field "{name}"', ours[name], usual[name])
    require_same("unnest", maskpack.unnest_batch_by_mask(ours), batch)
    require_same("unnest, usual code", baselines.unnest(usual, masks, order), batch)
    values = [ours[name].values() for name in order]
    layouts = {mask.shape[1]: RowLayout.from_mask(mask) for mask in masks.values()}

    works = {
        _NEVER: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify="never"),
        _ALWAYS: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID),
        _USUAL: lambda: baselines.nest(batch),
        _FIELDS: lambda: baselines.nest_fields(batch, masks),
        _TABLES: lambda: baselines.span_tables(masks),
        _MASK: lambda: baselines.gather_by_mask(batch, masks),
        _INDEX: lambda: baselines.gather_by_index(batch, indices),
        _PACK: lambda: [ops.pack(field, layouts[field.shape[1]]) for field in batch.values()],
        _MEMCPY: lambda: floors.copy(values),
        _UNNEST: lambda: maskpack.unnest_batch_by_mask(ours),
        _SCATTER: lambda: baselines.unnest(usual, masks, order),
        _READ: lambda: floors.read(padded),
        _WRITE: lambda: floors.write(padded),
    }
    with torch_threads(1):
        ms = interleaved(works, rounds)
    case = "nest reference"
    return [
        Row(case, "tensors, padded", sum(field.nbytes for field in padded), "bytes"),
        Row(case, "tensors, nested", sum(value.nbytes for value in values), "bytes"),
        *(Row(case, name, value, "ms") for name, value in ms.items()),
        Row(case, "nest, usual code / its parts", ms[_USUAL] / (ms[_FIELDS] + ms[_TABLES]), "x"),
        *(Row(case, f"{above} / {below}", ms[above] / ms[below], "x", target) for above, below, target in _RATIOS),
    ]


# -------------------------------------------------------------------- on a GPU

_TRUSTED = "nest, pads known from a first batch"
_DEVICE_TARGETS = {_ALWAYS: "<= 1400", _TRUSTED: "<= 900", _NEVER: "<= 900", _UNNEST: "<= 1000"}


def on_device(clock: Clock, batch: TensorDict) -> list[Row]:
    """The same calls with a batch that lies on the clock's device, by the wall, and how often they synchronise. Their
    floors are a pack of all fields, one read of the padded bytes and one write of them. Raises NotExact if the nested
    values are not those of x[mask], or the batch is not restored bit for bit."""
    case = f"ops nest, {batch.batch_size[0]} rows"
    progress(case)
    first = VerifyFirst()
    batch = batch.to(clock.device)
    masks = baselines.masks_of(batch)
    ours: dict[str, Work] = {
        _ALWAYS: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID),
        _TRUSTED: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify=first),
        _NEVER: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify="never"),
    }
    fields = {axis: [x for name, x in batch.items() if baselines.axis_of(name) == axis] for axis in masks}
    for name, work in ours.items():
        for _ in range(2):  # the second time with what was remembered
            nested = work()
            assert isinstance(nested, TensorDict)
            for field, x in batch.items():
                values = x[masks[baselines.axis_of(field)]]
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
        *(Row(case, f"{_MASK} / {name}", wall[_MASK] / wall[name], "x") for name in (_ALWAYS, _TRUSTED, _NEVER)),
    ]
