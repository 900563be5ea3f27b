"""SVG for figures of the docs, in colours for light and dark.

    name, {part: (light, dark)}  ->  <svg class="NAME"> with --part for each colour; rules of the caller use var(--part)

A file alone follows the reader's system. The site puts the SVG into its pages, where the switch of the theme, on the
body of the page, overrules the system. All rules begin with the name, so that figures of one page do not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape

Colours = Mapping[str, tuple[str, str]]


def svg(name: str, wide: int, high: int, title: str, colours: Colours, rules: str, parts: Iterable[str]) -> str:
    """The figure. `rules` are of CSS, each below `.name`; text has the colour `ink`, the ground `paper`."""
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="{name}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<style>{_themes(name, colours)}.{name}{{fill:var(--ink)}}.{name} .paper{{fill:var(--paper)}}{rules}</style>",
        '<rect width="100%" height="100%" rx="6" class="paper"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _themes(name: str, colours: Colours) -> str:
    light, dark = ("".join(f"--{part}:{pair[which]};" for part, pair in colours.items()) for which in (0, 1))
    return (
        f".{name}{{{light}}}@media (prefers-color-scheme:dark){{.{name}{{{dark}}}}}"
        f"body[data-theme=light] .{name}{{{light}}}body[data-theme=dark] .{name}{{{dark}}}"
    )


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
