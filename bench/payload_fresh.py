"""Restoring to padded in fresh pages, beside one write of the padded bytes: every large block comes from the system
and goes back when it is freed.

glibc reads its thresholds when a process starts, so this runs in one of its own, which prints milliseconds as JSON:
`python -m bench.payload_fresh ROWS ROUNDS PROMPT_WIDTH RESPONSE_WIDTH`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import maskpack
from bench import baselines
from bench.measure import bits, interleaved, tensors, torch_threads
from bench.workloads import PAD_ID, make_batch

RESTORE, WRITE = "decompress, padded", "one write of the padded bytes"
_SMALLEST = 1 << 16
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_SMALLEST), "MALLOC_TRIM_THRESHOLD_": str(_SMALLEST)}


def milliseconds(rows: int, rounds: int, prompt_width: int, response_width: int) -> dict[str, float]:
    """Median milliseconds of RESTORE and WRITE, from a new process."""
    sizes = map(str, (rows, rounds, prompt_width, response_width))
    done = subprocess.run(
        [sys.executable, "-m", __name__, *sizes],
        cwd=Path(__file__).parents[1],
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def _main(rows: int, rounds: int, prompt_width: int, response_width: int) -> None:
    batch = make_batch("reference", rows, prompt_width=prompt_width, response_width=response_width)
    fields = [bits(tensor) for tensor in tensors(batch)]
    packed = maskpack.compress(batch, pad_token_id=PAD_ID)
    works = {RESTORE: lambda: maskpack.decompress(packed), WRITE: lambda: baselines.write_all(fields)}
    with torch_threads(1):
        print(json.dumps(interleaved(works, rounds)))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
