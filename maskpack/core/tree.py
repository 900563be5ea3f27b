"""TensorDicts as flat lists of paths and values, and back.

{a: tensor, s: {b: tensor}, uid: [...]}  <->  [(a,) tensor, (s,) Node, (s, b) tensor, (uid,) object]

A sub-batch is a TensorDict or a tensorclass. A lazy stack in a batch is treated as one Python object for each row,
whatever the shapes of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from tensordict import is_non_tensor as _is_non_tensor  # type: ignore[reportUnknownVariableType]
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.keys import Key, Path, path_given, show
from maskpack.errors import FieldError, LayoutError, MaskpackError

COLUMN = "Make a list of tensors a jagged column: torch.nested.as_nested_tensor(rows, layout=torch.jagged)."
"""The remedy for a list with a tensor [j] for each row."""


def need_batch(batch: Any, call: str, error: type[MaskpackError] = LayoutError) -> None:
    """Raises `error` unless `batch` is a TensorDict."""
    if isinstance(batch, TensorDictBase):
        return
    remedy = "Pass the TensorDict; decompress decodes a PackedBatch, and materialize a BatchView."
    if isinstance(batch, Mapping):
        remedy = "Wrap it: TensorDict(fields, batch_size=[rows])."
        if any(type(value) in (list, tuple) for value in cast("Mapping[Any, Any]", batch).values()):
            remedy = f"{COLUMN} Then wrap the columns: TensorDict(fields, batch_size=[rows])."
    raise error(f"{call}: the batch is {said(batch)}; expected a TensorDict. {remedy}")


@dataclass(frozen=True)
class Node:
    """A sub-batch without its entries.

    Attributes:
        more_dims: the batch dims after the rows; None if the rows are not a batch dim.
        device: the device of the sub-batch, or None.
        kind: the tensorclass; None for a TensorDict.
        names: the names of the batch dims, the rows first; None if no dim has one.
    """

    more_dims: tuple[int, ...] | None
    device: str | None
    kind: type[Any] | None = None
    names: tuple[str | None, ...] | None = None

    @classmethod
    def of(cls, batch: Any) -> Node:
        fields = fields_of(batch)
        dims = tuple(fields.batch_size)
        device = None if fields.device is None else str(fields.device)
        kind = None if fields is batch else cast("Any", type(batch))
        return cls(dims[1:] if dims else None, device, kind, names_of(fields))

    def unnamed(self) -> Node:
        """The node without the names of its dims, which may differ between batches."""
        return replace(self, names=None)

    def batch_size(self, rows: int) -> tuple[int, ...]:
        return () if self.more_dims is None else (rows, *self.more_dims)


def names_of(batch: TensorDictBase) -> tuple[str | None, ...] | None:
    """The names of the batch dims; None if no dim has one."""
    names: Any = batch.names
    return tuple(names) if any(name is not None for name in names) else None


def is_object(value: Any) -> bool:
    """Whether an entry is a Python object or a lazy stack, not a tensor or a sub-batch."""
    return bool(_is_non_tensor(value)) or (is_tensor_collection(value) and is_lazy(value))


def is_sub_batch(value: Any) -> bool:
    """Whether an entry is a TensorDict or a tensorclass, but not a lazy stack."""
    return is_tensor_collection(value) and not is_object(value)


def is_lazy(batch: Any) -> bool:
    """Whether a TensorDict or tensorclass is a lazy stack, whose rows may differ in entries and shapes."""
    return isinstance(fields_of(batch), LazyStackedTensorDict)


def fields_of(batch: Any) -> TensorDictBase:
    """The TensorDict of a sub-batch. For a tensorclass it is the one inside, because fields of the class may hide
    methods."""
    return batch if isinstance(batch, TensorDictBase) else batch._tensordict


def flatten(batch: Any, prefix: Path = (), without: str | None = None) -> list[tuple[Path, Any]]:
    """All entries in key order, but the one named `without`. A sub-batch is a Node, followed by its entries."""
    entries: list[tuple[Path, Any]] = []
    for name, value in fields_of(batch).items():
        if name == without:
            continue
        path = (*prefix, name)
        if isinstance(value, Tensor) or not is_sub_batch(value):
            entries.append((path, value))
        else:
            entries.append((path, Node.of(value)))
            entries.extend(flatten(value, path))
    return entries


def rows_in(batch: Any) -> int:
    """The number of rows of a batch, or, if it has no batch dims, of its first sub-batch that has rows."""
    fields = fields_of(batch)
    if fields.batch_dims:
        return fields.batch_size[0]
    return next((rows for value in fields.values() if is_sub_batch(value) and (rows := rows_in(value))), 0)


def dense_stack(batch: Any, call: str) -> Any:
    """A lazy stack as a contiguous TensorDict. Raises LayoutError if its rows differ in entries or shapes."""
    if not is_lazy(batch):
        return batch
    rows: list[Any] = batch.unbind(0)
    forms = [_form_of(row) for row in rows]
    if any(size < 0 for size in batch.batch_size) or any(form is None or form != forms[0] for form in forms):
        raise LayoutError(
            f"{call}: the batch is a lazy stack whose rows differ in their entries or shapes; expected equal "
            "ones. Pad them (tensordict.pad_sequence), or put the stack into a TensorDict, which keeps its rows as "
            "objects."
        )
    whole: Any = torch.stack(rows) if rows else batch.contiguous()
    order, entries = [path for row in rows[:1] for path, _ in flatten(row)], dict(flatten(whole))
    if not rows or list(entries) == order:
        return whole
    return unflatten(Node.of(whole), [(path, entries[path]) for path in order], len(rows))  # tensordict 0.10 sorts keys


def _form_of(row: Any) -> list[Any] | None:
    """The paths, shapes, dtypes and devices of a row of a lazy stack; None if it cannot be stacked."""
    if is_lazy(row):  # along another dim
        parts = [_form_of(part) for part in cast("Any", fields_of(row)).tensordicts]
        if any(part is None or part != parts[0] for part in parts):
            return None
    form: list[Any] = []
    for path, value in flatten(row):
        if isinstance(value, Tensor):
            if value.is_nested:
                return None
            form.append((path, value.shape, value.dtype, value.device))
        else:
            form.append((path, value if isinstance(value, Node) else None))
    return [Node.of(row), sorted(form, key=lambda entry: entry[0])]


def unflatten(root: Node, entries: Iterable[tuple[Path, Any]], rows: int) -> TensorDict:
    """The inverse of `flatten`: a TensorDict from its root and its entries."""
    nodes: dict[Path, Node] = {(): root}
    children: dict[Path, dict[str, Any]] = {(): {}}
    for path, value in entries:
        if isinstance(value, Node):
            nodes[path] = value
            children[path] = children[path[:-1]][path[-1]] = {}
        else:
            children[path[:-1]][path[-1]] = value
    batch: Any = None
    for path in sorted(nodes, key=len, reverse=True):
        batch = _sub_batch(nodes[path], children[path], rows)
        if path:
            children[path[:-1]][path[-1]] = batch
    return batch  # the root, whose path is the shortest


def with_names(batch: Any, like: Any) -> Any:
    """The batch, whose dims and those of its sub-batches get the names that they have in another.

    Python objects keep the names that they have. The setter of `names` would rename them, also where other batches
    share them, and raises for a stack of objects with different names.
    """
    fields, others = cast("Any", fields_of(batch)), cast("Any", fields_of(like))
    names = names_of(others)
    fields._td_dim_names = None if names is None else list(names)
    for name, value in fields.items():
        if not isinstance(value, Tensor) and is_sub_batch(value):
            with_names(value, others.get(name))
    return batch


def _sub_batch(node: Node, entries: dict[str, Any], rows: int) -> Any:
    """One TensorDict or tensorclass. Jagged tensors on its device are set without tensordict's checks, which would take
    most of the time; empty stacks, because tensordict 0.10 cannot check them."""
    batch_size = node.batch_size(rows)
    if not any(map(_is_unusual, entries.values())):
        return _of_kind(TensorDict(entries, batch_size=batch_size, device=node.device), node)
    batch: Any = TensorDict({}, batch_size=batch_size, device=node.device)
    jagged = () if torch.compiler.is_compiling() else _put_unchecked()
    for name, value in entries.items():
        is_valid = isinstance(value, jagged) and batch.device in (None, vars(value)["_values"].device)
        is_stack = type(value) is NonTensorStack and (batch.device is None or _is_empty_stack(value))
        if is_valid or (jagged and is_stack and value.batch_size == batch_size):
            batch._set_str(name, value, inplace=False, validated=True)
        else:
            batch.set(name, value)
    return _of_kind(batch, node)


def _of_kind(batch: Any, node: Node) -> Any:
    # the setter of `names` would rename Python objects, too; without names, a batch has taken those of its sub-batches
    batch._td_dim_names = None if node.names is None else list(node.names)
    return batch if node.kind is None else node.kind.from_tensordict(batch)


@cache
def _put_unchecked() -> tuple[type, ...]:
    """The type of jagged tensors, if tensordict's private setter does the same as `set` and torch's private attribute
    gives the device; else an empty tuple."""
    try:
        field = torch.nested.nested_tensor([torch.ones(2, device="cpu")], layout=torch.jagged, device="cpu")
        private: Any = TensorDict({}, batch_size=[1])
        public: Any = TensorDict({}, batch_size=[1])
        private._set_str("x", field, inplace=False, validated=True)
        public.set("x", field)
        same = [*private.keys()] == ["x"] and private.get("x") is public.get("x")
        if same and vars(field)["_values"].device == field.device:
            return (type(field),)
    except Exception:  # private names may mean anything in another version of tensordict
        pass
    return ()


def _is_unusual(value: Any) -> bool:
    """Whether a value is a nested tensor or an empty stack."""
    if type(value) is Tensor or torch.compiler.is_compiling() or not isinstance(value, Tensor):
        return value.is_nested if isinstance(value, Tensor) else _is_empty_stack(value)
    return isinstance(value, _put_unchecked()) or value.is_nested  # an attribute of a jagged tensor takes microseconds


def _is_empty_stack(value: Any) -> bool:
    return isinstance(value, NonTensorStack) and not value.tensordicts


def select_entries(entries: list[tuple[Path, Any]], keys: Sequence[Key], call: str) -> list[tuple[Path, Any]]:
    """The entries named by `keys`, those below them, and the nodes above them; all if `keys` is empty. Raises
    FieldError for a key that is not there."""
    if not keys:
        return entries
    wanted = [path_given(key, call) for key in keys]
    paths = {path for path, _ in entries}
    for path in wanted:
        if path not in paths:
            names = ", ".join(show(known) for known in sorted(paths)) or "none"
            remedy = "Name one of these."
            if all((name,) in paths for name in path):
                remedy = "A tuple names one field in a sub-TensorDict: pass several names one by one."
            raise FieldError(f'{call}: no field "{show(path)}" in the batch; it has {names}. {remedy}')
    return [
        (path, value)
        for path, value in entries
        if any(path[: len(name)] == name or name[: len(path)] == path for name in wanted)
    ]


def has(batch: Any, name: str) -> bool:
    """Whether the batch has an entry `name`."""
    return name in fields_of(batch).keys()  # noqa: SIM118 (`in` on a TensorDict does more than look up keys)


def entry_at(batch: TensorDictBase, path: Path) -> Any:
    """The entry at `path`, unchanged, or None."""
    value: Any = batch
    for name in path:
        plain = type(value) is TensorDict  # which takes no long look
        if not plain and (not is_sub_batch(value) or not has(value, name)):
            return None
        value = value.get(name, None) if plain else cast("Any", fields_of(value).get(name))
    return value


def dense_at(batch: TensorDictBase, path: Path) -> Tensor | None:
    """The strided tensor at `path`, or None."""
    value = entry_at(batch, path)
    return value if isinstance(value, Tensor) and not value.is_nested else None


def number_at(batch: TensorDictBase, path: Path) -> int | None:
    """The integer of the non-tensor entry at `path`, or None."""
    value = entry_at(batch, path)
    data = value.data if isinstance(value, NonTensorData) else None
    return data if isinstance(data, int) and not isinstance(data, bool) else None
