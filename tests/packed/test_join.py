"""What joining and putting together decides where batches hold a field in several ways: rows stay as they were."""

from __future__ import annotations

import pickle
from typing import Any

import fuzz_batches
import numpy as np
import pytest
import torch
from oracle import assert_same_batch
from tensordict import TensorDict
from torch import Tensor

from maskpack import (
    RL_FIELDS,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
    PackedBatch,
    compress,
    decompress,
)
from maskpack import unnest_batch_by_mask as unnest
from maskpack.errors import LayoutError
from maskpack.nesting import cat
from maskpack.packed.join import merged
from maskpack.views import BatchView

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
M = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])


def under(pad: Any, *dim: int) -> dict[str, MaskNestingSpec]:
    return {"x": MaskNestingSpec("m", pad, *dim), "m": MaskNestingSpec("m")}


def padded(mask: Tensor, x: Tensor | list[list[int]]) -> TensorDict:
    return TensorDict({"m": mask, "x": torch.as_tensor(x)}, [len(mask)])


@pytest.mark.parametrize("seed", range(0, 120, 40))
def test_programs_of_operations_on_padded_rows(seed: int) -> None:
    """Rows of other pads, widths and anchors join packed and nested, and each keeps its own pad."""
    for own in range(seed, seed + 40):
        fuzz_batches.Program(own).run()


@pytest.mark.parametrize("order", [1, -1])
def test_a_field_that_stays_padded_in_the_widest_batch(order: int) -> None:
    narrow, wide = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0, 0, 0]])
    parts = [padded(narrow, [[4, 5, 0]]), padded(wide, [[6, 0, 3, 0, 0]])][::order]
    joined = decompress(PackedBatch.cat([compress(part, registry=under(0)) for part in parts]))
    assert joined["x"].tolist() == [[4, 5, 0, 0, 0], [6, 0, 3, 0, 0]][::order]
    assert joined["m"].tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]][::order]


def test_a_layout_is_columns_of_another_one_in_all_rows_or_in_none() -> None:
    fields = {"mask": MaskNestingSpec("all"), "last": MaskNestingSpec("end"), "x": MaskNestingSpec("end")}
    tail, own = MaskAxis("mask", part="tail", tail=("x",)), MaskAxis("last")
    registries = [MaskNestingRegistry(fields, {"all": MaskAxis("mask"), "end": end}) for end in (tail, own)]

    def part(mask: list[int], last: list[int], number: int) -> PackedBatch:
        ends = torch.tensor([last])
        batch = TensorDict({"mask": torch.tensor([mask]), "last": ends, "x": ends * 7}, [1])
        return compress(batch, registry=registries[number])

    whole, wider = part([0, 1, 1, 1, 0], [1, 1, 0], 0), part([0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0], 0)
    gap = part([1, 1, 1, 1, 1], [1, 0, 1], 1)
    assert decompress(PackedBatch.cat([whole, part([0, 0, 1, 1, 1, 0], [1, 1, 0], 0)[:0]]))["mask"].shape[1] == 6
    for parts, masks in (([whole], 1), ([whole, wider], 1), ([whole, gap], 2), ([gap, whole], 2)):
        joined = PackedBatch.cat(parts)
        nested, want = decompress(joined, format="nested"), decompress(joined)
        assert sum(key.startswith("mask ") for key in nested["_maskpack"].keys()) == masks  # noqa: SIM118
        assert [row[row > 0].tolist() for row in want["x"]] == [[7, 7]] * len(parts)
        for row, one in zip(want["last"].tolist(), parts, strict=True):
            last = decompress(one)["last"][0].tolist()
            assert row == last + [0] * (len(row) - len(last))
        for way in (unnest(nested), decompress(PackedBatch.from_bytes(joined.to_bytes()))):
            assert_same_batch(way, want)


def test_a_layout_whose_whole_is_in_some_of_the_batches_is_stored_alone() -> None:
    """Also beside another layout of the name of the whole."""

    def batch(*prompts: int) -> TensorDict:
        mask = torch.tensor([[0] * (3 - n) + [1] * n + [1, 1] for n in prompts])
        ids = mask * torch.arange(1, mask.numel() + 1).view(mask.shape)
        fields = {"prompts": ids[:, :3], "responses": ids[:, 3:], "attention_mask": mask, "scores": mask[:, 3:] * 0.5}
        return TensorDict(fields, [len(prompts)])

    registry = RL_FIELDS | {"scores": MaskNestingSpec("response")}
    options = {"registry": registry, "pad_token_id": 0}
    alone = TensorDict({"response_mask": torch.ones(2, 2).long(), "scores": torch.ones(2, 2)}, [2])
    parts = [compress(own, **options).select("scores") for own in (batch(3, 3), alone)]
    rows, other = PackedBatch.cat(parts)[:2], batch(1, 0)
    both = BatchView.of(rows).with_fields(compress(other, **options).select("prompts")).to_packed()
    for packed, want in (
        (rows, batch(3, 3).select("scores")),
        (both, batch(3, 3).select("scores").update(other.select("prompts"))),
    ):
        for sent in (
            packed,
            packed.own(),
            pickle.loads(pickle.dumps(packed)),
            PackedBatch.from_bytes(packed.to_bytes()),
        ):
            assert sorted(sent.layouts) == sorted(packed.layouts)
            assert_same_batch(decompress(sent), want)


@pytest.mark.parametrize("seen", [torch.tensor(3), np.array(3)], ids=["tensor", "array"])
def test_an_array_without_dims_is_no_list_of_batches(seen: Any) -> None:
    with pytest.raises(LayoutError, match=r"PackedBatch\.cat: got .*; expected a list of at least one PackedBatch"):
        PackedBatch.cat(seen)


@pytest.mark.parametrize("form", [lambda packed: packed, lambda packed: PackedBatch.from_bytes(packed.to_bytes())])
def test_no_rows_of_a_batch_are_joined_with_it(form: Any) -> None:
    """Nested, too: they know which layouts are columns of others."""
    ids = torch.tensor([[0, 5, 6, 7, 8, 0], [3, 4, 5, 6, 0, 0]])
    batch = TensorDict(
        {"input_ids": ids, "attention_mask": (ids > 0).long(), "prompts": ids[:, :3], "responses": ids[:, 3:]}, [2]
    )
    packed = compress(batch, pad_token_id=0)
    for none in (packed[:0], packed.take([]), PackedBatch.cat([packed[:0], packed[2:]])):
        nested = [decompress(own, format="nested") for own in (form(none), packed)]
        assert_same_batch(unnest(cat(nested)), batch)
        assert_same_batch(unnest(cat(nested[::-1])), batch)


def test_a_width_in_another_dim() -> None:
    x = torch.arange(18).view(2, 3, 3)
    mask = M[:, :3]
    parts = [padded(mask, x * mask[:, :, None]), padded(mask, x * mask[:, None])]
    packed = [compress(part, registry=under(0, dim)) for dim, part in enumerate(parts, 1)]
    assert [own.forms["x",].ragged_dim for own in packed] == [1, 2]
    for order in (1, -1):
        assert_same_batch(decompress(PackedBatch.cat(packed[::order])), torch.cat(parts[::order]))


def test_pads_of_joined_rows_beside_other_fields() -> None:
    def of(name: str, pad: int) -> TensorDict:
        return padded(M, torch.where(M.bool(), 9, pad)).rename_key_("x", name)

    def joined(name: str) -> PackedBatch:
        more = {"m": MaskNestingSpec("m")}
        return PackedBatch.cat(
            [compress(of(name, pad), registry=more | {name: MaskNestingSpec("m", pad)}) for pad in (1, 2)]
        )

    both = merged([joined("x"), joined("y").select("y")], [("m",), ("x",), ("y",)])
    want = torch.cat([of("x", 1), of("x", 2)])
    assert_same_batch(decompress(both), want.set("y", want["x"]))
