"""Ranks that plan by themselves agree on their counts, or all raise.

    rank 0   3 micro-batches                                      4
    rank 1   4 micro-batches   -- one all-reduce, fixed size -->  4, and the loss denominators of all ranks
    rank 2   bad input                                            every rank raises, and names rank 2

A rank that does not call hangs the others, as with any collective; one that calls with something wrong does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from maskpack.errors import PlanError
from maskpack.planning.costs import FloatArray, IntArray
from maskpack.planning.loss_weights import Loss
from maskpack.planning.plan import MicroBatchPlan

_CALL = "agree_on_count"
_MOST_UPDATES = 256
"""The message has one size on all ranks, whatever they planned."""
_HEAD = 4  # whether there is a plan, its updates, multiple_of, whether it knows loss tokens


def agree_on_count(
    plan: MicroBatchPlan | Callable[[], MicroBatchPlan], process_group: dist.ProcessGroup | None = None
) -> MicroBatchPlan:
    """This rank's plan with as many micro-batches in each update as the rank with most has there, and with loss weights
    that count the rows of all ranks.

    Args:
        plan: this rank's; or a function that makes it, whose errors then reach every rank. None, where there is none.
        process_group: of the data-parallel ranks; the default group if None. All its ranks must call.

    One collective: an all-reduce of 6 KB for each rank, on the group's device.

    Raises:
        PlanError: on all ranks alike, if one of them has no plan or no row to run, if they planned different numbers of
            updates or multiples, or some with loss tokens and some without. On the rank whose function raised, the
            error is that one. Ranks are named as in the default group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            f"{_CALL}: torch.distributed is not initialised in this process; expected the process group of the "
            "data-parallel ranks. Call init_process_group first; one process alone has nobody to agree with."
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise PlanError(
            f"{_CALL}: process_group is {process_group!r:.80}; expected a group that this rank is in. Pass what "
            "torch.distributed.new_group returned on its ranks."
        )
    own: Any = None
    try:
        own = plan if isinstance(plan, MicroBatchPlan) or plan is None else plan()
    except Exception:
        _gathered(_message(None), process_group)  # the other ranks learn of it
        raise
    said = _gathered(_message(own), process_group)
    _check(said, np.array(dist.get_process_group_ranks(process_group)))
    assert isinstance(own, MicroBatchPlan)
    updates = len(own.updates)
    counts, rows, tokens = (said[:, _HEAD + part * _MOST_UPDATES :][:, :updates] for part in range(3))
    own = own.with_count(counts.max(0).astype(np.int64).tolist())
    if own.loss is None:
        return own
    totals = (tuple(part.sum(0).tolist()) for part in (rows, tokens))
    return replace(own, loss=Loss(own.loss.tokens, *totals, ranks=said.shape[0]))


def _message(plan: Any) -> FloatArray:
    """float64 [4 + 3 * 256]; all 0 for what is no plan."""
    out = np.zeros(_HEAD + 3 * _MOST_UPDATES)
    if isinstance(plan, MicroBatchPlan) and len(plan.updates) <= _MOST_UPDATES:
        parts: list[Any] = [plan.counts]
        if plan.loss is not None:
            loss = Loss.of(plan.loss.tokens, _rows(plan))  # its own rows alone, also if it was agreed on before
            parts += [loss.rows_of, loss.tokens_of]
        out[:_HEAD] = 1 + (plan.num_rows > 0), len(plan.updates), plan.multiple_of, plan.loss is not None
        for part, values in enumerate(parts):
            out[_HEAD + part * _MOST_UPDATES :][: len(values)] = values
    return out


def _rows(plan: MicroBatchPlan) -> list[list[int]]:
    """The rows of each update."""
    updates = zip(plan.updates, plan.dummies, strict=True)
    return [[row for rows in update[: len(update) - dummies] for row in rows] for update, dummies in updates]


def _gathered(message: FloatArray, group: dist.ProcessGroup | None) -> FloatArray:
    """[ranks, ...]: the messages of all ranks."""
    on_cpu = "cpu:" in dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    device = "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
    out = torch.zeros(dist.get_world_size(group), message.size, dtype=torch.float64, device="cpu")
    out[dist.get_rank(group)] = torch.from_numpy(message)
    out = out.to(device)
    dist.all_reduce(out, group=group)  # every other rank has zeros there
    return out.cpu().numpy()


def _check(said: FloatArray, ranks: IntArray) -> None:
    states = said[:, 0]
    if (states == 0).any():
        raise PlanError(
            f"{_CALL}: ranks {ranks[states == 0].tolist()} have no plan of at most {_MOST_UPDATES} updates; "
            "expected one on every rank. Look for the error on these ranks."
        )
    for at, what in ((1, "num_updates"), (2, "multiple_of"), (3, "loss_tokens given")):
        if len(set(said[:, at].tolist())) > 1:
            raise PlanError(
                f"{_CALL}: {what} is {said[:, at].astype(np.int64).tolist()} on ranks {ranks.tolist()}; expected "
                "the same on all. Plan alike on every rank."
            )
    if (states == 1).any() and said[:, _HEAD : _HEAD + _MOST_UPDATES].any():
        raise PlanError(
            f"{_CALL}: ranks {ranks[states == 1].tolist()} have no row to run, others have; expected at least "
            "one on each. Give every rank a row, of weight zero if it must be."
        )
