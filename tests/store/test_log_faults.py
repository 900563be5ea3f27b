"""A RolloutLog after what goes wrong: some rounds of tests/tools/fuzz_log.py, and each defect that it has found."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fuzz_log
import pytest
from command_line import output_of
from fuzz_log import forked
from log_disk import Disk, State
from log_model import Model, assert_held, assert_log, assert_read, opened, played

from maskpack.errors import FieldError, MaskpackWarning, StorageError
from maskpack.store import RolloutLog, disk
from maskpack.store.disk import LocalFolder
from maskpack.store.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore:compress", "ignore:RolloutLog", "ignore:.*fork")


def append(log: RolloutLog, model: Model, schema: int = 0, count: int = 2, style: int = 2, width: int = 6) -> Model:
    op = {"do": "append", "schema": schema, "width": width, "style": style, "count": count, "key": model.next_row}
    played(log, op)
    return model.after(op)


def grown(log: RolloutLog, model: Model, segments: int, **style: int) -> Model:
    """After appends until it has so many segments."""
    while log.segments < segments:
        model = append(log, model, **style)
    return model


def delete(log: RolloutLog, model: Model, rows: list[int]) -> Model:
    log.delete(rows)
    return model.after({"do": "delete", "rows": rows})


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def chunks(path: Path, segment: int = 0) -> list[Any]:
    """The records of a segment: where they and their parts begin and end."""
    with opened(path, "r") as log:
        return [chunk.record for chunk in log._contents.segments[segment].chunks]


def without_index(path: Path) -> None:
    for index in path.glob("*.idx"):
        index.unlink()


# -------------------------------------------------------------------- some rounds


@pytest.mark.parametrize(
    ("kind", "seed"), [("kill", 1), ("kill", 2), ("power", 10), ("power", 11), ("power", 35), ("bits", 2), ("bits", 11)]
)
def test_random_faults(kind: str, seed: int, tmp_path: Path) -> None:
    few: dict[str, dict[str, int]] = {"kill": {"rounds": 8}, "power": {"points": 30}, "bits": {"flips": 25}}
    play: Callable[..., Any] = getattr(fuzz_log, kind)
    seen = play(random.Random(seed), tmp_path, **few[kind])
    assert seen[{"kill": "killed", "power": "crash points", "bits": "flip"}[kind]] > 3


def test_readers_beside_a_writer_that_is_killed(tmp_path: Path) -> None:
    assert fuzz_log.readers(random.Random(1), tmp_path, writers=5)["looks"]


# -------------------------------------------------------------------- flipped bits


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, Model]:
    """A log of one segment, open at its end, whose bits may be flipped: six chunks, one of them deleted."""
    path = tmp_path / "log"
    with opened(path, segment_bytes=1 << 20) as log:
        model = append(log, Model(), schema=1, count=3)
        for _ in range(4):
            model = append(log, model)
        model = delete(log, model, [3, 4])
        model = append(log, model)
    return path, model


@pytest.mark.parametrize("tail", [True, False])
def test_a_header_is_mended_by_its_copy(damaged: tuple[Path, Model], tail: bool) -> None:
    path, model = damaged
    records = chunks(path)
    clean = (path / "000000.seg").read_bytes()
    for record in records[: len(records) if tail else -1]:  # without the tail, the last may be torn
        if not tail:
            (path / "tail").unlink(missing_ok=True)
        flip(path / "000000.seg", record.at + 20)
        assert_held(path, model, "r")
        (path / "000000.seg").write_bytes(clean)


@pytest.mark.parametrize("tail", [True, False])
def test_a_damaged_chunk_is_the_only_one_that_is_lost(damaged: tuple[Path, Model], tail: bool) -> None:
    path, model = damaged
    first = next(record for record in chunks(path) if record.has_rows)
    flip(path / "000000.seg", first.payload_at + 5)
    if not tail:
        (path / "tail").unlink()
    with RolloutLog(path, pad_token_id=0) as log:  # a writer, which cuts off what is torn
        assert log.damaged().tolist() == [0, 1, 2]
        assert log.next_row == model.next_row
        assert_read(log, {number: row for number, row in model.live.items() if number > 2})
        for rows in ([1], slice(None)):
            with pytest.raises(StorageError, match=r"rows 0 to 2 in 000000.seg, bytes \d+ to \d+"):
                log.take(rows)
        log.delete(range(3))
        assert log.damaged().size == 0


@pytest.mark.parametrize("part", ["head", "payload"])
def test_deletions_outlive_a_flipped_bit(damaged: tuple[Path, Model], part: str) -> None:
    path, model = damaged
    record = next(record for record in chunks(path) if not record.has_rows and not record.nbytes > 4000)
    flip(path / "000000.seg", (record.head_at if part == "head" else record.payload_at) + 3)
    log = RolloutLog(path, mode="r")
    assert_log(log, model)


def test_tags_of_a_damaged_head_raise(damaged: tuple[Path, Model]) -> None:
    path, model = damaged
    record = [record for record in chunks(path) if record.has_rows][2]
    flip(path / "000000.seg", record.head_at + 3)
    with pytest.warns(MaskpackWarning, match=f"bytes {record.at} to {record.end}"):
        log = RolloutLog(path, mode="r")
    with pytest.raises(StorageError, match="damaged"):
        log.tags([5])
    assert log.tags([7])["own"] == [model.live[7].tags["own"]]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("size", [None, 0, 40])
def test_a_segment_without_its_header(tmp_path: Path, size: int | None, index: bool) -> None:
    path, model = tmp_path / "log", Model()
    with opened(path) as log:
        model = grown(log, model, 4, count=12)
    segment = path / "000001.seg"
    if size is None:
        flip(segment, 30)
    else:
        os.truncate(segment, size)
    if not index:
        without_index(path)
    if size is None:
        assert_held(path, model, "r")
        return
    log = RolloutLog(path, mode="r")
    lost = log.damaged().tolist()
    assert lost
    assert_read(log, {number: row for number, row in model.live.items() if number not in lost})
    with pytest.raises(StorageError, match=r"000001\.seg"):
        log.take(lost[:1])


def test_a_segment_that_ends_between_two_records(damaged: tuple[Path, Model]) -> None:
    path, model = damaged
    last = chunks(path)[-1]
    os.truncate(path / "000000.seg", last.at)
    with pytest.warns(MaskpackWarning, match=f"bytes {last.at} to {last.end}"):
        log = RolloutLog(path, mode="r")
    assert log.damaged().tolist() == [last.first, last.first + 1]
    with pytest.raises(StorageError, match=rf"row {last.first} was in 000000\.seg"):
        log.take([last.first])
    assert log.next_row == model.next_row


def test_every_bit_of_log_json(damaged: tuple[Path, Model]) -> None:
    path, model = damaged
    clean = (path / "log.json").read_bytes()
    for at in range(len(clean)):
        data = bytearray(clean)
        data[at] ^= 1 << at % 8
        (path / "log.json").write_bytes(data)
        for mode in ("r", "a"):
            with pytest.raises(StorageError, match="is no log"):
                RolloutLog(path, mode=mode)
    (path / "log.json").write_bytes(clean)
    assert_held(path, model)  # nobody has kept the lock


def test_an_array_whose_record_is_damaged_is_written_again(damaged: tuple[Path, Model]) -> None:
    path, model = damaged
    with opened(path) as log:
        for record in chunks(path)[:3]:
            if record.nbytes > 4000:
                flip(path / "000000.seg", record.payload_at + 100)
        later = append(log, model, schema=1, count=12)
        assert_read(log, {number: row for number, row in later.live.items() if number >= model.next_row})
    with RolloutLog(path, mode="r") as log:
        assert_log(log, later)  # rows of before are read with the new array


def test_compaction_keeps_what_a_damaged_segment_needs(tmp_path: Path) -> None:
    """A segment is lost and comes back from a backup: its deleted rows stay deleted, its objects can be read."""
    path, model = tmp_path / "log", Model()
    with opened(path, segment_bytes=1 << 20) as log:
        model = append(log, model, schema=1, count=12)
    with opened(path) as log:
        model = grown(log, model, 2)
        first = model.next_row
        model = append(log, model, schema=1, count=12)
        model = grown(log, model, 3, count=12)
        model = delete(log, model, [*range(12), *range(first, first + 4)])
        model = grown(log, model, 4, count=12)
        model = delete(log, model, [model.next_row - 3])
        model = grown(log, model, 5, count=12)
    os.rename(path / "000001.seg", tmp_path / "kept")
    with RolloutLog(path, pad_token_id=0) as log:
        assert log.compact(0.0) > 0
    os.rename(tmp_path / "kept", path / "000001.seg")
    assert_held(path, model, "r")


def test_rows_whose_deletion_is_lost_are_back_and_the_warning_says_so(tmp_path: Path) -> None:
    path, model = tmp_path / "log", Model()
    with opened(path) as log:
        model = grown(log, model, 2, count=12)
        lost = model.next_row
        model = delete(log, model, [3, 5])
        model = grown(log, model, 3, count=12)
    (path / "000001.seg").rename(tmp_path / "kept")
    with pytest.warns(MaskpackWarning, match=r"000001\.seg is missing.*deleted there may be back.*Restore the files"):
        log = RolloutLog(path, mode="r")
    assert log.rows.tolist() == [*range(lost)]
    (tmp_path / "kept").rename(path / "000001.seg")
    assert_held(path, model, "r")


def test_small_appends_are_joined_once(tmp_path: Path) -> None:
    """Of segments in which nothing is deleted, too; only what was acknowledged is needed for it."""
    with opened(tmp_path) as log:
        model = Model()
        model = grown(log, model, 5, count=1, style=3)
        assert log.compact(0.01) == 0
        before = log.nbytes
        first = log.compact(0.0, segments=1)
        assert before - log.nbytes == first > 0
        rest = log.compact(0.0)
        assert before - log.nbytes == first + rest > before / 3
        assert rest > 0
        assert (log.compact(0.0), len(log.chunks())) == (0, 4)
        assert_log(log, model)
    assert_held(tmp_path, model, "r")


def test_a_backup_is_not_overwritten_by_damage(damaged: tuple[Path, Model]) -> None:
    path, model = damaged
    target = path.parent / "backup"
    with opened(path) as log:
        log.back_up(target)
    record = chunks(path)[-1]
    for at in (record.at, record.end - 64):
        flip(path / "000000.seg", at + 9)
    with RolloutLog(path, pad_token_id=0) as log:
        assert log.damaged().size
        model = append(log, model)
        log.back_up(target)
    assert_held(target, model, "r")


# -------------------------------------------------------------------- disks that fail


@pytest.mark.parametrize("tail", ["old", "missing"])
def test_a_reader_does_not_believe_an_old_tail(tmp_path: Path, tail: str) -> None:
    """`tail` is not synced: after a power failure it may be as it was once. A copy that the reader makes is right."""
    path = tmp_path / "log"
    with opened(path, segment_bytes=1 << 14) as log:
        model = append(log, append(log, Model()))
        old = (path / "tail").read_bytes()
        model = delete(log, model, [1, 3])
        model = grown(log, model, 3, schema=1, count=12)
    (path / "tail").unlink() if tail == "missing" else (path / "tail").write_bytes(old)
    with opened(path, "r") as log:
        assert_log(log, model)
        assert log.next_row == model.next_row
        log.back_up(tmp_path / "copy")
    for mode in ("r", "a"):
        assert_held(tmp_path / "copy", model, mode)


def test_readers_and_a_writer_that_open_a_log_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as log:
        model = append(log, Model())
        old = (tmp_path / "tail").read_bytes()
        model = append(log, model)
    (tmp_path / "tail").write_bytes(old)
    resume, folder = Writer.resume, LocalFolder(tmp_path)
    readers: list[Any] = []

    def refused(mode: str, message: str) -> Any:
        """One that does not wait for long, and then one that does."""
        with monkeypatch.context() as patch:
            patch.setattr(disk, "PATIENCE", 0.05)
            with pytest.raises(StorageError, match=message):
                opened(tmp_path, mode)
        return threads.submit(RolloutLog, tmp_path, mode=mode, pad_token_id=0)

    def slowly(self: Writer, contents: Any) -> None:  # the writer has the lock, and has not written the tail
        readers.append(refused("r", "is being opened"))
        time.sleep(0.1)
        assert not readers[0].done()
        resume(self, contents)

    with ThreadPoolExecutor() as threads:
        with folder.at_rest("lock", "tail") as rests:
            assert rests
            writer = refused("a", "another RolloutLog")
            time.sleep(0.1)
            assert not writer.done()
        writer.result(20).close()
        (tmp_path / "tail").write_bytes(old)
        monkeypatch.setattr(Writer, "resume", slowly)
        with opened(tmp_path) as log:
            for reader in (readers[0].result(20), opened(tmp_path, "r"), log):
                assert_log(reader, model)
            with folder.at_rest("lock", "tail") as rests:
                assert not rests


# Prints what is synced, in order; the log is dropped, or the process ends with it.
NOBODY_CLOSES = """
import os, sys
from log_model import Model, opened, played
from maskpack.store import disk

log = opened(sys.argv[1], fsync="interval", interval=1e6, segment_bytes=1 << 20)
played(log, {"do": "append", "schema": 0, "width": 6, "style": 2, "count": 2, "key": 0})
sync = disk.sync
disk.sync = lambda file: (print(os.readlink(f"/proc/self/fd/{file}"), flush=True), sync(file))
if sys.argv[2] == "dropped":
    del log
    print("dropped")
"""


@pytest.mark.parametrize("end", ["dropped", "exit"])
def test_a_log_that_nobody_closes_is_synced(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", NOBODY_CLOSES, str(tmp_path / "log"), end]
    path = os.pathsep.join(filter(None, sys.path))
    shown = output_of(*command, env={**os.environ, "PYTHONPATH": path})
    assert shown.split() == [f"{tmp_path}/log/000000.seg", *(["dropped"] if end == "dropped" else [])]
    with opened(tmp_path / "log") as log:
        assert len(log) == 2


def test_an_append_whose_errors_cannot_be_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there when the log is opened again, so the error says to ask."""
    log = opened(tmp_path)
    model = append(log, Model())

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", fails)
        patch.setattr(disk, "cut", fails)
        with pytest.raises(StorageError, match=r"Open the log again.* ask where\(\)"):
            append(log, model)
        with pytest.raises(StorageError, match=r"the disk failed.*Open it again"):
            append(log, model)
    log.close()
    with opened(tmp_path) as log:
        assert log.where(own=[2, 3]).tolist() == [2, 3]  # so it is not appended again
        assert_log(log, model.after({"do": "append", "schema": 0, "count": 2, "style": 2, "key": 2}))


def test_a_sync_that_fails(tmp_path: Path) -> None:
    """What raised is not there; what is acknowledged after it is on the disk, though pages count as written."""
    path, device = tmp_path / "log", Disk(tmp_path / "log")
    with device.attached():
        log = opened(path)
        model = append(log, Model())
        device.failing = 0
        with pytest.raises(StorageError, match="could not be synced"):
            append(log, model)
        device.failing = None
        assert_log(log, model)
        for call in (lambda: append(log, model), lambda: log.delete([0]), log.compact, log.sync):
            with pytest.raises(StorageError, match="the disk failed"):
                call()
        log.close()
        with opened(path) as log:
            assert_log(log, model)
            assert log.next_row == model.next_row
            model = append(log, model)
    lost(device, tmp_path / "found", model)


def test_what_a_failed_sync_dropped_is_written_again(tmp_path: Path) -> None:
    path, device = tmp_path / "log", Disk(tmp_path / "log")
    with device.attached():
        log = opened(path, fsync="interval", interval=1e6, segment_bytes=1 << 20)
        model = append(log, append(log, Model()))
        device.failing = 0
        with pytest.raises(StorageError, match="could not be synced"):
            log.close()
        device.failing = None
        assert_held(path, model)  # the lock is free
    lost(device, tmp_path / "found", model)


def lost(device: Disk, path: Path, model: Model) -> None:
    """The power fails; nothing that was not synced is there."""
    state, rng = State(), random.Random(0)
    for event in device.events:
        state.follow(event, rng)
    state.folder(path, "none", rng)
    assert_held(path, model)


def test_what_is_torn_is_cut_off(tmp_path: Path) -> None:
    """Of two chunks that were not synced, the first is torn: the second does not come back behind another."""
    with opened(tmp_path / "log", fsync="interval", interval=1e6, segment_bytes=1 << 20) as log:
        model = append(log, Model())
        log.sync()
        append(log, append(log, model))
        shutil.copytree(tmp_path / "log", tmp_path / "found")
    torn = chunks(tmp_path / "log")[1]
    flip(tmp_path / "found" / "000000.seg", torn.payload_at + 5)
    with opened(tmp_path / "found") as log:
        assert log.rows.tolist() == [0, 1]
        assert (tmp_path / "found" / "000000.seg").stat().st_size == torn.at
        first = log.next_row
        later = append(log, Model(model.live, first))
    assert_held(tmp_path / "found", later)


def test_a_reader_sees_nothing_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[int]] = []
    with opened(tmp_path) as log:
        model = append(log, Model())
        reader, sync = opened(tmp_path, "r"), disk.sync

        def look(file: int) -> None:
            with opened(tmp_path, "r") as new:
                looks.append([len(reader), len(new), new.next_row])
            sync(file)

        monkeypatch.setattr(disk, "sync", look)
        model = append(log, model)
        assert looks == [[2, 2, 2]]
        assert_log(reader, model)


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_NOFILE])
@pytest.mark.parametrize("mode", ["r", "a"])
def test_files_that_cannot_be_opened_or_mapped(tmp_path: Path, limit: int, mode: str) -> None:
    """They are no damage; the call succeeds when there is room."""
    with opened(tmp_path, segment_bytes=1 << 14) as log:
        model = append(log, append(log, Model(), schema=1, count=12), count=40)
        model = delete(log, model, [*range(8)])

    def use() -> None:
        log, limits = opened(tmp_path, mode), resource.getrlimit(limit)
        reads: list[Any] = [lambda: log.take([9]), log.damaged, lambda: log.back_up(tmp_path / "copy")]
        reads += [log.compact] if mode == "a" else [lambda: log.rows, lambda: log.where(step=0), lambda: log.tags([9])]
        for call in reads[:1] if limit == resource.RLIMIT_AS else reads:
            log._contents._forget()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(limit, ((pages << 12) + (1 << 24) if limit == resource.RLIMIT_AS else 3, limits[1]))
            try:
                with pytest.raises(StorageError, match=r"RolloutLog.*(Cannot allocate memory|Too many open files)"):
                    call()
            finally:
                resource.setrlimit(limit, limits)
        assert_log(log, model)
        assert log.damaged().size == 0
        for call in reads:
            call()

    assert os.waitpid(forked(use), 0)[1] == 0


@pytest.mark.parametrize("call", ["append", "delete", "compact"])
def test_a_full_disk(tmp_path: Path, call: str) -> None:
    """Nothing was done, and the log goes on."""
    path, device, model = tmp_path / "log", Disk(tmp_path / "log"), Model()
    failed = 0
    with device.attached(), opened(path) as log:
        for room in range(8):
            for _ in range(3):
                model = append(log, model, schema=1, count=5)
            model = delete(log, model, [model.next_row - 2])
            op: dict[str, Any] = {"do": call, "rows": [model.next_row - 1], "least": 0.0}
            op |= {"schema": 1, "width": 9, "style": 3, "count": 12, "key": model.next_row}
            device.full = room
            try:
                played(log, op)
            except StorageError as error:
                if "Make room" not in str(error):
                    raise
                assert not list(path.glob("000000.seg.part"))
                assert_log(log, model)
                device.full, failed = None, failed + 1
                played(log, op)
            device.full, model = None, model.after(op)
            assert_log(log, model)
    assert failed
    assert_held(path, model, "r")


def test_a_segment_that_cannot_be_closed(tmp_path: Path) -> None:
    """The append before has returned; the next raises."""
    path, device = tmp_path / "log", Disk(tmp_path / "log")
    with device.attached():
        log = opened(path, fsync="interval", interval=1e6)
        device.failing = 0
        model = append(log, Model(), schema=1, count=12)
        device.failing = None
        assert_log(log, model)
        with pytest.raises(StorageError, match="the disk failed"):
            append(log, model)
        with pytest.raises(StorageError, match="rows that may not be on the disk"):
            log.close()
        assert_held(path, model)
    lost(device, tmp_path / "found", model)


def test_compaction_syncs_first(tmp_path: Path) -> None:
    """Rows do not go before what deletes them is on the disk, with all that was appended before."""
    path, device = tmp_path / "log", Disk(tmp_path / "log")
    with device.attached():
        log = opened(path, fsync="interval", interval=1e6)
        model = append(log, Model(), schema=1, count=12)
        model = delete(log, append(log, model, count=1), [0, 1])
        assert log.compact(0.0) > 0
    lost(device, tmp_path / "found", model)


def test_compaction_keeps_deletions_of_other_segments(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        model = append(log, Model(), schema=1, count=12)
        model = append(log, delete(log, model, [1]), schema=1, count=40)
        model = grown(log, model, 3, count=40)
        model = delete(log, model, list(range(12, model.next_row)))
        assert log.compact(0.5) > 0
    assert_held(tmp_path, model, "r")


def test_opening_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.mkdir()
    device = Disk(path)
    device.full = 0
    with device.attached(), pytest.raises(StorageError, match="no room"):
        RolloutLog(path)
    assert_held(path, Model())


def test_the_folders_of_a_new_log_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync_folder = disk.sync_folder
    monkeypatch.setattr(disk, "sync_folder", lambda folder: (synced.append(folder), sync_folder(folder)))
    with opened(tmp_path / "one" / "two"):
        assert synced[:2] == [tmp_path, tmp_path / "one"]


# -------------------------------------------------------------------- files of others


@pytest.mark.parametrize("name", ["lock", "tail", "000000.seg", "lock and tail", "the folder"])
@pytest.mark.parametrize("call", ["append", "delete", "compact", "sync"])
def test_a_file_that_is_replaced_under_a_writer(tmp_path: Path, name: str, call: str) -> None:
    """Another process may write there: nothing is acknowledged, and what the other one wrote stays."""
    path = tmp_path / "log"
    log = opened(path, segment_bytes=1 << 20)
    model = append(log, Model())
    path.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", path)
    for stays in {"lock", "tail", "000000.seg"} - set(name.split(" and ")) if name != "the folder" else ():
        (tmp_path / "old" / stays).replace(path / stays)
    other = None
    if name in ("lock and tail", "the folder"):
        other = opened(path, segment_bytes=1 << 20)
        model = append(other, model)
    else:
        (path / "000000.seg.part").touch()  # the first one may be compacting
        with pytest.raises(StorageError, match="another RolloutLog"):
            opened(path)
        (path / "000000.seg.part").unlink()
    op = {"do": call, "rows": [0], "least": 0.0, "schema": 0, "width": 6, "style": 1, "count": 3, "key": 50}
    with pytest.raises(StorageError, match=r"was removed or replaced.*Open the log again.* ask where\(\)"):
        played(log, op)
    with pytest.raises(StorageError, match="was removed or replaced"):
        played(log, op)
    log.close()
    if other is not None:
        model = append(other, model)
        other.close()
    with opened(path) as log:
        assert_log(log, model)
        append(log, model)


def test_a_lock_that_is_replaced_during_an_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append raises, and cuts off nothing of what the other writer has acknowledged since."""
    log, sync, others = opened(tmp_path, segment_bytes=1 << 20), disk.sync, list[RolloutLog]()
    model = append(log, Model())
    later = append(log, model)

    def replaced(file: int) -> None:
        monkeypatch.setattr(disk, "sync", sync)
        (tmp_path / "lock").unlink()
        (tmp_path / "tail").unlink()
        others.append(opened(tmp_path, segment_bytes=1 << 20))
        assert len(others[0]) == 6  # it is whole, so the other one goes on behind it
        append(others[0], Model({}, 6))

    op = {"do": "append", "schema": 0, "width": 6, "style": 2, "count": 2, "key": 4}
    monkeypatch.setattr(disk, "sync", replaced)
    with pytest.raises(StorageError, match=r"lock was removed or replaced.* ask where\(\)"):
        played(log, op)
    log.close()
    others[0].close()
    with opened(tmp_path) as log:
        assert log.where(own=[4, 5]).tolist() == [4, 5]  # so they are not appended again
        assert_log(log, later.after(op).after(op | {"key": 6}))


def test_a_folder_that_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = opened(path, fsync="interval", interval=1e6)
    model = append(log, Model())
    shutil.rmtree(path)
    for call in (lambda: append(log, model), lambda: append(log, model)):
        with pytest.raises(StorageError, match="was removed"):
            call()
    with pytest.raises(StorageError, match="may not be on the disk"):
        log.close()


def test_only_own_parts_are_removed(tmp_path: Path) -> None:
    own = {"log.json.part", "tail.part", "000000.seg.part", "000012.idx.part", "1000000.seg.part"}
    others = {"film.mkv.part", ".part", "log.part", "x000000.seg.part", "000000.seg.parts", "lock.part", "00.seg.part"}
    for name in own | others:
        (tmp_path / name).write_text(name)
    opened(tmp_path).close()
    assert {path.name: path.read_text() for path in tmp_path.glob("*.part*")} == {name: name for name in others}


@pytest.mark.parametrize("name", ["lock", "tail", "log.json.part", "000000.seg", "000000.seg.part", "000000.idx.part"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    """Whoever may write to the folder cannot have files elsewhere overwritten."""
    path, victim = tmp_path / "log", tmp_path / "victim"
    with opened(path) as log:
        model = append(log, Model(), count=12, schema=1) if name.endswith("part") else append(log, Model())
    for stay in (name, "log.json") if name == "log.json.part" else ():
        (path / stay).unlink(missing_ok=True)
    if name == "log.json.part":
        shutil.rmtree(path)
        path.mkdir()
        model = Model()
    kept = (path / name).read_bytes() if (path / name).exists() else None
    victim.write_bytes(kept or b"of the user")
    before = victim.read_bytes()
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(victim)
    if not name.endswith("part"):
        with pytest.raises(StorageError, match=rf"{name} is a link.*Remove it"):
            opened(path)
        (path / name).unlink()
        if kept is not None and name.endswith("seg"):
            (path / name).write_bytes(kept)
    with opened(path) as log:
        assert_log(log, model)
        model = append(log, model, count=40, schema=1)
        log.compact(0.0)
        assert_log(log, model)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("name", ["lock", "tail", "log.json", "000000.seg", "000000.idx"])
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file(tmp_path: Path, name: str, mode: str, make: Any) -> None:
    """Nobody waits for the other end of a FIFO."""
    path = tmp_path / "log"
    with opened(path) as log:
        model = append(log, Model(), count=40, schema=1)
    assert (path / "000000.idx").exists()
    (path / name).rename(tmp_path / "kept")
    make(path / name)
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"{name} is a link, or no regular file.*Remove it; restore it"):
            opened(path, mode)
    (path / name).rename(tmp_path / "fifo")
    (tmp_path / "kept").rename(path / name)
    assert_held(path, model, mode)


# -------------------------------------------------------------------- processes


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    ours, theirs = os.pipe()

    def write() -> None:
        log = opened(tmp_path)
        append(log, Model())
        forked(lambda: (os.write(theirs, str(os.getpid()).encode()), signal.pause()))
        signal.pause()

    writer = forked(write)
    child = int(os.read(ours, 20))  # it has begun
    try:
        with pytest.raises(StorageError, match=f"process {writer}"):
            opened(tmp_path)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        with opened(tmp_path) as log:
            assert len(log) == 2
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_can_read_and_cannot_write(tmp_path: Path) -> None:
    log = opened(tmp_path)
    model = append(log, Model())

    def use() -> None:
        assert_log(log, model)
        with pytest.raises(StorageError, match="fork"):
            append(log, model)
        log.close()

    assert os.waitpid(forked(use), 0)[1] == 0
    model = append(log, model)  # the writer goes on
    with pytest.raises(StorageError, match="another RolloutLog"):
        opened(tmp_path)
    assert_log(log, model)
    log.close()
    with pytest.raises(FieldError):
        log.take([model.next_row])
