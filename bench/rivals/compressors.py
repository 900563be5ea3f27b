"""Compressors of the tensors of a batch, one thread.

    OF_PADDED   the padded buffers, a user's first idea: zstd at level 1, lz4 and blosc2 with their defaults
    OF_VALUES   the lengths and the valid values of each field (valid_values): pcodec, blosc2 and Arrow with zstd

A compressed batch is a list with the bytes of each tensor; of Arrow, with those of one record batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness.measure import bits, require_same_tensor

try:
    import blosc2
    import lz4.frame
    import pyarrow as pa
    import zstandard
    from pcodec import ChunkConfig, standalone
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"bench: the package {missing.name} is missing. `pip install -e '.[bench]'` installs the rivals of this case."
    ) from missing


@dataclass(frozen=True)
class Rival:
    """`decode_all` takes what `encode_all` gave, and tensors whose shapes and dtypes new ones get."""

    encode_all: Callable[[Sequence[Tensor]], list[bytes]]
    decode_all: Callable[[Sequence[bytes], Sequence[Tensor]], list[Tensor]]


def encode_checked(rivals: Mapping[str, Rival], fields: Sequence[Tensor]) -> dict[str, list[bytes]]:
    """What each rival makes of the fields. Raises NotExact if it does not give them back."""
    encoded = {name: rival.encode_all(fields) for name, rival in rivals.items()}
    for name, rival in rivals.items():
        for number, restored in enumerate(rival.decode_all(encoded[name], fields)):
            require_same_tensor(f"{name}, field {number}", restored, fields[number])
    return encoded


def _each(encode: Callable[[Tensor], bytes], decode: Callable[[bytes, Tensor], Tensor]) -> Rival:
    """A rival that takes one tensor after the other."""
    return Rival(
        lambda fields: [encode(field) for field in fields],
        lambda encoded, fields: [decode(one, field) for one, field in zip(encoded, fields, strict=True)],
    )


def _memory(x: Tensor) -> memoryview:
    return memoryview(bits(x).numpy()).cast("B")


_ZSTD, _UNZSTD = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()  # kept: new ones allocate their tables


def _zstd_decode(encoded: bytes, field: Tensor) -> Tensor:
    out = torch.empty_like(field)  # decoding into it takes less time than decoding into bytes
    _UNZSTD.stream_reader(encoded).readinto(_memory(out))
    return out


def _lz4_decode(encoded: bytes, field: Tensor) -> Tensor:
    return torch.frombuffer(lz4.frame.decompress(encoded, return_bytearray=True), dtype=field.dtype).view(field.shape)


def _blosc2_encode(x: Tensor, **options: Any) -> bytes:
    return blosc2.compress2(bits(x).numpy(), typesize=x.element_size(), nthreads=1, **options)


def _blosc2_decode(encoded: bytes, field: Tensor) -> Tensor:
    out = torch.empty_like(field)
    blosc2.decompress2(encoded, dst=bits(out).numpy(), nthreads=1)
    return out


def _numbers(x: Tensor) -> Tensor:
    """[T], in the same memory, in a dtype that pcodec knows: bfloat16 as integers of the same bits."""
    return (x if x.dtype in (torch.float16, torch.float32, torch.float64) else bits(x)).view(-1)


def _pcodec_encode(x: Tensor) -> bytes:
    if x.element_size() == 1:  # bools, bytes, float8: pcodec itself advises against its 8-bit types
        return _ZSTD.compress(_memory(x))
    return standalone.simple_compress(_numbers(x).numpy(), ChunkConfig())  # level 8, the default


def _pcodec_decode(encoded: bytes, field: Tensor) -> Tensor:
    if field.element_size() == 1:
        return _zstd_decode(encoded, field)
    out = torch.empty_like(field)
    standalone.simple_decompress_into(encoded, _numbers(out).numpy())
    return out


def _arrow_encode(fields: Sequence[Tensor]) -> list[bytes]:
    """One record batch with a column for each field, as integers of the same bits. It has one row, whose cells are
    lists: the columns differ in length, and none repeats the lengths of the rows."""
    lists = [pa.ListArray.from_arrays(pa.array([0, x.numel()], pa.int32()), bits(x).view(-1).numpy()) for x in fields]
    batch = pa.record_batch(lists, names=[str(number) for number in range(len(lists))])
    sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return [sink.getvalue().to_pybytes()]


def _arrow_decode(encoded: Sequence[bytes], fields: Sequence[Tensor]) -> list[Tensor]:
    batch = pa.ipc.open_stream(encoded[0], options=pa.ipc.IpcReadOptions(use_threads=False)).read_next_batch()
    lists = zip(batch.columns, fields, strict=True)
    return [torch.from_dlpack(one.values).view(field.dtype).view(field.shape) for one, field in lists]


OF_PADDED = {
    "zstd level 1 of the padded buffers": _each(lambda x: _ZSTD.compress(_memory(x)), _zstd_decode),
    "lz4 of the padded buffers": _each(lambda x: lz4.frame.compress(_memory(x)), _lz4_decode),
    "blosc2 of the padded buffers": _each(_blosc2_encode, _blosc2_decode),
}
# Level 5 saves at most 1 % and takes 5 times as long to encode; shuffled bits, not bytes, make up to a third more.
_SHUFFLED = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.SHUFFLE], "filters_meta": [0]}
OF_VALUES = {
    "pcodec of the valid values": _each(_pcodec_encode, _pcodec_decode),
    "Arrow with zstd of the valid values": Rival(_arrow_encode, _arrow_decode),
    "blosc2 with zstd of the valid values": _each(partial(_blosc2_encode, **_SHUFFLED), _blosc2_decode),
}
