"""A stand-in for peft.tuners.lora.Linear: LoRA around an output layer, by the interface that replay reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LoraLayer(nn.Module):
    """base_layer(x) + sum of scaling * lora_B(lora_A(dropout(x))) over the active adapters."""

    def __init__(self, base_layer: nn.Linear, **ranks: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        rows, width = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({name: nn.Linear(width, rank, bias=False) for name, rank in ranks.items()})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, rows, bias=False) for name, rank in ranks.items()})
        self.lora_dropout = nn.ModuleDict({name: nn.Identity() for name in ranks})
        self.scaling = {name: 0.5 + number for number, name in enumerate(ranks)}
        self.active_adapters: list[str] = list(ranks)
        self.disable_adapters = self.merged = False
        self.lora_variant: dict[str, Any] = {}

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return out
        for name in self.active_adapters:
            if name in self.lora_A:
                low = self.lora_A[name](self.lora_dropout[name](x))
                out = out + self.lora_B[name](low) * self.scaling[name]
        return out


def with_lora(model: Any, *, bias: bool = False, **ranks: int) -> Any:
    """Puts LoRA around the output layer of a model, and with `bias` a bias into it."""
    layer = model.get_output_embeddings()
    source = torch.Generator().manual_seed(3)
    if bias:
        layer.bias = nn.Parameter(torch.randn(layer.weight.shape[0], generator=source).to(layer.weight))
    lora = LoraLayer(layer, **ranks).to(layer.weight)
    with torch.no_grad():
        for part in (*lora.lora_A.values(), *lora.lora_B.values()):
            part.weight.copy_(0.3 * torch.randn(part.weight.shape, generator=source))
    model.set_output_embeddings(lora)
    return model
