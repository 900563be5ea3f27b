"""Pickles of packed batches: what travels, in which buffers, and that nothing is copied that need not be."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import samples
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_same
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict

from maskpack import PER_ROW, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack.packed.pickling import Place, apart, copy_to_one_buffer, gathered
from maskpack.packed.references import arrays_of

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
CODECS = [None, "zstd"]
Buffers = list[Any]


def pack(batch: TensorDict, **more: Any) -> PackedBatch:
    return compress(batch, pad_token_id=samples.PAD, **more)


def long_batch(rows: int = 40) -> TensorDict:
    """Rows long enough that their values outweigh everything else."""
    return samples.workload(rows=rows, prompt=64, response=256)


def packed_long(rows: int = 40, **more: Any) -> PackedBatch:
    return compress(long_batch(rows), pad_token_id=samples.PAD, **more)


def parts(packed: PackedBatch) -> tuple[bytes, list[Place], Any, Buffers, Any]:
    """What pickle is given, but for tensorclasses."""
    function, (stream, kinds, *found) = packed.__reduce_ex__(5)
    assert callable(function)
    assert kinds == []
    return (stream, *found)


def sent(packed: PackedBatch) -> tuple[bytes, Buffers]:
    buffers: Buffers = []
    return pickle.dumps(packed, protocol=5, buffer_callback=buffers.append), buffers


def received(packed: PackedBatch) -> PackedBatch:
    """As from shared memory that nobody may write."""
    stream, buffers = sent(packed)
    return pickle.loads(stream, buffers=[memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers])


def carried(packed: PackedBatch) -> int:
    """Bytes of the buffers with the arrays."""
    return sum(body.raw().nbytes for body in parts(packed)[3])


def arrays(packed: PackedBatch) -> Iterator[tuple[str, np.ndarray]]:
    for path, encoding in packed.fields.items():
        for array in arrays_of(encoding):
            yield "/".join(path), array
    for path, pads in packed.row_pads.items():
        yield "/".join(path) + " pads", pads


def root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def inside(array: np.ndarray, buffers: Buffers) -> bool:
    """Whether the memory of an array is that of a buffer."""
    return any(np.shares_memory(array, np.frombuffer(body.raw(), np.uint8)) for body in buffers)


def assert_aligned(packed: PackedBatch) -> None:
    for name, array in arrays(packed):
        assert array.ctypes.data % array.itemsize == 0, name


# -------------------------------------------------------------------- there and back


@quiet
@pytest.mark.parametrize("codec", CODECS)
@given(batches())
def test_round_trip_bit_for_bit(codec: str | None, case: Case) -> None:
    packed = compress(case.batch, **case.options, codec=codec)
    for protocol in range(2, 6):
        back = pickle.loads(pickle.dumps(packed, protocol=protocol))
        assert_same(decompress(back), case.batch)
        assert back.codec == codec
    back = received(packed)
    assert_same(decompress(back), case.batch)
    assert back.schema == packed.schema
    assert dict(back.layouts) == dict(packed.layouts)
    assert {name: layout.anchor for name, layout in back.layouts.items()} == {
        name: layout.anchor for name, layout in packed.layouts.items()
    }
    assert back.to_bytes(allow_pickle=True) == packed.to_bytes(allow_pickle=True)


@quiet
@pytest.mark.parametrize("codec", CODECS)
@given(batches(min_rows=1), st.data())
def test_rows_travel_bit_for_bit(codec: str | None, case: Case, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options, codec=codec)
    start = data.draw(st.integers(0, case.rows - 1))
    stop = data.draw(st.integers(start, case.rows))
    rows = data.draw(st.lists(st.integers(0, case.rows - 1), max_size=5))
    for part in (packed[start:stop], packed[rows], PackedBatch.cat([packed, packed[rows]])):
        for back in (received(part), received(received(part)), received(received(packed)[0:])):
            assert_aligned(back)
        assert_same(decompress(received(received(part))), decompress(part))
        assert_same(decompress(received(part), format="nested"), decompress(part, format="nested"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
def test_every_dtype(codec: str | None, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    batch = TensorDict(
        {"row": strategies.values(rng, (50,), dtype), "dense": strategies.values(rng, (50, 3, 7), dtype)}, [50]
    )
    packed = compress(batch, ignore_dense_fields=["dense"], codec=codec)
    for part, rows in ((packed, batch), (packed[7:41], batch[7:41]), (packed[3:4], batch[3:4])):
        back = received(received(part))
        assert_aligned(back)
        assert_same(decompress(back), rows)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "batch",
    [
        TensorDict({}, [0]),
        TensorDict({}, [3]),
        TensorDict({"x": torch.zeros(0, 3)}, [0]),
        TensorDict({"x": torch.zeros(3, 0)}, [3]),
        TensorDict({"x": torch.tensor(1.5)}, []),
        TensorDict({"only": NonTensorData({"a": [1]}, batch_size=[2])}, [2]),
        samples.rollout(()),
    ],
    ids=["nothing", "no fields", "no rows", "no columns", "no batch dim", "an object", "a rollout of no rows"],
)
@quiet
def test_hardly_anything(codec: str | None, batch: TensorDict) -> None:
    packed = pack(batch, codec=codec)
    assert_same(decompress(received(packed)), batch)
    assert_same(decompress(pickle.loads(pickle.dumps(packed, protocol=4))), batch)


def test_objects_travel_beside() -> None:
    """In the pickle around it, so that cloudpickle takes what pickle does not, and large tensors are buffers."""
    image = torch.arange(5000.0)
    batch = samples.rollout().set("image", samples.per_row([{"pixels": image + b} for b in range(7)]))
    batch.set("call", NonTensorData(lambda: 11, batch_size=[7]))
    packed = pack(batch)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(packed)
    buffers: Buffers = []
    stream = cloudpickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes >= image.nbytes for buffer in buffers) >= 7
    assert len(stream) < 20_000
    back = decompress(pickle.loads(stream, buffers=buffers))
    assert back.get("call").data() == 11
    assert_same(back.exclude("call"), batch.exclude("call"))


def _double(packed: PackedBatch) -> PackedBatch:
    return packed[[1, 1]]


def test_another_process() -> None:
    batch = samples.rollout().exclude("global_token_num")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert_same(decompress(pool.apply(_double, [pack(batch)])), batch[[1, 1]])


def test_a_codec_whose_arrays_are_differences() -> None:
    """old_log_probs travels as its difference to rollout_log_probs."""
    batch = samples.workload(rows=12, prompt=32, response=400)
    packed = compress(batch, pad_token_id=samples.PAD, codec="zstd")
    records, shapes = parts(packed)[2]
    assert any(record is not None and record[2] is not None for record in records)
    assert len(shapes) == len(records)
    for part, rows in ((packed, slice(None)), (packed[3:9], slice(3, 9))):
        assert_same(decompress(received(part)), batch[rows])
    assert carried(packed) < carried(replace(packed, codec=None))


def test_pads_of_complex128_keep_their_shape() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    x = torch.where(mask != 0, 5 - 1j, torch.tensor([[1j], [2.0], [-0.0]])).to(torch.complex128)
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", PER_ROW)}
    batch = TensorDict({"m": mask, "x": x}, [3])
    for codec in CODECS:
        packed = compress(batch, registry=registry, codec=codec)
        assert packed.row_pads
        assert_same(decompress(received(packed)), batch)
        assert_same(decompress(received(packed[1:])), batch[1:])


# -------------------------------------------------------------------- what a pickle is


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_places_records_buffers_and_objects(codec: str | None) -> None:
    packed = packed_long(codec=codec)
    stream, places, records, buffers, objects = parts(packed)
    assert type(stream) is bytes
    assert objects is packed.objects
    assert (records is None) == (codec is None)
    assert 1 <= len(buffers) <= 2
    assert all(isinstance(body, pickle.PickleBuffer) for body in buffers)
    for place in places:
        size = np.dtype(place.dtype).itemsize * int(np.prod(place.shape))
        assert 0 <= place.begin <= place.begin + size <= buffers[place.buffer].raw().nbytes
    assert all(type(body) is bytes for body in packed.__reduce_ex__(4)[1][4])


def test_structure_is_small_and_arrays_are_out_of_band() -> None:
    batch = long_batch().exclude("uid", "extra_info")
    packed = compress(batch, pad_token_id=samples.PAD)
    stream, buffers = sent(packed)
    carried = sum(buffer.raw().nbytes for buffer in buffers)
    bare = TensorDict({name: batch.get(name)[:0] for name in batch.keys()}, [0])  # noqa: SIM118
    least = len(sent(compress(bare, pad_token_id=samples.PAD))[0])
    assert len(stream) < least + 4096
    assert carried == packed.nbytes


@pytest.mark.parametrize("name", strategies.MANY_RUNS)
def test_layouts_of_many_runs_travel_as_bits(name: str) -> None:
    mask, width = strategies.MANY_RUNS[name]
    batch, registry = strategies.batch_under(mask, width)
    packed = compress(batch, registry=registry)
    size = (width + 7) // 8
    order = [row for row in range(len(mask)) if row % 3][::-1]
    forms = {"whole": packed, "slice": packed[2:9], "rows": packed.take(order), "chunk": packed.chunk(4)[2]}
    forms["cat"] = PackedBatch.cat([packed[4:], packed[:4]])
    for form in forms.values():
        back = received(form)
        assert_same(decompress(back), decompress(form))
        assert back.layouts["mask"] == form.layouts["mask"]
        assert back.layouts["mask"].anchor == form.layouts["mask"].anchor
        fields = sum(array.nbytes for encoding in form.fields.values() for array in arrays_of(encoding))
        pads = sum(array.nbytes for array in form.row_pads.values())
        assert form.nbytes <= fields + pads + len(form) * size + 256
        assert carried(form) <= 1.1 * form.nbytes + 64


def unique(packed: PackedBatch) -> list[tuple[str, np.ndarray]]:
    return list({id(array): (name, array) for name, array in arrays(packed)}.values())


def test_an_array_of_two_fields_travels_once() -> None:
    packed = compress(TensorDict({"a": torch.randn(500), "b": torch.randn(500)}, [500]))
    shared = replace(packed, fields={("a",): packed.fields["a",], ("b",): packed.fields["a",]})
    assert carried(packed) == 4000
    assert len(parts(shared)[1]) == 1
    back = received(shared)
    assert back.fields["a",].words is back.fields["b",].words
    assert decompress(back)["b"].tolist() == decompress(packed)["a"].tolist()


# -------------------------------------------------------------------- no copies


def test_what_compress_gives_lies_together() -> None:
    packed = packed_long()
    roots = {id(root(array)) for _, array in arrays(packed)}
    assert len(roots) == 1
    assert_aligned(packed)
    body = root(next(arrays(packed))[1])
    assert body.dtype == np.uint8
    assert body.nbytes == sum(array.nbytes for _, array in unique(packed)), "and nothing else lies there"


def test_arrays_that_lie_together_travel_without_a_copy() -> None:
    packed = packed_long()
    _, buffers = sent(packed)
    for name, array in arrays(packed):
        assert not array.size or inside(array, buffers), name
    back = pickle.loads(sent(packed)[0], buffers=buffers)
    for (name, there), (_, here) in zip(arrays(back), arrays(packed), strict=True):
        assert not here.size or np.shares_memory(there, here), name


def test_after_unpickling_too() -> None:
    stream, buffers = sent(packed_long())
    held = [bytearray(buffer.raw()) for buffer in buffers]
    back = pickle.loads(stream, buffers=held)
    for name, array in arrays(back):
        assert not array.size or inside(array, [pickle.PickleBuffer(body) for body in held]), name
    _, again = sent(back)
    for name, array in arrays(back):
        assert not array.size or inside(array, again), name


def test_most_rows_travel_in_their_buffer_and_few_do_not() -> None:
    packed = packed_long(60)
    body = root(next(arrays(packed))[1])

    def shared(part: PackedBatch) -> bool:
        return any(np.shares_memory(body, np.frombuffer(held.raw(), np.uint8)) for held in parts(part)[3])

    assert shared(packed[1:])
    assert shared(packed[:59])
    assert not shared(packed[20:40])
    assert not shared(packed[:30])


def test_a_buffer_with_other_things_between_stays_where_it_is() -> None:
    body = np.zeros(1000, np.uint8)
    near, far = [body[0:100], body[100:200]], [body[0:100], body[800:900]]
    buffers, places = gathered(near)
    assert len(buffers) == 1
    assert np.shares_memory(buffers[0], body)
    assert [place.begin for place in places] == [0, 100]
    buffers, places = gathered(far)
    assert not any(np.shares_memory(buffer, body) for buffer in buffers)
    assert sum(buffer.nbytes for buffer in buffers) == 200


@pytest.mark.parametrize(("gap", "whole"), [(20, True), (21, False)])
def test_a_tenth_more_is_the_most_that_a_buffer_brings_along(gap: int, whole: bool) -> None:
    body = np.zeros(1000, np.uint8)
    buffers, _ = gathered([body[:104], body[104 + gap : 200 + gap]])
    assert any(np.shares_memory(buffer, body) for buffer in buffers) is whole


def test_the_buffer_that_holds_most_is_the_one_that_travels() -> None:
    small, large = np.arange(64, dtype=np.uint8), np.arange(200, dtype=np.uint8)
    loose = np.arange(5, dtype=np.int64)
    some = [small[:32], small[32:], large[:100], loose, large[100:]]
    buffers, places = gathered(some)
    assert len(buffers) == 2
    assert np.shares_memory(buffers[0], large)
    assert [place.buffer for place in places] == [1, 1, 0, 1, 0]
    assert [at(buffers, place) for place in places] == [array.tolist() for array in some]
    assert places[3].begin % 8 == 0


def at(buffers: Buffers, place: Place) -> Any:
    """The array at a place."""
    size = np.dtype(place.dtype).itemsize * int(np.prod(place.shape))
    line = buffers[place.buffer][place.begin : place.begin + size].view(place.dtype)
    return line.reshape(place.shape).tolist()


BODY = np.arange(200, dtype=np.uint8)


@pytest.mark.parametrize(
    ("some", "shared"),
    [
        ([BODY[3:8], BODY[8:72].view(np.int64), BODY[72:76].view(np.int32)], True),
        ([BODY[:100], BODY[100:], BODY[:0], BODY[200:]], True),
        ([BODY[:100], BODY[:100], BODY[90:]], True),
        ([BODY[:60], BODY[60:80], BODY[199:199]], True),
        ([BODY[::2], BODY[:3]], False),
        ([BODY[::-1], BODY[:3]], False),
        ([BODY[:100].reshape(20, 5).T, BODY[100:]], False),
        ([np.arange(50), np.arange(100, dtype=np.uint8)], False),
        ([*np.arange(60).reshape(2, 30)], False),
        ([*np.full((2, 30), 7, np.uint8)], False),
        ([BODY], False),
    ],
    ids=["odd places", "empty", "overlap", "nothing far", "steps", "back", "turned", "loose", "wide", "table", "alone"],
)
def test_arrays_of_any_kind_of_memory(some: list[np.ndarray], shared: bool) -> None:
    """Those of one buffer of bytes travel in it; all others are copied to one new buffer."""
    buffers, places = gathered(some)
    assert [at(buffers, place) for place in places] == [array.tolist() for array in some]
    assert np.shares_memory(buffers[0], some[0]) is shared
    assert len(buffers) == 1 + (shared and any(array.size == 0 for array in some))
    for place in places:
        assert place.begin % np.dtype(place.dtype).itemsize == 0


@given(st.lists(st.tuples(st.sampled_from(["u1", "i2", "i4", "i8"]), st.integers(0, 9)), max_size=8), st.data())
def test_gathered_arrays_are_all_there(forms: list[tuple[str, int]], data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    whole = copy_to_one_buffer([rng.integers(0, 100, size).astype(kind) for kind, size in forms])
    some: list[np.ndarray] = []
    for array in whole:
        begin = data.draw(st.integers(0, array.size))
        some.append(array[begin : data.draw(st.integers(begin, array.size))])
        if data.draw(st.booleans()):
            some.append(np.array(some[-1])[::-1])
    buffers, places = gathered(some)
    assert len(buffers) <= 2
    for place, array in zip(places, some, strict=True):
        line = buffers[place.buffer][place.begin : place.begin + array.nbytes].view(place.dtype).reshape(place.shape)
        assert line.tolist() == array.tolist()
        assert line.dtype == array.dtype
        assert line.ctypes.data % line.itemsize == 0


def test_arrays_without_order_in_memory() -> None:
    """Turned, in Fortran order, of more dims, or of one item."""
    table = np.arange(24).reshape(4, 6)
    thing = {"t": table.T, "back": table[0, ::-1], "cut": table[:, 2:4], "one": np.array(7), "none": table[:0]}
    stream, found, _ = apart(thing)
    assert len(found) == 5
    assert len(stream) < 200
    back = copy_to_one_buffer(thing)
    assert {name: array.tolist() for name, array in back.items()} == {name: x.tolist() for name, x in thing.items()}
    assert len({id(root(array)) for array in back.values()}) == 1
    assert all(array.flags.c_contiguous for array in back.values())


def test_together_copies_each_array_once() -> None:
    shared = np.arange(10)
    back = copy_to_one_buffer([shared, shared, np.arange(3, dtype=np.uint8)])
    assert back[0] is back[1]
    assert root(back[0]).nbytes == 83
    assert not np.shares_memory(back[0], shared)


# -------------------------------------------------------------------- slices


def test_a_slice_carries_its_own_bytes() -> None:
    packed = packed_long(200)
    whole = carried(packed)
    for part in (packed[100:102], packed[[100, 101]], received(packed)[100:102], received(packed[90:110])[10:12]):
        own = sum(array.nbytes for _, array in unique(part))
        assert carried(part) <= 1.1 * own + 200
        assert carried(part) < whole / 20
    assert carried(packed[50:50]) < 100
    split = [carried(part) for part in packed.chunk(8)]
    assert sum(split) < 1.1 * whole + 8 * 200


def test_a_forwarded_slice_carries_its_own_bytes() -> None:
    """Sliced, sent, sliced and sent again; also a slice whose bytes came in a larger buffer."""
    packed = packed_long(200)
    batch = long_batch(200)
    there = received(packed[10:195])
    for part, rows in ((there[0:2], [10, 11]), (there[-2:], [193, 194]), (received(there[4:8])[1:2], [15])):
        own = sum(array.nbytes for _, array in unique(part))
        assert carried(part) <= 1.1 * own + 200
        assert_same(decompress(received(part)), batch[rows])


@pytest.mark.parametrize("start", range(12))
def test_alignment_at_odd_slices(start: int) -> None:
    """Fields of one, two, four and eight bytes, whose bytes begin anywhere in the buffer."""
    rng = np.random.default_rng(1)
    batch = TensorDict(
        {
            name: strategies.values(rng, (101, 3), getattr(torch, name))
            for name in ("uint8", "float16", "int32", "float64", "complex128", "int8", "bfloat16")
        },
        [101],
    )
    packed = compress(batch, ignore_dense_fields=list(batch.keys()))
    for stop in (start + 1, start + 2, 97, 101):
        part = packed[start:stop]
        back = received(received(part)[0:])
        assert_aligned(back)
        assert_same(decompress(back), batch[start:stop])
    places = parts(packed[start:101])[1]
    assert all(place.begin % np.dtype(place.dtype).itemsize == 0 for place in places)


@pytest.mark.parametrize("shift", range(1, 9))
def test_buffers_may_begin_anywhere(shift: int) -> None:
    batch = samples.rollout().exclude("global_token_num")
    stream, buffers = sent(pack(batch))
    held = [memoryview(bytes(shift) + bytes(buffer.raw()))[shift:] for buffer in buffers]
    back = pickle.loads(stream, buffers=held)
    assert_same(decompress(back), batch)
    assert_same(decompress(received(back[2:5])), batch[2:5])


# -------------------------------------------------------------------- who may write, who keeps what alive


def test_what_comes_from_shared_memory_is_read_only() -> None:
    back = received(packed_long())
    for name, array in arrays(back):
        assert not array.flags.writeable, name
    out = decompress(back)
    before = out["input_ids"].clone()
    out["input_ids"].fill_(3)
    assert torch.equal(decompress(back)["input_ids"], before)


def test_a_slice_that_travelled_keeps_no_other_memory_alive() -> None:
    packed = packed_long(100)
    body = weakref.ref(root(next(arrays(packed))[1]))
    part = received(packed[3:4])
    del packed
    gc.collect()
    assert body() is None
    assert len(decompress(part)) == 1


def test_nothing_is_kept_by_pickling() -> None:
    packed = packed_long(10)
    alive = weakref.ref(packed)
    stream, buffers = sent(packed)
    held = [bytes(buffer.raw()) for buffer in buffers]
    del packed, buffers
    gc.collect()
    assert alive() is None
    assert len(pickle.loads(stream, buffers=held)) == 10


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_buffers_that_begin_anywhere_and_may_be_written(shift):
    batch = samples.rollout(objects=False)
    packed = pack(batch)
    buffers = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    lines = []
    for buffer in buffers:
        raw = buffer.raw()
        line = np.zeros(raw.nbytes + 16, np.uint8)
        begin = -line.ctypes.data % 8 + shift
        line[begin : begin + raw.nbytes] = np.frombuffer(raw, np.uint8)
        lines.append(line[begin : begin + raw.nbytes])
    there = pickle.loads(stream, buffers=lines)
    for field in there.fields.values():
        for array in arrays_of(field):
            assert array.ctypes.data % array.itemsize == 0
            assert not array.flags.writeable
    assert_same(decompress(there), batch)
