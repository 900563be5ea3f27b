"""Rows that are packed alone, as bytes, and some fields of several of them together: against the rows that were put."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same_object, assert_same_tensor
from torch import Tensor

from maskpack import PackedBatch, decompress
from maskpack.core.objects import Objects
from maskpack.errors import StorageError
from maskpack.packed.rows import RowAlone, Values, rows_alone, rows_together

LENGTHS = ([3, 1, 0, 4], [2, 2, 5, 1])
"""Of `tokens` and of `near`, which is encoded after `base` though it comes before; and of `pairs`."""
TENSORS, OBJECTS = ("near", "base", "pairs", "score"), ("plain", "text", "held")


def rows_put(tensors: bool = True) -> dict[str, list[Any]]:
    """Four rows of each field; those of `held` have tensors, or none."""
    torch.manual_seed(0)
    near = [torch.randint(1 << 40, (n,)) for n in LENGTHS[0]]
    held = [[{"at": row, "of": torch.arange(row + 1)}, row][not tensors] for row in range(4)]
    return {
        "plain": [10, 20, 30, 40],
        "near": near,
        "base": [x - 1 for x in near],
        "text": ["a", "bc", "", "d"],
        "pairs": [torch.rand(n, 2) for n in LENGTHS[1]],
        "held": held,
        "score": [torch.tensor(-0.0), torch.tensor(1.5), torch.tensor(float("nan")), torch.tensor(7.0)],
    }


def alone(fields: dict[str, list[Any]], rows: list[int]) -> list[RowAlone]:
    """Some rows, packed by one call, through their bytes."""
    columns: dict[str, Values | Objects] = {}
    for name, items in fields.items():
        some = [items[row] for row in rows]
        if name in OBJECTS:
            columns[name] = Objects(some, 1).stowed()
        elif name == "score":
            columns[name] = Values(torch.stack(some))
        else:
            columns[name] = Values(torch.cat(some), np.array([len(x) for x in some]))
    packed = rows_alone(columns, len(rows), {"near": ("near:base",)}, "put", "about")
    return [RowAlone.from_bytes(np.frombuffer(row.to_bytes(), np.uint8)) for row in packed]


def assert_rows(packed: PackedBatch, fields: dict[str, list[Any]], rows: list[int], names: list[str]) -> None:
    nested = decompress(packed, format="nested")
    assert {*nested.keys()} - {"_maskpack"} == {*names}
    for name in names:
        for place, row in enumerate(rows):
            own: Any = fields[name][row]
            if name in OBJECTS:
                assert_same_object(nested.get(name).tolist()[place], own, name)
            else:
                seen: Tensor = nested[name].unbind()[place]
                assert_same_tensor(seen.contiguous(), own, name)


@pytest.mark.parametrize(
    "names", [[*TENSORS, *OBJECTS], ["near", "text"], ["held"], ["pairs", "held", "score"]], ids=str
)
@pytest.mark.parametrize("puts", [[[0, 1, 2, 3]], [[3], [0], [1]], [[2, 0], [1, 3]]], ids=str)
def test_some_fields_of_rows(names: list[str], puts: list[list[int]]) -> None:
    fields = rows_put()
    rows = [row for put in puts for row in put]
    made = [one for put in puts for one in alone(fields, put)]
    assert len({one.token for one in made}) == 1
    assert_rows(rows_together(made, frozenset(names)), fields, rows, names)


def test_rows_with_tensors_in_their_objects_beside_rows_without() -> None:
    both = [rows_put(tensors=False), rows_put()]
    sizes = set[int]()
    for order in ([0, 1], [1, 0]):
        held = [both[one]["held"][one] for one in order]
        packed = rows_together([alone(both[one], [one])[0] for one in order], frozenset(["held"]))
        assert_same_object(decompress(packed).get("held").tolist(), held)
        sizes.add(packed.nbytes)  # with those of the tensors
    assert len(sizes) == 1


@pytest.mark.parametrize("change", [lambda line: line[:-1], lambda line: line + b"\0", lambda line: line + line])
def test_bytes_that_are_not_those_of_one_row(change: Any) -> None:
    line = alone(rows_put(), [0])[0].to_bytes()
    with pytest.raises(StorageError, match="no packed row"):
        RowAlone.from_bytes(np.frombuffer(change(line), np.uint8))
