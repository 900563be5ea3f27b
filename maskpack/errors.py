"""The errors of maskpack. A message names the call, the field, the value seen, the value expected and the remedy. A
call that raises leaves its input unchanged.

    MaskpackError
      RegistryError, LayoutError, PlanError, WireFormatError     also ValueError
        FieldError, a LayoutError                                also KeyError
      CoverageError, StorageError                                also RuntimeError
      LossyPadError, ReplayError, WorkerError
"""

from __future__ import annotations

from typing import Any, cast


class MaskpackError(Exception):
    """Base class of the errors of maskpack."""


class RegistryError(MaskpackError, ValueError):
    """An invalid registry entry or option: an unknown axis, a missing pad token id, a pad that the dtype cannot
    hold."""


class LayoutError(MaskpackError, ValueError):
    """Shapes, masks, row lengths or arguments that do not match.

    Attributes:
        path: the path of a field whose shape is that of none of its masks; else None.
    """

    path: tuple[str, ...] | None = None


class FieldError(LayoutError, KeyError):
    """There is no field or layout with the given name."""

    __str__ = Exception.__str__  # KeyError.__str__ puts the message in quotes


class CoverageError(MaskpackError, RuntimeError):
    """Strict mode found tensors that would stay padded, or have other rows than their mask."""


class LossyPadError(MaskpackError):
    """A field has non-pad values under its mask."""


class PlanError(MaskpackError, ValueError):
    """No plan satisfies the lengths, budgets and counts, or the plans of the ranks do not match."""


class ReplayError(MaskpackError):
    """A model does not support packed rows, or its outputs for them differ from those for single rows; or log-probs of
    the trainer are further from those of the rollout than a limit."""


class WireFormatError(MaskpackError, ValueError):
    """Bytes are not a valid packed batch: truncated, modified, of another version, or malicious."""


class StorageError(MaskpackError, RuntimeError):
    """Ray's object store, a storage unit of a data plane or the disk of a log has no room, did not answer, or could not
    do what it was asked to; or what it stored is damaged."""


class WorkerError(MaskpackError):
    """A call failed on some ranks of a WorkerGroup.

    When printed, it shows the tracebacks of the failed workers: the first as the cause, the others as notes (Python
    3.10: in the message).

    Attributes:
        method: the name of the method that was called.
        failures: one object for each failed rank, with `rank`, `rows` (indices into the batch), `error` and `traceback`
            (of the worker; empty if its code did not raise).
        call: the Call, which keeps the results of the other ranks; its `retry` sends the missing rows again. None after
            `run` and `ready`, and in an error that was pickled.
    """

    def __init__(self, message: str, method: str = "", failures: tuple[Any, ...] = (), call: Any = None) -> None:
        frames: dict[str, list[str]] = {}
        for failure in failures:
            if failure.traceback:
                frames.setdefault(failure.traceback.partition("\n")[2], []).append(failure.name)
        texts = [f"Traceback on {', '.join(names)}:\n{text}" for text, names in frames.items()]
        if texts:  # the traceback of the first rank is the cause
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
    """The result is exact but larger than it could be; or parts of a log are damaged, and the others can be read."""
