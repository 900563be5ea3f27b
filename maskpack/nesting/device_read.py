"""Padded fields on a device, read once: their packed values, and which of their candidate pads fit.

    fields of all layouts --one table of jobs, copied once--> one launch --> values, flags, records of rows

The plain torch program of a field, which the kernel of read_triton.py replaces:

    values = x[mask];  flags[pad] = (x != unpack(values, layout, pad)).any() for each pad;  odd = (bytes > 1).any()

Nothing synchronises. What does not fit the kernel is compared on the host (`fits`).
"""

from __future__ import annotations

from array import array
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi
from maskpack.core.backends import uses_triton
from maskpack.core.bits import sent
from maskpack.core.pads import PadValue, has_records, record_size, trial_of
from maskpack.layout.row_layout import RowLayout, device_spans
from maskpack.ops.pack_words import copied, repeated, words_of

CHUNK = 512
"""Words that a program reads at once."""
SPAN = 8 * CHUNK
"""Words of a row that one program reads."""
FIRSTS = 32
"""Jobs among which a program searches its own at once."""
PAD_NUMBERS = 4
"""Entries of a pad: its mode (abi.h), its word, the address of the records of rows, and their size."""
_MOST = (1 << 31) - SPAN
"""Words of a row that the kernel can count."""


ReadJob = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]  # all are int64
    "ReadJob",
    "parts x out size items row col item inner width starts begins bounds splits bits before pads num_pads checked "
    "flags odd",
)
"""What the kernel is told of a field. Addresses are those of tensors on the device.

Attributes:
    parts: programs for each row.
    x, out: addresses of the field and of its packed values.
    size, items, row, col, item: its `Words`.
    inner: 1 if the columns of an item lie closer to each other than the items of a column.
    width: S.
    starts, begins, bounds, splits, bits, before: addresses of the int32 tensors of `SpanIndex`; `bounds` is
        `cu_seqlens`, or `begins` for rows of one span, which have neither `splits` nor the two behind it.
    pads, num_pads: place of the pads in the table, and their number.
    checked: 1 if masked-out elements are compared with the pads, 0 if they are not read.
    flags: place of the flags: one for each pad, which is 1 if an element differs from it, then one of bools.
    odd: the bits that no bool has; 0 for other dtypes, and if nothing is checked.
"""


class PaddedField(NamedTuple):
    """A padded field [B, S, *F] and its layout on one device; its candidate pads; and whether they, and the bytes of
    bools, are checked."""

    x: Tensor
    layout: RowLayout
    pads: Sequence[PadValue]
    checked: bool


class Reads(NamedTuple):
    """What was read on a device.

    Attributes:
        values: packed values [T, *F].
        flags: int64 [n] on the device; all flags, for one copy to the host.
        places: the flags of each field that was checked: one for each pad, then one of bools.
        records: uint8 [B, n] on the device (core/pads.py), for pads by which rows may differ.
    """

    values: dict[Any, Tensor]
    flags: Tensor
    places: dict[Any, slice]
    records: dict[tuple[Any, PadValue], Tensor]


NOTHING = Reads({}, torch.empty(0, dtype=torch.int64, device="cpu"), {}, {})


def fits(x: Tensor, layout: RowLayout) -> bool:
    """Whether the kernel can read a padded field [B, S, *F]: not the two words of a complex128, which no field of a
    trainer is."""
    words = layout.width * x.shape[2:].numel()
    programs = layout.num_rows * (-(-words // SPAN))
    countable = x.dtype.itemsize <= 8 and words <= _MOST and programs < 1 << 26
    return countable and uses_triton(x.device, call="maskpack")


def read(fields: Mapping[Any, PaddedField], device: torch.device) -> Reads:
    """Reads fields of one device, of those that the kernel can read, with one copy to it and one launch."""
    fields = {key: field for key, field in fields.items() if fits(field.x, field.layout)}
    if not fields:
        return NOTHING
    reads = Reads({}, NOTHING.flags, {}, {})
    firsts, jobs, pads = array("q"), array("q"), array("q")
    pads_at = len(fields) * (1 + len(ReadJob._fields))
    flags_at = pads_at + PAD_NUMBERS * sum(len(field.pads) for field in fields.values())
    spans: dict[int, tuple[int, int, int, int, int, int]] = {}
    copies: list[Tensor] = []
    flags, programs = flags_at, 0
    for key, (x, layout, candidates, checked) in fields.items():
        out = reads.values[key] = _new((layout.num_tokens, *x.shape[2:]), x.dtype, device)
        trials = [trial_of(pad, x.dtype, False) for pad in candidates]
        widest = 1 if any(mode > abi.BY_EDGE for mode, _ in trials) else 8
        form = words_of(x, 2, widest)
        if form is None:
            x = copied(x)
            copies.append(x)
            form = words_of(x, 2, widest)
        assert form is not None
        checked = checked or any(mode == abi.BY_SIGNS for mode, _ in trials)  # which the masked-out words are read for
        place, bools = pads_at + len(pads), checked and x.dtype is torch.bool
        for pad, (mode, (word, _)) in zip(candidates, trials, strict=True):
            pads.extend((mode, repeated(word, x.dtype.itemsize, form.size), 0, 0))
            if has_records(mode):
                shape = x.shape[0], record_size(mode, x, layout.width)
                held = reads.records[key, pad] = _new(shape, torch.uint8, device)
                pads[-2:] = array("q", (held.data_ptr(), shape[1]))
                if not x.numel():
                    held.zero_()
        if id(layout) not in spans:
            spans[id(layout)] = _spans(layout)
        parts = -(-layout.width * form.items // SPAN)
        firsts.append(programs)
        programs += layout.num_rows * parts
        job = ReadJob(
            parts, x.data_ptr(), out.data_ptr(), *form, int(form.item > form.col), layout.width, *spans[id(layout)],
            place, len(candidates), int(checked), flags, repeated(0xFE, 1, form.size) if bools else 0,
        )  # fmt: skip
        jobs.extend(job)
        if checked:
            reads.places[key] = slice(flags - flags_at, flags - flags_at + len(candidates) + bools)
            flags = flags_at + reads.places[key].stop
    tables = sent(device, np.frombuffer(firsts + jobs + pads, np.int64), np.zeros(flags - flags_at, np.int64))
    if programs:
        from maskpack.nesting import read_triton

        read_triton.launch(tables, len(fields), programs)
    return reads._replace(flags=tables[flags_at:])


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _spans(layout: RowLayout) -> tuple[int, int, int, int, int, int]:
    """`starts` to `before` of a ReadJob."""
    index = device_spans(layout)
    bounds = index.begins if index.cu_seqlens is None else index.cu_seqlens
    splits, bits, before = (0 if part is None else part.data_ptr() for part in (index.splits, index.bits, index.before))
    return index.starts.data_ptr(), index.begins.data_ptr(), bounds.data_ptr(), splits, bits, before
