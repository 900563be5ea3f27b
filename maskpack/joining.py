"""Several packed batches as one, apart from their encoded values: forms, layouts and Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskpack.errors import LayoutError
from maskpack.layout import RowLayout
from maskpack.registry import EDGE, PER_ROW
from maskpack.schema import FieldForm
from maskpack.tree import Objects


def joined_form(column: Sequence[FieldForm]) -> FieldForm:
    """One form for the parts' forms. Constant pads that differ become one pad a row; other differences make the field
    dense."""
    form = column[0]
    if any((f.kind, f.layout, f.ragged_dim) != (form.kind, form.layout, form.ragged_dim) for f in column):
        return FieldForm(form.path, "dense", dtype=form.dtype, device=form.device, reason="its batches hold it apart")
    if all(f.pads_by_bits == form.pads_by_bits for f in column):
        return form
    if any(f.pads == (EDGE,) for f in column):
        return FieldForm(form.path, "dense", dtype=form.dtype, device=form.device, reason="its pads differ")
    return replace(form, pads=(PER_ROW,))


def join_layouts(name: str, layouts: Sequence[RowLayout]) -> RowLayout:
    if name.endswith("(jagged)"):
        widest = max(layout.width for layout in layouts)
        layouts = [RowLayout.from_lengths(layout.lengths, widest) for layout in layouts]
    widths = [layout.width for layout in layouts]
    if len(set(widths)) > 1:
        raise LayoutError(
            f'PackedBatch.cat: layout "{name}" is {widths} wide; expected one width. Pad the batches to one width '
            "before packing."
        )
    return RowLayout.cat(layouts)


def join_objects(parts: Sequence[Objects], rows: Sequence[int]) -> Objects:
    if all(part.depth for part in parts):
        return Objects([item for part in parts for item in part.data], parts[0].depth)
    if not any(part.depth for part in parts) and all(_equal(part.data, parts[0].data) for part in parts):
        return parts[0]
    spread = [part.data if part.depth else [part.data] * count for part, count in zip(parts, rows, strict=True)]
    return Objects([item for data in spread for item in data], 1)


def _equal(a: Any, b: Any) -> bool:
    """Equality of batch-wide objects that may be arrays or tensors."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    same = a == b
    return bool(same.all()) and a.shape == b.shape if isinstance(same, np.ndarray) else bool(same)
