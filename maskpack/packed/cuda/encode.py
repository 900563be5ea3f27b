"""Encoding on a device: packed values that lie there to a table, whose body is all that crosses to the host.

    packed values, forms of the last batch --measure--> what each row takes --host--> places --write--> body

The first batch with some fields is encoded on the host, which chooses the forms (table.py); the next ones take these,
as `BatchPlan` does on the host. Fields that do not fit their form any more, and forms that the kernels do not write,
are left to the host. Two synchronisations: one for the measures, one for the body, which lies in pinned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, to_pinned, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path
from maskpack.core.native import Structs
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm
from maskpack.packed.cuda import encode_job
from maskpack.packed.cuda.encode_job import Stat, Unit
from maskpack.packed.table import EncodedTable, Table, device_forms, stored_alone, wholes_first

_WRITTEN_HERE = {abi.PLAIN, abi.NARROW, abi.BLOCKS, abi.BITMAP, abi.RLE, abi.ARANGE, abi.DELTA, abi.CONCAT}
_UNKNOWN = -1
MOST = (1 << 31) - 2 * encode_job.CHUNK
"""Words of a row that the kernels can count."""
_A_LOOK = 64
"""One in so many batches is encoded on the host, which looks for better forms."""
_NOTHING = (0, 1, 0)
WORDS, COUNTS, ROWS, BOUNDS, _BOOLS = (
    Unit._fields.index(name) for name in ("words", "counts", "rows", "bounds", "bools")
)


class UnitForm(NamedTuple):
    """The form of a unit, as in `Unit`."""

    kind: int
    number: int = 0
    second: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, table: Table, at: int) -> UnitForm:
        """The form of an entry."""
        entry = table.entries[at]
        kind, size = int(entry["kind"]), int(entry["size"])
        if kind == abi.BITMAP:
            first, second = table.array(entry["b"]).view(f"<i{size}").tolist()
            return cls(kind, first, second)
        return cls(kind, int(entry["number"]), 0, int(entry["a"]["size"]))


class EncodeRecipe(NamedTuple):
    """What the kernels are told of some fields of all batches of one kind.

    Attributes:
        tensors: the numbers of the fields among all tensors, in the order in which they are encoded.
        places: the same among the jobs.
        fields: SETTLED [n].
        units: int64 [m, len(Unit)], without addresses.
        owners: int64 [m], the field of each unit, by its place in `tensors`.
        items: most words of an element.
    """

    tensors: list[int]
    places: list[int]
    fields: Structs
    units: IntArray
    owners: IntArray
    items: int


@dataclass
class KnownForms:
    """How the fields of a batch were encoded on the host.

    Attributes:
        jobs: JOB [n], each behind those that it refers to.
        order: the place of each tensor among them.
        names: the layouts that the jobs refer to.
        kinds: the encoding of each job.
        inner: of each job the forms of its units: one, or those of its columns.
        uses: how many batches took them.
        misses: how often each job did not fit.
        stale: whether the next batch goes to the host.
    """

    jobs: Structs
    order: list[int]
    names: tuple[str, ...]
    kinds: list[int]
    inner: list[list[UnitForm]]
    uses: int = 0
    misses: dict[int, int] = field(default_factory=dict[int, int])
    stale: bool = False
    _recipes: dict[Any, EncodeRecipe] = field(default_factory=dict[Any, EncodeRecipe])

    @classmethod
    def of(cls, encoded: EncodedTable) -> KnownForms:
        """The forms of a batch that the host encoded."""
        (jobs, order, names), table = encoded.jobs, encoded.table
        kinds = jobs["form"]["kind"].tolist()
        inner: list[list[UnitForm]] = [[] for _ in kinds]
        for place, at in zip(order.tolist(), table.fields.tolist(), strict=True):
            entry = table.entries[at]
            if entry["kind"] == abi.CONCAT:
                kinds[place] = abi.CONCAT
            elif kinds[place] != int(entry["kind"]):
                kinds[place] = _UNKNOWN  # of no words
            inner[place] = [UnitForm.of(table, part) for part in table.parts(at)]
        return cls(jobs.copy(), order.tolist(), names, kinds, inner)

    def want_host(self) -> bool:
        """Whether the next batch goes to the host."""
        return self.stale or self.uses >= _A_LOOK

    def missed(self, places: Iterable[int]) -> None:
        """Notes the jobs that did not fit. The host chooses new forms for the next batch, but once only: a job that
        does not fit those either stays with the host until it looks again."""
        for place in places:
            self.misses[place] = self.misses.get(place, 0) + 1
            self.stale |= self.misses[place] == 1

    def renewed(self, encoded: EncodedTable) -> KnownForms:
        """The forms of a later batch, which the host encoded."""
        new = KnownForms.of(encoded)
        new.misses = self.misses if self.stale else {}
        return new

    def recipe(self, tensors: Iterable[int], layouts: Iterable[str], rows: int, dense_rows: int) -> EncodeRecipe:
        """What the kernels are told of those of some tensors that they can encode, in a batch with these `layouts`, in
        this order."""
        out = frozenset(place for place, count in self.misses.items() if count > 1)
        key = tuple(tensors), tuple(layouts), out, rows, dense_rows
        if key not in self._recipes:
            self._recipes[key] = self._new_recipe(set(key[0]), key[1], out, rows, dense_rows)
        return self._recipes[key]

    def _new_recipe(
        self, tensors: set[int], names: Sequence[str], out: Collection[int], rows: int, dense_rows: int
    ) -> EncodeRecipe:
        units: list[Unit] = []
        owners: list[int] = []
        lines: list[tuple[int, ...]] = []
        number_of: dict[int, int] = {}  # of a job among the fields
        taken: list[int] = []
        for tensor, place in sorted(enumerate(self.order), key=lambda pair: pair[1]):
            kind, row, inner = self.kinds[place], self.jobs[place], self.inner[place]
            near, head, tail = (int(row[name]) for name in ("near", "head", "tail"))
            refs = [near] if kind == abi.BLOCKS and near >= 0 else [head, tail] if kind == abi.CONCAT else []
            fits = kind != _UNKNOWN and all(form.kind in _WRITTEN_HERE for form in inner)
            known = all(ref in number_of and lines[number_of[ref]][2] == 1 for ref in refs)
            if tensor not in tensors or place in out or not fits or not known:
                continue
            firsts = [lines[number_of[ref]][1] for ref in refs]
            named = (firsts[0], -1, -1) if kind == abi.BLOCKS and refs else (-1, *(firsts or (-1, -1)))
            items, size = int(row["items"]), int(row["size"])
            layout = -1 if row["layout"] < 0 else names.index(self.names[int(row["layout"])])
            own, bools = items // len(inner), int(row["integers"] == abi.BOOLS)
            numbers = [number_of[ref] for ref in refs]
            of_fields = (*numbers, -1, -1) if kind == abi.BLOCKS and refs else (-1, *(numbers or (-1, -1)))
            number_of[place] = len(taken)
            cost = int(row["form"]["cost"])
            lines.append((kind, len(units), len(inner), layout, items, size, *of_fields, cost, _UNKNOWN))
            owners += [len(taken)] * len(inner)
            taken.append(tensor)
            units += [
                Unit(
                    form.kind, 0, size, own, items, column * own, rows if layout >= 0 else dense_rows, layout,
                    number=form.number, second=form.second, bytes=form.bytes, near=named[0], head=named[1],
                    tail=named[2], bools=bools,
                )
                for column, form in enumerate(inner)
            ]  # fmt: skip
        return EncodeRecipe(
            taken,
            list(number_of),
            np.array(lines, abi.SETTLED),
            np.array(units, np.int64).reshape(-1, len(Unit._fields)),
            np.array(owners, np.int64),
            max((line[4] for line in lines), default=0),
        )


class OnDevice(NamedTuple):
    """What was encoded on a device.

    Attributes:
        table: the fields `numbers`, by their numbers among all tensors.
        odd: the numbers of bools with bytes other than 0 and 1.
        left: the places among the jobs of fields that did not fit.
    """

    table: Table
    numbers: list[int]
    odd: list[int]
    left: list[int]


def encode_on_device(
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
    device = device_of(values)
    if device is None or not rows:
        return None
    forms = forms_of(tensors, rows)
    if forms is None or forms.want_host():
        return None
    own = {number: x for number, x in values.items() if x.device == device}
    layouts = wholes_first(layouts)
    recipe = forms.recipe(own, layouts, rows, dense_rows)
    longest = max((layout.max_length for layout in layouts.values()), default=1)
    if not recipe.tensors or recipe.items * max(longest, 1) > MOST:
        return None
    held = [words(own[number]).contiguous() for number in recipe.tensors]
    units: IntArray = np.array(recipe.units)
    units[:, WORDS] = np.array([x.data_ptr() for x in held], np.int64)[recipe.owners]
    bounds = [layout.row_offsets for layout in layouts.values()]
    pads = {number: row_pads[form.path] for number, form in enumerate(tensors) if form.path in row_pads}
    encoder = Encoder(recipe, units, bounds, rows, device)
    found = encoder.written(encoder.measured()[0], layouts, dense_rows, pads)
    forms.missed(found.left)
    forms.uses += 1
    return found if found.numbers else None


def forms_of(tensors: Sequence[FieldForm], rows: int) -> KnownForms | None:
    """How the fields of a batch on a GPU were encoded before."""
    return device_forms.get(_key(tensors, rows))


def learn_forms(tensors: Sequence[FieldForm], values: Mapping[int, Tensor], rows: int, done: EncodedTable) -> None:
    """Remembers how the host encoded all tensors of a batch, if some lie on a GPU."""
    if device_of(values) is not None and rows:
        key = _key(tensors, rows)
        before: KnownForms | None = device_forms.get(key)
        device_forms.keep(key, KnownForms.of(done) if before is None else before.renewed(done))


def _key(tensors: Sequence[FieldForm], rows: int) -> tuple[Any, ...]:
    return rows.bit_length(), *((form.path, form.dtype, form.layout, form.shape, form.hints) for form in tensors)


def device_of(values: Mapping[int, Tensor]) -> torch.device | None:
    """The first device of some values that has kernels."""
    devices = dict.fromkeys(x.device for x in values.values())
    return next((device for device in devices if uses_triton(device, call="compress")), None)


class Encoder:
    """The two launches for one batch.

    Args:
        recipe: what is encoded.
        units: those of the recipe, with addresses; changed.
        bounds: int64 [rows + 1] of each layout, where rows begin in packed values; empty if all tensors are padded.
        rows: B.
    """

    def __init__(
        self, recipe: EncodeRecipe, units: IntArray, bounds: Sequence[IntArray], rows: int, device: torch.device
    ) -> None:
        self._recipe, self._units, self._rows, self._device = recipe, units, rows, device
        size = units.size + sum(own.size for own in bounds)
        self._staging = self._pinned(size + units.size + 4 * rows * len(units))
        self._told = self._sent(self._staging[:size], units, *bounds)

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")

    def _sent(self, staging: Tensor, *arrays: IntArray) -> Tensor:
        """Arrays, one behind the other, on the device."""
        np.concatenate([array.reshape(-1) for array in arrays], out=staging.numpy())
        return staging.to(self._device, non_blocking=True)

    def measured(self, *others: Tensor) -> tuple[IntArray, list[Words]]:
        """int64 [units, rows, len(Stat)]: what the forms of all rows take; and copies of `others`, int32 [n] on the
        device, n even, on the host. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel  # Triton is imported on first use

        count, width = len(self._units), len(Stat._fields)
        fresh = torch.empty if (self._units[:, ROWS] == self._rows).all() else torch.zeros
        size = count * self._rows * width
        stats = fresh(size, dtype=torch.int64, device=self._device)
        encode_kernel.measure(self._told, self._told[self._units.size :], stats, count, self._rows)
        out = self._pinned(size + sum(x.numel() // 2 for x in others))
        out[:size].copy_(stats, non_blocking=True)
        ends = np.cumsum([size, *(x.numel() // 2 for x in others)]).tolist()
        for x, begin, end in zip(others, ends[:-1], ends[1:], strict=True):
            out[begin:end].copy_(x.view(torch.int64), non_blocking=True)
        if stats.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        line = out.numpy()
        copies = [line[begin:end].view(np.int32) for begin, end in itertools.pairwise(ends)]
        return line[:size].reshape(count, self._rows, width), copies

    def written(
        self,
        stats: IntArray,
        layouts: Mapping[str, RowLayout],
        dense_rows: int,
        row_pads: Mapping[int, Words],
    ) -> OnDevice:
        """The table of all fields that fit their form. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel

        recipe, units, rows, count = self._recipe, self._units, self._rows, len(self._units)
        stored, head = stored_alone(layouts, rows)
        fields = recipe.fields.copy()
        bounds = [layout.row_offsets for layout in layouts.values()]
        placed = native.place(units, fields, stats, bounds, head.nbytes, rows)
        small, used, pads = placed.small, placed.nbytes, dict[int, tuple[int, int, int]]()
        for number in recipe.tensors:
            if number in row_pads:
                line = np.ascontiguousarray(row_pads[number])
                used = -(-used // 8) * 8
                pads[number] = used, line.itemsize * (line.shape[1] if line.ndim > 1 else 1), len(line)
                small.append((used, line.reshape(-1).view(np.uint8)))
                used += line.nbytes
        end = -(-used // 8) * 8
        line = torch.zeros(end + count, dtype=torch.uint8, device=self._device)
        sent = self._sent(self._staging[self._told.numel() :], units, placed.spots)
        encode_kernel.write(sent, self._told[units.size :], sent[units.size :], line, count, rows, end)
        odd = (stats[:, :, 0] & abi.IS_ODD).any(1) & (units[:, _BOOLS] != 0)
        found = to_pinned(line).numpy()
        body, differing = found[:used], found[end:]
        body[: head.nbytes] = head
        for at, array in small:
            body[at : at + array.nbytes] = array
        left = _left_out(fields, recipe.owners[differing != 0].tolist())
        kept = sorted(set(range(fields.size)) - left, key=lambda at: recipe.tensors[at])
        numbers = [recipe.tensors[at] for at in kept]
        places: Any = np.array([pads.get(number, _NOTHING) for number in numbers], abi.ARRAY)
        own = rows, dense_rows, tuple(layouts), stored, placed.entries, fields["entry"][kept], places, body
        table = Table(*own, known=dict(layouts), is_compact=not left)
        odd_ones = [recipe.tensors[int(at)] for at in recipe.owners[odd]]
        return OnDevice(table, numbers, odd_ones, [recipe.places[at] for at in sorted(left)])


def _left_out(fields: Structs, differing: Iterable[int]) -> set[int]:
    """The fields that did not fit, that had `differing` rows, and that refer to such ones."""
    left = {*np.flatnonzero(fields["entry"] < 0).tolist(), *differing}
    entries = {int(fields["entry"][at]) for at in left}
    for at in range(fields.size):
        named = {int(fields[name][at]) for name in ("near", "head", "tail")}
        if named & left or int(fields["entry"][at]) in entries:  # it refers to one, or has its entry
            left.add(at)
            entries.add(int(fields["entry"][at]))
    return left
