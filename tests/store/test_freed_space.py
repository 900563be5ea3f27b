"""The space of compacted segments: neither the writer nor readers keep files open that are no more."""

from __future__ import annotations

import gc
from pathlib import Path

from samples import PAD, assert_same, rollout

from maskpack import decompress
from maskpack.store import RolloutLog


def removed(folder: Path) -> int:
    """How many files of a folder are mapped by this process, and have no name any more."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in lines)


def test_compacted_segments_are_let_go(tmp_path: Path) -> None:
    rows = rollout()
    with RolloutLog(tmp_path, pad_token_id=PAD, segment_bytes=1 << 12) as log:
        for _ in range(6):
            log.append(rows)
        reader = RolloutLog(tmp_path, mode="r")
        for each in (log, reader):
            assert_same(decompress(each[:7]), rows)
        held = log[7:14]
        log.delete([*range(6), *range(7, 13)])
        assert log.compact() > 0
        assert removed(tmp_path) > 0  # of the reader, and of the batch
        assert_same(decompress(held), rows)
        del held
        log.append(rows)  # a new segment, of which the reader hears
        assert_same(decompress(reader[-7:]), rows)
        assert_same(decompress(reader[[6, 13]]), rows[[6, 6]])
        assert removed(tmp_path) == 0
