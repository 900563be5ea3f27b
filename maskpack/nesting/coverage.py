"""The coverage check: the tensors of a batch that stay padded, also those inside Python objects."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from maskpack.core.keys import Path, show
from maskpack.core.objects import Objects
from maskpack.core.tree import entry_at
from maskpack.errors import CoverageError, MaskpackWarning
from maskpack.fields.options import Options, Registry
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.read import Opened, read
from maskpack.nesting.schema import FieldForm

_PLAIN = (str, bytes, bytearray, range, int, float, complex, bool, type(None))
_LEAVES = (*_PLAIN, np.generic, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class DenseField:
    """A tensor that would stay padded, or is off its axis: an entry of `dense_fields`.

    Attributes:
        path: the path of the field; inside a Python object it continues with keys and indices, as in
            `extra/[3]/tokens`.
        shape, dtype, nbytes: the shape, dtype and size of the tensor.
        reason: why it would stay padded, or how its rows differ from those of its mask.
        tensors: the number of tensors, which is above 1 only for those inside Python objects of one field. `nbytes` is
            their total; the other attributes describe the first.
        is_off_axis: whether its rows differ.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reason: str
    tensors: int = 1
    is_off_axis: bool = False

    @classmethod
    def of(cls, path: Path, tensor: Tensor, reason: str, *, is_off_axis: bool = False) -> DenseField:
        nbytes = tensor.numel() * tensor.element_size()
        return cls(path, tuple(tensor.shape), tensor.dtype, nbytes, reason, is_off_axis=is_off_axis)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f'"{show(self.path)}" {self.shape} {dtype}, {self.nbytes:,} bytes: {self.reason}'


def hidden_tensors(path: Path, value: Any) -> list[DenseField]:
    """The tensors of one dim or more inside the Python objects of a field, as one DenseField or none."""
    tensors = list(_tensors_in(path, value))
    if not tensors:
        return []
    reason = f'a tensor inside the Python object "{show(path)}"'
    if len(tensors) > 1:
        reason = f"with {len(tensors) - 1:,} more, tensors inside Python objects"
    first = DenseField.of(*tensors[0], reason)
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    return [dataclasses.replace(first, nbytes=nbytes, tensors=len(tensors))]


def _tensors_in(path: Path, value: Any) -> Iterator[tuple[Path, Tensor]]:
    """Each tensor once. Searches mappings, sequences, object arrays, dataclasses and attributes."""
    data = Objects.of(value).data
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids are unique
    stack: list[tuple[Path, Any]] = [(path, data)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            if item.dim() and not item.is_nested:
                yield place, item
            continue
        stack.extend((((*place, name)), child) for name, child in reversed(list(_children(item))))


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if is_tensor_collection(item) or isinstance(item, Mapping):
        yield from ((str(name), child) for name, child in cast("Mapping[Any, Any]", item).items())
    elif isinstance(item, np.ndarray):
        array = cast("Any", item)
        yield from ((f"[{index}]", child) for index, child in enumerate(array.flat if array.dtype == object else ()))
    elif isinstance(item, Collection):
        yield from ((f"[{index}]", child) for index, child in enumerate(cast("Collection[Any]", item)))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((field.name, getattr(item, field.name)) for field in dataclasses.fields(item))
    elif not isinstance(item, type):
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(item, name)) for name in slots if hasattr(item, name))
        yield from getattr(item, "__dict__", {}).items()


class OffAxis(NamedTuple):
    """A field that has other rows than its mask: the mask, and the first difference."""

    mask: str
    difference: str


def off_axis(opened: Opened, layouts: Mapping[str, RowLayout]) -> dict[Path, OffAxis]:
    """The jagged fields and the fields [T] whose rows are those of none of the axes that the registry gives them.
    `layouts` are those of the sources of the plan."""
    out: dict[Path, OffAxis] = {}
    plan, axes = opened.plan, opened.axes
    for form in plan.forms if plan.declared else ():
        rows = [
            (name, (layouts[name] if plan.sources.get(name) == source else axes.layout_of(source)).row_offsets)
            for name, source in plan.declared.get(form.path, {}).items()
        ]
        own = None if form.layout is None else layouts[form.layout].row_offsets
        if not rows or (own is not None and any(np.array_equal(own, other) for _, other in rows)):
            continue
        mask, wanted = rows[0]
        if own is None:
            seen, more = f"it has {opened.seen.entries[form.path].shape[0]} tokens", int(wanted[-1])
        elif len(own) != len(wanted):
            seen, more = f"it has {len(own) - 1} rows", len(wanted) - 1
        else:
            row = int((np.diff(own) != np.diff(wanted)).argmax())
            seen, more = f"row {row} has {own[row + 1] - own[row]} tokens", int(wanted[row + 1] - wanted[row])
        out[form.path] = OffAxis(mask, f'{seen}; mask "{mask}" has {more}')
    return out


def check_strict(call: str, dense: Iterable[DenseField]) -> None:
    """Raises CoverageError if `dense` is not empty."""
    fields = list(dense)
    if fields:
        lines = "\n".join(f"  {field}" for field in fields)
        kinds = [kind for kind in (False, True) if any(field.is_off_axis == kind for field in fields)]
        seen = " or ".join("have other rows than their mask" if kind else "would stay padded" for kind in kinds)
        raise CoverageError(
            f"{call}: {len(fields)} field(s) {seen}; expected none in strict mode:\n{lines}\n"
            f"{' '.join(_REMEDY[kind] for kind in kinds)}"
        )


_REMEDY = {
    False: "Give each field a MaskNestingSpec in the registry; with MaskNestingSpec(None) a field, or the Python "
    "object that the tensor is in, may stay as it is.",
    True: "Fix the producer of a field that has other rows than its mask, or give the field another mask in the "
    "registry.",
}
"""By `is_off_axis`."""


def check_coverage(forms: Collection[FieldForm], batch: Any, options: Options, off: Mapping[Path, OffAxis]) -> None:
    """Raises CoverageError in strict mode for fields of a batch that stay padded, or are `off` their axis."""
    if options.strict:
        check_strict(options.call, _dense(forms, batch, options, off))


def _dense(forms: Collection[FieldForm], batch: Any, options: Options, off: Mapping[Path, OffAxis]) -> list[DenseField]:
    """The fields that stay padded, those off their axis, and the tensors inside Python objects that are not declared
    without a mask."""
    found = [DenseField.of(form.path, entry_at(batch, form.path), form.reason) for form in forms if form.reason]
    found += [DenseField.of(path, entry_at(batch, path), one.difference, is_off_axis=True) for path, one in off.items()]
    for path in [form.path for form in forms if form.kind == "object"]:
        spec = options.registry.find(path)
        if spec is None or spec.mask is not None:
            found += hidden_tensors(path, entry_at(batch, path))
    return found


def nbytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among some values; nested ones without their offsets."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


_SAID: dict[str, str] = {}
_MOST_SAID = 1_000


def warn_dense(
    forms: Collection[FieldForm],
    options: Options,
    batch: TensorDictBase,
    off: Mapping[Path, OffAxis],
    sent: Callable[[], int],
    level: int,
) -> None:
    """Warns of the fields that are `off` their axis, as `level` frames above; and of those that stay padded, with the
    bytes that the whole batch takes all the same. Those are of the first batch whose fields stay padded for these
    reasons: Python shows equal warnings once."""
    if options.strict:
        return
    if off:
        masks = "; ".join(f'"{show(path)}" (mask "{one.mask}")' for path, one in off.items())
        warnings.warn(
            f"{options.call}: fields have other rows than their mask: {masks}. Fix the producer, or give the fields "
            "another mask in the registry; strict mode names a row",
            MaskpackWarning,
            stacklevel=level + 1,
        )
    fields = "; ".join(f'"{show(form.path)}": {form.reason}' for form in forms if form.reason)
    if not fields:
        return
    text = f"{options.call}: fields stay padded: {fields}"
    warning = _SAID.get(text)
    if warning is None:
        padded = nbytes_of(entry_at(batch, form.path) for form in forms if form.node is None)
        warning = f"{text}; the first such batch takes {sent():,} bytes instead of {padded:,} all the same"
        if len(_SAID) >= _MOST_SAID:
            _SAID.clear()
        _SAID[text] = warning
    warnings.warn(warning, MaskpackWarning, stacklevel=level + 1)


def dense_fields(
    batch: TensorDictBase, registry: Registry, *, pad_token_id: int | None = None
) -> tuple[DenseField, ...]:
    """Lists the tensors of a batch that would stay padded, or have other rows than their mask, as DenseFields.

    These are tensors that the registry does not know, that have no mask in the batch, or that have non-pad values under
    their mask; then jagged fields and fields [T] that have other rows than their mask; then one DenseField for each
    Python object with tensors inside. Other tensors of at most one dim, and fields declared without a mask, are
    left out.

    Raises LayoutError and RegistryError as `nest_batch_by_mask` does.
    """
    options = Options.of("dense_fields", registry, pad_token_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)
        opened = Opened.of(batch, options)
        found = read(opened)
        return tuple(_dense(found.schema.forms, opened.batch, options, off_axis(opened, found.layouts)))
