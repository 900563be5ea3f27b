"""Log-probs of packed hidden states beside the output layers of others: time, memory and errors.

    ours                    packed_log_probs, which keeps as many bytes as the weight has
    ours, nothing kept      the same with keep=0
    ours, all kept          the same with a budget for the distributions of all tokens
    ours, with entropy      the same as nothing kept, entropies too
    all logits, ...         flash-attn's Triton cross entropy, which writes the gradient over the bfloat16 logits
    others                  kernels of verl, Liger and cut-cross-entropy, which make no logits (`bench.rivals.heads`)

Those that this machine does not have, or that fail, are named on stderr and have a row "missing". Errors as in
`log_probs`: the largest of a log-prob, and relative ones of gradients of a problem with sure tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases.ops.log_probs import (
    Problem,
    errors_of_gradients,
    make,
    true_log_probs,
    with_backward,
    without_graph,
)
from bench.cases.ops.log_probs import Sizes as Shape
from bench.harness.measure import progress
from bench.harness.passes import timed
from bench.harness.report import Row, RowGroups, ratios
from bench.rivals import heads
from maskpack.ops import packed_log_probs

OURS = "ours"
_OURS = {
    OURS: {},
    f"{OURS}, nothing kept": {"keep": 0},
    f"{OURS}, all kept": {"keep": 1 << 50},
    f"{OURS}, with entropy": {"keep": 0, "entropy": True},
}
_FASTEST = "fastest rival"


@dataclass(frozen=True)
class Sizes:
    """H and V of the output layers, and the tokens that each is measured on: rows of 1,024."""

    layers: Sequence[tuple[int, int]] = ((4096, 32_768), (4096, 131_072), (2560, 151_936))
    rows: Sequence[int] = (8, 32)
    width: int = 1024
    sample: int = 512


def rows(sizes: Sizes, device: torch.device, rounds: int) -> RowGroups:
    """The rows of the report."""
    for hidden, vocabulary in sizes.layers:
        for count in sizes.rows:
            yield from _of(Shape(count, sizes.width, hidden, vocabulary, sizes.sample), rounds, device)
            gc.collect()


def _of(shape: Shape, rounds: int, device: torch.device) -> RowGroups:
    case = f"heads, V = {shape.vocabulary:,}, H = {shape.hidden:,}, {shape.rows * shape.width:,} tokens"
    progress(case)
    problem = make(shape, 1.0, device)
    works, missing = _works(device)
    chosen, truth = true_log_probs(problem, shape.sample)
    report: list[Row] = []
    for name, work in list(works.items()):
        try:
            with torch.no_grad():
                off = (work(problem)[chosen] - truth).abs()
            with_backward(work, problem)()
        except Exception as error:
            if name.startswith(OURS):
                raise
            missing[name] = f"{type(error).__name__}: {str(error)[:300]}"
            del works[name]
            continue
        report += [Row(case, f"largest error, {name}", float(off.max()), "nats")]
    for part, of in errors_of_gradients(problem, works).items():
        report += [Row(case, f"error of the gradient, {part}, {name}", 100 * error, "%") for name, error in of.items()]
    for name, reason in missing.items():
        progress(f"missing, {name}: {reason}")
    yield [*report, *(Row(case, f"missing, {name}", 1, "rivals") for name in missing)]
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for step, wrapped in (("forward", without_graph), ("forward + backward", with_backward)):
        runs = {name: wrapped(work, problem) for name, work in works.items()}
        figures, seconds = timed(f"{case}, {step}", runs, rounds, device, (), before=held)
        seconds[_FASTEST] = min((one for name, one in seconds.items() if name not in _OURS), default=seconds[OURS])
        yield [*figures, *ratios(f"{case}, {step}", seconds, [(_FASTEST, own, None) for own in _OURS])]


def _works(device: torch.device) -> tuple[dict[str, Callable[[Problem], Tensor]], dict[str, str]]:
    names = [name for name in heads.ALL if name != heads.PLAIN or device.type == "cpu"]  # too large for a GPU
    found, missing = heads.importable(names, device)

    def own(options: dict[str, int]) -> Callable[[Problem], Tensor]:
        def work(of: Problem) -> Tensor:
            out = packed_log_probs(of.hidden.flatten(0, 1), of.weight, of.ids, **options)
            return out[0] if options.get("entropy") else out

        return work

    def others(head: heads.Head) -> Callable[[Problem], Tensor]:
        return lambda of: head(of.hidden.flatten(0, 1), of.weight, of.ids)

    return {**{n: own(o) for n, o in _OURS.items()}, **{n: others(h) for n, h in found.items()}}, missing
