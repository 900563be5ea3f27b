"""The samples of one storage unit: chunks, and where each sample lies in them.

    put: a chunk and the samples that its rows are -> the log, if there is one -> the newest rows of these samples
    get: fields of samples -> pieces of the chunks that have them, the newest first
    clear: samples -> their rows; a chunk that is mostly dead is rewritten without them

A field that is put again lies in a newer chunk, and hides the older one. Small chunks of one kind, as agent loops write
them, are joined once there are SMALL of them. A chunk lives as long as a sample has a row of it.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from secrets import randbits
from typing import Any, BinaryIO, cast
from weakref import WeakValueDictionary

import numpy as np

from maskpack.adapters.transferqueue.chunk import Piece, by_kind, kind_of
from maskpack.adapters.transferqueue.durable import SampleLog
from maskpack.adapters.transferqueue.large import Large, joined, parted
from maskpack.adapters.transferqueue.library import StorageKeyNotFoundError
from maskpack.core.index import IntArray
from maskpack.packed.batch import PackedBatch

SMALL = 32
"""Rows below which a chunk is joined with others of its kind; and how many of these wait for each other at most."""
_ALONE = 8
"""Rows that follow each other in a chunk from which on a get sends them as they lie; fewer are sent with others."""


@dataclass(eq=False)
class Chunk:
    """A chunk in the unit.

    Attributes:
        packed: its rows.
        samples: the sample of each row that is still reached from it.
        logged: the number of each row in the log; nothing without one.
        fields: the names of its fields.
        kind: what chunks that are joined have in common.
    """

    packed: PackedBatch
    samples: dict[int, int]
    logged: Sequence[int]
    fields: frozenset[str]
    kind: Any


Place = tuple[Chunk, int]
"""A chunk, and a row of it."""


class Samples:
    """What a storage unit holds.

    Args:
        log: where the samples are kept, too: those that are in it are read first.

    Attributes:
        rows: for each sample, where its fields are, the newest first.
        lives: for each sample, a number that no other sample of its index has had.
        large: large tensors in Python objects, by digest.
    """

    def __init__(self, log: SampleLog | None = None) -> None:
        self.rows: dict[int, list[Place]] = {}
        self.lives: dict[int, int] = {}
        self.large: WeakValueDictionary[bytes, Large] = WeakValueDictionary()
        self.log = log
        self._small: dict[Any, dict[Chunk, None]] = {}
        """Chunks of each kind that are to be joined."""
        self._loaded: Any = None
        for packed, *more in () if log is None else log.opened():
            self._put(packed, *more)

    # ---------------------------------------------------------------- samples

    def put(self, samples: Sequence[int], packed: PackedBatch) -> set[bytes]:
        """Adds rows of samples. Returns the digests of large tensors that the rows refer to, and that are neither here
        nor in the rows: if there are some, nothing was added.

        Raises StorageError for a log that cannot be written to, or that has samples of another run.
        """
        if self.log is not None:
            self.log.require("put")
        life = randbits(60)
        return self._put(packed, samples, [self.lives.get(sample, life) for sample in samples])

    def get(self, samples: Sequence[int], fields: Iterable[str]) -> list[Piece]:
        """The fields of samples, as pieces whose places are those in `samples`. Raises StorageKeyNotFoundError
        for a sample that is not here or lacks a field."""
        wanted = frozenset(fields)
        taken: dict[tuple[Chunk, frozenset[str]], list[tuple[int, int]]] = {}
        for place, sample in enumerate(samples):
            if sample not in self.rows:
                raise StorageKeyNotFoundError(f"sample {sample} is not stored; it was cleared, or never put")
            lying = self.rows[sample]
            layers = tuple([chunk.fields for chunk, _ in lying])
            cover, missing = _cover(layers, wanted)
            if missing:
                seen = sorted(frozenset[str]().union(*layers))
                raise StorageKeyNotFoundError(
                    f"sample {sample} has no {sorted(missing)}, but {seen}. Put them, or select others"
                )
            for at, own in cover:
                chunk, row = lying[at]
                taken.setdefault((chunk, own), []).append((row, place))
        whole, scattered = list[Piece](), list[Piece]()
        for (chunk, own), pairs in taken.items():
            index: IntArray = np.array(sorted(pairs), np.int64)
            rows, places = index[:, 0], index[:, 1]
            packed = chunk.packed if own == chunk.fields else chunk.packed.select(*own)
            is_run = rows.size >= _ALONE and bool((np.diff(rows) == 1).all())  # not encoded again
            (whole if is_run else scattered).append(Piece(packed.take(rows), places))
        return whole + by_kind(scattered)

    def clear(self, samples: Iterable[int]) -> None:
        """Forgets samples, known or not. Raises StorageError as `put`."""
        if self.log is not None:
            self.log.require("clear")
        self._forget(set(samples))

    # ---------------------------------------------------------------- chunks

    def _put(
        self, packed: PackedBatch, samples: Sequence[int], lives: Sequence[int], logged: Sequence[int] | None = None
    ) -> set[bytes]:
        """Adds rows of samples as `put`, in the log first, where they are not in it."""
        packed, missing = joined(packed, self.large)
        if missing:
            return missing
        if logged is None:
            logged = () if self.log is None else self.log.add(packed, samples, lives)
        chunk, hidden = self._chunk(packed, samples, logged), list[Place]()
        for row, (sample, life) in enumerate(zip(samples, lives, strict=True)):
            kept = [(chunk, row)]
            for place in self.rows.get(sample, ()):
                (hidden if place[0].fields <= chunk.fields else kept).append(place)
            self.rows[sample], self.lives[sample] = kept, life
        if self.log is not None:
            self.log.hide([own.logged[row] for own, row in hidden])
        self._drop(hidden)
        waiting = self._small.get(chunk.kind, {})
        if len(waiting) >= SMALL:
            self._rewrite([*waiting])
        return missing

    def _chunk(self, packed: PackedBatch, samples: Sequence[int], logged: Sequence[int]) -> Chunk:
        """A new chunk, which is to be joined if it is small."""
        fields = frozenset([form.path[0] for form in packed.schema.forms])
        chunk = Chunk(packed, dict(enumerate(samples)), logged, fields, kind_of(packed))
        if len(packed) < SMALL:
            self._small.setdefault(chunk.kind, {})[chunk] = None
        return chunk

    def _forget(self, samples: Iterable[int], also: Iterable[int] = ()) -> None:
        """Forgets samples, and other rows of the log."""
        places = [place for sample in samples for place in self.rows.get(sample, ())]
        if self.log is not None:
            self.log.remove([*also, *(chunk.logged[row] for chunk, row in places)])
        for sample in samples:
            self.rows.pop(sample, None)
            self.lives.pop(sample, None)
        self._drop(places)

    def _drop(self, places: Iterable[Place]) -> None:
        """Takes rows off their chunks."""
        for chunk, row in places:
            del chunk.samples[row]
        for chunk in dict.fromkeys(chunk for chunk, _ in places):
            if 2 * len(chunk.samples) < len(chunk.packed):
                self._rewrite([chunk])

    def _rewrite(self, chunks: Sequence[Chunk]) -> None:
        """Writes the rows of chunks of one kind that are left as one chunk."""
        waiting = self._small.get(chunks[0].kind, {})
        for chunk in chunks:
            waiting.pop(chunk, None)
        if not waiting:
            self._small.pop(chunks[0].kind, None)
        places = [(chunk, row) for chunk in chunks for row in chunk.samples]
        if not places:
            return
        left = [
            own.packed if len(own.samples) == len(own.packed) else own.packed.take([*own.samples]) for own in chunks
        ]
        packed = PackedBatch.cat(left).own()
        samples = [chunk.samples[row] for chunk, row in places]
        new = self._chunk(packed, samples, [chunk.logged[row] for chunk, row in places if chunk.logged])
        for row, (sample, place) in enumerate(zip(samples, places, strict=True)):
            lying = self.rows[sample]
            lying[lying.index(place)] = new, row

    # ---------------------------------------------------------------- sizes and checkpoints

    def figures(self) -> dict[str, int]:
        """Samples, chunks, and the bytes of chunks, of large tensors and of the log."""
        gc.collect()  # what nothing holds is not counted
        chunks = {chunk for lying in self.rows.values() for chunk, _ in lying}
        large = [*self.large.values()]
        return {
            "samples": len(self.rows),
            "chunks": len(chunks),
            "chunk_bytes": sum(len(pickle.dumps(parted(chunk.packed)[0], 5)) for chunk in chunks),
            "large_tensors": len(large),
            "large_bytes": sum(array.nbytes for one in large for array in (one.words, *one.distinct)),
            "log_bytes": 0 if self.log is None else self.log.nbytes,
        }

    def save(self, path: str) -> str:
        """Writes all of it to a file; returns `digest_of` the file. A log is not older than the file."""
        if self.log is not None:
            self.log.sync()
        with open(path, "wb+") as file:
            pickle.dump((self.rows, self.lives), file, protocol=5)
            return digest_of(file)

    def load(self, path: str, digest: str) -> None:
        """Reads what `save` wrote, beside what is here; raises ValueError for other bytes than that."""
        with open(path, "rb") as file:
            check_digest(file, digest)
            self._loaded = pickle.load(file)

    def switch(self, loaded: bool) -> None:
        """Replaces samples by those that were loaded, here and in the log, or forgets what was loaded. Where the
        samples are those of an earlier run, the ones that are still the same samples stay as they are, with what was
        put since."""
        found, self._loaded = self._loaded, None
        if not loaded:
            return
        rows, lives = cast("tuple[dict[int, list[Place]], dict[int, int]]", found)
        same, mark = set[int](), list[int]()
        if self.log is not None:
            mark = self.log.mark
            same = {sample for sample, life in self.lives.items() if not mark and lives.get(sample) == life}
        self._forget(self.rows.keys() - same, mark)
        if self.log is not None:
            self.log.mark = []
        layers: dict[tuple[int, Chunk], list[int]] = {}
        for sample in rows.keys() - same:
            for depth, (chunk, row) in enumerate(reversed(rows[sample])):  # the oldest first
                layers.setdefault((depth, chunk), []).append(row)
        for (depth, chunk), own in sorted(layers.items(), key=lambda layer: layer[0][0]):
            samples = [chunk.samples[row] for row in own]
            # after a kill, a sample that is not whole is not the same
            own_lives = [lives[sample] if depth + 1 == len(rows[sample]) else 0 for sample in samples]
            self._put(chunk.packed.take(own).own(), samples, own_lives)
        if self.log is not None:
            self.log.adopt()


@lru_cache(256)
def _cover(
    layers: tuple[frozenset[str], ...], fields: frozenset[str]
) -> tuple[list[tuple[int, frozenset[str]]], frozenset[str]]:
    """Which of the chunks of a sample, the newest first, gives which of the fields; and the fields that none has."""
    cover: list[tuple[int, frozenset[str]]] = []
    for at, own in enumerate(layers):
        if fields & own:
            cover.append((at, fields & own))
            fields -= own
    return cover, fields


def digest_of(file: BinaryIO) -> str:
    """BLAKE2b of a file, from its beginning."""
    digest = hashlib.blake2b(digest_size=32)
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def check_digest(file: BinaryIO, digest: str) -> None:
    """Raises ValueError for a file with another digest; then it is at its beginning."""
    seen = digest_of(file)
    if seen != digest:
        raise ValueError(
            f"load_checkpoint: {file.name} has the BLAKE2b {seen}; expected {digest}. It is damaged, or from another "
            "checkpoint. Load a folder as save_checkpoint wrote it."
        )
    file.seek(0)
