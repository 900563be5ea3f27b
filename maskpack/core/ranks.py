"""What the ranks of a process group tell each other before they work together: a few numbers, and checksums.

rank 0   numbers ---+                       every rank sees the numbers of all, so that where they differ, or where
rank 1   numbers ---+-- one all-reduce -->  one rank has failed, all raise, and none waits for another
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ODD = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x3F58476D1CE4E5B9  # factors of a checksum


def gathered(numbers: Tensor, group: Any, checksums: Tensor | None = None) -> Tensor:
    """[ranks, n]: the numbers of all ranks, on the host.

    Args:
        numbers: [n] on the host, as many on all ranks.
        group: the ranks, all of which must call; the default group if None.
        checksums: replaces the last numbers. Where it is on a GPU, the host waits for it once, here.
    """
    device = torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(group):  # such as cpu:gloo,cuda:nccl
        device = torch.device("cuda", torch.cuda.current_device()) if checksums is None else checksums.device
    own = dist.get_rank(group)
    out = torch.zeros((dist.get_world_size(group), numbers.shape[0]), dtype=numbers.dtype, device="cpu")
    out[own] = numbers
    out = out.to(device, non_blocking=True)
    if checksums is not None:
        out[own, -checksums.shape[0] :] = checksums
    dist.all_reduce(out, group=group)  # every other rank has zeros there
    return out.cpu()


def checksum(x: Tensor) -> Tensor:
    """int64 of integers in their order, the same on all devices: products and sums wrap around."""
    place = torch.arange(x.numel(), device=x.device)
    mixed = x.flatten().long() * _ODD[0] + place * _ODD[1]
    return ((mixed ^ (mixed >> 32)) * _ODD[2]).sum()
