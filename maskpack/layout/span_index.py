"""SpanIndex: the runs of a layout on their device, as kernels look them up.

    packed tokens   0 1 2 3 | 4 5 6 7 | 8          blocks of BLOCK tokens (512; 4 in this picture)
    runs            a a a b   b b b c   c
    begins          0 3 7 9                        where each run begins, and the end
    blocks          0         1         2 2        the run of each block's first token, and the last run

The run of a token lies between two entries of `blocks`. Where no row has two runs, run r is row r: an empty row is a
run of length 0. Where rows have several, a padded position finds its token by rank:

    mask            # # . # | . # # .              words of 32 columns (4 in this picture), a bit each
    before          0         3                    tokens before each word; the bits before a position are counted
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
"""Real positions that int32 counts."""
MOST_COLUMNS = (1 << 31) - 1024
"""Positions of a row, and rows, that kernels count in int32: they look up to 1,023 positions beyond the last."""


class SpanIndex(NamedTuple):
    """Tensors int32 on the layout's device. Row by row, M is the number of rows and there are only the first three;
    else M is the number of runs.

    Attributes:
        starts: [M], the first position of each run in its row.
        begins: [M + 1], its first packed token; then T.
        blocks: [ceil(T / BLOCK) + 1], runs. There may be more entries: of no meaning where T was counted, the last run
            where it was promised.
        rows: [M], the row of each run.
        splits: [B + 1], the runs of each row.
        cu_seqlens: [B + 1], the tokens of each row.
        bits: [B, ceil(S / 32)], the mask; the first column of a word is its lowest bit.
        before: [B, ceil(S / 32)], the packed tokens before each word.
    """

    starts: Tensor
    begins: Tensor
    blocks: Tensor
    rows: Tensor | None = None
    splits: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bits: Tensor | None = None
    before: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that there are; `SpanIndex(*tensors)` is the index again."""
        return [part for part in self if part is not None]


def blocks_of(num_tokens: int) -> int:
    """Entries of `SpanIndex.blocks`."""
    return -(-num_tokens // BLOCK) + 1


def words_of(width: int) -> int:
    """Words of a row of `SpanIndex.bits`."""
    return -(-width // 32)


def need_int32(call: str, *, num_tokens: int = 0, width: int = 0) -> None:
    """Raises LayoutError for more real positions, or wider rows, than int32 counts."""
    if num_tokens > MOST_TOKENS:
        raise LayoutError(
            f"{call}: the rows have {num_tokens} real positions; expected at most {MOST_TOKENS}, which int32 counts. Split "
            "the batch."
        )
    if width > MOST_COLUMNS:
        raise LayoutError(
            f"{call}: rows are {width} wide; expected at most {MOST_COLUMNS} positions, which int32 counts. Split the "
            "rows."
        )


def index_of(table: SpanTable, width: int, device: torch.device) -> SpanIndex:
    """From the host, in one copy that nobody waits for. Raises LayoutError for what int32 does not count."""
    need_int32(f"RowLayout on {device}", num_tokens=int(table.counts.sum()), width=width)
    runs = np.diff(table.splits)
    several = int(runs.max(initial=0)) > 1
    starts, counts = table.starts, table.counts
    if not several:
        starts, counts = np.zeros((2, runs.size), np.int64)
        some = runs > 0
        starts[some], counts[some] = table.starts, table.counts
    begins = cumulated(counts)
    firsts = np.searchsorted(begins, np.arange(0, int(begins[-1]), BLOCK), side="right") - 1
    parts: list[Any] = [starts, begins, np.append(firsts, max(counts.size - 1, 0))]
    if several:
        rows = np.repeat(np.arange(runs.size), runs)
        mask = np.zeros((runs.size, 32 * words_of(width)), np.bool_)
        mask.reshape(-1)[ranges(rows * mask.shape[1] + starts, counts)] = True
        bits = np.packbits(mask, axis=1, bitorder="little").view("<i4")
        real: Any = mask.reshape(-1, 32).sum(1)
        parts += [rows, table.splits, begins[table.splits], bits.reshape(-1), cumulated(real)[:-1]]
    line = np.concatenate(parts, dtype=np.int32, casting="unsafe")  # type: ignore[reportUnknownArgumentType]
    moved = torch.from_numpy(line).to(device, non_blocking=True)
    found = cast("tuple[Tensor, ...]", moved.split([part.size for part in parts]))
    return SpanIndex(*found[:6], *(part.view(runs.size, -1) for part in found[6:]))


def table_of(index: SpanIndex) -> SpanTable:
    """The run table on the host of rows of several runs, with one synchronisation on CUDA."""
    assert index.splits is not None
    line = torch.cat([index.starts, index.begins, index.splits]).cpu().numpy().astype(np.int64)
    runs = index.starts.numel()
    return SpanTable(line[:runs], np.diff(line[runs : 2 * runs + 1]), line[2 * runs + 1 :])


def places_of(index: SpanIndex, num_rows: int, width: int, num_tokens: int) -> Tensor:
    """int64 [T]: the place of each real position in the flattened [B * S]. Where T was promised and is another, the
    first T of them, or others behind them, none outside."""
    device = index.starts.device
    rows = torch.arange(num_rows, device=device) if index.rows is None else index.rows.to(torch.int64)
    shift = rows * width + index.starts - index.begins[:-1]
    # A last run, empty where T is right, makes the lengths sum up to T: repeat_interleave aborts on a GPU if they do
    # not. Its places are the tokens' own numbers, below T and so below B * S.
    lengths = pad(index.begins.clamp(max=num_tokens), (0, 1), value=num_tokens).diff()
    tokens = torch.arange(num_tokens, device=device)
    return torch.repeat_interleave(pad(shift, (0, 1)), lengths, output_size=num_tokens).add_(tokens)
