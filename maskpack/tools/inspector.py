"""The command `maskpack inspect`: where the bytes of a saved batch, or of a log, go, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

from maskpack.errors import MaskpackWarning
from maskpack.fields.options import not_strict
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.report import cell, printable, report
from maskpack.store.log import RolloutLog
from maskpack.tools.files import saved_batch, saved_log, saved_registry
from maskpack.tools.suggest import Suggester


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
    sizes = report(batch)
    if args.json:
        return json.dumps({"file": args.file, "note": note, **sizes.to_dict()}, indent=2), 0
    head = f"{args.file}: {sizes.rows:,} rows, {len(sizes.fields):,} fields, codec {sizes.codec or 'none'}"
    return "\n".join([printable(f"{head} ({note})" if note else head), "", str(sizes)]), 0


def _of_log(log: RolloutLog, damages: list[str], in_json: bool) -> str:
    """The rows, segments and tags of a log, and the report of its last chunk."""
    chunks, gone = log.chunks(), log.next_row - len(log)
    tags = {
        name: (sum(value is not None for value in values), len(set(values) - {None}))
        for name, values in log.tags(log.rows).items()
    }
    sizes = report(log[chunks[-1]]) if chunks else None
    found: dict[str, Any] = {"file": log.path, "rows": len(log), "gone": gone, "chunks": len(chunks)}
    found |= {"segments": log.segments, "bytes": log.nbytes, "damages": damages}
    found |= {"tags": {name: {"rows": rows, "values": values} for name, (rows, values) in tags.items()}}
    if in_json:
        return json.dumps(found | {"last_chunk": None if sizes is None else sizes.to_dict()}, indent=2)
    left = f"{gone:,} rows were deleted{' or damaged' if damages else ''}"
    out = [f"{printable(log.path)}: {len(log):,} rows in {len(chunks):,} chunks; {left}"]
    out += [f"{log.nbytes:,} bytes in {log.segments:,} segments", *map(printable, damages)]
    out += [f"tag {cell(name)}: {values:,} values in {rows:,} rows" for name, (rows, values) in tags.items()]
    if sizes is not None:
        rows = chunks[-1]
        out += ["", f"The last chunk, {rows.size:,} rows from {rows[0]:,} to {rows[-1]:,}:", "", str(sizes)]
    return "\n".join(out)
