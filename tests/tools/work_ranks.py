"""What ranks do in the tests of plans over several processes, and what must be true of it.

    rows of each rank -> plans -> micro-batches, a collective in each -> gradient of each update    here
    rows of all ranks, on one process ---------------------------------> gradient of each update    unsplit.py

Each function runs in all ranks of a group (ranks.py); the `check_` functions look at what they gave.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import PATIENCE
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from unsplit import MODES, Batch, Gradient, Model, Rows, batch_of, distance, flat, unsplit_gradient

from maskpack.planning import MicroBatchPlan, PlanOptions, agree_on_count, plan_micro_batches


def plan_of(batch: Batch, rows: Rows) -> MicroBatchPlan:
    """That of a rank which knows its own rows only."""
    lengths = [batch.lengths[row] for row in rows]
    return plan_micro_batches(lengths, loss_tokens=[batch.loss_tokens[row] for row in rows], **batch.planned)


# -------------------------------------------------------------------- gradients of micro-batches


def micro_batch_gradients(
    model: nn.Module,
    part: TensorDict,
    plan: MicroBatchPlan,
    weights: Sequence[np.ndarray],
    collected: Callable[[], Gradient],
) -> list[Gradient]:
    """Of each update: `collected` after all micro-batches of it ran, dummies too."""
    out = []
    of_each = iter(weights)
    for update in range(len(plan.updates)):
        model.zero_grad()
        for rows in plan.apply(part, update):
            width = max([1, *rows["length"].tolist()])
            token_loss = model(rows["ids"][:, :width])
            weight = torch.from_numpy(next(of_each)).to(token_loss.device)
            (weight * (token_loss * rows["mask"][:, :width]).sum(-1)).sum().backward()
        out.append(collected())
    return out


@dataclass(frozen=True)
class Trained:
    """What a rank saw: the gradient of each update; rows, counts and dummies of its plan."""

    gradients: list[Gradient]
    updates: list[Rows]
    counts: list[int]
    dummies: list[int]


def _trained(plan: MicroBatchPlan, rows: Rows, gradients: list[Gradient]) -> Trained:
    real = zip(plan.updates, plan.dummies, strict=True)
    own = [[rows[row] for part in update[: len(update) - dummies] for row in part] for update, dummies in real]
    return Trained(gradients, own, plan.counts, plan.dummies)


# -------------------------------------------------------------------- failures


@dataclass(frozen=True)
class Attempt:
    """One call of agree_on_count on a rank: its error, or what came of it; how long it took."""

    error: str
    message: str
    seconds: float
    counts: list[int] | None = None
    dummies: list[int] | None = None
    weights: list[list[float]] | None = None


def attempt(plan: Any, group: dist.ProcessGroup | None = None) -> Attempt:
    dist.barrier(group)
    begin = time.monotonic()
    try:
        got = agree_on_count(plan, group)
    except Exception as error:
        return Attempt(type(error).__name__, str(error), time.monotonic() - begin)
    seconds = time.monotonic() - begin
    weights = [own.tolist() for own in got.loss_weights("token-mean")] if got.loss else None
    return Attempt("", "", seconds, got.counts, got.dummies, weights)


LENGTHS = (4, 3, 2, 5, 1)


def _plan(rows: int = 5, budget: int = 5, *, loss: bool = False, **options: Any) -> MicroBatchPlan:
    tokens = LENGTHS[:rows] if loss else None
    return plan_micro_batches(LENGTHS[:rows], budget, loss_tokens=tokens, options=PlanOptions(**options))


def _without_mask(rank: int) -> Any:
    if rank == 1:
        raise KeyError("attention_mask")
    return _plan()


def _without_lengths(rank: int) -> Any:
    return plan_micro_batches(None if rank in (0, 3) else LENGTHS, 5)


PLANS: dict[str, Callable[[int], Any]] = {
    "alike": lambda rank: _plan(),
    "a function": lambda rank: _plan,
    "no plan": lambda rank: None if rank == 2 else _plan(),
    "a function without plan": lambda rank: (lambda: None) if rank == 2 else _plan,
    "neither plan nor function": lambda rank: [[0, 1]] if rank == 0 else _plan(),
    "a function raises": lambda rank: lambda: _without_mask(rank),
    "two ranks without lengths": lambda rank: lambda: _without_lengths(rank),
    "fewer rows than micro-batches": lambda rank: _plan(rank + 1, loss=True).with_count([2, 2, 3, 3][rank]),
    "no rows on one": lambda rank: _plan(0 if rank == 3 else 5, loss=True),
    "no rows at all": lambda rank: _plan(0, loss=True, num_updates=2),
    "other updates": lambda rank: _plan(num_updates=2 if rank == 0 else 1),
    "too many updates": lambda rank: _plan(num_updates=257 if rank == 1 else 256),
    "as many updates as can be": lambda rank: _plan(num_updates=256),
    "other multiple": lambda rank: _plan(multiple_of=2 if rank == 3 else 1),
    "other budget": lambda rank: _plan(budget=5 + 10 * rank),
    "loss tokens on some": lambda rank: _plan(loss=rank in (1, 2)),
}
"""What each rank gives to agree_on_count."""


def attempt_all() -> dict[str, Attempt]:
    """Each of PLANS, one after the other in one group: none leaves it unusable."""
    return {name: attempt(plan(dist.get_rank())) for name, plan in PLANS.items()}


def attempt_in_groups() -> dict[str, Attempt]:
    """Ranks 0 and 2 agree, and 1 and 3 at the same time; then 1 and 3 do not, and nobody else calls."""
    rank = dist.get_rank()
    even, odd = (dist.new_group(ranks, timeout=PATIENCE) for ranks in ([0, 2], [1, 3]))
    out = {"agreed": attempt(_plan(rank + 1, loss=True), odd if rank % 2 else even)}
    if rank % 2:
        out["failed"] = attempt(None if rank == 3 else _plan(), odd)
    return out


def do_all() -> tuple[dict[str, Attempt], dict[str, Attempt]]:
    return attempt_all(), attempt_in_groups()


# -------------------------------------------------------------------- rounds of fully sharded training


@dataclass(frozen=True)
class Round:
    """Rows of two ranks, the mode of the loss, and the rank whose input is bad, if any, with what is wrong there."""

    batch: Batch
    mode: str
    bad: int | None
    fault: str

    @property
    def again(self) -> bool:
        """Whether ranks agree once more, which changes nothing."""
        return self.mode == MODES[1]

    def plan(self, rank: int) -> Any:
        """What the rank gives to agree_on_count."""
        if rank != self.bad:
            return lambda: plan_of(self.batch, self.batch.rows[rank])
        faults = {
            "no plan": None,
            "no lengths": lambda: plan_micro_batches(None, 8),
        }
        return faults[self.fault]


def round_of(number: int) -> Round:
    """In every fourth one rank has one row or none; in every fifth one has bad input."""
    rng = random.Random(number)
    counts = [rng.randint(1, 10), rng.randint(1, 10)]
    if number % 4 == 1:
        counts[number % 8 // 4] = number // 8 % 2
    bad = number // 5 % 2 if number % 5 == 2 else None
    fault = ("no plan", "no lengths")[number // 10 % 2]
    budget, updates = rng.randint(4, 40), rng.randint(1, 2)
    options = PlanOptions(rng.choice(["tokens", "padded"]), updates, rng.choice([1, 1, 2]))
    planned = {"token_budget": budget, "options": options}
    return Round(batch_of(number, counts, planned, floats=number % 2 == 0), MODES[number % 3], bad, fault)


@dataclass(frozen=True)
class Ran:
    """A round on a rank: its error, or the counts of all ranks and what it trained."""

    error: str
    message: str
    counts: list[list[int]] | None = None
    trained: Trained | None = None


def run_rounds(device_type: str, numbers: Sequence[int]) -> list[Ran]:
    """FSDP2: each linear layer is gathered and its gradient scattered in each micro-batch, so counts must be equal."""
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    warnings.filterwarnings("ignore", ".*returned a view tensor.*")  # nothing here works in place
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    model = Model().to(device)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return [_run_round(round_of(number), rank, model, device) for number in numbers]


def _run_round(own: Round, rank: int, model: nn.Module, device: torch.device) -> Ran:
    try:
        plan = agree_on_count(own.plan(rank))
        plan = agree_on_count(plan) if own.again else plan
    except Exception as error:
        return Ran(type(error).__name__, str(error))
    counts = _gathered(plan.counts, device)
    if counts[1:] != counts[:-1]:
        raise AssertionError(f"counts of the ranks are {counts}")  # running them would hang

    def collected() -> Gradient:
        return flat([None if p.grad is None else p.grad.full_tensor() for p in model.parameters()], model)

    rows = own.batch.rows[rank]
    weights = plan.loss_weights(own.mode)
    gradients = micro_batch_gradients(model, own.batch.padded(rows, device), plan, weights, collected)
    return Ran("", "", counts, _trained(plan, rows, gradients))


def check_counts(rounds: list[list[Ran]]) -> None:
    """Equal on both ranks; some rounds have dummies on the one, some on the other."""
    with_dummies = set()
    for of_ranks in zip(*rounds, strict=True):
        if of_ranks[0].trained is not None:
            trained = [own.trained for own in of_ranks]
            assert of_ranks[0].counts == of_ranks[1].counts == [own.counts for own in trained]
            with_dummies |= {rank for rank, own in enumerate(trained) if any(own.dummies)}
    assert with_dummies == {0, 1}


def check_failures(rounds: list[list[Ran]]) -> None:
    """Where a rank has bad input both raise, and the other learns which; elsewhere nothing is raised."""
    faults = set()
    for number, of_ranks in enumerate(zip(*rounds, strict=True)):
        own = round_of(number)
        if own.bad is None:
            assert [ran.error for ran in of_ranks] == ["", ""], of_ranks
            continue
        faults.add((own.bad, own.fault))
        bad, good = of_ranks[own.bad], of_ranks[1 - own.bad]
        assert (bad.error, good.error) == ("PlanError", "PlanError")
        assert f"agree_on_count: ranks [{own.bad}] have no " in good.message
        assert bad.message.startswith("plan_micro_batches: lengths ") or bad.message == good.message
        assert (bad.message == good.message) == (own.fault != "no lengths")
    assert len(faults) == 4


def check_gradients(rounds: list[list[Ran]]) -> None:
    """Those of the whole update at once, in float64."""
    for number, of_ranks in enumerate(zip(*rounds, strict=True)):
        if of_ranks[0].trained is None:
            continue
        own = round_of(number)
        trained = [ran.trained for ran in of_ranks]
        for update, parts in enumerate(zip(*(mine.updates for mine in trained), strict=True)):
            truth = unsplit_gradient(own.batch, parts[0] + parts[1], own.mode)
            for mine in trained:
                assert distance(mine.gradients[update], truth) <= 1e-12, (number, update)


def _gathered(counts: list[int], device: torch.device) -> list[list[int]]:
    own = torch.tensor(counts, device=device)
    out = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(out, own)
    return [part.tolist() for part in out]
