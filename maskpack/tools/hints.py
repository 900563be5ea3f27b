"""The hints of specs: those that name other fields are tried, and kept where packed rows take fewer bytes.

ids that are two fields side by side    concat:head,tail
floats under one mask                   near:field, for each of them as that field
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from maskpack.core.keys import Key, Path, path_of
from maskpack.fields.registry import MaskNestingSpec

_TEXT = 16
"""Bytes that a hint takes in a header beside its own."""

Specs = Mapping[Key, MaskNestingSpec]
Hints = Mapping[Key, tuple[str, tuple[Key, ...]]]
"""A hint for each of some fields, and the fields that it names."""


def with_hints(
    specs: Specs,
    tensors: Mapping[Path, Tensor],
    concats: Mapping[Key, tuple[Key, Key]],
    sizes: Callable[[Specs], Mapping[Path, int]],
) -> dict[Key, MaskNestingSpec]:
    """Returns the specs, some of them with hints. A field that a hint names has none itself.

    Args:
        specs: of fields of the batch.
        tensors: the fields of the batch.
        concats: of fields that equal two others side by side, these two.
        sizes: the wire bytes of each field of some rows, packed with these specs.
    """
    tries, out = [*_near(specs, tensors), *_concats(specs, concats)], dict(specs)
    before = sizes(specs) if tries else dict[Path, int]()
    found: list[tuple[int, Key, str, tuple[Key, ...]]] = []
    for hints in tries:
        after = sizes({**specs, **{key: _hinted(specs[key], hint) for key, (hint, _) in hints.items()}})
        for key, (hint, named) in hints.items():
            found.append((before[path_of(key)] - after[path_of(key)] - len(hint) - _TEXT, key, hint, named))
    names, kept = set[Key](), set[Key]()
    for saved, key, hint, named in sorted(found, key=lambda one: one[0], reverse=True):
        if saved > 0 and key not in kept | names and not kept & {*named}:
            out[key] = _hinted(specs[key], hint)
            kept.add(key)
            names |= {*named}
    return out


def _hinted(spec: MaskNestingSpec, hint: str) -> MaskNestingSpec:
    return replace(spec, hints=(*spec.hints, hint))


def _concats(specs: Specs, concats: Mapping[Key, tuple[Key, Key]]) -> Iterator[Hints]:
    for whole, parts in concats.items():
        if whole in specs and all(_is_beside(part, whole) for part in parts):
            yield {whole: (f"concat:{','.join(path_of(part)[-1] for part in parts)}", parts)}


def _near(specs: Specs, tensors: Mapping[Path, Tensor]) -> Iterator[Hints]:
    """Each field of floats in turn, for all others of its dtype, shape and mask."""
    kinds: dict[Key, object] = {}
    for key, spec in specs.items():
        x = tensors.get(path_of(key))
        if x is not None and x.is_floating_point() and spec.masks:
            kinds[key] = spec.masks, x.dtype, x.shape
    for named in kinds:
        others = [key for key in kinds if key != named and kinds[key] == kinds[named] and _is_beside(named, key)]
        if others:
            yield {key: (f"near:{path_of(named)[-1]}", (named,)) for key in others}


def _is_beside(key: Key, other: Key) -> bool:
    """Whether a hint of the other field may name the field by its last name."""
    *parent, name = path_of(key)
    return parent == [*path_of(other)[:-1]] and not {"/", ",", ":"} & {*name}
