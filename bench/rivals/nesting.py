"""What trainers do today, in plain torch: the rivals that maskpack is measured against.

    nest:     for every field, the rows x[b][mask[b]], then one nested tensor from that list of rows
    masks:    pad, diff, nonzero -> starts and lengths of the runs, as int64 nested tensors
    unnest:   torch.full, then the values scattered through the boolean mask

This is the usual code, neither slowed down nor tuned. It checks nothing: it trusts every pad. `gather_by_index`
is the step between it and the memory bandwidth, which harness.floors has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from bench.workloads.rows import PAD_ID

_SEQUENCE = ("input_ids", "attention_mask", "position_ids", "routed_experts")
AXES = ("sequence", "prompt", "response")


def axis_of(name: str) -> str:
    """The axis that a field of the workloads lies on."""
    return "prompt" if name == "prompts" else "sequence" if name in _SEQUENCE else "response"


def pad_of(name: str) -> int:
    """The pad of a field of the workloads. That of position_ids is no constant."""
    return PAD_ID if name in ("input_ids", "prompts", "responses") else 0


def masks_of(batch: TensorDictBase) -> dict[str, Tensor]:
    """bool [B, S], [B, P], [B, R]: the masks of the three axes, from attention_mask."""
    sequence = batch["attention_mask"].bool()
    split = sequence.shape[1] - batch["responses"].shape[1]
    return dict(zip(AXES, (sequence, sequence[:, :split], sequence[:, split:]), strict=True))


# -------------------------------------------------------------------- the usual code


def mask_runs(mask: Tensor) -> TensorDict:
    """The runs of a mask [B, width]: `starts` and `lengths`, int64 nested tensors with one row a row of the mask."""
    steps = F.pad(mask.to(torch.int8), (1, 1)).diff(dim=1)
    begin, end = (steps == 1).nonzero(), (steps == -1).nonzero()
    runs = torch.bincount(begin[:, 0], minlength=mask.shape[0]).tolist()
    return TensorDict(
        {
            "starts": torch.nested.as_nested_tensor(list(begin[:, 1].split(runs)), layout=torch.jagged),
            "lengths": torch.nested.as_nested_tensor(list((end - begin)[:, 1].split(runs)), layout=torch.jagged),
        },
        batch_size=mask.shape[:1],
    )


def nest_field(x: Tensor, mask: Tensor) -> Tensor:
    """One padded field [B, width, *F], or with its width last [B, F, width], as a nested tensor [B, j, *F]."""
    if x.shape[1] != mask.shape[1]:
        x = x.movedim(-1, 1)
    return torch.nested.as_nested_tensor([x[row][mask[row]] for row in range(x.shape[0])], layout=torch.jagged)


def nest_fields(batch: TensorDictBase, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every field but attention_mask, which the run tables stand for; jagged fields stay as they are."""
    return {
        name: field if field.is_nested else nest_field(field, masks[axis_of(name)])
        for name, field in batch.items()
        if name != "attention_mask"
    }


def span_tables(masks: Mapping[str, Tensor]) -> dict[str, TensorDict]:
    """The run table of every axis."""
    return {f"{axis}_runs": mask_runs(mask) for axis, mask in masks.items()}


def nest(batch: TensorDictBase) -> TensorDict:
    """The mask-nested batch: a run table for each axis, every field jagged; response_mask is data and stays int64."""
    masks = masks_of(batch)
    return TensorDict({**nest_fields(batch, masks), **span_tables(masks)}, batch_size=batch.batch_size)


def unnest(nested: TensorDictBase, masks: Mapping[str, Tensor], order: tuple[str, ...]) -> TensorDict:
    """The padded batch in the key order given. The bool masks are given; position_ids are computed again, as no
    constant pad gives them back. For the two-dimensional fields of the reference workload."""

    def restored(name: str) -> Tensor:
        mask = masks[axis_of(name)]
        if name == "attention_mask":
            return mask.to(torch.int64)
        if name == "position_ids":
            return (mask.cumsum(1) - 1).clamp_(min=0)
        values = nested[name].values()
        out = torch.full(mask.shape, pad_of(name), dtype=values.dtype)
        out[mask] = values
        return out

    return TensorDict({name: restored(name) for name in order}, batch_size=nested.batch_size)


def gather_by_index(batch: TensorDictBase, indices: Mapping[str, Tensor]) -> list[Tensor]:
    """`index_select` for every field, the flat indices of each axis given: values only."""
    return [field.view(-1).index_select(0, indices[axis_of(name)]) for name, field in batch.items()]
