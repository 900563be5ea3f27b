"""Where the time of calls goes: stages of the driver and of each rank, as metrics and a table.

    driver   prepare | put                                            gather
    rank 0                 fetch | decode | run | encode | return
    rank 1                 fetch | decode | run      | encode | return

Times are those of the driver's clock. A rank tells when it began by its own; an error of that clock moves time between
`fetch` and `return`, and changes no other stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

PREFIX = "maskpack/dispatch/"
"""Of the names of metrics."""
STAGES = ("prepare", "put", "fetch", "decode", "run", "encode", "return", "gather")
"""In the order of a call. The first two and the last are those of the driver."""
_KEPT = 128


class Span(NamedTuple):
    """A stage of a call.

    Attributes:
        rank: the rank; None for the driver.
        stage: one of STAGES.
        begin: seconds of the driver's clock, `time.perf_counter`.
        seconds: how long it took.
    """

    rank: int | None
    stage: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class CallTimes:
    """The stages of a call that returned.

    Attributes:
        method: the name of the method; "put" for `WorkerGroup.put`.
        spans: the stages, in no order.
    """

    method: str
    spans: tuple[Span, ...]

    @property
    def begin(self) -> float:
        return min(span.begin for span in self.spans)

    @property
    def end(self) -> float:
        return max(span.begin + span.seconds for span in self.spans)

    def slowest(self) -> dict[str, float]:
        """The seconds of each stage over all attempts: of the driver, or of the rank that took longest."""
        sums: dict[tuple[str, int | None], float] = {}
        for span in self.spans:
            sums[span.stage, span.rank] = sums.get((span.stage, span.rank), 0.0) + span.seconds
        out: dict[str, float] = {}
        for (stage, _), seconds in sums.items():
            out[stage] = max(out.get(stage, 0.0), seconds)
        return out


def rank_spans(
    rank: int, sent: float, clock: float, waited: float, settled: float, begun: float, seconds: Mapping[str, float]
) -> list[Span]:
    """The stages of a rank.

    Args:
        sent: when the rank was called, on the driver's clock, and `clock` the same by the time of day.
        waited, settled: when the driver began to wait for the rank, and when it had the reply.
        begun: when the rank began, by the time of day on its machine.
        seconds: of each stage on the rank, in their order.
    """
    spare = max(settled - sent - sum(seconds.values()), 0.0)
    spans: list[Span] = []
    at = sent
    for stage, length in (("fetch", min(max(begun - clock, 0.0), spare)), *seconds.items()):
        spans.append(Span(rank, stage, at, length))
        at += length
    at = max(at, waited)
    return [*spans, Span(rank, "return", at, max(settled - at, 0.0))]


class Timeline:
    """The stages of the last calls of a WorkerGroup, up to 128. `WorkerGroup.timeline` is one."""

    def __init__(self) -> None:
        self._calls: deque[CallTimes] = deque(maxlen=_KEPT)

    @property
    def calls(self) -> tuple[CallTimes, ...]:
        """The calls that returned, the oldest first."""
        return tuple(self._calls)

    def add(self, call: CallTimes) -> None:
        """Records a call, and forgets the oldest if there are too many."""
        self._calls.append(call)

    def clear(self) -> None:
        """Forgets all calls."""
        self._calls.clear()

    def metrics(self) -> dict[str, float]:
        """Sums over the recorded calls of each method, as a flat dict for a logger: `maskpack/dispatch/<method>/calls`,
        `seconds`, and `<stage>_seconds` over all attempts, of the driver or the slowest rank of each call."""
        out: dict[str, float] = {}
        for method, calls in self._by_method().items():
            sums = {"calls": float(len(calls)), "seconds": sum(call.end - call.begin for call in calls)}
            for call in calls:
                for stage, seconds in call.slowest().items():
                    sums[f"{stage}_seconds"] = sums.get(f"{stage}_seconds", 0.0) + seconds
            out |= {f"{PREFIX}{method}/{name}": value for name, value in sums.items()}
        return out

    def report(self) -> str:
        """A table for each method: the mean milliseconds of each stage, on the driver and on each rank. `idle` is the
        rest of the call, in which the rank waited for others."""
        return "\n\n".join("\n".join(_table(method, calls)) for method, calls in self._by_method().items())

    def _by_method(self) -> dict[str, list[CallTimes]]:
        out: dict[str, list[CallTimes]] = {}
        for call in self.calls:
            out.setdefault(call.method, []).append(call)
        return out


def _table(method: str, calls: list[CallTimes]) -> Iterator[str]:
    total = sum(call.end - call.begin for call in calls)
    noun = "call" if len(calls) == 1 else "calls"
    yield f"{method}: {len(calls)} {noun}, {1e3 * total / len(calls):,.1f} ms each"
    yield " " * 10 + "".join(f"{stage:>9}" for stage in (*STAGES, "idle"))
    ranks = sorted({span.rank for call in calls for span in call.spans if span.rank is not None})
    for rank in (None, *ranks):
        sums: dict[str, float] = {}
        for span in (span for call in calls for span in call.spans if span.rank == rank):
            sums[span.stage] = sums.get(span.stage, 0.0) + span.seconds
        sums["idle"] = max(total - sum(sums.values()), 0.0)
        cells = [f"{1e3 * sums[stage] / len(calls):,.1f}" if stage in sums else "" for stage in (*STAGES, "idle")]
        name = "driver" if rank is None else f"rank {rank}"
        yield f"{name:<10}{''.join(f'{cell:>9}' for cell in cells)}".rstrip()
