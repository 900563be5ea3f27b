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


def with_hints(
    specs: Specs,
    tensors: Mapping[Path, Tensor],
    concats: Mapping[Key, tuple[Key, Key]],
    sizes: Callable[[Specs], Mapping[Path, int]],
) -> dict[Key, MaskNestingSpec]:
    """Returns the specs, some of them with hints.

    Args:
        specs: of fields of the batch.
        tensors: the fields of the batch.
        concats: of fields that equal two others side by side, these two.
        sizes: the wire bytes of each field of some rows, packed with these specs.
    """
    every, out = [*_tries(specs, tensors, concats)], dict(specs)
    if not every:
        return out
    before = sizes(specs)
    for tries in every:
        best, most = dict[Key, str](), 0
        for hints in tries:
            after = sizes({**specs, **_hinted(specs, hints)})
            saved = {key: before[path_of(key)] - after[path_of(key)] - len(hint) - _TEXT for key, hint in hints.items()}
            saved = {key: saving for key, saving in saved.items() if saving > 0}
            if sum(saved.values()) > most:
                best, most = {key: hints[key] for key in saved}, sum(saved.values())
        out |= _hinted(specs, best)
    return out


def _hinted(specs: Specs, hints: Mapping[Key, str]) -> dict[Key, MaskNestingSpec]:
    return {key: replace(specs[key], hints=(*specs[key].hints, hint)) for key, hint in hints.items()}


def _tries(
    specs: Specs, tensors: Mapping[Path, Tensor], concats: Mapping[Key, tuple[Key, Key]]
) -> Iterator[list[dict[Key, str]]]:
    """Lists of hints by field, of which one may be taken. Hints name fields beside their own."""

    def name_of(key: Key, beside: Key) -> str | None:
        path = path_of(key)
        return path[-1] if path[:-1] == path_of(beside)[:-1] and not {"/", ","} & {*path[-1]} else None

    for whole, parts in concats.items():
        names = [name_of(part, whole) for part in parts]
        if whole in specs and None not in names:
            yield [{whole: f"concat:{','.join(map(str, names))}"}]
    groups: dict[object, list[Key]] = {}
    for key, spec in specs.items():
        x = tensors.get(path_of(key))
        if x is not None and x.is_floating_point() and spec.masks:
            groups.setdefault((spec.masks, x.dtype, x.shape, path_of(key)[:-1]), []).append(key)
    for group in (group for group in groups.values() if len(group) > 1):
        named = ((other, name_of(other, other)) for other in group)
        yield [{key: f"near:{name}" for key in group if key != other} for other, name in named if name is not None]
