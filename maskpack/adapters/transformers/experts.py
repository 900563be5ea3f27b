"""Routers that take the experts of the batch, with their own probabilities as weights.

    router of a layer      probabilities [T, E] -> torch.topk -> experts [T, k], weights -> scaled, normalised, ...
    while it replays                               the one call of topk returns the ids of the batch, and the
                                                   probabilities there

All else is the router's own code, gradients too. Routers are found by their code, which calls `topk`; which of its
calls chooses the experts, by its shape. A router in which none does, or more than one, raises.

The definition is that of router replay in rollout engines' trainers: weights are the trainer's, experts the engine's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskpack.adapters.transformers import passes
from maskpack.adapters.transformers.layers import Place, listen, place_of, told
from maskpack.errors import ReplayError
from maskpack.replay.routes import RoutedExperts

NAME = "routed_experts"
"""The keyword argument of a forward pass with the experts."""
_TOPK: tuple[Any, ...] = (torch.topk, cast("Any", Tensor).topk)
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Options with the number of experts."""


class Routers:
    """The routers of a model, which choose the experts of the batch from here on whenever they are told some.

    Raises:
        ReplayError: the model has none, or several in a layer.
    """

    def __init__(self, model: nn.Module, base: Any, config: Any) -> None:
        self._who = type(model).__name__
        self._layers: int = config.num_hidden_layers
        found = list(_found(base, self._layers))
        places = [place.number for _, place in found]
        if not found or len(set(places)) < len(places):
            seen = [name for name, _ in found]
            raise ReplayError(
                f"replayable: routed_experts with {self._who}, in whose layers {seen or 'no part'} choose experts by "
                "torch.topk; expected one router in a layer. Leave routed_experts out."
            )
        self.names, self.count = [name for name, _ in found], len(found)
        experts = next((number for name in _NUMBERS if (number := getattr(config, name, None))), None)
        for nth, (name, place) in enumerate(found):
            router = _Router(f"{self._who}.{name}", nth, place.number, self.count, experts)
            listen(place.layer)
            part: Any = base.get_submodule(name)
            if not any(isinstance(hook, _Router) for hook in part._forward_pre_hooks.values()):
                part.register_forward_pre_hook(router)
                part.register_forward_hook(functools.partial(_after, router), always_call=True)

    def check(self, routes: RoutedExperts) -> None:
        """Raises ReplayError for the experts of another number of layers."""
        if routes.ids.shape[1] not in (self.count, self._layers):
            raise ReplayError(
                f'replayable: field "routed_experts" has {routes.ids.shape[1]} layers; expected those of '
                f"{self._who}: {self._layers}, or the {self.count} that have a router. Fix the producer."
            )


def _found(base: Any, layers: int) -> Iterator[tuple[str, Place]]:
    """The innermost parts of decoder layers whose code calls topk."""
    parts: list[tuple[str, Any]] = list(base.named_modules())
    names: list[str] = [name for name, part in parts if _calls_topk(cast("Any", type(part)))]
    for name in names:
        place = place_of(base, name) if name else None
        inner = any(other.startswith(f"{name}.") for other in names)
        if place is not None and not inner and len(place.layers) == layers:
            yield name, place


@functools.cache
def _calls_topk(kind: Any) -> bool:
    parents: list[Any] = kind.__mro__[: kind.__mro__.index(nn.Module)]
    members = [cast("dict[str, Any]", vars(parent)).values() for parent in parents]
    own: list[Any] = [inspect.unwrap(member) for some in members for member in some if callable(member)]
    return any(isinstance(one, FunctionType) and "topk" in one.__code__.co_names for one in own)


class _Router:
    """The forward pre-hook of a router: from here to `_after`, topk chooses the experts of the batch."""

    def __init__(self, who: str, nth: int, layer: int, routers: int, experts: int | None) -> None:
        self.who, self.nth, self.layer, self.routers, self.experts = who, nth, layer, routers, experts

    def __call__(self, _part: nn.Module, _args: Any) -> None:
        routes: RoutedExperts | None = told().get(NAME)
        if routes is not None:
            column = self.nth if routes.ids.shape[1] == self.routers else self.layer
            mode = _Chosen(self, routes.ids[:, column], routes.highest)
            mode.__enter__()
            _running.set(mode)


_running: ContextVar[_Chosen | None] = ContextVar("_running", default=None)


def _after(router: _Router, _part: nn.Module, _args: Any, out: Any) -> None:
    """The forward hook of a router, which also runs where its forward raised: then `out` is None."""
    mode = _running.get()
    if mode is None or mode.router is not router:
        return
    _running.set(None)
    mode.__exit__(None, None, None)
    if out is not None and mode.taken != 1:
        raise ReplayError(
            f"{router.who}: {mode.taken} calls of topk chose experts, of {mode.seen}; expected one, of k = "
            f"{mode.ids.shape[1]} experts for {mode.ids.shape[0]} tokens. This router cannot replay the experts of the "
            "batch: leave routed_experts out."
        )
    replay = passes.current()
    if replay is not None:
        replay.routed += 1


class _Chosen(TorchFunctionMode):
    """While a router runs: the call of topk that chooses experts returns those of the batch, `ids` [T, k]."""

    def __init__(self, router: _Router, ids: Tensor, highest: int) -> None:
        super().__init__()
        self.router, self.ids, self.highest = router, ids, highest
        self.taken = 0
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out: Any = func(*args, **(kwargs or {}))
        return self._instead(out, *args, **(kwargs or {})) if func in _TOPK else out

    def _instead(self, out: Any, x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
        self.seen.append(f"{k} of {tuple(x.shape)}")
        tokens, chosen = self.ids.shape
        last = dim in (-1, x.dim() - 1) and x.shape[:-1].numel() == tokens
        if not last or k != chosen or self.router.experts not in (None, x.shape[-1]):
            return out
        if self.highest >= x.shape[-1]:
            raise ReplayError(
                f'{self.router.who}: field "{NAME}" has the expert {self.highest}; expected ids below '
                f"{x.shape[-1]}, its experts. Check that the field is of this model."
            )
        self.taken += 1
        ids = self.ids.to(torch.int64).view(out.indices.shape)
        indices = ids.where(ids >= 0, out.indices)
        return cast("Any", torch.return_types).topk((x.gather(-1, indices), indices))
