"""Tensorclasses and lazy stacks inside a batch: their rows follow the rows of the batch on every path."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import samples
import torch
import warm_workers
from oracle import assert_same_batch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, UnbatchedTensor, lazy_stack, tensorclass

import maskpack as mp

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
ROWS = ([0, 1, 2, 3], [1, 2], [3, 1, 1], [2], [])


@tensorclass
class Tokens:
    ids: torch.Tensor
    text: str | None = None
    more: Any = None


@tensorclass
class Turn:
    tokens: Tokens
    reward: torch.Tensor
    state: TensorDict | None = None


@tensorclass(shadow=True)
class Shadowed:
    keys: torch.Tensor
    items: torch.Tensor


def tokens(rows: int = 4) -> Any:
    return Tokens(
        ids=torch.arange(2 * rows).reshape(rows, 2), text=[f"t{row}" for row in range(rows)], batch_size=[rows]
    )


def batch_of(rows: int = 4) -> TensorDict:
    turn = Turn(
        tokens=tokens(rows),
        reward=torch.arange(rows) / 3,
        state=TensorDict({"x": torch.arange(rows), "t": tokens(rows)}, [rows]),
        batch_size=[rows],
    )
    sub = TensorDict({"same": Tokens(ids=torch.ones(rows, 1), text="all", batch_size=[rows])}, [rows])
    return TensorDict({"turn": turn, "row": torch.arange(rows), "sub": sub}, [rows])


def ragged(rows: int = 4) -> TensorDict:
    """Rows of other lengths, in a stack of TensorDicts and one of tensorclasses."""
    plain = [TensorDict({"a": torch.arange(row), "s": NonTensorData(f"s{row}")}) for row in range(rows)]
    classes = [Tokens(ids=torch.full((row + 1,), row), text=f"c{row}") for row in range(rows)]
    return TensorDict({"plain": lazy_stack(plain), "classes": lazy_stack(classes), "row": torch.arange(rows)}, [rows])


PATHS: dict[str, Callable[[mp.PackedBatch, list[int]], TensorDict]] = {
    "take": lambda packed, rows: mp.decompress(packed.take(rows)),
    "pickled": lambda packed, rows: mp.decompress(pickle.loads(pickle.dumps(packed))[rows]),
    "bytes": lambda packed, rows: mp.decompress(
        mp.PackedBatch.from_bytes(packed[rows].to_bytes(allow_pickle=True), allow_pickle=True)
    ),
    "view": lambda packed, rows: mp.views.BatchView.of(packed).take(rows).materialize(),
    "rows apart": lambda packed, rows: mp.decompress(mp.PackedBatch.cat([packed[[row]] for row in rows])),
    "views apart": lambda packed, rows: mp.views.BatchView.cat(
        [mp.views.BatchView.of(packed[[row]]) for row in rows]
    ).materialize(),
    "nested": lambda packed, rows: mp.unnest_batch_by_mask(mp.decompress(packed[rows], format="nested")),
    "split": lambda packed, rows: mp.decompress(packed[rows].split([len(rows), 0])[0]),
}


@quiet
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [batch_of, ragged])
def test_rows_follow(make: Callable[[], TensorDict], path: str, rows: list[int]) -> None:
    if not rows and ("apart" in path or make is ragged):
        return
    batch = make()
    assert_same_batch(PATHS[path](mp.compress(batch), rows), oracle.take_rows(batch, rows))


@quiet
@pytest.mark.parametrize("make", [batch_of, ragged])
def test_rows_follow_plans_and_nested_batches(make: Callable[[], TensorDict]) -> None:
    batch = make()
    plan = mp.planning.plan_micro_batches([4, 1, 3, 2], 5)
    for whole in (batch, mp.nest_batch_by_mask(batch), mp.compress(batch)):
        parts = list(plan.apply(whole))
        for part, rows in zip(parts, plan.micro_batches, strict=True):
            found = mp.decompress(part) if isinstance(part, mp.PackedBatch) else part.exclude("_maskpack")
            assert_same_batch(found, oracle.take_rows(batch, rows))
        back = plan.restore(parts)
        assert_same_batch(mp.decompress(back) if isinstance(back, mp.PackedBatch) else back.exclude("_maskpack"), batch)
    nested = mp.nest_batch_by_mask(batch)
    for rows in ROWS[:-1]:
        assert_same_batch(mp.unnest_batch_by_mask(samples.rows_of(nested, rows)), oracle.take_rows(batch, rows))


@quiet
def test_padded_fields_of_a_tensorclass_are_encoded() -> None:
    """A registry reaches into it by names, as into a TensorDict."""
    rollout = samples.rollout()
    ids, mask = rollout["input_ids"], rollout["attention_mask"]

    @tensorclass
    class Prompt:
        input_ids: torch.Tensor
        attention_mask: torch.Tensor

    batch = TensorDict({"p": Prompt(input_ids=ids, attention_mask=mask, batch_size=ids.shape[:1])}, ids.shape[:1])
    packed = mp.compress(batch, pad_token_id=samples.PAD, strict_mask_nesting=True)
    assert packed.forms["p", "input_ids"].kind == "padded"
    assert_same_batch(mp.decompress(packed), batch)
    assert_same_batch(mp.decompress(packed[[2, 0]]), oracle.take_rows(batch, [2, 0]))
    nested = mp.nest_batch_by_mask(batch, pad_token_id=samples.PAD)
    assert nested["p"].input_ids.is_nested
    assert_same_batch(mp.unnest_batch_by_mask(nested), batch)
    assert_same_batch(
        mp.decompress(packed, ("p", "input_ids"))["p"].select("input_ids"), batch["p"].select("input_ids")
    )


@quiet
def test_a_class_whose_fields_hide_methods() -> None:
    one = Shadowed.from_tensordict(TensorDict({"keys": torch.arange(3), "items": torch.ones(3, 2)}, [3]))
    batch = TensorDict({"s": one}, [3])
    assert_same_batch(mp.decompress(mp.compress(batch)[1:]), oracle.take_rows(batch, [1, 2]))


@quiet
def test_whether_the_rows_of_a_stack_are_alike_decides_nothing() -> None:
    batch = ragged()
    parts = [mp.compress(batch[row : row + 1]) for row in (1, 2, 1)]
    assert_same_batch(mp.decompress(parts[0]), oracle.take_rows(batch, [1]))
    assert_same_batch(
        mp.decompress(mp.PackedBatch.cat([*parts, mp.compress(batch)])), oracle.take_rows(batch, [1, 2, 1, 0, 1, 2, 3])
    )


@quiet
def test_dense_sub_batches_join_lazy_stacks() -> None:
    """As torch.stack and lazy_stack leave them where a framework takes whichever it can."""
    batch = ragged()
    dense = TensorDict({name: torch.stack([batch[name][2]] * 2) for name in ("plain", "classes")}, [2])
    dense["row"] = torch.tensor([2, 2])
    lazy, alike = mp.compress(batch), mp.compress(dense)
    assert alike.forms["plain",].kind == "node"
    assert_same_batch(mp.decompress(mp.PackedBatch.cat([alike, lazy])), oracle.take_rows(batch, [2, 2, 0, 1, 2, 3]))
    assert_same_batch(mp.decompress(mp.PackedBatch.cat([lazy, alike])[-1:]), oracle.take_rows(batch, [2]))


@quiet
def test_a_file_names_a_class_that_the_reader_has_imported() -> None:
    packed = mp.compress(batch_of().select(("sub", "same"), "row"))
    data = packed.to_bytes()
    assert_same_batch(mp.decompress(mp.PackedBatch.from_bytes(data)), mp.decompress(packed))
    program = "import sys, maskpack as mp; mp.PackedBatch.from_bytes(sys.stdin.buffer.read())"
    done = subprocess.run([*warm_workers.python(), "-c", program], input=data, capture_output=True, check=False)
    assert "a tensorclass that this process has; import its module first" in done.stderr.decode()
    for name in ("os:system", "tensordict:NonTensorData", "tensordict:TensorDict", "builtins:dict", "", "a:"):
        odd = data.replace(f"{__name__}:Tokens".encode(), name.ljust(len(__name__) + 7).encode())
        with pytest.raises(mp.errors.WireFormatError):
            mp.PackedBatch.from_bytes(odd)


def test_what_has_no_rows_is_refused_by_name() -> None:
    batch = TensorDict({"u": UnbatchedTensor(torch.arange(3)), "x": torch.zeros(3)}, [3])
    for call in (mp.compress, mp.nest_batch_by_mask):
        with pytest.raises(mp.errors.LayoutError, match='"u" is a UnbatchedTensor, whose rows are not known'):
            call(batch)
    stack = lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
    assert isinstance(stack, LazyStackedTensorDict)
    with pytest.raises(mp.errors.LayoutError, match="a lazy stack whose rows differ in their entries or shapes"):
        mp.compress(stack)
    with pytest.raises(mp.errors.LayoutError, match="rows differ in their entries"):
        mp.compress(
            lazy_stack([TensorDict({"a": torch.zeros(1), "b": torch.zeros(1)}), TensorDict({"a": torch.zeros(1)})])
        )


@quiet
@pytest.mark.parametrize("call", [mp.compress, mp.nest_batch_by_mask])
def test_a_stack_along_another_dim_is_a_batch_or_refused(call: Any) -> None:
    parts = [TensorDict({"a": torch.arange(5 * n).view(5, n)}, [5]) for n in (4, 4, 3)]
    alike = LazyStackedTensorDict(*parts[:2], stack_dim=1)
    back = mp.decompress if call is mp.compress else mp.unnest_batch_by_mask
    assert_same_batch(back(call(alike)), torch.stack(parts[:2], 1))
    ragged = LazyStackedTensorDict(*parts[1:], stack_dim=1)
    for stack in (ragged, LazyStackedTensorDict(ragged, ragged, stack_dim=0)):
        with pytest.raises(mp.errors.LayoutError, match=r"a lazy stack .* put the stack into a TensorDict"):
            call(stack)
        rows = back(call(TensorDict({"stack": stack}, stack.batch_size[:1])))["stack"]
        for row, want in zip(rows.unbind(0), stack.unbind(0), strict=True):
            for one, other in zip(row.unbind(row.batch_dims - 1), want.unbind(want.batch_dims - 1), strict=True):
                assert_same_batch(one, other)


def test_rows_of_a_stack_with_entries_of_their_own_keep_them() -> None:
    rows = [TensorDict({"a": torch.tensor(0)}), TensorDict({"a": torch.tensor(1), "b": torch.tensor(2)})]
    batch = TensorDict({"s": lazy_stack(rows)}, [2])
    out = mp.decompress(mp.compress(batch)[[1, 0]])["s"]
    assert [sorted(row.keys()) for row in out.unbind(0)] == [["a", "b"], ["a"]]
