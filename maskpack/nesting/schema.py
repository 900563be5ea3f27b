"""The schema of a batch: the form of each entry, its layouts and batch dims. It holds types; the pads and the masks of
rows are data, which lie beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, cast

import torch

from maskpack.core.keys import Path, show
from maskpack.core.tree import Node

LAYOUTS = "_maskpack"
"""The key of the entry that `unnest_batch_by_mask` needs. Name it in `select` to keep it."""


class _Hashed:
    """A frozen dataclass that computes its hash once."""

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        return tuple([getattr(self, part.name) for part in fields(cast("Any", self))])

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts


@dataclass(frozen=True)
class FieldForm(_Hashed):
    """The form of an entry of the padded batch.

    Attributes:
        path: the path of the entry.
        kind: `padded` [B, S, *F] under a layout, `flat` [T, *F] under a layout, `jagged` on its own layout, `dense` (a
            tensor that stays as it is), `object` (not a tensor) or `node` (a sub-TensorDict).
        layout: the name of the layout of the first three kinds.
        ragged_dim: the dim of the width of a padded field, or the ragged dim of a jagged one.
        dtype: the dtype of the field.
        node: batch dims and device of a sub-TensorDict.
        device, shape: of a packed field, the device it came from and the shape of an element, F; else None and ().
        hints: encodings to try first.
        reason: why a tensor stays padded; None if the registry says so.
        axis: the layout that a `dense` field would have if it had no non-pad values under its mask.
    """

    path: Path
    kind: Literal["padded", "flat", "jagged", "dense", "object", "node"]
    layout: str | None = None
    ragged_dim: int = 1
    dtype: torch.dtype | None = None
    node: Node | None = None
    device: str | None = None
    shape: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()
    reason: str | None = None
    axis: str | None = None

    __hash__ = _Hashed.__hash__  # which dataclass would replace


def jagged_dim(form: FieldForm) -> int:
    """The ragged dim of a field with a layout in a nested batch."""
    return form.ragged_dim if form.kind == "jagged" else 1


def name_of_jagged(path: Path) -> str:
    """The name of the layout that jagged fields share, after the first of them."""
    return f"{show(path)} (jagged)"


@dataclass(frozen=True)
class Schema(_Hashed):
    """The root of a batch, the forms of its entries in key order, and the name, width and anchor of each axis."""

    root: Node
    forms: tuple[FieldForm, ...]
    axes: tuple[tuple[str, int, int], ...]

    @cached_property
    def by_path(self) -> Mapping[Path, FieldForm]:
        return {form.path: form for form in self.forms}

    def dense_rows(self, rows: int) -> int:
        """The rows of tensors without a layout in a batch of `rows`: 1 if rows are no batch dim."""
        return 1 if self.root.more_dims is None else rows

    __hash__ = _Hashed.__hash__
