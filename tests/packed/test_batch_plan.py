"""Which batches a remembered plan serves on the host, and what it must not remember. test_same_rows.py tests that it
changes no row."""

from __future__ import annotations

import enum
import pickle
import struct
import threading
import warnings
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from maskpack import EDGE, MaskNestingSpec, PackedBatch, compress, decompress, nest_batch_by_mask, unnest_batch_by_mask
from maskpack.core import native
from maskpack.errors import CoverageError, LossyPadError, MaskpackError
from maskpack.nesting import jobs, plan
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import table

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
PAD = samples.PAD
REGISTRY = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m"), "dense": MaskNestingSpec(None)}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the batches for which a plan was made."""
    seen: list[int] = []
    of = jobs.HostJobs.of

    def counted(plan: Any, *args: Any) -> Any:
        seen.append(plan.rows)
        return of(plan, *args)

    monkeypatch.setattr(jobs.HostJobs, "of", counted)
    return seen


def floats(x: Tensor | None = None) -> TensorDict:
    """[6, 9] with a mask."""
    mask = (torch.arange(9) < torch.tensor([[3], [9], [0], [1], [5], [9]])).float()
    return TensorDict({"m": mask, "x": torch.rand(6, 9) * mask if x is None else x, "dense": torch.arange(6)}, [6])


@pytest.mark.parametrize("variant", samples.VARIANTS)
def test_a_second_batch_is_encoded_by_its_plan(variant: str, planned: list[int]) -> None:
    for seed in (0, 1):
        compress(samples.workload(variant, seed=seed), pad_token_id=PAD)
    assert len(planned) == 1


FIELDS = ("responses", "old_log_probs", "advantages")


def jagged_alone(batch: TensorDict) -> TensorDict:
    """Jagged fields on one offsets tensor for each axis, without LAYOUTS, as other libraries make them."""
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    return TensorDict({name: x for name, x in nested.items() if name != LAYOUTS}, batch.batch_size)


KINDS: dict[str, Any] = {
    "jagged": jagged_alone,
    "nested": lambda batch: nest_batch_by_mask(batch, pad_token_id=PAD),
    "nested beside padded": lambda batch: nest_batch_by_mask(batch, pad_token_id=PAD).set(
        "returns", batch["advantages"] + 0
    ),
    "jagged beside padded": lambda batch: jagged_alone(batch).set("more", batch["responses"] + 0),
    "a mask of responses alone": lambda batch: batch.select(*FIELDS, "response_mask"),
    "sub-batches": lambda batch: TensorDict({"actor": batch, "ids": torch.arange(len(batch))}, batch.batch_size),
    "masks of the enclosing batch": lambda batch: batch.select("attention_mask", "prompts").set(
        "of_actor", batch.select(*FIELDS)
    ),
}


@quiet
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind_have_plans(kind: str, planned: list[int]) -> None:
    for seed in range(4):
        batch = KINDS[kind](samples.workload("multi-turn", seed=seed))
        if seed == 0:
            planned.clear()  # those of what the batch is made with
        packed = compress(batch, pad_token_id=PAD)
        padded = unnest_batch_by_mask(batch) if LAYOUTS in batch else batch
        oracle.assert_same_batch(decompress(packed), padded)
        oracle.assert_same_batch(decompress(PackedBatch.from_bytes(packed.to_bytes())), padded)
        oracle.assert_same_batch(decompress(packed[2:5]), oracle.take_rows(padded, [2, 3, 4]))
    assert len(planned) == 1


def test_a_nested_batch_whose_rows_are_not_those_of_its_layouts(planned: list[int]) -> None:
    for seed in (0, 1):
        nested = nest_batch_by_mask(samples.workload(seed=seed), pad_token_id=PAD)
        compress(nested, pad_token_id=PAD)
    assert len(planned) == 2  # to nest, and to compress what is nested
    other = nest_batch_by_mask(samples.workload(seed=5), pad_token_id=PAD)
    with pytest.raises(MaskpackError, match="responses"):
        compress(nested.clone().set("responses", other["responses"]), pad_token_id=PAD)


@pytest.mark.parametrize("kind", ["packed", "some fields", "rows", "nested"])
def test_results_of_a_batch_have_plans(kind: str, planned: list[int]) -> None:
    for seed in range(4):
        batch = samples.workload("multi-turn", seed=seed)
        like: Any = compress(batch, pad_token_id=PAD)
        if kind == "some fields":
            like = like.select("advantages")
        elif kind == "rows":
            like, batch = like[[3, 1, 1]], batch[[3, 1, 1]]
        elif kind == "nested":
            like = nest_batch_by_mask(batch, pad_token_id=PAD)
        result = batch.select(*FIELDS)
        packed = compress(result, pad_token_id=PAD, like=like)
        assert {form.layout for form in packed.schema.forms} == {"response"}
        oracle.assert_same_batch(decompress(packed), result)
    assert len(planned) == 2  # one for the batch, one for the result


def test_a_layout_of_other_rows_makes_no_plan() -> None:
    batch = samples.workload(rows=5)
    like = compress(batch, pad_token_id=PAD)
    for _ in range(2):
        compress(batch.select(*FIELDS), pad_token_id=PAD, like=like)
    with pytest.raises(MaskpackError, match="responses"):
        compress(batch[:4].select(*FIELDS), pad_token_id=PAD, like=like)


@pytest.mark.parametrize("bad", ["falling", "beyond the values", "not from 0"])
def test_offsets_that_are_none(bad: str) -> None:
    """A plan reads no values that are not there."""
    for seed in (0, 1):
        compress(KINDS["jagged"](samples.workload(seed=seed)), pad_token_id=PAD)
    batch = KINDS["jagged"](samples.workload(seed=2))
    offsets = batch["responses"].offsets()
    if bad == "falling":
        offsets[2] = offsets[1] - 1
    elif bad == "not from 0":
        offsets[0] = 1
    else:
        offsets[-1] += 1000
    with pytest.raises(MaskpackError):
        compress(batch, pad_token_id=PAD)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_lossy_field_stays_padded_in_the_same_call(
    threads: int, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fields are near it, or put together from it, and whether it was so in the batch before."""
    monkeypatch.setattr(native, "threads_for", lambda nbytes: threads)
    for turn, names in enumerate(
        [(), ("rollout_log_probs",), ("rollout_log_probs",), (), ("prompts", "old_log_probs"), ("advantages",), ()]
    ):
        batch = samples.workload("multi-turn", seed=turn)
        for name in names:
            batch[name][2, 0 if name == "prompts" else -1] = 77  # a row that is shorter
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            packed = compress(batch, pad_token_id=PAD)
        dense = {form.path[0]: form.reason for form in packed.schema.forms if form.kind == "dense" and form.reason}
        assert dense.keys() == set(names)
        assert [str(one.message).count("non-pad values") for one in caught] == [len(names)] * bool(names)
        assert all(one.filename == __file__ for one in caught)
        for own in (packed, PackedBatch.from_bytes(packed.to_bytes()), pickle.loads(pickle.dumps(packed))):
            oracle.assert_same_batch(decompress(own), batch)
        oracle.assert_same_batch(decompress(packed[[4, 2]]), oracle.take_rows(batch, [4, 2]))
    assert len(planned) == 1


def test_other_rows_of_about_as_many(planned: list[int]) -> None:
    """A plan serves rows whose number has as many bits."""
    for rows in (8, 15, 9, 16):
        batch = samples.workload(rows=rows, seed=rows)
        oracle.assert_same_batch(decompress(compress(batch, pad_token_id=PAD)), batch)
    assert planned == [8, 16]


def test_plans_are_bounded_and_forgotten(planned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.plans, "_most", 2)
    made = [samples.workload(rows=4, response=response) for response in (8, 9, 10)]
    for batch, count in zip((*made, *made[1:], made[0]), (1, 2, 3, 3, 3, 4), strict=True):
        compress(batch, pad_token_id=PAD)
        assert len(planned) == count
    table.forget()
    compress(made[0], pad_token_id=PAD)
    assert len(planned) == 5


@pytest.mark.parametrize("verify", [True, False])
def test_pads_that_differ_in_bits_alone(verify: Any) -> None:
    """Zeros, and NaN: forms that differ in them alone are others, for plans, for decoding and for pickles."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    zeros, nans = (0, 1 << 63, 0), (0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000000)
    for bits in (*zeros, *nans):
        (pad,) = struct.unpack("<d", struct.pack("<Q", bits))
        x = torch.where(mask.bool(), 0.5, torch.tensor(bits - (1 << 64) * (bits >> 63)).view(torch.float64))
        batch = TensorDict({"m": mask, "x": x}, [2])
        registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", pad)}
        packed = compress(batch, registry=registry, verify=verify)
        assert packed.forms["x",].kind == "padded"
        for other in (packed, pickle.loads(pickle.dumps(packed)), PackedBatch.from_bytes(packed.to_bytes())):
            oracle.assert_same_batch(decompress(other), batch)
        nested = nest_batch_by_mask(batch, registry=registry, verify=verify)
        oracle.assert_same_batch(unnest_batch_by_mask(nested), batch)


@pytest.mark.parametrize(("width", "batches"), [(60, 8), (800, 20)])
def test_a_small_field_is_looked_at_in_some_batches(width: int, batches: int) -> None:
    """One that takes another form gets it within 8 batches, one of a few thousand bytes too, which had its form for
    long."""

    def size(seed: int, most: int) -> int:
        x = torch.randint(0, most, (4, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        x[:, :4] = most - 1
        return compress(TensorDict({"m": torch.ones(4, width), "x": x}, [4]), registry=REGISTRY).nbytes

    sizes = [size(seed, 1 << 30) for seed in range(batches)] + [size(seed, 5) for seed in range(8)]
    table.forget()
    assert sizes[-1] <= 1.02 * size(7, 5)


def test_a_batch_that_needs_a_larger_body(planned: list[int]) -> None:
    noise = torch.randint(-(1 << 62), 1 << 62, (7, 5000), generator=torch.Generator().manual_seed(0))
    for x in (torch.zeros_like(noise), noise, torch.zeros_like(noise), torch.arange(5000).expand(7, -1).contiguous()):
        batch = TensorDict({"m": torch.ones_like(noise), "x": x}, [7])
        oracle.assert_same_batch(decompress(compress(batch, registry=REGISTRY)), batch)
    assert planned == [7]


@quiet
def test_errors_are_raised_with_a_plan_too(planned: list[int]) -> None:
    """Of values that are lost, and of hidden tensors."""
    options: dict[str, Any] = {"registry": REGISTRY, "strict_mask_nesting": True}
    batch, stray, hidden = floats(), floats(), floats()
    stray["x"][0, 8] = 1
    for own, note in ((batch, 1), (stray, 1), (hidden, torch.ones(6, 9))):
        own["note"] = NonTensorData({"a": note}, batch_size=[6])
    for _ in range(2):
        compress(batch, **options)
    assert len(planned) == 1
    with pytest.raises(LossyPadError, match='"x"'):
        compress(stray, **options)
    with pytest.raises(CoverageError, match="note"):
        compress(hidden, **options)


@quiet
@pytest.mark.parametrize("number", [int, enum.IntEnum("Limit", {"three": 3, "four": 4})], ids=["int", "enum"])
def test_a_number_that_is_a_width_makes_another_plan(number: Any) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    for width in (3, 4, 3):
        batch = TensorDict({"attention_mask": mask, "values": torch.rand(2, 3) * mask[:, 2:]}, [2])
        batch["max_response_length"] = NonTensorData(number(width), batch_size=[2])
        if width == 4:  # which is wider than the values
            with pytest.raises(MaskpackError, match="response"):
                compress(batch)
        else:
            oracle.assert_same_batch(decompress(compress(batch)), batch)


@quiet
def test_objects_are_those_of_the_batch() -> None:
    made = [samples.rollout(), samples.rollout()]
    made[1]["uid"] = samples.per_row([f"other-{row}" for row in range(len(made[1]))])
    made[1]["temperature"] = NonTensorData([0.5], batch_size=[len(made[1])])
    for batch in made * 2:
        oracle.assert_same_batch(decompress(compress(batch, pad_token_id=PAD)), batch)


def test_threads_share_plans() -> None:
    made = [samples.workload(rows=4 + rows % 4, seed=rows) for rows in range(8)]
    wrong: list[Any] = []

    def work(batch: TensorDict) -> None:
        try:
            for turn in range(30):
                oracle.assert_same_batch(decompress(compress(batch, pad_token_id=PAD)), batch)
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


def jagged_of(values: Tensor, offsets: Any) -> TensorDict:
    offsets = offsets if isinstance(offsets, Tensor) else torch.tensor(offsets)
    field = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=0, max_seqlen=8)
    return TensorDict({"x": field}, [len(offsets) - 1])


@quiet
@pytest.mark.parametrize("first", [0, 1])
def test_values_that_do_not_lie_together_behind_few_that_do(first: int) -> None:
    values = torch.arange(40)[::2]
    compress(jagged_of(values[:first], [0, first, first]))
    got = decompress(compress(jagged_of(values[:5], [0, 2, 5])), format="nested")["x"]
    assert got.values().tolist() == [0, 2, 4, 6, 8]


@quiet
@pytest.mark.parametrize("known", [True, False])
def test_offsets_that_do_not_lie_together(known: bool) -> None:
    if known:
        compress(jagged_of(torch.arange(10), [0, 2, 10]))
    offsets = torch.tensor([0, 1, 2, 3, 10, 0])[::2]
    got = decompress(compress(jagged_of(torch.arange(10), offsets)), format="nested")["x"]
    assert got.offsets().tolist() == [0, 2, 10]
    assert got.values().tolist() == list(range(10))


def test_a_mask_whose_pad_is_negative_zero_is_looked_at() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    registry = {"m": MaskNestingSpec("m", [-0.0, 0.0]), "x": MaskNestingSpec("m")}
    batch = TensorDict({"m": mask, "x": mask * 3}, [2])
    for _ in range(2):
        assert not torch.signbit(decompress(compress(batch, registry=registry))["m"]).any()


def test_plans_of_other_widths_begin_with_the_forms_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[set[int]] = []
    encode = native.encode

    def seen(jobs: Any, *given: Any) -> Any:
        kinds.append(set(jobs["form"]["kind"].tolist()))
        return encode(jobs, *given)

    monkeypatch.setattr(native, "encode", seen)
    batch = samples.workload("reference", seed=0)
    compress(batch, pad_token_id=PAD)
    wider = samples.workload("reference", seed=0, response=batch["responses"].shape[1] + 8)
    oracle.assert_same_batch(decompress(compress(wider, pad_token_id=PAD)), wider)
    assert kinds[0] == {-1}
    assert kinds[-1] - {-1}


@quiet
@pytest.mark.parametrize("verify", [True, False])
def test_fields_nested_with_different_pads_are_looked_at_whatever_verify_says(verify: Any) -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    edges = TensorDict({"m": mask, "x": torch.tensor([[5, 5, 6, 6], [7, 7, 8, 9]])}, [2])
    zeros = TensorDict({"m": mask, "x": mask * 3}, [2])
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", [0, EDGE])}
    nested = torch.cat([nest_batch_by_mask(batch, registry) for batch in (edges, zeros)])
    packed = compress(nested, registry=registry, verify=verify)
    again = nest_batch_by_mask(nested, registry, verify=verify)
    for got in (decompress(packed), unnest_batch_by_mask(again)):
        oracle.assert_same_batch(got, torch.cat([edges, zeros]))


def in_memory(x: Tensor, way: int, rng: np.random.Generator) -> Tensor:
    """The same numbers in another place: together, with permuted dims, or with gaps between words, rows or tokens."""
    if way == 0:
        return x.clone()
    if way == 1:
        order = rng.permutation(x.dim()).tolist()
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
    steps = [2 if dim == {2: x.dim() - 1, 3: 0}.get(way) else 1 for dim in range(x.dim())]
    more = [3 * (way == 4 and dim == 1) for dim in range(x.dim())]
    room = torch.zeros([size * step + gap for size, step, gap in zip(x.shape, steps, more, strict=True)], dtype=x.dtype)
    there = room[tuple(slice(0, size * step, step) for size, step in zip(x.shape, steps, strict=True))]
    return there.copy_(x)


@pytest.mark.parametrize(("shape", "dim"), [((4, 5), 1), ((4, 5, 3), 1), ((4, 2, 5), 2), ((4, 3, 5, 2), 2)], ids=str)
def test_batches_that_lie_in_memory_in_any_way(shape: tuple[int, ...], dim: int) -> None:
    """One after the other, as plans are remembered."""
    rng = np.random.default_rng(0)
    mask = torch.ones(4, 5, dtype=torch.int64)
    mask[1:, 3:] = 0
    under = mask.reshape(4, *[1] * (dim - 1), 5, *[1] * (len(shape) - dim - 1))
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", 0, dim)}
    for dtype in (torch.float32, torch.float64, torch.bool):
        for _ in range(40):
            x = (torch.from_numpy(rng.integers(0, 9, shape)) * under).to(dtype)
            batch = TensorDict({"m": mask, "x": in_memory(x, int(rng.integers(5)), rng)}, [4])
            oracle.assert_same_batch(
                decompress(compress(batch, registry=registry)), TensorDict({"m": mask, "x": x}, [4])
            )
