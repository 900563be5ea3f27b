"""Segments without the rows that were deleted: small chunks become larger ones, and what nothing refers to goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from maskpack.core.index import IntArray
from maskpack.errors import StorageError
from maskpack.packed.batch import PackedBatch
from maskpack.packed.file.container import read_message
from maskpack.store.contents import Contents, NewRecord, deletion
from maskpack.store.records import BLOB, DELETE, PICKED
from maskpack.store.rows import deleted_rows, spans_of, tags_of
from maskpack.store.segments import START, Chunk, Segment
from maskpack.store.writer import Writer, random_number

_MOST = 256
"""Rows of a chunk that is made of smaller ones."""


def compact(contents: Contents, writer: Writer, least: float, most: int | None) -> int:
    """Writes closed segments again, `most` of them or all, of which deleted rows are at least a share `least`. Returns
    the bytes that were freed."""
    writer.sync()  # rows go when what deletes them is on the disk, and arrays that others refer to
    freed = written = 0
    users = _users(contents)
    for place, segment in enumerate(contents.segments[:-1]):
        again = segment.frame.key & 1  # its small chunks are joined
        try:
            if segment.damages or _dead_bytes(contents, segment, users) < max(least * (segment.end - START), again):
                continue
            for chunk in segment.chunks:
                if not chunk.record.has_rows or contents.index.live(chunk.rows).any():
                    contents.verify(chunk)
        except StorageError as error:
            contents.warn(f"{segment.name} is not compacted: {error}")
            continue
        frame = replace(segment.frame, key=random_number() | 1)
        new = Segment(contents.folder, frame, frame.header())
        writer.replace(segment, new, _records(contents, segment, users))
        contents.segments[place] = new
        contents.reindex()
        users = _users(contents)
        freed += segment.end - new.end
        written += 1
        if written == most:
            break
    return freed


_Users = dict[str, set[Segment]]
"""The segments with rows that refer to an array of Python objects, by its digest."""


def _users(contents: Contents) -> _Users:
    users: _Users = {}
    for chunk in contents.index.chunks:
        blobs: dict[str, str] = chunk.parsed.get("blobs", {})
        if blobs and contents.index.live(chunk.rows).any():
            for digest in blobs.values():
                users.setdefault(digest, set()).add(chunk.segment)
    return users


def _needed(users: _Users, old: Segment) -> set[str]:
    """The arrays that rows of other segments refer to."""
    return {digest for digest, segments in users.items() if segments != {old}}


def _is_whole(contents: Contents) -> bool:
    return all(segment.is_whole for segment in contents.segments)


def _dead_bytes(contents: Contents, segment: Segment, users: _Users) -> int:
    """The bytes of deleted rows, and of arrays that no other row refers to. Raises StorageError if the segment is
    damaged."""
    dead, needed = 0, _needed(users, segment)
    for chunk in segment.chunks:
        record = chunk.record
        if record.has_rows:
            live = chunk.rows[contents.index.live(chunk.rows)]
            dead += (record.end - record.at) * (record.count - live.size) // record.count
            needed |= _arrays_of(chunk, live)
    if _is_whole(contents):
        blobs = [chunk for chunk in segment.chunks if chunk.record.kind == BLOB]
        dead += sum(blob.record.end - blob.record.at for blob in blobs if blob.parsed["digest"] not in needed)
    return dead


def _arrays_of(chunk: Chunk, rows: IntArray) -> set[str]:
    """The arrays that some rows of a chunk refer to."""
    blobs: dict[str, str] = chunk.parsed.get("blobs", {})
    if not blobs or not rows.size:
        return set()
    if rows.size == chunk.record.count:
        return set(blobs.values())
    if chunk.needed[0] != rows.size:
        numbers: set[int] = set()
        for said in read_message(chunk.payload(), "RolloutLog.compact").manifest["fields"]:
            json: Any = said.get("json", ())
            numbers.update(said.get("pickle", ()))
            by_row = json and said["depth"]
            numbers.update(_numbers([json[place] for place in chunk.place(rows).tolist()] if by_row else json))
        chunk.needed = rows.size, {digest for number, digest in blobs.items() if int(number) in numbers}
    return chunk.needed[1]


def _numbers(json: Any) -> Iterator[int]:
    """The numbers of the arrays in objects that are written as JSON."""
    if isinstance(json, list):
        for item in cast("list[Any]", json):
            yield from _numbers(item)
    elif isinstance(json, dict):
        for name, item in cast("dict[str, Any]", json).items():
            yield from [item[0]] if name in ("tensor", "array") else _numbers(item)


def _records(contents: Contents, old: Segment, users: _Users) -> Iterator[NewRecord]:
    """The records that are left of a segment. Where others are damaged, what their rows may need stays, too."""
    damaged, blobs = not _is_whole(contents), _needed(users, old)
    for record in _rows(contents, old, damaged):
        blobs |= set(record.head.get("blobs", {}).values())
        yield record
    for chunk in old.chunks:
        if chunk.record.kind == BLOB and (damaged or chunk.parsed["digest"] in blobs):
            yield NewRecord(BLOB, 0, 0, chunk.parsed, [chunk.payload()])


def _rows(contents: Contents, old: Segment, damaged: bool) -> Iterator[NewRecord]:
    """The rows that are left of a segment, and what deletes rows of others."""
    index = contents.index
    own = [number for number, chunk in enumerate(index.chunks) if chunk.segment is old]
    held = _Held(contents)
    for chunk in old.chunks:
        record = chunk.record
        if record.kind == DELETE:  # of rows whose bytes are in other segments
            rows = deleted_rows(chunk)
            at = index.stored(rows)
            rows = rows[((at >= 0) | damaged) & ~np.isin(at, own)]
            if rows.size:
                yield deletion(rows)
        elif record.has_rows and (live := index.live(chunk.rows)).any():
            count = int(np.count_nonzero(live))
            if not held.takes(chunk, count):
                yield from held.joined()
            if count == record.count >= _MOST:
                yield from held.joined()
                yield NewRecord(record.kind, record.first, record.count, chunk.parsed, [chunk.payload()])
            else:
                held.add(chunk, chunk.rows[live])
    yield from held.joined()


@dataclass
class _Held:
    """Chunks that are written as one: with the same schema, widths and names of tags, so that each row stays as it
    was."""

    contents: Contents
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    rows: list[IntArray] = field(default_factory=list[IntArray])

    def takes(self, chunk: Chunk, count: int) -> bool:
        if not self.chunks:
            return True
        first, packed = self.contents.packed(self.chunks[0]), self.contents.packed(chunk)
        alike = first.schema == packed.schema and first.frames == packed.frames
        if alike:  # an object for the whole batch stays one
            both = PackedBatch.cat([first, packed])
            alike = all(both.objects[path].depth == held.depth for path, held in packed.objects.items())
        tags: Sequence[Any] = [[*one.parsed.get("tags", {})] for one in (self.chunks[0], chunk)]
        return alike and tags[0] == tags[1] and sum(map(len, self.rows)) + count <= _MOST

    def add(self, chunk: Chunk, rows: IntArray) -> None:
        self.chunks.append(chunk)
        self.rows.append(rows)

    def joined(self) -> Iterator[NewRecord]:
        if not self.chunks:
            return
        pairs = list(zip(self.chunks, self.rows, strict=True))
        packed = PackedBatch.cat([self.contents.packed(chunk).take(chunk.place(rows)) for chunk, rows in pairs])
        tags = [tags_of(chunk, chunk.place(rows)) for chunk, rows in pairs]
        numbers = np.concatenate(self.rows)
        head: dict[str, Any] = {"rows": spans_of(numbers).tolist()}
        if tags[0]:
            head["tags"] = {name: [value for own in tags for value in own[name]] for name in tags[0]}
        self.chunks, self.rows = [], []
        yield from self.contents.records(packed, PICKED, int(numbers[0]), head)
