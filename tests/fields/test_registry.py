"""MaskNestingRegistry as a value: merging, look-up, plain dicts, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
import yaml
from samples import PAD, assert_same, field, freeze, of, rollout, tokens
from tensordict import TensorDict

import maskpack as mp
from maskpack import EDGE, PAD_TOKEN_ID, RL_FIELDS, MaskAxis, MaskNestingRegistry, MaskNestingSpec
from maskpack.errors import RegistryError
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
        "lengths": MaskAxis("input_lengths", form="lengths", head=("input_ids",)),
        "flat": MaskAxis("cu_seqlens", form="cu_seqlens"),
    },
)

# -------------------------------------------------------------------- a mapping that merges


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


def test_merge_changes_neither_side():
    left, right, plain = MaskNestingRegistry({"x": A}), MaskNestingRegistry({"x": B, "y": B}), {"x": C}
    states = copy.deepcopy((dict(left.fields), dict(right.fields), plain))
    _ = left | right, left | plain, plain | left
    assert states == (left.fields, right.fields, plain)
    merged = left
    merged |= right
    assert dict(left) == {"x": A}


def test_the_dict_that_made_it_is_not_shared():
    fields, axes = {"x": A}, {"axis": (MaskAxis("a"),)}
    registry = MaskNestingRegistry(fields, axes)
    fields["x"], axes["axis"] = B, ()
    assert registry["x"] == A
    assert registry.axes == {"axis": (MaskAxis("a"),)}
    masks, pads = ["a", "b"], [0, -1]
    spec = MaskNestingSpec(masks, pads)
    masks.append("c"), pads.append(7)
    assert spec == MaskNestingSpec(["a", "b"], [0, -1])


def test_override_at_one_call():
    data = tokens()
    data["routed_experts"] = of("sequence", torch.int16, -100, (2,))
    batch = TensorDict(data, batch_size=[7])
    with pytest.warns(mp.errors.MaskpackWarning, match="routed_experts"):
        mp.nest_batch_by_mask(batch, pad_token_id=PAD)
    override = RL_FIELDS | {"routed_experts": MaskNestingSpec("sequence", -100)}
    nested = mp.nest_batch_by_mask(batch, override, pad_token_id=PAD, strict_mask_nesting=True)
    assert nested["routed_experts"].is_nested
    assert_same(mp.unnest_batch_by_mask(nested), batch)
    assert RL_FIELDS["routed_experts"].pads == (0, -1)


def test_frozen():
    for value, name in ((RL_FIELDS, "fields"), (A, "mask"), (MaskAxis("a"), "source")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    with pytest.raises(TypeError):
        RL_FIELDS["new"] = A


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


def test_pickled_it_is_the_same():
    for registry in (EVERYTHING, RL_FIELDS):
        again = pickle.loads(pickle.dumps(registry))
        assert again == registry
        assert hash(again) == hash(registry)
    assert pickle.loads(pickle.dumps(EDGE)) is EDGE
    assert pickle.loads(pickle.dumps(PAD_TOKEN_ID)) is PAD_TOKEN_ID
    assert repr(EDGE) == "EDGE"


# -------------------------------------------------------------------- plain dicts


@pytest.mark.parametrize("registry", [EVERYTHING, RL_FIELDS, MaskNestingRegistry({})], ids=["all", "RL", "empty"])
@pytest.mark.parametrize(
    "through",
    [
        lambda data: data,
        lambda data: json.loads(json.dumps(data)),
        lambda data: yaml.safe_load(yaml.safe_dump(data, sort_keys=False)),
    ],
    ids=["dict", "json", "yaml"],
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


def test_masks_are_padded_on_the_right_where_nothing_is_said():
    assert MaskAxis("m").padded == "right"
    data = {"axes": {"a": {"source": "m"}, "b": {"source": "m", "padded": "right"}}}
    assert MaskNestingRegistry.from_dict(data).axes == {"a": (MaskAxis("m"),), "b": (MaskAxis("m"),)}
    assert MaskAxis("m", padded="left") != MaskAxis("m")


def test_from_dict_takes_one_axis_or_a_list():
    way = {"source": "mask"}
    one = MaskNestingRegistry.from_dict({"axes": {"a": way}})
    assert one == MaskNestingRegistry.from_dict({"axes": {"a": [way]}})
    assert one.axes == {"a": (MaskAxis("mask"),)}


UNKNOWN = {
    "top": ({"feilds": {}}, "feilds"),
    "field": ({"fields": {"x": {"mask": "m", "pda": 0}}}, 'field "x".*pda'),
    "axis": ({"axes": {"a": {"source": "m", "heads": []}}}, 'axis "a".*heads'),
    "pad": ({"fields": {"x": {"mask": "m", "pad": "EDG"}}}, 'field "x".*EDG'),
    "pads": ({"fields": {"x": {"mask": "m", "pad": [0, "eos"]}}}, 'field "x".*eos'),
    "form": ({"axes": {"a": {"source": "m", "form": "length"}}}, "form is 'length'"),
    "part": ({"axes": {"a": {"source": "m", "part": "middle"}}}, "part is 'middle'"),
    "padded": ({"axes": {"a": {"source": "m", "padded": "both"}}}, "padded is 'both'; expected one of right, left"),
    "hint": ({"fields": {"x": {"mask": "m", "hints": ["rle", "run"]}}}, "hint is 'run'"),
    "hints as one text": ({"fields": {"x": {"mask": "m", "hints": "rle"}}}, "hints is 'rle'"),
    "no mask": ({"fields": {"x": {"pad": 0}}}, 'field "x": no mask'),
    "no split": ({"axes": {"a": {"source": "m", "part": "head"}}}, '"m" names no field'),
    "no masks": ({"fields": {"x": {"mask": []}}}, "mask is an empty list"),
    "no source": ({"axes": {"a": {"form": "lengths"}}}, 'axis "a".*source'),
    "no spec": ({"fields": {"x": None}}, 'field "x"'),
    "a string": ({"fields": {"x": "response"}}, 'field "x"'),
}


@pytest.mark.parametrize(("data", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_from_dict_refuses(data, message):
    before = copy.deepcopy(data)
    with pytest.raises(RegistryError, match=message):
        MaskNestingRegistry.from_dict(data)
    assert data == before


def test_to_dict_refuses_a_name_with_a_slash():
    with pytest.raises(RegistryError, match="a/b"):
        MaskNestingRegistry({"a/b": A}).to_dict()
    with pytest.raises(RegistryError, match="m/n"):
        MaskNestingRegistry({"x": MaskNestingSpec("m/n")}).to_dict()


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


def test_look_up_in_a_batch():
    mask = [[True, False], [True, True]]
    batch = TensorDict({"m": torch.tensor(mask), "x": field(mask, torch.int64, 1)}, batch_size=[2])
    batch["s", "x"] = field(mask, torch.int64, 2)
    batch["t", "x"] = field(mask, torch.int64, 1)
    registry = {"x": MaskNestingSpec("m", 1), ("s", "x"): MaskNestingSpec("m", 2)}
    nested = mp.nest_batch_by_mask(batch, registry, on_loss="error", ignore_dense_fields=["m"])
    assert all(nested[key].is_nested for key in ("x", ("s", "x"), ("t", "x")))
    assert_same(mp.unnest_batch_by_mask(nested), batch)


def test_masks_are_tried_in_order():
    short, long = [[True, False, False]] * 2, [[True, True, False, False]] * 2
    equal = [[True, True, True]] * 2
    registry = {"x": MaskNestingSpec(["first", "second"])}

    def length(first, second, x):
        masks = {"first": torch.tensor(first), "second": torch.tensor(second)}
        batch = TensorDict({**masks, "x": field(x, torch.float32)}, batch_size=[2])
        ignored = ["first", "second"]
        return mp.nest_batch_by_mask(batch, registry, ignore_dense_fields=ignored)["x"].values().shape[0]

    assert length(short, long, short) == 2  # the first fits
    assert length(long, short, short) == 2  # only the second fits
    assert length(short, equal, short) == 2  # both fit, the first counts
    with pytest.raises(
        mp.errors.LayoutError, match=r'"x" is \(2, 3\); mask "first" is \(2, 4\); mask "second" is \(2, 4\)'
    ):
        length(long, long, short)


def test_pads_are_tried_in_order():
    mask = [[True, False, False], [True, True, False]]
    for pads, pad in (([0, -1], 0), ([0, -1], -1), ([7, EDGE], "edge"), ([PAD_TOKEN_ID, 3], PAD), ([-0.0, 0], 0)):
        batch = TensorDict({"m": torch.tensor(mask), "x": field(mask, torch.int32, pad)}, batch_size=[2])
        registry = {"x": MaskNestingSpec("m", pads), "m": MaskNestingSpec("m")}
        nested = mp.nest_batch_by_mask(batch, registry, pad_token_id=PAD, strict_mask_nesting=True)
        assert_same(mp.unnest_batch_by_mask(nested), batch)
        packed = mp.compress(batch, registry=registry, pad_token_id=PAD, strict_mask_nesting=True)
        assert_same(mp.decompress(packed), batch)


def test_pads_0_and_minus_0_are_told_apart():
    mask = [[True, False], [True, True]]
    registry = {"x": MaskNestingSpec("m", [0.0, -0.0]), "m": MaskNestingSpec("m")}
    for pad in (0.0, -0.0):
        batch = TensorDict({"m": torch.tensor(mask), "x": field(mask, torch.float32, pad)}, batch_size=[2])
        assert_same(mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True)), batch)


@pytest.mark.parametrize("hint", [*HINTS, "concat:a,b", "concat:a/b,c", "near:a", "near:a/b"])
def test_hints_that_are_known(hint):
    spec = MaskNestingSpec("m", hints=["rle", hint])
    assert spec.hints == ("rle", hint)
    registry = MaskNestingRegistry({"x": spec})
    assert MaskNestingRegistry.from_dict(registry.to_dict()) == registry
    assert registry != MaskNestingRegistry({"x": MaskNestingSpec("m")})


# -------------------------------------------------------------------- what it refuses


def test_a_missing_pad_token_id_names_the_field():
    batch = rollout(objects=False).select("prompts", "attention_mask")
    before = freeze(batch)
    for call in (mp.nest_batch_by_mask, mp.compress):
        with pytest.raises(RegistryError, match=rf'{call.__name__}: field "prompts".*pad_token_id=tokenizer'):
            call(batch)
    with pytest.raises(RegistryError, match='dense_fields: field "prompts"'):
        mp.dense_fields(batch, RL_FIELDS)
    assert freeze(batch) == before


@pytest.mark.parametrize("bad", [True, "0", 1.0, torch.tensor(1), [1]], ids=repr)
def test_a_bad_pad_token_id(bad):
    batch = rollout(objects=False)
    with pytest.raises(RegistryError, match="pad_token_id is"):
        mp.nest_batch_by_mask(batch, pad_token_id=bad)
    with pytest.raises(RegistryError, match="pad_token_id is"):
        mp.compress(batch, pad_token_id=bad)


def test_a_negative_pad_token_id_is_a_number_like_any_other():
    batch = rollout(objects=False)
    for name in ("prompts", "responses", "input_ids"):
        batch[name][batch[name] == PAD] = -1
    assert_same(mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, pad_token_id=-1, strict_mask_nesting=True)), batch)


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


def test_a_pad_that_does_not_fit_is_passed_over_where_another_fits():
    mask = [[True, False], [True, True]]
    batch = TensorDict({"m": torch.tensor(mask), "x": field(mask, torch.uint8)}, batch_size=[2])
    nested = mp.nest_batch_by_mask(
        batch, {"x": MaskNestingSpec("m", [-1, 0]), "m": MaskNestingSpec("m")}, strict_mask_nesting=True
    )
    assert_same(mp.unnest_batch_by_mask(nested), batch)


def test_whole_floats_fit_integers():
    mask = [[True, False], [True, True]]
    batch = TensorDict({"m": torch.tensor(mask), "x": field(mask, torch.int16, 3)}, batch_size=[2])
    nested = mp.nest_batch_by_mask(
        batch, {"x": MaskNestingSpec("m", 3.0), "m": MaskNestingSpec("m")}, strict_mask_nesting=True
    )
    assert_same(mp.unnest_batch_by_mask(nested), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskNestingSpec([]), "mask is an empty list"),
        (lambda: MaskNestingSpec("m", []), "pad is an empty list"),
        (lambda: MaskNestingSpec("m", ragged_dim=0), "ragged_dim is 0"),
        (lambda: MaskAxis("m", form="length"), "form is 'length'"),
        (lambda: MaskAxis("m", part="first"), "part is 'first'"),
        (lambda: MaskAxis("m", part="tail"), '"m" names no field'),
        (lambda: MaskAxis("m", padded="top"), "padded is 'top'; expected one of right, left"),
        *[
            (
                lambda hint=hint: MaskNestingSpec("m", hints=("rle", hint)),
                rf"hint is '{hint}'; expected one of narrow, .*",
            )
            for hint in (
                "",
                "run",
                "RLE",
                "rle:x",
                "join",
                "concat:",
                "concat:a",
                "concat:a,b,c",
                "runs",
                "delta:a",
                "near:a,b",
            )
        ],
        (lambda: MaskNestingRegistry({"x": "response"}), "field \"x\" is 'response'"),
        (lambda: RL_FIELDS | {"x": {"mask": "response"}}, 'field "x"'),
    ],
)
def test_a_bad_entry_is_an_error_when_it_is_made(make, message):
    with pytest.raises(RegistryError, match=message):
        make()


@pytest.mark.parametrize("pad", ["EDGE", (0, -1), None], ids=repr)
def test_a_pad_of_another_type_is_a_named_error(pad):
    batch = TensorDict({"m": torch.ones(2, 3), "x": torch.ones(2, 3)}, batch_size=[2])
    with pytest.raises(RegistryError, match="pad"):
        mp.nest_batch_by_mask(batch, {"x": MaskNestingSpec("m", pad)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "sometimes"}, "verify is 'sometimes'; expected one of always, first, never"),
        ({"on_loss": "ignore"}, "on_loss is 'ignore'; expected one of keep, error, drop"),
        ({"ignore_dense_fields": "uid"}, r"Write \['uid'\]"),
    ],
)
def test_bad_options(options, message):
    batch = rollout(objects=False)
    with pytest.raises(RegistryError, match=message):
        mp.nest_batch_by_mask(batch, pad_token_id=PAD, **options)
    with pytest.raises(RegistryError, match=message):
        mp.compress(batch, pad_token_id=PAD, **options)


# -------------------------------------------------------------------- the table of RL fields

EXPECTED = {
    "prompts": ("prompt", PAD_TOKEN_ID),
    "responses": ("response", PAD_TOKEN_ID),
    "input_ids": ("sequence", PAD_TOKEN_ID),
    "attention_mask": ("sequence", 0),
    "position_ids": ("sequence", EDGE),
    "response_mask": ("response", 0),
    "loss_mask": ("response", 0),
    "rollout_log_probs": ("response", 0),
    "old_log_probs": ("response", 0),
    "ref_log_prob": ("response", 0),
    "entropys": ("response", 0),
    "values": ("response", 0),
    "sum_pi_squared": ("response", 0),
    "advantages": ("response", 0),
    "returns": ("response", 0),
    "token_level_scores": ("response", 0),
    "token_level_rewards": ("response", 0),
    "rm_scores": ("response", 0),
    "rollout_is_weights": ("response", 0),
    "routed_experts": ("sequence", 0),
    "teacher_ids": ("sequence", PAD_TOKEN_ID),
    "teacher_logprobs": ("sequence", 0),
}


def test_rl_fields_cover_every_field():
    dense = {"reward_baselines", "dummy_tensor", "multi_modal_inputs", "global_token_num"}
    assert set(RL_FIELDS) == {*EXPECTED, *dense}
    for name, (mask, pad) in EXPECTED.items():
        assert RL_FIELDS[name].masks[0] == mask, name
        assert RL_FIELDS[name].pads[0] == pad, name
    for name in dense:
        assert RL_FIELDS[name].masks == (), name
    assert set(RL_FIELDS.axes) == {"sequence", "prompt", "response"}


def test_rl_fields_leave_nothing_of_a_whole_batch_dense():
    batch = rollout(values=True)
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["routed_experts"] = of("sequence", torch.int16, 0, (2, 2))
    batch["teacher_ids"] = of("sequence", torch.int32, PAD, (2,))
    batch["teacher_logprobs"] = of("sequence", torch.float32, 0, (2,))
    tensors = {name for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert tensors == set(RL_FIELDS) - {"multi_modal_inputs", "global_token_num"}
    assert mp.dense_fields(batch, RL_FIELDS, pad_token_id=PAD) == ()
