"""The benchmark of rows with images, on the CPU at tiny sizes: all ways give the same log-probs and gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from bench import replay as case
from bench import replay_images as images
from bench.measure import NotExact

CPU = torch.device("cpu")
SHAPE = images.Shape(
    hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocabulary=97, vision_hidden=32, vision_layers=2,
    vision_heads=2, vision_intermediate=48, patch=2,
)  # fmt: skip
SIZES = images.Sizes(rows=9, group=4, sides=(2, 6), text_width=20, response_width=21, padded_rows=2, shape=SHAPE)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(images.Shape, "model", in_float32(images.Shape.model))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_float32(made):
    return lambda shape, device: made(shape, device, torch.float32)


def test_it_has_its_rows_and_targets(monkeypatch):
    monkeypatch.setattr(images, "Sizes", lambda: SIZES)
    rows = {(row.case, row.name): row for row in case.run(9, 1, only=["images"])}
    name = "replay of images, shape of Qwen2.5-VL"
    for step in (case.FORWARD, case.BOTH):
        assert rows[f"{name}, {step}", "padded / ours"].target == ">= 2"
        assert rows[f"{name}, {step}", "peak, ours / padded"].target == "<= 1"
    assert rows[name, "rows"].value == 9
    assert rows[name, "rms error, ours"].value < 1e-5


def test_ours_that_is_off_raises(monkeypatch):
    exact = images.response_log_probs
    monkeypatch.setattr(images, "response_log_probs", lambda *given, **more: exact(*given, **more) + 1e-2)
    with pytest.raises(NotExact, match="ours is"):
        images.run(SIZES, 1, CPU)


def test_positions_are_those_of_the_model():
    stage = images.Stage(SIZES, CPU)
    for row, image in enumerate(stage.images):
        real = stage.padded["attention_mask"][row].bool()
        ids = stage.padded["input_ids"][row][real][None]
        kinds = (ids == SHAPE.image_token).int()
        want = stage.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=image["image_grid_thw"])[0]
        assert torch.equal(stage.padded["position_ids"][row][:, real], want[:, 0])


@pytest.mark.parametrize("backward", [False, True])
def test_all_ways_give_the_same(backward):
    stage = images.Stage(SIZES, CPU)
    found = {}
    for name, (share, parts) in stage.works().items():
        stage.model.zero_grad()
        stage.model.train(backward)
        total = 0.0
        for log_probs in parts():
            log_probs.sum().backward()
            total += float(log_probs.sum().detach())
        if share == 1:
            found[name] = total, {key: weight.grad.clone() for key, weight in stage.model.named_parameters()}
        else:
            assert share == 8 / 9
    every = images.padded_log_probs(stage.replay.release(), stage.padded, stage.images, 3)
    stage.model.zero_grad()
    total = sum(one.sum() for one in every)
    total.backward()
    assert len(found) == 2
    for seen, gradients in found.values():
        assert seen == pytest.approx(float(total.detach()), rel=1e-5)
        for key, weight in stage.model.named_parameters():
            torch.testing.assert_close(gradients[key], weight.grad, rtol=1e-3, atol=1e-4)
