"""The one process that writes to a log: records behind the last one, a sync, then the acknowledgement."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import uuid
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from maskpack.errors import StorageError
from maskpack.store import disk
from maskpack.store.contents import LOCK, LOG, TAIL, Contents, NewRecord, Tail, log_json
from maskpack.store.records import HEADER, Record, crc_of, json_bytes, padded
from maskpack.store.segments import Chunk, Frame, Segment, index_name, segment_name

_log = logging.getLogger(__name__)
_STEP = 1 << 24
"""Bytes that are read at a time."""
_PART = re.compile(rf"(log\.json|tail|\d{{6,}}\.(seg|idx)){re.escape(disk.PART)}")
"""Names of files of a log that were not completed."""
_ASK = "Open the log again, which looks what is whole, and ask where() for the rows before they are appended again."


class Writer:
    """Writes to a log. One thread at a time calls it; a thread of its own syncs later.

    Attributes:
        failed: why nothing can be written any more, or None.
    """

    def __init__(self, root: Path, name: str, interval: float | None, segment_bytes: int) -> None:
        """`interval` is the number of seconds until a sync; None syncs at once."""
        self.root = root
        self.failed: str | None = None
        self._name = name
        self._interval = interval
        self._segment_bytes = segment_bytes
        self._synced = 0
        self._timer: threading.Timer | None = None
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._files: dict[str, int] = {}
        weakref.finalize(self, _end, self._files)
        _writers.add(self)
        disk.make(root)
        try:
            self._files[LOCK] = lock = disk.open_file(root / LOCK, os.O_RDWR | os.O_CREAT)
            self._take(lock)
            self._files[TAIL] = tail = disk.open_file(root / TAIL, os.O_RDWR | os.O_CREAT)
            if not disk.unlocked(tail):  # somebody removed the lock of another
                self._refuse()
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()}".encode(), 0)
            names = set(os.listdir(root))
            if LOG not in names:
                if any(other.endswith(".seg") for other in names):
                    raise StorageError(
                        f"RolloutLog: {name} has segments and no {LOG}; expected a log. Restore it from a backup."
                    )
                disk.publish(root / LOG, [log_json(random_number())])
            for other in names:
                if _PART.fullmatch(other):
                    disk.remove(root / other)
        except BaseException:
            _close_all(self._files)
            raise

    def _take(self, file: int) -> None:
        """Locks a file; waits for readers that open the log. Raises StorageError if another process has it."""
        disk.waited(lambda: disk.locked(file, fcntl.LOCK_EX) or not disk.unlocked(file))
        if not disk.locked(file, fcntl.LOCK_EX):
            self._refuse()

    def _refuse(self) -> NoReturn:
        who = os.pread(self._files[LOCK], 64, 0).decode(errors="replace")
        raise StorageError(
            f"RolloutLog: {self._name} is written to by another RolloutLog ({who}); expected one writer. Pass "
            'mode="r", or close the other one.'
        )

    def resume(self, contents: Contents) -> None:
        """Cuts off what is torn, and opens the last segment or a new one."""
        self.contents = contents
        disk.sync_folder(self.root)  # names that a writer gave before it was killed, or whose sync failed
        closed = {number for number in range(len(contents.segments)) if (self.root / index_name(number)).exists()}
        last = contents.segments[-1] if contents.segments else None
        for segment in contents.segments:
            if segment.end and segment.frame.number not in closed:
                self._secure(segment)
                if segment is not last:
                    self._write_index(segment)
        if last is None or last.damages or last.frame.number in closed:
            self._begin_segment(0 if last is None else last.frame.number + 1)
        else:
            self._acknowledge()
        self._take(self._files[TAIL])  # readers believe it from now on

    def _secure(self, segment: Segment) -> None:
        """Opens a segment to write to it, with all that is whole on the disk, and nothing else."""
        file = self._open(segment)
        if os.fstat(file).st_size > segment.end:
            disk.cut(file, segment.end)
        # written again: pages that a failed sync could not write count as written
        places = range(segment.synced, segment.end, _STEP)
        disk.write(file, segment.synced, (segment.read(at, min(at + _STEP, segment.end)) for at in places))
        disk.sync(file)

    # ---------------------------------------------------------------- records

    def write(self, records: Iterable[NewRecord], next_row: int) -> None:
        """Writes records behind the last one, all of them or none; syncs, acknowledges, and takes them into the index.
        Raises StorageError."""
        with self._turn:
            self._check_names()
            segment, file = self.contents.segments[-1], self._files["segment"]
            begin = at = segment.end
            chunks: list[Chunk] = []
            try:
                for new in records:
                    chunks.append(written(file, segment, at, new, self._synced))
                    at = chunks[-1].record.end
            except OSError as error:
                self._undo(file, begin)
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                remedy = "Make room: delete rows and compact, or remove other files." if full else "Look at the disk."
                remedy = _ASK if self.failed else f"Nothing was written. {remedy}"
                raise StorageError(
                    f"RolloutLog: {self._name} could not be written ({error}); expected room for the record. {remedy}"
                ) from error
            except BaseException:  # an object that cannot be written
                self._undo(file, begin)
                raise
            index, known = self.contents.index, len(segment.chunks)
            first = index.next_row
            segment.chunks += chunks
            segment.end = at
            index.grow(next_row)
            try:
                if self._interval is None:
                    self.sync()
                else:
                    self._acknowledge()
                    self._sync_later(self._interval)
            except StorageError:  # it is not there when the log is opened again
                self._undo(file, begin)
                del segment.chunks[known:]
                segment.end, index.next_row = begin, first
                raise
            finally:
                index.add(segment, known)
            if segment.end >= self._segment_bytes:
                self._close_segment()

    def _undo(self, file: int, begin: int) -> None:
        if self._renamed() is not None:  # what is there may be another's
            return
        try:
            disk.cut(file, begin)
        except OSError as error:
            self.failed = f"the disk failed: {error}"

    def sync(self) -> None:
        """Returns when all that was written is on the disk. Raises StorageError."""
        with self._turn:
            end = self.contents.segments[-1].end
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                disk.sync(self._files["segment"])
            except OSError as error:  # the kernel may have dropped pages that it could not write
                self._fail(error)
            self._synced = end
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Tells readers, and the next writer, what is there."""
        self._check_names()
        last = self.contents.segments[-1]
        tail = Tail(last.frame.number, last.end, self._synced, self.contents.index.next_row)
        try:
            disk.write(self._files[TAIL], 0, [tail.line(self.contents.log)])
        except OSError as error:
            self._fail(error)

    def _check_names(self) -> None:
        """Raises StorageError if a file is no longer the one of its name: another process may write there."""
        name = self._renamed()
        if name is not None:
            self.failed = f"{name} was removed or replaced"
            raise StorageError(
                f"RolloutLog: {self._name}: {self.failed}, and another process may write to the log; expected files "
                f"that stay as long as the log is open. {_ASK}"
            )

    def _renamed(self) -> str | None:
        """The name of an open file that its name does not lead to."""
        for name, file in self._files.items():
            name = self.contents.segments[-1].name if name == "segment" else name
            try:
                same = os.path.samestat(os.fstat(file), os.stat(self.root / name))
            except OSError:
                same = False
            if not same:
                return name
        return None

    def _fail(self, error: OSError) -> None:
        self.failed = f"the disk failed: {error}"
        raise StorageError(
            f"RolloutLog: {self._name} could not be synced ({error}); expected what was written on the disk. {_ASK}"
        ) from error

    def _sync_later(self, interval: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(interval, _sync_of, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def sync_now(self) -> None:
        """The later sync. An error is raised by the next call that writes."""
        with self._turn:
            if self._timer is not None and self._files and self.failed is None:
                try:
                    self.sync()
                except StorageError as error:
                    _log.error("%s", error)

    # ---------------------------------------------------------------- segments

    def _close_segment(self) -> None:
        """Begins the next segment, and writes the index of the last one. Where the disk has no room, the last one is
        used on. What was appended is acknowledged: if the disk fails, the next call that writes raises."""
        segment = self.contents.segments[-1]
        try:
            if self._synced < segment.end:
                self.sync()
            self._begin_segment(segment.frame.number + 1)
        except (OSError, StorageError) as error:
            _log.warning("%s: the next segment could not be begun: %s", self._name, error)
            return
        self._write_index(segment)

    def _write_index(self, segment: Segment) -> None:
        """A segment that is damaged, or for whose index the disk has no room, is walked when it is opened."""
        if not segment.is_whole:
            return
        name = index_name(segment.frame.number)
        try:
            disk.publish(self.root / name, segment.index())
        except OSError as error:
            _log.warning("%s: %s could not be written: %s", self._name, name, error)

    def _begin_segment(self, number: int) -> None:
        frame = Frame(self.contents.log, number, random_number() & ~1, self.contents.index.next_row, self._synced)
        disk.publish(self.root / segment_name(number), [frame.header()])
        segment = Segment(self.contents.folder, frame, frame.header())
        self._open(segment)
        self.contents.segments.append(segment)
        self.contents.index.add(segment)
        self._acknowledge()

    def _open(self, last: Segment) -> int:
        """Opens a segment to write to it."""
        file = disk.open_file(self.root / last.name, os.O_RDWR)
        if "segment" in self._files:
            os.close(self._files.pop("segment"))
        self._files["segment"], self._synced = file, last.end
        return file

    def replace(self, old: Segment, new: Segment, records: Iterable[NewRecord]) -> None:
        """Writes a segment again, in the place of an old one that is closed. Raises StorageError; the old one is there
        then."""
        part = self.root / (old.name + disk.PART)
        try:
            file = disk.create(part)
            try:
                disk.write(file, 0, [new.header])
                for record in records:
                    new.chunks.append(written(file, new, new.end, record, 0))
                    new.end = new.chunks[-1].record.end
                disk.sync(file)
            finally:
                os.close(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                disk.remove(part)
            raise StorageError(
                f"RolloutLog: {part} could not be written ({error}); expected room for the rows that are left. No row "
                "was lost. Make room."
            ) from error
        self._check_names()
        try:
            disk.rename(part, self.root / old.name)
        except OSError as error:  # the old one is there, or the new one
            self._fail(error)
        # until the new index is there, the old one does not fit the segment, which is walked
        self._write_index(new)

    # ---------------------------------------------------------------- end

    def why_not(self) -> str | None:
        """Why this process cannot write; None if it can."""
        if os.getpid() != self._pid:
            return "it was opened by the process that this one is a fork of"
        return self.failed

    def close(self) -> None:
        """Syncs, and gives the lock back. Raises StorageError if something that was acknowledged may not be on the
        disk."""
        with self._turn:
            try:
                mine = "segment" in self._files and os.getpid() == self._pid
                if mine and self._synced < self.contents.segments[-1].end:
                    if self.failed is None:
                        self.sync()
                    else:
                        raise StorageError(
                            f"RolloutLog: {self._name} is closed with rows that may not be on the disk: {self.failed}; "
                            "expected them there. Open the log again: it looks which records are whole."
                        )
            finally:
                self.failed = self.failed or "it is closed"
                _close_all(self._files)


def written(file: int, segment: Segment, at: int, new: NewRecord, synced: int) -> Chunk:
    """Writes a record to a file. Raises OSError."""
    line = json_bytes(new.head)
    nbytes = sum(memoryview(part).nbytes for part in new.payload)
    record = Record(new.kind, at, new.first, new.count, len(line), zlib.crc32(line), nbytes, 0, synced)
    parts = [line.ljust(padded(len(line))), *new.payload, bytes(padded(nbytes) - nbytes)]
    crc = crc_of(new.payload, lambda: disk.write(file, record.head_at, parts))
    record = replace(record, crc=crc)
    header = record.header(segment.frame.log)
    disk.write(file, record.end - HEADER, [header])
    disk.write(file, at, [header])
    return Chunk(segment, record, line, verified=True)


def random_number() -> int:
    return uuid.uuid4().int >> 64


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    """Closes the files of a fork, which cannot write: as long as it has them, it has the lock, too."""
    for writer in _writers:
        _close_all(writer._files)  # type: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_after_fork)


def _end(files: dict[str, int]) -> None:
    """Syncs and closes the files of a log that nobody has closed."""
    try:
        if "segment" in files:
            disk.sync(files["segment"])
    except OSError as error:
        _log.error("a log that was not closed could not be synced: %s", error)
    _close_all(files)


def _close_all(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _sync_of(writer: weakref.ref[Writer]) -> None:
    """Syncs for a writer that still is there."""
    held = writer()
    if held is not None:
        held.sync_now()
