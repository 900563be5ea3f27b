"""A bounded memory of what was computed for the latest keys, for all threads."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Latest(Generic[_T]):
    """The values of at most `most` keys; the key that was kept first is dropped first."""

    def __init__(self, most: int = 64) -> None:
        self._known: dict[Hashable, _T] = {}
        self._most = most
        self._lock = Lock()
        self.get = self._known.get

    def keep(self, key: Hashable, value: _T) -> _T:
        """Remembers a value, and returns it."""
        with self._lock:
            self._known.pop(key, None)
            while len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            self._known[key] = value
        return value

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
