"""A record of a log, in a multiple of 64 bytes:

    header (64)   head: JSON, with spaces behind it   payload, with zeros behind it   the header again (64)

`rows`    head {tags, blobs?, rows?}    payload: a packed batch as `PackedBatch.to_bytes` writes it
`picked`  the same; its rows are those that the head lists
`delete`  head {rows}                  payload: the same, int64 pairs of a first row and a count
`blob`    head {digest, dtype}         payload: an array of a Python object, which rows refer to

A bit that is flipped in a header is mended by its copy. Its checksum counts the place of the record, so that no copy is
taken for a record. A payload has a checksum: CRC-32 of the CRC-32 of each MiB.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MAGIC = b"\x8bMPR"
ROWS, DELETE, BLOB, PICKED = range(4)
KINDS = ("rows", "delete", "blob", "picked")
ALIGN = 64
_HEADER = struct.Struct("<4sIQqqIIQQI")
_CRC = struct.Struct("<I")
HEADER = _HEADER.size + _CRC.size
_BLOCK = 1 << 20
_THREADS = 2
"""zlib releases the interpreter's lock for large blocks."""


@dataclass(frozen=True)
class Record:
    """The header of a record.

    Attributes:
        kind: ROWS, DELETE, BLOB or PICKED.
        at: where the record begins.
        first, count: the number of its first row, and how many rows it has.
        head_nbytes, head_crc: of the head.
        nbytes, crc: of the payload.
        synced: how many bytes of this file were on the disk when the record was written.
    """

    kind: int
    at: int
    first: int
    count: int
    head_nbytes: int
    head_crc: int
    nbytes: int
    crc: int
    synced: int

    @property
    def has_rows(self) -> bool:
        return self.kind in (ROWS, PICKED)

    @property
    def head_at(self) -> int:
        return self.at + HEADER

    @property
    def payload_at(self) -> int:
        return self.head_at + padded(self.head_nbytes)

    @property
    def end(self) -> int:
        return self.payload_at + padded(self.nbytes) + HEADER

    def header(self, log: int) -> bytes:
        sizes = self.head_nbytes, self.head_crc, self.nbytes, self.synced, self.crc
        line = _HEADER.pack(MAGIC, self.kind, log, self.first, self.count, *sizes)
        return line + _CRC.pack(zlib.crc32(line, self.at & 0xFFFFFFFF))


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def parsed(line: Any, log: int, at: int) -> Record | None:
    """The record whose header is `line`, at a place of a file of the log `log`; None if it is no valid header."""
    if len(line) < HEADER:
        return None
    magic, kind, own, first, count, head_nbytes, head_crc, nbytes, synced, crc = _HEADER.unpack_from(line)
    if (
        magic != MAGIC
        or own != log
        or kind >= len(KINDS)
        or _CRC.unpack_from(line, _HEADER.size)[0] != zlib.crc32(line[: _HEADER.size], at & 0xFFFFFFFF)
    ):
        return None
    return Record(kind, at, first, count, head_nbytes, head_crc, nbytes, crc, synced)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=True).encode()


def crc_of(buffers: Sequence[Any], meanwhile: Callable[[], Any] = lambda: None) -> int:
    """The checksum of buffers that follow each other; other threads compute it, `meanwhile` this one does something."""
    blocks = list(_blocks(buffers))
    if len(blocks) < 2:
        meanwhile()
        return _together(map(_crc_of_parts, blocks))
    with ThreadPoolExecutor(_THREADS) as threads:
        crcs = threads.map(_crc_of_parts, blocks)
        meanwhile()
        return _together(crcs)


def crc_of_file(read: Callable[[int, int], bytes], begin: int, end: int) -> int:
    """The checksum of a part of a file, which is read a MiB at a time."""

    def crc(at: int) -> int:
        return zlib.crc32(read(at, min(at + _BLOCK, end)))

    places = range(begin, end, _BLOCK)
    if len(places) < 2:
        return _together(map(crc, places))
    with ThreadPoolExecutor(_THREADS) as threads:
        return _together(threads.map(crc, places))


def _together(crcs: Iterable[int]) -> int:
    return zlib.crc32(b"".join(map(_CRC.pack, crcs)))


def _crc_of_parts(parts: Sequence[Any]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _blocks(buffers: Sequence[Any]) -> Iterator[list[memoryview]]:
    """Views of buffers that follow each other, a MiB in each list."""
    block: list[memoryview] = []
    room = _BLOCK
    for buffer in buffers:
        line = memoryview(buffer).cast("B")
        while line.nbytes:
            block.append(line[:room])
            room -= block[-1].nbytes
            line = line[block[-1].nbytes :]
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block
