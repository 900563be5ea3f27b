"""The decoder layers of a model, and what each was called with, for the parts within it that are not told.

    base.layers[3](hidden, cu_seq_lens_q=..., routed_experts=...)
        .linear_attn(hidden)     told()["cu_seq_lens_q"]
        .mlp.gate(hidden)        told()["routed_experts"]

Models pass the keyword arguments of a forward pass on to their layers, but not to every part of them. A backward pass
that runs layers again (gradient checkpointing) is told the same: by the call of the layer, or where it calls only its
`forward`, past all hooks, by the function that checkpoints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

from torch import nn

_NOTHING: Mapping[str, Any] = {}
_CHECKPOINT = "_gradient_checkpointing_func"
_told: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("_told", default=(_NOTHING,))
"""Those of the layers that run in this thread, the innermost last: a hook within a layer may run another model."""


def told() -> Mapping[str, Any]:
    """The keyword arguments of the layer that runs in this thread; none outside of layers that `listen`."""
    return _told.get()[-1]


class Place(NamedTuple):
    """Where a part lies: in `layer`, number `number` of `layers`."""

    layers: nn.ModuleList
    layer: nn.Module
    number: int


def place_of(base: nn.Module, name: str) -> Place | None:
    """Where a part lies, by its name in `base`: in the outermost ModuleList on the way. None if in no such list."""
    inner: Any = base
    for step in name.split("."):
        outer, inner = inner, getattr(inner, step)
        if isinstance(outer, nn.ModuleList):
            return Place(outer, inner, int(step))
    return None


def listen(layer: Any) -> None:
    """Makes `told` answer within a layer. The two hooks stay with it, and copies of the layer have them."""
    if _begin not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_begin, with_kwargs=True)
        layer.register_forward_hook(_end, always_call=True)


def _begin(layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    checkpoint = cast("dict[str, Any]", vars(layer)).get(_CHECKPOINT)
    if checkpoint is not None and not isinstance(checkpoint, _Telling):
        setattr(layer, _CHECKPOINT, _Telling(checkpoint))
    _told.set((*_told.get(), kwargs))


def _end(_layer: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
    _told.set(_told.get()[:-1] or (_NOTHING,))


class _Telling:
    """What checkpoints the forward of a layer: when that runs again, it is told what it is told now."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        now = _told.get()

        def again(*given: Any) -> Any:
            token = _told.set(now)
            try:
                return forward(*given)
            finally:
                _told.reset(token)

        return self._checkpoint(again, *args, **options)
