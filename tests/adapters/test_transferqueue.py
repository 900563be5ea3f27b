"""TransferQueue: packed samples through its real controller, storage units and clients, on a local Ray."""

from __future__ import annotations

import itertools
import math
import os
import random
import struct
import zlib

import pytest
import torch
from tensordict import NonTensorData, TensorDict

pytest.importorskip("transfer_queue")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from samples import PAD, ROWS, assert_same, jagged, of, per_row, rollout
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset

import maskpack as mp
from maskpack.adapters import transferqueue
from maskpack.adapters.transferqueue import from_samples, to_samples

OPTIONS = {"pad_token_id": PAD}
GROUPS = {"tokens": ["prompts", "responses", "input_ids", "attention_mask", "position_ids"], "scores": ["advantages"]}
_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def queue():
    ray.init(num_cpus=4, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture
def partition() -> str:
    return f"partition-{next(_numbers)}"


def put(partition: str, samples: TensorDict, keys: list[str] | None = None) -> list[str]:
    keys = [f"key-{row}" for row in range(len(samples))] if keys is None else keys
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=samples)
    return keys


def get(partition: str, keys: list[str], *fields: str) -> TensorDict:
    return tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(fields) or None)


def packed(batch: TensorDict, **options) -> mp.PackedBatch:
    return mp.compress(batch, **OPTIONS, **options)


def padded_by_queue(partition: str, batch: TensorDict, rows: list[int]) -> TensorDict:
    """What the queue itself gives for padded tensors, its jagged answers stacked again."""
    keys = put(partition, batch)
    got = get(partition, [keys[row] for row in rows])
    return TensorDict(
        {name: torch.stack(list(got[name].unbind())) for name in got.keys()},  # noqa: SIM118
        batch_size=[len(rows)],
    )


# -------------------------------------------------------------------- any samples, any columns


@pytest.mark.parametrize("rows", [range(7), [3, 0, 6], [4], [2, 1], [5, 4, 3, 2, 1, 0, 6]], ids=str)
def test_samples_come_back_as_the_queue_gives_padded_ones(partition, rows):
    batch = rollout(objects=False)
    keys = put(partition, to_samples(packed(batch)))
    seen = mp.decompress(from_samples(get(partition, [keys[row] for row in rows])))
    assert_same(seen, batch[list(rows)])
    dense = batch.exclude("reward_baselines")  # the queue gives [n] tensors as [n], which stack() refuses
    theirs = padded_by_queue(f"{partition}-padded", dense, list(rows))
    names = list(dense.keys())
    assert_same(seen.select(*names), theirs.select(*names))


def test_short_rows_come_at_the_width_of_their_batch(partition):
    batch = rollout([(1, 1), (2, 2), (5, 300)], response=300, objects=False)
    keys = put(partition, to_samples(packed(batch)))
    seen = mp.decompress(from_samples(get(partition, keys[:1])))
    assert seen["responses"].shape == (1, 300)
    assert_same(seen, batch[:1])


def test_columns_are_fetched_alone_and_in_any_order(partition):
    batch = rollout(objects=False)
    keys = put(partition, to_samples(packed(batch)))
    for names in (["input_ids"], ["advantages", "responses"], ["returns", "reward_baselines", "prompts"]):
        seen = mp.decompress(from_samples(get(partition, keys[::-1], *names)))
        in_order = [name for name in batch.keys() if name in names]  # noqa: SIM118
        assert_same(seen, batch[list(range(6, -1, -1))].select(*in_order))
    whole = get(partition, keys)
    assert_same(mp.decompress(from_samples(whole, "input_ids", "prompts")), batch.select("prompts", "input_ids"))


def test_samples_come_nested(partition):
    batch = rollout(holes=True, objects=False)
    keys = put(partition, to_samples(packed(batch)))
    nested = mp.decompress(from_samples(get(partition, [keys[5], keys[1]])), format="nested")
    assert nested["responses"].offsets() is nested["old_log_probs"].offsets()
    assert_same(mp.unnest(nested), batch[[5, 1]])
    assert_same(mp.select_and_pad_to_response(nested, "advantages")["advantages"], batch[[5, 1]]["advantages"])


def test_nested_batches_go_in(partition):
    batch = rollout(objects=False)
    keys = put(partition, to_samples(packed(mp.nest_batch_by_mask(batch, **OPTIONS))))
    assert_same(mp.decompress(from_samples(get(partition, keys))), batch)


def test_groups_of_fields_share_a_column(partition):
    batch = rollout(objects=False).select(*GROUPS["tokens"], *GROUPS["scores"])
    keys = put(partition, to_samples(packed(batch), columns=GROUPS))
    assert sorted(get(partition, keys).keys()) == ["scores", "tokens"]
    assert_same(mp.decompress(from_samples(get(partition, keys[2:5]))), batch[2:5])
    assert_same(mp.decompress(from_samples(get(partition, keys, "scores"))), batch.select("advantages"))


# -------------------------------------------------------------------- the queue's other ways


def test_a_client_puts_and_gets_by_metadata(partition):
    client = tq.get_client()
    batch = rollout(objects=False)
    client.put(to_samples(packed(batch)), partition_id=partition)
    names = ["prompts", "responses", "old_log_probs"]
    seen = []
    for size in (3, 2, 2):
        meta = client.get_meta(
            data_fields=names, batch_size=size, partition_id=partition, task_name="train", mode="fetch"
        )
        seen.append(mp.decompress(from_samples(client.get_data(meta))))
    assert_same(torch.cat(seen), batch.select(*names))


def test_workers_add_fields_to_samples_that_are_there(partition):
    batch = rollout(objects=False).exclude("old_log_probs")
    keys = put(partition, to_samples(packed(batch)))
    fresh = of("response", torch.float32, seed=77)
    for rows in ([6, 1, 3], [0, 2], [5, 4]):  # three workers, each with some samples
        chosen = [keys[row] for row in rows]
        seen = from_samples(get(partition, chosen, "responses", "attention_mask"))
        out = TensorDict({"old_log_probs": fresh[rows], "kl": fresh[rows] * 2}, batch_size=[len(rows)])
        registry = mp.RL_FIELDS | {"kl": mp.MaskNestingSpec("response")}
        made = mp.compress(out, registry=registry, like=seen)
        assert made.forms["kl",].kind == "padded"
        put(partition, to_samples(made, after=len(batch.keys())), chosen)
    seen = mp.decompress(from_samples(get(partition, keys[::-1])))
    expected = batch.clone(recurse=False).set("old_log_probs", fresh).set("kl", fresh * 2)
    assert_same(seen, expected[list(range(6, -1, -1))])


def test_a_column_is_replaced(partition):
    batch = rollout(objects=False)
    keys = put(partition, to_samples(packed(batch)))
    new = batch.select("responses", "attention_mask")
    new["responses"] = torch.where(new["responses"] == PAD, PAD, new["responses"] + 1)
    put(
        partition,
        to_samples(mp.compress(new, **OPTIONS), columns={"responses": ["responses"], "m": ["attention_mask"]}),
    )
    seen = mp.decompress(from_samples(get(partition, keys, "input_ids", "responses")))
    assert_same(seen["input_ids"], batch["input_ids"])  # which was packed next to the old responses
    assert_same(seen["responses"], new["responses"])


def test_batches_of_several_widths_meet_at_the_widest(partition):
    narrow = rollout([(1, 2), (3, 4)], 3, 4, objects=False)
    wide = rollout([(5, 9), (0, 3)], 5, 9, objects=False)
    first = put(partition, to_samples(packed(narrow)), ["a", "b"])
    second = put(partition, to_samples(packed(wide)), ["c", "d"])
    seen = mp.decompress(from_samples(get(partition, [second[1], first[0], second[0]])))
    assert seen["responses"].shape == (3, 9)
    assert_same(seen[[2, 0]], wide)
    assert_same(seen["prompts"][1, 2:], narrow["prompts"][0])
    assert_same(seen["advantages"][1, :4], narrow["advantages"][0])
    assert bool((seen["responses"][1, 4:] == PAD).all())


def test_the_streaming_loader_gives_packed_samples(partition):
    batch = rollout(objects=False)
    config = ray.get(ray.get_actor("TransferQueueController", namespace="transfer_queue").get_config.remote())
    put(partition, to_samples(packed(batch)))
    dataset = StreamingDataset(
        config=config,
        batch_size=7,
        micro_batch_size=7,
        data_fields=["prompts", "responses"],
        partition_id=partition,
        task_name="stream",
        dp_rank=0,
    )
    samples, meta = next(iter(StreamingDataLoader(dataset)))
    rows = [index - min(meta.global_indexes) for index in meta.global_indexes]
    assert_same(mp.decompress(from_samples(samples)), batch[rows].select("prompts", "responses"))


# -------------------------------------------------------------------- forms


def test_python_objects_come_back(partition):
    batch = rollout()
    batch.set("multi_modal_inputs", per_row([{"pixel_values": torch.full((2, b), b / 3)} for b in range(7)]))
    keys = put(partition, to_samples(packed(batch)))
    seen = mp.decompress(from_samples(get(partition, [keys[4], keys[1]])))
    assert_same(seen, mp.decompress(packed(batch)[[4, 1]]))
    assert_same(seen.get("uid"), per_row(["row-2", "row-0"]))
    assert_same(seen.get("temperature"), NonTensorData(0.7, batch_size=[2]))
    assert seen["global_token_num"] == [sum(row) for row in ROWS]
    assert_same(seen.get("multi_modal_inputs").tolist()[0], {"pixel_values": torch.full((2, 4), 4 / 3)})


def test_objects_that_json_cannot_say_need_leave(partition):
    batch = rollout(objects=False).set("made", per_row([complex(b, 1) for b in range(7)]))
    with pytest.raises(mp.MaskpackError, match="allow_pickle"):
        to_samples(packed(batch))
    keys = put(partition, to_samples(packed(batch), allow_pickle=True))
    got = get(partition, keys)
    assert_same(mp.decompress(from_samples(got, allow_pickle=True)), batch)
    with pytest.raises(mp.errors.WireFormatError, match=r'column "made".*allow_pickle'):
        from_samples(got)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex128]
)
def test_every_dtype_comes_back(partition, dtype):
    batch = TensorDict(
        {
            "attention_mask": rollout(objects=False)["attention_mask"].bool(),
            "responses": rollout(objects=False)["responses"],
            "extra": of("response", dtype, trailing=(2, 3)),
            "dense": of("response", dtype, seed=5)[:, :2],
            "each": of("response", dtype, seed=6)[:, 0],
            "sub": TensorDict({"extra": of("sequence", dtype, seed=7)}, batch_size=[7]),
        },
        batch_size=[7],
    )
    registry = mp.RL_FIELDS | {
        "extra": mp.MaskNestingSpec("response"),
        ("sub", "extra"): mp.MaskNestingSpec("sequence"),
    }
    keys = put(partition, to_samples(packed(batch, registry=registry)))
    assert_same(mp.decompress(from_samples(get(partition, keys[3:] + keys[:3]))), batch[[3, 4, 5, 6, 0, 1, 2]])


def test_rows_that_were_jagged_stay_jagged(partition):
    rows = [torch.arange(n) for n in (3, 0, 5)]
    batch = TensorDict({"ids": jagged(rows), "each": torch.arange(3)}, batch_size=[3])
    keys = put(partition, to_samples(mp.compress(batch)))
    seen = mp.decompress(from_samples(get(partition, [keys[2], keys[0]])))
    assert [row.tolist() for row in seen["ids"].unbind()] == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_compressed_batches_go_through(partition):
    pytest.importorskip("zstandard")
    batch = rollout([(2, 200)] * 3, response=300, objects=False)
    keys = put(partition, to_samples(packed(batch, codec="zstd")))
    assert_same(mp.decompress(from_samples(get(partition, keys[::-1]))), batch[[2, 1, 0]])


def test_random_batches_in_random_orders(partition):
    rng = random.Random(0)
    for round_ in range(6):
        shapes = [(rng.randint(0, 6), rng.randint(0, 20)) for _ in range(rng.randint(1, 9))]
        batch = rollout(shapes, 6, 20, holes=rng.random() < 0.5, values=rng.random() < 0.5)
        keys = put(f"{partition}-{round_}", to_samples(packed(batch)))
        order = rng.sample(range(len(keys)), rng.randint(1, len(keys)))
        seen = mp.decompress(from_samples(get(f"{partition}-{round_}", [keys[row] for row in order])))
        assert_same(seen, mp.decompress(packed(batch)[order]))
        tensors = [name for name in batch.keys() if isinstance(batch.get(name), torch.Tensor)]  # noqa: SIM118
        assert_same(seen.select(*tensors), batch[order].select(*tensors))


# -------------------------------------------------------------------- bytes


def test_samples_are_small():
    batch = rollout([(40, 300)] * 32, 200, 3000, objects=False)
    one = packed(batch)
    whole = sum(tensor.nbytes for tensor in batch.values())
    fields = to_samples(one)
    column = to_samples(one, columns={"row": list(batch.keys())})
    for samples, share in ((fields, 12), (column, 20)):
        assert sum(held.values().nbytes for held in samples.values()) * share < whole
    assert fields["input_ids"].values().nbytes < 32 * (340 * 2 + 200)  # narrow, though no prompts lie beside them
    spent = math.fsum(held.values().nbytes for held in column.values()) - one.nbytes
    assert spent / 32 < 1600


# -------------------------------------------------------------------- errors


def test_the_batch_is_not_changed():
    one = packed(rollout())
    before = mp.decompress(one)
    to_samples(one)
    assert_same(mp.decompress(one), before)


@pytest.mark.parametrize(
    ("batch", "columns", "message"),
    [
        (rollout(), None, "got a TensorDict; expected a PackedBatch"),
        (packed(rollout())[:0], None, "has no rows"),
        (packed(rollout(objects=False).select("prompts", "responses")), {"a": ["prompts"]}, "responses"),
        (packed(rollout(objects=False).select("responses")), {"a": ["responses", "x"]}, "'x'"),
        (packed(rollout(objects=False).select("responses")), {"a": ["responses"], "b": ["responses"]}, "each of"),
        (packed(rollout(objects=False).select("responses")), {"a": ["responses"], "b": []}, "no entries"),
    ],
    ids=str,
)
def test_what_cannot_be_put_is_named(batch, columns, message):
    with pytest.raises(mp.errors.LayoutError, match=f"to_samples: .*{message}"):
        to_samples(batch, columns=columns)


def test_what_cannot_be_read_is_named(partition):
    batch = rollout(objects=False)
    got = get(partition, put(partition, to_samples(packed(batch))))
    with pytest.raises(mp.errors.LayoutError, match='no column "values" in the samples; they have'):
        from_samples(got, "values")
    with pytest.raises(mp.errors.LayoutError, match='column "plain" is a Tensor'):
        from_samples(got.set("plain", torch.zeros(7, 3)))
    with pytest.raises(mp.errors.LayoutError, match='column "bytes" holds other bytes'):
        from_samples(got.exclude("plain").set("bytes", torch.zeros(7, 3, dtype=torch.uint8)))
    with pytest.raises(mp.errors.LayoutError, match="at least one sample"):
        from_samples(TensorDict({}, batch_size=[0]))
    with pytest.raises(mp.errors.LayoutError, match="no columns"):
        from_samples(TensorDict({}, batch_size=[2]))


def test_columns_whose_rows_do_not_fit_are_named(partition):
    batch = rollout(objects=False)
    other = rollout(ROWS[::-1], objects=False)
    samples = to_samples(packed(batch))
    samples.set("advantages", to_samples(packed(other))["advantages"])
    with pytest.raises(mp.errors.LayoutError, match='layout "response"'):
        from_samples(get(partition, put(partition, samples)))


def test_changed_entries_raise_or_keep_their_form():
    """Every byte of an entry changed: an error of maskpack, or other values in the same form."""
    entry = to_samples(packed(rollout(objects=False))[:1])["advantages"].values()
    for place in range(entry.numel()):
        broken = entry.clone()
        broken[place] ^= 0x41
        samples = TensorDict({"advantages": broken[None]}, batch_size=[1])
        try:
            made = mp.decompress(from_samples(samples))
        except mp.MaskpackError:
            continue
        assert all(isinstance(value, torch.Tensor) for value in made.values())
    for size in range(entry.numel()):
        with pytest.raises(mp.MaskpackError):
            from_samples(TensorDict({"advantages": entry[None, :size]}, batch_size=[1]))


def test_objects_that_deflate_to_almost_nothing_come_back():
    batch = TensorDict({"x": torch.zeros(2)}, [2])
    batch.set("text", per_row(["a" * (1 << 20), "b" * 1000]))
    samples = to_samples(packed(batch))
    assert_same(mp.decompress(from_samples(samples)), batch)


def test_an_entry_makes_its_reader_parse_no_more_than_some_times_its_bytes():
    batch = TensorDict({"x": torch.zeros(1)}, [1]).set("text", per_row(["text"]))
    entry = to_samples(packed(batch))["text"].values().numpy().tobytes()
    head = struct.Struct("<4sHHI")
    magic, place, count, size = head.unpack_from(entry)
    begin = head.size + 5 * count
    text, rest = entry[begin : begin + size], entry[begin + size :]
    told = zlib.decompressobj(zdict=transferqueue._USUAL).decompress(text)
    for blanks, fits in ((50_000, True), (1 << 22, False)):
        squeezer = zlib.compressobj(9, zdict=transferqueue._USUAL)
        long = squeezer.compress(told + b" " * blanks) + squeezer.flush()
        data = head.pack(magic, place, count, len(long)) + entry[head.size : begin] + long + rest
        samples = TensorDict({"text": torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]}, [1])
        if fits:
            assert mp.decompress(from_samples(samples))["text"] == ["text"]
        else:
            with pytest.raises(mp.errors.WireFormatError, match="a manifest that does not end where it should"):
                from_samples(samples)


def test_long_manifests_are_not_kept():
    """Those with Python objects are one for each row."""
    texts = [f"{random.Random(row).getrandbits(16_000):x}" for row in range(3)]
    batch = TensorDict({"x": torch.zeros(3)}, [3]).set("text", per_row(texts))
    before = transferqueue._known.cache_info().currsize
    assert mp.decompress(from_samples(to_samples(packed(batch)), "text"))["text"] == texts
    assert transferqueue._known.cache_info().currsize == before
