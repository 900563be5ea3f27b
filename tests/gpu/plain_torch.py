"""What tests of replay on CUDA share: results of plain torch, and what makes ours as good as these.

Against a wide truth, our error may be twice that of plain torch in the same dtype, row by row; the largest four times,
because that is one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack.ops.attention import backend_for

DEVICE = torch.device("cuda")
needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or backend_for(torch.empty(1, 1, 64, device=DEVICE).bfloat16(), None) != "flash",
    reason="needs flash-attn",
)


def with_gradients(call: Callable[..., Tensor], tensors: list[Tensor], slope: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def assert_as_good(seen: list[Tensor], plain: list[Tensor], truth: list[Tensor], least: float) -> None:
    for number, (x, y, z) in enumerate(zip(seen, plain, truth, strict=True)):
        assert x.shape == z.shape
        ours, theirs = ((one.double() - z).abs() for one in (x, y))
        for times, of in ((2, lambda off: off.square().mean().sqrt()), (4, torch.max)):
            error, allowed = float(of(ours)), float(of(theirs))
            assert error <= times * allowed + least, f"output {number}: {error} off, plain torch {allowed}"


def each_alone(model: nn.Module, batch: TensorDict) -> Tensor:
    """Packed log-probs of the responses, from a forward pass of each row without a pad."""
    found = []
    for ids, mask, response in zip(batch["input_ids"], batch["attention_mask"], batch["responses"], strict=True):
        real, count = ids[mask.bool()], int(mask[-response.numel() :].sum())
        logits = model(input_ids=real[None], use_cache=False).logits[0]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found += [wide[at].log_softmax(0)[real[at + 1]] for at in range(len(real) - count - 1, len(real) - 1)]
    return torch.stack(found)


def slopes_of(count: int) -> Tensor:
    return torch.linspace(-1, 1.5, count, device=DEVICE, dtype=torch.float64)


def gradients(model: nn.Module, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs.double() * slopes_of(log_probs.numel())).sum().backward()
    return {name: weight.grad.detach().clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in ours.items():
        error = float((gradient.double() - wanted[name]).norm() / wanted[name].norm())
        allowed = float((theirs[name].double() - wanted[name]).norm() / wanted[name].norm())
        assert error <= 2 * allowed + 1e-5, f"{name}: {error} off, each row alone {allowed}"
