"""The asynchronous trainer: its rows, a plain loop that trains on them, and runs that are killed and started again."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_workers
from needs import needs

needs("ray")
needs("transformers")

import ray
from own_ray import own_ray
from samples import assert_same
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.store import RolloutLog

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import async_trainer
from async_trainer import QUESTIONS, ROWS, SAMPLES, tiny_model

STEPS = 4
CLOSE = 1e-5  # of a gradient, relative to its norm, and of log-probs around 2.5: float32 rounds to 6e-8


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with own_ray(Path(async_trainer.__file__).parent, num_cpus=4):
        yield


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    async_trainer.train(folder, STEPS)
    return folder


def rows_of(folder: Path, step: int) -> TensorDict:
    with RolloutLog(folder / "rollouts", mode="r") as log:
        return mp.decompress(log[log.where(step=step)])


# -------------------------------------------------------------------- the plain loop


def log_probs(model: Any, row: TensorDict) -> Tensor:
    """Log-probs [S] of the tokens of a padded row that the model wrote; 0 at the others."""
    ids, mask = row["tokens"], row["attention_mask"].long()
    logits = model(input_ids=ids[None], attention_mask=mask[None], use_cache=False).logits[0]
    scores = [logits[place - 1].log_softmax(-1)[ids[place]] * row["train_mask"][place] for place in range(1, len(ids))]
    return torch.stack([torch.zeros(()), *scores])


def loss_of(model: Any, rows: TensorDict) -> Tensor:
    """The mean over the tokens of all rows that the model wrote."""
    total, count = torch.zeros(()), 0
    for row in rows.unbind(0):
        new = log_probs(model, row)
        for place in row["train_mask"].nonzero()[:, 0].tolist():
            ratio = torch.exp(new[place] - row["old_logprobs"][place])
            weight = min(float(torch.exp(row["old_logprobs"][place] - row["sampler_logprobs"][place])), 2.0)
            gain = float(row["advantages"])
            clipped = ratio if 0.8 <= ratio <= 1.2 else torch.tensor(0.8 if ratio < 0.8 else 1.2)
            total = total - weight * torch.minimum(gain * ratio, gain * clipped)
            count += 1
    return total / count


def with_old_logprobs(model: Any, rows: TensorDict) -> TensorDict:
    """The rows with old log-probs, and with the rewards of a question less their mean, by their deviation."""
    rewards = rows["rewards"].tolist()
    groups = [rewards[first : first + SAMPLES] for first in range(0, ROWS, SAMPLES)]
    gains = [(each - statistics.mean(own)) / (statistics.stdev(own) + 1e-6) for own in groups for each in own]
    with torch.no_grad():
        old = torch.stack([log_probs(model, row) for row in rows.unbind(0)])
    return rows.copy().update({"old_logprobs": old, "advantages": torch.tensor(gains)})


def flat(gradients: Any) -> Tensor:
    return torch.cat([each.flatten() for each in gradients])


# -------------------------------------------------------------------- the rows


def check_rows(folder: Path) -> None:
    """Every seed is there once, under the step that it is for, with the version that the step before began with."""
    with RolloutLog(folder / "rollouts", mode="r") as log:
        tags = log.tags(log.rows)
        assert mp.decompress(log[:])["seed"].tolist() == list(range((STEPS + 1) * ROWS))
        assert tags["step"] == [row // ROWS for row in range((STEPS + 1) * ROWS)]
        assert tags["version"] == [max(step - 1, 0) for step in tags["step"]]


def test_every_row_is_in_the_log_once(undisturbed: Path) -> None:
    check_rows(undisturbed)


def test_rows_are_of_the_weights_one_step_before(undisturbed: Path) -> None:
    """The first weights sampled the rows of steps 0 and 1, and those of no later step."""
    model, off = tiny_model(), []
    for step in range(3):
        rows = rows_of(undisturbed, step)
        if step < 2:
            for row in rows.unbind(0):
                own, _ = async_trainer.episode(model, int(row["question"]), int(row["seed"]))
                length = int(row["attention_mask"].sum())
                assert row["tokens"][:length].tolist() == own["tokens"].tolist()
                assert row["train_mask"][:length].tolist() == own["train_mask"].tolist()
                asked = row["tokens"][int(row["train_mask"].nonzero()[0]) - 1]  # the last token of the prompt
                right = int(((row["tokens"] == asked) & row["train_mask"]).sum())
                assert float(row["rewards"]) == pytest.approx(right / 18)
        seen = with_old_logprobs(model, rows)["old_logprobs"]
        off.append(float((seen - rows["sampler_logprobs"]).abs().max()))
    assert max(off[:2]) < CLOSE < 1e-2 < off[2], off


def test_rows_are_sent_packed(undisturbed: Path) -> None:
    for step, seen in enumerate(torch.load(undisturbed / "checkpoint.pt")["curve"]):
        padded = sum(field.nbytes for field in rows_of(undisturbed, step).values()) + 4 * ROWS  # and the advantages
        assert seen["bytes_padded"] == padded
        assert seen["bytes"] < padded / 8


def test_prompts_of_a_group_are_computed_once(undisturbed: Path) -> None:
    for step, seen in enumerate(torch.load(undisturbed / "checkpoint.pt")["curve"]):
        rows = rows_of(undisturbed, step)
        assert seen["tokens"] == int(rows["attention_mask"].sum())
        prompts = [int(row["train_mask"].nonzero()[0]) for row in rows[::SAMPLES].unbind(0)]
        assert len(prompts) == QUESTIONS
        assert sum(prompts) * (SAMPLES - 1) <= seen["shared_tokens"] < seen["tokens"]
        inputs = mp.replay.PackedInputs.of(rows, options=async_trainer.OPTIONS)
        assert inputs.num_tokens == seen["tokens"] - seen["shared_tokens"]


# -------------------------------------------------------------------- the plain loop and the packed one


def test_gradients_are_those_of_a_plain_loop(undisturbed: Path) -> None:
    """Also where ratios are clipped, and weights cut off."""
    model, rng = tiny_model(), torch.Generator().manual_seed(0)
    rows = with_old_logprobs(model, rows_of(undisturbed, 1))
    for name in ("old_logprobs", "sampler_logprobs"):
        noise = torch.randn(rows[name].shape, generator=rng) * 0.3
        rows[name] = torch.where(rows["train_mask"], rows[name] + noise, 0.0)
    loss = loss_of(model, rows)
    expected = flat(torch.autograd.grad(loss, list(model.parameters())))

    learner = async_trainer.Learner()
    packed = mp.compress(rows, **{**async_trainer.STRICT, "strict_mask_nesting": True})
    tree = mp.replay.prefix_tree(packed, options=async_trainer.OPTIONS)
    lengths, loss_tokens = packed.lengths("sequence"), packed.lengths("response")
    plan = mp.planning.plan_micro_batches(lengths, 200, tree=tree, loss_tokens=loss_tokens)
    assert len(plan.micro_batches) > 2
    seen = learner.backward(mp.decompress(packed, format="nested"), plan)
    assert seen == pytest.approx(loss.item(), abs=1e-6)
    off = flat(weights.grad for weights in learner.model.parameters()) - expected
    assert off.norm() <= CLOSE * expected.norm(), off.norm() / expected.norm()


def test_a_plain_loop_trains_alike(undisturbed: Path) -> None:
    """On the rows of the run: losses, norms and weights after all updates of both ranks."""
    state = torch.load(undisturbed / "checkpoint.pt")
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step, seen in enumerate(state["curve"]):
        rows = with_old_logprobs(model, rows_of(undisturbed, step))
        for update, half in enumerate((slice(0, ROWS // 2), slice(ROWS // 2, ROWS))):
            optimizer.zero_grad()
            loss = loss_of(model, rows[half])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert seen["losses"][update] == pytest.approx(loss.item(), abs=1e-6)
            assert seen["norms"][update] == pytest.approx(norm.item(), rel=CLOSE)
    begin, own, theirs = map(flat, (tiny_model().parameters(), model.parameters(), state["model"].values()))
    assert (own - theirs).norm() <= 1e-4 * (own - begin).norm()


# -------------------------------------------------------------------- kills

CHILD = """
import os, runpy, signal, sys
from maskpack.store import RolloutLog

append, calls = RolloutLog.append, []

def counted(*args):
    calls.append(args)
    if len(calls) == 4:
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return append(*args)

RolloutLog.append = counted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def killed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a process that was killed after two steps, when it was about to append the rows of step 3."""
    folder = tmp_path_factory.mktemp("killed")
    command = [*warm_workers.python(), "-c", CHILD, async_trainer.__file__, str(folder), "--steps", str(STEPS)]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    printed = [line.split(" {")[0] for line in done.stdout.splitlines() if line.startswith(("step", "killed"))]
    assert printed == ["step 0", "step 1", "killed"], done.stderr
    return folder


def check_equal(folder: Path, expected: Path) -> None:
    own, theirs = (torch.load(each / "checkpoint.pt") for each in (folder, expected))
    assert own["step"] == theirs["step"] == len(own["curve"]) == STEPS
    assert own["curve"] == theirs["curve"]
    for name in ("model", "optimizer"):
        assert_same(own[name], theirs[name])
    for step in range(STEPS + 1):
        assert_same(rows_of(folder, step), rows_of(expected, step))


def test_killed_and_started_again_it_ends_with_the_same_bits(undisturbed: Path, killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    async_trainer.train(tmp_path, STEPS)
    check_rows(tmp_path)
    check_equal(tmp_path, undisturbed)


def test_a_checkpoint_that_is_older_than_the_log(undisturbed: Path, killed: Path, tmp_path: Path) -> None:
    """Rows of its own weights are not sampled again; those of later weights are, and get other numbers."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    shutil.copy(killed / "checkpoint.pt", tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 2
    async_trainer.train(tmp_path, STEPS)
    with RolloutLog(tmp_path / "rollouts", mode="r") as log:
        assert log.rows.tolist() == [*range(4 * ROWS), *range(5 * ROWS, 6 * ROWS)]
    check_rows(tmp_path)
    check_equal(tmp_path, undisturbed)


def test_a_log_that_lost_rows_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copy(undisturbed / "checkpoint.pt", tmp_path)
    with pytest.raises(RuntimeError, match="ends at row 0; the checkpoint has seen 80"):
        async_trainer.train(tmp_path, STEPS)
