"""The command `maskpack inspect`: where the bytes of a saved batch, or of a log, go, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

from maskpack.core.keys import show
from maskpack.errors import MaskpackWarning
from maskpack.fields.options import not_strict
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.sizes import Figures, aligned, dtype_name, figures, printable, to_json
from maskpack.store.log import RolloutLog
from maskpack.tools.files import saved_batch, saved_log, saved_registry
from maskpack.tools.suggest import Suggester

_LONGEST = 80


def run(args: argparse.Namespace) -> tuple[str, int]:
    """The command; returns what to print and the exit status."""
    registry = saved_registry(args.registry)
    with warnings.catch_warnings(record=True) as damages:
        warnings.simplefilter("always", MaskpackWarning)
        log = saved_log(args.file, args.allow_pickle)
    if log is not None:
        return _of_log(log, [str(damage.message) for damage in damages], args.json), 0
    batch, note = saved_batch(args.file, args.allow_pickle, args.max_bytes)
    if not isinstance(batch, PackedBatch):
        token = Suggester(batch, registry, args.pad_token_id).pad_token_id
        with warnings.catch_warnings(), not_strict():
            warnings.simplefilter("ignore", MaskpackWarning)  # the table lists the fields that stay padded
            batch = compress(batch, registry=registry, pad_token_id=token or 0)
    sizes = figures(batch)
    if args.json:
        return json.dumps({"file": args.file, "note": note, **to_json(sizes)}, indent=2), 0
    head = f"{args.file}: {sizes.rows:,} rows, {len(sizes.fields):,} fields, codec {sizes.codec or 'none'}"
    return "\n".join([printable(f"{head} ({note})" if note else head), "", *_with_padded(sizes)]), 0


def _of_log(log: RolloutLog, damages: list[str], in_json: bool) -> str:
    """The rows, segments and tags of a log, and the figures of its last chunk."""
    chunks, gone = log.chunks(), log.next_row - len(log)
    tags = {
        name: (sum(value is not None for value in values), len(set(values) - {None}))
        for name, values in log.tags(log.rows).items()
    }
    sizes = figures(log[chunks[-1]]) if chunks else None
    found: dict[str, Any] = {"file": log.path, "rows": len(log), "gone": gone, "chunks": len(chunks)}
    found |= {"segments": log.segments, "bytes": log.nbytes, "damages": damages}
    found |= {"tags": {name: {"rows": rows, "values": values} for name, (rows, values) in tags.items()}}
    if in_json:
        return json.dumps(found | {"last_chunk": None if sizes is None else to_json(sizes)}, indent=2)
    left = f"{gone:,} rows were deleted{' or damaged' if damages else ''}"
    out = [f"{printable(log.path)}: {len(log):,} rows in {len(chunks):,} chunks; {left}"]
    out += [f"{log.nbytes:,} bytes in {log.segments:,} segments", *map(printable, damages)]
    out += [f"tag {_cell(name)}: {values:,} values in {rows:,} rows" for name, (rows, values) in tags.items()]
    if sizes is not None:
        rows = chunks[-1]
        out += ["", f"The last chunk, {rows.size:,} rows from {rows[0]:,} to {rows[-1]:,}:", "", *_with_padded(sizes)]
    return "\n".join(out)


def table(sizes: Figures) -> list[str]:
    """The figures as aligned lines: one for each field, and the totals."""
    lines = [("field", "dtype", "encoding", "padded", "real", "wire", "padded/wire", "left to gain")]
    for field in sizes.fields:
        amounts = _amounts(field.padded_bytes, field.real_bytes, field.wire_bytes)
        lines.append((_cell(show(field.path)), dtype_name(field), _cell(field.encoding), *amounts, _left(field.left)))
    lines.append(("layouts", "", "", "", "", f"{sizes.layouts:,}", "", ""))
    lines.append(("objects", "", "", *_amounts(sizes.objects, sizes.objects, sizes.objects), ""))
    lines.append(("header", "", "", "", "", f"{sizes.header:,}", "", ""))
    total = _amounts(sizes.padded_bytes, sizes.real_bytes, sizes.wire_bytes)
    lines.append(("total", "", "", *total, _left(sizes.left)))
    known = sizes.left is not None
    return aligned([line if known else line[:-1] for line in lines], 3)


def _with_padded(sizes: Figures) -> list[str]:
    """The table, and the fields that stay padded."""
    out = table(sizes)
    if sizes.left is None:
        out.append("What is left to gain needs zstandard: pip install zstandard")
    padded = [field for field in sizes.fields if field.kind == "dense"]
    if padded:
        out += ["", "Fields that stay padded:"]
    for field in padded:
        name, reason = printable(show(field.path)), printable(field.reason or "by design")
        out.append(f"  {name} {field.shape} {dtype_name(field)}, {field.padded_bytes:,} bytes: {reason}")
    return out


def _cell(name: str) -> str:
    """A name in a column, which is as wide as the longest."""
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _amounts(padded: int, real: int, on_wire: int) -> tuple[str, str, str, str]:
    return f"{padded:,}", f"{real:,}", f"{on_wire:,}", f"{padded / on_wire:,.1f}" if on_wire else "-"


def _left(left: int | None) -> str:
    return "-" if left is None else f"{left:,}"
