"""The findings of a batch: what in it will go wrong.

    forms, layouts   off_axis, uncovered   --> strict mode, warnings, `assert_covered`
    packed tokens    _Scope                --> masks, documents, positions, end tokens, numbers that are none
    objects          _Scope                --> images, counts, groups

`check` returns all of them. `compress` and `nest_batch_by_mask` look at forms and layouts alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.core.latest import Latest
from maskpack.core.objects import Objects
from maskpack.core.pads import Pad, Pads, holds
from maskpack.core.tree import COLUMN, entry_at
from maskpack.errors import CoverageError, LayoutError, MaskpackWarning, RegistryError
from maskpack.fields.options import Options, Registry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout, host_spans
from maskpack.nesting.documents import BOUNDS, LENGTHS, begins_of, rows_that_count_again, wrong_steps
from maskpack.nesting.read import Opened, Read, non_pad_of, read
from maskpack.nesting.response import RESPONSE, SEQUENCE
from maskpack.nesting.schema import FieldForm
from maskpack.ops import pack_torch

_PLAIN = (str, bytes, bytearray, range, int, float, complex, bool, type(None))
_LEAVES = (*_PLAIN, type, np.generic, torch.dtype, torch.device)

COVERAGE = ("padded", "hidden", "axis", "lossy", "mask")
"""The kinds that strict mode raises errors for; of `mask`, one under which a field has tokens."""

_DECLARE = (
    "Give each field a MaskNestingSpec in the registry; with MaskNestingSpec(None) a field, or the Python object that "
    "the tensor is in, may stay as it is."
)
_OFF_AXIS = (
    "Fix the producer of a field that has other rows than its mask, or give the field another mask in the registry."
)
_TURNED = (
    "Name the ragged dim where it is made: torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2), with "
    "values [n, T]. Joined batches and replay have the right one."
)
_SHOWN = 4
"""Rows that a finding names."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a batch that will go wrong: an entry of `check`.

    Attributes:
        path: the path of the field; inside a Python object it continues with keys and indices, as in
            `extra/[3]/tokens`.
        kind: one word (docs/api/batches.md has a table).
        rows: the first rows that have it; empty for the whole field.
        seen: what was seen, and what will go wrong.
        remedy: what to do.
    """

    path: Path
    kind: str
    rows: tuple[int, ...]
    seen: str
    remedy: str

    @property
    def line(self) -> str:
        """The field, and what was seen."""
        return f'"{show(self.path)}" {self.seen}'

    def __str__(self) -> str:
        first = "first in" if len(self.rows) == _SHOWN else "in"
        rows = f"{first} row{'s' if self.rows[1:] else ''} {', '.join(map(str, self.rows))}: " if self.rows else ""
        return f"{self.kind}: {rows}{self.line}. {self.remedy}"


# -------------------------------------------------------------------- forms and layouts


def described(x: Tensor) -> str:
    """The shape, dtype and size of a tensor."""
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{tuple(x.shape)} {dtype}, {x.numel() * x.element_size():,} bytes"


def stays_padded(path: Path, x: Tensor, reason: str) -> Finding:
    """The finding of a tensor that stays padded."""
    return Finding(path, "padded", (), f"{described(x)}: {reason}", _DECLARE)


def hidden_tensors(path: Path, value: Any) -> list[Finding]:
    """The tensors of one dim or more inside the Python objects of a field, as one finding or none."""
    tensors = list(_tensors_in(path, value))
    if not tensors:
        return []
    (place, first), *more = tensors
    reason = f"with {len(more):,} more, tensors inside Python objects"
    reason = reason if more else f'a tensor inside the Python object "{show(path)}"'
    nbytes = nbytes_of(tensor for _, tensor in tensors)
    size = described(first).rpartition(", ")[0]
    remedy = COLUMN if _are_rows(Objects.of(value).data) else _DECLARE
    return [Finding(place, "hidden", (), f"{size}, {nbytes:,} bytes: {reason}", remedy)]


def _are_rows(data: Any) -> bool:
    """Whether it is a list of tensors [j, *F] that differ in length alone."""
    rows = cast("list[Any]", data) if isinstance(data, list) else []
    kinds = {(row.dtype, row.shape[1:]) if isinstance(row, Tensor) and row.dim() else None for row in rows}
    return len(kinds) == 1 and None not in kinds


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
    elif isinstance(item, Collection):
        held = cast("Any", item)
        items = held if not isinstance(item, np.ndarray) else held.flat if held.dtype == object else ()
        yield from ((f"[{index}]", child) for index, child in enumerate(items))
    else:
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(item, name)) for name in slots if hasattr(item, name))
        yield from getattr(item, "__dict__", {}).items()


def off_axis(opened: Opened, layouts: Mapping[str, RowLayout]) -> list[Finding]:
    """The jagged fields and the fields [T] whose rows are those of none of the axes that the registry gives them.
    `layouts` are those of the sources of the plan."""
    out: list[Finding] = []
    plan, axes = opened.plan, opened.axes
    for form in plan.forms if plan.declared else ():
        rows = [
            (name, (layouts[name] if plan.sources.get(name) == source else axes.layout_of(source)).row_offsets)
            for name, source in plan.declared.get(form.path, {}).items()
        ]
        own = None if form.layout is None else layouts[form.layout].row_offsets
        if not rows or (own is not None and any(np.array_equal(own, other) for _, other in rows)):
            continue
        (mask, wanted), x = rows[0], opened.seen.entries[form.path]
        differing: list[int] = []
        if own is None:
            seen, more = f"it has {x.shape[0]} tokens", int(wanted[-1])
        elif len(own) != len(wanted):
            seen, more = f"it has {len(own) - 1} rows", len(wanted) - 1
        else:
            lengths, tokens = np.diff(own), np.diff(wanted)
            differing = np.flatnonzero(lengths != tokens).tolist()
            row = differing[0]
            if x.dim() == 3 and (lengths == lengths[0]).all() and (tokens == x.shape[2]).all():
                seen = f"has rows [{lengths[0]}, {tokens[0]}]: torch took the first dim for tokens, as all are as long"
                out.append(Finding(form.path, "axis", tuple(differing[:_SHOWN]), seen, _TURNED))
                continue
            seen, more = f"row {row} has {own[row + 1] - own[row]} tokens", int(wanted[row + 1] - wanted[row])
        seen = f'{described(x)}: {seen}; mask "{mask}" has {more}'
        out.append(Finding(form.path, "axis", tuple(differing[:_SHOWN]), seen, _OFF_AXIS))
    return out


def uncovered(opened: Opened, forms: Iterable[FieldForm], off: Iterable[Finding]) -> list[Finding]:
    """The fields that stay padded, those `off` their axis, and the tensors inside Python objects that are not declared
    without a mask. Values are not looked at."""
    batch, registry, objects = opened.batch, opened.options.registry, list[Path]()
    found: list[Finding] = []
    for form in forms:
        if form.reason:
            found.append(stays_padded(form.path, entry_at(batch, form.path), form.reason))
        elif form.kind == "object":
            spec = registry.find(form.path)
            objects += [form.path] if spec is None or spec.mask is not None else []
    return [*found, *off, *(one for path in objects for one in hidden_tensors(path, entry_at(batch, path)))]


def need_none(call: str, findings: Collection[Finding]) -> None:
    """Raises CoverageError, as strict mode does, unless there are no findings."""
    if findings:
        off = {False: "would stay padded", True: "have other rows than their mask"}
        kinds = [kind for kind in off if any((one.kind == "axis") == kind for one in findings)]
        lines = "\n".join(f"  {one.line}" for one in findings)
        remedies = " ".join(dict.fromkeys(one.remedy for one in sorted(findings, key=lambda one: one.kind == "axis")))
        raise CoverageError(
            f"{call}: {len(findings)} field(s) {' or '.join(map(off.__getitem__, kinds))}; expected none in strict "
            f"mode:\n{lines}\n{remedies}"
        )


def nbytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among some values; nested ones without their offsets."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


_said: Latest[str] = Latest(1_000)
"""The latest warnings, by their texts without bytes."""


def warn_uncovered(
    opened: Opened, forms: Collection[FieldForm], off: Sequence[Finding], sent: Callable[[], int], level: int
) -> None:
    """Warns of the fields that are `off` their axis, as `level` frames above; and of those that stay padded, with the
    bytes that the whole batch takes all the same. Those are of the first batch whose fields stay padded for these
    reasons: Python shows equal warnings once."""
    call = opened.options.call
    if opened.options.strict:
        return
    if off:
        declared = opened.plan.declared
        masks = "; ".join(f'"{show(one.path)}" (mask "{next(iter(declared[one.path]))}")' for one in off)
        warnings.warn(
            f"{call}: fields have other rows than their mask: {masks}. Fix the producer, or give the fields another "
            "mask in the registry; strict mode names a row",
            MaskpackWarning,
            stacklevel=level + 1,
        )
    fields = "; ".join(f'"{show(form.path)}": {form.reason}' for form in forms if form.reason)
    if not fields:
        return
    text = f"{call}: fields stay padded: {fields}"
    warning = _said.get(text)
    if warning is None:
        padded = nbytes_of(entry_at(opened.batch, form.path) for form in forms if form.node is None)
        warning = f"{text}; the first such batch takes {sent():,} bytes instead of {padded:,} all the same"
    warnings.warn(_said.keep(text, warning), MaskpackWarning, stacklevel=level + 1)


# -------------------------------------------------------------------- check


def check(
    batch: TensorDictBase,
    registry: Registry = RL_FIELDS,
    *,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> list[Finding]:
    """Returns what in a batch will go wrong, as Findings; none for a sound batch. For the debug mode of a trainer.

    Args:
        batch: padded, nested, jagged, or flat [T] with `cu_seqlens`. It is not changed.
        registry, pad_token_id: as for `compress`.
        eos_token_id: the token that ends a response. If it is the pad token, too, rows are looked at whose mask hides
            it.

    The batch is read once, as `nest_batch_by_mask` reads it; then only valid tokens are looked at. What no field of
    the batch tells is not judged: without a loss mask, no token is scored. docs/api/batches.md has the kinds.

    Raises LayoutError and RegistryError as `nest_batch_by_mask` does, but for fields of another width.
    """
    options = Options.of("check", registry, pad_token_id)
    if isinstance(eos_token_id, bool) or not (eos_token_id is None or isinstance(eos_token_id, int | np.integer)):
        raise RegistryError(
            f"check: eos_token_id is {said(eos_token_id)}; expected a whole number. Pass tokenizer.eos_token_id."
        )
    found: list[Finding] = []
    opened = _opened(batch, options, found)
    one = read(opened)
    off = off_axis(opened, one.layouts)
    found += [_under_mask(one, of) if of.path in one.lossy else of for of in uncovered(opened, one.schema.forms, off)]
    scopes: dict[Path, dict[str, FieldForm]] = {}
    for form in one.schema.forms:
        scopes.setdefault(form.path[:-1], {})[form.path[-1]] = form
    for fields in scopes.values():
        found += _Scope(one, fields, None if eos_token_id is None else int(eos_token_id)).findings()
    return found


def _opened(batch: TensorDictBase, options: Options, found: list[Finding]) -> Opened:
    """The batch without the fields of a width that none of their masks has, which are added to `found`."""
    while True:
        try:
            return Opened.of(batch, options)
        except LayoutError as error:
            if error.path is None:
                raise
            seen = str(error).removeprefix(f'{options.call}: field "{show(error.path)}" ').partition(". Fix")[0]
            found.append(Finding(error.path, "axis", (), seen, _OFF_AXIS))
            batch = batch.exclude(error.path)


def _under_mask(one: Read, finding: Finding) -> Finding:
    """The finding of a field that has non-pad values under its mask, with one of them."""
    form = one.opened.plan.schema.by_path[finding.path]
    (row, *place), seen, _ = non_pad_of(one.opened, form, one.layouts)
    what = finding.seen.partition(":")[0]
    seen = f"{what}: it has non-pad values under its mask, such as {seen} at {(row, *place)}"
    if form.path[-1] in _SCORED:
        remedy = f'Multiply it by the mask "{form.layout}", or let that mask reach as far.'
        return Finding(form.path, "mask", (row,), f"{seen}; it marks what is no token", remedy)
    remedy = (
        f'Fix the mask "{form.layout}", or write the pad there (pad_token_id, for tokens); or give the field its true '
        "pad or mask in the registry."
    )
    return Finding(form.path, "lossy", (row,), seen, remedy)


_IDS = ("input_ids", "sequences", "tokens", "token_ids")
_RESPONSES = ("responses", "completion_ids")
_SCORED = ("loss_mask", "loss_masks", "token_mask", "tool_mask", "response_mask", "action_mask", "completion_mask")
"""Masks of the tokens that a loss is of; the first one in a batch counts."""
_LOG_PROBS = (
    *("rollout_log_probs", "old_log_probs", "old_per_token_logps", "sampling_per_token_logps", "rollout_logprobs"),
    *("logprobs", "prox_logp", "prev_logprobs", "generation_logprobs", "inference_logprobs", "log_probs"),
)
_IMAGES = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)
_MOST = 0.75
"""A share of groups that have one size: others are odd."""


_Array = npt.NDArray[Any]


class _Scope:
    """The fields of a batch or a sub-batch, by their names, and what is wrong with their values, which are read on the
    host."""

    def __init__(self, one: Read, fields: Mapping[str, FieldForm], eos: int | None) -> None:
        self.read, self.fields, self.eos = one, fields, eos
        self.registry, self.batch = one.opened.options.registry, one.opened.batch

    def findings(self) -> Iterator[Finding]:
        of_masks = self._outside, self._shifted, self._unscored
        of_tokens = self._positions, self._unmasked, self._hidden_end, self._no_tail, self._no_numbers
        for find in (*of_masks, *of_tokens, self._counts, self._images, self._groups):
            yield from find()

    # ---------------------------------------------------------------- fields

    def _first(self, *names: str) -> FieldForm | None:
        """The first of some fields that has a value for each token of a layout."""
        return next((form for name in names if (form := self.fields.get(name)) is not None and self._has(form)), None)

    def _has(self, form: FieldForm) -> bool:
        return form.path in self.read.values and self.read.values[form.path].dim() == 1

    def _values(self, form: FieldForm) -> _Array:
        x = self.read.values[form.path].detach().cpu()
        return (x.float() if x.is_floating_point() and x.dtype not in _OF_NUMPY else x).numpy()

    def _layout(self, form: FieldForm) -> RowLayout:
        return self.read.layouts[form.layout or ""]

    @cached_property
    def _ids(self) -> FieldForm | None:
        """The token ids: by a name that trainers have, or else the field of the sequence that has their pad."""
        own = (name for name, form in self.fields.items() if form.layout == SEQUENCE and self._has_pad_token(form))
        return self._first(*_IDS, *own)

    def _has_pad_token(self, form: FieldForm) -> bool:
        spec = self.registry.find(form.path)
        return spec is not None and Pad.PAD_TOKEN_ID in spec.pads

    @cached_property
    def _mask(self) -> FieldForm | None:
        """The mask of scored tokens: by a name that trainers have, or else the one that the axis of the response is."""
        own = (name for name, form in self.fields.items() if form.layout == RESPONSE and self._gives_axis(form))
        return self._first(*_SCORED, *own)

    def _gives_axis(self, form: FieldForm) -> bool:
        """Whether a mask is on the layout that is computed from it."""
        source = self.read.opened.plan.sources.get(form.layout or "")
        return source is not None and (source.way, source.key) == ("mask", form.path)

    @cached_property
    def _is_own(self) -> bool:
        return self._mask is not None and self._gives_axis(self._mask)

    def _columns(self, mask: FieldForm, width: int) -> Tensor | None:
        """The flags of the tokens of a mask in their columns, bool [B, width]; None if its columns cannot be told."""
        own = self._layout(mask)
        tails = {key for ways in self.registry.axes.values() for way in ways if way.part == "tail" for key in way.tail}
        if mask.kind != "padded" or own.width > width or (own.width < width and mask.path[-1] not in tails):
            return None
        columns = pack_torch.unpack(torch.from_numpy(self._values(mask) != 0), own.to("cpu"), False)
        return torch.nn.functional.pad(columns, (width - own.width, 0))

    def scored(self, form: FieldForm) -> _Array | None:
        """Which tokens of a field are scored, bool [T]; None if no mask tells."""
        mask, layout = self._mask, self._layout(form)
        if mask is None or mask.layout == form.layout or self._layout(mask) == layout:
            return None if mask is None else self._values(mask) != 0
        columns = self._columns(mask, layout.width) if form.kind == "padded" else None
        return None if columns is None else pack_torch.pack(columns, layout.to("cpu")).numpy()

    # ---------------------------------------------------------------- masks

    def _outside(self) -> Iterator[Finding]:
        """A mask on a layout of its own that is true where the row has no token."""
        mask, ids = self._mask, self._ids
        moved = any(way.shift for ways in self.registry.axes.values() for way in ways)
        if mask is None or ids is None or ids.kind != "padded" or not self._is_own or moved:
            return
        whole = self._layout(ids)
        columns = self._columns(mask, whole.width)
        if columns is not None and whole is not self._layout(mask):
            outside: _Array = (columns & ~whole.to("cpu").to_mask()).numpy()
            rows: IntArray = np.flatnonzero(outside.any(1))
            seen = "is true where there is no token: losses score what is none"
            yield from _found(mask, "mask", rows, seen, f'Multiply it by the mask "{ids.layout}".')

    def _unscored(self) -> Iterator[Finding]:
        mask, ids = self._mask, self._ids
        if mask is None or ((flags := self._values(mask) != 0).all() and not self._is_own):
            return
        tokens = self._layout(ids if self._is_own and ids is not None else mask).lengths
        counts: IntArray = np.diff(np.append(0, flags.cumsum())[self._layout(mask).row_offsets])
        rows = np.flatnonzero((counts == 0) & (tokens > 0))
        if counts.any() or not (self._is_own or (ids is not None and ids.layout == mask.layout)):
            seen = "scores no token: the loss does not see the row, and a mean over its tokens is 0 / 0"
            yield from _found(mask, "unscored", rows, seen, "Leave these rows out, or score their tokens.")

    def _shifted(self) -> Iterator[Finding]:
        """A mask whose spans begin, all of them, at a token without a log-prob, and end before one that has one; or the
        other way round. Other tokens have none."""
        for form in filter(None, map(self._first, _LOG_PROBS)):
            flags, x, offsets = self.scored(form), self._values(form), self._layout(form).row_offsets
            if self._mask is None or flags is None or flags.all():
                continue
            has = (x != 0) & ~np.isnan(x)
            bounds = np.unique(np.concatenate([np.flatnonzero(flags[1:] != flags[:-1]) + 1, offsets]))
            first, end = (edge[flags[bounds[:-1]]] for edge in (bounds[:-1], bounds[1:]))
            row = np.searchsorted(offsets, first, side="right") - 1
            for way, inside, beside in (("left", first, end), ("right", end - 1, first - 1)):
                within = (beside >= offsets[row]) & (beside < offsets[row + 1]) & (first > offsets[row])
                if len(row) < 2 or not within.all() or has[inside].any() or not has[beside].all():
                    continue
                if np.count_nonzero(has & ~flags) == len(np.unique(beside)):
                    seen = f'is one token to the {way} of field "{show(form.path)}": losses score other tokens'
                    remedy = (
                        f"Move it by one token; if it is padded, torch.roll(mask, {1 if way == 'left' else -1}, 1)."
                    )
                    yield from _found(self._mask, "shift", np.unique(row), seen, remedy)
                    return

    # ---------------------------------------------------------------- positions and tokens

    def _positions(self) -> Iterator[Finding]:
        """Rows of several documents, and positions that do not count the valid tokens. Of positions with sections,
        zeros begin a document; the rest is not judged."""
        mask, form = self._first("attention_mask"), self.fields.get("position_ids")
        form = form if form is not None and form.path in self.read.values else None
        home, ids = form or mask, self._ids
        if home is None or (ids is not None and self._layout(ids) != self._layout(home)):
            return
        layout = self._layout(home)
        x = None if form is None else self.read.values[form.path].detach().cpu()
        x = None if x is None or x.dim() > 2 or x.is_floating_point() or len(x) != layout.num_tokens else x
        numbers = [] if mask is None or mask.layout != home.layout else [self._values(mask)]
        numbers = [own for own in numbers if own.dtype.kind in "iu" and own.size and int(own.max()) > 1]
        starts = layout.row_offsets[:-1][layout.lengths > 0]
        if x is None and not numbers:
            return
        counted = None if x is None or x.dim() > 1 else x.numpy()
        both = begins_of(layout, x, [torch.from_numpy(cast("Any", own)) for own in numbers])
        begins, odd = (cast("Tensor", own).numpy() for own in both)
        if layout.num_rows == 1 and (given := self._given) is not None:
            begins[given[(given > 0) & (given < layout.num_tokens)] - 1] = False
        seen = "shows several documents, which attend to each other in a model that is not told"
        remedy = (
            "Give each document a row of its own, or cu_seqlens beside a batch of one row. Replay keeps them apart."
        )
        told = mask if numbers and mask is not None else home
        yield from _found(told, "documents", _rows_at(layout, begins.nonzero()[0] + 1), seen, remedy)
        if counted is not None and x is not None and form is not None:
            wrong = wrong_steps(layout, x, odd.nonzero()[0])
            late = starts[counted[starts] != 0]
            seen = "does not count the valid tokens from 0: the model sees other places than those of the mask"
            remedy = "Compute it from the mask: (attention_mask.cumsum(1) - 1).clamp(min=0); or drop it."
            yield from _found(form, "positions", _rows_at(layout, np.append(wrong, late)), seen, remedy)

    @cached_property
    def _given(self) -> IntArray | None:
        """Where documents begin in a batch of one row, if a field of it says so."""
        for name in (*BOUNDS, *LENGTHS):
            if name in self.fields and self.fields[name].kind == "dense":
                x: Any = entry_at(self.batch, self.fields[name].path)
                line: IntArray = x.reshape(-1).cpu().numpy().astype(np.int64)
                return np.cumsum(line) if name in LENGTHS else line
        return None

    def _unmasked(self) -> Iterator[Finding]:
        """Rows of several documents in fields that no mask covers, of a batch that does not say which tokens are
        valid."""
        dense = {name: form for name, form in self.fields.items() if form.kind == "dense"}
        tensors: dict[str, Tensor] = {name: self.read.opened.seen.entries[form.path] for name, form in dense.items()}
        remedy = "Replay keeps documents apart by position_ids, cu_seqlens or seq_lens; other models need to be told."
        for name, x in tensors.items():
            if (rows := rows_that_count_again(x)).size:
                seen = "counts and starts again inside a row, as positions of several documents do"
                other = "Replay reads position_ids alone: give the field that name."
                yield from _found(dense[name], "documents", rows, seen, remedy if name == "position_ids" else other)
                return
        flat = all(x.dim() < 2 for x in tensors.values())
        if self._ids is None and (flat or any(x.dim() > 1 and len(x) == 1 for x in tensors.values())):
            for name in (name for name in (*BOUNDS, *LENGTHS) if name in tensors):
                count = tensors[name].numel() - (name in BOUNDS)
                if count > 1:
                    seen = f"says that one row holds {count:,} documents, and nothing says which tokens are valid"
                    yield Finding(dense[name].path, "documents", (), seen, remedy)
                    return

    def _hidden_end(self) -> Iterator[Finding]:
        """Rows that end before the width without the end token, which is the pad: a mask of `ids != pad` hides it."""
        ids = self._first(*_RESPONSES) or self._ids
        if ids is None or self.eos is None:
            return
        x, pads, layout = self._values(ids), self.read.pads.get(ids.path), self._layout(ids)
        dtype, spans = self.read.values[ids.path].dtype, host_spans(layout)
        if pads is None or len(pads.records) != 1 or not holds(self.eos, dtype):
            return
        if not pads.is_same(Pads.of(self.eos, dtype), 1) or (x == self.eos).any():
            return
        filled = np.flatnonzero(np.diff(spans.splits))
        last = spans.splits[filled + 1] - 1
        short = filled[spans.starts[last] + spans.counts[last] < layout.width]
        flags = self.scored(ids)  # a prompt alone has no end token
        short = short if flags is None else short[flags[layout.row_offsets[short + 1] - 1]]
        if (layout.lengths[short] < layout.max_length).any():
            seen = f"ends before the width without eos_token_id {self.eos}, which is the pad: the mask hides it"
            remedy = (
                "Compute masks from the lengths of rows, with the end token, not from ids != pad_token_id; or leave "
                "eos_token_id out if rows end otherwise."
            )
            yield from _found(ids, "eos", short, seen, remedy)

    def _no_tail(self) -> Iterator[Finding]:
        """Responses that are not the last tokens of their rows."""
        tail, ids = self._first("responses"), self._first("input_ids")
        if tail is None or ids is None or tail.layout == ids.layout:
            return
        own, whole, x, y = self._layout(tail), self._layout(ids), self._values(tail), self._values(ids)
        if own.num_rows != whole.num_rows:
            return
        rows = np.flatnonzero(own.lengths > whole.lengths)
        if not rows.size:
            at = np.arange(len(x)) + np.repeat(whole.row_offsets[1:] - own.row_offsets[1:], own.lengths)
            rows = _rows_at(own, np.flatnonzero(y[at] != x))
        seen = f'is not the end of field "{show(ids.path)}": losses score tokens that the model did not see'
        yield from _found(tail, "tail", rows, seen, "Fix the producer: input_ids are the prompt, then the response.")

    def _no_numbers(self) -> Iterator[Finding]:
        """NaN and infinities at scored tokens. A field of NaN alone has no values."""
        for form in (form for form in self.fields.values() if self._has(form)):
            x, responses = self._values(form), self._first(*_RESPONSES)
            with np.errstate(all="ignore"):
                if x.dtype.kind != "f" or np.isfinite(x.sum()):
                    continue
            flags = self.scored(form)
            if self._mask is None and responses is not None and responses.layout == form.layout:
                flags = np.ones(len(x), np.bool_)
            if flags is not None and not np.isnan(x[flags]).all():
                rows = _rows_at(self._layout(form), np.flatnonzero(flags & ~np.isfinite(x)))
                seen = "is NaN or infinite at scored tokens: so is the loss"
                yield from _found(form, "nonfinite", rows, seen, "Fix the producer, or score these tokens no more.")

    # ---------------------------------------------------------------- objects

    def _rows_of(self, name: str) -> list[Any] | None:
        """The Python objects of each row; the rows of a jagged field."""
        form = self.fields.get(name)
        if form is None:
            return None
        value: Any = entry_at(self.batch, form.path)
        if isinstance(value, Tensor):
            return list(value.unbind()) if form.kind == "jagged" or value.dim() == 1 else None
        items: Any = Objects.of(value).data
        rows: list[Any] = [*items] if isinstance(items, list | tuple | np.ndarray) else []
        return rows if len(rows) == self.read.opened.rows else None

    def _counts(self) -> Iterator[Finding]:
        """Python objects of a declared field that have other lengths than the rows of its mask, as recorded experts."""
        for name, form in self.fields.items():
            spec = self.registry.find(form.path) if form.kind == "object" else None
            axes = [self.read.opened.axes.find(mask, form.path) for mask in (() if spec is None else spec.masks)]
            items = self._rows_of(name) if any(axes) else None
            if items is not None and all(isinstance(item, Tensor | np.ndarray | list) for item in items):
                counts = np.array([len(item) for item in items], np.int64)
                wrong = [np.flatnonzero(counts != axis.layout.lengths) for axis in axes if axis is not None]
                seen = "has other lengths than its mask has tokens"
                yield from _found(form, "counts", min(wrong, key=len), seen, _OFF_AXIS)

    def _images(self) -> Iterator[Finding]:
        """Grids of images that need another number of patches than there are."""
        media = self._rows_of("multi_modal_inputs")
        for grid, pixels in _IMAGES.items():
            name, (sizes, patches) = pixels, (self._rows_of(key) or [] for key in (grid, pixels))
            if media is not None:
                name, rows = "multi_modal_inputs", [cast("Any", row if isinstance(row, dict) else {}) for row in media]
                sizes, patches = ([row.get(key) for row in rows] for key in (grid, pixels))
            wrong = [
                row
                for row, (size, own) in enumerate(zip(sizes, patches, strict=False))
                if isinstance(size, Tensor) and isinstance(own, Tensor) and int(size.prod(-1).sum()) != len(own)
            ]
            if wrong:
                seen = f'has other patches in "{pixels}" than "{grid}" says'
                remedy = "Take both from the same call of the processor."
                yield from _found(self.fields[name], "counts", np.array(wrong), seen, remedy)

    def _groups(self) -> Iterator[Finding]:
        """Groups of another size than most."""
        items = self._rows_of("uid")
        if items is None or self.fields["uid"].kind == "jagged":
            return
        names = [str(item.item() if isinstance(item, Tensor) and item.numel() == 1 else item) for item in items]
        sizes = Counter(names)
        usual, many = Counter(sizes.values()).most_common(1)[0] if sizes else (0, 0)
        if many >= max(3, _MOST * len(sizes)):
            rows = np.array([row for row, name in enumerate(names) if sizes[name] != usual], np.int64)
            seen = f"has groups of other sizes than {usual}: their baselines are of other numbers of rows"
            remedy = "Drop whole groups, or give rows that were made apart a uid of their own."
            yield from _found(self.fields["uid"], "groups", rows, seen, remedy)


def _found(form: FieldForm, kind: str, rows: IntArray, seen: str, remedy: str) -> Iterator[Finding]:
    """A finding of some rows; nothing if there are none."""
    if rows.size:
        yield Finding(form.path, kind, tuple(rows[:_SHOWN].tolist()), seen, remedy)


def _rows_at(layout: RowLayout, tokens: IntArray) -> IntArray:
    """The rows of some packed tokens, each once."""
    return np.unique(np.searchsorted(layout.row_offsets, tokens, side="right") - 1)
