"""Where the bytes and the time of packed calls go: sums for verl's logger, and one payload report of each method. And
how far the trainer is from the rollout.

call   prepare | put | wait | decompress | gather     on the driver --> sums of the process, by method
                                                      sums --take_metrics--> floats --log_metrics--> Tracking.log
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from maskpack.adapters.verl.protocol import PackedProto, decompress, renewed, tensors_of
from maskpack.core.tree import flatten
from maskpack.dispatch.timeline import PREFIX
from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.packed.payload import Payload, PayloadReport, measured, once, raw_bytes
from maskpack.replay.mismatch import MismatchLimit, compare

_sums: Counter[str] = Counter()
_mismatch: dict[str, float] = {}
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
    """Bytes of the tensors of a DataProto or a TensorDict, as they are."""
    tensors = tensors_of(data)
    fields = [] if tensors is None else [value for _, value in flatten(tensors)]
    return sum(raw_bytes(value for value in fields if isinstance(value, Tensor)))


def take_metrics() -> dict[str, float]:
    """Returns sums over the packed calls of this process since the last `take_metrics`, as a flat dict for a logger:
    `maskpack/dispatch/<method>/calls`, `seconds`, `<stage>_seconds` and `bytes_<...>`, and totals of payload reports
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


def reported_once(
    name: str,
    data: Any,
    result: Any,
    pack: Callable[[Any], PackedProto],
    pack_result: Callable[[Any, PackedProto], PackedProto],
) -> PayloadReport | None:
    """The first time for a name, the report of a call with `data` and, unless it is None, `result`. Its totals become
    metrics."""

    def measure() -> PayloadReport:
        argument, packed = _measured(data, pack)
        back = None if result is None else _measured(result, lambda copy: pack_result(copy, packed))[0]
        return PayloadReport(name, argument, back)

    report = once(name, measure)
    if report is not None:
        for direction, payload in (("argument", report.argument), ("result", report.result)):
            totals: dict[str, Any] = {} if payload is None else vars(payload)
            _add(f"maskpack/payload/{name}/{direction}", {key: totals[key] for key in totals if key != "fields"})
    return report


def _measured(data: Any, pack: Callable[[Any], PackedProto]) -> tuple[Payload, PackedProto]:
    tensors = tensors_of(data)
    copy = data if tensors is None else renewed(data, lambda batch: batch.clone())
    return measured(data, copy, tensors, pack, decompress, lambda packed: packed.rows)


def _add(prefix: str, sums: dict[str, Any]) -> None:
    with _guard:
        _sums.update({f"{prefix}/{name}": value for name, value in sums.items()})
