"""Log-probs of a rollout batch by replay, packed and padded, on models of the shapes of Qwen3, and of a hybrid of
Qwen3.5's in which three layers of four carry state.

    ours                      response_log_probs over micro-batches of a token budget, from a nested batch
    ours, rows of one length  the same without any padding to save: the mean length, as many tokens a micro-batch
    own attention, the same   these rows as a dense [b, n], by the model's own scaled dot product attention
    padded                    micro-batches of a few rows at full width, the model's own attention, all logits

The hybrid runs ours and padded alone; images are a group of their own (`images`). Forward, and forward + backward with
the layers checkpointed, in all alike. Weights and tokens are random, lengths log-normal. Micro-batches of equal shapes
take equal time, so of those a few are run, and times are of all rows. TFLOP/s are those that real tokens need
(`workloads.models`). Before anything is timed ours is compared with a float32 model. Synchronised wall time,
interleaved, medians; the peak is of the process's allocations, weights and gradients too.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.cases.replay import images
from bench.harness.measure import progress
from bench.harness.passes import ALONE, BOTH, FORWARD, OURS, SEVERAL, errors, once, the_device, timed
from bench.harness.registry import case
from bench.harness.replay import replayed
from bench.harness.report import Row, RowGroups, ratios
from bench.rivals.attention import dense_log_probs, lone_log_probs, padded_log_probs
from bench.workloads.models import SMALL, TINY, Counts, HybridShape, Shape, log_normal_lengths, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, PlanOptions, plan_micro_batches
from maskpack.replay import response_log_probs

EVEN, DENSE, PADDED = "ours, rows of one length", "own attention, dense rows of one length", "padded"
_PEAK_RATE = 989  # TFLOP/s of dense bfloat16 products on H100 and H200


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
    "small": Model("Qwen3-0.6B", SMALL, padded=16, even=4),
    "large": Model("Qwen3-4B", Shape(2560, 36, 32, 8, 128, 9728), padded=4, even=2),
    "hybrid": Model(
        "12 layers of Qwen3.5, 3 gated delta nets to 1 attention",
        HybridShape(1024, 12, 8, 2, 256, 3584),
        padded=4,
        even=0,
        target=">= 3",
    ),
}
_TINY = {
    "small": Model("A", TINY, 2, 2),
    "hybrid": Model("C", HybridShape(32, 4, 2, 1, 8, 48, 97, delta_heads=2, delta_dim=8), 2, 0),
}


@dataclass(frozen=True)
class Sizes:
    """Of the batch, its micro-batches and the models; `fill` is the real share, `compared` the rows that ours is
    compared on."""

    widths: tuple[int, int] = (512, 3584)
    fill: float = 0.25
    token_budget: int = 32_768
    padded_rows: int = 4
    compared: int = 4
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)
    images: images.Sizes = field(default_factory=images.Sizes)


@case(
    "replay",
    help="log-probs of a rollout batch by models of the shapes of Qwen3",
    on="gpu",
    groups=(*MODELS, "images"),
    tiny={"rows": 10, "sizes": Sizes((7, 29), 0.3, 40, 3, 3, _TINY, images.TINY)},
)
def run(rows: int, rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if ours is further from float32 than each row alone
    is."""
    sizes = sizes or Sizes()
    device, rounds = the_device(), -(-rounds // SEVERAL)
    for group, model in sizes.models.items():
        if only is None or group in only:
            yield from _of_model(Stage(model, sizes, rows, device), rounds)
            gc.collect()  # the model, before the next is made
    if only is None or "images" in only:
        yield from images.measured(sizes.images, rounds, device)


def _of_model(stage: Stage, rounds: int) -> RowGroups:
    name = f"replay, shape of {stage.model.name}"
    progress(name)
    yield [*stage.described(name), *_errors(name, stage), *stage.mixed(name)]
    for step in (FORWARD, BOTH):
        progress(f"{name}, {step}")
        yield _timed(f"{name}, {step}", stage, stage.works(step), rounds)


@dataclass(frozen=True)
class Rows:
    """A batch in both forms, on the device."""

    prompts: Counts
    responses: Counts
    padded: TensorDict
    nested: TensorDict

    @property
    def lengths(self) -> Counts:
        """int64 [B]."""
        return self.prompts + self.responses


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
    count: int
    device: torch.device

    @cached_property
    def causal_lm(self) -> Any:
        return self.model.shape.model(self.device)

    @cached_property
    def replay(self) -> Replayable:
        return replayable(self.causal_lm)

    @cached_property
    def rows(self) -> Rows:
        return self.laid_out(*log_normal_lengths(self.count, self.sizes.widths, self.sizes.fill), self.sizes.widths)

    @cached_property
    def even(self) -> Rows:
        """Rows of the mean length without a pad, as many as the micro-batches hold that are run."""
        widths = round(float(self.rows.prompts.mean())), round(float(self.rows.responses.mean()))
        count = self.model.even * max(1, self.sizes.token_budget // sum(widths))
        return self.laid_out(np.full(count, widths[0]), np.full(count, widths[1]), widths)

    def laid_out(self, prompts: Counts, responses: Counts, widths: tuple[int, int]) -> Rows:
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

    def described(self, name: str) -> list[Row]:
        real = int(self.rows.lengths.sum())
        return [
            Row(name, "rows", self.count, "rows"),
            Row(name, "real tokens", real, "tokens"),
            Row(name, "real tokens / padded positions", real / (self.count * sum(self.sizes.widths)), "x"),
            Row(name, f"micro-batches of {self.sizes.token_budget:,} tokens", len(self.plan.micro_batches), "bins"),
            Row(name, "padded micro-batches", -(-self.count // self.sizes.padded_rows), "bins"),
            Row(name, "padded micro-batches that are run", self.model.padded, "bins"),
        ]

    def mixed(self, name: str) -> list[Row]:
        """How layers that carry state were run."""
        ways = Counter(way.partition(":")[0] for way in self.replay.mixers.values())
        return [Row(name, f"layers that carry state, run by {way}", count, "layers") for way, count in ways.items()]

    def works(self, step: str) -> dict[str, Work]:
        """By name. Padded micro-batches cost the same whatever is real in them: the FLOPs of theirs are their share."""
        replay, rows, of_padded = self.replay, self.rows, self.sizes.padded_rows
        first = rows.padded[: self.model.padded * of_padded]
        passes: dict[str, tuple[Rows, int, Callable[[], Iterable[Tensor]]]] = {
            OURS: (rows, self.count, lambda: replayed(replay, rows.nested, self.plan)),
            PADDED: (rows, len(first), lambda: padded_log_probs(replay.release(), first, of_padded)),
        }
        if self.model.even:
            even = self.even
            of_even = even.lengths.size // self.model.even
            plan = plan_micro_batches(even.lengths, of_even * int(even.lengths[0]))
            passes[EVEN] = even, even.lengths.size, lambda: replayed(replay, even.nested, plan)
            passes[DENSE] = even, even.lengths.size, lambda: dense_log_probs(replay.release(), even.padded, of_even)
        shape, backward = self.model.shape, step == BOTH
        return {
            name: Work(
                once(self.causal_lm, parts, backward),
                count / self.count,
                (3 if backward else 1) * shape.flops(of.lengths, of.responses) * count / of.lengths.size,
            )
            for name, (of, count, parts) in passes.items()
        }


@torch.no_grad()
def _errors(name: str, stage: Stage) -> list[Row]:
    """Of the responses of some rows, shortest to longest: ours, which sees them packed together, the model that sees
    each alone, padded, and as a dense batch."""
    sizes, rows, model = stage.sizes, stage.rows, stage.causal_lm.eval()
    chosen = rows.lengths.argsort()[np.linspace(0, stage.count - 1, sizes.compared).astype(np.int64)]
    few = stage.laid_out(rows.prompts[chosen], rows.responses[chosen], sizes.widths)
    counts = few.responses.tolist()
    log_probs: Any = response_log_probs(stage.replay, few.nested)
    own = stage.replay.release()
    ids = [row[mask.bool()] for row, mask in zip(few.padded["input_ids"], few.padded["attention_mask"], strict=True)]
    padded = [row for part in padded_log_probs(own, few.padded, sizes.padded_rows) for row in part]
    seen = {
        OURS: log_probs.values(),
        ALONE: torch.cat([lone_log_probs(own, row, count) for row, count in zip(ids, counts, strict=True)]),
        PADDED: torch.cat([row[:count] for row, count in zip(padded, counts, strict=True)]),
        DENSE: torch.cat([_dense(own, row, count) for row, count in zip(ids, counts, strict=True)]),
    }
    exact = copy.deepcopy(model).float()
    truth = torch.cat([lone_log_probs(exact, row, count) for row, count in zip(ids, counts, strict=True)])
    return errors(name, seen, truth, (OURS, ALONE), 1.05)


def _dense(model: Any, ids: Tensor, response: int) -> Tensor:
    """Of one row, which is a dense batch."""
    row = TensorDict({"input_ids": ids[None], "responses": ids[None, -response:]}, [1])
    return next(dense_log_probs(model, row, 1))[0]


def _timed(name: str, stage: Stage, works: Mapping[str, Work], rounds: int) -> list[Row]:
    runs, shares = ({key: getattr(work, part) for key, work in works.items()} for part in ("run", "share"))
    pairs = [(PADDED, OURS, stage.model.target)]
    report, seconds = timed(name, runs, rounds, stage.device, pairs, shares=shares)
    rates = {key: work.flops / (seconds[key] * work.share) / 1e12 for key, work in works.items()}
    return [
        *report,
        *(Row(name, f"rate, {key}", rate, "TFLOP/s") for key, rate in rates.items()),
        *(Row(name, f"rate, {key} / {_PEAK_RATE} TFLOP/s", rate / _PEAK_RATE, "x") for key, rate in rates.items()),
        *ratios(name, rates, [(OURS, key, ">= 0.95") for key in (EVEN, DENSE) if key in rates], "rate, "),
    ]
