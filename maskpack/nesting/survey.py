"""The first step of nesting and packing: the form of each entry of a batch, its layout and its packed values.

    registry -> mask and pad of each field -> layouts -> values gathered -> pads verified -> coverage

The batch is not changed, and no result is built before all checks have passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, UnbatchedTensor
from torch import Tensor

from maskpack.core.bits import DTYPES, from_words, words
from maskpack.core.keys import Key, Path, path_of, show
from maskpack.core.latest import Latest
from maskpack.core.pads import ANY_ZERO, EDGE, PAD_TOKEN_ID, PER_ROW, SIGNED_ZERO, Pad, PadValue
from maskpack.core.tensors import need_batch
from maskpack.core.tree import Node, dense_stack, entry_at, flatten, has, is_object, number_at
from maskpack.errors import LayoutError, MaskpackWarning, RegistryError
from maskpack.fields.options import Options, Registry, registry_of
from maskpack.fields.registry import MaskNestingSpec
from maskpack.layout.jagged import check_lengths, is_regular, offsets_of, to_host
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting import checks
from maskpack.nesting.axes import Axes, Axis, Origins
from maskpack.nesting.coverage import DenseField, check_strict, hidden_tensors
from maskpack.nesting.schema import INTACT, LAYOUTS, FieldForm, RowPads, Schema, name_of_jagged, read_layouts, read_pads
from maskpack.nesting.signs import signs_of_rows
from maskpack.nesting.verify import Verifier
from maskpack.ops import pack_torch

_DIFFERENT_PADS = "its rows were nested with different pads"


@dataclass(frozen=True)
class Survey:
    """The result of inspecting a batch.

    Attributes:
        root, forms: the root and the forms of the padded batch.
        rows: B.
        entries: the entries of the batch, by path.
        layouts: the layouts of the forms and the axes, by name.
        axes: names of the layouts of padded fields, also of those that stay padded for non-pad values.
        values: packed values [T, *F] of padded, flat and jagged forms, except those in `deferred`.
        row_pads: the pads [B] of fields whose pad is PER_ROW, and the signs of those whose pad is ANY_ZERO.
        deferred: padded fields on the host that are still to be read, with the pads to try in their forms; and whether
            the first of these may be taken unseen.
        origins: where the layouts come from; None if the forms depend on the values in the batch.
    """

    root: Node
    forms: tuple[FieldForm, ...]
    rows: int
    entries: Mapping[Path, Any]
    layouts: Mapping[str, RowLayout]
    axes: tuple[str, ...]
    values: Mapping[Path, Tensor]
    row_pads: Mapping[Path, Tensor]
    deferred: Mapping[Path, bool]
    origins: Origins | None

    def schema(self) -> Schema:
        """The schema of the nested or packed batch."""
        axes = [(name, self.layouts[name].width, self.layouts[name].anchor) for name in self.axes]
        return Schema(self.root, self.forms, tuple(axes))


def survey(
    batch: TensorDictBase,
    options: Options,
    stand_in: Mapping[str, RowLayout],
    defer: bool = False,
    carried: tuple[Schema, dict[str, RowLayout]] | None = None,
) -> Survey:
    """Determines the form of each entry and gathers the values. `stand_in` are layouts for masks that are not in the
    batch. With `defer`, padded fields on the host are left to the caller, who reads and verifies them in one pass.
    `carried` is LAYOUTS, if it was read already."""
    need_batch(batch, options.call)
    batch = dense_stack(batch, options.call)
    schema, layouts = Schema(Node.of(batch), (), ()), dict[str, RowLayout]()
    if has(batch, LAYOUTS):
        schema, layouts = carried or read_layouts(batch, options.call)
    before = {form.path: form for form in schema.forms}
    planner = _Planner(batch, options, layouts, stand_in, before)
    entries = {path: value for path, value in flatten(batch) if path[0] != LAYOUTS}
    signature = None if schema.forms or stand_in else _signature(batch, entries, options)
    known = _known_forms.get(signature)
    if known is None:
        forms = [planner.form(path, value) for path, value in entries.items()]
        origins = planner.origins()
        if signature is not None and origins is not None and not origins.prefixes:
            _known_forms.keep(signature, tuple(forms))
    else:
        forms = planner.again(known)
    rows = planner.rows(forms)
    axes = tuple(dict.fromkeys(form.layout for form in forms if form.kind == "padded" and form.layout is not None))
    masks = planner.masks(forms)

    def gather(form: FieldForm) -> Tensor:
        held = masks.get(form.path)
        return planner.values(form, entries[form.path]) if held is None else held

    verifier = Verifier(entries, gather, planner.layouts, options, dict.fromkeys(masks, 0))
    deferred = verifier.deferred(forms) if defer else dict[Path, bool]()
    forms, row_pads = verifier.verified(forms, deferred)
    for place, form in enumerate(forms):
        pads = None if form.path in row_pads else read_pads(batch, before, form.path, options.call)
        if pads is not None and form.kind == "padded":
            values, layout = verifier.values[form.path], planner.layouts[form.layout or ""]
            forms[place], own = _with_one_rule(form, pads, values, layout)
            row_pads |= {} if own is None else {form.path: own}
            if forms[place].kind == "dense":
                entries[form.path] = checks.to_padded(verifier.values.pop(form.path), form, layout, pads)
    if options.strict or not defer:
        check_coverage(forms, entries, options, 4)
    origins = planner.origins()
    values = verifier.values
    return Survey(schema.root, tuple(forms), rows, entries, planner.layouts, axes, values, row_pads, deferred, origins)


_known_forms: Latest[tuple[FieldForm, ...]] = Latest()
"""The forms of batches of a signature, which depend on no value in them, because all axes come from masks."""


def _signature(batch: TensorDictBase, entries: Mapping[Path, Any], options: Options) -> tuple[Any, ...] | None:
    """All that the forms of a flat batch depend on; None for other batches."""
    parts: list[Any] = [batch.batch_size, batch.device, options.registry.told, options.pad_token_id, options.ignore]
    for path, value in entries.items():
        if type(value) is Tensor:
            if value.is_nested or value.layout is not torch.strided or value.is_meta:
                return None
            parts += (path, value.device, value.dtype, value.shape)
        elif is_object(value):
            parts += (path, number_at(batch, path))  # it may be the width of an axis
        else:
            return None
    return tuple(parts)


def _with_one_rule(
    form: FieldForm, pads: RowPads, values: Tensor, layout: RowLayout
) -> tuple[FieldForm, Tensor | None]:
    """The form of a field whose rows have different pads, and its pads [B] if they are PER_ROW, or its signs. If some
    rows have EDGE pads or signs and no rule fits all rows, the field stays padded."""
    own = pads.pads.to(values)
    dense = FieldForm(form.path, "dense", dtype=form.dtype, reason=_DIFFERENT_PADS, axis=form.layout)
    if pads.signs is not None and values.dtype.is_floating_point and bool(pads.signs.any()):
        by_edge = pads.edge is not None and bool(pads.edge.any())
        more = None if by_edge or values.dtype.itemsize == 1 else signs_of_rows(own, layout)
        return (dense, None) if more is None else (replace(form, pads=(ANY_ZERO,)), pads.signs | more)
    if pads.edge is None:
        return replace(form, pads=(PER_ROW,)), own
    parts = 2 if own.dtype.itemsize == 16 else 1
    bits = words(own).cpu().numpy().reshape(own.shape[0], parts)
    line = words(values).cpu().numpy().reshape(values.shape[0], values.shape[1:].numel(), parts)
    edges, single = checks.edge_pads(line, layout)
    rule = checks.one_rule(pads.edge.cpu().numpy(), bits, edges, single, layout.lengths == layout.width)
    if rule is EDGE:
        return replace(form, pads=(EDGE,)), None
    if rule is None or isinstance(rule, Pad):
        return dense, None
    return replace(form, pads=(PER_ROW,)), from_words(rule.reshape(words(own).shape), own.dtype).to(own.device)


@dataclass
class _Planner:
    """Determines the form of each entry of a batch and collects their layouts."""

    batch: Any
    options: Options
    carried: Mapping[str, RowLayout]
    stand_in: Mapping[str, RowLayout]
    before: Mapping[Path, FieldForm]
    layouts: dict[str, RowLayout] = field(default_factory=dict[str, RowLayout])
    _own: dict[int, str] = field(default_factory=dict[int, str])
    _jagged_layouts: dict[Path, RowLayout] = field(default_factory=dict[Path, RowLayout])
    _met: bool = False
    """Two layouts are equal in this batch, which may differ in the next."""

    def __post_init__(self) -> None:
        self._axes = Axes(self.batch, self.options.registry, self.carried, self.stand_in, self.options.call)

    def again(self, known: Sequence[FieldForm]) -> list[FieldForm]:
        """The forms of another batch of the same signature, whose layouts are looked up."""
        for form in known:
            spec = self.options.registry.find(form.path)
            if form.layout is not None and form.layout not in self.layouts and spec is not None:
                axes = self._candidates(form.path, spec)
                self._use(form.layout, next(axis.layout for axis in axes if axis.name == form.layout))
        return list(known)

    def form(self, path: Path, value: Any) -> FieldForm:
        if isinstance(value, Node):
            self._check_kind(path, value)
            before = self.before.get(path)
            return before if before is not None and before.kind == "node" else FieldForm(path, "node", node=value)
        if is_object(value):
            return FieldForm(path, "object")
        if not isinstance(value, Tensor) or isinstance(value, UnbatchedTensor):
            raise LayoutError(
                f'{self.options.call}: field "{show(path)}" is a {type(value).__name__}, whose rows are not known; '
                "expected a tensor [B, ...], a TensorDict, a tensorclass or a Python object. Keep it as "
                "NonTensorData(value), which holds for all rows."
            )
        spec = self.options.registry.find(path)
        if value.device.type == "meta":
            raise LayoutError(
                f'{self.options.call}: field "{show(path)}" is on the meta device, which holds no values; expected '
                "values. Load them, or leave the field out."
            )
        if value.dtype not in DTYPES.values():
            raise LayoutError(
                f'{self.options.call}: field "{show(path)}" is {value.dtype} on {value.device}, without plain bits; '
                "expected numbers in memory. Dequantize it, or leave it out."
            )
        return self._jagged(path, value, spec) if value.is_nested else self._dense(path, value, spec)

    def _check_kind(self, path: Path, node: Node) -> None:
        """Raises LayoutError for a tensorclass with values outside its TensorDict, from which it is rebuilt."""
        call, kind = self.options.call, node.kind
        if kind is not None and (issubclass(kind, UnbatchedTensor) or not is_dataclass(kind)):
            raise LayoutError(
                f'{call}: field "{show(path)}" is a {kind.__name__}, whose rows are not known; expected a tensorclass '
                "with fields. Keep it as NonTensorData(value), which holds for all rows."
            )
        batch = None if kind is None else entry_at(self.batch, path)
        outside = [] if kind is None else [own.name for own in fields(kind) if not has(batch, own.name)]
        odd = [name for name in outside if getattr(batch, name, None) is not None]
        if odd:
            raise LayoutError(
                f'{call}: tensorclass "{show(path)}" keeps {", ".join(odd)} outside its TensorDict; expected every '
                "field in it. Set these fields again, so that tensordict takes them over."
            )

    def rows(self, forms: Iterable[FieldForm]) -> int:
        """B, from the batch size, or from the layouts and sub-batches, which must agree, if there are no batch dims."""
        if self.batch.batch_dims:
            return self.batch.batch_size[0]
        counts = {f"layout {form.layout}": self.layouts[form.layout].num_rows for form in forms if form.layout}
        nodes = [(form.path, entry_at(self.batch, form.path)) for form in forms if form.kind == "node"]
        counts |= {f"batch {show(path)}": node.batch_size[0] for path, node in nodes if node.batch_dims}
        if len(set(counts.values())) > 1:
            raise LayoutError(
                f"{self.options.call}: a batch without batch dims has parts with different numbers of rows: {counts}; "
                "expected one. Give the TensorDict a batch_size, or split it."
            )
        return next(iter(counts.values()), 0)

    def masks(self, forms: Iterable[FieldForm]) -> dict[Path, Tensor]:
        """The packed values [T] of the masks whose scan found one value."""
        found: dict[Path, Tensor] = {}
        for form in forms:
            if form.kind == "padded" and form.layout is not None and form.pads[0] == 0:
                layout = self.layouts[form.layout]
                value = self._axes.value_of(form.path, layout)
                if value is not None:
                    found[form.path] = value.expand(layout.num_tokens)
        return found

    def origins(self) -> Origins | None:
        found = None if self._met else self._axes.origins()
        return found and replace(found, jagged=self._jagged_layouts)

    def values(self, form: FieldForm, value: Tensor) -> Tensor:
        """The packed values [T, *F] of a field."""
        assert form.layout is not None
        layout = self.layouts[form.layout]
        if value.is_nested:
            values = value.values()
            if values.shape[0] < layout.num_tokens:
                raise LayoutError(
                    f'{self.options.call}: field "{show(form.path)}" is jagged, of {values.shape[0]} values; its '
                    f"offsets end at {layout.num_tokens}; expected offsets that end there. Build it anew from its rows."
                )
            return values
        if form.kind == "flat":
            return value
        if value.device != layout.device:
            layout = layout.to(value.device)
        return pack_torch.pack(value.movedim(form.ragged_dim, 1), layout)

    # ---------------------------------------------------------------- tensors

    def _dense(self, path: Path, value: Tensor, spec: MaskNestingSpec | None) -> FieldForm:
        dense = FieldForm(path, "dense", dtype=value.dtype)
        if value.is_sparse or value.layout != torch.strided:
            return replace(dense, reason=f"its memory layout is {value.layout}")
        ignored = path in self.options.ignore or path[-1:] in self.options.ignore
        if ignored or (spec is not None and spec.mask is None):
            return dense
        if spec is None:
            return dense if value.dim() <= 1 else replace(dense, reason="the registry does not know it")
        axes = self._candidates(path, spec)
        for axis in axes:
            if axis.flat and value.dim() >= 1 and value.shape[0] == axis.layout.num_tokens:
                return FieldForm(path, "flat", self._use(axis.name, axis.layout), dtype=value.dtype)
            dim = spec.dim_of(value)
            shape = (axis.layout.num_rows, axis.layout.width)
            if not axis.flat and 1 <= dim < value.dim() and (value.shape[0], value.shape[dim]) == shape:
                pads = self._pads(path, spec, value)
                layout = self._use(axis.name, axis.layout)
                return FieldForm(path, "padded", layout, pads, dim, value.dtype, hints=spec.hints)
        if value.dim() <= 1:
            return dense
        if not axes:
            registry = self.options.registry
            names = " or ".join(f'"{show(mask)}"' for mask in spec.masks)
            sources = ", ".join(dict.fromkeys(show(way.source) for mask in spec.masks for way in registry.ways(mask)))
            known = ", ".join(registry.axes) or "none"
            reason = (
                f"nothing in the batch gives its mask {names}, computed from {sources} (axes of the registry: {known})"
            )
            return replace(dense, reason=reason)
        if not 1 <= spec.dim_of(value) < value.dim():
            raise LayoutError(
                f'{self.options.call}: field "{show(path)}" is {tuple(value.shape)} and its ragged_dim '
                f"{spec.ragged_dim}; expected a dim after the rows, below {value.dim()}. Give the dim of the "
                "width."
            )
        raise LayoutError(
            f'{self.options.call}: field "{show(path)}" is {tuple(value.shape)}; '
            f"{'; '.join(map(str, axes))}. Fix the producer, or give the field another mask in the registry."
        )

    def _jagged(self, path: Path, value: Tensor, spec: MaskNestingSpec | None) -> FieldForm:
        """A field that is already nested keeps its form. A new field of a nested batch gets the layout of its spec.
        Other jagged fields have no padded form."""
        if not is_regular(value):
            raise LayoutError(
                f'{self.options.call}: field "{show(path)}" is a nested tensor with gaps, another ragged dim or the '
                "strided layout; expected torch.jagged with its ragged dim 1, contiguous. Rebuild it with "
                "torch.nested.nested_tensor(rows, layout=torch.jagged)."
            )
        before = self.before.get(path)
        if before is not None and before.layout is not None:
            return self._again(path, value, before)
        if spec is not None and (self.carried or self.stand_in):
            self._met = True  # it has the offsets of an axis or not, whatever it is called
            offsets = to_host([offsets_of(value)])[0]
            fitting = [
                axis
                for axis in self._candidates(path, spec)
                if not axis.flat and np.array_equal(offsets, axis.layout.row_offsets)
            ]
            fitting.sort(
                key=lambda axis: axis.layout.offsets is not offsets_of(value)
            )  # equal lengths may be a coincidence
            if fitting:
                of_rows = PER_ROW, SIGNED_ZERO, ANY_ZERO
                pads = [pad for pad in self._pads(path, spec, value) if pad not in of_rows]
                layout, pad = self._use(fitting[0].name, fitting[0].layout), pads[0] if pads else 0
                return FieldForm(path, "padded", layout, (pad,), spec.dim_of(value), value.dtype, hints=spec.hints)
        hints = () if spec is None else spec.hints
        return FieldForm(path, "jagged", self._own_layout(path, value), dtype=value.dtype, hints=hints)

    def _again(self, path: Path, value: Tensor, before: FieldForm) -> FieldForm:
        """The form of a field that is already nested, in its current dtype."""
        if before.kind == "padded":
            assert before.layout is not None
            self.layouts[before.layout] = layout = self.carried[before.layout]
            check_lengths({show(path): (value, layout)}, self.options.call, INTACT)
            pads = before.pads if PER_ROW in before.pads else (checks.cast_pad(before, value.dtype),)
            return replace(before, pads=pads, dtype=value.dtype)
        return replace(before, layout=self._own_layout(path, value), dtype=value.dtype)

    def _own_layout(self, path: Path, value: Tensor) -> str:
        """The layout of a jagged field. Fields with the same offsets share one, named after the first of them."""
        offsets = offsets_of(value)
        if id(offsets) not in self._own:
            layout = self._jagged_layouts[path] = RowLayout.from_cu_seqlens(offsets)
            self._own[id(offsets)] = self._use(name_of_jagged(path), layout)
        return self._own[id(offsets)]

    def _candidates(self, path: Path, spec: MaskNestingSpec) -> list[Axis]:
        return [axis for mask in spec.masks if (axis := self._axes.find(mask, path)) is not None]

    def _use(self, name: str, layout: RowLayout) -> str:
        known = self.layouts.setdefault(name, layout)
        if known is not layout and known != layout:
            raise RegistryError(
                f'{self.options.call}: two masks of the batch are both called "{name}", an axis and a field; expected '
                "one. Give the axis another name in the registry."
            )
        self._met |= known is not layout
        return name

    def _pads(self, path: Path, spec: MaskNestingSpec, value: Tensor) -> tuple[PadValue, ...]:
        call, token = self.options.call, self.options.pad_token_id
        if PAD_TOKEN_ID in spec.pads and token is None:
            raise RegistryError(
                f'{call}: field "{show(path)}" is padded with PAD_TOKEN_ID, and no pad_token_id was given. '
                "Pass pad_token_id=tokenizer.pad_token_id."
            )
        pads = [token if pad is PAD_TOKEN_ID and token is not None else pad for pad in spec.pads]
        if value.dim() > 2 or not value.is_floating_point() or value.dtype.itemsize == 1:  # ANY_ZERO is SIGNED_ZERO
            known = SIGNED_ZERO in pads
            pads = [SIGNED_ZERO if pad is ANY_ZERO else pad for pad in pads if not (known and pad is ANY_ZERO)]
        return checks.held_pads(show(path), pads, value.dtype, call)


# -------------------------------------------------------------------- exactness and coverage


def check_coverage(forms: Iterable[FieldForm], entries: Mapping[Path, Any], options: Options, level: int) -> None:
    """Raises CoverageError in strict mode for fields that stay padded; else warns, as `level` frames above."""
    if options.strict:
        dense = [DenseField.of(form.path, entries[form.path], form.reason) for form in forms if form.reason]
        objects = {form.path: entries[form.path] for form in forms if form.kind == "object"}
        check_strict(options.call, [*dense, *hidden(objects, options)])
    else:
        warn_dense(forms, options.call, level + 1)


def warn_dense(forms: Iterable[FieldForm], call: str, level: int) -> None:
    """Warns of the fields that stay padded, as `level` frames above."""
    # without sizes, so that Python shows the warning once for batches of all widths
    fields = "; ".join(f'"{show(form.path)}": {form.reason}' for form in forms if form.reason)
    if fields:
        warnings.warn(f"{call}: fields stay padded: {fields}", MaskpackWarning, stacklevel=level)


def hidden(objects: Mapping[Path, Any], options: Options) -> list[DenseField]:
    """The tensors inside the Python objects that are not declared without a mask or ignored."""
    found: list[DenseField] = []
    for path, value in objects.items():
        spec = options.registry.find(path)
        ignored = path in options.ignore or path[-1:] in options.ignore
        if not ignored and not (spec is not None and spec.mask is None):
            found += hidden_tensors(path, value)
    return found


def dense_fields(
    batch: TensorDictBase,
    registry: Registry,
    *,
    pad_token_id: int | None = None,
    ignore_dense_fields: Iterable[Key] = (),
) -> tuple[DenseField, ...]:
    """Lists the tensors of a batch that would stay padded, as DenseFields.

    These are tensors that the registry does not know, that have no mask in the batch, or that have non-pad values under
    their mask; then one DenseField for each Python object with tensors inside. Tensors of at most one dim, and fields
    declared without a mask or ignored, are left out.

    Raises LayoutError and RegistryError as `nest_batch_by_mask` does.
    """
    options = Options.of("dense_fields", registry, pad_token_id, False, ignore_dense_fields, "always", "keep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)
        found = survey(batch, options, {})
    dense = [DenseField.of(form.path, found.entries[form.path], form.reason) for form in found.forms if form.reason]
    objects = {form.path: found.entries[form.path] for form in found.forms if form.kind == "object"}
    return (*dense, *hidden(objects, options))


def has_masks(batch: TensorDictBase, registry: Registry) -> bool:
    """Whether a batch has LAYOUTS or a field from which a layout is computed. A `prefix` axis does not count, because
    the layout of another batch is preferred to it."""
    known = registry_of(registry, "has_masks")
    masks = {mask for spec in known.values() for mask in spec.masks}
    sources = {path_of(way.source) for mask in masks for way in known.ways(mask) if way.part != "prefix"}
    return has(batch, LAYOUTS) or any(
        path[-len(source) :] == source for path, _ in flatten(batch) for source in sources
    )
