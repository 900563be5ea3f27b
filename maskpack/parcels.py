"""What travels between the driver and the ranks, and the ranks' side of a call.

    driver   Parcel, objects --------------> rank   decodes its rows, runs the method, packs what it returned
    driver   <-------------- Receipt, rows   rank

The objects are packed batches in the object store, which a Parcel numbers; Ray brings them to the rank's node before
the method is called.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, ParamSpec, TypeVar, cast, overload

import torch
from tensordict import TensorDictBase

from maskpack.errors import LayoutError, MaskpackError
from maskpack.options import Registry
from maskpack.packed import PackedBatch, Target, compress, decompress
from maskpack.pool import Pool
from maskpack.registry import RL_FIELDS, Key, Path
from maskpack.strands import Outline, Strand, assembled, narrowed
from maskpack.tree import Node
from maskpack.views import BatchView

_MEMORY = Pool()
"""Of the padded tensors that methods see in this process; they die with the call, most of the time."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class At:
    """The object at a place among those that travel with a parcel."""

    place: int


@dataclass(frozen=True)
class RowsAt:
    """A rank's rows of a view, whose strands take them from objects by their places."""

    strands: tuple[Strand, ...]
    order: tuple[Path, ...]
    root: Node

    @classmethod
    def of(cls, view: BatchView, add: Callable[[Any], int]) -> RowsAt:
        """`add` takes a reference and gives its place among the objects."""

        def travelling(strand: Strand) -> Strand:
            alone = len(strand.sources) == 1 and strand.sources[0].outline.head is strand.head
            sources = tuple(add(source.held) for source in strand.sources)
            return replace(strand, sources=sources, head=None if alone else strand.head)

        return cls(tuple(map(travelling, view.strands)), view.order, view.head.schema.root)

    def packed(self, objects: Sequence[Any], fields: Sequence[Key], call: str) -> PackedBatch:
        strands, order = narrowed(self.strands, self.order, fields, call)
        return assembled(strands, order, self.root, objects.__getitem__)


@dataclass(frozen=True)
class Packing:
    """How a rank packs what it returns; `registry` None is RL_FIELDS, which need not travel."""

    registry: Registry | None
    pad_token_id: int | None
    codec: str | None


@dataclass(frozen=True)
class Parcel:
    """One rank's call.

    Attributes:
        args, kwargs: of the method. `RowsAt` stands for a batch, and is decoded; `At` for an object.
        packing: for the way back.
        speaks: whether what this actor returns is wanted.
        keep: whether the rows that it returns stay in the object store.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packing: Packing
    speaks: bool
    keep: bool

    def __getitem__(self, _: Any) -> NoReturn:
        raise MaskpackError(
            "WorkerGroup: a method was given packed rows, and took them for a TensorDict; expected a method that "
            "decodes them. Decorate the method with @endpoint."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self[name]


@dataclass(frozen=True)
class Receipt:
    """What a rank says beside the rows that it returns.

    Attributes:
        has_rows: whether the method returned a TensorDict, alone or first in a tuple.
        rest: what else it returned; the rest of the tuple; None if there is none.
        outline: of rows that stay in the object store.
        nbytes: encoded bytes of the rows.
        ms: `decode`, `run` and `encode`.
    """

    has_rows: bool
    rest: Any
    outline: Outline | None
    nbytes: int
    ms: Mapping[str, float]


# -------------------------------------------------------------------- the rank


@overload
def endpoint(method: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def endpoint(
    *, layout: Target = "padded", device: torch.device | str | None = None, fields: Sequence[Key] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    /,
    *,
    layout: Target = "padded",
    device: torch.device | str | None = None,
    fields: Sequence[Key] = (),
) -> Any:
    """Makes an actor method `method(self, batch, ...)` take packed rows and return packed rows.

    The method sees its batch as a TensorDict in `layout` on `device` (by default that of the driver), with the `fields`
    named, or all; other batches among its arguments come whole, in the same layout, on the same device. What it sees
    are copies, which it may write to. A TensorDict that it returns, alone or first in a tuple, padded or nested, must
    have the rows of its batch, and goes back packed under the batch's layouts; anything else goes back as it is.
    Called with a TensorDict, the method runs as if it were not decorated.
    """
    if method is None:
        return functools.partial(endpoint, layout=layout, device=device, fields=fields)
    if isinstance(fields, str):
        raise LayoutError(f"endpoint: fields is the string {fields!r}; expected names. Write [{fields!r}].")
    if inspect.iscoroutinefunction(method):
        raise MaskpackError(
            f"endpoint: {method.__name__} is an async method; expected a plain one, whose result can be packed. Run "
            "the coroutine inside a plain method."
        )

    @functools.wraps(method)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Parcel):
            return method(self, *args, **kwargs)
        return _served(functools.partial(method, self), method.__name__, args[0], args[1:], layout, device, fields)

    # Ray binds arguments to the signature of what is wrapped, and a parcel comes with its objects
    del served.__wrapped__
    return served


def _served(
    method: Callable[..., Any],
    name: str,
    parcel: Parcel,
    objects: Sequence[Any],
    layout: Target,
    device: torch.device | str | None,
    fields: Sequence[Key],
) -> tuple[Receipt, PackedBatch | None]:
    """The receipt and the packed rows: two objects, so that the rows may stay where they are."""
    begun = time.perf_counter()
    rows: list[PackedBatch] = []

    def decoded(value: Any) -> Any:
        if isinstance(value, At):
            return objects[value.place]
        if not isinstance(value, RowsAt):
            return value
        packed = value.packed(objects, () if rows else fields, name)
        rows.append(packed)
        with _MEMORY.used():
            return decompress(packed, layout=layout, device=device)

    args = [decoded(value) for value in parcel.args]
    kwargs = {key: decoded(value) for key, value in parcel.kwargs.items()}
    like = args[0].clone(recurse=False) if layout == "nested" else rows[0]  # the method may take entries out
    ready = time.perf_counter()
    result = method(*args, **kwargs)
    ran = time.perf_counter()
    packed, rest = _packed(result, name, parcel, rows[0].num_rows, like) if parcel.speaks else (None, None)
    outline = Outline.of(packed) if parcel.keep and packed is not None else None
    done = time.perf_counter()
    ms = {"decode": 1e3 * (ready - begun), "run": 1e3 * (ran - ready), "encode": 1e3 * (done - ran)}
    return Receipt(packed is not None, rest, outline, 0 if packed is None else packed.nbytes, ms), packed


def _packed(result: Any, name: str, parcel: Parcel, rows: int, like: Any) -> tuple[PackedBatch | None, Any]:
    items: tuple[Any, ...] = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    rest = items[1:] if items else None
    batch: Any = items[0] if items else cast("Any", result)
    if not isinstance(batch, TensorDictBase):
        return None, cast("Any", result)
    returned = batch.batch_size[0] if batch.batch_dims else None
    if returned != rows:
        raise LayoutError(
            f"{name}: returned a TensorDict of {returned} rows for a batch of {rows}; expected as many. Return one "
            "entry for each row, or a plain dict of metrics."
        )
    packing = parcel.packing
    registry = RL_FIELDS if packing.registry is None else packing.registry
    packed = compress(batch, registry=registry, pad_token_id=packing.pad_token_id, like=like, codec=packing.codec)
    return packed, rest
