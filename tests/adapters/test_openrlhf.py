"""OpenRLHF: pickles of its Experience, packed, beside its own."""

from __future__ import annotations

import pickle
import random

import pytest
from needs import needs

needs("openrlhf.trainer.ppo_utils.experience")

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from own_ray import own_ray
from pickled import check_pickles
from samples import PAD, freeze

import maskpack as mp
from maskpack.adapters.openrlhf import pickle_experiences


def sample(rng, prompt, response, critic):
    """One row as OpenRLHF's generator and trainer make it: values are of the tokens after the first."""
    total = prompt + response
    action = torch.tensor([[int(prompt - 1 <= t < total - 1 and rng.random() < 0.8) for t in range(total - 1)]])

    def scored():
        return torch.tensor([[-rng.random() for _ in range(total - 1)]]) * action

    reward = torch.tensor([float(rng.random() < 0.5)])
    return Experience(
        sequences=torch.tensor([[rng.randrange(PAD) for _ in range(total)]]),
        attention_mask=torch.ones(1, total, dtype=torch.long),
        action_mask=action,
        action_log_probs=scored(),
        base_action_log_probs=scored().bfloat16(),
        values=scored() if critic else None,
        returns=reward[:, None].expand(1, total - 1).clone(),
        advantages=reward[:, None] - 0.25 * torch.ones(1, total - 1),
        rewards=reward,
        truncated=torch.tensor([False]),
        total_length=torch.tensor(float(total))[None],
        index=[rng.randrange(9)],
        prompts=["a prompt"],
        labels=[None],
        mm_train_inputs=[{"pixel_values": torch.ones(2, 3)}],
        info={"reward": reward, "kl": scored().sum(1), "note": ["x"]},
    )


def rollouts(rows=5, seed=0, longest=9, critic=True):
    rng = random.Random(seed)
    rows = [sample(rng, rng.randint(1, longest), rng.randint(1, longest), critic) for _ in range(rows)]
    return Experience.concat_experiences(rows, PAD)


def told(experience):
    """All of an Experience as plain data that is equal only for the same bits."""
    return type(experience), freeze(vars(experience))


@pytest.fixture
def packed():
    undo = pickle_experiences(pad_token_id=PAD)
    yield
    undo()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("critic", [False, True])
def test_a_batch_comes_back_as_it_was(packed, protocol, rows, critic):
    batch = rollouts(rows, critic=critic)
    before = told(batch)
    assert told(pickle.loads(pickle.dumps(batch, protocol))) == told(batch) == before


def test_single_samples_and_the_batches_of_them_come_back(packed):
    """As its replay buffer splits, trims and joins them."""
    singles = split_experience_batch(rollouts())
    seen = pickle.loads(pickle.dumps(singles))
    assert [told(one) for one in seen] == [told(one) for one in singles]
    for single in singles:
        del single.info["note"]
    joined = make_experience_batch(remove_padding_in_sequences(singles))
    assert joined.sequences.dim() == 2
    assert told(pickle.loads(pickle.dumps(joined))) == told(joined)


@pytest.mark.parametrize(
    "changes",
    [
        {"info": {}},
        {"info": {3: torch.ones(5)}},
        {"info": None},
        {"rewards": torch.tensor(2.5), "kl": torch.ones(3, 2)},
        {"mine": torch.ones(5, 4), "also": {"info": torch.ones(5)}},
        {"mine": torch.nn.Parameter(torch.ones(5, 3))},
    ],
)
def test_unusual_entries_come_back(packed, changes):
    batch = rollouts()
    vars(batch).update(changes)
    for given in (batch, Experience()):
        assert told(pickle.loads(pickle.dumps(given))) == told(given)


def test_values_under_the_mask_come_back(packed):
    batch = rollouts()
    for name, value in (("values", float("nan")), ("advantages", -0.0), ("action_log_probs", 3.5)):
        getattr(batch, name)[:, [0, -1]] = value
    batch.sequences[:, -2:] = 7
    assert told(pickle.loads(pickle.dumps(batch))) == told(batch)


def test_a_field_of_another_width_raises(packed):
    batch = rollouts()
    batch.advantages = batch.advantages[:, 1:]
    with pytest.raises(mp.errors.LayoutError, match="advantages"):
        pickle.dumps(batch)


def test_pickles_are_packed_until_it_is_undone():
    check_pickles(pickle_experiences, rollouts(64, longest=60), told)


# -------------------------------------------------------------------- Ray


@pytest.fixture
def local_ray():
    """A Ray whose workers pack what they send."""

    def pack():
        pickle_experiences(pad_token_id=PAD)

    with own_ray(num_cpus=2, worker_process_setup_hook=pack):
        yield


def test_a_hook_makes_the_workers_of_ray_pack(local_ray):
    batch = rollouts(64, longest=60)

    @ray.remote
    def echoed(batch):
        return len(pickle.dumps(batch)), batch

    size, back = ray.get(echoed.remote(batch))
    assert told(back) == told(batch)
    assert size < len(pickle.dumps(batch)) / 4


def test_a_leaf_of_one_sample_stays_a_leaf(packed) -> None:
    """A tensor that wants gradients is carried as it is, and gets no dim of rows."""
    leaf = torch.ones(3, requires_grad=True)
    sample = Experience(sequences=torch.arange(3), attention_mask=torch.ones(3).long(), values=leaf)
    again = pickle.loads(pickle.dumps(sample))
    assert again.values.requires_grad
    assert again.values.is_leaf
    assert again.values.shape == (3,)
    assert again.sequences.tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(Experience(sequences=[1, 2]))).sequences == [1, 2]
