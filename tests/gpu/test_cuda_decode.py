"""Decoding on CUDA: the bits of the host's decoding, in one launch with two copies and no synchronisation, from
memory that may be used again at once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from samples import PAD, VARIANTS, workload
from tensordict import TensorDict

from maskpack import EDGE, PER_ROW, RL_FIELDS, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core.backends import uses_triton
from maskpack.errors import LayoutError
from maskpack.packed.cuda import decode as staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not uses_triton(torch.device("cuda")), reason="needs a CUDA device and Triton"
    ),
]
LAYOUTS = ("padded", "nested")
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def packed_of(variant: str = "reference", rows: int = 32, prompt: int = 24, response: int = 1500) -> PackedBatch:
    return compress(workload(variant, rows, prompt, response), pad_token_id=PAD)


def bits(x: torch.Tensor) -> bytes:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_same(seen: TensorDict, want: TensorDict) -> None:
    assert list(seen.keys(True, True)) == list(want.keys(True, True))
    assert seen.batch_size == want.batch_size
    for key in want.keys(True, True):
        x, y = seen.get(key), want.get(key)
        if not isinstance(y, torch.Tensor):
            continue
        assert (x.dtype, x.is_nested, x.device.type) == (y.dtype, y.is_nested, "cuda"), key
        if y.is_nested:
            assert x.offsets().tolist() == y.offsets().tolist(), key
            assert (x._get_min_seqlen(), x._get_max_seqlen()) == (y._get_min_seqlen(), y._get_max_seqlen()), key
            x, y = x.values(), y.values()
        assert x.shape == y.shape, key
        assert bits(x) == bits(y), key


def assert_decodes(packed: PackedBatch, *names: Any) -> None:
    """Every tensor by the kernel, bit for bit as on the host."""
    for layout in LAYOUTS:
        made = staging.decode_on_device(packed, packed.schema.forms, layout == "nested", "cuda")
        assert set(made.entries) == set(packed.numbers)
        seen = decompress(packed, *names, format=layout, device="cuda")
        assert_same(seen, decompress(packed, *names, format=layout, device="cpu"))


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads(variant: str) -> None:
    packed = packed_of(variant)
    assert_decodes(packed)
    assert_decodes(packed[3:9])
    assert_decodes(packed[[31, 0, 0, 7]])
    assert_decodes(PackedBatch.cat([packed[20:], packed[:5]]))
    assert_decodes(packed[:0])
    assert_decodes(pickle.loads(pickle.dumps(packed)))
    assert_decodes(packed.pin_memory())
    assert_decodes(packed.pin_memory()[3:9])
    assert_decodes(packed, "input_ids", "returns")
    nested = decompress(packed, format="nested", device="cuda")
    assert_same(unnest(nested), decompress(packed, device="cpu"))
    assert_same(unnest(nested[4:9]), decompress(packed[4:9], device="cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged_dim", [1, 2])
def test_scattered_masks_and_every_pad(dtype: torch.dtype, ragged_dim: int) -> None:
    rng = np.random.default_rng(0)
    rows, width = 17, 3000
    density = rng.choice([0.0, 0.01, 0.5, 0.99, 1.0], rows)
    mask = torch.from_numpy(rng.random((rows, width)) < density[:, None])
    kinds = {
        "any": rng.integers(0, 250, (rows, width, 3)),
        "same": np.broadcast_to(rng.integers(0, 9, (rows, 1, 1)), (rows, width, 3)),
        "runs": np.repeat(rng.integers(0, 9, (rows, width // 50, 3)), 50, 1),
        "ramp": np.broadcast_to(np.arange(width)[None, :, None] % 250, (rows, width, 3)),
        "few": np.where(rng.random((rows, width, 3)) < 0.01, 7, 0),
        "two": rng.choice([3, 200], (rows, width, 3)),
    }
    fields: dict[str, torch.Tensor] = {"attention_mask": mask}
    registry = RL_FIELDS
    for name, values in kinds.items():
        x = torch.from_numpy(np.array(values)).to(dtype)
        row_pads = torch.from_numpy(rng.integers(0, 99, (rows, 1, 1))).to(dtype)
        on = mask[:, :, None]
        pads = {"zero": (0, torch.zeros((), dtype=dtype)), "row": (PER_ROW, row_pads), "edge": (EDGE, None)}
        for kind, (pad, held) in pads.items():
            if held is None:
                seen = (mask.cumsum(1) - 1).clamp(min=0)
                place = torch.argsort(~mask, dim=1, stable=True).gather(1, seen)
                field = x.gather(1, place[:, :, None].expand_as(x)) * mask.any(1)[:, None, None].to(dtype)
            else:
                field = torch.where(on, x, held)
            fields[f"{name}_{kind}"] = field.movedim(1, ragged_dim).contiguous()
            registry = registry | {f"{name}_{kind}": MaskNestingSpec("sequence", pad, ragged_dim=ragged_dim)}
    packed = compress(TensorDict(fields, batch_size=[rows]), registry=registry)
    assert all(form.kind == "padded" for form in packed.schema.forms), [form.path for form in packed.schema.forms]
    assert_decodes(packed)
    assert_decodes(packed[::-1])


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_launch_few_copies_no_sync(layout: Any, pinned: bool) -> None:
    packed = packed_of()
    packed = packed.pin_memory() if pinned else packed
    decompress(packed, format=layout, device="cuda")
    with no_sync():
        decompress(packed, format=layout, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decompress(packed, format=layout, device="cuda")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [name for name in names if "Memcpy HtoD" in name]
    kernels = [name for name in names if "Memcpy" not in name and "Memset" not in name]
    assert len(copies) == 2, names
    assert all("Pinned" in name for name in copies)
    assert len(kernels) == 1, names
    assert "decode" in kernels[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_body_that_lies_there_is_not_copied(layout: Any) -> None:
    packed, buffers = packed_of(), list[pickle.PickleBuffer]()
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    there = torch.frombuffer(bytearray(buffers[0]), dtype=torch.uint8).cuda()
    received = pickle.loads(stream, buffers=[staging.mirrored(there)])
    assert_same(decompress(received, format=layout, device="cuda"), decompress(packed, format=layout, device="cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decompress(received, format=layout, device="cuda")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if "Memcpy HtoD" in name]) == 1, names


@pytest.mark.parametrize("pinned", [False, True])
def test_many_in_flight_on_two_streams(pinned: bool) -> None:
    """Staging memory goes round while copies are under way."""
    batches = [packed_of("reference", 16, 24, 500 + 40 * n) for n in range(6)]
    want = [decompress(batch, device="cpu") for batch in batches]
    batches = [batch.pin_memory() for batch in batches] if pinned else batches
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    seen: list[list[TensorDict]] = []
    for turn in range(4):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                block.fill_(turn + n)  # the copies behind it wait
                seen.append([decompress(batch, format=LAYOUTS[n], device="cuda") for batch in batches])
    del batches
    scratch = [torch.full((1 << 20,), 0xEE, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert len(scratch) == 4
    for group in seen:
        for batch, expected in zip(group, want, strict=True):
            if any(isinstance(x, torch.Tensor) and x.is_nested for x in batch.values()):
                batch = unnest(batch)
            assert_same(batch, expected)


def test_no_capture() -> None:
    packed = packed_of()
    decompress(packed, device="cuda")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(LayoutError, match=r"decompress: a CUDA graph is being captured"):
            decompress(packed, device="cuda")
    assert_decodes(packed)


def test_kinds_of_batches_take_turns() -> None:
    """Recipes are made once for each kind, and larger batches of a kind need more room for tables."""
    for rows in (3, 40, 7, 1):
        for variant in ("reference", "negative-zeros", "m-rope-edge"):
            assert_decodes(packed_of(variant, rows, 24, 100 * rows))


def test_no_memory_is_shared() -> None:
    packed = packed_of()
    nested = decompress(packed, format="nested", device="cuda")
    fields = [nested[form.path].values() for form in packed.schema.forms]
    assert len({x.untyped_storage().data_ptr() for x in fields}) == len(fields)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in fields)
    for axis in ("prompt", "response", "sequence"):
        own = [nested[form.path].offsets() for form in packed.schema.forms if form.layout == axis]
        assert all(offsets is own[0] for offsets in own)
        assert own[0].untyped_storage().nbytes() < 1 << 16
    before = nested["returns"].values().clone()
    nested["advantages"].values().fill_(5)
    assert torch.equal(nested["returns"].values(), before)
    assert_same(decompress(packed, device="cuda"), decompress(packed, device="cpu"))


def test_launches_share_one_compiled_kernel() -> None:
    from maskpack.packed.cuda import kernel as _decode_kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in _decode_kernel._decode.device_caches.values())

    assert_decodes(packed_of("reference", 5, 3, 17))
    count = compiled()
    assert_decodes(packed_of("multi-turn", 16, 16, 64))
    assert_decodes(packed_of("m-rope", 1, 8, 1).pin_memory())
    assert_decodes(packed_of("routed-experts", 3, 5, 33)[1:])
    assert compiled() == count


def test_the_last_words_of_the_longest_rows_are_written() -> None:
    """Places behind them pass int32."""
    from maskpack.packed.cuda import job_table as jobs
    from maskpack.packed.cuda import kernel as _decode_kernel

    words = (1 << 31) - jobs.SPAN // 2
    out = torch.full((words + jobs.SPAN,), 77, dtype=torch.uint8, device="cuda")
    spans = -(-words // jobs.SPAN)
    target = jobs.JobTarget(spans, jobs.SPAN, out.data_ptr(), 1, 1, 1, 0, 1, -1, words)
    job = [0, *target, *jobs.JobSource(jobs.LINEAR, begin_unit=0, data=0, data_size=1, single=1)]
    body = torch.full((1,), 9, dtype=torch.uint8, device="cuda")
    _decode_kernel.launch(body, torch.tensor(job, device="cuda"), 0, 1, spans)
    assert int((out[:words] != 9).sum()) == 0
    assert int((out[words:] != 77).sum()) == 0


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_of()
    monkeypatch.setenv("MASKPACK_TRITON", "0")
    for layout in LAYOUTS:
        assert not staging.decode_on_device(packed, packed.schema.forms, layout == "nested", "cuda").entries
        seen = decompress(packed, format=layout, device="cuda")
        assert_same(seen, decompress(packed, format=layout, device="cpu"))


def test_fields_go_home_to_their_devices() -> None:
    batch = workload(rows=8, prompt=8, response=24)
    batch["advantages"] = batch["advantages"].cuda()
    batch["returns"] = batch["returns"].cuda()
    packed = compress(batch, pad_token_id=PAD)
    for layout in LAYOUTS:
        seen = decompress(packed, format=layout)
        assert seen["advantages"].is_cuda
        assert seen["returns"].is_cuda
        assert not seen["responses"].is_cuda
    back = decompress(packed)
    for name in batch.keys():  # noqa: SIM118
        assert bits(back[name]) == bits(batch[name]), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    packed = packed_of()
    seen = decompress(packed, device="cuda:1")
    assert seen["input_ids"].device == torch.device("cuda:1")
    assert_same(seen, decompress(packed, device="cpu"))
