"""Micro-batches by token budget: lengths in, row indices out. No torch, no data.

    rows     0 1 2 3   4 5 6 7        two updates, token_budget 12
    lengths  5 9 2 7   8 1 6 4
    updates  [0 3] [1 2]   [4 7] [5 6]

Invariants of a MicroBatchPlan:
- Every row is in one micro-batch; only dummies repeat a row. Those of a plan without rows have none.
- No micro-batch exceeds the budget, except a single row (or group) that alone exceeds it. `oversized` lists such rows.
- The cost and the tree of a plan do not change which rows an update has.
- The number of micro-batches of an update is a multiple of `multiple_of`, and K after `with_count(K)`.
- Groups are not split. Updates are consecutive parts of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from maskpack.core.arguments import said, whole
from maskpack.errors import PlanError
from maskpack.planning.costs import (
    MOST,
    FloatArray,
    IntArray,
    PlanOptions,
    Units,
    checked_amounts,
    checked_lengths,
)
from maskpack.planning.loss_weights import MODES, Loss, LossMode
from maskpack.planning.packing import CALL, PackingProblem
from maskpack.planning.prefixes import checked_tree

if TYPE_CHECKING:
    from maskpack.layout.prefix_tree import PrefixTree

_DEFAULT = PlanOptions()


def plan_micro_batches(
    lengths: Any,
    token_budget: float,
    *,
    tree: PrefixTree | None = None,
    groups: Any = None,
    loss_tokens: Any = None,
    options: PlanOptions = _DEFAULT,
) -> MicroBatchPlan:
    """Groups rows into micro-batches within a token budget, as few as best fit finds, for each optimizer update.

    Args:
        lengths: integers [B] on the host, the valid tokens of each row: prompt plus response.
        token_budget: the largest cost of a micro-batch: an integer number of tokens, or any number if the cost is a
            function. A row (or group) that alone exceeds it has a micro-batch of its own, and is in `plan.oversized`.
        tree: the PrefixTree of the rows, for replay with shared prefixes: a micro-batch costs the tokens of the trie of
            its rows. Of each update, rows that share a prefix stay together. If they exceed the budget, they are cut so
            that the prefixes computed again have the fewest tokens.
        groups: labels [B]. Rows with one label stay in one micro-batch; with a tree, they do instead of rows that
            share a prefix.
        loss_tokens: [B], the sum of the loss mask of each row, for `plan.loss_weights`.
        options: what micro-batches cost, the number of updates, and more.

    The micro-batch with the most work (by default the largest cost) comes first in its update.

    Raises:
        PlanError: an argument is not one of these.
    """
    return RowsToPlan.of(CALL, lengths, token_budget, options, tree, groups, loss_tokens).planned()


@dataclass(frozen=True, eq=False)
class RowsToPlan:
    """The checked arguments of `plan_micro_batches`."""

    lengths: IntArray
    budget: float
    options: PlanOptions
    tree: PrefixTree | None
    groups: Sequence[Any] | None
    loss_tokens: FloatArray | None

    @classmethod
    def of(
        cls, call: str, lengths: Any, token_budget: Any, options: Any, tree: Any, groups: Any, loss_tokens: Any
    ) -> RowsToPlan:
        if not isinstance(options, PlanOptions):
            raise PlanError(f"{call}: options are {said(options)}; expected PlanOptions. Pass PlanOptions(...).")
        lengths = checked_lengths(lengths, call)
        budget, tree = options.budget(token_budget, call), checked_tree(tree, options, lengths, call)
        labels = None if groups is None else Units.of(lengths.size, groups, call).of_row.tolist()
        if loss_tokens is not None:
            meaning = "the sum of each row's loss mask"
            loss_tokens = checked_amounts(loss_tokens, lengths.size, call, "loss_tokens", meaning)
        return cls(lengths, budget, options, tree, labels, loss_tokens)

    def take(self, rows: list[int]) -> RowsToPlan:
        """Some of the rows, under the same options."""
        return replace(
            self,
            lengths=self.lengths[rows],
            tree=None if self.tree is None else self.tree.take(rows),
            groups=None if self.groups is None else [self.groups[row] for row in rows],
            loss_tokens=None if self.loss_tokens is None else self.loss_tokens[rows],
        )

    def planned(self) -> MicroBatchPlan:
        units = Units.of(self.lengths.size, self.groups, CALL)
        problem = PackingProblem.of(self.options, self.budget, self.lengths, units, self.tree)
        parts, step = problem.updates, self.options.multiple_of
        loss = None
        if self.loss_tokens is not None:
            loss = Loss.of(self.loss_tokens, [problem.units.members(part) for part in parts])
        bins = [problem.packed(part) for part in parts]
        counts = [-(-len(update) // step) * step for update in bins]
        oversized = sorted(problem.units.members(problem.too_large()))
        return _with_counts(bins, counts, problem, oversized, loss)


def _with_counts(
    bins: list[list[list[int]]], counts: Sequence[int], problem: PackingProblem, oversized: list[int], loss: Loss | None
) -> MicroBatchPlan:
    """A plan with `counts` micro-batches in the updates: bins are split, and dummies are added."""
    bins = [problem.in_order(problem.split(update, count)) for update, count in zip(bins, counts, strict=True)]
    updates = [[sorted(problem.units.members(items)) for items in update] for update in bins]
    dummies = [count - len(update) for count, update in zip(counts, bins, strict=True)]
    if any(dummies):
        lengths = problem.lengths  # an empty row if all are empty
        shortest = [int(np.argmin(np.where(lengths > 0, lengths, lengths.max() + 1)))] if lengths.size else []
        updates = [update + [shortest] * count for update, count in zip(updates, dummies, strict=True)]
    return MicroBatchPlan(updates, dummies, problem.lengths, oversized, loss, problem, bins)


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """The micro-batches of a batch, grouped by optimizer update.

    Attributes:
        updates: a list of updates, each a list of micro-batches, each a list of row indices.
        dummies: for each update, how many of its last micro-batches are dummies. Ranks run them for their collectives;
            their weights are zero and their outputs are dropped.
        lengths: int64 [B], valid tokens of each row.
        oversized: the rows that alone, or with their group, exceed the budget.
        loss: the denominators of `loss_weights`; None if `loss_tokens` was not given.
    """

    updates: list[list[list[int]]]
    dummies: list[int]
    lengths: IntArray
    oversized: list[int]
    loss: Loss | None
    _problem: PackingProblem = field(repr=False)
    _bins: list[list[list[int]]] = field(repr=False)  # as `updates`, with units for rows and without dummies

    @property
    def micro_batches(self) -> list[list[int]]:
        """The micro-batches of all updates, one after the other."""
        return [rows for update in self.updates for rows in update]

    @cached_property
    def is_dummy(self) -> list[bool]:
        """Whether each of `micro_batches` is a dummy."""
        return [
            at >= len(update) - dummies
            for update, dummies in zip(self.updates, self.dummies, strict=True)
            for at in range(len(update))
        ]

    @property
    def counts(self) -> list[int]:
        """The number of micro-batches of each update, dummies included."""
        return [len(update) for update in self.updates]

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return self.lengths.size

    @property
    def multiple_of(self) -> int:
        """The number of which the number of micro-batches of an update is a multiple."""
        return self._problem.multiple_of

    def with_count(self, count: int | Sequence[int]) -> MicroBatchPlan:
        """Returns the same plan with exactly `count` micro-batches in each update; a list gives one count per update.

        The largest micro-batches are split, so none becomes larger; groups, and rows that share a prefix of a tree, are
        not split. Once every micro-batch holds one row (or group), dummies are added. A dummy is the shortest row of
        the plan that has a token, with weight zero. If all rows are empty, a dummy is an empty row; if the plan has no
        rows, it has none. Replay runs a micro-batch without tokens as one token, so that all ranks run.

        Raises:
            PlanError: a count is smaller than the present one (micro-batches are not joined), or not a multiple of
                `multiple_of`.
        """
        call = "MicroBatchPlan.with_count"
        several = isinstance(count, list | tuple | np.ndarray)
        given: list[Any] = list(count) if several else [count] * len(self.updates)
        if len(given) != len(self.updates):
            raise PlanError(
                f"{call}: {len(given)} counts for {len(self.updates)} updates; expected one for each. Give as many, or "
                "one number for all."
            )
        counts = [whole(number, "count", 0, call, MOST, PlanError) for number in given]
        for number, (update, wanted) in enumerate(zip(self._bins, counts, strict=True)):
            if wanted < len(update):
                raise PlanError(
                    f"{call}: update {number} has {len(update)} micro-batches, and count is {wanted}; expected at "
                    "least as many, because they are split and never joined. Raise the count, or the token budget."
                )
            if wanted % self.multiple_of:
                raise PlanError(
                    f"{call}: count is {wanted}; expected a multiple of {self.multiple_of}, as planned. Round it up."
                )
        if counts == self.counts:
            return self
        return _with_counts(self._bins, counts, self._problem, self.oversized, self.loss)

    # ---------------------------------------------------------------- rows

    def apply(self, batch: Any, update: int | None = None) -> Iterator[Any]:
        """Yields the rows of each micro-batch, of all updates or of one.

        Args:
            batch: B rows: a padded or nested TensorDict, a PackedBatch, a BatchView, or a tensor, [B, ...] or jagged.
            update: the number of one update; None for all.

        Returns:
            An iterator over batches of the same kind. Jagged fields with equal row bounds share one offsets tensor. A
            jagged batch on CUDA takes one synchronisation.

        Raises:
            PlanError: the batch has another number of rows, or no rows.
        """
        chosen = self.micro_batches if update is None else self.updates[self._number(update, "MicroBatchPlan.apply")]
        from maskpack.planning.apply import take_rows

        return take_rows(batch, chosen, self.num_rows)

    def _number(self, update: Any, call: str) -> int:
        number = whole(update, "update", 0, call, error=PlanError)
        if number >= len(self.updates):
            raise PlanError(
                f"{call}: update is {number}; the plan has {len(self.updates)}, from 0. Choose one of these."
            )
        return number

    def restore(self, outputs: Iterable[Any], *, lengths: Any = None) -> Any:
        """Joins the outputs of the micro-batches in the order of the rows. Outputs of dummies are dropped, unless the
        plan has no rows: then they are joined, to an output without rows.

        Args:
            outputs: one for each of `micro_batches`: tensors with one entry for each row, padded [b, ...] to one width
                or jagged; TensorDicts, PackedBatches or BatchViews; or lists with one item for each row. With
                `lengths`: packed tensors [t, ...].
            lengths: [B], the tokens of each row in packed outputs: `plan.lengths` if every token has an entry.

        Raises:
            PlanError: the number of outputs, their rows or their kinds do not match the plan or each other.
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
        each = zip(self.micro_batches, outputs, self.is_dummy, strict=True)
        real = [(rows, out) for rows, out, dummy in each if not dummy or not self.num_rows]
        if not real:
            raise PlanError(f"{call}: the plan has no micro-batches; expected one. There is nothing to restore.")
        tokens = None if lengths is None else checked_lengths(lengths, call)
        if tokens is not None and tokens.size != self.num_rows:
            raise PlanError(f"{call}: lengths of {tokens.size} rows; expected {self.num_rows}. Give one for each row.")
        from maskpack.planning.apply import join_rows

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
        """Returns the weight of each row's sum of token losses, float64 [b] for each micro-batch.

        The loss of a micro-batch is `(weights * (token_loss * mask).sum(-1)).sum()`. Its sum over the micro-batches of
        an update, on all ranks, is the loss of the whole update; do not divide it by anything else:

            token-mean            sum over tokens / loss tokens
            seq-mean-token-sum    sum over rows of (sum over tokens) / rows with a loss token
            seq-mean-token-mean   sum over rows of (sum over tokens / the row's loss tokens) / rows with a loss token

        Args:
            mode: one of these.
            update: the number of one update; None for all, one after the other.
            gradients: how the gradients of several ranks are reduced: "mean" (DDP, FSDP) or "sum".

        Raises:
            PlanError: an unknown mode, or a plan made without `loss_tokens`.
        """
        call = "MicroBatchPlan.loss_weights"
        if mode not in MODES:
            raise PlanError(f"{call}: mode is {said(mode)}; expected one of {', '.join(MODES)}. Choose one.")
        if gradients not in ("mean", "sum"):
            raise PlanError(f'{call}: gradients is {said(gradients)}; expected "mean" or "sum". Choose one.')
        if self.loss is None:
            raise PlanError(
                f"{call}: the plan was made without loss tokens; expected them. Make the plan with loss_tokens, the "
                "sum of each row's loss mask."
            )
        loss = self.loss if gradients == "mean" else replace(self.loss, ranks=1)
        out: list[FloatArray] = []
        for number in range(len(self.updates)) if update is None else [self._number(update, call)]:
            weights = loss.row_weights(mode, number)
            micro_batches = self.updates[number]
            end = len(micro_batches) - self.dummies[number]
            out += [weights[rows] for rows in micro_batches[:end]]
            out += [np.zeros(len(rows)) for rows in micro_batches[end:]]
        return out

    def loads(self) -> list[float]:
        """Returns the work of each of `micro_batches`, by default its cost; 0 for dummies."""
        return [
            load
            for update, dummies in zip(self._bins, self.dummies, strict=True)
            for load in [*self._problem.loads(update).tolist(), *[0.0] * dummies]
        ]

    def metrics(self) -> dict[str, float]:
        """Returns a flat dict for a logger: how full the micro-batches are. `fill` is the fraction of valid tokens if
        each micro-batch were padded to its longest row; `imbalance` is the largest work of a micro-batch over the mean
        of its update, the largest of all updates. With a tree, `shared_tokens` counts the tokens that replay does not
        compute again."""
        used = [rows for rows, dummy in zip(self.micro_batches, self.is_dummy, strict=True) if not dummy]
        tokens = int(self.lengths.sum())
        padded = sum(len(rows) * int(self.lengths[rows].max()) for rows in used)
        loads = [self._problem.loads(update) for update in self._bins if update]
        out = {
            "plan/rows": self.num_rows,
            "plan/updates": len(self.updates),
            "plan/micro_batches": len(self.micro_batches),
            "plan/dummies": sum(self.dummies),
            "plan/oversized_rows": len(self.oversized),
            "plan/tokens": tokens,
            "plan/padding_tokens": padded - tokens,
            "plan/fill": tokens / padded if padded else 1.0,
            "plan/imbalance": max((load.max() / load.mean() for load in loads if load.any()), default=1.0),
        }
        spent = sum(self._problem.costs(update).sum() for update in self._bins)
        out["plan/budget_use"] = spent / self._problem.budget / max(len(used), 1)
        if self._problem.tree is not None:
            out["plan/shared_tokens"] = tokens - spent
        return {key: float(value) for key, value in out.items()}
