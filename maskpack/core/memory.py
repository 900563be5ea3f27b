"""Reusable memory: writing to fresh pages takes two to five times as long as writing to pages used before.

    with pool.used():  decompress(...)             large tensors are allocated in blocks of the pool
    the last tensor in a block is released   ->    the block is free for the next batch

Tensors in a block keep its lease alive, so a block is never in use twice.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

LEAST = 1 << 20
"""The smallest block in bytes; for less, the allocator is fast enough."""
_IDLE = 4
"""A free block is dropped after this many uses of the pool."""
_current: ContextVar[Pool | None] = ContextVar("_current", default=None)


class Pool:
    """Blocks of memory that are reused, and returned to the system when they have not been used for a while."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._lock = Lock()  # not needed when a lease ends, which only appends

    @contextmanager
    def used(self) -> Generator[None]:
        """Within the context, `memory` takes large arrays from this pool."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            with self._lock:
                for block in list(self._free):
                    block.idle += 1
                    if block.idle > _IDLE:
                        self._free.remove(block)

    @property
    def nbytes(self) -> int:
        """The number of bytes in free blocks."""
        return sum(block.data.nbytes for block in self._free)

    def take(self, nbytes: int) -> Bytes:
        """An uninitialised array, uint8 [nbytes]."""
        with self._lock:
            fitting = [block for block in self._free if nbytes <= block.data.nbytes <= nbytes + nbytes // 8]
            block = min(fitting, key=lambda block: block.data.nbytes, default=None)
            if block is not None:
                self._free.remove(block)
        block = _Block(np.empty(nbytes, np.uint8)) if block is None else block
        block.idle = 0
        return np.asarray(_Lease(block, self._free, nbytes))


class _Block:
    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.idle = 0


class _Lease:
    """The base of all arrays in a block. When the last of them is released, the block is free."""

    def __init__(self, block: _Block, free: list[_Block], nbytes: int) -> None:
        self._block = block
        self._free = free
        self.__array_interface__: dict[str, Any] = {**block.data.__array_interface__, "shape": (nbytes,)}

    def __del__(self) -> None:
        self._free.append(self._block)


def memory(nbytes: int) -> Bytes:
    """An uninitialised array, uint8 [nbytes], from the pool in use if there is one. Unlike torch, NumPy requests large
    pages from the system."""
    pool = _current.get()
    return np.empty(nbytes, np.uint8) if pool is None or nbytes < LEAST else pool.take(nbytes)
