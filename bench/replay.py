"""Log-probs of a rollout batch by replay, packed and padded, on models of the shapes of Qwen3, and of a hybrid of
Qwen3.5's in which three layers of four carry state: `python -m bench replay`.

    ours                      response_log_probs over micro-batches of a token budget, from a nested batch
    ours, compiled            the same with replayable(model, compile=True)
    ours, attention of torch  the same, also compiled, where a flash-attn is installed, but without it
    ours, rows of one length  the same without any padding to save: the mean length, as many tokens a micro-batch
    own attention, the same   these rows as a dense [b, n], by the model's own scaled dot product attention
    padded                    micro-batches of a few rows at full width, the model's own attention, all logits

The hybrid runs ours and padded alone. Forward, and forward + backward with the layers checkpointed, in all alike.
Weights and tokens are random, lengths log-normal. Micro-batches of equal shapes take equal time, so of those a few are
run, and times are of all rows. TFLOP/s are those that real tokens need (`replay_rivals`). Before anything is timed ours
is compared with a float32 model. Synchronised wall time, interleaved, medians; the peak is of the process's
allocations, weights and gradients too.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.measure import NotExact, peak_bytes, progress
from bench.replay_rivals import HybridShape, Lengths, Shape, dense_log_probs, lone_log_probs, padded_log_probs
from bench.report import Row
from bench.workloads import token_fields
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.ops import attention
from maskpack.planning import MicroBatchPlan, PlanOptions, plan_micro_batches
from maskpack.replay import response_log_probs

OURS, EVEN, DENSE, PADDED = "ours", "ours, rows of one length", "own attention, dense rows of one length", "padded"
COMPILED, OF_TORCH = "ours, compiled", "ours, compiled, attention of torch"
IMAGES = "images"
_ALONE = "each row alone"
_PEAK_RATE = 989  # TFLOP/s of dense bfloat16 products on H100 and H200
FORWARD, BOTH = "forward", "forward + backward, layers checkpointed"
_GROUP = 16  # rows that share a prompt
_TIMES_ROUNDS = 3  # rounds of the command line that are one here, where a round takes most of a minute
_SLACK = 1.05  # of an error that is not worse than another: both are of a sample


@dataclass(frozen=True)
class Model:
    """A model, and how many micro-batches of equal shape are run: of padded rows, and of rows of one length; without
    the latter, ours and padded rows are all that is run. `target` is that of padded / ours."""

    name: str
    shape: Shape
    padded: int
    even: int
    target: str = ">= 3.5"


MODELS: Mapping[str, Model] = {
    "small": Model("Qwen3-0.6B", Shape(1024, 28, 16, 8, 128, 3072), padded=16, even=4),
    "large": Model("Qwen3-4B", Shape(2560, 36, 32, 8, 128, 9728), padded=4, even=2),
    "hybrid": Model(
        "12 layers of Qwen3.5, 3 gated delta nets to 1 attention",
        HybridShape(1024, 12, 8, 2, 256, 3584),
        padded=4,
        even=0,
        target=">= 3",
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Of the batch, its micro-batches and the models; `fill` is the real share, `compared` the rows that ours is
    compared on."""

    rows: int = 256
    prompt_width: int = 512
    response_width: int = 3584
    fill: float = 0.25
    token_budget: int = 32_768
    padded_rows: int = 4
    compared: int = 4
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)


LONG = Sizes(rows=64, prompt_width=2048, response_width=14_336, fill=0.084)
"""Longer rows, of which less is real, for `run`."""


def run(
    rows: int = 256,
    rounds: int = 9,
    *,
    only: Sequence[str] | None = None,
    sizes: Sizes | None = None,
    workload: str | None = None,
) -> list[Row]:
    """The rows of the report, of all models or of those in `only`, which may name IMAGES (`replay_images`), too; a
    round here is three of the command line. With a workload, those of `replay_workloads` instead.

    Raises ValueError for a group that does not exist, NotExact if ours is further from float32 than each row alone is.
    """
    if workload is not None:
        from bench import replay_workloads

        return replay_workloads.run(workload, rows, rounds)
    sizes = sizes or Sizes(rows)
    wanted = tuple(sizes.models) if only is None else tuple(only)
    known = (*sizes.models, IMAGES)
    if unknown := [group for group in wanted if group not in known]:
        raise ValueError(f"replay: no group {', '.join(unknown)}; expected some of {', '.join(known)}.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: list[Row] = []
    for group, model in sizes.models.items():
        if group in wanted:
            report += _of_model(model, sizes, -(-rounds // _TIMES_ROUNDS), device)
            gc.collect()  # the model, before the next is made
    if IMAGES in wanted:
        from bench import replay_images

        report += replay_images.run(replay_images.Sizes(), -(-rounds // _TIMES_ROUNDS), device)
    return report


def _of_model(model: Model, sizes: Sizes, rounds: int, device: torch.device) -> list[Row]:
    case = f"replay, shape of {model.name}"
    progress(case)
    stage = Stage(model, sizes, device)
    report = [*stage.described(case), *_errors(case, stage), *stage.mixed(case)]
    for step in (FORWARD, BOTH):
        progress(f"{case}, {step}")
        report += _timed(f"{case}, {step}", stage, stage.works(step), rounds)
    return report


# -------------------------------------------------------------------- rows


def prompt_and_response_lengths(sizes: Sizes) -> tuple[Lengths, Lengths]:
    """int64 [B] each: both fill the same share of their widths, prompts less unevenly and alike in groups."""
    random = np.random.default_rng(0)
    prompts = scaled_lengths(random, -(-sizes.rows // _GROUP), 0.5, sizes.fill, sizes.prompt_width)
    responses = scaled_lengths(random, sizes.rows, 1.0, sizes.fill, sizes.response_width)
    return prompts.repeat(_GROUP)[: sizes.rows], responses


def scaled_lengths(random: np.random.Generator, count: int, sigma: float, fill: float, width: int) -> Lengths:
    """Log-normal lengths, clipped to [1, width], which fill as much of the width as whole tokens can without more."""
    shape = np.exp(sigma * random.standard_normal(count))

    def at(scale: float) -> Lengths:
        return np.clip(np.rint(scale * shape), 1, width).astype(np.int64)

    low, high = 0.0, 100.0 * width
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).mean() <= fill * width else (low, middle)
    return at(low)


def padded_batch(prompts: Lengths, responses: Lengths, widths: tuple[int, int], vocabulary: int) -> TensorDict:
    """Prompts padded on the left, responses on the right, by the last id of the vocabulary; the others at random."""
    column, random = np.arange(sum(widths)), np.random.default_rng(1)
    mask = (column >= widths[0] - prompts[:, None]) & (column < widths[0] + responses[:, None])
    ids = np.where(mask, random.integers(0, vocabulary - 1, mask.shape), vocabulary - 1)
    fields = token_fields(ids, mask, widths[0])
    return TensorDict({name: torch.from_numpy(value) for name, value in fields.items()}, [len(prompts)])


@dataclass(frozen=True)
class Rows:
    """A batch in both forms, on the device."""

    prompts: Lengths
    responses: Lengths
    padded: TensorDict
    nested: TensorDict

    @property
    def lengths(self) -> Lengths:
        """int64 [B]."""
        return self.prompts + self.responses


# -------------------------------------------------------------------- works


@dataclass(frozen=True)
class Work:
    """A pass over some of the rows; their share of all, and the FLOPs that their real tokens need."""

    run: Callable[[], object]
    share: float
    flops: float


@dataclass(frozen=True)
class Stage:
    """A model on the device, and what it runs on."""

    model: Model
    sizes: Sizes
    device: torch.device

    @cached_property
    def causal_lm(self) -> Any:
        return self.model.shape.model(self.device)

    @cached_property
    def replay(self) -> Replayable:
        return replayable(self.causal_lm)

    @cached_property
    def compiled(self) -> Replayable:
        return replayable(self.causal_lm, compile=True)

    @cached_property
    def flash_package(self) -> str | None:
        """The flash-attn that replay uses, if any."""
        head = torch.empty(1, 1, self.model.shape.head_dim, dtype=torch.bfloat16, device=self.device)
        return attention._flash_package(head, None)

    @cached_property
    def rows(self) -> Rows:
        return self.laid_out(
            *prompt_and_response_lengths(self.sizes), (self.sizes.prompt_width, self.sizes.response_width)
        )

    @cached_property
    def even(self) -> Rows:
        """Rows of the mean length without a pad, as many as the micro-batches hold that are run."""
        widths = round(float(self.rows.prompts.mean())), round(float(self.rows.responses.mean()))
        count = self.model.even * max(1, self.sizes.token_budget // sum(widths))
        return self.laid_out(np.full(count, widths[0]), np.full(count, widths[1]), widths)

    def laid_out(self, prompts: Lengths, responses: Lengths, widths: tuple[int, int]) -> Rows:
        vocabulary = self.model.shape.vocabulary
        batch = padded_batch(prompts, responses, widths, vocabulary)
        nested = nest_batch_by_mask(batch, pad_token_id=vocabulary - 1)
        return Rows(prompts, responses, batch.to(self.device), nested.to(self.device))

    @cached_property
    def plan(self) -> MicroBatchPlan:
        """Even by FLOPs, so that the rest over the last full budget is no micro-batch of a few tokens."""
        shape = self.model.shape
        pairs = shape.layers * shape.heads * shape.head_dim
        options = PlanOptions(work=lambda n: 6.0 * shape.parameters * n + 6.0 * pairs * n.astype(float) ** 2)
        return plan_micro_batches(self.rows.lengths, self.sizes.token_budget, options=options)

    @cached_property
    def padded_name(self) -> str:
        """Of the padded rows, with how many of them are run."""
        sizes = self.sizes
        count = -(-sizes.rows // sizes.padded_rows)
        width = sizes.prompt_width + sizes.response_width
        return f"{PADDED} to {width:,}, {min(self.model.padded, count)} of {count} micro-batches run"

    def described(self, case: str) -> list[Row]:
        sizes, lengths = self.sizes, self.rows.lengths
        positions = sizes.rows * (sizes.prompt_width + sizes.response_width)
        return [
            Row(case, f"ours attends by {self.flash_package or 'torch'}", 1, "x"),
            Row(case, "rows", sizes.rows, "rows"),
            Row(case, "real tokens", int(lengths.sum()), "tokens"),
            Row(case, "real tokens / padded positions", float(lengths.sum() / positions), "x"),
            Row(case, f"micro-batches of {sizes.token_budget:,} tokens", len(self.plan.micro_batches), "bins"),
            *(self._described_even(case) if self.model.even else []),
        ]

    def _described_even(self, case: str) -> list[Row]:
        lengths = self.even.lengths
        return [
            Row(case, "tokens of rows of one length", int(lengths[0]), "tokens"),
            Row(case, "rows of one length in a micro-batch", lengths.size // self.model.even, "rows"),
        ]

    def mixed(self, case: str) -> list[Row]:
        """How layers that carry state were run."""
        ways = Counter(way.partition(":")[0] for way in self.replay.mixers.values())
        return [Row(case, f"layers that carry state, run by {way}", count, "layers") for way, count in ways.items()]

    def works(self, step: str) -> dict[str, Work]:
        """By name. Padded micro-batches cost the same whatever is real in them: the FLOPs of theirs are their share."""
        replay, rows, of_padded = self.replay, self.rows, self.sizes.padded_rows
        first = rows.padded[: self.model.padded * of_padded]
        passes: dict[str, tuple[Rows, int, Callable[[], Iterable[Tensor]]]] = {
            OURS: (rows, len(rows.padded), lambda: replayed(replay, rows.nested, self.plan)),
            self.padded_name: (rows, len(first), lambda: padded_log_probs(replay.release(), first, of_padded)),
        }
        if self.model.even:
            passes |= self._more_passes()
        shape, backward = self.model.shape, step == BOTH
        return {
            name: Work(
                once(self.causal_lm, parts, backward),
                count / len(rows.padded),
                (3 if backward else 1) * shape.flops(of.lengths, of.responses) * count / of.lengths.size,
            )
            for name, (of, count, parts) in passes.items()
        }

    def _more_passes(self) -> dict[str, tuple[Rows, int, Callable[[], Iterable[Tensor]]]]:
        """Compiled, and rows of one length."""
        replay, rows, even = self.replay, self.rows, self.even
        of_even = even.lengths.size // self.model.even
        even_plan = plan_micro_batches(even.lengths, of_even * int(even.lengths[0]))
        passes: dict[str, tuple[Rows, int, Callable[[], Iterable[Tensor]]]] = {
            COMPILED: (rows, len(rows.padded), lambda: replayed(self.compiled, rows.nested, self.plan)),
            EVEN: (even, len(even.padded), lambda: replayed(replay, even.nested, even_plan)),
            DENSE: (even, len(even.padded), lambda: dense_log_probs(replay.release(), even.padded, of_even)),
        }
        if self.flash_package is not None:
            of_torch = (rows, len(rows.padded), lambda: without_flash(replayed(self.compiled, rows.nested, self.plan)))
            passes[OF_TORCH] = of_torch
        return passes


def replayed(replay: Replayable, nested: TensorDict, plan: MicroBatchPlan) -> Iterator[Tensor]:
    """Ours: packed log-probs [tokens of the responses] of each micro-batch."""
    for part in plan.apply(nested):
        log_probs: Any = response_log_probs(replay, part)
        yield log_probs.values()


def without_flash(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same parts, whose attention, also in backward passes, is torch's."""
    with mock.patch.object(attention, "_flash_package", return_value=None):
        yield from parts


def once(model: Any, parts: Callable[[], Iterable[Tensor]], backward: bool) -> Callable[[], object]:
    """A pass over the micro-batches; the gradients of all are summed where they stay, as a trainer does."""

    def run() -> None:
        model.train(backward)
        with torch.set_grad_enabled(backward):
            for log_probs in parts():
                if backward:
                    log_probs.sum().backward()
                del log_probs
        model.zero_grad(set_to_none=True)

    return run


# -------------------------------------------------------------------- errors


def _errors(case: str, stage: Stage) -> list[Row]:
    """How far log-probs of some rows are off those of a float32 model that sees each row alone: ours, which sees them
    packed together, the model that sees each alone, and the model that sees them padded."""
    seen, truth = _compared(stage)
    off = {name: (log_probs.double() - truth).abs() for name, log_probs in seen.items()}
    rms = {name: float(one.square().mean().sqrt()) for name, one in off.items()}
    if not rms[OURS] <= _SLACK * rms[_ALONE]:
        raise NotExact(f"{case}: ours is {rms[OURS]:.2g} off float32 (rms); each row alone is {rms[_ALONE]:.2g} off.")
    apart = float((seen[OURS].double() - seen[_ALONE].double()).abs().max())
    return [
        *(Row(case, f"largest error, {name}", float(one.max()), "nats") for name, one in off.items()),
        *(Row(case, f"rms error, {name}", one, "nats") for name, one in rms.items()),
        Row(case, f"rms error, {OURS} / {_ALONE}", rms[OURS] / rms[_ALONE], "x", "<= 1"),
        Row(case, f"largest difference, {OURS} to {_ALONE}", apart, "nats"),
    ]


@torch.no_grad()
def _compared(stage: Stage) -> tuple[dict[str, Tensor], Tensor]:
    """Log-probs of the responses of some rows, shortest to longest, in every way; and the float32 ones."""
    sizes, rows, model = stage.sizes, stage.rows, stage.causal_lm.eval()
    chosen = rows.lengths.argsort()[np.linspace(0, sizes.rows - 1, sizes.compared).astype(np.int64)]
    few = stage.laid_out(rows.prompts[chosen], rows.responses[chosen], (sizes.prompt_width, sizes.response_width))
    counts = few.responses.tolist()
    log_probs: Any = response_log_probs(stage.replay, few.nested)
    own = stage.replay.release()
    ids = [row[mask.bool()] for row, mask in zip(few.padded["input_ids"], few.padded["attention_mask"], strict=True)]
    alone = [lone_log_probs(own, row, count) for row, count in zip(ids, counts, strict=True)]
    padded = [row for part in padded_log_probs(own, few.padded, sizes.padded_rows) for row in part]
    seen = {
        OURS: log_probs.values(),
        _ALONE: torch.cat(alone),
        PADDED: torch.cat([row[:count] for row, count in zip(padded, counts, strict=True)]),
    }
    exact = copy.deepcopy(model).float()
    return seen, torch.cat([lone_log_probs(exact, row, count) for row, count in zip(ids, counts, strict=True)]).double()


# -------------------------------------------------------------------- time, memory


def _timed(case: str, stage: Stage, works: Mapping[str, Work], rounds: int) -> list[Row]:
    peaks: dict[str, float] = {}
    for name, work in works.items():
        begin = time.perf_counter()
        peaks[name] = peak_of(work.run, stage.device)  # the first run, which warms up
        progress(f"  {name}: {time.perf_counter() - begin:.1f} s, {peaks[name] / 2**30:.1f} GiB")
    seconds = interleaved({name: work.run for name, work in works.items()}, rounds, stage.device)
    rates = {name: work.flops / seconds[name] / 1e12 for name, work in works.items()}
    all_rows = {name: seconds[name] / work.share for name, work in works.items()}
    padded = stage.padded_name
    return [
        *(Row(case, name, 1e3 * taken, "ms") for name, taken in all_rows.items()),
        Row(case, f"{PADDED} / {OURS}", all_rows[padded] / all_rows[OURS], "x", stage.model.target),
        *(Row(case, f"rate, {name}", rate, "TFLOP/s") for name, rate in rates.items()),
        *(Row(case, f"rate, {name} / {_PEAK_RATE} TFLOP/s", rate / _PEAK_RATE, "x") for name, rate in rates.items()),
        *(
            Row(case, f"rate, {OURS} / {name}", rates[OURS] / rates[name], "x", ">= 0.95")
            for name in (EVEN, DENSE)
            if name in rates
        ),
        *(Row(case, f"peak, {name}", peak / 2**30, "GiB") for name, peak in peaks.items()),
        Row(case, f"peak, {OURS} / {PADDED}", peaks[OURS] / max(peaks[padded], 1), "x", "<= 1"),
    ]


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of runs that have run before; every round begins with another one."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        progress(f"  round {turn + 1} of {rounds}")
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            _synchronize(device)
            begin = time.perf_counter()
            runs[name]()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def peak_of(run: Callable[[], object], device: torch.device) -> float:
    """Bytes at the highest point of a run, with all that was there before. On the CPU, how far the memory of the
    process rises."""
    if device.type != "cuda":
        return peak_bytes(run)
    gc.collect()
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
