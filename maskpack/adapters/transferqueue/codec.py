"""The storage backend "MaskpackCodec" of TransferQueue: another backend, whose samples are packed on their way into it.

    put_data: fields of n samples --chunk.packed_each--> n rows alone --to_bytes--> n blobs, one field there
    get_data: which blob of a sample has which field --> blobs --chunk.pieces_of--> pieces --chunk.assembled--> fields

The other backend stores and moves the blobs as it does tensors: uint8 [nbytes] for each sample and put. They lie under
a field of their own, its name made from the names of the fields in them, so that later fields do not replace earlier
ones. The controller is told the fields themselves. What it keeps for a backend, a value for each sample and field, says
which blob has the newest value of a field.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from maskpack.adapters.transferqueue import chunk as chunks
from maskpack.adapters.transferqueue.chunk import Piece
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
from maskpack.adapters.transferqueue.manager import all_of, rows_fit
from maskpack.core.arguments import said
from maskpack.core.index import cumulated
from maskpack.errors import MaskpackError
from maskpack.layout.jagged import jagged_from
from maskpack.packed.rows import RowAlone

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
    name = str(given.get("backend"))
    provider = None if name == NAME else StorageBootstrapProvider.get_provider(name)
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
        samples = metadata.global_indexes
        if not rows_fit(data, samples, data_parser, NAME):
            return
        packed, schema = chunks.packed_each(data, "put_data")
        blobs = [row.to_bytes() for row in packed]
        carrier, sizes = _carrier(tuple(sorted(schema))), [len(blob) for blob in blobs]
        field = TensorDict({carrier: _column(blobs, sizes)}, batch_size=[len(samples)])
        own: Any = BatchMeta(list(samples), list(metadata.partition_ids), {carrier: {}})
        _told.set((schema, sizes))
        await super().put_data(field, own)  # type: ignore[reportAttributeAccessIssue]
        before: list[dict[str, Any]] = metadata._custom_backend_meta
        if isinstance(self, KVStorageManager):  # of blobs all of whose fields are put again, nothing is left
            for place, known in enumerate(before):
                old = _blobs(known, schema.keys() & known.keys())
                gone = {name: {place: one} for name, (one, same) in old.items() if len(same) == one.fields}
                gone.pop(carrier, None)
                await self._clear(metadata, gone)
        for known, size, more in zip(before, sizes, own._custom_backend_meta, strict=True):
            known.update(dict.fromkeys(schema, _Reference(carrier, len(schema), size, more.get(carrier)).told()))

    async def notify_data_update(
        self, partition_id: str, global_indexes: Any, field_schema: Any, custom_backend_meta: Any = None
    ) -> None:
        (carrier,) = field_schema
        schema, sizes = _told.get()
        known: dict[int, dict[str, Any]] = custom_backend_meta or {}
        references = {
            sample: dict.fromkeys(
                schema, _Reference(carrier, len(schema), size, known.get(sample, {}).get(carrier)).told()
            )
            for sample, size in zip(global_indexes, sizes, strict=True)
        }
        await super().notify_data_update(partition_id, global_indexes, schema, references)  # type: ignore[reportAttributeAccessIssue]

    async def get_data(self, metadata: Any) -> TensorDict:
        samples, fields = metadata.global_indexes, metadata.field_names
        if not samples or not fields:
            return TensorDict({}, batch_size=len(samples))
        get: Any = super().get_data  # type: ignore[reportAttributeAccessIssue]
        carried = _carried(metadata, fields)
        asked: list[Awaitable[Any]] = [get(_meta(metadata, carrier, *own)) for (carrier, _), own in carried.items()]
        pieces: list[Piece] = []
        answers: list[Any] = await all_of(asked)
        for ((carrier, wanted), (places, _)), found in zip(carried.items(), answers, strict=True):
            rows = [RowAlone.from_bytes(blob.cpu().numpy().reshape(-1)) for blob in found.get(carrier).unbind()]
            pieces += chunks.pieces_of(rows, places, wanted)
        return chunks.assembled(pieces, fields, len(samples))

    async def clear_data(self, metadata: Any) -> None:
        if isinstance(self, KVStorageManager):
            carried: dict[str, dict[int, _Reference]] = {}
            for place, known in enumerate(metadata._custom_backend_meta):
                for carrier, (reference, _) in _blobs(known, known).items():
                    carried.setdefault(carrier, {})[place] = reference
            await self._clear(metadata, carried)
        else:  # it forgets all fields of a sample
            await super().clear_data(metadata)  # type: ignore[reportAttributeAccessIssue]

    async def _clear(self, metadata: Any, carried: Mapping[str, Mapping[int, _Reference]]) -> None:
        """Forgets blobs: for each field of these, the places of samples, with their references."""
        for carrier, found in carried.items():
            await super().clear_data(_meta(metadata, carrier, [*found], [*found.values()]))  # type: ignore[reportAttributeAccessIssue]


StorageBootstrapProvider.register_provider(NAME)(start)
StorageManagerFactory.register(NAME)(MaskpackCodecManager)


# -------------------------------------------------------------------- references: which blob has a field of a sample


class _Reference(NamedTuple):
    """What the controller keeps of a field of a sample: the field of the blob, how many fields and bytes the blob has,
    and what the other backend says of it."""

    carrier: str
    fields: int
    nbytes: int
    known: Any

    def told(self) -> Any:
        """As it is sent, for each field: text costs least."""
        text = f"{self.carrier} {self.fields} {self.nbytes}"
        return text if self.known is None else (text, self.known)

    @classmethod
    def of(cls, told: Any) -> _Reference:
        text, known = (told, None) if isinstance(told, str) else told
        carrier, fields, nbytes = text.split()
        return cls(carrier, int(fields), int(nbytes), known)


def _blobs(known: Mapping[str, Any], fields: Iterable[str]) -> dict[str, tuple[_Reference, list[str]]]:
    """The blobs of a sample that have some fields, by the field of the blob, with those fields. Raises KeyError."""
    told: dict[str, tuple[Any, list[str]]] = {}
    for name in fields:
        own = known[name]
        told.setdefault(own if isinstance(own, str) else own[0], (own, []))[1].append(name)
    found = [(_Reference.of(own), names) for own, names in told.values()]
    return {reference.carrier: (reference, names) for reference, names in found}


def _carried(
    metadata: Any, fields: Sequence[str]
) -> dict[tuple[str, frozenset[str]], tuple[list[int], list[_Reference]]]:
    """For each field of blobs, and the fields wanted from these: the places of samples, with their references."""
    out: dict[tuple[str, frozenset[str]], tuple[list[int], list[_Reference]]] = {}
    for place, known in enumerate(metadata._custom_backend_meta):
        try:
            found = _blobs(known, fields)
        except KeyError as error:
            raise StorageKeyNotFoundError(
                f"get_data: sample {metadata.global_indexes[place]} has no field {error}; put it first, or get the "
                "metadata again"
            ) from error
        for carrier, (reference, wanted) in found.items():
            places, references = out.setdefault((carrier, frozenset(wanted)), ([], []))
            places.append(place)
            references.append(reference)
    return out


def _meta(metadata: Any, carrier: str, places: Sequence[int], references: Sequence[_Reference]) -> Any:
    """The metadata of blobs, for the other backend."""
    known = [{} if reference.known is None else {carrier: reference.known} for reference in references]
    schema = {
        "dtype": torch.uint8,
        "shape": None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": [(reference.nbytes,) for reference in references],
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


def _column(blobs: Sequence[bytes], sizes: Sequence[int]) -> Tensor:
    values = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8)
    if len(blobs) == 1:
        return values[None]
    return jagged_from(values, torch.from_numpy(cumulated(np.array(sizes, np.int64))), min(sizes), max(sizes))
