"""Pickles of packed batches: what travels, in which buffers, and that nothing is copied that need not be."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import samples
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_same, received, sent
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict

from maskpack import MaskNestingSpec, PackedBatch, compress, decompress
from maskpack.packed.rows import Rows

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
CODECS = [None, "zstd"]


def pack(batch: TensorDict, **more: Any) -> PackedBatch:
    return compress(batch, pad_token_id=samples.PAD, **more)


def long_batch(rows: int = 40) -> TensorDict:
    """Rows long enough that their values outweigh everything else."""
    return samples.workload(rows=rows, prompt=64, response=256)


def packed_long(rows: int = 40, **more: Any) -> PackedBatch:
    return compress(long_batch(rows), pad_token_id=samples.PAD, **more)


def parts(packed: PackedBatch) -> tuple[bytes, tuple[Any, ...], Any, Any, Any, str | None]:
    """What pickle is given: the schema, the table, the records of a codec, the body, objects, the codec."""
    return packed.__reduce_ex__(5)[1]


def carried(packed: PackedBatch) -> int:
    """Bytes of the buffer with the arrays."""
    return body_of(packed).nbytes


def body_of(packed: PackedBatch) -> np.ndarray:
    """The buffer that a pickle of the batch carries."""
    return np.frombuffer(parts(packed)[3].raw(), np.uint8)


def assert_aligned(packed: PackedBatch) -> None:
    for array in packed.table.arrays():
        assert array.ctypes.data % array.itemsize == 0


# -------------------------------------------------------------------- there and back


@quiet
@pytest.mark.parametrize("codec", CODECS)
@given(batches(), st.data())
def test_batches_and_their_rows_travel_bit_for_bit(codec: str | None, case: Case, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options, codec=codec)
    for protocol in range(2, 6):
        back = pickle.loads(pickle.dumps(packed, protocol=protocol))
        assert_same(decompress(back), case.batch)
        assert back.codec == codec
    back = received(packed)
    assert_same(decompress(back), case.batch)
    assert back.schema == packed.schema
    assert dict(back.layouts) == dict(packed.layouts)
    assert [layout.anchor for layout in back.layouts.values()] == [own.anchor for own in packed.layouts.values()]
    assert back.to_bytes(allow_pickle=True) == packed.to_bytes(allow_pickle=True)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, case.rows), st.integers(0, case.rows))))
    rows = data.draw(st.lists(st.integers(0, case.rows - 1), max_size=5)) if case.rows else []
    for part in (packed[start:stop], packed[rows], PackedBatch.cat([packed, packed[rows]])):
        twice = received(received(part))
        assert_aligned(twice)
        assert_same(decompress(twice), decompress(part))
        assert_same(decompress(received(part), format="nested"), decompress(part, format="nested"))


def test_objects_travel_beside() -> None:
    """In the pickle around it, so that cloudpickle takes what pickle does not, and large tensors are buffers."""
    image = torch.arange(5000.0)
    batch = samples.rollout().set("image", samples.per_row([{"pixels": image + b} for b in range(7)]))
    batch.set("call", NonTensorData(lambda: 11, batch_size=[7]))
    packed = pack(batch)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(packed)
    buffers: list[Any] = []
    stream = cloudpickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes >= image.nbytes for buffer in buffers) >= 7
    assert len(stream) < 20_000
    back = decompress(pickle.loads(stream, buffers=buffers))
    assert back.get("call").data() == 11
    assert_same(back.exclude("call"), batch.exclude("call"))


# -------------------------------------------------------------------- no copies


def test_a_body_travels_without_a_copy() -> None:
    packed = packed_long()
    stream, buffers = sent(packed)
    assert np.shares_memory(packed.table.body, np.frombuffer(buffers[0].raw(), np.uint8))
    held = bytearray(buffers[0].raw())
    back = pickle.loads(stream, buffers=[held])
    for there in (back.table.body, body_of(back)):
        assert there.ctypes.data == np.frombuffer(held, np.uint8).ctypes.data


def test_most_rows_travel_in_their_body_and_few_do_not() -> None:
    packed = packed_long(60)
    for rows, together in ((slice(1, 60), True), (slice(59), True), (slice(20, 40), False), (slice(30), False)):
        assert np.shares_memory(packed.table.body, body_of(packed[rows])) is together


@pytest.mark.parametrize(("more", "whole"), [(0, True), (300, True), (700, False)])
def test_a_tenth_more_is_the_most_that_a_body_brings_along(more: int, whole: bool) -> None:
    kept = compress(TensorDict({"a": torch.randn(1000)}, [1000]))
    wide = kept.table.like(body=np.concatenate([kept.table.body, np.zeros(more, np.uint8)]))
    assert (carried(replace(kept, rows=Rows.of(wide, kept.schema))) == 4000 + more) is whole
    assert carried(replace(kept, rows=Rows.of(wide, kept.schema))) in (4000, 4000 + more)


# -------------------------------------------------------------------- slices


def test_a_slice_carries_its_own_bytes() -> None:
    packed = packed_long(200)
    whole = carried(packed)
    for part in (packed[100:102], packed[[100, 101]], received(packed)[100:102], received(packed[90:110])[10:12]):
        assert carried(part) <= 1.1 * part.own().nbytes + 200
        assert carried(part) < whole / 20
    assert carried(packed[50:50]) < 100
    split = [carried(part) for part in packed.chunk(8)]
    assert sum(split) < 1.1 * whole + 8 * 200


@pytest.mark.parametrize("hints", [(), ("concat:head,tail",)], ids=["pieces", "concat of pieces"])
@pytest.mark.parametrize("far", [False, True], ids=["few far words", "many"])
def test_a_slice_carries_few_words_that_it_copies_from_others(far: bool, hints: tuple[str, ...]) -> None:
    """Rows begin with one text; texts of the first half come again in the second one, or twice in a row."""
    rng = torch.Generator().manual_seed(5)
    head, tail = torch.randint(0, 50_000, (1, 400), generator=rng), torch.randint(0, 50_000, (80, 600), generator=rng)
    if far:
        tail[40:, :300] = tail[:40, 200:500]
    else:
        tail[:, 300:] = tail[:, :300]
    head = torch.cat([head.repeat(80, 1), torch.randint(0, 50_000, (80, 60), generator=rng)], 1)
    masks = {f"mask_{name}": torch.ones(x.shape) for name, x in (("head", head), ("tail", tail))}
    both = torch.cat([head, tail], 1)
    batch = TensorDict({**masks, "mask": torch.ones(both.shape), "head": head, "tail": tail, "both": both}, [80])
    registry = {name: MaskNestingSpec(name) for name in (*masks, "mask")}
    registry |= {name: MaskNestingSpec(f"mask_{name}", hints=("pieces",)) for name in ("head", "tail")}
    registry["both"] = MaskNestingSpec("mask", hints=("pieces", *hints))
    packed = compress(batch, registry=registry)
    kinds = [packed.table.kind(packed.numbers[name,]) for name in ("head", "tail", "both")]
    assert [kind.split(" ")[0] for kind in kinds] == ["pieces", "pieces", "concat" if hints else "pieces"]
    for rows in (slice(1, 80), slice(3, 9), slice(40, 41), slice(38, 60), slice(79, 80), slice(5, 5)):
        for part in (packed[rows], received(packed)[rows], received(packed[rows])):
            assert carried(part) <= 1.2 * carried(compress(batch[rows], registry=registry)) + 200
            assert_same(decompress(received(part)), batch[rows])
    assert_same(decompress(packed.take([70, 3, 3])), batch[torch.tensor([70, 3, 3])])


# -------------------------------------------------------------------- who may write, who keeps what alive


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_buffers_that_begin_anywhere_and_may_be_written(shift: int) -> None:
    """What is received is read-only all the same, so that writing to a decoded batch does not change it."""
    batch = samples.rollout(objects=False)
    stream, buffers = sent(pack(batch))
    lines = []
    for buffer in buffers:
        raw = buffer.raw()
        line = np.zeros(raw.nbytes + 16, np.uint8)
        begin = -line.ctypes.data % 8 + shift
        line[begin : begin + raw.nbytes] = np.frombuffer(raw, np.uint8)
        lines.append(line[begin : begin + raw.nbytes])
    there = pickle.loads(stream, buffers=lines)
    assert_aligned(there)
    assert not any(array.flags.writeable for array in [there.table.body, *there.table.arrays()])
    for _ in range(2):
        out = decompress(there)
        assert_same(out, batch)
        out["input_ids"].fill_(3)
