"""The storage backend Maskpack on two nodes, with a storage unit that stops for a while."""

from __future__ import annotations

import os
import signal
import time

import pytest
from needs import needs

needs("transfer_queue")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from tensordict import TensorDict

from maskpack.adapters.transferqueue import manager, register
from maskpack.errors import StorageError

ROWS = 2 * manager._BLOCK
KEYS = [f"{place}" for place in range(ROWS)]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """Two nodes with one storage unit each."""
    cluster = Cluster()
    try:
        for resource in ({"driver": 1}, {}):
            cluster.add_node(num_cpus=3, resources=resource, object_store_memory=80_000_000, include_dashboard=False)
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}, "worker_process_setup_hook": register}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
        tq.init(OmegaConf.create({"backend": {"storage_backend": "Maskpack"}}))
        yield
        tq.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def put(keys, partition):
    rows = [torch.arange(int(key) % 5 + 1) + 10 * int(key) for key in keys]
    fields = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "n": torch.tensor([*map(int, keys)])}
    tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=[len(keys)]))


def expected(keys):
    numbers = [*map(int, keys)]
    return numbers, [[10 * number + step for step in range(number % 5 + 1)] for number in numbers]


def require(keys, batch):
    assert (batch["n"].tolist(), [row.tolist() for row in batch["ids"].unbind()]) == expected(keys)


def unit_processes():
    """The node and the process of each storage unit."""
    units = tq.interface._TQ_STORAGE["Maskpack"]
    told = [
        unit.__ray_call__.remote(lambda _: (ray.get_runtime_context().get_node_id(), os.getpid())) for unit in units
    ]
    return ray.get(told)


def test_units_of_several_nodes():
    assert len({node for node, _ in unit_processes()}) == 2
    put(KEYS, "nodes")
    picked = KEYS[::7] + KEYS[1::50]
    require(picked, tq.kv_batch_get(picked, "nodes"))
    figures = tq.get_client()._run_coroutine(tq.get_client().storage_manager.figures())
    assert [one["samples"] for one in figures] == [manager._BLOCK] * 2

    @ray.remote(num_cpus=1)
    def there():
        tq.init()
        seen = tq.kv_batch_get(picked, "nodes")
        return (
            ray.get_runtime_context().get_node_id(),
            seen["n"].tolist(),
            [row.tolist() for row in seen["ids"].unbind()],
        )

    spread = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    for node, _ in unit_processes():
        seen = ray.get(there.options(scheduling_strategy=spread(node, soft=False)).remote())
        assert seen == (node, *expected(picked))
    tq.kv_clear(KEYS, "nodes")


def test_a_unit_that_is_frozen_is_given_up_by_name_and_goes_on(monkeypatch):
    monkeypatch.setattr(manager, "_PATIENCE", 0.5)
    monkeypatch.setattr(manager, "_TIMEOUT", 2)
    put(KEYS, "frozen")
    indexes = tq.get_client().kv_retrieve_meta(KEYS, "frozen", create=False).global_indexes
    of_unit = [
        [key for key, at in zip(KEYS, indexes, strict=True) if at // manager._BLOCK % 2 == unit] for unit in (0, 1)
    ]
    infos = tq.get_client().storage_manager._units.infos
    _, process = unit_processes()[1]
    os.kill(process, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(StorageError, match=rf"get: storage unit {infos[1].id} .*did not answer in 2"):
            tq.kv_batch_get(of_unit[1][:3], "frozen")
        assert time.monotonic() - begin >= 2
        require(of_unit[0][:3], tq.kv_batch_get(of_unit[0][:3], "frozen"))
    finally:
        os.kill(process, signal.SIGCONT)
    monkeypatch.undo()
    require(KEYS[::-1], tq.kv_batch_get(KEYS[::-1], "frozen"))
    tq.kv_clear(KEYS, "frozen")
