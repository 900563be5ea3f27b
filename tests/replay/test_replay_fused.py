"""replayable(fused=True): the kernels beside plain formulas in float64, and models beside the same without it."""

from __future__ import annotations

import copy
import gc
import importlib
import types
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from kernels import DEVICE, IS_GPU, kernel_marks
from needs import needs
from torch import Tensor, nn

from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.replay import response_log_probs

tf = needs("transformers")
from rows_alone import ROWS, batch_of, check, checkpoint, owners
from tiny_models import gemma3, llama, pair, qwen3

from maskpack.adapters.transformers.model import replayable

fused = importlib.import_module("maskpack.adapters.transformers.fused")
pytestmark = kernel_marks
HALF = torch.bfloat16 if IS_GPU else torch.float16
"""The interpreter cuts floats off where it stores bfloat16."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel ran."""
    own, seen = fused._kernels(), Counter[str]()
    stand_in = types.SimpleNamespace(WIDEST=own.WIDEST)
    for name in ("normalize", "gate", "rotate"):

        def run(*args: Any, name: str = name) -> Any:
            seen[name] += 1
            return getattr(own, name)(*args)

        setattr(stand_in, name, run)
    monkeypatch.setattr(fused, "_kernels", lambda: stand_in)
    return seen


# -------------------------------------------------------------------- kernels


def norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + offset)


def gated(x: Tensor, y: Tensor, gelu: bool) -> Tensor:
    return y * (0.5 * x * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh()) if gelu else x / (1 + (-x).exp()))


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    halves = [(x, torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)) for x in (q, k)]
    return tuple(x * cos[:, None] + other * sin[:, None] for x, other in halves)


def work(name: str, dtype: torch.dtype, tokens: int) -> tuple[Any, Any, list[Tensor]]:
    """The kernel and the formula, as functions of tensors, and tensors of which each has a token in its dim 1 or 2."""
    kernels, source = fused._kernels(), torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(DEVICE, dtype)

    if name.startswith("norm"):
        offset, width = (1.0, 96) if name == "norm, 1 + weight" else (0.0, 5120 if name == "norm, wide" else 40)
        given = [made(1, tokens, width), made(width)]
        return lambda x, w: kernels.normalize(x, w, 1e-6, offset, not offset), lambda x, w: norm(x, w, offset), given
    if name.startswith("gate"):
        gelu = name == "gate, GELU"
        return (
            lambda x, y: kernels.gate(x, y, gelu),
            lambda x, y: gated(x, y, gelu),
            [3 * made(1, tokens, 70), made(1, tokens, 70)],
        )
    q, k = made(1, tokens, 3, 24).transpose(1, 2), made(1, tokens, 48)[..., 8:32].unflatten(2, (1, 24)).transpose(1, 2)
    return kernels.rotate, turned, [q, k, made(1, tokens, 24), made(1, tokens, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ["norm", "norm, 1 + weight", "norm, wide", "gate", "gate, GELU", "rotate"])
def test_kernels_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    kernel, formula, given = work(name, dtype, 37)
    results: list[list[Tensor]] = []
    for function, kind in ((kernel, dtype), (formula, torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_(n < 2) for n, x in enumerate(given)]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        slopes = [torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape).to(dtype).to(kind) for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves[:2], slopes)])
    for seen, wanted in zip(*results, strict=True):
        assert seen.dtype == dtype
        error = (seen.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= (2e-6 if dtype == torch.float32 else torch.finfo(HALF).eps)


@pytest.mark.parametrize("name", ["norm", "gate", "rotate"])
def test_the_bits_of_a_token_do_not_depend_on_the_others(name: str) -> None:
    kernel, _, given = work(name, HALF, 37)
    whole = kernel(*given)
    for first, last in ((0, 1), (5, 37), (11, 29)):
        part = [x[:, :, first:last] if x.dim() == 4 else x[:, first:last] if x.dim() == 3 else x for x in given]
        for seen, wanted in zip(kernel(*part), whole, strict=True):
            assert torch.equal(seen, wanted[:, :, first:last] if name == "rotate" else wanted[first:last])


# -------------------------------------------------------------------- models
# On a GPU, float32 attention wants wider heads than these models have: tests/gpu/test_cuda_replay.py.

on_the_host = pytest.mark.skipif(IS_GPU, reason="interpreted, on the host")


@on_the_host
@pytest.mark.parametrize("make", [qwen3, gemma3, llama])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_models_compute_the_same_within_rounding(make: Any, checkpoints: bool, counted: Counter[str]) -> None:
    model, own = pair(make)
    if checkpoints:
        checkpoint(model, False)
        model.train()
    check(replayable(model, fused=True), own, batch_of(ROWS[:5]), self_check=True)
    assert min(counted[name] for name in ("normalize", "gate", "rotate")) > model.config.num_hidden_layers


@on_the_host
@pytest.mark.parametrize("make", [qwen3, gemma3])
def test_in_half_precision_the_bits_are_almost_those_without_it(make: Any, counted: Counter[str]) -> None:
    first, second = pair(make, HALF)
    batch = batch_of()
    seen, wanted = (response_log_probs(replayable(x, fused=x is first), batch).values() for x in (first, second))
    layers = first.config.num_hidden_layers
    assert min(counted["normalize"] - 8, counted["gate"] - 2, counted["rotate"] - 1) >= layers  # beside the trials
    assert (seen - wanted).abs().max() <= 8 * torch.finfo(HALF).eps


@on_the_host
def test_parts_that_compute_something_else_stay_as_they_are(counted: Counter[str]) -> None:
    """A norm with another factor, an MLP with another activation, a rotation of neighbours."""
    first, second = pair(llama)
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    with pytest.MonkeyPatch.context() as patch:
        norm, mlp, turn = modeling.LlamaRMSNorm.forward, modeling.LlamaMLP.forward, modeling.apply_rotary_pos_emb

        def half(self: Any, x: Tensor) -> Tensor:
            return 0.5 * norm(self, x)

        def more(self: Any, x: Tensor) -> Tensor:
            return mlp(self, x) + x

        def back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return turn(q, k, cos, -sin)

        for function in (half, more, back):
            function.__module__ = modeling.__name__
        patch.setattr(modeling.LlamaRMSNorm, "forward", half)
        patch.setattr(modeling.LlamaMLP, "forward", more)
        patch.setattr(modeling, "apply_rotary_pos_emb", back)
        seen = response_log_probs(replayable(first, fused=True), batch_of())
        trials = Counter(counted)
        again = response_log_probs(replayable(second), batch_of())
    assert torch.equal(seen.values(), again.values())
    layers = 2
    norms = 2 * layers + 1
    # for each variant; of gates small and large numbers
    assert trials == {"normalize": norms * 4, "gate": layers * 4, "rotate": layers}


class _Gated(nn.Module):
    """An MLP that clamps its gate, and drops numbers while it learns."""

    def __init__(self, limit: float = 0.0, rate: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.limit, self.dropout_rate = limit, rate

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate = gate.clamp(max=self.limit) if self.limit else gate
        hidden = nn.functional.silu(gate) * up
        return self.down_proj(nn.functional.dropout(hidden, self.dropout_rate, self.training))


class _Own(nn.Module):
    """An MLP whose activation, or what it is times, is no module and no number."""

    def __init__(self, act: Any, held: Any = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.act, self.held = act, held

    def forward(self, x: Tensor) -> Tensor:
        times = self.held["times"] if self.held else 1.0
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x)) * times


class _Act(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return getattr(nn.functional, self.kind)(x)


class _Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class OwnMLP(_Own):
    """By its name one of those that have a kernel."""


@on_the_host
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [OwnMLP(nn.functional.silu), OwnMLP(nn.functional.relu)],
        lambda: [OwnMLP(_Act("silu")), OwnMLP(_Act("relu"))],
        lambda: [OwnMLP(nn.functional.silu, {"times": 1.0}), OwnMLP(nn.functional.silu, {"times": 2.0})],
        lambda: [OwnMLP(nn.GELU("tanh")), OwnMLP(nn.GELU())],
    ],
    ids=["functions", "attributes of a module", "dicts", "modes of a module"],
)
@torch.no_grad()
def test_layers_of_one_class_have_a_trial_each(layers: Any, counted: Counter[str]) -> None:
    model = _Model(*layers())
    x = 3 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    wanted = [layer(x) for layer in model.layers]
    parts = fused.FusedParts(model, model)
    assert parts.ways() == {"layers.0": "not run yet", "layers.1": "not run yet"}
    for (layer, forward), want in zip(parts._parts.values(), wanted, strict=True):
        torch.testing.assert_close(forward._run(layer, x), want, rtol=1e-5, atol=1e-5)
    assert counted["gate"]
    assert parts.ways() == {"layers.0": "kernel", "layers.1": "own forward"}


@on_the_host
def test_which_parts_run_by_kernels_is_told(counted: Counter[str]) -> None:
    ready = replayable(pair(llama)[0], fused=True)
    assert set(ready.fused_parts.values()) == {"not run yet"}
    response_log_probs(ready, batch_of())
    assert set(ready.fused_parts.values()) == {"kernel"}
    assert {"layers.0.mlp", "layers.1.self_attn", "norm"} <= ready.fused_parts.keys()
    assert replayable(pair(llama)[0]).fused_parts == {}


@on_the_host
def test_a_model_of_which_nothing_is_fused_is_told_once(counted: Counter[str]) -> None:
    ready = replayable(pair(llama, torch.float64)[0], fused=True)
    with pytest.warns(MaskpackWarning, match=r"no part of LlamaForCausalLM runs by a kernel.*leave fused out"):
        response_log_probs(ready, batch_of())
    assert set(ready.fused_parts.values()) == {"own forward"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response_log_probs(ready, batch_of())


class _ShiftedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() + self.bias


@on_the_host
@torch.no_grad()
def test_parts_of_one_class_may_be_different_functions(counted: Counter[str]) -> None:
    """A limit of one instance, one beyond small numbers, dropout after an evaluation, a bias that was 0."""
    run: Any = fused._Mlp(_Gated.forward)
    x = 300 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for part in (_Gated(), _Gated(limit=16.0), _Gated(limit=900.0), _Gated()):
        torch.testing.assert_close(run._run(part, x), part(x), rtol=1e-5, atol=1e-2)
    assert counted["gate"]
    dropping = _Gated(rate=1e-3).eval()  # a trial may drop nothing
    torch.testing.assert_close(run._run(dropping, x), dropping(x), rtol=1e-5, atol=1e-2)
    dropping.train()
    x = torch.randn(4000, 16)
    torch.manual_seed(1)
    seen = run._run(dropping, x)
    torch.manual_seed(1)
    assert torch.equal(seen, dropping(x))
    norm, of_norm = _ShiftedNorm(), fused._Norm(_ShiftedNorm.forward)
    for _ in range(2):
        assert torch.equal(of_norm._run(norm, x), norm(x))
        norm.bias.add_(1)


@on_the_host
def test_release_and_other_options(counted: Counter[str]) -> None:
    model = pair(llama)[0]
    ready, plain = replayable(model, fused=True), replayable(model)
    batch = batch_of()
    response_log_probs(ready, batch)
    before = sum(counted.values())
    response_log_probs(plain, batch)
    assert sum(counted.values()) == before > 0
    response_log_probs(ready, batch)
    assert sum(counted.values()) > before
    assert not owners(ready.release())
    with pytest.raises(ReplayError, match="replayable: fused is"):
        replayable(model, fused="yes")


@on_the_host
def test_a_copy_runs_with_its_own_weights(counted: Counter[str]) -> None:
    model, own = pair(qwen3)
    replayable(model, fused=True)
    other = copy.deepcopy(model)
    assert owners(other).keys() == owners(model).keys()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert all(forward.__self__ is other.get_submodule(name) for name, forward in owners(other).items())
    seen = response_log_probs(replayable(other, fused=True), batch_of())
    assert torch.equal(seen.values(), response_log_probs(replayable(own, fused=True), batch_of()).values())


def test_parts_do_not_keep_a_model() -> None:
    model, _ = pair(llama)
    gone = weakref.ref(model.model)
    replayable(model, fused=True)
    del model
    gc.collect()
    assert gone() is None


ELSEWHERE = """
import torch

class OtherRMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

def rotated(q, k, cos, sin):
    return own(q, k, cos, sin)
"""


@pytest.mark.parametrize("way", ["classes", "instances"])
def test_parts_of_another_package_are_left_as_they_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a package that replaces classes and functions of transformers, or the forward of some parts."""
    modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    other = types.ModuleType("other_kernels.transformers")
    vars(other)["own"] = modeling.apply_rotary_pos_emb
    exec(ELSEWHERE, vars(other))
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", vars(other)["rotated"])
    if way == "classes":
        monkeypatch.setattr(modeling, "Qwen3RMSNorm", vars(other)["OtherRMSNorm"])
    model, _ = pair(lambda **more: qwen3(**more))  # not one that is kept
    for part in model.modules() if way == "instances" else ():
        if type(part).__name__ == "Qwen3RMSNorm":
            part.forward = types.MethodType(vars(other)["OtherRMSNorm"].forward, part)
    before = owners(model)
    ours = replayable(model, fused=True)
    assert {type(model.model.get_submodule(name)).__name__ for name in ours.fused_parts} == {"Qwen3MLP"}
    ours.release()
    assert owners(model) == before


def test_a_model_without_known_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_PART", fused.re.compile("(Nothing)$"))
    monkeypatch.setattr(fused, "ROTARY", "nothing")
    with pytest.raises(ReplayError, match="fused=True, but LlamaForCausalLM has no norm, MLP or rotation"):
        replayable(pair(llama)[0], fused=True)
