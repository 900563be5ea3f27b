"""Pads: the values at the masked-out positions of a field."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from maskpack.core import abi
from maskpack.core.bits import words


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
    parts = [
        (place, part) for place, pad in enumerate(pads) if isinstance(pad, complex | float) for part in _parts(pad)
    ]
    odd = [f"{place}:{part.hex()}" for place, part in parts if part != _NAN]
    return " ".join([repr(tuple(pads)), *odd])


def _parts(pad: complex) -> list[bytes]:
    """The bits of the parts of a number that are NaN."""
    return [struct.pack("<d", part) for part in (pad.real, pad.imag) if math.isnan(part)]


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


def trial_of(pad: PadValue, dtype: torch.dtype, trusted: bool) -> tuple[int, tuple[int, int]]:
    """A pad for the core and the kernels: its mode, and the word of a constant in two halves."""
    trust = abi.TRUSTED if trusted else 0
    signed = dtype.is_floating_point and dtype.itemsize > 1
    if pad is PER_ROW or pad is ANY_ZERO or (pad is SIGNED_ZERO and signed):
        modes = {PER_ROW: abi.BY_ROW, ANY_ZERO: abi.BY_SIGNS, SIGNED_ZERO: abi.BY_SIGN}
        return modes[pad] + trust, (0, 0)
    if trusted:
        return abi.NO_PAD, (0, 0)
    if pad is EDGE:
        return abi.BY_EDGE, (0, 0)
    bits = pad_words(0 if isinstance(pad, Pad) else pad, dtype)
    assert bits is not None
    return abi.CONSTANT, (bits[0], bits[-1])
