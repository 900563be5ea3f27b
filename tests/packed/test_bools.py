"""Bools have the bytes 0 and 1: what else calls itself torch.bool is refused, by name, before any of it is lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fuzz_wire import Pieces
from samples import assert_same, freeze
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack import MaskNestingSpec
from maskpack.core import native, objects
from maskpack.errors import WireFormatError
from maskpack.fields.registry import HINTS

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
    "a field with strides": ({"m": MASK, "x": bools([[1, 0, 2, 0, 0, 0, 0, 0]] * 2)[:, ::2]}, REGISTRY, "x"),
    "a mask with strides": ({"m": bools([[1, 0, 2, 0, 0, 0, 0, 0]] * 2)[:, ::2], "x": MASK}, REGISTRY, "m"),
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
    "check": lambda batch, registry, **more: mp.check(batch, registry),
}


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_other_bytes_are_refused(place, call, verify):
    fields, registry, name = PLACES[place]
    if not verify and place == "under a mask":
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


def test_what_the_error_says_to_do():
    for good in (ODD.view(torch.uint8) != 0, ODD.view(torch.uint8)):
        batch = TensorDict({"m": MASK, "x": good}, batch_size=[2])
        assert_same(mp.decompress(mp.compress(batch, registry=REGISTRY)), batch)
        assert_same(mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, REGISTRY)), batch)


# -------------------------------------------------------------------- encodings


FAMILIES = {
    "plain": lambda rng, n: rng.integers(0, 2, n),
    "one": lambda rng, n: np.ones(n),
    "rle": lambda rng, n: np.repeat(rng.integers(0, 2, n), 60)[:n],
    "sparse": lambda rng, n: rng.random(n) < 0.01,
    "delta": lambda rng, n: np.cumsum(np.repeat(rng.integers(-1, 2, n), 60)[:n]) % 256,
    "blocks": lambda rng, n: rng.integers(0, 4, n),
}


@pytest.mark.parametrize("hint", [*HINTS, "concat:x,x"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_entry_is_odd_exactly_where_its_words_are(family, hint):
    """Fields of bytes in every encoding, as a reader of bools sees them."""
    for seed, shape in itertools.product(range(4), [(), (2,)]):
        rng = np.random.default_rng(seed)
        rows = [FAMILIES[family](rng, n * (shape or (1,))[0]) for n in (200, 3, 0, 200)]
        rows[3] = rows[0]
        if seed % 2:
            rows = [np.minimum(row, 1) for row in rows]
        values = torch.from_numpy(np.concatenate(rows).astype(np.uint8)).view(-1, *shape)
        mask = torch.arange(200) < torch.tensor([200, 3, 0, 200])[:, None]
        x = torch.zeros(4, 200, *shape, dtype=torch.uint8)
        x[mask] = values
        batch = TensorDict({"m": mask, "x": x}, [4])
        packed = mp.compress(batch, registry={"m": REGISTRY["m"], "x": MaskNestingSpec("m", hints=(hint,))})
        table = packed.table
        arguments = table.entries, table.layout_rows, table.body, 4, 4, 1 << 20, table.fields
        assert native.check_fields(*arguments, np.zeros(2, np.int64)) == 0
        odd = bool((values > 1).any())
        assert native.check_fields(*arguments, np.array([0, 1])) == (-2 if odd else 0)


def test_a_file_of_other_bytes():
    x = torch.tensor([[0, 1, 1], [1, 1, 0]], dtype=torch.uint8)
    for values in (x, 2 * x):
        pieces = Pieces.of(mp.compress(TensorDict({"x": values}, [2])).to_bytes())
        pieces.manifest["fields"][0]["dtype"] = "bool"
        if values is x:
            assert_same(mp.decompress(mp.PackedBatch.from_bytes(pieces.joined()))["x"], x.bool())
        else:
            with pytest.raises(WireFormatError, match='field "x" of bools with other bytes'):
                mp.PackedBatch.from_bytes(pieces.joined())


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("held", [ODD, ODD.numpy(), {"deep": [ODD]}])
def test_other_bytes_in_python_objects_go_as_pickles_alone(held):
    batch = TensorDict({"x": MASK, "o": NonTensorData(held, batch_size=[2])}, batch_size=[2])
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
    with pytest.raises(ValueError, match="scalar in another form"):
        objects.from_json({"scalar": ["bool", "02"]}, lines.__getitem__)
