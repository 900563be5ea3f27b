"""The worked PPO with a value head: gradients beside those of padded rows in float64, advantages beside loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import ppo_value_head as ppo

CLOSE = 5e-6  # of gradients in float32, by norm, beside those in float64


@pytest.fixture(scope="module")
def batch() -> TensorDict:
    """Old numbers are those of other weights, so that some of the losses are clipped."""
    torch.manual_seed(1)
    batch = ppo.prepared(ppo.ActorCritic(), ppo.agent_rows(0))
    batch["values"] = batch["values"] + batch["response_mask"] * torch.randn(batch["values"].shape)
    return batch


def gradients(way: str, model: ppo.ActorCritic, batch: TensorDict) -> tuple[float, list[torch.Tensor]]:
    loss = ppo.backward(way, model, batch)
    return loss, [weights.grad.double() for weights in model.parameters() if weights.grad is not None]


def test_gradients_are_those_of_padded_rows(batch: TensorDict) -> None:
    torch.manual_seed(0)
    model = ppo.ActorCritic()
    seen = {way: gradients(way, model, batch) for way in ppo.WAYS}
    exact, truth = gradients(
        "padded", model.double(), batch.apply(lambda x: x.double() if x.is_floating_point() else x)
    )
    assert len(truth) == len(list(model.parameters()))
    for loss, own in seen.values():
        assert loss == pytest.approx(exact, abs=1e-6)
        for one, other in zip(own, truth, strict=True):
            assert (one - other).norm() <= CLOSE * other.norm()


def test_rows_have_holes_and_losses_are_clipped(batch: TensorDict) -> None:
    """Otherwise, the comparison above would compare less."""
    real = batch["attention_mask"][:, ppo.PROMPT :] != 0
    assert ((batch["response_mask"] == 0) & real).any(1).all()
    mask = batch["response_mask"] != 0
    assert not ((batch["values"] - batch["returns"]).abs() < ppo.VALUE_CLIP)[mask].all()


def test_advantages_pass_over_holes() -> None:
    """Those of a row without its holes, by the sum that defines them."""
    rng = torch.Generator().manual_seed(2)
    values, rewards = (torch.randn(size, generator=rng, dtype=torch.float64) for size in ((5, 9), (5,)))
    mask = (torch.rand(5, 9, generator=rng) < 0.6).long()
    mask[0], mask[1] = 1, 0
    advantages, returns = ppo.gae(rewards, values, mask)
    for row in range(5):
        places = mask[row].nonzero()[:, 0].tolist()
        own = [values[row, place].item() for place in places]
        ends = [0.0] * (len(own) - 1) + [rewards[row].item()]
        deltas = [
            end + ppo.GAMMA * following - value
            for end, following, value in zip(ends, [*own[1:], 0.0], own, strict=False)
        ]
        for begin, place in enumerate(places):
            decay = [(ppo.GAMMA * ppo.LAMBDA) ** steps for steps in range(len(deltas) - begin)]
            expected = sum(weight * delta for weight, delta in zip(decay, deltas[begin:], strict=True))
            assert advantages[row, place].item() == pytest.approx(expected, abs=1e-12)
            assert returns[row, place].item() == pytest.approx(expected + own[begin], abs=1e-12)
        assert not advantages[row][mask[row] == 0].any()
        assert not returns[row][mask[row] == 0].any()


def test_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    losses = ppo.train(ppo.ActorCritic())
    assert all(second < first for first, second in zip(losses[::2], losses[1::2], strict=True))
    assert capsys.readouterr().out.count("update") == ppo.STEPS * ppo.UPDATES
