"""TransferQueue: a storage backend that keeps samples packed. Importing this package registers it.

transfer_queue.init({"backend": {"storage_backend": "Maskpack"}})
"""

from maskpack.adapters.transferqueue.manager import MaskpackStorageManager


def register() -> None:
    """Registers the backend, which importing this package has done: a `worker_process_setup_hook` for Ray."""


__all__ = ["MaskpackStorageManager", "register"]
