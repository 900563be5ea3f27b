"""The sweep over models of transformers, on a few classes: one for each way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from bench import models as case

CLASSES = ("Qwen3ForCausalLM", "BloomForCausalLM", "Qwen3MoeForCausalLM")


def test_a_class_of_each_way() -> None:
    found = {one.name: one for one in case.sweep(CLASSES, lambda one: None)}
    assert [found[name].way for name in CLASSES] == [case.PACKED, case.REFUSED, case.PACKED]
    assert "takes no position_ids" in found["BloomForCausalLM"].reason
    assert all(one.off <= case.LIMIT * 100 for one in found.values())
    text = case.page(list(found.values()))
    assert "2 packed, 0 packed, rows in mixers, 1 refused, 0 not compared, 0 wrong" in text
    assert "| `BloomForCausalLM` | refused | BloomModel takes no position_ids |" in text


def test_a_wrong_log_prob_and_a_wrong_gradient_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = case.response_log_probs

    class Changed:
        def __init__(self, values: Tensor) -> None:
            self.values = lambda: values

    def more(*given: object) -> Changed:
        return Changed(replay(*given).values() + 1e-3)

    def steeper(*given: object) -> Changed:
        values = replay(*given).values()
        return Changed(values * 1.001 - 0.001 * values.detach())

    for change in (more, steeper):
        monkeypatch.setattr(case, "response_log_probs", change)
        assert [one.way for one in case.sweep(CLASSES[:1], lambda one: None)] == [case.WRONG]


def test_models_in_which_a_leak_would_not_show_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "VISIBLE", 1e6)
    (found,) = case.sweep(CLASSES[:1], lambda one: None)
    assert found.way == case.UNKNOWN
    assert "a leak would change log-probs by" in found.reason


def test_nothing_is_made_of_a_class_that_needs_more() -> None:
    (found,) = case.sweep(("MusicgenForCausalLM",), lambda one: None)
    assert found.way == case.UNKNOWN
    assert torch.is_grad_enabled()
