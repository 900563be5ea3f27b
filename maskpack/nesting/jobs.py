"""What the core is told of a batch: where its layouts come from, and a job for each of its tensors.

forms of a signature --> JobTable: what the tensors are, in an order in which each is behind those that its hints name
a plan, once -----------> HostJobs: origins, cuts, jobs
each batch: addresses --> make_layouts --> read (nest) or encode (compress)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import address, words
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, path_of
from maskpack.core.native import Structs
from maskpack.core.pads import Pad, PadValue, has_records, pad_words, record_size, trial_of
from maskpack.layout import scan
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.axes import WHOLE, Source
from maskpack.nesting.schema import FieldForm

if TYPE_CHECKING:
    from maskpack.nesting.plan import BatchPlan, Seen

_NO_LAYOUT = -1
_AT, _LIMIT = native.places_in(abi.ORIGIN, "at", "limit")
_ROWS = native.places_in(abi.ORIGIN, "rows") + native.places_in(abi.JOB, "rows")
PADDED, PACKED, RECORDS = native.places_in(abi.FIELD, "padded", "packed", "pads")
"""Places of addresses in a job, which begins with its field."""
_WAYS = {"mask": abi.OF_MASK, "prefix": abi.OF_PREFIX, "jagged": abi.OF_OFFSETS, "given": abi.OF_LAYOUT}


def words_of_one(form: FieldForm) -> int:
    """Words of one element of a field."""
    assert form.dtype is not None
    return math.prod(form.shape) * (2 if form.dtype.itemsize == 16 else 1)


def size_of_word(form: FieldForm) -> int:
    """Bytes of a word of a field; items of 16 bytes have two."""
    assert form.dtype is not None
    return min(form.dtype.itemsize, 8)


# -------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Parts:
    """The layouts of a batch: where each comes from, and which are columns of others.

    Attributes:
        names: of the layouts, those that are columns of others last, which is how they are stored.
        origins: the sources that are no cuts.
        cuts: of each layout, its origin, and its first column, or WHOLE, and width.
    """

    names: tuple[str, ...]
    origins: list[Source]
    cuts: list[tuple[int, int, int]]

    @classmethod
    def of(cls, sources: Mapping[str, Source], widths: Mapping[str, int], given: Mapping[str, RowLayout]) -> Parts:
        """Of the sources of layouts by name. `given` are known layouts, also those that lengths tell."""
        owners = {id(layout): name for name, layout in given.items()}

        def apart(name: str) -> tuple[Source, int, int]:
            source, width = sources[name], widths.get(name, 0)
            if source.way in ("given", "lengths", "cu_seqlens"):
                key = source.key if source.way == "given" else name
                whole, low = given[key].__dict__.get("part_of", (None, WHOLE))
                owner = owners.get(id(whole))
                return (Source("given", key), WHOLE, width) if owner is None else (Source("given", owner), low, width)
            return source._replace(low=WHOLE, width=0), source.low, width

        found = {name: apart(name) for name in sources}
        names = sorted(found, key=lambda name: found[name][1] != WHOLE)
        numbers: dict[Source, int] = {}
        own = [found[name] for name in names]
        cuts = [(numbers.setdefault(origin, len(numbers)), low, width) for origin, low, width in own]
        return cls(tuple(names), list(numbers), cuts)

    def whole_of(self, place: int) -> int | None:
        """The layout that another one is columns of, if it is one of the batch."""
        origin, low, _ = self.cuts[place]
        same = (at for at, (other, first, _) in enumerate(self.cuts) if (other, first) == (origin, WHOLE))
        return None if low == WHOLE else next(same, None)

    def stored(self, anchors: Mapping[str, int]) -> Structs:
        """STORED [m], before the layouts are in a body."""
        stored: Any = np.zeros(len(self.names), abi.STORED)
        stored["anchor"] = [anchors[name] for name in self.names]
        for place, (_, low, _) in enumerate(self.cuts):
            if (whole := self.whole_of(place)) is not None:
                stored["kind"][place], stored["parent"][place], stored["low"][place] = abi.AS_PART, whole, low
        return stored


# -------------------------------------------------------------------- tensors


@dataclass(frozen=True, eq=False)
class JobTable:
    """What the core is told of the tensors of all batches of a kind.

    Attributes:
        jobs: JOB [n], each behind those that its hints name, without rows and addresses; read-only.
        order: int64 [n], the place of each tensor among them.
    """

    jobs: Structs
    order: IntArray


@lru_cache(256)
def job_table(forms: tuple[FieldForm, ...], names: tuple[str, ...]) -> JobTable:
    """The jobs of some tensors. `names`: the layouts, those that are columns of others last."""
    places = {name: place for place, name in enumerate(names)}
    order = _order(forms)
    jobs = native.new_jobs(len(forms))
    numbers = {forms[at].path: place for place, at in enumerate(order)}
    steps = [0] * len(forms)
    fields = [forms[at] for at in order]
    for place, form in enumerate(fields):
        _describe(jobs[place], form, places)
        _refer(jobs, place, form, numbers, fields, steps)
    native.number_jobs(jobs)
    back = np.empty(len(forms), np.int64)
    back[order] = np.arange(len(forms))
    jobs.flags.writeable = False
    return JobTable(jobs, back)


def _order(forms: Sequence[FieldForm]) -> list[int]:
    """The tensors in an order in which each comes after those that its hints name."""
    numbers = {form.path: at for at, form in enumerate(forms)}
    order: dict[int, None] = {}

    def named(at: int) -> Iterator[int]:
        return (numbers[path] for path in _named(forms[at]) if path in numbers)

    for first in range(len(forms)):
        above = {} if first in order else {first: named(first)}
        while above:
            at, left = next(reversed(above.items()))
            found = next((other for other in left if other not in order and other not in above), None)
            if found is None:
                order[at] = None
                del above[at]
            else:
                above[found] = named(found)
    return list(order)


def _named(form: FieldForm) -> list[Path]:
    """The fields that the hints of a field name."""
    return [path for hint in form.hints for path in _paths(form, hint.partition(":")[2])]


def _describe(row: Any, form: FieldForm, places: Mapping[str, int]) -> None:
    """Writes what a tensor is into its row."""
    assert form.dtype is not None
    row["layout"] = _NO_LAYOUT if form.layout is None else places[form.layout]
    row["items"], row["size"] = words_of_one(form), size_of_word(form)
    floats = form.dtype.is_floating_point or form.dtype.is_complex
    row["integers"] = abi.FLOATS if floats else abi.BOOLS if form.dtype is torch.bool else abi.INTEGERS
    for hint in form.hints:
        kind = abi.KINDS.index(hint) if hint in abi.KINDS else None
        if kind == abi.COLUMNS:
            columns = row["items"] if row["items"] <= abi.FEW_COLUMNS else form.shape[0]
            row["columns"] = columns if columns > 1 else 0
        elif kind is not None:
            row["hints"] |= 1 << kind


def _refer(
    table: Structs,
    place: int,
    form: FieldForm,
    numbers: Mapping[Path, int],
    forms: Sequence[FieldForm],
    steps: list[int],
) -> None:
    """Writes the fields that the hints of a field name into its row, if they come before it and fit. `steps` counts
    how many lead on from each."""
    row = table[place]
    for hint in form.hints:
        name, _, rest = hint.partition(":")
        found = [numbers.get(path, place) for path in _paths(form, rest)]
        if (
            not found
            or max(found) >= place
            or max(steps[at] for at in found) >= abi.MOST_STEPS
            or any(table["size"][at] != row["size"] or table["items"][at] != row["items"] for at in found)
        ):
            continue
        others = [forms[at].layout for at in found]
        if (table["head"][found] >= 0).any() or _chain(table, found[0]) >= abi.MOST_STEPS:
            continue  # what follows from others is nobody's head or tail; neither does a reader take too long a chain
        if name == "concat" and len({form.layout, *others} - {None}) == 3:
            row["head"], row["tail"] = found
        elif name == "near" and others == [form.layout] and form.layout is not None and form.dtype != torch.bool:
            row["near"] = found[0]
        else:
            continue
        steps[place] = max(steps[place], 1 + max(steps[at] for at in found))


def _chain(table: Structs, place: int) -> int:
    """The number of fields that a field is near to: the one that it names, the one that that one names, ..."""
    length = 0
    while table["near"][place] >= 0:
        place, length = int(table["near"][place]), length + 1
    return length


def _paths(form: FieldForm, names: str) -> list[Path]:
    """Fields that a hint names, in the sub-batch of its own field."""
    return [(*form.path[:-1], *path_of(tuple(name.split("/")))) for name in names.split(",")] if names else []


# -------------------------------------------------------------------- batches on the host

_MASK, _OFFSETS, _VALUES, _LAYOUT = -4, -3, -2, -1
"""How the core reads what is not padded; a padded tensor is read by its ragged dim."""


def is_away(x: Any) -> bool:
    """Whether a tensor or a layout is on a device, where kernels and plain torch work; the compiled core reads
    others."""
    return x.device.type != "cpu"


def describe_padded(row: Any, x: Tensor, ragged_dim: int, pads: Sequence[PadValue], trusted: bool) -> Tensor:
    """Writes where a padded tensor on the host lies, and which pads may be under its mask, into the row of its job.
    Returns the tensor that the row points to, which may be a copy."""
    row["field"], held = native.described(x.movedim(ragged_dim, 1))
    row["padded"], row["num_pads"] = 1, len(pads)
    row["pads"][: len(pads)] = [trial_of(pad, x.dtype, trusted) for pad in pads]
    return held


def most_record(x: Tensor, ragged_dim: int, pads: Sequence[PadValue]) -> int:
    """The most bytes of the record of a row of a padded tensor; 0 if none of its pads differs by row."""
    modes = [trial_of(pad, x.dtype, False)[0] for pad in pads]
    return max((record_size(mode, x, x.shape[ragged_dim]) for mode in modes if has_records(mode)), default=0)


def _readable(x: Tensor, way: int) -> Tensor:
    """A tensor as the core reads it, a copy if it has to be."""
    if way == _MASK:
        return scan.readable(x)[1]
    if way == _OFFSETS:
        return x.detach().to(torch.int64).contiguous()
    return words(x).contiguous() if way == _VALUES else native.described(x.movedim(way, 1))[1]


class Input(NamedTuple):
    """What an origin or a job is read from: its number among the tensors of a batch, the offsets behind them, and the
    layouts that are given, behind these; and how it is read."""

    number: int
    way: int


class Located(NamedTuple):
    """What a batch is read or encoded from: ORIGIN [k] and JOB [n] with addresses, in one `line` of int64, and the
    tensors that were copied."""

    line: IntArray
    origins: Structs
    jobs: Structs
    held: list[Tensor]


@dataclass(frozen=True, eq=False)
class HostJobs:
    """What the core is told of the batches of one signature, all of whose tensors are on the host.

    Attributes:
        parts: the layouts.
        cuts, stored: CUT [m] and, before the layouts are in a body, STORED [m], of these.
        forms: those of the tensors.
        table: their jobs, before they are described.
        padded: int64, the jobs of the padded ones.
        padded_forms: their forms, and `most_record` of each.
        line: ORIGIN [k] and JOB [n], as int64, without addresses.
        inputs: int64 [k + n], the number of the Input of each origin, then of each tensor; and `targets`, where in the
            line its address is.
        copies: those that are copied before they are read, and their places among the inputs.
        rows_at: where in the line the number of rows is.
        limits: where in the line the number of values under some offsets is, and the number of these offsets.
        mask_bytes: of a row.
    """

    parts: Parts
    cuts: Structs
    stored: Structs
    forms: tuple[FieldForm, ...]
    table: JobTable
    padded: IntArray
    padded_forms: Sequence[tuple[FieldForm, int]]
    line: IntArray
    inputs: IntArray
    targets: IntArray
    copies: Sequence[tuple[int, Input]]
    rows_at: IntArray
    limits: Sequence[tuple[int, int]]
    mask_bytes: int

    @classmethod
    def of(cls, plan: BatchPlan, seen: Seen, given: Mapping[str, RowLayout], verify: bool, may_stay: bool) -> HostJobs:
        """`given` are layouts that are known. Padded fields may stay padded, if `may_stay`."""
        parts, rows, read = Parts.of(plan.sources, plan.widths, given), plan.rows, [*seen.tensors, *seen.offsets]
        held = [(form, at, x) for at, (form, x) in enumerate(zip(plan.forms, read, strict=False)) if x is not None]
        numbers, forms = {form.path: at for form, at, _ in held}, tuple([form for form, _, _ in held])
        table, origins = job_table(forms, parts.names), np.zeros(len(parts.origins), abi.ORIGIN)
        jobs, places, count = native.copied(table.jobs), table.order.tolist(), len(origins)
        origins["rows"], jobs["rows"] = rows, rows
        dims = plan.root.more_dims is not None
        if not dims:
            jobs["rows"][jobs["layout"] < 0] = 1
        known = list(given)
        inputs = [
            _describe_origin(origins[at : at + 1], own, numbers, seen, known) for at, own in enumerate(parts.origins)
        ]
        whole = {source.key: at for at, source in enumerate(parts.origins) if source.way == "mask" and verify}
        padded: list[tuple[FieldForm, int]] = []
        for place, (form, at, x) in zip(places, held, strict=True):
            if form.kind != "padded" or form.path in seen.jagged:
                inputs.append(Input(at, _VALUES))
                continue
            inputs.append(Input(at, form.ragged_dim))
            pads, trusts = plan.pads[form.path], form.path in whole and _may_trust(form, plan.sources, plan.pads, x)
            describe_padded(jobs[place], x, form.ragged_dim, pads, trusts or not verify)
            jobs["keeps"][place] = abi.MAY if may_stay and x.is_contiguous() and dims else 0
            padded.append((form, most_record(x, form.ragged_dim, pads)))
            if trusts:
                origins["trusts"][whole[form.path]] = 1 + place
        first = np.arange(count) * abi.ORIGIN_NUMBERS, origins.nbytes // 8 + np.arange(len(jobs)) * abi.JOB_NUMBERS
        is_padded = [own.way >= 0 for own in inputs[count:]]
        targets = first[0] + _AT, first[1][table.order] + np.where(is_padded, PADDED, PACKED)
        limits = [(at, own.number - len(plan.forms)) for at, own in enumerate(inputs[:count]) if own.way == _OFFSETS]
        return cls(
            parts,
            np.array(parts.cuts, np.int64).reshape(-1).view(abi.CUT),
            parts.stored(plan.anchors),
            forms,
            table,
            table.order[np.array(is_padded, np.bool_)],
            padded,
            np.concatenate([native.numbers_of(own).reshape(-1) for own in (origins, jobs)]),
            np.array([own.number for own in inputs], np.int64),
            np.concatenate(targets).astype(np.int64),
            [(at, own) for at, own in enumerate(inputs) if _is_copied(read, own)],
            np.concatenate([begins + at for begins, at in zip(first, _ROWS, strict=True)] if dims else [first[0][:0]]),
            [(at * abi.ORIGIN_NUMBERS + _LIMIT, number) for at, number in limits],
            int((origins["size"] * origins["width"]).sum()),
        )

    def located(self, seen: Seen, rows: int, given: IntArray, line: IntArray) -> Located:
        """Of a batch of this signature. `given` is the table of the layouts that are known; `line` that of this, or of
        the last such batch."""
        read: list[Any] = [*seen.tensors, *seen.offsets]
        places = [0 if x is None else x.data_ptr() for x in read]
        if given.size:
            places += range(first := address(given), first + given.nbytes, abi.LAYOUT.itemsize)
        at: IntArray = np.array(places, np.int64)[self.inputs]
        held = [_readable(read[number], way) for _, (number, way) in self.copies]
        for (place, _), x in zip(self.copies, held, strict=True):
            at[place] = x.data_ptr()
        line = np.array(line)
        line[self.targets], line[self.rows_at] = at, rows
        for place, number in self.limits:
            line[place] = seen.limits[number]
        end = len(self.parts.origins) * abi.ORIGIN_NUMBERS
        return Located(line, native.structs(line[:end], abi.ORIGIN), native.structs(line[end:], abi.JOB), held)


def _describe_origin(row: Any, source: Source, numbers: Mapping[Path, int], seen: Seen, given: Sequence[str]) -> Input:
    """Writes what a layout comes from into its ORIGIN [1]."""
    row["way"] = _WAYS[source.way]
    if source.way == "jagged":
        return Input(len(seen.tensors) + seen.jagged[source.key], _OFFSETS)
    if source.way == "given":
        return Input(len(seen.tensors) + len(seen.offsets) + given.index(source.key), _LAYOUT)
    x: Any = seen.tensors[numbers[source.key]]
    native.numbers_of(row)[...] = native.numbers_of(scan.described(*scan.readable(x)))
    row["way"] = _WAYS[source.way]
    return Input(numbers[source.key], _MASK)


def _is_copied(read: Sequence[Any], own: Input) -> bool:
    x = None if own.way == _LAYOUT else read[own.number]
    return x is not None and _readable(x, own.way).data_ptr() != x.data_ptr()


def _may_trust(
    form: FieldForm, sources: Mapping[str, Source], pads: Mapping[Path, Sequence[PadValue]], mask: Tensor
) -> bool:
    """Whether a mask that has one valid word, and 0 elsewhere, needs no other check of its first pad."""
    pad = pads[form.path][0]
    bits = None if isinstance(pad, Pad) else pad_words(pad, mask.dtype)
    is_zero = bits is not None and not any(bits) and scan.is_plain(mask)
    return is_zero and sources[form.layout or ""] == Source("mask", form.path)
