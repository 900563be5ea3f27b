"""Denominators of losses, so that micro-batches on many ranks add up to the loss of one batch on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from maskpack.planning.costs import FloatArray

LossMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""The reductions of token losses: the mean over all tokens, or the mean over rows of their sums or means."""


@dataclass(frozen=True)
class Loss:
    """The denominators of the token losses of rows.

    Attributes:
        tokens: float64 [B], the sum of the loss mask of each row.
        rows_of, tokens_of: for each update, over all ranks: the number of rows with a loss token, and of loss tokens.
        ranks: the number of ranks over which gradients are averaged.
    """

    tokens: FloatArray
    rows_of: tuple[float, ...]
    tokens_of: tuple[float, ...]
    ranks: int = 1

    @classmethod
    def of(cls, tokens: FloatArray, updates: Sequence[Sequence[int]]) -> Loss:
        parts = [tokens[list(rows)] for rows in updates]
        return cls(tokens, tuple(float((x > 0).sum()) for x in parts), tuple(float(x.sum()) for x in parts))

    def row_weights(self, mode: str, update: int) -> FloatArray:
        """float64 [B]: the weight of each row's sum of token losses in the loss of an update; 0 without loss tokens."""
        rows, tokens = self.rows_of[update], self.tokens_of[update]
        if not tokens:
            return np.zeros_like(self.tokens)
        if mode == "token-mean":
            return np.full_like(self.tokens, self.ranks / tokens)
        if mode == "seq-mean-token-sum":
            return np.full_like(self.tokens, self.ranks / rows)
        real = self.tokens > 0
        return np.where(real, self.ranks / rows / np.where(real, self.tokens, 1.0), 0.0)
