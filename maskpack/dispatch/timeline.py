"""Where the time of calls goes: stages of the driver and of each rank, as metrics, a table and a picture.

    driver   prepare | put                                            gather
    rank 0                 fetch | decode | run | encode | return
    rank 1                 fetch | decode | run      | encode | return

Times are those of the driver's clock. A rank tells when it began by its own; an error of that clock moves time between
`fetch` and `return`, and changes no other stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from maskpack.core.arguments import whole

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

    def svg(self, last: int = 1) -> str:
        """A picture of the last calls as an SVG: a line for the driver and for each rank, the stages along the time."""
        calls = self.calls[-whole(last, "last", 1, "Timeline.svg") :]
        return "\n".join([*_picture(calls), ""])

    def _by_method(self) -> dict[str, list[CallTimes]]:
        out: dict[str, list[CallTimes]] = {}
        for call in self.calls:
            out.setdefault(call.method, []).append(call)
        return out


def _lines(calls: Iterable[CallTimes]) -> dict[int | None, str]:
    """The name of the line of the driver and of each rank."""
    ranks = sorted({span.rank for call in calls for span in call.spans if span.rank is not None})
    return {None: "driver", **{rank: f"rank {rank}" for rank in ranks}}


def _table(method: str, calls: list[CallTimes]) -> Iterator[str]:
    total = sum(call.end - call.begin for call in calls)
    noun = "call" if len(calls) == 1 else "calls"
    yield f"{method}: {len(calls)} {noun}, {1e3 * total / len(calls):,.1f} ms each"
    yield " " * 10 + "".join(f"{stage:>9}" for stage in (*STAGES, "idle"))
    for rank, name in _lines(calls).items():
        sums: dict[str, float] = {}
        for span in (span for call in calls for span in call.spans if span.rank == rank):
            sums[span.stage] = sums.get(span.stage, 0.0) + span.seconds
        sums["idle"] = max(total - sum(sums.values()), 0.0)
        cells = [f"{1e3 * sums[stage] / len(calls):,.1f}" if stage in sums else "" for stage in (*STAGES, "idle")]
        yield f"{name:<10}{''.join(f'{cell:>9}' for cell in cells)}".rstrip()


# -------------------------------------------------------------------- the picture

_COLOURS = ("#7aa5ff", "#1d4ed8", "#9ca3af", "#5eead4", "#16a34a", "#f59e0b", "#c2410c", "#7c3aed")
_LEFT, _WIDE, _TOP, _HIGH = 90, 900, 76, 24


def _picture(calls: tuple[CallTimes, ...]) -> Iterator[str]:
    names = _lines(calls)
    begin, end = min((call.begin for call in calls), default=0.0), max((call.end for call in calls), default=0.0)
    scale = _WIDE / ((end - begin) or 1.0)
    high = _TOP + _HIGH * len(names) + 34
    methods = ", ".join(dict.fromkeys(call.method for call in calls)) or "no calls"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 24} {high}" '
        'font-family="sans-serif" font-size="11" fill="#222">'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    yield _text(16, 24, f"{methods}: {1e3 * (end - begin):,.1f} ms", 'font-size="15" font-weight="bold"')
    for place, (stage, colour) in enumerate(zip(STAGES, _COLOURS, strict=True)):
        x = _LEFT + 80 * place
        yield f'<rect x="{x}" y="41" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 14, 50, stage)
    for part in range(5):
        x = _LEFT + _WIDE * part / 4
        yield f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{high - 26}" stroke="#e3e6ea"/>'
        yield _text(x, high - 12, f"{1e3 * (end - begin) * part / 4:,.1f} ms", 'text-anchor="middle" fill="#666"')
    for place, (rank, name) in enumerate(names.items()):
        y = _TOP + _HIGH * place
        yield _text(16, y + 13, name)
        for span in (span for call in calls for span in call.spans if span.rank == rank and span.seconds > 0):
            yield (
                f'<rect x="{_LEFT + scale * (span.begin - begin):.1f}" y="{y}" width="{scale * span.seconds:.1f}" '
                f'height="{_HIGH - 6}" fill="{_COLOURS[STAGES.index(span.stage)]}">'
                f"<title>{name}: {span.stage} {1e3 * span.seconds:,.1f} ms</title></rect>"
            )
    yield "</svg>"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
