"""The axes of a batch: the layout of each mask that the registry names, computed at most once.

A mask is looked up next to the field first, then in the enclosing TensorDicts. The layouts stored in a nested batch
take precedence over its fields. If the batch does not give an axis, the layout of another batch may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from maskpack.core.keys import Key, Path, path_of, show
from maskpack.core.tree import dense_at, number_at
from maskpack.errors import LayoutError
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry
from maskpack.layout.row_layout import RowLayout, anchored, layout_and_value, prefix_of

_T = TypeVar("_T")


@dataclass(frozen=True)
class Axis:
    """A layout and its name; `flat` if its fields are [T, *F] with `cu_seqlens`; `counted` if it tells only lengths."""

    name: str
    layout: RowLayout
    flat: bool = False
    counted: bool = False

    def __str__(self) -> str:
        size = f"{self.layout.num_tokens} tokens" if self.flat else (self.layout.num_rows, self.layout.width)
        return f'mask "{self.name}" is {size}'


@dataclass(frozen=True)
class Origins:
    """Where the layouts of a batch come from, whatever its values are.

    Attributes:
        masks: the layout of each mask that was scanned, and whether all its valid words are equal.
        prefixes: by the mask, the layouts up to the last valid token of each row.
        given: the layouts of LAYOUTS, or of another batch with the same rows, by name.
        jagged: by the first field of each, the layouts of jagged fields that have no mask.
    """

    masks: Mapping[Path, tuple[RowLayout, bool]]
    prefixes: Mapping[Path, RowLayout]
    given: Mapping[str, RowLayout]
    jagged: Mapping[Path, RowLayout] = field(default_factory=dict[Path, RowLayout])


@dataclass
class Axes:
    """Computes the axes of one batch on demand. `call` is the public function that errors name."""

    batch: Any
    registry: MaskNestingRegistry
    carried: Mapping[str, RowLayout]
    stand_in: Mapping[str, RowLayout]
    call: str
    _found: dict[tuple[Path, Key], Axis | None] = field(default_factory=dict[tuple[Path, Key], Axis | None])
    _masks: dict[Path, RowLayout] = field(default_factory=dict[Path, RowLayout])
    _values: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    _prefixes: dict[Path, RowLayout] = field(default_factory=dict[Path, RowLayout])

    def __post_init__(self) -> None:
        self._by_value = bool(self.carried and self.stand_in)

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

    def value_of(self, mask: Path, layout: RowLayout) -> Tensor | None:
        """The value () of all valid tokens of a mask field, if its scan returned `layout` and found one value."""
        return self._values.get(mask) if self._masks.get(mask) is layout else None

    def origins(self) -> Origins | None:
        """The origins of the axes; None if some depended on values."""
        if self._by_value:
            return None
        masks = {path: (layout, path in self._values) for path, layout in self._masks.items()}
        return Origins(masks, dict(self._prefixes), self.carried or self.stand_in)

    def _compute(self, name: str, mask: Key, scope: Path) -> Axis | None:
        if name in self.carried:
            return Axis(name, self.carried[name])
        ways = self.registry.ways(mask)
        guesses = [way for way in ways if way.part == "prefix"]  # a prefix knows less than another batch's layout
        for way in ways:
            axis = None if way in guesses else self._by(way, name, scope)
            if axis is not None:
                other = self.stand_in.get(name)  # the same rows, whose anchor is known
                self._by_value |= other is not None
                return axis if other is None or other != axis.layout else replace(axis, layout=other)
        if name in self.stand_in:
            return Axis(name, self.stand_in[name])
        return next((axis for way in guesses if (axis := self._by(way, name, scope)) is not None), None)

    def _by(self, way: MaskAxis, name: str, scope: Path) -> Axis | None:
        source = (*scope, *path_of(way.source))
        tensor = dense_at(self.batch, source)
        if tensor is None:
            return None
        self._by_value |= way.form != "mask"
        if way.form == "cu_seqlens":
            return Axis(name, self._read(source, RowLayout.from_cu_seqlens, tensor), flat=True, counted=True)
        if way.form == "lengths":
            width = self._first_width(scope, way.head)
            return Axis(name, self._read(source, RowLayout.from_lengths, tensor, width), counted=True)
        layout = self._prefix(source) if way.part == "prefix" else self._cut(self._mask(source), way, scope, name)
        return None if layout is None else Axis(name, layout, counted=way.part == "prefix")

    def _mask(self, source: Path) -> RowLayout:
        """One scan a mask, however many axes are cut from it."""
        if source not in self._masks:
            tensor = dense_at(self.batch, source)
            assert tensor is not None
            if tensor.dim() != 2:
                raise LayoutError(
                    f'{self.call}: mask field "{show(source)}" is {tuple(tensor.shape)}; expected (B, width). '
                    "Give one entry per row and position, or name another mask in the registry."
                )
            layout, value = self._read(source, layout_and_value, tensor)
            if value is not None:
                self._values[source] = value
            self._masks[source] = anchored(layout, self._anchor(source, layout.width))
        return self._masks[source]

    def _prefix(self, source: Path) -> RowLayout:
        if source not in self._prefixes:
            self._prefixes[source] = prefix_of(self._mask(source))
        return self._prefixes[source]

    def _read(self, source: Path, make: Callable[..., _T], *given: Any) -> _T:
        """What `make` gives, or its error with the name of the field."""
        try:
            return make(*given)
        except LayoutError as error:
            raise LayoutError(f'{self.call}: field "{show(source)}" does not give rows: {error}') from error

    def _anchor(self, source: Path, width: int) -> int:
        """Where some axis splits the mask, or the side that its rows are not padded on."""
        for way in (way for ways in self.registry.axes.values() for way in ways):
            path = path_of(way.source)
            scope = source[: len(source) - len(path)]
            if source == (*scope, *path) and way.part in ("head", "tail"):
                split = self._split(way, scope, width)
                if split is not None:
                    return min(max(split, 0), width)
            elif source == (*scope, *path) and way.padded == "left":
                return width
        return 0

    def _cut(self, layout: RowLayout, way: MaskAxis, scope: Path, name: str) -> RowLayout | None:
        if way.part == "all":
            return layout
        head, tail = self._first(scope, way.head), self._first(scope, way.tail)
        # the number of a tail is a limit, which a batch may fall short of
        from_number = tail is not None and dense_at(self.batch, tail[0]) is None
        if head is not None and tail is not None and head[1] + tail[1] != layout.width and not from_number:
            raise LayoutError(
                f'{self.call}: axis "{name}" splits mask "{show(way.source)}" of width {layout.width}, but '
                f'"{show(head[0])}" is {head[1]} wide and "{show(tail[0])}" {tail[1]}; expected '
                "the two to make up the mask. Fix the producer, or give the axis other head and tail fields."
            )
        split = self._split(way, scope, layout.width)
        if split is None:
            return None
        if not 0 <= split <= layout.width:
            raise LayoutError(
                f'{self.call}: axis "{name}" splits mask "{show(way.source)}" of width {layout.width} at {split}; '
                "expected a split inside the mask. Fix the widths of its head and tail fields."
            )
        return layout.narrow(0, split) if way.part == "head" else layout.narrow(split, layout.width)

    def _split(self, way: MaskAxis, scope: Path, width: int) -> int | None:
        head, tail = self._first_width(scope, way.head), self._first_width(scope, way.tail)
        return head if head is not None else None if tail is None else width - tail

    def _first(self, scope: Path, keys: tuple[Key, ...]) -> tuple[Path, int] | None:
        """The first field or number of a batch that gives a width, and this width."""
        for key in keys:
            path = (*scope, *path_of(key))
            tensor = dense_at(self.batch, path)
            width = tensor.shape[1] if tensor is not None and tensor.dim() >= 2 else number_at(self.batch, path)
            if width is not None:
                return path, width
        return None

    def _first_width(self, scope: Path, keys: tuple[Key, ...]) -> int | None:
        found = self._first(scope, keys)
        return None if found is None else found[1]
