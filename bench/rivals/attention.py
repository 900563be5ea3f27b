"""Log-probs without packing: by a model's own forward.

padded    micro-batches of a few rows at full width with the attention mask, log_softmax and gather in the dtype of the
          model
lone      each row alone: what all others are compared with
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def padded_log_probs(model: Any, batch: TensorDict, rows: int, *, scored: bool = False) -> Iterator[Tensor]:
    """Of each micro-batch of so many rows: [rows, R] in the dtype of the model, 0 where pads are. With `scored`, logits
    of the responses' width alone."""
    width = batch["responses"].shape[1]
    for part in batch.split(rows):
        logits = model(
            input_ids=part["input_ids"],
            attention_mask=part["attention_mask"],
            position_ids=part["position_ids"],
            use_cache=False,
            **({"logits_to_keep": width + 1} if scored else {}),
        ).logits
        log_p = logits[:, -width - 1 : -1].log_softmax(-1)
        del logits
        log_p = log_p.gather(-1, part["responses"].unsqueeze(-1)).squeeze(-1)
        yield log_p * part["attention_mask"][:, -width:]


def lone_log_probs(model: Any, batch: TensorDict) -> Iterator[Tensor]:
    """Of each row of a padded batch, alone: of its response, from logits in the dtype of the model that are reduced in
    float32 or wider."""
    width = batch["responses"].shape[1]
    for padded, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        ids, response = padded[mask], int(mask[-width:].sum())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -response - 1 : -1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        yield logits.to(wide).log_softmax(-1).gather(-1, ids[-response:, None])[:, 0]
