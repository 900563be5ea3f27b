"""What the encode kernels are told and what they say: units, one for each field (or column of one) that is encoded.

A unit is a row of int64, the names of `Unit`. Tables are int64 arrays that lie one behind the other; a unit names one
by the place of its first entry, -1 for none.

    measure   a program for each row of each unit   words --> Stat, which say what the form of the field takes
    write     the same                              words --> the arrays of the form, where the host says
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 1024
"""Words that a program reads at once: whole blocks of the encoding BLOCKS."""
BLOCK, NEAR_BIT = 256, 128
"""Words of a block, and the bit of blocks of distances. (core.c)"""
MISFIT, ODD, NEAR_USED = 1, 2, 4
"""Flags of a row: its words do not fit the form; bytes of bools are not 0 and 1; some block has distances."""
WRITTEN, LEFT_OUT = -1, -2
"""What becomes of a row: it is written; it is not; else it must equal the row with this number, of those of all
units."""


class Unit(NamedTuple):
    """The words of a field, or of one of its columns, and their form.

    Attributes:
        kind: as numbers of core.c; of DICTIONARY, the form of the stored rows.
        words, size: address of the tensor, and bytes of its words.
        items, stride, offset: words of an element that the unit has, words of the whole element, and the first of them.
        rows, bounds: how many; table [rows + 1] of the first element of each row; without it each row is one element.
        number, second, bytes: base and bytes of NARROW; step of ARANGE; the two words of BITMAP.
        near, head, tail: the units that a field is near to, or put together from; -1 for none.
        bools: 1 for bools.
        b_size, c_size: bytes of the numbers of arrays b and c; 0 if the kernel does not write the array.
    """

    kind: int
    words: int
    size: int
    items: int
    stride: int
    offset: int
    rows: int
    bounds: int = -1
    number: int = 0
    second: int = 0
    bytes: int = 0
    near: int = -1
    head: int = -1
    tail: int = -1
    bools: int = 0
    b_size: int = 0
    c_size: int = 0


class Stat(NamedTuple):
    """What is known of a row of a unit.

    Attributes:
        flags: of the above.
        count: numbers of the bits of all blocks; stretches of RLE and DELTA; words of SPARSE that are not 0.
        low, high: least and largest word of the stretches; of ARANGE and BITMAP, `low` is the first word of the row.
        least, most: of the lengths of all stretches but the last of the row; `most` is the last place of SPARSE.
        hash: of all words; equal rows have the same.
    """

    flags: int
    count: int
    low: int
    high: int
    least: int
    most: int
    hash: int
