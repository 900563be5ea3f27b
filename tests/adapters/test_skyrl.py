"""SkyRL: pickles of its batches, packed, beside its own."""

from __future__ import annotations

import pickle
import random

import pytest
from needs import needs

needs("skyrl.backends.skyrl_train.training_batch")

import ray
import torch
from pickled import check_pickles
from samples import PAD, freeze
from skyrl.backends.skyrl_train import training_batch as batches
from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor

import maskpack as mp
from maskpack.adapters.skyrl import pickle_tensor_batches


def rollouts(rows=5, kind=batches.TrainingInputBatch, seed=0, longest=9):
    """A batch as SkyRL's trainer makes it: one block padded on the left, whose last R columns hold responses."""
    rng = random.Random(seed)
    shapes = [(rng.randint(1, longest), rng.randint(1, longest)) for _ in range(rows)]
    total, width = max(p + r for p, r in shapes), max(r for _, r in shapes)

    def block(columns, lengths, value, pad=0):
        return torch.tensor([[pad] * (columns - n) + [value() for _ in range(n)] for n in lengths])

    whole, responses = [p + r for p, r in shapes], [r for _, r in shapes]
    batch = kind(
        {
            "sequences": block(total, whole, lambda: rng.randrange(PAD), PAD),
            "attention_mask": block(total, whole, lambda: 1),
            "response_mask": block(width, responses, lambda: 1),
            "loss_mask": block(width, responses, lambda: float(rng.random() < 0.7), 0.0),
            "values": None,
            "rollout_logprobs": block(width, responses, lambda: -rng.random(), 0.0),
            "action_log_probs": block(width, [min(width, n) for n in whole], lambda: -rng.random(), 0.0),
            "advantages": block(width, responses, lambda: 0.25, 0.0).bfloat16(),
            "rollout_expert_indices": PackedTensor.from_segments(
                [
                    torch.tensor([[rng.randrange(300) for _ in range(6)]] * n).to(torch.uint16).view(n, 3, 2)
                    for n in whole
                ]
            ),
            "pixel_values": batches.TensorList([torch.randn(row % 3, 4) for row in range(rows)]),
        }
    )
    batch.metadata = {
        "uids": [f"u{row // 2}" for row in range(rows)],
        "response_length": width,
        "odd": {1: (2.5, None)},
    }
    return batch


def told(batch):
    """All of a batch as plain data that is equal only for the same bits."""

    def entry(value):
        if isinstance(value, batches.TensorList):
            return ("list", freeze(value.tensors))
        return (
            ("packed", freeze(value.values), freeze(value.cu_seqlens))
            if isinstance(value, PackedTensor)
            else freeze(value)
        )

    return type(batch), [(key, entry(value)) for key, value in batch.items()], freeze(vars(batch))


@pytest.fixture
def packed():
    undo = pickle_tensor_batches(pad_token_id=PAD)
    yield
    undo()


@pytest.mark.parametrize("kind", [batches.TensorBatch, batches.TrainingInputBatch])
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_comes_back_as_it_was(packed, kind, protocol, rows):
    batch = rollouts(rows, kind)
    before = told(batch)
    seen = pickle.loads(pickle.dumps(batch, protocol))
    assert told(seen) == told(batch) == before
    assert seen == batch  # by SkyRL's own comparison
    assert told(seen[0:1]) == told(batch[0:1])


def test_values_under_the_mask_come_back(packed):
    batch = rollouts()
    for name, value in (("rollout_logprobs", float("nan")), ("advantages", -0.0), ("loss_mask", 3.5)):
        batch[name][:, 0] = value
    batch["sequences"][:, :3] = 7
    assert told(pickle.loads(pickle.dumps(batch))) == told(batch)


@pytest.mark.parametrize("fields", [{}, {"output": torch.randn(3, 4)}, {"a": torch.arange(3), "b": None}])
def test_batches_without_masks_come_back(packed, fields):
    batch = batches.TensorBatch(fields)
    assert told(pickle.loads(pickle.dumps(batch))) == told(batch)


class Own(batches.TrainingInputBatch):
    """Of a user."""


@pytest.mark.parametrize("kind", [batches.TrainingOutputBatch, Own])
def test_other_classes_are_pickled_as_before(packed, kind):
    batch = rollouts(kind=kind)
    assert b"maskpack" not in pickle.dumps(batch)


def test_pickles_are_packed_until_it_is_undone():
    check_pickles(pickle_tensor_batches, rollouts(64, longest=60), told)


def test_the_batch_is_not_changed(packed):
    batch = rollouts()
    batch["sequences"] = batch["sequences"].T.contiguous().T
    pickle.dumps(batch)
    assert not batch["sequences"].is_contiguous()


def test_batches_on_a_device_are_left_to_skyrl(packed):
    with pytest.raises(AssertionError, match="must be on CPU"):
        pickle.dumps(batches.TensorBatch({"sequences": torch.empty(2, 3, device="meta")}))


def test_unknown_fields_raise():
    batch = rollouts()
    batch["mine"] = torch.ones_like(batch["sequences"])
    undo = pickle_tensor_batches(pad_token_id=PAD, strict_mask_nesting=True)
    try:
        with pytest.raises(mp.errors.CoverageError, match="mine"):
            pickle.dumps(batch)
    finally:
        undo()


def test_ray_carries_packed_batches(local_ray, packed):
    batch = rollouts(64, longest=60)

    @ray.remote
    def echoed(batch):
        return batch  # decoded, and pickled as SkyRL does

    assert told(ray.get(echoed.remote(ray.put(batch)))) == told(batch)
