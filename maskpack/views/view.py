"""BatchView: an ordered list of row segments over packed batches that may lie elsewhere.

    here       lengths, schema, segments     view.take(...), sort_by_length(), split(...): numbers move, data stays
    elsewhere  the packed batches            view.materialize(get=ray.get): each is fetched once, its rows are decoded

Fields that were added later have segments of their own: a view is a list of strands, each with some of the fields and
all of the rows. Nothing of a view is ever changed; references are released with the last view that has them.
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

from maskpack.core.arguments import flag, list_of, named, said, whole
from maskpack.core.index import IntArray, Rows, even_sizes, no_single_row, part_sizes, row_index
from maskpack.errors import LayoutError
from maskpack.fields.registry import Key, Path, show
from maskpack.layout.row_layout import RowLayout
from maskpack.packed.batch import PackedBatch, Target, decompress
from maskpack.packed.decode import MAX_BYTES, shape_of
from maskpack.packed.join import check_named
from maskpack.views.origins import Origins
from maskpack.views.segments import Segments
from maskpack.views.strand import Outline, Source, Strand, assembled, narrowed, parts_merged, strands_joined, without

Get = Callable[[list[Any]], list[Any]]
"""Fetches what references stand for, in their order: `ray.get`."""


@dataclass(frozen=True, eq=False, repr=False)
class BatchView:
    """Rows of packed batches, wherever they lie. Build one with `of` or `at`, or take one from a WorkerGroup.

    Attributes:
        strands: its fields, in groups that come from the same places.
        order: all fields, in key order.
        num_rows: B.
    """

    strands: tuple[Strand, ...]
    order: tuple[Path, ...]
    num_rows: int

    @classmethod
    def of(cls, packed: PackedBatch) -> BatchView:
        """All rows of a packed batch that is here."""
        if not isinstance(packed, PackedBatch):
            raise LayoutError(
                f"BatchView.of: got {said(packed)}; expected a PackedBatch. Compress it first, or give a "
                "reference and an outline to BatchView.at."
            )
        outline = Outline.of(packed)
        return cls._of(Source(packed, outline, Origins.whole(outline.num_rows, packed)))

    @classmethod
    def at(cls, reference: Any, outline: Outline) -> BatchView:
        """All rows of a packed batch that lies where `reference` says, and that `Outline.of` was made from."""
        if not isinstance(outline, Outline):
            raise LayoutError(
                f"BatchView.at: outline is {said(outline)}; expected an Outline. Pass Outline.of(packed), made where "
                "the batch was packed."
            )
        return cls._of(Source(reference, outline, Origins.whole(outline.num_rows)))

    @classmethod
    def _of(cls, source: Source) -> BatchView:
        outline = source.outline
        order = tuple(form.path for form in outline.head.schema.forms)
        strand = Strand(order, (source,), Segments.whole(outline.num_rows), outline.head)
        return cls((strand.trimmed(),), order, outline.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        segments = sum(strand.segments.count.size for strand in self.strands)
        return f"BatchView(rows={self.num_rows}, fields={len(self.order)}, segments={segments})"

    # ---------------------------------------------------------------- what is known here

    @cached_property
    def head(self) -> PackedBatch:
        """The view without its rows: its schema and widths."""
        return parts_merged([strand.declared() for strand in self.strands], self.order)

    @cached_property
    def layouts(self) -> dict[str, RowLayout]:
        """Those of its rows, by name, on the host."""
        return {name: self._strand_of(name).layout(name) for name in self.head.layouts}

    @property
    def nbytes(self) -> int:
        """Encoded bytes of its rows, taken as equal shares of the batches that they lie in."""
        return sum(
            strand.sources[share.source].outline.nbytes_of(share.rows.size)
            for strand in self.strands
            for share in strand.segments.shares()[0]
        )

    @property
    def padded_nbytes(self) -> int:
        """Bytes of its tensors in padded form; of jagged ones as they are."""
        total = 0
        for form in self.head.schema.forms:
            if form.dtype is not None:
                total += math.prod(shape_of(form, self.layouts, (self.num_rows,))) * form.dtype.itemsize
        return total

    def layouts_alone(self) -> PackedBatch:
        """Its rows without a field, for `compress(..., like=)`."""
        schema = replace(self.head.schema, forms=())
        return PackedBatch(self.num_rows, schema, self.layouts, {}, {}, {})

    def lengths(self, layout: str) -> IntArray:
        """int64 [B]: row lengths of one of the layouts."""
        return named(self.layouts, layout, "BatchView.lengths").lengths + 0

    def tokens(self) -> IntArray:
        """int64 [B]: real tokens of each row, in the layout that has most."""
        known = [layout.lengths for layout in self.layouts.values()]
        return max(known, key=lambda lengths: int(lengths.sum())) + 0 if known else np.zeros(self.num_rows, np.int64)

    def origins(self) -> Origins:
        """Which rows these are, as results of them are: those of its first fields."""
        return self.strands[0].origins()

    def known_as(self, origins: Origins) -> BatchView:
        """The same rows, which are those of `origins`."""
        return replace(self, strands=tuple(strand.known_as(origins) for strand in self.strands))

    def _strand_of(self, layout: str) -> Strand:
        return next(strand for strand in self.strands if layout in strand.declared().layouts)

    # ---------------------------------------------------------------- rows

    def take(self, rows: Rows) -> BatchView:
        """Some rows, in the order given: a slice, indices (repeats allowed, negative from the end), or a bool mask [B].

        Raises LayoutError for rows that the view does not have.
        """
        return self._rows(row_index(rows, self.num_rows, "BatchView.take"))

    def __getitem__(self, rows: Rows) -> BatchView:
        no_single_row(rows, self.num_rows, "BatchView")
        return self.take(rows)

    def split(self, sizes: int | Sequence[int]) -> tuple[BatchView, ...]:
        """Consecutive parts of `sizes` rows: a list that sums to B, or one size (the last part may be smaller)."""
        sizes = part_sizes(sizes, self.num_rows, "BatchView.split")
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        return tuple(
            replace(self, strands=tuple(strand.slice(end - size, end) for strand in self.strands), num_rows=size)
            for end, size in zip(ends, sizes, strict=True)
        )

    def chunk(self, parts: int) -> tuple[BatchView, ...]:
        """`parts` consecutive parts whose sizes differ by one at most; parts beyond the rows are empty."""
        return self.split(even_sizes(self.num_rows, parts, "BatchView.chunk"))

    def repeat(self, times: int, *, interleave: bool = True) -> BatchView:
        """Every row `times` times: each row after itself, or the whole view after itself."""
        times = whole(times, "times", 0, "BatchView.repeat")
        flag(interleave, "interleave", "BatchView.repeat")
        rows = np.arange(self.num_rows)
        return self._rows(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def sort_by_length(self, layout: str | None = None, *, descending: bool = False) -> BatchView:
        """Rows by their length in a layout (by `tokens` where none is named); rows of one length keep their order."""
        call = "BatchView.sort_by_length"
        flag(descending, "descending", call)
        lengths = self.tokens() if layout is None else named(self.layouts, layout, call).lengths
        return self._rows(np.argsort(-lengths if descending else lengths, kind="stable"))

    @staticmethod
    def cat(views: Sequence[BatchView]) -> BatchView:
        """The rows of several views with the same fields, one after the other.

        Fields of different widths meet as in `PackedBatch.cat`. Raises LayoutError, here and not where the rows are
        fetched, if fields, dtypes or the shapes of their elements differ.
        """
        views = list_of(views, BatchView, "BatchView.cat", "Make views of packed batches: BatchView.of(packed).")
        if len(views) == 1:
            return views[0]
        _check_fields(views)
        groups: dict[tuple[int, ...], list[Path]] = {}
        for path in views[0].order:
            groups.setdefault(tuple(view._strand_number(path) for view in views), []).append(path)
        if not groups:  # views without fields have rows all the same
            groups[(0,) * len(views)] = []
        strands = [
            strands_joined([view.strands[number] for view, number in zip(views, numbers, strict=True)], paths)
            for numbers, paths in groups.items()
        ]
        _check_places(views, list(groups), strands)
        return BatchView(tuple(strands), views[0].order, sum(view.num_rows for view in views))

    def _strand_number(self, path: Path) -> int:
        return next(number for number, strand in enumerate(self.strands) if path in strand.paths)

    def _rows(self, index: IntArray) -> BatchView:
        return replace(self, strands=tuple(strand.take(index) for strand in self.strands), num_rows=index.size)

    # ---------------------------------------------------------------- fields

    def select(self, *fields: Key) -> BatchView:
        """Some fields with all rows, in the order of the view. No data moves, and it still knows which rows it has.

        The name of a sub-batch stands for all that is in it, a tuple of names for one entry in it. Batches that lie
        elsewhere are still fetched whole.

        Raises FieldError for a field that is not in the view, and LayoutError if none is named.
        """
        check_named(fields, "BatchView.select")
        strands, order = narrowed(self.strands, self.order, fields, "BatchView.select")
        if self.strands[0].paths and not set(self.strands[0].paths) & set(
            order
        ):  # its fields said which rows these are
            known = Origins.together([strand.origins() for strand in self.strands])
            strands[0] = strands[0].known_as(known)
        return BatchView(tuple(strands), order, self.num_rows)

    def with_fields(self, other: BatchView | PackedBatch) -> BatchView:
        """The same rows with the fields of `other`, new ones after those that are there. No data moves.

        A view knows which rows it has: results of a call, and what was put `onto` a view, are the rows that they were
        computed from. Rows that were packed apart are told by their lengths alone.

        Raises LayoutError if `other` has other rows, or the same in another order, or other row lengths in a layout of
        the same name.
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
        used = {self.head.forms[path].layout for path in kept} | {name for name, _, _ in self.head.schema.axes}
        for name in used & other.layouts.keys():
            if name is not None and other.layouts[name] != self.layouts[name]:
                raise LayoutError(
                    f'BatchView.with_fields: layout "{name}" has other widths or rows of other lengths than in the '
                    "view; expected the same. Compress the new fields with like=, or give their mask beside them."
                )
        order = [path for path in self.order if path in fresh or path in kept]
        order += [path for path in other.order if path not in order]
        strands = [without(strand, fresh | set(self.order) - set(kept)) for strand in self.strands]
        replaced = not strands[0].paths  # by which fields are known as its rows
        strands += (other.known_as(self.origins()) if replaced else other).strands
        strands = [strand for strand in strands if strand.paths] or strands[:1]
        return BatchView(tuple(strands), tuple(order), self.num_rows)

    # ---------------------------------------------------------------- data

    def materialize(
        self,
        *fields: Key,
        get: Get | None = None,
        format: Target = "padded",
        device: torch.device | str | None = None,
        max_bytes: int | None = MAX_BYTES,
    ) -> TensorDict:
        """The rows, decoded as by `decompress`.

        Args:
            fields: the fields to decode; all if none is named.
            get: what fetches references, `ray.get`; each one is fetched once. Not needed where all batches are here.
            format, device, max_bytes: as for `decompress`.

        Raises:
            LayoutError: as `decompress`; or a reference leads to something other than its outline says.
        """
        return decompress(self.to_packed(*fields, get=get), format=format, device=device, max_bytes=max_bytes)

    def to_packed(self, *fields: Key, get: Get | None = None) -> PackedBatch:
        """The rows, still encoded, as one packed batch that is here. Arguments and errors as for `materialize`."""
        strands, order = narrowed(self.strands, self.order, fields, "BatchView.materialize")
        fetched = _fetched([source for strand in strands for source in strand.sources], get)
        root = self.head.schema.root
        return assembled(strands, order, root, lambda source: fetched[id(source)])


def _dims(view: BatchView) -> dict[Path, tuple[int, ...] | None]:
    """Batch dims behind the rows: of the batch, and of each sub-batch."""
    nodes = [(form.path, form.node.more_dims) for form in view.head.schema.forms if form.node is not None]
    return {(): view.head.schema.root.more_dims, **dict(nodes)}


def _check_rows(view: BatchView, other: BatchView) -> None:
    """That rows of one origin are the same."""
    ours, theirs = (Origins.together([strand.origins() for strand in some.strands]) for some in (view, other))
    odd = ours.difference(theirs)
    if odd is not None:
        known = "another" if odd.ours is None else f"row {odd.ours}"
        raise LayoutError(
            f"BatchView.with_fields: row {odd.row} of the fields is row {odd.theirs} of the batch that it comes from; "
            f"row {odd.row} of the view is {known}. Expected the same rows in the same order. Select and sort the rows "
            "of both alike, or add the fields first; to_packed(get=ray.get) gives fields that may lie beside any rows."
        )


def _check_fields(views: Sequence[BatchView]) -> None:
    for view in views[1:]:
        odd = set(view.order) ^ set(views[0].order)
        if odd:
            raise LayoutError(
                f"BatchView.cat: fields {sorted(map(show, odd))} are not in every view; expected the same fields. Add "
                "them with with_fields first."
            )


def _check_places(views: Sequence[BatchView], groups: Sequence[tuple[int, ...]], strands: Sequence[Strand]) -> None:
    """That each layout widens alike for all fields. It does not where some were packed with the fields that split it,
    others without: their anchors differ."""
    places: dict[str, tuple[int, ...]] = {}
    for numbers, strand in zip(groups, strands, strict=True):
        parts = [view.strands[number].declared() for view, number in zip(views, numbers, strict=True)]
        for name, layout in strand.declared().layouts.items():
            place = (layout.width, *(layout.anchor - part.layouts[name].anchor for part in parts))
            if places.setdefault(name, place) != place:
                raise LayoutError(
                    f'BatchView.cat: layout "{name}" becomes {places[name][0]} wide for some fields and {place[0]} for '
                    "others, or begins elsewhere; expected one place for its columns. Compress all its fields with "
                    "like= the batch that has prompts and responses, or together with these."
                )


def _fetched(sources: Sequence[Source], get: Get | None) -> dict[int, PackedBatch]:
    """The batch of each source, by its id; each reference is fetched once."""
    away: dict[int, Any] = {id(s.held): s.held for s in sources if not isinstance(s.held, PackedBatch)}
    if away and get is None:
        raise LayoutError(
            f"BatchView.materialize: {len(away)} packed batches lie elsewhere, and get is None; expected a function "
            "that fetches them. Pass get=ray.get."
        )
    if get is not None and not callable(get):
        raise LayoutError(
            f"BatchView.materialize: get is {said(get)}; expected a function that fetches references. Pass get=ray.get."
        )
    given: Any = get(list(away.values())) if get is not None and away else []
    if not isinstance(given, Iterable):
        raise LayoutError(
            f"BatchView.materialize: get gave {said(given)}; expected a list of packed batches, in the order of their "
            "references. Pass get=ray.get."
        )
    batches = list(cast("Iterable[Any]", given))
    if len(batches) != len(away):
        raise LayoutError(
            f"BatchView.materialize: get gave {len(batches)} packed batches for {len(away)} references; expected one "
            "for each, in their order. Pass get=ray.get."
        )
    found = dict(zip(away, batches, strict=True))
    return {id(source): source.checked(found.get(id(source.held), source.held)) for source in sources}
