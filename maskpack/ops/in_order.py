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
    """Operations launched meanwhile add in a fixed order where torch can. The setting belongs to the process, so
    operations of other threads may do so, too; the last of several to leave restores it. A process that is
    deterministic anyway stays as it is."""
    global _asking, _before
    with _lock:
        if not _asking:
            _before = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            if not _before[0]:
                torch.use_deterministic_algorithms(True, warn_only=True)
        _asking += 1
    try:
        yield
    finally:
        with _lock:
            _asking -= 1
            if not _asking:
                torch.use_deterministic_algorithms(_before[0], warn_only=_before[1])
