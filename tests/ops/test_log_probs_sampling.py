"""packed_log_probs(sampling_mask=, statistics=) against loops over tokens in float64, which take the allowed ids alone.
Triton kernels run on a GPU, or interpreted on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernels import kernel_marks
from output_layers import BACKENDS, DEVICE, kept_tokens
from torch import Tensor

from maskpack.errors import LayoutError
from maskpack.ops import Logits, packed_log_probs
from maskpack.ops import log_probs as module
from maskpack.ops.log_probs import TokenStatistics

TOKENS, WIDTH, VOCABULARY = 37, 9, 700
LEAVES = ("hidden", "weight", "bias", "a", "b")


def sets_of(tokens: int, vocabulary: int, ids: Tensor, seed: int = 0) -> list[list[int]]:
    """Allowed ids in any order: none for every fifth token, all, one, some; with the token itself, except every
    seventh."""
    source = torch.Generator().manual_seed(seed)
    sets: list[list[int]] = []
    for token, own in enumerate(ids.tolist()):
        size = (0, 1, 5, vocabulary, 60)[token % 5]
        some = torch.randperm(vocabulary, generator=source)[:size].tolist()
        if some and size < vocabulary:
            some = [x for x in some if x != own]
            some = some if token % 7 == 6 and some else [*some, own]
        sets.append(some)
    return sets


def pair_of(sets: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(list(itertools.chain(*sets)), dtype=dtype, device=DEVICE)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, sets))], dtype=dtype, device=DEVICE)
    return ids, offsets


def problem(dtype: torch.dtype, tokens: int = TOKENS) -> tuple[dict[str, Tensor], Tensor, list[list[int]]]:
    source = torch.Generator().manual_seed(1)
    shapes = (tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,), (3, WIDTH), (VOCABULARY, 3)
    made = [torch.randn(shape, generator=source) for shape in shapes]
    leaves = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in zip(LEAVES, made, strict=True)}
    likely = (made[0] @ made[1].T).argmax(1)
    ids = torch.randint(VOCABULARY, (tokens,), generator=source).where(torch.arange(tokens) % 3 > 0, likely)
    return leaves, ids.to(DEVICE), sets_of(tokens, VOCABULARY, ids)


def naive(
    leaves: dict[str, Tensor], ids: Tensor, sets: Sequence[Sequence[int]], thin: bool, cap: float | None
) -> list[Tensor]:
    """log_probs, entropy, sum_p2 and is_top1 of each token, differentiable; temperature 0.7."""
    hidden, weight, bias, a, b = (leaves[name] for name in LEAVES)
    results: list[list[Tensor]] = []
    for state, own, some in zip(hidden, ids.tolist(), sets, strict=True):
        some = list(some) or list(range(len(weight)))
        logits = weight[some] @ state
        if thin:
            logits = logits + bias[some] + 0.5 * b[some] @ (a @ state)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        log_p = (logits / 0.7).log_softmax(0)
        p = log_p.exp()
        known = own in some
        # Outside, the log-prob is -inf; the gradient is that of the log-sum-exp of the allowed logits.
        at = log_p[some.index(own)] if known else -(logits / 0.7).logsumexp(0)
        top = torch.tensor(known and bool(logits[some.index(own)] == logits.max()))
        results.append([at, -(p * log_p).sum(), p.square().sum(), top])
    return [torch.stack(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("keep", [0, 1 << 30])
@pytest.mark.parametrize(("thin", "cap"), [(False, None), (True, None), (True, 4.0)])
def test_results_and_gradients_are_those_of_the_loops(
    narrow: None, dtype: torch.dtype, keep: int, thin: bool, cap: float | None, backend: Any
) -> None:
    """Of weighted sums of each output, and of all. Every third token is the likeliest of all ids."""
    if keep and (dtype != torch.float16 or cap is not None):
        pytest.skip("nothing is kept")
    if backend == "triton" and (dtype == torch.float64 or (DEVICE == "cpu" and thin != (cap is not None))):
        pytest.skip("kernels compute in float32; the interpreter is slow")
    leaves, ids, sets = problem(dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    logits = Logits(*(leaves[name] for name in LEAVES[2:]), lora_scale=0.5) if thin else Logits()
    logits = Logits(logits.bias, logits.lora_a, logits.lora_b, 0.5, softcap=cap)
    seen = packed_log_probs(
        leaves["hidden"], leaves["weight"], ids, temperature=0.7, keep=keep, logits=logits, statistics=True,
        sampling_mask=pair_of(sets), backend=backend,
    )  # fmt: skip
    assert isinstance(seen, TokenStatistics)
    assert kept_tokens(seen.log_probs) == (TOKENS if keep else 0)
    truth = naive(exact, ids, sets, thin, cap)
    outside = torch.tensor([bool(some) and own not in some for own, some in zip(ids.tolist(), sets, strict=True)])
    assert 2 < int(outside.sum()) < 10
    assert seen.log_probs.isneginf().cpu().tolist() == outside.tolist()
    assert seen.is_top1.tolist() == truth[3].tolist()
    assert int(seen.is_top1.sum()) > 5
    step = 1e-12 if dtype == torch.float64 else 2e-5
    inside = (~outside).to(DEVICE)
    for got, want in zip(seen[:3], truth[:3], strict=True):
        assert torch.allclose(got.double()[inside], want[inside], rtol=step, atol=step)
    slopes = torch.randn(3, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    names = LEAVES if thin else LEAVES[:2]
    for use in ((0,), (1,), (2,), (0, 1, 2)):
        grads = torch.autograd.grad(
            [seen[n] for n in use], [leaves[x] for x in names], [slopes[n].to(seen[n].dtype) for n in use],
            retain_graph=True,
        )  # fmt: skip
        wants = torch.autograd.grad(
            [truth[n] for n in use], [exact[x] for x in names], [slopes[n] for n in use], retain_graph=True
        )
        limit = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 3e-3}[dtype]
        for name, got, want in zip(names, grads, wants, strict=True):
            assert got.isfinite().all()
            assert float((got.double() - want).norm()) <= limit * float(want.norm()), (use, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ids_and_no_ids_are_no_restriction(narrow: None, backend: Any) -> None:
    leaves, ids, _ = problem(torch.float32)
    call = {"entropy": True, "backend": backend}
    want = packed_log_probs(leaves["hidden"], leaves["weight"], ids, **call)
    for some in ([], list(range(VOCABULARY))[::-1]):
        seen = packed_log_probs(leaves["hidden"], leaves["weight"], ids, sampling_mask=pair_of([some] * TOKENS), **call)
        assert all(torch.equal(x, y) for x, y in zip(seen, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_has_the_same_bits_in_all_calls(narrow: None, backend: Any) -> None:
    leaves, ids, sets = problem(torch.float16)
    hidden, weight = leaves["hidden"].detach(), leaves["weight"].detach()
    want = packed_log_probs(hidden, weight, ids, sampling_mask=pair_of(sets), statistics=True, backend=backend)
    for begin, end in ((0, 1), (3, 20), (36, 37)):
        for keep in (None, 1 << 30):
            seen = packed_log_probs(
                hidden[begin:end].requires_grad_(keep is not None), weight, ids[begin:end], statistics=True,
                sampling_mask=pair_of(sets[begin:end]), backend=backend, keep=keep,
            )  # fmt: skip
            assert all(torch.equal(x.detach(), y[begin:end]) for x, y in zip(seen, want, strict=True))


def test_a_jagged_tensor_and_int32_say_the_same() -> None:
    leaves, ids, sets = problem(torch.float32)
    hidden, weight = leaves["hidden"].detach(), leaves["weight"].detach()
    values, offsets = pair_of(sets)
    want = packed_log_probs(hidden, weight, ids, sampling_mask=(values, offsets))
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
    for mask in (jagged, pair_of(sets, torch.int32)):
        assert torch.equal(packed_log_probs(hidden, weight, ids, sampling_mask=mask), want)


def test_statistics_alone_are_those_of_all_ids() -> None:
    """Of equal largest logits, each is the top."""
    weight = torch.tensor([[2.0], [2.0], [1.0], [-1.0]], device=DEVICE)
    hidden, ids = torch.ones(4, 1, device=DEVICE), torch.arange(4, device=DEVICE)
    seen = packed_log_probs(hidden, weight, ids, statistics=True)
    powers = [math.exp(x) for x in (2, 2, 1, -1)]
    p = [x / sum(powers) for x in powers]
    assert seen.log_probs.exp().tolist() == pytest.approx(p)
    assert seen.entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p)] * 4)
    assert seen.sum_p2.tolist() == pytest.approx([sum(x * x for x in p)] * 4)
    assert seen.is_top1.tolist() == [True, True, False, False]
    assert not seen.is_top1.requires_grad


def test_slices_without_any_logit_are_kept() -> None:
    """A bias of -inf for a whole slice: p is 0 there, and no gradient is NaN."""
    hidden = torch.randn(3, 4, device=DEVICE).half().requires_grad_()
    weight = torch.randn(5000, 4, device=DEVICE).half()
    bias = torch.zeros(5000, device=DEVICE)
    bias[4096:] = -math.inf
    ids = torch.tensor([0, 7, 4095], device=DEVICE)
    log_probs, entropy = packed_log_probs(hidden, weight, ids, entropy=True, keep=1 << 30, logits=Logits(bias))
    assert kept_tokens(log_probs) == 3
    (seen,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    log_p = (exact @ weight[:4096].double().T).log_softmax(1)
    (want,) = torch.autograd.grad(log_p[range(3), ids].sum() - (log_p.exp() * log_p).sum(), exact)
    assert torch.allclose(seen.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids, offsets: "all", "sampling_mask is 'all'; expected a jagged tensor"),
        (lambda ids, offsets: ids, "sampling_mask is a Tensor; expected a jagged tensor"),
        (lambda ids, offsets: (ids, offsets, ids), "sampling_mask is a tuple; expected a jagged tensor"),
        (lambda ids, offsets: (ids, offsets[:-1]), r"and \(3,\) int64 on cpu; expected \[K\] and \[4\]"),
        (lambda ids, offsets: (ids.float(), offsets), "float32 on cpu and"),
        (lambda ids, offsets: (ids[None], offsets), r"offsets \(1, 4\) int64"),
        (lambda ids, offsets: (ids, offsets + 1), "offsets from 1 to 5; expected 0 to 4"),
        (lambda ids, offsets: (ids, offsets[[0, 2, 1, 3]]), "offsets from 0 to 4, not in order; expected 0 to 4"),
        (lambda ids, offsets: (ids - 1, offsets), r"ids of sampling_mask lie in \[-1, 4\]; expected \[0, 6\)"),
        (lambda ids, offsets: (ids + 3, offsets), r"lie in \[3, 8\]; expected \[0, 6\), the rows of lm_head_weight"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, said: str) -> None:
    hidden, weight = torch.zeros(3, 2), torch.zeros(6, 2)
    mask = change(torch.tensor([0, 5, 1, 2]), torch.tensor([0, 1, 3, 4]))
    with pytest.raises(LayoutError, match=f"packed_log_probs: .*{said}"):
        packed_log_probs(hidden, weight, torch.tensor([0, 1, 2]), sampling_mask=mask)


def test_statistics_are_a_flag() -> None:
    call: Any = packed_log_probs
    with pytest.raises(LayoutError, match="statistics is 'entropy'; expected True or False"):
        call(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), statistics="entropy")


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=kernel_marks)])
@pytest.mark.parametrize("columns", [1, 255, 700])
@pytest.mark.parametrize("first", [0, 256])
def test_logits_are_differentiated_as_specified(
    monkeypatch: pytest.MonkeyPatch, backend: str, columns: int, first: int
) -> None:
    monkeypatch.setattr(module, "SLICE", 256)
    source = torch.Generator().manual_seed(4)
    logits = torch.randn(5, columns + 3, generator=source).to(DEVICE)[:, :columns] * 3
    ids = torch.randint(first, first + columns, (5,), generator=source)
    sets = [[int(x) % (first + columns) for x in range(7, 7 + 97 * n, 97)] for n in (0, 1, 3, 300, 5)]
    mask = module.SamplingMask(*pair_of(sets), torch.empty(1 << 14, dtype=torch.int8, device=DEVICE))
    numbers = torch.rand(7, 5, generator=source).to(DEVICE)
    slopes = module.Slopes(ids.to(DEVICE), *numbers, None, mask, module.Curve(1.3, None))
    results = []
    for program in (module._program(kernel) for kernel in (True, False)):
        grad = torch.full((5, columns + 9), 77.0, device=DEVICE)
        program.differentiate(logits, grad[:, :columns], first, slopes)
        assert (grad[:, columns:] == 77).all()
        results.append(grad)
    assert torch.allclose(*results, rtol=1e-5, atol=1e-5)
