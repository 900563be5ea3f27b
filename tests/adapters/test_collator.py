"""PackedCollator against a loop over tokens, and bit for bit against the padding-free collators of transformers and TRL
where these agree with it; where they do not, the tests say in what."""

from __future__ import annotations

import copy
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskpack.adapters.transformers import collator
from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.errors import LayoutError, PlanError
from maskpack.planning import PlanOptions

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


def test_an_example_by_hand():
    got = PackedCollator(multiple_of=4)(
        [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, {"input_ids": [8, 9], "completion_mask": [1, 1]}]
    )
    assert got["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert got["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert got["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    assert got["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert got["max_length_q"] == 3
    assert "seq_idx" not in got


def test_the_tensors_of_a_sample_are_not_written():
    ids = torch.tensor([1, 2, 3])
    PackedCollator()([{"input_ids": ids, "labels": ids, "completion_mask": [0, 0, 1]}])
    assert ids.tolist() == [1, 2, 3]


def test_it_imports_no_framework():
    source = Path(collator.__file__).read_text()
    assert not re.search(r"^\s*(?:import|from) (?:transformers|trl|accelerate)", source, re.MULTILINE)


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


def test_the_plan_knows_the_loss_tokens():
    samples = [sample(tokens) for tokens in (6, 4, 1, 9)]
    plan, inputs = PackedCollator().micro_batches(samples, 10, options=PlanOptions(num_updates=2))
    counted = [[sum(label != -100 for label in expected([samples[row]])["labels"]) for row in range(4)]]
    for update, rows_of in enumerate(plan.updates):
        total = sum(counted[0][row] for rows in rows_of for row in rows)
        for weights in plan.loss_weights("token-mean", update):
            np.testing.assert_allclose(weights, 1 / total)
    assert sum(int((got["labels"] != -100).sum()) for got in inputs) == sum(counted[0])


@pytest.mark.parametrize("budget", [3, 0, None, 7.5, True, "8"])
def test_a_budget_that_cannot_be(budget):
    with pytest.raises(PlanError, match=r"token_budget is .* and multiple_of 4; expected a whole number"):
        PackedCollator(multiple_of=4).micro_batches([sample(2)], budget)


# -------------------------------------------------------------------- transformers' collator


@pytest.fixture(scope="module")
def flattening():
    transformers = pytest.importorskip("transformers")
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


@pytest.mark.parametrize("fields", [("input_ids", "labels"), ("input_ids",)])
def test_as_transformers_flattens(flattening, fields):
    samples = [{name: sample(tokens)[name] for name in fields} for tokens in (4, 1, 7, 2)]
    theirs, ours = flattening(samples), PackedCollator(seq_idx=True)(samples)
    assert set(theirs) == set(ours)
    assert all(same_bits(theirs[name], ours[name]) for name in theirs)


def test_transformers_trains_on_masked_tokens_and_joins_rows(flattening):
    """It does not know masks, nor rows that a dataset has joined."""
    masked = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}]
    assert flattening(masked)["labels"].tolist() == [[-100, 6, 7, 8]]
    assert PackedCollator()(masked)["labels"].tolist() == [[-100, -100, 7, 8]]
    joined = [{"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2]}]
    assert flattening(joined)["cu_seq_lens_q"].tolist() == [0, 4]
    assert PackedCollator()(joined)["cu_seq_lens_q"].tolist() == [0, 2, 4]


def test_transformers_keeps_rows_without_tokens(flattening):
    """Which attention kernels refuse, and a label too many."""
    samples = [{"input_ids": [5, 6]}, {"input_ids": []}, {"input_ids": [7]}]
    theirs, ours = flattening(samples), PackedCollator()(samples)
    assert theirs["cu_seq_lens_q"].tolist() == [0, 2, 2, 3]
    assert theirs["labels"].shape == (1, 4)
    assert ours["cu_seq_lens_q"].tolist() == [0, 2, 3]
    assert ours["labels"].tolist() == [[-100, 6, -100]]


# -------------------------------------------------------------------- TRL's collator


@pytest.fixture(scope="module")
def padding_free():
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return lambda **options: DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **options)


@pytest.mark.parametrize("fields", [("input_ids", "labels"), ("input_ids",)])
@pytest.mark.parametrize("joined", [False, True])
def test_as_trl_collates(padding_free, fields, joined):
    samples = [{name: sample(tokens)[name] for name in fields} for tokens in (4, 1, 7, 2)]
    if joined:
        for one, lengths in zip(samples, ([1, 3], [1], [2, 2, 3], [2]), strict=True):
            one["seq_lengths"] = lengths
    theirs, ours = padding_free()(samples), PackedCollator(seq_idx=True)(samples)
    assert set(theirs) == set(ours)
    assert all(same_bits(theirs[name], ours[name]) for name in theirs)


def test_trl_gives_each_token_of_the_tail_a_row(padding_free):
    """Ours is one row. Neither is seen, nor trained on; the sizes are the same."""
    samples = [sample(4), sample(3)]
    theirs, ours = padding_free(pad_to_multiple_of=5)(samples), PackedCollator(multiple_of=5)(samples)
    for name in ("input_ids", "labels"):
        assert same_bits(theirs[name], ours[name])
    assert theirs["cu_seq_lens_q"].tolist() == [0, 4, 7, 8, 9, 10]
    assert ours["cu_seq_lens_q"].tolist() == [0, 4, 7, 10]
    assert theirs["position_ids"][0, 7:].tolist() == [0, 0, 0]
    assert ours["position_ids"][0, 7:].tolist() == [0, 1, 2]


def test_trl_makes_floats_of_ids_beside_a_sample_without_tokens(padding_free):
    samples = [{"input_ids": [5, 6]}, {"input_ids": []}, {"input_ids": [7]}]
    theirs, ours = padding_free()(samples), PackedCollator()(samples)
    assert theirs["input_ids"].dtype == torch.float32
    assert same_bits(theirs["input_ids"].long(), ours["input_ids"])
    assert same_bits(theirs["cu_seq_lens_q"], ours["cu_seq_lens_q"])


def test_trl_leaves_masks_to_its_trainer(padding_free):
    masked = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}]
    assert padding_free()(masked)["labels"].tolist() == [[-100, 6, 7, 8]]
    assert PackedCollator()(masked)["labels"].tolist() == [[-100, -100, 7, 8]]


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[1, 2]], "sample 0 is a list; expected a dict with input_ids"),
        ([{"labels": [1]}], 'sample 0 has no field "input_ids"; expected it beside'),
        ([{"input_ids": [[1, 2]]}], r'sample 0 has a field "input_ids" of shape \(1, 2\)'),
        ([{"input_ids": [1.0]}], 'sample 0 has a field "input_ids" of torch.float32; expected integers'),
        ([{"input_ids": ["a"]}], 'sample 0 has a field "input_ids" that is not a list of numbers'),
        ([{"input_ids": [1, None]}], 'sample 0 has a field "input_ids" that is not a list of numbers'),
        ([sample(3), {"input_ids": [1, 2], "labels": [1]}], r'sample 1 has a field "labels" of shape \(1,\); .*\(2,\)'),
        ([{"input_ids": [1, 2], "labels": [True, False]}], "torch.bool; expected integers"),
        ([{"input_ids": [1, 2], "completion_mask": [1]}], '"completion_mask" of shape'),
        (
            [sample(3), {"input_ids": [1]}],
            r"sample 1 has the fields \['input_ids'\], sample 0 \['input_ids', 'labels'\]",
        ),
        ([{"input_ids": [1, 2], "attention_mask": [0, 1]}], "zeros in its attention_mask; expected valid tokens only"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], r"seq_lengths \[1\] and 2 tokens; expected lengths that add up"),
        ([{"input_ids": [1, 2], "seq_lengths": [3, -1]}], "expected lengths that add up"),
        ([{"input_ids": [1], "position_ids": [0]}], 'sample 0 has a field "position_ids"; expected text only'),
        ([{"input_ids": [1], "pixel_values": [0.5]}], 'sample 0 has a field "pixel_values"; expected text only'),
    ],
)
def test_samples_that_cannot_be(samples, message):
    with pytest.raises(LayoutError, match=message):
        PackedCollator()(samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple_of": 0}, "multiple_of is 0; expected a whole number"),
        ({"multiple_of": True}, "multiple_of is True"),
        ({"multiple_of": 2.0}, "multiple_of is 2.0"),
        ({"extras": "weights"}, "extras is the string 'weights'"),
        ({"extras": ("labels",)}, "extras has 'labels', which the inputs have already"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(LayoutError, match=message):
        PackedCollator(**options)


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


def test_ids_above_int64_raise() -> None:
    with pytest.raises(LayoutError, match="numbers above those of int64"):
        PackedCollator()([{"input_ids": torch.tensor([2**63 + 1], dtype=torch.uint64)}])


def test_torchs_default_device_does_not_matter():
    samples = [sample(5, weights=[0.5] * 5), sample(3, 1, weights=[1.0, 2.0, 3.0])]
    collate = PackedCollator(multiple_of=16, seq_idx=True, extras=("weights",))
    want = collate(samples)
    with torch.device("meta"):
        seen = collate(samples)
    assert seen.keys() == want.keys()
    assert all(same_bits(seen[name], want[name]) for name in want)
