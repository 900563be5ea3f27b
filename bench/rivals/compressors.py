"""Compressors over the padded buffers of a batch, a user's first idea: zstd at level 1, lz4 and blosc2 with their
defaults, one thread. A compressed batch is a list with the bytes of each field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness.measure import require_same_tensor

try:
    import blosc2
    import lz4.frame
    import zstandard
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"bench: the package {missing.name} is missing. `pip install -e '.[bench]'` installs the rivals of this case."
    ) from missing


@dataclass(frozen=True)
class Rival:
    """`encode` takes a field; `decode` takes its bytes and a tensor whose shape and dtype a new one gets."""

    encode: Callable[[Tensor], bytes]
    decode: Callable[[bytes, Tensor], Tensor]

    def encode_all(self, fields: Sequence[Tensor]) -> list[bytes]:
        return [self.encode(field) for field in fields]

    def decode_all(self, encoded: Sequence[bytes], fields: Sequence[Tensor]) -> list[Tensor]:
        return [self.decode(one, field) for one, field in zip(encoded, fields, strict=True)]


def encode_checked(fields: Sequence[Tensor]) -> dict[str, list[bytes]]:
    """What each rival makes of the fields. Raises NotExact if it does not give them back."""
    encoded = {name: rival.encode_all(fields) for name, rival in RIVALS.items()}
    for name, rival in RIVALS.items():
        for number, restored in enumerate(rival.decode_all(encoded[name], fields)):
            require_same_tensor(f"{name}, field {number}", restored, fields[number])
    return encoded


def _memory(x: Tensor) -> memoryview:
    return memoryview(x.numpy()).cast("B")


_ZSTD, _UNZSTD = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()  # kept: new ones allocate their tables


def _zstd_decode(encoded: bytes, field: Tensor) -> Tensor:
    out = torch.empty_like(field)  # decoding into it takes less time than decoding into bytes
    _UNZSTD.stream_reader(encoded).readinto(_memory(out))
    return out


def _lz4_decode(encoded: bytes, field: Tensor) -> Tensor:
    return torch.frombuffer(lz4.frame.decompress(encoded, return_bytearray=True), dtype=field.dtype).view(field.shape)


def _blosc2_decode(encoded: bytes, field: Tensor) -> Tensor:
    out = torch.empty_like(field)
    blosc2.decompress2(encoded, dst=out.numpy(), nthreads=1)
    return out


RIVALS = {
    "zstd level 1": Rival(lambda x: _ZSTD.compress(_memory(x)), _zstd_decode),
    "lz4": Rival(lambda x: lz4.frame.compress(_memory(x)), _lz4_decode),
    "blosc2": Rival(lambda x: blosc2.compress2(x.numpy(), typesize=x.element_size(), nthreads=1), _blosc2_decode),
}
