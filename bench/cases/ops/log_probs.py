"""Log-probs of packed hidden states: time, memory and error of ours, and of the logits that people make.

    full logits             logits of all positions, padding too, in the dtype of hidden; log_softmax, gather
    pack, then full logits  the same of the real positions only
    ours                    ops.pack, then packed_log_probs, which keeps as many bytes as the weight has
    ours, nothing kept      the same with keep=0
    ours, all kept          the same with a budget for the distributions of all tokens

Each begins with padded hidden [B, S, H], and the backward pass ends with its gradient and that of the weight. The peak
counts everything from there on: weight, padded and packed hidden, gradients. The error of a log-prob is the largest
against float64 on a sample of rows. The error of a gradient is |seen - truth| / |truth|, of a problem of the same size
where one token in seven has a logit of 12 and another a logit of 20, as tokens have of which a policy is sure.
Synchronised wall time, interleaved, medians.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.harness.measure import NotExact, progress
from bench.harness.passes import timed
from bench.harness.report import Row, RowGroups
from bench.rivals import log_probs as rivals
from maskpack import RowLayout, ops
from maskpack.ops.log_probs import packed_log_probs

_FULL, _PACKED, _OURS = "full logits", "pack, then full logits", "ours"
_NONE_KEPT, _ALL_KEPT = "ours, nothing kept", "ours, all kept"
_ALL_OURS = (_OURS, _NONE_KEPT, _ALL_KEPT)
_SLICE = 8192  # tokens of the vocabulary that are cast to float64 at once
_TRUTH = 1 << 27  # float64 logits at once
_SURE = {12: 0, 20: 3}  # logits, and the place in seven tokens of those that have them
_ALL, _WEIGHT = "hidden", "weight"


@dataclass(frozen=True)
class Sizes:
    """Of the problem."""

    rows: int = 32
    width: int = 1024
    hidden: int = 4096
    vocabulary: int = 131_072
    sample: int = 512
    densities: tuple[float, ...] = (0.05, 0.1, 0.3, 0.5, 1.0)


@dataclass(frozen=True)
class Problem:
    """hidden [B, S, H] and weight [V, H], bfloat16 leaves that want gradients; ids and slopes (float32), packed [T]."""

    layout: RowLayout
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    slopes: Tensor


def rows(sizes: Sizes, device: torch.device, rounds: int) -> RowGroups:
    """The rows of the report. Raises NotExact if ours is further from the truth than plain torch."""
    for density in sizes.densities:
        progress(f"log-probs, density {density:g}")
        yield from _density(sizes, density, rounds, device)


def _density(sizes: Sizes, density: float, rounds: int, device: torch.device) -> RowGroups:
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    problem = make(sizes, density, device)
    case = f"logprobs density {density:g}, {problem.layout.num_tokens} rows"
    ours = [(name, _PACKED, "<= 1" if name == _OURS else None) for name in _ALL_OURS]
    report = _errors(case, problem, sizes.sample)
    for part, of in gradient_errors(problem).items():
        report += [Row(case, f"error of the gradient, {part}, {name}", 100 * error, "%") for name, error in of.items()]
    yield report
    for step, wrapped in (("forward", without_graph), ("forward + backward", with_backward)):
        runs = {name: wrapped(work, problem) for name, work in WORKS.items()}
        yield timed(f"{case}, {step}", runs, rounds, device, ours, before=held)[0]


# -------------------------------------------------------------------- the problem and the works


def make(sizes: Sizes, density: float, device: torch.device) -> Problem:
    """Rows as even as they can be, real at their beginning; hidden ~ N(0, 1), weight ~ N(0, 1 / H)."""
    random = torch.Generator(device).manual_seed(0)
    total = int(density * sizes.rows * sizes.width)
    lengths = [total // sizes.rows + (row < total % sizes.rows) for row in range(sizes.rows)]
    shape = (sizes.rows, sizes.width, sizes.hidden)
    hidden = torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)
    weight = torch.randn(sizes.vocabulary, sizes.hidden, generator=random, device=device, dtype=torch.bfloat16)
    return Problem(
        RowLayout.from_lengths(lengths, sizes.width, device=device),
        hidden.requires_grad_(),
        weight.mul_(sizes.hidden**-0.5).requires_grad_(),
        torch.randint(sizes.vocabulary, (total,), generator=random, device=device),
        torch.randn(total, generator=random, device=device),
    )


def ours(problem: Problem, keep: int | None = None) -> Tensor:
    return packed_log_probs(ops.pack(problem.hidden, problem.layout), problem.weight, problem.ids, keep=keep)


WORKS: dict[str, Callable[[Problem], Tensor]] = {
    _FULL: lambda own: rivals.full(own.hidden, own.weight, own.ids, own.layout),
    _PACKED: lambda own: rivals.packed(own.hidden, own.weight, own.ids, own.layout),
    _OURS: ours,
    _NONE_KEPT: functools.partial(ours, keep=0),
    _ALL_KEPT: functools.partial(ours, keep=1 << 50),
}


def without_graph(work: Callable[[Problem], Tensor], problem: Problem) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return work(problem)

    return run


def with_backward(work: Callable[[Problem], Tensor], problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        log_probs = work(problem)
        return torch.autograd.grad(log_probs, (problem.hidden, problem.weight), problem.slopes.to(log_probs.dtype))

    return run


# -------------------------------------------------------------------- error


@torch.no_grad()
def _errors(case: str, problem: Problem, sample: int) -> list[Row]:
    chosen, truth = true_log_probs(problem, sample)
    errors = {name: float((work(problem)[chosen] - truth).abs().max()) for name, work in WORKS.items()}
    if not errors[_OURS] <= errors[_PACKED]:
        raise NotExact(
            f"logprobs: ours is {errors[_OURS]:.2g} off the truth; plain torch is {errors[_PACKED]:.2g} off."
        )
    return [Row(case, f"largest error, {name}", error, "nats") for name, error in errors.items()]


@torch.no_grad()
def true_log_probs(problem: Problem, sample: int) -> tuple[Tensor, Tensor]:
    """So many tokens, and their log-probs in float64."""
    total = problem.layout.num_tokens
    chosen = torch.linspace(0, total - 1, min(sample, total), device=problem.ids.device).long()
    hidden = ops.pack(problem.hidden, problem.layout)[chosen].double()
    logits = torch.cat([hidden @ part.double().T for part in problem.weight.split(_SLICE)], 1)
    return chosen, logits.log_softmax(1).gather(1, problem.ids[chosen].unsqueeze(1)).squeeze(1)


def with_sure_tokens(problem: Problem) -> Problem:
    """The same problem, but for hidden states that give some tokens the logits of `_SURE`."""
    with torch.no_grad():
        hidden, own = ops.pack(problem.hidden, problem.layout).float(), problem.weight[problem.ids].float()
        number = torch.arange(len(own), device=own.device)
        for logit, place in _SURE.items():
            missing = (logit - (hidden * own).sum(1)) / own.square().sum(1)
            hidden += torch.where(number % 7 == place, missing, 0.0).unsqueeze(1) * own
        padded = ops.unpack(hidden.to(problem.hidden.dtype), problem.layout)
    return replace(problem, hidden=padded.requires_grad_())


def gradient_errors(problem: Problem) -> dict[str, dict[str, float]]:
    """As `errors_of_gradients`. Raises NotExact if those of ours are larger than those of plain torch."""
    found = errors_of_gradients(problem, WORKS)
    for part, of in found.items():
        for name in _ALL_OURS:
            if not of[name] <= 1.05 * of[_PACKED]:
                raise NotExact(
                    f"logprobs: the gradient of {name} is {of[name]:.2g} off the truth ({part}); that of plain torch "
                    f"is {of[_PACKED]:.2g} off."
                )
    return found


def errors_of_gradients(
    problem: Problem, works: Mapping[str, Callable[[Problem], Tensor]]
) -> dict[str, dict[str, float]]:
    """Relative errors against float64 of each work's gradients: of hidden, also of the sure tokens alone, and of the
    weight."""
    problem = with_sure_tokens(problem)
    truth_of_hidden, truth_of_weight = _gradients(problem)
    number = torch.arange(len(truth_of_hidden), device=problem.ids.device)
    parts = {_ALL: number >= 0} | {f"{_ALL} of tokens with logit {at}": number % 7 == n for at, n in _SURE.items()}
    found: dict[str, dict[str, float]] = {part: {} for part in (*parts, _WEIGHT)}
    for name, work in works.items():
        of_hidden, of_weight = with_backward(work, problem)()
        of_hidden = ops.pack(of_hidden, problem.layout)
        for part, rows in parts.items():
            found[part][name] = _relative(of_hidden[rows], truth_of_hidden[rows])
        found[_WEIGHT][name] = _relative(of_weight, truth_of_weight)
        del of_hidden, of_weight
    return found


@torch.no_grad()
def _gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """Of packed hidden and of the weight, in float64: [T, H] and [V, H]."""
    hidden, ids = ops.pack(problem.hidden, problem.layout).double(), problem.ids
    parts = problem.weight.split(max(1, _TRUTH // max(len(ids), 1)))
    lse = torch.full((len(ids),), -torch.inf, dtype=torch.float64, device=ids.device)
    for part in parts:
        lse = torch.logaddexp(lse, (hidden @ part.double().T).logsumexp(1))
    of_hidden, of_weight, first = torch.zeros_like(hidden), [], 0
    for part in parts:
        wide = part.double()
        grad = (hidden @ wide.T).sub_(lse.unsqueeze(1)).exp_().neg_()
        row = ((ids >= first) & (ids < first + len(part))).nonzero().squeeze(1)
        grad[row, ids[row] - first] += 1
        grad.mul_(problem.slopes.double().unsqueeze(1))
        of_hidden += grad @ wide
        of_weight.append(grad.T @ hidden)
        first += len(part)
    return of_hidden, torch.cat(of_weight)


def _relative(seen: Tensor, truth: Tensor) -> float:
    return float((seen.double() - truth).norm() / truth.norm())
