"""verl's V1 trainer over TransferQueue, on the CPU: its agent loop workers, replay buffer, worker groups and trainers,
with a tiny engine in place of the GPU engines. Each backend must leave the same bits as TransferQueue's own."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import os
import re
from functools import partial
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
from frozen import agree, freeze, rows_of, same
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.skip import SkipManager
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import response_from_nested, response_to_nested
from verl_v1_workers import EOS

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
            "agent": {"num_workers": 1, "default_agent_loop": "tiny"},
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
    base = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    return OmegaConf.merge(base, OVERRIDES, *overrides, {"trainer": trainer})


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


def workers():
    """The worker groups of actor and critic, two ranks each, colocated and spawned as verl's trainers do."""
    classes = {"actor_rollout_ref": RayClassWithInitArgs(ray.remote(tiny.TinyActor))}
    classes["critic"] = RayClassWithInitArgs(ray.remote(tiny.TinyTraining), model_type="value_model", seed=3)
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), use_gpu=False, device_name="cpu")
    return group.spawn(prefix_set=classes.keys())


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
    trainer.actor_rollout_wg = trainer.ref_policy_wg = cluster.actor
    trainer.critic_wg = cluster.critic
    trainer.actor_rollout_wg.begin(config)
    trainer.critic_wg.reset()
    ray.get([worker.begin.remote(config) for worker in cluster.loops.agent_loop_workers])
    loss = SimpleNamespace(
        cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={}
    )
    trainer.critic_wg.set_loss_fn(partial(value_loss, config=loss))
    nothing = SimpleNamespace(update_weights=lambda *_: None, sleep_replicas=lambda *_: None)
    trainer.tokenizer, trainer.checkpoint_manager, trainer.ref_in_actor = tiny.Tokenizer(), nothing, False
    trainer.reward_loop_manager = ColocatedReward()
    if config.tiny.rewards:
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    trainer.train_dataloader, trainer.train_dataloader_it = prompts(12, config.data.train_batch_size), None
    trainer.val_dataloader = prompts(4, 2) if config.tiny.rewards else []
    trainer.steps_per_epoch, trainer.total_training_steps = 4, config.trainer.total_training_steps
    trainer.global_steps, trainer.replay_buffer.poll_interval, trainer.steps = 0, 0.02, []
    trainer._init_dump_executor()
    return trainer


class AgentLoops(AgentLoopManagerTQ):
    def __init__(self, *args):
        super().__init__(*args)
        self.agent_loop_workers_class = ray.remote(tiny.TinyAgentLoop)


@pytest.fixture(scope="module")
def cluster(queue):
    groups = workers()
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


# -------------------------------------------------------------------- the parts alone


def outputs(count, images, seed=0):
    """Rollouts of `count` prompts, put by the method of verl's agent loop workers, and what it gave to the queue."""
    worker = object.__new__(tiny.TinyAgentLoop)
    config = configured({"tiny": {"images": images, "experts": True}})
    worker.begin(config)
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    worker.tokenizer, worker.mm_processor_kwargs = tiny.Tokenizer(), {}
    given = []

    async def run(partition, recorded):
        for index in range(seed, seed + count):
            loop = tiny.TinyLoop(SimpleNamespace(config=config))
            kwargs = {"index": index, "session_id": index % 2, "raw_prompt": [{"role": "user", "content": "x" * index}]}
            rollout = await loop.run({}, **kwargs)
            kwargs |= {"uid": f"u{index}", "global_steps": index // 2, "reward_model": {"ground_truth": str(index)}}
            kwargs |= {"dummy_tensor": torch.tensor([index], dtype=torch.uint8), "nothing": None}
            await worker._agent_loop_postprocess(rollout, False, **kwargs)

    def put(partition, monkeypatch):
        async def recorded(**call):
            given.append(copy.deepcopy(call))
            await tq.async_kv_batch_put(**call | {"partition_id": partition})

        monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(async_kv_batch_put=recorded))
        asyncio.run(run(partition, recorded))
        return given

    return put


def row(value, place):
    """One row of a column."""
    if isinstance(value, torch.Tensor):
        return rows_of(value)[place] if value.is_nested else value[place]
    return value.tolist()[place]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_outputs_of_agent_loops_come_back(partition, monkeypatch, images):
    given = outputs(6, images)(partition, monkeypatch)
    expected, tags = {}, {}
    for call in given:
        for place, key in enumerate(call["keys"]):
            fields = call["fields"]
            expected[key] = {name: freeze(row(fields.get(name), place)) for name in fields.keys()}  # noqa: SIM118
            tags[key] = call["tags"][place]
    assert len(expected) > 6
    assert tq.kv_list(partition)[partition] == tags
    keys, columns = sorted(expected), []
    for wanted in (keys, keys[::-1], keys[1:2], keys[2:5], [keys[4], keys[0], keys[3]]):
        whole = tq.kv_batch_get(wanted, partition)
        assert whole.keys() == expected[keys[0]].keys()
        for place, key in enumerate(wanted):
            for name in whole.keys():  # noqa: SIM118
                same(freeze(row(whole.get(name), place)), expected[key][name], f"{key} {name}")
        some = asyncio.run(tq.async_kv_batch_get(wanted, partition, ["responses", "extra_fields"]))
        assert freeze(some["responses"]) == freeze(whole["responses"])
        columns.append({name: freeze(whole.get(name)) for name in sorted(whole.keys())})
    agree(f"outputs {images}", columns)


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_responses_are_cut_out_and_put_back(partition, monkeypatch, images):
    keys = [key for call in outputs(5, images)(partition, monkeypatch) for key in call["keys"]]
    data = tq.kv_batch_get(keys, partition, ["input_ids", "response_mask", "rm_scores", "responses"])
    model = torch.nested.nested_tensor_from_jagged(data["input_ids"].values().float(), data["input_ids"].offsets())
    cut = response_from_nested(model, data["response_mask"])
    padded = data.to_padded_tensor()
    back = response_to_nested(padded["rm_scores"], data["response_mask"])
    assert [part.tolist() for part in back.unbind()] == [part.tolist() for part in data["rm_scores"].unbind()]
    fields = TensorDict({"old_log_probs": cut, "advantages": back}, batch_size=[len(keys)])
    meta = tq.kv_batch_put(keys, partition, fields)
    assert meta.keys == keys
    again = tq.kv_batch_get(keys[::-1], partition, ["old_log_probs", "advantages", "responses"])
    assert [part.tolist() for part in again["old_log_probs"].unbind()][::-1] == [part.tolist() for part in cut.unbind()]
    agree(f"cut {images}", [freeze(again), freeze(padded["input_ids"])])


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_batches_are_filled_up_with_synthetic_samples(partition, monkeypatch, images):
    monkeypatch.setattr(padding_utils, "uuid", Numbered("p"))
    calls = outputs(3, images)(partition, monkeypatch)
    keys = [key for call in calls for key in call["keys"]]
    tags = [tag for call in calls for tag in call["tags"]]
    batch = KVBatchMeta(partition_id=partition, keys=keys, tags=tags)
    filled = padding_utils.upsample_batch_to_divisible_size(batch, 7, EOS)
    added = filled.keys[len(keys) :]
    assert len(filled) % 7 == 0
    assert added
    data = tq.kv_batch_get(filled.keys, partition, ["position_ids", "input_ids", "routed_experts", "uid", "num_turns"])
    shape = data["position_ids"].unbind()[-1].shape if not images else rows_of(data["position_ids"])[-1].shape
    assert shape == ((4, 128) if images else (128,))
    assert padding_utils.upsample_batch_to_divisible_size(filled, 7, EOS) is filled
    whole = {key: freeze(tq.kv_batch_get([key], partition)) for key in filled.keys}
    agree(f"filled {images}", [whole, freeze(data), freeze(filled.tags)])


def test_replay_buffers_sample_and_clear(partition):
    """Groups of two trajectories: finished ones are sampled, oldest first; without a signal or stale, they are gone."""

    def group(uid, steps, rewards, status="finished"):
        tq.kv_put(uid, partition, tag={"is_prompt": True, "status": status, "global_steps": steps})
        if rewards:
            scores = [torch.tensor([0.0] * place + [reward]) for place, reward in enumerate(rewards)]
            fields = TensorDict(
                {"rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)}, [len(rewards)]
            )
            extra = [{"reward_extra_info": {"acc": reward}} for reward in rewards]
            fields["extra_fields"] = NonTensorStack(*extra)
            keys = [f"{uid}_{place}_0" for place in range(len(rewards))]
            tq.kv_batch_put(keys, partition, fields, [{"status": "success", "seq_len": 3}] * len(rewards))

    group("a", 3, [1.0, 0.0])
    group("b", 1, [1.0, 1.0])
    group("c", 9, [0.25, -1.0])
    group("d", 2, [], "running")
    group("e", 8, [0.5, 0.5])
    group("f", 7, [0.5, 1.5])
    options = {"trainer_config": OmegaConf.create(), "sampler_kwargs": OmegaConf.create(), "poll_interval": 0.02}
    options |= {"max_off_policy_threshold": 4, "max_off_policy_strategy": "drop"}
    refilled = []
    for metric in ("reward", "acc"):
        buffer = ReplayBufferAsync(
            trainer_mode="colocate_async", filter_groups_metric=metric, refill_fn=refilled.append, **options
        )
        if metric == "acc":
            group("g", 9, [2.0, 2.0])
        batch, metrics = buffer.sample(global_steps=10, partition_id=partition, batch_size=1)
        assert {key.split("_")[0] for key in batch.keys} == ({"f"} if metric == "reward" else {"c"})
        assert len(tq.kv_batch_get(batch.keys, partition)["rm_scores"].unbind()) == 2
        tq.kv_clear(batch.keys, partition)
        agree(f"replay {metric}", [freeze(metrics), list(batch.keys), freeze(batch.tags)])
    assert refilled == [3, 1]
    assert tq.kv_list(partition)[partition].keys() == {"d"}
    group("h", 10, [1.0])
    batch, metrics = ReplayBuffer(trainer_mode="sync", **options).sample(11, partition, 1)
    assert (batch.keys, metrics) == (["h_0_0"], {})


def test_workers_are_given_their_rows(cluster, partition, monkeypatch):
    """Two ranks, each with its rows in the order of the call; what a method returns is stored with them."""
    calls = outputs(6, True)(partition, monkeypatch)
    keys = [key for call in calls for key in call["keys"]][:8]
    known = {key: tq.kv_batch_get([key], partition) for key in keys}
    batch = KVBatchMeta(partition_id=partition, keys=keys, tags=[{"place": place} for place in range(8)])
    batch.extra_info["question"] = {"why": [1, 2]}
    batch.reorder([7, 0, 3, 4, 1, 2, 6, 5])
    output = cluster.actor.describe(batch)
    assert isinstance(output, KVBatchMeta)
    assert output.keys == batch.keys
    assert {"seen_by", "description", "input_ids"} <= set(output.fields)
    data = tq.kv_batch_get(keys, partition, ["seen_by", "description"])
    for place, key in enumerate(keys):
        assert data["seen_by"][place] == batch.keys.index(key) // 4
        told = data.get("description").tolist()[place]
        for name in known[key].keys():  # noqa: SIM118
            assert told[name] == repr(freeze(row(known[key].get(name), 0))), (key, name)

    batch.fields = ["input_ids", "loss_mask"]
    narrow = cluster.actor.describe(batch)
    told = tq.kv_batch_get(narrow.keys, partition, "description").get("description").tolist()
    assert [item.keys() - {"question"} for item in told] == [{"input_ids", "loss_mask"}] * 8
    cluster.actor.describe_async(batch)
    wide = tq.kv_batch_get(keys, partition, ["doubled", "length", "input_ids"])
    for doubled, ids, length in zip(wide["doubled"].unbind(), wide["input_ids"].unbind(), wide["length"], strict=True):
        assert torch.equal(doubled, ids * 2)
        assert len(ids) == length
    agree("workers", freeze(tq.kv_batch_get(keys, partition)))


def test_metrics_are_nan_where_they_were(partition):
    """Values of every kind of bits: NaN with a payload, -0.0, infinities and the smallest floats."""
    words = torch.tensor([0x7FC00001, -2147483648, 0x7F800000, 1, -0x5FFFFF, 0], dtype=torch.int32)
    rows = [words[:place].view(torch.float32) for place in (1, 6, 3, 5)]
    fields = TensorDict({"values": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [4])
    tq.kv_batch_put(list("abcd"), partition, fields)
    seen = tq.kv_batch_get(list("dbac"), partition)["values"].unbind()
    assert [part.view(torch.int32).tolist() for part in seen] == [words[:n].tolist() for n in (5, 6, 1, 3)]
    padded = tq.kv_batch_get(list("dbac"), partition).to_padded_tensor()["values"]
    assert math.isnan(padded[0, 0])
    agree("nan", freeze(padded))
