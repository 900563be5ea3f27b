"""What tests of log-probs share: where kernels run, loops over rows and tokens, and the program that people write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernels import kernel_marks
from torch import Tensor

from maskpack.ops import Logits, log_probs
from maskpack.ops.log_probs import Reduction
from maskpack.ops.logits import Curve
from maskpack.ops.split_head import Parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
BACKENDS = ["torch", pytest.param("triton", marks=kernel_marks)]
PRODUCT = Logits()


def _listed(x: Tensor | None) -> Any:
    return None if x is None else x.double().tolist()


def naive(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0, layer: Logits = PRODUCT
) -> tuple[list[float], list[float]]:
    """Log-probs and entropies in Python's own floats."""
    bias, low, high = map(_listed, (layer.bias, layer.lora_a, layer.lora_b))
    log_probs, entropies = [], []
    for state, wanted in zip(_listed(hidden), ids.tolist(), strict=True):
        logits = []
        for v, row in enumerate(_listed(weight)):
            logit = math.fsum(a * b for a, b in zip(state, row, strict=True))
            if bias is not None:
                logit += bias[v]
            if low is not None:
                for r, direction in enumerate(low):
                    inner = math.fsum(a * b for a, b in zip(state, direction, strict=True))
                    logit += layer.lora_scale * inner * high[v][r]
            logit *= layer.scale
            if layer.softcap is not None:
                logit = layer.softcap * math.tanh(logit / layer.softcap)
            logits.append(logit / temperature)
        top = max(logits)
        log_sum = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
        log_probs.append(logits[wanted] - log_sum)
        entropies.append(-math.fsum(math.exp(logit - log_sum) * (logit - log_sum) for logit in logits))
    return log_probs, entropies


def plain(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    layer: Logits = PRODUCT,
    tensors: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor]:
    """What people write, in the dtype of its inputs. `tensors` are those of the layer."""
    bias, low, high = tensors
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if low is not None and high is not None:
        logits = logits + layer.lora_scale * (hidden @ low.T) @ high.T
    logits = logits * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, ids.long()[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def kept_tokens(loss: Tensor) -> int:
    """The tokens whose distributions wait for the backward pass."""
    node: Any = loss.grad_fn
    kept = node.saved_tensors[-1]
    return 0 if kept is None else kept.shape[0]


def reduced(program: Any, logits: Tensor, ids: Tensor, curve: Curve, *, entropy: bool = True) -> Parts:
    """What reduce_rows writes of logits [T, V], which it overwrites, where nothing is kept."""
    parts = Parts.of(*logits.shape, (entropy, False), logits.dtype, logits.device, log_probs.SLICE)
    program.reduce_rows(logits, Reduction(ids, curve, parts, torch.empty_like(logits[:0]), None), 0, 0)
    return parts


def rounding_product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """What a GPU does, of one dtype: sums in float32, rounds to the dtype of `out`, and then adds."""
    assert a.dtype == b.dtype
    assert not add or out.dtype == torch.float32
    product = (a.float() @ b.float()).to(out.dtype)
    out.copy_(out + product if add else product)
