"""From which size on packing pays: log-probs of a few short rows by a tiny random model on the CPU.

    padded               one forward pass at the width of the batch, logits of the responses' width alone
    padded, trimmed      the same, cut to the longest prompt and response
    packed               response_log_probs of the padded batch: the mask is read, the rows are packed
    shared               the same, prefixes that rows share computed once
    packed, first call   the same as packed, with the self-check of the first call

Half of the positions are real, and four rows share a prompt. Forward, and forward + backward, float32. Times are
processor time of one thread, interleaved, medians. Before anything is timed the log-probs of all ways are compared.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, interleaved, progress, torch_threads
from bench.harness.passes import once
from bench.harness.registry import case
from bench.harness.report import RowGroups, times
from bench.rivals.attention import padded_log_probs
from bench.workloads.models import TINY, Shape, cut, log_normal_lengths, padded_batch
from maskpack.adapters.transformers import replayable
from maskpack.replay import ReplayOptions, response_log_probs

PADDED, TRIMMED, PACKED, SHARED, FIRST = "padded", "padded, trimmed", "packed", "shared", "packed, first call"
SIZES = ((2, 50), (4, 50), (8, 50), (16, 50), (16, 100), (64, 100))  # rows, and their mean number of tokens
SHAPE = Shape(64, 2, 4, 2, 16, 192, 4096)
_FILL, _GROUP, _TARGET_AT = 0.5, 4, (16, 100)
_APART = 1e-4


@case(
    "toy",
    help="from which size on a tiny model on the CPU gains",
    on="cpu",
    rows=None,
    tiny={"shape": TINY, "sizes": ((2, 9),)},
)
def run(rounds: int, *, shape: Shape = SHAPE, sizes: Sequence[tuple[int, int]] = SIZES) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if two ways give other log-probs."""
    with torch_threads(1):
        model: Any = shape.model(torch.device("cpu"), torch.float32).eval()
        for layer in model.model.layers:
            layer.gradient_checkpointing = False
        for size in sizes:
            ways = _ways(model, _batch(*size, shape.vocabulary))
            for step, backward in (("forward", False), ("forward + backward", True)):
                name = f"{size[0]} rows of {size[1]} tokens, {step}"
                progress(name)
                _check(name, ways)
                runs = {way: once(model, partial(_parts, log_probs), backward) for way, log_probs in ways.items()}
                ms = interleaved(runs, 3 * rounds, time.process_time, warm=2)
                target = "<= 1" if size == _TARGET_AT else None
                pairs = ((PACKED, PADDED, target), (PACKED, TRIMMED, None), (SHARED, PADDED, None))
                yield times(name, ms, (*pairs, (FIRST, PADDED, None)))


def _batch(rows: int, tokens: int, vocabulary: int) -> TensorDict:
    widths = (tokens * 2 // 3, tokens * 4 // 3)
    return padded_batch(*log_normal_lengths(rows, widths, _FILL, _GROUP), widths, vocabulary, _GROUP)


def _ways(model: Any, batch: TensorDict) -> dict[str, Callable[[], Tensor]]:
    """Each returns the log-probs of response tokens, [B, R] or those of one row after another."""
    replay, rows = replayable(copy.deepcopy(model)), len(batch)
    return {
        PADDED: lambda: next(padded_log_probs(model, batch, rows, scored=True)),
        TRIMMED: lambda: next(padded_log_probs(model, cut(batch), rows, scored=True)),
        PACKED: lambda: _values(response_log_probs(replay, batch)),
        SHARED: lambda: _values(response_log_probs(replay, batch, options=ReplayOptions(share_prefixes=True))),
        FIRST: lambda: _values(response_log_probs(replay, batch, self_check=True)),
    }


def _values(log_probs: Any) -> Tensor:
    return log_probs.values()


def _parts(log_probs: Callable[[], Tensor]) -> tuple[Tensor]:
    return (log_probs(),)


@torch.no_grad()
def _check(case: str, ways: dict[str, Callable[[], Tensor]]) -> None:
    wanted = ways[PADDED]()
    for name, log_probs in ways.items():
        values, at_tokens = log_probs(), wanted[wanted != 0]
        values = values[values != 0]
        apart = float((values - at_tokens).abs().max()) if values.shape == at_tokens.shape else float("inf")
        if not apart <= _APART:
            raise NotExact(f"{case}: log-probs of {name} are {apart:.2g} from those of {PADDED}.")
