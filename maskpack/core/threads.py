"""Work on the fields of a large batch on the host, in as many threads as torch uses, up to eight. numpy lets other
threads run while it reads and copies; torch's own pool is left alone, since its threads stall where cores are busy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LARGE = 1 << 26
_LEAST = 3  # two take as long as one, which reads nearly as fast as the memory gives
_MOST = 8  # more wait for the interpreter longer than they work


class Tasks:
    """Threads, if `nbytes` are many. A context: leaving it drops what has not begun and waits for what has."""

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
        """Begins some work when a thread is free; only where there are threads."""
        assert self._pool is not None
        return self._pool.submit(work, *args, **kwargs)
