"""RowLayout, pack, unpack, decompress and log-probs on a GPU, against plain torch.

    kernels   a mask [B, S] -> RowLayout; pack and unpack of ten fields, a pad for each
    host      a packed batch from the host to the device, and back
    peer      a batch from one GPU to another of the same host
    heads     log-probs without the logits, beside the output layers of others

B is four times `rows` in kernels. The mask is that of the reference workload, one run a row. Every result is compared
bit for bit before it is timed. A figure of maskpack is shown on the device and by the wall (`harness.gpu`); a rival on
the device, or by the wall if it synchronises; every ratio is of two times of one kind.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.cases.ops import heads, host, peer
from bench.harness.gpu import Clock, Times, Work
from bench.harness.measure import progress, require_same_tensor
from bench.harness.passes import the_device
from bench.harness.processes import Link
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.rivals import packing as rivals
from bench.workloads import PAD_ID
from bench.workloads.reference import PROMPT_WIDTH, RESPONSE_WIDTH, make_batch
from maskpack import RowLayout, ops

OURS, PROMISED = "maskpack", "maskpack, total promised"
GROUPS = ("kernels", "host", "peer", "heads")
_PADS = [PAD_ID, 0, 1, 0, *[0.0] * 6]  # of ids, a mask, positions, another mask, and six floats
_WRITE = "writing the output alone"
_NO_SYNCS = {f"{name}, host synchronisations": "<= 0" for name in (OURS, PROMISED)}
_ONE_SYNC = {f"{OURS}, host synchronisations": "<= 1", f"{PROMISED}, host synchronisations": "<= 0"}


@dataclass(frozen=True)
class Sizes:
    """How large the works are: P and R of the token fields, and the output layers; `replays` is how many rounds a round
    of the command line is, of works that take microseconds."""

    prompt_width: int = PROMPT_WIDTH
    response_width: int = RESPONSE_WIDTH
    heads: heads.Sizes = field(default_factory=heads.Sizes)
    replays: int = 10


def figures(case: str, times: Mapping[str, Times], targets: Mapping[str, str]) -> list[Row]:
    """Ours in every way of timing, the others in their best; what others take as multiples of ours. `targets` are those
    of the rows by their names."""
    ours = [name for name in times if name.startswith(OURS)]
    rows: list[Row] = []
    for name, taken in times.items():
        for way, us in (("device", taken.device), ("wall", taken.wall)):
            shown = name in ours or way == ("wall" if taken.device is None else "device")
            if shown and us is not None:
                rows.append(Row(case, f"{name}, {way}", us, "us"))
        if name in ours or taken.syncs:
            rows.append(Row(case, f"{name}, host synchronisations", taken.syncs, "syncs"))
    others = [name for name in times if name not in ours]
    rows += [Row(case, f"{other} / {own}", times[other].over(times[own]), "x") for own in ours for other in others]
    return [Row(row.case, row.name, row.value, row.unit, targets.get(row.name)) for row in rows]


def require_all(what: str, works: Mapping[str, Work], expected: Sequence[Tensor]) -> None:
    """Raises NotExact unless each work gives the tensors."""
    for name, work in works.items():
        seen: list[Tensor] = work()  # type: ignore[assignment]
        for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
            require_same_tensor(f"{what}, {name}, field {number}", one, other)


def kernels(clock: Clock, sizes: Sizes, rows: int) -> RowGroups:
    batch = make_batch(rows=rows, prompt_width=sizes.prompt_width, response_width=sizes.response_width)
    mask = batch["attention_mask"].bool().to(clock.device)
    random = torch.Generator(clock.device).manual_seed(0)
    more = {"generator": random, "device": clock.device}
    fields = [torch.randint(0, PAD_ID, mask.shape, **more) for _ in range(4)]
    fields += [torch.randn(mask.shape, **more) for _ in range(6)]
    yield _layout(clock, mask)
    yield _pack_from(clock, mask, fields)
    yield _pack(clock, mask, fields)
    yield _unpack(clock, mask, fields)


def _layout(clock: Clock, mask: Tensor) -> list[Row]:
    case, total = "ops layout", int(mask.sum())
    progress(case)
    works: dict[str, Work] = {OURS: lambda: _laid_out(mask), PROMISED: lambda: _laid_out(mask, total)}
    unpadding = rivals.unpadding(mask)
    for own in works:
        layout = _laid_out(mask, total if own == PROMISED else None)
        for part, seen, expected in (
            ("cu_seqlens", layout.cu_seqlens, unpadding.cu_seqlens),
            ("cu_seqlens alone", layout.cu_seqlens, rivals.cu_seqlens(mask)),
            ("indices", layout.indices, unpadding.indices),
            ("longest row", torch.tensor(layout.max_length), torch.tensor(unpadding.longest)),
        ):
            require_same_tensor(f"{case}, {own}, {part}", seen, expected)
    works["cu_seqlens alone, torch"] = lambda: rivals.cu_seqlens(mask)
    works["metadata of unpad"] = lambda: rivals.unpadding(mask)
    targets = {f"{OURS}, wall": "<= 150", f"{PROMISED}, device": "<= 15", f"{PROMISED}, wall": "<= 60", **_ONE_SYNC}
    return [Row(case, "real positions", total, "tokens"), *figures(case, clock.measure(works), targets)]


def _laid_out(mask: Tensor, total: int | None = None) -> RowLayout:
    layout = RowLayout.from_mask(mask) if total is None else RowLayout.from_mask(mask, num_tokens=total)
    _ = layout.cu_seqlens  # made when it is first asked for
    return layout


def _pack_from(clock: Clock, mask: Tensor, fields: list[Tensor]) -> list[Row]:
    """The layout is part of the work."""
    case, total = "ops pack from the mask, 10 fields", int(mask.sum())
    progress(case)
    compiled = rivals.compiled_pack_by_index(clock.device)
    works: dict[str, Work] = {
        OURS: lambda: ops.pack(fields, RowLayout.from_mask(mask)),
        PROMISED: lambda: ops.pack(fields, RowLayout.from_mask(mask, num_tokens=total)),
        "nonzero, index_select": lambda: rivals.pack_by_index(fields, rivals.mask_index(mask)),
        "nonzero, torch.compile": lambda: compiled(fields, rivals.mask_index(mask)),
        "x[mask]": lambda: [x[mask] for x in fields],
    }
    require_all(case, works, [torch.masked_select(x, mask) for x in fields])
    return figures(case, clock.measure(works), {f"{OURS}, wall": "<= 250", **_ONE_SYNC})


def _pack(clock: Clock, mask: Tensor, fields: list[Tensor]) -> list[Row]:
    case = "ops pack, 10 fields"
    progress(case)
    layout, index = RowLayout.from_mask(mask), rivals.mask_index(mask)
    compiled = rivals.compiled_pack_by_index(clock.device)
    works: dict[str, Work] = {
        OURS: lambda: ops.pack(fields, layout),
        "index_select, index given": lambda: rivals.pack_by_index(fields, index),
        "torch.compile, index given": lambda: compiled(fields, index),
    }
    expected = [torch.masked_select(x, mask) for x in fields]
    require_all(case, works, expected)
    line = torch.cat([x.view(torch.uint8) for x in expected])
    works["one copy of as many bytes"] = line.clone
    size = Row(case, "packed bytes", line.nbytes, "bytes")
    return [size, *figures(case, clock.measure(works), {f"{OURS}, device": "<= 50", **_NO_SYNCS})]


def _unpack(clock: Clock, mask: Tensor, fields: list[Tensor]) -> list[Row]:
    case = "ops unpack, 10 fields"
    progress(case)
    layout, index = RowLayout.from_mask(mask), rivals.mask_index(mask)
    values = [torch.masked_select(x, mask) for x in fields]
    works: dict[str, Work] = {
        OURS: lambda: ops.unpack(values, layout, _PADS),
        "full and index_copy_, index given": lambda: rivals.unpack_by_index(values, index, mask.shape, _PADS),
    }
    pads = [torch.tensor(pad, dtype=x.dtype, device=x.device) for x, pad in zip(fields, _PADS, strict=True)]
    require_all(case, works, [torch.where(mask, x, pad) for x, pad in zip(fields, pads, strict=True)])
    works[_WRITE] = lambda: rivals.write_outputs(values, mask.shape, _PADS)
    targets = {f"{OURS}, device": "<= 260", f"{OURS}, wall": "<= 350", f"{_WRITE} / {OURS}": ">= 0.74", **_NO_SYNCS}
    size = Row(case, "padded bytes", sum(x.nbytes for x in fields), "bytes")
    return [size, *figures(case, clock.measure(works), targets)]


@case(
    "ops",
    help="kernels on a GPU: mask to layout, pack, unpack, encode, decode, log-probs; from one GPU to another",
    on="gpu",
    groups=GROUPS,
    tiny={"rows": 5, "sizes": Sizes(37, 229, heads.Sizes([(8, 50)], [36], 5), 1), "backend": "gloo"},
)
def run(
    rows: int, rounds: int, *, only: Sequence[str] = GROUPS, sizes: Sizes | None = None, backend: Link = "nccl"
) -> RowGroups:
    """heads need a GPU, peer two. Raises NotExact if ours or a rival gives other bits."""
    sizes, device = sizes or Sizes(), the_device()
    widths = sizes.prompt_width, sizes.response_width
    if "kernels" in only:
        yield from kernels(Clock(device, sizes.replays * rounds), sizes, 4 * rows)
    if "host" in only:
        yield from host.rows(Clock(device, rounds), rows, *widths)
    if "peer" in only:
        yield from peer.rows(rows, rounds, widths, backend)
    gc.collect()  # what follows measures memory
    if "heads" in only:
        yield from heads.rows(sizes.heads, device, -(-rounds // 2))
