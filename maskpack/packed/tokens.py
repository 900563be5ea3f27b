"""Parts of rows: spans of the tokens of a layout, as rows of a packed batch, which are read where they lie.

spans   row 0, tokens 2 to 5     row 0, tokens 5 to 9     row 3, tokens 0 to 4
result  jagged rows of 3, 4 and 4 tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from maskpack.core.arguments import named
from maskpack.core.bits import Words, words
from maskpack.core.index import IntArray, ranges
from maskpack.core.tensors import host_array
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.response import SEQUENCE
from maskpack.nesting.schema import FieldForm, Schema, name_of_jagged
from maskpack.packed.columns import Columns, Frame, Picked, used
from maskpack.packed.decode import decoded
from maskpack.packed.segments import Segments

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch


@dataclass(frozen=True, eq=False)
class TokenSpans:
    """Attributes: `layout`, whose tokens are counted; int64 [N], the `row` of each span, its first token, `start`, and
    its number of tokens, `count`."""

    layout: str
    row: IntArray
    start: IntArray
    count: IntArray

    @classmethod
    def of(cls, spans: Any, layout: str | None, layouts: Mapping[str, RowLayout], call: str) -> TokenSpans:
        """From [N, 3]: row, start and stop. `layout` None stands for the sequence, or the only layout.

        Raises FieldError if it is not among `layouts`, and LayoutError for spans that its rows do not have.
        """
        if layout is None:
            layout = next(iter(layouts)) if len(layouts) == 1 else SEQUENCE
        lengths = named(layouts, layout, call).lengths
        array = host_array(spans, "spans", call)
        if not array.size:
            array = np.zeros((0, 3), np.int64)
        if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
            raise LayoutError(
                f"{call}: spans are {array.dtype} {array.shape}; expected whole numbers (N, 3). Give the row, the "
                "first token and the token behind the last of each span."
            )
        row, start, stop = np.ascontiguousarray(array.T, np.int64)
        there = (row >= 0) & (row < lengths.size)
        length = lengths[np.where(there, row, 0)] if lengths.size else np.zeros(row.size, np.int64)
        bad = np.flatnonzero(~there | (start < 0) | (start > stop) | (stop > length))
        if bad.size:
            at = int(bad[0])
            has = f"which has {int(length[at])} tokens" if there[at] else f"and the batch has {lengths.size} rows"
            raise LayoutError(
                f"{call}: span {at} is tokens {int(start[at])} to {int(stop[at])} of row {int(row[at])}, {has} in "
                f'layout "{layout}"; expected tokens that are there. Count from 0, and only valid tokens.'
            )
        return cls(layout, row, start, stop - start)

    def take(self, index: IntArray) -> TokenSpans:
        """Some spans, in the order given."""
        return TokenSpans(self.layout, self.row[index], self.start[index], self.count[index])

    def within(self, other: TokenSpans) -> TokenSpans:
        """Spans whose rows are the spans of `other`, as spans of the rows of `other`."""
        return TokenSpans(other.layout, other.row[self.row], other.start[self.row] + self.start, self.count)

    @cached_property
    def rows(self) -> RowLayout:
        """The layout of the spans."""
        return RowLayout.from_lengths(self.count)


@dataclass(frozen=True, eq=False)
class TokenBody:
    """Spans of the rows of a packed batch. Nothing is decoded before its rows are.

    Attributes:
        batch: fields of one layout.
        spans: the rows of the body.
    """

    batch: PackedBatch
    spans: TokenSpans

    @property
    def key(self) -> Any:
        return self

    @property
    def num_rows(self) -> int:
        return self.spans.row.size

    @property
    def layouts(self) -> dict[str, RowLayout]:
        return {name_of_jagged(self.batch.tensors[0].path): self.spans.rows}

    def nbytes_of(self, paths: Sequence[Path]) -> int:
        """The encoded bytes of some fields, if every token takes an equal share."""
        part = self.batch.select(*paths) if paths else None
        tokens = self.batch.layouts[self.spans.layout].num_tokens
        return 0 if part is None else round(part.nbytes * self.spans.rows.num_tokens / max(1, tokens))

    def words_of(self, paths: Sequence[Path], rows: IntArray | None) -> list[Words]:
        """The words [T, ...] of some fields in some rows of the body, in the order given; None for all."""
        spans = self.spans if rows is None else self.spans.take(rows)
        own, place = np.unique(spans.row, return_inverse=True)
        part = self.batch.take(own)
        index = ranges(part.layouts[spans.layout].row_offsets[place] + spans.start, spans.count)
        whole = decoded(part, [part.forms[path] for path in paths], True)
        return [words(whole[path]).numpy()[index] for path in paths]


def tokens_taken(packed: PackedBatch, spans: TokenSpans, call: str) -> PackedBatch:
    """The spans as rows. Raises LayoutError if a field has another layout."""
    inside = [form.path for form in packed.tensors if form.layout == spans.layout]
    name = name_of_jagged(inside[0]) if inside else ""
    schema = _schema_of_spans(packed.schema, spans.layout, name, call)
    rows = packed.take(spans.row)
    columns: list[Columns] = [own.without(inside).kept(own.paths, ()) for own in rows.picked.columns]
    frames: dict[str, Frame] = {}
    if inside:
        body = TokenBody(packed.select(*inside), spans)
        columns.append(Columns(tuple(inside), (body,), Segments.whole(spans.row.size), (name,)))
        frames[name] = spans.rows.width, 0
    return replace(rows, schema=schema, rows=Picked(used(columns), frames))


def _schema_of_spans(schema: Schema, layout: str, name: str, call: str) -> Schema:
    """The schema in which the fields of a layout are jagged, in the layout `name`."""
    forms: list[FieldForm] = []
    for form in schema.forms:
        if form.layout not in (None, layout):
            raise LayoutError(
                f'{call}: field "{show(form.path)}" has the layout "{form.layout}"; expected fields of "{layout}", and '
                "fields without a layout. Select these first, and take the tokens of the others by their own layout."
            )
        if form.node is not None and form.node.more_dims:
            raise LayoutError(
                f'{call}: the sub-batch "{show(form.path)}" has batch dims {form.node.more_dims} behind its rows; '
                "expected none. Leave it out, or give the TensorDict batch_size=[rows] before packing."
            )
        if form.layout is not None:
            kind = "jagged" if form.kind == "padded" else form.kind
            form = replace(form, kind=kind, layout=name, ragged_dim=1)
        forms.append(form)
    return Schema(schema.root, tuple(forms), ())
