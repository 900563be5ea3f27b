"""The command `maskpack inspect`: where the bytes of a saved batch go, as a table, JSON and an SVG chart."""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from maskpack.core.keys import show
from maskpack.errors import MaskpackWarning
from maskpack.fields.options import not_strict
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.sizes import FieldReport, Figures, dtype_name, figures, printable, to_json
from maskpack.tools.files import Unusable, saved_batch, saved_registry

_LONGEST = 80


def run(args: argparse.Namespace) -> tuple[str, int]:
    """The command; returns what to print and the exit status."""
    if args.plot is not None and not args.plot.lower().endswith(".svg"):
        raise Unusable(f"--plot is {args.plot!r}; expected a file that ends in .svg, the only kind that is written")
    registry = saved_registry(args.registry)
    batch = saved_batch(Path(args.file), args.allow_pickle, args.max_bytes)
    if not isinstance(batch, PackedBatch):
        with warnings.catch_warnings(), not_strict():
            warnings.simplefilter("ignore", MaskpackWarning)  # the table lists the fields that stay padded
            batch = compress(batch, registry=registry, pad_token_id=args.pad_token_id)
    sizes = figures(batch)
    if args.plot is not None:
        Path(args.plot).write_text(chart(sizes, Path(args.file).name), encoding="utf-8")
    if args.json:
        return json.dumps({"file": args.file, **to_json(sizes)}, indent=2), 0
    codec = "no codec" if sizes.codec is None else f"codec {sizes.codec}"
    return f"{printable(args.file)}: {sizes.rows:,} rows, {len(sizes.fields):,} fields, {codec}\n\n{_table(sizes)}", 0


def _table(sizes: Figures) -> str:
    """The figures as aligned text: a line for each field, the totals, and the fields that stay padded."""
    lines = [("field", "dtype", "encoding", "padded", "real", "wire", "padded/wire", "left to gain")]
    for field in sizes.fields:
        amounts = _amounts(field.padded_bytes, field.real_bytes, field.wire_bytes)
        lines.append((_cell(show(field.path)), dtype_name(field), _cell(field.encoding), *amounts, _left(field.left)))
    lines.append(("layouts", "", "", "", "", f"{sizes.layouts:,}", "", ""))
    lines.append(("objects", "", "", *_amounts(sizes.objects, sizes.objects, sizes.objects), ""))
    lines.append(("header", "", "", "", "", f"{sizes.header:,}", "", ""))
    total = _amounts(sizes.padded_bytes, sizes.real_bytes, sizes.wire_bytes)
    lines.append(("total", "", "", *total, _left(sizes.left)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(text.rjust(w) if column > 2 else text.ljust(w) for column, (text, w) in enumerate(zip(line, widths)))  # noqa: B905
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    out = [*aligned[:1], rule, *aligned[1:-1], rule, *aligned[-1:]]
    if sizes.left is None:
        out.append("What is left to gain needs zstandard: pip install zstandard")
    padded = [field for field in sizes.fields if field.kind == "dense"]
    if padded:
        out += ["", "Fields that stay padded:"]
    for field in padded:
        name, reason = printable(show(field.path)), printable(field.reason or "by design")
        out.append(f"  {name} {field.shape} {dtype_name(field)}, {field.padded_bytes:,} bytes: {reason}")
    return "\n".join(line.rstrip() for line in out)


def _cell(name: str) -> str:
    """A name in a column, which is as wide as the longest."""
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _amounts(padded: int, real: int, on_wire: int) -> tuple[str, str, str, str]:
    return f"{padded:,}", f"{real:,}", f"{on_wire:,}", f"{padded / on_wire:,.1f}" if on_wire else "-"


def _left(left: int | None) -> str:
    return "-" if left is None else f"{left:,}"


# -------------------------------------------------------------------- chart

_KINDS_OF_BYTES = (("padded", "#b9c2cc"), ("real", "#5b9bd5"), ("wire", "#12436d"))
_BAR, _GAP, _TOP, _PLOT, _AFTER = 12, 12, 98, 560, 250
_LONGEST_LABEL = 40
_UNITS = ("B", "kB", "MB", "GB", "TB")


def chart(sizes: Figures, title: str) -> str:
    """An SVG with three bars for each field: its padded, real and wire bytes on a log scale from 1 byte."""
    names = [printable(show(field.path)) for field in sizes.fields]
    left = 24 + 7 * min(_LONGEST_LABEL, max(map(len, names), default=0))
    most = max([1, *[getattr(field, f"{name}_bytes") for field in sizes.fields for name, _ in _KINDS_OF_BYTES]])
    decades = max(1, math.ceil(math.log10(most)))
    step = len(_KINDS_OF_BYTES) * _BAR + _GAP
    bottom = _TOP + step * len(names)
    totals = f"{sizes.rows:,} rows, {sizes.padded_bytes:,} bytes padded, {sizes.wire_bytes:,} on the wire"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + _PLOT + _AFTER}" height="{bottom + 40}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(24, 26, printable(title), 'font-size="16" font-weight="bold"'),
        _text(24, 46, f"{totals} ({sizes.ratio:.1f} times fewer); bytes of each field, log scale"),
    ]
    for place, (name, colour) in enumerate(_KINDS_OF_BYTES):
        x = left + 70 * place
        out += [f'<rect x="{x}" y="61" width="10" height="10" fill="{colour}"/>', _text(x + 14, 70, name)]
    for power in range(decades + 1):
        x = left + _PLOT * power / decades
        out.append(f'<line x1="{x:.1f}" y1="{_TOP - 10}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e6ea"/>')
        out.append(_text(x, bottom + 18, _decade(power), 'text-anchor="middle" fill="#666"'))
    for place, field in enumerate(sizes.fields):
        out += _bars(field, names[place], left, _TOP + step * place, decades)
    return "\n".join([*out, "</svg>", ""])


def _bars(field: FieldReport, name: str, left: int, y: int, decades: int) -> Iterator[str]:
    """The name of a field and its bars, below each other."""
    short = name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "…"
    yield f'<g class="field"><title>{escape(name)}</title>'
    yield _text(left - 8, y + 1.5 * _BAR + 4, short, 'text-anchor="end"')
    for place, (bar, colour) in enumerate(_KINDS_OF_BYTES):
        size = getattr(field, f"{bar}_bytes")
        length = _PLOT * math.log10(size) / decades + 2 if size else 0
        top = y + place * _BAR
        note = f"{size:,}" + (f"  {printable(field.encoding)}" if bar == "wire" else "")
        yield f'<rect class="{bar}" x="{left}" y="{top}" width="{length:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
        yield _text(left + length + 5, top + 9, note, 'font-size="9" fill="#555"')
    yield "</g>"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _decade(power: int) -> str:
    unit = min(power // 3, len(_UNITS) - 1)
    return f"{10 ** (power - 3 * unit):,} {_UNITS[unit]}"
