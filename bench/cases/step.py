"""A training step of GRPO beside what users of verl have: log-probs of the responses, a loss of their ratios and
advantages, and its gradients, summed over micro-batches of a token budget.

    padded                   micro-batches of a few rows at full width, sdpa, float32 logits of the responses' width
    packed, HEAD             verl's remove_padding, logits or a fused head on all tokens: flash-attn's cross entropy in
                             place is what verl does by default, the others are its use_fused_kernels
    ... with Liger's layers  the same with norms, MLPs and rotation of Liger, which is verl's use_liger
    ... and scored tokens    the same with the head on the tokens alone that score responses: not in verl, but what one
                             could write
    ours                     response_log_probs; compiled with compile=True, fused with fused=True, shared with
                             share_prefixes, kept with keep= of all bytes

All but padded attend by the same kernel, torch's varlen FlashAttention 2; all checkpoint their layers. Heads that this
machine does not have, or that fail, are named on stderr and have a row "missing". Weights and tokens are random,
prompts the same in groups. Before anything is timed, log-probs and gradients of the first group are compared with a
float32 model that sees each row alone. TFLOP/s are those that real tokens need, none of them shared. Synchronised wall
time, interleaved, medians; peaks are above all weights and the batch.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, progress
from bench.harness.passes import SEVERAL, the_device, timed
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from bench.rivals import heads
from bench.rivals.attention import lone_log_probs
from bench.rivals.packed_rows import VARLEN, PackedRows, hidden, with_liger
from bench.workloads.models import SMALL, TINY, Counts, Shape, log_normal_lengths, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

FORWARD, BOTH = "forward", "forward + backward"
PADDED, OURS, FUSED = "padded", "ours", "ours, fused"
_ALL = 1 << 62  # bytes: all distributions are kept, as flash-attn's cross entropy keeps all logits
LIGER, SCORED = "with Liger's layers", "and scored tokens"
_HEADS = (heads.FLASH, heads.VERL_TORCH, heads.VERL_TRITON, heads.VERL_LIGER)
_LIGER_HEADS = (heads.FLASH, heads.VERL_LIGER)
"""The fastest, and the one that takes the least memory: what Liger's layers are run with."""
_FASTEST = "fastest rival"
_PEAK_RATE = 989  # TFLOP/s of dense bfloat16 products on H100 and H200

Step = tuple[Tensor, Tensor, Sequence[int]]
"""Log-probs and advantages of the response tokens of a micro-batch, and its rows in this order."""


@dataclass(frozen=True)
class Batch:
    """Rows in groups of `size`: P and R; prompts are as wide as they can be, or `fill` is the real share."""

    widths: tuple[int, int]
    padded_rows: int
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
    """`padded` is how many padded micro-batches are timed; ours may be `slack` times as far off as padded rows."""

    models: Mapping[str, tuple[str, Shape]] = field(
        default_factory=lambda: {
            "small": ("Qwen3-0.6B", SMALL),
            "large": ("Qwen3-4B, 9 of 36 layers", Shape(2560, 9, 32, 8, 128, 9728)),
        }
    )
    batches: Sequence[Batch] = (Batch((512, 3584), 4, 0.25), Batch((2048, 512), 8))
    token_budget: int = 32_768
    padded: int = 2
    slack: float = 1.25


@case(
    "step",
    help="a training step beside verl's packing, fused heads and Liger",
    on="gpu",
    rows=None,
    groups=("small", "large"),
    tiny={"sizes": Sizes({"small": ("A", TINY)}, [Batch((20, 7), 2, rows=6, size=3)], 90, 1, slack=2)},
)
def run(rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if ours is further from float32 than padded rows."""
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
    whole = Stage(models, batch, sizes, batch.rows, sizes.padded)
    yield [
        Row(name, "rows", batch.rows, "rows"),
        Row(name, "real tokens", int(whole.lengths.sum()), "tokens"),
        Row(name, "response tokens", int(whole.responses.sum()), "tokens"),
        Row(name, "tokens with shared prefixes", whole.tree.num_tokens, "tokens"),
        *_errors(name, Stage(models, batch, sizes, batch.size, batch.size)),
        *(Row(name, f"missing, {rival}", 1, "rivals") for rival in models.missing),  # of those that fail above, too
    ]
    for step in (FORWARD, BOTH):
        progress(f"{name}, {step}")
        yield _timed(f"{name}, {step}", whole, step == BOTH, rounds)


# -------------------------------------------------------------------- models


class Models:
    """Models on the device that have the same weights and share none, so that none is restored while it is timed."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.padded: Any = shape.model(device)
        self.packed = self._varlen()
        self.ours = {name: replayable(shape.model(device), **options) for name, options in self._ours.items()}
        self.heads, self.missing = heads.importable(_HEADS, device)
        self.missing |= heads.importable([heads.LIGER_CUTE], device)[1]  # the kernel of verl's liger backend
        if device.type == "cpu":
            self.heads |= heads.importable([heads.PLAIN], device)[0]
        self.liger: Any = None
        try:
            if device.type != "cuda":
                raise ImportError("needs a GPU")
            self.liger = with_liger(self._varlen())
        except ImportError as error:
            self.drop(LIGER, error)
        for name, reason in self.missing.items():
            progress(f"missing, {name}: {reason}")

    @property
    def _ours(self) -> dict[str, dict[str, Any]]:
        # On the CPU, compile=True would compile C++, which takes longer than all else.
        compiled = {"compile": self.device.type == "cuda"}
        return {OURS: {}, f"{OURS}, compiled": compiled, FUSED: {"fused": True}}

    def _varlen(self) -> Any:
        model: Any = self.shape.model(self.device)
        model.set_attn_implementation(VARLEN)
        return model

    def drop(self, rival: str, error: Exception) -> None:
        """From now on the rival is missing."""
        self.missing[rival] = f"{type(error).__name__}: {str(error)[:300]}"


@dataclass(frozen=True)
class Work:
    """The model, a pass over the micro-batches, and the share of the rows that it has."""

    model: Any
    steps: Callable[[], Iterable[Step]]
    share: float = 1


@dataclass(frozen=True)
class Stage:
    """The first `count` rows of a batch, on the device, of which `padded` micro-batches are run padded."""

    models: Models
    batch: Batch
    sizes: Sizes
    count: int
    padded: int

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
        width = self.batch.widths[0]
        rows = padded_batch(*self.counts, self.batch.widths, self.models.shape.vocabulary)
        for part in (rows["prompts"], rows["input_ids"][:, :width]):
            part.copy_(part[:: self.batch.size].repeat_interleave(self.batch.size, 0)[: self.count])
        rows["response_mask"] = rows["attention_mask"][:, width:].clone()
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
        models, some = self.models, self.padded * self.batch.padded_rows
        works = {PADDED: Work(models.padded, self._padded, min(1.0, some / self.count))}
        for name, head in models.heads.items():
            works[f"packed, {name}"] = self._packed(models.packed, head)
        for name in _LIGER_HEADS if models.liger is not None else ():
            if name in models.heads:
                works[f"packed, {name}, {LIGER}"] = self._packed(models.liger, models.heads[name])
                works[f"packed, {name}, {LIGER} {SCORED}"] = self._packed(models.liger, models.heads[name], True)
        for name, replay in models.ours.items():
            keeps: tuple[int | None, ...] = (None, _ALL) if name == FUSED else (None,)
            for shares, keep in itertools.product((False, True), keeps):
                own = name + ", kept" * (keep is not None)
                own += (" and shared" if "," in own else ", shared") * shares
                options = ReplayOptions(share_prefixes=shares, keep=keep)
                works[own] = Work(replay.model, lambda replay=replay, options=options: self._ours(replay, options))
        return {name: work for name, work in works.items() if name not in models.missing}

    def _padded(self) -> Iterator[Step]:
        width, some = self.batch.widths[1], self.batch.padded_rows
        for first in range(0, min(self.count, self.padded * some), some):
            part = self.rows[first : first + some]
            logits = self.models.padded(
                input_ids=part["input_ids"],
                attention_mask=part["attention_mask"],
                position_ids=part["position_ids"],
                use_cache=False,
                logits_to_keep=width + 1,
            ).logits[:, :-1]
            log_p = logits.float().log_softmax(-1).gather(-1, part["responses"].unsqueeze(-1)).squeeze(-1)
            del logits
            mask = part["response_mask"].bool()
            yield log_p[mask], part["advantages"][mask], range(first, first + len(part))

    def _packed(self, model: Any, head: heads.Head, scored: bool = False) -> Work:
        def steps() -> Iterator[Step]:
            for part in self.packed:
                states, at = hidden(model, part), part.scored
                if scored:
                    log_p = head(states[at], model.lm_head.weight, part.labels[at])
                else:
                    log_p = head(states, model.lm_head.weight, part.labels)[at]
                del states
                yield log_p, part.advantages, part.rows

        return Work(model, steps)

    def _ours(self, replay: Replayable, options: ReplayOptions) -> Iterator[Step]:
        plan = self.plans[options.share_prefixes]
        for rows, part in zip(plan.micro_batches, plan.apply(self.nested), strict=True):
            log_probs: Any = response_log_probs(replay, part, options=options)
            yield log_probs.values(), part["advantages"].values(), rows


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
    for key, (rms, _) in off.items():
        if key.startswith(OURS) and not rms <= stage.sizes.slack * off[PADDED][0] + 1e-6:
            raise NotExact(f"{name}: {key} is {rms:.2g} off float32 (rms); {PADDED} is {off[PADDED][0]:.2g} off.")
    return [
        *(Row(name, f"rms error, {key}", rms, "nats") for key, (rms, _) in off.items()),
        *(Row(name, f"error of the gradients, {key}", 100 * far, "%") for key, (_, far) in off.items()),
    ]


def _alone(stage: Stage) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of each row, and the gradients of all."""
    model: Any = copy.deepcopy(stage.models.padded).float().train()
    truth: list[Tensor] = []
    for row, count in zip(stage.rows.unbind(0), stage.responses.tolist(), strict=True):
        log_probs = lone_log_probs(model, row["input_ids"][row["attention_mask"].bool()], count)
        stage.loss(log_probs, row["advantages"][:count]).backward()
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


def _timed(name: str, stage: Stage, backward: bool, rounds: int) -> list[Row]:
    def once(work: Work) -> None:
        work.model.train(backward)
        with torch.set_grad_enabled(backward):
            for log_probs, advantages, _ in work.steps():
                if backward:
                    stage.loss(log_probs, advantages).backward()
                del log_probs
        work.model.zero_grad(set_to_none=True)

    works, device = stage.works, stage.models.device
    runs = {key: functools.partial(once, work) for key, work in works.items()}
    shares = {key: work.share for key, work in works.items()}
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    report, seconds = timed(name, runs, rounds, device, (), shares=shares, before=held)
    ours = [key for key in works if key.startswith(OURS)]
    seconds[_FASTEST] = min(one for key, one in seconds.items() if key not in ours)
    flops = (3 if backward else 1) * stage.models.shape.flops(stage.lengths, stage.responses)
    rates = {key: flops / seconds[key] / 1e12 for key in works}
    return [
        *report,
        *ratios(name, seconds, [(_FASTEST, key, None) for key in ours]),
        *(Row(name, f"rate, {key}", rate, "TFLOP/s") for key, rate in rates.items()),
        *(Row(name, f"rate, {key} / {_PEAK_RATE} TFLOP/s", rate / _PEAK_RATE, "x") for key, rate in rates.items()),
    ]
