"""The errors of maskpack. Every message names the call, the field, what was seen, what was expected
and what to do; an error leaves its input as it was.

    MaskpackError
      RegistryError, LayoutError, PlanError, WireFormatError     ValueErrors too
      FieldError, a LayoutError                                  a KeyError too
      MethodError                                                an AttributeError too
      CoverageError, LossyPadError, ReplayError, StoreFullError, WorkerError
"""

from __future__ import annotations

from typing import Any, cast


class MaskpackError(Exception):
    """Base of every error that maskpack raises on purpose."""


class RegistryError(MaskpackError, ValueError):
    """A registry entry cannot be used: unknown axis, missing pad token id, a pad that its dtype cannot hold."""


class LayoutError(MaskpackError, ValueError):
    """Shapes, masks and row lengths that do not fit each other."""


class FieldError(LayoutError, KeyError):
    """A field or a layout that was named is not there."""

    __str__ = Exception.__str__  # a KeyError shows its message as Python writes a string, in quotes


class CoverageError(MaskpackError):
    """Strict mode found tensors that would travel dense."""


class LossyPadError(MaskpackError):
    """A field holds values other than its pad where its mask says there is nothing."""


class PlanError(MaskpackError, ValueError):
    """Lengths, budgets and counts that no plan fits, or ranks whose plans do not fit each other."""


class ReplayError(MaskpackError):
    """A model that cannot replay packed rows, or does not give what it gives for a row alone."""


class WireFormatError(MaskpackError, ValueError):
    """Bytes that are no packed batch: cut off, changed, of another version, or made to mislead."""


class MethodError(MaskpackError, AttributeError):
    """The actors of a WorkerGroup have no method of that name."""


class StoreFullError(MaskpackError):
    """Ray's object store has no room for an object, and none on disk."""


class Cancelled(MaskpackError):
    """The part of a rank in a call that was cancelled before the rank began."""


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the cause of an error that was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerError(MaskpackError):
    """Ranks of a WorkerGroup did not do their part.

    Printed, it shows the traceback of each failed rank, with the lines of the worker's code: that of the first as its
    cause, others as notes (in the message under Python 3.10).

    Attributes:
        method: that was called.
        failures: one for each rank: `rank`, `rows` (their numbers in the batch), `error` and `traceback` (of the
            worker, empty if its code raised nothing).
        call: the Call; it keeps the results of the other ranks, and `retry` sends the missing rows again. None after
            `run` and `ready`, and in an error that came from another process, where the call is.
    """

    def __init__(self, message: str, method: str = "", failures: tuple[Any, ...] = (), call: Any = None) -> None:
        frames: dict[str, list[str]] = {}
        for failure in failures:
            if failure.traceback:
                frames.setdefault(failure.traceback.partition("\n")[2], []).append(failure.name)
        texts = [f"Traceback on {', '.join(names)}:\n{text}" for text, names in frames.items()]
        if texts:  # the cause shows that of the first rank
            (first, *more) = next(iter(frames.values()))
            texts[:1] = [f"{', '.join(more)}: the same traceback as {first}"] if more else []
        noted = hasattr(Exception, "add_note")  # Python 3.11
        super().__init__(message if noted else "\n".join([message, *texts]))
        for text in texts if noted else ():
            cast("Any", self).add_note(text)
        if failures:
            self.__cause__ = next((one for one in failures if one.traceback), failures[0]).error
        self.method = method
        self.failures = failures
        self.call = call
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerError, (self._message, self.method, self.failures)


class MaskpackWarning(UserWarning):
    """Something stayed exact but travels larger than it could."""
