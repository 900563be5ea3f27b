"""A thread pool for the fields of a large batch on the host, with as many threads as torch uses, up to eight.

NumPy releases the interpreter lock while it reads and copies. torch's own pool is not used, because its threads stall
on busy machines.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LARGE = 1 << 26
_LEAST = 3  # two are no faster than one, which nearly reaches the bandwidth of the memory
_MOST = 8  # more wait for the interpreter lock


class Tasks:
    """A context with threads if `nbytes` are many. Leaving it cancels tasks that have not started and waits for the
    others."""

    def __init__(self, nbytes: int) -> None:
        count = min(torch.get_num_threads(), _MOST)
        self._pool = ThreadPoolExecutor(count) if nbytes >= _LARGE and count >= _LEAST else None

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def threaded(self) -> bool:
        """Whether there are threads."""
        return self._pool is not None

    def start(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Runs `work` when a thread is free. Call it only if `threaded`."""
        assert self._pool is not None
        return self._pool.submit(work, *args, **kwargs)
