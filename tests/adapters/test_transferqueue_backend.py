"""The storage backend Maskpack through TransferQueue's interface, client and loader, beside SimpleStorage: whatever one
gives back or raises, the other must."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from needs import needs

needs("transfer_queue")

import frozen
import numpy as np
import ray
import torch
import transfer_queue as tq
from frozen import agree, freeze
from omegaconf import OmegaConf
from own_ray import own_ray
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from transfer_queue.storage import AsyncSimpleStorageManager

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend)

BACKENDS = ["SimpleStorage", "Maskpack"]
_numbers = itertools.count()


@pytest.fixture(scope="module", params=BACKENDS)
def local_ray(request):
    """One for each backend: the clients of a process are global."""
    with own_ray(Path(frozen.__file__).parent):
        yield request.param


@pytest.fixture(scope="module")
def queue(local_ray):
    """TransferQueue over one backend."""
    units = {"num_data_storage_units": 2}
    options = {"storage_backend": local_ray, "SimpleStorage": units, "Maskpack": units}
    pack = AsyncSimpleStorageManager._pack_field_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncSimpleStorageManager, "_pack_field_values", staticmethod(frozen.uncast(pack)))
        tq.init(OmegaConf.create({"backend": options}))
        yield local_ray
        tq.close()


@pytest.fixture
def partition(queue) -> str:
    yield (name := f"partition-{next(_numbers)}")
    if keys := list(tq.kv_list(name).get(name, {})):
        tq.kv_clear(keys, name)


def error_of(call, *given, **options):
    """The result of a call as plain data, or the type of its error."""
    try:
        return freeze(call(*given, **options))
    except Exception as error:
        return type(error).__name__


# -------------------------------------------------------------------- columns

ROWS = 7


def drawn(seed, *shape):
    """Floats of any bits: NaNs with payloads among them."""
    raw = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(torch.float32)[..., 0]


def stack(items):
    return NonTensorStack(*items)


COLUMNS = {
    "jagged on wide offsets": lambda: torch.nested.nested_tensor_from_jagged(
        drawn(3, 40), torch.tensor([0, *range(28, 41, 2)])
    ),
    "padded, no columns": lambda: torch.zeros(ROWS, 0),
    "padded, not contiguous": lambda: drawn(1, 4, ROWS).T,
    "strings": lambda: stack([f"é{place}" * place for place in range(ROWS)]),
    "messages": lambda: stack([[{"role": "user", "content": "x" * place}] * (1 + place % 2) for place in range(ROWS)]),
    "dicts with tensors": lambda: stack(
        [{"pixel_values": drawn(place, place % 3, 5), "n": place} if place % 2 else {} for place in range(ROWS)]
    ),
    "dicts with large tensors": lambda: stack(
        [{"image": torch.full((20_000,), float(place % 3))} for place in range(ROWS)]
    ),
    "mixed": lambda: stack([1, "a", None, {"k": 1.5}, [b"x"], 2.5, -(2**40)]),
    "arrays": lambda: stack([np.arange(place, dtype=np.int32) for place in range(ROWS)]),
    "arrays of strings": lambda: stack([np.array(["a", "bc"][: place % 3]) for place in range(ROWS)]),
    "one array of strings": lambda: np.array([f"s{place}" for place in range(ROWS)]),
    "one array of bytes": lambda: np.array([f"b{place}".encode() for place in range(ROWS)]),
    "one array of objects": lambda: np.array([{"n": place} for place in range(ROWS)], dtype=object),
    "one array of numbers": lambda: np.arange(3 * ROWS).reshape(ROWS, 3),
    "tensors of any shape": lambda: stack([drawn(place, *[2] * (place % 4)) for place in range(ROWS)]),
    "tensors of two dtypes": lambda: stack(
        [torch.zeros(2, dtype=[torch.int8, torch.float16][place % 2]) for place in range(ROWS)]
    ),
    "numpy scalars": lambda: stack([np.float32(place) for place in range(ROWS)]),
    "lines with NULs": lambda: stack(["a\0b" if place % 2 else "\n" for place in range(ROWS)]),
    "a list": lambda: [f"item {place}" for place in range(ROWS)],
    "one list for all": lambda: NonTensorData([{"place": place} for place in range(ROWS)], batch_size=[ROWS]),
}

# -------------------------------------------------------------------- keys and errors


def samples(*places, **more):
    """A few samples of several kinds of columns."""
    rows = [torch.arange(place + 1) + place for place in places]
    fields = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "uid": stack([f"u{p}" for p in places])}
    return TensorDict({**fields, **more}, batch_size=[len(places)])


def test_keys_that_are_unknown_or_lack_a_field(partition):
    tq.kv_batch_put(["a", "b"], partition, samples(1, 2))
    tq.kv_batch_put(["b", "c"], partition, TensorDict({"more": torch.ones(2)}, batch_size=[2]))
    tq.kv_put("tagged", partition, tag={"only": "a tag"})
    asked = [
        (["a", "x"], None),
        (["x"], None),
        ([], None),
        (["a", "c"], None),
        (["a", "c"], ["ids"]),
        (["a", "b"], ["more"]),
        (["b"], ["more", "ids"]),
        (["b"], ["none"]),
        (["b"], ["ids", "none"]),
        (["b", "b"], ["ids"]),
        (["tagged"], None),
        (["a", "tagged"], ["ids"]),
        ("a", "ids"),
    ]
    results = [error_of(tq.kv_batch_get, keys, partition, fields) for keys, fields in asked]
    results += [error_of(tq.kv_batch_get, ["a"], "no partition"), error_of(tq.kv_clear, ["x"], partition)]
    results += [error_of(tq.kv_clear, ["x"], "no partition"), error_of(tq.kv_batch_put, ["a"], partition)]
    results += [error_of(tq.kv_batch_put, ["a"], partition, samples(1, 2)), freeze(tq.kv_list(partition)[partition])]
    results += [error_of(tq.kv_batch_get, ["a", "b"], partition)]
    agree("unknown keys", results)


def test_what_was_got_is_the_callers(partition):
    """Writing to it changes neither what is stored nor the fields that were put."""
    fields = samples(3, 4, dense=drawn(1, 2, 3), objects=stack([{"t": torch.zeros(2)}, {"t": torch.ones(2)}]))
    before = freeze(fields)
    tq.kv_batch_put(["a", "b"], partition, fields)
    got = tq.kv_batch_get(["a", "b"], partition)
    first = freeze(got)
    got["ids"].values().zero_()
    got["dense"].values().zero_()
    got.get("objects").tolist()[0]["t"].fill_(9)
    assert freeze(tq.kv_batch_get(["a", "b"], partition)) == first
    assert freeze(fields) == before
    fields["dense"].zero_()
    assert freeze(tq.kv_batch_get(["a", "b"], partition)) == first


def test_tuples_and_sets_stay_what_they_are(queue, partition):
    """SimpleStorage gives lists back, for msgpack knows neither."""
    tq.kv_put("a", partition, fields={"pair": (1, "b"), "inside": {"k": (1, [2], {3})}})
    got = tq.kv_batch_get(["a"], partition)
    seen = [got.get("pair").tolist()[0], got.get("inside").tolist()[0]["k"]]
    assert seen == ([[1, "b"], [1, [2], [3]]] if queue == "SimpleStorage" else [(1, "b"), (1, [2], {3})])


# -------------------------------------------------------------------- several processes


@pytest.mark.parametrize("processes", [0, 1])
def test_the_streaming_loader_gives_the_same(partition, processes):
    keys = [f"{place}" for place in range(8)]
    tq.kv_batch_put(keys, partition, samples(*range(8), dense=drawn(1, 8, 3)))
    config = ray.get(ray.get_actor("TransferQueueController", namespace="transfer_queue").get_config.remote())
    options = {"batch_size": 4, "micro_batch_size": 2, "data_fields": ["ids", "dense", "uid"], "task_name": "stream"}
    dataset = StreamingDataset(
        config=config, partition_id=partition, dp_rank=0, should_check_consumption_status=True, **options
    )
    batches = [
        freeze(batch)
        for batch, meta in itertools.islice(StreamingDataLoader(dataset, num_workers=processes), 4)
        if len(meta.global_indexes) == 2
    ]
    assert len(batches) == 4
    agree(f"stream {processes}", batches)


# -------------------------------------------------------------------- columns of all kinds


def test_columns_come_back(partition):
    keys = [f"{place}" for place in range(ROWS)]
    kinds = list(COLUMNS)
    fields = TensorDict({kind: COLUMNS[kind]() for kind in kinds}, batch_size=[ROWS])
    tq.kv_batch_put(keys, partition, fields, [{"tag": key} for key in keys])
    tq.kv_batch_put(keys[2:4], partition, TensorDict({"strings": stack([b"new", 1])}, batch_size=[2]))
    tq.kv_clear(keys[-1:], partition)
    asked = [(keys[:-1], kinds), (keys[-1:], kinds)]
    agree("columns", [error_of(tq.kv_batch_get, some, partition, names) for some, names in asked])
