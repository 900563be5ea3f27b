"""What a plan on the host has to look at in each batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_same_batch
from tensordict import TensorDict

from maskpack import (
    EDGE,
    PER_ROW,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
    compress,
    decompress,
    nest_batch_by_mask,
    unnest_batch_by_mask,
)
from maskpack.core import native
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO
from maskpack.errors import LayoutError, MaskpackError
from maskpack.nesting.axes import Source

M = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])


def test_each_layout_of_fields_that_share_offsets_is_compared() -> None:
    other = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]])
    registry = {name: MaskNestingSpec(mask) for name, mask in zip("xayb", "aabb", strict=True)}

    def nested(k: int) -> TensorDict:
        return nest_batch_by_mask(TensorDict({"x": M * k, "a": M, "y": other * k, "b": other}, [2]), registry)

    for k in (2, 3):
        compress(nested(k), registry=registry)
    batch = nested(5)
    batch["y"] = batch["x"] * 7
    assert batch["y"].offsets() is batch["x"].offsets()
    with pytest.raises(MaskpackError, match='"y"'):
        compress(batch, registry=registry)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_lossy_field_whose_width_is_not_its_first_dim(contiguous: bool) -> None:
    registry = {"x": MaskNestingSpec("m", 0, 2), "m": MaskNestingSpec("m")}
    x = torch.arange(24).view(2, 3, 4)
    for own in (x, x * M[:, None], x + 1):
        own = own if contiguous else own.movedim(2, 1).contiguous().movedim(1, 2)
        batch = TensorDict({"m": M, "x": own}, [2])
        assert_same_batch(decompress(compress(batch, registry=registry)), batch)


def test_zeros_are_the_constant_unless_one_has_a_sign() -> None:
    """In batches of one kind, one after the other."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", ANY_ZERO)}
    for zero in (0.0, -0.0, 0.0):
        batch = TensorDict({"m": mask, "x": torch.where(mask.bool(), 3.0, zero)}, [2])
        packed = compress(batch, registry=registry)
        own = packed.table.pads[packed.numbers["x",]]
        assert (own["size"], own["count"]) == ((6, 2) if str(zero) == "-0.0" else (5, 1))
        assert_same_batch(decompress(packed), batch)


def test_many_masks_take_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are found by their hashes, not by comparing each with all others."""
    compared = 0

    def equal(one: Source, other: object) -> bool:
        nonlocal compared
        compared += 1
        return tuple.__eq__(one, other)

    count = 400
    registry = {f"m{number}": MaskNestingSpec(f"m{number}") for number in range(count)}
    batch = TensorDict(dict.fromkeys(registry, M), [2])
    monkeypatch.setattr(Source, "__eq__", equal)
    assert_same_batch(decompress(compress(batch, registry=registry)), batch)
    assert compared < 20 * count


SHAPES = {
    "rows": (1, 4),
    "columns": (3, 1),
    "both": (1, 1),
    "elements": (3, 1, 2),
    "strided": (3, 1, 1, 2),
    "rows of": (1, 1, 3),
}
MASKS = {"own": [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], "rows": [[0, 1, 1, 0]], "both": [[1]]}


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_expanded_tensors_are_read_where_they_lie(shape: tuple[int, ...], mask: str) -> None:
    """Bit for bit as those that are written out, whatever the pad; no copy is larger than a column or a row."""
    full = (3, 4, *(5 if size == 1 else size for size in shape[2:]))
    mask_of = torch.tensor(MASKS[mask]).expand(3, 4)
    for first, last in ((0, 0), (1, 2), (-0.0, 0.0), (0.0, 0.0), (2.5, 2.5), (True, False), (3j, 4j), (0, None)):
        x = torch.full(shape, first)
        x[-1] = torch.arange(x[-1].numel()).view(shape[1:]) if last is None else last
        for pad in (0, EDGE, PER_ROW, SIGNED_ZERO, ANY_ZERO):
            registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", pad)}
            batch = TensorDict({"m": mask_of, "x": x.expand(full)}, [3])
            written = TensorDict({name: value.contiguous() for name, value in batch.items()}, [3])
            for call in (compress, nest_batch_by_mask):
                back = decompress if call is compress else unnest_batch_by_mask
                assert_same_batch(back(call(batch, registry=registry)), written)
    held = native.described(x.expand(full))[1]
    assert 3 * held.untyped_storage().nbytes() <= x.expand(full).numel() * x.element_size()


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_a_lossy_field_of_a_batch_without_batch_dims() -> None:
    registry = MaskNestingRegistry({"x": MaskNestingSpec("m"), "m": MaskNestingSpec("m")}, {"m": MaskAxis("m")})
    for x in (M + 1, M * 3, M + 2):
        batch = TensorDict({"m": M, "x": x}, [])
        assert_same_batch(decompress(compress(batch, registry=registry)), batch)
        assert_same_batch(unnest_batch_by_mask(nest_batch_by_mask(batch, registry)), batch)


@pytest.mark.parametrize("call", [compress, nest_batch_by_mask])
def test_flat_fields_have_the_rows_of_the_batch(call: Any) -> None:
    """cu_seqlens of 6 rows in a batch of 7, whose tokens are as many as its rows."""
    registry = MaskNestingRegistry({"x": MaskNestingSpec("rows")}, {"rows": MaskAxis("cu", "cu_seqlens")})
    ends = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    with pytest.raises(LayoutError, match='field "x" is'):
        call(TensorDict({"cu": ends, "x": torch.arange(21).view(7, 3)}, [7]), registry=registry)
