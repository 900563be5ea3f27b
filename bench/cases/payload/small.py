"""Small batches, where the work is Python's and not memory's: compress, pickle.dumps (protocol 5, buffers out of band),
pickle.loads and decompress, one after the other. Each part and the whole chain is the median of the same few hundred.
"""

from __future__ import annotations

import gc
import statistics
from itertools import pairwise
from time import perf_counter

import maskpack
from bench.harness.measure import pickled, progress, require_same, unpickled
from bench.harness.report import Row
from bench.workloads import PAD_ID, make_batch

_TARGETS = {16: "<= 120", 64: "<= 200"}  # rows: microseconds of the chain
_PROMPT_WIDTH, _RESPONSE_WIDTH = 64, 128
_PARTS = ("compress", "pickle.dumps", "pickle.loads", "decompress")
_CHAINS, _WARM_UP = 300, 20


def measured() -> list[Row]:
    """The rows of the report. Raises NotExact if a batch does not come back as it was."""
    report: list[Row] = []
    for rows, target in _TARGETS.items():
        case = f"payload {rows} rows of {_PROMPT_WIDTH} + {_RESPONSE_WIDTH}"
        progress(case)
        taken = _chains(case, rows)
        report.append(Row(case, " + ".join(_PARTS), 1e6 * statistics.median(map(sum, taken)), "us", target))
        for part, seconds in zip(_PARTS, zip(*taken, strict=True), strict=True):
            report.append(Row(case, part, 1e6 * statistics.median(seconds), "us"))
    return report


def _chains(case: str, rows: int) -> list[list[float]]:
    """Seconds of the parts of every chain."""
    batch = make_batch(rows, prompt_width=_PROMPT_WIDTH, response_width=_RESPONSE_WIDTH)
    chains: list[list[float]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(_WARM_UP + _CHAINS):
            times = [perf_counter()]
            packed = maskpack.compress(batch, pad_token_id=PAD_ID)
            times.append(perf_counter())
            sent = pickled(packed)
            times.append(perf_counter())
            arrived = unpickled(sent)
            times.append(perf_counter())
            restored = maskpack.decompress(arrived)
            times.append(perf_counter())
            chains.append([end - begin for begin, end in pairwise(times)])
            if len(chains) == 1:
                require_same(case, restored, batch)
            del packed, sent, arrived, restored  # freeing is not timed
    finally:
        gc.enable()
    return chains[_WARM_UP:]
