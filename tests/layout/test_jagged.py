"""Jagged tensors, made by private names of torch and tensordict where these give what the public ones give, and by the
public ones where they do not."""

from __future__ import annotations

import _socket
import datetime
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import warm_workers
from samples import PAD, assert_same, freeze, joined, parts_of, rollout
from tensordict import TensorDict
from torch.nested._internal.nested_tensor import NestedTensor

import maskpack as mp
from maskpack.core import tree
from maskpack.layout import jagged

OFFSETS = torch.tensor([0, 3, 3, 7])


def mine() -> bool:
    """Whether maskpack has called what calls this, and not torch or tensordict itself."""
    return sys._getframe(2).f_globals["__name__"].startswith("maskpack")


def changed(call: Any, change: Callable[[list[Any], dict[str, Any]], Any]) -> Any:
    """A function with other results for maskpack alone, which `change` makes of its arguments."""

    def instead(*args: Any, **named: Any) -> Any:
        if not mine():
            return call(*args, **named)
        args_left = list(args)
        found = change(args_left, named)
        return call(*args_left, **named) if found is None else found

    return instead


def refused(args: list[Any], named: dict[str, Any]) -> None:
    raise TypeError("takes 13 positional arguments")


def without_keys(args: list[Any], named: dict[str, Any]) -> None:
    del args[13]


def with_gradient(args: list[Any], named: dict[str, Any]) -> None:
    args[9] = True


def a_copy(args: list[Any], named: dict[str, Any]) -> None:
    args[0] = args[0].clone()


def by_another_name(args: list[Any], named: dict[str, Any]) -> None:
    args[1] = f"{args[1]}_"


def not_put(args: list[Any], named: dict[str, Any]) -> Any:
    return args[0]


def other(owner: Any, name: str, change: Any) -> Any:
    """A patch of a method, which maskpack finds to take or to give other things."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        call = changed(getattr(owner, name), change)
        monkeypatch.setattr(owner, name, staticmethod(call) if owner is torch.Tensor else call)

    return patch


def more_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose public function sets what its class does not."""
    call = torch.nested.nested_tensor

    def nested_tensor(*args: Any, **named: Any) -> Any:
        made = call(*args, **named)
        made._rows_known = True
        return made

    monkeypatch.setattr(torch.nested, "nested_tensor", nested_tensor)


OTHER_TORCHS = {
    "other arguments": other(torch.Tensor, "_make_wrapper_subclass", refused),
    "other dispatch": other(torch.Tensor, "_make_wrapper_subclass", without_keys),
    "other gradients": other(torch.Tensor, "_make_wrapper_subclass", with_gradient),
    "no dispatch keys": lambda monkeypatch: monkeypatch.delattr(torch._C, "DispatchKeySet"),
    "other keywords": other(NestedTensor, "__init__", refused),
    "other marks": other(torch._dynamo, "mark_dynamic", a_copy),
    "more state": more_state,
}
OTHER_TENSORDICTS = {
    "other arguments of TensorDict": other(TensorDict, "_set_str", refused),
    "another key": other(TensorDict, "_set_str", by_another_name),
    "no entry": other(TensorDict, "_set_str", not_put),
}


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """The ways are found out again, in the test and after it."""
    for turn in range(2):
        jagged._fast_way.cache_clear()
        tree._put_unchecked.cache_clear()
        if not turn:
            yield


def test_capsules_in_which_older_torchs_keep_sizes_are_not_compared() -> None:
    one, other = datetime.datetime_CAPI, _socket.CAPI
    assert one != other
    assert jagged._is_equal({"_sym_sizes_capsule": one}, {"_sym_sizes_capsule": other})
    assert not jagged._is_equal({"_sym_sizes_capsule": 3}, {"_sym_sizes_capsule": other})


def test_the_fast_way_is_the_one_of_this_torch() -> None:
    assert jagged._fast_way() is not None
    assert tree._put_unchecked() == (NestedTensor,)


@pytest.mark.parametrize("name", [*OTHER_TORCHS, *OTHER_TENSORDICTS])
def test_private_names_that_changed_are_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(holes=True, values=True)
    (OTHER_TORCHS | OTHER_TENSORDICTS)[name](monkeypatch)
    assert (jagged._fast_way() is None) == (name in OTHER_TORCHS)
    assert (tree._put_unchecked() == ()) == (name in OTHER_TENSORDICTS)
    assert_round_trips(batch)


def test_maskpack_needs_no_private_name_to_be_imported() -> None:
    code = """
import tensordict, torch
torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)  # torch itself needs them
del torch._C.DispatchKeySet
from maskpack.layout import jagged
print(jagged._fast_way())
"""
    done = subprocess.run([*warm_workers.python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]


def assert_round_trips(batch: TensorDict) -> None:
    nested = mp.nest_batch_by_mask(batch, pad_token_id=PAD)
    packed = mp.compress(batch, pad_token_id=PAD)
    decoded = mp.decompress(packed, format="nested")
    assert freeze(decoded.exclude("_maskpack")) == freeze(nested.exclude("_maskpack"))
    for form in (nested, decoded, pickle.loads(pickle.dumps(nested))):
        assert_same(mp.unnest_batch_by_mask(form), batch)
        fields = [value for value in form.exclude("_maskpack").values() if isinstance(value, torch.Tensor)]
        assert sum(value.is_nested for value in fields) > 10
        for value in fields:
            if value.is_nested:
                lengths = value.offsets().diff()
                assert (value._get_min_seqlen(), value._get_max_seqlen()) == (int(lengths.min()), int(lengths.max()))
                assert {"min_seqlen", "max_seqlen"} <= set(value._metadata_cache)
    assert_same(mp.unnest_batch_by_mask(joined(parts_of(nested, [3, len(batch) - 3]))), batch)
    assert_same(mp.decompress(packed), batch)
    one, other = nested["advantages"], nested["token_level_scores"]
    assert one.offsets() is other.offsets()
    assert torch.equal((one - other).values(), one.values() - other.values())
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1), token_budget=12)
    assert_same(mp.unnest_batch_by_mask(plan.restore(list(plan.apply(nested)))), batch)


@pytest.mark.parametrize("name", ["as it is", *OTHER_TORCHS])
def test_gradients_flow_through_jagged_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OTHER_TORCHS.get(name, lambda monkeypatch: None)(monkeypatch)
    values = torch.arange(14.0).view(7, 2).requires_grad_()
    (fresh,) = jagged.jagged_all([values], OFFSETS, 0, 4)
    (fresh * fresh).values().sum().backward()
    assert torch.equal(values.grad, 2 * values)
    with torch.no_grad():
        one, other = jagged.jagged_all([values, values + 1], OFFSETS, 0, 4)
    assert not one.requires_grad
    leaf = other.requires_grad_()
    (leaf * one).values().sum().backward()
    assert torch.equal(leaf.grad.values(), values)


@pytest.mark.parametrize("name", ["as it is", "other arguments"])
def test_lengths_are_kept_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OTHER_TORCHS.get(name, lambda monkeypatch: None)(monkeypatch)
    values = torch.zeros(7)
    with torch.device("meta"):
        fields = jagged.jagged_all([values, values], OFFSETS, 0, 4)
        fields += jagged.jagged_all([values.requires_grad_()], OFFSETS, 0, 4)
    for field in fields:
        assert {str(held.device) for held in field._metadata_cache.values()} == {"cpu"}
        assert (field._get_min_seqlen(), field._get_max_seqlen(), str(field.device)) == (0, 4, "cpu")


def test_the_ways_are_told_apart_without_a_backward_pass() -> None:
    """It would start threads, after which a process must not fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", None)
        patch.setattr(torch.Tensor, "backward", None)
        assert jagged._fast_way() is not None


def test_compiled_code_makes_and_takes_jagged_tensors() -> None:
    def made(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        one, other = jagged.jagged_all([values, values * 2], offsets, 0, 4)
        return (one - other).values()

    def taken(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one - other).values()

    values = torch.arange(7.0)
    run: Any = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(values, OFFSETS), -values)
    run = torch.compile(taken, fullgraph=True, backend="aot_eager")
    for total, offsets in ((7, OFFSETS), (9, torch.tensor([0, 1, 5, 9]))):
        fields = [torch.arange(float(total)), torch.ones(total)]
        assert torch.equal(run(*jagged.jagged_all(fields, offsets, 0, 4)), fields[0] - 1)


def test_a_ragged_dim_that_was_set_by_hand_is_seen() -> None:
    """As verl sets it for positions [B, 4, j]; the shape says another."""
    (field,) = jagged.jagged_all([torch.zeros(7, 2)], OFFSETS, 0, 4)
    assert jagged.Jagged.of(field).dim == 1
    field._ragged_idx = 2
    own = jagged.Jagged.of(field)
    assert own.dim == 2
    assert own.values.shape == (2, 7)
    del field._ragged_idx
    assert jagged.Jagged.of(field).dim == 1  # a torch without this name


def test_jagged_tensors_know_their_shortest_and_their_longest_row() -> None:
    for lengths in ([2, 4, 3], [0, 4], [3]):
        layout = mp.RowLayout.from_lengths(lengths)
        x = jagged.jagged(torch.arange(float(sum(lengths))), layout)
        assert (x._get_min_seqlen(), x._get_max_seqlen()) == (min(lengths), max(lengths))
