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
from maskpack.plan import MicroBatchPlan
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
    """A rank's rows of a view, whose strands take them from objects by their places; `whole` if every rank gets them
    all."""

    strands: tuple[Strand, ...]
    order: tuple[Path, ...]
    root: Node
    whole: bool

    @classmethod
    def of(cls, view: BatchView, add: Callable[[Any], int], whole: bool = False) -> RowsAt:
        """`add` takes a reference and gives its place among the objects."""

        def travelling(strand: Strand) -> Strand:
            alone = len(strand.sources) == 1 and strand.sources[0].outline.head is strand.head
            sources = tuple(add(source.held) for source in strand.sources)
            return replace(strand, sources=sources, head=None if alone else strand.head)

        return cls(tuple(map(travelling, view.strands)), view.order, view.head.schema.root, whole)

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
        plan: of its rows, if the call has one.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packing: Packing
    speaks: bool
    keep: bool
    plan: MicroBatchPlan | None = None

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
    *,
    layout: Target = "padded",
    device: torch.device | str | None = None,
    fields: Sequence[Key] = (),
    micro_batches: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    /,
    *,
    layout: Target = "padded",
    device: torch.device | str | None = None,
    fields: Sequence[Key] = (),
    micro_batches: bool = False,
) -> Any:
    """Makes an actor method `method(self, batch, ...)` take packed rows and return packed rows.

    The method sees its batch as a TensorDict in `layout` on `device` (by default that of the driver), with the `fields`
    named, or all; other batches among its arguments come whole, in the same layout, on the same device. What it sees
    are copies, which it may write to. A TensorDict that it returns, alone or first in a tuple, padded or nested, must
    have the rows of its batch, and goes back packed under the batch's layouts; anything else goes back as it is.
    Called with a TensorDict, the method runs as if it were not decorated.

    A call with a `plan` gives the method the MicroBatchPlan of its rows as the keyword argument `plan`. With
    `micro_batches` the method is called once for each micro-batch instead, of which alone it sees the decoded rows: the
    TensorDicts that it returns are joined in the order of the rows, of everything else there is a list with one item
    for each micro-batch; what it returns for dummies is dropped. Without a plan all rows are one micro-batch.
    """
    if method is None:
        return functools.partial(endpoint, layout=layout, device=device, fields=fields, micro_batches=micro_batches)
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
        bound = functools.partial(method, self)
        return _served(bound, method.__name__, args[0], args[1:], layout, device, fields, micro_batches)

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
    micro_batches: bool,
) -> tuple[Receipt, PackedBatch | None]:
    """The receipt and the packed rows: two objects, so that the rows may stay where they are."""
    timer = _Timer()
    whole: dict[int, bool] = {}  # by the id of packed rows, whether every rank has them all
    batches: list[PackedBatch] = []

    def given(value: Any) -> Any:
        if isinstance(value, At):
            return objects[value.place]
        if not isinstance(value, RowsAt):
            return value
        packed = value.packed(objects, () if batches else fields, name)
        whole[id(packed)] = value.whole
        batches.append(packed)
        return packed

    args = [given(value) for value in parcel.args]
    kwargs = {key: given(value) for key, value in parcel.kwargs.items()}

    def decoded(part: Sequence[int] | None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with some rows of what is divided, or all."""

        def one(value: Any) -> Any:
            if id(value) not in whole:
                return value
            rows = value if part is None or whole[id(value)] else value.select(part)
            with _MEMORY.used():
                return decompress(rows, layout=layout, device=device)

        return [one(value) for value in args], {key: one(value) for key, value in kwargs.items()}

    plan = parcel.plan
    like: Any = batches[0]
    results: list[Any] = []
    split = plan if micro_batches and plan is not None and plan.num_rows else None
    for part in [None] if split is None else split.micro_batches:
        some, more = decoded(part)
        if plan is not None and not micro_batches:
            more["plan"] = plan
        if layout == "nested" and part is None:
            like = some[0].clone(recurse=False)  # the method may take entries out
        timer.lap("decode")
        results.append(method(*some, **more))
        timer.lap("run")
    result = results[0] if split is None else _joined(results, split, name)
    packed, rest = _packed(result, name, parcel, batches[0].num_rows, like) if parcel.speaks else (None, None)
    outline = Outline.of(packed) if parcel.keep and packed is not None else None
    timer.lap("encode")
    return Receipt(packed is not None, rest, outline, 0 if packed is None else packed.nbytes, timer.ms), packed


class _Timer:
    """Milliseconds by phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {"decode": 0.0, "run": 0.0, "encode": 0.0}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.ms[phase] += 1e3 * (now - self._last)
        self._last = now


def _joined(results: list[Any], plan: MicroBatchPlan, name: str) -> Any:
    """What a method returned for its micro-batches, as if it had been called once."""
    real = [result for result, dummy in zip(results, plan.is_dummy, strict=True) if not dummy]
    kinds = sorted(set(map(_kind, real)))
    if len(kinds) > 1:
        raise LayoutError(
            f"{name}: returned {', '.join(kinds)} for its micro-batches; expected one kind of result. Return the same "
            "kind for each."
        )
    if isinstance(real[0], TensorDictBase):
        return plan.restore(results)
    if isinstance(real[0], tuple) and real[0] and isinstance(real[0][0], TensorDictBase):
        return (plan.restore([result[0] for result in results]), *map(list, list(zip(*real, strict=True))[1:]))
    return None if all(result is None for result in real) else real


def _kind(result: Any) -> str:
    if isinstance(result, TensorDictBase):
        return "a TensorDict"
    if isinstance(result, tuple):
        return f"a tuple of {len(cast('tuple[Any, ...]', result))}"
    return "None" if result is None else "something else"


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
