"""Two processes of one group, each with a GPU of its own over NCCL, or on the CPU over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.measure import keep_memory

Link = Literal["nccl", "gloo"]
_PATIENCE = timedelta(seconds=300)
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast can put GPUs that others share out of service."""


def join(rank: int, folder: str, backend: Link) -> tuple[torch.device, Any]:
    """Joins the default group of two, which meet in the folder. Returns the device of this rank, and a group of both on
    the host."""
    os.environ.update(_NO_MULTICAST)
    keep_memory()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=_PATIENCE)
    return device, dist.new_group(backend="gloo", timeout=_PATIENCE)
