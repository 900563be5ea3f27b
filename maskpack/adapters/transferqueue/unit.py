"""The samples of one storage unit: chunks, and where each sample lies in them.

    put: a chunk and the samples that its rows are -> the log, if there is one -> the newest rows of these samples
    get: fields of samples -> pieces of the chunks that have them, the newest first
    clear: samples -> their rows; a chunk that is mostly dead is rewritten without them

A field that is put again lies in a newer chunk, and hides the older one. Small chunks of one kind, as agent loops write
them, are joined once there are SMALL of them. A chunk lives as long as a sample has a row of it.
"""

from __future__ import annotations

import copyreg
import gc
import hashlib
import io
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from secrets import randbits
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from maskpack.adapters.transferqueue.chunk import Piece, fields_of, kind_of
from maskpack.adapters.transferqueue.durable import SampleLog
from maskpack.adapters.transferqueue.large import Large, Reference, joined
from maskpack.packed.batch import PackedBatch

SMALL = 32
"""Rows below which a chunk is joined with others of its kind; and how many of these wait for each other at most."""
_ALONE = 8
"""Rows that follow each other in a chunk from which on a get sends them as they lie; fewer are sent with others."""


class NoSampleError(KeyError):
    """A sample is not in the storage unit, or has not all of the fields."""


@dataclass(eq=False)
class Chunk:
    """A chunk in the unit.

    Attributes:
        packed: its rows.
        samples: the sample of each row that is still reached from it.
        logged: the number of each row in the log; nothing without one.
    """

    packed: PackedBatch
    samples: dict[int, int]
    logged: Sequence[int]

    @cached_property
    def fields(self) -> frozenset[str]:
        return fields_of(self.packed.schema)

    @cached_property
    def kind(self) -> Any:
        return kind_of(self.packed)

    def rows_left(self) -> PackedBatch:
        """The rows that are reached."""
        return self.packed if len(self.samples) == len(self.packed) else self.packed.take([*self.samples])


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
        self._small: defaultdict[Any, dict[Chunk, None]] = defaultdict(dict[Chunk, None])
        """Chunks of each kind that are to be joined."""
        self._loaded: Any = None
        for packed, *more in () if log is None else log.opened():
            self._put(joined(packed, self.large)[0], *more)

    # ---------------------------------------------------------------- samples

    def put(self, samples: Sequence[int], packed: PackedBatch, large: dict[bytes, Large] | None = None) -> set[bytes]:
        """Adds rows of samples. Returns the digests of large tensors that the rows refer to, and that are neither here
        nor in `large`: if there are some, nothing was added. `large` is None for rows without any.

        Raises StorageError for a log that cannot be written to, or that has samples of another run.
        """
        if self.log is not None:
            self.log.require("put")
        if large is not None:
            self.large.update({digest: one for digest, one in large.items() if digest not in self.large})
            packed, missing = joined(packed, self.large)
            if missing:
                return missing
        life = randbits(60)
        self._put(packed, samples, [self.lives.get(sample, life) for sample in samples])
        return set()

    def get(self, samples: Sequence[int], fields: Iterable[str]) -> list[Piece]:
        """The fields of samples, as pieces whose places are those in `samples`. Raises NoSampleError for a sample that
        is not here or lacks a field."""
        wanted = frozenset(fields)
        taken: dict[tuple[Chunk, frozenset[str]], list[tuple[int, int]]] = {}
        for place, sample in enumerate(samples):
            if sample not in self.rows:
                raise NoSampleError(f"sample {sample} is not stored; it was cleared, or never put")
            lying = self.rows[sample]
            layers = tuple([chunk.fields for chunk, _ in lying])
            cover, missing = _cover(layers, wanted)
            if missing:
                seen = sorted(frozenset[str]().union(*layers))
                raise NoSampleError(f"sample {sample} has no {sorted(missing)}, but {seen}. Put them, or select others")
            for at, own in cover:
                chunk, row = lying[at]
                taken.setdefault((chunk, own), []).append((row, place))
        pieces: list[Piece] = []
        scattered: defaultdict[Any, list[Piece]] = defaultdict(list[Piece])
        for (chunk, own), pairs in taken.items():
            rows, places = map(list, zip(*sorted(pairs), strict=True))
            packed = chunk.packed if own == chunk.fields else chunk.packed.select(*own)
            if len(rows) >= _ALONE and rows == [*range(rows[0], rows[0] + len(rows))]:
                pieces.append(Piece(packed.take(slice(rows[0], rows[0] + len(rows))), places))  # not encoded again
            else:
                scattered[kind_of(packed)].append(Piece(packed.take(rows), places))
        for parts in scattered.values():
            packed = PackedBatch.cat([part.chunk for part in parts])
            pieces.append(Piece(packed, [place for part in parts for place in part.places]))
        return pieces

    def clear(self, samples: Iterable[int]) -> None:
        """Forgets samples, known or not. Raises StorageError as `put`."""
        if self.log is not None:
            self.log.require("clear")
        self._forget(set(samples))

    # ---------------------------------------------------------------- chunks

    def _put(
        self, packed: PackedBatch, samples: Sequence[int], lives: Sequence[int], logged: Sequence[int] | None = None
    ) -> None:
        """Adds rows of samples, in the log first, where they are not in it."""
        if logged is None:
            logged = () if self.log is None else self.log.append(packed, samples, lives)
        chunk, hidden = Chunk(packed, dict(enumerate(samples)), logged), list[Place]()
        for row, (sample, life) in enumerate(zip(samples, lives, strict=True)):
            kept = [(chunk, row)]
            for place in self.rows.get(sample, ()):
                (hidden if place[0].fields <= chunk.fields else kept).append(place)
            self.rows[sample], self.lives[sample] = kept, life
        if self.log is not None:
            self.log.hide([own.logged[row] for own, row in hidden])
        self._wait(chunk)
        self._drop(hidden)
        if len(self._small[chunk.kind]) >= SMALL:
            self._rewrite([*self._small[chunk.kind]])

    def _forget(self, samples: Iterable[int], also: Iterable[int] = ()) -> None:
        """Forgets samples, and other rows of the log."""
        places = [place for sample in samples for place in self.rows.get(sample, ())]
        if self.log is not None:
            self.log.delete([*also, *(chunk.logged[row] for chunk, row in places)])
        for sample in samples:
            self.rows.pop(sample, None)
            self.lives.pop(sample, None)
        self._drop(places)

    def _wait(self, chunk: Chunk) -> None:
        if len(chunk.packed) < SMALL:
            self._small[chunk.kind][chunk] = None

    def _drop(self, places: Iterable[Place]) -> None:
        """Takes rows off their chunks."""
        for chunk, row in places:
            del chunk.samples[row]
        for chunk in dict.fromkeys(chunk for chunk, _ in places):
            if 2 * len(chunk.samples) < len(chunk.packed):
                self._rewrite([chunk])

    def _rewrite(self, chunks: Sequence[Chunk]) -> None:
        """Writes the rows of chunks of one kind that are left as one chunk."""
        for chunk in chunks:
            self._small[chunk.kind].pop(chunk, None)
        places = [(chunk, row) for chunk in chunks for row in chunk.samples]
        if not places:
            return
        packed = PackedBatch.cat([chunk.rows_left() for chunk in chunks]).own()
        samples = [chunk.samples[row] for chunk, row in places]
        new = Chunk(packed, dict(enumerate(samples)), [chunk.logged[row] for chunk, row in places if chunk.logged])
        for row, (sample, place) in enumerate(zip(samples, places, strict=True)):
            lying = self.rows[sample]
            lying[lying.index(place)] = new, row
        self._wait(new)

    # ---------------------------------------------------------------- sizes and checkpoints

    def figures(self) -> dict[str, int]:
        """Samples, chunks, and the bytes of chunks, of large tensors and of the log."""
        gc.collect()  # what nothing holds is not counted
        chunks = {chunk for lying in self.rows.values() for chunk, _ in lying}
        large = [*self.large.values()]
        return {
            "samples": len(self.rows),
            "chunks": len(chunks),
            "chunk_bytes": sum(_nbytes(chunk.packed) for chunk in chunks),
            "large_tensors": len(large),
            "large_bytes": sum(one.nbytes for one in large),
            "log_bytes": 0 if self.log is None else self.log.nbytes,
        }

    def save(self, path: str) -> str:
        """Writes all of it to a file, which appears once it is whole; returns `digest_of` the file. A log is not older
        than the file."""
        if self.log is not None:
            self.log.sync()
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        with open(partial, "wb+") as file:
            pickle.dump((self.rows, self.lives), file, protocol=5)
            digest = digest_of(file)
        partial.replace(target)
        return digest

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
        rows: dict[int, list[Place]] = found[0]
        lives: dict[int, int] = found[1]
        same, mark = set[int](), list[int]()
        if self.log is not None:
            mark, self.log.mark = self.log.mark, []
            same = {sample for sample, life in self.lives.items() if not mark and lives.get(sample) == life}
        self._forget(self.rows.keys() - same, mark)
        layers: dict[tuple[int, Chunk], list[int]] = {}
        for sample in rows.keys() - same:
            for depth, (chunk, row) in enumerate(reversed(rows[sample])):  # the oldest first
                layers.setdefault((depth, chunk), []).append(row)
        for (depth, chunk), own in sorted(layers.items(), key=lambda layer: layer[0][0]):
            samples = [chunk.samples[row] for row in own]
            # after a kill, a sample that is not whole is not the same
            own_lives = [lives[sample] if depth + 1 == len(rows[sample]) else 0 for sample in samples]
            self._put(joined(chunk.packed.take(own).own(), self.large)[0], samples, own_lives)
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


def _reference(large: Large) -> tuple[Any, ...]:
    return Reference, (large.digest,)


def _nbytes(packed: PackedBatch) -> int:
    """Bytes of the pickle of a chunk without its large tensors."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = copyreg.dispatch_table | {Large: _reference}
    pickler.dump(packed)
    return file.tell()


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
