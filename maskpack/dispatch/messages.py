"""Messages between the driver and the ranks of a call.

    driver   RankCall, objects -------------->   rank   decodes its rows, runs the method, packs the result
    driver   <-------------- RankReply, rows     rank

The objects are packed batches in the object store, which a RankCall refers to by number. Ray copies them to the node of
the rank before it calls the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from maskpack.core.tree import Node
from maskpack.errors import MaskpackError
from maskpack.fields.registry import Key, Path
from maskpack.packed.batch import PackedBatch
from maskpack.planning.plan import MicroBatchPlan
from maskpack.views.column_group import BatchMeta, ColumnGroup, assembled, narrowed
from maskpack.views.view import BatchView


class Cancelled(MaskpackError):
    """A call was cancelled before the rank answered: the reason of a rank in a WorkerError."""


class RemoteTraceback(Exception):
    """The traceback of a worker as text; it is the cause of the error that the worker raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class ObjectAt:
    """Stands for one of the objects of a RankCall."""

    place: int


@dataclass(frozen=True)
class RowsAt:
    """The rows of a view for one rank. The sources of its groups are numbers of objects; `whole` if every rank gets
    all rows."""

    groups: tuple[ColumnGroup, ...]
    order: tuple[Path, ...]
    root: Node
    whole: bool

    @classmethod
    def of(cls, view: BatchView, add: Callable[[Any], int], whole: bool = False) -> RowsAt:
        """`add` takes a reference and returns its number among the objects."""

        def numbered(group: ColumnGroup) -> ColumnGroup:
            alone = len(group.parts) == 1 and group.parts[0].meta.head is group.head
            sources = tuple(add(source.held) for source in group.parts)
            return replace(group, parts=sources, head=None if alone else group.head)

        return cls(tuple(map(numbered, view.groups)), view.order, view.head.schema.root, whole)

    def packed(self, objects: Sequence[Any], fields: Sequence[Key], call: str) -> PackedBatch:
        groups, order = narrowed(self.groups, self.order, fields, call)
        return assembled(groups, order, self.root, objects.__getitem__)


@dataclass(frozen=True)
class RankCall:
    """A method call of one actor.

    Attributes:
        args, kwargs: the arguments of the method. `RowsAt` stands for a batch, which is decoded; `ObjectAt` for an
            object.
        packing: the options of `compress` for the result.
        collects: whether the driver collects the result of this actor.
        keep: whether returned rows stay in the object store.
        plan: the micro-batches of its rows, if the call has a plan.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packing: Mapping[str, Any]
    collects: bool
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
class RankReply:
    """The answer of an actor. The rows that it returns are an object of their own.

    Attributes:
        has_rows: whether the method returned a TensorDict, alone or first in a tuple.
        rest: a result without rows, or the rest of the tuple; None if there is none.
        meta: the metadata of rows that stay in the object store.
        nbytes: the number of encoded bytes of the rows.
        begun: when the actor began, in seconds of `time.time` on its machine.
        seconds: of `decode`, `run` and `encode`.
        node: the id of the node that the actor runs on.
    """

    has_rows: bool
    rest: Any
    meta: BatchMeta | None
    nbytes: int
    begun: float
    seconds: Mapping[str, float]
    node: str
