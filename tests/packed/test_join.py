"""What joining and putting together decides where batches hold a field in several ways: rows stay as they were."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same_batch, assert_same_tensor
from tensordict import TensorDict
from torch import Tensor

from maskpack import EDGE, PER_ROW, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack.core.pads import ANY_ZERO
from maskpack.packed.join import merged

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
M = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])


def under(pad: Any, *dim: int) -> dict[str, MaskNestingSpec]:
    return {"x": MaskNestingSpec("m", pad, *dim), "m": MaskNestingSpec("m")}


def padded(mask: Tensor, x: Tensor | list[list[int]]) -> TensorDict:
    return TensorDict({"m": mask, "x": torch.as_tensor(x)}, [len(mask)])


def constant(pad: int, mask: Tensor = M) -> TensorDict:
    return padded(mask, torch.where(mask.bool(), 9, pad))


def assert_joins(parts: list[TensorDict], pads: list[Any]) -> PackedBatch:
    """In both orders, whole and in each row. Returns them joined."""
    packed = [compress(part, registry=under(pad)) for part, pad in zip(parts, pads, strict=True)]
    for order in (1, -1):
        joined, want = PackedBatch.cat(packed[::order]), torch.cat(parts[::order])
        assert_same_batch(decompress(joined), want)
        for row in range(len(want)):
            assert_same_batch(decompress(joined[[row]]), want[row : row + 1])
    return PackedBatch.cat(packed)


def test_a_width_in_another_dim() -> None:
    x = torch.arange(18).view(2, 3, 3)
    mask = M[:, :3]
    parts = [padded(mask, x * mask[:, :, None]), padded(mask, x * mask[:, None])]
    packed = [compress(part, registry=under(0, dim)) for dim, part in enumerate(parts, 1)]
    assert [own.forms["x",].ragged_dim for own in packed] == [1, 2]
    for order in (1, -1):
        assert_same_batch(decompress(PackedBatch.cat(packed[::order])), torch.cat(parts[::order]))


def test_a_row_as_long_as_a_narrower_batch_is_wide() -> None:
    packed = [
        compress(padded(M[:1], [[1, 2, 0, 0]]), registry=under(0)),
        compress(padded(torch.tensor([[1, 1, 1, 1, 0, 0]]), [[1, 2, 3, 4, 4, 4]]), registry=under(EDGE)),
    ]
    for order in (1, -1):
        rows = decompress(PackedBatch.cat(packed[::order]))["x"].tolist()
        assert rows[::order] == [[1, 2, 0, 0, 0, 0], [1, 2, 3, 4, 4, 4]]


def test_an_edge_that_is_one_of_two_constants() -> None:
    edge = padded(M[:1], [[7, 1, 1, 1]])
    joined = assert_joins([constant(1), constant(2), edge], [1, 2, EDGE])
    assert joined.forms["x",].kind == "padded"


@pytest.mark.parametrize("edges", [[7, 7, 8, 8], [7, 7, 9, 9], [9, 9, 7, 7]])
def test_a_constant_that_is_one_of_two_edges(edges: list[int]) -> None:
    mask = torch.tensor([[0, 1, 1, 0]])
    assert_joins([padded(mask, [[9, 5, 9, 9]]), padded(mask, [edges])], [9, EDGE])


def test_no_padding_and_a_pad_that_is_no_zero_beside_zeros() -> None:
    full = padded(torch.ones(2, 3), torch.ones(2, 3))
    zeros = padded(torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[7.0, 0.0, -0.0, 0.0]]))
    packed = [compress(part, registry=under([5, ANY_ZERO])) for part in (full, zeros)]
    assert packed[0].forms["x",].pads == (5,)
    for order in (1, -1):
        joined = PackedBatch.cat(packed[::order])
        assert joined.forms["x",].pads == (ANY_ZERO,)
        assert_same_tensor(decompress(joined[[1 - order]])["x"], torch.tensor([[1.0, 1.0, 1.0, 0.0]]))
        assert_same_tensor(decompress(joined[[1 + order]])["x"], zeros["x"])


WAYS: dict[str, Callable[[PackedBatch], PackedBatch]] = {
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "bytes": lambda packed: PackedBatch.from_bytes(packed.to_bytes()),
    "own": lambda packed: packed.own(),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_one_part_whose_pads_came_with_the_other(way: str) -> None:
    joined = assert_joins([constant(1), constant(2)], [1, 2])
    assert joined.forms["x",].pads == (PER_ROW,)
    for begin, pad in ((0, 1), (2, 2)):
        assert_same_batch(decompress(WAYS[way](joined[begin : begin + 2])), constant(pad))


def test_pads_of_joined_rows_beside_other_fields() -> None:
    def joined(name: str) -> PackedBatch:
        batches = [(constant(pad).rename_key_("x", name), {name: MaskNestingSpec("m", pad)}) for pad in (1, 2)]
        more = {"m": MaskNestingSpec("m")}
        return PackedBatch.cat([compress(batch, registry=own | more) for batch, own in batches])

    both = merged([joined("x"), joined("y").select("y")], [("m",), ("x",), ("y",)])
    want = torch.cat([constant(1), constant(2)])
    assert_same_batch(decompress(both), want.set("y", want["x"]))


def test_rows_without_padding_take_the_pad_of_the_others() -> None:
    full = torch.ones_like(M)
    for pad in (5, PER_ROW):
        joined = assert_joins([constant(5, full), constant(7)], [pad, 7])
        assert joined.forms["x",].pads == (7,)
