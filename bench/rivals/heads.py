"""Output layers of others: the log-probs [T] of given tokens from hidden states [T, H] and a weight [V, H].

Each imports the package that it is from when it is asked for, so that those without it are named, not measured. verl's
are files of its wheel, which may lie on the path without the rest of verl. flash-attn's cross entropy is one file,
too: where flash-attn is not installed, the variable MASKPACK_FLASH_CROSS_ENTROPY is the path of its copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor, Tensor, Tensor], Tensor]

PLAIN = "all logits, float32 log_softmax"
FLASH = "all logits, flash-attn's cross entropy in place"
VERL_TORCH, VERL_TRITON, VERL_LIGER = "verl fused torch", "verl fused triton", "verl fused liger"
LIGER_CUTE, LIGER_FUSED = "Liger scaled cross entropy, CuTe sm90", "Liger fused linear cross entropy"
CUT = "cut-cross-entropy"

_FLASH = "flash_attn.ops.triton.cross_entropy"
_CUTE = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"


def importable(names: Iterable[str], device: torch.device) -> tuple[dict[str, Head], dict[str, str]]:
    """Those of the names that this machine has, and why it has not the others."""
    found: dict[str, Head] = {}
    missing: dict[str, str] = {}
    for name in names:
        if device.type != "cuda" and name not in _ANYWHERE:
            missing[name] = "needs a GPU"
            continue
        try:
            found[name] = _HEADS[name]()
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _plain() -> Head:
    def head(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    return head


@cache
def _flash_file() -> Any:
    """Also for verl, which imports it by that name for the torch backend of its fused head."""
    path = os.environ.get("MASKPACK_FLASH_CROSS_ENTROPY")
    if path is None or importlib.util.find_spec("flash_attn") is not None:
        return importlib.import_module(_FLASH)
    spec: Any = importlib.util.spec_from_file_location(_FLASH, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(_FLASH, module)


def _flash() -> Head:
    cross_entropy = _flash_file().cross_entropy_loss
    return lambda hidden, weight, ids: -cross_entropy(hidden @ weight.T, ids, inplace_backward=True)[0]


def _verl_fused(backend: str) -> Head:
    if torch.cuda.is_available():
        with suppress(ModuleNotFoundError):
            _flash_file()
    fused = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
    if backend == "liger":  # without it, verl silently takes its torch backend
        importlib.import_module("liger_kernel.ops")
    head = fused(impl_backend=backend)
    return lambda hidden, weight, ids: head(hidden, weight, ids, 1.0)[0]


def _verl_triton() -> Head:
    head = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids: head(hidden, weight, ids, 1.0, "none")[0]


def _liger_cute() -> Head:
    """verl's liger backend calls it where it can be imported, and a program of torch where it cannot."""
    head = importlib.import_module(_CUTE).LigerFusedScaledCrossEntropySM90Function
    return lambda hidden, weight, ids: -head.apply(hidden, weight, ids)


def _liger_fused() -> Head:
    head = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    return lambda hidden, weight, ids: -head.apply(hidden, weight, ids, None, None, -100, 0.0, 0.0, "none")[0]


def _cut() -> Head:
    head = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids: -head(hidden, weight, ids, reduction="none")


_HEADS: Mapping[str, Callable[[], Head]] = {
    PLAIN: _plain,
    FLASH: _flash,
    VERL_TORCH: lambda: _verl_fused("torch"),
    VERL_TRITON: _verl_triton,
    VERL_LIGER: lambda: _verl_fused("liger"),
    LIGER_CUTE: _liger_cute,
    LIGER_FUSED: _liger_fused,
    CUT: _cut,
}
ALL = tuple(_HEADS)
_ANYWHERE = (PLAIN, VERL_TORCH)
"""Without a kernel of a GPU."""
