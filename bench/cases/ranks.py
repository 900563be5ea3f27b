"""Work that two ranks share, beside one rank alone.

    context   log-probs of 65,536 packed tokens by replay: each rank has half of the tokens and exchanges heads
    heads     packed_log_probs: each rank has half of the vocabulary, all tokens

Forward, and forward + backward, with the layers of the model checkpointed. Two processes, one GPU each, over NCCL; on
the CPU, over gloo. One rank alone is rank 0, while the other waits. Both are synchronised and wait for each other
before each run, which takes until both are done. Gradients stay where they are: a trainer reduces them once a step.
Results are compared before anything is timed, with those of one rank. The peak is how far the memory of rank 0 rises
during a run: the weights lie there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness.measure import NotExact, progress
from bench.harness.passes import SEVERAL, timed
from bench.harness.processes import Link, Pair, on_both
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.workloads.models import SMALL, TINY, Shape, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import replayable
from maskpack.ops import packed_log_probs
from maskpack.replay import response_log_probs

_RANKS = 2
_CLOSE = {torch.bfloat16: 0.05, torch.float32: 1e-5}  # rms of the differences of log-probs, in nats
ALONE, SHARED = "one rank", "two ranks"


@dataclass(frozen=True)
class Head:
    """Tokens, hidden size and vocabulary."""

    tokens: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class Sizes:
    """Of the model and its rows, [(rows, prompt, response)], and of the output layers."""

    shape: Shape = SMALL
    batches: Sequence[tuple[int, int, int]] = ((16, 1024, 3072), (1, 16_384, 49_152))
    heads: Sequence[Head] = (Head(16_384, 1024, 151_936), Head(16_384, 4096, 131_072))
    dtype: torch.dtype = torch.bfloat16


_GROUPS = ("context", "heads")


@case(
    "ranks",
    help="work that two GPUs share: replay of long rows, an output layer",
    on="gpu",
    rows=None,
    groups=_GROUPS,
    tiny={"sizes": Sizes(TINY, ((3, 5, 4), (1, 9, 6)), (Head(11, 8, 97),), torch.float32), "backend": "gloo"},
)
def run(rounds: int, *, only: Sequence[str] = _GROUPS, sizes: Sizes | None = None, backend: Link = "nccl") -> RowGroups:
    """None without two GPUs; a round here is three of the command line. Raises
    torch.multiprocessing.ProcessRaisedException, which shows NotExact, if two ranks have other numbers than one."""
    return on_both("ranks", backend, _measured, -(-rounds // SEVERAL), sizes or Sizes(), only)


def _measured(pair: Pair, rounds: int, sizes: Sizes, groups: Sequence[str]) -> RowGroups:
    ranks = _Ranks(pair, rounds)
    if "context" in groups:
        yield from _context(ranks, sizes)
    for head in sizes.heads if "heads" in groups else ():
        yield from _head(ranks, head, sizes.dtype)


Work = Callable[[bool], Tensor]
"""Log-probs, with their backward pass or without one."""


@dataclass(frozen=True)
class _Ranks:
    """One of the two ranks."""

    pair: Pair
    rounds: int

    def figures(self, case: str, alone: Work, shared: Work, dtype: torch.dtype) -> RowGroups:
        """The rows of the report, on rank 0; `alone` runs on this rank only."""
        rank, device = self.pair.rank, self.pair.device
        if rank == 0:
            progress(case)
        works: dict[str, Callable[[bool], object]] = {
            ALONE: (lambda backward: None if rank else alone(backward)),
            SHARED: shared,
        }
        apart = (shared(False) - alone(False)).double().square().mean().sqrt().item()
        if not apart <= _CLOSE[dtype]:
            raise NotExact(f"{case}: two ranks are {apart:.2g} off one (rms); expected at most {_CLOSE[dtype]}.")
        yield [Row(case, "rms difference of two ranks to one", apart, "nats")]
        for step, backward in (("forward", False), ("forward + backward", True)):
            runs = {name: partial(work, backward) for name, work in works.items()}
            pairs, wait = [(ALONE, SHARED, ">= 1.7")], self.pair.wait
            yield timed(f"{case}, {step}", runs, self.rounds, device, pairs, above_held=True, wait=wait)


def _context(ranks: _Ranks, sizes: Sizes) -> RowGroups:
    vocabulary = sizes.shape.vocabulary
    model: Any = sizes.shape.model(ranks.pair.device, sizes.dtype)
    replay = replayable(model)

    def replayed(nested: Any, group: Any, backward: bool) -> Tensor:
        model.train(backward)
        with torch.set_grad_enabled(backward):
            log_probs: Any = response_log_probs(replay, nested, context_group=group, self_check=False)
            if backward:
                log_probs.values().sum().backward()
        model.zero_grad(set_to_none=True)
        return log_probs.values().detach()

    for rows, prompt, response in sizes.batches:
        padded = padded_batch(np.full(rows, prompt), np.full(rows, response), (prompt, response), vocabulary)
        nested = nest_batch_by_mask(padded, pad_token_id=vocabulary - 1).to(ranks.pair.device)
        case = f"context parallelism, {rows} x {prompt + response:,} tokens"
        shared = partial(replayed, nested, dist.group.WORLD)
        yield from ranks.figures(case, partial(replayed, nested, None), shared, sizes.dtype)


def _head(ranks: _Ranks, head: Head, dtype: torch.dtype) -> RowGroups:
    source = torch.Generator(ranks.pair.device).manual_seed(0)
    shape = {"device": ranks.pair.device, "generator": source}
    hidden = torch.randn((head.tokens, head.hidden), **shape).to(dtype).requires_grad_()
    weight = torch.randn((head.vocabulary, head.hidden), **shape).mul_(head.hidden**-0.5).to(dtype)
    ids = torch.randint(head.vocabulary, (head.tokens,), **shape)
    own = weight.tensor_split(_RANKS)[ranks.pair.rank].clone().requires_grad_()
    whole = weight if ranks.pair.rank else weight.requires_grad_()

    def scored(of: Tensor, group: Any, backward: bool) -> Tensor:
        with torch.set_grad_enabled(backward):
            log_probs: Any = packed_log_probs(hidden, of, ids, group=group)
            if backward:
                log_probs.sum().backward()
        hidden.grad = of.grad = None
        return log_probs.detach()

    case = f"vocabulary of {head.vocabulary:,} over two ranks, {head.tokens:,} tokens, H {head.hidden:,}"
    shared = partial(scored, own, dist.group.WORLD)
    return ranks.figures(case, partial(scored, whole, None), shared, dtype)
