"""Restoring to padded in fresh pages, beside one write of the padded bytes: every large block comes from the system
and goes back when it is freed.

glibc reads its thresholds when a process starts, so this runs in one of its own, which prints milliseconds as JSON:
`python -m bench.payload_fresh ROWS ROUNDS SCALE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import maskpack
from bench import floors
from bench.measure import bits, interleaved, tensors, torch_threads
from bench.workloads import PAD_ID, batch_of

RESTORE, WRITE = "decompress, padded", "one write of the padded bytes"
_SMALLEST = 1 << 16
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_SMALLEST), "MALLOC_TRIM_THRESHOLD_": str(_SMALLEST)}


def milliseconds(rows: int, rounds: int, scale: float) -> dict[str, float]:
    """Median milliseconds of RESTORE and WRITE, from a new process."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, (rows, rounds, scale))],
        cwd=Path(__file__).parents[1],
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def _main(rows: int, rounds: int, scale: float) -> None:
    batch = batch_of("reference", rows, scale=scale)
    fields = [bits(tensor) for tensor in tensors(batch)]
    packed = maskpack.compress(batch, pad_token_id=PAD_ID)
    works = {RESTORE: lambda: maskpack.decompress(packed), WRITE: lambda: floors.write(fields)}
    with torch_threads(1):
        print(json.dumps(interleaved(works, rounds, time.process_time)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
