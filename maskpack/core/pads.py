"""Pads: the values at the masked-out positions of a field."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core import abi
from maskpack.core.bits import Words, address, from_words, word_dtype, words
from maskpack.core.index import IntArray


class Pad(enum.Enum):
    """Pads that are not a constant."""

    PAD_TOKEN_ID = "PAD_TOKEN_ID"
    EDGE = "EDGE"
    PER_ROW = "PER_ROW"
    ZERO = "ZERO"
    SIGNED_ZERO = "SIGNED_ZERO"
    ANY_ZERO = "ANY_ZERO"

    def __repr__(self) -> str:
        return self.name


PAD_TOKEN_ID = Pad.PAD_TOKEN_ID
"""The tokenizer's pad id, passed to each call as `pad_token_id`."""
EDGE = Pad.EDGE
"""The value of the last valid token before the position, or of the first one if none comes before; 0 in an empty
row."""
PER_ROW = Pad.PER_ROW
"""One constant for each row: the masked-out elements of a row are equal, and rows may differ."""
ZERO = Pad.ZERO
"""0.0 and -0.0, as `x * mask` gives. The values of a batch decide which signs are kept: none, one for each row (a
number of the dtype) or, in a field with one number for each token, one for each position (a bit). A plain 0 is 0.0
alone."""
SIGNED_ZERO = Pad.SIGNED_ZERO
"""0.0 in some rows and -0.0 in others. It is stored as PER_ROW."""
ANY_ZERO = Pad.ANY_ZERO
"""0.0 and -0.0 in any order. The signs are kept as a bit for each position. In a field with several numbers for each
token it is SIGNED_ZERO."""
ZEROS = (0, SIGNED_ZERO, ANY_ZERO)
"""What ZERO stands for, in the order in which they are tried."""
PUBLIC = ("PAD_TOKEN_ID", "EDGE", "PER_ROW", "ZERO")
"""The names of pads that a registry may have."""

PadValue = int | float | bool | complex | Pad
_NAN = struct.pack("<d", math.nan)


def expanded(pads: Sequence[PadValue]) -> tuple[PadValue, ...]:
    """Pads with those that ZERO stands for in its place, each once."""
    out: list[PadValue] = []
    for pad in pads:
        out += [pad] if pad is not ZERO else [zero for zero in ZEROS if not any(own is zero for own in out)]
    return tuple(out)


def said_pads(pads: Sequence[PadValue]) -> str:
    """Pads for a message: zeros by their one name."""
    names = ["ZERO" if pad is SIGNED_ZERO or pad is ANY_ZERO else repr(pad) for pad in pads]
    return " or ".join(dict.fromkeys(name for name in names if name != "0" or "ZERO" not in names))


def text_of(pads: Sequence[PadValue]) -> str:
    """Pads as a text that is equal for equal bits alone: 0.0 differs from -0.0, NaN from NaN of other bits."""
    numbers = [(place, pad) for place, pad in enumerate(pads) if isinstance(pad, complex | float)]
    nans = [(place, part) for place, pad in numbers for part in (pad.real, pad.imag) if math.isnan(part)]
    odd = [f"{place}:{bits.hex()}" for place, part in nans if (bits := struct.pack("<d", part)) != _NAN]
    return " ".join([repr(tuple(pads)), *odd])


def pad_tensor(pad: complex, dtype: torch.dtype) -> Tensor | None:
    """The pad as a tensor () of `dtype` on the CPU, or None if the dtype cannot hold it: a fraction in an integer
    dtype, -100 in uint8."""
    if isinstance(pad, int) and pad.bit_length() > 1023:  # too large for a float
        return None
    if dtype.is_complex:
        return torch.tensor(pad, dtype=torch.complex128, device="cpu").to(dtype)
    if isinstance(pad, complex):
        return None
    if dtype.is_floating_point:
        value = torch.tensor(float(pad), dtype=torch.float64, device="cpu").to(dtype)
        if dtype.itemsize == 1 and math.isfinite(pad) and abs(pad) > torch.finfo(dtype).max:  # the cast may saturate
            return None
        return value if math.isfinite(value.to(torch.float64).item()) == math.isfinite(pad) else None
    if pad != int(pad) if math.isfinite(pad) else True:
        return None
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return torch.tensor(int(pad), dtype=dtype, device="cpu") if low <= pad <= high else None


def pad_words(pad: complex, dtype: torch.dtype) -> tuple[int, ...] | None:
    """The raw bits of the pad in `dtype`: one integer, or two for complex128. None if the dtype cannot hold the pad."""
    compute = _pad_words.__wrapped__ if torch.compiler.is_compiling() else _pad_words
    return compute(pad, str(pad), dtype)  # the text tells 0.0 from -0.0, which are equal


@lru_cache(maxsize=1024)
def _pad_words(pad: complex, text: str, dtype: torch.dtype) -> tuple[int, ...] | None:
    value = pad_tensor(pad, dtype)
    return None if value is None else tuple(cast("list[int]", words(value).view(-1).tolist()))


def holds(pad: PadValue, dtype: torch.dtype) -> bool:
    """Whether a dtype can hold a pad."""
    return isinstance(pad, Pad) or pad_words(pad, dtype) is not None


def has_signs(dtype: torch.dtype) -> bool:
    """Whether -0.0 differs from 0.0 in a dtype of real numbers."""
    return dtype.is_floating_point and pad_words(-0.0, dtype) != pad_words(0, dtype)


def trial_of(pad: PadValue, dtype: torch.dtype, trusted: bool) -> tuple[int, tuple[int, int]]:
    """A pad for the core and the kernels: its mode, and the word of a constant in two halves."""
    trust = abi.TRUSTED if trusted else 0
    signed = dtype.is_floating_point and dtype.itemsize > 1
    if pad is PER_ROW or pad is ANY_ZERO or (pad is SIGNED_ZERO and signed):
        modes = {PER_ROW: abi.BY_ROW, ANY_ZERO: abi.BY_SIGNS, SIGNED_ZERO: abi.BY_SIGN}
        return modes[pad] + trust, (0, 0)
    if pad is EDGE:
        return abi.BY_EDGE + trust, (0, 0)
    bits = pad_words(0 if isinstance(pad, Pad) else pad, dtype)
    assert bits is not None
    return abi.CONSTANT + trust, (bits[0], bits[-1])


def has_records(mode: int) -> bool:
    """Whether the rows of a field that was read by a mode have a record each."""
    return mode & ~abi.TRUSTED > abi.BY_EDGE


def record_size(mode: int, x: Tensor, width: int) -> int:
    """The bytes of such a record of a field [B, S, *F]."""
    return 1 + x.dtype.itemsize + (-(-width // 8) if mode & ~abi.TRUSTED == abi.BY_SIGNS else 0)


# -------------------------------------------------------------------- the pads of the rows of a field


@dataclass(frozen=True, eq=False)
class Pads:
    """What is under the mask of a field, row by row. Packed rows, nested batches and files hold it in this form.

    Attributes:
        records: uint8 [1, n] if all rows are alike, else [B, n], contiguous, on the host. A record is a byte, abi.WORD
            or abi.EDGE; the bytes of the word that is under the mask, 0 for EDGE; and, if some of the zeros there are
            -0.0, a bit for each position that is, the first one in the highest bit of its byte.
        size: bytes of a word, 1 to 16.
    """

    records: Words
    size: int

    @staticmethod
    def of(pad: PadValue, dtype: torch.dtype) -> Pads:
        """A constant that the dtype can hold, or EDGE, for all rows."""
        return _pads_of(pad, str(pad), dtype)

    @staticmethod
    def of_rows(pads: Tensor, signs: Words | None = None, edges: Words | None = None) -> Pads:
        """A constant for each row, [B] on the host; with signs [B, n], and abi.EDGE or abi.WORD [B]."""
        size, bits = pads.dtype.itemsize, words(pads.contiguous()).numpy()
        own: Words = np.ascontiguousarray(bits).view(np.uint8).reshape(len(pads), size)
        modes: Words = np.zeros((len(pads), 1), np.uint8) if edges is None else edges.reshape(-1, 1).astype(np.uint8)
        return Pads(np.concatenate([modes, own, *([] if signs is None else [signs])], 1), size)

    @staticmethod
    def cat(parts: Sequence[tuple[Pads, int]]) -> Pads:
        """The pads of several groups of rows, with the number of rows of each, one after the other."""
        first = parts[0][0]
        if len(parts) == 1 or all(len(pads.records) == 1 and pads.is_same(first, 1) for pads, _ in parts):
            return first
        most = max(pads.records.shape[1] for pads, _ in parts)
        out: Words = np.zeros((sum(rows for _, rows in parts), most), np.uint8)
        end = 0
        for pads, rows in parts:
            out[end : end + rows, : pads.records.shape[1]] = pads.records
            end += rows
        return Pads(out, first.size)

    @cached_property
    def place(self) -> tuple[int, int, int]:
        """Where the records lie: the address of the first, the bytes of one, and their number."""
        assert self.records.flags.c_contiguous
        return address(self.records), self.records.shape[1], len(self.records)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pads, (self.records, self.size)  # without the address

    def take(self, rows: IntArray | slice) -> Pads:
        """The pads of some rows."""
        return self if len(self.records) == 1 else Pads(self.records[rows], self.size)

    @property
    def edges(self) -> Any:
        """bool [1] or [B]: rows whose pad is EDGE."""
        return self.records[:, 0] == abi.EDGE

    def fits(self, width: int) -> bool:
        """Whether EDGE has no word and no signs, and no signs lie behind a width."""
        edges, last = self.records[self.edges], self.records[:, -1] if self.signs is not None and width % 8 else None
        return not edges[:, 1:].any() and (last is None or not (last & (255 >> width % 8)).any())

    def is_same(self, other: Pads, rows: int) -> bool:
        """Whether the pads of `rows` rows are equal."""
        one, two = (np.broadcast_to(own.records, (rows, own.records.shape[1])) for own in (self, other))
        return np.array_equal(one, two)

    def shortest(self) -> Pads:
        """The same pads, as one record if all rows are alike, and without signs if there are none."""
        own = self.records if len(self.records) else np.zeros((1, 1 + self.size), np.uint8)
        own = own[:1] if (own == own[:1]).all() else own
        signs = own[:, 1 + self.size :].any()
        return Pads(np.ascontiguousarray(own if signs else own[:, : 1 + self.size]), self.size)

    @property
    def is_plain(self) -> bool:
        """Whether all rows are EDGE, or each is one word."""
        return self.signs is None and bool(self.edges.all() or not self.edges.any())

    @property
    def signs(self) -> Words | None:
        """uint8 [1, n] or [B, n]: which masked-out elements are -0.0; None if none is."""
        return self.records[:, 1 + self.size :] if self.records.shape[1] > 1 + self.size else None

    def words(self, dtype: torch.dtype) -> Tensor:
        """The words of the rows as a tensor [1] or [B] on the host, in memory of its own."""
        line = np.array(self.records[:, 1 : 1 + self.size], order="C").view(word_dtype(min(self.size, 8)))
        return from_words(line if self.size == 16 else line.reshape(-1), dtype)

    def cast(self, dtype: torch.dtype, to: torch.dtype) -> Pads:
        """The pads of a field of `dtype` that was cast."""
        if dtype == to:
            return self
        minus, plus = (words(torch.tensor(zero, dtype=dtype, device="cpu").to(to)) for zero in (-0.0, 0.0))
        signs = None if self.signs is None or torch.equal(minus, plus) else self.signs
        return Pads.of_rows(self.words(dtype).to(to), signs, self.records[:, 0])

    def moved(self, left: int, width: int) -> Pads:
        """The pads of rows that have `left` more columns on the left, or fewer, and are `width` wide then. New columns
        have no signs."""
        signs, nbytes = self.signs, -(-width // 8)
        if signs is None or (left == 0 and signs.shape[1] == nbytes and self.fits(width)):
            return self
        bits: Words = np.zeros((len(signs), 8 * nbytes), np.uint8)
        own = np.unpackbits(signs, axis=1)[:, max(-left, 0) :][:, : max(width - max(left, 0), 0)]
        bits[:, max(left, 0) : max(left, 0) + own.shape[1]] = own
        return Pads(np.concatenate([self.records[:, : 1 + self.size], np.packbits(bits, axis=1)], 1), self.size)


@lru_cache(maxsize=1024)
def _pads_of(pad: PadValue, text: str, dtype: torch.dtype) -> Pads:  # the text tells 0.0 from -0.0
    held = pad_tensor(0 if isinstance(pad, Pad) else pad, dtype)
    assert held is not None
    found = Pads.of_rows(held.view(1), None, np.array([abi.EDGE if pad is EDGE else abi.WORD]))
    found.records.flags.writeable = False
    return found
