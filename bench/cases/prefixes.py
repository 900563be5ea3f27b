"""Replay that computes shared prefixes once, against packed replay of whole rows.

    whole rows   response_log_probs over micro-batches of a token budget, packed, nothing shared
    shared       the same with share_prefixes, micro-batches planned with their tree

Groups of a prompt and G responses, and trajectories of an agent with tools (real lengths: workloads.tau), on
models of Qwen3's shapes; forward, and forward + backward with the layers checkpointed. Both begin with a nested batch
on the host: trees, plans and inputs are part of what is timed. Before anything is timed both are compared with a
float32 model that sees each row alone. Synchronised wall time, interleaved, medians.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from bench.harness.measure import progress
from bench.harness.passes import BOTH, FORWARD, SEVERAL, errors, once, the_device, timed
from bench.harness.registry import case
from bench.harness.replay import Replay
from bench.harness.report import Row, RowGroups
from bench.rivals.attention import lone_log_probs
from bench.workloads.models import SMALL, TINY, Shape, padded_batch
from bench.workloads.tau import trajectories
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

SHARED, WHOLE = "shared", "whole rows"


@dataclass(frozen=True)
class Groups:
    """Groups of `size` responses to a prompt, of 3/4 of `response` tokens to all; `least` is the target of forward +
    backward: 0.95 of what a prototype reached."""

    prompt: int
    response: int
    size: int
    least: float | None = None

    @property
    def name(self) -> str:
        return f"{self.prompt:,} : {self.response:,}, G = {self.size}"

    def batch(self, tokens: int, vocabulary: int) -> TensorDict:
        """About so many tokens of rows, at least two groups."""
        count = self.size * max(2, round(tokens / (self.size * (self.prompt + self.response))))
        responses = np.random.default_rng(0).integers(-(-3 * self.response // 4), self.response + 1, count)
        widths = self.prompt, self.response
        return padded_batch(np.full(count, self.prompt), responses, widths, vocabulary, self.size)


@dataclass(frozen=True)
class Trajectories:
    """Tasks of tau-bench's airline, four trials each."""

    tasks: int = 50
    least: float | None = 1.3
    scale: float = 1
    name: str = "trajectories"

    def batch(self, tokens: int, vocabulary: int) -> TensorDict:
        return trajectories(vocabulary, tasks=self.tasks, scale=self.scale)


@dataclass(frozen=True)
class Model:
    """A model, and what it is measured on."""

    name: str
    shape: Shape
    batches: Sequence[Groups | Trajectories]


MODELS: Mapping[str, Model] = {
    "small": Model(
        "Qwen3-0.6B", SMALL, (Groups(256, 1024, 8, 1.06), Groups(2048, 512, 8, 2.77), Groups(8192, 1024, 8, 3.53))
    ),
    "agent": Model("Qwen3-0.6B", SMALL, (Trajectories(),)),
}


@dataclass(frozen=True)
class Sizes:
    """Of the batches; `compared` rows are compared with a float32 model, whose error may be `slack`
    times that of whole rows, because both are of a few rows."""

    tokens: int = 131_072
    token_budget: int = 32_768
    compared: int = 4
    slack: float = 1.25
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)


_TINY = {"small": Model("B", TINY, [Groups(20, 8, 3, 2.0), Trajectories(2, scale=0.01)])}


@case(
    "prefixes",
    help="log-probs with prompts of groups, and prefixes of trajectories, computed once",
    on="gpu",
    rows=None,
    groups=tuple(MODELS),
    tiny={"sizes": Sizes(200, 60, 3, slack=5, models=_TINY)},
)
def run(rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if shared prefixes are further from float32 than whole
    rows are."""
    sizes = sizes or Sizes()
    device = the_device()
    for group in only or sizes.models:
        model = sizes.models[group]
        causal_lm: Any = model.shape.model(device)
        for batch in model.batches:
            name = f"prefixes, shape of {model.name}, {batch.name}"
            progress(name)
            padded = batch.batch(sizes.tokens, model.shape.vocabulary).exclude("uid", "response_mask")
            stage = Stage(causal_lm, padded, sizes.token_budget, batch, sizes, device)
            yield [*stage.described(name), *_errors(name, stage)]
            for step in (FORWARD, BOTH):
                yield _timed(f"{name}, {step}", stage, step == BOTH, -(-rounds // SEVERAL))
            gc.collect()
        del causal_lm


@dataclass(frozen=True)
class Stage(Replay):
    """A model on the device, and the batch that it runs on, on the host."""

    of: Groups | Trajectories
    sizes: Sizes
    device: torch.device

    def described(self, case: str) -> list[Row]:
        tree, tokens = prefix_tree(self.nested), int(self.lengths.sum())
        return [
            Row(case, "rows", len(self.lengths), "rows"),
            Row(case, "tokens of rows", tokens, "tokens"),
            Row(case, "tokens of the tree / tokens of rows", tree.num_tokens / tokens, "x"),
        ]


def _errors(case: str, stage: Stage) -> list[Row]:
    """How far log-probs of some rows are off those of a float32 model that sees each row alone."""
    model, sizes = stage.replay.release().eval(), stage.sizes
    chosen = np.linspace(0, 2 * getattr(stage.of, "size", 4) - 1, sizes.compared).astype(np.int64).tolist()
    few = stage.padded[chosen]
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        truth = torch.cat(list(lone_log_probs(exact, few.to(stage.device))))
        seen: dict[str, Any] = {
            name: response_log_probs(
                stage.replay, few, self_check=True, options=ReplayOptions(share_prefixes=name == SHARED)
            )
            for name in (SHARED, WHOLE)
        }
    return errors(case, {name: one.values() for name, one in seen.items()}, truth, (SHARED, WHOLE), sizes.slack)


def _timed(case: str, stage: Stage, backward: bool, rounds: int) -> list[Row]:
    runs = {
        name: once(stage.model, lambda shares=name == SHARED: stage.log_probs(shares), backward)
        for name in (SHARED, WHOLE)
    }
    target = f">= {stage.of.least}" if backward and stage.of.least else None
    return timed(case, runs, rounds, stage.device, [(WHOLE, SHARED, target)])
