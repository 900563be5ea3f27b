"""A reader that copies a log while the writer compacts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import PAD, assert_same, rollout

from maskpack import decompress
from maskpack.store import RolloutLog
from maskpack.store.disk import RemoteFolder


def test_a_reader_copies_while_segments_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, written = rollout(), []
    with RolloutLog(tmp_path / "log", pad_token_id=PAD, segment_bytes=1 << 12) as log:
        for step in range(5):
            log.append(rows, {"step": step})
        log.delete(range(7, 13))
        reader = RolloutLog(tmp_path / "log", mode="r")
        write = RemoteFolder.write

        def and_compact(self, name, parts):
            if not written:
                assert log.compact() > 0
            written.append(name)
            write(self, name, parts)

        monkeypatch.setattr(RemoteFolder, "write", and_compact)
        assert reader.back_up(tmp_path / "backup") > 0
        assert written[0] == "000000.seg"
        with RolloutLog(tmp_path / "backup") as backup:
            assert backup.rows.tolist() == log.rows.tolist()
            assert backup.tags(backup.rows) == log.tags(log.rows)
            assert_same(decompress(backup[:]), decompress(log[:]))
            assert backup.damaged().size == 0
