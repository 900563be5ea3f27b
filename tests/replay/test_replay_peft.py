"""response_log_probs of models with LoRA of PEFT on their output layer, against each row alone in the same model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from needs import needs

from maskpack.replay import response_log_probs

needs("transformers")
peft = needs("peft")
from head_models import HEADS
from rows_alone import LIMIT, batch_of, check, off, refused, truth_of
from tiny_models import llama, pair

from maskpack.adapters.transformers import replayable

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}


def adapted(make: Any = llama, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Two copies of a model with one adapter, as get_peft_model makes it."""
    torch.manual_seed(4)
    made = peft.get_peft_model(pair(make, dtype, tie_word_embeddings=False)[0], peft.LoraConfig(**LORA | options))
    return made, copy.deepcopy(made)


@pytest.mark.parametrize(
    "make", [llama, HEADS["Gemma 2, a cap"][0], HEADS["Granite, divided"][0], HEADS["Phi, a bias"][0]]
)
@pytest.mark.parametrize("more", [{}, {"use_rslora": True, "r": 3}])
def test_lora_on_the_output_layer(make: Any, more: dict[str, Any]) -> None:
    """Its gradients alone; the weight of the output layer is frozen."""
    model, plain = adapted(make, **more)
    batch = batch_of()
    replay = replayable(model.get_base_model())
    check(replay, plain, batch, temperature=0.7, self_check=True)
    assert sum("lm_head" in name and weight.grad is not None for name, weight in model.named_parameters()) == 2
    with model.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        base = response_log_probs(replay, batch, self_check=True)
        assert off(base, truth_of(plain, batch)[0]) <= LIMIT
    assert off(base, response_log_probs(replay, batch).values()) > 0.05


def test_several_adapters_and_merged_ones() -> None:
    model, _ = adapted()
    model.add_adapter("second", peft.LoraConfig(**LORA | {"r": 2, "lora_alpha": 1}))
    plain = copy.deepcopy(model)
    batch, replay = batch_of(), replayable(model.get_base_model())
    for names in (["default"], ["second"], ["default", "second"]):
        for one in (model, plain):
            one.base_model.set_adapter(names)
        seen = response_log_probs(replay, batch, self_check=True)
        assert off(seen, truth_of(plain, batch)[0]) <= LIMIT
    for change in ("merge_adapter", "unmerge_adapter"):  # which rounds weights
        for one in (model, plain):
            getattr(one, change)()
        assert off(response_log_probs(replay, batch, self_check=True), truth_of(plain, batch)[0]) <= LIMIT


def test_adapters_in_float32_on_a_model_in_bfloat16() -> None:
    """As PEFT makes them: replay is as close to float32 as the model itself."""
    model, plain = adapted(dtype=torch.bfloat16)
    assert plain.get_base_model().lm_head.lora_A["default"].weight.dtype == torch.float32
    exact = copy.deepcopy(plain).float()
    batch = batch_of()
    seen = response_log_probs(replayable(model.get_base_model()), batch, self_check=False)
    truth = truth_of(exact, batch)[0]
    assert (seen.values() - truth).abs().mean() <= 1.1 * (truth_of(plain, batch)[0] - truth).abs().mean()
    seen.values().sum().backward()
    assert model.get_base_model().lm_head.lora_B["default"].weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"LoRA with a variant of its own \(\w+\) in the adapter default"),
        ({"lora_dropout": 0.1}, r"LoRA with dropout 0\.1 in train mode in the adapter default"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"is a peft\..*, or has hooks; expected"),
    ],
)  # fmt: skip
def test_other_adapters_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, _ = adapted(**options)
    replay = replayable(model.get_base_model().train())
    refused(replay, message)
