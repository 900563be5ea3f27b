"""Log-probs of a workload by a tiny random model on the CPU: `python -m bench replay --workload NAME`.

    padded               micro-batches of a few rows at the width of the batch, logits of the responses' width alone
    padded, trimmed      the same, rows sorted by length, and each micro-batch cut to its longest prompt and response
    whole rows           response_log_probs over packed micro-batches of as many tokens as padded ones have positions
    shared               the same, prefixes that rows share computed once

All lengths and widths are scaled down alike (SCALES), so that their proportions stay. Forward, and forward + backward,
float32. Whole rows and shared begin with a nested batch: trees, plans and inputs are part of their time. Times are
processor time of one thread, interleaved, medians. Before anything is timed the log-probs of all ways are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bench import prefixes
from bench.measure import NotExact, interleaved, progress, torch_threads
from bench.prefixes import SHARED, WHOLE
from bench.replay import BOTH, FORWARD, PADDED, once
from bench.replay_rivals import Shape, padded_log_probs
from bench.report import Row
from bench.workloads import batch_of
from maskpack.replay import ReplayOptions, response_log_probs

TRIMMED = "padded, trimmed"
SCALES = {"reference": 1 / 16, "tau": 1 / 8, "mooncake": 1 / 64}
ROWS, PADDED_ROWS = 64, 4
SHAPE = Shape(64, 2, 4, 2, 16, 192, 4096)
_APART = 1e-4
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scaled:
    """A workload, for `prefixes.Stage`. Token ids are folded into the vocabulary, whose last id is the pad."""

    name: str
    rows: int
    scale: float

    def batch(self, tokens: int, vocabulary: int) -> TensorDict:
        batch = batch_of(self.name, self.rows, scale=self.scale).select(
            "prompts", "responses", "input_ids", "attention_mask", "position_ids"
        )
        mask = batch["attention_mask"] != 0
        ids = torch.where(mask, batch["input_ids"] % (vocabulary - 1), vocabulary - 1)
        p = batch["prompts"].shape[1]
        return batch.update({"input_ids": ids, "prompts": ids[:, :p].clone(), "responses": ids[:, p:].clone()})


@dataclass(frozen=True)
class Stage(prefixes.Stage):
    """The model, the batch, and the padded ways."""

    @cached_property
    def by_length(self) -> list[int]:
        return self.lengths.argsort().tolist()

    def padded_parts(self, trimmed: bool) -> Iterator[Tensor]:
        model = self.replay.release()
        if not trimmed:
            yield from padded_log_probs(model, self.padded, PADDED_ROWS, scored=True)
            return
        for part in self.padded[self.by_length].split(PADDED_ROWS):
            yield from padded_log_probs(model, cut(part), PADDED_ROWS, scored=True)

    def works(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        return {
            PADDED: lambda: self.padded_parts(trimmed=False),
            TRIMMED: lambda: self.padded_parts(trimmed=True),
            WHOLE: lambda: self.log_probs(shares=False),
            SHARED: lambda: self.log_probs(shares=True),
        }


def run(workload: str, rows: int, rounds: int, *, scale: float | None = None, shape: Shape = SHAPE) -> list[Row]:
    """The rows of the report, of at most ROWS rows; a round here is three of the command line.

    Raises NotExact if two ways give other log-probs.
    """
    of = Scaled(workload, min(rows, ROWS), scale or SCALES[workload])
    case = f"replay {workload}, scale 1 / {1 / of.scale:g}"
    progress(case)
    with torch_threads(1):
        causal_lm: Any = shape.model(_CPU, torch.float32).eval()
        stage = Stage(causal_lm, shape, of, prefixes.Sizes(), _CPU)
        width = stage.padded["input_ids"].shape[1]
        stage = replace(stage, sizes=prefixes.Sizes(token_budget=PADDED_ROWS * width))
        check(case, stage)
        report = [
            *stage.described(case),
            Row(case, "padded width", width, "tokens"),
            Row(case, "real tokens / padded positions", stage.lengths.sum() / stage.lengths.size / width, "x"),
        ]
        for step in (FORWARD, BOTH):
            report += _timed(f"{case}, {step}", stage, step == BOTH, -(-rounds // 3))
    return report


def cut(part: TensorDict) -> TensorDict:
    """The columns between the first and the last token of any row."""
    p = part["prompts"].shape[1]
    columns = part["attention_mask"].any(0).nonzero()
    begin, end = int(columns[0]), int(columns[-1]) + 1
    cut = {name: part[name][:, begin:end] for name in ("input_ids", "attention_mask", "position_ids")}
    return TensorDict(
        {**cut, "prompts": part["prompts"][:, begin:], "responses": part["responses"][:, : end - p]}, part.batch_size
    )


@torch.no_grad()
def check(case: str, stage: Stage) -> None:
    """Raises NotExact unless every way gives the log-probs of the model that sees rows padded."""
    on = stage.padded["attention_mask"][:, -stage.padded["responses"].shape[1] :] != 0
    wanted = torch.cat(list(stage.padded_parts(trimmed=False)))
    trimmed = torch.zeros_like(wanted)
    at = 0
    for part in stage.padded_parts(trimmed=True):
        trimmed[stage.by_length[at : at + len(part)], : part.shape[1]] = part
        at += len(part)
    seen: dict[str, Tensor] = {TRIMMED: trimmed[on]}
    for name in (WHOLE, SHARED):
        packed: Any = response_log_probs(
            stage.replay, stage.nested, options=ReplayOptions(share_prefixes=name == SHARED)
        )
        seen[name] = packed.values()
    for name, log_probs in seen.items():
        apart = float((log_probs - wanted[on]).abs().max())
        if not apart <= _APART:
            raise NotExact(f"{case}: log-probs of {name} are {apart:.2g} from those of {PADDED}.")


def _timed(case: str, stage: Stage, backward: bool, rounds: int) -> list[Row]:
    runs = {name: once(stage.causal_lm, parts, backward) for name, parts in stage.works().items()}
    ms = interleaved(runs, rounds, time.process_time)
    pairs = ((PADDED, WHOLE), (PADDED, SHARED), (TRIMMED, WHOLE), (TRIMMED, SHARED), (WHOLE, SHARED))
    return [
        *(Row(case, name, taken, "ms") for name, taken in ms.items()),
        *(Row(case, f"{above} / {below}", ms[above] / ms[below], "x") for above, below in pairs),
    ]
