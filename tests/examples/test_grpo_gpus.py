"""The run on several GPUs, on the CPU with two actors: its task, and that its arms train alike."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from needs import needs

needs("ray")
needs("transformers")

from own_ray import own_ray
from samples import assert_same

from maskpack.errors import WorkerError

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import grpo_gpus
from grpo_gpus import EOS, PARTS, SIGNS, TINY

STEPS = 2


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with own_ray(Path(grpo_gpus.__file__).parent, num_cpus=2):
        yield


def text(tokens: list[int]) -> str:
    return "".join(SIGNS[token] for token in tokens)


def test_questions_fill_the_prompt_and_have_one_answer() -> None:
    rng = random.Random(0)
    for width in (8, 24, 256):
        for _ in range(50):
            prompt, answer = grpo_gpus.question(rng, width)
            assert len(prompt) <= width
            *examples, asked = text(prompt).split("\n")
            assert len(prompt) + len("012345=012345\n") > width
            for line in examples:
                digits, ordered = line.split("=")
                assert "".join(sorted(digits)) == ordered
            assert asked.endswith("=")
            assert text(answer) == "".join(sorted(asked[:-1])) + SIGNS[EOS]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("123$", 1), ("12$", 2 / 4), ("1234$", 3 / 5), ("321$", 2 / 4), ("", 0), ("123", 3 / 4), ("123$$", 4 / 5)],
)
def test_rewards_are_shares_of_places(response: str, expected: float) -> None:
    assert grpo_gpus.reward(grpo_gpus.encoded("123$"), grpo_gpus.encoded(response)) == expected


def test_advantages_are_of_groups() -> None:
    seen = grpo_gpus.advantages(torch.tensor([0.0, 1.0, 3.0, 3.0]), 2)
    assert torch.allclose(seen, torch.tensor([-0.5, 0.5, 0.0, 0.0]) * 2**0.5, atol=1e-5)


def recorded(file: Path) -> dict[str, Any]:
    runs = json.loads(file.read_text())
    assert runs["complete"]
    return runs


def test_arms_train_alike(local_ray: None, tmp_path: Path) -> None:
    """On the rows that one of them sampled: log-probs and weights within rounding; ratios of the first update are 1."""
    options = ["--tiny", "--steps", str(STEPS), "--folder", str(tmp_path), "--runs", "record", "replay"]
    grpo_gpus.main([*options, "--json", str(tmp_path / "runs.json")])
    runs = recorded(tmp_path / "runs.json")
    curves = runs["replay"]
    assert list(curves) == ["padded", "packed", "exact"]
    assert not (tmp_path / "runs.part").exists()
    (sampled,) = runs["record"].values()
    assert len(sampled["rewards"]) == STEPS
    for name, curve in curves.items():
        assert curve["rewards"] == pytest.approx(sampled["rewards"])
        assert curve["tokens"] == sampled["tokens"]
        assert max(curve["off"]) <= 1e-5, name
        for key in ("losses", "norms"):
            for one, other in zip(curve[key], sampled[key], strict=True):
                assert one == pytest.approx(other, rel=1e-3, abs=1e-5), (name, key)
        assert all(len(own) == TINY.updates for own in curve["losses"])
        assert all(set(PARTS) - {"sample"} <= set(own) for own in curve["seconds"])
        assert runs["weights off"][name]["of the weights"] <= 1e-6
        assert runs["weights off"][name]["of their change"] <= 1e-2
    assert all(tokens == ones > 0 for tokens, ones in curves["exact"]["first"])
    pairs = zip(curves["packed"]["sent"], curves["padded"]["sent"], strict=True)
    assert all(packed < padded / 10 for packed, padded in pairs)


def test_a_rank_that_dies_is_named_and_its_rows_train_again(local_ray: None) -> None:
    with grpo_gpus.running(grpo_gpus.Packed, TINY, 2, None) as arm:
        batch, old = arm.step(0)
        ray.kill(arm.group.actors[1])
        with pytest.raises(WorkerError, match="rank 1"):
            arm.step(1, batch)
    with grpo_gpus.running(grpo_gpus.Packed, TINY, 2, None) as arm:
        assert_same(arm.step(0, batch)[1], old)
