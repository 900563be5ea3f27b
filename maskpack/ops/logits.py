"""Logits: what an output layer does beside its product with one weight.

    logits = cap(scale * (hidden @ weight.T + bias + lora_scale * hidden @ lora_a.T @ lora_b.T))
    cap(x) = softcap * tanh(x / softcap)

The bias and LoRA are one product of two thin matrices, which `packed_log_probs` adds to each chunk of logits:

    left  [T, r + 1] = lora_scale * hidden @ lora_a.T | 1          right [V, r + 1] = lora_b | bias
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from maskpack.core.arguments import said
from maskpack.errors import LayoutError

_CALL = "packed_log_probs"
_LARGEST = 2e38  # float32 also holds it times log2(e)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Logits:
    """The parts of an output layer beside its weight [V, H]: bias, LoRA, scale and soft cap.

        logits = cap(scale * (hidden @ weight.T + bias + lora_scale * hidden @ lora_a.T @ lora_b.T))
        cap(x) = softcap * tanh(x / softcap)

    `packed_log_probs` divides them by the temperature. Its gradients reach `bias`, `lora_a` and `lora_b`.

    Attributes:
        bias: [V], or None.
        lora_a, lora_b: [r, H] and [V, r], or None: the low-rank adapter (LoRA) of the weight. Several adapters are one
            whose ranks are joined.
        lora_scale: the factor of the adapter, above 0.
        scale: the factor of the logits, above 0.
        softcap: the bound that the cap approaches, above 0; None for no cap.

    Tensors are float16, bfloat16, float32 or float64, with any strides, on the device of the weight. Their dtypes may
    differ from that of the weight. `packed_log_probs` checks all of it.
    """

    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    lora_scale: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.bias, self.lora_a, self.lora_b


class Curve(NamedTuple):
    """What is done to a product z of hidden states and weights: z * scale, or tanh(z * inner) * scale with a cap."""

    scale: float
    inner: float | None

    @staticmethod
    def of(logits: Logits, temperature: float) -> Curve:
        """The curve with the temperature. Raises LayoutError if kernels in float32 cannot."""
        scale, cap = float(logits.scale), logits.softcap
        curve = Curve(scale / temperature, None) if cap is None else Curve(float(cap) / temperature, scale / float(cap))
        numbers = [number for number in curve if number is not None]
        if max(numbers) > _LARGEST or (cap is not None and min(numbers) < 1 / _LARGEST):
            raise LayoutError(
                f"{_CALL}: scale {logits.scale}, softcap {cap} and temperature {temperature} multiply logits by "
                f"{' and '.join(f'{number:.3g}' for number in numbers)}; expected {1 / _LARGEST:.0e} to "
                f"{_LARGEST:.0e}, with which float32 computes. Check the three."
            )
        return curve


def check_logits(logits: Any, weight: Tensor) -> Logits:
    """The Logits, or plain ones for None. Raises LayoutError for what does not fit the weight [V, H]."""
    if logits is None:
        return Logits()
    if not isinstance(logits, Logits):
        raise LayoutError(f"{_CALL}: logits is {said(logits)}; expected an ops.Logits. Write ops.Logits(softcap=30.0).")
    cap = 1.0 if logits.softcap is None else logits.softcap
    numbers: dict[str, Any] = {"scale": logits.scale, "lora_scale": logits.lora_scale, "softcap": cap}
    for name, number in numbers.items():
        if not is_positive(number):
            raise LayoutError(
                f"{_CALL}: {name} is {said(number)}; expected a finite number above 0. Leave it out where the model "
                "has none."
            )
    if (logits.lora_a is None) != (logits.lora_b is None):
        given = "lora_b" if logits.lora_a is None else "lora_a"
        raise LayoutError(f"{_CALL}: only {given} is given; expected lora_a [r, H] and lora_b [V, r]. Pass both.")
    _check_tensors(logits, weight)
    return logits


def is_positive(number: Any) -> bool:
    """Whether something is a finite number above 0."""
    real = isinstance(number, int | float | np.number) and not isinstance(number, bool | complex)
    return real and 0 < float(cast("float", number)) < math.inf


def _check_tensors(logits: Logits, weight: Tensor) -> None:
    rank = logits.lora_a.shape[0] if isinstance(logits.lora_a, Tensor) and logits.lora_a.dim() == 2 else 0
    rows, width = weight.shape
    for name, x, shape in (
        ("bias", logits.bias, (rows,)),
        ("lora_a", logits.lora_a, (rank, width)),
        ("lora_b", logits.lora_b, (rows, rank)),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.is_nested or x.layout != torch.strided:
            seen = "a tensor that is not strided" if type(x) is Tensor else said(x)
            raise LayoutError(
                f"{_CALL}: {name} is {seen}; expected a plain tensor. Pass full_tensor() of a DTensor, or with group "
                "the rows of this rank."
            )
        if tuple(x.shape) != shape or x.dtype not in _FLOATS or x.device != weight.device:
            dtype = str(x.dtype).removeprefix("torch.")
            raise LayoutError(
                f"{_CALL}: {name} is {tuple(x.shape)} {dtype} on {x.device}; expected {shape}, floating, on "
                f"{weight.device}, as lm_head_weight is {tuple(weight.shape)}. Pass the one of this output layer; with "
                "group, the rows of bias and lora_b that the weight has."
            )
