"""Failures of ranks: the exception that a worker raised, with the lines of its code; a full object store."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from maskpack.core.index import IntArray
from maskpack.dispatch.messages import RemoteTraceback
from maskpack.errors import MaskpackError, StorageError

_ray: Any = ray
_FULL = (_ray.exceptions.ObjectStoreFullError, _ray.exceptions.OutOfDiskError)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_FRAME = re.compile(r'(?m)^  File "[^"\n]*(?:/site-packages/ray/|maskpack/dispatch/endpoints\.py).*\n(?:    .*\n)*')
"""A frame of Ray or of `endpoint`."""
_MARKS = re.compile(r"(?m)^[ \t^~]+\n")


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


def _said(rows: IntArray) -> str:
    if not rows.size:
        return "no rows"
    if rows.size == 1:
        return f"row {rows[0]}"
    if rows.max() - rows.min() == rows.size - 1:
        return f"rows {rows.min()} to {rows.max()}"
    return f"{rows.size} rows from {rows.min()} to {rows.max()}"


def fetched(references: Sequence[Any], timeout: float | None) -> tuple[list[Any] | None, BaseException | None]:
    """The values of references and None, or None and the error; None and None if they do not come in time."""
    try:
        return _ray.get(list(references), timeout=timeout), None
    except _ray.exceptions.RayError as error:
        late = isinstance(error, _ray.exceptions.GetTimeoutError)
        if late and not isinstance(error, _ray.exceptions.RayTaskError):  # a timeout of the method is an error
            return None, None
        return None, _told(error)


def _told(error: Any) -> BaseException:
    """The exception that a worker raised, with its remote traceback as the cause; or the error of Ray."""
    text = str(error)
    cause = getattr(error, "cause", None)
    raised = cause if isinstance(error, _ray.exceptions.RayTaskError) and cause is not None else error
    if isinstance(raised, _FULL):
        raised = _full(raised)
    if '\n  File "' in text:
        raised.__cause__ = RemoteTraceback(_MARKS.sub("", _FRAME.sub("", _COLOUR.sub("", text) + "\n"))[:-1])
    return raised


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
