"""Call: a call that was sent to the ranks. It waits for the replies, joins the results, and can send rows again.

`retry` sends the rows of parts without a result again and keeps the results of the others. An actor runs what it was
sent, also when the driver waits no more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray
from tensordict import TensorDict

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.dispatch.failures import Failure, fetched
from maskpack.dispatch.messages import Cancelled, RankReply
from maskpack.dispatch.placement import nodes_of
from maskpack.dispatch.ranks import Answer, Part, Ranks, Request
from maskpack.dispatch.timeline import PREFIX, STAGES, CallTimes, Span, rank_spans
from maskpack.errors import LayoutError, MaskpackError, WorkerError
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.views.column_group import BatchMeta
from maskpack.views.view import BatchView

if TYPE_CHECKING:
    from maskpack.dispatch.group import WorkerGroup

_log = logging.getLogger(__name__)
_ray: Any = ray
_LOOK = 0.1
"""The most seconds between two checks of a waiting thread whether the call is still awaited."""
_LEAST = 0.005
"""The least seconds for which it waits for all ranks, before it takes the answers that there are."""


@dataclass(eq=False, repr=False)
class Call:
    """A call that was sent. `result` waits for its result; the call can also be awaited."""

    _ranks: Ranks
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
    _late: str = "no answer"
    """The reason of ranks that have not answered."""
    _done: bool = False
    _value: Any = None
    _turn: Any = field(default_factory=threading.Lock)
    """Held by the thread that waits for the ranks; other threads wait for that one."""
    _guard: Any = field(default_factory=threading.Lock)
    """Guards the parts against `cancel`."""

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.error is not None:  # the rank could not be called
                self._fail(part, part.error)

    def __await__(self) -> Generator[Any, None, Any]:
        future: Future[Any] = Future()  # cancelled when the await is
        # asyncio would join a thread of its executor on exit
        threading.Thread(target=self._resolve, args=(future,), daemon=True).start()
        return asyncio.wrap_future(future).__await__()

    def _resolve(self, future: Future[Any]) -> None:
        """Gives the result to a future, or ends when that is cancelled."""
        settle: Callable[[Any], None] = future.set_result
        try:
            value = self._result(math.inf, lambda: not future.cancelled())
        except BaseException as error:
            settle, value = future.set_exception, error
        if future.set_running_or_notify_cancel():
            settle(value)

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        self._ranks.need_process()
        return not any(part.unanswered() for part in self.parts if part.outcome is None)

    def cancel(self) -> list[int]:
        """Gives up the ranks that have not answered, and returns them.

        They run what they were sent, and later calls wait behind it, but the results are dropped. `result` then raises
        a WorkerError that names these ranks, and `retry` sends their rows again, also to them.
        """
        self._ranks.need_process()
        given_up = Cancelled("cancelled before it answered; the rank runs it, and its result is dropped")
        with self._guard:
            dropped = [part for part in self.parts if part.unanswered()]
            if dropped:  # the thread that waits looks for another list
                self.parts = [
                    replace(part, replies=[], packed=None, outcome=given_up) if part in dropped else part
                    for part in self.parts
                ]
        return sorted(part.rank for part in dropped)

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
            raise

    def _result(self, until: float, wanted: Callable[[], bool] = lambda: True) -> Any:
        self._ranks.need_process()
        timeout = left(until)
        if not self._turn.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self._answers(self.parts)  # another thread waits for these ranks, with its own timeout
            self._turn.acquire()  # all ranks have answered, and the other thread decodes the results
        try:
            if not self._done:
                self._finish(until, wanted)
            return self._value
        finally:
            self._turn.release()

    def retry(self, group: WorkerGroup | None = None) -> Call:
        """Sends the rows without a result again, to the ranks that are alive or to those of another group.

        The returned call keeps the results of this one. Rows of a view whose node is gone are sent again, and ranks on
        such nodes are left out. If actors have died, this waits until their nodes have answered, or Ray knows that they
        are gone. A plan is made anew for the rows. The result has the same format and device.

        Raises:
            MaskpackError: every rank was lost and no group is given; or the plan has several updates, loss tokens or
                groups, so that its rows cannot be divided anew.
        """
        request, parts = self.request, self.parts  # in this order: another thread may finish the call
        own = self._ranks
        own.need_process()
        gone = [part for part in parts if isinstance(part.error, _ray.exceptions.RayActorError)]
        alive = own.store.nodes_alive({part.rank for part in gone}) if parts else set[str]()
        self._lose_rows(parts, alive)
        failed = [part for part in parts if not isinstance(part.outcome, Answer)]
        kept = [part for part in parts if isinstance(part.outcome, Answer)]
        if not failed:
            return self
        if not self._divisible():
            raise MaskpackError(
                f'WorkerGroup: "{request.method}" was called with a plan of several updates, loss tokens or '
                "groups; expected one whose rows may be sent in other parts. Run the whole call again."
            )
        to: Ranks = own if group is None else cast("Any", group)._ranks
        lost, away = frozenset[int](), set[int]()
        if group is None:
            hung = {part.rank for part in failed if part.unanswered()}  # also one that waits for a peer that failed
            lost = self.lost | hung | {part.rank for part in gone}
            unavailable = _ray.exceptions.ActorUnavailableError  # it is dying, or Ray is restarting it
            away = {part.rank for part in failed if isinstance(part.error, unavailable)}
        ranks = [rank for rank in range(len(to)) if rank not in lost]
        off = to.store.ranks_off(alive)
        ranks = [rank for rank in ranks if rank not in off] or ranks  # they may have been started elsewhere
        ranks = ranks or sorted(away)
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
        request, parts = self.request, self.parts
        if request.format == "view":
            answered = {part.outcome.reply.node for part in parts if isinstance(part.outcome, Answer)}
            self._lose_rows(parts, self._ranks.store.nodes(answered))
        answers = self._answers(parts)
        begun = time.perf_counter()
        try:
            self._value = _gathered(parts, answers, request)
        except LayoutError as error:
            method = request.method
            raise WorkerError(
                f'WorkerGroup: what the ranks returned from "{method}" does not fit together: {error}', method, (), self
            ) from error
        with self._guard:
            self._done, self.parts = True, []
        self.request = replace(request, args=(), kwargs={})
        self._count(answers, begun)  # an error in it leaves the result to the next `result`

    def _collect(self, until: float, wanted: Callable[[], bool]) -> None:
        """Collects replies until no part is open, the timeout is over, or the grace after a failure is over."""
        begun = time.perf_counter()
        graced = math.inf
        parts = self.parts
        if any(part.error is not None for part in parts):  # it failed in an earlier `result`
            graced = time.monotonic() + self.request.grace
        owner = {ref: part for part in parts if part.outcome is None for ref in part.replies}
        waiting = list(owner)
        while waiting:
            rest = max(0.0, min(until, graced) - time.monotonic())
            # many at a time, and soon after their answer: `return` of the timeline begins there
            pause = min(rest, _LOOK, max(_LEAST, (time.perf_counter() - begun) / 20))
            ready, waiting = _ray.wait(waiting, num_returns=len(waiting), timeout=pause, fetch_local=False)
            if not wanted():
                raise _Unwanted
            if self.parts is not parts:  # cancelled by another thread
                self._collect(until, wanted)
                return
            if not ready and rest <= pause:
                break
            answered = {owner[ref]: list[Any]() for ref in ready}
            for ref in ready:
                answered[owner[ref]].append(ref)
            late = {owner[ref] for ref in waiting}
            self._settle([part for part in answered if part not in late and part.outcome is None], until, begun)
            for part, some in answered.items():
                if part in late and part.outcome is None:  # the others may wait forever for one that failed
                    error = fetched(some, left(until))[1]
                    if error is not None:
                        self._fail(part, error)
                elif part.error is not None:
                    _hear(part)
            if any(part.error is not None for part in answered):
                graced = min(graced, time.monotonic() + self.request.grace)
        grace = f", {self.request.grace} s of grace after another rank failed" if graced < until else ""
        self._late = f"no answer in {time.perf_counter() - self._begun:.1f} s{grace}"

    def _settle(self, parts: Sequence[Part], until: float, waited: float) -> None:
        """Sets the outcome of parts that all their actors have answered; it fetches all together, or one by one if one
        failed. `waited` is when the driver began to wait."""
        view = self.request.format == "view"
        wanted = [[*part.replies, *([] if view else [part.packed])] for part in parts]
        values, error = fetched([ref for references in wanted for ref in references], left(until))
        if values is None and len(parts) > 1:
            for part in parts:
                self._settle([part], until, waited)
            return
        now = time.perf_counter()
        for part, references in zip(parts, wanted, strict=True):
            if error is not None:
                self._fail(part, error)
            if values is None:
                continue
            own, values = values[: len(references)], values[len(references) :]
            replies: list[RankReply] = own[: len(part.replies)]
            reply = replies[part.collector]
            self._ranks.store.ran_on(part.rank, [each.node for each in replies])
            rows = BatchView.at(part.packed, cast("BatchMeta", reply.meta)) if view and reply.has_rows else None
            spans = rank_spans(part.rank, *part.sent, waited, now, reply.begun, reply.seconds)
            part.outcome = Answer(reply, rows if view else own[-1], spans)

    def _fail(self, part: Part, error: BaseException) -> None:
        """Sets the error of a part and logs it."""
        part.outcome = error
        _hear(part)
        lost = isinstance(error, _ray.exceptions.RayActorError)
        failure = Failure.of(part.rank, part.rows, error)
        _log.log(logging.WARNING if lost else logging.INFO, '"%s" failed on %s', self.request.method, failure)

    def _lose_rows(self, parts: Sequence[Part], alive: Collection[str]) -> None:
        """Sets the error of parts whose rows stayed in the object store and were lost with their node."""
        for part in parts:
            answer = part.outcome
            if not isinstance(answer, Answer) or not isinstance(answer.rows, BatchView) or answer.reply.node in alive:
                continue
            # before the rows are asked for: of lost rows Ray then puts an error here, and names this node
            places = nodes_of(part.packed)
            values, error = fetched([part.packed], 0)  # small objects are here; Ray may know that an object is lost
            if values is None and error is None and not any(place in alive for place in places):
                node = answer.reply.node[:8]
                error = MaskpackError(f"node {node} is gone, and with it the rows that this rank returned")
            if error is not None:
                self._fail(part, error)

    def _answers(self, parts: Sequence[Part]) -> list[Answer]:
        """The answers of all parts. Raises WorkerError if one has none."""
        outcomes = [part.outcome for part in parts]
        failures = tuple(
            Failure.of(part.rank, part.rows, outcome or TimeoutError(self._late))
            for part, outcome in zip(parts, outcomes, strict=True)
            if not isinstance(outcome, Answer)
        )
        if failures:
            kept = "The results of the others are kept: " if len(failures) < len(parts) else ""
            remedy = (
                "error.call.retry() sends the missing rows again."
                if self._divisible()
                else "Run the whole call again, from a checkpoint: by its plan no part can be sent again."
            )
            which = f"{len(failures)} of {len(self._ranks)} ranks"
            raise _failed(which, self.request.method, failures, kept + remedy, self)
        return cast("list[Answer]", outcomes)

    def _divisible(self) -> bool:
        return self.request.plan is None or self.request.plan.divisible

    def _count(self, answers: Sequence[Answer], gathering: float) -> None:
        now = time.perf_counter()
        ranks = [span for answer in answers for span in answer.spans]
        call = CallTimes(self.request.method, (*self.spans, *ranks, Span(None, "gather", gathering, now - gathering)))
        took = call.slowest()
        more = {
            "wait_seconds": gathering - self._begun,
            "bytes_returned": float(sum(answer.reply.nbytes for answer in answers)),
            "bytes_avoided": self.metrics[f"{PREFIX}bytes_padded"] - self.metrics[f"{PREFIX}bytes_sent"],
            "retries": float(self.attempts - 1),
            "lost_ranks": float(len(self.lost)),
            **{f"{stage}_seconds": took.get(stage, 0.0) for stage in STAGES},
        }
        self.metrics |= {PREFIX + name: value for name, value in more.items()}
        _log.debug('"%s" returned in %.3f s; the slowest stages took %s s', call.method, call.end - call.begin, took)
        self._ranks.timeline.add(call)


def _hear(part: Part) -> None:
    """Fetches what is there of a part that failed: Ray would log errors that were never fetched."""
    for reference in (*part.replies, part.packed) if part.replies else ():
        fetched([reference], 0)


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
            found, error = fetched([ref], left(until))
            if found is not None:
                values[ref] = found[0]
            elif error is not None:
                errors[ref] = error
                until = min(until, time.monotonic() + grace)
    late = TimeoutError(f"no answer in {time.monotonic() - begun:.1f} s")
    failures = tuple(
        Failure.of(rank, None, errors.get(ref, late), actor)
        for ref, (rank, actor) in asked.items()
        if ref not in values
    )
    if failures:
        raise _failed(f"{len(failures)} of {len(asked)} actors", method, failures, remedy)
    return {ref: values[ref] for ref in asked}


# -------------------------------------------------------------------- results


def _gathered(parts: Sequence[Part], answers: Sequence[Answer], request: Request) -> Any:
    """Joins the results: a TensorDict in row order, with lists of the rest of each tuple; or a list, or None."""
    replies = [answer.reply for answer in answers]
    more = [reply.rest for reply in replies]
    if not any(reply.has_rows for reply in replies):
        return None if all(rest is None for rest in more) else more
    if not all(reply.has_rows for reply in replies):
        seen = [part.rank for part, reply in zip(parts, replies, strict=True) if reply.has_rows]
        raise LayoutError(
            f"ranks {seen} returned a TensorDict and the others none; expected one kind of result. Return a TensorDict "
            "on every rank, also on one without rows."
        )
    sizes = [None if rest is None else len(rest) + 1 for rest in more]
    if len(set(sizes)) > 1:
        raise LayoutError(
            f"the ranks returned tuples of {sizes} (None: no tuple); expected one kind of result. Return tuples of one "
            "length on every rank."
        )
    back = np.argsort(np.concatenate([part.rows for part in parts]), kind="stable")
    batch = _in_order([answer.rows for answer in answers], back, request)
    return batch if sizes[0] is None else (batch, *map(list, zip(*more, strict=True)))


def _in_order(results: Sequence[Any], back: IntArray, request: Request) -> BatchView | TensorDict:
    if request.format == "view":
        return BatchView.cat(results).take(back).known_as(request.args[0].origins())
    packed = PackedBatch.cat(results)
    if not np.array_equal(back, np.arange(back.size)):
        packed = packed.take(back)
    return decompress(packed, format=request.format, device=request.device, max_bytes=None)
