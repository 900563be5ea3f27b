"""The entries of a TensorDict as a flat list, and back: the only place that walks or builds one.

{a: tensor, s: {b: tensor}, uid: [...]}  <->  [(a,) tensor, (s,) Node, (s, b) tensor, (uid,) object]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict import is_non_tensor as _is_non_tensor  # type: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # no public name

from maskpack.errors import FieldError
from maskpack.keys import Key, Path, path_given, show


@dataclass(frozen=True)
class Node:
    """A TensorDict without its entries: the batch dims after the rows, None where the rows are no batch dim."""

    more_dims: tuple[int, ...] | None
    device: str | None

    @classmethod
    def of(cls, batch: TensorDictBase) -> Node:
        dims = tuple(batch.batch_size)
        return cls(dims[1:] if dims else None, None if batch.device is None else str(batch.device))

    def batch_size(self, rows: int) -> tuple[int, ...]:
        return () if self.more_dims is None else (rows, *self.more_dims)


def is_object(value: Any) -> bool:
    """Whether an entry is a Python object rather than a tensor or a TensorDict."""
    return bool(_is_non_tensor(value))


def walk(batch: TensorDictBase, prefix: Path = ()) -> list[tuple[Path, Any]]:
    """Every entry in key order; a sub-TensorDict gives a Node, then its entries."""
    entries: list[tuple[Path, Any]] = []
    for name, value in batch.items():
        path = (*prefix, name)
        if isinstance(value, TensorDictBase) and not is_object(value):
            entries.append((path, Node.of(value)))
            entries.extend(walk(value, path))
        else:
            entries.append((path, value))
    return entries


def build(root: Node, entries: Iterable[tuple[Path, Any]], rows: int) -> TensorDict:
    """The inverse of `walk`."""
    nodes: dict[Path, Node] = {(): root}
    children: dict[Path, dict[str, Any]] = {(): {}}
    for path, value in entries:
        if isinstance(value, Node):
            nodes[path] = value
            children[path] = children[path[:-1]][path[-1]] = {}
        else:
            children[path[:-1]][path[-1]] = value
    for path in sorted(nodes, key=len, reverse=True):
        node = nodes[path]
        made = _made(node, children[path], rows)
        if not path:
            return made
        children[path[:-1]][path[-1]] = made
    raise AssertionError("the root is always a node")


def _made(node: Node, entries: dict[str, Any], rows: int) -> TensorDict:
    """One TensorDict. It checks each jagged tensor by calls that take most of the time of a nested batch; those that
    are on its device, and have its rows by the way they were built, it need not check. Nor can tensordict 0.10 check a
    stack of no objects."""
    batch_size = node.batch_size(rows)
    if not any(isinstance(value, NestedTensor) or _is_empty_stack(value) for value in entries.values()):
        return TensorDict(entries, batch_size=batch_size, device=node.device)
    made: Any = TensorDict({}, batch_size=batch_size, device=node.device)
    for name, value in entries.items():
        checked = isinstance(value, NestedTensor) and made.device in (None, vars(value)["_values"].device)
        if checked or (_is_empty_stack(value) and cast("Any", value).batch_size == batch_size):
            made._set_str(name, value, inplace=False, validated=True)
        else:
            made.set(name, value)
    return made


def _is_empty_stack(value: Any) -> bool:
    return isinstance(value, NonTensorStack) and not value.tensordicts


def chosen(entries: list[tuple[Path, Any]], keys: Sequence[Key], call: str) -> list[tuple[Path, Any]]:
    """The entries that `keys` name, what lies below them, and the nodes above them; all if there are no keys."""
    if not keys:
        return entries
    wanted = [path_given(key, call) for key in keys]
    paths = {path for path, _ in entries}
    for path in wanted:
        if path not in paths:
            names = ", ".join(show(known) for known in sorted(paths)) or "none"
            remedy = "Name one of these."
            if all((name,) in paths for name in path):
                remedy = "A tuple names one field in a sub-TensorDict: give the names of several one by one."
            raise FieldError(f'{call}: no field "{show(path)}" in the batch; it has {names}. {remedy}')
    return [
        (path, value)
        for path, value in entries
        if any(path[: len(name)] == name or name[: len(path)] == path for name in wanted)
    ]


def has(batch: TensorDictBase, name: str) -> bool:
    """Whether the batch has an entry of that name."""
    return name in batch.keys()  # noqa: SIM118 (`in` asks a TensorDict for more than its keys)


def entry_at(batch: TensorDictBase, path: Path) -> Any:
    """The entry at `path` as the batch holds it, or None."""
    value: Any = batch
    for name in path:
        if not isinstance(value, TensorDictBase) or not has(value, name):
            return None
        value = cast("Any", value.get(name))
    return value


def dense_at(batch: TensorDictBase, path: Path) -> Tensor | None:
    """The strided tensor at `path`, or None."""
    value = entry_at(batch, path)
    return value if isinstance(value, Tensor) and not value.is_nested else None


def row_list(value: Any, rows: int) -> list[Any] | None:
    """The list that an entry keeps for the whole batch, if it has one item a row; or None."""
    data: Any = value.data if isinstance(value, NonTensorData) else None
    return cast("list[Any]", data) if isinstance(data, list) and len(cast("list[Any]", data)) == rows else None


def with_rows(value: Any, items: list[Any]) -> Any:
    """An entry like `value`, with another row list."""
    held: Any = NonTensorData(items, batch_size=[len(items), *value.batch_size[1:]])
    return held


def number_at(batch: TensorDictBase, path: Path) -> int | None:
    """The whole number kept as a non-tensor entry at `path`, or None."""
    value = entry_at(batch, path)
    data = value.data if isinstance(value, NonTensorData) else None
    return data if isinstance(data, int) and not isinstance(data, bool) else None
