"""The registry that covers a batch, checked before it is shown.

registry + axes that the fields show + a spec for each field that stays padded + hints that save bytes
    --> compress in strict mode --> decompress: the same bits? --> the tokens that replay scores
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.difference import difference
from maskpack.core.keys import Key, Path, path_of, show
from maskpack.core.tree import flatten, has
from maskpack.errors import LayoutError, MaskpackWarning
from maskpack.fields.options import not_strict
from maskpack.fields.registry import MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.coverage import DenseField
from maskpack.nesting.nest import unnest_batch_by_mask
from maskpack.nesting.response import RESPONSE, SEQUENCE, ResponseAxis
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.sizes import Figures, figures
from maskpack.packed.table import forget
from maskpack.tools.axes import NONE, FoundAxes, found_axes
from maskpack.tools.hints import Specs, with_hints
from maskpack.tools.suggest import Suggester, Suggestion

_CALL = "maskpack doctor"
_ROWS = 128
"""The rows that hints are tried on."""


@dataclass(frozen=True)
class Cover:
    """The registry `base | added`, with which no field of a batch stays padded unless it is declared to.

    Attributes:
        base: the registry given, or an empty one if that is RL_FIELDS and does not know the names of the batch.
        added: the axes that were found, and the specs of fields.
        found: what the axes follow from.
        suggestions: one for each field that stays padded with the registry given.
        pad_token_id: the one given, or the one seen under the masks.
        packed: the batch, packed with it in strict mode.
        scored: the response tokens that replay finds in it; None if it finds no response axis.
    """

    base: MaskNestingRegistry
    added: MaskNestingRegistry
    found: FoundAxes
    suggestions: tuple[Suggestion, ...]
    pad_token_id: int | None
    packed: PackedBatch
    scored: int | None

    @property
    def registry(self) -> MaskNestingRegistry:
        """The whole registry."""
        return self.base | self.added

    @property
    def extended(self) -> MaskNestingRegistry:
        """The whole registry, in which an axis keeps the ways that it has, and tries those that were found after them:
        for a registry of several batches."""
        axes = {
            name: tuple(dict.fromkeys([*self.base.axes.get(name, ()), *ways])) for name, ways in self.added.axes.items()
        }
        return self.base | MaskNestingRegistry(self.added.fields, axes)

    @property
    def adds(self) -> bool:
        """Whether it is another registry than the one given."""
        return bool(self.added.fields or self.added.axes)


def axes_of(batch: TensorDictBase, known: Suggester) -> FoundAxes:
    """The axes that the fields of a batch show, if its registry lacks some that replay needs."""
    if has(batch, LAYOUTS) or known.gives(SEQUENCE, RESPONSE):
        return NONE
    return found_axes(known.tensors, known.pad_token_id)


def base_of(registry: MaskNestingRegistry, known: Suggester, found: FoundAxes) -> MaskNestingRegistry:
    """The registry that lines and axes are added to: an empty one instead of RL_FIELDS, if that knows no field of two
    or more dims, or does not know the sequence that was found."""
    foreign = known.knows_none or (bool(found.axes) and not known.gives(SEQUENCE))
    return MaskNestingRegistry({}) if registry is RL_FIELDS and foreign else registry


def uncovered(packed: PackedBatch, base: MaskNestingRegistry, known: Suggester, sizes: Figures) -> Cover:
    """The suggestions for a batch that is packed already, which show no axes and are not tried; `base` of `base_of`."""
    found = tuple(map(known.suggest, [*_dense(sizes), *known.hidden()]))
    added = MaskNestingRegistry({one.key: one.spec for one in found})
    return Cover(base, added, NONE, found, known.pad_token_id, packed, None)


def cover(
    batch: TensorDictBase,
    base: MaskNestingRegistry,
    found: FoundAxes,
    known: Suggester,
    sizes: Figures,
    pad_token_id: int | None,
) -> Cover:
    """The cover of a padded or nested batch.

    Args:
        base, found: of `base_of` and `axes_of`.
        known: of the batch and the registry given.
        sizes: of the batch, packed with the registry given.

    Raises:
        MaskpackError: `compress` refuses the batch.
    """
    fields, suggester = [*_dense(sizes), *known.hidden()], known
    padded = {field.path for field in fields}
    axes = {name: ways for name, ways in found.axes.items() if base.axes.get(name) != ways}
    if axes:
        suggester = Suggester(batch, base | MaskNestingRegistry({}, axes), pad_token_id)
        try:
            packed = compressed(batch, suggester.registry, suggester.pad_token_id)
        except LayoutError:  # a field that the registry knows has another width than the axes
            return cover(batch, base_of(known.registry, known, NONE), NONE, known, sizes, pad_token_id)
        again = [*_dense(figures(packed, left=False)), *suggester.hidden()]
        fields += [field for field in again if field.path not in padded]
    token = suggester.pad_token_id
    every = [suggester.suggest(field) for field in fields]
    specs = {one.key: one.spec for one in every}
    if not has(batch, LAYOUTS):
        rows = batch[:_ROWS] if batch.batch_dims else batch

        def wire_bytes(tried: Specs) -> Mapping[Path, int]:
            packed = compressed(rows, base | MaskNestingRegistry(tried, axes), token)
            return {field.path: field.wire_bytes for field in figures(packed, left=False).fields}

        known_specs = _without_concats(base, [key for key in found.concats if key not in specs])
        hinted = with_hints({**specs, **known_specs}, suggester.tensors, found.concats, wire_bytes)
        specs = {key: spec for key, spec in hinted.items() if spec != known_specs.get(key)}
    added = MaskNestingRegistry(specs, axes)
    packed = checked(batch, base | added, token)
    scored = _scored(packed, base | added)
    if axes and scored is None:  # axes that replay refuses help nobody
        return cover(batch, base_of(known.registry, known, NONE), NONE, known, sizes, pad_token_id)
    suggestions = tuple(replace(one, spec=specs[one.key]) for one in every if one.field.path in padded)
    return Cover(base, added, found, suggestions, token, packed, scored)


def _without_concats(registry: MaskNestingRegistry, keys: Iterable[Key]) -> dict[Key, MaskNestingSpec]:
    """The specs of fields that a registry knows, without the hint `concat`, which names other fields."""
    found = {key: registry.find(path_of(key)) for key in keys}
    return {
        key: replace(spec, hints=tuple(hint for hint in spec.hints if not hint.startswith("concat:")))
        for key, spec in found.items()
        if spec is not None
    }


def compressed(
    batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None, *, strict: bool = False
) -> PackedBatch:
    """A batch as `compress` packs it in a process that has packed nothing else, without warnings."""
    forget()  # encodings that were chosen for another registry
    with warnings.catch_warnings(), not_strict():
        warnings.simplefilter("ignore", MaskpackWarning)  # the suggestions say it
        return compress(batch, registry=registry, pad_token_id=pad_token_id or 0, strict_mask_nesting=strict)


def checked(batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> PackedBatch:
    """A batch that strict mode takes and whose bits come back. Raises MaskpackError if they do not."""
    packed = compressed(batch, registry, pad_token_id, strict=True)
    given = batch if not has(batch, LAYOUTS) else unnest_batch_by_mask(batch)
    seen = dict(flatten(decompress(packed, max_bytes=None)))
    for path, x in flatten(given):
        if isinstance(x, Tensor) and not x.is_nested and difference(x, seen[path].to(x.device)) is not None:
            raise LayoutError(f'{_CALL}: field "{show(path)}" does not come back with its bits. Please report this.')
    return packed


def _scored(packed: PackedBatch, registry: MaskNestingRegistry) -> int | None:
    try:
        return ResponseAxis.among(packed.layouts, registry, _CALL).tokens(_CALL).size
    except LayoutError:
        return None


def _dense(sizes: Figures) -> list[DenseField]:
    return [DenseField(of.path, of.shape, of.dtype, of.padded_bytes, of.reason) for of in sizes.fields if of.reason]
