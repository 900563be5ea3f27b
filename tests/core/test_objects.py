"""Python objects: their tensors as words, and their exact JSON."""

from __future__ import annotations

import collections
import enum
import json
import math
import operator
import pickle
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from samples import freeze
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from maskpack.core import objects
from maskpack.core.objects import Objects, Stowed, on_host

TORCH_DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
NUMPY_DTYPES = ["bool", "float16", "float32", "float64", "complex64"]
NUMPY_DTYPES += [f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)]


def stow(data: Any) -> Objects:
    return Objects(data, 0).stowed()


def restored(held: Objects) -> Any:
    return held.entry(()).data


def exact(value: Any) -> Any:
    """As `freeze`, with the bits of floats and the types of scalars and keys."""
    if type(value) is float:
        return ("float", struct.pack("<d", value))
    if isinstance(value, np.generic):
        return ("scalar", type(value).__name__, str(value.dtype), value.tobytes())
    if isinstance(value, Tensor) and type(value) is not Tensor:
        return (type(value).__name__, freeze(value.as_subclass(Tensor)))
    if type(value) in (list, tuple):
        return (type(value).__name__, [exact(item) for item in value])
    if type(value) is dict:
        return ("dict", [(exact(key), exact(item)) for key, item in value.items()])
    if isinstance(value, Tensor | np.ndarray):
        return freeze(value)
    return (type(value).__name__, value)


def through_json(data: Any) -> Any:
    """To a text and back, with the arrays beside it."""
    arrays: list[np.ndarray] = []

    def store(line: np.ndarray) -> int:
        arrays.append(np.array(line))
        return len(arrays) - 1

    text = json.dumps(objects.to_json(stow(data).data, store), allow_nan=False)
    assert text.isascii()
    return restored(Objects(objects.from_json(json.loads(text), arrays.__getitem__), 0))


def tensor_of(name: str, shape: tuple[int, ...] = (3, 2)) -> Tensor:
    dtype = getattr(torch, name)
    count = math.prod(shape) * dtype.itemsize
    raw = [(place * 91 + 5) % (2 if name == "bool" else 256) for place in range(count)]
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)


# -------------------------------------------------------------------- stowing


def test_what_is_stowed_is_a_copy_that_nobody_may_write() -> None:
    data = {"tensor": torch.arange(3), "array": np.arange(4), "list": [1, (2, "x")]}
    want = exact(data)
    held = stow(data)
    assert not held.data["tensor"].words.flags.writeable
    for items in (data, restored(held)):
        items["tensor"].zero_()
        items["array"][:] = 0
        items["list"].append(5)
        assert exact(restored(held)) == want


def test_strides_conjugates_and_negatives() -> None:
    x = torch.arange(24).view(2, 3, 4)
    z = torch.tensor([1 + 2j, 3 - 4j])
    data = [x.movedim(0, 2), x[:, ::2], x[0, 0].expand(5, 4), z.conj(), z.conj().imag, torch.tensor(1 + 2j).conj()]
    data += [np.arange(24).reshape(4, 6).T, np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(9)[::-2]]
    wanted = [item.clone() if isinstance(item, Tensor) else item.copy() for item in data]
    wanted = [item.resolve_conj().resolve_neg() if isinstance(item, Tensor) else item for item in wanted]
    for seen, item in zip(restored(stow(data)), wanted, strict=True):
        assert freeze(seen) == freeze(item)


def test_one_tensor_twice_stays_one() -> None:
    x, shared = torch.arange(3), [torch.ones(2)]
    data = {"a": x, "b": [x], "c": (x, shared), "d": shared, "e": shared}
    back = restored(stow(data))
    assert back["a"] is back["b"][0]
    assert back["a"] is back["c"][0]
    assert back["d"] is back["e"]
    assert back["c"][1] is back["d"]
    assert back["a"] is not x


def test_cycles_are_left_as_they_are() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert stow(loop).data is loop
    other: dict[str, Any] = {"x": torch.ones(1), "inner": ([],)}
    other["inner"][0].append(other)
    held = stow(other)
    assert held.data is other
    assert restored(held) is other
    del loop[0]
    with pytest.raises(objects.NotInJson, match="nested too deep"):
        objects.to_json(loop, lambda _: 0)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
@pytest.mark.parametrize("depth", [63, 64, 65, 500])
def test_nesting_has_a_bound(kind: str, depth: int) -> None:
    data: Any = torch.arange(2)
    said: Any = 1
    for _ in range(depth):
        data = {"list": lambda x: [x], "tuple": lambda x: (x,), "dict": lambda x: {"k": x}}[kind](data)
        said = {"list": [said], "tuple": {"tuple": [said]}, "dict": {"dict": [["k", said]]}}[kind]
    if depth <= 64:
        assert exact(restored(stow(data))) == exact(through_json(data)) == exact(data)
        return
    assert stow(data).data is data
    with pytest.raises(objects.NotInJson, match="nested too deep"):
        objects.to_json(data, lambda _: 0)
    with pytest.raises(ValueError, match="nested too deep"):
        objects.from_json(said, lambda _: np.zeros(0))


def test_lists_that_hold_one_list_often_do_not_grow_without_end() -> None:
    data: Any = []
    for _ in range(60):
        data = [data, data]
    held = stow(data).data
    for _ in range(60):
        assert held[0] is held[1]
        held = held[0]
    with pytest.raises(objects.NotInJson, match="more than 4194304 items"):
        objects.to_json(data, lambda _: 0)


class Point(NamedTuple):
    x: Any


class Words(list):
    pass


class Marked(Tensor):
    pass


def test_subclasses_are_left_alone() -> None:
    x = torch.ones(2)
    matrix = np.ones(2).view(np.recarray)
    items = [
        Point(x),
        Words([x]),
        collections.OrderedDict(a=x),
        collections.defaultdict(list, a=x),
        x.as_subclass(Marked),
        torch.nn.Parameter(x),
        x.clone().requires_grad_(),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([x], layout=torch.jagged),
        matrix,
        np.ones(2, ">f4"),
        np.array(["a"]),
        np.array([None]),
        np.ones(2, np.complex128),
        np.ones(2, [("a", "i4")]),
        torch.ones([1] * 29),
        {x},
        b"bytes",
        1j,
        np.str_("x"),
        np.longdouble(1),
        enum.IntEnum("Number", "one").one,
    ]
    held = stow(items)
    assert all(map(operator.is_, held.data, items))
    for item in items:
        with pytest.raises(objects.NotInJson, match=f"a {type(item).__name__}"):
            objects.to_json([item], lambda _: 0)


@pytest.mark.parametrize("item", ["\ud800", {"\udfff": 1}, {1: 2}, {None: 2}, {(): 2}, {b"k": 1}], ids=repr)
def test_text_and_keys_that_are_no_plain_data(item: Any) -> None:
    assert exact(restored(stow([item]))) == exact([item])
    with pytest.raises(objects.NotInJson, match=r"text with half a surrogate pair|a dict with other keys than text"):
        objects.to_json([item], lambda _: 0)


# -------------------------------------------------------------------- JSON


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(width=64),
    st.sampled_from([2**53 + 1, 2**63, -(2**63) - 1, 10**4000, -0.0, 5e-324]),
    st.text(max_size=4),
    st.sampled_from(NUMPY_DTYPES).flatmap(lambda name: npst.from_dtype(np.dtype(name))),
    st.sampled_from(NUMPY_DTYPES).flatmap(lambda name: npst.arrays(name, npst.array_shapes(min_side=0, max_side=3))),
    st.builds(tensor_of, st.sampled_from(TORCH_DTYPES), st.sampled_from([(), (3, 2), (0,), (2, 0, 3), (1,) * 28])),
)
_keys = st.one_of(st.text(max_size=2), st.sampled_from(["tensor", "dict", "float", "tuple"]))
_data = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(_data)
def test_any_object(data: Any) -> None:
    assert exact(restored(stow(data))) == exact(data)
    assert exact(through_json(data)) == exact(data)
    again = pickle.loads(pickle.dumps(stow(data), protocol=5))
    assert exact(restored(again)) == exact(data)


# -------------------------------------------------------------------- on the host


class Far(Tensor):
    """A tensor that says it is on a device."""

    device = property(lambda self: torch.device("cuda:0"))  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        assert (args, kwargs) == (("cpu",), {})
        return self.as_subclass(Tensor).clone()


def test_tensors_come_to_the_host() -> None:
    far, here = torch.arange(3).as_subclass(Far), torch.ones(2)
    data = {"a": [far, here, (far, "x")], "b": far, "c": {1, 2}, "meta": torch.empty(2, device="meta")}
    seen = on_host(data)
    assert [type(x) for x in (seen["b"], seen["a"][0], seen["a"][2][0])] == [Tensor] * 3
    assert seen["b"].tolist() == [0, 1, 2]
    assert seen["a"][0] is seen["b"] is seen["a"][2][0]  # as before
    assert seen["a"][1] is here
    assert (seen["a"][2][1], seen["c"], seen["meta"]) == ("x", {1, 2}, data["meta"])
    assert type(data["b"]) is type(data["a"][0]) is Far
    loop: list[Any] = [here, 3, {"y": (1.0, data["meta"])}]
    loop.append(loop)
    for near in (loop, None, here, TensorDict({"x": here}, batch_size=[2])):
        assert on_host(near) is near


@pytest.mark.parametrize("plain", [True, False])
def test_stacks_are_taken_apart_and_put_together_as_tensordict_does(plain, monkeypatch):
    if not plain:
        monkeypatch.setattr(objects, "_fast_stack", lambda: None)
    items = ["a", 1, None, -0.5, True, b"x", (1, 2), {"k": [1]}, ["p", "q"]]
    stack, own = objects.stack_of(items), NonTensorStack(*[NonTensorData(item) for item in items])
    assert stack.tolist() == own.tolist() == objects.items_of(stack) == objects.items_of(own)
    assert [vars(entry).keys() for entry in stack.tensordicts] == [vars(entry).keys() for entry in own.tensordicts]
    wide = torch.stack([NonTensorData("abc", batch_size=[2]), NonTensorData("de", batch_size=[2])])
    assert objects.items_of(wide) == wide.tolist() == [["abc", "abc"], ["de", "de"]]


def test_only_the_row_that_is_too_deep_keeps_its_tensors():
    deep: list[Any] = []
    for _ in range(80):
        deep = [deep]
    held = Objects([{"t": torch.arange(3)}, deep], 1).stowed()
    assert isinstance(held.data[0]["t"], Stowed)
    assert held.data[1] is deep
    assert not held.bare
    assert torch.equal(held.restored()[0]["t"], torch.arange(3))
