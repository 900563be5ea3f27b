"""Bools that come from elsewhere: do the bytes that an encoding gives have no values but 0 and 1?

bits [0 2]       no      one look at the words of each kind; what rises by equal steps leaves 0 and 1 within three
ramp 0, step 1   0 1 2   words, so the first words of each stretch tell
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from maskpack.core.bits import odd_bools
from maskpack.core.index import IntArray, cumulated
from maskpack.fields.registry import Path
from maskpack.packed.arrays import spread
from maskpack.packed.encodings import Narrow, Ramp, Runs, Steps
from maskpack.packed.references import Columns, Encoding, Joined, Own, Repeated, Same

_BYTE = np.dtype(np.uint8)


def odd_field(path: Path, fields: Mapping[Path, Encoding], bounds: Callable[[Path], IntArray]) -> bool:
    """Whether a field of bytes gives others than 0 and 1; `fields` are sound, `bounds` gives the rows of each."""
    encoding = fields[path]
    if isinstance(encoding, Same):
        return odd_field(encoding.field, fields, bounds)
    if isinstance(encoding, Joined):
        return any(odd_field(other, fields, bounds) for other in (encoding.head, encoding.tail))
    return _odd(encoding, bounds(path))


def _odd(encoding: Own, bounds: IntArray) -> bool:
    if isinstance(encoding, Repeated):
        lengths = np.zeros(int(encoding.index.max()) + 1 if encoding.index.size else 0, np.int64)
        lengths[encoding.index] = np.diff(bounds)
        return _odd(encoding.rows, cumulated(lengths))
    if isinstance(encoding, Columns):
        return any(_odd(column, bounds // len(encoding.columns)) for column in encoding.columns)
    if isinstance(encoding, Ramp):
        return odd_bools(encoding.decode(_BYTE, cumulated(np.minimum(np.diff(bounds), 3))))
    if isinstance(encoding, Steps):
        runs, short = _shortened(encoding.steps, bounds)
        return odd_bools(Steps(runs).decode(_BYTE, short))
    if isinstance(encoding, Narrow):  # a byte has no narrower form
        return True
    return odd_bools(encoding.values if isinstance(encoding, Runs) else encoding.words)


def _shortened(runs: Runs, bounds: IntArray) -> tuple[Runs, IntArray]:
    """The same pieces, none longer than two words, and the bounds of the rows."""
    pieces = spread(runs.pieces, bounds.size - 1).astype(np.int64)
    ends = cumulated(np.maximum(pieces - 1, 0))
    before, counts = cumulated(runs.counts), np.minimum(runs.counts, 2)
    last = np.diff(bounds) - np.diff(before[ends])
    lengths = np.diff(cumulated(counts)[ends]) + np.minimum(last, 2)
    return Runs(runs.pieces, counts, runs.values), cumulated(lengths)
