"""packed_log_probs on CUDA: kernels and plain torch against float64, peak memory, no synchronisation, no bad read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import count_syncs
from output_layers import plain
from samples import in_chunks
from torch import Tensor

from maskpack.ops import log_probs as module
from maskpack.ops.log_probs import packed_log_probs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = [(0, 8, 5), (1, 1, 1), (37, 65, 515), (129, 64, 4096), (1000, 128, 32001), (3, 256, 131072)]


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, generator=source, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, width, generator=source, device="cuda") * width**-0.5).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=source, device="cuda")


def results(call: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor, *more: Any) -> list[Tensor]:
    """Both outputs, and the gradients of a sum weighted by what every dtype can hold."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    log_probs, entropy = call(hidden, weight, *more)
    slopes = torch.arange(hidden.shape[0], device="cuda") % 5 - 1.5
    loss = (log_probs.double() * slopes).sum() - (entropy.double() * slopes * 0.25).sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def rms(seen: Tensor, truth: Tensor) -> float:
    return float((seen.double() - truth).square().mean().sqrt()) if truth.numel() else 0.0


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_half_precision_is_closer_to_the_truth_than_plain_torch(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], temperature: float, dtype: torch.dtype, backend: Any
) -> None:
    monkeypatch.setattr(module, "_RANGE_BYTES", 1 << 22)  # several ranges of most sizes
    given = inputs(*size, dtype)

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with in_chunks(100):
            return packed_log_probs(*tensors, temperature=temperature, entropy=True, backend=backend)

    seen = results(ours, *given)
    theirs = results(plain, *given, temperature)
    truth = results(plain, given[0].double(), given[1].double(), given[2], temperature)
    assert [x.dtype for x in seen] == [torch.float32, torch.float32, dtype, dtype]
    for number, (x, y, z) in enumerate(zip(seen, theirs, truth, strict=True)):
        assert x.shape == z.shape
        assert rms(x, z) <= rms(y, z) / (10 if number < 2 else 1) + 1e-6


def test_strides_chunks_and_one_output_change_nothing() -> None:
    hidden, weight, ids = inputs(300, 128, 1001, torch.bfloat16)
    want, want_entropy = packed_log_probs(hidden, weight, ids, entropy=True)
    assert torch.allclose(packed_log_probs(hidden, weight, ids), want, rtol=1e-6, atol=1e-6)
    wide = torch.stack([hidden, -hidden], 2)[:, :, 0]
    turned = weight.T.contiguous().T
    for chunk in (1, 7, 300, 999):
        with in_chunks(chunk):
            seen, entropy = packed_log_probs(wide, turned, ids.int(), entropy=True)
        assert torch.allclose(seen, want, rtol=1e-5, atol=1e-5)
        assert torch.allclose(entropy, want_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs a fused product"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "offset"), [(1024, 0), (1024, 1), (1020, 0), (511, 0), (250, 0), (100, 0), (100, 1)])
def test_a_token_has_the_same_bits_alone_and_in_batches(width: int, offset: int, dtype: torch.dtype) -> None:
    """Whatever the width, and where the weight begins."""
    hidden, weight, ids = inputs(3000, width, 32_001, dtype)
    memory = torch.empty(weight.numel() + offset, dtype=dtype, device="cuda")
    moved = memory[offset:].view_as(weight).copy_(weight)
    want = packed_log_probs(hidden, moved, ids)
    assert torch.equal(packed_log_probs(hidden, weight, ids), want)
    source = torch.Generator("cuda").manual_seed(0)
    for count in (1, 2, 3, 17, 64, 127, 128, 129, 500, 1000, 2047, 2048, 2049):
        some = torch.randperm(3000, generator=source, device="cuda")[:count]
        assert torch.equal(packed_log_probs(hidden[some], moved, ids[some]), want[some]), count


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_host_never_waits(backend: Any) -> None:
    hidden, weight, ids = inputs(777, 64, 5003, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()

    def work() -> None:
        with in_chunks(128):
            log_probs, entropy = packed_log_probs(hidden, weight, ids, entropy=True, backend=backend)
        torch.autograd.grad(log_probs.mean() + entropy.mean(), (hidden, weight))

    work()  # compiles
    with count_syncs() as seen:
        work()
    assert not seen


@pytest.mark.parametrize("keep", [0, 1 << 27])
@pytest.mark.parametrize("tokens", [1500, 16_000])
def test_peak_memory_is_one_buffer_and_the_results(tokens: int, keep: int) -> None:
    """All logits would be 0.4 and 3.9 GiB in float32."""
    hidden, weight, ids = inputs(tokens, 1024, 65_536, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    packed_log_probs(hidden, weight, ids, entropy=True)[0].sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs = packed_log_probs(hidden, weight, ids, keep=keep)
    assert torch.cuda.max_memory_allocated() - before <= 4 * module._PIECE_ROWS * module._PIECE_COLUMNS + keep + (
        16 << 20
    )
    torch.cuda.reset_peak_memory_stats()
    log_probs.sum().backward()
    results = weight.nbytes + 2 * hidden.nbytes  # the gradient of hidden in float32, before it is rounded
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= module._RANGE_BYTES + results + keep + (8 << 20)
    assert peak >= results


@pytest.mark.parametrize("size", [(4000, 256, 32_001), (2500, 2560, 151_936)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_has_the_same_bits_in_all_calls(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Alone, at any place, among others, kept or not, with gradients or without."""
    hidden, weight, ids = inputs(*size, dtype)
    tokens = size[0]
    with torch.no_grad():
        want = packed_log_probs(hidden, weight, ids, entropy=True)
    for count in (1, 5, 128, 700, 2048, tokens):
        for begin in {0, (tokens - count) // 2, tokens - count}:
            some = slice(begin, begin + count)
            for keep in (None, 0, 1 << 28):
                states = hidden[some].detach().requires_grad_(keep is not None)
                seen = packed_log_probs(states, weight, ids[some], entropy=True, keep=keep)
                assert all(torch.equal(x.detach(), y[some]) for x, y in zip(seen, want, strict=True)), (some, keep)


def test_all_are_kept_in_the_memory_of_their_gradient() -> None:
    """Twice, of which the second pass computes logits again, and next to nothing but results and the kept bytes."""
    hidden, weight, ids = inputs(9000, 1024, 65_536, torch.bfloat16)
    slopes = torch.randn(9000, device="cuda")
    kept = 9000 * 65_536 * 2
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    want = torch.autograd.grad(packed_log_probs(*leaves, ids, keep=0), leaves, slopes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs = packed_log_probs(*leaves, ids, keep=kept)
    first = torch.autograd.grad(log_probs, leaves, slopes, retain_graph=True)
    assert torch.cuda.max_memory_allocated() - before <= kept + hidden.nbytes + weight.nbytes + (48 << 20)
    second = torch.autograd.grad(log_probs, leaves, slopes)
    for x, y, z in zip(first, second, want, strict=True):
        assert torch.equal(y, z)
        assert float((x.double() - z.double()).norm() / z.double().norm()) < 3e-3


def test_several_streams_do_not_meet() -> None:
    hidden, weight, ids = inputs(500, 64, 9001, torch.bfloat16)
    want = packed_log_probs(hidden, weight, ids)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    seen = []
    for stream in streams:
        with torch.cuda.stream(stream), in_chunks(128):
            seen.append(packed_log_probs(hidden, weight, ids))
    torch.cuda.synchronize()
    for x in seen:
        assert torch.allclose(x, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_may_lie_on_another_than_the_current_device() -> None:
    both = []
    for device in ("cuda:0", "cuda:1"):
        hidden, weight, ids = (x.to(device) for x in inputs(50, 32, 300, torch.bfloat16))
        hidden.requires_grad_()
        log_probs = packed_log_probs(hidden, weight, ids)
        both.append([log_probs.detach(), *torch.autograd.grad(log_probs.sum(), hidden)])
    for x, y in zip(*both, strict=True):
        assert torch.allclose(x.cpu(), y.cpu(), rtol=1e-2, atol=1e-2)
