"""Masks to spans, in one read of the mask: by the compiled core, or on a device by the kernels of scan_triton.py.

Masks on devices without Triton are copied to the host and scanned there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import abi, native
from maskpack.core.bits import words
from maskpack.core.index import SpanTable, cumulated
from maskpack.errors import LayoutError
from maskpack.layout.span_index import MOST_TOKENS, SpanIndex, blocks_of, need_int32


def on_host(mask: Tensor) -> native.HostLayout:
    """The layout of a mask [B, S] on the CPU."""
    dtype, bits = readable(mask)
    whole: Any = np.array([0, -1, mask.shape[1]], np.int64).view(abi.CUT)
    room = native.SPANS * len(bits)
    made = native.make_layouts(described(dtype, bits), whole, native.new_jobs(0), len(bits), room, bits.nbytes)
    assert made is not None
    return made.layout(0)


def is_plain(mask: Tensor) -> bool:
    """Whether the zeros of a mask are told by their bits."""
    return not mask.dtype.is_complex and mask.dtype != torch.float8_e8m0fnu


def readable(mask: Tensor) -> tuple[torch.dtype, Tensor]:
    """The dtype and the words of a mask [B, S] on the CPU, as the core reads them: a copy if they do not lie together
    in each row, or if 0 has no bits of its own; of one row if all rows are the same memory."""
    shape, mask = mask.shape, mask if mask.stride(0) else mask[:1]
    if not is_plain(mask):
        mask = mask.to(torch.complex128 if mask.dtype.is_complex else torch.float32) != 0
    bits = words(mask)
    return mask.dtype, (bits if bits.stride(1) == 1 else bits.contiguous()).expand(shape)


def described(dtype: torch.dtype, bits: Tensor) -> native.Structs:
    """ORIGIN [1] of a mask [B, S] of a dtype with plain zeros, whose words lie together in each row. A word is valid if
    one of its bits is set, for floats one other than the sign."""
    origin: Any = np.zeros(1, abi.ORIGIN)
    signed_zero, size = dtype.is_floating_point and "fnuz" not in str(dtype), bits.element_size()
    origin["at"], origin["size"], origin["way"] = bits.data_ptr(), size, abi.OF_MASK
    origin["rows"], origin["width"] = bits.shape
    origin["row_stride"] = bits.stride(0) * size
    origin["significant"] = -1 if size == 8 and not signed_zero else (1 << 8 * size - signed_zero) - 1
    return origin


def on_device(mask: Tensor, num_tokens: int | None) -> tuple[int, dict[str, Any]]:
    """T, and the attributes of RowLayout that the kernels compute of a mask [B, S]: `_table`, `_index`, `lengths`,
    `cu_seqlens`, or the counts of its rows as `_host_counts` or `_device_counts`.

    One synchronisation copies the counts of all rows to the host; if no row has two spans, they are the whole table.
    With a `num_tokens` hint, which implies at most one span in a row, the counts stay on the device and nothing is
    synchronised. Raises LayoutError for sizes beyond int32.
    """
    rows, width = mask.shape
    if rows == 0 or width == 0:
        return 0, {"_table": SpanTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))}
    need_int32("RowLayout.from_mask", num_tokens=num_tokens or 0, width=max(rows, width))
    if num_tokens is not None and not 0 <= num_tokens <= rows * width:
        raise LayoutError(
            f"RowLayout.from_mask: num_tokens is {num_tokens}; a mask {(rows, width)} has 0 to {rows * width} valid "
            "tokens. Give their number."
        )
    from maskpack.layout.launch_triton import device_of  # Triton is imported on first use

    with device_of(mask):
        return _scan(mask, num_tokens)


def _scan(mask: Tensor, hint: int | None) -> tuple[int, dict[str, Any]]:
    from maskpack.layout.scan_triton import list_spans, scan_rows

    rows, width = mask.shape
    valid = _loaded(mask)
    scanned = scan_rows(valid, blocks_of(rows * width if hint is None else hint), hint)
    index = SpanIndex(scanned.starts, scanned.begins, scanned.blocks)
    if hint is not None:
        return hint, {"_device_counts": scanned.counts, "_index": index, "cu_seqlens": scanned.bounded}
    counts, (num_tokens, spans, most) = host_counts(scanned.counts, rows)
    if num_tokens == MOST_TOKENS:  # or more
        num_tokens = int(counts[0].sum(dtype=np.int64))
    need_int32("RowLayout.from_mask", num_tokens=num_tokens)
    if most <= 1:
        return num_tokens, {"_host_counts": counts, "_index": index}
    index = list_spans(valid, scanned, num_tokens, spans)
    return num_tokens, {"lengths": counts[0].astype(np.int64), "_index": index}


class _Pinned(threading.local):
    """Pinned memory of a thread, int32 [n], and the same as an array."""

    buffer = torch.empty(0, dtype=torch.int32, device="cpu")
    array: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def copied(self, line: Tensor) -> npt.NDArray[np.int32]:
        """A copy of a tensor on a GPU. One synchronisation."""
        size = line.numel()
        if size > self.array.size:
            with torch.inference_mode(False):
                self.buffer = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
            self.array = self.buffer.numpy()
        self.buffer[:size].copy_(line)
        return np.array(self.array[:size])


_pinned = _Pinned()


def host_counts(counts: Tensor, rows: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    """`Scan.counts` on the host: [3, B], and the totals. One synchronisation on CUDA."""
    counts = counts[: 3 * rows + 3]
    line = _pinned.copied(counts) if counts.is_cuda else counts.numpy()
    return line[:-3].reshape(3, rows), line[-3:].tolist()


def counted(mask: Tensor) -> Tensor:
    """int32, of a mask [B, S] on a device with Triton, B and S not 0: its first 3 * B numbers are the valid tokens of
    each row, its spans, and its first valid position. No synchronisation."""
    from maskpack.layout.scan_triton import scan_rows

    with torch.cuda.device_of(mask):
        return scan_rows(_loaded(mask.detach()), 1, None).counts


def _loaded(mask: Tensor) -> Tensor:
    """A mask as kernels read it."""
    return mask if mask.dtype in _LOADED and mask.stride(1) == 1 else _not_zero(mask).contiguous()


def spans_of_rows(counts: npt.NDArray[np.int32]) -> SpanTable:
    """The span table of rows with at most one span, from [3, B]: valid tokens, spans and first valid position."""
    lengths, spans, first = counts.astype(np.int64)
    filled = spans > 0
    return SpanTable(first[filled], lengths[filled], cumulated(spans))


_LOADED = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""The dtypes that kernels load without a cast."""


def _not_zero(mask: Tensor) -> Tensor:
    if mask.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return words(mask) != 0
    if mask.dtype.is_floating_point and mask.dtype.itemsize == 1:
        return mask.to(torch.float32) != 0
    return mask != 0
