"""Encoding on a device: packed values that lie there to a table, whose body is all that crosses to the host.

    packed values, forms of the last batch --measure--> what each row takes --host--> places --write--> body

The first batch with some fields is encoded on the host, which chooses the forms (table.py); the next ones take these,
as `BatchPlan` does on the host. Fields that do not fit their form any more, and forms that the kernels do not write,
are left to the host. Two synchronisations: one for the measures, one for the body, which lies in pinned memory.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, sent, to_pinned, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path
from maskpack.core.native import Structs
from maskpack.core.pads import Pads
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm
from maskpack.packed.table import EncodedTable, Table, device_forms, stored_alone, wholes_first

_WRITTEN_HERE = {abi.PLAIN, abi.BLOCKS, abi.RLE, abi.DELTA, abi.CONCAT}
CHUNK = 1024
"""Words that a program reads at once: whole blocks of the encoding BLOCKS."""
MOST = (1 << 31) - 2 * CHUNK
"""Words of a row that the kernels can count."""
_A_LOOK = 64
"""One in so many batches is encoded on the host, which looks for better forms."""
_NOTHING = (0, 1, 0)
_NO_BOOL = -2
"""The bits that no bool has."""
Unit = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]  # all are int64
    "Unit", abi.UNIT.names or (), defaults=[0] * abi.UNIT_NUMBERS
)
"""A row of the table of the kernels; abi.h says what its numbers are."""
WORDS, COUNTS, ROWS, BOUNDS = map(Unit._fields.index, ("words", "counts", "rows", "bounds"))


class EncodeRecipe(NamedTuple):
    """What the kernels are told of some fields of all batches of one kind.

    Attributes:
        tensors: the numbers of the fields among all tensors, in the order in which they are encoded.
        fields: SETTLED [n].
        units: int64 [m, len(Unit)], without addresses.
        owners: int64 [m], the field of each unit, by its place in `tensors`.
    """

    tensors: list[int]
    fields: Structs
    units: IntArray
    owners: IntArray


@dataclass
class KnownForms:
    """How the fields of a batch were encoded on the host.

    Attributes:
        jobs: JOB [n], each behind those that it refers to.
        order: the place of each tensor among them.
        names: the layouts that the jobs refer to.
        units: by tensor, if kernels can encode it: Units with the form of its words, one or those of its columns.
        kinds: the encodings of these tensors.
        uses: how many batches took them.
        misses: how often each tensor did not fit.
        stale: whether the next batch goes to the host.
    """

    jobs: Structs
    order: list[int]
    names: tuple[str, ...]
    units: dict[int, list[Any]]
    kinds: dict[int, int]
    uses: int = 0
    misses: dict[int, int] = field(default_factory=dict[int, int])
    stale: bool = False
    _recipes: dict[Any, EncodeRecipe] = field(default_factory=dict[Any, EncodeRecipe])

    @classmethod
    def of(cls, encoded: EncodedTable) -> KnownForms:
        """The forms of a batch that the host encoded."""
        table, jobs, order = encoded
        units: dict[int, list[Any]] = {}
        kinds: dict[int, int] = {}
        for tensor, (place, at) in enumerate(zip(order.tolist(), table.fields.tolist(), strict=True)):
            kind, parts = int(table.entries[at]["kind"]), table.parts(at)
            has_words = kind in (abi.CONCAT, jobs[place]["form"]["kind"])
            if has_words and all(table.entries[part]["kind"] in _WRITTEN_HERE for part in parts):
                kinds[tensor], units[tensor] = kind, [_unit_of(table, part) for part in parts]
        return cls(jobs.copy(), order.tolist(), table.names, units, kinds)

    def want_host(self) -> bool:
        """Whether the next batch goes to the host."""
        return self.stale or self.uses >= _A_LOOK

    def missed(self, tensors: Iterable[int]) -> None:
        """Notes the tensors that did not fit. The host chooses new forms for the next batch, but once only: a tensor
        that does not fit those either stays with the host until it looks again."""
        for tensor in tensors:
            self.misses[tensor] = self.misses.get(tensor, 0) + 1
            self.stale |= self.misses[tensor] == 1

    def renewed(self, encoded: EncodedTable) -> KnownForms:
        """The forms of a later batch, which the host encoded."""
        new = KnownForms.of(encoded)
        new.misses = self.misses if self.stale else {}
        return new

    def recipe(self, tensors: Iterable[int], layouts: Iterable[str], rows: int, dense_rows: int) -> EncodeRecipe:
        """What the kernels are told of those of some tensors that they can encode, in a batch with these `layouts`, in
        this order."""
        out = frozenset(tensor for tensor, count in self.misses.items() if count > 1)
        key = tuple(tensors), tuple(layouts), out, rows, dense_rows
        if key not in self._recipes:
            self._recipes[key] = self._new_recipe({*key[0]} - out, key[1], rows, dense_rows)
        return self._recipes[key]

    def _new_recipe(self, tensors: Collection[int], names: Sequence[str], rows: int, dense_rows: int) -> EncodeRecipe:
        taken: list[int] = []
        units: list[Any] = []
        lines: list[tuple[int, ...]] = []
        fields = {-1: (-1, -1, True)}  # by job: its field, the first of its units, and whether it has no other
        for tensor, place in sorted(enumerate(self.order), key=lambda pair: pair[1]):
            row, own = self.jobs[place], self.units.get(tensor, [])
            refs = _referred(row, self.kinds.get(tensor))
            if tensor not in tensors or not own or not all(fields.get(ref, (0, 0, False))[2] for ref in refs):
                continue
            near, head, tail = (fields[ref][1] for ref in refs)
            items, size, width = int(row["items"]), int(row["size"]), int(row["items"]) // len(own)
            layout = -1 if row["layout"] < 0 else names.index(self.names[int(row["layout"])])
            numbers = [fields[ref][0] for ref in refs]
            fields[place] = len(taken), len(units), len(own) == 1
            line = self.kinds[tensor], len(units), len(own), layout, items, size, *numbers, row["form"]["cost"], -1
            lines.append(line)
            taken.append(tensor)
            units += [
                form._replace(
                    size=size, items=width, stride=items, offset=column * width, bounds=layout,
                    rows=rows if layout >= 0 else dense_rows, near=near, head=head, tail=tail,
                    bools=_NO_BOOL if row["integers"] == abi.BOOLS else 0,
                )
                for column, form in enumerate(own)
            ]  # fmt: skip
        settled: Any = np.array(lines, abi.SETTLED)
        table: IntArray = np.array(units, np.int64).reshape(-1, abi.UNIT_NUMBERS)
        return EncodeRecipe(taken, settled, table, np.repeat(np.arange(len(taken)), settled["units"]))


def _unit_of(table: Table, at: int) -> Any:
    """A Unit with the form of an entry."""
    entry = table.entries[at]
    return Unit(int(entry["kind"]), number=int(entry["number"]))


def _referred(job: Any, kind: int | None) -> tuple[int, int, int]:
    """The jobs that one in an encoding is near to, and put together from; -1 for none."""
    near, head, tail = (int(job[name]) for name in ("near", "head", "tail"))
    return (near, -1, -1) if kind == abi.BLOCKS else (-1, head, tail) if kind == abi.CONCAT else (-1, -1, -1)


class OnDevice(NamedTuple):
    """What was encoded on a device.

    Attributes:
        table: the fields `numbers`, by their numbers among all tensors.
        odd: the numbers of bools with bytes other than 0 and 1.
        left: the numbers of fields that did not fit.
    """

    table: Table
    numbers: list[int]
    odd: list[int]
    left: list[int]


def encode_on_device(
    tensors: Sequence[FieldForm],
    values: Mapping[int, Tensor],
    pads: Mapping[Path, Pads],
    layouts: Mapping[str, RowLayout],
    rows: int,
    dense_rows: int,
) -> OnDevice | None:
    """Encodes the tensors that lie on one GPU, and whose forms are known from an earlier batch with these fields; None
    if there is none that the kernels can encode.

    Args:
        tensors: the forms of all tensors of the batch.
        values: packed values [T, *F], or [B, *F] without a layout, by their numbers among all tensors.
        pads: what is under the masks.
        layouts: all layouts, on the host.
    """
    device = device_of(values)
    forms = None if device is None or not rows else forms_of(tensors, rows)
    if device is None or forms is None or forms.want_host():
        return None
    own = {number: x for number, x in values.items() if x.device == device}
    layouts = wholes_first(layouts)
    recipe = forms.recipe(own, layouts, rows, dense_rows)
    longest = max((layout.max_length for layout in layouts.values()), default=1)
    if not recipe.tensors or recipe.fields["items"].max() * max(longest, 1) > MOST:
        return None
    held = [words(own[number]).contiguous() for number in recipe.tensors]
    units: IntArray = np.array(recipe.units)
    units[:, WORDS] = np.array([x.data_ptr() for x in held], np.int64)[recipe.owners]
    bounds = [layout.row_offsets for layout in layouts.values()]
    numbered = {number: pads[form.path] for number, form in enumerate(tensors) if form.path in pads}
    encoder = Encoder(recipe, units, bounds, rows, device)
    found = encoder.written(encoder.measured()[0], layouts, dense_rows, numbered)
    forms.missed(found.left)
    forms.uses += 1
    return found if found.numbers else None


def forms_of(tensors: Sequence[FieldForm], rows: int) -> KnownForms | None:
    """How the fields of a batch on a GPU were encoded before."""
    return device_forms.get(_key(tensors, rows))


def learn_forms(tensors: Sequence[FieldForm], values: Mapping[int, Tensor], rows: int, done: EncodedTable) -> None:
    """Remembers how the host encoded all tensors of a batch, if some lie on a GPU."""
    if device_of(values) is not None and rows:
        before = forms_of(tensors, rows)
        device_forms.keep(_key(tensors, rows), KnownForms.of(done) if before is None else before.renewed(done))


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
        self._told = sent(device, units, *bounds)
        self._tables = self._told[units.size :]

    def measured(self, *others: Tensor) -> tuple[IntArray, list[Words]]:
        """int64 [units, rows, STAT_NUMBERS]: what the forms of all rows take; and copies of `others`, int32 [n] on the
        device, n even, on the host. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel  # Triton is imported on first use

        shape = len(self._units), self._rows, abi.STAT_NUMBERS
        stats = torch.empty(math.prod(shape), dtype=torch.int64, device=self._device)
        encode_kernel.measure(self._told, self._tables, stats, *shape[:2])
        parts = [stats, *(x.view(torch.int64) for x in others)]
        ends = np.cumsum([part.numel() for part in parts])
        line, *copies = np.split(to_pinned(*parts).numpy(), ends[:-1])
        return line.reshape(shape), [copy.view(np.int32) for copy in copies]

    def written(
        self,
        stats: IntArray,
        layouts: Mapping[str, RowLayout],
        dense_rows: int,
        pads: Mapping[int, Pads],
    ) -> OnDevice:
        """The table of all fields that fit their form. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel

        recipe, units, rows, count = self._recipe, self._units, self._rows, len(self._units)
        stored, head = stored_alone(layouts, rows)
        fields = recipe.fields.copy()
        bounds = [layout.row_offsets for layout in layouts.values()]
        placed = native.place(units, fields, stats, bounds, head.nbytes, rows)
        small, used, at_pads = [(0, head), *placed.small], placed.nbytes, dict[int, tuple[int, int, int]]()
        for number in recipe.tensors:
            if number in pads:
                line = pads[number].records
                used = -(-used // 8) * 8
                at_pads[number] = used, line.shape[1], len(line)
                small.append((used, line.reshape(-1).view(np.uint8)))
                used += line.nbytes
        end = -(-used // 8) * 8
        line = torch.zeros(end + 1, dtype=torch.uint8, device=self._device)
        told = sent(self._device, units, placed.spots)
        encode_kernel.write(told, self._tables, told[units.size :], line, count, rows, end)
        found = to_pinned(line).numpy()
        body = found[:used]
        for at, array in small:
            body[at : at + array.nbytes] = array
        fits = (fields["entry"] >= 0) & (
            not found[end]
        )  # rows that hashes alone take for equal are too rare to be named
        kept: list[int] = sorted(np.flatnonzero(fits).tolist(), key=lambda at: recipe.tensors[at])
        numbers = [recipe.tensors[at] for at in kept]
        left = [number for number, one in zip(recipe.tensors, fits, strict=True) if not one]
        places: Any = np.array([at_pads.get(number, _NOTHING) for number in numbers], abi.ARRAY)
        own = rows, dense_rows, tuple(layouts), stored, placed.entries, fields["entry"][kept], places, body
        table = Table(*own, known=dict(layouts), is_compact=not left)
        odd = recipe.owners[(stats[:, :, 0] & abi.IS_ODD).any(1)].tolist()
        return OnDevice(table, numbers, [recipe.tensors[at] for at in odd], left)
