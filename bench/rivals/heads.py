"""Output layers of others: the log-probs [T] of given tokens from hidden states [T, H] and a weight [V, H].

Each imports the package that it is from when it is asked for, so that those without it are named, not measured. verl's
are files of its wheel, which may lie on the path without the rest of verl. flash-attn's cross entropy is one file,
too: where flash-attn is not installed, the variable MASKPACK_FLASH_CROSS_ENTROPY is the path of its copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor, Tensor, Tensor], Tensor]

PLAIN = "all logits, log_softmax"
FLASH = "all logits, flash-attn's cross entropy in place"
VERL, LIGER, CUT = "verl fused liger", "Liger fused linear cross entropy", "cut-cross-entropy"

_FLASH = "flash_attn.ops.triton.cross_entropy"
_CUTE = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"


def importable(names: Iterable[str], device: torch.device) -> tuple[dict[str, Head], dict[str, str]]:
    """Those of the names that this machine has, and why it has not the others."""
    found: dict[str, Head] = {}
    missing: dict[str, str] = {}
    for name in names:
        if device.type != "cuda" and name != PLAIN:
            missing[name] = "needs a GPU"
            continue
        try:
            found[name] = _HEADS[name]()
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _plain() -> Head:
    """In the dtype of the hidden states."""
    return lambda hidden, weight, ids: (hidden @ weight.T).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _flash() -> Head:
    path = os.environ.get("MASKPACK_FLASH_CROSS_ENTROPY")
    if path is None or importlib.util.find_spec("flash_attn") is not None:
        module = importlib.import_module(_FLASH)
    else:
        spec: Any = importlib.util.spec_from_file_location(_FLASH, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return lambda hidden, weight, ids: -module.cross_entropy_loss(hidden @ weight.T, ids, inplace_backward=True)[0]


def _verl() -> Head:
    fused = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
    importlib.import_module(_CUTE)  # without it, verl silently takes a program of torch
    head = fused(impl_backend="liger")
    return lambda hidden, weight, ids: head(hidden, weight, ids, 1.0)[0]


def _liger() -> Head:
    head = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    return lambda hidden, weight, ids: -head.apply(hidden, weight, ids, None, None, -100, 0.0, 0.0, "none")[0]


def _cut() -> Head:
    head = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids: -head(hidden, weight, ids, reduction="none")


_HEADS: Mapping[str, Callable[[], Head]] = {PLAIN: _plain, FLASH: _flash, VERL: _verl, LIGER: _liger, CUT: _cut}
ALL = tuple(_HEADS)
