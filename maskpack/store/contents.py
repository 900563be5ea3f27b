"""What a log has: its segments, the index of their rows, and chunks as packed batches.

folder   log.json   lock   tail (what the writer has acknowledged; not synced)   000000.seg 000000.idx   000001.seg

batch --records--> arrays of Python objects that the log does not have yet, rows --packed--> PackedBatch, mapped
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maskpack.core.bits import Words
from maskpack.core.index import IntArray
from maskpack.core.latest import Latest
from maskpack.errors import MaskpackWarning, StorageError
from maskpack.fields.registry import Key
from maskpack.packed.batch import PackedBatch
from maskpack.packed.file.container import Message, Pieces, read_message
from maskpack.packed.file.read import read_batch
from maskpack.packed.file.write import write_message
from maskpack.store.disk import LocalFolder, RemoteFolder, Replaced
from maskpack.store.records import BLOB, DELETE
from maskpack.store.rows import RowIndex, spans_of
from maskpack.store.segments import INDEX, START, VERSION, Chunk, Damage, Frame, Segment, index_name, segment_name

LOG, TAIL, LOCK = "log.json", "tail", "lock"
_FORMAT = "maskpack log"
_ENDS = struct.Struct("<Qqqqq")
_CRC = struct.Struct("<I")
_ATTEMPTS = 5
_LARGE = 1 << 12
"""Arrays of Python objects of this many bytes or more are stored once."""
_OPEN = 512
"""Chunks that are remembered as they were read."""


class Tail(NamedTuple):
    """What the writer has acknowledged: the last segment, its bytes that were written and those that are on the disk,
    and the number of the next row."""

    segment: int
    written: int
    synced: int
    next_row: int

    def line(self, log: int) -> bytes:
        line = _ENDS.pack(log, *self)
        return line + _CRC.pack(zlib.crc32(line))


@dataclass(frozen=True)
class NewRecord:
    """A record that is to be written."""

    kind: int
    first: int
    count: int
    head: dict[str, Any]
    payload: Sequence[Any]


def deletion(rows: IntArray) -> NewRecord:
    """The record that deletes rows."""
    spans = spans_of(rows)
    return NewRecord(DELETE, 0, 0, {"rows": spans.tolist()}, [spans.tobytes()])


class Contents:
    """What a process knows of a log.

    Attributes:
        folder: the files.
        log: the number of the log.
        writes: whether this process writes to it.
        segments, index: what is in it.
    """

    def __init__(self, folder: LocalFolder | RemoteFolder, name: str, writes: bool, allow_pickle: bool) -> None:
        self.folder = folder
        self.name = name
        self.writes = writes
        self._allow_pickle = allow_pickle
        self._read: Latest[PackedBatch] = Latest(_OPEN)
        try:
            self.log = log_number(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"RolloutLog: {name} is no log ({type(error).__name__}: {error}); expected a folder that RolloutLog "
                "made. Check the path."
            ) from error
        self.segments: list[Segment] = []
        self.index = RowIndex()
        self._seen: Tail | None = None
        self.load()

    # ---------------------------------------------------------------- opening

    @contextmanager
    def _tail_is_true(self) -> Generator[bool]:
        """Whether `tail` tells the end: `back_up` has written it, or a writer that lives. After a power failure it may
        be an old one; what is on the disk tells the end then."""
        if self.writes or isinstance(self.folder, RemoteFolder):
            yield not self.writes
            return
        with self.folder.at_rest(LOCK, TAIL) as rests:
            yield not rests

    def load(self) -> None:
        """Reads the indexes of the segments, and walks those without one. Raises StorageError if the writer compacts
        them faster."""
        with self._tail_is_true() as true:
            self._load(true)

    def _load(self, true: bool) -> None:
        self._seen = tail = self._tail()
        there = {int(name[:-4]) for name in self.folder.names() if name.endswith(".seg") and name[:-4].isdigit()}
        last = max(there, default=-1) if tail is None else tail.segment
        last = last if true else max([last, *there])
        headers = {number: self.folder.read(segment_name(number), 0, START) for number in there if number <= last}
        self.segments, self.index = [], RowIndex()
        self._forget()
        for number in range(last + 1):
            segment = self._segment(number, last, headers, tail, true)
            places = [(damage.begin, damage.end) for damage in segment.damages]
            places += [(chunk.record.at, chunk.record.end) for chunk in segment.chunks if chunk.head is None]
            if places:
                said = "damaged: " + ", ".join(f"bytes {begin} to {end}" for begin, end in places)
                self.warn(f"{segment.name} is {said if segment.end else 'missing'}")
            self.segments.append(segment)
            self.index.add(segment)
        if tail is not None:
            self.index.grow(tail.next_row)

    def _segment(self, number: int, last: int, headers: dict[int, bytes], tail: Tail | None, true: bool) -> Segment:
        """A segment as it is now; its header is read again if the writer has compacted it since."""
        for _ in range(_ATTEMPTS):
            try:
                return self._read_segment(number, last, headers, tail, true)
            except Replaced:
                headers[number] = self.folder.read(segment_name(number), 0, START)
        raise StorageError(
            f"RolloutLog: {self.name} changes faster than it can be read ({segment_name(number)}); expected files that "
            "stay. Compact less often, or open it again."
        )

    def _read_segment(
        self, number: int, last: int, headers: Mapping[int, bytes], tail: Tail | None, true: bool
    ) -> Segment:
        row, header = self.index.next_row, headers.get(number, b"")
        try:
            index = self._all(index_name(number))
        except FileNotFoundError:
            index = b""
        frame = Frame.parsed(header) or Frame.parsed(index[:START], INDEX) or Frame(self.log, number, 0, row)
        segment = Segment(self.folder, frame, header)
        later = (Frame.parsed(headers.get(other, b"")) for other in range(number + 1, last + 1))
        end_row = next((one.next_row for one in later if one is not None), None if tail is None else tail.next_row)
        if len(header) < START or (frame.log, frame.number) != (self.log, number):
            segment.end = 0
            segment.damages.append(Damage(0, 0, row, end_row))
        elif not segment.read_index(index):
            size = self.folder.size(segment.name)
            known = tail if tail is not None and tail.segment == number else None
            durable = START if known is None else known.synced
            until = known.written if known is not None and true else size
            following = Frame.parsed(headers.get(number + 1, b""))
            if frame.key & 1 or (number < last and following is None):
                until = durable = size
            elif following is not None:  # what was there when it was begun; behind it may be a torn end
                durable = max(durable, following.before)
            segment.walk(min(until, size), durable, end_row)
        return segment

    def _all(self, name: str) -> bytes:
        return self.folder.read(name, 0, self.folder.size(name))

    def _tail(self) -> Tail | None:
        for _ in range(_ATTEMPTS):  # it may be written at this moment
            try:
                line = self.folder.read(TAIL, 0, _ENDS.size + _CRC.size)
            except FileNotFoundError:
                return None
            if len(line) == _ENDS.size + _CRC.size and _CRC.pack(zlib.crc32(line[: _ENDS.size])) == line[_ENDS.size :]:
                log, *ends = _ENDS.unpack(line[: _ENDS.size])
                return Tail(*ends) if log == self.log else None
        return None

    def warn(self, seen: str) -> None:
        warnings.warn(
            f"RolloutLog: {self.name}: {seen}; expected the records that were written. Rows in what is damaged cannot "
            "be read, and rows that were deleted there may be back. Restore the files from a backup.",
            MaskpackWarning,
            stacklevel=2,
        )

    def refresh(self) -> None:
        """Takes in what another process has acknowledged since the last look."""
        if self.writes or isinstance(self.folder, RemoteFolder):
            return
        tail = self._tail()
        if tail is None or tail == self._seen:
            return
        last = self.segments[-1] if self.segments else None
        if last is None or tail.segment != last.frame.number:
            self.load()
            return
        known = len(last.chunks)
        try:
            last.walk(tail.written, tail.synced, tail.next_row)
            self.index.add(last, known)
            self._seen = tail
        except Replaced:
            self.load()

    def _forget(self) -> None:
        """Lets go of segments that were replaced, whose space is then free."""
        self._read.clear()
        if isinstance(self.folder, LocalFolder):
            self.folder.forget()

    def reindex(self) -> None:
        """Makes the index anew, after segments were replaced."""
        self._forget()
        next_row = self.index.next_row
        self.index = RowIndex()
        self.index.grow(next_row)
        for segment in self.segments:
            self.index.add(segment)

    # ---------------------------------------------------------------- chunks

    def packed(self, chunk: Chunk, fields: Sequence[Key] = ()) -> PackedBatch:
        """The rows of a chunk; their bytes are mapped. Raises StorageError if they are damaged."""
        packed = self._read.get(chunk)
        if packed is None:
            message = read_message(chunk.payload(), "RolloutLog.take")
            arrays = list(message.arrays)
            for number, digest in chunk.parsed.get("blobs", {}).items():
                arrays[int(number)] = self.blob(digest, chunk)
            message = Message(message.manifest, arrays)
            packed = read_batch(PackedBatch, message, "RolloutLog.take", self._allow_pickle, None)
            if not any("pickle" in entry for entry in message.manifest["fields"]):  # whose arrays are copies
                self._read.keep(chunk, packed)
        return packed.select(*fields) if fields else packed

    def blob(self, digest: str, chunk: Chunk) -> Words:
        """An array of Python objects of a chunk. Raises StorageError if it is damaged."""
        blob = self.index.blobs.get(digest)
        if blob is None:
            raise StorageError(
                f"RolloutLog: {chunk} needs the array {digest}, whose record is damaged; expected it in the log. The "
                "other chunks can be read. Restore the file from a backup."
            )
        return np.frombuffer(blob.payload(), blob.parsed["dtype"])

    def records(self, packed: PackedBatch, kind: int, first: int, head: dict[str, Any]) -> Iterator[NewRecord]:
        """The records of a batch: large arrays of its Python objects that the log does not have yet, then the rows.
        Raises MaskpackError for objects that are no plain data."""
        message, names = write_message(packed, self._allow_pickle)
        body: Any = message.manifest["body"]
        tables = {0, *([body] if isinstance(body, int) else body)}
        arrays = list(message.arrays)
        blobs: dict[str, str] = {}
        new: set[str] = set()
        for number, array in enumerate(arrays):
            if number in tables or array.nbytes < _LARGE:
                continue
            line: Any = np.ascontiguousarray(array)
            dtype = line.dtype.str
            digest = hashlib.blake2b(line.data, digest_size=16, person=dtype.encode()).hexdigest()
            if digest not in new and not self._has(digest):
                new.add(digest)
                yield NewRecord(BLOB, 0, 0, {"digest": digest, "dtype": dtype}, [line])
            blobs[str(number)] = digest
            arrays[number] = array[:0]
        pieces = Pieces(Message(message.manifest, arrays), names)
        head = head | ({"blobs": blobs} if blobs else {})
        payload = [pieces.header, *(array for array in pieces.arrays if array.size)]
        yield NewRecord(kind, first, len(packed), head, payload)

    def verify(self, chunk: Chunk) -> None:
        """Reads a chunk, and the arrays of Python objects that it refers to. Raises StorageError if one is damaged."""
        chunk.verify()
        for digest in chunk.parsed.get("blobs", {}).values():
            self.blob(digest, chunk)

    def _has(self, digest: str) -> bool:
        """Whether an array of Python objects is there, and whole."""
        try:
            if digest in self.index.blobs:
                self.index.blobs[digest].payload()
                return True
        except StorageError:
            pass
        return False

    def damaged(self) -> IntArray:
        """int64 [n], rising: the rows that cannot be read. Reads everything."""
        bad = np.zeros(self.index.next_row, np.bool_)
        for segment in self.segments:
            for damage in segment.damages:
                rows = np.arange(damage.first_row, bad.size if damage.end_row is None else damage.end_row)
                bad[rows[self.index.lost(rows)]] = True
        for chunk in self.index.chunks:
            try:
                self.verify(chunk)
            except StorageError:
                bad[chunk.rows[self.index.live(chunk.rows)]] = True
        return np.flatnonzero(bad)


def log_json(log: int) -> bytes:
    held = {"format": _FORMAT, "version": VERSION, "id": f"{log:016x}"}
    return json.dumps(held | {"crc": zlib.crc32(json.dumps(held).encode())}).encode() + b"\n"


def log_number(folder: Any) -> int:
    """The number of a log. Raises OSError, ValueError, KeyError or TypeError if the folder has none."""
    line = folder.read(LOG, 0, folder.size(LOG))
    held = json.loads(line)
    if held["format"] != _FORMAT or held["version"] != VERSION:
        raise ValueError(f"{LOG} has format {held['format']!r}, version {held['version']!r}")
    if log_json(log := int(held["id"], 16)) != line:
        raise ValueError(f"{LOG} is damaged")
    return log
