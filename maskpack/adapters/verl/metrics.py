"""Where the bytes and the time of packed calls go: sums for verl's logger, and one report of each method. And how far
the trainer is from the rollout.

call   prepare | put | wait | decompress | gather     on the driver --> sums of the process, by method
                                                      sums --take_metrics--> floats --log_metrics--> Tracking.log
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from maskpack.adapters.verl.protocol import PackedProto, tensors_of
from maskpack.core.tree import flatten
from maskpack.dispatch.timeline import PREFIX
from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.nesting import check
from maskpack.packed.report import report
from maskpack.replay.mismatch import MismatchLimit, compare

_log = logging.getLogger(__name__)
_sums: Counter[str] = Counter()
_mismatch: dict[str, float] = {}
_reported: set[str] = set()
"""The methods that were reported."""
_guard = threading.Lock()


class CallMetrics:
    """The sums of one call, until `settle` adds them to those of the process under the name of the method.

    A call without a name, which sends no packed batch, is not added."""

    def __init__(self, method: str = "") -> None:
        self.method = method
        self._sums: Counter[str] = Counter({"calls": 1})
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Adds the time since the last lap to a stage, and to the call."""
        now = time.perf_counter()
        self._sums.update({f"{stage}_seconds": now - self._last, "seconds": now - self._last})
        self._last = now

    def resume(self) -> None:
        """Begins a lap now; the time since the last one belongs to no stage."""
        self._last = time.perf_counter()

    def add(self, name: str, count: int) -> None:
        self._sums[name] += count

    def settle(self) -> None:
        if self.method:
            _add(f"{PREFIX}{self.method}", self._sums)
        self._sums.clear()


def nbytes_of(data: Any) -> int:
    """Bytes of the tensors of a DataProto or a TensorDict, as they are; nested ones without their offsets."""
    tensors = tensors_of(data)
    return 0 if tensors is None else check.nbytes_of(value for _, value in flatten(tensors))


def take_metrics() -> dict[str, float]:
    """Returns sums over the packed calls of this process since the last `take_metrics`, as a flat dict for a logger:
    `maskpack/dispatch/<method>/calls`, `seconds`, `<stage>_seconds` and `bytes_<...>`, and totals of reports
    (docs/verl.md has a table). Empty if there were none. `maskpack/rollout_mismatch/` are metrics of `replay.compare`,
    of the first batch with log-probs of the rollout and the trainer."""
    with _guard:
        out = {name: float(value) for name, value in _sums.items()} | _mismatch
        _sums.clear()
        _mismatch.clear()
    return out


def note_mismatch(data: Any, limit: MismatchLimit | None) -> None:
    """Compares the log-probs of a batch that has those of the rollout and of the trainer; without a limit, of the first
    since the last `take_metrics`."""
    tensors = tensors_of(data)
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    fields: list[Any] = [] if tensors is None else [tensors.get(name, None) for name in names]
    if not fields or not all(isinstance(field, Tensor) for field in fields) or (_mismatch and limit is None):
        return
    try:
        seen = compare(*fields, limit=limit).metrics("maskpack/rollout_mismatch/")
    except ReplayError as error:
        if limit is not None:
            raise
        warnings.warn(f"maskpack/rollout_mismatch is not measured: {error}", MaskpackWarning, stacklevel=2)
        return
    with _guard:
        _mismatch.clear()
        _mismatch.update(seen)


def log_metrics() -> Callable[[], None]:
    """Makes verl's `Tracking` of this process log `take_metrics()` together with the metrics of each step.

    Call it on the driver, where the trainer runs. The trainer does not change; neither does the dict that it logs.

    Returns:
        A function that undoes this.
    """
    tracking: Any = importlib.import_module("verl.utils.tracking").Tracking
    before = tracking.log

    @functools.wraps(before)
    def log(self: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        before(self, {**data, **take_metrics()}, *args, **kwargs)

    def undo() -> None:
        tracking.log = before

    tracking.log = log
    return undo


def is_first(method: str) -> bool:
    """Whether this asks for the first time, in this process, whether to report a method."""
    with _guard:
        if method in _reported:
            return False
        _reported.add(method)
        return True


def note_report(method: str, argument: PackedProto, result: PackedProto | None) -> None:
    """Logs what the packed argument and the packed result of a method weigh. The totals become metrics."""
    for name, packed in (("argument", argument), ("result", result)):
        if packed is not None and packed.rows is not None:
            found = report(packed.rows)
            _log.info("%s of %s: %s rows\n%s", name, method, found.rows, found)
            _add(f"maskpack/payload/{method}/{name}", found.totals())


def _add(prefix: str, sums: dict[str, Any]) -> None:
    with _guard:
        _sums.update({f"{prefix}/{name}": value for name, value in sums.items()})
