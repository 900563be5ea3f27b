"""RowLayout, pack, unpack, decompress and log-probs on a GPU, against plain torch.

    layout    a mask [B, S] -> RowLayout        wide       pack and unpack rows of features, and their gradients
    pack      ten fields in one call, and one   decode     a packed batch from the host to the device
    unpack    ten fields, a pad for each        logprobs   log-probs without the logits
    heads     log-probs beside the output layers of others
    peer      a batch from one GPU to another of the same host

B is four times `rows`. Masks: those of the reference workload (one run a row), its multi-turn variant with the tool
output left out (several runs), scattered positions of the same density, all real. Every result is compared bit for bit
before it is timed. A figure of maskpack is shown on the device, by the wall and until the call is back (`gpu`);
a rival on the device, or by the wall if it synchronises; every ratio is of two times of one kind.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bench.cases.ops import decode, heads, log_probs, peer
from bench.harness.gpu import Clock, Times, Work
from bench.harness.measure import progress, require_same_tensor
from bench.harness.passes import the_device
from bench.harness.processes import Link
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.rivals import nesting
from bench.rivals import packing as rivals
from bench.workloads import PAD_ID
from bench.workloads.reference import PROMPT_WIDTH, RESPONSE_WIDTH, make_batch
from maskpack import RowLayout, ops
from maskpack.layout.row_layout import host_spans

OURS, PROMISED = "maskpack", "maskpack, total promised"
ONE, SEVERAL, SCATTERED, ALL = "one run a row", "several runs a row", "scattered", "all real"
DENSITIES = (0.05, 0.3, 1.0)

_PADS = [PAD_ID, 0, 1, 0, *[0.0] * 6]  # of ids, a mask, positions, another mask, and six floats
_WRITE = "writing the output alone"


@dataclass(frozen=True)
class Sizes:
    """How large the works are: P and R of the token fields, the shape [B, S, F] of the wide ones, and the problems of
    log-probs; `replays` is how many rounds a round of the command line is, of works that take microseconds."""

    prompt_width: int = PROMPT_WIDTH
    response_width: int = RESPONSE_WIDTH
    wide: tuple[int, int, int] = (32, 1024, 4096)
    log_probs: log_probs.Sizes = field(default_factory=log_probs.Sizes)
    heads: heads.Sizes = field(default_factory=heads.Sizes)
    replays: int = 10


@dataclass(frozen=True)
class Stage:
    """What the groups share: the clock, the sizes, and masks and fields on the device."""

    clock: Clock
    sizes: Sizes
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """[B, S] of the token fields."""
        return self.rows, self.sizes.prompt_width + self.sizes.response_width

    @cached_property
    def random(self) -> torch.Generator:
        return torch.Generator(self.clock.device).manual_seed(0)

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """bool [B, S]."""
        sizes = self.sizes
        batch = make_batch(
            "multi-turn", self.rows, prompt_width=sizes.prompt_width, response_width=sizes.response_width
        )
        one = batch["attention_mask"].bool()
        several = torch.cat([one[:, : sizes.prompt_width], batch["response_mask"].bool()], 1)
        scattered = torch.rand(self.shape, generator=self.random, device=self.clock.device) < one.float().mean().item()
        masks = {ONE: one, SEVERAL: several, SCATTERED: scattered, ALL: torch.ones_like(one)}
        return {name: mask.to(self.clock.device) for name, mask in masks.items()}

    @cached_property
    def fields(self) -> list[Tensor]:
        """Ten fields [B, S] of random values: four int64, six float32."""
        shape, device, random = self.shape, self.clock.device, self.random
        integers = [torch.randint(0, PAD_ID, shape, generator=random, device=device) for _ in range(4)]
        return [*integers, *(torch.randn(shape, generator=random, device=device) for _ in range(6))]


def figures(
    case: str,
    times: Mapping[str, Times],
    targets: Mapping[str, str],
    ratios: Mapping[tuple[str, str], str | None] | None = None,
) -> list[Row]:
    """Ours in every way of timing, the others in their best; what others take as multiples of ours; `ratios` of two
    works with their targets. `targets` are those of the rows by their names."""
    ours = [name for name in times if name.startswith(OURS)]
    rows: list[Row] = []
    for name, taken in times.items():
        ways = {"device": taken.device, "wall": taken.wall, "host": taken.host}
        for way, us in ways.items():
            shown = name in ours or way == ("wall" if taken.device is None else "device")
            if shown and us is not None:
                rows.append(Row(case, f"{name}, {way}", us, "us"))
        if name in ours or taken.syncs:
            rows.append(Row(case, f"{name}, host synchronisations", taken.syncs, "syncs"))
    rows += [
        Row(case, f"{other} / {own}", times[other].over(times[own]), "x")
        for own in ours
        for other in times
        if other not in ours
    ]
    rows += [Row(case, f"{a} / {b}", times[a].over(times[b]), "x", to) for (a, b), to in (ratios or {}).items()]
    return [Row(row.case, row.name, row.value, row.unit, targets.get(row.name, row.target)) for row in rows]


def require_all(what: str, seen: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raises NotExact unless both have the same tensors."""
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        require_same_tensor(f"{what}, field {number}", one, other)


# -------------------------------------------------------------------- mask -> layout


def _layout(stage: Stage) -> RowGroups:
    return (_layout_of(stage, name) for name in stage.masks)


def _layout_of(stage: Stage, name: str) -> list[Row]:
    case, mask = f"ops layout, {name}", stage.masks[name]
    progress(case)
    total = int(mask.sum())
    works: dict[str, Work] = {OURS: lambda: _laid_out(mask)}
    if name in (ONE, ALL):
        works[PROMISED] = lambda: _laid_out(mask, total)
    for own, work in works.items():
        _require_layout(f"{case}, {own}", work(), mask)
    works |= {
        "cu_seqlens alone, torch": lambda: rivals.cu_seqlens(mask),
        "metadata of unpad": lambda: rivals.unpadding(mask),
        "pad, diff, nonzero, nested": lambda: nesting.mask_runs(mask),
    }
    targets = {
        f"{OURS}, wall": "<= 150" if name in (ONE, ALL) else "<= 250",
        f"{OURS}, host synchronisations": "<= 1",
        f"{PROMISED}, device": "<= 15",
        f"{PROMISED}, wall": "<= 60",
        f"{PROMISED}, host synchronisations": "<= 0",
    }
    size = Row(case, "real positions", total, "tokens")
    return [size, *figures(case, stage.clock.measure(works), targets)]


def _laid_out(mask: Tensor, total: int | None = None) -> RowLayout:
    layout = RowLayout.from_mask(mask) if total is None else RowLayout.from_mask(mask, num_tokens=total)
    _ = layout.cu_seqlens  # made when it is first asked for
    return layout


def _require_layout(what: str, layout: RowLayout, mask: Tensor) -> None:
    """Raises NotExact unless the layout says what all the rivals say together."""
    runs, unpadding = nesting.mask_runs(mask), rivals.unpadding(mask)
    starts, counts, splits = (torch.from_numpy(part).to(mask.device) for part in host_spans(layout))
    pairs = {
        "cu_seqlens": (layout.cu_seqlens, unpadding.cu_seqlens),
        "cu_seqlens alone": (layout.cu_seqlens, rivals.cu_seqlens(mask)),
        "indices": (layout.indices, unpadding.indices),
        "starts": (starts, runs["starts"].values()),
        "counts": (counts, runs["lengths"].values()),
        "splits": (splits, runs["starts"].offsets()),
        "longest row": (torch.tensor(layout.max_length), torch.tensor(unpadding.longest)),
    }
    for part, (seen, expected) in pairs.items():
        require_same_tensor(f"{what}, {part}", seen, expected)


# -------------------------------------------------------------------- ten fields


def _pack(stage: Stage) -> RowGroups:
    return (rows_of(stage, name) for name in (ONE, SEVERAL, SCATTERED) for rows_of in (_pack_by, _pack_from))


def _pack_from(stage: Stage, name: str) -> list[Row]:
    """The layout is part of the work."""
    mask, fields, rows = stage.masks[name], stage.fields, list[Row]()
    for many, wall in ((10, "<= 250"), (1, "<= 150")):
        case, some = f"ops pack from the mask, {name}, {many} fields", fields[-many:]
        progress(case)
        compiled = rivals.compiled_pack_by_index(stage.clock.device)
        works: dict[str, Work] = {
            OURS: lambda some=some: ops.pack(some, RowLayout.from_mask(mask)),
            "nonzero, torch.compile": lambda some=some, compiled=compiled: compiled(some, rivals.mask_index(mask)),
            "x[mask]": lambda some=some: rivals.pack_by_mask(some, mask),
            "unpad each field": lambda some=some: rivals.pack_by_unpadding(some, mask),
        }
        expected = [torch.masked_select(x, mask) for x in some]
        for own, work in works.items():
            require_all(f"{case}, {own}", work(), expected)
        targets = {f"{OURS}, wall": wall if name == ONE else "", f"{OURS}, host synchronisations": "<= 1"}
        rows += figures(case, stage.clock.measure(works), {key: to for key, to in targets.items() if to})
    return rows


def _pack_by(stage: Stage, name: str) -> list[Row]:
    case, mask, fields = f"ops pack, {name}", stage.masks[name], stage.fields
    progress(case)
    layout, index = RowLayout.from_mask(mask), rivals.mask_index(mask)
    compiled = rivals.compiled_pack_by_index(stage.clock.device)
    works: dict[str, Work] = {
        OURS: lambda: ops.pack(fields, layout),
        "index_select, index given": lambda: rivals.pack_by_index(fields, index),
        "torch.compile, index given": lambda: compiled(fields, index),
        "x[mask]": lambda: rivals.pack_by_mask(fields, mask),
    }
    expected = [torch.masked_select(x, mask) for x in fields]
    for own, work in works.items():
        require_all(f"{case}, {own}", work(), expected)
    size = sum(x.nbytes for x in expected)
    line = torch.cat([x.view(torch.uint8) for x in expected])
    works["one copy of as many bytes"] = line.clone
    targets = {
        f"{OURS}, device": "<= 150" if name == SCATTERED else "<= 50",
        f"{OURS}, host": "<= 80",
        f"{OURS}, host synchronisations": "<= 0",
    }
    return [Row(case, "packed bytes", size, "bytes"), *figures(case, stage.clock.measure(works), targets)]


def _unpack(stage: Stage) -> RowGroups:
    return (_unpack_by(stage, name) for name in (ONE, SEVERAL, SCATTERED))


def _unpack_by(stage: Stage, name: str) -> list[Row]:
    case, mask, shape = f"ops unpack, {name}", stage.masks[name], stage.shape
    progress(case)
    layout, index = RowLayout.from_mask(mask), rivals.mask_index(mask)
    values = [torch.masked_select(x, mask) for x in stage.fields]
    works: dict[str, Work] = {
        OURS: lambda: ops.unpack(values, layout, _PADS),
        "full and index_copy_, index given": lambda: rivals.unpack_by_index(values, index, shape, _PADS),
        "full and out[mask]": lambda: rivals.unpack_by_mask(values, mask, _PADS),
    }
    expected = [
        torch.where(mask, x, torch.tensor(pad, dtype=x.dtype, device=x.device))
        for x, pad in zip(stage.fields, _PADS, strict=True)
    ]
    for own, work in works.items():
        require_all(f"{case}, {own}", work(), expected)
    works[_WRITE] = lambda: rivals.write_outputs(values, shape, _PADS)
    targets = {f"{OURS}, device": "<= 260", f"{OURS}, wall": "<= 350", f"{OURS}, host synchronisations": "<= 0"}
    ratios = {(OURS, _WRITE): None if name == SCATTERED else "<= 1.35"}
    size = Row(case, "padded bytes", sum(x.nbytes for x in expected), "bytes")
    del expected
    return [size, *figures(case, stage.clock.measure(works), targets, ratios)]


# -------------------------------------------------------------------- rows of features


def _wide(stage: Stage) -> RowGroups:
    return (_wide_at(stage, density) for density in DENSITIES)


def _wide_at(stage: Stage, density: float) -> list[Row]:
    """Hidden states in bfloat16: pack them, and unpack them again with zeros."""
    rows, width, features = stage.sizes.wide
    case, device = f"ops rows of {features} bf16, {density} dense", stage.clock.device
    progress(case)
    mask = uneven_rows(rows, width, int(density * rows * width)).to(device)
    layout, index = RowLayout.from_mask(mask), rivals.mask_index(mask)
    x = torch.randn((rows, width, features), generator=stage.random, device=device).to(torch.bfloat16)
    values, shape = x[mask], (rows, width)
    packs: dict[str, Work] = {
        OURS: lambda: ops.pack(x, layout),
        "index_select, index given": lambda: x.flatten(0, 1).index_select(0, index),
        "x[mask]": lambda: x[mask],
    }
    unpacks: dict[str, Work] = {
        OURS: lambda: ops.unpack(values, layout, 0),
        "zeros and index_copy_, index given": lambda: rivals.unpack_by_index([values], index, shape, [0])[0],
    }
    for own, work in packs.items():
        require_same_tensor(f"{case}, pack, {own}", work(), values)
    for own, work in unpacks.items():
        require_same_tensor(f"{case}, unpack, {own}", work(), x.masked_fill(~mask[..., None], 0))
    unpacks[_WRITE] = lambda: rivals.write_outputs([values], shape, [0])
    targets = {f"{OURS}, host synchronisations": "<= 0"}
    leaf, gradient = x.clone().requires_grad_(), torch.randn_like(values)
    both: dict[str, Work] = {
        OURS: lambda: torch.autograd.grad(ops.pack(leaf, layout), leaf, gradient),
        "index_select, index given": lambda: torch.autograd.grad(
            leaf.flatten(0, 1).index_select(0, index), leaf, gradient
        ),
        "x[mask]": lambda: torch.autograd.grad(leaf[mask], leaf, gradient),
    }
    spread = rivals.unpack_by_index([gradient], index, shape, [0])
    for own, work in both.items():
        require_all(f"{case}, gradients, {own}", work(), spread)
    del spread
    pack, unpack = stage.clock.measure(packs), stage.clock.measure(unpacks)
    gradients = stage.clock.measure(both)
    return [
        *figures(f"{case}, pack forward and backward", gradients, targets | {f"{OURS}, wall": "<= 400"}),
        Row(f"{case}, pack", "packed bytes", values.nbytes, "bytes"),
        *figures(f"{case}, pack", pack, targets, {(OURS, "index_select, index given"): "<= 1.05"}),
        Row(f"{case}, unpack", "padded bytes", x.nbytes, "bytes"),
        *figures(f"{case}, unpack", unpack, targets, {(OURS, _WRITE): "<= 1.2" if density <= 0.3 else None}),
    ]


def uneven_rows(rows: int, width: int, total: int) -> Tensor:
    """bool [rows, width]: rows that begin at 0, of random lengths that are `total` together."""
    lengths = torch.full((rows,), total // rows)
    lengths[: total % rows] += 1
    random = torch.Generator().manual_seed(0)
    for row in range(0, rows - 1, 2):  # of two neighbours, one gives some to the other
        most = int(torch.minimum(lengths[row], width - lengths[row + 1]))
        given = int(torch.randint(0, most + 1, (), generator=random))
        lengths[row] -= given
        lengths[row + 1] += given
    return torch.arange(width) < lengths[:, None]


KERNELS: dict[str, Callable[[Stage], RowGroups]] = {"layout": _layout, "pack": _pack, "unpack": _unpack, "wide": _wide}
GROUPS = (*KERNELS, "decode", "peer", "logprobs", "heads")
_TINY = Sizes(
    37, 229, (5, 33, 8), log_probs.Sizes(4, 9, 8, 50, 5, (0.3, 1.0)), heads.Sizes([(8, 50)], [4], 9, 5), replays=1
)


@case(
    "ops",
    help="kernels on a GPU: mask to layout, pack, unpack, encode, decode, log-probs; from one GPU to another",
    on="gpu",
    groups=GROUPS,
    tiny={"rows": 5, "sizes": _TINY, "backend": "gloo"},
)
def run(
    rows: int, rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None, backend: Link = "nccl"
) -> RowGroups:
    """logprobs and heads need a GPU, peer two. Raises NotExact if ours or a rival gives other bits."""
    sizes, wanted, device = sizes or Sizes(), only or GROUPS, the_device()
    widths = sizes.prompt_width, sizes.response_width
    stage = Stage(Clock(device, sizes.replays * rounds), sizes, 4 * rows)
    for group, measured in KERNELS.items():
        if group in wanted:
            yield from measured(stage)
    if "decode" in wanted:
        yield from decode.rows(Clock(device, rounds), rows, *widths)
    if "peer" in wanted:
        yield from peer.rows(rows, rounds, widths, backend)
    del stage  # what follows measures memory
    gc.collect()
    if "logprobs" in wanted:
        progress("ops logprobs")
        yield from log_probs.rows(sizes.log_probs, device, -(-rounds // 2))
    if "heads" in wanted:
        yield from heads.rows(sizes.heads, device, -(-rounds // 2))
