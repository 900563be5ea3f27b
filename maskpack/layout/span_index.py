"""SpanIndex: the spans of a layout on its device, in the form that kernels read.

    packed tokens   0 1 2 3 | 4 5 6 7 | 8          blocks of BLOCK tokens (512; 4 in this picture)
    spans           a a a b   b b b c   c
    begins          0 3 7 9                        the first token of each span, and the end
    blocks          0         1         2 2        the span of each block's first token, and the last span

The span of a token lies between two entries of `blocks`. If no row has two spans, span r is row r, and an empty row is
a span of length 0. If rows have several spans, the token at a padded position is found by its rank:

    mask            # # . # | . # # .              words of 32 columns (4 in this picture), one bit each
    before          0         3                    tokens before each word; add the bits before a position
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from maskpack.core.index import SpanTable, cumulated, ranges
from maskpack.errors import LayoutError

BLOCK = 512
MOST_TOKENS = (1 << 31) - 1
"""The largest number of valid tokens that int32 can count."""
MOST_COLUMNS = (1 << 31) - 1024
"""The largest width and number of rows: kernels count positions in int32, up to 1,023 beyond the last."""


class SpanIndex(NamedTuple):
    """int32 tensors on the layout's device. If no row has two spans, there are only the first three, and M is the
    number of rows; else M is the number of spans.

    Attributes:
        starts: [M], the first position of each span in its row.
        begins: [M + 1], the first packed token of each span, then T.
        blocks: [ceil(T / BLOCK) + 1], span numbers. More entries may follow: the last span if T is a hint, arbitrary
            values otherwise.
        rows: [M], the row of each span.
        splits: [B + 1], the first span of each row, then M.
        cu_seqlens: [B + 1], the first packed token of each row, then T.
        bits: [B, ceil(S / 32)], the mask; the first column of a word is its lowest bit.
        before: [B, ceil(S / 32)], the number of packed tokens before each word.
        places: [T], the position of each valid token in the flattened [B * S]; only if `lists_places`, where a search
            for the span of a token takes longer than reading its place.
    """

    starts: Tensor
    begins: Tensor
    blocks: Tensor
    rows: Tensor | None = None
    splits: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bits: Tensor | None = None
    before: Tensor | None = None
    places: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that are not None; `SpanIndex(*tensors)` is the inverse."""
        return [part for part in self if part is not None]


def blocks_of(num_tokens: int) -> int:
    """The number of entries of `SpanIndex.blocks`."""
    return -(-num_tokens // BLOCK) + 1


def lists_places(spans: int, num_tokens: int, positions: int) -> bool:
    """Whether an index of rows with several spans has `SpanIndex.places`: if spans are short."""
    return spans * 8 > num_tokens and positions <= MOST_TOKENS


def words_of(width: int) -> int:
    """The number of words in a row of `SpanIndex.bits`."""
    return -(-width // 32)


def need_int32(call: str, *, num_tokens: int = 0, width: int = 0) -> None:
    """Raises LayoutError for more valid tokens or wider rows than kernels count in int32."""
    if num_tokens > MOST_TOKENS:
        raise LayoutError(
            f"{call}: the rows have {num_tokens} valid tokens; expected at most {MOST_TOKENS}, the limit of int32. "
            "Split the batch."
        )
    if width > MOST_COLUMNS:
        raise LayoutError(
            f"{call}: rows are {width} wide; expected at most {MOST_COLUMNS} positions, the limit of int32. Split the "
            "rows."
        )


def index_of(table: SpanTable, width: int, device: torch.device) -> SpanIndex:
    """The index of a span table, copied to the device without synchronisation. Raises LayoutError for sizes beyond
    int32."""
    need_int32(f"RowLayout.to({str(device)!r})", num_tokens=int(table.counts.sum()), width=width)
    spans = np.diff(table.splits)
    several = int(spans.max(initial=0)) > 1
    starts, counts = table.starts, table.counts
    if not several:
        starts, counts = np.zeros((2, spans.size), np.int64)
        filled = spans > 0
        starts[filled], counts[filled] = table.starts, table.counts
    begins = cumulated(counts)
    firsts = np.searchsorted(begins, np.arange(0, int(begins[-1]), BLOCK), side="right") - 1
    parts: list[Any] = [starts, begins, np.append(firsts, max(counts.size - 1, 0))]
    if several:
        rows = np.repeat(np.arange(spans.size), spans)
        mask = np.zeros((spans.size, 32 * words_of(width)), np.bool_)
        mask.reshape(-1)[ranges(rows * mask.shape[1] + starts, counts)] = True
        bits = np.packbits(mask, axis=1, bitorder="little").view("<i4")
        valid: Any = mask.reshape(-1, 32).sum(1)
        parts += [rows, table.splits, begins[table.splits], bits.reshape(-1), cumulated(valid)[:-1]]
        if lists_places(starts.size, int(begins[-1]), spans.size * width):
            parts.append(ranges(rows * width + starts, counts))
    line = np.concatenate(parts, dtype=np.int32, casting="unsafe")  # type: ignore[reportUnknownArgumentType]
    moved = torch.from_numpy(line).to(device, non_blocking=True)
    tensors = cast("tuple[Tensor, ...]", moved.split([part.size for part in parts]))
    return SpanIndex(*tensors[:6], *(part.view(spans.size, -1) for part in tensors[6:8]), *tensors[8:])


def spans_of(index: SpanIndex) -> SpanTable:
    """The span table on the host, from an index of rows with several spans. One synchronisation on CUDA."""
    assert index.splits is not None
    line = torch.cat([index.starts, index.begins, index.splits]).cpu().numpy().astype(np.int64)
    spans = index.starts.numel()
    return SpanTable(line[:spans], np.diff(line[spans : 2 * spans + 1]), line[2 * spans + 1 :])


def places_of(index: SpanIndex, num_rows: int, width: int, num_tokens: int) -> Tensor:
    """int64 [T]: the position of each valid token in the flattened [B * S]. If T is a hint and wrong, positions are
    left out or others follow the right ones; all are in bounds."""
    if index.places is not None:
        return index.places.to(torch.int64)
    device = index.starts.device
    rows = torch.arange(num_rows, device=device) if index.rows is None else index.rows.to(torch.int64)
    shift = rows * width + index.starts - index.begins[:-1]
    # repeat_interleave aborts on a GPU if the lengths do not sum to T. One more span, empty if T is right, makes them
    # do so; its positions are the numbers of the tokens, which are below T and so below B * S.
    lengths = pad(index.begins.clamp(max=num_tokens), (0, 1), value=num_tokens).diff()
    tokens = torch.arange(num_tokens, device=device)
    return torch.repeat_interleave(pad(shift, (0, 1)), lengths, output_size=num_tokens).add_(tokens)
