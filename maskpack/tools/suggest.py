"""What would cover a field: the masks of a batch that fit its shape, and the pad that it holds under each.

    field [B, R] --> axes of the registry and mask fields of its size --> values at masked-out positions --> one spec
                     response (B, R), "completion_mask" (B, R)            all -100?  EDGE?  one a row?

A spec is proposed only if every element under the mask has the bits of its pad, by the checks that nesting makes. A
mask is known by what it holds: 0 and 1 alone, with one pad under it in another field. Of several the one that serves
most fields is taken, so that a mask with holes (tool tokens) lies under the mask of the tokens, as its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.pads import EDGE, PAD_TOKEN_ID, PER_ROW, SIGNED_ZERO, Pad, PadValue
from maskpack.core.tree import flatten, has, is_object
from maskpack.errors import LayoutError
from maskpack.fields.registry import DENSE, Key, MaskNestingRegistry, MaskNestingSpec, Path, path_of, show
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks
from maskpack.nesting.axes import Axes
from maskpack.nesting.schema import LAYOUTS, read_layouts
from maskpack.ops import pack_torch as ops

_CALL = "maskpack doctor"
_USUAL = (0, -1, -100)
"""Pads that are believed where a few elements show them; another constant could as well be EDGE."""
_SHOWN = 3
_NO_PAD = (
    "No pad covers that: x.masked_fill(mask == 0, 0) in the producer, if these mean nothing; another mask, if they do; "
    "or declare it dense"
)
_PAD_WORDS: dict[Pad, str] = {
    EDGE: "the nearest real value",
    SIGNED_ZERO: "0.0 in some rows and -0.0 in others",
    PER_ROW: "one value a row",
    PAD_TOKEN_ID: "the pad token",
}


@dataclass(frozen=True)
class Cover:
    """What would cover a field.

    Attributes:
        spec: for the registry; DENSE where no mask fits, or none has one pad under it.
        seen: what stands under the mask, in words.
    """

    spec: MaskNestingSpec
    seen: str


@dataclass(frozen=True)
class _Fit:
    """A mask that has the shape of a field, and the pad under it: None if there are several values."""

    mask: Key
    known: bool  # a mask of the registry, rather than a field that holds 0 and 1
    layout: RowLayout
    dim: int
    pad: PadValue | None


class Covers:
    """Looks at the fields of one batch.

    Args:
        batch: padded or nested, or any mix.
        registry: whose axes may be named.
        pad_token_id: that of the tokenizer; if it is None, what is seen under the masks of token fields.
        masks: fields that are masks, beside the axes; looked for if none is named.

    Raises LayoutError for masks that are no fields [B, width].

    Attributes:
        paths, tensors: the places of all entries, and the tensors among them.
        pad_token_id: as above; None where it is not given, and not seen.
        pad_token_seen: None where no token field has one constant under its mask.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        registry: MaskNestingRegistry,
        pad_token_id: int | None,
        masks: Sequence[Key] = (),
    ) -> None:
        carried: Mapping[str, RowLayout] = read_layouts(batch, _CALL)[1] if has(batch, LAYOUTS) else {}
        self._registry = registry
        self._axes = Axes(batch, registry, carried, {}, _CALL)
        entries = [(path, value) for path, value in flatten(batch) if path[0] != LAYOUTS]
        self.paths = {path for path, _ in entries}
        self.tensors: dict[Path, Tensor] = {
            path: value for path, value in entries if isinstance(value, Tensor) and not is_object(value)
        }
        of_specs = (mask for spec in registry.values() for mask in spec.masks)
        self._known: list[Key] = list(dict.fromkeys([*registry.axes, *of_specs]))
        self._masks = list(map(self._named_mask, masks)) or [path for path in self.tensors if self._is_mask(path)]
        self.pad_token_seen = self._pad_token()
        self.pad_token_id = self.pad_token_seen if pad_token_id is None else pad_token_id
        self._served = self._fields_served()
        if not masks:
            self._masks = [path for path in self._masks if self._served[_plain(path)]]

    # ---------------------------------------------------------------- known fields

    def misfits(self) -> dict[Path, str]:
        """Fields that their specs cannot cover, which nesting refuses, and why."""
        out: dict[Path, str] = {}
        for path, value in self.tensors.items():
            spec = self._registry.find(path)
            if spec is None or value.is_nested or value.dim() < 2:
                continue
            axes = [axis for mask in spec.masks if (axis := self._axes.find(mask, path)) is not None]
            pads = [self.pad_token_id or 0 if pad is PAD_TOKEN_ID else pad for pad in spec.pads]
            if axes and not any(_dims(value, axis.layout, axis.flat, (spec.dim_of(value),)) for axis in axes):
                out[path] = f"it fits none of its masks: {'; '.join(map(str, axes))}"
            elif axes and not any(checks.holds(pad, value.dtype) for pad in pads):
                out[path] = f"its dtype cannot hold the pad {list(spec.pads)}"
        return out

    # ---------------------------------------------------------------- covers

    def cover(self, path: Path) -> Cover:
        """What would cover a field that travels dense now."""
        value = self.tensors.get(path)
        if value is None:
            return Cover(
                DENSE, "masks do not reach it there: make it a field of the batch, or declare the object dense"
            )
        if value.layout != torch.strided:
            return Cover(DENSE, f"{value.layout} is no padded field")
        fits = sorted(self._fits(path, value), key=self._order)
        if not fits:
            return Cover(DENSE, f"no mask of the batch has its size; masks are {self._sizes() or 'missing'}")
        best = fits[0]
        if best.pad is None:
            seen = f"under mask {_named(best.mask)}, {self._open(best):,} positions hold {_several(value, best)}"
            return Cover(DENSE, seen)
        return Cover(self._spec(path, value, best), self._words(best))

    def _order(self, fit: _Fit) -> tuple[bool, bool, bool, int, int]:
        return fit.pad is None, not fit.known, fit.pad is PER_ROW, -self._served[fit.mask], fit.layout.num_tokens

    def _fits(self, path: Path, value: Tensor) -> Iterator[_Fit]:
        for mask, known in [(name, True) for name in self._known] + [(_plain(p), False) for p in self._masks]:
            axis = self._axes.find(mask, path)
            if axis is None:
                continue
            for dim in _dims(value, axis.layout, axis.flat, range(1, value.dim())):
                layout = axis.layout.to(value.device)
                yield _Fit(mask, known, layout, dim, _pad_of(value.movedim(dim, 1), layout, self.pad_token_id))

    def _spec(self, path: Path, value: Tensor, fit: _Fit) -> MaskNestingSpec:
        """A new spec; of a known field, its own with another pad first."""
        assert fit.pad is not None
        old = self._registry.find(path)
        dim = -1 if fit.dim == value.dim() - 1 and fit.dim > 1 else fit.dim
        if old is None or old.mask is None:
            return MaskNestingSpec(fit.mask, fit.pad, dim)
        masks = old.mask if fit.mask in old.masks else fit.mask
        pads = [fit.pad, *(pad for pad in old.pads if repr(pad) != repr(fit.pad))]
        held = [pad for pad in pads if pad is PAD_TOKEN_ID or checks.holds(pad, value.dtype)]
        ragged = old.ragged_dim if old.dim_of(value) == fit.dim else dim
        return replace(old, mask=masks, pad=held if len(held) > 1 else fit.pad, ragged_dim=ragged)

    # ---------------------------------------------------------------- words

    def _words(self, fit: _Fit) -> str:
        where = f"under mask {_named(fit.mask)}"
        if not self._open(fit):
            return f"{where} nothing is padded in this batch, so its pad is not seen; 0 is assumed"
        pad = fit.pad
        said = _PAD_WORDS[pad] if isinstance(pad, Pad) else repr(pad)
        more = f", {self.pad_token_id}" if pad is PAD_TOKEN_ID else f" ({pad!r})" if isinstance(pad, Pad) else ""
        return f"{where} it is padded with {said}{more}"

    def _open(self, fit: _Fit) -> int:
        return fit.layout.num_rows * fit.layout.width - fit.layout.num_tokens

    def _sizes(self) -> str:
        named = {mask: self._axes.find(mask, ("",)) for mask in [*self._known, *map(_plain, self._masks)]}
        return ", ".join(f"{_named(mask)} {_size(axis.layout)}" for mask, axis in named.items() if axis is not None)

    # ---------------------------------------------------------------- what a batch tells

    def _is_mask(self, path: Path) -> bool:
        """Whether a field that the registry does not know holds 0 and 1 alone."""
        value = self.tensors[path]
        if (
            value.is_nested
            or value.dim() != 2
            or value.layout != torch.strided
            or self._registry.find(path) is not None
        ):
            return False
        return bool(((value == 0) | (value == 1)).all() and value.any())

    def _named_mask(self, mask: Key) -> Path:
        value = self.tensors.get(path_of(mask))
        if value is None or value.is_nested or value.dim() != 2:
            seen = "no field of the batch" if value is None else str(tuple(value.shape))
            wide = [show(path) for path, field in self.tensors.items() if field.dim() == 2]
            raise LayoutError(
                f"{_CALL}: mask {_named(mask)} is {seen}; expected a field (B, width). Name one: "
                f"{', '.join(wide) or 'there is none'}."
            )
        return path_of(mask)

    def _fields_served(self) -> Counter[Key]:
        """Of each mask, how many fields have one pad under it: fields that the registry does not know, and no masks."""
        counts: Counter[Key] = Counter()
        for path, value in self.tensors.items():
            if path not in self._masks and self._registry.find(path) is None and value.layout == torch.strided:
                fits = [fit.mask for fit in self._fits(path, value) if fit.pad is not None and fit.pad is not PER_ROW]
                counts.update(set(fits))
        return counts

    def _pad_token(self) -> int | None:
        """The constant under the masks of fields that are padded with the pad token; the one that most have."""
        found: list[int] = []
        for path, value in self.tensors.items():
            spec = self._registry.find(path)
            if spec is None or PAD_TOKEN_ID not in spec.pads or value.is_nested or value.is_floating_point():
                continue
            for fit in self._fits_known(path, value, spec):
                if isinstance(fit.pad, int) and self._open(fit):
                    found.append(int(fit.pad))
        return max(found, key=found.count) if found else None

    def _fits_known(self, path: Path, value: Tensor, spec: MaskNestingSpec) -> Iterator[_Fit]:
        for mask in spec.masks:
            axis = self._axes.find(mask, path)
            if axis is not None and _dims(value, axis.layout, axis.flat, (spec.dim_of(value),)):
                layout, dim = axis.layout.to(value.device), spec.dim_of(value)
                x = value.movedim(dim, 1)
                first = _first(x, layout)
                values = ops.pack(x, layout)
                same = first is not None and not int(checks.strays(x, values, layout, first))
                yield _Fit(mask, True, layout, dim, first if same else None)
                return


# -------------------------------------------------------------------- pads


def _dims(value: Tensor, layout: RowLayout, flat: bool, dims: Any) -> list[int]:
    """The dims of a field that a mask's width may run along."""
    if flat or value.is_nested or not value.dim() or value.shape[0] != layout.num_rows:
        return []
    return [dim for dim in dims if 1 <= dim < value.dim() and value.shape[dim] == layout.width]


def _pad_of(x: Tensor, layout: RowLayout, pad_token_id: int | None) -> PadValue | None:
    """The pad of a field [B, S, *F] under a mask, the plainest that is exact; None if it has none."""
    first = _first(x, layout)
    if first is None:
        return 0
    values = ops.pack(x, layout)
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    token = integers and pad_token_id not in (None, *_USUAL) and first == pad_token_id
    usual = first in _USUAL and not _is_minus_zero(first)
    trials: list[PadValue] = [first] if usual or token or x.dtype == torch.bool else []
    trials += [EDGE] if integers else []
    trials += [SIGNED_ZERO] if x.is_floating_point() and first == 0 else []
    plain = float("nan") if first != first else first  # a NaN of other bits can be no constant
    for pad in [*trials, plain, PER_ROW]:
        if pad is SIGNED_ZERO or pad is PER_ROW:
            rows = checks.row_pads(x, layout)
            held: Any = checks.zeros_of(rows) if pad is SIGNED_ZERO else rows
        else:
            held = pad
        if checks.holds(pad, x.dtype) and not int(checks.strays(x, values, layout, held)):
            return PAD_TOKEN_ID if token and pad == first else pad
    return None


def _first(x: Tensor, layout: RowLayout) -> Any:
    """The value of the first element under the mask; None without one."""
    under = torch.nonzero(~layout.to_mask(torch.bool))
    if not under.shape[0] or not x.numel():
        return None
    return x[int(under[0, 0]), int(under[0, 1])].reshape(-1)[0].item()


def _is_minus_zero(value: Any) -> bool:
    return str(value) == "-0.0"


def _several(value: Tensor, fit: _Fit) -> str:
    """The values under a mask, the most frequent first."""
    under = value.movedim(fit.dim, 1)[~fit.layout.to_mask(torch.bool)].reshape(-1)
    if under.is_floating_point() and bool((under == 0).all()):
        return (
            "0.0 and -0.0 in one row, as x * mask leaves them. No pad covers that: x.masked_fill(mask == 0, 0) in the "
            "producer leaves 0.0 alone; or declare it dense"
        )
    if under.is_complex():
        return f"several values. {_NO_PAD}"
    wide = torch.float64 if under.is_floating_point() else torch.int64
    found, counts = cast("tuple[Tensor, Tensor]", torch.unique(under.cpu().to(wide), return_counts=True))
    order = cast("list[int]", counts.argsort(descending=True)[:_SHOWN].tolist())
    shown = ", ".join(f"{found[place].item()!r} ({int(counts[place]):,} times)" for place in order)
    more = f" and {found.numel() - _SHOWN:,} more values" if found.numel() > _SHOWN else ""
    return f"{shown}{more}. {_NO_PAD}"


def _plain(path: Path) -> Key:
    return path[0] if len(path) == 1 else path


def _named(mask: Key) -> str:
    return f'"{show(path_of(mask))}"'


def _size(layout: RowLayout) -> str:
    return f"({layout.num_rows}, {layout.width})"


# -------------------------------------------------------------------- lines of Python


def spec_text(spec: MaskNestingSpec) -> str:
    """A spec as Python says it, with the names of maskpack."""
    if spec.mask is None:
        return "DENSE"
    parts = [repr(spec.mask)]
    if spec.pad != 0 or _is_minus_zero(spec.pad):
        parts.append(f"pad={_pad_text(spec.pad)}")
    if spec.ragged_dim != 1:
        parts.append(f"ragged_dim={spec.ragged_dim}")
    if spec.hints:
        parts.append(f"hints={spec.hints!r}")
    return f"MaskNestingSpec({', '.join(parts)})"


def _pad_text(pad: Any) -> str:
    if isinstance(pad, list):
        return f"[{', '.join(map(_pad_text, cast('list[Any]', pad)))}]"
    return f'float("{pad}")' if isinstance(pad, float) and (pad != pad or abs(pad) == float("inf")) else repr(pad)


def names_in(spec: MaskNestingSpec) -> set[str]:
    """The names of maskpack in its text."""
    if spec.mask is None:
        return {"DENSE"}
    return {"MaskNestingSpec", *(repr(pad) for pad in spec.pads if isinstance(pad, Pad))}
