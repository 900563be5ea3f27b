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
        super().__init__(message)
        self.method = method
        self.failures = failures
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.args[0], self.method, self.failures, list(getattr(self, "__notes__", ())))


def _unpickled(message: str, method: str, failures: tuple[Any, ...], notes: list[str]) -> WorkerError:
    error = WorkerError(message, method, failures)
    if failures:
        error.__cause__ = failures[0].error
    for note in notes:
        cast("Any", error).add_note(note)
    return error


class MaskpackWarning(UserWarning):
    """Something stayed exact but travels larger than it could."""
