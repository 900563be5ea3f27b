"""Which attention the layers of a model use in each forward pass.

replay, or packed rows     packed attention, whose name is in the configuration of the model
self-check                 the original attention, in this pass only: other threads read the same configuration
after release()            the original attention
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed import ProcessGroup

from maskpack.layout.prefix_tree import PrefixTree

NAME = "maskpack"
"""The name of packed attention in `config._attn_implementation`."""

_switching = threading.Lock()
"""Guards changes of the attention of a model. No forward pass runs under it."""


@dataclass
class Pass:
    """A forward pass of replay, in one thread; a thread is in one pass at a time. Layers that a backward pass runs
    again belong to no pass, in any thread.

    Attributes:
        own: whether layers use the original attention of the model.
        tree: the PrefixTree that packed attention has to receive; None without one.
        group: the context-parallel group that it has to receive; None without one.
        rows: the MixerRows that mixers have to be told; None for a model without mixers.
        invariant: True if packed attention has to be told that bits may not depend on the packing; else None.
        attended, mixed: the number of calls of packed attention and of mixers so far.
        routed: the number of routers that took the experts of the batch so far.
        softcap: the soft cap that packed attention was told; None without one.
    """

    own: bool = False
    tree: PrefixTree | None = None
    group: ProcessGroup | None = None
    rows: Any = None
    invariant: bool | None = None
    attended: int = 0
    mixed: int = 0
    routed: int = 0
    softcap: float | None = None

    @contextmanager
    def running(self) -> Generator[Pass]:
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


_current: ContextVar[Pass | None] = ContextVar("_current", default=None)


def current() -> Pass | None:
    """The pass of this thread; None outside one."""
    return _current.get()


_noted: ContextVar[dict[Any, Any] | None] = ContextVar("_noted", default=None)


@contextmanager
def noting() -> Generator[dict[Any, Any]]:
    """Gives the first call of each kind of packed attention that this thread makes meanwhile, by kind."""
    token = _noted.set({})
    try:
        yield cast("dict[Any, Any]", _noted.get())
    finally:
        _noted.reset(token)


def note(call: Any) -> None:
    """Notes a call, if this thread is asked to and has none of its kind."""
    noted = _noted.get()
    if noted is not None:
        noted.setdefault(call.kind, call)


class _Taken(str):
    """NAME, with the name of the attention that it replaces. The configuration holds it, so that copies of a model have
    it and models that share a configuration agree."""

    own: str | None = None


def take(model: Any, config: Any) -> None:
    """Switches a model to packed attention. `config` is its text configuration: parts with another one, such as a
    vision tower, keep their attention."""
    with _switching:
        if config._attn_implementation != NAME:
            parts = list(configurations(model.config))
            own = [(part, part._attn_implementation) for part in parts]
            model.set_attn_implementation(NAME)
            of_text = {id(part) for part in parts if any(below is config for below in configurations(part))}
            of_text |= {id(part) for part in configurations(config) if config is not model.config}
            for part, name in own:
                if id(part) not in of_text:
                    part._attn_implementation_internal = name
                elif part._attn_implementation == NAME:
                    taken = _Taken(NAME)
                    taken.own = getattr(name, "own", None) or name
                    part._attn_implementation_internal = taken


def release(model: Any, config: Any) -> None:
    """Restores the original attention of a model."""
    with _switching:
        if config._attn_implementation == NAME:
            for part in configurations(model.config):
                if part._attn_implementation == NAME:
                    part._attn_implementation_internal = own_of(part._attn_implementation)


def follow_passes(model: Any) -> None:
    """Wraps the property `_attn_implementation` of the configuration classes of a model, which layers read in every
    forward pass: it returns the original attention in a pass with `own`. The configurations do not change."""
    for config in configurations(model.config):
        kinds = cast("tuple[Any, ...]", type(config).__mro__)
        kind = next(kind for kind in kinds if "_attn_implementation" in vars(kind))
        known = cast("Any", vars(kind))["_attn_implementation"]  # a property
        if not hasattr(known.fget, "follows_passes"):
            kind._attn_implementation = property(_following(known.fget), known.fset, known.fdel, known.__doc__)


def _following(getter: Any) -> Any:
    @functools.wraps(getter)
    def of_this_pass(config: Any) -> Any:
        name = getter(config)
        running = _current.get() if name == NAME else None
        return name if running is None or not running.own else own_of(name)

    cast("Any", of_this_pass).follows_passes = True
    return of_this_pass


def own_of(name: str) -> str | None:
    """The attention that NAME replaces, by what a configuration holds."""
    return name.own if isinstance(name, _Taken) else "sdpa"


def configurations(config: Any) -> Iterator[Any]:
    """A configuration and its sub-configurations."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from configurations(getattr(config, name))
