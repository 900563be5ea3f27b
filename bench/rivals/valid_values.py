"""The valid values of a padded batch, which a user trims before he compresses them, and the batch that they give back.

    padded [B, S] -> lengths [2, B], values [T] of each field -> a compressor -> lengths, values -> padded [B, S]

For batches whose prompts end and responses begin at one column, without holes between. It trusts every pad.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from bench.rivals.nesting import axis_of, gather_by_index, pad_of


def valid_values(batch: TensorDictBase) -> dict[str, Tensor]:
    """`lengths`, int32 [2, B], of prompts and responses, and the values [T] of each field, row after row, but for
    attention_mask and position_ids, which follow from the lengths."""
    mask, width = batch["attention_mask"], batch["prompts"].shape[1]
    lengths = torch.stack([mask[:, :width].sum(1), mask[:, width:].sum(1)]).int()
    fields = batch.exclude("attention_mask", "position_ids")
    return {
        "lengths": lengths,
        **dict(zip(fields.keys(), gather_by_index(fields, _indices(lengths, batch)), strict=True)),
    }


def padded_batch(values: Mapping[str, Tensor], like: TensorDictBase) -> TensorDict:
    """The padded batch of valid values, with the widths and the order of keys of `like`."""
    indices = _indices(values["lengths"], like)
    mask = torch.zeros_like(like["attention_mask"])
    mask.view(-1)[indices["sequence"]] = 1
    fields = {"attention_mask": mask, "position_ids": mask.cumsum(1).sub_(1).clamp_(min=0)}
    for name, field in like.items():
        if name not in fields:
            fields[name] = torch.full_like(field, pad_of(name))
            fields[name].view(-1).index_copy_(0, indices[axis_of(name)], values[name])
    return TensorDict({name: fields[name] for name in like.keys()}, batch_size=like.batch_size)  # noqa: SIM118


def _indices(lengths: Tensor, batch: TensorDictBase) -> dict[str, Tensor]:
    """int64 [T] for each axis: where its valid positions lie in a flat field."""
    prompt, response = lengths.long()
    p, s = batch["prompts"].shape[1], batch["input_ids"].shape[1]

    def flat(count: Tensor, first: Tensor | int, width: int) -> Tensor:
        begin = torch.arange(len(count)) * width + first
        return torch.arange(int(count.sum())) + (begin - count.cumsum(0) + count).repeat_interleave(count)

    sequence = flat(prompt + response, p - prompt, s)
    return {"sequence": sequence, "prompt": flat(prompt, p - prompt, p), "response": flat(response, 0, s - p)}
