"""packed_log_probs(logits=): bias, LoRA, scale and soft cap, against loops over rows and tokens in Python's floats, and
gradients against autograd of the plain program in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from output_layers import BACKENDS, DEVICE, TOLERANCE, kept_tokens, naive, plain, reduced, rounding_product
from samples import in_chunks
from torch import Tensor

from maskpack.ops import Logits, packed_log_probs
from maskpack.ops import log_probs as module
from maskpack.ops.split_head import combined

RANK = 3


PARTS = list(itertools.product([False, True], [False, True], [1.0, 0.3, 4.0], [None, 2.5]))
"""Bias, LoRA, scale, softcap."""
all_parts = pytest.mark.parametrize(
    "parts", PARTS, ids=["-".join(map(str, map(float, (p or 0 for p in parts)))) for parts in PARTS]
)
Given = tuple[Tensor, Tensor, Tensor, Logits]


def case(
    size: tuple[int, int, int], parts: Sequence[Any], dtype: torch.dtype = torch.float64, *, thin: Any = None
) -> Given:
    """hidden, weight, ids and Logits; the dtype of bias and LoRA is that of hidden, or `thin`."""
    tokens, width, vocabulary = size
    bias, lora, scale, cap = parts
    source = torch.Generator().manual_seed(3)

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=source).to(DEVICE, of)

    hidden, weight = random(tokens, width), random(vocabulary, width)
    ids = torch.randint(vocabulary, (tokens,), generator=source).to(DEVICE)
    of = thin or dtype
    given = {
        "bias": random(vocabulary, of=of) if bias else None,
        "lora_a": random(RANK, width, of=of) if lora else None,
        "lora_b": random(vocabulary, RANK, of=of) if lora else None,
    }
    return hidden, weight, ids, Logits(**given, lora_scale=0.7 if lora else 1.0, scale=scale, softcap=cap)


def leaves(given: Given, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    hidden, weight, _, layer = given
    return [
        None if x is None else (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
        for x in (hidden, weight, *layer.tensors)
    ]


def factors(tokens: int) -> Tensor:
    return torch.randn(2, tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(DEVICE)


def loss_of(outputs: Sequence[Tensor], use: str, tokens: int) -> Tensor:
    parts = zip(outputs, factors(tokens), "LE", strict=True)
    return torch.stack([(x.double() * factor).sum() for x, factor, name in parts if name in use]).sum()


def gradients(loss: Tensor, of: Sequence[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x for x in of if x is not None]))


def our_gradients(given: Given, use: str = "LE", temperature: float = 0.7, **options: Any) -> list[Tensor]:
    of = leaves(given)
    layer = given[3]
    logits = Logits(*of[2:], lora_scale=layer.lora_scale, scale=layer.scale, softcap=layer.softcap)
    seen = packed_log_probs(of[0], of[1], given[2], temperature=temperature, entropy=True, logits=logits, **options)
    found = gradients(loss_of(seen, use, given[2].numel()), of)
    assert [x.dtype for x in found] == [x.dtype for x in of if x is not None]
    return found


def true_gradients(given: Given, use: str = "LE", temperature: float = 0.7) -> list[Tensor]:
    of = leaves(given, torch.float64)
    outputs = plain(of[0], of[1], given[2], temperature, given[3], of[2:])  # type: ignore[arg-type]
    return gradients(loss_of(outputs, use, given[2].numel()), of)


def relative(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen.double() - truth).norm() / truth.norm().clamp(min=1e-3))


# -------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@all_parts
def test_values_are_those_of_the_loops(parts: Any, dtype: torch.dtype, backend: Any) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("kernels compute in float32")
    given = case((7, 5, 43), parts, dtype)
    hidden, weight, ids, logits = given
    for chunk in (None, 2):
        with in_chunks(chunk):
            seen = packed_log_probs(hidden, weight, ids, entropy=True, temperature=0.7, backend=backend, logits=logits)
        for values, truth in zip(seen, naive(*given[:3], 0.7, given[3]), strict=True):
            assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert values.tolist() == pytest.approx(truth, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [(0, 3, 5), (1, 1, 1), (1, 5, 1), (5, 1, 700)])
@pytest.mark.parametrize("parts", [(True, True, 0.3, 2.5), (True, False, 1.0, None), (False, True, 4.0, None)])
def test_odd_sizes(parts: Any, size: tuple[int, int, int]) -> None:
    given = case(size, parts)
    seen = packed_log_probs(*given[:3], entropy=True, temperature=0.7, logits=given[3])
    for values, truth in zip(seen, naive(*given[:3], 0.7, given[3]), strict=True):
        assert values.tolist() == pytest.approx(truth, rel=1e-12, abs=1e-12)
    for got, want in zip(our_gradients(given), true_gradients(given), strict=True):
        assert relative(got, want) < 1e-11


@all_parts
def test_gradients_are_those_of_autograd(narrow: None, parts: Any) -> None:
    """Three chunks and blocks, three slices."""
    given = case((300, 5, 701), parts)
    for use in ("L", "E", "LE"):
        for got, want in zip(our_gradients(given, use), true_gradients(given, use), strict=True):
            assert relative(got, want) < 1e-11


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", ["L", "E", "LE"])
@pytest.mark.parametrize("parts", [(True, True, 0.3, 2.5), (False, False, 1.0, 30.0), (True, True, 1.5, None)])
def test_gradients_in_float32(parts: Any, use: str, backend: Any) -> None:
    given = case((9, 4, 1100), parts, torch.float32)
    for got, want in zip(our_gradients(given, use, backend=backend), true_gradients(given, use), strict=True):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("keep", [0, None])
@pytest.mark.parametrize("thin", [None, torch.float32])
@pytest.mark.parametrize("parts", [(True, True, 0.3, 2.5), (True, True, 4.0, None), (False, False, 0.3, None)])
def test_half_precision_rounds_gradients_once(
    narrow: None, monkeypatch: pytest.MonkeyPatch, parts: Any, thin: Any, keep: int | None, gpu: bool
) -> None:
    """Also with the products of a GPU, where the gradient of the logits is rounded, kept or not."""
    if gpu:
        monkeypatch.setattr(module, "_has_wide_products", lambda x: True)
        monkeypatch.setattr(module, "_product", rounding_product)
    given = case((300, 16, 501), parts, torch.bfloat16, thin=thin)
    for got, want in zip(our_gradients(given, keep=keep), true_gradients(given), strict=True):
        assert relative(got, want) < 4e-3


def test_distributions_are_kept_without_a_cap_alone() -> None:
    hidden, weight, ids, _ = case((5, 16, 30), (False, False, 1.0, None), torch.bfloat16)
    hidden.requires_grad_()
    bias = torch.zeros(30, device=DEVICE)
    for logits, kept in ((None, 5), (Logits(scale=0.5, bias=bias), 5), (Logits(softcap=30.0), 0)):
        assert kept_tokens(packed_log_probs(hidden, weight, ids, keep=1 << 20, logits=logits)) == kept


# -------------------------------------------------------------------- caps


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_far_beyond_the_cap(backend: Any) -> None:
    """Values that round to the cap, and slopes down to 1e-30 without the cancellation of 1 - tanh^2."""
    z = torch.tensor([[-900.0, -40.0, -12.0, -1e-6, 1e-6, 0.49, 0.51, 8.0, 15.0, 35.0, 900.0]], dtype=torch.float64)
    hidden = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    weight = z.T.float().to(DEVICE).requires_grad_()
    ids = torch.tensor([5], device=DEVICE)
    layer = Logits(softcap=1.0)
    seen = packed_log_probs(hidden, weight, ids, entropy=True, backend=backend, logits=layer)
    states, heads = hidden.detach().double(), weight.detach().double()
    for values, truth in zip(seen, naive(states, heads, ids, 1.0, layer), strict=True):
        assert values.tolist() == pytest.approx(truth, rel=1e-6, abs=1e-6)
    (grad,) = torch.autograd.grad(seen[0].sum(), weight)
    capped = torch.tanh(z[0].float().double())
    p = capped.softmax(0)
    bend = 1 / torch.cosh(z[0].float().double()).square()
    want = (torch.nn.functional.one_hot(torch.tensor(5), 11) - p) * bend
    torch.testing.assert_close(grad[:, 0].cpu().double(), want, rtol=3e-5, atol=1e-36)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_cap_as_their_specification(backend: Any, dtype: torch.dtype) -> None:
    if (DEVICE, backend, dtype) == ("cpu", "triton", torch.bfloat16):
        pytest.skip("the interpreter cuts floats off where it stores bfloat16")
    source = torch.Generator().manual_seed(1)
    logits = (20 * torch.randn(5, 300, generator=source)).to(DEVICE)
    ids = torch.tensor([0, 299, 7, 300, -1], device=DEVICE)
    results, curve = [], module.Curve(12.5, 0.08)
    single, double = (backend == "triton", torch.float32), (False, torch.float64)
    for program, wide in ((module._program(kernels), wide) for kernels, wide in (single, double)):
        parts = reduced(program, logits.to(wide, copy=True), ids, curve)
        out: Any = combined(parts, ids, 300, None)[:3]
        grad = torch.zeros(5, 300, dtype=dtype if wide == torch.float32 else wide, device=DEVICE)
        slopes = factors(5).to(wide)
        others = -out[0].nan_to_num().expm1()
        program.differentiate(
            logits.to(wide), grad, 0, module.Slopes(ids, others, out[1], out[2], None, *slopes, None, None, None, curve)
        )
        results.append((torch.stack(out), torch.cat([parts.token[None], *parts[1:4]]), grad))
    for seen, want, limit in zip(*results, (1e-5, 1e-4, 1e-5 if dtype == torch.float32 else 1e-2), strict=True):
        torch.testing.assert_close(seen.double(), want.double(), rtol=limit, atol=limit, equal_nan=True)


# -------------------------------------------------------------------- what is not computed


def test_only_the_gradients_asked_for_are_computed() -> None:
    """LoRA on a frozen weight: no gradient of the weight, one of each thin matrix."""
    given = case((6, 4, 9), (True, True, 0.5, 3.0))
    truth = true_gradients(given, "L", 1.0)
    names = ["hidden", "weight", "bias", "lora_a", "lora_b"]
    for wanted in itertools.product([False, True], repeat=5):
        if not any(wanted):
            continue
        of = [x.detach().clone().requires_grad_(w) for x, w in zip(leaves(given), wanted, strict=True) if x is not None]
        logits = Logits(*of[2:], lora_scale=0.7, scale=0.5, softcap=3.0)
        loss_of([packed_log_probs(of[0], of[1], given[2], logits=logits)] * 2, "L", 6).backward()
        for name, x, want, w in zip(names, of, truth, wanted, strict=True):
            assert (x.grad is not None) == w, name
            if x.grad is not None:
                assert relative(x.grad, want) < 1e-12, name


def test_a_plain_layer_is_the_product_alone() -> None:
    hidden, weight, ids, _ = case((6, 4, 9), (False, False, 1.0, None), torch.bfloat16)
    want = packed_log_probs(hidden, weight, ids, temperature=0.7)
    assert torch.equal(packed_log_probs(hidden, weight, ids, temperature=0.7, logits=Logits()), want)


def test_nothing_wide_is_allocated() -> None:
    """No second weight and no logits of all tokens: what autograd keeps is thin."""
    given = case((50, 2, 300), (True, True, 0.5, 3.0))
    of = leaves(given)
    out = packed_log_probs(of[0], of[1], given[2], logits=Logits(*of[2:], softcap=3.0))
    node: Any = out.grad_fn
    assert max(x.numel() for x in node.saved_tensors if x is not None) <= 300 * (RANK + 1)
