"""Keys of fields: "a" is an entry of the batch, ("sub", "a") an entry of its sub-TensorDict "sub"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from maskpack.core.arguments import said
from maskpack.errors import LayoutError, MaskpackError, RegistryError

Key = str | tuple[str, ...]
Path = tuple[str, ...]


def show(key: Key) -> str:
    """A key as unique text: names joined by "/", with a backslash before each "/" or backslash in a name."""
    return "/".join(name.replace("\\", "\\\\").replace("/", "\\/") for name in path_of(key))


def path_of(key: Key) -> Path:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else key


def plain(key: Key) -> Key:
    """A tuple of one name as that name; other keys unchanged."""
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def need_key(key: Any, name: str, call: str, error: type[MaskpackError] = RegistryError) -> Key:
    """The key. Raises `error` for anything else."""
    parts = cast("tuple[Any, ...]", key) if isinstance(key, tuple) else ()
    if isinstance(key, str) or (parts and all(isinstance(part, str) for part in parts)):
        return cast("Key", key)
    seen = repr(parts) if isinstance(key, tuple) else said(key)
    raise error(
        f"{call}: {name} is {seen}; expected a name, or a tuple of names for a field in a sub-TensorDict. Give one."
    )


def need_keys(keys: Any, name: str, call: str, error: type[MaskpackError] = RegistryError) -> tuple[Key, ...]:
    """A collection of keys as a tuple. Raises `error` for anything else, and for a single string."""
    if isinstance(keys, str):
        raise error(f"{call}: {name} is the string {keys!r}; expected a collection of field names. Write [{keys!r}].")
    if not isinstance(keys, Iterable) or isinstance(keys, bytes):
        raise error(f"{call}: {name} is {said(keys)}; expected a collection of field names. Give a list.")
    return tuple(need_key(key, f"a field of {name}", call, error) for key in cast("Iterable[Any]", keys))


def path_given(key: Any, call: str) -> Path:
    """The path of a field named by the caller. Raises LayoutError for anything but a key."""
    if isinstance(key, list | set | frozenset):
        raise LayoutError(
            f"{call}: a field is {cast('Any', key)!r:.80}; expected a name, or a tuple of names for a field in a "
            "sub-TensorDict. Give names one by one, or unpack them: *names."
        )
    return path_of(need_key(key, "a field", call, LayoutError))
