"""What the encode kernels are told and what they say: units, one for each field (or column of one) that is encoded.

A unit is a row of int64, the names of `Unit`. The host lays out the arrays between the two launches (place.c).

    measure   a program for each row of each unit   words --> Stat, which say what the form of the field takes
    write     the same                              words --> the arrays of the form, where the host says
"""

from __future__ import annotations

from typing import NamedTuple

from maskpack.core import abi

CHUNK = 1024
"""Words that a program reads at once: whole blocks of the encoding BLOCKS."""


class Unit(NamedTuple):
    """The words of a field, or of one of its columns, and their form. (abi.h)

    Attributes:
        kind: as numbered in abi.h; of DICTIONARY, the form of the stored rows.
        words, size: address of the tensor, and bytes of its words.
        items, stride, offset: words of an element that the unit has, words of the whole element, and the first of them.
        rows: how many.
        bounds: number of the layout, whose table says where rows begin and end in packed values; -1 if each row is one
            element.
        row_stride: words from one row to the next in a padded tensor.
        counts, low, width: of a padded tensor, the address of int32 [3, rows]: valid tokens of its mask, spans (at most
            one) and first valid position; and the columns of the mask that it has. Address 0 for packed values.
        number, second, bytes: base and bytes of NARROW; widths of codes of BLOCKS; step of ARANGE; the two words of
            BITMAP.
        near, head, tail: the units that a field is near to, or put together from; -1 for none.
        bools: 1 for bools.
        pad_mode, pad: what is under the mask of a padded tensor, and the word of a constant.
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
    row_stride: int = 0
    counts: int = 0
    low: int = 0
    width: int = 0
    number: int = 0
    second: int = 0
    bytes: int = 0
    near: int = -1
    head: int = -1
    tail: int = -1
    bools: int = 0
    pad_mode: int = 0
    pad: int = 0
    b_size: int = 0
    c_size: int = 0


class Stat(NamedTuple):
    """What is known of a row of a unit.

    Attributes:
        flags: of abi.h: IS_MISFIT, its words do not fit the form; IS_ODD, bytes of bools are not 0 and 1; NEAR_USED,
            some block has distances; IS_STRAY, something under the mask is not the pad.
        total: numbers of the bits of all blocks; stretches of RLE and DELTA.
        low, high: least and largest word of the stretches; of ARANGE and BITMAP, `low` is the first word of the row.
        least, most: of the lengths of all stretches but the last of the row.
        hash: of all words; equal rows have the same.
    """

    flags: int
    total: int
    low: int
    high: int
    least: int
    most: int
    hash: int


assert (Unit._fields, Stat._fields) == (abi.UNIT.names, abi.STAT.names)
