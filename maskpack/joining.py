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
from maskpack.words import words


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
    """Whether two batch-wide objects are the same to the bit; what cannot be told counts as different."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    x, y = a, b
    if isinstance(a, Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and not x.is_nested and torch.equal(words(x), words(y))
    if isinstance(a, np.ndarray):
        alike: bool = x.dtype == y.dtype and x.shape == y.shape
        return alike and (_equal(x.tolist(), y.tolist()) if x.dtype == object else x.tobytes() == y.tobytes())
    if isinstance(a, dict):
        return list(x) == list(y) and all(_equal(x[key], y[key]) for key in x)
    if isinstance(a, list | tuple):
        return len(x) == len(y) and all(map(_equal, x, y))
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return isinstance(a, int | str | bytes) and a == b
