"""What LAYOUTS says of batches that were joined, updated or changed: they are restored bit by bit, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_same_batch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from maskpack import PER_ROW, MaskNestingSpec, compress, decompress, nest_batch_by_mask, unnest_batch_by_mask
from maskpack.errors import LayoutError
from maskpack.nesting.schema import LAYOUTS

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
M = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])


def spec(pad: Any) -> dict[str, MaskNestingSpec]:
    return {"x": MaskNestingSpec("m", pad), "m": MaskNestingSpec("m")}


def padded(*pads: float) -> Tensor:
    return torch.where(M.bool(), 9.0, torch.tensor(pads)[:, None])


def updated(one: Tensor, other: Tensor) -> tuple[TensorDict, TensorDict]:
    """A padded batch, and the same nested, which were updated with one of other fields, but for `x`."""
    batches = [TensorDict({"x": x, "m": M, f"y{n}": torch.ones(2)}, [2]) for n, x in enumerate((one, other))]
    rules = [spec(PER_ROW) | {f"y{n}": MaskNestingSpec(None)} for n in range(2)]
    nested = [nest_batch_by_mask(*both) for both in zip(batches, rules, strict=True)]
    nested[0].update(nested[1])
    assert len(nested[0][LAYOUTS].keys()) == 2
    return batches[0].update(batches[1]), nested[0]


def test_pads_of_rows_in_two_parts_are_compared_by_their_bits() -> None:
    batch, nested = updated(padded(float("nan"), 1.0), padded(float("nan"), 1.0))
    assert_same_batch(unnest_batch_by_mask(nested), batch)
    _, nested = updated(padded(0.0, 1.0), padded(-0.0, 1.0))
    with pytest.raises(LayoutError, match='"x" was nested twice'):
        unnest_batch_by_mask(nested)


def test_batches_that_are_split_elsewhere_are_not_one() -> None:
    def part(response: int) -> TensorDict:
        about = NonTensorData(response, batch_size=[2])
        batch = TensorDict({"attention_mask": M, "input_ids": M * 3, "max_response_length": about}, [2])
        return nest_batch_by_mask(batch, pad_token_id=0)

    unnest_batch_by_mask(torch.cat([part(3), part(3)]))
    with pytest.raises(LayoutError, match="joined from batches of different widths"):
        unnest_batch_by_mask(torch.cat([part(3), part(2)]))


def test_an_update_with_the_same_fields_in_another_order_replaces_them() -> None:
    registry, mask = {name: MaskNestingSpec("m") for name in "mxy"}, M.flip(0)
    batch = TensorDict({"x": M * 2, "y": M * 3, "m": M}, [2])
    other = TensorDict({"y": mask * 4, "m": mask, "x": mask * 5}, [2])
    nested = nest_batch_by_mask(batch, registry)
    nested.update(nest_batch_by_mask(other, registry))
    assert_same_batch(unnest_batch_by_mask(nested), batch.update(other))


@pytest.mark.parametrize("call", [nest_batch_by_mask, lambda batch, registry: compress(batch, registry=registry)])
def test_rows_of_other_lengths_in_a_field_of_several_pads_are_refused(call: Any) -> None:
    batches = [TensorDict({"x": padded(pad, pad), "m": M}, [2]) for pad in (0.0, 1.0)]
    nested = torch.cat([nest_batch_by_mask(batch, spec([0.0, 1.0])) for batch in batches])
    call(nested, spec(PER_ROW))
    nested["x"] = torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 2, 1)], layout=torch.jagged)
    with pytest.raises(LayoutError, match='"x"'):
        call(nested, spec(PER_ROW))


@pytest.mark.parametrize("pads", [[0.0, -0.0], [-0.0, 0.0]], ids=str)
@pytest.mark.parametrize("pad", [0.0, -0.0])
def test_of_two_zeros_the_one_under_the_mask_is_the_pad(pads: list[float], pad: float) -> None:
    batch = TensorDict({"x": padded(pad, pad), "m": M}, [2])
    assert_same_batch(unnest_batch_by_mask(nest_batch_by_mask(batch, spec(pads))), batch)


def test_an_update_with_a_field_of_another_dtype_is_refused() -> None:
    """Its pads are the same bits: zeros."""
    parts = [
        nest_batch_by_mask(TensorDict({"x": (M * 3).to(dtype), "m": M, f"y{n}": torch.ones(2)}, [2]), spec(0) | more)
        for n, dtype in enumerate((torch.float32, torch.float64))
        for more in [{f"y{n}": MaskNestingSpec(None)}]
    ]
    with pytest.raises(LayoutError, match=r'"x" was nested twice, as torch.float32 with .* and as torch.float64 with'):
        unnest_batch_by_mask(parts[0].update(parts[1]))


def test_a_field_that_was_cast_has_its_pad_in_the_new_dtype() -> None:
    """300 is 44 in eight bits, as for a padded tensor that is cast."""
    batch = TensorDict({"x": torch.where(M.bool(), M * 7, 300), "m": M}, [2])
    nested = nest_batch_by_mask(batch, spec(300))
    nested["x"] = nested["x"].to(torch.int8)
    batch["x"] = batch["x"].to(torch.int8)
    assert_same_batch(unnest_batch_by_mask(nested), batch)
    assert_same_batch(unnest_batch_by_mask(nest_batch_by_mask(nested, spec(300))), batch)
    assert_same_batch(decompress(compress(nested, registry=spec(300))), batch)
