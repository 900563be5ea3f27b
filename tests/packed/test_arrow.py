"""Arrow tables of packed batches, cell by cell against the padded batch."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import samples
import torch
from needs import needs, without
from tensordict import NonTensorStack, TensorDict

import maskpack as mp
from maskpack.errors import LayoutError, MaskpackError

needs("pyarrow")


def cells(values: torch.Tensor, mask: torch.Tensor) -> list[list[Any]]:
    """The valid values of each row, by loops."""
    return [
        [values[row, at].tolist() for at in range(values.shape[1]) if bool(mask[row, at])]
        for row in range(values.shape[0])
    ]


def test_one_list_a_row_with_the_valid_values_alone() -> None:
    batch = samples.rollout([(2, 3), (0, 0), (5, 1), (1, 6)], 5, 6, holes=True).exclude("global_token_num")
    packed = mp.compress(batch, pad_token_id=samples.PAD)
    table = packed.to_arrow()
    assert table.column_names == [name if isinstance(name, str) else "/".join(name) for name in packed.keys()]  # noqa: SIM118
    prompt, response = batch["attention_mask"][:, :5], batch["attention_mask"][:, 5:]
    for name, mask in (
        ("input_ids", batch["attention_mask"]),
        ("prompts", prompt),
        ("responses", response),
        ("returns", response),
    ):
        assert repr(table[name].to_pylist()) == repr(cells(batch[name], mask)), name  # NaN too
    assert mp.compress(batch, pad_token_id=samples.PAD)[[2, 0]].to_arrow("responses")["responses"].to_pylist() == [
        cells(batch["responses"], response)[row] for row in (2, 0)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16, torch.bool])
def test_dtypes_and_dims_of_elements(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    values = torch.tensor([[[1, 0], [3, 5], [0, 0]], [[0, 0], [0, 0], [0, 0]]]).to(dtype)
    batch = TensorDict({"attention_mask": mask, "x": values, "y": values[:, 0], "z": values[:, 0, 0]}, [2])
    registry = mp.RL_FIELDS | {"x": mp.MaskNestingSpec("sequence"), "y": mp.MaskNestingSpec(None)}
    batch["none"] = values[:, 0, :0]
    table = mp.compress(batch, registry=registry | {"none": mp.MaskNestingSpec(None)}).to_arrow()
    assert table["x"].to_pylist() == [[values[0, 0].tolist(), values[0, 1].tolist()], []]
    assert table["y"].to_pylist() == values[:, 0].tolist()
    assert table["z"].to_pylist() == values[:, 0, 0].tolist()
    assert table["none"].to_pylist() == [[], []]


def test_widths_that_run_along_the_last_dim_and_elements_of_two_dims() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    last, first = torch.arange(2 * 4 * 3).view(2, 4, 3) * mask[:, None], torch.arange(2 * 3 * 8).view(2, 3, 2, 4)
    batch = TensorDict({"attention_mask": mask, "last": last, "first": first * mask[..., None, None]}, [2])
    registry = mp.RL_FIELDS | {
        "last": mp.MaskNestingSpec("sequence", ragged_dim=-1),
        "first": mp.MaskNestingSpec("sequence"),
    }
    packed = mp.compress(batch, registry=registry, strict_mask_nesting=True)
    for rows in ([0, 1], [1, 0, 1]):
        table = packed.take(rows).to_arrow()
        for name, tokens in (("last", last.transpose(1, 2)), ("first", batch["first"])):
            assert table[name].to_pylist() == [cells(tokens, mask)[row] for row in rows], name


def test_nan_and_infinity_stay_what_they_are() -> None:
    batch = TensorDict({"reward": torch.tensor([math.nan, math.inf, -0.0])}, [3])
    nan, infinite, zero = mp.compress(batch).to_arrow()["reward"].to_pylist()
    assert math.isnan(nan)
    assert infinite == math.inf
    assert math.copysign(1, zero) == -1


def test_objects_sub_batches_and_an_object_for_all_rows() -> None:
    batch = TensorDict({"sub": TensorDict({"score": torch.tensor([1.0, 2.0])}, [2])}, [2])
    batch.set("uid", NonTensorStack("a", "b"))
    batch.set("info", NonTensorStack({"turns": 1}, {"turns": 2}))
    batch.set_non_tensor("step", 7)
    table = mp.compress(batch).to_arrow()
    assert table.to_pylist() == [
        {"sub/score": 1.0, "uid": "a", "info": {"turns": 1}, "step": 7},
        {"sub/score": 2.0, "uid": "b", "info": {"turns": 2}, "step": 7},
    ]


def test_a_field_that_arrow_has_no_type_for() -> None:
    batch = TensorDict({"x": torch.ones(2, dtype=torch.complex64), "y": torch.ones(2)}, [2])
    batch.set("o", NonTensorStack(object, print))
    packed = mp.compress(batch)
    with pytest.raises(LayoutError, match=r'field "x" holds torch.complex64; expected .* Name the fields'):
        packed.to_arrow("x")
    with pytest.raises(LayoutError, match=r'field "o" holds Python objects; expected .* Name the fields'):
        packed.to_arrow("o")
    assert packed.to_arrow("y").column_names == ["y"]
    with pytest.raises(LayoutError, match=r'PackedBatch.to_arrow: no field "nothing"'):
        packed.to_arrow("nothing")


def test_columns_come_in_the_order_asked_for() -> None:
    inner = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
    packed = mp.compress(TensorDict({"x": torch.zeros(2), "inner": inner, "y": torch.ones(2)}, [2]))
    assert packed.to_arrow().column_names == ["x", "inner/a", "inner/b", "y"]
    assert packed.to_arrow("y", "inner", "x").column_names == ["y", "inner/a", "inner/b", "x"]
    assert packed.to_arrow(("inner", "b"), "x", ("inner", "a")).column_names == ["inner/b", "x", "inner/a"]


@without("pyarrow")
def test_without_pyarrow(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", found)
    with pytest.raises(MaskpackError, match=r"pyarrow is not installed.*maskpack\[arrow\]"):
        mp.compress(TensorDict({"x": torch.ones(2)}, [2])).to_arrow()
