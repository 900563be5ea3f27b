"""The codec over MooncakeStore, whose wheel needs libraries of RDMA even for TCP."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import pytest
from needs import needs

needs("transfer_queue")
try:
    needs("mooncake.store")
except ImportError as error:  # it links libraries of the machine
    pytest.skip(str(error), allow_module_level=True)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import transfer_queue as tq
from frozen import freeze
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend)

MASTER = shutil.which("mooncake_master") or pytest.skip("no mooncake_master", allow_module_level=True)


@pytest.fixture
def master(tmp_path):
    """The address of a master of this test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(tmp_path / "master.log", "w") as log:
        command = [MASTER, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_port=0"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < end:
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_rows_come_back_through_mooncake(master):
    store = {"auto_init": False, "metadata_server": "P2PHANDSHAKE", "master_server_address": master}
    store |= {"local_hostname": "127.0.0.1", "global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}
    backend = {"storage_backend": "MaskpackCodec", "MaskpackCodec": {"backend": "MooncakeStore"}}
    ray.init(address="local", num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    try:
        tq.init(OmegaConf.create({"backend": {**backend, "MooncakeStore": store}}))
        keys, rows = [*"abcde"], [torch.arange(3 * place + 1) for place in range(5)]
        objects = [{"n": place, "image": torch.full((2, place), 0.5)} for place in range(5)]
        fields = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "meta": NonTensorStack(*objects)}
        tq.kv_batch_put(keys, "p", TensorDict(fields, batch_size=[5]))
        tq.kv_batch_put(keys[1:3], "p", TensorDict({"ids": torch.tensor([[7, 8], [9, 10]])}, batch_size=[2]))
        seen = tq.kv_batch_get(["e", "b", "a"], "p")
        expected = [rows[4], torch.tensor([7, 8]), rows[0]]
        assert [freeze(row) for row in seen["ids"].unbind()] == [freeze(row) for row in expected]
        assert freeze(seen.get("meta").tolist()) == freeze([objects[4], objects[1], objects[0]])

        @ray.remote(num_cpus=1)
        def there():
            tq.init()
            return [row.tolist() for row in tq.kv_batch_get(["c", "d"], "p", ["ids"])["ids"].unbind()]

        assert ray.get(there.remote()) == [[9, 10], rows[3].tolist()]
        kept = tq.get_client().storage_manager.storage_client._store
        known = tq.get_client().kv_retrieve_meta(keys, "p", create=False)
        names = {told.split()[0] for fields in known._custom_backend_meta for told in fields.values()}
        blobs = [f"{index}@{name}" for index in known.global_indexes for name in names]
        assert sum(kept.is_exist(blob) == 1 for blob in blobs) == 7
        tq.kv_clear(keys, "p")
        assert not any(kept.is_exist(blob) == 1 for blob in blobs)
        tq.close()
    finally:
        ray.shutdown()
