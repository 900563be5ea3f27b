"""The chart of ratios over their targets: a bar for each, right of the line is better than the target (log axis)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_LEFT, _WIDTH, _AFTER, _TOP, _BELOW, _HIGH, _BETWEEN = 470, 360, 70, 78, 34, 15, 30
_MET, _MISSED = ("#1d4ed8", "#7aa5ff"), ("#c2410c", "#fb923c")  # on white, on dark
_INK, _FAINT, _PAPER = ("#1f2328", "#e6e8eb"), ("#d5d9de", "#3b424b"), ("#ffffff", "#14181d")
_LONGEST = 74
_MOST = 10.0
"""Times better or worse than the target at the ends of the axis; longer bars end there."""


def chart(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """An SVG of the ratios among comparisons, by the name of their record; others have no common axis."""
    ratios = {name: [row for row in rows if row["unit"] == "x" and row["target"]] for name, rows in groups.items()}
    ratios = {name: rows for name, rows in ratios.items() if rows}
    wide = _LEFT + _WIDTH + _AFTER
    high = _TOP + sum(_BETWEEN + _HIGH * len(rows) for rows in ratios.values()) + _BELOW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="11" class="ink">',
        _style(),
        '<rect width="100%" height="100%" rx="6" class="paper"/>',
        _text(24, 28, "Ratios over their targets", 'font-size="16" font-weight="bold"'),
        _text(
            24,
            48,
            f"right of the line: better than the target, at most {_MOST:.0f} times; beside each bar the ratio itself",
        ),
    ]
    middle, y = _LEFT + _WIDTH / 2, float(_TOP)
    out.append(f'<line x1="{middle}" y1="{_TOP - 14}" x2="{middle}" y2="{high - _BELOW}" class="grid"/>')
    for name, rows in ratios.items():
        out.append(_text(24, y + 12, name, 'font-weight="bold" font-size="12"'))
        y += _BETWEEN - 8
        for row in rows:
            out += _bar(row, y, middle, _WIDTH / 2 / math.log(_MOST))
            y += _HIGH
        y += 8
    return "\n".join([*out, "</svg>", ""])


def _times(row: Mapping[str, Any]) -> float:
    """How many times better than its target a ratio is."""
    direction, bound = row["target"].split()
    times = row["value"] / float(bound)
    return times if direction == ">=" else 1 / times


def _bar(row: Mapping[str, Any], y: float, middle: float, scale: float) -> Iterator[str]:
    long = scale * math.log(min(max(_times(row), 1 / _MOST), _MOST))
    kind = "met" if row["met"] else "missed"
    label = f"{row['case']}: {row['name']}"
    label = label if len(label) <= _LONGEST else label[: _LONGEST - 3] + "..."
    yield _text(_LEFT - 8, y + 10, label, 'text-anchor="end"')
    x, wide = min(middle, middle + long), max(abs(long), 1)
    yield f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{wide:.1f}" height="10" class="{kind}"/>'
    anchor = ("start", 4) if long >= 0 else ("end", -4)
    yield _text(middle + long + anchor[1], y + 11, f"{row['value']:.2f} x", f'text-anchor="{anchor[0]}" font-size="10"')


def _style() -> str:
    """Colours for white, and for dark where the reader's system asks for them."""

    def rules(which: int) -> str:
        return (
            f".ink{{fill:{_INK[which]}}}.paper{{fill:{_PAPER[which]}}}.grid{{stroke:{_INK[which]};stroke-width:1}}"
            f".met{{fill:{_MET[which]}}}.missed{{fill:{_MISSED[which]}}}"
        )

    return f"<style>{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
