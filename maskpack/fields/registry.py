"""The registry: the mask and the pad of each field of a batch.

    field      -> MaskNestingSpec(mask, pad, ragged_dim, hints), or (mask, pad)
    axis name  -> MaskAxis, ...  ways to compute a layout from a field of the batch; the first that applies is used

The `mask` of a spec is an axis of the registry or a mask field of the batch. Registries are immutable; `|` returns a
new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import numpy as np

from maskpack.core import abi
from maskpack.core.arguments import said
from maskpack.core.keys import Key, Path, need_key, need_keys, path_of, plain, show
from maskpack.core.pads import PUBLIC, Pad, PadValue, expanded, text_of
from maskpack.errors import RegistryError

HINTS = ("blocks", "rle", "delta", "sparse", "dictionary", "columns", "pieces")
"""The encodings that a spec may name in `hints`."""


@dataclass(frozen=True)
class MaskAxis:
    """A rule that computes a layout: from a mask, from row lengths, from cu_seqlens, or from a jagged field.

    Attributes:
        source: the batch field to read.
        form: the form of the source: a `mask` [B, width], or jagged [B, j]; integer `lengths` [B] of right-padded rows;
            `cu_seqlens` [B + 1] of fields that are packed as [T, *F]; or any field, if it is `jagged`. A way of the
            last kind is tried after those that know the padded width.
        part: the part of a mask: `all` columns, the `head` or `tail` of a split (see below), or the `prefix` of each
            row up to its last valid token. Of a `jagged` field `all` tokens of its rows.
        head, tail: fields that define the split; the first one in the batch is used. Its width is P for a `head` field
            and S - P for a `tail` field. An integer in the batch (`max_response_length`) is used as a width if no
            field gives one, first that of the head. For lengths, `head` names the fields that give the width.
        padded: the side on which rows are padded, which grows when batches of different widths are joined. A mask that
            is split into head and tail grows on both sides.
        shift: how far the columns of a mask of response tokens were moved, as by torch.roll: with -1, the entry at
            column t speaks of the token at t + 1. For the axis `response`, which keeps the columns of the mask.
    """

    source: Key
    form: Literal["mask", "lengths", "cu_seqlens", "jagged"] = "mask"
    part: Literal["all", "head", "tail", "prefix"] = "all"
    head: tuple[Key, ...] = ()
    tail: tuple[Key, ...] = ()
    padded: Literal["right", "left"] = "right"
    shift: int = 0

    def __post_init__(self) -> None:
        need_key(self.source, "source", "MaskAxis")
        object.__setattr__(self, "head", need_keys(self.head, "head", "MaskAxis"))
        object.__setattr__(self, "tail", need_keys(self.tail, "tail", "MaskAxis"))
        _one_of("MaskAxis", "form", self.form, ("mask", "lengths", "cu_seqlens", "jagged"))
        _one_of("MaskAxis", "part", self.part, _PARTS if self.form == "mask" else ("all",))
        _one_of("MaskAxis", "padded", self.padded, ("right", "left"))
        if self.part in ("head", "tail") and not (self.head or self.tail):
            raise RegistryError(
                f'MaskAxis: part {self.part!r} of "{show(self.source)}" names no field that tells where the columns '
                "split. Give `head` or `tail` fields."
            )
        if isinstance(self.shift, bool) or not isinstance(self.shift, int):
            raise RegistryError(f"MaskAxis: shift is {said(self.shift)}; expected a whole number. Give -1, 0 or 1.")
        if self.shift and (self.form, self.part) != ("mask", "all"):
            raise RegistryError(
                f'MaskAxis: shift {self.shift} of "{show(self.source)}", of which the axis is {self.form}, '
                f"{self.part}; expected all columns of a mask. Leave shift out."
            )


_PARTS = ("all", "head", "tail", "prefix")


@dataclass(frozen=True)
class MaskNestingSpec:
    """The mask and the pad of one field.

    Attributes:
        mask: an axis or a mask field (a tuple is the key of a field in a sub-TensorDict), or a list of these, of which
            the first with a matching shape is used. None: the field has no mask and stays padded.
        pad: the value under the mask: a number or one of `PAD_TOKEN_ID`, `EDGE`, `ZERO`, `PER_ROW`; or a list, of which
            the first that matches the batch is used: at most 8, where ZERO stands for three.
        ragged_dim: the dim of the width: 1 for [B, S, *F], -1 for both [B, S] and [B, 4, S].
        hints: encodings that `compress` tries first; a wrong hint costs time, but the result is still exact. Names of
            HINTS; `concat:head,tail` for a field that concatenates the rows of two others; `near:field` for a field
            with values close to another's.
        masks, pads: tuples of the masks and pads to try in order; `masks` is empty for a field without a mask, and
            `pads` has what ZERO stands for. Specs are compared by these.
    """

    mask: Key | list[Key] | None = field(compare=False)
    pad: PadValue | list[PadValue] = field(default=0, compare=False)
    ragged_dim: int = 1
    hints: tuple[str, ...] = ()
    masks: tuple[Key, ...] = field(init=False, repr=False)
    pads: tuple[PadValue, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("mask", "pad"):
            value = getattr(self, name)
            values: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
            if not values:
                raise RegistryError(f"MaskNestingSpec: {name} is an empty list. Name at least one {name}.")
            object.__setattr__(self, name, [*values] if isinstance(value, list) else value)
            object.__setattr__(self, f"{name}s", tuple(values))
        masks = () if self.mask is None else tuple(need_key(mask, "mask", "MaskNestingSpec") for mask in self.masks)
        object.__setattr__(self, "masks", tuple(map(plain, masks)))
        pads = [cast("Any", pad).item() if isinstance(pad, np.generic) else pad for pad in self.pads]
        object.__setattr__(self, "pad", pads if isinstance(self.pad, list) else pads[0])
        object.__setattr__(self, "pads", expanded(pads))
        if len(self.pads) > abi.MOST_PADS:
            raise RegistryError(
                f"MaskNestingSpec: pad is a list of {len(self.pads)}, where ZERO stands for three; expected at most "
                f"{abi.MOST_PADS}. Give those that the field has, or PER_ROW for any number of a row."
            )
        if isinstance(self.hints, list):
            object.__setattr__(self, "hints", (*self.hints,))
        if not isinstance(self.hints, tuple):
            raise RegistryError(f"MaskNestingSpec: hints is {said(self.hints)}; expected a tuple. Write ('rle',).")
        for hint in self.hints:
            if not is_hint(hint):
                raise RegistryError(
                    f"MaskNestingSpec: hint is {hint!r}; expected one of {', '.join(HINTS)}, concat:head,tail or "
                    "near:field. Choose one, or leave the hints out."
                )
        for pad in self.pads:
            if not isinstance(pad, int | float | complex | Pad):
                name = f"maskpack.{pad}" if isinstance(pad, str) and pad in PUBLIC else None
                raise RegistryError(
                    f"MaskNestingSpec: pad is {said(pad)}; expected a number, PAD_TOKEN_ID, EDGE, PER_ROW "
                    f"or ZERO, or a list of these. Give {name or 'the value under the mask'}."
                )
        if isinstance(self.ragged_dim, bool) or not isinstance(self.ragged_dim, int) or self.ragged_dim == 0:
            seen = "0, the rows" if self.ragged_dim == 0 else said(self.ragged_dim)
            raise RegistryError(
                f"MaskNestingSpec: ragged_dim is {seen}; expected the dim of the width. Give 1, 2, ... or -1."
            )

    def dim_of(self, field: Any) -> int:
        """The dim of the width in a padded tensor, as a non-negative number."""
        return self.ragged_dim + field.dim() if self.ragged_dim < 0 else self.ragged_dim


Spec = MaskNestingSpec | tuple[Key | list[Key] | None, PadValue | list[PadValue]]
"""A spec, or its mask and its pad."""


@dataclass(frozen=True)
class MaskNestingRegistry(Mapping[Key, MaskNestingSpec]):
    """The mask and pad of each field, as specs by field name, and the axes that they name.

    A field is looked up by its full path, then by its last name.

    Specs may be given as tuples (mask, pad). `registry | other` returns a merged registry, in which `other` (a registry
    or a dict of specs) takes precedence.
    """

    fields: Mapping[Key, MaskNestingSpec]
    axes: Mapping[str, tuple[MaskAxis, ...]] = field(default_factory=dict[str, tuple[MaskAxis, ...]])

    def __post_init__(self) -> None:
        for name, given in (("fields", self.fields), ("axes", self.axes)):
            if not isinstance(given, Mapping):
                raise RegistryError(f"MaskNestingRegistry: {name} is {said(given)}; expected a dict. Write one.")
        fields: dict[Key, MaskNestingSpec] = {}
        for key, spec in self.fields.items():
            need_key(key, "a field", "MaskNestingRegistry")
            pair = cast("tuple[Any, ...]", spec) if isinstance(spec, tuple) else ()
            spec = MaskNestingSpec(*pair) if len(pair) == 2 else spec
            if not isinstance(spec, MaskNestingSpec):
                raise RegistryError(
                    f'MaskNestingRegistry: field "{show(key)}" is {spec!r}; expected a MaskNestingSpec or a tuple '
                    "(mask, pad). Write one; MaskNestingRegistry.from_dict reads plain dicts."
                )
            fields[plain(key)] = spec
        object.__setattr__(self, "fields", MappingProxyType(fields))
        axes = {name: (ways,) if isinstance(ways, MaskAxis) else ways for name, ways in self.axes.items()}
        for name, ways in axes.items():
            whole = isinstance(ways, tuple | list) and ways and all(isinstance(way, MaskAxis) for way in ways)
            if not whole or not isinstance(name, str):
                raise RegistryError(
                    f"MaskNestingRegistry: axis {name!r} is {said(ways)}; expected a name and a MaskAxis, or a tuple "
                    'of them. Write MaskAxis("attention_mask").'
                )
            shifts = {way.shift for way in ways}
            if shifts != {0} and (name != "response" or len(shifts) > 1):
                raise RegistryError(
                    f'MaskNestingRegistry: axis "{name}" has the shifts {sorted(shifts)}; expected one shift, and none '
                    'but for the axis "response". Give the axis of the moved mask this name, and all its ways the same '
                    "shift."
                )
        object.__setattr__(self, "axes", MappingProxyType({name: tuple(ways) for name, ways in axes.items()}))

    def __getitem__(self, key: Key) -> MaskNestingSpec:
        return self.fields[plain(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    @cached_property
    def told(self) -> str:
        """All of it as text, which tells pads of other bits apart, unlike `==`."""
        pads = [text_of(spec.pads) for spec in self.fields.values()]
        return repr((list(self.fields.items()), list(self.axes.items()), pads))

    def __hash__(self) -> int:
        return hash((frozenset(self.fields.items()), frozenset(self.axes.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskNestingRegistry, (dict(self.fields), dict(self.axes))

    def __repr__(self) -> str:
        return f"MaskNestingRegistry({len(self.fields)} fields, axes {', '.join(self.axes) or 'none'})"

    def find(self, path: Path) -> MaskNestingSpec | None:
        """Returns the spec of the field at `path`, or None."""
        return self.fields.get(plain(path)) or self.fields.get(path[-1])

    def ways(self, mask: Key) -> tuple[MaskAxis, ...]:
        """The ways to compute the layout of the mask `mask` of a spec, in order of preference."""
        if isinstance(mask, str) and mask in self.axes:
            return self.axes[mask]
        return (MaskAxis(mask),)

    def __or__(self, other: Mapping[Any, Spec]) -> MaskNestingRegistry:
        if not isinstance(other, Mapping):
            return NotImplemented
        axes = {**self.axes, **other.axes} if isinstance(other, MaskNestingRegistry) else self.axes
        fields: dict[Key, Any] = {**self.fields, **{plain(key): other[key] for key in other}}
        return MaskNestingRegistry(fields, axes)

    def __ror__(self, other: Mapping[Any, Spec]) -> MaskNestingRegistry:
        return MaskNestingRegistry(cast("Mapping[Key, Any]", other)) | self

    # ------------------------------------------------------------ plain dicts, for YAML and Hydra

    def to_dict(self) -> dict[str, Any]:
        """Converts the registry to strings, numbers, lists and dicts; tuple keys are joined with "/"."""
        return {
            "axes": {name: [_axis_to_dict(way) for way in ways] for name, ways in self.axes.items()},
            "fields": {_joined(key): _spec_to_dict(spec) for key, spec in self.fields.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MaskNestingRegistry:
        """Builds a registry from the result of `to_dict`. Raises RegistryError for unknown entries."""
        call = "MaskNestingRegistry.from_dict"
        _known(call, data, ("axes", "fields"))
        axes, fields = (data.get(name, {}) for name in ("axes", "fields"))
        for name, part in (("axes", axes), ("fields", fields)):
            if not isinstance(part, Mapping):
                raise RegistryError(f"{call}: {name} is {said(part)}; expected a dict. Write one, or leave it out.")
        return cls(
            {_split(key, "a field", call): _spec_from_dict(key, spec) for key, spec in fields.items()},
            {
                name: tuple(_axis_from_dict(name, way) for way in (ways if _is_list(ways) else [ways]))
                for name, ways in axes.items()
            },
        )


# -------------------------------------------------------------------- names


def _joined(key: Key) -> str:
    if any("/" in name for name in path_of(key)):
        raise RegistryError(
            f'MaskNestingRegistry.to_dict: key {key!r} contains "/", which separates the names of a nested key. '
            "Rename the field, or keep this registry in Python."
        )
    return "/".join(path_of(key))


def _split(key: Any, name: str, call: str) -> Key:
    if not isinstance(key, str):
        raise RegistryError(f'{call}: {name} is {said(key)}; expected a name, as "a" or "sub/a". Write one.')
    return plain(tuple(key.split("/")))


def is_hint(hint: object) -> bool:
    """Whether it is a hint of a MaskNestingSpec."""
    if not isinstance(hint, str):
        return False
    name, colon, rest = hint.partition(":")
    fields = rest.split(",") if colon else []
    return hint in HINTS or (all(fields) and (name, len(fields)) in (("near", 1), ("concat", 2)))


def _one_of(call: str, name: str, seen: object, allowed: tuple[str, ...]) -> None:
    if seen not in allowed:
        raise RegistryError(f"{call}: {name} is {seen!r}; expected one of {', '.join(allowed)}. Choose one of these.")


def _known(call: str, data: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping):
        raise RegistryError(f"{call}: {data!r}; expected a dict with {list(allowed)}. Write one.")
    unknown = sorted(str(key) for key in cast("Mapping[Any, Any]", data) if key not in allowed)
    if unknown:
        raise RegistryError(f"{call}: unknown entries {unknown}; expected {list(allowed)}. Remove or rename them.")


# -------------------------------------------------------------------- plain forms

_AXIS_PARTS = tuple(part.name for part in fields(MaskAxis))
_Part = TypeVar("_Part", MaskAxis, MaskNestingSpec)


def _made(call: str, kind: type[_Part], **given: Any) -> _Part:
    """A part of a registry, whose errors name where it stands."""
    try:
        return kind(**given)
    except RegistryError as error:
        raise RegistryError(f"{call}: {error}") from error


def _is_list(value: Any) -> bool:
    """Whether it is a list or a Hydra list."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _items(value: Any, name: str, call: str) -> Sequence[Any]:
    if not _is_list(value):
        raise RegistryError(f"{call}: {name} is {said(value)}; expected a list. Write one.")
    return value


def _axis_to_dict(axis: MaskAxis) -> dict[str, Any]:
    out: dict[str, Any] = {"source": _joined(axis.source)}
    for name in _AXIS_PARTS[1:]:
        value = getattr(axis, name)
        if value != getattr(MaskAxis, name):  # the default
            out[name] = [*map(_joined, cast("tuple[Key, ...]", value))] if isinstance(value, tuple) else value
    return out


def _axis_from_dict(name: str, data: Mapping[str, Any]) -> MaskAxis:
    call = f'MaskNestingRegistry.from_dict: axis "{name}"'
    _known(call, data, _AXIS_PARTS)
    if "source" not in data:
        raise RegistryError(f"{call}: no source; expected the name of the field that the axis is computed from.")
    given: dict[str, Any] = {**data, "source": _split(data["source"], "source", call)}
    for side in {"head", "tail"} & {*data}:
        given[side] = tuple(_split(key, side, call) for key in _items(data[side], side, call))
    return _made(call, MaskAxis, **given)


def _spec_to_dict(spec: MaskNestingSpec) -> dict[str, Any]:
    masks = map(_joined, spec.masks)
    own: list[Any] = cast("list[Any]", spec.pad) if isinstance(spec.pad, list) else [spec.pad]
    pads = [pad.value if isinstance(pad, Pad) else pad for pad in own]
    out: dict[str, Any] = {
        "mask": None if spec.mask is None else [*masks] if isinstance(spec.mask, list) else next(masks),
        "pad": pads if isinstance(spec.pad, list) else pads[0],
    }
    if spec.ragged_dim != 1:
        out["ragged_dim"] = spec.ragged_dim
    if spec.hints:
        out["hints"] = list(spec.hints)
    return out


def _spec_from_dict(key: str, data: Mapping[str, Any]) -> MaskNestingSpec:
    call = f'MaskNestingRegistry.from_dict: field "{key}"'
    _known(call, data, ("mask", "pad", "ragged_dim", "hints"))
    if "mask" not in data:
        raise RegistryError(
            f"{call}: no mask; expected the name of an axis or mask field, or null for a field without one."
        )

    def listed(value: Any, convert: Callable[[Any], Any]) -> Any:
        return [convert(item) for item in value] if _is_list(value) else convert(value)

    def pad(value: Any) -> PadValue:
        if not isinstance(value, str):
            return value
        _one_of(call, "pad", value, PUBLIC)
        return Pad(value)

    masks = None if data["mask"] is None else listed(data["mask"], lambda mask: _split(mask, "mask", call))
    hints = tuple(_items(data.get("hints", ()), "hints", call))
    pads, ragged_dim = listed(data.get("pad", 0), pad), data.get("ragged_dim", 1)
    return _made(call, MaskNestingSpec, mask=masks, pad=pads, ragged_dim=ragged_dim, hints=hints)
