"""Log-probs from logits, as people make them."""

from __future__ import annotations

from torch import Tensor

from maskpack import RowLayout, ops


def full(hidden: Tensor, weight: Tensor, ids: Tensor, layout: RowLayout) -> Tensor:
    """Log-probs [T] from the logits of all positions, padding too."""
    wanted = ops.unpack(ids, layout)
    log_p = (hidden @ weight.T).log_softmax(-1)
    return ops.pack(log_p.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), layout)


def packed(hidden: Tensor, weight: Tensor, ids: Tensor, layout: RowLayout) -> Tensor:
    """Log-probs [T] from the logits of the real positions."""
    log_p = (ops.pack(hidden, layout) @ weight.T).log_softmax(-1)
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
