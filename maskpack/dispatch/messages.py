"""What travels between the driver and the ranks of a call.

    driver   RankCall, objects --------------> rank   decodes its rows, runs the method, packs what it returned
    driver   <-------------- RankReply, rows   rank

The objects are packed batches in the object store, which a RankCall numbers; Ray brings them to the rank's node before
the method is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from maskpack.core.tree import Node
from maskpack.errors import MaskpackError
from maskpack.fields.options import Registry
from maskpack.fields.registry import Key, Path
from maskpack.packed.batch import PackedBatch
from maskpack.planning.plan import MicroBatchPlan
from maskpack.views.strand import Outline, Strand, assembled, narrowed
from maskpack.views.view import BatchView


@dataclass(frozen=True)
class ObjectAt:
    """The object at a place among those that travel with a rank_call."""

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
    strict: bool
    codec: str | None


class Turn(Protocol):
    """A Ticket of calls.py, as far as ranks know it."""

    def begin(self) -> bool: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class RankCall:
    """One rank's call.

    Attributes:
        args, kwargs: of the method. `RowsAt` stands for a batch, and is decoded; `At` for an object.
        packing: for the way back.
        collects: whether what this actor returns is wanted.
        keep: whether the rows that it returns stay in the object store.
        ticket: of its turn; an actor whose ticket was taken back does nothing.
        plan: of its rows, if the call has one.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packing: Packing
    collects: bool
    keep: bool
    ticket: Turn
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
    """What a rank says beside the rows that it returns.

    Attributes:
        has_rows: whether the method returned a TensorDict, alone or first in a tuple.
        rest: what else it returned; the rest of the tuple; None if there is none.
        outline: of rows that stay in the object store.
        nbytes: encoded bytes of the rows.
        ms: `decode`, `run` and `encode`.
        node: that the rank ran on.
    """

    has_rows: bool
    rest: Any
    outline: Outline | None
    nbytes: int
    ms: Mapping[str, float]
    node: str
