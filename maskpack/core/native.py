"""The binding of the compiled core (core.c): arrays and tensors on the host in, numbers and addresses out.

Whatever is passed here was checked: shapes, dtypes, and that layouts lie within their widths.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core.bits import Words, address
from maskpack.core.index import IntArray, SpanTable

VERSION = 1
_LIBRARY = Path(__file__).with_name("_core.so")
_REMEDY = "Install maskpack again (`pip install -e .` in a checkout), which compiles it."
_A_THREAD = 1 << 26
"""Bytes for which one more thread pays: starting one costs as much as reading 0.5 MB."""
_NO_MEMORY = "maskpack: no memory for the tasks of a pass"
_CACHE = 1 << 25
"""Writes of so many bytes go past the cache."""
NO_PAD, CONSTANT, BY_EDGE, BY_ROW, BY_SIGN = range(5)
"""What is under a mask: anything; a constant; the edge of the row; a constant a row; a zero a row, with either sign."""


def _loaded() -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(_LIBRARY))
        core.maskpack_version.restype = ctypes.c_int64
        found = core.maskpack_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"maskpack: its compiled core is missing ({error}). {_REMEDY}") from error
    if found != VERSION:
        raise ImportError(f"maskpack: its compiled core has version {found}; expected {VERSION}. {_REMEDY}")
    for name, count in (("count_spans", 11), ("list_spans", 11), ("read", 4), ("write", 5)):
        function = getattr(core, f"maskpack_{name}")
        function.argtypes = [ctypes.c_int64] * count
        function.restype = ctypes.c_int64
    return core


_core = _loaded()


def threads_for(nbytes: int) -> int:
    """The number of threads for a pass over `nbytes`: one, or as many as torch may use."""
    return max(1, min(torch.get_num_threads(), nbytes // _A_THREAD + 1))


# -------------------------------------------------------------------- masks


def scan(bits: Words, significant: int) -> tuple[SpanTable, IntArray, int | None]:
    """The spans of a mask, words [B, S] with any row stride.

    Args:
        significant: the bits of a word of which one makes it valid; all but the sign for floats.

    Returns:
        The spans; int64 [B + 1], the bounds of the rows among the valid tokens; and the word of all valid tokens, if
        they are equal and all other words are 0.
    """
    rows, width = bits.shape
    if bits.strides[1] != bits.itemsize and width > 1:
        bits = np.ascontiguousarray(bits)
    found = np.empty((rows, 12), np.int64)
    splits, bounds = np.empty(rows + 1, np.int64), np.empty(rows + 1, np.int64)
    alike = np.empty(2, np.int64)
    mask = address(bits), bits.itemsize, rows, width, bits.strides[0], significant, address(found)
    threads = threads_for(bits.nbytes)
    count = _core.maskpack_count_spans(*mask, address(splits), address(bounds), address(alike), threads)
    starts, counts = np.empty(count, np.int64), np.empty(count, np.int64)
    _core.maskpack_list_spans(*mask, address(splits), address(starts), address(counts), threads)
    return SpanTable(starts, counts, splits), bounds, int(alike[1]) if alike[0] else None


# -------------------------------------------------------------------- padded fields


class HostLayout(NamedTuple):
    """The layout of rows, as arrays: `table` and `bounds` as `scan` returns them."""

    width: int
    table: SpanTable
    bounds: IntArray


class Pads(NamedTuple):
    """What is under a mask: a mode, the word of a constant (two halves of 16 bytes), or the words of all rows [B]."""

    mode: int
    word: Sequence[int] = ()
    of_rows: Tensor | None = None


def read(padded: Tensor, layout: HostLayout, pads: Pads, packed: Tensor | None) -> bool:
    """Whether all masked-out elements of a padded field are its pad. Also gathers its values.

    Args:
        padded: [B, S, *F] with any strides.
        pads: what is verified. The words of rows are written here, not read.
        packed: contiguous [T, *F], where the values go; None to verify only. Not complete if the result is False.
    """
    if not padded.numel():
        return True
    (field, held), table = _field(padded, packed, pads), _table(layout)
    done = _core.maskpack_read(address(field), 1, address(table), threads_for(padded.nbytes))
    del held  # not earlier: `field` has its address
    if done:
        raise MemoryError(_NO_MEMORY)
    return not int(field[12])


def write(packed: Tensor, layout: HostLayout, pads: Pads, padded: Tensor) -> None:
    """Writes packed values, contiguous [T, *F], and the pads to a padded field [B, S, *F] in its own strides."""
    if not padded.numel():
        return
    (field, held), table, nbytes = _field(padded, packed, pads), _table(layout), padded.nbytes
    assert held.data_ptr() == padded.data_ptr()
    if _core.maskpack_write(address(field), 1, address(table), nbytes >= _CACHE, threads_for(nbytes)):
        raise MemoryError(_NO_MEMORY)


def _field(padded: Tensor, packed: Tensor | None, pads: Pads) -> tuple[IntArray, Tensor]:
    """A row of the table of fields; and the tensor that it points to, which may be a copy."""
    padded = padded.detach().resolve_conj().resolve_neg()
    outer = _outer(padded)
    if outer is None:
        padded = padded.contiguous()
        outer = 1, 0
    size, groups = padded.element_size(), math.prod(padded.shape[2:])
    word = [*pads.word, *pads.word][:2] or [0, 0]
    field: list[Any] = [
        *(padded.data_ptr(), 0 if packed is None else packed.data_ptr(), padded.stride(0) * size),
        *(outer[0], outer[1] * size, size, groups // max(outer[0], 1), 0, pads.mode, *word),
        *(0 if pads.of_rows is None else pads.of_rows.data_ptr(), 0),
    ]
    return np.array(field, np.int64), padded


def _table(layout: HostLayout) -> IntArray:
    """A row of the table of layouts."""
    spans = layout.table
    places = map(address, (spans.starts, spans.counts, spans.splits, layout.bounds))
    return np.array([spans.splits.size - 1, layout.width, *places], np.int64)


def _outer(x: Tensor) -> tuple[int, int] | None:
    """How many groups of the words of an element lie apart, and their stride in elements; None if the strides of
    [B, S, *F] are not such that the other words lie together at each position."""
    shape, strides = x.shape, x.stride()
    for first in range(2, x.dim() + 1):
        inner = 1
        for dim in (*range(x.dim() - 1, first - 1, -1), 1):
            if shape[dim] > 1 and strides[dim] != inner:
                break
            inner *= shape[dim]
        else:
            outer = [(shape[dim], strides[dim]) for dim in range(2, first) if shape[dim] != 1]
            if all(stride == size * next_ for (_, stride), (size, next_) in itertools.pairwise(outer)):
                return math.prod(shape[2:first]), outer[-1][1] if outer else 0
    return None
