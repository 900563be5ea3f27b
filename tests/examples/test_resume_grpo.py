"""The worked GRPO run that is killed: it goes on, samples and trains nothing twice, and ends with the same bits."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm_workers
from samples import assert_same

from maskpack import decompress
from maskpack.store import RolloutLog

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import resume_grpo

STEPS = 8
LINES = STEPS * (resume_grpo.QUESTIONS + 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    resume_grpo.train(folder, STEPS)
    return folder


def run(folder: Path, lines: int | None = None, seconds: float = 0) -> list[str]:
    """What the example prints in a process of its own, which is killed some time after a number of lines."""
    command = [*warm_workers.python(), resume_grpo.__file__, str(folder), "--steps", str(STEPS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(lines or 0)]
        if lines is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        seen += process.stdout.readlines()
    assert process.returncode == (0 if lines is None else -signal.SIGKILL)
    return [line.strip() for line in seen if line]


def check_equal(folder: Path, expected: Path) -> None:
    states = [torch.load(each / "checkpoint.pt") for each in (folder, expected)]
    assert states[0]["step"] == states[1]["step"] == STEPS
    assert states[0]["row"] == states[1]["row"] == STEPS * resume_grpo.QUESTIONS * resume_grpo.SAMPLES
    for what in ("policy", "optimizer"):
        assert_same(states[0][what], states[1][what])
    logs = [RolloutLog(each / "rollouts", mode="r") for each in (folder, expected)]
    assert logs[0].rows.tolist() == logs[1].rows.tolist() == list(range(states[0]["row"]))
    assert logs[0].tags(logs[0].rows) == logs[1].tags(logs[1].rows)
    assert_same(decompress(logs[0][:]), decompress(logs[1][:]))


def test_killed_three_times_it_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    rng = random.Random(44)
    printed: list[str] = []
    done = 0
    for _ in range(3):
        lines = rng.randint(2, 9)
        printed += run(tmp_path, lines, rng.random() / 100)
        done += lines
    assert done < LINES
    printed += run(tmp_path)
    check_equal(tmp_path, undisturbed)
    for what in ("sampled", "trained"):
        events = [re.sub(r", .*", "", line) for line in printed if what in line]
        assert len(events) == len(set(events))
    assert any("found" in line for line in printed)
    assert printed[-1].startswith(f"step {STEPS - 1} trained")


def test_an_older_checkpoint_leaves_out_the_rows_of_other_weights(undisturbed: Path, tmp_path: Path) -> None:
    """Rows of its own step are used again; those of later steps are deleted, and sampled again."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint.pt").unlink()
    policy = resume_grpo.train(tmp_path, STEPS)
    expected = torch.load(undisturbed / "checkpoint.pt")["policy"]
    for name, weights in policy.state_dict().items():
        assert_same(weights, expected[name])
    with RolloutLog(tmp_path / "rollouts") as log:
        own = resume_grpo.QUESTIONS * resume_grpo.SAMPLES
        assert log.rows.tolist() == [*range(own), *range(STEPS * own, (2 * STEPS - 1) * own)]


def test_a_log_that_lost_rows_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copy(undisturbed / "checkpoint.pt", tmp_path)
    with pytest.raises(RuntimeError, match="ends at row 0; the checkpoint was trained on 256 rows"):
        resume_grpo.train(tmp_path, STEPS)


def test_it_learns(undisturbed: Path) -> None:
    with RolloutLog(undisturbed / "rollouts", mode="r") as log:
        first, last = (decompress(log[log.where(step=step)])["rewards"].mean() for step in (0, STEPS - 1))
    assert last > first
