"""Decoding on a device: the encoded bytes cross to it once, and one kernel writes all tensors there.

    body of a table ---one copy---> body  ---+
    jobs of its fields (jobs.py) ----------> tables --one kernel--> nested or padded tensors

The bytes of a pinned batch are copied from its own memory, others go through a pinned buffer; those of a body that
came from another device lie there already (`mirrored`). While they are copied, the host writes the tables, which follow
in a second, small copy.

Nothing here synchronises but `mirrored`. The tensors returned keep neither the staged bytes nor the memory of each
other alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.backends import uses_triton
from maskpack.core.bits import Words, address, from_words, root_of, to_pinned
from maskpack.core.index import IntArray, cumulated
from maskpack.errors import LayoutError, WireFormatError
from maskpack.fields.registry import Path
from maskpack.layout.jagged import jagged_on
from maskpack.layout.row_layout import core_layout
from maskpack.nesting.schema import FieldForm, jagged_dim
from maskpack.nesting.write import with_signs
from maskpack.packed.cuda.jobs import recipe_of
from maskpack.packed.decode import pads_of, shapes_of
from maskpack.packed.table import SLACK, Table

if TYPE_CHECKING:
    from maskpack.packed.batch import PackedBatch

_FREE = 1024
"""Bytes of a body that are copied with its arrays in any case."""
_SPREAD = 64
"""The rows of a body for each row taken, up to which all of the body is sent."""
_MOST_SENT = 1 << 28
"""Bytes of the fields in a body, up to which all of it is sent for some of its rows."""
_LARGE = 1 << 20
"""Bodies of at least this many bytes are copied by torch, in several threads."""


def decode_on_device(
    packed: PackedBatch,
    stored: PackedBatch,
    forms: Iterable[FieldForm],
    nested: bool,
    device: torch.device | str | None,
) -> dict[Path, Tensor]:
    """The fields of `forms` that a kernel decodes, jagged if they are `nested`; all others are left out. `stored` has
    the same rows in the widths in which they are stored, which may be larger."""
    out: dict[Path, Tensor] = {}
    homes: dict[torch.device | str, list[FieldForm]] = {}
    for form in forms:
        if form.dtype is not None:
            homes.setdefault(device or form.device or "cpu", []).append(form)
    for home, own in homes.items():
        home = torch.device(home)
        if uses_triton(home, call="decompress"):
            _need_no_capture(home)
            _decode(packed, stored, own, nested, home, out)
    return out


def _decode(
    packed: PackedBatch,
    stored: PackedBatch,
    forms: Sequence[FieldForm],
    nested: bool,
    device: torch.device,
    out: dict[Path, Tensor],
) -> None:
    """Adds the fields of one device, those that the kernel can decode."""
    source, numbers, taken = _source(packed, stored, [form.path for form in forms])
    layouts = source.layouts if taken is not None else {**source.layouts, **packed.layouts}
    layout_rows = native.layout_rows([core_layout(layout) for layout in layouts.values()])
    table = source if numbers == [*range(source.fields.size)] else source.select(numbers)
    table = table.own(SLACK, _FREE)
    staged, body = _sent(table.body, device)
    table = table.like(body=body)
    if not native.can_decode(table.entries, layout_rows, body, table.rows, table.dense_rows, table.fields):
        raise WireFormatError(
            "decompress: the packed bytes were written to since they were read; expected those that were checked. Load "
            "a file that others write to with mmap=False."
        )
    recipe = recipe_of(packed, table, forms, nested, taken is not None)
    jagged = [
        (form.path, form.layout, jagged_dim(packed.forms[form.path]))
        for form in recipe.forms
        if form.layout is not None and (nested or form.kind == "jagged")
    ]
    first = {} if taken is None else {"": taken}  # the first tables, of which jagged tensors keep the offsets
    if jagged or taken is not None:
        first |= {name: layout.row_offsets for name, layout in packed.layouts.items()}
    ends = cumulated(np.array([own.size for own in first.values()], np.int64)).tolist()
    begins = dict(zip(first, ends, strict=False))
    tensors = [_new(shape, dtype, device) for shape, dtype in shapes_of(packed, recipe.forms, nested)]
    kept = _new((ends[-1] if jagged else 0,), torch.int64, device)
    more, rows = [kept.numel(), *(x.data_ptr() for x in (kept, *tensors))], (table.rows, table.dense_rows)
    if taken is not None:
        more, rows = [*more, begins[""], *(begins.get(name, 0) for name in table.names)], (packed.num_rows,) * 2
    own = table, layout_rows, not nested, [*first.values()], more
    line, jobs_at, programs = recipe.told(*own, *rows, pinned=staged.is_cuda)
    if programs:
        from maskpack.packed.cuda import kernel  # Triton is imported on first use

        with torch.cuda.device_of(staged):
            there = line.to(staged.device, non_blocking=True)
            kernel.launch(staged, there, jobs_at, len(recipe.jobs), programs)
    values = dict(zip([form.path for form in recipe.forms], tensors, strict=True))
    for form, size in zip(forms, table.pads["size"].tolist(), strict=True):
        if form.path in values and not nested and form.dtype is not None and size > 1 + form.dtype.itemsize:
            assert form.layout is not None
            layout = packed.layouts[form.layout]
            values[form.path] = with_signs(values[form.path], pads_of(packed, form), layout)
    sent = {name: kept[begins[name] : begins[name] + first[name].size] for name in {name for _, name, _ in jagged}}
    out.update(values)
    out.update(jagged_on(packed.layouts, jagged, values, sent))


def _source(
    packed: PackedBatch, stored: PackedBatch, paths: Sequence[Path]
) -> tuple[Table, list[int], IntArray | None]:
    """The table that has some fields, their numbers in it, and which of its rows they are; None for all. Scattered rows
    are read where they lie, in a body that is not much larger than they are; else they are encoded by themselves."""
    (columns, *more), rows = packed.rows.columns, packed.rows.columns[0].rows
    body, scattered = columns.body, not more and rows.count.size > 1
    if body is not None and scattered and packed.rows.fits(body.table) and rows.num_rows * _SPREAD >= body.num_rows:
        numbers = [body.numbers[path] for path in paths]
        if body.table.select(numbers).nbytes <= _MOST_SENT:
            return body.table, numbers, rows.by_row()[1]
    return stored.table, [packed.numbers[path] for path in paths], None


def _need_no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LayoutError(
            "decompress: a CUDA graph is being captured, and its replays would read host buffers that have been "
            "reused; expected no capture. Decode the batch before, and capture the use of its tensors."
        )


def _new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


# -------------------------------------------------------------------- the encoded bytes


def _sent(body: Words, device: torch.device) -> tuple[Tensor, Words]:
    """The bytes of a body, uint8, on their way to the device, or there already; and the same bytes on the host, in
    memory that no other process writes to."""
    owner = _owner(body)
    if isinstance(owner, _Mirror) and owner.there.device == torch.empty(0, device=device).device:  # cuda is cuda:0
        begin = address(body) - owner.address
        return owner.there[begin : begin + body.nbytes], body
    source = _pinned(body)
    if source is None:
        source = torch.empty(body.size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        if body.size < _LARGE:
            source.numpy()[...] = body
        else:
            source.copy_(from_words(body, torch.uint8))  # in several threads
    return source.to(device, non_blocking=True), source.numpy()


def _pinned(body: Words) -> Tensor | None:
    """The body as a tensor, if it is memory that a device reads by itself."""
    root = root_of(body)
    whole: Any = root.base
    if not isinstance(whole, Tensor) or not whole.is_pinned():
        return None
    begin = address(body) - whole.data_ptr()
    return whole[begin : begin + body.nbytes]


def _owner(memory: Any) -> Any:
    """What owns the memory of an array or of a buffer."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return memory


class _Mirror:
    """A copy on the host of bytes that lie on a device."""

    def __init__(self, there: Tensor) -> None:
        self.there = there
        self._host = to_pinned(there)
        self.address = self._host.data_ptr()
        self.__array_interface__ = self._host.numpy().__array_interface__


def mirrored(there: Tensor) -> Words:
    """uint8 [nbytes] on the host, a copy of `there`. A batch whose body it is, unpickled with it as the buffer, is
    decoded on the device of `there` from there: the host reads the small arrays of the body alone. Synchronises."""
    return np.asarray(_Mirror(there))


def pinned_memory(nbytes: int) -> Words:
    """uint8 [nbytes] that a device reads by itself; views of it show whose memory it is."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
