"""A remembered plan changes no bit and no schema: batches are compared with what is encoded without one."""

from __future__ import annotations

import contextlib
import enum
import pickle
import random
import struct
import threading
import warnings
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import samples
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict
from torch import Tensor

import maskpack.packed.batch as packing
from maskpack import (
    EDGE,
    PER_ROW,
    MaskNestingSpec,
    PackedBatch,
    VerifyFirst,
    compress,
    decompress,
    nest_batch_by_mask,
)
from maskpack import (
    unnest_batch_by_mask as unnest,
)
from maskpack.core import native
from maskpack.errors import CoverageError, LossyPadError, MaskpackError, MaskpackWarning
from maskpack.packed import table

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
PAD = samples.PAD


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    table.forget()


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the batches that were surveyed."""
    seen: list[int] = []
    survey = packing.survey

    def counted(batch: Any, *args: Any, **more: Any) -> Any:
        seen.append(batch.batch_size[0])
        return survey(batch, *args, **more)

    monkeypatch.setattr(packing, "survey", counted)
    return seen


def anew(batch: TensorDict, **options: Any) -> PackedBatch:
    table.forget()
    return compress(batch, **options)


def assert_as_anew(packed: PackedBatch, batch: TensorDict, **options: Any) -> None:
    oracle.assert_same_batch(decompress(packed), batch)
    fresh = anew(batch, **options)
    assert packed.schema == fresh.schema
    assert samples.freeze(decompress(packed, format="nested")) == samples.freeze(decompress(fresh, format="nested"))
    assert packed.nbytes <= 1.02 * fresh.nbytes + 256
    assert packed.codec == fresh.codec


@pytest.mark.parametrize("variant", samples.VARIANTS)
def test_a_second_batch_is_encoded_by_its_plan(variant: str, surveys: list[int]) -> None:
    first, second = (samples.workload(variant, seed=seed) for seed in (0, 1))
    compress(first, pad_token_id=PAD)
    packed = compress(second, pad_token_id=PAD)
    assert len(surveys) == (2 if variant == "jagged-prompts" else 1)
    assert_as_anew(packed, second, pad_token_id=PAD)


def test_other_rows_of_about_as_many(surveys: list[int]) -> None:
    """A plan serves rows whose number has as many bits."""
    for rows in (8, 15, 9, 16):
        batch = samples.workload(rows=rows, seed=rows)
        packed = compress(batch, pad_token_id=PAD)
        oracle.assert_same_batch(decompress(packed), batch)
    assert surveys == [8, 16]


def test_plans_are_bounded_and_forgotten(surveys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.plans, "_most", 2)
    made = [samples.workload(rows=4, response=response) for response in (8, 9, 10)]
    for batch in (*made, *made[1:]):
        compress(batch, pad_token_id=PAD)
    assert len(surveys) == 3
    compress(made[0], pad_token_id=PAD)
    assert len(surveys) == 4
    table.forget()
    compress(made[0], pad_token_id=PAD)
    assert len(surveys) == 5


def test_registries_whose_pads_differ_in_bits() -> None:
    batch = of_floats(CHANGES["nothing"])
    for pad in (0.0, -0.0, 0.0):
        registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", pad)}
        packed = compress(batch, registry=registry, verify="never")
        assert samples.freeze(packed.forms["x",].pads) == samples.freeze((pad,))


@pytest.mark.parametrize("verify", ["always", "never"])
def test_pads_that_are_nan_of_other_bits(verify: Any) -> None:
    """Forms that differ in them alone are others, for plans, for decoding and for pickles."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for bits in (0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000000):
        (pad,) = struct.unpack("<d", struct.pack("<Q", bits))
        x = torch.where(mask.bool(), 0.5, torch.tensor(bits - (1 << 64) * (bits >> 63)).view(torch.float64))
        batch = TensorDict({"m": mask, "x": x}, [2])
        registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", pad)}
        packed = compress(batch, registry=registry, verify=verify)
        assert packed.forms["x",].kind == "padded"
        for other in (packed, pickle.loads(pickle.dumps(packed)), PackedBatch.from_bytes(packed.to_bytes())):
            oracle.assert_same_batch(decompress(other), batch)
        nested = nest_batch_by_mask(batch, registry=registry, verify=verify)
        oracle.assert_same_batch(unnest(nested), batch)


def test_a_small_field_is_looked_at_in_some_batches() -> None:
    """One that takes another form gets it within 8 batches."""
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}

    def made(seed: int, most: int) -> TensorDict:
        x = torch.randint(0, most, (4, 60), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        x[:, :4] = most - 1
        return TensorDict({"m": torch.ones(4, 60), "x": x}, [4])

    for seed in range(3):
        compress(made(seed, 1 << 30), registry=registry)
    sizes = [compress(made(seed, 5), registry=registry).nbytes for seed in range(8)]
    assert sizes[-1] <= 1.02 * anew(made(7, 5), registry=registry).nbytes


def test_a_batch_that_needs_a_larger_body(surveys: list[int]) -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    mask = torch.ones(7, 5000, dtype=torch.int64)
    noise = torch.randint(-(1 << 62), 1 << 62, (7, 5000), generator=torch.Generator().manual_seed(0))
    for x in (torch.zeros_like(noise), noise, torch.zeros_like(noise), torch.arange(5000).expand(7, -1).contiguous()):
        batch = TensorDict({"m": mask, "x": x}, [7])
        oracle.assert_same_batch(decompress(compress(batch, registry=registry)), batch)
    assert surveys == [7]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_encode_what_one_does(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads_for", lambda nbytes: threads)
    for seed in range(4):
        batch = samples.workload(rows=9, seed=seed)
        assert_as_anew(compress(batch, pad_token_id=PAD), batch, pad_token_id=PAD)
        compress(batch, pad_token_id=PAD)
        oracle.assert_same_batch(decompress(compress(batch, pad_token_id=PAD)), batch)


# -------------------------------------------------------------------- what may differ under one signature


def of_floats(change: Callable[[Tensor, Tensor], Any]) -> TensorDict:
    """[6, 9] with a mask of floats; `change` may write to the field and the mask."""
    mask = (torch.arange(9) < torch.tensor([[3], [9], [0], [1], [5], [9]])).float()
    x = torch.rand(6, 9) * mask
    change(x, mask)
    return TensorDict({"m": mask, "x": x, "dense": torch.arange(6)}, [6])


def put(to: str, row: int, column: int, value: float) -> Callable[[Tensor, Tensor], None]:
    return lambda x, mask: {"x": x, "m": mask}[to].__setitem__((row, column), value)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, mask: None,
    "a stray value": put("x", 0, 8, 1.0),
    "minus zero": put("x", 0, 8, -0.0),
    "nan": put("x", 0, 8, float("nan")),
    "other pads": lambda x, mask: x.masked_fill_(mask == 0, -1.0),
    "pads of rows": lambda x, mask: x.copy_(torch.where(mask == 0, torch.arange(6.0)[:, None], x)),
    "edges": lambda x, mask: x.copy_(torch.arange(6.0)[:, None].expand(6, 9)),
    "another value of the mask": lambda x, mask: mask.mul_(2),
    "two values of the mask": put("m", 1, 0, 3.0),
    "minus zero in the mask": put("m", 0, 8, -0.0),
    "nan in the mask": put("m", 0, 8, float("nan")),
    "no tokens": lambda x, mask: (x.zero_(), mask.zero_()),
    "all tokens": lambda x, mask: (x.fill_(0.5), mask.fill_(1)),
    "holes": lambda x, mask: (x[:, ::2].zero_(), mask[:, ::2].zero_()),
}


@quiet
@pytest.mark.parametrize("pads", [(), (0.0, PER_ROW), (EDGE, 0.0), (-1.0, 0.0, PER_ROW)], ids=str)
@pytest.mark.parametrize("verify", ["always", "never"])
def test_batches_of_one_signature_follow_each_other(pads: tuple[Any, ...], verify: Any) -> None:
    spec = MaskNestingSpec("m", [*pads]) if pads else MaskNestingSpec("m")
    options = {"registry": {"m": MaskNestingSpec("m"), "x": spec}, "verify": verify}
    rng = random.Random(0)
    names = [*CHANGES] * 3
    rng.shuffle(names)
    if verify == "never":  # takes the first pad unseen
        exact = [name for name in CHANGES if "value" in name or "tokens" in name or name in ("nothing", "holes")]
        names = [name for name in names if name in exact and name != "a stray value" and pads[:1] in ((), (0.0,))]
    torch.manual_seed(0)
    made = [of_floats(CHANGES[name]) for name in names]
    remembered = [compress(batch, **options) for batch in made]
    for packed, batch in zip(remembered, made, strict=True):
        oracle.assert_same_batch(decompress(packed), batch)
        assert packed.schema == anew(batch, **options).schema


@quiet
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_plain_batch(change: str) -> None:
    """The plan of a batch whose mask has one value does not serve a mask that has several, or other zeros."""
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    compress(of_floats(CHANGES["nothing"]), registry=registry)
    batch = of_floats(CHANGES[change])
    for _ in range(2):
        packed = compress(batch, registry=registry)
        oracle.assert_same_batch(decompress(packed), batch)
    assert packed.schema == anew(batch, registry=registry).schema


def test_other_strides_make_another_plan() -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    batch = of_floats(CHANGES["all tokens"])  # no pad would tell
    batch["x"] = torch.rand(6, 9)
    turned = TensorDict({"m": batch["m"], "x": batch["x"].T.contiguous().T, "dense": batch["dense"]}, [6])
    for own in (batch, turned, batch):
        oracle.assert_same_batch(decompress(compress(own, registry=registry)), batch)


def test_what_is_lost_raises_with_a_plan_too(surveys: list[int]) -> None:
    options: dict[str, Any] = {"registry": {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}, "on_loss": "error"}
    compress(of_floats(CHANGES["nothing"]), **options)
    compress(of_floats(CHANGES["nothing"]), **options)
    assert len(surveys) == 1
    with pytest.raises(LossyPadError, match='"x"'):
        compress(of_floats(CHANGES["a stray value"]), **options)


@quiet
@pytest.mark.parametrize("under", [False, True])
def test_bools_of_other_bytes(under: bool, surveys: list[int]) -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = TensorDict({"m": mask, "x": mask.bool(), "rows": torch.tensor([True, False])}, [2])
    compress(batch, registry=registry)
    compress(batch, registry=registry)
    assert surveys == [2]
    for name in ("x", "rows"):
        odd = batch.clone()
        odd[name].view(torch.uint8).view(-1)[-1 if under else 0] = 2
        seen: list[Any] = []
        for pack in (compress, anew):
            with contextlib.suppress(Exception):
                seen.append(samples.freeze(decompress(pack(odd, registry=registry))))
                continue
            seen.append(None)
        assert seen[0] == seen[1]


def test_what_was_learnt_makes_another_plan() -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", [0.0, -1.0])}
    plain, other = of_floats(CHANGES["nothing"]), of_floats(CHANGES["other pads"])
    for first in (plain, other):
        verify = VerifyFirst()
        for _ in range(4):
            oracle.assert_same_batch(decompress(compress(first, registry=registry, verify=verify)), first)


def test_hidden_tensors_of_a_further_batch_are_found(surveys: list[int]) -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m"), "dense": MaskNestingSpec(None)}
    first, second = (of_floats(CHANGES["nothing"]) for _ in range(2))
    first["note"], second["note"] = (NonTensorData({"a": a}, batch_size=[6]) for a in (1, torch.ones(6, 9)))
    compress(first, registry=registry, strict_mask_nesting=True)
    compress(first, registry=registry, strict_mask_nesting=True)
    assert len(surveys) == 1
    with pytest.raises(CoverageError, match="note"):
        compress(second, registry=registry, strict_mask_nesting=True)


@quiet
@pytest.mark.parametrize("number", [int, enum.IntEnum("Limit", {"three": 3, "four": 4})], ids=["int", "enum"])
def test_a_number_that_is_a_width_makes_another_plan(number: Any) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    for width in (3, 4, 3):
        batch = TensorDict({"attention_mask": mask, "values": torch.rand(2, 3) * mask[:, 2:]}, [2])
        batch["max_response_length"] = NonTensorData(number(width), batch_size=[2])
        seen, packed = outcome(batch)
        assert ("response" in seen) == (width == 4)  # which is wider than the values
        if packed is not None:
            oracle.assert_same_batch(decompress(packed), batch)


def test_objects_are_those_of_the_batch(surveys: list[int]) -> None:
    made = [samples.rollout(), samples.rollout()]
    made[1]["uid"] = samples.per_row([f"other-{row}" for row in range(len(made[1]))])
    made[1]["temperature"] = NonTensorData([0.5], batch_size=[len(made[1])])
    for batch in made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MaskpackWarning)
            assert_as_anew(compress(batch, pad_token_id=PAD), batch, pad_token_id=PAD)
        compress(made[0], pad_token_id=PAD)


def test_threads_share_plans() -> None:
    made = [samples.workload(rows=4 + rows % 4, seed=rows) for rows in range(8)]
    wrong: list[Any] = []

    def work(batch: TensorDict) -> None:
        try:
            for turn in range(30):
                packed = compress(batch, pad_token_id=PAD)
                oracle.assert_same_batch(decompress(packed), batch)
                if turn % 7 == 0:
                    table.forget()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@quiet
@settings(max_examples=200)
@given(case=batches(), seed=st.integers(0, 2**32 - 1))
def test_random_batches_with_changed_bytes(case: Case, seed: int) -> None:
    """A plan, and no plan, do the same to batches in which some bytes became others: both raise, or both are exact."""
    rng, batch = random.Random(seed), case.batch
    table.forget()
    outcome(batch, **case.options)
    for _ in range(3):
        for tensor in batch.values(include_nested=True, leaves_only=True):
            if type(tensor) is Tensor and tensor.numel() and not tensor.is_nested and rng.random() < 0.4:
                place = tuple(rng.randrange(size) for size in tensor.shape)
                word = tensor[place].reshape(1).view(torch.uint8)
                word[rng.randrange(len(word))] ^= 1 << rng.randrange(8)
        seen, packed = outcome(batch, **case.options)
        table.forget()
        expected, fresh = outcome(batch, **case.options)
        assert seen == expected
        if packed is not None and fresh is not None:
            oracle.assert_same_batch(decompress(packed), batch)
            assert packed.schema == fresh.schema


def outcome(batch: TensorDict, **options: Any) -> tuple[str, PackedBatch | None]:
    """The error of compress, or what it returns."""
    try:
        return "", compress(batch, **options)
    except MaskpackError as error:
        return f"{type(error).__name__}: {error}", None
