"""Two processes of one group, each with a GPU of its own over NCCL, or on the CPU over gloo."""

from __future__ import annotations

import os
import pickle
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.harness import report
from bench.harness.measure import keep_memory, progress
from bench.harness.passes import synchronize
from bench.harness.registry import Run
from bench.harness.report import Row, RowGroups

Link = Literal["nccl", "gloo"]
_PATIENCE = timedelta(seconds=300)
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast can put GPUs that others share out of service."""


class Pair:
    """One of the two ranks.

    Attributes:
        rank: 0 or 1.
        device: of this rank.
        host: a group of both on the host.
    """

    def __init__(self, rank: int, folder: str, backend: Link) -> None:
        os.environ.update(_NO_MULTICAST)
        keep_memory()
        self.rank = rank
        self.device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=_PATIENCE)
        self.host: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def wait(self) -> None:
        """Until both have done all."""
        synchronize(self.device)
        dist.barrier(group=self.host)


def on_both(name: str, backend: Link, work: Run, *given: Any) -> RowGroups:
    """The rows that `work(pair, *given)`, an importable function, yields on rank 0 of two processes, which keeps the
    results file meanwhile; none over NCCL without two GPUs. Raises torch.multiprocessing.ProcessRaisedException, which
    shows the error of a rank."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        progress(f"{name}: skipped, because this machine has fewer than two GPUs")
        return
    with tempfile.TemporaryDirectory() as folder:
        # daemons end with this process
        torch.multiprocessing.spawn(_rank, (folder, backend, work, given, report.current), nprocs=2, daemon=True)
        yield pickle.loads(Path(folder, "rows").read_bytes())


def _rank(rank: int, folder: str, backend: Link, work: Run, given: tuple[Any, ...], record: report.Record) -> None:
    if rank == 0:
        report.current = record
    rows: list[Row] = []
    for group in work(Pair(rank, folder, backend), *given):
        rows += group
        report.current.add(group)
    if rank == 0:
        Path(folder, "rows").write_bytes(pickle.dumps(rows))
    dist.destroy_process_group()
