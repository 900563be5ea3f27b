"""The storage backend "Maskpack" of TransferQueue: its StorageManager, and how its storage units are started.

    put_data: fields --chunk.packed--> a chunk --split by storage unit--> put, then the controller is told
    get_data: samples --by storage unit--> pieces --chunk.assembled--> fields

A sample lives in the storage unit that its global index gives, in blocks, so that samples that are put together lie
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import RayError
from tensordict import TensorDict

from maskpack.adapters.transferqueue import library, server
from maskpack.adapters.transferqueue.chunk import Piece, assembled, packed
from maskpack.adapters.transferqueue.large import Large, joined, parted
from maskpack.adapters.transferqueue.unit import check_digest, digest_of
from maskpack.core.index import IntArray
from maskpack.core.objects import Stowed
from maskpack.errors import MaskpackError, StorageError
from maskpack.packed.batch import PackedBatch
from maskpack.packed.file.codec import check_codec

NAME = "Maskpack"
_NAMESPACE = "transfer_queue"
_BLOCK = 64
"""Consecutive global indexes that live in one storage unit."""
_PATIENCE, _TIMEOUT = 5, 200
"""Seconds after which a silent storage unit is looked for, and after which it is given up."""
_FILE, _CONTROLLER = "maskpack.json", "../controller_state.pkl"
"""In the folder of a checkpoint: the list of the files, and the file that TransferQueue writes beside it before."""
_FORMAT = "maskpack samples 2"
_OPTIONS: dict[str, Any] = {
    "num_data_storage_units": 2,
    "required_node_resource": None,
    "codec": None,
    "log": None,
    "fsync": "interval",
}
"""What a configuration may have, and what holds without it."""
_ONCE = {"load", "switch"}
"""Requests that are not repeated when a storage unit was started again."""


def start(conf: Any) -> list[Any]:
    """Starts the storage units of a configuration, and writes into it where they are reached. They end once nobody
    holds the actors that are returned: TransferQueue does, until it is closed."""
    options = _OPTIONS | dict(conf.backend.get(NAME) or {})
    count, resource, codec, log, fsync = (options[name] for name in _OPTIONS)
    known = options.keys() == _OPTIONS.keys() and isinstance(log, str | None) and fsync in ("always", "interval")
    if not known or type(count) is not int or count < 1:
        raise MaskpackError(
            f"transfer_queue.init: backend.{NAME} has {options}; expected some of {sorted(_OPTIONS)}, with one storage "
            'unit or more, a folder or null as log, and "always" or "interval" as fsync. Correct the configuration.'
        )
    check_codec(codec, "transfer_queue.init")
    secret, run, units = token_bytes(32), token_hex(16), list[Any]()
    again: dict[str, Any] = {} if log is None else {"max_restarts": -1, "max_task_retries": -1}
    actor: Any = ray.remote(num_cpus=1, **again)(server.StorageUnit)
    for number, strategy in enumerate(library.strategies_of_nodes(count, required_node_resource=resource)):
        name = f"MaskpackStorageUnit-{run}-{number}"
        own = None if log is None else (f"{os.path.abspath(log)}/unit-{number}", run, fsync)
        started = actor.options(scheduling_strategy=strategy, name=name, namespace=_NAMESPACE)
        units.append(started.remote(secret, name, own))
    infos = ray.get([unit.address.remote() for unit in units])
    with library.open_dict(conf):
        conf.backend[NAME] = {**options, "units": StorageUnits(infos, secret)}
    return units


class StorageUnits:
    """The storage units of a run. TransferQueue hands it to each process with its configuration; that the class is from
    this package is what registers the backend there.

    Attributes:
        infos: where they are reached.
        secret: what the processes of the run prove to each other that they know.
    """

    def __init__(self, infos: Sequence[Any], secret: bytes) -> None:
        self.infos, self.secret = list(infos), secret


class MaskpackStorageManager(library.StorageManager):
    """The storage manager of the backend `Maskpack`: keeps samples of TransferQueue as packed chunks."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        self._units: StorageUnits = config["units"]
        self._seal = server.Seal(self._units.secret)
        self._codec: str | None = config.get("codec")
        super().__init__(controller_info, config, zmq_context=zmq_context)
        # without a timeout, which `_received` has
        self._sockets = library.SocketPool(self.zmq_context, self.storage_manager_id, server.SOCKET)

    # ---------------------------------------------------------------- samples

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Stores fields of samples: a value of each field for each sample. Fields that they have are replaced.

        Raises:
            NotImplementedError: there is a `data_parser`, which runs on the rows of SimpleStorage.
            LayoutError: a field has not one value for each sample.
            StorageError: a storage unit did not answer.
        """
        if data_parser is not None:
            raise NotImplementedError(
                f"put_data: the storage backend {NAME} stores packed rows, to which it cannot apply a data_parser; "
                "expected data_parser=None. Parse the fields before they are put."
            )
        samples = metadata.global_indexes
        if not samples:
            return
        chunk, schema = packed(data, len(samples), "put_data")
        chunk, large = parted(chunk)
        await _all_of(
            self._put(unit, own, chunk if len(own) == len(samples) else chunk.take(places), large)
            for unit, places, own in self._by_unit(samples)
        )
        await self.notify_data_update(metadata.partition_ids[0], samples, schema)

    async def _put(self, unit: int, samples: Sequence[int], chunk: PackedBatch, large: dict[bytes, Stowed]) -> None:
        """Puts rows into a storage unit; large tensors that it lacks are put with the rows again."""
        known: dict[bytes, Large] = {}
        while missing := await self._ask(unit, "put", samples, chunk):
            known |= {digest: Large.of(digest, large[digest], self._codec) for digest in missing}
            chunk, _ = joined(chunk, known)

    async def get_data(self, metadata: Any) -> TensorDict:
        """The fields of samples, in the order of `metadata`.

        Rows of one dim or more are jagged tensors [n, j, *F], scalars are tensors [n], and objects, as well as rows
        that torch cannot hold in one tensor, are NonTensorStacks. Jagged tensors of equal row lengths share their
        offsets. Objects that hold the same large tensor may share its memory.

        Raises:
            StorageKeyNotFoundError: a sample, or a field of one, is not stored.
            StorageError: a storage unit did not answer.
        """
        samples, fields = metadata.global_indexes, metadata.field_names
        if not samples or not fields:
            return TensorDict({}, batch_size=len(samples))
        asked = self._by_unit(samples)
        answers = await _all_of(self._ask(unit, "get", own, fields) for unit, _, own in asked)
        pieces = [
            Piece(piece.chunk, places[piece.places])
            for (_, places, _), found in zip(asked, answers, strict=True)
            for piece in found
        ]
        return assembled(pieces, fields, len(samples))

    async def clear_data(self, metadata: Any) -> None:
        """Forgets samples. Raises StorageError if a storage unit did not answer."""
        await _all_of(self._ask(unit, "clear", own) for unit, _, own in self._by_unit(metadata.global_indexes))

    def _by_unit(self, samples: Sequence[int]) -> list[tuple[int, IntArray, list[int]]]:
        """Of each storage unit that has some samples: its number, their places among `samples`, and these."""
        places: defaultdict[int, list[int]] = defaultdict(list[int])
        for place, sample in enumerate(samples):
            places[sample // _BLOCK % len(self._units.infos)].append(place)
        return [(unit, np.array(own), [samples[place] for place in own]) for unit, own in places.items()]

    # ---------------------------------------------------------------- checkpoints and sizes

    def _form(self) -> dict[str, Any]:
        return {"format": _FORMAT, "storage_units": len(self._units.infos), "block": _BLOCK}

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the samples of all storage units into a folder that all of them reach, and the BLAKE2b of each file:
        of the units, and of the controller, which TransferQueue has written before."""
        folder = Path(checkpoint_dir) / NAME.lower()
        folder.mkdir(parents=True, exist_ok=True)
        digests = await self._each("save", self._files(folder))
        controller = None
        if (folder / _CONTROLLER).exists():
            with open(folder / _CONTROLLER, "rb") as file:
                controller = digest_of(file)
        (folder / _FILE).write_text(json.dumps({**self._form(), "blake2b": [*digests, controller]}))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replaces all samples by those that `save_checkpoint` wrote. If a file is not as it was written, all samples
        stay as they are.

        Raises FileNotFoundError for a folder without a checkpoint, ValueError for one of another number of storage
        units and for another file of the controller, and StorageError for other files of samples.
        """
        folder, form, digests, controller = Path(checkpoint_dir) / NAME.lower(), self._form(), list[str](), None
        if not (folder / _FILE).exists():
            raise FileNotFoundError(
                f"load_checkpoint: {folder / _FILE} does not exist; expected a checkpoint of the backend {NAME}. Load "
                "the folder that save_checkpoint wrote."
            )
        text = (folder / _FILE).read_text(errors="replace")
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # no JSON, or other JSON
            saved = json.loads(text)
            if saved.items() >= form.items():
                *digests, controller = saved["blake2b"]
        if len(digests) != len(self._units.infos):
            raise ValueError(
                f"load_checkpoint: {folder / _FILE} has {text[:200]!r}, which is not what save_checkpoint wrote; "
                f"expected {form}, with the BLAKE2b of each file. Load another checkpoint, or start TransferQueue with "
                "as many storage units as were saved."
            )
        if controller is not None:
            with open(folder / _CONTROLLER, "rb") as file:
                check_digest(file, controller)
        loaded = False
        try:
            await self._each("load", self._files(folder), digests)
            loaded = True
        finally:
            await self._each("switch", [loaded] * len(digests))

    def _files(self, folder: Path) -> list[str]:
        return [str(folder / f"{unit}.pickle") for unit in range(len(self._units.infos))]

    async def figures(self) -> list[dict[str, int]]:
        """For each storage unit: samples, chunks, large tensors, and the bytes of chunks, large tensors and the log."""
        return await self._each("figures")

    async def _each(self, request: str, *given: Sequence[Any]) -> list[Any]:
        """The answers of all storage units; of what is given, each has an item for each of them."""
        units = range(len(self._units.infos))
        return await _all_of(self._ask(unit, request, *(items[unit] for items in given)) for unit in units)

    # ---------------------------------------------------------------- messages

    async def _ask(self, unit: int, request: str, *given: Any) -> Any:
        """The answer of a storage unit. One that was started again meanwhile is asked again."""
        info, nonce = self._units.infos[unit], token_bytes(server.NONCE)
        where = f"{request}: storage unit {info.id} at {info.ip}:{info.ports[server.SOCKET]}"
        try:
            async with self._sockets.alease(info) as socket:
                await socket.send_multipart(
                    self._seal.frames(server.REQUEST, (request, given, info.id), nonce), copy=False
                )
                received = await self._received(socket, info, where)
            if self._seal.nonce(server.ANSWER, received) != nonce:
                raise ConnectionError(
                    f"{where} did not prove that it knows the secret of the run; expected that of the run. Another "
                    "process may have its port: restart the run from its last checkpoint."
                )
        except ConnectionError as error:
            if request in _ONCE or not await self._restarted(unit, info):
                raise StorageError(*error.args) from error
            return await self._ask(unit, request, *given)
        failed, answer = server.message(received)
        if failed is not None:
            raise failed(f"{where}: {answer}")
        return answer

    async def _restarted(self, unit: int, info: Any) -> bool:
        """Whether Ray has started a storage unit again; waits for it, and asks where it is."""
        if self._units.infos[unit].id != info.id:  # known meanwhile
            return True
        no_ray = not ray.is_initialized() or multiprocessing.parent_process() is not None  # a fork cannot ask Ray
        if no_ray or self.config["log"] is None:
            return False
        try:
            get_actor: Callable[..., Any] = cast("Any", ray).get_actor
            actor = await asyncio.to_thread(get_actor, info.id.rpartition("-")[0], namespace=_NAMESPACE)
            found = await asyncio.wait_for(actor.address.remote(), _TIMEOUT)
        except (RayError, ValueError, asyncio.TimeoutError):
            return False
        self._units.infos[unit] = found
        return found.id != info.id

    async def _received(self, socket: Any, info: Any, where: str) -> Any:
        """The frames of an answer. A storage unit that is silent for a while must at least be reached."""
        answer = socket.recv_multipart(copy=False)
        try:
            for _ in range(int(_TIMEOUT / _PATIENCE)):
                if (await asyncio.wait([answer], timeout=_PATIENCE))[0]:
                    return answer.result()
                reached = asyncio.open_connection(info.ip, info.ports[server.SOCKET])
                _, writer = await asyncio.wait_for(reached, _PATIENCE)
                writer.close()
        except (OSError, asyncio.TimeoutError) as error:
            raise ConnectionError(
                f"{where} is gone ({error}), with its samples; expected an answer. Restart the run from its last "
                "checkpoint."
            ) from error
        finally:
            answer.cancel()  # does nothing if it is there
        raise StorageError(
            f"{where} did not answer in {_TIMEOUT} s; expected an answer. Check whether its process is still running."
        )

    def close(self) -> None:
        """Closes the sockets."""
        if hasattr(self, "_sockets"):  # else its start failed
            self._sockets.close()
        super().close()


library.StorageBootstrapProvider.register_provider(NAME)(start)
library.StorageManagerFactory.register(NAME)(MaskpackStorageManager)
library.InMemoryStorageManager.register(MaskpackStorageManager)  # so include_storage=False saves its samples, too


async def _all_of(asked: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers. If some of them fail, the first error, once all others are there."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
