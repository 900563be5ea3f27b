"""assert_exact against the oracle's comparison, and the place and the bits that its message names."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import struct
import threading
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import PurePath
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import DIFFERENT, filled, mixed
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

import maskpack as mp
from maskpack.errors import LayoutError
from maskpack.testing import assert_exact


def failure(seen: Any, expected: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_exact(seen, expected)
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_it_sees(name: str) -> None:
    assert_exact(mixed(), mixed())
    other = DIFFERENT[name]()
    assert failure(other, mixed()).startswith("assert_exact: ")
    assert failure(mixed(), other).startswith("assert_exact: ")


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
def test_every_bit_of_every_dtype_and_its_number(dtype: torch.dtype) -> None:
    clean = torch.zeros(3, 2, dtype=torch.float32).to(dtype)
    assert_exact(clean, oracle.copy(clean))
    for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
        raw = np.frombuffer(oracle.cells(clean).tobytes(), np.uint8).copy()
        raw[3 * dtype.itemsize + bit // 8] ^= 1 << bit % 8
        dirty = oracle.from_cells(raw.view(f"V{dtype.itemsize}").reshape(3, 2), dtype)
        said = failure(dirty, clean)
        assert "differs at row 1, position 1: seen " in said
        word = min(dtype.itemsize, 8)  # a complex128 is two numbers
        parts = [struct.unpack(f"<{'BHxIxxxQ'[word - 1]}", raw[at : at + word].tobytes())[0] for at in _words(dtype)]
        assert f"(0x{''.join(f'{part:0{2 * word}x}' for part in parts)}), expected " in said
        assert f"(0x{'0' * 2 * dtype.itemsize}); 1 of 6 elements differ." in said


def _words(dtype: torch.dtype) -> list[int]:
    return list(range(3 * dtype.itemsize, 4 * dtype.itemsize, min(dtype.itemsize, 8)))


def test_the_message_in_full() -> None:
    seen = TensorDict({"log_probs": torch.zeros(2, 3)}, batch_size=[2])
    expected = seen.clone()
    expected["log_probs"][1, 2] = -0.0
    assert failure(seen, expected) == (
        'assert_exact: field "log_probs" differs at row 1, position 2: seen 0.0 (0x00000000), expected -0.0 '
        "(0x80000000); 1 of 6 elements differ."
    )
    deep = TensorDict({"a": {"b": torch.zeros(2, 3, 4, 5)}}, batch_size=[2])
    other = copy.deepcopy(deep)
    other["a", "b"][1:, 2, 3, 4] = math.nan
    assert failure(other, deep) == (
        'assert_exact: field "a/b" differs at row 1, position 2, element (3, 4): seen nan (0x7fc00000), expected 0.0 '
        "(0x00000000); 1 of 120 elements differ."
    )
    assert "element 3: seen 1 (0x01), expected 0 (0x00)" in failure(
        torch.ones(1, 1, 4, dtype=torch.uint8), torch.tensor([[[1, 1, 1, 0]]], dtype=torch.uint8)
    )
    assert failure(torch.tensor(1).byte(), torch.tensor(2).byte()) == (
        "assert_exact: the value differs: seen 1 (0x01), expected 2 (0x02); 1 of 1 elements differ."
    )


def test_rows_of_jagged_tensors_are_named() -> None:
    seen = filled([2, 0, 3])
    expected = torch.nested.nested_tensor_from_jagged(torch.tensor([1.0, 1, 1, 2, 1]), seen.offsets())
    assert "differs at row 2, position 1: seen 1.0" in failure(seen, expected)
    expected = torch.nested.nested_tensor_from_jagged(torch.tensor([1.0, 1, 3, 1, 1]), seen.offsets())
    assert "differs at row 2, position 0: seen 1.0" in failure(seen, expected)
    assert "in its offsets: seen [0, 2, 2, 5], expected [0, 1, 2, 5]" in failure(seen, filled([1, 1, 3]))
    wide = torch.nested.nested_tensor_from_jagged(torch.zeros(3, 2), torch.tensor([0, 1, 3]))
    odd = torch.nested.nested_tensor_from_jagged(torch.tensor([[0.0, 0], [0, 0], [0, 5]]), torch.tensor([0, 1, 3]))
    assert "row 1, position 1, element 1: seen 5.0" in failure(odd, wide)


@dataclasses.dataclass
class Turn:
    text: str
    score: float


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: 0}, {True: 0}),
        (np.arange(2), np.arange(3)), (np.float32(1), np.float32(2)), (complex(0.0, 0.0), complex(0.0, -0.0)),
        (np.array([0.0]), np.array([-0.0])), (Turn("a", 0.0), Turn("a", -0.0)), (Plain([1]), Plain([2])), (Plain, Turn),
        (len, print), (lambda: 1, lambda: 1), (np.array([1, "a"], object), np.array([1, "b"], object)), ({1}, {2}),
        ("a", b"a"), (None, 0), ([torch.ones(1)], [torch.zeros(1)]), ([1, 2], [1]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_objects_are_told_apart(a: Any, b: Any) -> None:
    assert failure(a, b).startswith("assert_exact: the value")
    assert failure({"k": [a]}, {"k": [b]}).startswith("assert_exact: the value, at ['k'][0]")
    assert_exact(a, a)


class AlwaysEqual:
    def __init__(self, value: int) -> None:
        self.value = value

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return True


@tensorclass
class Sample:
    x: torch.Tensor


def noted(value: Any, note: str) -> Any:
    value.note = note
    return value


def record(first: Any, second: float) -> Any:
    return np.array([(first, second)], [("a", object), ("b", np.float64)])


def nan(payload: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | payload))[0]


def looped(last: Any) -> list[Any]:
    loop: list[Any] = [1]
    inner = {"self": loop, "plain": Plain(None)}
    inner["plain"].value = inner
    return [*loop, loop.append(inner), loop, last]


STATES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "arguments of an exception": (ValueError, "a", "b"),
    "a generator of torch": (lambda seed: torch.Generator().manual_seed(seed), 1, 2),
    "a generator of NumPy": (np.random.default_rng, 1, 2),
    "a storage": (lambda value: torch.full((2,), value).untyped_storage(), 0.0, -0.0),
    "a pattern, whose reducer copyreg holds": (lambda text: (re.purge(), re.compile(text)), "a", "b"),
    "a union of types, whose reducer copyreg holds": (lambda kind: kind | None, int, str),
    "an == that is always true": (AlwaysEqual, 1, 2),
    "an == that is always true, in a set": (lambda value: {AlwaysEqual(value)}, 1, 2),
    "keys of a dict": (lambda key: {key: 1}, 0.0, -0.0),
    "a value under a key that is an object": (lambda value: {PurePath("a"): value}, 0.0, -0.0),
    "maxlen of a deque": (lambda most: deque([1], most), 2, 3),
    "digits of a Decimal": (Decimal, "1.0", "1.00"),
    "attributes that are no fields": (lambda note: noted(Turn("a", 0.0), note), "a", "b"),
    "the object of a method": (lambda text: Plain(text).__init__, "a", "b"),
    "objects in an array": (lambda item: np.array([item, None], object), [0.0], [-0.0]),
    "objects in a field of an array": (lambda item: record(item, 0.0), [0.0], [-0.0]),
    "an object that contains itself": (looped, 0.0, -0.0),
    "names of dims": (lambda name: TensorDict({"x": torch.ones(2)}, batch_size=[2], names=[name]), "a", "b"),
    "the dim of a lazy stack": (lambda dim: lazy_stack([TensorDict({}, [2]), TensorDict({}, [2])], dim), 0, 1),
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_told_apart(name: str) -> None:
    build, value, other = STATES[name]

    def make(argument: Any) -> Any:
        return build(copy.deepcopy(argument))  # equal values that share no object

    assert_exact(make(value), make(value))
    assert_exact({"k": [make(value)]}, {"k": [make(value)]})
    assert failure(make(value), make(other)).startswith("assert_exact: the value")
    assert failure(make(other), make(value)).startswith("assert_exact: the value")
    seen, same, wrong = (TensorDict({"x": NonTensorData(make(x))}, batch_size=[]) for x in (value, value, other))
    assert_exact(seen, same)
    assert failure(seen, wrong).startswith('assert_exact: field "x"')


def test_a_lazy_tensorclass_differs_from_a_dense_one() -> None:
    def lazy() -> Any:
        return lazy_stack([Sample(torch.ones(3), batch_size=[]) for _ in range(2)])

    dense = Sample(torch.ones(2, 3), batch_size=[2])
    assert type(lazy()) is type(dense)
    assert_exact(lazy(), lazy())
    assert "differs in its type" in failure(lazy(), dense)
    assert "differs in its type" in failure(dense, lazy())


def test_the_place_of_a_difference_in_a_state_is_named() -> None:
    assert failure([ValueError("a", 0)], [ValueError("a", 1)]) == (
        "assert_exact: the value, at [0].arguments[1], differs in its value: seen 0, expected 1."
    )
    assert failure(Plain([1]), Plain([2])) == (
        "assert_exact: the value, at ['value'][0], differs in its value: seen 1, expected 2."
    )
    assert failure({1, 2.0}, {True, 2.0}) == (
        "assert_exact: the value differs in its elements: True missing, 1 not expected."
    )
    assert failure({0.0: 1}, {-0.0: 1}) == (
        "assert_exact: the value differs in its keys: -0.0 missing, 0.0 not expected."
    )
    a, b = ({PurePath(key): 1 for key in keys} for keys in ("ab", "ba"))
    assert "differs in the order of its keys: seen PurePosixPath('a'), PurePosixPath('b')" in failure(a, b)


def test_not_compared_as_the_docstring_says() -> None:
    assert_exact(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    assert_exact(torch.ones(2, 2).t().requires_grad_(), torch.ones(2, 2))
    assert_exact(np.ones((2, 3), order="F"), np.ones((2, 3)))
    same = [1]
    assert_exact([same, same], [[1], [1]])
    assert_exact(TensorDict({"x": torch.ones(2)}).lock_(), TensorDict({"x": torch.ones(2)}))


def test_objects_of_rows_are_named() -> None:
    one = NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1.0, torch.ones(2)]}))
    two = NonTensorStack(NonTensorData("a"), NonTensorData({"k": [1.0, torch.tensor([1.0, 2.0])]}))
    seen = TensorDict({"uid": one}, batch_size=[2])
    said = failure(seen, TensorDict({"uid": two}, batch_size=[2]))
    assert said.startswith("assert_exact: field \"uid\", at [1]['k'][1], differs at row 1: seen 1.0")


@pytest.mark.filterwarnings("ignore")
@given(strategies.batches(), st.data())
def test_it_agrees_with_the_oracle(case: strategies.Case, data: st.DataObject) -> None:
    """Equal batches are equal, packed ones too; one flipped bit is found wherever it is."""
    packed = mp.compress(case.batch, **case.options)
    assert_exact(packed, case.batch)
    assert_exact(mp.decompress(packed), packed)
    flat = [path for path in case.batch.keys(True, True) if isinstance(case.batch.get(path), torch.Tensor)]
    names = [path for path in flat if not case.batch.get(path).is_nested and case.batch.get(path).numel()]
    if not names:
        return
    other = mp.decompress(packed)
    path = data.draw(st.sampled_from(names))
    array = oracle.cells(other.get(path)).copy()
    raw = np.frombuffer(array.tobytes(), np.uint8).copy()
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1
    changed = oracle.from_cells(raw.view(array.dtype).reshape(array.shape), other.get(path).dtype)
    other.unlock_().set(path, changed)
    with pytest.raises(AssertionError):
        oracle.assert_same_batch(other, case.batch)
    name = "/".join(path) if isinstance(path, tuple) else path
    assert f'field "{name}" differs' in failure(other, case.batch)


def test_nested_batches_are_compared_with_their_padded_form() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    def nested(pad: int, left: bool) -> TensorDict:
        lies = mask.flip(1) if left else mask
        entries = {"attention_mask": lies, "x": torch.where(lies.bool(), torch.tensor(5), torch.tensor(pad))}
        registry = {name: mp.MaskNestingSpec("attention_mask", [0, 7]) for name in entries}
        return mp.nest_batch_by_mask(TensorDict(entries, batch_size=[2]), registry)

    assert_exact(nested(7, False), nested(7, False))
    assert '"x", in its padded form, differs at row 0, position 2: seen 7' in failure(
        nested(7, False), nested(0, False)
    )
    assert '"attention_mask", in its padded form, differs at row 0' in failure(nested(7, True), nested(7, False))


def test_what_cannot_be_compared_is_refused() -> None:
    packed = mp.compress(TensorDict({"x": torch.ones(2)}, batch_size=[2]))
    with pytest.raises(LayoutError, match=r"assert_exact: got a BatchView, .* Pass view.materialize"):
        assert_exact(mp.views.BatchView.of(packed), packed)
    with pytest.raises(LayoutError, match=r"assert_exact: the value is on the meta device"):
        assert_exact(torch.ones(2, device="meta"), torch.ones(2))
    lock = threading.Lock()
    assert_exact([lock], [lock])
    with pytest.raises(LayoutError, match=r"at \[0\], has an object of <class '_thread.lock'> without a state"):
        assert_exact([threading.Lock()], [lock])
    with pytest.raises(LayoutError, match=r"cannot pickle 'generator' object.* Give its class a __reduce__"):
        assert_exact({iter(x for x in "a")}, {iter(x for x in "a")})
    deep, other = [], []
    for _ in range(10_000):
        deep, other = [deep], [other]
    with pytest.raises(LayoutError, match=r"more deeply than Python's recursion limit .* Compare their parts"):
        assert_exact(deep, other)
