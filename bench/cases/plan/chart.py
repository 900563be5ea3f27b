"""The chart of micro-batches before and after: one bar each, its rows piled up, against one token budget.

before   so many rows each, in the order given; every row is padded to the longest of its micro-batch
after    by token budget: rows are as long as they are

All bars are equally wide, so that areas are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.harness.chart import BOLD, INK, PAPER, heading, line, svg, text

_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW, _AFTER, _BETWEEN = 64, 150, 826, 290, 46, 24, 44
_REAL, _PADDING = ("#1d4ed8", "#7aa5ff"), ("#c2410c", "#fb923c")  # on white, on dark

Bars = Sequence[Sequence[int]]
"""Micro-batches, as the lengths of their rows."""


@dataclass(frozen=True)
class _Scale:
    """`step` and `high` are tokens between lines and at the top, `pitch` from bar to bar, `middle` where those after
    begin."""

    step: int
    high: int
    pitch: float
    middle: float

    @classmethod
    def of(cls, before: Bars, after: Bars, budget: int) -> _Scale:
        most = max(budget, *map(_padded, before), *map(sum, after))
        step = _round(most / 5)
        pitch = (_WIDTH - _BETWEEN) / (len(before) + len(after))
        return cls(step, -(-most // step) * step, pitch, _LEFT + pitch * len(before) + _BETWEEN)

    def y(self, tokens: float) -> float:
        return _TOP + _HEIGHT * (1 - tokens / self.high)


def chart(workload: str, before: Bars, after: Bars, budget: int, width: int) -> str:
    """An SVG.

    Args:
        workload: its name.
        before, after: the same rows; at least one micro-batch each, none without rows.
        budget: in tokens.
        width: S, what the batch is padded to.
    """
    scale = _Scale.of(before, after, budget)
    rows, tokens = sum(map(len, after)), sum(map(sum, after))
    out = [
        *heading(
            "Tokens of each micro-batch, before and after",
            f"{rows:,} rows of the {workload} workload, {tokens:,} tokens; a bar is a micro-batch, a box a row",
        ),
        *_axes(scale, len(before), len(after)),
        *_caption(_LEFT, _words_before(before, tokens, budget, width)),
        *_caption(scale.middle, _words_after(after, tokens, budget)),
    ]
    for place, lengths in enumerate(before):
        out += _bar(_LEFT + place * scale.pitch, lengths, _padded(lengths), scale)
    for place, lengths in enumerate(after):
        out += _bar(scale.middle + place * scale.pitch, lengths, sum(lengths), scale)
    out += _budget_line(scale, budget)
    return svg(_LEFT + _WIDTH + _AFTER, _TOP + _HEIGHT + _BELOW, _rules, [*out, *_legend()])


def _padded(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


def _words_before(bars: Bars, tokens: int, budget: int, width: int) -> list[str]:
    each = max(map(len, bars))
    over = sum(_padded(lengths) > budget for lengths in bars)
    real = _percent(tokens / sum(map(_padded, bars)))
    return [
        f"by count: {each} rows each, in the order given",
        f"{len(bars)} micro-batches, padded to the longest row of each: {real} real",
        f"{over} of them over the budget; padded to S = {width:,}, each would be {each * width:,} tokens",
    ]


def _words_after(bars: Bars, tokens: int, budget: int) -> list[str]:
    use = _percent(tokens / budget / len(bars))
    return ["by token budget", f"{len(bars)} micro-batches, not padded:", f"{use} of the budget used"]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _caption(x: float, lines: Sequence[str]) -> Iterator[str]:
    for place, words in enumerate(lines):
        yield text(x, 82 + 17 * place, words, "" if place else BOLD)


def _axes(scale: _Scale, before: int, after: int) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    for tokens in range(0, scale.high + 1, scale.step):
        yield line(_LEFT, scale.y(tokens), _LEFT + _WIDTH, scale.y(tokens), "grid")
        yield text(_LEFT - 8, scale.y(tokens) + 4, f"{tokens:,}", 'text-anchor="end"')
    yield text(_LEFT - 8, _TOP - 14, "tokens", 'text-anchor="end"')
    for x, count in ((_LEFT, before), (scale.middle, after)):
        yield text(x + scale.pitch / 2, bottom + 18, "1", 'text-anchor="middle"')
        if count > 1:
            yield text(x + scale.pitch * (count - 0.5), bottom + 18, str(count), 'text-anchor="middle"')
        yield text(x + scale.pitch * count / 2, bottom + 34, "micro-batch", 'text-anchor="middle"')


def _round(least: float) -> int:
    """1, 2 or 5 times a power of ten, at least that."""
    power = 10 ** max(math.floor(math.log10(least)), 0)
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least)


def _bar(x: float, lengths: Sequence[int], drawn: int, scale: _Scale) -> Iterator[str]:
    """The rows of a micro-batch from the bottom up, and the padding above them."""
    at, boxes = 0, ""
    for length in lengths:
        boxes += _box(x, at, length, scale)
        at += length
    yield f'<path d="{boxes}" class="real"/>'
    if drawn > at:
        yield f'<path d="{_box(x, at, drawn - at, scale)}" class="padding"/>'


def _box(x: float, below: int, tokens: int, scale: _Scale) -> str:
    wide, high = 0.84 * scale.pitch, _HEIGHT * tokens / scale.high
    return f"M{x + 0.08 * scale.pitch:.1f} {scale.y(below):.1f}v{-high:.1f}h{wide:.1f}v{high:.1f}z"


def _budget_line(scale: _Scale, budget: int) -> Iterator[str]:
    y = scale.y(budget)
    yield line(_LEFT, y, _LEFT + _WIDTH, y, "budget")
    yield text(_LEFT + _WIDTH, y - 5, f"token budget {budget:,}", f'text-anchor="end" {BOLD}')


def _legend() -> Iterator[str]:
    for x, name, kind in ((_LEFT + _WIDTH - 176, "real tokens", "real"), (_LEFT + _WIDTH - 72, "padding", "padding")):
        yield f'<rect x="{x}" y="39" width="10" height="10" class="{kind}"/>'
        yield text(x + 16, 48, name)


def _rules(which: int) -> str:
    return (
        f".real{{fill:{_REAL[which]}}}.padding{{fill:{_PADDING[which]}}}path{{stroke:{PAPER[which]};stroke-width:.6}}"
        f".budget{{stroke:{INK[which]};stroke-width:1.5;stroke-dasharray:6 4}}"
    )
