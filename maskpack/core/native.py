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
TRUSTED = 8
"""Added to one of these: the pads of rows are read, but not verified."""


_FUNCTIONS = {
    "count_spans": 11,
    "list_spans": 11,
    "cut": 7,
    "read": 4,
    "write": 5,
    "encode": 11,
    "decode": 8,
    "store_layouts": 6,
    "read_layout": 7,
    "split": 11,
    "compact": 4,
    "check_layouts": 6,
    "check_fields": 12,
}
"""The functions of the core and the numbers that they take."""


def _loaded() -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(_LIBRARY))
        core.maskpack_version.restype = ctypes.c_int64
        found = core.maskpack_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"maskpack: its compiled core is missing ({error}). {_REMEDY}") from error
    if found != VERSION:
        raise ImportError(f"maskpack: its compiled core has version {found}; expected {VERSION}. {_REMEDY}")
    for name, count in _FUNCTIONS.items():
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


def described(padded: Tensor) -> tuple[Any, Tensor]:
    """A FIELD of a padded tensor [B, S, *F], without pads; and the tensor that it points to, which may be a copy."""
    field, held = _field(padded, None, Pads(NO_PAD))
    return field.view(FIELD)[0], held


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


# -------------------------------------------------------------------- tables of packed batches


def _struct(*names: str, **parts: Any) -> np.dtype[Any]:
    """A struct of int64, with other structs in it."""
    fields: list[tuple[Any, ...]] = [(name, np.int64) for name in names]
    return np.dtype(
        [*fields, *((name, *(part if isinstance(part, tuple) else (part,))) for name, part in parts.items())]
    )


PLACE = _struct("at", "size", "count")
"""An array: its first byte in the body, bytes of a number, numbers. (Array in core.c)"""
ENTRY = _struct("kind", "layout", "items", "size", "number", "first", "second", a=PLACE, b=PLACE, c=PLACE)
"""An encoded field, or a part of one."""
STORED = _struct("width", "anchor", "kind", "parent", "low", a=PLACE, b=PLACE, c=PLACE)
"""A layout in the body."""
FIELD = _struct(
    *("padded", "packed", "row_stride", "outer", "outer_stride", "size", "items", "layout", "mode"),
    *("pad", "pad_high", "row_pads", "stray"),
)
"""A padded field, or its packed values."""
FORM = _struct("kind", "number", "bytes", "inner_kind", "inner_number", "inner_bytes", "cost")
"""How a field was encoded the last time."""
MOST_PADS = 4
MOST_STEPS = 8
"""From a field to fields that it is near to, or that it is put together from."""
_TRIAL = _struct("mode", "pad", "pad_high")
JOB = np.dtype(
    [
        ("field", FIELD),
        *((name, np.int64) for name in ("padded", "layout", "items", "size", "rows", "bounds", "index", "integers")),
        *((name, np.int64) for name in ("hints", "near", "head", "tail", "columns", "num_pads")),
        ("pads", _TRIAL, (MOST_PADS,)),
        ("form", FORM),
        *((name, np.int64) for name in ("result", "pad", "first", "count")),
        ("row_pads", PLACE),
    ]
)
"""A field to be encoded."""
TARGET = np.dtype([("field", FIELD), ("padded", np.int64), ("entry", np.int64), ("rows", np.int64)])
"""A field to be decoded."""
KINDS = ("plain", "narrow", "blocks", "bitmap", "rle", "arange", "delta", "sparse", "dictionary", "columns", "concat")
"""The encodings, in the order of their numbers."""
PLAIN, NARROW, BLOCKS, BITMAP, RLE, ARANGE, DELTA, SPARSE, DICTIONARY, COLUMNS, CONCAT = range(len(KINDS))
FITS, MISFIT, STRAY, FULL, NO_MEMORY = range(5)
"""What becomes of a job."""
MOST_NEAR = 8
"""Fields in a chain of near ones."""
SPANS, MASK, PART = range(3)
"""The kinds of stored layouts."""

Structs = Any
"""A NumPy array of structs, whose fields the type checker does not know."""


def layout_rows(layouts: Sequence[HostLayout]) -> IntArray:
    """The table of layouts."""
    return np.concatenate([_table(layout) for layout in layouts] or [np.zeros(0, np.int64)])


def new_jobs(count: int) -> Structs:
    """Jobs that refer to no other, and have no form yet."""
    jobs = np.zeros(count, JOB)
    for name in ("layout", "near", "head", "tail"):
        jobs[name] = -1
    jobs["form"]["kind"] = jobs["form"]["inner_kind"] = -1
    return jobs


def encode(
    jobs: Structs, layouts: IntArray, body: Words, used: int, rooms: IntArray, threads: int
) -> tuple[Structs, IntArray, int] | None:
    """Encodes fields behind the first `used` bytes of a body.

    Args:
        jobs: JOB [n]; `result`, `pad`, `form` and `row_pads` are written.
        layouts: as `layout_rows` gives them; must live as long as the call, like all that the jobs point to.
        rooms: int64 [n + 1]: bytes for each job, if there are several threads; and of the whole body.

    Returns:
        The entries, the entry of each field, and the bytes in use; None if a job failed.
    """
    ends = np.cumsum(2 + np.maximum(jobs["columns"], 1))
    jobs["first"][1:] = ends[:-1]
    most = int(ends[-1])
    slots, entries = np.empty(most, ENTRY), np.empty(most, ENTRY)
    fields, count = np.empty(jobs.size, np.int64), np.zeros(1, np.int64)
    places = address(slots), address(entries), address(count), address(fields), address(body)
    used = _core.maskpack_encode(address(jobs), jobs.size, address(layouts), *places, used, address(rooms), threads)
    return None if used < 0 else (entries[: int(count[0])], fields, used)


def decode(targets: Structs, entries: Structs, layouts: IntArray, body: Words, rows: int, nbytes: int) -> None:
    """Decodes fields to tensors of `nbytes` in all, which `targets`, TARGET [n], point to."""
    places = address(targets), targets.size, address(entries), address(layouts), address(body), rows
    if _core.maskpack_decode(*places, nbytes >= _CACHE, threads_for(nbytes)):
        raise MemoryError(_NO_MEMORY)


def cut(layout: HostLayout, low: int, width: int) -> HostLayout:
    """The layout of the columns from `low` on, `width` of them."""
    row = _table(layout)
    splits, bounds = np.empty(row[0] + 1, np.int64), np.empty(row[0] + 1, np.int64)
    count = _core.maskpack_cut(address(row), low, width, address(splits), address(bounds), 0, 0)
    spans = np.empty((2, count), np.int64)
    places = address(splits), address(bounds), address(spans), address(spans) + 8 * count
    _core.maskpack_cut(address(row), low, width, *places)
    return HostLayout(width, SpanTable(spans[0], spans[1], splits), bounds)


def store_layouts(stored: Structs, layouts: IntArray, body: Words, used: int) -> int | None:
    """Stores layouts behind the first `used` bytes of a body. Returns the bytes in use, None if there is no room."""
    places = address(stored), stored.size, address(layouts), address(body)
    used = _core.maskpack_store_layouts(*places, used, body.size)
    return None if used < 0 else used


def read_layouts(stored: Structs, body: Words, rows: int) -> list[HostLayout]:
    """The layouts that `store_layouts` stored."""
    layouts: list[HostLayout] = []
    for at in range(stored.size):
        width = int(stored["width"][at])
        if stored["kind"][at] == PART:
            layouts.append(cut(layouts[int(stored["parent"][at])], int(stored["low"][at]), width))
            continue
        splits, bounds = np.empty(rows + 1, np.int64), np.empty(rows + 1, np.int64)
        row = address(stored) + at * STORED.itemsize, address(body), rows, address(splits), address(bounds)
        count = _core.maskpack_read_layout(*row, 0, 0)
        spans = np.empty((2, count), np.int64)
        _core.maskpack_read_layout(*row, address(spans), address(spans) + 8 * count)
        layouts.append(HostLayout(width, SpanTable(spans[0], spans[1], splits), bounds))
    return layouts


def split(
    entries: Structs, stored: Structs, layouts: IntArray, body: Words, rows: int, cuts: IntArray
) -> tuple[Structs, Structs]:
    """The parts of the rows of a table between `cuts`, int64 [parts + 1]: ENTRY [parts, n] and STORED [parts, m]."""
    parts = cuts.size - 1
    out, out_stored = np.empty((parts, entries.size), ENTRY), np.empty((parts, stored.size), STORED)
    table = address(entries), entries.size, address(stored), stored.size, address(layouts), address(body), rows
    if _core.maskpack_split(*table, address(cuts), parts, address(out), address(out_stored)):
        raise MemoryError(_NO_MEMORY)
    return out, out_stored


def compact(places: Sequence[int], body: Words) -> Words:
    """A copy of the arrays whose PLACEs are at some addresses, in a body of their own. The PLACEs are changed."""
    line = np.array(places, np.int64)
    to = np.empty(_core.maskpack_compact(address(line), line.size, address(body), 0), np.uint8)
    _core.maskpack_compact(address(line), line.size, address(body), address(to))
    return to


def check_layouts(stored: Structs, body: Words, rows: int, most: int) -> int:
    """0 if layouts can be read and have at most `most` spans in all; else 1 + the number of the first that cannot."""
    return _core.maskpack_check_layouts(address(stored), stored.size, address(body), body.size, rows, most)


def check_fields(
    entries: Structs,
    layouts: IntArray,
    body: Words,
    rows: int,
    dense_rows: int,
    most: int,
    fields: IntArray,
    bools: IntArray,
) -> int:
    """0 if fields can be decoded and those of `bools` hold only 0 and 1; else 1 + the number of the first that cannot
    (1 + the number of fields for an entry that none needs), or -1 - that of the first with other bytes. `layouts` were
    checked and read; rows of dictionaries may take `most` bytes more than the rows that they stand for."""
    table = address(entries), entries.size, address(layouts), layouts.size * 8 // 48, address(body), body.size
    line = address(fields), fields.size, address(bools)
    return _core.maskpack_check_fields(*table, rows, dense_rows, most, *line)
