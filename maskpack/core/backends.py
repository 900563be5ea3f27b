"""The choice between plain torch and Triton kernels.

Triton is used on CUDA and ROCm devices if it is installed, unless `MASKPACK_TRITON=0`. It is imported when the first
kernel runs. With `TRITON_INTERPRET=1`, kernels also run on CPU tensors, for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from maskpack.core.arguments import said
from maskpack.errors import LayoutError

Backend = Literal["auto", "torch", "triton"]


def is_installed(package: str) -> bool:
    """Whether a package is installed; a plain folder of its name has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


_INSTALLED = is_installed("triton")


def uses_triton(device: torch.device, backend: Backend = "auto", call: str = "maskpack") -> bool:
    """Whether `call` uses Triton kernels on a device.

    Raises LayoutError for an unknown backend, and for "triton" where it cannot run.
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
    """Whether Triton kernels are interpreted on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"
