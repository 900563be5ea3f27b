"""What the backend uses of TransferQueue, and of the packages that it brings along."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_storage: Any = import_module("transfer_queue.storage")
_sockets: Any = import_module("transfer_queue.utils.zmq_utils")

zmq: Any = import_module("zmq")
open_dict: Any = import_module("omegaconf").open_dict
InMemoryStorageManager: Any = _storage.AsyncSimpleStorageManager
StorageManager: Any = _storage.StorageManager
StorageManagerFactory: Any = _storage.StorageManagerFactory
StorageKeyNotFoundError: Any = _storage.StorageKeyNotFoundError
StorageBootstrapProvider: Any = import_module("transfer_queue.storage.bootstrap").StorageBootstrapProvider
strategies_of_nodes: Any = import_module("transfer_queue.utils.common").get_node_round_robin_scheduling_strategies
STORAGE_ROLE: Any = import_module("transfer_queue.utils.enum_utils").Role.STORAGE
ServerInfo: Any = _sockets.ZMQServerInfo
SocketPool: Any = _sockets.ZMQSocketPool
create_socket: Any = _sockets.create_zmq_socket
address_of: Any = _sockets.format_zmq_address
node_ip: Any = _sockets.get_node_ip_address
