"""Time until a batch that lies on the host is on the GPU: packed and decoded there, against copying it padded.

From pinned memory, where both lie pinned beforehand; and from ordinary memory, where both pay for staging. A third way
decodes on the host and copies what it gets. All times are by the wall, the device idle before and after. What crosses
the link is counted by the profiler; the floor is one copy of the packed bytes from pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from bench import baselines, nest, ops_encode
from bench.gpu import Clock, Work
from bench.measure import NotExact, progress, require_same, require_same_tensor
from bench.report import Row
from bench.workloads import PAD_ID, make_batch
from maskpack import PackedBatch, compress, decompress

_PARTS = 8  # the large batch is so many small ones, one after the other
_TARGETS = {"nested": ">= 8", "padded": ">= 7"}
_TARGETS_LARGE = {"nested": ">= 20", "padded": ">= 15"}
_COPY_PINNED, _COPY = "copy of the padded batch, pinned", "copy of the padded batch"
_JAGGED, _WRITE = "copy of the jagged values alone, pinned", "one write of the padded bytes"
_FLOOR = "one copy of the packed bytes, pinned"


def rows(clock: Clock, count: int, prompt_width: int, response_width: int) -> list[Row]:
    """The figures for `count` rows, and for eight times as many. Raises NotExact if a bit is lost."""
    parts = [
        make_batch("reference", count, prompt_width=prompt_width, response_width=response_width, seed=seed)
        for seed in range(_PARTS)
    ]
    packed = [compress(part, pad_token_id=PAD_ID) for part in parts]
    report = _decode(clock, parts[0], packed[0], _TARGETS) + nest.on_device(clock, parts[0])
    report += _one_by_one(clock, packed) + ops_encode.rows(clock, parts[0])
    whole = joined(parts)
    report += _decode(clock, whole, PackedBatch.cat(packed), _TARGETS_LARGE) + nest.on_device(clock, whole)
    return report + ops_encode.rows(clock, whole)


def _one_by_one(clock: Clock, packed: list[PackedBatch]) -> list[Row]:
    """The small batches one after the other, each another batch of the same fields."""
    pinned = [one.pin_memory() for one in packed] if clock.device.type == "cuda" else packed
    works: dict[str, Work] = {}
    for layout in ("nested", "padded"):
        decoding = [_decoding(one, layout, clock.device) for one in pinned]
        works[layout] = lambda decoding=decoding: [work() for work in decoding]
    case = f"ops decode, {len(packed)} batches of {packed[0].num_rows} rows"
    return [Row(case, f"{name}, pinned, wall", us, "us") for name, us in clock.wall_us(works).items()]


def joined(parts: list[TensorDict]) -> TensorDict:
    """The rows of padded batches, one after the other."""
    names = parts[0].keys()
    fields = {name: torch.cat([part[name] for part in parts]) for name in names}
    return TensorDict(fields, batch_size=[sum(part.batch_size[0] for part in parts)])


def _decode(clock: Clock, batch: TensorDict, packed: PackedBatch, targets: Mapping[str, str]) -> list[Row]:
    device, cuda = clock.device, clock.device.type == "cuda"
    case = f"ops decode, {batch.batch_size[0]} rows"
    progress(case)
    pinned = packed.pin_memory() if cuda else packed
    fields = list(batch.values())
    pinned_fields = [field.pin_memory() for field in fields] if cuda else fields
    masks = baselines.masks_of(batch)
    values = [field[masks[baselines.axis_of(name)]] for name, field in batch.items()]
    pinned_values = [one.pin_memory() for one in values] if cuda else values
    line = torch.empty(packed.nbytes, dtype=torch.uint8, pin_memory=cuda)
    ours: dict[str, Work] = {}
    others: dict[str, Work] = {}
    for layout in ("nested", "padded"):
        ours[f"{layout}, pinned"] = _decoding(pinned, layout, device)
        ours[layout] = _decoding(packed, layout, device)
        others[f"{layout}, decoded on the host"] = _decoding_on_host(packed, layout, device)
        for name, work in {**ours, **others}.items():
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
        *_links(case, clock, ours),
        *_ratios(case, wall, targets),
        Row(case, "link, pinned", sum(field.nbytes for field in fields) / wall[_COPY_PINNED] / 1e3, "GB/s"),
    ]


def _decoding(packed: PackedBatch, layout: str, device: torch.device) -> Work:
    return lambda: decompress(packed, format=layout, device=device)


def _decoding_on_host(packed: PackedBatch, layout: str, device: torch.device) -> Work:
    return lambda: decompress(packed, format=layout, device="cpu").to(device)


# -------------------------------------------------------------------- rows of the report


def _sizes(case: str, batch: TensorDict, packed: PackedBatch) -> list[Row]:
    padded = sum(field.nbytes for field in batch.values())
    return [Row(case, "padded", padded, "bytes"), Row(case, "packed", packed.nbytes, "bytes")]


def _links(case: str, clock: Clock, ours: Mapping[str, Work]) -> list[Row]:
    report: list[Row] = []
    for name, work in ours.items():
        seen = clock.uploads(work)
        report.append(Row(case, f"{name}, over the link", seen.nbytes, "bytes"))
        report.append(Row(case, f"{name}, copies to the device", seen.copies, "copies"))
    return report


def _ratios(case: str, wall: Mapping[str, float], targets: Mapping[str, str]) -> list[Row]:
    pairs = [
        *((_COPY_PINNED, f"{layout}, pinned", target) for layout, target in targets.items()),
        *((_COPY, layout, None) for layout in targets),
        *((f"{layout}, decoded on the host", layout, None) for layout in targets),
        *((f"{layout}, pinned", _FLOOR, None) for layout in targets),
    ]
    return [Row(case, f"{above} / {below}", wall[above] / wall[below], "x", target) for above, below, target in pairs]


# -------------------------------------------------------------------- exactness


def require_batch(what: str, seen: TensorDict, batch: TensorDict, layout: str) -> None:
    """Raises NotExact unless `seen` is the batch, padded or nested; compared on the device of the batch."""
    home = batch["attention_mask"].device
    if layout == "padded":
        require_same(what, seen.to(home), batch)
        return
    seen = seen.exclude("_maskpack")
    if list(seen.keys()) != list(batch.keys()):
        raise NotExact(f"{what}: fields {list(seen.keys())}; expected {list(batch.keys())}.")
    masks = baselines.masks_of(batch)
    for name, field in batch.items():
        mask = masks[baselines.axis_of(name)]
        _require_nested(f'{what}: field "{name}"', seen[name], field[mask], mask)


def _require_nested(what: str, seen: Tensor, values: Tensor, mask: Tensor) -> None:
    require_same_tensor(f"{what}, values", seen.values().to(values.device), values)
    require_same_tensor(
        f"{what}, offsets", seen.offsets().to(mask.device), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    )
