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

from maskpack.core import abi
from maskpack.core.bits import Words, address
from maskpack.core.index import IntArray, SpanTable
from maskpack.core.pads import Pads

_LIBRARY = Path(__file__).with_name("_core.so")
_REMEDY = "Install maskpack again (`pip install -e .` in a checkout), which compiles it."
_A_THREAD = 1 << 26
"""Bytes for which one more thread pays in a pass that reads or writes them."""
_ENCODED = 64
"""A byte that is encoded counts as so many."""
_NO_MEMORY = "maskpack: no memory for the tasks of a pass"
_CACHE = 1 << 25
"""Writes of so many bytes go past the cache."""
_SMALL = 1 << 20
"""Bodies with room for fewer bytes are copied, so that they take no more memory than they need."""


def places_in(struct: Any, *names: str) -> list[int]:
    """The places of members among the numbers of a struct."""
    return [int(struct.fields[name][1]) // 8 for name in names]


_FIRST, _COLUMNS = places_in(abi.JOB, "first", "columns")
_PADDED, _PACKED, _LAYOUT, _PADS = places_in(abi.FIELD, "padded", "packed", "layout", "pads")


def _loaded() -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(_LIBRARY))
        core.maskpack_version.restype = ctypes.c_int64
        found = core.maskpack_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"maskpack: its compiled core is missing ({error}). {_REMEDY}") from error
    if found != abi.VERSION:
        raise ImportError(f"maskpack: its compiled core has version {found}; expected {abi.VERSION}. {_REMEDY}")
    for name, count in abi.FUNCTIONS.items():
        function = getattr(core, f"maskpack_{name}")
        function.argtypes = [ctypes.c_int64] * count
        function.restype = ctypes.c_int64
    for number, (name, struct) in enumerate(abi.STRUCTS.items()):
        if (size := core.maskpack_size(number)) != struct.itemsize:
            raise ImportError(
                f"maskpack: {name} has {size} bytes in its compiled core; expected {struct.itemsize}. {_REMEDY}"
            )
    return core


_core = _loaded()


def threads_for(nbytes: int) -> int:
    """The number of threads for a pass over `nbytes`: one, or as many as torch may use."""
    return max(1, min(torch.get_num_threads(), nbytes // _A_THREAD + 1))


# -------------------------------------------------------------------- masks


class HostLayout(NamedTuple):
    """The layout of rows, as arrays: `places` are the addresses of starts, counts, splits and bounds, if they are
    known."""

    width: int
    table: SpanTable
    bounds: IntArray
    places: tuple[int, int, int, int] | None = None


# -------------------------------------------------------------------- padded fields


def read(jobs: Structs, layouts: IntArray, nbytes: int) -> None:
    """Gathers the packed values of padded fields of `nbytes` in all, and finds out what is under their masks.

    Args:
        jobs: JOB [n]; `result` is written, and `pad`, the number of the first pad that is, -1 for fields without pads.
        layouts: the table of their layouts.
    """
    if jobs.size:
        _core.maskpack_read(address(jobs), jobs.size, address(layouts), threads_for(nbytes))


def pack(padded: Tensor, layout: HostLayout, packed: Tensor) -> None:
    """Gathers the values of a padded field [B, S, *F], with any strides, into `packed`, contiguous [T, *F]."""
    jobs = new_jobs(1)
    jobs["field"], held = described(padded)
    jobs["field"]["packed"], jobs["padded"], jobs["layout"] = packed.data_ptr(), 1, 0
    read(jobs, layout_rows([layout]), held.nbytes)


class NewField(NamedTuple):
    """A field on the host that is written.

    Attributes:
        form: FIELD as int64, without addresses, layout and pads.
        padded: the tensor of this form, with its width in any dim.
        layout: which of its elements are valid.
        pads: what the others are.
        packed: its values, contiguous [T, *F].
    """

    form: IntArray
    padded: Tensor
    layout: HostLayout
    pads: Pads
    packed: Tensor


def write(fields: Sequence[NewField]) -> None:
    """Writes the packed values and the pads to each padded field."""
    layouts = {id(field.layout): field.layout for field in fields}
    numbers = {own: number for number, own in enumerate(layouts)}
    table = np.concatenate([field.form for field in fields]).reshape(len(fields), -1)
    table[:, [_PADDED, _PACKED]] = [(field.padded.data_ptr(), field.packed.data_ptr()) for field in fields]
    table[:, _LAYOUT] = [numbers[id(field.layout)] for field in fields]
    places = [field.pads.place for field in fields]
    table[:, _PADS : _PADS + 3] = [(at, size, size if count > 1 else 0) for at, size, count in places]
    nbytes = sum([field.padded.nbytes for field in fields])
    rows = layout_rows([*layouts.values()])
    _core.maskpack_write(address(table), len(table), address(rows), nbytes >= _CACHE, threads_for(nbytes))


def described(padded: Tensor) -> tuple[Any, Tensor]:
    """A FIELD of a padded tensor [B, S, *F], without pads; and the tensor that it points to, which may be a copy."""
    padded = padded.detach().resolve_conj().resolve_neg()
    is_expanded = padded.shape[1] > 1 and not padded.stride(1)
    padded = padded[:, :1] if is_expanded else padded
    outer, row_stride = _outer(padded), padded.stride(0)
    if outer is None:
        bits = padded.view(torch.uint8) if padded.dtype is torch.bool else padded  # a copy of bools has 0 and 1 alone
        padded = (bits if row_stride else bits[:1]).contiguous()
        outer, row_stride = (1, 0), padded.stride(0) if row_stride else 0
    size, groups = padded.element_size(), math.prod(padded.shape[2:])
    row: Any = np.zeros(1, abi.FIELD)[0]
    row["padded"], row["row_stride"] = padded.data_ptr(), row_stride * size
    row["outer"], row["outer_stride"] = outer[0], outer[1] * size
    row["size"], row["items"], row["is_expanded"] = size, groups // max(outer[0], 1), is_expanded
    return row, padded


def _line(layout: HostLayout) -> tuple[int, ...]:
    spans = layout.table
    places = layout.places or map(address, (spans.starts, spans.counts, spans.splits, layout.bounds))
    return (spans.splits.size - 1, layout.width, *places)


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


_NO_LAYOUTS: IntArray = np.empty(0, np.int64)
Structs = Any
"""A NumPy array of structs, whose fields the type checker does not know."""


def layout_rows(layouts: Sequence[HostLayout]) -> IntArray:
    """The table of layouts."""
    if not layouts:
        return _NO_LAYOUTS
    return np.array([_line(layout) for layout in layouts], np.int64).reshape(-1)


def new_jobs(count: int) -> Structs:
    """Jobs that refer to no other, and have no form yet."""
    jobs = np.zeros(count, abi.JOB)
    for name in ("layout", "near", "head", "tail"):
        jobs[name] = -1
    jobs["form"]["kind"] = jobs["form"]["inner_kind"] = -1
    return jobs


class EncodedArrays(NamedTuple):
    """Encoded fields: ENTRY [m]; int64 [n], the entry of each field; and the body."""

    entries: Structs
    fields: IntArray
    body: Words


def encode(jobs: Structs, layouts: IntArray, stored: Structs, room: int = 0, nbytes: int = 0) -> EncodedArrays | None:
    """Encodes layouts and fields.

    Args:
        jobs: JOB [n], as `number_jobs` leaves them; `result`, `pad`, `form` and `under_mask` are written.
        layouts: as `layout_rows` gives them; must live as long as the call, like all that the jobs point to.
        stored: STORED [m], with `kind`, `parent` and `low` of those that are parts of others; the rest is written.
        room: bytes of the body; with more it is tried again.
        nbytes: bytes of the fields, if they are known to be more.

    Returns:
        None if a job failed.
    """
    given, width = np.array(numbers_of(jobs)), abi.ENTRY.itemsize // 8
    slots = int(given[-1, _FIRST]) + 2 + max(int(given[-1, _COLUMNS]), 1) if jobs.size else 0
    line: Any = np.empty(2 * slots * width + jobs.size + 1, np.int64)
    first = address(line)
    source = address(jobs), jobs.size, address(layouts), stored.size, address(stored)
    places = first, first + 8 * slots * width, first + 8 * (line.size - 1), first + 16 * slots * width
    while True:
        body = np.empty(room, np.uint8)
        used = _core.maskpack_encode(*source, *places, address(body), room, threads_for(_ENCODED * max(room, nbytes)))
        if used > abi.NO_ROOM:
            break
        assert room < abi.NO_ROOM - used, "the core asks for the room that it has"
        room = abi.NO_ROOM - used
        numbers_of(jobs)[...] = given
    if used < 0:
        return None
    fields = line[2 * slots * width : -1].copy()
    entries: Any = line[slots * width : (slots + int(line[-1])) * width].copy()
    kept: Words = np.array(body[:used]) if room < _SMALL else body[:used]
    return EncodedArrays(structs(entries, abi.ENTRY), fields, kept)


SPANS = 64
"""Numbers for the spans of a row that there is room for at first. What is not needed is not touched."""


class MadeLayouts(NamedTuple):
    """Layouts of a batch: their table for the core, the memory that they lie in, and the numbers that their spans were
    given room for."""

    table: IntArray
    memory: IntArray
    room: int

    def layout(self, number: int) -> HostLayout:
        """A layout that lies in the memory, which others do that are given."""
        rows, width, *places = self.table[number * abi.LAYOUT_NUMBERS :][: abi.LAYOUT_NUMBERS].tolist()
        starts, counts, splits, bounds = ((place - address(self.memory)) // 8 for place in places)
        own = self.memory[splits : splits + rows + 1]
        spans = int(own[-1])
        table = SpanTable(self.memory[starts : starts + spans], self.memory[counts : counts + spans], own)
        return HostLayout(
            width, table, self.memory[bounds : bounds + rows + 1], (places[0], places[1], places[2], places[3])
        )


def make_layouts(
    origins: Structs, cuts: Structs, jobs: Structs, rows: int, room: int, nbytes: int
) -> MadeLayouts | None:
    """Makes the layouts of a batch; None if some offsets are none.

    Args:
        origins, cuts: ORIGIN [k] and, of each layout, CUT [m].
        jobs: JOB [n], those whose pads some origins trust; changed if they must not be.
        rows: B.
        room: numbers for the spans; with more it is tried again.
        nbytes: bytes of all masks.
    """
    count: int = origins.size + cuts.size
    scan: IntArray = np.empty((int(abi.ROWSCAN_NUMBERS) + 2) * rows + 2, np.int64)
    fixed = count * (2 * rows + 2)
    table: IntArray = np.empty(count * abi.LAYOUT_NUMBERS, np.int64)
    own: IntArray = table[origins.size * abi.LAYOUT_NUMBERS :]
    told = address(origins), origins.size, address(cuts), cuts.size, address(jobs)
    outs = address(table), address(own), rows, address(scan)
    while True:
        memory: IntArray = np.empty(fixed + room, np.int64)
        used: int = _core.maskpack_make_layouts(*told, *outs, address(memory), fixed + room, threads_for(nbytes))
        if used > abi.NO_ROOM:
            return None if used < 0 else MadeLayouts(own, memory, room)
        room = abi.NO_ROOM - used - fixed


class Placed(NamedTuple):
    """Where kernels write: int64 [units, rows, 4], where the parts of arrays that belong to each row begin, and what
    becomes of it; ENTRY [m]; the small arrays that the host writes, each with its place; and the size of the body."""

    spots: IntArray
    entries: Structs
    small: list[tuple[int, Words]]
    nbytes: int


def place(
    units: IntArray, fields: Structs, stats: IntArray, bounds: Sequence[IntArray], used: int, rows: int
) -> Placed:
    """Lays out the arrays of fields that kernels encode behind the first `used` bytes of a body.

    Args:
        units: int64 [n, len(Unit)], changed.
        fields: SETTLED [m]; `entry` is written, -1 for a field that does not fit its form.
        stats: int64 [n, rows, len(Stat)].
        bounds: int64 [rows + 1] of each layout.
    """
    count, most = len(units), len(units) + fields.size
    spots: IntArray = np.empty((count, rows, 4), np.int64)
    entries: Any = np.empty(most, abi.ENTRY)
    small: IntArray = np.empty((3 * count + 2 * fields.size, 3), np.int64)
    memory = np.empty(24 * rows * most + 64 * count, np.uint8)
    ends: IntArray = np.array([0, 0, *map(address, bounds)], np.int64)
    outs = address(spots), address(entries), address(small), address(memory), address(ends)
    fixed = address(units), count, address(fields), fields.size, address(stats), rows, address(ends) + 16, used
    nbytes = _core.maskpack_place(*fixed, *outs)
    if nbytes < 0:
        raise MemoryError(_NO_MEMORY)
    parts = [(at, memory[begin : begin + size]) for at, begin, size in small[: int(ends[1])].tolist()]
    return Placed(spots, entries[: int(ends[0])], parts, nbytes)


STAGED = frozenset(kind for kind in range(len(abi.KINDS)) if _core.maskpack_is_staged(kind))
"""The encodings that `stage` takes; the decode kernel does not read fields with others in them, but for columns."""


def stage(
    table: tuple[Structs, Words, int, int],
    layouts: IntArray,
    wanted: IntArray,
    pads: Structs,
    sizes: IntArray,
    padded: bool,
    tables: IntArray,
    used: int,
    found: IntArray,
) -> int:
    """Writes what the decode kernel reads beside a body (packed/cuda/job_table.py), behind the first `used` numbers of
    `tables`. Returns the numbers in use; if `tables` has fewer, not all are written.

    Args:
        table: its entries, its body, its rows, and those of fields without a layout.
        layouts: the table of layouts.
        wanted: int64 [n], entries.
        pads, sizes: ARRAY [k], the records of padded fields, and int64 [k], the bytes of their words.
        padded: whether the spans of layouts are written, too.
        found: AXIS_NUMBERS of each layout and of rows without one, a Source of each entry, and the place of the pads of
            each field; written.
    """
    entries, body, rows, dense_rows = table
    sources = address(found) + 8 * abi.AXIS_NUMBERS * (layouts.size // abi.LAYOUT_NUMBERS + 1)
    used = _core.maskpack_stage(
        address(entries), address(layouts), layouts.size // abi.LAYOUT_NUMBERS, address(body), rows, dense_rows, padded,
        address(wanted), len(wanted), address(pads), address(sizes), pads.size, address(tables), used, tables.size,
        address(found), sources, sources + 8 * abi.SOURCE_NUMBERS * len(wanted),
    )  # fmt: skip
    if used < 0:
        raise MemoryError(_NO_MEMORY)
    return used


def structs(line: IntArray, dtype: np.dtype[Any]) -> Structs:
    """Numbers as structs, in the same memory."""
    return np.ndarray(line.size * 8 // dtype.itemsize, dtype, line)


def numbers_of(structs: Structs) -> IntArray:
    """int64 [n, k]: the numbers of n contiguous structs, in the same memory. NumPy copies numbers faster."""
    return structs.view(np.int64).reshape(structs.size, structs.dtype.itemsize // 8)


def copied(own: Structs) -> Structs:
    """A copy of structs."""
    return structs(np.array(numbers_of(own)), own.dtype)


def places_of(structs: Structs) -> IntArray:
    """int64 [k, n, 3]: the ARRAYs that are the last parts of n contiguous structs, one of an ARRAY, three of others, in
    their memory."""
    numbers, count = structs.dtype.itemsize // 8, _count_places(structs)
    line = structs.view(np.int64).reshape(structs.size, numbers)[:, numbers - 3 * count :]
    return line.reshape(structs.size, count, 3).swapaxes(0, 1)  # a view: only the last dim is split


def _count_places(structs: Structs) -> int:
    return 1 if structs.dtype == abi.ARRAY else 3


def bytes_of(structs: Structs) -> int:
    """Bytes of all arrays of some structs."""
    places = places_of(structs)
    return int((places[..., 1] * places[..., 2]).sum())


def number_jobs(jobs: Structs) -> None:
    """Writes `first` of each job: the first of its entries among those of all jobs."""
    jobs["first"][1:] = np.cumsum(2 + np.maximum(jobs["columns"], 1))[:-1]


def decode(targets: Structs, parts: Structs, layouts: IntArray, rows: int, nbytes: int) -> None:
    """Decodes fields to tensors of `nbytes` in all.

    Args:
        targets: TARGET [n], each after the one that it is near to.
        parts: GIVEN [p], the rows of one body each.
        layouts: the table of the layouts of the result.
        rows: of the result.
    """
    places = address(targets), targets.size, address(parts), parts.size, address(layouts), rows
    done = _core.maskpack_decode(*places, nbytes >= _CACHE, threads_for(nbytes))
    if done == -2:
        raise IndexError("maskpack: a row is decoded that its table does not have")
    if done:
        raise MemoryError(_NO_MEMORY)


def mark(entries: Structs, layouts: IntArray, body: Words, rows: int, dense_rows: int) -> IntArray:
    """Where the rows of entries begin in their arrays, for `decode` of some rows and for `split`."""
    table = address(entries), entries.size, address(layouts), address(body), rows, dense_rows
    marks: IntArray = np.empty(0, np.int64)
    while True:
        used: int = _core.maskpack_mark(*table, address(marks), marks.size)
        if used < 0:
            raise MemoryError(_NO_MEMORY)
        if used <= marks.size:
            return marks
        marks = np.empty(used, np.int64)


def cut(layout: HostLayout, low: int, width: int) -> HostLayout:
    """The layout of the columns from `low` on, `width` of them."""
    row = layout_rows([layout])
    rows, whole = layout.bounds.size - 1, address(row)
    line = np.empty(2 * rows + 2, np.int64)
    splits = address(line)
    count = _core.maskpack_cut(whole, low, width, splits, splits + 8 * (rows + 1), 0, 0)
    spans = np.empty(2 * count, np.int64)
    starts = address(spans)
    places = starts, starts + 8 * count, splits, splits + 8 * (rows + 1)
    _core.maskpack_cut(whole, low, width, *places[2:], *places[:2])
    return HostLayout(width, SpanTable(spans[:count], spans[count:], line[: rows + 1]), line[rows + 1 :], places)


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
        if stored["kind"][at] == abi.AS_PART:
            layouts.append(cut(layouts[int(stored["parent"][at])], int(stored["low"][at]), width))
            continue
        line = np.empty(2 * rows + 2, np.int64)
        splits = address(line)
        row = address(stored) + at * abi.STORED.itemsize, address(body), rows, splits, splits + 8 * (rows + 1)
        count = _core.maskpack_read_layout(*row, 0, 0)
        spans = np.empty(2 * count, np.int64)
        starts = address(spans)
        places = starts, starts + 8 * count, *row[3:]
        found = _core.maskpack_read_layout(*row, *places[:2])
        table = SpanTable(spans[:found], spans[count : count + found], line[: rows + 1])
        layouts.append(HostLayout(width, table, line[rows + 1 :], places))
    return layouts


def mask_bits(layout: HostLayout) -> Words:
    """The mask of a layout as bits, uint8 [B, ceil(width / 8)], the first position in the lowest bit of its byte."""
    bits = np.empty((layout.bounds.size - 1, -(-layout.width // 8)), np.uint8)
    line = layout_rows([layout])
    _core.maskpack_mask_bits(address(line), address(bits))
    return bits


def layout_of_bits(bits: Words, width: int) -> HostLayout:
    """The inverse of `mask_bits`, of contiguous bits. Those behind the width are not read."""
    stored = np.zeros(1, abi.STORED)
    stored["kind"], stored["width"] = abi.AS_MASK, width
    return read_layouts(stored, bits.reshape(-1), len(bits))[0]


def split(
    entries: Structs, stored: Structs, layouts: IntArray, body: Words, rows: int, marks: IntArray, cuts: IntArray
) -> tuple[Structs, Structs]:
    """The parts of the rows of a table between `cuts`, int64 [parts + 1]: ENTRY [parts, n] and STORED [parts, m].
    `marks` are those of the table."""
    parts = cuts.size - 1
    out, out_stored = np.empty((parts, entries.size), abi.ENTRY), np.empty((parts, stored.size), abi.STORED)
    table = address(entries), entries.size, address(stored), stored.size, address(layouts), address(body), rows
    if _core.maskpack_split(*table, address(marks), address(cuts), parts, address(out), address(out_stored)):
        raise MemoryError(_NO_MEMORY)
    return out, out_stored


def compact(structs: Sequence[Structs], body: Words) -> Words:
    """A copy of the arrays of some structs, in a body of their own. Their ARRAYs are changed, to 0 if they hold no
    numbers."""
    sizes = [(own.dtype.itemsize // 8, _count_places(own)) for own in structs]
    line = np.array([(address(own), own.size, *size) for own, size in zip(structs, sizes, strict=True)], np.int64)
    to = np.empty(_core.maskpack_compact(address(line), len(line), address(body), 0), np.uint8)
    _core.maskpack_compact(address(line), len(line), address(body), address(to))
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
    count = layouts.size // abi.LAYOUT_NUMBERS
    table = address(entries), entries.size, address(layouts), count, address(body), body.size
    line = address(fields), fields.size, address(bools)
    return _core.maskpack_check_fields(*table, rows, dense_rows, most, *line)


def can_decode(entries: Structs, layouts: IntArray, body: Words, rows: int, dense_rows: int, fields: IntArray) -> bool:
    """Whether the fields of a table, of which some entries may not be needed, can be decoded from a body."""
    count = layouts.size // abi.LAYOUT_NUMBERS
    table = address(entries), entries.size, address(layouts), count, address(body), body.size
    return not _core.maskpack_check_fields(*table, rows, dense_rows, 1 << 62, address(fields), fields.size, 0)


# -------------------------------------------------------------------- prefixes


def order_prefixes(ids: IntArray, beside: IntArray | None, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of token ids [T] in the order of their trie, and the number of tokens that each shares with the one
    before it. Tokens are equal if their numbers `beside` [T, n] are, too. `bounds` [B + 1] are those of the rows. All
    are contiguous int64."""
    rows = bounds.size - 1
    order, shared = np.empty(rows, np.int64), np.empty(rows, np.int64)
    items = 0 if beside is None else beside.shape[1]
    places = address(ids), 0 if beside is None else address(beside), items, address(bounds), rows
    if _core.maskpack_order_prefixes(*places, address(order), address(shared)):
        raise MemoryError(_NO_MEMORY)
    return order, shared


# -------------------------------------------------------------------- palettes


def palette(words: Words) -> tuple[Words, Words] | None:
    """The number of each word of 4 bytes among the distinct ones, uint16 [n], and these, uint32; None if there are more
    than 65,536 of them."""
    line: Words = np.ascontiguousarray(words).reshape(-1).view(np.uint32)
    numbers: Words = np.empty(line.size, np.uint16)
    distinct: Words = np.empty(1 << 16, np.uint32)
    count = _core.maskpack_palette(address(line), line.size, address(numbers), address(distinct))
    if count == -2:
        raise MemoryError(_NO_MEMORY)
    return None if count < 0 else (numbers, np.array(distinct[:count]))
