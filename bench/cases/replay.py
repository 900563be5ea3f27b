"""Log-probs of a rollout batch by replay, packed and padded, on models of the shapes of Qwen3, and of a hybrid of
Qwen3.5's in which three layers of four carry state.

    ours     response_log_probs over micro-batches of a token budget, from a nested batch
    padded   micro-batches of a few rows at full width, the model's own attention, all logits

Forward, and forward + backward with the layers checkpointed, in all alike. Weights and tokens are random, lengths
log-normal. Micro-batches of equal shapes take equal time, so of padded ones a few are run, and times are of all rows.
Before anything is timed ours is compared with a float32 model. Synchronised wall time, interleaved, medians; the peak
is of the process's allocations, weights and gradients too.
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

from bench.harness.measure import progress
from bench.harness.passes import ALONE, BOTH, FORWARD, OURS, SEVERAL, errors, once, the_device, timed
from bench.harness.registry import case
from bench.harness.replay import replayed
from bench.harness.report import Row, RowGroups
from bench.rivals.attention import lone_log_probs, padded_log_probs
from bench.workloads.models import SMALL, TINY, Counts, HybridShape, Shape, log_normal_lengths, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, PlanOptions, plan_micro_batches
from maskpack.replay import response_log_probs

PADDED = "padded"


@dataclass(frozen=True)
class Model:
    """A model, and how many padded micro-batches are run. `target` is that of padded / ours."""

    name: str
    shape: Shape
    padded: int
    target: str = ">= 3.5"


MODELS: Mapping[str, Model] = {
    "small": Model("Qwen3-0.6B", SMALL, padded=16),
    "large": Model("Qwen3-4B", Shape(2560, 36, 32, 8, 128, 9728), padded=4),
    "hybrid": Model(
        "12 layers of Qwen3.5, 3 gated delta nets to 1 attention",
        HybridShape(1024, 12, 8, 2, 256, 3584),
        padded=4,
        target=">= 3",
    ),
}
_TINY = {
    "small": Model("A", TINY, 2),
    "hybrid": Model("C", HybridShape(32, 4, 2, 1, 8, 48, 97, delta_heads=2, delta_dim=8), 2),
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


@case(
    "replay",
    help="log-probs of a rollout batch by models of the shapes of Qwen3",
    on="gpu",
    groups=tuple(MODELS),
    tiny={"rows": 10, "sizes": Sizes((7, 29), 0.3, 40, 3, 3, _TINY)},
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


def _of_model(stage: Stage, rounds: int) -> RowGroups:
    name = f"replay, shape of {stage.model.name}"
    progress(name)
    yield [*stage.described(name), *_errors(name, stage), *stage.mixed(name)]
    for step in (FORWARD, BOTH):
        progress(f"{name}, {step}")
        yield _timed(f"{name}, {step}", stage, step == BOTH, rounds)


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


@torch.no_grad()
def _errors(name: str, stage: Stage) -> list[Row]:
    """Of the responses of some rows, shortest to longest: ours, which sees them packed together, the model that sees
    each alone, and padded."""
    sizes, rows, model = stage.sizes, stage.rows, stage.causal_lm.eval()
    chosen = rows.lengths.argsort()[np.linspace(0, stage.count - 1, sizes.compared).astype(np.int64)]
    few = stage.laid_out(rows.prompts[chosen], rows.responses[chosen], sizes.widths)
    log_probs: Any = response_log_probs(stage.replay, few.nested)
    own = stage.replay.release()
    padded = [row for part in padded_log_probs(own, few.padded, sizes.padded_rows) for row in part]
    seen = {
        OURS: log_probs.values(),
        ALONE: torch.cat(list(lone_log_probs(own, few.padded))),
        PADDED: torch.cat([row[:count] for row, count in zip(padded, few.responses.tolist(), strict=True)]),
    }
    truth = torch.cat(list(lone_log_probs(copy.deepcopy(model).float(), few.padded)))
    return errors(name, seen, truth, (OURS, ALONE), 1.05)


def _timed(name: str, stage: Stage, backward: bool, rounds: int) -> list[Row]:
    """Padded micro-batches cost the same whatever is real in them."""
    replay, rows, some = stage.replay, stage.rows, stage.sizes.padded_rows
    first = rows.padded[: stage.model.padded * some]
    parts: dict[str, Callable[[], Iterable[Tensor]]] = {
        OURS: lambda: replayed(replay, rows.nested, stage.plan),
        PADDED: lambda: padded_log_probs(replay.release(), first, some),
    }
    runs = {key: once(stage.causal_lm, work, backward) for key, work in parts.items()}
    pairs, shares = [(PADDED, OURS, stage.model.target)], {PADDED: len(first) / stage.count}
    return timed(name, runs, rounds, stage.device, pairs, shares=shares)
