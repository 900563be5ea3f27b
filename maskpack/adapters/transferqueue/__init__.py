"""TransferQueue: a storage backend that keeps samples packed, and one that packs the samples of another backend.
Importing this package registers both.

transfer_queue.init({"backend": {"storage_backend": "Maskpack"}})
transfer_queue.init({"backend": {"storage_backend": "MaskpackCodec", "MaskpackCodec": {"backend": "MooncakeStore"}}})
"""

from maskpack.adapters.transferqueue.codec import MaskpackCodecManager
from maskpack.adapters.transferqueue.manager import MaskpackStorageManager


def register() -> None:
    """Registers the backends, which importing this package has done: a `worker_process_setup_hook` for Ray."""


__all__ = ["MaskpackCodecManager", "MaskpackStorageManager", "register"]
