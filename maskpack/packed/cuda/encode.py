"""Encoding on a device: packed values that lie there to a table, whose body is all that crosses to the host.

    packed values, forms of the last batch --measure--> what each row takes --host--> places --write--> body

The first batch with some fields is encoded on the host, which chooses the forms (table.py); the next ones take these,
as `BatchPlan` does on the host. Fields that do not fit their form any more, and forms that the kernels do not write,
are left to the host. Of one batch in 64, the kernels copy some rows behind the body, by which the host renews the forms
(`KnownForms.renewed`). Two synchronisations: one for the measures, one for the body, which lies in pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, sent, to_pinned, words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path
from maskpack.core.native import Structs
from maskpack.core.pads import Pads
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm
from maskpack.packed.table import EncodedTable, Table, device_forms, of_values, stored_alone, wholes_first

_WRITTEN_HERE = {abi.PLAIN, abi.BLOCKS, abi.RLE, abi.DELTA, abi.CONCAT}
CHUNK = 1024
"""Words that a program reads at once: whole blocks of the encoding BLOCKS."""
MOST = (1 << 31) - 2 * CHUNK
"""Words of a row that the kernels can count."""
_A_LOOK = 64
"""Of one in so many batches, the host looks at a sample."""
_SAMPLE_ROWS, _SAMPLE_NBYTES, _NEIGHBOURS = 16, 1 << 20, 4
"""The most rows of a sample, and their most bytes if they are more than one row; as many lie together in the batch, as
rows of one prompt do."""
_GAIN = 1024
"""Fewest bytes of a sample that a better form saves."""
_NOTHING = (0, 1, 0)
_NO_BOOL = -2
"""The bits that no bool has."""


class EncodeRecipe(NamedTuple):
    """What the kernels are told of some tensors of all batches of one kind.

    Attributes:
        tensors: the numbers of those that they encode among all tensors, in the order in which they are encoded.
        fields: SETTLED [n], these.
        units: UNIT [m + k], without addresses: m of these, then one that copies each of all k tensors.
        owners: int64 [m + k], the number of the tensor of each unit.
        num_units: m.
    """

    tensors: list[int]
    fields: Structs
    units: Structs
    owners: IntArray
    num_units: int


@dataclass
class KnownForms:
    """How the fields of a batch were encoded on the host.

    Attributes:
        jobs: JOB [n], each behind those that it refers to.
        order: the place of each tensor among them.
        names: the layouts that the jobs refer to.
        forms: by tensor, if kernels can encode it: its encoding; and int64 [k, 2], the encoding and the `number` of its
            words, or of those of each column.
        uses: how many batches took them since a sample was looked at.
        misses: how often each tensor did not fit.
        stale: whether the next batch goes to the host.
    """

    jobs: Structs
    order: IntArray
    names: tuple[str, ...]
    forms: dict[int, tuple[int, IntArray]]
    uses: int = 0
    misses: dict[int, int] = field(default_factory=dict[int, int])
    stale: bool = False
    _recipes: dict[Any, EncodeRecipe] = field(default_factory=dict[Any, EncodeRecipe])

    @classmethod
    def of(cls, encoded: EncodedTable) -> KnownForms:
        """The forms of a batch that the host encoded."""
        table, jobs, order = encoded
        known = cls(jobs.copy(), order, table.names, {})
        for tensor, (place, at) in enumerate(zip(order.tolist(), table.fields.tolist(), strict=True)):
            kind, parts = int(table.entries[at]["kind"]), table.entries[table.parts(at)]
            if kind in (abi.CONCAT, jobs[place]["form"]["kind"]) and _WRITTEN_HERE.issuperset(parts["kind"].tolist()):
                known.forms[tensor] = kind, np.stack([parts["kind"], parts["number"]], 1)
        return known

    def are_due(self) -> bool:
        """Notes one more batch that took them; whether a sample of it is looked at."""
        self.uses += 1
        return self.uses >= _A_LOOK

    def missed(self, tensors: Iterable[int]) -> None:
        """Notes the tensors that did not fit. The host chooses new forms for the next batch, but once only: a tensor
        that does not fit those either stays with the host until a sample gives it another form."""
        for tensor in tensors:
            self.misses[tensor] = self.misses.get(tensor, 0) + 1
            self.stale |= self.misses[tensor] == 1

    def renewed(self, whole: OnDevice, sampled: Sequence[int], sample: EncodedTable) -> KnownForms:
        """The forms for the batches after one that kernels encoded, the `whole`, of which the host encoded a sample,
        rows of the tensors `sampled`; the same ones if none of them is better.

        Bytes a word are compared: those of the known form in the whole batch, since few rows say nothing of what a
        dictionary saves; those of the form that the host chooses for the sample in the sample, where what is stored
        once weighs most. The new form must take an eighth less, and `_GAIN` bytes of the sample. It may then take an
        eighth more than in the sample; if it takes more, or does not fit, it is as for each form: the tensor goes to
        the host. One that the host encoded this time takes its new form in any case, for one more try.
        """
        self.uses = 0
        known = {number: _cost(whole.table, at) for at, number in enumerate(whole.numbers)}
        found, new = KnownForms.of(sample), replace(self, jobs=self.jobs.copy(), forms={**self.forms}, _recipes={})
        new.misses, better = dict.fromkeys(self.misses, 1), False
        for at, number in enumerate(sampled):
            cost, count = _cost(sample.table, at), sample.table.count_words(int(sample.table.fields[at]))
            before = known.get(number, math.inf)
            if at in found.forms and cost <= before * 7 / 8 and (before - cost) * count >= _GAIN * abi.COST_WORDS:
                new.forms[number], better = found.forms[at], True
                new.jobs["form"]["cost"][self.order[number]] = cost * 9 / 8
        return new if better else self

    def recipe(self, tensors: Iterable[int], layouts: Iterable[str], rows: int, dense_rows: int) -> EncodeRecipe:
        """What the kernels are told of some tensors, of which they encode those that they can, in a batch with these
        `layouts`, in this order."""
        out = frozenset(tensor for tensor, count in self.misses.items() if count > 1)
        key = tuple(tensors), tuple(layouts), out, rows, dense_rows
        if key not in self._recipes:
            self._recipes[key] = self._new_recipe(key[0], out, key[1], rows, dense_rows)
        return self._recipes[key]

    def _new_recipe(
        self, tensors: Sequence[int], out: Collection[int], names: Sequence[str], rows: int, dense_rows: int
    ) -> EncodeRecipe:
        jobs = self.jobs[self.order[list(tensors)]]
        copies: Structs = np.zeros(len(jobs), abi.UNIT)  # PLAIN
        copies["size"], copies["items"], copies["stride"] = jobs["size"], jobs["items"], jobs["items"]
        layouts = [*(names.index(name) if name in names else -1 for name in self.names), -1]
        copies["bounds"] = np.array(layouts)[jobs["layout"]]
        copies["rows"] = np.where(copies["bounds"] >= 0, rows, dense_rows)
        copies["bools"] = np.where(jobs["integers"] == abi.BOOLS, _NO_BOOL, 0)
        for name in _REFERENCES:
            copies[name] = -1
        taken: list[int] = []
        units: list[Structs] = []
        lines: list[tuple[int, ...]] = []
        known, count = {-1: (-1, -1)}, 0  # by job: its field, and its only unit
        for number, copy, job in sorted(zip(tensors, copies, jobs, strict=True), key=lambda one: self.order[one[0]]):
            kind, parts = self.forms.get(number, (None, ()))
            refs = [int(job[name]) if kind == own else -1 for name, own in _REFERENCES.items()]
            if number in out or kind is None or not all(ref in known for ref in refs):
                continue
            own: Structs = np.repeat(copy, len(parts))
            own["kind"], own["number"] = np.transpose(parts)
            own["items"] //= len(parts)
            own["offset"] = np.arange(len(parts)) * own["items"]
            for name, ref in zip(_REFERENCES, refs, strict=True):
                own[name] = known[ref][1]
            if len(parts) == 1:
                known[int(self.order[number])] = len(taken), count
            shape, others = copy[["bounds", "items", "size"]].tolist(), [known[ref][0] for ref in refs]
            lines.append((kind, count, len(parts), *shape, *others, job["form"]["cost"], -1))
            taken.append(number)
            units.append(own)
            count += len(parts)
        settled: Structs = np.array(lines, abi.SETTLED)
        owners: IntArray = np.array([*np.repeat(taken, settled["units"]), *tensors], np.int64)
        return EncodeRecipe(taken, settled, np.concatenate([*units, copies]), owners, count)


_REFERENCES = {"near": abi.BLOCKS, "head": abi.CONCAT, "tail": abi.CONCAT}
"""The members of JOB, SETTLED and UNIT that name other fields, and the encoding that reads them."""


def _cost(table: Table, number: int) -> float:
    """Bytes of tensor `number` of a table, for COST_WORDS words."""
    nbytes = native.bytes_of(table.entries[table.own_entries(number)])
    return nbytes * abi.COST_WORDS / max(table.count_words(int(table.fields[number])), 1)


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
    if device is None or forms is None or forms.stale:
        return None
    own = {number: words(x).contiguous() for number, x in values.items() if x.device == device}
    layouts = wholes_first(layouts)
    recipe = forms.recipe(own, layouts, rows, dense_rows)
    longest = max((layout.max_length for layout in layouts.values()), default=1)
    if not recipe.tensors or recipe.fields["items"].max() * max(longest, 1) > MOST:
        return None
    units = recipe.units.copy()
    units["words"] = [own[number].data_ptr() for number in recipe.owners.tolist()]
    numbered = {number: pads[form.path] for number, form in enumerate(tensors) if form.path in pads}
    encoder = Encoder(tensors, forms, recipe, units, [layout.row_offsets for layout in layouts.values()], rows, device)
    found = encoder.written(encoder.measured()[0], layouts, dense_rows, numbered)
    forms.missed(found.left)
    return found if found.numbers else None


def forms_of(tensors: Sequence[FieldForm], rows: int) -> KnownForms | None:
    """How the fields of a batch on a GPU were encoded before."""
    return device_forms.get(_key(tensors, rows))


def learn_forms(tensors: Sequence[FieldForm], values: Mapping[int, Tensor], rows: int, done: EncodedTable) -> None:
    """Remembers how the host encoded all tensors of a batch, if some lie on a GPU."""
    if device_of(values) is not None and rows:
        before, forms = forms_of(tensors, rows), KnownForms.of(done)
        forms.misses = before.misses if before is not None and before.stale else {}
        device_forms.keep(_key(tensors, rows), forms)


def _key(tensors: Sequence[FieldForm], rows: int) -> tuple[Any, ...]:
    return rows.bit_length(), *((form.path, form.dtype, form.layout, form.shape, form.hints) for form in tensors)


def device_of(values: Mapping[int, Tensor]) -> torch.device | None:
    """The first device of some values that has kernels."""
    devices = dict.fromkeys(x.device for x in values.values())
    return next((device for device in devices if uses_triton(device, call="compress")), None)


@dataclass
class Encoder:
    """The two launches for one batch.

    Attributes:
        tensors: the forms of all tensors.
        forms: how they were encoded before.
        recipe: what is encoded.
        units: those of the recipe, with addresses; changed.
        bounds: int64 [rows + 1] of each layout, where rows begin in packed values; empty if all tensors are padded.
        rows: B.
    """

    tensors: Sequence[FieldForm]
    forms: KnownForms
    recipe: EncodeRecipe
    units: Structs
    bounds: Sequence[IntArray]
    rows: int
    device: torch.device

    def __post_init__(self) -> None:
        self._told = sent(self.device, self.units.view(np.int64), *self.bounds)
        self._tables = self._told[self.units.size * abi.UNIT_NUMBERS :]

    def measured(self, *others: Tensor) -> tuple[Structs, list[Words]]:
        """STAT [units, rows]: what the forms of all rows take; and copies of `others`, int32 [n] on the device, n even,
        on the host. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel  # Triton is imported on first use

        shape = self.recipe.num_units, self.rows
        stats = torch.empty(math.prod(shape) * abi.STAT_NUMBERS, dtype=torch.int64, device=self.device)
        encode_kernel.measure(self._told, self._tables, stats, *shape)
        parts = [stats, *(x.view(torch.int64) for x in others)]
        ends = np.cumsum([part.numel() for part in parts])
        line, *copies = np.split(to_pinned(*parts).numpy(), ends[:-1])
        return line.view(abi.STAT).reshape(shape), [copy.view(np.int32) for copy in copies]

    def written(
        self, stats: Structs, layouts: Mapping[str, RowLayout], dense_rows: int, pads: Mapping[int, Pads]
    ) -> OnDevice:
        """The table of all fields that fit their form; renews the forms if it is time. One synchronisation."""
        from maskpack.packed.cuda import encode_kernel

        recipe, rows = self.recipe, self.rows
        stored, head = stored_alone(layouts, rows)
        fields, bounds = recipe.fields.copy(), [layout.row_offsets for layout in layouts.values()]
        placed = native.place(self.units[: recipe.num_units], fields, stats, bounds, head.nbytes, rows)
        small, used, at_pads = [(0, head), *placed.small], placed.nbytes, dict[int, tuple[int, int, int]]()
        for number in recipe.tensors:
            if number in pads:
                line = pads[number].records
                used = _multiple_of_8(used)
                at_pads[number] = used, line.shape[1], len(line)
                small.append((used, line.reshape(-1).view(np.uint8)))
                used += line.nbytes
        differing = _multiple_of_8(used)
        sample = self._sample(bounds, dense_rows, differing + 8)
        units = self.units[: recipe.num_units + len(sample.spots)]
        line = torch.zeros(int(sample.ends[-1]), dtype=torch.uint8, device=self.device)
        told = sent(self.device, units.view(np.int64), placed.spots, sample.spots.view(np.int64))
        at_spots = units.size * abi.UNIT_NUMBERS
        encode_kernel.write(told, self._tables, told[at_spots:], line, units.size, rows, differing)
        found = to_pinned(line).numpy()
        body = found[:used]
        for at, array in small:
            body[at : at + array.nbytes] = array
        # rows that hashes alone take for equal are too rare to be named
        fits = (fields["entry"] >= 0) & (not found[differing])
        kept: list[int] = sorted(np.flatnonzero(fits).tolist(), key=lambda at: recipe.tensors[at])
        numbers = [recipe.tensors[at] for at in kept]
        left = [number for number, one in zip(recipe.tensors, fits, strict=True) if not one]
        places: Any = np.array([at_pads.get(number, _NOTHING) for number in numbers], abi.ARRAY)
        own = rows, dense_rows, tuple(layouts), stored, placed.entries, fields["entry"][kept], places, body
        table = Table(*own, is_compact=not left)
        odd = recipe.owners[: recipe.num_units][(stats["flags"] & abi.IS_ODD).any(1)].tolist()
        done = OnDevice(table, numbers, odd, left)
        if sample.rows.size:
            self._renew(done, sample, [found[begin:end] for begin, end in pairwise(sample.ends)])
        return done

    def _sample(self, bounds: Sequence[IntArray], dense_rows: int, begin: int) -> Sample:
        """Rows to copy, behind the first `begin` bytes; none if it is not time."""
        copies, rows = self.units[self.recipe.num_units :], self.rows
        if not self.forms.are_due():
            return Sample(np.zeros(0, np.int64), np.zeros((0, rows), abi.SPOT), np.array([begin]))
        lengths = np.stack([*map(np.diff, bounds), np.arange(rows) < dense_rows])
        nbytes = lengths[copies["bounds"]] * (copies["items"] * copies["size"])[:, None]
        most = min(_SAMPLE_ROWS, rows // 4, _SAMPLE_NBYTES * rows // max(int(nbytes.sum()), 1))
        number = np.arange(max(most, 1))
        groups = -(-number.size // _NEIGHBOURS)
        index = number // _NEIGHBOURS * rows // groups + number % _NEIGHBOURS
        own = nbytes[:, index]
        ends = begin + cumulated(_multiple_of_8(own.sum(1)))
        spots: Structs = np.zeros(nbytes.shape, abi.SPOT)
        spots["way"] = abi.LEFT_OUT
        spots["way"][:, index] = abi.WRITTEN
        spots["at"][:, index, 0] = ends[:-1, None] + np.cumsum(own, 1) - own
        return Sample(index, spots, ends)

    def _renew(self, whole: OnDevice, sample: Sample, values: Sequence[Words]) -> None:
        """Renews the forms after a batch."""
        sampled: list[int] = self.recipe.owners[self.recipe.num_units :].tolist()
        table, rows = whole.table, sample.rows
        layouts = {name: layout.take(rows) for name, layout in table.layouts.items()}
        size = layouts, rows.size, int((rows < table.dense_rows).sum())
        done = of_values([self.tensors[number] for number in sampled], values, *size, by_kernels=True)
        if done is not None:  # None for odd bools, which are refused
            key = _key(self.tensors, self.rows)
            device_forms.keep(key, self.forms.renewed(whole, sampled, done))


class Sample(NamedTuple):
    """Some rows of all tensors, which the kernel copies, or none.

    Attributes:
        rows: int64 [n], their numbers.
        spots: SPOT [k, B].
        ends: int64 [k + 1], where the rows of each tensor begin, and the end.
    """

    rows: IntArray
    spots: Structs
    ends: IntArray


def _multiple_of_8(nbytes: Any) -> Any:
    """Bytes, or an array of them, rounded up."""
    return -(-nbytes // 8) * 8
