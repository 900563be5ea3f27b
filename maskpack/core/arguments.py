"""What callers hand over, looked at before it is used: a mistake becomes an error that says what to write instead.

    said(None) None   said("x") 'x'   said(tensor) a Tensor       how messages show what they were given

No torch here; tensors.py looks at tensors, batches and devices.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from maskpack.errors import FieldError, LayoutError, MaskpackError

_T = TypeVar("_T")
IntArray = npt.NDArray[np.int64]


def said(value: Any) -> str:
    """A value as messages show it: itself if it is short, else its type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return reprlib.repr(value)
    name = "array" if isinstance(value, np.ndarray) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def flag(value: Any, name: str, call: str, error: type[MaskpackError] = LayoutError) -> bool:
    """Raises for anything but true and false: "no" counts as true in Python."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{call}: {name} is {said(value)}; expected True or False. Pass one of these.")
    return bool(cast("Any", value))


def whole(value: Any, name: str, least: int, call: str, most: int = 1 << 62) -> int:
    """Raises LayoutError for what is no whole number, below `least` or above `most`; nothing is rounded."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or int(cast("Any", value)) < least:
        raise LayoutError(f"{call}: {name} is {said(value)}; expected a whole number from {least}. Give one.")
    if value > most:
        raise LayoutError(f"{call}: {name} is {said(value)}; expected a whole number from {least} to {most}. Give one.")
    return int(cast("Any", value))


def list_of(things: Any, kind: type[_T], call: str, remedy: str) -> list[_T]:
    """At least one thing of a kind. Raises LayoutError for one that is in no list, for none, and for others."""
    if isinstance(things, kind):
        raise LayoutError(f"{call}: got one {kind.__name__}; expected a list. Put it into one: [...].")
    several = isinstance(things, Iterable) and not isinstance(things, str | bytes | Mapping)
    items: list[Any] = list(cast("Iterable[Any]", things)) if several else []
    odd = sorted({type(item).__name__ for item in items if not isinstance(item, kind)})
    if odd or not items:
        seen = f"a list with {', '.join(odd)}" if odd else "an empty list" if several else said(things)
        raise LayoutError(
            f"{call}: got {seen}; expected a list of at least one {kind.__name__}, and of nothing else. {remedy}"
        )
    return items


def named(things: Mapping[str, _T], name: Any, call: str) -> _T:
    """The layout of that name. Raises FieldError if there is none."""
    if isinstance(name, str) and name in things:
        return things[name]
    seen = f'no layout "{name}"' if isinstance(name, str) else f"layout is {said(name)}"
    if not things:
        raise FieldError(
            f"{call}: {seen}; the batch has none, because no mask covers a field of it. Pack it with its mask and a "
            "registry that knows its fields."
        )
    raise FieldError(f"{call}: {seen}; the batch has {sorted(things)}. Name one of these.")
