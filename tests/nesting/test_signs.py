"""The signs of zeros under a mask: bits of other writers at tokens, which mean nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from oracle import assert_same_batch
from tensordict import TensorDict

import maskpack as mp
from maskpack.core.pads import ANY_ZERO, Pads

ZEROS = {"m": ("m", 0), "x": ("m", [0, ANY_ZERO])}


def test_pads_that_travel_say_where_they_lie_there() -> None:
    pads = Pads.of_rows(torch.tensor([1.0, 2.0]))
    assert pads.place == (pads.records.ctypes.data, 5, 2)
    there = pickle.loads(pickle.dumps(pads))
    assert there.place == (there.records.ctypes.data, 5, 2)


def records(signs: torch.Tensor) -> bytes:
    """Those of rows whose word is 0.0: a byte, four bytes, and the signs."""
    return b"".join(bytes(5) + line.tobytes() for line in np.packbits(signs.numpy(), axis=1))


@pytest.mark.parametrize("pads", [[0.0, -0.0], [-0.0, 0.0]], ids=str)
@pytest.mark.parametrize("pad", [0.0, -0.0])
def test_of_two_zeros_the_one_under_the_mask_is_the_pad(pads: list[float], pad: float) -> None:
    batch = TensorDict({"m": torch.tensor([[1, 0]]), "x": torch.tensor([[9.0, pad]])}, [1])
    nested = mp.nest_batch_by_mask(batch, {"m": ("m", 0), "x": ("m", pads)})
    assert_same_batch(mp.unnest_batch_by_mask(nested), batch)


def by_another_writer() -> tuple[mp.PackedBatch, TensorDict]:
    """A message in which the bits of tokens are set, too."""
    mask = torch.zeros(2, 8).long()
    mask[0, :3], mask[1, :4] = 1, 1
    minus = torch.tensor([[0, 0, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0, 1, 1]]).bool()
    x = torch.where(mask.bool(), torch.arange(16.0).reshape(2, 8) + 1, torch.where(minus, -0.0, 0.0))
    batch = TensorDict({"m": mask, "x": x}, [2])
    packed = mp.compress(batch, registry=ZEROS)
    own, theirs = (records(signs) for signs in (minus, minus | mask.bool()))
    data = packed.to_bytes()
    assert data.count(own) == 1
    return mp.PackedBatch.from_bytes(data.replace(own, theirs)), batch


def test_bits_at_tokens_mean_nothing() -> None:
    packed, batch = by_another_writer()
    nested = mp.decompress(packed, format="nested")
    ways = {
        "padded": mp.decompress(packed),
        "nested": mp.unnest_batch_by_mask(nested),
        "nested, packed again": mp.decompress(mp.compress(nested)),
        "nested, by another registry": mp.decompress(mp.compress(nested, registry={"m": ("m", 0), "x": ("m", 0)})),
        "joined": mp.decompress(mp.PackedBatch.cat([packed, packed]))[2:],
        "joined nested": mp.unnest_batch_by_mask(mp.nesting.cat([nested, nested]))[:2],
        "taken": mp.decompress(packed[[1, 0]])[[1, 0]],
        "taken nested": mp.unnest_batch_by_mask(mp.nesting.take(nested, [1, 0]))[[1, 0]],
        "bytes": mp.decompress(mp.PackedBatch.from_bytes(packed.to_bytes())),
    }
    for way, seen in ways.items():
        assert_same_batch(seen, batch, way)


def test_bits_at_tokens_mean_nothing_in_another_dtype() -> None:
    packed, batch = by_another_writer()
    nested = mp.decompress(packed, format="nested")
    nested["x"] = nested["x"].double()
    assert_same_batch(mp.unnest_batch_by_mask(nested), batch.clone().set("x", batch["x"].double()))
