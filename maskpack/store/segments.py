"""A segment: a file of records. Its index, a file beside it, is written when the segment is full.

    000003.seg   header (64), records          000003.idx   header (64), where records are, their headers, their heads

A segment without an index is walked from record to record. What was not on the disk when a machine stopped may be torn:
it is no part of the segment. A record that was on the disk and is no longer whole is a damage, and is named.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from maskpack.core.index import IntArray, ranges
from maskpack.errors import StorageError
from maskpack.store.disk import Folder
from maskpack.store.records import ALIGN, DELETE, HEADER, KINDS, MAGIC, PICKED, ROWS, Record, crc_of_file, parsed

VERSION = 1
_FILE = struct.Struct("<12sIQqQqQ4x")
_CRC = struct.Struct("<I")
_SEGMENT, INDEX = b"maskpack log", b"maskpack idx"
START = _FILE.size + _CRC.size
"""Where the first record of a segment begins."""


@dataclass(frozen=True)
class Frame:
    """The header of a segment.

    Attributes:
        log: the number of the log, equal in all its files.
        number: of the segment in the log.
        key: another one if the segment was written again; it is odd then, and all of the file was on the disk before it
            had its name.
        next_row: the number of the next row when the segment was begun.
        before: how many bytes of the segment before were on the disk then.
    """

    log: int
    number: int
    key: int
    next_row: int
    before: int = 0

    def header(self, magic: bytes = _SEGMENT) -> bytes:
        line = _FILE.pack(magic, VERSION, self.log, self.number, self.key, self.next_row, self.before)
        return line + _CRC.pack(zlib.crc32(line))

    @classmethod
    def parsed(cls, line: bytes, magic: bytes = _SEGMENT) -> Frame | None:
        """None for a header that is not whole, or of another version."""
        if len(line) < START or _CRC.unpack_from(line, _FILE.size)[0] != zlib.crc32(line[: _FILE.size]):
            return None
        own, version, *rest = _FILE.unpack_from(line)
        return cls(*rest) if own == magic and version == VERSION else None


@dataclass(frozen=True)
class Damage:
    """A part of a segment that is no record any more: where, and the numbers that rows in it have."""

    begin: int
    end: int
    first_row: int
    end_row: int | None


@dataclass(eq=False)
class Chunk:
    """A record, and its head as it was read; None if the head is damaged.

    Attributes:
        verified: whether the payload is what was written.
        needed: a number of rows that were not deleted, and the digests of the arrays that these refer to.
    """

    segment: Segment
    record: Record
    head: bytes | None
    verified: bool = False
    needed: tuple[int, set[str]] = (0, set())

    @cached_property
    def parsed(self) -> dict[str, Any]:
        return {} if self.head is None else json.loads(self.head)

    @cached_property
    def rows(self) -> IntArray:
        """int64 [n], rising: the numbers of its rows."""
        if self.record.kind == ROWS:
            return np.arange(self.record.first, self.record.first + self.record.count)
        spans = np.array(self.parsed["rows"], np.int64).reshape(-1, 2)
        return ranges(spans[:, 0], spans[:, 1])

    def place(self, rows: IntArray) -> IntArray:
        """Where rows are in it."""
        return rows - self.record.first if self.record.kind == ROWS else np.searchsorted(self.rows, rows)

    def payload(self) -> memoryview:
        """The payload. Raises StorageError if it is not what was written; looks once."""
        if not self.verified:
            self.verify()
        at = self.record.payload_at
        return self.segment.view(at, at + self.record.nbytes)

    def verify(self) -> None:
        """Reads the payload. Raises StorageError if it is not what was written."""
        if not self.is_whole():
            raise StorageError(
                f"RolloutLog: {self} is damaged: its checksum differs; expected the bytes that were written. The other "
                "records can be read. Restore the file from a backup, or delete these rows."
            )
        self.verified = True

    def is_whole(self) -> bool:
        """Reads the payload. The head of a deletion is not needed, as its payload says the same."""
        at, nbytes = self.record.payload_at, self.record.nbytes
        there = self.head is not None or self.record.kind == DELETE
        return there and crc_of_file(self.segment.read, at, at + nbytes) == self.record.crc

    def __str__(self) -> str:
        record = self.record
        what = f"a record of kind {KINDS[record.kind]!r}"
        if record.has_rows:
            known = self.head is not None or record.kind == ROWS
            what = f"the chunk of rows {record.first} to {self.rows[-1] if known else '?'}"
        return f"{what} in {self.segment.name}, bytes {record.at} to {record.end},"


@dataclass(eq=False)
class Segment:
    """A file of records.

    Attributes:
        header: its first bytes as they are on the disk.
        chunks: its records, in order.
        end: where the next record begins; 0 if the file is missing.
        synced: how many of its bytes are known to be on the disk.
        damages: what is no record any more.
    """

    folder: Folder
    frame: Frame
    header: bytes
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    end: int = START
    synced: int = START
    damages: list[Damage] = field(default_factory=list[Damage])

    @property
    def name(self) -> str:
        return segment_name(self.frame.number)

    @property
    def is_whole(self) -> bool:
        """Whether no record, and no head of one, is damaged."""
        return not self.damages and all(chunk.head is not None for chunk in self.chunks)

    def read(self, begin: int, end: int) -> bytes:
        return self.folder.read(self.name, begin, end, self.header)

    def view(self, begin: int, end: int) -> memoryview:
        return self.folder.view(self.name, self.header, begin, end)

    def walk(self, until: int, durable: int, end_row: int | None) -> None:
        """Reads the records behind those that are known, up to `until`. Records before `durable` were on the disk: if
        they are not whole, they are damages. `end_row` is the number of the next row behind them."""
        data = self.view(0, until)
        at, row = self.end, self._next_row()
        while at < until:
            record = _record_at(data, self.frame.log, at)
            if record is None:
                if at >= durable and not (durable := _synced_later(data, self.frame.log, at)):
                    break  # torn
                found = _next_header(data, self.frame.log, at + ALIGN)
                end = until if found is None else found.at
                if found is None:
                    end = min(end, durable)
                copy = parsed(data[end - HEADER : end], self.frame.log, at)
                if copy is not None and copy.end == end:  # the header is damaged, and its copy is not
                    record = copy
                else:
                    self.damages.append(Damage(at, end, row, None))
                    at = end
                    continue
            durable = max(durable, record.synced)
            head = bytes(data[record.head_at : record.head_at + record.head_nbytes])
            whole = zlib.crc32(head) == record.head_crc
            if record.has_rows and self.damages and self.damages[-1].end_row is None:
                self.damages[-1] = replace(self.damages[-1], end_row=record.first)
            chunk = Chunk(self, record, head if whole else None)
            if at >= durable:
                chunk.verified = whole and chunk.is_whole()
                if not chunk.verified and not (durable := _synced_later(data, self.frame.log, at)):
                    break  # torn
            if record.kind == PICKED and not whole:  # nothing else tells which rows it has
                self.damages.append(Damage(at, record.end, record.first, None))
                at = record.end
                continue
            self.chunks.append(chunk)
            at = record.end
            row = max(row, int(chunk.rows[-1]) + 1) if record.has_rows else row
        if at < durable:
            self.damages.append(Damage(at, durable, row, None))
        if self.damages and self.damages[-1].end_row is None and end_row is not None:
            self.damages[-1] = replace(self.damages[-1], end_row=end_row)
        self.end, self.synced = at, min(durable, at)

    def _next_row(self) -> int:
        last = next((chunk.rows for chunk in reversed(self.chunks) if chunk.record.has_rows), None)
        return self.frame.next_row if last is None else int(last[-1]) + 1

    # ---------------------------------------------------------------- index

    def index(self) -> list[Any]:
        """The bytes of its index."""
        places = np.array([chunk.record.at for chunk in self.chunks], np.int64)
        headers = b"".join(chunk.record.header(self.frame.log) for chunk in self.chunks)
        heads = b"".join(chunk.head or b"" for chunk in self.chunks)
        counts = np.array([len(self.chunks), self.end], np.int64)
        parts = [counts.tobytes(), places.tobytes(), headers, heads]
        return [self.frame.header(INDEX), *parts, _CRC.pack(zlib.crc32(b"".join(parts)))]

    def read_index(self, line: bytes) -> bool:
        """Takes the records from an index; false if it is not whole, or of another segment."""
        body = line[START : -_CRC.size]
        whole = len(body) >= 16 and _CRC.pack(zlib.crc32(body)) == line[-_CRC.size :]
        if not whole or Frame.parsed(line[:START], INDEX) != self.frame:
            return False
        count, self.end = np.frombuffer(body, np.int64, 2).tolist()
        places = np.frombuffer(body, np.int64, count, 16).tolist()
        at, head_at = 16 + 8 * count, 16 + (8 + HEADER) * count
        for place in places:
            record = parsed(body[at : at + HEADER], self.frame.log, place)
            assert record is not None
            at += HEADER
            self.chunks.append(Chunk(self, record, body[head_at : head_at + record.head_nbytes]))
            head_at += record.head_nbytes
        return True


def segment_name(number: int) -> str:
    return f"{number:06d}.seg"


def index_name(number: int) -> str:
    return f"{number:06d}.idx"


def _record_at(data: memoryview, log: int, at: int) -> Record | None:
    record = parsed(data[at : at + HEADER], log, at)
    return record if record is not None and record.end <= len(data) else None


def _synced_later(data: memoryview, log: int, at: int) -> int:
    """How many bytes were on the disk when some record behind `at` was written, if these are more than `at`; or 0."""
    found = _next_header(data, log, at + ALIGN)
    while found is not None and found.synced <= at:
        found = _next_header(data, log, found.at + ALIGN)
    return 0 if found is None else min(found.synced, len(data))


def _next_header(data: memoryview, log: int, at: int) -> Record | None:
    """The first record that begins at `at` or later."""
    line = np.frombuffer(data, np.uint32, len(data) // 4)[:: ALIGN // 4]
    wanted = np.frombuffer(MAGIC, np.uint32)[0]
    for place in np.flatnonzero(line[at // ALIGN :] == wanted).tolist():
        record = _record_at(data, log, at + place * ALIGN)
        if record is not None:
            return record
    return None
