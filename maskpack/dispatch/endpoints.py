"""`endpoint`: the call of a method on a rank. It decodes rows, runs the method, and packs the result.

RankCall, objects -> packed rows -> decoded, all at once or by micro-batch -> method -> packed, joined -> RankReply
"""

from __future__ import annotations

import functools
import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import flag, said
from maskpack.core.keys import need_keys
from maskpack.core.memory import Pool
from maskpack.core.objects import on_host
from maskpack.core.tree import Node
from maskpack.dispatch.messages import ObjectAt, RankCall, RankReply, RowsAt, Shared
from maskpack.dispatch.placement import this_node
from maskpack.errors import LayoutError, MaskpackError, PlanError
from maskpack.fields.registry import Key
from maskpack.nesting.schema import FieldForm
from maskpack.packed.batch import PackedBatch, Target, compress, decompress
from maskpack.planning.apply import join_rows
from maskpack.views.column_group import BatchMeta

_MEMORY = Pool()
"""Memory of the padded tensors that methods see; most of them are freed when the call ends."""
_options = functools.lru_cache(16)(pickle.loads)
"""The options of `compress`, of the bytes that the calls of a group have."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def endpoint(method: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def endpoint(
    *,
    format: Target = "padded",
    device: torch.device | str | None = None,
    fields: Sequence[Key] = (),
    micro_batches: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    /,
    *,
    format: Target = "padded",
    device: torch.device | str | None = None,
    fields: Sequence[Key] = (),
    micro_batches: bool = False,
) -> Any:
    """Decorates an actor method `method(self, batch, ...)` so that a WorkerGroup can call it with packed rows.

    The method receives a TensorDict and may return one; decoding and packing are done here. Called with a TensorDict,
    it runs as if it were not decorated.

    Args:
        format: of the batches that the method receives, "padded" or "nested". They are copies, which it may change.
        device: of these batches; by default the devices that the fields had on the driver.
        fields: the fields of the first batch that are decoded; by default all. Other batches among the arguments have
            all their fields.
        micro_batches: whether the method is called once for each micro-batch of a plan, with the rows of that
            micro-batch only.

    A returned TensorDict, alone or first in a tuple, padded or nested, must have the rows of the batch. It is packed
    under the layouts of the batch. Other results are returned unchanged. Tensors come back on the host, also those in
    dicts, lists and tuples, whatever their device was.

    In a call with a plan, the method receives the MicroBatchPlan of its rows as the keyword argument `plan`; with
    `micro_batches` it is called for each micro-batch instead. Then returned TensorDicts are joined in the order of the
    rows, and other results (except tensors with dims, which raise) become a list with one item for each micro-batch.
    Without a plan all rows are one micro-batch. Dummies run for their collectives, and only their results are dropped;
    a method with other side effects, such as training, takes `plan` instead. Batches that every rank gets whole are
    decoded again for each micro-batch.

    Raises:
        LayoutError, MaskpackError: an option is invalid, or the method is a coroutine or a generator.
    """
    need_keys(fields, "fields", "endpoint", LayoutError)
    flag(micro_batches, "micro_batches", "endpoint")
    if format not in ("padded", "nested"):
        raise LayoutError(f'endpoint: format is {said(format)}; expected "padded" or "nested". Choose one of these.')
    if device is not None and not isinstance(device, str | torch.device):
        raise LayoutError(f'endpoint: device is {said(device)}; expected one of torch. Pass "cuda" or "cpu".')
    if method is None:
        return functools.partial(endpoint, format=format, device=device, fields=fields, micro_batches=micro_batches)
    if not callable(method):
        raise MaskpackError(f"endpoint: got {said(method)}; expected a method. Write @endpoint above it.")
    unplain = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(test(method) for test in unplain):
        raise MaskpackError(
            f"endpoint: {method.__name__} is an async method or a generator; expected a plain method, whose result can "
            "be packed. Run the coroutine inside a plain method, and return one result in the place of yield."
        )

    takes_plan = any(
        name == "plan" or parameter.kind is parameter.VAR_KEYWORD
        for name, parameter in inspect.signature(method).parameters.items()
    )

    @functools.wraps(method)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], RankCall):
            return method(self, *args, **kwargs)
        if args[0].plan is not None and not takes_plan and not micro_batches:
            raise PlanError(
                f"{method.__name__}: called with a plan, and takes none; expected a parameter `plan`. Add it, decorate "
                "the method with @endpoint(micro_batches=True), or pass balance=plan.rows."
            )
        bound = functools.partial(method, self)
        return _served(bound, method.__name__, args[0], args[1:], format, device, fields, micro_batches)

    # Ray would bind arguments to the wrapped signature, which does not take a RankCall and its objects
    del served.__wrapped__
    return served


def _served(
    method: Callable[..., Any],
    name: str,
    rank_call: RankCall,
    objects: Sequence[Any],
    format: Target,
    device: torch.device | str | None,
    fields: Sequence[Key],
    micro_batches: bool,
) -> tuple[RankReply, PackedBatch | None]:
    """The reply and the packed rows: two objects, so that the rows can stay in the object store.

    The method is called for each micro-batch, or once. One micro-batch is decoded at a time, and its result is packed
    before the next.
    """
    timer = _Timer()

    def taken(value: Any, fields: Sequence[Key] = ()) -> Any:
        if isinstance(value, ObjectAt):
            return objects[value.place]
        if not isinstance(value, RowsAt):
            return value
        return _Rows(value.packed(rank_call.batches[value.place], objects, fields, name), value.whole)

    def decoded(value: Any, part: Sequence[int] | None) -> Any:
        if not isinstance(value, _Rows):
            return value
        with _MEMORY.used():
            return decompress(value.of(part), format=format, device=device, max_bytes=None)

    pickled = rank_call.shared
    shared: Shared = pickle.loads(pickled if isinstance(pickled, bytes) else objects[pickled])
    batch: _Rows = taken(shared.args[0], fields)
    given = [batch, *map(taken, shared.args[1:])]
    named = {key: taken(value) for key, value in shared.kwargs.items()}
    plan = rank_call.plan
    parts: list[Any] = [None]
    dummies: Sequence[bool] = [False]
    if micro_batches and plan is not None and plan.micro_batches:
        parts, dummies = plan.micro_batches, plan.is_dummy
    real = len(parts) - sum(dummies)  # 0 without rows: then results of dummies tell what an empty one is
    kinds: set[str] = set()
    packed: list[PackedBatch] = []
    rests: list[Any] = []
    for part, dummy in zip(parts, dummies, strict=True):
        args = [decoded(value, part) for value in given]
        kwargs = {key: decoded(value, part) for key, value in named.items()}
        if plan is not None and not micro_batches:
            kwargs["plan"] = plan
        rows = batch.of(part)
        like: Any = args[0].clone(recurse=False) if format == "nested" else rows  # the method may remove fields
        timer.lap("decode")
        result = method(*args, **kwargs)
        del args, kwargs
        timer.lap("run")
        if rank_call.collects and not (dummy and real):
            if micro_batches:
                kinds.add(_kind(result, name))
            own, rest = _packed(result, name, _options(shared.packing), rows.num_rows, like)
            packed += [] if own is None else [own]
            rests.append(rest)
        del result, like
        timer.lap("encode")
    if len(kinds) > 1:
        raise LayoutError(
            f"{name}: returned {', '.join(sorted(kinds))} for its micro-batches; expected one kind of result. Return "
            "the same kind for each."
        )
    whole, rest = packed[0] if packed else None, rests[0] if rests else None
    if whole is not None and len(parts) > 1:
        kept = [part for part, dummy in zip(parts, dummies, strict=True) if not (dummy and real)]
        whole = join_rows(whole, packed, kept, None)
    if micro_batches and whole is not None:
        rest = None if rest is None else tuple(list(items[:real]) for items in zip(*rests, strict=True))
    elif micro_batches:
        rest = None if all(rest is None for rest in rests) else rests[:real]
    meta = BatchMeta.of(whole) if shared.keep and whole is not None else None
    timer.lap("encode")
    nbytes = 0 if whole is None else whole.nbytes
    return RankReply(whole is not None, rest, meta, nbytes, timer.begun, timer.seconds, this_node()), whole


@dataclass(frozen=True)
class _Rows:
    """A packed batch among the arguments; `whole` if every micro-batch gets all its rows. A part is a list of rows,
    None for all rows."""

    packed: PackedBatch
    whole: bool

    def of(self, part: Sequence[int] | None) -> PackedBatch:
        return self.packed if part is None or self.whole else self.packed.take(part)


def _kind(result: Any, name: str) -> str:
    items: tuple[Any, ...] = cast("Any", result) if isinstance(result, tuple) else (result,)
    if items and isinstance(items[0], Tensor) and items[0].dim():
        raise LayoutError(
            f"{name}: returned a tensor for its micro-batches; expected a TensorDict, whose rows can be put in order. "
            'Return TensorDict({"name": tensor}, batch_size=batch.batch_size).'
        )
    if isinstance(result, tuple):
        return f"a tuple of {len(items)}"
    if isinstance(result, TensorDictBase):
        return "a TensorDict"
    return "None" if result is None else "something else"


class _Timer:
    """The time of day at which the rank began, and the seconds of each stage."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.seconds: dict[str, float] = {"decode": 0.0, "run": 0.0, "encode": 0.0}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


def _packed(result: Any, name: str, packing: Mapping[str, Any], rows: int, like: Any) -> tuple[PackedBatch | None, Any]:
    """Splits a result into packed rows (None without a TensorDict) and the rest."""
    items: tuple[Any, ...] = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    rest = items[1:] if items else None
    batch: Any = items[0] if items else cast("Any", result)
    if not isinstance(batch, TensorDictBase):
        return None, on_host(result)
    returned = batch.batch_size[0] if batch.batch_dims else None
    if returned != rows:
        raise LayoutError(
            f"{name}: returned a TensorDict of {returned} rows for a batch of {rows}; expected as many. Return one "
            "entry for each row, or a plain dict of metrics."
        )
    return _homed(compress(batch, **packing, like=like)), on_host(rest)


def _homed(packed: PackedBatch) -> PackedBatch:
    """The rows with the host as the device of all fields: the driver and other ranks may not have the device of this
    rank."""

    def home(node: Node) -> Node:
        return node if node.device is None else replace(node, device="cpu")

    def form_at_home(form: FieldForm) -> FieldForm:
        node = None if form.node is None else home(form.node)
        return replace(form, device=None if form.device is None else "cpu", node=node)

    schema = packed.schema
    schema = replace(schema, root=home(schema.root), forms=tuple(map(form_at_home, schema.forms)))
    objects = {path: replace(held, data=on_host(held.data)) for path, held in packed.objects.items()}
    return replace(packed, schema=schema, objects=objects)
