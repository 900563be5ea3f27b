"""RowLayout: a mask in computed form. All conversions between masks, spans, lengths and indices are here.

    mask [B=3, width=6]       spans (start, length)   lengths   cu_seqlens     indices into the flat [B * width]
    . . # # # .               (2, 3)                  3         0 3 5 5        2 3 4 | 6 11 |
    # . . . . #               (0, 1) (5, 1)           2
    . . . . . .               none                    0

The span table is computed on the device of the mask and copied to the host once, for planning and for taking rows.
Shape letters: B rows, N spans, T valid tokens in all, S the padded width.
"""

# The functions at the end read what a layout remembers.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core import native
from maskpack.core.arguments import list_of, said, whole
from maskpack.core.backends import uses_triton
from maskpack.core.index import (
    IntArray,
    Rows,
    SpanTable,
    cumulated,
    ranges,
    row_index,
    table_rows,
)
from maskpack.core.native import HostLayout
from maskpack.core.tensors import device_here, host_array, need_tensor, numbered
from maskpack.errors import LayoutError
from maskpack.layout import scan
from maskpack.layout.span_index import SpanIndex, index_of, need_int32, places_of, spans_of

_CPU = torch.device("cpu")
_FEW_BYTES = 256
"""A layout is pickled as bits only if that saves more bytes than this."""
_MOST = (1 << 62) - 1
"""The largest number of positions of a layout."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The positions of the valid tokens in each row. Immutable; build one with a `from_...` constructor.

    Attributes:
        num_rows: B.
        width: the padded width, S.
        num_tokens: the number of valid tokens in all rows, T.
        device: the device of the masks, indices and offsets of this layout.
        anchor: the column at which batches of different widths are aligned when they are joined; padding is added on
            both sides of it. 0 for rows padded on the right, the width for rows padded on the left.
    """

    num_rows: int
    width: int
    num_tokens: int
    device: torch.device
    anchor: int = 0

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_mask(cls, mask: Tensor, *, num_tokens: int | None = None) -> RowLayout:
        """Builds a layout from a mask [B, S] of any dtype; non-zero entries are valid tokens. The rows of a mask
        [..., S] are those of all its leading dims; a mask [S] is one row.

        Args:
            mask: is scanned on its device. One synchronisation on CUDA.
            num_tokens: a hint that saves the synchronisation: the number of valid tokens of a mask with at most one
                span in a row. If it is wrong, results are wrong, but nothing is read or written out of bounds, and
                the first use of the layout on the host raises LayoutError. Without Triton it is checked at once.

        Raises LayoutError if the mask has no dim, or is jagged, or `num_tokens` is wrong; on CUDA also for more than
        2^31 - 1 valid tokens, the limit of int32.
        """
        need_tensor(mask, "mask", "RowLayout.from_mask")
        num_tokens = None if num_tokens is None else whole(num_tokens, "num_tokens", 0, "RowLayout.from_mask")
        if mask.is_nested or not mask.dim():
            shape, remedy = "()", "Reshape the mask to one entry per row and position."
            if mask.is_nested:
                shape = "nested"
                remedy = "Give its lengths: RowLayout.from_lengths([len(row) for row in mask.unbind()])."
            raise LayoutError(f"RowLayout.from_mask: mask is {shape}; expected a dense mask (B, width). {remedy}")
        if mask.dim() != 2:
            mask = mask.reshape(math.prod(mask.shape[:-1]), mask.shape[-1])
        rows, width = mask.shape
        if not uses_triton(mask.device):
            found = scan.on_host(mask.detach().cpu())
            _check_num_tokens(found.table, num_tokens)
            return layout_of_core(found).to(mask.device)
        total, cache = scan.on_device(mask.detach(), num_tokens)
        if "_table" in cache:
            _check_num_tokens(cache["_table"], num_tokens)
        layout = RowLayout(rows, width, total, mask.device)
        layout.__dict__.update(cache)
        return layout

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int] | IntArray,
        width: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> RowLayout:
        """Builds a layout of rows padded on the right: the valid tokens of row b are at 0 to `lengths[b] - 1`.

        `lengths` is an integer [B]; `width` defaults to the longest row. One synchronisation if `lengths` is on CUDA.
        Raises LayoutError for negative lengths, fractions, and lengths beyond `width`.
        """
        if device is None:
            device = lengths.device if isinstance(lengths, Tensor) else "cpu"
        call = "RowLayout.from_lengths"
        host = whole_numbers(lengths, call, "lengths", "(B,)")
        return cls._from_lengths(host, width, device_here(device, call), call)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | Sequence[int] | IntArray, width: int | None = None) -> RowLayout:
        """Builds a layout from cumulative lengths, integer [B + 1], non-decreasing from 0. One synchronisation on
        CUDA."""
        call = "RowLayout.from_cu_seqlens"
        host = whole_numbers(cu_seqlens, call, "cu_seqlens", "(B + 1,)")
        if host.size == 0 or int(host[0]) != 0:
            raise LayoutError(
                f"{call}: cu_seqlens begins with {host[:1].tolist()}; expected 0. Pass the cumulative row "
                "lengths with their leading 0."
            )
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else torch.device("cpu")
        return cls._from_lengths(np.diff(host), width, device, call)

    @classmethod
    def _from_lengths(cls, host: IntArray, width: int | None, device: torch.device | str, call: str) -> RowLayout:
        shortest, longest = (int(host.min()), int(host.max())) if host.size else (0, 0)
        width = max(longest, 0) if width is None else whole(width, "width", 0, call)
        if shortest < 0 or longest > width or host.size * width > _MOST:
            fitting = f"0 to the width, {width}" if longest > width or shortest < 0 else "rows that fit into memory"
            raise LayoutError(
                f"{call}: lengths run from {shortest} to {longest}; expected {fitting}. "
                "Clip the lengths or give the true width."
            )
        filled = host > 0
        splits = cumulated(filled.astype(np.int64))
        return layout_of_table(width, SpanTable(np.zeros(int(splits[-1]), np.int64), host[filled], splits), device)

    @classmethod
    def from_spans(
        cls,
        starts: Sequence[int] | IntArray,
        counts: Sequence[int] | IntArray,
        spans_per_row: Sequence[int] | IntArray,
        width: int,
        *,
        device: torch.device | str = "cpu",
        anchor: int = 0,
    ) -> RowLayout:
        """Builds a layout from spans: `starts` and `counts` [N], and `spans_per_row` [B], which sums to N.

        The spans of a row must be in order and must not touch each other. Raises LayoutError otherwise.
        """
        call = "RowLayout.from_spans"
        width, anchor = whole(width, "width", 0, call), whole(anchor, "anchor", 0, call)
        table = SpanTable(
            whole_numbers(starts, call, "starts", "(N,)").copy(),
            whole_numbers(counts, call, "counts", "(N,)").copy(),
            cumulated(whole_numbers(spans_per_row, call, "spans_per_row", "(B,)")),
        )
        problem = _problem(table, width) or (None if 0 <= anchor <= width else f"the anchor is column {anchor}")
        if problem:
            raise LayoutError(
                f"{call}: {problem}; expected maximal spans, in order, within the width {width}. Sort and join them."
            )
        return layout_of_table(width, table, device_here(device, call), anchor)

    # ---------------------------------------------------------------- sizes, on the host

    @cached_property
    def _table(self) -> SpanTable:
        if "_host_counts" in self.__dict__:
            return scan.spans_of_rows(self.__dict__["_host_counts"])
        if "_device_counts" in self.__dict__:
            table = scan.spans_of_rows(scan.host_counts(self.__dict__["_device_counts"], self.num_rows)[0])
            _check_num_tokens(table, self.num_tokens)
            return table
        return spans_of(self._index)

    @cached_property
    def _index(self) -> SpanIndex:
        return index_of(self._table, self.width, self.device)

    @cached_property
    def lengths(self) -> IntArray:
        """int64 [B] on the host: the number of valid tokens in each row."""
        if "_host_counts" in self.__dict__:
            return self.__dict__["_host_counts"][0].astype(np.int64)
        ends = cumulated(self._table.counts)
        return ends[self._table.splits[1:]] - ends[self._table.splits[:-1]]

    @cached_property
    def row_offsets(self) -> IntArray:
        """int64 [B + 1] on the host: `cu_seqlens` as a NumPy array."""
        return cumulated(self.lengths)

    @cached_property
    def max_length(self) -> int:
        """Length of the longest row; 0 if there are no rows."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def _min_length(self) -> int:
        return int(self.lengths.min()) if self.num_rows else 0

    @cached_property
    def _core(self) -> HostLayout:
        return HostLayout(self.width, self._table, self.row_offsets)

    # ---------------------------------------------------------------- derived tensors, on the device

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [B + 1]: the offsets tensor that all jagged fields with these row lengths share. One synchronisation
        at the first use of a layout scanned on CUDA."""
        return shared_offsets(self.row_offsets, self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [B + 1]: cumulative row lengths for varlen attention. Never above T, so that kernels that read them
        stay in bounds. Raises LayoutError for more than 2^31 - 1 valid tokens."""
        need_int32("RowLayout.cu_seqlens", num_tokens=self.num_tokens)
        if "_index" in self.__dict__:
            return self._index.begins if self._index.cu_seqlens is None else self._index.cu_seqlens
        return self.offsets.to(torch.int32)

    @cached_property
    def indices(self) -> Tensor:
        """int64 [T]: the position of each valid token in the flattened [B * S]. No synchronisation."""
        if self.device.type == "cpu":
            rows = np.repeat(np.arange(self.num_rows), np.diff(self._table.splits))
            return torch.from_numpy(ranges(rows * self.width + self._table.starts, self._table.counts))
        return places_of(self._index, self.num_rows, self.width, self.num_tokens)

    def to_mask(self, dtype: torch.dtype = torch.bool) -> Tensor:
        """Returns the mask [B, S]: 1 at valid tokens, 0 elsewhere."""
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"RowLayout.to_mask: dtype is {said(dtype)}; expected a torch.dtype. Pass torch.bool.")
        mask = torch.zeros(self.num_rows * self.width, dtype=torch.bool, device=self.device)
        return mask.index_fill_(0, self.indices, True).view(self.num_rows, self.width).to(dtype)

    # ---------------------------------------------------------------- new layouts from old ones

    def to(self, device: torch.device | str) -> RowLayout:
        """Returns the same layout on another device."""
        if device == self.device:
            return self
        device = numbered(device_here(device, "RowLayout.to"))
        if device == self.device:
            return self
        return layout_of_table(self.width, self._table, device, self.anchor)

    def take(self, rows: Rows) -> RowLayout:
        """Selects rows by a slice, indices (repeated or negative ones too), or a bool mask [B]."""
        index = row_index(rows, self.num_rows, "RowLayout.take")
        if isinstance(rows, slice) and index.size and rows.step in (None, 1) and self.device.type == "cpu":
            return self._between(int(index[0]), int(index[-1]) + 1)
        return layout_of_table(self.width, table_rows(self._table, index), self.device, self.anchor)

    def _between(self, begin: int, end: int) -> RowLayout:
        """The rows from `begin` to `end`, on the CPU."""
        table, bounds = self._table, self.row_offsets[begin : end + 1]
        splits = table.splits[begin : end + 1]
        first, last = int(splits[0]), int(splits[-1])
        own = SpanTable(table.starts[first:last], table.counts[first:last], splits - first)
        return layout_of_core(HostLayout(self.width, own, bounds - bounds[0]), self.anchor)

    def narrow(self, start: int, stop: int) -> RowLayout:
        """Returns the layout of `mask[:, start:stop]`, computed from the spans."""
        start, stop = (whole(column, "a column", 0, "RowLayout.narrow") for column in (start, stop))
        if not start <= stop <= self.width:
            raise LayoutError(
                f"RowLayout.narrow: columns {start} to {stop}; expected 0 <= start <= stop <= {self.width}. Choose "
                "columns within the width."
            )
        anchor = min(max(self.anchor - start, 0), stop - start)
        own = native.cut(self._core, start, stop - start)
        if self.device.type == "cpu":
            layout = layout_of_core(own, anchor)
        else:
            layout = layout_of_table(own.width, own.table, self.device, anchor)
        layout.__dict__["part_of"] = self, start
        return layout

    @staticmethod
    def cat(layouts: Sequence[RowLayout]) -> RowLayout:
        """Concatenates the rows of several layouts. Layouts of different widths are padded so that their anchors
        align."""
        layouts = list_of(layouts, RowLayout, "RowLayout.cat", "Pass a list of layouts.")
        left = max(layout.anchor for layout in layouts)
        right = max(layout.width - layout.anchor for layout in layouts)
        tables = [(layout._table, left - layout.anchor) for layout in layouts]
        columns = [(table.starts + more, table.counts, np.diff(table.splits)) for table, more in tables]
        starts, counts, spans_per_row = map(np.concatenate, zip(*columns, strict=True))
        table = SpanTable(starts, counts, cumulated(spans_per_row))
        return layout_of_table(left + right, table, layouts[0].device, left)

    def _compact(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays of a pickle: starts, counts and spans per row as the narrowest unsigned integers; or the mask as
        bits (uint8 [B, ceil(width / 8)]), if that is clearly smaller."""
        numbers = self._table.starts, self._table.counts, np.diff(self._table.splits)
        parts = tuple(part.astype(np.min_scalar_type(int(part.max(initial=0)))) for part in numbers)
        if sum(part.nbytes for part in parts) <= self.num_rows * -(-self.width // 8) + _FEW_BYTES:
            return parts
        return (native.mask_bits(self._core),)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.width, str(self.device), self.anchor, *self._compact())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowLayout):
            return NotImplemented
        return self.width == other.width and all(
            np.array_equal(a, b) for a, b in zip(self._table, other._table, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RowLayout(rows={self.num_rows}, width={self.width}, tokens={self.num_tokens}, "
            f"spans={self._table.starts.size}, device={str(self.device)!r})"
        )


def _restored(width: int, device: str, anchor: int, *compact: npt.NDArray[Any]) -> RowLayout:
    if len(compact) == 1:
        return layout_of_core(native.layout_of_bits(compact[0], width), anchor).to(device)
    starts, counts, spans_per_row = (part.astype(np.int64) for part in compact)
    return layout_of_table(width, SpanTable(starts, counts, cumulated(spans_per_row)), device, anchor)


# -------------------------------------------------------------------- for the packages above


def layout_of_table(width: int, table: SpanTable, device: torch.device | str, anchor: int = 0) -> RowLayout:
    """From a table that is not checked again. Raises LayoutError for more positions than int64 can count."""
    rows = table.splits.size - 1
    if rows * width > _MOST:
        raise LayoutError(
            f"RowLayout: {rows} rows of width {width}; expected at most {_MOST} positions. Give the true width."
        )
    layout = RowLayout(rows, width, int(table.counts.sum()), numbered(device), anchor)
    layout.__dict__["_table"] = table
    if layout.device.type != "cpu":
        layout.__dict__["_index"] = index_of(table, width, layout.device)
    return layout


def layout_of_core(own: HostLayout, anchor: int = 0) -> RowLayout:
    """From arrays of the compiled core, on the CPU."""
    layout = RowLayout(own.bounds.size - 1, own.width, int(own.bounds[-1]), _CPU, anchor)
    layout.__dict__.update(_table=own.table, row_offsets=own.bounds, _core=own)
    return layout


def layout_of_offsets(offsets: Tensor, on_host: IntArray) -> RowLayout:
    """The layout of the rows of jagged values, from their offsets [B + 1] and a copy of these on the host. It keeps the
    offsets, and what kernels read is made when they need it."""
    own = RowLayout.from_cu_seqlens(on_host)
    layout = replace(own, device=numbered(offsets.device))
    layout.__dict__.update(_table=own._table, row_offsets=on_host, offsets=offsets.to(torch.int64))
    return layout


def layout_of_marks(marks: Tensor, rows: RowLayout) -> RowLayout:
    """The layout of the tokens at which numbers [T] are not 0, in the columns of `rows`, which have no padding before
    their tokens. One synchronisation on CUDA."""
    valid, bounds = marks.ne(0).cpu().numpy(), rows.row_offsets
    before, after = np.zeros(valid.size, np.bool_), np.zeros(valid.size, np.bool_)
    before[1:], after[:-1] = valid[:-1], valid[1:]
    filled = np.flatnonzero(rows.lengths)
    before[bounds[filled]] = after[bounds[filled + 1] - 1] = False
    starts, ends = np.flatnonzero(valid & ~before), np.flatnonzero(valid & ~after) + 1
    row = np.searchsorted(bounds, starts, side="right") - 1
    splits = cumulated(np.bincount(row, minlength=rows.num_rows))
    return layout_of_table(rows.width, SpanTable(starts - bounds[row], ends - starts, splits), rows.device)


class _Shared(NamedTuple):
    """An offsets tensor, which it does not keep alive, and how often it was written to."""

    tensor: ref[Tensor]
    version: int


_shared: dict[tuple[Any, ...], _Shared] = {}


def shared_offsets(
    row_offsets: IntArray, device: torch.device, given: Tensor | None = None, *, alike: int = 0
) -> Tensor:
    """Offsets int64 [B + 1] on a device: one tensor for all that are equal, as long as anything has it and nobody
    writes to it; on CUDA those of the current stream. Torch takes jagged tensors together only if they have one offsets
    tensor. If there is none yet, it is `given`, the same numbers on the device, or made. `alike` is the number of axes
    of the batch with equal rows that have theirs already: this one gets another tensor."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = row_offsets.tobytes(), alike, device, stream
    shared = None if torch.compiler.is_compiling() else _shared.get(key)
    tensor = None if shared is None else shared.tensor()
    if tensor is not None and shared is not None and tensor._version == shared.version:
        return tensor
    tensor = None if given is None or alike else given.to(torch.int64)  # given by the first axis, too
    if tensor is None:
        tensor = torch.from_numpy(np.array(row_offsets)).to(device, non_blocking=True)
    if type(tensor) is Tensor and not tensor.is_inference() and not torch.compiler.is_compiling():
        _shared[key] = own = _Shared(
            ref(tensor, lambda _: _shared.pop(key, None) if _shared.get(key) is own else None), tensor._version
        )
    return tensor


def host_spans(layout: RowLayout) -> SpanTable:
    """The span table on the host. One synchronisation at the first use of a layout scanned on CUDA.

    Raises LayoutError if the `num_tokens` passed to `from_mask` was wrong.
    """
    return layout._table


def device_spans(layout: RowLayout) -> SpanIndex:
    """The spans on the device, in the form that kernels read. Raises LayoutError for sizes beyond int32."""
    return layout._index


def core_layout(layout: RowLayout) -> HostLayout:
    """The layout as the compiled core reads it."""
    return layout._core


def min_length(layout: RowLayout) -> int:
    """Length of the shortest row; 0 if there are no rows."""
    return layout._min_length


def anchored(layout: RowLayout, anchor: int) -> RowLayout:
    """The same rows with another anchor, from 0 to the width."""
    other = replace(layout, anchor=anchor)
    other.__dict__.update(layout.__dict__ | {"anchor": anchor})
    return other


def prefix_of(layout: RowLayout) -> RowLayout:
    """A layout with one span in each row, from position 0 to the last valid token. Gaps become valid."""
    table = layout._table
    lengths = np.zeros(layout.num_rows, np.int64)
    filled = np.diff(table.splits) > 0
    last = table.splits[1:][filled] - 1
    lengths[filled] = table.starts[last] + table.counts[last]
    return RowLayout.from_lengths(lengths, layout.width, device=layout.device)


def whole_numbers(values: Any, call: str, name: str, shape: str, most_dims: int = 1) -> IntArray:
    """Integers of 1 to `most_dims` dims on the host, contiguous int64; the array itself if it is that."""
    array = host_array(values, name, call)
    if not 1 <= array.ndim <= most_dims or (array.size and array.dtype.kind not in "iu"):
        seen = f"{array.dtype} {array.shape}" if array.ndim else said(values)
        raise LayoutError(f"{call}: {name} is {seen}; expected whole numbers {shape}. Pass integers of this shape.")
    return np.ascontiguousarray(array, np.int64)


def _check_num_tokens(table: SpanTable, num_tokens: int | None) -> None:
    if num_tokens is None:
        return
    total, most = int(table.counts.sum()), int(np.diff(table.splits).max(initial=0))
    if total != num_tokens or most > 1:
        raise LayoutError(
            f"RowLayout.from_mask: the mask has {total} valid tokens and up to {most} spans in a row; expected "
            f"num_tokens={num_tokens} and at most one. Give the true num_tokens, or leave it out if rows have several "
            "spans."
        )


def _problem(table: SpanTable, width: int) -> str | None:
    """The first thing that is wrong with a span table, or None."""
    starts, counts, splits = table
    if width < 0:
        return "the width is negative"
    spans_per_row = np.diff(splits)  # checked one by one, because their sum may overflow
    if (
        starts.ndim != 1
        or starts.shape != counts.shape
        or splits[-1] != starts.size
        or ((spans_per_row < 0) | (spans_per_row > starts.size)).any()
    ):
        return f"{starts.size} starts, {counts.size} counts, {int(splits[-1])} spans in the rows"
    if (counts <= 0).any():
        return f"a span has length {int(counts.min())}"
    if ((starts < 0) | (starts > width) | (counts > width - starts)).any():
        ends = [start + count for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
        return f"spans reach from {int(starts.min())} to {max(ends)}"
    row = np.repeat(np.arange(splits.size - 1), spans_per_row)
    if ((row[1:] == row[:-1]) & (starts[1:] <= (starts + counts)[:-1])).any():
        return "two spans of a row touch, overlap or are out of order"
    return None
