"""The table of a packed batch: how each field is encoded, and where its arrays lie in one body.

    padded tensors, packed values --jobs--> encode --> Table --> some rows, some fields --> decode --> tensors

The compiled core writes and reads the body (core/encodings describes them); here are the jobs that it is given. A
table is never changed; tables of some rows share the body of the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from maskpack.core import abi, native
from maskpack.core.bits import Words, address, word_dtype
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path
from maskpack.core.latest import Latest
from maskpack.core.native import Structs
from maskpack.core.pads import Pads
from maskpack.layout.row_layout import RowLayout, core_layout, host_spans, layout_of_core
from maskpack.nesting.jobs import HostJobs, JobTable, job_table
from maskpack.nesting.plan import plans as batch_plans
from maskpack.nesting.schema import FieldForm

SLACK = 1.1
"""Most bytes of a body for each byte of the arrays in it, if it is to be sent or joined as it is."""
NO_PADS, ONE_WORD, ONE_EDGE, WORDS, MIXED_PADS = range(5)
"""No mask; one word for all rows; EDGE for all; a word for each; EDGE and words, which no kernel decodes."""
_KEEPS, _AT_FORM, _AT_PADS = native.places_in(abi.JOB, "keeps", "form", "under_mask")
_AT_GIVEN = native.places_in(abi.JOB, "given")[0]
GIVEN = slice(_AT_GIVEN, _AT_GIVEN + abi.ARRAY_NUMBERS)
_FORM, UNDER_MASK = slice(_AT_FORM, _AT_FORM + abi.FORM_NUMBERS), slice(_AT_PADS, _AT_PADS + abi.ARRAY_NUMBERS)
_NOTHING = (0, 1, 0)
"""A PLACE of no numbers."""
Frame = tuple[int, int]
"""The width and the anchor of a layout."""


# -------------------------------------------------------------------- tables


@dataclass(frozen=True, eq=False)
class Table:
    """The tensors of a packed batch.

    Attributes:
        rows: B.
        dense_rows: the rows of fields without a layout: B, or 1 if the rows are no batch dim.
        names: the names of the layouts, in the order in which they are stored.
        stored: STORED [m], the layouts.
        entries: ENTRY [n], encoded fields and parts of them.
        fields: int64 [F], the entry of each tensor of the schema.
        pads: ARRAY [F], the records of the pads of each tensor (core/pads.py), one or B of them; none if it is not
            padded.
        body: uint8, the arrays.
        is_compact: whether the body is known to hold the arrays and nothing else.
    """

    rows: int
    dense_rows: int
    names: tuple[str, ...]
    stored: Structs
    entries: Structs
    fields: IntArray
    pads: Structs
    body: Words
    is_compact: bool = False

    @cached_property
    def layouts(self) -> dict[str, RowLayout]:
        """The layouts by name, on the host."""
        found = native.read_layouts(self.stored, self.body, self.rows)
        anchors = self.stored["anchor"].tolist()
        layouts = [layout_of_core(own, anchor) for own, anchor in zip(found, anchors, strict=True)]
        for at in np.flatnonzero(self.stored["kind"] == abi.AS_PART).tolist():
            layouts[at].__dict__["part_of"] = layouts[self.stored["parent"][at]], int(self.stored["low"][at])
        return dict(zip(self.names, layouts, strict=True))

    @cached_property
    def frames(self) -> dict[str, Frame]:
        """The width and the anchor of each layout."""
        columns = (self.stored[name].tolist() for name in ("width", "anchor"))
        return dict(zip(self.names, zip(*columns, strict=True), strict=True))

    @cached_property
    def marks(self) -> IntArray:
        """Where rows begin in the arrays of each entry."""
        return native.mark(self.entries, self.layout_rows, self.body, self.rows, self.dense_rows)

    @cached_property
    def layout_rows(self) -> IntArray:
        """The table of layouts, for the core."""
        return native.layout_rows([core_layout(layout) for layout in self.layouts.values()])

    @cached_property
    def references(self) -> list[list[int]]:
        """The entries that each entry refers to: the rows that it stores, columns, the head and tail of a concat, the
        field that it is near to."""
        out: list[list[int]] = []
        numbers = (self.entries[name].tolist() for name in ("kind", "number", "first", "second"))
        for kind, number, first, second in zip(*numbers, strict=True):
            count = number if abi.REFERENCES[kind][0] == abi.OF_COLUMNS else int(first >= 0)
            out.append([*range(first, first + count), *([second] if second >= 0 else [])])
        return out

    def kind(self, field: int) -> str:
        """The name of the encoding of a field, with those inside it: `dictionary blocks`."""
        return self._kind(int(self.fields[field]))

    def _kind(self, at: int) -> str:
        inner = [self._kind(part) for part in self.parts(at) if part != at]
        return " ".join([abi.KINDS[int(self.entries["kind"][at])], *dict.fromkeys(inner)])

    def own_entries(self, field: int) -> list[int]:
        """The entries that a field alone is stored in: its own, those of the rows that it stores, and columns."""
        return self._own_entries(int(self.fields[field]))

    def _own_entries(self, at: int) -> list[int]:
        return [*(own for part in self.parts(at) if part != at for own in self._own_entries(part)), at]

    def parts(self, at: int) -> list[int]:
        """The entries that an entry is made of: the rows that it stores, columns, or itself."""
        is_made = abi.REFERENCES[int(self.entries["kind"][at])][0] in (abi.OF_ROWS, abi.OF_COLUMNS)
        near = int(self.entries["second"][at])
        return [part for part in self.references[at] if part != near] if is_made else [at]

    @cached_property
    def _reached(self) -> list[int]:
        """The entries that some field needs, each once, rising."""
        return sorted(self._reached_from(self.fields.tolist()))

    def _reached_from(self, left: list[int]) -> set[int]:
        """Some entries, and those that they refer to."""
        reached: set[int] = set()
        while left:
            at = left.pop()
            if at not in reached:
                reached.add(at)
                left += self.references[at]
        return reached

    def fields_from_afar(self) -> list[int]:
        """The numbers of the fields that need rows stored before those of the table, and of fields that share entries
        with them, if these rows take more bytes than `SLACK` allows."""
        far: set[int] = set()
        nbytes = 0.0
        for at in np.flatnonzero((self.entries["kind"] == abi.PIECES) & (self.entries["number"] > 0)).tolist():
            if at in self._reached:
                entry, before = self.entries[at], int(self.entries["number"][at])
                lengths = self.array(entry["b"]).view(f"u{entry['b']['size']}").astype(np.int64)
                lengths = np.broadcast_to(lengths, self.rows + before)
                inner = native.bytes_of(self.entries[[int(entry["first"])]])
                nbytes += inner * int(lengths[:before].sum()) / max(int(lengths.sum()), 1)
                far.add(at)
        if not far or nbytes <= (1 - 1 / SLACK) * self.nbytes:
            return []
        own, found = [self._reached_from([at]) for at in self.fields.tolist()], set[int]()
        while far > found:  # and the fields that these refer to, or that refer to the same ones
            found, far = far, far.union(*(reached for reached in own if reached & far))
        return [number for number, reached in enumerate(own) if reached & far]

    def entry_places(self, at: int) -> list[Any]:
        """The PLACEs of an entry that hold numbers."""
        return [place for place in (self.entries[at][name] for name in "abc") if place["count"]]

    def array(self, place: Any) -> Words:
        """The bytes at a PLACE, uint8."""
        begin = int(place["at"])
        return self.body[begin : begin + int(place["size"]) * int(place["count"])]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        kept = self._reached
        entries = self.entries if len(kept) == self.entries.size else self.entries[kept]
        return native.bytes_of(entries) + native.bytes_of(self.stored) + native.bytes_of(self.pads)

    def pads_of(self, field: int, size: int) -> Pads:
        """The pads of a padded field of words of `size` bytes, in the same memory."""
        at, nbytes, count = self.pads[field].tolist()
        if not count:  # without rows
            return Pads(np.zeros((1, 1 + size), np.uint8), size)
        return Pads(self.body[at : at + nbytes * count].reshape(count, nbytes), size)

    @cached_property
    def pad_kinds(self) -> IntArray:
        """What is under the mask of each tensor: NO_PADS to MIXED_PADS."""
        at, count = self.pads["at"], self.pads["count"]
        kinds = np.where(count == 1, ONE_WORD, NO_PADS)
        kinds[count == 1] += self.body[at[count == 1]] == abi.EDGE
        for number in np.flatnonzero(count > 1).tolist():
            edges = self.array(self.pads[number])[:: int(self.pads["size"][number])] == abi.EDGE
            kinds[number] = ONE_EDGE if edges.all() else MIXED_PADS if edges.any() else WORDS
        return kinds

    # ---------------------------------------------------------------- decoding

    def given(self, count: int, taken: IntArray | None = None, places: IntArray | None = None) -> tuple[int, ...]:
        """GIVEN: the rows of the table that are decoded, and which rows of the result they are."""
        marks = 0 if taken is None else address(self.marks)
        rows = [0 if index is None else address(index) for index in (taken, places)]
        table = address(self.entries), address(self.layout_rows), address(self.body), self.rows, self.dense_rows
        return (*table, marks, *rows, count)

    def words_of(self, at: int) -> Words:
        """The packed words of an entry, flat."""
        entry = self.entries[at]
        out = np.empty(self.count_words(at), word_dtype(int(entry["size"])))
        target = np.zeros(1, abi.TARGET)
        target["field"]["packed"], target["entry"] = address(out), at
        for name in ("items", "size", "layout"):
            target["field"][name] = entry[name]
        rows = self.dense_rows if entry["layout"] < 0 else self.rows
        given = native.structs(np.array(self.given(rows), np.int64), abi.GIVEN)
        native.decode(target, given, self.layout_rows, rows, out.nbytes)
        return out

    def count_words(self, at: int) -> int:
        """The number of words of an entry."""
        layout = int(self.entries["layout"][at])
        elements = self.dense_rows if layout < 0 else self.layouts[self.names[layout]].num_tokens
        return elements * int(self.entries["items"][at])

    # ---------------------------------------------------------------- rows and fields

    def between(self, begin: int, end: int) -> Table:
        """The rows from `begin` to `end`, in the same body."""
        cuts = np.array([begin, end])
        line = self.entries, self.stored, self.layout_rows, self.body, self.rows, self.marks, cuts
        entries, stored = native.split(*line)
        pads, rows = self.pads.copy(), end - begin
        several = pads["count"] > 1
        pads["at"][several] += begin * pads["size"][several]
        pads["count"][several] = rows
        if not rows:
            pads["count"] = 0
        part = self.like(rows=rows, dense_rows=rows, stored=stored[0], entries=entries[0], pads=pads)
        part.__dict__.update(references=self.references, _reached=self._reached)  # entries refer to the same ones
        return part

    def like(self, **changes: Any) -> Table:
        """The table with something changed, which may not be compact."""
        return replace(self, is_compact=False, **changes)

    def select(self, fields: Sequence[int]) -> Table:
        """Some fields, by their numbers."""
        return self.like(fields=self.fields[list(fields)], pads=self.pads[list(fields)])

    def narrow(self, field: int, start: int, length: int) -> Table | None:
        """The table with `length` words of each element of a field, from the word `start` on, in the same body; None
        unless these are whole columns."""
        entry = self.entries[int(self.fields[field])]
        columns = int(entry["number"]) if entry["kind"] == abi.COLUMNS else 1
        items = int(entry["items"]) // columns
        if columns == 1 or not length or start % items or length % items:
            return None
        first, count, end = int(entry["first"]) + start // items, length // items, self.entries.size
        whole = self.entries[[int(self.fields[field])]]
        whole["items"], whole["first"], whole["number"] = length, end, count
        entries = [self.entries, self.entries[first : first + count], whole[: count > 1]]  # one column is a field
        fields: IntArray = np.array(self.fields)
        fields[field] = end + (count if count > 1 else 0)
        kept, numbers = self.like(entries=np.concatenate(entries), fields=fields)._needed()
        return self.like(entries=kept, fields=numbers)

    def own(self, slack: float = 0.0, free: int = 0) -> Table:
        """The table with a new body: its arrays in the order of `arrays`, each from a multiple of 8 bytes on. Itself,
        if its body has at most `slack` bytes for each byte of its arrays, and `free` more."""
        if slack and (self.is_compact or self.body.nbytes <= slack * self.nbytes + free):
            return self
        entries, fields = self._needed()
        stored, pads = self.stored.copy(), self.pads.copy()
        body = native.compact([stored, entries, pads], self.body)
        return replace(self, stored=stored, entries=entries, fields=fields, pads=pads, body=body, is_compact=True)

    def _needed(self) -> tuple[Structs, IntArray]:
        """The entries that some field needs, a copy, and the entry of each field among them."""
        kept = self._reached
        if len(kept) == self.entries.size:
            return self.entries.copy(), self.fields
        numbers = np.full(self.entries.size + 1, -1)
        numbers[kept] = np.arange(len(kept))
        entries = self.entries[kept].copy()
        for name in ("first", "second"):
            entries[name] = numbers[entries[name]]  # -1 stays
        return entries, numbers[self.fields]

    def with_layouts(self, names: Collection[str]) -> Table:
        """The table with some of its layouts, and those that these and its fields need; itself, if these are all."""
        kept: set[int] = {*self.entries["layout"][self._reached].tolist(), *map(self.names.index, names)} - {-1}
        for at in reversed(range(len(self.names))):  # a parent comes before its parts
            if at in kept and self.stored["kind"][at] == abi.AS_PART:
                kept.add(int(self.stored["parent"][at]))
        if len(kept) == len(self.names):
            return self
        entries, fields = self._needed()
        chosen, numbers = sorted(kept), np.full(len(self.names) + 1, -1)
        numbers[chosen] = np.arange(len(chosen))
        stored, entries["layout"] = self.stored[chosen], numbers[entries["layout"]]  # -1 stays
        stored["parent"] = np.where(stored["kind"] == abi.AS_PART, numbers[stored["parent"]], stored["parent"])
        return self.like(names=tuple([self.names[at] for at in chosen]), stored=stored, entries=entries, fields=fields)

    def arrays_of(self, at: int) -> list[Words]:
        """The arrays of an entry, in unsigned integers."""
        return [self.array(place).view(f"u{place['size']}") for place in self.entry_places(at)]

    def with_plain(self, words: Mapping[int, Words]) -> Table:
        """The same values, with some entries plain: their words, flat, by the numbers of the entries."""
        entries = self.entries.copy()
        body, (_, *begins) = side_by_side([self.body, *words.values()])
        for (at, own), begin in zip(words.items(), begins, strict=True):
            line = entries[at]
            line["kind"], line["number"], line["first"], line["second"] = abi.PLAIN, 0, -1, -1
            line["a"], line["b"], line["c"] = (begin, own.itemsize, own.size), _NOTHING, _NOTHING
        return self.like(entries=entries, body=body)

    def places(self) -> list[tuple[int, int, int]]:
        """The PLACEs of `arrays`: of the layouts, then of the entries; the pads, and what may lie between them, are the
        last one."""
        found, pads = _used(self.stored, self.entries), _used(self.pads)
        if pads.size:
            begin = int(pads[:, 0].min())
            end = int((pads[:, 0] + pads[:, 1] * pads[:, 2]).max())
            found = np.append(found, [(begin, 1, end - begin)], axis=0)
        return [(at, size, count) for at, size, count in found.tolist()]

    def arrays(self) -> list[Words]:
        """The arrays, in unsigned integers. `side_by_side` makes the body of a compacted table of them."""
        return [self.body[at : at + size * count].view(f"u{size}") for at, size, count in self.places()]

    def places_of(self, field: int) -> list[int]:
        """Where the arrays of a field but its pads begin in the body."""
        return _used(self.entries[self.own_entries(field)])[:, 0].tolist()


def side_by_side(arrays: Sequence[Words]) -> tuple[Words, list[int]]:
    """A body of some arrays, one after the other, and where each begins in it: at a multiple of 8 bytes."""
    parts: list[Words] = []
    for array in arrays:
        parts += [array.reshape(-1).view(np.uint8), np.zeros(-array.nbytes % 8, np.uint8)]
    begins = cumulated(np.array([-(-array.nbytes // 8) * 8 for array in arrays], np.int64))[:-1]
    return np.concatenate(parts or [np.zeros(0, np.uint8)]), begins.tolist()


def _used(*structs: Structs) -> IntArray:
    """int64 [n, 3]: the PLACEs of structs that hold numbers."""
    places = np.concatenate([native.places_of(own).reshape(-1, 3) for own in structs])
    return places[places[:, 2] > 0]


# -------------------------------------------------------------------- encoding


class EncodedTable(NamedTuple):
    """A table; its jobs, as they were done; and the place of each tensor among them."""

    table: Table
    jobs: Structs
    order: IntArray


def of_values(
    forms: Sequence[FieldForm],
    values: Sequence[Words],
    layouts: Mapping[str, RowLayout],
    rows: int,
    dense_rows: int,
    pads: Mapping[Path, Pads] = MappingProxyType({}),
    *,
    by_kernels: bool = False,
) -> EncodedTable | None:
    """Encodes packed values, the words of each of `forms`; None if bools have other bytes than 0 and 1.

    Args:
        layouts: those of the forms, and others that are stored, too.
        rows, dense_rows: B, and the rows of fields without a layout.
        pads: what is under the mask of each padded field.
        by_kernels: as kernels can encode them the next time.
    """
    layouts = wholes_first(layouts)
    table = job_table(tuple(forms), tuple(layouts))
    line, stored = native.layout_rows([core_layout(layout) for layout in layouts.values()]), stored_before(layouts)
    held = [np.ascontiguousarray(own).reshape(-1) for own in values]
    places = {at: pads[form.path].place for at, form in enumerate(forms) if form.path in pads}
    kind = tuple(layouts), line, stored, rows, dense_rows
    return encoded(table, [address(own) for own in held], places, *kind, by_kernels)


def encoded(
    table: JobTable,
    values: Sequence[int],
    pads: Mapping[int, tuple[int, int, int]],
    names: tuple[str, ...],
    layouts: IntArray,
    stored: Structs,
    rows: int,
    dense_rows: int,
    by_kernels: bool = False,
) -> EncodedTable | None:
    """Encodes values at some addresses as the last ones of the same table were encoded, if that still fits; None as
    `of_values`. `pads` are places of records by the number of the tensor, `layouts` and `stored` as for
    `native.encode`."""
    jobs, order = native.copied(table.jobs), table.order
    jobs["rows"] = np.where(jobs["layout"] < 0, dense_rows, rows)
    jobs["field"]["packed"][order] = values
    jobs["by_kernels"] = by_kernels
    for number, place in pads.items():
        native.numbers_of(jobs)[order[number], GIVEN] = place
    key = table, rows.bit_length(), by_kernels
    recall(jobs, done_jobs.get(key))
    found = native.encode(jobs, layouts, stored)
    if found is None:
        check_memory(jobs["result"])
        return None
    done_jobs.keep(key, Done(None, None, jobs, 0, native.SPANS * rows))
    places = rows, dense_rows, names, stored, found.entries, found.fields[order], jobs["under_mask"][order]
    return EncodedTable(Table(*places, found.body, is_compact=True), jobs, order)


def recall(jobs: Structs, before: Done | None) -> None:
    """Tells jobs how the last ones of their kind were encoded, and which of them stayed padded."""
    if before is not None and before.jobs is not None:
        line, known = native.numbers_of(jobs), native.numbers_of(before.jobs)
        line[:, _FORM] = known[:, _FORM]
        line[:, _KEEPS] = np.where(line[:, _KEEPS] > 0, np.maximum(line[:, _KEEPS], known[:, _KEEPS]), 0)


def check_memory(results: IntArray) -> None:
    """Raises MemoryError if one of some jobs, of which one failed, had no memory."""
    if abi.NO_MEMORY in results:
        raise MemoryError("maskpack: no memory to encode a batch")


def table_of_layouts(layouts: Mapping[str, RowLayout], rows: int) -> Table:
    """A table of layouts without tensors."""
    found = of_values([], [], layouts, rows, rows)
    assert found is not None
    return found.table


def wholes_first(layouts: Mapping[str, RowLayout]) -> dict[str, RowLayout]:
    """The layouts in an order in which those that are columns of others come after them."""
    return dict(sorted(layouts.items(), key=lambda item: "part_of" in item[1].__dict__))


def _room_of(layouts: Iterable[RowLayout], rows: int) -> int:
    """The most bytes that layouts take in a body."""
    return sum(24 * host_spans(layout).starts.size + 8 * rows + 64 for layout in layouts) // 8 * 8 + 64


def stored_alone(layouts: Mapping[str, RowLayout], rows: int) -> tuple[Structs, Words]:
    """STORED [m], and a body that holds layouts and nothing else, a multiple of 8 bytes."""
    stored, body = stored_before(layouts), np.zeros(_room_of(layouts.values(), rows), np.uint8)
    used = native.store_layouts(stored, native.layout_rows([core_layout(own) for own in layouts.values()]), body, 0)
    assert used is not None
    return stored, body[: -(-used // 8) * 8]


def stored_before(layouts: Mapping[str, RowLayout]) -> Structs:
    """STORED [m] before the layouts are in the body: which of them are columns of others."""
    stored = np.zeros(len(layouts), abi.STORED)
    earlier: dict[int, int] = {}
    for place, layout in enumerate(layouts.values()):
        stored["anchor"][place] = layout.anchor
        whole = layout.__dict__.get("part_of")
        if whole is not None and id(whole[0]) in earlier:
            stored["kind"][place], stored["parent"][place] = abi.AS_PART, earlier[id(whole[0])]
            stored["low"][place] = whole[1]
        earlier[id(layout)] = place
    return stored


class Done(NamedTuple):
    """What is remembered of a batch that was encoded.

    Attributes:
        host, line: of a batch on the host, its HostJobs, and the line with its jobs.
        jobs: its jobs, as they were done.
        room: bytes of a body that is a little larger.
        spans: numbers that the spans of its layouts take.
    """

    host: HostJobs | None
    line: IntArray | None
    jobs: Structs | None
    room: int
    spans: int


done_jobs: Latest[Done] = Latest()
"""Of the latest batches, by their JobTable, the number of bits of their rows, and whether kernels encode the next."""
device_plans: Latest[Any] = Latest()
"""How batches on a GPU are encoded (cuda/device_plan.py)."""
device_forms: Latest[Any] = Latest()
"""How the tensors of batches on a GPU were encoded the last time (cuda/encode.py)."""


def forget() -> None:
    """Forgets how earlier batches were encoded, so that each field of the next one is looked at anew."""
    for known in (batch_plans, done_jobs, device_forms, device_plans):
        known.clear()


# -------------------------------------------------------------------- fields of several tables


def merge(tables: Iterable[Table], picked: Sequence[tuple[int, int]]) -> Table:
    """Fields of several tables with the same rows: (table, field) of each. Layouts of one name are one."""
    parts = [table.own(SLACK) for table in tables]
    body, begins = side_by_side([part.body for part in parts])
    first = cumulated(np.array([part.entries.size for part in parts], np.int64)).tolist()
    numbers: dict[str, int] = {}
    stored: list[IntArray] = []
    entries: list[IntArray] = []
    for part, begin, before in zip(parts, begins, first, strict=False):
        count = len(numbers)
        place = np.array([numbers.setdefault(name, len(numbers)) for name in part.names], np.int64)
        fresh = np.flatnonzero(place >= count)
        own, lines = part.entries.copy(), part.stored[fresh]
        for places in map(native.places_of, (own, lines)):
            places[..., 0] += begin
        columns, under = lines["kind"] == abi.AS_PART, own["layout"] >= 0
        lines["parent"][columns] = place[lines["parent"][columns]]
        own["layout"][under] = place[own["layout"][under]]
        own["first"][own["first"] >= 0] += before
        own["second"][own["second"] >= 0] += before
        stored.append(native.numbers_of(lines))
        entries.append(native.numbers_of(own))
    pads = np.array([parts[at].pads[field].tolist() for at, field in picked], abi.ARRAY)
    pads["at"] += np.array([begins[at] for at, _ in picked], np.int64)
    fields = np.array([first[at] + parts[at].fields[field] for at, field in picked], np.int64)
    line = native.structs(np.concatenate(stored), abi.STORED), native.structs(np.concatenate(entries), abi.ENTRY)
    return Table(parts[0].rows, parts[0].dense_rows, tuple(numbers), *line, fields, pads, body)
