"""Call: a call that was sent to the ranks. It waits for the replies, joins the results, and can send rows again.

    Part  rank 0  rows 0 1 2   replies of its actors, returned rows   answered | failed | open
    Part  rank 1  rows 3 4 5

`retry` sends the rows of parts without a result again and keeps the results of the others. An actor runs what it was
sent, also when the driver waits no more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import numpy as np
import ray
import torch
from tensordict import TensorDict

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.dispatch.messages import Cancelled, RankReply, RemoteTraceback
from maskpack.dispatch.placement import nodes_alive
from maskpack.dispatch.timeline import PREFIX, STAGES, CallTimes, Span, rank_spans
from maskpack.errors import LayoutError, MaskpackError, StorageError, WorkerError
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.planning.ranks import RankPlans
from maskpack.views.column_group import BatchMeta
from maskpack.views.view import BatchView

Results = Literal["padded", "nested", "view"]
"""The format of a result: decoded rows, or a BatchView of rows that stay in the object store."""

_log = logging.getLogger(__name__)
_ray: Any = ray
_LOOK = 0.1
"""Seconds between two checks of a waiting thread whether the call is still awaited."""


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


@dataclass
class Part:
    """The rows of one rank, and their state.

    Attributes:
        rank: the number of the rank in the group.
        rows: int64 [n], row numbers of the batch.
        replies: a reference for each actor of the rank; empty if the part could not be sent, or was cancelled.
        collector: the index in `replies` of the actor whose result is collected.
        packed: a reference to the rows that the collector returns.
        reply, result: of the collector, once all actors have answered. `result` is a PackedBatch or a BatchView.
        error: the reason if there is no reply.
        sent: when its actors were called: by the driver's clock, and by the time of day.
        spans: its stages, once there is a reply.
        told: the error that was logged.
    """

    rank: int
    rows: IntArray
    replies: list[Any]
    collector: int
    packed: Any
    reply: RankReply | None = None
    result: Any = None
    error: BaseException | None = None
    sent: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.time()))
    spans: Sequence[Span] = ()
    told: BaseException | None = None

    @property
    def late(self) -> bool:
        """Whether the part has not answered yet: no reply, and no error but the timeout of the driver."""
        return self.reply is None and (self.error is None or isinstance(self.error, _Late))

    @property
    def lost(self) -> bool:
        """Whether one of its actors has died, cannot be reached, or has not answered (it may wait for a peer that
        failed). False for a part that was never sent, or was cancelled."""
        return not self.answered or (bool(self.replies) and isinstance(self.error, _ray.exceptions.RayActorError))

    @property
    def away(self) -> bool:
        """Whether one of its actors cannot be reached: it is dying, or Ray is restarting it."""
        return isinstance(self.error, _ray.exceptions.ActorUnavailableError)

    @property
    def answered(self) -> bool:
        """Whether each of its actors has answered or died."""
        return not _open(self.replies)


@dataclass(frozen=True)
class Failure:
    """A rank without a result.

    Attributes:
        rank: the number of the rank.
        rows: int64 [n], row numbers of the batch; None for a method without a batch.
        error: the reason.
        traceback: the traceback of the worker if its code raised the error, else empty. It is also the cause of
            `error`.
        actor: the number of the actor in the group, for a method without a batch.
    """

    rank: int
    rows: IntArray | None
    error: BaseException
    traceback: str = ""
    actor: int | None = None

    @classmethod
    def of(cls, rank: int, rows: IntArray | None, error: BaseException, actor: int | None = None) -> Failure:
        if isinstance(error, _Late):
            error = TimeoutError(*error.args)
        remote = error.__cause__
        return cls(rank, rows, error, remote.args[0] if isinstance(remote, RemoteTraceback) else "", actor)

    def __post_init__(self) -> None:
        if self.traceback:  # pickling the error drops its cause
            self.error.__cause__ = RemoteTraceback(self.traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.rank, self.rows, self.error, self.traceback, self.actor)

    @property
    def name(self) -> str:
        if self.rows is not None:
            return f"rank {self.rank} ({_said(self.rows)})"
        return f"rank {self.rank}" if self.actor is None else f"rank {self.rank}, actor {self.actor}"

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines() or [""]
        if isinstance(self.error, MaskpackError):  # it may list fields on several lines
            lines = [" ".join(map(str.strip, lines))]
        reason = next((line for line in reversed(lines) if line.strip()), "") if len(lines) > 1 else lines[0]
        return f"{self.name}: {type(self.error).__name__}: {reason[:300].rstrip('.')}"


class Sender(Protocol):
    """The part of a WorkerGroup that calls use."""

    @property
    def num_ranks(self) -> int: ...

    def send(self, request: Request, rows: Mapping[int, IntArray], *, again: bool) -> tuple[list[Part], int, Span]:
        """Sends the request to some ranks; `again` puts objects anew that may have been lost. Returns their parts, the
        number of bytes that were put, and the stage of putting them."""
        ...

    def returned(self, call: CallTimes, metrics: Mapping[str, float]) -> None:
        """Records a call that returned."""
        ...

    def failed(self, method: str, failure: Failure, lost: bool) -> None:
        """Records that a rank failed; `lost` if an actor of it died or cannot be reached."""
        ...

    def ran_on(self, rank: int, nodes: Sequence[str]) -> None:
        """Records the nodes of the actors of a rank."""
        ...

    def nodes_alive(self, died: Collection[int]) -> set[str]:
        """The nodes that are alive, after actors of some ranks have died."""
        ...

    def ranks_off(self, nodes: Collection[str]) -> set[int]:
        """The ranks that are on other nodes than these."""
        ...


@dataclass(eq=False, repr=False)
class Call:
    """A call that was sent. `result` waits for its result; the call can also be awaited."""

    group: Sender
    request: Request
    parts: list[Part]
    metrics: dict[str, float]
    """A flat dict for a logger; complete once `result` has returned."""
    spans: tuple[Span, ...] = ()
    """The stages of the driver, also those of earlier attempts."""
    lost: frozenset[int] = frozenset()
    """The ranks that earlier attempts lost; a retry does not use them."""
    attempts: int = 1
    """The number of times that rows were sent."""
    _begun: float = field(default_factory=lambda: time.perf_counter())
    _done: bool = False
    _value: Any = None
    _turn: Any = field(default_factory=threading.Lock)
    """Held by the thread that waits for the ranks; other threads wait for that one."""
    _guard: Any = field(default_factory=threading.Lock)
    """Guards the two attributes below, and the parts against `cancel`."""
    _future: Future[Any] | None = None
    """The future that all awaits share; one thread waits for the ranks."""
    _awaiting: int = 0

    def __await__(self) -> Generator[Any, None, Any]:
        with self._guard:
            self._awaiting += 1
            if self._future is None:
                self._future = Future()
                self._future.set_running_or_notify_cancel()
                # asyncio would join a thread of its executor on exit
                threading.Thread(target=self._watch, args=(self._future,), daemon=True).start()
            future = self._future
        try:
            return (yield from asyncio.wrap_future(future).__await__())
        finally:
            with self._guard:
                self._awaiting -= 1

    def _is_awaited(self) -> bool:
        return self._awaiting > 0

    def _watch(self, future: Future[Any]) -> None:
        """Waits for the ranks as long as the call is awaited."""
        while True:
            try:
                value, error = self._result(math.inf, self._is_awaited), None
            except BaseException as raised:
                value, error = None, raised
            with self._guard:
                if isinstance(error, _Unwanted) and self._awaiting:
                    continue
                self._future = None
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            return

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return not _open([ref for part in self.parts if part.late for ref in part.replies])

    def cancel(self) -> list[int]:
        """Gives up the ranks that have not answered, and returns them.

        They run what they were sent, and later calls wait behind it, but the results are dropped. `result` then raises
        a WorkerError that names these ranks, and `retry` sends their rows again, also to them.
        """
        given_up = Cancelled("cancelled before it answered; the rank runs it, and its result is dropped")
        with self._guard:
            dropped = {
                id(part): replace(part, replies=[], packed=None, error=given_up)
                for part in self.parts
                if not part.answered
            }
            if dropped:  # the thread that waits looks for another list
                self.parts = [dropped.get(id(part), part) for part in self.parts]
        return sorted(part.rank for part in dropped.values())

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result, which is that of `WorkerGroup.call`.

        Args:
            timeout: the largest number of seconds to wait. None waits until every rank has answered or failed.

        Raises:
            WorkerError: ranks failed or did not answer in time, or their results do not fit together. A later `result`
                collects the answers of late ranks.
        """
        try:
            return self._result(deadline(timeout, "Call.result"))
        except KeyboardInterrupt as stop:
            cast("Any", stop).call = self
            if hasattr(stop, "add_note"):
                cast("Any", stop).add_note(
                    f'WorkerGroup: "{self.request.method}" goes on on the ranks that have not answered. The Call is '
                    "the attribute `call` of this KeyboardInterrupt: its result() waits for them again."
                )
            raise

    def _result(self, until: float, wanted: Callable[[], bool] = lambda: True) -> Any:
        timeout = left(until)
        if not self._turn.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self._check()  # another thread waits for these ranks, with its own timeout
            self._turn.acquire()  # all ranks have answered, and the other thread decodes the results
        try:
            if not self._done:
                self._finish(until, wanted)
            return self._value
        finally:
            self._turn.release()

    def retry(self, group: Sender | None = None) -> Call:
        """Sends the rows without a result again, to the ranks that are alive or to those of another group.

        The returned call keeps the results of this one. Rows of a view whose node is gone are sent again, and ranks on
        such nodes are left out. If actors have died, this waits until their nodes have answered, or Ray knows that they
        are gone. A plan is made anew for the rows. The result has the same format and device.

        Raises:
            MaskpackError: every rank was lost and no group is given; or the plan has several updates, loss tokens or
                groups, so that its rows cannot be divided anew.
        """
        request, parts = self.request, self.parts  # in this order: another thread may finish the call
        dead = {part.rank for part in parts if isinstance(part.error, _ray.exceptions.RayActorError)}
        alive = self.group.nodes_alive(dead) if parts else set[str]()
        gone = _rows_gone(parts, alive)
        failed = [part for part in parts if part.reply is None or id(part) in gone]
        kept = [part for part in parts if all(part is not other for other in failed)]
        if not failed:
            return self
        if not self._divisible():
            raise MaskpackError(
                f'WorkerGroup: "{request.method}" was called with a plan of several updates, loss tokens or '
                "groups; expected one whose rows may be sent in other parts. Run the whole call again."
            )
        to = self.group if group is None else group
        lost = self.lost.union(part.rank for part in failed if part.lost) if group is None else frozenset[int]()
        away = {part.rank for part in failed if part.away}  # they may be back when this call fails
        ranks = [rank for rank in range(to.num_ranks) if rank not in lost]
        off = to.ranks_off(alive)
        ranks = [rank for rank in ranks if rank not in off] or ranks  # they may have been started elsewhere
        ranks = ranks or sorted(away if group is None else ())
        if not ranks:
            raise MaskpackError(
                f'WorkerGroup: every rank that "{request.method}" was sent to is lost or late; expected one that '
                "is alive. Start actors and pass their group: call.retry(group)."
            )
        missing = np.sort(np.concatenate([part.rows for part in failed]))
        ranks = ranks[: max(1, missing.size)]  # one is called where there are no rows, for an empty result
        rows = dict(zip(ranks, np.array_split(missing, len(ranks)), strict=True))
        _log.info('"%s": sends %d rows again, to ranks %s; lost: %s', request.method, missing.size, ranks, sorted(lost))
        sent, nbytes, put = to.send(request, rows, again=True)
        # results without rows are a list in this order
        parts = sorted([*sent, *kept], key=lambda part: part.rows[:1].tolist())
        metrics = self.metrics | {f"{PREFIX}bytes_sent": self.metrics[f"{PREFIX}bytes_sent"] + nbytes}
        return Call(to, request, parts, metrics, (*self.spans, put), lost - away, self.attempts + 1)

    # ---------------------------------------------------------------- waiting

    def _finish(self, until: float, wanted: Callable[[], bool]) -> None:
        self._collect(until, wanted)
        gone = _rows_gone(self.parts, nodes_alive()) if self.request.format == "view" else {}
        for part in self.parts:
            if id(part) in gone:
                part.reply, part.result, part.error = None, None, gone[id(part)]
        self._tell()
        self._check()
        begun = time.perf_counter()
        request, parts = self.request, self.parts
        try:
            self._value = _gathered(parts, request)
        except LayoutError as error:
            method = request.method
            raise WorkerError(
                f'WorkerGroup: what the ranks returned from "{method}" does not fit together: {error}', method, (), self
            ) from error
        with self._guard:
            self._done, self.parts = True, []
        self.request = replace(request, args=(), kwargs={})
        self._count(parts, begun)  # an error in it leaves the result to the next `result`

    def _collect(self, until: float, wanted: Callable[[], bool]) -> None:
        """Collects replies until all parts are settled, the timeout is over, or the grace after a failure is over."""
        begun = time.perf_counter()
        graced = math.inf
        parts = self.parts
        if any(part.reply is None and not part.late for part in parts):  # failed in an earlier `result`
            graced = time.monotonic() + self.request.grace
        owner = {ref: part for part in parts if part.late for ref in part.replies}
        for part in owner.values():
            part.error = None
        waiting = list(owner)
        while waiting:
            rest = max(0.0, min(until, graced) - time.monotonic())
            ready, waiting = _ray.wait(waiting, num_returns=1, timeout=min(rest, _LOOK), fetch_local=False)
            if not wanted():
                raise _Unwanted
            if self.parts is not parts:  # cancelled by another thread
                self._collect(until, wanted)
                return
            if not ready and rest <= _LOOK:
                break
            for ref in ready:
                part = owner[ref]
                if all(peer not in waiting for peer in part.replies):
                    self._settle(part, until, begun)
                elif part.error is None:
                    part.error = _got([ref], left(until))[1]  # its peers may wait for it forever
                if part.error is not None:
                    graced = min(graced, time.monotonic() + self.request.grace)
        for part in (owner[ref] for ref in waiting):
            if part.late:
                waited = f"no answer in {time.perf_counter() - self._begun:.1f} s"
                grace = f", {self.request.grace} s of grace after another rank failed" if graced < until else ""
                part.error = _Late(waited + grace)

    def _tell(self) -> None:
        """Logs and counts the ranks that failed, each once."""
        for part in self.parts:
            error = part.error
            if error is None or error is part.told or isinstance(error, Cancelled | _Late):
                continue
            part.told = error
            lost = isinstance(error, _ray.exceptions.RayActorError)
            failure = Failure.of(part.rank, part.rows, error)
            _log.log(logging.WARNING if lost else logging.INFO, '"%s" failed on %s', self.request.method, failure)
            self.group.failed(self.request.method, failure, lost)

    def _settle(self, part: Part, until: float, waited: float) -> None:
        """Sets the reply, the result or the error of a part that all its actors have answered. `waited` is when the
        driver began to wait."""
        replies, part.error = _got(part.replies, left(until))
        if part.error is None:
            reply: RankReply = replies[part.collector]
            self.group.ran_on(part.rank, [each.node for each in replies])
            if reply.has_rows and self.request.format == "view":
                part.result = BatchView.at(part.packed, cast("BatchMeta", reply.meta))
            elif reply.has_rows:
                (part.result,), part.error = _got([part.packed], left(until))
            part.reply = reply if part.error is None else None
            if part.reply is not None:
                now = time.perf_counter()
                part.spans = rank_spans(part.rank, *part.sent, waited, now, part.reply.begun, part.reply.seconds)
        if part.error is not None:
            for reference in (*part.replies, part.packed):  # Ray would log errors that were never fetched
                _got([reference], 0)

    def _check(self) -> None:
        failures = tuple(
            Failure.of(part.rank, part.rows, part.error or _Late("no answer"))
            for part in self.parts
            if part.reply is None
        )
        if failures:
            ranks = self.group.num_ranks
            kept = "The results of the others are kept: " if len(failures) < len(self.parts) else ""
            raise _failed(
                f"{len(failures)} of {ranks} ranks", self.request.method, failures, kept + self._remedy(), self
            )

    def _remedy(self) -> str:
        if self._divisible():
            return "error.call.retry() sends the missing rows again."
        return "Run the whole call again, from a checkpoint: by its plan no part can be sent again."

    def _divisible(self) -> bool:
        return self.request.plan is None or self.request.plan.divisible

    def _count(self, parts: Sequence[Part], gathering: float) -> None:
        now = time.perf_counter()
        replies = [part.reply for part in parts if part.reply is not None]
        ranks = [span for part in parts for span in part.spans]
        call = CallTimes(self.request.method, (*self.spans, *ranks, Span(None, "gather", gathering, now - gathering)))
        took = call.slowest()
        more = {
            "wait_seconds": gathering - self._begun,
            "bytes_returned": float(sum(reply.nbytes for reply in replies)),
            "bytes_avoided": self.metrics[f"{PREFIX}bytes_padded"] - self.metrics[f"{PREFIX}bytes_sent"],
            "retries": float(self.attempts - 1),
            "lost_ranks": float(len(self.lost)),
            **{f"{stage}_seconds": took.get(stage, 0.0) for stage in STAGES},
        }
        self.metrics |= {PREFIX + name: value for name, value in more.items()}
        _log.debug('"%s" returned in %.3f s; the slowest stages took %s s', call.method, call.end - call.begin, took)
        self.group.returned(call, self.metrics)


def _rows_gone(parts: Sequence[Part], alive: Collection[str]) -> dict[int, BaseException]:
    """The parts, by `id`, whose rows stayed in the object store and were lost with their node, each with an error."""
    gone: dict[int, BaseException] = {}
    for part in parts:
        node = "" if part.reply is None else part.reply.node
        if node in alive or not isinstance(part.result, BatchView):
            continue
        error = _got([part.packed], 0)[1]  # small objects are in this process; Ray may know that an object is lost
        if isinstance(error, _Late):
            places = _ray.experimental.get_object_locations([part.packed])[part.packed]["node_ids"]
            if not any(place in alive for place in places):
                error = MaskpackError(f"node {node[:8]} is gone, and with it the rows that this rank returned")
        if error is not None and not isinstance(error, _Late):
            gone[id(part)] = error
    return gone


def seconds(value: Any, name: str, call: str) -> None:
    """Raises MaskpackError unless `value` is a number of seconds, 0 or more."""
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not known or not cast("Any", value) >= 0:
        raise MaskpackError(f"{call}: {name} is {said(value)}; expected seconds, from 0. Give a number.")


def deadline(timeout: float | None, call: str) -> float:
    """When `timeout` seconds from now are over, by `time.monotonic`; infinity for None."""
    if timeout is None:
        return math.inf
    seconds(timeout, "timeout", call)
    return time.monotonic() + timeout


def left(until: float) -> float | None:
    """The seconds until a deadline; None without one."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


class _Unwanted(Exception):
    """The call is not awaited any more."""


class _Late(TimeoutError):
    """The driver waited long enough. A TimeoutError of a worker is another error. Callers see a plain TimeoutError."""


def _open(references: Sequence[Any]) -> list[Any]:
    """The references without an answer."""
    if not references:
        return []
    return _ray.wait(list(references), num_returns=len(references), timeout=0, fetch_local=False)[1]


def _got(references: Sequence[Any], timeout: float | None) -> tuple[Sequence[Any], BaseException | None]:
    """The values of references and None; or a None for each, and the error."""
    try:
        return _ray.get(list(references), timeout=timeout), None
    except _ray.exceptions.RayError as error:
        ours = isinstance(error, _ray.exceptions.GetTimeoutError)
        ours = ours and not isinstance(error, _ray.exceptions.RayTaskError)
        return [None] * len(references), _Late(str(error)) if ours else _told(error)


def _told(error: Any) -> BaseException:
    """The exception that a worker raised, with its remote traceback as the cause; or the error of Ray."""
    text = str(error)
    cause = getattr(error, "cause", None)
    raised = cause if isinstance(error, _ray.exceptions.RayTaskError) and cause is not None else error
    if isinstance(raised, _FULL):
        raised = _full(raised)
    if '\n  File "' in text:
        raised.__cause__ = RemoteTraceback(_shortened(text))
    return raised


_FULL = (_ray.exceptions.ObjectStoreFullError, _ray.exceptions.OutOfDiskError)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_MARKS = re.compile(r"[\s^~]+$")


def _shortened(text: str) -> str:
    """The traceback of Ray without colours, carets, and the frames of Ray and of `endpoint`."""
    kept: list[str] = []
    hidden = False
    for line in _COLOUR.sub("", text).splitlines():
        if not line.startswith("    "):
            hidden = line.startswith('  File "') and (
                "/site-packages/ray/" in line or "maskpack/dispatch/endpoints.py" in line
            )
        if not hidden and not _MARKS.match(line):
            kept.append(line)
    return "\n".join(kept)


def _full(error: BaseException) -> StorageError:
    seen = (str(error).strip().splitlines() or [""])[0]
    return StorageError(
        f"WorkerGroup: the object store is full, or the disk that it spills to ({type(error).__name__}: {seen}); "
        "expected room for the rows. Drop views, results and PackedBatches that are no longer needed, send fewer rows "
        "at a time, or start Ray with a larger object_store_memory or more room to spill."
    )


@contextmanager
def storing() -> Generator[None]:
    """Raises StorageError if the object store has no room for an object."""
    try:
        yield
    except _FULL as error:
        raise _full(error) from error


def _failed(
    which: str, method: str, failures: tuple[Failure, ...], remedy: str, call: Call | None = None
) -> WorkerError:
    reasons = "; ".join(map(str, failures))
    return WorkerError(f'WorkerGroup: method "{method}" failed on {which}: {reasons}. {remedy}', method, failures, call)


def answers(
    asked: Mapping[Any, tuple[int, int]], method: str, until: float, grace: float, remedy: str
) -> dict[Any, Any]:
    """The value of each reference, which belongs to a rank and an actor. Raises WorkerError if actors fail or are
    late."""
    begun = time.monotonic()
    values: dict[Any, Any] = {}
    errors: dict[Any, BaseException] = {}
    waiting = list(asked)
    while waiting:
        ready, waiting = _ray.wait(waiting, num_returns=1, timeout=left(until), fetch_local=False)
        if not ready:
            break
        for ref in ready:
            (values[ref],), error = _got([ref], left(until))
            if error is not None:
                errors[ref] = error
                until = min(until, time.monotonic() + grace)
    late = f"no answer in {time.monotonic() - begun:.1f} s"
    errors |= {ref: TimeoutError(late) for ref in waiting}
    if errors:
        failures = tuple(
            Failure.of(rank, None, errors[ref], actor) for ref, (rank, actor) in asked.items() if ref in errors
        )
        raise _failed(f"{len(failures)} of {len(asked)} actors", method, failures, remedy)
    return {ref: values[ref] for ref in asked}


# -------------------------------------------------------------------- results


def _gathered(parts: Sequence[Part], request: Request) -> Any:
    """Joins the results: a TensorDict in row order, with lists of the rest of each tuple; or a list, or None."""
    replies = [cast("RankReply", part.reply) for part in parts]
    if not any(reply.has_rows for reply in replies):
        rest = [reply.rest for reply in replies]
        return None if all(value is None for value in rest) else rest
    if not all(reply.has_rows for reply in replies):
        seen = [part.rank for part in parts if cast("RankReply", part.reply).has_rows]
        raise LayoutError(
            f"ranks {seen} returned a TensorDict and the others none; expected one kind of result. Return a TensorDict "
            "on every rank, also on one without rows."
        )
    more = [reply.rest for reply in replies]
    sizes = [None if rest is None else len(rest) + 1 for rest in more]
    if len(set(sizes)) > 1:
        raise LayoutError(
            f"the ranks returned tuples of {sizes} (None: no tuple); expected one kind of result. Return tuples of one "
            "length on every rank."
        )
    batch = _in_order(parts, request)
    return batch if sizes[0] is None else (batch, *map(list, zip(*more, strict=True)))


def _in_order(parts: Sequence[Part], request: Request) -> BatchView | TensorDict:
    rows = np.concatenate([part.rows for part in parts])
    back = np.argsort(rows, kind="stable")
    results = [part.result for part in parts]
    if request.format == "view":
        return BatchView.cat(results).take(back).known_as(request.args[0].origins())
    packed = PackedBatch.cat(results)
    if not np.array_equal(back, np.arange(back.size)):
        packed = packed.take(back)
    return decompress(packed, format=request.format, device=request.device, max_bytes=None)


def _said(rows: IntArray) -> str:
    if not rows.size:
        return "no rows"
    if rows.size == 1:
        return f"row {rows[0]}"
    if rows.max() - rows.min() == rows.size - 1:
        return f"rows {rows.min()} to {rows.max()}"
    return f"{rows.size} rows from {rows.min()} to {rows.max()}"
