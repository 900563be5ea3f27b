"""Padded, nested and packed batches on CUDA: the same bits as on the CPU, on the batch's device, with counted syncs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from samples import PAD, VARIANTS, workload
from strategies import Case, batches
from tensordict import TensorDict

from maskpack import (
    MaskNestingSpec,
    RowLayout,
    VerifyFirst,
    compress,
    decompress,
    extract_response,
    nest_batch_by_mask,
    ops,
    select_and_pad_to_response,
)
from maskpack import (
    unnest_batch_by_mask as unnest,
)
from maskpack.core.pads import EDGE
from maskpack.errors import LayoutError
from maskpack.nesting.schema import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@contextmanager
def count_syncs() -> Iterator[list[str]]:
    seen: list[str] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen.extend(str(item.message) for item in caught if "called a synchronizing" in str(item.message))


def bits(x: torch.Tensor) -> list[Any]:
    x = x.values() if x.is_nested else x
    # contiguous tensors of at most one element may have any strides
    return x.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def assert_same(a: TensorDict, b: TensorDict) -> None:
    assert list(a.keys(True, True)) == list(b.keys(True, True))
    assert a.batch_size == b.batch_size
    for key in a.keys(True, True):
        x, y = a.get(key), b.get(key)
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.device, x.is_nested) == (y.dtype, y.device, y.is_nested), key
            assert x.is_nested or x.shape == y.shape, key
            assert bits(x) == bits(y), key


def cuda_batch(variant: str) -> TensorDict:
    return workload(variant, 32).to("cuda")


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trips_on_the_device(variant: str) -> None:
    batch = cuda_batch(variant)
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    assert_same(unnest(nested), batch)
    assert_same(unnest(nested[3:9]), batch[3:9])
    packed = compress(batch, pad_token_id=PAD)
    assert_same(decompress(packed), batch)
    assert_same(unnest(decompress(packed, format="nested")), batch)
    assert_same(decompress(compress(nested, pad_token_id=PAD)), batch)
    on_host = decompress(packed, device="cpu")
    assert_same(on_host, batch.to("cpu"))
    assert_same(decompress(compress(on_host, pad_token_id=PAD), device="cuda"), batch)
    assert_same(unnest(nest_batch_by_mask(on_host, pad_token_id=PAD).to("cuda")), batch)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (7, 33), (65, 257)])
def test_layouts_equal_those_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype, density: float) -> None:
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < density).to(dtype)
    layout = RowLayout.from_mask(mask.cuda())
    assert layout.device.type == "cuda"
    assert layout == RowLayout.from_mask(mask)
    assert torch.equal(layout.to_mask().cpu(), mask != 0)
    x = torch.rand(*shape, 2, device="cuda")
    packed = ops.pack(x, layout)
    assert torch.equal(packed, x[layout.to_mask()])
    for pad in (0.0, -1.0, EDGE):
        want = ops.unpack(packed.cpu(), layout.to("cpu"), pad)
        assert torch.equal(ops.unpack(packed, layout, pad).cpu(), want)


def test_a_mask_of_one_run_a_row_costs_one_sync() -> None:
    mask = workload(rows=32)["attention_mask"].cuda()
    with count_syncs() as seen:
        layout = RowLayout.from_mask(mask)
        assert layout.indices.is_cuda
        assert layout.cu_seqlens.is_cuda
    assert len(seen) == 1, seen


def test_a_mask_of_many_runs_costs_one_sync() -> None:
    mask = torch.rand(32, 96, device="cuda") < 0.5
    with count_syncs() as seen:
        layout = RowLayout.from_mask(mask)
        assert layout.indices.is_cuda
    assert len(seen) == 1, seen


def test_pack_and_unpack_do_not_sync() -> None:
    layout = RowLayout.from_mask(torch.rand(32, 96, device="cuda") < 0.5)
    x = torch.rand(32, 96, 3, device="cuda")
    with count_syncs() as seen:
        ops.unpack(ops.pack(x, layout), layout, 7.0)
    assert not seen, seen


def test_syncs_of_the_batch_functions() -> None:
    batch = cuda_batch("reference")
    nest_batch_by_mask(batch, pad_token_id=PAD)
    with count_syncs() as nesting:
        nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    with count_syncs() as restoring:
        unnest(nested)
    assert len(nesting) == 2
    assert len(restoring) == 1


def test_trusted_pads_cost_no_sync() -> None:
    batch, first = cuda_batch("negative-zeros"), VerifyFirst()
    want = nest_batch_by_mask(batch, pad_token_id=PAD)
    nest_batch_by_mask(batch, pad_token_id=PAD, verify=first)
    for verify in (first, "never"):
        with count_syncs() as seen:
            nested = nest_batch_by_mask(batch, pad_token_id=PAD, verify=verify)
        assert len(seen) == 1, seen  # for the mask
        assert_same(nested.exclude(LAYOUTS), want.exclude(LAYOUTS))
    assert_same(unnest(nest_batch_by_mask(batch, pad_token_id=PAD, verify=first)), batch)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@given(batches())
def test_any_batch_nests_as_on_the_host(case: Case) -> None:
    want = nest_batch_by_mask(case.batch, **case.options)
    seen = nest_batch_by_mask(case.batch.to("cuda"), **case.options)
    assert_same(seen.exclude(LAYOUTS).cpu(), want.exclude(LAYOUTS))
    assert_same(unnest(seen).cpu(), unnest(want))
    packed = compress(case.batch.to("cuda"), **case.options)
    assert_same(decompress(packed, device="cpu"), unnest(want))


@pytest.mark.parametrize("place", ["x", "free", "m"])
def test_bools_of_other_bytes_are_refused_with_the_pads(place: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], device="cuda")
    registry = {name: MaskNestingSpec("m") for name in ("m", "x")}
    batch = TensorDict({"m": mask.bool(), "x": mask.bool(), "free": mask.bool(), "y": mask}, batch_size=[2])
    for call in (compress, nest_batch_by_mask):
        call(batch, registry=registry, ignore_dense_fields=["free", "y"])
    with count_syncs() as before:
        nest_batch_by_mask(batch, registry, ignore_dense_fields=["free", "y"])
    batch[place] = torch.tensor([[1, 2, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8, device="cuda").view(torch.bool)
    for call in (compress, nest_batch_by_mask):
        with pytest.raises(LayoutError, match=rf'{call.__name__}: field "{place}" is torch\.bool with bytes other'):
            call(batch, registry=registry, ignore_dense_fields=["free", "y"])
    with pytest.raises(LayoutError, match=rf'compress: field "{place}"'):
        compress(batch, registry=registry, verify="never", ignore_dense_fields=["free", "y"])
    assert len(before) == 2  # one for the mask, one for all checks


def test_the_response_axis_on_the_device() -> None:
    batch = cuda_batch("reference")
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    fields = select_and_pad_to_response(nested[4:20], "responses", "advantages")
    assert torch.equal(fields["responses"], batch["responses"][4:20])
    assert torch.equal(fields["advantages"], batch["advantages"][4:20])
    outputs = torch.rand(*batch["input_ids"].shape, device="cuda", requires_grad=True)
    scored = extract_response(nested, outputs)
    mask = batch["attention_mask"][:, 24:].bool()
    assert torch.equal(scored, torch.where(mask, outputs[:, 23:-1], torch.zeros((), device="cuda")))
    scored.sum().backward()
    assert outputs.grad is not None
    assert int(outputs.grad.sum()) == int(mask.sum())


def test_gradients_flow_through_nested_fields() -> None:
    batch = cuda_batch("reference")
    batch["values"] = (torch.rand(32, 72, device="cuda") * batch["attention_mask"][:, 24:]).requires_grad_()
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    nested["values"].values().sum().backward()
    assert torch.equal(batch["values"].grad, batch["attention_mask"][:, 24:].float())
