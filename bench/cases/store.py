"""A log of packed rows on disk: append with a sync, open, rows by number, memory.

The floor of an append is one write and one fsync of the same packed bytes; a user without maskpack has `torch.save` of
the padded batch and an fsync. The floor of reading is the decode of the same rows of mapped
files, one for each append, from the page cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.harness.measure import interleaved, memory, progress, require_same, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.workloads import PAD_ID, batch_of
from maskpack import PackedBatch, compress, decompress
from maskpack.store import RolloutLog

_APPEND, _FLOOR = "append of packed rows, fsync", "one write and fsync of their bytes"
_WHOLE, _SAVE = "append of the padded batch, fsync", "torch.save of the padded batch, fsync"
_LOG, _HELD = "take and decode, nested, from the log", "take and decode, nested, of one mapped file for each chunk"


@case(
    "store",
    help="a log of packed rows on disk: append, open, rows by number, memory",
    on="cpu",
    tiny={"rows": 16, "scale": 0.016, "many": 40},
    groups=("append", "rows"),
)
def run(
    rows: int,
    rounds: int,
    *,
    scale: float = 1.0,
    many: int = 391,
    only: Sequence[str] = ("append", "rows"),
) -> RowGroups:
    """`many` chunks of `rows` rows each make the large log: 100,096 rows by default."""
    with torch_threads(1), tempfile.TemporaryDirectory() as folder:
        if "append" in only:
            yield _append(Path(folder), rows, rounds, scale)
        if "rows" in only:
            yield _rows(Path(folder), rows, rounds, scale, many)


def _append(folder: Path, rows: int, rounds: int, scale: float) -> list[Row]:
    progress(f"store: append of {rows} rows")
    batch = batch_of("reference", rows, scale=scale)
    packed = compress(batch, pad_token_id=PAD_ID)
    data = packed.to_bytes()
    log = RolloutLog(folder / "always", pad_token_id=PAD_ID)
    require_same("append", decompress(log[log.append(packed)]), batch)
    floor = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY)

    def written() -> None:
        os.write(floor, data)
        os.fsync(floor)

    def saved() -> None:
        with open(folder / "saved.pt", "wb") as file:
            torch.save(batch, file)
            file.flush()
            os.fsync(file.fileno())

    works: dict[str, Callable[[], object]] = {
        _FLOOR: written,
        _APPEND: lambda: log.append(packed, {"step": 3}),
        _WHOLE: lambda: log.append(batch, {"step": 3}),
        _SAVE: saved,
    }
    ms = interleaved(works, rounds)
    os.close(floor)
    log.close()
    name = f"append of {rows} rows, {len(data):,} bytes"
    pairs = ((_APPEND, _FLOOR, "<= 1.3"), (_SAVE, _WHOLE, None))
    return times(name, ms, pairs)


def _rows(folder: Path, rows: int, rounds: int, scale: float, many: int) -> list[Row]:
    kinds = [
        compress(batch_of("reference", 4 * rows, scale=scale)[at * rows :][:rows], pad_token_id=PAD_ID)
        for at in range(4)
    ]
    progress(f"store: {many} chunks of {rows} rows")
    with RolloutLog(folder / "many", fsync="interval") as log:
        for chunk in range(many):
            log.append(kinds[chunk % 4], {"step": chunk, "row": [*range(rows)]})
        nbytes = log.nbytes
    for chunk in range(many):
        kinds[chunk % 4].save(folder / f"{chunk}.safetensors")
    held = PackedBatch.cat([PackedBatch.load(folder / f"{chunk}.safetensors", max_bytes=None) for chunk in range(many)])
    name = f"{many * rows:,} rows, {nbytes:,} bytes"
    before = memory("RssAnon") + memory("RssFile")
    begin = time.perf_counter()
    log = RolloutLog(folder / "many", mode="r")
    report = [Row(name, "open", 1e3 * (time.perf_counter() - begin), "ms", "<= 2000")]
    report.append(
        Row(name, "memory of the opened log", (memory("RssAnon") + memory("RssFile") - before) / 2**30, "GiB", "<= 1")
    )
    rng = np.random.default_rng(0)
    count = min(256, many * rows)
    begin = time.perf_counter()
    decompress(log.take(rng.permutation(many * rows)[:count]), format="nested")
    report.append(Row(name, f"{count} scattered rows, first touch", 1e3 * (time.perf_counter() - begin), "ms"))
    chosen = rng.permutation(many * rows)[:count]
    require_same("take", decompress(log.take(chosen)), decompress(held.take(chosen)))
    works: dict[str, Callable[[], object]] = {
        _LOG: lambda: decompress(log.take(rng.permutation(many * rows)[:count]), format="nested"),
        _HELD: lambda: decompress(held.take(rng.permutation(many * rows)[:count]), format="nested"),
    }
    report += times(f"{count} scattered rows of {name}", interleaved(works, rounds), ((_HELD, _LOG, ">= 0.8"),))
    return report
