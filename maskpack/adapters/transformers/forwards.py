"""Parts of a model whose forward is replaced while it replays."""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

from torch import nn


class Forward:
    """What `part.forward(...)` calls instead of the forward of its class: `self(part, ...)`."""

    __name__ = "forward"  # by which methods are pickled

    @classmethod
    def has(cls, part: nn.Module) -> bool:
        """Whether a part has a forward of this kind."""
        forward = vars(part).get("forward")
        return isinstance(forward, MethodType) and isinstance(forward.__func__, cls)

    @classmethod
    def restore(cls, base: nn.Module) -> None:
        """Gives all parts with one of this kind the forward of their class back."""
        for part in base.modules():
            if cls.has(part):
                del part.forward

    def install(self, part: nn.Module) -> None:
        part.forward = MethodType(cast("Any", self), part)  # a deep copy of it belongs to the copy of the part
