"""Some processes with a torch.distributed group, a function in each, and a deadline.

    rank 0   ready  works  -> its result
    rank 1   ready  works  -> its exception
    rank 2   ready  works ...  deadline: killed, and reported

A function that runs in ranks lies in a module that can be imported. The deadline counts from when all ranks are ready.
It is for ranks that wait for each other: on a machine that others use, too, they may take ten times as long as alone.
Ranks are forked from a server that has imported torch, and transformers if there is no GPU, so that these are imported
once and not in each of them; maskpack they import themselves, from where the test has it. Triton is imported there so
that it can interpret, where there is no GPU; a rank interprets if its test does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

LIMIT = 600.0  # seconds to start and to find each other, and as many to work
PATIENCE = timedelta(seconds=300)  # of one collective
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast can put GPUs that others share out of service."""
_IMPORTED = ["torch.distributed.fsdp", "tensordict"]
_IMPORTED_WITHOUT_GPUS = ["transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"]
"""It asks CUDA for devices, and then no process that is forked can use them."""
_INTERPRETS = "TRITON_INTERPRET"
_READY, _GO = "ready", "go"
"""What a rank says that has joined, and the file that appears when all have."""


class Outcome(NamedTuple):
    """What became of a rank: the value of its function, or the text of its error."""

    value: Any = None
    error: str | None = None


def run_ranks(work: Callable[..., Any], count: int, *args: Any, backend: str = "gloo") -> list[Outcome]:
    """`work(*args)` in `count` processes of one group; what became of each. None of them is left afterwards.

    On NCCL, rank r has device r as the current one. Every rank has one thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED + _IMPORTED_WITHOUT_GPUS * (not torch.cuda.is_available()))
    interprets = os.environ.get(_INTERPRETS)
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv(_INTERPRETS, "1")
        forkserver.ensure_running()  # here, so that nothing depends on which test comes first
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(count):
                pipe, far = context.Pipe(duplex=False)
                place = rank, count, backend, folder, interprets
                process = context.Process(target=_rank, args=(far, place, work, args), daemon=True)
                process.start()
                far.close()  # so that the death of the process ends the pipe
                processes.append(process)
                pipes.append(pipe)
            return _collected(pipes, processes, Path(folder, _GO))
        finally:
            for process in processes:
                process.kill()
                process.join()


def values(outcomes: list[Outcome]) -> list[Any]:
    """Those of all ranks; raises what went wrong on any."""
    errors = [f"rank {rank}: {own.error}" for rank, own in enumerate(outcomes) if own.error is not None]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [own.value for own in outcomes]


def _collected(pipes: list[Connection], processes: list[BaseProcess], go: Path) -> list[Outcome]:
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    outcomes = [Outcome(error="was not ready in time")] * len(pipes)
    unready = len(pipes)
    deadline = time.monotonic() + LIMIT
    while waiting and (found := wait(list(waiting), max(deadline - time.monotonic(), 0))):
        for pipe in found:
            rank = waiting[pipe]
            said = _read(pipe, processes[rank])
            if said != _READY:
                outcomes[rank] = said
                del waiting[pipe]
                continue
            outcomes[rank] = Outcome(error=f"did not finish in {LIMIT} s")
            unready -= 1
            if not unready:
                go.touch()
                deadline = time.monotonic() + LIMIT
    late = time.monotonic() + 5
    for rank in {*range(len(pipes))} - {*waiting.values()}:  # these are about to leave the group
        processes[rank].join(max(late - time.monotonic(), 0))
    return outcomes


def _read(pipe: Any, process: BaseProcess) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return Outcome(error=f"ended with exit code {process.exitcode}")


def _rank(pipe: Any, place: tuple[Any, ...], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    rank, count, backend, folder, interprets = place
    os.environ.pop(_INTERPRETS, None)
    if interprets is not None:
        os.environ[_INTERPRETS] = interprets
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(1)
        _join(rank, count, backend, Path(folder, "store").as_uri())
        pipe.send(_READY)
        while not Path(folder, _GO).exists():  # the work of a rank may end it while another still connects to it
            time.sleep(0.005)
        pipe.send(Outcome(work(*args)))
    except Exception:
        pipe.send(Outcome(error=traceback.format_exc()))
    dist.destroy_process_group()


def _join(rank: int, count: int, backend: str, store: str) -> None:
    device = None
    if backend == "nccl":
        os.environ.update(_NO_MULTICAST)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=PATIENCE, device_id=device)
