"""What the decode kernel is told: jobs, one for each tensor (or column of one) that it writes.

A JOB says where the words of a tensor go, and its `source` (Source in abi.h) how they are found. Tables are int64
arrays that lie one behind the other; a job names one by the place of its first entry, -1 for none. Encoded arrays lie
in the body; a job names one by its first byte there, -1 for none.

    row b of the target --(layout)--> place in the row, in words --(encoding)--> the word

Of a JOB:
    spans: programs for each row, of SPAN words each.
    out, size: address of the tensor, and bytes of its words.
    items: words of an element that this job writes.
    stride, offset: places of the job's words in the tensor, beyond the begin of the row.
    row_words: words of the tensor for each element before the row (nested), or for each row before it (padded).
    bounds, unit: table [B + 1] of the first element of each row; without it, row b begins at `b * unit`.
    width: columns of a row; -1 for a nested tensor.
    inner: words that one column has next to each other; the others are `width * inner` further on.
    splits, starts, ends: of a padded tensor, tables of the runs of each row [B + 1], the column where each begins [N],
        and the elements before each [N + 1].
    pads, pad_row, pad_items: table of pads, entries for each row, and 1 where the words of an element take turns in two
        of them.
    edge: 1 where the pad is the nearest real value; 0 bits in an empty row.
    part: HEAD or TAIL if the job writes one part of each row; 0 if it writes all of it.
    head_bounds, head_unit: of the heads of rows, as `bounds` and `unit` but both at once.
    group: the job's words that lie next to each other in the tensor; these groups are `stride` apart.
    taken, places: where some rows are decoded, tables [R]: the row of the source that each row of the target is; and of
        the first element of each row of a nested tensor, in place of `bounds` (-1: its number times `unit`).

Of a Source:
    kind: BY_PLACE    data[begin + place]
          BY_PIECE    piece p at the place: data[p]; with `sums`, what the pieces before add up to, and data[p] once for
                      each place in the piece
          BY_BLOCK    the least word of the block, in the table `more`, + the bits of the place in `numbers`, in coded
                      blocks those behind the words before it; or the distance that they are, added to the word of
                      another source
          FROM_TABLE  the table itself
    rows: table [B] of the stored row of each row; without it, the row itself.
    begins, begin_unit: table of the first entry of each stored row, times `begin_unit`: words, pieces or blocks;
        without it, row b begins at `b * begin_unit`.
    data, data_size: array, and bytes of an entry.
    more: of blocks, a table of the least words.
    number: the widths of codes.
    single: 1 where `data` has one entry for all.
    pieces, counts, sums: of rows with several pieces: table [B + 1] of the first entry of each row in the other two;
        words before each piece but the last of a row, cumulated over all rows; and what they add up to. Of blocks,
        `pieces` is a table of 512 times the place of each in `numbers`, plus its words.
    numbers: array of the bits of blocks.
    near: table of another Source, whose words the distances are added to.
    stretches, stretch_starts, stretch_ends: of rows of zeros and stored words, tables of the stretches of stored ones:
        the first of each row [B + 1], the place where each begins [N], and the stored words before each [N + 1]. The
        other numbers are for the stored words; where `near` is there, these are distances.
"""

from __future__ import annotations

import numpy as np

from maskpack.core import abi

HEAD, TAIL = 1, 2
CHUNK = 1024
"""Words that a program writes at once."""
SPAN = 16 * CHUNK
"""Words of a row that one program writes: what it has read of its job and its row serves for all of them."""
_NAMES = (
    *("spans", "out", "size", "items", "stride", "offset", "row_words", "bounds", "unit", "width", "inner"),
    *("splits", "starts", "ends", "pads", "pad_row", "pad_items", "edge", "part", "head_bounds", "head_unit", "group"),
    *("taken", "places"),
)
JOB = np.dtype([*((name, np.int64) for name in _NAMES), ("source", abi.SOURCE)])
JOB_NUMBERS = JOB.itemsize // 8
