"""A training step of GRPO beside what users of verl have: log-probs of the responses, a loss of their ratios and
advantages, and its gradients, summed over micro-batches of a token budget.

    HEAD, Liger's layers     verl's remove_padding and use_liger (norms, MLPs and rotation), with a head on all tokens:
                             flash-attn's cross entropy in place, or verl's use_fused_kernels
    ..., scored tokens       the same with the head on the tokens alone that score responses: not in verl, but what one
                             could write
    ours                     response_log_probs; fused with fused=True, shared with share_prefixes too

All attend by the same kernel, torch's varlen FlashAttention 2, and checkpoint their layers. Heads that this machine
does not have, or that fail, are named on stderr and have a row "missing". Weights and tokens are random, prompts the
same in groups. Before anything is timed, log-probs and gradients of the first group are compared with a float32 model
that sees each row alone. Synchronised wall time, interleaved, medians; peaks are above all weights and the batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, progress
from bench.harness.passes import SEVERAL, once, the_device, timed
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.rivals import heads
from bench.rivals.attention import lone_log_probs
from bench.rivals.packed_rows import VARLEN, PackedRows, hidden, with_liger
from bench.workloads.models import LARGE, SMALL, TINY, Counts, Shape, log_normal_lengths, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

OURS, FUSED, LIGER = "ours", "ours, fused", "Liger's layers"
_OURS = {
    OURS: (False, ReplayOptions()),
    FUSED: (True, ReplayOptions()),
    f"{FUSED}, shared": (True, ReplayOptions(share_prefixes=True)),
}

Step = tuple[Tensor, Tensor, Sequence[int]]
"""Log-probs and advantages of the response tokens of a micro-batch, and its rows in this order."""


@dataclass(frozen=True)
class Batch:
    """Rows in groups of `size`: P and R; prompts are as wide as they can be, or `fill` is the real share."""

    widths: tuple[int, int]
    fill: float | None = None
    rows: int = 32
    size: int = 8

    @property
    def name(self) -> str:
        return f"{self.widths[0]:,} : {self.widths[1]:,}, G = {self.size}"

    def lengths(self) -> tuple[Counts, Counts]:
        if self.fill is not None:
            return log_normal_lengths(self.rows, self.widths, self.fill, self.size)
        prompt, most = self.widths
        return np.full(self.rows, prompt), np.random.default_rng(0).integers(-(-3 * most // 4), most + 1, self.rows)


@dataclass(frozen=True)
class Sizes:
    """Ours may be `slack` times as far off as all logits."""

    models: Mapping[str, tuple[str, Shape]] = field(
        default_factory=lambda: {"small": ("Qwen3-0.6B", SMALL), "large": ("Qwen3-4B, 9 of 36 layers", LARGE)}
    )
    batches: Sequence[Batch] = (Batch((512, 3584), 0.25), Batch((2048, 512)))
    token_budget: int = 32_768
    slack: float = 1.25


@case(
    "step",
    help="a training step beside verl's packing, fused heads and Liger",
    on="gpu",
    rows=None,
    groups=("small", "large"),
    tiny={"sizes": Sizes({"small": ("A", TINY)}, [Batch((20, 7), rows=6, size=3)], 90, slack=2)},
)
def run(rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if ours is further from float32 than all logits."""
    sizes, device = sizes or Sizes(), the_device()
    for group in only or sizes.models:
        name, shape = sizes.models[group]
        models = Models(shape, device)
        for batch in sizes.batches:
            yield from _of_batch(f"step, shape of {name}, {batch.name}", models, batch, sizes, -(-rounds // SEVERAL))
            gc.collect()
        del models
        gc.collect()


def _of_batch(name: str, models: Models, batch: Batch, sizes: Sizes, rounds: int) -> RowGroups:
    progress(name)
    whole = Stage(models, batch, sizes, batch.rows)
    yield [
        Row(name, "rows", batch.rows, "rows"),
        Row(name, "real tokens", int(whole.lengths.sum()), "tokens"),
        Row(name, "response tokens", int(whole.responses.sum()), "tokens"),
        Row(name, "tokens with shared prefixes", whole.tree.num_tokens, "tokens"),
        *_errors(name, Stage(models, batch, sizes, batch.size)),
        *(Row(name, f"missing, {rival}", 1, "rivals") for rival in models.missing),  # of those that fail above, too
    ]
    yield _timed(f"{name}, forward + backward", whole, rounds)


# -------------------------------------------------------------------- models


class Models:
    """Models on the device that have the same weights and share none, so that none is restored while it is timed."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.ours = {fused: replayable(shape.model(device), fused=fused) for fused in (False, True)}
        self.rival: Any = shape.model(device)
        self.rival.set_attn_implementation(VARLEN)
        self.heads, self.missing = heads.importable((heads.FLASH, heads.VERL), device)
        if not self.heads:
            self.heads = heads.importable([heads.PLAIN], device)[0]
        try:
            if device.type != "cuda":
                raise ImportError("needs a GPU")
            with_liger(self.rival)
        except ImportError as error:
            self.drop(LIGER, error)
        self.layers = "transformers' layers" if LIGER in self.missing else LIGER
        for name, reason in self.missing.items():
            progress(f"missing, {name}: {reason}")

    def drop(self, rival: str, error: Exception) -> None:
        """From now on the rival is missing."""
        self.missing[rival] = f"{type(error).__name__}: {str(error)[:300]}"


@dataclass(frozen=True)
class Work:
    """The model, and a pass over the micro-batches."""

    model: Any
    steps: Callable[[], Iterable[Step]]


@dataclass(frozen=True)
class Stage:
    """The first `count` rows of a batch, on the device."""

    models: Models
    batch: Batch
    sizes: Sizes
    count: int

    @cached_property
    def counts(self) -> tuple[Counts, Counts]:
        prompts, responses = self.batch.lengths()
        return prompts[: self.count], responses[: self.count]

    @property
    def responses(self) -> Counts:
        return self.counts[1]

    @property
    def lengths(self) -> Counts:
        return self.counts[0] + self.counts[1]

    @cached_property
    def rows(self) -> TensorDict:
        widths = self.batch.widths
        rows = padded_batch(*self.counts, widths, self.models.shape.vocabulary, self.batch.size)
        rows["response_mask"] = rows["attention_mask"][:, widths[0] :].clone()
        advantages = torch.randn(self.count, 1, generator=torch.Generator().manual_seed(0))
        rows["advantages"] = advantages * rows["response_mask"]
        return rows.to(self.models.device)

    @cached_property
    def nested(self) -> TensorDict:
        return nest_batch_by_mask(self.rows, pad_token_id=self.models.shape.vocabulary - 1)

    @cached_property
    def tree(self) -> Any:
        return prefix_tree(self.nested)

    @cached_property
    def plans(self) -> dict[bool, MicroBatchPlan]:
        """By whether prefixes are shared."""
        trees = {False: None, True: self.tree}
        budget = self.sizes.token_budget
        return {shares: plan_micro_batches(self.lengths, budget, tree=tree) for shares, tree in trees.items()}

    @cached_property
    def packed(self) -> list[PackedRows]:
        return [PackedRows.of(self.rows, rows) for rows in self.plans[False].micro_batches]

    def loss(self, log_probs: Tensor, advantages: Tensor) -> Tensor:
        """Of the first update, whose ratios are 1."""
        log_probs = log_probs.float()
        return -((log_probs - log_probs.detach()).exp() * advantages).sum() / int(self.responses.sum())

    @cached_property
    def works(self) -> dict[str, Work]:
        models, works = self.models, dict[str, Work]()
        for name, head in models.heads.items():
            for scored in (False, True):
                own = f"{name}, {models.layers}{', scored tokens' * scored}"
                works[own] = Work(models.rival, partial(self._packed, head, scored))
        for name, (fused, options) in _OURS.items():
            works[name] = Work(models.ours[fused].model, partial(self._ours, models.ours[fused], options))
        return {name: work for name, work in works.items() if name not in models.missing}

    def _packed(self, head: heads.Head, scored: bool) -> Iterator[Step]:
        model = self.models.rival
        for part in self.packed:
            states, at = hidden(model, part), part.scored
            if scored:
                log_p = head(states[at], model.lm_head.weight, part.labels[at])
            else:
                log_p = head(states, model.lm_head.weight, part.labels)[at]
            del states
            yield log_p, part.advantages, part.rows

    def _ours(self, replay: Replayable, options: ReplayOptions) -> Iterator[Step]:
        plan = self.plans[options.share_prefixes]
        for rows, part in zip(plan.micro_batches, plan.apply(self.nested), strict=True):
            log_probs: Any = response_log_probs(replay, part, options=options)
            yield log_probs.values(), part["advantages"].values(), rows

    def losses(self, work: Work) -> Iterator[Tensor]:
        for log_probs, advantages, _ in work.steps():
            yield self.loss(log_probs, advantages)


# -------------------------------------------------------------------- error and time


def _errors(name: str, stage: Stage) -> list[Row]:
    """How far log-probs (rms) and the gradients of all weights (relative) are off a float32 model's of each row."""
    truth, exact = _alone(stage)
    norm = sum(float(one.square().sum()) for one in exact.values()) ** 0.5
    off: dict[str, tuple[float, float]] = {}
    for key, work in stage.works.items():
        try:
            seen = _seen(stage, work)
            far = sum(float((p.grad.float() - exact[of]).square().sum()) for of, p in work.model.named_parameters())
            rms = torch.cat([log_probs - truth[row] for row, log_probs in seen.items()]).square().mean().sqrt()
            off[key] = float(rms), far**0.5 / norm
        except Exception as error:
            if key.startswith(OURS):
                raise
            stage.models.drop(key, error)
            progress(f"missing, {key}: {stage.models.missing[key]}")
        work.model.zero_grad(set_to_none=True)
    rivals = [rms for key, (rms, _) in off.items() if not key.startswith(OURS)]
    for key, (rms, _) in off.items():
        if key.startswith(OURS) and not rms <= stage.sizes.slack * min(rivals) + 1e-6:
            raise NotExact(f"{name}: {key} is {rms:.2g} off float32 (rms); a rival is {min(rivals):.2g} off.")
    return [
        *(Row(name, f"rms error, {key}", rms, "nats") for key, (rms, _) in off.items()),
        *(Row(name, f"error of the gradients, {key}", 100 * far, "%") for key, (_, far) in off.items()),
    ]


def _alone(stage: Stage) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of each row, and the gradients of all."""
    model: Any = stage.models.shape.model(stage.models.device).float().train()
    truth: list[Tensor] = []
    for advantages, log_probs in zip(stage.rows["advantages"], lone_log_probs(model, stage.rows), strict=True):
        stage.loss(log_probs, advantages[: len(log_probs)]).backward()
        truth.append(log_probs.detach())
    return truth, {name: weight.grad for name, weight in model.named_parameters()}


def _seen(stage: Stage, work: Work) -> dict[int, Tensor]:
    """Log-probs by the numbers of the rows; the gradients are in the model."""
    work.model.train()
    seen: dict[int, Tensor] = {}
    for log_probs, advantages, rows in work.steps():
        stage.loss(log_probs, advantages).backward()
        parts: Any = log_probs.detach().float()
        parts = parts.split([int(stage.responses[row]) for row in rows])
        seen |= dict(zip(map(int, rows), parts, strict=True))
    return seen


def _timed(name: str, stage: Stage, rounds: int) -> list[Row]:
    works, device = stage.works, stage.models.device
    runs = {key: once(work.model, partial(stage.losses, work), True) for key, work in works.items()}
    ours = [key for key in works if key.startswith(OURS)]
    return timed(name, runs, rounds, device, (), ours=ours, above_held=True)
