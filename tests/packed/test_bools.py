"""Bools have the bytes 0 and 1: what else calls itself torch.bool is refused, by name, before any of it is lost."""

from __future__ import annotations

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from samples import assert_same, freeze
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack import MaskNestingSpec
from maskpack.core import objects
from maskpack.packed.bools import odd_field
from maskpack.packed.encodings import Bits, Plain, Ramp, Runs, Sparse, Steps
from maskpack.packed.references import Columns, Joined, Repeated, Same, repeated

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
REGISTRY = {name: MaskNestingSpec("m") for name in ("m", "x", "y")}
PER_ROW = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", mp.PER_ROW)}
FLAT = mp.MaskNestingRegistry({"x": MaskNestingSpec("rows")}, {"rows": mp.MaskAxis("cu", "cu_seqlens")})


def bools(rows):
    return torch.tensor(rows, dtype=torch.uint8).view(torch.bool)


def jagged(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5]))


ODD, GOOD = bools([[1, 2, 0, 0], [1, 1, 1, 0]]), bools([[1, 1, 0, 0], [1, 1, 1, 0]])
PLACES = {
    "a padded field": ({"m": MASK, "x": ODD, "y": GOOD}, REGISTRY, "x"),
    "a mask": ({"m": ODD, "x": MASK}, REGISTRY, "m"),
    "a mask of one value": ({"m": bools([[3, 3, 0, 0], [3, 3, 3, 0]]), "x": MASK}, REGISTRY, "m"),
    "two fields": ({"m": ODD, "x": ODD, "y": GOOD}, REGISTRY, "m"),
    "a field along another dim": (
        {"m": MASK, "x": ODD[:, None]},
        {"m": REGISTRY["m"], "x": MaskNestingSpec("m", ragged_dim=-1)},
        "x",
    ),
    "elements of several bools": ({"m": MASK, "x": bools([[[1, 1], [0, 2], [0, 0], [0, 0]]] * 2)}, REGISTRY, "x"),
    "a pad of one value a row": ({"m": MASK, "x": bools([[1, 1, 7, 7], [1, 1, 1, 7]])}, PER_ROW, "x"),
    "under a mask": ({"m": MASK, "x": bools([[1, 1, 0, 9], [1, 1, 1, 0]])}, REGISTRY, "x"),
    "dense": ({"free": ODD}, REGISTRY, "free"),
    "dense with strides": ({"free": bools([[1, 0], [0, 0], [2, 0]]).T[:, ::2]}, REGISTRY, "free"),
    "one a row": ({"free": ODD[:, 1]}, REGISTRY, "free"),
    "expanded": ({"free": bools([[2], [1]]).expand(2, 5)}, REGISTRY, "free"),
    "the same row again and again": ({"free": bools([[1, 2]]).expand(2, 2)}, REGISTRY, "free"),
    "jagged": ({"free": jagged(bools([1, 2, 1, 1, 1]))}, REGISTRY, "free"),
    "in a sub-batch": ({"s": TensorDict({"free": ODD}, [2])}, REGISTRY, "s/free"),
}
CALLS = {
    "compress": lambda batch, registry, **more: mp.compress(batch, registry=registry, **more),
    "nest_batch_by_mask": mp.nest_batch_by_mask,
    "dense_fields": lambda batch, registry, **more: mp.dense_fields(batch, registry),
}


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("verify", ["always", "first", "never"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_other_bytes_are_refused(place, call, verify):
    fields, registry, name = PLACES[place]
    if verify != "always" and place == "under a mask":
        pytest.skip("nobody looks there")
    batch = TensorDict(dict(fields), batch_size=[2])
    before = freeze(batch)
    with pytest.raises(mp.errors.LayoutError) as caught:
        CALLS[call](batch, registry, verify=verify)
    assert str(caught.value).startswith(f'{call}: field "{name}"')
    assert "is torch.bool with bytes other than 0 and 1; expected bools." in str(caught.value)
    assert freeze(batch) == before


def test_all_fields_are_named():
    batch = TensorDict({"m": ODD, "x": ODD, "y": GOOD, "z": ODD}, batch_size=[2])
    with pytest.raises(mp.errors.LayoutError, match='field "m", "x", "z" is'):
        mp.compress(batch, registry=REGISTRY)


def test_packed_rows_that_lie_one_behind_the_other():
    batch = TensorDict({"cu": torch.tensor([0, 2, 5]), "x": bools([1, 1, 2, 0, 1])}, batch_size=[])
    with pytest.raises(mp.errors.LayoutError, match=r'field "x" is torch\.bool'):
        mp.compress(batch, registry=FLAT)


@pytest.mark.filterwarnings("error")
def test_what_is_dropped_may_be_anything():
    batch = TensorDict({"m": MASK, "x": bools([[1, 1, 0, 9], [1, 1, 1, 0]])}, batch_size=[2])
    packed = mp.compress(batch, registry=REGISTRY, on_loss="drop")
    assert_same(mp.decompress(packed), TensorDict({"m": MASK, "x": GOOD}, batch_size=[2]))


def test_what_the_error_says_to_do():
    for good in (ODD.view(torch.uint8) != 0, ODD.view(torch.uint8)):
        batch = TensorDict({"m": MASK, "x": good}, batch_size=[2])
        assert_same(mp.decompress(mp.compress(batch, registry=REGISTRY)), batch)
        assert_same(mp.unnest(mp.nest_batch_by_mask(batch, REGISTRY)), batch)


def test_empty_bools():
    for shape in ((0, 4), (2, 0), (2, 4, 0)):
        batch = TensorDict({"x": torch.zeros(shape, dtype=torch.bool)}, batch_size=[shape[0]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
            assert_same(mp.decompress(mp.compress(batch)), batch)


# -------------------------------------------------------------------- encodings


def naive(encoding, bounds):
    return any(word not in (0, 1) for word in encoding.decode(np.dtype(np.uint8), bounds).tolist())


def encoded(words, bounds):
    """The words in every encoding that can say them."""
    yield Plain(words)
    yield from (kind.encode(words, bounds) for kind in (Bits, Runs, Ramp, Steps, Sparse))
    yield repeated(words, bounds, lambda words, _: Plain(words))
    yield repeated(words, bounds, lambda words, own: Runs.encode(words, own) or Plain(words))
    if not (bounds % 2).any():
        yield Columns(tuple(Plain(np.ascontiguousarray(words[place::2])) for place in range(2)))


def test_an_encoding_is_odd_exactly_where_its_words_are():
    rng = random.Random(5)
    seen = set()
    for _ in range(3000):
        lengths = [rng.choice([0, 0, 1, 2, 3, 4, 7]) for _ in range(rng.randint(0, 4))]
        bounds = np.cumsum([0, *lengths])
        low, high = rng.choice([(0, 1), (0, 1), (0, 2), (1, 2), (0, 255), (255, 254), (1, 0)])
        near = rng.random()
        words = np.array([high if rng.random() < near else low for _ in range(bounds[-1])], np.uint8)
        if rng.random() < 0.3 and words.size:
            words = np.cumsum(words, dtype=np.uint8)
        for encoding in encoded(words, bounds):
            if encoding is not None:
                want = any(word > 1 for word in words.tolist())
                assert odd_field(("x",), {("x",): encoding}, lambda _, b=bounds: b) is want, (encoding, bounds)
                seen.add((type(encoding).__name__, want))
    kinds = (Plain, Bits, Runs, Ramp, Steps, Sparse, Repeated, Columns)
    assert seen == set(itertools.product((kind.__name__ for kind in kinds), (False, True)))


def test_ramps_and_steps_of_any_size():
    rng = random.Random(6)
    for _ in range(4000):
        lengths = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randint(1, 4))]
        bounds = np.cumsum([0, *lengths])
        firsts = np.array([rng.choice([0, 1, 2, 255]) for _ in lengths], np.uint8)
        ramp = Ramp(firsts if rng.random() < 0.7 else firsts[:1], rng.choice([0, 1, -1, 2, 128, 255, 256, 257, -256]))
        assert odd_field(("x",), {("x",): ramp}, lambda _, b=bounds: b) is naive(ramp, bounds)
        pieces = [rng.randint(1, length) if length else 0 for length in lengths]
        counts = []
        for length, number in zip(lengths, pieces, strict=True):
            left = length
            for place in range(number - 1):
                counts.append(rng.randint(1, left - (number - 1 - place)))
                left -= counts[-1]
        values = np.array([rng.choice([0, 0, 1, 255, 2]) for _ in range(sum(pieces))], np.uint8)
        steps = Steps(Runs(np.array(pieces, np.uint8), np.array(counts, np.uint8), values))
        assert steps.steps.problem(np.dtype(np.uint8), bounds) is None
        assert odd_field(("x",), {("x",): steps}, lambda _, b=bounds: b) is naive(steps, bounds)


def test_a_long_row_is_not_decoded_to_look_at_it():
    bounds = np.array([0, 1 << 45])
    steps = Steps(Runs(np.array([1], np.uint8), np.zeros(0, np.uint8), np.array([0], np.uint8)))
    for encoding, odd in (
        (Ramp(np.array([1], np.uint8), 0), False),
        (Ramp(np.array([1], np.uint8), 1), True),
        (steps, False),
    ):
        assert odd_field(("x",), {("x",): encoding}, lambda _: bounds) is odd


def test_fields_that_follow_from_others():
    good, odd = Plain(np.array([0, 1, 1], np.uint8)), Plain(np.array([0, 3, 1], np.uint8))
    bounds = np.array([0, 1, 3])
    for first, second in itertools.product((good, odd), repeat=2):
        fields = {("a",): first, ("b",): second, ("s",): Same(("a",)), ("j",): Joined(("s",), ("b",))}
        assert odd_field(("s",), fields, lambda _: bounds) is (first is odd)
        assert odd_field(("j",), fields, lambda _: bounds) is (first is odd or second is odd)


# -------------------------------------------------------------------- files


def as_bools(data, names=None):
    """A file whose uint8 fields call themselves bool."""
    old, new = rb"\"dtype\":\"uint8\"", rb"\"dtype\":\"bool\" "
    assert old in data
    return data.replace(old, new)


def lying(words):
    """A file with a padded bool field of these words."""
    length = len(words)
    batch = TensorDict({"m": torch.ones(2, length), "x": torch.tensor([words] * 2, dtype=torch.uint8)}, batch_size=[2])
    return as_bools(mp.compress(batch, registry=REGISTRY).to_bytes())


@pytest.mark.parametrize(
    "words",
    [
        [0, 1, 1, 0, 1, 0, 0, 1],
        [1] * 40,
        [0] * 30 + [1] * 30,
        [0] * 60 + [1],
        [0, 1] * 20,
    ],
)
def test_a_file_of_bools(words):
    got = mp.decompress(mp.PackedBatch.from_bytes(lying(words)))
    assert got["x"].dtype is torch.bool
    assert got["x"].view(torch.uint8).tolist() == [words] * 2


@pytest.mark.parametrize(
    "words",
    [
        [0, 1, 2, 0, 1, 255, 0, 1],
        [2] * 40,
        [0] * 30 + [255] * 30,
        [0] * 60 + [7],
        [0, 2] * 20,
        list(range(50)),
        [*range(25), *range(25)],
        [0, 1, 2] + [1] * 60,
    ],
)
def test_a_file_of_other_bytes(words):
    with pytest.raises(mp.errors.WireFormatError, match='field "x" of bools with other bytes; expected 0 and 1 alone'):
        mp.PackedBatch.from_bytes(lying(words))


def test_a_file_whose_bools_are_the_bytes_of_another_field():
    for words, odd in (([0, 1, 1], False), ([0, 1, 3], True)):
        x = torch.tensor([words] * 2, dtype=torch.uint8)
        data = mp.compress(TensorDict({"m": torch.ones(2, 3), "x": x, "y": x}, [2]), registry=REGISTRY).to_bytes()
        assert rb"\"kind\":\"same\"" in data
        at = data.rindex(rb"\"dtype\":\"uint8\"")  # of y, which is the same as x
        data = data[:at] + as_bools(data[at:])
        if odd:
            with pytest.raises(mp.errors.WireFormatError, match='field "y" of bools'):
                mp.PackedBatch.from_bytes(data)
        else:
            assert mp.decompress(mp.PackedBatch.from_bytes(data))["y"].view(torch.uint8).tolist() == [words] * 2


def test_a_file_whose_row_pads_are_other_bytes():
    for pad, odd in ((1, False), (5, True)):
        x = torch.tensor([[1, 1, 0, 0], [1, 1, 1, pad]], dtype=torch.uint8)
        data = as_bools(mp.compress(TensorDict({"m": MASK, "x": x}, batch_size=[2]), registry=PER_ROW).to_bytes())
        if odd:
            with pytest.raises(mp.errors.WireFormatError, match='field "x" of bools with other bytes'):
                mp.PackedBatch.from_bytes(data)
        else:
            assert mp.decompress(mp.PackedBatch.from_bytes(data))["x"].view(torch.uint8).tolist() == x.tolist()


# -------------------------------------------------------------------- Python objects


@pytest.mark.parametrize("held", [ODD, ODD.numpy(), {"deep": [ODD]}])
def test_other_bytes_in_python_objects_go_as_pickles_alone(held):
    batch = TensorDict({"x": MASK, "o": NonTensorData(held, batch_size=[2])}, batch_size=[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
        packed = mp.compress(batch)
    with pytest.raises(mp.MaskpackError, match='field "o" holds'):
        packed.to_bytes()
    again = mp.PackedBatch.from_bytes(packed.to_bytes(allow_pickle=True), allow_pickle=True)
    assert_same(mp.decompress(again).get("o"), batch.get("o"))


def test_json_of_other_bytes_is_refused():
    lines = {0: np.array([0, 1, 1], np.uint8), 1: np.array([0, 1, 2], np.uint8)}
    for name in ("tensor", "array"):
        assert objects.from_json({name: [0, "bool", [3]]}, lines.__getitem__).restored().tolist() == [False, True, True]
        assert objects.from_json({name: [1, "uint8", [3]]}, lines.__getitem__).restored().tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="bools with other bytes"):
            objects.from_json({name: [1, "bool", [3]]}, lines.__getitem__)
    assert objects.from_json({"scalar": ["bool", "01"]}, lines.__getitem__) == np.True_
    with pytest.raises(ValueError, match="a bool with another byte"):
        objects.from_json({"scalar": ["bool", "02"]}, lines.__getitem__)
