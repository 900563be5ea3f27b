"""The decode kernel against the batches that were packed, and against the host's decoding. Triton interprets the kernel
here; tests/gpu/test_cuda_decode.py runs it on a GPU."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import PAD, VARIANTS, workload
from strategies import Case, batches, row_ops
from tensordict import TensorDict
from torch import Tensor

from maskpack import ANY_ZERO, EDGE, PER_ROW, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core.bits import root_of
from maskpack.core.latest import Latest
from maskpack.core.native import KINDS
from maskpack.errors import LayoutError, WireFormatError
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import jagged_all
from maskpack.nesting.schema import FieldForm
from maskpack.packed import decode as on_host
from maskpack.packed.cuda import decode as staging
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda import jobs as recipes

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def kernel_test(test: Any) -> Any:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return pytest.mark.interpreter(pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1")(test))


CANARY = 64
"""Bytes before and behind every tensor that a kernel writes, that stay as they are."""


class Guarded:
    """Gives out memory between canaries."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = torch.full((nbytes + 2 * CANARY,), 0xA5, dtype=torch.uint8, device=device)
        self._held.append((memory, nbytes))
        return memory[CANARY : CANARY + nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        for memory, nbytes in self._held:
            assert bool((memory[:CANARY] == 0xA5).all())
            assert bool((memory[CANARY + nbytes :] == 0xA5).all())


def by_kernel(packed: PackedBatch, *names: Any, format: Any = "padded", chunk: int = jobs.CHUNK) -> TensorDict:
    """decompress on the host, as it works on a GPU, every tensor by the kernel."""
    guarded = Guarded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "uses_triton", lambda device, call: True)
        patch.setattr(staging, "_new", guarded.empty)
        patch.setattr(jobs, "CHUNK", chunk)
        patch.setattr(on_host, "decoded", lambda packed, forms, nested: {form.path: 1 / 0 for form in forms})
        made = decompress(packed, *names, format=format, device="cpu")
    guarded.check()
    return made


def assert_decodes(packed: PackedBatch, *names: Any, chunk: int = jobs.CHUNK) -> None:
    """As the host does, bit for bit, padded and nested."""
    for format in ("padded", "nested"):
        seen = by_kernel(packed, *names, format=format, chunk=chunk)
        oracle.assert_same_batch(seen, decompress(packed, *names, format=format, device="cpu"))


# -------------------------------------------------------------------- single fields, against what was packed


WIDTH = 330
LENGTHS = (0, 1, 63, 64, 300, 330)


def _runs(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.repeat(rng.integers(-90, 90, n // 40 + 1), 40)[:n]


WORDS: dict[str, Any] = {
    "plain": lambda rng, n: rng.integers(-(2**63), 2**63 - 1, n),
    "blocks": lambda rng, n: rng.integers(0, 100, n) + 20 * rng.integers(-9, 9),
    "bitmap": lambda rng, n: rng.integers(0, 2, n) * 7 - 3,
    "rle": _runs,
    "arange": lambda rng, n: np.arange(n) % 4096 * -3 + rng.integers(-99, 99),
    "delta": lambda rng, n: np.cumsum(_runs(rng, n)),
    "sparse": lambda rng, n: rng.integers(-(2**62), 2**62, n) * (rng.random(n) < 0.02),
}
"""Words of a row that an encoding is the smallest for."""


def under_mask(kind: str, dtype: torch.dtype, shape: tuple[int, ...], pad: Any, seed: int) -> TensorDict:
    """A batch with a mask of one span in some rows and of many in others, and a field of words of a kind."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((len(LENGTHS), WIDTH), np.bool_)
    for row, length in enumerate(LENGTHS):
        start = (WIDTH - length) // 2
        places = np.arange(start, start + length) if row % 2 else np.sort(rng.permutation(WIDTH)[:length])
        mask[row, places] = True
    field = np.zeros((len(LENGTHS), WIDTH, *shape), np.int64)
    count = int(np.prod(shape))
    for row, real in enumerate(mask):
        columns = [WORDS[kind](rng, int(real.sum())) for _ in range(count)]
        values = np.stack(columns, 1).reshape(-1, *shape)
        field[row, real] = values
        before = np.maximum(np.cumsum(real) - 1, 0)
        if pad is EDGE and len(values):
            field[row, ~real] = values[before[~real]]
        elif pad is ANY_ZERO:  # the bits of float32
            field[row, ~real] = -(2**31) * rng.integers(0, 2, (~real).sum())
        elif pad is not EDGE:
            field[row, ~real] = row if pad is PER_ROW else pad
    x = torch.from_numpy(field)
    x = x.to(torch.int32).view(torch.float32) if dtype == torch.float32 else x.to(dtype)
    return TensorDict({"mask": torch.from_numpy(mask), "x": x}, batch_size=[len(LENGTHS)], device="cpu")


@kernel_test
@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, EDGE),
        (torch.uint8, 5),
        (torch.int16, PER_ROW),
        (torch.float32, PER_ROW),
        (torch.float32, ANY_ZERO),
    ],
)
@pytest.mark.parametrize("kind", WORDS)
def test_every_encoding_of_a_field(kind: str, dtype: torch.dtype, pad: Any) -> None:
    batch = under_mask(kind, dtype, (), pad, 0)
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": MaskNestingSpec("mask", pad)})
    oracle.assert_same_batch(by_kernel(packed, chunk=256), batch)
    oracle.assert_same_batch(unnest(by_kernel(packed, format="nested")), batch)
    if dtype == torch.int64:
        assert packed.table.kind(1) == kind
        for rows in ([5, 2, 2, 4, 0], slice(2, 5)):
            oracle.assert_same_batch(by_kernel(packed[rows]), batch[rows])


@kernel_test
@pytest.mark.parametrize("hint", ["columns", "dictionary"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.complex128])
@pytest.mark.parametrize("ragged_dim", [1, 2, 3])
def test_the_width_along_any_dim(ragged_dim: int, dtype: torch.dtype, hint: str) -> None:
    batch = under_mask("arange", torch.int64, (2, 3), 5, 1)
    batch = batch[[4, 2, 4, 0, 4] if hint == "dictionary" else [4, 2, 5, 0, 3]]
    batch["x"] = batch["x"].to(dtype).movedim(1, ragged_dim).contiguous()
    spec = MaskNestingSpec("mask", 5, ragged_dim, hints=(hint,))
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": spec})
    assert packed.table.kind(1).startswith(hint)
    oracle.assert_same_batch(by_kernel(packed, chunk=512), batch)
    oracle.assert_same_batch(unnest(by_kernel(packed, format="nested")), batch)


@kernel_test
@pytest.mark.parametrize(
    ("shape", "dtype", "pad", "ragged_dim"),
    [  # a third of all; each shape and each dtype with two dims or more
        ((20, 8), torch.int16, -1, 1),
        ((12, 4), torch.int32, EDGE, 2),
        ((20, 8), torch.int64, PER_ROW, 3),
        ((40, 3), torch.int16, -1, 3),
        ((9, 3), torch.int32, EDGE, 1),
        ((9, 3), torch.int64, PER_ROW, 2),
    ],
)
def test_columns_of_several_words(shape: tuple[int, ...], dtype: torch.dtype, pad: Any, ragged_dim: int) -> None:
    """A kernel writes words of a column that lie next to each other; with the width behind them, the host does."""
    batch = under_mask("blocks", torch.int64, shape, pad, 1)
    batch["x"] = batch["x"].to(dtype).movedim(1, ragged_dim).contiguous()
    spec = MaskNestingSpec("mask", pad, ragged_dim, hints=("columns",))
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": spec})
    assert packed.table.kind(1) == "columns blocks"
    assert bool(recipes.parts_of(packed, packed.table, packed.tensors[1], 1, True)) == (ragged_dim < 3)
    for own, want in ((packed, batch), (packed[[5, 2, 2, 4]], batch[[5, 2, 2, 4]])):
        if ragged_dim < 3:
            oracle.assert_same_batch(by_kernel(own, chunk=512), want)
        oracle.assert_same_batch(unnest(by_kernel(own, format="nested")), want)


@kernel_test
@pytest.mark.parametrize("kinds", [("blocks", "rle"), ("sparse", "arange"), ("bitmap", "delta"), ("plain", "blocks")])
def test_fields_that_are_joined(kinds: tuple[str, str]) -> None:
    head, tail = (under_mask(kind, torch.int64, (), 5, seed) for seed, kind in enumerate(kinds))
    fields = {"head": head["x"], "tail": tail["x"], "whole": torch.cat([head["x"], tail["x"]], 1)}
    masks = {"h": head["mask"], "t": tail["mask"], "w": torch.cat([head["mask"], tail["mask"]], 1)}
    batch = TensorDict({**fields, **masks}, batch_size=[len(LENGTHS)], device="cpu")
    specs = {name: MaskNestingSpec(name) for name in masks}
    specs |= {"head": MaskNestingSpec("h", 5), "tail": MaskNestingSpec("t", 5)}
    specs["whole"] = MaskNestingSpec("w", 5, hints=("concat:head,tail",))
    packed = compress(batch, registry=specs)
    assert packed.table.kind(2) == "concat"
    oracle.assert_same_batch(by_kernel(packed, "whole"), batch.select("whole"))
    assert_decodes(packed)


@kernel_test
def test_distances_to_a_near_field() -> None:
    batch = under_mask("blocks", torch.int32, (), 0, 2)
    rng = np.random.default_rng(3)
    for name, before in (("y", "x"), ("z", "y")):
        step = torch.from_numpy(rng.integers(-3, 4, batch[before].shape)).int()
        batch[name] = torch.where(batch["mask"], batch[before] * 1000 + step, 0)
        batch[before] = torch.where(batch["mask"], batch[before] * 1000, 0)
    specs = {"mask": MaskNestingSpec("mask"), "x": MaskNestingSpec("mask")}
    specs |= {"y": MaskNestingSpec("mask", hints=("near:x",)), "z": MaskNestingSpec("mask", hints=("near:y",))}
    packed = compress(batch, registry=specs)
    entries = packed.table.entries[packed.table.fields]
    assert any(KINDS[int(entry["kind"])] == "blocks" and entry["second"] >= 0 for entry in entries)
    oracle.assert_same_batch(by_kernel(packed, chunk=512), batch)
    oracle.assert_same_batch(by_kernel(packed, "z"), batch.select("z"))


# -------------------------------------------------------------------- whole batches, against the host


def small(variant: str, rows: int = 4) -> PackedBatch:
    return compress(workload(variant, rows, 6, 24), pad_token_id=PAD)


@kernel_test
@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads(variant: str) -> None:
    packed = small(variant)
    assert_decodes(packed, chunk=64)
    assert_decodes(packed[[3, 0, 0, 2]])


@kernel_test
def test_rows_of_a_workload_that_moved() -> None:
    packed = small("m-rope")
    assert_decodes(packed[1:4])
    assert_decodes(PackedBatch.cat([packed[3:], packed[:2]]))
    assert_decodes(packed[:0])
    assert_decodes(pickle.loads(pickle.dumps(packed)))
    for name in ("input_ids", "returns", "position_ids"):
        assert_decodes(packed, name)


@kernel_test
@quiet
@given(batches(), st.data())
def test_any_batch(case: Case, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options)
    assert_decodes(packed, chunk=data.draw(st.sampled_from([8, 1024])))
    for op in data.draw(row_ops(case.rows, max_size=2)):
        packed = op.on_packed(packed)
    assert_decodes(packed)


@kernel_test
def test_fields_without_words_rows_or_batch_dims() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    fields = {"attention_mask": mask, "x": torch.zeros(2, 3, 0), "y": torch.zeros(2, 3, 2, 0), "z": torch.ones(2, 3)}
    registry = RL_FIELDS | {name: MaskNestingSpec("sequence", 0 if name != "z" else PER_ROW) for name in "xyz"}
    fields["z"] = torch.where(mask == 1, 3.0, torch.tensor([[-0.0], [7.0]]))
    assert_decodes(compress(TensorDict(fields, batch_size=[2]), registry=registry))
    empty = {name: x.zero_() for name, x in fields.items()}
    assert_decodes(compress(TensorDict(empty, batch_size=[2]), registry=registry))
    assert_decodes(compress(TensorDict({"a": torch.arange(5), "b": torch.tensor(3.5)}, batch_size=[])))
    assert_decodes(compress(TensorDict({"s": {"a": torch.ones(2, dtype=torch.bool)}}, batch_size=[2])))


@kernel_test
@pytest.mark.parametrize("name", ["alternating", "some rows", "three wide"])
def test_rows_of_many_runs(name: str) -> None:
    """Two layouts, of which one has the run table of many runs and the other that of few."""
    mask, width = strategies.MANY_RUNS[name]
    batch, registry = strategies.batch_under(mask, width)
    few = torch.arange(width) < torch.arange(len(mask))[:, None] % (width + 1)
    batch["few"], registry["few"] = few, MaskNestingSpec("few")
    batch["under few"], registry["under few"] = batch["ids"] * few, MaskNestingSpec("few")
    packed = compress(batch, registry=registry)[:12]
    assert_decodes(packed)
    for form in (packed, PackedBatch.from_bytes(packed.to_bytes())):
        nested = by_kernel(form, format="nested")
        oracle.assert_same_batch(unnest(nested), batch[:12].to("cpu"))


@kernel_test
def test_offsets_are_shared_and_values_are_not() -> None:
    packed = small("reference")
    nested = by_kernel(packed, format="nested")
    for axis in ("prompt", "sequence", "response"):
        own = [nested[form.path] for form in packed.schema.forms if form.layout == axis]
        assert len({id(x.offsets()) for x in own}) == 1
        assert len({x.values().untyped_storage().data_ptr() for x in own}) == len(own)
    assert isinstance(nested["returns"] - nested["advantages"], Tensor)
    before = nested["returns"].values().clone()
    nested["advantages"].values().fill_(9)
    assert torch.equal(nested["returns"].values(), before)
    unnest(nested)


@kernel_test
def test_batches_of_a_kind_share_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipes", known := Latest[recipes.DecodeRecipe]())
    packed = small("negative-zeros")
    for rows in (packed[:1], packed, packed[1:3], packed[:0]):
        assert_decodes(rows)
    assert len(known._known) == 4  # padded and nested, with rows and without
    assert len({recipe.room for recipe in known._known.values()}) > 1


@kernel_test
def test_a_field_that_the_kernel_cannot_decode_takes_the_hosts_way(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = small("reference")
    refused, all_parts = {("responses",), ("returns",)}, recipes.parts_of

    def parts(packed: Any, table: Any, form: FieldForm, number: int, padded: bool) -> Any:
        return [] if form.path in refused else all_parts(packed, table, form, number, padded)

    monkeypatch.setattr(staging, "uses_triton", lambda device, call: True)
    monkeypatch.setattr(recipes, "parts_of", parts)
    monkeypatch.setattr(recipes, "recipes", Latest())
    for format in ("padded", "nested"):
        seen = decompress(packed, format=format, device="cpu")
        monkeypatch.setattr(staging, "uses_triton", lambda device, call: False)
        oracle.assert_same_batch(seen, decompress(packed, format=format, device="cpu"))
        monkeypatch.setattr(staging, "uses_triton", lambda device, call: True)
    assert seen["returns"].offsets() is seen["advantages"].offsets()


# -------------------------------------------------------------------- memory


def in_tensor(packed: PackedBatch) -> PackedBatch:
    """As PackedBatch.pin_memory leaves it, in memory that is not pinned."""
    return replace(
        packed, table=packed.table.own().moved(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).numpy())
    )


@kernel_test
@pytest.mark.parametrize("large", [1, 1 << 20])
def test_batches_from_bytes(large: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(staging, "_LARGE", large)
    packed = small("multi-turn")
    data = packed.to_bytes()
    assert_decodes(PackedBatch.from_bytes(data))
    assert_decodes(PackedBatch.from_bytes(memoryview(b"x" + data)[1:]))
    packed.save(tmp_path / "packed")
    assert_decodes(PackedBatch.load(tmp_path / "packed")[1:])


@kernel_test
def test_pinned_batches_are_copied_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = in_tensor(small("reference"))
    memory = root_of(packed.table.body).base
    assert isinstance(memory, Tensor)
    seen: list[Tensor] = []
    launch = _launch()
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: x.data_ptr() == memory.data_ptr())
    monkeypatch.setattr(
        "maskpack.packed.cuda.kernel.launch", lambda body, *more: [seen.append(body), launch(body, *more)]
    )

    def straight(batch: PackedBatch, *names: str) -> bool:
        seen.clear()
        assert_decodes(batch, *names)
        inside = [memory.data_ptr() <= body.data_ptr() < memory.data_ptr() + memory.nbytes for body in seen]
        assert len(set(inside)) == 1
        return inside[0]

    assert straight(packed)
    assert straight(packed[:])
    assert not straight(packed[[3, 0]])
    assert not straight(PackedBatch.cat([packed, packed]))
    assert not straight(pickle.loads(pickle.dumps(packed)))
    assert not straight(PackedBatch.from_bytes(packed.to_bytes()))
    large = in_tensor(small("reference", rows=64))
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: False)
    assert_decodes(large[3:5])


@kernel_test
def test_bodies_on_the_device_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = small("reference")
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    there = torch.frombuffer(bytearray(buffers[0]), dtype=torch.uint8)
    launch, seen = _launch(), list[int]()
    monkeypatch.setattr(
        "maskpack.packed.cuda.kernel.launch", lambda body, *more: [seen.append(body.data_ptr()), launch(body, *more)]
    )
    received = pickle.loads(stream, buffers=[staging.mirrored(there)])
    assert_decodes(received)
    assert_decodes(received[2:])
    assert set(seen) == {there.data_ptr()}
    assert_decodes(received[[3, 0]])
    assert len(set(seen)) > 1


def test_a_body_on_another_device_is_copied() -> None:
    there = torch.arange(80, dtype=torch.uint8)
    body = staging.mirrored(there)[8:40]
    assert staging._sent(body, torch.device("cpu"))[0].data_ptr() == there.data_ptr() + 8
    body = memoryview(body).toreadonly()
    for array in (np.frombuffer(body, np.uint8), np.frombuffer(pickle.PickleBuffer(body), np.uint8)[4:]):
        assert [sent.tolist() for sent in staging._sent(array, torch.device("cpu"))] == [array.tolist()] * 2
        assert staging._sent(array, torch.device("meta"))[0].is_meta


def _launch() -> Any:
    from maskpack.packed.cuda import kernel as _decode_kernel

    return _decode_kernel.launch


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without CUDA")
def test_pinning_needs_a_device() -> None:
    with pytest.raises(LayoutError, match=r"PackedBatch\.pin_memory: this process has no CUDA device; expected one\."):
        small("reference").pin_memory()


# -------------------------------------------------------------------- what the speed rests on


def test_the_kernel_and_the_host_number_the_entries_of_a_job_alike() -> None:
    pytest.importorskip("triton")
    from maskpack.packed.cuda import kernel

    names = ["first", *jobs.JobTarget._fields, "source"]
    assert [getattr(kernel, name.upper()).value for name in names] == list(range(len(names)))
    assert len(names) - 1 + len(jobs.JobSource._fields) == jobs.JOB
    assert [getattr(kernel, name.upper()).value for name in jobs.JobSource._fields] == list(
        range(len(jobs.JobSource._fields))
    )


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 2, 3), (7, 0), (7, 1)])
def test_jagged_tensors_made_together_are_as_torch_makes_them(shape: tuple[int, ...]) -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    fields = [torch.rand(shape), torch.rand(shape).to(torch.bfloat16), torch.rand((7, 5)), torch.rand(shape) > 0.5]
    fields.append(torch.rand((*shape[::-1],)).permute(*reversed(range(len(shape)))))
    for x, seen in zip(fields, jagged_all(fields, offsets, 0, 4), strict=True):
        want = torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=0, max_seqlen=4)
        assert (seen.shape, seen.stride(), seen.dtype) == (want.shape, want.stride(), want.dtype)
        assert vars(seen).keys() == vars(want).keys()
        assert torch._C._dispatch_keys(seen).has(torch._C.DispatchKey.NestedTensor)
        assert str(torch._C._dispatch_keys(seen)) == str(torch._C._dispatch_keys(jagged_all([x], offsets, 0, 4)[0]))
        assert seen.values().data_ptr() == x.data_ptr()
        assert seen.offsets() is offsets
        assert (seen._get_min_seqlen(), seen._get_max_seqlen()) == (0, 4)
        assert torch.equal((seen.to(torch.float32) * 2).values(), x.to(torch.float32) * 2)
        assert [row.tolist() for row in seen.unbind()] == [x[:3].tolist(), [], x[3:].tolist()]


def test_jagged_tensors_made_together_do_not_share_what_may_change() -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    one, other = jagged_all([torch.zeros(7), torch.ones(7)], offsets, 0, 4)
    other._metadata_cache["max_seqlen"] = torch.zeros(9, 0)
    assert one._get_max_seqlen() == 4
    other += 1
    assert one.values().tolist() == [0] * 7
    assert other.values().tolist() == [2] * 7
    assert pickle.loads(pickle.dumps(other)).values().tolist() == [2] * 7
    assert torch.equal((one + other).values(), torch.full((7,), 2.0))


@kernel_test
def test_a_mapped_file_that_was_written_to_is_not_decoded(tmp_path: Path) -> None:
    """The kernel reads a copy that was checked."""
    x = (torch.arange(600).view(2, 300) * 7919) % 1000
    packed = compress(TensorDict({"x": x, "s": (x % 50 == 0) * x, "r": x // 20 * 20}, [2]))
    packed.save(tmp_path / "b")
    back, data = PackedBatch.load(tmp_path / "b"), (tmp_path / "b").read_bytes()
    oracle.assert_same_batch(by_kernel(back), decompress(packed, device="cpu"))
    begin = 8 + int.from_bytes(data[:8], "little")
    with (tmp_path / "b").open("r+b") as opened:
        opened.seek(begin)
        opened.write(b"\xff" * (len(data) - begin))
    with pytest.raises(
        WireFormatError, match=r"^decompress: the packed bytes were written to .*; expected .*mmap=False"
    ):
        by_kernel(back)
