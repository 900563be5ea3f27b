"""A storage backend that stores nothing: what TransferQueue itself takes for a put, a get and a clear.

A put makes the schema of its fields and tells the controller, as SimpleStorage does; what it was given comes back from
the next get, whatever that asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory

from bench.dataplane_queue import NOTHING


@StorageManagerFactory.register(NOTHING)
class _Nothing(StorageManager):
    _last = TensorDict({})

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        self._last = data
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data))

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        return self._last

    async def clear_data(self, metadata: BatchMeta) -> None:
        self._last = TensorDict({})


@StorageBootstrapProvider.register_provider(NOTHING)
def _no_units(_: Any) -> dict[str, Any]:
    return {}
