"""The replay benchmark, on the CPU at tiny sizes: all ways give the same log-probs and gradients, FLOPs are right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode

from bench import __main__ as command
from bench import replay as case
from bench.measure import NotExact
from bench.replay_rivals import HybridShape, Shape

CPU = torch.device("cpu")
SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
MODELS = {"small": case.Model("A", SHAPE, padded=2, even=2), "large": case.Model("B", SHAPE, padded=9, even=1)}
HYBRID = HybridShape(32, 4, 2, 1, 8, 48, 97, delta_heads=2, delta_dim=8)
MODELS["hybrid"] = case.Model("C", HYBRID, padded=2, even=0, target=">= 3")
SIZES = case.Sizes(10, 7, 29, 0.3, token_budget=40, padded_rows=3, compared=3, models=MODELS)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other take longer than one over products as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stage(group="small"):
    made = case.Stage(MODELS[group], SIZES, CPU)
    made.__dict__["causal_lm"] = MODELS[group].shape.model(CPU, torch.float32).eval()
    return made


def naive(model, rows):
    """Log-probs of every response token of each row: the row alone, one token at a time."""
    found = []
    batch = rows.padded
    for ids, mask, prompt in zip(batch["input_ids"], batch["attention_mask"], rows.prompts, strict=True):
        real = torch.tensor([int(token) for token, is_real in zip(ids, mask, strict=True) if is_real])
        logits = model(input_ids=real[None], use_cache=False).logits[0].double()
        places = range(int(prompt) - 1, len(real) - 1)
        found.append(torch.stack([logits[at].log_softmax(0)[real[at + 1]] for at in places]))
    return found


# -------------------------------------------------------------------- the case


def test_a_model_has_its_rows_and_targets(measured):
    rows = measured("replay", lambda rows, rounds, **more: case.run(10, 1, sizes=SIZES, **more), "--only", "large")
    model = "replay, shape of B"
    wanted = {(model, "rms error, ours / each row alone"): "<= 1"}
    for step in (case.FORWARD, case.BOTH):
        wanted[f"{model}, {step}", "padded / ours"] = ">= 3.5"
        wanted[f"{model}, {step}", "rate, ours / ours, rows of one length"] = ">= 0.95"
        wanted[f"{model}, {step}", "rate, ours / own attention, dense rows of one length"] = ">= 0.95"
        wanted[f"{model}, {step}", "peak, ours / padded"] = "<= 1"
    assert {key: row["target"] for key, row in rows.items() if row["target"]} == wanted
    assert rows[model, "real tokens"]["value"] == stage().rows.lengths.sum()
    assert rows[model, "micro-batches of 40 tokens"]["value"] == len(stage().plan.micro_batches)
    with pytest.raises(ValueError, match="smal"):
        case.run(10, 1, only=["smal"], sizes=SIZES)


def test_a_hybrid_runs_packed_and_padded(measured):
    rows = measured("replay", lambda rows, rounds, **more: case.run(10, 1, sizes=SIZES, **more), "--only", "hybrid")
    model = "replay, shape of C"
    wanted = {(model, "rms error, ours / each row alone"): "<= 1"}
    for step in (case.FORWARD, case.BOTH):
        wanted[f"{model}, {step}", "padded / ours"] = ">= 3"
        wanted[f"{model}, {step}", "peak, ours / padded"] = "<= 1"
    assert {key: row["target"] for key, row in rows.items() if row["target"]} == wanted
    assert rows[model, "layers that carry state, run by rows"]["value"] == 3


def test_ours_that_is_off_raises(monkeypatch):
    exact = case.response_log_probs
    monkeypatch.setattr(case, "response_log_probs", lambda *given: exact(*given) + 1e-2)
    with pytest.raises(NotExact, match=r"shape of A: ours is 0\.(01|0099) off"):
        case.run(10, 1, only=["small"], sizes=SIZES)


def test_the_command_takes_groups_and_a_round_for_three(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        case, "_of_model", lambda *given: seen.append(given) or [case.Row("c", given[0].name, 1.0, "x")]
    )
    monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
    file = tmp_path / "figures.json"
    command.main(["replay", "--only", "large", "--json", str(file)])
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["Qwen3-4B"]
    command.main(["replay", "--rows", "8", "--rounds", "4"])
    assert [(model.name, sizes.rows, rounds) for model, sizes, rounds, _ in seen] == [
        ("Qwen3-4B", 256, 3),
        ("Qwen3-0.6B", 8, 2),
        ("Qwen3-4B", 8, 2),
        ("12 layers of Qwen3.5, 3 gated delta nets to 1 attention", 8, 2),
    ]


# -------------------------------------------------------------------- works


@pytest.mark.parametrize("group", ["small", "hybrid"])
@pytest.mark.parametrize("step", [case.FORWARD, case.BOTH])
def test_every_work_gives_the_log_probs_and_gradients_of_each_row_alone(step, group, monkeypatch):
    made = stage(group)
    model, backward = made.causal_lm, step == case.BOTH
    rows = {case.OURS: made.rows, case.COMPILED: made.rows, made.padded_name: made.rows}
    if made.model.even:
        rows |= {case.EVEN: made.even, case.DENSE: made.even}
    monkeypatch.setattr(case, "once", lambda _model, parts, backward: (parts, backward))
    for name, work in made.works(step).items():
        parts, both = work.run
        assert both == backward
        count = round(work.share * SIZES.rows)
        model.zero_grad()
        want = naive(made.replay.release(), rows[name])[:count]
        torch.cat(want).sum().backward()
        gradients = {key: weight.grad.clone() for key, weight in model.named_parameters()}
        model.zero_grad()
        model.train(backward)
        seen = []
        for log_probs in parts():
            log_probs.sum().backward()
            seen.append(log_probs.detach())
        model.eval()
        for key, weight in model.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[key], rtol=1e-3, atol=1e-4)
        if name in (case.OURS, case.COMPILED, case.EVEN):
            order = [row for micro_batch in _micro_batches(made, name) for row in micro_batch]
            values = torch.cat([want[row] for row in order])
            torch.testing.assert_close(torch.cat(seen), values.float(), rtol=1e-4, atol=1e-4)
        else:
            for row, one in zip(torch.cat(seen), want, strict=True):
                torch.testing.assert_close(row[: len(one)], one.float(), rtol=1e-4, atol=1e-4)
                assert not row[len(one) :].any()


def _micro_batches(made, name):
    if name in (case.OURS, case.COMPILED):
        return made.plan.micro_batches
    count = made.even.lengths.size // made.model.even
    return case.plan_micro_batches(made.even.lengths, count * int(made.even.lengths[0])).micro_batches


def test_a_pass_leaves_no_gradients_and_checkpoints_only_to_train():
    made, runs = stage(), []
    made.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    case.response_log_probs(made.replay, made.rows.nested)  # its comparison of a row, done once
    for backward in (False, True):
        runs.clear()
        case.once(made.causal_lm, lambda: case.replayed(made.replay, made.rows.nested, made.plan), backward)()
        assert all(weight.grad is None for weight in made.causal_lm.parameters())
        assert len(runs) == len(made.plan.micro_batches) * (2 if backward else 1)
        assert any(runs) == backward


# -------------------------------------------------------------------- FLOPs and rows


def test_flops_of_products_are_those_that_torch_counts():
    model = SHAPE.model(CPU).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(11)[None], use_cache=False)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    one = np.array([11])
    assert SHAPE.flops(one, one) - 4 * 2 * 4 * 8 * 66 == counted  # scores, and the sums of values
    parameters = {name: model.shape.parameters for name, model in case.MODELS.items()}
    hybrid = parameters.pop("hybrid")
    assert parameters == {"small": 440_401_920, "large": 3_633_315_840}  # 0.44 and 3.6 billion beside embeddings
    with torch.device("meta"):
        layers = case.MODELS["hybrid"].shape.model(torch.device("meta")).model.layers
    assert hybrid == sum(part.weight.numel() for part in layers.modules() if isinstance(part, torch.nn.Linear))


def test_lengths_fill_their_share_and_groups_share_a_prompt_length():
    prompts, responses = case.prompt_and_response_lengths(case.Sizes())
    assert prompts.size == responses.size == 256
    assert all(len(set(prompts[at : at + 16].tolist())) == 1 for at in range(0, 256, 16))
    for lengths, width in ((prompts, 512), (responses, 3584)):
        assert 0.4 * width < lengths.max() <= width
        assert 0.249 * width <= lengths.mean() <= 0.25 * width
