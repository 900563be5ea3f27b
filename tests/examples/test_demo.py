"""The program of `maskpack demo`: it runs, and its comparison can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_workers
from ray import cloudpickle

import maskpack
from maskpack.dispatch import WorkerGroup

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import demo


@pytest.fixture(scope="module")
def batch():
    return demo.rollout_batch(2, responses=3, seed=5)


# -------------------------------------------------------------------- the run


ROWS = {"to the workers": "trimmed", "back": "trimmed", "the model": "maskpack", "all but the model": "trimmed"}
ROWS |= {"whole": "maskpack"}
"""The rows of the table, and the way without a ratio: it runs the same code as padded."""


def test_demo_runs_from_any_directory(tmp_path):
    """In a process of its own, with a row count that the ranks cannot share evenly."""
    arguments = ["-m", "maskpack.tools.cli", "demo", "--prompts", "3", "--responses", "3", "--seed", "1"]
    command = [*warm_workers.python(), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" s  ")[1] for line in lines if " s  round 1 of 3" in line] == [
        f"round 1 of 3, {way} ..." for way in demo.WAYS
    ]
    for name, same in ROWS.items():
        (number,) = (number for number, line in enumerate(lines) if line.startswith(f"{name}, "))
        cells = [lines[number + 1][22 + 14 * column :][:14].strip() for column in range(4)]
        assert [way for way, cell in zip(demo.WAYS, cells, strict=True) if not cell] == ["padded", same]
        assert all(re.fullmatch(r"[\d,]+\.\d x", cell) for cell in cells if cell)
    assert {line[:10].rstrip() for line in lines if line.endswith(("#", "-"))} == {*demo.WAYS}
    outputs = 9 * demo.RESPONSE_WIDTH * 2 + sum(weights.numel() for weights in demo.tiny_model(1).parameters())
    assert f"bitwise equal to padded: {3 * outputs:,} values in 3 rounds." in done.stdout
    assert re.search(r"At 10 Gbit/s, .* ms -> .* ms \(calculated\)", done.stdout)
    assert re.fullmatch(r"maskpack sent \d+ times fewer bytes to the workers \(\d+ times .*, the same bits;", lines[-2])
    assert re.fullmatch(r"with replay, the model ran [\d.]+ times as .* \(log-probs within \de-\d\d\)\.", lines[-1])
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ("step", '"entropys" differs in 1 of 3072 values, first in (3, 0): '),
        ("replayed_step", '"entropys" differs by more than rounding in 1 of 3072 values, first in (3, 0): '),
    ],
)
def test_demo_fails_on_one_changed_value(called, message, monkeypatch, capsys):
    class Changing(WorkerGroup):
        def call(self, method, batch, /, *args, **kwargs):
            output = super().call(method, batch, *args, **kwargs)
            if method == called:
                output["entropys"].view(torch.int32)[-1, 0] ^= 1 if method == "step" else 1 << 13
            return output

    monkeypatch.setattr(demo, "WorkerGroup", Changing)
    cloudpickle.register_pickle_by_value(demo)
    assert demo.main(["--prompts", "2", "--responses", "2", "--ranks", "1"]) == 1
    shown = capsys.readouterr().out
    assert "THE OUTPUTS DIFFER" in shown
    assert message in shown
    assert "bitwise equal" not in shown


# -------------------------------------------------------------------- the comparison


def test_compare_allows_rounding_of_the_largest_value():
    padded = {"a": torch.tensor([4.0, 1e-3])}
    demo.compare(padded, {"a": padded["a"] + 3e-5}, "replay", rounding=1e-5)
    message = r'"a" differs by more than rounding in 1 of 2 values, first in \(1,\): .* through replay'
    for far in (5e-5, -5e-5, float("nan")):
        with pytest.raises(demo.OutputsDiffer, match=message):
            demo.compare(padded, {"a": padded["a"] + torch.tensor([0.0, far])}, "replay", rounding=1e-5)


def test_wire_bytes_counts_the_stream_and_the_buffers(batch):
    payload = batch["input_ids"].numel() * 8
    assert payload < demo.wire_bytes(batch.select("input_ids")) < payload + 4096
    array = batch["input_ids"].numpy()
    assert payload < demo.wire_bytes(array) < payload + 512
    assert demo.wire_bytes(maskpack.compress(batch, pad_token_id=demo.PAD)) < demo.wire_bytes(batch) / 3


# -------------------------------------------------------------------- what it works on


def test_rollouts_are_padded_as_a_trainer_pads_them(batch):
    mask, lengths = batch["response_mask"].bool(), batch["response_mask"].sum(1)
    prompts, responses = batch["prompts"], batch["responses"]
    assert torch.equal(batch["input_ids"], torch.cat([prompts, responses], 1))
    assert torch.equal(batch["attention_mask"][:, demo.PROMPT_WIDTH :], batch["response_mask"])
    assert torch.equal(mask, torch.arange(mask.shape[1]) < lengths[:, None])
    assert (responses[~mask] == demo.PAD).all()
    assert (responses[mask] != demo.PAD).all()
    for row in range(6):
        assert torch.equal(prompts[row], prompts[row // 3 * 3])
        padding = (prompts[row] == demo.PAD).long()
        assert padding.diff().max() <= 0, "left padded"
    assert (prompts == demo.PAD).any()
    assert {value.dtype for value in batch.values() if isinstance(value, torch.Tensor)} == {torch.int64, torch.float32}


def test_more_ranks_than_rows(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--prompts", "1", "--responses", "1"])
    assert "1 rows for 2 ranks" in capsys.readouterr().err
