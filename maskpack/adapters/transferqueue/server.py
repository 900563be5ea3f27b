"""Storage units as Ray actors, and the messages between them and the clients.

    client --[request, buffers...]--> ROUTER of a unit, one thread --[answer, buffers...]--> client

A message is a pickle whose large buffers are frames of their own, so that ZeroMQ sends packed rows from where they lie.
As all traffic of TransferQueue, it is for processes that trust each other.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray

from maskpack.adapters.transferqueue.library import (
    STORAGE_ROLE,
    ServerInfo,
    address_of,
    create_socket,
    node_ip,
    zmq,
)
from maskpack.adapters.transferqueue.unit import NoSampleError, Samples
from maskpack.errors import FieldError, MaskpackError

SOCKET = "put_get_socket"
DONE, NO_SAMPLE, NO_FIELD, FAILED = "done", "no sample", "no field", "failed"
_REQUESTS = frozenset(["put", "get", "clear", "hold", "store", "fetch", "release", "figures", "save", "load"])


def frames(message: Any) -> list[Any]:
    """A message as frames: a pickle, then its buffers."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, 5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def message(received: Sequence[Any]) -> Any:
    """The message in frames; its arrays lie in them."""
    head, *buffers = received
    return pickle.loads(head.buffer, buffers=[frame.buffer for frame in buffers])


class StorageUnit:
    """Serves the samples of one storage unit, from the start until its process ends."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._sent = self._received = 0
        ip: str = node_ip()
        self._socket = create_socket(zmq.Context(), zmq.ROUTER, ip)
        port: int = self._socket.bind_to_random_port(address_of(ip, 0).rpartition(":")[0])
        self._info = ServerInfo(STORAGE_ROLE, f"MaskpackStorageUnit_{uuid4().hex[:8]}", ip, {SOCKET: port})
        threading.Thread(target=self._serve, name="maskpack storage unit", daemon=True).start()

    def address(self) -> Any:
        """Where the unit is reached."""
        return self._info

    def _serve(self) -> None:
        while True:
            who, *received = self._socket.recv_multipart(copy=False)
            self._received += sum(len(frame) for frame in received)
            answer = self._answer(received)
            self._sent += sum(memoryview(frame).nbytes for frame in answer)
            self._socket.send_multipart([who, *answer], copy=False)

    def _answer(self, received: Sequence[Any]) -> list[Any]:
        try:
            name, given = message(received)
            if name not in _REQUESTS:
                raise MaskpackError(f"storage unit: request {name!r}; expected one of {sorted(_REQUESTS)}.")
            found = getattr(self._samples, name)(*given)
            if name == "figures":
                found |= {"received_bytes": self._received, "sent_bytes": self._sent}
            return frames((DONE, found))
        except NoSampleError as error:
            return frames((NO_SAMPLE, str(error.args[0])))
        except FieldError as error:
            return frames((NO_FIELD, str(error)))
        except Exception as error:  # it is the caller's, who raises it
            return frames((FAILED, f"{type(error).__name__}: {error}"))


def start_units(strategies: Sequence[Any]) -> list[Any]:
    """Actors of storage units, one for each scheduling strategy."""
    actor: Any = ray.remote(num_cpus=1)(StorageUnit)
    return [actor.options(scheduling_strategy=strategy).remote() for strategy in strategies]
