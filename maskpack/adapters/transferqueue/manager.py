"""The storage backend "Maskpack" of TransferQueue: its StorageManager, and how its storage units are started.

    put_data: fields --chunk.packed--> one chunk --split by storage unit--> put, then the controller is told
    get_data: samples --by storage unit--> pieces --chunk.assembled--> fields

A sample lives in the storage unit that its global index gives, in blocks, so that samples that are put together lie
together. A large tensor inside a Python object lives in the unit that its digest gives, once for all samples.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_bytes
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import RayError
from tensordict import TensorDict

from maskpack.adapters.transferqueue import chunk as chunks
from maskpack.adapters.transferqueue.chunk import Chunk, Piece
from maskpack.adapters.transferqueue.large import decoded, encoded
from maskpack.adapters.transferqueue.library import (
    InMemoryStorageManager,
    SocketPool,
    StorageBootstrapProvider,
    StorageKeyNotFoundError,
    StorageManager,
    StorageManagerFactory,
    open_dict,
    strategies_of_nodes,
)
from maskpack.adapters.transferqueue.server import (
    ANSWER,
    DONE,
    NAMESPACE,
    NO_SAMPLE,
    NONCE,
    REQUEST,
    SOCKET,
    Seal,
    message,
    start_units,
)
from maskpack.adapters.transferqueue.unit import check_digest, digest_of
from maskpack.core.bits import Words
from maskpack.errors import MaskpackError, StorageError
from maskpack.packed.file.codec import check_codec

NAME = "Maskpack"
_BLOCK = 64
"""Consecutive global indexes that live in one storage unit."""
_RUNS = 8
"""Runs of consecutive rows that are sent as chunks of their own; rows in more pieces are taken into one."""
_PATIENCE, _TIMEOUT = 5, 200
"""Seconds after which a silent storage unit is looked for, and after which it is given up."""
_FILE, _CONTROLLER = "maskpack.json", "../controller_state.pkl"
"""In the folder of a checkpoint: the list of the files, and the file that TransferQueue writes beside it before."""
_FORMAT = "maskpack samples 1"
_OPTIONS = {"num_data_storage_units", "required_node_resource", "codec", "log", "fsync"}
_ONCE = {"load", "switch", "recount"}
"""Requests that are not repeated when a storage unit was started again."""


def start(conf: Any) -> list[Any]:
    """Starts the storage units of a configuration, and writes into it where they are reached. They end once nobody
    holds the actors that are returned: TransferQueue does, until it is closed."""
    given: dict[str, Any] = dict(conf.backend.get(NAME) or {})
    unknown = sorted(given.keys() - _OPTIONS)
    count, codec = given.get("num_data_storage_units", 2), given.get("codec")
    log, fsync = given.get("log"), given.get("fsync", "interval")
    if unknown or type(count) is not int or count < 1:
        seen = f"options {unknown}" if unknown else f"num_data_storage_units {count!r}"
        raise MaskpackError(
            f"transfer_queue.init: backend.{NAME} has {seen}; expected some of {sorted(_OPTIONS)}, with at least one "
            "storage unit. Correct the configuration."
        )
    if not (log is None or isinstance(log, str)) or fsync not in ("always", "interval"):
        raise MaskpackError(
            f"transfer_queue.init: backend.{NAME} has log {log!r}, fsync {fsync!r}; expected a folder or null, and "
            '"always" or "interval". Correct the configuration.'
        )
    check_codec(codec, "transfer_queue.init")
    resource = given.get("required_node_resource")
    secret = token_bytes(32)
    strategies = strategies_of_nodes(count, required_node_resource=resource)
    units, names = start_units(strategies, secret, None if log is None else os.path.abspath(log), fsync)
    infos = ray.get([unit.address.remote() for unit in units])
    with open_dict(conf):
        conf.backend[NAME] = {**given, "codec": codec, "units": StorageUnits(infos, secret, names)}
    return units


class StorageUnits:
    """The storage units of a run. TransferQueue hands it to each process with its configuration; that the class is from
    this package is what registers the backend there.

    Attributes:
        infos: where they are reached.
        secret: what the processes of the run prove to each other that they know.
        names: of their actors, if they have logs and are started again.
    """

    def __init__(self, infos: Sequence[Any], secret: bytes, names: Sequence[str] = ()) -> None:
        self.infos, self.secret, self.names = list(infos), secret, names


class _GoneError(StorageError):
    """A storage unit cannot be reached."""


class MaskpackStorageManager(StorageManager):
    """The storage manager of the backend `Maskpack`: keeps samples of TransferQueue as packed chunks."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        self._units: StorageUnits = config["units"]
        self._requests, self._answers = (Seal(self._units.secret, direction) for direction in (REQUEST, ANSWER))
        self._codec: str | None = config.get("codec")
        super().__init__(controller_info, config, zmq_context=zmq_context)
        self._sockets = SocketPool(self.zmq_context, self.storage_manager_id, SOCKET)  # `_received` has its own timeout

    # ---------------------------------------------------------------- samples

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Stores fields of samples: a value of each field for each sample. Fields that they have are replaced.

        Raises:
            NotImplementedError: there is a `data_parser`, which runs on the rows of SimpleStorage.
            LayoutError, ValueError: a field has not one value for each sample.
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
        if not data.batch_size or data.batch_size[0] != len(samples):
            raise ValueError(
                f"put_data: the fields have batch_size {list(data.batch_size)}; expected {len(samples)} rows, one for "
                "each sample. Give one key for each row."
            )
        chunk, schema = chunks.packed(data, "put_data")
        chunk, large = chunks.parted(chunk)
        puts = [
            (unit, [samples[row] for row in rows], part)
            for unit, places in self._by_unit(samples).items()
            for rows, part in _divided(chunk, places, _RUNS if len(set(samples)) == len(samples) else 1)
        ]
        if large:
            await self._bring(Counter(digest for _, _, part in puts for digest in chunks.digests(part)), large)
        await self._change(self._ask(unit, "put", own, part) for unit, own, part in puts)
        await self.notify_data_update(metadata.partition_ids[0], samples, schema)

    async def get_data(self, metadata: Any) -> TensorDict:
        """The fields of samples, in the order of `metadata`.

        Rows of one dim or more are jagged tensors [n, j, *F], scalars are tensors [n], and objects, as well as rows
        that torch cannot hold in one tensor, are NonTensorStacks. Jagged tensors of equal row lengths share their
        offsets. Objects that hold the same large tensor may share its memory.

        Raises:
            StorageKeyNotFoundError: a sample, or a field of one, is not stored.
            StorageError: no sample of a storage unit has one of the fields; or a storage unit did not answer.
        """
        samples, fields = metadata.global_indexes, metadata.field_names
        if not samples or not fields:
            return TensorDict({}, batch_size=len(samples))
        pieces = await self._pieces(samples, fields)
        try:
            pieces = await self._whole(pieces)
        except StorageKeyNotFoundError:  # put again meanwhile, with other large tensors
            pieces = await self._whole(await self._pieces(samples, fields))
        return chunks.assembled(pieces, fields, len(samples))

    async def _pieces(self, samples: Sequence[int], fields: Sequence[str]) -> list[Piece]:
        asked = self._by_unit(samples)
        answers = await _all_of(
            self._ask(unit, "get", [samples[place] for place in places], fields) for unit, places in asked.items()
        )
        return [
            Piece(piece.chunk, [places[place] for place in piece.places])
            for places, found in zip(asked.values(), answers, strict=True)
            for piece in found
        ]

    async def clear_data(self, metadata: Any) -> None:
        """Forgets samples. Raises StorageError if a storage unit did not answer."""
        samples = metadata.global_indexes
        await self._change(
            self._ask(unit, "clear", [samples[place] for place in places])
            for unit, places in self._by_unit(samples).items()
        )

    def _by_unit(self, samples: Sequence[int]) -> dict[int, list[int]]:
        """The places of samples among `samples`, by storage unit."""
        count = len(self._units.infos)
        out: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            out.setdefault(sample // _BLOCK % count, []).append(place)
        return out

    # ---------------------------------------------------------------- large tensors

    async def _bring(self, holds: Counter[bytes], large: Mapping[bytes, Words]) -> None:
        """Announces large tensors, and sends the bits of those that are not stored yet."""
        by_home = self._by_home(holds)
        missing = await _all_of(self._ask(unit, "hold", own) for unit, own in by_home.items())
        sent = {unit: own for unit, own in zip(by_home, missing, strict=True) if own}
        await _all_of(
            self._ask(unit, "store", encoded({digest: large[digest] for digest in own}, self._codec))
            for unit, own in sent.items()
        )

    async def _whole(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces with their large tensors, each fetched once."""
        wanted = Counter(digest for piece in pieces for digest in chunks.digests(piece.chunk))
        if not wanted:
            return pieces
        answers = await _all_of(self._ask(unit, "fetch", list(own)) for unit, own in self._by_home(wanted).items())
        return chunks.whole(pieces, decoded({digest: large for answer in answers for digest, large in answer.items()}))

    async def _change(self, asked: Iterable[Awaitable[Counter[bytes]]]) -> None:
        """Waits for requests that free large tensors, and gives their holds back, also if some of them fail."""
        answers: list[Any] = await _settled(asked)
        freed = sum([answer for answer in answers if not isinstance(answer, BaseException)], Counter[bytes]())
        await _all_of(self._ask(unit, "release", own) for unit, own in self._by_home(freed).items())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    def _by_home(self, counts: Counter[bytes]) -> dict[int, Counter[bytes]]:
        out: dict[int, Counter[bytes]] = {}
        for digest, count in counts.items():
            home = int.from_bytes(digest[:4], "little") % len(self._units.infos)
            out.setdefault(home, Counter())[digest] = count
        return out

    # ---------------------------------------------------------------- checkpoints and sizes

    def _form(self) -> dict[str, Any]:
        return {"format": _FORMAT, "storage_units": len(self._units.infos), "block": _BLOCK}

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the samples of all storage units into a folder that all of them reach, and the BLAKE2b of each file:
        of the units, and of the controller, which TransferQueue has written before."""
        folder = Path(checkpoint_dir) / NAME.lower()
        folder.mkdir(parents=True, exist_ok=True)
        digests = await _all_of(self._ask(unit, "save", str(file)) for unit, file in enumerate(self._files(folder)))
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
        folder, form = Path(checkpoint_dir) / NAME.lower(), self._form()
        if not (folder / _FILE).exists():
            raise FileNotFoundError(
                f"load_checkpoint: {folder / _FILE} does not exist; expected a checkpoint of the backend {NAME}. Load "
                "the folder that save_checkpoint wrote."
            )
        try:
            saved = json.loads((folder / _FILE).read_text())
            *digests, controller = saved.pop("blake2b")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"load_checkpoint: {folder / _FILE} is not what save_checkpoint wrote ({error!r}); expected JSON with "
                "the BLAKE2b of each file. Load another checkpoint."
            ) from error
        if saved != form or len(digests) != len(self._units.infos):
            raise ValueError(
                f"load_checkpoint: {folder / _FILE} has {saved}; expected {form}. Start TransferQueue with as many "
                "storage units as were saved."
            )
        if controller is not None:
            with open(folder / _CONTROLLER, "rb") as file:
                check_digest(file, controller)
        files, loaded = self._files(folder), False
        try:
            await _all_of(
                self._ask(unit, "load", str(file), digest)
                for unit, (file, digest) in enumerate(zip(files, digests, strict=True))
            )
            loaded = True
        finally:
            await self._all_units("switch", loaded)
        if self._units.names:
            holds = sum(await self._all_units("holds"), Counter[bytes]())
            by_home = self._by_home(holds)
            await _all_of(
                self._ask(unit, "recount", by_home.get(unit, Counter[bytes]()))
                for unit in range(len(self._units.infos))
            )

    def _files(self, folder: Path) -> list[Path]:
        return [folder / f"{unit}.pickle" for unit in range(len(self._units.infos))]

    async def figures(self) -> list[dict[str, int]]:
        """For each storage unit: samples, chunks, the bytes it holds in chunks and in large tensors, and the bytes that
        it received and sent."""
        return await self._all_units("figures")

    async def _all_units(self, request: str, *given: Any) -> list[Any]:
        return await _all_of(self._ask(unit, request, *given) for unit in range(len(self._units.infos)))

    # ---------------------------------------------------------------- messages

    async def _ask(self, unit: int, request: str, *given: Any) -> Any:
        nonce = token_bytes(NONCE)
        while True:
            info = self._units.infos[unit]
            try:
                return await self._asked(info, request, given, nonce)
            except _GoneError as error:
                if self._units.names and request == "release":  # tensors that stay are better than one released twice
                    return None
                if not self._units.names or request in _ONCE or not await self._restarted(unit, info):
                    raise StorageError(*error.args) from error

    async def _restarted(self, unit: int, info: Any) -> bool:
        """Whether Ray has started a storage unit again; waits for it, and asks where it is."""
        if self._units.infos[unit] is not info:  # known meanwhile
            return True
        if not ray.is_initialized() or multiprocessing.parent_process() is not None:  # a fork cannot ask Ray
            return False
        get_actor: Callable[..., Any] = cast("Any", ray).get_actor
        try:
            actor = await asyncio.to_thread(get_actor, self._units.names[unit], namespace=NAMESPACE)
            found = await asyncio.wait_for(actor.address.remote(), _TIMEOUT)
        except (RayError, ValueError, asyncio.TimeoutError):
            return False
        if found.id == info.id:
            return False
        self._units.infos[unit] = found
        return True

    async def _asked(self, info: Any, request: str, given: Any, nonce: bytes) -> Any:
        where = f"{request}: storage unit {info.id} at {info.ip}:{info.ports[SOCKET]}"
        async with self._sockets.alease(info) as socket:
            await socket.send_multipart(self._requests.frames((request, given, info.id), nonce), copy=False)
            received = await self._received(socket, info, where)
        if self._answers.nonce(received) != nonce:
            raise _GoneError(
                f"{where} did not prove that it knows the secret of the run; expected that of the run. Another process "
                "may have its port: restart the run from its last checkpoint."
            )
        kind, answer = message(received)
        if kind == DONE:
            return answer
        raise (StorageKeyNotFoundError if kind == NO_SAMPLE else StorageError)(f"{where}: {answer}")

    async def _received(self, socket: Any, info: Any, where: str) -> Any:
        """The frames of an answer. A storage unit that is silent for a while must at least be reached."""
        waited = 0
        answer = socket.recv_multipart(copy=False)
        try:
            while not (await asyncio.wait([answer], timeout=_PATIENCE))[0]:
                waited += _PATIENCE
                try:
                    _, writer = await asyncio.wait_for(asyncio.open_connection(info.ip, info.ports[SOCKET]), _PATIENCE)
                    writer.close()
                except (OSError, asyncio.TimeoutError) as error:
                    lost = "did not start again" if self._units.names else "its samples are lost"
                    raise _GoneError(
                        f"{where} is gone ({error}), and {lost}; expected an answer. Restart the run from its last "
                        "checkpoint."
                    ) from error
                if waited >= _TIMEOUT:
                    raise StorageError(
                        f"{where} did not answer in {waited} s; expected an answer. Check whether its process is "
                        "still running."
                    )
            return answer.result()
        finally:
            answer.cancel()  # does nothing if it is there

    def close(self) -> None:
        """Closes the sockets."""
        sockets = getattr(self, "_sockets", None)
        if sockets is not None:
            sockets.close()
        super().close()


StorageBootstrapProvider.register_provider(NAME)(start)
StorageManagerFactory.register(NAME)(MaskpackStorageManager)
InMemoryStorageManager.register(MaskpackStorageManager)  # whose samples are saved also for include_storage=False


async def _settled(asked: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers and errors."""
    waiting = [*asked]
    if len(waiting) > 1:
        return await asyncio.gather(*waiting, return_exceptions=True)
    try:
        return [await one for one in waiting]  # without a task of its own
    except Exception as error:
        return [error]


async def _all_of(asked: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers. If some of them fail, the first error, once all others are there."""
    answers = await _settled(asked)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _divided(chunk: Chunk, places: Sequence[int], most: int) -> list[tuple[Sequence[int], Chunk]]:
    """The rows at some places, in chunks: those of each run of places, or all together if there are more runs than
    `most`."""
    line = np.asarray(places)
    cuts = np.flatnonzero(np.diff(line) != 1) + 1
    runs = np.split(line, cuts) if cuts.size < most else [line]
    return [
        (run.tolist(), chunk if run.size == len(chunk) and cuts.size == 0 else chunk.take(run.tolist())) for run in runs
    ]
