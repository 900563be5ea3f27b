"""verl's V1 trainer over TransferQueue, on the CPU: its agent loop workers, replay buffer, worker groups and trainers,
with the tiny parts of `examples/verl_v1_parts.py` in place of the GPU engines. Each backend must leave the same bits as
TransferQueue's own."""

from __future__ import annotations

import itertools
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from needs import needs

needs("verl")
needs("transfer_queue")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl_v1_cpu as v1
import verl_v1_workers as full
from frozen import agree, freeze
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.skip import SkipManager
from verl.workers.utils.losses import value_loss

BACKENDS = ["SimpleStorage", "Maskpack"]
_numbers = itertools.count()


@pytest.fixture(scope="module", params=BACKENDS)
def queue(request):
    """TransferQueue over one backend, on a Ray of its own: the clients of a process are global."""
    v1.start_ray(Path(full.__file__).parent, Path(v1.__file__).parent)
    try:
        tq.init(
            OmegaConf.create(
                {"backend": {"storage_backend": request.param, request.param: {"num_data_storage_units": 2}}}
            )
        )
        yield request.param
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture
def partition(queue) -> str:
    yield (name := f"partition-{next(_numbers)}")
    if keys := list(tq.kv_list(name).get(name, {})):
        tq.kv_clear(keys, name)


# -------------------------------------------------------------------- trainers

OVERRIDES = {
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "n": 2,
            "temperature": 0.8,
            "agent": {"num_workers": 1, "default_agent_loop": "full"},
            "val_kwargs": {"n": 2},
        },
        "actor": {"ppo_mini_batch_size": 3, "use_dynamic_bsz": True, "ppo_epochs": 2, "shuffle": True},
    },
    "data": {"train_batch_size": 3},
    "trainer": {
        "n_gpus_per_node": 2,
        "total_epochs": 9,
        "total_training_steps": 2,
        "logger": [],
        "test_freq": 2,
        "resume_mode": "disable",
    },
    "tiny": {"failing": [], "turns": True, "images": False, "rewards": True, "experts": False},
}
SCENARIOS = {
    "images, experts and several outputs": {
        "actor_rollout_ref": {
            "rollout": {"moe_load_balance_metrics_interval": 1},
            "actor": {"use_kl_loss": True, "entropy_coeff": 0.01},
        },
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
        "tiny": {"images": True, "experts": True},
    },
    "a critic and a colocated reward": {
        "algorithm": {"adv_estimator": "gae", "lam": 0.9, "use_kl_in_reward": True},
        "tiny": {"rewards": False, "turns": False},
    },
    "sessions that fail": {
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": True}},
        "tiny": {"failing": [[1, 1], [4, 0]]},
    },
}
UNSTEADY = re.compile(r"timing|perf/(time|throughput|cpu|max_memory)")


def configured(*overrides, **trainer):
    return v1.configured(OVERRIDES, *overrides, {"trainer": trainer})


def prompts(count, batch):
    """A dataloader: what verl's collate_fn makes of `count` prompts."""
    loader = []
    for begin in range(0, count, batch):
        rows = range(begin, begin + batch)
        columns = {
            "raw_prompt": [[{"role": "user", "content": "é" * row}] * (1 + row % 2) for row in rows],
            "index": list(rows),
            "data_source": [["gsm8k", "math"][row % 2] for row in rows],
            "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in rows],
            "extra_info": [{"split": "train", "none": None, "numbers": np.arange(row)} for row in rows],
        }
        loader.append(v1.collated(columns))
    return loader


class ColocatedReward:
    """A reward model on the trainer's side: a number from the tokens of each row."""

    reward_loop_worker_handles = None

    def compute_rm_score(self, data):
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(1)
        scores = torch.zeros(data.batch["responses"].shape)
        scores[torch.arange(len(data)), lengths - 1] = data.batch["responses"].float().sum(1).sin()
        return SimpleNamespace(batch={"rm_scores": scores}, meta_info={}, non_tensor_batch={})


class Numbered:
    """In place of the module `uuid`: the same names in every run."""

    def __init__(self, prefix):
        self.names = (f"{prefix}{number}" for number in itertools.count())

    def uuid4(self):
        name = next(self.names)
        return type("Name", (), {"hex": name, "__str__": lambda self: self.hex})()


def recorded(kind):
    """A trainer class of verl's that keeps what a step left in the queue, before it is cleared."""

    class Recorded(kind):
        def _compute_metrics(self, batch, metrics, *args, **kwargs):
            self.steps.append(everything(batch))
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            self.steps.append({name: freeze(value) for name, value in metrics.items() if not UNSTEADY.search(name)})

    return Recorded


def everything(batch):
    """All fields of all samples by key, tags, and each field as one column."""
    tags = tq.kv_list(batch.partition_id)[batch.partition_id]
    samples = {}
    for key in batch.keys:
        sample = tq.kv_batch_get(keys=[key], partition_id=batch.partition_id)
        samples[key] = {name: freeze(sample.get(name)) for name in sorted(sample.keys())}
    whole = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    columns = {name: freeze(whole.get(name)) for name in sorted(whole.keys())}
    return {"samples": samples, "tags": freeze(tags), "order": list(batch.keys), "columns": columns}


def trainer_of(kind, config, cluster, monkeypatch):
    """A trainer of verl's with every part that `init` would make."""
    monkeypatch.setattr(trainer_base, "uuid", Numbered("u"))
    monkeypatch.setattr(padding_utils, "uuid", Numbered("p"))
    trainer = recorded(kind)(config)
    v1.equip(trainer, cluster.actor, prompts(12, config.data.train_batch_size))
    trainer.critic_wg = cluster.critic
    trainer.critic_wg.reset()
    ray.get([worker.begin.remote(config) for worker in cluster.loops.agent_loop_workers])
    loss = SimpleNamespace(
        cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={}
    )
    trainer.critic_wg.set_loss_fn(partial(value_loss, config=loss))
    if config.tiny.rewards:
        trainer.val_dataloader = prompts(4, 2)
    else:
        trainer.reward_loop_manager = ColocatedReward()
    trainer.steps = []
    return trainer


class AgentLoops(v1.AgentLoops):
    worker = full.FullAgentLoop


@pytest.fixture(scope="module")
def cluster(queue):
    classes = {"actor_rollout_ref": RayClassWithInitArgs(ray.remote(full.FullActor), backend="full")}
    critic = {"model_type": "value_model", "seed": 3, "backend": "full"}
    classes["critic"] = RayClassWithInitArgs(ray.remote(full.FullTraining), **critic)
    groups = v1.spawned(classes)
    loops = AgentLoops.create(configured(), None)
    return SimpleNamespace(actor=groups["actor_rollout_ref"], critic=groups["critic"], loops=loops)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_is_the_same_over_every_backend(cluster, scenario, monkeypatch, tmp_path):
    """Two whole steps with validation around them: fields, tags, metrics, dumps and weights."""
    written = {"rollout_data_dir": str(tmp_path / "train"), "validation_data_dir": str(tmp_path / "val")}
    rewards = SCENARIOS[scenario]["tiny"].get("rewards", True)
    config = configured(
        SCENARIOS[scenario], **written, val_before_train=rewards, test_freq=2 if rewards else -1, device="cpu"
    )
    trainer = trainer_of(PPOTrainerSync, config, cluster, monkeypatch)
    trainer.fit(cluster.loops)
    fields = set(trainer.steps[0]["columns"])
    assert len(trainer.steps) == 4
    assert {"old_log_probs", "advantages", "returns", "rm_scores", "position_ids", "multi_modal_inputs"} <= fields
    assert not any(tq.kv_list().values())
    dumps = {str(path.relative_to(tmp_path)): path.read_text() for path in sorted(tmp_path.rglob("*.jsonl"))}
    assert len(dumps) == (4 if rewards else 2)
    weights = freeze([*trainer.actor_rollout_wg.weights(), *trainer.critic_wg.weights()])
    agree(scenario, {"steps": trainer.steps, "dumps": dumps, "weights": weights})


def test_rollouts_are_dumped_and_loaded_in_their_place(cluster, monkeypatch, tmp_path):
    """verl's rollout skip: the second training finds what the first one generated, with new keys."""
    skip = {"skip": {"rollout_tq": {"enable": True, "dump_dir": str(tmp_path), "steps": [1, 2]}}}
    config = configured(SCENARIOS["images, experts and several outputs"], skip, val_before_train=False, test_freq=-1)
    runs = []
    for _ in range(2):
        trainer = trainer_of(PPOTrainerSync, config, cluster, monkeypatch)
        trainer.fit(cluster.loops)
        runs.append(trainer.steps)
    assert len(list(tmp_path.rglob("tq_batch.pt"))) == 2
    for first, second in zip(*runs, strict=True):
        assert first.keys() == second.keys()
    assert not any(tq.kv_list().values())
    SkipManager.init(configured())
    agree("skip", runs)


def test_prompts_survive_a_checkpoint(cluster, monkeypatch, tmp_path):
    """An asynchronous trainer saves the queue; after a restart, prompts that were not finished are issued again."""
    config = configured(default_local_dir=str(tmp_path), v1={"trainer_mode": "colocate_async"})
    trainer = trainer_of(PPOTrainerColocateAsync, config, cluster, monkeypatch)
    trainer.train_dataloader = Loader(prompts(4, 2))
    issued = []
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=issued.append)
    batch = tu.get_tensordict(trainer.train_dataloader[0] | {"uid": np.array(["a", "b"], dtype=object)})
    trainer._submit_batch_to_rollout(batch)
    trajectory = TensorDict({"responses": torch.arange(6).reshape(1, 6)}, batch_size=[1])
    tq.kv_batch_put(["b_0_0"], "train", trajectory, [{"status": "success", "seq_len": 6}])
    tq.kv_put("a", "train", tag={"is_prompt": True, "status": "finished", "global_steps": 0})
    trainer.global_steps = 1
    trainer._save_checkpoint()
    before = [freeze(tq.kv_list()), freeze(tq.kv_batch_get(["a", "b"], "train"))]
    tq.kv_clear(["a", "b", "b_0_0"], "train")
    tq.kv_batch_put(["other"], "train", trajectory, [{"is_prompt": False}])

    again = trainer_of(PPOTrainerColocateAsync, config, cluster, monkeypatch)
    again.agent_loop_manager = trainer.agent_loop_manager
    again.config.trainer.resume_mode, again.train_dataloader = "auto", Loader([])
    again._load_checkpoint()
    assert [freeze(tq.kv_list()), freeze(tq.kv_batch_get(["a", "b"], "train"))] == before
    assert again._reissue_inflight_prompts() == 1
    assert tq.kv_list("train")["train"].keys() == {"a", "b"}
    assert issued[1]["uid"] == ["b"]
    tq.kv_clear(["a", "b"], "train")
    agree("checkpoint", [before, *(freeze(batch) for batch in issued)])


class Loader(list):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}
