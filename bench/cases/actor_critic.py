"""One update of a policy with a value head on the CPU: log-probs, values and the gradients of both losses.

    padded            micro-batches of 4 rows at the width of the batch, one forward pass of the layers; logits and
                      values of the response alone
    trimmed           the same, each micro-batch cut to its longest prompt and response
    trimmed, sorted   the same, rows sorted by length first
    two passes        response_log_probs and response_values over packed micro-batches
    one pass          response_outputs over the same
    shared            the same, prompts of groups computed once

32 rows of 96 + 416 columns, of which 29 % are real, in groups of 4; a Qwen3 whose layers have three times the
parameters of its output layer, as Qwen3-0.6B; float32. Packed ways begin with a nested batch: trees, plans and inputs
are part of their time. Times are processor time of one thread, interleaved, medians. Before anything is timed, the
gradients of all ways are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.harness.measure import NotExact, interleaved, progress, torch_threads
from bench.harness.passes import once
from bench.harness.registry import case
from bench.harness.replay import Replay
from bench.harness.report import Row, RowGroups, times
from bench.workloads.models import TINY, Shape, cut, log_normal_lengths, padded_batch
from maskpack.replay import ReplayOptions, response_log_probs, response_outputs, response_values

PADDED, TRIMMED, SORTED = "padded", "trimmed", "trimmed, sorted"
TWO, ONE, SHARED = "two passes", "one pass", "shared"
WIDTHS, FILL, GROUP, PADDED_ROWS = (96, 416), 0.3, 4, 4
SHAPE = Shape(128, 4, 4, 2, 32, 384, 2048)
_APART = 1e-4
_SHARE = ReplayOptions(share_prefixes=True)


@dataclass(frozen=True)
class Stage(Replay):
    """The policy, the batch [B], with advantages and returns [B, R], and a value head."""

    head: torch.nn.Linear

    @property
    def weights(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.head.parameters()]

    def of_padded(self, trimmed: bool, by_length: bool = False) -> Iterator[Tensor]:
        """The loss of each micro-batch."""
        self.replay.release()
        order = self.lengths.argsort().tolist() if by_length else list(range(len(self.padded)))
        for whole in self.padded[order].split(PADDED_ROWS):
            part = cut(whole) if trimmed else whole
            width = part["responses"].shape[1]
            given = (part["input_ids"], part["attention_mask"], part["position_ids"])
            states = self.model.model(*given, use_cache=False).last_hidden_state[:, -width - 1 : -1]
            scores = self.model.lm_head(states).log_softmax(-1)
            log_probs = scores.gather(-1, part["responses"][..., None])[..., 0]
            on = part["attention_mask"][:, -width:] != 0
            fields = (whole[name][:, :width] for name in ("advantages", "returns"))
            yield loss_of(log_probs, self.head(states)[..., 0], *fields)[on].sum()

    def of_packed(self, together: bool, shares: bool = False) -> Iterator[Tensor]:
        """The loss of each micro-batch; micro-batches are planned anew."""
        options = _SHARE if shares else ReplayOptions()
        more: dict[str, Any] = {"self_check": False, "options": options}
        for part in self.plan(shares).apply(self.nested):
            if together:
                out = response_outputs(self.replay, part, heads={"value": self.head}, **more)
                pair: Any = (out.log_probs, out.heads["value"])
            else:
                pair = (
                    response_log_probs(self.replay, part, **more),
                    response_values(self.replay, part, self.head, **more),
                )
            yield loss_of(*(x.values() for x in (*pair, part["advantages"], part["returns"]))).sum()

    def works(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        return {
            PADDED: lambda: self.of_padded(trimmed=False),
            TRIMMED: lambda: self.of_padded(trimmed=True),
            SORTED: lambda: self.of_padded(trimmed=True, by_length=True),
            TWO: lambda: self.of_packed(together=False),
            ONE: lambda: self.of_packed(together=True),
            SHARED: lambda: self.of_packed(together=True, shares=True),
        }


def loss_of(log_probs: Tensor, values: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
    """Of each token."""
    return (values - returns).square() - advantages * log_probs


@case(
    "actor-critic",
    help="an update of a policy with a value head, on the CPU",
    on="cpu",
    rows=32,
    tiny={"rows": 8, "shape": TINY},
)
def run(rows: int, rounds: int, *, shape: Shape = SHAPE) -> RowGroups:
    """Raises NotExact if two ways give other gradients."""
    name = f"actor-critic, {rows} rows"
    progress(name)
    with torch_threads(1):
        stage = staged(rows, shape)
        check(name, stage)
        real = int(stage.lengths.sum()) / rows / sum(WIDTHS)
        runs = {way: once(stage.model, parts, True) for way, parts in stage.works().items()}
        ms = interleaved(runs, rounds, time.process_time)
    pairs = [(ONE, TRIMMED, "<= 0.6"), (ONE, SORTED, None), (TWO, TRIMMED, None), (TWO, SORTED, None)]
    pairs += [(ONE, TWO, None), (SHARED, ONE, None), (PADDED, ONE, None)]
    yield [Row(name, "real tokens / padded positions", real, "x"), *times(name, ms, pairs)]


def staged(rows: int, shape: Shape) -> Stage:
    prompts, responses = log_normal_lengths(rows, WIDTHS, FILL, GROUP)
    batch = padded_batch(prompts, responses, WIDTHS, shape.vocabulary, GROUP)
    source, on = torch.Generator().manual_seed(0), batch["attention_mask"][:, WIDTHS[0] :] != 0
    for name in ("advantages", "returns"):
        batch[name] = torch.randn(on.shape, generator=source).where(on, 0)
    policy: Any = shape.model(torch.device("cpu"), torch.float32)
    policy.gradient_checkpointing_disable()
    return Stage(policy, batch, PADDED_ROWS * sum(WIDTHS), torch.nn.Linear(shape.hidden, 1))


def check(case: str, stage: Stage) -> None:
    """Raises NotExact unless every way gives the gradients of the padded one."""
    seen: dict[str, list[Tensor]] = {}
    stage.model.train()
    for name, parts in stage.works().items():
        for weight in stage.weights:
            weight.grad = None
        for loss in parts():
            loss.backward()
        seen[name] = [weight.grad.clone() for weight in stage.weights if weight.grad is not None]
    for name, gradients in seen.items():
        for own, padded in zip(gradients, seen[PADDED], strict=True):
            apart = float((own - padded).norm() / padded.norm().clamp(min=1e-6))
            if not apart <= _APART:
                raise NotExact(f"{case}: a gradient of {name} is {apart:.2g} from that of {PADDED}.")
