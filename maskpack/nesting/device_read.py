"""Padded fields on a device, read once: their packed values, and which of their candidate pads fit.

    fields of all layouts --one table of jobs, copied once--> one launch --> values, flags, pads of rows

The plain torch program of a field, which the kernel of read_triton.py replaces:

    values = x[mask];  flags[pad] = (x != unpack(values, layout, pad)).any() for each pad;  odd = (bytes > 1).any()

Nothing synchronises. What does not fit the kernel is left to `checks` (`fits`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskpack.core.backends import uses_triton
from maskpack.core.pads import EDGE, PER_ROW, SIGNED_ZERO, Pad, PadValue, pad_words
from maskpack.layout.row_layout import RowLayout, device_spans

CONSTANT, EDGE_PAD, BY_ROW, BY_SIGN = range(4)
CHUNK = 512
"""Words that a program reads at once."""
SPAN = 8 * CHUNK
"""Words of a row that one program reads."""
FIRSTS = 32
"""Jobs among which a program searches its own at once."""
PAD_NUMBERS = 4
"""Entries of a pad: its kind, its words (two for 16-byte items) and the address of the pads [B] of rows."""
_MOST = (1 << 31) - SPAN
"""Words of a row that the kernel can count."""


class ReadJob(NamedTuple):
    """What the kernel is told of a field. Addresses are those of tensors on the device, strides are in words.

    Attributes:
        parts: programs for each row.
        x, out: addresses of the field and of its packed values.
        size, items: bytes of a word, and words of an element.
        row, col, item: strides of the field.
        inner: 1 if the columns of an item lie closer to each other than the items of a column.
        turn: 1 if an item is two words, else 0.
        width: S.
        starts, begins, bounds, splits, bits, before: addresses of the int32 tensors of `SpanIndex`; `bounds` is
            `cu_seqlens`, or `begins` for rows of one span, which have neither `splits` nor the two behind it.
        pads, num_pads: place of the pads in the table, and their number.
        checked: 1 if masked-out elements are compared with the pads, 0 if they are not read.
        flags: place of the flags: one for each pad, which is 1 if an element differs from it, then one of bools.
        odd: the bits that no bool has; 0 for other dtypes, and if nothing is checked.
    """

    parts: int
    x: int
    out: int
    size: int
    items: int
    row: int
    col: int
    item: int
    inner: int
    turn: int
    width: int
    starts: int
    begins: int
    bounds: int
    splits: int
    bits: int
    before: int
    pads: int
    num_pads: int
    checked: int
    flags: int
    odd: int


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
        row_pads: the pads [B] of fields with PER_ROW or SIGNED_ZERO among their pads.
    """

    values: dict[Any, Tensor]
    flags: Tensor
    places: dict[Any, slice]
    row_pads: dict[tuple[Any, PadValue], Tensor]


NOTHING = Reads({}, torch.empty(0, dtype=torch.int64, device="cpu"), {}, {})


def fits(x: Tensor, layout: RowLayout) -> bool:
    """Whether the kernel can read a padded field [B, S, *F]."""
    words = layout.width * x.shape[2:].numel() * max(x.dtype.itemsize // 8, 1)
    programs = layout.num_rows * (-(-words // SPAN))
    differentiable = x.requires_grad and torch.is_grad_enabled()
    return not differentiable and words <= _MOST and programs < 1 << 26 and uses_triton(x.device, call="maskpack")


def read(fields: Mapping[Any, PaddedField], device: torch.device) -> Reads:
    """Reads fields of one device, with one copy to it and one launch."""
    values: dict[Any, Tensor] = {}
    places: dict[Any, slice] = {}
    jobs, firsts, pads = array("q"), array("q"), array("q")
    pads_at = len(fields) * (1 + len(ReadJob._fields))
    flags_at = pads_at + PAD_NUMBERS * sum(len(field.pads) for field in fields.values())
    row_pads: dict[tuple[Any, PadValue], Tensor] = {}
    addresses: dict[int, tuple[int, int, int, int, int, int]] = {}
    copies: list[Tensor] = []
    flags = flags_at
    programs = 0
    for key, (x, layout, candidates, checked) in fields.items():
        out = values[key] = _new((layout.num_tokens, *x.shape[2:]), x.dtype, device)
        kinds = [_by_row(pad, x.dtype) for pad in candidates]
        source, size, items, row, col, item = _words(x, 8 if not any(kinds) else 1)
        copies.append(source)
        at, bools = pads_at + len(pads), checked and x.dtype is torch.bool
        for pad, kind in zip(candidates, kinds, strict=True):
            if kind is not None:
                own = _new((x.shape[0],), x.dtype, device)
                row_pads[key, pad] = own if x.numel() and kind else own.zero_()
            held = row_pads[key, pad].data_ptr() if kind else 0
            pads.extend((*_entry(pad, kind, x.dtype, size), held))
        if id(layout) not in addresses:
            addresses[id(layout)] = _addresses(layout)
        parts = -(-layout.width * items // SPAN)
        firsts.append(programs)
        programs += layout.num_rows * parts
        job = ReadJob(
            parts, source.data_ptr(), out.data_ptr(), size, items, row, col, item, int(item > col),
            int(x.dtype.itemsize == 16), layout.width, *addresses[id(layout)], at, len(candidates), int(checked), flags,
            _repeated(0xFE, 1, size) if bools else 0,
        )  # fmt: skip
        jobs.extend(job)
        if checked:
            places[key] = slice(flags - flags_at, flags - flags_at + len(candidates) + bools)
            flags = flags_at + places[key].stop
    line = torch.zeros(flags, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    line.numpy()[:flags_at] = np.frombuffer(firsts + jobs + pads, np.int64)
    tables = line.to(device, non_blocking=True)
    if programs:
        from maskpack.nesting import read_triton as _kernel

        _kernel.launch(tables, len(fields), len(fields), programs)
    return Reads(values, tables[flags_at:], places, row_pads)


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _by_row(pad: PadValue, dtype: torch.dtype) -> int | None:
    """The kind of a pad that differs from row to row; CONSTANT for SIGNED_ZERO of a dtype with one zero."""
    if pad is PER_ROW:
        return BY_ROW
    if pad is not SIGNED_ZERO:
        return None
    return BY_SIGN if dtype.is_floating_point and dtype.itemsize > 1 else CONSTANT


def _entry(pad: PadValue, kind: int | None, dtype: torch.dtype, size: int) -> tuple[int, int, int]:
    """Kind and words of a pad."""
    if pad is EDGE:
        return EDGE_PAD, 0, 0
    if kind:
        return kind, 0, 0
    bits = (0,) if isinstance(pad, Pad) else pad_words(pad, dtype)
    assert bits is not None
    words = [_repeated(word, min(dtype.itemsize, 8), size) for word in bits]
    return CONSTANT, words[0], words[-1]


def _repeated(word: int, size: int, wide: int) -> int:
    """A word of `size` bytes, repeated to fill `wide` bytes, as an int64 that is zero-extended."""
    line = (word & ((1 << 8 * size) - 1)).to_bytes(size, "little") * (wide // size)
    return int.from_bytes(line.ljust(8, b"\0"), "little", signed=True)


def _addresses(layout: RowLayout) -> tuple[int, int, int, int, int, int]:
    """`starts` to `before` of a ReadJob."""
    index = device_spans(layout)
    bounds = index.begins if index.cu_seqlens is None else index.cu_seqlens
    splits, bits, before = (0 if part is None else part.data_ptr() for part in (index.splits, index.bits, index.before))
    return index.starts.data_ptr(), index.begins.data_ptr(), bounds.data_ptr(), splits, bits, before


def _words(x: Tensor, widest: int) -> tuple[Tensor, int, int, int, int, int]:
    """`x` [B, S, *F], copied if need be so that the words of an element are one stride apart; bytes of a word, words of
    an element, and the strides of rows, columns and words. Adjacent words are joined to up to `widest` bytes."""
    size, row, col = x.dtype.itemsize, x.stride(0), x.stride(1)
    if x.dim() == 2 and size <= 8 and not x.is_neg() and not x.is_conj():
        return x, size, 1, row, col, 1
    x = x.resolve_conj().resolve_neg()
    items, item = x.shape[2:].numel(), 1 if x.is_contiguous() else _item_stride(x)
    if item is None or (size == 16 and item != 1):
        return _words(x.contiguous(), widest)
    if size == 16:
        size, items, row, col = 8, 2 * items, 2 * row, 2 * col
    if item == 1 and items > 1:
        bound = items * size | row * size | col * size | x.data_ptr()
        wide = next(n for n in (8, 4, 2, 1) if n <= max(widest, size) and bound % n == 0 and n >= size)
        size, items, row, col = wide, items * size // wide, row * size // wide, col * size // wide
    return x, size, items, row, col, item


def _item_stride(x: Tensor) -> int | None:
    """The stride between adjacent items of an element [B, S, *F], or None if it is not the same for all."""
    item = reach = None
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if reach is not None and stride != reach:
            return None
        item = stride if item is None else item
        reach = size * stride
    return 1 if item is None else item
