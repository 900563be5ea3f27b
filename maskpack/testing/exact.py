"""assert_exact: two batches, tensors or Python objects are equal bit for bit.

batch -> keys, batch size, device -> each entry: tensor | sub-batch | Python objects -> the first difference, by name
"""

from __future__ import annotations

import copyreg
import dataclasses
import struct
from collections import Counter
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NoReturn, cast

import numpy as np
import torch
from tensordict import is_non_tensor as is_non_tensor  # type: ignore[reportUnknownVariableType]
from tensordict import is_tensor_collection
from torch import Tensor, UntypedStorage

from maskpack.core.difference import difference
from maskpack.core.keys import Path, show
from maskpack.core.objects import Objects
from maskpack.core.tensors import need_tensor
from maskpack.core.tree import fields_of, has, is_lazy
from maskpack.errors import LayoutError
from maskpack.nesting.nest import unnest_batch_by_mask
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.views.view import BatchView

_LONGEST = 200
_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_STATE = ".constructor", ".arguments", "", "", "", ".setter"
"""The place of each part of an object's state in a message: what makes the object, its arguments, its attributes, the
items of a list, the items of a dict, and what sets the attributes."""


def assert_exact(seen: Any, expected: Any) -> None:
    """Asserts that two values are equal bit for bit.

    Args:
        seen, expected: padded or nested batches, PackedBatches (which are decoded), tensors, or Python objects. Of
            tensors the dtype, the shape (of jagged ones the offsets), the device and every bit must be equal: 0.0
            differs from -0.0, and a NaN from a NaN with another payload. Of batches the keys and their order, the batch
            size, the names of the dims and the device, too; of nested ones also the padded form that is restored;
            a lazy stack differs from a dense batch. Python objects must have equal types and bits all the way down. An
            object of a class is compared by its type and the state that pickle would write, not by its `==`; a function
            or a class is equal only to itself.

    Not compared: `requires_grad`, the gradient, the strides and the subclass of a tensor (a Parameter equals a Tensor);
    the memory order of an array; whether a batch is locked; whether two places hold one object or two equal ones; and
    an attribute that a class leaves out when it is pickled. A PackedBatch keeps no names of dims.

    Raises:
        AssertionError: they differ. The message names the first field that does, the row, the position, and both values
            with their bits.
        LayoutError: a BatchView, a tensor without values or of another memory layout than strided or jagged, an object
            that cannot be pickled, or objects nested more deeply than Python's recursion limit.
    """
    try:
        _Comparison((), "", {}).same(_decoded(seen), _decoded(expected))
    except RecursionError as error:
        raise LayoutError(
            f"assert_exact: the objects of {type(seen)} are nested more deeply than Python's recursion limit allows; "
            "expected fewer levels. Compare their parts, or raise the limit with sys.setrecursionlimit."
        ) from error


def _decoded(value: Any) -> Any:
    if isinstance(value, BatchView):
        raise LayoutError(
            "assert_exact: got a BatchView, whose rows may lie elsewhere; expected a batch. Pass view.materialize(get)."
        )
    return decompress(value, max_bytes=None) if isinstance(value, PackedBatch) else value


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Compares two values at one place: in the field at `path`, and `inside` Python objects of it.

    `visited` holds the pairs of objects whose comparison has begun, by their ids: an object that contains itself is
    compared once. It keeps them alive, so that no other object gets their ids.
    """

    path: Path
    inside: str
    visited: dict[tuple[int, int], tuple[Any, Any]]

    def same(self, seen: Any, expected: Any) -> None:
        """Raises AssertionError at the first difference. Each kind of value compares the types first."""
        if isinstance(seen, type):  # tensordict takes some classes for batches
            self._objects(seen, expected)
        elif isinstance(seen, Tensor):
            self._tensors(seen, expected)
        elif is_non_tensor(seen):
            self._equal("type", type(seen), type(expected))
            self._equal("batch size", tuple(seen.batch_size), tuple(expected.batch_size))
            self.same(Objects.of(seen).data, Objects.of(expected).data)
        elif is_tensor_collection(seen):
            self._batches(seen, expected)
        else:
            self._objects(seen, expected)

    # ---------------------------------------------------------------- batches and tensors

    def _batches(self, seen: Any, expected: Any) -> None:
        self._equal("type", type(seen), type(expected))
        a, b = (cast("Any", fields_of(x)) for x in (seen, expected))
        self._equal("type", type(a), type(b))
        self._equal("batch size", tuple(a.batch_size), tuple(b.batch_size))
        self._equal("names", a.names, b.names)
        if is_lazy(seen):
            self._equal("stack dim", a.stack_dim, b.stack_dim)
            for row, pair in enumerate(zip(a.unbind(0), b.unbind(0), strict=True)):
                self._at(f"[{row}]").same(*pair)
            return
        self._equal("device", a.device, b.device)
        self._keys([*a.keys()], [*b.keys()])
        for name in a.keys():  # noqa: SIM118
            if name != LAYOUTS:
                dataclasses.replace(self, path=(*self.path, name)).same(a.get(name), b.get(name))
        if has(a, LAYOUTS):
            padded = dataclasses.replace(self, inside="in its padded form")
            padded.same(unnest_batch_by_mask(a), unnest_batch_by_mask(b))

    def _tensors(self, seen: Any, expected: Any) -> None:
        self._equal("type", *(Tensor if isinstance(x, Tensor) else type(x) for x in (seen, expected)))
        for x in (seen, expected):
            need_tensor(x, str(self), "assert_exact")
        for name in ("dtype", "device", "layout", "is_nested"):
            self._equal(name.removeprefix("is_"), getattr(seen, name), getattr(expected, name))
        if not seen.is_nested:
            self._equal("shape", tuple(seen.shape), tuple(expected.shape))
            self._bits(seen, expected, None)
            return
        if seen.layout != torch.jagged:
            raise LayoutError(
                f"assert_exact: {self} is a nested tensor of the strided layout; expected torch.jagged. Rebuild it "
                "with torch.nested.nested_tensor(rows, layout=torch.jagged)."
            )
        self._equal("number of dims", seen.dim(), expected.dim())
        self._equal("ragged dim", seen._ragged_idx, expected._ragged_idx)
        offsets = seen.offsets().cpu().numpy()
        self._equal("offsets", offsets.tolist(), expected.offsets().tolist())
        self._equal("lengths", *(None if x.lengths() is None else x.lengths().tolist() for x in (seen, expected)))
        self._equal("shape of the values", tuple(seen.values().shape), tuple(expected.values().shape))
        self._bits(seen.values(), expected.values(), offsets if seen._ragged_idx == 1 else None)

    def _bits(self, seen: Tensor, expected: Tensor, offsets: Any) -> None:
        """Two tensors of one dtype and shape. `offsets` if they are the values of jagged rows."""
        found = difference(seen.detach(), expected.detach())
        if found is None:
            return
        place = found.place
        if offsets is not None:
            row = int(np.searchsorted(offsets, place[0], side="right")) - 1
            place = row, place[0] - int(offsets[row]), *place[1:]
        where = [f"{name} {index}" for name, index in zip(("row", "position"), place, strict=False)]
        where += [f"element {place[2] if len(place) == 3 else place[2:]}"] if len(place) > 2 else []
        at = f" at {', '.join(where)}" if where else ""
        values = f"seen {found.values[0]}, expected {found.values[1]}"
        raise AssertionError(
            f"assert_exact: {self} differs{at}: {values}; {found.count:,} of {seen.numel():,} elements differ."
        )

    # ---------------------------------------------------------------- Python objects

    def _objects(self, seen: Any, expected: Any) -> None:
        if seen is expected:
            return
        kind = cast("type[Any]", type(seen))
        if kind is not type(expected):
            self._differ("type", kind, type(expected))
        if kind in _ATOMS:
            if _token(seen) != _token(expected):
                self._differ("value", seen, expected)
            return
        pair = id(seen), id(expected)
        if pair in self.visited:
            return
        self.visited[pair] = seen, expected
        if kind in (list, tuple):
            self._sequences(seen, expected)
        elif kind is dict:
            self._keys([*seen], [*expected])
            for key, *values in zip(seen, seen.values(), expected.values(), strict=True):
                self._at(f"[{key!r}]").same(*values)
        elif kind in (set, frozenset):
            self._unordered("elements", seen, expected)
        elif kind is np.ndarray:
            self._arrays(seen, expected)
        elif issubclass(kind, UntypedStorage):
            self._tensors(*(torch.empty(0, dtype=torch.uint8, device=x.device).set_(x) for x in (seen, expected)))
        elif issubclass(kind, type | FunctionType):
            self._differ("value", seen, expected)
        else:
            self._states(seen, expected)

    def _sequences(self, seen: Any, expected: Any) -> None:
        self._equal("length", len(seen), len(expected))
        for place, pair in enumerate(zip(seen, expected, strict=True)):
            self._at(f"[{place}]").same(*pair)

    def _arrays(self, seen: Any, expected: Any) -> None:
        self._equal("dtype", seen.dtype, expected.dtype)
        self._equal("shape", seen.shape, expected.shape)
        if seen.dtype.names:
            for name in seen.dtype.names:
                self._at(f"[{name!r}]").same(seen[name], expected[name])
        elif seen.dtype.kind in "OT":  # objects, or strings of any length
            self._sequences([*seen.flat], [*expected.flat])
        elif seen.tobytes() != expected.tobytes():
            self._differ("value", seen, expected)

    def _states(self, seen: Any, expected: Any) -> None:
        a, b = self._state(seen), self._state(expected)
        if isinstance(a, str) or isinstance(b, str):  # the name of a global, of which there is one
            self._differ("value", seen, expected)
        for name, *parts in zip(_STATE, a, b, strict=True):
            (self._at(name) if name else self).same(*parts)

    def _state(self, value: Any) -> str | list[Any]:
        """The state that pickle would write: the name of a global, or the six parts that _STATE lists."""
        try:
            reduce: Any = copyreg.dispatch_table.get(cast("Any", type(value)))
            state: Any = reduce(value) if reduce else value.__reduce_ex__(4)
            if isinstance(state, str):
                return state
            parts: list[Any] = [*state, *[None] * (6 - len(state))]
            parts[3:5] = (None if x is None else make(x) for make, x in zip((list, dict), parts[3:5], strict=True))
            return parts
        except Exception as error:  # code of the object's class runs here
            raise LayoutError(
                f"assert_exact: {self} has an object of {type(value)} without a state to compare ({error!r}); expected "
                "an object that can be pickled. Give its class a __reduce__ or __getstate__, or compare its parts."
            ) from error

    def _keys(self, seen: list[Any], expected: list[Any]) -> None:
        if len(seen) == len(expected) and all(map(self._match, seen, expected)):
            return
        self._unordered("keys", seen, expected)
        raise AssertionError(
            f"assert_exact: {self} differs in the order of its keys: seen {_names(seen)}, expected {_names(expected)}."
        )

    def _unordered(self, name: str, seen: Iterable[Any], expected: Iterable[Any]) -> None:
        a, b = _by_token(seen), _by_token(expected)
        new: list[Any] = []
        missing = [item for token, item in b.items() if token not in a]
        for item in (item for token, item in a.items() if token not in b):
            others = () if type(item) in _ATOMS else enumerate(missing)
            place = next((place for place, other in others if self._match(item, other)), None)
            if place is None:
                new.append(item)
            else:
                del missing[place]
        if new or missing:
            parts = [f"{_names(missing)} missing"] * bool(missing) + [f"{_names(new)} not expected"] * bool(new)
            raise AssertionError(f"assert_exact: {self} differs in its {name}: {', '.join(parts)}.")

    def _match(self, seen: Any, expected: Any) -> bool:
        """Whether two keys or elements are equal. If not, the pairs that the comparison visited are forgotten."""
        if _token(seen) == _token(expected):
            return True
        before = len(self.visited)
        try:
            self.same(seen, expected)
        except AssertionError:
            while len(self.visited) > before:
                self.visited.popitem()
            return False
        return True

    # ---------------------------------------------------------------- messages

    def _at(self, more: str) -> _Comparison:
        return dataclasses.replace(self, inside=self.inside + more if self.inside else f"at {more}")

    def __str__(self) -> str:
        name = f'field "{show(self.path)}"' if self.path else "the value"
        return f"{name}, {self.inside}," if self.inside else name

    def _equal(self, name: str, seen: Any, expected: Any) -> None:
        if seen != expected:
            self._differ(name, seen, expected)

    def _differ(self, name: str, seen: Any, expected: Any) -> NoReturn:
        a, b = _short(repr(seen)), _short(repr(expected))
        raise AssertionError(f"assert_exact: {self} differs in its {name}: seen {a}, expected {b}.")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _names(items: list[Any]) -> str:
    return _short(", ".join(map(repr, items)))


def _by_token(items: Iterable[Any]) -> dict[Any, Any]:
    """Items by their tokens; tokens that repeat (a set may hold several NaNs) are numbered."""
    counts: Counter[Any] = Counter()
    tokens: dict[Any, Any] = {}
    for item in items:
        token = _token(item)
        counts[token] += 1
        tokens[token, counts[token]] = item
    return tokens


def _token(value: Any) -> Any:
    """Two values with equal tokens have the same type and bits. Equal objects that are not atoms, nor tuples of atoms,
    may have different tokens."""
    kind = cast("type[Any]", type(value))
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind is tuple:
        return kind, tuple(map(_token, value))
    return (kind, value) if kind in _ATOMS else (object, id(value))
