"""The decoder layers of a model, and what each was called with, for the parts within it that are not told.

    base.layers[3](hidden, cu_seq_lens_q=..., routed_experts=...)
        .linear_attn(hidden)     told()["cu_seq_lens_q"]
        .mlp.gate(hidden)        told()["routed_experts"]

Models pass the keyword arguments of a forward pass on to their layers, but not to every part of them. A backward pass that
runs layers again (gradient checkpointing) calls them with the same arguments, so that they are told again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

_NOTHING: Mapping[str, Any] = {}
_told: ContextVar[Mapping[str, Any]] = ContextVar("_told", default=_NOTHING)


def told() -> Mapping[str, Any]:
    """The keyword arguments of the layer that runs in this thread; none outside of layers that `listen`."""
    return _told.get()


def layer_of(base: nn.Module, name: str) -> tuple[nn.Module, int] | None:
    """The layer in which a part lies, by the part's name in `base`, and the index of the layer: the entry of the
    outermost ModuleList on the way. None for a part that lies in no such list."""
    inner: Any = base
    for step in name.split("."):
        outer, inner = inner, getattr(inner, step)
        if isinstance(outer, nn.ModuleList):
            return inner, int(step)
    return None


def listen(layer: nn.Module) -> None:
    """Makes `told` answer within a layer. The two hooks stay with it, and copies of the layer have them."""
    if _begin not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_begin, with_kwargs=True)
        layer.register_forward_hook(_end, always_call=True)


def _begin(_layer: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _told.set(kwargs)


def _end(_layer: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
    _told.set(_NOTHING)
