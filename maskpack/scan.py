"""Masks to runs: one read of the mask, on the host or on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.rows import IntArray, RunTable, cumulated
from maskpack.words import from_words, words

_BLOCK_BYTES = 1 << 19  # the flags of one block stay inside the second-level cache


def on_host(mask: Tensor) -> tuple[RunTable, Tensor | None]:
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
