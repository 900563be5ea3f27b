"""Padded <-> nested: `nest_batch_by_mask` builds jagged tensors from the survey of a batch, `unnest_batch_by_mask`
is its exact inverse."""

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
from maskpack.fields.options import OnLoss, Options, Registry, Verify
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import check_lengths, jagged
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks
from maskpack.nesting.schema import (
    INTACT,
    LAYOUTS,
    FieldForm,
    pad_table,
    read_layouts,
    read_pads,
    span_tables,
    write_layouts,
)
from maskpack.nesting.survey import survey


def nest_batch_by_mask(
    batch: TensorDictBase,
    registry: Registry = RL_FIELDS,
    *,
    pad_token_id: int | None = None,
    strict_mask_nesting: bool = False,
    ignore_dense_fields: Iterable[Key] = (),
    verify: Verify = "always",
    on_loss: OnLoss = "keep",
) -> TensorDict:
    """A new batch in which every padded field that the registry knows is jagged.

    Args:
        batch: fields [B, S, *F] (or with the width along another dim, as the registry says), jagged fields, dense
            fields, sub-TensorDicts and Python objects, in any mix. It is not changed. A batch that was nested before
            gets its new fields nested and its shared offsets restored.
        registry: mask and pad of each field; a MaskNestingRegistry or a dict of specs.
        pad_token_id: the tokenizer's pad id, for fields padded with PAD_TOKEN_ID.
        strict_mask_nesting: raise instead of leaving a field dense.
        ignore_dense_fields: fields (paths or last names) that stay dense and count as covered.
        verify: check that masked-out elements are the pad: `always`; only in the first batch with these fields that
            a `VerifyFirst` is given; or `never`, which trusts the registry.
        on_loss: what to do with a field that has other values under its mask: `keep` it dense and warn, raise an
            `error` (as `strict_mask_nesting` does), or `drop` those values.

    Returns:
        A TensorDict with the same keys in the same order and LAYOUTS behind them. Jagged fields are [B, j, *F] with
        min and max length set; all fields of one layout share one offsets tensor.

    Raises:
        CoverageError: strict_mask_nesting, and tensors of two or more dims, or inside Python objects, would stay dense.
        LossyPadError: values other than the pad under a mask, with strict_mask_nesting or on_loss="error".
        LayoutError: a field that fits none of its masks.
        RegistryError: a missing pad_token_id, or a pad that the field's dtype cannot hold.

    On CUDA: one synchronisation for each mask, one for all checks.
    """
    options = Options.of(
        "nest_batch_by_mask", registry, pad_token_id, strict_mask_nesting, ignore_dense_fields, verify, on_loss
    )
    found = survey(batch, options, {})
    moved: dict[tuple[str, torch.device], RowLayout] = {}

    def nested(form: FieldForm) -> Any:
        if form.node is not None:
            return rows_only(form.node)
        if form.layout is None:
            return found.entries[form.path]
        values = found.values[form.path].contiguous()
        need_gradients(values, f'field "{show(form.path)}"', options.call, nested=True)
        place = form.layout, values.device
        if place not in moved:
            moved[place] = found.layouts[form.layout].to(values.device)
        return jagged(values, moved[place])

    schema = found.schema()
    out = unflatten(rows_only(found.root), [(form.path, nested(form)) for form in found.forms], found.rows)
    tables = span_tables(found.layouts)
    where = next((table.device for table in tables.values()), found.root.device or "cpu")
    pads = pad_table(schema.forms, found.row_pads, found.rows, where)
    return out.set(LAYOUTS, write_layouts(schema, tables, pads, found.rows, found.root.device))


def unnest_batch_by_mask(batch: TensorDictBase, *fields: Key) -> TensorDict:
    """The padded batch behind a nested one: bit for bit the batch that was nested, with the rows it has now.

    Args:
        batch: what `nest_batch_by_mask` returned, also after indexing, chunk, split, cat of equal widths, casts,
            `to(device)`, pickle or consolidate. It is not changed.
        fields: the fields to restore; all if none is named.

    Returns:
        A TensorDict with the named fields (all: every entry but LAYOUTS) in their old order. A field that was cast
        comes back in its new dtype, with its pad cast alike.

    Raises:
        LayoutError: the batch lost its LAYOUTS entry, was put together from different widths, holds fields whose rows
            no longer fit their layout, or jagged fields that were added later; or a named field is not in it.

    On CUDA: one synchronisation.
    """
    call = "unnest_batch_by_mask"
    schema, layouts = read_layouts(batch, call)
    forms = {form.path: form for form in schema.forms}
    entries = select_entries([entry for entry in flatten(batch) if entry[0][0] != LAYOUTS], fields, call)
    nested = _nested_fields(entries, forms, layouts, call)

    def restored(path: Path, value: Any) -> Any:
        if path in nested:
            field, layout = nested[path]
            return checks.to_padded(field.values(), forms[path], layout, read_pads(batch, forms, path, call))
        if isinstance(value, Node):
            return _at_home(value, forms[path].node if path in forms else None)
        return value.values() if path in forms and forms[path].kind == "flat" else value

    return unflatten(
        _at_home(Node.of(batch), schema.root),
        [(path, restored(path, value)) for path, value in entries],
        rows_in(batch),
    )


unnest = unnest_batch_by_mask


def _nested_fields(
    entries: Iterable[tuple[Path, Any]], forms: Mapping[Path, FieldForm], layouts: Mapping[str, RowLayout], call: str
) -> dict[Path, tuple[Tensor, RowLayout]]:
    """The jagged fields that have a padded form, with their layouts; their row lengths are checked."""
    nested: dict[Path, tuple[Tensor, RowLayout]] = {}
    for path, value in entries:
        form = forms.get(path)
        if not (isinstance(value, Tensor) and value.is_nested):
            if form is not None and form.layout is not None and not isinstance(value, Tensor):
                raise LayoutError(f'{call}: field "{show(path)}" is no tensor any more; expected it jagged. {INTACT}')
            continue
        if form is None:
            raise LayoutError(
                f'{call}: field "{show(path)}" is jagged and was added after nesting; its padded form is not known. '
                "Nest the batch again, which gives new fields their layout, or name the fields to restore."
            )
        if form.kind == "padded" and form.layout is not None:
            need_gradients(value, f'field "{show(path)}"', call)
            nested[path] = value, layouts[form.layout]
    check_lengths({show(path): pair for path, pair in nested.items()}, call, INTACT)
    return nested


def rows_only(node: Node) -> Node:
    """A nested batch has its rows as its only batch dim: a jagged width cannot be one."""
    return replace(node, more_dims=None if node.more_dims is None else ())


def _at_home(now: Node, home: Node | None) -> Node:
    return now if home is None else replace(now, more_dims=home.more_dims)
