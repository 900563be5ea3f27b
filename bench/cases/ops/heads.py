"""Log-probs of packed hidden states beside the output layers of others: time, memory and errors.

    ours                    packed_log_probs, which keeps as many bytes as the weight has
    ours, nothing kept      the same with keep=0
    ours, all kept          the same with a budget for the distributions of all tokens
    all logits, ...         log_softmax and gather; flash-attn's Triton cross entropy, which writes the gradient over
                            the bfloat16 logits
    others                  kernels of verl, Liger and cut-cross-entropy, which make no logits (`bench.rivals.heads`)

Those that this machine does not have, or that fail, are named on stderr and have a row "missing". The backward pass
ends with the gradients of hidden [T, H] and of the weight. The error of a log-prob is the largest against float64 on a
sample of tokens. The error of a gradient is |seen - truth| / |truth|, of a problem of the same size where one token in
seven has a logit of 12 and another a logit of 20, as tokens have of which a policy is sure.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.harness.measure import NotExact, progress
from bench.harness.passes import timed
from bench.harness.report import Row, RowGroups
from bench.rivals import heads
from maskpack.ops import packed_log_probs

OURS = "ours"
_OURS = {OURS: None, f"{OURS}, nothing kept": 0, f"{OURS}, all kept": 1 << 50}
_SLICE = 8192  # tokens of the vocabulary that are cast to float64 at once
_TRUTH = 1 << 27  # float64 logits at once
_SURE = {12: 0, 20: 3}  # logits, and the place in seven tokens of those that have them


@dataclass(frozen=True)
class Sizes:
    """H and V of the output layers, and the tokens that each is measured on, of which a sample is compared."""

    layers: Sequence[tuple[int, int]] = ((4096, 131_072), (2560, 151_936))
    tokens: Sequence[int] = (9_830, 32_768)
    sample: int = 512


@dataclass(frozen=True)
class Problem:
    """hidden [T, H] and weight [V, H], bfloat16 leaves that want gradients; ids and slopes (float32), [T]."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    slopes: Tensor

    @classmethod
    def of(cls, tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Problem:
        """hidden ~ N(0, 1), weight ~ N(0, 1 / H)."""
        random = torch.Generator(device).manual_seed(0)
        states, weight = (
            torch.randn(count, hidden, generator=random, device=device, dtype=torch.bfloat16)
            for count in (tokens, vocabulary)
        )
        return cls(
            states.requires_grad_(),
            weight.mul_(hidden**-0.5).requires_grad_(),
            torch.randint(vocabulary, (tokens,), generator=random, device=device),
            torch.randn(tokens, generator=random, device=device),
        )

    def log_probs(self, head: heads.Head) -> Tensor:
        with torch.no_grad():
            return head(self.hidden, self.weight, self.ids)

    def gradients(self, head: heads.Head) -> tuple[Tensor, ...]:
        log_probs = head(self.hidden, self.weight, self.ids)
        return torch.autograd.grad(log_probs, (self.hidden, self.weight), self.slopes.to(log_probs.dtype))


def rows(sizes: Sizes, device: torch.device, rounds: int) -> RowGroups:
    """The rows of the report. Raises NotExact if ours is further from the truth than plain torch."""
    for hidden, vocabulary in sizes.layers:
        for tokens in sizes.tokens:
            case = f"heads, V = {vocabulary:,}, H = {hidden:,}, {tokens:,} tokens"
            progress(case)
            yield from _of(case, Problem.of(tokens, hidden, vocabulary, device), sizes.sample, rounds)
            gc.collect()


def _of(case: str, problem: Problem, sample: int, rounds: int) -> RowGroups:
    device = problem.ids.device
    found, missing = heads.importable(heads.ALL, device)
    works: dict[str, heads.Head] = {name: partial(packed_log_probs, keep=keep) for name, keep in _OURS.items()} | found
    chosen, truth = _true_log_probs(problem, sample)
    off: dict[str, float] = {}
    for name, work in list(works.items()):
        try:
            off[name] = float((problem.log_probs(work)[chosen] - truth).abs().max())
            problem.gradients(work)
        except Exception as error:
            if name.startswith(OURS):
                raise
            missing[name] = f"{type(error).__name__}: {str(error)[:300]}"
            off.pop(name, None)
            del works[name]
    for name, reason in missing.items():
        progress(f"missing, {name}: {reason}")
    _require(f"{case}, log-probs", off, 1)
    report = [Row(case, f"largest error, {name}", error, "nats") for name, error in off.items()]
    for part, of in _errors_of_gradients(problem, works).items():
        _require(f"{case}, gradient of {part}", of, 1.05)
        report += [Row(case, f"error of the gradient, {part}, {name}", 100 * error, "%") for name, error in of.items()]
    yield [*report, *(Row(case, f"missing, {name}", 1, "rivals") for name in missing)]
    steps: dict[str, Callable[[heads.Head], object]] = {
        "forward": problem.log_probs,
        "forward + backward": problem.gradients,
    }
    for step, run in steps.items():
        runs = {name: partial(run, work) for name, work in works.items()}
        yield timed(f"{case}, {step}", runs, rounds, device, (), ours=[*_OURS], above_held=True)


def _require(what: str, off: Mapping[str, float], slack: float) -> None:
    for name in _OURS:
        if not off[name] <= slack * off[heads.PLAIN]:
            raise NotExact(
                f"{what}: {name} is {off[name]:.2g} off the truth; plain torch is {off[heads.PLAIN]:.2g} off."
            )


@torch.no_grad()
def _true_log_probs(problem: Problem, sample: int) -> tuple[Tensor, Tensor]:
    """So many tokens, and their log-probs in float64."""
    total = len(problem.ids)
    chosen = torch.linspace(0, total - 1, min(sample, total), device=problem.ids.device).long()
    hidden = problem.hidden[chosen].double()
    logits = torch.cat([hidden @ part.double().T for part in problem.weight.split(_SLICE)], 1)
    return chosen, logits.log_softmax(1).gather(1, problem.ids[chosen].unsqueeze(1)).squeeze(1)


@torch.no_grad()
def _with_sure_tokens(problem: Problem) -> Problem:
    """The same problem, but for hidden states that give some tokens the logits of `_SURE`."""
    hidden, own = problem.hidden.float(), problem.weight[problem.ids].float()
    number = torch.arange(len(own), device=own.device)
    for logit, place in _SURE.items():
        missing = (logit - (hidden * own).sum(1)) / own.square().sum(1)
        hidden += torch.where(number % 7 == place, missing, 0.0).unsqueeze(1) * own
    return replace(problem, hidden=hidden.to(problem.hidden.dtype).requires_grad_())


def _errors_of_gradients(problem: Problem, works: Mapping[str, heads.Head]) -> dict[str, dict[str, float]]:
    """Relative errors against float64 of each work's gradients: of hidden, also of the sure tokens alone, and of the
    weight."""
    problem = _with_sure_tokens(problem)
    truth = _true_gradients(problem)
    number = torch.arange(len(problem.ids), device=problem.ids.device)
    parts = {"hidden": number >= 0} | {f"hidden of tokens with logit {at}": number % 7 == n for at, n in _SURE.items()}
    found: dict[str, dict[str, float]] = {part: {} for part in (*parts, "weight")}
    for name, work in works.items():
        of_hidden, of_weight = problem.gradients(work)
        for part, rows in parts.items():
            found[part][name] = _relative(of_hidden[rows], truth[0][rows])
        found["weight"][name] = _relative(of_weight, truth[1])
        del of_hidden, of_weight
    return found


@torch.no_grad()
def _true_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """Of hidden and of the weight, in float64: [T, H] and [V, H]."""
    hidden, ids = problem.hidden.double(), problem.ids
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
