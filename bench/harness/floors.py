"""What memory alone costs: one read, one write and one copy of tensors, by loops in C. The read is that of floor.c,
compiled at first use; the others are those of the C library.

They stand where passes of torch could: a pass of torch on several threads waits for its pool of threads, and stalls
when another process has a core.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

READ, WRITE = "one read of the padded bytes", "one write of the padded bytes"
COPY = "memcpy of the nested values"
_SOURCE = Path(__file__).with_name("floor.c")


def read(tensors: Sequence[Tensor], threads: int = 1) -> int:
    """One read of contiguous tensors by one or two threads: the sum of their 64-bit words, modulo 2^64."""
    if threads not in (1, 2) or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("floors.read: expected contiguous tensors, and 1 or 2 threads.")
    count, total = len(tensors), ctypes.c_uint64()
    addresses = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
    sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for tensor in tensors])
    if _floor().floor_read(ctypes.c_int64(count), addresses, sizes, ctypes.c_int64(threads), ctypes.byref(total)):
        raise OSError("floors.read: the second thread did not start.")
    return total.value


def write(tensors: Sequence[Tensor]) -> list[Tensor]:
    """memset of newly allocated memory, as large as each tensor."""
    written: list[Tensor] = []
    for tensor in tensors:
        written.append(torch.empty(tensor.nbytes, dtype=torch.uint8))
        ctypes.memset(written[-1].data_ptr(), 1, tensor.nbytes)
    return written


def copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    """memcpy of each contiguous tensor into newly allocated memory."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("floors.copy: expected contiguous tensors.")
    copies: list[Tensor] = []
    for tensor in tensors:
        copies.append(torch.empty_like(tensor))
        ctypes.memmove(copies[-1].data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copies


@functools.cache
def _floor() -> ctypes.CDLL:
    """Raises RuntimeError if there is no compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as folder:  # the library stays loaded after its file is gone
        library = f"{folder}/floor.so"
        try:
            subprocess.run([*compiler, "-O3", "-fPIC", "-shared", "-pthread", "-o", library, _SOURCE], check=True)
        except FileNotFoundError as missing:
            raise RuntimeError(
                f"bench: the floors need a C compiler, and there is no {compiler[0]}. "
                "Install one (`apt-get install gcc`), or name yours in the environment variable CC."
            ) from missing
        return ctypes.CDLL(library)
