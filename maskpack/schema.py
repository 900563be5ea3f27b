"""What a batch is made of, apart from its values: the form of every entry, and how a nested batch carries them.

A nested batch has one entry more than the padded one, LAYOUTS: for each layout a jagged table of its runs, one row of
the table for each row of the batch, so that it follows the rows through indexing, chunk, split and cat; the pads of
fields that have one a row; and the schema.
A run is its start, its length and a checksum, int32 each, as bytes: bytes survive the casts that `float()` and
`to(dtype)` apply to every entry, and the checksum finds any other arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.errors import LayoutError
from maskpack.jagged import is_regular, jagged_from, offsets_of, to_host
from maskpack.layout import RowLayout
from maskpack.registry import PER_ROW, PadValue, Path, show
from maskpack.rows import IntArray, RunTable
from maskpack.tensors import need_batch
from maskpack.tree import Node, build, entry_at, has

LAYOUTS = "_maskpack"
"""The entry of a nested batch that leads back to the padded one. `select` must name it to keep it."""

INTACT = "Restore from the batch as nest_batch_by_mask returned it; index, chunk, cat and casts are fine."


@dataclass(frozen=True)
class FieldForm:
    """The form that one entry has at home, before nesting and after restoring.

    Attributes:
        path: its place in the batch.
        kind: `padded` [B, S, *F] under a layout, `flat` [T, *F] under a layout, `jagged` under its own layout,
            `dense`, `object` (no tensor) or `node` (a sub-TensorDict).
        layout: name of the layout, for the first three.
        pads: what the field is padded with: the candidates before they are verified, then the one.
        ragged_dim: dim of the padded field that the width runs along.
        dtype: of the field.
        node: batch dims and device of a sub-TensorDict.
        device, shape: where a packed field came from, and the shape of one element, F; None and () while it is not
            packed.
        hints: encodings to try first.
        reason: why a dense field is dense; None where that is by design.
    """

    path: Path
    kind: Literal["padded", "flat", "jagged", "dense", "object", "node"]
    layout: str | None = None
    pads: tuple[PadValue, ...] = field(default=(), compare=False)
    ragged_dim: int = 1
    dtype: torch.dtype | None = None
    node: Node | None = None
    device: str | None = None
    shape: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()
    reason: str | None = None
    pads_by_bits: str = field(init=False)
    """`pads` as forms compare them: 0.0 is not -0.0, and NaN is NaN."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pads_by_bits", repr(self.pads))


@dataclass(frozen=True)
class Schema:
    """The forms of a batch's entries in key order, its root, and the name, width and anchor of each axis."""

    root: Node
    forms: tuple[FieldForm, ...]
    axes: tuple[tuple[str, int, int], ...]


def write_layouts(
    schema: Schema, tables: Mapping[str, Tensor], row_pads: Mapping[Path, Tensor], rows: int, device: str | None
) -> TensorDict:
    """The LAYOUTS entry of a batch on `device`, from the run table of each layout, and the pads [B] of each field whose
    pad is PER_ROW."""
    batch = schema.root.batch_size(rows)[:1]
    here = Node(() if batch else None, device)
    held: Any = NonTensorData(schema, batch_size=batch, device=device)
    entries: list[tuple[Path, Any]] = [(("schema",), held), (("runs",), here)]
    entries += [(("runs", name), tables[name]) for name, _, _ in schema.axes]
    if row_pads:
        entries.append((("pads",), here))
        entries += [(("pads", repr(path)), pad) for path, pad in row_pads.items()]  # ("a/b",) is not ("a", "b")
    return build(here, entries, rows)


def run_tables(layouts: Mapping[str, RowLayout]) -> dict[str, Tensor]:
    """The run table of each layout, on its device."""
    made: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        runs = torch.stack([layout.starts, layout.counts, _check(layout.starts, layout.counts)], 1)
        made[name] = jagged_from(runs.view(torch.uint8), layout.splits, 0, most_runs(layout.table))
    return made


def run_lines(tables: Sequence[RunTable]) -> npt.NDArray[np.int32]:
    """int32 [N, 3]: the runs of some layouts as LAYOUTS holds them, one layout after the other."""
    starts, counts = (np.concatenate([table[part] for table in tables]) for part in (0, 1))
    lines = np.empty((starts.size, 3), np.int32)
    lines[:, 0], lines[:, 1], lines[:, 2] = starts, counts, _check(starts, counts)
    return lines


def most_runs(table: RunTable) -> int:
    """Of a row."""
    return int((table.splits[1:] - table.splits[:-1]).max(initial=0))


def read_pads(batch: TensorDictBase, form: FieldForm, call: str) -> Tensor | None:
    """The pads [B] of a field whose pad is PER_ROW; None for any other."""
    if form.pads != (PER_ROW,):
        return None
    pads = entry_at(batch, (LAYOUTS, "pads", repr(form.path)))
    if not isinstance(pads, Tensor):
        raise LayoutError(f'{call}: the row pads of field "{show(form.path)}" are gone. {INTACT}')
    return pads


def read_layouts(batch: TensorDictBase, call: str) -> tuple[Schema, dict[str, RowLayout]]:
    """The schema and the layouts of a nested batch, checked against the rows it has now. One synchronisation on CUDA.

    Raises LayoutError, named after what an operation did to the batch.
    """
    need_batch(batch, call)
    if not has(batch, LAYOUTS):
        raise LayoutError(
            f'{call}: the batch has no entry "{LAYOUTS}", so it was not nested by nest_batch_by_mask, or select() '
            f'dropped the entry. Nest it first, or select it too: batch.select("responses", maskpack.LAYOUTS).'
        )
    held = entry_at(batch, (LAYOUTS, "schema"))
    if held is None and entry_at(batch, (LAYOUTS, "runs")) is None:
        raise LayoutError(
            f'{call}: the entry "{LAYOUTS}" is not what nest_batch_by_mask makes; expected that name for its own. '
            "Rename the field."
        )
    schema: Any = held.data if isinstance(held, NonTensorData) else None
    if not isinstance(schema, Schema):
        raise LayoutError(
            f"{call}: the batch was put together from batches of different widths or fields; expected one schema. "
            "Pad the batches to one width and nest them again, or restore each part before torch.cat."
        )
    tables: dict[str, Tensor] = {}
    for name, _, _ in schema.axes:
        table = entry_at(batch, (LAYOUTS, "runs", name))
        if not isinstance(table, Tensor) or not table.is_nested:
            raise LayoutError(
                f'{call}: the run table of layout "{name}" is no jagged tensor any more; a single row was taken by '
                "an integer index, or the entry was replaced. Take one row by a list: batch[[i]]."
            )
        tables[name] = table
    sizes = {name: (width, anchor) for name, width, anchor in schema.axes}
    layouts: dict[str, RowLayout] = {}
    plain = [table.values().to(torch.uint8).contiguous().view(torch.int32) for table in tables.values()]
    first = _first_fields(batch, schema, tables)
    parts = [(*runs.T, offsets_of(tables[name])) for name, runs in zip(tables, plain, strict=True)]
    read = to_host([tensor for part in parts for tensor in part] + [offsets_of(value) for value in first.values()])
    for index, name in enumerate(tables):
        starts, counts, check, splits = read[4 * index : 4 * index + 4]
        if not np.array_equal(_check(starts, counts), check):
            raise LayoutError(f'{call}: the run table of layout "{name}" was changed by arithmetic. {INTACT}')
        layouts[name] = _layout(starts, counts, splits, sizes[name], plain[index].device, call, name)
    for (name, value), offsets in zip(first.items(), read[4 * len(tables) :], strict=True):
        if np.array_equal(offsets, layouts[name].row_offsets):
            layouts[name].__dict__["offsets"] = offsets_of(value)  # arithmetic between old and new fields works
    return schema, layouts


def _first_fields(batch: TensorDictBase, schema: Schema, layouts: Collection[str]) -> dict[str, Tensor]:
    """The first jagged field of each layout."""
    fields: dict[str, Tensor] = {}
    for form in schema.forms:
        value = entry_at(batch, form.path) if form.kind == "padded" else None
        if form.layout is not None and form.layout in layouts and isinstance(value, Tensor) and is_regular(value):
            fields.setdefault(form.layout, value)
    return fields


_Runs = TypeVar("_Runs", Tensor, IntArray)


def _check(starts: _Runs, counts: _Runs) -> _Runs:
    """A checksum of each run, below 2^31."""
    return starts % 32749 * 30011 + counts % 32719 * 20011 + 12345


def _layout(
    starts: IntArray,
    counts: IntArray,
    splits: IntArray,
    size: tuple[int, int],
    device: torch.device,
    call: str,
    name: str,
) -> RowLayout:
    width, anchor = size
    try:
        return RowLayout.from_runs(starts, counts, np.diff(splits), width, device=device, anchor=anchor)
    except LayoutError as error:
        raise LayoutError(f'{call}: the run table of layout "{name}" was changed: {error} {INTACT}') from error
