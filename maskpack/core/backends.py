"""Which code does a work: plain torch and numpy, or Triton kernels.

Triton runs on CUDA and ROCm devices where it is installed; `MASKPACK_TRITON=0` turns it off. It is imported when the
first kernel is about to run. Under `TRITON_INTERPRET=1` kernels also take tensors on the host, for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from maskpack.core.arguments import said
from maskpack.errors import LayoutError

Backend = Literal["auto", "torch", "triton"]


def _installed(package: str) -> bool:
    """Whether there is such a package; a mere folder of this name has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


_INSTALLED = _installed("triton")


def uses_triton(device: torch.device, backend: Backend = "auto", call: str = "maskpack") -> bool:
    """Whether kernels do the work of `call` on a device.

    Raises LayoutError for an unknown backend, and where Triton is asked for and cannot run there.
    """
    if backend == "auto":
        return device.type == "cuda" and _INSTALLED and os.environ.get("MASKPACK_TRITON") != "0"
    if backend == "torch":
        return False
    if backend != "triton":
        raise LayoutError(
            f'{call}: backend is {said(backend)}; expected "auto", "torch" or "triton". Choose one of these.'
        )
    if not _INSTALLED or (device.type != "cuda" and not interpreted()):
        missing = f"the tensors are on {device}" if _INSTALLED else "Triton is not installed"
        raise LayoutError(
            f'{call}: backend is "triton", but {missing}; expected Triton and tensors on a GPU. Use backend="auto".'
        )
    return True


def interpreted() -> bool:
    """Whether Triton interprets its kernels, on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"
