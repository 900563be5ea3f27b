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
from secrets import token_hex
from typing import Any

from maskpack.adapters.transferqueue import library
from maskpack.adapters.transferqueue.durable import SampleLog
from maskpack.adapters.transferqueue.unit import Samples
from maskpack.errors import StorageError

SOCKET = "put_get_socket"
REQUEST, ANSWER = b"request", b"answer"
NONCE, _MAC = 16, 32
_REQUESTS = frozenset(("put", "get", "clear", "figures", "save", "load", "switch"))
"""The methods of Samples that a client may call."""
REFUSAL: list[Any] = [b""]
"""The answer to those who do not know the secret, or mean another storage unit."""


class Seal:
    """Makes and checks messages between processes of a run; directions are named by at most 16 bytes.

    An answer has the nonce of its request, so no other answer can stand for it. Buffers are not part of the MAC: they
    hold values, and no code.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def frames(self, direction: bytes, message: Any, nonce: bytes) -> list[Any]:
        """A message as frames: its seal, a pickle, then the buffers of the pickle."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, 5, buffer_callback=buffers.append)
        return [nonce + self._mac(direction, head, nonce), head, *(buffer.raw() for buffer in buffers)]

    def nonce(self, direction: bytes, received: Sequence[Any]) -> bytes | None:
        """The nonce of a message whose seal is right, else None."""
        if len(received) < 2 or len(received[0]) != NONCE + _MAC:
            return None
        nonce, mac = received[0].bytes[:NONCE], received[0].bytes[NONCE:]
        return nonce if hmac.compare_digest(mac, self._mac(direction, received[1].buffer, nonce)) else None

    def _mac(self, direction: bytes, head: Any, nonce: bytes) -> bytes:
        return blake2b(head, digest_size=_MAC, key=self._secret, salt=nonce, person=direction).digest()


def message(received: Sequence[Any]) -> Any:
    """The message in frames whose seal is right; its arrays lie in them."""
    _, head, *buffers = received
    return pickle.loads(head.buffer, buffers=[frame.buffer for frame in buffers])


class StorageUnit:
    """Serves the samples of one storage unit, from the start until its process ends.

    Args:
        secret: that of the run.
        name: of the actor.
        log: what SampleLog takes, for samples that are in a log, too.
    """

    def __init__(self, secret: bytes, name: str, log: tuple[Any, ...] | None = None) -> None:
        self._seal = Seal(secret)
        self._samples = Samples(None if log is None else SampleLog(*log))
        ip: str = library.node_ip()
        self._socket = library.create_socket(library.zmq.Context(), library.zmq.ROUTER, ip)
        port: int = self._socket.bind_to_random_port(library.address_of(ip, 0).rpartition(":")[0])
        self._info = library.ServerInfo(library.STORAGE_ROLE, f"{name}-{token_hex(4)}", ip, {SOCKET: port})
        threading.Thread(target=self._serve, name="maskpack storage unit", daemon=True).start()

    def address(self) -> Any:
        """Where the unit is reached. Its id is the name of the actor, and what tells a process from one before it."""
        return self._info

    def _serve(self) -> None:
        while True:
            who, *received = self._socket.recv_multipart(copy=False)
            self._socket.send_multipart([who, *self._answer(received)], copy=False)

    def _answer(self, received: Sequence[Any]) -> list[Any]:
        """The frames of an answer: None and what was found, or the class of an error and its text."""
        nonce = self._seal.nonce(REQUEST, received)
        if nonce is None:
            return REFUSAL
        try:
            name, given, unit = message(received)
            if unit != self._info.id:  # another unit, which had this port
                return REFUSAL
            if not isinstance(name, str) or name not in _REQUESTS:
                raise StorageError(f"there is no request {name!r}; expected one of {sorted(_REQUESTS)}. Send one.")
            return self._seal.frames(ANSWER, (None, getattr(self._samples, name)(*given)), nonce)
        except library.StorageKeyNotFoundError as error:
            failed: tuple[Any, str] = library.StorageKeyNotFoundError, error.args[0]
        except BaseException as error:  # it is the caller's, who raises it; SystemExit would end the thread
            failed = StorageError, f"{type(error).__name__}: {error}"
        return self._seal.frames(ANSWER, failed, nonce)
