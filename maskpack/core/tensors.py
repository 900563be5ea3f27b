"""Tensors, batches, arrays and devices that callers hand over, looked at before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.errors import LayoutError, MaskpackError


def need_batch(batch: Any, call: str, error: type[MaskpackError] = LayoutError) -> None:
    """Raises for what is no TensorDict."""
    if isinstance(batch, TensorDictBase):
        return
    remedy = "Pass the TensorDict; decompress decodes a PackedBatch, and materialize a BatchView."
    if isinstance(batch, Mapping):
        remedy = "Wrap it: TensorDict(fields, batch_size=[rows])."
    raise error(f"{call}: the batch is {said(batch)}; expected a TensorDict. {remedy}")


def need_tensor(x: Any, name: str, call: str, error: type[MaskpackError] = LayoutError) -> None:
    """Raises for what is no tensor, and for one whose values lie nowhere, or in no plain memory; nested ones pass."""
    if not isinstance(x, Tensor):
        remedy = "Pass torch.as_tensor of it." if isinstance(x, list | np.ndarray) else "Pass a tensor."
        raise error(f"{call}: {name} is {said(x)}; expected a tensor. {remedy}")
    if x.is_meta:
        raise error(f"{call}: {name} is on the meta device, without values; expected values. Move it where they are.")
    if x.layout not in (torch.strided, torch.jagged):
        raise error(f"{call}: {name} has the memory layout {x.layout}; expected torch.strided. Convert it: to_dense().")


def need_gradients(x: Tensor, name: str, call: str, *, nested: bool = False) -> None:
    """Raises LayoutError for a tensor whose gradients torch cannot carry: those of float8, which it does not add up,
    and of complex numbers in jagged tensors."""
    if x.requires_grad and torch.is_grad_enabled() and (x.dtype.itemsize == 1 or (nested and x.is_complex())):
        where = " in jagged tensors" if x.is_complex() else ""
        raise LayoutError(
            f"{call}: {name} is {x.dtype} and requires grad; expected a dtype whose gradients torch carries{where}. "
            "Detach it, or cast it first."
        )


def host_array(values: Any, name: str, call: str) -> npt.NDArray[Any]:
    """Numbers as an array on the host. Raises LayoutError for what makes none."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:  # jagged, without values, lists of several lengths
        raise LayoutError(
            f"{call}: {name} are {said(values)} that is no array of numbers; expected (n,). Give one list of them."
        ) from error


def numbered(device: torch.device | str) -> torch.device:
    """A device with its number, as tensors on it have it."""
    device = torch.device(device)
    return torch.empty(0, device=device).device if str(device) == device.type != "cpu" else device


def device_here(device: Any, call: str) -> torch.device:
    """The device, which this process has. Raises LayoutError for any other."""
    reason = "which is none"
    try:
        found = torch.device(device)
        if found.type != "cpu":
            torch.empty(0, device=found)
        if not isinstance(device, bool):
            return found
    except (RuntimeError, AssertionError) as error:
        reason = f"which this process does not have ({str(error)[:80]})"
    except TypeError:
        pass
    seen = f'"{device}"' if isinstance(device, str | torch.device) else said(device)
    raise LayoutError(f'{call}: device is {seen}, {reason}; expected one that it has. Pass device="cpu".')
