"""A model of dispatch over a link, and the chart of it.

    time = what one machine takes (encode + put + call + get + restore, measured) + bytes in the object store / speed

It is a model: it knows no latency, lets nothing overlap, and takes the link for as fast as its name. The measured
points of `link` stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.cases.dispatch.forms import JAGGED, TRUSTED, VERIFIED, ZERO_COPY
from bench.cases.dispatch.link import Crossing
from bench.harness.figure import line, svg, text
from bench.harness.report import Row

FORMS = (ZERO_COPY, JAGGED, VERIFIED, TRUSTED)
CASE = "dispatch model"
_SLOWEST, _FASTEST = 1.0, 400.0


@dataclass(frozen=True)
class Model:
    """What one machine takes: `ms` end to end, and `sizes`, the bytes that would cross the link, by form."""

    ms: Mapping[str, float]
    sizes: Mapping[str, int]

    def at(self, name: str, speed: float) -> float:
        """Milliseconds over a link of `speed` Gbit/s."""
        return self.ms[name] + self.sizes[name] * 8 / (speed * 1e9) * 1e3

    def break_even(self, name: str, rival: str = ZERO_COPY) -> float | None:
        """Gbit/s from which on `rival` is faster, which sends more bytes; None if it never is."""
        more = self.ms[name] - self.ms[rival]
        return None if more <= 0 else (self.sizes[rival] - self.sizes[name]) * 8 / (more * 1e-3) / 1e9


def report(model: Model) -> list[Row]:
    """The points of break-even that there are."""
    speeds = {name: model.break_even(name) for name in FORMS}
    return [
        Row(CASE, f"break-even of {name} with {ZERO_COPY}", speed, "Gbit/s") for name, speed in speeds.items() if speed
    ]


# -------------------------------------------------------------------- chart

_LEFT, _TOP, _WIDTH, _HEIGHT, _AFTER, _BELOW = 46, 152, 360, 300, 58, 56
_LINE_GAP = 15  # between the times at the ends of lines
_COLOURS = {  # on white, on dark
    "ink": ("#1f2328", "#e6e8eb"),
    "paper": ("#ffffff", "#14181d"),
    "faint": ("#d5d9de", "#3b424b"),
    "c0": ("#c2410c", "#fb923c"),
    "c1": ("#6b7280", "#a8b0bd"),
    "c2": ("#1d4ed8", "#7aa5ff"),
    "c3": ("#0f766e", "#3fd0bd"),
}
_RULES = "".join(
    (
        ".dispatch .grid{stroke:var(--faint)}.dispatch .dot{stroke:var(--paper);stroke-width:1.5}",
        ".dispatch .mark{fill:var(--paper);stroke:var(--ink);stroke-width:2}",
        *(
            f".dispatch .c{place}{{fill:var(--c{place})}}.dispatch .line.c{place}{{fill:none;stroke:var(--c{place})}}"
            for place in range(len(FORMS))
        ),
    )
)


def chart(model: Model, crossings: Sequence[Crossing], rows: int, workload: str) -> str:
    """An SVG: time against the speed of the link, both on log axes. Lines are the model, dots were measured, those at
    the right edge on one machine; diamonds are points of break-even."""
    scale = _Scale.of(model, crossings)
    title = "Time from driver to actor, by the speed of the link"
    parts = [
        text(20, 28, title, 'font-size="15" font-weight="bold"'),
        text(20, 48, f"{rows} rows of the {workload} workload; both axes log; lines: model; dots: measured"),
        text(20, 66, f"Up to {_FASTEST:g} Gbit/s, faster than {ZERO_COPY}:"),
        text(20, 82, _ahead(model)),
        *_legend(),
        *_axes(scale),
    ]
    ends = _spread({name: scale.y(model.ms[name]) for name in FORMS})
    for name in FORMS:
        parts += _curve(model, crossings, name, scale, ends[name])
    for name in FORMS:
        parts += _diamond(model, name, scale)
    return svg("dispatch", _LEFT + _WIDTH + _AFTER, _TOP + _HEIGHT + _BELOW, title, _COLOURS, _RULES, parts)


def _legend() -> Iterator[str]:
    for place, name in enumerate(FORMS):
        x, y = 20 + 220 * (place % 2), 106 + 18 * (place // 2)
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" class="c{place}"/>'
        yield text(x + 16, y, name)


@dataclass(frozen=True)
class _Scale:
    """Where a speed and a time lie; `low` and `high` are the milliseconds at the ends of the axis."""

    low: float
    high: float

    @classmethod
    def of(cls, model: Model, crossings: Sequence[Crossing]) -> _Scale:
        times = [model.ms[name] for name in FORMS] + [model.at(name, _SLOWEST) for name in FORMS]
        times += [phases["end to end"] for crossing in crossings for phases in crossing.ms.values()]
        return cls(min(times) / 1.5, max(times) * 1.2)

    def x(self, speed: float) -> float:
        return _LEFT + (_WIDTH - 60) * math.log(speed / _SLOWEST) / math.log(_FASTEST / _SLOWEST)

    @property
    def local(self) -> float:
        """Of one machine, at the right edge."""
        return _LEFT + _WIDTH

    def y(self, ms: float) -> float:
        return _TOP + _HEIGHT * math.log(self.high / ms) / math.log(self.high / self.low)


def _axes(scale: _Scale) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    for speed in (1, 2, 5, 10, 25, 50, 100, 200, 400):
        yield line(scale.x(speed), _TOP, scale.x(speed), bottom, "grid")
        yield text(scale.x(speed), bottom + 18, str(speed), 'text-anchor="middle"')
    yield line(scale.local, _TOP, scale.local, bottom, "grid")
    yield text(scale.local, bottom + 18, "one machine", 'text-anchor="middle"')
    yield text((_LEFT + scale.x(_FASTEST)) / 2, bottom + 42, "link, Gbit/s", 'text-anchor="middle"')
    for power in range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))):
        for ms in (10**power, 2 * 10**power, 5 * 10**power):
            if scale.low <= ms <= scale.high:
                yield line(_LEFT, scale.y(ms), scale.local, scale.y(ms), "grid")
                yield text(_LEFT - 8, scale.y(ms) + 4, f"{ms:g}", 'text-anchor="end"')
    yield text(_LEFT - 8, _TOP - 4, "ms", 'text-anchor="end"')


def _curve(model: Model, crossings: Sequence[Crossing], name: str, scale: _Scale, end: float) -> Iterator[str]:
    """The line of a form, its dots, and the time on one machine at its end."""
    hue = f"c{FORMS.index(name)}"
    steps = [_SLOWEST * (_FASTEST / _SLOWEST) ** (step / 80) for step in range(81)]
    points = [(scale.x(speed), scale.y(model.at(name, speed))) for speed in steps]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{joined}" fill="none" stroke-width="2.5" class="line {hue}"/>'
    dots = [(scale.x(crossing.limit), crossing.ms[name]["end to end"]) for crossing in crossings if name in crossing.ms]
    last = f"M{points[-1][0]:.1f} {points[-1][1]:.1f}"
    local = f"L{scale.local:.1f} {scale.y(model.ms[name]):.1f}"
    yield f'<path d="{last}{local}" stroke-dasharray="3 4" class="line {hue}"/>'
    for x, ms in [*dots, (scale.local, model.ms[name])]:
        yield f'<circle cx="{x:.1f}" cy="{scale.y(ms):.1f}" r="4.5" class="dot {hue}"/>'
    yield text(scale.local + 10, end + 4, f"{model.ms[name]:.0f} ms", f'class="{hue}"')


def _diamond(model: Model, form: str, scale: _Scale) -> Iterator[str]:
    speed = model.break_even(form)
    if speed is None or not _SLOWEST <= speed <= _FASTEST:
        return
    x, y = scale.x(speed), scale.y(model.at(form, speed))
    yield f'<path d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z" class="mark"/>'
    label = f"break-even {speed:.{0 if speed >= 10 else 1}f} Gbit/s"
    if x < _LEFT + _WIDTH / 4:  # no room on the left
        yield text(x + 14, y - 10, label, 'font-weight="bold"')
    else:
        yield text(x - 12, y + 22, label, 'text-anchor="end" font-weight="bold"')


def _ahead(model: Model) -> str:
    """Which forms of maskpack the zero-copy rival does not catch up with."""
    return "; ".join(form for form in (VERIFIED, TRUSTED) if (model.break_even(form) or math.inf) > _FASTEST) or "none"


def _spread(places: Mapping[str, float]) -> dict[str, float]:
    """Heights for times at the ends of lines, moved apart downwards where they would overlap."""
    out: dict[str, float] = {}
    before = -math.inf
    for name, y in sorted(places.items(), key=lambda item: item[1]):
        before = out[name] = max(y, before + _LINE_GAP)
    return out
