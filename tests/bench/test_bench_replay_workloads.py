"""Replay of the workloads by a tiny model: all ways see all rows, give the same log-probs, and a wrong one is named."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers")

from bench import prefixes
from bench import replay_workloads as case
from bench.measure import NotExact
from bench.replay import BOTH, FORWARD
from bench.replay_rivals import Shape, lone_log_probs
from bench.workloads import WORKLOADS, batch_of, lengths

SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
CPU = torch.device("cpu")


def stage(workload, rows=6, scale=0.01, budget=300):
    of = case.Scaled(workload, rows, scale)
    model = SHAPE.model(CPU, torch.float32).eval()
    return case.Stage(model, SHAPE, of, prefixes.Sizes(token_budget=budget), CPU)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_has_its_ways_and_ratios(measured, workload):
    run = functools.partial(case.run, shape=SHAPE, scale=0.01)
    measured_rows = functools.partial(measured, "replay", lambda rows, rounds, workload: run(workload, rows, rounds))
    rows = measured_rows("--workload", workload)
    name = f"replay {workload}, scale 1 / 100"
    of = lengths(workload, 5, scale=0.01)
    assert rows[name, "tokens of rows"]["value"] == (of.prompt + of.response).sum()
    assert rows[name, "padded width"]["value"] == of.prompt_width + of.response_width
    for step in (FORWARD, BOTH):
        for way in (case.PADDED, case.TRIMMED, case.WHOLE, case.SHARED):
            assert rows[f"{name}, {step}", way]["value"] > 0
        assert rows[f"{name}, {step}", "padded, trimmed / whole rows"]["unit"] == "x"


def test_ids_are_folded_into_the_vocabulary_with_their_equalities():
    seen, full = case.Scaled("tau", 8, 0.02).batch(1, 97), batch_of("tau", 8, scale=0.02)
    mask = full["attention_mask"] != 0
    assert torch.equal(seen["input_ids"][mask], full["input_ids"][mask] % 96)
    assert (seen["input_ids"][~mask] == 96).all()
    assert torch.equal(torch.cat([seen["prompts"], seen["responses"]], 1), seen["input_ids"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_padded_ways_give_the_log_probs_of_each_row_alone(workload):
    made = stage(workload)
    model, width = made.replay.release(), made.padded["responses"].shape[1]
    alone = {}
    with torch.no_grad():
        for row, (ids, mask) in enumerate(zip(made.padded["input_ids"], made.padded["attention_mask"], strict=True)):
            alone[row] = lone_log_probs(model, ids[mask != 0], int(mask[-width:].sum()))
        for trimmed, order in ((False, range(6)), (True, made.by_length)):
            seen = [row for part in made.padded_parts(trimmed) for row in part]
            for log_probs, row in zip(seen, order, strict=True):
                torch.testing.assert_close(log_probs[: len(alone[row])], alone[row], rtol=1e-5, atol=1e-5)
                assert not log_probs[len(alone[row]) :].any()


def test_trimmed_parts_are_as_wide_as_their_longest_rows():
    made = stage("mooncake")
    for part in made.padded[made.by_length].split(case.PADDED_ROWS):
        mask, p = part["attention_mask"], part["prompts"].shape[1]
        prompt, response = int(mask[:, :p].sum(1).max()), int(mask[:, p:].sum(1).max())
        small = case.cut(part)
        assert small["prompts"].shape[1] == prompt
        assert small["responses"].shape[1] == response
        assert torch.equal(small["input_ids"], part["input_ids"][:, p - prompt : p + response])
        assert small["position_ids"].shape == small["attention_mask"].shape == small["input_ids"].shape


def test_a_way_that_is_off_is_named(monkeypatch):
    exact = case.response_log_probs

    def off(*given, share_prefixes, **more):
        return exact(*given, share_prefixes=share_prefixes, **more) + 1e-2 * share_prefixes

    monkeypatch.setattr(case, "response_log_probs", off)
    with pytest.raises(NotExact, match=r"log-probs of shared are 0\.01 from those of padded"):
        case.run("tau", 4, 1, scale=0.01, shape=SHAPE)
