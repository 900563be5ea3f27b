"""Padded to nested and back: `nest_batch_by_mask`, and `unnest_batch_by_mask`, its exact inverse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.keys import Key, Path, show
from maskpack.core.tensors import need_gradients
from maskpack.core.tree import Node, flatten, rows_in, select_entries, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.options import Options, Registry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import Jagged, all_values, check_lengths, jagged_on, requires_grad
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.check import nbytes_of, need_none, off_axis, uncovered, warn_uncovered
from maskpack.nesting.nested import INTACT, layouts_entry, pads_of, read_nested, with_dims
from maskpack.nesting.read import Opened, Read, read
from maskpack.nesting.schema import LAYOUTS, FieldForm, jagged_dim
from maskpack.nesting.write import PackedField, write


def nest_batch_by_mask(
    batch: TensorDictBase,
    registry: Registry = RL_FIELDS,
    *,
    pad_token_id: int | None = None,
    strict_mask_nesting: bool = False,
    verify: bool = True,
) -> TensorDict:
    """Converts the padded fields of a batch to nested tensors (layout `torch.jagged`). The input is not changed.

    Args:
        batch: any mix of padded fields [B, S, *F] (the registry may name another dim for the width), jagged fields,
            other tensors, sub-TensorDicts and Python objects. In a batch that is nested already, new fields are nested
            and shared offsets are restored.
        registry: the mask and pad of each field: a MaskNestingRegistry or a dict of specs.
        pad_token_id: the tokenizer's pad id, for fields padded with PAD_TOKEN_ID.
        strict_mask_nesting: raise an error instead of letting a field stay padded, which no mask covers or which has
            non-pad values under its mask. Without it, such fields are named in a warning. A field that may stay padded
            is MaskNestingSpec(None) in the registry.
        verify: whether to check that masked-out elements equal the pad. Without it, each field has the first pad of its
            spec, whatever is under its mask.

    Returns:
        A TensorDict with the same keys in the same order, followed by LAYOUTS. Jagged fields are [B, j, *F] with min
        and max length set; the fields of a layout share one offsets tensor.

    Raises:
        CoverageError: in strict mode, a tensor of two or more dims, or one inside a Python object, would stay padded;
            or a jagged field or a field [T] has other rows than its mask in the batch.
        LossyPadError: in strict mode, non-pad values under a mask.
        LayoutError: a field does not match any of its masks.
        RegistryError: pad_token_id is missing, or the dtype of a field cannot hold its pad.

    On CUDA with Triton a kernel reads all padded fields once, packs them and checks their pads. One synchronisation for
    each mask, a second one if its rows have several spans, one for all checks, and one if some pads differ by row; none
    for checks if every pad is trusted.
    """
    options = Options.of("nest_batch_by_mask", registry, pad_token_id, strict_mask_nesting, verify).of_this_process()
    opened = Opened.of(batch, options)
    found, entries, rows = read(opened), opened.seen.entries, opened.rows
    schema, off = found.schema, off_axis(opened, found.layouts)
    if options.strict:
        need_none(options.call, uncovered(opened, schema.forms, off))
    fields = _jagged_fields(found, options.call)

    def nested(form: FieldForm) -> Any:
        return rows_only(form.node) if form.node is not None else fields.get(form.path, entries[form.path])

    out = unflatten(rows_only(schema.root), [(form.path, nested(form)) for form in schema.forms], rows)
    warn_uncovered(opened, schema.forms, off, lambda: nbytes_of({**entries, **found.values}.values()), 2)
    home = next((own.device for own in found.layouts.values()), torch.device(schema.root.device or "cpu"))
    flat = {path for path, values in found.values.items() if values.dim() == 1}
    return out.set(LAYOUTS, layouts_entry(schema, found.layouts, found.pads, flat, rows, home))


def _jagged_fields(found: Read, call: str) -> dict[Path, Tensor]:
    """The fields with a layout as jagged tensors."""
    fields: list[tuple[Path, str, int]] = []
    for form in found.schema.forms:
        if form.layout is not None:
            need_gradients(found.values[form.path], f'field "{show(form.path)}"', call, nested=True)
            fields.append((form.path, form.layout, jagged_dim(form)))
    known = {name: vars(layout)["offsets"] for name, layout in found.layouts.items() if "offsets" in vars(layout)}
    return jagged_on(found.layouts, fields, found.values, known)


def unnest_batch_by_mask(batch: TensorDictBase, *fields: Key) -> TensorDict:
    """Restores the padded batch from a nested batch, bit for bit. The input is not changed.

    Args:
        batch: the result of `nest_batch_by_mask`, possibly after indexing, chunk, split, cat of equal widths, casts,
            `to(device)`, pickle or consolidate.
        fields: the fields to restore; all if none is named.

    Returns:
        A TensorDict with the named fields (or all entries except LAYOUTS) in their original order. A field that was
        cast keeps its new dtype, and its pad is cast, too.

    Raises:
        LayoutError: the batch has no LAYOUTS entry, or has fields whose rows do not match their layout or jagged fields
            added after nesting; or a named field is not in the batch.

    On CUDA: one synchronisation.
    """
    call = "unnest_batch_by_mask"
    said = read_nested(batch, call)
    forms, layouts = said.forms, said.layouts
    entries = select_entries(flatten(batch, without=LAYOUTS), fields, call)
    nested = _nested_fields(entries, forms, layouts, call)
    values = all_values([field for field, _ in nested.values()])
    packed = [
        PackedField(held, pads_of(said, path, held, layout, call), layout, forms[path].ragged_dim)
        for held, (path, (_, layout)) in zip(values, nested.items(), strict=True)
    ]
    padded = dict(zip(nested, write(packed), strict=True))

    def restored(path: Path, value: Any) -> Any:
        if path in padded:
            return padded[path]
        if isinstance(value, Node):
            return with_dims(value, forms[path].node if path in forms else None)
        flat = path in forms and forms[path].kind == "flat" and isinstance(value, Tensor) and value.is_nested
        return value.values() if flat else value

    return unflatten(
        with_dims(Node.of(batch), said.root),
        [(path, restored(path, value)) for path, value in entries],
        rows_in(batch),
    )


def _nested_fields(
    entries: Iterable[tuple[Path, Any]], forms: Mapping[Path, FieldForm], layouts: Mapping[str, RowLayout], call: str
) -> dict[Path, tuple[Tensor, RowLayout]]:
    """The jagged fields that have a padded form, with their layouts. Raises LayoutError if their row lengths differ."""
    nested: dict[Path, tuple[Tensor, RowLayout]] = {}
    for path, value in entries:
        form = forms.get(path)
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or (Jagged.of(value) is None and not value.is_nested):
            if form is not None and form.layout is not None and not is_tensor:
                raise LayoutError(
                    f'{call}: field "{show(path)}" is no longer a tensor; expected a jagged tensor. {INTACT}'
                )
            continue
        if form is None:
            raise LayoutError(
                f'{call}: field "{show(path)}" is jagged and was added after nesting; its padded form is not known. '
                "Nest the batch again with a registry that has the field, which gives it a layout: "
                "unnest_batch_by_mask(nest_batch_by_mask(batch, registry)); or name the other fields, which are "
                "restored without it."
            )
        if form.kind == "padded" and form.layout is not None:
            nested[path] = value, layouts[form.layout]
    if requires_grad([field for field, _ in nested.values()]):
        for path, (field, _) in nested.items():
            need_gradients(field, f'field "{show(path)}"', call)
    check_lengths(nested, call, INTACT)
    return nested


def rows_only(node: Node) -> Node:
    """The root of a nested batch, whose rows are its only batch dim, because a jagged width cannot be one."""
    return replace(node, more_dims=None if node.more_dims is None else (), names=node.names and node.names[:1])
