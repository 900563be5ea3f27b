"""The batches that cross from one device to another, and the check that they came."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import NotExact, require_same, require_same_tensor
from bench.rivals import nesting
from bench.workloads import make_batch

_PARTS = 8


def parts_of(rows: int, prompt_width: int, response_width: int) -> list[TensorDict]:
    """Eight small batches, which joined are the large one."""
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    return [make_batch(rows, **widths, seed=seed) for seed in range(_PARTS)]


def joined(parts: list[TensorDict]) -> TensorDict:
    """The rows of padded batches, one after the other."""
    names = parts[0].keys()
    fields = {name: torch.cat([part[name] for part in parts]) for name in names}
    return TensorDict(fields, batch_size=[sum(part.batch_size[0] for part in parts)])


def require_batch(what: str, seen: TensorDict, batch: TensorDict, layout: str) -> None:
    """Raises NotExact unless `seen` is the batch, padded or nested; compared on the device of the batch."""
    home = batch["attention_mask"].device
    if layout == "padded":
        require_same(what, seen.to(home), batch)
        return
    seen = seen.exclude("_maskpack")
    if list(seen.keys()) != list(batch.keys()):
        raise NotExact(f"{what}: fields {list(seen.keys())}; expected {list(batch.keys())}.")
    masks = nesting.masks_of(batch)
    for name, field in batch.items():
        mask = masks[nesting.axis_of(name)]
        _require_nested(f'{what}: field "{name}"', seen[name], field[mask], mask)


def _require_nested(what: str, seen: Tensor, values: Tensor, mask: Tensor) -> None:
    require_same_tensor(f"{what}, values", seen.values().to(values.device), values)
    require_same_tensor(
        f"{what}, offsets", seen.offsets().to(mask.device), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    )
