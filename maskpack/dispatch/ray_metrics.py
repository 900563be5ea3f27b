"""Metrics of calls in Ray's own registry, from which Prometheus reads them: `WorkerGroup(ray_metrics=True)`.

Ray drops values that are recorded while no Ray runs, or while its metrics are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ray.util.metrics import Counter, Histogram

from maskpack.dispatch.timeline import PREFIX, CallTimes

COUNTERS = {
    "calls": "Calls that returned",
    "rows": "Rows of batches",
    "bytes_padded": "Bytes that the batches take padded",
    "bytes_sent": "Encoded bytes that are new in the object store",
    "bytes_returned": "Encoded bytes that the ranks returned",
    "retries": "Attempts after the first of calls that returned",
    "lost_ranks": "Parts of calls that failed because an actor died or could not be reached",
    "errors": "Parts of calls that failed for another reason",
}
"""The counters, `maskpack_dispatch_<name>` with the tag `method`, and what each counts."""
BOUNDARIES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
"""Of the histogram `maskpack_dispatch_stage_seconds`, with the tags `method` and `stage`."""


@cache
def _counter(name: str) -> Any:
    return Counter(f"maskpack_dispatch_{name}", description=COUNTERS[name], tag_keys=("method",))


@cache
def _stages() -> Any:
    tags = ("method", "stage")
    text = "Seconds of a stage of a call, of the driver and of each rank"
    return Histogram("maskpack_dispatch_stage_seconds", description=text, boundaries=BOUNDARIES, tag_keys=tags)


def count(name: str, value: float, method: str) -> None:
    """Adds to a counter of COUNTERS."""
    if value > 0:
        _counter(name).inc(value, tags={"method": method})


def publish(call: CallTimes, metrics: Mapping[str, float]) -> None:
    """Records a call that returned: its stages, and the counters that its metrics have."""
    count("calls", 1.0, call.method)
    for name in ("rows", "bytes_padded", "bytes_sent", "bytes_returned", "retries"):
        count(name, metrics.get(PREFIX + name, 0.0), call.method)
    for span in call.spans:
        _stages().observe(span.seconds, tags={"method": call.method, "stage": span.stage})
