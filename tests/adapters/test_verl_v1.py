"""verl's V1 trainer over TransferQueue, on the CPU: its agent loop workers, replay buffer, worker groups and trainers,
with a tiny engine in place of the GPU engines. Each backend must leave the same bits as TransferQueue's own."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
import verl_v1_workers as tiny
from frozen import agree, freeze
from omegaconf import OmegaConf
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend)

BACKENDS = ["SimpleStorage", "Maskpack"]
_numbers = itertools.count()


@pytest.fixture(scope="module", params=BACKENDS)
def queue(request):
    """TransferQueue over one backend, on a Ray of its own: the clients of a process are global."""
    path = os.pathsep.join([str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
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


# -------------------------------------------------------------------- trainers

OVERRIDES = {
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "n": 2,
            "temperature": 0.8,
            "moe_load_balance_metrics_interval": 1,
            "agent": {"num_workers": 1, "default_agent_loop": "tiny"},
            "val_kwargs": {"n": 2},
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
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
    "data": {"train_batch_size": 3},
    "trainer": {
        "n_gpus_per_node": 2,
        "total_epochs": 9,
        "total_training_steps": 2,
        "logger": [],
        "test_freq": 2,
        "resume_mode": "disable",
    },
}
UNSTEADY = re.compile(r"timing|perf/(time|throughput|cpu|max_memory)")


def configured(**trainer):
    base = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    return OmegaConf.merge(base, OVERRIDES, {"trainer": trainer})


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
        arrays = {name: np.empty(batch, dtype=object) for name in columns}
        for name, items in columns.items():
            for place, item in enumerate(items):
                arrays[name][place] = item
        loader.append({"dummy_tensor": torch.zeros(batch, 1, dtype=torch.uint8), **arrays})
    return loader


class Numbered:
    """In place of the module `uuid`: the same names in every run."""

    def __init__(self, prefix):
        self.names = (f"{prefix}{number}" for number in itertools.count())

    def uuid4(self):
        name = next(self.names)
        return type("Name", (), {"hex": name, "__str__": lambda self: self.hex})()


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


class Recorded(PPOTrainerSync):
    """verl's trainer, with every part that `init` would make; it keeps what a step left in the queue, before that is
    cleared."""

    def __init__(self, config, actor, loops):
        super().__init__(config)
        self.actor_rollout_wg = self.ref_policy_wg = actor
        actor.begin(config)
        ray.get([worker.begin.remote(config) for worker in loops.agent_loop_workers])
        nothing = SimpleNamespace(update_weights=lambda *_: None, sleep_replicas=lambda *_: None)
        self.tokenizer, self.checkpoint_manager, self.ref_in_actor = tiny.Tokenizer(), nothing, False
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
        self.train_dataloader, self.train_dataloader_it = prompts(12, config.data.train_batch_size), None
        self.val_dataloader = prompts(4, 2)
        self.steps_per_epoch, self.total_training_steps = 4, config.trainer.total_training_steps
        self.global_steps, self.replay_buffer.poll_interval, self.steps = 0, 0.02, []
        self._init_dump_executor()

    def _compute_metrics(self, batch, metrics, *args, **kwargs):
        self.steps.append(everything(batch))
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        self.steps.append({name: freeze(value) for name, value in metrics.items() if not UNSTEADY.search(name)})


class AgentLoops(AgentLoopManagerTQ):
    def __init__(self, *args):
        super().__init__(*args)
        self.agent_loop_workers_class = ray.remote(tiny.TinyAgentLoop)


def test_training_is_the_same_over_every_backend(queue, monkeypatch, tmp_path):
    """Two whole steps with validation around them: fields, tags, metrics, dumps and weights."""
    classes = {"actor_rollout_ref": RayClassWithInitArgs(ray.remote(tiny.TinyActor))}
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), use_gpu=False, device_name="cpu")
    actor = group.spawn(prefix_set=classes.keys())["actor_rollout_ref"]
    written = {"rollout_data_dir": str(tmp_path / "train"), "validation_data_dir": str(tmp_path / "val")}
    config = configured(**written, val_before_train=True, device="cpu")
    monkeypatch.setattr(trainer_base, "uuid", Numbered("u"))
    monkeypatch.setattr(padding_utils, "uuid", Numbered("p"))
    loops = AgentLoops.create(config, None)
    trainer = Recorded(config, actor, loops)
    trainer.fit(loops)
    fields = set(trainer.steps[0]["columns"])
    assert len(trainer.steps) == 4
    assert {"old_log_probs", "advantages", "returns", "rm_scores", "position_ids", "multi_modal_inputs"} <= fields
    assert not any(tq.kv_list().values())
    dumps = {str(path.relative_to(tmp_path)): path.read_text() for path in sorted(tmp_path.rglob("*.jsonl"))}
    assert len(dumps) == 4
    agree("training", {"steps": trainer.steps, "dumps": dumps, "weights": freeze(list(actor.weights()))})
