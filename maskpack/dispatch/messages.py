"""Messages between the driver and the ranks of a call.

    driver   RankCall, objects -------------->   rank   decodes its rows, runs the method, packs the result
    driver   <-------------- RankReply, rows     rank

The objects are packed batches, which a RankCall refers to by number: in the object store, from which Ray copies them to
the node of the rank before it calls the method; or their bytes, if they are small. What all ranks get alike is pickled
once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from maskpack.core.tree import Node
from maskpack.errors import MaskpackError
from maskpack.fields.registry import Key, Path
from maskpack.packed.batch import PackedBatch
from maskpack.packed.rows import Segments
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


OwnRows = tuple[tuple[int, ...], Segments | tuple[int, int]]
"""The rows that a rank gets of a column group: the numbers of the objects that have them, and which of their rows;
(start, count) for one slice of one object."""


def own_rows(group: ColumnGroup, rows: slice | None, add: Callable[[Any], int]) -> OwnRows:
    """A slice of the rows of a group, or all. `add` takes the batch of a source, or a reference to it, and returns its
    number among the objects."""
    part = slice(0, group.rows.num_rows) if rows is None else rows
    if len(group.parts) == 1 and group.rows.start.size == 1 and part.start < part.stop:
        return (add(group.parts[0].held),), (int(group.rows.start[0]) + part.start, part.stop - part.start)
    group = group.take(part)
    return tuple([add(source.held) for source in group.parts]), group.rows


class RowsAt(NamedTuple):
    """Stands for a batch among the arguments.

    Attributes:
        place: the number of the batch among those of a RankCall, which has the rows.
        groups: the fields of each column group, and their head; None if it is the head of the only object.
        order, root: of the view.
        whole: whether every rank gets all rows.
    """

    place: int
    groups: tuple[tuple[tuple[Path, ...], PackedBatch | None], ...]
    order: tuple[Path, ...]
    root: Node
    whole: bool

    @classmethod
    def of(cls, place: int, views: Sequence[BatchView], whole: bool, empty: bool) -> RowsAt:
        """Of the views of all sites, which have the same fields; `empty` if a rank may get no rows of them."""
        first = views[0]

        def head(number: int) -> PackedBatch | None:
            groups = [view.groups[number] for view in views]
            alone = all(len(group.parts) == 1 and group.parts[0].meta.head is group.head for group in groups)
            return None if alone and not empty else groups[0].head

        groups = tuple((group.paths, head(number)) for number, group in enumerate(first.groups))
        return cls(place, groups, first.order, first.head.schema.root, whole)

    def packed(self, own: Sequence[OwnRows], objects: Sequence[Any], fields: Sequence[Key], call: str) -> PackedBatch:
        groups: list[ColumnGroup] = []
        for (paths, head), (numbers, rows) in zip(self.groups, own, strict=True):
            segments = rows if isinstance(rows, Segments) else Segments(*np.array([[0], [rows[0]], [rows[1]]]))
            groups.append(ColumnGroup(paths, numbers, segments, head=head))
        kept, order = narrowed(groups, self.order, fields, call)

        def fetch(number: int) -> PackedBatch:
            held = objects[number]
            return pickle.loads(held) if isinstance(held, bytes) else held

        return assembled(kept, order, self.root, fetch)


class Shared(NamedTuple):
    """What all ranks of a call get.

    Attributes:
        args, kwargs: the arguments of the method. `RowsAt` stands for a batch, which is decoded; `ObjectAt` for an
            object.
        packing: the options of `compress` for the result, pickled.
        keep: whether returned rows stay in the object store.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packing: bytes
    keep: bool


@dataclass(frozen=True)
class RankCall:
    """A method call of one actor.

    Attributes:
        shared: a pickled Shared, or the number of the object that it is.
        batches: the rows that the rank gets of each batch among the arguments, by column group.
        collects: whether the driver collects the result of this actor.
        plan: the micro-batches of its rows, if the call has a plan.
    """

    shared: bytes | int
    batches: tuple[tuple[OwnRows, ...], ...]
    collects: bool
    plan: MicroBatchPlan | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RankCall, (self.shared, self.batches, self.collects, self.plan)

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
