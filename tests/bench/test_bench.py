"""The benchmarks measure what they say: workloads of the right bytes and shape, exact rivals, results of one schema."""

from __future__ import annotations

import json

import pytest
import torch

import maskpack
from bench import __main__ as command
from bench import baselines, measure, nest, payload, report
from bench.workloads import PAD_ID, PROMPT_WIDTH, RESPONSE_WIDTH, VARIANTS, make_batch

P, R, ROWS = 37, 229, 33
INT64 = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
FLOAT32 = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropys",
    "advantages",
    "returns",
    "token_level_scores",
    "token_level_rewards",
)


def small(variant="reference", seed=0):
    return make_batch(variant, ROWS, prompt_width=P, response_width=R, seed=seed)


# -------------------------------------------------------------------- workloads


def test_the_reference_workload_has_the_bytes_dtypes_and_fill_of_the_figures():
    batch = make_batch(rows=8)
    assert set(batch.keys()) == {*INT64, *FLOAT32}
    assert all(batch[name].dtype == torch.int64 for name in INT64)
    assert all(batch[name].dtype == torch.float32 for name in FLOAT32)
    assert sum(field.nbytes for field in batch.values()) == 8 * 1_097_728
    assert batch["attention_mask"].shape == (8, PROMPT_WIDTH + RESPONSE_WIDTH)
    assert batch["attention_mask"].double().mean().item() == pytest.approx(0.084, rel=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_seed_gives_one_batch(variant):
    measure.require_same(variant, small(variant), small(variant))
    with pytest.raises(measure.NotExact):
        measure.require_same(variant, small(variant, seed=1), small(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_padded_prompts_left_and_responses_right(variant):
    batch = small(variant)
    real = batch["attention_mask"].bool()
    prompt, response = real[:, :P], real[:, P:]
    assert torch.equal(prompt, prompt.cummax(1).values)
    assert torch.equal(response, response.flip(1).cummax(1).values.flip(1))
    assert prompt.any(1).all()
    assert response.any(1).all()
    assert (batch["input_ids"][~real] == PAD_ID).all()
    for name in FLOAT32:
        assert (batch[name][~response] == 0).all(), name
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob"):
        scored = batch["response_mask"].bool() if name == "rollout_log_probs" else response
        assert (batch[name][scored] < 0).all(), name


def test_the_reference_workload_has_the_redundancy_of_grpo():
    batch = small()
    response = batch["attention_mask"][:, P:]
    last = response.sum(1) - 1
    rows = torch.arange(ROWS)
    for begin in range(0, ROWS, 16):
        group = batch["prompts"][begin : begin + 16]
        assert (group == group[0]).all()
    assert not torch.equal(batch["prompts"][0], batch["prompts"][16])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert torch.equal(batch["position_ids"], (batch["attention_mask"].cumsum(1) - 1).clamp(min=0))
    assert torch.equal(batch["response_mask"], response)
    assert torch.equal(batch["returns"], batch["advantages"])
    assert torch.equal(batch["advantages"], batch["advantages"][:, :1] * response)
    assert torch.equal(batch["token_level_rewards"], batch["token_level_scores"])
    assert torch.equal(batch["token_level_scores"].sum(1), batch["token_level_scores"][rows, last])


def test_multi_turn_has_holes_inside_the_response():
    batch = small("multi-turn")
    real = batch["attention_mask"][:, P:].bool()
    on = batch["response_mask"].bool()
    rows = torch.arange(ROWS)
    assert (on & ~real).sum() == 0
    assert (real & ~on).sum() > 0
    assert on[:, 0].all()
    assert on[rows, real.sum(1) - 1].all()
    assert (batch["advantages"][~on] == 0).all()
    assert (batch["old_log_probs"][real & ~on] != 0).all()


def test_negative_zeros_are_the_product_of_advantage_and_mask():
    batch = small("negative-zeros")
    product = batch["advantages"][:, :1] * batch["response_mask"]
    measure.require_same_tensor("advantages", batch["advantages"], product)
    assert (batch["advantages"].view(torch.int32)[batch["response_mask"] == 0] != 0).any()


def test_m_rope_positions_are_padded_with_one_or_with_the_nearest():
    ones, edge = small("m-rope"), small("m-rope-edge")
    real = ones["attention_mask"].bool()
    assert ones["position_ids"].shape == (ROWS, 4, P + R)
    assert edge["position_ids"].shape == (ROWS, 3, P + R)
    assert (ones["position_ids"].movedim(1, 2)[~real] == 1).all()
    last = P + real[:, P:].sum(1) - 1
    for row in range(ROWS):
        positions = edge["position_ids"][row]
        assert (positions[:, last[row] :] == positions[:, last[row], None]).all()
        assert torch.equal(positions[:, real[row]], ones["position_ids"][row, 1:, real[row]])


def test_the_other_variants_have_their_fields():
    assert small("routed-experts")["routed_experts"].shape == (ROWS, P + R, 4, 8)
    assert small("routed-experts")["routed_experts"].dtype == torch.int16
    assert small("ppo")["values"].shape == (ROWS, R)
    assert not torch.equal(small("ppo")["returns"], small("ppo")["advantages"])
    jagged, padded = small("jagged-prompts")["prompts"], small()
    assert jagged.is_nested
    assert torch.equal(jagged.values(), padded["prompts"][padded["attention_mask"][:, :P].bool()])


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="multi-urn"):
        make_batch("multi-urn")


# -------------------------------------------------------------------- measuring


def test_the_check_of_exactness_sees_every_difference():
    batch = small()
    changed = batch.clone()
    changed["advantages"][3, 5] += 1
    signed = batch.clone()
    signed["entropys"][:, -1] = -0.0
    reordered = batch.select(*reversed(list(batch.keys())))
    for other in (changed, signed, reordered, batch[:-1], batch.exclude("returns"), batch.float()):
        with pytest.raises(measure.NotExact):
            measure.require_same("test", other, batch)


def test_rounds_rotate_and_the_first_does_not_count():
    calls = []
    ms = measure.interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3)
    assert "".join(calls) == "abcbcacababc"
    assert list(ms) == ["a", "b", "c"]


def test_wire_bytes_count_buffers_out_of_band():
    array = torch.zeros(100_000).numpy()
    assert array.nbytes < measure.wire_bytes(array) < array.nbytes + 1000


def test_the_usual_code_agrees_with_ours_on_holes_and_restores():
    batch = small("multi-turn")
    masks = baselines.masks_of(batch)
    usual = baselines.nest(batch)
    ours = maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID)
    for name in batch.keys() - {"attention_mask"}:
        measure.require_same_tensor(name, usual[name], ours[name])
    measure.require_same("unnest", baselines.unnest(usual, masks, tuple(batch.keys())), batch)
    runs = baselines.mask_runs(batch["response_mask"] != 0)
    layout = maskpack.RowLayout.from_mask(batch["response_mask"])
    assert torch.equal(runs["starts"].values(), layout.starts.long())
    assert torch.equal(runs["lengths"].values(), layout.counts.long())
    assert torch.equal(runs["starts"].offsets(), layout.splits)


# -------------------------------------------------------------------- cases


@pytest.mark.parametrize("variant", VARIANTS)
def test_payload_runs_and_every_variant_comes_back(variant):
    rows = payload.run(ROWS, 1, prompt_width=P, response_width=R, variants=[variant])
    ratio = next(row for row in rows if row.name == "padded / maskpack")
    assert ratio.value > 1
    assert ratio.target == {"reference": ">= 47", "multi-turn": ">= 42"}.get(variant)
    targets = {row.name: row.target for row in rows if row.target}
    timed = {"compress, verify=always / read": "<= 1.6", "decompress, nested / memcpy": "<= 3"}
    assert (timed.items() <= targets.items()) == (variant == "reference")
    assert ("routed_experts alone" in targets) == (variant == "routed-experts")


def test_payload_raises_where_a_bit_is_lost(monkeypatch):
    decompress = maskpack.decompress

    def lossy(packed, **more):
        batch = decompress(packed, **more)
        batch["advantages"].view(-1)[-1] = -0.0
        return batch

    monkeypatch.setattr(maskpack, "decompress", lossy)
    with pytest.raises(measure.NotExact, match="advantages"):
        payload.run(ROWS, 1, prompt_width=P, response_width=R, variants=["reference"])


def test_nest_runs_with_its_targets():
    rows = nest.run(ROWS, 1, prompt_width=P, response_width=R)
    assert {row.target for row in rows} == {None, ">= 15", "<= 4"}
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize("case", ["payload", "nest", "dispatch"])
def test_the_command_prints_a_table_and_writes_json(case, tmp_path, capsys, monkeypatch):
    run = command.CASES[case]
    more = {"payload": {"variants": ["reference"]}, "dispatch": {"speeds": ()}}.get(case, {})
    small_run = lambda rows, rounds: run(rows, rounds, prompt_width=P, response_width=R, **more)  # noqa: E731
    monkeypatch.setitem(command.CASES, case, small_run)
    file = tmp_path / "figures.json"
    command.main([case, "--rows", "5", "--rounds", "1", "--json", str(file)])
    shown = capsys.readouterr()
    written = json.loads(file.read_text())
    assert list(written) == ["machine", "versions", "commit", "rows"]
    assert list(written["machine"]) == ["cpu", "cores", "memory_gib"]
    assert [*written["versions"]][:5] == ["python", "torch", "tensordict", "numpy", "maskpack"]
    assert f"{case} reference" in shown.out
    assert f"{case}" in shown.err
    for row in written["rows"]:
        assert list(row) == ["case", "name", "value", "unit", "target", "met"]
        assert (row["target"] is None) == (row["met"] is None)
        assert row["name"] in shown.out


def test_a_target_is_met_from_its_bound_on():
    def met(value, target):
        return report.Row("case", "name", value, "x", target).met

    assert [met(15.0, ">= 15"), met(14.99, ">= 15"), met(4.0, "<= 4"), met(4.01, "<= 4")] == [True, False, True, False]
    assert met(1.0, None) is None


def test_rows_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["nest", "--rows", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err
