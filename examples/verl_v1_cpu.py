"""verl's V1 trainer over TransferQueue on a CPU, with maskpack as the storage: two steps of GRPO.

    agent loop workers --> TransferQueue [Maskpack] <--> PPOTrainerSync --KVBatchMeta--> worker group of two ranks

    pip install '.[verl,transferqueue]' cachetools fastapi uvicorn        in a clone; the last three are what V1 imports
    python examples/verl_v1_cpu.py
    python examples/verl_v1_cpu.py --backend SimpleStorage                the same numbers from TransferQueue's storage

The trainer, its replay buffer, the workers and what they put and get are verl's. `verl_v1_parts.py` has tiny parts in
place of those that need a GPU or a language model: an engine of three weights, an agent loop, a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl_v1_parts import TinyActor, TinyAgentLoop, Tokenizer

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend; where maskpack is installed, verl does)

RANKS, PROMPTS, SAMPLES = 2, 3, 4
CONFIG = {
    "transfer_queue": {"backend": {"storage_backend": "Maskpack"}},  # the line that a run with GPUs needs
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {
        "rollout": {"name": "vllm", "n": SAMPLES, "agent": {"num_workers": 1, "default_agent_loop": "tiny"}},
        "actor": {"ppo_mini_batch_size": PROMPTS, "use_dynamic_bsz": True},
    },
    "data": {"train_batch_size": PROMPTS},
    "trainer": {
        "device": "cpu",
        "n_gpus_per_node": RANKS,
        "total_training_steps": 2,
        "logger": [],
        "val_before_train": False,
        "test_freq": -1,
        "resume_mode": "disable",
    },
}


def start_ray(*folders):
    """A Ray of its own, whose workers import modules from these folders, too."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    more = {"include_dashboard": False, "log_to_driver": False, "runtime_env": {"env_vars": environment}}
    ray.init(address="local", num_cpus=8, object_store_memory=200_000_000, **more)


def configured(*overrides):
    """verl's configuration with others merged into it."""
    base = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    return OmegaConf.merge(base, *overrides)


def spawned(classes):
    """The worker groups of some classes by their roles, colocated and spawned as verl's trainers do."""
    pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), use_gpu=False, device_name="cpu")
    return group.spawn(prefix_set=classes.keys())


class AgentLoops(AgentLoopManagerTQ):
    """verl's manager of workers of another class."""

    worker = TinyAgentLoop

    def __init__(self, *args):
        super().__init__(*args)
        self.agent_loop_workers_class = ray.remote(self.worker)


def collated(columns):
    """What verl's collate_fn makes of the prompts of a step: arrays of objects from lists."""
    arrays = {name: np.empty(len(items), dtype=object) for name, items in columns.items()}
    for name, items in columns.items():
        for place, item in enumerate(items):
            arrays[name][place] = item
    return {"dummy_tensor": torch.zeros(len(columns["index"]), 1, dtype=torch.uint8), **arrays}


def prompts(step):
    """The batch of a dataloader."""
    rows = list(range(step * PROMPTS, (step + 1) * PROMPTS))
    messages = [[{"role": "user", "content": str(row)}] for row in rows]
    return collated({"raw_prompt": messages, "index": rows, "data_source": ["numbers"] * PROMPTS})


def equip(trainer, actor, batches):
    """Gives a trainer of verl's the parts that `init` would make of models and GPUs."""
    nothing = SimpleNamespace(update_weights=lambda *_: None, sleep_replicas=lambda *_: None)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = actor
    trainer.actor_rollout_wg.begin(trainer.config)
    trainer.tokenizer, trainer.checkpoint_manager, trainer.ref_in_actor = Tokenizer(), nothing, False
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])  # rewards come from the agent loop
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: RANKS)
    trainer.train_dataloader, trainer.train_dataloader_it, trainer.val_dataloader = batches, None, []
    trainer.steps_per_epoch, trainer.total_training_steps = len(batches), trainer.config.trainer.total_training_steps
    trainer.global_steps, trainer.replay_buffer.poll_interval = 0, 0.02
    trainer._init_dump_executor()


class Trainer(PPOTrainerSync):
    """Prints what a step left in the queue, before it is cleared, and keeps it in `steps`."""

    def _compute_metrics(self, batch, metrics, *args, **kwargs):
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        self.steps.append(fields)
        score, norm = metrics["critic/score/mean"], metrics["actor/grad_norm"]
        print(f"step {self.global_steps}: {len(batch.keys)} rows, reward {score:.6f}, gradient norm {norm:.6f}")
        if self.config.transfer_queue.backend.storage_backend == "Maskpack":
            units = asyncio.run(tq.get_client().storage_manager.figures())
            samples, chunks = (sum(unit[name] for unit in units) for name in ("samples", "chunks"))
            print(f"    maskpack holds {samples} samples of {len(list(fields.keys()))} fields, in {chunks} chunks")


def train(backend):
    """Trains, and returns the fields of each step and the weights of each rank."""
    start_ray(Path(__file__).parent)
    try:
        storage = {"storage_backend": backend, backend: {"num_data_storage_units": 2}}  # an actor with a CPU each
        config = configured(CONFIG, {"transfer_queue": {"backend": storage}})
        tq.init(config.transfer_queue)
        trainer = Trainer(config)
        actor = spawned({"actor_rollout_ref": RayClassWithInitArgs(ray.remote(TinyActor))})["actor_rollout_ref"]
        equip(trainer, actor, [prompts(step) for step in range(4)])
        trainer.steps = []
        trainer.fit(AgentLoops.create(config, None))
        weights = actor.weights()
        tq.close()
        return trainer.steps, weights
    finally:
        ray.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="Maskpack", choices=["Maskpack", "SimpleStorage"])
    steps, weights = train(parser.parse_args().backend)
    print(f"{len(steps)} steps, weights {weights[0].tolist()}")


if __name__ == "__main__":
    main()
