"""The run on several GPUs, on the CPU with two actors: its task, and that its arms train alike."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
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
from tensordict import TensorDict
from transformers import Qwen3ForCausalLM

import maskpack as mp
from maskpack.errors import WorkerError
from maskpack.store import RolloutLog

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import grpo_gpus
from grpo_gpus import EOS, PAD, PARTS, SIGNS, TINY

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


def check_sampled(rows: TensorDict) -> None:
    """Rewards are those of the question in each prompt, and nothing is behind an end."""
    for prompt, response, mask, seen in zip(*(rows[name].tolist() for name in FIELDS), strict=True):
        asked = text([token for token in prompt if token != PAD]).split("\n")[-1]
        answer = [*grpo_gpus.encoded("".join(sorted(asked[:-1]))), EOS]
        length = response.index(EOS) + 1 if EOS in response else len(response)
        assert mask == [1] * length + [0] * (len(response) - length)
        assert response[length:] == [PAD] * (len(response) - length)
        assert seen == pytest.approx(grpo_gpus.reward(answer, response[:length]))


FIELDS = "prompts", "responses", "response_mask", "rewards"


def test_arms_train_alike(local_ray: None, tmp_path: Path) -> None:
    """On the rows that one of them sampled: log-probs and weights within rounding; ratios of the first update are 1."""
    with RolloutLog(tmp_path / "rows") as log:  # of an earlier run
        log.append(TensorDict({"prompts": torch.ones(3, 2)}, batch_size=[3]))
    options = ["--tiny", "--steps", str(STEPS), "--folder", str(tmp_path), "--runs", "record", "replay"]
    grpo_gpus.main([*options, "--json", str(tmp_path / "runs.json")])
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert runs["complete"]
    curves = runs["replay"]
    assert list(curves) == ["padded", "packed", "exact"]
    assert not (tmp_path / "runs.part").exists()
    (sampled,) = runs["record"].values()
    with RolloutLog(tmp_path / "rows") as log:
        assert len(log) == STEPS * TINY.rows
        check_sampled(mp.decompress(log[:]))
        assert float(mp.decompress(log[: TINY.rows])["rewards"].mean()) == pytest.approx(sampled["rewards"][0])
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
    with pytest.raises(SystemExit, match="is of other settings"):
        grpo_gpus.warm(replace(TINY, layers=1), 2, tmp_path / "start.pt")


def test_updated_weights_sample(local_ray: None, tmp_path: Path) -> None:
    """The responses are those of the weights after the last update, token by token."""
    with grpo_gpus.running(grpo_gpus.Packed, replace(TINY, learning_rate=0.05), 2, None) as arm:
        arm.step(0)
        arm.group.run("save", str(tmp_path / "weights.pt"))
        rows = arm.sample(1)
    model: Any = Qwen3ForCausalLM(TINY.model).eval()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=False)
    for rank, own in enumerate(rows.split(TINY.rows // 2)):
        ids, going = own["prompts"], torch.ones(len(own), dtype=torch.bool)
        mask = (ids != PAD).long()
        torch.manual_seed(2 + rank)
        made = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=TINY.response
        )[:, TINY.prompt :]
        for place in range(TINY.response):
            seen, wanted = own["responses"][:, place], made[:, place] if place < made.shape[1] else going * PAD
            assert seen[going].tolist() == wanted[going].tolist()
            assert own["response_mask"][:, place].tolist() == going.tolist()
            going = going & (seen != EOS)


def test_micro_batches_that_make_up_the_count_change_nothing(local_ray: None) -> None:
    """Of three rows on two ranks, the second rank runs its only one twice."""
    few = replace(TINY, questions=3, samples=2, rows_at_once=2, token_budget=TINY.prompt + TINY.response)
    seen: list[grpo_gpus.Curve] = []
    batch: TensorDict | None = None
    for arm in (grpo_gpus.Padded, grpo_gpus.Packed):
        with grpo_gpus.running(arm, few, 2, None) as own:
            if batch is None:
                batch = own.sample(0)
                batch["advantages"] = torch.linspace(-1, 1, len(batch))[:, None] * batch["response_mask"]
            own.step(0, batch)
            seen.append(own.curve)
    padded, packed = seen
    for key in ("losses", "norms"):
        assert getattr(packed, key)[0] == pytest.approx(getattr(padded, key)[0], rel=1e-4)
    assert batch is not None
    mask, gain = (batch[name][:3] for name in ("response_mask", "advantages"))
    assert padded.losses[0][0] == pytest.approx(-float((gain * mask).sum() / mask.sum()), rel=1e-4)  # ratios are 1
    assert [one.first[0][0] for one in seen] == [int(batch["response_mask"][:3].sum())] * 2


def test_time_of_a_part_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 10.0])
    monkeypatch.setattr(grpo_gpus.time, "perf_counter", lambda: next(clock))
    arm = object.__new__(grpo_gpus.Padded)
    arm._seconds, arm._inside = defaultdict(float), 0.0
    with arm.timed("update"):
        for _ in range(2):
            with arm.timed("send"):
                pass
    assert dict(arm._seconds) == {"update": 7.0, "send": 3.0}


def test_each_arm_on_its_own_samples(local_ray: None, tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    record = grpo_gpus.Record(file, {})
    grpo_gpus.free(record, {"packed": grpo_gpus.Packed}, TINY, 2, 1, None)
    (curve,) = json.loads(file.read_text())["free"].values()
    assert len(curve["rewards"]) == 1
    assert set(curve["seconds"][0]) == set(PARTS)


def test_a_rank_that_dies_is_named_and_its_rows_train_again(local_ray: None) -> None:
    with grpo_gpus.running(grpo_gpus.Packed, TINY, 2, None) as arm:
        batch, old = arm.step(0)
        ray.kill(arm.group.actors[1])
        with pytest.raises(WorkerError, match="rank 1"):
            arm.step(1, batch)
    with grpo_gpus.running(grpo_gpus.Packed, TINY, 2, None) as arm:
        assert_same(arm.step(0, batch)[1], old)
