"""Packed batches of rows without padding: values and lengths in, no masks and no jagged tensors needed.

name -> Values [T, *F] with lengths [B], a tensor [B], or objects --packed_rows--> PackedBatch
                                                                  --rows_alone---> bytes of each row, and back by
                                                                                   rows_together
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import DTYPES, Words, address, from_words, odd_bools, odd_bools_error, words
from maskpack.core.index import IntArray, cumulated
from maskpack.core.keys import Path
from maskpack.core.objects import Objects
from maskpack.core.tree import Node
from maskpack.errors import LayoutError, StorageError
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm, Schema, name_of_jagged
from maskpack.packed.batch import PackedBatch
from maskpack.packed.columns import Body, Columns, Picked
from maskpack.packed.segments import Segments
from maskpack.packed.table import (
    Job,
    JobTable,
    Table,
    check_memory,
    done_jobs,
    encode_jobs,
    job_table,
    recall,
)


class Values(NamedTuple):
    """Rows of a field: the values [T, *F] one after the other, on the host, and int64 [B], the lengths of the rows; or
    one scalar for each row, [B], without lengths."""

    values: Tensor
    lengths: IntArray | None = None

    def rows(self) -> Sequence[Tensor]:
        """The rows, as views."""
        values: Any = self.values
        return values.unbind() if self.lengths is None else values.split(self.lengths.tolist())

    def take(self, rows: IntArray) -> Values:
        """The rows at some indices."""
        if self.lengths is None:
            return Values(from_words(words(self.values.contiguous()).numpy()[rows], self.values.dtype))
        own = self.rows()
        return Values(torch.cat([own[row] for row in rows.tolist()]), self.lengths[rows])

    @staticmethod
    def cat(parts: Sequence[Values]) -> Values:
        """The rows of several of them, all with lengths or all without."""
        if len(parts) == 1:
            return parts[0]
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return Values(torch.cat([part.values for part in parts]), np.concatenate(lengths) if lengths else None)


def packed_rows(
    columns: Mapping[str, Values | Objects], rows: int, hints: Mapping[str, tuple[str, ...]], call: str
) -> PackedBatch:
    """Packs rows, as `compress` packs a TensorDict of jagged tensors, tensors [B] and objects. Fields of equal row
    lengths share a layout.

    Args:
        columns: the fields; objects are stowed.
        rows: B.
        hints: encodings to try first, by field.
        call: what errors name.

    Raises LayoutError for a dtype without plain bits, and for bools of other bytes than 0 and 1.
    """
    plan, _, table = _encoded(columns, rows, hints, call)
    objects = {(name,): column for name, column in columns.items() if isinstance(column, Objects)}
    return PackedBatch(rows, plan.schema, table, objects)


def _encoded(
    columns: Mapping[str, Values | Objects], rows: int, hints: Mapping[str, tuple[str, ...]], call: str
) -> tuple[_Plan, list[IntArray], Table]:
    """The plan of fields, the lengths of each layout, and the table."""
    lengths_of: dict[bytes, IntArray] = {}
    numbers: dict[bytes, int] = {}
    about: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for name, column in columns.items():
        if isinstance(column, Objects):
            about.append((name,))
            continue
        values, lengths = column
        _check(name, values, call)
        layout = None
        if lengths is not None:
            layout = numbers.setdefault(line := lengths.tobytes(), len(numbers))
            lengths_of[line] = lengths
        about.append((name, layout, values.dtype, tuple(values.shape[1:]), hints.get(name, ())))
        tensors.append(values)
    plan, lengths = _plan_of(tuple(about)), [*lengths_of.values()]
    layouts = _Layouts.of(lengths, rows)
    held = [words(tensors[at].contiguous()) for at in plan.order]
    jobs = plan.table.jobs.copy()
    jobs["rows"] = rows
    jobs["field"]["packed"] = [tensor.data_ptr() or _NOWHERE for tensor in held]
    jobs["bounds"] = [0 if at is None else layouts.bounds[at] for at in plan.layouts]
    stored, key = np.zeros(len(lengths), abi.STORED), (plan, rows.bit_length())
    table = encode_jobs(plan.table._replace(jobs=jobs), key, layouts.table, stored, rows, rows)
    if table is None:
        raise _odd_error(columns, call)
    return plan, lengths, table


def _odd_error(columns: Mapping[str, Values | Objects], call: str) -> LayoutError:
    bools = [(name, x.values) for name, x in columns.items() if isinstance(x, Values) and x.values.dtype is torch.bool]
    return odd_bools_error(call, [(name,) for name, x in bools if odd_bools(words(x.contiguous()).numpy())])


# -------------------------------------------------------------------- plans


_Told = tuple[tuple[Any, ...], ...]
"""Of each field its name; of tensors also the number of the layout, the dtype, the shape of an element, and hints."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is the same for all rows of fields of some names, dtypes and shapes.

    Attributes:
        schema, forms: of all fields, and of the tensors.
        table: jobs that lack rows and addresses.
        order: the number of the tensor of each job.
        layouts: the number of the layout of each job; None for scalars.
        token: what the plan is made from, pickled.
    """

    schema: Schema
    forms: tuple[FieldForm, ...]
    table: JobTable
    order: tuple[int, ...]
    layouts: tuple[int | None, ...]
    token: bytes


@lru_cache(256)
def _plan_of(told: _Told) -> _Plan:
    names: dict[int, str] = {}
    forms: list[FieldForm] = []
    for name, *tensor in told:
        if not tensor:
            forms.append(FieldForm((name,), "object"))
            continue
        number, dtype, shape, hints = tensor
        layout = None if number is None else names.setdefault(number, name_of_jagged((name,)))
        kind = "dense" if layout is None else "jagged"
        forms.append(FieldForm((name,), kind, layout, dtype=dtype, device="cpu", shape=shape, hints=hints))
    tensors = tuple([form for form in forms if form.dtype is not None])
    nothing = [Job(form, words=np.zeros(0, np.uint8)) for form in tensors]
    table = job_table(nothing, tuple(names.values()), {}, 0, 0, [])
    order = tuple(np.argsort(table.order).tolist())
    places = {name: number for number, name in names.items()} | {None: None}
    layouts = tuple([places[tensors[at].layout] for at in order])
    token = pickle.dumps(told, 5)
    return _Plan(Schema(Node((), None), tuple(forms), ()), tensors, table, order, layouts, token)


class _Layouts(NamedTuple):
    """Layouts of rows without padding, for the core: their table, where the bounds of the rows of each lie, and what
    these point to."""

    table: IntArray
    bounds: list[int]
    held: IntArray

    @classmethod
    def of(cls, lengths: Sequence[IntArray], rows: int) -> _Layouts:
        """From int64 [B] each."""
        held = np.zeros((len(lengths), 4 * rows + 2), np.int64)  # of each: starts, counts, splits, bounds
        table: list[int] = []
        at = address(held)
        for line, own in zip(held, lengths, strict=True):
            filled = own > 0
            counts = own[filled]
            line[rows : rows + counts.size] = counts
            np.cumsum(filled, out=line[2 * rows + 1 : 3 * rows + 1])
            np.cumsum(own, out=line[3 * rows + 2 :])
            width = int(own.max(initial=0))
            if rows * width >= _MOST:
                RowLayout.from_lengths(own)  # raises: the values take no memory, but cannot be counted
            table += [rows, width, at, at + 8 * rows, at + 16 * rows, at + 24 * rows + 8]
            at += line.nbytes
        return cls(np.array(table, np.int64), table[5::6], held)


_MOST = 1 << 62
"""Positions that a layout can count."""
_PLAIN = frozenset(DTYPES.values())
_NOWHERE = address(_NOTHING := np.zeros(1, np.int64))
"""Where tensors without elements lie."""


def _check(name: str, values: Tensor, call: str) -> None:
    if values.dtype not in _PLAIN or values.device.type != "cpu":
        raise LayoutError(
            f'{call}: field "{name}" is {values.dtype} on {values.device}, without plain bits; expected numbers in '
            "memory. Dequantize it, or leave it out."
        )


# -------------------------------------------------------------------- one row alone, as bytes


class RowAlone(NamedTuple):
    """One packed row. Its bytes are those of a pickle, compressed, then those of its body.

    Attributes:
        token: what the plan of its fields is made from, pickled.
        lengths: of each layout.
        stored, entries, fields: of its table.
        objects: in the order of the fields.
        bare: whether these hold no stowed tensors.
        about: whatever the writer adds.
        body: of its table.
    """

    token: bytes
    lengths: list[int]
    stored: bytes
    entries: bytes
    fields: bytes
    objects: list[Any]
    bare: bool
    about: Any
    body: Words

    def to_bytes(self) -> bytes:
        head = zlib.compress(pickle.dumps((*self[:-1], self.body.nbytes), 5), 1)
        return b"".join([len(head).to_bytes(4, "little"), head, self.body.data])

    @classmethod
    def from_bytes(cls, line: Words) -> RowAlone:
        """From uint8 [n]. The pickle can run code. Raises StorageError for bytes that are cut short or mixed."""
        try:
            end = 4 + int.from_bytes(line[:4].tobytes(), "little")
            parts: Any = pickle.loads(zlib.decompress(line[4:end].tobytes()))
        except (zlib.error, EOFError, pickle.UnpicklingError) as error:
            raise _not_a_row(line.size, error) from error
        if line.size - end != parts[-1]:
            raise _not_a_row(line.size, f"{line.size - end} bytes of a body of {parts[-1]}")
        return cls._make((*parts[:-1], np.array(line[end:])))


def _not_a_row(nbytes: int, why: object) -> StorageError:
    return StorageError(
        f"get_data: {nbytes} bytes are no packed row ({why}); expected those of one put. The sample was put again "
        "meanwhile, or its storage is damaged: get its metadata again, then it."
    )


def rows_alone(
    columns: Mapping[str, Values | Objects], rows: int, hints: Mapping[str, tuple[str, ...]], call: str, about: Any
) -> list[RowAlone]:
    """As `packed_rows`, each row alone."""
    objects = [column for column in columns.values() if isinstance(column, Objects)]
    bare = all(column.bare for column in objects)
    if rows == 1:
        plan, own, table = _encoded(columns, 1, hints, call)
        of_table = table.stored.tobytes(), table.entries.tobytes(), table.fields.tobytes()
        data = [column.data[0] for column in objects]
        return [RowAlone(plan.token, [int(one[0]) for one in own], *of_table, data, bare, about, table.body)]
    tensors = {name: column for name, column in columns.items() if isinstance(column, Values)}
    held: list[Tensor] = []
    places: IntArray = np.empty((len(tensors), rows), np.int64)
    lengths: list[list[int | None]] = []
    for at, (name, (values, own)) in enumerate(tensors.items()):
        _check(name, values, call)
        held.append(words(values.contiguous()))
        begins = np.arange(rows) if own is None else cumulated(own)[:-1]
        lengths.append([None] * rows if own is None else own.tolist())
        places[at] = (held[-1].data_ptr() or _NOWHERE) + begins * (values.nbytes // max(values.shape[0], 1))
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for row in range(rows):
        numbers: dict[int, int] = {}  # as `packed_rows` numbers the layouts
        line = [column[row] for column in lengths]
        pattern = tuple([None if one is None else numbers.setdefault(one, len(numbers)) for one in line])
        alike.setdefault(pattern, []).append(row)
    out: dict[int, RowAlone] = {}
    for pattern, own in alike.items():
        layouts = dict(zip(tensors, pattern, strict=True))
        shapes = {name: (x.values.dtype, tuple(x.values.shape[1:]), hints.get(name, ())) for name, x in tensors.items()}
        told = tuple([(name, layouts[name], *shapes[name]) if name in shapes else (name,) for name in columns])
        plan = _plan_of(told)
        key = plan, 1
        firsts = [pattern.index(number) for number in range(len(plan.table.names))]
        of_layouts = [[lengths[at][row] or 0 for at in firsts] for row in own]
        lines, bounds, _keep = _layouts_alone(np.array(of_layouts, np.int64).reshape(len(own), len(firsts)))
        jobs = np.tile(plan.table.jobs, (len(own), 1))
        jobs["rows"] = 1
        jobs["field"]["packed"] = places[:, own].T[:, plan.order]
        for at, number in enumerate(plan.layouts):
            jobs["bounds"][:, at] = 0 if number is None else bounds[:, number]
        recall(jobs, key)
        for row, line, job, own_lengths in zip(own, lines, jobs, of_layouts, strict=True):
            stored = np.zeros(len(firsts), abi.STORED)
            found = native.encode(job, line, stored, 1)
            if found is None:
                check_memory(job["result"])
                raise _odd_error(columns, call)
            of_table = stored.tobytes(), found.entries.tobytes(), found.fields[plan.table.order].tobytes()
            data = [column.data[row] for column in objects]
            out[row] = RowAlone(plan.token, own_lengths, *of_table, data, bare, about, found.body)
        done_jobs.keep(key, jobs[-1])
    return [out[row] for row in range(rows)]


def _layouts_alone(lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Of rows [n], which have layouts of lengths [n, m] without padding: for the core the table of layouts of each,
    where the bounds of each lie, [n, m], and what these point to."""
    held = np.zeros((*lengths.shape, 6), np.int64)  # of each: start, count, splits, bounds
    held[..., 1], held[..., 3], held[..., 5] = lengths, lengths > 0, lengths
    at = address(held) + 48 * np.arange(lengths.size).reshape(lengths.shape)
    lines = np.stack([np.ones_like(at), lengths, at, at + 8, at + 16, at + 32], -1).reshape(len(lengths), -1)
    return lines, at + 32, held


def rows_together(rows: Sequence[RowAlone], names: frozenset[str]) -> PackedBatch:
    """Some fields of rows of one token."""
    plan, schema, numbers, objects = _selected(rows[0].token, names)
    count, layouts = len(rows), plan.table.names
    lengths = np.array([row.lengths for row in rows], np.int64).reshape(count, len(layouts))
    lines, _, held = _layouts_alone(lengths)
    pads = np.zeros(len(plan.forms), abi.ARRAY)
    bodies: list[Body] = []
    for row, line in zip(rows, lines, strict=True):
        stored, entries = np.frombuffer(row.stored, abi.STORED), np.frombuffer(row.entries, abi.ENTRY)
        table = Table(1, 1, layouts, stored, entries, np.frombuffer(row.fields, np.int64), pads, row.body)
        table.__dict__["_layout_rows"] = line, held
        bodies.append(Body(table, numbers))
    each = Segments(np.arange(count), np.zeros(count, np.int64), np.ones(count, np.int64))
    known = {name: RowLayout.from_lengths(lengths[:, at]) for at, name in enumerate(layouts)}
    frames = {name: (layout.width, 0) for name, layout in known.items()}
    picked = Picked((Columns(tuple(numbers), tuple(bodies), each, layouts),), frames)
    bare = all(row.bare for row in rows)
    data = {path: Objects([row.objects[place] for row in rows], 1, False, bare) for path, place in objects.items()}
    batch = PackedBatch(count, schema, picked, data)
    batch.__dict__["layouts"] = known
    return batch


@lru_cache(1024)
def _selected(token: bytes, names: frozenset[str]) -> tuple[_Plan, Schema, dict[Path, int], dict[Path, int]]:
    """The plan of fields; of some of them the schema, the numbers of tensors, and the places of objects."""
    plan = _plan_of(pickle.loads(token))
    forms = tuple([form for form in plan.schema.forms if form.path[0] in names])
    numbers = {form.path: at for at, form in enumerate(plan.forms) if form in forms}
    objects = [form for form in plan.schema.forms if form.dtype is None]
    places = {form.path: at for at, form in enumerate(objects) if form in forms}
    return plan, Schema(plan.schema.root, forms, ()), numbers, places
