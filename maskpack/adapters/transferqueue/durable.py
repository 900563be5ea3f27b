"""Samples that are in a log on a disk, too: a unit that is started again reads it.

put, clear: the log --> the samples --> the answer;  started: rows of the log, in their order --put--> the samples

rows of a chunk      tags sample, life, put; "shares", "turned FIELD" where the chunk says so
a large tensor       tag large: its digest
a count of holds     tags held, holds: the newest row of a digest counts
a run                tag run: the samples here are those of this run

The life of a sample is the number of the put that brought it: a sample that was cleared, and whose index another sample
got, has another life. It tells which samples of a checkpoint are still those of the log.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from maskpack.adapters.transferqueue.chunk import Chunk, Piece, assembled
from maskpack.adapters.transferqueue.large import Large
from maskpack.adapters.transferqueue.unit import Samples
from maskpack.errors import StorageError
from maskpack.packed.batch import PackedBatch
from maskpack.packed.rows import Values, packed_rows
from maskpack.store import RolloutLog

_log = logging.getLogger(__name__)
_SEGMENT = 1 << 26
_LEAST = 1024
"""Hidden rows that are deleted together, and deleted rows after which the log is looked at for dead segments."""
_TURNED = "turned "


class DurableSamples(Samples):
    """What a storage unit holds, and keeps in a log.

    Args:
        path: the folder of the log.
        run: names the run. Samples of another run in the log wait for a checkpoint: until then nothing can be put.
        fsync: as for RolloutLog.
    """

    def __init__(self, path: str, run: str, fsync: Literal["always", "interval"]) -> None:
        super().__init__()
        self._run = run
        self._log = RolloutLog(path, fsync=fsync, segment_bytes=_SEGMENT, allow_pickle=True)
        self._index: dict[int, list[tuple[int, frozenset[str]]]] = {}
        """For each sample, its rows in the log, with their fields."""
        self._lives: dict[int, int] = {}
        self._large: dict[bytes, int] = {}
        self._held: dict[bytes, int] = {}
        """For each large tensor, its row in the log, and that of its holds."""
        self._dead: list[int] = []
        """Rows that newer ones hide."""
        self._deleted = 0
        self._done: set[int] = set()
        """The puts that are in the log, from before the unit was started: an answer may have been lost."""
        self._mark: int | None = None
        """The row that says that the samples are those of the run."""
        for rows in self._log.chunks():
            self._replay(rows)
        if self._mark is None and not self.rows:
            self._adopt()

    def _replay(self, rows: np.ndarray[Any, Any]) -> None:
        tags, packed = self._log.tags(rows), self._log.take(rows)
        self._done.update(tags.get("put", ()))
        if "sample" in tags:
            turned = frozenset(name.removeprefix(_TURNED) for name in tags if name.startswith(_TURNED))
            chunk = Chunk(packed.own(), turned, "shares" in tags)
            self._note(rows, tags["sample"], tags["life"], chunk.fields)
            super().put(tags["sample"], chunk)
        elif "large" in tags:
            stored = assembled([Piece(Chunk(packed), range(len(packed)))], ["large"], len(packed))["large"]
            for row, digest, own in zip(rows.tolist(), map(bytes.fromhex, tags["large"]), stored.unbind(), strict=True):
                super().hold(Counter({digest: 0}))
                super().store({digest: pickle.loads(own.numpy().tobytes())})
                self._large[digest] = row
        elif "held" in tags:
            for row, digest, holds in zip(rows.tolist(), map(bytes.fromhex, tags["held"]), tags["holds"], strict=True):
                super().hold(Counter({digest: holds - self._holds(digest)}))
                self._dead += [self._held[digest]] if digest in self._held else []
                self._held[digest] = row
        elif tags["run"][-1] == self._run:
            self._mark = int(rows[-1])
        else:
            self._dead += rows.tolist()

    # ---------------------------------------------------------------- samples

    def put(self, samples: Sequence[int], chunk: Chunk) -> Counter[bytes]:
        """As `Samples.put`, once the rows are in the log. A put that is repeated, because its answer was lost, changes
        nothing. Raises StorageError for a log that cannot be written to, or that has samples of another run."""
        self._require("put")
        if self._number in self._done:
            return Counter()
        freed = self._keep(samples, chunk, [self._lives.get(sample, self._number) for sample in samples])
        if len(self._dead) >= _LEAST:
            with contextlib.suppress(StorageError):  # they are hidden
                self._delete([])
        return freed

    def _keep(self, samples: Sequence[int], chunk: Chunk, lives: Sequence[int]) -> Counter[bytes]:
        tags: dict[str, Any] = {_TURNED + name: True for name in sorted(chunk.turned)}
        tags |= {"shares": True} if chunk.shares else {}
        tags |= {"sample": list(samples), "life": lives[0] if len(set(lives)) == 1 else list(lives)}
        rows = self._append(chunk.packed, tags)
        self._note(rows, samples, lives, chunk.fields)
        return super().put(samples, chunk)

    def _note(self, rows: Iterable[int], samples: Sequence[int], lives: Sequence[int], fields: frozenset[str]) -> None:
        for row, sample, life in zip(rows, samples, lives, strict=True):
            lying = self._index.get(sample, [])
            self._dead += [old for old, known in lying if known <= fields]
            self._index[sample] = [place for place in lying if not place[1] <= fields] + [(int(row), fields)]
            self._lives[sample] = life

    def clear(self, samples: Iterable[int]) -> Counter[bytes]:
        """As `Samples.clear`, once the log has forgotten them. Raises StorageError as `put`."""
        self._require("clear")
        return self._forget(list(samples))

    def _forget(self, samples: Sequence[int], also: Iterable[int] = ()) -> Counter[bytes]:
        self._delete([*also, *(row for sample in samples for row, _ in self._index.get(sample, ()))])
        for sample in samples:
            self._index.pop(sample, None)
            self._lives.pop(sample, None)
        return super().clear(samples)

    # ---------------------------------------------------------------- the log

    @property
    def _number(self) -> int:
        """The number of the request."""
        return int.from_bytes(self.request[:8], "little") >> 1

    def _append(self, packed: PackedBatch, tags: Mapping[str, Any]) -> range:
        return self._log.append(packed, {**tags, "put": self._number})

    def _delete(self, rows: Sequence[int]) -> None:
        """Deletes rows and those that are hidden; where more were deleted than there are, the log becomes smaller."""
        if rows or self._dead:
            self._deleted += self._log.delete([*rows, *self._dead])
            self._dead.clear()
        if self._deleted >= max(_LEAST, len(self._index)) and self._log.segments > 1:
            try:
                freed = self._log.compact(segments=1)  # the next ones with the next requests
            except StorageError as error:
                _log.warning("%s", error)
                freed = 0
            self._deleted = self._deleted if freed else 0

    def _adopt(self) -> None:
        """Says that the samples are those of the run."""
        (self._mark,) = self._append(_rows(1), {"run": self._run})

    def _require(self, call: str) -> None:
        if self._mark is None:
            raise StorageError(
                f"{call}: {self._log.path} has {len(self.rows)} samples of an earlier run; expected an empty log, or "
                "those of a checkpoint. Call transfer_queue.load_checkpoint first, or name another folder in "
                "backend.Maskpack.log."
            )

    # ---------------------------------------------------------------- large tensors

    def _holds(self, digest: bytes) -> int:
        return self.large[digest].holds if digest in self.large else 0

    def hold(self, wanted: Counter[bytes]) -> list[bytes]:
        """As `Samples.hold`, once the log has the counts. Raises StorageError as `put`."""
        self._require("hold")
        if self._number in self._done:
            wanted = Counter(dict.fromkeys(wanted, 0))
        self._count({digest: self._holds(digest) + count for digest, count in wanted.items()})
        return super().hold(wanted)

    def _count(self, holds: Mapping[bytes, int]) -> None:
        if holds:
            tags = {"held": [digest.hex() for digest in holds], "holds": list(holds.values())}
            rows = self._append(_rows(len(holds)), tags)
            self._dead += [self._held[digest] for digest in holds if digest in self._held]
            self._held |= dict(zip(holds, rows, strict=True))

    def store(self, given: dict[bytes, Large]) -> None:
        """As `Samples.store`, once the log has the bits."""
        for digest, stored in given.items():
            if digest in self.large and digest not in self._large:
                bits = torch.frombuffer(bytearray(pickle.dumps(stored, 5)), dtype=torch.uint8)
                packed = _rows(1, large=Values(bits, np.array([bits.numel()], np.int64)))
                (self._large[digest],) = self._append(packed, {"large": digest.hex()})
        super().store(given)

    def release(self, given: Counter[bytes]) -> None:
        """As `Samples.release`, once the log has the counts."""
        left = {digest: self._holds(digest) - count for digest, count in given.items() if digest in self.large}
        self._count({digest: count for digest, count in left.items() if count > 0})
        gone = [digest for digest, count in left.items() if count <= 0]
        self._delete([rows[digest] for digest in gone for rows in (self._held, self._large) if digest in rows])
        for digest in gone:
            self._held.pop(digest, None)
            self._large.pop(digest, None)
        super().release(given)

    def holds(self) -> Counter[bytes]:
        """The holds of the chunks that are here."""
        return sum((held.holds for held in self.chunks.values()), Counter[bytes]())

    def recount(self, holds: Counter[bytes]) -> None:
        """Corrects the holds of the large tensors that are here."""
        wrong = {digest: kept.holds - holds[digest] for digest, kept in self.large.items()}
        self.release(Counter({digest: count for digest, count in wrong.items() if count or not holds[digest]}))

    # ---------------------------------------------------------------- sizes and checkpoints

    def figures(self) -> dict[str, int]:
        """As `Samples.figures`, with the bytes of the log."""
        return super().figures() | {"log_bytes": self._log.nbytes}

    def _state(self) -> tuple[Any, ...]:
        return *super()._state(), self._lives

    def save(self, path: str) -> str:
        """As `Samples.save`; the log is not older than the file."""
        self._log.sync()
        return super().save(path)

    def switch(self, loaded: bool) -> None:
        """Replaces samples by those that were loaded, here and in the log. Where the samples are those of an earlier
        run, the ones that are still the same samples stay as they are, with what was put since."""
        found, self._loaded = self._loaded, None
        if not loaded:
            return
        chunks, rows, large, _, *more = found
        lives: dict[int, int] = more[0] if more else {}
        same = {sample for sample, life in self._lives.items() if self._mark is None and lives.get(sample) == life}
        mark, self._mark = self._mark, None
        self._forget([sample for sample in self.rows if sample not in same], [] if mark is None else [mark])
        layers: dict[tuple[int, int], list[int]] = {}
        for sample in rows.keys() - same:
            for depth, (number, row) in enumerate(reversed(rows[sample])):  # the oldest first
                layers.setdefault((depth, number), []).append(row)
        for (depth, number), own in sorted(layers.items()):
            samples = [chunks[number].samples[row] for row in sorted(own)]
            whole = [depth + 1 == len(rows[sample]) for sample in samples]  # else, after a kill, not the same
            known = [lives.get(sample, self._number) for sample in samples]
            own_lives = [life if last else 0 for life, last in zip(known, whole, strict=True)]
            self._keep(samples, chunks[number].chunk.take(sorted(own)).own(), own_lives)
        for digest, kept in large.items():
            super().hold(Counter({digest: kept.holds}))
            self._count({digest: self._holds(digest)})
            if kept.stored is not None:
                self.store({digest: kept.stored})
        self._adopt()


def _rows(count: int, **fields: Values) -> PackedBatch:
    return packed_rows(fields, count, {}, "RolloutLog.append")
