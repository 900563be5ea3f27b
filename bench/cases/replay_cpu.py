"""Log-probs of a workload by a tiny random model on the CPU.

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
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, interleaved, progress, torch_threads
from bench.harness.passes import BOTH, FORWARD, SEVERAL, once
from bench.harness.registry import case
from bench.harness.replay import Replay
from bench.harness.report import Row, RowGroups, times
from bench.rivals.attention import padded_log_probs
from bench.workloads import batch_of
from bench.workloads.models import TINY, Shape, cut
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

PADDED, TRIMMED, WHOLE, SHARED = "padded", "padded, trimmed", "whole rows", "shared"
SCALES = {"reference": 1 / 16, "tau": 1 / 8, "mooncake": 1 / 64}
ROWS, PADDED_ROWS = 64, 4
SHAPE = Shape(64, 2, 4, 2, 16, 192, 4096)
_APART = 1e-4


class Stage(Replay):
    """The model, and the batch of a workload."""

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


def folded(batch: TensorDict, pad: int) -> TensorDict:
    """The batch with token ids below the pad."""
    batch = batch.select("prompts", "responses", "input_ids", "attention_mask", "position_ids")
    p, ids = batch["prompts"].shape[1], torch.where(batch["attention_mask"] != 0, batch["input_ids"] % pad, pad)
    return batch.update({"input_ids": ids, "prompts": ids[:, :p].clone(), "responses": ids[:, p:].clone()})


@case(
    "replay-cpu",
    help="log-probs of a workload by a tiny model on the CPU",
    on="cpu",
    workloads=True,
    tiny={"rows": 5, "scale": 0.01, "shape": TINY},
)
def run(
    rows: int, rounds: int, *, workload: str = "reference", scale: float | None = None, shape: Shape = SHAPE
) -> RowGroups:
    """Of at most ROWS rows; a round here is three of the command line. Raises NotExact if two ways give other
    log-probs."""
    scale = scale or SCALES[workload]
    name = f"replay {workload}, scale 1 / {1 / scale:g}"
    progress(name)
    with torch_threads(1):
        causal_lm: Any = shape.model(torch.device("cpu"), torch.float32).eval()
        padded = folded(batch_of(workload, min(rows, ROWS), scale=scale), shape.vocabulary - 1)
        width = padded["input_ids"].shape[1]
        stage = Stage(causal_lm, padded, PADDED_ROWS * width)
        check(name, stage)
        real, tree = int(stage.lengths.sum()), prefix_tree(stage.nested)
        yield [
            Row(name, "rows", stage.lengths.size, "rows"),
            Row(name, "padded width", width, "tokens"),
            Row(name, "real tokens / padded positions", real / stage.lengths.size / width, "x"),
            Row(name, "tokens of the tree / tokens of rows", tree.num_tokens / real, "x"),
        ]
        for step in (FORWARD, BOTH):
            yield _timed(f"{name}, {step}", stage, step == BOTH, -(-rounds // SEVERAL))


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
    runs = {name: once(stage.model, parts, backward) for name, parts in stage.works().items()}
    ms = interleaved(runs, rounds, time.process_time)
    pairs = ((PADDED, WHOLE), (PADDED, SHARED), (TRIMMED, WHOLE), (TRIMMED, SHARED), (WHOLE, SHARED))
    return times(case, ms, [(*pair, None) for pair in pairs])
