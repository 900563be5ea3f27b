"""What work on a device costs and where it is done: launches, copies, synchronisations, memory, fallbacks.
test_same_rows.py tests that rows are equal."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import torch
from kernels import DEVICE, IS_GPU, Place, at, count_syncs, encoding_of, kernel_test
from needs import needs
from samples import PAD
from tensordict import TensorDict
from torch import Tensor

from maskpack import MaskNestingSpec, PackedBatch, compress, decompress, nest_batch_by_mask, unnest_batch_by_mask
from maskpack.core import abi, backends, native
from maskpack.core.bits import root_of
from maskpack.core.latest import Latest
from maskpack.errors import LayoutError, WireFormatError
from maskpack.layout.jagged import jagged_all
from maskpack.nesting import device_read
from maskpack.packed import table as tables
from maskpack.packed.cuda import decode, device_plan, encode, job_table, jobs
from maskpack.packed.join import table_of_rows
from maskpack.packed.rows import Rows

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def gpu_test(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not IS_GPU, reason="needs a GPU")(test))


FORMATS: tuple[Any, ...] = ("padded", "nested")


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    tables.forget()


@pytest.fixture
def by_kernels() -> Iterator[Place]:
    with at("kernels") as here:
        yield here


def workload(seed: int = 0, **more: Any) -> TensorDict:
    sizes = {"rows": 6, "prompt": 24, "response": 100, "fill": 0.4, "group": 3}
    return samples.workload(seed=seed, **(sizes | more))


def small(**more: Any) -> PackedBatch:
    return compress(workload(**more), pad_token_id=PAD)


def assert_decodes(packed: PackedBatch, *names: str) -> None:
    """As the host does, bit for bit."""
    for format in FORMATS:
        seen = decompress(packed, *names, format=format, device=DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "uses_triton", lambda device, call: False)
            expected = decompress(packed, *names, format=format, device="cpu")
        oracle.assert_same_batch(seen.to("cpu"), expected)


# -------------------------------------------------------------------- decoding: where bytes are read and written


@kernel_test
@pytest.mark.usefixtures("by_kernels")
def test_offsets_are_shared_and_values_are_not() -> None:
    packed = small()
    nested = decompress(packed, format="nested", device=DEVICE)
    for axis in ("prompt", "sequence", "response"):
        own = [nested[form.path] for form in packed.schema.forms if form.layout == axis]
        assert len({id(x.offsets()) for x in own}) == 1
        assert own[0].offsets().untyped_storage().nbytes() < 1 << 16
    values = [nested[form.path].values() for form in packed.schema.forms]
    assert len({x.untyped_storage().data_ptr() for x in values}) == len(values)
    assert isinstance(nested["returns"] - nested["advantages"], Tensor)
    before = nested["returns"].values().clone()
    nested["advantages"].values().fill_(9)
    assert torch.equal(nested["returns"].values(), before)
    unnest_batch_by_mask(nested)


@kernel_test
@pytest.mark.usefixtures("by_kernels")
def test_batches_of_a_kind_share_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones of a kind need more room for tables."""
    monkeypatch.setattr(jobs, "recipes", known := Latest[jobs.DecodeRecipe]())
    packed = small(variant="negative-zeros")
    for rows in (packed[:1], packed, packed[1:3], packed[:0]):
        assert_decodes(rows)
    assert len(known._known) == 2  # padded and nested
    assert len({recipe.room for recipe in known._known.values()}) > 1


@kernel_test
@pytest.mark.usefixtures("by_kernels")
def test_a_field_that_the_kernel_cannot_decode_takes_the_hosts_way(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, all_parts = small(), jobs.parts_of
    refused = {("responses",), ("returns",)}
    monkeypatch.setattr(jobs, "recipes", Latest())
    monkeypatch.setattr(jobs, "parts_of", lambda *given: [] if given[2].path in refused else all_parts(*given))
    assert_decodes(packed)
    seen = decompress(packed, format="nested", device=DEVICE)
    assert seen["returns"].offsets() is seen["advantages"].offsets()


@kernel_test
def test_columns_of_several_words_with_the_width_behind_them() -> None:
    """The kernel writes words of a column that lie next to each other; here they do not, and the host decodes them."""
    words = np.random.default_rng(1).integers(0, 100, (6, 330, 40, 3)) + 20 * np.arange(120).reshape(40, 3)
    x = torch.from_numpy(words).to(torch.int16).movedim(1, 3).contiguous()
    spec = MaskNestingSpec("mask", 0, 3, hints=("columns",))
    batch = TensorDict({"mask": torch.ones(6, 330), "x": x}, [6])
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": spec})
    assert packed.table.kind(1) == "columns blocks"
    assert not jobs.parts_of(packed, packed.table, packed.tensors[1], 1, True)
    with at("kernels"):
        oracle.assert_same_batch(decompress(packed, device=DEVICE).to("cpu"), batch.to("cpu"))


@kernel_test
def test_pieces_and_what_refers_to_them_take_the_hosts_way() -> None:
    rng = torch.Generator().manual_seed(3)
    text = torch.randint(0, 50_000, (8, 300), generator=rng)
    x = torch.cat([text[:1].repeat(8, 1), text], 1)
    fields = {"x": x, "both": torch.cat([x, text], 1), "y": text}
    fields |= {f"mask {name}": torch.ones(fields[name].shape) for name in fields}
    fields["near"] = x + torch.randint(0, 3, x.shape, generator=rng)
    batch = TensorDict(fields, [8])
    hints = {"x": "pieces", "near": "near:x", "both": "concat:x,y", "y": "blocks"}
    registry = {
        name: MaskNestingSpec(f"mask {'x' if name == 'near' else name}", hints=(hints[name],)) for name in hints
    }
    registry |= {name: MaskNestingSpec(name) for name in fields if name.startswith("mask")}
    packed, want = compress(batch, registry=registry), batch.to("cpu")
    kinds = samples.kinds_of(packed)
    assert (kinds["x"].split()[0], kinds["both"], kinds["near"]) == ("pieces", "concat", "blocks")
    assert packed.table.entries[samples.entry_of(packed, "near")]["second"] == samples.entry_of(packed, "x")
    for name in ("x", "near", "both"):
        number = packed.numbers[name,]
        assert not jobs.parts_of(packed, packed.table, packed.tensors[number], number, True)
    with at("kernels") as here:
        oracle.assert_same_batch(decompress(packed, device=DEVICE).to("cpu"), want)
        oracle.assert_same_batch(decompress(packed[3:5], device=DEVICE).to("cpu"), want[3:5])
        taken = want[torch.tensor([7, 2])]
        oracle.assert_same_batch(decompress(packed[[7, 2]], device=DEVICE).to("cpu"), taken)
        for _ in range(3):  # its fields are given what kernels write, whatever a hint names
            there = compress(batch.to(here.device), registry=registry)
            assert "pieces" not in " ".join(samples.kinds_of(there).values())
            assert here.encoded[-1] is None or here.names(there) == {*fields}
            oracle.assert_same_batch(decompress(there, device=DEVICE).to("cpu"), want)


@kernel_test
def test_zeros_between_stretches_of_words_with_steps() -> None:
    """What the steps before a row add up to is not theirs."""
    slopes = torch.randint(-99, 99, (5, 40, 1), generator=torch.Generator().manual_seed(3))
    x = (torch.arange(60).expand(5, 40, 60) * slopes + 7).reshape(5, 2400) * (torch.arange(2400) % 1200 < 360)
    spec = MaskNestingSpec("mask", hints=("sparse",))
    batch = TensorDict({"mask": torch.ones(5, 2400), "x": x}, [5])
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": spec})
    assert packed.table.kind(packed.numbers["x",]) == "sparse delta"
    with at("kernels"):
        assert_decodes(packed, "x")
        assert_decodes(packed[[3, 1, 4]], "x")


@pytest.mark.parametrize("outer", ["", "dictionary", "columns"])
def test_an_encoding_that_kernels_do_not_read_takes_the_hosts_way_wherever_it_is(
    outer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an encoding that was added without `stage`: alone, as rows of a dictionary, and as a column."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(0, 40_000, (6, 300), generator=rng)
    if outer == "dictionary":
        x = x[:2].repeat(3, 1)
    elif outer == "columns":
        x = (torch.randint(0, 100, (6, 300, 40), generator=rng) + 60 * torch.arange(40)).to(torch.int16)
    batch = TensorDict({"mask": torch.ones(6, 300), "x": x}, [6])
    spec = MaskNestingSpec("mask", hints=(outer or "blocks",))
    packed = compress(batch, registry={"mask": MaskNestingSpec("mask"), "x": spec})
    number = packed.numbers["x",]
    *others, inner = packed.table.kind(number).split()
    assert others == outer.split()
    assert jobs.parts_of(packed, packed.table, packed.tensors[number], number, True)
    monkeypatch.setattr(native, "STAGED", native.STAGED - {abi.KINDS.index(inner)})
    assert not jobs.parts_of(packed, packed.table, packed.tensors[number], number, True)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch, by_kernels: Place) -> list[int]:
    """The addresses that launches of the decode kernel read from."""
    from maskpack.packed.cuda import kernel

    seen, launch = list[int](), kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda body, *more: [seen.append(body.data_ptr()), launch(body, *more)])
    return seen


@kernel_test
@pytest.mark.skipif(IS_GPU, reason="a GPU copies pinned memory; see test_one_launch_few_copies_no_sync")
def test_pinned_batches_are_copied_from_where_they_lie(monkeypatch: pytest.MonkeyPatch, bodies: list[int]) -> None:
    packed = small()
    body = torch.empty(packed.table.body.nbytes, dtype=torch.uint8).numpy()
    body[...] = packed.table.body
    packed = replace(packed, rows=Rows.of(packed.table.like(body=body), packed.schema))
    memory = root_of(packed.table.body).base
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: x.data_ptr() == memory.data_ptr())
    for batch, straight in (
        (packed, True),
        (packed[:], True),
        (packed[[3, 0]], True),
        (PackedBatch.cat([packed, packed]), True),
        (PackedBatch.cat([packed, small(seed=1)]), False),
        (pickle.loads(pickle.dumps(packed)), False),
        (PackedBatch.from_bytes(packed.to_bytes()), False),
    ):
        bodies.clear()
        assert_decodes(batch)
        assert {memory.data_ptr() <= body < memory.data_ptr() + memory.nbytes for body in bodies} == {straight}


@kernel_test
def test_bodies_on_the_device_are_read_where_they_lie(bodies: list[int]) -> None:
    packed = small(rows=4, prompt=6, response=24, fill=0.05, group=16)  # of larger ones, a slice gets bytes of its own
    stream, buffers = samples.sent(packed)
    there = torch.frombuffer(bytearray(buffers[0]), dtype=torch.uint8).to(DEVICE)
    received = pickle.loads(stream, buffers=[decode.mirrored(there)])
    assert_decodes(received)
    assert_decodes(received[2:])
    assert_decodes(received[[3, 0]])
    assert set(bodies) == {there.data_ptr()}
    assert_decodes(PackedBatch.cat([received, packed]))
    assert len(set(bodies)) > 1


def test_a_body_on_another_device_is_copied() -> None:
    there = torch.arange(80, dtype=torch.uint8)
    body = decode.mirrored(there)[8:40]
    assert decode._sent(body, torch.device("cpu"))[0].data_ptr() == there.data_ptr() + 8
    body = memoryview(body).toreadonly()
    for array in (np.frombuffer(body, np.uint8), np.frombuffer(pickle.PickleBuffer(body), np.uint8)[4:]):
        assert [sent.tolist() for sent in decode._sent(array, torch.device("cpu"))] == [array.tolist()] * 2
        assert decode._sent(array, torch.device("meta"))[0].is_meta


@kernel_test
@pytest.mark.usefixtures("by_kernels")
def test_a_mapped_file_that_was_written_to_is_not_decoded(tmp_path: Path) -> None:
    """The kernel reads a copy that was checked."""
    x = (torch.arange(600).view(2, 300) * 7919) % 1000
    compress(TensorDict({"x": x, "s": (x % 50 == 0) * x, "r": x // 20 * 20}, [2])).save(tmp_path / "b")
    back, data = PackedBatch.load(tmp_path / "b"), (tmp_path / "b").read_bytes()
    assert_decodes(back)
    begin = 8 + int.from_bytes(data[:8], "little")
    with (tmp_path / "b").open("r+b") as opened:
        opened.seek(begin)
        opened.write(b"\xff" * (len(data) - begin))
    with pytest.raises(
        WireFormatError, match=r"^decompress: the packed bytes were written to .*; expected .*mmap=False"
    ):
        decompress(back, device=DEVICE)


def test_the_kernel_and_the_host_number_the_members_of_a_job_alike() -> None:
    needs("triton")
    from maskpack.packed.cuda import kernel

    for names in (job_table.JOB.names, abi.SOURCE.names):
        assert names is not None
        assert [getattr(kernel, name.upper()).value for name in names] == [*range(len(names))]


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 2, 3), (7, 0), (7, 1)])
def test_jagged_tensors_made_together_are_as_torch_makes_them(shape: tuple[int, ...]) -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    fields = [torch.rand(shape), torch.rand(shape).to(torch.bfloat16), torch.rand((7, 5)), torch.rand(shape) > 0.5]
    fields.append(torch.rand((*shape[::-1],)).permute(*reversed(range(len(shape)))))
    for x, seen in zip(fields, jagged_all(fields, offsets, 0, 4), strict=True):
        want = torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=0, max_seqlen=4)
        assert (seen.shape, seen.stride(), seen.dtype) == (want.shape, want.stride(), want.dtype)
        assert vars(seen).keys() == vars(want).keys()
        assert seen.values().data_ptr() == x.data_ptr()
        assert torch.equal((seen.to(torch.float32) * 2).values(), x.to(torch.float32) * 2)


def test_jagged_tensors_made_together_do_not_share_what_may_change() -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    one, other = jagged_all([torch.zeros(7), torch.ones(7)], offsets, 0, 4)
    other._metadata_cache["max_seqlen"] = torch.zeros(9, 0)
    assert one._get_max_seqlen() == 4
    other += 1
    assert one.values().tolist() == [0] * 7
    assert other.values().tolist() == [2] * 7
    assert pickle.loads(pickle.dumps(other)).values().tolist() == [2] * 7


# -------------------------------------------------------------------- decoding on a GPU


@gpu_test
@pytest.mark.parametrize("lies", ["anywhere", "pinned", "there"])
@pytest.mark.parametrize("format", FORMATS)
def test_one_launch_few_copies_no_sync(format: Any, lies: str) -> None:
    packed = small(rows=32, response=1500)
    packed = packed.pin_memory() if lies == "pinned" else packed
    if lies == "there":
        stream, buffers = samples.sent(packed)
        there = torch.frombuffer(bytearray(buffers[0]), dtype=torch.uint8).cuda()
        packed = pickle.loads(stream, buffers=[decode.mirrored(there)])
    decompress(packed, format=format, device="cuda")
    with count_syncs() as syncs:
        decompress(packed, format=format, device="cuda")
    assert not syncs
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decompress(packed, format=format, device="cuda")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [name for name in names if "Memcpy HtoD" in name]
    launched = [name for name in names if "Memcpy" not in name and "Memset" not in name]
    assert len(copies) == (1 if lies == "there" else 2) + (format == "nested"), names  # one of the entry LAYOUTS
    assert all("Pinned" in name for name in copies)
    assert len(launched) == 1, names
    assert "decode" in launched[0]


@gpu_test
@pytest.mark.parametrize("pinned", [False, True])
def test_many_in_flight_on_two_streams(pinned: bool) -> None:
    """Staging memory goes round while copies are under way."""
    made = [workload(rows=16, response=500 + 40 * n) for n in range(6)]
    packed = [compress(batch, pad_token_id=PAD) for batch in made]
    packed = [batch.pin_memory() for batch in packed] if pinned else packed
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    seen: list[list[TensorDict]] = []
    for turn in range(4):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                block.fill_(turn + n)  # the copies behind it wait
                seen.append([decompress(batch, format=FORMATS[n], device="cuda") for batch in packed])
    del packed
    scratch = [torch.full((1 << 20,), 0xEE, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert len(scratch) == 4
    for n, group in enumerate(seen):
        for batch, expected in zip(group, made, strict=True):
            back = unnest_batch_by_mask(batch) if n % 2 else batch
            oracle.assert_same_batch(back.to("cpu"), expected.to("cpu"))


@gpu_test
def test_no_capture() -> None:
    packed = small()
    decompress(packed, device="cuda")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(LayoutError, match=r"decompress: a CUDA graph is being captured"):
            decompress(packed, device="cuda")
    assert_decodes(packed)


@gpu_test
def test_launches_share_one_compiled_kernel() -> None:
    from maskpack.packed.cuda import kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in kernel._decode.device_caches.values())

    assert_decodes(small(rows=5, prompt=3, response=17))
    count = compiled()
    assert_decodes(small(variant="multi-turn", rows=16, prompt=16, response=64))
    assert_decodes(small(variant="m-rope", rows=1, prompt=8, response=1).pin_memory())
    assert_decodes(small(variant="routed-experts", rows=3, prompt=5, response=33)[1:])
    assert compiled() == count


@gpu_test
def test_the_last_words_of_the_longest_rows_are_written() -> None:
    """Places behind them pass int32."""
    from maskpack.packed.cuda import kernel

    words = (1 << 31) - job_table.SPAN // 2
    out = torch.full((words + job_table.SPAN,), 77, dtype=torch.uint8, device="cuda")
    spans = -(-words // job_table.SPAN)
    job = np.full(job_table.JOB.itemsize // 8, -1).view(job_table.JOB)
    numbers = {"spans": spans, "out": out.data_ptr(), "size": 1, "items": 1, "stride": 1, "offset": 0, "row_words": 1}
    numbers |= {"unit": words, "inner": 1, "part": 0, "group": 1}
    for name, number in numbers.items():
        job[name] = number
    for name, number in {"kind": abi.BY_PIECE, "begin_unit": 0, "data": 0, "data_size": 1, "single": 1}.items():
        job["source"][name] = number
    body = torch.full((1,), 9, dtype=torch.uint8, device="cuda")
    kernel.launch(body, torch.tensor([0, *job.view(np.int64).tolist()], device="cuda"), 0, 1, spans)
    assert int((out[:words] != 9).sum()) == 0
    assert int((out[words:] != 77).sum()) == 0


@kernel_test
def test_scattered_rows_are_read_where_they_lie(by_kernels: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is encoded again for them, unless all of the body would be sent for few of its rows."""
    packed, encoded = small(rows=8), list[int]()

    def encode_again(of_rows: PackedBatch) -> tables.Table:
        encoded.append(len(of_rows))
        return table_of_rows(of_rows)

    monkeypatch.setattr("maskpack.packed.batch.table_of_rows", encode_again)
    for rows in ([6, 1, 1, 3], [7, 0]):
        assert_decodes(packed.select("input_ids", "advantages", "rollout_log_probs").take(rows))
        assert_decodes(packed.take(rows))
    assert not encoded
    monkeypatch.setattr(decode, "_SPREAD", 2)
    assert_decodes(packed.take([7, 1, 0, 4]))
    assert not encoded
    assert_decodes(packed.take([7, 1, 0]))
    assert encoded == [3]
    assert_decodes(PackedBatch.cat([packed[:4], small(rows=8, seed=1)])[[0, 11, 3]])
    monkeypatch.setattr(decode, "_MOST_SENT", packed.select("advantages").nbytes)
    assert_decodes(packed.select("advantages").take([7, 1, 0, 4]))
    assert encoded == [3, 3]
    assert_decodes(packed.take([7, 1, 0, 4]))
    assert encoded == [3, 3, 4]


@gpu_test
def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = small()
    monkeypatch.setenv("MASKPACK_TRITON", "0")
    assert not decode.decode_on_device(packed, packed, packed.schema.forms, True, "cuda")
    assert_decodes(packed)


@gpu_test
def test_fields_go_home_to_their_devices() -> None:
    batch = workload()
    away = ("advantages", "returns")
    packed = compress(batch.clone().update({name: batch[name].cuda() for name in away}), pad_token_id=PAD)
    for format in FORMATS:
        seen = decompress(packed, format=format)
        assert {name for name in batch.keys() if seen[name].is_cuda} == {*away}  # noqa: SIM118
    oracle.assert_same_batch(decompress(packed).to("cpu"), batch.to("cpu"))


@gpu_test
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    batch = workload()
    seen = decompress(compress(batch, pad_token_id=PAD), device="cuda:1")
    assert seen["input_ids"].device == torch.device("cuda:1")
    oracle.assert_same_batch(seen.to("cpu"), batch.to("cpu"))


# -------------------------------------------------------------------- encoding: by the kernels, or left to the host


def assert_rows(packed: PackedBatch, batch: TensorDict) -> None:
    seen = decompress(packed, format="nested" if any(x.is_nested for x in batch.values()) else "padded", device="cpu")
    oracle.assert_same_batch(seen.select(*batch.keys()), batch.to("cpu"))


LENGTHS = (3, 0, 700, 256, 1, 64, 63, 1025, 2048, 5)


def jagged(rows: list[Any], dtype: torch.dtype) -> Tensor:
    return samples.jagged([torch.from_numpy(np.asarray(row)).to(dtype) for row in rows])


@kernel_test
def test_forms_of_a_padded_batch_serve_a_nested_one(by_kernels: Place) -> None:
    """Whose layouts come in another order."""
    batches = [workload(seed).to(DEVICE) for seed in range(3)]
    compress(batches[0], pad_token_id=PAD)
    for batch in batches:
        packed = compress(nest_batch_by_mask(batch, pad_token_id=PAD), pad_token_id=PAD)
        assert len(by_kernels.names(packed)) >= 10
        assert_rows(packed, batch)


@kernel_test
def test_what_does_not_fit_its_form_is_left_to_the_host(by_kernels: Place) -> None:
    rng = np.random.default_rng(5)
    steps, noise = ([f(n) for n in LENGTHS] for f in (np.arange, lambda n: rng.integers(0, 99, n)))
    for own, names in ((steps, set[str]()), (noise, {"b"}), (noise, set[str]()), (steps, {"a", "b"})):
        fields = {"a": jagged(own, torch.int64), "b": jagged(steps, torch.int32)}
        batch = TensorDict(fields, batch_size=[len(LENGTHS)])
        packed = compress(batch.to(DEVICE))
        assert_rows(packed, batch)
        assert by_kernels.names(packed) <= names
    assert by_kernels.encoded[0] is None  # the host chooses
    assert by_kernels.encoded[2] is None  # and once more, as a field did not fit


def ids_like(rng: np.random.Generator, n: int, bits: float = 16) -> np.ndarray:
    """As frequent as token ids: each number of bits as often as any other."""
    return (2 ** (bits * rng.random(n))).astype(np.int64)


def coded_rows(seed: int) -> dict[str, list[np.ndarray]]:
    """Rows of fields with coded blocks, and with blocks that are none: of few words, of words that have no code, of
    about as many bits in either way, near to others."""
    rng = np.random.default_rng(seed)
    ids = [ids_like(rng, n) for n in (*LENGTHS, 15, 16, 17, 271)]
    ids[8][1500], ids[8][1900] = 1 << 29, -(1 << 20)  # behind the words that codes are fitted to
    large = np.arange(256) % 128 < np.arange(80, 104)[:, None]
    mixed = np.where(large, (1 << 16) - 1, ids_like(rng, large.size, 7).reshape(large.shape))
    ids[4] = np.concatenate([ids_like(rng, 1024), mixed.reshape(-1)])
    near = [row + rng.integers(-2, 3, len(row)) for row in ids]
    near[8][:700], near[4][:1500] = ids_like(rng, 700), ids_like(rng, 1500)
    return {"ids": ids, "near": near, "same": ids}


@kernel_test
@pytest.mark.parametrize(("form", "dtype"), [("padded", torch.int64), ("nested", torch.int32)])
def test_coded_blocks_are_those_of_the_host(by_kernels: Place, form: str, dtype: torch.dtype) -> None:
    registry = {name: MaskNestingSpec("mask") for name in ("mask", "ids", "same")}
    registry["near"] = MaskNestingSpec("mask", hints=("near:ids",))
    batches: list[TensorDict] = []
    for seed in range(3):
        rows = coded_rows(seed) | {"mask": [np.ones(len(row)) for row in coded_rows(seed)["ids"]]}
        fields = {name: jagged(own, torch.bool if name == "mask" else dtype) for name, own in rows.items()}
        padded = {name: torch.nested.to_padded_tensor(x, 0) for name, x in fields.items()}
        batches.append(TensorDict(padded, [len(rows["ids"])]))

    def packed_at(device: Any) -> PackedBatch:
        given = [batch.to(device) for batch in batches]
        given = given if form == "padded" else [nest_batch_by_mask(own, registry=registry) for own in given[:2]]
        return [compress(own, registry=registry) for own in given][-1]

    seen = packed_at(DEVICE)
    assert by_kernels.plans == [True] if form == "padded" else by_kernels.names(seen) == {*registry}
    assert encoding_of(seen) == encoding_of(packed_at("cpu"))
    oracle.assert_same_batch(decompress(seen, device="cpu"), batches[2 if form == "padded" else 1].to("cpu"))
    said = {name: seen.table.array(seen.table.entries[seen.table.fields[seen.numbers[name,]]]["a"]) for name in rows}
    assert {16, 29, abi.CODED} <= {*said["ids"].tolist()}
    assert {3 | abi.NEAR, abi.CODED} <= {*said["near"].tolist()}


@kernel_test
@pytest.mark.parametrize("hashes", ["equal", "right"])
def test_rows_are_equal_by_their_words_not_by_their_hash(
    monkeypatch: pytest.MonkeyPatch, by_kernels: Place, hashes: str
) -> None:
    words = np.random.default_rng(7).integers(0, 2**31, (4, 300))
    measured = encode.Encoder.measured

    def collided(self: Any, *others: Tensor) -> Any:
        found = measured(self, *others)
        found[0]["hash"] = 1
        return found

    if hashes == "equal":
        monkeypatch.setattr(encode.Encoder, "measured", collided)
    for order in ([0, 0, 1, 1, 2, 2], [3, 2, 3, 2, 1, 1]):
        rows = [*words[order]]
        fields = {"a": jagged(rows, torch.int64), "b": jagged(rows[::-1], torch.int64)}
        batch = TensorDict(fields, batch_size=[6])
        packed = compress(batch.to(DEVICE))
    assert by_kernels.names(packed) == (set() if hashes == "equal" else {"a", "b"})
    assert_rows(packed, batch)


@kernel_test
def test_equal_fields_are_stored_once(by_kernels: Place) -> None:
    for seed in range(2):
        a = jagged([np.random.default_rng(seed).normal(size=n) for n in LENGTHS], torch.float32).to(DEVICE)
        fields = {name: torch.nested.nested_tensor_from_jagged(a.values(), a.offsets()) for name in "abc"}
        packed = compress(TensorDict(fields, batch_size=[len(LENGTHS)]))
    assert by_kernels.names(packed) == {"a", "b", "c"}
    assert len(set(packed.table.fields.tolist())) == 1
    for name in "abc":
        assert torch.equal(decompress(packed, format="nested", device=DEVICE)[name].values(), a.values())


@kernel_test
def test_odd_bools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "uses_triton", lambda device, call: True)
    monkeypatch.setattr("maskpack.nesting.read.odd_bools", lambda words: False)  # as for tensors on a GPU
    registry = {"a": MaskNestingSpec(None), "b": MaskNestingSpec(None)}
    fields = {"a": torch.tensor([[0, 1, 1]] * 4).bool().to(DEVICE), "b": torch.ones(4, 3, device=DEVICE)}
    compress(TensorDict(fields, [4]), registry=registry)
    fields["a"] = torch.tensor([[0, 1, 2]] * 4, dtype=torch.uint8).view(torch.bool).to(DEVICE)
    with pytest.raises(LayoutError, match='field "a" is torch'):
        compress(TensorDict(fields, [4]), registry=registry)


# -------------------------------------------------------------------- encoding: forms that are renewed


Sampled = list[tuple[int, dict[str, Any]]]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Of each sample, its rows; and of its fields the bytes and the lengths of rows."""
    seen, build = Sampled(), encode.of_values

    def recorded(forms: Any, values: Any, layouts: Any, rows: int, dense_rows: int, **more: Any) -> Any:
        own = {
            form.path[-1]: (np.array(words), [1] * dense_rows if form.layout is None else lengths(layouts[form.layout]))
            for form, words in zip(forms, values, strict=True)
        }
        seen.append((rows, own))
        return build(forms, values, layouts, rows, dense_rows, **more)

    def lengths(layout: Any) -> list[int]:
        return np.diff(layout.row_offsets).tolist()

    monkeypatch.setattr(encode, "of_values", recorded)
    return seen


def rows_of(kind: str, rng: np.random.Generator, rows: int = 24) -> list[np.ndarray]:
    lengths = rng.integers(100, 200, rows)
    if kind == "repeated":  # each row twice, far apart
        half = [rng.integers(0, 50_000, n) for n in lengths[: rows // 2]]
        return [*half, *half[::-1]]
    return [np.full(n, 7) if kind == "constant" else rng.integers(0, 1 << 62, n) for n in lengths]


def in_form(form: str, fields: dict[str, list[np.ndarray]], dtype: torch.dtype = torch.int64) -> TensorDict:
    """Rows of fields of one mask, and two dense fields, one in columns."""
    lengths = [len(row) for row in next(iter(fields.values()))]
    mask = torch.arange(max(lengths) + 3) < torch.tensor(lengths)[:, None]
    batch = {"mask": mask.long(), "number": torch.arange(len(lengths))}
    for name, rows in fields.items():
        batch[name] = torch.zeros(mask.shape, dtype=dtype)
        batch[name][mask] = torch.from_numpy(np.concatenate(rows)).to(dtype)
    batch["pair"] = torch.stack([batch[name], batch[name] // 2 + 5], 2) * mask.unsqueeze(2)
    out = TensorDict(batch, [len(lengths)])
    return out if form == "padded" else nest_batch_by_mask(out, registry=SAMPLE_SPECS)


SAMPLE_SPECS = {name: MaskNestingSpec("mask") for name in ("mask", "x", "y", "pair")}
SAMPLE_SPECS |= {"number": MaskNestingSpec(None), "pair": MaskNestingSpec("mask", hints=("columns",))}


@kernel_test
@pytest.mark.parametrize("form", FORMATS)
def test_forms_follow_the_words_by_samples_of_their_rows(
    by_kernels: Place, monkeypatch: pytest.MonkeyPatch, sampled: Sampled, form: str
) -> None:
    """The host encodes no batch as a whole but the first, and the one after a batch that does not fit."""
    monkeypatch.setattr(encode, "_A_LOOK", 5)
    rng, kinds, by_host = np.random.default_rng(2), list[str](), list[int]()
    for number, words in enumerate(["random"] * 4 + ["constant"] * 3 + ["random"] * 3):
        rows = rows_of(words, rng)
        batch, before = in_form(form, {"x": rows}), (len(by_kernels.encoded), len(sampled))
        packed = compress(batch.to(DEVICE), registry=SAMPLE_SPECS)
        assert_rows(packed, batch)
        by_host += [number] if by_kernels.encoded[before[0] :] == [None] else []
        for count, fields in sampled[before[1] :]:
            assert count == 6
            assert_is_sample(fields, batch if form == "padded" else unnest_batch_by_mask(batch), rows)
        kinds.append(packed.table.kind(packed.numbers["x",]))
    assert by_host == [0, 8]
    assert len(sampled) == 1
    assert kinds == ["plain"] * 6 + ["blocks"] + ["plain"] * 3


def assert_is_sample(
    fields: dict[str, tuple[np.ndarray, list[int]]], batch: TensorDict, rows: list[np.ndarray]
) -> None:
    """Rows 0 to 3, 12 and 13 of all fields."""
    taken = [0, 1, 2, 3, 12, 13]
    assert {*fields} == {*batch.keys()}
    for name, (words, lengths) in fields.items():
        parts = [
            batch[name][row : row + 1] if name == "number" else batch[name][row, : len(rows[row])] for row in taken
        ]
        want = torch.cat(parts).contiguous().view(-1).numpy()
        assert words[: want.nbytes].tobytes() == want.tobytes()
        assert not words[want.nbytes :].any()
        assert lengths == [len(part) for part in parts]


@kernel_test
def test_a_sample_says_nothing_against_a_form_that_needs_many_rows(
    by_kernels: Place, monkeypatch: pytest.MonkeyPatch, sampled: Sampled
) -> None:
    """A dictionary, of which the sample shows no two equal rows."""
    monkeypatch.setattr(encode, "_A_LOOK", 1)
    rng = np.random.default_rng(2)
    for _ in range(4):
        batch = in_form("nested", {"x": rows_of("repeated", rng)})
        packed = compress(batch.to(DEVICE), registry=SAMPLE_SPECS)
        assert_rows(packed, batch)
        assert packed.table.kind(packed.numbers["x",]).split()[0] == "dictionary"
    assert len(sampled) == 3
    assert sum(found is None for found in by_kernels.encoded) == 1


@kernel_test
def test_a_sample_gives_a_form_to_a_field_that_was_left_to_the_host(
    by_kernels: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_A_LOOK", 4)
    rng, left, others = np.random.default_rng(3), list[set[str]](), {"mask", "number", "y"}
    for number in range(8):
        lengths, most = rng.integers(100, 200, 24), 50 if number < 3 else 1 << 60
        rows = [np.arange(n) if number == 0 else rng.integers(0, most, n) for n in lengths]
        batch = in_form("nested", {"y": [rng.integers(0, 50, n) for n in lengths], "x": rows})
        packed = compress(batch.to(DEVICE), registry=SAMPLE_SPECS)
        assert_rows(packed, batch)
        left.append({"mask", "number", "x", "y", "pair"} - by_kernels.names(packed))
    assert left[1:3] == [{"x", "pair"}, {"x", "pair"} | others]  # does not fit; and the host chooses
    assert left[3:] == [{"x", "pair"}] * 4 + [set()]


# -------------------------------------------------------------------- encoding: by a plan


def _several_spans(batch: TensorDict) -> None:
    batch["attention_mask"][0, :] = 1
    batch["attention_mask"][0, 1] = 0


def _gap_in_numbers(batch: TensorDict) -> None:
    """A gap in a mask of many numbers, which has no form that a 0 does not fit."""
    _several_spans(batch)
    _numbered(batch)


def _numbered(batch: TensorDict) -> None:
    mask = batch["attention_mask"]
    batch["attention_mask"] = (mask != 0) * torch.randint(
        1, 200, mask.shape, generator=torch.Generator().manual_seed(0)
    )


@kernel_test
@pytest.mark.parametrize(
    ("change", "verify"),
    [
        (_several_spans, True),
        (_several_spans, False),
        (_gap_in_numbers, False),
    ],
)
def test_a_batch_that_does_not_fit_its_plan(by_kernels: Place, change: Any, verify: Any) -> None:
    batches = [workload(seed) for seed in range(4)]
    change(batches[3])
    for batch in batches[:3] if change is _gap_in_numbers else []:
        _numbered(batch)
    for batch in batches:
        packed = compress(batch.to(DEVICE), pad_token_id=PAD, verify=verify)
        assert_rows(packed, batch)
    assert by_kernels.plans == [True, False]


@kernel_test
def test_a_plan_of_kernels_does_not_run_where_they_were_switched_off_since(
    by_kernels: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MASKPACK_TRITON=0, after the first batches."""
    for seed in range(3):
        compress(workload(seed).to(DEVICE), pad_token_id=PAD)
    assert by_kernels.plans == [True]
    monkeypatch.setenv("MASKPACK_TRITON", "0")
    for module in () if IS_GPU else (device_plan, encode, device_read):
        monkeypatch.setattr(module, "uses_triton", backends.uses_triton)
    batch = workload(3)
    assert_rows(compress(batch.to(DEVICE), pad_token_id=PAD), batch)
    assert by_kernels.plans == [True, False]
    assert by_kernels.encoded[-1] is None


@kernel_test
def test_a_plan_of_a_batch_with_a_sub_batch_before_its_masks(by_kernels: Place) -> None:
    for seed in range(4):
        flat = workload(seed)
        inner = TensorDict({"returns": flat["old_log_probs"] + 0, "responses": flat["responses"] + 0}, flat.batch_size)
        batch = TensorDict({"inner": inner, **dict(flat.items())}, flat.batch_size)
        packed = compress(batch.to(DEVICE), pad_token_id=PAD)
        oracle.assert_same_batch(decompress(packed, device="cpu"), batch.to("cpu"))
    assert by_kernels.plans[-1]


@kernel_test
def test_a_row_that_lacks_the_last_token_of_its_parts_is_no_concat(by_kernels: Place) -> None:
    rng = torch.Generator().manual_seed(0)
    registry = {name: MaskNestingSpec(mask) for name, mask in zip("prsab", "prspr", strict=True)}
    registry["x"] = MaskNestingSpec("s", hints=("concat:a,b",))
    for lacks in (0, 0, 1):
        n = torch.randint(5, 15, (2, 3), generator=rng)
        p, r = (torch.arange(20) < own[:, None] for own in n)
        a, b = (torch.randint(1, 30000, (3, 20), generator=rng) * mask for mask in (p, r))
        rows = [torch.cat([a[row][p[row]], b[row][r[row]]])[: int(n[:, row].sum()) - lacks] for row in range(3)]
        x = torch.stack([torch.nn.functional.pad(row, (0, 40 - len(row))) for row in rows])
        batch = TensorDict({"p": p.long(), "r": r.long(), "s": (x > 0).long(), "a": a, "b": b, "x": x}, [3])
        packed = compress(batch.to(DEVICE), registry=registry)
        assert (packed.table.kind(packed.numbers["x",]) == "concat") == (not lacks)
        oracle.assert_same_batch(decompress(packed, device="cpu"), batch.to("cpu"))


@kernel_test
def test_a_plan_that_trusts_pads_takes_no_rows_of_several_spans(by_kernels: Place) -> None:
    """Their masks alone tell."""
    rng = torch.Generator().manual_seed(0)
    registry = {name: MaskNestingSpec("m") for name in "mx"}
    for hole in (False, False, False, True):
        mask = (torch.arange(40) < torch.randint(10, 40, (4, 1), generator=rng)).long()
        mask[1, 3 : 3 + 2 * hole] = 0
        batch = TensorDict({"m": mask, "x": mask * torch.randint(1, 99, (4, 40), generator=rng)}, [4])
        packed = compress(batch.to(DEVICE), registry=registry, verify=False)
        oracle.assert_same_batch(decompress(packed, device="cpu"), batch.to("cpu"))
    assert by_kernels.plans == [True, False]


@kernel_test
@pytest.mark.parametrize("reason", ["rows of several spans", "rows that are too long"])
def test_batches_without_a_plan(by_kernels: Place, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Nothing is measured in vain for them."""
    if reason == "rows that are too long":
        monkeypatch.setattr(device_plan, "MOST", 123)
    for seed in (0, 1, 0):
        batch = workload(seed)
        if reason == "rows of several spans":
            _several_spans(batch)
        assert_rows(compress(batch.to(DEVICE), pad_token_id=PAD), batch)
    assert by_kernels.plans == []
    assert by_kernels.encoded[-1] is not None


@gpu_test
def test_synchronisations() -> None:
    batches = [workload(seed, rows=96, prompt=200, response=3000, fill=0.2).to("cuda") for seed in range(4)]
    for batch in batches[:3]:
        compress(batch, pad_token_id=PAD)
    with count_syncs() as syncs:
        packed = compress(batches[3], pad_token_id=PAD)
    assert len(syncs) <= 2
    assert torch.from_numpy(packed.table.body).is_pinned()
