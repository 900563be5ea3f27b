"""TransferQueue with one backend or another, both alive in one Ray cluster and used by the same calls.

`tq.init` makes one controller a cluster, by name, and one client a process. A Queue is made of the same classes by the
same steps, under a name of its own. Within `with queue:` it is the one that `tq.kv_batch_put` and all others use, in
this process. A Queue can be sent to other processes: it is its config, and the client is made where it is first used.
"""

from __future__ import annotations

import os
import pickle
from importlib import resources
from typing import Any

import psutil
import ray
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import client as client_module
from transfer_queue import interface
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import extract_field_schema
from transfer_queue.sampler import SequentialSampler
from transfer_queue.storage import SimpleStorageUnit, StorageManager, StorageManagerFactory
from transfer_queue.storage.bootstrap import StorageBootstrapProvider, simple_storage_bootstrap
from transfer_queue.utils.zmq_utils import process_zmq_server_info

import maskpack.adapters.transferqueue  # noqa: F401  # registers its backend

SIMPLE, MASKPACK, NOTHING = "SimpleStorage", "Maskpack", "Nothing"
PARTITION = "train"
UNITS = 2
CPUS = 16
"""More than all controllers and storage units ask of Ray, each one; a start beyond them would wait for ever."""
_clients: dict[str, TransferQueueClient] = {}
"""Of this process, by controller."""


class _Unnamed:
    """Units of SimpleStorage without the names that TransferQueue gives them, of which a cluster can have one."""

    @staticmethod
    def options(*, name: str, **more: Any) -> Any:
        return SimpleStorageUnit.options(**more)


@StorageBootstrapProvider.register_provider(NOTHING)
def _start_nothing(_: DictConfig) -> dict[str, Any]:
    return {}


@StorageManagerFactory.register(NOTHING)
class NothingManager(StorageManager):
    """Stores nothing and returns nothing, in no time: what a call takes beside its storage. The controller is told the
    fields as SimpleStorage tells them."""

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Any = None) -> None:
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data))

    async def get_data(self, metadata: Any) -> TensorDict:
        return TensorDict({}, batch_size=len(metadata.global_indexes))

    async def clear_data(self, metadata: Any) -> None:
        pass


class Queue:
    """One controller and its storage units.

    Attributes:
        backend: its name.
        config: what `tq.init` returns for it.
    """

    def __init__(self, backend: str, config: DictConfig) -> None:
        self.backend, self.config = backend, config

    @property
    def client(self) -> TransferQueueClient:
        """Of this process."""
        info = self.config.controller.zmq_info
        if info.id not in _clients:
            client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}_{self.backend}", controller_info=info)
            client.initialize_storage_manager(self.backend, self.config.backend[self.backend])
            _clients[info.id] = client
        return _clients[info.id]

    def __enter__(self) -> None:
        interface._TQ_CLIENT = self.client

    def __exit__(self, *_: object) -> None:
        interface._TQ_CLIENT = None

    def close(self) -> None:
        """Ends the client of this process."""
        client = _clients.pop(self.config.controller.zmq_info.id, None)
        if client is not None:
            client.close()


class OwnedQueue(Queue):
    """A Queue whose actors this process made: they end with it.

    Attributes:
        units: handles of the actors that store.
    """

    def __init__(self, backend: str, **options: Any) -> None:
        config = OmegaConf.create({}, flags={"allow_objects": True})
        default = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
        units = {"num_data_storage_units": UNITS, **options}
        chosen = {"storage_backend": backend, SIMPLE: units, MASKPACK: units, NOTHING: {}}
        config = OmegaConf.merge(config, default, OmegaConf.create({"backend": chosen}))
        self._controller = TransferQueueController.remote(sampler=SequentialSampler(), polling_mode=False)
        config.controller.zmq_info = process_zmq_server_info(self._controller)
        provider = StorageBootstrapProvider.get_provider(backend)
        if provider is None:
            raise LookupError(f"TransferQueue has no backend {backend!r}.")
        simple_storage_bootstrap.SimpleStorageUnit = _Unnamed
        started = provider(config)
        self.units = list(started.values() if isinstance(started, dict) else started)
        ray.get(self._controller.store_config.remote(config))
        super().__init__(backend, config)

    def shared(self) -> Queue:
        """To be sent to other processes."""
        return Queue(self.backend, self.config)

    def stop(self) -> None:
        self.close()
        for actor in (*self.units, self._controller):
            ray.kill(actor)


def use_threads_of_machine() -> None:
    """Tells TransferQueue how many cores there are, here and in the processes that Ray starts later. With more threads
    than cores, which is its default on a small machine, it warns at each call."""
    count = min(client_module.TQ_NUM_THREADS, psutil.cpu_count(logical=False) or 1)
    client_module.TQ_NUM_THREADS = count
    os.environ["TQ_NUM_THREADS"] = str(count)


# -------------------------------------------------------------------- bytes


def stored_bytes(queue: OwnedQueue) -> int:
    """Bytes of what the storage units hold. SimpleStorage: those of tensors, and of the pickles of other objects.
    Maskpack: those of the pickles of its chunks, and of large tensors that chunks share."""
    if queue.backend == MASKPACK:
        figures = queue.client._run_coroutine(queue.client.storage_manager.figures())
        return sum(one["chunk_bytes"] + one["large_bytes"] for one in figures)
    return sum(ray.get([unit.__ray_call__.remote(_held_by_simple) for unit in queue.units]))


def _held_by_simple(unit: Any) -> int:
    return sum(_nbytes(value) for column in unit.storage_data.field_data.values() for value in column.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return len(pickle.dumps(value, protocol=5))
