"""Micro-batches by token budget: lengths in, row indices out. No torch, no data.

    rows     0 1 2 3   4 5 6 7        two updates, token_budget 12
    lengths  5 9 2 7   8 1 6 4
    updates  [0 3] [1 2]   [4 7] [5 6]

A MicroBatchPlan holds:
- every row once, apart from dummies;
- no micro-batch over the budget, apart from single rows (or groups) that are over it, which are alone and reported;
- the counts that were asked for: at least `min_count`, a multiple of `multiple_of`, exactly K after `with_count(K)`;
- groups whole, updates of the rows in the order given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from typing import Any, Literal

import numpy as np

from maskpack.core.arguments import said
from maskpack.errors import PlanError
from maskpack.planning.budget import CALL, Budget, Ground, Oversize
from maskpack.planning.costs import (
    MOST,
    Cost,
    FloatArray,
    IntArray,
    RowCost,
    Units,
    checked_amounts,
    checked_lengths,
    whole_number,
)
from maskpack.planning.loss_weights import MODES, Loss, LossMode


def plan_micro_batches(
    lengths: Any,
    token_budget: float | None,
    *,
    cost: Cost = "tokens",
    num_updates: int = 1,
    groups: Any = None,
    multiple_of: int = 1,
    min_count: int | None = None,
    max_rows: int | None = None,
    oversize: Oversize = "alone",
    work: RowCost | None = None,
    loss_tokens: Any = None,
) -> MicroBatchPlan:
    """Rows into micro-batches, as few as best fit finds, for each optimizer update.

    Args:
        lengths: [B], real tokens of each row, prompt plus response; whole numbers on the host.
        token_budget: the most that a micro-batch may cost; a whole number of tokens, any number for a cost of your own.
            None: micro-batches of `max_rows` rows in the order given.
        cost: "tokens", the sum of the real tokens (packed replay); "padded", rows times the longest, where rows are
            padded on one side; or a function of lengths int64 [B] that gives costs [B], which add up. Its numbers and
            the budget's have one unit.
        num_updates: optimizer updates; consecutive parts of the rows, as equal as groups allow. One without rows has no
            micro-batches.
        groups: [B], labels; rows of one label stay in one micro-batch.
        multiple_of: the micro-batches of an update are a multiple of it (pipeline stages).
        min_count: the least micro-batches of an update.
        max_rows: the most rows of a micro-batch.
        oversize: a row (a group) that alone is over the budget or over `max_rows` is "alone" in its micro-batch and
            listed in `plan.oversized`, or an "error".
        work: [B] -> [B], such as a FlopsModel: micro-batches of an update are evened out by it, within the budget and
            without another one.
        loss_tokens: [B], the sum of the loss mask of each row, for `plan.loss_weights`.

    Micro-batches of an update are sorted, the one with the most work (cost) first; the count-based plan is not.

    Raises:
        PlanError: arguments that are none of these, or with oversize="error" the rows that are too large.
    """
    rule = Budget(token_budget, cost, num_updates, multiple_of, min_count, max_rows, oversize, work)
    return planned(rule, checked_lengths(lengths, CALL), groups, loss_tokens)


def planned(rule: Budget, lengths: IntArray, groups: Any = None, loss_tokens: Any = None) -> MicroBatchPlan:
    """The plan of these rows."""
    ground = Ground.of(rule, lengths, Units.of(lengths.size, groups, CALL))
    oversized = oversized_rows(rule, ground)
    parts = ground.updates()
    loss = None
    if loss_tokens is not None:
        meaning = "the sum of each row's loss mask"
        tokens = checked_amounts(loss_tokens, lengths.size, CALL, "loss_tokens", meaning)
        loss = Loss.of(tokens, [ground.units.members(part) for part in parts])
    bins = [ground.packed(part) for part in parts]
    counts = [-(-max(len(own), rule.min_count or 0) // rule.multiple_of) * rule.multiple_of for own in bins]
    counts = [count if part else 0 for count, part in zip(counts, parts, strict=True)]
    return _made(bins, counts, ground, oversized, loss)


def oversized_rows(rule: Budget, ground: Ground) -> list[int]:
    """Rows that alone, or in their group, are over the budget or `max_rows`; an error if the rule says so."""
    rows = sorted(ground.units.members(ground.too_large()))
    if rows and rule.oversize == "error":
        raise PlanError(
            f"{CALL}: rows {rows[:8]} alone, or their groups, are over token_budget {rule.token_budget} or max_rows "
            f'{rule.max_rows}; expected less. Raise these, cut the rows, or pass oversize="alone".'
        )
    return rows


def _made(
    bins: list[list[list[int]]], counts: Sequence[int], ground: Ground, oversized: list[int], loss: Loss | None
) -> MicroBatchPlan:
    """The plan with so many micro-batches in each update, out of bins that are no more."""
    bins = [ground.finished(ground.split(own, count)) for own, count in zip(bins, counts, strict=True)]
    updates = [[sorted(ground.units.members(items)) for items in own] for own in bins]
    dummies = [count - len(own) for count, own in zip(counts, bins, strict=True)]
    if any(dummies):
        lengths = ground.lengths
        shortest = int(np.argmin(np.where(lengths > 0, lengths, lengths.max() + 1)))  # an empty row if all are empty
        updates = [own + [[shortest]] * count for own, count in zip(updates, dummies, strict=True)]
    return MicroBatchPlan(updates, dummies, ground.lengths, oversized, loss, ground, bins)


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Rows of a batch in micro-batches, by optimizer update.

    Attributes:
        updates: a list of updates, each a list of micro-batches, each a list of row indices.
        dummies: for each update, how many of its last micro-batches are dummies: they run for the collectives in them,
            their weights are zero and their outputs are dropped.
        lengths: int64 [B], real tokens of each row.
        oversized: rows of micro-batches that are over the budget or `max_rows`, because one row (group) alone is.
        loss: what `loss_weights` divides by, if `loss_tokens` were given.
    """

    updates: list[list[list[int]]]
    dummies: list[int]
    lengths: IntArray
    oversized: list[int]
    loss: Loss | None
    _ground: Ground = field(repr=False)
    _bins: list[list[list[int]]] = field(repr=False)  # as updates, but units, and without dummies

    @property
    def micro_batches(self) -> list[list[int]]:
        """Those of all updates, one after the other."""
        return [rows for update in self.updates for rows in update]

    @cached_property
    def is_dummy(self) -> list[bool]:
        """For each of `micro_batches`."""
        return [
            at >= len(update) - dummies
            for update, dummies in zip(self.updates, self.dummies, strict=True)
            for at in range(len(update))
        ]

    @property
    def counts(self) -> list[int]:
        """Micro-batches of each update, dummies among them."""
        return [len(update) for update in self.updates]

    @property
    def num_rows(self) -> int:
        """B."""
        return self.lengths.size

    @property
    def multiple_of(self) -> int:
        """Of which the micro-batches of an update are a multiple."""
        return self._ground.multiple_of

    def with_count(self, count: int | Sequence[int]) -> MicroBatchPlan:
        """Exactly `count` micro-batches in each update, or as many as the list says for each.

        The largest are split, so none gets larger; groups stay whole. Where all hold one row (group), dummies are
        added: the shortest row of the plan that has a token, which counts nothing. Where no row has one, a dummy is an
        empty row, as are the other micro-batches: replay runs these as one token, so that all ranks run.

        Raises:
            PlanError: fewer than there are, because micro-batches are not joined; no multiple of `multiple_of`; or a
                plan without rows, which has nothing to run.
        """
        call = "MicroBatchPlan.with_count"
        several = isinstance(count, list | tuple | np.ndarray)
        given: list[Any] = list(count) if several else [count] * len(self.updates)
        if len(given) != len(self.updates):
            raise PlanError(
                f"{call}: {len(given)} counts for {len(self.updates)} updates; expected one for each. Give as many, or "
                "one number for all."
            )
        counts = [whole_number(number, 0, call, "count", MOST) for number in given]
        for update, (own, wanted) in enumerate(zip(self._bins, counts, strict=True)):
            if wanted < len(own):
                raise PlanError(
                    f"{call}: update {update} has {len(own)} micro-batches, and count is {wanted}; expected at least "
                    "as many, because they are split and never joined. Plan with a larger budget, or raise the count."
                )
            if wanted % self.multiple_of:
                raise PlanError(
                    f"{call}: count is {wanted}; expected a multiple of {self.multiple_of}, as planned. Round it up."
                )
        if any(counts) and not self.num_rows:
            raise PlanError(
                f"{call}: count is {max(counts)} for a plan without rows; expected a row to run. Give it one."
            )
        if counts == self.counts:
            return self
        return _made(self._bins, counts, self._ground, self.oversized, self.loss)

    # ---------------------------------------------------------------- rows

    def apply(self, batch: Any, update: int | None = None) -> Iterator[Any]:
        """The rows of each micro-batch, one after the other, of all updates or of one.

        Args:
            batch: B rows: a padded or nested TensorDict, a PackedBatch, a BatchView, a tensor [B, ...] or a jagged one.
            update: its number.

        Returns:
            An iterator over batches of the same kind. Jagged fields of one layout share one offsets tensor.

        Raises:
            PlanError: another number of rows, or something without rows.
        """
        chosen = self.micro_batches if update is None else self.updates[self._number(update, "MicroBatchPlan.apply")]
        return take_rows(batch, chosen, self.num_rows)

    def _number(self, update: Any, call: str) -> int:
        number = whole_number(update, 0, call, "update")
        if number >= len(self.updates):
            raise PlanError(
                f"{call}: update is {number}; the plan has {len(self.updates)}, from 0. Choose one of these."
            )
        return number

    def restore(self, outputs: Iterable[Any], *, lengths: Any = None) -> Any:
        """What the micro-batches gave, as one, in the order of the rows; outputs of dummies are dropped.

        Args:
            outputs: one for each of `micro_batches`: tensors with an entry for each row, padded [b, ...] to one width,
                or jagged; TensorDicts, PackedBatches or BatchViews; lists with an item for each row. With `lengths`:
                packed tensors [t, ...].
            lengths: [B], the tokens of each row in packed outputs: `plan.lengths` where every token has one.

        Raises:
            PlanError: outputs of other numbers, or that do not fit each other.
        """
        call = "MicroBatchPlan.restore"
        if not isinstance(outputs, Iterable) or isinstance(outputs, str | bytes):
            raise PlanError(f"{call}: outputs are {said(outputs)}; expected a list. Give one for each micro-batch.")
        outputs = list(outputs)
        if len(outputs) != len(self.micro_batches):
            raise PlanError(
                f"{call}: {len(outputs)} outputs for {len(self.micro_batches)} micro-batches; expected one for each, "
                "also for dummies. Keep every output."
            )
        real = [(rows, out) for rows, out, no in zip(self.micro_batches, outputs, self.is_dummy, strict=True) if not no]
        if not real:
            raise PlanError(f"{call}: no micro-batch has rows; expected at least one. There is nothing to restore.")
        tokens = None if lengths is None else checked_lengths(lengths, call)
        if tokens is not None and tokens.size != self.num_rows:
            raise PlanError(f"{call}: lengths of {tokens.size} rows; expected {self.num_rows}. Give one for each row.")
        kinds = {join_rows.dispatch(type(out)): type(out).__name__ for _, out in real}
        if len(kinds) > 1:
            raise PlanError(
                f"{call}: outputs are {sorted(kinds.values())}; expected one kind. Return the same from each."
            )
        return join_rows(real[0][1], [out for _, out in real], [rows for rows, _ in real], tokens)

    # ---------------------------------------------------------------- losses

    def loss_weights(
        self, mode: LossMode, update: int | None = None, *, gradients: Literal["mean", "sum"] = "mean"
    ) -> list[FloatArray]:
        """For each micro-batch float64 [b]: what each row's sum of token losses counts.

        The loss of a micro-batch is `(weights * (token_loss * mask).sum(-1)).sum()`. Added up over the micro-batches of
        an update and its ranks, it is the loss of the whole update at once, so nothing else divides it:

            token-mean            sum over tokens / loss tokens
            seq-mean-token-sum    sum over rows of (sum over tokens) / rows with a loss token
            seq-mean-token-mean   sum over rows of (sum over tokens / the row's loss tokens) / rows with a loss token

        Args:
            mode: one of these.
            update: its number, as for `apply`; all updates, one after the other, if None.
            gradients: what becomes of the gradients of several ranks: "mean" (DDP, FSDP) or "sum".

        Raises:
            PlanError: another mode, or a plan made without `loss_tokens`.
        """
        call = "MicroBatchPlan.loss_weights"
        if mode not in MODES:
            raise PlanError(f"{call}: mode is {said(mode)}; expected one of {', '.join(MODES)}. Choose one.")
        if gradients not in ("mean", "sum"):
            raise PlanError(f'{call}: gradients is {said(gradients)}; expected "mean" or "sum". Choose one.')
        if self.loss is None:
            raise PlanError(
                f"{call}: the plan knows no loss tokens; expected them when it is made. Pass loss_tokens, the sum of "
                "each row's loss mask."
            )
        loss = self.loss if gradients == "mean" else replace(self.loss, ranks=1)
        out: list[FloatArray] = []
        for number in range(len(self.updates)) if update is None else [self._number(update, call)]:
            weights = loss.row_weights(mode, number)
            own = self.updates[number]
            real = len(own) - self.dummies[number]
            out += [weights[rows] for rows in own[:real]] + [np.zeros(len(rows)) for rows in own[real:]]
        return out

    def loads(self) -> list[float]:
        """The work of each of `micro_batches` (its cost, if planned without work); 0 for dummies."""
        return [
            load
            for own, dummies in zip(self._bins, self.dummies, strict=True)
            for load in [*self._ground.loads(own).tolist(), *[0.0] * dummies]
        ]

    def metrics(self) -> dict[str, float]:
        """Flat, for a logger: how well the budget and the micro-batches are used. `fill` is what padding each
        micro-batch to its longest row would leave real; `imbalance` the most work of a micro-batch over the mean of its
        update, the worst of all updates."""
        used = [rows for rows, dummy in zip(self.micro_batches, self.is_dummy, strict=True) if not dummy]
        tokens = int(self.lengths.sum())
        padded = sum(len(rows) * int(self.lengths[rows].max()) for rows in used)
        loads = [self._ground.loads(own) for own in self._bins if own]
        out = {
            "plan/rows": self.num_rows,
            "plan/updates": len(self.updates),
            "plan/micro_batches": len(self.micro_batches),
            "plan/dummies": sum(self.dummies),
            "plan/oversized_rows": len(self.oversized),
            "plan/tokens": tokens,
            "plan/padding_tokens": padded - tokens,
            "plan/fill": tokens / padded if padded else 1.0,
            "plan/imbalance": max((own.max() / own.mean() for own in loads if own.any()), default=1.0),
        }
        budget = self._ground.budget
        if budget is not None:
            spent = sum(self._ground.costs(own).sum() for own in self._bins)
            out["plan/budget_use"] = spent / budget / max(len(used), 1)
        return {key: float(value) for key, value in out.items()}


# -------------------------------------------------------------------- what batches know how to do


@singledispatch
def take_rows(batch: Any, parts: Sequence[Sequence[int]], num_rows: int) -> Iterator[Any]:
    """The rows of each part. Kinds of batches register how it is done; so may a framework's own."""
    raise PlanError(
        f"MicroBatchPlan.apply: got {said(batch)}; expected a TensorDict, a PackedBatch, a BatchView or a "
        f"tensor of {num_rows} rows. Pass the batch."
    )


@singledispatch
def join_rows(first: Any, outputs: Sequence[Any], parts: Sequence[Sequence[int]], lengths: IntArray | None) -> Any:
    """The inverse: `outputs`, of which `first` is the first, as one in the order of the rows."""
    raise PlanError(
        f"MicroBatchPlan.restore: outputs are of type {type(first).__name__}; expected tensors, TensorDicts, "
        "PackedBatches, BatchViews or lists. Return one of these, and restore several things one by one."
    )
