"""Column groups: some fields of a view, and where their rows come from.

    Source         a packed batch, here or elsewhere, and its BatchMeta: schema and lengths
    ColumnGroup    some fields, the sources of their rows, and segments: which rows of which source

A view has at least one group. All groups of a view hold the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, ranges
from maskpack.core.latest import Latest
from maskpack.core.tree import Node, select_entries
from maskpack.errors import LayoutError
from maskpack.fields.registry import Key, Path
from maskpack.layout.row_layout import RowLayout
from maskpack.packed.batch import PackedBatch
from maskpack.packed.join import DIFFERENT_FORMS, joined, merged, restricted, tokens_taken
from maskpack.packed.rows import Columns, Rows, Segments, TokenSpans, indices, used
from maskpack.views.origins import UNKNOWN, Origins

heads: Latest[Rows] = Latest()
"""The rows of batches without any, of the same schema and widths."""


class Cut(NamedTuple):
    """Spans of the tokens of some fields."""

    paths: tuple[Path, ...]
    spans: TokenSpans

    def of(self, packed: PackedBatch, *, rows: bool = True) -> PackedBatch:
        """The spans of a packed batch, as rows; without `rows`, the schema alone."""
        spans = self.spans if rows else self.spans.take(np.zeros(0, np.int64))
        return tokens_taken(only(packed, self.paths), spans, "BatchView.take_tokens")


@dataclass(frozen=True, eq=False)
class BatchMeta:
    """The schema, row lengths and size of a packed batch that may be in another process or on another node.

    Attributes:
        head: the batch without its rows: the schema, and Python objects that stand for all rows.
        layouts: the RowLayouts of all its rows, by name.
        num_rows: B.
        nbytes: the size of its encoded rows.
    """

    head: PackedBatch
    layouts: Mapping[str, RowLayout]
    num_rows: int
    nbytes: int

    @classmethod
    def of(cls, packed: PackedBatch) -> BatchMeta:
        """Returns the BatchMeta of a packed batch. It keeps no memory of the batch alive.

        Raises LayoutError for a batch packed with batch_size [].
        """
        if not isinstance(packed, PackedBatch):
            raise LayoutError(f"BatchMeta.of: got {said(packed)}; expected a PackedBatch. Pass what compress returned.")
        key = packed.schema, tuple(packed.frames.items())
        head = packed.take(slice(0, 0))
        rows = heads.get(key) or heads.keep(key, head.own().rows)
        return cls(replace(head, rows=rows), packed.layouts, packed.num_rows, packed.nbytes)

    def take(self, rows: IntArray) -> BatchMeta:
        """Returns the BatchMeta of some rows of the batch."""
        layouts = {name: layout.take(rows) for name, layout in self.layouts.items()}
        return BatchMeta(self.head, layouts, rows.size, self.nbytes_of(rows.size))

    def take_tokens(self, cut: Cut) -> BatchMeta:
        """Returns the BatchMeta of spans of tokens."""
        head = cut.of(self.head, rows=False)
        layouts = dict.fromkeys(head.layouts, cut.spans.rows)
        share = cut.spans.rows.num_tokens / max(1, self.layouts[cut.spans.layout].num_tokens)
        return BatchMeta(head, layouts, cut.spans.row.size, round(self.nbytes * share))

    def nbytes_of(self, rows: int) -> int:
        """The encoded bytes of some rows, if every row takes an equal share."""
        return round(self.nbytes * rows / self.num_rows) if self.num_rows else 0


@dataclass(frozen=True, eq=False)
class Source:
    """A packed batch, here or elsewhere.

    Attributes:
        held: the PackedBatch, or a reference from which `get` fetches it. Equal references are one batch.
        meta: its schema, lengths and size; of the spans, if there is a cut.
        origins: the rows of packed batches that its rows stand for.
        cut: the spans that its rows are; None for whole rows.
    """

    held: Any
    meta: BatchMeta
    origins: Origins = UNKNOWN
    cut: Cut | None = None

    @property
    def key(self) -> Any:
        """A key that is equal for sources that are one batch: the same object, or equal references."""
        return self.held if self.cut is None else (self.held, id(self.cut))

    @property
    def num_rows(self) -> int:
        return self.meta.num_rows

    @property
    def layouts(self) -> Mapping[str, RowLayout]:
        return self.meta.layouts

    def nbytes_of(self, paths: Sequence[Path]) -> int:
        """The encoded bytes of the batch, of which nobody knows here what each field takes."""
        return self.meta.nbytes

    def take_tokens(self, cut: Cut) -> Source:
        """Spans of the tokens of its rows, which are cut when the batch is fetched."""
        meta = self.meta.take_tokens(cut)
        if isinstance(self.held, PackedBatch):
            return Source(cut.of(self.held), meta)
        spans = cut.spans if self.cut is None else cut.spans.within(self.cut.spans)
        return Source(self.held, meta, cut=Cut(cut.paths, spans))

    def checked(self, packed: Any) -> PackedBatch:
        """`packed`, as it was fetched. Raises LayoutError unless it is the batch that `meta` describes."""
        if not isinstance(packed, PackedBatch):
            raise LayoutError(
                f"BatchView.materialize: a reference resolved to {said(packed)}; expected a PackedBatch. Put what "
                "compress returned."
            )
        meta, packed = self.meta, packed if self.cut is None else self.cut.of(packed)
        fits = packed.num_rows == meta.num_rows and packed.schema == meta.head.schema
        if not fits or dict(packed.layouts) != dict(meta.layouts):
            raise LayoutError(
                f"BatchView.materialize: a reference resolved to {packed!r}; expected {meta.num_rows} rows with the "
                "fields and lengths of its BatchMeta. Give BatchView.at the BatchMeta of that batch."
            )
        return packed


@dataclass(frozen=True, eq=False)
class ColumnGroup(Columns):
    """Some fields of a view, and where their rows come from: its parts are Sources, or the places of batches that were
    fetched.

    Attributes:
        head: a batch with the schema of the fields and no rows; None if it is the head of the only source, and need
            not be sent.
    """

    head: PackedBatch | None = None

    def declared(self) -> PackedBatch:
        """The fields of the group, without rows."""
        assert self.head is not None
        return only(self.head, self.paths)

    def take_tokens(self, spans: TokenSpans) -> ColumnGroup:
        """Spans of tokens, as rows."""
        head = Cut(self.paths, spans).of(self.declared(), rows=False)
        if not head.layouts:
            return self.take(spans.row)
        number, row = (of_rows[spans.row] for of_rows in self.rows.by_row())
        at = np.empty(row.size, np.int64)
        sources: list[Source] = []
        for place, source in enumerate(self.parts):
            own = np.flatnonzero(number == place)
            at[own] = np.arange(own.size)
            cut = Cut(self.paths, replace(spans.take(own), row=row[own]))
            sources.append(source.take_tokens(cut))
        return ColumnGroup(self.paths, tuple(sources), Segments.of_rows(number, at), head=head)

    def origins(self) -> Origins:
        """The rows of packed batches that its rows stand for."""
        known: list[tuple[IntArray, IntArray, IntArray]] = []
        for share in self.rows.shares:
            row, *more = self.parts[share.source].origins.take(indices(share.rows)).by_row()
            known.append((indices(share.places)[row], *more))
        return Origins.of(*map(np.concatenate, zip(*known, strict=True))) if known else UNKNOWN

    def known_as(self, origins: Origins) -> ColumnGroup:
        """The same rows, which stand for the rows that `origins` names."""
        number, row = self.rows.by_row()
        order = np.argsort(number, kind="stable")
        ends = np.searchsorted(number[order], np.arange(len(self.parts) + 1))
        place, origin, where = origins.by_row()
        at = np.argsort(place, kind="stable")
        sources: list[Source] = []
        for source, begin, end in zip(self.parts, ends[:-1], ends[1:], strict=True):
            rows = order[begin:end]
            first, last = (np.searchsorted(place[at], rows, side) for side in ("left", "right"))
            taken = at[ranges(first, last - first)]
            known = Origins.of(np.repeat(row[rows], last - first), origin[taken], where[taken])
            sources.append(replace(source, origins=known))
        return replace(self, parts=tuple(sources))

    def assembled(self, fetch: Callable[[Any], PackedBatch]) -> PackedBatch:
        """The rows of its fields as one packed batch. `fetch` gives the packed batch of a source."""
        parts, order = list[PackedBatch](), self.rows.order
        for share in self.rows.shares:
            packed = fetch(self.parts[share.source])
            parts.append(only(packed if share.is_all(packed.num_rows) else packed.take(share.rows), self.paths))
        if self.head is None or (len(parts) == 1 and _alike(parts[0], self.declared())):
            whole = parts[0]
        else:
            whole = joined([self.declared(), *parts], "BatchView.materialize")
        return whole if order is None else whole.take(order)


# -------------------------------------------------------------------- batches of some fields


def assembled(
    groups: Sequence[ColumnGroup], order: Sequence[Path], root: Node, fetch: Callable[[Any], PackedBatch]
) -> PackedBatch:
    """The rows of all groups as one packed batch with the given root. `fetch` gives the packed batch of a source."""
    packed = parts_merged([group.assembled(fetch) for group in groups], order)
    return packed if packed.schema.root == root else replace(packed, schema=replace(packed.schema, root=root))


def cat_groups(groups: Sequence[ColumnGroup], columns: Columns) -> ColumnGroup:
    """The group of `columns`, which has the rows of some fields of several groups."""
    paths = columns.paths
    heads = {id(group.head): only(group.declared(), paths) for group in groups}
    first, *more = heads.values()
    others = [head for head in more if head.frames != first.frames or not _alike(head, first)]
    head = joined([first, *others], "BatchView.cat") if others else first
    parts = columns.parts
    if not others:  # one head for all, which then need not be sent
        parts = [_under(part, head) if heads.get(id(part.meta.head)) is part.meta.head else part for part in parts]
    if any(
        form.reason == DIFFERENT_FORMS for form in head.schema.forms
    ):  # its parts are not widened: check that they fit as they are
        joined([head, *(only(source.meta.head, paths) for source in columns.parts)], "BatchView.cat")
    return ColumnGroup(paths, tuple(parts), columns.rows, head=head)


def _under(source: Source, head: PackedBatch) -> Source:
    """The source with another head that is alike."""
    return replace(source, meta=replace(source.meta, head=head))


def narrowed(
    groups: Sequence[ColumnGroup], order: Sequence[Path], fields: Sequence[Key], call: str
) -> tuple[list[ColumnGroup], tuple[Path, ...]]:
    """The groups with the fields that are named, and these fields in the order of the view; all if none is named.
    Raises FieldError for a field that is not in the view."""
    try:
        kept = _named(tuple(order), tuple(fields), call)
    except TypeError:  # a list in the place of a name
        kept = _named.__wrapped__(tuple(order), tuple(fields), call)
    return list(used([group.only(kept) for group in groups])), kept


@lru_cache(256)
def _named(order: tuple[Path, ...], fields: tuple[Key, ...], call: str) -> tuple[Path, ...]:
    return tuple(path for path, _ in select_entries([(path, None) for path in order], fields, call))


def parts_merged(parts: Sequence[PackedBatch], order: Sequence[Path]) -> PackedBatch:
    if len(parts) == 1 and tuple(form.path for form in parts[0].schema.forms) == tuple(order):
        return parts[0]
    return merged(parts, order)


def only(packed: PackedBatch, paths: Sequence[Path]) -> PackedBatch:
    if len(paths) == len(packed.schema.forms):
        return packed
    return restricted(packed, set(paths))


def _alike(part: PackedBatch, head: PackedBatch) -> bool:
    """Whether the rows of the only part have the schema that is declared."""
    return part.schema == head.schema and all(
        (part.objects[path].depth, part.objects[path].stacked) == (held.depth, held.stacked)
        for path, held in head.objects.items()
    )
