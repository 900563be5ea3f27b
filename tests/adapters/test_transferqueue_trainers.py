"""TransferQueue as NeMo-RL and ROLL start it and call it, with the lines of docs/trainers.md: these trainers themselves
are not installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from needs import needs

needs("transfer_queue")

import numpy as np
import ray
import torch
import transfer_queue as tq
import yaml
from omegaconf import OmegaConf
from own_ray import own_ray
from samples import freeze
from tensordict import NonTensorStack, TensorDict

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SECTIONS = dict(re.findall(r"^## (NeMo-RL|ROLL)\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE))
BLOCKS = {name: re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()}
SIMPLE = {"controller": {"polling_mode": True}, "backend": {"storage_backend": "SimpleStorage"}}


@pytest.fixture
def local_ray():
    with own_ray(Path(__file__).parents[1], num_cpus=6):
        yield
        tq.close()


def manager():
    return type(tq.get_client().storage_manager).__name__


def test_nemo_rl_uses_the_queue_that_was_started_before(local_ray):
    names = {}
    exec(BLOCKS["NeMo-RL"][0], names)
    tq.init(names["config"])
    tq.init(conf=OmegaConf.create(SIMPLE))  # NeMo-RL's driver; its workers say tq.init()
    assert manager() == "MaskpackStorageManager"
    lengths, keys = [3, 1, 4], ["a", "b", "c"]
    rows = [torch.arange(length) + 7 for length in lengths]
    objects = np.empty(3, dtype=object)
    objects[:] = [{"n": 1}, {"n": 2}, {"n": 3}]
    fields = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "input_lengths": torch.tensor(lengths),
            "message_log": objects,
        },
        batch_size=[3],
    )
    tq.kv_batch_put(keys=["schema"], partition_id="train", fields=TensorDict({"x": torch.zeros(1)}, [1]), tags=[{}])
    tq.kv_clear(keys=["schema"], partition_id="train")
    tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{"input_lengths": n} for n in lengths])

    def claim(*names):
        meta = tq.get_client().get_meta(list(names), 3, "train", task_name="lp", mode="fetch", sampling_config={})
        return meta.size and tq.get_client().kv_retrieve_keys(list(meta.global_indexes), "train")

    assert claim("input_ids", "prev_logprobs") == 0  # it polls

    @ray.remote(num_cpus=1)
    def work():
        tq.init()
        seen = tq.kv_batch_get(keys=["c", "a"], partition_id="train", select_fields=["input_ids", "message_log"])
        scores = torch.nested.as_nested_tensor([-row.float() for row in rows], layout=torch.jagged)
        fields = TensorDict({"prev_logprobs": scores}, batch_size=[3])
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}, {}, {}])
        ids = [row.tolist() for row in seen["input_ids"].unbind()]
        return type(tq.get_client().storage_manager).__name__, ids, list(seen["message_log"])

    assert ray.get(work.remote()) == ("MaskpackStorageManager", [[7, 8, 9, 10], [7, 8, 9]], [{"n": 3}, {"n": 1}])
    assert claim("input_ids", "prev_logprobs") == keys
    got = tq.kv_batch_get(keys=["b", "c"], partition_id="train", select_fields=["prev_logprobs", "input_lengths"])
    assert [freeze(row) for row in got["prev_logprobs"].unbind()] == [freeze(-row.float()) for row in rows[1:]]
    assert got["input_lengths"].tolist() == [1, 4]
    tq.kv_clear(keys=keys, partition_id="train")


def test_the_configuration_of_roll_reaches_the_backend(local_ray):
    names = {}
    lines, patch = BLOCKS["ROLL"]
    exec(patch, names)
    config = yaml.safe_load(lines)["transfer_backend"]
    assert config["backend_name"] == "TransferQueue"
    tq.init(OmegaConf.create(config["backend_config"]))
    assert manager() == "MaskpackStorageManager"
    fields = TensorDict(
        {
            "input_ids": torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0], [3, 4, 5, 6]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]),
            "values": torch.randn(3, 4).bfloat16(),
            "scores": torch.tensor([0.5, -0.0, 1.0]),
            "domain": NonTensorStack("math", "code", "math"),
        },
        batch_size=[3],
    )
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id="rollout", fields=fields)
    names_of = ["input_ids", "attention_mask", "values", "scores", "domain"]
    seen = names["stacked"](tq.kv_batch_get(keys=["c", "a"], partition_id="rollout", select_fields=names_of))
    for name in names_of:
        expected = [fields[name][2], fields[name][0]]
        assert [freeze(row) for row in seen[name]] == [freeze(row) for row in expected], name
    tq.kv_clear(keys=["a", "b", "c"], partition_id="rollout")
