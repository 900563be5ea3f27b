"""take and cat: rows of padded, nested and mixed batches, beside naive row loops."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch, assert_same_object
from strategies import Case, batches
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

import maskpack as mp
from maskpack.errors import LayoutError
from maskpack.nesting import cat, take

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


ROWS: dict[str, Any] = {
    "list": [3, 1, 1],
    "negative": [-1, 0],
    "slice": slice(1, 4),
    "reversed": slice(None, None, -1),
    "mask": torch.tensor([True, False, True, False, False, True, False]),
    "indices": torch.tensor([5, 0]),
    "array": np.array([2, 2]),
    "one": [4],
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_form(name: str) -> None:
    batch, rows = samples.rollout(holes=True), ROWS[name]
    want = oracle.take_rows(batch, np.arange(7)[rows if isinstance(rows, slice) else np.asarray(rows)].tolist())
    nested = mp.nest_batch_by_mask(batch, pad_token_id=samples.PAD)
    assert_same_batch(take(batch, rows), want)
    taken = take(nested, rows)
    assert_same_batch(mp.unnest_batch_by_mask(taken), want)
    assert taken["responses"].offsets() is taken["old_log_probs"].offsets()
    assert_same_batch(mp.decompress(mp.compress(taken, pad_token_id=samples.PAD)), want)


@quiet
@given(batches(home_jagged=False, min_rows=1, dtypes=strategies.PLAIN_DTYPES), st.data())
def test_any_batch(case: Case, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, case.rows - 1), max_size=6))
    want = oracle.take_rows(case.batch, rows)
    nested = mp.nest_batch_by_mask(case.batch, **case.options)
    assert_same_batch(take(case.batch, rows), want)
    assert_same_batch(mp.unnest_batch_by_mask(take(nested, rows)), want)
    both = oracle.take_rows(case.batch, [*rows, *range(case.rows)])
    assert_same_batch(mp.unnest_batch_by_mask(cat([take(nested, rows), nested])), both)


def test_neither_changes_the_batch() -> None:
    nested = mp.nest_batch_by_mask(samples.rollout(), pad_token_id=samples.PAD)
    before = copy.deepcopy(mp.unnest_batch_by_mask(nested))
    taken = take(nested, slice(None))
    joined = cat([nested, nested])
    taken["responses"].values().zero_()
    joined["responses"].values().zero_()
    assert_same_batch(mp.unnest_batch_by_mask(nested), before)


@tensorclass
class Scores:
    value: torch.Tensor


NAMES: dict[str, dict[str, list[str | None]]] = {
    "of all dims": {"": ["row", "turn"], "sub": ["row", "turn", "head"], "scores": ["row", "turn"]},
    "of some dims": {"": [None, "turn"], "sub": [None, "turn", "head"], "scores": [None, "turn"]},
    "of a sub-batch": {"sub": [None, None, "head"]},
    "none": {},
}


def named(names: dict[str, list[str | None]], rows: int = 4, *, nested: bool = False) -> Any:
    batch: Any = TensorDict(
        {
            "x": torch.arange(2.0 * rows).reshape(rows, 2),
            "sub": TensorDict({"y": torch.ones(rows, 2, 3)}, batch_size=[rows, 2, 3]),
            "scores": Scores(value=torch.ones(rows, 2), batch_size=[rows, 2]),
            "uid": NonTensorStack(*[NonTensorStack("a", "b") for _ in range(rows)]),
        },
        batch_size=[rows, 2],
    )
    if nested:  # jagged along dim 1, which so is no batch dim
        values, ends = torch.arange(3.0 * rows), torch.arange(0, 3 * rows + 1, 3)
        jagged = torch.nested.nested_tensor_from_jagged(values, ends)
        batch = TensorDict({"x": jagged, "sub": batch["sub"], "scores": batch["scores"]}, batch_size=[rows])
    for name, value in names.items():
        part = batch.get(name) if name else batch
        part.names = value[: part.batch_dims]
    return batch


def names_of(batch: Any) -> list[Any]:
    return [batch.names, batch.get("sub").names, batch.get("scores").names]


@pytest.mark.parametrize("case", NAMES)
def test_names_of_dims_are_those_that_tensordict_gives(case: str) -> None:
    batch, unnamed = named(NAMES[case]), named({})
    for rows in ([2, 0], slice(1, 3), torch.tensor([3])):
        assert names_of(take(batch, rows)) == names_of(batch[rows])
    for parts in ([batch], [batch, named(NAMES[case], 3)], [batch, unnamed], [unnamed, batch]):
        assert names_of(cat(parts)) == names_of(torch.cat(parts))
    assert unnamed.get("uid").names == [None, None]
    nested = named(NAMES[case], nested=True)
    for batch in (take(nested, [2, 0]), take(nested, []), cat([nested, named({}, nested=True)])):
        assert names_of(batch) == names_of(nested)


def test_a_lazy_stack_is_a_batch() -> None:
    batch = samples.rollout(objects=False)
    stack: Any = lazy_stack(list(batch.unbind(0)))
    assert_same_batch(take(stack, [2, 0]), oracle.take_rows(batch, [2, 0]))


def test_objects_of_the_whole_batch_are_kept_or_given_to_each_row() -> None:
    one, other = (NonTensorData(number, batch_size=[2]) for number in (1, 2))
    of_rows = NonTensorStack(NonTensorData(3), NonTensorData(4))
    first, second, third = (TensorDict({"x": torch.ones(2), "n": each}, [2]) for each in (one, other, of_rows))
    assert cat([first, first]).get("n").data == 1
    assert cat([first, second]).get("n").tolist() == [1, 1, 2, 2]
    assert cat([first, third]).get("n").tolist() == [1, 1, 3, 4]
    assert take(second, [1]).get("n").data == 2


def test_offsets_beyond_the_values_are_refused() -> None:
    x = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 9]))
    batch = TensorDict({"x": x}, [2])
    for call in (lambda: take(batch, [1]), lambda: cat([batch, batch])):
        with pytest.raises(LayoutError, match='field "x" has 5 values, and offsets from 0 to 9; expected'):
            call()


def test_rows_that_begin_behind_the_first_value_are_joined() -> None:
    behind = torch.nested.nested_tensor_from_jagged(torch.arange(10.0), torch.tensor([3, 5, 6]))
    slack = torch.nested.nested_tensor_from_jagged(torch.arange(100.0, 110.0), torch.tensor([0, 1, 2]))
    joined = cat([TensorDict({"x": one}, batch_size=[2]) for one in (behind, slack)])
    assert [row.tolist() for row in joined["x"].unbind()] == [[3.0, 4.0], [5.0], [100.0], [101.0]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1.0, 1), (0.0, -0.0), ([1.0], [True]), ({"lr": 1}, {"lr": 1.0}), ({"lr": 1}, {"lr": 2}),
        ((0.0,), (-0.0,)), ((1,), [1]), (np.ones(2, np.float32), np.ones(2)), (torch.ones(2), torch.ones(2).double()),
    ],
    ids=str,
)  # fmt: skip
def test_objects_that_are_equal_but_not_the_same_stay_apart(one: Any, other: Any) -> None:
    """In batches that are joined, packed or not."""
    batches = [
        TensorDict({"x": torch.zeros(2), "o": NonTensorData(each, batch_size=[2])}, [2]) for each in (one, other)
    ]
    for whole in (cat(batches), mp.decompress(mp.PackedBatch.cat([mp.compress(batch) for batch in batches]))):
        assert_same_object(whole.get("o").tolist(), [one, one, other, other])


SUB = TensorDict({"x": torch.zeros(2)}, [2])
KINDS = {
    "tensor": torch.zeros(2),
    "object": NonTensorData("a", batch_size=[2]),
    "sub-batch": SUB,
    "empty sub-batch": TensorDict({}, [2]),
    "more dims": TensorDict({"x": torch.zeros(2, 3)}, [2, 3]),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
def test_entries_of_different_kinds_are_refused(one: str, other: str) -> None:
    batches = [TensorDict({"s": KINDS[name]}, [2]) for name in (one, other)]
    message = r'cat: (?:fields .* are not in every batch|field "s" of batch 1 is .*); expected the same'
    with pytest.raises(LayoutError, match=message):
        cat(batches)
