"""Memory that is used again: writing to fresh pages takes two to five times as long as writing to those one had before.

    with pool.used():  decompress(...)     its large tensors lie in blocks of the pool
    the last tensor over a block dies  ->  the block is free for the next batch

A block is handed out through a lease that everything over it keeps alive, so none is used twice at a time.
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

_LEAST = 1 << 20
"""Bytes of the smallest block; below, the allocator is good enough."""
_IDLE = 4
"""Uses of the pool that a free block outlives without being taken."""
_current: ContextVar[Pool | None] = ContextVar("_current", default=None)


class Pool:
    """Blocks of memory for one user at a time; they go back to the system when they have not been used for a while."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._lock = Lock()  # leases end without it: they only append

    @contextmanager
    def used(self) -> Generator[None]:
        """Inside, `memory` takes large pieces from this pool."""
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
        """Of the blocks that nobody has."""
        return sum(block.data.nbytes for block in self._free)

    def take(self, nbytes: int) -> Bytes:
        """uint8 [nbytes], not yet written."""
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
    """What arrays over a block have as their base: when the last of them is gone, the block is free."""

    def __init__(self, block: _Block, free: list[_Block], nbytes: int) -> None:
        self._block = block
        self._free = free
        self.__array_interface__: dict[str, Any] = {**block.data.__array_interface__, "shape": (nbytes,)}

    def __del__(self) -> None:
        self._free.append(self._block)


def memory(nbytes: int) -> Bytes:
    """uint8 [nbytes], not yet written, from the pool in use if there is one. numpy asks the system for large pages,
    which torch does not."""
    pool = _current.get()
    return np.empty(nbytes, np.uint8) if pool is None or nbytes < _LEAST else pool.take(nbytes)
