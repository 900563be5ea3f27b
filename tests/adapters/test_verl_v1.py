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
import transfer_queue as tq
import verl_v1_cpu as v1
import verl_v1_workers as full
from frozen import agree, freeze
from omegaconf import OmegaConf
from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.losses import value_loss


@pytest.fixture(scope="module", params=["SimpleStorage", "Maskpack"])
def local_ray(request):
    """One for each backend: the clients of a process are global."""
    v1.start_ray(Path(full.__file__).parent, Path(v1.__file__).parent)
    yield request.param
    ray.shutdown()


@pytest.fixture(scope="module")
def queue(local_ray):
    """TransferQueue over one backend."""
    tq.init(OmegaConf.create({"backend": {"storage_backend": local_ray, local_ray: {"num_data_storage_units": 2}}}))
    yield
    tq.close()


# -------------------------------------------------------------------- trainers

OVERRIDES = {
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "n": 2,
            "temperature": 0.8,
            "agent": {"num_workers": 1, "default_agent_loop": "full"},
            "val_kwargs": {"n": 2},
            "moe_load_balance_metrics_interval": 1,
        },
        "actor": {
            "ppo_mini_batch_size": 3,
            "use_dynamic_bsz": True,
            "ppo_epochs": 2,
            "shuffle": True,
            "use_kl_loss": True,
            "entropy_coeff": 0.01,
        },
    },
    "algorithm": {"adv_estimator": "gae", "lam": 0.9, "rollout_correction": {"rollout_is": "token"}},
    "data": {"train_batch_size": 3},
    "trainer": {
        "n_gpus_per_node": 2,
        "total_epochs": 9,
        "total_training_steps": 2,
        "logger": [],
        "test_freq": 2,
        "resume_mode": "disable",
        "device": "cpu",
    },
    "tiny": {"failing": [[1, 1], [4, 0]]},
}
"""A critic, several outputs, images, routed experts and sessions that fail, all at once."""
UNSTEADY = re.compile(r"timing|perf/(time|throughput|cpu|max_memory)")


def configured(**trainer):
    return v1.configured(OVERRIDES, {"trainer": trainer})


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


class Numbered:
    """In place of the module `uuid`: the same names in every run."""

    def __init__(self, prefix):
        self.names = (f"{prefix}{number}" for number in itertools.count())

    def uuid4(self):
        name = next(self.names)
        return type("Name", (), {"hex": name, "__str__": lambda self: self.hex})()


class Recorded(PPOTrainerSync):
    """It keeps what a step left in the queue, before that is cleared."""

    def _compute_metrics(self, batch, metrics, *args, **kwargs):
        self.steps.append(everything(batch))
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        self.steps.append({name: freeze(value) for name, value in metrics.items() if not UNSTEADY.search(name)})


def everything(batch):
    """Tags, and each field of all samples as one column."""
    tags = tq.kv_list(batch.partition_id)[batch.partition_id]
    whole = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    columns = {name: freeze(whole.get(name)) for name in sorted(whole.keys())}
    return {"tags": freeze(tags), "order": list(batch.keys), "columns": columns}


def trainer_of(config, cluster, monkeypatch):
    """A trainer of verl's with every part that `init` would make."""
    monkeypatch.setattr(trainer_base, "uuid", Numbered("u"))
    monkeypatch.setattr(padding_utils, "uuid", Numbered("p"))
    trainer = Recorded(config)
    v1.equip(trainer, cluster.actor, prompts(12, config.data.train_batch_size))
    trainer.critic_wg = cluster.critic
    trainer.critic_wg.reset()
    loss = SimpleNamespace(
        cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={}
    )
    trainer.critic_wg.set_loss_fn(partial(value_loss, config=loss))
    trainer.val_dataloader = prompts(4, 2)
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


def test_training_is_the_same_over_every_backend(cluster, monkeypatch, tmp_path):
    """Two whole steps with validation around them: fields, tags, metrics, dumps and weights."""
    written = {"rollout_data_dir": str(tmp_path / "train"), "validation_data_dir": str(tmp_path / "val")}
    trainer = trainer_of(configured(**written), cluster, monkeypatch)
    trainer.fit(cluster.loops)
    fields = set(trainer.steps[0]["columns"])
    assert len(trainer.steps) == 4
    assert {"old_log_probs", "advantages", "returns", "rm_scores", "position_ids", "multi_modal_inputs"} <= fields
    assert {"values", "routed_experts"} <= fields
    assert not any(tq.kv_list().values())
    dumps = {str(path.relative_to(tmp_path)): path.read_text() for path in sorted(tmp_path.rglob("*.jsonl"))}
    assert len(dumps) == 4
    weights = freeze([*trainer.actor_rollout_wg.weights(), *trainer.critic_wg.weights()])
    agree("training", {"steps": trainer.steps, "dumps": dumps, "weights": weights})
