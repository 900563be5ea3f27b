"""The worked GRPO run: its recorded curves, its first steps run again, and the parts that both paths share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from own_ray import own_ray

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import grpo

AGAIN = 12  # steps that are run again
CLOSE = 1e-5  # of losses, some of which are 0.1; of gradient norms, which are about 1, ten times that


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with own_ray(Path(grpo.__file__).parent, num_cpus=2):
        yield


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    return float(np.abs(np.array(one) - np.array(other)).max())


def test_the_recorded_runs_are_one_curve() -> None:
    """60 steps, 120 optimizer updates, each path on rollouts of the weights that it has trained."""
    padded, packed = grpo.recorded().values()
    assert len(padded.tokens) == len(packed.tokens) == grpo.STEPS == 60
    assert padded.tokens == packed.tokens
    assert padded.rewards == packed.rewards
    assert apart(padded.losses, packed.losses) <= CLOSE
    assert apart(padded.norms, packed.norms) <= 10 * CLOSE


def test_the_recorded_runs_learned() -> None:
    rewards = grpo.recorded()["padded"].rewards
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.3


def check_first_steps(seen: grpo.Curve, known: grpo.Curve) -> None:
    assert seen.tokens == known.tokens[:AGAIN]
    assert seen.rewards == known.rewards[:AGAIN]
    assert apart(seen.losses, known.losses[:AGAIN]) <= CLOSE
    assert apart(seen.norms, known.norms[:AGAIN]) <= 10 * CLOSE


def test_padded_again() -> None:
    start = grpo.starting_weights()
    check_first_steps(grpo.train(grpo.Padded(start), start, AGAIN), grpo.recorded()["padded"])


def test_packed_again(local_ray: None) -> None:
    """Through compress, two ranks of a local Ray, plans and replay; the golden losses are those of padded rows."""
    start = grpo.starting_weights()
    check_first_steps(grpo.train(grpo.Packed(start), start, AGAIN), grpo.recorded()["padded"])


def test_shared_prefixes_again(local_ray: None) -> None:
    """Prefixes of a micro-batch are computed once, and plans count them once; losses are those of padded rows."""
    start = grpo.starting_weights()
    path = grpo.Packed(start, share_prefixes=True)
    check_first_steps(grpo.train(path, start, AGAIN), grpo.recorded()["padded"])
    assert 0.3 * path.tokens < path.shared_tokens < path.tokens


def test_another_loss_is_another_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is worth: a KL term of another weight shows in the losses of the second step."""
    monkeypatch.setattr(grpo, "KL", 0.03)
    start = grpo.starting_weights()
    seen = grpo.train(grpo.Padded(start), start, 2)
    assert apart(seen.losses, grpo.recorded()["padded"].losses[:2]) > 50 * CLOSE
