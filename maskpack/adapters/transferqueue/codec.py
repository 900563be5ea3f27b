"""The storage backend "MaskpackCodec" of TransferQueue: another backend, whose samples are packed on their way into it.

    put_data: fields of n samples --chunk.packed_each--> n chunks of one row --> n blobs, one field of the other backend
    get_data: which blob of a sample has which field --> blobs --> chunks --chunk.assembled--> fields

The other backend stores and moves the blobs as it does tensors: uint8 [nbytes] for each sample and put. They lie under
a field of their own, its name made from the names of the fields in them, so that later fields do not replace earlier
ones. The controller is told the fields themselves. What it keeps for a backend, a value for each sample and field, says
which blob has the newest value of a field.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from maskpack.adapters.transferqueue import chunk as chunks
from maskpack.adapters.transferqueue.chunk import Chunk, Piece
from maskpack.adapters.transferqueue.library import (
    BatchMeta,
    KVStorageManager,
    StorageBootstrapProvider,
    StorageKeyNotFoundError,
    StorageManager,
    StorageManagerFactory,
    interface,
    open_dict,
)
from maskpack.core.arguments import said
from maskpack.core.index import cumulated
from maskpack.errors import MaskpackError
from maskpack.layout.jagged import jagged_from

NAME = "MaskpackCodec"
_told: ContextVar[tuple[Any, list[int]]] = ContextVar("_told")
"""Of the put of a task: the schema of its fields, and the bytes of its blobs."""


class Inner:
    """The other backend. TransferQueue hands it to each process with its configuration; that the class is from this
    package is what registers the backend there.

    Attributes:
        name: of the backend.
        config: its configuration.
    """

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.config = name, config


def start(conf: Any) -> Any:
    """Starts the other backend of a configuration."""
    given: dict[str, Any] = dict(conf.backend.get(NAME) or {})
    name = given.get("backend")
    provider = StorageBootstrapProvider.get_provider(name) if isinstance(name, str) and name != NAME else None
    if given.keys() != {"backend"} or provider is None:
        raise MaskpackError(
            f"transfer_queue.init: backend.{NAME} is {said(given)}; expected {{'backend': NAME}} with the name of the "
            "storage backend that keeps the packed samples, such as SimpleStorage. Correct the configuration."
        )
    with open_dict(conf):
        conf.backend.storage_backend = name  # which SimpleStorage asks for
        started = provider(conf)
        conf.backend.storage_backend = NAME
        conf.backend[NAME] = {**given, "inner": Inner(name, conf.backend[name])}
    if isinstance(interface._TQ_STORAGE, dict):
        interface._TQ_STORAGE[name] = started  # `transfer_queue.close` knows how to end it
    return started


class MaskpackCodecManager(StorageManager):
    """The storage manager of the backend `MaskpackCodec`: an instance is one of a subclass of the other manager."""

    def __new__(cls, controller_info: Any, config: Any, zmq_context: Any = None) -> Any:
        inner: Inner = config["inner"]
        return _coded(StorageManagerFactory._registry[inner.name])(controller_info, inner.config, zmq_context)


@lru_cache
def _coded(inner: type) -> type:
    return type(f"Packed{inner.__name__}", (_Coded, inner), {"__module__": __name__})


class _Coded:
    """Over a storage manager: what is put is packed, what is got is unpacked."""

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
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
        packed, schema = chunks.packed_each(data, "put_data")
        blobs = [_blob(chunk) for chunk in packed]
        carrier, sizes = _carrier(tuple(sorted(schema))), [len(blob) for blob in blobs]
        field = TensorDict({carrier: _column(blobs, sizes)}, batch_size=[len(samples)])
        own = BatchMeta(list(samples), list(metadata.partition_ids), {carrier: {}})
        _told.set((schema, sizes))
        await super().put_data(field, own)  # type: ignore[reportAttributeAccessIssue]
        if isinstance(self, KVStorageManager):
            await self._clear(metadata, _replaced(metadata, carrier, schema))
        for place, known in enumerate(metadata._custom_backend_meta):
            known |= _references(carrier, schema, sizes[place], own._custom_backend_meta[place])

    async def notify_data_update(
        self, partition_id: str, global_indexes: Any, field_schema: Any, custom_backend_meta: Any = None
    ) -> None:
        (carrier,) = field_schema
        schema, sizes = _told.get()
        known = custom_backend_meta or {}
        references = {
            sample: _references(carrier, schema, size, known.get(sample, {}))
            for sample, size in zip(global_indexes, sizes, strict=True)
        }
        await super().notify_data_update(partition_id, global_indexes, schema, references)  # type: ignore[reportAttributeAccessIssue]

    async def get_data(self, metadata: Any) -> TensorDict:
        samples, fields = metadata.global_indexes, metadata.field_names
        if not samples or not fields:
            return TensorDict({}, batch_size=len(samples))
        pieces: list[Piece] = []
        for (carrier, wanted), (places, references) in _carried(metadata, fields).items():
            own = _meta(metadata, carrier, places, references)
            found: Any = (await super().get_data(own)).get(carrier)  # type: ignore[reportAttributeAccessIssue]
            for place, blob in zip(places, found.unbind(), strict=True):
                pieces.append(Piece(_chunk(blob).select(wanted), [place]))
        return chunks.assembled(pieces, fields, len(samples))

    async def clear_data(self, metadata: Any) -> None:
        if isinstance(self, KVStorageManager):
            carried: dict[str, dict[int, Any]] = {}
            for place, known in enumerate(metadata._custom_backend_meta):
                for reference in known.values():
                    carried.setdefault(reference[0], {})[place] = reference
            await self._clear(metadata, carried)
        else:  # it forgets all fields of a sample
            await super().clear_data(metadata)  # type: ignore[reportAttributeAccessIssue]

    async def _clear(self, metadata: Any, carried: dict[str, dict[int, Any]]) -> None:
        """Forgets blobs: for each field of these, the places of samples, with their references."""
        for carrier, found in carried.items():
            await super().clear_data(_meta(metadata, carrier, [*found], [*found.values()]))  # type: ignore[reportAttributeAccessIssue]


StorageBootstrapProvider.register_provider(NAME)(start)
StorageManagerFactory.register(NAME)(MaskpackCodecManager)


# -------------------------------------------------------------------- references: which blob has a field of a sample


def _references(carrier: str, schema: Any, nbytes: int, known: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What the controller keeps of each field of a sample: the field of the blob, how many fields and bytes it has, and
    what the other backend says of it."""
    return dict.fromkeys(schema, (carrier, len(schema), nbytes, known.get(carrier)))


def _replaced(metadata: Any, carrier: str, schema: Any) -> dict[str, dict[int, Any]]:
    """The blobs of samples all of whose fields are put again elsewhere, as far as the metadata tells."""
    out: dict[str, dict[int, Any]] = {}
    for place, known in enumerate(metadata._custom_backend_meta):
        again = {name: reference for name, reference in known.items() if name in schema}
        counts = Counter(reference[0] for reference in again.values())
        for reference in again.values():
            if reference[0] != carrier and counts[reference[0]] == reference[1]:
                out.setdefault(reference[0], {})[place] = reference
    return out


def _carried(metadata: Any, fields: Sequence[str]) -> dict[tuple[str, frozenset[str]], tuple[list[int], list[Any]]]:
    """For each field of blobs, and the fields wanted from these: the places of samples, with their references."""
    out: dict[tuple[str, frozenset[str]], tuple[list[int], list[Any]]] = {}
    for place, known in enumerate(metadata._custom_backend_meta):
        own: dict[str, tuple[Any, list[str]]] = {}
        for name in fields:
            reference = known.get(name)
            if reference is None:
                raise StorageKeyNotFoundError(
                    f"get_data: sample {metadata.global_indexes[place]} has no field {name!r}; put it first, or get "
                    "the metadata again"
                )
            own.setdefault(reference[0], (reference, []))[1].append(name)
        for carrier, (reference, wanted) in own.items():
            places, references = out.setdefault((carrier, frozenset(wanted)), ([], []))
            places.append(place)
            references.append(reference)
    return out


def _meta(metadata: Any, carrier: str, places: Sequence[int], references: Sequence[Any]) -> Any:
    """The metadata of blobs, for the other backend."""
    known = [{} if reference[3] is None else {carrier: reference[3]} for reference in references]
    schema = {
        "dtype": torch.uint8,
        "shape": None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": [(reference[2],) for reference in references],
    }
    samples, partitions = metadata.global_indexes, metadata.partition_ids
    return BatchMeta(
        [samples[place] for place in places],
        [partitions[place] for place in places],
        {carrier: schema},
        _custom_backend_meta=known,
    )


# -------------------------------------------------------------------- blobs


@lru_cache(1024)
def _carrier(fields: tuple[str, ...]) -> str:
    """The field of the blobs of puts of some fields."""
    return "maskpack-" + blake2b("\0".join(fields).encode(), digest_size=8).hexdigest()


def _blob(chunk: Chunk) -> bytes:
    """The bytes of a chunk: how many are compressed, these, and its body."""
    body: list[pickle.PickleBuffer] = []
    head = zlib.compress(pickle.dumps(chunk, 5, buffer_callback=body.append), 1)
    raw = [buffer.raw() for buffer in body]
    lengths = [len(head), *(part.nbytes for part in raw)]
    return b"".join([np.array([len(lengths), *lengths], np.uint32).tobytes(), head, *raw])


def _chunk(blob: Tensor) -> Chunk:
    line = np.ascontiguousarray(blob.cpu().numpy().reshape(-1))
    count = int(line[:4].view(np.uint32)[0])
    ends = 4 * (count + 1) + cumulated(line[4 : 4 * (count + 1)].view(np.uint32))
    head, *body = (line[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
    return pickle.loads(zlib.decompress(head.data), buffers=body)


def _column(blobs: Sequence[bytes], sizes: Sequence[int]) -> Tensor:
    values = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8)
    if len(blobs) == 1:
        return values[None]
    return jagged_from(values, torch.from_numpy(cumulated(np.array(sizes, np.int64))), min(sizes), max(sizes))
