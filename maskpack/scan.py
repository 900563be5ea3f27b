"""Masks to runs: one read of the mask, on the host or on its device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.rows import IntArray, RunTable, cumulated
from maskpack.words import Words, from_words, words

_BLOCK_BYTES = 1 << 19  # the flags of one block stay inside the second-level cache
_THREADED_BYTES = 1 << 24


def on_host(mask: Tensor) -> RunTable:
    """The runs of a mask [B, S] on the CPU. Large masks are read by as many threads as torch uses.

    Neighbours are compared as bits, which one pass over the memory does for any dtype; only where they differ, and in
    the first column, is a value looked at.
    """
    mask = mask != 0 if mask.is_complex() else mask
    bits = words(mask).numpy()
    rows, width = bits.shape
    if width == 0:
        return RunTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))
    threads = torch.get_num_threads() if bits.nbytes >= _THREADED_BYTES else 1
    share = max(1, -(-rows // threads))
    parts = [bits[top : top + share] for top in range(0, rows, share)]
    if len(parts) <= 1:
        found = [_stretches(part) for part in parts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(_stretches, parts))
    row = np.concatenate([part[0] + index * share for index, part in enumerate(found)] or [np.zeros(0, np.int64)])
    column = np.concatenate([part[1] for part in found] or [np.zeros(0, np.int64)])
    on = _not_zero(from_words(bits[row, column], mask.dtype)).numpy()
    return _runs(row, column, on, rows, width)


def _stretches(bits: Words) -> tuple[IntArray, IntArray]:
    """Row and column where each stretch of equal words begins. Flags are read eight at a time, because few are set."""
    rows, width = bits.shape
    stride = -(-width // 8) * 8
    step = max(1, _BLOCK_BYTES // stride)
    flags = np.zeros((min(step, rows), stride), np.bool_)
    cells = [np.zeros(0, np.int64)]
    for top in range(0, rows, step):
        block = bits[top : top + step]
        changed = flags[: len(block)]
        np.not_equal(block[:, 1:], block[:, :-1], out=changed[:, 1:width])
        changed[:, 0] = True
        some = np.flatnonzero(changed.reshape(-1).view(np.uint64) != 0)
        word, byte = np.nonzero(changed.reshape(-1, 8)[some])
        cells.append(top * stride + some[word] * 8 + byte)
    row, column = np.divmod(np.concatenate(cells), stride)
    return row, column


def _runs(row: IntArray, column: IntArray, on: npt.NDArray[np.bool_], rows: int, width: int) -> RunTable:
    """From stretches of equal values: each begins at (row, column) and is real where `on`."""
    was_on = np.zeros(on.size, np.bool_)
    was_on[1:] = on[:-1]
    was_on[column == 0] = False
    last = np.ones(on.size, np.bool_)
    last[:-1] = row[1:] != row[:-1]
    begin, stop = on & ~was_on, was_on & ~on
    ends = np.where(stop, column, width)[stop | (last & on)]
    splits = np.searchsorted(row[begin], np.arange(rows + 1)).astype(np.int64)
    return RunTable(column[begin], ends - column[begin], splits)


class DeviceRuns(NamedTuple):
    """A run table on the device, with the row lengths int64 [B] that came to the host on the way."""

    starts: Tensor
    counts: Tensor
    splits: Tensor
    lengths: IntArray


def on_device(mask: Tensor) -> RunTable | DeviceRuns:
    """The runs of a mask [B, S] with one synchronisation, which brings the counts of every row to the host; where no
    row has two runs, that is the whole table."""
    rows, width = mask.shape
    if rows == 0 or width == 0:
        return RunTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))
    real = _not_zero(mask)
    begin, end = real.clone(), real.clone()
    begin[:, 1:] &= ~real[:, :-1]
    end[:, :-1] &= ~real[:, 1:]
    counts: Any = torch.stack([real.sum(1), begin.sum(1), begin.to(torch.uint8).argmax(1)]).cpu().numpy()
    lengths, runs, first = counts
    splits = cumulated(runs)
    if int(runs.max()) <= 1:
        some = runs > 0
        return RunTable(first[some], lengths[some], splits)
    n = int(splits[-1])
    begins = torch.nonzero_static(begin.view(-1), size=n).view(-1)
    ends = torch.nonzero_static(end.view(-1), size=n).view(-1)
    return DeviceRuns(
        (begins % width).to(torch.int32),
        (ends - begins + 1).to(torch.int32),
        torch.from_numpy(splits).to(mask.device, non_blocking=True),
        lengths,
    )


def _not_zero(mask: Tensor) -> Tensor:
    if mask.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return words(mask) != 0
    if mask.dtype.is_floating_point and mask.dtype.itemsize == 1:
        return mask.to(torch.float32) != 0
    return mask != 0
