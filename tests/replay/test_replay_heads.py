"""response_log_probs of models whose output layer is more than one weight: scale, soft cap, bias, LoRA, heads that
predict further tokens. Against each row alone in the same model."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs
from torch import nn

import maskpack as mp
from maskpack.errors import LayoutError, ReplayError
from maskpack.ops import Logits
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs

tf = needs("transformers")
import work_heads
from head_models import HEADS
from lora_layer import LoraLayer, with_lora
from ranks import run_ranks, values
from rows_alone import LIMIT, batch_of, check, checkpoint, close_gradients, gradients, off, refused, truth_of
from tiny_models import TINY, VOCABULARY, llama, pair

from maskpack.adapters.transformers import model as adapter
from maskpack.adapters.transformers import output

replayable = adapter.replayable


heads = pytest.mark.parametrize(("make", "scale", "softcap", "bias"), HEADS.values(), ids=HEADS)


@heads
def test_log_probs_entropies_and_gradients_are_those_of_each_row_alone(
    make: Any, scale: float, softcap: float | None, bias: bool
) -> None:
    model, plain = pair(make)
    replay = replayable(model)
    logits = replay.head_logits
    assert (logits.scale, logits.softcap, logits.bias is not None) == (scale, softcap, bias)
    _, truth = check(replay, plain, batch_of(), temperature=0.7, entropy=True, self_check=True)
    assert truth.min() < -4


@pytest.mark.parametrize("name", ["Gemma 2, a cap", "Granite, divided", "Phi, a bias"])
def test_all_ways_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan, shared prefixes, gradient checkpointing, a deep copy, a released model, padded rows."""
    make = HEADS[name][0]
    model, plain = pair(make)
    batch = batch_of()
    batch["input_ids"][4:, :] = batch["input_ids"][1] * batch["attention_mask"][4:]
    truth = truth_of(plain, batch)[0]
    replay = replayable(model)
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1), token_budget=16)
    for options in (
        {"plan": plan},
        {"options": ReplayOptions(share_prefixes=True, min_shared=1)},
        {"options": ReplayOptions(keep=0)},
    ):
        assert off(response_log_probs(replay, batch, self_check=True, **options), truth) <= LIMIT
    assert off(response_log_probs(replayable(copy.deepcopy(model)), batch), truth) <= LIMIT
    checkpoint(model.train(), False)
    close_gradients(gradients(model, response_log_probs(replay, batch).values()), gradients(plain.train(), truth))
    assert off(truth_of(replay.release(), batch)[0], truth) == 0
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    assert off(response_log_probs(replay, batch, self_check=True), truth) <= LIMIT


def test_half_precision() -> None:
    """The model caps logits that are rounded to bfloat16; replay caps them in float32."""
    model, _ = pair(HEADS["Gemma 2, a cap"][0], torch.bfloat16)
    batch, replay = batch_of(), replayable(model)
    inputs = PackedInputs.of(batch)
    with torch.no_grad():
        states = replay.hidden(inputs)[inputs.predict]
        seen = response_log_probs(replay, batch, self_check=False).values()
        rounded = model.lm_head(states)
        exact = states.double() @ model.lm_head.weight.double().T
    truth, own = (
        (3 * torch.tanh(logits / 3)).log_softmax(-1)[range(len(seen)), inputs.targets] for logits in (exact, rounded)
    )
    assert (seen - truth).abs().max() <= LIMIT < 1e-3 < (own - truth).abs().max()


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As `head_dtype` of vLLM."""
    return nn.functional.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


class Wide(nn.Linear):
    forward = product


def as_trl(layer: Any) -> None:
    """`cast_lm_head_to_fp32`: the weight, too, is float32."""
    layer.float().forward = functools.partial(product, layer)


@pytest.mark.parametrize("make", [llama, HEADS["Gemma 2, a cap"][0], HEADS["Phi, a bias"][0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("change", [as_trl, lambda layer: setattr(layer, "__class__", Wide)])
def test_a_head_that_multiplies_in_float32(
    make: Any, dtype: torch.dtype, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair(make, dtype, tie_word_embeddings=False)
    change(model.lm_head)
    batch, replay, forward = batch_of(), replayable(model), model.lm_head.forward
    inputs = PackedInputs.of(batch)
    cap = 3.0 if make is HEADS["Gemma 2, a cap"][0] else None
    logits = model.lm_head(replay.hidden(inputs)[inputs.predict])
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    truth = logits.log_softmax(-1)[range(len(inputs.targets)), inputs.targets]
    wanted = gradients(model, truth)
    seen = response_log_probs(replay, batch, self_check=True).values()
    assert seen.dtype == logits.dtype == torch.float32
    assert off(seen, truth) <= LIMIT
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5  # of gradients that bfloat16 rounds on their way
    close_gradients(gradients(model, seen), wanted, limit)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    response_log_probs(replay, batch, self_check=True)
    assert model.lm_head.forward == forward


NARROW: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the product is rounded": lambda layer, x: product(layer, x).bfloat16().float(),
    "the product is in half": lambda layer, x: nn.functional.linear(x, layer.weight, layer.bias).float(),
    "a cap": lambda layer, x: product(layer, x).clamp(-1e4, 1e4),
    "no bias": lambda layer, x: nn.functional.linear(x.float(), layer.weight.float()),
    "another scale": lambda layer, x: product(layer, x) / 0.7,
    "it fails": lambda layer, x: product(layer, x[0, 0]),
}


@pytest.mark.parametrize("forward", NARROW.values(), ids=NARROW)
def test_other_forwards_of_an_output_layer_are_refused(forward: Any) -> None:
    model, _ = pair(HEADS["Phi, a bias"][0], torch.bfloat16)
    replay = replayable(model)
    model.lm_head.forward = functools.partial(forward, model.lm_head)
    refused(replay, r"layer of PhiForCausalLM is a torch.*Linear, or has hooks; .* in float32")
    del model.lm_head.forward
    response_log_probs(replay, batch_of())


# -------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("make", [llama, HEADS["Gemma 2, a cap"][0], HEADS["Granite, divided"][0]])
@pytest.mark.parametrize("ranks", [{"one": 4}, {"one": 4, "two": 3}])
def test_lora_on_the_output_layer(make: Any, ranks: dict[str, int]) -> None:
    model, plain = (with_lora(one, bias=True, **ranks) for one in pair(make, tie_word_embeddings=False))
    for one in (model, plain):
        one.get_output_embeddings().base_layer.weight.requires_grad_(False)
    check(replayable(model), plain, batch_of(), temperature=0.7, entropy=True, self_check=True)
    assert model.get_output_embeddings().lora_A["one"].weight.grad.norm() > 0


def test_adapters_follow_their_switches() -> None:
    """Asked at each call, as by `with model.disable_adapter()`."""
    model, plain = (with_lora(one, one=4, two=3) for one in pair(llama, tie_word_embeddings=False))
    layer, own = model.lm_head, plain.lm_head
    batch, replay, values = batch_of(), replayable(model), []
    for switches in (
        {},
        {"active_adapters": ["two"]},
        {"active_adapters": ["elsewhere"]},
        {"active_adapters": ["one", "two"], "disable_adapters": True},
        {"disable_adapters": False, "merged": True},
    ):
        for one in (layer, own):
            vars(one).update(switches)
        seen = response_log_probs(replay, batch, self_check=True)
        values.append(seen.values().detach())
        assert off(seen, truth_of(plain, batch)[0]) <= LIMIT
    assert [off(one, values[0]) > 0.1 for one in values[1:]] == [True] * 4
    assert torch.equal(values[2], values[3])


def changed(change: Callable[[LoraLayer], Any]) -> Any:
    model = with_lora(pair(llama, tie_word_embeddings=False)[0], one=4)
    change(model.lm_head)
    return model


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


ODD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DoRA": (lambda layer: layer.lora_variant.update(one=object()), r"a variant of its own \(object\) in the adapter"),
    "DoRA of older PEFT": (lambda layer: setattr(layer, "use_dora", {"one": True}), r"a variant of its own \(DoRA\)"),
    "dropout": (
        lambda layer: (layer.lora_dropout.update({"one": nn.Dropout(0.1)}), layer.train()),
        r"dropout 0\.1 in train mode in the adapter one",
    ),
    "a bias": (lambda layer: setattr(layer.lora_B["one"], "bias", nn.Parameter(torch.ones(97))), "a bias, hooks or ot"),
    "a hook": (lambda layer: layer.lora_A["one"].register_forward_hook(lambda *_: None), "a bias, hooks or other"),
    "another A": (lambda layer: layer.lora_A.update({"one": Doubled(32, 4, bias=False)}), "a bias, hooks or other"),
    "a hook of it": (lambda layer: layer.register_forward_hook(lambda *_: None), "a base layer .*Linear, or hooks"),
    "a base layer": (
        lambda layer: setattr(layer, "base_layer", Doubled(32, 97, bias=False)),
        "a base layer .*Doubled, or hooks; expected",
    ),
    "merged and disabled": (
        lambda layer: vars(layer).update(merged=True, disable_adapters=True),
        r"merged adapters that are disabled; .* Call unmerge_adapter\(\) first\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ODD.values(), ids=ODD)
def test_other_adapters_are_refused_by_name(change: Any, message: str) -> None:
    replay = replayable(changed(change))
    refused(replay, f"^replayable: the output layer of LlamaForCausalLM has LoRA with {message}")


def test_dropout_of_an_adapter_does_nothing_in_eval_mode() -> None:
    model = changed(lambda layer: layer.lora_dropout.update({"one": nn.Dropout(0.5)})).eval()
    plain = copy.deepcopy(model)
    assert off(response_log_probs(replayable(model), batch_of()), truth_of(plain, batch_of())[0]) <= LIMIT


# -------------------------------------------------------------------- what the forward does to logits


class Changed(tf.LlamaForCausalLM):
    """Llama whose forward changes its logits by `change`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = self.change(out.logits)
        return out


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 5:7] = -1e30
    return logits


UNKNOWN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "squares": (
        lambda logits: logits * logits.abs(),
        r"makes \[.*\] of the logits \[.*; expected a positive scale, and",
    ),
    "a negative scale": (lambda logits: -logits, "expected a positive scale"),
    "a shift": (lambda logits: logits + 0.5, "expected a positive scale"),
    "a clamp": (lambda logits: logits.clamp(-5, 5), "expected a positive scale"),
    "a shift before the cap": (lambda logits: torch.tanh(logits + 1), "expected a positive scale"),
    "masked tokens": (masked, "changes the logits of some tokens and not of others"),
    "fewer tokens": (lambda logits: logits[..., :90], r"makes logits \(1, 6, 90\) of the output layer's \(1, 6, 97\)"),
    "fewer positions": (lambda logits: logits[:, 1:], r"makes logits \(1, 5, 97\)"),
    "an error": (lambda logits: logits @ logits, r"failed on given logits with RuntimeError: "),
}


@pytest.mark.parametrize(("change", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_other_changes_of_logits_are_refused_by_name(change: Any, message: str) -> None:
    model = Changed(tf.LlamaConfig(**TINY))
    model.change = change
    with pytest.raises(ReplayError, match=message) as caught:
        replayable(model)
    assert "Changed" in str(caught.value)
    assert str(caught.value).startswith("replayable: the forward of Changed ")


def test_memory_that_ran_out_is_no_refusal() -> None:
    model, error = Changed(tf.LlamaConfig(**TINY)), torch.OutOfMemoryError("all of it")

    def change(_: Any) -> Any:
        raise error

    model.change = change
    with pytest.raises(torch.OutOfMemoryError) as caught:
        replayable(model)
    assert caught.value is error


@pytest.mark.parametrize("cast", [torch.float64, torch.float32])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.125, None), (1 / 3, 20.0), (1.0, 30.0), (3.0, 0.5)])
def test_scales_and_caps_are_found(scale: float, softcap: float | None, cast: torch.dtype) -> None:
    def change(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.to(cast) * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    model = Changed(tf.LlamaConfig(**TINY))
    model.change = change
    seen = output.curve_of(model, model.model, model.lm_head)
    assert seen[0] == pytest.approx(scale, rel=2e-7)
    assert seen[1] == (None if softcap is None else pytest.approx(softcap, rel=2e-7))


def test_the_forward_runs_without_the_model() -> None:
    """Neither layers nor hooks run, and the model stays as it is."""
    model, _ = pair(HEADS["Gemma 2, a cap"][0])

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    handles = [part.register_forward_pre_hook(never) for part in (model, *model.modules())]
    model.model.forward = model.lm_head.forward = model.forward = never
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    assert output.curve_of(model, model.model, model.lm_head) == (1.0, 3.0)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before
    for handle in handles:
        handle.remove()


# -------------------------------------------------------------------- heads that predict further tokens


def test_modules_of_further_tokens_within_a_model_are_not_run() -> None:
    model, plain = pair(llama)
    model.mtp = nn.ModuleList([copy.deepcopy(model.model.layers[0])])
    model.mtp_head = nn.Linear(32, VOCABULARY)
    for part in (*model.mtp.modules(), model.mtp_head):
        part.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    batch = batch_of()
    seen = response_log_probs(replayable(model), batch, self_check=True)
    assert off(seen, truth_of(plain, batch)[0]) <= LIMIT
    seen.values().sum().backward()
    assert all(weight.grad is None for part in (model.mtp, model.mtp_head) for weight in part.parameters())


# -------------------------------------------------------------------- other models, and ranks


def test_any_replay_model_may_have_head_logits() -> None:
    """`head_logits` beside `head`, and none of it without."""
    model, _ = pair(llama)
    replay, batch = replayable(model), batch_of()

    class Capped:
        device, head, hidden = replay.device, property(lambda _: replay.head), staticmethod(replay.hidden)
        dense_hidden, self_check = staticmethod(replay.dense_hidden), staticmethod(lambda *_: None)
        head_logits = Logits(scale=0.5, softcap=2.0)

    seen = response_log_probs(Capped(), batch, entropy=True)
    plain = pair(llama)[1]
    own = plain.lm_head.forward
    plain.lm_head.forward = lambda x: 2 * torch.tanh(own(x) * 0.5 / 2)
    assert max(map(off, seen, truth_of(plain, batch))) <= LIMIT
    Capped.head_logits = "cap"  # type: ignore[assignment]
    with pytest.raises(LayoutError, match=r"logits is 'cap'; expected an ops\.Logits"):
        response_log_probs(Capped(), batch)


def test_the_self_check_sees_another_scale() -> None:
    model, _ = pair(HEADS["Granite, divided"][0])
    replay = replayable(model)
    model.config.logits_scaling = 2.0
    refused(replay, re.escape("log-probs of GraniteForCausalLM are off by"))


@pytest.mark.parametrize("kind", ["scale", "cap"])
def test_sharded_output_layers(kind: str) -> None:
    for off_by in values(run_ranks(work_heads.sharded, 2, kind)):
        assert off_by["gradients"] <= 1e-5
        assert max(off_by["packed"], off_by["without gradients"], off_by["again"]) <= LIMIT
        assert off_by["whole"] == 0
