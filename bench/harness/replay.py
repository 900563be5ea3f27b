"""Replay of the micro-batches of a batch by a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs


def replayed(replay: Any, nested: Any, plan: MicroBatchPlan, **options: Any) -> Iterator[Tensor]:
    """Ours: packed log-probs [tokens of the responses] of each micro-batch."""
    for part in plan.apply(nested):
        log_probs: Any = response_log_probs(replay, part, **options)
        yield log_probs.values()


@dataclass(frozen=True)
class Replay:
    """A model and a padded batch, whose pad is the last id of the vocabulary, and micro-batches of its rows, planned
    anew each time."""

    model: Any
    padded: TensorDict
    token_budget: int

    @cached_property
    def replay(self) -> Replayable:
        return replayable(self.model)

    @cached_property
    def nested(self) -> TensorDict:
        return nest_batch_by_mask(self.padded, pad_token_id=self.model.config.vocab_size - 1)

    @cached_property
    def lengths(self) -> Any:
        """int64 [B]."""
        return self.padded["attention_mask"].sum(1).numpy()

    def plan(self, shares: bool) -> MicroBatchPlan:
        tree = prefix_tree(self.nested) if shares else None
        return plan_micro_batches(self.lengths, self.token_budget, tree=tree)

    def log_probs(self, shares: bool) -> Iterator[Tensor]:
        options = ReplayOptions(share_prefixes=shares)
        return replayed(self.replay, self.nested, self.plan(shares), self_check=False, options=options)
