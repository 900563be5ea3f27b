"""The codec over a key-value storage manager of TransferQueue in this process: blobs, damage, misuse. Its rows are
compared in test_transferqueue_backend.py."""

from __future__ import annotations

import asyncio

import pytest
import torch
from needs import needs
from tensordict import TensorDict

needs("transfer_queue")

from omegaconf import OmegaConf
from transfer_queue import StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.managers.base import KVStorageManager, StorageManager

from maskpack.adapters.transferqueue import codec
from maskpack.errors import MaskpackError, StorageError


class Memory:
    """A client that tells something of each value, and takes it back with the shape and the dtype that it put."""

    def __init__(self, tells):
        self.kept, self.tells = {}, tells

    def put(self, keys, values):
        assert all(value.dtype == torch.uint8 and value.dim() == 1 for value in values)
        self.kept |= {key: value.clone() for key, value in zip(keys, values, strict=True)}
        return [{"told": key} for key in keys] if self.tells else None

    def get(self, keys, shapes, dtypes, custom_backend_meta):
        found = [self.kept[key] for key in keys]
        assert [tuple(shape) for shape in shapes] == [tuple(value.shape) for value in found]
        assert dtypes == [torch.uint8] * len(keys)
        self.check(keys, custom_backend_meta)
        return found

    def clear(self, keys, custom_backend_meta):
        self.check(keys, custom_backend_meta)
        for key in keys:
            del self.kept[key]

    def check(self, keys, told):
        assert told == ([{"told": key} for key in keys] if self.tells else [None] * len(keys))


class Manager(KVStorageManager):
    """Without a controller: `known` is what it would keep after a message, with lists for tuples."""

    def __init__(self, tells=False):
        self.storage_client, self.known = Memory(tells), {}
        self._multi_threads_executor = None

    def _get_executor(self):
        return None

    def close(self):
        pass


async def notified(self, partition_id, global_indexes, field_schema, custom_backend_meta=None):
    for sample in global_indexes:
        known = custom_backend_meta[sample].items()
        known = {name: told if isinstance(told, str) else [*told] for name, told in known}
        self.known.setdefault(sample, {}).update(known)


@pytest.fixture
def managers(monkeypatch):
    monkeypatch.setattr(StorageManager, "notify_data_update", notified)
    return codec._coded(Manager)


def meta(manager, samples, fields=None):
    known = [dict(manager.known.get(sample, {})) for sample in samples]
    return BatchMeta(samples, ["p"] * len(samples), {name: {} for name in fields or []}, _custom_backend_meta=known)


def put(manager, samples, fields):
    data = TensorDict(fields, batch_size=[len(samples)])
    asyncio.run(manager.put_data(data, meta(manager, samples)))


def get(manager, samples, fields):
    return asyncio.run(manager.get_data(meta(manager, samples, fields)))


def clear(manager, samples):
    asyncio.run(manager.clear_data(meta(manager, samples)))
    for sample in samples:
        manager.known.pop(sample)


@pytest.mark.parametrize("tells", [False, True])
def test_a_blob_that_no_field_needs_is_forgotten(managers, tells):
    manager = managers(tells)
    fields = {name: torch.arange(2) for name in "abc"}
    put(manager, [0, 1], {name: fields[name] for name in "ab"})
    put(manager, [0], {"b": torch.tensor([5])})
    assert len(manager.storage_client.kept) == 3  # a of sample 0 is in the old blob
    put(manager, [1], {name: torch.tensor([7]) for name in "abc"})
    assert sum(key.startswith("1@") for key in manager.storage_client.kept) == 1
    assert get(manager, [1, 0], ["a", "b"])["b"].tolist() == [7, 5]
    clear(manager, [0, 1])
    assert not manager.storage_client.kept


def test_bytes_that_are_not_of_one_put(managers):
    manager = managers()
    put(manager, [0], {"a": torch.arange(1000)[None]})
    kept = manager.storage_client.kept
    (key,) = kept
    whole = kept[key]
    for damaged in (whole[:-1], torch.cat([whole, whole[:1]]), whole[:40], whole[:0], whole.flip(0)):
        kept[key] = damaged
        manager.known[0]["a"] = f"{key[2:]} 1 {len(damaged)}"
        with pytest.raises(StorageError, match=rf"get_data: {len(damaged)} bytes are no packed row"):
            get(manager, [0], ["a"])


def test_what_cannot_be_done(managers):
    manager = managers()
    put(manager, [0], {"a": torch.zeros(1)})
    with pytest.raises(StorageKeyNotFoundError, match=r"get_data: sample 3 has no field 'a'"):
        get(manager, [0, 3], ["a"])
    with pytest.raises(ValueError, match=r"put_data: the fields have batch_size \[1\]; expected 2 rows"):
        asyncio.run(manager.put_data(TensorDict({"a": torch.zeros(1)}, [1]), meta(manager, [0, 1])))
    with pytest.raises(NotImplementedError, match=r"MaskpackCodec.*data_parser"):
        asyncio.run(manager.put_data(TensorDict({"a": torch.zeros(1)}, [1]), meta(manager, [0]), data_parser=len))
    assert get(manager, [], ["a"]).batch_size == torch.Size([0])
    for given in ({}, {"backend": "none such"}, {"backend": "MaskpackCodec"}, {"backend": "Maskpack", "units": 2}):
        conf = OmegaConf.create({"backend": {"MaskpackCodec": given}})
        with pytest.raises(MaskpackError, match=r"transfer_queue.init: backend.MaskpackCodec is .*expected"):
            codec.start(conf)
