"""The command line: the demo runs, its comparison can fail, and a missing extra is one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDictBase

import maskpack
from maskpack import cli, demo, demo_rollout
from maskpack.dispatch import WorkerGroup


@pytest.fixture(scope="module")
def batch():
    return demo_rollout.rollout_batch(
        demo_rollout.tiny_model(5), demo_rollout.sums(2, seed=5), responses=3, seed=5, on_end=lambda ended: None
    )


# -------------------------------------------------------------------- the run


def test_demo_runs_from_any_directory(tmp_path):
    """In a process of its own, with a row count that the ranks cannot share evenly."""
    command = [sys.executable, "-m", "maskpack.cli", "demo", "--prompts", "3", "--responses", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "All outputs were bitwise equal" in done.stdout
    assert "all but the model" in done.stdout
    assert "Warning" not in done.stderr


def test_demo_fails_on_one_changed_bit(monkeypatch, capsys):
    class Flipping(WorkerGroup):
        def call(self, method, batch, /, *args, **kwargs):
            output = super().call(method, batch, *args, **kwargs)
            if isinstance(output, TensorDictBase):
                output["entropys"].view(torch.int32)[-1, 0] ^= 1
            return output

    monkeypatch.setattr(demo, "WorkerGroup", Flipping)
    assert cli.main(["demo", "--prompts", "2", "--responses", "2", "--ranks", "1"]) == 1
    shown = capsys.readouterr().out
    assert "THE OUTPUTS DIFFER" in shown
    assert '"entropys" differs in 1 of 4096 values, first in row 3, column 0: ' in shown
    assert "bitwise equal" not in shown


# -------------------------------------------------------------------- the comparison


def test_compare_counts_values_and_takes_nan_as_bits():
    values = {"a": torch.tensor([[1.0, float("nan")], [-0.0, 2.0]]), "b": torch.arange(3), "c": torch.zeros(0, 4)}
    assert demo.compare(values, {name: value.clone() for name, value in values.items()}) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_compare_names_field_place_and_both_values(dtype):
    left = torch.zeros(3, 2, 2, dtype=dtype)
    right = left.clone()
    right[1, 0, 1] = 1
    with pytest.raises(demo.OutputsDiffer) as caught:
        demo.compare({"same": left, "values": left}, {"same": left, "values": right})
    message = str(caught.value)
    assert message.startswith('"values" differs in 1 of 12 values, first in row 1, column 0, 1: ')
    assert repr(left[0, 0, 0].item()) in message
    assert repr(right[1, 0, 1].item()) in message


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
        (torch.tensor([float("nan")]), torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)),
    ],
)
def test_compare_shows_the_bits_of_values_that_look_alike(left, right):
    with pytest.raises(demo.OutputsDiffer, match=r"\(bits 0x[0-9a-f]+\) the padded way; .* \(bits 0x[0-9a-f]+\)"):
        demo.compare({"a": left}, {"a": right})


@pytest.mark.parametrize(
    ("right", "message"),
    [
        ({"b": torch.zeros(2)}, r"gave \['a'\]; maskpack gave \['b'\]"),
        ({"a": torch.zeros(2, dtype=torch.int32)}, r"float32 \(2,\) the padded way; torch.int32 \(2,\)"),
        ({"a": torch.zeros(3)}, r"float32 \(2,\) the padded way; torch.float32 \(3,\)"),
    ],
)
def test_compare_wants_the_same_names_dtypes_and_shapes(right, message):
    with pytest.raises(demo.OutputsDiffer, match=message):
        demo.compare({"a": torch.zeros(2)}, right)


def test_wire_bytes_counts_the_stream_and_the_buffers(batch):
    payload = batch["input_ids"].numel() * 8
    assert payload < demo.wire_bytes(batch.select("input_ids")) < payload + 4096
    array = batch["input_ids"].numpy()
    assert payload < demo.wire_bytes(array) < payload + 512
    assert demo.wire_bytes(maskpack.compress(batch, pad_token_id=demo_rollout.PAD)) < demo.wire_bytes(batch) / 3


# -------------------------------------------------------------------- what it works on


def test_rollouts_are_padded_as_a_trainer_pads_them(batch):
    mask, lengths = batch["response_mask"].bool(), batch["response_mask"].sum(1)
    prompts, responses = batch["prompts"], batch["responses"]
    assert torch.equal(batch["input_ids"], torch.cat([prompts, responses], 1))
    assert torch.equal(batch["attention_mask"][:, demo_rollout.PROMPT_WIDTH :], batch["response_mask"])
    assert torch.equal(mask, torch.arange(mask.shape[1]) < lengths[:, None])
    assert (responses[~mask] == demo_rollout.PAD).all()
    assert (batch["rollout_log_probs"][~mask] == 0).all()
    assert (responses.gather(1, lengths[:, None] - 1) == demo_rollout.EOS).all()
    for row, question in enumerate(question for question in demo_rollout.sums(2, seed=5) for _ in range(3)):
        text = question.prompt.encode()
        assert bytes(prompts[row, -len(text) :].tolist()) == text
        assert (prompts[row, : -len(text)] == demo_rollout.PAD).all()
    assert {value.dtype for value in batch.values() if isinstance(value, torch.Tensor)} == {torch.int64, torch.float32}


def test_workers_score_what_was_sampled(batch):
    """The log-probs of one pass over the padded batch are those of the sampling loop with its cache."""
    threads = torch.get_num_threads()
    try:
        scored = demo_rollout.Trainer(5).log_probs(batch)["old_log_probs"]
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(scored, batch["rollout_log_probs"], atol=1e-4, rtol=1e-4)
    assert (scored[batch["response_mask"] == 0] == 0).all()


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize("name", ["ray", "rich", "transformers"])
def test_missing_extra_is_one_line(name, monkeypatch, capsys):
    monkeypatch.delattr(maskpack, "demo")
    for module in [known for known in sys.modules if known.startswith((f"{name}.", "maskpack.demo"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["demo"]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"maskpack demo: {name} is not installed; run: pip install 'maskpack[demo]'\n"
    assert shown.out == ""


def test_other_missing_modules_are_not_blamed_on_the_extra(monkeypatch):
    monkeypatch.delattr(maskpack, "demo")
    monkeypatch.delitem(sys.modules, "maskpack.demo")
    monkeypatch.setitem(sys.modules, "maskpack.demo_rollout", None)
    with pytest.raises(ModuleNotFoundError, match="demo_rollout"):
        cli.main(["demo"])


def test_cli_imports_nothing_heavy():
    code = "import sys, maskpack.cli; print(sorted({'ray', 'rich', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["demo", "--prompts", "0"], "0 is less than 1"),
        (["demo", "--prompts", "1", "--responses", "1"], "1 rows for 2 ranks"),
    ],
)
def test_wrong_arguments_exit_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
