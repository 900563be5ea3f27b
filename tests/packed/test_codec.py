"""Byte compression, against plain Python integers and the zstandard package itself."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs, without
from samples import assert_same
from tensordict import TensorDict

from maskpack import MaskpackError, PackedBatch, compress, decompress
from maskpack.errors import WireFormatError
from maskpack.packed.file import codec

zstandard = needs("zstandard")
pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]
SIZES = [0, 1, 2, 63, 64, 65, 511, 512, 513, 5000]


def lines(dtype: str, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of every temper."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    return {
        "zeros": np.zeros(size, dtype),
        "small": rng.integers(0, 4, size).astype(dtype),
        "counting": np.arange(size).astype(dtype),
        "extremes": rng.choice(np.array([info.min, info.max, 0], dtype), size),
        "noise": rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_and_size(dtype: str, size: int) -> None:
    arrays = list(lines(dtype, size).values())
    small, records = codec.compressed_arrays(arrays)
    back = codec.restored_arrays(small, records, "test")
    assert [array.dtype for array in back] == [np.dtype(dtype)] * len(arrays)
    assert [array.tolist() for array in back] == [array.tolist() for array in arrays]
    assert all(now.nbytes <= before.nbytes for now, before in zip(small, arrays, strict=True))


def test_what_does_not_shrink_stays_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    short = np.zeros(60, np.int64)
    small, records = codec.compressed_arrays([noise, short])
    assert records == [None, None]
    assert small[0] is noise
    assert small[1] is short


# -------------------------------------------------------------------- in batches


def batch_of(**fields: torch.Tensor) -> TensorDict:
    return TensorDict(fields, [next(iter(fields.values())).shape[0]])


def test_what_the_codec_makes_smaller_is_sent_as_plain_words() -> None:
    """Blocks of bits hide bytes that repeat; where a codec finds more in plain words, these travel."""
    rng = np.random.default_rng(0)
    common = torch.from_numpy(rng.choice(rng.integers(0, 1 << 30, 9), (4, 9000)))
    noise = torch.from_numpy(rng.integers(0, 1 << 18, (4, 9000)))
    packed = compress(batch_of(common=common, noise=noise, same=noise + 0), codec="zstd")
    assert [packed.table.kind(field) for field in range(3)] == ["blocks"] * 3
    for back in (PackedBatch.from_bytes(packed.to_bytes()), pickle.loads(pickle.dumps(packed))):
        assert [back.table.kind(field) for field in range(3)] == ["plain", "blocks", "blocks"]
        assert_same(decompress(back), decompress(packed))
        assert_same(decompress(back[1:3]), decompress(packed[1:3]))


@without("zstandard")
def test_missing_package(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(x=torch.arange(6000).view(6, 1000) % 77)
    data = compress(batch, codec="zstd").to_bytes()
    monkeypatch.setitem(sys.modules, "zstandard", found)
    for call, name in (
        (lambda: compress(batch, codec="zstd"), "compress"),
        (lambda: PackedBatch.from_bytes(data), "PackedBatch.from_bytes"),
    ):
        with pytest.raises(
            MaskpackError, match=r"needs the package zstandard.*pip install 'maskpack\[zstd\]'"
        ) as error:
            call()
        assert str(error.value).startswith(f"{name}: ")
        assert not isinstance(error.value, WireFormatError)
    assert_same(decompress(PackedBatch.from_bytes(compress(batch).to_bytes())), batch)
