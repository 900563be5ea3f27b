"""The chart of two runs on top of each other: rewards, losses, and how far the losses are apart (log axis)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LEFT, _WIDTH, _AFTER, _TOP, _BELOW = 76, 690, 24, 92, 46
_HEIGHTS, _BETWEEN = (150, 150, 110), 46
_WIDE, _THIN = ("#fdba74", "#9a5518"), ("#1d4ed8", "#7aa5ff")  # padded and packed; on white, on dark
_INK, _FAINT, _PAPER = ("#1f2328", "#e6e8eb"), ("#d5d9de", "#3b424b"), ("#ffffff", "#14181d")


@dataclass(frozen=True)
class _Panel:
    """One of the axes: its place, the values at its ends, and how many steps it is wide."""

    top: float
    height: float
    low: float
    high: float
    steps: int
    log: bool = False

    def x(self, step: float) -> float:
        return _LEFT + _WIDTH * step / self.steps

    def y(self, value: float) -> float:
        if self.log:
            return self.top + self.height * math.log(self.high / value) / math.log(self.high / self.low)
        return self.top + self.height * (self.high - value) / (self.high - self.low)


def chart(
    rewards: tuple[Sequence[float], Sequence[float]], losses: tuple[Sequence[float], Sequence[float]], note: str
) -> str:
    """An SVG.

    Args:
        rewards: of the steps, padded and packed.
        losses: of the updates, as many in each step, padded and packed.
        note: a line under the title.
    """
    steps = len(rewards[0])
    # a difference of 0 has no logarithm: it is drawn at the lower edge
    apart = [abs(a - b) for a, b in zip(*losses, strict=True)]
    least = 10.0 ** math.floor(math.log10(min([value for value in apart if value] or [1e-9])))
    most = 10.0 ** math.ceil(math.log10(max(max(apart), 10 * least)))
    tops = [_TOP + sum(_HEIGHTS[:place]) + place * _BETWEEN for place in range(3)]
    ends = [_ends([*pair[0], *pair[1]]) for pair in (rewards, losses)]
    panels = [_Panel(tops[place], _HEIGHTS[place], *ends[place], steps) for place in range(2)]
    panels.append(_Panel(tops[2], _HEIGHTS[2], least, most, steps, log=True))
    width, height = _LEFT + _WIDTH + _AFTER, tops[2] + _HEIGHTS[2] + _BELOW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" class="ink">',
        _style(),
        '<rect width="100%" height="100%" rx="6" class="paper"/>',
        _text(24, 28, "GRPO, padded and packed from end to end", 'font-size="16" font-weight="bold"'),
        _text(24, 48, note),
        *_legend(),
        *_axis(panels[0], "mean reward of each step"),
        *_axis(panels[1], "loss of each optimizer update"),
        *_axis(panels[2], "distance between the two losses"),
    ]
    for panel, pair in zip(panels, (rewards, losses), strict=False):
        out += [_curve(panel, values, name) for name, values in zip(("wide", "thin"), pair, strict=True)]
    out.append(_curve(panels[2], [max(value, least) for value in apart], "thin"))
    out += [_text(panels[2].x(at), height - 26, str(at), 'text-anchor="middle"') for at in _marks(steps)]
    out.append(_text(_LEFT + _WIDTH / 2, height - 8, "step", 'text-anchor="middle"'))
    return "\n".join([*out, "</svg>", ""])


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around values."""
    step = _step(values)
    return math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step


def _step(values: Sequence[float]) -> float:
    """1, 2 or 5 times a power of ten: a third of the range, or less."""
    third = max(max(values) - min(values), 1e-9) / 3
    power = 10.0 ** math.floor(math.log10(third))
    return max(power * digit for digit in (1, 2, 5) if power * digit <= third)


def _marks(steps: int) -> range:
    return range(0, steps + 1, max(1, steps // 6))


def _axis(panel: _Panel, title: str) -> Iterator[str]:
    bottom = panel.top + panel.height
    yield _text(_LEFT, panel.top - 10, title, 'font-weight="bold"')
    for step in _marks(panel.steps):
        yield _line(panel.x(step), panel.top, panel.x(step), bottom)
    if panel.log:
        powers = range(round(math.log10(panel.low)), round(math.log10(panel.high)) + 1)
        values = {10.0**power: f"1e{power}" for power in powers}
    else:
        step = _step((panel.low, panel.high))
        count = round((panel.high - panel.low) / step)
        values = {panel.low + at * step: f"{panel.low + at * step:.3g}" for at in range(count + 1)}
    for value, label in values.items():
        yield _line(_LEFT, panel.y(value), _LEFT + _WIDTH, panel.y(value))
        yield _text(_LEFT - 8, panel.y(value) + 4, label, 'text-anchor="end"')


def _curve(panel: _Panel, values: Sequence[float], name: str) -> str:
    """Values at equal distances, each in the middle of its part of the steps."""
    part = panel.steps / len(values)
    points = " ".join(f"{panel.x((at + 0.5) * part):.1f},{panel.y(value):.1f}" for at, value in enumerate(values))
    return f'<polyline points="{points}" class="{name}"/>'


def _legend() -> Iterator[str]:
    for x, name, label in ((_LEFT + _WIDTH - 190, "wide", "padded"), (_LEFT + _WIDTH - 84, "thin", "maskpack")):
        yield f'<polyline points="{x},24 {x + 24},24" class="{name}"/>'
        yield _text(x + 32, 28, label)


def _style() -> str:
    """Colours for white, and for dark where the reader's system asks for them."""

    def rules(which: int) -> str:
        return (
            f".ink{{fill:{_INK[which]}}}.paper{{fill:{_PAPER[which]}}}.grid{{stroke:{_FAINT[which]}}}"
            f".wide{{stroke:{_WIDE[which]}}}.thin{{stroke:{_THIN[which]}}}"
        )

    shape = "polyline{fill:none;stroke-linejoin:round}.wide{stroke-width:6}.thin{stroke-width:1.6}"
    return f"<style>{shape}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
