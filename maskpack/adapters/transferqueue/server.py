"""Storage units as Ray actors, and the messages between them and the clients.

    client --[seal, request, buffers...]--> ROUTER of a unit, one thread --[seal, answer, buffers...]--> client

A message is a pickle whose large buffers are frames of their own, so that ZeroMQ sends packed rows from where they lie.
Pickles can run code, so one is read only if its seal is right: a nonce, and a MAC by the secret of the run.
"""

from __future__ import annotations

import hmac
import pickle
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import ray

from maskpack.adapters.transferqueue.durable import SampleLog
from maskpack.adapters.transferqueue.library import STORAGE_ROLE, ServerInfo, address_of, create_socket, node_ip, zmq
from maskpack.adapters.transferqueue.unit import NoSampleError, Samples
from maskpack.errors import StorageError

SOCKET = "put_get_socket"
NAMESPACE = "transfer_queue"
REQUEST, ANSWER = b"request", b"answer"
DONE, NO_SAMPLE, FAILED = "done", "no sample", "failed"
NONCE, _MAC = 16, 32
_REQUESTS = frozenset(("put", "get", "clear", "figures", "save", "load", "switch"))
"""The methods of Samples that a client may call."""
REFUSAL: list[Any] = [b""]
"""The answer to those who do not know the secret, or mean another storage unit."""


class Seal:
    """Makes and checks the messages in one direction, named by at most 16 bytes, between processes of a run.

    An answer has the nonce of its request, so no other answer can stand for it. Buffers are not part of the MAC: they
    hold values, and no code.
    """

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._secret, self._direction = secret, direction

    def frames(self, message: Any, nonce: bytes) -> list[Any]:
        """A message as frames: its seal, a pickle, then the buffers of the pickle."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, 5, buffer_callback=buffers.append)
        return [nonce + self._mac(head, nonce), head, *(buffer.raw() for buffer in buffers)]

    def nonce(self, received: Sequence[Any]) -> bytes | None:
        """The nonce of a message whose seal is right, else None."""
        if len(received) < 2 or len(received[0]) != NONCE + _MAC:
            return None
        nonce, mac = received[0].bytes[:NONCE], received[0].bytes[NONCE:]
        return nonce if hmac.compare_digest(mac, self._mac(received[1].buffer, nonce)) else None

    def _mac(self, head: Any, nonce: bytes) -> bytes:
        return blake2b(head, digest_size=_MAC, key=self._secret, salt=nonce, person=self._direction).digest()


def message(received: Sequence[Any]) -> Any:
    """The message in frames whose seal is right; its arrays lie in them."""
    _, head, *buffers = received
    return pickle.loads(head.buffer, buffers=[frame.buffer for frame in buffers])


class StorageUnit:
    """Serves the samples of one storage unit, from the start until its process ends. `log` is what SampleLog
    takes, for samples that are in a log, too."""

    def __init__(self, secret: bytes, log: tuple[Any, ...] | None = None) -> None:
        self._requests, self._answers = Seal(secret, REQUEST), Seal(secret, ANSWER)
        self._samples = Samples(None if log is None else SampleLog(*log))
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
        nonce = self._requests.nonce(received)
        if nonce is None:
            return REFUSAL
        try:
            name, given, unit = message(received)
            if unit != self._info.id:  # another unit, which had this port
                return REFUSAL
            if not isinstance(name, str) or name not in _REQUESTS:
                raise StorageError(f"there is no request {name!r}; expected one of {sorted(_REQUESTS)}. Send one.")
            found = getattr(self._samples, name)(*given)
            if name == "figures":
                found |= {"received_bytes": self._received, "sent_bytes": self._sent}
            return self._answers.frames((DONE, found), nonce)
        except NoSampleError as error:
            failed = NO_SAMPLE, str(error.args[0])
        except BaseException as error:  # it is the caller's, who raises it; SystemExit would end the thread
            failed = FAILED, f"{type(error).__name__}: {error}"
        return self._answers.frames(failed, nonce)


def start_units(
    strategies: Sequence[Any], secret: bytes, log: str | None = None, fsync: str = "interval"
) -> tuple[list[Any], list[str]]:
    """Actors of storage units, one for each scheduling strategy. With a log, each has one in this folder, and Ray
    starts it again when its process ends; then their names are returned, too."""
    run = uuid4().hex
    names = [f"MaskpackStorageUnit-{run}-{number}" for number in range(len(strategies))]
    again: dict[str, Any] = {} if log is None else {"max_restarts": -1, "max_task_retries": -1}
    actor: Any = ray.remote(num_cpus=1, **again)(StorageUnit)
    units = [
        actor.options(scheduling_strategy=strategy, name=name, namespace=NAMESPACE).remote(
            secret, None if log is None else (f"{log}/unit-{number}", run, fsync)
        )
        for number, (strategy, name) in enumerate(zip(strategies, names, strict=True))
    ]
    return units, [] if log is None else names
