"""ops.packed_log_probs against naive loops over rows and tokens, and its gradients against autograd of the plain
program in float64. Triton kernels run on a GPU, or interpreted on the host."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import work_vocab
from hypothesis import given
from hypothesis import strategies as st
from kernels import kernel_marks
from output_layers import BACKENDS, DEVICE, TOLERANCE, kept_tokens, naive, plain, reduced, rounding_product
from samples import in_chunks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from work_vocab import case

from maskpack import MaskpackError
from maskpack.errors import LayoutError
from maskpack.ops import Logits
from maskpack.ops import log_probs as module
from maskpack.ops.log_probs import Reduction, Slopes, packed_log_probs
from maskpack.ops.logits import Curve
from maskpack.ops.split_head import Parts, combined

SIZES = [(0, 3, 5), (1, 1, 1), (1, 5, 1), (7, 3, 11), (13, 9, 257), (5, 1, 700)]


def inputs(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64, *, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=source).to(device, dtype)
    weight = torch.randn(vocabulary, width, generator=source).to(device, dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=source).to(device)


def slopes_of(tokens: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(7)
    first, second = torch.randn(2, tokens, generator=source, dtype=torch.float64)
    return first, second


def gradients(
    call: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor, ids: Tensor, use: str, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Of a weighted sum of the outputs that `use` names, L(og-probs) and E(ntropy)."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    outputs = call(hidden, weight, ids, *arguments)
    slopes = [slope.to(hidden.device) for slope in slopes_of(ids.numel())]
    chosen = [(x.double() * slope).sum() for x, slope, name in zip(outputs, slopes, "LE", strict=True) if name in use]
    got = torch.autograd.grad(torch.stack(chosen).sum(), (hidden, weight))
    return got[0], got[1]


def ours(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    backend: Any = "auto",
    keep: int | None = None,
) -> Any:
    return packed_log_probs(hidden, weight, ids, temperature=temperature, entropy=True, backend=backend, keep=keep)


def error(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen.cpu().double() - truth.cpu()).abs().max()) if truth.numel() else 0.0


PLAIN = Curve(1.0, None)


# -------------------------------------------------------------------- values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_values_are_those_of_the_loops(size: tuple[int, int, int], dtype: torch.dtype, backend: Any) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("kernels compute in float32")
    hidden, weight, ids = inputs(*size, dtype, device=DEVICE)
    log_probs, entropy = packed_log_probs(hidden, weight, ids, entropy=True, temperature=0.7, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for seen, truth in zip((log_probs, entropy), naive(hidden, weight, ids, 0.7), strict=True):
        assert (seen.dtype, seen.shape, seen.device) == (wide, ids.shape, hidden.device)
        assert seen.tolist() == pytest.approx(truth, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    alone = packed_log_probs(hidden, weight, ids, temperature=0.7, backend=backend)
    assert torch.allclose(alone, log_probs, rtol=1e-6, atol=1e-6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float, int | None]:
    tokens, width, vocabulary = draw(st.integers(0, 9)), draw(st.integers(0, 5)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    stride, stretch = draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 1.0, 30.0]))
    hidden, weight, ids = inputs(tokens, width * stride, vocabulary * stride, dtype, seed=draw(st.integers(0, 99)))
    weight = weight.T.contiguous().T if draw(st.booleans()) else weight
    hidden, weight = hidden[:, ::stride], stretch * weight[::stride, ::stride]
    ids = (ids % vocabulary).to(draw(st.sampled_from([torch.int32, torch.int64])))
    return hidden, weight, ids, draw(st.sampled_from([0.1, 1.0, 3])), draw(st.sampled_from([None, 1, 2, 50]))


@given(problems())
def test_any_shape_stride_temperature_and_chunk(problem: tuple[Tensor, Tensor, Tensor, float, int | None]) -> None:
    hidden, weight, ids, temperature, chunk = problem
    before = [x.clone() for x in (hidden, weight, ids)]
    with in_chunks(chunk):
        seen = packed_log_probs(hidden, weight, ids, temperature=temperature, entropy=True)
    for values, truth in zip(seen, naive(hidden, weight, ids, temperature), strict=True):
        assert values.tolist() == pytest.approx(truth, rel=1e-4, abs=1e-4)
    assert all(torch.equal(x, y) for x, y in zip((hidden, weight, ids), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 7, 300, 1000])
def test_chunks_and_slices_change_nothing(narrow: None, chunk: int, dtype: torch.dtype) -> None:
    hidden, weight, ids = inputs(300, 5, 701, dtype)
    truth = plain(hidden.double(), weight.double(), ids)
    with in_chunks(chunk):
        outs = packed_log_probs(hidden, weight, ids, entropy=True)
    for seen, want in zip(outs, truth, strict=True):
        assert error(seen, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_keep_their_entropy(backend: Any) -> None:
    """The entropy is the small difference of large numbers, unless logits are taken from the largest."""
    logits = [[9000.0, 9000.0, 8990.0], [-9000.0, -9001.0, -9500.0], [0.0, -200.0, 40000.0]]
    hidden = torch.eye(3, device=DEVICE)
    weight = torch.tensor(logits, device=DEVICE).T.contiguous()
    ids = torch.tensor([2, 1, 2], device=DEVICE)
    seen = packed_log_probs(hidden, weight, ids, entropy=True, backend=backend)
    for values, truth in zip(seen, naive(hidden, weight, ids), strict=True):
        assert values.tolist() == pytest.approx(truth, rel=1e-6, abs=1e-7)


def test_nan_and_infinity_come_through() -> None:
    hidden, weight, ids = inputs(4, 3, 6, torch.float32)
    hidden[1, 0], hidden[2, 1] = math.nan, math.inf
    seen = packed_log_probs(hidden, weight, ids, entropy=True)
    for values in seen:
        assert values.isnan().tolist() == [False, True, True, False]


# -------------------------------------------------------------------- gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", ["L", "E", "LE"])
@pytest.mark.parametrize("size", [*SIZES, (9, 4, 1100)])
def test_gradients_are_those_of_autograd(narrow: None, size: tuple[int, int, int], use: str, backend: Any) -> None:
    hidden, weight, ids = inputs(*size, torch.float32, device=DEVICE)
    truth = gradients(plain, hidden.double(), weight.double(), ids, use, 0.7)
    seen = gradients(ours, hidden, weight, ids, use, 0.7, backend)
    for got, want in zip(seen, truth, strict=True):
        assert got.dtype == torch.float32
        assert error(got, want) <= 1e-5 * (1 + float(want.abs().amax() if want.numel() else 0))


def products(call: Callable[[], object]) -> int:
    with Allocations() as seen:
        call()
    return sum(name.startswith(("aten.mm", "aten.addmm")) for name in seen.names)


@pytest.mark.parametrize(("keep", "count"), [(0, 3), (1 << 30, 2)])
def test_kept_tokens_save_a_product(keep: int, count: int) -> None:
    hidden, weight, ids = inputs(6, 3, 9, torch.bfloat16)
    for needed in ((True, False), (False, True), (True, True)):
        leaves = (x.detach().requires_grad_(wanted) for x, wanted in zip((hidden, weight), needed, strict=True))
        loss = packed_log_probs(*leaves, ids, keep=keep).sum()
        assert products(loss.backward) == count - (needed != (True, True))


def test_the_budget_says_how_many_tokens_are_kept() -> None:
    """A token takes 2 * 512 bytes, as the row stride is a multiple of 256."""
    hidden, weight, ids = inputs(300, 200, 300, torch.float16)
    hidden.requires_grad_()
    for keep, tokens in ((0, 0), (128 * 1024 - 1, 0), (299 * 1024, 0), (300 * 1024, 300)):
        assert kept_tokens(packed_log_probs(hidden, weight, ids, keep=keep)) == tokens
    assert kept_tokens(packed_log_probs(hidden[:117], weight, ids[:117])) == 117  # the bytes of the weight, [300, 200]
    assert kept_tokens(packed_log_probs(hidden, weight, ids)) == 0
    assert kept_tokens(packed_log_probs(hidden.float(), weight.float(), ids, keep=1 << 30)) == 0
    with torch.no_grad(), in_chunks(1), Allocations() as seen:
        packed_log_probs(hidden, weight, ids, keep=1 << 30)
    assert seen.largest < 300 * 300


def test_a_mean_and_strided_inputs_have_their_gradients() -> None:
    hidden, weight, ids = inputs(6, 8, 18)
    hidden, weight, ids = hidden[:, ::2], weight[::2, ::2], ids % 9
    first, second = ((x.detach().requires_grad_() for x in (hidden, weight)) for _ in range(2))
    seen, want = (*first,), (*second,)
    packed_log_probs(*seen, ids).mean().backward()
    plain(*want, ids)[0].mean().backward()
    for x, y in zip(seen, want, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert error(x.grad, y.grad) < 1e-12


def test_it_cannot_be_differentiated_twice() -> None:
    """Not even where the gradient of the output is constant, as that of a sum."""
    hidden, weight, ids = inputs(3, 2, 4)
    loss = packed_log_probs(hidden.requires_grad_(), weight, ids).sum()
    with pytest.raises(MaskpackError, match=r"packed_log_probs: .* create_graph=True; it can be differentiated once"):
        torch.autograd.grad(loss, hidden, create_graph=True)


# -------------------------------------------------------------------- half precision


@pytest.fixture(
    params=["this device", pytest.param("gpu", marks=pytest.mark.skipif(DEVICE == "cuda", reason="is one"))]
)
def products_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of this device; and those of a GPU, of gradients in half precision."""
    if request.param == "gpu":
        monkeypatch.setattr(module, "_has_wide_products", lambda x: True)  # pyright: ignore[reportUnknownLambdaType]
        monkeypatch.setattr(module, "_product", rounding_product)


def rms(seen: Tensor, truth: Tensor) -> float:
    """Of the differences: the largest one of two gradients is often one and the same last rounding."""
    return float((seen.double() - truth).square().mean().sqrt())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sharpness", [1, 4])
def test_errors_are_no_larger_than_those_of_plain_torch(
    products_of: None, dtype: torch.dtype, temperature: float, sharpness: float, backend: Any
) -> None:
    if (DEVICE, backend, dtype) == ("cpu", "triton", torch.bfloat16) and module._product is rounding_product:
        pytest.skip("the interpreter cuts floats off where it stores bfloat16")
    hidden, weight, ids = inputs(37, 65, 515, dtype, device=DEVICE)
    weight = weight * (sharpness / 8)
    exact = hidden.double(), weight.double(), ids
    for seen, theirs, truth in zip(
        ours(hidden, weight, ids, temperature, backend),
        plain(hidden, weight, ids, temperature),
        plain(*exact, temperature),
        strict=True,
    ):
        assert error(seen, truth) <= error(theirs, truth) / 10
    for use in ("L", "E", "LE"):
        for seen, theirs, truth in zip(
            gradients(ours, hidden, weight, ids, use, temperature, backend),
            gradients(plain, hidden, weight, ids, use, temperature),
            gradients(plain, *exact, use, temperature),
            strict=True,
        ):
            assert seen.dtype == dtype
            assert rms(seen, truth) <= rms(theirs, truth)


def with_sure_tokens(
    logit: float, dtype: torch.dtype, *, tokens: int = 90, width: int = 64, vocabulary: int = 4096
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight and ids, where one token in three has this logit, the others random ones; and which."""
    hidden, weight, ids = inputs(tokens, width, vocabulary, torch.float32, device=DEVICE)
    weight *= width**-0.5
    sure = torch.arange(tokens, device=DEVICE) % 3 == 0
    own = weight[ids]
    missing = (logit - (hidden * own).sum(1)) / own.square().sum(1)
    hidden += (missing * sure).unsqueeze(1) * own
    return hidden.to(dtype), weight.to(dtype), ids, sure


def exact_gradients(hidden: Tensor, weight: Tensor, ids: Tensor, slopes: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Of the sum of slopes * log-probs, in float64, a token at a time; the gradient of the logits and both results are
    rounded to a dtype."""
    hidden, weight = hidden.double(), weight.double()
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for row, (state, token) in enumerate(zip(hidden, ids.tolist(), strict=True)):
        logits = weight @ state
        powers = (logits - logits.max()).exp()
        grad = -powers / powers.sum()
        powers[token] = 0.0
        grad[token] = powers.sum() / (powers.sum() + (logits[token] - logits.max()).exp())
        grad = (grad * slopes[row]).to(dtype).double()
        grad_hidden[row] = grad @ weight
        grad_weight += grad[:, None] * state
    return [grad_hidden.to(dtype), grad_weight.to(dtype)]


def relative(seen: Tensor, truth: Tensor) -> float:
    return float((seen.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("logit", [8, 12, 16])
def test_gradients_of_sure_tokens_are_rounded_and_no_more(
    products_of: None, logit: float, dtype: torch.dtype, backend: Any
) -> None:
    if (DEVICE, backend, dtype) == ("cpu", "triton", torch.bfloat16) and module._product is rounding_product:
        pytest.skip("the interpreter cuts floats off where it stores bfloat16")
    hidden, weight, ids, sure = with_sure_tokens(logit, dtype)
    slopes = slopes_of(ids.numel())[0].to(DEVICE)
    truth = exact_gradients(hidden, weight, ids, slopes, torch.float64)
    rounded = exact_gradients(hidden, weight, ids, slopes, dtype)
    seen = gradients(ours, hidden, weight, ids, "L", 1.0, backend)
    for got, best, want, rows in zip(seen * 2, rounded * 2, truth * 2, (sure, ..., ~sure, ...), strict=True):
        assert relative(got[rows], want[rows]) <= 1.05 * relative(best[rows], want[rows]) + 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [None, 8, 12, 16])
@pytest.mark.parametrize("kept", [128, 300])
def test_gradients_of_kept_tokens_are_near_those_that_are_rounded(
    narrow: None, products_of: None, kept: int, logit: float | None, dtype: torch.dtype, backend: Any
) -> None:
    """Sure tokens and others, kept and not, in three blocks: rounding log-probs adds less than the gradient's own."""
    if (DEVICE, backend) == ("cpu", "triton") and (dtype, logit, kept) != (torch.float16, 12, 128):
        pytest.skip("the interpreter is slow, and cuts floats off where it stores bfloat16")
    hidden, weight, ids, sure = with_sure_tokens(8 if logit is None else logit, dtype, tokens=300, vocabulary=1000)
    if logit is None:  # likely, but not given
        ids = (ids + 1) % 1000
    slopes = slopes_of(300)[0].to(DEVICE)
    truth = exact_gradients(hidden, weight, ids, slopes, torch.float64)
    rounded = exact_gradients(hidden, weight, ids, slopes, dtype)
    theirs = gradients(plain, hidden, weight, ids, "L")
    seen = gradients(ours, hidden, weight, ids, "L", 1.0, backend, kept * 2048)
    for got, best, other, want, rows in zip(
        seen * 2, rounded * 2, theirs * 2, truth * 2, (sure, ..., ~sure, ...), strict=True
    ):
        off, least = relative(got[rows], want[rows]), relative(best[rows], want[rows])
        assert off <= 1.25 * least + 1e-4
        assert off <= max(1.05 * least, 1.02 * relative(other[rows], want[rows]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", ["L", "E", "LE"])
def test_kept_tokens_have_the_gradients_of_all_outputs(narrow: None, use: str, backend: Any) -> None:
    """Some probabilities are 0, some 1."""
    hidden, weight, ids = inputs(150, 8, 300, torch.float16, device=DEVICE)
    weight[7] = 1e3
    truth = gradients(plain, hidden.double(), weight.double(), ids, use, 0.7)
    for got, want in zip(gradients(ours, hidden, weight, ids, use, 0.7, backend, 1 << 30), truth, strict=True):
        assert got.isfinite().all()
        assert relative(got, want) < 2e-3


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
def test_products_that_are_fused(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Of half precision by the weight alone; forward, and again backward if nothing is kept."""
    fused = importlib.import_module("maskpack.ops.log_probs_fused_triton")
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    ran: list[str] = []
    for name in ("reduce_rows", "differentiate"):
        own = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, own=own, name=name: (ran.append(name), own(*given)))

    def runs(dtype: torch.dtype, width: int = 16, **more: Any) -> list[str]:
        hidden, weight, ids = inputs(5, width, 300, dtype, device=DEVICE)
        ran.clear()
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        packed_log_probs(*leaves, ids, backend=backend, **more).sum().backward()
        return [*ran]

    half = torch.float16
    assert runs(half, keep=0) == ["reduce_rows", "differentiate"]
    assert runs(half, keep=0, logits=Logits(softcap=3.0, scale=0.5)) == ["reduce_rows", "differentiate"]
    assert runs(half, keep=1 << 30) == ["reduce_rows"]
    assert runs(half, 12, keep=0) == runs(half, 1, keep=0) == ["reduce_rows", "differentiate"]
    assert runs(torch.float32) == []
    assert runs(half, logits=Logits(torch.zeros(300, device=DEVICE))) == []
    mask = torch.arange(5, device=DEVICE), torch.arange(6, device=DEVICE)
    assert runs(half, sampling_mask=mask) == []


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
@pytest.mark.parametrize("width", [16, 12, 1])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [None, 17])
def test_bits_do_not_depend_on_addresses(width: int, offset: int, stride: int | None, backend: Any) -> None:
    """Rows lie at multiples of 16 bytes, or at other addresses."""

    def results_at(offset: int, stride: int) -> list[Tensor]:
        leaves = []
        for x in (hidden, weight):
            memory = torch.zeros(offset + len(x) * stride, dtype=x.dtype, device=DEVICE)
            leaves.append(memory[offset:].view(len(x), stride)[:, :width].copy_(x).requires_grad_())
        log_probs, entropy = packed_log_probs(*leaves, ids, entropy=True, keep=0, backend=backend)
        grads = torch.autograd.grad((log_probs - entropy).sum(), leaves)
        assert all(torch.equal(x, y) for x, y in zip(leaves, (hidden, weight), strict=True))
        return [log_probs, entropy, *grads]

    hidden, weight, ids = inputs(5, width, 300, torch.float16, device=DEVICE)
    seen, even = results_at(offset, stride or width), results_at(0, -(-width // 8) * 8)
    assert all(torch.equal(x, y) for x, y in zip(seen, even, strict=True))


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
@pytest.mark.parametrize("scale", [0.5, 2.0, 1e30])
@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_fused_products_of_a_slice_of_nothing_but_infinity(scale: float, keep: int, backend: Any) -> None:
    """The finite number that stands for its highest logit stays finite times a scale above 1."""
    hidden, weight, _ = inputs(3, 16, 600, torch.float16, device=DEVICE)
    hidden[:, 0], weight[:256, 0] = 1, -math.inf
    ids = torch.tensor([300, 10, 599], device=DEVICE)
    seen, entropy = packed_log_probs(
        hidden, weight, ids, logits=Logits(scale=scale), entropy=True, keep=keep, backend=backend
    )
    log_p = (scale * (hidden.double() @ weight.double().T)).log_softmax(1)
    truth = log_p.gather(1, ids[:, None])[:, 0]
    assert seen[1] == truth[1] == -math.inf
    torch.testing.assert_close(seen[[0, 2]].double(), truth[[0, 2]], rtol=2e-5, atol=2e-5)
    spread = -(log_p.exp() * log_p.where(log_p > -math.inf, 0)).sum(1)
    torch.testing.assert_close(entropy.double(), spread, rtol=2e-5, atol=2e-5)
    fused = importlib.import_module("maskpack.ops.log_probs_fused_triton")
    parts = Parts.of(3, 600, (True, False), torch.float32, torch.device(DEVICE), fused.TILE)
    fused.reduce_rows(hidden, weight, ids, Curve(scale, None), parts, None)
    assert parts.top.isfinite().all()
    assert not parts.total[0].any()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=kernel_marks)])
def test_the_largest_scale_computes_and_a_larger_one_raises(backend: Any) -> None:
    hidden = torch.zeros(2, 16, dtype=torch.float16, device=DEVICE)
    weight = torch.zeros(300, 16, dtype=torch.float16, device=DEVICE)
    hidden[:, 0], weight[:, 0] = 1, torch.linspace(-0.5, 0.5, 300)
    ids = torch.tensor([299, 0], device=DEVICE)
    seen, entropy = packed_log_probs(hidden, weight, ids, logits=Logits(scale=2e38), entropy=True, backend=backend)
    assert seen[0] == 0
    assert float(seen[1]) == pytest.approx(-2e38, rel=1e-6)
    assert entropy.tolist() == [0, 0]
    with pytest.raises(LayoutError, match=r"multiply logits by 2.1e\+38; expected 5e-39 to 2e\+38"):
        packed_log_probs(hidden, weight, ids, logits=Logits(scale=2.1e38), backend=backend)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
def test_fused_products_with_a_cap_are_differentiated(backend: Any) -> None:
    """In the range in which the cap bends, with every output, and of tokens that are likely themselves."""
    hidden, weight, _ = inputs(150, 16, 700, torch.float16, device=DEVICE)
    ids = (hidden @ weight.T).argmax(1)
    hidden.requires_grad_()
    layer, slopes = Logits(softcap=9.0, scale=0.7), slopes_of(150)[0].to(DEVICE)

    def gradients_of(log_p: Tensor, *seen: Tensor) -> Tensor:
        log_probs, entropy, sum_p2 = seen or (
            log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), log_p.exp().square().sum(1)
        )  # fmt: skip
        return ((log_probs - 0.5 * entropy + 9 * sum_p2).double() * slopes).sum()

    seen = packed_log_probs(
        hidden, weight.requires_grad_(), ids, logits=layer, temperature=0.8, statistics=True, backend=backend
    )
    got = torch.autograd.grad(gradients_of(hidden, *seen[:3]), (hidden, weight))
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = (9.0 * torch.tanh(0.7 * (leaves[0] @ leaves[1].T) / 9.0) / 0.8).log_softmax(1)
    assert float(log_p.max(1)[0].exp().max()) > 0.2
    for x, y in zip(got, torch.autograd.grad(gradients_of(log_p), leaves), strict=True):
        assert relative(x, y) < 2e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_a_kept_graph_can_be_walked_twice(narrow: None, products_of: None, keep: int, backend: Any) -> None:
    """Also where the gradient of the logits has replaced what was kept."""
    hidden, weight, ids = inputs(140, 8, 300, torch.float16, device=DEVICE)
    truth = gradients(plain, hidden.double(), weight.double(), ids, "L")
    slopes = slopes_of(140)[0].to(DEVICE)
    log_probs = packed_log_probs(hidden.requires_grad_(), weight.requires_grad_(), ids, keep=keep, backend=backend)
    loss = (log_probs.double() * slopes).sum()
    walks = [torch.autograd.grad(loss * factor, (hidden, weight), retain_graph=True) for factor in (1, 2, 3)]
    for factor, seen in enumerate(walks, 1):
        for got, want in zip(seen, truth, strict=True):
            assert relative(got / factor, want) < 2e-3


def product_of_any_place(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1].astype(dtype) * b[k].astype(dtype)
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("thin", [False, True])
def test_a_token_has_the_same_bits_in_all_calls(
    narrow: None, dtype: torch.dtype, thin: bool, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, at any place, among others, kept or not, with gradients or without.

    An interpreted `tl.dot` is NumPy's product, and on some processors the bits of a row of BLAS depend on its place in
    the block, as those of a GPU's `dot` do not: here it adds the terms of all rows in one order.
    """
    if DEVICE == "cpu" and backend == "triton":
        if thin or dtype == torch.float32:
            pytest.skip("the interpreter is slow")
        monkeypatch.setattr(np, "matmul", product_of_any_place)
    hidden, weight, ids = inputs(333, 40, 1100, dtype, device=DEVICE)
    a, b, bias = (torch.randn(*size, device=DEVICE) for size in ((3, 40), (1100, 3), (1100,)))
    layer = Logits(bias, a, b) if thin else None
    with torch.no_grad():
        want = packed_log_probs(hidden, weight, ids, entropy=True, backend=backend, logits=layer)
    slow = DEVICE == "cpu" and backend == "triton"
    for tokens in (1, 70, 333) if slow else (1, 3, 16, 100, 128, 333):
        for begin in {(333 - tokens) // 2} if slow else {0, (333 - tokens) // 2, 333 - tokens}:
            some = slice(begin, begin + tokens)
            for keep in (1 << 30,) if slow else (None, 0, 1 << 30):
                states = hidden[some].detach().requires_grad_(keep is not None)
                seen = packed_log_probs(
                    states, weight, ids[some], entropy=True, backend=backend, logits=layer, keep=keep
                )
                assert all(torch.equal(x.detach(), y[some]) for x, y in zip(seen, want, strict=True)), (some, keep)


def test_ranges_fill_the_processors() -> None:
    """A range of 1,280 would give [1280, 4096] = 160 tiles to 132 processors: two waves, the second nearly empty."""
    assert module._range_columns(131_072, 4096, 8192, 4096) == 4096
    for most, block, width in ((7168, 8192, 4096), (4519, 8192, 2560), (1365, 32768, 4096), (256, 100, 64), (1, 1, 1)):
        columns = module._range_columns(151_936, most, block, width)
        assert columns % (2048 if most >= 4096 else 256) == 0
        assert max(256, most // 3) <= columns <= max(256, most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_to_another_dtype_changes_nothing(dtype: torch.dtype) -> None:
    hidden, weight, ids = inputs(9, 33, 70, dtype)
    want = *ours(hidden, weight, ids), *gradients(ours, hidden, weight, ids, "LE")
    with torch.autocast("cpu", torch.bfloat16):
        seen = *ours(hidden, weight, ids), *gradients(ours, hidden, weight, ids, "LE")
    assert all(torch.equal(x, y) for x, y in zip(seen, want, strict=True))


# -------------------------------------------------------------------- memory


class Allocations(TorchDispatchMode):
    """The names of all operations, the elements of the largest result, and the most bytes alive at once in storages
    that were made meanwhile."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = self.alive = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_rows_never_exist(narrow: None, dtype: torch.dtype) -> None:
    hidden, weight, ids = inputs(512, 2, 2048, dtype)
    with in_chunks(40), Allocations() as seen:
        packed_log_probs(hidden, weight, ids, entropy=True)
    assert seen.largest == 48 * 512
    with Allocations() as seen:
        packed_log_probs(hidden, weight, ids)
    assert seen.largest == 64 * 512
    loss = packed_log_probs(hidden.requires_grad_(), weight.requires_grad_(), ids).sum()
    with Allocations() as seen:
        loss.backward()
    assert seen.largest == 128 * 256


@pytest.mark.parametrize(
    ("tokens", "forward", "backward"), [(1638, 0.04, 1.29), (9830, 0.05, 1.41), (32768, 0.05, 1.76)]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_bytes_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tokens: int, forward: float, backward: float, keeps: bool
) -> None:
    """The products of a GPU, traced on the meta device at full size: nothing but one buffer, then what is returned
    (1 GiB for the weight) and the float32 sums of the gradient of hidden."""
    monkeypatch.setattr(module, "_has_wide_products", lambda x: True)  # pyright: ignore[reportUnknownLambdaType]
    done = module._Program(lambda *_: None, lambda *_: None)
    with torch.no_grad(), torch.device("meta"):
        hidden = torch.empty(tokens, 4096, dtype=torch.bfloat16)
        weight = torch.empty(131072, 4096, dtype=torch.bfloat16)
        ids, slopes = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
        kept = tokens if keeps else 0
        log_p = torch.empty(kept, 131072, dtype=torch.bfloat16)
        given = [hidden, weight, ids, slopes, log_p]
        monkeypatch.setattr(module, "_program", lambda kernels: done)
        layer, needed = module._Layer(hidden, weight, None, None, None), (True, True, False, False, False)
        how = module._How(PLAIN, 1.0, kept, True, False, False, False, None)
        with Allocations(*given) as seen:
            parts = module._forward(layer, None, ids, how, log_p, None)
        assert [x is None or x.dtype == torch.float32 for x in parts] == [True] * 5
        assert seen.peak / 2**30 <= forward
        shift = torch.empty(tokens, 32)
        given_back = module.Slopes(ids, slopes, slopes, slopes, None, slopes, slopes, None, shift, None, PLAIN)
        with Allocations(*given) as seen:
            grads = module._backward(layer, None, given_back, log_p if kept else None, needed, how)
        assert all(x is not None and x.dtype == torch.bfloat16 for x in grads[:2])
        assert seen.peak / 2**30 <= backward


# -------------------------------------------------------------------- torch.compile


def test_it_runs_inside_compiled_code() -> None:
    hidden, weight, ids = inputs(6, 3, 9)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs, entropy = packed_log_probs(hidden * 2, weight, ids, entropy=True)
        return (log_probs + entropy).square().sum()

    compiled: Any = torch.compile(loss, backend="aot_eager")
    results = []
    for call in (loss, compiled):
        x, y = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = call(x, y)
        results.append((value, *torch.autograd.grad(value, (x, y))))
    for seen, want in zip(*results, strict=True):
        assert error(seen.detach(), want.detach()) < 1e-12


# -------------------------------------------------------------------- kernels and their specification


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
def test_an_unknown_id_is_no_column_of_a_fused_product(backend: str) -> None:
    """Two of the ids are column 3 in 32 bits."""
    fused = importlib.import_module("maskpack.ops.log_probs_fused_triton")
    hidden, weight, _ = inputs(6, 16, 300, torch.float16, device=DEVICE)
    ids = torch.tensor([0, 299, 300, -1, 2**32 + 3, 3 - 2**32], device=DEVICE)
    parts = Parts.of(6, 300, (True, False), torch.float32, torch.device(DEVICE), fused.TILE)
    fused.reduce_rows(hidden, weight, ids, PLAIN, parts, None)
    log_probs, lse, entropy, *_ = combined(parts, ids, 300, None)
    assert log_probs.isnan().tolist() == [False, False, True, True, True, True]
    slopes, grad = torch.tensor([1.0, 1.0, 0, 0, 0, 0], device=DEVICE), torch.empty_like(hidden @ weight.T)
    given = Slopes(ids, -log_probs.expm1(), lse, entropy, None, slopes, *[None] * 4, PLAIN)
    fused.differentiate(hidden, weight, grad, 0, given)
    assert not grad[2:].any()
    assert grad[:2].isfinite().all()


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=kernel_marks)])
def test_an_unknown_id_gives_nan_and_reads_nothing_else(name: str) -> None:
    program = module._program(name == "triton")
    logits = torch.randn(6, 40, device=DEVICE)[:, :33]
    ids = torch.tensor([0, 32, 33, -1, 2**40, -(2**62)], device=DEVICE)
    want = logits.double().logsumexp(1)
    log_probs, lse, entropy, *_ = combined(reduced(program, logits.clone(), ids, PLAIN), ids, 33, None)
    assert entropy is not None
    assert log_probs.isnan().tolist() == [False, False, True, True, True, True]
    assert error(lse, want) < 1e-5
    assert not entropy.isnan().any()
    slopes = torch.zeros(6, device=DEVICE)
    slopes[0] = 1.0
    grad = logits.clone()
    program.differentiate(
        grad, grad, 0, Slopes(ids, -log_probs.expm1(), lse, entropy, None, slopes, *[None] * 4, PLAIN)
    )
    assert not grad.isnan().any()
    assert grad[1:].count_nonzero() == 0


def guarded(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory with 3 rows of logits [3, columns] in it and 77 around them, those rows, and ids of their columns."""
    memory = torch.full((4, columns + 13), 77.0, device=DEVICE)
    memory[:3, :columns] = torch.randn(3, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) * 3
    memory = memory.to(dtype)
    return memory, memory[:3, :columns], torch.tensor([0, columns - 1, columns // 2], device=DEVICE)


def assert_guarded(memory: Tensor, columns: int) -> None:
    assert (memory[:, columns:] == 77).all()
    assert (memory[3] == 77).all()


COLUMNS = [1, 255, 256, 5003]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
@pytest.mark.parametrize("width", [256, 4096])
def test_parts_of_slices(monkeypatch: pytest.MonkeyPatch, backend: Any, columns: int, scale: float, width: int) -> None:
    """Of a piece at row 1 of 5 and at the second slice: ids inside and outside, without the digits that a log-sum-exp
    of 2000 loses; a slice of nothing but -inf. Nothing else is written."""
    monkeypatch.setattr(module, "SLICE", width)
    memory, logits, ids = guarded(columns, torch.float32)
    ids[1] = columns
    logits[2] += 2000
    logits[1, :width] = -math.inf
    scaled = (logits * scale).double()
    wanted = (columns != 255, columns != 256)
    parts = Parts.of(5, width + columns, wanted, torch.float32, torch.device(DEVICE), width)
    for x in parts:
        _ = None if x is None else x.fill_(55.0)
    of_all = torch.tensor([9, *(ids + width).tolist(), 9], device=DEVICE)
    given = Reduction(of_all, Curve(scale, None), parts, torch.empty((0, columns), device=DEVICE), None)
    module._program(backend == "triton").reduce_rows(logits, given, 1, width)
    assert_guarded(memory, columns)
    assert parts.token[[0, 2, 4]].tolist() == [55.0] * 3
    assert torch.equal(parts.token[[1, 3]].double(), scaled[[0, 2], ids[[0, 2]]])
    for x in (x for x in parts[1:] if x is not None):
        assert len(x) == 1 + -(-columns // width)
        assert (x[0] == 55).all()
        assert (x[:, [0, 4]] == 55).all()
    for number, part in enumerate(scaled.split(width, 1), 1):
        top, total = parts.top[number, 1:4].double(), parts.total[number, 1:4].double()
        rows = [0, 2] if number == 1 else [0, 1, 2]
        below = (part - part.amax(1)[:, None])[rows]
        assert torch.equal(top[rows], part.amax(1)[rows])
        assert torch.allclose(total[rows], below.exp().sum(1), rtol=1e-5)
        if number == 1:
            assert top[1].isfinite()
            assert total[1] == 0
        if parts.weighted is not None:
            weighted = parts.weighted[number, 1:4].double()
            assert torch.allclose(weighted[rows], (below.exp() * below).sum(1), rtol=1e-5, atol=1e-6)
            assert weighted.isfinite().all()
        if parts.squares is not None:
            assert torch.allclose(parts.squares[number, 1:4].double()[rows], (2 * below).exp().sum(1), rtol=1e-5)


def test_slices_are_combined(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at once. Some are -inf, all that is left of some rows is in one of them; as one softmax."""
    monkeypatch.setattr(module, "SLICE", 4096)
    logits = 3 * torch.randn(7, 11_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1, :4096] = logits[2, 4096:] = logits[3, :10_999] = -math.inf
    logits[4, 9000] = 900.0
    ids = torch.tensor([0, 5000, 4095, 10_999, 8999, 4096, 11_000])
    parts = reduced(module._program(False), logits.clone(), ids, PLAIN)
    seen = combined(parts, ids, 11_000, None)
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    assert torch.allclose(seen[0][:6], log_p[range(6), ids[:6]], rtol=1e-12, atol=1e-12)
    assert seen[0][6].isnan()
    assert torch.allclose(seen[1], logits.logsumexp(1), rtol=1e-12)
    assert seen[2] is not None
    assert torch.allclose(seen[2], -torch.where(p > 0, p * log_p, 0).sum(1), rtol=1e-12, atol=1e-12)
    shares = torch.stack([part.sum(1) for part in p.split(4096, 1)], 1)
    assert torch.allclose(seen.shift.exp(), shares, rtol=1e-11)
    assert seen.shift.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_probabilities_of_the_first_rows_are_stored(backend: Any, columns: int, dtype: torch.dtype, rows: int) -> None:
    _, logits, ids = guarded(columns, torch.float32)
    logits[1] *= 20_000
    logits[-1, 0] = torch.nan
    logits[0, 0] = 15.0
    want = torch.cat([part.softmax(1) for part in (logits.double() / 0.7).split(module.SLICE, 1)], 1)
    memory, kept, _ = guarded(columns, dtype)
    others = kept[rows:].clone()
    parts = Parts.of(3, columns, (True, False), torch.float32, logits.device, module.SLICE)
    given = Reduction(ids, Curve(1 / 0.7, None), parts, kept[:rows], None)
    module._program(backend == "triton").reduce_rows(logits, given, 0, 0)
    assert torch.equal(kept[rows:], others)
    assert_guarded(memory, columns)
    cut = 1.0 if DEVICE == "cpu" and backend == "triton" else 0.5  # the interpreter cuts floats off
    step, least = cut * torch.finfo(dtype).eps + 1e-5, torch.finfo(torch.float16).smallest_normal / module.UNIT
    p, log_p = module._restored(kept[:rows])
    assert torch.allclose(p.double(), want[:rows], rtol=step, atol=least * step, equal_nan=True)
    likely = (want[:rows] > 0.6) & (want[:rows] < 1 - 1e-6)
    assert torch.allclose(log_p[likely].double(), want[:rows][likely].log(), rtol=step, atol=2e-7)
    assert (log_p[want[:rows] == 0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use", ["L", "E", "LE"])
@pytest.mark.parametrize("first", [0, 256])
def test_stored_probabilities_are_differentiated(backend: Any, dtype: torch.dtype, use: str, first: int) -> None:
    """Of rows whose slices have nearly all, one hundredth, and nothing of the probability, in place and elsewhere."""
    _, logits, ids = guarded(5003, torch.float32)
    logits[0, 3] = 12.0
    ids[0] = first
    slices = [part.log_softmax(1) for part in logits.split(512, 1)]
    shift = -torch.rand(len(slices), 3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)).t()
    shift = shift * torch.tensor([1e-4, 4.6, 6e4], device=DEVICE)[:, None]
    shift[2, 4] = -1e30
    kept = module.stored(torch.cat(slices, 1)).to(dtype)
    others, entropy = torch.tensor([0.9, 0.8, 0.7], device=DEVICE), torch.tensor([7.0, 6.0, 8.0], device=DEVICE)
    slopes = torch.tensor([1, -0.5, 2.0], device=DEVICE), torch.tensor([3, 1, -1.0], device=DEVICE)
    p, log_p = (x.double() for x in module._restored(kept))
    below = shift.double().repeat_interleave(512, 1)[:, :5003]
    p, log_p = p * below.exp(), log_p + below
    want = torch.zeros(3, 5003, device=DEVICE, dtype=torch.float64)
    if "L" in use:
        want += -p * slopes[0][:, None]
        want[range(3), ids] = (slopes[0] * others).double()
    if "E" in use:
        want -= slopes[1][:, None] * p * (log_p + entropy[:, None])
    wanted = [x if y in use else None for x, y in zip(slopes, "LE", strict=True)]
    given = Slopes(ids, others, None, entropy, None, *wanted, None, shift, None, Curve(2.0, None), 512)
    memory = torch.full((3, 5003 - first + 5), 77.0, device=DEVICE)
    differentiate = module._program(backend == "triton").differentiate
    differentiate(kept[:, first:], memory[:, :-5], first, given)
    assert torch.allclose(memory[:, :-5].double(), 2 * want[:, first:], rtol=1e-5, atol=1e-6)
    assert (memory[:, -5:] == 77).all()
    differentiate(kept[:, first:], kept[:, first:], first, given)
    cut = 1.0 if DEVICE == "cpu" and backend == "triton" else 0.5
    step = cut * torch.finfo(dtype).eps + 1e-5
    assert torch.allclose(kept[:, first:].double(), memory[:, :-5].double(), rtol=step, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cuda", reason="gpu/test_cuda_vocab.py runs it on GPUs")
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
def test_kernels_of_ranks_with_a_slice_each(backend: str) -> None:
    slices = ([300, 515], "float32", 0), ([0, 515], "float16", 0), ([500, 515], "float16", 1 << 30)
    cases = [case(5, 8, bounds, dtype, temperature=0.7, keep=keep, backend=backend) for bounds, dtype, keep in slices]
    for of_rank in ranks.values(ranks.run_ranks(work_vocab.compare, 2, cases, True)):
        for which, seen in zip(cases, of_rank, strict=True):
            assert seen["same"], which
            assert max(seen["log_probs"], seen["entropy"]) < 5e-6, which
            for name in ("hidden", "weight"):
                assert seen[name] < 1.25 * seen["alone"][name] + (1e-5 if which["dtype"] == "float32" else 2e-4), which


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("use", ["L", "E", "LE"])
def test_logits_are_differentiated_as_specified(backend: str, columns: int, dtype: torch.dtype, use: str) -> None:
    _, logits, ids = guarded(columns, torch.float32)
    log_p = (logits.double() / 0.7).log_softmax(1)
    lse, entropy = (logits.double() / 0.7).logsumexp(1).float(), -(log_p.exp() * log_p).sum(1).float()
    others = -log_p.gather(1, ids[:, None])[:, 0].expm1().float()
    slopes = [
        torch.tensor(x, device=DEVICE) if y in use else None for x, y in (([1, -0.5, 2.0], "L"), ([3, 1, -1.0], "E"))
    ]
    for first in (0, 2 if columns > 2 else 0):
        results = []
        for kernel in (True, False):
            memory, logits, ids = guarded(columns, torch.float32)
            whole = logits.clone()
            rounded, grad, _ = (memory, logits, ids) if dtype == torch.float32 else guarded(columns, dtype)
            before = grad[:, :first].clone()
            given = Slopes(ids, others, lse, entropy, None, *slopes, None, None, None, Curve(1 / 0.7, None))
            module._program(kernel).differentiate(logits[:, first:], grad[:, first:], first, given)
            assert torch.equal(grad[:, :first], before)
            assert torch.equal(logits, whole) or grad is logits
            assert_guarded(rounded, columns)
            assert_guarded(memory, columns)
            results.append(grad[:, first:])
        step = torch.finfo(dtype).eps
        assert torch.allclose(*results, rtol=max(step, 1e-5), atol=1e-5)
        assert results[0].isfinite().all()
