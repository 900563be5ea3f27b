"""Batches of rows, a small model, and the gradient of their loss at once, by loops over rows and tokens.

Nothing here calls maskpack: what the tests expect does not come from what they test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
VOCABULARY, HIDDEN = 13, 8
Gradient = np.ndarray
Rows = list[int]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with loss masks, and how they are to be run.

    Attributes:
        tokens, masks: of each row, one number a token.
        rows: of each rank, row numbers of the batch.
        planned: arguments of plan_micro_batches.
    """

    tokens: list[list[int]]
    masks: list[list[float]]
    rows: list[Rows]
    planned: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]

    @property
    def loss_tokens(self) -> list[float]:
        return [sum(row) for row in self.masks]

    def padded(self, rows: Rows, device: torch.device | str = "cpu") -> TensorDict:
        width = max([1, *self.lengths])
        pad = [[0] * (width - length) for length in self.lengths]
        fields = {
            "ids": torch.tensor([self.tokens[row] + pad[row] for row in rows], dtype=torch.int64).view(-1, width),
            "mask": torch.tensor([self.masks[row] + pad[row] for row in rows], dtype=torch.float64).view(-1, width),
            "length": torch.tensor([self.lengths[row] for row in rows], dtype=torch.int64),
        }
        return TensorDict({name: x.to(device) for name, x in fields.items()}, [len(rows)])


def batch_of(seed: int, counts: Sequence[int], planned: dict[str, Any], *, floats: bool = False) -> Batch:
    """So many rows on each rank: some of length 0, some without a loss token, masks with holes, or of any numbers."""
    rng = random.Random(seed)
    total = sum(counts)
    tokens = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 12))] for _ in range(total)]
    masks = []
    for row in tokens:
        density = rng.choice([0.0, 0.5, 0.9, 1.0])
        masks.append([(rng.uniform(0.1, 2) if floats else 1.0) * (rng.random() < density) for _ in row])
    order = rng.sample(range(total), total)
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    rows = [order[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
    return Batch(tokens, masks, rows, planned)


class Block(nn.Module):
    """A row's tokens see those before them, so a row that is cut or mixed with another gives other losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.outer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """[b, S, HIDDEN] -> the same."""
        seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return x + self.outer(torch.tanh(self.inner(x.cumsum(1) / seen[:, None])))


class Model(nn.Module):
    """ids [b, S] -> token losses float64 [b, S], above 0. The same parameters in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(HIDDEN, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.softplus(self.head(x)).squeeze(-1)


def unsplit_gradient(batch: Batch, rows: Rows, mode: str) -> Gradient:
    """Of the loss of these rows at once: the definition, row by row and token by token."""
    model = Model()
    tokens, counted, losses = 0.0, 0, []
    for row in rows:
        own_tokens = 0.0
        for weight in batch.masks[row]:
            own_tokens += weight
        if own_tokens == 0:
            continue
        token_losses = model(torch.tensor([batch.tokens[row]]))[0]
        own = torch.zeros((), dtype=torch.float64)
        for position, weight in enumerate(batch.masks[row]):
            own = own + token_losses[position] * weight
        losses.append(own / own_tokens if mode == "seq-mean-token-mean" else own)
        tokens += own_tokens
        counted += 1
    total = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
    for own in losses:
        total = total + own
    if losses:
        total = total / (tokens if mode == "token-mean" else counted)
    total.backward()
    return flat([parameter.grad for parameter in model.parameters()], model)


def flat(gradients: Sequence[Tensor | None], model: nn.Module) -> Gradient:
    """All parameters, one after the other; 0 where nothing ran."""
    pairs = zip(gradients, model.parameters(), strict=True)
    parts = [torch.zeros(p.shape, dtype=p.dtype) if g is None else g.cpu() for g, p in pairs]
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def distance(seen: Gradient, truth: Gradient) -> float:
    """Relative to the truth; 0 where both are."""
    off = float(np.linalg.norm(seen - truth))
    return off / float(np.linalg.norm(truth)) if off else 0.0
