"""The benchmark of shared prefixes, on the CPU at tiny sizes: its batches share, both ways give the same numbers."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers")

from bench import prefixes as case
from bench.measure import NotExact
from bench.replay_rivals import Shape, lone_log_probs
from bench.workloads import trajectories

CPU = torch.device("cpu")
SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
GROUPS = case.Groups(20, 8, 3, 2.0)
MODELS = {
    "small": case.Model("A", SHAPE, [case.Groups(17, 12, 2)]),
    "large": case.Model("B", SHAPE, [GROUPS, case.Trajectories(2)]),
}
SIZES = case.Sizes(200, 60, 3, MODELS)
BATCHES = [GROUPS, case.Trajectories(2)]


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other take longer than one over products as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    """Of a hundredth of their tokens; prefixes are as long as before, in messages."""
    monkeypatch.setattr(case, "trajectories", functools.partial(trajectories, scale=0.01))


def stage(of=GROUPS):
    """In float32: bfloat16 has too few rows here to be as far off in both ways."""
    return case.Stage(SHAPE.model(CPU, torch.float32).eval(), SHAPE, of, SIZES, CPU)


def rows_of(batch):
    """The token ids of each row, padded or nested, and the length of its response."""
    if batch["input_ids"].is_nested:
        responses = batch["responses"].offsets().diff().tolist()
        return list(zip(batch["input_ids"].unbind(), responses, strict=True))
    mask = batch["attention_mask"].bool()
    responses = mask[:, -batch["responses"].shape[1] :].sum(1).tolist()
    return [(ids[real], n) for ids, real, n in zip(batch["input_ids"], mask, responses, strict=True)]


# -------------------------------------------------------------------- the case


def test_a_model_has_its_rows_and_targets(measured, monkeypatch):
    monkeypatch.setattr(case, "_SLACK", 5)  # bfloat16 on a few rows
    rows = measured("prefixes", lambda _, rounds, **more: case.run(10, rounds, sizes=SIZES, **more), "--only", "large")
    wanted = {}
    for batch, least in (("20 : 8, G = 3", "2.0"), ("trajectories", "1.3")):
        name = f"prefixes, shape of B, {batch}"
        wanted[name, "rms error, shared / whole rows"] = "<= 1.05"
        wanted[f"{name}, {case.BOTH}", "whole rows / shared"] = f">= {least}"
        wanted[f"{name}, {case.BOTH}", "tree, plan and inputs / shared"] = "<= 0.03"
        for step in (case.FORWARD, case.BOTH):
            assert rows[f"{name}, {step}", "shared"]["value"] > 0
            assert rows[f"{name}, {step}", "whole rows"]["unit"] == "ms"
            assert rows[f"{name}, {step}", "peak, whole rows"]["unit"] == "GiB"
    assert {key: row["target"] for key, row in rows.items() if row["target"]} == wanted
    assert all(name.startswith("prefixes, shape of B,") for name, _ in rows)


def test_the_tokens_of_a_group_are_its_prompt_and_its_responses():
    made = stage()
    rows = {row.name: row.value for row in made.described("prefixes")}
    count, tokens = len(made.lengths), int(made.lengths.sum())
    shared = (count - count // 3) * 20
    assert (rows["rows"], rows["tokens of rows"]) == (count, tokens)
    assert rows["tokens of the tree / tokens of rows"] == pytest.approx(1 - shared / tokens)
    assert 1 < rows["tokens of rows / tokens computed"] <= tokens / (tokens - shared)
    assert sum(made.inputs(False)) == tokens


def test_shared_prefixes_that_are_off_raise(monkeypatch):
    exact = case.response_log_probs

    def off(*given, share_prefixes, **more):
        return exact(*given, share_prefixes=share_prefixes, **more) + 1e-2 * share_prefixes

    monkeypatch.setattr(case, "response_log_probs", off)
    off_by = r"a case: shared is 0\.01 off float32 \(rms\); whole rows are (0|\d.*e-0[6-9]) off"
    with pytest.raises(NotExact, match=off_by):
        case._errors("a case", stage())


def test_a_group_that_does_not_exist_raises():
    with pytest.raises(ValueError, match="prefixes: no group smal; expected some of small, large"):
        case.run(10, 1, only=["large", "smal"], sizes=SIZES)


# -------------------------------------------------------------------- batches


@pytest.mark.parametrize("tokens", [1, 200, 1000])
def test_groups_share_their_prompts_and_have_responses_of_several_lengths(tokens):
    batch = GROUPS.batch(tokens, 97)
    count = batch.batch_size[0]
    assert count == 3 * max(2, round(tokens / 84))
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert batch["attention_mask"][:, :20].all()
    groups = batch["prompts"].view(-1, 3, 20)
    assert (groups == groups[:, :1]).all()
    assert len({tuple(prompt) for prompt in groups[:, 0].tolist()}) == count // 3
    lengths = batch["attention_mask"][:, 20:].sum(1)
    assert {*lengths.tolist()} == {6, 7, 8}
    assert len({tuple(ids.tolist()) for ids, _ in rows_of(batch)}) == count
    assert torch.equal(batch["position_ids"], (batch["attention_mask"].cumsum(1) - 1).clamp(min=0))


def test_trajectories_are_those_of_the_workloads(monkeypatch):
    monkeypatch.undo()
    seen, wanted = case.Trajectories(3).batch(1, 997), trajectories(997, tasks=3)
    assert seen.batch_size == (12,)
    assert seen.keys() == wanted.keys()
    assert all((seen[name] == wanted[name]).all() for name in wanted.keys())  # noqa: SIM118


# -------------------------------------------------------------------- both ways


@pytest.mark.parametrize("of", BATCHES, ids=["groups", "trajectories"])
@pytest.mark.parametrize("shares", [False, True])
def test_parts_hold_every_row_once(of, shares):
    made = stage(of)
    seen = [(*ids.tolist(), n) for part in made.parts(shares) for ids, n in rows_of(part)]
    assert sorted(seen) == sorted((*ids.tolist(), n) for ids, n in rows_of(made.padded))


def test_parts_that_share_are_fewer():
    counts = [len(list(stage().parts(shares))) for shares in (False, True)]
    assert counts[1] < counts[0]


@pytest.mark.parametrize("of", BATCHES, ids=["groups", "trajectories"])
@pytest.mark.parametrize("shares", [False, True])
def test_log_probs_and_gradients_are_those_of_each_row_alone(of, shares):
    made = stage(of)
    rows = [row for part in made.parts(shares) for row in rows_of(part)]
    model = made.replay.release()
    wanted = torch.cat([lone_log_probs(model, *row) for row in rows])
    gradients = torch.autograd.grad(wanted.sum(), list(model.parameters()))
    seen = torch.cat(list(made.log_probs(shares)))
    torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(seen.sum(), list(model.parameters())), gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
