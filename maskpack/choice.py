"""The choice of an encoding: field by field and batch by batch, whatever is smallest and exact.

    hints of the registry first -> what a glance at the words suggests -> narrow integers -> plain

A glance may pass over an encoding that would have fitted; that costs bytes, never exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maskpack.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps, Whole
from maskpack.registry import Path, path_of
from maskpack.rows import IntArray
from maskpack.sharing import (
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
from maskpack.words import Words

_ENOUGH = 8
"""An encoding this many times smaller than plain ends the search."""

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
        words: flat, with the bounds of its rows.
        bounds: int64 [B + 1].
        layout: the name of its layout; None for a dense field.
        integers: whether its dtype is one of whole numbers.
        columns: words of one element, the product of F.
        hints: of its spec.
    """

    words: Words
    bounds: IntArray
    layout: str | None
    integers: bool
    columns: int
    hints: Sequence[str]


def encode(fields: Mapping[Path, Candidate], begun: Mapping[Path, Own | None]) -> dict[Path, Encoding]:
    """An encoding for every field; `begun` are those of fields by themselves that are known already."""
    derived = _derived(fields)
    return {
        path: derived[path] if path in derived else begun.get(path) or encode_alone(field)
        for path, field in fields.items()
    }


def encode_alone(field: Candidate) -> Own:
    """The encoding of a field that takes no words from other fields."""
    columns = _columns(field) if field.columns > 1 and "columns" in field.hints and field.words.size else None
    if columns is not None and nbytes(columns) * _ENOUGH <= field.words.nbytes:
        return columns
    best: Own = _best(field.words, field.bounds, field.integers, field.hints)
    if columns is not None and nbytes(columns) < nbytes(best):
        best = columns
    if nbytes(best) * _ENOUGH > field.words.nbytes and (
        "repeated" in field.hints or likely_repeated(field.words, field.bounds)
    ):
        made = repeated(field.words, field.bounds, lambda words, bounds: _best(words, bounds, field.integers, ()))
        if made is not None and nbytes(made) < nbytes(best):
            best = made
    return best


def _columns(field: Candidate) -> Columns:
    bounds = field.bounds // field.columns
    table = field.words.reshape(-1, field.columns)
    columns = [np.ascontiguousarray(table[:, place]) for place in range(field.columns)]
    return Columns(tuple(_best(column, bounds, field.integers, ()) for column in columns))


def _best(words: Words, bounds: IntArray, integers: bool, hints: Sequence[str]) -> Whole:
    best: Whole = Plain(words)
    size = words.nbytes
    glance = _Glance(words)
    hinted = [name for name in hints if name in _ENCODERS]
    for name in dict.fromkeys([*hinted, *_ENCODERS]):
        if name not in hinted and not glance.suggests(name, integers):
            continue
        made = _ENCODERS[name](words, bounds)
        if made is not None and nbytes(made) < size:
            best, size = made, nbytes(made)
            if size * _ENOUGH <= words.nbytes:
                break
    return best


class _Glance:
    """Sixteen short stretches of a field, looked at before the whole."""

    def __init__(self, words: Words) -> None:
        self._all = words
        self._seen = words[None]
        if words.size > 2048:
            self._seen = words[: words.size // 16 * 16].reshape(16, -1)[:, :64]

    def suggests(self, name: str, integers: bool) -> bool:
        if not self._all.size:
            return False
        if name == "runs":
            return _most(self._steps == 0)
        if name in ("ramp", "steps"):
            return integers and self._steady
        if name == "sparse":
            return _most(self._seen == 0)
        if name == "bits":
            return integers and int(self._seen.min()) >= 0 and int(self._seen.max()) <= 1
        return integers and self._all.itemsize > 1

    @cached_property
    def _steps(self) -> Words:
        return self._seen[:, 1:] - self._seen[:, :-1]

    @cached_property
    def _steady(self) -> bool:
        return _most(self._steps[:, 1:] == self._steps[:, :-1])


def _most(flags: Words) -> bool:
    return 5 * int(np.count_nonzero(flags)) >= 3 * flags.size


# -------------------------------------------------------------------- fields that follow from other fields


def _derived(fields: Mapping[Path, Candidate]) -> dict[Path, Same | Joined]:
    """`Joined` takes words from fields that are not joined themselves, `Same` from a field that stores its own; so no
    field leads back to itself."""
    found: dict[Path, Same | Joined] = {}
    used: set[Path] = set()
    for path, field in fields.items():
        parts = _parts(path, field, fields)
        if parts is not None and path not in used and found.keys().isdisjoint(parts):
            head, tail = parts
            if _is_joined(field, fields[head], fields[tail]):
                found[path] = Joined(head, tail)
                used.update(parts)
    sizes: dict[tuple[object, ...], list[Path]] = {}
    for path, field in fields.items():
        if path not in found and field.layout is not None and field.words.size:
            alike = sizes.setdefault((field.layout, field.words.dtype, field.words.size), [])
            same = next((other for other in alike if _equal(field.words, fields[other].words)), None)
            if same is None:
                alike.append(path)
            else:
                found[path] = Same(same)
    return found


def _parts(path: Path, field: Candidate, fields: Mapping[Path, Candidate]) -> tuple[Path, Path] | None:
    """The two fields that a hint `join:head,tail` names, beside the field itself."""
    for hint in field.hints:
        if hint.startswith("join:"):
            names = [(*path[:-1], *path_of(tuple(name.split("/")))) for name in hint.removeprefix("join:").split(",")]
            parts = [fields.get(name) for name in names]
            layouts = [field.layout, *[part.layout for part in parts if part is not None]]
            if None not in layouts and len(layouts) == len(set(layouts)) == 3:
                return names[0], names[1]
    return None


def _is_joined(field: Candidate, head: Candidate, tail: Candidate) -> bool:
    if not head.words.dtype == tail.words.dtype == field.words.dtype or not field.words.size:
        return False
    if not np.array_equal(np.diff(head.bounds) + np.diff(tail.bounds), np.diff(field.bounds)):
        return False
    return np.array_equal(alternating(Field(head.words, head.bounds), Field(tail.words, tail.bounds)), field.words)


def _equal(words: Words, other: Words) -> bool:
    return np.array_equal(words[:64], other[:64]) and np.array_equal(words, other)
