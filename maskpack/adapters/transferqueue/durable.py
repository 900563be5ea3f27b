"""Samples in a log on a disk: a unit that is started again reads it.

put, clear: the log --> the samples --> the answer;  started: rows of the log, in their order --put--> the samples

rows of a chunk      tags sample, life
a run                tag run: the samples here are those of this run

The life of a sample tells which samples of a checkpoint are still those of the log: where a sample was cleared, and
another one got its index, that has another life.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from maskpack.errors import StorageError
from maskpack.packed.batch import PackedBatch
from maskpack.packed.values import packed_rows
from maskpack.store import RolloutLog

_log = logging.getLogger(__name__)
_SEGMENT = 1 << 26
_LEAST = 1024
"""Hidden rows that are deleted together, and deleted rows after which the log is looked at for dead segments."""


class SampleLog(RolloutLog):
    """The samples of a storage unit in a log.

    Args:
        path: the folder of the log.
        run: names the run. Samples of another run in the log wait for a checkpoint: until then nothing can be put.
        fsync: as for RolloutLog.

    Attributes:
        mark: the rows that say that the samples are those of the run; nothing if they are those of another one.
    """

    def __init__(self, path: str, run: str, fsync: Literal["always", "interval"]) -> None:
        super().__init__(path, fsync=fsync, segment_bytes=_SEGMENT, allow_pickle=True)
        self._run = run
        self.mark: list[int] = []
        self._hidden: list[int] = []
        self._deleted = 0

    def opened(self) -> Iterator[tuple[PackedBatch, list[int], list[int], list[int]]]:
        """The chunks that are in the log, in their order: rows, their samples, the lives of these, and the numbers of
        the rows.

        Raises StorageError for records that are damaged or missing: others may hold older values of their samples.
        """
        lost = [segment.name for segment in self._contents.segments if segment.damages]
        if lost:
            raise StorageError(
                f"{self.path}: records of {', '.join(lost)} are damaged or missing; expected all that were written. "
                "Name another folder in backend.Maskpack.log and load a checkpoint."
            )
        empty = True
        for rows in self.chunks():
            tags = self.tags(rows)
            if "sample" in tags:
                empty = False
                yield self.take(rows).own(), tags["sample"], tags["life"], rows.tolist()
            elif tags["run"][-1] == self._run:
                self.mark = rows.tolist()
            else:
                self._hidden += rows.tolist()
        if not self.mark and empty:
            self.adopt()

    def add(self, packed: PackedBatch, samples: Sequence[int], lives: Sequence[int]) -> range:
        """Appends rows of samples; returns their numbers."""
        life = lives[0] if len(set(lives)) == 1 else list(lives)
        return self.append(packed, {"sample": list(samples), "life": life})

    def hide(self, rows: Iterable[int]) -> None:
        """Deletes rows with others, later: newer ones hide them."""
        self._hidden += rows
        if len(self._hidden) >= _LEAST:
            with contextlib.suppress(StorageError):
                self.remove([])

    def remove(self, rows: Sequence[int]) -> None:
        """Deletes rows and those that are hidden; where more were deleted than there are, the log becomes smaller."""
        self._deleted += self.delete([*rows, *self._hidden])
        self._hidden.clear()
        if self._deleted >= max(_LEAST, len(self)) and self.segments > 1:
            try:
                freed = self.compact(segments=1)  # the next ones with the next requests
            except StorageError as error:
                _log.warning("%s", error)
                freed = 0
            self._deleted = self._deleted if freed else 0

    # ---------------------------------------------------------------- runs

    def require(self, call: str) -> None:
        """Raises StorageError if the samples are those of an earlier run."""
        if not self.mark:
            raise StorageError(
                f"{call}: {self.path} has {len(self)} rows of samples of an earlier run; expected an empty "
                "log, or those of a checkpoint. Call transfer_queue.load_checkpoint first, or name another folder in "
                "backend.Maskpack.log."
            )

    def adopt(self) -> None:
        """Says that the samples are those of the run."""
        self.mark = [*self.append(packed_rows({}, 1, {}, "RolloutLog.append"), {"run": self._run})]
