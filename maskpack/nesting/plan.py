"""BatchPlan: the form of each entry of a batch, and where its layouts come from.

    signature: names, dtypes, shapes, strides, registry, options --> registry: mask and pads of each field --> BatchPlan

No value in the batch is read, so that one plan holds for all batches of a signature. Only lengths, cu_seqlens and
jagged fields that are compared with axes need values; their batches are planned anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, UnbatchedTensor
from torch import Tensor

from maskpack.core.bits import DTYPES
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.core.latest import Latest
from maskpack.core.pads import ANY_ZERO, PAD_TOKEN_ID, PER_ROW, SIGNED_ZERO, Pads, PadValue, holds
from maskpack.core.tree import Node, entry_at, fields_of, has, is_object, is_sub_batch, names_of, number_at
from maskpack.errors import LayoutError, RegistryError
from maskpack.fields.options import Options
from maskpack.fields.registry import MaskNestingSpec
from maskpack.layout.jagged import GAPS, Jagged, alike_in, to_host
from maskpack.layout.row_layout import RowLayout, shared_offsets
from maskpack.nesting.axes import Axes, Axis, Source
from maskpack.nesting.jobs import HostJobs, is_away
from maskpack.nesting.nested import NOTHING, Nested, pads_of, with_dims
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema, name_of_jagged

# -------------------------------------------------------------------- signatures


class Seen(NamedTuple):
    """A batch with all that a plan depends on.

    Attributes:
        signature: None if batches like this one are planned anew.
        rows: B, 0 if the rows are no batch dim.
        entries: all but LAYOUTS in key order; sub-batches are Nodes.
        tensors: of each entry, the strided tensor as it lies in memory, or the values [T, *F] of the jagged tensor;
            None for others.
        offsets: those of the jagged tensors, each once, [B + 1].
        limits: the least number of values of a field with these offsets.
        jagged: the number of the offsets of each jagged field. Fields of which the offsets are equal have one.
        bounds: the offsets on the host, if they were compared.
    """

    signature: tuple[Any, ...] | None
    rows: int
    entries: dict[Path, Any]
    tensors: list[Tensor | None]
    offsets: list[Tensor]
    limits: list[int]
    jagged: dict[Path, int]
    bounds: Sequence[IntArray] = ()


def seen_of(batch: TensorDictBase, options: Options, carried: Nested, stand_in: Mapping[str, RowLayout]) -> Seen:
    """`carried` is what LAYOUTS says, `stand_in` are the layouts of another batch with the same rows."""
    rows = batch.batch_size[0] if batch.batch_size else 0
    found = Seen(None, rows, {}, [], [], [], {})
    given, of_call = carried.layouts or stand_in, (options.pad_token_id, options.strict, options.verify)
    parts: list[Any] = [rows.bit_length(), options.registry.told, *of_call, carried.keys]
    numbers = {id(layout): number for number, layout in enumerate(given.values())}
    for name, layout in given.items():
        whole, low = layout.__dict__.get("part_of", (None, 0))
        parts += (name, layout.width, layout.anchor, layout.device, numbers.get(id(whole)), low)
    usual = _add(found, parts, batch, ()) and type(batch) is TensorDict and rows and not (carried.layouts and stand_in)
    usual = usual and all(layout.num_rows == rows for layout in given.values())
    if len(found.offsets) > 1 and not given:  # as verl has them: each field with its own
        found = found._replace(bounds=to_host(found.offsets))
        first: dict[bytes, int] = {}
        same = [first.setdefault(line.tobytes(), number) for number, line in enumerate(found.bounds)]
        least = [min(found.limits[at] for at, own in enumerate(same) if own == number) for number in same]
        jagged = {path: same[number] for path, number in found.jagged.items()}
        found, parts = found._replace(limits=least, jagged=jagged), [*parts, tuple(same)]
    return found._replace(signature=tuple(parts)) if usual else found


def _add(found: Seen, parts: list[Any], batch: Any, path: Path) -> bool:
    """Adds the entries of a batch; false if it is planned anew."""
    parts += (batch.batch_size[1:], batch.device, names_of(batch))
    usual = True
    for name, value in batch.items():
        own, x = (*path, name), None
        if isinstance(value, Tensor):
            x, number = value, None
            if type(value) is not Tensor and (rows := Jagged.of(value)) is not None:
                x, number = rows.values, _number_of(found, parts, rows.offsets)
                found.jagged[own] = number
                found.limits[number] = min(found.limits[number], x.shape[0])
                if rows.dim != 1:
                    parts.append(rows.dim)
                    x = x.contiguous()
            is_plain = type(x) is Tensor and not x.is_nested and x.layout is torch.strided
            if not is_plain or x.is_neg() or x.is_conj():
                usual = False
                x = None if x.is_nested or x.layout != torch.strided else x.detach().resolve_neg().resolve_conj()
            if x is not None:  # strides do not tell whether fewer than two elements lie together
                parts += (name, x.dtype, x.shape[1:], x.stride(), x.is_contiguous(), x.device, number)
        elif is_object(value):
            parts += (name, number_at(batch, (name,)))  # it may be the width of an axis
        elif name == LAYOUTS and not path:
            continue
        elif is_sub_batch(value):
            usual &= type(value) is TensorDict and value.batch_size[:1] == batch.batch_size[:1]
            inside: Any = fields_of(value)
            parts += (name, len(inside.keys()))
            found.entries[own] = Node.of(value)
            found.tensors.append(None)
            usual &= _add(found, parts, inside, own)
            continue
        else:
            usual = False
        found.entries[own] = value
        found.tensors.append(x)
    return usual


def _number_of(found: Seen, parts: list[Any], offsets: Tensor) -> int:
    """The number of offsets among those of a batch, to whose signature they are added."""
    for number, own in enumerate(found.offsets):
        if own is offsets:
            return number
    found.offsets.append(offsets)
    parts += (offsets.dtype, offsets.is_contiguous(), offsets.device)
    found.limits.append(1 << 62)
    return len(found.offsets) - 1


# -------------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """What the batches of one signature are.

    Attributes:
        root, forms: the root and the forms of the padded batch.
        pads: what may be under the masks of its padded fields, in order; of nested ones that have none, what is.
        rows: B of the batch that was planned.
        sources: where the layouts of the forms come from, by their names.
        anchors: of these layouts.
        widths: of these layouts, but for those of jagged fields.
        declared: of the jagged fields and the fields of one dim that the registry puts on axes of the batch, the names
            and sources of the layouts of which one should be theirs.
        by_value: whether it holds for this batch alone.
        counted: the layouts that lengths and cu_seqlens of this batch tell.
        host: what the core is told of such a batch; None if some of its tensors are on a device, or sparse.
    """

    root: Node
    forms: tuple[FieldForm, ...]
    pads: Mapping[Path, tuple[PadValue, ...]]
    rows: int
    sources: Mapping[str, Source]
    anchors: Mapping[str, int]
    widths: Mapping[str, int]
    declared: Mapping[Path, Mapping[str, Source]]
    by_value: bool
    counted: Mapping[str, RowLayout]
    host: HostJobs | None = None

    @classmethod
    def of(
        cls, batch: TensorDictBase, options: Options, carried: Nested, stand_in: Mapping[str, RowLayout], seen: Seen
    ) -> BatchPlan:
        """Raises LayoutError and RegistryError for what the registry does not allow."""
        planner = _Planner(batch, options, carried, stand_in, seen)
        forms = [planner.form(*entry) for entry in seen.entries.items()]
        for at, (form, x) in enumerate(zip(forms, seen.tensors, strict=True)):
            if x is not None:
                shape = x.shape[1 if form.layout is not None or batch.batch_dims else 0 :]
                if form.kind == "padded" and form.path not in seen.jagged:
                    shape = x.movedim(form.ragged_dim, 1).shape[2:]
                forms[at] = replace(form, device=str(x.device), shape=tuple(shape))
        axes, sources, widths = planner.axes, planner.sources, planner.widths
        anchors = {name: axes.anchor_of(source, widths.get(name, 0)) for name, source in sources.items()}
        root = with_dims(Node.of(batch), None if carried is NOTHING else carried.root)
        by_value = planner.by_value or axes.by_value
        rows, declared = planner.rows(forms), planner.declared(forms)
        by_counts = {name for name, source in sources.items() if source.way in ("lengths", "cu_seqlens")}
        counted = {name: axes.layout_of(sources[name]) for name in by_counts}
        plan = cls(root, tuple(forms), planner.pads, rows, sources, anchors, widths, declared, by_value, counted)
        given = plan.given(carried, stand_in)
        held = [*(x for x in (*seen.tensors, *seen.offsets) if x is not None), *given.values()]
        if any(is_away(x) for x in held) or any(
            x is None and form.dtype is not None for form, x in zip(forms, seen.tensors, strict=True)
        ):
            return plan
        return replace(plan, host=HostJobs.of(plan, seen, given, options.verify, not options.strict))

    def given(self, carried: Nested, stand_in: Mapping[str, RowLayout]) -> dict[str, RowLayout]:
        """The layouts of a batch that are known."""
        return {**stand_in, **carried.layouts, **self.counted}

    @cached_property
    def schema(self) -> Schema:
        """The schema of the nested or packed batch. Its axes are those of all padded fields, also of those that stay
        padded for their values."""
        names = dict.fromkeys(form.layout for form in self.forms if form.kind == "padded" and form.layout is not None)
        axes = [(name, self.widths[name], self.anchors[name]) for name in names]
        return Schema(self.root, self.forms, tuple(axes))

    def pads_of(self, form: FieldForm, values: Tensor, nested: Nested, call: str) -> Pads:
        """What is under the mask of a nested field with these values, in their dtype."""
        dtype, path = values.dtype, form.path
        pads = pads_of(nested, path, values, None, call) if path in nested.pads else Pads.of(self.pads[path][0], dtype)
        if dtype.is_complex and pads.signs is not None:
            raise LayoutError(
                f'{call}: field "{show(form.path)}" is {dtype}, and was nested as floats with 0.0 and -0.0 '
                "under its mask; expected one of them. Restore it before the cast: unnest_batch_by_mask."
            )
        return pads


plans: Latest[BatchPlan] = Latest()
"""The plans of the latest signatures."""


def plan_of(
    batch: TensorDictBase, options: Options, carried: Nested, stand_in: Mapping[str, RowLayout], seen: Seen
) -> BatchPlan:
    """The plan of a batch that was `seen`."""
    known = plans.get(seen.signature)
    if known is not None:
        return known
    plan = BatchPlan.of(batch, options, carried, stand_in, seen)
    return plan if seen.signature is None or plan.by_value else plans.keep(seen.signature, plan)


@dataclass
class _Planner:
    """Determines the form of each entry of a batch and collects their layouts."""

    batch: Any
    options: Options
    carried: Nested
    stand_in: Mapping[str, RowLayout]
    seen: Seen
    sources: dict[str, Source] = field(default_factory=dict[str, Source])
    widths: dict[str, int] = field(default_factory=dict[str, int])
    pads: dict[Path, tuple[PadValue, ...]] = field(default_factory=dict[Path, tuple[PadValue, ...]])
    by_value: bool = False
    _rows: dict[str, int] = field(default_factory=dict[str, int])
    _own: dict[int, str] = field(default_factory=dict[int, str])
    _lines: dict[Path, list[Axis]] = field(default_factory=dict[Path, list[Axis]])
    """The axes of fields of one dim that have other tokens."""

    def __post_init__(self) -> None:
        registry, call = self.options.registry, self.options.call
        self.axes = Axes(self.batch, registry, self.carried.layouts, self.stand_in, call)

    def form(self, path: Path, value: Any) -> FieldForm:
        if isinstance(value, Node):
            self._check_kind(path, value)
            before = self.carried.forms.get(path)
            return FieldForm(path, "node", node=with_dims(value, None if before is None else before.node))
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
        counts = {f"layout {form.layout}": self._rows[form.layout] for form in forms if form.layout}
        nodes = [(form.path, entry_at(self.batch, form.path)) for form in forms if form.kind == "node"]
        counts |= {f"batch {show(path)}": node.batch_size[0] for path, node in nodes if node.batch_dims}
        if len(set(counts.values())) > 1:
            raise LayoutError(
                f"{self.options.call}: a batch without batch dims has parts with different numbers of rows: {counts}; "
                "expected one. Give the TensorDict a batch_size, or split it."
            )
        return next(iter(counts.values()), 0)

    def declared(self, forms: Iterable[FieldForm]) -> dict[Path, dict[str, Source]]:
        """`declared` of the plan."""
        looked = replace(self.axes, _found={})  # those of values are not looked up for the plan
        out = {path: {axis.name: axis.source for axis in axes} for path, axes in self._lines.items()}
        for form in [form for form in forms if form.kind == "jagged"]:
            spec = self.options.registry.find(form.path)
            axes = [looked.find(mask, form.path) for mask in (() if spec is None else spec.masks)]
            # beside a mask of rows without padding a field has these rows, whatever is 0 in the mask
            found = {axis.name: looked.rows_of(axis.source) for axis in axes if axis is not None}
            out |= {form.path: found} if found else {}
        return out

    # ---------------------------------------------------------------- tensors

    def _dense(self, path: Path, value: Tensor, spec: MaskNestingSpec | None) -> FieldForm:
        dense = FieldForm(path, "dense", dtype=value.dtype)
        if value.layout != torch.strided:
            return replace(dense, reason=f"its memory layout is {value.layout}")
        if spec is None:
            return dense if value.dim() <= 1 else replace(dense, reason="the registry does not know it")
        if spec.mask is None:
            return dense
        axes: list[Axis] = []
        ragged: list[str] = []
        for axis in self._candidates(path, spec):
            if axis.width < 0:
                ragged.append(axis.name)
                continue
            if axis.tokens is not None and value.shape[:2] == (1, axis.tokens):
                return replace(dense, reason="it is one row of tokens, without padding")
            axes.append(axis)
            is_flat = axis.tokens is not None and not self.batch.batch_dims
            if is_flat and value.dim() >= 1 and value.shape[0] == axis.tokens:
                return FieldForm(path, "flat", self._use(axis), dtype=value.dtype)
            dim, shape = spec.dim_of(value), (axis.rows, axis.width)
            if axis.tokens is None and 1 <= dim < value.dim() and (value.shape[0], value.shape[dim]) == shape:
                self.pads[path] = self._pads(path, spec, value)
                return FieldForm(path, "padded", self._use(axis), dim, value.dtype, hints=spec.hints)
        if value.dim() <= 1:
            if value.dim() and axes and all(value.shape[0] != axis.rows for axis in axes):
                self._lines[path] = axes
            return dense
        if not axes and ragged:
            return replace(dense, reason=f'the rows of its mask "{ragged[0]}" are jagged, without a padded width')
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
        error = LayoutError(
            f'{self.options.call}: field "{show(path)}" is {tuple(value.shape)}; '
            f"{'; '.join(map(str, axes))}. Fix the producer, or give the field another mask in the registry."
        )
        error.path = path
        raise error

    def _jagged(self, path: Path, value: Tensor, spec: MaskNestingSpec | None) -> FieldForm:
        """A field that is already nested keeps its form. A new field of a nested batch gets the layout of its spec.
        Other jagged fields have no padded form."""
        own = Jagged.of(value)
        if own is None:
            raise LayoutError(f'{self.options.call}: field "{show(path)}" {GAPS}')
        before = self.carried.forms.get(path)
        if before is not None and before.layout is not None:
            padded = before.kind == "padded"
            layout = self._use_given(before) if padded else self._own_layout(path)
            return replace(before, layout=layout, dtype=value.dtype, hints=() if spec is None else spec.hints)
        if spec is not None and (self.carried.layouts or self.stand_in):
            self.by_value = True  # it has the offsets of an axis or not, whatever it is called
            offsets = to_host([own.offsets])[0]
            fitting = [
                axis
                for axis in self._candidates(path, spec)
                if axis.tokens is None and axis.width >= 0 and np.array_equal(offsets, axis.layout.row_offsets)
            ]
            if len(fitting) > 1:  # equal lengths may be a coincidence
                fitting.sort(key=partial(self._is_apart, own.offsets))
            if fitting and own.dim == 1:
                of_rows = PER_ROW, SIGNED_ZERO, ANY_ZERO
                pads = [pad for pad in self._pads(path, spec, value) if pad not in of_rows]
                self.pads[path] = (pads[0] if pads else 0,)
                layout, dim = self._use(fitting[0]), spec.dim_of(value)
                return FieldForm(path, "padded", layout, dim, value.dtype, hints=spec.hints)
        axis = None if spec is None else next(filter(partial(self._is_of, path), self._candidates(path, spec)), None)
        layout = self._own_layout(path) if axis is None else self._use(axis)
        return FieldForm(path, "jagged", layout, own.dim, value.dtype, hints=() if spec is None else spec.hints)

    def _is_apart(self, offsets: Tensor, axis: Axis) -> bool:
        """Whether offsets are not the ones of an axis in this process: its own, or those that decoding gives it."""
        alike = alike_in({**self.stand_in, **self.carried.layouts}).get(axis.name, 0)
        shared = shared_offsets(axis.layout.row_offsets, offsets.device, alike=alike)
        return offsets is not shared and offsets is not vars(axis.layout).get("offsets")

    def _is_of(self, path: Path, axis: Axis) -> bool:
        """Whether an axis is the rows of jagged fields, or lengths, which a jagged field has."""
        way, key = axis.source[:2]
        if way == "jagged":
            return self.seen.jagged[key] == self.seen.jagged[path]
        if way not in ("lengths", "cu_seqlens"):
            return False
        offsets = to_host([self.seen.offsets[self.seen.jagged[path]]])[0]
        return np.array_equal(offsets, axis.layout.row_offsets)

    def _own_layout(self, path: Path) -> str:
        """The layout of a jagged field. Fields with equal offsets share one, named after the first of them."""
        number = self.seen.jagged[path]
        if number not in self._own:
            name = self._own[number] = name_of_jagged(path)
            self.sources[name], self._rows[name] = Source("jagged", path), self.seen.offsets[number].shape[0] - 1
        return self._own[number]

    def _candidates(self, path: Path, spec: MaskNestingSpec) -> Iterator[Axis]:
        """The axes of its masks, in order, each looked up when the ones before it did not match."""
        return (axis for mask in spec.masks if (axis := self.axes.find(mask, path)) is not None)

    def _use(self, axis: Axis) -> str:
        name = axis.name
        known = self.sources.setdefault(name, axis.source)
        if known != axis.source:
            self.by_value = True
            if self.axes.layout_of(known) != axis.layout:
                raise RegistryError(
                    f'{self.options.call}: two masks of the batch are both called "{name}", an axis and a field; '
                    "expected one. Give the axis another name in the registry."
                )
        self._rows[name] = axis.rows
        if axis.width >= 0:
            self.widths[name] = axis.width
        return name

    def _use_given(self, before: FieldForm) -> str:
        """The layout of a field that was nested."""
        layout = self.carried.layouts[before.layout or ""]
        source = Source("given", before.layout)
        return self._use(Axis(before.layout or "", source, self.axes, layout.num_rows, layout.width))

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
        held = tuple(pad for pad in pads if holds(pad, value.dtype))
        if not held:
            raise RegistryError(
                f'{call}: field "{show(path)}" is {str(value.dtype).removeprefix("torch.")}; its pad {list(pads)} does '
                "not fit that dtype. Give the field a pad that its dtype can hold."
            )
        return held
