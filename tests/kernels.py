"""Where a test reads, encodes and decodes batches: on the host, or by kernels, which run on a GPU or, interpreted, on
the host. `pytest -m "gpu or interpreter"` runs all tests that need a GPU or Triton's interpreter, with all their cases.

conftest.py turns the interpreter on for the tests that are marked with `interpreter`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import quick_interpreter
import torch
from torch import Tensor

from maskpack import PackedBatch
from maskpack.core import native
from maskpack.core.keys import Path
from maskpack.nesting import device_read, plan, read, write
from maskpack.packed import encode as encoding
from maskpack.packed.cuda import decode, device_plan, encode, job_table
from maskpack.packed.cuda.device_plan import DevicePlan

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
"""The device of the kernels."""
CANARY = 64
"""Bytes before and behind every tensor that a kernel writes, that stay as they are."""
_SKIPPED = pytest.mark.skipif(not IS_GPU and not quick_interpreter.is_there(), reason="needs Triton 3.6")
kernel_marks = [pytest.mark.interpreter, _SKIPPED]
PLACES = ["host", pytest.param("kernels", marks=kernel_marks)]
"""The argument `place` of a test that runs on the host and by the kernels."""


def kernel_test(test: Any) -> Any:
    return pytest.mark.interpreter(_SKIPPED(test))


class Guarded:
    """Gives out memory between canaries."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = torch.full((nbytes + 2 * CANARY,), 0xA5, dtype=torch.uint8, device=device)
        self._held.append((memory, nbytes))
        return memory[CANARY : CANARY + nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        for memory, nbytes in self._held:
            assert bool((memory[:CANARY] == 0xA5).all())
            assert bool((memory[CANARY + nbytes :] == 0xA5).all())


@dataclass
class Place:
    """Where batches are worked on, and what `compress` did: what the kernels encoded of each batch without a plan, and
    whether each batch with a plan fitted it."""

    device: torch.device
    encoded: list[encode.OnDevice | None] = field(default_factory=list)
    plans: list[bool] = field(default_factory=list)

    def names(self, packed: PackedBatch) -> set[str]:
        """The fields of the last batch that the kernels encoded."""
        found = self.encoded[-1]
        return set() if found is None else {packed.tensors[number].path[-1] for number in found.numbers}


@contextmanager
def at(place: str, chunk: int = 256) -> Iterator[Place]:
    """The host works in three threads. Kernels write between canaries; interpreted, they take tensors on the host as if
    these lay on a GPU, and decode `chunk` words at a time."""
    if place == "host":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "threads_for", lambda nbytes: 3)
            yield Place(torch.device("cpu"))
        return
    here, guarded = Place(DEVICE), Guarded()
    of_fields, of_plan = encode.encode_on_device, DevicePlan.encoded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            encoding, "encode_on_device", lambda *given: (here.encoded.append(of_fields(*given)), here.encoded[-1])[1]
        )
        patch.setattr(
            DevicePlan, "encoded", lambda *given: (out := of_plan(*given), here.plans.append(out is not None))[0]
        )
        for module in (decode, device_read):
            patch.setattr(module, "_new", guarded.empty)
        if not IS_GPU:
            for module in (device_plan, decode, encode, device_read):
                patch.setattr(module, "uses_triton", lambda device, call: True)
            patch.setattr(write, "uses_triton", lambda device: True)
            for module in (plan, read):
                patch.setattr(module, "is_away", lambda x: True)
            for module, name, number in (
                (job_table, "CHUNK", chunk),
                (job_table, "SPAN", 2 * chunk),
                (device_read, "CHUNK", chunk),
                (device_read, "SPAN", 2 * chunk),
                (decode, "_LARGE", 4096),
            ):
                patch.setattr(module, name, number)
        yield here
    guarded.check()


def of_host_alone(packed: PackedBatch) -> set[Path]:
    """The fields in encodings that kernels do not write, which have others where there are kernels."""
    kinds = {path: packed.table.kind(number).split()[0] for path, number in packed.numbers.items()}
    return {path for path, kind in kinds.items() if kind in ("sparse", "pieces")}


def encoding_of(packed: PackedBatch, without: Collection[Path] = ()) -> list[Any]:
    """The layouts of a batch, and of each field the entries that it is made of, with their arrays."""
    found: list[Any] = [{name: (own, own.anchor) for name, own in packed.layouts.items()}]
    for number, form in enumerate(packed.tensors):
        for place in packed.table.own_entries(number) if form.path not in without else ():
            entry = packed.table.entries[place]
            found.append([form.path, *(int(entry[name]) for name in ("kind", "items", "size", "number"))])
            found += [(array.dtype, array.tobytes()) for array in packed.table.arrays_of(place)]
    return found


@contextmanager
def count_syncs() -> Iterator[list[str]]:
    """The synchronisations of a GPU, when the context ends."""
    seen: list[str] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen.extend(str(item.message) for item in caught if "called a synchronizing" in str(item.message))
