"""The benchmarks of replay, on the CPU at tiny sizes: they end, and the ways that they do not compare are compared."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers")

from bench import models, prefixes, ranks, replay, replay_images, replay_workloads, routes
from bench.replay_rivals import HybridShape, Shape, lone_log_probs
from bench.workloads import WORKLOADS, trajectories

CPU = torch.device("cpu")
SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
HYBRID = HybridShape(32, 4, 2, 1, 8, 48, 97, delta_heads=2, delta_dim=8)
MODELS = {"small": replay.Model("A", SHAPE, 2, 2), "hybrid": replay.Model("C", HYBRID, 2, 0)}
SIZES = replay.Sizes(10, 7, 29, 0.3, token_budget=40, padded_rows=3, compared=3, models=MODELS)
IMAGES = replay_images.Sizes(
    rows=9, group=4, sides=(2, 6), text_width=20, response_width=21, padded_rows=2,
    shape=replay_images.Shape(
        hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocabulary=97, vision_hidden=32, vision_layers=2,
        vision_heads=2, vision_intermediate=48, patch=2,
    ),
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def test_models_are_replayed(measured, monkeypatch):
    monkeypatch.setattr(replay.Stage, "compiled", replay.Stage.replay)
    rows = measured("replay", lambda rows, rounds: replay.run(10, rounds, sizes=SIZES))
    for name in "AC":
        assert (f"replay, shape of {name}, {replay.BOTH}", "padded / ours") in rows
    assert rows["replay, shape of A", "rms error, padded"]["value"] < 0.05


def test_images_are_replayed(measured, monkeypatch):
    made = replay_images.Shape.model
    monkeypatch.setattr(replay_images.Shape, "model", lambda shape, device: made(shape, device, torch.float32))
    monkeypatch.setattr(replay_images, "Sizes", lambda: IMAGES)
    rows = measured("replay", replay.run, "--only", "images")
    assert ("replay of images, shape of Qwen2.5-VL, " + replay.BOTH, "padded / ours") in rows


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_are_replayed(measured, workload):
    run = functools.partial(replay_workloads.run, shape=SHAPE, scale=0.01)
    rows = measured("replay", lambda rows, rounds, workload: run(workload, rows, rounds), "--workload", workload)
    name = f"replay {workload}, scale 1 / 100, {replay.BOTH}"
    assert (name, replay_workloads.PADDED) in rows


def test_prefixes_are_shared(measured, monkeypatch):
    monkeypatch.setattr(prefixes, "_SLACK", 5)  # bfloat16 on a few rows
    monkeypatch.setattr(prefixes, "trajectories", functools.partial(trajectories, scale=0.01))
    of = {"large": prefixes.Model("B", SHAPE, [prefixes.Groups(20, 8, 3, 2.0), prefixes.Trajectories(2)])}
    sizes = prefixes.Sizes(200, 60, 3, of)
    rows = measured("prefixes", lambda _, rounds: prefixes.run(10, rounds, sizes=sizes))
    for batch in ("20 : 8, G = 3", "trajectories"):
        assert (f"prefixes, shape of B, {batch}, {prefixes.BOTH}", "whole rows / shared") in rows


def test_routes_are_replayed(measured):
    sizes = routes.Sizes(6, 4, 12, 0.5, 24, 32, 2, 4, 2, 8, 6, 2, 16, 97, torch.float32)
    rows = measured("routes", lambda _, rounds: routes.run(rounds=rounds, sizes=sizes))
    assert f"{routes.REPLAYED} / {routes.OWN}" in {name for _, name in rows}


def test_ranks_share_work(measured):
    sizes = ranks.Sizes(SHAPE, ((3, 5, 4), (1, 9, 6)), (ranks.Head(11, 8, 97),), torch.float32)
    rows = measured("ranks", lambda _, rounds: ranks.measured("gloo", 2, sizes, ["context", "heads"]))
    assert f"{ranks.ALONE} / {ranks.SHARED}" in {name for _, name in rows}


def test_classes_of_transformers_are_swept():
    names = ("Qwen3ForCausalLM", "BloomForCausalLM", "MusicgenForCausalLM")
    found = models.sweep(names, lambda one: None)
    assert {one.name: one.way for one in found} == dict(
        zip(names, (models.PACKED, models.REFUSED, models.UNKNOWN), strict=True)
    )
    assert "1 packed" in models.page(found)


# -------------------------------------------------------------------- ways that the benchmarks time without comparing


def test_rivals_of_replay_give_the_log_probs_of_each_row_alone(monkeypatch):
    stage = replay.Stage(MODELS["small"], SIZES, CPU)
    stage.__dict__["causal_lm"] = SHAPE.model(CPU, torch.float32).eval()
    monkeypatch.setattr(replay, "once", lambda model, parts, backward: parts)
    works = stage.works(replay.FORWARD)
    for name, rows in ((stage.padded_name, stage.rows), (replay.DENSE, stage.even)):
        with torch.no_grad():
            seen = [row for part in works[name].run() for row in part]
        own = stage.replay.release()
        for row, ids, mask, count in zip(
            seen, rows.padded["input_ids"], rows.padded["attention_mask"], rows.responses.tolist(), strict=False
        ):
            alone = lone_log_probs(own, ids[mask.bool()], count)
            torch.testing.assert_close(row[:count], alone, rtol=1e-4, atol=1e-4)
            assert not row[count:].any()


def test_ways_of_images_agree():
    stage = replay_images.Stage(IMAGES, CPU)
    stage.__dict__["model"] = IMAGES.shape.model(CPU, torch.float32).eval()
    with torch.no_grad():
        padded = replay_images.padded_log_probs(stage.replay.release(), stage.padded, stage.images, 3)
        total = sum(float(part.sum()) for part in padded)
        for share, parts in stage.works().values():
            assert share < 1 or sum(float(part.sum()) for part in parts()) == pytest.approx(total, rel=1e-5)
