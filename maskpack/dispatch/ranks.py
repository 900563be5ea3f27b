"""Ranks: the actors of each DP rank, where they are, and how a request is sent to them.

Request   method, arguments          Part  rank 0  rows 0 1 2   replies of its actors, returned rows
                                     Part  rank 1  rows 3 4 5
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import ray
import ray.actor
import torch
from ray import cloudpickle

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.dispatch.division import ranks_of
from maskpack.dispatch.failures import storing
from maskpack.dispatch.messages import ObjectAt, RankCall, RankReply, RowsAt, Shared, own_rows
from maskpack.dispatch.placement import INLINED, Placement, Site
from maskpack.dispatch.timeline import Span, Timeline
from maskpack.errors import LayoutError, MaskpackError
from maskpack.packed.batch import PackedBatch
from maskpack.planning.plan import MicroBatchPlan
from maskpack.planning.ranks import RankPlans
from maskpack.views.view import BatchView

Results = Literal["padded", "nested", "view"]
"""The format of a result: decoded rows, or a BatchView of rows that stay in the object store."""
_Handle: Any = ray.actor.ActorHandle
_RESTARTING = 3
"""The state in Ray of an actor that died and is being restarted."""
_PATIENCE = 60.0
"""Seconds that a call waits for actors that are being restarted."""

_log = logging.getLogger(__name__)
_ray: Any = ray
_pickled: Callable[[Any], bytes] = cast("Any", cloudpickle).dumps
"""By value where the ranks cannot import a class."""


@dataclass(frozen=True)
class Broadcast:
    """A batch that every rank gets whole instead of a part."""

    value: Any


@dataclass(frozen=True)
class Request:
    """The arguments of a call, without the division of its rows.

    Attributes:
        method: the name of a method of the actors.
        args, kwargs: a BatchView is divided, the rows of a Broadcast go whole to every rank, an ObjectRef stands for a
            large object.
        format, device: of the result.
        grace: seconds that the other ranks have to answer once one has failed.
        plan: the plan of the rows for all ranks, if there is one.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    format: Results
    device: torch.device | str | None
    grace: float
    plan: RankPlans | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a rank: the reply and the rows (a PackedBatch, a BatchView or None) of the actor whose result is
    collected, and the stages of the rank."""

    reply: RankReply
    rows: Any
    spans: Sequence[Span]


@dataclass(eq=False)
class Part:
    """The rows of one rank, and what became of them.

        None ---- all actors of the rank have answered ----> Answer
          |------ an actor raised or died -----------------> its exception
          |------ the rank could not be called ------------> the reason
          '------ the call was cancelled ------------------> Cancelled

    The outcome of a rank that is late is None: the next `result` waits for it again.

    Attributes:
        rank: the number of the rank in the group.
        rows: int64 [n], row numbers of the batch.
        replies: a reference for each actor of the rank; empty if the part could not be sent, or was cancelled.
        collector: the index in `replies` of the actor whose result is collected.
        packed: a reference to the rows that the collector returns.
        outcome: the state above.
        sent: when its actors were called: by the driver's clock, and by the time of day.
    """

    rank: int
    rows: IntArray
    replies: list[Any]
    collector: int
    packed: Any
    outcome: Answer | BaseException | None = None
    sent: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.time()))

    @property
    def error(self) -> BaseException | None:
        return self.outcome if isinstance(self.outcome, BaseException) else None

    def unanswered(self) -> list[Any]:
        """The references of the actors that have neither answered nor died."""
        if not self.replies:
            return []
        return _ray.wait(self.replies, num_returns=len(self.replies), timeout=0, fetch_local=False)[1]


class Ranks:
    """The ranks of a group. Copies in other processes have the same actors, and put objects of their own. A fork has no
    copy: it shares the connections of its parent, which Ray would break, and wait for answers that never come.

    Attributes:
        actors: the handles, in the order given.
        members: the numbers of the actors of each rank.
        store: what was put into the object store, and the nodes of the ranks.
        timeline: the stages of the last calls.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        dp_ranks: Sequence[int] | None,
        collect: Sequence[bool] | None,
        packing: Mapping[str, Any],
    ) -> None:
        self.actors: tuple[Any, ...] = tuple(actors)
        self._process = os.getpid()
        self.members, self._collectors = ranks_of(len(self.actors), dp_ranks, collect)
        self._packing = _pickled(packing)
        self._methods: dict[tuple[str, int], Any] = {}
        self.store = Placement(len(self.members))
        self.timeline = Timeline()

    def __len__(self) -> int:
        return len(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "store": None, "timeline": Timeline(), "_methods": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._process = os.getpid()
        self.store = Placement(len(self))

    def is_fork(self) -> bool:
        return os.getpid() != self._process

    def need_process(self) -> None:
        """Raises MaskpackError in a fork."""
        if self.is_fork():
            raise MaskpackError(
                f"WorkerGroup: process {os.getpid()} is a fork of process {self._process}, which has the group; "
                "expected that one. Call the group there, or pass it to a task or an actor of Ray."
            )

    def places(self, rank: int | None = None) -> list[tuple[int, int]]:
        """The rank and the number of each actor, or of those of one rank, in the order of `actors`."""
        self.need_process()
        ranks = range(len(self)) if rank is None else [rank]
        return sorted(((rank, actor) for rank in ranks for actor in self.members[rank]), key=lambda place: place[1])

    def replace(self, rank: int, actors: Sequence[Any]) -> None:
        new = dict(zip(self.members[rank], actors, strict=True))
        self.actors = tuple(new.get(place, actor) for place, actor in enumerate(self.actors))
        self._methods = {}
        self.store = Placement(len(self))

    def by_site(self, rows: Mapping[int, IntArray]) -> list[tuple[Site, list[int], IntArray]]:
        """Each site with its ranks, and the rows of these ranks."""
        sites = self.store.sites()
        ranks: dict[Site, list[int]] = {}
        for rank in rows:
            ranks.setdefault(sites[rank], []).append(rank)
        return [(site, own, np.concatenate([rows[rank] for rank in own])) for site, own in ranks.items()]

    # ---------------------------------------------------------------- sending

    def prepare(self, method: str, actors: Sequence[int], kind: str, until: float) -> None:
        """Raises LayoutError unless all actors have the method. Waits for actors that Ray is restarting: they take no
        calls before they are constructed."""
        if not isinstance(method, str):
            raise LayoutError(f'WorkerGroup: method is {said(method)}; expected the name of one. Pass it: "update".')
        fresh = [actor for actor in actors if (method, actor) not in self._methods]
        without = [actor for actor in fresh if not hasattr(getattr(self.actors[actor], method, None), "remote")]
        if without:
            who = "the actors have" if len(without) == len(actors) else f"actors {without} have"
            raise LayoutError(
                f'WorkerGroup: {who} no method "{method}"; expected one of theirs. Give the name of {kind}'
            )
        until = min(until, time.monotonic() + _PATIENCE)
        given: list[Any] = [self.actors[actor] for actor in actors]
        handles = [handle for handle in given if isinstance(handle, _Handle)]
        told = False
        while any(handle._get_local_state() == _RESTARTING for handle in handles):
            if not told:
                _log.info("waits for actors that Ray restarts, up to %.0f s", until - time.monotonic())
                told = True
            if time.monotonic() > until:
                return  # their calls will raise
            time.sleep(0.05)

    def send(
        self, request: Request, rows: Mapping[int, IntArray], *, again: bool = False, until: float = math.inf
    ) -> tuple[list[Part], int, Span]:
        """Sends a request to some ranks, each with its rows of the batches; `again` puts objects anew that may have
        been lost. It waits until `until` for actors that Ray restarts. Returns their parts, the number of bytes that
        were put, and the stage of putting them.

        All objects are put before the first rank is called. If a later rank cannot be called, its part has the error.
        """
        begun = time.perf_counter()
        actors = [actor for rank in rows for actor in self.members[rank]]
        self.prepare(request.method, actors, "a method that is decorated with @endpoint.", until)
        arguments = [*request.args, *request.kwargs.values()]
        views = {id(value): value for value in arguments if isinstance(value, BatchView | Broadcast)}
        plans = {} if request.plan is None else request.plan.for_rows(rows)
        nbytes = 0
        by_site = self.by_site(rows)
        sites: list[tuple[list[int], dict[int, BatchView]]] = [(ranks, {}) for _, ranks, _ in by_site]
        for key, value in views.items():
            view: BatchView = value.value if isinstance(value, Broadcast) else value
            every = np.arange(view.num_rows) if isinstance(value, Broadcast) else None
            needed = [(site, index if every is None else every) for site, _, index in by_site]
            with storing():
                there, sent = self.store.spread(view, needed, again)
            nbytes += sent
            for (_, placed), own in zip(sites, there, strict=True):
                placed[key] = own
        shared, objects = self._shared(request, views, sites, empty=any(not own.size for own in rows.values()))
        parts: dict[int, Part] = {}
        for ranks, placed in sites:
            end = 0
            for rank in ranks:
                begin, end = end, end + rows[rank].size
                own = [
                    (view, None if isinstance(views[key], Broadcast) else slice(begin, end))
                    for key, view in placed.items()
                ]
                try:
                    with storing():
                        parts[rank] = self._start(
                            request.method, rank, rows[rank], shared, own, objects, plans.get(rank)
                        )
                except (MaskpackError, _ray.exceptions.RayError) as error:
                    if not parts:
                        raise
                    parts[rank] = Part(rank, rows[rank], [], 0, None, error)
        return [parts[rank] for rank in rows], nbytes, Span(None, "put", begun, time.perf_counter() - begun)

    def _shared(
        self,
        request: Request,
        views: Mapping[int, BatchView | Broadcast],
        sites: Sequence[tuple[list[int], dict[int, BatchView]]],
        empty: bool,
    ) -> tuple[bytes | int, list[Any]]:
        """What all ranks get: a pickled Shared, or the number of the object that it is, and the first objects.
        `empty` if a rank gets no rows."""
        objects: list[Any] = []
        places = {key: place for place, key in enumerate(views)}

        def travelling(value: Any) -> Any:
            if isinstance(value, ray.ObjectRef):
                objects.append(value)
                return ObjectAt(len(objects) - 1)
            if not isinstance(value, BatchView | Broadcast):
                return value
            key, whole = id(value), isinstance(value, Broadcast)
            return RowsAt.of(places[key], [placed[key] for _, placed in sites], whole, empty and not whole)

        args = tuple(map(travelling, request.args))
        kwargs = {key: travelling(value) for key, value in request.kwargs.items()}
        pickled = _pickled(Shared(args, kwargs, self._packing, request.format == "view"))
        if len(pickled) <= INLINED:
            return pickled, objects
        return len(objects), [*objects, ray.put(pickled)]

    def _start(
        self,
        method: str,
        rank: int,
        rows: IntArray,
        shared: bytes | int,
        own: Sequence[tuple[BatchView, slice | None]],
        first: Sequence[Any],
        plan: MicroBatchPlan | None,
    ) -> Part:
        """Calls the actors of one rank. `own` are the views of its site, and its rows among them; `first` the objects
        that all ranks get."""
        objects = list(first)
        places: dict[Any, int] = {}

        def add(held: Any) -> int:
            if held not in places:
                places[held] = len(objects)
                objects.append(self.store.pickled(held) if isinstance(held, PackedBatch) else held)
            return places[held]

        batches = tuple([tuple([own_rows(group, part, add) for group in view.groups]) for view, part in own])
        replies: list[Any] = []
        packed: Any = None
        for actor in self.members[rank]:
            collects = actor == self._collectors[rank]
            reply, returned = self._started(actor, method, RankCall(shared, batches, collects, plan), objects)
            replies.append(reply)
            packed = returned if collects else packed
        return Part(rank, rows, replies, self.members[rank].index(self._collectors[rank]), packed)

    def _started(self, actor: int, method: str, rank_call: RankCall, objects: Sequence[Any]) -> tuple[Any, Any]:
        """Calls a method of an actor. Returns references to its reply and its rows."""
        methods = self._methods  # of these actors, also if another thread replaces some
        try:
            if (method, actor) not in methods:
                methods[method, actor] = getattr(self.actors[actor], method).options(num_returns=2)
            return methods[method, actor].remote(rank_call, *objects)
        except (AttributeError, TypeError, ValueError) as error:
            raise MaskpackError(
                f'WorkerGroup: the actors cannot be called by "{method}": {error}; expected a method that takes packed '
                "rows. Give its name, and decorate the method with @endpoint, without tensor_transport."
            ) from error
