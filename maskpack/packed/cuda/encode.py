"""Encoding on a device: packed values that lie there to a table, whose body is all that crosses to the host.

    packed values, forms of the last batch --measure--> what each row takes --host--> places --write--> body

The first batch with some fields is encoded on the host, which chooses the forms (table.py); the next ones take these,
as `BatchPlan` does on the host. Fields that do not fit their form any more, and forms that the kernels do not write,
are left to the host. Two synchronisations: one for the measures, one for the body, which lies in pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, to_pinned, words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path
from maskpack.core.native import Structs
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import encode_job as job
from maskpack.packed.cuda.encode_job import LEFT_OUT, MISFIT, NEAR_USED, ODD, WRITTEN, Stat, Unit
from maskpack.packed.table import Encoded, Table, device_forms, stored_alone, wholes_first

_WRITTEN_HERE = {
    *(native.PLAIN, native.NARROW, native.BLOCKS, native.BITMAP, native.RLE, native.ARANGE, native.DELTA),
    *(native.SPARSE, native.CONCAT),
}
_UNKNOWN = -1
_MOST = (1 << 31) - 2 * job.CHUNK
"""Words of a row that the kernels can count."""
_A_LOOK = 64
"""One in so many batches is encoded on the host, which looks for better forms."""
_COST_WORDS, _HEADER = 1 << 20, 64
"""`cost` of a FORM is bytes for so many words; bytes that a field may take beyond 2 % more. (core.c)"""
_NOTHING = (0, 1, 0)


class _Form(NamedTuple):
    """The form of a unit, as in `Unit`."""

    kind: int
    number: int = 0
    second: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, table: Table, at: int) -> _Form:
        """The form of an entry."""
        entry = table.entries[at]
        kind, size = int(entry["kind"]), int(entry["size"])
        if kind == native.BITMAP:
            first, second = table.array(entry["b"]).view(f"<i{size}").tolist()
            return cls(kind, first, second)
        return cls(kind, int(entry["number"]), 0, int(entry["a"]["size"]))


@dataclass
class Forms:
    """How the fields of a batch were encoded on the host.

    Attributes:
        jobs: JOB [n], each behind those that it refers to.
        order: int64 [n], the place of each tensor among them.
        kinds: the encoding of each job.
        inner: of each job the forms of its units: one, or those of its columns.
        uses: how many batches took them.
        misses: how often each job did not fit.
        stale: whether the next batch goes to the host.
    """

    jobs: Structs
    order: IntArray
    kinds: list[int]
    inner: list[list[_Form]]
    uses: int = 0
    misses: dict[int, int] = field(default_factory=dict[int, int])
    stale: bool = False

    @classmethod
    def of(cls, encoded: Encoded) -> Forms:
        """The forms of a batch that the host encoded."""
        (jobs, order, _), table = encoded.jobs, encoded.table
        kinds = jobs["form"]["kind"].tolist()
        inner: list[list[_Form]] = [[] for _ in kinds]
        for place, at in zip(order.tolist(), table.fields.tolist(), strict=True):
            entry = table.entries[at]
            if entry["kind"] == native.CONCAT:
                kinds[place] = native.CONCAT
            elif kinds[place] != int(entry["kind"]):
                kinds[place] = _UNKNOWN  # of no words
            inner[place] = [_Form.of(table, part) for part in table.parts(at)]
        return cls(jobs.copy(), np.array(order), kinds, inner)

    def want_host(self) -> bool:
        """Whether the next batch goes to the host."""
        self.uses += 1
        return self.stale or self.uses % _A_LOOK == 0

    def missed(self, places: Iterable[int]) -> None:
        """Notes the jobs that did not fit. The host chooses new forms for the next batch, but once only: a job that
        does not fit those either stays with the host until it looks again."""
        for place in places:
            self.misses[place] = self.misses.get(place, 0) + 1
            self.stale |= self.misses[place] == 1

    def renewed(self, encoded: Encoded) -> Forms:
        """The forms of a later batch, which the host encoded."""
        new = Forms.of(encoded)
        new.misses = self.misses if self.stale else {}
        return new


class OnDevice(NamedTuple):
    """What was encoded on a device.

    Attributes:
        table: the fields `numbers`, by their numbers among all tensors.
        odd: the numbers of bools with bytes other than 0 and 1.
    """

    table: Table
    numbers: list[int]
    odd: list[int]


def encoded(
    tensors: Sequence[FieldForm],
    values: Mapping[int, Tensor],
    row_pads: Mapping[Path, Words],
    layouts: Mapping[str, RowLayout],
    rows: int,
    dense_rows: int,
) -> OnDevice | None:
    """Encodes the tensors that lie on one GPU, and whose forms are known from an earlier batch with these fields; None
    if there is none that the kernels can encode.

    Args:
        tensors: the forms of all tensors of the batch.
        values: packed values [T, *F], or [B, *F] without a layout, by their numbers among all tensors.
        row_pads: words of the pads of rows.
        layouts: all layouts, on the host.
    """
    device = _device_of(values)
    if device is None or not rows:
        return None
    forms: Forms | None = device_forms.get(_key(tensors, rows))
    if forms is None or forms.want_host():
        return None
    own = {number: x for number, x in values.items() if x.device == device}
    pads = {number: row_pads[form.path] for number, form in enumerate(tensors) if form.path in row_pads}
    return _Encoder(forms, own, pads, wholes_first(layouts), rows, dense_rows, device).run()


def learn(tensors: Sequence[FieldForm], values: Mapping[int, Tensor], rows: int, done: Encoded) -> None:
    """Remembers how the host encoded all tensors of a batch, if some lie on a GPU."""
    if _device_of(values) is not None and rows:
        key = _key(tensors, rows)
        before: Forms | None = device_forms.get(key)
        device_forms.keep(key, Forms.of(done) if before is None else before.renewed(done))


def _key(tensors: Sequence[FieldForm], rows: int) -> tuple[Any, ...]:
    return rows.bit_length(), *((form.path, form.dtype, form.layout, form.shape, form.hints) for form in tensors)


def _device_of(values: Mapping[int, Tensor]) -> torch.device | None:
    """The first device of some values that has kernels."""
    devices = dict.fromkeys(x.device for x in values.values())
    return next((device for device in devices if uses_triton(device, call="compress")), None)


class _Field(NamedTuple):
    """A field and its units."""

    tensor: int
    place: int
    kind: int
    units: range


class _Encoder:
    """Encodes the tensors of one batch."""

    def __init__(
        self,
        forms: Forms,
        tensors: Mapping[int, Tensor],
        row_pads: Mapping[int, Words],
        layouts: Mapping[str, RowLayout],
        rows: int,
        dense_rows: int,
        device: torch.device,
    ) -> None:
        self._forms, self._tensors, self._row_pads, self._layouts = forms, tensors, row_pads, layouts
        self._rows, self._dense_rows, self._device = rows, dense_rows, device
        self._names = tuple(layouts)
        self._offsets = [layout.row_offsets for layout in layouts.values()]
        self._held: list[Tensor] = []
        self._units: list[Unit] = []
        self._lengths: list[IntArray] = []  # words of each row, of each unit
        self._fields: dict[int, _Field] = {}  # by place among the jobs
        self._left: set[int] = set()
        self._small: list[tuple[int, Words]] = []  # arrays that the host writes
        self._entries: list[tuple[Any, ...]] = []
        self._entry_of: dict[int, int] = {}
        self._used = 0
        self._places: IntArray = np.zeros(0, np.int64)
        self._met: dict[tuple[Any, ...], tuple[int, int]] = {}

    def run(self) -> OnDevice | None:
        """Encodes all that fit."""
        self._list_fields()
        if not self._units:
            return None
        staged = self._staged()
        stats = self._measured(staged)
        stored, head = stored_alone(self._layouts, self._rows)
        self._used = head.nbytes
        self._places = np.zeros((len(self._units), self._rows, 4), np.int64)
        self._places[:, :, 3] = LEFT_OUT
        odd = [own.tensor for own in self._fields.values() if (stats[own.units, :, 0] & ODD).any()]
        for place, own in self._fields.items():
            if self._refers_to_left(place) or not self._placed(own, stats[own.units.start : own.units.stop]):
                self._left.add(place)
        pads = {number: self._kept(array) for number, array in self._row_pads.items() if number in self._tensors}
        body, differing = self._written(staged)
        self._left |= {
            place for place, own in self._fields.items() if differing[own.units.start : own.units.stop].any()
        }
        self._left |= {place for place in self._fields if self._refers_to_left(place)}
        body[: head.nbytes] = head
        for at, array in self._small:
            body[at : at + array.nbytes] = array.view(np.uint8)
        self._forms.missed(sorted(self._left))
        kept = sorted(
            (own for place, own in self._fields.items() if place not in self._left), key=lambda own: own.tensor
        )
        if not kept:
            return None
        entries: Any = np.zeros(len(self._entries), native.ENTRY)
        for at, (kind, layout, items, size, number, first, second, a, b, c) in enumerate(self._entries):
            entries[at] = kind, layout, items, size, number, first, second, a, b, c
        fields = np.array([self._entry_of[own.place] for own in kept], np.int64)
        places: Any = np.array([pads.get(own.tensor, _NOTHING) for own in kept], native.PLACE)
        table = Table(self._rows, self._dense_rows, self._names, stored, entries, fields, places, body)
        table.__dict__["layouts"] = dict(self._layouts)
        return OnDevice(table, [own.tensor for own in kept], odd)

    # ---------------------------------------------------------------- what is to be encoded

    def _list_fields(self) -> None:
        jobs, kinds = self._forms.jobs, self._forms.kinds
        for tensor, place in sorted(enumerate(self._forms.order.tolist()), key=lambda pair: pair[1]):
            x = self._tensors.get(tensor)
            if x is None or self._forms.misses.get(place, 0) > 1:
                continue
            kind, row = kinds[place], jobs[place]
            named = [int(row[name]) for name in ("near", "head", "tail")]
            needed = named[:1] if kind == native.BLOCKS else named[1:] if kind == native.CONCAT else []
            needed = [other for other in needed if other >= 0]
            if any(other not in self._fields or len(self._fields[other].units) > 1 for other in needed):
                continue
            units = self._units_of(place, x, needed)
            if units:
                first = len(self._units)
                self._units += units
                self._fields[place] = _Field(tensor, place, kind, range(first, first + len(units)))

    def _units_of(self, place: int, x: Tensor, needed: Sequence[int]) -> list[Unit]:
        """The units of a field; none if the kernels cannot encode it."""
        kind, row = self._forms.kinds[place], self._forms.jobs[place]
        layout, items, size = int(row["layout"]), int(row["items"]), int(row["size"])
        offsets = self._offsets[layout] if layout >= 0 else None
        rows = self._rows if layout >= 0 else self._dense_rows
        lengths: IntArray = np.full(self._rows, items, np.int64) if offsets is None else np.diff(offsets) * items
        if offsets is None:
            lengths[rows:] = 0
        inner = self._forms.inner[place]
        if (
            any(form.kind not in _WRITTEN_HERE for form in inner)
            or int(lengths.max(initial=0)) > _MOST
            or not lengths.any()
        ):
            return []
        held = words(x).contiguous()
        self._held.append(held)
        refs = [self._fields[other].units.start for other in needed]
        near = refs[0] if kind == native.BLOCKS and refs else -1
        head, tail = refs if kind == native.CONCAT else (-1, -1)
        own, bools = items // len(inner), int(row["integers"] == native.BOOLS)
        self._lengths += [lengths // len(inner)] * len(inner)
        return [
            Unit(
                form.kind, held.data_ptr(), size, own, items, column * own, rows, layout, form.number, form.second,
                form.bytes, near, head, tail, bools,
            )
            for column, form in enumerate(inner)
        ]  # fmt: skip

    def _refers_to_left(self, place: int) -> bool:
        kind, row = self._forms.kinds[place], self._forms.jobs[place]
        names = ("near",) if kind == native.BLOCKS else ("head", "tail") if kind == native.CONCAT else ()
        return any(int(row[name]) in self._left for name in names)

    # ---------------------------------------------------------------- on the device

    def _staged(self) -> Tensor:
        """int64: the units, then the tables, on the device."""
        count, each = len(self._units), self._rows + 1
        width = len(Unit._fields)
        staging = self._pinned(count * width + each * len(self._offsets), torch.int64)
        line = staging.numpy()
        units = line[: count * width].reshape(count, width)
        units[...] = self._units
        bounds = units[:, Unit._fields.index("bounds")]
        bounds[bounds >= 0] *= each
        for at, offsets in enumerate(self._offsets):
            line[count * width + at * each :][:each] = offsets
        return staging.to(self._device, non_blocking=True)

    def _pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda")

    def _measured(self, staged: Tensor) -> IntArray:
        from maskpack.packed.cuda import encode_kernel as kernels  # Triton is imported on first use

        count, width = len(self._units), len(Stat._fields)
        stats = torch.empty(count * self._rows * width, dtype=torch.int64, device=self._device)
        kernels.measure(staged, staged[count * len(Unit._fields) :], stats, count, self._rows)
        found = to_pinned(stats).numpy().reshape(count, self._rows, width)
        if self._dense_rows < self._rows:
            for number, unit in enumerate(self._units):
                found[number, unit.rows :] = 0
        return found

    def _written(self, staged: Tensor) -> tuple[Words, Words]:
        """The body, and whether a row of a unit was not equal to what it should be, uint8 [units]."""
        from maskpack.packed.cuda import encode_kernel as kernels

        count = len(self._units)
        end = -(-self._used // 8) * 8
        line = torch.zeros(end + count, dtype=torch.uint8, device=self._device)
        again = self._pinned(count * len(Unit._fields) + self._places.size, torch.int64)
        width = len(Unit._fields)
        array = again.numpy()
        array[: count * width].reshape(count, width)[...] = self._units
        bounds = array[: count * width].reshape(count, width)[:, Unit._fields.index("bounds")]
        bounds[bounds >= 0] *= self._rows + 1
        array[count * width :] = self._places.reshape(-1)
        there = again.to(self._device, non_blocking=True)
        kernels.write(there, staged[count * width :], there[count * width :], line, count, self._rows, end)
        found = to_pinned(line).numpy()
        return found[: self._used], found[end:]

    # ---------------------------------------------------------------- where arrays go

    def _reserved(self, size: int, count: int) -> tuple[int, int, int]:
        """A new PLACE in the body."""
        at = -(-self._used // 8) * 8
        self._used = at + size * count
        return at, size, count

    def _numbers(self, numbers: IntArray, *, signed: bool = False) -> tuple[int, int, int]:
        """The PLACE of numbers, equal ones once, in as few bytes as they need."""
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        if numbers.size > 1 and (numbers == numbers[0]).all():
            numbers = numbers[:1]
        place = self._reserved(_bytes_for(low, high, signed), numbers.size)
        self._small.append((place[0], numbers.astype(f"<{'i' if signed else 'u'}{place[1]}")))
        return place

    def _kept(self, pads: Words) -> tuple[int, int, int]:
        """The PLACE of the pads of rows, [B] or [B, 2]."""
        line = np.ascontiguousarray(pads)
        place = self._reserved(line.itemsize * (line.shape[1] if line.ndim > 1 else 1), len(line))
        self._small.append((place[0], line.reshape(-1)))
        return place

    def _placed(self, own: _Field, stats: IntArray) -> bool:
        """Lays out the arrays of a field, and its entries; False if it does not fit its form."""
        row = self._forms.jobs[own.place]
        before, small = self._used, len(self._small)
        if (stats[:, :, 0] & MISFIT).any():
            return False
        if own.kind == native.CONCAT:
            self._add(own, row, native.CONCAT, *(self._entry_of[int(row[name])] for name in ("head", "tail")))
            return True
        unit = own.units.start
        lengths = self._lengths[unit]
        stored = index = None
        if own.kind == native.DICTIONARY:
            firsts, index = _repeated(stats[0, :, 6], lengths)
            if firsts.size == self._rows:
                return False
            stored = firsts
            ways = self._places[unit, :, 3]
            ways[...] = unit * self._rows + firsts[index]
            ways[firsts] = WRITTEN
        elif own.kind != native.COLUMNS and self._is_known(own, row, stats[0]):
            return True
        nbytes, made = 0, len(self._entries)
        for at, number in enumerate(own.units):
            places = self._arrays(number, stats[at], stored)
            nbytes += sum(size * count for _, size, count in places)
            near = -1
            if (stats[at, :, 0] & NEAR_USED).any():
                near = self._entry_of[int(row["near"])]
            form = self._units[number]
            base = 0 if form.kind == native.BITMAP else form.number
            self._entries.append((form.kind, int(row["layout"]), form.items, form.size, base, -1, near, *places))
        if own.kind == native.DICTIONARY:
            assert index is not None
            assert stored is not None
            a, b = self._numbers(index), self._numbers(lengths[stored] // int(row["items"]))
            nbytes += a[1] * a[2] + b[1] * b[2]
            self._add(own, row, native.DICTIONARY, made, -1, a, b)
        elif own.kind == native.COLUMNS:
            self._add(own, row, native.COLUMNS, made, len(own.units))
        else:
            self._entry_of[own.place] = made
        if _is_larger(nbytes, row["form"], int(lengths.sum()) * len(own.units)):
            del self._entries[made:], self._small[small:]
            self._entry_of.pop(own.place, None)
            self._used = before
            self._places[own.units.start : own.units.stop, :, 3] = LEFT_OUT
            return False
        return True

    def _is_known(self, own: _Field, row: Any, stats: IntArray) -> bool:
        """Whether a field has the words of an earlier one, as far as their hashes say; its rows are then compared."""
        unit = own.units.start
        form = self._units[unit]
        if form.near >= 0 or own.kind == native.DICTIONARY:
            return False
        key = (
            form.kind,
            form.number,
            form.second,
            form.bytes,
            int(row["layout"]),
            form.items,
            form.size,
            stats[:, 6].tobytes(),
        )
        known = self._met.get(key)
        if known is None:
            self._met[key] = unit, own.place
            return False
        other, place = known
        if place not in self._entry_of:
            return False
        self._places[unit, :, 3] = other * self._rows + np.arange(self._rows)
        self._entry_of[own.place] = self._entry_of[place]
        return True

    def _add(
        self, own: _Field, row: Any, kind: int, first: int, second: int, a: Any = _NOTHING, b: Any = _NOTHING
    ) -> None:
        """The entry of a field that other entries are parts of."""
        items, size = int(row["items"]), int(row["size"])
        self._entries.append((kind, int(row["layout"]), items, size, 0, first, second, a, b, _NOTHING))
        self._entry_of[own.place] = len(self._entries) - 1

    def _arrays(self, number: int, stats: IntArray, stored: IntArray | None) -> list[tuple[int, int, int]]:
        """The PLACEs a, b and c of a unit, of all rows or of the stored ones, and where the parts of rows begin."""
        unit, rows = self._units[number], slice(None) if stored is None else stored
        lengths, stats = self._lengths[number][rows], stats[rows]
        counts, places = stats[:, 1], _Places(self._places[number], rows)
        places.ways(WRITTEN)
        if unit.kind in (native.PLAIN, native.NARROW):
            size = unit.size if unit.kind == native.PLAIN else unit.bytes
            return [self._parts(places, 0, lengths, size), _NOTHING, _NOTHING]
        if unit.kind == native.BLOCKS:
            blocks = -(-lengths // job.BLOCK)
            return [
                self._parts(places, 0, blocks, 1),
                self._parts(places, 1, blocks, unit.size),
                self._parts(places, 2, counts, 4),
            ]
        if unit.kind == native.BITMAP:
            if int(stats[np.flatnonzero(lengths)[0], 2]) == unit.second:  # the first word of all is stored first
                unit = self._units[number] = unit._replace(number=unit.second, second=unit.number)
            pair = np.array([unit.number, unit.second], np.int64)
            a, b = self._parts(places, 0, (lengths + 7) // 8, 1), self._reserved(unit.size, 2)
            self._small.append((b[0], pair.astype(f"<i{unit.size}")))
            return [a, b, _NOTHING]
        if unit.kind == native.ARANGE:
            places.ways(LEFT_OUT)
            filled = np.flatnonzero(lengths)
            before = np.maximum(np.searchsorted(filled, np.arange(lengths.size), side="right") - 1, 0)
            return [self._numbers(stats[filled[before], 2], signed=True), _NOTHING, _NOTHING]
        a, filled = self._numbers(counts), lengths > 0
        if unit.kind == native.SPARSE:
            wide, some = _bytes_for(0, int(stats[:, 5].max(initial=0)), False), counts.any()
            b = self._parts(places, 1, counts, wide) if some else _NOTHING
            c = self._parts(places, 2, counts, unit.size)
            self._units[number] = unit._replace(b_size=wide, c_size=unit.size)
            if not some:
                places.ways(LEFT_OUT)
            return [a, b, c]
        least, most = int(stats[filled, 4].min()), int(stats[:, 5].max())
        low, high = int(stats[filled, 2].min()), int(stats[filled, 3].max())
        b, b_size = self._stretches(places, 1, np.maximum(counts - 1, 0), least, most, False)
        c, c_size = self._stretches(places, 2, counts, low, high, True)
        self._units[number] = unit._replace(b_size=b_size, c_size=c_size)
        if not b_size and not c_size:
            places.ways(LEFT_OUT)
        return [a, b, c]

    def _parts(self, places: _Places, array: int, counts: IntArray, size: int) -> tuple[int, int, int]:
        """The PLACE of an array of `size` bytes a number, of which each row has `counts`."""
        ends = cumulated(counts)
        place = self._reserved(size, int(ends[-1]))
        places.begin(array, place[0] + ends[:-1] * size)
        return place

    def _stretches(
        self, places: _Places, array: int, counts: IntArray, low: int, high: int, signed: bool
    ) -> tuple[tuple[int, int, int], int]:
        """The PLACE of numbers between `low` and `high`, and the bytes of one if the kernel writes them."""
        total = int(counts.sum())
        if total > 1 and low != high:
            size = _bytes_for(low, high, signed)
            return self._parts(places, array, counts, size), size
        return self._numbers(np.full(total, low, np.int64), signed=signed), 0


class _Places(NamedTuple):
    """Where the arrays of some rows of a unit go."""

    all: IntArray
    rows: Any

    def begin(self, array: int, at: IntArray) -> None:
        """Writes where the part of an array that belongs to each row begins."""
        self.all[self.rows, array] = at

    def ways(self, way: int) -> None:
        """Writes what becomes of the rows."""
        self.all[self.rows, 3] = way


def _bytes_for(low: int, high: int, signed: bool) -> int:
    """The bytes of the numbers between two of them."""
    low, high = min(low, 0), max(high, 0)
    for size in (1, 2, 4):
        bits = 8 * size - signed
        if high < 1 << bits and low >= (-(1 << bits) if signed else 0):
            return size
    return 8


def _repeated(hashes: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """The first of each of the rows that differ, and of each row its number among them, as far as hashes say."""
    keys = hashes ^ (lengths * 0x1E3779B97F4A7C15)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    return first[order], rank[inverse.reshape(-1)]


def _is_larger(nbytes: int, form: Any, total: int) -> bool:
    """Whether so many bytes for so many words are 2 % more than when the form was chosen."""
    cost = int(form["cost"]) * total
    return (nbytes - _HEADER) * _COST_WORDS > cost + cost // 50
