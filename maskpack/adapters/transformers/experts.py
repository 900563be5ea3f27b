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
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskpack.adapters.transformers import passes
from maskpack.adapters.transformers.forwards import Forward
from maskpack.adapters.transformers.layers import Place, listen, place_of, told
from maskpack.adapters.transformers.refusals import Refusal
from maskpack.replay.routes import RoutedExperts

NAME = "routed_experts"
"""The keyword argument of a forward pass with the experts."""
_TOPK: tuple[Any, ...] = (torch.topk, cast("Any", Tensor).topk)
_MASKING: tuple[Any, ...] = (torch.masked_fill, Tensor.masked_fill)
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Options with the number of experts."""


class Routers:
    """The routers of a model, which choose the experts of the batch while they are installed and told some.

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
            raise Refusal.ROUTERS(model=self._who, seen=seen or "no part")
        self.names, self.count = [name for name, _ in found], len(found)
        experts = next((number for name in _NUMBERS if (number := getattr(config, name, None))), None)
        self._parts: list[tuple[Any, RouterForward]] = []
        for nth, (name, place) in enumerate(found):
            listen(place.layer)
            part: Any = base.get_submodule(name)
            if "forward" in vars(part) and not RouterForward.has(part):
                raise Refusal.REPLACED(part=f"{name} of {self._who}", remedy="Leave routed_experts out")
            forward = RouterForward(f"{self._who}.{name}", nth, place.number, self.count, experts)
            self._parts.append((part, forward))

    def install(self) -> None:
        for part, forward in self._parts:
            forward.install(part)

    def check(self, routes: RoutedExperts) -> None:
        """Raises ReplayError for the experts of another number of layers."""
        if routes.ids.shape[1] not in (self.count, self._layers):
            raise Refusal.ROUTES(model=self._who, seen=routes.ids.shape[1], layers=self._layers, routers=self.count)


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


class RouterForward(Forward):
    """What `router.forward(...)` calls: while the forward of its class runs, topk chooses the experts of the batch."""

    def __init__(self, who: str, nth: int, layer: int, routers: int, experts: int | None) -> None:
        self.who, self.nth, self.layer, self.routers, self.experts = who, nth, layer, routers, experts

    def __call__(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        own, routes = cast("Any", type(part)).forward, cast("RoutedExperts | None", told().get(NAME))
        if routes is None:
            return own(part, *args, **kwargs)
        column = self.nth if routes.ids.shape[1] == self.routers else self.layer
        with _Chosen(self, routes.ids[:, column], routes.highest) as mode:
            out = own(part, *args, **kwargs)
        if mode.taken != 1:
            raise Refusal.TOPK(
                self.who, taken=mode.taken, seen=mode.seen, experts=mode.ids.shape[1], tokens=mode.ids.shape[0]
            )
        running = passes.current()
        if running is not None:
            running.routed += 1
        return out


class _Chosen(TorchFunctionMode):
    """While a router runs: the call of topk that chooses experts returns those of the batch, `ids` [T, k], and the
    scores there. Scores that were masked before, such as those of groups that the router did not choose, are those
    from before the mask: the batch has chosen."""

    def __init__(self, router: RouterForward, ids: Tensor, highest: int) -> None:
        super().__init__()
        self.router, self.ids, self.highest = router, ids, highest
        self.taken = 0
        self.seen: list[str] = []
        self._unmasked: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out: Any = func(*args, **(kwargs or {}))
        if func in _MASKING and args:
            self._unmasked.append((out, args[0]))
        return self._instead(out, *args, **(kwargs or {})) if func in _TOPK else out

    def _instead(self, out: Any, x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
        self.seen.append(f"{k} of {tuple(x.shape)}")
        tokens, chosen = self.ids.shape
        several = x.dim() == 3 and (x.shape[1] > 1 or tokens == 1)  # [T, 1, E] are scores of groups
        fits = (x.dim() == 2 or several) and x.shape[:-1].numel() == tokens and dim in (-1, x.dim() - 1)
        if not fits or k != chosen or self.router.experts not in (None, x.shape[-1]):
            return out
        if self.highest >= x.shape[-1]:
            raise Refusal.EXPERT(self.router.who, highest=self.highest, experts=x.shape[-1])
        self.taken += 1
        ids = self.ids.to(torch.int64).view(out.indices.shape)
        indices = ids.where(ids >= 0, out.indices)
        scores = next((before for masked, before in reversed(self._unmasked) if masked is x), x)
        values = scores.gather(-1, indices)
        if len(self.seen) > 1 and scores is x and bool(((values == 0) | values.isneginf()).any()):
            raise Refusal.MASKED_SCORES(self.router.who)
        return cast("Any", torch.return_types).topk((values, indices))
