"""RolloutLog: rows on a disk, which survive the process that wrote them.

append   batch --compress--> a chunk --written, one sync--> the last segment --> numbers of its rows, for life
take     numbers --> chunks (rows.py) --mmap--> PackedBatch, whose rows are read when they are decoded
delete   a record that names rows;  compact: segments without them
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from tensordict import TensorDict, TensorDictBase

from maskpack.core.arguments import flag, said, whole
from maskpack.core.index import IntArray
from maskpack.core.tensors import host_array
from maskpack.errors import LayoutError, StorageError
from maskpack.fields.registry import Key
from maskpack.packed.batch import PackedBatch, compress
from maskpack.store.compaction import compact
from maskpack.store.contents import LOG, TAIL, Contents, Tail, deletion, log_json, log_number
from maskpack.store.disk import LocalFolder, RemoteFolder, Replaced
from maskpack.store.records import ROWS
from maskpack.store.rows import RowIndex, checked_tags, tags_of
from maskpack.store.segments import index_name
from maskpack.store.writer import Writer

_T = TypeVar("_T")
_ATTEMPTS = 10
_STEP = 1 << 24
"""Bytes that are copied at a time."""


class RolloutLog:
    """An append-only log of packed rows in a folder. One process writes, many read.

    Rows are numbered from 0 in the order in which they are appended. What `append`, `delete` and `compact` have
    returned from is there after `kill -9` and, with fsync="always", after a power failure: each row once, bit for bit.
    An append that had not returned is there as a whole, or not at all. A number is never used again, but for those of
    rows that a power failure took with fsync="interval".

    Args:
        path: a folder of this machine, which is made if it is missing; or, to read only, a URL of fsspec with what
            `back_up` wrote.
        mode: "a" to append, "r" to read. Readers see what the writer has acknowledged.
        fsync: "always" syncs before a call returns. "interval" syncs at most `interval` seconds after it: a power
            failure may lose these seconds, a killed process loses nothing. A log that is dropped or whose process exits
            is synced then.
        interval: seconds.
        segment_bytes: a segment is closed when it is larger.
        allow_pickle: as for `PackedBatch.to_bytes` and `from_bytes`.
        options: options of `compress`, for batches that are not packed.

    Raises:
        LayoutError: an argument is wrong.
        StorageError: another process writes to the log, or the folder is no log. A MaskpackWarning names parts that are
            damaged; their rows raise StorageError when they are read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Literal["a", "r"] = "a",
        fsync: Literal["always", "interval"] = "always",
        interval: float = 1.0,
        segment_bytes: int = 1 << 30,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise LayoutError(f"RolloutLog: path is {said(path)}; expected a folder. Name one.")
        for name, value, known in (("mode", mode, ("a", "r")), ("fsync", fsync, ("always", "interval"))):
            if value not in known:
                raise LayoutError(f"RolloutLog: {name} is {said(value)}; expected {known[0]!r} or {known[1]!r}.")
        if (
            isinstance(interval, bool)
            or not isinstance(interval, int | float)
            or not 0 < interval < threading.TIMEOUT_MAX
        ):
            raise LayoutError(f"RolloutLog: interval is {said(interval)}; expected seconds above 0. Give some.")
        compress(TensorDict({}, batch_size=[0]), **options)  # wrong options raise here, not at the first append
        self.path = os.fspath(cast("str", path))
        self._options = options
        self._allow_pickle = flag(allow_pickle, "allow_pickle", "RolloutLog")
        self._turn = threading.RLock()
        self._writer: Writer | None = None
        whole(segment_bytes, "segment_bytes", 1 << 12, "RolloutLog")
        remote = "://" in self.path
        if remote and mode == "a":
            raise LayoutError(f'RolloutLog: {self.path!r} is not on this machine; expected a folder. Pass mode="r".')
        folder = RemoteFolder(self.path) if remote else LocalFolder(Path(self.path).absolute())
        try:
            if isinstance(folder, LocalFolder) and mode == "a":
                later = None if fsync == "always" else float(interval)
                self._writer = Writer(folder.root, self.path, later, segment_bytes)
            self._contents = Contents(folder, self.path, mode == "a", self._allow_pickle)
            if self._writer is not None:
                self._writer.resume(self._contents)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"RolloutLog: {self.path} cannot be opened ({error}); expected files that can be read, and written to "
                'with mode="a". Look at the disk and at their permissions.'
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a reader of the folder."""
        return _reader, (os.path.abspath(self.path) if "://" not in self.path else self.path, self._allow_pickle)

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RolloutLog({self.path!r}, rows={len(self)}, nbytes={self.nbytes:,})"

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """The number of rows that are there."""
        return int(np.count_nonzero(self._rows().live()))

    @property
    def rows(self) -> IntArray:
        """int64 [n], rising: the numbers of the rows that are there."""
        return self._rows().rows()

    def chunks(self) -> list[IntArray]:
        """The rows that are there, by the chunk that has them: int64 [n] for each append, or for what `compact` joined.
        To read a whole log, take them one by one."""
        index = self._rows()
        rows = [chunk.rows[index.live(chunk.rows)] for chunk in index.chunks]
        return [own for own in rows if own.size]

    @property
    def next_row(self) -> int:
        """The number that the next row gets."""
        return self._rows().next_row

    @property
    def segments(self) -> int:
        """The number of its segments."""
        self._rows()
        return len(self._contents.segments)

    @property
    def nbytes(self) -> int:
        """The bytes of its segments, with deleted rows that were not compacted."""
        self._rows()
        return sum(segment.end for segment in self._contents.segments)

    def _rows(self) -> RowIndex:
        """The index, with what the writer has acknowledged."""
        with self._reading("rows"):
            self._contents.refresh()
            return self._contents.index

    def where(self, /, **tags: Any) -> IntArray:
        """int64 [n], rising: the rows that have these tags. A list, range, array or tensor stands for any of its
        values: `log.where(step=range(10, 20), worker=3)`. No row has a tag whose name no append gave."""
        with self._turn:
            return self._rows().where(tags)

    def tags(self, rows: Any) -> dict[str, list[Any]]:
        """The tags of rows: for each name a list with one value for each row, None where a row has no such tag."""
        with self._reading("tags"):
            index = self._numbers(rows, "tags")
            found: dict[str, list[Any]] = {}
            for chunk, places, own in self._rows().parts(index):
                for name, values in tags_of(chunk, places).items():
                    column = found.setdefault(name, [None] * index.size)
                    for at, value in zip(own.tolist(), values, strict=True):
                        column[at] = value
            return found

    def __getitem__(self, rows: Any) -> PackedBatch:
        """`take` of these rows, with all fields; a slice stands for the rows in it that are there."""
        return self.take(rows)

    def take(self, rows: Any, *fields: Key) -> PackedBatch:
        """Rows by number, in the order given, packed. Their bytes are read when they are decoded; nothing else is read,
        except that the checksum of each chunk is verified when the first of its rows is taken.

        Args:
            rows: numbers as `append` returned them, or a slice, which stands for the rows in it that are there.
            fields: the fields; by default all.

        Raises:
            FieldError: a row that is not there, or a field that it does not have.
            LayoutError: `rows` are no numbers, or rows of different appends have different fields or dtypes: name the
                fields that they share.
            StorageError: a row that was damaged, or a file that cannot be read.
        """
        with self._reading("take"):
            return self._again(lambda: self._taken(self._numbers(rows, "take"), fields))

    def _again(self, look: Callable[[], _T]) -> _T:
        """What `look` returns; it looks again where the writer has compacted a segment meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                return look()
            except Replaced:
                self._contents.load()
        raise StorageError(
            f"RolloutLog: {self.path} changes faster than it can be read; expected segments that stay for a while. "
            "Compact less often, or look again."
        )

    def _taken(self, numbers: IntArray, fields: Sequence[Key]) -> PackedBatch:
        contents = self._contents
        parts = contents.index.parts(numbers)
        if not parts:
            if not contents.index.chunks:
                raise LayoutError("RolloutLog.take: the log has no rows; expected some. Append a batch first.")
            return contents.packed(contents.index.chunks[-1], fields).take([])
        batches = [contents.packed(chunk, fields) for chunk, _, _ in parts]
        index = np.empty(numbers.size, np.int64)
        begin = 0
        for batch, (_, places, own) in zip(batches, parts, strict=True):
            index[own] = begin + places
            begin += len(batch)
        return PackedBatch.cat(batches).take(index)

    def damaged(self) -> IntArray:
        """int64 [n], rising: the rows that cannot be read any more. Reads the whole log.

        Beside a missing segment it may name rows that were deleted, once compaction has dropped what says so."""
        with self._reading("damaged"):
            self._rows()
            return self._again(self._contents.damaged)

    # ---------------------------------------------------------------- writing

    def append(self, batch: TensorDictBase | PackedBatch, tags: Mapping[str, Any] | None = None) -> range:
        """Appends the rows of a batch, and returns their numbers when they are on the disk (see `fsync`).

        Args:
            batch: a TensorDict [B], which is compressed, or a PackedBatch.
            tags: for `where`: a plain value (text, a number, a bool, None) for all rows, or a list with one for each.

        Raises:
            LayoutError: the batch or the tags are wrong; or as `compress`.
            MaskpackError: a Python object is no plain data, and `allow_pickle` is false.
            StorageError: the disk is full: nothing was appended, and appends go on. Or the disk fails, or the files
                were removed: then the rows may be there all the same. Open the log again and ask `where` before you
                append them again.
        """
        with self._writing("append"):
            pass  # a reader is told so, whatever the batch is
        if isinstance(batch, PackedBatch):
            packed = batch
        elif isinstance(batch, TensorDictBase):
            packed = compress(batch, **self._options)
        else:
            raise LayoutError(
                f"RolloutLog.append: the batch is {said(batch)}; expected a TensorDict or a PackedBatch. Pass one."
            )
        if packed.schema.root.more_dims is None:
            raise LayoutError(
                "RolloutLog.append: the batch was packed from a TensorDict with batch_size [], which has no rows; "
                "expected batch_size=[rows]. Give it one before packing."
            )
        checked = checked_tags({} if tags is None else tags, len(packed))
        with self._writing("append") as writer:
            first = self._contents.index.next_row
            if len(packed):
                head = {"tags": checked} if checked else {}
                writer.write(self._contents.records(packed, ROWS, first, head), first + len(packed))
            return range(first, first + len(packed))

    def delete(self, rows: Any) -> int:
        """Deletes rows, and returns how many of them were there. Their bytes stay until `compact`. Raises FieldError
        for numbers that no row has had, and StorageError as `append`."""
        with self._writing("delete") as writer:
            numbers = np.unique(self._numbers(rows, "delete"))
            index = self._contents.index
            if numbers.size and not 0 <= numbers[0] <= numbers[-1] < index.next_row:
                index.parts(numbers)  # raises
            numbers = numbers[index.live(numbers)]
            if numbers.size:
                writer.write([deletion(numbers)], index.next_row)
            return int(numbers.size)

    def sync(self) -> None:
        """Returns when all that was appended is on the disk. Raises StorageError."""
        with self._writing("sync") as writer:
            writer.sync()

    def compact(self, least: float = 0.5, segments: int | None = None) -> int:
        """Writes segments again without deleted rows, and arrays of Python objects that no other row has, if these are
        at least a share `least` of their bytes; joins small chunks. With least=0, each segment is written at least
        once. Returns the number of bytes that were freed. The last segment is left as it is. `segments` is the most
        that it writes, for a call that is short; by default all.

        Readers go on. A crash leaves the old segment or the new one. Raises StorageError as `append`; a MaskpackWarning
        names segments that are damaged, which stay as they are.
        """
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise LayoutError(f"RolloutLog.compact: least is {said(least)}; expected a share of 0 to 1. Give one.")
        most = None if segments is None else whole(segments, "segments", 1, "RolloutLog.compact")
        with self._writing("compact") as writer:
            return compact(self._contents, writer, least, most)

    def close(self) -> None:
        """Syncs, and lets another process write. Batches that were taken stay readable. Raises StorageError if the
        disk failed before, and rows that were appended may not be on it."""
        with self._turn:
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _writing(self, call: str) -> Generator[Writer]:
        """Gives the writer to one thread. Raises StorageError if there is none."""
        with self._reading(call):
            writer = self._writer
            reason = 'it was opened with mode="r"' if writer is None else writer.why_not()
            if writer is None or reason is not None:
                raise StorageError(
                    f"RolloutLog.{call}: {self.path} cannot be written to: {reason}; expected an open log. Open it "
                    'again with mode="a".'
                )
            yield writer

    @contextmanager
    def _reading(self, call: str) -> Generator[None]:
        """Lets one thread read. Raises StorageError for files that cannot be opened, mapped or read."""
        with self._turn:
            try:
                yield
            except OSError as error:
                raise StorageError(
                    f"RolloutLog.{call}: {self.path} could not be read or copied ({error}); expected a disk that "
                    "works, and memory and open files below their limits. Look at these, and call it again."
                ) from error

    # ---------------------------------------------------------------- backup

    def back_up(self, target: str | os.PathLike[str]) -> int:
        """Copies the log to a folder or a URL of fsspec, and returns the number of bytes that were copied.

        Segments that the target has already are left out, so the next backup copies what is new. The target is a log,
        which a RolloutLog opens; what tells its end is written last. Damaged segments are copied as they are, unless
        the target has them from before.

        Raises StorageError if the target has another log.
        """
        if not isinstance(target, str | os.PathLike):
            raise LayoutError(f"RolloutLog.back_up: target is {said(target)}; expected a folder or a URL. Name one.")
        with self._reading("back_up"):
            to = RemoteFolder(os.fspath(target))
            self._rows()
            return self._again(lambda: self._backed_up(to))

    def _backed_up(self, to: RemoteFolder) -> int:
        contents, here = self._contents, to.names()
        try:
            other = LOG in here and log_number(to) != contents.log
        except (ValueError, KeyError, TypeError):
            other = True
        if other:
            raise StorageError(
                f"RolloutLog.back_up: {to.root} has another log; expected an empty folder, or a backup of this one. "
                "Name another."
            )
        copied = 0
        for segment in contents.segments:
            name, index = index_name(segment.frame.number), b"".join(map(bytes, segment.index()))
            if not segment.end or (name in here and to.read(name, 0, to.size(name)) == index):
                continue
            if not segment.is_whole and name in here:  # the target has it as it was
                continue
            end = segment.end
            to.write(segment.name, (segment.read(at, min(at + _STEP, end)) for at in range(0, end, _STEP)))
            copied += end
            if segment.is_whole:
                to.write(name, [index])
        to.write(LOG, [log_json(contents.log)])
        last = contents.segments[-1]
        to.write(TAIL, [Tail(last.frame.number, last.end, last.end, contents.index.next_row).line(contents.log)])
        return copied

    # ---------------------------------------------------------------- rows

    def _numbers(self, rows: Any, call: str) -> IntArray:
        """Row numbers from a slice, a list, a range, an array or a tensor."""
        index = self._rows()
        if isinstance(rows, slice):
            inside = np.zeros(index.next_row, np.bool_)
            begin, end, step = rows.indices(index.next_row)
            inside[slice(begin, None if end < 0 else end, step)] = True
            own = np.flatnonzero(inside & index.live())
            return own if step > 0 else own[::-1]
        array = host_array(list(rows) if isinstance(rows, range) else rows, "rows", f"RolloutLog.{call}")
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise LayoutError(
                f"RolloutLog.{call}: rows are {said(rows)} of {array.dtype} {array.shape}; expected numbers (n,), as "
                "append returned them. Pass a list, [5] for one row, a range, an array or a slice; of a mask, "
                "np.flatnonzero(mask)."
            )
        return array.astype(np.int64)


def _reader(path: str, allow_pickle: bool) -> RolloutLog:
    return RolloutLog(path, mode="r", allow_pickle=allow_pickle)
