"""Checks of tensors, arrays and devices passed by callers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.errors import LayoutError, MaskpackError

_RAN_OUT = re.compile("out of memory|can't allocate memory|_ALLOC_FAILED")
"""What errors of CUDA, of its libraries and of the host's allocator say that have no class of their own."""


def need_tensor(x: Any, name: str, call: str, error: type[MaskpackError] = LayoutError) -> None:
    """Raises `error` unless `x` is a strided or jagged tensor that has values (is not on the meta device)."""
    if not isinstance(x, Tensor):
        remedy = "Pass torch.as_tensor of it." if isinstance(x, list | np.ndarray) else "Pass a tensor."
        raise error(f"{call}: {name} is {said(x)}; expected a tensor. {remedy}")
    if x.is_meta:
        raise error(f"{call}: {name} is on the meta device, without values; expected values. Move it where they are.")
    if x.layout not in (torch.strided, torch.jagged):
        raise error(f"{call}: {name} has the memory layout {x.layout}; expected torch.strided. Convert it: to_dense().")


def need_gradients(x: Tensor, name: str, call: str, *, nested: bool = False) -> None:
    """Raises LayoutError for a tensor that requires grad and whose gradients torch does not support: float8, and
    complex dtypes in jagged tensors."""
    if x.requires_grad and torch.is_grad_enabled() and (x.dtype.itemsize == 1 or (nested and x.is_complex())):
        where = " in jagged tensors" if x.is_complex() else ""
        raise LayoutError(
            f"{call}: {name} is {x.dtype} and requires grad; expected a dtype whose gradients torch supports{where}. "
            "Detach it, or cast it first."
        )


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error that says that memory ran out, if it is this one, one within it, or its cause."""
    if error is None:
        return None
    within = out_of_memory(getattr(error, "inner_exception", None) or error.__cause__)
    ran_out = isinstance(error, RuntimeError) and _RAN_OUT.search(str(error))
    return within or (error if ran_out or isinstance(error, MemoryError | torch.OutOfMemoryError) else None)


def host_array(values: Any, name: str, call: str) -> npt.NDArray[Any]:
    """Numbers as an array on the host. Raises LayoutError for values that cannot be converted."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:  # jagged, without values, lists of several lengths
        raise LayoutError(
            f"{call}: {name} are {said(values)} that is not an array of numbers; expected (n,). Give a flat list."
        ) from error


def numbered(device: torch.device | str) -> torch.device:
    """A device with its index, as tensors on it have it."""
    device = torch.device(device)
    return torch.empty(0, device=device).device if str(device) == device.type != "cpu" else device


def device_here(device: Any, call: str) -> torch.device:
    """The device. Raises LayoutError if this process does not have it."""
    reason = "which is not a device"
    try:
        known = torch.device(device)
        if known.type != "cpu":
            torch.empty(0, device=known)
        if not isinstance(device, bool):
            return known
    except (RuntimeError, AssertionError) as error:
        reason = f"which this process does not have ({str(error)[:80]})"
    except TypeError:
        pass
    seen = f'"{device}"' if isinstance(device, str | torch.device) else said(device)
    raise LayoutError(f'{call}: device is {seen}, {reason}; expected an available device. Pass device="cpu".')
