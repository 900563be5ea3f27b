"""replayable(compile=True) beside replay without it: the same bits where traced graphs run as they are, and the same
within float32 with inductor."""

from __future__ import annotations

import copy
import gc
import importlib
import re
import types
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from needs import needs
from torch import Tensor, nn

from maskpack.errors import ReplayError
from maskpack.replay import PackedInputs, response_log_probs, response_values

tf = needs("transformers")
from rows_alone import (
    LIMIT,
    ROWS,
    all_models,
    batch_of,
    checkpoint,
    close_gradients,
    for_model,
    gpt2,
    gradients,
    off,
    truth_of,
)
from tiny_models import gemma3, llama, pair, qwen3

from maskpack.adapters.transformers import compiled
from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable


class Counting:
    """A backend that runs what was traced as it is, and counts the graphs."""

    graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Counting:
    backend = Counting()
    monkeypatch.setitem(compiled._OPTIONS, "backend", backend)
    return backend


def replayed(model: Any, batch: Any) -> list[Tensor]:
    """Log-probs and the gradients of all weights."""
    log_probs = response_log_probs(model, batch).values()
    return [log_probs.detach(), *gradients(model.model, log_probs)]


def owners(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if "forward" in vars(part)]


@all_models
def test_results_are_those_without_it_bit_for_bit(make: Any, backend: Counting) -> None:
    first, second = pair(make)
    batch = for_model(make)
    for seen, want in zip(
        replayed(replayable(first, compile=True), batch), replayed(replayable(second), batch), strict=True
    ):
        assert torch.equal(seen, want)
    assert backend.graphs > 0
    assert first.state_dict().keys() == second.state_dict().keys()


@pytest.mark.parametrize("make", [qwen3, gemma3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_many_numbers_of_tokens_compile_once(make: Any, reentrant: bool, backend: Counting) -> None:
    first, second = pair(make)
    for model in (first, second):
        checkpoint(model, reentrant)
        model.train()
    ours, plain = replayable(first, compile=True), replayable(second)
    graphs = []
    for rows in (2, 3, 5, 9):
        batch = batch_of(ROWS[:2] * rows)
        for seen, want in zip(replayed(ours, batch), replayed(plain, batch), strict=True):
            assert torch.equal(seen, want)
        graphs.append(backend.graphs)
    assert graphs[0] == graphs[-1]


def test_two_passes_may_wait_for_their_backward_passes(backend: Counting) -> None:
    """Layers that run again must find the graphs that they ran with."""
    first, second = pair(qwen3)
    losses = []
    for model in (first, second):
        checkpoint(model, False)
        model.train()
        ours = replayable(model, compile=model is first)
        losses.append([response_log_probs(ours, batch_of(ROWS[:n])).values().sum() for n in (2, 5, 3)])
    for seen, want in zip(*losses, strict=True):
        seen.backward()
        want.backward()
    for x, y in zip(first.parameters(), second.parameters(), strict=True):
        assert x.grad is None if y.grad is None else torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("make", [qwen3, gpt2])
def test_inductor_computes_the_same_within_rounding(make: Any) -> None:
    model, own = pair(make)
    ours = replayable(model, compile=True)
    for n in (4, 8):
        batch = batch_of(ROWS[:n])
        log_probs = response_log_probs(ours, batch)
        truth = truth_of(own, batch)[0]
        assert off(log_probs, truth) <= LIMIT
        close_gradients(gradients(model, log_probs.values()), gradients(own, truth))


def test_bfloat16_and_autocast_pass_the_self_check(backend: Counting) -> None:
    model, _ = pair(qwen3, torch.bfloat16)
    response_log_probs(replayable(model, compile=True), batch_of(), self_check=True)
    model, other = pair(qwen3)
    with torch.autocast("cpu", torch.bfloat16):
        seen = response_log_probs(replayable(model, compile=True), batch_of(), self_check=True)
        want = response_log_probs(replayable(other), batch_of())
    assert torch.equal(seen.values(), want.values())


def test_the_self_check_compares_with_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            return [x * 1.5 if x.is_floating_point() else x for x in graph.forward(*inputs)]

        return run

    monkeypatch.setitem(compiled._OPTIONS, "backend", wrong)
    model, _ = pair(qwen3)
    with pytest.raises(ReplayError, match="packed log-probs of Qwen3ForCausalLM are off by"):
        response_log_probs(replayable(model, compile=True), batch_of())


def test_release_gives_all_parts_back_and_the_next_replay_takes_them(backend: Counting) -> None:
    model, own = pair(qwen3)
    ours = replayable(model, compile=True)
    parts = owners(model)
    assert {name.rpartition(".")[2] for name in parts} == {
        "input_layernorm", "post_attention_layernorm", "mlp", "norm", "q_norm", "k_norm", "rotary_emb", "self_attn"
    }  # fmt: skip
    ours.release()
    assert owners(model) == []
    ids = torch.randint(3, 90, (2, 7))
    assert torch.equal(model(ids).logits, own(ids).logits)
    assert backend.graphs == 0
    response_log_probs(ours, batch_of())
    assert owners(model) == parts
    plain = replayable(model)
    assert owners(model) == []
    for replay, want in ((ours, parts), (plain, []), (ours, parts), (plain, [])):  # each runs its own way
        response_log_probs(replay, batch_of(), self_check=False)
        assert owners(model) == want


def test_parts_do_not_keep_a_model() -> None:
    model, _ = pair(llama)
    gone = weakref.ref(model.model)
    replayable(model, compile=True)
    del model
    gc.collect()
    assert gone() is None


def test_a_copy_runs_with_its_own_weights(backend: Counting) -> None:
    model, own = pair(qwen3)
    replayable(model, compile=True)
    other = copy.deepcopy(model)
    assert owners(other) == owners(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    for part in other.modules():
        forward = vars(part).get("forward")
        assert forward is None or (isinstance(forward, MethodType) and forward.__self__ is part)
    batch = batch_of()
    seen = response_log_probs(replayable(other, compile=True), batch)
    assert torch.equal(seen.values(), response_log_probs(replayable(own), batch).values())


def test_hooks_run_outside(backend: Counting) -> None:
    model, _ = pair(llama)
    seen: list[bool] = []
    part = model.model.layers[0].mlp
    part.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    response_log_probs(replayable(model, compile=True), batch_of(), self_check=False)
    assert seen == [False]


def test_values_and_a_model_without_a_head(backend: Counting) -> None:
    model, other = (part.model for part in pair(llama))
    head = nn.Linear(32, 1)
    seen = response_values(replayable(model, compile=True), batch_of(), head)
    assert torch.equal(seen.values(), response_values(replayable(other), batch_of(), head).values())
    assert backend.graphs > 0


def test_one_token_is_no_case_of_its_own(backend: Counting) -> None:
    model, other = pair(qwen3)
    ours, plain = replayable(model, compile=True), replayable(other)
    for rows in (ROWS[:2], ((1, 0),), ((0, 0),), ROWS):
        batch = batch_of(rows)
        inputs = PackedInputs.of(batch)
        assert torch.equal(ours.hidden(inputs), plain.hidden(inputs))


ELSEWHERE = """
import torch

class OtherRMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        torch._dynamo.graph_break()
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

def rotated(q, k, cos, sin):
    torch._dynamo.graph_break()
    return own(q, k, cos, sin)
"""


@pytest.mark.parametrize("way", ["classes", "instances"])
def test_parts_of_another_package_are_left_as_they_are(
    way: str, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a package that replaces classes and functions of transformers, or the forward of some parts."""
    modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    other = types.ModuleType("other_kernels.transformers")
    vars(other)["own"] = modeling.apply_rotary_pos_emb
    exec(ELSEWHERE, vars(other))
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", vars(other)["rotated"])
    if way == "classes":
        monkeypatch.setattr(modeling, "Qwen3RMSNorm", vars(other)["OtherRMSNorm"])
    model, plain = pair(lambda **more: qwen3(**more))  # not one that is kept
    for part in (*model.modules(), *plain.modules()) if way == "instances" else ():
        if type(part).__name__ == "Qwen3RMSNorm":
            part.forward = MethodType(vars(other)["OtherRMSNorm"].forward, part)
    before = owners(model)
    ours = replayable(model, compile=True)
    for x, y in zip(replayed(ours, batch_of()), replayed(replayable(plain), batch_of()), strict=True):
        assert torch.equal(x, y)
    kinds = {type(model.get_submodule(name)).__name__ for name in {*owners(model)} - {*before}}
    assert kinds == {"Qwen3MLP", "Qwen3RotaryEmbedding"}
    assert backend.graphs > 0
    ours.release()
    assert owners(model) == before


class Failing(Exception):
    pass


@pytest.mark.parametrize("where", ["traced", "compiled"])
@pytest.mark.parametrize("kind", [AssertionError, IndexError, Failing, torch.OutOfMemoryError, MemoryError])
def test_what_torch_compile_raises(where: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, whatever it is, but not if memory ran out, or if a part raises it as it runs."""

    def broken(*_: Any, **__: Any) -> Any:
        raise kind("out of memory" if kind in (torch.OutOfMemoryError, MemoryError) else "odd")

    monkeypatch.setitem(compiled._OPTIONS, "backend", broken if where == "compiled" else Counting())
    if where == "traced":
        tracer = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator
        monkeypatch.setattr(tracer, "run", broken)
    with pytest.raises(Exception, match=r"out of memory|odd") as caught:
        response_log_probs(replayable(pair(llama)[0], compile=True), batch_of())
    if kind in (torch.OutOfMemoryError, MemoryError):
        assert not isinstance(caught.value, ReplayError)
        assert where == "traced" or type(caught.value) is kind
    else:
        assert re.match(
            f"replayable: torch.compile failed for Llama.*{kind.__name__}.* a compiler on this host", str(caught.value)
        )


def test_an_error_of_a_part_that_runs_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_graph: Any, _inputs: Any) -> Any:
        def run(*_: Any) -> Any:
            raise Failing("as it runs")

        return run

    monkeypatch.setitem(compiled._OPTIONS, "backend", failing)
    with pytest.raises(Failing, match="as it runs"):
        response_log_probs(replayable(pair(llama)[0], compile=True), batch_of())


def test_parts_with_a_forward_of_their_own_are_named() -> None:
    model, _ = pair(llama)
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    with pytest.raises(ReplayError, match=r"layers.1.mlp \(LlamaMLP\) of LlamaForCausalLM has a replaced forward"):
        replayable(model, compile=True)
    del model.model.layers[1].mlp.forward
    model.model.norm.compile()
    with pytest.raises(ReplayError, match=r"norm \(LlamaRMSNorm\) of LlamaForCausalLM .* or is already compiled; "):
        replayable(model, compile=True)


def test_a_model_without_known_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(gpt2)
    monkeypatch.setattr(compiled, "_PART", compiled.re.compile("(Nothing)$"))
    with pytest.raises(ReplayError, match="GPT2LMHeadModel has no norm, MLP or rotary embedding"):
        replayable(model, compile=True)


@pytest.mark.parametrize("value", ["yes", None, 1, "inductor"])
def test_compile_is_true_or_false(value: Any) -> None:
    model, _ = pair(llama)
    with pytest.raises(ReplayError, match="replayable: compile is"):
        replayable(model, compile=value)
