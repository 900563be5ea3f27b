"""Byte compression of a message's arrays, for slow networks: zstd over shuffled bytes.

    words -> first bytes of all items, then second bytes, ... -> zstd

An array that this does not make smaller stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from maskpack.core.backends import is_installed
from maskpack.core.bits import Words
from maskpack.errors import MaskpackError
from maskpack.packed.file.container import brief, fail

if TYPE_CHECKING:
    from maskpack.packed.table import Table

CODECS = ("zstd",)
_LEVEL = 1
_LEAST = 512
_SAMPLE = 1 << 17
"""Words that tell whether the codec makes fewer bytes of plain words than of blocks."""
_COLUMNS = 4
"""Columns of a field that tell it for all of them."""
MOST = 1 << 8
"""Bytes that the arrays of a message may stand for, for each one that travels."""


def check_codec(codec: str | None, call: str) -> None:
    """Raises MaskpackError for an unknown codec, and for one whose library is not installed."""
    if codec is None:
        return
    if codec not in CODECS:
        raise MaskpackError(f"{call}: codec is {codec!r}; expected None or {', '.join(CODECS)}. Choose one of these.")
    if not is_installed("zstandard"):
        raise MaskpackError(
            f'{call}: codec="zstd" needs the package zstandard, which is not installed. '
            "Run: pip install 'maskpack[zstd]'"
        )


def as_sent(table: Table, codec: str | None) -> Table:
    """A table with a body of its own, and for a codec with plain words in place of blocks of bits and of pieces where a
    sample says that the codec makes fewer bytes of them."""
    if codec is None:
        return table.own()
    plain: dict[int, Words] = {}
    for field in range(len(table.fields)):
        at = int(table.fields[field])
        kind, made = table.kind(field), table.own_entries(field)
        in_pieces = kind.startswith("pieces ")
        if at not in plain and (kind in ("blocks", "columns blocks") or in_pieces):
            own = made[:-1] if kind == "columns blocks" else [at]
            some = {one: table.words_of(one) for one in own[:: -(-len(own) // _COLUMNS)]}
            least = sum(max(_share(words), 1 / MOST) * words.nbytes for words in some.values())  # more is paid for
            instead = made if in_pieces else some
            if least < sum(_share(array) * array.nbytes for one in instead for array in table.arrays_of(one)):
                plain |= some
                plain |= {one: table.words_of(one) for one in own if one not in some}
    return (table.with_plain(plain) if plain else table).own()


def compressed_arrays(arrays: Sequence[Words]) -> tuple[list[Words], list[Any]]:
    """The arrays as they travel, and for each what it was: None, or [dtype, size]."""
    import zstandard

    def pack(number: int) -> tuple[Words, Any]:
        array: Words = np.ascontiguousarray(arrays[number])
        if array.nbytes < _LEAST:
            return array, None
        small = np.frombuffer(zstandard.ZstdCompressor(level=_LEVEL).compress(_shuffled(array)), np.uint8)
        if small.nbytes >= array.nbytes:
            return array, None
        return small, [f"{array.dtype.kind}{array.itemsize}", array.size]

    pairs = _each(pack, range(len(arrays)))
    return [array for array, _ in pairs], [record for _, record in pairs]


def size_of(records: Iterable[Any]) -> int:
    """Bytes of the arrays that were compressed."""
    return sum(record[1] * np.dtype(record[0]).itemsize for record in records if record is not None)


def check_records(arrays: Sequence[Words], records: Any, call: str) -> None:
    """Raises WireFormatError for records that do not fit the arrays, or that claim too many bytes for them."""
    if not isinstance(records, list) or len(cast("list[Any]", records)) != len(arrays):
        fail(call, "codec records that are not one for each array", "one for each")
    for record in cast("list[Any]", records):
        line: list[Any] = cast("list[Any]", record) if isinstance(record, list) else []
        known = len(line) == 2 and line[0] in _SIZES and type(line[1]) is int and line[1] >= 0
        if record is not None and not known:
            fail(call, f"codec record {brief(record)}", f"[dtype, size], a dtype of {', '.join(_SIZES)}")
    claimed, nbytes = size_of(cast("list[Any]", records)), sum(array.nbytes for array in arrays)
    if claimed > MOST * nbytes:
        fail(call, f"{nbytes} bytes of arrays that stand for {claimed}", f"at most {MOST} times as many")


def restored_arrays(arrays: Sequence[Words], records: Sequence[Any], call: str) -> list[Words]:
    """The inverse of `compressed_arrays`. Raises WireFormatError for arrays that are not as the records say."""
    return _each(lambda number: _expanded(arrays[number], records[number], call), range(len(arrays)))


def _share(words: Words) -> float:
    """Bytes that the codec makes of each byte of words, in a sample."""
    import zstandard

    if not words.size:
        return 1.0
    begin = max(0, (words.size - _SAMPLE) // 2)
    part: Words = np.ascontiguousarray(words[begin : begin + _SAMPLE]).view(f"u{words.itemsize}")
    return len(zstandard.ZstdCompressor(level=_LEVEL).compress(_shuffled(part))) / part.nbytes


def _expanded(array: Words, record: Any, call: str) -> Words:
    import zstandard

    if record is None:
        return array
    name, size = record
    if array.dtype != np.uint8:
        fail(call, f"a zstd frame in {array.dtype}", "one in uint8")
    nbytes = size * np.dtype(name).itemsize
    try:
        frame = zstandard.get_frame_parameters(array.data)
        if frame.content_size != nbytes:
            fail(call, f"a zstd frame of {frame.content_size} bytes", f"{nbytes}")
        line = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            array.data, max_output_size=nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        fail(call, f"a zstd frame that is damaged ({error})", "a whole one")
    return _unshuffled(np.frombuffer(line, np.uint8), np.dtype(name))


_SIZES = tuple(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8))


def _shuffled(line: Words) -> bytes:
    out: Words = np.empty((line.itemsize, line.size), np.uint8)
    out[...] = line.view(np.uint8).reshape(-1, line.itemsize).T
    return out.data.tobytes()


def _unshuffled(line: Words, dtype: np.dtype[Any]) -> Words:
    if dtype.itemsize == 1:
        return line.view(dtype)
    out: Words = np.empty((line.size // dtype.itemsize, dtype.itemsize), np.uint8)
    out[...] = line.reshape(dtype.itemsize, -1).T
    return out.reshape(-1).view(dtype)


def _each(work: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(work, numbers))
