"""A bounded memory of what was computed for the latest keys, for all threads."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Latest(Generic[_T]):
    """What was remembered latest, by keys."""

    MOST = 64

    def __init__(self) -> None:
        self._known: OrderedDict[Any, _T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> _T | None:
        with self._lock:
            return self._known.get(key)

    def keep(self, key: Any, value: _T) -> None:
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            while len(self._known) > self.MOST:
                self._known.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
