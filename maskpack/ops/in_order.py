"""Sums whose terms are added in a fixed order, so that gradients have the same bits in every run.

Kernels of torch add with atomics, in the order in which threads come, unless the process asks for deterministic
algorithms. `in_order` asks for a moment.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_asking = 0
_before: tuple[bool, bool] = (False, False)


@contextmanager
def in_order() -> Generator[None]:
    """Operations launched meanwhile add in a fixed order, and raise RuntimeError if torch cannot. The setting is that
    of the process, and of other threads meanwhile; the last of several to leave restores it. A process that is
    deterministic anyway stays as it is, unless it only warns."""
    global _asking, _before
    with _lock:
        if not _asking:
            _before = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            if _before != (True, False):
                torch.use_deterministic_algorithms(True)  # the backward pass of flash attention ignores warn_only
        _asking += 1
    try:
        yield
    finally:
        with _lock:
            _asking -= 1
            if not _asking:
                torch.use_deterministic_algorithms(_before[0], warn_only=_before[1])
