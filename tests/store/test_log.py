"""RolloutLog: what is appended is read again, bit for bit, by number and tag, by any process, after compaction."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import maskpack as mp
from maskpack.errors import FieldError, LayoutError, MaskpackWarning, StorageError
from maskpack.store import RolloutLog, disk
from maskpack.store.disk import RemoteFolder
from tests.samples import PAD, ROWS, assert_same, rollout, rows_of

LINES = [(3, 5), (1, 2), (5, 6)]


def opened(path, **options):
    return RolloutLog(path, pad_token_id=PAD, **options)


def batch_of(seed, rows=ROWS, **more):
    return rollout(rows, seed=seed, **more)


def same_rows(log, batches, rows):
    """Rows of the log against those of a dict of one-row batches."""
    for row in rows:
        assert_same(mp.decompress(log.take([row])), batches[row])


def kept(batches, numbers, batch):
    for place, number in enumerate(numbers):
        batches[number] = rows_of(batch, [place])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


def test_appended_rows_are_read_again(path):
    first, second = batch_of(0), batch_of(1)
    with opened(path) as log:
        assert (len(log), log.next_row, log.rows.tolist()) == (0, 0, [])
        assert log.append(first) == range(7)
        assert log.append(mp.compress(second, pad_token_id=PAD)) == range(7, 14)
        for held in (log, opened(path, mode="r")):
            assert_same(mp.decompress(held[0:7]), first)
            assert_same(mp.decompress(held.take(range(7, 14))), second)
            assert_same(mp.decompress(held[[9, 8, 9]]), rows_of(second, [2, 1, 2]))
            mixed = mp.decompress(held[np.array([13, 0, 7])])
            for place, (batch, row) in enumerate([(second, 6), (first, 0), (second, 0)]):
                assert_same(rows_of(mixed, [place]), rows_of(batch, [row]))
    again = opened(path)
    assert again.append(first) == range(14, 21)
    assert_same(mp.decompress(again[20:13:-1]), rows_of(first, [*range(6, -1, -1)]))
    assert again[20:12:-4].num_rows == 2


def test_fields_are_chosen_before_rows_are_joined(path):
    log = opened(path)
    log.append(batch_of(0))
    log.append(TensorDict({"reward": torch.arange(3.0)}, [3]))
    with pytest.raises(LayoutError, match="not in every batch"):
        log.take([0, 7])
    with pytest.raises(FieldError):
        log.take([7], "responses")
    assert_same(mp.decompress(log.take([9, 7], "reward")), TensorDict({"reward": torch.tensor([2.0, 0.0])}, [2]))
    assert log.take([]).num_rows == 0


def test_widths_are_those_of_the_append(path):
    log = opened(path)
    narrow, wide = batch_of(0, LINES), batch_of(1, [*LINES, (9, 11)], prompt=9, response=11)
    log.append(narrow)
    log.append(wide)
    assert_same(mp.decompress(log[0:3]), narrow)
    assert_same(mp.decompress(log[3:7]), wide)
    both = mp.decompress(log[[0, 3]])
    assert both["responses"].shape[1] == wide["responses"].shape[1]


def test_rows_by_tag(path):
    log = opened(path)
    log.append(batch_of(0, LINES), {"step": 1, "uid": ["a", "b", "a"], "done": [True, False, 1]})
    log.append(batch_of(1, LINES), {"step": 2, "uid": ["b", "c", "c"]})
    log.append(batch_of(2, LINES))
    for held in (log, opened(path, mode="r")):
        assert held.where(step=1).tolist() == [0, 1, 2]
        assert held.where(step=[1, 2], uid="b").tolist() == [1, 3]
        assert held.where(step=range(2, 9), uid={"c", "a"}).tolist() == [4, 5]
        assert held.where(step=torch.tensor([2, 1])).size == held.where(step=np.array([1, 2])).size == 6
        assert held.where(step=3).size == held.where(other=1).size == 0
        assert held.where(done=True).tolist() == [0]
        assert held.where(done=1).tolist() == [2]
        assert held.where().tolist() == [*range(9)]
        assert held.tags([5, 0, 7]) == {"step": [2, 1, None], "uid": ["c", "a", None], "done": [None, True, None]}
    log.delete([1])
    assert log.where(uid="b").tolist() == [3]


def test_deleted_rows_are_gone(path):
    batches = {}
    log = opened(path)
    kept(batches, log.append(batch := batch_of(0)), batch)
    assert log.delete([2, 5, 2]) == 2
    assert log.delete([2, 3]) == 1
    assert log.delete(slice(5, 7)) == 1
    reader = opened(path, mode="r")
    for held in (log, reader):
        assert held.rows.tolist() == [0, 1, 4]
        assert len(held) == 3
        with pytest.raises(FieldError, match="row 5 was deleted"):
            held.take([0, 5])
        same_rows(held, batches, [0, 1, 4])
    with pytest.raises(FieldError, match="no row 7"):
        log.delete([7])
    log.close()
    assert opened(path).append(batch_of(1)) == range(7, 14)


def test_objects_that_need_a_pickle(path):
    log = opened(path)
    batch = TensorDict({"x": torch.zeros(1), "o": NonTensorStack({1, 2})}, [1])
    size = log.nbytes
    with pytest.raises(mp.MaskpackError, match="allow_pickle"):
        log.append(batch)
    assert (log.nbytes, len(log), os.path.getsize(path / "000000.seg")) == (size, 0, size)
    log.close()
    trusting = opened(path, allow_pickle=True)
    trusting.append(batch)
    assert mp.decompress(trusting[[0]])["o"].tolist() == [{1, 2}]
    assert mp.decompress(pickle.loads(pickle.dumps(trusting)).take([0]))["o"].tolist() == [{1, 2}]


def test_one_writer(path):
    log = opened(path)
    with pytest.raises(StorageError, match="another RolloutLog"):
        opened(path)
    reader = pickle.loads(pickle.dumps(log))
    with pytest.raises(StorageError, match='mode="r"'):
        reader.append(mp.compress(batch_of(0), pad_token_id=PAD))
    log.close()
    with pytest.raises(StorageError, match="closed"):
        log.append(mp.compress(batch_of(0), pad_token_id=PAD))
    opened(path).append(batch_of(0))
    assert len(reader) == 7


@pytest.mark.parametrize("url", [False, True])
def test_backup(path, tmp_path, url):
    target = f"memory://{tmp_path.name}-{url}" if url else tmp_path / "copy"
    batches = {}
    log = opened(path, segment_bytes=1 << 12)
    for seed in range(4):
        kept(batches, log.append(batch := batch_of(seed)), batch)
    copied = log.back_up(target)
    assert copied >= log.nbytes
    assert log.back_up(target) < copied / 2
    kept(batches, log.append(batch := batch_of(5)), batch)
    log.delete([3])
    log.compact(0.0)
    log.back_up(target)
    reader = opened(target, mode="r")
    del batches[3]
    assert reader.rows.tolist() == sorted(batches)
    same_rows(reader, batches, batches)
    if url:
        with pytest.raises(LayoutError, match="not on this machine"):
            opened(target)
    else:
        assert opened(target).append(batch_of(6)) == range(35, 42)
    other = opened(tmp_path / "other")
    with pytest.raises(StorageError, match="another log"):
        other.back_up(target)


def test_interval_syncs_later(path, monkeypatch):
    count = []
    sync = disk.sync
    monkeypatch.setattr(disk, "sync", lambda file: (count.append(1), sync(file)))
    log = opened(path, fsync="interval", interval=3600)
    count.clear()
    for seed in range(3):
        log.append(batch_of(seed))
    assert not count
    assert len(opened(path, mode="r")) == 21
    log.sync()
    assert len(count) == 1
    log.append(batch_of(4))
    log.close()
    assert len(count) == 2


def test_a_segment_that_was_named_and_not_begun(path, tmp_path, monkeypatch):
    """The writer goes on with the one before, whose end may be torn then."""

    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    first, second = batch_of(0, LINES * 10), batch_of(1, LINES * 10)
    with monkeypatch.context() as patch:
        log = opened(path, fsync="interval", interval=3600, segment_bytes=1 << 12)
        patch.setattr(disk, "sync_folder", fails)
        assert log.append(first) == range(30)
        assert (log.segments, (path / "000001.seg").exists()) == (1, True)
        shutil.copytree(path, tmp_path / "found")
        end = log.nbytes
        assert log.append(second) == range(30, 60)
    (tmp_path / "found" / "tail").unlink()  # a power failure: it was not synced
    torn = (path / "000000.seg").read_bytes()[end:-10]
    with open(tmp_path / "found" / "000000.seg", "ab") as file:
        file.write(torn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskpackWarning)  # torn, and no damage
        found = opened(tmp_path / "found")
    assert found.rows.tolist() == [*range(30)]
    assert_same(mp.decompress(found[:30]), first)
    assert found.append(second) == range(30, 60)


def test_missing_and_foreign_files(path, tmp_path):
    log = opened(path, segment_bytes=1 << 12)
    for seed in range(3):
        log.append(batch_of(seed, LINES * 10))
    log.close()
    (path / "000001.seg").unlink()
    with pytest.warns(MaskpackWarning, match=r"000001.seg is missing"):
        log = opened(path)
    assert log.damaged().tolist() == [*range(30, 60)]
    assert_same(mp.decompress(log[60:90]), batch_of(2, LINES * 10))
    log.close()
    (path / "000000.idx").write_bytes(b"nothing")
    with pytest.warns(MaskpackWarning):
        assert opened(path).rows.size == 60
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="is no log"):
        opened(tmp_path / "empty", mode="r")
    (path / "log.json").unlink()
    with pytest.raises(StorageError, match=r"no log\.json"):
        opened(path)


def test_tags_that_are_scalars_of_arrays(path):
    log = opened(path)
    for step in (np.int64(3), np.array(3), torch.tensor(3), 3):
        log.append(batch_of(0), {"step": step})
    assert set(log.tags(log.rows)["step"]) == {3}
    for wanted in (3, np.int64(3), torch.tensor(3), [3], np.array([3]), torch.tensor([3])):
        assert log.where(step=wanted).tolist() == log.rows.tolist()
    assert log.where(other=3).size == 0


@pytest.mark.parametrize("name", ["self", "tags", "wanted", "cls", ""])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1, True, "nan"])
def test_rows_by_tags_of_odd_names_and_values(path, name, value):
    log = opened(path)
    for given in (0.0, "nan", float("nan"), True, 1, -float("inf")):
        log.append(batch_of(0, LINES), {name: given})
    expected = {"nan": {str: 3, float: 6}, "True": 9, "1": 12, "-inf": 15}[str(value)]
    first = expected[type(value)] if isinstance(expected, dict) else expected
    for held in (log, opened(path, mode="r")):
        for wanted in (value, [value]):
            assert held.where(**{name: wanted}).tolist() == [first, first + 1, first + 2]


def test_a_reader_says_that_it_is_one_before_it_looks_at_the_batch(path):
    opened(path).close()
    with pytest.raises(StorageError, match='mode="r"'):
        RolloutLog(path, mode="r").append(batch_of(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda path: RolloutLog(3), LayoutError, "path is 3"),
        (lambda path: RolloutLog(path, mode="w"), LayoutError, "mode is 'w'"),
        (lambda path: RolloutLog(path, fsync=True), LayoutError, "fsync is True"),
        (lambda path: RolloutLog(path, interval=0), LayoutError, "interval is 0"),
        (lambda path: RolloutLog(path, segment_bytes=10), LayoutError, "segment_bytes is 10"),
        (lambda path: RolloutLog(path, like=3), LayoutError, "like is 3"),
        (lambda path: opened(path).append([1]), LayoutError, "the batch is a list"),
        (lambda path: opened(path).append(batch_of(0), 3), LayoutError, "tags are 3"),
        (lambda path: opened(path).append(batch_of(0), {1: 2}), LayoutError, "a tag is named 1"),
        (lambda path: opened(path).append(batch_of(0), {"a": [1]}), LayoutError, "1 values for 7 rows"),
        (lambda path: opened(path).append(batch_of(0), {"a": [{}] * 7}), LayoutError, 'tag "a" is a dict'),
        (lambda path: opened(path).append(TensorDict({}, [])), LayoutError, "no rows"),
        (lambda path: opened(path).take("a"), LayoutError, "rows are"),
        (lambda path: opened(path).take([0]), FieldError, "no row 0"),
        (lambda path: opened(path).take([True]), LayoutError, "rows are"),
        (lambda path: opened(path).take(5), LayoutError, r"rows are 5 of int64 \(\).*\[5\] for one row"),
        (lambda path: opened(path).take([True, False]), LayoutError, r"np\.flatnonzero"),
        (lambda path: opened(path).append(batch_of(0), {"a": {}}), LayoutError, 'tag "a" is a dict'),
        (lambda path: opened(path).append(batch_of(0), {"a": b"x"}), LayoutError, 'tag "a" is'),
        (lambda path: opened(path).take([]), LayoutError, "has no rows"),
        (lambda path: opened(path).where(a={"b": 1}), LayoutError, "tag"),
        (lambda path: opened(path).compact(2), LayoutError, "least is 2"),
        (lambda path: opened(path).compact(segments=0), LayoutError, "segments is 0"),
        (lambda path: opened(path).back_up(None), LayoutError, "target is None"),
    ],
)
def test_wrong_arguments(path, call, error, message):
    with pytest.raises(error, match=message):
        call(path)


def test_files_are_not_held_open(path):
    log = opened(path, fsync="interval", segment_bytes=1 << 16)
    before = len(os.listdir("/proc/self/fd"))
    taken = []
    for seed in range(60):
        taken.append(log[log.append(batch_of(seed))])
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    log.delete(range(0, 420, 2))
    log.compact(0.0)
    for seed, batch in enumerate(taken):  # of files that are gone
        assert_same(mp.decompress(batch), batch_of(seed))


def removed(folder):
    """How many files of a folder are mapped by this process, and have no name any more."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in lines)


def test_compacted_segments_are_let_go(path):
    """Neither the writer nor a reader keeps them open."""
    rows = rollout()
    with opened(path, segment_bytes=1 << 12) as log:
        for _ in range(6):
            log.append(rows)
        reader = RolloutLog(path, mode="r")
        for each in (log, reader):
            assert_same(mp.decompress(each[:7]), rows)
        held = log[7:14]
        log.delete([*range(6), *range(7, 13)])
        assert log.compact() > 0
        assert removed(path) > 0  # of the reader, and of the batch
        assert_same(mp.decompress(held), rows)
        del held
        log.append(rows)  # a new segment, of which the reader hears
        assert_same(mp.decompress(reader[-7:]), rows)
        assert_same(mp.decompress(reader[[6, 13]]), rows[[6, 6]])
        assert removed(path) == 0


def test_a_reader_copies_while_segments_are_replaced(path, tmp_path, monkeypatch):
    rows, written = rollout(), []
    with opened(path, segment_bytes=1 << 12) as log:
        for step in range(5):
            log.append(rows, {"step": step})
        log.delete(range(7, 13))
        reader = RolloutLog(path, mode="r")
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
            assert_same(mp.decompress(backup[:]), mp.decompress(log[:]))
            assert backup.damaged().size == 0
