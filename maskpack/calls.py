"""A call on its way: its parts, what came back, what failed, and its metrics.

    Part  rank 0  rows 0 1 2   receipts of its actors, rows that it returned   answered | failed | open
    Part  rank 1  rows 3 4 5

The rows of parts without an answer can be sent again; the others keep theirs.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import numpy as np
import ray
import torch
from tensordict import TensorDict

from maskpack.arguments import said
from maskpack.errors import LayoutError, MaskpackError, WorkerError
from maskpack.packed import PackedBatch, decompress
from maskpack.parcels import Receipt
from maskpack.placement import nodes_alive
from maskpack.rank_plans import RankPlans
from maskpack.rows import IntArray
from maskpack.strands import Outline
from maskpack.views import BatchView

Results = Literal["padded", "nested", "view"]
"""How rows come back: decoded, or as a BatchView of rows that stay in the object store."""

_ray: Any = ray


@dataclass(frozen=True)
class Request:
    """What was asked for, apart from who does which rows.

    Attributes:
        method: of the actors.
        args, kwargs: a BatchView stands for rows that are divided, a Broadcast for rows that every rank gets, an
            ObjectRef for what is large.
        layout, device: of the result.
        grace: seconds that the other ranks have once one has failed.
        plan: of the rows, for every rank.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    layout: Results
    device: torch.device | str | None
    grace: float
    plan: RankPlans | None = None


@dataclass
class Part:
    """The rows of one rank, and what became of them.

    Attributes:
        rank: of the group that has it.
        rows: int64 [n], their numbers in the batch.
        receipts: a reference for each actor of the rank.
        speaker: the number of the actor whose result counts.
        packed: a reference to the rows that the speaker returns.
        receipt, result: of the speaker, once all actors have answered; `result` is a PackedBatch, or a BatchView.
        error: why there is none.
    """

    rank: int
    rows: IntArray
    receipts: list[Any]
    speaker: int
    packed: Any
    receipt: Receipt | None = None
    result: Any = None
    error: BaseException | None = None

    @property
    def late(self) -> bool:
        """Whether nothing is known of it, or no more than that it did not answer in time."""
        return self.receipt is None and (self.error is None or isinstance(self.error, TimeoutError))

    @property
    def lost(self) -> bool:
        """Whether one of its actors is dead, or has not answered yet: it may wait for a peer that failed."""
        open = _ray.wait(self.receipts, num_returns=len(self.receipts), timeout=0, fetch_local=False)[1]
        return bool(open) or isinstance(self.error, _ray.exceptions.RayActorError)


@dataclass(frozen=True)
class Failure:
    """A rank that did not do its part: its number, the numbers of its rows, and why."""

    rank: int
    rows: IntArray
    error: BaseException

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines() or [""]
        reason = next((line for line in reversed(lines) if line.strip()), "") if len(lines) > 1 else lines[0]
        return f"rank {self.rank} ({_said(self.rows)}): {type(self.error).__name__}: {reason[:300].rstrip('.')}"


class Sender(Protocol):
    """A WorkerGroup, as far as calls know it."""

    @property
    def num_ranks(self) -> int: ...

    def send(
        self, request: Request, rows: Mapping[int, IntArray], *, again: bool
    ) -> tuple[list[Part], dict[str, float]]:
        """Starts the request on some ranks; `again` where objects may have been lost."""
        ...

    def ran_on(self, rank: int, nodes: Sequence[str]) -> None:
        """Takes note of the nodes that the actors of a rank ran on."""
        ...

    def nodes_alive(self, died: Collection[int]) -> set[str]:
        """The nodes that are alive, after actors of some ranks have died."""
        ...

    def ranks_off(self, nodes: Collection[str]) -> set[int]:
        """The ranks that answered last from other nodes than these."""
        ...


@dataclass(eq=False, repr=False)
class Call:
    """A call that was sent. `result` waits for it; it can be awaited too."""

    group: Sender
    request: Request
    parts: list[Part]
    metrics: dict[str, float]
    """Flat, for a logger; whole once `result` has returned."""
    lost: frozenset[int] = frozenset()
    """Ranks of the group that failed calls before this one left out."""
    _begun: float = field(default_factory=time.perf_counter)
    _done: bool = False
    _value: Any = None
    _turn: Any = field(default_factory=threading.Lock)
    """Held by the one who waits; others wait for him."""

    def __await__(self) -> Generator[Any, None, Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def wait() -> None:
            try:
                future.set_result(self.result())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()  # asyncio would join a thread of its own at its end
        return asyncio.wrap_future(future).__await__()

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        refs = [ref for part in self.parts if part.late for ref in part.receipts]
        return not refs or not _ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[1]

    def result(self, timeout: float | None = None) -> Any:
        """What `WorkerGroup.call` returns.

        Args:
            timeout: seconds to wait, at most; None to wait until every rank has answered or failed.

        Raises:
            WorkerError: ranks failed, or did not answer in time, or their results do not fit together. A later
                `result` may still have what late ranks return.
        """
        if timeout is not None:
            seconds(timeout, "timeout", "Call.result")
        until = math.inf if timeout is None else time.monotonic() + timeout
        if not self._turn.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self._check()  # another waits for these ranks, in its own time
            self._turn.acquire()  # all have answered, and the other decodes what they returned
        try:
            if not self._done:
                self._finish(None if timeout is None else max(0.0, until - time.monotonic()))
            return self._value
        finally:
            self._turn.release()

    def retry(self, group: Sender | None = None) -> Call:
        """Sends the rows again that have no result: to the ranks that are alive, or to those of another group.

        The results that are there are kept; the call that is returned has them and those of the rows sent again. Rows
        of a view that are lost with their node are among these, and ranks on nodes that are gone are left out.
        Where actors have died, this waits until their nodes have answered, or Ray knows that they are gone.
        A plan is made anew for them. The result has the layout and the device of this call's.

        Raises MaskpackError if every rank was lost and no group is given, or if the plan has several updates, loss
        tokens or groups: then a part of it is not a part of the whole.
        """
        request, parts = self.request, self.parts  # in this order: another thread may finish the call
        dead = {part.rank for part in parts if isinstance(part.error, _ray.exceptions.RayActorError)}
        alive = self.group.nodes_alive(dead) if parts else set[str]()
        gone = _rows_gone(parts, alive)
        failed = [part for part in parts if part.receipt is None or id(part) in gone]
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
        ranks = [rank for rank in range(to.num_ranks) if rank not in lost]
        off = to.ranks_off(alive)
        ranks = [rank for rank in ranks if rank not in off] or ranks  # they may have been started elsewhere
        if not ranks:
            raise MaskpackError(
                f'WorkerGroup: every rank that "{request.method}" was sent to is lost or late; expected one that '
                "is alive. Start actors and pass their group: call.retry(group)."
            )
        missing = np.sort(np.concatenate([part.rows for part in failed]))
        ranks = ranks[: max(1, missing.size)]  # one is called where there are no rows, for an empty result
        rows = dict(zip(ranks, np.array_split(missing, len(ranks)), strict=True))
        sent, metrics = to.send(request, rows, again=True)
        # what is no TensorDict comes as a list in this order
        return Call(to, request, sorted([*sent, *kept], key=lambda part: part.rows[:1].tolist()), metrics, lost)

    # ---------------------------------------------------------------- waiting

    def _finish(self, timeout: float | None) -> None:
        self._collect(timeout)
        gone = _rows_gone(self.parts, nodes_alive()) if self.request.layout == "view" else {}
        for part in self.parts:
            if id(part) in gone:
                part.receipt, part.result, part.error = None, None, gone[id(part)]
        self._check()
        begun = time.perf_counter()
        try:
            self._value = _gathered(self.parts, self.request)
        except LayoutError as error:
            method = self.request.method
            raise WorkerError(
                f'WorkerGroup: what the ranks returned from "{method}" does not fit together: {error}',
                method,
                (),
                self,
            ) from error
        self._count(begun)
        self._done = True
        self.parts = []
        self.request = replace(self.request, args=(), kwargs={})

    def _collect(self, timeout: float | None) -> None:
        """Takes what is there until all parts are settled, the time is up, or the grace after a failure is over."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        graced = math.inf
        if any(part.receipt is None and not part.late for part in self.parts):  # known from a `result` before
            graced = time.monotonic() + self.request.grace
        owner = {ref: part for part in self.parts if part.late for ref in part.receipts}
        for part in owner.values():
            part.error = None
        waiting = list(owner)
        while waiting:
            end = min(until, graced)
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            ready, waiting = _ray.wait(waiting, num_returns=1, timeout=left, fetch_local=False)
            if not ready:
                break
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            for ref in ready:
                part = owner[ref]
                if all(peer not in waiting for peer in part.receipts):
                    self._settle(part, left)
                elif part.error is None:
                    part.error = _got([ref], left)[1]  # its peers may wait for it for ever
                if part.error is not None:
                    graced = min(graced, time.monotonic() + self.request.grace)
        for part in (owner[ref] for ref in waiting):
            if part.late:
                waited = f"no answer in {time.perf_counter() - self._begun:.1f} s"
                grace = f", {self.request.grace} s of grace after another rank failed" if graced < until else ""
                part.error = TimeoutError(waited + grace)

    def _settle(self, part: Part, timeout: float | None) -> None:
        """Takes what all actors of a part have answered."""
        receipts, part.error = _got(part.receipts, timeout)
        if part.error is None:
            receipt: Receipt = receipts[part.speaker]
            self.group.ran_on(part.rank, [each.node for each in receipts])
            if receipt.has_rows and self.request.layout == "view":
                part.result = BatchView.at(part.packed, cast("Outline", receipt.outline))
            elif receipt.has_rows:
                (part.result,), part.error = _got([part.packed], timeout)
            part.receipt = receipt if part.error is None else None
        if part.error is not None:
            for reference in (*part.receipts, part.packed):  # Ray logs errors that nobody has taken
                _got([reference], 0)

    def _check(self) -> None:
        failures = tuple(
            Failure(part.rank, part.rows, part.error or TimeoutError("no answer"))
            for part in self.parts
            if part.receipt is None
        )
        if failures:
            ranks = self.group.num_ranks
            kept = "The results of the others are kept: " if len(failures) < len(self.parts) else ""
            raise WorkerError(
                f'WorkerGroup: method "{self.request.method}" failed on {len(failures)} of {ranks} ranks: '
                f"{'; '.join(map(str, failures))}. {kept}{self._remedy()}",
                self.request.method,
                failures,
                self,
            ) from failures[0].error

    def _remedy(self) -> str:
        if self._divisible():
            return "error.call.retry() sends the missing rows again."
        return "Run the whole call again, from a checkpoint: by its plan no part can be sent again."

    def _divisible(self) -> bool:
        return self.request.plan is None or self.request.plan.divisible

    def _count(self, gathering: float) -> None:
        now = time.perf_counter()
        receipts = [part.receipt for part in self.parts if part.receipt is not None]
        self.metrics["dispatch/wait_ms"] = 1e3 * (gathering - self._begun)
        self.metrics["dispatch/gather_ms"] = 1e3 * (now - gathering)
        self.metrics["dispatch/bytes_returned"] = float(sum(receipt.nbytes for receipt in receipts))
        for phase in ("decode", "run", "encode"):
            self.metrics[f"dispatch/rank_{phase}_ms"] = max((receipt.ms[phase] for receipt in receipts), default=0.0)


def _rows_gone(parts: Sequence[Part], alive: Collection[str]) -> dict[int, BaseException]:
    """Of parts whose rows stay in the object store, those whose rows went with their node: why, by their ids."""
    gone: dict[int, BaseException] = {}
    for part in parts:
        node = "" if part.receipt is None else part.receipt.node
        if node in alive or not isinstance(part.result, BatchView):
            continue
        error = _got([part.packed], 0)[1]  # small objects are here; of lost ones Ray may know already
        if isinstance(error, TimeoutError):
            places = _ray.experimental.get_object_locations([part.packed])[part.packed]["node_ids"]
            if not any(place in alive for place in places):
                error = MaskpackError(f"node {node[:8]} is gone, and with it the rows that this rank returned")
        if error is not None and not isinstance(error, TimeoutError):
            gone[id(part)] = error
    return gone


def seconds(value: Any, name: str, call: str) -> None:
    """Raises MaskpackError for what is no time to wait."""
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not known or not cast("Any", value) >= 0:
        raise MaskpackError(f"{call}: {name} is {said(value)}; expected seconds, from 0. Give a number.")


def _got(references: Sequence[Any], timeout: float | None) -> tuple[Sequence[Any], BaseException | None]:
    """What the references stand for; or None for each, and the error."""
    try:
        return _ray.get(list(references), timeout=timeout), None
    except _ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        of_task = isinstance(error, _ray.exceptions.RayTaskError) and cause is not None
        return [None] * len(references), cause if of_task else error


# -------------------------------------------------------------------- results


def _gathered(parts: Sequence[Part], request: Request) -> Any:
    """Rows in the order of the batch; beside them, or in their place, what the ranks returned else."""
    receipts = [cast("Receipt", part.receipt) for part in parts]
    if not any(receipt.has_rows for receipt in receipts):
        rest = [receipt.rest for receipt in receipts]
        return None if all(value is None for value in rest) else rest
    if not all(receipt.has_rows for receipt in receipts):
        seen = [part.rank for part in parts if cast("Receipt", part.receipt).has_rows]
        raise LayoutError(
            f"ranks {seen} returned a TensorDict and the others none; expected one kind of result. Return a TensorDict "
            "on every rank, also on one without rows."
        )
    more = [receipt.rest for receipt in receipts]
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
    if request.layout == "view":
        return BatchView.cat(results).select(back).known_as(request.args[0].origins())
    packed = PackedBatch.cat(results)
    if not np.array_equal(back, np.arange(back.size)):
        packed = packed.select(back)
    return decompress(packed, layout=request.layout, device=request.device, max_bytes=None)


def _said(rows: IntArray) -> str:
    if not rows.size:
        return "no rows"
    if rows.size == 1:
        return f"row {rows[0]}"
    if rows.max() - rows.min() == rows.size - 1:
        return f"rows {rows.min()} to {rows.max()}"
    return f"{rows.size} rows from {rows.min()} to {rows.max()}"
