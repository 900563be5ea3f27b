"""Work that two ranks share, beside one rank alone: `python -m bench ranks`.

    context   log-probs of 65,536 packed tokens by replay: each rank has half of the tokens and exchanges heads
    heads     packed_log_probs: each rank has half of the vocabulary, all tokens

Forward, and forward + backward, with the layers of the model checkpointed. Two processes, one GPU each, over NCCL; on
the CPU, over gloo. One rank alone is rank 0, while the other waits. Both are synchronised and wait for each other
before each run, which takes until both are done. Gradients stay where they are: a trainer reduces them once a step.
Results are compared before anything is timed, with those of one rank. The peak is how far the memory of rank 0 rises
during a run: the weights lie there before.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure import NotExact, progress
from bench.pair import Link, join
from bench.replay import padded_batch, peak_of
from bench.replay_rivals import Shape
from bench.report import Row
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import replayable
from maskpack.ops import packed_log_probs
from maskpack.replay import response_log_probs

_RANKS = 2
_TIMES_ROUNDS = 3  # rounds of the command line that are one here
_CLOSE = {torch.bfloat16: 0.05, torch.float32: 1e-5}  # rms of the differences of log-probs, in nats
ALONE, SHARED = "one rank", "two ranks"
_SMALL = Shape(1024, 28, 16, 8, 128, 3072)  # of Qwen3-0.6B


@dataclass(frozen=True)
class Head:
    """Tokens, hidden size and vocabulary."""

    tokens: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class Sizes:
    """Of the model and its rows, [(rows, prompt, response)], and of the output layers."""

    shape: Shape = _SMALL
    batches: Sequence[tuple[int, int, int]] = ((16, 1024, 3072), (1, 16_384, 49_152))
    heads: Sequence[Head] = (Head(16_384, 1024, 151_936), Head(16_384, 4096, 131_072))
    dtype: torch.dtype = torch.bfloat16


def run(
    rows: int = 256, rounds: int = 9, *, only: Sequence[str] | None = None, sizes: Sizes | None = None
) -> list[Row]:
    """The rows of the report; none without two GPUs. Raises torch.multiprocessing.ProcessRaisedException, which shows
    NotExact, if two ranks have other numbers than one."""
    if torch.cuda.device_count() < _RANKS:
        progress("ranks: skipped, because this machine has fewer than two GPUs")
        return []
    return measured("nccl", -(-rounds // _TIMES_ROUNDS), sizes or Sizes(), only or ("context", "heads"))


def measured(backend: Link, rounds: int, sizes: Sizes, groups: Sequence[str]) -> list[Row]:
    """`run` of two processes: with NCCL on two GPUs, with gloo on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, backend, rounds, sizes, groups), nprocs=_RANKS)
        return pickle.loads(Path(folder, "rows").read_bytes())


def _rank(rank: int, folder: str, backend: str, rounds: int, sizes: Sizes, groups: Sequence[str]) -> None:
    device, host = join(rank, folder, backend)
    pair = _Pair(rank, device, rounds, host)
    report: list[Row] = []
    if "context" in groups:
        report += _context(pair, sizes)
    if "heads" in groups:
        for head in sizes.heads:
            report += _head(pair, head, sizes.dtype)
    if rank == 0:
        Path(folder, "rows").write_bytes(pickle.dumps(report))
    dist.destroy_process_group()


Work = Callable[[bool], Tensor]
"""Log-probs, with their backward pass or without one."""


class _Pair:
    """One of the two ranks."""

    def __init__(self, rank: int, device: torch.device, rounds: int, host: Any) -> None:
        self.rank, self.device, self.rounds, self._host = rank, device, rounds, host

    def figures(self, case: str, alone: Work, shared: Work, dtype: torch.dtype) -> list[Row]:
        """The rows of the report, on rank 0; `alone` runs on this rank only."""
        if self.rank == 0:
            progress(case)
        works: dict[str, Work] = {ALONE: (lambda backward: self._only_first(alone, backward)), SHARED: shared}
        apart = (shared(False) - alone(False)).double().square().mean().sqrt().item()
        if not apart <= _CLOSE[dtype]:
            raise NotExact(f"{case}: two ranks are {apart:.2g} off one (rms); expected at most {_CLOSE[dtype]}.")
        report = [Row(case, "rms difference of two ranks to one", apart, "nats")]
        for step, backward in (("forward", False), ("forward + backward", True)):
            runs = {name: partial(work, backward) for name, work in works.items()}
            peaks = {name: self._rise(work) for name, work in runs.items()}
            seconds = self._interleaved(runs)
            where = f"{case}, {step}"
            report += [Row(where, name, 1e3 * taken, "ms") for name, taken in seconds.items()]
            report.append(Row(where, f"{ALONE} / {SHARED}", seconds[ALONE] / seconds[SHARED], "x", ">= 1.7"))
            report += [Row(where, f"peak, {name}", peak / 2**30, "GiB") for name, peak in peaks.items()]
        return report

    def _rise(self, work: Callable[[], object]) -> float:
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return peak_of(work, self.device) - before

    def _only_first(self, alone: Work, backward: bool) -> object:
        return alone(backward) if self.rank == 0 else None

    def _interleaved(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds until both are done, of runs that have run before; rounds begin with one or the other."""
        names, seconds = list(runs), {name: list[float]() for name in runs}
        for turn in range(self.rounds):
            for name in names[turn % 2 :] + names[: turn % 2]:
                self._wait()
                begin = time.perf_counter()
                runs[name]()
                self._wait()
                seconds[name].append(time.perf_counter() - begin)
        return {name: statistics.median(taken) for name, taken in seconds.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self._host)


def _context(pair: _Pair, sizes: Sizes) -> list[Row]:
    vocabulary = sizes.shape.vocabulary
    model: Any = sizes.shape.model(pair.device, sizes.dtype)
    replay = replayable(model)

    def replayed(nested: Any, group: Any, backward: bool) -> Tensor:
        model.train(backward)
        with torch.set_grad_enabled(backward):
            log_probs: Any = response_log_probs(replay, nested, context_group=group, self_check=False)
            if backward:
                log_probs.values().sum().backward()
        model.zero_grad(set_to_none=True)
        return log_probs.values().detach()

    report: list[Row] = []
    for rows, prompt, response in sizes.batches:
        padded = padded_batch(np.full(rows, prompt), np.full(rows, response), (prompt, response), vocabulary)
        nested = nest_batch_by_mask(padded, pad_token_id=vocabulary - 1).to(pair.device)
        case = f"context parallelism, {rows} x {prompt + response:,} tokens"
        shared = partial(replayed, nested, dist.group.WORLD)
        report += pair.figures(case, partial(replayed, nested, None), shared, sizes.dtype)
    return report


def _head(pair: _Pair, head: Head, dtype: torch.dtype) -> list[Row]:
    source = torch.Generator(pair.device).manual_seed(0)
    shape = {"device": pair.device, "generator": source}
    hidden = torch.randn((head.tokens, head.hidden), **shape).to(dtype).requires_grad_()
    weight = torch.randn((head.vocabulary, head.hidden), **shape).mul_(head.hidden**-0.5).to(dtype)
    ids = torch.randint(head.vocabulary, (head.tokens,), **shape)
    own = weight.tensor_split(_RANKS)[pair.rank].clone().requires_grad_()
    whole = weight if pair.rank else weight.requires_grad_()

    def scored(of: Tensor, group: Any, backward: bool) -> Tensor:
        with torch.set_grad_enabled(backward):
            log_probs: Any = packed_log_probs(hidden, of, ids, group=group)
            if backward:
                log_probs.sum().backward()
        hidden.grad = of.grad = None
        return log_probs.detach()

    case = f"vocabulary of {head.vocabulary:,} over two ranks, {head.tokens:,} tokens, H {head.hidden:,}"
    shared = partial(scored, own, dist.group.WORLD)
    return pair.figures(case, partial(scored, whole, None), shared, dtype)
