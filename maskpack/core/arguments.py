"""Checks of arguments, with errors that say how to correct the call.

    said(None) None   said("x") 'x'   said(tensor) a Tensor       arguments as messages show them

This module does not import torch; tensors.py checks tensors, batches and devices.
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
    """An argument as messages show it: its repr if that is short, else its type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return reprlib.repr(value)
    name = "array" if isinstance(value, np.ndarray) else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def flag(value: Any, name: str, call: str, error: type[MaskpackError] = LayoutError) -> bool:
    """The bool. Raises for anything else, such as "no", which is true in Python."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{call}: {name} is {said(value)}; expected True or False. Pass one of them.")
    return bool(cast("Any", value))


def whole(
    value: Any, name: str, least: int, call: str, most: float = 1 << 62, error: type[MaskpackError] = LayoutError
) -> int:
    """The integer. Raises for anything else, including floats, and for one outside `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or int(cast("Any", value)) < least:
        raise error(f"{call}: {name} is {said(value)}; expected a whole number from {least}. Give one.")
    if value > most:
        raise error(f"{call}: {name} is {said(value)}; expected a whole number from {least} to {most}. Give one.")
    return int(cast("Any", value))


def list_of(values: Any, kind: type[_T], call: str, remedy: str) -> list[_T]:
    """A non-empty list of `kind`. Raises LayoutError for a single value, an empty list, and items of other types."""
    if isinstance(values, kind):
        raise LayoutError(f"{call}: got one {kind.__name__}; expected a list. Put it into one: [...].")
    several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    several = several and getattr(cast("Any", values), "ndim", 1) != 0  # an array without dims cannot be iterated over
    items: list[Any] = list(cast("Iterable[Any]", values)) if several else []
    odd = sorted({type(item).__name__ for item in items if not isinstance(item, kind)})
    if odd or not items:
        seen = f"a list with {', '.join(odd)}" if odd else "an empty list" if several else said(values)
        raise LayoutError(
            f"{call}: got {seen}; expected a list of at least one {kind.__name__}, and of nothing else. {remedy}"
        )
    return items


def named(layouts: Mapping[str, _T], name: Any, call: str) -> _T:
    """The layout of the given name. Raises FieldError if there is none."""
    if isinstance(name, str) and name in layouts:
        return layouts[name]
    seen = f'no layout "{name}"' if isinstance(name, str) else f"layout is {said(name)}"
    if not layouts:
        raise FieldError(
            f"{call}: {seen}; the batch has none, because no mask covers its fields. Pack it with its mask and a "
            "registry of its fields."
        )
    raise FieldError(f"{call}: {seen}; the batch has {sorted(layouts)}. Name one of these.")
