"""Which attention the layers of a model have, in each forward pass.

replayed, or run on packed rows    maskpack's, whose name lies in the configuration
run to compare a row               the model's own, in this pass alone: other threads read the same configuration
after release()                    the model's own
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

NAME = "maskpack"
"""Of the attention, in `config._attn_implementation`."""

_switching = threading.Lock()
"""Held while the attention of a model is changed; no forward pass runs under it."""


@dataclass
class Pass:
    """A forward pass that replay runs. It stays in one thread, which is in one pass at a time. Layers that a backward
    pass runs again belong to no pass, in whatever thread they are.

    Attributes:
        own: whether the model attends by its own attention.
        attended: calls of maskpack's attention so far.
    """

    own: bool = False
    attended: int = 0

    @contextmanager
    def running(self) -> Generator[Pass]:
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


_current: ContextVar[Pass | None] = ContextVar("_current", default=None)


def current() -> Pass | None:
    """The pass that this thread is in."""
    return _current.get()


class _Taken(str):
    """NAME, which knows the attention that it stands in for. It lies in the configuration, so that copies of a model
    know it, and models that share a configuration agree."""

    own: str | None = None


def take(model: Any, config: Any) -> None:
    """Gives a model maskpack's attention; `config` is the configuration of its text."""
    with _switching:
        if config._attn_implementation != NAME:
            own = [(part, part._attn_implementation) for part in _parts(model.config)]
            model.set_attn_implementation(NAME)
            for part, name in own:
                if part._attn_implementation == NAME:
                    taken = _Taken(NAME)
                    taken.own = getattr(name, "own", None) or name
                    part._attn_implementation_internal = taken


def release(model: Any, config: Any) -> None:
    """Gives a model its own attention back."""
    with _switching:
        if config._attn_implementation == NAME:
            for part in _parts(model.config):
                if part._attn_implementation == NAME:
                    part._attn_implementation_internal = _own_of(part._attn_implementation)


def follow_passes(model: Any) -> None:
    """Lets `_attn_implementation` of the configurations of a model, which layers read in every forward pass, say the
    model's own attention in a pass that has it. The configurations themselves stay as they are."""
    for config in _parts(model.config):
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
        return name if running is None or not running.own else _own_of(name)

    cast("Any", of_this_pass).follows_passes = True
    return of_this_pass


def _own_of(name: str) -> str | None:
    return name.own if isinstance(name, _Taken) else "sdpa"


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those within it."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))
