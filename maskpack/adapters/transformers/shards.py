"""Models whose weights lie in shards on several ranks: which ranks run a model together, and what they agree on.

rank 0   packed rows   a row of two tokens to compare: 2   ---+                compares its row
rank 1   packed rows   none: 0                             ---+--> most: 2     runs along: the weights are gathered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from maskpack.errors import ReplayError


def check_root(model: nn.Module) -> None:
    """Raises ReplayError for a model that runs only inside something that gathers its weights."""
    if getattr(model, "_is_fsdp_managed_module", False) and not isinstance(model, FSDPModule):
        raise ReplayError(
            f"replayable: {type(model).__name__} lies inside a module that FSDP shards; expected the root of the "
            "sharding, which gathers the weights. Shard with fully_shard, the layers and then the model, and pass the "
            "model."
        )


def groups_of(model: nn.Module) -> tuple[Any, ...]:
    """The process groups over which weights of the model are sharded or copied; none for a model of one process."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered weights do not say where their shards lie
    return tuple(dict.fromkeys(_groups(model)))


def _groups(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        if isinstance(part, FullyShardedDataParallel):
            known = part.process_group, getattr(part, "_inter_node_pg", None)
            yield from (group for group in known if group is not None)
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            yield from (weight.device_mesh.get_group(dim) for dim in range(weight.device_mesh.ndim))


def device_of(weight: Tensor) -> torch.device:
    """Where a layer with this weight runs. Its shards may lie elsewhere until they are gathered: on the host."""
    if not isinstance(weight, DTensor):
        return weight.device
    kind = weight.device_mesh.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def most_of(groups: Sequence[Any], number: float, device: torch.device) -> float:
    """The largest number of all ranks, where not a number counts as infinite. Every rank of the groups must call it."""
    if not groups:
        return number
    most = torch.tensor(number, dtype=torch.float64, device=device).nan_to_num(torch.inf)
    for group in groups:  # of a mesh of several dims, one dim after the other
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return float(most)
