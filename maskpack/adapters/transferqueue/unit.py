"""The samples of one storage unit: chunks, and where each sample lies in them.

    put: a chunk and the samples that its rows are -> the newest rows of these samples
    get: fields of samples -> pieces of the chunks that have them, the newest first
    clear: samples -> their rows; a chunk that is mostly dead is rewritten without them

A field that is put again lies in a newer chunk, and hides the older one. Small chunks of one kind, as agent loops write
them, are joined once there are SMALL of them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from maskpack.adapters.transferqueue.chunk import Chunk, Piece, digests
from maskpack.adapters.transferqueue.large import Large
from maskpack.errors import FieldError

SMALL = 32
"""Rows below which a chunk is joined with others of its kind; and how many of these wait for each other at most."""
_ALONE = 8
"""Rows that follow each other in a chunk from which on a get sends them as they lie; fewer are sent with others."""


class NoSampleError(KeyError):
    """A sample is not in the storage unit, or has not all of the fields."""


@dataclass(eq=False)
class _Held:
    """A chunk in the unit.

    Attributes:
        chunk: the rows.
        samples: the sample of each row.
        live: the rows that are still reached from their samples.
        holds: how often each large tensor was announced for the chunk.
    """

    chunk: Chunk
    samples: list[int]
    live: int
    holds: Counter[bytes]


@dataclass(eq=False)
class _LargeHolds:
    """A large tensor that chunks of any unit refer to: for how many puts, and what it is, once a writer brought it."""

    holds: int = 0
    stored: Large | None = None


@dataclass(eq=False)
class Samples:
    """What a storage unit holds.

    Attributes:
        chunks: by number.
        rows: for each sample, the chunks that hold it, the newest first: (number, row).
        large: large tensors by digest.
        request: the nonce of the request that is served; a request that is repeated has the same.
    """

    chunks: dict[int, _Held] = field(default_factory=dict[int, _Held])
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    large: dict[bytes, _LargeHolds] = field(default_factory=dict[bytes, _LargeHolds])
    request: bytes = b""
    _waiting: dict[Any, dict[int, None]] = field(default_factory=dict[Any, dict[int, None]])
    """Small chunks of each kind that are to be joined."""
    _next: int = 0
    _loaded: Any = None

    # ---------------------------------------------------------------- samples

    def put(self, samples: Sequence[int], chunk: Chunk) -> Counter[bytes]:
        """Adds rows of samples; returns the large tensors that are no longer needed, with the holds to give back."""
        number = self._add(chunk, list(samples), Counter(digests(chunk)))
        hidden: Counter[int] = Counter()
        for row, sample in enumerate(samples):
            kept = [(number, row)]
            for place in self.rows.get(sample, ()):
                if self.chunks[place[0]].chunk.fields <= chunk.fields:
                    hidden[place[0]] += 1
                else:
                    kept.append(place)
            self.rows[sample] = kept
        freed = self._dropped(hidden)
        if len(self._waiting.get(chunk.kind, ())) >= SMALL:
            self._join(chunk.kind)
        return freed

    def get(self, samples: Sequence[int], fields: Sequence[str]) -> list[Piece]:
        """The fields of samples, as pieces whose places are those in `samples`.

        Raises NoSampleError for a sample that is not here or lacks a field, and FieldError for a field that no sample
        here has.
        """
        found = self._places(samples, fields)
        pieces: list[Piece] = []
        scattered: dict[Any, list[tuple[Chunk, list[int], list[int]]]] = {}
        for (number, wanted), (rows, places) in found.items():
            chunk = self.chunks[number].chunk.select(wanted)
            order = sorted(range(len(rows)), key=rows.__getitem__)
            lying, where = [rows[at] for at in order], [places[at] for at in order]
            in_turn = lying == list(range(lying[0], lying[0] + len(lying)))  # they need not be encoded again
            if not chunk.joins or (in_turn and len(lying) >= _ALONE):
                pieces.append(Piece(chunk if len(lying) == len(chunk) and in_turn else chunk.take(lying), where))
            else:
                scattered.setdefault(chunk.kind, []).append((chunk, lying, where))
        for parts in scattered.values():
            joined = Chunk.cat([(chunk, lying) for chunk, lying, _ in parts])
            pieces.append(Piece(joined, [place for _, _, where in parts for place in where]))
        return pieces

    def clear(self, samples: Iterable[int]) -> Counter[bytes]:
        """Forgets samples, known or not; returns as `put`."""
        dead: Counter[int] = Counter()
        for sample in samples:
            dead.update(number for number, _ in self.rows.pop(sample, ()))
        return self._dropped(dead)

    def _places(
        self, samples: Sequence[int], fields: Sequence[str]
    ) -> dict[tuple[int, frozenset[str]], tuple[list[int], list[int]]]:
        """The rows to take of each chunk, with the fields to take, and their places in `samples`."""
        out: dict[tuple[int, frozenset[str]], tuple[list[int], list[int]]] = {}
        known: dict[tuple[int, ...], list[tuple[int, frozenset[str]]]] = {}
        for place, sample in enumerate(samples):
            lying = self.rows.get(sample)
            if lying is None:
                raise NoSampleError(f"sample {sample} is not stored; it was cleared, or never put")
            numbers = tuple(number for number, _ in lying)
            if numbers not in known:
                known[numbers] = self._cover(sample, numbers, fields)
            for at, wanted in known[numbers]:
                rows, places = out.setdefault((numbers[at], wanted), ([], []))
                rows.append(lying[at][1])
                places.append(place)
        return out

    def _cover(self, sample: int, numbers: Sequence[int], fields: Sequence[str]) -> list[tuple[int, frozenset[str]]]:
        """Which of the chunks of a sample, the newest first, gives which of the fields."""
        left, cover = set(fields), list[tuple[int, frozenset[str]]]()
        for at, number in enumerate(numbers):
            wanted = left & self.chunks[number].chunk.fields
            if wanted:
                cover.append((at, frozenset(wanted)))
                left -= wanted
        if not left:
            return cover
        everywhere = frozenset[str]().union(*(held.chunk.fields for held in self.chunks.values()))
        if left - everywhere:
            raise FieldError(
                f"get: no sample here has the fields {sorted(left - everywhere)}; expected some of "
                f"{sorted(everywhere)}. Put them first, or select others."
            )
        raise NoSampleError(f"sample {sample} has no {sorted(left)}, which other samples have; put them first")

    # ---------------------------------------------------------------- chunks

    def _add(self, chunk: Chunk, samples: list[int], holds: Counter[bytes]) -> int:
        self._next += 1
        self.chunks[self._next] = _Held(chunk, samples, len(samples), holds)
        self._wait(self._next)
        return self._next

    def _pop(self, number: int) -> _Held:
        held = self.chunks.pop(number)
        alike = self._waiting.get(held.chunk.kind, {})
        alike.pop(number, None)
        if not alike:
            self._waiting.pop(held.chunk.kind, None)
        return held

    def _wait(self, number: int) -> None:
        chunk = self.chunks[number].chunk
        if len(chunk) < SMALL and chunk.joins:
            self._waiting.setdefault(chunk.kind, {})[number] = None

    def _dropped(self, dead: Counter[int]) -> Counter[bytes]:
        """Takes rows off chunks, and frees those without rows; returns the holds to give back."""
        freed: Counter[bytes] = Counter()
        for number, count in dead.items():
            held = self.chunks[number]
            held.live -= count
            if held.live == 0:
                freed += self._pop(number).holds
            elif 2 * held.live < len(held.chunk):
                freed += self._compacted(number, held)
        return freed

    def _compacted(self, number: int, held: _Held) -> Counter[bytes]:
        """Rewrites a chunk without its dead rows; returns the holds to give back."""
        rows = [row for row, sample in enumerate(held.samples) if (number, row) in self.rows.get(sample, ())]
        held.chunk, held.samples = held.chunk.take(rows).own(), [held.samples[row] for row in rows]
        self._moved(number, held.samples, {(number, row): new for new, row in enumerate(rows)})
        self._wait(number)
        needed = digests(held.chunk)
        freed = Counter({digest: count for digest, count in held.holds.items() if digest not in needed})
        held.holds -= freed
        return freed

    def _join(self, kind: Any) -> None:
        """Joins the small chunks of a kind."""
        numbers = list(self._waiting[kind])
        parts = [self.chunks[number] for number in numbers]
        chunk = Chunk.cat([(part.chunk, None) for part in parts]).own()
        for number in numbers:
            self._pop(number)
        samples = [sample for part in parts for sample in part.samples]
        joined = self._add(chunk, samples, sum((part.holds for part in parts), Counter[bytes]()))
        self.chunks[joined].live = sum(part.live for part in parts)
        rows = [range(len(part.chunk)) for part in parts]
        places = ((number, row) for number, own in zip(numbers, rows, strict=True) for row in own)
        self._moved(joined, samples, {place: new for new, place in enumerate(places)})

    def _moved(self, number: int, samples: Iterable[int], moved: dict[tuple[int, int], int]) -> None:
        """Writes down the new rows of samples, in the chunk `number`, by their old places."""
        for sample in set(samples):
            lying = self.rows.get(sample, [])
            lying[:] = [(number, moved[place]) if place in moved else place for place in lying]

    # ---------------------------------------------------------------- large tensors

    def hold(self, wanted: Counter[bytes]) -> list[bytes]:
        """Announces puts that refer to large tensors; returns those whose bits are not here yet."""
        for digest, count in wanted.items():
            self.large.setdefault(digest, _LargeHolds()).holds += count
        return [digest for digest in wanted if self.large[digest].stored is None]

    def store(self, given: dict[bytes, Large]) -> None:
        """Keeps the bits of large tensors that were announced."""
        for digest, stored in given.items():
            kept = self.large.get(digest)
            if kept is not None and kept.stored is None:
                kept.stored = stored

    def fetch(self, wanted: Iterable[bytes]) -> dict[bytes, Large]:
        """The bits of large tensors. Raises NoSampleError for one that is not here."""
        found: dict[bytes, Large] = {}
        for digest in wanted:
            kept = self.large.get(digest)
            if kept is None or kept.stored is None:
                raise NoSampleError(f"the large tensor {digest.hex()} is not stored; its sample was cleared")
            found[digest] = kept.stored
        return found

    def release(self, given: Counter[bytes]) -> None:
        """Gives holds back; tensors that nothing refers to are freed."""
        for digest, count in given.items():
            kept = self.large.get(digest)
            if kept is not None:
                kept.holds -= count
                if kept.holds <= 0:
                    del self.large[digest]

    # ---------------------------------------------------------------- sizes and checkpoints

    def figures(self) -> dict[str, int]:
        """Samples, chunks, and the bytes of chunks and of large tensors."""
        stored = [kept.stored.nbytes for kept in self.large.values() if kept.stored is not None]
        return {
            "samples": len(self.rows),
            "chunks": len(self.chunks),
            "chunk_bytes": sum(len(pickle.dumps(held.chunk, 5)) for held in self.chunks.values()),
            "large_tensors": len(stored),
            "large_bytes": sum(stored),
        }

    def _state(self) -> tuple[Any, ...]:
        return self.chunks, self.rows, self.large, self._next

    def save(self, path: str) -> str:
        """Writes all of it to a file, which appears once it is whole; returns `digest_of` the file."""
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        with open(partial, "wb+") as file:
            pickle.dump(self._state(), file, protocol=5)
            digest = digest_of(file)
        partial.replace(target)
        return digest

    def load(self, path: str, digest: str) -> None:
        """Reads what `save` wrote, beside what is here; raises ValueError for other bytes than that."""
        with open(path, "rb") as file:
            check_digest(file, digest)
            self._loaded = pickle.load(file)

    def switch(self, loaded: bool) -> None:
        """Replaces all of it by what was loaded, or forgets what was loaded."""
        found, self._loaded = self._loaded, None
        if loaded:
            self.chunks, self.rows, self.large, self._next, *_ = found
            self._waiting.clear()
            for number in tuple(self.chunks):
                self._wait(number)


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
