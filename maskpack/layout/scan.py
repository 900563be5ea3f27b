"""Masks to runs: one read of the mask, on the host or on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core.backends import uses_triton
from maskpack.core.bits import from_words, words
from maskpack.core.index import IntArray, SpanTable, cumulated
from maskpack.errors import LayoutError
from maskpack.layout.span_index import BLOCK, MOST_TOKENS, SpanIndex, blocks_of, need_int32

_BLOCK_BYTES = 1 << 19  # the flags of one block stay inside the second-level cache


def on_host(mask: Tensor) -> tuple[SpanTable, Tensor | None]:
    """The runs of a mask [B, S] on the CPU; and where all real positions have one value and all others are 0 bits, that
    value, a tensor () of its dtype.

    Neighbours are compared as bits, which one pass over the memory does for any dtype; only where they differ, and in
    the first column, is a value looked at. Flags are read eight at a time, because few are set.
    """
    complex_mask = mask.is_complex()
    mask = mask != 0 if complex_mask else mask
    bits = words(mask).numpy()
    rows, width = bits.shape
    stride = -(-width // 8) * 8
    step = max(1, _BLOCK_BYTES // max(stride, 1))
    flags = np.zeros((min(step, rows), stride), np.bool_)
    found: list[tuple[IntArray, IntArray]] = []
    for top in range(0, rows if width else 0, step):
        block = bits[top : top + step]
        changed = flags[: len(block)]
        np.not_equal(block[:, 1:], block[:, :-1], out=changed[:, 1:width])
        changed[:, 0] = True
        some = np.flatnonzero(changed.reshape(-1).view(np.uint64) != 0)
        word, byte = np.nonzero(changed.reshape(-1, 8)[some])
        row, column = np.divmod(some[word] * 8 + byte, stride)
        found.append((row + top, column))
    row = np.concatenate([part for part, _ in found]) if found else np.zeros(0, np.int64)
    column = np.concatenate([part for _, part in found]) if found else np.zeros(0, np.int64)
    stretches = bits[row, column]
    values = from_words(stretches, mask.dtype)
    on = _not_zero(values).numpy()
    real = np.flatnonzero(stretches)
    alike = real.size > 0 and bool((stretches[real] == stretches[real[0]]).all()) and bool(on[real].all())
    return _runs(row, column, on, rows, width), values[int(real[0])] if alike and not complex_mask else None


def _runs(row: IntArray, column: IntArray, on: npt.NDArray[np.bool_], rows: int, width: int) -> SpanTable:
    """From stretches of equal values: each begins at (row, column) and is real where `on`."""
    was_on = np.zeros(on.size, np.bool_)
    was_on[1:] = on[:-1]
    was_on[column == 0] = False
    last = np.ones(on.size, np.bool_)
    last[:-1] = row[1:] != row[:-1]
    begin, stop = on & ~was_on, was_on & ~on
    ends = np.where(stop, column, width)[stop | (last & on)]
    splits = np.searchsorted(row[begin], np.arange(rows + 1)).astype(np.int64)
    return SpanTable(column[begin], ends - column[begin], splits)


class Found(NamedTuple):
    """What a scan on a device knows of a layout: T, and attributes of RowLayout that follow from the runs."""

    num_tokens: int
    known: dict[str, Any]


def on_device(mask: Tensor, promised: int | None) -> Found:
    """The runs of a mask [B, S]. One synchronisation, which brings the counts of every row to the host; where no row
    has two runs, that is the whole table. None where T is promised, and at most one run a row with it: then the counts
    stay there, as `promised`. Raises LayoutError for what int32 does not count."""
    rows, width = mask.shape
    if rows == 0 or width == 0:
        return Found(
            0, {"table": SpanTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))}
        )
    need_int32("RowLayout.from_mask", num_tokens=promised or 0, width=max(rows, width))
    if promised is not None and not 0 <= promised <= rows * width:
        raise LayoutError(
            f"RowLayout.from_mask: num_tokens is {promised}; a mask {(rows, width)} has 0 to {rows * width} real positions. "
            "Give the number of those that are real."
        )
    with torch.cuda.device_of(mask):  # Triton launches on the current device
        return _scan(mask, promised)


def _scan(mask: Tensor, promised: int | None) -> Found:
    rows, width = mask.shape
    if uses_triton(mask.device):
        from maskpack.layout.scan_triton import list_runs, scan_rows

        real = mask if mask.dtype in _LOADED and mask.stride(1) == 1 else _not_zero(mask).contiguous()
    else:
        list_runs, scan_rows = _list_runs, _scan_rows
        real = _not_zero(mask).contiguous()
    entries = blocks_of(rows * width if promised is None else promised)
    counts, cu_seqlens, splits, blocks = scan_rows(real, entries, promised is not None)
    index = SpanIndex(counts[2], cu_seqlens, blocks)
    if promised is not None:
        return Found(promised, {"promised": counts, "index": index})
    scanned = counts.cpu().numpy()
    num_tokens = int(scanned[0].sum(dtype=np.int64))
    need_int32("RowLayout.from_mask", num_tokens=num_tokens)
    if int(scanned[1].max()) <= 1:
        return Found(num_tokens, {"scanned": scanned, "index": index})
    index = list_runs(real, cu_seqlens, splits, num_tokens, int(scanned[1].sum(dtype=np.int64)))
    return Found(num_tokens, {"lengths": scanned[0].astype(np.int64), "index": index})


def table_of_rows(scanned: npt.NDArray[np.int32]) -> SpanTable:
    """The table of rows of one run at most, from [3, B]: real positions, runs and first real position of each row."""
    lengths, runs, first = scanned.astype(np.int64)
    some = runs > 0
    return SpanTable(first[some], lengths[some], cumulated(runs))


_LOADED = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""The dtypes that kernels load as they are."""


def _scan_rows(real: Tensor, entries: int, promised: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int32 [3, B]: real positions, runs and first real position of each row; [B + 1]: where rows begin among the
    packed tokens, and among the runs, or the largest int32; and the blocks of rows of one run."""
    begin = _begins(real)
    counts = torch.stack([real.sum(1), begin.sum(1), begin.to(torch.uint8).argmax(1)]).to(torch.int32)
    ends = torch.nn.functional.pad(_sums(counts[:2]), (1, 0))
    return counts, ends[0], ends[1], _blocks(ends[0], entries)


def _sums(counts: Tensor) -> Tensor:
    return counts.cumsum(1, dtype=torch.int64).clamp_(max=MOST_TOKENS).to(torch.int32)


def _begins(real: Tensor) -> Tensor:
    begin = real.clone()
    begin[:, 1:] &= ~real[:, :-1]
    return begin


def _list_runs(real: Tensor, cu_seqlens: Tensor, splits: Tensor, num_tokens: int, runs: int) -> SpanIndex:
    """The index of rows of several runs."""
    width = real.shape[1]
    end = real.clone()
    end[:, :-1] &= ~real[:, 1:]
    first = torch.nonzero_static(_begins(real).view(-1), size=runs).view(-1)
    last = torch.nonzero_static(end.view(-1), size=runs).view(-1)
    begins = torch.nn.functional.pad((last - first + 1).cumsum(0, dtype=torch.int32), (1, 0))
    starts, rows = (first % width).to(torch.int32), (first // width).to(torch.int32)
    words = torch.nn.functional.pad(real, (0, -width % 32)).view(real.shape[0], -1, 32)
    bits = (words.to(torch.int64) << torch.arange(32, device=real.device)).sum(2).to(torch.int32)
    sums = words.sum(2).view(-1).cumsum(0, dtype=torch.int32).view(bits.shape)
    before = sums - words.sum(2)
    blocks = _blocks(begins, blocks_of(num_tokens))
    return SpanIndex(starts, begins, blocks, rows, splits, cu_seqlens, bits, before.to(torch.int32))


def _blocks(begins: Tensor, entries: int) -> Tensor:
    """`SpanIndex.blocks`; beyond the last token, the last run."""
    tokens = torch.arange(0, BLOCK * entries, BLOCK, device=begins.device)
    found = torch.searchsorted(begins, tokens, right=True, out_int32=True) - 1
    return found.clamp_(max=begins.shape[0] - 2)


def _not_zero(mask: Tensor) -> Tensor:
    if mask.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return words(mask) != 0
    if mask.dtype.is_floating_point and mask.dtype.itemsize == 1:
        return mask.to(torch.float32) != 0
    return mask != 0
