"""ops.packed_log_probs against naive loops over rows and tokens, and its gradients against autograd of the plain
program in float64. Triton kernels run on a GPU, or on the host under TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import work_vocab
from hypothesis import given
from hypothesis import strategies as st
from output_layers import BACKENDS, DEVICE, TOLERANCE, kept_tokens, kernels, naive, plain
from samples import in_chunks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from work_vocab import case

from maskpack import MaskpackError
from maskpack.ops import log_probs as module
from maskpack.ops.log_probs import Slopes, packed_log_probs
from maskpack.ops.logits import Curve

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


@pytest.mark.parametrize(("needed", "count"), [((True, False), 2), ((False, True), 2), ((True, True), 3)])
def test_only_the_gradients_asked_for_are_computed(needed: tuple[bool, bool], count: int) -> None:
    hidden, weight, ids = inputs(6, 3, 9)
    truth = gradients(plain, hidden, weight, ids, "L")
    hidden.requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    loss = (packed_log_probs(hidden, weight, ids) * slopes_of(6)[0]).sum()
    assert products(loss.backward) == count
    for x, want, wanted in zip((hidden, weight), truth, needed, strict=True):
        assert (x.grad is not None) == wanted
        assert x.grad is None or error(x.grad, want) < 1e-12


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
    for keep, tokens in ((0, 0), (128 * 1024 - 1, 0), (128 * 1024, 128), (299 * 1024, 256), (300 * 1024, 300)):
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


def rounding_product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """What a GPU does: sums in float32, rounds to the dtype of `out`, and then adds."""
    product = (a.float() @ b.float()).to(out.dtype)
    out.copy_(out + product if add else product)


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


def test_a_kept_graph_can_be_walked_twice() -> None:
    hidden, weight, ids = inputs(6, 3, 9, torch.bfloat16)
    loss = packed_log_probs(hidden.requires_grad_(), weight.requires_grad_(), ids, keep=1 << 30).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_slices_fill_the_processors() -> None:
    """A slice of 1,280 would give [1280, 4096] = 160 tiles to 132 processors: two waves, the second nearly empty."""
    assert module._slice_columns(131_072, 4096, 8192, 4096) == 4096
    for most, block, width in ((4519, 8192, 2560), (1365, 32768, 4096), (256, 100, 64), (1, 1, 1)):
        columns = module._slice_columns(151_936, most, block, width)
        assert columns % 256 == 0
        assert max(256, most // 3) <= columns <= max(256, most)


def test_autocast_changes_nothing() -> None:
    hidden, weight, ids = inputs(9, 33, 70, torch.float32)
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
    with in_chunks(7), Allocations() as seen:
        packed_log_probs(hidden, weight, ids, entropy=True)
    assert seen.largest == 7 * 2048
    with Allocations() as seen:
        packed_log_probs(hidden, weight, ids)
    assert seen.largest == 128 * 2048
    loss = packed_log_probs(hidden.requires_grad_(), weight.requires_grad_(), ids).sum()
    with Allocations() as seen:
        loss.backward()
    assert seen.largest == 128 * 256


@pytest.mark.parametrize(
    ("tokens", "forward", "backward"), [(1638, 0.32, 1.29), (9830, 0.38, 1.41), (32768, 0.38, 1.76)]
)
@pytest.mark.parametrize("kept", [0, 1024])
def test_bytes_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tokens: int, forward: float, backward: float, kept: int
) -> None:
    """The products of a GPU, traced on the meta device at full size: nothing but one buffer, then what is returned
    (1 GiB for the weight) and the float32 sums of the gradient of hidden."""
    monkeypatch.setattr(module, "_has_wide_products", lambda x: True)  # pyright: ignore[reportUnknownLambdaType]
    done = module._Program(lambda *_: None, lambda *_: None)
    with torch.no_grad(), torch.device("meta"):
        hidden = torch.empty(tokens, 4096, dtype=torch.bfloat16)
        weight = torch.empty(131072, 4096, dtype=torch.bfloat16)
        ids, slopes = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
        log_p = torch.empty(kept, 131072, dtype=torch.bfloat16) if kept else None
        given = [x for x in (hidden, weight, ids, slopes, log_p) if x is not None]
        monkeypatch.setattr(module, "_program", lambda kernels: done)
        layer, needed = module._Layer(hidden, weight, None, None, None), (True, True, False, False, False)
        how = module._How(PLAIN, 1.0, module._chunk_rows(hidden, 131072), kept, True, False, None)
        with Allocations(*given) as seen:
            log_probs, lse, entropy = module._forward(layer, None, ids, how, log_p)
        assert log_probs.dtype == lse.dtype == torch.float32
        assert seen.peak / 2**30 <= forward
        given_back = module.Slopes(ids, log_probs, lse, entropy, slopes, slopes, PLAIN)
        with Allocations(*given) as seen:
            grads = module._backward(layer, None, given_back, log_p, needed, how)
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


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=kernels)])
def test_an_unknown_id_gives_nan_and_reads_nothing_else(name: str) -> None:
    program = module._program(name == "triton")
    logits = torch.randn(6, 40, device=DEVICE)[:, :33]
    ids = torch.tensor([0, 32, 33, -1, 2**40, -(2**62)], device=DEVICE)
    log_probs, lse, entropy = torch.empty(3, 6, device=DEVICE)
    want = logits.double().logsumexp(1)
    program.reduce_rows(logits.clone(), ids, PLAIN, log_probs, lse, entropy, None)
    assert log_probs.isnan().tolist() == [False, False, True, True, True, True]
    assert error(lse, want) < 1e-5
    assert not entropy.isnan().any()
    slopes = torch.zeros(6, device=DEVICE)
    slopes[0] = 1.0
    grad = logits.clone()
    program.differentiate(grad, grad, 0, Slopes(ids, -log_probs.expm1(), lse, entropy, slopes, None, PLAIN))
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
@pytest.mark.parametrize("kept", [None, torch.float16])
def test_parts_of_rows_are_what_ranks_combine(
    backend: Any, columns: int, scale: float, kept: torch.dtype | None
) -> None:
    """Of ids inside and outside, without the digits that a log-sum-exp of 2000 loses."""
    memory, logits, ids = guarded(columns, torch.float32)
    ids[1] = columns
    logits[2] += 2000
    scaled = (logits * scale).double()
    top = scaled.amax(1)
    below = scaled - top[:, None]
    out = torch.full((4, 4), 55.0, device=DEVICE)
    stores = None if kept is None else torch.empty(3, columns, device=DEVICE, dtype=kept)
    entropy = out[2, :3] if columns != 255 else None
    module._program(backend == "triton").reduce_rows(
        logits, ids, Curve(scale, None), out[0, :3], out[1, :3], entropy, stores, out[3, :3]
    )
    assert (out[:, 3] == 55).all()
    assert_guarded(memory, columns)
    token, total, weighted, seen_top = out[:, :3].double()
    assert token.isnan().tolist() == [False, True, False]
    assert torch.equal(token[[0, 2]], scaled[[0, 2], ids[[0, 2]]])
    assert torch.equal(seen_top, top)
    assert torch.allclose(total, below.exp().sum(1), rtol=1e-5)
    if entropy is None:
        assert (weighted == 55).all()
    else:
        assert torch.allclose(weighted, (below.exp() * below).sum(1), rtol=1e-5, atol=1e-6)
    if stores is not None:
        p, _ = module._restored(stores)
        assert torch.allclose(p.double(), below.softmax(1), rtol=2e-3, atol=1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [*COLUMNS, 20_000])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_probabilities_of_the_first_rows_are_stored(backend: Any, columns: int, dtype: torch.dtype, rows: int) -> None:
    _, logits, ids = guarded(columns, torch.float32)
    logits[1] *= 20_000
    logits[-1, 0] = torch.nan
    logits[0, 0] = 15.0
    want = (logits.double() / 0.7).softmax(1)
    memory, kept, _ = guarded(columns, dtype)
    others = kept[rows:].clone()
    out = torch.empty(3, 3, device=DEVICE)
    module._program(backend == "triton").reduce_rows(logits, ids, Curve(1 / 0.7, None), *out, kept[:rows])
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
@pytest.mark.parametrize("shifts", [(-1e-4, -4.6, -3e4), None])
def test_stored_probabilities_are_differentiated(backend: Any, dtype: torch.dtype, use: str, shifts: Any) -> None:
    """Of rows whose slice has nearly all, one hundredth, and nothing of the probability; and without slices."""
    _, logits, ids = guarded(5003, torch.float32)
    logits[0, 3] = 12.0
    if shifts is None:
        logits[2, 5] = 300.0
    shift = torch.tensor(shifts or [0.0] * 3, device=DEVICE)
    kept = module.stored(logits.log_softmax(1)).to(dtype)
    others, entropy = torch.tensor([0.9, 0.8, 0.7], device=DEVICE), torch.tensor([7.0, 6.0, 8.0], device=DEVICE)
    first, second = torch.tensor([1, -0.5, 2.0], device=DEVICE), torch.tensor([3, 1, -1.0], device=DEVICE)
    p, log_p = (x.double() for x in module._restored(kept))
    p, log_p = p * shift.double().exp()[:, None], log_p + shift.double()[:, None]
    want = torch.zeros(3, 5003, device=DEVICE, dtype=torch.float64)
    if "L" in use:
        want += -p * first[:, None]
        want[range(3), ids] = (first * others).double()
    if "E" in use:
        want -= second[:, None] * p * (log_p + entropy[:, None])
    grad = torch.empty(3, 5003, device=DEVICE)
    slopes = first if "L" in use else None, second if "E" in use else None
    given = Slopes(ids, others, None, entropy, *slopes, Curve(2.0, None), None if shifts is None else shift)
    module._program(backend == "triton").differentiate(kept, grad, 0, given)
    assert torch.allclose(grad.double(), 2 * want, rtol=1e-5, atol=1e-6)
    assert shifts is None or grad[2].count_nonzero() == (1 if "L" in use else 0)


@pytest.mark.skipif(DEVICE == "cuda", reason="gpu/test_cuda_vocab.py runs it on GPUs")
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernels)])
def test_kernels_of_ranks_with_a_slice_each(backend: str) -> None:
    slices = ([300, 515], "float32", 0), ([0, 515], "float16", 0), ([500, 515], "float16", 1 << 30)
    cases = [case(5, 8, bounds, dtype, temperature=0.7, keep=keep, backend=backend) for bounds, dtype, keep in slices]
    for of_rank in ranks.values(ranks.run_ranks(work_vocab.compare, 2, cases, True, seconds=100)):
        for which, seen in zip(cases, of_rank, strict=True):
            assert seen["same"], which
            assert max(seen["log_probs"], seen["entropy"]) < 5e-6, which
            for name in ("hidden", "weight"):
                assert seen[name] < 1.25 * seen["alone"][name] + (1e-5 if which["dtype"] == "float32" else 2e-4), which


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernels)])
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
            given = Slopes(ids, others, lse, entropy, *slopes, Curve(1 / 0.7, None))
            module._program(kernel).differentiate(logits[:, first:], grad[:, first:], first, given)
            assert torch.equal(grad[:, :first], before)
            assert torch.equal(logits, whole) or grad is logits
            assert_guarded(rounded, columns)
            assert_guarded(memory, columns)
            results.append(grad[:, first:])
        step = torch.finfo(dtype).eps
        assert torch.allclose(*results, rtol=max(step, 1e-5), atol=1e-5)
        assert results[0].isfinite().all()
