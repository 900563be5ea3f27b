"""MaskNestingRegistry as a value: merging, look-up, plain dicts, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest
import torch
import yaml
from samples import PAD, assert_same, field, of, tokens, under
from tensordict import TensorDict

import maskpack as mp
from maskpack import EDGE, PAD_TOKEN_ID, RL_FIELDS, MaskAxis, MaskNestingRegistry, MaskNestingSpec
from maskpack.core.keys import show
from maskpack.errors import RegistryError
from maskpack.fields.options import registry_of
from maskpack.fields.registry import HINTS

A, B, C = MaskNestingSpec("a"), MaskNestingSpec("b", 1), MaskNestingSpec(["c", "d"], [0, -1], -1, ("rle",))
EVERYTHING = MaskNestingRegistry(
    {
        "one": MaskNestingSpec("axis", PAD_TOKEN_ID),
        "two": MaskNestingSpec("axis", EDGE, ragged_dim=-1),
        ("sub", "three"): MaskNestingSpec([("sub", "mask"), "axis"], [0, -1], ragged_dim=2, hints=("rle",)),
        "four": MaskNestingSpec("mask", 0.5),
        "five": MaskNestingSpec(["mask"], [PAD_TOKEN_ID, 0]),
        "six": MaskNestingSpec(None),
        "seven": MaskNestingSpec("flat", True),
        "eight": MaskNestingSpec("mask", [0, mp.PER_ROW]),
    },
    {
        "axis": (
            MaskAxis(("sub", "mask"), part="head", head=("one", ("sub", "two"))),
            MaskAxis("other", part="prefix"),
        ),
        "tail": MaskAxis("mask", part="tail", tail=("one",)),
        "left": MaskAxis("prompt_mask", padded="left"),
        "response": MaskAxis("loss_mask", shift=-1),
        "lengths": MaskAxis("input_lengths", form="lengths", head=("input_ids",)),
        "flat": MaskAxis("cu_seqlens", form="cu_seqlens"),
    },
)

# -------------------------------------------------------------------- a mapping that merges


def test_no_two_paths_have_one_text():
    names = ["".join(signs) for size in range(4) for signs in itertools.product("a/\\", repeat=size)]
    paths = [path for size in (1, 2) for path in itertools.product(names, repeat=size)]
    assert len({show(path) for path in paths}) == len(paths)


def test_it_is_a_mapping():
    registry = MaskNestingRegistry({"x": A, ("y",): B, ("s", "z"): C})
    assert list(registry) == ["x", "y", ("s", "z")]
    assert len(registry) == 3
    assert registry["y"] == registry[("y",)] == B
    assert ("s", "z") in registry
    assert "z" not in registry
    assert dict(registry.items()) == {"x": A, "y": B, ("s", "z"): C}
    with pytest.raises(KeyError):
        registry["unknown"]


def test_merge_right_side_wins():
    left = MaskNestingRegistry({"x": A, "y": A}, {"axis": MaskAxis("a"), "other": MaskAxis("o")})
    right = MaskNestingRegistry({"y": B, "z": B}, {"axis": MaskAxis("b")})
    merged = left | right
    assert dict(merged) == {"x": A, "y": B, "z": B}
    assert merged.axes == {"axis": (MaskAxis("b"),), "other": (MaskAxis("o"),)}


def test_merge_with_a_dict_on_either_side():
    registry = MaskNestingRegistry({"x": A, "y": A}, {"axis": MaskAxis("a")})
    after, before = registry | {"y": B, ("z",): C}, {"y": B, "z": C} | registry
    assert isinstance(after, MaskNestingRegistry)
    assert isinstance(before, MaskNestingRegistry)
    assert dict(after) == {"x": A, "y": B, "z": C}
    assert dict(before) == {"x": A, "y": A, "z": C}
    assert after.axes == before.axes == registry.axes


def test_a_tuple_is_a_mask_and_a_pad():
    both = {"x": ("a", 0), ("s", "y"): (["c", ("s", "d")], [PAD_TOKEN_ID, -1]), "z": (None, 0), "w": B}
    specs = {
        "x": MaskNestingSpec("a"),
        ("s", "y"): MaskNestingSpec(["c", ("s", "d")], [PAD_TOKEN_ID, -1]),
        "z": MaskNestingSpec(None),
        "w": B,
    }
    left = MaskNestingRegistry({"x": B, "v": A})
    for mixed, plain in (
        (MaskNestingRegistry(both), MaskNestingRegistry(specs)),
        (registry_of(both, "call"), MaskNestingRegistry(specs)),
        (left | both, left | specs),
        (both | left, specs | left),
    ):
        assert dict(mixed) == dict(plain)
        assert mixed.to_dict() == plain.to_dict()


def test_a_dict_of_tuples_is_a_registry_of_every_call():
    batch = tokens()
    batch |= {"x": of("response", torch.float32, -2.5), "response_mask": of("response", torch.int64)}
    batch["response_mask"] = (batch["responses"] != PAD).long()
    batch = TensorDict(batch, batch_size=[7]).select("responses", "response_mask", "x")
    registry = {"responses": ("response_mask", PAD_TOKEN_ID), "response_mask": ("response_mask", 0), "x": (None, 0)}
    nested = mp.nest_batch_by_mask(batch, registry, pad_token_id=PAD, strict_mask_nesting=True)
    assert (nested["responses"].is_nested, nested["x"].is_nested) == (True, False)
    packed = mp.compress(batch, registry=registry | {"x": ("response_mask", -2.5)}, pad_token_id=PAD)
    assert {form.path[0]: form.kind for form in packed.schema.forms} == dict.fromkeys(registry, "padded")
    for again in (mp.unnest_batch_by_mask(nested), mp.decompress(packed)):
        assert_same(again, batch)


@pytest.mark.parametrize("given", [(), ("a",), ("a", 0, 1), ["a", 0]], ids=str)
def test_a_tuple_of_another_length_is_refused(given: Any):
    for make in (MaskNestingRegistry, lambda fields: RL_FIELDS | fields, lambda fields: registry_of(fields, "call")):
        with pytest.raises(
            RegistryError, match=r'field "x" is .*; expected a MaskNestingSpec or a tuple \(mask, pad\)'
        ):
            make({"x": given})
    for fields in ({"x": (1, 0)}, {"x": ("a", "zero")}):
        with pytest.raises(RegistryError, match=r"MaskNestingSpec: (mask|pad)"):
            MaskNestingRegistry(fields)


def test_the_dict_that_made_it_is_not_shared():
    fields, axes = {"x": A}, {"axis": (MaskAxis("a"),)}
    registry = MaskNestingRegistry(fields, axes)
    fields["x"], axes["axis"] = B, ()
    assert registry["x"] == A
    assert registry.axes == {"axis": (MaskAxis("a"),)}


def test_equal_registries_hash_alike():
    assert hash(EVERYTHING) == hash(copy.deepcopy(EVERYTHING))
    assert {RL_FIELDS: 1}[MaskNestingRegistry(dict(RL_FIELDS), RL_FIELDS.axes)] == 1
    assert RL_FIELDS | {"input_ids": MaskNestingSpec(None)} != RL_FIELDS
    assert MaskNestingSpec("a", 1) != MaskNestingSpec("a", 2)
    left, right = MaskNestingRegistry({"x": A, "y": B}), MaskNestingRegistry({"y": B, "x": A})
    assert left == right
    assert hash(left) == hash(right)


def test_specs_compare_by_tuples_of_their_masks_and_pads() -> None:
    masks: list[Any] = ["a", ("sub", "b")]
    pads: list[Any] = [0, EDGE]
    spec = MaskNestingSpec(masks, pads)
    masks.append("c")
    pads.append(1)
    assert (spec.masks, spec.pads) == (("a", ("sub", "b")), (0, EDGE))
    assert spec == dataclasses.replace(spec) == MaskNestingSpec(["a", ("sub", "b")], [0, EDGE])
    assert MaskNestingSpec(["m"], [0]) == MaskNestingSpec(("m",), 0) == MaskNestingSpec("m")
    assert hash(MaskNestingSpec(["m"], [0])) == hash(MaskNestingSpec("m"))
    assert MaskNestingSpec(["a", "b"]) != MaskNestingSpec(("a", "b"))


# -------------------------------------------------------------------- plain dicts


@pytest.mark.parametrize("registry", [EVERYTHING, RL_FIELDS, MaskNestingRegistry({})], ids=["all", "RL", "empty"])
@pytest.mark.parametrize(
    "through",
    [
        lambda data: data,
        lambda data: json.loads(json.dumps(data)),
        lambda data: yaml.safe_load(yaml.safe_dump(data, sort_keys=False)),
        lambda data: pickle.loads(pickle.dumps(MaskNestingRegistry.from_dict(data))).to_dict(),
    ],
    ids=["dict", "json", "yaml", "pickle"],
)
def test_plain_round_trip(registry, through):
    data = registry.to_dict()
    again = MaskNestingRegistry.from_dict(through(data))
    assert again == registry
    assert list(again) == list(registry)
    assert again.to_dict() == data


def test_plain_form():
    data = MaskNestingRegistry(
        {"x": MaskNestingSpec("axis", PAD_TOKEN_ID), ("s", "y"): MaskNestingSpec(["m", "n"], -1, -1, ("rle",))},
        {"axis": MaskAxis("mask", part="head", head=("x",)), "left": MaskAxis("prompt_mask", padded="left")},
    ).to_dict()
    assert data == {
        "axes": {
            "axis": [{"source": "mask", "part": "head", "head": ["x"]}],
            "left": [{"source": "prompt_mask", "padded": "left"}],
        },
        "fields": {
            "x": {"mask": "axis", "pad": "PAD_TOKEN_ID"},
            "s/y": {"mask": ["m", "n"], "pad": -1, "ragged_dim": -1, "hints": ["rle"]},
        },
    }


# -------------------------------------------------------------------- look-up


def test_find_goes_by_path_then_by_last_name():
    registry = MaskNestingRegistry({"x": A, ("s", "x"): B, ("t", "y"): C})
    assert registry.find(("x",)) == A
    assert registry.find(("s", "x")) == B
    assert registry.find(("other", "x")) == A
    assert registry.find(("deeper", "s", "x")) == A
    assert registry.find(("t", "y")) == C
    assert registry.find(("y",)) is None
    assert registry.find(("s",)) is None


def test_masks_are_tried_in_order():
    masks = {"short": [[True, False, False]] * 2, "long": [[True] * 4] * 2, "equal": [[True] * 3] * 2}
    x = field(masks["short"], torch.float32)

    def length(*names):
        batch = TensorDict({**{name: torch.tensor(masks[name]) for name in names}, "x": x}, batch_size=[2])
        registry = {"x": MaskNestingSpec([*names])}
        return (
            mp.nest_batch_by_mask(batch, registry | dict.fromkeys(names, MaskNestingSpec(None)))["x"].values().shape[0]
        )

    assert length("short", "long") == length("long", "short") == 2  # the one that fits
    assert (length("short", "equal"), length("equal", "short")) == (2, 6)  # both fit, the first counts


def test_pads_are_tried_in_order():
    """Those that the dtype cannot hold are passed over; whole floats are integers."""
    mask = [[True, False, False], [True, True, False]]
    cases = [([0, -1], 0), ([0, -1], -1), ([7, EDGE], "edge"), ([PAD_TOKEN_ID, 3], PAD), ([0.5, 0], 0), ([3.0], 3)]
    for pads, pad in cases:
        batch, registry = under(mask, {"x": pads}, x=field(mask, torch.int32, pad))
        nested = mp.nest_batch_by_mask(batch, registry, pad_token_id=PAD, strict_mask_nesting=True)
        assert_same(mp.unnest_batch_by_mask(nested), batch)
        packed = mp.compress(batch, registry=registry, pad_token_id=PAD, strict_mask_nesting=True)
        assert_same(mp.decompress(packed), batch)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.uint8, -100),
        (torch.uint8, 256),
        (torch.int64, 0.5),
        (torch.int32, 2**31),
        (torch.int64, float("inf")),
        (torch.int64, float("nan")),
        (torch.bool, 2),
        (torch.float16, 1e6),
        (torch.float32, 1j),
    ],
    ids=str,
)
def test_a_pad_that_the_dtype_cannot_hold(dtype, pad):
    batch = TensorDict({"m": torch.ones(2, 3), "x": torch.ones(2, 3).to(dtype)}, batch_size=[2])
    name = str(dtype).removeprefix("torch.")
    for spec in (MaskNestingSpec("m", pad), MaskNestingSpec("m", [pad])):
        with pytest.raises(RegistryError, match=rf'field "x" is {name}; its pad .* does not fit'):
            mp.nest_batch_by_mask(batch, {"x": spec})
        with pytest.raises(RegistryError, match=rf'field "x" is {name}; its pad .* does not fit'):
            mp.compress(batch, registry={"x": spec})


@pytest.mark.parametrize("hint", [*HINTS, "concat:a,b", "concat:a/b,c", "near:a", "near:a/b"])
def test_hints_that_are_known(hint):
    spec = MaskNestingSpec("m", hints=["rle", hint])
    assert spec.hints == ("rle", hint)
    registry = MaskNestingRegistry({"x": spec})
    assert MaskNestingRegistry.from_dict(registry.to_dict()) == registry
    assert registry != MaskNestingRegistry({"x": MaskNestingSpec("m")})


@pytest.mark.parametrize(
    ("zeros", "records"),
    [([[0.0, 0.0], [0.0, 0.0]], (1, 5)), ([[0.0, 0.0], [-0.0, -0.0]], (2, 5)), ([[-0.0, 0.0], [0.0, -0.0]], (2, 6))],
    ids=["one sign", "one a row", "mixed"],
)
def test_the_values_decide_which_signs_of_zero_are_kept(zeros, records):
    """One record for all rows, one for each row, or one with a byte of bits for the four positions of each row."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]])
    x = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    batch = TensorDict({"m": mask, "x": torch.cat([x, torch.tensor(zeros)], 1)}, [2])
    registry = MaskNestingRegistry({"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", mp.ZERO)})
    packed = mp.compress(batch, registry=registry, strict_mask_nesting=True)
    own = packed.table.pads[packed.numbers["x",]]
    assert (own["count"], own["size"]) == records
    assert_same(mp.decompress(packed), batch)
    assert_same(mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True)), batch)
    with pytest.raises(mp.errors.LossyPadError) if records[0] > 1 else contextlib.nullcontext():
        mp.compress(batch, registry=registry | {"x": MaskNestingSpec("m", 0)}, strict_mask_nesting=True)


def test_zero_is_one_name_in_plain_dicts():
    registry = MaskNestingRegistry(
        {"x": MaskNestingSpec("m", mp.ZERO), "y": MaskNestingSpec("m", [mp.ZERO, mp.PER_ROW])}
    )
    plain = registry.to_dict()
    assert plain["fields"] == {"x": {"mask": "m", "pad": "ZERO"}, "y": {"mask": "m", "pad": ["ZERO", "PER_ROW"]}}
    assert MaskNestingRegistry.from_dict(plain) == registry
    assert MaskNestingSpec("m", [0, mp.ZERO]).pads == MaskNestingSpec("m", mp.ZERO).pads
    for other in ("SIGNED_ZERO", "ANY_ZERO"):
        plain["fields"]["x"]["pad"] = other
        with pytest.raises(mp.errors.RegistryError, match=f"pad is '{other}'; expected one of .*ZERO"):
            MaskNestingRegistry.from_dict(plain)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"fields": {"x": {"mask": "m", "ragged_dim": 0}}}, 'field "x": MaskNestingSpec: ragged_dim is 0'),
        ({"fields": {"x": {"mask": "m", "hints": ["near:"]}}}, 'field "x": MaskNestingSpec: hint is .near:'),
        ({"fields": {"x": {"mask": "m", "hints": ["concat:,"]}}}, 'field "x": MaskNestingSpec: hint is .concat:,'),
        ({"axes": {"a": {"source": "m", "part": "head"}}}, 'axis "a": MaskAxis: part'),
    ],
)
def test_errors_of_plain_dicts_name_the_part(plain, message):
    with pytest.raises(mp.errors.RegistryError, match=f"MaskNestingRegistry.from_dict: {message}"):
        MaskNestingRegistry.from_dict(plain)
