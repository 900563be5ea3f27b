"""Strands: some fields of a view, and where their rows come from.

    Source    a packed batch, here or elsewhere, and its Outline: schema and lengths
    Strand    fields, the sources of their rows, and segments that number these

A view has one strand or more; they hold the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, ranges
from maskpack.core.tree import Node, chosen
from maskpack.errors import LayoutError
from maskpack.fields.registry import Key, Path
from maskpack.layout.row_layout import RowLayout
from maskpack.packed.batch import PackedBatch
from maskpack.packed.join import APART, joined, merged, restricted
from maskpack.packed.pickling import together
from maskpack.views.origins import UNKNOWN, Origins
from maskpack.views.segments import Segments


@dataclass(frozen=True, eq=False)
class Outline:
    """What is known of a packed batch that lies elsewhere.

    Attributes:
        head: the batch without its rows: the schema, and Python objects that stand for all rows.
        layouts: those of all its rows.
        num_rows: B.
        nbytes: of its encoded rows.
    """

    head: PackedBatch
    layouts: Mapping[str, RowLayout]
    num_rows: int
    nbytes: int

    @classmethod
    def of(cls, packed: PackedBatch) -> Outline:
        """It keeps no memory of the batch alive. Raises LayoutError for a batch packed with batch_size []."""
        if not isinstance(packed, PackedBatch):
            raise LayoutError(f"Outline.of: got {said(packed)}; expected a PackedBatch. Pass what compress returned.")
        head = packed.take(slice(0, 0))
        fields, row_pads = together((head.fields, head.row_pads))
        return cls(replace(head, fields=fields, row_pads=row_pads), packed.layouts, packed.num_rows, packed.nbytes)

    def take(self, rows: IntArray) -> Outline:
        """That of some rows of the batch."""
        layouts = {name: layout.take(rows) for name, layout in self.layouts.items()}
        return Outline(self.head, layouts, rows.size, self.nbytes_of(rows.size))

    def nbytes_of(self, rows: int) -> int:
        """An equal share of the encoded bytes for each row."""
        return round(self.nbytes * rows / self.num_rows) if self.num_rows else 0


@dataclass(frozen=True, eq=False)
class Source:
    """A packed batch, here or elsewhere.

    Attributes:
        held: a PackedBatch, or anything that `get` makes one of.
        outline: what is known of it.
        origins: which rows its rows are.
    """

    held: Any
    outline: Outline
    origins: Origins = UNKNOWN

    @property
    def key(self) -> Any:
        """Equal for sources that are one batch: the same object, or references that are equal. A reference without a
        hash is equal to itself alone."""
        try:
            hash(self.held)
        except TypeError:
            return Source, id(self.held)
        return self.held

    def checked(self, packed: Any) -> PackedBatch:
        """What was fetched. Raises LayoutError unless it is the batch that the outline tells of."""
        if not isinstance(packed, PackedBatch):
            raise LayoutError(
                f"BatchView.materialize: a reference led to {said(packed)}; expected a PackedBatch. Put "
                "what compress returned."
            )
        known = self.outline
        fits = packed.num_rows == known.num_rows and packed.schema == known.head.schema
        if not fits or dict(packed.layouts) != dict(known.layouts):
            raise LayoutError(
                f"BatchView.materialize: a reference led to {packed!r}; expected {known.num_rows} rows with the "
                "fields and lengths of its outline. Give BatchView.at the outline of the batch that lies there."
            )
        return packed


@dataclass(frozen=True, eq=False)
class Strand:
    """Some fields, and where their rows come from.

    Attributes:
        paths: the fields.
        sources: what the segments number: Sources, or where batches lie that were fetched.
        segments: of all rows.
        head: the fields as they are declared, without rows; None where it is that of the only source, and need not
            travel.
    """

    paths: tuple[Path, ...]
    sources: tuple[Any, ...]
    segments: Segments
    head: PackedBatch | None

    def declared(self) -> PackedBatch:
        """Its fields without rows."""
        assert self.head is not None
        return only(self.head, self.paths)

    def take(self, index: IntArray) -> Strand:
        return replace(self, segments=self.segments.take(index)).trimmed()

    def slice(self, begin: int, end: int) -> Strand:
        return replace(self, segments=self.segments.slice(begin, end)).trimmed()

    def trimmed(self) -> Strand:
        """Without the sources that give no row."""
        used, numbers = np.unique(self.segments.source, return_inverse=True)
        if used.size == len(self.sources):
            return self
        sources = tuple(self.sources[number] for number in used)
        return replace(self, sources=sources, segments=replace(self.segments, source=numbers))

    def layout(self, name: str) -> RowLayout:
        shares, order = self.segments.shares()
        parts = [self.sources[share.source].outline.layouts[name].take(share.rows) for share in shares]
        layout = RowLayout.cat([self.declared().layouts[name], *parts])
        return layout if order is None else layout.take(order)

    def origins(self) -> Origins:
        """Which rows its rows are."""
        shares, order = self.segments.shares()
        known = [self.sources[share.source].origins.take(share.rows).by_row() for share in shares]
        if not known:
            return UNKNOWN
        row, origin, number = (np.concatenate(column) for column in zip(*known, strict=True))
        begins = np.cumsum([0, *(share.rows.size for share in shares[:-1])])
        row += np.repeat(begins, [own[0].size for own in known])
        return Origins.of(row if order is None else np.argsort(order)[row], origin, number)

    def known_as(self, origins: Origins) -> Strand:
        """The same rows, which are those of `origins`."""
        number, row = self.segments.by_row()
        order = np.argsort(number, kind="stable")
        ends = np.searchsorted(number[order], np.arange(len(self.sources) + 1))
        place, origin, where = origins.by_row()
        at = np.argsort(place, kind="stable")
        sources: list[Source] = []
        for source, begin, end in zip(self.sources, ends[:-1], ends[1:], strict=True):
            rows = order[begin:end]
            first, last = (np.searchsorted(place[at], rows, side) for side in ("left", "right"))
            taken = at[ranges(first, last - first)]
            known = Origins.of(np.repeat(row[rows], last - first), origin[taken], where[taken])
            sources.append(replace(source, origins=known))
        return replace(self, sources=tuple(sources))

    def assembled(self, fetch: Callable[[Any], PackedBatch]) -> PackedBatch:
        """The rows of its fields, from the sources that `fetch` gives."""
        shares, order = self.segments.shares()
        parts = [only(fetch(self.sources[share.source]).take(share.rows), self.paths) for share in shares]
        if self.head is None or (len(parts) == 1 and _alike(parts[0], self.declared())):
            whole = parts[0]
        else:
            whole = joined([self.declared(), *parts], "BatchView.materialize")
        return whole if order is None else whole.take(order)


# -------------------------------------------------------------------- batches of some fields


def assembled(
    strands: Sequence[Strand], order: Sequence[Path], root: Node, fetch: Callable[[Any], PackedBatch]
) -> PackedBatch:
    """The rows of all strands as one packed batch with that root; `fetch` gives the batch of a source."""
    packed = parts_merged([strand.assembled(fetch) for strand in strands], order)
    return replace(packed, schema=replace(packed.schema, root=root))


def strands_joined(strands: Sequence[Strand], paths: Sequence[Path]) -> Strand:
    sources: dict[Any, Source] = {}
    numbers: dict[Any, int] = {}
    numbered: list[Segments] = []
    for strand in strands:
        keys = [source.key for source in strand.sources]
        for key, source in zip(keys, strand.sources, strict=True):
            numbers.setdefault(key, len(numbers))
            sources.setdefault(key, source)
        numbered.append(strand.segments.renumbered(np.array([numbers[key] for key in keys], np.int64)))
    heads = list({id(strand.head): only(strand.declared(), paths) for strand in strands}.values())
    head = heads[0] if len(heads) == 1 else joined(heads, "BatchView.cat")
    if any(form.reason == APART for form in head.schema.forms):  # its parts are not widened: do they fit as they are?
        joined([head, *(only(source.outline.head, paths) for source in sources.values())], "BatchView.cat")
    return Strand(tuple(paths), tuple(sources.values()), Segments.cat(numbered), head)


def narrowed(
    strands: Sequence[Strand], order: Sequence[Path], fields: Sequence[Key], call: str
) -> tuple[list[Strand], tuple[Path, ...]]:
    """The strands with the fields named (all if none is), and these in their order. Raises LayoutError for others."""
    kept = tuple(path for path, _ in chosen([(path, None) for path in order], fields, call))
    left = [without(strand, set(order) - set(kept)) for strand in strands]
    return [strand for strand in left if strand.paths] or left[:1], kept  # one that tells how many rows there are


def without(strand: Strand, paths: Collection[Path]) -> Strand:
    kept = tuple(path for path in strand.paths if path not in paths)
    return strand if len(kept) == len(strand.paths) else replace(strand, paths=kept)


def parts_merged(parts: Sequence[PackedBatch], order: Sequence[Path]) -> PackedBatch:
    if len(parts) == 1 and tuple(form.path for form in parts[0].schema.forms) == tuple(order):
        return parts[0]
    return merged(parts, order)


def only(packed: PackedBatch, paths: Sequence[Path]) -> PackedBatch:
    if len(paths) == len(packed.schema.forms):
        return packed
    return restricted(packed, set(paths))


def _alike(part: PackedBatch, head: PackedBatch) -> bool:
    """Whether rows that come in one part come in the form that is declared."""
    return part.schema == head.schema and all(
        (part.objects[path].depth, part.objects[path].stacked) == (held.depth, held.stacked)
        for path, held in head.objects.items()
    )
