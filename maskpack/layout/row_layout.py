"""RowLayout: a mask in computed form, and the only place that turns masks, runs, lengths and indices into each other.

    mask [B=3, width=6]       runs (start, length)    lengths   cu_seqlens     indices into the flat [B * width]
    . . # # # .               (2, 3)                  3         0 3 5 5        2 3 4 | 6 11 |
    # . . . . #               (0, 1) (5, 1)           2
    . . . . . .               none                    0

The run table lives on the device of the mask; its host copy, from which rows are planned and selected, is read once.
Shape letters: B rows, N runs, T real tokens in all, S the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskpack.core.arguments import list_of, said, whole
from maskpack.core.index import (
    IntArray,
    Rows,
    SpanTable,
    bits_of,
    cumulated,
    ranges,
    row_index,
    table_of_bits,
    table_rows,
)
from maskpack.core.tensors import device_here, host_array, need_tensor, numbered
from maskpack.errors import LayoutError
from maskpack.layout import scan
from maskpack.layout.span_index import SpanIndex, index_of, need_int32, places_of, table_of

_FEW_BYTES = 256
"""What bits must save, or a layout travels as its runs."""
_MOST = (1 << 62) - 1
"""Positions of a layout."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Which positions of each row are real. Immutable; build one with a `from_...` constructor.

    Attributes:
        num_rows: B.
        width: padded size of the row dimension, S.
        num_tokens: number of real positions in all rows, T.
        device: where masks, indices and offsets of this layout lie.
        anchor: the column that stays in place when batches of different widths are joined: padding grows on both
            sides of it. 0 for rows padded on the right, the width for rows padded on the left.
    """

    num_rows: int
    width: int
    num_tokens: int
    device: torch.device
    anchor: int = 0

    def _knowing(self, **known: Any) -> RowLayout:
        """This layout with its `table` or `index`, the counts of its rows (`scanned` on the host or `promised` on the
        device), and what else follows from them."""
        self.__dict__.update(known)
        return self

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_mask(cls, mask: Tensor, *, num_tokens: int | None = None) -> RowLayout:
        """From a mask [B, S] of any dtype: a position is real where the mask is not zero.

        Args:
            mask: on CUDA, it is scanned there, with one synchronisation.
            num_tokens: a promise that saves this synchronisation: the mask has `num_tokens` real positions, and no row has two
                runs. A broken promise gives wrong elements, never memory that is not theirs; it raises LayoutError when
                the layout is first read on the host. On the CPU it is checked at once.

        Raises LayoutError if the mask is not two-dimensional, or does not keep the promise; on CUDA also for more than
        2^31 - 1 real positions, which int32 does not count.
        """
        return cls.scanned(mask, num_tokens)[0]

    @classmethod
    def scanned(cls, mask: Tensor, num_tokens: int | None = None) -> tuple[RowLayout, Tensor | None]:
        """As `from_mask`, and the value of all real positions, where the scan has seen that they have one and that all
        others are 0 bits (never on CUDA)."""
        need_tensor(mask, "mask", "RowLayout.from_mask")
        num_tokens = None if num_tokens is None else whole(num_tokens, "num_tokens", 0, "RowLayout.from_mask")
        if mask.is_nested or mask.dim() != 2:
            shape = "jagged" if mask.is_nested else tuple(mask.shape)
            raise LayoutError(
                f"RowLayout.from_mask: mask is {shape}; expected a dense mask (B, width). "
                "Reshape the mask to one entry per row and position."
            )
        rows, width = mask.shape
        if mask.device.type == "cpu":
            table, value = scan.on_host(mask.detach())
            _keep_promise(table, num_tokens)
            return cls.from_table(width, table, mask.device), value
        found = scan.on_device(mask.detach(), num_tokens)
        if "table" in found.known:
            _keep_promise(found.known["table"], num_tokens)
        return cls(rows, width, found.num_tokens, mask.device)._knowing(**found.known), None

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int] | IntArray,
        width: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> RowLayout:
        """Rows padded on the right: row b is real at positions 0 to `lengths[b]`.

        `lengths` is an integer [B]; `width` is the longest row where it is not given. One synchronisation if
        `lengths` is on CUDA. Raises LayoutError for negative lengths, fractions, and lengths beyond `width`.
        """
        if device is None:
            device = lengths.device if isinstance(lengths, Tensor) else "cpu"
        call = "RowLayout.from_lengths"
        return cls._from_lengths(_whole(lengths, call, "lengths", "(B,)"), width, device_here(device, call), call)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | Sequence[int] | IntArray, width: int | None = None) -> RowLayout:
        """From cumulated lengths, an integer [B + 1] that starts at 0 and never falls. One synchronisation on CUDA."""
        call = "RowLayout.from_cu_seqlens"
        host = _whole(cu_seqlens, call, "cu_seqlens", "(B + 1,)")
        if host.size == 0 or int(host[0]) != 0:
            raise LayoutError(
                f"{call}: cu_seqlens begins with {host[:1].tolist()}; expected 0. Pass the cumulated row lengths with "
                "their leading 0."
            )
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else torch.device("cpu")
        return cls._from_lengths(np.diff(host), width, device, call)

    @classmethod
    def _from_lengths(cls, host: IntArray, width: int | None, device: torch.device | str, call: str) -> RowLayout:
        shortest, longest = (int(host.min()), int(host.max())) if host.size else (0, 0)
        width = max(longest, 0) if width is None else whole(width, "width", 0, call)
        if shortest < 0 or longest > width or host.size * width > _MOST:
            fitting = f"0 to the width, {width}" if longest > width or shortest < 0 else "rows that memory can hold"
            raise LayoutError(
                f"{call}: lengths run from {shortest} to {longest}; expected {fitting}. "
                "Clip the lengths or give the true width."
            )
        real = host > 0
        splits = cumulated(real.astype(np.int64))
        return cls.from_table(width, SpanTable(np.zeros(int(splits[-1]), np.int64), host[real], splits), device)

    @classmethod
    def from_spans(
        cls,
        starts: Sequence[int] | IntArray,
        counts: Sequence[int] | IntArray,
        runs_per_row: Sequence[int] | IntArray,
        width: int,
        *,
        device: torch.device | str = "cpu",
        anchor: int = 0,
    ) -> RowLayout:
        """From a run table: `starts` and `counts` [N], `runs_per_row` [B] that sums to N.

        Runs of a row are in order and do not touch (they are maximal). Raises LayoutError otherwise.
        """
        call = "RowLayout.from_spans"
        width, anchor = whole(width, "width", 0, call), whole(anchor, "anchor", 0, call)
        table = SpanTable(
            _whole(starts, call, "starts", "(N,)"),
            _whole(counts, call, "counts", "(N,)"),
            cumulated(_whole(runs_per_row, call, "runs_per_row", "(B,)")),
        )
        complaint = _complaint(table, width) or (None if 0 <= anchor <= width else f"the anchor is column {anchor}")
        if complaint:
            raise LayoutError(
                f"{call}: {complaint}; expected maximal runs, in order, inside the width {width}. Sort and join them."
            )
        return cls.from_table(width, table, device_here(device, call), anchor)

    @classmethod
    def from_table(cls, width: int, table: SpanTable, device: torch.device | str, anchor: int = 0) -> RowLayout:
        """From a table that is known to be sound. Raises LayoutError for more positions than int64 counts."""
        rows = table.splits.size - 1
        if rows * width > _MOST:
            raise LayoutError(
                f"RowLayout: {rows} rows of width {width}; expected at most {_MOST} positions. Give the true width."
            )
        layout = cls(rows, width, int(table.counts.sum()), numbered(device), anchor)
        if layout.device.type == "cpu":
            return layout._knowing(table=table)
        return layout._knowing(table=table, index=index_of(table, width, layout.device))

    # ---------------------------------------------------------------- sizes, on the host

    @cached_property
    def table(self) -> SpanTable:
        """The run table on the host. One synchronisation the first time, where the layout is on CUDA and unread.

        Raises LayoutError if the mask did not keep the promise that `from_mask` was given.
        """
        if "scanned" in self.__dict__:
            return scan.table_of_rows(self.__dict__["scanned"])
        if "promised" in self.__dict__:
            table = scan.table_of_rows(self.__dict__["promised"].cpu().numpy())
            _keep_promise(table, self.num_tokens)
            return table
        return table_of(self.index)

    @cached_property
    def index(self) -> SpanIndex:
        """The runs as kernels look them up, on the device. Raises LayoutError for what int32 does not count."""
        return index_of(self.table, self.width, self.device)

    @property
    def num_spans(self) -> int:
        """N."""
        return self.table.starts.size

    @cached_property
    def lengths(self) -> IntArray:
        """int64 [B] on the host: real positions of each row."""
        if "scanned" in self.__dict__:
            return self.__dict__["scanned"][0].astype(np.int64)
        ends = cumulated(self.table.counts)
        return ends[self.table.splits[1:]] - ends[self.table.splits[:-1]]

    @cached_property
    def row_offsets(self) -> IntArray:
        """int64 [B + 1] on the host: `cu_seqlens` for numpy."""
        return cumulated(self.lengths)

    @cached_property
    def min_length(self) -> int:
        """Length of the shortest row, 0 without rows."""
        return int(self.lengths.min()) if self.num_rows else 0

    @cached_property
    def max_length(self) -> int:
        """Length of the longest row, 0 without rows."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def span_slices(self) -> list[slice]:
        """The place of each run in the flattened [B * S], on the host."""
        begins = np.repeat(np.arange(self.num_rows) * self.width, np.diff(self.table.splits)) + self.table.starts
        return list(map(slice, begins.tolist(), (begins + self.table.counts).tolist()))

    @property
    def long_spans(self) -> bool:
        """Whether copying run by run beats an index per element, on the host."""
        return self.num_tokens >= 64 * self.num_spans

    # ---------------------------------------------------------------- derived tensors, on the device

    @cached_property
    def starts(self) -> Tensor:
        """int32 [N]: the first position of each run in its row. Raises LayoutError for rows too wide for int32."""
        need_int32("RowLayout.starts", width=self.width)
        return self._moved(self.table.starts.astype(np.int32))

    @cached_property
    def counts(self) -> Tensor:
        """int32 [N]: the length of each run, never 0. Raises LayoutError for rows too wide for int32."""
        need_int32("RowLayout.counts", width=self.width)
        return self._moved(self.table.counts.astype(np.int32))

    @cached_property
    def splits(self) -> Tensor:
        """int64 [B + 1]; the runs of row b are `splits[b]` to `splits[b + 1]`."""
        return self._moved(np.array(self.table.splits))

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [B + 1]: the one offsets tensor that every jagged field of this layout shares."""
        if "index" in self.__dict__:
            return self.cu_seqlens.to(torch.int64)
        return self._moved(np.array(self.row_offsets))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [B + 1]: cumulated row lengths, as varlen attention takes them. Raises LayoutError for more than
        2^31 - 1 real positions. Never above T, because others read as many tokens as these say."""
        need_int32("RowLayout.cu_seqlens", num_tokens=self.num_tokens)
        if "promised" in self.__dict__:
            return self.index.begins.clamp(max=self.num_tokens)
        if "index" in self.__dict__:
            return self.index.begins if self.index.cu_seqlens is None else self.index.cu_seqlens
        return self.offsets.to(torch.int32)

    def _moved(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @cached_property
    def indices(self) -> Tensor:
        """int64 [T]: position of each real element in the flattened [B * S]. No synchronisation."""
        if self.device.type == "cpu":
            rows = np.repeat(np.arange(self.num_rows), np.diff(self.table.splits))
            return torch.from_numpy(ranges(rows * self.width + self.table.starts, self.table.counts))
        return places_of(self.index, self.num_rows, self.width, self.num_tokens)

    def to_mask(self, dtype: torch.dtype = torch.bool) -> Tensor:
        """The mask [B, S]: 1 at real positions, 0 elsewhere."""
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"RowLayout.to_mask: dtype is {said(dtype)}; expected one of torch. Pass torch.bool.")
        mask = torch.zeros(self.num_rows * self.width, dtype=torch.bool, device=self.device)
        return mask.index_fill_(0, self.indices, True).view(self.num_rows, self.width).to(dtype)

    # ---------------------------------------------------------------- new layouts from old ones

    def to(self, device: torch.device | str) -> RowLayout:
        """The same layout on another device."""
        if device == self.device:
            return self
        device = numbered(device_here(device, "RowLayout.to"))
        if device == self.device:
            return self
        return RowLayout.from_table(self.width, self.table, device, self.anchor)

    def take(self, rows: Rows) -> RowLayout:
        """The layout of some rows: a slice, indices (repeats allowed, negative from the end), or a bool mask [B]."""
        index = row_index(rows, self.num_rows, "RowLayout.take")
        return RowLayout.from_table(self.width, table_rows(self.table, index), self.device, self.anchor)

    def narrow(self, start: int, stop: int) -> RowLayout:
        """The layout of the columns `start` to `stop`: the mask's `[:, start:stop]`, without reading the mask again."""
        start, stop = (whole(column, "a column", 0, "RowLayout.narrow") for column in (start, stop))
        if not start <= stop <= self.width:
            raise LayoutError(
                f"RowLayout.narrow: columns {start} to {stop}; expected 0 <= start <= stop <= {self.width}. Choose "
                "columns inside the width."
            )
        table = self.table
        begin = table.starts.clip(start, stop)
        counts = (table.starts + table.counts).clip(start, stop) - begin
        keep = counts > 0
        splits = cumulated(keep.astype(np.int64))[table.splits]
        table = SpanTable((begin - start)[keep], counts[keep], splits)
        anchor = min(max(self.anchor - start, 0), stop - start)
        return RowLayout.from_table(stop - start, table, self.device, anchor)

    def anchored(self, anchor: int) -> RowLayout:
        """The same rows with another anchor, 0 to the width."""
        if whole(anchor, "anchor", 0, "RowLayout.anchored") > self.width:
            raise LayoutError(f"RowLayout.anchored: anchor is {anchor}; expected 0 to {self.width}. Choose a column.")
        return replace(self, anchor=anchor)._knowing(**self.__dict__ | {"anchor": anchor})

    def widened(self, left: int, right: int) -> RowLayout:
        """The same rows with as many columns of padding more on each side."""
        table = self.table
        left, right = (whole(columns, "columns", 0, "RowLayout.widened") for columns in (left, right))
        table = SpanTable(table.starts + left, table.counts, table.splits)
        return RowLayout.from_table(left + self.width + right, table, self.device, left + self.anchor)

    def prefix(self) -> RowLayout:
        """One run a row, from position 0 up to and with the last real position: holes become real."""
        table = self.table
        lengths = np.zeros(self.num_rows, np.int64)
        real = np.diff(table.splits) > 0
        last = table.splits[1:][real] - 1
        lengths[real] = table.starts[last] + table.counts[last]
        return RowLayout.from_lengths(lengths, self.width, device=self.device)

    @staticmethod
    def cat(layouts: Sequence[RowLayout]) -> RowLayout:
        """The rows of several layouts, one after the other. Narrower ones are widened: their anchors meet."""
        layouts = list_of(layouts, RowLayout, "RowLayout.cat", "Pass a list of layouts.")
        left = max(layout.anchor for layout in layouts)
        right = max(layout.width - layout.anchor for layout in layouts)
        layouts = [
            layout
            if (layout.anchor, layout.width) == (left, left + right)
            else layout.widened(left - layout.anchor, right - (layout.width - layout.anchor))
            for layout in layouts
        ]
        tables = [layout.table for layout in layouts]
        runs = np.concatenate([np.diff(table.splits) for table in tables])
        table = SpanTable(
            np.concatenate([table.starts for table in tables]),
            np.concatenate([table.counts for table in tables]),
            cumulated(runs),
        )
        return RowLayout.from_table(left + right, table, layouts[0].device, left)

    def compact(self) -> tuple[npt.NDArray[Any], ...]:
        """The runs as they travel: starts, counts and runs of each row, in unsigned integers as narrow as fit; or where
        that saves more than a few bytes, the mask alone, in bits (uint8 [B, ceil(width / 8)])."""
        numbers = self.table.starts, self.table.counts, np.diff(self.table.splits)
        parts = tuple(part.astype(np.min_scalar_type(int(part.max(initial=0)))) for part in numbers)
        if sum(part.nbytes for part in parts) <= self.num_rows * -(-self.width // 8) + _FEW_BYTES:
            return parts
        return (bits_of(self.table, self.width),)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.width, str(self.device), self.anchor, *self.compact())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowLayout):
            return NotImplemented
        return self.width == other.width and all(
            np.array_equal(a, b) for a, b in zip(self.table, other.table, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RowLayout(rows={self.num_rows}, width={self.width}, tokens={self.num_tokens}, "
            f"runs={self.num_spans}, device={str(self.device)!r})"
        )


def _restored(width: int, device: str, anchor: int, *compact: npt.NDArray[Any]) -> RowLayout:
    if len(compact) == 1:
        table = table_of_bits(compact[0], width)
        assert table is not None
    else:
        starts, counts, runs = (part.astype(np.int64) for part in compact)
        table = SpanTable(starts, counts, cumulated(runs))
    return RowLayout.from_table(width, table, device, anchor)


def _keep_promise(table: SpanTable, num_tokens: int | None) -> None:
    if num_tokens is None:
        return
    seen, most = int(table.counts.sum()), int(np.diff(table.splits).max(initial=0))
    if seen != num_tokens or most > 1:
        raise LayoutError(
            f"RowLayout.from_mask: the mask has {seen} real positions and up to {most} runs in a row; {num_tokens} and at "
            "most one were promised. Give the true num_tokens, or none where rows have several runs."
        )


def _whole(values: Any, call: str, name: str, shape: str) -> IntArray:
    """A copy of whole numbers [n] on the host."""
    array = host_array(values, name, call)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        seen = f"{array.dtype} {array.shape}" if array.ndim else said(values)
        raise LayoutError(f"{call}: {name} is {seen}; expected whole numbers {shape}. Pass integers.")
    return array.astype(np.int64)


def _complaint(table: SpanTable, width: int) -> str | None:
    starts, counts, splits = table
    if width < 0:
        return "the width is negative"
    runs = np.diff(splits)  # each of them checked, because a sum may overflow
    if (
        starts.ndim != 1
        or starts.shape != counts.shape
        or splits[-1] != starts.size
        or ((runs < 0) | (runs > starts.size)).any()
    ):
        return f"{starts.size} starts, {counts.size} counts, {int(splits[-1])} runs in the rows"
    if (counts <= 0).any():
        return f"a run has length {int(counts.min())}"
    if ((starts < 0) | (starts > width) | (counts > width - starts)).any():
        ends = [start + count for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
        return f"runs reach from {int(starts.min())} to {max(ends)}"
    row = np.repeat(np.arange(splits.size - 1), runs)
    if ((row[1:] == row[:-1]) & (starts[1:] <= (starts + counts)[:-1])).any():
        return "two runs of a row touch, overlap or are out of order"
    return None
