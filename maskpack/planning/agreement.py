"""agree_on_count: ranks that plan by themselves agree on their counts, or all raise.

    rank 0   3 micro-batches                                      4
    rank 1   4 micro-batches   -- one all-reduce, fixed size -->  4, and the loss denominators of all ranks
    rank 2   bad input                                            every rank raises, and names rank 2

A rank that does not call blocks the others, as with any collective. A rank that calls with an error does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from maskpack.core.ranks import gathered
from maskpack.errors import PlanError
from maskpack.planning.costs import FloatArray, IntArray
from maskpack.planning.loss_weights import Loss
from maskpack.planning.plan import MicroBatchPlan

_CALL = "agree_on_count"
_MOST_UPDATES = 256
"""The largest number of updates. Messages have one size on all ranks, whatever they planned."""
_HEAD = 4  # whether there is a plan, its updates, multiple_of, whether it knows loss tokens


def agree_on_count(
    plan: MicroBatchPlan | Callable[[], MicroBatchPlan], process_group: dist.ProcessGroup | None = None
) -> MicroBatchPlan:
    """Extends the plan of this rank so that all ranks have the same number of micro-batches in each update.

    That number is the largest of all ranks. The loss weights of the result count the rows of all ranks.

    Args:
        plan: the plan of this rank; a function that returns it, whose errors then reach all ranks; or None.
        process_group: the DP ranks, all of which must call; the default group if None.

    One collective: an all-reduce of 6 KB for each rank, on the device of the group.

    Raises:
        PlanError: on all ranks, if one has no plan, or if they differ in the number of updates, in `multiple_of`, or in
            having loss tokens. A rank whose function raised gets that error instead. Ranks are numbered as in the
            default group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            f"{_CALL}: torch.distributed is not initialised in this process; expected the process group of the "
            "data-parallel ranks. Call init_process_group first; a single process does not need to agree."
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise PlanError(
            f"{_CALL}: process_group is {process_group!r:.80}; expected a group that this rank is in. Pass what "
            "torch.distributed.new_group returned on its ranks."
        )
    local: Any = None
    try:
        local = plan if isinstance(plan, MicroBatchPlan) or plan is None else plan()
    except Exception:
        _gathered(_message(None), process_group)  # tells the other ranks
        raise
    messages = _gathered(_message(local), process_group)
    _check(messages, np.array(dist.get_process_group_ranks(process_group)))
    assert isinstance(local, MicroBatchPlan)
    updates = len(local.updates)
    counts, rows, tokens = (messages[:, _HEAD + part * _MOST_UPDATES :][:, :updates] for part in range(3))
    local = local.with_count(counts.max(0).astype(np.int64).tolist())
    if local.loss is None:
        return local
    totals = (tuple(part.sum(0).tolist()) for part in (rows, tokens))
    return replace(local, loss=Loss(local.loss.tokens, *totals, ranks=messages.shape[0]))


def _message(plan: Any) -> FloatArray:
    """The message of a plan, float64 [4 + 3 * 256]; zeros without a valid plan."""
    out = np.zeros(_HEAD + 3 * _MOST_UPDATES)
    if isinstance(plan, MicroBatchPlan) and len(plan.updates) <= _MOST_UPDATES:
        parts: list[Any] = [plan.counts]
        if plan.loss is not None:
            loss = Loss.of(plan.loss.tokens, _rows(plan))  # rows of this rank, even if agreed on before
            parts += [loss.rows_of, loss.tokens_of]
        out[:_HEAD] = 1, len(plan.updates), plan.multiple_of, plan.loss is not None
        for part, values in enumerate(parts):
            out[_HEAD + part * _MOST_UPDATES :][: len(values)] = values
    return out


def _rows(plan: MicroBatchPlan) -> list[list[int]]:
    """The rows of each update, without dummies."""
    updates = zip(plan.updates, plan.dummies, strict=True)
    return [[row for rows in update[: len(update) - dummies] for row in rows] for update, dummies in updates]


def _gathered(message: FloatArray, group: dist.ProcessGroup | None) -> FloatArray:
    return gathered(torch.from_numpy(message), group).numpy()


def _check(messages: FloatArray, ranks: IntArray) -> None:
    without = messages[:, 0] == 0
    if without.any():
        raise PlanError(
            f"{_CALL}: ranks {ranks[without].tolist()} have no plan of at most {_MOST_UPDATES} updates; "
            "expected one on every rank. Look for the error on these ranks."
        )
    for at, what in ((1, "num_updates"), (2, "multiple_of"), (3, "loss_tokens given")):
        if len(set(messages[:, at].tolist())) > 1:
            raise PlanError(
                f"{_CALL}: {what} is {messages[:, at].astype(np.int64).tolist()} on ranks {ranks.tolist()}; expected "
                "the same on all. Use the same options on every rank."
            )
