"""MicroBatchPlan.apply and restore on each kind of batch, against rows taken one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_batch, assert_same_tensor
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from maskpack import compress, decompress, nest_batch_by_mask
from maskpack.errors import LayoutError, PlanError
from maskpack.planning import MicroBatchPlan, PlanOptions, plan_micro_batches
from maskpack.views import BatchView

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
many = settings(max_examples=max(60, settings.default.max_examples))


@st.composite
def plans(draw: st.DrawFn, rows: int) -> MicroBatchPlan:
    """Any plan of so many rows, maybe with dummies."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    groups = draw(st.none() | st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    plan = plan_micro_batches(
        lengths,
        draw(st.integers(1, 20)),
        groups=groups,
        options=PlanOptions(
            draw(st.sampled_from(("tokens", "padded"))), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        ),
    )
    return plan.with_count(max(plan.counts) + draw(st.sampled_from((0, 2, 4) if rows else (2, 4))))


def plan_of(parts: Sequence[Sequence[int]], lengths: Sequence[int] | None = None) -> MicroBatchPlan:
    """A plan with these micro-batches, largest first."""
    rows = sum(map(len, parts))
    labels = [next(number for number, part in enumerate(parts) if row in part) for row in range(rows)]
    lengths = [len(parts) - label for label in labels] if lengths is None else lengths
    plan = plan_micro_batches(lengths, 1, groups=labels)
    assert plan.micro_batches == [list(part) for part in parts]
    return plan


THREE = plan_of([[1, 4, 6], [0, 2], [3, 5]])
"""7 rows in three micro-batches: those of `samples.rollout`."""


# -------------------------------------------------------------------- there and back


@quiet
@pytest.mark.parametrize("layout", ["padded", "nested"])
@many
@given(batches(), st.data())
def test_order_restored_of_batches(layout: str, case: Case, data: st.DataObject) -> None:
    """Every dtype, sub-batches, jagged fields, objects."""
    batch = case.batch if layout == "padded" else nest_batch_by_mask(case.batch, **case.options)
    plan = data.draw(plans(case.rows))
    tree = oracle.snapshot(batch)
    parts = list(plan.apply(batch))
    for part, rows in zip(parts, plan.micro_batches, strict=True):
        assert list(part.keys()) == list(batch.keys())
        assert_same_batch(part, oracle.take_rows(batch, rows))
    trees = [oracle.snapshot(part) for part in parts]
    assert_same_batch(plan.restore(parts), batch)
    assert [oracle.snapshot(part) for part in parts] == trees
    assert oracle.snapshot(batch) == tree


@quiet
@given(batches(dtypes=strategies.PLAIN_DTYPES, objects=False), st.data())
def test_order_restored_of_packed_batches_and_views(case: Case, data: st.DataObject) -> None:
    plan = data.draw(plans(case.rows))
    packed = compress(case.batch, **case.options)
    for batch in (packed, BatchView.of(packed)):
        parts = list(plan.apply(batch))
        assert [type(part) for part in parts] == [type(batch)] * len(plan.micro_batches)
        for part, rows in zip(parts, plan.micro_batches, strict=True):
            got = part.materialize() if isinstance(part, BatchView) else decompress(part)
            assert_same_batch(got, oracle.take_rows(case.batch, rows))
        whole = plan.restore(parts)
        assert type(whole) is type(batch)
        assert_same_batch(whole.materialize() if isinstance(whole, BatchView) else decompress(whole), case.batch)
    assert_same_batch(decompress(packed), case.batch)


@many
@given(st.integers(0, 7), st.sampled_from(strategies.DTYPES), st.sampled_from(((), (3,), (2, 0), (1, 2))), st.data())
def test_order_restored_of_tensors(rows: int, dtype: torch.dtype, trailing: tuple[int, ...], data: Any) -> None:
    plan = data.draw(plans(rows))
    rng = data.draw(strategies.generators())
    x = strategies.strided(rng, strategies.values(rng, (rows, *trailing), dtype))
    held = oracle.copy(x)
    parts = list(plan.apply(x))
    for part, own in zip(parts, plan.micro_batches, strict=True):
        want = np.stack([oracle.cells(x)[row] for row in own] or [oracle.cells(x)[:0]]).reshape(len(own), *trailing)
        assert_same_tensor(part, oracle.from_cells(want, dtype))
    whole = plan.restore(parts)
    assert_same_tensor(whole, held)
    strategies.oracle_view(whole).copy_(strategies.oracle_view(torch.ones_like(whole)))
    assert_same_tensor(x, held), "memory of its own"


@many
@given(st.integers(0, 7), st.sampled_from(strategies.DTYPES), st.sampled_from(((), (2,), (0,))), st.data())
def test_order_restored_of_jagged_and_packed_tensors(
    rows: int, dtype: torch.dtype, trailing: tuple[int, ...], data: Any
) -> None:
    """Packed outputs [t, *F] have other lengths than the plan: those of responses."""
    plan = data.draw(plans(rows))
    x = strategies.jagged(data.draw(strategies.generators()), rows, dtype, trailing)
    lines = oracle.jagged_rows(x)
    lengths = [line.shape[0] for line in lines]
    parts = list(plan.apply(x))
    for part, own in zip(parts, plan.micro_batches, strict=True):
        assert_same_tensor(part, oracle.make_jagged([lines[row] for row in own], x))
        check_bounds(part, [lengths[row] for row in own])
    whole = plan.restore(parts)
    assert_same_tensor(whole, x)
    check_bounds(whole, lengths)
    for some in (lengths, np.array(lengths, np.int32), torch.tensor(lengths)):
        assert_same_tensor(plan.restore([part.values() for part in parts], lengths=some), x.values())


@many
@given(st.integers(0, 7), st.data())
def test_order_restored_of_lists(rows: int, data: st.DataObject) -> None:
    plan = data.draw(plans(rows))
    items = [object() for _ in range(rows)]
    assert plan.restore([[items[row] for row in own] for own in plan.micro_batches]) == items


@many
@given(st.integers(1, 7), st.data())
def test_outputs_of_dummies_are_dropped(rows: int, data: st.DataObject) -> None:
    plan = data.draw(plans(rows))
    x = torch.arange(1, rows + 1)
    outputs = [
        torch.full((9, 9), -1.0) if dummy else part for part, dummy in zip(plan.apply(x), plan.is_dummy, strict=True)
    ]
    assert plan.restore(outputs).tolist() == x.tolist()
    anything = [None if dummy else part for part, dummy in zip(plan.apply(x), plan.is_dummy, strict=True)]
    assert plan.restore(anything).tolist() == x.tolist()


def test_objects_of_micro_batches_go_to_their_rows() -> None:
    """Each micro-batch gives one object, which holds for its rows."""
    outputs = [
        TensorDict({"x": torch.tensor(rows), "number": NonTensorData(at, batch_size=[len(rows)])}, [len(rows)])
        for at, rows in enumerate(THREE.micro_batches)
    ]
    whole = THREE.restore(outputs)
    assert whole["x"].tolist() == list(range(7))
    assert whole.get("number").tolist() == [1, 0, 1, 2, 0, 2, 0]
    same = [out.set("number", NonTensorData("a", batch_size=out.batch_size)) for out in outputs]
    assert THREE.restore(same).get("number").tolist() == ["a"] * 7


def test_one_update_of_several() -> None:
    plan = plan_micro_batches([4, 4, 4, 4, 4], 8, options=PlanOptions(num_updates=2)).with_count(3)
    assert plan.dummies == [1, 0]
    x = torch.arange(5)
    for update in (0, 1, np.int64(1)):
        assert [part.tolist() for part in plan.apply(x, update)] == plan.updates[update]
    assert [part.tolist() for part in plan.apply(x)] == plan.micro_batches


def test_rows_are_taken_when_they_are_asked_for() -> None:
    """A micro-batch at a time; what is wrong is said at once."""
    x = torch.arange(7)
    parts = THREE.apply(x)
    assert next(parts).tolist() == [1, 4, 6]
    x += 10
    assert next(parts).tolist() == [10, 12]
    with pytest.raises(PlanError):
        THREE.apply(torch.zeros(8))


def test_outputs_may_be_a_tuple_or_come_one_by_one() -> None:
    x = torch.arange(7)
    assert THREE.restore(tuple(THREE.apply(x))).tolist() == x.tolist()
    assert THREE.restore(THREE.apply(x)).tolist() == x.tolist()
    assert THREE.restore(2 * part for part in THREE.apply(x)).tolist() == (2 * x).tolist()


# -------------------------------------------------------------------- jagged fields


def check_bounds(x: Any, lengths: Sequence[int]) -> None:
    """Min and max row length as the tensor itself holds them: set, not computed when asked."""
    assert x.layout == torch.jagged
    assert {"min_seqlen", "max_seqlen"} <= set(x._metadata_cache)
    assert (x._get_min_seqlen(), x._get_max_seqlen()) == (min(lengths, default=0), max(lengths, default=0))
    assert x.offsets().dtype == torch.int64


def jagged_fields() -> TensorDict:
    """Three fields with equal bounds, two of them on one offsets tensor, and one with others; one further down."""
    a = samples.jagged([torch.randn(n, 2, dtype=torch.float64) for n in (3, 0, 1, 4, 2, 2, 5)])
    own = a.offsets().clone()
    return TensorDict(
        {
            "a": a,
            "dense": torch.arange(7),
            "b": torch.nested.nested_tensor_from_jagged(torch.arange(17), a.offsets()),
            "c": torch.nested.nested_tensor_from_jagged(torch.arange(34).view(17, 2), own),
            "other": samples.jagged([torch.arange(n) for n in (3, 0, 1, 4, 2, 3, 4)]),
            "s": TensorDict({"d": torch.nested.nested_tensor_from_jagged(torch.arange(17.0), own)}, [7]),
        },
        batch_size=[7],
    )


def test_jagged_fields_share_offsets_and_know_their_bounds() -> None:
    batch = jagged_fields()
    parts = list(THREE.apply(batch))
    lengths = {"a": [3, 0, 1, 4, 2, 2, 5], "other": [3, 0, 1, 4, 2, 3, 4]}
    for some, rows in [*zip(parts, THREE.micro_batches, strict=True), (THREE.restore(parts), range(7))]:
        own = [some["a"], some["b"], some["c"], some["s", "d"]]
        for x in own:
            assert x.offsets() is own[0].offsets()
            check_bounds(x, [lengths["a"][row] for row in rows])
        alike = all(lengths["a"][row] == lengths["other"][row] for row in rows)
        assert (some["other"].offsets() is own[0].offsets()) == alike
        check_bounds(some["other"], [lengths["other"][row] for row in rows])
        assert list(some.keys()) == list(batch.keys())
        assert_same_tensor((some["b"] * some["c"][..., 0]).values(), some["b"].values() * some["c"].values()[:, 0])
    assert_same_batch(THREE.restore(parts), batch)


@pytest.mark.parametrize("kind", ["tensor", "TensorDict"])
@pytest.mark.parametrize("jagged", [True, False])
def test_differentiable_there_and_back(kind: str, jagged: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(17, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 4, 8, 10, 12, 17])
    x = torch.nested.nested_tensor_from_jagged(values, offsets) if jagged else values[:14].view(7, 2, 2)
    parts = list(THREE.apply(TensorDict({"x": x}, [7]) if kind == "TensorDict" else x))
    factors = [2.0, -3.0, 0.5]
    lines = [part["x"] if kind == "TensorDict" else part for part in parts]
    outputs = [factor * part for factor, part in zip(factors, lines, strict=True)]
    if kind == "TensorDict":
        outputs = [TensorDict({"x": out}, [out.shape[0]]) for out in outputs]
    whole = THREE.restore(outputs)
    whole = whole["x"] if kind == "TensorDict" else whole
    if jagged:
        check_bounds(whole, [3, 0, 1, 4, 2, 2, 5])
        whole = whole.values()
    weights = torch.randn(whole.shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad((whole * weights).sum(), values)
    flat, want = weights.reshape(-1, 2), torch.zeros_like(values)
    for factor, rows in zip(factors, THREE.micro_batches, strict=True):
        for row in rows:
            place = slice(offsets[row], offsets[row + 1]) if jagged else slice(2 * row, 2 * row + 2)
            want[place] = factor * flat[place]
    assert_same_tensor(grad, want)


def test_differentiable_packed_outputs() -> None:
    lengths = [2, 0, 3, 1, 1, 2, 4]
    ends = [0, *itertools.accumulate(lengths)]
    values = torch.randn(13, requires_grad=True)
    outputs = [
        torch.cat([values[ends[row] : ends[row + 1]] for row in rows]) * (at + 1)
        for at, rows in enumerate(THREE.micro_batches)
    ]
    weights = torch.arange(13.0)
    (grad,) = torch.autograd.grad((THREE.restore(outputs, lengths=lengths) * weights).sum(), values)
    for at, rows in enumerate(THREE.micro_batches):
        for row in rows:
            place = slice(ends[row], ends[row + 1])
            assert grad[place].tolist() == ((at + 1) * weights[place]).tolist()


# -------------------------------------------------------------------- errors


def rows_of(*make: Callable[[int], Any]) -> list[Any]:
    """An output for each micro-batch; the last one may be of another kind."""
    return [make[-1 if number == 2 else 0](len(rows)) for number, rows in enumerate(THREE.micro_batches)]


def td(**fields: Callable[[int], Any]) -> Callable[[int], TensorDict]:
    return lambda rows: TensorDict({name: make(rows) for name, make in fields.items()}, [rows])


def ones(*trailing: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda rows: torch.ones(rows, *trailing, dtype=dtype)


def ragged(*trailing: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda rows: samples.jagged([torch.ones(row + 1, *trailing, dtype=dtype) for row in range(rows)])


def packed(rows: int) -> Any:
    return compress(TensorDict({"x": torch.zeros(rows)}, [rows]))


def test_packed_outputs_of_other_fields() -> None:
    outputs = rows_of(packed, lambda n: compress(TensorDict({"y": torch.zeros(n)}, [n])))
    with pytest.raises(LayoutError, match=r"^PackedBatch\.cat: "):
        THREE.restore(outputs)


def test_an_error_leaves_the_outputs_as_they_were() -> None:
    outputs = rows_of(td(x=ones(4), s=td(y=ragged())), td(x=ones(5), s=td(y=ragged())))
    trees = [oracle.snapshot(out) for out in outputs]
    with pytest.raises(PlanError):
        THREE.restore(outputs)
    assert [oracle.snapshot(out) for out in outputs] == trees
