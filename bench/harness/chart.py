"""What the charts share: an SVG whose colours follow the reader's system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from xml.sax.saxutils import escape

BOLD = 'font-weight="bold"'
INK, PAPER = ("#1f2328", "#e6e8eb"), ("#ffffff", "#14181d")  # on white, on dark
_FAINT = ("#d5d9de", "#3b424b")


def svg(width: int, height: int, rules: Callable[[int], str], content: Iterable[str]) -> str:
    """`rules` are those of CSS for white, 0, and for dark, 1."""

    def style(which: int) -> str:
        ground = f".ink{{fill:{INK[which]}}}.paper{{fill:{PAPER[which]}}}.grid{{stroke:{_FAINT[which]}}}"
        return ground + rules(which)

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" class="ink">',
            f"<style>{style(0)}@media (prefers-color-scheme:dark){{{style(1)}}}</style>",
            '<rect width="100%" height="100%" rx="6" class="paper"/>',
            *content,
            "</svg>",
            "",
        ]
    )


def heading(title: str, *lines: str) -> Iterator[str]:
    yield text(24, 28, title, f'font-size="16" {BOLD}')
    for place, one in enumerate(lines):
        yield text(24, 48 + 16 * place, one)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
