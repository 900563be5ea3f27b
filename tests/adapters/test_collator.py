"""PackedCollator against a loop over tokens, and bit for bit against the padding-free collators of transformers and TRL
where these agree with it; where they do not, the tests say in what."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from needs import needs

from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.errors import LayoutError

MODEL_KEYS = ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def sample(tokens, seed=0, **more):
    """A sample whose first half is a prompt."""
    rng = random.Random(1000 * tokens + seed)
    ids = [rng.randrange(1, 97) for _ in range(tokens)]
    return {"input_ids": ids, "labels": [-100] * (tokens // 2) + ids[tokens // 2 :], **more}


def same_bits(one, other):
    if isinstance(one, int):
        return type(other) is int and one == other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def expected(samples, multiple_of=1, extras=()):
    """One token after the other, in lists."""
    out = {"input_ids": [], "labels": [], "position_ids": [], "seq_idx": [], **{name: [] for name in extras}}
    bounds, rows = [0], 0
    for one in samples:
        ids = [int(token) for token in one["input_ids"]]
        labels = [int(label) for label in one.get("labels", ids)]
        place = 0
        for length in one.get("seq_lengths", [len(ids)]):
            for position in range(length):
                masked = any(name in one and not one[name][place] for name in ("completion_mask", "assistant_masks"))
                out["input_ids"].append(ids[place])
                out["labels"].append(-100 if position == 0 or masked else labels[place])
                out["position_ids"].append(position)
                out["seq_idx"].append(rows)
                for name in extras:
                    out[name].append(one[name][place])
                place += 1
            if length:
                bounds.append(bounds[-1] + length)
                rows += 1
    position = 0
    while len(out["input_ids"]) % multiple_of or not out["input_ids"]:
        for name, value in {"input_ids": 0, "labels": -100, "position_ids": position, "seq_idx": rows}.items():
            out[name].append(value)
        for name in extras:
            out[name].append(0)
        position += 1
    if position:
        bounds.append(bounds[-1] + position)
    return {
        **out,
        "bounds": bounds,
        "longest": max(end - begin for begin, end in itertools.pairwise(bounds)),
    }


def check(samples, multiple_of=1, extras=()):
    before = copy.deepcopy(samples)
    got = PackedCollator(multiple_of=multiple_of, seq_idx=True, extras=extras)(samples)
    wanted = expected(samples, multiple_of, extras)
    for name in ("input_ids", "labels", "position_ids"):
        assert same_bits(got[name], torch.tensor([wanted[name]]).long()), name
    assert same_bits(got["seq_idx"], torch.tensor([wanted["seq_idx"]], dtype=torch.int32))
    for side in ("q", "k"):
        assert same_bits(got[f"cu_seq_lens_{side}"], torch.tensor(wanted["bounds"], dtype=torch.int32))
        assert type(got[f"max_length_{side}"]) is int
        assert got[f"max_length_{side}"] == wanted["longest"]
    for name in extras:
        assert same_bits(got[name], torch.tensor([wanted[name]]))
    assert set(got) == {*MODEL_KEYS, "seq_idx", *extras}
    assert [{**one} for one in samples] == before
    return got


# -------------------------------------------------------------------- against a loop


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    masks=st.sets(st.sampled_from(["labels", "completion_mask", "assistant_masks", "weights"])),
    joined=st.booleans(),
    multiple_of=st.integers(1, 7),
    seed=st.integers(0, 2**16),
)
def test_every_token_is_where_a_loop_puts_it(lengths, masks, joined, multiple_of, seed):
    rng = random.Random(seed)
    samples = []
    for tokens in lengths:
        one = {"input_ids": [rng.randrange(97) for _ in range(tokens)], "text": "left out", "length": tokens}
        for name in masks - {"weights", "labels"}:
            one[name] = [rng.randrange(2) for _ in range(tokens)]
        if "labels" in masks:
            one["labels"] = [rng.choice([-100, token]) for token in one["input_ids"]]
        if "weights" in masks:
            one["weights"] = [rng.randrange(8) / 8 for _ in range(tokens)]
        if joined:
            cuts = sorted(rng.randint(0, tokens) for _ in range(2))
            one["seq_lengths"] = [cuts[0], cuts[1] - cuts[0], tokens - cuts[1]]
        samples.append(one)
    check(samples, multiple_of, ("weights",) if "weights" in masks and any(lengths) else ())


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lists_arrays_and_tensors_are_alike(convert):
    plain = [sample(5), sample(3), sample(8)]
    given_ = [{name: convert(value) for name, value in one.items()} for one in plain]
    got, wanted = PackedCollator(multiple_of=4)(given_), PackedCollator(multiple_of=4)(plain)
    assert all(same_bits(got[name], wanted[name]) for name in MODEL_KEYS)
    assert [list(one["labels"]) for one in given_] == [one["labels"] for one in plain]  # which are not written


# -------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize(("budget", "multiple_of"), [(20, 1), (20, 8), (64, 8), (9, 4)])
def test_micro_batches_hold_every_sample_once_within_the_budget(budget, multiple_of):
    samples = [sample(tokens, seed) for seed, tokens in enumerate([7, 3, 11, 1, 12, 5, 30, 2, 2])]
    plan, inputs = PackedCollator(multiple_of=multiple_of).micro_batches(samples, budget)
    assert sorted(row for rows in plan.micro_batches for row in rows) == list(range(len(samples)))
    for rows, got in zip(plan.micro_batches, inputs, strict=True):
        wanted = expected([samples[row] for row in rows], multiple_of)
        assert got["input_ids"].tolist() == [wanted["input_ids"]]
        assert got["labels"].tolist() == [wanted["labels"]]
        assert got["cu_seq_lens_q"].tolist() == wanted["bounds"]
        assert got["input_ids"].numel() <= budget or len(rows) == 1
    assert plan.oversized == [
        row for row, one in enumerate(samples) if len(one["input_ids"]) > budget // multiple_of * multiple_of
    ]


# -------------------------------------------------------------------- the collators of transformers and TRL


def flattening():
    transformers = needs("transformers")
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


def padding_free():
    return needs("trl.trainer.sft_trainer").DataCollatorForLanguageModeling(0, padding_free=True)


@pytest.mark.parametrize("fields", [("input_ids", "labels"), ("input_ids",)])
@pytest.mark.parametrize(("make", "joined"), [(flattening, False), (padding_free, False), (padding_free, True)])
def test_as_others_collate(make, joined, fields):
    samples = [{name: sample(tokens)[name] for name in fields} for tokens in (4, 1, 7, 2)]
    if joined:
        for one, lengths in zip(samples, ([1, 3], [1], [2, 2, 3], [2]), strict=True):
            one["seq_lengths"] = lengths
    theirs, ours = make()(samples), PackedCollator(seq_idx=True)(samples)
    assert set(theirs) == set(ours)
    assert all(same_bits(theirs[name], ours[name]) for name in theirs)


# -------------------------------------------------------------------- errors


def test_a_missing_extra():
    with pytest.raises(LayoutError, match=r'no field "weights"; .* remove_unused_columns=False'):
        PackedCollator(extras=("weights",))([sample(2)])


def test_real_tokens_alone_may_have_an_attention_mask():
    one = {"input_ids": [1, 2], "attention_mask": [1, 1]}
    assert set(PackedCollator()([one])) == set(MODEL_KEYS)
    assert PackedCollator(extras=["token_type_ids"])([{**one, "token_type_ids": [0, 1]}])[
        "token_type_ids"
    ].tolist() == [[0, 1]]


def test_extras_of_several_dtypes_raise_and_empty_lists_have_none() -> None:
    """A value that fits one dtype may not fit the other."""
    for one, other in (([0, 0], [0.5, -0.5]), ([True, False], [0.5, 1.0])):
        samples = [{"input_ids": [1, 2], "more": one}, {"input_ids": [3, 4], "more": other}]
        for order in (samples, samples[::-1]):
            with pytest.raises(
                LayoutError, match=r'field "more" is torch\..* in different samples; expected one dtype'
            ):
                PackedCollator(extras=("more",))(order)
    big = 16_777_217  # no float32
    samples = [{"input_ids": [1], "more": [big]}, {"input_ids": [], "more": []}]
    for order in (samples, samples[::-1]):
        assert PackedCollator(extras=("more",))(order)["more"].tolist() == [[big]]


def test_torchs_default_device_does_not_matter():
    samples = [sample(5, weights=[0.5] * 5), sample(3, 1, weights=[1.0, 2.0, 3.0])]
    collate = PackedCollator(multiple_of=16, seq_idx=True, extras=("weights",))
    want = collate(samples)
    with torch.device("meta"):
        seen = collate(samples)
    assert seen.keys() == want.keys()
    assert all(same_bits(seen[name], want[name]) for name in want)
