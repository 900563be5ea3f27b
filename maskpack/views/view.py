"""BatchView: an ordered list of row segments of packed batches, which may be in another process or on another node.

    here       lengths, schema, segments     view.take(...), split(...), cat(...): numbers move, data stays
    elsewhere  the packed batches            view.materialize(get=ray.get): each is fetched once, its rows are decoded

Fields that were added later have segments of their own: a view is a list of column groups, each with some of the fields
and all of the rows. A view is never changed. A reference is released with the last view that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from maskpack.core import index
from maskpack.core.arguments import list_of, named, said
from maskpack.core.index import IntArray, even_sizes, no_single_row, part_sizes, row_index
from maskpack.errors import LayoutError
from maskpack.fields.registry import Key, Path, show
from maskpack.layout.row_layout import RowLayout
from maskpack.packed.batch import PackedBatch, Target, decompress
from maskpack.packed.decode import MAX_BYTES, shape_of
from maskpack.packed.join import UID, check_named, check_uids
from maskpack.packed.rows import Rows, Segments, TokenSpans, cat_columns, used
from maskpack.packed.table import table_of_layouts
from maskpack.views.column_group import (
    BatchMeta,
    ColumnGroup,
    Source,
    assembled,
    cat_groups,
    narrowed,
    parts_merged,
)
from maskpack.views.origins import Origins

Get = Callable[[list[Any]], list[Any]]
"""Fetches the packed batches of a list of references, in their order: `ray.get`."""


@dataclass(frozen=True, eq=False, repr=False)
class BatchView:
    """A list of rows of packed batches, which may be in this process, in the object store or on other nodes.

    Build one with `of` or `at`, or get one from a WorkerGroup. Operations on a view do not move data.

    Attributes:
        groups: its fields, grouped by the batches that their rows come from.
        order: all fields, in key order.
        num_rows: B.
    """

    groups: tuple[ColumnGroup, ...]
    order: tuple[Path, ...]
    num_rows: int

    @classmethod
    def of(cls, packed: PackedBatch) -> BatchView:
        """Returns a view of all rows of a packed batch in this process."""
        if not isinstance(packed, PackedBatch):
            raise LayoutError(
                f"BatchView.of: got {said(packed)}; expected a PackedBatch. Compress it first, or give a "
                "reference and a BatchMeta to BatchView.at."
            )
        meta = BatchMeta.of(packed)
        return cls._of(Source(packed, meta, Origins.whole(meta.num_rows, packed)))

    @classmethod
    def at(cls, reference: Any, meta: BatchMeta) -> BatchView:
        """Returns a view of all rows of the packed batch behind `reference`. `meta` is the `BatchMeta.of` of this
        batch."""
        if not isinstance(meta, BatchMeta):
            raise LayoutError(
                f"BatchView.at: meta is {said(meta)}; expected a BatchMeta. Pass BatchMeta.of(packed), made where "
                "the batch was packed."
            )
        return cls._of(Source(reference, meta, Origins.whole(meta.num_rows)))

    @classmethod
    def _of(cls, source: Source) -> BatchView:
        meta = source.meta
        order = tuple(form.path for form in meta.head.schema.forms)
        group = ColumnGroup(order, (source,), Segments.whole(meta.num_rows), head=meta.head)
        return cls((group.in_use(),), order, meta.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        segments = sum(group.rows.count.size for group in self.groups)
        return f"BatchView(rows={self.num_rows}, fields={len(self.order)}, segments={segments})"

    # ---------------------------------------------------------------- what is known here

    @cached_property
    def head(self) -> PackedBatch:
        """The view without its rows: its schema and widths."""
        return parts_merged([group.declared() for group in self.groups], self.order)

    @cached_property
    def layouts(self) -> dict[str, RowLayout]:
        """The RowLayouts of its rows, by name, on the host."""
        return {name: self._group_of(name).layout(name, frame) for name, frame in self.head.frames.items()}

    @cached_property
    def nbytes(self) -> int:
        """The encoded bytes of the rows, if every row of a packed batch takes an equal share."""
        return sum(round(nbytes) for group in self.groups for nbytes in group.nbytes_of_parts())

    @cached_property
    def padded_nbytes(self) -> int:
        """The bytes of the fields as padded tensors; a jagged field counts its values."""
        total = 0
        for form in self.head.schema.forms:
            if form.dtype is not None:
                total += math.prod(shape_of(form, self.layouts, (self.num_rows,))) * form.dtype.itemsize
        return total

    def layouts_alone(self) -> PackedBatch:
        """The rows and layouts of the view, without any field, for `compress(..., like=)`."""
        schema = replace(self.head.schema, forms=())
        return PackedBatch(self.num_rows, schema, Rows.of(table_of_layouts(self.layouts, self.num_rows), schema), {})

    def lengths(self, layout: str) -> IntArray:
        """The row lengths of a layout, int64 [B]."""
        return named(self.layouts, layout, "BatchView.lengths").lengths + 0

    def tokens(self) -> IntArray:
        """The valid tokens of each row, int64 [B], in the layout that has most of them."""
        lengths = [layout.lengths for layout in self.layouts.values()]
        return max(lengths, key=lambda of_rows: int(of_rows.sum())) + 0 if lengths else np.zeros(len(self), np.int64)

    def origins(self) -> Origins:
        """The rows of packed batches that its rows stand for, by its first fields."""
        return self.groups[0].origins()

    def known_as(self, origins: Origins) -> BatchView:
        """The same rows, which stand for the rows that `origins` names."""
        return replace(self, groups=tuple(group.known_as(origins) for group in self.groups))

    def layouts_of(self, group: ColumnGroup) -> dict[str, RowLayout]:
        """The layouts of one of its groups."""
        frames = group.declared().frames.items()
        own = {name: group.layout(name, frame) for name, frame in frames if self._group_of(name) is not group}
        return {name: own[name] if name in own else self.layouts[name] for name, _ in frames}

    def _group_of(self, layout: str) -> ColumnGroup:
        return next(group for group in self.groups if layout in group.declared().frames)

    # ---------------------------------------------------------------- rows

    def take(self, rows: index.Rows) -> BatchView:
        """Selects rows by a slice, indices (repeated or negative ones too), or a bool mask [B], in the order given.

        Raises LayoutError for rows that the view does not have.
        """
        return self._rows(row_index(rows, self.num_rows, "BatchView.take"))

    def __getitem__(self, rows: index.Rows) -> BatchView:
        no_single_row(rows, self.num_rows, "BatchView")
        return self.take(rows)

    def split(self, sizes: int | Sequence[int]) -> tuple[BatchView, ...]:
        """Splits the rows into consecutive parts: `sizes` is a list that sums to B, or one size (the last part may be
        smaller)."""
        sizes = part_sizes(sizes, self.num_rows, "BatchView.split")
        ends: list[int] = np.cumsum(sizes, dtype=np.int64).tolist()
        return tuple(self._rows(np.arange(end - size, end)) for end, size in zip(ends, sizes, strict=True))

    def chunk(self, parts: int) -> tuple[BatchView, ...]:
        """Splits the rows into `parts` consecutive parts whose sizes differ by at most one; parts beyond the rows are
        empty."""
        return self.split(even_sizes(self.num_rows, parts, "BatchView.chunk"))

    @staticmethod
    def cat(views: Sequence[BatchView]) -> BatchView:
        """Concatenates the rows of several views with the same fields.

        Batches of different padded widths become as wide as the widest, as in `PackedBatch.cat`. Raises LayoutError if
        fields, dtypes or the shapes of their elements differ: here, not when the rows are fetched.
        """
        views = list_of(views, BatchView, "BatchView.cat", "Make views of packed batches: BatchView.of(packed).")
        if len(views) == 1:
            return views[0]
        _check_fields(views)
        together = cat_columns([view.groups for view in views], views[0].order)
        groups = [
            cat_groups([view.groups[number] for view, number in zip(views, numbers, strict=True)], columns)
            for columns, numbers in together
        ]
        _check_places(views, [numbers for _, numbers in together], groups)
        return BatchView(tuple(groups), views[0].order, sum(view.num_rows for view in views))

    def take_tokens(self, spans: Any, layout: str | None = None) -> BatchView:
        """Makes a row of each span of tokens, as `PackedBatch.take_tokens`. No data moves: rows that are elsewhere are
        cut there if they are sent to a rank, or here when they are fetched."""
        own = TokenSpans.of(spans, layout, self.layouts, "BatchView.take_tokens")
        groups = tuple(group.take_tokens(own).in_use() for group in self.groups)
        return BatchView(groups, self.order, own.row.size).known_as(Origins.whole(own.row.size))

    def _rows(self, index: IntArray) -> BatchView:
        return replace(self, groups=tuple(group.take(index) for group in self.groups), num_rows=index.size)

    # ---------------------------------------------------------------- fields

    def select(self, *fields: Key) -> BatchView:
        """Selects fields, with all rows, in the order of the view. No data moves, and the origins of the rows are kept.

        The name of a sub-batch stands for all that is in it, a tuple of names for one entry in it. Batches that lie
        elsewhere are still fetched whole.

        Raises FieldError for a field that is not in the view, and LayoutError if none is named.
        """
        check_named(fields, "BatchView.select")
        groups, order = narrowed(self.groups, self.order, fields, "BatchView.select")
        first = self.groups[0].paths
        if first and not set(first) & set(order):  # its fields said which rows these are
            known = Origins.together([group.origins() for group in self.groups])
            groups[0] = groups[0].known_as(known)
        return BatchView(tuple(groups), order, self.num_rows)

    def with_fields(self, other: BatchView | PackedBatch) -> BatchView:
        """Adds or replaces the fields of `other`, a view of the same rows. New fields come last. No data moves.

        A view knows which rows it has: the results of a call, and fields that were put `onto` a view, stand for the
        rows that they were computed from. Rows that were packed separately are compared by their lengths, and by their
        field `uid` if both have one and its values are in this process.

        Raises LayoutError if `other` has other rows, the same rows in another order, or other row lengths in a layout
        of the same name.
        """
        if not isinstance(other, BatchView | PackedBatch):
            raise LayoutError(
                f"BatchView.with_fields: got {said(other)}; expected a PackedBatch or a BatchView. Compress the "
                "fields, with like=view.layouts_alone() if they have no mask."
            )
        other = other if isinstance(other, BatchView) else BatchView.of(other)
        if other.num_rows != self.num_rows:
            raise LayoutError(
                f"BatchView.with_fields: the fields have {other.num_rows} rows; the view has {self.num_rows}. Give "
                "one row for each row of the view, in its order."
            )
        _check_rows(self, other)
        dims, more = _dims(self), _dims(other)
        for path in dims.keys() & more.keys():
            if dims[path] != more[path]:
                where = f' of "{show(path)}"' if path else ""
                raise LayoutError(
                    f"BatchView.with_fields: the fields{where} have batch dims {more[path]} behind their rows; the "
                    f"view has {dims[path]}. Give the TensorDict the same batch dims before packing."
                )
        leaves = {form.path for form in other.head.schema.forms if form.kind != "node"}
        fresh = set(other.order)
        kept = [path for path in self.order if not any(path[:n] in leaves for n in range(1, len(path) + 1))]
        names = {self.head.forms[path].layout for path in kept} | {name for name, _, _ in self.head.schema.axes}
        for name in names & other.layouts.keys():
            if name is not None and other.layouts[name] != self.layouts[name]:
                raise LayoutError(
                    f'BatchView.with_fields: layout "{name}" has other widths or rows of other lengths than in the '
                    "view; expected the same. Compress the new fields with like=, or give their mask beside them."
                )
        order = [path for path in self.order if path in fresh or path in kept]
        order += [path for path in other.order if path not in order]
        groups = [group.only(set(kept) - fresh) for group in self.groups]
        replaced = not groups[0].paths  # the fields that said which rows these are
        groups += (other.known_as(self.origins()) if replaced else other).groups
        return BatchView(used(groups), tuple(order), self.num_rows)

    # ---------------------------------------------------------------- data

    def materialize(
        self,
        *fields: Key,
        get: Get | None = None,
        format: Target = "padded",
        device: torch.device | str | None = None,
        max_bytes: int | None = MAX_BYTES,
    ) -> TensorDict:
        """Fetches and decodes the rows, like `decompress`.

        Args:
            fields: the fields to decode; all if none is named.
            get: the function that fetches references, `ray.get`; each reference is fetched once. Not needed if all
                batches are in this process.
            format, device, max_bytes: as for `decompress`.

        Raises:
            LayoutError: as `decompress`; or a reference leads to something else than its BatchMeta describes.
        """
        return decompress(self.to_packed(*fields, get=get), format=format, device=device, max_bytes=max_bytes)

    def to_packed(self, *fields: Key, get: Get | None = None) -> PackedBatch:
        """Fetches the rows, still encoded, as one PackedBatch. Arguments and errors are those of `materialize`."""
        groups, order = narrowed(self.groups, self.order, fields, "BatchView.materialize")
        fetched = _fetched([source for group in groups for source in group.parts], get)
        root = self.head.schema.root
        return assembled(groups, order, root, lambda source: fetched[id(source)])


def _dims(view: BatchView) -> dict[Path, tuple[int, ...] | None]:
    """The batch dims behind the rows, of the batch and of each sub-batch."""
    nodes = [(form.path, form.node.more_dims) for form in view.head.schema.forms if form.node is not None]
    return {(): view.head.schema.root.more_dims, **dict(nodes)}


def _check_rows(view: BatchView, other: BatchView) -> None:
    """Raises LayoutError if `other` has other rows than `view`, as far as both know their origins and uids."""
    ours, theirs = (Origins.together([group.origins() for group in some.groups]) for some in (view, other))
    odd = ours.difference(theirs)
    if odd is not None:
        known = "another" if odd.ours is None else f"row {odd.ours}"
        raise LayoutError(
            f"BatchView.with_fields: row {odd.row} of the fields is row {odd.theirs} of the batch that it comes from; "
            f"row {odd.row} of the view is {known}. Expected the same rows in the same order. Select and sort the rows "
            "of both alike, or add the fields first; to_packed(get=ray.get) returns fields that can be combined with "
            "any rows."
        )
    if _has_uids_here(view) and _has_uids_here(other):
        check_uids(view.to_packed(UID), other.to_packed(UID), "BatchView.with_fields")


def _has_uids_here(view: BatchView) -> bool:
    held = [part.held for group in view.groups if UID in group.paths for part in group.parts]
    return bool(held) and all(isinstance(batch, PackedBatch) for batch in held)


def _check_fields(views: Sequence[BatchView]) -> None:
    for view in views[1:]:
        odd = set(view.order) ^ set(views[0].order)
        if odd:
            raise LayoutError(
                f"BatchView.cat: fields {sorted(map(show, odd))} are not in every view; expected the same fields. Add "
                "them with with_fields first."
            )


def _check_places(
    views: Sequence[BatchView], paths_of: Sequence[tuple[int, ...]], groups: Sequence[ColumnGroup]
) -> None:
    """Raises LayoutError if a layout widens differently for different fields. It does if some of them were packed with
    the prompts and responses that split it, and others were not: their anchors differ."""
    places: dict[str, tuple[int, ...]] = {}
    for numbers, group in zip(paths_of, groups, strict=True):
        parts = [view.groups[number].declared() for view, number in zip(views, numbers, strict=True)]
        for name, (width, anchor) in group.declared().frames.items():
            place = (width, *(anchor - part.frames[name][1] for part in parts))
            if places.setdefault(name, place) != place:
                raise LayoutError(
                    f'BatchView.cat: layout "{name}" becomes {places[name][0]} wide for some fields and {place[0]} for '
                    "others, or begins at another column; expected the same columns for all fields. Compress all its "
                    "fields with like= the batch that has prompts and responses, or together with these."
                )


def _fetched(sources: Sequence[Source], get: Get | None) -> dict[int, PackedBatch]:
    """The packed batch of each source, by the id of the source; each reference is fetched once."""
    away: dict[int, Any] = {id(s.held): s.held for s in sources if not isinstance(s.held, PackedBatch)}
    if get is not None and not callable(get):
        raise LayoutError(
            f"BatchView.materialize: get is {said(get)}; expected a function that fetches references. Pass ray.get, or "
            "leave it out if the batches are in this process."
        )
    if away and get is None:
        raise LayoutError(
            f"BatchView.materialize: {len(away)} packed batches are not in this process, and get is None; "
            "expected a function that fetches them. Pass get=ray.get."
        )
    given: Any = cast("Get", get)(list(away.values())) if away else []
    batches = list(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else []
    if len(batches) != len(away):
        raise LayoutError(
            f"BatchView.materialize: get gave {said(given)} with {len(batches)} packed batches for {len(away)} "
            "references; expected a list with one for each, in their order. Pass get=ray.get."
        )
    fetched = dict(zip(away, batches, strict=True))
    return {id(source): source.checked(fetched.get(id(source.held), source.held)) for source in sources}
