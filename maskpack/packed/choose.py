"""The choice of an encoding for each field of a batch: a small one that is exact.

    hints of the registry -> encodings that a sample of the words suggests -> narrow -> plain

The sample may miss an encoding that would fit; that costs bytes, never exactness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from maskpack.core.bits import Words
from maskpack.core.index import IntArray
from maskpack.fields.registry import Path, path_of
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps, Whole
from maskpack.packed.references import (
    Columns,
    Encoding,
    Field,
    Joined,
    Own,
    Same,
    alternating,
    likely_repeated,
    nbytes,
    repeated,
)

_ENOUGH = 8
"""An encoding this many times smaller than plain ends the search, unless one bit for each word, as a bitmap takes, is
less than half of it."""
_LITTLE = 64
"""So few bytes, or words, are not worth a longer search."""

_ENCODERS: dict[str, Callable[[Words, IntArray], Whole | None]] = {
    "runs": Runs.encode,
    "ramp": Ramp.encode,
    "sparse": Sparse.encode,
    "steps": Steps.encode,
    "bits": Bits.encode,
    "narrow": Narrow.encode,
}


@dataclass(frozen=True)
class Candidate:
    """A field that is to be encoded.

    Attributes:
        words: flat; None if the field is encoded already.
        bounds: int64 [B + 1], the bounds of the rows among the words.
        layout: the name of its layout; None for a field that stays padded.
        integers: whether its dtype is an integer or bool.
        columns: words of one element, the product of F.
        hints: the hints of its spec.
        encoding: the encoding of the field, if it was encoded earlier; then `words` is None.
        dtype: the dtype of its words, if `words` is None.
    """

    words: Words | None
    bounds: IntArray
    layout: str | None
    integers: bool
    columns: int
    hints: Sequence[str]
    encoding: Own | None = None
    dtype: np.dtype[Any] | None = None

    def word_dtype(self) -> np.dtype[Any]:
        """The dtype of the words."""
        dtype = self.dtype if self.words is None else self.words.dtype
        assert dtype is not None
        return dtype

    def line(self) -> Words:
        """The words, decoded if necessary."""
        if self.words is not None:
            return self.words
        assert self.encoding is not None
        return self.encoding.decode(self.word_dtype(), self.bounds)


def encode(fields: Mapping[Path, Candidate]) -> dict[Path, Encoding]:
    """An encoding for every field. A concat (`Joined`) takes words from fields that are no concats, an alias (`Same`)
    from a field that stores its own words; so there are no circles."""
    encodings: dict[Path, Encoding] = dict(_joined(fields))
    stored: dict[tuple[object, ...], list[tuple[Path, Own]]] = {}
    for path, field in fields.items():
        if path in encodings:
            continue
        own = encode_alone(field)
        alike = stored.setdefault((field.layout, field.word_dtype(), int(field.bounds[-1])), [])
        candidates = alike if field.layout is not None and int(field.bounds[-1]) else []
        same = next((other for other, encoding in candidates if _equal(own, encoding)), None)
        alike.append((path, own))
        encodings[path] = own if same is None else Same(same)
    return {path: encodings[path] for path in fields}


def encode_alone(field: Candidate) -> Own:
    """The encoding of a field without regard to other fields."""
    words, bounds = field.words, field.bounds
    if words is None:
        assert field.encoding is not None
        return field.encoding
    columns = _columns(field, words) if field.columns > 1 and "columns" in field.hints and words.size else None
    if columns is not None and nbytes(columns) * _ENOUGH <= words.nbytes:
        return columns
    best: Own = _best(words, bounds, field.integers, field.hints)
    if columns is not None and nbytes(columns) < nbytes(best):
        best = columns
    large = nbytes(best) * _ENOUGH > words.nbytes
    if "repeated" in field.hints or (large and likely_repeated(words, bounds)):
        dictionary = repeated(words, bounds, lambda words, bounds: _best(words, bounds, field.integers, ()))
        if dictionary is not None and nbytes(dictionary) < nbytes(best):
            best = dictionary
    return best


def _columns(field: Candidate, words: Words) -> Columns:
    bounds = field.bounds // field.columns
    table = words.reshape(-1, field.columns)
    columns = [np.ascontiguousarray(table[:, place]) for place in range(field.columns)]
    return Columns(tuple(_best(column, bounds, field.integers, ()) for column in columns))


def _best(words: Words, bounds: IntArray, integers: bool, hints: Sequence[str]) -> Whole:
    best: Whole = Plain(words)
    size = words.nbytes
    sample = _Sample(words)
    hinted = [name for name in hints if name in _ENCODERS]
    for name in dict.fromkeys([*hinted, *_ENCODERS]):
        if name not in hinted and not sample.suggests(name, integers):
            continue
        encoding = _ENCODERS[name](words, bounds)
        if encoding is not None and nbytes(encoding) < size:
            best, size = encoding, nbytes(encoding)
            if size * _ENOUGH <= words.nbytes and size <= words.size // 4 + _LITTLE:
                break
    return best


class _Sample:
    """Looks at sixteen short stretches of a field before the whole."""

    def __init__(self, words: Words) -> None:
        self._all = words
        self._part = words[None]
        if words.size > 2048:
            self._part = words[: words.size // 16 * 16].reshape(16, -1)[:, :64]

    def suggests(self, name: str, integers: bool) -> bool:
        if not self._all.size:
            return False
        if name == "runs":
            return _most(self._steps == 0)
        if name in ("ramp", "steps"):
            return integers and self._steady
        if name == "sparse":
            return _most(self._part == 0)
        if name == "bits":
            low, high = self._part.min(), self._part.max()
            if self._all.size > _LITTLE:
                return bool(((self._part == low) | (self._part == high)).all())
            return integers and int(low) >= 0 and int(high) <= 1
        return integers and self._all.itemsize > 1

    @cached_property
    def _steps(self) -> Words:
        return self._part[:, 1:] - self._part[:, :-1]

    @cached_property
    def _steady(self) -> bool:
        return _most(self._steps[:, 1:] == self._steps[:, :-1])


def _most(flags: Words) -> bool:
    return 5 * int(np.count_nonzero(flags)) >= 3 * flags.size


# -------------------------------------------------------------------- fields that follow from other fields


def _joined(fields: Mapping[Path, Candidate]) -> dict[Path, Joined]:
    concats: dict[Path, Joined] = {}
    used: set[Path] = set()
    for path, field in fields.items():
        parts = _parts(path, field, fields)
        if parts is not None and path not in used and concats.keys().isdisjoint(parts):
            head, tail = parts
            if _is_joined(field, fields[head], fields[tail]):
                concats[path] = Joined(head, tail)
                used.update(parts)
    return concats


def _parts(path: Path, field: Candidate, fields: Mapping[Path, Candidate]) -> tuple[Path, Path] | None:
    """The two fields that a hint `join:head,tail` names, in the sub-batch of the field."""
    for hint in field.hints:
        if hint.startswith("join:"):
            names = [(*path[:-1], *path_of(tuple(name.split("/")))) for name in hint.removeprefix("join:").split(",")]
            parts = [fields.get(name) for name in names]
            layouts = [field.layout, *[part.layout for part in parts if part is not None]]
            if None not in layouts and len(layouts) == len(set(layouts)) == 3:
                return names[0], names[1]
    return None


def _is_joined(field: Candidate, head: Candidate, tail: Candidate) -> bool:
    if not head.word_dtype() == tail.word_dtype() == field.word_dtype() or not int(field.bounds[-1]):
        return False
    if not np.array_equal(np.diff(head.bounds) + np.diff(tail.bounds), np.diff(field.bounds)):
        return False
    return np.array_equal(alternating(Field(head.line(), head.bounds), Field(tail.line(), tail.bounds)), field.line())


def _equal(encoding: Any, other: Any) -> bool:
    """Whether two encodings are equal bit by bit, and so give the same words."""
    if type(encoding) is not type(other):
        return False
    if isinstance(encoding, np.ndarray):
        a, b = cast("Words", encoding), cast("Words", other)
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and np.array_equal(a[:64], b[:64]) and np.array_equal(a, b)
    if isinstance(encoding, tuple):
        parts, others = cast("tuple[Own, ...]", encoding), cast("tuple[Own, ...]", other)
        return len(parts) == len(others) and all(map(_equal, parts, others))
    if isinstance(encoding, int):
        return encoding == other
    return all(
        _equal(getattr(encoding, field.name), getattr(other, field.name)) for field in dataclasses.fields(encoding)
    )
