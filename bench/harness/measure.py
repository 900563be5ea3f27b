"""How things are timed and counted: interleaved rounds with medians, bytes on the wire, and the check that two batches
hold the same bits. Nothing here knows what is measured.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from bench.harness import report

_SECONDS_BETWEEN = 1.0  # of two lines about rounds: to write them would disturb works of microseconds
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotExact(Exception):
    """A result does not hold the bits that it should."""


def progress(text: str) -> None:
    """A line on stderr; stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


# -------------------------------------------------------------------- time


def keep_memory() -> None:
    """Tells glibc to keep freed memory for the rest of the process. By default it gives some back, depending on what
    was freed before, and then one work or another, ours or a baseline, pays for fresh pages by accident."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, -1)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 25)  # the most that glibc takes


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within the context, torch and maskpack use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    warm: int = 1,
) -> dict[str, float]:
    """Median milliseconds of every work, by a clock of seconds.

    Each round runs all works once, beginning with another one each time, so that a slow spell of the machine meets
    all alike and none always follows the same neighbour. `warm` rounds before the first do not count.
    Freeing a result is not timed; the collector of cycles stays off meanwhile.
    """

    def once(work: Callable[[], object]) -> float:
        begin = clock()
        result = work()
        taken = clock() - begin
        del result
        return 1e3 * taken

    return in_turns(works, rounds, "ms", once, warm=warm)


def in_turns(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    unit: str,
    once: Callable[[Callable[[], object]], float],
    *,
    warm: int = 1,
    every: int = 1,
) -> dict[str, float]:
    """Medians of what `once` says of every work, as in `interleaved`. Cycles are collected before some rounds."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn, order in enumerate(turns(taken, rounds, unit, warm)):
            if turn % every == 0:
                gc.collect()
            for name in order:
                taken[name].append(once(works[name]))
    finally:
        if collecting:
            gc.enable()
    return medians_of(taken)


def turns(taken: Mapping[str, list[float]], rounds: int, unit: str, warm: int = 1) -> Iterator[list[str]]:
    """The order of the names in each round. The caller appends their times, in `unit`, to what is `taken`; those of
    `warm` rounds are dropped. After each round, at most once a second, and after the last one, the medians so far go
    to stderr and into the record of the run."""
    names, told, so_far = list(taken), time.monotonic(), dict[str, object]()
    for turn in range(warm + rounds if names else 0):
        shift = turn % len(names)
        yield names[shift:] + names[:shift]
        done = turn + 1 - warm
        if done <= 0:
            for times in taken.values():
                times.clear()
        elif done == rounds or time.monotonic() - told >= _SECONDS_BETWEEN:
            medians, told = medians_of(taken), time.monotonic()
            if not so_far:
                report.current.rounds.append(so_far)
            so_far.update(done=done, of=rounds, unit=unit, medians=medians)
            report.current.write()
            shown = "; ".join(f"{name} {value:,.2f}" for name, value in medians.items())
            progress(f"  round {done} of {rounds}, {unit}: {shown}")


def medians_of(taken: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in taken.items()}


# -------------------------------------------------------------------- bytes


def peak_bytes(work: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above where it is now, while `work` runs. Linux only."""
    work()  # what stays for good is there before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again here
    before = memory("VmRSS")
    result = work()
    after = memory("VmHWM")
    del result
    return after - before


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


Pickled = tuple[bytes, list[pickle.PickleBuffer]]
"""A stream of protocol 5, and its out-of-band buffers."""


def pickled(thing: object) -> Pickled:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(thing, protocol=5, buffer_callback=buffers.append), buffers


def unpickled(parts: Pickled) -> Any:
    return pickle.loads(parts[0], buffers=parts[1])


def nbytes(parts: Pickled) -> int:
    return len(parts[0]) + sum(buffer.raw().nbytes for buffer in parts[1])


def wire_bytes(thing: object) -> int:
    """Bytes of the pickle of `thing`."""
    return nbytes(pickled(thing))


def tensors(batch: TensorDictBase) -> list[Tensor]:
    """The strided tensor of every field; of a jagged field, its values."""
    return [field.values() if field.is_nested else field for field in batch.values()]


def bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers, in the same memory."""
    return x.view(_BITS[x.element_size()])


# -------------------------------------------------------------------- exactness


def require_same(call: str, seen: TensorDictBase, expected: TensorDictBase) -> None:
    """Raises NotExact unless both batches have the same rows, keys in the same order, dtypes, shapes and bits."""
    if seen.batch_size != expected.batch_size or list(seen.keys()) != list(expected.keys()):
        raise NotExact(
            f"{call}: batch {tuple(seen.batch_size)} of {list(seen.keys())}; "
            f"expected {tuple(expected.batch_size)} of {list(expected.keys())}."
        )
    for name, field in expected.items():
        if is_non_tensor(field):
            raise NotExact(f'{call}: field "{name}" is no tensor; this check compares tensors only.')
        require_same_tensor(f'{call}: field "{name}"', seen.get(name), field)


def require_same_tensor(what: str, seen: Tensor, expected: Tensor) -> None:
    """Raises NotExact unless both tensors have one dtype, shape and bits; jagged ones also their offsets, int64."""
    if (seen.is_nested, seen.dtype, seen.dim()) != (expected.is_nested, expected.dtype, expected.dim()):
        raise NotExact(f"{what} is {seen.dtype}, {seen.dim()} dims; expected {expected.dtype}, {expected.dim()} dims.")
    if expected.is_nested:
        require_same_tensor(f"{what}, offsets", seen.offsets(), expected.offsets().to(torch.int64))
        seen, expected = seen.values(), expected.values()
    if seen.shape != expected.shape or not torch.equal(bits(seen), bits(expected)):
        raise NotExact(f"{what}: {tuple(seen.shape)} has other bits than the expected {tuple(expected.shape)}.")
