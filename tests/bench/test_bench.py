"""The benchmarks measure what they say: workloads of the right bytes and shape, exact rivals, results of one schema."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import maskpack
from bench import __main__ as command
from bench import baselines, floors, measure, nest, payload, payload_experts, payload_rivals, report
from bench.workloads import (
    MOST_ROWS,
    PAD_ID,
    PROMPT_WIDTH,
    RESPONSE_WIDTH,
    VARIANTS,
    WORKLOADS,
    batch_of,
    lengths,
    make_batch,
    trajectories,
)
from maskpack.layout.prefix_tree import PrefixTree

P, R, ROWS = 37, 229, 33
SMALL = {"prompt_width": P, "response_width": R}
SCALE = 0.016
FOLDER = Path(measure.__file__).parent


def small(variant="reference", seed=0):
    return make_batch(variant, ROWS, **SMALL, seed=seed)


# -------------------------------------------------------------------- workloads


def test_the_reference_workload_has_the_bytes_and_fill_of_the_figures():
    batch = make_batch(rows=8)
    assert sum(field.nbytes for field in batch.values()) == 8 * 1_097_728
    assert batch["attention_mask"].shape == (8, PROMPT_WIDTH + RESPONSE_WIDTH)
    assert batch["attention_mask"].double().mean().item() == pytest.approx(0.084, rel=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_gives_one_batch_padded_left_and_right(variant):
    batch = small(variant)
    measure.require_same(variant, small(variant), batch)
    with pytest.raises(measure.NotExact):
        measure.require_same(variant, small(variant, seed=1), batch)
    real = batch["attention_mask"].bool()
    prompt, response = real[:, :P], real[:, P:]
    assert torch.equal(prompt, prompt.cummax(1).values)
    assert torch.equal(response, response.flip(1).cummax(1).values.flip(1))
    assert (batch["input_ids"][~real] == PAD_ID).all()
    assert (batch["old_log_probs"][~response] == 0).all()
    assert (batch["old_log_probs"][response] < 0).all()


def test_the_reference_workload_has_the_redundancy_of_grpo():
    batch = small()
    response = batch["attention_mask"][:, P:]
    for begin in range(0, ROWS, 16):
        group = batch["prompts"][begin : begin + 16]
        assert (group == group[0]).all()
    assert not torch.equal(batch["prompts"][0], batch["prompts"][16])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert torch.equal(batch["position_ids"], (batch["attention_mask"].cumsum(1) - 1).clamp(min=0))
    assert torch.equal(batch["advantages"], batch["advantages"][:, :1] * response)
    scores = batch["token_level_scores"]
    assert torch.equal(scores.sum(1), scores[torch.arange(ROWS), response.sum(1) - 1])


def test_variants_have_holes_and_negative_zeros():
    batch = small("multi-turn")
    real, on = batch["attention_mask"][:, P:].bool(), batch["response_mask"].bool()
    assert not (on & ~real).any()
    assert (real & ~on).any()
    assert (batch["advantages"][~on] == 0).all()
    batch = small("negative-zeros")
    product = batch["advantages"][:, :1] * batch["response_mask"]
    measure.require_same_tensor("advantages", batch["advantages"], product)
    assert product.signbit()[batch["response_mask"] == 0].any()
    with pytest.raises(ValueError, match="multi-urn"):
        make_batch("multi-urn")


def rows_of(batch):
    """The valid tokens of each row."""
    return [ids[mask != 0].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def naive_trie_size(rows):
    nodes = {}
    for row in rows:
        at = 0
        for token in row:
            at = nodes.setdefault((at, token), len(nodes) + 1)
    return len(nodes)


def test_trajectories_share_what_their_messages_share():
    file = json.loads((FOLDER / "tau_airline.json").read_text())
    counts, prefixes, total = file["tokens"], set(), 0
    for task, roles, texts in file["rows"]:
        assert len(roles) == len(texts)
        total += sum(counts[text] for text in texts)
        prefixes |= {(task, *texts[: k + 1]) for k in range(len(texts))}
    distinct = sum(counts[prefix[-1]] for prefix in prefixes)
    assert (total, distinct) == (708_278, 476_345)
    assert distinct / total == pytest.approx(0.6725, abs=1e-4)

    batch = trajectories(4000)
    assert batch["uid"].tolist() == [task for task in range(50) for _ in range(4)]
    rows = rows_of(batch)
    assert sum(map(len, rows)) == total
    assert sum(naive_trie_size(rows[begin : begin + 4]) for begin in range(0, 200, 4)) == distinct
    trees = [
        PrefixTree.from_ids(np.concatenate(group), np.cumsum([0, *map(len, group)]), min_shared=1)
        for group in (rows[begin : begin + 4] for begin in range(0, 200, 4))
    ]
    assert sum(tree.num_tokens for tree in trees) == distinct


@pytest.mark.parametrize(("vocabulary", "tasks", "scale"), [(4000, 3, 0.05), (40, 2, 0.01), (152_000, 50, 1e-9)])
def test_trajectories_are_padded_prompts_and_responses(vocabulary, tasks, scale):
    batch = trajectories(vocabulary, tasks=tasks, scale=scale)
    file = json.loads((FOLDER / "tau_airline.json").read_text())
    counts = [max(1, round(scale * count)) for count in file["tokens"]]
    p, mask, sampled = batch["prompts"].shape[1], batch["attention_mask"], batch["response_mask"]
    assert len(batch) == 4 * tasks
    for row, (task, roles, texts) in enumerate(file["rows"][: 4 * tasks]):
        by_token = [role for role, text in zip(roles, texts, strict=True) for _ in range(counts[text])]
        begin = by_token.index("a")
        assert torch.equal(mask[row].nonzero()[:, 0], torch.arange(p - begin, p - begin + len(by_token)))
        assert sampled[row, : len(by_token) - begin].tolist() == [role == "a" for role in by_token[begin:]]
        assert not sampled[row, len(by_token) - begin :].any()
        assert batch["uid"][row] == task
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert torch.equal(batch["position_ids"], (mask.cumsum(1) - 1).clamp(min=0))
    assert (batch["input_ids"][mask == 0] == vocabulary - 1).all()
    assert 0 <= batch["input_ids"].min() <= batch["input_ids"][mask != 0].max() < vocabulary - 1
    measure.require_same("trajectories", trajectories(vocabulary, tasks=tasks, scale=scale), batch)
    assert rows_of(trajectories(vocabulary, tasks=1, scale=scale)) == rows_of(batch)[:4]
    if scale > 1e-9:
        assert rows_of(trajectories(vocabulary, tasks=tasks, scale=scale, seed=1)) != rows_of(batch)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_one_batch_with_its_lengths(name):
    rows, of = WORKLOADS[name], lengths(name, WORKLOADS[name], scale=0.01)
    batch = batch_of(name, rows, scale=0.01)
    measure.require_same(name, batch_of(name, rows, scale=0.01), batch)
    real, sampled = batch["attention_mask"] != 0, batch["response_mask"] != 0
    p = of.prompt_width
    assert batch["prompts"].shape == (rows, p)
    assert batch["responses"].shape == (rows, of.response_width)
    assert real[:, :p].sum(1).tolist() == of.prompt.tolist()
    assert real[:, p:].sum(1).tolist() == of.response.tolist()
    assert (batch["input_ids"][~real] == PAD_ID).all()
    assert (sampled & ~real[:, p:]).sum() == 0
    assert (batch["rollout_log_probs"][~sampled] == 0).all()
    assert (batch["old_log_probs"][real[:, p:]] < 0).all()
    assert ("values" in batch.keys()) == (name == "mooncake")  # noqa: SIM118
    for field in ("old_log_probs", "ref_log_prob", "entropys"):  # no fill that a compressor would like
        values = batch[field][real[:, p:]]
        assert values.unique().numel() > 0.99 * values.numel()


def test_tau_has_the_lengths_groups_and_holes_of_its_trajectories():
    of, data = lengths("tau", 200), json.loads((FOLDER / "tau_airline.json").read_text())
    totals = [sum(data["tokens"][text] for text in texts) for _, _, texts in data["rows"]]
    assert (of.prompt + of.response).tolist() == totals
    assert (of.prompt_width, of.response_width) == (1607, 6692)
    batch, all_rows = batch_of("tau", 6, scale=0.05), trajectories(PAD_ID + 1, tasks=2, scale=0.05)
    assert rows_of(batch) == rows_of(all_rows)[:6]
    begin = batch["prompts"].shape[1]
    real, sampled = batch["attention_mask"][:, begin:] != 0, batch["response_mask"] != 0
    holes = (real & ~sampled) & (sampled.flip(1).cummax(1).values.flip(1))
    assert holes.any(1).all()  # before the last token of the assistant
    advantages = batch["advantages"]
    assert all(len(row[on].unique()) == 1 for row, on in zip(advantages, sampled, strict=True))
    assert (advantages[~sampled] == 0).all()
    batch = batch_of("tau", 40, scale=0.02)
    of_rows = [row[on != 0][0] for row, on in zip(batch["advantages"], batch["response_mask"], strict=True)]
    of_groups = torch.stack(of_rows).view(10, 4)
    assert of_groups.sum(1).abs().max() < 1e-4
    assert of_groups.any(1).sum() > 2


def test_mooncake_has_pairs_of_its_requests_each_once():
    data = json.loads((FOLDER / "mooncake_lengths.json").read_text())
    pairs = list(zip(data["prompt"], data["response"], strict=True))
    assert len(pairs) == MOST_ROWS["mooncake"]
    every = lengths("mooncake", len(pairs))
    assert sorted(zip(every.prompt.tolist(), every.response.tolist(), strict=True)) == sorted(pairs)
    few = lengths("mooncake", 256)
    assert set(zip(few.prompt.tolist(), few.response.tolist(), strict=True)) <= set(pairs)
    assert (few.prompt_width, few.response_width) == (few.prompt.max(), few.response.max())
    batch = batch_of("mooncake", 9, scale=0.01)
    assert batch["advantages"][batch["response_mask"] != 0].unique().numel() == batch["response_mask"].sum()
    assert len({tuple(ids) for ids in batch["prompts"].tolist()}) == 9


def test_workloads_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="workload is 'ta'; expected one of reference, tau, mooncake"):
        lengths("ta", 3)
    with pytest.raises(ValueError, match="variant is 'ta'"):
        batch_of("ta", 3)
    for name, most in (("tau", "200"), ("mooncake", "12,031")):
        for rows in (0, MOST_ROWS[name] + 1):
            with pytest.raises(ValueError, match=f"rows is {rows}; {name} has {most}"):
                batch_of(name, rows)


@pytest.mark.parametrize("tasks", [0, -1, 51])
def test_trajectories_of_no_task_are_refused(tasks):
    with pytest.raises(ValueError, match=f"tasks is {tasks}; expected 1 to 50"):
        trajectories(100, tasks=tasks)


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


def test_the_usual_code_agrees_with_ours_on_holes_and_restores():
    batch = small("multi-turn")
    usual, ours = baselines.nest(batch), maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID)
    for name in batch.keys() - {"attention_mask"}:
        measure.require_same_tensor(name, usual[name], ours[name])
    measure.require_same("unnest", baselines.unnest(usual, baselines.masks_of(batch), tuple(batch.keys())), batch)
    runs, layout = (
        baselines.mask_runs(batch["response_mask"] != 0),
        maskpack.RowLayout.from_mask(batch["response_mask"]),
    )
    assert torch.equal(runs["starts"].values(), layout.starts.long())
    assert torch.equal(runs["lengths"].values(), layout.counts.long())


# -------------------------------------------------------------------- floors and rivals


def test_the_read_floor_adds_all_words():
    sizes = (0, 1, 7, 64, 127, 4097, 2**20, 0, 3 * 2**20 + 13)  # threads take pieces of 2**20 bytes
    fields = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    words = [np.frombuffer(field.numpy().tobytes() + bytes(-len(field) % 8), np.uint64) for field in fields]
    total = int(np.concatenate(words).sum())
    assert floors.read(fields) == floors.read(fields, threads=2) == total
    with pytest.raises(ValueError, match="1 or 2 threads"):
        floors.read(fields, threads=3)
    with pytest.raises(ValueError, match="contiguous"):
        floors.read([fields[-1][::2]])


def test_the_copy_floor_copies():
    fields = [torch.randn(3, 5), torch.arange(1001), torch.empty(0)]
    for field, copy in zip(fields, floors.copy(fields), strict=True):
        assert copy.data_ptr() != field.data_ptr() or not field.nbytes
        measure.require_same_tensor("copy", copy, field)
    with pytest.raises(ValueError, match="contiguous"):
        floors.copy([fields[0].T])


def test_the_write_floor_writes_as_much():
    fields = [torch.randn(3, 5), torch.arange(1001), torch.empty(0)]
    written = floors.write(fields)
    assert [one.nbytes for one in written] == [field.nbytes for field in fields]
    assert all((one == 1).all() for one in written)


def test_a_missing_compiler_or_rival_is_named_with_its_remedy(monkeypatch):
    floors._floor.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no no-such-compiler.*apt-get install gcc"):
        floors.read([torch.zeros(1)])
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(ModuleNotFoundError, match=r"lz4.*pip install -e '.\[bench\]'"):
        importlib.reload(payload_rivals)


def test_torch_threads_are_restored():
    before = torch.get_num_threads()
    with measure.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# -------------------------------------------------------------------- cases and their command


def test_payload_has_its_targets(measured):
    variants = ["reference", "multi-turn", "routed-experts"]
    rows = measured("payload", lambda rows, rounds: payload.run(rows, rounds, scale=SCALE, only=variants))
    targets = {key: row["target"] for key, row in rows.items() if row["target"]}
    assert targets["payload reference", "padded / maskpack"] == ">= 59"
    assert targets["payload multi-turn", "padded / maskpack"] == ">= 42"
    verified = "compress, verify=always / one read of the padded bytes"
    assert targets["payload reference", verified] == "<= 1.25"
    assert targets["payload reference, 40 rows", verified] == "<= 1.12"
    assert targets["payload reference, two threads", verified] == "<= 1.2"
    memory = "peak memory of compress beyond the packed bytes / padded"
    assert targets["payload reference", memory] == "<= 0.01"
    assert rows["payload reference, two threads", memory]["target"] is None
    restored = "decompress, padded / one write of the padded bytes"
    assert targets["payload reference", restored] == "<= 0.9"
    assert targets["payload reference, fresh pages", restored] == "<= 0.4"
    assert targets["payload reference", "maskpack / zstd level 1 of the padded buffers, bytes"] == "<= 0.69"
    assert rows["payload reference", "blosc2 of the padded buffers, decode / decompress, padded"]["target"] is None
    chain = "compress + pickle.dumps + pickle.loads + decompress"
    assert targets["payload 16 rows of 64 + 128", chain] == "<= 120"
    assert ("payload routed-experts", "routed_experts alone") in targets


@pytest.mark.parametrize("workload", ["tau", "mooncake"])
def test_payload_of_a_real_workload_has_its_rivals_and_floors(measured, workload):
    run = functools.partial(payload.run, scale=0.01)
    rows = measured("payload", lambda rows, rounds, **more: run(rows, rounds, **more), "--workload", workload)
    case = f"payload {workload}"
    assert {name for name, _ in rows} == {case, f"{case}, two threads"}
    assert not any(row["target"] for row in rows.values())
    for name in ("zstd level 1", "lz4"):
        assert rows[case, f"{name} of the padded buffers"]["unit"] == "bytes/row"
        for way in ("encode / compress, verify=always", "decode / decompress, padded"):
            assert rows[case, f"{name} of the padded buffers, {way}"]["unit"] == "x"
    for name in ("compress, verify=always / one read", "decompress, padded / one write"):
        assert rows[case, f"{name} of the padded bytes"]["unit"] == "x"


def test_payload_has_the_targets_of_routers(measured, monkeypatch):
    monkeypatch.setattr(payload_experts, "_SMALL", ((1, P, R),))
    monkeypatch.setattr(payload_experts, "_CHAINS", 2)
    variants = ["routed-experts-deep", "routed-experts-skewed"]
    rows = measured("payload", lambda rows, rounds: payload.run(rows, rounds, scale=SCALE, only=variants))
    targets = {key: row["target"] for key, row in rows.items() if row["target"]}
    deep, skewed = (f"payload {variant}, 5 rows" for variant in variants)
    assert targets[deep, "routed_experts, maskpack"] == "<= 7.35"
    assert targets[skewed, "one byte an id with zstd / maskpack with zstd"] == ">= 1.5"
    for format in ("padded", "nested"):
        assert targets[deep, f"decompress 12 layers, {format} / decompress 48 layers, {format}"] == "<= 0.3"
    assert rows[deep, "routed_experts, one byte an id with zstd"]["unit"] == "bits/id"


def test_skewed_routers_have_favourites_that_last():
    experts = small("routed-experts-skewed")
    ids = experts["routed_experts"][experts["attention_mask"] != 0].long()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()  # eight different ones
    for layer in (0, 47):
        counts = torch.bincount(ids[:, layer].flatten(), minlength=128).double()
        share = counts[counts > 0] / counts.sum()
        assert 0.11 < 1 + (share * share.log2()).sum() / 7 < 0.19
    first = torch.bincount(ids[:, 0].flatten(), minlength=128).argsort(descending=True)[:8]
    second = torch.bincount(ids[:, 1].flatten(), minlength=128).argsort(descending=True)[:8]
    assert set(first.tolist()) != set(second.tolist())


def test_nest_has_its_targets(measured):
    rows = measured("nest", lambda rows, rounds: nest.run(rows, rounds, **SMALL))
    assert {row["target"] for row in rows.values()} == {None, ">= 15", "<= 2.7", "<= 1.35"}


def test_payload_raises_where_a_bit_is_lost(monkeypatch):
    decompress = maskpack.decompress

    def lossy(packed, **more):
        batch = decompress(packed, **more)
        batch["advantages"].view(-1)[-1] = -0.0
        return batch

    monkeypatch.setattr(maskpack, "decompress", lossy)
    with pytest.raises(measure.NotExact, match="advantages"):
        payload.run(ROWS, 1, scale=SCALE, only=["reference"])


def test_a_target_is_met_from_its_bound_on():
    def met(value, target):
        return report.Row("case", "name", value, "x", target).met

    assert [met(15.0, ">= 15"), met(14.99, ">= 15"), met(4.0, "<= 4"), met(4.01, "<= 4")] == [True, False, True, False]
    assert met(1.0, None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nest", "--rows", "0"], "0 is not at least 1"),
        (["nest", "--only", "pack"], "nest has no groups"),
        (["nest", "--plot", "chart.svg"], "nest has no chart"),
        (["nest", "--workload", "tau"], "--workload is for payload, dispatch, plan, replay"),
        (["payload", "--workload", "tau", "--only", "ppo"], "--only is for the case without --workload"),
        (["all"], "all needs --report, and no other case takes"),
        (["plan", "--report", "x.md"], "all needs --report, and no other case takes"),
        (["plan", "--recorded", "x"], "all needs --report, and no other case takes"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, message, capsys):
    with pytest.raises(SystemExit):
        command.main(given)
    assert message in capsys.readouterr().err
