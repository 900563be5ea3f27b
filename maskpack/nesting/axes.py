"""The axes of a batch: the layout of each mask that the registry names, computed at most once.

A mask is looked up next to the field first, then in the enclosing TensorDicts. The layouts stored in a nested batch
take precedence over its fields. If the batch does not give an axis, the layout of another batch may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from maskpack.core.index import IntArray
from maskpack.core.keys import Key, Path, path_of, show
from maskpack.core.tree import dense_at, entry_at, flatten, has, number_at
from maskpack.errors import LayoutError
from maskpack.fields.options import Registry, registry_of
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry
from maskpack.layout.jagged import Jagged, offsets_of, to_host, values_of
from maskpack.layout.row_layout import RowLayout, anchored, layout_of_marks, layout_of_offsets, prefix_of
from maskpack.nesting.schema import LAYOUTS

WHOLE = -1
"""The first column of a layout that is not cut from another."""


class Source(NamedTuple):
    """Where a layout of a batch comes from, whatever the values in the batch are.

    Attributes:
        way: the valid words of a `mask`; its rows up to their last valid word, a `prefix`; `lengths`; `cu_seqlens`; the
            offsets of a `jagged` field; the `marks` of a mask that is jagged, or [T] beside cu_seqlens; or a layout
            that is `given`.
        key: the field, or the name of the layout that is given.
        low, width: the columns of a mask that are the layout, WHOLE and 0 for all; of lengths, the width, or -1.
    """

    way: Literal["mask", "prefix", "lengths", "cu_seqlens", "jagged", "marks", "given"]
    key: Any
    low: int = WHOLE
    width: int = 0


class _Side(NamedTuple):
    """The width of one side of a split. A number is a limit, which a batch may fall short of; a field is not."""

    path: Path
    width: int
    limit: bool


@dataclass(frozen=True)
class Axis:
    """A layout and its name.

    Attributes:
        rows, width: B and S, or -1 if there is no padded width.
        tokens: T, if fields are [T, *F] with `cu_seqlens`; else None.
        counted: whether it tells only lengths.
    """

    name: str
    source: Source
    axes: Axes
    rows: int
    width: int
    tokens: int | None = None
    counted: bool = False

    @property
    def layout(self) -> RowLayout:
        return self.axes.layout_of(self.source)

    def __str__(self) -> str:
        size = (self.rows, self.width) if self.tokens is None else f"{self.tokens} tokens"
        return f'mask "{self.name}" is {size}'


@dataclass
class Axes:
    """Finds the axes of one batch, and computes their layouts on demand. `call` is the public function that errors
    name.

    Attributes:
        bounds: the offsets of jagged fields that are on the host already.
        by_value: whether axes that were found depend on values in the batch.
    """

    batch: Any
    registry: MaskNestingRegistry
    carried: Mapping[str, RowLayout]
    stand_in: Mapping[str, RowLayout]
    call: str
    bounds: Mapping[Path, IntArray] = field(default_factory=dict[Path, IntArray])
    by_value: bool = False
    _found: dict[tuple[Path, Key], Axis | None] = field(default_factory=dict[tuple[Path, Key], Axis | None])
    _layouts: dict[Source, RowLayout] = field(default_factory=dict[Source, RowLayout])

    def __post_init__(self) -> None:
        self.by_value = bool(self.carried and self.stand_in)

    def find(self, mask: Key, path: Path) -> Axis | None:
        """The axis of `mask` for the field at `path`; None if the batch does not give it."""
        for depth in range(len(path) - 1, -1, -1):
            scope = path[:depth]
            if (scope, mask) not in self._found:
                self._found[scope, mask] = self._compute(show((*scope, *path_of(mask))), mask, scope)
            axis = self._found[scope, mask]
            if axis is not None:
                return axis
        return None

    # ---------------------------------------------------------------- layouts

    def layouts_of(self, sources: Mapping[str, Source]) -> dict[str, RowLayout]:
        """The layouts of some sources, by name. One synchronisation for all jagged fields on CUDA."""
        paths = [source.key for source in sources.values() if source.way == "jagged"]
        paths = [path for path in paths if path not in self.bounds]
        read = to_host([offsets_of(entry_at(self.batch, path)) for path in paths])
        self.bounds = {**self.bounds, **dict(zip(paths, read, strict=True))}
        return {name: self.layout_of(source) for name, source in sources.items()}

    def layout_of(self, source: Source) -> RowLayout:
        """The layout that a source gives. Each mask is scanned once, however many axes are cut from it."""
        if source not in self._layouts:
            self._layouts[source] = self._made(source)
        return self._layouts[source]

    def rows_of(self, source: Source) -> Source:
        """Of the `marks` of a mask, where its rows come from; any other source itself."""
        if source.way != "marks":
            return source
        flat = self._flat(entry_at(self.batch, source.key))
        return Source("jagged", source.key) if flat is None else flat.source

    def _made(self, source: Source) -> RowLayout:
        way, key, low, width = source
        if way == "given":
            return self.carried[key] if key in self.carried else self.stand_in[key]
        if low != WHOLE:
            return self.layout_of(Source(way, key)).narrow(low, low + width)
        if way == "prefix":
            return prefix_of(self.layout_of(Source("mask", key)))
        tensor = entry_at(self.batch, key)
        if way == "jagged":
            offsets = offsets_of(tensor)
            on_host = self.bounds[key] if key in self.bounds else to_host([offsets])[0]
            return self._read(key, layout_of_offsets, offsets, on_host)
        if way == "marks":
            rows = self.layout_of(self.rows_of(source))
            marks = values_of(tensor.detach())[: rows.num_tokens] if tensor.is_nested else tensor
            if marks.dim() != 1:
                raise LayoutError(
                    f'{self.call}: mask field "{show(key)}" has {tuple(marks.shape[1:])} numbers for each token; '
                    "expected one. Give one entry per token, or name another mask in the registry."
                )
            return layout_of_marks(marks, rows)
        if way == "cu_seqlens":
            return self._read(key, RowLayout.from_cu_seqlens, tensor)
        if way == "lengths":
            return self._read(key, RowLayout.from_lengths, tensor, None if width < 0 else width)
        layout = self._read(key, RowLayout.from_mask, tensor)
        return anchored(layout, self.anchor_of(source, layout.width))

    def _read(self, source: Path, make: Callable[..., RowLayout], *given: Any) -> RowLayout:
        """What `make` gives, or its error with the name of the field."""
        try:
            return make(*given)
        except LayoutError as error:
            raise LayoutError(f'{self.call}: field "{show(source)}" does not give rows: {error}') from error

    # ---------------------------------------------------------------- axes

    def _compute(self, name: str, mask: Key, scope: Path) -> Axis | None:
        if name in self.carried:
            return self._given(name, self.carried[name])
        ways = self.registry.ways(mask)
        # a prefix and the rows of a jagged field know less than another batch's layout
        guesses = [way for way in ways if way.part == "prefix" or way.form == "jagged"]
        for way in ways:
            axis = None if way in guesses else self._by(way, name, scope)
            if axis is not None:
                other = self.stand_in.get(name)  # the same rows, whose anchor is known
                self.by_value |= other is not None
                return axis if other is None or other != axis.layout else self._given(name, other)
        if name in self.stand_in:
            return self._given(name, self.stand_in[name])
        return next((axis for way in guesses if (axis := self._by(way, name, scope)) is not None), None)

    def _given(self, name: str, layout: RowLayout) -> Axis:
        return Axis(name, Source("given", name), self, layout.num_rows, layout.width)

    def _by(self, way: MaskAxis, name: str, scope: Path) -> Axis | None:
        path = (*scope, *path_of(way.source))
        tensor = entry_at(self.batch, path)
        if not isinstance(tensor, Tensor):
            return None
        if tensor.is_nested:
            return self._of_jagged(way, name, path, tensor)
        if way.form == "jagged":
            return None
        if way.form == "mask":
            flat = None if tensor.dim() != 1 or way.part != "all" else self._flat(tensor)
            if flat is not None:
                return Axis(name, Source("marks", path), self, flat.rows, -1)
            if tensor.dim() == 1 and not self.batch.batch_dims:
                return None  # a line of tokens, of which nothing tells the rows
            if tensor.dim() != 2:
                remedy = "Give one entry per row and position, or name another mask in the registry."
                if tensor.dim() == 3 or 1 < self.batch.batch_dims == tensor.dim() - 1:
                    dims = tuple(tensor.shape[:-1])
                    first = "" if self.batch.batch_size == dims else f"batch.batch_size = {list(dims)}, then "
                    remedy = f"Make a row of each line of the mask: {first}batch.reshape(-1)."
                raise LayoutError(
                    f'{self.call}: mask field "{show(path)}" is {tuple(tensor.shape)}; expected (B, width). {remedy}'
                )
            source, (rows, width) = Source("mask", path), tensor.shape
            if way.part == "prefix":
                return Axis(name, Source("prefix", path), self, rows, width, counted=True)
            if way.part == "all":
                return Axis(name, source, self, rows, width)
            cut = self._cut(way, width, scope, name)
            return None if cut is None else Axis(name, source._replace(low=cut[0], width=cut[1]), self, rows, cut[1])
        if way.form == "cu_seqlens" and tensor.dim() > 1:
            return None
        self.by_value = True
        side = self._first(scope, way.head) if way.form == "lengths" else None
        source = Source(way.form, path, WHOLE, -1 if side is None else side.width)
        layout = self.layout_of(source)
        tokens = layout.num_tokens if way.form == "cu_seqlens" else None
        return Axis(name, source, self, layout.num_rows, layout.width, tokens, counted=True)

    def _of_jagged(self, way: MaskAxis, name: str, path: Path, field: Tensor) -> Axis | None:
        """The axis of a jagged field: all tokens of its rows, or of a mask those where it is not 0."""
        if way.form not in ("mask", "jagged") or way.part in ("head", "tail") or Jagged.of(field) is None:
            return None
        whole = way.form == "jagged" or way.part == "prefix"
        source, rows = Source("jagged" if whole else "marks", path), field.size(0)
        return Axis(name, source, self, rows, -1, counted=whole)

    def _flat(self, tensor: Tensor) -> Axis | None:
        """The axis of fields [T], if a tensor has as many tokens and the batch no rows."""
        if tensor.is_nested or self.batch.batch_dims:
            return None
        ways = [(name, way) for name, ways in self.registry.axes.items() for way in ways if way.form == "cu_seqlens"]
        axes = (self._by(way, name, ()) for name, way in ways)
        return next((axis for axis in axes if axis is not None and axis.tokens == tensor.shape[0]), None)

    def anchor_of(self, source: Source, width: int) -> int:
        """The anchor of the layout of a source, `width` columns wide; of a mask, where some axis splits it, or the side
        that its rows are not padded on."""
        if source.way == "given":
            return self.layout_of(source).anchor
        if source.way != "mask":
            return 0
        if source.low != WHOLE:
            mask = dense_at(self.batch, source.key)
            assert mask is not None
            whole = self.anchor_of(Source("mask", source.key), mask.shape[1])
            return min(max(whole - source.low, 0), width)
        for way in (way for ways in self.registry.axes.values() for way in ways):
            path = path_of(way.source)
            scope = source.key[: len(source.key) - len(path)]
            if source.key != (*scope, *path):
                continue
            left = width if way.padded == "left" else None
            split = self._split(way, scope, width) if way.part in ("head", "tail") else left
            if split is not None:
                return min(max(split, 0), width)
        return 0

    def _cut(self, way: MaskAxis, width: int, scope: Path, name: str) -> tuple[int, int] | None:
        """The first column of a mask that is in an axis, and how many are."""
        head, tail = self._first(scope, way.head), self._first(scope, way.tail)
        if head is not None and tail is not None:
            both, limits = head.width + tail.width, (head.limit, tail.limit)
            if both < width or (both > width and not any(limits)):
                raise LayoutError(
                    f'{self.call}: axis "{name}" splits mask "{show(way.source)}" of width {width}, but '
                    f'"{show(head.path)}" is {head.width} wide and "{show(tail.path)}" {tail.width}; expected '
                    "the two to make up the mask. Fix the producer, or give the axis other head and tail fields."
                )
        split = self._split(way, scope, width)
        if split is None:
            return None
        if not 0 <= split <= width:
            raise LayoutError(
                f'{self.call}: axis "{name}" splits mask "{show(way.source)}" of width {width} at {split}; '
                "expected a split inside the mask. Fix the widths of its head and tail fields."
            )
        return (0, split) if way.part == "head" else (split, width - split)

    def _split(self, way: MaskAxis, scope: Path, width: int) -> int | None:
        head, tail = self._first(scope, way.head), self._first(scope, way.tail)
        if tail is not None and (head is None or (head.limit and not tail.limit)):
            return width - tail.width
        return None if head is None else head.width

    def _first(self, scope: Path, keys: tuple[Key, ...]) -> _Side | None:
        """The first field or number of a batch that gives a width."""
        for key in keys:
            path = (*scope, *path_of(key))
            tensor = dense_at(self.batch, path)
            if tensor is not None and tensor.dim() >= 2:
                return _Side(path, tensor.shape[1], limit=False)
            number = number_at(self.batch, path)
            if number is not None:
                return _Side(path, number, limit=True)
        return None


def has_masks(batch: Any, registry: Registry) -> bool:
    """Whether a batch has LAYOUTS or a field from which a layout is computed. A `prefix` axis and jagged fields do not
    count, because the layout of another batch is preferred to them."""
    known = registry_of(registry, "has_masks")
    masks = {mask for spec in known.values() for mask in spec.masks}
    ways = [way for mask in masks for way in known.ways(mask) if way.part != "prefix" and way.form != "jagged"]
    sources = {path_of(way.source) for way in ways}
    return has(batch, LAYOUTS) or any(
        path[-len(source) :] == source for path, _ in flatten(batch) for source in sources
    )
