"""Ranks: the actors of each DP rank, where they are, and how a request is sent to them.

Request   method, arguments          Part  rank 0  rows 0 1 2   replies of its actors, returned rows
                                     Part  rank 1  rows 3 4 5
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import ray
import ray.actor
import torch

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.dispatch.division import ranks_of
from maskpack.dispatch.failures import storing
from maskpack.dispatch.messages import ObjectAt, RankCall, RankReply, RowsAt
from maskpack.dispatch.placement import Placement, Site
from maskpack.dispatch.timeline import Span, Timeline
from maskpack.errors import LayoutError, MaskpackError
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
    """The ranks of a group. Copies in other processes have the same actors, and put objects of their own.

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
        self.members, self._collectors = ranks_of(len(self.actors), dp_ranks, collect)
        self._packing = packing
        self.store = Placement(len(self.members))
        self.timeline = Timeline()

    def __len__(self) -> int:
        return len(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "store": None, "timeline": Timeline()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.store = Placement(len(self))

    def places(self, rank: int | None = None) -> list[tuple[int, int]]:
        """The rank and the number of each actor, or of those of one rank, in the order of `actors`."""
        ranks = range(len(self)) if rank is None else [rank]
        return sorted(((rank, actor) for rank in ranks for actor in self.members[rank]), key=lambda place: place[1])

    def replace(self, rank: int, actors: Sequence[Any]) -> None:
        new = dict(zip(self.members[rank], actors, strict=True))
        self.actors = tuple(new.get(place, actor) for place, actor in enumerate(self.actors))
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
        without = [actor for actor in actors if not hasattr(getattr(self.actors[actor], method, None), "remote")]
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
        plans = {} if request.plan is None else request.plan.for_rows(rows)
        nbytes = 0
        sites = self.by_site(rows)
        placed_on: list[dict[int, BatchView]] = [{} for _ in sites]
        for value in arguments:
            if isinstance(value, BatchView | Broadcast):
                view: BatchView = value.value if isinstance(value, Broadcast) else value
                needed = [
                    (site, np.arange(len(view)) if isinstance(value, Broadcast) else index) for site, _, index in sites
                ]
                with storing():
                    views, sent = self.store.spread(view, needed, again)
                nbytes += sent
                for placed, there in zip(placed_on, views, strict=True):
                    placed[id(value)] = there
        settled: list[tuple[int, slice, dict[int, BatchView]]] = []
        for (_, ranks, _), placed in zip(sites, placed_on, strict=True):
            end = 0
            for rank in ranks:
                begin, end = end, end + rows[rank].size
                settled.append((rank, slice(begin, end), placed))
        parts: dict[int, Part] = {}
        for rank, own, placed in settled:
            try:
                with storing():
                    parts[rank] = self._start(request, rank, rows[rank], placed, own, plans.get(rank))
            except (MaskpackError, _ray.exceptions.RayError) as error:
                if not parts:
                    raise
                parts[rank] = Part(rank, rows[rank], [], 0, None, error)
        return [parts[rank] for rank in rows], nbytes, Span(None, "put", begun, time.perf_counter() - begun)

    def _start(
        self,
        request: Request,
        rank: int,
        rows: IntArray,
        placed: Mapping[int, BatchView],
        own: slice,
        plan: MicroBatchPlan | None,
    ) -> Part:
        """Calls the actors of one rank. `own` are its rows among those of its site."""
        objects: list[Any] = []
        places: dict[Any, int] = {}

        def add(reference: Any) -> int:
            if reference not in places:
                places[reference] = len(objects)
                objects.append(reference)
            return places[reference]

        def travelling(value: Any) -> Any:
            if isinstance(value, Broadcast):
                return RowsAt.of(placed[id(value)], add, whole=True)
            if isinstance(value, BatchView):
                return RowsAt.of(placed[id(value)].take(own), add)
            return ObjectAt(add(value)) if isinstance(value, ray.ObjectRef) else value

        args = tuple(map(travelling, request.args))
        kwargs = {key: travelling(value) for key, value in request.kwargs.items()}
        replies: list[Any] = []
        packed: Any = None
        for actor in self.members[rank]:
            collects = actor == self._collectors[rank]
            rank_call = RankCall(args, kwargs, self._packing, collects, request.format == "view", plan)
            reply, returned = _started(self.actors[actor], request.method, rank_call, objects)
            replies.append(reply)
            packed = returned if collects else packed
        return Part(rank, rows, replies, self.members[rank].index(self._collectors[rank]), packed)


def _started(actor: Any, method: str, rank_call: RankCall, objects: Sequence[Any]) -> tuple[Any, Any]:
    """Calls a method of an actor. Returns references to its reply and its rows."""
    try:
        return getattr(actor, method).options(num_returns=2).remote(rank_call, *objects)
    except (AttributeError, TypeError, ValueError) as error:
        raise MaskpackError(
            f'WorkerGroup: the actors cannot be called by "{method}": {error}; expected a method that takes packed '
            "rows. Give its name, and decorate the method with @endpoint, without tensor_transport."
        ) from error
